"""The explorers of lesson 05 without a browser: the simulation is held against the real loader, padding and attention against torch."""
import itertools
import multiprocessing
import random
import re
import warnings
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, dataloader

from course_utils.exercises.lesson_05 import epoch_seconds
from course_utils.explorers import collate, loader
from course_utils.explorers.loader import SLOW, State, simulate


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
            assert 0 <= float(node.get("y")) and float(node.get("y")) + float(node.get("height")) <= height
    return root


def spans_of(spans, wanted):
    return [(batch, begin, end) for kind, batch, begin, end in spans if kind == wanted]


# ---- the simulation, against the real loader

def real_log(monkeypatch, data, prefetch, in_order, after=lambda taken: None):
    """What a real loader of two or more workers does: batches handed out, to whom, and taken, in the order of its doing."""
    log, put = [], dataloader._MultiProcessingDataLoaderIter._try_put_index

    def watched(self):
        before = self._send_idx
        put(self)
        log.extend(("hand", batch, self._task_info[batch][0]) for batch in range(before, self._send_idx))

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_try_put_index", watched)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        real = iter(DataLoader(data, 1, num_workers=data.workers, prefetch_factor=prefetch, in_order=in_order))
    try:
        for batch in real:
            log.append(("take", batch.item()))
            after(sum(what == "take" for what, *_ in log))
    finally:
        real._shutdown_workers()
    return log


class Numbers(Dataset):
    """Item i is i; item 0 is made only when `gate` is open."""

    def __init__(self, count, workers, gate=None):
        self.count, self.workers, self.gate = count, workers, gate

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == 0 and self.gate is not None:
            assert self.gate.wait(60)
        return index


@pytest.mark.parametrize("workers, prefetch", [(1, 1), (1, 3), (2, 2), (3, 1), (2, 4), (3, 8)])
def test_in_order_batches_are_handed_out_and_taken_as_by_the_real_loader(monkeypatch, workers, prefetch):
    state = State(workers=workers, prefetch=prefetch, batches=12)
    log = real_log(monkeypatch, Numbers(12, workers), prefetch, True)
    assert simulate(state).log == log
    assert simulate(state, (500, *(5,) * 11)).log == log, "whatever the times are"
    ahead = list(itertools.accumulate(1 if what == "hand" else -1 for what, *_ in log))
    assert max(ahead) == min(12, workers * prefetch) + (workers * prefetch < 12), "one is handed out just before one is taken"


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_out_of_order_a_worker_that_is_held_up_gets_no_more_as_in_the_real_loader(monkeypatch, prefetch):
    """Worker 0 is held up by batch 0 until the loop has taken all that worker 1 can make."""
    gate = torch.multiprocessing.get_context().Event()
    others = 12 - prefetch
    log = real_log(monkeypatch, Numbers(12, 2, gate), prefetch, False, lambda taken: gate.set() if taken == others else None)
    state = State(workers=2, cores=16, prefetch=prefetch, batches=12, step=1, in_order=False)
    assert simulate(state, (100_000, *(5,) * 11)).log == log
    assert [batch for what, batch, *_ in log if what == "take"][others] == 0
    assert sum(entry[0] == "hand" and entry[2] == 0 for entry in log) == prefetch, "it is told of no more than its share"


def test_out_of_order_and_in_order_differ_in_who_makes_what():
    slow = State(workers=3, slow=10, cores=16)
    run = simulate(replace(slow, in_order=False))
    assert [batch % 3 for batch, *_ in spans_of(run.workers[0], "work")] != [0] * 4
    for worker, spans in simulate(slow).workers.items():
        assert [batch for batch, *_ in spans_of(spans, "work")] == list(range(worker, 12, 3))


# ---- the simulation's times

IDEAL = State(cores=16, transfer=0, start=0)
CHOICES = {"workers": (0, 1, 2, 3, 5), "work": (30, 90), "step": (10, 50), "prefetch": (1, 2, 4), "batches": (1, 7, 12), "slow": (1, 5)}
SOME = [replace(IDEAL, **dict(zip(CHOICES, values))) for values in itertools.product(*CHOICES.values())]


def anything(seed):
    chance = random.Random(seed)
    return State(chance.randint(0, 8), chance.randint(1, 12), chance.randint(1, 500), chance.randint(0, 100), chance.randint(1, 500),
                 chance.choice((0, 30, 2000)), chance.randint(1, 8), chance.randint(1, 40), chance.choice((1, 10)), chance.random() < 0.5)


def test_with_cores_enough_the_epoch_is_that_of_the_exercises_formula():
    for state in SOME:
        assert simulate(state).end == pytest.approx(epoch_seconds(state.works, state.step, state.workers, state.prefetch)), state


@pytest.mark.parametrize("seed", range(60))
def test_every_batch_is_made_once_and_used_once_and_nobody_does_two_things(seed):
    state = anything(seed)
    run = simulate(state)
    everything = list(range(state.batches))
    made = [span for spans in run.workers.values() for span in spans_of(spans, "work")] or spans_of(run.own, "work")
    used = spans_of(run.loop, "step")
    assert sorted(batch for batch, *_ in made) == sorted(batch for batch, *_ in used) == everything
    assert [batch for batch, *_ in used] == everything or not state.in_order
    fetched = [batch for batch, *_ in spans_of(run.loop, "transfer")]
    assert sorted(fetched) == (everything if state.workers and state.transfer else [])
    for spans in (run.loop, *run.workers.values()):
        assert all(a[3] <= b[2] + 1e-6 for a, b in itertools.pairwise(spans)), "one after another"
    assert all(a[3] == b[2] for a, b in itertools.pairwise(run.loop)), "the loop waits, fetches or steps, without a gap"
    assert run.loop[0][2] == 0 and run.loop[-1][3] == run.end
    ready = {batch: end for batch, _, end in made}
    assert all(begin >= ready[batch] - 1e-6 for batch, begin, _ in used), "a batch is used when it is made"
    assert run.stall == pytest.approx(1 - sum(end - begin for _, begin, end in used) / run.end)


@pytest.mark.parametrize("seed", range(60))
def test_processes_share_the_cores_in_equal_parts(seed):
    state = anything(seed)
    computing = sum(state.works) + state.batches * state.step + state.workers * state.start
    computing += state.batches * state.transfer if state.workers else 0
    assert simulate(replace(state, cores=1)).end == pytest.approx(computing), "one core has always something to do"
    assert simulate(state).end >= computing / state.cores - 1e-6
    enough = simulate(replace(state, cores=state.workers + 1))
    assert enough.end == simulate(replace(state, cores=99)).end
    lengths = [end - begin for spans in enough.workers.values() for batch, begin, end in spans_of(spans, "work") if batch != SLOW]
    assert lengths == pytest.approx([state.work] * len(lengths))


def test_while_the_loop_waits_for_its_turn_it_fetches_the_others():
    state = State(workers=3, cores=16, work=60, transfer=10, step=20, slow=10)
    run = simulate(state)
    (wait,) = [end for batch, _, end in spans_of(run.loop, "step") if batch == SLOW - 1]
    (turn,) = [begin for batch, begin, _ in spans_of(run.loop, "step") if batch == SLOW]
    early = [batch for batch, begin, _ in spans_of(run.loop, "transfer") if wait < begin < turn]
    assert early[-1] == SLOW and len(early) > 2
    steps = [(begin, end) for batch, begin, end in spans_of(run.loop, "step") if batch in range(SLOW, SLOW + 3)]
    assert all(a[1] == b[0] for a, b in itertools.pairwise(steps)), "they are there, and follow each other at once"


@pytest.mark.parametrize("changes, words, cure", [
    ({"workers": 0}, "work and step add up", None),
    ({"workers": 4, "work": 10, "step": 50}, "The loop bounds it: 52 ms", None),
    ({"workers": 2, "work": 100, "step": 10}, "The workers bound it: 100 ms for 2 of them are 50 ms", {"workers": 4}),
    ({"workers": 4, "cores": 1}, "The cores bound it: 1 core for 5 processes", {"cores": 5}),
    ({"start": 2000, "work": 500}, "saved at the start of the workers", {"start": 0}),
    ({"workers": 3, "slow": 5}, "wait for their turn", {"in_order": False}),
    ({"workers": 3, "slow": 10, "in_order": False}, "Batch 3 bounds it: to make it takes 600 ms", {"slow": 1}),
    ({"workers": 1, "prefetch": 1, "work": 20, "transfer": 30, "step": 40, "slow": 8}, "run far enough ahead", {"prefetch": 8}),
    ({"workers": 2, "cores": 2, "work": 80, "step": 1, "transfer": 0, "start": 0}, "together. 4 workers", {"workers": 4, "cores": 5}),
    ({"batches": 1, "start": 0}, "Nothing alone bounds it", None),
])
def test_what_bounds_the_epoch_is_said_with_the_time_that_it_would_take_without(changes, words, cure):
    state = replace(State(cores=16), **changes)
    said = loader.bound(state)
    assert words in said
    assert words in ElementTree.fromstring(loader.draw(state)).get("aria-label").replace("\n", " ")
    if cure:
        assert said.endswith(f" {simulate(replace(state, **cure)).end:.0f} ms.")
        assert simulate(replace(state, **cure)).end < 0.95 * simulate(state).end


@pytest.mark.parametrize("seed", range(60))
def test_more_of_what_does_not_bound_it_gains_nothing(seed):
    state = anything(seed)
    if "More of them gain nothing" in loader.bound(state):
        assert simulate(replace(state, workers=8, cores=20, start=0)).end > 0.9 * simulate(state).end
    picture(loader.draw(state))


# ---- the picture and its controls

@pytest.mark.parametrize("changes", [
    {}, {"workers": 8, "batches": 40, "prefetch": 8}, {"workers": 0, "batches": 1}, {"work": 500, "start": 2000},
    {"workers": 3, "slow": 10},
    {"workers": 8, "work": 500, "transfer": 100, "step": 500, "start": 2000, "batches": 40, "slow": 10, "cores": 1},
])
def test_the_picture_of_the_loader_stays_inside(changes):
    state = replace(State(), **changes)
    root = picture(loader.draw(state))
    boxes = [node.get("class") for node in root.iter() if node.tag.endswith("rect")]
    assert boxes.count("work") == state.batches + 1 and boxes.count("step") == state.batches + 1, "each batch, and one in the legend"


def test_every_control_of_the_loader_moves_the_picture():
    ui = loader.build()
    values = {"workers": 3, "cores": 2, "work": 33, "step": 7, "transfer": 9, "start": 5, "batches": 7, "slow": 5, "prefetch": 1}
    for name, value in values.items():
        before = ui.picture.value
        getattr(ui, name).value = value
        assert ui.picture.value != before, name
    before = ui.picture.value
    ui.in_order.value = "as they are ready"
    assert ui.picture.value != before
    assert ui.state == State(**values, in_order=False)


# ---- the measured epoch

@pytest.mark.parametrize("workers", [0, 1, 2])
def test_an_epoch_is_measured_here_and_drawn_in_the_same_form(workers):
    ui = loader.build()
    ui.workers.value, ui.step.value, ui.batches.value = workers, 2, 8
    before = torch.get_rng_state()
    ui.measure.click()
    assert torch.equal(torch.get_rng_state(), before), "the random numbers are as before"
    assert multiprocessing.active_children() == [] and not ui.measure.disabled and ui.said == ""
    assert [batch for batch, *_ in spans_of(ui.measured.loop, "step")] == list(range(8))
    assert len(ui.measured.workers) == workers and bool(ui.measured.own) == (not workers)
    for worker, spans in ui.measured.workers.items():
        assert [batch for _, batch, *_ in spans] == list(range(worker, 8, workers)), "as in the simulation"
    assert 0 < ui.measured.stall < 1
    svg = ui.picture.value
    assert f"measured here: 8 batches of 16 JPEG digits, {workers} worker" in svg and svg.count("<rect") > 30
    assert "measured here" in ElementTree.fromstring(svg).get("aria-label")
    picture(svg)
    ui.step.value = 3
    assert "measured here" not in ui.picture.value, "it belongs to other settings"


def test_the_measured_epoch_is_short_and_says_nothing_of_workers(monkeypatch):
    """At most four workers, twelve batches and steps of 60 ms, whatever is chosen; no warning where there are more workers than cores."""
    asked = []
    monkeypatch.setattr(loader, "_product", lambda seconds: asked.append(seconds) or (lambda: None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = loader.measure(State(workers=8, batches=40, step=500, in_order=False, slow=2))
    assert caught == [] and asked == [0.06] and len(run.workers) == 4
    assert sorted(batch for batch, *_ in spans_of(run.loop, "step")) == list(range(12)), "in whatever order, each once"


def test_where_no_epoch_can_be_measured_that_is_said(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no space left on /dev/shm\nand more")

    monkeypatch.setattr(loader, "timeline", refuse)
    ui = loader.build()
    ui.measure.click()
    assert "✗ No epoch could be measured here. RuntimeError: no space left on /dev/shm<" in ui.picture.value and not ui.measure.disabled
    picture(ui.picture.value)
    ui.workers.value = 1
    assert "No epoch" not in ui.picture.value


# ---- collate


def test_padding_and_its_share():
    state = collate.State((3, 1, 2, 4), 2)
    (some, first, mask), (_, second, _) = collate.batches(state)
    assert some == [0, 1] and first.shape == (2, 3) and second.shape == (2, 4) and mask.tolist() == [[True] * 3, [True, False, False]]
    assert collate.share(state) == pytest.approx(4 / 14) and collate.share(replace(state, sort=True)) == pytest.approx(2 / 12)
    assert (collate.batches(replace(state, value=-7))[0][1][1, 1:] == -7).all()


def test_sorting_moves_the_sequences_and_changes_none():
    plain, by_length = collate.State(), replace(collate.State(), sort=True)
    rows = [{n: row[marks].tolist() for numbers, padded, mask in collate.batches(state) for n, row, marks in zip(numbers, padded, mask)}
            for state in (plain, by_length)]
    assert rows[0] == rows[1] and len(rows[0]) == 8
    assert [len(rows[1][n]) for n in collate.order(by_length)] == sorted(plain.lengths)
    assert collate.order(by_length)[:2] == [3, 7], "of equal length: as they came"


@pytest.mark.parametrize("value", [0, 5, -3])
def test_the_losses_are_torchs_and_the_mask_is_all_that_they_differ_in(value):
    state = replace(collate.State(), value=value)
    everywhere, real = collate.losses(state)
    _, padded, mask = collate.batches(state)[0]
    scores = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
    scores[0, 0] += 4.0
    outputs, targets = scores[padded.remainder(10)], torch.where(mask, padded % 5, -100)
    assert real == pytest.approx(F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100).item(), rel=1e-5)
    assert everywhere == pytest.approx(F.cross_entropy(outputs.flatten(0, 1), targets.clamp(min=0).flatten()).item(), rel=1e-5)
    assert real == pytest.approx(collate.losses(collate.State())[1]), "padding has no part in it"
    assert value or everywhere < 0.6 * real, "zeros are what the network has learned to call padding"
    full = collate.State((4, 4), 2)
    assert collate.losses(full)[0] == collate.losses(full)[1] and "has no padding" in collate.draw(full)


@pytest.mark.parametrize("state", [collate.State(), replace(collate.State(), sort=True, value=4), collate.State((16, 1) * 6, 12, True, -9)])
def test_attention_is_torchs_with_and_without_the_mask(state):
    numbers, padded, mask = collate.batches(state)[0]
    vectors = torch.randn(10, 4, generator=torch.Generator().manual_seed(1))[padded[0].remainder(10)]
    places = torch.eye(len(vectors))[None, None]  # the values: what comes out is the weights
    for weights, allowed in zip(collate.attention(state), (None, mask[0].expand(1, 1, 1, -1))):
        own = F.scaled_dot_product_attention(vectors[None, None, :1], vectors[None, None], places, allowed)
        assert weights == pytest.approx(own.flatten().tolist(), abs=1e-6)
    assert [weight > 0 for weight in collate.attention(state)[1]] == mask[0].tolist()


def test_an_explorer_leaves_the_random_numbers():
    before = torch.get_rng_state()
    collate.build()
    loader.build()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("typed", ["", "x", "0", "17", "3 -1", "1.5", "²", "٣", " ".join(["2"] * 13), "<b>" * 40])
def test_what_is_no_list_of_lengths_is_said_and_nothing_is_lost(typed):
    with pytest.raises(ValueError, match="no list of lengths") as caught:
        collate.read(typed)
    assert len(str(caught.value)) < 140, "it does not repeat all that was typed"
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
    assert len(cells) == sum(mask.numel() for _, _, mask in collate.batches(state))
    assert sum("pad" in node.get("class") for node in cells) == round(collate.share(state) * len(cells))
    astray = [node for node in root.iter() if node.get("class") == "tall astray"]
    assert len(astray) == (~collate.batches(state)[0][2][0]).sum(), "bars on padding are marked, and none with the mask"


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
