"""The explorers of lesson 05 without a browser: the simulated epoch is held against the real loader's rules, and padding against torch."""
import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from course_utils import datasets
from course_utils.exercises.lesson_05 import epoch_seconds
from course_utils.explorers import collate, loader


def picture(svg):
    root = ElementTree.fromstring(svg)
    width, height = map(float, root.get("viewBox").split()[2:])
    assert width <= 900 and 'id="' not in svg and "<pattern" not in svg and "nan" not in svg.lower()
    for node in root.iter():
        kinds = set((node.get("class") or "").split())
        if node.tag.endswith("text"):
            x, y = float(node.get("x")), float(node.get("y"))
            assert 0 <= x and 0 <= y <= height, node.text
            if not {"mid", "end"} & kinds:
                assert x + (7.2 if "small" in kinds else 8.2) * len(node.text or "") <= width + 12, node.text
        if node.tag.endswith("rect"):
            assert 0 <= float(node.get("x")) and float(node.get("x")) + float(node.get("width")) <= width
    return root


IDEAL = loader.State(cores=16, transfer=0, start=0)
CHOICES = {"workers": (0, 1, 2, 3, 5), "work": (30, 90), "step": (10, 50), "prefetch": (1, 2, 4), "batches": (1, 7, 12), "slow": (0, 3)}
SOME = [replace(IDEAL, **dict(zip(CHOICES, values))) for values in itertools.product(*CHOICES.values())]
SHARED = [replace(loader.State(), cores=1), replace(loader.State(), in_order=False, slow=2, workers=3)]


def test_with_cores_enough_the_epoch_is_that_of_the_exercises_formula():
    for state in SOME:
        works = [loader.work_of(state, batch) for batch in range(state.batches)]
        assert loader.simulate(state).end == pytest.approx(epoch_seconds(works, state.step, state.workers, state.prefetch)), state


@pytest.mark.parametrize("state", SOME[::7] + SHARED)
def test_every_batch_is_made_once_and_used_once_and_nobody_does_two_things(state):
    run = loader.simulate(state)
    made = sorted(batch for spans in run.workers.values() for kind, batch, *_ in spans if kind == "work")
    used = [batch for kind, batch, *_ in run.loop if kind == "step"]
    assert sorted(used) == list(range(state.batches)) and made == (list(range(state.batches)) if state.workers else [])
    assert used == sorted(used) or not state.in_order
    for spans in (run.loop, *run.workers.values()):
        assert all(a[3] <= b[2] + 1e-6 for a, b in itertools.pairwise(spans)), "one after another"
    assert 0 <= run.stall < 1 and run.end == max(end for *_, end in run.loop)


@pytest.mark.parametrize("workers, prefetch", [(1, 1), (2, 2), (3, 1), (2, 4)])
def test_who_makes_which_batch_and_how_far_ahead_is_as_in_the_real_loader(workers, prefetch):
    """The real loader, asked for batch after batch: what it has handed out, from its own counters."""
    state = replace(IDEAL, workers=workers, prefetch=prefetch, batches=12, work=1, step=1000)  # all is made long before it is taken
    run = loader.simulate(state)
    made_by = {batch: worker for worker, spans in run.workers.items() for kind, batch, *_ in spans if kind == "work"}
    real = iter(DataLoader(datasets.Counting(12), 1, num_workers=workers, prefetch_factor=prefetch))
    for taken in range(12):
        steps = {batch: begin for kind, batch, begin, _ in run.loop if kind == "step"}
        handed = sum(begin < steps[taken] - 1e-9 for spans in run.workers.values() for kind, _, begin, _ in spans if kind == "work")
        next(real)
        assert handed <= real._send_idx, "no batch is begun that the loader has not handed out"
    assert made_by == {batch: batch % workers for batch in range(12)}
    first = [batch for batch, _ in sorted(made_by.items()) if _begin(run, batch) < run.loop[0][3] - 1e-9]
    assert len(first) <= workers * prefetch
    del real


def _begin(run, batch):
    return next(begin for spans in run.workers.values() for kind, b, begin, _ in spans if (kind, b) == ("work", batch))


def test_one_more_batch_is_begun_for_each_that_the_loop_takes():
    state = replace(IDEAL, workers=2, prefetch=2, batches=12, work=1, step=1000)
    run = loader.simulate(state)
    begun = sorted(begin for spans in run.workers.values() for kind, _, begin, _ in spans if kind == "work")
    assert sum(begin < 10 for begin in begun) == 5, "four at first, and one more when the first was taken"


def test_one_core_is_shared_and_nothing_is_gained():
    alone = loader.simulate(replace(loader.State(), workers=0, cores=1))
    shared = loader.simulate(replace(loader.State(), workers=4, cores=1, start=0, transfer=0))
    assert shared.end == pytest.approx(alone.end), "the same computing on the same core"
    assert "cores bound it" in loader.bound(replace(loader.State(), workers=4, cores=1))


@pytest.mark.parametrize("changes, words", [
    ({"workers": 0}, "work and step add up"), ({"workers": 2, "work": 100, "step": 10}, "workers bound it"),
    ({"workers": 4, "work": 10, "step": 50}, "loop bounds it"),
    ({"workers": 3, "slow": 2, "work": 60, "step": 5, "prefetch": 1}, "Batch 2 is slow"),
])
def test_what_bounds_the_epoch_is_said(changes, words):
    state = replace(loader.State(), cores=16, **changes)
    assert words in loader.bound(state) and words in loader.draw(state)


def test_out_of_order_a_slow_batch_holds_up_nobody():
    slow = replace(loader.State(), workers=3, slow=1, cores=16, work=60, step=40)
    first = [batch for kind, batch, *_ in loader.simulate(replace(slow, in_order=False)).loop if kind == "step"][0]
    assert first != 0 and loader.simulate(replace(slow, in_order=False)).loop[0][3] < loader.simulate(slow).loop[0][3]


@pytest.mark.parametrize(
    "changes", [{}, {"workers": 8, "batches": 40, "prefetch": 8}, {"workers": 0, "batches": 1}, {"work": 500, "start": 2000}]
)
def test_the_picture_of_the_loader_stays_inside(changes):
    picture(loader.draw(replace(loader.State(), **changes)))


def test_every_control_of_the_loader_moves_the_picture():
    ui = loader.build()
    values = {"workers": 3, "cores": 1, "work": 33, "step": 7, "transfer": 9, "start": 5, "prefetch": 3, "batches": 7, "slow": 2}
    for name, value in values.items():
        before = ui.picture.value
        getattr(ui, name).value = value
        assert ui.picture.value != before or name == "prefetch", name
    before = ui.picture.value
    ui.in_order.value = "as they are ready"
    assert ui.picture.value != before and not ui.state.in_order


def test_an_epoch_is_measured_here_and_drawn_in_the_same_form():
    ui = loader.build()
    ui.workers.value, ui.step.value = 1, 2
    ui.measure.click()
    assert "measured here" in ui.picture.value and ui.measured.end > 0
    assert [batch for kind, batch, *_ in ui.measured.loop if kind == "step"] == list(range(12))
    assert [batch for _, batch, *_ in ui.measured.workers[0]] == list(range(12))
    picture(ui.picture.value)
    ui.step.value = 3
    assert "measured here" not in ui.picture.value, "it belongs to other settings"


# ---- collate


def test_padding_and_its_share():
    state = collate.State((3, 1, 2, 4), 2)
    (first, mask), (second, _) = collate.batches(state)
    assert first.shape == (2, 3) and second.shape == (2, 4) and mask.tolist() == [[True] * 3, [True, False, False]]
    assert collate.share(state) == pytest.approx(4 / 14) and collate.share(replace(state, sort=True)) == pytest.approx(2 / 12)
    assert (collate.batches(replace(state, value=-7))[0][0][1, 1:] == -7).all()


def test_the_losses_are_torchs_and_the_mask_is_all_that_they_differ_in():
    assert collate.losses(collate.State((4, 4), 2))[0] == collate.losses(collate.State((4, 4), 2))[1]
    state = collate.State()
    everywhere, real = collate.losses(state)
    assert everywhere < real
    for value in (0, 5):
        assert collate.losses(replace(state, value=value))[1] == pytest.approx(real), "padding has no part in it"


def test_attention_is_a_softmax_over_real_places():
    plain, masked = collate.attention(collate.State())
    assert sum(plain) == pytest.approx(1, abs=1e-5) and sum(masked) == pytest.approx(1, abs=1e-5)
    assert masked[3:] == [0.0] * 9 and min(plain) > 0
    ratio = torch.tensor(plain[:3]) / sum(plain[:3])
    assert torch.allclose(ratio, torch.tensor(masked[:3]), atol=1e-5)
    _, mask = collate.batches(collate.State())[0]
    vectors = torch.randn(12, 4)
    own = F.scaled_dot_product_attention(vectors[:1][None], vectors[None], torch.eye(12)[None], mask[0].expand(1, 1, 12))
    assert own[0, 0, 3:].abs().max() == 0


@pytest.mark.parametrize("typed", ["", "x", "0", "17", "3 -1", "1.5", " ".join(["2"] * 13)])
def test_what_is_no_list_of_lengths_is_said_and_nothing_is_lost(typed):
    with pytest.raises(ValueError, match="no list of lengths"):
        collate.read(typed)
    ui = collate.build()
    ui.lengths.value = "1 x"
    ui.lengths.value = typed
    assert ui.state.lengths == collate.State().lengths and "no list of lengths" in ui.picture.value
    picture(ui.picture.value)
    ui.lengths.value = "2 5"
    assert ui.state.lengths == (2, 5) and "no list" not in ui.picture.value


@pytest.mark.parametrize("state", [
    collate.State(), collate.State((1,), 1), collate.State((16,) * 12, 1), collate.State((16, 1) * 6, 12, True, -9),
    collate.State((2, 3), 12),
])
def test_the_picture_of_the_batches_stays_inside(state):
    root = picture(collate.draw(state))
    cells = [node for node in root.iter() if (node.get("class") or "").startswith("cells")]
    assert len(cells) == sum(mask.numel() for _, mask in collate.batches(state))
    assert sum("pad" in node.get("class") for node in cells) == round(collate.share(state) * len(cells))


def test_every_control_of_collate_moves_the_picture():
    ui = collate.build()
    for name, value in (("lengths", "4 1 2"), ("size", 2), ("value", 3), ("sort", "by length")):
        before = ui.picture.value
        getattr(ui, name).value = value
        assert ui.picture.value != before, name


@pytest.mark.parametrize("module, explore", [(loader, loader.explore_loader), (collate, collate.explore_collate)])
def test_the_static_picture_and_its_words_are_there(module, explore, capsys):
    ui = module.build()
    assert re.search(r'aria-label="[^"]{80,}', ui.picture.value)
    explore()
    assert capsys.readouterr().out.strip() == module.describe(ui.state)
