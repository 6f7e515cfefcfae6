"""The command line, in processes of its own: good input, bad input, and being stopped."""
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from small_repo import ROOT, Repository

COMMANDS = ("lab", "test", "run", "progress", "reset", "build", "grade")
posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


def course(*arguments, work, **changes):
    return subprocess.run([sys.executable, "-m", "course_utils", *arguments], cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "COURSE_WORK": str(work), **changes}, timeout=100)


@pytest.fixture
def repo(tmp_path):
    """A copy of the course that finds the running interpreter sufficient, with two lessons."""
    return Repository(tmp_path, ranges="pytest\n").with_lessons("00_start_here", "01_tensors")


def test_without_a_command_it_tells_what_there_is(tmp_path):
    ran = course(work=tmp_path)
    assert ran.returncode == 0 and all(re.search(rf"^ +{name} +\S", ran.stdout, re.M) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself_with_nothing_installed(command):
    asked = [sys.executable, "-S", "-m", "course_utils", command, "--help"]
    ran = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stderr == ""
    assert ran.stdout.startswith(f"usage: python -m course_utils {command}")


@pytest.mark.parametrize("arguments, words", [
    (["lba"], "invalid choice: 'lba'"),
    (["lab", "--prot", "1"], "--prot"),
    (["lab", "--port", "0"], "'0' is not a port"),
    (["lab", "--port", "http"], "'http' is not a port"),
    (["lab", "01"], "unrecognized arguments: 01"),
    (["run", "--device", "gpu"], "'gpu' is not a device"),
    (["test", "--device", "cuda:x"], "'cuda:x' is not a device"),
    (["reset"], "NN"),
    (["grade"], "DIR"),
    (["lab", "--torch-index"], "--torch-index"),
])
def test_bad_input_is_one_sentence(tmp_path, arguments, words):
    ran = course(*arguments, work=tmp_path)
    assert ran.returncode == 2 and words in ran.stderr and ran.stderr.count("\n") == 1 and ran.stdout == ""
    assert not list(tmp_path.iterdir())


def test_progress(tmp_path):
    assert course("progress", work=tmp_path).returncode == 0
    json.loads(course("progress", "--json", work=tmp_path).stdout)


@pytest.mark.parametrize("word", ["77", "../01"])
def test_reset_of_no_lesson_names_the_lessons(repo, word):
    ran = repo.run("reset", "01", word)
    assert ran.returncode == 1 and ran.stderr.count("\n") == 1
    assert "no lesson" in ran.stderr and "00_start_here, 01_tensors" in ran.stderr
    assert not repo.work.exists()


def test_reset_keeps_every_earlier_copy(repo):
    for number, word in enumerate(("1", "01", "01_tensors")):
        ran = repo.run("reset", word)
        assert ran.returncode == 0, ran.stderr
        assert ("old copy" in ran.stdout) is (number > 0)
        (repo.work / "01_tensors.ipynb").write_text(f"answer {number}")
    kept = sorted(repo.work.glob("01_tensors.*-*-*-*.ipynb"))
    assert [path.read_text() for path in kept] == ["answer 0", "answer 1"]
    assert all(re.fullmatch(r"01_tensors\.\d{4}-\d\d-\d\d-\d{6}\.ipynb", path.name) for path in kept)
    assert not (repo.work / "00_start_here.ipynb").exists()


def test_learners_folder_can_be_elsewhere(repo, tmp_path):
    assert repo.run("reset", "0", COURSE_WORK=str(tmp_path / "mine")).returncode == 0
    assert (tmp_path / "mine" / "00_start_here.ipynb").exists() and not repo.work.exists()


def test_a_folder_that_cannot_be_used_is_named(repo, tmp_path):
    (tmp_path / "file").write_text("in the way")
    ran = repo.run("reset", "01", COURSE_WORK=str(tmp_path / "file"))
    assert ran.returncode == 1
    assert ran.stderr == f"python -m course_utils reset stopped: File exists: {tmp_path / 'file'}.\n"


def stub(repo, body):
    (repo.root / "course_utils" / "engine" / "progress.py").write_text(f"def report(as_json):\n    {body}\n")


@posix
@pytest.mark.parametrize("number, status, words", [(signal.SIGINT, 130, "\nStopped.\n"), (signal.SIGTERM, 143, "")])
def test_stopped_commands_say_so_and_show_no_traceback(repo, number, status, words):
    stub(repo, "import time; print('here', flush=True); time.sleep(60)")
    process = repo.start("progress")
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (status, words)


@posix
def test_a_reader_that_has_enough(repo):
    stub(repo, "import time\n    for n in range(10**5): print('line', n)")
    process = repo.start("progress")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(10) == 141 and process.stderr.read() == ""
    process.stderr.close()


def test_a_sentence_from_a_command_is_its_end(repo):
    stub(repo, "from course_utils.engine.environment import CourseError; raise CourseError('This will not do.')")
    ran = repo.run("progress")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", "This will not do.\n")
