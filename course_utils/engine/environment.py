"""The course's environment: a .venv at the root of the repository, made once, and what on this machine will hurt later.

Standard library only, in syntax that Python 3.7 still reads: this module runs where nothing is installed yet, and has
to refuse an old Python politely.
"""
import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import namedtuple
from importlib import import_module
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

REPO = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPO / "requirements.txt"
LOCK = REPO / "requirements.lock"
VENV = REPO / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
STAMP = VENV / "course.json"
LOG = VENV / "setup.log"
BUSY = VENV / "setup.lock"

OLDEST, NEWEST = (3, 11), (3, 14)
GB = 1e9
FULL_GB, SLIM_GB = 7, 2  # the whole set takes 5.9 GB, measured on Linux with CUDA libraries; 1.5 without them
TORCH = ("torch", "torchvision")
CUDA_LIBRARIES = r"(nvidia-.*|cuda-.*|triton)$"

# Runs inside .venv when all is installed. The .pth file lets kernels that an editor starts find course_utils; it is
# written in the encoding in which Python reads it. torch is imported so that a broken one is found here.
FINISH = """
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "course_utils.pth").write_text(sys.argv[1] + "\\n")
import torch, torchvision
"""

# What pip and venv print when they fail, and what it means; the first that matches is told.
CAUSES = (
    (r"No space left on device|Errno 28|not enough space on the disk",
     "a disk is full: packages need room in the course's folder, in the temporary folder (TMPDIR) and in pip's cache"),
    (r"ensurepip|No module named '?(venv|pip)\b",
     "this Python lacks venv, ensurepip or pip; on Debian and Ubuntu, install the package python3-venv"),
    (r"Permission denied|Access is denied|Errno 13|Read-only file system|Errno 30", "a folder is not writable"),
    (r"ResolutionImpossible|conflicting dependencies", "the requirements contradict each other or pip's constraints"),
    (r"certificate verify failed|CERTIFICATE_VERIFY_FAILED",
     "the package index's certificate is not accepted; behind an inspecting proxy, pip's setting `cert` must name its"),
    (r"name resolution|getaddrinfo failed|nodename nor servname|NewConnectionError|Connection ?(refused|reset|Error)|"
     r"ConnectTimeout|[Rr]ead timed out|ReadTimeout|ProxyError|Network is unreachable|Max retries exceeded",
     "no network, or the package index does not answer; pip's settings (find-links, index-url, proxy) are honoured"),
    (r"No matching distribution found for [^\s(]+",
     "{match} on this platform and Python; without a network, pip's find-links must name a folder that holds it"),
)


class CourseError(Exception):
    """Ends a command with one sentence to the reader and a non-zero status."""


Finding = namedtuple("Finding", "hurts text")


def say(text):
    print(text, file=sys.stderr, flush=True)


# ---- the environment ---------------------------------------------------------------------------------------------


def ensure(arguments, latest=False, torch_index=None):
    """Return where the packages are at hand; elsewhere make .venv and start the same command again inside it."""
    refuse_python(sys.version_info[:3])
    inside = Path(sys.prefix).resolve() == VENV.resolve()
    if not (latest or torch_index) and not (inside and STAMP.exists()) and satisfied(REQUIREMENTS):
        return
    try:
        if not ready(latest, torch_index):
            set_up(latest, torch_index)
    except OSError as error:
        place = error.filename or VENV
        raise CourseError(f"The set-up stopped at {place}: {error.strerror}.") from error
    if not inside:
        restart(arguments)


def refuse_python(version):
    if not OLDEST <= version[:2] <= NEWEST:
        span, found = (" to ".join("%d.%d" % v for v in (OLDEST, NEWEST))), ".".join(map(str, version))
        raise CourseError(
            f"This course needs Python {span}; this is {found} ({sys.executable}): start the command with another "
            "one, for example python3.12, which need not be your default."
        )


def satisfied(requirements):
    """Whether the running interpreter has all that `requirements` asks for: a conda environment, Colab, a container."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        try:
            from pip._vendor.packaging.requirements import Requirement
        except ImportError:
            return False
    from importlib.metadata import PackageNotFoundError, version

    for line in requirement_lines(requirements):
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            if not wanted.specifier.contains(version(wanted.name), prereleases=True):
                return False
        except PackageNotFoundError:
            return False
    return importlib.util.find_spec("torch") is not None


def requirement_lines(path):
    lines = (line.split(" #")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def package(line):
    return re.match(r"[A-Za-z0-9._-]+", line).group().lower().replace("_", "-")


def recipe(latest, torch_index):
    """What .venv is made from; the stamp keeps it, and a difference means that .venv has to be completed."""
    source = REQUIREMENTS if latest else LOCK
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    return {"latest": latest, "torch_index": torch_index, "digest": digest, "repository": str(REPO)}


def stamp():
    try:
        return dict(json.loads(STAMP.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def write_stamp(content):
    partial = STAMP.with_suffix(".part")
    partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
    os.replace(partial, STAMP)


def venv_version():
    """The version of .venv's Python, as (3, 12), or None where there is none."""
    try:
        found = re.search(r"^version\s*=\s*(\d+)\.(\d+)", (VENV / "pyvenv.cfg").read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return None
    return (int(found[1]), int(found[2])) if found and PYTHON.exists() else None


def chosen(latest, torch_index):
    """What was asked for now, or else at the last set-up."""
    if latest or torch_index:
        return latest, torch_index
    return bool(stamp().get("latest")), stamp().get("torch_index")


def ready(latest=False, torch_index=None):
    version = venv_version()
    return version is not None and stamp() == {
        **recipe(*chosen(latest, torch_index)), "python": list(version), "complete": True
    }


def set_up(latest=False, torch_index=None):
    """Make or complete .venv. The stamp is written last, so that whatever interrupts this is seen by the next start."""
    latest, torch_index = chosen(latest, torch_index)
    VENV.mkdir(exist_ok=True)
    with alone():
        if ready(latest, torch_index):  # the set-up that this one waited for has made it
            return
        slim = sys.platform != "linux" or bool(torch_index and not re.search(r"cu\d|rocm|xpu", torch_index))
        need_disk(SLIM_GB if slim else FULL_GB)
        say(f"Setting up the course in {VENV}. This is done once.")
        say(f"It takes up to {SLIM_GB} GB of disk and a few minutes." if slim else
            "It takes 6 GB of disk: a minute or two where the packages lie on this machine; otherwise about 3 GB are "
            "downloaded, several minutes.")
        made = stamp()
        write_stamp({**recipe(latest, torch_index), "complete": False})
        LOG.write_text("", encoding="utf-8")
        usable = venv_version() is not None and OLDEST <= venv_version() <= NEWEST
        if not usable or made.get("torch_index", torch_index) != torch_index or step("looking", "-m", "pip", "--version", quiet=True):
            clear()
            step("a new environment", "-m", "venv", str(VENV), python=sys.executable)
        install(latest, torch_index)
        step("trying the result", "-c", FINISH, str(REPO))
        write_stamp({**recipe(latest, torch_index), "python": list(venv_version()), "complete": True})
        say("The course is set up.")
