"""explore_float(): one number in six formats, bit by bit: what each holds, how far apart its numbers are there, what is lost."""
import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import ipywidgets as widgets

from ..engine.display import FAINT, INK, ROLES, show, svg_document
from ..toolkit.precision import FORMATS, float_bits, from_bits
from ._panel import STYLE as PANEL_STYLE
from ._panel import WIDTH, button, choice, lines, panel, text

SHORT = {"float8_e4m3fn": "fp8 e4m3", "float8_e5m2": "fp8 e5m2"}
NAMES = {SHORT.get(name, name): name for name in FORMATS}  # as the buttons say it: as the toolkit calls it
LEFT, BIT, GAP, VALUE = 104, 16, 7, 660  # where bits begin, how wide one is, between the parts, where values begin
TOP, ROW = 62, 62
LOW, HIGH = -152, 130  # powers of two that the ranges are drawn over
STYLE = f"""
.fl .bit rect{{stroke:{ROLES["storage"]};stroke-width:1.2;fill:none}} .fl .bit text{{font-size:13px;text-anchor:middle}}
.fl .exponent rect{{fill:{ROLES["storage"]};fill-opacity:.34}}
.fl .mantissa rect{{stroke:{ROLES["view"]};fill:{ROLES["view"]};fill-opacity:.12}}
.fl .chosen{{fill:none;stroke:{INK};stroke-width:1.6}} .fl .range{{stroke:{ROLES["storage"]};stroke-width:9;fill:none}}
.fl .sub{{stroke:{ROLES["storage"]};stroke-width:9;stroke-dasharray:2 3;fill:none}}
.fl .at{{stroke:{INK};stroke-width:1.6;stroke-dasharray:4 3}}
.fl .lost{{fill:{ROLES["wrong"]};font-weight:600}} .fl .grid{{stroke:{FAINT};stroke-opacity:.3}}
"""


@dataclass(frozen=True)
class State:
    number: float = 0.1
    format: str = "fp16"  # whose bits can be flipped
    bits: str = ""  # of `number` in `format`, where they were flipped: only they tell one nan from another
    said: str = ""  # why what was typed is no number


def read(typed):
    """The number that someone typed: 0.1, 1e-5, inf, 2**-14 or 1/3. Raises ValueError with a sentence."""
    typed = typed.strip()
    shown, found = typed if len(typed) < 25 else f"{typed[:24]}…", re.fullmatch(r"(.+?)\s*(\*\*|/)\s*(.+)", typed)
    try:
        if found:
            a, b = float(found[1]), float(found[3])
            value, zero = (_power(a, b) if found[2] == "**" else a / b), a == 0 or math.isinf(b)
        else:
            value, zero = float(typed), not re.search("[1-9]", re.split("[eE]", typed)[0])
    except (ValueError, ZeroDivisionError):
        what = f"“{shown}” is no number that can be read here" if typed else "There is nothing to read"
        raise ValueError(f"{what}: write 0.1, 1e-5, inf, 2**-14 or 1/3.") from None
    if math.isinf(value) and "inf" not in typed.lower():
        raise ValueError(f"“{shown}” is too large: Python's own numbers end at 1.8e308. Infinity is written inf.")
    if value == 0 and not zero:
        raise ValueError(f"“{shown}” is too small: Python's own numbers begin at 5e-324.")
    return value


def _power(a, b):
    try:
        return math.pow(a, b)
    except OverflowError:
        return math.inf


def held(state, name):
    """What the format makes of the number, as FloatBits."""
    if state.bits and name == state.format:
        return from_bits(state.bits, name)
    return float_bits(state.number, name)


def flip(state, place):
    """The state after the bit at this place, counted from the left, was flipped in the chosen format."""
    digits = _digits(held(state, state.format))
    digits = f"{digits[:place]}{'10'[int(digits[place])]}{digits[place + 1 :]}"
    return State(from_bits(digits, state.format).value, state.format, digits)


def neighbour(state, way):
    """The state at the next number of the chosen format, up (1) or down (-1); at nan and beyond the ends it stays."""
    bits = held(state, state.format)
    if math.isnan(bits.value) or bits.value == way * math.inf:
        return state
    count = int(_digits(bits)[1:], 2) * (-1 if bits.sign == "1" else 1) + way  # patterns count on like whole numbers
    sign, width = ("1" if count < 0 else "0"), len(_digits(bits)) - 1
    if abs(count) >= 2**width:
        return state
    digits = f"{sign}{abs(count):0{width}b}"
    value = from_bits(digits, state.format).value
    return state if math.isnan(value) else State(value, state.format, digits)


def _digits(bits):
    return bits.sign + bits.exponent + bits.mantissa


def loss(state, name):
    """(a mark, a sentence) on what the format makes of the number."""
    bits, number = held(state, name), state.number
    end = f"{bits.format.max:.3g}" if bits.format.max > 1e5 else f"{bits.format.max:g}"
    if math.isnan(number):
        return "", "not a number"
    if math.isinf(number):
        return ("", "infinite") if math.isinf(bits.value) else ("✗", f"no infinity here: {bits.value:g}")
    if not math.isfinite(bits.value):
        return "✗", f"too large: ends at {end}"
    if abs(bits.value) == bits.format.max and abs(number) > bits.format.max + bits.spacing / 2:
        return "✗", f"too large: ends at {end}"
    if bits.value == 0 and number != 0:
        return "✗", f"too small: begins at {bits.format.smallest:.2g}"
    off = abs(bits.value - number) / abs(number) if number else 0.0
    return "", (f"off by {100 * off:.2g} %" if off else "exact") + (", subnormal" if bits.kind == "subnormal" else "")


def apart(bits):
    """How far it is to the next number, away from 0, or why there is none."""
    if bits.kind in ("infinite", "nan"):
        return "nothing lies beyond" if bits.kind == "infinite" else "not between any numbers"
    if abs(bits.value) == bits.format.max:
        return f"the largest; last step {bits.spacing:.3g}"
    return f"next one {bits.spacing:.3g} away"


def formula(bits):
    """How the three parts make the value."""
    f = bits.format
    if bits.kind in ("infinite", "nan"):
        rest = "the mantissa is 0: infinity" if bits.kind == "infinite" else "the mantissa is not 0: no number"
        return f"the exponent is all ones, and {'so is the mantissa: no number' if f.finite else rest}"
    lead, exponent = (1, int(bits.exponent, 2)) if "1" in bits.exponent else (0, 1)
    whole = f"{'−' if bits.sign == '1' else ''}({lead} + {int(bits.mantissa, 2)}/{2**f.mantissa_bits}) × 2^({exponent} − {f.bias})"
    return f"{whole} = {bits.value!r}" + ("" if lead else "; the exponent is 0, so no 1 leads")


def describe(state):
    """The picture in words."""
    rows = [state.said] if state.said else []
    rows.append(f"the number: {state.number!r}")
    for short, name in NAMES.items():
        bits, f = held(state, name), FORMATS[name]
        parts = f"sign {bits.sign}, exponent {bits.exponent}, mantissa {bits.mantissa}"
        rows.append(f"{short}: {parts} is {bits.value!r}; {apart(bits)}; {' '.join(part for part in loss(state, name) if part)}; "
                    f"its range: {f.smallest:.2g} ({f.smallest_normal:.2g} with all digits) to {f.max:.3g}")
    rows.append(f"{SHORT.get(state.format, state.format)}: {formula(held(state, state.format))}")
    return "\n".join(rows)


def draw(state):
    """The picture as SVG text."""
    body = text(14, 26, f"the number: {state.number!r}", "mono strong")
    if state.said:
        body += text(14, 46, f"✗ {state.said}", "bad strong")
    for n, (short, name) in enumerate(NAMES.items()):
        body += _row(state, short, name, TOP + ROW * n)
    y = TOP + ROW * len(NAMES) + 14
    words, y = lines(14, y, f"{SHORT.get(state.format, state.format)}: {formula(held(state, state.format))}", "mono", width=94)
    body, y = body + words, y + 16
    body += text(14, y, "range of each format, in powers of two: solid with all digits, broken with fewer", "small")
    ranges, y = _ranges(state, y + 16)
    return svg_document(WIDTH, y, f'<g class="xp fl">{body}{ranges}</g>', describe(state), PANEL_STYLE + STYLE)


def _row(state, short, name, y):
    """One format: its bits in three parts, its value, the spacing and the loss."""
    bits, x = held(state, name), LEFT
    body = text(14, y + 18, short, "strong")
    if name == state.format:
        body += f'<rect class="chosen" x="6" y="{y - 7}" width="888" height="{ROW - 2}" rx="6"/>'
    for part, digits in (("sign", bits.sign), ("exponent", bits.exponent), ("mantissa", bits.mantissa)):
        body += text(x, y + 42, part, "small")
        for digit in digits:
            body += f'<g class="bit {part}"><rect x="{x}" y="{y}" width="{BIT}" height="24"/>'
            body += f'<text class="mono mid" x="{x + BIT / 2}" y="{y + 17}">{digit}</text></g>'
            x += BIT
        x += GAP + (18 if part == "sign" else 0)
    mark, said = loss(state, name)
    body += text(VALUE, y + 12, repr(bits.value), "mono strong")
    body += text(VALUE, y + 29, apart(bits), "small")
    return body + text(VALUE, y + 45, f"{mark} {said}".strip(), "small lost" if mark else "small")


def _ranges(state, top):
    place = lambda power: LEFT + (VALUE + 200 - LEFT) * (power - LOW) / (HIGH - LOW)  # noqa: E731
    bottom = top + 22 * len(NAMES)
    body = ""
    for power in range(-150, HIGH, 50):
        body += f'<path class="grid" d="M{place(power):.1f} {top}V{bottom}"/>' + text(place(power), bottom + 16, f"2^{power}", "small mid")
    for n, (short, name) in enumerate(NAMES.items()):
        f, y = FORMATS[name], top + 22 * n + 11
        small, normal, most = (place(math.log2(value)) for value in (f.smallest, f.smallest_normal, f.max))
        body += text(14, y + 5, short, "small")
        body += f'<path class="sub" d="M{small:.1f} {y}H{normal:.1f}"/><path class="range" d="M{normal:.1f} {y}H{most:.1f}"/>'
    size = abs(state.number)
    if size and math.isfinite(size):
        x = place(min(max(math.log2(size), LOW), HIGH))
        body += f'<path class="at" d="M{x:.1f} {top - 4}V{bottom}"/>'
        words, y = lines(14, bottom + 38, f"broken line: the number, {size:.4g} = 2^{math.log2(size):.2f}", "small")
    else:
        words, y = lines(14, bottom + 38, f"{state.number!r} lies on no such line", "small")
    return body + words, y


def build():
    """The controls and the picture, wired; `explore_float` shows them."""
    first = State()
    ui = SimpleNamespace(
        typed=widgets.Text(repr(first.number), description="number", continuous_update=False, layout={"width": "300px"}),
        format=choice("bits of", NAMES),
        bits=[widgets.Button(layout={"width": "22px", "padding": "0", "margin": "1px"}) for _ in range(32)],
        up=button("Next up"),
        down=button("Next down"),
        double=button("Times 2"),
        half=button("Half"),
        picture=widgets.HTML(),
        state=first,
    )
    ui.format.value = "fp16"
    row = widgets.HBox(ui.bits, layout={"flex_flow": "row wrap"})

    def redraw():
        digits = _digits(held(ui.state, ui.state.format))
        if len(row.children) != len(digits):
            row.children = ui.bits[: len(digits)]
        ends = 1, 1 + FORMATS[ui.state.format].exponent_bits
        for place, (control, digit) in enumerate(zip(ui.bits, digits)):
            part = "sign" if place == 0 else "exponent" if place < ends[1] else "mantissa"
            control.description, control.tooltip = digit, f"flip bit {place + 1}, {part}"
            control.layout.margin = "1px 1px 1px 10px" if place in ends else "1px"
        ui.picture.value = draw(ui.state)

    def become(state):
        ui.state = state
        ui.typed.unobserve(typed, "value")
        ui.typed.value = repr(state.number)
        ui.typed.observe(typed, "value")
        redraw()

    def typed(change):
        try:
            ui.state = State(read(change["new"]), ui.state.format)
        except ValueError as error:
            ui.state = replace(ui.state, said=str(error))
        redraw()

    ui.typed.observe(typed, "value")
    ui.format.observe(lambda change: become(State(ui.state.number, NAMES[change["new"]])), "value")
    for place, control in enumerate(ui.bits):
        control.on_click(lambda _, place=place: become(flip(ui.state, place)))
    ui.up.on_click(lambda _: become(neighbour(ui.state, 1)))
    ui.down.on_click(lambda _: become(neighbour(ui.state, -1)))
    ui.double.on_click(lambda _: become(State(2 * ui.state.number, ui.state.format)))
    ui.half.on_click(lambda _: become(State(ui.state.number / 2, ui.state.format)))
    ui.redraw = redraw
    ui.box = panel([ui.format, row], [ui.typed, ui.up, ui.down, ui.double, ui.half], ui.picture)
    redraw()
    return ui


def explore_float():
    """Type a number or flip its bits: what six formats make of it, how far apart their numbers are there, and where they end."""
    ui = build()
    show(describe(ui.state), svg=ui.picture.value, widget=ui.box)
