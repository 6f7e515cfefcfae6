"""explore_accumulation(): what several calls of backward(), zero_grad() and step() leave in the .grad of one leaf."""
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ipywidgets as widgets
import torch

from ..engine.display import FAINT, INK, ROLES, show
from ._panel import button, cell, choice, document, lines, panel, text

START = [2.0, -1.0, 0.5]
LOSSES = {
    "A": ("A = ((w - 1) ** 2).sum()", lambda w: ((w - 1) ** 2).sum()),
    "B": ("B = (w * torch.tensor([1., 3., -2.])).sum()", lambda w: (w * torch.tensor([1.0, 3.0, -2.0])).sum()),
}
RATE = 0.1
OPTIMIZERS = {
    "SGD": ("torch.optim.SGD([w], lr=0.1)", lambda w: torch.optim.SGD([w], lr=RATE)),
    "SGD with momentum": (
        "torch.optim.SGD([w], lr=0.1, momentum=0.9)", lambda w: torch.optim.SGD([w], lr=RATE, momentum=0.9),
    ),
    "SGD with weight decay": (
        "torch.optim.SGD([w], lr=0.1, weight_decay=0.1)", lambda w: torch.optim.SGD([w], lr=RATE, weight_decay=0.1),
    ),
    "Adam": ("torch.optim.Adam([w], lr=0.1)", lambda w: torch.optim.Adam([w], lr=RATE)),
}
ACTIONS = {  # what a button does, as the code that it stands for
    "A": "A.backward()",
    "B": "B.backward()",
    "both": "(A + B).backward()",
    "clear": "optimizer.zero_grad()",
    "zeros": "optimizer.zero_grad(set_to_none=False)",
    "step": "optimizer.step()",
    "freeze": "w.requires_grad_(False)",
}
SHOWN, COLUMNS = 8, 6  # the latest lines of the history, and the latest contributions beside each other
TOP, TALL, WIDE = 128, 160, 295  # where the bars begin, how high they are, how wide one entry's are
LEGEND = "dashed: what each backward() brought, from the sum before it to the sum after it · solid: what .grad holds"
HISTORY = (14, 44, 356, 540, 722)  # where the columns of the history begin
STYLE = f"""
.xp.ac text{{font-size:14px}} .xp.ac .small{{font-size:13px}}
.ac .zero{{stroke:{INK};stroke-width:1.2;opacity:.7}} .ac .level{{stroke:{FAINT};stroke-width:1;stroke-dasharray:2 3}}
.ac .part{{fill:{ROLES["gradients"]};fill-opacity:.12;stroke:{ROLES["gradients"]};stroke-dasharray:5 3}}
.ac .total{{fill:{ROLES["gradients"]};fill-opacity:.6;stroke:{ROLES["gradients"]}}}
.ac .none{{fill:none;stroke:{ROLES["free"]}}} .ac .stale{{stroke:{ROLES["wrong"]}}}
"""


@dataclass(frozen=True)
class State:
    optimizer: str = "SGD"
    actions: tuple = ()


@dataclass(frozen=True)
class Event:
    """One action and what it did, read from the tensors; gradients are lists of numbers, or None."""

    action: str
    grad: list | None  # after it
    w: list
    outcome: str  # in a few words
    sentence: str
    parts: tuple  # what .grad is the sum of: (action, its gradient, was w moved since?)


def play(state):
    """Do all the actions with a real leaf and a real optimizer, from the start; returns an Event for each."""
    w = torch.tensor(START, requires_grad=True)
    optimizer = OPTIMIZERS[state.optimizer][1](w)
    done, parts = [], ()
    for action in state.actions:
        grad, value = numbers(w.grad), w.tolist()
        try:
            act(action, w, optimizer)
        except RuntimeError as error:
            said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            done.append(Event(action, grad, value, "refused", said, parts))
            continue
        after, moved = numbers(w.grad), w.tolist() != value
        if action in ("clear", "zeros"):
            parts = ()
        elif action == "step":
            parts = tuple((name, values, stale or moved) for name, values, stale in parts)
        elif action != "freeze":
            came = [b - a for a, b in zip(grad or [0.0] * len(value), after, strict=True)]
            parts = (*parts, (action, came, False))
        before = done[-1].parts if done else ()
        outcome, sentence = say(action, grad, moved, w.requires_grad, any(stale for *_, stale in before), state.optimizer)
        done.append(Event(action, after, w.tolist(), outcome, sentence, parts))
    return done


def act(action, w, optimizer):
    losses = {name: function for name, (_, function) in LOSSES.items()}
    if action == "both":
        (losses["A"](w) + losses["B"](w)).backward()
    elif action in losses:
        losses[action](w).backward()
    elif action == "freeze":
        w.requires_grad_(False)
    elif action == "step":
        optimizer.step()
    else:
        optimizer.zero_grad(set_to_none=action == "clear")


def numbers(gradient):
    return None if gradient is None else gradient.tolist()


def say(action, grad, moved, recording, stale, optimizer):
    """(a few words, a sentence) on an action, from what was there before it and whether w moved."""
    if action == "clear":
        return ".grad is None", "zero_grad() lets go of the tensor: .grad is None, and step() will pass w by."
    if action == "zeros":
        if grad is None:
            return ".grad is None", "There was no .grad to fill with zeros, and none is made."
        return "zeros", ".grad is still there and holds zeros: for step(), w has a gradient."
    if action == "freeze":
        return "no recording", "From here on w records nothing; what is in .grad, and in the optimizer, stays."
    if action != "step":
        if grad is None:
            return "made .grad", ".grad was None: the gradient that came is what it now holds."
        return "added to it", "The gradient that came was added to what .grad held."
    if grad is None:
        return "passed by", "w has no gradient: step() passes it by, and w does not move."
    frozen = "" if recording else ", though it is frozen"
    if not moved:
        return "w stays", "The gradient is zero, and this optimizer has nothing else that moves w."
    if not any(grad):
        return "w moved", f"w moved{frozen}, though its gradient is zero: {optimizer} moves what has a gradient, zero or not."
    if stale:
        return "w moved", f"w moved{frozen}, by a .grad that holds gradients from where w was before."
    return "w moved", f"w moved{frozen}; .grad stays as it was until something clears it."


def describe(state):
    """The picture in words."""
    return _told(state, play(state))


def _told(state, events):
    rows = [f"{n}  {ACTIONS[e.action]}: {e.outcome}; .grad {written(e.grad)}, w {written(e.w)}" for n, e in enumerate(events, 1)]
    return "\n".join([*code(state), *rows, *summary(state, events)])


def code(state):
    return [
        f"w = torch.tensor({START}, requires_grad=True)",
        f"optimizer = {OPTIMIZERS[state.optimizer][0]}",
        *(source for source, _ in LOSSES.values()),
    ]


def summary(state, events):
    """What .grad is at the end, and what the last action did, as sentences."""
    if not events:
        return [".grad is None: no backward() has run yet. Press the buttons in any order."]
    last = events[-1]
    if last.grad is None:
        return [last.sentence, "So .grad is None."]
    if not last.parts:
        return [last.sentence, "So .grad holds zeros."]
    several = f"{len(last.parts)} calls of backward()" if len(last.parts) > 1 else "one call of backward()"
    stale = " ✗: from an earlier w." if any(stale for *_, stale in last.parts) else ""
    return [last.sentence, f"So .grad holds the sum of {several} since it was last cleared.{stale}"]


def written(values):
    return "None" if values is None else " ".join(f"{value:.3g}" for value in values)


def draw(state):
    """The picture as SVG text."""
    events = play(state)
    body = "".join(text(14, 24 + 20 * n, line, "mono") for n, line in enumerate(code(state)))
    grad, w, parts = (events[-1].grad, events[-1].w, events[-1].parts) if events else (None, START, ())
    scale = _scale(parts, grad)
    for k in range(len(START)):
        body += _entry(k, 14 + k * WIDE, TOP, scale, grad, w, parts)
    y = TOP + TALL + 96
    body += text(14, y, LEGEND, "small")
    for sentence in summary(state, events):
        words, y = lines(14, y + 26, sentence)
        body, y = body + words, y - 22
    y += 36
    if events:
        heads = ("", "the latest calls", ".grad after it", "w after it", "what happened")
        body += "".join(text(x, y, head, "small") for x, head in zip(HISTORY, heads, strict=True))
    for n, event in list(enumerate(events, 1))[-SHOWN:]:
        y += 22
        row = (n, ACTIONS[event.action], written(event.grad), written(event.w))
        body += "".join(text(x, y, value, "mono small") for x, value in zip(HISTORY, row, strict=False))
        refused = event.outcome == "refused"
        body += text(HISTORY[-1], y, f"{'✗ ' if refused else ''}{event.outcome}", "bad strong" if refused else "")
    return document(body, y + 14, _told(state, events), (), "ac", STYLE)


def _levels(parts, k):
    """Where the sum of entry k stands before each part and after the last one."""
    return [sum(values[k] for _, values, _ in parts[:n]) for n in range(len(parts) + 1)]


def _scale(parts, grad):
    """(lowest, highest) value that the bars of any entry come to, with zero between them."""
    levels = [level for k in range(len(START)) for level in _levels(parts, k)] + (grad or [])
    return min([-1.0, *levels]), max([1.0, *levels])


def _entry(k, x, y, scale, grad, w, parts):
    """One entry of .grad: what each backward() brought, as steps from zero, and beside them what .grad holds."""
    low, high = scale
    place = lambda value: y + 30 + TALL * (high - value) / (high - low)  # noqa: E731
    pitch = (WIDE - 90) / COLUMNS
    body = text(x, y, f"w[{k}] = {w[k]:.3g}", "mono strong")
    left = x + WIDE - 84  # of what .grad holds
    body += f'<path class="zero" d="M{x} {place(0):.1f}H{left if grad is None else x + WIDE - 26}"/>'
    levels, first = _levels(parts, k), max(0, len(parts) - COLUMNS)
    for n in range(first, len(parts)):
        name, _, stale = parts[n]
        at, a, b = x + (n - first) * pitch, place(levels[n]), place(levels[n + 1])
        body += f'<rect class="part{" stale" if stale else ""}" x="{at + 2:.1f}" y="{min(a, b):.1f}" '
        body += f'width="{pitch - 4:.1f}" height="{max(1, abs(a - b)):.1f}"/>'
        body += f'<path class="level" d="M{at + pitch - 2:.1f} {b:.1f}h6"/>'
        label = ("…" if n == first > 0 else "") + {"both": "A+B"}.get(name, name) + ("✗" if stale else "")
        body += text(at + pitch / 2, y + TALL + 68, label, "small mid")
    middle = left + 28
    if grad is None:
        body += cell(left, place(0) - 12, 56, 24, "None", "idle")
    else:
        top, value = min(place(0), place(grad[k])), grad[k]
        body += f'<rect class="total" x="{left}" y="{top:.1f}" width="56" height="{max(1.5, abs(place(0) - place(value))):.1f}"/>'
        body += text(middle, place(value) + (18 if value < 0 else -6), f"{value:.3g}", "mono strong mid")
    return body + text(middle, y + TALL + 68, f".grad[{k}]", "small mid mono")


def build():
    """The controls and the picture, wired; `explore_accumulation` shows them."""
    ui = SimpleNamespace(
        optimizer=choice("optimizer", OPTIMIZERS),
        actions={name: _wide(source) for name, source in ACTIONS.items()},
        undo=button("Undo"),
        reset=button("Reset"),
        picture=widgets.HTML(),
        state=State(),
    )

    def redraw():
        ui.picture.value = draw(ui.state)

    def become(**changes):
        ui.state = replace(ui.state, **changes)
        redraw()

    for name, control in ui.actions.items():
        control.on_click(lambda _, name=name: become(actions=(*ui.state.actions, name)))
    ui.undo.on_click(lambda _: become(actions=ui.state.actions[:-1]))
    ui.reset.on_click(lambda _: become(actions=()))
    ui.optimizer.observe(lambda change: become(optimizer=change["new"]), "value")
    ui.redraw = redraw
    ui.box = panel([ui.optimizer], [*ui.actions.values(), ui.undo, ui.reset], ui.picture)
    redraw()
    return ui


def _wide(description):
    return widgets.Button(description=description, layout={"width": "auto"})


def explore_accumulation():
    """Call backward(), zero_grad() and step() in any order on a leaf of three numbers, and see what .grad holds."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
