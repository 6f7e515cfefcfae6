"""A real JupyterLab, started by the course's own command, in a real browser. Pictures of what was seen lie in build/screenshots."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
from playwright.sync_api import sync_playwright

from course_utils.engine.suite import find_browser

REPO = pathlib.Path(__file__).resolve().parents[2]
PICTURES = REPO / "build" / "screenshots"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]
PATIENCE = 60_000  # milliseconds; a loaded machine is slow, a broken page never gets there
WHOLE_LESSON = 400_000  # for all cells of a lesson, which take up to a minute on a machine that does nothing else


class Lab:
    """The server that `lab --no-browser` starts, with settings and a work folder of its own."""

    def __init__(self, folder):
        self.work, self.settings = folder / "work", folder / "settings"
        self.set("notebook-extension/tracker", {"windowingMode": "none", "scrollPastEnd": False})  # every cell is in the page
        environment = {**os.environ, "COURSE_WORK": str(self.work), "JUPYTERLAB_SETTINGS_DIR": str(self.settings), "HOME": str(folder),
                       "COURSE_STRICT": "", "JUPYTER_CONFIG_DIR": str(folder / "config"), "PYTHONUNBUFFERED": "1",
                       "OMP_NUM_THREADS": "1"}  # the other core is the browser's
        command = [sys.executable, "-m", "course_utils", "lab", "--no-browser"]
        self.process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, text=True)
        said = ""
        for line in self.process.stdout:
            said += line
            found = re.match(r"http://127\.0\.0\.1:\d+/lab/tree/00_start_here\.ipynb\?token=\S+", line)
            if found:
                self.address = found.group()
                break
        else:
            raise AssertionError(f"lab printed no address:\n{said}")

    def set(self, name, content):
        path = self.settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))

    def notebook(self, lesson):
        return json.loads((self.work / f"{lesson}.ipynb").read_text())

    def stop(self):
        self.process.send_signal(signal.SIGINT if os.name != "nt" else signal.CTRL_BREAK_EVENT)
        return self.process.wait(30)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    if lab.process.poll() is None:
        lab.stop()


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ.get("COURSE_BROWSER") or find_browser(), args=FLAGS)
        yield browser
        browser.close()


class Seen:
    """A page on one lesson, and what a learner does with it. Console errors are collected."""

    def __init__(self, lab, browser, lesson):
        self.lab, self.lesson, self.errors = lab, lesson, []
        self.page = browser.new_page(viewport={"width": 1300, "height": 1000})
        self.page.set_default_timeout(PATIENCE)
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.open()

    def open(self):
        self.page.goto(self.lab.address.replace("00_start_here", self.lesson) + "&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.get_by_text("| Idle").wait_for()  # before that, a cell that is run waits for ever

    def cell(self, text):
        """The code cell whose source contains `text`."""
        return self.page.locator(".jp-CodeCell").filter(has=self.page.locator(".cm-content", has_text=text)).first

    def enter(self, cell):
        """Click into a cell's editor, until the keyboard is there: on a busy machine the page may still be drawing it."""
        for _ in range(20):
            cell.locator(".cm-content").click()
            if cell.locator(".cm-editor.cm-focused").count():
                return
            self.page.wait_for_timeout(250)
        raise AssertionError("the cell takes no focus")

    def run(self, cell):
        """Run one cell with Shift+Enter and wait until it is done; returns its output area."""
        self.enter(cell)
        self.page.keyboard.press("Shift+Enter")
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]')
        done = "cell => /\\[\\d+\\]/.test(cell.querySelector('.jp-InputPrompt').textContent)"
        self.page.wait_for_function(done, arg=cell.element_handle())
        return cell.locator(".jp-Cell-outputArea")

    def run_all(self):
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_text("Run All Cells", exact=True).click()
        self.page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].every(p => /\\[\\d+\\]/.test(p.textContent))",
            timeout=WHOLE_LESSON,
        )
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]')

    def choose_theme(self, name):
        self.page.get_by_role("menuitem", name="Settings", exact=True).click()
        self.page.locator(".lm-Menu-itemLabel").get_by_text("Theme", exact=True).hover()
        self.page.locator(".lm-Menu-itemLabel").get_by_text(name, exact=True).click()
        self.page.wait_for_selector(f'body[data-jp-theme-name="{name}"]', state="attached")  # a body counts as hidden

    def write(self, cell, old, new):
        """Type: select `old`, with which a cell ends, and put `new` in its place."""
        self.enter(cell)
        self.page.keyboard.press("Control+End")
        for _ in old:
            self.page.keyboard.press("Shift+ArrowLeft")
        self.page.keyboard.type(new)

    def pictures(self, name):
        """The whole lesson, from top to bottom, in as many pictures as Chromium's limit of 16,384 pixels asks for."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        panel = "document.querySelector('.jp-WindowedPanel-outer')"
        height = self.page.evaluate(f"{panel}.scrollHeight")
        paths = []
        for part, top in enumerate(range(0, height, 15_000)):
            self.page.set_viewport_size({"width": 1300, "height": min(height - top, 15_000) + 120})
            self.page.evaluate(f"{panel}.scrollTop = {top}")
            self.page.wait_for_timeout(500)
            paths.append(PICTURES / f"{name}-{part}.png")
            self.page.screenshot(path=paths[-1])
        self.page.set_viewport_size({"width": 1300, "height": 1000})
        return paths


@pytest.fixture
def see(lab, browser):
    opened = []

    def see(lesson):
        opened.append(Seen(lab, browser, lesson))
        return opened[-1]

    yield see
    for seen in opened:
        seen.page.close()
