"""What the learner has solved and predicted: one small JSON file beside the answers.

Only words of ours go in (names from the registry, outcomes, counts, dates), so nothing that a learner defines can break it. It is written
aside, flushed and renamed, under a lock: a kill at any moment leaves the old file or the new one, and two notebooks do not lose each
other's entries.
"""
import copy
import datetime
import json
import os
import pathlib
import sys

REPO = pathlib.Path(__file__).resolve().parents[2]
EMPTY = {"version": 1, "exercises": {}, "predictions": {}}


def work_folder():
    """Where the learner's copies and progress live: $COURSE_WORK, or `work` beside the course."""
    return pathlib.Path(os.environ.get("COURSE_WORK") or REPO / "work").resolve()


def read():
    """The progress so far; an unreadable file is set aside under a dated name and counts as empty."""
    path = work_folder() / "progress.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if _is_sound(found):
            return found
        raise ValueError("not a progress file")
    except FileNotFoundError:
        pass
    except OSError as error:
        print(f"Progress cannot be read ({error.strerror}: {path}); it counts as empty.", file=sys.stderr)
    except (ValueError, RecursionError):
        aside = path.with_name(f"progress.damaged-{datetime.datetime.now():%Y-%m-%d-%H%M%S-%f}.json")
        print(f"{path.name} was damaged; it is kept as {aside.name} and a new one is begun.", file=sys.stderr)
        try:
            os.replace(path, aside)
        except OSError:
            pass
    return copy.deepcopy(EMPTY)


def _is_sound(found):
    if not isinstance(found, dict) or not all(isinstance(found.get(part), dict) for part in ("exercises", "predictions")):
        return False
    entries = found["exercises"].values()
    return all(isinstance(right, bool) for right in found["predictions"].values()) and all(
        isinstance(entry, dict) and all(isinstance(entry.get(count, 0), int) for count in ("attempts", "hints")) for entry in entries
    )


def update(change):
    """Apply `change(progress)` to the file, alone and atomically. A folder that cannot be written costs a sentence, not an exception."""
    from filelock import FileLock, Timeout

    folder = work_folder()
    path = folder / "progress.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".progress.lock", timeout=10):
            progress = read()
            change(progress)
            aside = path.with_name(".progress.tmp")  # one name, under the lock: a killed writer's rest is overwritten by the next
            with open(aside, "w", encoding="utf-8") as file:
                json.dump(progress, file, indent=1, sort_keys=True)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
    except (OSError, Timeout) as error:
        reason = "another program holds its lock" if isinstance(error, Timeout) else f"{error.strerror}: {folder}"
        print(f"Progress is not saved: {reason}. The lesson goes on.", file=sys.stderr)


def _entry(progress, lesson, name):
    return progress["exercises"].setdefault(f"{lesson}/{name}", {"attempts": 0, "hints": 0, "outcome": "not attempted"})


def record_exercise(lesson, name, outcome):
    def change(progress):
        entry = _entry(progress, lesson, name)
        if outcome != "not attempted":
            entry["attempts"] = entry.get("attempts", 0) + 1
        if outcome == "right":
            entry.setdefault("solved", f"{datetime.datetime.now():%Y-%m-%d %H:%M}")
        if entry.get("outcome") != "right" or outcome == "right":  # solved stays solved while you go on trying things
            entry["outcome"] = outcome

    update(change)


def record_hint(lesson, name, number):
    def change(progress):
        entry = _entry(progress, lesson, name)
        entry["hints"] = max(entry.get("hints", 0), number)

    update(change)


def record_prediction(lesson, question, right):
    def change(progress):
        # the first answer is the prediction; later clicks are reading
        progress["predictions"].setdefault(f"{lesson}/{question}", bool(right))

    update(change)


def of_lesson(lesson):
    """(solved, total) exercises and (right, made) predictions of a lesson."""
    from course_utils.engine.exercises import registry

    progress = read()
    names = [e.name for e in registry().values() if e.lesson == lesson]
    solved = sum(progress["exercises"].get(f"{lesson}/{n}", {}).get("outcome") == "right" for n in names)
    made = [right for key, right in progress["predictions"].items() if key.startswith(f"{lesson}/")]
    return (solved, len(names)), (sum(made), len(made))


def progress():
    """Show what is solved, lesson by lesson, in a notebook."""
    from course_utils.engine.display import table
    from course_utils.engine.exercises import registry

    rows = []
    for lesson in sorted({e.lesson for e in registry().values()}):
        (solved, total), (right, made) = of_lesson(lesson)
        rows.append((lesson, f"{solved} of {total}", f"{right} of {made} made"))
    table(("lesson", "exercises solved", "predictions right"), rows)


def report(as_json=False):
    """The command `progress`: what is solved, for the eye or as JSON. Returns the exit status."""
    from course_utils.engine.exercises import registry

    known = read()
    lessons = {}
    for exercise in registry().values():
        entry = known["exercises"].get(f"{exercise.lesson}/{exercise.name}", {})
        lessons.setdefault(exercise.lesson, {})[exercise.name] = {
            "outcome": entry.get("outcome", "not attempted"), "attempts": entry.get("attempts", 0),
            "hints": entry.get("hints", 0), "solved": entry.get("solved"),
        }
    if as_json:
        print(json.dumps({"lessons": lessons, "predictions": known["predictions"]}, indent=1))
        return 0
    for lesson, exercises in sorted(lessons.items()):
        (solved, total), (right, made) = of_lesson(lesson)
        print(f"{lesson}: {solved} of {total} exercises, {right} of {made} predictions")
        for name, e in exercises.items():
            mark = {"right": "✓", "not attempted": "○"}.get(e["outcome"], "✗")
            tries, hints = e["attempts"], e["hints"]
            effort = f"  ({tries} attempt{'s' * (tries != 1)}, {hints} hint{'s' * (hints != 1)})" if tries else ""
            print(f"  {mark} {name}: {e['outcome']}{effort}")
    return 0
