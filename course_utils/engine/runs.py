"""The command `run`: each lesson as a batch job under papermill, in a process of its own, with a time limit and a summary.

The executed notebooks and their logs stay in build/run. The learner's progress is not touched.
"""
import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import tempfile

import nbformat
from tqdm import tqdm

from course_utils.engine import notebooks, processes, session

RESULTS = notebooks.REPO / "build" / "run"
LIMITS = {False: 600, True: 3600}  # seconds for a notebook, by `full`; papermill itself has none
# Run by IPython at the start of each kernel. A deprecated call in a cell or in this package is an error there and then; torch announces
# some deprecations as plain UserWarning.
STRICT_WARNINGS = """
for _c, _m in ((FutureWarning, ""), (DeprecationWarning, ""), (UserWarning, r"(?is).*\\bdeprecated")):
    __import__("warnings").filterwarnings("error", _m, _c, r"(__main__|course_utils)(\\.|$)")
del _c, _m
"""


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
    failed = sum(r.problem is not None for r in results)
    print(f"{len(results) - failed} of {len(results)} notebooks ran through in {sum(r.seconds for r in results):.0f} s; "
          f"they lie in {RESULTS.relative_to(notebooks.REPO)}", flush=True)
    return 1 if failed else 0


def check_device(device):
    """ValueError with a sentence where torch cannot use the device."""
    if device is not None:
        import torch

        session._device(device, torch)


def run_all(names, solved=False, device=None, full=False):
    """Run one after another, whatever fails, and say how each went. Returns a Result for each."""
    made = [(name, notebooks.solved(name) if solved else notebooks.from_source(name)) for name in names]
    results = []
    with tqdm(total=sum(len(n.cells) for _, n in made), unit=" cells", disable=None, leave=False) as bar:
        for number, (name, notebook) in enumerate(made, 1):
            bar.set_description(name)
            result = _run_one(name, notebook, solved, device, full, bar)
            said = "ran through" if result.problem is None else result.problem
            bar.write(f"[{number}/{len(made)}] {name}{' (solved)' if solved else ''}: {said} ({result.seconds:.0f} s)")
            sys.stdout.flush()
            results.append(result)
    return results


def _run_one(name, notebook, solved, device, full, bar):
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = name + ("_solved" if solved else "")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, open(RESULTS / f"{stem}.log", "w", encoding="utf-8") as log:
        given, written = pathlib.Path(scratch, f"{stem}_given.ipynb"), pathlib.Path(scratch, f"{stem}.ipynb")
        nbformat.write(notebook, given)
        parameters = (["-p", "DEVICE", device] if device else []) + (["-p", "QUICK", "False"] if full else [])

        def on_line(line):
            print(line, file=log)
            bar.update("Executing Cell" in line)

        ended = processes.run(
            [sys.executable, "-m", "papermill", str(given), str(written), "--kernel", "python3", "--cwd", scratch,
             "--no-progress-bar", "--log-output", *parameters],
            {**kernel_environment(scratch, strict=solved), "COURSE_STRICT": "1" if solved else ""}, seconds=LIMITS[full], on_line=on_line,
        )
        log.flush()
        problem = _problem(written, ended, LIMITS[full], solved)
        if problem is None and ended.status:
            problem = _last_line(RESULTS / f"{stem}.log") or f"papermill ended with status {ended.status}"
        with contextlib.suppress(FileNotFoundError):
            (RESULTS / f"{stem}.ipynb").write_bytes(written.read_bytes())
    where = f"; see {RESULTS.relative_to(notebooks.REPO).as_posix()}/{stem}.log"
    return Result(name, ended.seconds, None if problem is None else problem + where)


def kernel_environment(folder, strict):
    """Environment of a process with kernels: nothing of the learner's (progress, IPython's start-up files), the course at hand.
    With `strict`, deprecated calls are errors."""
    startup = pathlib.Path(folder, "ipython", "profile_default", "startup")
    startup.mkdir(parents=True, exist_ok=True)
    if strict:
        (startup / "warnings.py").write_text(STRICT_WARNINGS, encoding="utf-8")
    return {
        "COURSE_WORK": str(folder), "IPYTHONDIR": str(startup.parents[1]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(notebooks.REPO), os.environ.get("PYTHONPATH")])),
    }


def _problem(path, ended, limit, strict):
    """What went wrong, from the notebook that papermill wrote: the cell's first line and the error; None where nothing did."""
    cells = nbformat.read(path, as_version=4).cells if path.is_file() else []
    cells = [c for c in cells if c.cell_type == "code"]
    running = next((c for c in cells if c.metadata.get("papermill", {}).get("status") == "running"), None)
    if ended.stopped:
        return f"stopped at its time limit of {limit} s" + (f" in the cell {_first_line(running)}" if running else "")
    for cell in cells:
        for output in cell.outputs:
            if output.output_type == "error":
                return f"the cell {_first_line(cell)} raised {output.ename}: {(output.evalue.splitlines() or [''])[0]}"
            if strict and output.get("name") == "stderr" and re.search("FutureWarning|DeprecationWarning", output.text):
                return f"the cell {_first_line(cell)} warns: {output.text.strip().splitlines()[0]}"
    return f"its kernel died in the cell {_first_line(running)}" if ended.status and running else None


def _first_line(cell):
    return repr((cell.source.strip().splitlines() or [""])[0][:80])


def _last_line(path):
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1] if lines else None
