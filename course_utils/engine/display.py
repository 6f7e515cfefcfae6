"""The one place that shows anything: HTML and SVG, each with a plain-text twin.

Colours have roles and are always doubled by a shape, a hatch or a word. Text and lines take the theme's own colour
through CSS variables (JupyterLab's, then VS Code's); where neither exists, as on GitHub, a grey legible on both
light and dark is used.
"""
import base64
import dataclasses
import html
import io
import math
import re
import statistics
import textwrap
from collections.abc import Callable

# Paul Tol's bright scheme: https://personal.sron.nl/~pault/
ROLES = {
    "storage": "#4477AA",
    "view": "#66CCEE",
    "copy": "#CCBB44",
    "parameters": "#4477AA",
    "gradients": "#228833",
    "activations": "#AA3377",
    "optimizer": "#66CCEE",
    "free": "#BBBBBB",
    "wrong": "#EE6677",
}
INK = "var(--jp-ui-font-color1, var(--vscode-editor-foreground, #767676))"
FAINT = "var(--jp-ui-font-color2, var(--vscode-descriptionForeground, #767676))"
LINE = "var(--jp-border-color1, var(--vscode-panel-border, #9a9a9a))"
MONO = "var(--jp-code-font-family, ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace)"
SANS = "var(--jp-ui-font-family, system-ui, 'DejaVu Sans', sans-serif)"

# state of a card: mark in front of its title, colour of its edge
STATES = {
    "right": ("✓", ROLES["gradients"]),
    "wrong": ("✗", ROLES["wrong"]),
    "raised": ("!", ROLES["wrong"]),
    "open": ("○", ROLES["free"]),
    "note": ("·", ROLES["storage"]),
}


def escape(text):
    return html.escape(str(text), quote=True)


def inline(text):
    """A sentence as HTML: escaped, with what stands between backticks set as code."""
    return re.sub(r"`([^`]+)`", rf'<code style="font-family:{MONO};color:{INK};background:transparent">\1</code>', escape(text))


def show(text, html=None, svg=None, widget=None):
    """Display one thing in every form that we have of it; outside a notebook, print the text.

    `text` is always there, for a terminal, a screen reader and nbval; `widget` is shown where widgets live, `svg` or `html` elsewhere.
    """
    try:
        from IPython import get_ipython
        from IPython.display import display

        shell = get_ipython()
    except ImportError:
        shell = None
    # half of a surrogate pair, as a learner may print it, can be neither printed nor sent
    text, html, svg = (form if form is None else form.encode("utf-8", "replace").decode() for form in (text, html, svg))
    if shell is None:
        print(text)
        return
    bundle = {}
    if widget is not None:
        bundle.update(widget._repr_mimebundle_())
    bundle["text/plain"] = text
    if svg is not None:
        bundle["image/svg+xml"] = svg
        # JupyterLab shows image/svg+xml as an <img>, which the theme's colours do not reach: inline it, where no widget comes first.
        bundle["text/html"] = f'<div style="max-width:900px">{svg}</div>'
    if html is not None:
        bundle["text/html"] = html
    display(bundle, raw=True)


def svg_document(width, height, body, label, style="", role="img"):
    """An SVG picture at most 900 px wide that shrinks with the page; `label` is what a screen reader says.

    The role "group" is for a picture whose parts can be reached with Tab and have labels of their own.
    """
    base = f"text{{fill:{INK};font:13px {SANS}}}.mono{{font-family:{MONO}}}.faint{{fill:{FAINT}}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{min(width, 900):g}" role="{role}" '
        f'aria-label="{escape(label)}" style="max-width:100%;height:auto"><style>{base}{style}</style>{body}</svg>'
    )


def card(state, title, lines=()):
    """A result: one quiet line, and under it what there is to read. `lines` are (kind, text); kind is "text" or "code"."""
    mark, colour = STATES[state]
    text = "\n".join([f"{mark} {title}"] + [textwrap.indent(line, "    ") for _, line in lines])
    body = "".join(
        f'<pre style="margin:4px 0;padding:4px 8px;white-space:pre-wrap;background:transparent;border-left:1px solid {LINE};'
        f'color:{INK};font:12.5px/1.45 {MONO}">{escape(line)}</pre>'
        if kind == "code"
        else f'<div style="margin:4px 0;max-width:56em">{inline(line)}</div>'
        for kind, line in lines
    )
    show(
        text,
        html=f'<div role="status" style="border-left:4px solid {colour};padding:2px 0 2px 12px;color:{INK};font:14px/1.5 {SANS}">'
        f'<div><span aria-hidden="true" style="color:{colour};font-weight:700">{mark}</span> <b>{inline(title)}</b></div>{body}</div>',
    )


def table(headers, rows):
    """Show rows of text or numbers under headers; numbers are set right and monospaced."""
    cells = [[str(cell) for cell in row] for row in rows]
    numeric = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(headers))]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]

    def text_line(line):
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric)).rstrip()

    def html_line(line, tag):
        return "<tr>" + "".join(
            f'<{tag} style="text-align:{"right" if n else "left"};padding:3px 12px 3px 0;border-bottom:1px solid {LINE};vertical-align:top;'
            f'background:transparent;{f"font-family:{MONO};" if n else ""}">{inline(c)}</{tag}>'
            for c, n in zip(line, numeric)
        ) + "</tr>"

    text = "\n".join([text_line(list(headers)), text_line(["-" * w for w in widths]), *map(text_line, cells)])
    markup = html_line(list(headers), "th") + "".join(html_line(line, "td") for line in cells)
    show(text, html=f'<table style="border-collapse:collapse;color:{INK};font:13px/1.45 {SANS};margin:4px 0">{markup}</table>')


def bars(rows, what):
    """Horizontal bars of (name, value, role) with the value written at the end of each; `what` says what is measured, and in which unit."""
    top = max([value for _, value, _ in rows] + [1e-12])
    left = min(360, 14 + max(7.3 * len(name) for name, _, _ in rows))
    span = 900 - left - 190
    body = [f'<text class="faint" x="0" y="14">{escape(what)}</text>']
    for i, (name, value, role) in enumerate(rows):
        y = 24 + 30 * i
        body.append(
            f'<text x="{left - 10:.0f}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{left:.0f}" y="{y + 2}" width="{max(1.0, span * value / top):.1f}" height="20" fill="{ROLES[role]}" '
            f'fill-opacity=".55" stroke="{ROLES[role]}" stroke-width="1.5"/>'
            f'<text class="mono" x="{left + max(1.0, span * value / top) + 8:.1f}" y="{y + 16}">{escape(number(value))}</text>'
        )
    text = "\n".join([what] + [f"  {name}: {number(value)}" for name, value, _ in rows])
    show(text, svg=svg_document(900, 30 + 30 * len(rows), "".join(body), text))


# colour, dashes and mark of the lines of a figure, in order: told apart without colour, too
LINES = (
    (ROLES["storage"], "", "circle"),
    (ROLES["wrong"], "9 4", "square"),
    (ROLES["gradients"], "2 4", "triangle"),
    (ROLES["activations"], "12 4 2 4", "diamond"),
    (ROLES["copy"], "5 3", "cross"),
)
FIGURE = f".grid{{stroke:{FAINT};stroke-opacity:.3}}.dot{{fill:{ROLES['storage']};fill-opacity:.5;stroke:{ROLES['storage']}}}"
MARKS = {
    "circle": "M-4 0A4 4 0 1 0 4 0A4 4 0 1 0-4 0Z",
    "square": "M-4-4H4V4H-4Z",
    "triangle": "M0-5L5 4H-5Z",
    "diamond": "M0-5L5 0L0 5L-5 0Z",
    "cross": "M-4-4L4 4M4-4L-4 4",
}


def curves(series, x, y, log=False):
    """Lines of {name: values} or {name: (xs, values)}, at most five, over an axis `x` and an axis `y`, both named with their unit.

    Each line has a colour, a dash and a mark of its own, and its name at its end. `log`: the y axis is logarithmic, and values that are not
    positive are left out, as non-finite ones are always. Raises ValueError where nothing is left to draw.
    """
    lines = {name: _points(values, log) for name, values in series.items()}
    if not any(lines.values()) or len(lines) > len(LINES):
        raise ValueError(f"curves draws one to {len(LINES)} lines with finite{' and positive' * log} values, and got {len(lines)} lines")
    width, height, left, right, top, bottom = 900, 320, 70, 200, 26, 270
    xs, ys = ([point[i] for line in lines.values() for point in line] for i in (0, 1))
    across, down = _axis(min(xs), max(xs), left, width - right), _axis(min(ys), max(ys), bottom, top, log)
    body = [f'<text class="faint" x="0" y="14">{escape(y)}</text>',
            f'<text class="faint" x="{width - right}" y="{height - 10}" text-anchor="end">{escape(x)}</text>']
    body += _verticals(across, top, bottom)
    for value, at in down.ticks:
        body.append(f'<path class="grid" d="M{left} {at:.1f}H{width - right}"/>'
                    f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>')
    ends = _apart([down.place(line[-1][1]) if line else bottom for line in lines.values()], 17)
    for (name, line), (colour, dashes, mark), end in zip(lines.items(), LINES, ends):
        at = [(across.place(a), down.place(b)) for a, b in line]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in at) if at else ""
        body.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        body += [_mark(mark, a, b, colour) for a, b in (at if len(at) < 13 else at[-1:])]
        body.append(f'{_mark(mark, width - right + 16, end, colour)}<text x="{width - right + 26}" y="{end + 4:.1f}">{escape(name)}</text>')
    text = "\n".join([f"{y} over {x}"] + [_in_words(name, line, series[name]) for name, line in lines.items()])
    show(text, svg=svg_document(width, height, "".join(body), text, FIGURE))


def _points(values, log):
    xs, ys = values if isinstance(values, tuple) else (range(len(values)), values)
    pairs = [(float(a), float(b)) for a, b in zip(xs, ys, strict=True)]
    return [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b) and (b > 0 or not log)]


def _in_words(name, line, given):
    if not line:
        return f"  {name}: nothing that can be drawn"
    (_, first), (at, least), (_, last) = line[0], min(line, key=lambda point: point[1]), line[-1]
    lost = len(given[1] if isinstance(given, tuple) else given) - len(line)
    return f"  {name}: from {number(first)} to {number(last)}, least {number(least)} at {number(at)}" + f"; not drawn: {lost}" * (lost > 0)


def dots(rows, what):
    """One line for each (name, values): a dot for each value, a seed's perhaps, a bar at the median; `what` names the axis and its unit.

    Raises ValueError where a row is empty or a value is not finite: a seed that diverged is to be said, not dropped.
    """
    rows = [(name, sorted(float(v) for v in values)) for name, values in rows]
    if not rows or any(not values or not all(map(math.isfinite, values)) for _, values in rows):
        raise ValueError("dots draws rows of (name, values) with at least one value each, all of them finite")
    left = min(400, 14 + max(8.2 * len(name) for name, _ in rows))
    figures = [f"{number(statistics.median(v))} ({number(v[0])} to {number(v[-1])})" for _, v in rows]
    right = 900 - max(184, *(8 * len(figure) for figure in figures))
    every, bottom = [v for _, values in rows for v in values], 26 + 30 * len(rows)
    across = _axis(min(every), max(every), left, right - 16)
    body = [f'<text class="faint" x="0" y="14">{escape(what)}</text>']
    body += _verticals(across, 24, bottom)
    words = [what]
    for i, ((name, values), said) in enumerate(zip(rows, figures)):
        y, middle = 40 + 30 * i, statistics.median(values)
        body.append(f'<text x="{left - 10:.0f}" y="{y + 4}" text-anchor="end">{escape(name)}</text>'
                    f'<text class="mono" x="{right}" y="{y + 4}">{said}</text>')
        body += [f'<circle class="dot" cx="{across.place(v):.1f}" cy="{y}" r="5"/>' for v in values]
        body.append(f'<path d="M{across.place(middle):.1f} {y - 11}v22" stroke="{INK}" stroke-width="2.5"/>')
        words.append(f"  {name}: median {said} of {len(values)}")
    text = "\n".join(words)
    show(text, svg=svg_document(900, bottom + 28, "".join(body), text, FIGURE))


def _verticals(axis, top, bottom):
    y = bottom + 18
    return [f'<path class="grid" d="M{at:.1f} {top}V{bottom}"/><text x="{at:.1f}" y="{y}" text-anchor="middle">{number(value)}</text>'
            for value, at in axis.ticks]


@dataclasses.dataclass(frozen=True)
class Axis:
    place: Callable  # a value's coordinate
    ticks: list  # (value, coordinate) of four to seven round values


def _axis(low, high, start, end, log=False):
    """An axis from `low` to `high`, with some room, between two coordinates."""
    if log:
        low, high = math.log10(low), math.log10(high)
    room = 0.04 * (high - low) or 0.5 * (abs(low) or 1)
    low, high = low - room, high + room
    place = lambda value: start + (end - start) * ((math.log10(value) if log else value) - low) / (high - low)  # noqa: E731
    step = _round_step(high - low)
    if log and high - low > 1.2:
        ticks = [10.0**k for k in range(math.ceil(low), math.floor(high) + 1, max(1, round((high - low) / 6)))]
    elif log:
        ticks = [m * 10.0**k for k in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 3, 5)]
        ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    else:
        ticks = [round(step * k, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(place, [(int(t) if t == int(t) else t, place(t)) for t in ticks])


def _round_step(span):
    """1, 2 or 5 times a power of ten, so that four to nine steps fill the span."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return max(m * power for m in (1, 2, 5) if m * power <= span / 4)


def _apart(heights, least):
    """The heights of labels, moved down as little as needed so that no two are nearer than `least`."""
    placed, last = [0.0] * len(heights), -math.inf
    for i in sorted(range(len(heights)), key=heights.__getitem__):
        last = placed[i] = max(heights[i], last + least)
    return placed


def _mark(name, x, y, colour):
    fill = "none" if name == "cross" else colour
    return f'<path transform="translate({x:.1f} {y:.1f})" d="{MARKS[name]}" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>'


def images(tensors, titles, scale=7):
    """Pictures in a row: tensors (H, W), (H, W, 3) or (3, H, W) with values from 0 to 1, or uint8, each with a title under it."""
    body, x, tallest = [], 0, 0
    for tensor, title in zip(tensors, titles):
        if tensor.dim() == 3 and tensor.shape[-1] != 3:
            tensor = tensor.permute(1, 2, 0)
        height, width = tensor.shape[:2]
        shown = max(width * scale, 7.4 * max(map(len, title.split("\n"))))
        body.append(
            f'<image x="{x + (shown - width * scale) / 2:.0f}" y="0" width="{width * scale}" height="{height * scale}" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{_png(tensor)}"/>'
        )
        for i, line in enumerate(title.split("\n")):
            body.append(f'<text x="{x + shown / 2:.0f}" y="{height * scale + 18 + 17 * i}" text-anchor="middle">{escape(line)}</text>')
        x, tallest = x + shown + 24, max(tallest, height * scale + 6 + 17 * (title.count("\n") + 1))
    text = "pictures: " + "; ".join(title.replace("\n", " ") for title in titles)
    show(text, svg=svg_document(x - 24, tallest + 4, "".join(body), text))


def _png(tensor):
    from PIL import Image

    pixels = tensor.detach().cpu()
    if pixels.is_floating_point():
        pixels = pixels.clamp(0, 1).mul(255).round()
    pixels = pixels.byte()
    buffer = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, "png")
    return base64.b64encode(buffer.getvalue()).decode()


def number(value):
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
