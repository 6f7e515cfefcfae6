"""run: small lessons under papermill, each with another fate; and what a run leaves behind: nothing."""
import subprocess
import sys
import textwrap
import time

import nbformat
import psutil
import pytest
from tqdm import tqdm

from course_utils.engine import notebooks, processes, runs

pytestmark = pytest.mark.xdist_group("runs")  # one worker runs the lessons, once

PARAMETERS = '# %% tags=["parameters"]\nDEVICE = "auto"\nQUICK = True\n'
LESSONS = {
    "90_good": """
        # %%
        import os
        print("device", DEVICE, "quick", QUICK, "strict", os.environ["COURSE_STRICT"])

        # %% tags=["exercise"]
        def total_elements(shape):
            ...

        # %%
        from course_utils import check
        check(total_elements)
        """,
    "91_raises": """
        # %%
        # a comment comes first
        raise KeyError("no such key")
        """,
    "92_deprecated": """
        # %%
        import torch
        torch.cuda.amp.autocast()
        """,
    "93_unsolved": """
        # %%
        from course_utils import check
        def total_elements(shape):
            ...
        check(total_elements)
        """,
    "94_dies": """
        # %%
        import os
        os._exit(3)
        """,
    "95_unknown_exercise": """
        # %% tags=["exercise"]
        def no_such_exercise():
            ...
        """,
    "96_warns_from_elsewhere": """
        # %%
        import warnings
        warnings.warn_explicit("old", FutureWarning, "library.py", 1, module="library")
        """,
}


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course of these lessons, in a folder of its own."""
    folder = tmp_path_factory.mktemp("course")
    for name, source in LESSONS.items():
        (folder / f"{name}.py").write_text(PARAMETERS + textwrap.dedent(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "SOURCES", folder)
        patch.setattr(runs, "RESULTS", folder / "results")
        yield folder


@pytest.fixture(scope="module")
def problems(course):
    return {result.lesson: result.problem for result in runs.run_all(notebooks.lessons(), solved=True, device="cpu")}


def test_one_that_fails_does_not_stop_the_others(problems):
    assert list(problems) == sorted(LESSONS)
    assert [name for name, problem in problems.items() if problem is None] == ["90_good"]


def test_a_problem_names_the_cell_the_error_and_the_file_with_the_rest(problems, course):
    assert "the cell '# a comment comes first' raised KeyError: 'no such key'; see " in problems["91_raises"]
    assert problems["91_raises"].endswith("91_raises_solved.log")
    assert "no such key" in (course / "results" / "91_raises_solved.log").read_text()


def test_a_deprecated_call_in_a_cell_fails(problems):
    assert "the cell 'import torch' raised FutureWarning: `torch.cuda.amp.autocast" in problems["92_deprecated"]


def test_a_deprecation_that_is_only_printed_fails_too(problems):
    assert "warns: library.py:1: FutureWarning: old" in problems["96_warns_from_elsewhere"]


def test_a_check_that_is_not_right_fails(problems):
    assert "raised AssertionError: total_elements: not attempted yet" in problems["93_unsolved"]


def test_a_kernel_that_dies_is_told(problems):
    said = problems["94_dies"]
    assert said.startswith("papermill ended with status") and "in the cell 'import os'" in said and "Kernel died" in said


def test_an_exercise_without_a_reference_is_told(problems):
    assert problems["95_unknown_exercise"].startswith("its solved notebook cannot be made")


def test_the_command_passes_parameters_and_counts(course, capsys, monkeypatch):
    bars = []
    monkeypatch.setattr(runs, "tqdm", lambda **options: bars.append(tqdm(**{**options, "disable": False})) or bars[0])
    assert runs.run(["90"], device="cpu", full=True) == 0
    assert bars[0].n == bars[0].total == 5  # every cell moved the bar
    said = capsys.readouterr().out
    assert "[1/1] 90_good: ran through" in said and "1 of 1 notebooks ran through" in said
    written = nbformat.read(course / "results" / "90_good.ipynb", as_version=4)
    outputs = [output.get("text") for cell in written.cells for output in cell.get("outputs", [])]
    assert "device cpu quick False strict \n" in outputs


def test_the_command_fails_where_a_notebook_does(course, monkeypatch, capsys):
    monkeypatch.setattr(runs, "QUICK_LIMIT", 1)
    assert runs.run(["91"]) == 1
    said = capsys.readouterr().out
    assert "stopped at its time limit of 1 s" in said and "0 of 1 notebooks ran through" in said


@pytest.mark.parametrize("arguments, says", [
    ((["42"],), "run: there is no lesson '42'; there are 90_good"),
    (([], False, "nonsense"), "run: DEVICE='nonsense' cannot be used here"),
])
def test_what_does_not_exist_is_refused_in_a_sentence(course, capsys, arguments, says):
    assert runs.run(*arguments) == 2
    assert capsys.readouterr().err.startswith(says)


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# it starts a program that leaves its group and its session, says its number, and goes on or ends
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


def gone(pid):
    for _ in range(100):  # a killed process takes a moment to end
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("sleep, limit, stopped", [("0", None, None), ("1000", 2, "time")])
def test_nothing_is_left_of_a_program_and_of_what_it_started(sleep, limit, stopped):
    lines = []
    ended = processes.run([sys.executable, "-c", PARENT, sleep], seconds=limit, on_line=lines.append)
    assert ended.stopped == stopped and (ended.status == 0) == (stopped is None)
    assert gone(int(lines[0]))


def test_an_interrupt_leaves_nothing_either():
    lines = []

    def interrupted(process):
        time.sleep(0.05)
        if lines:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(processes, "_over", interrupted)
        processes.run([sys.executable, "-c", PARENT, "1000"], on_line=lines.append)
    assert gone(int(lines[0]))


def test_a_program_that_takes_too_much_memory_is_stopped():
    eater = "import time; x = bytearray(400_000_000); x[::4096] = b'1' * len(x[::4096]); time.sleep(1000)"
    assert processes.run([sys.executable, "-c", eater], memory=200_000_000, seconds=60).stopped == "memory"


def test_a_line_without_an_end_comes_in_pieces():
    lines = []
    processes.run([sys.executable, "-c", "print('x' * 25_000, end='')"], on_line=lines.append)
    assert [len(line) for line in lines] == [10_000, 10_000, 5_000]


def test_kernels_get_nothing_of_the_learners_and_know_the_course(tmp_path):
    environment = processes.kernel_environment(tmp_path, strict=True)
    assert environment["COURSE_WORK"] == str(tmp_path) and environment["IPYTHONDIR"].startswith(str(tmp_path))
    found = subprocess.run([sys.executable, "-c", "import course_utils; print(course_utils.__file__)"], cwd=tmp_path,
                           env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(notebooks.REPO))
