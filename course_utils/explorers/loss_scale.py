"""explore_loss_scale(): a network's gradients beside the range of fp16 as the loss scale moves, and a real scaler over steps."""
import math
import re
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
MOST = 40  # powers of two that the scales go up to
STEPS = 60  # of the scaler
STYLE = f"""
.ls .frame{{fill:none;stroke:{ROLES["free"]}}} .ls .grid{{stroke:{FAINT};stroke-opacity:.25}}
.ls .bar{{fill:{ROLES["gradients"]};fill-opacity:.6;stroke:{ROLES["gradients"]}}} .ls .lost{{fill:{ROLES["wrong"]};stroke:{ROLES["wrong"]}}}
.ls .holds{{fill:{ROLES["storage"]};fill-opacity:.14}} .ls .few{{fill:{ROLES["storage"]};fill-opacity:.06}}
.ls .edge{{stroke:{INK};stroke-width:1.3;stroke-dasharray:4 3}}
.ls .scale{{fill:none;stroke:{ROLES["parameters"]};stroke-width:2.4}} .ls .cross{{fill:none;stroke:{ROLES["wrong"]};stroke-width:3}}
.ls .ring{{fill:none;stroke:{INK};stroke-width:1.3}}
"""


@dataclass(frozen=True)
class State:
    power: int = 0  # the loss scale is 2 ** power
    format: str = "fp16"
    start: int = 16  # of the scaler: 2 ** start
    interval: int = 6  # good steps in a row after which it doubles
    backoff: float = 0.5  # what it is multiplied by after a skipped step
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
    """(become 0, keep fewer digits, too large): shares of the scaled gradients that the format does not hold with all its digits."""
    scale, f = 2.0**state.power, FORMATS[state.format]
    under, over = underflow_fraction(gradients(), f, scale), overflow_fraction(gradients(), f, scale)
    return under, (gradients().abs().double() * scale < f.smallest_normal).double().mean().item() - under, over


def read(typed):
    """Step numbers from text: "5 12, 13". Raises ValueError with a sentence."""
    words = [word for word in re.split(r"[\s,;]+", typed) if word]
    if any(not re.fullmatch(r"\d{1,6}", word) or int(word) >= STEPS for word in words):
        shown = typed.strip() if len(typed) < 25 else f"{typed.strip()[:24]}…"
        raise ValueError(f"“{shown}” is no list of steps: write numbers from 0 to {STEPS - 1}, such as 5 12 13.")
    return tuple(sorted({int(word) for word in words}))


@lru_cache(maxsize=32)
def play(start, interval, backoff, planted):
    """[(scale, was the step skipped?)] of a real GradScaler, whose gradients are the network's, scaled, in fp16.

    Of the gradients it is given the largest alone: it asks for no more than whether all are finite.
    """
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**start, growth_interval=interval, backoff_factor=backoff)
    largest, loss, steps = gradients().abs().max(), torch.zeros(()), []
    for step in range(STEPS):
        scaler.scale(loss)  # the scaler wants to have seen one; there is no backward, the gradient is given
        scale = scaler.get_scale()
        weight.grad = torch.tensor(math.inf) if step in planted else rounded(largest * scale, "fp16")
        steps.append((scale, not weight.grad.isfinite().item()))
        scaler.step(optimizer)
        scaler.update()
    return steps


def limit():
    """The scale, as a power of two, from which on the network's largest gradient overflows fp16."""
    return math.log2(65520 / gradients().abs().max().item())  # which lies in the middle between 65504 and what would come next


def findings(state):
    """A sentence on the histogram, then one on the scaler."""
    f, size = FORMATS[state.format], gradients()
    kinds = zip(shares(state), ("become 0", "keep fewer digits", "are too large"))
    lost = [f"{_percent(share)} {what}" for share, what in kinds if share]
    median = size.abs().median().item()
    first = f"At scale 2^{state.power}, of {len(size):,} gradients (median {median:.1e} without it), {', '.join(lost) or 'none is lost'} "
    first += f"in {state.format}, which goes from {f.smallest:.2g}, with all digits from {f.smallest_normal:.2g}, to {_short(f.max)}."
    steps = played(state)
    skipped = [n for n, (_, skip) in enumerate(steps) if skip]
    own = [n for n in skipped if n not in state.planted]
    second = f"The scaler skipped {len(skipped)} of {STEPS} steps"
    second += f", {len(own)} of them because a gradient left fp16 by itself" if own else ""
    second += f". Its scale begins at {as_power(steps[0][0])} and ends at {as_power(steps[-1][0])}; "
    second += f"from 2^{limit():.1f} on, the largest gradient overflows."
    return first, second


def played(state):
    return play(state.start, state.interval, state.backoff, state.planted)


def as_power(scale):
    power = math.log2(scale)
    return f"2^{power:.0f}" if power == round(power) else f"2^{power:.2f}"


def _percent(share):
    return f"{100 * share:.2f} %" if share > 5e-5 else "less than 0.01 %"


def _short(value):
    return f"{value:,.0f}" if value < 1e6 else f"{value:.2g}"


def describe(state):
    """The picture in words."""
    steps = played(state)
    moves = [f"step {n}: {as_power(scale)}{', skipped' if skip else ''}" for n, (scale, skip) in enumerate(steps)
             if skip or n == 0 or scale != steps[n - 1][0]]
    return "\n".join([*([state.said] if state.said else []), *findings(state), "the scale: " + "; ".join(moves)])


def draw(state):
    """The picture as SVG text."""
    first, second = findings(state)
    body = text(LEFT, 24, f"gradients of a digit network, times 2^{state.power}, by size, in {state.format}", "strong")
    body += _histogram(state, 40, 190)
    words, y = lines(14, 40 + 190 + 62, first)
    body, y = body + words, y + 26
    settings = f"growth_interval={state.interval}, backoff_factor={state.backoff:g}"
    body += text(LEFT, y, f"the scale of a GradScaler for fp16, step by step; {settings}", "strong")
    body += _trajectory(state, y + 38, 170)
    y += 38 + 170 + 46
    if state.said:
        words, y = lines(14, y + 4, f"✗ {state.said}", "bad strong")
        body += words
    words, y = lines(14, y + 4, second)
    return svg_document(WIDTH, y, f'<g class="xp ls">{body}{words}</g>', describe(state), PANEL_STYLE + STYLE)


def _histogram(state, top, height):
    low, high = min(histogram()) - 3, max(histogram()) + MOST + 2  # wherever the scale moves them, all are on it
    across, f, tallest = axis(low, high, LEFT, RIGHT), FORMATS[state.format], max(histogram().values())
    small, normal, most = (min(max(across.place(math.log2(v)), LEFT), RIGHT) for v in (f.smallest / 2, f.smallest_normal, f.max))
    body = f'<rect class="few" x="{small:.1f}" y="{top}" width="{normal - small:.1f}" height="{height}"/>'
    body += f'<rect class="holds" x="{normal:.1f}" y="{top}" width="{most - normal:.1f}" height="{height}"/>'
    for power, share in histogram().items():
        at, tall = power + state.power, max(1, (height - 34) * share / tallest)
        lost = " lost" if 2.0 ** (at + 1) <= f.smallest / 2 or 2.0**at > f.max else ""
        x, wide = across.place(at), across.place(at + 1) - across.place(at)
        body += f'<rect class="bar{lost}" x="{x:.1f}" y="{top + height - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
    for x, words, css in ((small, "becomes 0 ◂", "small end"), (most, "▸ too large", "small")):
        if LEFT + 90 < x < RIGHT - 90:
            body += f'<path class="edge" d="M{x:.1f} {top}v{height}"/>'
            body += text(x + (6 if css == "small" else -6), top + 18, words, css)
    for a, b, words in ((small, normal, "fewer digits"), (normal, most, "all digits")):
        if b - a > 90:
            body += text((a + b) / 2, top + 18, words, "small mid")
    body += f'<rect class="frame" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"/>'
    for power in range(-(-low // 10) * 10, high + 1, 10):
        body += text(across.place(power), top + height + 18, f"2^{power}", "small mid")
    return body + text(RIGHT, top + height + 38, "size of a scaled gradient", "small end")


def _trajectory(state, top, height):
    steps = played(state)
    powers = [math.log2(scale) for scale, _ in steps]
    across = axis(0, STEPS, LEFT, RIGHT)
    down = axis(min([*powers, limit()]) - 1, max([*powers, limit()]) + 1, top + height, top)
    body = f'<rect class="frame" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"/>' + _legend(top - 12)
    for value, y in down.ticks:
        if value == int(value):
            body += f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>' + text(LEFT - 8, y + 5, f"2^{value:.0f}", "small end")
    body += f'<path class="edge" d="M{LEFT} {down.place(limit()):.1f}H{RIGHT}"/>'
    path = f"M{across.place(0):.1f} {down.place(powers[0]):.1f}"
    for n, power in enumerate(powers):
        path += f"V{down.place(power):.1f}H{across.place(n + 1):.1f}"
    body += f'<path class="scale" d="{path}"/>'
    for n, (_, skip) in enumerate(steps):
        if skip:
            body += _skip(across.place(n + 0.5), down.place(powers[n]), n in state.planted)
    for step in range(0, STEPS + 1, 10):
        body += text(across.place(step), top + height + 18, step, "small mid")
    return body + text(LEFT - 8, top + height + 18, "step", "small end")


def _skip(x, y, planted):
    ring = f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="7"/>' * planted
    return f'{ring}<path class="cross" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0-8l-8 8"/>'


def _legend(y):
    body = f'<path class="edge" d="M{LEFT} {y - 4}h30"/>' + text(LEFT + 38, y, "above it the largest gradient overflows", "small")
    for x, words, planted in ((LEFT + 320, "skipped", False), (LEFT + 420, "skipped, the inf was planted", True)):
        body += _skip(x, y - 4, planted) + text(x + 14, y, words, "small")
    return body


def build():
    """The controls and the picture, wired; `explore_loss_scale` shows them."""
    first = State()
    ui = SimpleNamespace(
        format=choice("format", [name for name, f in FORMATS.items() if f.dtype and name != "fp32"]),
        power=number("scale 2^", first.power, 0, MOST),
        start=number("start 2^", first.start, 0, MOST),
        interval=number("interval", first.interval, 1, 60),
        backoff=choice("backoff", {"0.5": 0.5, "0.25": 0.25, "0.75": 0.75}.items()),
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

    for name in ("format", "power", "start", "interval", "backoff"):
        getattr(ui, name).observe(lambda change, name=name: become(**{name: change["new"]}), "value")
    ui.planted.observe(typed, "value")
    ui.redraw = redraw
    ui.box = panel([ui.format, ui.backoff], [ui.power, ui.start, ui.interval, ui.planted], ui.picture)
    redraw()
    return ui


def explore_loss_scale():
    """Move the loss scale and see which gradients fp16 loses; plant overflows and see what a GradScaler does over 60 steps."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
