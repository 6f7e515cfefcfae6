"""The command `grade`: a folder of submissions, each run and judged in a process of its own, within time and memory.

The judgement is `examine`, on the functions that the notebook's cells define: a removed check cell or a forged progress
file changes nothing. The limits are against accidents. A submission is a program that runs with your rights, in a
process that holds the checks too: one written to attack the machine or to forge its grade from inside can do so. Where
you do not trust the authors, run the command in a container without a network.
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

TIME_LIMIT = 300  # seconds for a submission
CELL_LIMIT = 60  # seconds for one of its cells, where there are signals (not on Windows)
MEMORY_LIMIT = 2 * 10**9  # bytes beyond what torch takes by itself
TABLE = REPO / "build" / "grades.csv"


def grade(folder, as_json=False):
    """The command: prints a table or JSON, writes build/grades.csv, returns the exit status."""
    root = pathlib.Path(folder)
    if not root.is_dir() or not submissions(root):
        print(f"grade: {folder} {'holds no submission' if root.is_dir() else 'is not a folder'}", file=sys.stderr)
        return 2
    rows = []
    for number, (name, path) in enumerate(submissions(root), 1):
        print(f"[{number}/{len(submissions(root))}] {name}", file=sys.stderr, flush=True)
        rows.append({"submission": name, **_grade_one(path)})
    table = [("submission", "lesson", "solved", "total", "first problem")]
    table += [(r["submission"], r["lesson"] or "", r["solved"], r["total"], r["problem"] or "") for r in rows]
    TABLE.parent.mkdir(exist_ok=True)
    with open(TABLE, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table)
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        width = max(len(row[0]) for row in table)
        for name, *cells in table:
            print(name.ljust(width), "{:<16} {:>6} {:>6}  {}".format(*cells), sep="  ")
    return 0 if all(row["graded"] for row in rows) else 1


def submissions(root):
    """(name, path) of each notebook in the folder and in the students' folders; path None: a folder without any."""
    found = []
    for entry in sorted(root.iterdir()):
        if entry.is_dir() and not entry.name.startswith("."):
            inside = sorted(p for p in entry.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
            found += [(p.relative_to(root).with_suffix("").as_posix(), p) for p in inside] or [(entry.name, None)]
        elif entry.suffix == ".ipynb":
            found.append((entry.stem, entry))
    return found


def _grade_one(path):
    row = {"lesson": None, "graded": False, "solved": 0, "total": 0, "problem": None, "cell": None, "exercises": {}}
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
            [sys.executable, "-m", "course_utils.engine.grading", copy, result, str(CELL_LIMIT), str(MEMORY_LIMIT)],
            {**processes.kernel_environment(scratch, strict=False), "DEVICE": "cpu"}, cwd=copy.parent,
            seconds=TIME_LIMIT, memory=2 * MEMORY_LIMIT, on_line=lambda line: None,
        )
        if result.is_file():
            row.update(json.loads(result.read_text(encoding="utf-8")))
    if not row["graded"] and not row["problem"]:
        what = {"time": f"stopped after {TIME_LIMIT} s", "memory": "stopped for the memory that it took"}.get(
            ended.stopped, f"ended itself with status {ended.status}")
        row["problem"] = what + (f" in cell {row['cell']}" if row["cell"] else "")
    row["total"] = len(row["exercises"])
    row["solved"] = sum(e["outcome"] == "right" for e in row["exercises"].values())
    return row


# ── in the submission's own process ───────────────────────────────────────────────────────────────────────────────────


def judge(path, result, cell_limit, memory_limit):
    """Run the code cells in order, whatever they raise, and judge what they define. The result is kept as it grows."""
    state = {"graded": False, "lesson": None, "problem": None, "cell": None, "exercises": {}}

    def save(**changes):
        state.update(changes)
        pathlib.Path(f"{result}.part").write_text(json.dumps(state), encoding="utf-8")
        os.replace(f"{result}.part", result)

    try:
        cells = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError):
        return save(problem="is not a readable notebook")
    from course_utils.engine.exercises import registry  # and with it torch, which the teacher's own process does not need

    lesson = lesson_of(sources, path, {e.lesson for e in registry().values()})
    exercises = [e for e in registry().values() if e.lesson == lesson]
    if not exercises:
        return save(problem="is not a lesson with exercises: no cell calls start(…) with the name of one")
    outcomes = {e.name: {"outcome": "not attempted", "says": f"{e.name}: no cell defines it"} for e in exercises}
    save(lesson=lesson, exercises=outcomes)
    _limit_memory(int(memory_limit))
    raised = _run_cells(sources, exercises, outcomes, save, float(cell_limit))
    problems = [e["says"] for e in outcomes.values() if e["outcome"] != "right"] + raised
    return save(graded=True, cell=None, problem=problems[0] if problems else None)


def lesson_of(sources, path, lessons):
    """The lesson that the notebook starts, or else the one in its file's name."""
    started = re.search(r"^[^#\n]*\bstart\(\s*[\"'](\w+)[\"']", "\n".join(sources), re.M)
    named = [lesson for lesson in lessons if lesson in pathlib.Path(path).stem]
    return started[1] if started else named[0] if named else None


def _run_cells(sources, exercises, outcomes, save, limit):
    """Judge each function once a cell has defined it, and again at the end what is not right: a helper may come later,
    and a later cell may spoil what was right. Returns what cells raised."""
    from IPython.core.interactiveshell import InteractiveShell

    from course_utils.engine.exercises import TimeLimit, _limited, examine

    def run(source):
        try:
            ran = _limited(limit, lambda: shell.run_cell(source, store_history=True))
        except TimeLimit as error:  # it struck in IPython's own code, around the cell
            return error
        return ran.error_before_exec or ran.error_in_exec

    shell = InteractiveShell.instance()
    shell.ask_exit = sys.exit  # what exit() calls: it ends its cell only
    raised, seen = [], {}

    def look(anew=False):
        for exercise in exercises:
            name = exercise.name
            function = shell.user_ns.get(name)
            if function is None or outcomes[name]["outcome"] == "right" or (seen.get(name) is function and not anew):
                continue
            seen[name] = function
            report = examine(exercise, function)
            outcomes[name] = {"outcome": report.outcome.value, "says": report.title}

    for number, source in enumerate(sources, 1):
        save(cell=number)
        error = run(source)
        if isinstance(error, TimeLimit):
            raised.append(f"cell {number} did not end within {limit:g} s")
        elif error is not None:
            raised.append(f"cell {number} raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        look()
    look(anew=True)
    return raised


def _limit_memory(limit):
    """On Linux an allocation beyond the limit raises in the cell that asks for it, and the rest is still judged. On
    other systems, and for what a submission starts, the teacher's process stops the whole at twice the limit."""
    if sys.platform == "linux":
        import resource

        used = int(re.search(r"VmData:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))


if __name__ == "__main__":
    judge(*sys.argv[1:])
