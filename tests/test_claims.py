"""The ledger and the lessons agree: each claim is proven in a cell, each exercise can be checked, each lesson takes parameters."""
import ast
import re
import tomllib

import pytest

from course_utils.engine import notebooks
from course_utils.engine.exercises import registry

LEDGER = tomllib.loads((notebooks.REPO / "data" / "claims.toml").read_text(encoding="utf-8"))
VERDICTS = {"holds", "caveat", "outdated", "false", "measure"}
LESSONS = {name: notebooks.from_source(name).cells for name in notebooks.lessons()}
SHOWS = {"print", "display", "table", "bars", "curves", "dots", "images", "raises", "show", "predict"}


def tags(cell):
    return cell.metadata.get("tags", [])


def claims(cell):
    return [tag.removeprefix("claim-") for tag in tags(cell) if tag.startswith("claim-")]


PROOFS = [(claim, name, cell) for name, cells in LESSONS.items() for cell in cells for claim in claims(cell)]


def calls(source):
    """Names of the functions that the source calls, and "assert" where it asserts."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {getattr(node.func, "id", getattr(node.func, "attr", None)) for node in nodes if isinstance(node, ast.Call)}
    return names | ({"assert"} if any(isinstance(node, ast.Assert) for node in nodes) else set())


def shows(source):
    """Whether a cell lets the reader see something: it calls what prints or displays, or its last line is a value."""
    return bool(calls(source) & SHOWS) or isinstance(ast.parse(source).body[-1], ast.Expr)


@pytest.mark.parametrize("claim", LEDGER)
def test_an_entry_of_the_ledger_is_complete(claim):
    entry = LEDGER[claim]
    assert entry["text"].strip() and entry["seen"].strip() and entry["source"].strip()
    assert entry["verdict"] in VERDICTS


@pytest.mark.parametrize("claim", [c for c, entry in LEDGER.items() if entry["lesson"] in LESSONS])
def test_an_entry_is_proven_in_its_lesson(claim):
    cells = [cell for found, lesson, cell in PROOFS if (found, lesson) == (claim, LEDGER[claim]["lesson"])]
    assert cells, f"no cell of {LEDGER[claim]['lesson']} is tagged claim-{claim}"
    if LEDGER[claim].get("gpu"):
        assert any("cuda" in tags(cell) for cell in cells), f"{claim} needs a GPU, but none of its cells is tagged cuda"


@pytest.mark.parametrize("claim, lesson, cell", PROOFS, ids=[f"{claim}-{cell.id}" for claim, _, cell in PROOFS])
def test_a_cell_that_proves_is_in_the_ledger_asserts_and_shows(claim, lesson, cell):
    assert LEDGER.get(claim, {}).get("lesson") == lesson, f"the ledger has no {claim} for {lesson}"
    assert calls(cell.source) & {"assert", "raises"}, "it asserts nothing"
    assert shows(cell.source), "it shows nothing"


def test_every_claim_of_a_lesson_that_there_is_has_an_entry_and_none_is_lost():
    assert {claim for claim, _, _ in PROOFS} == {c for c, entry in LEDGER.items() if entry["lesson"] in LESSONS}


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_exercise_has_its_cell_and_the_next_check_is_its_own(lesson):
    order = []
    for cell in LESSONS[lesson]:
        if "exercise" in tags(cell):
            order.append(("exercise", notebooks.exercise_name(cell.source)))
        elif cell.cell_type == "code":
            assert "clinic" not in tags(cell), f"tagged clinic, but no exercise: {cell.source[:60]}"
            order += [("check", name) for name in re.findall(r"^check\((\w+)\)", cell.source, re.M)]
    names = [name for what, name in order if what == "exercise"]
    assert order == [(what, name) for name in names for what in ("exercise", "check")]
    assert sorted(names) == sorted(name for name, e in registry().items() if e.lesson == lesson)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_takes_parameters_and_starts(lesson):
    first, second = [cell for cell in LESSONS[lesson] if cell.cell_type == "code"][:2]
    assert "parameters" in tags(first)
    names = {}
    exec(first.source, names)
    assert {k: v for k, v in names.items() if k != "__builtins__"} == {"DEVICE": "auto", "SEED": 0, "QUICK": True}
    assert f'lesson = start("{lesson}", DEVICE, SEED, QUICK)' in second.source


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_cuda_cell_also_has_something_for_a_machine_without(lesson):
    for cell in LESSONS[lesson]:
        if "cuda" in tags(cell):
            branches = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.If)]
            assert any("cuda" in ast.unparse(node.test) and node.orelse for node in branches), cell.source[:80]
