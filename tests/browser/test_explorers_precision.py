"""Every control of the explorers of lesson 04, by mouse and by keyboard."""
import pytest
from acts import changes, field, press, says


@pytest.fixture
def explorer(see):
    """Opens lesson 04, runs what an explorer needs, and returns (page seen, the explorer's output area)."""

    def explorer(name):
        seen = see("04_amp")
        seen.run(seen.cell("lesson = start("))
        area = seen.run(seen.cell(f"{name}()"))
        area.locator("svg .xp").first.wait_for()
        return seen, area

    return explorer


def button(area, name):
    return area.get_by_role("button", name=name, exact=True)


def bit(area, place):
    """The button of this bit, counted from the left."""
    return area.locator(f'button[title^="flip bit {place},"]')


def test_float_by_mouse(explorer):
    seen, area = explorer("explore_float")
    for name in ("Next up", "Next down", "Times 2", "Half"):
        changes(seen, area, button(area, name).click)
    for name, bits in (("fp32", 32), ("tf32", 19), ("bf16", 16), ("fp8 e4m3", 8), ("fp8 e5m2", 8), ("fp16", 16)):
        changes(seen, area, button(area, name).click)
        assert area.locator("button[title^='flip bit']:visible").count() == bits
    changes(seen, area, bit(area, 1).click)
    says(area, "the number: -0.0999755859375")
    field(area, "number").fill("2**-20")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "exact, subnormal", "the exponent is 0, so no 1 leads")
    field(area, "number").fill("much")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "“much” is no number")
    for typed, said in (("1e999", "too large: Python's own numbers"), ("", "There is nothing to read")):
        field(area, "number").fill(typed)
        changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
        says(area, said)
    assert seen.errors == []


def test_float_by_keyboard(explorer):
    seen, area = explorer("explore_float")
    changes(seen, area, lambda: press(seen, button(area, "Next up"), "Enter"))
    changes(seen, area, lambda: press(seen, button(area, "bf16"), "Space"))
    changes(seen, area, lambda: press(seen, bit(area, 2), "Space"))
    changes(seen, area, lambda: press(seen, button(area, "Half"), "Enter"))
    assert seen.errors == []


def test_loss_scale_by_mouse_and_keyboard(explorer):
    seen, area = explorer("explore_loss_scale")
    says(area, "% become 0", "in fp16")
    for label in ("scale 2^", "start 2^", "interval"):
        changes(seen, area, lambda label=label: press(seen, field(area, label), "ArrowUp"))
    field(area, "scale 2^").fill("30")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "are too large")
    changes(seen, area, button(area, "bf16").click)
    says(area, "none is lost in bf16")
    changes(seen, area, button(area, "0.25").click)
    says(area, "backoff_factor=0.25")
    changes(seen, area, lambda: press(seen, button(area, "fp16"), "Space"))
    field(area, "inf at steps").fill("1 2 3 x")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "no list of steps")
    field(area, "inf at steps").fill("1 2 3")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "The scaler skipped")
    assert seen.errors == []
