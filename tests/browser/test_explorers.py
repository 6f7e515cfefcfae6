"""Every control of every explorer of lesson 01, by mouse and by keyboard, and the light that goes from an element to its storage slot."""
import pytest
from acts import changes, field, press
from playwright.sync_api import expect


@pytest.fixture
def explorer(see):
    """Opens lesson 01, runs what an explorer needs, and returns (page seen, the explorer's output area)."""

    def explorer(name):
        seen = see("01_tensors")
        seen.run(seen.cell("lesson = start("))
        area = seen.run(seen.cell(f"{name}()"))
        area.locator("svg .cell").first.wait_for()
        return seen, area

    return explorer


def test_strides_by_mouse(explorer):
    seen, area = explorer("explore_strides")
    button = lambda name: area.get_by_role("button", name=name, exact=True)  # noqa: E731
    for start in ("(2, 3)", "(6,)", "(4, 1)", "(2, 3, 4)", "(2, 2, 3, 3)", "(3, 4)"):
        changes(seen, area, button(start).click)
    for operation in ("transpose", "permute", "slice", "unfold", "reshape", "contiguous", "flip", "expand"):
        button(operation).click()
        changes(seen, area, button("Apply").click)
        changes(seen, area, button("Undo").click)
    button("view").click()
    expect(field(area, "shape")).to_have_value("-1")  # the kernel has offered what suits a view
    field(area, "shape").fill("2, 6")
    changes(seen, area, button("Apply").click)
    assert ".view(2, 6)" in area.locator("svg").text_content()
    changes(seen, area, button("Reset").click)
    button("transpose").click()
    changes(seen, area, button("Apply").click)
    changes(seen, area, lambda: field(area, "next view").fill("2, 6"))
    assert "cannot be merged" in area.locator("svg").text_content()
    button("view").click()
    changes(seen, area, button("Apply").click)
    assert "RuntimeError" in area.locator("svg").text_content(), "what torch refuses is shown, not thrown"
    assert seen.errors == []


def test_strides_by_keyboard(explorer):
    seen, area = explorer("explore_strides")
    button = lambda name: area.get_by_role("button", name=name, exact=True)  # noqa: E731
    changes(seen, area, lambda: press(seen, button("(2, 3, 4)"), "Enter"))
    press(seen, button("transpose"), "Enter")
    press(seen, field(area, "dim"), "ArrowUp")
    press(seen, field(area, "other dim"), "ArrowDown", "ArrowDown")
    changes(seen, area, lambda: press(seen, button("Apply"), "Enter"))
    assert ".transpose(1, 0)" in area.locator("svg").text_content()
    press(seen, button("unfold"), "Enter")
    press(seen, field(area, "size"), "ArrowUp", "ArrowDown")
    press(seen, field(area, "step"), "ArrowUp", "ArrowDown")
    press(seen, button("flip"), "Enter")
    changes(seen, area, lambda: press(seen, button("Apply"), "Space"))
    assert "a copy" in area.locator("svg").text_content()
    changes(seen, area, lambda: press(seen, button("Undo"), "Enter"))
    changes(seen, area, lambda: press(seen, field(area, "next view"), "End", "Backspace", "Backspace", "2", ",", "1", "2"))
    changes(seen, area, lambda: press(seen, button("Reset"), "Enter"))
    assert seen.errors == []


def test_an_element_lights_up_its_storage_slot(explorer):
    seen, area = explorer("explore_strides")
    element, slot = area.locator(".elem.k5"), area.locator(".slot.k5 rect")
    width = lambda: slot.evaluate("rect => getComputedStyle(rect).strokeWidth")  # noqa: E731
    dark = width()
    element.hover()
    assert width() != dark, "the mouse lights it up"
    seen.page.mouse.move(0, 0)
    assert width() == dark
    area.locator(".elem.k4").focus()
    seen.page.keyboard.press("Tab")
    assert element.evaluate("e => e === document.activeElement") and width() != dark, "so does Tab"
    assert "storage slot 5" in element.get_attribute("aria-label")


def test_memory_format_by_mouse_and_keyboard(explorer):
    seen, area = explorer("explore_memory_format")
    buttons = area.locator(".widget-toggle-button")
    for index in range(1, buttons.count()):
        if "mod-active" not in buttons.nth(index).get_attribute("class"):
            changes(seen, area, buttons.nth(index).click)
    changes(seen, area, lambda: press(seen, buttons.nth(0), "Enter"))
    for label, key in (("images", "ArrowUp"), ("height", "ArrowDown"), ("width", "ArrowDown")):
        changes(seen, area, lambda label=label, key=key: press(seen, field(area, label), key))
    changes(seen, area, lambda: (field(area, "height").fill("2"), seen.page.keyboard.press("Enter")))
    changes(seen, area, lambda: press(seen, area.get_by_role("button", name="Measure"), "Enter"))
    assert "not measured" not in area.locator("svg").text_content()
    assert seen.errors == []
