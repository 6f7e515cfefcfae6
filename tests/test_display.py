"""Everything shown has a text twin, is well-formed and escaped, and takes its text colours from the theme."""
import base64
import html.parser
import io
import re
import xml.etree.ElementTree

import IPython
import IPython.display
import ipywidgets
import numpy as np
import pytest
import torch
from PIL import Image

from course_utils.engine import display

NASTY = "<script>alert('1')</script> & \"two\""
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def shown(monkeypatch):
    """The bundles that a notebook would be sent."""
    bundles = []
    monkeypatch.setattr(IPython, "get_ipython", lambda: object())
    monkeypatch.setattr(IPython.display, "display", lambda bundle, raw: bundles.append(bundle))
    return bundles


class Balanced(html.parser.HTMLParser):
    """Fails where a tag is closed that is not open."""

    VOID = {"br", "img", "input", "meta"}

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.tags = [], "", set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


EVERY = {
    "card": lambda: display.card("wrong", NASTY, [("text", NASTY), ("code", f"a\n  {NASTY}"), ("text", "the `value` counts")]),
    "quiet card": lambda: display.card("right", NASTY),
    "table": lambda: display.table((NASTY, "n"), [(NASTY, 1), ("b", 2.5)]),
    "bars": lambda: display.bars([(NASTY, 3, "storage"), ("b", 0, "copy")], NASTY),
    "images": lambda: display.images([torch.rand(3, 4), torch.rand(5, 2)], [NASTY, "two\nlines"]),
}


@pytest.mark.parametrize("name", EVERY)
def test_every_display(name, shown):
    EVERY[name]()
    [bundle] = shown
    assert NASTY in bundle["text/plain"] and "style=" not in bundle["text/plain"]
    page = Balanced(bundle["text/html"])
    assert "script" not in page.tags and NASTY in page.text
    for form in ("text/html", "image/svg+xml"):
        picture = bundle.get(form, "")
        assert "<script" not in picture
        colours = re.findall(r"(?<![-\w])(?:color|fill|stroke):\s*([^;}\"]+)", picture) + re.findall(r'(?:fill|stroke)="([^"]+)"', picture)
        allowed = {*display.ROLES.values(), display.INK, display.FAINT, "none"}
        assert set(colours) <= allowed, set(colours) - allowed
        assert not re.search(r"(?i)\b(?:black|white)\b(?!-space)|#000\b|#fff\b|#000000|#ffffff|rgb\(", picture)
    if "image/svg+xml" in bundle:
        root = xml.etree.ElementTree.fromstring(bundle["image/svg+xml"])
        assert float(root.get("width")) <= 900 and root.get("role") == "img" and NASTY in root.get("aria-label")
        assert NASTY in "".join(root.itertext())
        # JupyterLab shows an SVG as an <img>, out of reach of the theme's colours: the same picture stands inline
        assert bundle["image/svg+xml"] in bundle["text/html"]


@pytest.mark.parametrize("name", EVERY)
def test_outside_a_notebook_the_text_is_printed(name, capsys):
    EVERY[name]()
    assert NASTY in capsys.readouterr().out


def test_a_widget_comes_with_its_picture(shown):
    display.show("a text", svg=display.svg_document(10, 10, "", "a picture"), widget=ipywidgets.IntSlider())
    [bundle] = shown
    assert {"application/vnd.jupyter.widget-view+json", "text/plain", "image/svg+xml"} <= set(bundle) and bundle["text/plain"] == "a text"


def test_half_a_surrogate_pair_is_replaced(shown):
    display.card("note", "half \ud800 of a pair")
    for form in shown[0].values():
        form.encode("utf-8")
        assert "half ? of a pair" in form


def test_backticks_set_code():
    assert re.fullmatch(r"a &lt;b&gt; <code [^>]+>x &lt; 2</code>", display.inline("a <b> `x < 2`"))


@pytest.mark.parametrize("state", display.STATES)
def test_a_state_is_told_by_more_than_its_colour(state, shown):
    display.card(state, "title")
    mark, _ = display.STATES[state]
    assert shown[0]["text/plain"] == f"{mark} title" and mark in shown[0]["text/html"]


def test_marks_differ():
    assert len({mark for mark, _ in display.STATES.values()}) == len(display.STATES)


def test_the_theme_colours_have_fallbacks():
    for colour in (display.INK, display.FAINT, display.LINE):
        assert re.fullmatch(r"var\(--jp-[\w-]+, var\(--vscode-[\w-]+, #([0-9a-f]{2})\1\1\)\)", colour)


def test_a_tables_text_is_aligned(capsys):
    display.table(("name", "bytes"), [("a", 1), ("longer", 1234)])
    assert capsys.readouterr().out.splitlines() == ["name    bytes", "------  -----", "a           1", "longer   1234"]


def test_an_empty_table(capsys):
    display.table(("name", "bytes"), [])
    assert "name  bytes" in capsys.readouterr().out


def test_bars_are_as_long_as_their_values(shown):
    display.bars([("half", 5, "copy"), ("whole", 10, "storage"), ("none", 0, "free")], "bytes")
    root = xml.etree.ElementTree.fromstring(shown[0]["image/svg+xml"])
    half, whole, none = (float(r.get("width")) for r in root.iter(f"{SVG}rect"))
    assert abs(whole - 2 * half) < 0.2 and 0 < none < half
    assert shown[0]["text/plain"] == "bytes\n  half: 5\n  whole: 10\n  none: 0"
    x = [float(t.get("x")) + 8 * len(t.text) for t in root.iter(f"{SVG}text")]
    assert max(x) <= 900


def drawn(bundle):
    """The SVG of a figure, and the coordinates of each of its lines."""
    root = xml.etree.ElementTree.fromstring(bundle["image/svg+xml"])
    paths = [p for p in root.iter(f"{SVG}path") if p.get("stroke-dasharray") is not None]
    return root, [[tuple(map(float, at.split())) for at in p.get("d").lstrip("M").split("L") if at] for p in paths]


def test_curves_go_where_their_values_are(shown):
    display.curves({"rises": [0, 1, 2], "falls": ([0, 1], [2, 0])}, "step", "loss")
    root, (rises, falls) = drawn(shown[0])
    (x0, y0), (x1, y1), (x2, y2) = rises
    assert x0 < x1 < x2 and y0 > y1 > y2 and abs((y0 - y1) - (y1 - y2)) < 0.3
    assert falls == [(x0, y2), (x1, y0)], "the lines share their axes"
    words = [t.text for t in root.iter(f"{SVG}text")]
    assert {"step", "loss", "rises", "falls", "0", "1", "2"} <= set(words)
    assert shown[0]["text/plain"] == "loss over step\n  rises: from 0 to 2, least 0 at 0\n  falls: from 2 to 0, least 0 at 1"


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors(shown):
    display.curves({"rate": [1, 0.1, 0.01, 0.0]}, "epoch", "rate", log=True)
    root, [[(_, a), (_, b), (_, c)]] = drawn(shown[0])
    assert abs((b - a) - (c - b)) < 0.3 and "0.01" in [t.text for t in root.iter(f"{SVG}text")]
    assert shown[0]["text/plain"].endswith("least 0.01 at 2; not drawn: 1")


def test_lines_are_told_apart_without_colour(shown):
    display.curves({name: [i, i + 1] for i, name in enumerate("abcde")}, "x", "y")
    root, lines = drawn(shown[0])
    assert len({p.get("stroke-dasharray") for p in root.iter(f"{SVG}path") if p.get("stroke-dasharray") is not None}) == len(lines) == 5
    labels = sorted(float(t.get("y")) for t in root.iter(f"{SVG}text") if t.text in "abcde")
    assert all(b - a >= 17 for a, b in zip(labels, labels[1:])), "their names do not overlap"


def test_curves_that_end_at_one_value_keep_their_names_apart(shown):
    display.curves({name: [i, 9] for i, name in enumerate("abc")}, "x", "y")
    root, _ = drawn(shown[0])
    labels = sorted(float(t.get("y")) for t in root.iter(f"{SVG}text") if t.text in "abc")
    assert all(b - a >= 16.9 for a, b in zip(labels, labels[1:]))


def test_what_is_not_finite_is_left_out_and_counted(shown):
    display.curves({"loss": [1.0, float("nan"), float("inf"), 2.0], "none": [float("nan")]}, "step", "loss")
    _, (line, none) = drawn(shown[0])
    assert len(line) == 2 and none == []
    assert "not drawn: 2" in shown[0]["text/plain"] and "none: nothing that can be drawn" in shown[0]["text/plain"]


@pytest.mark.parametrize("series", [{}, {"a": [float("nan")]}, {str(i): [1, 2] for i in range(6)}])
def test_curves_refuses_what_it_cannot_draw(series):
    with pytest.raises(ValueError, match="one to 5 lines"):
        display.curves(series, "x", "y")


@pytest.mark.parametrize("values", [[0.1, 0.1], [0, 0], [5], [-3, -3]])
def test_a_flat_line_lies_inside_the_figure(values, shown):
    display.curves({"a": values}, "x", "y")
    assert all(26 <= y <= 270 for _, y in drawn(shown[0])[1][0])


def test_dots_lie_at_their_values_and_the_bar_at_the_median(shown):
    display.dots([("first", [3.0, 1.0, 2.0]), ("second", [5])], "accuracy")
    root = xml.etree.ElementTree.fromstring(shown[0]["image/svg+xml"])
    places = [float(c.get("cx")) for c in root.iter(f"{SVG}circle")]
    one, two, three, five = places
    assert one < two < three < five and abs((two - one) - (three - two)) < 0.3
    bars = [p.get("d") for p in root.iter(f"{SVG}path") if p.get("stroke-width") == "2.5"]
    assert float(bars[0][1:].split()[0]) == two
    assert shown[0]["text/plain"] == "accuracy\n  first: median 2 (1 to 3) of 3\n  second: median 5 (5 to 5) of 1"


def test_dots_leaves_room_for_long_figures(shown):
    display.dots([("a", [1.23e-05, 2.46e-05, 3.69e-05])], "x")
    root = xml.etree.ElementTree.fromstring(shown[0]["image/svg+xml"])
    figures = next(t for t in root.iter(f"{SVG}text") if t.get("class") == "mono")
    begins = float(figures.get("x"))
    assert begins + 7.8 * len(figures.text) <= 900 and begins > max(float(c.get("cx")) for c in root.iter(f"{SVG}circle"))


@pytest.mark.parametrize("rows", [[], [("a", [])], [("a", [1, float("nan")])]])
def test_dots_refuses_what_it_cannot_draw(rows):
    with pytest.raises(ValueError, match="finite"):
        display.dots(rows, "x")


def pixels(bundle):
    found = xml.etree.ElementTree.fromstring(bundle["image/svg+xml"]).iter(f"{SVG}image")
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(i.get("href").split(",")[1])))) for i in found]


@pytest.mark.parametrize(("tensor", "shape"), [
    (torch.rand(4, 5), (4, 5)), (torch.rand(3, 4, 5), (4, 5, 3)), (torch.rand(4, 5, 3), (4, 5, 3)), (torch.rand(3, 3, 3), (3, 3, 3)),
    (torch.randint(0, 256, (4, 5), dtype=torch.uint8), (4, 5)), (torch.randint(0, 256, (3, 4, 5), dtype=torch.uint8), (4, 5, 3)),
    (torch.rand(5, 4).t(), (4, 5)), (torch.rand(4, 5, requires_grad=True), (4, 5)), (torch.rand(4, 5).half(), (4, 5)),
])
def test_images_of_every_kind(tensor, shape, shown):
    display.images([tensor], ["a title"])
    [seen] = pixels(shown[0])
    assert seen.shape == shape


def test_many_images_shrink_to_the_page(shown):
    display.images([torch.rand(28, 28)] * 9, ["a digit"] * 9)
    root = xml.etree.ElementTree.fromstring(shown[0]["image/svg+xml"])
    assert float(root.get("width")) == 900 and float(root.get("viewBox").split()[2]) > 1700


def test_images_show_the_values(shown):
    colours = torch.tensor([[[0, 9]], [[1, 8]], [[2, 7]]], dtype=torch.uint8)
    display.images([torch.tensor([[0.0, 0.5, 1.0, 7.0, -1.0]]), colours], ["a", "b"])
    first, second = pixels(shown[0])
    assert first.tolist() == [[0, 128, 255, 255, 0]] and second.tolist() == [[[0, 1, 2], [9, 8, 7]]]


def test_numbers():
    assert [display.number(n) for n in (5, 12345, 0.123456, 1234.5, float("nan"))] == ["5", "12,345", "0.123", "1,234", "nan"]
