"""predict and raises: the answer key is what PyTorch does, the first answer counts, and nothing in a question breaks its display."""
import xml.etree.ElementTree

import pytest
import torch
from helpers import use

from course_utils.engine import predictions, progress, session
from course_utils.engine.predictions import predict, raises, settle, verdict

NASTY = 'Is <script>alert("1 & 2")</script> \'`fine`\'?'
LESSER = {"one": lambda n: n == 1, "two": lambda n: n == 2}


@pytest.fixture
def work(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setitem(session._current, "lesson", "99_fake")


def widgets(question, labels, right="A", came=1):
    box = predictions._widget(question, labels, right, came)
    head, *buttons, answer = box.children
    return head, buttons, answer


# ── the answer key ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_option_that_holds_is_the_answer():
    assert settle(lambda: 2, LESSER) == ("B", 2)


def test_an_exception_is_a_result():
    options = {"works": lambda t: t.numel() == 3, "raises": lambda e: isinstance(e, RuntimeError)}
    letter, came = settle(lambda: torch.ones(2).view(3), options)
    assert letter == "B" and isinstance(came, RuntimeError)


@pytest.mark.parametrize(("options", "words"), [
    ({"one": lambda n: n == 1, "three": lambda n: n == 3}, "0 options hold (none); what came is 2"),
    ({"even": lambda n: n % 2 == 0, "two": lambda n: n == 2}, "2 options hold (A, B)"),
    ({"a tensor": lambda t: t.shape == ()}, "0 options hold"),  # a predicate that does not fit what came does not hold
    ({}, "0 options hold"),
])
def test_exactly_one_option_must_hold(options, words):
    with pytest.raises(AssertionError) as caught:
        settle(lambda: 2, options)
    assert words in str(caught.value)


def test_an_option_beyond_the_last_letter_is_not_silently_lost():
    options = {str(n): lambda came, n=n: came == n for n in range(9)}
    with pytest.raises(AssertionError):
        settle(lambda: 8, options)


@pytest.mark.parametrize("variable", ["COURSE_STRICT", "CI"])
def test_answers_that_do_not_fit_fail_where_it_is_tested_only(work, monkeypatch, capsys, variable):
    predict("How many?", lambda: 7, LESSER)
    assert "the prepared answers do not fit: 0 options hold (none); what came is 7" in capsys.readouterr().out
    monkeypatch.setenv(variable, "1")
    with pytest.raises(AssertionError, match="0 options hold"):
        predict("How many?", lambda: 7, LESSER)


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_text_asks_and_does_not_answer(work, capsys):
    predict(NASTY, lambda: 2, LESSER)
    assert capsys.readouterr().out == f"Predict: {NASTY}\n  A  one\n  B  two\n"


def test_the_static_picture_is_well_formed_and_says_everything():
    svg = predictions._static(NASTY * 9, [NASTY * 5, "two"])
    root = xml.etree.ElementTree.fromstring(svg)
    assert int(root.get("width")) <= 900 and root.get("role") == "img" and "script" in root.get("aria-label")
    said = "".join(root.itertext())
    assert '<script>alert("1 & 2")</script>' in said and "<script" not in svg
    bottom = max(float(e.get("y")) for e in root.iter("{http://www.w3.org/2000/svg}text"))
    assert bottom < float(root.get("viewBox").split()[3])


def test_what_the_widget_shows_is_escaped():
    head, buttons, answer = widgets(NASTY, [NASTY, "two"], came=ValueError("<script>"))
    assert "<script" not in head.value and "&lt;script" in head.value
    assert buttons[0].description.startswith("A")  # a button's description is text, never HTML
    buttons[0].click()
    assert "<script" not in answer.value and "ValueError: &lt;script&gt;" in answer.value


def test_the_first_answer_is_the_prediction(work):
    _, buttons, answer = widgets("How many?", ["one", "two"], right="B", came=2)
    assert answer.value == "" and progress.read()["predictions"] == {}
    buttons[0].click()
    assert "Not A: B is what happens." in answer.value and "<code>2</code>" in answer.value
    assert "chosen" in buttons[0]._dom_classes
    buttons[1].click()
    assert "B is what happens." in answer.value and "Not" not in answer.value
    assert "chosen" not in buttons[0]._dom_classes and "chosen" in buttons[1]._dom_classes
    assert progress.read()["predictions"] == {"99_fake/How many?": False}


def test_verdicts():
    assert "✓" in verdict("A", "A", 1) and "✗" in verdict("B", "A", 1)
    assert len(verdict("A", "A", RuntimeError("x" * 5000))) < 900  # torch has messages of pages
    assert "KeyError: " in verdict("A", "A", KeyError())


# ── raises ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_raises_shows_the_message(capsys):
    with raises(RuntimeError):
        torch.ones(2).view(3)
    assert capsys.readouterr().out == "RuntimeError: shape '[3]' is invalid for input of size 2\n"


def test_raises_shows_the_beginning_of_a_long_message(capsys):
    with raises(ValueError):
        raise ValueError("\n".join(["word " * 40] * 20))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 18 and max(map(len, lines)) <= 96


def test_raises_fails_where_nothing_is_raised():
    with pytest.raises(AssertionError, match="nothing was raised; ValueError was expected"):
        with raises(ValueError):
            pass


def test_raises_lets_other_errors_through(capsys):
    with pytest.raises(KeyError):
        with raises(ValueError):
            raise KeyError("x")
    assert capsys.readouterr().out == ""
