"""Other programs: run with limits of time and memory; nothing is left of them afterwards, whatever ended them.

Every process that a program starts inherits a mark in its environment and is found by it. A process group would not do: Jupyter's kernels
put themselves into sessions of their own.
"""
import contextlib
import dataclasses
import os
import subprocess
import threading
import time
import uuid

import psutil

from course_utils.engine.progress import REPO

MARK = "COURSE_PROCESSES"


@dataclasses.dataclass(frozen=True)
class Ended:
    status: int
    seconds: float
    stopped: str | None = None  # why it was stopped from here: "time" or "memory"


def run(command, environment=None, cwd=REPO, seconds=None, memory=None, on_line=None):
    """Run it to its end, or until a limit (seconds; bytes resident in all its processes) is passed. Its output goes where ours
    goes, or line by line to `on_line`. An exception here, Ctrl-C too, ends it with everything that it started."""
    mark = uuid.uuid4().hex
    marks = os.pathsep.join(filter(None, [os.environ.get(MARK), mark]))  # nested runs carry the outer mark too
    output = {} if on_line is None else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    began, stopped = time.monotonic(), None
    process = subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **(environment or {}), MARK: marks}, stdin=subprocess.DEVNULL,
        start_new_session=True, text=True, encoding="utf-8", errors="replace", **output,
    )
    reader = threading.Thread(target=_read, args=(process.stdout, on_line), daemon=True)
    try:
        if on_line is not None:
            reader.start()
        while not stopped and not _over(process):
            if seconds is not None and time.monotonic() - began > seconds:
                stopped = "time"
            elif memory is not None and _resident(process.pid) > memory:
                stopped = "memory"
    finally:
        end(process, mark)
        if on_line is not None:
            reader.join(5)
    return Ended(process.returncode, time.monotonic() - began, stopped)


def end(process, mark):
    """Kill the process and all that carry its mark, until none is left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        _kill(psutil.Process(process.pid).children(recursive=True))  # a browser's processes write over their environment
    process.kill()
    process.wait()
    for _ in range(20):
        left = [p for p in psutil.process_iter() if _carries(p, mark)]
        if not left:
            return
        _kill(left)


def _kill(processes):
    for p in processes:
        with contextlib.suppress(psutil.Error):
            p.kill()
    psutil.wait_procs(processes, timeout=3)


def _carries(process, mark):
    try:
        return process.status() != psutil.STATUS_ZOMBIE and mark in process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return False


def _over(process):
    try:
        process.wait(0.1)
    except subprocess.TimeoutExpired:
        return False
    return True


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
