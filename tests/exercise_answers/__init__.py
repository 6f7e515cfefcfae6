"""Answers that people give: wrong ones with words that their feedback must contain, and right ones in unusual forms."""

# by the exercise's name: {"wrong": [(function, words)], "right": [function], "broken": words for a clinic's starter}
ANSWERS = {}


def _of(name):
    return ANSWERS.setdefault(name, {"wrong": [], "right": [], "broken": None})


def wrong(name, words):
    return lambda function: _of(name)["wrong"].append((function, words)) or function


def right(name):
    return lambda function: _of(name)["right"].append(function) or function


def broken(name, words):
    """What the clinic's program, handed in after an edit that repairs nothing, must be told."""
    _of(name)["broken"] = words
