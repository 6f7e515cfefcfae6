"""start(): parameters checked, seeds set, device chosen, and a misspelt papermill parameter refused."""
import os
import subprocess
import sys

import nbformat
import pytest
import torch
from helpers import exercise, use

from course_utils.engine import session
from course_utils.engine.progress import REPO


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path, exercise())
    monkeypatch.delenv("DEVICE", raising=False)
    monkeypatch.setattr(session, "_current", {"lesson": None})


def begin(before="", call='start("99_fake")', names=None):
    """Start a lesson in a notebook whose earlier cells are `before`."""
    names = {"__name__": "__main__", "In": [""], "Out": {}} if names is None else names
    exec(f"{before}\nfrom course_utils import start\nlesson = {call}", names)
    return names["lesson"]


def test_the_lesson_that_it_returns(capsys):
    lesson = begin(call='start("99_fake", "cpu", 3, False)')
    assert (lesson.name, lesson.device, lesson.seed, lesson.quick) == ("99_fake", torch.device("cpu"), 3, False)
    assert lesson.pick("small", "large") == "large" and begin().pick("small", "large") == "small"
    assert session.current_lesson() == "99_fake"
    first = capsys.readouterr().out.splitlines()[0]
    for words in ("99_fake · cpu (", "CPU threads)", f"torch {torch.__version__}", "Python 3.", "seed 3", "full sizes"):
        assert words in first


def test_it_tells_what_is_solved(capsys):
    begin()
    assert "0 of 1 exercises solved, 0 of 0 predictions right" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_numbers():
    drawn = []
    for seed in (0, 1, 0):
        begin(call=f'start("99_fake", SEED={seed})')
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[2] != drawn[1]


def test_auto_is_the_environment_variable_then_cuda_then_the_cpu(monkeypatch):
    assert begin().device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setenv("DEVICE", "meta")
    assert begin().device.type == "meta"
    assert begin(call='start("99_fake", "cpu")').device.type == "cpu"  # a parameter goes before the environment
    monkeypatch.setenv("DEVICE", "")
    assert begin().device.type in ("cuda", "cpu")
    monkeypatch.delenv("DEVICE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="DEVICE='cuda'") if not torch.cuda.device_count() else pytest.MonkeyPatch.context():
        begin()


@pytest.mark.parametrize("device", ["cudaa", "", "gpu", "mps:9", "cuda:99", None, 5.5])
def test_a_device_that_cannot_be_used_is_refused_in_a_sentence(device, monkeypatch):
    with pytest.raises(ValueError) as caught:
        begin(call=f'start("99_fake", {device!r})')
    said = str(caught.value)
    assert said.startswith(f"DEVICE={device!r} cannot be used here: ") and "\n" not in said and len(said) < 300
    monkeypatch.setenv("DEVICE", "nonsense")
    with pytest.raises(ValueError, match="DEVICE='nonsense' cannot be used here"):
        begin()


@pytest.mark.parametrize(("call", "error", "words"), [
    ("QUICK='false'", TypeError, "QUICK is True or False, not 'false'"),
    ("QUICK=1", TypeError, "QUICK is True or False, not 1"),
    ("QUICK=None", TypeError, "QUICK is True or False, not None"),
    ("SEED='3'", TypeError, "SEED is a whole number, not '3'"),
    ("SEED=True", TypeError, "SEED is a whole number, not True"),
    ("SEED=1.5", TypeError, "SEED is a whole number, not 1.5"),
    ("SEED=-1", ValueError, "SEED lies between 0 and 2**63 - 1, not at -1"),
    ("SEED=2**64", ValueError, "SEED lies between"),
    ("SED=3", TypeError, "SED"),
])
def test_a_wrong_value_is_refused(call, error, words):
    with pytest.raises(error) as caught:
        begin(call=f'start("99_fake", {call})')
    assert words in str(caught.value)


@pytest.mark.parametrize(("cell", "words"), [
    ("SED = 3", "unknown parameter SED; did you mean SEED? A lesson takes DEVICE, SEED, QUICK."),
    ("seed = 3", "did you mean SEED?"),
    ("DEVISE = 'cpu'", "did you mean DEVICE?"),
    ("quick = False", "did you mean QUICK?"),
    ("EPOCHS = 5", "unknown parameter EPOCHS. A lesson takes DEVICE, SEED, QUICK."),
    ("LIMIT = None", "unknown parameter LIMIT."),
])
def test_an_unknown_parameter_is_refused(cell, words):
    with pytest.raises(ValueError) as caught:
        begin(cell)
    assert words in str(caught.value)


@pytest.mark.parametrize("cell", [
    "DEVICE, SEED, QUICK = 'auto', 0, True",
    "import torch.nn.functional as F\nimport numpy as np\nfrom course_utils.toolkit import tensors as T",
    "def G(): pass\nclass H: pass\nx = 5\nname = 'text'\n_ = 3\n__ = 4",
])
def test_what_a_notebook_has_before_it_starts_is_not_a_parameter(cell):
    begin(cell)


def test_starting_again_after_the_lesson_defined_names_of_its_own():
    names = {"__name__": "__main__"}
    begin(names=names)
    begin("BATCH = 64\nseeds = 5", names=names)


# ── through papermill ─────────────────────────────────────────────────────────────────────────────────────────────────


def papermill(folder, *parameters):
    notebook = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_code_cell('DEVICE = "auto"\nSEED = 0\nQUICK = True', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell('from course_utils import start\nlesson = start("01_tensors", DEVICE, SEED, QUICK)'),
    ])
    notebook.metadata.kernelspec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "in.ipynb")
    command = [sys.executable, "-m", "papermill", "in.ipynb", "out.ipynb", *parameters]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "COURSE_WORK": str(folder / "work")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return ran.returncode, ran.stderr, (folder / "out.ipynb").read_text()


@pytest.mark.parametrize(("parameters", "words"), [
    (("-p", "SED", "3"), "unknown parameter SED; did you mean SEED?"),
    (("-p", "QUICK", "false"), "QUICK is True or False, not 'false'"),
])
def test_papermill_fails_on_a_wrong_parameter(tmp_path, parameters, words):
    status, said, _ = papermill(tmp_path, *parameters)
    assert status != 0 and words in said


def test_papermill_passes_parameters_on(tmp_path):
    status, said, made = papermill(tmp_path, "-p", "SEED", "3", "-p", "QUICK", "False", "-p", "DEVICE", "cpu")
    assert status == 0, said
    assert "seed 3 " in made and "full sizes" in made
