"""The one place that shows anything: HTML and SVG, each with a plain-text twin.

Colours have roles and are always doubled by a shape, a hatch or a word. Text and lines take the theme's own colour
through CSS variables (JupyterLab's, then VS Code's); where neither exists, as on GitHub, a grey legible on both
light and dark is used.
"""
import base64
import html
import io
import re
import textwrap

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
