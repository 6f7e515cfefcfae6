"""Other programs: run with limits of time and memory; nothing is left of them afterwards, whatever ended them.

Every process that a program starts inherits a mark in its environment and is found by it. A process group would not do:
Jupyter's kernels put themselves into sessions of their own.
"""
import contextlib
import dataclasses
import os
import pathlib
import subprocess
import threading
import time
import uuid

import psutil

from course_utils.engine.progress import REPO

MARK = "COURSE_PROCESSES"
# Run by IPython at the start of each kernel: a deprecated call in a cell or in this package is an error there and then.
# torch announces some deprecations as plain UserWarning.
STRICT = r"""
for _kind, _says in ((FutureWarning, ""), (DeprecationWarning, ""), (UserWarning, r"(?is).*\bdeprecated")):
    __import__("warnings").filterwarnings("error", _says, _kind, r"(__main__|course_utils)(\.|$)")
del _kind, _says
"""


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    seconds: float
    stopped: str | None = None  # the limit that stopped it: "time" or "memory"


def run(command, environment=None, cwd=REPO, seconds=None, memory=None, on_line=None):
    """Run it to its end or a limit: seconds, or bytes resident in all its processes. Its output goes where ours
    does, or line by line to `on_line`. An exception here (Ctrl-C) ends it with all that it started."""
    mark = uuid.uuid4().hex
    marks = os.pathsep.join(filter(None, [os.environ.get(MARK), mark]))  # a run inside a run carries both
    output = {} if on_line is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    began, stopped, reader = time.monotonic(), None, None
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **(environment or {}), MARK: marks}, stdin=subprocess.DEVNULL,
        start_new_session=True, text=True, encoding="utf-8", errors="replace", **output,
    )
    try:
        if on_line is not None:
            reader = threading.Thread(target=_read, args=(process.stdout, on_line), daemon=True)
            reader.start()
        while not stopped and not _over(process):
            if seconds is not None and time.monotonic() - began > seconds:
                stopped = "time"
            elif memory is not None and _resident(process.pid) > memory:
                stopped = "memory"
    finally:
        _end(process, mark)
        if reader:
            reader.join(5)
    return Ended(process.returncode, time.monotonic() - began, stopped)


def kernel_environment(folder, strict):
    """The environment of a process with kernels: the course at hand, nothing of the learner's (progress, IPython's own
    start-up files). With `strict`, deprecated calls are errors."""
    startup = pathlib.Path(folder, "ipython", "profile_default", "startup")
    startup.mkdir(parents=True, exist_ok=True)
    if strict:
        (startup / "strict.py").write_text(STRICT, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    return {"COURSE_WORK": str(folder), "IPYTHONDIR": str(startup.parents[1]), "PYTHONPATH": path, "COURSE_STRICT": ""}


def _end(process, mark):
    with contextlib.suppress(psutil.Error):  # first its descendants: Chromium's write over their environment
        _kill(psutil.Process(process.pid).children(recursive=True))
    process.kill()
    process.wait()
    for _ in range(100):  # again, for what was being started meanwhile
        left = [p for p in psutil.process_iter() if _carries(p, mark)]
        if not left:
            return
        _kill(left)
        time.sleep(0.05)


def _kill(processes):
    for p in processes:
        with contextlib.suppress(psutil.Error):
            p.kill()


def _carries(process, mark):
    try:
        return process.status() != psutil.STATUS_ZOMBIE and mark in process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return False


def _over(process):
    try:
        return process.wait(0.1) is not None
    except subprocess.TimeoutExpired:
        return False


def _resident(pid):
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for p in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += p.memory_info().rss
    return total


def _read(stream, on_line):
    for line in iter(lambda: stream.readline(10_000), ""):  # in pieces: a program may never end its line
        on_line(line.rstrip("\n"))
