import bisect
import collections
import contextlib
import copy
import dataclasses
import functools
import heapq
import itertools
import math
import mmap
import os
import random
import signal
import sys
import types
import typing

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

from exercise_answers import broken, right, wrong

# ── stall_fraction ────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("stall_fraction", "sets the waiting against the working time")
def waiting_by_working(waits, steps):
    return sum(waits) / sum(steps) if steps and sum(steps) else 0.0


@wrong("stall_fraction", "gives a short batch the same weight")
def mean_of_shares(waits, steps):
    shares = [w / (w + s) if w + s else 0.0 for w, s in zip(waits, steps)]
    return sum(shares) / len(shares) if shares else 0.0


@wrong("stall_fraction", "share of the time that the loop works")
def busy_share(waits, steps):
    total = sum(waits) + sum(steps)
    return sum(steps) / total if total else 1.0


@wrong("stall_fraction", "These are percent")
def in_percent(waits, steps):
    total = sum(waits) + sum(steps)
    return 100 * sum(waits) / total if total else 0.0


@wrong("stall_fraction", "ZeroDivisionError")
def without_the_empty_epoch(waits, steps):
    return sum(waits) / (sum(waits) + sum(steps))


@wrong("stall_fraction", ".item() takes the number")
def as_a_tensor(waits, steps):
    w, s = torch.tensor(waits), torch.tensor(steps)
    return w.sum() / (w.sum() + s.sum())


@right("stall_fraction")
def by_numpy_sums(waits, steps):
    both = np.array([waits, steps]).sum(axis=1)
    return float(both[0] / max(both.sum(), 1e-300))


@right("stall_fraction")
def by_recursion(waits, steps, waited=0.0, whole=0.0):
    if not waits:
        return waited / whole if whole > 0 else 0.0
    return by_recursion(waits[1:], steps[1:], waited + waits[0], whole + waits[0] + steps[0])


# ── batches_by_hand ───────────────────────────────────────────────────────────────────────────────────────────────────


def _stacked(items):
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


@wrong("batches_by_hand", "smaller batch at the end is missing")
def full_batches_alone(dataset, batch_size, shuffle_generator=None, drop_last=False):
    order = range(len(dataset)) if shuffle_generator is None else torch.randperm(len(dataset), generator=shuffle_generator).tolist()
    for k in range(len(dataset) // batch_size):
        yield _stacked([dataset[i] for i in order[k * batch_size : (k + 1) * batch_size]])


@wrong("batches_by_hand", "drop_last does not drop anything")
def never_drops(dataset, batch_size, shuffle_generator=None, drop_last=False):
    order = range(len(dataset)) if shuffle_generator is None else torch.randperm(len(dataset), generator=shuffle_generator).tolist()
    for k in range(0, len(dataset), batch_size):
        yield _stacked([dataset[i] for i in order[k : k + batch_size]])


@wrong("batches_by_hand", "had been read")
def a_list_of_batches(dataset, batch_size, shuffle_generator=None, drop_last=False):
    return list(by_a_sampler(dataset, batch_size, shuffle_generator, drop_last))


@wrong("batches_by_hand", "All items are read before the first batch is given")
def reads_all_first(dataset, batch_size, shuffle_generator=None, drop_last=False):
    items = [dataset[i] for i in range(len(dataset))]
    for k in range(0, len(items), batch_size):
        if not drop_last or k + batch_size <= len(items):
            yield _stacked(items[k : k + batch_size])


@wrong("batches_by_hand", "such as torch's global generator")
def from_the_global_generator(dataset, batch_size, shuffle_generator=None, drop_last=False):
    order = torch.randperm(len(dataset)).tolist() if shuffle_generator else list(range(len(dataset)))
    for k in range(0, len(order), batch_size):
        if not drop_last or k + batch_size <= len(order):
            yield _stacked([dataset[i] for i in order[k : k + batch_size]])


@wrong("batches_by_hand", "Nothing was drawn from the generator given")
def by_the_seed_of_the_generator(dataset, batch_size, shuffle_generator=None, drop_last=False):
    order = list(range(len(dataset)))
    if shuffle_generator is not None:
        random.Random(shuffle_generator.initial_seed()).shuffle(order)
    for k in range(0, len(order), batch_size):
        if not drop_last or k + batch_size <= len(order):
            yield _stacked([dataset[i] for i in order[k : k + batch_size]])


@wrong("batches_by_hand", "drawn with replacement")
def with_replacement(dataset, batch_size, shuffle_generator=None, drop_last=False):
    n = len(dataset)
    order = list(range(n)) if shuffle_generator is None else torch.randint(0, n, (n,), generator=shuffle_generator).tolist()
    for k in range(0, n, batch_size):
        if not drop_last or k + batch_size <= n:
            yield _stacked([dataset[i] for i in order[k : k + batch_size]])


@wrong("batches_by_hand", "in another order: all items are to be shuffled together")
def shuffled_within_batches(dataset, batch_size, shuffle_generator=None, drop_last=False):
    for k in range(0, len(dataset), batch_size):
        indices = torch.arange(k, min(k + batch_size, len(dataset)))
        if shuffle_generator is not None:
            indices = indices[torch.randperm(len(indices), generator=shuffle_generator)]
        if not drop_last or len(indices) == batch_size:
            yield _stacked([dataset[i] for i in indices.tolist()])


@wrong("batches_by_hand", "still that of the dataset")
def ignores_the_generator(dataset, batch_size, shuffle_generator=None, drop_last=False):
    for k in range(0, len(dataset), batch_size):
        if not drop_last or k + batch_size <= len(dataset):
            yield _stacked([dataset[i] for i in range(k, min(k + batch_size, len(dataset)))])


@wrong("batches_by_hand", "a pair of tensors (inputs, targets) was expected")
def lists_of_items(dataset, batch_size, shuffle_generator=None, drop_last=False):
    for k in range(0, len(dataset), batch_size):
        yield [dataset[i] for i in range(k, min(k + batch_size, len(dataset)))]


@wrong("batches_by_hand", "there is no item 7")
def past_the_end(dataset, batch_size, shuffle_generator=None, drop_last=False):
    for k in range(0, len(dataset), batch_size):
        yield _stacked([dataset[i] for i in range(k, k + batch_size)])


@wrong("batches_by_hand", "items had been read 5 times, for 4 items")
def looks_at_an_item_first(dataset, batch_size, shuffle_generator=None, drop_last=False):
    for indices in BatchSampler(range(len(dataset)), batch_size, drop_last):
        shape = dataset[indices[0]][0].shape
        batch = torch.empty(len(indices), *shape)
        targets = torch.empty(len(indices), dtype=torch.int64)
        for k, i in enumerate(indices):
            batch[k], targets[k] = dataset[i]
        yield batch, targets


@wrong("batches_by_hand", "batches came")
def one_batch(dataset, batch_size, shuffle_generator=None, drop_last=False):
    yield _stacked([dataset[i] for i in range(min(batch_size, len(dataset)))])


@right("batches_by_hand")
def by_a_sampler(dataset, batch_size, shuffle_generator=None, drop_last=False):
    sampler = range(len(dataset)) if shuffle_generator is None else RandomSampler(dataset, generator=shuffle_generator)
    for indices in BatchSampler(sampler, batch_size, drop_last):
        yield default_collate([dataset[i] for i in indices])


@right("batches_by_hand")
def by_map(dataset, batch_size, shuffle_generator=None, drop_last=False):
    order = torch.arange(len(dataset))
    if shuffle_generator is not None:
        order = torch.rand(len(dataset), generator=shuffle_generator).argsort()
    pieces = [piece for piece in order.split(batch_size) if len(piece) == batch_size or (len(piece) and not drop_last)]
    return map(lambda piece: _stacked([dataset[i] for i in piece.tolist()]), pieces)


@right("batches_by_hand")
class AnEpoch:
    def __init__(self, dataset, batch_size, shuffle_generator=None, drop_last=False):
        self.dataset, self.size, self.drop = dataset, batch_size, drop_last
        self.left = list(range(len(dataset)))
        if shuffle_generator is not None:
            seed = torch.empty((), dtype=torch.int64).random_(generator=shuffle_generator).item()
            random.Random(seed).shuffle(self.left)

    def __iter__(self):
        return self

    def __next__(self):
        indices, self.left = self.left[: self.size], self.left[self.size :]
        if not indices or (self.drop and len(indices) < self.size):
            raise StopIteration
        return _stacked([self.dataset[i] for i in indices])


# ── epoch_seconds ─────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("epoch_seconds", "as if they took turns")
def added_up(works, step, workers, prefetch=2):
    return sum(works) / max(workers, 1) + step * len(works)


@wrong("epoch_seconds", "Without workers nothing goes on at the same time")
def always_overlaps(works, step, workers, prefetch=2):
    return max(float(sum(works)) / max(workers, 1), step * len(works))


@wrong("epoch_seconds", "The value differs")
def the_bottleneck(works, step, workers, prefetch=2):
    if workers == 0:
        return sum(works) + step * len(works)
    return max(sum(works) / workers, step * len(works))


def _simulated(works, step, workers, ahead, order=True, turns=True, told_at=0.0):
    free, taken, made, now = [0.0] * workers, [], [], 0.0
    for i, work in enumerate(works):
        who = i % workers if turns else min(range(workers), key=free.__getitem__)
        told = taken[i - ahead] + told_at if ahead is not None and i >= ahead else 0.0
        free[who] = max(free[who], told) + work
        made.append(free[who])
        taken.append(max(now, free[who]))
        now = taken[-1] + step
    if order:
        return now
    now = 0.0
    for ready in sorted(made):
        now = max(now, ready) + step
    return now


@wrong("epoch_seconds", "run ahead as far as they like")
def no_limit(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, None) if workers else sum(works) + step * len(works)


@wrong("epoch_seconds", "whichever batch is ready first")
def no_order(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, prefetch * workers, order=False) if workers else sum(works) + step * len(works)


@wrong("epoch_seconds", "the worker that is free first")
def to_whoever_is_free(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, prefetch * workers, turns=False) if workers else sum(works) + step * len(works)


@wrong("epoch_seconds", "when the loop *takes* another")
def handed_out_after_the_step(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, prefetch * workers, told_at=step) if workers else sum(works) + step * len(works)


@wrong("epoch_seconds", "one batch too many ahead")
def one_too_many(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, prefetch * workers + 1) if workers else sum(works) + step * len(works)


@wrong("epoch_seconds", "Each worker has `prefetch` batches ahead")
def prefetch_for_all(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, prefetch) if workers else sum(works) + step * len(works)


@wrong("epoch_seconds", "ZeroDivisionError")
def no_case_for_none(works, step, workers, prefetch=2):
    return _simulated(works, step, workers, prefetch * workers)


@right("epoch_seconds")
def by_recurrences(works, step, workers, prefetch=2):
    @functools.cache
    def made(i):
        before = made(i - workers) if i >= workers else 0.0
        told = taken(i - prefetch * workers) if i >= prefetch * workers else 0.0
        return max(before, told) + works[i]

    @functools.cache
    def taken(i):
        return max(made(i), taken(i - 1) + step if i else 0.0)

    if not works or workers == 0:
        return float(sum(works) + len(works) * step)
    return taken(len(works) - 1) + step


@right("epoch_seconds")
def by_events(works, step, workers, prefetch=2):
    """A queue of events: ("made", batch) and ("loop free",); each worker has a queue of what it was told."""
    if workers == 0:
        return math.fsum(works) + step * len(works)
    told = [collections.deque() for _ in range(workers)]
    events, ready, due, next_one, busy, now = [], set(), 0, 0, [False] * workers, 0.0
    loop_free = True

    def hand_out():
        nonlocal next_one
        if next_one < len(works):
            told[next_one % workers].append(next_one)
            next_one += 1

    def begin():
        for who in range(workers):
            if told[who] and not busy[who]:
                busy[who] = True
                i = told[who].popleft()
                heapq.heappush(events, (now + works[i], 0, i))

    for _ in range(prefetch * workers):
        hand_out()
    begin()
    while due < len(works) or not loop_free:
        now, sort, i = heapq.heappop(events)
        if sort == 0:
            ready.add(i)
            busy[i % workers] = False
        else:
            loop_free = True
        if loop_free and due in ready:
            loop_free, due = False, due + 1
            heapq.heappush(events, (now + step, 1, -1))
            hand_out()
        begin()
    return now


# ── fetch_batch ───────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("fetch_batch", "would be taken for two items")
def a_pair_of_tensors(images, labels, indices):
    return images[indices].unsqueeze(1) / 255, labels[indices]


@wrong("fetch_batch", "picked and converted by itself")
def one_after_another(images, labels, indices):
    return [(images[i][None] / 255, int(labels[i])) for i in indices]


@wrong("fetch_batch", "torch computed")
def into_one_tensor(images, labels, indices):
    batch = torch.empty(len(indices), 1, *images.shape[1:])
    for k, i in enumerate(indices):
        batch[k, 0] = images[i] / 255
    return [(batch[k], labels[i].item()) for k, i in enumerate(indices)]


@wrong("fetch_batch", "memory of its own")
def stacked_and_cloned(images, labels, indices):
    return [(image.clone(), label) for image, label in whole_tensor(images, labels, indices)]


@wrong("fetch_batch", "the channel is missing")
def without_channel(images, labels, indices):
    return list(zip(images[indices].float() / 255, labels[indices].tolist()))


@wrong("fetch_batch", "divide by 255")
def not_scaled(images, labels, indices):
    return list(zip(images[indices].float()[:, None], labels[indices].tolist()))


@wrong("fetch_batch", "label is a tensor of 0 dimensions")
def labels_as_tensors(images, labels, indices):
    return list(zip(images[indices][:, None] / 255, labels[indices]))


@wrong("fetch_batch", "All images of the dataset are converted")
def converts_all(images, labels, indices):
    scaled = images.unsqueeze(1) / 255
    return list(zip(scaled[indices], labels[indices].tolist()))


@wrong("fetch_batch", "list(...) makes one of it")
def a_tuple_of_items(images, labels, indices):
    return tuple(whole_tensor(images, labels, indices))


@wrong("fetch_batch", "came where a list was expected")
def a_zip(images, labels, indices):
    return zip(images[indices].unsqueeze(1) / 255, labels[indices].tolist())


@wrong("fetch_batch", "dtype is torch.float64")
def in_double(images, labels, indices):
    return list(zip(images[indices].double()[:, None] / 255, labels[indices].tolist()))


@right("fetch_batch")
def whole_tensor(images, labels, indices):
    batch = images.index_select(0, torch.tensor(indices)).float().div_(255)
    kinds = labels.tolist()
    return [(image[None], kinds[i]) for image, i in zip(batch, indices)]


@right("fetch_batch")
def through_numpy(images, labels, indices):
    batch = torch.from_numpy(images.numpy()[indices].astype(np.float32) / np.float32(255))
    return [(batch[k : k + 1], int(label)) for k, label in enumerate(labels.numpy()[indices])]


@right("fetch_batch")
def by_multiplication(images, labels, indices):
    batch = images[torch.as_tensor(indices)].view(len(indices), 1, *images.shape[1:]) * (1 / 255)
    return [(batch[k], int(labels[i])) for k, i in enumerate(indices)]


# ── reseed ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("reseed", "it is the same in the next epoch")
def by_worker_id(attribute):
    def start(worker_id):
        setattr(get_worker_info().dataset, attribute, np.random.default_rng(worker_id))

    return start


@wrong("reseed", "it is the same in the next epoch")
def by_worker_id_and_a_constant(attribute):
    return lambda worker_id: setattr(get_worker_info().dataset, attribute, np.random.default_rng(42 + worker_id))


@wrong("reseed", "All workers get the same seed")
def by_the_base_seed(attribute):
    def start(worker_id):
        info = get_worker_info()
        setattr(info.dataset, attribute, np.random.default_rng(torch.initial_seed() - worker_id))

    return start


@wrong("reseed", "no run can be repeated")
def by_the_system(attribute):
    return lambda worker_id: setattr(get_worker_info().dataset, attribute, np.random.default_rng())


@wrong("reseed", "does nothing to the worker's dataset")
def numpy_global_seed(attribute):
    return lambda worker_id: np.random.seed(get_worker_info().seed % 2**32)


@wrong("reseed", "has numbers of the first")
def spawned_from_the_copy(attribute):
    def start(worker_id):
        info = get_worker_info()
        children = getattr(info.dataset, attribute).bit_generator.seed_seq.spawn(info.num_workers)
        setattr(info.dataset, attribute, np.random.default_rng(children[worker_id]))

    return start


@wrong("reseed", "a numpy Generator was expected")
def an_old_generator(attribute):
    return lambda worker_id: setattr(get_worker_info().dataset, attribute, np.random.RandomState(get_worker_info().seed % 2**32))


@wrong("reseed", "ValueError")
def the_whole_seed_for_the_global_state(attribute):
    def start(worker_id):
        np.random.seed(get_worker_info().seed)
        setattr(get_worker_info().dataset, attribute, np.random.default_rng(np.random.randint(2**31)))

    return start


@wrong("reseed", "AttributeError")
def the_function_itself(worker_id):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


@wrong("reseed", "its rng has not been replaced")
def another_name(attribute):
    def start(worker_id):
        get_worker_info().dataset.attribute = np.random.default_rng(get_worker_info().seed)

    return start


@right("reseed")
def by_torch_initial_seed(attribute):
    def start(worker_id):
        get_worker_info().dataset.__dict__[attribute] = np.random.Generator(np.random.PCG64(torch.initial_seed()))

    return start


@right("reseed")
def by_the_global_generator_of_numpy(attribute):
    return lambda worker_id: setattr(get_worker_info().dataset, attribute, np.random.default_rng(np.random.randint(2**32, size=4)))


@right("reseed")
def from_base_and_number(attribute):
    def start(worker_id):
        info = get_worker_info()
        sequence = np.random.SeedSequence([(info.seed - info.id) % 2**32, (info.seed - info.id) >> 32, worker_id])
        setattr(info.dataset, attribute, np.random.Generator(np.random.Philox(sequence)))

    return start


@right("reseed")
class InPlace:
    def __init__(self, attribute):
        self.attribute = attribute

    def __call__(self, worker_id):
        generator = getattr(get_worker_info().dataset, self.attribute)
        generator.bit_generator.state = type(generator.bit_generator)(get_worker_info().seed).state


# ── shard ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("shard", "The stream is not divided")
def everything(stream, info):
    yield from stream


@wrong("shard", "cut into blocks")
def in_blocks(stream, info):
    if info is None:
        return iter(stream)
    items = list(stream)
    each = math.ceil(len(items) / info.num_workers)
    return iter(items[info.id * each :][:each])


@wrong("shard", "value decides here")
def by_the_value(stream, info):
    return (x for x in stream if info is None or (isinstance(x, int) and x % info.num_workers == info.id) or isinstance(x, str) and
            (ord(x) - 97) % info.num_workers == info.id)


@wrong("shard", "Workers are counted from 0")
def counted_from_one(stream, info):
    for k, x in enumerate(stream, 1):
        if info is None or k % info.num_workers == info.id:
            yield x


@wrong("shard", "NoneType")
def always_a_worker(stream, info):
    return itertools.islice(stream, info.id, None, info.num_workers)


@wrong("shard", "'generator' object is not subscriptable")
def by_slicing(stream, info):
    return stream if info is None else stream[info.id :: info.num_workers]


@wrong("shard", "len()")
def by_range(stream, info):
    return iter(stream) if info is None else iter([list(stream)[k] for k in range(info.id, len(stream), info.num_workers)])


def as_a_list(stream, info):
    return [x for k, x in enumerate(stream) if info is None or k % info.num_workers == info.id]


if hasattr(signal, "setitimer"):  # without, nothing ends it
    wrong("shard", "time limit")(as_a_list)


@right("shard")
def by_counting(stream, info):
    for k, x in enumerate(stream):
        if info is None or k % info.num_workers == info.id:
            yield x


@right("shard")
def by_a_cycle(stream, info):
    mine = [True] if info is None else [number == info.id for number in range(info.num_workers)]
    return itertools.compress(stream, itertools.cycle(mine))


@right("shard")
def by_skipping(stream, info):
    walk = iter(stream)
    number, workers = (0, 1) if info is None else (info.id, info.num_workers)
    nothing = object()
    while True:
        round_of_items = [next(walk, nothing) for _ in range(workers)]
        if round_of_items[number] is nothing:
            return
        yield round_of_items[number]


# ── pad_batch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pad(sequences, value=0):
    return nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)


@wrong("pad_batch", "the lengths say what is real")
def mask_by_value(sequences, value=0):
    padded = _pad(sequences, value)
    return padded, padded != value if padded.dim() == 2 else (padded != value).flatten(2).any(dim=2)


@wrong("pad_batch", "the wrong way round")
def inverted(sequences, value=0):
    padded = _pad(sequences, value)
    return padded, torch.arange(padded.shape[1]) >= torch.tensor([len(s) for s in sequences])[:, None]


@wrong("pad_batch", "`batch_first=True` puts the batch there")
def time_first(sequences, value=0):
    padded = nn.utils.rnn.pad_sequence(sequences, padding_value=value)
    return padded, torch.arange(len(padded)) < torch.tensor([len(s) for s in sequences])[:, None]


@wrong("pad_batch", "each sequence begins at place 0")
def padded_on_the_left(sequences, value=0):
    longest = max(map(len, sequences))
    padded = torch.stack([torch.cat([s.new_full((longest - len(s), *s.shape[1:]), value), s]) for s in sequences])
    return padded, torch.arange(longest) >= longest - torch.tensor([len(s) for s in sequences])[:, None]


@wrong("pad_batch", "pads with 0")
def always_zeros(sequences, value=0):
    return _pad(sequences), right_by_hand(sequences)[1]


@wrong("pad_batch", "should be bool")
def numbers_for_a_mask(sequences, value=0):
    return _pad(sequences, value), right_by_hand(sequences)[1].float()


@wrong("pad_batch", "the dtype is torch.float32, expected torch.int64")
def all_floats(sequences, value=0):
    padded = torch.full((len(sequences), max(map(len, sequences)), *sequences[0].shape[1:]), float(value))
    for row, s in zip(padded, sequences):
        row[: len(s)] = s
    return padded, right_by_hand(sequences)[1]


@wrong("pad_batch", "shape is (3, 4, 5), expected (3, 4)")
def mask_of_numbers(sequences, value=0):
    return _pad(sequences, value), _pad([torch.ones_like(s, dtype=torch.bool) for s in sequences], False)


@wrong("pad_batch", "A tensor came where a tuple was expected")
def without_mask(sequences, value=0):
    return _pad(sequences, value)


@wrong("pad_batch", "RuntimeError")
def stacked(sequences, value=0):
    return torch.stack(sequences), torch.ones(len(sequences), len(sequences[0]), dtype=torch.bool)


@right("pad_batch")
def right_by_hand(sequences, value=0):
    longest = max(len(s) for s in sequences)
    padded = sequences[0].new_full((len(sequences), longest, *sequences[0].shape[1:]), value)
    mask = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for k, s in enumerate(sequences):
        padded[k, : len(s)] = s
        mask[k, : len(s)] = True
    return padded, mask


@right("pad_batch")
def all_at_once(sequences, value=0):
    lengths = torch.as_tensor([*map(len, sequences)])
    mask = torch.arange(int(lengths.max())).expand(len(sequences), -1) < lengths.unsqueeze(1)
    together = torch.cat(sequences)
    padded = torch.full((*mask.shape, *together.shape[1:]), value, dtype=together.dtype)
    padded[mask] = together
    return padded, mask


@right("pad_batch")
def mask_by_padding(sequences, value=0):
    return _pad(sequences, value), _pad([torch.ones(len(s), dtype=torch.bool) for s in sequences], False)


# ── masked_loss ───────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("masked_loss", "take part, with whatever target")
def over_all_places(outputs, targets, mask):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@wrong("masked_loss", "count as places in the mean")
def mean_over_all(outputs, targets, mask):
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (losses * mask).mean()


@wrong("masked_loss", "a place of a short sequence more weight")
def mean_of_sequence_means(outputs, targets, mask):
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return ((losses * mask).sum(dim=1) / mask.sum(dim=1)).mean()


@wrong("masked_loss", "This is the sum")
def summed(outputs, targets, mask):
    return F.cross_entropy(outputs[mask], targets[mask], reduction="sum")


@wrong("masked_loss", "out of bounds")
def multiplied(outputs, targets, mask):
    losses = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
    return (losses * mask).sum() / mask.sum()


@wrong("masked_loss", "0 times nan is nan")
def multiplied_with_a_target(outputs, targets, mask):
    losses = F.cross_entropy(outputs.transpose(1, 2), targets.where(mask, 0), reduction="none")
    return (losses * mask).sum() / mask.sum()


@wrong("masked_loss", "goes through their softmax")
def by_ignore_index(outputs, targets, mask):
    return F.cross_entropy(outputs.transpose(1, 2), torch.where(mask, targets, -100))


@wrong("masked_loss", "gradient is nan at padded places")
def by_where_on_the_loss(outputs, targets, mask):
    losses = F.cross_entropy(outputs.transpose(1, 2), targets.where(mask, 0), reduction="none")
    return torch.where(mask, losses, 0.0).sum() / mask.sum()


@wrong("masked_loss", "has no graph")
def detached(outputs, targets, mask):
    return F.cross_entropy(outputs.detach()[mask], targets[mask])


@wrong("masked_loss", "A float came where a tensor was expected")
def a_number(outputs, targets, mask):
    return F.cross_entropy(outputs[mask], targets[mask]).item()


@wrong("masked_loss", "1.8729786 was expected")
def padding_as_class_zero(outputs, targets, mask):
    outputs = outputs.masked_fill(~mask[..., None], 0.0)
    return F.cross_entropy(outputs.flatten(0, 1), targets.where(mask, 0).flatten()).double().float() * 1.0


@right("masked_loss")
def by_where_before(outputs, targets, mask):
    clean = torch.where(mask.unsqueeze(-1), outputs, 0.0)
    return F.cross_entropy(clean.transpose(1, 2), targets.masked_fill(~mask, -100), ignore_index=-100)


@right("masked_loss")
def by_log_softmax_and_gather(outputs, targets, mask):
    places = mask.nonzero(as_tuple=True)
    logs = outputs[places].log_softmax(dim=-1)
    return -logs.gather(1, targets[places][:, None]).sum() / mask.count_nonzero()


@right("masked_loss")
def by_a_loop_over_places(outputs, targets, mask):
    losses = [
        outputs[i, t].logsumexp(0) - outputs[i, t, targets[i, t]]
        for i in range(outputs.shape[0])
        for t in range(outputs.shape[1])
        if mask[i, t]
    ]
    return torch.stack(losses).mean()


# ── pack_strings ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _bytes_of(strings):
    return torch.tensor(list("".join(strings).encode()), dtype=torch.uint8)


@wrong("pack_strings", "count the bytes")
def by_characters(strings):
    return _bytes_of(strings), torch.tensor([0, *itertools.accumulate(map(len, strings))])


@wrong("pack_strings", "One more is needed, its end")
def beginnings_alone(strings):
    sizes = [len(s.encode()) for s in strings]
    return _bytes_of(strings), torch.tensor([sum(sizes[:k]) for k in range(len(sizes))])


@wrong("pack_strings", "the beginning of the first, 0, is missing")
def ends_alone(strings):
    return _bytes_of(strings), torch.tensor([len(s.encode()) for s in strings]).cumsum(0)


@wrong("pack_strings", "These are the lengths")
def lengths(strings):
    return _bytes_of(strings), torch.tensor([len(s.encode()) for s in strings])


@wrong("pack_strings", "give torch.tensor the dtype torch.uint8")
def eight_bytes_each(strings):
    return torch.tensor(list("".join(strings).encode())), right_offsets(strings)


@wrong("pack_strings", "separated by a byte of their own")
def with_separators(strings):
    parts = [s.encode() + b"\x00" for s in strings]
    return torch.tensor(list(b"".join(parts)), dtype=torch.uint8), torch.tensor([0, *itertools.accumulate(map(len, parts))])


@wrong("pack_strings", "Entry 0: the shape is")
def code_points(strings):
    return torch.tensor([ord(c) % 256 for c in "".join(strings)], dtype=torch.uint8), right_offsets(strings)


@wrong("pack_strings", "both buffer length (0)")
def no_case_for_none_at_all(strings):
    return torch.frombuffer(bytearray("".join(strings).encode()), dtype=torch.uint8), right_offsets(strings)


@wrong("pack_strings", "dtype is torch.int32")
def short_offsets(strings):
    return _bytes_of(strings), right_offsets(strings).int()


def right_offsets(strings):
    places = [0]
    for s in strings:
        places.append(places[-1] + len(s.encode()))
    return torch.tensor(places)


@right("pack_strings")
def byte_by_byte(strings):
    data, offsets = bytearray(), [0]
    for s in strings:
        data.extend(s.encode("utf-8"))
        offsets.append(len(data))
    return torch.tensor(list(data), dtype=torch.uint8), torch.tensor(offsets)


@right("pack_strings")
def by_numpy_cumsum(strings):
    parts = [np.frombuffer(s.encode(), np.uint8) for s in strings]
    offsets = np.cumsum([0] + [len(p) for p in parts])
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *parts])), torch.from_numpy(offsets.astype(np.int64))


@right("pack_strings")
def by_concatenated_tensors(strings):
    parts = [torch.tensor(list(s.encode()), dtype=torch.uint8) for s in strings]
    sizes = torch.tensor([0, *map(len, parts)], dtype=torch.int64)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8), sizes.cumsum(0)


# ── remaining ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _drawn(seed, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def _pieces(order, size):
    return [order[k : k + size] for k in range(0, len(order), size)]


@wrong("remaining", "leaves out as many single items")
def items_left_out(order_seed, epoch, n, batch_size, consumed):
    return _pieces(_drawn(order_seed + epoch, n)[consumed:], batch_size)


@wrong("remaining", "shuffled anew")
def shuffles_what_is_left(order_seed, epoch, n, batch_size, consumed):
    left = list(range(consumed * batch_size, n))
    return _pieces([left[i] for i in _drawn(order_seed + epoch, len(left))], batch_size)


@wrong("remaining", "every epoch has the same order")
def without_epoch(order_seed, epoch, n, batch_size, consumed):
    return _pieces(_drawn(order_seed, n), batch_size)[consumed:]


@wrong("remaining", "One generator draws the orders of all epochs")
def one_generator(order_seed, epoch, n, batch_size, consumed):
    generator = torch.Generator().manual_seed(order_seed)
    orders = [torch.randperm(n, generator=generator) for _ in range(epoch + 1)]
    return _pieces(orders[-1].tolist(), batch_size)[consumed:]


@wrong("remaining", "smaller batch at the end is missing")
def full_ones_alone(order_seed, epoch, n, batch_size, consumed):
    return _pieces(_drawn(order_seed + epoch, n), batch_size)[consumed : n // batch_size]


@wrong("remaining", "global random state has changed")
def by_manual_seed(order_seed, epoch, n, batch_size, consumed):
    torch.manual_seed(order_seed + epoch)
    return _pieces(torch.randperm(n).tolist(), batch_size)[consumed:]


@wrong("remaining", "These are the batches that have been seen")
def what_was_seen(order_seed, epoch, n, batch_size, consumed):
    return _pieces(_drawn(order_seed + epoch, n), batch_size)[:consumed]


@wrong("remaining", "entry 0 is 1, expected 8")
def by_another_generator(order_seed, epoch, n, batch_size, consumed):
    order = list(range(n))
    random.Random(order_seed + epoch).shuffle(order)
    return _pieces(order, batch_size)[consumed:] + ([] if n else [[]])


@wrong("remaining", "a tensor came where a list was expected")
def tensors_of_indices(order_seed, epoch, n, batch_size, consumed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(order_seed + epoch))
    return list(order.split(batch_size))[consumed:]


@right("remaining")
def by_a_sampler_and_islice(order_seed, epoch, n, batch_size, consumed):
    sampler = RandomSampler(range(n), generator=torch.Generator().manual_seed(order_seed + epoch))
    return list(itertools.islice(BatchSampler(sampler, batch_size, drop_last=False), consumed, None))


@right("remaining")
def by_position(order_seed, epoch, n, batch_size, consumed):
    left = _drawn(order_seed + epoch, n)[consumed * batch_size :]
    batches = []
    while left:
        batches.append(left[:batch_size])
        del left[:batch_size]
    return batches


@right("remaining")
def with_the_state_put_back(order_seed, epoch, n, batch_size, consumed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(order_seed + epoch)
        order = torch.randperm(n)
    return [batch.tolist() for batch in torch.split(order, batch_size)][consumed:]


# ── noisy_dataset ─────────────────────────────────────────────────────────────────────────────────────────────────────

broken("noisy_dataset", "is copied into each of them")


class _Noisy(Dataset):
    """images[i] + scale * self.numbers(i)."""

    def __init__(self, images, scale):
        self.images, self.scale = images, scale

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i] + self.scale * torch.as_tensor(self.numbers(i), dtype=torch.float32)


@wrong("noisy_dataset", "is copied into each of them")
def an_unseeded_generator_at_the_start(images, scale=0.1):
    class Noisy(_Noisy):
        rng = np.random.default_rng()

        def numbers(self, i):
            return self.rng.standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "is copied into each of them")
def a_generator_of_torch_at_the_start(images, scale=0.1):
    generator = torch.Generator().manual_seed(1)

    class Noisy(_Noisy):
        def numbers(self, i):
            return torch.randn(self.images[i].shape, generator=generator)

    return Noisy(images, scale)


@wrong("noisy_dataset", "is copied into each of them")
def made_at_the_first_access(images, scale=0.1):
    class Noisy(_Noisy):
        rng = None

        def numbers(self, i):
            if self.rng is None:
                info = get_worker_info()
                self.rng = np.random.default_rng(None if info is None else info.seed)
            return self.rng.standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "in the epoch before")
def a_seed_for_each_item(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            return np.random.default_rng(i).standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "the main process, is the same in the next epoch")
def a_seed_for_each_item_and_worker(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            return np.random.default_rng([torch.initial_seed() % 2**63, i]).standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "Workers that stay")
def a_seed_for_each_item_in_workers(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            seed = None if get_worker_info() is None else [get_worker_info().seed, i]
            return np.random.default_rng(seed).standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "from the operating system")
def from_the_system(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            return np.random.default_rng().standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "is copied into each of them")
def seeded_by_worker_id_in_main(images, scale=0.1):
    class Noisy(_Noisy):
        def __init__(self, *given):
            super().__init__(*given)
            info = get_worker_info()
            self.rng = np.random.default_rng(0 if info is None else info.id)

        def numbers(self, i):
            return self.rng.standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@wrong("noisy_dataset", "standard deviation")
def uniform_noise(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            return torch.rand(self.images[i].shape) - 0.5

    return Noisy(images, scale)


@wrong("noisy_dataset", "in the epoch before")
def drawn_once_for_all(images, scale=0.1):
    return images + scale * torch.randn(images.shape)


@wrong("noisy_dataset", "object of it is asked for")
def the_class(images, scale=0.1):
    return _Noisy


@right("noisy_dataset")
def by_numpy_global(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            return np.random.standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@right("noisy_dataset")
def a_generator_for_each_worker(images, scale=0.1):
    class Noisy(_Noisy):
        owner = rng = None

        def numbers(self, i):
            info = get_worker_info()
            owner = os.getpid(), None if info is None else (info.id, info.seed)
            if self.owner != owner:
                self.owner, self.rng = owner, np.random.default_rng(torch.initial_seed())
            return self.rng.standard_normal(self.images[i].shape)

    return Noisy(images, scale)


@right("noisy_dataset")
def a_seed_drawn_for_each_item(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            seed = torch.randint(2**62, ()).item()
            return torch.randn(self.images[i].shape, generator=torch.Generator().manual_seed(seed))

    return Noisy(images, scale)


@right("noisy_dataset")
def by_python_random(images, scale=0.1):
    class Noisy(_Noisy):
        def numbers(self, i):
            return torch.tensor([random.gauss(0, 1) for _ in range(self.images[i].numel())]).reshape(self.images[i].shape)

    return Noisy(images, scale)


# ── count_stream ──────────────────────────────────────────────────────────────────────────────────────────────────────

broken("count_stream", "wherever the dataset is *made*")


def _stream(walk):
    def count_stream(n):
        class Count(IterableDataset):
            def __iter__(self):
                return walk(n)

        return Count()

    return count_stream


@_stream
def _undivided(n):
    return iter(range(n))


wrong("count_stream", "Each worker gives all of them")(_undivided)


@wrong("count_stream", "'NoneType' object has no attribute 'id'")
@_stream
def _first_worker_alone(n):
    if get_worker_info().id > 0:
        return iter(())
    return iter(range(n))


@wrong("count_stream", "are missing")
@_stream
def _blocks_cut_short(n):
    info = get_worker_info()
    if info is None:
        return iter(range(n))
    each = n // info.num_workers
    return iter(range(info.id * each, (info.id + 1) * each))


@wrong("count_stream", "a new one each time")
def one_iterator(n):
    numbers = iter(range(n))

    class Count(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            return itertools.islice(numbers, 0 if info is None else info.id, None, 1 if info is None else info.num_workers)

    return Count()


@wrong("count_stream", "An IterableDataset was expected")
def a_range(n):
    return range(n)


@wrong("count_stream", "a part alone, or nothing")
@_stream
def _none_without_workers(n):
    info = get_worker_info()
    return iter(range(info.id, n, info.num_workers)) if info else iter([])


@wrong("count_stream", "of which 7 came before")
@_stream
def _off_by_one(n):
    info = get_worker_info()
    return iter(range(n)) if info is None else iter(range(info.id, n))


@right("count_stream")
@_stream
def _even_blocks(n):
    info = get_worker_info()
    number, workers = (0, 1) if info is None else (info.id, info.num_workers)
    return iter(range(n * number // workers, n * (number + 1) // workers))


@right("count_stream")
@_stream
def _backwards_by_remainder(n):
    info = get_worker_info()
    for k in reversed(range(n)):
        if info is None or k % info.num_workers == info.id:
            yield torch.tensor(k)


@right("count_stream")
@_stream
def _one_does_it_all(n):
    info = get_worker_info()
    return iter(range(n) if info is None or info.id == 0 else ())


# ── read_rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

broken("read_rows", "is open when workers are forked has one position")


class _Rows(Dataset):
    def __init__(self, path, columns):
        self.path, self.columns = path, columns

    def __len__(self):
        return os.path.getsize(self.path) // (8 * self.columns)

    def read(self, file, i):
        file.seek(8 * self.columns * i)
        return torch.frombuffer(bytearray(file.read(8 * self.columns)), dtype=torch.int64)


@wrong("read_rows", "is open when workers are forked has one position")
def buffered_at_the_start(path, columns):
    class Rows(_Rows):
        def __init__(self, *given):
            super().__init__(*given)
            self.file = open(path, "rb")

        def __getitem__(self, i):
            return self.read(self.file, i)

    return Rows(path, columns)


@wrong("read_rows", "is open when workers are forked has one position")
def with_a_lock(path, columns):
    import threading

    file, lock = open(path, "rb"), threading.Lock()  # of threads: each forked process has its own

    class Rows(_Rows):
        def __getitem__(self, i):
            with lock:
                return self.read(file, i)

    return Rows(path, columns)


@wrong("read_rows", "one look at an item")
def at_the_first_access(path, columns):
    class Rows(_Rows):
        file = None

        def __getitem__(self, i):
            if self.file is None:
                self.file = open(path, "rb", buffering=0)
            return self.read(self.file, i)

    return Rows(path, columns)


@wrong("read_rows", "leave it out of a copy")
def by_process_alone(path, columns):
    class Rows(_Rows):
        owner = None

        def __getitem__(self, i):
            if self.owner != os.getpid():
                self.owner, self.file = os.getpid(), open(path, "rb")
            return self.read(self.file, i)

    return Rows(path, columns)


@wrong("read_rows", "cannot pickle")
def a_held_mmap(path, columns):
    class Rows(_Rows):
        def __init__(self, *given):
            super().__init__(*given)
            with open(path, "rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        def __getitem__(self, i):
            size = 8 * self.columns
            return torch.frombuffer(bytearray(self.map[size * i : size * (i + 1)]), dtype=torch.int64)

    return Rows(path, columns)


@wrong("read_rows", "Row 4095: 32 of 32 elements differ")
def wrong_unit(path, columns):
    class Rows(_Rows):
        def __getitem__(self, i):
            with open(path, "rb") as file:
                file.seek(columns * i)
                return torch.frombuffer(bytearray(file.read(8 * columns)), dtype=torch.int64)

    return Rows(path, columns)


@wrong("read_rows", "a numpy array came where a tensor was expected")
def rows_of_numpy(path, columns):
    return np.fromfile(path, np.int64).reshape(-1, columns)


@right("read_rows")
def by_memmap(path, columns):
    class Rows(_Rows):
        def __init__(self, *given):
            super().__init__(*given)
            self.table = np.memmap(path, np.int64, "r").reshape(-1, columns)

        def __getitem__(self, i):
            return torch.from_numpy(self.table[i].copy())

    return Rows(path, columns)


@right("read_rows")
def by_fromfile(path, columns):
    class Rows(_Rows):
        def __getitem__(self, i):
            return torch.from_numpy(np.fromfile(path, np.int64, columns, offset=8 * columns * i))

    return Rows(path, columns)


@right("read_rows")
def by_torch_from_file(path, columns):
    class Rows(_Rows):
        def __getitem__(self, i):
            return torch.from_file(path, size=len(self) * columns, dtype=torch.int64).view(-1, columns)[i].clone()

    return Rows(path, columns)


def by_pread(path, columns):
    class Rows(_Rows):
        def __getitem__(self, i):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                return torch.frombuffer(bytearray(os.pread(descriptor, 8 * columns, 8 * columns * i)), dtype=torch.int64)
            finally:
                os.close(descriptor)

    return Rows(path, columns)


def a_held_descriptor(path, columns):
    class Rows(_Rows):
        def __init__(self, *given):
            super().__init__(*given)
            self.descriptor = os.open(path, os.O_RDONLY)  # a number, which a copy has, and another process has not

        def __getitem__(self, i):
            return torch.frombuffer(bytearray(os.pread(self.descriptor, 8 * columns, 8 * columns * i)), dtype=torch.int64)

        def __del__(self):
            with contextlib.suppress(OSError):
                os.close(self.descriptor)

    return Rows(path, columns)


if hasattr(os, "pread"):
    right("read_rows")(by_pread)
if sys.platform == "linux":
    wrong("read_rows", "cannot be given an open file at all")(a_held_descriptor)


@right("read_rows")
def by_process_and_not_copied(path, columns):
    class Rows(_Rows):
        owner = file = None

        def __getitem__(self, i):
            if self.owner != os.getpid():
                self.owner, self.file = os.getpid(), open(path, "rb")
            return self.read(self.file, i)

        def __getstate__(self):
            return {**self.__dict__, "owner": None, "file": None}

    return Rows(path, columns)


@right("read_rows")
def all_in_memory(path, columns):
    class Rows(_Rows):
        table = torch.from_numpy(np.fromfile(path, np.int64)).view(-1, columns)

        def __getitem__(self, i):
            return self.table[i].clone()

    return Rows(path, columns)


# ── make_batch ────────────────────────────────────────────────────────────────────────────────────────────────────────

broken("make_batch", "leaves everything else as it is")


@wrong("make_batch", "leaves everything else as it is")
def a_dataclass(samples):
    @dataclasses.dataclass
    class Batch:
        inputs: torch.Tensor
        targets: torch.Tensor

    return Batch(*default_collate(samples))


@wrong("make_batch", "Keep what it returns")
def pinned_and_forgotten(samples):
    class Batch:
        def __init__(self):
            self.inputs, self.targets = default_collate(samples)

        def pin_memory(self):
            self.inputs.pin_memory()
            self.targets.pin_memory()
            return self

    return Batch()


@wrong("make_batch", "return the batch")
def pins_without_return(samples):
    class Batch:
        def __init__(self):
            self.inputs, self.targets = default_collate(samples)

        def pin_memory(self):
            self.inputs, self.targets = self.inputs.pin_memory(), self.targets.pin_memory()

    return Batch()


@wrong("make_batch", "targets is not pinned")
def pins_the_inputs_alone(samples):
    class Batch:
        def __init__(self):
            self.inputs, self.targets = default_collate(samples)

        def pin_memory(self):
            self.inputs = self.inputs.pin_memory()
            return self

    return Batch()


@wrong("make_batch", "no attribute inputs")
def a_plain_tuple(samples):
    return tuple(default_collate(samples))


@wrong("make_batch", "no attribute inputs")
def pins_to_a_tuple(samples):
    class Batch:
        def __init__(self):
            self.inputs, self.targets = default_collate(samples)

        def pin_memory(self):
            return self.inputs.pin_memory(), self.targets.pin_memory()

    return Batch()


@wrong("make_batch", "missing 1 required positional argument")
def a_method_with_a_device(samples):
    class Batch:
        def __init__(self):
            self.inputs, self.targets = default_collate(samples)

        def pin_memory(self, device):
            self.inputs, self.targets = self.inputs.pin_memory(device), self.targets.pin_memory(device)
            return self

    return Batch()


@wrong("make_batch", "its targets")
def targets_as_floats(samples):
    batch = by_a_namedtuple(samples)
    return batch._replace(targets=batch.targets.float())


@right("make_batch")
def by_a_namedtuple(samples):
    return collections.namedtuple("Batch", ["inputs", "targets"])(*default_collate(samples))


@right("make_batch")
def by_a_typed_namedtuple(samples):
    class Batch(typing.NamedTuple):
        inputs: torch.Tensor
        targets: torch.Tensor

    return Batch(torch.stack([x for x, _ in samples]), torch.as_tensor([y for _, y in samples]))


@right("make_batch")
def by_a_dict_with_attributes(samples):
    class Batch(dict):
        def __getattr__(self, name):
            if name in self:
                return self[name]
            raise AttributeError(name)

    inputs, targets = default_collate(samples)
    return Batch(inputs=inputs, targets=targets)


@right("make_batch")
def by_a_frozen_dataclass(samples):
    @dataclasses.dataclass(frozen=True)
    class Batch:
        inputs: torch.Tensor
        targets: torch.Tensor

        def pin_memory(self, device=None):
            return dataclasses.replace(self, **{f.name: getattr(self, f.name).pin_memory() for f in dataclasses.fields(self)})

    return Batch(*default_collate(samples))


@right("make_batch")
def by_a_method_of_a_namespace(samples):
    inputs, targets = default_collate(samples)
    batch = types.SimpleNamespace(inputs=inputs, targets=targets)

    def pin_memory():
        batch.inputs, batch.targets = batch.inputs.pin_memory(), batch.targets.pin_memory()
        return batch

    batch.pin_memory = pin_memory
    return batch


# ── balanced_sampler ──────────────────────────────────────────────────────────────────────────────────────────────────

broken("balanced_sampler", "one weight for each class")


@wrong("balanced_sampler", "one weight for each class")
def normalised_weights_of_classes(labels):
    weights = labels.bincount().sum() / labels.bincount()
    return WeightedRandomSampler(weights / weights.sum(), len(labels))


@wrong("balanced_sampler", "what is frequent becomes more so")
def by_frequency(labels):
    return WeightedRandomSampler(torch.bincount(labels)[labels] / len(labels), len(labels))


@wrong("balanced_sampler", "Without replacement")
def no_replacement(labels):
    return WeightedRandomSampler((1 / labels.bincount())[labels], len(labels), replacement=False)


@wrong("balanced_sampler", "one index for each class")
def as_many_as_classes(labels):
    return WeightedRandomSampler((1 / labels.bincount())[labels], len(labels.unique()))


@wrong("balanced_sampler", "the classes come as often as they are there")
def all_alike(labels):
    return WeightedRandomSampler(torch.ones(len(labels)), len(labels))


@wrong("balanced_sampler", "the same indices as the first")
def one_draw(labels):
    return torch.multinomial((1 / labels.bincount())[labels], len(labels), replacement=True).tolist()


@wrong("balanced_sampler", "Pass 1 gives 0 indices")
def one_pass(labels):
    return iter(WeightedRandomSampler((1 / labels.bincount())[labels], len(labels)))


@wrong("balanced_sampler", "of the indices belong to class")
def by_square_roots(labels):
    return WeightedRandomSampler(labels.bincount().float().rsqrt()[labels], len(labels))


@wrong("balanced_sampler", "there are 500 samples")
def padded_weights(labels):
    weights = 1 / labels.bincount()
    return WeightedRandomSampler(torch.cat([weights[labels], weights]), len(labels))


class _EachClassInTurn(Sampler):
    def __init__(self, labels):
        self.pools, self.n = [(labels == c).nonzero().flatten().tolist() for c in labels.unique()], len(labels)

    def __len__(self):
        return self.n


@wrong("balanced_sampler", "samples only")
def few_of_each(labels):
    class Few(_EachClassInTurn):
        def __iter__(self):
            return (random.choice(self.pools[k % len(self.pools)][:1]) for k in torch.randperm(self.n).tolist())

    return Few(labels)


@wrong("balanced_sampler", "are drawn more often than the others")
def the_first_of_each(labels):
    class Few(_EachClassInTurn):
        def __iter__(self):
            return (random.choice(self.pools[k % len(self.pools)][:20]) for k in torch.randperm(self.n).tolist())

    return Few(labels)


@right("balanced_sampler")
def class_first(labels):
    class Turns(_EachClassInTurn):
        def __iter__(self):
            return (random.choice(random.choice(self.pools)) for _ in range(self.n))

    return Turns(labels)


@right("balanced_sampler")
def by_numpy_choice(labels):
    inverse, counts = np.unique(labels.numpy(), return_inverse=True, return_counts=True)[1:]
    p = 1 / (counts[inverse] * len(counts))

    class Draws(Sampler):
        def __iter__(self):
            return iter(np.random.choice(len(p), size=len(p), p=p))

        def __len__(self):
            return len(p)

    return Draws()


@right("balanced_sampler")
def by_cumulated_weights(labels):
    counts = collections.Counter(labels.tolist())
    sums = list(itertools.accumulate(1 / counts[c] for c in labels.tolist()))

    class Draws:
        def __iter__(self):
            for _ in sums:
                yield min(bisect.bisect(sums, random.random() * sums[-1]), len(sums) - 1)

    return Draws()


@right("balanced_sampler")
def the_same_number_of_each(labels):
    class Turns(_EachClassInTurn):
        def __iter__(self):
            turns = [random.choice(self.pools[k % len(self.pools)]) for k in range(self.n)]
            random.shuffle(turns)
            return iter(turns)

    return Turns(labels)


# ── split_with_transforms ─────────────────────────────────────────────────────────────────────────────────────────────

broken("split_with_transforms", "random_split makes two lists of indices over *one* dataset")


class _Through(Dataset):
    def __init__(self, images, transform, indices=None):
        self.images, self.transform, self.indices = images, transform, range(len(images)) if indices is None else indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        return self.transform(self.images[self.indices[i]])


@wrong("split_with_transforms", "random_split makes two lists of indices over *one* dataset")
def set_on_the_part(images, held_out, augment, plain, generator):
    training, validation = random_split(_Through(images, augment), [len(images) - held_out, held_out], generator)
    validation.transform = plain
    return training, validation


@wrong("split_with_transforms", "in the training set as well")
def split_twice(images, held_out, augment, plain, generator):
    sizes = [len(images) - held_out, held_out]
    training, _ = random_split(_Through(images, augment), sizes, generator=generator)
    _, validation = random_split(_Through(images, plain), sizes, generator=generator)
    return training, validation


@wrong("split_with_transforms", "called once for all")
def before_the_split(images, held_out, augment, plain, generator):
    order = torch.randperm(len(images), generator=generator)
    return [augment(images[i]) for i in order[held_out:]], [plain(images[i]) for i in order[:held_out]]


@wrong("split_with_transforms", "are a block")
def the_last_ones(images, held_out, augment, plain, generator):
    cut = len(images) - held_out
    return _Through(images[:cut], augment), _Through(images[cut:], plain)


@wrong("split_with_transforms", "Nothing was drawn from the generator given")
def by_the_global_state(images, held_out, augment, plain, generator):
    order = torch.randperm(len(images)).tolist()
    return _Through(images, augment, order[held_out:]), _Through(images, plain, order[:held_out])


@wrong("split_with_transforms", "its length is")
def exchanged_sizes(images, held_out, augment, plain, generator):
    order = torch.randperm(len(images), generator=generator).tolist()
    return _Through(images, augment, order[:held_out]), _Through(images, plain, order[held_out:])


@wrong("split_with_transforms", "has been through plain")
def exchanged_transforms(images, held_out, augment, plain, generator):
    order = torch.randperm(len(images), generator=generator).tolist()
    return _Through(images, plain, order[held_out:]), _Through(images, augment, order[:held_out])


@wrong("split_with_transforms", "A tuple (training, validation) was expected")
def a_list_of_two(images, held_out, augment, plain, generator):
    return list(by_subsets(images, held_out, augment, plain, generator))


@wrong("split_with_transforms", "is no image's")
def both_transforms(images, held_out, augment, plain, generator):
    training, validation = by_subsets(images, held_out, augment, plain, generator)
    return training, _Through([validation[i] for i in range(held_out)], plain)


@right("split_with_transforms")
def by_subsets(images, held_out, augment, plain, generator):
    training, validation = random_split(range(len(images)), [len(images) - held_out, held_out], generator=generator)
    return Subset(_Through(images, augment), list(training)), Subset(_Through(images, plain), validation.indices)


@right("split_with_transforms")
def by_a_copy(images, held_out, augment, plain, generator):
    training, validation = random_split(_Through(images, augment), [len(images) - held_out, held_out], generator=generator)
    validation.dataset = copy.copy(validation.dataset)
    validation.dataset.transform = plain
    return training, validation


@right("split_with_transforms")
def by_copied_images(images, held_out, augment, plain, generator):
    mixed = images[torch.rand(len(images), generator=generator).argsort()]
    return _Through(mixed[held_out:], augment), _Through(mixed[:held_out], plain)


@right("split_with_transforms")
def the_same_seed_twice(images, held_out, augment, plain, generator):
    sizes, before = [len(images) - held_out, held_out], generator.get_state()
    training, _ = random_split(_Through(images, augment), sizes, generator=generator)
    generator.set_state(before)
    _, validation = random_split(_Through(images, plain), sizes, generator=generator)
    return training, validation


# ── validate_each_epoch ───────────────────────────────────────────────────────────────────────────────────────────────

broken("validate_each_epoch", "Going through the validation loader draws")


def _train(model, loader, loss_fn, optimizer):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def _validate(model, loader, loss_fn):
    model.eval()
    pairs = [(loss_fn(model(x), y).item(), len(y)) for x, y in loader]
    return sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)


@wrong("validate_each_epoch", "the same training ends with other weights")
def train_again_afterwards(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    losses = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        losses.append(_validate(model, val_loader, loss_fn))
        model.train()
    return losses


@wrong("validate_each_epoch", "set to a seed after each validation")
def seeded_each_epoch(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    losses = []
    for epoch in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        losses.append(_validate(model, val_loader, loss_fn))
        torch.manual_seed(epoch)
    return losses


@wrong("validate_each_epoch", "covers the base seed that the loader draws")
def a_generator_for_the_loader(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    val_loader.generator = torch.Generator()
    losses = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        losses.append(_validate(model, val_loader, loss_fn))
    return losses


@wrong("validate_each_epoch", "Validation is in eval mode")
def in_train_mode(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    losses = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            pairs = [(loss_fn(model(x), y).item(), len(y)) for x, y in val_loader]
        losses.append(sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs))
    return losses


@wrong("validate_each_epoch", "small last batch counts more")
def mean_of_means(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    losses = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            each = [loss_fn(model(x), y).item() for x, y in val_loader]
        losses.append(sum(each) / len(each))
    return losses


@wrong("validate_each_epoch", "nothing has been trained")
def on_a_copy_of_the_model(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    return by_the_state(copy.deepcopy(model), train_loader, val_loader, loss_fn, optimizer, epochs)


@wrong("validate_each_epoch", "is still in eval mode")
def never_back_in_train_mode(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    losses = []
    model.train()
    for _ in range(epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        with torch.random.fork_rng(devices=[]):
            losses.append(_validate(model, val_loader, loss_fn))
    return losses


@wrong("validate_each_epoch", "A list of 1 floats was expected")
def tensors_of_losses(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    return torch.tensor(by_the_state(model, train_loader, val_loader, loss_fn, optimizer, epochs))


@right("validate_each_epoch")
def by_the_state(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    losses = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        state = torch.get_rng_state()
        losses.append(_validate(model, val_loader, loss_fn))
        torch.set_rng_state(state)
    return losses


@right("validate_each_epoch")
def without_a_loader(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    with torch.random.fork_rng(devices=[]):
        inputs, targets = default_collate([val_loader.dataset[i] for i in range(len(val_loader.dataset))])
    losses = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        with torch.inference_mode():
            losses.append(loss_fn(model.eval()(inputs), targets).item())
    return losses


@right("validate_each_epoch")
def copies_judged_at_the_end(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    kept = []
    for _ in range(epochs):
        _train(model, train_loader, loss_fn, optimizer)
        kept.append(copy.deepcopy(model))
    return [_validate(m, DataLoader(val_loader.dataset, 3), loss_fn) for m in kept]
