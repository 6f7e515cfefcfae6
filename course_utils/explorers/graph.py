"""explore_graph(): the graph that autograd records for a small program, run backward node by node."""
from dataclasses import replace
from types import SimpleNamespace

import ipywidgets as widgets

from ..engine.display import FAINT, INK, ROLES, escape, show
from ._layers import layered
from ._panel import WIDTH, button, cell, choice, document, lines, panel, text
from ._stepping import (
    EVERYTHING,
    NOTHING,
    PROGRAMS,
    STATUS,
    State,
    code,
    node_of,
    node_words,
    run,
    saved_words,
    sentences,
    status,
    told,
    used_names,
    written,
)

BOX, GAP, LINE, FALL = 208, 22, 28, 40  # width of a node, room beside it, height of a line in it, room below it for edges
LEGEND = "numbers: order of running · ↓ the gradient that came · magenta: saved for backward · hatched: freed, or None"
STYLE = f"""
.xp.ag text{{font-size:14px}} .xp.ag .cell text{{font-size:13px}} .xp.ag .code{{font-size:15px}}
.xp.ag .name,.xp.ag .small{{font-size:13px}} .ag .name{{font-weight:600}}
.ag .frame{{fill:none;stroke:{FAINT};stroke-width:1.2}}
.ag .done .frame{{stroke:{ROLES["gradients"]};stroke-width:2.5;fill:{ROLES["gradients"]};fill-opacity:.1}}
.ag .next .frame{{stroke:{INK};stroke-width:3.5}}
.ag .refused .frame{{stroke:{ROLES["wrong"]};stroke-width:3.5;fill:{ROLES["wrong"]};fill-opacity:.1}}
.ag .cut .frame{{stroke-dasharray:6 4}} .ag .cut .quiet{{opacity:.75}}
.ag .saved rect{{fill:var(--f,{ROLES["activations"]});fill-opacity:var(--o,.16);stroke:var(--s,{ROLES["activations"]})}}
.ag .changed rect{{fill:{ROLES["wrong"]};fill-opacity:.2;stroke:{ROLES["wrong"]};stroke-width:3}}
.ag .grad rect{{fill:{ROLES["gradients"]};fill-opacity:.22;stroke:{ROLES["gradients"]}}}
.ag .badge{{fill:{ROLES["gradients"]}}} .xp.ag .count{{fill:#fff;font-weight:600;text-anchor:middle}}
.ag .edge{{fill:none;stroke:{FAINT};stroke-width:1.3}} .ag .head{{fill:{FAINT}}}
.ag .passed.edge{{stroke:{ROLES["gradients"]};stroke-width:3}} .ag .passed.head{{fill:{ROLES["gradients"]}}}
.ag .broken.edge{{stroke:{ROLES["wrong"]};stroke-dasharray:3 5;stroke-width:2}}
"""


def describe(state):
    """The picture in words."""
    try:
        return told(state, run(state))
    except ValueError as error:
        return f"{_typed(state)}\n✗ {error}"


def _typed(state):
    """The program as typed; what cannot be shown, such as a control character, is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in state.program)


def draw(state):
    """The picture as SVG text."""
    try:
        result = run(state)
        rows, paths = _rows(result)
        contents, sizes = _sizes(result, rows)
    except ValueError as error:
        return _refusal(state, error)
    words, spots, y = _places(state, result, rows, sizes)
    body = words + _edges(result, paths, spots) + text(14, y + 26, LEGEND, "small")
    for item, content in contents.items():
        body += _frame(*spots[item], *content)
    return document(body, y + 38, told(state, result), _slots(result).values(), "ag", STYLE)


def _sizes(result, rows):
    """What stands in each box, and (width, height) of every item: nothing but an edge's width where an edge passes by."""
    slots = _slots(result)
    contents = {item: _content(result, slots, item) for row in rows for item in row if isinstance(item, int)}
    sizes = {item: (BOX, 40 + 20 * len(content[4]) + LINE * len(content[5])) for item, content in contents.items()}
    for row in rows:
        sizes |= {item: (8, max(sizes.get(other, (0, 0))[1] for other in row)) for item in row if item not in contents}
        if sum(sizes[item][0] + GAP for item in row) - GAP > WIDTH:
            raise ValueError("the picture has no room for so many nodes beside each other")
    return contents, sizes


def _places(state, result, rows, sizes):
    """The program and the sentences; (middle, top, height) of each item; and where all this ends.

    The words stand to the left of the graph where they do not meet its boxes, and above it otherwise.
    """
    widths = [sum(sizes[item][0] + GAP for item in row) - GAP for row in rows]
    heights = [max(sizes[item][1] for item in row) for row in rows]
    tops = [10 + sum(heights[:n]) + FALL * n for n in range(len(rows))]
    middle = max(WIDTH / 2, WIDTH - 8 - max(widths) / 2)
    room = middle - max(widths[:-1] or widths) / 2 - 16  # all rows but the last, which is the widest as a rule
    words, end = _words(state, result, max(room, 300))
    if room < 300 or end > tops[-1] and middle - widths[-1] / 2 < room or 24 + 9.1 * max(map(len, code(state, result))) > room:
        words, end = _words(state, result, WIDTH)
        tops = [top + end for top in tops]
    spots = {}
    for row, top, width in zip(rows, tops, widths, strict=True):
        x = middle - width / 2
        for item in row:
            spots[item] = (x + sizes[item][0] / 2, top, sizes[item][1])
            x += sizes[item][0] + GAP
    return words, spots, max(end, tops[-1] + heights[-1])


def _words(state, result, room):
    """The program and under it the sentences, in a column so many pixels wide; and where it ends."""
    body, y = "", 28
    for line in code(state, result):
        words, y = lines(14, y, line, "mono code", width=92)
        body += words
    y += 10
    for mark, sentence in sentences(state, result):
        left = 34 if mark else 14
        words, below = lines(left, y, sentence, width=int((room - left) / 8.2))
        body += words + (text(14, y, mark, "strong bad") if mark else "")
        y = below + 4
    return body, y - 14


def _refusal(state, error):
    program, y = lines(14, 28, _typed(state), "mono code", width=90)
    words, below = lines(34, y + 8, str(error), width=104)
    return document(program + text(14, y + 8, "✗", "strong bad") + words, below, describe(state), (), "ag", STYLE)


def _rows(result):
    """Rows of node numbers, with a further number for each leaf that has no node, and the path of each edge."""
    edges = [(i, j) for i, node in enumerate(result.nodes) for j in node.inputs if j is not None] + result.cuts
    ends = [i for i, node in enumerate(result.nodes) if node.variable is not None]
    count = len(result.nodes) + len(_lone(result))
    return layered(count, edges, [*ends, *range(len(result.nodes), count)])


def _lone(result):
    return [name for name in result.leaves if node_of(result, name) is None]


def _slots(result):
    """A number for each storage, by its address: what has the same number lights up together."""
    shown = [result.names[name] for name in result.leaves] + [t for node in result.nodes for _, t in node.saved]
    addresses = dict.fromkeys(tensor.untyped_storage().data_ptr() for tensor in shown)
    return {address: number for number, address in enumerate(addresses)}


def _content(result, slots, i):
    """What stands in a box: status, mark, name, whose it is, what came to it, cells, and all of it in words."""
    if i >= len(result.nodes):
        leaf = _lone(result)[i - len(result.nodes)]
        wants = f"requires_grad={result.names[leaf].requires_grad}"
        return "cut", "", "no node", leaf, [wants], _leaf_cells(result, slots, leaf), f"{leaf}: no node, {wants}"
    node, kind = result.nodes[i], status(result, i)
    leaf = next((name for name in result.leaves if result.names[name] is node.variable), None)
    owner = leaf or next((name for name, tensor in result.names.items() if tensor.grad_fn is node.fn), "")
    mark = result.order.index(i) + 1 if kind == "done" else {"next": "▸", "refused": "✗"}.get(kind, "")
    got = [f"↓ {line}" for line in written(result.received[i])] if i in result.received else [STATUS[kind]]
    fate, cross = ("idle", "") if i in result.freed else ("changed", "✗ ") if i in result.changed else ("saved", "")
    cells = [(cross + saved_words(result, *item), fate, slots[item[1].untyped_storage().data_ptr()]) for item in node.saved]
    cells += _leaf_cells(result, slots, leaf) if leaf else []
    return kind, mark, node.name, owner, got, cells, node_words(result, i)


def _leaf_cells(result, slots, name):
    leaf = result.names[name]
    values = [(f"{name} {line}", "slot", slots[leaf.untyped_storage().data_ptr()]) for line in written(leaf)]
    if leaf.grad is None:
        return [*values, (".grad None", "idle", None)]
    return [*values, *((f".grad {line}", "grad", None) for line in written(leaf.grad))]


def _frame(middle, y, height, kind, mark, name, owner, got, cells, words):
    """A box with its head, a line for each row of the gradient that came, and its cells."""
    x, line = middle - BOX / 2, y + 45
    left, room = x + (34 if mark else 10), BOX - 20 - 8.2 * len(name) - (24 if mark else 0)
    body = f'<rect class="frame" x="{x:g}" y="{y:g}" width="{BOX}" height="{height}" rx="6"/>'
    if kind == "done":
        body += f'<circle class="badge" cx="{x + 18:g}" cy="{y + 18:g}" r="11"/>' + text(x + 18, y + 23, mark, "count")
    elif mark:
        body += text(x + 10, y + 23, mark, "strong bad" if kind == "refused" else "strong")
    body += text(left, y + 23, name, "name") + text(x + BOX - 10, y + 23, owner[: int(room / 8)], "mono strong end")
    for words_ in got:
        body += text(x + 10, line, words_, "mono small" if words_[0] == "↓" else "small")
        line += 20
    for words_, fate, slot in cells:
        body += cell(x + 8, line - 9, BOX - 16, LINE - 4, words_, fate, slot, words_)
        line += LINE
    return f'<g class="{kind}" role="group" aria-label="{escape(words)}">{body}</g>'


def _edges(result, paths, spots):
    """Every edge as a curve through its places: green and thick where a gradient went, broken where detach cut it."""
    whole, drawn = len(paths) - len(result.cuts), []
    for number, path in enumerate(paths):
        starts, ends = _port(paths, spots, number, 0, 1), _port(paths, spots, number, -1, -2)
        (_, top, height), (_, bottom, _) = spots[path[0]], spots[path[-1]]
        d, y = f"M{starts:.1f} {top + height:g}", top + height
        for item in path[1:-1]:
            x, below, tall = spots[item]
            d += _curve(starts, y, x, below) + f"V{below + tall:g}"
            starts, y = x, below + tall
        d += _curve(starts, y, ends, bottom - 7)
        kind = "broken" if number >= whole else "passed" if path[0] in result.order else ""
        drawn.append((kind, d, ends, bottom))
    body = ""
    for kind, d, x, y in sorted(drawn):  # those that carried a gradient come last, on top
        body += f'<path class="edge {kind}" d="{d}"/>'
        if kind == "broken":
            body += text(x + 8, y - 14, "✗ detach", "small strong bad")
        else:
            body += f'<path class="head {kind}" d="M{x:.1f} {y:g}l-5 -10h10z"/>'
    return body


def _curve(x, y, to, below):
    middle = (y + below) / 2
    return f"C{x:.1f} {middle:g} {to:.1f} {middle:g} {to:.1f} {below:g}"


def _port(paths, spots, number, end, beside):
    """Where on its box an edge begins (end 0) or ends (-1): the edges of a box stand in the order of where they go."""
    item = paths[number][end]
    others = [k for k, path in enumerate(paths) if path[end] == item]
    others.sort(key=lambda k: spots[paths[k][beside]][0])
    return spots[item][0] + (others.index(number) - (len(others) - 1) / 2) * min(40, (BOX - 20) / len(others))


# ---- the controls


def build(program=None):
    """The controls and the picture, wired; `explore_graph` shows them."""
    ui = SimpleNamespace(
        start=choice("start with", PROGRAMS),
        detach=choice("detach", [NOTHING]),
        no_grad=choice("no_grad for", [NOTHING]),
        write=choice("write into", [NOTHING]),
        program=widgets.Text(
            next(iter(PROGRAMS.values())) if program is None else program, description="program", layout={"width": "580px"}
        ),
        inputs=_toggle("x.requires_grad"),
        retain=_toggle("retain_graph"),
        step=button("Step", "primary"),
        whole=button("Backward"),
        back=button("Back"),
        reset=button("Reset"),
        picture=widgets.HTML(),
        state=State(),
    )
    settings = ("detach", "no_grad", "write", "inputs", "retain")
    filling = False  # the buttons are being made for a new program

    def redraw():
        ui.state = replace(ui.state, **{name: getattr(ui, name).value for name in settings})
        ui.picture.value = draw(ui.state)

    def go(steps):
        """Run so many nodes, and not on where torch refuses."""
        ui.state = replace(ui.state, steps=max(0, steps))
        try:
            ui.state = replace(ui.state, steps=run(ui.state).total)
        except ValueError:
            pass  # the picture says why
        redraw()

    def on_whole(_):
        try:
            result = run(ui.state)
        except ValueError:
            return
        nodes = max(1, len(result.reached))
        go((result.total // nodes + 1) * nodes)

    def on_program(_=None):
        nonlocal filling
        words = ui.program.value
        ui.state = replace(ui.state, program=words, steps=0)
        ui.start.value = next((name for name, program in PROGRAMS.items() if program == words), None)
        try:
            leaves, lines_ = used_names(words)
        except ValueError:
            return redraw()  # the buttons stay as they are, until it is a program again
        filling = True
        ui.detach.options = [NOTHING, *lines_]
        ui.no_grad.options = [NOTHING, *lines_, EVERYTHING]
        ui.write.options = [NOTHING, *leaves, *lines_]
        ui.detach.value = ui.no_grad.value = ui.write.value = NOTHING
        filling = False
        redraw()

    def on_setting(change):
        if not filling:
            if change["owner"] not in (ui.retain, ui.write):
                ui.state = replace(ui.state, steps=0)  # another graph
            redraw()

    for name in settings:
        getattr(ui, name).observe(on_setting, "value")
    ui.program.observe(on_program, "value")
    ui.start.observe(lambda change: change["new"] and setattr(ui.program, "value", PROGRAMS[change["new"]]), "value")
    ui.step.on_click(lambda _: go(ui.state.steps + 1))
    ui.back.on_click(lambda _: go(ui.state.steps - 1))
    ui.reset.on_click(lambda _: go(0))
    ui.whole.on_click(on_whole)
    ui.redraw = redraw
    controls = [ui.program, ui.inputs, ui.retain, ui.step, ui.whole, ui.back, ui.reset]
    rows = widgets.HBox([ui.detach, ui.no_grad, ui.write], layout={"flex_flow": "row wrap", "grid_gap": "0 16px"})
    ui.box = panel([ui.start, rows], controls, ui.picture)
    on_program()
    return ui


def _toggle(description):
    return widgets.ToggleButton(description=description, layout={"width": "auto"})


def explore_graph(program=None):
    """Draw the autograd graph of a small program, one of a few or your own, and run backward through it node by node.

    A program is one to six lines parted by semicolons, such as "h = tanh(w * x); loss = sum(h)": names, numbers,
    + - * / ** @ and functions of one tensor, over the leaves x (3,), w (3,), b () and A (2, 3), all float32.
    """
    ui = build(program)
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
