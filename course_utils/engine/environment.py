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
    made = False
    try:
        if not ready(latest, torch_index):
            set_up(latest, torch_index)
            made = True
    except OSError as error:
        place = error.filename or VENV
        raise CourseError(f"The set-up stopped at {place}: {error.strerror}.") from error
    if made or not inside:
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
    """The version of .venv's Python, as [3, 12], or None where there is none."""
    try:
        found = re.search(r"^version\s*=\s*(\d+)\.(\d+)", (VENV / "pyvenv.cfg").read_text(encoding="utf-8"), re.M)
    except (OSError, ValueError):
        return None
    return [int(found[1]), int(found[2])] if found and PYTHON.exists() else None


def chosen(latest, torch_index):
    """What was asked for now, or else at the last set-up."""
    if latest or torch_index:
        return latest, torch_index
    return bool(stamp().get("latest")), stamp().get("torch_index")


def ready(latest=False, torch_index=None):
    version = venv_version()
    wanted = {**recipe(*chosen(latest, torch_index)), "python": version, "complete": True}
    return version is not None and stamp() == wanted


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
        if not usable() or made.get("torch_index", torch_index) != torch_index:
            clear()
            base = getattr(sys, "_base_executable", None) or sys.executable
            step("making an environment", [base, "-m", "venv", str(VENV)])
        install(latest, torch_index)
        step("trying the result", [str(PYTHON), "-c", FINISH, str(REPO)])
        write_stamp({**recipe(latest, torch_index), "python": venv_version(), "complete": True})
        say("The course is set up.")


def install(latest, torch_index):
    pip = [str(PYTHON), "-m", "pip", "install", "--progress-bar", "off"]
    source = REQUIREMENTS if latest else LOCK
    if not torch_index:
        step("installing", pip + (["--upgrade"] if latest else []) + ["-r", str(source)])
        return
    # torch alone from its own index; then everything else, where pip finds torch present and adds only the libraries
    # that this build of it asks for, instead of the CUDA libraries that the lock names for the default build.
    lines = requirement_lines(source)
    torch = [line for line in lines if package(line) in TORCH]
    step("installing torch from its own index", pip + ["--upgrade", "--index-url", torch_index, "--no-deps"] + torch)
    rest = VENV / "rest.txt"
    rest.write_text("\n".join(line for line in lines if not re.match(CUDA_LIBRARIES, package(line))), encoding="utf-8")
    step("installing the rest", pip + ["-r", str(rest)])


@contextlib.contextmanager
def alone():
    """One set-up at a time. The system frees the lock when its last holder ends; pip inherits it, so that a pip whose
    parent was killed keeps the next set-up waiting until it is done."""
    with open(BUSY, "a") as handle:
        if fcntl:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("Another set-up of this course is at work here: waiting for it.")
                fcntl.flock(handle, fcntl.LOCK_EX)
            os.set_inheritable(handle.fileno(), True)
        yield


def usable():
    """Whether .venv has a Python of the right version, with a pip that runs."""
    version = venv_version()
    if version is None or not OLDEST <= tuple(version) <= NEWEST:
        return False
    return subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True).returncode == 0


def clear():
    for path in VENV.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path not in (STAMP, LOG, BUSY):
            path.unlink()


def need_disk(gigabytes):
    there = sum(os.lstat(os.path.join(place, name)).st_size for place, _, names in os.walk(VENV) for name in names)
    free, missing = shutil.disk_usage(REPO).free / GB, gigabytes - there / GB
    if free < missing:
        raise CourseError(f"Too little disk: set-up needs {missing:.1f} GB in {REPO}, and {free:.1f} GB are free.")


def step(doing, command):
    """Run one command of the set-up: a line to the reader, its output to the log, one sentence if it fails."""
    say(f"  {doing} …")
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    output = []
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", env=environment, close_fds=False)
    try:
        with open(LOG, "a", encoding="utf-8") as log:
            for line in process.stdout:
                output.append(line)
                log.write(line)
                log.flush()
                sign_of_life(line)
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code:
        raise CourseError(f"The set-up failed while {doing}: {cause(''.join(output), code)}. The details are in {LOG}.")


def sign_of_life(line):
    large = re.match(r"\s*Downloading (\S+?)-(\S+?)-\S* \((\d{3,}\.\d MB|[\d.]+ GB)\)", line)
    if large:
        say("    downloading {} {}, {}".format(*large.groups()))
    elif line.startswith("Installing collected packages"):
        say(f"    unpacking {line.count(',') + 1} packages")


def cause(output, code):
    for pattern, sentence in CAUSES:
        found = re.search(pattern, output)
        if found:
            return sentence.format(match=found.group())
    if code < 0:
        return f"it was ended by signal {-code} (9 is often: out of memory)"
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["it gave no reason"]
    return ([line for line in lines if line.startswith("ERROR")] or lines)[-1].rstrip(".")


def restart(arguments):
    """The same command inside .venv; on Windows in a child, since exec there does not wait."""
    command = [str(PYTHON), "-m", "course_utils", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        os.execv(command[0], command)
    child = subprocess.Popen(command)
    while True:
        try:
            sys.exit(child.wait())
        except KeyboardInterrupt:  # Ctrl-C reaches the child too, which ends as it sees fit
            pass


# ---- what will hurt later ----------------------------------------------------------------------------------------


def preflight():
    """Findings about this machine, for the lessons to come; the environment is ready when this is called."""
    checks = (disk, memory, shared_memory, cores, gpu, start_method, compiler)
    return [found for found in (check() for check in checks) if found]


def show_preflight():
    print("This machine (! marks what will hurt later):")
    for hurts, text in preflight():
        print("  {} {}".format("!" if hurts else "-", text))
    sys.stdout.flush()


def finding(fact, harm=None):
    return Finding(bool(harm), f"{fact}: {harm}" if harm else fact)


def disk():
    free = shutil.disk_usage(REPO).free / GB
    return finding(f"disk: {free:.1f} GB free", free < 2 and "checkpoints and compiled kernels may not fit")


def memory():
    from psutil import virtual_memory

    free = virtual_memory().available / GB
    limit = container_limit()
    where = ""
    if limit is not None and limit < free:
        free, where = limit, " (this container's limit)"
    return finding(f"memory: {free:.1f} GB available{where}", free < 3 and "a kernel that needs more is killed")


def container_limit(root=Path("/sys/fs/cgroup")):
    """Bytes (in GB) that a control group leaves to this process, or None."""
    try:
        limit, used = ((root / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return (int(limit) - int(used)) / GB
    except (OSError, ValueError):  # no control group, or "max"
        return None


def shared_memory(place="/dev/shm"):
    if not sys.platform.startswith("linux"):
        return None
    try:
        size = shutil.disk_usage(place).total
    except OSError:
        return finding(f"{place}: none", "DataLoader workers hand their batches over there (lesson 05)")
    harm = ("a DataLoader worker whose batches do not fit in it fails (lesson 05); a container gets more with "
            "--shm-size=1g")
    return finding(f"{place}: {size / GB:.2f} GB", size < 500e6 and harm)


def cores():
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return finding(f"cores: {count}", count < 2 and "workers and threads have nothing to run on in parallel")


def gpu():
    from importlib.metadata import version

    query = ["nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10)
        name, free, total = answer.stdout.splitlines()[0].rsplit(", ", 2)
        free, total = int(free) / 1024, int(total) / 1024
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return finding("GPU: no NVIDIA GPU found; the lessons run on the CPU and say what a GPU would add")
    text = f"GPU: {name}, {free:.0f} of {total:.0f} GiB free"
    if version("torch").endswith("+cpu"):
        return finding(text, "the installed torch is the CPU-only build and cannot use it")
    return finding(text, free < 2 and "others use it, and lessons may run out of its memory")


def start_method():
    method = multiprocessing.get_context().get_start_method()
    text = f"multiprocessing starts processes by {method}: "
    if method == "fork":
        return finding(text + "a worker inherits what the notebook has defined")
    return finding(text + "a worker does not find what a notebook cell has defined (lesson 05)")


def compiler():
    """What torch.compile needs on a CPU: a C++ compiler, which it looks for under these names, and Python's headers."""
    name = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    if not shutil.which(name):
        return finding(f"C++ compiler: no {name}", "torch.compile fails on the CPU")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return finding(f"C++ compiler: {name}, but no Python headers", "torch.compile fails on the CPU")
    return finding(f"C++ compiler: {name}, for torch.compile")
