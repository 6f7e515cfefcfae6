"""The command `test`: everything that CI runs, leg by leg, streamed and timed; at the end a table and a line of counts.

Counts come from pytest's own report files. What did not run is said, with the reason; under CI it is a failure.
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

LEG_LIMIT = 1800  # seconds
CELL_TIMEOUT = 120  # seconds; nbval notices a dead kernel by nothing else
BROWSERS = (
    "chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Google\Chrome\Application\chrome.exe",
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
        return f"not run: {self.not_run}" if self.not_run else "FAILED" if self.failed else "passed"


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
            leg, began = Leg(name), time.monotonic()
            try:
                run(leg)
            except KeyboardInterrupt:
                print(f"\ntest: interrupted in the leg {name}, of which nothing is left running", file=sys.stderr)
                return 130
            leg.seconds = time.monotonic() - began
            if not leg.passed and not leg.failed and (in_ci() or not leg.not_run):
                leg.failed = 1  # a leg in which nothing ran proves nothing
            legs.append(leg)
    return summary(legs, quick)


def plan(quick, on, scratch):
    """(name, function of a Leg) for each leg, in order."""
    yield "freshness", freshness
    yield "lint", lint
    # two workers with a thread each: with more, torch's threads wait for one another and a test takes several times as long
    unit = ("tests", "--ignore=tests/browser", "-n", "2", "--dist", "loadgroup")
    yield "tests", lambda leg: pytest(leg, scratch, *unit, OMP_NUM_THREADS="1")
    for device in on:
        yield f"nbval on {device}", lambda leg, device=device: nbval(leg, scratch, device)
    if not quick:
        for device in on:
            yield f"papermill on {device}", lambda leg, device=device: papermill(leg, device)
        yield "browser", lambda leg: browser(leg, scratch)


def devices(asked):
    """Where the notebooks are proven: on the device asked for, else on the CPU, and on CUDA too where there is one."""
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
        print(f"{lesson}: {'stale, it ' + why if why else 'fresh'}")
        leg.passed += why is None
        leg.failed += why is not None
    if leg.failed:
        print("`python -m course_utils build` makes stale notebooks anew")


def lint(leg):
    leg.failed = int(processes.run([sys.executable, "-m", "ruff", "check", "."], seconds=LEG_LIMIT).status != 0)
    leg.passed = 1 - leg.failed


def pytest(leg, scratch, *arguments, **environment):
    """One run of pytest, its temporary files in `scratch`. The conftest at the root guards the learner's folder."""
    report = scratch / f"{leg.name.replace(' ', '-')}.xml"
    ended = processes.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, f"--junitxml={report}"],
        {"COURSE_STRICT": "", "DEVICE": "", **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch)), **environment},
        seconds=LEG_LIMIT,
    )
    count(leg, report)
    if ended.status and not leg.failed:
        leg.failed = 1
        limit = f"was stopped after {LEG_LIMIT} s"
        print(f"{leg.name}: pytest {limit if ended.stopped else f'ended with status {ended.status}'}")


def count(leg, report):
    for case in xml.parse(report).iter("testcase") if report.is_file() else ():
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            leg.failed += 1
        elif skipped is not None:
            leg.skipped[skipped.get("message") or "no reason given"] += 1
        else:
            leg.passed += 1


def nbval(leg, scratch, device):
    built = [f"notebooks/{n}.ipynb" for n in notebooks.lessons() if (notebooks.BUILT / f"{n}.ipynb").is_file()]
    if not built:
        leg.not_run = "no notebook has been built"
        return
    # two kernels at once, a notebook's cells all in one; on a GPU one after the other, or they would share its memory
    side_by_side = ["-n", "2", "--dist", "loadfile"] if len(built) > 1 and device == "cpu" else []
    threads = {"OMP_NUM_THREADS": "1"} if side_by_side else {}
    pytest(leg, scratch, "--nbval-lax", f"--nbval-cell-timeout={CELL_TIMEOUT}", *built, *side_by_side,
           DEVICE=device, **threads)


def papermill(leg, device):
    results = runs.run_all(notebooks.lessons(), solved=True, device=device)
    leg.failed = sum(r.problem is not None for r in results)
    leg.passed = len(results) - leg.failed


def browser(leg, scratch):
    program = find_browser()
    if program is None:
        leg.not_run = "no Chromium or Chrome found"
        return
    pytest(leg, scratch, "tests/browser", COURSE_BROWSER=program)


def find_browser():
    """The Chromium or Chrome for the browser tests: $COURSE_BROWSER, an installed one, or Playwright's; else None."""
    wanted = os.environ.get("COURSE_BROWSER")
    found = next(filter(None, map(shutil.which, [wanted] if wanted else BROWSERS)), None)
    if found is None and not wanted:
        with contextlib.suppress(Exception):  # Playwright is not installed, or has no browser
            from playwright.sync_api import sync_playwright

            with sync_playwright() as playwright:
                found = shutil.which(playwright.chromium.executable_path)
    return found


# ── the end ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(legs, quick):
    rows = [("leg", "passed", "failed", "skipped", "seconds", "result")]
    rows += [(g.name, g.passed, g.failed, g.skipped.total(), f"{g.seconds:.1f}", g.result) for g in legs]
    width = max(len(row[0]) for row in rows)
    print()
    for name, *numbers, result in rows:
        print(name.ljust(width), *(str(n).rjust(8) for n in numbers), "", result)
    print()
    for leg in legs:
        for reason, number in leg.skipped.items():
            print(f"{leg.name}: {number} skipped: {reason}")
    if quick:
        print("left out by --quick: papermill on the solved notebooks, the browser tests")
    if not any("cuda" in leg.name for leg in legs):
        print(f"{cuda_cells()} cells have a part that only a CUDA device runs")
    passed, failed = sum(leg.passed for leg in legs), sum(leg.failed for leg in legs)
    print(f"\n{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


def cuda_cells():
    """How many cells, in all lessons, are tagged as holding real CUDA code."""
    cells = [cell for name in notebooks.lessons() for cell in notebooks.from_source(name).cells]
    return sum("cuda" in cell.metadata.get("tags", []) for cell in cells)
