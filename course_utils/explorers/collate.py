"""explore_collate(): sequences of uneven length as padded batches, and what the padding does to a mean loss and to attention."""
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ipywidgets as widgets
import torch
import torch.nn.functional as F

from ..engine.display import FAINT, ROLES, show, svg_document
from ..toolkit.loading import masked_mean, pad_batch
from ._panel import STYLE as PANEL_STYLE
from ._panel import WIDTH, _hatching, choice, lines, number, panel, text

LONGEST, MOST = 16, 12  # what the picture has room for
CELL, TALL, LEFT = 26, 24, 110
CLASSES = 5
STYLE = f"""
.co rect{{stroke-width:1.2}} .co .real rect{{fill:{ROLES["storage"]};fill-opacity:.3;stroke:{ROLES["storage"]}}}
.co .pad rect{{fill:none;stroke:{ROLES["free"]}}} .co .pad text{{fill:{FAINT}}} .co .cells text{{font-size:12px;text-anchor:middle}}
.co .bar{{fill:{ROLES["view"]};fill-opacity:.6;stroke:{ROLES["view"]}}} .co .astray{{fill:{ROLES["wrong"]};stroke:{ROLES["wrong"]}}}
"""


@dataclass(frozen=True)
class State:
    lengths: tuple = (3, 12, 5, 2, 9, 4, 11, 2)
    size: int = 4  # of a batch
    sort: bool = False
    value: int = 0  # that padding is filled with
    said: str = ""  # why what was typed is no list of lengths


def read(typed):
    """Lengths from text: "3 12, 5". Raises ValueError with a sentence."""
    words = [word for word in re.split(r"[\s,;]+", typed) if word]
    fits = all(re.fullmatch(r"\d{1,3}", word) and 1 <= int(word) <= LONGEST for word in words)
    if not words or not fits or len(words) > MOST:
        said = f"“{typed.strip()}” is no list of lengths: write 1 to {MOST} numbers from 1 to {LONGEST}, such as 3 12 5."
        raise ValueError(said)
    return tuple(int(word) for word in words)


def sequences(state):
    """The sequences, in the order in which they are batched: int64 tokens from 1 to 9, the same for the same place and length."""
    lengths = sorted(state.lengths) if state.sort else state.lengths
    return [torch.tensor([(7 * n + 3 * k) % 9 + 1 for k in range(length)]) for n, length in enumerate(lengths)]


def batches(state):
    """[(padded (N, T), mask (N, T)), …]"""
    every = sequences(state)
    return [pad_batch(every[k : k + state.size], state.value) for k in range(0, len(every), state.size)]


def share(state):
    """Share of the batches' places that are padding."""
    made = batches(state)
    return 1 - sum(mask.sum().item() for _, mask in made) / sum(mask.numel() for _, mask in made)


def losses(state):
    """(over all places, over the real ones): mean cross-entropy of a fixed linear model in the first batch; padding is class 0."""
    padded, mask = batches(state)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = torch.randn(10, CLASSES)
    weights[0, 0] += 4.0  # it has learned to recognise a token 0
    outputs = weights[padded.remainder(10)]
    targets = torch.where(mask, padded.remainder(CLASSES), 0)
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(mask.shape)
    return each.mean().item(), masked_mean(each, mask).item()


def attention(state):
    """(without a mask, with one): the weights that the first place of the first sequence gives to all places of its batch's row."""
    padded, mask = batches(state)[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        vectors = torch.randn(10, 4)[padded[0].remainder(10)]
    scores = vectors[:1] @ vectors.T / 2
    with_mask = scores.masked_fill(~mask[0], float("-inf")).softmax(dim=-1)
    return scores.softmax(dim=-1)[0].tolist(), with_mask[0].tolist()


def findings(state):
    everywhere, real = losses(state)
    plain, masked = attention(state)
    _, mask = batches(state)[0]
    astray = sum(weight for weight, here in zip(plain, mask[0].tolist()) if not here)
    best = share(replace(state, sort=True))
    first = f"{share(state):.0%} of all places are padding" + ("." if state.sort else f"; sorted by length: {best:.0%}.")
    second = f"Mean loss in batch 1, over all places: {everywhere:.3f}, over the real ones: {real:.3f}."
    third = f"In sequence 1, its first place gives {astray:.0%} of its attention to padding without a mask, none with one."
    return [first, second, third]


def describe(state):
    """The picture in words."""
    rows = [state.said] if state.said else []
    for n, (padded, mask) in enumerate(batches(state), 1):
        rows.append(f"batch {n}, shape {tuple(padded.shape)}, real places in each row: {mask.sum(dim=1).tolist()}")
    return "\n".join([*rows, *findings(state)])


def draw(state):
    """The picture as SVG text."""
    body, y = "", 14
    if state.said:
        words, y = lines(14, y + 12, f"✗ {state.said}", "bad strong")
        body += words
    for n, (padded, mask) in enumerate(batches(state), 1):
        body += text(14, y + 18, f"batch {n}", "strong") + text(14, y + 36, f"{tuple(padded.shape)}", "small mono")
        for row, marks in zip(padded.tolist(), mask.tolist()):
            for k, (value, real) in enumerate(zip(row, marks)):
                body += _cell(LEFT + CELL * k, y, value, real)
            y += TALL + 2
        y += 14
    body += text(14, y + 14, "attention of sequence 1's first place", "strong")
    y += 24
    _, mask = batches(state)[0]
    for name, weights in zip(("no mask", "mask"), attention(state)):
        body += text(14, y + 44, name, "small")
        for k, (weight, real) in enumerate(zip(weights, mask[0].tolist())):
            tall = 44 * weight / max(*weights, 1e-9) if len(weights) > 1 else 44
            astray = "" if real or not weight else " astray"
            x = LEFT + CELL * k
            body += f'<rect class="bar{astray}" x="{x + 3}" y="{y + 48 - tall:.1f}" width="{CELL - 6}" height="{tall:.1f}"/>'
        y += 60
    for sentence in findings(state):
        words, y = lines(14, y + 20, sentence)
        body, y = body + words, y - 18
    return svg_document(WIDTH, y + 14, f'<g class="xp co">{body}</g>', describe(state), PANEL_STYLE + STYLE)


def _cell(x, y, value, real):
    hatch = "" if real else f'<path class="hatch" d="{_hatching(x, y, CELL - 2, TALL)}"/>'
    kind = "real" if real else "pad"
    body = f'<g class="cells {kind}">{hatch}<rect x="{x}" y="{y}" width="{CELL - 2}" height="{TALL}"/>'
    return body + f'<text class="mono mid" x="{x + CELL / 2 - 1}" y="{y + 17}">{value}</text></g>'


def build():
    """The controls and the picture, wired; `explore_collate` shows them."""
    first = State()
    ui = SimpleNamespace(
        lengths=widgets.Text(" ".join(map(str, first.lengths)), description="lengths", continuous_update=False, layout={"width": "330px"}),
        size=number("batch size", first.size, 1, MOST),
        value=number("padding", first.value, -9, 9),
        sort=choice("order", ("as they come", "by length")),
        picture=widgets.HTML(),
        state=first,
    )

    def redraw():
        ui.picture.value = draw(ui.state)

    def become(**changes):
        ui.state = replace(ui.state, **changes)
        redraw()

    def typed(change):
        try:
            become(lengths=read(change["new"]), said="")
        except ValueError as error:
            become(said=str(error))

    ui.lengths.observe(typed, "value")
    ui.size.observe(lambda change: become(size=change["new"]), "value")
    ui.value.observe(lambda change: become(value=change["new"]), "value")
    ui.sort.observe(lambda change: become(sort=change["new"] == "by length"), "value")
    ui.redraw = redraw
    ui.box = panel([ui.sort], [ui.lengths, ui.size, ui.value], ui.picture)
    redraw()
    return ui


def explore_collate():
    """Edit the lengths of some sequences and see them padded into batches, with what the padding does to a loss and to attention."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
