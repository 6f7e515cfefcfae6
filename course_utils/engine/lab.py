"""The learner's copies of the lessons, and the JupyterLab that opens them."""
import datetime
import hashlib
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import threading
import time

import filelock
import nbformat
from nbformat.sign import NotebookNotary

from course_utils.engine.environment import REPO, CourseError, show_preflight
from course_utils.engine.notebooks import find
from course_utils.engine.progress import work_folder

LESSONS = REPO / "notebooks"
FIRST = "00_start_here.ipynb"
RECORD = ".copies.json"  # in the learner's folder: for each copy, the fingerprint of the lesson it was made from
PORT = 8888
PATIENCE = 60  # seconds that JupyterLab may take to answer


# ---- copies ------------------------------------------------------------------------------------------------------


def fingerprint(path):
    """A hash of the sources of a notebook's cells, the same after it was run; None where it cannot be read."""
    try:
        cells = nbformat.read(path, as_version=4).cells
    except Exception:  # nbformat has many ways to say that a file is damaged
        return None
    return hashlib.sha256(json.dumps([[cell.cell_type, cell.source] for cell in cells]).encode()).hexdigest()


def copy_lessons(lessons, work):
    """Bring `work` up to date with the folder `lessons`; returns sentences about what was done or left.

    A copy is replaced by a newer lesson only while its cells are as they were copied: an answer is never overwritten.
    """
    said = []
    with recorded(work) as record:
        for lesson in sorted(lessons.glob("[0-9][0-9]_*.ipynb")):
            name, copy, newest = lesson.stem, work / lesson.name, fingerprint(lesson)
            present = fingerprint(copy) if copy.exists() else None
            if not copy.exists():
                place(lesson, copy)
            elif present == newest:
                pass  # as it should be, with the outputs of the learner's own runs
            elif record.get(name) == newest:
                continue  # answered, and there is nothing newer
            elif present is None or present != record.get(name):
                said.append(f"{name}: the lesson has changed since your copy was made; your copy has your answers and "
                            f"stays. `python -m course_utils reset {name[:2]}` gives you the new one and keeps yours.")
                continue
            else:
                place(lesson, copy)
                said.append(f"{name} was replaced by its newer version; you had not changed it.")
            record[name] = newest
    return said


class recorded:
    """The record of copies, for reading and changing: one process at a time, written in one move."""

    def __init__(self, work):
        work.mkdir(parents=True, exist_ok=True)
        self.path, self.lock = work / RECORD, filelock.FileLock(work / f"{RECORD}.lock")

    def __enter__(self):
        self.lock.acquire()
        try:
            self.content = dict(json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # lost or damaged: then every changed copy counts as answered
            self.content = {}
        return self.content

    def __exit__(self, *error):
        try:
            partial = self.path.with_suffix(".part")
            partial.write_text(json.dumps(self.content, indent=1), encoding="utf-8")
            os.replace(partial, self.path)
        finally:
            self.lock.release()


def place(lesson, copy):
    """Copy a lesson in one move, and sign it, so that Jupyter shows its pictures before anything has run."""
    partial = copy.with_suffix(".part")
    shutil.copyfile(lesson, partial)
    os.replace(partial, copy)
    try:
        notary = NotebookNotary()
        notary.sign(nbformat.read(copy, as_version=4))
        notary.store.close()
    except Exception as error:  # a home that cannot be written to: the lesson works, pictures appear when cells run
        print(f"{copy.name} could not be signed ({error}): its stored pictures show only after its cells have run.")


def reset(words, lessons=None, work=None):
    """The command `reset`: a fresh copy of each lesson named, the old one kept under a dated name."""
    lessons, work = lessons or LESSONS, work or work_folder()
    try:
        names = find(words)
    except ValueError as error:
        raise CourseError(f"{str(error)[0].upper()}{str(error)[1:]}.") from error
    with recorded(work) as record:
        for name in names:
            lesson, copy = lessons / f"{name}.ipynb", work / f"{name}.ipynb"
            if not lesson.exists():
                raise CourseError(f"{lesson} does not exist yet: `python -m course_utils build {name[:2]}` makes it.")
            kept = keep(copy) if copy.exists() else None
            place(lesson, copy)
            record[name] = fingerprint(lesson)
            print(f"{copy} is fresh." + (f" Your old copy is {kept.name} beside it." if kept else ""))
    return 0


def keep(copy):
    """Move a copy to a name with the present time in it, a free one: under the lock of `recorded`."""
    moment = datetime.datetime.now()
    while (kept := copy.with_name(f"{copy.stem}.{moment:%Y-%m-%d-%H%M%S}.ipynb")).exists():
        moment += datetime.timedelta(seconds=1)
    return copy.rename(kept)


# ---- JupyterLab --------------------------------------------------------------------------------------------------


def lab(browser=True, port=None):
    """The command `lab`: JupyterLab on the learner's copies until Ctrl-C, reached from this machine with its token."""
    work = work_folder()
    show_preflight()
    for sentence in copy_lessons(LESSONS, work):
        print(sentence)
    if not (work / FIRST).exists():
        raise CourseError(f"There are no lessons in {LESSONS}: `python -m course_utils build` makes them.")

    os.environ["COURSE_WORK"] = str(work)  # for kernels, whose working folder is another
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # this interpreter's kernel before one in the home folder
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning about frozen modules in every kernel
    quiet_news(work / ".jupyter")
    port, token = free_port(port or PORT), secrets.token_urlsafe(24)
    threading.Thread(target=announce, args=(port, token, work), daemon=True).start()
    serve(work, port, token, browser)
    print("JupyterLab has ended; your work is in", work)
    return 0


def serve(work, port, token, browser):
    """Run JupyterLab in this process. These settings, as arguments, win over the user's own; all others stay theirs."""
    from jupyterlab.labapp import LabApp

    settings = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.base_url": "/",
        "ServerApp.certfile": "",
        "ServerApp.root_dir": work,
        "ServerApp.open_browser": browser,
        "ServerApp.allow_root": True,
        "Application.log_level": "ERROR",
        "IdentityProvider.token": token,
        "LabApp.default_url": f"/lab/tree/{FIRST}",
        "LabApp.workspaces_dir": work / ".jupyter" / "workspaces",  # open tabs, apart from those of the user's own work
    }
    server = LabApp.initialize_server([f"--{name}={value}" for name, value in settings.items()])
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Ctrl-C, kill, a closed terminal: end the kernels, then the server
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: server.stop(from_signal=True))
    server.start()


def quiet_news(folder):
    """Make "no" the default answer to JupyterLab's question about news; what the user has chosen still wins."""
    defaults = folder / "labconfig" / "default_setting_overrides.json"
    defaults.parent.mkdir(parents=True, exist_ok=True)
    notification = {"fetchNews": "false", "checkForUpdates": False}
    defaults.write_text(json.dumps({"@jupyterlab/apputils-extension:notification": notification}), encoding="utf-8")
    others = os.environ.get("JUPYTER_CONFIG_PATH")
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, [str(folder), others]))


def announce(port, token, work):
    """Print the address once the server answers."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/api")
            if connection.getresponse().status == 200:
                print(f"JupyterLab is open on {work}; Ctrl-C here ends it. Its address:", flush=True)
                print(f"http://127.0.0.1:{port}/lab/tree/{FIRST}?token={token}", flush=True)
                return
        except (OSError, http.client.HTTPException):
            time.sleep(0.1)


def free_port(first):
    """`first`, or the next port that nothing listens on."""
    for port in range(first, min(first + 100, 65536)):
        with socket.socket() as probe:
            if os.name != "nt":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise CourseError(f"No free port from {first} on: choose another with --port.")
