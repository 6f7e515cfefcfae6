"""The rules that every exercise of every lesson keeps; the answers to try are in exercise_answers/, a module a lesson."""

import ast
import dataclasses
import functools
import importlib
import itertools
import linecache
import pathlib

import numpy as np
import pytest
import torch
from exercise_answers import ANSWERS

from course_utils.engine import exercises as engine
from course_utils.engine.compare import difference
from course_utils.engine.exercises import Outcome, examine, registry, source_of

REPO = pathlib.Path(__file__).parents[1]
for module in sorted(pathlib.Path(__file__).parent.glob("exercise_answers/lesson_*.py")):
    importlib.import_module(f"exercise_answers.{module.stem}")

EXERCISES = registry()
every_exercise = pytest.mark.parametrize("name", EXERCISES)


@functools.lru_cache(maxsize=None)
def imported(lesson):
    """The names that the lesson's first cells import."""
    nodes = ast.parse((REPO / "notebooks" / "src" / f"{lesson}.py").read_text(encoding="utf-8")).body
    first = itertools.takewhile(lambda node: "lesson = start(" not in ast.unparse(node), nodes)
    names = {"__name__": "__main__"}
    exec(compile(ast.Module([node for node in first if isinstance(node, (ast.Import, ast.ImportFrom))], []), lesson, "exec"), names)
    return names


def from_source(name, source, lesson):
    """The function that a notebook cell with this source defines, among the names that its lesson imports."""
    names = dict(imported(lesson))
    cell = f"<cell of {name}>"
    linecache.cache[cell] = (
        len(source),
        None,
        source.splitlines(keepends=True),
        cell,
    )  # where inspect finds a notebook's source
    exec(compile(source, cell, "exec"), names)
    return names[name]


def starters(exercise):
    """Sources of the function's definitions in the lesson: one, as the learner finds it."""
    path = REPO / "notebooks" / "src" / f"{exercise.lesson}.py"
    text = path.read_text(encoding="utf-8")
    return [
        ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == exercise.name
    ]


# ── what an exercise must have ────────────────────────────────────────────────────────────────────────────────────────


@every_exercise
def test_it_has_hints_cases_and_mistakes(name):
    exercise = EXERCISES[name]
    assert len(exercise.hints) >= 2 and all(hint.endswith((".", "?", "`", ")")) for hint in exercise.hints)
    assert len(exercise.cases) >= 3 and len({case.name for case in exercise.cases}) == len(exercise.cases)
    assert all(" " in case.name and case.name[-1] not in ".:" for case in exercise.cases), (
        "a case's name is a sentence without its full stop"
    )
    assert len(exercise.mistakes) >= 2 and all(mistake.says.endswith((".", "`.")) for mistake in exercise.mistakes)
    assert {case.memory for case in exercise.cases} <= {None, "view", "copy"}


@every_exercise
def test_its_cases_make_equal_and_fresh_inputs(name):
    for case in EXERCISES[name].cases:
        one, two = case.args(), case.args()
        assert len(one) == len(two) and all(difference(a, b, strides=True) is None for a, b in zip(one, two, strict=True))
        ours = [a for a in one if isinstance(a, torch.Tensor)]
        theirs = [a.untyped_storage().data_ptr() for a in two if isinstance(a, torch.Tensor)]
        assert all(t.untyped_storage().data_ptr() not in theirs for t in ours if t.untyped_storage().nbytes())


@every_exercise
def test_it_is_tried_with_wrong_and_unusual_answers(name):
    assert len(ANSWERS[name]["wrong"]) >= 2 and ANSWERS[name]["right"]


def test_no_answer_is_left_without_an_exercise():
    assert set(ANSWERS) == set(EXERCISES)


@every_exercise
def test_every_mistake_fails_a_case_and_gets_its_own_sentence(name):
    exercise = EXERCISES[name]
    for mistake in exercise.mistakes:
        report = examine(exercise, mistake.gives)
        assert report.outcome is Outcome.WRONG and mistake.says in report.text, f"{mistake.says}\n→ {report.text}"


# ── what people hand in ───────────────────────────────────────────────────────────────────────────────────────────────


@every_exercise
def test_the_starter_is_not_attempted(name):
    sources = starters(EXERCISES[name])
    assert len(sources) == 1, "the lesson defines the exercise once"
    report = examine(EXERCISES[name], from_source(name, sources[0], EXERCISES[name].lesson))
    assert report.outcome is Outcome.NOT_ATTEMPTED


@every_exercise
def test_the_starter_is_not_accepted_when_it_cannot_be_recognised(name, monkeypatch):
    monkeypatch.setattr(engine, "is_starter", lambda exercise, function: False)
    report = examine(EXERCISES[name], from_source(name, starters(EXERCISES[name])[0], EXERCISES[name].lesson))
    assert report.outcome in (Outcome.WRONG, Outcome.RAISED)
    assert (ANSWERS[name]["broken"] or "returns nothing") in report.text


@every_exercise
def test_the_reference_is_right_as_a_cell_of_the_lesson(name):
    exercise = EXERCISES[name]
    report = examine(exercise, from_source(name, source_of(exercise), exercise.lesson))
    assert report.outcome is Outcome.RIGHT, report.text


@pytest.mark.parametrize("name, function, words", [(n, f, w) for n, a in ANSWERS.items() for f, w in a["wrong"]])
def test_a_wrong_answer_is_told_why(name, function, words):
    report = examine(EXERCISES[name], function)
    assert report.outcome in (Outcome.WRONG, Outcome.RAISED) and words in report.text, report.text
    assert "course_utils" not in report.text


@pytest.mark.parametrize("name, function", [(n, f) for n, a in ANSWERS.items() for f in a["right"]])
def test_an_unusual_right_answer_is_right(name, function):
    report = examine(EXERCISES[name], function)
    assert report.outcome is Outcome.RIGHT, report.text


# ── junk ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Nasty(Exception):
    def __str__(self):
        raise RuntimeError("no message")


class Hostile:
    def __eq__(self, other):
        raise RuntimeError("not comparable")

    __repr__ = __bool__ = __len__ = __iter__ = __eq__


class HostileTuple(tuple):
    def __len__(self):
        raise RuntimeError("no length")

    __iter__ = __getitem__ = __eq__ = __len__


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("no function of torch")


def in_itself(*args):
    knot = []
    knot.append(knot)
    return knot


def in_itself_as_tuple(*args):
    knot = []
    knot.append((knot, knot))
    return knot[0]


def raises_nasty(*args):
    raise Nasty


def raises_plainly(*args):
    raise ZeroDivisionError("by the learner")


def leaves(*args):
    raise SystemExit(3)


def loops(*args):
    while True:
        pass


def loops_and_swallows(*args):
    while True:
        try:
            while True:
                pass
        except Exception:
            pass


def recurses(*args):
    return recurses(*args)


def mutates(*args):
    for a in args:
        if isinstance(a, torch.Tensor) and a.numel() and a._is_view() is False:
            a.zero_()
    return None


JUNK = {
    "None": lambda *args: None,
    "a string": lambda *args: "tensor([1., 2.])",
    "NaN": lambda *args: float("nan"),
    "a tensor of NaN": lambda *args: torch.full((3, 4), float("nan")),
    "wrong dtype": lambda *args: torch.zeros(2, 3, dtype=torch.complex128),
    "half": lambda *args: torch.zeros((), dtype=torch.float16),
    "meta": lambda *args: torch.zeros(2, 3, device="meta"),
    "sparse": lambda *args: torch.eye(3).to_sparse(),
    "a class": lambda *args: torch.Tensor,
    "a dict": lambda *args: {"result": args},
    "its own inputs": lambda *args: args,
    "hostile": lambda *args: Hostile(),
    "a hostile tuple": lambda *args: (Hostile(), Hostile()),
    "a tuple without length": lambda *args: HostileTuple((1, 2)),
    "a tensor that allows nothing": lambda *args: torch.zeros(3).as_subclass(HostileTensor),
    "a generator": lambda *args: (a for a in args),
    "an object array": lambda *args: np.array([object(), None]),
    "huge": lambda *args: list(range(1_000_000)),
    "a huge string": lambda *args: "x" * 5_000_000,
    "a huge number": lambda *args: 10**5_000,
    "no parameters": lambda: None,
    "too many parameters": lambda a, b, c, d, e, f, g: None,
    "not a function": 3,
    "not a function either": torch.zeros(2),
    "a class as function": Hostile,
    **{
        f.__name__: f
        for f in (
            in_itself,
            in_itself_as_tuple,
            raises_nasty,
            raises_plainly,
            leaves,
            loops,
            loops_and_swallows,
            recurses,
            mutates,
        )
    },
}


@every_exercise
@pytest.mark.parametrize("junk", JUNK)
def test_junk_gets_a_message_and_never_a_traceback_of_ours(name, junk):
    exercise = dataclasses.replace(EXERCISES[name], time_limit=0.15 if junk.startswith("loops") else 2.0)
    report = examine(exercise, JUNK[junk])
    assert report.outcome in (Outcome.WRONG, Outcome.RAISED)
    assert name in report.text and len(report.text) < 4_000
    assert not any(ours in report.text for ours in ("course_utils", " in run_once", " in _run"))
    for kind, words in {
        "loops": "time limit",
        "None": "returns nothing",
        "raises_plainly": "by the learner",
        "not a function": "not a function",
    }.items():
        if junk.startswith(kind):
            assert words in report.text
