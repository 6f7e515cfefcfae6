"""Exercises of lesson 05, in the order of the notebook: ten to build, then the clinic's seven to repair.

What is worth keeping lives in the toolkit; the references below belong to this lesson alone.
What happens in workers is tried without a DataLoader: in a process forked for the purpose where that is safe (Linux), else on a deep
copy of the dataset in this process, which is what a spawned worker gets.
"""

import contextlib
import copy
import functools
import io
import itertools
import math
import os
import pickle
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler, get_worker_info
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data._utils import worker as worker_module

from course_utils.engine.compare import brief, difference, kind
from course_utils.engine.exercises import Case, Exercise, Mistake
from course_utils.toolkit.loading import pack_strings, pad_batch, shard, stall_fraction

LESSON = "05_dataloader"
FORKS = sys.platform == "linux"  # macOS has fork as well, and frameworks that do not survive it


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def raised(error):
    """What an exception says, and the line of the learner's code from which it came."""
    try:
        message = str(error)[:200]
    except Exception:
        message = ""
    ours = (*(os.path.dirname(path) for path in (os.path.dirname(__file__), torch.__file__, os.__file__)), "<frozen")
    lines = [f.line for f in traceback.extract_tb(error.__traceback__) if f.line and not f.filename.startswith(ours)]
    return f"raised {type(error).__name__}" + f": {message}" * bool(message) + (f" (in the line {lines[-1]!r})" if lines else "")


# ── Workers, without a loader ─────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def as_worker(dataset, number, workers, base_seed):
    """What a loader sets up in its worker: the seeds of torch, random and numpy, and get_worker_info(). All is put back."""
    before = random.getstate(), np.random.get_state(), worker_module._worker_info
    with torch.random.fork_rng(devices=[]):
        seed = base_seed + number
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
        worker_module._worker_info = worker_module.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            worker_module._worker_info = before[2]


def in_workers(dataset, act, workers=2, base_seed=6_000_000_000_000_000_000):
    """([what act(its copy of the dataset, number) returns in each worker], None), or (None, what went wrong)."""
    given = []
    for number in range(workers):

        def work(copied, number=number):
            try:
                with as_worker(copied, number, workers, base_seed):
                    return act(copied, number), None
            except Exception as error:
                return None, f"worker {number} of {workers} {raised(error)}"

        result, said = _forked(lambda work=work: work(dataset)) if FORKS else _copied(dataset, work)
        if said:
            return None, said
        given.append(result)
    return given, None


def _copied(dataset, work):
    """work(a deep copy of the dataset), with copies of what its class and the class's methods hold, too."""
    with contextlib.ExitStack() as put_back:
        try:
            own = copy.deepcopy(dataset)
            for cls in type(dataset).__mro__:
                if not cls.__module__.startswith(("torch", "builtins", "typing")):
                    _copy_state(cls, put_back)
        except Exception as error:
            return None, f"a worker cannot get a copy of it: copy.deepcopy {raised(error)}"
        return work(own)


def _copy_state(cls, put_back):
    """Puts copies in the place of a class's attributes, and of what its methods close over, until put_back is closed."""
    values = [(cls, name, value) for name, value in vars(cls).items() if not name.startswith("__") and not callable(value)]
    cells = {id(cell): cell for method in vars(cls).values() for cell in getattr(method, "__closure__", None) or ()}
    for cell in cells.values():
        with contextlib.suppress(ValueError):  # an empty one
            values.append((cell, "cell_contents", cell.cell_contents))
    for holder, name, value in values:
        if isinstance(value, (type, types.ModuleType, types.FunctionType, property, classmethod, staticmethod)):
            continue
        try:
            own = copy.deepcopy(value)
        except TypeError:
            if isinstance(value, io.IOBase):
                raise
            continue  # a lock, say, of which a worker has one of its own as well
        put_back.callback(setattr, holder, name, value)
        setattr(holder, name, own)


def _forked(work, seconds=6.0):
    """work() in a forked process, which ends with this call, whatever happens."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads; the child uses none of theirs
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, seconds)  # it ends by itself, even if this process is gone
            os.close(out)
            torch.set_num_threads(1)
            with open(into, "wb") as pipe, open(os.devnull, "w") as nowhere:
                with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                    pipe.write(pickle.dumps(work()))
        finally:
            os._exit(0)
    os.close(into)
    try:
        with open(out, "rb", buffering=0) as pipe:
            parts, deadline = [], time.monotonic() + seconds
            while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                parts.append(pipe.read(1 << 16))
                if not parts[-1]:
                    break
        whole = b"".join(parts)
        return pickle.loads(whole) if whole else (None, f"a worker did not come back within {seconds:g} s, or ended without a word")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def is_dataset(thing, length=None):
    """None for something with a length (this one) and items, else the complaint."""
    if isinstance(thing, type):
        return f"this is the class {thing.__name__}; an object of it is asked for, {thing.__name__}(…)"
    if not callable(getattr(type(thing), "__getitem__", None)):
        return f"a dataset was expected, with a length and items; {kind(thing)} came"
    try:
        came = len(thing)
    except Exception as error:
        return f"its len() {raised(error)}"
    return None if length is None or came == length else f"its length is {came}, expected {length}"


# ── Where an epoch goes ───────────────────────────────────────────────────────────────────────────────────────────────


def _stall_case(name, waits, steps):
    return Case(name, lambda: (list(waits), list(steps)), tolerance=1e-9)


STALL_FRACTION = Exercise(
    lesson=LESSON,
    solution=stall_fraction,
    hints=(
        "How long is the whole epoch, if the loop either waits or works? Which part of that is waiting?",
        "`sum(waits) / (sum(waits) + sum(steps))`, and 0.0 where that would divide by 0.",
    ),
    cases=(
        _stall_case("waiting and working take the same time", [1.0, 1.0], [1.0, 1.0]),
        _stall_case("the loop never waits", [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]),
        _stall_case("the first batch comes late and the others at once", [4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]),
        _stall_case("the batches differ in everything", [0.25, 3.0, 0.5], [0.5, 0.125, 2.0]),
        _stall_case("the loop does nothing but wait", [0.5, 0.25], [0.0, 0.0]),
        _stall_case("the epoch has no batch", [], []),
        _stall_case("the epoch takes no time", [0.0, 0.0], [0.0, 0.0]),
    ),
    mistakes=(
        Mistake(
            "This sets the waiting against the working time. A share is one part of the whole: the whole is waiting and "
            "working together.",
            lambda waits, steps: sum(waits) / sum(steps) if sum(steps) else 0.0,
        ),
        Mistake(
            "This is the share of the time that the loop works. The other part is asked for.",
            lambda waits, steps: 1 - stall_fraction(waits, steps),
        ),
        Mistake(
            "Each batch has its own share here, and the mean of them gives a short batch the same weight as a long one. "
            "Add up the seconds first.",
            lambda waits, steps: sum(w / (w + s) if w + s else 0.0 for w, s in zip(waits, steps)) / max(len(waits), 1),
        ),
        Mistake("These are percent; a number from 0 to 1 is asked for.", lambda waits, steps: 100 * stall_fraction(waits, steps)),
    ),
)

# ── The loader without workers ────────────────────────────────────────────────────────────────────────────────────────


def batches_by_hand(dataset, batch_size, shuffle_generator=None, drop_last=False):
    """One epoch as a loader without workers gives it: batches (inputs, targets), one after another, each read when it is asked for."""
    order = list(range(len(dataset)))
    if shuffle_generator is not None:
        order = torch.randperm(len(dataset), generator=shuffle_generator).tolist()
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        if drop_last and len(indices) < batch_size:
            return
        inputs, targets = zip(*(dataset[i] for i in indices))
        yield torch.stack(inputs), torch.tensor(targets)


class Recorded(Dataset):
    """Item i is (a tensor that begins with i, the int 100 + i); notes which items are read."""

    def __init__(self, n, shape=(2,)):
        self.n, self.shape, self.reads = n, shape, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if not 0 <= i < self.n:
            raise IndexError(f"there is no item {i}")
        self.reads.append(int(i))
        return torch.full(self.shape, float(i)), 100 + int(i)

    def __repr__(self):
        return f"<a dataset of {self.n} items>"


def _walked(result, dataset, batch_size, sizes):
    """(the order in which items came, None), or (None, the complaint)."""
    order, batches = [], 0
    try:
        for batch in itertools.islice(result, len(dataset) + 2):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not all(isinstance(part, torch.Tensor) for part in batch):
                return None, f"batch {batches} is {brief(batch)}; a pair of tensors (inputs, targets) was expected"
            inputs, targets = batch
            if targets.dtype != torch.int64 or targets.dim() != 1:
                return None, f"the targets of batch {batches} are {brief(targets)}; int64 (n,) was expected"
            indices = [t - 100 for t in targets.tolist()]
            if inputs.shape != (len(indices), *dataset.shape):
                expected = (len(indices), *dataset.shape)
                return None, f"the inputs of batch {batches} have the shape {tuple(inputs.shape)}, expected {expected}"
            if said := difference(torch.stack([torch.full(dataset.shape, float(i)) for i in indices]), inputs):
                return None, f"the inputs of batch {batches} do not belong to its targets: {said}"
            if batches < len(sizes) and len(indices) != sizes[batches]:
                return None, f"batch {batches} has {len(indices)} items, expected {sizes[batches]}"
            order += indices
            batches += 1
            if batches < len(sizes) and len(dataset.reads) > len(order):
                if len(dataset.reads) >= dataset.n:
                    return None, f"all {dataset.n} items had been read when batch {batches - 1} came; {len(order)} were needed so far"
                return None, f"when batch {batches - 1} came, items had been read {len(dataset.reads)} times, for {len(order)} items"
    except Exception as error:
        return None, f"walking through what came {raised(error)}"
    if batches != len(sizes):
        return None, f"{batches} batches came{' or more' * (batches > len(dataset))}, expected {len(sizes)}"
    if len(dataset.reads) > dataset.n:
        return None, f"{len(dataset.reads)} items were read, of a dataset of {dataset.n}: each is to be read once"
    return order, None


def _in_batches(n, batch_size, seed=None, drop_last=False, shape=(2,)):
    sizes = [batch_size] * (n // batch_size) + [n % batch_size] * bool(n % batch_size and not drop_last)

    def args():
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return (Recorded(n, shape), batch_size, generator, drop_last) if seed is not None or drop_last else (Recorded(n, shape), batch_size)

    def verify(result, dataset, batch_size, generator=None, drop_last=False):
        order, said = _walked(result, dataset, batch_size, sizes)
        if said:
            return said
        if generator is None:
            return None if order == list(range(len(order))) else f"the items came in the order {brief(order)}; 0, 1, 2, … was expected"
        if len(set(order)) < len(order):
            return f"of {len(order)} items that came, {len(set(order))} are different: each should come once"
        one_by_one = sum(b == a + 1 for a, b in zip(order, order[1:]))
        if one_by_one > len(order) // 2:
            runs = ", in runs of neighbours" if order != list(range(len(order))) else ""
            return f"the items are not shuffled: they came in the order {brief(order)}{runs}"
        if all(i // batch_size == k // batch_size for k, i in enumerate(order)):
            return "every batch has the items that it would have unshuffled, in another order: all items are to be shuffled together"
        if torch.equal(generator.get_state(), torch.Generator().manual_seed(seed).get_state()):
            return "nothing was drawn from the generator given, so that the next epoch would not follow from it"
        return None

    return {"args": args, "verify": verify}


def _collated(dataset, indices):
    inputs, targets = zip(*(dataset[i] for i in indices))
    return torch.stack(inputs), torch.tensor(targets)


def _by_hand(order=None, keep=True, drop=True, all_first=False):
    """The exercise with another order, or one that keeps or drops the last batch whatever it is told, or reads all first."""

    def batches(dataset, batch_size, shuffle_generator=None, drop_last=False):
        if order is not None and shuffle_generator is not None:
            indices = order(len(dataset), batch_size, shuffle_generator)
        elif shuffle_generator is not None:
            indices = torch.randperm(len(dataset), generator=shuffle_generator).tolist()
        else:
            indices = list(range(len(dataset)))
        pieces = [indices[k : k + batch_size] for k in range(0, len(indices), batch_size)]
        if pieces and len(pieces[-1]) < batch_size and (drop_last if drop and keep else drop):
            pieces.pop()
        if all_first:
            yield from [_collated(dataset, piece) for piece in pieces]
        for piece in () if all_first else pieces:
            yield _collated(dataset, piece)

    return batches


def _batches_shuffled(n, batch_size, generator):
    firsts = torch.arange(0, n, batch_size)
    firsts = firsts[torch.randperm(len(firsts), generator=generator)].tolist()
    firsts.sort(key=lambda first: n - first < batch_size)  # the smaller one stays at the end
    return [i for first in firsts for i in range(first, min(first + batch_size, n))]


BATCHES_BY_HAND = Exercise(
    lesson=LESSON,
    solution=batches_by_hand,
    hints=(
        "Three steps, and a loader without workers has no more: the order of the indices, cut into pieces of batch_size; "
        "for each piece the items; and of a list of items, one tensor of inputs and one of targets.",
        "`torch.randperm(len(dataset), generator=shuffle_generator).tolist()` is a shuffled order. "
        "`order[first : first + batch_size]` for first in range(0, len(order), batch_size) cuts it.",
        "`inputs, targets = zip(*items)` makes two tuples of a list of pairs; `torch.stack(inputs)` and "
        "`torch.tensor(targets)` make tensors of them. `yield` gives a batch and waits until the next is asked for.",
    ),
    cases=(
        Case("all batches are full", **_in_batches(8, 4)),
        Case("the last batch is smaller", **_in_batches(7, 3, shape=(1, 2, 2))),
        Case("the last batch is smaller and is to be dropped", **_in_batches(7, 3, drop_last=True)),
        Case("all batches are full and a smaller one would be dropped", **_in_batches(6, 3, drop_last=True)),
        Case("the dataset is smaller than a batch", **_in_batches(2, 5)),
        Case("the dataset is empty", **_in_batches(0, 3)),
        Case("the items are shuffled", **_in_batches(23, 5, seed=0)),
        Case("the items are shuffled by another seed", **_in_batches(24, 4, seed=11)),
        Case("the items are shuffled and the last batch is dropped", **_in_batches(31, 4, seed=3, drop_last=True)),
    ),
    mistakes=(
        Mistake("The smaller batch at the end is missing: it is left out with drop_last alone.", _by_hand(keep=False)),
        Mistake("drop_last does not drop anything: the last batch is given although it is smaller.", _by_hand(drop=False)),
        Mistake(
            "All items are read before the first batch is given. With a generator function, a batch is made when it is "
            "asked for: read the items inside the loop that yields.",
            _by_hand(all_first=True),
        ),
        Mistake(
            "The order comes from somewhere else, such as torch's global generator. Give the generator that came as an argument to "
            "the function that draws: `torch.randperm(n, generator=…)`.",
            _by_hand(lambda n, batch_size, generator: torch.randperm(n).tolist()),
        ),
        Mistake(
            "Indices are drawn with replacement: some items come twice in an epoch and others never. A permutation has each "
            "once.",
            _by_hand(lambda n, batch_size, generator: torch.randint(n, (n,), generator=generator).tolist()),
        ),
        Mistake(
            "The batches are shuffled, and within them neighbours stay together. Shuffle the items, then cut.",
            _by_hand(_batches_shuffled),
        ),
        Mistake(
            "With a generator the order is still that of the dataset.",
            _by_hand(lambda n, batch_size, generator: list(range(n))),
        ),
    ),
)

# ── How many workers ──────────────────────────────────────────────────────────────────────────────────────────────────


def epoch_seconds(works, step, workers, prefetch=2):
    """Seconds that an epoch takes by the clock of an ideal loader; works: the seconds that making each batch takes."""
    if workers == 0:
        return float(sum(works) + step * len(works))
    free, taken, now = [0.0] * workers, [], 0.0
    for i, work in enumerate(works):
        told = taken[i - prefetch * workers] if i >= prefetch * workers else 0.0
        free[i % workers] = max(free[i % workers], told) + work  # when batch i is made
        taken.append(max(now, free[i % workers]))
        now = taken[-1] + step
    return now


def _clock_case(name, works, step, workers, *prefetch):
    return Case(name, lambda: (list(works), step, workers, *prefetch), tolerance=1e-9)


def _clock(limit=True, order=True, turns=True, inline=True, overlaps=True, off=0, after=False, each=True):
    """The simulation with one rule left out."""

    def seconds(works, step, workers, prefetch=2):
        if workers == 0:
            return epoch_seconds(works, step, 0) if inline else max(float(sum(works)), step * len(works))
        if not overlaps:
            return sum(works) / workers + step * len(works)
        free, taken, now, made = [0.0] * workers, [], 0.0, []
        for i, work in enumerate(works):
            who = i % workers if turns else free.index(min(free))
            ahead = (prefetch * workers if each else prefetch) + off
            told = taken[i - ahead] + step * after if limit and i >= ahead else 0.0
            free[who] = max(free[who], told) + work
            made.append(free[who])
            taken.append(max(now, free[who]))
            now = taken[-1] + step
        if not order:
            now = 0.0
            for ready in sorted(made):
                now = max(now, ready) + step
        return now

    return seconds


EPOCH_SECONDS = Exercise(
    lesson=LESSON,
    solution=epoch_seconds,
    hints=(
        "Go through the batches in their order, and for each find two moments: when it is made, and when the loop takes it. "
        "What do you have to remember of the batches before?",
        "A batch is made at max(when its worker is free, when it was handed out) + work, and then its worker is free again. "
        "The loop takes it at max(that, when the loop is free), and is free again `step` seconds later.",
        "Keep a list `free` with one time for each worker, and a list `taken`. Batch i was handed out at the start (0.0) if "
        "i < prefetch * workers, else at `taken[i - prefetch * workers]`.",
    ),
    cases=(
        _clock_case("there are no workers", [2.0, 1.0, 3.0], 0.5, 0),
        _clock_case("there is one worker and the work is longer than the step", [2.0] * 5, 1.0, 1),
        _clock_case("there is one worker and the step is longer than the work", [0.5] * 5, 2.0, 1),
        _clock_case("two workers make a batch faster than the loop can use it", [2.0] * 8, 1.5, 2),
        _clock_case("two workers are still too slow", [4.0] * 8, 0.5, 2),
        _clock_case("there are more workers than batches", [3.0, 3.0], 1.0, 5),
        _clock_case("one batch takes long and those behind it are ready", [1.0, 6.0, 1.0, 1.0, 1.0, 1.0], 1.0, 2, 8),
        _clock_case("every third batch takes long", [5.0, 1.0, 1.0, 5.0, 1.0, 1.0, 5.0, 1.0, 1.0], 0.5, 2, 8),
        _clock_case("two long batches fall to the same worker", [6.0, 1.0, 6.0, 1.0, 1.0, 1.0, 1.0], 1.0, 2, 8),
        _clock_case("each of two workers may prepare one batch", [0.5, 1.0, 4.0, 0.5, 2.0, 6.0], 1.0, 2, 1),
        _clock_case("the only worker may prepare one batch", [1.0, 1.0, 4.0, 1.0, 4.0, 1.0, 1.0, 4.0], 2.0, 1, 1),
        _clock_case("quick batches come before slow ones", [0.25] * 8 + [8.0] * 8, 4.0, 2),
        _clock_case("the epoch has no batch", [], 1.0, 2),
    ),
    mistakes=(
        Mistake(
            "The loop's work is added to the workers', as if they took turns. They go on at the same time: while the loop works "
            "on one batch, the workers make the next.",
            _clock(overlaps=False),
        ),
        Mistake(
            "Without workers nothing goes on at the same time: each batch is made, and then worked on.",
            _clock(inline=False),
        ),
        Mistake(
            "Here the workers run ahead as far as they like. Batch i is handed out when the loop takes batch "
            "i - prefetch * workers, and not before.",
            _clock(limit=False),
        ),
        Mistake(
            "The loop takes whichever batch is ready first. It takes them in their order: one slow batch holds up those "
            "behind it.",
            _clock(order=False),
        ),
        Mistake(
            "The next batch goes to the worker that is free first. Batch i belongs to worker i % workers, busy or not.",
            _clock(turns=False),
        ),
        Mistake(
            "A worker may have one batch too many ahead: batch i waits for the taking of batch i - prefetch * workers, which is "
            "handed out at that moment.",
            _clock(off=1),
        ),
        Mistake(
            "A batch is handed out when the loop *takes* another, and not when the loop has finished its step on it.",
            _clock(after=True),
        ),
        Mistake(
            "Each worker has `prefetch` batches ahead, so that all together have prefetch * workers.",
            _clock(each=False),
        ),
    ),
)

# ── Batch fetching ────────────────────────────────────────────────────────────────────────────────────────────────────


def fetch_batch(images, labels, indices):
    """What a dataset's `__getitems__(indices)` returns: a list of items (float32 (1, H, W) from 0 to 1, int), views of one tensor."""
    batch = images[indices].unsqueeze(1) / 255
    return list(zip(batch, labels[indices].tolist()))


class _Computing(TorchDispatchMode):
    """Counts torch's operations that compute (views and .item() do not), and the elements of the largest result."""

    count = largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view and "_local_scalar_dense" not in str(function):
            self.count += 1
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
        return result


def _once_for_all(items, height, width):
    def watch(call):
        with _Computing() as computing:
            call()
        if computing.count >= items:
            return (
                f"the items are right, and torch computed {computing.count} times for {items} of them. Index with the whole list, "
                "`images[indices]`, and convert all at once"
            )
        if computing.largest > 4 * items * height * width:
            return (
                f"the items are right, and on the way a tensor of {computing.largest:,} numbers was computed, where the batch has "
                f"{items * height * width:,}: pick the images first, then convert"
            )
        return None

    return watch


def _share_one_tensor(result, images, labels, indices):
    wanted = fetch_batch(images, labels, indices)
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], torch.Tensor) and result[0].dim() == 4:
        return (
            "this is a collated batch, (images, labels). `__getitems__` returns a list of items, one for each index, and the "
            "collate function makes a batch of them"
        )
    if said := difference(wanted, result, 1e-6):
        return said
    if len({item[0].untyped_storage().data_ptr() for item in result}) > 1:
        return "the values are right, and each image has memory of its own: they should be views of one tensor, the batch"
    return None


def _fetch_case(name, n, height, width, indices, watch=False):
    def args():
        numbers = torch.Generator().manual_seed(n)
        images = torch.randint(256, (n, height, width), generator=numbers, dtype=torch.uint8)
        return images, torch.randint(10, (n,), generator=numbers), list(indices)

    return Case(
        name, args, verify=_share_one_tensor, tolerance=1e-6, watch=_once_for_all(len(indices), height, width) if watch else None
    )


FETCH_BATCH = Exercise(
    lesson=LESSON,
    solution=fetch_batch,
    time_limit=20.0,  # the first indexing that is watched in a process loads a part of PyTorch
    hints=(
        "`images[indices]` with a list of ints picks all these images in one operation, as a copy (n, H, W). What is left to "
        "do to them, and can that be done to all of them at once?",
        "`batch = images[indices].unsqueeze(1) / 255` is (n, 1, H, W), float32. `for image in batch` gives views of it.",
        "`labels[indices].tolist()` is a list of ints, and `zip` makes pairs. A list is asked for.",
    ),
    cases=(
        _fetch_case("two items of five are asked for", 5, 3, 2, [3, 1]),
        _fetch_case("one item is asked for", 4, 2, 2, [2]),
        _fetch_case("an item is asked for twice", 4, 2, 3, [0, 3, 0]),
        _fetch_case("48 items of 2,000 are asked for", 2000, 4, 5, [(i * 37) % 2000 for i in range(48)], watch=True),
    ),
    mistakes=(
        Mistake(
            "A list of items is asked for, one pair for each index; the collate function makes a batch of it. A pair of two "
            "tensors would be taken for two items.",
            lambda images, labels, indices: (images[indices].unsqueeze(1) / 255, labels[indices]),
        ),
        Mistake(
            "Each image is picked and converted by itself, as `__getitem__` would do it. Index once with the whole list.",
            lambda images, labels, indices: [(images[i].unsqueeze(0) / 255, labels[i].item()) for i in indices],
        ),
        Mistake(
            "An image has three dimensions, (1, H, W): the channel is missing.",
            lambda images, labels, indices: list(zip(images[indices] / 255, labels[indices].tolist())),
        ),
        Mistake(
            "The values go from 0 to 255: divide by 255.",
            lambda images, labels, indices: list(zip(images[indices].unsqueeze(1).float(), labels[indices].tolist())),
        ),
        Mistake(
            "The label is a tensor of 0 dimensions; an int is asked for. `.tolist()` makes ints of all of them.",
            lambda images, labels, indices: list(zip(images[indices].unsqueeze(1) / 255, labels[indices])),
        ),
        Mistake(
            "All images of the dataset are converted, for each batch anew. Pick those that are asked for first.",
            lambda images, labels, indices: list(zip((images / 255)[indices].unsqueeze(1), labels[indices].tolist())),
        ),
    ),
)

# ── Generators in workers ─────────────────────────────────────────────────────────────────────────────────────────────


def reseed(attribute):
    """A worker_init_fn that puts a numpy Generator with the worker's own seed under this name into the worker's dataset."""

    def start(worker_id):
        info = get_worker_info()
        setattr(info.dataset, attribute, np.random.default_rng(info.seed))

    return start


class _Holder(Dataset):
    """A dataset that holds a numpy Generator under a name of its own."""

    def __init__(self, attribute):
        setattr(self, attribute, np.random.default_rng(20_250_105))

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i


def _own_numbers(workers, bases=(6_000_000_000_000_000_000, 1_234_567_890_123_456_789)):
    def drawn(start, attribute, number, base):
        dataset = _Holder(attribute)
        with as_worker(dataset, number, workers, base):
            start(number)
            generator = getattr(dataset, attribute, None)
            if not isinstance(generator, np.random.Generator):
                return None, f"in worker {number}, the dataset's {attribute} is {brief(generator)}; a numpy Generator was expected"
            return frozenset(generator.integers(2**62, size=6).tolist()), None

    def verify(start, attribute):
        if not callable(start) or isinstance(start, type):
            return f"a function of worker_id was expected; {kind(start)} came"
        found = {}
        try:
            for epoch, base in enumerate((*bases, bases[0])):
                for number in range(workers):
                    found[epoch, number], said = drawn(start, attribute, number, base)
                    if said:
                        return said
        except Exception as error:
            return f"calling what came in worker {number} {raised(error)}"
        if found[0, 0] == frozenset(getattr(_Holder(attribute), attribute).integers(2**62, size=6).tolist()):
            return f"the numbers of worker 0 are those of the generator as it was copied: its {attribute} has not been replaced"
        for a, b in itertools.combinations(range(workers), 2):
            if found[0, a] & found[0, b]:
                return f"worker {a} and worker {b} draw the same numbers"
        if any(found[0, a] & found[1, b] for a in range(workers) for b in range(workers)):
            return "the second epoch, whose base seed is another, has numbers of the first"
        if any(found[0, a] != found[2, a] for a in range(workers)):
            return "in a run with the same torch seed, a worker draws other numbers"
        return None

    return verify


def _seeded_by(make):
    def reseed(attribute):
        def start(worker_id):
            info = get_worker_info()
            setattr(info.dataset, attribute, make(worker_id, info))

        return start

    return reseed


def _does_nothing(attribute):
    return lambda worker_id: None


RESEED = Exercise(
    lesson=LESSON,
    solution=reseed,
    hints=(
        "`reseed` returns a function that takes worker_id. It runs in the worker, where `get_worker_info().dataset` is the "
        "worker's own copy. `setattr(thing, name, value)` sets an attribute whose name is a string.",
        "`get_worker_info().seed` is base seed + worker id: another number in each worker and in each epoch, and the same again "
        "with the same torch seed. `np.random.default_rng` takes it.",
        "`def start(worker_id): info = get_worker_info(); setattr(info.dataset, attribute, np.random.default_rng(info.seed))`, "
        "and `return start`.",
    ),
    cases=(
        Case("the generator is called rng and there are two workers", lambda: ("rng",), verify=_own_numbers(2)),
        Case("the generator is called noise and there are three workers", lambda: ("noise",), verify=_own_numbers(3)),
        Case("the base seeds of two epochs are close", lambda: ("rng",), verify=_own_numbers(2, (4_000_000_000_000, 4_000_000_000_007))),
    ),
    mistakes=(
        Mistake(
            "The worker's number is the seed, and it is the same in the next epoch: so is the noise. The worker's seed, "
            "`get_worker_info().seed`, changes with each epoch.",
            _seeded_by(lambda worker_id, info: np.random.default_rng(worker_id)),
        ),
        Mistake(
            "All workers get the same seed. `get_worker_info().seed` is another one in each worker.",
            _seeded_by(lambda worker_id, info: np.random.default_rng(info.seed - info.id)),
        ),
        Mistake(
            "Without a seed, the generator takes one from the operating system: no run can be repeated.",
            _seeded_by(lambda worker_id, info: np.random.default_rng()),
        ),
        Mistake(
            "The function does nothing to the worker's dataset, which is `get_worker_info().dataset`. A name that the notebook "
            "has for it is another copy.",
            _does_nothing,
        ),
    ),
)

# ── Streams ───────────────────────────────────────────────────────────────────────────────────────────────────────────


_UNDIVIDED = "The stream is not divided: each worker gives all of it, and an epoch has every item once for each worker."
_IN_BLOCKS = (
    "The stream is cut into blocks, one for each worker. The items are dealt out in turn: the one at place k belongs to worker "
    "k % num_workers."
)
_BY_VALUE = "The item's value decides here. Its place in the stream is asked for; `enumerate` counts."
_FROM_ONE = "Workers are counted from 0, as places are: worker 0 begins at place 0."


def _blocks(items, info):
    each = math.ceil(len(items) / info.num_workers)
    return items[info.id * each : (info.id + 1) * each]


def _by_value(items, info):
    return [x for x in items if isinstance(x, int) and x % info.num_workers == info.id]


def _from_one(items, info):
    return [x for k, x in enumerate(items, 1) if k % info.num_workers == info.id]


def _after_one(items, info):
    return items[info.id + 1 :: info.num_workers]


_SHARES = (
    (_UNDIVIDED, lambda items, info: items),
    (_IN_BLOCKS, _blocks),
    (_BY_VALUE, _by_value),
    (_FROM_ONE, _from_one),
    (_FROM_ONE, _after_one),
)


def _shared(share):
    """The exercise with another way to choose from the list of all items."""
    return lambda stream, info: iter(list(stream) if info is None else share(list(stream), info))


def _info(number, workers):
    return types.SimpleNamespace(id=number, num_workers=workers)


def _shard_case(name, stream, number=None, workers=None, first=None):
    """stream() gives the items; of an endless stream, the first so many of the share are looked at."""
    info = None if number is None else _info(number, workers)

    def verify(result, given, info):
        items = list(itertools.islice(stream(), 40))
        wanted = items if info is None else items[info.id :: info.num_workers]
        try:
            came = list(itertools.islice(result, first or len(items) + 1))
        except Exception as error:
            return f"walking through what came {raised(error)}"
        if came == wanted[:first]:
            return None
        said = f"its items are {brief(came)[:-1]}{', …' * bool(first)}], expected {brief(wanted[:first])[:-1]}{', …' * bool(first)}]"
        known = info and next((says for says, share in _SHARES if came == share(items, info)[: first or len(items)]), None)
        return f"{said}. {known}" if known else said

    return Case(name, lambda: (stream(), info and _info(number, workers)), verify=verify)


SHARD = Exercise(
    lesson=LESSON,
    solution=shard,
    time_limit=1.5,  # whoever makes a list of the stream without an end fills the memory meanwhile
    hints=(
        "Every worker goes through the whole stream. Which of the items does it keep, and how does it know an item's place? "
        "`enumerate` counts.",
        "With info None there is one share, the whole. A stream without an end cannot be made a list: give items as they come, "
        "with `yield`, or with an iterator from itertools.",
        "`itertools.islice(stream, first, None, stride)` is stream[first::stride] for any iterable.",
    ),
    cases=(
        _shard_case("there are no workers", lambda: list("abcde")),
        _shard_case("this is the first of two workers", lambda: list("abcde"), 0, 2),
        _shard_case("this is the last of three workers", lambda: list("abcdefgh"), 2, 3),
        _shard_case("the items are numbers in another order", lambda: [8, 3, 5, 0, 6, 7], 1, 2),
        _shard_case("the stream can be walked through once", lambda: (c for c in "abcdefg"), 1, 3),
        _shard_case("there are more workers than items", lambda: list("ab"), 3, 4),
        _shard_case("there is one worker", lambda: list("abc"), 0, 1),
        _shard_case("the stream has no end", lambda: itertools.count(10), 2, 4, first=5),
        _shard_case("the stream has no end and there are no workers", lambda: itertools.count(3), first=3),
    ),
    mistakes=tuple(Mistake(says, _shared(share)) for says, share in _SHARES),
)

# ── Variable length ───────────────────────────────────────────────────────────────────────────────────────────────────


def _sequences(*lengths, shape=(), dtype=torch.float32):
    def make():
        return [(noise(t, *shape, seed=i) * 10).to(dtype) for i, t in enumerate(lengths)]

    return make


def _padded(sequences, value=0, batch_first=True, mask=None, left=False):
    right, real = pad_batch(sequences, value)
    if left:
        right, real = right.clone(), real.flip(1)
        right[real] = torch.cat(sequences)
        right[~real] = value
    return right if batch_first else right.transpose(0, 1), real if mask is None else mask(right, real, value)


PAD_BATCH = Exercise(
    lesson=LESSON,
    solution=pad_batch,
    hints=(
        "Which shape has the result? Make it first, full of `value`, and then write each sequence into its row. The lengths "
        "alone say where it is real.",
        "`nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)` gives the padded tensor.",
        "Place j of row i is real where j < length of sequence i: `torch.arange(T) < lengths[:, None]` compares (T,) with (N, 1) "
        "and gives (N, T).",
    ),
    cases=(
        Case("three sequences differ in length", lambda: (_sequences(3, 5, 2)(),)),
        Case("all sequences have the same length", lambda: (_sequences(4, 4)(),)),
        Case("the value to pad with is not 0", lambda: (_sequences(2, 6, 1)(), -1.5)),
        Case("the sequences are of ints", lambda: (_sequences(1, 3, dtype=torch.int64)(), -100)),
        Case("the value occurs within a sequence", lambda: ([torch.tensor([0, 4, 0]), torch.tensor([7, 0])], 0)),
        Case("a place holds a row of numbers", lambda: (_sequences(2, 4, 3, shape=(5,))(), 0)),
        Case("a place holds a row of zeros", lambda: ([torch.zeros(2, 3), torch.ones(3, 3)],)),
        Case("a sequence is empty", lambda: (_sequences(3, 0, 1)(), 2.0)),
        Case("there is one sequence", lambda: (_sequences(3, dtype=torch.float64)(),)),
        Case("all sequences are empty", lambda: (_sequences(0, 0)(),)),
    ),
    mistakes=(
        Mistake(
            "The mask asks which places differ from the value. A real place may hold that value: the lengths say what is real.",
            lambda *a: _padded(*a, mask=lambda padded, real, value: (padded != value).reshape(*real.shape, -1).any(2)),
        ),
        Mistake(
            "The mask is the wrong way round: True is for the real places.",
            lambda *a: _padded(*a, mask=lambda padded, real, value: ~real),
        ),
        Mistake(
            "The first dimension counts places. `batch_first=True` puts the batch there.",
            lambda *a: _padded(*a, batch_first=False),
        ),
        Mistake("The padding stands before the sequence; each sequence begins at place 0.", lambda *a: _padded(*a, left=True)),
        Mistake("It pads with 0, whatever value was given.", lambda sequences, value=0: pad_batch(sequences)),
        Mistake(
            "The mask should be bool: a comparison gives that, and indexing with numbers picks places instead of masking.",
            lambda *a: _padded(*a, mask=lambda padded, real, value: real.float()),
        ),
    ),
)


def masked_loss(outputs, targets, mask):
    """Mean cross-entropy over the real places: outputs (N, T, C), targets int64 (N, T), mask bool (N, T); 0 dimensions."""
    return F.cross_entropy(outputs[mask], targets[mask])


def _masked(lengths, classes=4, target=0, output=None, scale=1.0):
    def args():
        longest = max(lengths)
        mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
        outputs = noise(len(lengths), longest, classes, seed=len(lengths)) * scale
        targets = torch.randint(classes, mask.shape, generator=torch.Generator().manual_seed(longest))
        targets[~mask] = target
        if output is not None:
            outputs[~mask] = output
        return outputs.requires_grad_(), targets, mask

    return args


def _loss_and_gradient(result, outputs, targets, mask):
    wanted = masked_loss(outputs, targets, mask)
    if said := difference(wanted.detach(), result.detach() if isinstance(result, torch.Tensor) else result, 1e-5):
        return said
    if not result.requires_grad:
        return "the value is right, and it has no graph: no gradient reaches the outputs"
    (right,) = torch.autograd.grad(wanted, outputs)
    try:
        (came,) = torch.autograd.grad(result, outputs, retain_graph=True)
    except RuntimeError as error:
        return f"the value is right, and its gradient with respect to the outputs {raised(error)}"
    padded = came[~mask]
    if padded.isnan().any():
        return "the loss is right, and its gradient is nan at padded places"
    if padded.any():
        return "the loss is right, and its gradient is not 0 at padded places"
    if said := difference(right, came, 1e-5):
        return f"the loss is right, and its gradient differs at real places: {said}"
    return None


def _loss_case(name, *args, **more):
    return Case(name, _masked(*args, **more), verify=_loss_and_gradient, tolerance=1e-5)


def _each(outputs, targets):
    """Cross-entropy at each place (N, T), those with a target that is no class included, as if it were 0."""
    return F.cross_entropy(outputs.transpose(1, 2), targets.clamp_min(0), reduction="none")


MASKED_LOSS = Exercise(
    lesson=LESSON,
    solution=masked_loss,
    hints=(
        "What does `outputs[mask]` give, for outputs (N, T, C) and a bool mask (N, T)? How many rows has it?",
        "`outputs[mask]` is (M, C) and `targets[mask]` (M,), M the number of real places: what is not real is not there any more, "
        "and gets the gradient 0.",
    ),
    cases=(
        _loss_case("all places are real", [4, 4]),
        _loss_case("one sequence is padded", [5, 3]),
        _loss_case("the sequences have very different lengths", [8, 1, 2]),
        _loss_case("the network is sure of itself", [6, 2, 3], scale=30.0),
        _loss_case("a sequence has no real place", [4, 0, 2]),
        _loss_case("the targets are -1 at padded places", [3, 5, 1], target=-1),
        _loss_case("the outputs are infinite at padded places", [4, 2], output=math.inf),
        _loss_case("the outputs are nan at padded places", [2, 6, 3], target=-1, output=math.nan),
    ),
    mistakes=(
        Mistake(
            "The padded places take part, with whatever target stands there.",
            lambda outputs, targets, mask: _each(outputs, targets).mean(),
        ),
        Mistake(
            "The padded places count 0 in the sum, and count as places in the mean: divide by the number of real places.",
            lambda outputs, targets, mask: (_each(outputs, targets) * mask).mean(),
        ),
        Mistake(
            "Each sequence has its own mean here, and the mean of those gives a place of a short sequence more weight. One mean "
            "over all real places is asked for.",
            lambda outputs, targets, mask: ((_each(outputs, targets) * mask).sum(1) / mask.sum(1).clamp_min(1)).mean(),
        ),
        Mistake("This is the sum over the real places; their mean is asked for.", lambda o, t, mask: (_each(o, t) * mask).sum()),
        Mistake(
            "0 times nan is nan: a loss that is computed at padded places and multiplied by 0 is still poisoned by what stands "
            "there. Pick the real places before anything is computed: `outputs[mask]`.",
            lambda outputs, targets, mask: (_each(outputs, targets) * mask).sum() / mask.sum(),
        ),
        Mistake(
            "The loss leaves the padded places out, and their gradient is nan all the same: backward goes through their softmax "
            "and multiplies 0 by nan. Pick the real places before anything is computed: `outputs[mask]`.",
            lambda outputs, targets, mask: F.cross_entropy(outputs.flatten(0, 1), targets.masked_fill(~mask, -100).flatten()),
        ),
    ),
)

# ── Memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _pack(strings, encode=str.encode, offsets=lambda sizes: [0, *itertools.accumulate(sizes)], size=len, dtype=torch.uint8):
    encoded = [encode(string) for string in strings]
    sizes = [size(thing) for thing in (strings if size is not len else encoded)]
    return torch.tensor(list(b"".join(encoded)), dtype=dtype), torch.tensor(offsets(sizes), dtype=torch.int64)


PACK_STRINGS = Exercise(
    lesson=LESSON,
    solution=pack_strings,
    hints=(
        "`string.encode()` gives the UTF-8 bytes of a string, and `b''.join(…)` puts many together. Which length counts, that of "
        "the string or that of its bytes?",
        "`[0, *itertools.accumulate(lengths)]` are the places where the strings begin, and where the last one ends.",
        "`torch.tensor(list(all_bytes), dtype=torch.uint8)` makes a tensor of bytes, and is slow for many; "
        "`torch.from_numpy(np.frombuffer(all_bytes, np.uint8).copy())` is quick, and allows none.",
    ),
    cases=(
        Case("there are three strings", lambda: (["one", "three", "nine"],)),
        Case("there is one string", lambda: (["digits/7/0001.jpg"],)),
        Case("a string is empty", lambda: (["ab", "", "c"],)),
        Case("the last string is empty", lambda: (["x", ""],)),
        Case("characters take more than one byte", lambda: (["é", "naïve", "数字", "a"],)),
        Case("two strings are the same", lambda: (["same", "same"],)),
        Case("all strings are empty", lambda: (["", ""],)),
        Case("there are no strings", lambda: ([],)),
    ),
    mistakes=(
        Mistake(
            "The offsets count characters. A character takes one to four bytes in UTF-8: count the bytes.",
            lambda strings: _pack(strings, size=lambda string: len(string)),
        ),
        Mistake(
            "The offsets end with the beginning of the last string. One more is needed, its end: len(strings) + 1 places.",
            lambda strings: _pack(strings, offsets=lambda sizes: [0, *itertools.accumulate(sizes)][:-1]),
        ),
        Mistake(
            "The offsets are the strings' ends; the beginning of the first, 0, is missing.",
            lambda strings: _pack(strings, offsets=lambda sizes: list(itertools.accumulate(sizes))),
        ),
        Mistake(
            "These are the lengths. An offset is a place: the sum of the lengths before it.",
            lambda strings: _pack(strings, offsets=lambda sizes: sizes),
        ),
        Mistake(
            "Each byte is kept as an int64, which takes eight: give torch.tensor the dtype torch.uint8.",
            lambda strings: _pack(strings, dtype=torch.int64),
        ),
        Mistake(
            "The strings are separated by a byte of their own. The offsets say where each ends: nothing stands between them.",
            lambda strings: _pack(strings, encode=lambda string: string.encode() + b"\0"),
        ),
    ),
)

# ── In the middle of an epoch ─────────────────────────────────────────────────────────────────────────────────────────


def remaining(order_seed, epoch, n, batch_size, consumed):
    """The batches of an epoch that are left after `consumed` of them, lists of indices; the epoch's seed is order_seed + epoch."""
    generator = torch.Generator().manual_seed(order_seed + epoch)
    batches = torch.randperm(n, generator=generator).split(batch_size)
    return [batch.tolist() for batch in batches[consumed:]]


def _keeps_random_state(call):
    before = torch.random.get_rng_state()
    call()
    if torch.equal(before, torch.random.get_rng_state()):
        return None
    return "the batches are right, and torch's global random state has changed, on which the rest of the run depends"


def _left(name, *args):
    return Case(name, lambda: args, watch=_keeps_random_state)


def _order_of(n, *seeds):
    generator = torch.Generator().manual_seed(sum(seeds))
    return torch.randperm(n, generator=generator)


def _cut(order, batch_size):
    return [batch.tolist() for batch in torch.as_tensor(order).split(batch_size)]


def _later_epoch_of_one_generator(order_seed, epoch, n, batch_size, consumed):
    generator = torch.Generator().manual_seed(order_seed)
    for _ in range(epoch + 1):
        order = torch.randperm(n, generator=generator)
    return _cut(order, batch_size)[consumed:]


def _by_global_state(order_seed, epoch, n, batch_size, consumed):
    torch.manual_seed(order_seed + epoch)
    return _cut(torch.randperm(n), batch_size)[consumed:]


def _shuffles_the_rest(order_seed, epoch, n, batch_size, consumed):
    left = torch.arange(n)[consumed * batch_size :]
    return _cut(left[_order_of(len(left), order_seed, epoch)], batch_size) if len(left) else []


def _skips_items(order_seed, epoch, n, batch_size, consumed):
    left = _order_of(n, order_seed, epoch)[consumed:]
    return _cut(left, batch_size) if len(left) else []


REMAINING = Exercise(
    lesson=LESSON,
    solution=remaining,
    hints=(
        "Whoever knows the seed knows the whole order of the epoch. Draw it again, cut it into batches, and leave out those that "
        "have been seen.",
        "`torch.Generator().manual_seed(order_seed + epoch)` is a generator of its own; `torch.randperm(n, generator=…)` draws "
        "from it. `.split(batch_size)` cuts, and a slice of what it gives begins at batch `consumed`.",
    ),
    cases=(
        _left("nothing has been seen", 0, 0, 12, 4, 0),
        _left("one batch of three has been seen", 3, 0, 12, 4, 1),
        _left("the epoch is a later one", 3, 4, 12, 5, 1),
        _left("the last batch is smaller", 7, 1, 11, 4, 1),
        _left("only the smaller batch is left", 7, 2, 9, 4, 2),
        _left("all batches have been seen", 1, 0, 8, 4, 2),
        _left("a batch is larger than the dataset", 5, 0, 3, 8, 0),
        _left("a batch is one item", 2, 6, 5, 1, 3),
    ),
    mistakes=(
        Mistake(
            "`consumed` counts batches; here it leaves out as many single items.",
            _skips_items,
        ),
        Mistake(
            "The items that are left are shuffled anew, as if they were a dataset of their own: the order of the epoch is gone. "
            "Draw the whole order, then leave out its beginning.",
            _shuffles_the_rest,
        ),
        Mistake(
            "The epoch takes no part: every epoch has the same order. The seed is order_seed + epoch.",
            lambda order_seed, epoch, n, batch_size, consumed: _cut(_order_of(n, order_seed), batch_size)[consumed:],
        ),
        Mistake(
            "One generator draws the orders of all epochs, one after another. Here each epoch has a new generator, with the seed "
            "order_seed + epoch, so that no earlier order has to be drawn.",
            _later_epoch_of_one_generator,
        ),
        Mistake(
            "The smaller batch at the end is missing.",
            lambda *a: [batch for batch in remaining(*a) if len(batch) == a[3]],
        ),
        Mistake(
            "`torch.manual_seed` sets the state from which everything draws. A generator of your own leaves it as it is.",
            _by_global_state,
        ),
        Mistake(
            "These are the batches that have been seen; those that are left are asked for.",
            lambda order_seed, epoch, n, batch_size, consumed: _cut(_order_of(n, order_seed, epoch), batch_size)[:consumed],
        ),
    ),
)

# ── The clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def noisy_dataset(images, scale=0.1):
    """A dataset of images with noise: item i is images[i] plus scale times normal numbers, which never come twice."""

    class Noisy(Dataset):
        def __len__(self):
            return len(images)

        def __getitem__(self, i):
            # a loader seeds torch's global generator in each worker, another way each epoch
            return images[i] + scale * torch.randn(images[i].shape)

    return Noisy()


_COPIED_GENERATOR = (
    "A generator that exists before the workers start is copied into each of them, with its state. Draw from torch's global "
    "generator, which a loader seeds for each worker and epoch, or make the generator in the worker, of get_worker_info().seed."
)
_EPOCH_REPEATS = (
    "A generator that is made anew with the same seed begins again at the same place; and the seed of a worker that stays, or of "
    "the main process, is the same in the next epoch."
)
_UNREPEATABLE = (
    "A generator without a seed takes one from the operating system. In a worker, get_worker_info().seed follows from the seed of "
    "torch, and torch's global generator is seeded with it."
)


def _noise_of(dataset, images, scale, indices):
    """The noise of these items over scale, lists of floats; ValueError says what is wrong with one."""
    found = []
    for i in indices:
        item = dataset[i]
        if not isinstance(item, torch.Tensor) or item.dtype != torch.float32 or item.shape != images[i].shape:
            raise ValueError(f"item {i} is {brief(item)}; a float32 tensor of shape {tuple(images[i].shape)} was expected")
        found.append(((item - images[i]) / scale).flatten().tolist())
    return found


def _repeated(found):
    """Two places of this list of noises that hold the same, or None."""
    flat = torch.tensor(found)
    distances = torch.cdist(flat, flat, p=math.inf).fill_diagonal_(math.inf)
    places = (distances < 1e-2).nonzero().tolist()
    return tuple(places[0]) if places else None


def _noise_case(name, judge, n=12, scale=0.1, before=0):
    def verify(result, images, scale=0.1):
        if said := is_dataset(result, len(images)):
            return said
        try:
            with torch.random.fork_rng(devices=[]):
                _noise_of(result, images, scale, range(before))
                return judge(result, images, scale)
        except ValueError as error:
            return str(error)
        except Exception as error:
            return f"reading items {raised(error)}"

    return Case(name, lambda: (noise(n, 4, 4).abs(), scale), verify=verify)


def _in_main(dataset, images, scale):
    one, two = (_noise_of(dataset, images, scale, range(len(images))) for _ in range(2))
    numbers = torch.tensor(one + two)
    spread, largest = numbers.std().item(), numbers.abs().max().item()
    if not 0.75 < spread < 1.25 or abs(numbers.mean().item()) > 0.3 or largest < 2:
        return (
            f"the noise has a mean of {numbers.mean().item() * scale:.3g} and a standard deviation of {spread * scale:.3g}, where "
            f"normal numbers times {scale} have about 0 and {scale}"
        )
    if _repeated(one):
        return "two items of an epoch have the same noise"
    return f"an item has noise that came in the epoch before. {_EPOCH_REPEATS}" if _repeated(one + two) else None


def _by_workers(dataset, images, scale, workers, epochs=1, base=6_000_000_000_000_000_000):
    """[the noise that each of the workers gives, which all stay for so many epochs], or a ValueError."""

    def act(copied, number):
        return [_noise_of(copied, images, scale, range(number, len(images), workers)) for _ in range(epochs)]

    given, said = in_workers(dataset, act, workers, base)
    if said:
        raise ValueError(said)
    return given


def _in_some_workers(workers):
    def judge(dataset, images, scale):
        first = [noises for worker in _by_workers(dataset, images, scale, workers) for noises in worker]
        if place := _repeated(sum(first, [])):
            owner = [number for number, noises in enumerate(first) for _ in noises]
            one, other = (owner[k] for k in place)
            if one == other:
                return f"worker {one} gives the same noise to two items. {_EPOCH_REPEATS}"
            return f"an item of worker {one} and an item of worker {other} have the same noise. {_COPIED_GENERATOR}"
        later = [noises for worker in _by_workers(dataset, images, scale, workers, base=1_234_567_890_123_456_789) for noises in worker]
        if _repeated(sum(first, []) + sum(later, [])):
            return f"the second epoch, with new workers, has noise of the first. {_EPOCH_REPEATS}"
        again = [noises for worker in _by_workers(dataset, images, scale, workers) for noises in worker]
        if not torch.allclose(torch.tensor(sum(first, [])), torch.tensor(sum(again, [])), atol=1e-3):
            return f"with the same torch seed, the workers give other noise. {_UNREPEATABLE}"
        return None

    return judge


def _in_workers_that_stay(dataset, images, scale):
    both = _by_workers(dataset, images, scale, 2, epochs=2)
    if _repeated([noise for worker in both for epoch in worker for noise in epoch]):
        return f"workers that stay for a second epoch give noise of the first again. {_EPOCH_REPEATS}"
    return None


def _noisy(draw, at_start=lambda: None):
    """The exercise with a generator of its own: draw(its state, shape, i) gives the numbers."""

    def noisy_dataset(images, scale=0.1):
        class Noisy(Dataset):
            def __init__(self):
                self.rng = at_start()

            def __len__(self):
                return len(images)

            def __getitem__(self, i):
                return images[i] + scale * torch.as_tensor(draw(self, images[i].shape, i), dtype=torch.float32)

        return Noisy()

    return noisy_dataset


def _seed_here():
    info = get_worker_info()
    return torch.initial_seed() if info is None else info.seed


NOISY_DATASET = Exercise(
    lesson=LESSON,
    solution=noisy_dataset,
    hints=(
        "When is the generator made: before the workers are there, or in them? What does each worker have of it when it starts?",
        "Each worker has a copy, with the same state, and so have the workers of the next epoch. numpy's *global* functions and "
        "torch's are another matter: what does a loader do about their seeds?",
        "`torch.randn(images[i].shape)` draws from the global generator, which a loader seeds in each worker with the base seed "
        "of the epoch plus the worker's number. No generator of your own is needed.",
    ),
    cases=(
        _noise_case("there are no workers", _in_main),
        _noise_case("there are two workers", _in_some_workers(2)),
        _noise_case("there are three workers and more noise", _in_some_workers(3), scale=0.5),
        _noise_case("the main process has read items before", _in_some_workers(2), before=3),
        _noise_case("two workers stay for a second epoch", _in_workers_that_stay),
    ),
    mistakes=(
        Mistake(_COPIED_GENERATOR, _noisy(lambda self, shape, i: self.rng.standard_normal(shape), lambda: np.random.default_rng(0))),
        Mistake(_EPOCH_REPEATS, _noisy(lambda self, shape, i: np.random.default_rng([_seed_here() % 2**32, i]).standard_normal(shape))),
        Mistake(_UNREPEATABLE, _noisy(lambda self, shape, i: np.random.default_rng().standard_normal(shape))),
    ),
)


def count_stream(n):
    """An IterableDataset of the ints 0 … n - 1: an epoch gives each of them once, with any number of workers or none."""

    class Count(IterableDataset):
        def __iter__(self):
            info = get_worker_info()  # asked in the worker: where the dataset is made there is none
            first, stride = (0, 1) if info is None else (info.id, info.num_workers)
            return iter(range(first, n, stride))

    return Count()


_ASKED_TOO_EARLY = (
    "Each worker gives all of them. `get_worker_info()` is None wherever the dataset is *made*, which is in the main process; "
    "a worker knows its number when it calls `__iter__`."
)
_ONE_WALK = "An iterator is at its end after one epoch: `__iter__` makes a new one each time."
_PART_ALONE = (
    "Without workers it gives a part alone, or nothing: `get_worker_info()` is None there, and the whole stream is this process's share."
)


def _counted(dataset, n, epochs=2):
    """What each of so many epochs gives, lists of ints; ValueError says what is wrong."""
    found = []
    for _ in range(epochs):
        epoch = list(itertools.islice(dataset, 2 * n + 2))
        if not all(isinstance(x, int) or (isinstance(x, torch.Tensor) and x.numel() == 1) for x in epoch):
            raise ValueError(f"an epoch is {brief(epoch)}; ints were expected")
        found.append([int(x) for x in epoch])
    return found


def _count_case(name, n, workers):
    def verify(result, n):
        if not isinstance(result, IterableDataset):
            return f"an IterableDataset was expected; {kind(result)} came"
        if workers == 0:
            try:
                epochs = _counted(result, n)
            except Exception as error:
                return str(error) if isinstance(error, ValueError) else f"walking through it {raised(error)}"
        else:
            given, said = in_workers(result, lambda copied, number: _counted(copied, n), workers)
            if said:
                return said
            epochs = [sum(parts, []) for parts in zip(*given)]
        for number, epoch in enumerate(epochs):
            if sorted(epoch) == list(range(n)):
                continue
            missing, more = len(set(range(n)) - set(epoch)), len(epoch) - len(set(epoch))
            said = f"epoch {number} gives {len(epoch)} numbers, of which {more} came before; {missing} of the {n} are missing"
            if number:
                return f"{said}. {_ONE_WALK}"
            if workers == 0:
                return f"{said}. {_PART_ALONE}"
            return f"{said}. {_ASKED_TOO_EARLY}" if len(epoch) == workers * n and not missing else said
        return None

    return Case(name, lambda: (n,), verify=verify)


def _counting(walk, at_start=lambda n: None):
    def count_stream(n):
        class Count(IterableDataset):
            def __init__(self):
                self.made = at_start(n)

            def __iter__(self):
                return walk(self.made, n)

        return Count()

    return count_stream


def _one_walk(made, n):
    info = get_worker_info()
    return itertools.islice(made, *((0, None, 1) if info is None else (info.id, None, info.num_workers)))


def _needs_workers(made, n):
    info = get_worker_info()
    return iter(range(info.id, n, info.num_workers)) if info else iter(())


COUNT_STREAM = Exercise(
    lesson=LESSON,
    solution=count_stream,
    hints=(
        "The program does divide the numbers among the workers. Print `info` where it is asked for. In which process is that?",
        "`__init__` runs in the main process, before there are workers, where get_worker_info() is None. `__iter__` runs in each "
        "worker, at the start of each epoch.",
    ),
    cases=(
        _count_case("there are no workers", 7, 0),
        _count_case("there is one worker", 5, 1),
        _count_case("there are two workers", 8, 2),
        _count_case("the numbers cannot be divided evenly among three workers", 10, 3),
        _count_case("there are more workers than numbers", 2, 4),
    ),
    mistakes=(
        Mistake(_ASKED_TOO_EARLY, _counting(lambda made, n: iter(range(n)))),
        Mistake(_ONE_WALK, _counting(_one_walk, lambda n: iter(list(range(n))))),
        Mistake(_PART_ALONE, _counting(_needs_workers)),
    ),
)


def read_rows(path, columns):
    """A dataset of the rows of a binary file of int64: item i is row i, an int64 tensor (columns,); right in any worker."""

    class Rows(Dataset):
        def __len__(self):
            return os.path.getsize(path) // (8 * columns)

        def __getitem__(self, i):
            with open(path, "rb") as file:  # a position of its own, which nobody else moves
                file.seek(8 * columns * i)
                return torch.from_numpy(np.frombuffer(file.read(8 * columns), np.int64).copy())

    return Rows()


_SHARED_POSITION = (
    "A file that is open when workers are forked has one position for all of them: one moves it between another's seek and read. "
    "And a spawned worker cannot be given an open file at all. Open it in `__getitem__`, or read without a position: np.memmap."
)
_OPEN_BEFORE = (
    "The file is opened at the first access, and that was here in the main process: one look at an item, and all workers share an "
    "open file again. Open it for each access, or keep what is open by process, os.getpid(), and leave it out of a copy."
)


@functools.cache
def _rows_folder():
    return tempfile.TemporaryDirectory(prefix="course-rows-", ignore_cleanup_errors=True)


def _rows_file():
    """A file of 2**17 int64, 1 MiB, more than a buffer holds: number k is 7 * k + 1."""
    path = os.path.join(_rows_folder().name, "rows.bin")
    if not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        (7 * np.arange(2**17, dtype=np.int64) + 1).tofile(path)
    return path


def _rows_wrong(dataset, columns, indices):
    """None where these rows are right, else the complaint."""
    for i in indices:
        wanted = 7 * torch.arange(i * columns, (i + 1) * columns) + 1
        if said := difference(wanted, dataset[i]):
            return f"row {i}: {said}"
    return None


def _positions(path):
    """The position of each descriptor that this process has open on the file (Linux)."""
    found, file = {}, os.stat(path)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(int(name)), file):
                found[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)
    return found


def _rows_case(name, columns, judge=None, before=()):
    def verify(result, path, columns):
        n = 2**17 // columns
        if said := is_dataset(result, n):
            return said
        order = [n - 1, 0, n // 2, n // 3, 1, n - 2]
        try:
            said = _rows_wrong(result, columns, before if judge else order)
        except Exception as error:
            said = f"reading rows {raised(error)}"
        if said or not judge:
            return said
        try:
            said = judge(result, path, columns, order)
        except Exception as error:
            said = f"reading rows in a worker {raised(error)}"
        return f"{said}. {_OPEN_BEFORE if before else _SHARED_POSITION}" if said else None

    return Case(name, lambda: (_rows_file(), columns), verify=verify)


def _in_forked(dataset, path, columns, order):
    if not FORKS:
        return None  # there, workers are spawned; the next case
    before = _positions(path)
    given, said = in_workers(dataset, lambda copied, number: _rows_wrong(copied, columns, order))
    if said := said or next(filter(None, given), None):
        return said
    moved = [(was, now) for (fd, was), (_, now) in zip(sorted(before.items()), sorted(_positions(path).items())) if was != now]
    if moved:
        return f"a forked worker that reads moves the main process's open file, here from byte {moved[0][0]:,} to {moved[0][1]:,}"
    return None


def _in_spawned(dataset, path, columns, order):
    def read(copied):
        with _elsewhere(path):
            return None, _rows_wrong(copied, columns, order)

    return _copied(dataset, read)[1]


@contextlib.contextmanager
def _elsewhere(path):
    """As in a process that was not forked: what this one has open on the file, by number, is not that file there (Linux)."""
    with contextlib.ExitStack() as put_back:
        for descriptor in _positions(path) if FORKS else ():
            kept = os.dup(descriptor)
            put_back.callback(os.close, kept)
            put_back.callback(os.dup2, kept, descriptor)
            with open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), descriptor)
        yield


def _rows(handle, at_start=lambda path: None, state=None):
    """The exercise with a way of its own to come by the open file: handle(dataset, path)."""

    def read_rows(path, columns):
        class Rows(Dataset):
            def __init__(self):
                self.file = at_start(path)

            def __len__(self):
                return os.path.getsize(path) // (8 * columns)

            def __getitem__(self, i):
                file = handle(self, path)
                file.seek(8 * columns * i)
                return torch.from_numpy(np.frombuffer(file.read(8 * columns), np.int64).copy())

        return Rows()

    return read_rows


def _opened(path):
    return open(path, "rb", buffering=0)


def _opened_once(dataset, path):
    dataset.file = dataset.file or _opened(path)
    return dataset.file


READ_ROWS = Exercise(
    lesson=LESSON,
    solution=read_rows,
    hints=(
        "Two workers are at work at once. One seeks; before it reads, the other one seeks. How many positions has the file?",
        "A forked process has the open files of its parent, and with them *one* position each. A file that the worker has opened "
        "itself has a position of its own.",
        "Opening at the first access is right as long as the main process never looks at an item. `with open(path, 'rb') as file:` "
        "in `__getitem__` is always right; np.memmap has no position at all.",
    ),
    cases=(
        _rows_case("there are no workers", 32),
        _rows_case("workers are forked", 32, _in_forked),
        _rows_case("workers are spawned", 16, _in_spawned),
        _rows_case("the main process has read a row before workers are forked", 64, _in_forked, before=(3, 900)),
        _rows_case("the main process has read a row before workers are spawned", 8, _in_spawned, before=(10,)),
    ),
    mistakes=(
        Mistake(_SHARED_POSITION, _rows(lambda dataset, path: dataset.file, _opened)),
        Mistake(_OPEN_BEFORE, _rows(_opened_once)),
    ),
)


def make_batch(samples):
    """A collate function for (tensor, int): a batch with the attributes inputs and targets, which a loader's pinning reaches."""

    # in a project at the top of a module, where workers find it
    class Batch(types.SimpleNamespace):
        def pin_memory(self):
            return Batch(inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    inputs, targets = zip(*samples)
    return Batch(inputs=torch.stack(inputs), targets=torch.tensor(targets))


_UNREACHED = (
    "Pinning knows tensors, dicts, lists, tuples and namedtuples, and calls the method pin_memory() of an object that has one. "
    "It leaves everything else as it is, without a word."
)
_PINNED_COPY_LOST = (
    "`tensor.pin_memory()` returns a pinned copy; the tensor stays where it is. Keep what it returns."
)
_RETURNS_NO_BATCH = "The loop gets what pin_memory() returns: return the batch."


@contextlib.contextmanager
def _pretended_pinning():
    """Tensor.pin_memory gives a copy that is kept in a list: without an accelerator, torch has no pinned memory."""
    pinned = []

    def pin_memory(self, device=None):
        pinned.append(self.clone())
        return pinned[-1]

    with mock.patch.object(torch.Tensor, "pin_memory", pin_memory):
        yield pinned


def _batch_said(batch, samples, when):
    inputs, targets = _collated(samples, range(len(samples)))
    for name, wanted in (("inputs", inputs), ("targets", targets)):
        if not hasattr(batch, name):
            return f"{when} is {brief(batch)}, which has no attribute {name}"
        if said := difference(wanted, getattr(batch, name)):
            return f"{when}: its {name}: {said}"
    return None


def _gets_pinned(result, samples):
    if said := _batch_said(result, samples, "the batch"):
        return said
    try:
        with _pretended_pinning() as pinned:
            came = pinning.pin_memory(result)
    except Exception as error:
        return f"torch's pinning of the batch {raised(error)}"
    if came is None:
        return f"after pinning, the loop gets None. {_RETURNS_NO_BATCH}"
    if said := _batch_said(came, samples, "the batch after pinning"):
        return said
    left = [name for name in ("inputs", "targets") if not any(getattr(came, name) is tensor for tensor in pinned)]
    if not left:
        return None
    return f"after pinning, {' and '.join(left)} {'is' if len(left) == 1 else 'are'} not pinned" + (
        f". {_PINNED_COPY_LOST if len(pinned) >= 2 else _UNREACHED}" if len(left) == 2 else ""
    )


def _batch_with(method):
    def make_batch(samples):
        class Batch:
            def __init__(self, inputs, targets):
                self.inputs, self.targets = inputs, targets

        if method:
            Batch.pin_memory = method
        return Batch(*_collated(samples, range(len(samples))))

    return make_batch


def _pins_and_forgets(self):
    self.inputs.pin_memory()
    self.targets.pin_memory()
    return self


def _pins_and_returns_nothing(self):
    self.inputs, self.targets = self.inputs.pin_memory(), self.targets.pin_memory()


def _samples(n, *shape):
    return lambda: ([(noise(*shape, seed=i), (i * 3) % 10) for i in range(n)],)


MAKE_BATCH = Exercise(
    lesson=LESSON,
    solution=make_batch,
    hints=(
        "What would you have to do with a thing that you have never seen, to pin the tensors in it? Look at the source: "
        "`torch.utils.data._utils.pin_memory.pin_memory`.",
        "It walks through tensors, mappings, sequences and namedtuples, and calls `pin_memory()` on an object that has such a "
        "method, and takes what that returns.",
        "Give the batch a class with a method `pin_memory(self)` that returns a batch of `self.inputs.pin_memory()` and "
        "`self.targets.pin_memory()`; or make the batch a namedtuple.",
    ),
    cases=(
        Case("there are three samples", _samples(3, 2), verify=_gets_pinned),
        Case("there is one sample", _samples(1, 4), verify=_gets_pinned),
        Case("the samples are images", _samples(4, 3, 5, 5), verify=_gets_pinned),
    ),
    mistakes=(
        Mistake(_UNREACHED, _batch_with(None)),
        Mistake(_PINNED_COPY_LOST, _batch_with(_pins_and_forgets)),
        Mistake(_RETURNS_NO_BATCH, _batch_with(_pins_and_returns_nothing)),
    ),
)


def balanced_sampler(labels):
    """A sampler that gives len(labels) indices in each pass, drawn so that all classes are equally likely."""
    counts = torch.bincount(labels)
    return WeightedRandomSampler((1.0 / counts)[labels], num_samples=len(labels))


def _passes(sampler, n, passes):
    """So many passes, lists of ints, each cut after n + 1."""
    return [[int(i) for i in itertools.islice(iter(sampler), n + 1)] for _ in range(passes)]


def _margin(share, draws):
    """Six standard deviations of a share among so many independent draws."""
    return 6 * math.sqrt(share * (1 - share) / draws) + 1e-9


def _is_balanced(result, labels):
    n = len(labels)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            passes = _passes(result, n, 8)
    except Exception as error:
        return f"walking through what came {raised(error)}"
    lengths = [len(drawn) for drawn in passes]
    if lengths != [n] * len(passes):
        first = next(k for k, length in enumerate(lengths) if length != n)
        return f"pass {first} gives {lengths[first]} indices{' or more' * (lengths[first] > n)}; there are {n} labels"
    drawn = torch.tensor(passes).flatten()
    if drawn.min() < 0 or drawn.max() >= n:
        return f"the index {int(drawn.max())} came; there are {n} samples"
    if passes[0] == passes[1]:
        return "the second pass gives the same indices as the first"
    seen, classes = drawn.bincount(minlength=n), labels.unique().tolist()
    if len(drawn.unique()) <= max(len(classes), int(labels.max()) + 1):
        return f"of {n} samples only {len(drawn.unique())} are ever drawn, those with the indices {brief(drawn.unique().tolist())}"
    if all(sorted(indices) == list(range(n)) for indices in passes) and len(set(labels.bincount().tolist())) > 1:
        return "each pass gives every sample once: a shuffled order, with the classes as frequent as they are"
    for c in classes:
        share, wanted, own = seen[labels == c].sum().item() / len(drawn), 1 / len(classes), (labels == c).double().mean().item()
        if abs(share - wanted) > _margin(wanted, len(drawn)):
            as_found = ", as in the labels" if abs(share - own) < _margin(own, len(drawn)) else ""
            return f"{share:.1%} of the indices belong to class {c}{as_found}; {wanted:.1%} were expected"
    for c in classes:
        each = seen[labels == c].double()
        half, total = len(each) // 2, each.sum().item()
        if half and abs(each[:half].sum().item() / total - half / len(each)) > 6 * math.sqrt(0.25 / total):
            return f"the first samples of class {c} are drawn more often than the others, or less often"
        if half and (each == 0).double().mean() > math.exp(-total / len(each)) + 6 * math.sqrt(0.25 / len(each)):
            return f"{int((each == 0).sum())} of the {len(each)} samples of class {c} are never drawn in {len(passes)} passes"
    return None


def _labels(*counts, numbers=None, seed=0):
    """Labels with so many samples of each class, shuffled."""
    numbers = range(len(counts)) if numbers is None else numbers
    labels = torch.cat([torch.full((count,), number) for count, number in zip(counts, numbers)])
    return lambda: (labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))],)


def _weighted(weights, samples=len, replacement=True):
    def balanced_sampler(labels):
        return WeightedRandomSampler(weights(labels), samples(labels), replacement=replacement)

    return balanced_sampler


BALANCED_SAMPLER = Exercise(
    lesson=LESSON,
    solution=balanced_sampler,
    hints=(
        "Look at the indices that the sampler gives. `WeightedRandomSampler(weights, num_samples)` draws index k with a "
        "probability in proportion to weights[k]. How many weights does it get here, and how many samples are there?",
        "A weight for each *sample* is needed: that of its class. `class_weights[labels]` picks them.",
        "The weight of a class is 1 / its number of samples: then the weights of its samples add up to 1, in each class.",
    ),
    cases=(
        Case("there are two classes, one of them rare", _labels(450, 50), verify=_is_balanced),
        Case("there are four classes", _labels(300, 20, 100, 80, seed=1), verify=_is_balanced),
        Case("all classes are as frequent", _labels(150, 150, 150, seed=2), verify=_is_balanced),
        Case("the numbers of some classes are missing", _labels(200, 30, 70, numbers=(0, 3, 7), seed=3), verify=_is_balanced),
        Case("a class has one sample", _labels(1, 199, seed=4), verify=_is_balanced),
    ),
    mistakes=(
        Mistake(
            "There is one weight for each class, and the sampler takes weight k for that of sample k: it knows as many samples as "
            "there are classes. Give each sample the weight of its class, `class_weights[labels]`.",
            _weighted(lambda labels: 1.0 / torch.bincount(labels)),
        ),
        Mistake(
            "The weights are the classes' frequencies, and what is frequent becomes more so. The weight of a sample is 1 / the "
            "number of samples of its class.",
            _weighted(lambda labels: torch.bincount(labels)[labels].double()),
        ),
        Mistake(
            "Without replacement, as many indices as there are samples are all samples, once each: a shuffled order, whatever the "
            "weights.",
            _weighted(lambda labels: (1.0 / torch.bincount(labels))[labels], replacement=False),
        ),
        Mistake(
            "A pass gives one index for each class. num_samples is the number of indices of a pass: len(labels).",
            _weighted(lambda labels: (1.0 / torch.bincount(labels))[labels], lambda labels: len(labels.unique())),
        ),
        Mistake(
            "All samples have the same weight, and the classes come as often as they are there.",
            _weighted(lambda labels: torch.ones(len(labels))),
        ),
    ),
)


def split_with_transforms(images, held_out, augment, plain, generator):
    """Two datasets, (training, validation), over one random split: items are augment(image) and plain(image)."""

    class Images(Dataset):
        def __init__(self, indices, transform):
            self.indices, self.transform = indices, transform

        def __len__(self):
            return len(self.indices)

        def __getitem__(self, i):
            return self.transform(images[self.indices[i]])

    order = torch.randperm(len(images), generator=generator).tolist()
    return Images(order[held_out:], augment), Images(order[:held_out], plain)


_ONE_DATASET = (
    "random_split makes two lists of indices over *one* dataset. What is set on `part.dataset` holds for both parts, and what is "
    "set on the part itself, for none: a Subset has no transform. Each part needs a dataset of its own."
)
_OVERLAP = (
    "The two parts come from two splits, and these differ: the generator goes on between them. Draw one split, and use its indices "
    "for both."
)
_ONCE_FOR_ALL = "The transform belongs in `__getitem__`: called once for all, a random one gives the same at each access."


class _Transform:
    """Adds `amount` to an image, and counts its calls."""

    def __init__(self, name, amount):
        self.name, self.amount, self.calls = name, amount, 0

    def __call__(self, image):
        self.calls += 1
        return image + self.amount

    def __repr__(self):
        return f"<the function {self.name}>"


def _part_said(part, images, transform, other, size, name):
    """(which images are in it, None), or (None, the complaint)."""
    if said := is_dataset(part, size):
        return None, f"the {name} set: {said}"
    found = []
    for k in range(size):
        before = transform.calls
        items = part[k], part[k]
        if any(not isinstance(item, torch.Tensor) or item.shape != images.shape[1:] for item in items):
            return None, f"item {k} of the {name} set is {brief(items[0])}; a tensor of shape {tuple(images.shape[1:])} was expected"
        value = items[0].flatten()[0].item()
        which, amount = round(value % 1000), value - round(value % 1000)
        if amount != transform.amount:
            what = {other.amount: f"has been through {other.name}", 0: "has been through no transform"}.get(amount, "is no image's")
            more = f". {_ONE_DATASET}" if amount in (0, other.amount) else ""
            return None, f"item {k} of the {name} set {what}; {transform.name} was expected{more}"
        if said := difference(images[which] + transform.amount, items[0]):
            return None, f"item {k} of the {name} set: {said}"
        if transform.calls != before + 2:
            return None, f"{transform.name} is not called at each access of the {name} set. {_ONCE_FOR_ALL}"
        found.append(which)
    return found, None


def _is_split(result, images, held_out, augment, plain, generator):
    if not isinstance(result, tuple) or len(result) != 2:
        return f"a tuple (training, validation) was expected; {kind(result)} came"
    try:
        training, said = _part_said(result[0], images, augment, plain, len(images) - held_out, "training")
        if not said:
            validation, said = _part_said(result[1], images, plain, augment, held_out, "validation")
    except Exception as error:
        return f"reading its items {raised(error)}"
    if said:
        return said
    if both := sorted(set(training) & set(validation)):
        return f"{len(both)} of the {held_out} images that are held out are in the training set as well. {_OVERLAP}"
    if sorted(training + validation) != list(range(len(images))):
        return f"the two sets hold {len(set(training + validation))} different images, of {len(images)}"
    held = sorted(validation)
    if held in (list(range(held_out)), list(range(len(images) - held_out, len(images)))):
        return f"the images that are held out are a block, {held[0]} to {held[-1]}: they should be drawn at random"
    if torch.equal(generator.get_state(), torch.Generator().manual_seed(generator.initial_seed()).get_state()):
        return "nothing was drawn from the generator given, so that its seed does not decide which images are held out"
    return None


def _split_case(name, n, held_out, shape=(2,), seed=0):
    def args():
        images = torch.arange(n, dtype=torch.float32).reshape(n, *[1] * len(shape)).expand(n, *shape).clone()
        return images, held_out, _Transform("augment", 1000), _Transform("plain", 2000), torch.Generator().manual_seed(seed)

    return Case(name, args, verify=_is_split)


class _Through(Dataset):
    """Images through a transform."""

    def __init__(self, images, transform):
        self.images, self.transform = images, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(self.images[i])


def _parts(make):
    def split_with_transforms(images, held_out, augment, plain, generator):
        return make(images, [len(images) - held_out, held_out], augment, plain, generator)

    return split_with_transforms


def _set_on_both(images, sizes, augment, plain, generator):
    both = _Through(images, augment)
    training, validation = torch.utils.data.random_split(both, sizes, generator=generator)
    both.transform = plain
    return training, validation


def _two_splits(images, sizes, augment, plain, generator):
    one, other = (torch.utils.data.random_split(_Through(images, t), sizes, generator=generator) for t in (augment, plain))
    return one[0], other[1]


def _computed_once(images, sizes, augment, plain, generator):
    order = torch.randperm(len(images), generator=generator).tolist()
    held = sizes[1]
    return [augment(images[i]) for i in order[held:]], [plain(images[i]) for i in order[:held]]


SPLIT_WITH_TRANSFORMS = Exercise(
    lesson=LESSON,
    solution=split_with_transforms,
    hints=(
        "Look at an item of the training set before the last assignment and after it. How many datasets are there, and which of "
        "them does `validation.dataset` name?",
        "`random_split` gives two Subsets: lists of indices, over the same dataset. Two transforms need two datasets, over the "
        "same images and one split.",
        "`torch.utils.data.Subset(Images(augment), training.indices)` is a part with a dataset of its own. Draw the split once: "
        "the generator gives another one the next time.",
    ),
    cases=(
        _split_case("10 of 40 images are held out", 40, 10),
        _split_case("most images are held out", 30, 20, seed=3),
        _split_case("the images have three dimensions", 36, 12, (1, 3, 3), seed=8),
    ),
    mistakes=(
        Mistake(_ONE_DATASET, _parts(_set_on_both)),
        Mistake(_OVERLAP, _parts(_two_splits)),
        Mistake(_ONCE_FOR_ALL, _parts(lambda *a: tuple(_computed_once(*a)))),
    ),
)


def validate_each_epoch(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    """Train, with a validation after each epoch that leaves the training as it would be without; the validation losses."""
    losses = []
    for _ in range(epochs):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        total, samples = 0.0, 0
        # a loader draws a seed when it is walked through, even one that does not shuffle; afterwards the state is as it was
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for inputs, targets in val_loader:
                total += loss_fn(model(inputs), targets).item() * len(targets)
                samples += len(targets)
        losses.append(total / samples)
    return losses


class _Jittered(TensorDataset):
    """Draws from torch's global state for each item, and gives it as it is: a transform that happens to change nothing."""

    def __getitem__(self, i):
        torch.rand(3)
        return super().__getitem__(i)


def _validated(samples, batch_size, epochs, shuffle=False, dataset=TensorDataset):
    def args():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        train = TensorDataset(noise(12, 4, seed=1), torch.arange(12) % 3)
        held = dataset(noise(samples, 4, seed=2), torch.arange(samples) % 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, DataLoader(train, 4, shuffle=True), DataLoader(held, batch_size, shuffle), F.cross_entropy, optimizer, epochs

    def verify(result, model, train_loader, val_loader, loss_fn, optimizer, epochs):
        if not isinstance(result, list) or len(result) != epochs or not all(isinstance(loss, float) for loss in result):
            return f"a list of {epochs} floats was expected; {brief(result)} came"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # as the call was seeded
            unlooked, fresh_loader, _, _, own, _ = args()
            losses = _trained(unlooked, fresh_loader, loss_fn, own, epochs, held=(val_loader.dataset.tensors))
        if said := difference(unlooked.state_dict(), model.state_dict()):
            start = args()[0].state_dict()
            if difference(start, model.state_dict()) is None:
                return "the model is as it was before the call: nothing has been trained"
            return f"without validation the same training ends with other weights: {said}"
        if said := difference(losses, result, 1e-5):
            return f"the training is right, and a validation loss is not: {said}"
        return None

    return {"args": args, "verify": verify}


def _trained(model, loader, loss_fn, optimizer, epochs, held=None, look=None, once=False):
    """The training alone; `held` is judged without a loader, which draws nothing, or look() is called for each epoch's figure."""
    losses = []
    for epoch in range(epochs):
        if epoch == 0 or not once:
            model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        if look:
            losses.append(look(epoch))
        else:
            model.eval()
            with torch.no_grad():
                losses.append(loss_fn(model(held[0]), held[1]).item())
    return losses


def _look(model, loader, loss_fn, mean=False):
    pairs = [(loss_fn(model(x), y).item(), len(y)) for x, y in loader]
    return sum(a for a, _ in pairs) / len(pairs) if mean else sum(a * n for a, n in pairs) / sum(n for _, n in pairs)


def _looking(keep=True, evaluate=True, mean=False, reseed=None, own=False, once=False):
    """The exercise with parts left out, or with another way to guard the random state."""

    def validate_each_epoch(model, train_loader, val_loader, loss_fn, optimizer, epochs):
        if own:
            val_loader.generator = torch.Generator().manual_seed(0)

        def look(epoch):
            model.train(not evaluate)
            with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=keep):
                figure = _look(model, val_loader, loss_fn, mean)
            if reseed is not None:
                torch.manual_seed(reseed + epoch)
            return figure

        return _trained(model, train_loader, loss_fn, optimizer, epochs, look=look, once=once)

    return validate_each_epoch


VALIDATE_EACH_EPOCH = Exercise(
    lesson=LESSON,
    solution=validate_each_epoch,
    hints=(
        "Compare torch.random.get_rng_state() before and after `for batch in val_loader: pass`. Who draws, and what for?",
        "A loader draws a base seed for its workers whenever it is walked through, even if it has none and does not shuffle. From "
        "which generator? And from which one do the order and the dropout of the training come?",
        "`with torch.random.fork_rng(devices=[]):` around the validation puts the state back at its end, whatever was drawn. (A "
        "loader can be given a generator of its own when it is made; that covers its own draws, not those of its dataset.)",
    ),
    cases=(
        Case("there is one epoch", **_validated(9, 9, 1), mutates=True, tolerance=1e-5),
        Case("there are three epochs", **_validated(8, 4, 3), mutates=True, tolerance=1e-5),
        Case("the last validation batch is smaller", **_validated(10, 4, 2), mutates=True, tolerance=1e-5),
        Case("the validation loader shuffles", **_validated(9, 3, 3, shuffle=True), mutates=True, tolerance=1e-5),
        Case("the validation items draw random numbers", **_validated(6, 3, 3, dataset=_Jittered), mutates=True, tolerance=1e-5),
    ),
    mistakes=(
        Mistake(
            "Going through the validation loader draws from torch's global state, and the training that comes after it draws "
            "other orders and other dropout. Put the state back after each validation.",
            _looking(keep=False),
        ),
        Mistake(
            "The state is set to a seed after each validation. It is then the same in every run, and not the one that the training "
            "would have had.",
            _looking(keep=False, reseed=0),
        ),
        Mistake(
            "A generator of its own, given afterwards, covers the base seed that the loader draws. Its sampler, if it shuffles, and "
            "its dataset draw from the global state as before. Put the state back after each validation, whatever has drawn.",
            _looking(keep=False, own=True),
        ),
        Mistake(
            "After the first validation the model is still in eval mode, and is trained without dropout. `model.train()` belongs at "
            "the beginning of each epoch.",
            _looking(once=True),
        ),
        Mistake(
            "Validation is in eval mode: in train mode dropout drops, and BatchNorm takes in the validation set's statistics.",
            _looking(evaluate=False),
        ),
        Mistake(
            "Each batch has the same weight, so a sample of the small last batch counts more than the others.",
            _looking(mean=True),
        ),
    ),
)

EXERCISES = (
    STALL_FRACTION,
    BATCHES_BY_HAND,
    EPOCH_SECONDS,
    FETCH_BATCH,
    RESEED,
    SHARD,
    PAD_BATCH,
    MASKED_LOSS,
    PACK_STRINGS,
    REMAINING,
    NOISY_DATASET,
    COUNT_STREAM,
    READ_ROWS,
    MAKE_BATCH,
    BALANCED_SAMPLER,
    SPLIT_WITH_TRANSFORMS,
    VALIDATE_EACH_EPOCH,
)
