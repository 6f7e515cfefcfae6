"""Copies of lessons, and JupyterLab started for real."""
import http.client
import json
import os
import re
import signal
import socket

import nbformat
import psutil
import pytest
import websocket
from nbformat.sign import NotebookNotary
from small_repo import Repository, notebook

from course_utils.engine import lab


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Signatures and Jupyter's own files go to a home of the test's."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "home" / "data"))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "home" / "config"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "home" / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "home" / "ipython"))


@pytest.fixture
def folders(tmp_path):
    lessons, work = tmp_path / "notebooks", tmp_path / "work"
    notebook(lessons / "00_start_here.ipynb", "1", "...")
    notebook(lessons / "01_tensors.ipynb", "2", "...")
    return lessons, work


def sources(path):
    return [cell["source"] for cell in json.loads(path.read_text())["cells"]]


def test_first_copies(folders):
    lessons, work = folders
    assert lab.copy_lessons(lessons, work) == []
    assert sources(work / "01_tensors.ipynb") == ["2", "..."]
    assert not list(work.glob("*.part"))


def test_copies_are_trusted_until_someone_else_changes_them(folders):
    lessons, work = folders
    lab.copy_lessons(lessons, work)
    copy = nbformat.read(work / "01_tensors.ipynb", as_version=4)
    notary = NotebookNotary()
    assert notary.check_signature(copy)
    copy.cells[0].source = "other"
    assert not notary.check_signature(copy)
    notary.store.close()


def test_a_run_copy_keeps_its_outputs(folders):
    lessons, work = folders
    lab.copy_lessons(lessons, work)
    copy = work / "01_tensors.ipynb"
    ran = json.loads(copy.read_text())
    ran["cells"][0]["execution_count"] = 7
    ran["cells"][0]["metadata"] = {"scrolled": True}
    copy.write_text(json.dumps(ran, indent=3))
    before = copy.read_bytes()
    assert lab.copy_lessons(lessons, work) == [] and copy.read_bytes() == before

    notebook(lessons / "01_tensors.ipynb", "2, newer", "...")
    said = lab.copy_lessons(lessons, work)
    assert said == ["01_tensors was replaced by its newer version; you had not changed it."]
    assert sources(copy) == ["2, newer", "..."]


def test_an_answer_is_never_overwritten(folders):
    lessons, work = folders
    lab.copy_lessons(lessons, work)
    copy = notebook(work / "01_tensors.ipynb", "2", "my answer")
    assert lab.copy_lessons(lessons, work) == []
    for version in ("newer", "newer still"):
        notebook(lessons / "01_tensors.ipynb", version, "...")
        said = lab.copy_lessons(lessons, work)
        assert len(said) == 1 and "your answers and stays" in said[0] and "reset 01" in said[0]
        assert sources(copy) == ["2", "my answer"]


@pytest.mark.parametrize("record", [None, "", "{", "[1]", "null"])
def test_without_its_record_a_changed_copy_counts_as_answered(folders, record):
    lessons, work = folders
    lab.copy_lessons(lessons, work)
    (work / lab.RECORD).unlink()
    if record is not None:
        (work / lab.RECORD).write_text(record)
    answered = notebook(work / "01_tensors.ipynb", "2", "my answer")
    notebook(lessons / "01_tensors.ipynb", "newer", "...")
    lab.copy_lessons(lessons, work)
    assert sources(answered) == ["2", "my answer"]
    notebook(lessons / "00_start_here.ipynb", "newer", "...")  # its copy was unchanged and got back into the record
    lab.copy_lessons(lessons, work)
    assert sources(work / "00_start_here.ipynb") == ["newer", "..."]


@pytest.mark.parametrize("damage", ["", "{", '{"cells": 3}', "\x00"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_damaged_copy_is_left_as_it_is(folders, damage, recorded):
    lessons, work = folders
    lab.copy_lessons(lessons, work)
    if not recorded:
        (work / lab.RECORD).unlink()
    copy = work / "01_tensors.ipynb"
    copy.write_text(damage)
    notebook(lessons / "01_tensors.ipynb", "newer", "...")
    lab.copy_lessons(lessons, work)
    assert copy.read_text() == damage


def test_a_home_that_cannot_be_written_to_still_gives_copies(folders, monkeypatch, capsys, tmp_path):
    lessons, work = folders
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "file"))
    lab.copy_lessons(lessons, work)
    assert (work / "01_tensors.ipynb").exists()


def test_a_busy_port_is_passed_over():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < lab.free_port(port) < port + 100


def test_keep_never_takes_a_name_twice(tmp_path):
    kept = []
    for number in range(4):
        copy = tmp_path / "01_tensors.ipynb"
        copy.write_text(str(number))
        kept.append(lab.keep(copy))
        assert not copy.exists()
    assert [path.read_text() for path in kept] == ["0", "1", "2", "3"]


# ---- JupyterLab ----------------------------------------------------------------------------------------------------


class Server:
    def __init__(self, repo, *arguments):
        self.process = repo.start("lab", "--no-browser", *arguments)
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/lab/tree/00_start_here\.ipynb\?token=(\S+)\n", line)
            if found:
                self.port, self.token = int(found[1]), found[2]
                return
        raise AssertionError(f"lab gave no address: {self.said} {self.process.stderr.read()}")

    def ask(self, path, token=None, method="GET"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Authorization": f"token {token}"} if token else {}
        connection.request(method, path, "{}" if method == "POST" else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def start_kernel(self):
        """Start one, wait until it answers (stopped earlier, it would show a traceback of its own); its process."""
        name = json.loads(self.ask("/api/kernels", self.token, "POST")[1])["id"]
        address = f"ws://127.0.0.1:{self.port}/api/kernels/{name}/channels?token={self.token}"
        channels = websocket.create_connection(address, timeout=30)
        while "idle" not in self.ask(f"/api/kernels/{name}", self.token)[1]:
            channels.recv()
        channels.close()
        (started,) = filter(is_kernel, psutil.Process(self.process.pid).children())
        return started


def is_kernel(process):
    try:
        return "ipykernel" in " ".join(process.cmdline())
    except psutil.Error:  # some other child of the server's, which has just ended
        return False


@pytest.fixture
def repo(tmp_path):
    return Repository(tmp_path, ranges="jupyterlab\n").with_lessons("00_start_here", "01_tensors")


@pytest.fixture
def server(repo):
    with socket.socket() as taken:  # a busy port to begin with
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Server(repo, "--port", str(taken.getsockname()[1]))
        server.asked_for = taken.getsockname()[1]
        yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_lab_answers_with_its_token_alone_and_ends_cleanly(server, repo, home, tmp_path, number):
    assert server.port > server.asked_for
    assert "This machine" in server.said[0]
    assert server.ask("/api/contents")[0] == server.ask("/api/contents", "wrong")[0] == 403
    assert server.ask("/lab")[0] == 302  # to the page that asks for the token
    status, listing = server.ask("/api/contents", server.token)
    assert status == 200
    assert {entry["name"] for entry in json.loads(listing)["content"]} == {"00_start_here.ipynb", "01_tensors.ipynb"}
    lesson = json.loads(server.ask("/api/contents/01_tensors.ipynb", server.token)[1])
    assert lesson["content"]["cells"][0]["metadata"]["trusted"] is True
    with socket.socket() as outside, pytest.raises(OSError):  # bound to 127.0.0.1 alone, not to every loopback address
        outside.settimeout(2)
        outside.connect(("127.0.0.2", server.port))

    settings = json.loads(server.ask("/lab/api/settings/@jupyterlab/apputils-extension:notification", server.token)[1])
    assert settings["schema"]["properties"]["fetchNews"]["default"] == "false" and settings["raw"] == "{}"

    kernel = server.start_kernel()
    environment = kernel.environ()
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(repo.root)
    assert environment["COURSE_WORK"] == str(repo.work) and server.token not in str(environment)
    assert server.token not in " ".join(psutil.Process(server.process.pid).cmdline())

    server.process.send_signal(number)
    output, errors = server.process.communicate(timeout=20)
    assert server.process.returncode == 0 and "Traceback" not in errors
    assert output == f"JupyterLab has ended; your work is in {repo.work}\n"
    assert not kernel.is_running()
    assert not list((tmp_path / "home" / "runtime").glob("jpserver-*.json"))
    with pytest.raises(OSError):
        server.ask("/api")


def test_without_lessons_lab_says_what_to_do(tmp_path):
    ran = Repository(tmp_path, ranges="jupyterlab\n").run("lab", "--no-browser")
    assert ran.returncode == 1 and "build" in ran.stderr and ran.stderr.count("\n") == 1
