"""test: its legs, its counts and its closing line; nbval's comparison; what CI runs."""
import os
import shutil
import subprocess
import sys
import warnings

import nbformat
import pytest
import torch
import yaml

from course_utils.engine import notebooks, processes, runs, suite

REPO = notebooks.REPO
WORKFLOW = REPO / ".github" / "workflows" / "ci.yml"


def passes(leg):
    leg.passed = 3


def fails(leg):
    leg.passed, leg.failed = 1, 2


def is_not_run(leg):
    leg.not_run = "no Chromium or Chrome found"


def is_empty(leg):
    pass


@pytest.fixture
def legs(monkeypatch):
    """The command with these legs in place of its own."""
    monkeypatch.delenv("CI", raising=False)
    return lambda *made: monkeypatch.setattr(suite, "plan", lambda *_: [(run.__name__, run) for run in made])


@pytest.mark.parametrize("made, ci, status, closing, line", [
    ([passes], "", 0, "3 passed, 0 failed", "passes passed"),
    ([passes, fails], "", 1, "4 passed, 2 failed", "fails FAILED"),
    ([passes, is_not_run], "", 0, "3 passed, 0 failed", "is_not_run not run: no Chromium or Chrome found"),
    ([passes, is_not_run], "true", 1, "3 passed, 1 failed", "is_not_run not run: no Chromium or Chrome found"),
    ([passes, is_empty], "", 1, "3 passed, 1 failed", "is_empty FAILED"),
])
def test_the_last_line_counts_and_the_status_tells(legs, monkeypatch, capsys, made, ci, status, closing, line):
    legs(*made)
    monkeypatch.setenv("CI", ci)
    assert suite.test() == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == closing
    words = [row.split() for row in lines]
    assert any(row[:1] + row[5:] == line.split() for row in words), lines


def test_an_interrupt_ends_it_in_a_sentence(legs, capsys):
    def interrupted(leg):
        raise KeyboardInterrupt

    legs(interrupted, passes)
    assert suite.test() == 130
    assert "test: interrupted in the leg interrupted" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_refused(legs, capsys):
    legs(passes)
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert suite.test(device="cuda") == 2
    said = capsys.readouterr()
    assert said.err.startswith("test: DEVICE='cuda' cannot be used here") and not said.out


def test_the_legs_are_those_of_the_design(tmp_path):
    names = [name for name, _ in suite.plan(False, ["cpu", "cuda"], tmp_path)]
    assert names == ["freshness", "lint", "tests", "nbval on cpu", "nbval on cuda", "papermill on cpu",
                     "papermill on cuda", "browser"]
    assert [name for name, _ in suite.plan(True, ["cpu"], tmp_path)] == names[:4]
    assert suite.devices("cpu") == ["cpu"] and suite.devices("auto") == suite.devices(None)


def test_what_a_quick_pass_and_a_machine_without_a_gpu_leave_out_is_said(capsys):
    skipping = suite.Leg("tests", passed=1)
    skipping.skipped["no compiler"] = 2
    assert suite.summary([skipping], quick=True) == 0
    said = capsys.readouterr().out
    assert "tests: 2 skipped: no compiler" in said and "left out by --quick: papermill" in said
    assert f"{suite.cuda_cells()} cells have a part that only a CUDA device runs" in said and suite.cuda_cells() > 0


def test_pytest_is_counted_by_its_own_report(tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\ndef broken(): 1 / 0\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip(reason='too old')\ndef test_skipped(): pass\n"
    )
    leg = suite.Leg("some tests")
    suite.pytest(leg, tmp_path, str(tmp_path / "test_some.py"))
    assert (leg.passed, leg.failed, dict(leg.skipped)) == (1, 2, {"too old": 1})
    leg = suite.Leg("no tests")
    suite.pytest(leg, tmp_path, str(tmp_path / "nowhere.py"))
    assert (leg.passed, leg.failed) == (0, 1)


def test_tests_never_see_the_learners_folder():
    assert os.environ["COURSE_WORK"] != str(REPO / "work") and os.environ["COURSE_STRICT"] == ""


def test_a_deprecated_call_in_the_course_is_an_error():
    call = compile("import warnings\nwarnings.warn('old', kind)", "course.py", "exec")
    for kind in (FutureWarning, DeprecationWarning):
        with pytest.raises(kind):
            exec(call, {"__name__": "course_utils.engine.display", "kind": kind})
        with warnings.catch_warnings(record=True):
            exec(call, {"__name__": "another_package", "kind": kind})


def test_in_a_kernel_a_deprecated_call_of_a_cell_or_the_course_is_an_error_and_of_a_library_is_not():
    call = compile("import warnings\nwarnings.warn(says, kind)", "cell.py", "exec")
    kinds = (("old", FutureWarning), ("old", DeprecationWarning), ("torch.old is\nDeprecated", UserWarning))
    with warnings.catch_warnings(record=True):
        warnings.resetwarnings()
        exec(processes.STRICT)
        for says, kind in kinds:
            for module in ("__main__", "course_utils", "course_utils.toolkit.tensors"):
                with pytest.raises(kind):
                    exec(call, {"__name__": module, "says": says, "kind": kind})
            exec(call, {"__name__": "course_utilsy", "says": says, "kind": kind})
        exec(call, {"__name__": "__main__", "says": "slow", "kind": UserWarning})


def test_nbval_compares_text_and_fails_on_a_deprecated_call(tmp_path):
    def cell(source, stored):
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=stored)] if stored else []
        made = nbformat.v4.new_code_cell(source, execution_count=1, outputs=outputs)
        made.metadata["tags"] = ["nbval-check-output"]
        return made

    cells = [
        cell("import sys, warnings\nprint('same')\nprint('noise', file=sys.stderr)", "same\n"),
        cell("from IPython.display import display\nprint('same')\n"
             "display({'text/plain': 'twin', 'text/html': '<b>twin</b>', 'image/svg+xml': '<svg/>'}, raw=True)", "same\n"),
        cell("print('another')", "same\n"),
        cell("warnings.warn('torch.old is deprecated')", ""),
    ]
    cells[1].outputs.append(nbformat.v4.new_output("display_data", {"text/plain": "twin", "image/svg+xml": "<svg>old</svg>"}))
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "small.ipynb")
    leg = suite.Leg("nbval")
    suite.pytest(leg, tmp_path, "-p", "conftest", "--nbval-lax", str(tmp_path / "small.ipynb"),
                 IPYTHONDIR="", COURSE_WORK="")
    assert (leg.passed, leg.failed) == (2, 2)


def test_a_notebook_that_is_stale_fails_the_first_leg(monkeypatch, capsys):
    monkeypatch.setattr(notebooks, "lessons", lambda: ["98_a", "99_b"])
    monkeypatch.setattr(notebooks, "staleness", lambda name: "has not been built" if name == "99_b" else None)
    leg = suite.Leg("freshness")
    suite.freshness(leg)
    assert (leg.passed, leg.failed) == (1, 1) and "99_b: stale, it has not been built" in capsys.readouterr().out


def test_the_solved_notebooks_are_counted_one_by_one(monkeypatch):
    results = [runs.Result("98_a", 1.0, None), runs.Result("99_b", 1.0, "the cell …")]
    monkeypatch.setattr(runs, "run_all", lambda *_, **__: results)
    leg = suite.Leg("papermill")
    suite.papermill(leg, "cpu")
    assert (leg.passed, leg.failed) == (1, 1)


def test_a_browser_is_the_one_named_or_one_that_is_installed(tmp_path, monkeypatch):
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("COURSE_BROWSER", str(program))
    assert suite.find_browser() == str(program)
    monkeypatch.setenv("COURSE_BROWSER", str(tmp_path / "nowhere"))
    assert suite.find_browser() is None
    monkeypatch.setenv("COURSE_BROWSER", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert suite.find_browser() == str(program)


# ── what CI runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_workflow_is_valid():
    subprocess.run([sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", WORKFLOW],
                   check=True)


def test_the_workflow_covers_systems_versions_and_the_gpu():
    jobs = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["cpu"]["strategy"]["matrix"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest", "windows-latest"] and matrix["python"] == ["3.11", "3.14"]
    assert jobs["gpu"]["runs-on"] == ["self-hosted", "gpu"] and "pull_request" not in jobs["gpu"]["if"]
    said = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert len(said) == len(jobs) and all("-m course_utils test" in run for run in said)
    oldest = jobs["torch-range"]["strategy"]["matrix"]["include"][0]["pins"]
    lowest = [line for line in (REPO / "requirements.txt").read_text().splitlines() if line.startswith("torch>=")]
    assert oldest.split()[0].removesuffix(".*") == lowest[0].split(",")[0].replace(">=", "==")


@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_the_ci_script_is_executable_and_its_syntax_holds():
    script = REPO / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run([shutil.which("bash"), "-n", script], check=True)


@pytest.mark.skipif(os.name == "nt", reason="a script for bash")
def test_the_ci_script_runs_the_readmes_command_under_ci(tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPO / ".ci" / "run", tmp_path / ".ci")
    python, browser = tmp_path / "python", tmp_path / "chromium"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "CI=$CI $@"\n')
    browser.write_text("#!/bin/sh\n")
    for program in (python, browser):
        program.chmod(0o755)
    ran = subprocess.run([tmp_path / ".ci" / "run"], env={"PYTHON": str(python), "PATH": f"{tmp_path}:/usr/bin:/bin"},
                         cwd="/", capture_output=True, text=True)
    assert ran.stdout == "CI=true -m course_utils test\n", ran.stderr
