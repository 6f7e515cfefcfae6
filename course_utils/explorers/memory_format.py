"""explore_memory_format(): one image in three memory layouts, the path of each walk through them, and what it costs."""
import math
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import SimpleNamespace

import ipywidgets as widgets
import torch

from ..engine.display import INK, ROLES, show
from ._panel import LEFT, WIDTH, button, cell, choice, document, lines, number, panel, slot_numbers, stored, text

LINE = 64  # bytes that a processor fetches at once
CHANNELS = "RGB"
LAYOUTS = {
    "NCHW, contiguous": ("NCHW", ""),
    "NCHW, channels_last": ("NCHW", ".contiguous(memory_format=torch.channels_last)"),
    "NHWC, permuted by hand": ("NHWC", ".permute(0, 2, 3, 1).contiguous()"),
}
WALKS = ("over the channels of one pixel", "along one row of one channel", "over everything, in logical order")
MEASURED = (4, 64, 56, 56)
HEADERS = ("layout", "slots moved", "lines touched", "lines entered", "copy in this order", "conv2d, 3×3")
STYLE = f"""
.mf .cR{{fill:{ROLES["wrong"]}}} .mf .cG{{fill:{ROLES["gradients"]}}} .mf .cB{{fill:{ROLES["storage"]}}}
.mf .tint{{fill-opacity:.22;stroke:none}} .mf .pattern{{stroke:{INK};stroke-width:1;opacity:.3;fill:none}}
.xp.mf .cell text{{font-size:13.5px}} .xp.mf .visited text{{font-weight:800}}
.xp.mf .cell rect{{fill:var(--f,none);fill-opacity:var(--o,0)}}
.xp.mf .cell rect{{stroke:var(--s,{ROLES["free"]});stroke-width:var(--w,1)}}
.xp.mf .visited rect{{stroke:var(--s,{ROLES["view"]});stroke-width:var(--w,2.5)}}
.mf .path{{fill:none;stroke:{INK};stroke-width:1.5}} .mf .dot{{fill:{INK}}}
.mf .fence{{stroke:{ROLES["free"]};stroke-width:1.5;stroke-dasharray:4 4}}
"""


@dataclass(frozen=True)
class State:
    images: int = 1
    height: int = 4
    width: int = 4
    layout: str = "NCHW, contiguous"
    walk: str = WALKS[0]
    timings: dict | None = None  # (what was timed, layout) -> (first quartile, median, third quartile) in seconds


def code(state, layout=None):
    """The line that makes the tensor: its values count in NCHW order, so each tells its image, channel and pixel."""
    shape = (state.images, 3, state.height, state.width)
    return f"torch.arange({math.prod(shape)}.).view{shape}{LAYOUTS[layout or state.layout][1]}"


def image(state, layout=None):
    return eval(code(state, layout), {"torch": torch})


def nchw(tensor, layout):
    return tensor.permute(0, 3, 1, 2) if LAYOUTS[layout][0] == "NHWC" else tensor


def steps(tensor, layout, walk):
    """The storage slots in the order in which the walk comes to them."""
    slots = slot_numbers(tensor)
    pixels = nchw(slots, layout)
    row = pixels.shape[2] // 2
    found = {WALKS[0]: pixels[0, :, row, pixels.shape[3] // 2], WALKS[1]: pixels[0, 0, row], WALKS[2]: slots}[walk]
    return found.reshape(-1).tolist()


def cost(tensor, path):
    """Slots moved in all, cache lines touched, and how often the walk enters a line that it is not in."""
    jumps = [abs(b - a) for a, b in pairwise(path)]
    fetched = [cache_line(tensor, slot) for slot in path]
    entered = 1 + sum(a != b for a, b in pairwise(fetched))
    return sum(jumps), len(set(fetched)), entered


def cache_line(tensor, slot):
    start = tensor.untyped_storage().data_ptr()
    return (start + slot * tensor.element_size()) // LINE - start // LINE


def measure(runs=7):
    """Quartiles, in seconds, of each walk and a convolution in each layout; a walk is timed as a copy in its order.

    On one thread, since a thread that waits for another on a busy machine would be measured too; and in rounds over all
    of them, so that a disturbance meets every layout.
    """
    from ..engine.timing import Timer  # here, since importing it takes long

    source = torch.Generator().manual_seed(0)
    x, kernel = torch.rand(MEASURED, generator=source), torch.rand(64, 64, 3, 3, generator=source)
    timers = {}
    for layout in LAYOUTS:
        tensor = eval("x" + LAYOUTS[layout][1], {"torch": torch, "x": x})
        images = nchw(tensor, layout)
        last = images.is_contiguous(memory_format=torch.channels_last)
        weight = kernel.contiguous(memory_format=torch.channels_last) if last else kernel
        for walk, t in zip(WALKS, (images.permute(0, 2, 3, 1), images, tensor), strict=True):
            timers[walk, layout] = Timer("out.copy_(t)", globals={"t": t, "out": torch.empty(t.shape)})
        names = {"conv2d": torch.conv2d, "t": images, "weight": weight}
        timers["conv2d", layout] = Timer("conv2d(t, weight, padding=1)", globals=names)
    rounds = [[timer.timeit(1).median for timer in timers.values()] for _ in range(runs)]
    quartiles = torch.tensor(rounds).quantile(torch.tensor([0.25, 0.5, 0.75]), dim=0)
    return {name: tuple(column) for name, column in zip(timers, quartiles.T.tolist(), strict=True)}


def conclusion(timings, name, what):
    """What was measured, and no more: a difference counts where the quartiles of fastest and slowest are apart."""
    fastest, slowest = (end(LAYOUTS, key=lambda layout: timings[name, layout][1]) for end in (min, max))
    quick_top, slow_low = timings[name, fastest][2], timings[name, slowest][0]
    if slow_low <= quick_top:
        return f"On this machine {what} shows no difference between the layouts beyond the spread."
    factor = f"at least {slow_low / quick_top:.1f} times as long"
    return f"On this machine {what} takes {factor} in {slowest} as in {fastest}."


def table_rows(state):
    """A row for each layout: its name, what the walk costs, and the measured times as multiples of the fastest."""
    rows = []
    for layout in LAYOUTS:
        tensor = image(state, layout)
        ratios = []
        for name in (state.walk, "conv2d"):
            if state.timings is None:
                ratios.append("not measured")
            else:
                best = min(state.timings[name, other][1] for other in LAYOUTS)
                low, middle, high = (seconds / best for seconds in state.timings[name, layout])
                ratios.append(f"{middle:.2f} ({low:.2f}–{high:.2f})")
        rows.append((layout, *cost(tensor, steps(tensor, layout, state.walk)), *ratios))
    return rows


def sentences(state):
    if state.timings is None:
        return ["Press Measure to fill the last two columns."]
    size = f"Measured on a {MEASURED} float32 tensor, one thread: multiples of the fastest layout, with quartiles."
    order = f"copying in the order of the walk “{state.walk}”"
    return [size, conclusion(state.timings, state.walk, order), conclusion(state.timings, "conv2d", "the convolution")]


def facts(state):
    tensor = image(state)
    return (
        (f"shape, as ({', '.join(LAYOUTS[state.layout][0])})", tuple(tensor.shape)),
        ("stride", tensor.stride()),
        ("is_contiguous()", tensor.is_contiguous()),
        ("…(memory_format=torch.channels_last)", tensor.is_contiguous(memory_format=torch.channels_last)),
    )


def describe(state):
    """The picture in words."""
    tensor = image(state)
    rows = ["; ".join(f"{h}: {v}" for h, v in zip(HEADERS, row, strict=True)) for row in table_rows(state)]
    return "\n".join([
        f"{state.layout}: {code(state)}",
        *(f"{name}: {value}" for name, value in facts(state)),
        f"storage, by channel: {''.join(_pixel(state, value)[0] for value in stored(tensor))}",
        f"walk {state.walk}: slots {steps(tensor, state.layout, state.walk)}",
        *rows,
        *sentences(state),
    ])


def draw(state):
    """The picture as SVG text."""
    tensor = image(state)
    path = steps(tensor, state.layout, state.walk)
    body = text(14, 26, code(state), "mono strong")
    for x, (name, value) in zip((14, 230, 420, 560), facts(state), strict=True):
        body += text(x, 58, name, "small") + text(x, 79, value, "mono")
    planes, y = _planes(state, tensor, set(path), 134 if state.images > 1 else 116)
    body += planes + text(LEFT, y + 14, f"its storage, walked {state.walk}", "strong")
    y += 38
    for n in range(state.images):
        strip, y = _strip(state, tensor, path, n, y)
        body += strip
    table, y = _table(state, y + 24)
    return document(body + table, y, describe(state), range(tensor.numel()), "mf", STYLE)


def _pixel(state, value):
    """(letter of the channel, number of the pixel) of a value: its place in NCHW order."""
    n, rest = divmod(int(value), 3 * state.height * state.width)
    channel, pixel = divmod(rest, state.height * state.width)
    return CHANNELS[channel], pixel


def _planes(state, tensor, visited, y):
    """Every image as three planes; what the walk visits has the outline of a view."""
    slots, values = nchw(slot_numbers(tensor), state.layout), nchw(tensor, state.layout)
    body, x = "", LEFT
    for n in range(state.images):
        for c, channel in enumerate(CHANNELS):
            body += text(x, y, channel, "strong")
            if c == 0 and state.images > 1:
                body += text(x, y - 18, f"image {n}", "small")
            for i, j in product(range(state.height), range(state.width)):
                slot, name = int(slots[n, c, i, j]), f"{channel}{_pixel(state, values[n, c, i, j])[1]}"
                label = f"image {n}, channel {channel}, row {i}, column {j}: storage slot {slot}"
                body += _tile(x + 32 * j, y + 10 + 30 * i, 30, 28, name, slot, slot in visited, label)
            x += 32 * state.width + (10 if c < 2 else 26)
    return body, y + 30 * state.height + 30


def _tile(x, y, width, height, name, slot, visited, label=None):
    """A cell tinted by its channel, and patterned: R has none, G diagonals, B level lines."""
    marks = ""
    if name[0] == "G":
        for a in range(0, int(width), 7):
            reach = min(height, width - a)
            marks += f"M{x + a:g} {y + height:g}l{reach:g} {-reach:g}"
    elif name[0] == "B":
        marks = "".join(f"M{x:g} {y + b}h{width:g}" for b in range(5, height, 6))
    tint = f'<path class="tint c{name[0]}" d="M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"/>'
    pattern = f'<path class="pattern" d="{marks}"/>'
    return cell(x, y, width, height, name, "visited" if visited else "pixel", slot, label, tint + pattern)


def _strip(state, tensor, path, n, y):
    """One image's part of the storage as a strip, and under it the walk: one step down is one step in time."""
    size = 3 * state.height * state.width
    first, pitch = n * size, min(36.0, (WIDTH - LEFT - 14) / size)
    values, visited = stored(tensor), set(path)
    here = [(k, slot) for k, slot in enumerate(path) if first <= slot < first + size]
    fall = max(5, min(22, 66 / max(1, len(here))))
    top = y + 34
    bottom = top + 66 + fall * max(0, len(here) - 1)
    body = text(LEFT - 8, top + 44, "slot", "small end")
    for slot in range(first, first + size):
        x = LEFT + (slot - first) * pitch
        channel, pixel = _pixel(state, values[slot])
        name = f"{channel}{pixel}" if pitch > 30 else channel
        body += _tile(x, top, pitch - 2, 26, name, slot, slot in visited)
        line = cache_line(tensor, slot)
        if slot == first or line != cache_line(tensor, slot - 1):
            name = f"image {n}, line {line}" if slot == first and n else f"{'' if slot else '64-byte '}line {line}"
            body += f'<path class="fence" d="M{x - 1:g} {top - 20:g}V{bottom:g}"/>'
            body += text(x + 4, top - 8, name, "small")
        if pitch > 30 or slot % 4 == 0:
            body += text(x + pitch / 2 - 1, top + 44, slot, "small mid")
    points = [(LEFT + (slot - first + 0.5) * pitch - 1, top + 58 + fall * i) for i, (_, slot) in enumerate(here)]
    if points:
        body += f'<path class="path" d="M{"L".join(f"{x:.1f} {py:.1f}" for x, py in points)}"/>'
        body += "".join(f'<circle class="dot" cx="{x:.1f}" cy="{py:.1f}" r="3"/>' for x, py in points)
        begin = f"step {here[0][0] + 1}" if here[0][0] == 0 else here[0][0] + 1
        body += text(LEFT - 3, points[0][1] + 5, begin, "small end")
        body += text(LEFT - 3, points[-1][1] + 5, here[-1][0] + 1, "small end")
    return body, bottom + 24


def _table(state, y):
    columns = (14, 246, 340, 440, 545, 722)
    body = "".join(text(x, y, header, "small") for x, header in zip(columns, HEADERS, strict=True))
    for row in table_rows(state):
        y += 24
        css = "strong" if row[0] == state.layout else ""
        body += "".join(text(x, y, value, css) for x, value in zip(columns, row, strict=True))
    y += 14
    for sentence in sentences(state):
        words, y = lines(14, y + 20, sentence)
        y -= 16
        body += words
    return body, y + 10


def build():
    """The controls and the picture, wired; `explore_memory_format` shows them."""
    ui = SimpleNamespace(
        layout=choice("layout", LAYOUTS),
        walk=choice("walk", WALKS),
        images=number("images", 1, 1, 2),
        height=number("height", 4, 2, 4),
        width=number("width", 4, 2, 4),
        measure=button("Measure", "primary"),
        picture=widgets.HTML(),
        state=State(),
    )
    settings = ("layout", "walk", "images", "height", "width")

    def redraw(_=None):
        ui.state = replace(ui.state, **{name: getattr(ui, name).value for name in settings})
        ui.picture.value = draw(ui.state)

    def on_measure(_):
        ui.measure.disabled, ui.measure.description = True, "measuring…"
        try:
            ui.state = replace(ui.state, timings=measure())
        finally:
            ui.measure.disabled, ui.measure.description = False, "Measure"
        redraw()

    for name in settings:
        getattr(ui, name).observe(redraw, "value")
    ui.measure.on_click(on_measure)
    ui.redraw = redraw
    ui.box = panel([ui.layout, ui.walk], [ui.images, ui.height, ui.width, ui.measure], ui.picture)
    redraw()
    return ui


def explore_memory_format():
    """Show a small image in three memory layouts, and a walk through each; Measure times the walks on this machine."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
