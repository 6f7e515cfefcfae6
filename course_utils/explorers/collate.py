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
CELL, TALL, LEFT = 36, 24, 186
BAR = 46  # the height of a full bar
CLASSES = 5
STYLE = f"""
.co rect{{stroke-width:1.2}} .co .real rect{{fill:{ROLES["storage"]};fill-opacity:.3;stroke:{ROLES["storage"]}}}
.co .pad rect{{fill:none;stroke:{ROLES["free"]};stroke-opacity:.7}} .co .pad .hatch{{opacity:.3}} .co .pad text{{fill:{FAINT}}}
.co .cells text{{font-size:13px;text-anchor:middle}} .co .tall rect,.co .tall path{{stroke-width:1.2}}
.co .tall rect{{fill:{ROLES["view"]};fill-opacity:.6;stroke:{ROLES["view"]}}}
.co .astray rect{{fill:{ROLES["wrong"]};fill-opacity:.35;stroke:{ROLES["wrong"]}}} .co .astray .hatch{{stroke:{ROLES["wrong"]};opacity:.9}}
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
    fits = all(re.fullmatch(r"[0-9]{1,3}", word) and 1 <= int(word) <= LONGEST for word in words)
    if not words or not fits or len(words) > MOST:
        shown = typed.strip() if len(typed.strip()) <= 40 else f"{typed.strip()[:39]}…"
        raise ValueError(f"“{shown}” is no list of lengths: write 1 to {MOST} numbers from 1 to {LONGEST}, such as 3 12 5.")
    return tuple(int(word) for word in words)


def order(state):
    """The numbers of the sequences, counted from 0, in the order in which they are batched."""
    numbers = range(len(state.lengths))
    return sorted(numbers, key=lambda n: state.lengths[n]) if state.sort else list(numbers)


def sequence(state, n):
    """Sequence n: int64 tokens from 1 to 9, which its number and length decide, wherever it is batched."""
    return torch.tensor([(7 * n + 3 * k) % 9 + 1 for k in range(state.lengths[n])])


def batches(state):
    """[(numbers of the sequences, padded (N, T), mask (N, T)), …]"""
    numbers = order(state)
    parts = [numbers[k : k + state.size] for k in range(0, len(numbers), state.size)]
    return [(part, *pad_batch([sequence(state, n) for n in part], state.value)) for part in parts]


def share(state):
    """Share of the batches' places that are padding."""
    masks = [mask for _, _, mask in batches(state)]
    return 1 - sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)


def _embedded(tokens, size, seed):
    """A vector of so many numbers for each token, from a table of 10 that the seed decides; what is no digit counts as its remainder."""
    return torch.randn(10, size, generator=torch.Generator().manual_seed(seed))[tokens.remainder(10)]


def losses(state):
    """(over all places, over the real ones): mean cross-entropy in the first batch, of a fixed table of scores for each token.

    A token's class is its remainder by CLASSES, and padding counts as class 0, which the table gives to token 0 with confidence.
    """
    _, padded, mask = batches(state)[0]
    outputs = _embedded(padded, CLASSES, 0)
    outputs[..., 0] += 4.0 * (padded == 0)
    targets = torch.where(mask, padded.remainder(CLASSES), 0)
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(mask.shape)
    return each.mean().item(), masked_mean(each, mask).item()


def attention(state):
    """(without a mask, with one): the weights, list of T, that the first place of the first batch's first sequence gives to each place."""
    _, padded, mask = batches(state)[0]
    vectors = _embedded(padded[0], 4, 1)
    scores = vectors[0] @ vectors.T / 4**0.5
    return scores.softmax(dim=0).tolist(), scores.masked_fill(~mask[0], float("-inf")).softmax(dim=0).tolist()


def findings(state):
    everywhere, real = losses(state)
    numbers, _, mask = batches(state)[0]
    astray = sum(weight for weight, here in zip(attention(state)[0], mask[0].tolist()) if not here)
    sorted_share = "" if state.sort else f"; sorted by length: {share(replace(state, sort=True)):.0%}"
    first = f"{share(state):.0%} of all places are padding{sorted_share}."
    second = f"Mean loss of batch 0: over all places, where padding counts as class 0, {everywhere:.3f}; over the real ones {real:.3f}."
    if mask.all():
        second = f"Mean loss of batch 0, which has no padding: {real:.3f}, with the mask or without."
    third = f"Without a mask {astray:.0%} of the attention goes to padding; with one, none."
    if mask[0].all():
        third = f"Sequence {numbers[0]} has no padding in its batch, and the mask changes nothing for it."
    return [first, second, third]


def describe(state):
    """The picture in words."""
    rows = [state.said] if state.said else []
    for n, (numbers, padded, mask) in enumerate(batches(state)):
        lengths = ", ".join(f"sequence {k}: {real} of {mask.shape[1]} places real" for k, real in zip(numbers, mask.sum(dim=1).tolist()))
        rows.append(f"batch {n}, shape {tuple(padded.shape)}; {lengths}")
    for name, weights in zip(("without", "with"), attention(state)):
        rows.append(f"attention {name} the mask, in %: {' '.join(map(_percent, weights))}")
    return "\n".join([*rows, *findings(state)])


def _percent(weight):
    return f"{100 * weight:.0f}" if weight >= 0.005 or not weight else "<1"


def draw(state):
    """The picture as SVG text."""
    body, y = "", 10
    if state.said:
        words, y = lines(14, 26, f"✗ {state.said}", "bad strong", 100)
        body += words
    for n, batch in enumerate(batches(state)):
        rows, y = _batch(n, *batch, y)
        body += rows
    first = batches(state)[0][0][0]
    body += text(14, y + 18, f"attention in batch 0: the weights that the first place of sequence {first} gives, in %", "strong")
    y += 32
    _, _, mask = batches(state)[0]
    rows = attention(state)
    for name, weights in zip(("without a mask", "with the mask"), rows):
        body += text(14, y + BAR - 4, name, "small") + _bars(weights, mask[0].tolist(), max(map(max, rows)), y)
        y += BAR + 30
    y += 16
    for sentence in findings(state):
        words, y = lines(14, y, sentence)
        body, y = body + words, y + 2
    return svg_document(WIDTH, y - 6, f'<g class="xp co">{body}</g>', describe(state), PANEL_STYLE + STYLE)


def _batch(n, numbers, padded, mask, y):
    """A batch's rows, each with the number of its sequence; returns it with the y below."""
    pads = mask.numel() - mask.sum().item()
    body = text(14, y + 17, f"batch {n}", "strong") + text(94, y + 17, tuple(padded.shape), "small mono")
    body += text(LEFT + CELL * padded.shape[1] + 10, y + 17, f"{pads / mask.numel():.0%} padding", "small")
    for k, row, marks in zip(numbers, padded.tolist(), mask.tolist()):
        body += text(LEFT - 8, y + 17, k, "small end")
        for place, (value, real) in enumerate(zip(row, marks)):
            body += _cell(LEFT + CELL * place, y, value, real)
        y += TALL + 3
    return body, y + 11


def _cell(x, y, value, real):
    hatch = "" if real else f'<path class="hatch" d="{_hatching(x, y, CELL - 3, TALL)}"/>'
    body = f'<g class="cells {"real" if real else "pad"}">{hatch}<rect x="{x}" y="{y}" width="{CELL - 3}" height="{TALL}"/>'
    return body + f'<text class="mono mid" x="{x + CELL / 2 - 1.5}" y="{y + 17}">{value}</text></g>'


def _bars(weights, marks, largest, y):
    """A bar for each weight, as high as its part of the largest, and its percent below; hatched where it falls on padding."""
    body = ""
    for k, (weight, real) in enumerate(zip(weights, marks)):
        x, tall, wide = LEFT + CELL * k, BAR * weight / largest, CELL - 9
        astray = weight and not real
        hatch = f'<path class="hatch" d="{_hatching(x + 3, y + BAR - tall, wide, tall)}"/>' if astray else ""
        bar = f'<rect x="{x + 3}" y="{y + BAR - tall:.1f}" width="{wide}" height="{tall:.1f}"/>' if weight else ""
        body += f'<g class="tall{" astray" if astray else ""}">{hatch}{bar}</g>'
        body += text(x + CELL / 2 - 1.5, y + BAR + 16, _percent(weight), "small mid")
    return body


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
