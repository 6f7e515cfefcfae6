"""The command `test`: everything that CI runs, leg by leg, each streamed and timed, with one table and one line of counts at the end.

Counts come from pytest's own report files. What does not run is said, with its reason; under CI it is a failure.
"""
import collections
import contextlib
import dataclasses
import os
import pathlib
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as xml

from course_utils.engine import notebooks, processes, runs
from course_utils.engine.progress import REPO

LEG_LIMIT = 1800  # seconds
CELL_TIMEOUT = 120  # seconds; nbval notices a dead kernel only by it
BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome", "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe", r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
)


@dataclasses.dataclass
class Leg:
    name: str
    passed: int = 0
    failed: int = 0
    seconds: float = 0.0
    not_run: str | None = None  # why
    skipped: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by reason

    @property
    def result(self):
        return f"not run: {self.not_run}" if self.not_run else "FAILED" if self.failed or not self.passed else "passed"


def test(quick=False, device=None):
    """The command: returns the exit status, 0 only where all is well."""
    try:
        runs.check_device(device)
    except ValueError as error:
        print(f"test: {error}", file=sys.stderr)
        return 2
    legs = []
    with tempfile.TemporaryDirectory(prefix="course-test-", ignore_cleanup_errors=True) as scratch:
        for name, run in plan(quick, devices(device), pathlib.Path(scratch)):
            print(f"\n── {name} ──", flush=True)
            began = time.monotonic()
            try:
                leg = run(Leg(name))
            except KeyboardInterrupt:
                print(f"\ntest: interrupted in the leg {name}; nothing of it is left running", file=sys.stderr)
                return 130
            leg.seconds = time.monotonic() - began
            if leg.not_run and in_ci():
                leg.failed = 1
            legs.append(leg)
    return summary(legs, quick, device)


def plan(quick, on, scratch):
    """(name, function of a Leg) for each leg, in order."""
    yield "freshness", freshness
    yield "lint", lint
    yield "tests", lambda leg: pytest(leg, scratch, "tests", "--ignore=tests/browser", "-n", "2")
    for device in on:
        yield f"nbval on {device}", lambda leg, device=device: nbval(leg, scratch, device)
    if not quick:
        for device in on:
            yield f"papermill on {device}", lambda leg, device=device: papermill(leg, device)
        yield "browser", lambda leg: browser(leg, scratch)


def devices(asked):
    """Where the notebooks are proven: the device asked for, else the CPU, and CUDA too where there is one."""
    if asked not in (None, "auto"):
        return [asked]
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def in_ci():
    return os.environ.get("CI", "").lower() in ("1", "true")


# ── the legs ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def freshness(leg):
    for lesson in notebooks.lessons():
        why = notebooks.staleness(lesson)
        print(f"{lesson}: {'fresh' if why is None else f'stale, it {why}; `python -m course_utils build {lesson[:2]}` makes it anew'}")
        leg.passed += why is None
        leg.failed += why is not None
    return leg


def lint(leg):
    status = processes.run([sys.executable, "-m", "ruff", "check", str(REPO)]).status
    leg.passed, leg.failed = int(status == 0), int(status != 0)
    return leg


def pytest(leg, scratch, *arguments, **environment):
    """One run of pytest in the repository, its results read from its report. The tests' conftest sees to COURSE_WORK."""
    report = scratch / f"{leg.name.replace(' ', '-')}.xml"
    ended = processes.run(
        [sys.executable, "-m", "pytest", *arguments, "-q", f"--junitxml={report}"],
        {"COURSE_STRICT": "", "DEVICE": "", **environment}, seconds=LEG_LIMIT,
    )
    for case in xml.parse(report).iter("testcase") if report.is_file() else ():
        if case.find("failure") is not None or case.find("error") is not None:
            leg.failed += 1
        elif case.find("skipped") is not None:
            leg.skipped[case.find("skipped").get("message") or "no reason given"] += 1
        else:
            leg.passed += 1
    if ended.status and not leg.failed:
        why = f"stopped at its time limit of {LEG_LIMIT} s" if ended.stopped else f"pytest ended with status {ended.status}"
        print(f"{leg.name}: {why}")
        leg.failed = 1
    return leg


def nbval(leg, scratch, device):
    built = [f"notebooks/{name}.ipynb" for name in notebooks.lessons() if (notebooks.BUILT / f"{name}.ipynb").is_file()]
    if not built:
        leg.not_run = "no notebook has been built"
        return leg
    side_by_side = ["-n", "2", "--dist", "loadfile"] if len(built) > 1 else []  # two kernels on two cores: a thread for each
    threads = {"OMP_NUM_THREADS": "1"} if side_by_side else {}
    return pytest(
        leg, scratch, "--nbval-lax", f"--nbval-cell-timeout={CELL_TIMEOUT}", *built, *side_by_side, DEVICE=device, **threads
    )


def papermill(leg, device):
    results = runs.run_all(notebooks.lessons(), solved=True, device=device)
    leg.failed = sum(r.problem is not None for r in results)
    leg.passed = len(results) - leg.failed
    return leg


def browser(leg, scratch):
    program = find_browser()
    if program is None:
        leg.not_run = "no Chromium or Chrome found"
        return leg
    return pytest(leg, scratch, "tests/browser", COURSE_BROWSER=program)


def find_browser():
    """The Chromium or Chrome that the browser tests drive: $COURSE_BROWSER, an installed one, or Playwright's own; None without any."""
    wanted = os.environ.get("COURSE_BROWSER")
    for name in [wanted] if wanted else BROWSERS:
        if shutil.which(name):
            return shutil.which(name)
    with contextlib.suppress(Exception):
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            if os.path.exists(playwright.chromium.executable_path):
                return playwright.chromium.executable_path
    return None


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(legs, quick, device):
    rows = [("leg", "passed", "failed", "skipped", "seconds", "result")]
    rows += [(leg.name, leg.passed, leg.failed, leg.skipped.total(), f"{leg.seconds:.1f}", leg.result) for leg in legs]
    widths = [max(len(str(row[i])) for row in rows) for i in range(5)]
    print()
    for row in rows:
        print("  ".join([str(row[0]).ljust(widths[0]), *(str(c).rjust(w) for c, w in zip(row[1:5], widths[1:])), row[5]]))
    print()
    for leg in legs:
        for reason, count in leg.skipped.items():
            print(f"{leg.name}: {count} skipped: {reason}")
    if quick:
        print("left out by --quick: papermill on the solved notebooks, the browser tests")
    if not any(leg.name.endswith("on cuda") for leg in legs):
        print(f"{cuda_cells()} cells have a part that only a CUDA device runs")
    if device:
        print(f"the notebooks ran on {device} alone, as --device asked")
    passed, failed = sum(leg.passed for leg in legs), sum(leg.failed for leg in legs)
    print(f"\n{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def cuda_cells():
    """How many cells, in all lessons, are tagged as having real CUDA code."""
    return sum("cuda" in cell.metadata.get("tags", []) for name in notebooks.lessons() for cell in notebooks.from_source(name).cells)
