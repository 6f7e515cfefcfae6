"""A copy of the course in a temporary folder, with tiny requirements, to try set-up and commands on."""
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = "torch==99.1\ntorchvision==99.1\ncourse-probe==1.0\n"
RANGES = "torch>=99,<100\ntorchvision>=99,<100\ncourse-probe>=1,<3\n"


def wheel(folder, name, version, body="", requires=()):
    """Write a wheel that holds one module of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    files = {
        f"{module}.py": f"__version__ = {version!r}\n{body}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in files.items():
            archive.writestr(file, content)
    return path


def index(folder, wheels):
    """A package index in a folder, as `--torch-index` takes it."""
    for path in wheels:
        project = folder / path.name.split("-")[0].replace("_", "-")
        project.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        (project / "index.html").write_text(f'<a href="{path.as_uri()}#sha256={digest}">{path.name}</a>')
    return folder.as_uri()


def notebook(path, *sources):
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    cells = [{**code, "id": f"cell-{n}", "source": source} for n, source in enumerate(sources)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


class Repository:
    def __init__(self, root, lock=LOCK, ranges=RANGES):
        self.root, self.venv, self.links = root / "repo", root / "repo" / ".venv", root / "wheels"
        self.log, self.work = self.venv / "setup.log", self.root / "work"
        shutil.copytree(ROOT / "course_utils", self.root / "course_utils", ignore=shutil.ignore_patterns("__pycache__"))
        (self.root / "requirements.lock").write_text(lock)
        (self.root / "requirements.txt").write_text(ranges)

    def copy(self, root):
        """The same in another folder, .venv included."""
        shutil.copytree(self.root.parent, root, symlinks=True, dirs_exist_ok=True)
        twin = object.__new__(Repository)
        twin.__dict__ = {name: root / path.relative_to(self.root.parent) for name, path in self.__dict__.items()}
        return twin

    def with_wheels(self):
        """Packages to set up from, and commands that tell where they run in place of those that need the real ones."""
        for name in ("torch", "torchvision"):
            wheel(self.links, name, "99.1")
        for version in ("1.0", "2.0"):
            wheel(self.links, "course-probe", version)
        engine = self.root / "course_utils" / "engine"
        (engine / "progress.py").write_text(
            "import sys, course_probe, torch\n"
            "def report(as_json): print('ran in', sys.prefix, torch.__version__, course_probe.__version__)\n"
        )
        (engine / "lab.py").write_text(
            "from course_utils.engine.progress import report\n"
            "def lab(browser, port): report(as_json=False)\n"
        )
        return self

    def with_lessons(self, *lessons):
        for lesson in lessons:
            notebook(self.root / "notebooks" / f"{lesson}.ipynb", "1 + 1", "# answer here")
            source = self.root / "notebooks" / "src" / f"{lesson}.py"
            source.parent.mkdir(exist_ok=True)
            source.write_text("# %%\n1 + 1\n")
        return self

    def environment(self, **changes):
        ours = ("PIP_", "COURSE_", "PYTHONPATH")
        plain = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        here = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.links)}
        return {key: value for key, value in {**plain, **here, **changes}.items() if value is not None}

    def start(self, *arguments, python=sys.executable, **changes):
        return subprocess.Popen([python, "-m", "course_utils", *arguments], cwd=self.root, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment(**changes))

    def run(self, *arguments, python=sys.executable, **changes):
        process = self.start(*arguments, python=python, **changes)
        output, errors = process.communicate(timeout=120)
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)
