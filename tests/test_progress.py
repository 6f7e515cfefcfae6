"""The progress file: atomic, locked, and never the reason that a lesson stops."""
import json
import random
import signal
import subprocess
import sys
import time

import pytest
from helpers import exercise, use

from course_utils.engine import progress

RECORD = """
import sys
sys.path.insert(0, sys.argv[1])
from course_utils.engine import progress
print("begun", flush=True)
for number in range(int(sys.argv[3])):
    progress.record_exercise("99_fake", f"{sys.argv[2]}{number}", "wrong")
    print(number, flush=True)
"""


@pytest.fixture
def work(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path, exercise())
    return tmp_path / "work"


def writer(name, count):
    return subprocess.Popen([sys.executable, "-c", RECORD, str(progress.REPO), name, str(count)], stdout=subprocess.PIPE, text=True)


def stored(work):
    return json.loads((work / "progress.json").read_text(encoding="utf-8"))


def test_the_folder_is_the_one_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_WORK", str(tmp_path / "x" / ".." / "y"))
    assert progress.work_folder() == tmp_path / "y"
    monkeypatch.delenv("COURSE_WORK")
    assert progress.work_folder() == progress.REPO / "work"


def test_reading_makes_nothing(work):
    assert progress.read() == progress.EMPTY
    assert not work.exists()
    progress.read()["exercises"]["x"] = 1
    assert progress.EMPTY["exercises"] == {}


def test_attempts_outcomes_hints_and_dates(work):
    for outcome in ("not attempted", "wrong", "raised"):
        progress.record_exercise("99_fake", "double", outcome)
    progress.record_hint("99_fake", "double", 2)
    progress.record_hint("99_fake", "double", 1)  # a new kernel counts from 1 again
    entry = stored(work)["exercises"]["99_fake/double"]
    assert entry == {"attempts": 2, "hints": 2, "outcome": "raised"}
    progress.record_exercise("99_fake", "double", "right")
    solved = stored(work)["exercises"]["99_fake/double"]["solved"]
    progress.record_exercise("99_fake", "double", "wrong")
    assert stored(work)["exercises"]["99_fake/double"] == {"attempts": 4, "hints": 2, "outcome": "right", "solved": solved}
    assert progress.of_lesson("99_fake") == ((1, 1), (0, 0))


def test_predictions_keep_the_first_answer(work):
    progress.record_prediction("99_fake", "How many?", False)
    progress.record_prediction("99_fake", "How many?", True)
    progress.record_prediction("99_fake", "Why?", True)
    progress.record_prediction("98_other", "Why?", True)
    assert progress.of_lesson("99_fake")[1] == (1, 2)


def test_a_kill_at_any_moment_loses_nothing_earlier(work):
    """A writer that is killed outright, again and again: the file always parses and has all that was reported as written."""
    written, chance = set(), random.Random(0)
    for turn in range(30):
        process = writer(f"turn{turn}_", 100_000)
        process.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.15))
        process.send_signal(signal.SIGKILL)
        written |= {f"99_fake/turn{turn}_{number}" for number in process.stdout.read().split()}
        process.wait()
        process.stdout.close()
        if written:
            assert written <= set(stored(work)["exercises"])
    assert len(written) > 50
    progress.record_hint("99_fake", "double", 1)
    assert {p.name for p in work.iterdir()} <= {"progress.json", ".progress.lock"}


def test_a_rest_of_a_killed_writer_is_overwritten(work):
    work.mkdir()
    (work / ".progress.tmp").write_text("{ half of a")
    progress.record_hint("99_fake", "double", 1)
    assert stored(work)["exercises"] and not (work / ".progress.tmp").exists()


def test_two_processes_at_once_lose_nothing(work):
    writers = [writer(name, 60) for name in "ab"]
    for process in writers:
        process.communicate()
        assert process.returncode == 0
    assert len(stored(work)["exercises"]) == 120


@pytest.mark.parametrize("content", [
    b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"version": 1}', b'{"exercises": [], "predictions": {}}',
    b'{"exercises": {"99_fake/double": 5}, "predictions": {}}', b'{"exercises": {"99_fake/double": {"attempts": "x"}}, "predictions": {}}',
    b'{"exercises": {}, "predictions": {"99_fake/q": "yes"}}',
])
def test_a_damaged_file_is_set_aside_with_its_content(work, capsys, content):
    work.mkdir()
    for _ in range(2):  # twice within a second
        (work / "progress.json").write_bytes(content)
        progress.record_exercise("99_fake", "double", "wrong")
        assert "progress.json was damaged; it is kept as progress.damaged-" in capsys.readouterr().err
    assert stored(work)["exercises"]["99_fake/double"]["attempts"] == 1
    aside = list(work.glob("progress.damaged-*.json"))
    assert [path.read_bytes() for path in aside] == [content, content]


def test_a_file_of_an_older_course_is_kept(work):
    work.mkdir()
    (work / "progress.json").write_text('{"exercises": {"00_gone/old": {"outcome": "right"}}, "predictions": {}, "more": 1}')
    progress.record_exercise("99_fake", "double", "wrong")
    assert stored(work)["exercises"]["00_gone/old"] == {"outcome": "right"} and stored(work)["more"] == 1


def test_what_cannot_be_written_costs_a_sentence(work, capsys, monkeypatch):
    work.write_text("a file where the folder should be")
    progress.record_exercise("99_fake", "double", "wrong")
    progress.record_hint("99_fake", "double", 1)
    progress.record_prediction("99_fake", "How many?", True)
    said = capsys.readouterr().err
    assert said.count("Progress is not saved: ") == 3 and str(work) in said and "None" not in said
    assert progress.of_lesson("99_fake") == ((0, 1), (0, 0))
    work.unlink()
    (work / "progress.json").mkdir(parents=True)
    progress.record_exercise("99_fake", "double", "wrong")
    said = capsys.readouterr().err
    assert "Progress cannot be read" in said and "Progress is not saved" in said


def test_a_lock_held_by_another_costs_a_sentence(work, capsys, monkeypatch):
    import filelock

    def held(*args, **options):
        raise filelock.Timeout("somewhere")

    monkeypatch.setattr(filelock, "FileLock", held)
    progress.record_hint("99_fake", "double", 1)
    assert "Progress is not saved: another program holds its lock. The lesson goes on." in capsys.readouterr().err


def test_the_command_tells_for_the_eye_and_as_json(work, capsys):
    progress.record_exercise("99_fake", "double", "wrong")
    progress.record_prediction("99_fake", "How many?", True)
    assert progress.report() == 0
    out = capsys.readouterr().out
    assert "99_fake: 0 of 1 exercises, 1 of 1 predictions" in out and "✗ double: wrong  (1 attempt, 0 hints)" in out
    assert progress.report(as_json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"lessons": {"99_fake": {"double": {"outcome": "wrong", "attempts": 1, "hints": 0, "solved": None}}},
                    "predictions": {"99_fake/How many?": True}}


def test_the_table_in_a_notebook(work, capsys):
    progress.record_exercise("99_fake", "double", "right")
    progress.progress()
    assert "99_fake  1 of 1" in capsys.readouterr().out
