"""Feeding the model: where an epoch's time goes, which loader is fastest here, what a worker needs, batches of uneven sequences,
and an order of the data that can be resumed.

Times are seconds, by time.perf_counter: a clock that all processes of a machine share (CLOCK_MONOTONIC on Linux,
QueryPerformanceCounter on Windows, mach_absolute_time on macOS), so that a worker's work and the loop's waiting lie on one line.
"""

import copy
import itertools
import math
import os
import pickle
import random
import statistics
import subprocess
import sys
import time
import types
import warnings
from dataclasses import dataclass, field

import torch
import torch.multiprocessing
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from course_utils.toolkit.batches import to_device

# ── Where an epoch goes ───────────────────────────────────────────────────────────────────────────────────────────────


def stall_fraction(waits, steps):
    """Share of an epoch that the loop waits for batches, a float from 0 to 1; 0.0 of no time. Both: seconds, one for each batch."""
    total = sum(waits) + sum(steps)
    return sum(waits) / total if total else 0.0


@dataclass(frozen=True)
class Moment:
    """One batch; each span is (begin, end), in seconds since the epoch began."""

    wait: tuple  # of the loop, for the batch; the first one includes the start of the workers
    transfer: tuple  # to the device
    step: tuple
    work: tuple  # what made the batch: reading and collating
    worker: int | None  # who made it; None: the loop itself, within `wait`
    samples: int


@dataclass(frozen=True)
class Timeline:
    """What `timeline` saw; str() is a report of three lines."""

    moments: list  # a Moment for each batch, in order
    seconds: float  # from asking for the first batch to the end of the last step, and until the workers have gone
    workers: int

    @property
    def stall(self):
        """Share of the time that the loop waited for batches or moved them."""
        waits = [_length(m.wait) + _length(m.transfer) for m in self.moments]
        return stall_fraction(waits, [_length(m.step) for m in self.moments])

    @property
    def samples_per_second(self):
        return sum(m.samples for m in self.moments) / self.seconds if self.seconds else 0.0

    @property
    def start(self):
        """Seconds until the first batch was there."""
        return _length(self.moments[0].wait) if self.moments else 0.0

    def __str__(self):
        if not self.moments:
            return "no batch came"
        work, wait, move, step = (
            statistics.median(_length(getattr(m, name)) for m in self.moments) for name in ("work", "wait", "transfer", "step")
        )
        who = f"{self.workers} workers" if self.workers > 1 else "one worker" if self.workers else "the loop itself"
        return (
            f"{len(self.moments)} batches in {self.seconds:.3g} s, {self.samples_per_second:,.0f} samples a second, "
            f"the first after {self.start:.3g} s\n"
            f"the loop: {self.stall:.0%} of its time without work; per batch (median) wait {1e3 * wait:.3g} ms, "
            f"transfer {1e3 * move:.3g} ms, step {1e3 * step:.3g} ms\n"
            f"batches made by {who}, {1e3 * work:.3g} ms each (median)"
        )


def _length(span):
    return span[1] - span[0]


class _Stamps:
    """When the batch in hand was begun. Dataset and collate function share one; they reach a worker together, and so does it."""

    began = None

    def begin(self):
        if self.began is None:
            self.began = time.perf_counter()


class _Map:
    """A dataset that notes when the first item of a batch is asked for."""

    def __init__(self, inner, stamps):
        self.inner, self.stamps = inner, stamps
        if hasattr(inner, "__getitems__"):
            self.__getitems__ = self._getitems

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        self.stamps.begin()
        return self.inner[index]

    def _getitems(self, indices):
        self.stamps.begin()
        return self.inner.__getitems__(indices)


class _Iterable(IterableDataset):
    def __init__(self, inner, stamps):
        self.inner, self.stamps = inner, stamps

    def __iter__(self):
        self.stamps.begin()
        for item in self.inner:
            yield item
            self.stamps.begin()


class _Collate:
    def __init__(self, inner, stamps):
        self.inner, self.stamps = inner, stamps

    def __call__(self, items):
        self.stamps.begin()  # a batch without items has none
        batch, info = self.inner(items), get_worker_info()
        began, self.stamps.began = self.stamps.began, None
        return batch, (-1 if info is None else info.id, began, time.perf_counter())


class _Init:
    """The worker_init_fn, for which the dataset in the worker is the user's own."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, worker_id):
        info = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.inner)  # a WorkerInfo refuses to be assigned to
        if self.inner is not None:
            self.inner(worker_id)


def _instrumented(loader):
    """A copy of the loader, with the same sampler and generator, whose batches are (batch, (worker, begin, end))."""
    stamps, copied = _Stamps(), copy.copy(loader)
    dataset = (_Iterable if isinstance(loader.dataset, IterableDataset) else _Map)(loader.dataset, stamps)
    changes = {"dataset": dataset, "collate_fn": _Collate(loader.collate_fn, stamps), "worker_init_fn": _Init(loader.worker_init_fn)}
    copied.__dict__.update(changes, _iterator=None)  # a DataLoader refuses to be assigned to; persistent workers are its own
    return copied


def timeline(loader, step, device=None, batches=None):
    """Run an epoch of a DataLoader, step(batch) for each batch, and note on one clock what loop and workers do: a Timeline.

    device: where batches are moved before the step; None leaves them. On CUDA each transfer and step is waited for, so that spans
    mean what they say and do not overlap. batches: how many at most; None for all. The loader is not changed, but its sampler and
    generators are those that run: an epoch is drawn from them. No worker is left, whatever happens.
    """
    found, copied = [], _instrumented(loader)
    zero = asked = time.perf_counter()
    iterator = iter(copied)
    try:
        for batch, (worker, *work) in itertools.islice(iterator, batches):
            got = time.perf_counter()
            batch = batch if device is None else to_device(batch, torch.device(device))
            _wait_for(device)
            moved = time.perf_counter()
            step(batch)
            _wait_for(device)
            done = time.perf_counter()
            spans = [(a - zero, b - zero) for a, b in ((asked, got), (got, moved), (moved, done), work)]
            found.append(Moment(*spans, None if worker < 0 else worker, _samples(batch)))
            asked = done
    finally:
        if hasattr(iterator, "_shutdown_workers"):  # there is no public way, and a traceback may hold the iterator for long
            iterator._shutdown_workers()
    return Timeline(found, time.perf_counter() - zero, loader.num_workers)


def _wait_for(device):
    if device is not None and torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _samples(batch):
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return len(tensors[0]) if tensors else len(batch) if isinstance(batch, (list, tuple)) else 1


# ── Which loader is fastest ───────────────────────────────────────────────────────────────────────────────────────────


class _OneByOne:
    """A dataset without its `__getitems__`."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]


@dataclass
class Tuning:
    """What `tune_loader` found. str() is a table, the choice first."""

    dataset: object
    settings: dict  # of the choice, for DataLoader
    seconds: dict  # {name of a candidate: seconds that it would take for an epoch, one for each trial}
    choice: str
    spent: float  # seconds of the search
    notes: list = field(default_factory=list)

    def loader(self):
        """The DataLoader that was chosen."""
        return DataLoader(self.dataset, **self.settings)

    def __str__(self):
        width = max(map(len, self.seconds))
        rows = sorted(self.seconds.items(), key=lambda row: (row[0] != self.choice, statistics.median(row[1])))
        default = statistics.median(self.seconds[DEFAULT])
        lines = [f"{'seconds an epoch':<{width}}  median      range       speed, default = 1   trials"]
        for name, found in rows:
            middle = statistics.median(found)
            spread = f"{min(found):.3g} to {max(found):.3g}"
            lines.append(f"{name:<{width}}  {middle:<10.3g}  {spread:<18}  {default / middle:<12.2f}  {len(found)}")
        return "\n".join([f"Choice: {self.choice}, after {self.spent:.1f} s.", *self.notes, *lines])


DEFAULT = "0 workers"


def tune_loader(dataset, step, budget_s=10.0, *, batch_size, device=None, epochs=1, most_workers=None, **settings):
    """Find the DataLoader under which an epoch of step(batch) is fastest here, by measuring: a Tuning.

    Candidates: 0, 1, 2, 4, … workers up to `most_workers` (twice the cores); for the best of them a longer prefetch, pinned memory
    where the device is CUDA, and reading one by one where the dataset has `__getitems__`. settings: more for DataLoader (shuffle,
    collate_fn, …), the same for all. A trial runs some batches; an epoch is reckoned as the start-up, once in `epochs` since the
    workers are then persistent, and the time of a batch after it. The method is successive halving (Jamieson and Talwalkar 2016):
    the better half goes on, in trials twice as long. The finalists and the default take turns until the budget is spent; the choice
    is the default unless another was faster in every round.

    step may change what it trains: give it a copy. budget_s: seconds; a search that has begun a trial ends it. Raises ValueError for
    a budget that is not positive, and whatever dataset and step raise.
    """
    if not budget_s > 0:
        raise ValueError(f"budget_s is a time in seconds, greater than 0, not {budget_s!r}")
    search = _Search(dataset, step, budget_s, device, epochs, {"batch_size": batch_size, **settings})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counts = [2**k for k in range(12) if 2**k <= (2 * cores if most_workers is None else most_workers)]
    if reason := _unreachable(dataset, settings.get("collate_fn"), settings.get("multiprocessing_context")):
        counts, search.notes = [], [f"Only without workers: {reason}"]
    names = [search.add(DEFAULT)] + [search.add(f"{n} worker{'s' * (n > 1)}", num_workers=n) for n in counts]
    size = 4
    search.round(names, size)
    while len(names) > 2 and search.time_for(names, size, share=0.5):
        search.round(names, size)
        names = [DEFAULT, *[name for name in search.ranked(names) if name != DEFAULT][: len(names) // 2]]
        size *= 2
    best = search.ranked(names)[0]
    names = list(dict.fromkeys([DEFAULT, best, *search.variants(best)]))
    search.finals(names, size)
    return search.result()


class _Search:
    """The trials of `tune_loader`, and the clock they run against."""

    def __init__(self, dataset, step, budget, device, epochs, settings):
        self.dataset, self.step, self.device, self.epochs, self.settings = dataset, step, device, epochs, settings
        self.began, self.budget, self.notes = time.perf_counter(), budget, []
        self.candidates, self.found, self.rounds, self.batch = {}, {}, [], {}

    def add(self, name, dataset=None, **changes):
        given = {**self.settings, **changes}
        if not given.get("num_workers"):  # what is for workers alone, a loader without any refuses
            for setting in ("multiprocessing_context", "prefetch_factor", "persistent_workers", "timeout"):
                given.pop(setting, None)
        elif self.epochs > 1:
            given["persistent_workers"] = True
        self.candidates[name] = (self.dataset if dataset is None else dataset, given)
        return name

    def variants(self, best):
        _, settings = self.candidates[best]
        found = []
        if settings.get("num_workers"):
            found.append(self.add(f"{best}, prefetch_factor=8", **{**settings, "prefetch_factor": 8}))
        if self.device is not None and torch.device(self.device).type == "cuda":
            found.append(self.add(f"{best}, pin_memory", **{**settings, "pin_memory": True}))
        if hasattr(self.dataset, "__getitems__"):
            found.append(self.add(f"{best}, one by one", _OneByOne(self.dataset), **settings))
        return found

    def trial(self, name, size):
        """Seconds of an epoch, reckoned from a run of so many batches."""
        dataset, settings = self.candidates[name]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: that is the question
            loader = DataLoader(dataset, **settings)
            run = timeline(loader, self.step, self.device, batches=size)
        try:
            total = len(loader)
        except TypeError:  # a stream of unknown length: as if it ended here
            total = len(run.moments)
        if not run.moments:
            raise ValueError("the dataset gives no batch")
        later = run.moments[1:] or run.moments
        each = (later[-1].step[1] - later[0].wait[0]) / len(later)
        self.batch[name] = run.seconds / len(run.moments)
        # without workers the first batch is no different from the others
        start = run.start + _length(run.moments[0].step) if run.workers else each
        return start / (self.epochs if settings.get("persistent_workers") else 1) + each * (total - 1)

    def round(self, names, size):
        this = {name: self.trial(name, size) for name in names}
        for name, seconds in this.items():
            self.found.setdefault(name, []).append(seconds)
        return this

    def time_for(self, names, size, share=1.0):
        """Is there time for a round of these?"""
        needed = sum(size * self.batch.get(name, 0.0) for name in names)
        return self.spent() + needed < share * self.budget

    def spent(self):
        return time.perf_counter() - self.began

    def ranked(self, names):
        return sorted(names, key=lambda name: min(self.found[name][-1:]))

    def finals(self, names, size):
        """Three rounds, of trials short enough for the budget, and more while there is time."""
        slowest = max(self.batch.values())
        while size > 2 and 3 * size * sum(self.batch.get(name, slowest) for name in names) > self.budget - self.spent():
            size //= 2
        while len(self.rounds) < 3 or self.time_for(names, size):
            self.rounds.append(self.round(names, size))

    def result(self):
        middle = {name: statistics.median(r[name] for r in self.rounds) for name in self.rounds[0]}
        best = min(middle, key=middle.get)
        if not all(r[best] < r[DEFAULT] for r in self.rounds):
            best = DEFAULT
        dataset, settings = self.candidates[best]
        return Tuning(dataset, settings, self.found, best, self.spent(), self.notes)


# ── What a worker needs ───────────────────────────────────────────────────────────────────────────────────────────────


def _start_method(context):
    if context is None or isinstance(context, str):
        return context or torch.multiprocessing.get_start_method()
    return context.get_start_method()


def _interactive(thing):
    """Is its class or function defined in a notebook or at a prompt, where no other process can import it from?"""
    kind = thing if isinstance(thing, (type, types.FunctionType)) else type(thing)
    return kind.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


def _unreachable(dataset, collate_fn, context=None):
    """Why a worker would not get these, as a sentence; None where it would."""
    if _start_method(context) == "fork":
        return None
    for thing in (dataset, collate_fn):
        if found := _not_picklable(thing):
            return found[0]
    return None


def check_portable(dataset, collate_fn=None, seconds=60):
    """Would this dataset reach a worker that is started by spawn or forkserver? A list of sentences, each a cause and its cure.

    Forked workers (Linux, before Python 3.14) inherit everything. Others get a pickled copy, and import the classes by name: on
    Windows, on macOS, and on Linux from Python 3.14 on. What is not obvious from pickling is tried in a process of its own, which
    reads item 0, or begins to iterate, within so many seconds.
    """
    found = [sentence for thing in (dataset, collate_fn) if thing is not None for sentence in _not_picklable(thing)]
    if found:
        return found
    given = pickle.dumps((list(sys.path), pickle.dumps((dataset, collate_fn))))
    try:
        ran = subprocess.run([sys.executable, "-c", _IN_A_WORKER], input=given, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return [f"In a process of its own it did not give its first item within {seconds} s."]
    if ran.returncode:
        last = ran.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        return [f"In a process of its own it fails: {last[0]}. Look for what the copy lacks: files, handles, what a cell set up."]
    return []


_IN_A_WORKER = """
import pickle, sys
sys.path[:], inside = pickle.load(sys.stdin.buffer)
dataset, collate = pickle.loads(inside)
item = dataset[0] if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") else next(iter(dataset))
collate([item]) if collate else None
"""


def _not_picklable(thing):
    """Sentences on why pickle, or another process, would refuse it."""
    if thing is not None and _interactive(thing):
        name = getattr(thing, "__name__", type(thing).__name__)
        return [f"{name} is defined in the notebook, and a worker cannot import it from there: move it to a .py file, and import it."]
    try:
        pickle.dumps(thing)
        return []
    except Exception as error:  # pickle's refusals have no common class
        culprits = [name for name, value in getattr(thing, "__dict__", {}).items() if not _pickles(value)]
        where = f" (its attribute{'s' * (len(culprits) > 1)} {', '.join(culprits)})" if culprits else ""
        said = " ".join(str(error).split())[:160]
        return [
            f"{getattr(thing, '__name__', type(thing).__name__)} cannot be pickled{where}: {said}. Use functions and classes from the top "
            "of a file instead of lambdas and inner ones, and open files and connections in the worker, at the first access."
        ]


def _pickles(value):
    try:
        pickle.dumps(value)
        return True
    except Exception:  # pickle's refusals have no common class
        return False


def seed_generators(worker_id):
    """A worker_init_fn that gives each random generator object in the worker's dataset a seed of its own.

    For torch.Generator, numpy's Generator and RandomState, and random.Random, wherever they are: attributes, lists, tuples, dicts,
    wrapped datasets. Seeds differ by worker, by epoch (unless workers persist) and by object, and come from the loader's base seed, so
    that they repeat when the loader's generator, or torch's, has the same seed. The objects are changed in place.

    >>> loader = DataLoader(dataset, num_workers=2, worker_init_fn=seed_generators)
    """
    info = get_worker_info()
    for place, generator in enumerate(_generators(info.dataset)):
        _reseed(generator, (info.seed + 0x9E3779B97F4A7C15 * (place + 1)) % 2**63)  # the golden ratio's bits, to tell objects apart


def _generators(root):
    """The generator objects within, in the order in which a walk meets them, each once."""
    numpy, seen, found, stack = sys.modules.get("numpy"), set(), [], [root]
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    leaves = (str, bytes, int, float, bool, complex, type(None), type, types.ModuleType, types.FunctionType, torch.Tensor)
    leaves += (numpy.ndarray,) if numpy else ()
    while stack:
        thing = stack.pop()
        if isinstance(thing, leaves) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, kinds):
            found.append(thing)
        elif isinstance(thing, dict):
            stack += reversed(list(thing.values()))
        elif isinstance(thing, (list, tuple, set, frozenset)):
            stack += reversed(list(thing))
        else:
            stack += reversed(list(getattr(thing, "__dict__", {}).values()))
    return found


def _reseed(generator, seed):
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        import numpy as np

        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator._bit_generator
        bits.state = type(bits)(np.random.SeedSequence(seed)).state


def shard(stream, info):
    """The items of a stream that belong to one worker: those at places info.id, info.id + info.num_workers, …; all, where info is None."""
    return itertools.islice(stream, *((0, None, 1) if info is None else (info.id, None, info.num_workers)))


# ── Uneven sequences, and what workers share ──────────────────────────────────────────────────────────────────────────


def pad_batch(sequences, value=0):
    """Sequences (t, …) that differ in t as one tensor (N, T, …), filled up with `value`, and a mask, bool (N, T), True where real."""
    padded = pad_sequence(list(sequences), batch_first=True, padding_value=value)
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=padded.device)
    return padded, torch.arange(padded.shape[1], device=padded.device) < lengths[:, None]


def pad_collate(batch, value=0):
    """A collate function for items (sequence (t, …), target): (padded (N, T, …), mask bool (N, T), targets)."""
    sequences, targets = zip(*batch)
    return *pad_batch(sequences, value), default_collate(list(targets))


def masked_mean(values, mask):
    """Mean of the values (N, T) where the mask is True, a tensor of 0 dimensions; what stands elsewhere takes no part, nan included."""
    return values.masked_select(mask).mean()


def pack_strings(strings):
    """Strings as two tensors that workers share without copying: (uint8 UTF-8 bytes, int64 offsets of N + 1 places)."""
    encoded = [string.encode() for string in strings]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, encoded))])
    joined = bytearray(b"".join(encoded))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8), offsets


# ── An order that can be resumed ──────────────────────────────────────────────────────────────────────────────────────


class ResumableSampler:
    """A batch sampler whose place in the middle of an epoch can be saved and restored.

    DataLoader(dataset, batch_sampler=ResumableSampler(len(dataset), 32)) draws ahead for its workers, so that only the loop knows
    what it has used: call `used()` after each batch. An epoch's order is torch.randperm from a generator of seed + epoch, so it needs no
    state. After load_state_dict the next epoch of the loader begins with the first batch that was not used.

    n: number of samples; batch_size; drop_last leaves out a last, smaller batch. Raises ValueError for numbers below 1.
    """

    def __init__(self, n, batch_size, seed=0, shuffle=True, drop_last=False):
        if min(n, batch_size) < 1:
            raise ValueError(f"n and batch_size are numbers from 1 on, not {n} and {batch_size}")
        self.n, self.batch_size, self.seed, self.shuffle, self.drop_last = n, batch_size, seed, shuffle, drop_last
        self.epoch = self.position = 0

    @property
    def per_epoch(self):
        """Batches of a whole epoch."""
        return self.n // self.batch_size if self.drop_last else math.ceil(self.n / self.batch_size)

    def __len__(self):
        """Batches that are left of this epoch."""
        return self.per_epoch - self.position

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n, generator=generator).tolist() if self.shuffle else list(range(self.n))
        for k in range(self.position, self.per_epoch):
            yield order[k * self.batch_size : (k + 1) * self.batch_size]

    def used(self):
        """The loop has used one more batch; after the last of an epoch the next epoch's first is due."""
        self.position += 1
        if self.position >= self.per_epoch:
            self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        """Numbers alone: for a checkpoint."""
        return {name: getattr(self, name) for name in ("n", "batch_size", "seed", "shuffle", "drop_last", "epoch", "position")}

    def load_state_dict(self, state):
        """Go to where a state_dict() was taken. Raises ValueError where it belongs to other data, batches or order."""
        for name, value in self.state_dict().items():
            if name not in state:
                raise ValueError(f"this is no state of a ResumableSampler: it lacks {name!r}")
            if name not in ("epoch", "position") and state[name] != value:
                raise ValueError(f"the state was saved with {name} = {state[name]}, and this sampler has {value}")
        if not (state["epoch"] >= 0 and 0 <= state["position"] < max(self.per_epoch, 1)):
            raise ValueError(f"there is no position {state['position']} in epoch {state['epoch']}: an epoch has {self.per_epoch} batches")
        self.epoch, self.position = state["epoch"], state["position"]
