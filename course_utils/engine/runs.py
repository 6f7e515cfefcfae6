"""The command `run`: each lesson as a batch job under papermill, in a process of its own, within a time limit.

The executed notebooks and their logs stay in build/run. The learner's progress is not touched.
"""
import dataclasses
import os
import pathlib
import re
import sys
import tempfile

import nbformat
from tqdm import tqdm

from course_utils.engine import notebooks, processes, session
from course_utils.engine.progress import REPO

RESULTS = REPO / "build" / "run"
QUICK_LIMIT, FULL_LIMIT = 600, 3600  # seconds for a notebook; papermill itself has no limit


@dataclasses.dataclass(frozen=True)
class Result:
    lesson: str
    seconds: float
    problem: str | None


def run(lessons, solved=False, device=None, full=False):
    """The command: returns the exit status."""
    try:
        names = notebooks.find(lessons)
        check_device(device)
    except ValueError as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    results = run_all(names, solved, device, full)
    good, seconds = sum(r.problem is None for r in results), sum(r.seconds for r in results)
    where = os.path.relpath(RESULTS, REPO)
    print(f"{good} of {len(results)} notebooks ran through in {seconds:.0f} s; they are in {where}")
    return 0 if good == len(results) else 1


def check_device(device):
    """ValueError with a sentence where torch cannot use the device."""
    if device not in (None, "auto"):
        import torch

        session._device(device, torch)


def run_all(names, solved=False, device=None, full=False):
    """Run one after another, whatever fails, and say how each went. Returns a Result for each."""
    results = []
    total = sum(len(notebooks.from_source(name).cells) + 1 for name in names)  # one more: the parameters, injected
    with tqdm(total=total, unit=" cells", disable=None, leave=False) as bar:  # disable=None: not into a file
        for number, name in enumerate(names, 1):
            bar.set_description(name)
            result = _run_one(name, solved, device, full, bar)
            bar.write(f"[{number}/{len(names)}] {name}{' (solved)' if solved else ''}: "
                      f"{result.problem or 'ran through'} ({result.seconds:.1f} s)")
            sys.stdout.flush()
            results.append(result)
    return results


def _run_one(name, solved, device, full, bar):
    stem, limit = name + ("_solved" if solved else ""), FULL_LIMIT if full else QUICK_LIMIT
    try:
        notebook = notebooks.solved(name) if solved else notebooks.from_source(name)
    except (LookupError, SyntaxError, ValueError) as error:
        return Result(name, 0.0, f"its solved notebook cannot be made: {error}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = []

    def on_line(line):
        lines.append(line)
        bar.update("Executing Cell" in line)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        given, written = pathlib.Path(scratch, "given.ipynb"), pathlib.Path(scratch, "written.ipynb")
        nbformat.write(notebook, given)
        parameters = ["-p", "DEVICE", device or "auto", "-p", "QUICK", str(not full)]
        ended = processes.run(
            [sys.executable, "-m", "papermill", str(given), str(written), "--kernel", "python3", "--cwd", scratch,
             "--no-progress-bar", "--log-output", "--no-request-save-on-cell-execute", *parameters],
            {**processes.kernel_environment(scratch, strict=solved), "COURSE_STRICT": "1" if solved else ""},
            seconds=limit, on_line=on_line,
        )
        problem = _problem(written, ended, _last_cell(notebook, lines), lines, limit, solved)
        (RESULTS / f"{stem}.ipynb").unlink(missing_ok=True)
        if written.is_file():  # papermill writes once, at the end: a save after every cell takes as long as the cells
            (RESULTS / f"{stem}.ipynb").write_bytes(written.read_bytes())
    log = RESULTS / f"{stem}.log"
    log.write_text("\n".join(lines), encoding="utf-8")
    return Result(name, ended.seconds, problem and f"{problem}; see {os.path.relpath(log, REPO)}")


def _last_cell(notebook, lines):
    """Where papermill's log ends: the first line of the last cell that it names, in words; "" where it names none."""
    numbers = [int(n) for line in lines for n in re.findall("Executing Cell ([0-9]+)", line)]
    first = next((i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])), len(notebook.cells))
    cells = [*notebook.cells[: first + 1], None, *notebook.cells[first + 1 :]]  # papermill puts a cell behind the parameters
    cell = cells[numbers[-1] - 1] if numbers else None
    return f" in the cell {_first_line(cell.source)!r}" if cell is not None else ""


def _problem(path, ended, where, lines, limit, strict):
    """What went wrong, from the notebook that papermill wrote: the cell by its first line, and the error; else None."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"] if path.is_file() else []
    if ended.stopped:
        return f"stopped at its time limit of {limit} s{where}"
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error":
                return f"the cell {_first_line(cell.source)!r} raised {output.ename}: {_first_line(output.evalue)}"
            if strict and output.get("name") == "stderr" and re.search("(Future|Deprecation)Warning", output.text):
                return f"the cell {_first_line(cell.source)!r} warns: {_first_line(output.text)}"
    if ended.status:
        return f"papermill ended with status {ended.status}{where}: {(lines or ['no output'])[-1]}"
    return None


def _first_line(text):
    return (text.strip().splitlines() or [""])[0][:160]
