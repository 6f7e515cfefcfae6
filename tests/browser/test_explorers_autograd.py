"""Every control of the explorers of lesson 02, by mouse and by keyboard."""
import pytest
from acts import changes, field, press
from playwright.sync_api import expect


@pytest.fixture
def explorer(see):
    """Opens lesson 02, runs what an explorer needs, and returns (page seen, the explorer's output area)."""

    def explorer(name):
        seen = see("02_autograd")
        seen.run(seen.cell("lesson = start("))
        area = seen.run(seen.cell(f"{name}("))
        area.locator("svg .cell").first.wait_for()
        return seen, area

    return explorer


def button(area, name, number=0):
    """The button of that name; where several rows have one, such as "h", the one of that number."""
    return area.get_by_role("button", name=name, exact=True).nth(number)


def said(area):
    return area.locator("svg").text_content()


def test_graph_by_mouse(explorer):
    seen, area = explorer("explore_graph")
    for start in ("one part, used twice", "only additions", "a matrix", "two layers"):
        changes(seen, area, button(area, start).click)
    for name in ("Step", "Step", "Back", "Backward", "Backward"):
        changes(seen, area, button(area, name).click)
    assert "Backward 2 is refused" in said(area) and "a second time" in said(area), "what torch refuses is shown, not thrown"
    changes(seen, area, button(area, "retain_graph").click)
    assert "a second time" not in said(area)
    changes(seen, area, button(area, "Reset").click)
    changes(seen, area, button(area, "x.requires_grad").click)
    for row, what in enumerate(("h is detached", "with torch.no_grad(): h = tanh(a)", "h.add_(1)")):
        changes(seen, area, button(area, "h", row).click)
        assert what in said(area)
        changes(seen, area, button(area, "nothing", row).click)
    changes(seen, area, lambda: field(area, "program").fill("v = w * x; loss = sum(sigmoid(v))"))
    assert "SigmoidBackward0" in said(area)
    expect(button(area, "v", 2)).to_be_visible()
    changes(seen, area, lambda: field(area, "program").fill("loss = open(w)"))
    assert "open is not offered here" in said(area)
    assert seen.errors == []


def test_graph_by_keyboard(explorer):
    seen, area = explorer("explore_graph")
    changes(seen, area, lambda: press(seen, button(area, "only additions"), "Enter"))
    for name, key in (("Step", "Enter"), ("Step", "Space"), ("Back", "Enter"), ("Backward", "Enter"), ("Reset", "Space")):
        changes(seen, area, lambda name=name, key=key: press(seen, button(area, name), key))
    for name in ("retain_graph", "x.requires_grad"):
        changes(seen, area, lambda name=name: press(seen, button(area, name), "Space"))
    for row, name in enumerate(("a", "everything", "w")):  # of "detach", "no_grad for" and "write into"
        changes(seen, area, lambda name=name: press(seen, button(area, name), "Enter"))
        changes(seen, area, lambda row=row: press(seen, button(area, "nothing", row), "Enter"))
    press(seen, field(area, "program"), "End", "*", "2")
    expect(area.locator("svg")).to_contain_text("loss = sum(h) * 2")
    expect(area.locator("svg")).to_contain_text("MulBackward0")
    assert seen.errors == []


def test_what_shares_a_storage_lights_up(explorer):
    seen, area = explorer("explore_graph")
    changes(seen, area, button(area, "only additions").click)
    changes(seen, area, button(area, "two layers").click)
    saved = area.locator('[aria-label="self = h, 12 B"]')
    other = area.locator('[aria-label="result = h, 12 B"] rect')
    width = lambda: other.evaluate("rect => getComputedStyle(rect).strokeWidth")  # noqa: E731
    dark = width()
    saved.hover()
    assert width() != dark, "the mouse lights it up"
    seen.page.mouse.move(0, 0)
    assert width() == dark
    saved.focus()
    assert width() != dark, "so does the keyboard"


def test_accumulation_by_mouse_and_keyboard(explorer):
    seen, area = explorer("explore_accumulation")
    actions = ("A.backward()", "B.backward()", "(A + B).backward()", "optimizer.step()", "optimizer.zero_grad(set_to_none=False)",
               "optimizer.zero_grad()", "w.requires_grad_(False)", "A.backward()")
    for name in actions:
        changes(seen, area, button(area, name).click)
    assert "✗ refused" in said(area) and "does not require grad" in said(area)
    for name in ("SGD with momentum", "SGD with weight decay", "Adam", "SGD", "Undo", "Reset"):
        changes(seen, area, button(area, name).click)
    for name in actions:
        changes(seen, area, lambda name=name: press(seen, button(area, name), "Enter"))
    for name, key in (("Adam", "Enter"), ("Undo", "Space"), ("Reset", "Enter")):
        changes(seen, area, lambda name=name, key=key: press(seen, button(area, name), key))
    assert ".grad is None: no backward() has run yet" in said(area)
    assert seen.errors == []
