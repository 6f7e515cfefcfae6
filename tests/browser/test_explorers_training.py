"""Every control of the explorers of lesson 03, by mouse and by keyboard."""
import pytest
from acts import changes, field, press, says, slider


@pytest.fixture
def explorer(see):
    """Opens lesson 03, runs what an explorer needs, and returns (page seen, the explorer's output area)."""

    def explorer(name):
        seen = see("03_training")
        seen.run(seen.cell("lesson = start("))
        seen.run(seen.cell("import course_utils.toolkit.training"))
        area = seen.run(seen.cell(f"{name}()"))
        area.locator("svg .frame").first.wait_for()
        return seen, area

    return explorer


def test_descent_by_mouse(explorer):
    seen, area = explorer("explore_descent")
    button = lambda name: area.get_by_role("button", name=name, exact=True)  # noqa: E731
    says(area, "torch.optim.SGD([p], lr=0.05)")
    changes(seen, area, button("Keep path").click)
    for surface in ("round bowl", "curved valley", "saddle", "many dips", "narrow valley"):
        changes(seen, area, button(surface).click)
    for name in ("SGD with momentum", "Nesterov", "Adagrad", "RMSprop", "Adam", "AdamW", "SGD"):
        changes(seen, area, button(name).click)
    changes(seen, area, button("Clear").click)
    changes(seen, area, button("forget zero_grad()").click)
    says(area, "zero_grad() is forgotten")
    changes(seen, area, button("forget zero_grad()").click)
    rate = slider(area, "rate").locator(".noUi-base").bounding_box()
    changes(seen, area, lambda: seen.page.mouse.click(rate["x"] + 0.9 * rate["width"], rate["y"] + rate["height"] / 2))
    says(area, "diverges")  # nine tenths to the right is a rate above 1
    steps = slider(area, "steps").locator(".noUi-handle")
    box = steps.bounding_box()
    seen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    seen.page.mouse.down()
    changes(seen, area, lambda: seen.page.mouse.move(box["x"] - 100, box["y"] + box["height"] / 2, steps=4))
    seen.page.mouse.up()
    assert seen.errors == []


def test_descent_by_keyboard(explorer):
    seen, area = explorer("explore_descent")
    button = lambda name: area.get_by_role("button", name=name, exact=True)  # noqa: E731
    changes(seen, area, lambda: press(seen, button("SGD with momentum"), "Enter"))
    for name, key in (("rate", "ArrowLeft"), ("momentum", "ArrowRight"), ("steps", "ArrowUp")):
        changes(seen, area, lambda name=name, key=key: press(seen, slider(area, name).locator(".noUi-handle"), key))
    for label, typed in (("weight decay", "0.3"), ("start x", "2.5"), ("start y", "-1")):
        changes(seen, area, lambda label=label, typed=typed: (field(area, label).fill(typed), seen.page.keyboard.press("Enter")))
    says(area, "starts at (2.5, -1)", "weight_decay=0.3")
    field(area, "start x").fill("99")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    says(area, "starts at (4, -1)")  # what lies outside of the map is brought to its border
    changes(seen, area, lambda: press(seen, button("forget zero_grad()"), "Space"))
    changes(seen, area, lambda: press(seen, button("Keep path"), "Enter"))
    changes(seen, area, lambda: press(seen, button("Adam"), "Enter"))
    changes(seen, area, lambda: press(seen, button("Clear"), "Enter"))
    changes(seen, area, lambda: press(seen, button("saddle"), "Space"))
    assert seen.errors == []


def test_schedule_by_mouse(explorer):
    seen, area = explorer("explore_schedule")
    button = lambda name: area.get_by_role("button", name=name, exact=True)  # noqa: E731
    changes(seen, area, button("epochs").click)
    says(area, "240 times, not 12")
    for name in ("StepLR", "MultiStepLR", "ExponentialLR", "LinearLR", "PolynomialLR", "CosineAnnealingWarmRestarts", "CyclicLR",
                 "LambdaLR", "ReduceLROnPlateau", "OneCycleLR"):
        changes(seen, area, button(name).click)
    says(area, "Tried to step 13 times")  # torch's error is shown, not thrown
    changes(seen, area, button("epoch").click)
    changes(seen, area, button("batches").click)
    changes(seen, area, button("batch").click)
    for accident in ("first 3 optimizer steps skipped", "3 skipped midway", "scheduler.step() comes first", "none"):
        changes(seen, area, button(accident).click)
    field(area, "resume at").fill("5")
    changes(seen, area, lambda: seen.page.keyboard.press("Enter"))
    for loaded in ("only the optimizer's", "only the scheduler's", "neither", "both state_dicts"):
        changes(seen, area, button(loaded).click)
    changes(seen, area, button("logarithmic").click)
    changes(seen, area, button("linear").click)
    assert seen.errors == []


def test_schedule_by_keyboard(explorer):
    seen, area = explorer("explore_schedule")
    button = lambda name: area.get_by_role("button", name=name, exact=True)  # noqa: E731
    changes(seen, area, lambda: press(seen, button("CosineAnnealingWarmRestarts"), "Enter"))
    for label, key in (("epochs", "ArrowDown"), ("batches", "ArrowUp"), ("warm-up", "ArrowUp"), ("restarts", "ArrowDown"),
                       ("T_mult", "ArrowUp"), ("resume at", "ArrowUp")):
        changes(seen, area, lambda label=label, key=key: press(seen, field(area, label), key))
    changes(seen, area, lambda: press(seen, button("neither"), "Space"))
    changes(seen, area, lambda: press(seen, button("scheduler.step() comes first"), "Enter"))
    changes(seen, area, lambda: press(seen, button("epoch"), "Enter"))
    changes(seen, area, lambda: press(seen, button("logarithmic"), "Enter"))
    says(area, "Resumed at epoch 1, neither loaded")
    assert seen.errors == []
