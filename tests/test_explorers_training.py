"""The explorers of lesson 03 without a browser: what they draw and say is held against torch, called here anew."""
import math
import random
import re
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch.optim import lr_scheduler

from course_utils.explorers import _contours, descent, schedule


def picture(svg):
    """The parsed picture; its texts lie inside, if a letter is 8.2 px wide, or 7.2 px where it is small."""
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.get("viewBox").split()[2:])
    assert width <= 900
    for node in root.iter():
        if node.tag.endswith("text"):
            x, y = float(node.get("x")), float(node.get("y"))
            assert 0 <= x and 0 <= y <= height, node.text
            kinds = set(node.get("class").split())
            if not {"mid", "end", "mono"} & kinds:
                assert x + (7.2 if "small" in kinds else 8.2) * len(node.text or "") <= width + 10, node.text
    for node in (node for inner in of_class(root, "map") for node in of_class(inner, "mid", "strong")):
        assert 4 * len(node.text) <= float(node.get("x")) <= descent.MAP[2] - 4 * len(node.text), node.text
    assert "nan" not in svg.lower() and 'id="' not in svg and "<pattern" not in svg
    return root


def every(*choices):
    return list(product(*choices))


def of_class(root, *names):
    return [node for node in root.iter() if set(names) <= set(node.get("class", "").split())]


# ---- contours


def test_a_contour_is_closed_and_lies_on_its_level():
    xs, ys = torch.linspace(-2, 2, 41, dtype=torch.float64), torch.linspace(-1, 1, 31, dtype=torch.float64)
    found = _contours.contours(xs[:, None] ** 2 + ys**2, xs, ys, (0.25, 2.25, 99.0))
    (ring,), cut, (everything,) = found.values()
    assert all(abs(math.hypot(x, y) - 0.5) < 0.01 for x, y in ring)
    assert all(math.dist(a, b) < 0.15 for a, b in pairwise([*ring, ring[0]]))
    area = sum(a[0] * b[1] - a[1] * b[0] for a, b in pairwise([*ring, ring[0]])) / 2
    assert area == pytest.approx(math.pi / 4, rel=0.02), "the low side lies on the left"
    on_border = [abs(abs(y) - 1) < 1e-6 for loop in cut for _, y in loop]
    assert any(on_border) and all(flat or abs(math.hypot(x, y) - 1.5) < 0.01
                                  for (x, y), flat in zip((p for loop in cut for p in loop), on_border))
    assert [max(abs(point[k]) for point in everything) for k in (0, 1)] == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize("seed", range(5))
def test_every_crossing_of_a_random_field_belongs_to_one_line(seed):
    values = torch.rand(9, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = _contours.contours(values, torch.arange(9.0), torch.arange(8.0), (0.5,))[0.5]
    low = torch.nn.functional.pad((values < 0.5).int(), (1, 1, 1, 1))
    crossings = int((low[1:] != low[:-1]).sum() + (low[:, 1:] != low[:, :-1]).sum())
    assert sum(map(len, found)) == crossings and all(len(loop) > 2 for loop in found)


# ---- descent


def by_hand(state):
    """The path by the formulas of the manual, in floats, for SGD without and with momentum."""
    loss, momentum = descent.SURFACES[state.surface].loss, 0.0 if state.optimizer == "SGD" else state.momentum
    p, velocity, summed, points = list(state.start), [0.0, 0.0], [0.0, 0.0], [state.start]
    for _ in range(state.steps):
        q = torch.tensor(p, dtype=torch.float64, requires_grad=True)
        gradient = torch.autograd.grad(loss(*q.unbind()), q)[0].tolist()
        summed = [s + g for s, g in zip(summed, gradient)] if state.forget else gradient
        used = [s + state.decay * a for s, a in zip(summed, p)]
        velocity = [momentum * v + g for v, g in zip(velocity, used)]
        p = [a - state.rate * v for a, v in zip(p, velocity)]
        points.append(tuple(p))
    return points


@pytest.mark.parametrize("surface, optimizer", every(descent.SURFACES, ("SGD", "SGD with momentum")))
@pytest.mark.parametrize("forget, decay", every((False, True), (0.0, 0.3)))
def test_the_path_of_sgd_follows_the_formula(surface, optimizer, forget, decay):
    state = descent.State(surface, optimizer, 0.01, 0.7, decay, 12, descent.SURFACES[surface].start, forget)
    run = descent.descend(state)
    assert run.steps == 12 and len(run.points) == 13
    for found, expected in zip(run.points, by_hand(state), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("optimizer", descent.OPTIMIZERS)
def test_the_line_of_code_makes_the_optimizer_that_ran(optimizer):
    for decay, rate in every((0.0, 0.1), (0.01, 0.3)):
        state = descent.State("curved valley", optimizer, rate, 0.8, decay, 25, (-3.2, 2.2))
        run = descent.descend(state)
        p = torch.tensor(state.start, dtype=torch.float64, requires_grad=True)
        again = eval(descent.code(state), {"torch": torch, "p": p})
        for point, loss in zip(run.points, run.losses, strict=True):
            now = descent.SURFACES[state.surface].loss(*p.unbind())
            assert tuple(p.tolist()) == point and now.item() == loss
            again.zero_grad()
            now.backward()
            again.step()


def test_forgotten_zero_grad_is_momentum_one():
    state = descent.State("narrow valley", "SGD", 0.01, steps=60, forget=True)
    heavy = replace(state, optimizer="SGD with momentum", momentum=1.0, forget=False)
    for a, b in zip(descent.descend(state).points, descent.descend(heavy).points, strict=True):
        assert a == pytest.approx(b, rel=1e-9, abs=1e-9)
    assert any("momentum 1" in words for words in descent.sentences(state))


@pytest.mark.parametrize("surface, optimizer", every(("round bowl", "narrow valley"), ("SGD", "SGD with momentum", "Nesterov")))
@pytest.mark.parametrize("decay, momentum", every((0.0, 1.5), (0.3, 0.9)))
def test_the_largest_rate_divides_what_converges_from_what_does_not(surface, optimizer, decay, momentum):
    state = descent.State(surface, optimizer, 1.0, momentum, decay, 300, (0.1, 0.1))
    limit = descent.largest_rate(state)
    below, above = (descent.descend(replace(state, rate=limit * factor)) for factor in (0.95, 1.05))
    assert below.losses[-1] < 1e-6 * below.losses[0], "the limit is not too high"
    assert above.diverged, "nor too low"


@pytest.mark.parametrize("name", descent.SURFACES)
def test_the_surfaces_are_what_they_say(name):
    surface = descent.SURFACES[name]
    for minimum in surface.minima:
        p = torch.tensor(minimum, dtype=torch.float64)
        assert torch.autograd.functional.jacobian(lambda q: surface.loss(*q), p).abs().max() < 1e-12
        curvatures = torch.linalg.eigvalsh(torch.autograd.functional.hessian(lambda q: surface.loss(*q), p))
        assert curvatures[0] > 0 and (not surface.curvature or curvatures[-1] == pytest.approx(surface.curvature))
    grid = torch.cartesian_prod(torch.linspace(-4, 4, 201), torch.linspace(-3, 3, 201)).double()
    least = surface.loss(*p)
    assert (surface.loss(*grid.T) >= least - 1e-12).all() and surface.loss(*grid.T).max() < descent.TOO_HIGH
    x, y = 0.7, -1.3
    formula = surface.formula.replace("²", "**2").replace("·", "*").replace("−", "-").replace("2x", "2*x").replace("2y", "2*y")
    value = surface.loss(*torch.tensor([x, y], dtype=torch.float64)).item()
    assert eval(formula, {"x": x, "y": y, "cos": math.cos}) == pytest.approx(value)


def test_the_drawn_path_is_the_run():
    state = descent.State("round bowl", "SGD with momentum", 0.1, 0.5, steps=20, start=(-3.0, 2.0))
    root, run = picture(descent.draw(state)), descent.descend(state)
    dots = of_class(root, "dot")
    expected = [((x + 4) * 70, (3 - y) * 70) for x, y in run.points]
    assert [(float(dot.get("cx")), float(dot.get("cy"))) for dot in dots] == [pytest.approx(at, abs=0.06) for at in expected]
    first = of_class(root, "path")[0].get("d")
    assert [tuple(map(float, point.split())) for point in first[1:].split("L")] == [pytest.approx(at, abs=0.06) for at in expected]
    assert not of_class(root, "cross") and f"{run.losses[-1]:.3g}" in {node.text for node in root.iter()}


@pytest.mark.parametrize("change", [
    {"rate": 0.08}, {"rate": 10.0}, {"rate": 10.0, "surface": "curved valley"}, {"surface": "curved valley", "rate": 1.0, "forget": True},
    {"surface": "saddle", "rate": 3.0, "optimizer": "Nesterov", "momentum": 0.9, "start": (-3.2, 2.2)},
])
def test_divergence_is_a_cross_and_a_word(change):
    state = replace(descent.State(), **change)
    run, root = descent.descend(state), picture(descent.draw(state))
    assert run.diverged and run.steps <= state.steps and all(loss <= descent.TOO_HIGH for loss in run.losses[:-1])
    assert of_class(root, "cross") and "diverges" in {node.text for node in of_class(root, "bad")}
    assert "✗ It diverges" in descent.describe(state)
    numbers = [float(n) for node in of_class(root, "path") for n in re.findall(r"-?\d+\.\d", node.get("d"))]
    assert all(abs(n) < 1e7 for n in numbers), "no browser draws a line that long"


def test_the_outcome_does_not_call_a_rise_a_success():
    assert descent.outcome(descent.State(steps=1, rate=0.07))[0] is False
    assert descent.outcome(descent.State(surface="round bowl", start=(0.0, 0.0)))[0] is False, "at the minimum nothing falls"
    good, said = descent.outcome(descent.State())
    assert good and said.startswith("The loss goes from 27.4 to")
    assert "1 step." in descent.outcome(descent.State(steps=1, rate=0.01))[1]


def test_the_words_at_the_ends_of_the_path_do_not_lie_on_each_other():
    words = lambda state: [node.text for node in of_class(picture(descent.draw(state)), "mid", "strong")]  # noqa: E731
    assert words(descent.State()) == ["start", "end"]
    assert words(descent.State(rate=1e-4, steps=1, start=(4.0, 3.0))) == ["start, end"]
    one = of_class(picture(descent.draw(descent.State("many dips", steps=1))), "mid")
    assert [node.text for node in one if float(node.get("x")) >= descent.CHART[0]] == ["0", "1"], "there are no parts of steps"


def test_a_loss_that_hardly_moves_has_numbers_beside_it():
    for state in (descent.State("curved valley", "RMSprop", 0.025, steps=1, start=(0.0, 0.0)), descent.State(rate=1e-4, steps=1)):
        shown = of_class(picture(descent.draw(state)), "end", "small")
        assert any(descent.CHART[0] - 20 < float(node.get("x")) < descent.CHART[0] for node in shown)


def test_what_torch_refuses_is_a_sentence():
    for change in ({"optimizer": "Adam", "momentum": 1.0}, {"optimizer": "Nesterov", "momentum": 0.0}):
        state = replace(descent.State(), **change)
        assert descent.outcome(state)[1].startswith("ValueError: ")
        assert "ValueError" in descent.describe(state)
        picture(descent.draw(replace(descent.State(), kept=state)))
        picture(descent.draw(state))


def test_every_control_of_the_descent_changes_the_picture():
    ui = descent.build()
    seen = [ui.picture.value]
    changes = [("optimizer", name) for name in list(descent.OPTIMIZERS)[1:]]
    changes += [("rate", 0.02), ("momentum", 0.5), ("steps", 20), ("decay", 0.2), ("x", 2.5), ("y", -1.0), ("forget", True)]
    changes += [("surface", name) for name in descent.SURFACES if name != ui.surface.value]
    for name, value in changes:
        getattr(ui, name).value = value
        seen.append(ui.picture.value)
    assert len(set(seen)) == len(seen)
    for svg in seen:
        picture(svg)
    assert ui.state == descent.State("many dips", "AdamW", 0.02, 0.5, 0.2, 20, descent.SURFACES["many dips"].start, True)


def test_a_kept_path_stays_until_it_is_cleared():
    ui = descent.build()
    first = ui.picture.value
    ui.keep.click()
    ui.optimizer.value = "Adam"
    kept = ui.picture.value
    assert "Kept, dashed: torch.optim.SGD([p], lr=0.05): The loss goes from 27.4" in descent.describe(ui.state)
    assert len(of_class(picture(kept), "old")) == 3  # on the map, in the chart, in the legend
    ui.surface.value = "saddle"
    assert len(of_class(picture(ui.picture.value), "old")) == 2, "another surface's path is not drawn on this one"
    ui.clear.click()
    ui.optimizer.value, ui.surface.value = "SGD", "narrow valley"
    assert ui.picture.value == first


def test_momentum_is_offered_where_it_is_used():
    ui = descent.build()
    for name, (_, used) in descent.OPTIMIZERS.items():
        ui.optimizer.value = name
        assert (ui.momentum.layout.display != "none") == bool(used)


def test_settings_at_the_ends_of_their_ranges_draw():
    rng = random.Random(0)
    for _ in range(40):
        start = rng.choice((-4.0, 0.0, 4.0)), rng.choice((-3.0, 0.0, 3.0))
        surface, optimizer = rng.choice(list(descent.SURFACES)), rng.choice(list(descent.OPTIMIZERS))
        rate, momentum = rng.choice((1e-4, 0.05, 1.0, 10.0)), rng.choice((0.0, 0.5, 1.0))
        decay, steps = rng.choice((0.0, 2.0)), rng.choice((1, 150))
        state = descent.State(surface, optimizer, rate, momentum, decay, steps, start, rng.random() < 0.3)
        picture(descent.draw(state))
        assert descent.describe(state).startswith(descent.code(state))


def test_the_descent_runs_where_gradients_are_off():
    descent.descend.cache_clear()
    with torch.no_grad():
        run = descent.descend(descent.State())
    assert run.losses[-1] < run.losses[0]


# ---- schedules


def rates_of(state):
    """The rates by torch alone: an optimizer that steps at each batch, a scheduler made from the line of code that is shown."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=schedule.RATE, momentum=0.9)
    scheduler = eval(schedule.code(state), {**vars(lr_scheduler), "optimizer": optimizer})
    rates = []
    for batch in range(state.total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if state.per == "batch" or (batch + 1) % state.batches == 0:
            scheduler.step()
    return rates


STEPPED = [name for name in schedule.SCHEDULERS if name != "ReduceLROnPlateau"]


@pytest.mark.parametrize("name, per, unit, warmup", every(STEPPED, schedule.UNITS, schedule.UNITS.values(), (0, 3)))
def test_the_rates_are_those_of_torch(name, per, unit, warmup):
    state = schedule.State(name, per, unit, epochs=9, batches=7, warmup=warmup, mult=2)
    run = schedule.simulate(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert run.rates == rates_of(state) and run.error == "" and run.warned == ()
        except ValueError as error:
            assert run.error == f"ValueError: {error}" and "total_steps" in schedule.code(state)


@pytest.mark.parametrize("name, per", every(schedule.SCHEDULERS, schedule.UNITS))
def test_a_whole_resume_changes_nothing(name, per):
    state = schedule.State(name, per, schedule.UNITS[per], warmup=0 if name == "ReduceLROnPlateau" else 2)
    whole, resumed = schedule.simulate(state), schedule.simulate(replace(state, resume=5))
    assert whole.rates == resumed.rates and len(whole.rates) == 240 and not whole.error
    assert [good for good, words in schedule.findings(replace(state, resume=5)) if "without a stop" in words] == [True]


@pytest.mark.parametrize("loaded", schedule.LOADED[1:])
def test_what_a_resume_forgets_is_seen_in_the_rates(loaded):
    state = schedule.State(resume=6, loaded=loaded)
    run, whole = schedule.simulate(state), schedule.simulate(replace(state, resume=0))
    assert run.rates[:120] == whole.rates[:120] and run.rates[120:] != whole.rates[120:]
    assert (run.rates[120] == whole.rates[120]) == (loaded == "only the optimizer's")
    first = next(k for k, (a, b) in enumerate(zip(run.rates, whole.rates)) if a != b)
    assert any(f"batch {first} is the first" in words and not good for good, words in schedule.findings(state))


def test_a_forgotten_sequential_scheduler_multiplies_what_is_left():
    state = schedule.State(warmup=2, resume=6, loaded="only the optimizer's")
    assert max(schedule.simulate(state).rates) > 5 * schedule.RATE
    assert any("times the highest that was meant" in words for _, words in schedule.findings(state))


def test_the_wave_of_a_cosine_that_counts_epochs_and_is_stepped_per_batch():
    state = schedule.State(unit="epochs")
    run = schedule.simulate(state)
    assert run.rates[12] < 1e-9 and run.rates[24] == pytest.approx(0.1) and run.over == 11
    assert schedule.rises(run.rates) == 10
    said = [words for good, words in schedule.findings(state) if not good]
    assert any("count epochs, but it is stepped per batch: 240 times, not 12" in words for words in said)
    assert any("begins to rise: 10; meant: 0" in words for words in said)
    root = picture(schedule.draw(state))
    assert "its 12 steps are over" in {node.text for node in root.iter()} and of_class(root, "meant")


def test_too_few_steps_go_part_of_the_way():
    state = schedule.State(per="epoch")
    assert min(schedule.simulate(state).rates) > 0.099
    assert any("12 times, not 240. It goes 5 % of its way" in words for _, words in schedule.findings(state))


def test_what_counts_the_same_is_no_mismatch():
    assert all(good for good, _ in schedule.findings(schedule.State(unit="epochs", batches=1)))
    assert any("per epoch: once, not 20." in words for _, words in schedule.findings(schedule.State(per="epoch", epochs=1)))


def test_a_rate_as_high_as_meant_is_not_called_higher():
    state = schedule.State("ExponentialLR", unit="epochs", warmup=40, epochs=40)  # 0.1 where 0.0999 was meant
    assert not any("times the highest" in words for _, words in schedule.findings(state))


def test_two_marks_at_one_place_have_their_words_on_two_lines():
    root = picture(schedule.draw(schedule.State(unit="epochs", batches=12, resume=1)))
    heights = {node.text: node.get("y") for node in of_class(root, "strong", "small")}
    assert heights["resumed"] != heights["its 12 steps are over"]


def test_one_cycle_beyond_its_steps_is_an_error_in_words():
    state = schedule.State("OneCycleLR", unit="epochs")
    run, root = schedule.simulate(state), picture(schedule.draw(state))
    assert len(run.rates) == 13 and run.steps == 12
    said = "After batch 12, in epoch 0, torch raises ValueError: Tried to step 13 times. The specified number of total steps is 12."
    assert (False, said) in schedule.findings(state)
    assert "ValueError" in {node.text for node in of_class(root, "bad")} and of_class(root, "cross")
    assert "✗ " + said in schedule.describe(state)


def test_a_scheduler_that_cannot_be_made_is_an_error_in_words():
    state = schedule.State("ReduceLROnPlateau", warmup=2)
    assert schedule.simulate(state).rates == []
    ((good, words),) = schedule.findings(state)
    assert not good and "When it is made, torch raises ValueError: SequentialLR does not support" in words
    picture(schedule.draw(state))
    picture(schedule.draw(state, log=True))


@pytest.mark.parametrize("name", schedule.SCHEDULERS)
def test_the_warning_about_the_order_is_torchs_own(name):
    for accident in (schedule.ACCIDENTS[1], schedule.ACCIDENTS[3]):
        state = schedule.State(name, accident=accident)
        optimizer, scheduler = schedule.begin(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
        run = schedule.simulate(state)
        assert [words for _, words in run.warned] == [str(w.message) for w in caught] and all(batch == 0 for batch, _ in run.warned)
        said = " ".join(words for _, words in schedule.findings(state))
        assert ("torch warns: Detected call of `lr_scheduler.step()` before" in said) == bool(caught)
        assert ("nothing warns" in said) != bool(caught)
    assert not schedule.simulate(schedule.State(name, accident=schedule.ACCIDENTS[2])).warned


def test_skipped_steps_leave_the_rates_and_are_crossed_out():
    state = schedule.State(accident=schedule.ACCIDENTS[2])
    assert schedule.simulate(state).rates == schedule.simulate(schedule.State()).rates
    assert list(schedule.skipped(state)) == [120, 121, 122]
    assert len(of_class(picture(schedule.draw(state)), "cross")) == 3
    assert any(words.startswith("Batches 120 to 122 change no weight") for _, words in schedule.findings(state))


def test_scheduler_first_shifts_the_curve_by_one():
    state = schedule.State(accident=schedule.ACCIDENTS[3])
    meant = schedule.simulate(schedule.State()).rates
    assert schedule.simulate(state).rates[:-1] == meant[1:]
    epochs = schedule.State(per="epoch", unit="epochs")
    early = schedule.simulate(replace(epochs, accident=schedule.ACCIDENTS[3])).rates
    assert early[:-20] == schedule.simulate(epochs).rates[20:]


def test_a_plateau_is_found_in_the_loss_that_is_drawn():
    state = schedule.State("ReduceLROnPlateau", "epoch", "epochs")
    run = schedule.simulate(state)
    optimizer, scheduler = schedule.begin(state)
    for epoch in range(12):
        losses = run.losses[20 * epoch : 20 * epoch + 20]
        assert run.rates[20 * epoch : 20 * epoch + 20] == [optimizer.param_groups[0]["lr"]] * 20
        scheduler.step(sum(losses) / 20)
    assert len(set(run.rates)) > 1, "the loss comes to rest"
    assert of_class(picture(schedule.draw(state)), "loss") and not of_class(picture(schedule.draw(schedule.State())), "loss")
    hasty = schedule.State("ReduceLROnPlateau", "batch", "epochs")
    assert schedule.simulate(hasty).rates[-1] < 1e-6
    assert any("change next to nothing" in words for _, words in schedule.findings(hasty))


def test_the_curve_on_paper_is_the_curve():
    state = schedule.State("StepLR", epochs=4, batches=3)
    rates = schedule.simulate(state).rates
    d = next(node for node in of_class(picture(schedule.draw(state)), "rate")).get("d")
    levels = [float(v) for v in re.findall(r"[MV](?:[\d.]+ )?([\d.]+)", d)]
    assert len(levels) == len(set(rates)) == 3
    top, zero = levels[0], levels[0] + (levels[1] - levels[0]) / 0.9  # the first fall is 90 % of the way to zero
    assert [(zero - level) / (zero - top) * 0.1 for level in levels] == pytest.approx([0.1, 0.01, 0.001], abs=1e-4)
    logarithmic = next(node for node in of_class(picture(schedule.draw(state, log=True)), "rate")).get("d")
    a, b, c = (float(v) for v in re.findall(r"[MV](?:[\d.]+ )?([\d.]+)", logarithmic))
    assert b - a == pytest.approx(c - b, abs=0.3)


def test_rises_are_counted_once_each():
    assert [schedule.rises(rates) for rates in ([1], [1, 1], [1, 2, 3], [3, 2, 2, 3, 3, 4, 1], [1, 2, 1, 2])] == [0, 0, 1, 1, 2]


def test_every_control_of_the_schedule_changes_the_picture():
    ui = schedule.build()
    seen = [ui.picture.value]
    changes = [("scheduler", name) for name in schedule.SCHEDULERS if name != ui.scheduler.value]
    changes += [("scheduler", "CosineAnnealingWarmRestarts"), ("restarts", 1), ("mult", 2), ("warmup", 2), ("epochs", 8), ("batches", 10)]
    changes += [("unit", "epochs"), ("per", "epoch"), ("resume", 3), *(("loaded", name) for name in schedule.LOADED[1:])]
    changes += [*(("accident", name) for name in schedule.ACCIDENTS[1:]), ("log", "logarithmic")]
    for name, value in changes:
        getattr(ui, name).value = value
        seen.append(ui.picture.value)
    assert all(a != b for a, b in pairwise(seen))
    for svg in seen:
        picture(svg)
    shown = {name: getattr(ui, name).layout.display != "none" for name in ("restarts", "mult", "loaded")}
    assert all(shown.values())
    ui.scheduler.value, ui.resume.value = "StepLR", 0
    assert all(getattr(ui, name).layout.display == "none" for name in shown)


def test_settings_at_the_ends_of_their_ranges_draw_without_a_traceback():
    rng = random.Random(0)
    for _ in range(100):
        state = schedule.State(
            rng.choice(list(schedule.SCHEDULERS)), rng.choice(list(schedule.UNITS)), rng.choice(list(schedule.UNITS.values())),
            rng.choice((1, 2, 12, 40)), rng.choice((1, 2, 30)), rng.choice((0, 1, 40)), rng.choice((0, 6)), rng.choice((1, 3)),
            rng.choice((0, 1, 39)), rng.choice(schedule.LOADED), rng.choice(schedule.ACCIDENTS))
        picture(schedule.draw(state, log=rng.random() < 0.5))
        run = schedule.simulate(state)
        assert not run.error or run.error.startswith("ValueError: "), (state, run.error)
        assert schedule.findings(state) and schedule.describe(state).startswith(schedule.code(state))


def test_there_is_no_such_epoch():
    assert any("There is no epoch 12 to resume at" in words for _, words in schedule.findings(schedule.State(resume=12)))


# ---- both


@pytest.mark.parametrize("explorer, words", [(descent.explore_descent, "torch.optim.SGD"), (schedule.explore_schedule, "learning rate")])
def test_the_display_carries_widget_picture_and_text(explorer, words, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: InteractiveShell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    state = torch.get_rng_state(), random.getstate()
    explorer()
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate(), "random numbers are left alone"
    (bundle,) = shown
    picture(bundle["image/svg+xml"])
    assert words in bundle["text/plain"] and "application/vnd.jupyter.widget-view+json" in bundle
