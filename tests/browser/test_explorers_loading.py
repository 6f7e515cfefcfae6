"""Every control of the explorers of lesson 05, by mouse and by keyboard."""
import pytest
from acts import changes, field, press, says


@pytest.fixture
def explorer(see):
    """Opens lesson 05, runs what an explorer needs, and returns (page seen, the explorer's output area)."""

    def explorer(name):
        seen = see("05_dataloader")
        seen.run(seen.cell("lesson = start("))
        area = seen.run(seen.cell(f"{name}()"))
        area.locator("svg .xp").first.wait_for()
        return seen, area

    return explorer


def button(area, name):
    return area.get_by_role("button", name=name, exact=True)


def test_loader_by_mouse_and_keyboard(explorer):
    seen, area = explorer("explore_loader")
    for label in ("workers", "work ms", "step ms", "transfer ms", "start ms", "batches", "batch 3 ×"):
        changes(seen, area, lambda label=label: press(seen, field(area, label), "ArrowUp"))
    for label in ("cores", "prefetch"):
        press(seen, field(area, label), "ArrowUp")
    field(area, "cores").fill("1")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "The cores bound it")
    changes(seen, area, button(area, "as they are ready").click)
    changes(seen, area, lambda: press(seen, button(area, "in order"), "Space"))
    changes(seen, area, button(area, "Measure here").click)
    says(area, "measured here: 12 batches of 16 JPEG digits")
    assert seen.errors == []


def test_collate_by_mouse_and_keyboard(explorer):
    seen, area = explorer("explore_collate")
    changes(seen, area, button(area, "by length").click)
    changes(seen, area, lambda: press(seen, button(area, "as they come"), "Space"))
    for label in ("batch size", "padding"):
        changes(seen, area, lambda label=label: press(seen, field(area, label), "ArrowUp"))
    field(area, "lengths").fill("5 2 9")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "(3, 9)")
    field(area, "lengths").fill("5 2 many")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "no list of lengths")
    assert seen.errors == []
