"""explore_descent(): the path of a real torch.optim optimizer over a loss of two parameters."""
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import ipywidgets as widgets
import torch

from ..engine.display import FAINT, INK, ROLES, show, svg_document
from ..engine.display import _axis as axis
from ..engine.display import number as written
from ._contours import contours
from ._panel import GROUND, WIDTH, button, choice, lines, panel, text
from ._panel import STYLE as PANEL_STYLE

X, Y = (-4.0, 4.0), (-3.0, 3.0)  # what the map shows
MAP = (46, 84, 560, 420)  # left, top, width, height
CHART = (690, 104, 196, 196)
# round numbers, about evenly spread over a logarithmic scale
RATES = [float(f"{m}e{k}") for k in range(-4, 1) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)] + [10.0]
TOO_HIGH = 1e6  # a loss above it ends the run


@dataclass(frozen=True)
class Surface:
    loss: object  # of x and y, tensors of one shape
    formula: str
    minima: tuple
    start: tuple
    levels: tuple  # losses at which the map has a line
    curvature: float = 0.0  # the largest, where it is the same everywhere


SURFACES = {
    "round bowl": Surface(
        lambda x, y: (x**2 + y**2) / 2, "(x² + y²) / 2", ((0, 0),), (-3.2, 2.2), (0.125, 0.5, 1.125, 2, 3.125, 4.5, 6.125, 8, 10), 1.0
    ),
    "narrow valley": Surface(
        lambda x, y: (x**2 + 30 * y**2) / 2, "(x² + 30·y²) / 2", ((0, 0),), (-3.4, 1.2), (0.5, 2, 4.5, 8, 16, 32, 64, 100), 30.0
    ),
    "curved valley": Surface(
        lambda x, y: (x - 2) ** 2 / 4 + 4 * (y + 2 - x**2 / 4) ** 2,
        "(x − 2)² / 4 + 4·(y + 2 − x²/4)²",
        ((2, -1),),
        (-3.2, 2.2),
        (0.25, 1, 2.5, 5, 10, 20, 40, 80),
    ),
    "saddle": Surface(
        lambda x, y: x**2 / 2 + (y**2 - 4) ** 2 / 16,
        "x² / 2 + (y² − 4)² / 16",
        ((0, -2), (0, 2)),
        (-3.4, 0.02),
        (0.1, 0.4, 0.7, 1, 1.5, 2.5, 4, 6, 8),
    ),
    "many dips": Surface(  # of which the lowest is marked
        lambda x, y: 0.15 * (x**2 + y**2) + 1 - torch.cos(2 * x) * torch.cos(2 * y),
        "0.15·(x² + y²) + 1 − cos(2x)·cos(2y)",
        ((0, 0),),
        (-3.6, 0.7),
        (0.3, 0.85, 1.2, 1.6, 2.2, 2.9, 3.6),
    ),
}
OPTIMIZERS = {  # name in torch.optim, and what the momentum control sets
    "SGD": ("SGD", None),
    "SGD with momentum": ("SGD", "momentum"),
    "Nesterov": ("SGD", "nesterov"),
    "Adagrad": ("Adagrad", None),
    "RMSprop": ("RMSprop", None),
    "Adam": ("Adam", "betas"),
    "AdamW": ("AdamW", "betas"),
}
CSS = f"""
.de .land{{fill:{ROLES["free"]};fill-opacity:.1;stroke:{ROLES["free"]};stroke-width:1}} .de .frame{{fill:none;stroke:{ROLES["free"]}}}
.de .path{{fill:none;stroke:{ROLES["parameters"]};stroke-width:2.2}} .de .dot{{fill:{ROLES["parameters"]}}}
.de .old{{fill:none;stroke:{ROLES["activations"]};stroke-width:1.8;stroke-dasharray:6 3}}
.de .under{{fill:none;stroke:{GROUND};stroke-width:6;opacity:.7}}
.de .mark{{fill:none;stroke:{INK};stroke-width:2}} .de .cross{{fill:none;stroke:{ROLES["wrong"]};stroke-width:4}}
.de .grid{{stroke:{FAINT};stroke-opacity:.25}}
"""


@dataclass(frozen=True)
class State:
    surface: str = "narrow valley"
    optimizer: str = "SGD"
    rate: float = 0.05
    momentum: float = 0.9
    decay: float = 0.0
    steps: int = 50
    start: tuple = SURFACES["narrow valley"].start
    forget: bool = False  # zero_grad
    kept: "State | None" = None  # an earlier setting, drawn beside this one


@dataclass(frozen=True)
class Run:
    points: list  # (x, y) before the first step and after each
    losses: list  # at these points
    error: str = ""  # what torch refused

    @property
    def steps(self):
        return len(self.losses) - 1

    @property
    def diverged(self):
        return not self.losses[-1] <= TOO_HIGH

    @property
    def longest(self):
        """The length of the longest single step."""
        return max((math.dist(a, b) for a, b in zip(self.points, self.points[1:])), default=0.0)


def arguments(state):
    """What the optimizer is made with, besides the parameters."""
    momentum = OPTIMIZERS[state.optimizer][1]
    given = {"lr": state.rate}
    if momentum == "betas":
        given["betas"] = (state.momentum, 0.999)
    elif momentum:
        given["momentum"] = state.momentum
    if momentum == "nesterov":
        given["nesterov"] = True
    if state.decay or state.optimizer == "AdamW":  # whose default is not 0
        given["weight_decay"] = state.decay
    return given


def code(state):
    given = ", ".join(f"{name}={value}" for name, value in arguments(state).items())
    return f"torch.optim.{OPTIMIZERS[state.optimizer][0]}([p], {given})"


@lru_cache(maxsize=16)
def descend(state):
    """Take the steps with torch's own optimizer and autograd, in float64; stop early where the loss is too high or not a number."""
    loss_of = SURFACES[state.surface].loss
    p = torch.tensor(state.start, dtype=torch.float64, device="cpu", requires_grad=True)
    points, losses = [], []
    try:
        optimizer = getattr(torch.optim, OPTIMIZERS[state.optimizer][0])([p], **arguments(state))
    except ValueError as error:  # such as betas outside of [0, 1): shown as torch says it
        return Run([state.start], [loss_of(*p.detach()).item()], f"ValueError: {error}")
    with torch.enable_grad():
        while True:
            loss = loss_of(*p.unbind())
            points.append(tuple(p.tolist()))
            losses.append(loss.item())
            if len(losses) > state.steps or not losses[-1] <= TOO_HIGH:
                return Run(points, losses)
            if not state.forget:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def largest_rate(state):
    """The rate at which SGD on a quadratic loss ceases to converge, or None where there is no such simple rule.

    From the roots of the recurrence along the direction of the largest curvature c, which weight decay adds to: 2 (1 + m) / c for
    momentum m, 2 (1 + m) / ((1 + 2m) c) in Nesterov's form.
    """
    surface, name = SURFACES[state.surface], state.optimizer
    if not surface.curvature or OPTIMIZERS[name][0] != "SGD" or state.forget:
        return None
    momentum = 0.0 if name == "SGD" else state.momentum
    if momentum >= 1:
        return None
    limit = 2 * (1 + momentum) / (surface.curvature + state.decay)
    return limit / (1 + 2 * momentum) if name == "Nesterov" else limit


def outcome(state):
    """(does it go well?, what came out in one sentence)."""
    run = descend(state)
    first, last = run.losses[0], run.losses[-1]
    if run.error:
        return False, run.error
    if run.diverged:
        shown = f"{last:.1e}" if math.isfinite(last) else "no longer a finite number"
        return False, f"It diverges: after {_steps(run.steps)} the loss is {shown}."
    said = f"The loss goes from {written(first)} to {written(last)} in {_steps(run.steps)}."
    return (True, said) if last < first else (False, f"{said} It ends no lower than it began.")


def _steps(count):
    return f"{count} step" + "s" * (count != 1)


def sentences(state):
    """What else is to be said of the run, each line true of this very setting."""
    run, surface = descend(state), SURFACES[state.surface]
    if run.error:
        return []
    said = []
    if not run.diverged:
        near = min(surface.minima, key=lambda point: math.dist(point, run.points[-1]))
        away = math.dist(near, run.points[-1])
        nearest = f"The end lies {written(away)} from the marked minimum ({near[0]}, {near[1]})"
        said.append(f"{nearest}; the longest step has length {written(run.longest)}.")
    limit = largest_rate(state)
    if limit:
        side = "below" if state.rate < limit else "not below"
        rule = f"The steepest direction has curvature {surface.curvature:g}: this converges for rates below {written(limit)}"
        said.append(f"{rule}; {state.rate:g} is {side} it.")
    if state.forget:
        alike = ", which is momentum 1: nothing damps it" if state.optimizer == "SGD" else ""
        said.append(f"zero_grad() is forgotten: p.grad holds the sum of all gradients so far{alike}.")
    if state.decay and state.optimizer == "AdamW":
        said.append("Weight decay multiplies p by 1 − rate × weight_decay at each step, apart from the gradient.")
    elif state.decay:
        said.append(f"Weight decay adds {state.decay:g} × p to the gradient, so the optimizer's rule works on the sum.")
    if state.kept:
        said.append(f"Kept, dashed: {code(state.kept)}{_unlike(state)}: {outcome(state.kept)[1]}")
    return said


def _unlike(state):
    """What differs in the kept setting and is not in its line of code."""
    kept = state.kept
    found = [f"on the {kept.surface}"] * (kept.surface != state.surface) + ["zero_grad forgotten"] * kept.forget
    return f" ({', '.join(found)})" if found else ""


def describe(state):
    """The picture in words."""
    run = descend(state)
    shown = sorted({round(k * run.steps / 8) for k in range(9)})
    return "\n".join([
        code(state),
        f"on the {state.surface}: loss = {SURFACES[state.surface].formula}",
        ("✓ " if outcome(state)[0] else "✗ ") + outcome(state)[1],
        *sentences(state),
        *(f"after {_steps(k)}: p = ({run.points[k][0]:.4g}, {run.points[k][1]:.4g}), loss {run.losses[k]:.4g}" for k in shown),
    ])


def _place(x, y):
    """Where a point lies in the map, whose own corner is (0, 0)."""
    return (x - X[0]) / (X[1] - X[0]) * MAP[2], (Y[1] - y) / (Y[1] - Y[0]) * MAP[3]


@lru_cache
def _land(name):
    """The map's lines, shaded the more the lower the loss is, and some of their levels in numbers."""
    surface, body, labels, taken = SURFACES[name], "", "", []
    xs = torch.linspace(*X, 97, dtype=torch.float64)
    ys = torch.linspace(*Y, 73, dtype=torch.float64)
    heights = surface.loss(*torch.meshgrid(xs, ys, indexing="ij"))
    for level, loops in reversed(contours(heights, xs, ys, surface.levels).items()):
        places = [[_place(*point) for point in loop] for loop in loops]
        path = "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in loop) + "Z" for loop in places)
        body += f'<path class="land" fill-rule="evenodd" d="{path}"/>'
        for x, y in sorted((point for loop in places for point in loop), reverse=True):
            if x < MAP[2] - 22 and 14 < y < MAP[3] - 8:
                if all(abs(x - a) > 40 or abs(y - b) > 16 for a, b in taken):
                    labels += text(x, y + 4, f"{level:g}", "small mid")
                    taken.append((x, y))
                break
    return body, labels


def draw(state):
    """The picture as SVG text."""
    good, said = outcome(state)
    body = text(14, 26, code(state), "mono strong")
    begins = f"p = (x, y) starts at ({state.start[0]:g}, {state.start[1]:g})"
    body += text(14, 52, f"loss = {SURFACES[state.surface].formula}, and {begins}", "small")
    body += text(MAP[0], 76, "y", "small mid") + _map(state) + _chart(state)
    mark, words = ("✓", "strong good") if good else ("✗", "strong bad")
    y = MAP[1] + MAP[3] + 52
    ending, below = lines(34, y, said, "strong", width=96)
    body += text(14, y, mark, words) + ending
    for sentence in sentences(state):
        more, below = lines(34, below + 4, sentence, width=105)
        body += more
    return svg_document(WIDTH, below + 2, f'<g class="xp de">{body}</g>', describe(state), PANEL_STYLE + CSS)


def _map(state):
    left, top, width, height = MAP
    land, labels = _land(state.surface)
    inner = land
    for x, y in SURFACES[state.surface].minima:
        a, b = _place(x, y)
        inner += f'<path class="mark" d="M{a - 7:.1f} {b:.1f}h14m-7-7v14"/>' + text(a, b + 21, "minimum", "small mid")
    inner += labels
    if state.kept and state.kept.surface == state.surface:
        inner += f'<path class="old" d="{_path(descend(state.kept).points)}"/>'
    inner += _trace(descend(state))
    body = f'<svg class="map" x="{left}" y="{top}" width="{width}" height="{height}" overflow="hidden"><g class="xp de">{inner}</g></svg>'
    body += f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{height}"/>'
    for x in range(-4, 5, 2):
        body += text(left + _place(x, 0)[0], top + height + 18, x, "small mid")
    for y in range(-3, 4):
        body += text(left - 8, top + _place(0, y)[1] + 5, y, "small end")
    return body + text(left + width + 14, top + height + 18, "x", "small mid")


def _trace(run):
    """The path with a dot for each step, its start and its end; a cross where it leaves the map for good."""
    places = [_place(*point) for point in run.points if all(map(math.isfinite, point))]
    inside = [0 <= x <= MAP[2] and 0 <= y <= MAP[3] for x, y in places]
    radius = 3 if run.steps <= 60 else 2
    body = "".join(f'<path class="{css}" d="{_path(run.points)}"/>' for css in ("under", "path"))
    body += "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for (x, y), shown in zip(places, inside) if shown)
    (a, b), near = places[0], math.dist(places[0], places[-1]) < 50
    body += f'<circle class="mark" cx="{a:.1f}" cy="{b:.1f}" r="7"/>' + _beside(a, b, "start, end" if near else "start")
    last = max((k for k, shown in enumerate(inside) if shown), default=0)
    if run.diverged or not inside[-1]:
        x, y = _border(places[last], places[min(last + 1, len(places) - 1)])
        body += f'<path class="cross" d="M{x - 8:.1f} {y - 8:.1f}l16 16m0-16l-16 16"/>'
        word = "diverges" if run.diverged else "off the map"
        body += text(min(max(x, 46), MAP[2] - 46), y + 26 if y < MAP[3] / 2 else y - 16, word, "strong mid bad")
    elif run.steps:
        x, y = places[-1]
        body += f'<rect class="mark" x="{x - 6:.1f}" y="{y - 6:.1f}" width="12" height="12"/>'
        body += "" if near else _beside(x, y, "end")
    return body


def _beside(x, y, words):
    """Above the point, or below it where there is no room, and inside the map."""
    room = 4.4 * len(words)
    return text(min(max(x, room), MAP[2] - room), y - 12 if y > 30 else y + 24, words, "small mid strong")


def _border(a, b):
    """The point in the map, 12 pixels from its border, nearest to where the line from a to b leaves it."""
    part = 1.0
    for start, end, size in zip(a, b, MAP[2:]):
        if not 0 <= end <= size:
            part = min(part, ((size if end > size else 0) - start) / (end - start))
    return [min(max(start + part * (end - start), 12), size - 12) for start, end, size in zip(a, b, MAP[2:])]


def _path(points):
    places = [_place(*point) for point in points if all(map(math.isfinite, point))]
    for k in range(1, len(places)):  # browsers draw no line to a point that is very far off
        far = math.dist(places[k - 1], places[k]) / 1e5
        if far > 1:
            places[k] = tuple(a + (b - a) / far for a, b in zip(places[k - 1], places[k]))
            places = places[: k + 1]
            break
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _chart(state):
    """The loss over the steps, on a logarithmic axis."""
    left, top, width, height = CHART
    runs = [("path", descend(state))] + ([("old", descend(state.kept))] if state.kept else [])
    shown = [(css, [(k, min(loss, TOO_HIGH)) for k, loss in enumerate(run.losses) if loss > 0]) for css, run in runs]
    losses = [max(loss, 1e-12) for _, line in shown for _, loss in line]
    across = axis(0, max(1, *(run.steps for _, run in runs)), left, left + width)
    low, high = min(losses, default=1e-12), max(losses, default=1.0)
    room = 2 if high < 4 * low else 1  # less would hold no round number
    down = axis(low / room, high * room, top + height, top, log=True)
    body = text(left, top - 10, "loss (logarithmic)", "small")
    body += f'<rect class="frame" x="{left}" y="{top}" width="{width}" height="{height}"/>'
    for value, at in across.ticks:
        if value != int(value):
            continue  # of so few steps
        body += f'<path class="grid" d="M{at:.1f} {top}v{height}"/>' + text(at, top + height + 18, value, "small mid")
    for value, at in down.ticks:
        body += f'<path class="grid" d="M{left} {at:.1f}h{width}"/>' + text(left - 8, at + 5, f"{value:g}", "small end")
    for css, line in reversed(shown):
        at = "L".join(f"{across.place(k):.1f} {down.place(max(loss, 1e-12)):.1f}" for k, loss in line)
        body += f'<path class="{css}" d="M{at}"/>' if line else ""
    body += text(left + width, top + height + 38, "steps", "small end")
    y = top + height + 74
    for name, value in (("loss at the end", f"{descend(state).losses[-1]:.3g}"), ("steps taken", descend(state).steps)):
        body += text(left - 44, y, name, "small") + text(left + width, y, value, "mono strong end")
        y += 26
    legend = ["the path, a dot for each step", "the path that you kept"][: len(runs)]
    for (css, _), words in zip(runs, legend):
        body += f'<path class="{css}" d="M{left - 44} {y + 9}h26"/>' + text(left - 10, y + 14, words, "small")
        y += 26
    return body + text(left - 44, y + 14, "The stronger the shade,", "small") + text(left - 44, y + 32, "the lower the loss.", "small")


def build():
    """The controls and the picture, wired; `explore_descent` shows them."""
    first, wide = State(), {"layout": {"width": "330px"}, "style": {"description_width": "100px"}}
    field = {"layout": {"width": "190px"}, "style": {"description_width": "100px"}}
    ui = SimpleNamespace(
        surface=choice("surface", SURFACES),
        optimizer=choice("optimizer", OPTIMIZERS),
        rate=widgets.SelectionSlider(options=RATES, value=first.rate, description="rate", **wide),
        momentum=widgets.FloatSlider(first.momentum, min=0, max=1, step=0.01, description="momentum", **wide),
        steps=widgets.IntSlider(first.steps, min=1, max=100, description="steps", **wide),
        decay=widgets.BoundedFloatText(0.0, min=0, max=2, step=0.05, description="weight decay", **field),
        x=widgets.BoundedFloatText(first.start[0], min=X[0], max=X[1], step=0.1, description="start x", **field),
        y=widgets.BoundedFloatText(first.start[1], min=Y[0], max=Y[1], step=0.1, description="start y", **field),
        forget=widgets.ToggleButton(description="forget zero_grad()", layout={"width": "170px"}),
        keep=button("Keep path"),
        clear=button("Clear"),
        picture=widgets.HTML(),
        state=first,
        moving=False,
    )
    ui.surface.value = first.surface

    def redraw(_=None):
        if ui.moving:
            return
        ui.momentum.layout.display = None if OPTIMIZERS[ui.optimizer.value][1] else "none"
        ui.state = State(
            surface=ui.surface.value,
            optimizer=ui.optimizer.value,
            rate=ui.rate.value,
            momentum=round(ui.momentum.value, 2),
            decay=ui.decay.value,
            steps=ui.steps.value,
            start=(ui.x.value, ui.y.value),
            forget=ui.forget.value,
            kept=ui.state.kept,
        )
        ui.picture.value = draw(ui.state)

    def on_surface(_):
        ui.moving = True  # to the start of this surface, drawn once
        ui.x.value, ui.y.value = SURFACES[ui.surface.value].start
        ui.moving = False
        redraw()

    def keep(state):
        ui.state = replace(ui.state, kept=state and replace(state, kept=None))
        redraw()

    ui.surface.observe(on_surface, "value")
    for control in (ui.optimizer, ui.rate, ui.momentum, ui.steps, ui.decay, ui.x, ui.y, ui.forget):
        control.observe(redraw, "value")
    ui.keep.on_click(lambda _: keep(ui.state))
    ui.clear.on_click(lambda _: keep(None))
    ui.redraw = redraw
    controls = [ui.rate, ui.momentum, ui.steps, ui.decay, ui.x, ui.y, ui.forget, ui.keep, ui.clear]
    ui.box = panel([ui.surface, ui.optimizer], controls, ui.picture)
    redraw()
    return ui


def explore_descent():
    """Show a loss of two parameters as a map, and the path that one of torch's optimizers takes on it from a start of your choice."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
