"""The command `grade`: a folder of submissions, each run and judged in a process of its own, with limits of time and memory.

The judgement is `examine`, on the functions that the notebook's cells define: a removed check cell or an edited progress file changes nothing.
The limits are for accidents. A submission is a program that runs as you, in a process that also holds the checks: whoever wants to
attack your machine or forge a grade from inside can. Where you cannot trust the authors, run the command in a container without a network.
"""
import csv
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile

from course_utils.engine import processes
from course_utils.engine.progress import REPO
from course_utils.engine.runs import kernel_environment

TIME_LIMIT = 300  # seconds for a submission
CELL_LIMIT = 60  # seconds for a cell, where signals exist (not on Windows)
MEMORY_LIMIT = 2_000_000_000  # bytes beyond what torch takes; see _limit_memory
TABLE = REPO / "build" / "grades.csv"


def grade(folder, as_json=False):
    """The command: prints a table (or JSON), writes build/grades.csv, returns the exit status."""
    root = pathlib.Path(folder)
    found = submissions(root) if root.is_dir() else []
    if not found:
        why = "holds no notebook and no folder of a student" if root.is_dir() else "is not a folder"
        print(f"grade: {folder} {why}", file=sys.stderr)
        return 2
    rows = []
    for number, (name, path) in enumerate(found, 1):
        print(f"[{number}/{len(found)}] {name}", file=sys.stderr, flush=True)
        rows.append(_grade_one(name, path))
    TABLE.parent.mkdir(exist_ok=True)
    table = [("submission", "lesson", "solved", "total", "first problem")]
    table += [(r["submission"], r["lesson"] or "", r["solved"], r["total"], r["problem"] or "") for r in rows]
    with open(TABLE, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table)
    if as_json:
        print(json.dumps(rows, indent=1, ensure_ascii=False))
    else:
        widths = [max(len(str(row[i])) for row in table) for i in range(4)]
        for row in table:
            print("  ".join(str(c).ljust(w) for c, w in zip(row, [*widths, 0])).rstrip())
    return 0 if all(r["graded"] for r in rows) else 1


def submissions(root):
    """(name, path) of each notebook in the folder and in the students' folders; path is None for a folder without any."""
    found = []
    for entry in sorted(root.iterdir()):
        if entry.suffix == ".ipynb" and not entry.is_dir():
            found.append((entry.stem, entry))
        elif entry.is_dir() and not entry.name.startswith("."):
            inside = sorted(p for p in entry.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
            found += [(p.relative_to(root).with_suffix("").as_posix(), p) for p in inside] or [(entry.name, None)]
    return found


def _grade_one(name, path):
    row = {"submission": name, "lesson": None, "graded": False, "solved": 0, "total": 0, "problem": None, "exercises": {}}
    if path is None:
        return {**row, "problem": "the folder holds no notebook"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        copy, result = pathlib.Path(scratch, "given", path.name), pathlib.Path(scratch, "result.json")
        copy.parent.mkdir()
        try:
            shutil.copyfile(path, copy)
        except OSError as error:
            return {**row, "problem": f"cannot be read: {error.strerror}"}
        ended = processes.run(
            [sys.executable, "-m", "course_utils.engine.grading", str(copy), str(result)],
            {**kernel_environment(scratch, strict=False), "COURSE_STRICT": "", "DEVICE": "cpu"}, cwd=copy.parent,
            seconds=TIME_LIMIT, memory=2 * MEMORY_LIMIT, on_line=lambda line: None,
        )
        with_result = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    row.update(with_result)
    if not row["graded"] and not row["problem"]:
        where = f" in cell {row['cell']}" if row.get("cell") else ""
        row["problem"] = {
            "time": f"stopped{where} after {TIME_LIMIT} s", "memory": f"stopped{where}: it took more than {2 * MEMORY_LIMIT / 1e9:.0f} GB",
        }.get(ended.stopped, f"ended itself{where} with status {ended.status}")
    row.pop("cell", None)
    row["total"] = len(row["exercises"])
    row["solved"] = sum(e["outcome"] == "right" for e in row["exercises"].values())
    return row


# ── in the submission's own process ───────────────────────────────────────────────────────────────────────────────────


def judge(path, result):
    """Run the notebook's code cells in order, whatever they raise, and judge what they define; keep the result as it grows."""
    import nbformat

    from course_utils.engine.exercises import registry

    state = {"graded": False, "lesson": None, "problem": None, "cell": None, "exercises": {}}
    try:
        cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    except Exception as error:
        return _save(result, state, problem=f"is no readable notebook ({type(error).__name__})")
    lesson = lesson_of([c.source for c in cells], path)
    exercises = [e for e in registry().values() if e.lesson == lesson]
    if not exercises:
        return _save(result, state, problem="is no lesson of this course with exercises: no cell calls start(…) with the name of one")
    outcomes = {e.name: {"outcome": "not attempted", "says": f"{e.name}: no cell defines it"} for e in exercises}
    _save(result, state, lesson=lesson, exercises=outcomes)
    _limit_memory()
    raised = _run_cells(cells, exercises, outcomes, lambda number: _save(result, state, cell=number))
    open_ones = [o["says"] for o in outcomes.values() if o["outcome"] != "right"]
    _save(result, state, graded=True, problem=(open_ones + raised + [None])[0])


def _save(result, state, **changes):
    state.update(changes)
    aside = pathlib.Path(f"{result}.part")
    aside.write_text(json.dumps(state), encoding="utf-8")
    os.replace(aside, result)


def lesson_of(sources, path):
    """The lesson that the notebook starts, or whose name its file has."""
    from course_utils.engine.exercises import registry

    started = re.search(r"^[^#\n]*\bstart\(\s*[\"'](\w+)[\"']", "\n".join(sources), re.M)
    if started:
        return started[1]
    return next((e.lesson for e in registry().values() if e.lesson in pathlib.Path(path).stem), None)


def _run_cells(cells, exercises, outcomes, note):
    """Judge each function as soon as a cell has defined it, and what is not right once more at the end: a helper may come later, and
    a later cell may spoil what was right. Returns what raised."""
    from IPython.core.interactiveshell import InteractiveShell

    from course_utils.engine.exercises import TimeLimit, _time_limit, examine

    shell = InteractiveShell.instance()
    raised, seen = [], {}

    def look(again=False):
        for exercise in exercises:
            function = shell.user_ns.get(exercise.name)
            if function is None or outcomes[exercise.name]["outcome"] == "right" or (seen.get(exercise.name) is function and not again):
                continue
            seen[exercise.name] = function
            report = examine(exercise, function)
            outcomes[exercise.name] = {"outcome": report.outcome.value, "says": report.title}

    for number, cell in enumerate(cells, 1):
        note(number)
        with _time_limit(CELL_LIMIT):
            outcome = shell.run_cell(cell.source, store_history=True)
        error = outcome.error_before_exec or outcome.error_in_exec
        if isinstance(error, TimeLimit):
            raised.append(f"cell {number} did not end within {CELL_LIMIT} s")
        elif error is not None:
            raised.append(f"cell {number} raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        look()
    look(again=True)
    return raised


def _limit_memory():
    """On Linux an allocation beyond the limit raises in the cell that asks for it, and the rest is still judged. Elsewhere, and for
    what a submission starts in other processes, the teacher's process watches and stops the whole."""
    if sys.platform == "linux":
        import resource

        import torch  # noqa: F401  (its libraries are no part of what is limited)

        used = int(re.search(r"VmData:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_LIMIT, used + MEMORY_LIMIT))


if __name__ == "__main__":
    judge(*sys.argv[1:])
