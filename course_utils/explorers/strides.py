"""explore_strides(): a tensor beside its storage, and what each operation does to both."""
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import ipywidgets as widgets
import torch

from ..engine.display import ROLES, escape, show, svg_document
from ._panel import LEFT, STYLE, WIDTH, cell, lighting, lines, slot_numbers, text

STARTS = {
    "12 numbers as (3, 4)": "torch.arange(12).view(3, 4)",
    "6 numbers as (2, 3)": "torch.arange(6).view(2, 3)",
    "6 numbers in a row": "torch.arange(6)",
    "4 numbers in a column": "torch.arange(4).view(4, 1)",
    "24 numbers as (2, 3, 4)": "torch.arange(24).view(2, 3, 4)",
    "36 numbers as (2, 2, 3, 3)": "torch.arange(36).view(2, 2, 3, 3)",
}
OPERATIONS = ("transpose", "permute", "slice", "expand", "unfold", "view", "reshape", "contiguous", "flip")


@dataclass(frozen=True, eq=False)
class State:
    tensor: torch.Tensor
    code: str
    before: "State | None" = None
    copied: int = 0  # bytes that the last operation allocated
    total: int = 0
    message: str = ""  # what torch said when the last attempt failed

    @property
    def outcome(self):
        if self.before is None:
            return "none yet"
        same = "the same tensor" if self.tensor is self.before.tensor else "a view"
        return "a copy" if moved(self.before.tensor, self.tensor) else same


def begin(tensor, code):
    reason = too_big(tensor)
    if reason:
        raise ValueError(f"explore_strides cannot draw this tensor: {reason}")
    return State(tensor.detach(), code)


def too_big(tensor):
    """None, or why the picture has no room for it."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return "it has no storage whose slots could be shown"
    slots = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.dim() > 4 or tensor.numel() > 72 or slots > 72 or (tensor.dim() > 1 and tensor.shape[-2] > 24):
        return f"the picture has room for 4 dimensions, 72 elements, 24 rows and 72 storage slots; this has shape {tuple(tensor.shape)} and {slots} slots"
    return None


def moved(old, new):
    return old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()


def apply(state, step):
    """The state after `step`, a tuple such as ("transpose", 0, 1), ("slice", 1, "::2") or ("view", "4, 3"); what fails leaves a message."""
    name, *given = step
    try:
        if name == "slice":
            dim, index = given[0] % max(1, state.tensor.dim()), _slice(given[1])
            result = state.tensor[(slice(None),) * dim + (index,)]
            code = f"[{':, ' * dim}{given[1].replace(' ', '')}]"
        else:
            args = [numbers(arg) if isinstance(arg, str) else arg for arg in given]
            result = getattr(state.tensor, name)(*args)
            code = f".{name}({', '.join(shape_code(arg) if isinstance(arg, tuple) else str(arg) for arg in args)})"
        reason = too_big(result)
        if reason:
            raise ValueError(f"torch does it, but {reason}")
    except Exception as error:  # the learner's step, torch's answer: whatever is said is shown
        return replace(state, message=f"{type(error).__name__}: {str(error).splitlines()[0]}")
    copied = result.untyped_storage().nbytes() if moved(state.tensor, result) else 0
    return State(result, state.code + code, replace(state, message=""), copied, state.total + copied)


def undo(state):
    return state.before or replace(state, message="")


def numbers(words):
    try:
        return tuple(int(part) for part in words.strip("()[] ").split(",") if part.strip())
    except ValueError:
        raise ValueError(f"{words!r}: write whole numbers with commas between them, like 3, -1") from None


def shape_code(shape):
    return ", ".join(map(str, shape)) or "()"


def _slice(words):
    try:
        parts = [int(part) if part.strip() else None for part in words.split(":")]
        return parts[0] if len(parts) == 1 and parts[0] is not None else slice(*(parts if parts != [None] else ()))
    except (ValueError, TypeError):
        raise ValueError(f"{words!r}: write start:stop:step, each may be left out, or one index") from None


def verdict(tensor, target):
    """(does tensor.view(target) succeed?, the reasons as sentences): torch gives the answer, the rule explains it."""
    try:
        shape = numbers(target)
        wanted = torch.empty(tensor.shape, device="meta").view(shape).shape  # resolves -1; fails where the number of elements is wrong
    except Exception as error:
        return False, [str(error).splitlines()[0]]
    try:
        return True, [f"shape {tuple(wanted)} with strides {tensor.view(shape).stride()}, nothing is copied"]
    except RuntimeError:
        return False, seams(tensor, wanted)


def seams(tensor, wanted):
    """Where two neighbouring dimensions do not continue each other in memory and the wanted shape runs across. Dimensions of size 1 do not count."""
    suffixes = {wanted[i:].numel() for i in range(len(wanted) + 1)}
    dims = [d for d in range(tensor.dim()) if tensor.shape[d] != 1]
    found = []
    for a, b in zip(dims, dims[1:]):
        stride, size, inner = tensor.stride(a), tensor.shape[b], tensor.stride(b)
        if stride != size * inner and tensor.shape[b:].numel() not in suffixes:
            found.append(f"dimensions {a} and {b} cannot be merged: stride[{a}] = {stride}, but shape[{b}] × stride[{b}] = {size} × {inner} = {size * inner}")
    return found


def describe(state, target="-1"):
    """The picture in words."""
    tensor = state.tensor
    succeeds, reasons = verdict(tensor, target)
    return "\n".join([
        state.code,
        *([f"✗ {state.message}"] if state.message else []),
        *(f"{name}: {value}" for name, value in facts(state)),
        f"elements: {tensor.tolist()}",
        f"read from storage slots: {slot_numbers(tensor).tolist()} of {tensor.untyped_storage().nbytes() // tensor.element_size()}",
        f"would .view({target}) succeed? {'yes' if succeeds else 'no'}: {'; '.join(reasons)}",
    ])


def facts(state):
    tensor = state.tensor
    return (
        ("shape", tuple(tensor.shape)), ("stride", tensor.stride()), ("storage_offset", tensor.storage_offset()), ("is_contiguous", tensor.is_contiguous()),
        ("last operation gave", state.outcome), ("bytes copied", f"{state.copied}, in all {state.total}"),
    )


def draw(state, target="-1"):
    """The picture as SVG text."""
    tensor = state.tensor
    body, y = lines(14, 26, state.code, "mono strong", width=94)
    if state.message:
        words, y = lines(34, y + 4, state.message, width=104)
        body += text(14, y - 20 * words.count("<text"), "✗", "strong", style=f"fill:{ROLES['wrong']}") + words
    for x, (name, value) in zip((14, 190, 366, 490, 610, 754), facts(state)):
        body += text(x, y + 12, name, "small") + text(x, y + 33, value, "mono" if x < 600 else "strong")
    grid, places, y = _elements(state, y + 76)
    strip, spots, y = _storage(state, places, y + 26)
    ending, y = _ending(tensor, target, y + 22)
    style = STYLE + lighting(slot_numbers(tensor).unique().tolist())
    return svg_document(WIDTH, y, f'<g class="xp">{_links(places, spots)}{body}{grid}{strip}{ending}</g>', describe(state, target), style, role="group")


def _elements(state, y):
    """The tensor's elements as grids of its last two dimensions, flowing from left to right; and the place of each, with its slot."""
    tensor = state.tensor
    if tensor.numel() == 0:
        return text(LEFT, y + 4, "no elements: one of the sizes is 0"), [], y + 24
    values, slots = _written(tensor.reshape(-1).tolist()), slot_numbers(tensor).reshape(-1).tolist()
    (pitch, height), kind = _cell_size(tensor), "fresh" if state.outcome == "a copy" else "elem"
    rows, columns = (1, 1, *tensor.shape)[-2:]
    room = (WIDTH - LEFT - 10) // pitch
    across, folds = min(columns, room), -(-columns // room)
    outer = [list(index) for index in product(*map(range, tensor.shape[:-2]))]
    body, places, x, number = "", [], LEFT, iter(range(tensor.numel()))
    body += _axes(tensor.dim(), x, y)
    y += 40 if outer[0] else 22
    for block in outer:
        if x > LEFT and (x + across * pitch > WIDTH - 10 or (tensor.dim() == 4 and tensor.shape[0] < 5 and block[1] == 0)):
            x, y = LEFT, y + rows * folds * height + 48
        if block:
            body += text(x, y - 22, f"[{', '.join(map(str, block))}" + ", :, :]", "small strong mono")
        body += "".join(text(x + (j + 0.5) * pitch - 1, y - 4, j, "small", text_anchor="middle") for j in range(across))
        for i, j in product(range(rows), range(columns)):
            n, cx, cy = next(number), x + j % room * pitch, y + (i * folds + j // room) * height
            if j == 0 and tensor.dim() > 1:
                body += text(x - 8, cy + height / 2 + 3, i, "small", text_anchor="end")
            index = [*block, i, j][-tensor.dim():] if tensor.dim() else []
            label = f"element {index} = {values[n]}, storage slot {slots[n]}"
            body += cell(cx, cy, pitch - 3, height - 3, values[n], kind, slots[n], label)
            places.append((index, slots[n], cx + pitch / 2 - 1.5, cy + height - 3))
        x += across * pitch + 44
    return body, places, y + rows * folds * height + 14


def _axes(dims, x, y):
    names = [f"dim {dims - 1} →", f"dim {dims - 2} ↓", *(f"dim {d} from grid to grid" for d in reversed(range(dims - 2)))]
    return text(x, y - 6, "the tensor", "strong") + text(x + 100, y - 6, ", ".join(names[:dims]) if dims else "one element, no dimensions", "small")


def _storage(state, places, y):
    """The storage as a strip of numbered slots; each slot's readers, and the arithmetic that leads there, appear under the hand."""
    tensor, body, copied = state.tensor, "", state.outcome == "a copy"
    if copied:
        old = state.before.tensor
        body += text(LEFT, y + 12, f"left behind: the storage before the copy, {old.untyped_storage().nbytes()} bytes", "small")
        strip, y, _ = _strip(old, y + 22, None)
        body, y = f'{body}<g opacity=".6">{strip}</g>', y + 20
    readers = {}
    for index, slot, *_ in places:
        readers.setdefault(slot, []).append(index)
    title = f"its storage, {tensor.untyped_storage().nbytes()} bytes" + (", newly allocated" if copied else "")
    body += text(LEFT, y + 14, title, "strong")
    if readers:
        body += text(LEFT, y + 38, "Hover over an element, or reach it with Tab: its storage slot lights up.", "small invite")
    for slot, indices in readers.items():
        body += text(LEFT, y + 38, _readout(tensor, slot, indices), f"readout k{slot}")
    strip, bottom, spots = _strip(tensor, y + 74, readers, "fresh" if copied else "slot")
    return body + strip, spots, bottom


def _links(places, spots):
    """A line from each element to its slot, shown under the hand."""
    curves = ""
    for _, slot, x, top in places:
        sx, sy = spots[slot]
        curves += f'<path class="link k{slot}" d="M{x:g} {top:g}C{x:g} {(top + sy) / 2:g} {sx:g} {(top + sy) / 2:g} {sx:g} {sy:g}"/>'
    return curves


def _readout(tensor, slot, indices):
    terms = "".join(f" + {i}×{s}" for i, s in zip(indices[0], tensor.stride()))
    others = f", the same slot as {', '.join(map(str, indices[1:3]))}" + (f" and {len(indices) - 3} more" if len(indices) > 3 else "")
    return f"{indices[0]} is at {tensor.storage_offset()}{terms} = slot {slot}" + (others if len(indices) > 1 else "")


def _strip(tensor, y, readers, kind="slot"):
    """Rows of slots, numbered, with the number of elements that read each; without `readers`, the bare values."""
    slots = tensor.untyped_storage().nbytes() // tensor.element_size()
    values = _written(torch.as_strided(tensor, (slots,), (1,), 0).tolist())
    (pitch, height), body, spots = _cell_size(tensor), "", {}
    room = (WIDTH - LEFT - 10) // pitch
    line = height + (4 if readers is None else 50)
    for slot, value in enumerate(values):
        x, top = LEFT + slot % room * pitch, y + slot // room * line
        middle = spots[slot] = (x + pitch / 2 - 1.5, top)
        if readers is None:
            body += cell(x, top, pitch - 3, height - 3, value, kind)
            continue
        times = len(readers.get(slot, ()))
        body += cell(x, top, pitch - 3, height - 3, value, kind if times else "idle", slot)
        body += text(middle[0], top + height + 13, slot, "small", text_anchor="middle")
        if times > 1:
            body += text(middle[0], top + height + 29, f"×{times}", "small strong", text_anchor="middle")
        if slot % room == 0:
            body += text(LEFT - 8, top + height + 13, "slot", "small", text_anchor="end")
    if readers:
        if len(readers) < tensor.numel():
            body += text(LEFT - 8, y + height + 29, "read", "small", text_anchor="end")
        x, top = spots[tensor.storage_offset()]
        body += text(x, top - 6, f"▾ offset {tensor.storage_offset()}", "small", text_anchor="middle")
    return body, y + -(-slots // room) * line, spots


def _ending(tensor, target, y):
    succeeds, reasons = verdict(tensor, target)
    mark, colour = ("✓", ROLES["gradients"]) if succeeds else ("✗", ROLES["wrong"])
    body = text(14, y + 8, mark, "strong", style=f"fill:{colour}")
    body += text(34, y + 8, f"The next .view({target}) {'succeeds' if succeeds else 'fails'}:", "strong")
    y += 30
    for reason in reasons:
        words, y = lines(34, y, reason)
        body += words
    return body, y


def _written(values):
    shown = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
    return [value if len(value) <= 7 else value[:6] + "…" for value in shown]


def _cell_size(tensor):
    """Distance of cells, across and down: roomy for a small storage, and wide enough for the longest value."""
    slots = tensor.untyped_storage().nbytes() // tensor.element_size()
    longest = max(map(len, _written(torch.as_strided(tensor, (slots,), (1,), 0).tolist())), default=1)
    pitch = max(35, min(52, (WIDTH - LEFT - 10) // max(1, slots)), 13 + 10 * longest)
    return pitch, 30 + (pitch - 35) // 3


def build(tensor=None):
    """The controls and the picture, wired; `explore_strides` shows them."""
    starts = {name: begin(eval(code, {"torch": torch}), code) for name, code in STARTS.items()}
    if tensor is not None:
        starts = {"your tensor": begin(tensor, "tensor"), **starts}
    wide, narrow = {"width": "270px"}, {"width": "150px"}
    ui = SimpleNamespace(
        start=widgets.Dropdown(options=list(starts), description="start with", layout=wide),
        operation=widgets.Dropdown(options=OPERATIONS, description="operation", layout=wide),
        dim=widgets.Dropdown(description="dim", layout=narrow),
        other=widgets.Dropdown(description="other dim", layout=narrow),
        words=widgets.Text(layout={"width": "230px"}),
        size=widgets.BoundedIntText(2, 0, 12, description="size", layout=narrow),
        step=widgets.BoundedIntText(1, 0, 12, description="step", layout=narrow),
        apply=widgets.Button(description="Apply", button_style="primary", layout={"width": "90px"}),
        undo=widgets.Button(description="Undo", layout={"width": "90px"}),
        reset=widgets.Button(description="Reset", layout={"width": "90px"}),
        target=widgets.Text("-1", description="next view", layout=wide),
        picture=widgets.HTML(),
        state=starts[next(iter(starts))],
    )
    shape_text = ("words",)
    uses = {
        "transpose": ("dim", "other"), "slice": ("dim", "words"), "unfold": ("dim", "size", "step"), "flip": ("dim",), "contiguous": (),
        "permute": shape_text, "expand": shape_text, "view": shape_text, "reshape": shape_text,
    }

    def redraw():
        ui.picture.value = draw(ui.state, ui.target.value)

    def offer(_=None):
        """Show the controls of the chosen operation, with values that suit the present shape."""
        used, shape = uses[ui.operation.value], tuple(ui.state.tensor.shape)
        for name in ("dim", "other", "words", "size", "step"):
            getattr(ui, name).layout.display = None if name in used else "none"
        dims = list(range(len(shape) or 1))
        for control, preferred in ((ui.dim, dims[0]), (ui.other, dims[-1])):
            if list(control.options) != dims:
                control.options = dims
                control.value = preferred
        grown = [3 if size == 1 else size for size in shape] if 1 in shape else [2, *shape]
        ui.words.description = {"slice": "slice", "permute": "dims"}.get(ui.operation.value, "shape")
        ui.words.value = {"slice": "::2", "permute": shape_code(dims[::-1]), "expand": shape_code(grown)}.get(ui.operation.value, "-1")

    def become(state):
        ui.state = state
        offer()
        redraw()

    def on_apply(_):
        state = apply(ui.state, (ui.operation.value, *(getattr(ui, name).value for name in uses[ui.operation.value])))
        if state.message:
            ui.state = state  # what was typed stays, to be repaired
            redraw()
        else:
            become(state)

    ui.apply.on_click(on_apply)
    ui.undo.on_click(lambda _: become(undo(ui.state)))
    ui.reset.on_click(lambda _: become(starts[ui.start.value]))
    ui.start.observe(lambda _: become(starts[ui.start.value]), "value")
    ui.operation.observe(offer, "value")
    ui.target.observe(lambda _: redraw(), "value")
    ui.redraw = redraw
    row = {"flex_flow": "row wrap", "max_width": "900px"}
    ui.box = widgets.VBox([
        widgets.HBox([ui.start, ui.undo, ui.reset, ui.target], layout=row),
        widgets.HBox([ui.operation, ui.dim, ui.other, ui.words, ui.size, ui.step, ui.apply], layout=row),
        ui.picture,
    ])
    become(ui.state)
    return ui


def explore_strides(tensor=None):
    """Show a tensor beside its storage, with operations to apply: one of a few to start with, or your own small one."""
    ui = build(tensor)
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
