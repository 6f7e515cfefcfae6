"""What several tests of the engine need: functions written as if in a notebook's cell, and exercises that are not the course's."""
import itertools
import linecache
import textwrap

import torch

from course_utils.engine import exercises
from course_utils.engine.exercises import Case, Exercise

_numbers = itertools.count(1)


def cell(source, names=None):
    """Run source as a notebook's cell runs: its lines can be looked up afterwards. Returns the names it defines."""
    source = textwrap.dedent(source)
    filename = f"<cell {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names = {"torch": torch} if names is None else names
    exec(compile(source, filename, "exec"), names)
    return names


def written(source, name="double"):
    """The function of that name that the source defines."""
    return cell(source)[name]


def double(x):
    """Twice x, element by element."""
    return x * 2


def exercise(solution=double, cases=None, **other):
    cases = cases or (Case("a row is doubled", lambda: (torch.tensor([1.0, 2.0, 3.0]),)),)
    other = {"lesson": "99_fake", "hints": ("Think of twos.", "Multiply by two."), "time_limit": 0.1, **other}
    return Exercise(solution=solution, cases=tuple(cases), **other)


def examine(source, ex=None, **other):
    """Judge what a learner wrote; with `other`, an exercise made for it."""
    ex = ex or exercise(**other)
    return exercises.examine(ex, written(source, ex.name))


def use(monkeypatch, tmp_path, *made):
    """The course has these exercises only, and progress goes to a scratch folder."""
    monkeypatch.setenv("COURSE_WORK", str(tmp_path / "work"))
    monkeypatch.delenv("COURSE_STRICT", raising=False)
    monkeypatch.setattr(exercises, "registry", lambda: {e.name: e for e in made})
    monkeypatch.setattr(exercises, "_hints_given", {})
