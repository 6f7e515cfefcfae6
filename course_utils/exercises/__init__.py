"""The exercises: one module for each lesson, each ending in its EXERCISES. The reference solutions are the toolkit's functions where one exists."""
