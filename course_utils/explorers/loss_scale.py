"""explore_loss_scale(): a network's gradients beside the range of fp16 as the loss scale moves, and a real scaler over steps."""
import math
import re
import statistics
from dataclasses import dataclass, replace
from functools import lru_cache
from types import SimpleNamespace

import ipywidgets as widgets
import torch
import torch.nn.functional as F

from ..engine.data import load
from ..engine.display import FAINT, INK, ROLES, show, svg_document
from ..engine.display import _axis as axis
from ..toolkit.precision import FORMATS, overflow_fraction, rounded, underflow_fraction
from ._panel import STYLE as PANEL_STYLE
from ._panel import WIDTH, choice, lines, number, panel, text

LEFT, RIGHT = 84, 880
LOW, HIGH = -60, 42  # powers of two that the histogram is drawn over
STEPS = 60  # of the scaler
STYLE = f"""
.ls .frame{{fill:none;stroke:{ROLES["free"]}}} .ls .grid{{stroke:{FAINT};stroke-opacity:.25}}
.ls .bar{{fill:{ROLES["gradients"]};fill-opacity:.6;stroke:{ROLES["gradients"]}}} .ls .lost{{fill:{ROLES["wrong"]};stroke:{ROLES["wrong"]}}}
.ls .holds{{fill:{ROLES["storage"]};fill-opacity:.14}} .ls .few{{fill:{ROLES["storage"]};fill-opacity:.06}}
.ls .edge{{stroke:{INK};stroke-width:1.3;stroke-dasharray:4 3}}
.ls .scale{{fill:none;stroke:{ROLES["parameters"]};stroke-width:2.4}} .ls .cross{{fill:none;stroke:{ROLES["wrong"]};stroke-width:3}}
"""


@dataclass(frozen=True)
class State:
    power: int = 0  # the loss scale is 2 ** power
    format: str = "fp16"
    start: int = 16  # of the scaler: 2 ** start
    interval: int = 6  # good steps in a row after which it doubles
    planted: tuple = (20,)  # steps whose gradients hold an inf, whatever the scale
    said: str = ""  # why what was typed is no list of steps


@lru_cache(maxsize=1)
def gradients():
    """The gradients of a digit network, fp32, when it has most of its 1,000 images right. Trained once, in about half a second."""
    data = load("digits")
    images, labels = data.train_images[:1000].flatten(1) / 255, data.train_labels[:1000]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(784, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
        for _ in range(25):
            for inputs, targets in zip(images.split(50), labels.split(50)):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), targets).backward()
                optimizer.step()
    values = torch.cat([p.grad.flatten() for p in net.parameters()])
    return values[values != 0]


@lru_cache(maxsize=1)
def histogram():
    """{power: share of the gradients whose size lies from 2 ** power up to twice that}."""
    powers, counts = torch.frexp(gradients().abs().double())[1].unique(return_counts=True)
    return dict(zip((powers - 1).tolist(), (counts / counts.sum()).tolist()))


def shares(state):
    """(become 0, too large): shares of the scaled gradients that the format loses at its lower and at its upper end."""
    scale = 2.0**state.power
    return underflow_fraction(gradients(), state.format, scale), overflow_fraction(gradients(), state.format, scale)


def read(typed):
    """Step numbers from text: "5 12, 13". Raises ValueError with a sentence."""
    words = [word for word in re.split(r"[\s,;]+", typed) if word]
    if any(not re.fullmatch(r"\d{1,6}", word) or int(word) >= STEPS for word in words):
        raise ValueError(f"“{typed.strip()}” is no list of steps: write numbers from 0 to {STEPS - 1}, such as 5 12 13.")
    return tuple(sorted({int(word) for word in words}))


@lru_cache(maxsize=32)
def play(start, interval, planted):
    """[(scale, was the step skipped?)] of a real GradScaler, whose gradients are the network's, scaled, in fp16."""
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**start, growth_interval=interval)
    largest, steps = gradients().abs().max(), []
    for step in range(STEPS):
        scale = scaler.get_scale()
        with torch.enable_grad():
            scaler.scale(weight * 0).backward()  # the scaler wants to have seen a loss
        weight.grad = torch.tensor(math.inf) if step in planted else rounded(largest * scale, "fp16")
        skipped = not weight.grad.isfinite().item()
        scaler.step(optimizer)
        scaler.update()
        weight.grad = None
        steps.append((scale, skipped))
    return steps


def limit():
    """The largest power of two at which no gradient of the network overflows fp16."""
    return math.floor(math.log2(FORMATS["fp16"].max / gradients().abs().max().item()))


def findings(state):
    """Sentences on the histogram, then on the scaler."""
    under, over = shares(state)
    f, size = FORMATS[state.format], gradients()
    median = statistics.median(size.abs().tolist())
    lost = " and ".join(words for share, words in ((under, f"{under:.2%} become 0"), (over, f"{over:.2%} are too large")) if share)
    first = f"At scale 2^{state.power}, of {len(size):,} gradients (median {median:.1e}), {lost or 'none is lost'} in {state.format}."
    if not under and not over:
        first += f" The largest number is 2^{math.log2(f.max):.0f}, the smallest 2^{math.log2(f.smallest):.0f}."
    steps = play(state.start, state.interval, state.planted)
    skipped = [n for n, (_, skip) in enumerate(steps) if skip]
    own = [n for n in skipped if n not in state.planted]
    second = f"The scaler skipped {len(skipped)} of {STEPS} steps"
    second += f", {len(own)} of them because a gradient left fp16 by itself" if own else ""
    second += f". It begins at 2^{state.start} and ends at 2^{math.log2(steps[-1][0]):.0f}; "
    second += f"from 2^{limit() + 1} on, the largest gradient overflows."
    return [first], [second]


def describe(state):
    """The picture in words."""
    steps = play(state.start, state.interval, state.planted)
    moves = [f"step {n}: 2^{math.log2(scale):.0f}{', skipped' if skip else ''}" for n, (scale, skip) in enumerate(steps)
             if skip or n == 0 or scale != steps[n - 1][0]]
    first, second = findings(state)
    return "\n".join([*([state.said] if state.said else []), *first, *second, "the scale: " + "; ".join(moves)])


def draw(state):
    """The picture as SVG text."""
    first, second = findings(state)
    body = text(LEFT, 24, f"gradients of a digit network, times 2^{state.power}, by size", "strong")
    body += _histogram(state, 40, 190)
    y = 40 + 190 + 56
    for sentence in first:
        words, y = lines(14, y, sentence)
        body += words
    y += 24
    body += text(LEFT, y, f"the scale of a GradScaler, step by step; growth_interval={state.interval}", "strong")
    body += _trajectory(state, y + 16, 170)
    y += 16 + 170 + 54
    for sentence in ([f"✗ {state.said}"] if state.said else []) + second:
        words, y = lines(14, y, sentence, "bad strong" if sentence.startswith("✗") else "")
        body += words
    return svg_document(WIDTH, y, f'<g class="xp ls">{body}</g>', describe(state), PANEL_STYLE + STYLE)


def _histogram(state, top, height):
    across, f = axis(LOW, HIGH, LEFT, RIGHT), FORMATS[state.format]
    tallest = max(histogram().values())
    small, normal, most = (across.place(max(LOW, min(HIGH, math.log2(v)))) for v in (f.smallest / 2, f.smallest_normal, f.max))
    body = f'<rect class="frame" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"/>'
    body += f'<rect class="few" x="{small:.1f}" y="{top}" width="{normal - small:.1f}" height="{height}"/>'
    body += f'<rect class="holds" x="{normal:.1f}" y="{top}" width="{most - normal:.1f}" height="{height}"/>'
    for power, share in histogram().items():
        at = power + state.power
        if LOW <= at < HIGH:
            tall = (height - 34) * share / tallest
            lost = " lost" if 2.0 ** (at + 1) <= f.smallest / 2 or 2.0**at > f.max else ""
            x, wide = across.place(at), across.place(at + 1) - across.place(at)
            body += f'<rect class="bar{lost}" x="{x:.1f}" y="{top + height - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
    for x, words, css in ((small, "becomes 0 ◂", "small end"), (most, "▸ too large", "small")):
        if LEFT + 100 < x < RIGHT - 80:
            body += f'<path class="edge" d="M{x:.1f} {top}v{height}"/>'
            body += text(x + (6 if css == "small" else -6), top + 18, words, css)
    if normal - small > 60:
        body += text((small + normal) / 2, top + 18, "fewer digits", "small mid")
    body += text((normal + most) / 2, top + 18, f"{state.format}, all digits", "small mid")
    for power in range(LOW, HIGH, 10):
        body += text(across.place(power), top + height + 18, f"2^{power}", "small mid")
    return body + text(RIGHT, top + height + 38, "size of a scaled gradient", "small end")


def _trajectory(state, top, height):
    steps = play(state.start, state.interval, state.planted)
    powers = [math.log2(scale) for scale, _ in steps]
    across = axis(0, STEPS, LEFT, RIGHT)
    down = axis(min([*powers, limit()]) - 1, max([*powers, limit()]) + 1, top + height, top)
    body = f'<rect class="frame" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"/>'
    for value, y in down.ticks:
        if value == int(value):
            body += f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>' + text(LEFT - 8, y + 5, f"2^{value:.0f}", "small end")
    y = down.place(limit() + 0.5)
    body += f'<path class="edge" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
    body += text(LEFT + 8, y - 6, "above: the largest gradient overflows", "small")
    path = f"M{across.place(0):.1f} {down.place(powers[0]):.1f}"
    for n, power in enumerate(powers):
        path += f"V{down.place(power):.1f}H{across.place(n + 1):.1f}"
    body += f'<path class="scale" d="{path}"/>'
    for n, (_, skip) in enumerate(steps):
        if skip:
            x, y = across.place(n + 0.5), down.place(powers[n])
            body += f'<path class="cross" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0-10l-10 10"/>'
    for step in range(0, STEPS + 1, 10):
        body += text(across.place(step), top + height + 18, step, "small mid")
    return body + text(RIGHT, top + height + 38, "step; a cross: skipped", "small end")


def build():
    """The controls and the picture, wired; `explore_loss_scale` shows them."""
    first = State()
    ui = SimpleNamespace(
        format=choice("format", [name for name, f in FORMATS.items() if f.dtype and name != "fp32"]),
        power=number("scale 2^", first.power, 0, 40),
        start=number("start 2^", first.start, 0, 40),
        interval=number("interval", first.interval, 1, 60),
        planted=widgets.Text("20", description="inf at steps", continuous_update=False, layout={"width": "260px"}),
        picture=widgets.HTML(),
        state=first,
    )
    ui.format.value = first.format

    def redraw():
        ui.picture.value = draw(ui.state)

    def become(**changes):
        ui.state = replace(ui.state, **changes)
        redraw()

    def typed(change):
        try:
            become(planted=read(change["new"]), said="")
        except ValueError as error:
            become(said=str(error))

    for name in ("format", "power", "start", "interval"):
        getattr(ui, name).observe(lambda change, name=name: become(**{name: change["new"]}), "value")
    ui.planted.observe(typed, "value")
    ui.redraw = redraw
    ui.box = panel([ui.format], [ui.power, ui.start, ui.interval, ui.planted], ui.picture)
    redraw()
    return ui


def explore_loss_scale():
    """Move the loss scale and see which gradients fp16 loses; plant overflows and see what a GradScaler does over 60 steps."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
