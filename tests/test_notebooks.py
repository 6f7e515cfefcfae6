"""build, its check, execute and solve, on small lessons that are not the course's."""
import json
import re
import textwrap

import nbformat
import pytest
from helpers import double, exercise, use
from nbclient.exceptions import CellExecutionError

from course_utils.engine import exercises, notebooks, progress

LESSON = """
    # ---
    # jupyter:
    #   kernelspec:
    #     display_name: Other
    #     language: python
    #     name: other
    # ---

    # %% [markdown]
    # # 98 · A small lesson

    # %% tags=["parameters"]
    DEVICE = "auto"
    SEED = 0
    QUICK = True

    # %% tags=["claim-T01", "nbval-check-output"]
    import sys
    print("one")
    print("two", file=sys.stderr)
    print("three")
    SEED

    # %% tags=["exercise"]
    import math

    def helper(x):
        return x

    def double(x):
        ...

    # %%
    from course_utils.engine import display, predictions
    display.images([__import__("torch").zeros(2, 2)], ["nothing"])
    predictions.predict("How many?", lambda: 2, {"one": lambda n: n == 1, "two": lambda n: n == 2})

    # %%
    predict = predictions.predict
    predict("How many?", lambda: 2, {"one": lambda n: n == 1, "two": lambda n: n == 2})

    # %%
    import os, pathlib
    from course_utils.engine import progress
    progress.record_hint("98_small", "double", 1)
    pathlib.Path("left_behind.txt").write_text("x")
    (os.environ["DEVICE"], pathlib.Path.cwd() == progress.work_folder())
    """


@pytest.fixture
def course(monkeypatch, tmp_path):
    """A course of one small lesson; the function writes another source for it."""
    use(monkeypatch, tmp_path, exercise())
    monkeypatch.setattr(notebooks, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(notebooks, "BUILT", tmp_path)
    (tmp_path / "src").mkdir()

    def write(source, lesson="98_small"):
        (tmp_path / "src" / f"{lesson}.py").write_text(textwrap.dedent(source).lstrip(), encoding="utf-8")

    write(LESSON)
    return write


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The small lesson built twice: the bytes of both files, and the folders in which nothing may be left."""
    folder = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        use(patch, folder, exercise())
        patch.setattr(notebooks, "SOURCES", folder / "src")
        patch.setattr(notebooks, "BUILT", folder)
        (folder / "src").mkdir()
        (folder / "src" / "98_small.py").write_text(textwrap.dedent(LESSON).lstrip())
        twice = [notebooks.build("98_small").read_bytes() for _ in range(2)]
        assert notebooks.staleness("98_small") is None
        assert not progress.work_folder().exists()  # the learner's own progress
    assert sorted(p.name for p in folder.iterdir()) == ["98_small.ipynb", "src"]
    return twice


# ── build ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_two_builds_are_the_same_bytes(built):
    assert built[0] == built[1]


def test_nothing_of_the_machine_or_the_moment_is_stored(built):
    text = built[0].decode()
    for word in ("jupyter.widget", "iopub", "ipykernel_", str(notebooks.REPO), "model_id"):
        assert word not in text, word
    assert not re.search(r"\d{4}-\d\d-\d\dT\d\d:\d\d", text)
    notebook = json.loads(text)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"} and notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert "version" not in notebook["metadata"]["language_info"]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    for cell in notebook["cells"]:
        assert set(cell["metadata"]) <= {"tags", "jupyter"}


def test_outputs_are_whole_and_static(built):
    notebook = nbformat.reads(built[0].decode(), as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [1, 2, 3, 4, 5, 6]
    streams = {output.name: output.text for output in code[1].outputs if output.output_type == "stream"}
    assert streams["stderr"] == "two\n" and streams["stdout"].replace("one\n", "") == "three\n"
    for output in code[3].outputs + code[4].outputs:
        assert set(output.data) == {"text/plain", "image/svg+xml"}
    assert "Predict: How many?" in code[4].outputs[0].data["text/plain"]
    assert code[5].outputs[0].data["text/plain"] == "('cpu', True)"


def test_ids_come_from_position_and_content(course):
    ids = [cell.id for cell in notebooks.from_source("98_small").cells]
    assert len(set(ids)) == len(ids) == 7 and all(re.fullmatch(r"\d{3}-[0-9a-f]{8}", i) for i in ids)
    assert ids == [cell.id for cell in notebooks.from_source("98_small").cells]
    course(LESSON.replace('print("one")', 'print("1")'))
    changed = [cell.id for cell in notebooks.from_source("98_small").cells]
    assert [a == b for a, b in zip(ids, changed, strict=True)] == [True, True, False, True, True, True, True]
    course("# %%\n1\n\n# %%\n1\n\n# %% [markdown]\n# 1\n")  # the same words three times
    assert len({cell.id for cell in notebooks.from_source("98_small").cells}) == 3


def test_the_code_of_a_question_is_folded(course):
    folded = [cell.metadata.get("jupyter") for cell in notebooks.from_source("98_small").cells if cell.source.startswith("predict")]
    assert folded == [None]  # this one begins with an assignment
    course('# %%\npredict("How many?", lambda: 2, {})\n')
    assert notebooks.from_source("98_small").cells[0].metadata.jupyter.source_hidden


def test_a_failing_cell_leaves_the_old_file(course, tmp_path, capfd):
    (tmp_path / "98_small.ipynb").write_text("the old one")
    course("# %%\nprint('before')\n\n# %%\n1 / 0\n")
    with pytest.raises(CellExecutionError):
        notebooks.build("98_small")
    assert notebooks.build_command(["98"]) == 1
    assert "98_small does not run; its built notebook is left as it was." in capfd.readouterr().err
    assert (tmp_path / "98_small.ipynb").read_text() == "the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["98_small.ipynb", "src"]


def test_a_dead_kernel_and_an_endless_cell_end_in_a_sentence(course, capfd, monkeypatch):
    monkeypatch.setattr(notebooks, "CELL_TIMEOUT", 1)
    course("# %%\nimport os\nos._exit(1)\n")
    course("# %%\nwhile True: pass\n", "97_endless")
    assert notebooks.build_command([]) == 1
    said = capfd.readouterr().err
    assert "98_small does not run" in said and "97_endless does not run" in said


# ── staleness ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def fresh(course, built, tmp_path):
    path = tmp_path / "98_small.ipynb"
    path.write_bytes(built[0])
    assert notebooks.staleness("98_small") is None

    def change(edit):
        notebook = nbformat.reads(built[0].decode(), as_version=4)
        edit(notebook)
        nbformat.write(notebook, path)
        return notebooks.staleness("98_small")

    return change


@pytest.mark.parametrize(("edit", "words"), [
    (lambda n: n.cells.pop(), "has 6 cells, its source 7"),
    (lambda n: n.cells.reverse(), "differs from its source at cell 0"),
    (lambda n: n.cells[2].update(source="1"), "differs from its source at cell 2: 'import sys'"),
    (lambda n: n.cells[2].metadata.update(tags=["claim-T02"]), "differs from its source at cell 2"),
    (lambda n: n.cells[2].metadata.pop("tags"), "differs from its source at cell 2"),
    (lambda n: n.cells[2].metadata.update(collapsed=True), "differs from its source at cell 2"),
    (lambda n: n.cells[2].update(id="other"), "differs from its source at cell 2"),
    (lambda n: n.cells.__setitem__(0, nbformat.v4.new_raw_cell(n.cells[0].source, id=n.cells[0].id)), "differs from its source at cell 0"),
    (lambda n: n.cells[2].update(execution_count=None), "has a cell that was never run (2)"),
    (lambda n: n.cells[2].outputs.append(nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])), "has an error among the"),
])
def test_each_difference_is_told(fresh, edit, words):
    assert words in fresh(edit)


def test_a_changed_source_a_missing_and_a_broken_file_are_told(fresh, course, tmp_path, capsys):
    course(LESSON.replace("# # 98", "# # 98b"))
    assert notebooks.staleness("98_small").startswith("differs from its source at cell 0: '# 98b")
    assert notebooks.build_command([], check=True) == 1
    assert "98_small: stale, it differs from its source" in capsys.readouterr().out
    for broken in ("{", "", "[]", "<<<<<<< HEAD\n{}"):
        (tmp_path / "98_small.ipynb").write_text(broken)
        assert notebooks.staleness("98_small") == "is not a notebook file"
    (tmp_path / "98_small.ipynb").unlink()
    assert notebooks.staleness("98_small") == "has not been built"


def test_the_check_of_a_fresh_notebook(fresh, capsys):
    assert notebooks.build_command(["98_small"], check=True) == 0
    assert capsys.readouterr().out == "98_small: fresh\n"


# ── find, solve, execute ──────────────────────────────────────────────────────────────────────────────────────────────


def test_lessons_are_found_by_number_or_name(course):
    course("# %%\n", "03_other")
    assert notebooks.find([]) == notebooks.lessons() == ["03_other", "98_small"]
    assert notebooks.find(["3"]) == notebooks.find(["03"]) == notebooks.find(["03_other"]) == ["03_other"]
    assert notebooks.find(["98", "3"]) == ["98_small", "03_other"]


@pytest.mark.parametrize("word", ["4", "98_", "small", "", "-1", "98_small.py", "²"])
def test_a_lesson_that_there_is_not(course, word, capsys):
    with pytest.raises(ValueError, match="there is no lesson .*; there are 98_small"):
        notebooks.find([word])
    assert notebooks.build_command([word]) == 2
    assert "build: there is no lesson" in capsys.readouterr().err


def test_solved_replaces_every_exercise_and_nothing_else(course, monkeypatch):
    course(LESSON + '\n    # %% tags=["exercise", "clinic"]\n    def double(x):\n        return x * 3  # broken\n')
    plain, solved = notebooks.from_source("98_small"), notebooks.solved("98_small")
    for before, after in zip(plain.cells, solved.cells, strict=True):
        if "exercise" in before.metadata.get("tags", []):
            assert after.source == exercises.textwrap.dedent(exercises.inspect.getsource(double)).rstrip()
        else:
            assert after == before


def test_an_exercise_cell_without_a_function_is_refused():
    with pytest.raises(ValueError, match="an exercise cell defines no function: 'x = 1'"):
        notebooks.exercise_name("x = 1")
    assert notebooks.exercise_name("def helper(): ...\ndef double(x): ...") == "double"


def test_execute_takes_an_environment_and_leaves_nothing(tmp_path, monkeypatch):
    use(monkeypatch, tmp_path)
    code = "import os; (os.environ['COURSE_STRICT'], os.environ['COURSE_WORK'] == os.getcwd(), bool(os.environ['PYTHONPATH']))"
    notebook = notebooks.execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), {"COURSE_STRICT": "1"})
    assert notebook.cells[0].outputs[0].data["text/plain"] == "('1', True, True)"
    assert list(tmp_path.iterdir()) == []
