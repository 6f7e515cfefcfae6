"""For the tests and for nbval on the notebooks: nothing touches the learner's folder; a deprecated call is an error.

It lies at the root because pytest reads a conftest only for what lies beneath it, and the notebooks are under test too.
"""
import os
import tempfile

import pytest

from course_utils.engine.processes import kernel_environment

_folder = tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True)
os.environ.update(kernel_environment(_folder.name, strict=True))


def pytest_unconfigure():
    _folder.cleanup()


@pytest.fixture(autouse=True)
def _own_work_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_WORK", str(tmp_path / "work"))


def pytest_collection_modifyitems(items):
    """What nbval compares of a cell tagged nbval-check-output is its text. Pictures have a twin in text; a stored
    notebook lacks the HTML in which a live one wraps them; what libraries print to stderr depends on the machine."""
    for notebook in {item.parent for item in items if hasattr(item.parent, "skip_compare")}:
        notebook.skip_compare += ("stderr", "text/html", "image/svg+xml")
