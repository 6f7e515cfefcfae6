"""The map of the course, read from the lessons themselves."""
import re

from course_utils.engine.display import table
from course_utils.engine.progress import REPO, of_lesson


def lessons():
    """[(name, title, time)] of every lesson, from the head of its source."""
    found = []
    for path in sorted((REPO / "notebooks" / "src").glob("[0-9][0-9]_*.py")):
        head = path.read_text(encoding="utf-8")[:2000]
        title = re.search(r"^# # \d\d · (.+)$", head, re.M)
        time = re.search(r"^# ([\d to]+ minutes)", head, re.M)
        found.append((path.stem, title[1], time[1]))
    return found


def course_map():
    """Show the lessons, the time that each takes, and what you have solved of it."""
    rows = []
    for name, title, time in lessons():
        (solved, total), _ = of_lesson(name)
        rows.append((name, title, time, f"{solved} of {total}"))
    table(("notebook", "lesson", "time", "exercises solved"), rows)
