"""explore_memory_format(): the same image in three memory layouts, the path that each walk takes through it, and what it costs."""
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ipywidgets as widgets
import torch

from ..engine.display import INK, ROLES, show, svg_document
from ._panel import LEFT, STYLE, WIDTH, cell, lighting, lines, slot_numbers, text

LINE = 64  # bytes that a processor fetches at once
CHANNELS = "RGB"
LAYOUTS = {
    "NCHW, contiguous": ("NCHW", ""),
    "NCHW, channels_last": ("NCHW", ".contiguous(memory_format=torch.channels_last)"),
    "NHWC, permuted by hand": ("NHWC", ".permute(0, 2, 3, 1).contiguous()"),
}
WALKS = ("over the channels of one pixel", "along one row of one channel", "over everything, in logical order")
MEASURED = (4, 64, 56, 56)
FORMAT_STYLE = f"""
.mf .cR{{fill:{ROLES['wrong']}}} .mf .cG{{fill:{ROLES['gradients']}}} .mf .cB{{fill:{ROLES['storage']}}} .mf .tint{{fill-opacity:.22;stroke:none}}
.mf .pattern{{stroke:{INK};stroke-width:1;opacity:.3;fill:none}} .xp.mf .cell text{{font-size:13.5px}} .xp.mf .visited text{{font-weight:800}}
.xp.mf .cell rect{{fill:var(--f,none);fill-opacity:var(--o,0);stroke:var(--s,{ROLES['free']});stroke-width:var(--w,1)}}
.xp.mf .visited rect{{stroke:var(--s,{ROLES['view']});stroke-width:var(--w,2.5)}}
.mf .path{{fill:none;stroke:{INK};stroke-width:1.5}} .mf .dot{{fill:{INK}}} .mf .fence{{stroke:{ROLES['free']};stroke-width:1.5;stroke-dasharray:4 4}}
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
    """The line that makes the pictured tensor: its values count in NCHW order, so that each value tells its image, channel and pixel."""
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
    jumps = [abs(b - a) for a, b in zip(path, path[1:])]
    fetched = [cache_line(tensor, slot) for slot in path]
    entered = 1 + sum(a != b for a, b in zip(fetched, fetched[1:]))
    return sum(jumps), len(set(fetched)), entered


def cache_line(tensor, slot):
    start = tensor.untyped_storage().data_ptr()
    return (start + slot * tensor.element_size()) // LINE - start // LINE


def measure(runs=9):
    """Seconds, as quartiles, for each walk and for a convolution in each layout: the walk is timed as a copy made in its order."""
    from torch.utils.benchmark import Timer  # here, since importing it takes long and may warn about a missing compiler

    numbers = torch.Generator().manual_seed(0)
    x, kernel = torch.rand(MEASURED, generator=numbers), torch.rand(64, 64, 3, 3, generator=numbers)
    timings = {}
    for layout in LAYOUTS:
        tensor = eval("x" + LAYOUTS[layout][1], {"torch": torch, "x": x})
        images = nchw(tensor, layout)
        weight = kernel.contiguous(memory_format=torch.channels_last) if images.is_contiguous(memory_format=torch.channels_last) else kernel
        ordered = {WALKS[0]: images.permute(0, 2, 3, 1), WALKS[1]: images, WALKS[2]: tensor}
        work = {walk: ("t.clone(memory_format=torch.contiguous_format)", {"t": t}) for walk, t in ordered.items()}
        work["conv2d"] = ("torch.conv2d(t, weight, padding=1)", {"t": images, "weight": weight})
        for name, (statement, names) in work.items():
            timer = Timer(statement, globals={"torch": torch, **names}, num_threads=torch.get_num_threads())
            times = torch.tensor([timer.timeit(1).median for _ in range(runs)], dtype=torch.float64)
            timings[name, layout] = tuple(times.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist())
    return timings


def conclusion(timings, name, what):
    """What the measurement shows about `name`, and no more: a difference counts where the quartiles of fastest and slowest do not overlap."""
    fastest, slowest = (choose(LAYOUTS, key=lambda layout: timings[name, layout][1]) for choose in (min, max))
    (_, quick, quick_top), (slow_low, slow, _) = timings[name, fastest], timings[name, slowest]
    if slow_low <= quick_top:
        return f"On this machine {what} shows no difference between the layouts beyond the spread."
    return f"On this machine {what} takes {slow / quick:.1f} times as long in {slowest} as in {fastest}."


def table_rows(state):
    """One row for each layout: name, what the walk costs in steps, and the measured ratios to the fastest layout, if there are any."""
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


HEADERS = ("layout", "slots moved", "lines touched", "lines entered", "copy in this order", "conv2d, 3×3")


def sentences(state):
    if state.timings is None:
        return ["The last two columns wait for Measure. It takes about a second."]
    size = f"Measured on a {MEASURED} float32 tensor with {torch.get_num_threads()} threads: time as a multiple of the fastest layout, with quartiles."
    order = f"copying in the order of the walk “{state.walk}”"
    return [size, conclusion(state.timings, state.walk, order), conclusion(state.timings, "conv2d", "the convolution")]


def facts(state):
    tensor = image(state)
    return (
        (f"shape, as ({', '.join(LAYOUTS[state.layout][0])})", tuple(tensor.shape)), ("stride", tensor.stride()), ("is_contiguous()", tensor.is_contiguous()),
        ("…(memory_format=torch.channels_last)", tensor.is_contiguous(memory_format=torch.channels_last)),
    )


def describe(state):
    """The picture in words."""
    tensor = image(state)
    return "\n".join([
        f"{state.layout}: {code(state)}",
        *(f"{name}: {value}" for name, value in facts(state)),
        f"storage, by channel: {''.join(_pixel(state, value)[0] for value in _stored(tensor))}",
        f"walk {state.walk}: slots {steps(tensor, state.layout, state.walk)}",
        *("; ".join(f"{header}: {value}" for header, value in zip(HEADERS, row)) for row in table_rows(state)),
        *sentences(state),
    ])


def draw(state):
    """The picture as SVG text."""
    tensor = image(state)
    path = steps(tensor, state.layout, state.walk)
    body = text(14, 26, code(state), "mono strong")
    for x, (name, value) in zip((14, 230, 420, 560), facts(state)):
        body += text(x, 58, name, "small") + text(x, 79, value, "mono")
    planes, y = _planes(state, tensor, set(path), 134 if state.images > 1 else 116)
    body += planes + text(LEFT, y + 14, f"its storage, walked {state.walk}", "strong")
    y += 38
    for n in range(state.images):
        strip, y = _strip(state, tensor, path, n, y)
        body += strip
    table, y = _table(state, y + 24)
    return svg_document(WIDTH, y, f'<g class="xp mf">{body}{table}</g>', describe(state), STYLE + FORMAT_STYLE + lighting(range(tensor.numel())), role="group")


def _pixel(state, value):
    """(letter of the channel, number of the pixel) of a value: its place in NCHW order."""
    n, rest = divmod(int(value), 3 * state.height * state.width)
    channel, pixel = divmod(rest, state.height * state.width)
    return CHANNELS[channel], pixel


def _stored(tensor):
    return torch.as_strided(tensor, (tensor.numel(),), (1,), 0).tolist()


def _planes(state, tensor, visited, y):
    """Every image as three planes; what the walk visits has the outline of a view."""
    slots, values = nchw(slot_numbers(tensor), state.layout), nchw(tensor, state.layout)
    body, x = "", LEFT
    for n in range(state.images):
        for c, channel in enumerate(CHANNELS):
            body += text(x, y, channel, "strong") + (text(x, y - 18, f"image {n}", "small") if c == 0 and state.images > 1 else "")
            for i in range(state.height):
                for j in range(state.width):
                    slot, (_, pixel) = int(slots[n, c, i, j]), _pixel(state, values[n, c, i, j])
                    label = f"image {n}, channel {channel}, row {i}, column {j}: storage slot {slot}"
                    body += _tile(x + 32 * j, y + 10 + 30 * i, 30, 28, channel, f"{channel}{pixel}", slot, slot in visited, label)
            x += 32 * state.width + (10 if c < 2 else 26)
    return body, y + 30 * state.height + 30


def _tile(x, y, width, height, channel, words, slot, visited, label=None):
    """A cell tinted by its channel, and patterned: R has none, G diagonals, B level lines."""
    if channel == "G":
        marks = "".join(f"M{x + a:g} {y + height:g}L{x + min(width, a + height):g} {y + max(0, height - (width - a)):g}" for a in range(0, int(width), 7))
    else:
        marks = "".join(f"M{x:g} {y + b}h{width:g}" for b in range(5, height, 6)) if channel == "B" else ""
    tint = f'<path class="tint c{channel}" d="M{x:g} {y:g}h{width:g}v{height:g}h-{width:g}z"/><path class="pattern" d="{marks}"/>'
    return cell(x, y, width, height, words, "visited" if visited else "pixel", slot, label, tint)


def _strip(state, tensor, path, n, y):
    """One image's part of the storage as a strip, and under it the walk: one step down is one step in time."""
    size = 3 * state.height * state.width
    first, pitch = n * size, min(36.0, (WIDTH - LEFT - 14) / size)
    stored, visited = _stored(tensor), set(path)
    here = [(k, slot) for k, slot in enumerate(path) if first <= slot < first + size]
    fall = max(5, min(22, 66 / max(1, len(here))))
    top, bottom = y + 34, y + 46 + fall * (len(here) + 1)
    body = text(LEFT - 8, top + 44, "slot", "small", text_anchor="end")
    for slot in range(first, first + size):
        x = LEFT + (slot - first) * pitch
        channel, pixel = _pixel(state, stored[slot])
        body += _tile(x, top, pitch - 2, 26, channel, f"{channel}{pixel}" if pitch > 30 else channel, slot, slot in visited)
        if slot == first or cache_line(tensor, slot) != cache_line(tensor, slot - 1):
            name = f"{f'image {n}, ' if slot == first and n else ''}{'64-byte ' if slot == 0 else ''}line {cache_line(tensor, slot)}"
            body += f'<path class="fence" d="M{x - 1:g} {top - 20:g}V{bottom + 22:g}"/>' + text(x + 4, top - 8, name, "small")
        if pitch > 30 or slot % 4 == 0:
            body += text(x + pitch / 2 - 1, top + 44, slot, "small", text_anchor="middle")
    points = [(LEFT + (slot - first + 0.5) * pitch - 1, top + 58 + fall * i) for i, (_, slot) in enumerate(here)]
    if points:
        body += f'<path class="path" d="M{"L".join(f"{x:.1f} {py:.1f}" for x, py in points)}"/>'
        body += "".join(f'<circle class="dot" cx="{x:.1f}" cy="{py:.1f}" r="3"/>' for x, py in points)
        body += text(LEFT - 3, points[0][1] + 5, f"{'step ' if path[0] == here[0][1] else ''}{here[0][0] + 1}", "small", text_anchor="end")
        body += text(LEFT - 3, points[-1][1] + 5, here[-1][0] + 1, "small", text_anchor="end")
    return body, bottom + 40


def _table(state, y):
    columns = (14, 246, 340, 440, 545, 722)
    body = "".join(text(x, y, header, "small") for x, header in zip(columns, HEADERS))
    for row in table_rows(state):
        y += 24
        css = "strong" if row[0] == state.layout else ""
        body += "".join(text(x, y, value, css) for x, value in zip(columns, row))
    y += 14
    for sentence in sentences(state):
        words, y = lines(14, y + 20, sentence)
        y -= 16
        body += words
    return body, y + 10


def build():
    """The controls and the picture, wired; `explore_memory_format` shows them."""
    wide, narrow = {"width": "330px"}, {"width": "160px"}
    ui = SimpleNamespace(
        layout=widgets.Dropdown(options=list(LAYOUTS), description="layout", layout=wide),
        walk=widgets.Dropdown(options=WALKS, description="walk", layout=wide),
        images=widgets.Dropdown(options=(1, 2), description="images", layout=narrow),
        height=widgets.Dropdown(options=(2, 3, 4), value=4, description="height", layout=narrow),
        width=widgets.Dropdown(options=(2, 3, 4), value=4, description="width", layout=narrow),
        measure=widgets.Button(description="Measure", button_style="primary", layout={"width": "110px"}),
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
    row = {"flex_flow": "row wrap", "max_width": "900px"}
    ui.box = widgets.VBox([
        widgets.HBox([ui.layout, ui.walk, ui.measure], layout=row), widgets.HBox([ui.images, ui.height, ui.width], layout=row), ui.picture,
    ])
    redraw()
    return ui


def explore_memory_format():
    """Show a small image in three memory layouts, with the path of a walk through each; Measure times the walks on this machine."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
