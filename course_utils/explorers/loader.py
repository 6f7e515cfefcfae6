"""explore_loader(): an epoch of a DataLoader as a chart of loop and workers, simulated by its rules, and measured on this machine."""
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace

import ipywidgets as widgets

from ..engine.display import FAINT, INK, ROLES, show, svg_document
from ..engine.display import _axis as axis
from ._panel import STYLE as PANEL_STYLE
from ._panel import WIDTH, choice, lines, number, panel, text

LEFT, RIGHT, LANE = 92, 880, 34

STYLE = f"""
.lo .lane{{stroke:{FAINT};stroke-opacity:.35}} .lo .grid{{stroke:{FAINT};stroke-opacity:.25}} .lo rect{{stroke-width:1}}
.lo .step{{fill:{ROLES["gradients"]};fill-opacity:.55;stroke:{ROLES["gradients"]}}}
.lo .work{{fill:{ROLES["storage"]};fill-opacity:.4;stroke:{ROLES["storage"]}}}
.lo .transfer{{fill:{ROLES["copy"]};fill-opacity:.6;stroke:{ROLES["copy"]}}}
.lo .start{{fill:none;stroke:{ROLES["free"]};stroke-dasharray:3 2}}
.lo .wait{{fill:{ROLES["wrong"]};fill-opacity:.14;stroke:{ROLES["wrong"]}}}
.lo .hatched{{stroke:{ROLES["wrong"]};stroke-width:1;fill:none;opacity:.7}} .lo .done{{stroke:{INK};stroke-width:1.6;stroke-dasharray:4 3}}
"""


@dataclass(frozen=True)
class State:
    workers: int = 2
    cores: int = 4
    work: int = 60  # milliseconds to make a batch
    transfer: int = 2  # for the loop to take a batch over from a worker
    step: int = 20
    start: int = 30  # for a worker to start
    prefetch: int = 2
    batches: int = 12
    slow: int = 0  # this batch takes five times as long to make; counted from 1, 0: none
    in_order: bool = True


@dataclass
class Run:
    """Spans (kind, batch, begin, end), in milliseconds."""

    loop: list = field(default_factory=list)
    workers: dict = field(default_factory=dict)  # {worker: spans}
    end: float = 0.0

    @property
    def stall(self):
        """Share of the time that the loop does not work."""
        return 1 - sum(b - a for kind, _, a, b in self.loop if kind == "step") / self.end if self.end else 0.0


@dataclass(eq=False)
class _Process:
    """Something that computes: what it is at, since when, and how many milliseconds of a whole core are left of it."""

    doing: tuple | None = None
    since: float = 0.0
    left: float = 0.0
    queue: list = field(default_factory=list)

    def begin(self, kind, batch, length, now):
        self.doing, self.since, self.left = (kind, batch), now, float(length)


def work_of(state, batch):
    return state.work * (5 if batch + 1 == state.slow else 1)


@lru_cache(maxsize=64)
def simulate(state):
    """The epoch, by the rules of torch.utils.data.DataLoader, as a Run.

    Batch i goes to worker i % workers. At first each worker is told of `prefetch` batches, then of one more for each batch that the
    loop has taken. The loop takes batches in order, or as they are ready. Who computes shares the cores in equal parts.
    """
    run, now = Run(workers={w: [] for w in range(state.workers)}), 0.0
    loop, crew = _Process(), [_Process() for _ in range(state.workers)]
    for worker in crew:
        worker.begin("start", None, state.start, now)
    handed = taken = 0
    ready, waiting_since = [], 0.0
    while handed < min(state.batches, state.prefetch * state.workers):
        crew[handed % state.workers].queue.append(handed)
        handed += 1
    while True:
        for worker in crew:
            if worker.doing is None and worker.queue:
                batch = worker.queue.pop(0)
                worker.begin("work", batch, work_of(state, batch), now)
        if loop.doing is None:
            if taken == state.batches:
                break
            if not state.workers:
                loop.begin("wait", taken, work_of(state, taken), now)
            elif batch_ready := [b for b in ready if not state.in_order or b == taken][:1]:
                (batch,) = batch_ready
                ready.remove(batch)
                run.loop.append(("wait", batch, waiting_since, now))
                taken += 1
                if handed < state.batches:
                    crew[handed % state.workers].queue.append(handed)
                    handed += 1
                loop.begin("transfer", batch, state.transfer, now)
                continue
        busy = [p for p in (loop, *crew) if p.doing]
        rate = min(1.0, state.cores / len(busy))
        span = min(p.left for p in busy) / rate
        now += span
        for p in busy:
            p.left -= span * rate
        for p in [p for p in busy if p.left < 1e-9]:
            (kind, batch), p.doing = p.doing, None
            spans = run.loop if p is loop else run.workers[crew.index(p)]
            spans.append((kind, batch, p.since, now))
            if p is loop and kind == "wait":
                taken += 1
                loop.begin("step", batch, state.step, now)
            elif kind == "transfer":
                loop.begin("step", batch, state.step, now)
            elif kind == "step":
                waiting_since = now
            elif kind == "work":
                ready.append(batch)
    run.end = now
    return run


def findings(state):
    """Sentences on the epoch: how long, how much of it the loop waits, and what bounds it."""
    run, alone = simulate(state), simulate(replace(state, workers=0))
    speed = alone.end / run.end if run.end else 1.0
    first = f"The epoch takes {run.end:.0f} ms, {run.stall:.0%} of it without a step."
    if state.workers:
        first += f" Without workers: {alone.end:.0f} ms, so this is {speed:.2f} times as fast."
    return [first, bound(state)]


def bound(state):
    """What bounds the epoch, in words, from the times alone."""
    if not state.workers:
        return "The loop makes each batch itself: work and step add up."
    each, shared = state.work / state.workers, (state.work + state.transfer + state.step) / state.cores
    loop = state.transfer + state.step
    if shared > max(each, loop):
        return f"The cores bound it: per batch {state.work + loop} ms of computing for {state.cores} cores, {shared:.0f} ms."
    if state.slow and state.in_order and work_of(state, state.slow - 1) > state.prefetch * state.workers * max(loop, each):
        return f"Batch {state.slow} is slow, and those behind it are ready and wait for their turn: in_order."
    if each > loop:
        need = math.ceil(state.work / max(loop, 1))
        return f"The workers bound it: {state.work} ms for {state.workers} of them are {each:.0f} ms a batch. {need} would hide the work."
    return f"The loop bounds it: {loop} ms a batch, which the workers, at {each:.0f} ms, keep up with. More of them gain nothing."


def measure(state):
    """A real epoch on this machine, as a Run: JPEG digits, so many workers (at most 4), a step of about the chosen length."""
    import time

    import torch
    from torch.utils.data import DataLoader

    from ..datasets import JpegDigits
    from ..toolkit.loading import timeline

    matrix = torch.randn(128, 128)

    def step(batch):
        end = time.perf_counter() + min(state.step, 60) / 1e3
        while time.perf_counter() < end:
            matrix @ matrix

    seen = timeline(DataLoader(JpegDigits(192, 128), 16, num_workers=min(state.workers, 4)), step)
    run = Run(workers={w: [] for w in range(min(state.workers, 4))}, end=1e3 * seen.seconds)
    for n, m in enumerate(seen.moments):
        for kind in ("wait", "transfer", "step"):
            begin, end = getattr(m, kind)
            run.loop.append((kind, n, 1e3 * begin, 1e3 * end))
        if m.worker is not None:
            run.workers[m.worker].append(("work", n, 1e3 * m.work[0], 1e3 * m.work[1]))
    return run


def describe(state):
    """The picture in words."""
    run = simulate(state)
    rows = [f"{state.workers} workers, {state.cores} cores; work {state.work}, step {state.step}, transfer {state.transfer} ms"]
    rows += findings(state)
    for worker, spans in run.workers.items():
        rows.append(f"worker {worker}: batches " + ", ".join(f"{b + 1} until {end:.0f}" for kind, b, _, end in spans if kind == "work"))
    steps = [f"{b + 1} from {begin:.0f}" for kind, b, begin, _ in run.loop if kind == "step"]
    return "\n".join([*rows, "the loop's steps: " + ", ".join(steps)])


def draw(state, measured=None):
    """The picture as SVG text; `measured` is a Run of this machine, drawn below."""
    body, y = _chart(simulate(state), 46, "simulated")
    for sentence in findings(state):
        words, y = lines(14, y + 4, sentence)
        body += words
    if measured is not None:
        chart, y = _chart(measured, y + 34, f"measured here: JPEG digits, the first {len(_steps(measured))} batches")
        said = f"{measured.end:.0f} ms, {measured.stall:.0%} without a step. Workers are stopped at the end, which takes part of it."
        words, y = lines(14, y + 4, said)
        body += chart + words
    return svg_document(WIDTH, y, f'<g class="xp lo">{body}</g>', describe(state), PANEL_STYLE + STYLE)


def _steps(run):
    return [span for span in run.loop if span[0] == "step"]


def _chart(run, top, title):
    """Lanes for the loop and each worker over time; returns it with the y below."""
    across = axis(0, run.end or 1, LEFT, RIGHT)
    lanes = [("loop", run.loop), *((f"worker {w}", spans) for w, spans in run.workers.items())]
    body, bottom = text(14, top - 16, title, "strong") + _legend(top - 22), top + LANE * len(lanes)
    for value, x in across.ticks:
        body += f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>' + text(x, bottom + 16, f"{value:g}", "small mid")
    body += text(RIGHT, bottom + 34, "ms", "small end")
    for n, (name, spans) in enumerate(lanes):
        y = top + LANE * n
        body += text(14, y + 21, name, "small") + f'<path class="lane" d="M{LEFT} {y + LANE}H{RIGHT}"/>'
        for kind, batch, begin, end in spans:
            body += _span(kind, batch, across.place(begin), across.place(end), y + 5)
    x = across.place(run.end)
    return body + f'<path class="done" d="M{x:.1f} {top}V{bottom}"/>', bottom + 40


def _span(kind, batch, x, end, y):
    wide, tall = end - x, LANE - 11
    if wide < 0.4:
        return ""
    body = f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{tall}"/>'
    if kind == "wait":
        for at in range(0, int(wide), 9):
            across = min(12, wide - at)
            body += f'<path class="hatched" d="M{x + at:.1f} {y + tall}l{across:.1f} {-across * tall / 12:.1f}"/>'
    if batch is not None and kind in ("step", "work") and wide > 9 * len(str(batch + 1)) + 2:
        body += text(x + wide / 2, y + tall - 6, batch + 1, "small mid")
    return body


def _legend(y):
    body, x = "", 300
    for kind, words in (("wait", "waits"), ("transfer", "takes over"), ("step", "step"), ("work", "makes a batch"), ("start", "starts")):
        body += _span(kind, None, x, x + 18, y - 6) + text(x + 24, y + 10, words, "small")
        x += 40 + 8 * len(words)
    return body


def build():
    """The controls and the picture, wired; `explore_loader` shows them."""
    first = State()
    ui = SimpleNamespace(
        workers=number("workers", first.workers, 0, 8),
        cores=number("cores", first.cores, 1, 16),
        work=number("work ms", first.work, 1, 500),
        step=number("step ms", first.step, 1, 500),
        transfer=number("transfer ms", first.transfer, 0, 100),
        start=number("start ms", first.start, 0, 2000),
        prefetch=number("prefetch", first.prefetch, 1, 8),
        batches=number("batches", first.batches, 1, 40),
        slow=number("slow batch", 0, 0, 40),
        in_order=choice("batches come", ("in order", "as they are ready")),
        measure=widgets.Button(description="Measure here", layout={"width": "130px"}),
        picture=widgets.HTML(),
        state=first,
        measured=None,
    )
    settings = ("workers", "cores", "work", "step", "transfer", "start", "prefetch", "batches", "slow")

    def redraw(_=None):
        ui.state = State(**{name: getattr(ui, name).value for name in settings}, in_order=ui.in_order.value == "in order")
        ui.picture.value = draw(ui.state, ui.measured)

    def changed(_):
        ui.measured = None  # it belongs to other settings
        redraw()

    def measured(_):
        ui.measure.disabled = True
        try:
            ui.measured = measure(ui.state)
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
