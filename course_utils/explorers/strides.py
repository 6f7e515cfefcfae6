"""explore_strides(): a tensor beside its storage, and what each operation does to both."""
from dataclasses import dataclass, replace
from itertools import pairwise, product
from types import SimpleNamespace

import ipywidgets as widgets
import torch

from ..engine.display import show
from ._panel import (
    LEFT,
    WIDTH,
    button,
    cell,
    choice,
    document,
    lines,
    number,
    panel,
    slot_count,
    slot_numbers,
    stored,
    text,
)

STARTS = {
    "(3, 4)": "torch.arange(12).view(3, 4)",
    "(2, 3)": "torch.arange(6).view(2, 3)",
    "(6,)": "torch.arange(6)",
    "(4, 1)": "torch.arange(4).view(4, 1)",
    "(2, 3, 4)": "torch.arange(24).view(2, 3, 4)",
    "(2, 2, 3, 3)": "torch.arange(36).view(2, 2, 3, 3)",
}
USES = {  # the controls that give each operation its arguments
    "transpose": ("dim", "other"),
    "permute": ("words",),
    "slice": ("dim", "words"),
    "expand": ("words",),
    "unfold": ("dim", "size", "step"),
    "view": ("words",),
    "reshape": ("words",),
    "contiguous": (),
    "flip": ("dim",),
}


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
    if not isinstance(tensor, torch.Tensor):
        return f"it is of type {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return "it has no storage whose slots could be shown"
    shape, slots = tuple(tensor.shape), slot_count(tensor)
    if len(shape) <= 4 and tensor.numel() <= 72 and slots <= 72 and (1, 1, *shape)[-2] <= 24:
        return None
    room = "the picture has room for 4 dimensions, 72 elements, 24 rows and 72 storage slots"
    return f"{room}; this has shape {shape} and {slots} slots"


def moved(old, new):
    return old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()


def apply(state, step):
    """The state after a step such as ("transpose", 0, 1) or ("view", "4, 3"); what fails leaves a message."""
    name, *given = step
    try:
        if name == "slice":
            dim, index = given[0], _slice(given[1])
            dim = dim if dim >= 0 else range(state.tensor.dim())[dim]
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
        # works out what -1 stands for, and fails where the number of elements is wrong
        wanted = torch.empty(tensor.shape, device="meta").view(shape).shape
    except Exception as error:
        return False, [str(error).splitlines()[0]]
    try:
        return True, [f"shape {tuple(wanted)} with strides {tensor.view(shape).stride()}, nothing is copied"]
    except RuntimeError:
        return False, seams(tensor, wanted)


def seams(tensor, wanted):
    """Where two neighbouring dimensions do not continue each other and the wanted shape runs across.

    Dimensions of size 1 do not count. The shape keeps to a seam where its last sizes multiply to what follows it.
    """
    kept = {wanted[i:].numel() for i in range(len(wanted) + 1)}
    found = []
    for a, b in pairwise(d for d in range(tensor.dim()) if tensor.shape[d] != 1):
        stride, size, inner = tensor.stride(a), tensor.shape[b], tensor.stride(b)
        if stride != size * inner and tensor.shape[b:].numel() not in kept:
            product = f"shape[{b}] × stride[{b}] = {size} × {inner} = {size * inner}"
            found.append(f"dimensions {a} and {b} cannot be merged: stride[{a}] = {stride}, but {product}")
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
        f"read from storage slots: {slot_numbers(tensor).tolist()} of {slot_count(tensor)}",
        f"would .view({target}) succeed? {'yes' if succeeds else 'no'}: {'; '.join(reasons)}",
    ])


def facts(state):
    tensor = state.tensor
    return (
        ("shape", tuple(tensor.shape)),
        ("stride", tensor.stride()),
        ("storage_offset", tensor.storage_offset()),
        ("is_contiguous", tensor.is_contiguous()),
        ("last operation gave", state.outcome),
        ("bytes copied", f"{state.copied}, in all {state.total}"),
    )


def draw(state, target="-1"):
    """The picture as SVG text."""
    tensor = state.tensor
    body, y = lines(14, 26, state.code, "mono strong", width=94)
    if state.message:
        mark = text(14, y + 4, "✗", "strong bad")
        words, y = lines(34, y + 4, state.message, width=104)
        body += mark + words
    for x, (name, value) in zip((14, 190, 366, 490, 610, 754), facts(state), strict=True):
        body += text(x, y + 12, name, "small") + text(x, y + 33, value, "mono" if x < 600 else "strong")
    grid, places, y = _elements(state, y + 76)
    strip, spots, y = _storage(state, places, y + 26)
    ending, y = _ending(tensor, target, y + 22)
    body = _links(places, spots) + body + grid + strip + ending
    return document(body, y, describe(state, target), sorted({slot for _, slot, *_ in places}))


def _elements(state, y):
    """The elements as grids of the last two dimensions, from left to right; and (index, slot, x, y) of each."""
    tensor = state.tensor
    if tensor.numel() == 0:
        return text(LEFT, y + 4, "no elements: one of the sizes is 0"), [], y + 24
    values, slots = _written(tensor.reshape(-1).tolist()), slot_numbers(tensor).reshape(-1).tolist()
    (pitch, height), kind = _cell_size(tensor), "fresh" if state.outcome == "a copy" else "elem"
    rows, columns = (1, 1, *tensor.shape)[-2:]
    room = (WIDTH - LEFT - 10) // pitch
    across, folds = min(columns, room), -(-columns // room)
    outer = [list(index) for index in product(*map(range, tensor.shape[:-2]))]
    body, places, x, count = _axes(tensor.dim(), LEFT, y), [], LEFT, iter(range(tensor.numel()))
    y += 40 if outer[0] else 22
    for block in outer:
        new_row = tensor.dim() == 4 and tensor.shape[0] < 5 and block[1] == 0
        if x > LEFT and (new_row or x + across * pitch > WIDTH - 10):
            x, y = LEFT, y + rows * folds * height + 48
        if block:
            body += text(x, y - 22, f"[{', '.join(map(str, block))}, :, :]", "small strong mono")
        body += "".join(text(x + (j + 0.5) * pitch - 1, y - 4, j, "small mid") for j in range(across))
        for i, j in product(range(rows), range(columns)):
            n, cx, cy = next(count), x + j % room * pitch, y + (i * folds + j // room) * height
            if j == 0 and tensor.dim() > 1:
                body += text(x - 8, cy + height / 2 + 3, i, "small end")
            index = [*block, i, j][-tensor.dim() :] if tensor.dim() else []
            label = f"element {index} = {values[n]}, storage slot {slots[n]}"
            body += cell(cx, cy, pitch - 3, height - 3, values[n], kind, slots[n], label)
            places.append((index, slots[n], cx + pitch / 2 - 1.5, cy + height - 3))
        x += across * pitch + 44
    return body, places, y + rows * folds * height + 14


def _axes(dims, x, y):
    outer = [f"dim {d} from grid to grid" for d in reversed(range(dims - 2))]
    names = [f"dim {dims - 1} →", f"dim {dims - 2} ↓", *outer][:dims] or ["one element, no dimensions"]
    return text(x, y - 6, "the tensor", "strong") + text(x + 100, y - 6, ", ".join(names), "small")


def _storage(state, places, y):
    """The storage as a strip of numbered slots; the arithmetic that leads to a slot appears under the hand."""
    tensor, body, copied = state.tensor, "", state.outcome == "a copy"
    if copied:
        old = state.before.tensor
        words = f"left behind: the storage before the copy, {old.untyped_storage().nbytes()} bytes"
        body += text(LEFT, y + 12, words, "small")
        strip, y, _ = _strip(old, y + 22, None)
        body, y = f'{body}<g opacity=".6">{strip}</g>', y + 20
    readers = {}
    for index, slot, *_ in places:
        readers.setdefault(slot, []).append(index)
    title = f"its storage, {tensor.untyped_storage().nbytes()} bytes" + (", newly allocated" if copied else "")
    body += text(LEFT, y + 14, title, "strong")
    if readers:
        words = "Hover over an element, or reach it with Tab: its storage slot lights up."
        body += text(LEFT, y + 38, words, "small invite")
    for slot, indices in readers.items():
        body += text(LEFT, y + 38, _readout(tensor, slot, indices), f"readout k{slot}")
    strip, bottom, spots = _strip(tensor, y + 74, readers, "fresh" if copied else "slot")
    return body + strip, spots, bottom


def _links(places, spots):
    """A line from each element to its slot, shown under the hand."""
    curves = ""
    for _, slot, x, top in places:
        sx, sy = spots[slot]
        curve = f"M{x:g} {top:g}C{x:g} {(top + sy) / 2:g} {sx:g} {(top + sy) / 2:g} {sx:g} {sy:g}"
        curves += f'<path class="link k{slot}" d="{curve}"/>'
    return curves


def _readout(tensor, slot, indices):
    terms = "".join(f" + {i}×{s}" for i, s in zip(indices[0], tensor.stride(), strict=True))
    others = f", the same slot as {indices[1]}" if len(indices) > 1 else ""
    more = f" and {len(indices) - 2} more" if len(indices) > 2 else ""
    return f"{indices[0]} is at {tensor.storage_offset()}{terms} = slot {slot}{others}{more}"


def _strip(tensor, y, readers, kind="slot"):
    """Rows of slots, numbered, with the number of elements that read each; without `readers`, the bare values."""
    values = _written(stored(tensor))
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
        body += text(middle[0], top + height + 13, slot, "small mid")
        if times > 1:
            body += text(middle[0], top + height + 29, f"×{times}", "small strong mid")
        if slot % room == 0:
            body += text(LEFT - 8, top + height + 13, "slot", "small end")
    if readers:
        if len(readers) < tensor.numel():
            body += text(LEFT - 8, y + height + 29, "read", "small end")
        x, top = spots[tensor.storage_offset()]
        body += text(x, top - 6, f"▾ offset {tensor.storage_offset()}", "small mid")
    return body, y + -(-len(values) // room) * line, spots


def _ending(tensor, target, y):
    succeeds, reasons = verdict(tensor, target)
    body = text(14, y + 8, "✓", "strong good") if succeeds else text(14, y + 8, "✗", "strong bad")
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
    longest = max(map(len, _written(stored(tensor))), default=1)
    pitch = max(35, min(52, (WIDTH - LEFT - 10) // max(1, slot_count(tensor))), 13 + 10 * longest)
    return pitch, 30 + (pitch - 35) // 3


def build(tensor=None):
    """The controls and the picture, wired; `explore_strides` shows them."""
    starts = {name: begin(eval(code, {"torch": torch}), code) for name, code in STARTS.items()}
    if tensor is not None:
        starts = {"your tensor": begin(tensor, "tensor"), **starts}
    ui = SimpleNamespace(
        start=choice("start with", starts),
        operation=choice("operation", USES),
        dim=number("dim"),
        other=number("other dim"),
        words=widgets.Text(layout={"width": "230px"}),
        size=number("size", 2, 0, 12),
        step=number("step", 1, 0, 12),
        apply=button("Apply", "primary"),
        undo=button("Undo"),
        reset=button("Reset"),
        target=widgets.Text("-1", description="next view", layout={"width": "230px"}),
        picture=widgets.HTML(),
        state=next(iter(starts.values())),
    )

    def redraw():
        ui.picture.value = draw(ui.state, ui.target.value)

    def offer(_=None):
        """Show the controls of the chosen operation, with values that suit the present shape."""
        used, shape = USES[ui.operation.value], tuple(ui.state.tensor.shape)
        for name in ("dim", "other", "words", "size", "step"):
            getattr(ui, name).layout.display = None if name in used else "none"
        dims = list(range(len(shape) or 1))
        for control, preferred in ((ui.dim, dims[0]), (ui.other, dims[-1])):
            if control.max != len(dims):  # which is one too many: torch says so
                control.min, control.max, control.value = -len(dims), len(dims), preferred
        grown = [3 if size == 1 else size for size in shape] if 1 in shape else [2, *shape]
        suggestions = {"slice": "::2", "permute": shape_code(dims[::-1]), "expand": shape_code(grown)}
        ui.words.description = {"slice": "slice", "permute": "dims"}.get(ui.operation.value, "shape")
        ui.words.value = suggestions.get(ui.operation.value, "-1")

    def become(state):
        ui.state = state
        offer()
        redraw()

    def on_apply(_):
        name = ui.operation.value
        state = apply(ui.state, (name, *(getattr(ui, control).value for control in USES[name])))
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
    arguments = [ui.dim, ui.other, ui.words, ui.size, ui.step]
    ui.box = panel([ui.start, ui.operation], [*arguments, ui.apply, ui.undo, ui.reset, ui.target], ui.picture)
    become(ui.state)
    return ui


def explore_strides(tensor=None):
    """Show a tensor beside its storage, with operations to apply: one of a few to start with, or your own small one."""
    ui = build(tensor)
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
