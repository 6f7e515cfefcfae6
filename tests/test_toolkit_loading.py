"""Toolkit loading: timelines, the search for a loader, what a worker needs, padding, an order that is resumed. None judges a time."""
import functools
import gc
import itertools
import math
import multiprocessing
import pickle
import random
import time
import types

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import course_utils.toolkit.loading as kit
from course_utils import datasets


def numbers(n=10):
    return TensorDataset(torch.arange(n).float(), torch.arange(n))


@pytest.fixture(autouse=True)
def no_worker_is_left():
    yield
    gc.collect()
    deadline = time.monotonic() + 20
    while (left := multiprocessing.active_children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


# ---- timeline


@pytest.mark.parametrize("workers", [0, 2])
def test_a_timeline_gives_the_step_what_the_loader_gives_and_its_spans_follow_one_another(workers):
    seen, loader = [], DataLoader(numbers(), 3, num_workers=workers)
    run = kit.timeline(loader, lambda batch: seen.append(batch))
    assert [b[1].tolist() for b in seen] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [m.samples for m in run.moments] == [3, 3, 3, 1] and run.workers == workers
    for before, after in itertools.pairwise(run.moments):
        assert before.step[1] == after.wait[0], "nothing lies between two batches"
    for m in run.moments:
        assert m.wait[0] <= m.wait[1] == m.transfer[0] <= m.transfer[1] == m.step[0] <= m.step[1] <= run.seconds
        assert 0 <= m.work[0] <= m.work[1] <= m.wait[1], "a batch is made before it is there, on the same clock"
    assert [m.worker for m in run.moments] == ([None] * 4 if workers == 0 else [0, 1, 0, 1])
    assert 0 <= run.stall <= 1 and run.samples_per_second == pytest.approx(10 / run.seconds) and len(str(run).splitlines()) == 3


def test_a_timeline_has_the_work_of_a_slow_dataset_in_it():
    run = kit.timeline(DataLoader(datasets.Remote(6, 0.02), 2), lambda batch: time.sleep(0.01))
    works = [m.work[1] - m.work[0] for m in run.moments]
    assert all(0.04 <= work < 1 for work in works) and all(m.step[1] - m.step[0] >= 0.01 for m in run.moments)
    assert run.stall > 0.5 and run.start >= 0.04


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_and_its_random_numbers_are_those_of_an_ordinary_epoch(workers):
    def loader():
        return DataLoader(numbers(), 2, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(4))

    plain, watched = loader(), loader()
    expected = [[b[1].tolist() for b in plain] for _ in range(2)]
    found = []
    kit.timeline(watched, lambda batch: found.append(batch[1].tolist()))
    assert found == expected[0] and [b[1].tolist() for b in watched] == expected[1]
    assert type(watched.dataset) is TensorDataset and watched.collate_fn is plain.collate_fn and watched._iterator is None


def test_streams_unbatched_items_and_whole_batches_are_timed():
    stream = DataLoader(datasets.Stream(7, split=True), 2, num_workers=2)
    seen = []
    assert len(kit.timeline(stream, lambda batch: seen.extend(batch.tolist())).moments) == 4 and sorted(seen) == list(range(7))
    single = kit.timeline(DataLoader(datasets.Counting(3), batch_size=None), lambda item: None)
    assert len(single.moments) == 3
    pixels = datasets.Pixels(torch.zeros(6, 28, 28, dtype=torch.uint8), torch.arange(6))
    calls = []
    pixels.__class__ = type("Watched", (datasets.Pixels,), {"__getitems__": lambda self, i: calls.append(i) or [self[k] for k in i]})
    run = kit.timeline(DataLoader(pixels, 4), lambda batch: None)
    assert calls == [[0, 1, 2, 3], [4, 5]] and [m.samples for m in run.moments] == [4, 2]


def test_few_batches_an_empty_loader_and_a_failing_step():
    many = DataLoader(numbers(100), 2, num_workers=2)
    assert len(kit.timeline(many, lambda batch: None, batches=3).moments) == 3
    assert str(kit.timeline(DataLoader(numbers(3), 5, drop_last=True), lambda batch: None)) == "no batch came"
    for error in (ZeroDivisionError, KeyboardInterrupt):
        def step(batch, error=error):
            raise error("planted")

        with pytest.raises(error, match="planted"):
            kit.timeline(many, step)


def test_persistent_workers_of_the_loader_are_not_touched():
    loader = DataLoader(numbers(), 2, num_workers=1, persistent_workers=True)
    list(loader)
    own = loader._iterator
    assert len(kit.timeline(loader, lambda batch: None).moments) == 5
    assert loader._iterator is own and [b[1].tolist() for b in loader][0] == [0, 1]
    loader._iterator._shutdown_workers()


class _Noted(datasets.Draws):
    note = None

    def __getitem__(self, index):
        return self.note


def _note(worker_id):
    torch.utils.data.get_worker_info().dataset.note = 100 + worker_id


def test_the_worker_init_fn_finds_the_users_own_dataset():
    seen = []
    kit.timeline(DataLoader(_Noted(4), None, num_workers=2, worker_init_fn=_note), seen.append)
    assert seen == [100, 101, 100, 101]


def test_stall_fraction():
    assert kit.stall_fraction([3.0, 1.0], [1.0, 3.0]) == 0.5 and kit.stall_fraction([], []) == 0.0


# ---- tune_loader


def test_the_search_keeps_the_default_among_its_finalists_and_gives_a_loader():
    data = datasets.Pixels(torch.zeros(64, 28, 28, dtype=torch.uint8), torch.arange(64))
    found = kit.tune_loader(data, lambda batch: None, 0.5, batch_size=8, shuffle=True, most_workers=1)
    assert set(found.seconds) >= {"0 workers", "1 worker"} and found.choice in found.seconds
    assert all(math.isfinite(s) and s > 0 for trials in found.seconds.values() for s in trials)
    batches = list(found.loader())
    assert len(batches) == 8 and found.settings["batch_size"] == 8
    assert found.choice in str(found).splitlines()[0] and len(found.seconds["0 workers"]) >= 3


def test_sleeping_items_are_given_to_workers_and_a_failing_dataset_is_not_hidden():
    found = kit.tune_loader(datasets.Remote(400, 0.02), lambda batch: None, 2.0, batch_size=4, most_workers=4)
    assert found.choice != "0 workers", "eighty milliseconds a batch against two hundredths of that"
    with pytest.raises(IndexError):
        kit.tune_loader(datasets.Rows([1]), lambda batch: batch[5], 0.2, batch_size=1, most_workers=0)
    for budget in (0, -1, math.nan):
        with pytest.raises(ValueError, match="budget"):
            kit.tune_loader(numbers(), print, budget, batch_size=2)
    with pytest.raises(ValueError, match="no batch"):
        kit.tune_loader(datasets.Rows([]), print, 1.0, batch_size=2)


def trials(seconds, rounds=3):
    """The search with measured seconds that are given, one list for each candidate."""
    search = kit._Search(numbers(), None, 1.0, None, 1, {"batch_size": 2})
    for name in seconds:
        search.add(name, num_workers=0)
    search.rounds = [{name: found[k] for name, found in seconds.items()} for k in range(rounds)]
    search.found = seconds
    return search.result().choice


def test_the_choice_is_the_default_unless_another_wins_every_round():
    assert trials({"0 workers": [3.0, 3.0, 3.0], "2 workers": [2.0, 2.5, 2.9]}) == "2 workers"
    assert trials({"0 workers": [3.0, 3.0, 3.0], "2 workers": [2.0, 2.5, 3.1]}) == "0 workers"
    assert trials({"0 workers": [3.0, 3.0, 3.0], "1 worker": [2.8, 2.8, 2.8], "2 workers": [2.0, 2.5, 2.9]}) == "2 workers"


def test_what_cannot_reach_a_worker_is_searched_without(monkeypatch):
    data = datasets.Rows([lambda: 1] * 4)
    found = kit.tune_loader(data, lambda batch: None, 0.2, batch_size=2, collate_fn=len, multiprocessing_context="spawn")
    assert list(found.seconds) == ["0 workers"] and "cannot be pickled" in str(found)


# ---- what a worker needs


def test_check_portable_names_the_culprit_and_the_cure(tmp_path):
    assert kit.check_portable(datasets.Counting(2)) == [] and kit.check_portable(datasets.Stream(3)) == []
    assert kit.check_portable(numbers(), torch.utils.data.default_collate) == []
    (said,) = kit.check_portable(datasets.Rows([lambda: 1]))
    assert "attribute rows" in said and "lambdas" in said
    holder = datasets.Counting(2)
    with open(tmp_path / "x", "w") as file:
        holder.file = file
        (said,) = kit.check_portable(holder)
    assert "attribute file" in said and "open files" in said
    (said,) = kit.check_portable(datasets.Counting(2), lambda items: items)
    assert "cannot be pickled" in said


def test_check_portable_tries_the_first_item_elsewhere():
    data = datasets.Rows(types.SimpleNamespace())
    (said,) = kit.check_portable(data)
    assert "fails" in said and "TypeError" in said
    (said,) = kit.check_portable(datasets.Remote(1, 60), seconds=4)
    assert "within 4 s" in said


def test_a_class_of_the_notebook_is_recognised(monkeypatch):
    import __main__

    kind = type("Mine", (datasets.Rows,), {"__module__": "__main__"})
    monkeypatch.delattr(__main__, "__file__", raising=False)
    (said,) = kit.check_portable(kind([1]))
    assert said.startswith("Mine is defined in the notebook") and ".py file" in said


class _Many:
    """Generators of every kind, nested."""

    def __init__(self):
        self.torch, self.random = torch.Generator().manual_seed(1), random.Random(1)
        self.deep = {"a": [np.random.default_rng(1), (np.random.RandomState(1), self)], "b": Subset(datasets.Draws(2), [0])}
        self.big = list(range(1000))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        own = self.deep["b"].dataset.rng
        return (
            torch.rand((), generator=self.torch).item(), self.random.random(), self.deep["a"][0].random(),
            self.deep["a"][1][0].random_sample(), own.random(),
        )


def drawn(data, seed, epochs=1, init=kit.seed_generators):
    loader = DataLoader(data, None, num_workers=2, worker_init_fn=init, generator=torch.Generator().manual_seed(seed))
    return [list(loader) for _ in range(epochs)]


def test_generators_differ_by_worker_epoch_and_object_and_repeat_with_the_seed():
    first, second = drawn(_Many(), 3, epochs=2)
    values = [value for epoch in (first, second) for item in epoch for value in item]
    assert len(set(values)) == len(values) == 40
    assert drawn(_Many(), 3)[0] == first and drawn(_Many(), 4)[0] != first


def test_without_it_a_generator_repeats_in_each_worker():
    (found,) = drawn(datasets.Draws(4), 0, init=None)
    assert found[0] == found[1]


def test_generators_in_wrapped_datasets_are_found_once():
    draws = datasets.Draws(2)
    assert kit._generators(ConcatDataset([draws, Subset(draws, [0])])) == [draws.rng]
    assert kit._generators(functools.partial(print)) == []


def test_shards_are_disjoint_and_complete_and_take_endless_streams():
    for workers in (1, 2, 5):
        parts = [list(kit.shard(range(11), types.SimpleNamespace(id=i, num_workers=workers))) for i in range(workers)]
        assert sorted(itertools.chain(*parts)) == list(range(11)) and parts == [sorted(part) for part in parts]
    endless = kit.shard(itertools.count(), types.SimpleNamespace(id=1, num_workers=3))
    assert list(itertools.islice(endless, 3)) == [1, 4, 7] and list(kit.shard("abc", None)) == ["a", "b", "c"]


# ---- padding and packing


@pytest.mark.parametrize("seed", range(40))
def test_padding_keeps_every_sequence_and_marks_it(seed):
    chance = random.Random(seed)
    lists = [[chance.randint(-5, 5) for _ in range(chance.randint(0, 6))] for _ in range(chance.randint(1, 5))]
    value = chance.choice([0, -1, 7])
    padded, mask = kit.pad_batch([torch.tensor(one, dtype=torch.int64) for one in lists], value)
    longest = max(map(len, lists))
    assert padded.shape == mask.shape == (len(lists), longest) and padded.dtype == torch.int64 and mask.dtype == torch.bool
    for row, marks, one in zip(padded, mask, lists):
        assert row[marks].tolist() == one and (row[~marks] == value).all()
        assert marks.tolist() == [True] * len(one) + [False] * (longest - len(one))


def test_pad_collate_is_a_collate_function():
    data = datasets.Sequences(12)
    padded, mask, targets = next(iter(DataLoader(data, 4, collate_fn=functools.partial(kit.pad_collate, value=-1.0))))
    assert padded.shape[0] == 4 and padded.shape[2] == 2 and mask.shape == padded.shape[:2] and targets.dtype == torch.int64
    assert mask.sum(dim=1).tolist() == [len(data[i][0]) for i in range(4)] and (padded[~mask] == -1).all()


def test_masked_mean_ignores_what_is_not_real():
    values = torch.tensor([[1.0, 2.0], [6.0, math.nan]], requires_grad=True)
    mean = kit.masked_mean(values, torch.tensor([[True, True], [True, False]]))
    mean.backward()
    assert mean.item() == 3.0 and values.grad[1, 1] == 0 and values.grad[0, 0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("strings", [[], [""], ["ab", "", "é"], ["", ""], ["\U0001f600", "x" * 300, "\n"]])
def test_packed_strings_come_back(strings):
    data, offsets = kit.pack_strings(strings)
    assert data.dtype == torch.uint8 and offsets.dtype == torch.int64
    back = [bytes(data[a:b].tolist()).decode() for a, b in itertools.pairwise(offsets.tolist())]
    assert back == strings


# ---- the resumable sampler


@pytest.mark.parametrize("shuffle, drop_last", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("n, batch_size, steps", [(1, 1, 3), (5, 7, 4), (10, 3, 0), (10, 3, 4), (10, 3, 9), (12, 4, 7), (30, 7, 40)])
def test_a_resumed_order_is_the_order(n, batch_size, shuffle, drop_last, steps):
    def run(sampler, steps):
        out = []
        while len(out) < steps and sampler.per_epoch:
            for batch in sampler:
                out.append(batch)
                sampler.used()
                if len(out) == steps:
                    break
        return out

    make = functools.partial(kit.ResumableSampler, n, batch_size, 5, shuffle, drop_last)
    whole, first, second = run(make(), 2 * steps), make(), make()
    begun = run(first, steps)
    state = pickle.loads(pickle.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert begun + run(second, steps) == whole
    assert all(isinstance(value, (int, bool)) for value in state.values())


def test_epochs_differ_and_each_holds_every_sample_once():
    sampler = kit.ResumableSampler(10, 3)
    epochs = []
    for _ in range(2):
        epochs.append([])
        for batch in sampler:
            epochs[-1] += batch
            sampler.used()
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] == torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_in_the_middle_of_an_epoch_with_workers_that_have_drawn_ahead(workers):
    def loader():
        sampler = kit.ResumableSampler(20, 2, seed=9)
        return sampler, DataLoader(numbers(20), batch_sampler=sampler, num_workers=workers)

    def run(sampler, loader, batches):
        out = []
        while len(out) < batches:
            for _, targets in loader:
                out.append(targets.tolist())
                sampler.used()
                if len(out) == batches:
                    break
        return out

    whole = run(*loader(), 15)
    sampler, first = loader()
    begun = run(sampler, first, 4)
    again, second = loader()
    again.load_state_dict(sampler.state_dict())
    assert len(again) == 6 and begun + run(again, second, 11) == whole


def test_a_state_of_something_else_is_refused():
    sampler = kit.ResumableSampler(10, 3)
    good = sampler.state_dict()
    for change, words in (
        ({"n": 11}, "n = 11"), ({"batch_size": 4}, "batch_size = 4"), ({"seed": 1}, "seed = 1"),
        ({"position": 4}, "no position 4"), ({"epoch": -1}, "epoch -1"),
    ):
        with pytest.raises(ValueError, match=words):
            sampler.load_state_dict(good | change)
    with pytest.raises(ValueError, match="lacks 'position'"):
        sampler.load_state_dict({k: v for k, v in good.items() if k != "position"})
    assert sampler.state_dict() == good
    for n, size in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match="from 1 on"):
            kit.ResumableSampler(n, size)
