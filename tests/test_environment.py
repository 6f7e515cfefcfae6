"""Set-up: made once, completed when interrupted, refused in a sentence. The packages here are tiny."""
import ast
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from small_repo import ROOT, Repository, index, wheel

from course_utils.engine import environment
from course_utils.engine.environment import CourseError

posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
Disk = namedtuple("Disk", "total used free")


def ranges(lines):
    return {Requirement(line).name.lower(): Requirement(line).specifier for line in lines}


# ---- the three lists of packages ---------------------------------------------------------------------------------


def test_conda_and_pip_are_told_the_same():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    through_pip = next(entry["pip"] for entry in listed if isinstance(entry, dict))
    conda = ranges([entry for entry in listed if isinstance(entry, str)] + through_pip)
    python, _ = conda.pop("python"), conda.pop("pip")
    conda["torch"] = conda.pop("pytorch")
    assert conda == ranges(environment.requirement_lines(environment.REQUIREMENTS))
    assert [python.contains(v) for v in ("3.10", "3.11", "3.14", "3.15")] == [False, True, True, False]
    assert f'requires-python = "{python}"' in (ROOT / "pyproject.toml").read_text().replace(">=3.11,<3.15", str(python))


def test_lock_is_the_tested_set_within_the_ranges():
    lines = environment.requirement_lines(environment.LOCK)
    pins = {}
    for line in lines:
        pins.setdefault(environment.package(line), []).append(Requirement(line))
    assert str(pins["torch"][0]) == "torch==2.14.1" and str(pins["torchvision"][0]) == "torchvision==0.29.1"
    for name, allowed in ranges(environment.requirement_lines(environment.REQUIREMENTS)).items():
        for pin in pins[name]:
            assert allowed.contains(next(iter(pin.specifier)).version), pin


def test_lock_serves_every_platform_and_names_no_machine():
    text = environment.LOCK.read_text()
    assert not re.search(r"://|^-|^\s*/|file:", text, re.M)
    nvidia = [line for line in text.splitlines() if line.startswith(("nvidia-", "triton", "cuda-"))]
    assert nvidia and all("sys_platform == 'linux'" in line for line in nvidia)
    assert re.search(r"^pywinpty==.*os_name == 'nt'", text, re.M)


# ---- which Python ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version, fits", [((3, 9, 18), False), ((3, 10, 13), False), ((3, 11, 0), True),
                                           ((3, 14, 9), True), ((3, 15, 0), False), ((4, 0, 0), False)])
def test_python_versions(version, fits):
    if fits:
        environment.refuse_python(version)
    else:
        with pytest.raises(CourseError, match=f"needs Python 3.11 to 3.14; this is {'.'.join(map(str, version))}"):
            environment.refuse_python(version)


def test_newer_python_is_refused_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    monkeypatch.setattr(environment, "set_up", lambda *_: pytest.fail("set-up began"))
    with pytest.raises(CourseError, match="this is 3.15.0"):
        environment.ensure(["lab"])


@pytest.mark.parametrize("file", ["__main__.py", "__init__.py", "engine/__init__.py", "engine/environment.py"])
def test_what_an_old_python_reads_it_can_parse(file):
    ast.parse((ROOT / "course_utils" / file).read_text(encoding="utf-8"), feature_version=(3, 7))


def old_pythons():
    found = [shutil.which(f"python3.{minor}") for minor in (8, 9, 10)]
    found += [str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python")]
    for path in filter(None, found):
        question = [path, "-c", "import sys; print((3, 7) <= sys.version_info < (3, 11))"]
        if subprocess.run(question, capture_output=True, text=True).stdout.strip() == "True":
            yield path


@pytest.mark.parametrize("command", ["lab", "test", "progress"])
def test_old_python_is_refused_in_a_sentence(command):
    python = next(old_pythons(), None)
    if python is None:
        pytest.skip("no Python older than 3.11 on this machine")
    ran = subprocess.run([python, "-m", "course_utils", command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1 and ran.stdout == ""
    assert re.fullmatch(r"This course needs Python 3\.11 to 3\.14; this is 3\.(7|8|9|10)\.\d+ .*\n", ran.stderr)


# ---- set-up ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_made_once(tmp_path_factory):
    """A repository whose set-up has come as far as an environment without packages."""
    repo = Repository(tmp_path_factory.mktemp("failing")).with_wheels()
    assert repo.run("progress", PIP_FIND_LINKS=None).returncode == 1
    return repo


@pytest.fixture
def half_made(half_made_once, tmp_path):
    return half_made_once.copy(tmp_path / "copy")


def test_set_up_is_made_once_and_follows_the_lock(tmp_path):
    repo = Repository(tmp_path).with_wheels()
    first = repo.run("progress")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"ran in {repo.venv} 99.1 1.0\n"
    assert "Setting up" in first.stderr and "disk" in first.stderr

    again = repo.run("progress", PIP_FIND_LINKS=None)  # pip would find nothing now: it is not asked
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")

    python = repo.venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    elsewhere = subprocess.run([python, "-c", "import course_utils; print(course_utils.__file__)"], cwd=tmp_path,
                               capture_output=True, text=True, env=repo.environment())
    assert elsewhere.stdout.strip() == str(repo.root / "course_utils" / "__init__.py")

    lock = repo.root / "requirements.lock"
    lock.write_text(lock.read_text().replace("course-probe==1.0", "course-probe==2.0"))
    assert repo.run("progress").stdout.endswith("99.1 2.0\n")

    moved = repo.root.rename(tmp_path / "moved")
    repo.root, repo.venv = moved, moved / ".venv"
    after = repo.run("progress")
    assert after.stdout == f"ran in {repo.venv} 99.1 2.0\n" and "making an environment" not in after.stderr
    assert next(repo.venv.rglob("course_utils.pth")).read_text() == f"{moved}\n"

    next(repo.venv.glob("bin/python")).unlink()  # as when the Python it was made from has gone
    repaired = repo.run("progress")
    assert repaired.stdout == after.stdout and "making an environment" in repaired.stderr


def test_latest_takes_the_ranges_and_later_starts_keep_to_it(half_made, tmp_path):
    repo = half_made
    latest = repo.run("lab", "--latest")
    assert latest.stdout.endswith("99.1 2.0\n"), latest.stderr
    for arguments in (["lab"], ["lab", "--latest"], ["progress"]):
        later = repo.run(*arguments)
        assert later.stdout.endswith("99.1 2.0\n") and later.stderr == ""

    # torch from its own index: none of the CUDA libraries that the default build's lock names, all that this one needs
    (repo.root / "requirements.lock").write_text(
        "torch==99.1\ntorchvision==99.1\ncourse-probe==1.0\nnvidia-any==1 ; os_name != ''\ntriton==1\ncuda-any==1\n")
    builds = tmp_path / "builds"
    url = index(tmp_path / "index", [wheel(builds, "torch", "99.1+cpu", requires=["torch-needs", "course-probe"]),
                                     wheel(builds, "torchvision", "99.1+cpu")])
    wheel(repo.links, "torch-needs", "1.0")
    plain = repo.run("lab", "--torch-index", url, PIP_NO_INDEX=None)
    assert plain.stdout.endswith("99.1+cpu 1.0\n"), plain.stderr
    assert list(repo.venv.rglob("torch_needs.py")) and not list(repo.venv.rglob("nvidia*"))
    assert "course_probe-2.0" not in repo.log.read_text()  # what torch needs is taken from the lock, not its index
    assert repo.run("progress").stdout == plain.stdout


def test_an_interrupted_choice_is_remembered(half_made):
    first = half_made.run("lab", "--torch-index", "file:///nowhere", PIP_FIND_LINKS=None)
    later = half_made.run("lab", PIP_FIND_LINKS=None)
    assert first.returncode == later.returncode == 1
    assert "failed while installing torch from its own index" in later.stderr


def test_an_interpreter_that_has_everything_is_used_as_it_is(tmp_path):
    repo = Repository(tmp_path, ranges="pytest>=1\ntorch>=1 # any\nno-such-package ; python_version < '3'\n")
    ran = repo.run("reset", "77")
    assert "no lesson" in ran.stderr and not repo.venv.exists()


@pytest.mark.parametrize("line, there", [("pytest", True), ("pytest>=1,<99", True), ("pytest<1", False),
                                         ("no-such-package", False), ("no-such-package ; python_version<'3'", True)])
@pytest.mark.parametrize("hidden", [(), ("packaging.requirements",), ("packaging.requirements", "pip")])
def test_satisfied(tmp_path, line, there, hidden):
    path = tmp_path / "requirements.txt"
    path.write_text(f"# comment\n\n{line}\n")
    # in a process of its own: to import pip changes how setuptools, and so torch's benchmark, can be imported afterwards
    program = (
        f"import sys, pathlib; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        f"from course_utils.engine import environment; print(environment.satisfied(pathlib.Path({str(path)!r})))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=environment.REPO, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(there and "pip" not in hidden)


class Stalling(http.server.BaseHTTPRequestHandler):
    """A package index that answers nothing until it is let go, and then that it has nothing."""

    asked, release = threading.Event(), threading.Event()

    def do_GET(self):
        self.asked.set()
        self.release.wait(60)
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def stalling_index():
    Stalling.asked.clear()
    Stalling.release.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stalling)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield {"PIP_NO_INDEX": None, "PIP_FIND_LINKS": None, "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/"}
    Stalling.release.set()
    server.shutdown()
    server.server_close()


@posix
def test_killed_set_up_is_completed_once_its_pip_is_gone(half_made, stalling_index):
    repo = half_made
    killed = repo.start("progress", **stalling_index)
    assert Stalling.asked.wait(60)
    killed.kill()
    killed.wait()
    second = repo.start("progress")
    while "waiting" not in (line := second.stderr.readline()):
        assert line, "the second set-up did not wait for the orphaned pip"
    Stalling.release.set()
    output, errors = second.communicate(timeout=60)
    assert output == f"ran in {repo.venv} 99.1 1.0\n" and "making an environment" not in errors
    killed.stdout.close(), killed.stderr.close()


@posix
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_set_up_leaves_no_pip(half_made, stalling_index, number, status):
    repo = half_made
    process = repo.start("progress", **stalling_index)
    assert Stalling.asked.wait(60)
    process.send_signal(number)
    output, errors = process.communicate(timeout=20)  # which ends only when pip has let go of stderr, too
    assert process.returncode == status and "Traceback" not in errors and output == ""
    assert not running(repo.venv)


def running(venv):
    """The processes whose command line names this .venv."""
    lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if any(str(venv) in word for word in line)]


def test_two_at_once(tmp_path):
    repo = Repository(tmp_path).with_wheels()
    both = [repo.start("progress") for _ in range(2)]
    ended = [process.communicate(timeout=90) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert sorted("making an environment" in errors for _, errors in ended) == [False, True]


# ---- failures end in one sentence ----------------------------------------------------------------------------------


def failing(repo, **changes):
    ran = repo.run("progress", **changes)
    assert ran.returncode == 1 and ran.stdout == "" and "Traceback" not in ran.stderr
    return ran.stderr.splitlines()[-1]


def test_no_network(half_made):
    sentence = failing(half_made, PIP_NO_INDEX=None, PIP_FIND_LINKS=None, PIP_INDEX_URL="http://127.0.0.1:9/",
                       PIP_RETRIES="1")
    assert "failed while installing: no network" in sentence and str(half_made.log) in sentence
    assert "127.0.0.1" in half_made.log.read_text()


def test_package_not_in_the_folder(half_made):
    assert "No matching distribution found for torch==99.1" in failing(half_made, PIP_FIND_LINKS=None)


def test_contradicting_constraint(half_made, tmp_path):
    (tmp_path / "constraints.txt").write_text("torch<99\n")
    assert "constraints" in failing(half_made, PIP_CONSTRAINT=str(tmp_path / "constraints.txt"))


def test_torch_that_cannot_be_imported(half_made, tmp_path):
    for name in ("torchvision", "course-probe"):
        wheel(tmp_path, name, "99.1" if name == "torchvision" else "1.0")
    wheel(tmp_path, "torch", "99.1", "raise ImportError('DLL load failed')")
    sentence = failing(half_made, PIP_FIND_LINKS=str(tmp_path))
    assert "failed while trying the result: ImportError: DLL load failed" in sentence


def test_folder_not_writable(tmp_path):
    repo = Repository(tmp_path)
    repo.venv.write_text("in the way")  # root may write everywhere, so that permissions would prove nothing
    assert failing(repo) == f"The set-up stopped at {repo.venv}: File exists."


def test_permission_denied(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(environment, "set_up", refuse)
    monkeypatch.setattr(environment, "satisfied", lambda _: False)
    monkeypatch.setattr(environment, "ready", lambda *_: False)
    with pytest.raises(CourseError, match="stopped at .*: Permission denied"):
        environment.ensure(["lab"])


def test_too_little_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "VENV", tmp_path / ".venv")
    for name in ("STAMP", "LOG", "BUSY", "PYTHON"):
        monkeypatch.setattr(environment, name, tmp_path / ".venv" / name)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100e9, 98.5e9, 1.5e9))
    with pytest.raises(CourseError, match=r"Too little disk: set-up needs [27]\.0 GB .* 1\.5 GB are free"):
        environment.set_up()
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["BUSY"]


@pytest.mark.parametrize("output, words", [
    ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
    ("The virtual environment was not created successfully because ensurepip is not\navailable.", "python3-venv"),
    ("/usr/bin/python3: No module named venv", "python3-venv"),
    ("ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/x'", "not writable"),
    ("WARNING: Retrying: [Errno -3] Temporary failure in name resolution\nERROR: No matching distribution found for a",
     "no network"),
    ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "certificate"),
    ("WARNING: nothing\nERROR: Invalid requirement: 'x=1'.\nhint", "Invalid requirement: 'x=1'. See"),
    ("", "no reason"),
])
def test_causes(output, words):
    assert words in f"{environment.cause(output, 1)}. See"


def test_killed_pip_is_said():
    assert "memory" in environment.cause("Collecting torch", -9)


# ---- preflight -----------------------------------------------------------------------------------------------------


def test_preflight_names_what_hurts_and_nothing_else(monkeypatch, capsys):
    found = environment.preflight()
    assert len(found) >= 6 and all("\n" not in text for _, text in found)
    environment.show_preflight()
    assert len(capsys.readouterr().out.splitlines()) == len(found) + 1

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(64e6, 0, 64e6))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    hurts = " ".join(text for hurts, text in environment.preflight() if hurts)
    for words in ("0.1 GB free: checkpoints", "/dev/shm: 0.06 GB: a DataLoader worker", "cores: 1",
                  "torch.compile fails"):
        assert words in hurts


@pytest.mark.parametrize("free, build, words", [
    (70000, "2.14.1+cu130", "- GPU: Some GPU, 68 of 80 GiB free"),
    (1000, "2.14.1", "! GPU: Some GPU, 1 of 80 GiB free: others use it"),
    (70000, "2.14.1+cpu", "! GPU: Some GPU, 68 of 80 GiB free: the installed torch is the CPU-only build"),
])
def test_gpu(monkeypatch, free, build, words):
    answer = subprocess.CompletedProcess([], 0, f"Some GPU, {free}, 81920\n", "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    monkeypatch.setattr("importlib.metadata.version", lambda _: build)
    hurts, text = environment.gpu()
    assert f"{'!' if hurts else '-'} {text}".startswith(words)


def test_container_limit(tmp_path):
    assert environment.container_limit(tmp_path) is None
    (tmp_path / "memory.current").write_text("1000000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert environment.container_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("3000000000\n")
    assert environment.container_limit(tmp_path) == 2


def test_start_of_a_ready_environment_imports_little():
    """What a second start runs before it is in .venv: the standard library alone, and none of its slow parts."""
    code = ("import sys; from course_utils import __main__; "
            "print(sorted({'torch', 'numpy', 'packaging', 'pip', 'asyncio', 'urllib.request'} & set(sys.modules)))")
    ran = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr
