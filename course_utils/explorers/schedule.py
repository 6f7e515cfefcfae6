"""explore_schedule(): the learning rate that a real scheduler gives each batch, also when it is stepped otherwise than meant."""
import copy
import math
import random
import warnings
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean
from types import SimpleNamespace

import ipywidgets as widgets
import torch
from torch.optim import lr_scheduler

from ..engine.display import FAINT, INK, ROLES, show, svg_document
from ..engine.display import _axis as axis
from ._panel import STYLE as PANEL_STYLE
from ._panel import WIDTH, choice, lines, number, panel, text

RATE = 0.1  # the optimizer's own, before any scheduler
LEFT, RIGHT = 84, 880
SCHEDULERS = {  # the code that makes each; h: its horizon, w: its warm-up, both in what the scheduler counts
    "StepLR": lambda h, w, s: f"StepLR(optimizer, step_size={max(1, h // 3)}, gamma=0.1)",
    "MultiStepLR": lambda h, w, s: f"MultiStepLR(optimizer, milestones=[{h // 2}, {3 * h // 4}], gamma=0.1)",
    "ExponentialLR": lambda h, w, s: f"ExponentialLR(optimizer, gamma={0.01 ** (1 / h):.4g})",
    "LinearLR": lambda h, w, s: f"LinearLR(optimizer, start_factor=1.0, end_factor=0.01, total_iters={h})",
    "PolynomialLR": lambda h, w, s: f"PolynomialLR(optimizer, total_iters={h}, power=2)",
    "CosineAnnealingLR": lambda h, w, s: f"CosineAnnealingLR(optimizer, T_max={h})",
    "CosineAnnealingWarmRestarts": lambda h, w, s: f"CosineAnnealingWarmRestarts(optimizer, T_0={_period(h, s)}, T_mult={s.mult})",
    "CyclicLR": lambda h, w, s: f"CyclicLR(optimizer, base_lr={RATE / 10}, max_lr={RATE}, step_size_up={max(1, h // 6)})",
    "OneCycleLR": lambda h, w, s: f"OneCycleLR(optimizer, max_lr={RATE}, total_steps={h})",
    "LambdaLR": lambda h, w, s: f"LambdaLR(optimizer, lambda n: min((n + 1) / {w}, ({w} / (n + 1)) ** 0.5))",
    "ReduceLROnPlateau": lambda h, w, s: f"ReduceLROnPlateau(optimizer, factor=0.2, patience={max(1, round(h / s.epochs))})",
}
ENDS = ("LinearLR", "PolynomialLR", "CosineAnnealingLR", "OneCycleLR")  # these are told how many steps there will be
UNITS = {"batch": "batches", "epoch": "epochs"}
LOADED = ("both state_dicts", "only the optimizer's", "only the scheduler's", "neither")
ACCIDENTS = ("none", "first 3 optimizer steps skipped", "3 skipped midway", "scheduler.step() comes first")
CSS = f"""
.sc .frame{{fill:none;stroke:{ROLES["free"]}}} .sc .grid{{stroke:{FAINT};stroke-opacity:.25}} .sc .line{{fill:none;stroke-width:2.4}}
.sc .rate{{stroke:{ROLES["parameters"]}}} .sc .meant{{stroke:{FAINT};stroke-width:1.6;stroke-dasharray:7 4}}
.sc .loss{{stroke:{ROLES["activations"]};stroke-width:1.8;stroke-dasharray:2 2}}
.sc .cross{{fill:none;stroke:{ROLES["wrong"]};stroke-width:3.5}} .sc .mark{{stroke:{INK};stroke-width:1.4;stroke-dasharray:3 3}}
"""


@dataclass(frozen=True)
class State:
    scheduler: str = "CosineAnnealingLR"
    per: str = "batch"  # scheduler.step() is called after each
    unit: str = "batches"  # what the scheduler's numbers count
    epochs: int = 12
    batches: int = 20  # in an epoch
    warmup: int = 0  # epochs
    restarts: int = 2
    mult: int = 1
    resume: int = 0  # the epoch before which the run is stopped and resumed; 0: never
    loaded: str = LOADED[0]
    accident: str = "none"

    @property
    def total(self):
        return self.epochs * self.batches

    @property
    def horizon(self):
        return self.total if self.unit == "batches" else self.epochs


@dataclass
class Run:
    rates: list  # of each batch: what the optimizer's step used, or would have used
    losses: list  # what ReduceLROnPlateau is given, one for each batch
    steps: int = 0  # of the scheduler
    over: int | None = None  # the batch after which the scheduler has been stepped as often as its horizon says
    warned: tuple = ()  # (batch, what torch warned)
    error: str = ""  # what torch raised, at batch len(rates)


def _period(horizon, state):
    """The first period, such that the last of the restarts' periods ends with the horizon."""
    return -(-horizon // sum(state.mult**k for k in range(state.restarts + 1)))


def code(state):
    """The scheduler as an expression; a warm-up makes it a SequentialLR, except in LambdaLR, whose function contains one."""
    scale = state.horizon // state.epochs
    warmup, horizon = state.warmup * scale, state.horizon
    make = SCHEDULERS[state.scheduler]
    if state.scheduler == "LambdaLR":
        return make(horizon, warmup or max(1, horizon // 6), state)
    if not warmup:
        return make(horizon, 0, state)
    first = f"LinearLR(optimizer, start_factor=0.1, total_iters={warmup})"
    return f"SequentialLR(optimizer, [{first}, {make(max(1, horizon - warmup), 0, state)}], milestones=[{warmup}])"


def begin(state):
    """A fresh optimizer over one parameter, and its scheduler."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE, momentum=0.9)
    return optimizer, eval(code(state), {**vars(lr_scheduler), "optimizer": optimizer})


def resume(state, optimizer, scheduler):
    """What a new process makes of a checkpoint: both are built anew, then loaded as far as the state says."""
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    optimizer, scheduler = begin(state)
    if state.loaded in LOADED[:2]:
        optimizer.load_state_dict(saved[0])
    if state.loaded in LOADED[:3:2]:
        scheduler.load_state_dict(saved[1])
    return optimizer, scheduler


def skipped(state):
    """The batches at which the optimizer's step is left out, as a GradScaler does when a gradient is not finite."""
    start = {ACCIDENTS[1]: 0, ACCIDENTS[2]: state.total // 2}.get(state.accident)
    return () if start is None else range(start, min(start + 3, state.total))


@lru_cache(maxsize=16)
def simulate(state):
    """Walk through the run with torch's own scheduler. The optimizer steps once after each start: more would change no rate."""
    run, early, stepped = Run([], []), state.accident == ACCIDENTS[3], False
    noise, loss = random.Random(0), 2.3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer, scheduler = begin(state)
            for batch in range(state.total):
                epoch, within = divmod(batch, state.batches)
                if state.resume and (epoch, within) == (state.resume, 0):
                    optimizer, scheduler = resume(state, optimizer, scheduler)
                    stepped = False
                run.losses.append(loss + noise.gauss(0, 0.03))
                due = state.per == "batch" or within == (0 if early else state.batches - 1)
                for turn in ("scheduler", "optimizer") if early else ("optimizer", "scheduler"):
                    if turn == "optimizer":
                        run.rates.append(float(optimizer.param_groups[0]["lr"]))
                        loss += (0.3 + 1.2 * run.rates[-1] / RATE - loss) * min(1, 2.5 / state.batches)
                        if not stepped and batch not in skipped(state):
                            optimizer.step()
                            stepped = True
                    elif due:
                        seen = run.losses[-1 if state.per == "batch" else -state.batches :]
                        scheduler.step(*[fmean(seen)] * (state.scheduler == "ReduceLROnPlateau"))
                        run.steps += 1
                        if run.steps == state.horizon:
                            run.over = batch
                run.warned += tuple((batch, str(warning.message)) for warning in caught)
                caught.clear()
        except Exception as error:  # torch's answer to what was chosen, shown as it says it
            run.error = f"{type(error).__name__}: {error}"
    return run


def meant(state):
    """The same schedule counted in what it is stepped by, never stopped, nothing skipped."""
    return replace(state, unit=UNITS[state.per], resume=0, loaded=LOADED[0], accident="none")


def rises(rates):
    """How often the rate begins to rise."""
    turns = [b > a for a, b in pairwise(rates) if b != a]
    return sum(up and not before for before, up in pairwise([False, *turns]))


def findings(state):
    """What is to be said of the curve, as (is it good?, sentence)."""
    run, plan = simulate(state), simulate(meant(state))
    found = []
    if run.error:
        at = f"After batch {len(run.rates) - 1}, in epoch {(len(run.rates) - 1) // state.batches}," if run.rates else "When it is made,"
        found.append((False, f"{at} torch raises {run.error.rstrip('.')}."))
    found += [(False, f"At batch {batch} torch warns: {'. '.join(words.split('. ')[:2])}.") for batch, words in run.warned]
    if not run.rates:
        return found
    found += _mismatch(state, run) + _resumed(state, run) + _accident(state, run, plan)
    if state.warmup and state.scheduler == "OneCycleLR":
        found.append((False, f"OneCycleLR has a warm-up of its own, from max_lr / 25 on: this one ends at {_rate(RATE / 25)}."))
    if not run.error:
        found += _compared(run, plan)
    return found


def _mismatch(state, run):
    times = state.total if state.per == "batch" else state.epochs
    if times == state.horizon:
        return []
    often = "once" if times == 1 else f"{times} times"
    said = f"The scheduler's numbers count {state.unit}, but it is stepped per {state.per}: {often}, not {state.horizon}."
    if run.over is not None and run.over < state.total - 1 and state.scheduler in ENDS:
        said += f" Its {state.horizon} steps are over after batch {run.over}."
    elif times < state.horizon:
        said += f" It goes {100 * times / state.horizon:.3g} % of its way."
    return [(False, said)]


def _resumed(state, run):
    if not state.resume:
        return []
    if state.resume >= state.epochs:
        return [(False, f"There is no epoch {state.resume} to resume at: epochs are counted from 0.")]
    if len(run.rates) <= state.resume * state.batches:
        return []
    whole = simulate(replace(state, resume=0, loaded=LOADED[0])).rates
    said = f"Resumed at epoch {state.resume}, {state.loaded} loaded"
    for batch, (rate, wanted) in enumerate(zip(run.rates, whole)):
        if not math.isclose(rate, wanted, rel_tol=1e-9, abs_tol=1e-15):
            return [(False, f"{said}: batch {batch} is the first to get another rate, {rate:.5g} instead of {wanted:.5g}.")]
    return [(True, f"{said}: the rates are those of a run without a stop.")]


def _accident(state, run, plan):
    quiet = "" if run.warned else ", and nothing warns"
    missed = [batch for batch in skipped(state) if batch < len(run.rates)]
    if missed:
        return [(False, f"Batches {missed[0]} to {missed[-1]} change no weight, but the scheduler counts them{quiet}.")]
    if state.accident == ACCIDENTS[3] and plan.rates:
        return [(False, f"The schedule's first value, {plan.rates[0]:.5g}, is lost or cut short{quiet}.")]
    return []


def _compared(run, plan):
    """How the curve differs from what was meant."""
    first, most, last = run.rates[0], max(run.rates), run.rates[-1]
    other = sum(not math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15) for a, b in zip(run.rates, plan.rates))
    if not other:
        path = f"the first batch gets {_rate(first)}, none more than {_rate(most)}, the last {_rate(last)}"
        return [(True, f"Each batch gets the rate that was meant: {path}.")]
    said = f"Batches that get another rate than meant: {other} of {len(run.rates)}"
    if not math.isclose(last, plan.rates[-1], rel_tol=1e-3):
        said += f"; the last gets {_rate(last)}, where {_rate(plan.rates[-1])} was meant"
    found = [(False, f"{said}.")]
    up, planned = rises(run.rates), rises(plan.rates)
    if up != planned:
        found.append((False, f"Times that the rate begins to rise: {up}; meant: {planned}."))
    planned = max(plan.rates)
    if most > 1.05 * planned:
        found.append((False, f"The highest rate is {_rate(most)}, {most / planned:.3g} times the highest that was meant."))
    tiny = sum(rate < RATE / 1e4 for rate in run.rates)
    if tiny > len(run.rates) / 10:
        found.append((False, f"{tiny} batches get less than 0.01 % of {RATE}: they change next to nothing."))
    return found


def _rate(value):
    return f"{value:.3g}"


def setting(state):
    called = f"scheduler.step() after each {state.per}; its numbers count {state.unit}"
    return f"Epochs: {state.epochs}, batches in each: {state.batches}. {called}. optimizer lr={RATE}"


def describe(state):
    """The picture in words."""
    run = simulate(state)
    shown = sorted({round(k * (state.epochs - 1) / 11) for k in range(12)})
    rates = [f"epoch {k}: {_rate(run.rates[k * state.batches])}" for k in shown if k * state.batches < len(run.rates)]
    return "\n".join([
        code(state),
        setting(state),
        *(("✓ " if good else "✗ ") + sentence for good, sentence in findings(state)),
        "learning rate at the start of " + ("; ".join(rates) or "no epoch"),
    ])


def draw(state, log=False):
    """The picture as SVG text."""
    run, plan = simulate(state), simulate(meant(state))
    body, y = lines(14, 26, code(state), "mono strong", width=94)
    body += text(14, y + 4, setting(state), "small")
    plot, y = _plot(state, run, plan, y + 42, log)
    body += plot
    if state.scheduler == "ReduceLROnPlateau" and run.losses:
        plot, y = _loss(state, run, y + 14)
        body += plot
    y += 14
    for good, sentence in findings(state):
        mark = text(14, y, "✓", "strong good") if good else text(14, y, "✗", "strong bad")
        words, y = lines(34, y, sentence, width=105)
        body, y = body + mark + words, y + 4
    return svg_document(WIDTH, y, f'<g class="xp sc">{body}</g>', describe(state), PANEL_STYLE + CSS)


def _plot(state, run, plan, top, log):
    """The rate over the batches."""
    height, every = 290, [*run.rates, *plan.rates, RATE / 10]
    floor = 10.0 ** math.floor(math.log10(max(every)) - 6)  # on a logarithmic axis; what is less lies on it
    low = max(floor, min(every)) if log else 0.0
    across, down = _batches(state), axis(low, max(every), top + height, top, log=log)
    body = text(LEFT, top - 10, f"learning rate{', logarithmic' if log else ''}", "small")
    body += _frame(state, across, top, height)
    for value, at in down.ticks:
        body += f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>'
        least = "≤ " * (log and value <= floor and min(every) < value)
        body += text(LEFT - 8, at + 5, f"{least}{value:g}", "small end")
    place = lambda rate: down.place(max(rate, floor) if log else rate)  # noqa: E731
    names = [("rate", "what results", run.rates)] + [("meant", "what was meant", plan.rates)] * (plan.rates != run.rates)
    for css, _, rates in reversed(names):
        body += f'<path class="line {css}" d="{_stairs(rates, across, place)}"/>'
    for k, (css, words, _) in enumerate(names):
        x = RIGHT - 150 * (len(names) - k)
        body += f'<path class="line {css}" d="M{x} {top - 15}h30"/>' + text(x + 36, top - 10, words, "small")
    for batch in skipped(state):
        if batch < len(run.rates):
            body += _cross(across.place(batch + 0.5), place(run.rates[batch]), 5)
    if state.resume * state.batches in range(1, len(run.rates)):
        body += _mark(across.place(state.resume * state.batches), top, height, "resumed")
    if run.over is not None and run.over < state.total - 1 and state.scheduler in ENDS:
        body += _mark(across.place(run.over + 1), top, height, f"its {state.horizon} steps are over", 36)
    if run.error:
        x, y = across.place(len(run.rates)), place(run.rates[-1]) if run.rates else top + height / 2
        side = (x + 16, "") if x < RIGHT - 120 else (x - 16, " end")
        body += _cross(x, y, 9) + text(side[0], y - 12 if y > top + 64 else y + 48, run.error.split(":")[0], f"strong bad{side[1]}")
    return body, top + height + 48


def _batches(state):
    return axis(0, state.total, LEFT, RIGHT)


def _frame(state, across, top, height):
    """A frame with a line for each epoch, or for some of them."""
    body = f'<rect class="frame" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"/>'
    for epoch in range(0, state.epochs + 1, -(-state.epochs // 20)):
        x = across.place(epoch * state.batches)
        body += f'<path class="grid" d="M{x:.1f} {top}v{height}"/>' + text(x, top + height + 18, epoch, "small mid")
    return body + text(RIGHT, top + height + 38, "epoch", "small end")


def _stairs(values, across, place):
    """Level during a batch, from one to the next a step."""
    path = "".join(f"H{across.place(k):.1f}V{place(b):.1f}" for k, (a, b) in enumerate(pairwise(values), 1) if a != b)
    return f"M{across.place(0):.1f} {place(values[0]):.1f}{path}H{across.place(len(values)):.1f}" if values else "M0 0"


def _cross(x, y, size):
    return f'<path class="cross" d="M{x - size:.1f} {y - size:.1f}l{2 * size} {2 * size}m0-{2 * size}l-{2 * size} {2 * size}"/>'


def _mark(x, top, height, words, below=18):
    beside = (x + 6, "") if x < RIGHT - 180 else (x - 6, " end")
    return f'<path class="mark" d="M{x:.1f} {top}v{height}"/>' + text(beside[0], top + below, words, f"small strong{beside[1]}")


def _loss(state, run, top):
    """The loss that ReduceLROnPlateau is given: made up so that it comes to rest, lower where the rate is lower."""
    height, across = 90, _batches(state)
    down = axis(0.0, max(run.losses), top + height, top)
    body = text(LEFT, top - 10, "loss, made up: it comes to rest, the lower the lower the rate is", "small")
    body += f'<rect class="frame" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"/>'
    for value, at in down.ticks:
        body += f'<path class="grid" d="M{LEFT} {at:.1f}H{RIGHT}"/>' + text(LEFT - 8, at + 5, f"{value:g}", "small end")
    points = "L".join(f"{across.place(k + 0.5):.1f} {down.place(loss):.1f}" for k, loss in enumerate(run.losses))
    return f'{body}<path class="line loss" d="M{points}"/>', top + height + 22


def build():
    """The controls and the picture, wired; `explore_schedule` shows them."""
    first = State()
    ui = SimpleNamespace(
        scheduler=choice("scheduler", SCHEDULERS),
        per=choice("step() per", UNITS),
        unit=choice("it counts", UNITS.values()),
        loaded=choice("loaded", LOADED),
        accident=choice("accident", ACCIDENTS),
        log=choice("rate axis", ("linear", "logarithmic")),
        epochs=number("epochs", first.epochs, 1, 40),
        batches=number("batches", first.batches, 1, 30),
        warmup=number("warm-up", 0, 0, 40),
        restarts=number("restarts", first.restarts, 0, 6),
        mult=number("T_mult", 1, 1, 3),
        resume=number("resume at", 0, 0, 39),
        picture=widgets.HTML(),
        state=first,
    )
    ui.scheduler.value = first.scheduler
    settings = ("scheduler", "per", "unit", "epochs", "batches", "warmup", "restarts", "mult", "resume", "loaded", "accident")

    def redraw(_=None):
        chosen = {name: getattr(ui, name).value for name in settings}
        ui.state = State(**chosen)
        for control in (ui.restarts, ui.mult):
            control.layout.display = None if ui.state.scheduler == "CosineAnnealingWarmRestarts" else "none"
        ui.loaded.layout.display = None if ui.state.resume else "none"
        ui.picture.value = draw(ui.state, ui.log.value == "logarithmic")

    for name in (*settings, "log"):
        getattr(ui, name).observe(redraw, "value")
    ui.redraw = redraw
    counting = widgets.HBox([ui.per, ui.unit, ui.log], layout={"flex_flow": "row wrap", "grid_gap": "0 24px"})
    choices = [ui.scheduler, counting, ui.accident, ui.loaded]
    ui.box = panel(choices, [ui.epochs, ui.batches, ui.warmup, ui.restarts, ui.mult, ui.resume], ui.picture)
    redraw()
    return ui


def explore_schedule():
    """Show the learning rate of each batch that one of torch's schedulers gives, stepped and counted as you choose, stopped and resumed."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
