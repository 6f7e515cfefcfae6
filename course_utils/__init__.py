"""PyTorch, measured: what a lesson imports.

The names are resolved at first use, so that `import course_utils` costs nothing: the command line uses this package
before torch is installed.
"""
from importlib import import_module

_HOME = {
    "start": "engine.session",
    "check": "engine.exercises",
    "hint": "engine.exercises",
    "solution": "engine.exercises",
    "predict": "engine.predictions",
    "raises": "engine.predictions",
    "progress": "engine.progress",
    "load": "engine.data",
    "table": "engine.display",
    "bars": "engine.display",
    "images": "engine.display",
    "curves": "engine.display",
    "dots": "engine.display",
    "benchmark": "engine.timing",
    "course_map": "engine.contents",
    "explore_strides": "explorers.strides",
    "explore_memory_format": "explorers.memory_format",
    "explore_graph": "explorers.graph",
    "explore_accumulation": "explorers.accumulation",
    "explore_descent": "explorers.descent",
    "explore_schedule": "explorers.schedule",
    "explore_float": "explorers.floats",
    "explore_loss_scale": "explorers.loss_scale",
    "explore_loader": "explorers.loader",
    "explore_collate": "explorers.collate",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module 'course_utils' has no name {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"course_utils.{_HOME[name]}"), name)


def __dir__():
    return sorted(__all__)
