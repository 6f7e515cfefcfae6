"""No DataLoader worker outlives the cell that started it, in a real kernel: not after its end, nor a break, an error, an interrupt."""
import signal
import sys
import time

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

# The first epoch also starts what multiprocessing keeps for the whole process (its resource tracker; a fork server).
SETUP = """
import multiprocessing, os, time
from torch.utils.data import DataLoader
import course_utils.toolkit.loading as kit
from course_utils import datasets

def loader(count=8, seconds=0.01):
    return DataLoader(datasets.Remote(count, seconds), batch_size=4, num_workers=2)

def ready():
    print("ready", len(multiprocessing.active_children()), flush=True)

def fail(batch):
    ready()
    raise ArithmeticError("in the step")

def go_on(batch):
    if batch[0, 0] == 4:  # the second batch
        ready()

def sleep(batch):
    ready()
    for _ in range(600):  # a signal that another thread gets ends no sleep
        time.sleep(0.1)

def with_workers(step):
    # for a search: its first trials are without workers
    return lambda batch: step(batch) if multiprocessing.active_children() else None

for batch in loader():
    pass
print(os.getpid())
"""
ENDLESS = "loader(1_000_000, 0.05)"  # batches take 0.2 s, so that the loop is nearly always found waiting
SEARCH = "kit.tune_loader(datasets.Remote(400, 0.01), {}, {}, batch_size=4, most_workers=2)"
BROKEN = "DataLoader(datasets.Rows([0.0] * 6 + [None] * 60), batch_size=2, num_workers=2)"  # None: the collate function's error
WAITED = 30  # seconds, on a loaded machine


class Kernel:
    def __init__(self):
        self.manager, self.client = start_new_kernel()
        try:
            error, printed = self.run(SETUP)
            assert error is None
            self.process = psutil.Process(int(printed))
            self.before = []
        except BaseException:
            self.stop()
            raise

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, source, interrupt=None):
        """Run a cell, and call `interrupt` once when it prints "ready". Returns the name of its error, or None, and what it printed."""
        errors, printed = [], []

        def look(message):
            content = message["content"]
            if message["header"]["msg_type"] == "error":
                errors.append(content["ename"])
            elif content.get("name") == "stdout":
                printed.append(content["text"])
                if interrupt and "ready" in content["text"] and "".join(printed).count("ready") == 1:
                    interrupt()

        self.client.execute_interactive(source, output_hook=look, timeout=120)
        return errors[0] if errors else None, "".join(printed)

    def workers(self):
        """Processes that the cells since `before` was noted have started and that still run."""
        try:
            found = [p for p in self.process.children(recursive=True) if p not in self.before]
            return [p for p in found if p.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:  # one ended between two questions
            return self.workers()

    def left(self):
        """The workers that are there after a while."""
        deadline = time.monotonic() + WAITED
        while (found := self.workers()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found


@pytest.fixture(scope="module")
def one_kernel():
    kernel = Kernel()
    yield kernel
    kernel.stop()


@pytest.fixture
def kernel(one_kernel):
    one_kernel.before = one_kernel.process.children(recursive=True)  # what one test leaves is not held against the next
    return one_kernel


def test_workers_are_seen_while_they_run(kernel):
    assert kernel.run("iterator = iter(loader(1_000_000))\nbatch = next(iterator)")[0] is None
    assert len(kernel.workers()) == 2
    kernel.run("del iterator")
    assert kernel.left() == []


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("for batch in loader(): pass", id="loop, end"),
        pytest.param("for batch in loader(1_000_000):\n    ready()\n    break", id="loop, break"),
        pytest.param("seen = kit.timeline(loader(), go_on)", id="timeline, end"),
        pytest.param("seen = kit.timeline(loader(1_000_000), go_on, batches=3)", id="timeline, break"),
        pytest.param(f"found = {SEARCH.format('with_workers(lambda batch: None)', 1.0)}", id="tune_loader, end"),
    ],
)
def test_none_is_left_by_a_cell_that_ends(kernel, source):
    assert kernel.run(source)[0] is None
    assert kernel.left() == []


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("for batch in loader(1_000_000): fail(batch)", id="loop"),
        pytest.param("kit.timeline(loader(1_000_000), fail)", id="timeline"),
        pytest.param(SEARCH.format("with_workers(fail)", 60), id="tune_loader"),
    ],
)
def test_none_is_left_by_a_step_that_raises(kernel, source):
    error, printed = kernel.run(source)
    assert error == "ArithmeticError" and int(printed.split()[1]) > 0, "it ran with workers"
    assert kernel.left() == []


def test_none_is_left_by_a_timeline_of_a_dataset_that_raises(kernel):
    assert kernel.run(f"kit.timeline({BROKEN}, lambda batch: None)")[0] == "TypeError"
    assert kernel.left() == []


STEPS = pytest.mark.parametrize("step", [pytest.param("go_on", id="waiting"), pytest.param("sleep", id="in the step")])


@STEPS
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(f"for batch in {ENDLESS}: %s(batch)", id="loop"),
        pytest.param(f"kit.timeline({ENDLESS}, %s)", id="timeline"),
        pytest.param(SEARCH.format("with_workers(%s)", 60), id="tune_loader"),
    ],
)
def test_none_is_left_by_an_interrupted_cell(kernel, source, step):
    error, printed = kernel.run(source % step, kernel.manager.interrupt_kernel)
    assert error == "KeyboardInterrupt" and int(printed.split()[1]) > 0, "it ran with workers"
    assert kernel.left() == []


@STEPS
@pytest.mark.skipif(sys.platform == "win32", reason="there an interrupt always reaches the kernel alone")
def test_none_is_left_by_a_timeline_whose_workers_do_not_hear_of_the_interrupt(kernel, step):
    """Jupyter sends the signal to the kernel's process group, workers included; other front ends need not."""
    error, _ = kernel.run(f"kit.timeline({ENDLESS}, {step})", lambda: kernel.process.send_signal(signal.SIGINT))
    assert error == "KeyboardInterrupt"
    assert kernel.left() == []
