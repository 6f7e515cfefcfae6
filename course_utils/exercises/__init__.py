"""The exercises: one module for each lesson, each ending in its EXERCISES.

A reference is the toolkit's function where there is one.
"""
