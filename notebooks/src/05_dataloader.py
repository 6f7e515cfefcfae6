# %% [markdown]
# # 05 · Feeding the model
#
# After this lesson you can say where the time of an epoch goes, how many workers a load wants and why, what a worker gets and what it does not share, and which batches are silently wrong. And you can have a program measure the rest.
#
# 180 to 240 minutes, best in three sittings: sections 1 to 4, 5 to 9, and the clinic. It builds on lesson 03, the training loop, and on lesson 01, storages.
#
# Where this lesson says *the articles*, it means the three of lesson 01. Twelve of their statements on loading are put to the test, and two more go beyond them; a table at the end says what became of each.
#
# | | | |
# | --- | --- | --- |
# | [1 Where an epoch goes](#1-·-Where-an-epoch-goes) | [5 Every worker has a copy](#5-·-Every-worker-has-a-copy) | [9 Resume in the middle](#9-·-Resume-in-the-middle) |
# | [2 What a worker is](#2-·-What-a-worker-is) | [6 Streams](#6-·-Streams) | [Clinic](#Clinic) |
# | [3 How many workers](#3-·-How-many-workers) | [7 Sequences of uneven length](#7-·-Sequences-of-uneven-length) | [What you take with you](#What-you-take-with-you) |
# | [4 Let the machine choose](#4-·-Let-the-machine-choose) | [8 Memory](#8-·-Memory) | |

# %% tags=["parameters"]
DEVICE = "auto"
SEED = 0
QUICK = True

# %%
import concurrent.futures
import copy
import gc
import itertools
import multiprocessing
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import types
import warnings

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data import WeightedRandomSampler, default_collate, get_worker_info, random_split

import course_utils.toolkit.loading as kit
from course_utils import bars, check, datasets, dots, explore_collate, explore_loader, hint
from course_utils import load, predict, raises, solution, start, table

lesson = start("05_dataloader", DEVICE, SEED, QUICK)

# %% [markdown]
# ## A program that runs
#
# An epoch over 4,000 digits, which lie in memory. Someone has read that `num_workers` should be at least 4, and another that it should be the number of cores less one, and sets it. The step does nothing, so that what is measured is the loader alone.

# %%
digits = load("digits")
in_memory = TensorDataset(digits.train_images[:, None] / 255, digits.train_labels)
forked = torch.multiprocessing.get_start_method() == "fork"  # section 2 says what that is
repeats = 3 if forked else 1  # other workers take seconds to start


def epoch(loader, step=lambda batch: None):
    """Seconds that one pass over a loader takes, with step(batch) for each batch."""
    began = time.perf_counter()
    for batch in loader:
        step(batch)
    return time.perf_counter() - began


# %%
warnings.filterwarnings("ignore", "This DataLoader will create")  # section 3 does what it warns of

seconds = {}
for workers in (0, 1, 2, 4):
    loader = DataLoader(in_memory, batch_size=50, num_workers=workers)
    seconds[workers] = [epoch(loader) for _ in range(repeats)]
base = statistics.median(seconds[0])
dots(
    [(f"num_workers={n}", [s / base for s in found]) for n, found in seconds.items()],
    "time of an epoch; 0 workers = 1",
)

# %% [markdown]
# *On this machine* every advice makes it slower, by the factors above: and nothing says so. On other data the same advice more than doubles the speed. By section 3 you know what decides, and by section 4 you have a function that finds out.

# %% [markdown]
# ## 1 · Where an epoch goes
#
# For each batch a loop waits until it has it, moves it to the device, and works on it: the **step**. What makes the batch, reading, decoding, augmenting and **collating**, which is to put samples together, happens within the wait, or elsewhere at the same time. The articles say: *most of an epoch goes to reading and preprocessing*, and *`num_workers=0` leaves the accelerator idle*.
#
# The load of this lesson is real: digits in colour, enlarged and stored as JPEG, decoded and cropped at random each time they are read. `kit.timeline` runs an epoch and notes on one clock what happens when.


# %%
pictures = datasets.JpegDigits(count=256, size=128)
weights = torch.randn(3072, 1024)


def work_on(batch, rounds):
    """A step that takes time: a few products of matrices on the batch's images."""
    images = batch[0].flatten(1)[:, :3072]
    for _ in range(rounds):
        images @ weights[: images.shape[1]]


run = kit.timeline(DataLoader(pictures, 32), lambda batch: work_on(batch, rounds=4))
print(run)

# %% tags=["claim-D05", "claim-D12", "cuda"]
loads = {
    "JPEG, a small step": (pictures, 1),
    "JPEG, a large step": (pictures, 40),
    "tensors in memory, a small step": (in_memory, 1),
    "tensors in memory, a large step": (in_memory, 40),
}
stalls = {}
for name, (data, rounds) in loads.items():
    run = kit.timeline(DataLoader(data, 32), lambda b, r=rounds: work_on(b, r), batches=8)
    stalls[name] = run.stall
bars(
    [(name, round(100 * stall), "wrong") for name, stall in stalls.items()],
    "share of the epoch in which the loop has no work, in % (num_workers=0)",
)
assert stalls["JPEG, a small step"] > stalls["tensors in memory, a large step"]
if lesson.device.type == "cuda":
    product = torch.randn(32, 3072, device="cuda"), weights.to("cuda")
    run = kit.timeline(DataLoader(pictures, 32), lambda b: product[0] @ product[1], "cuda")
    print(f"with the step on the GPU the loop waits {run.stall:.0%} of the time")
else:
    print("with the step on a GPU, which is shorter, the shares are larger: run this cell there")

# %% [markdown]
# So both statements depend on two times: the **work** that makes a batch, and the step. With 0 workers the loop does both, one after the other, and the device idles for the share *work / (work + step)*, the **stall fraction**. Decoding JPEG for a small model it is nearly everything; with tensors in memory and a large model it is nothing, and there is nothing to tune.

# %% [markdown]
# ### Exercise 1 · The stall fraction (two minutes)
#
# From the waits and the steps of an epoch, compute the share that was spent waiting.


# %% tags=["exercise"]
def stall_fraction(waits, steps):
    """Share of an epoch's time that the loop spends waiting for batches, a float from 0 to 1.

    waits: list of seconds, one for each batch, from asking for it to having it. steps: list of the
    seconds that the loop then works on it. One follows the other, so that together they are the
    epoch. An epoch that takes no time, or has no batch, has the share 0.0.

    >>> stall_fraction([3.0, 1.0], [1.0, 3.0]), stall_fraction([], [])
    (0.5, 0.0)
    """
    ...


# %%
check(stall_fraction)
# hint(stall_fraction)        remove the # and run: each call gives one more hint
# solution(stall_fraction)    a reference, once you have tried

# %% [markdown]
# ## 2 · What a worker is
#
# A **worker** is another process. It gets a copy of the dataset, is told indices, makes batches of them and sends them back. How it gets the copy depends on how it is started: a **forked** one is a twin of your process and has everything it had; one that is **spawned**, or comes from a **forkserver**, starts anew, and gets the dataset *pickled*, as bytes from which it builds it again.

# %%
print("ways to start a process here:", torch.multiprocessing.get_all_start_methods())
print("the default:", torch.multiprocessing.get_start_method())
began = time.perf_counter()
next(iter(DataLoader(datasets.Counting(4), 2, num_workers=1)))
print(f"the first batch of a new worker: after {1e3 * (time.perf_counter() - began):.0f} ms")

# %% [markdown]
# Linux forks until Python 3.13 and takes the forkserver from 3.14 on; macOS and Windows spawn. The articles say: *Windows needs the main guard*, the line `if __name__ == "__main__":` around what starts workers. The reason is not Windows. A spawned process imports the main program again to find its classes, and without the guard it starts workers in turn. Here is a program for each case, run by itself:

# %%
PROGRAM = """
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return i * i

def main():
    for batch in DataLoader(Squares(), 2, num_workers=1, multiprocessing_context="{method}"):
        print(batch.tolist(), end=" ")

{call}
"""


def run_program(method, guarded):
    """What the program prints, or what Python says against it."""
    call = 'if __name__ == "__main__":\n    main()' if guarded else "main()"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "program.py"
        path.write_text(PROGRAM.format(method=method, call=call))
        ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120)
    if ran.returncode == 0:
        return ran.stdout.strip()
    said = [line.strip() for line in ran.stderr.splitlines()]
    return "RuntimeError: " + next(line for line in said if line.startswith("An attempt"))


# %% tags=["claim-D07"]
tries = [("spawn", True), ("spawn", False)]
if "fork" in torch.multiprocessing.get_all_start_methods():
    tries.append(("fork", False))
with concurrent.futures.ThreadPoolExecutor() as pool:  # each program runs for seconds
    said = dict(zip(tries, pool.map(run_program, *zip(*tries))))
for (method, guarded), words in said.items():
    print(f"{method:6}{'with' if guarded else 'without'} the guard: {words}")
assert said["spawn", True] == "[0, 1] [4, 9]" and "RuntimeError" in said["spawn", False]
assert said.get(("fork", False), "[0, 1] [4, 9]") == "[0, 1] [4, 9]"

# %% [markdown]
# A forked worker needs no guard; a spawned one does, on Linux too. And a **notebook** has no file that could be imported, guarded or not:


# %%
class Squares(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i * i


# %%
predict(
    "`Squares` is defined in this notebook. Does a loader with a spawned worker give its batches?",
    run=lambda: kit.check_portable(Squares()) == [],
    options={
        "yes: the class travels along with the object": lambda reaches: reaches,
        "no: the worker cannot import it": lambda reaches: not reaches,
    },
)

# %% tags=["claim-D07"]
(finding,) = kit.check_portable(Squares())
print(finding)
findings = kit.check_portable(datasets.Counting(4))
print("a class from a module:", findings or "reaches a worker")
assert findings == [] and "Squares is defined in the notebook" in finding

# %% [markdown]
# What the worker would say is `AttributeError: Can't get attribute 'Squares' on module '__main__'`, and the loader, that a worker exited unexpectedly. That is why the datasets of this lesson live in `course_utils.datasets`. With a class of your own, write it to a file beside the notebook and import it.
#
# The rest is a protocol. The loop hands out indices, batch 0 to worker 0, batch 1 to worker 1, round and round, and stays `prefetch_factor` batches ahead for each worker, 2 unless you say otherwise. It takes batches *in order*: a slow one holds up those behind it. When the epoch ends, or the iterator is dropped, the workers end.


# %%
iterator = iter(DataLoader(datasets.Counting(40), 4, num_workers=2))
next(iterator)
during = len(multiprocessing.active_children())
del iterator
print(f"workers while it iterates: {during}, afterwards: {len(multiprocessing.active_children())}")
assert during == 2

# %% [markdown]
# What keeps an iterator alive keeps its workers: a name that you gave it, and also an error that came out of it, for as long as someone holds the error. A notebook holds the last one.

# %% tags=["claim-D17", "nbval-check-output"]
failing = datasets.Rows([0.0] * 6 + [None] * 60)  # None cannot be collated
try:
    for _ in DataLoader(failing, 2, num_workers=2):
        pass
except TypeError as error:
    held = error
print("the error is held:  ", len(multiprocessing.active_children()), "workers")
during = len(multiprocessing.active_children())
del held
gc.collect()
print("it has been let go: ", len(multiprocessing.active_children()), "workers")
assert (during, len(multiprocessing.active_children())) == (2, 0)

# %% [markdown]
# ### Exercise 2 · A loader by hand (ten minutes)
#
# Without workers a loader is a short function. Write it.


# %% tags=["exercise"]
def batches_by_hand(dataset, batch_size, shuffle_generator=None, drop_last=False):
    """One epoch as a loader without workers gives it: batches (inputs, targets), one after another.

    dataset: has a length, and dataset[i] is (a tensor, an int); all tensors have one shape. Yields
    pairs (tensor (n, …), int64 tensor (n,)) of n = batch_size items; the last batch may have fewer,
    and is left out with drop_last. Without a generator, the items come in the order of the dataset.
    With a torch.Generator the order is a random permutation of all items, drawn from this
    generator, so that the next epoch has another one. An item is read once, and only when its batch
    is asked for.

    >>> dataset = [(torch.tensor([1.0]), 7), (torch.tensor([2.0]), 8), (torch.tensor([3.0]), 9)]
    >>> [targets.tolist() for inputs, targets in batches_by_hand(dataset, 2)]
    [[7, 8], [9]]
    """
    ...


# %%
check(batches_by_hand)

# %% [markdown]
# ## 3 · How many workers
#
# The articles give three rules: *start from 4 and raise it*; *cores minus one*; *about half the cores*. And one of them says that *more workers can be slower*. Three rules for one number are a reason to look for what decides. Move the controls: what bounds the epoch (1) when the work is twice the step and there are cores enough, (2) when there are two cores and four workers, (3) when one batch is slow?

# %%
explore_loader()

# %% [markdown]
# For an ideal loader the rule can be derived. In each turn of w workers, w batches are made in the time of one work, and w steps are made by the loop. So the epoch per batch takes the longer of *work / w* and *step*, and beyond w = work / step more workers gain nothing.

# %% [markdown]
# ### Exercise 3 · The time of an epoch (fifteen minutes)
#
# Work it out for batches that differ, with the loader's own rule of handing out.


# %% tags=["exercise"]
def epoch_seconds(works, step, workers, prefetch=2):
    """Seconds that an epoch takes, a float, by the clock of an ideal loader.

    works: list of seconds, what making batch i takes; step: seconds that the loop works on a batch.
    Without workers the loop makes each batch itself, and then works on it. With workers:
    - batch i is made by worker i % workers; each worker makes its batches one after another;
    - the loop takes the batches in their order, each as soon as it is made and the loop is free,
      and then works on it for `step` seconds;
    - at the start, each worker is told of its first `prefetch` batches. Each time the loop takes a
      batch, one more is handed out: work on batch i begins when its worker is free, and not before
      the loop has taken batch i - prefetch * workers.
    Each worker has a core of its own; nothing else takes time.

    >>> [epoch_seconds([2.0] * 4, 1.0, workers) for workers in (0, 1, 2)]
    [12.0, 9.0, 6.0]
    """
    ...


# %%
check(epoch_seconds)

# %% [markdown]
# Now measured, with three loads: decoding, which computes; a simulated store far away, where an item only *sleeps* and stands for a network; and tensors in memory. Before you look: which of them gains from four workers on this machine?

# %%
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
rules = {"start from 4": 4, "cores - 1": max(1, cores - 1), "cores / 2": max(1, cores // 2)}
print(f"cores: {cores}; the rules say:", rules)

loads = {
    "JPEG": (datasets.JpegDigits(count=384, size=256), 16, lambda batch: work_on(batch, 2)),
    "far store": (datasets.Remote(96, 0.01), 8, lambda batch: None),
    "in memory": (in_memory, 50, lambda batch: None),
}

# %% tags=["claim-D02", "claim-D03", "claim-D04", "claim-D06"]
counts, times = (0, 1, 2, 4), {}
for name, (data, size, step) in loads.items():
    for _ in range(repeats):
        for workers in counts:
            loader = DataLoader(data, size, num_workers=workers)
            times.setdefault((name, workers), []).append(epoch(loader, step))
rows, best = [], {}
for name in loads:
    middles = {workers: statistics.median(times[name, workers]) for workers in counts}
    best[name] = min(middles, key=middles.get)
    rows.append((name, *[f"{middles[0] / middles[w]:.2f}" for w in counts], best[name]))
table(("load", *[f"{w} workers" for w in counts], "fastest"), rows)
print("speed, no workers = 1; workers are started anew in each epoch")
for name, workers in rules.items():
    right = [load_name for load_name in loads if best[load_name] == workers]
    print(f"the rule “{name}” gives {workers}: the fastest here for {', '.join(right) or 'none'}")
assert min(times["in memory", 4]) > min(times["in memory", 0])  # by a factor, everywhere

# %% [markdown]
# No rule fits all three, and none could: they know the cores and not the load. What decides is
#
# - **the work against the step**: nothing to hide, nothing to gain;
# - **what the work is made of**: what waits (a disk, a network) wants many workers, also more than cores; what computes is done when all cores, the loop's included, are busy;
# - **the way back**: a batch is copied into shared memory and fetched from there; for tensors in memory that costs more than making it;
# - **the start**: each worker takes its time, in each epoch, unless it persists.

# %% [markdown]
# ## 4 · Let the machine choose
#
# `kit.tune_loader` measures: it tries candidates for a while, lets the better half go on, gives the finalists and the default turns until a budget of seconds is spent, and prefers the default unless another was faster in every round.

# %%
found = kit.tune_loader(
    loads["JPEG"][0], loads["JPEG"][2], budget_s=4, batch_size=16, shuffle=True, epochs=5
)
print(found)

# %% [markdown]
# The first line is the advice for this machine and this load, and `found.loader()` is the loader. Look at the ranges: where they overlap, the difference is none.
#
# ### The other settings
#
# The articles say that *pin_memory speeds up the copy* and that *these two parameters often give tens of percent*. **Pinned** memory is memory that the system may not move, from which a GPU can fetch by itself. It is for GPUs:

# %% tags=["claim-D10", "claim-D11", "cuda"]
big = TensorDataset(torch.zeros(64, 3, 128, 128))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    (batch,) = next(iter(DataLoader(big, 32, pin_memory=True)))
if lesson.device.type == "cuda":
    moved = {}
    for pinned in (False, True):
        run = kit.timeline(DataLoader(big, 32, pin_memory=pinned), lambda b: None, "cuda")
        moved[pinned] = statistics.median(m.transfer[1] - m.transfer[0] for m in run.moments)
    print(f"a pinned batch is copied {moved[False] / moved[True]:.1f} times as fast")
    assert batch.is_pinned()
else:
    print("pinned:", batch.is_pinned(), "·", str(caught[0].message).split(",")[0])
    assert not batch.is_pinned()

# %% [markdown]
# Without a GPU it warns and does nothing. Workers are the other of the two parameters, and section 3 has measured what they give: from a multiple of the speed down to a fraction of it.
#
# **persistent_workers** keeps them from one epoch to the next, so that the start is paid once:

# %% tags=["claim-D15"]
starts = {}
for keep in (False, True):
    loader = DataLoader(datasets.Counting(8), 4, num_workers=2, persistent_workers=keep)
    epoch(loader)
    pids = {p.pid for p in multiprocessing.active_children()}
    starts[keep] = statistics.median(epoch(loader) for _ in range(3))
    kept = {p.pid for p in multiprocessing.active_children()} & pids
    print(f"persistent_workers={keep}: workers of the first epoch that are left: {len(kept)}")
    assert bool(kept) == keep
    del loader
print(f"a short epoch takes {starts[False] / starts[True]:.0f} times as long where they are not kept")

# %% [markdown]
# **Batch fetching.** A loader asks a dataset for items one at a time, unless it has a method `__getitems__`, which gets all indices of a batch and may compute for all at once. `datasets.Pixels` has both:

# %% tags=["claim-D14", "nbval-check-output"]
calls = []


class Told(datasets.Pixels):
    def __getitem__(self, index):
        calls.append("one")
        return super().__getitem__(index)

    def __getitems__(self, indices):
        calls.append(f"{len(indices)} at once")
        return super().__getitems__(indices)


images, labels = next(iter(DataLoader(Told(digits.train_images, digits.train_labels), 50)))
print(calls, tuple(images.shape))
assert calls == ["50 at once"]

# %%
pixels = datasets.Pixels(digits.train_images, digits.train_labels)


class ItemByItem(Dataset):
    """The same items, without a `__getitems__`."""

    def __len__(self):
        return len(pixels)

    def __getitem__(self, index):
        return pixels[index]


taken = {}
for data in (pixels, ItemByItem()):
    taken[type(data).__name__] = sorted(epoch(DataLoader(data, 50)) for _ in range(5))
ratios = [taken["ItemByItem"][k] / taken["Pixels"][k] for k in (0, 2, 4)]
print("item by item, an epoch without workers takes", end=" ")
print(f"{ratios[1]:.1f} times as long as at once ({min(ratios):.1f} to {max(ratios):.1f})")

# %% [markdown]
# For data in memory this gains where workers only lose.

# %% [markdown]
# ### Exercise 4 · A batch at once (eight minutes)
#
# Write what `__getitems__` returns.


# %% tags=["exercise"]
def fetch_batch(images, labels, indices):
    """What a dataset's `__getitems__(indices)` returns: a list of items, in the order of indices.

    images: uint8 (N, H, W); labels: int64 (N,); indices: list of ints, in any order, with repeats.
    An item is a tuple (image, label): float32 (1, H, W) from 0 to 1, which is the bytes divided by
    255, and an int. The images returned are views of one tensor, the batch: torch computes once for
    all that are asked for, not once for each, and not for those that are not.

    >>> images = torch.tensor([[[0, 255]], [[51, 0]]], dtype=torch.uint8)
    >>> fetch_batch(images, torch.tensor([3, 4]), [1])
    [(tensor([[[0.2000, 0.0000]]]), 4)]
    """
    ...


# %%
check(fetch_batch)

# %% [markdown]
# ## 5 · Every worker has a copy
#
# The articles say that *`__getitem__` should be stateless*. `datasets.Counting` is not: it counts the items that it has given, and gives the count.

# %%
counting = datasets.Counting(6)


def two_epochs(workers):
    loader = DataLoader(counting, batch_size=None, num_workers=workers)
    return [[count for _, count in loader] for _ in range(2)]


# %%
predict(
    "Six items, two workers, two epochs. What are the counts of the second epoch?",
    run=lambda: two_epochs(2)[1],
    options={
        "7 to 12": lambda counts: counts == [7, 8, 9, 10, 11, 12],
        "1 to 6": lambda counts: counts == [1, 2, 3, 4, 5, 6],
        "1, 1, 2, 2, 3, 3": lambda counts: counts == [1, 1, 2, 2, 3, 3],
        "4, 4, 5, 5, 6, 6": lambda counts: counts == [4, 4, 5, 5, 6, 6],
    },
)

# %% tags=["claim-D01", "nbval-check-output"]
counting.given = 0
with_workers = two_epochs(2)
print("two workers:", *with_workers, " the object here:", counting.given)
without = two_epochs(0)
print("no workers: ", *without, " the object here:", counting.given)
assert with_workers == [[1, 1, 2, 2, 3, 3]] * 2 and without[1] == [7, 8, 9, 10, 11, 12]

# %% [markdown]
# Each worker counts for itself, in a copy that is made at the start of the epoch from the object here, which nobody has changed. A cache that a dataset fills is such a state: filled in the workers, thrown away after each epoch, empty here.
#
# ### Random numbers
#
# A copy also has a copy of every random generator. Three sources, two workers, two epochs:

# %%
predict(
    "Items are random numbers, two workers, no worker_init_fn. Which sources give worker 0 and "
    "worker 1 the same numbers?",
    run=lambda: [
        len(set(DataLoader(datasets.Draws(4, source), None, num_workers=2))) < 4
        for source in ("numpy", "torch", "own")
    ],
    options={
        "numpy's global generator alone, as every blog says": lambda r: r == [True, False, False],
        "none": lambda r: r == [False, False, False],
        "a Generator that the dataset made in __init__": lambda r: r == [False, False, True],
        "all three": lambda r: r == [True, True, True],
    },
)

# %% tags=["claim-D13"]
same = {}
for source in ("numpy", "torch", "own"):
    loader = DataLoader(datasets.Draws(4, source), None, num_workers=2)
    first, second = ([round(float(x), 3) for x in loader] for _ in range(2))
    same[source] = first[0] == first[1], first == second
    print(f"{source:6} epoch 0: {first}  epoch 1: {second}")
assert same == {"numpy": (False, False), "torch": (False, False), "own": (True, True)}

# %% [markdown]
# PyTorch seeds its own generator, Python's and numpy's *global* one in each worker, from a **base seed** that it draws anew for each epoch. (Up to version 1.8 numpy's was left out, and the advice of that time lives on.) What it cannot reach is a generator *object* that the dataset holds: it is copied, and gives the same numbers in each worker and each epoch. Augmented data then has a fraction of the variety that you think.

# %% tags=["claim-D16"]
loader = DataLoader(datasets.Draws(4), None, num_workers=2, worker_init_fn=kit.seed_generators)
torch.manual_seed(SEED)
first, second = ([round(x, 3) for x in loader] for _ in range(2))
torch.manual_seed(SEED)
again = [round(x, 3) for x in loader]
print("with kit.seed_generators:", first, second)
print("the same torch seed once more:", again)
assert len({*first, *second}) == 8 and again == first

# %% [markdown]
# ### Exercise 5 · Reseed a worker (eight minutes)
#
# Write a `worker_init_fn` for a dataset whose generator you know by name.


# %% tags=["exercise"]
def reseed(attribute):
    """A worker_init_fn: a function of worker_id that a loader calls in each new worker.

    The worker's copy of the dataset holds a numpy Generator under the name `attribute`. The
    function puts one in its place whose numbers differ from worker to worker and from epoch to
    epoch, and which are the same again in a run with the same torch seed. (Workers that are told
    nothing else get another base seed each epoch, and `get_worker_info()` tells more.)

    >>> loader = DataLoader(dataset, num_workers=2, worker_init_fn=reseed("rng"))
    """
    ...


# %%
check(reseed)

# %% [markdown]
# ## 6 · Streams
#
# An **IterableDataset** has no indices. It is walked through, and what cannot be asked for an item cannot be told which items are whose.

# %%
predict(
    "A stream of the numbers 0 to 5, two workers. What does an epoch give?",
    run=lambda: sorted(int(x) for x in DataLoader(datasets.Stream(6), None, num_workers=2)),
    options={
        "each number once": lambda got: got == [0, 1, 2, 3, 4, 5],
        "each number twice": lambda got: got == sorted([0, 1, 2, 3, 4, 5] * 2),
        "an error: a stream takes no workers": lambda got: isinstance(got, Exception),
    },
)

# %% tags=["claim-D14", "nbval-check-output"]
for split in (False, True):
    loader = DataLoader(datasets.Stream(6, split=split), None, num_workers=2)
    got = sorted(int(x) for x in loader)
    print(f"split={split}:", got)
    assert got == (list(range(6)) if split else sorted(list(range(6)) * 2))

# %% [markdown]
# Each worker walks through its own copy of the stream, all of it. No error, no warning: an epoch is as many times too long as there are workers, and a validation counts each sample that often. The cure is to split in `__iter__`, where the worker can ask `get_worker_info()` who it is. In `__init__` it is too early: there are no workers yet.

# %% [markdown]
# ### Exercise 6 · A share of a stream (five minutes)
#
# Give each worker its items.


# %% tags=["exercise"]
def shard(stream, info):
    """The items of a stream that one worker gives: an iterator, or anything to be walked through.

    stream: an iterable, perhaps endless, of anything; it can be walked through once. info: what
    get_worker_info() gives in a worker (info.id from 0 on, info.num_workers), and None where there
    are no workers. The item at place k belongs to worker k % num_workers. All items come in their
    order, and a stream without an end is no obstacle.

    >>> info = types.SimpleNamespace(id=1, num_workers=3)
    >>> list(shard("abcdefgh", info)), list(shard("abc", None))
    (['b', 'e', 'h'], ['a', 'b', 'c'])
    """
    ...


# %%
check(shard)

# %% [markdown]
# ## 7 · Sequences of uneven length
#
# `datasets.Sequences` gives the ink of a digit as a list of points, row by row: tensors (t, 2), with a t that differs. The loader's own collate function stacks samples, and cannot:

# %% tags=["claim-D08", "nbval-check-output"]
strokes = datasets.Sequences(200)
with raises(RuntimeError):
    next(iter(DataLoader(strokes, 4)))
padded, mask, labels = next(iter(DataLoader(strokes, 4, collate_fn=kit.pad_collate)))
print("padded:", tuple(padded.shape), " mask:", tuple(mask.shape), " real:", mask.sum(1).tolist())
assert mask.sum(1).tolist() == [len(strokes[i][0]) for i in range(4)]
assert torch.equal(padded, pad_sequence([strokes[i][0] for i in range(4)], batch_first=True))

# %% [markdown]
# **Padding** fills up to the longest of the batch; the **mask** says where the data is. A batch that mixes short and long sequences is mostly padding, and one that is sorted by length is not. Try it, and watch the loss with and without the mask:

# %%
explore_collate()

# %% [markdown]
# ### Exercise 7 · Pad and mark (eight minutes)
#
# Write the pair.


# %% tags=["exercise"]
def pad_batch(sequences, value=0):
    """Sequences of different length as one tensor, and where it is real: (padded, mask).

    sequences: a list of one or more tensors (t, …), t from 0 on, which differ in t alone, of one
    dtype. padded: (N, T, …) of that dtype, T the longest t; each sequence begins at place 0, and
    `value` fills what follows it. mask: bool (N, T), True where a place belongs to the sequence.
    The value may also occur within a sequence.

    >>> padded, mask = pad_batch([torch.tensor([5, 0, 7]), torch.tensor([8])])
    >>> padded.tolist(), mask.tolist()
    ([[5, 0, 7], [8, 0, 0]], [[True, True, True], [True, False, False]])
    """
    ...


# %%
check(pad_batch)

# %% [markdown]
# The articles say: *padding needs a mask*. Where? In everything that mixes places: a mean over them, a loss over them, attention over them. Here the same sequence is computed alone and in a batch beside a longer one.


# %%
torch.manual_seed(SEED)
encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
embed, score = nn.Linear(2, 16), nn.Linear(16, 10)
ordered = sorted((strokes[i][0] for i in range(20)), key=len)
short, long = ordered[0], ordered[-1]


def outputs_of(sequences, use_mask):
    """What the network makes of the first sequence: the mean over its places, as scores."""
    padded, mask = kit.pad_batch(sequences)
    with torch.no_grad():
        inside = encoder(embed(padded), src_key_padding_mask=~mask if use_mask else None)
        kept = mask[..., None] if use_mask else torch.ones_like(mask[..., None])
        return score((inside * kept).sum(1) / kept.sum(1))[0]


alone = outputs_of([short], use_mask=False)

# %%
predict(
    "The short sequence, alone and beside the long one, padded with 0, no mask. The same scores?",
    run=lambda: (outputs_of([short, long], use_mask=False) - alone).abs().max().item(),
    options={
        "yes: zeros add nothing": lambda off: off < 1e-4,
        "no": lambda off: off > 1e-2,
    },
)

# %% tags=["claim-D09"]
for use_mask in (False, True):
    off = (outputs_of([short, long], use_mask) - alone).abs().max().item()
    print(f"in a batch, mask {use_mask}: the scores differ from those alone by up to {off:.1g}")
    assert (off < 1e-4) == use_mask

targets = torch.tensor([[3, 5, 1, 0, 0, 0]])  # three real places; 0 is padding and a class
guesses = torch.zeros(1, 6, 10).scatter_(2, targets[..., None], 4.0)
guesses[0, :3] = guesses[0, :3].roll(1, dims=1)  # wrong at every real place
plain = F.cross_entropy(guesses.flatten(0, 1), targets.flatten())
real = F.cross_entropy(guesses[0, :3], targets[0, :3])
print(f"loss over all places: {plain:.2f}; over the real ones: {real:.2f}")
assert real > 1.5 * plain

# %% [markdown]
# Without the mask a sample's result depends on its neighbours in the batch. And a network that learns to say *padding* looks better than it is.

# %% [markdown]
# ### Exercise 8 · A loss that knows the mask (eight minutes)
#
# The mean over the real places, whatever stands at the others.


# %% tags=["exercise"]
def masked_loss(outputs, targets, mask):
    """Mean cross-entropy over the real places of all sequences together, a tensor of 0 dimensions.

    outputs: (N, T, C), C classes; targets: int64 (N, T); mask: bool (N, T), True at the real
    places, of which there is at least one. Each real place has the same weight, whichever sequence
    it is of. What stands at the others takes no part, even nan in outputs or -1 in targets: the
    gradient there is 0.

    >>> outputs = torch.zeros(1, 2, 4)
    >>> masked_loss(outputs, torch.tensor([[3, -1]]), torch.tensor([[True, False]]))
    tensor(1.3863)
    """
    ...


# %%
check(masked_loss)

# %% [markdown]
# ## 8 · Memory
#
# A forked worker shares the memory of its parent until one of them writes: then the system copies that page, 4 kB of it (**copy on write**). Reading is free, one should think. But every Python object holds a count of its references, and to read an object is to write that count.


# %%
def grown(rows, batch_size=100):
    """Bytes of memory of its own that a worker gains by reading all rows. Only for forked workers."""
    data = datasets.Rows(rows)
    settings = {"num_workers": 1, "collate_fn": len, "multiprocessing_context": "fork"}
    iterator = iter(DataLoader(data, batch_size, **settings))
    next(iterator)
    worker = psutil.Process(multiprocessing.active_children()[0].pid)
    first = last = worker.memory_full_info().uss
    for k, _ in enumerate(iterator):
        if k % 200 == 0:
            last = worker.memory_full_info().uss
    return last - first


forks = sys.platform == "linux"
names = [f"sample-{i:07}" for i in range(200_000)]

# %% tags=["claim-D14", "claim-D19"]
if forks:
    kinds = {"a list of strings": names, "an array of strings": np.array(names)}
    kinds["the strings' bytes in a tensor"] = kit.pack_strings(names)[0][:200_000]
    gains = {name: grown(rows) for name, rows in kinds.items()}
    bars(
        [(name, round(gain / 1e6, 1), "copy") for name, gain in gains.items()],
        "MB that a worker copies while it reads 200,000 entries",
    )
    assert gains["a list of strings"] > 5e6 > 10 * max(0, gains["an array of strings"])
else:
    print("Forked workers are not used here; a spawned one has a whole copy from its start.")
    assert torch.multiprocessing.get_start_method() != "fork"

# %% [markdown]
# With eight workers that is eight times as much, and it grows through the epoch until the machine runs out: a leak, it seems. An array or a tensor is *one* object, whatever it holds. So keep what is large, file names and labels, in arrays; a spawned worker is spared nothing, it gets a full copy at its start.

# %% [markdown]
# ### Exercise 9 · Strings without objects (eight minutes)
#
# Put a list of strings into two tensors.


# %% tags=["exercise"]
def pack_strings(strings):
    """A list of strings as two tensors, (data, offsets), which workers share without copying.

    data: uint8, the UTF-8 bytes of all strings, one after another; offsets: int64 of
    len(strings) + 1 places, so that string i is data[offsets[i] : offsets[i + 1]]. There may be no
    string, and strings may be empty.

    >>> data, offsets = pack_strings(["ab", "", "é"])
    >>> data.tolist(), offsets.tolist(), bytes(data[2:4].tolist()).decode()
    ([97, 98, 195, 169], [0, 2, 2, 4], 'é')
    """
    ...


# %%
check(pack_strings)

# %% [markdown]
# The way back is shared memory: a worker puts the tensors of a batch there and sends the loop a **file descriptor**, a number under which the system keeps something open. A batch that you keep keeps its descriptors, and a process may have so many, often 1,024:

# %% tags=["claim-D20"]
if forks:
    process, rows = psutil.Process(), datasets.Rows(torch.zeros(120, 8))
    batch = next(iter(DataLoader(rows, 2, num_workers=1)))
    print("a batch from a worker lies in shared memory:", batch.is_shared())
    opened = {}
    strategy = torch.multiprocessing.get_sharing_strategy()
    for each in ("file_descriptor", "file_system"):
        torch.multiprocessing.set_sharing_strategy(each)
        before = process.num_fds()
        kept = list(DataLoader(rows, 2, num_workers=1))
        opened[each] = process.num_fds() - before
        del kept
    torch.multiprocessing.set_sharing_strategy(strategy)
    print("descriptors open for 60 batches that were kept:", opened)
    assert batch.is_shared() and opened["file_descriptor"] >= 60 > 10 > opened["file_system"]
else:
    print("On this platform batches come through named files; no descriptor stays open.")
    assert sys.platform != "linux"

# %% [markdown]
# *Too many open files* after an hour of collecting outputs comes from here. The cure is to copy what you keep, `batch.clone()`, or the other strategy, which leaves files behind if a process is killed.

# %% [markdown]
# ## 9 · Resume in the middle
#
# A run is stopped in the middle of an epoch. To go on as if it had not been, the loader must give the rest of *this* epoch's batches. It cannot say where it was: workers have drawn ahead, and only the loop knows what it has used. `kit.ResumableSampler` keeps the two apart.

# %%
numbers = TensorDataset(torch.arange(20))


class Noting:
    """A batch sampler of ten batches that counts those it has given out."""

    given = 0

    def __iter__(self):
        for k in range(10):
            self.given += 1
            yield [2 * k, 2 * k + 1]


def given_out(taken):
    """How many batches the sampler has given out when the loop has taken so many."""
    sampler = Noting()
    iterator = iter(DataLoader(numbers, batch_sampler=sampler, num_workers=2))
    for _ in range(taken):
        next(iterator)
    return sampler.given


# %%
predict(
    "Two workers, `prefetch_factor` 2, 3 batches taken. How many has the sampler given out?",
    run=lambda: given_out(3),
    options={
        "3: those that were taken": lambda given: given == 3,
        "5: and one more for each worker": lambda given: given == 5,
        "7: and two more for each worker": lambda given: given == 7,
        "all ten": lambda given: given == 10,
    },
)

# %% tags=["nbval-check-output"]
print("taken:", [0, 1, 3], " given out:", [given_out(taken) for taken in (0, 1, 3)])
assert given_out(3) == 7

# %%
def batches_seen(state=None, stop=None):
    """Batches until `stop` of them, or the end of epoch 1, and the sampler's state by then."""
    sampler = kit.ResumableSampler(len(numbers), 4, seed=SEED)
    if state is not None:
        sampler.load_state_dict(state)
    loader, seen = DataLoader(numbers, batch_sampler=sampler, num_workers=2), []
    while sampler.epoch < 2:
        for (batch,) in loader:
            seen.append(batch.tolist())
            sampler.used()
            if len(seen) == stop:
                return seen, sampler.state_dict()
    return seen, sampler.state_dict()


# %% tags=["claim-D21", "nbval-check-output"]
whole, _ = batches_seen()
begun, state = batches_seen(stop=3)
rest, _ = batches_seen(state)
print("saved:", state)
print("3 batches, a stop, and the rest are the whole:", begun + rest == whole, len(whole))
assert begun + rest == whole and len(whole) == 10

# %% [markdown]
# The order of an epoch follows from seed and number of the epoch, and needs no state. What the samples look like is another matter: random augmentation goes on from other random numbers. Lesson 06 saves those, too.

# %% [markdown]
# ### Exercise 10 · What is left of an epoch (eight minutes)
#
# Work out the batches that are left.


# %% tags=["exercise"]
def remaining(order_seed, epoch, n, batch_size, consumed):
    """The batches of an epoch that are left after `consumed` of them: a list of lists of indices.

    The order of an epoch is torch.randperm(n), drawn from a generator that is new and has the seed
    order_seed + epoch. It is cut into batches of batch_size; the last one may be smaller. The first
    `consumed` batches have been seen; there may be none left. torch's global random state stays as
    it is.

    >>> remaining(0, 0, 5, 2, 0), remaining(0, 0, 5, 2, 2)
    ([[4, 0], [1, 3], [2]], [[2]])
    """
    ...


# %%
check(remaining)

# %% [markdown]
# ## Clinic
#
# Seven programs that are wrong, each reduced from a failure that someone reported. You see the symptom as its user saw it. Find the cause, repair the function, check it. Datasets that a notebook defines reach workers by fork alone; where there is no fork, the cells do what two spawned workers would: each gets a copy.


# %%
def with_workers(dataset, size=2, workers=2, **settings):
    """An epoch's batches by this many workers, forked where the platform forks, else simulated."""
    if forks:
        settings["multiprocessing_context"] = "fork"
        return list(DataLoader(dataset, size, num_workers=workers, **settings))
    batches = [range(k, min(k + size, len(dataset))) for k in range(0, len(dataset), size)]
    copies = [copy.deepcopy(dataset) for _ in range(workers)]
    items = [[copies[k % workers][i] for i in batch] for k, batch in enumerate(batches)]
    return [default_collate(batch) for batch in items]


# %% [markdown]
# ### Clinic 1 · Less noise than there seems to be
#
# Noise is added to each image, from a generator of the dataset's own, with a seed, so that runs can be compared. With workers, training overfits earlier than it did without. Someone looks at the images of one epoch.


# %% tags=["exercise", "clinic"]
def noisy_dataset(images, scale=0.1):
    """A dataset of images with noise: item i is images[i] plus scale times normal numbers.

    images: float32 (N, …); an item is a float32 tensor. No noise comes twice: not for two items,
    in the same worker or in two, and not for an item in two epochs: without workers, with new ones,
    with workers that stay, and if the main process has read items before they start. With new
    workers, the same torch seed before an epoch gives the same noise again.
    """

    class Noisy(Dataset):
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def __len__(self):
            return len(images)

        def __getitem__(self, i):
            noise = self.rng.standard_normal(images[i].shape, dtype=np.float32)
            return images[i] + scale * torch.from_numpy(noise)

    return Noisy()


# %%
torch.manual_seed(SEED)
noisy = noisy_dataset(torch.zeros(8, 3), scale=1.0)
for number in range(2):
    first, second, *_ = with_workers(noisy, 1)
    same = "the same" if torch.equal(first, second) else "other"
    print(f"epoch {number}: item 0 {first[0].tolist()[:2]}, item 1 has {same} noise")

# %%
check(noisy_dataset)

# %% [markdown]
# ### Clinic 2 · A stream that is split already
#
# The author of this stream has read that each worker walks through all of it, and splits it. The epoch is still too long.


# %% tags=["exercise", "clinic"]
def count_stream(n):
    """An IterableDataset of the ints 0 … n - 1. An epoch gives each of them once, in any order,
    without workers and with any number of them; so does the next epoch of the same workers.
    """

    class Count(IterableDataset):
        def __init__(self):
            info = get_worker_info()
            self.first, self.stride = (0, 1) if info is None else (info.id, info.num_workers)

        def __iter__(self):
            return iter(range(self.first, n, self.stride))

    return Count()


# %%
if forks:
    given = DataLoader(count_stream(6), None, num_workers=2, multiprocessing_context="fork")
else:
    given = itertools.chain(*[copy.deepcopy(count_stream(6)) for _ in range(2)])
print("an epoch of a stream of 6, two workers:", sorted(int(x) for x in given))

# %%
check(count_stream)

# %% [markdown]
# ### Clinic 3 · Right without workers
#
# Rows are read from a file as they are asked for. Tried without workers, every row is right. With two, the model learns worse, and someone compares rows with what they should be.


# %% tags=["exercise", "clinic"]
def read_rows(path, columns):
    """A dataset of the rows of a binary file of int64: item i is row i, an int64 tensor (columns,).

    Items are right however the workers come to their copy of the dataset. A forked worker has all
    that the main process had, and shares the position of each file that was open; a spawned worker
    gets a copy, for which the dataset must allow copy.deepcopy. Both hold also if the main process
    has read items before the workers start. The file does not change.
    """

    class Rows(Dataset):
        def __init__(self):
            self.file = open(path, "rb", buffering=0)

        def __len__(self):
            return os.path.getsize(path) // (8 * columns)

        def __getitem__(self, i):
            self.file.seek(8 * columns * i)
            time.sleep(1e-4)  # the latency of a disk, simulated
            return torch.from_numpy(np.frombuffer(self.file.read(8 * columns), np.int64).copy())

    return Rows()


# %%
folder = tempfile.mkdtemp()
path = os.path.join(folder, "rows.bin")
np.arange(1000, dtype=np.int64).repeat(4).tofile(path)
for workers in (0, 2):
    rows_read = read_rows(path, 4)
    some = torch.utils.data.Subset(rows_read, range(900))
    try:
        read = list(DataLoader(some, 50)) if workers == 0 else with_workers(some, 50)
        wrong = (torch.cat(read)[:, 0] != torch.arange(900)).sum().item()
        print(f"{workers} workers: {wrong} of 900 rows are wrong")
    except (RuntimeError, ValueError, TypeError) as error:
        print(f"{workers} workers: {type(error).__name__}: {str(error).splitlines()[-1][:80]}")

# %%
check(read_rows)

# %% [markdown]
# ### Clinic 4 · pin_memory=True
#
# The loader is told to pin its batches, and copies to the GPU are as slow as before. There is no warning. The cell below has no GPU; in the place of real pinning it counts the tensors that torch's pinning gets to see.


# %% tags=["exercise", "clinic"]
def make_batch(samples):
    """A collate function: samples is a list of (a tensor, an int), the tensors of one shape.

    The batch has the attributes inputs (n, …) and targets, int64 (n,). A loader with
    pin_memory=True hands it to torch's pinning; what comes out of that has the same two attributes,
    and both tensors are pinned.
    """
    inputs, targets = zip(*samples)
    return types.SimpleNamespace(inputs=torch.stack(inputs), targets=torch.tensor(targets))


# %%
from unittest import mock

from torch.utils.data._utils.pin_memory import pin_memory

batch = make_batch([(torch.zeros(3), 0), (torch.ones(3), 1)])
pinned = []
with mock.patch.object(torch.Tensor, "pin_memory", lambda t, *device: pinned.append(t) or t):
    pin_memory(batch)
print("tensors in the batch: 2, pinned:", len(pinned))

# %%
check(make_batch)

# %% [markdown]
# ### Clinic 5 · The rare class is learned by heart
#
# One image in ten is of the rare class, and a sampler is to make up for it. Training accuracy is soon at 100 %, on any data. On the test set it is chance.


# %% tags=["exercise", "clinic"]
def balanced_sampler(labels):
    """A sampler for a dataset with these labels, int64 (N,): one pass gives N indices.

    They are drawn with replacement, anew in each pass. Each class that occurs in labels is drawn
    equally often on average, and within a class each of its samples. Numbers of classes may be
    missing between others.
    """
    counts = torch.bincount(labels)
    return WeightedRandomSampler(1.0 / counts, num_samples=len(labels))


# %%
torch.manual_seed(SEED)
rare = torch.tensor([0] * 90 + [1] * 10)
drawn = list(balanced_sampler(rare))
print(f"{len(drawn)} draws, {len(set(drawn))} different samples: {sorted(set(drawn))[:12]}")

# %%
check(balanced_sampler)

# %% [markdown]
# ### Clinic 6 · Augmentation that makes no difference
#
# The training set is augmented, the validation set must not be. The validation images are found to be plain, as they should, and the author is content. The augmentation brings nothing.


# %% tags=["exercise", "clinic"]
def split_with_transforms(images, held_out, augment, plain, generator):
    """Two datasets, (training, validation): an item is augment(image) or plain(image).

    images: (N, …). held_out of them, drawn at random from the generator, are the validation set,
    the others the training set. Each image is in one of them, once, as it is in images. The
    transform is called at each access, so that random ones give something new each time.
    """

    class Images(Dataset):
        def __init__(self, transform):
            self.transform = transform

        def __len__(self):
            return len(images)

        def __getitem__(self, i):
            return self.transform(images[i])

    sizes = [len(images) - held_out, held_out]
    training, validation = random_split(Images(augment), sizes, generator=generator)
    validation.dataset.transform = plain
    return training, validation


# %%
generator = torch.Generator().manual_seed(SEED)
training, validation = split_with_transforms(
    torch.zeros(10, 2), 3, augment=lambda x: x + 100, plain=lambda x: x, generator=generator
)
for name, part in (("training", training), ("validation", validation)):
    augmented = sum(bool((x >= 100).all()) for x in part)
    print(f"augmented in {name}: {augmented} of {len(part)}")

# %%
check(split_with_transforms)

# %% [markdown]
# ### Clinic 7 · To look at a model changes it
#
# The same seed, the same data, the same loop. With a validation after each epoch the weights come out otherwise than without. Validation changes no weight: it runs in eval mode, and without gradients.


# %% tags=["exercise", "clinic"]
def validate_each_epoch(model, train_loader, val_loader, loss_fn, optimizer, epochs):
    """Train for some epochs, with a validation after each; the validation losses, a list of floats.

    A validation loss is the mean over all samples of the validation set, in eval mode. loss_fn
    gives the mean of a batch; batches are (inputs, targets). Validation is only a look: the weights
    after the call are, to the bit, those of the same training without it, whatever random numbers
    going through val_loader draws. Training is in train mode, and draws from torch's global state.
    """
    losses = []
    for _ in range(epochs):
        model.train()
        for inputs, targets in train_loader:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        total, samples = 0.0, 0
        with torch.no_grad():
            for inputs, targets in val_loader:
                total += loss_fn(model(inputs), targets).item() * len(targets)
                samples += len(targets)
        losses.append(total / samples)
    return losses


# %%
def weights_after(look):
    """The weights of a small network after three epochs, with or without looking at it."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.Dropout(0.5), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_loader = DataLoader(torch.utils.data.Subset(in_memory, range(200)), 50, shuffle=True)
    seen = torch.utils.data.Subset(in_memory, range(200, 300))
    val_loader = DataLoader(seen if look else [], 50)
    if look:
        validate_each_epoch(model, train_loader, val_loader, F.cross_entropy, optimizer, 3)
    else:
        for _ in range(3):
            for inputs, targets in train_loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters())


same = torch.equal(weights_after(look=True), weights_after(look=False))
print("the same weights with and without validation:", same)

# %%
check(validate_each_epoch)

# %% [markdown]
# ### When you have tried
#
# Read on when you have. Where these failures were reported: (1) pytorch/pytorch#5059, of which generator objects are what is left; (2) pytorch/pytorch#30599, huggingface/datasets#3423; (3) pytorch/pytorch#11887, #11929; (4) ultralytics/yolov3#1713, open-mmlab/mmdetection#11417; (5) deep-voice/soundbay#49; (6) victoresque/pytorch-template#62, torchgeo/torchgeo#257;
# (7) pytorch/pytorch#122697.
#
# Number 7 is worth a look by itself, since it needs no workers. An iterator of a loader draws a base seed for workers from the global generator, whether it shuffles or not, and whether it has workers or not:

# %% tags=["claim-D22", "nbval-check-output"]
for own in (None, torch.Generator()):
    loader = DataLoader(TensorDataset(torch.arange(3)), generator=own)
    torch.manual_seed(SEED)
    before = torch.get_rng_state()
    list(loader)
    moved = not torch.equal(before, torch.get_rng_state())
    print(f"a generator of its own: {own is not None}, the global state moved: {moved}")
    assert moved == (own is None)

# %% [markdown]
# ## What you take with you
#
# **Your toolkit**, in `course_utils.toolkit.loading`: `timeline` and `stall_fraction`; `tune_loader`; `check_portable` and `seed_generators` for workers; `shard` for streams; `pad_batch`, `pad_collate` and `masked_mean` for sequences; `pack_strings`; and `ResumableSampler`. For a project of your own, put your dataset and your step in the place of these:

# %%
print(kit.timeline(DataLoader(pictures, 32), lambda batch: work_on(batch, rounds=4), batches=6))

# %% [markdown]
# | symptom | cause | test | cure |
# | --- | --- | --- | --- |
# | the device idles, epochs are slow | the loop waits for batches | `kit.timeline`: stall | `kit.tune_loader`; lighter work on each item |
# | slower with workers than without | batches are cheap to make, and dear to send | the same with 0 workers | 0 workers, `__getitems__` |
# | each epoch begins with a pause | workers are started anew | time to the first batch | `persistent_workers=True` |
# | workers are left after an error | the traceback holds the iterator | `multiprocessing.active_children()` | let go of the error; `kit.timeline` stops its workers in any case |
# | a pause every few batches | one slow batch holds up the others | the spans of `work` in a timeline | a longer `prefetch_factor`; `in_order=False` |
# | *Can't get attribute … on module '__main__'* | a class of the notebook in a worker that was not forked | `kit.check_portable` | a file of its own |
# | *An attempt has been made to start a new process before …* | no main guard | run it with `spawn` | `if __name__ == "__main__":` |
# | what a dataset counts or caches is gone | workers have copies | `num_workers=0` | no state; persistent workers for a cache |
# | augmentation repeats in each worker and epoch | a generator object is copied | compare two items, two epochs | `kit.seed_generators`, or the global generators |
# | epochs are as many times too long as there are workers | a stream that is not split | count items | `kit.shard` in `__iter__` |
# | *stack expects each tensor to be equal size* | sequences of uneven length | shapes of some items | `kit.pad_collate` |
# | a sample's result depends on the batch it is in | padding takes part | the sample alone, and beside a longer one | a mask, in every mean and in attention |
# | memory grows through the epoch, times the workers | reference counts of Python objects | unique memory (USS) of a worker | arrays, tensors, `kit.pack_strings` |
# | *Too many open files* | kept batches keep their descriptors | `num_fds()` of the process | `clone()` what you keep |
# | wrong rows with workers only | a file opened before the fork | compare rows with 0 workers | open it in the worker |
# | `pin_memory` without effect | a batch class that pinning does not know | `is_pinned()` of its tensors | a method `pin_memory` |
# | the training changes when validation is added | every iterator draws from the global generator | the weights, bit by bit | a generator for each loader |
# | after a resume, samples come twice or never | the sampler ran ahead of the loop | the indices used | `kit.ResumableSampler` |
#
# **What the articles say, and what you have seen**
#
# | claim | verdict |
# | --- | --- |
# | `__getitem__` should be stateless (D01) | holds: each worker's copy counts for itself, and anew in each epoch |
# | `num_workers`: start from 4 and raise it (D02); cores minus one (D03); half the cores (D04) | measured: no rule fits three loads; work, step, what the work is made of, and the way back decide |
# | `num_workers=0` leaves the accelerator idle (D05) | for the share work / (work + step), which is nothing where the step is long |
# | more workers can be slower (D06) | holds: for data in memory, from the first one on |
# | Windows needs the main guard (D07) | any platform does, where workers are spawned; and a class of the notebook cannot be reached at all |
# | uneven lengths need a collate function that pads (D08); padding needs a mask (D09) | hold |
# | `pin_memory` speeds up the copy (D10) | for a GPU; without one it warns and does nothing |
# | these two parameters often give tens of percent (D11) | measured: from several times the speed to a fraction of it |
# | most of an epoch goes to reading and preprocessing (D12) | measured: it is a matter of the load |
# | *beyond the articles:* worker seeds (D13): the global generators are seeded, objects repeat; copies on write, descriptors, `__getitems__`, streams that repeat (D14) | seen |
# | persistent workers are the same processes (D15); `seed_generators` gives each worker and epoch its own numbers (D16); an error that is held keeps workers (D17); a list of strings is copied by reading, an array is not (D19); kept batches keep descriptors (D20); an order resumes in the middle (D21); a loader draws from the global generator in any case (D22) | seen |
#
# For more: [torch.utils.data](https://pytorch.org/docs/stable/data.html) is the reference, with the rules for workers and for streams; [Multiprocessing best practices](https://pytorch.org/docs/stable/notes/multiprocessing.html) says what shared tensors and sharing strategies are; [pin_memory and non_blocking](https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html)
# is the measurement behind what can be said of pinning on a GPU.
#
# Next: lesson 06, checkpoints.
