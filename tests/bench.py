"""python tests/bench.py: what the course costs on this machine, beside the budgets of its design. It judges nothing.

    python tests/bench.py --no-notebooks    leaves out the notebooks, which take most of the time
"""
import importlib.util
import os
import pathlib
import pkgutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

import course_utils.explorers
from course_utils import recipes
from course_utils.datasets import JpegDigits
from course_utils.engine import notebooks, runs
from course_utils.engine.data import load
from course_utils.engine.suite import find_browser
from course_utils.toolkit.loading import timeline, tune_loader

CLOCK = "import time; began = time.perf_counter(); {}; print(1e3 * (time.perf_counter() - began))"
WATCH = """area => {
    window.seen = [];
    document.addEventListener('keydown', () => { window.pressed = performance.now() }, true);
    const drawn = () => { if (window.pressed) { window.seen.push(performance.now() - window.pressed); window.pressed = null } };
    new MutationObserver(drawn).observe(area.querySelector('svg').parentElement, { childList: true, subtree: true });
}"""
IN_PYTHON = {
    "import course_utils": (20, "30 ms", "", "import course_utils"),
    "start() beyond torch's import": (
        7, "300 ms", "import torch", "from course_utils import start; start('00_start_here')",
    ),
    "second start: the stamp is met": (
        10, "", "from course_utils.engine import environment", "environment.ready()",
    ),
}

KEYS = (  # lesson, explorer, the control that has the focus, and two keys that change the picture in turn
    ("01_tensors", "strides", lambda area: area.get_by_label("next view", exact=True), "12"),
    ("01_tensors", "memory_format", lambda area: area.get_by_label("width", exact=True), ("ArrowDown", "ArrowUp")),
    ("02_autograd", "graph", lambda area: area.get_by_role("button", name="retain_graph", exact=True), ("Space", "Space")),
    ("02_autograd", "accumulation", lambda area: area.get_by_role("button", name="A.backward()", exact=True), ("Enter", "Enter")),
    ("03_training", "descent", lambda area: area.locator(".noUi-handle").first, ("ArrowLeft", "ArrowRight")),
    ("03_training", "schedule", lambda area: area.get_by_label("epochs", exact=True), ("ArrowDown", "ArrowUp")),
    ("04_amp", "float", lambda area: area.get_by_role("button", name="Times 2", exact=True), ("Enter", "Enter")),
    ("05_dataloader", "loader", lambda area: area.get_by_label("workers", exact=True), ("ArrowUp", "ArrowDown")),
    ("05_dataloader", "collate", lambda area: area.get_by_label("padding", exact=True), ("ArrowUp", "ArrowDown")),
    ("04_amp", "loss_scale", lambda area: area.get_by_label("scale 2^", exact=True), ("ArrowUp", "ArrowDown")),
)


def in_python(times, before, measured):
    """Milliseconds of a statement, each time in a Python of its own."""
    found = []
    for _ in range(times):
        program = f"{before}\n{CLOCK.format(measured)}"
        ran = subprocess.run([sys.executable, "-c", program], cwd=notebooks.REPO, capture_output=True, text=True, check=True)
        found.append(float(ran.stdout.split()[-1]))
    return found


def redraws(module, times=100):
    """Milliseconds of one redraw of an explorer, as one of its controls causes it."""
    ui, found = module.build(), []
    for _ in range(times):
        began = time.perf_counter()
        ui.redraw()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def keys_to_pictures():
    """{explorer: milliseconds from a key press to the changed picture, in a real browser}, or why they are not measured."""
    program = find_browser()
    if program is None:
        return "no Chromium or Chrome found"
    from playwright.sync_api import sync_playwright

    spec = importlib.util.spec_from_file_location("browser", notebooks.REPO / "tests" / "browser" / "conftest.py")
    browser = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(browser)
    found = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, sync_playwright() as playwright:
        lab = browser.Lab(pathlib.Path(folder))
        chromium = playwright.chromium.launch(executable_path=program, args=browser.FLAGS)
        try:
            for lesson, explorer, control, keys in KEYS:
                seen = browser.Seen(lab, chromium, lesson)
                seen.run(seen.cell("lesson = start("))
                area = seen.run(seen.cell(f"explore_{explorer}("))
                area.locator("svg").first.wait_for()
                control(area).focus()
                area.evaluate(WATCH)
                for press in range(40):
                    seen.page.keyboard.press(keys[press % 2])
                    seen.page.wait_for_function(f"window.seen.length > {press}")
                found[explorer] = seen.page.evaluate("window.seen")
                seen.page.close()
        finally:
            chromium.close()
            lab.stop()
    return found


def line(what, middle, late="", budget=""):
    print(f"{what:<52}{middle:>12}{late:>12}{budget:>14}", flush=True)


def spread(what, milliseconds, budget=""):
    ninetyfifth = statistics.quantiles(milliseconds, n=20, method="inclusive")[-1]
    line(what, f"{statistics.median(milliseconds):.1f} ms", f"{ninetyfifth:.1f} ms", budget)


def races(most=30):
    """Prints how soon the quick-starts' recipes and lesson 03's have 97 % of 1,000 held-out digits right, one run each."""
    digits = load("digits")
    line(f"\nseconds of training until 97 %, at most {most}", "97 % after", "in the end")
    for name, recipe in {**recipes.QUICK_STARTS, "lesson 03's final loop, three epochs": recipes.FINAL}.items():
        run = recipes.race(recipe, digits, most, stop=recipe.epochs is None)
        line(name, "not" if run.reached is None else f"{run.reached:.1f} s", f"{run.accuracy:.1%}", f"in {run.seconds:.1f} s")


def loaders():
    """Prints the speed of loaders on JPEG files, by articles' rules, the toolkit's search and a sweep, and what timeline costs."""
    data, cores = JpegDigits(384, 256), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    began = time.perf_counter()
    for i in range(64):
        data[i]
    step = product((time.perf_counter() - began) / 4)  # two batches of 32 were decoded: half of one

    def plain(loader):
        for batch in loader:
            step(batch)

    def seconds(times, *kinds, **settings):
        """The median time of so many epochs of each kind, in turn; the start of the workers is in it."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: that is the question
            loader, found = torch.utils.data.DataLoader(data, **{"batch_size": 32, **settings}), [[] for _ in kinds]
            for _ in range(times):
                for kind, kept in zip(kinds, found):
                    began = time.perf_counter()
                    kind(loader)
                    kept.append(time.perf_counter() - began)
        return [statistics.median(kept) for kept in found]

    def rate(**settings):
        return len(data) / seconds(3, plain, **settings)[0]

    tuned = tune_loader(data, step, 12, batch_size=32)
    line(f"\nimages per second, {len(data)} JPEG files, {cores} cores", "median of 3")
    line("default: 0 workers", f"{rate():.0f}")
    for rule, workers in {"4 workers": 4, "cores - 1": max(cores - 1, 1), "cores / 2": max(cores // 2, 1)}.items():
        line(f"rule: {rule}" + f" = {workers}" * ("cores" in rule), f"{rate(num_workers=workers):.0f}")
    line(f"tune_loader, {tuned.spent:.0f} s: {tuned.choice}", f"{rate(**tuned.settings):.0f}")
    sweep = {"0 workers": rate()}
    for workers in (1, 2, 3, 4):
        for ahead in (2, 8):
            sweep[f"{workers} worker{'s' * (workers > 1)}, prefetch_factor={ahead}"] = rate(num_workers=workers, prefetch_factor=ahead)
    best = max(sweep, key=sweep.get)
    line(f"best of a sweep of {len(sweep)}: {best}", f"{sweep[best]:.0f}")
    for workers in (0, 2):
        without, noted = seconds(5, plain, lambda loader: timeline(loader, step), num_workers=workers)
        line(f"timeline's overhead, {workers} workers", f"{noted / without - 1:+.1%}")


def product(seconds):
    """A step that multiplies matrices for about so long, whatever it is given."""
    a = torch.randn(256, 256)
    began = time.perf_counter()
    for _ in range(50):
        a @ a
    times = max(round(50 * seconds / (time.perf_counter() - began)), 1)

    def step(batch):
        for _ in range(times):
            a @ a

    return step


def peak():
    """The most memory that one of the processes so far had resident; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    kilo = 1 if sys.platform == "darwin" else 1024
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_CHILDREN, resource.RUSAGE_SELF)) * kilo


def main(arguments):
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, "
          f"load {os.getloadavg()[0] if hasattr(os, 'getloadavg') else 'unknown'}\n")
    line("", "p50", "p95", "budget")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["COURSE_WORK"] = scratch
        for what, (times, budget, before, measured) in IN_PYTHON.items():
            spread(what, in_python(times, before, measured), budget)
        for name in sorted(m.name for m in pkgutil.iter_modules(course_utils.explorers.__path__)):
            if not name.startswith("_"):
                module = importlib.import_module(f"course_utils.explorers.{name}")
                spread(f"redraw of explorer {name}", redraws(module), "20 ms")
        latencies = keys_to_pictures()
    for name, found in latencies.items() if isinstance(latencies, dict) else ():
        spread(f"key press to picture of explorer {name}", found, "150 ms")
    if isinstance(latencies, str):
        line("key press to picture", "not measured", latencies)
    races()
    loaders()
    if "--no-notebooks" not in arguments:
        print()
        for solved in (False, True):
            results = runs.run_all(notebooks.lessons(), solved=solved)
            for r in results:
                line(f"{r.lesson}, {'solved' if solved else 'as given'}{', FAILED' if r.problem else ''}",
                     f"{r.seconds:.1f} s", budget="40 s")
            line("all of them", f"{sum(r.seconds for r in results):.1f} s", budget="" if solved else "240 s")
    line("\nlargest process (resident)", f"{peak() / 1e6:.0f} MB" if peak() else "unknown")


if __name__ == "__main__":
    main(sys.argv[1:])
