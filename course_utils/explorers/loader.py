"""explore_loader(): an epoch of a DataLoader as a chart of loop and workers, simulated by its rules, and measured on this machine."""
import itertools
import math
import time
import warnings
from collections import deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace

import ipywidgets as widgets
import torch
from torch.utils.data import DataLoader, Dataset

from ..engine.display import FAINT, INK, ROLES, show, svg_document
from ..engine.display import _axis as axis
from ..toolkit.loading import stall_fraction, timeline
from ._panel import STYLE as PANEL_STYLE
from ._panel import WIDTH, choice, lines, number, panel, text

LEFT, RIGHT, LANE = 92, 880, 34
SLOW = 3  # the batch that can be made slow, counted from 0
LITTLE = 0.05  # of an epoch's time: what gains less is not worth a sentence
PIXELS, SIZE, FILES = 128, 16, 64  # of the measured epoch: a picture's side, pictures in a batch, different pictures
MOST_MEASURED = {"workers": 4, "batches": 12, "step": 60}  # so that it stays short
LEGEND = (("wait", "waits"), ("transfer", "transfer from a worker"), ("step", "step"), ("work", "makes a batch"), ("start", "starts"))
STYLE = f"""
.lo .lane{{stroke:{FAINT};stroke-opacity:.35}} .lo .grid{{stroke:{FAINT};stroke-opacity:.25}} .lo rect{{stroke-width:1}}
.lo .step{{fill:{ROLES["gradients"]};fill-opacity:.4;stroke:{ROLES["gradients"]}}}
.lo .work{{fill:{ROLES["storage"]};fill-opacity:.35;stroke:{ROLES["storage"]}}}
.lo .transfer{{fill:{ROLES["copy"]};fill-opacity:.7;stroke:{ROLES["copy"]};stroke-dasharray:1.5 1.5}}
.lo .start{{fill:none;stroke:{FAINT};stroke-dasharray:3 2}}
.lo .wait{{fill:{ROLES["wrong"]};fill-opacity:.12;stroke:{ROLES["wrong"]}}}
.lo .hatched{{stroke:{ROLES["wrong"]};stroke-width:1;fill:none;opacity:.7}} .lo .done{{stroke:{INK};stroke-width:1.6;stroke-dasharray:4 3}}
.lo .nth text{{font-size:13px;text-anchor:middle}}
"""


@dataclass(frozen=True)
class State:
    workers: int = 2
    cores: int = 4
    work: int = 60  # milliseconds to make a batch
    transfer: int = 2  # for the loop to fetch a batch from a worker; without workers there is nothing to fetch
    step: int = 20
    start: int = 30  # for a worker to start
    prefetch: int = 2
    batches: int = 12
    slow: int = 1  # batch SLOW takes so many times as long to make
    in_order: bool = True

    @property
    def works(self):
        return tuple(self.work * (self.slow if batch == SLOW else 1) for batch in range(self.batches))


@dataclass
class Run:
    """An epoch: spans (kind, batch, begin, end), in milliseconds."""

    loop: list = field(default_factory=list)  # kinds: wait, transfer, step
    own: list = field(default_factory=list)  # work that the loop does itself, within its waits
    workers: dict = field(default_factory=dict)  # {worker: spans}, kinds: start, work
    log: list = field(default_factory=list)  # ("hand", batch, worker) and ("take", batch), in the order of the loader's doing
    end: float = 0.0

    @property
    def stall(self):
        """Share of the loop's time without a step."""
        lengths = {"step": [], "other": []}
        for kind, _, begin, end in self.loop:
            lengths["step" if kind == "step" else "other"].append(end - begin)
        return stall_fraction(lengths["other"], lengths["step"])


# ── The simulation ────────────────────────────────────────────────────────────────────────────────────────────────────


class _Process:
    """Something that computes: what it is at, since when, and how many milliseconds of a whole core are left of it."""

    def __init__(self, spans):
        self.spans, self.doing, self.told, self.since = spans, None, deque(), 0.0

    def begin(self, kind, batch, length, now):
        self.doing, self.since, self.left = (kind, batch), now, float(length)

    def finish(self, now):
        (kind, batch), self.doing = self.doing, None
        if now > self.since:
            self.spans.append((kind, batch, self.since, now))
        self.since = now
        return kind, batch


class _Epoch:
    """The loop, its workers, and between them the rules of torch's _MultiProcessingDataLoaderIter, of which each method has one."""

    def __init__(self, state, works):
        self.state, self.works, self.now = state, works, 0.0
        self.run = Run(workers={w: [] for w in range(state.workers)})
        self.loop, self.crew = _Process(self.run.loop), [_Process(spans) for spans in self.run.workers.values()]
        self.turns, self.sent, self.taken = itertools.cycle(range(state.workers)), 0, 0
        self.who = {}  # whose a batch is that is handed out and not yet taken
        self.queue, self.stored = deque(), set()  # made and not yet fetched; fetched, and waiting for its turn
        for worker in self.crew:
            worker.begin("start", None, state.start, 0.0)
        for _ in range(state.prefetch * state.workers):
            self.hand_out()

    def hand_out(self):
        """Tell a worker of the next batch (_try_put_index): the next one in turn; out of order, the next that has not its full share."""
        if self.sent == len(self.works):
            return
        held = list(self.who.values())
        worker = next(w for w in self.turns if self.state.in_order or held.count(w) < self.state.prefetch)
        self.crew[worker].told.append(self.sent)
        self.who[self.sent] = worker
        self.run.log.append(("hand", self.sent, worker))
        self.sent += 1

    def take(self, batch):
        """The loop has its batch: one more is handed out (_process_data), and the step begins."""
        if self.state.workers:
            del self.who[batch]
            self.hand_out()
        self.run.log.append(("take", batch))
        self.taken += 1
        self.loop.begin("step", batch, self.state.step, self.now)

    def ask(self):
        """The loop wants a batch (_next_data): one that waits for its turn, else the first in the queue, else there is none yet."""
        if not self.state.workers:
            self.loop.begin("wait", self.taken, self.works[self.taken], self.now)
        elif (wanted := min(self.who)) in self.stored:
            self.stored.remove(wanted)
            self.take(wanted)
        elif self.queue:
            self.waited(wanted)
            self.loop.begin("transfer", self.queue.popleft(), self.state.transfer, self.now)

    def waited(self, wanted):
        """Note a wait until now, as one with the wait before where only a fetch that took no time lies between."""
        spans, begin = self.run.loop, self.loop.since
        if spans and spans[-1][0] == "wait":
            begin = spans.pop()[2]
        if self.now > begin:
            spans.append(("wait", wanted, begin, self.now))

    def fetched(self, batch):
        if self.state.in_order and batch != min(self.who):
            self.stored.add(batch)
        else:
            self.take(batch)

    def go_on(self):
        """Let time pass until something is done. Who computes shares the cores in equal parts."""
        busy = [p for p in (self.loop, *self.crew) if p.doing]
        rate = min(1.0, self.state.cores / len(busy))
        span = min(p.left for p in busy)
        self.now += span / rate
        for p in busy:
            p.left -= span
        for p in busy:
            if p.left < 1e-9:
                self.after(*p.finish(self.now))

    def after(self, kind, batch):
        if kind == "work":
            self.queue.append(batch)
        elif kind == "transfer":
            self.fetched(batch)
        elif kind == "wait":  # in which the loop has made the batch
            self.run.own.append(("work", *self.run.loop[-1][1:]))
            self.take(batch)


@lru_cache(maxsize=256)
def simulate(state, works=None):
    """The epoch by the rules of torch.utils.data.DataLoader, a Run; works: milliseconds for each batch, in place of the state's own.

    Batch i goes to worker i % workers. At first each worker is told of `prefetch` batches, then one more is handed out for each that
    the loop takes. The loop fetches batches as they are made, and takes them in order, or as they come.
    """
    epoch = _Epoch(state, state.works if works is None else works)
    while epoch.taken < len(epoch.works) or epoch.loop.doing:
        if epoch.loop.doing is None:
            epoch.ask()
        for worker in epoch.crew:  # after the loop, which may just have handed out a batch
            if worker.doing is None and worker.told:
                batch = worker.told.popleft()
                worker.begin("work", batch, epoch.works[batch], epoch.now)
        epoch.go_on()
    epoch.run.end = epoch.now
    return epoch.run


# ── What there is to say of it ────────────────────────────────────────────────────────────────────────────────────────


def _many(count, thing):
    return f"{count} {thing}{'' if count == 1 else 's'}"


def findings(state):
    """Sentences on the epoch: how long, how much of it the loop has no step, and what bounds it."""
    run, alone = simulate(state), simulate(replace(state, workers=0))
    first = f"The epoch takes {run.end:.0f} ms, {run.stall:.0%} of it without a step."
    if state.workers:
        first += f" Without workers: {alone.end:.0f} ms, so this is {alone.end / run.end:.2f} times as fast."
    return [first, bound(state)]


def bound(state):
    """What bounds the epoch, in words: that which, taken away in the simulation, shortens it most."""
    if not state.workers:
        return "The loop makes each batch itself: work and step add up."
    end, loop, each = simulate(state).end, state.transfer + state.step, state.work / state.workers
    if loop * state.batches > 0.9 * end:
        return f"The loop bounds it: {loop} ms a batch, and the workers keep up. More of them gain nothing."
    doubled = 2 * state.workers
    cures = {"workers": {"workers": doubled}, "cores": {"cores": state.workers + 1}, "start": {"start": 0}, "prefetch": {"prefetch": 8}}
    if state.slow > 1 and state.batches > SLOW:
        cures |= {"order": {"in_order": False}, "slow": {"slow": 1}}
    without = {name: simulate(replace(state, **changes)).end for name, changes in cures.items()}
    if without.get("order", end) < (1 - LITTLE) * end:
        del without["slow"]  # the order is what can be chosen
    best = min(without, key=without.get)
    both = simulate(replace(state, workers=doubled, cores=doubled + 1)).end
    if without[best] > (1 - LITTLE) * end:
        if both > (1 - LITTLE) * end:
            return "Nothing alone bounds it: what takes time is that the first batch must be made before the first step."
        return f"Workers and cores bound it together. {doubled} workers, and a core for each process: {both:.0f} ms."
    instead = f"{without[best]:.0f} ms"
    return {
        "workers": f"The workers bound it: {state.work} ms for {state.workers} of them are {each:.3g} ms a batch, the loop needs {loop}. "
        f"{doubled} workers: {instead}.",
        "cores": f"The cores bound it: {_many(state.cores, 'core')} for {state.workers + 1} processes, and {state.work + loop} ms of "
        f"computing a batch. A core for each: {instead}.",
        "start": f"Most could be saved at the start of the workers: if they were there already, it would take {instead}.",
        "prefetch": f"The workers may not run far enough ahead: with a prefetch of 8 it takes {instead}.",
        "order": f"Batch {SLOW} is slow, and those behind it are made and wait for their turn. Taken as they are ready: {instead}.",
        "slow": f"Batch {SLOW} bounds it: to make it takes {state.work * state.slow} ms. If it were like the others: {instead}.",
    }[best]


def measured_words(state, run):
    """On the measured epoch: a title, and a sentence on what came."""
    pictures = f"{len(_steps(run))} batches of {SIZE} JPEG digits"
    title = f"measured here: {pictures}, {_many(len(run.workers), 'worker')}, step about {min(state.step, MOST_MEASURED['step'])} ms"
    said = f"{run.end:.0f} ms, {run.stall:.0%} of the loop's time without a step."
    return title, said + (" At the dashed line the workers are gone, too." if run.workers else "")


def describe(state, measured=None):
    """The picture in words."""
    run = simulate(state)
    rows = [f"simulated: {_many(state.workers, 'worker')}, {_many(state.cores, 'core')}; "
            f"per batch: work {state.work}, transfer {state.transfer}, step {state.step} ms"]
    rows += [*findings(state), *_lanes_in_words(run)]
    if measured is not None:
        rows += [*measured_words(state, measured), *_lanes_in_words(measured)]
    return "\n".join(rows)


def _lanes_in_words(run):
    rows = [f"worker {worker}: " + (", ".join(f"batch {b} made {begin:.0f} to {end:.0f}" for kind, b, begin, end in spans if kind == "work")
                                   or "no batch") for worker, spans in run.workers.items()]
    return ["loop: " + ", ".join(f"batch {b} step {begin:.0f} to {end:.0f}" for _, b, begin, end in _steps(run)), *rows]


def _steps(run):
    return [span for span in run.loop if span[0] == "step"]


# ── A real epoch ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Numbered(Dataset):
    """Pictures with their own number, `slow` times decoded where they belong to batch SLOW. In a module, for workers to import."""

    def __init__(self, pictures, count, slow):
        self.pictures, self.count, self.slow = pictures, count, slow

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        for _ in range(self.slow if index // SIZE == SLOW else 1):
            image, _ = self.pictures[index % len(self.pictures)]
        return image, index


@lru_cache(maxsize=1)
def _pictures():
    from ..datasets import JpegDigits  # torchvision, which takes a second, is imported when it is wanted

    return JpegDigits(FILES, PIXELS)


def measure(state):
    """A real epoch on this machine, as a Run: JPEG digits, with the state's workers, prefetch, order and step, each within limits.

    The loop computes in each step what took so long alone. No worker is left, and the random numbers are as before.
    """
    workers, batches, step = (min(getattr(state, name), most) for name, most in MOST_MEASURED.items())
    settings = {"num_workers": workers, "in_order": state.in_order, "prefetch_factor": state.prefetch if workers else None}
    taken, product = [], _product(step / 1e3)

    def work(batch):
        taken.append(batch[1][0].item() // SIZE)
        product()

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: that is the question
        seen = timeline(DataLoader(_Numbered(_pictures(), SIZE * batches, state.slow), SIZE, **settings), work)
    run = Run(workers={w: [] for w in range(workers)}, end=1e3 * seen.seconds)
    for batch, moment in zip(taken, seen.moments):
        for kind in ("wait", "transfer", "step"):
            run.loop.append(_span(kind, batch, getattr(moment, kind)))
        (run.own if moment.worker is None else run.workers[moment.worker]).append(_span("work", batch, moment.work))
    return run


def _span(kind, batch, seconds):
    return kind, batch, 1e3 * seconds[0], 1e3 * seconds[1]


def _product(seconds):
    """A function that multiplies matrices for about so long, on a core of its own."""
    matrix = torch.ones(128, 128)
    found = []
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(10):
            matrix @ matrix
        found.append((time.perf_counter() - began) / 10)
    times = max(1, round(seconds / min(found)))

    def product():
        for _ in range(times):
            matrix @ matrix

    return product


# ── The picture ───────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(state, measured=None, said=""):
    """The picture as SVG text; `measured` is a Run of this machine, drawn below; `said`: why there is none."""
    body, y = _chart(simulate(state), "simulated by the loader's rules", 26)
    for sentence in findings(state):
        words, y = lines(14, y + 2, sentence)
        body += words
    if said:
        words, y = lines(14, y + 14, f"✗ {said}", "bad strong", 96)
        body += words
    if measured is not None:
        title, sentence = measured_words(state, measured)
        chart, y = _chart(measured, title, y + 30)
        words, y = lines(14, y + 2, sentence)
        body += chart + words
    return svg_document(WIDTH, y - 4, f'<g class="xp lo">{body}</g>', describe(state, measured), PANEL_STYLE + STYLE)


def _chart(run, title, y):
    """A title, and lanes for the loop and each worker over time; returns it with the y below."""
    body, top = text(14, y, title, "strong") + _legend(y + 12), y + 40
    lanes = [("loop", run.loop), *((f"worker {w}", spans) for w, spans in run.workers.items())]
    across, bottom = axis(0, run.end or 1, LEFT, RIGHT), top + LANE * len(lanes)
    for value, x in across.ticks:
        body += f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>' + text(x, bottom + 16, f"{value:g}", "small mid")
    body += text(14, bottom + 16, "ms", "small")
    for n, (name, spans) in enumerate(lanes):
        at = top + LANE * n
        body += text(14, at + 21, name, "small") + f'<path class="lane" d="M{LEFT} {at + LANE}H{RIGHT}"/>'
        for kind, batch, begin, end in spans:
            body += _box(kind, batch, across.place(begin), across.place(end), at + 5, LANE - 11)
    for kind, batch, begin, end in run.own:  # over the loop's waits
        body += _box(kind, batch, across.place(begin), across.place(end), top + 9, LANE - 19)
    x = across.place(run.end)
    return body + f'<path class="done" d="M{x:.1f} {top}V{bottom}"/>', bottom + 40


def _box(kind, batch, x, end, y, tall):
    wide = end - x
    if wide < 0.3:
        return ""
    body = f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{tall}"/>'
    if kind == "wait":
        path = ""
        for at in range(0, math.ceil(wide), 9):
            run = min(12, wide - at)
            path += f"M{x + at:.1f} {y + tall}l{run:.1f} {-run * tall / 12:.1f}"
        body += f'<path class="hatched" d="{path}"/>'
    if batch is not None and kind in ("step", "work") and wide > 9 * len(str(batch)) + 2:
        body += f'<g class="nth">{text(x + wide / 2, y + tall / 2 + 5, batch)}</g>'
    return body


def _legend(y):
    body, x = "", LEFT
    for kind, words in LEGEND:
        body += _box(kind, None, x, x + 18, y, 14) + text(x + 24, y + 12, words, "small")
        x += 48 + 7.4 * len(words)
    return body


# ── The controls ──────────────────────────────────────────────────────────────────────────────────────────────────────


def build():
    """The controls and the picture, wired; `explore_loader` shows them."""
    first = State()
    ui = SimpleNamespace(
        workers=number("workers", first.workers, 0, 8),
        cores=number("cores", first.cores, 1, 16),
        work=number("work ms", first.work, 1, 500),
        transfer=number("transfer ms", first.transfer, 0, 100),
        step=number("step ms", first.step, 1, 500),
        start=number("start ms", first.start, 0, 2000),
        prefetch=number("prefetch", first.prefetch, 1, 8),
        batches=number("batches", first.batches, 1, 40),
        slow=number(f"batch {SLOW} ×", first.slow, 1, 10),
        in_order=choice("taken", ("in order", "as they are ready")),
        measure=widgets.Button(description="Measure here", layout={"width": "130px"}),
        picture=widgets.HTML(),
        state=first,
        measured=None,
        said="",
    )
    settings = ("workers", "cores", "work", "transfer", "step", "start", "prefetch", "batches", "slow")

    def redraw(_=None):
        ui.state = State(**{name: getattr(ui, name).value for name in settings}, in_order=ui.in_order.value == "in order")
        ui.picture.value = draw(ui.state, ui.measured, ui.said)

    def changed(_):
        ui.measured, ui.said = None, ""  # they belong to other settings
        redraw()

    def measured(_):
        ui.measured, ui.said, ui.measure.disabled = None, "", True
        try:
            ui.measured = measure(ui.state)
        except (OSError, RuntimeError, ImportError) as error:
            ui.said = f"No epoch could be measured here. {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        finally:
            ui.measure.disabled = False
        redraw()

    for name in (*settings, "in_order"):
        getattr(ui, name).observe(changed, "value")
    ui.measure.on_click(measured)
    ui.redraw = redraw
    ui.box = panel([ui.in_order], [*(getattr(ui, name) for name in settings), ui.measure], ui.picture)
    redraw()
    return ui


def explore_loader():
    """Choose workers, cores and times, and see where an epoch goes, by the rules of the DataLoader; then measure one on this machine."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
