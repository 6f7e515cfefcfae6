"""How the course runs: environment, exercises, predictions, progress, display, data, notebooks, grading."""
