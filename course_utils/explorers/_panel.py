"""What the explorers draw with, as SVG text: cells that light up together, hatching, wrapped words; and their controls.

Whatever shows a storage slot carries the class `k<slot>`. One CSS rule for each slot says: when something of class k7
is hovered or focused, everything of class k7 lights up. No JavaScript, and no ids, which clash where a page holds two.
"""
import textwrap

import ipywidgets as widgets
import torch

from ..engine.display import FAINT, INK, ROLES, escape, svg_document

WIDTH = 900
LEFT = 46  # room for row numbers and names of axes
GROUND = "var(--jp-layout-color0, var(--vscode-editor-background, none))"  # around text that a line may cross
STYLE = f"""
.xp text{{font-size:15px}} .xp .small{{font-size:13px;fill:{FAINT}}} .xp .strong{{font-weight:600}}
.xp .mid,.xp .cell text{{text-anchor:middle}} .xp .end{{text-anchor:end}}
.xp .good{{fill:{ROLES["gradients"]}}} .xp .bad{{fill:{ROLES["wrong"]}}}
.xp .cell{{outline:none}} .xp .cell text{{font-size:16px}} .xp rect{{stroke-width:var(--w,2)}}
.xp .elem rect{{fill:var(--f,{ROLES["view"]});fill-opacity:var(--o,.06);stroke:var(--s,{ROLES["view"]})}}
.xp .slot rect{{fill:var(--f,{ROLES["storage"]});fill-opacity:var(--o,.24);stroke:var(--s,{ROLES["storage"]})}}
.xp .fresh rect{{fill:var(--f,{ROLES["copy"]});fill-opacity:var(--o,.16);stroke:var(--s,{ROLES["copy"]})}}
.xp .fresh rect{{stroke-dasharray:2 3;stroke-width:var(--w,2.5)}}
.xp .idle rect{{fill:none;stroke:var(--s,{ROLES["free"]})}} .xp .idle text{{fill:{FAINT}}}
.xp .hatch{{stroke:{ROLES["free"]};stroke-width:1;fill:none;opacity:.5}}
.xp .elem text,.xp .slot text,.xp .fresh text{{font-weight:var(--b,500)}}
.xp .link{{visibility:var(--v,hidden);fill:none;stroke:{INK};stroke-width:1.3;stroke-dasharray:5 3;opacity:.6}}
.xp .link{{pointer-events:none}} .xp .readout{{visibility:var(--v,hidden)}} .xp .invite{{visibility:var(--i,visible)}}
.xp>text,.xp .elem text{{paint-order:stroke;stroke:{GROUND};stroke-width:var(--h,4px)}}
"""


def document(body, height, label, slots, kind="", style=""):
    """The whole picture, in which each of the `slots` lights up under the hand."""
    lit = f"{{--w:3.5;--f:{ROLES['view']};--o:.45;--s:{INK};--b:800;--v:visible;--h:0}}"
    rules = [f".xp:has(.k{slot}:hover,.k{slot}:focus) .k{slot}{lit}" for slot in slots]
    rules.append(".xp:has([class*=' k']:hover,[class*=' k']:focus){--i:hidden}")
    body = f'<g class="xp {kind}">{body}</g>'
    return svg_document(WIDTH, height, body, label, STYLE + style + "".join(rules), role="group")


def cell(x, y, width, height, text, kind, slot=None, label=None, inside=""):
    """A rectangle with a value in it; with a `label` it can be reached with Tab and a screen reader says the label."""
    lit = "" if slot is None else f" k{slot}"
    focus = f' tabindex="0" role="img" aria-label="{escape(label)}"' if label else ""
    hatch = f'<path class="hatch" d="{_hatching(x, y, width, height)}"/>' if kind == "idle" else ""
    return (
        f'<g class="cell {kind}{lit}"{focus}>{hatch}'
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>{inside}'
        f'<text class="mono" x="{x + width / 2:g}" y="{y + height / 2 + 5.5:g}">{escape(text)}</text></g>'
    )


def _hatching(x, y, width, height):
    """Diagonals drawn one by one: a <pattern> needs an id, and is not painted where its first holder is hidden."""
    lines = []
    for start in range(6, int(width + height), 8):
        a, b = max(0, start - height), min(width, start)
        lines.append(f"M{x + a:g} {y + start - a:g}L{x + b:g} {y + start - b:g}")
    return "".join(lines)


def text(x, y, words, css=""):
    return f'<text class="{css}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def lines(x, y, words, css="", width=108, step=20):
    """Text broken into lines of at most `width` characters; returns it with the y below the last one."""
    broken = textwrap.wrap(words, width) or [""]
    return "".join(text(x, y + step * i, line, css) for i, line in enumerate(broken)), y + step * len(broken)


def slot_count(tensor):
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def stored(tensor):
    """What the storage holds, slot by slot."""
    return torch.as_strided(tensor, (slot_count(tensor),), (1,), 0).tolist()


def slot_numbers(tensor):
    """For each element the slot that it is read from: the same walk over a storage that holds its own slot numbers."""
    return torch.arange(slot_count(tensor)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def choice(description, options):
    """One of several buttons. Not a list: JupyterLab takes a focused list's keys and changes cells."""
    style, layout = {"button_width": "auto"}, {"width": "auto"}
    return widgets.ToggleButtons(options=list(options), description=description, style=style, layout=layout)


def number(description, *value_min_max):
    return widgets.BoundedIntText(*value_min_max, description=description, layout={"width": "140px"})


def button(description, style=""):
    return widgets.Button(description=description, button_style=style, layout={"width": "110px"})


def panel(choices, controls, picture):
    row = widgets.HBox(controls, layout={"flex_flow": "row wrap"})
    return widgets.VBox([*choices, row, picture], layout={"max_width": f"{WIDTH}px"})
