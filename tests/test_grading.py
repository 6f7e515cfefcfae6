"""grade: a folder of submissions as a teacher gets them, good, bad, and dangerous by accident."""
import contextlib
import csv
import hashlib
import io
import json
import sys

import nbformat
import pytest

from course_utils.engine import grading, notebooks

pytestmark = pytest.mark.xdist_group("grading")  # one worker grades, once

START = 'from course_utils import check, start\nlesson = start("00_start_here")'
RIGHT = "import math\ndef total_elements(shape):\n    return math.prod(shape)"
WRONG = "def total_elements(shape):\n    return sum(shape)"
FORGED = {"version": 1, "predictions": {}, "exercises": {"00_start_here/total_elements": {"outcome": "right"}}}
FORGE = f"import os\nopen(os.path.join(os.environ['COURSE_WORK'], 'progress.json'), 'w').write({json.dumps(FORGED)!r})"
BABY = "import time; x = bytearray(1_500_000_000); x[::4096] = b'1' * len(x[::4096]); time.sleep(99)"

# name of the submission: cells, exercises solved, how the first problem begins (None: there is none)
SUBMISSIONS = {
    "no_check_and_a_raising_cell": ([RIGHT, "1 / 0"], 1, "cell 3 raised ZeroDivisionError: division by zero"),
    "wrong_by_forged_progress": ([FORGE, WRONG], 0, "total_elements: wrong where a grid has rows times columns"),
    "helper_later": (["def total_elements(shape):\n    return p(shape)", "from math import prod as p"], 1, None),
    "spoilt_later": ([RIGHT, "math = total_elements = None"], 1, None),
    "leaves": (["exit()", "input()", "raise SystemExit", "def f(:", RIGHT], 1, "cell 2 raised SystemExit"),
    "vanishes": (["import os\nos._exit(0)", RIGHT], 0, "ended itself with status 0 in cell 2"),
    "endless": (["while True:\n    pass", RIGHT], 1, "cell 2 did not end within 15 s"),
    "hungry": (["x = []\nwhile True:\n    x.append(bytearray(50_000_000))", RIGHT], 1, "cell 2 raised MemoryError"),
    "hungry_child": ([f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BABY!r}])"], 0,
                     "stopped for the memory that it took in cell 2"),
}
if sys.platform != "linux":
    del SUBMISSIONS["hungry"]  # elsewhere the whole submission is stopped, as with hungry_child
if sys.platform == "win32":
    del SUBMISSIONS["endless"]  # no signals: it runs into the limit of the whole submission


def notebook(path, *cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)


def digest(folder):
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")
            if p.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("submissions")
    for name, (cells, _, _) in SUBMISSIONS.items():
        notebook(folder / f"{name}.ipynb", START, *cells)
    notebook(folder / "ann" / "00_start_here.ipynb", RIGHT)  # the lesson is in its file's name alone
    notebook(folder / "ann" / "notes.ipynb", "1 + 1")
    notebook(folder / "ann" / ".ipynb_checkpoints" / "00_start_here-checkpoint.ipynb", START)
    (folder / "bob").mkdir()
    (folder / "damaged.ipynb").write_text('{"cells": [')
    (folder / "odd.ipynb").write_text('{"cells": 5}')
    (folder / "readme.txt").write_text("not a submission")
    return folder


@pytest.fixture(scope="module")
def graded(folder):
    """(exit status, rows by name, path of the table) of one run over all of them."""
    before, table = digest(folder), folder.parent / "build" / "grades.csv"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        # a cell has longer than a busy machine takes to fill the memory, or the clock would decide what stops it
        for name, value in {"TABLE": table, "CELL_LIMIT": 15, "MEMORY_LIMIT": 800_000_000}.items():
            patch.setattr(grading, name, value)
        status = grading.grade(folder, as_json=True)
    assert digest(folder) == before, "a submission was changed"
    return status, {row["submission"]: row for row in json.loads(printed.getvalue())}, table


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_each_submission_is_judged_by_what_it_defines(graded, name):
    _, solved, problem = SUBMISSIONS[name]
    row = graded[1][name]
    assert (row["lesson"], row["solved"], row["total"]) == ("00_start_here", solved, 1)
    assert row["problem"] is None if problem is None else row["problem"].startswith(problem)
    assert row["graded"] == (name not in ("vanishes", "hungry_child"))


def test_a_students_folder_is_searched_and_checkpoints_are_not_submissions(graded):
    names = sorted(graded[1])
    assert [n for n in names if n.startswith(("ann", "bob"))] == ["ann/00_start_here", "ann/notes", "bob"]
    assert graded[1]["ann/00_start_here"]["solved"] == 1
    assert graded[1]["bob"]["problem"] == "the folder holds no notebook"


def test_what_is_no_submission_is_told_in_its_row(graded):
    assert graded[1]["damaged"]["problem"] == graded[1]["odd"]["problem"] == "is not a readable notebook"
    assert graded[1]["ann/notes"]["problem"].startswith("is not a lesson with exercises")


def test_the_status_says_that_some_could_not_be_graded_and_the_table_has_all(graded):
    status, rows, table = graded
    assert status == 1
    with open(table, encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["submission"] for row in written] == list(rows)
    assert {row["submission"]: int(row["solved"]) for row in written} == {n: row["solved"] for n, row in rows.items()}


def test_the_table_for_the_eye_and_a_status_of_0(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grading, "TABLE", tmp_path / "build" / "grades.csv")
    nbformat.write(notebooks.solved("00_start_here"), tmp_path / "eve.ipynb")
    assert grading.grade(tmp_path) == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[1].split() == ["eve", "00_start_here", "1", "1"]
    assert "[1/1] eve" in said.err


def test_a_submission_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT", 0.5)
    notebook(tmp_path / "slow.ipynb", START, "import time\nwhile True:\n    time.sleep(1)")
    row = grading._grade_one(tmp_path / "slow.ipynb")
    assert row["problem"].startswith("stopped after 0.5 s") and not row["graded"]


def test_a_folder_without_submissions_is_refused(tmp_path, capsys):
    (tmp_path / "readme.txt").write_text("nothing here")
    assert grading.grade(tmp_path) == 2
    assert capsys.readouterr().err == f"grade: {tmp_path} holds no submission\n"
    assert grading.grade(tmp_path / "nowhere") == 2
    assert capsys.readouterr().err == f"grade: {tmp_path / 'nowhere'} is not a folder\n"


@pytest.mark.parametrize("source, name, lesson", [
    ('start("01_tensors", DEVICE)', "mine", "01_tensors"),
    ("lesson = start( '01_tensors')", "00_start_here", "01_tensors"),
    ('# start("01_tensors")', "00_start_here (copy)", "00_start_here"),
    ("1 + 1", "mine", None),
])
def test_the_lesson_is_the_one_started_or_else_the_one_in_the_name(source, name, lesson):
    assert grading.lesson_of([source], f"{name}.ipynb", ["00_start_here", "01_tensors"]) == lesson
