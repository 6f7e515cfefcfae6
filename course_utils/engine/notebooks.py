"""Notebooks from their sources: build (and its check), execute, solve.

`notebooks/src/NN_x.py` (jupytext py:percent) is the only form edited by hand. A built notebook has the outputs of a run on a CPU, cell ids
derived from position and content, and no time stamps, no widget state: two builds of one source differ in nothing but measured values.
"""
import ast
import hashlib
import os
import sys
import tempfile

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from course_utils.engine.processes import kernel_environment
from course_utils.engine.progress import REPO

SOURCES = REPO / "notebooks" / "src"
BUILT = REPO / "notebooks"
CELL_TIMEOUT = 120  # seconds; nbclient's own default is none at all
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def lessons():
    """The names of all lessons, in order: "00_start_here", "01_tensors", …"""
    return sorted(path.stem for path in SOURCES.glob("[0-9][0-9]_*.py"))


def find(wanted):
    """The lessons meant by "1", "01" or "01_tensors"; all of them for an empty list. ValueError names the lessons there are."""
    found = []
    for word in wanted:
        match = [name for name in lessons() if word == name or (word.isdecimal() and name.startswith(f"{int(word):02d}_"))]
        if not match:
            raise ValueError(f"there is no lesson {word!r}; there are {', '.join(lessons())}")
        found += match
    return found or lessons()


def from_source(lesson):
    """The notebook that the source describes, without outputs."""
    notebook = jupytext.read(SOURCES / f"{lesson}.py", fmt="py:percent")
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"},
        }
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for position, cell in enumerate(notebook.cells):
        content = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        cell.id = f"{position:03d}-{content}"
        metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
        if cell.cell_type == "code" and cell.source.startswith("predict("):
            metadata["jupyter"] = {"source_hidden": True}  # the question is what to read; its code unfolds with a click
        cell.metadata = nbformat.from_dict(metadata)
    return notebook


def execute(notebook, environment=None):
    """Run every cell in a fresh kernel, in place, the learner's progress untouched. Raises CellExecutionError or CellTimeoutError."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        extra = {**kernel_environment(scratch, strict=True), **(environment or {})}
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT, kernel_name="python3", store_widget_state=False, record_timing=False,
            resources={"metadata": {"path": scratch}},
        )
        client.execute(env={**os.environ, **extra})
    return notebook


def build(lesson):
    """Make `notebooks/<lesson>.ipynb` from its source. The old file stays until the new one is complete."""
    notebook = execute(from_source(lesson), {"DEVICE": "cpu"})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_stored(output) for output in _merged(cell.outputs)]
    notebook.metadata.language_info = from_source(lesson).metadata.language_info
    target = BUILT / f"{lesson}.ipynb"
    aside = target.with_suffix(".ipynb.tmp")
    nbformat.write(notebook, aside)
    os.replace(aside, target)
    return target


def _stored(output):
    """What is kept of an output: the picture, not the widget, whose state is gone (JupyterLab would show an error in its place)."""
    data = output.get("data", {})
    data.pop(WIDGET_VIEW, None)
    if "image/svg+xml" in data:
        data.pop("text/html", None)  # the same picture inlined for a live JupyterLab
    return output


def _merged(outputs):
    """Neighbouring pieces of one stream as one: how a stream is cut depends on timing."""
    merged = []
    for output in outputs:
        last = merged[-1] if merged else None
        if last and output.output_type == "stream" == last.output_type and output.name == last.name:
            last.text += output.text
        else:
            merged.append(output)
    return merged


def staleness(lesson):
    """Why the built notebook is not what its source gives; None where it is."""
    path = BUILT / f"{lesson}.ipynb"
    if not path.is_file():
        return "has not been built"
    source = from_source(lesson)
    try:
        built = nbformat.read(path, as_version=4)
    except Exception:  # nbformat raises this and that for what is no notebook, such as one with the marks of a merge in it
        return "is not a notebook file"
    if len(built.cells) != len(source.cells):
        return f"has {len(built.cells)} cells, its source {len(source.cells)}"
    for number, (b, s) in enumerate(zip(built.cells, source.cells)):
        if (b.cell_type, b.source, b.metadata, b.id) != (s.cell_type, s.source, s.metadata, s.id):
            return f"differs from its source at cell {number}: {(s.source.splitlines() or [''])[0][:70]!r}"
        if b.cell_type == "code" and b.execution_count is None:
            return f"has a cell that was never run ({number}): nbval would compare nothing there"
        if any(output.output_type == "error" for output in b.get("outputs", [])):
            return f"has an error among the outputs of cell {number}"
    return None


def solved(lesson):
    """The lesson's notebook with every exercise cell replaced by the reference's source."""
    from course_utils.engine.exercises import registry, source_of

    notebook = from_source(lesson)
    for cell in notebook.cells:
        if "exercise" in cell.metadata.get("tags", []):
            name = exercise_name(cell.source)
            cell.source = source_of(registry()[name])
    return notebook


def exercise_name(source):
    """The function that an exercise cell defines: the last one in it."""
    names = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    if not names:
        raise ValueError(f"an exercise cell defines no function: {source[:60]!r}")
    return names[-1]


def build_command(wanted, check=False):
    """The command `build`: returns the exit status."""
    try:
        names = find(wanted)
    except ValueError as error:
        print(f"build: {error}", file=sys.stderr)
        return 2
    failed = 0
    for lesson in names:
        if check:
            why = staleness(lesson)
            print(f"{lesson}: {'stale, it ' + why if why else 'fresh'}")
            failed += why is not None
            continue
        print(f"{lesson}: running its cells …", flush=True)
        try:
            path = build(lesson)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"build: {lesson} does not run; its built notebook is left as it was.\n{error}", file=sys.stderr)
            failed += 1
            continue
        print(f"{lesson}: built {path.relative_to(REPO)} ({path.stat().st_size / 1e3:.0f} kB)")
    return 1 if failed else 0
