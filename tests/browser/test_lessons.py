"""The lessons as a learner meets them: opened, run, answered, reloaded."""
import pytest

from course_utils.engine import notebooks

LESSONS = notebooks.lessons()


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_cell_runs_and_nothing_complains_in_either_theme(see, lesson):
    seen = see(lesson)
    assert seen.page.locator(".jp-Dialog").count() == 0 and seen.page.locator(".Toastify__toast").count() == 0
    seen.run_all()
    assert seen.page.locator('[data-mime-type="application/vnd.jupyter.error"], .jp-mod-stderr').count() == 0
    assert seen.page.get_by_text("Error displaying widget").count() == 0
    assert seen.page.locator(".course-predict").count() >= (1 if lesson == "00_start_here" else 5)
    pictures = "[...document.querySelectorAll('.jp-OutputArea-output svg')]"
    assert seen.page.evaluate(f"{pictures}.filter(svg => svg.getBoundingClientRect().width > 901).length") == 0
    for shade in ("light", "dark"):
        seen.choose_theme(f"JupyterLab {shade.title()}")
        assert seen.page.get_attribute("body", "data-jp-theme-light") == str(shade == "light").lower()
        assert all(picture.stat().st_size > 50_000 for picture in seen.pictures(f"{lesson}-{shade}"))
    assert seen.errors == []


def test_an_exercise_is_solved_by_typing_and_stays_solved(see, lab):
    seen = see("00_start_here")
    seen.run_all()
    exercise, check = seen.cell("def total_elements"), seen.cell("check(total_elements)")
    assert "not attempted" in check.locator(".jp-Cell-outputArea").inner_text()

    seen.write(exercise, "...", "return sum(shape)")
    seen.run(exercise)
    said = seen.run(check).inner_text()
    assert "wrong" in said and "adds the sizes" in said

    seen.write(exercise, "return sum(shape)", "return torch.Size(shape).numel()")
    seen.run(exercise)
    assert "total_elements: right" in seen.run(check).inner_text()
    seen.page.keyboard.press("Control+s")
    seen.page.wait_for_selector(".jp-mod-dirty", state="detached")
    assert any("torch.Size(shape).numel()" in "".join(cell["source"]) for cell in lab.notebook("00_start_here")["cells"])

    seen.open()
    assert "torch.Size(shape).numel()" in seen.cell("def total_elements").inner_text()
    assert "1 of 1 exercises solved" in seen.run(seen.cell("lesson = start(")).inner_text()
    assert "1 of 1" in seen.run(seen.cell("progress()")).inner_text()
    assert seen.errors == []


def test_a_hint_and_a_prediction_answer_to_the_keyboard(see):
    seen = see("00_start_here")
    seen.run_all()
    check = seen.cell("check(total_elements)")
    seen.enter(check)
    seen.page.keyboard.press("Control+End")
    seen.page.keyboard.type("\nhint(total_elements)")
    assert "Hint 1 of 2" in seen.run(check).inner_text()

    question = seen.page.locator(".course-predict").first
    question.get_by_role("button").nth(0).focus()
    seen.page.keyboard.press("Enter")
    question.get_by_text("Not A: B is what happens.").wait_for()
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Enter")
    question.get_by_text("B is what happens.", exact=False).wait_for()
    assert seen.errors == []
