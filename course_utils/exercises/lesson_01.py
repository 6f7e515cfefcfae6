"""Exercises of lesson 01, in the order of the notebook: ten to build, then the clinic's six to repair.

What is worth keeping lives in the toolkit; the references below are the repairs that belong to one story alone.
"""

import math

import numpy as np
import torch

from course_utils.engine.exercises import Case, Exercise, Mistake
from course_utils.toolkit.tensors import (
    allocated_bytes,
    batch_diagonal,
    broadcast_shape,
    contiguous_strides,
    element_offset,
    hwc_to_chw,
    merge_heads,
    padding_mask,
    shares_memory,
    shares_storage,
    sliding_windows,
    storage_bytes,
    view_strides,
    writable,
)

LESSON = "01_tensors"


def count(*shape, dtype=torch.float32):
    """0, 1, 2, … in this shape: each element shows where it was born."""
    return (
        torch.arange(math.prod(shape), dtype=dtype).view(shape).clone()
    )  # a tensor with a storage of its own, and no view


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# ── Where elements lie ────────────────────────────────────────────────────────────────────────────────────────────────

ELEMENT_OFFSET = Exercise(
    lesson=LESSON,
    solution=element_offset,
    hints=(
        "A stride says how many places in the storage one step along its dimension moves. How far do two steps down "
        "and one to the right move?",
        "Multiply each index by the stride beside it (`zip(index, strides)` makes the pairs), add the products, and "
        "begin at the offset.",
    ),
    cases=(
        Case("one dimension has stride 1", lambda: ((3,), (1,))),
        Case("two steps down and one to the right are 2 * 6 + 1", lambda: ((2, 1), (6, 1))),
        Case("a transposed tensor has its small stride first", lambda: ((2, 1, 3), (1, 12, 2))),
        Case("a slice begins at an offset", lambda: ((1, 2), (6, 2), 7)),
        Case("a stride of 0 stays where it is", lambda: ((2, 5), (1, 0))),
        Case("a scalar lies at its offset", lambda: ((), (), 4)),
    ),
    mistakes=(
        Mistake(
            "The offset is missing: a slice does not begin where its storage begins.",
            lambda index, strides, offset=0: element_offset(index, strides),
        ),
        Mistake(
            "The strides are paired with the index from the wrong end: the first stride belongs to the first index.",
            lambda index, strides, offset=0: element_offset(index[::-1], strides, offset),
        ),
    ),
)


def _strides_from_the_left(shape):
    return tuple(math.prod(shape[:i]) for i in range(len(shape)))


CONTIGUOUS_STRIDES = Exercise(
    lesson=LESSON,
    solution=contiguous_strides,
    hints=(
        "Print `torch.empty(2, 3, 4).stride()`. Which sizes does each stride multiply: those to its left or those "
        "to its right?",
        "Walk through the sizes from the last to the first, with a step that begins at 1: note the step, then "
        "multiply it by the size.",
        "A size of 0 would make all strides to its left 0. PyTorch multiplies by `max(size, 1)`. Reverse the list "
        "at the end, and return a tuple.",
    ),
    cases=(
        Case("one dimension has stride 1", lambda: ((5,),)),
        Case("a step down in a (4, 6) grid passes a row of 6", lambda: ((4, 6),)),
        Case("three sizes all differ", lambda: ((2, 3, 4),)),
        Case("a size of 1 is stepped over like any other", lambda: ((2, 1, 3),)),
        Case("a scalar has no strides", lambda: ((),)),
        Case("a size of 0 counts as 1", lambda: ((3, 0, 4),)),
        Case("a shape comes as torch.Size", lambda: (torch.Size([2, 5]),)),
    ),
    mistakes=(
        Mistake(
            "These strides run from left to right, as in Fortran. In PyTorch the *last* dimension is the one whose "
            "neighbours lie side by side.",
            _strides_from_the_left,
        ),
        Mistake(
            "The order is reversed: the last stride of a contiguous tensor is 1, the first is the largest.",
            lambda shape: contiguous_strides(shape)[::-1],
        ),
        Mistake(
            "These are bytes, as numpy counts. PyTorch's strides count elements.",
            lambda shape: np.empty(shape, dtype=np.float32).strides,
        ),
        Mistake(
            "Every size to the right is a factor, and a 0 wipes out all strides before it. PyTorch counts a size of "
            "0 as 1 here: `torch.empty(3, 0, 4).stride()`.",
            lambda shape: tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))),
        ),
        Mistake(
            "Each stride is the product of *all* sizes to its right, not the next size alone.",
            lambda shape: (*shape[1:], 1) if len(shape) else (),
        ),
    ),
)

# ── What is shared ────────────────────────────────────────────────────────────────────────────────────────────────────


SHARES_STORAGE = Exercise(
    lesson=LESSON,
    solution=shares_storage,
    hints=(
        "`x.data_ptr()` is the address of the first element that x shows. What is it for `x[3:]`, and does that "
        "answer the question?",
        "The storage is an object of its own, `x.untyped_storage()`. It begins at one place, wherever x begins in "
        "it: two tensors share one storage where their storages begin at the same place.",
        "Compare `untyped_storage().data_ptr()` of both. Then look at two empty tensors: an address of 0 means that "
        "there is no memory, so nothing is shared.",
    ),
    cases=(
        Case("a slice of everything is another tensor on the same storage", lambda: (lambda x: (x, x[:]))(count(3))),
        Case("other values lie in a storage of the same size", lambda: (count(3), count(3) + 5)),
        Case("equal values in two places are two storages", lambda: (count(3), count(3))),
        Case("a slice begins at another address of the same storage", lambda: (lambda x: (x, x[3:]))(count(6))),
        Case("neither of two slices was made from the other", lambda: (lambda x: (x[:4], x[:2]))(count(6))),
        Case("two halves of one storage have no element in common", lambda: (lambda x: (x[:2], x[2:]))(count(6))),
        Case("even and odd places of one storage alternate", lambda: (lambda x: (x[::2], x[1::2]))(count(6))),
        Case("the same bytes are shown as another dtype", lambda: (lambda x: (x, x.view(torch.int32)))(count(4))),
        Case("a clone has its own storage", lambda: (lambda x: (x, x.clone()))(count(3))),
        Case("empty storages share nothing", lambda: (torch.empty(0), torch.empty(0, 2))),
    ),
    mistakes=(
        Mistake(
            "Two empty storages are both at address 0, and an address of 0 means that there is no memory: nothing is "
            "shared.",
            lambda a, b: a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr(),
        ),
        Mistake(
            "`x.data_ptr()` is where the *first element* of x lies, and two slices begin at different places of one "
            "storage. Ask the storage, not the tensor, where it begins.",
            lambda a, b: a.data_ptr() == b.data_ptr(),
        ),
        Mistake(
            "`_base` names the tensor that a view was made from. Two views of one tensor share its memory without "
            "one being the base of the other.",
            lambda a, b: a is b or a._base is b or b._base is a,
        ),
        Mistake(
            "`_base` leads to the tensor at the root as long as PyTorch has noted every step, and a view of another "
            "dtype has no base. Ask the storage where it begins.",
            lambda a, b: (a if a._base is None else a._base) is (b if b._base is None else b._base),
        ),
        Mistake(
            "Comparing values says nothing about memory: a clone is equal, and a transposed view is not.",
            lambda a, b: a.shape == b.shape and torch.equal(a, b),
        ),
        Mistake(
            "Each view is a Python object of its own, and `x.storage()` makes a new object at each call: comparing "
            "objects, with `is` or `==`, finds no sharing at all. Ask the storage where in memory it begins.",
            lambda a, b: a is b,
        ),
        Mistake(
            "The question is about one storage, not about touching the same bytes: two slices can lie side by side in "
            "one storage and have no byte in common.",
            shares_memory,
        ),
        Mistake(
            "Two storages of the same size are still two. Ask where they begin, not how large they are.",
            lambda a, b: a.untyped_storage().nbytes() == b.untyped_storage().nbytes(),
        ),
    ),
)


def _by_size(*tensors):
    return sum({t.untyped_storage().nbytes() for t in tensors})


def _unlike_the_one_before(*tensors):
    storages = [t.untyped_storage() for t in tensors]
    new = [not i or s.data_ptr() != storages[i - 1].data_ptr() for i, s in enumerate(storages)]
    return sum(s.nbytes() for s, counts in zip(storages, new) if counts)


def _unless_bytes_are_shared(*tensors):
    kept = []
    for tensor in tensors:
        if not any(shares_memory(tensor, other) for other in kept):
            kept.append(tensor)
    return sum(t.untyped_storage().nbytes() for t in kept)


def _slice_and_rest():
    x = count(100)
    return x[:10], x[10:20], x[50:].view(5, 10)


STORAGE_BYTES = Exercise(
    lesson=LESSON,
    solution=storage_bytes,
    hints=(
        "`big[:1]` shows one number. How much memory must stay alive for it? See `big[:1].untyped_storage().nbytes()`.",
        "To count each storage once you need to recognise it: by the address of the storage, "
        "`untyped_storage().data_ptr()`, not of the tensor.",
        "Make a dictionary from the address to the bytes: a storage that comes twice lands on the same key. Then "
        "add up its values.",
    ),
    cases=(
        Case("one tensor owns all of its storage", lambda: (count(10),)),
        Case("two tensors of different dtype own theirs", lambda: (count(10), torch.zeros(4, dtype=torch.float64))),
        Case(
            "a tensor, its transpose and its first rows need one storage",
            lambda: (lambda x: (x, x.t(), x[:2]))(count(5, 4)),
        ),
        Case("two storages have the same size", lambda: (count(5), count(5) + 9)),
        Case(
            "two storages alternate",
            lambda: (lambda a, b: (a, b, a[:1], b[:1]))(count(5), torch.zeros(3, dtype=torch.float64)),
        ),
        Case("one row keeps all of the storage alive", lambda: (count(100, 10)[:1],)),
        Case("two slices of one storage overlap", lambda: (lambda x: (x[:6], x[2:]))(count(10))),
        Case("three slices begin at different places of one storage", _slice_and_rest),
        Case("an expanded tensor shows more than it owns", lambda: (count(3, 1).expand(3, 1000),)),
        Case("no tensors need no memory", lambda: ()),
    ),
    mistakes=(
        Mistake(
            "This adds up what each tensor *shows*: shared memory is counted once for each tensor, a slice hides "
            "the rest of its storage, and an expanded tensor shows numbers that nobody stores. Ask "
            "`untyped_storage().nbytes()`.",
            lambda *tensors: sum(t.numel() * t.itemsize for t in tensors),
        ),
        Mistake(
            "The storages are told apart by `tensor.data_ptr()`, the address of the first element shown: slices of "
            "one storage begin at different places. The storage's own address is "
            "`tensor.untyped_storage().data_ptr()`.",
            lambda *tensors: sum({t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()),
        ),
        Mistake(
            "A storage that several tensors share is counted once for each of them. Keep the storages in a "
            "dictionary by their address.",
            lambda *tensors: sum(t.untyped_storage().nbytes() for t in tensors),
        ),
        Mistake(
            "The storages are told apart by their size, so two of the same size are counted as one. Tell them apart "
            "by where they begin.",
            _by_size,
        ),
        Mistake(
            "Each storage is compared with that of the tensor before it, and one that comes again later is counted "
            "again. Compare with all that have been seen.",
            _unlike_the_one_before,
        ),
        Mistake(
            "Tensors are taken as one memory where they touch the same bytes. Slices can lie side by side in one "
            "storage: ask each storage where it begins.",
            _unless_bytes_are_shared,
        ),
        Mistake(
            "Each storage is counted once, but with the bytes that a tensor shows of it. A slice keeps the whole "
            "storage alive: ask the storage for nbytes().",
            lambda *tensors: sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values()),
        ),
    ),
)

# ── Views in place of copies ──────────────────────────────────────────────────────────────────────────────────────────

HWC_TO_CHW = Exercise(
    lesson=LESSON,
    solution=hwc_to_chw,
    hints=(
        "`reshape` keeps the order in which the numbers lie and cuts it into new rows. Which operation instead "
        "renames the axes and leaves each number with its pixel?",
        "`permute` and `movedim` reorder dimensions. Count from the right (-1 is the channels), so that a batch in "
        "front changes nothing.",
        "The channels move from position -1 to position -3, and height and width keep their order: "
        "`image.movedim(-1, -3)`.",
    ),
    cases=(
        Case("an image has two rows and four columns", lambda: (count(2, 4, 3),), memory="view"),
        Case(
            "the image is square, so that a wrong picture has the right shape", lambda: (count(3, 3, 3),), memory="view"
        ),
        Case("there are four channels", lambda: (count(2, 5, 4, dtype=torch.uint8),), memory="view"),
        Case("a batch comes in", lambda: (count(2, 3, 4, 3),), memory="view"),
        Case("two dimensions stand in front, as in a batch of videos", lambda: (count(2, 2, 2, 4, 3),), memory="view"),
        Case("the image is a crop of a larger one", lambda: (count(6, 6, 3)[1:4, 2:5],), memory="view"),
        Case("there is a single grey channel", lambda: (count(4, 2, 1),), memory="view"),
    ),
    mistakes=(
        Mistake(
            "The shape is right and the picture is scrambled: `reshape` and `view` keep the numbers in their order "
            "and fill the new shape with them, so red, green and blue of neighbouring pixels end up in one plane. "
            "Axes are reordered by `permute` or `movedim`.",
            lambda image: image.reshape(*image.shape[:-3], image.shape[-1], *image.shape[-3:-1]),
        ),
        Mistake(
            "Height and width are exchanged as well: the picture is mirrored along its diagonal. `transpose` swaps two "
            "axes, and here all three change place.",
            lambda image: image.transpose(-1, -3),
        ),
        Mistake(
            "Channels and width have changed places: (height, channels, width). The channels must come first.",
            lambda image: image.transpose(-1, -2),
        ),
        Mistake(
            "This is the opposite move: the first dimension has gone to the end, (width, channels, height). The last "
            "one, the channels, must come first.",
            lambda image: image.movedim(-3, -1),
        ),
    ),
)


def _zero_in_stride(x):
    return x.clone() if 0 in x.stride() else x


def _zero_or_equal_strides(x):
    strides = [stride for size, stride in zip(x.shape, x.stride()) if size > 1]
    return x.contiguous() if 0 in strides or len(set(strides)) < len(strides) else x


def _small_storage(x):
    return x.contiguous() if x.untyped_storage().nbytes() < x.nbytes else x


def _equal_values(x):
    return x if x.unique().numel() == x.numel() else x.clone(memory_format=torch.contiguous_format)


WRITABLE = Exercise(
    lesson=LESSON,
    solution=writable,
    hints=(
        "When do two elements share one place? Write down the storage positions of `torch.zeros(6).unfold(0, 3, "
        "1)`, one for each element.",
        "Imagine a storage that holds 0, 1, 2, …: seen with the shape and strides of x, each element would show its "
        "own position.",
        "That storage is `torch.arange(last + 1)`, where `last` is the position of the last element, the sum of "
        "(size - 1) * stride. Use `.as_strided(x.shape, x.stride())` on it.",
        "Where the positions hold as many *different* numbers (`unique()`) as x has elements, return x itself, else "
        "`x.contiguous()`. A tensor without elements is returned as it is.",
    ),
    cases=(
        Case("a contiguous tensor owns its elements", lambda: (count(2, 3),), memory="view"),
        Case("a transposed tensor owns its elements", lambda: (count(2, 3).t(),), memory="view"),
        Case("equal values lie in places of their own", lambda: (torch.zeros(2, 3).t(),), memory="view"),
        Case("a column is seen four times", lambda: (count(3, 1).expand(3, 4),), memory="copy", strides=True),
        Case(
            "windows overlap without any stride being 0",
            lambda: (count(6).unfold(0, 3, 1),),
            memory="copy",
            strides=True,
        ),
        Case(
            "windows overlap and all strides differ",
            lambda: (torch.zeros(7).unfold(0, 3, 2),),
            memory="copy",
            strides=True,
        ),
        Case(
            "a column is seen four times, in a storage with room for all",
            lambda: (count(100)[:3].view(3, 1).expand(3, 4),),
            memory="copy",
            strides=True,
        ),
        Case("windows stand side by side", lambda: (count(6).unfold(0, 3, 3),), memory="view"),
        Case(
            "a stride of 0 along a size of 1 repeats nothing",
            lambda: (count(3).as_strided((1, 3), (0, 1)),),
            memory="view",
        ),
        Case("every second element is shown", lambda: (count(10)[1::2],), memory="view"),
        Case("a tensor is empty", lambda: (torch.zeros(0, 3),)),
    ),
    mistakes=(
        Mistake(
            "`is_contiguous()` asks whether the elements lie in order without gaps. A transposed tensor or a slice "
            "is not contiguous, and still no two of its elements share a place.",
            lambda x: x.contiguous(),
        ),
        Mistake(
            "Each element of x has its own memory already: return x itself. A copy costs time and bytes for nothing, "
            "and what is written into it does not reach the caller's tensor.",
            lambda x: x.clone(memory_format=torch.contiguous_format),
        ),
        Mistake(
            "A stride of 0 is one way to repeat, not the only one: windows made by `unfold` share elements with "
            "strides of 1. And along a size of 1, a stride of 0 repeats nothing.",
            _zero_in_stride,
        ),
        Mistake(
            "Windows of 3 that begin 2 apart overlap with strides (2, 1): neither is 0, and they differ. Strides alone "
            "do not tell; how far each dimension reaches counts as well.",
            _zero_or_equal_strides,
        ),
        Mistake(
            "The storage is large enough for all elements, and they still share places: the rest of it is not shown. "
            "Compare the places that x shows, not the sizes.",
            _small_storage,
        ),
        Mistake(
            "Here values are compared. Equal values can lie in different places: look at the places.",
            _equal_values,
        ),
        Mistake(
            "Returned unchanged, it has several elements in one place: writing one of them changes the others.",
            lambda x: x,
        ),
    ),
)


def _inner_stride_one(x, size, step=1):
    windows = (x.shape[-1] - size) // step + 1
    return x.as_strided((*x.shape[:-1], windows, size), (*x.stride()[:-1], step, 1), x.storage_offset())


def _from_storage_start(x, size, step=1):
    right = sliding_windows(x, size, step)
    return right.as_strided(right.shape, right.stride(), 0)


def _one_window_less(x, size, step=1):
    return sliding_windows(x, size, step)[..., :-1, :]


def _stepped_inside(x, size, step=1):
    windows = (x.shape[-1] - size) // step + 1
    inner = x.stride(-1)
    return x.as_strided((*x.shape[:-1], windows, size), (*x.stride()[:-1], inner, inner), x.storage_offset())


SLIDING_WINDOWS = Exercise(
    lesson=LESSON,
    solution=sliding_windows,
    hints=(
        "Write the windows of size 3 over the numbers 0 to 5, one below the other. How far in the storage is it from one "
        "number to its right neighbour, and how far to the number below?",
        "Both steps are multiples of one stride, that of x's last dimension, `x.stride(-1)`, which need not be 1. "
        "Below is `step` times as far.",
        "The last window begins at n - size, so there are (n - size) // step + 1 of them. The other dimensions keep "
        "their sizes and strides.",
        "`x.as_strided((*x.shape[:-1], windows, size), (*x.stride()[:-1], step * x.stride(-1), x.stride(-1)), "
        "x.storage_offset())`",
    ),
    cases=(
        Case("windows of three move on by one", lambda: (count(6), 3), memory="view"),
        Case("windows move on by two", lambda: (count(7), 3, 2), memory="view"),
        Case("the last step no longer fits", lambda: (count(8), 3, 2), memory="view"),
        Case("one window fits exactly", lambda: (count(4), 4), memory="view"),
        Case("the signal is a slice and begins at an offset", lambda: (count(10)[4:], 2), memory="view"),
        Case("the signal takes every second number", lambda: (count(12)[::2], 3), memory="view"),
        Case("there is a batch of signals", lambda: (count(2, 5), 2), memory="view"),
        Case("the batch is transposed", lambda: (count(6, 2).t(), 3, 2), memory="view"),
        Case("two dimensions stand in front", lambda: (count(2, 3, 5), 2), memory="view"),
    ),
    mistakes=(
        Mistake(
            "This assumes that neighbours lie side by side. In a slice with a step or a transposed tensor they do "
            "not: use `x.stride(-1)`.",
            _inner_stride_one,
        ),
        Mistake(
            "The windows begin at the start of the *storage*, not of x. A slice begins later: pass "
            "`x.storage_offset()`, or leave the argument out.",
            _from_storage_start,
        ),
        Mistake(
            "One window is missing at the end. The last one begins at n - size, so there are (n - size) // step + 1.",
            _one_window_less,
        ),
        Mistake(
            "Each window must begin `step` elements after the one before: the windows' stride is step * x.stride(-1).",
            _stepped_inside,
        ),
    ),
)

BATCH_DIAGONAL = Exercise(
    lesson=LESSON,
    solution=batch_diagonal,
    hints=(
        "From one element of a diagonal to the next it is one row down and one column to the right. How far is that "
        "in the storage?",
        "A view with shape (batch, n), the batch's own stride, and for the diagonal the sum of the row's and the "
        "column's stride.",
        "`x.as_strided((batch, n), (matrix, row + column), x.storage_offset())`, where `matrix, row, column = "
        "x.stride()`. PyTorch has a function for it, too.",
    ),
    cases=(
        Case("there is one matrix", lambda: (count(1, 3, 3),), memory="view"),
        Case("there are two matrices", lambda: (count(2, 3, 3),), memory="view"),
        Case("the matrices are every second one, from an offset", lambda: (count(6, 2, 2)[1::2],), memory="view"),
        Case("the batch was the last dimension", lambda: (count(3, 3, 2).permute(2, 0, 1),), memory="view"),
        Case("the matrices are corners of larger ones", lambda: (count(2, 4, 4)[:, 1:, 1:],), memory="view"),
        Case("a matrix has one element", lambda: (count(3, 1, 1),), memory="view"),
        Case("the batch is empty", lambda: (torch.zeros(0, 2, 2),)),
    ),
    mistakes=(
        Mistake(
            "This computes steps from the sizes, n + 1 for a diagonal, which is right only for a contiguous "
            "tensor. The strides say how far a row and a column really are.",
            lambda x: x.as_strided((len(x), x.shape[1]), (x.shape[1] ** 2, x.shape[1] + 1), x.storage_offset()),
        ),
        Mistake(
            "The view begins at the start of the storage. A slice begins at `x.storage_offset()`.",
            lambda x: x.as_strided((len(x), x.shape[1]), (x.stride(0), x.stride(1) + x.stride(2)), 0),
        ),
        Mistake(
            "`torch.diagonal` takes the first two dimensions unless told otherwise; the batch is the first here. "
            "Give it dim1=-2, dim2=-1.",
            lambda x: torch.diagonal(x),
        ),
    ),
)


def _sizes(a, b, left=False):
    """Pairs of sizes, the shorter shape filled up with ones."""
    longest = max(len(a), len(b))
    a, b = ((*s, *(1,) * (longest - len(s))) if left else (*(1,) * (longest - len(s)), *s) for s in (a, b))
    return list(zip(a, b))


def _from_the_left(a, b):
    if any(m != n and 1 not in (m, n) for m, n in _sizes(a, b, left=True)):
        raise ValueError
    return tuple(n if m == 1 else m for m, n in _sizes(a, b, left=True))


def _larger(a, b):
    if any(m != n and 1 not in (m, n) for m, n in _sizes(a, b)):
        raise ValueError
    return tuple(max(m, n) for m, n in _sizes(a, b))


BROADCAST_SHAPE = Exercise(
    lesson=LESSON,
    solution=broadcast_shape,
    hints=(
        "Write the shapes (5, 1) and (4,) one above the other, aligned at the right. What stands above the gap, and "
        "what does the 1 become?",
        "Fill the shorter shape with ones at the left until both have the same length: `(1,) * missing + tuple(shape)`. "
        "Then go through the pairs.",
        "For a pair (m, n): equal sizes stay, a 1 takes the other size (even where that is 0), anything else raises "
        "ValueError. `n if m == 1 else m` does it once the error is ruled out.",
    ),
    cases=(
        Case("equal shapes stay", lambda: ((2, 3), (2, 3))),
        Case("a 1 becomes the other size, on either side", lambda: ((5, 1), (1, 4))),
        Case("a column meets a flat row", lambda: ((4, 1), (4,))),
        Case("a missing size counts as 1, at the left", lambda: ((3, 4), (4,))),
        Case("a scalar fits everything", lambda: ((), (2, 3))),
        Case("2 and 3 do not fit", lambda: ((4, 2), (4, 3)), raises=ValueError),
        Case("the shorter shape would fit only at the left", lambda: ((3, 4), (3,)), raises=ValueError),
        Case("a 1 meets a size of 0", lambda: ((1, 3), (0, 1))),
        Case("a 0 meets a 2", lambda: ((0,), (2,)), raises=ValueError),
    ),
    mistakes=(
        Mistake(
            "The shapes are aligned at the left. Broadcasting aligns at the right: the *last* dimensions meet each "
            "other, and ones are added in front.",
            _from_the_left,
        ),
        Mistake(
            "`zip` stops at the end of the shorter shape, and the rest of the longer one is lost. Fill the shorter "
            "shape with ones in front first.",
            lambda a, b: tuple(n if m == 1 else m for m, n in zip(a[::-1], b[::-1]))[::-1],
        ),
        Mistake(
            "The larger of two sizes is not always the answer: a 1 that meets a 0 becomes 0. A 1 takes the other "
            "size, whatever it is.",
            _larger,
        ),
        Mistake(
            "Taking the larger size without a check lets 2 meet 3. Only a 1 stretches; two other different sizes "
            "raise ValueError.",
            lambda a, b: tuple(max(m, n) for m, n in _sizes(a, b)),
        ),
        Mistake(
            "Different sizes meet here and neither is 1: that raises ValueError.",
            lambda a, b: tuple(n if m == 1 else m for m, n in _sizes(a, b)),
        ),
    ),
)


def _view_if_contiguous(shape, strides, new_shape):
    view_strides(shape, contiguous_strides(shape), new_shape)  # for its ValueError
    return contiguous_strides(new_shape) if tuple(strides) == contiguous_strides(shape) else None


def _always_contiguous(shape, strides, new_shape):
    view_strides(shape, contiguous_strides(shape), new_shape)
    return contiguous_strides(new_shape)


def _scaled(shape, strides, new_shape):
    view_strides(shape, contiguous_strides(shape), new_shape)
    return tuple(s * (strides[-1] if strides else 1) for s in contiguous_strides(new_shape))


def _one_dimension_at_a_time(shape, strides, new_shape):
    """Divides each dimension, and merges none."""
    view_strides(shape, contiguous_strides(shape), new_shape)
    result, sizes = [], list(new_shape)
    for length, stride in zip(reversed(shape), reversed(strides)):
        filled = 1
        while sizes and (filled < length or sizes[-1] == 1):
            result.append(filled * stride)
            filled *= sizes.pop()
        if filled != length:
            return None
    return tuple(reversed(result))


def _ones_are_no_exception(shape, strides, new_shape):
    """Merges by stride alone, so that a size of 1 with an odd stride ends a run."""
    if 0 in shape:
        return view_strides(shape, strides, new_shape)
    for d in range(len(shape) - 1):
        if shape[d] == 1 and strides[d] != shape[d + 1] * strides[d + 1]:
            return None
    return view_strides(shape, strides, new_shape)


def _stride_of_a_one(shape, strides, new_shape):
    """A run begun by a size of 1 keeps that dimension's stride."""
    result = view_strides(shape, strides, new_shape)
    if 0 in shape or result is None or shape[-1:] != (1,) or not result:
        return result
    return tuple(stride // max(1, result[-1]) * strides[-1] for stride in result)


def _no_check(shape, strides, new_shape):
    return view_strides(shape, strides, new_shape) if math.prod(shape) == math.prod(new_shape) else None


def _where_steps_are_taken(result, shape, strides, new_shape):
    """Compares the strides along sizes above 1: along the others no step is ever taken, so any stride is right."""
    wanted = view_strides(shape, strides, new_shape)
    if not isinstance(result, tuple) or len(result) != len(wanted):
        return f"a tuple of {len(wanted)} strides was expected, such as {wanted}"
    if math.prod(shape) and any(size > 1 and came != want for size, came, want in zip(new_shape, result, wanted)):
        return f"the strides differ from {wanted} where a step is taken"
    return None


VIEW_STRIDES = Exercise(
    lesson=LESSON,
    solution=view_strides,
    hints=(
        "Two neighbouring dimensions can be walked as one when the end of the inner one leads right to the next of "
        "the outer one. What must hold between the outer stride, the inner stride and the inner size?",
        "outer stride == inner size * inner stride. So first merge: go from the last dimension to the first and "
        "collect *runs*, each with a number of elements and the stride of its innermost dimension. A size of 1 "
        "joins any run and has no say in its stride, since no step is ever taken along it.",
        "Then divide: take the new sizes from the last to the first and fill the runs with them. Within a run with "
        "stride s, the first new size gets stride s, the next gets s times the sizes already placed in this run.",
        "A run must be filled exactly: new sizes are taken while their product is below the run's elements. If the "
        "product then goes past it, the new dimension would reach from one run into the next, and no single stride "
        "can do that: return None.",
        "What remains: raise ValueError first where the numbers of elements differ; a tensor with a size of 0 can "
        "be viewed as any shape without elements; a scalar is one run of one element; new sizes of 1 at the end of "
        "a run are taken too.",
    ),
    cases=(
        Case("a contiguous tensor is cut further", lambda: ((4, 6), (6, 1), (2, 2, 6))),
        Case("a contiguous tensor is flattened", lambda: ((2, 3, 4), (12, 4, 1), (24,))),
        Case("a transposed tensor cannot be flattened", lambda: ((6, 4), (1, 6), (24,))),
        Case("a transposed tensor can be cut within a dimension", lambda: ((6, 4), (1, 6), (2, 3, 2, 2))),
        Case("columns were cut off, and the rows are grouped", lambda: ((4, 3), (6, 1), (2, 2, 3))),
        Case("two of three dimensions still follow each other", lambda: ((2, 3, 4), (24, 4, 1), (2, 12))),
        Case("every second element is walked", lambda: ((6,), (2,), (2, 3))),
        Case("the new shape would cross from one run into the next", lambda: ((2, 6), (20, 1), (4, 3))),
        Case("the new sizes meet the end of a run by chance only", lambda: ((4, 3), (6, 1), (3, 4))),
        Case("a size of 1 has an odd stride", lambda: ((3, 1, 4), (4, 99, 1), (12,))),
        Case("a size of 1 comes last and has an odd stride", lambda: ((6, 1), (2, 99), (6,))),
        Case("sizes of 1 are put in", lambda: ((6,), (2,), (1, 3, 1, 2, 1)), verify=_where_steps_are_taken),
        Case("an expanded column cannot be flattened", lambda: ((3, 4), (1, 0), (12,))),
        Case("one number seen six times can be seen in another shape", lambda: ((2, 3), (0, 0), (3, 2))),
        Case("a scalar becomes a grid of one", lambda: ((), (), (1, 1)), verify=_where_steps_are_taken),
        Case(
            "a tensor without elements takes any shape without elements",
            lambda: ((0, 3), (1, 7), (5, 0)),
            verify=_where_steps_are_taken,
        ),
        Case("the number of elements differs", lambda: ((4, 6), (6, 1), (5, 5)), raises=ValueError),
    ),
    mistakes=(
        Mistake(
            "A dimension of size 1 ends no run: its stride is never used, so it may be anything.",
            _ones_are_no_exception,
        ),
        Mistake(
            "The stride of a size-1 dimension has become the stride of a run. No step is ever taken along it: the stride "
            "of the run is that of its innermost dimension with more than one element.",
            _stride_of_a_one,
        ),
        Mistake(
            "This lets contiguous tensors through and no others. `view` needs less: only dimensions that are "
            "*merged* must follow each other in memory. Try `torch.empty(4, 6).t().view(2, 3, 4)`.",
            _view_if_contiguous,
        ),
        Mistake(
            "These are the strides of a new contiguous tensor. A view keeps the old places in the storage, so its "
            "strides must come from the old strides.",
            _always_contiguous,
        ),
        Mistake(
            "Scaling by the last stride is right as long as all dimensions are one run. Here they are not: each run "
            "has a stride of its own.",
            _scaled,
        ),
        Mistake(
            "Each old dimension is divided, and none are merged. Where the outer stride equals inner size times "
            "inner stride, two dimensions are one run.",
            _one_dimension_at_a_time,
        ),
        Mistake(
            "None is for shapes that `view` could fill if the memory allowed it. A different number of elements is "
            "an error: ValueError.",
            _no_check,
        ),
    ),
)

# ── The clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fit_line(x, y, steps=200, rate=0.1):
    """Weight and bias of the line through the points, by gradient descent on the mean squared error."""
    inputs = x.unsqueeze(1)  # (N, 1): N samples of one feature
    weight = torch.zeros(1, 1, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    for _ in range(steps):
        prediction = (inputs @ weight + bias).squeeze(1)  # (N,), as the target is
        loss = ((prediction - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in (weight, bias):
                parameter -= rate * parameter.grad
                parameter.grad = None
    return weight.item(), bias.item()


def _line(weight, bias, noisy=0.0, n=50):
    x = torch.linspace(-1, 1, n)
    return x, weight * x + bias + noisy * noise(n)


def _is_the_line(result, x, y):
    """The least-squares line, as near as 200 steps come: each scales the error by 1 - 2 * 0.1 * mean(x²), or 0.93."""
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(r, float) for r in result)):
        return "a tuple of two floats, weight and bias, was expected"
    want = torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], dim=1), y.unsqueeze(1)).solution.flatten().tolist()
    if any(not abs(came - wanted) < 1e-3 for came, wanted in zip(result, want)):
        said = f"the least-squares line has weight {want[0]:.3f} and bias {want[1]:.3f}"
        if not all(map(math.isfinite, result)):
            return said + "; here each step overshoots further than the last: rate times gradient is too large"
        return said + ", and 200 steps at a rate of 0.1 come within 0.001 of it"
    return None


FIT_LINE = Exercise(
    lesson=LESSON,
    solution=fit_line,
    hints=(
        "The loss falls and then stays. What number does it stay at? Compare it with `y.var(correction=0)`, and "
        "print the shapes of prediction, y and prediction - y.",
        "(N, 1) minus (N,) is (N, N): each prediction is compared with every target. The best answer to that question "
        "is the mean of y, with a slope of 0.",
        "Give both the same shape before they meet: `prediction = (inputs @ weight + bias).squeeze(1)`. An `assert "
        "prediction.shape == y.shape` would have told you.",
    ),
    cases=(
        Case("the points lie on a rising line", lambda: _line(3.0, 1.0), tolerance=1e-3, verify=_is_the_line),
        Case("the points lie on a falling line", lambda: _line(-2.0, 0.5), tolerance=1e-3, verify=_is_the_line),
        Case("the points are noisy", lambda: _line(1.5, -1.0, noisy=0.3), tolerance=1e-3, verify=_is_the_line),
        Case("the line is flat", lambda: _line(0.0, 2.0), tolerance=1e-3, verify=_is_the_line),
    ),
    mistakes=(
        Mistake(
            "The slope is 0 and the bias is the mean of y. That is what comes out when every prediction is compared "
            "with every target: (N, 1) minus (N,) broadcasts to (N, N). Look at `(prediction - y).shape`.",
            lambda x, y: fit_line(x, y.mean().expand(len(y))),
        ),
        Mistake("Weight and bias have changed places.", lambda x, y: fit_line(x, y)[::-1]),
    ),
)


def planes(rows, height, width):
    """Images (N, 3, height, width), floats from 0 to 1, of uint8 rows (N, height * width * 3)."""
    pixels = rows.view(len(rows), height, width, 3)  # as the numbers lie: three colours for each pixel
    return pixels.permute(0, 3, 1, 2) / 255


def _planes_scrambled(rows, height, width):
    return rows.reshape(len(rows), 3, height, width) / 255


def _rows(n, height, width):
    return (count(n, height * width * 3, dtype=torch.int64) * 7 % 256).to(torch.uint8)


PLANES = Exercise(
    lesson=LESSON,
    solution=planes,
    hints=(
        "In what order do the numbers of one row lie? Take an image of two red pixels: 255, 0, 0, 255, 0, 0. "
        "What does the first plane show after `view(1, 3, 1, 2)`?",
        "`view` may cut the row only where the numbers are cut: pixel after pixel, three colours each. That is (N, "
        "height, width, 3). What remains is to move the colours to the front, without moving a number.",
        "`rows.view(len(rows), height, width, 3).permute(0, 3, 1, 2) / 255`",
    ),
    cases=(
        Case(
            "two red pixels stand side by side",
            lambda: (torch.tensor([[255, 0, 0, 255, 0, 0]], dtype=torch.uint8), 1, 2),
            tolerance=1e-6,
        ),
        Case("an image has more columns than rows", lambda: (_rows(1, 2, 4), 2, 4), tolerance=1e-6),
        Case("a square image hides exchanged axes", lambda: (_rows(1, 3, 3), 3, 3), tolerance=1e-6),
        Case("there are several images", lambda: (_rows(3, 2, 3), 2, 3), tolerance=1e-6),
    ),
    mistakes=(
        Mistake(
            "The shape is right and the colours are scrambled: the numbers lie pixel after pixel, and `view(n, 3, "
            "height, width)` reads them as if they lay plane after plane. Cut them as they lie, then permute.",
            _planes_scrambled,
        ),
        Mistake(
            "Width comes before height in this shape. The channels move to the front, and height and width keep their "
            "order: `permute(0, 3, 1, 2)`.",
            lambda rows, height, width: planes(rows, height, width).transpose(2, 3),
        ),
        Mistake(
            "The image is cut into rows of the wrong length: view as (n, height, width, 3), height first.",
            lambda rows, height, width: planes(rows, width, height).transpose(2, 3),
        ),
        Mistake(
            "The values still run to 255: divide by 255 to have them between 0 and 1.",
            lambda *args: planes(*args) * 255,
        ),
    ),
)


def _shared_row(lengths, width):
    mask = torch.ones(width, dtype=torch.bool).expand(len(lengths), width)
    for i, n in enumerate(lengths):
        mask[i, n:] = False
    return mask


PADDING_MASK = Exercise(
    lesson=LESSON,
    solution=padding_mask,
    hints=(
        "All rows come out alike. How many numbers does `mask` own? Look at `mask.stride()`.",
        "`expand` shows one row in many places, so a write into one row is seen in all. Either every row gets its "
        "own memory (`.clone()`), or nothing is written at all.",
        "Without a loop: position k of row i is real where k < lengths[i]. `torch.arange(width) < "
        "torch.as_tensor(lengths).unsqueeze(1)` broadcasts to (batch, width).",
    ),
    cases=(
        Case("there is one sentence", lambda: ([2], 4)),
        Case("two sentences have different lengths", lambda: ([3, 1], 4)),
        Case("a short sentence comes before a long one", lambda: ([1, 4, 2], 4)),
        Case("one sentence is empty and another fills its row", lambda: ([0, 3], 3)),
        Case("all sentences fill their rows", lambda: ([2, 2, 2], 2)),
    ),
    mistakes=(
        Mistake(
            "Every row shows the shortest length. The rows are one row, repeated by `expand` with a stride of 0: "
            "writing into one writes into all.",
            _shared_row,
        ),
        Mistake(
            "The mask is inverted: True is wanted where there is a real word.",
            lambda lengths, width: ~padding_mask(lengths, width),
        ),
        Mistake(
            "One position too many: a sentence of 2 words fills positions 0 and 1, so position < length.",
            lambda lengths, width: padding_mask([int(n) + 1 for n in lengths], width),
        ),
    ),
)


def standardise(array):
    """A float32 array as a tensor with mean 0 and torch's standard deviation 1; the array stays as it is."""
    tensor = torch.from_numpy(array)  # shares the array's memory, so nothing is written into it
    return (tensor - tensor.mean()) / tensor.std()


def _array(*shape):
    return (np.arange(math.prod(shape), dtype=np.float32) ** 2).reshape(shape)


def _standardise_in_place(array):
    tensor = torch.from_numpy(array)
    tensor -= tensor.mean()
    tensor /= tensor.std()
    return tensor


STANDARDISE = Exercise(
    lesson=LESSON,
    solution=standardise,
    hints=(
        "The result is right. Print the array before and after the call.",
        "`torch.from_numpy` copies nothing: tensor and array are two names for one memory, and `-=` and `/=` write "
        "into it.",
        "Either own the memory (`torch.tensor(array)` copies, and so does `.clone()`), or write nothing: `(tensor - "
        "tensor.mean()) / tensor.std()` makes new tensors.",
    ),
    cases=(
        Case("five numbers come in", lambda: (_array(5),), tolerance=1e-5, memory="copy"),
        Case("the array has two dimensions", lambda: (_array(3, 4),), tolerance=1e-5, memory="copy"),
        Case("the array is transposed", lambda: (_array(3, 4).T,), tolerance=1e-5, memory="copy"),
    ),
    mistakes=(
        Mistake(
            "The caller's array is changed: something writes into its memory. `-=`, `/=` and methods ending in `_` write "
            "in place, and a tensor made by `from_numpy`, `as_tensor` or `torch.Tensor` shares a float32 array's memory.",
            _standardise_in_place,
        ),
        Mistake(
            "numpy's std divides by N, torch's by N - 1. Here torch's is wanted: `tensor.std()`.",
            lambda array: torch.tensor((array - array.mean()) / array.std()),
        ),
        Mistake(
            "This divides by the variance. The standard deviation is its square root.",
            lambda array: (lambda t: (t - t.mean()) / t.var())(torch.tensor(array)),
        ),
    ),
)


def projections(x, weights):
    """Each sample of `x` (N, D) along each direction of `weights` (K, D): (K, N)."""
    return weights @ x.t()  # a product walks any strides, so nothing is copied


_SAMPLES, _DIRECTIONS, _FEATURES = 200, 40, 300


def _within_budget(call):
    """Allowed: the result, its parts where a loop stacks them, and one transposed copy of x, made before the loop."""
    allocated, x = allocated_bytes(call), 4 * _SAMPLES * _FEATURES
    budget = x + 3 * 4 * _SAMPLES * _DIRECTIONS
    if allocated <= budget:
        return None
    return (
        f"the values are right, but the call allocates {allocated:,} bytes, {allocated / x:.1f} times the size of x, "
        f"where {budget:,} are enough: something makes a copy for each of the {_DIRECTIONS} directions. "
        "Measure the lines of the loop with `allocated_bytes`"
    )


PROJECTIONS = Exercise(
    lesson=LESSON,
    solution=projections,
    time_limit=20.0,  # the first allocated_bytes of a process loads a part of PyTorch
    hints=(
        "Which line allocates? Measure `kit.allocated_bytes(lambda: x.t())`, then the same with `.contiguous()`, "
        "and compare with `x.nbytes`.",
        "`x.t()` moves nothing; `.contiguous()` copies all of x on every pass, and its result never changes. Does "
        "the product need it at all? Leave it out and compare the results.",
        "A product takes strides as they are: `weight @ x.t()`. And a stack of products is one product: `weights @ "
        "x.t()`.",
    ),
    cases=(
        Case("there is one direction", lambda: (noise(4, 3), noise(1, 3)), tolerance=1e-5),
        Case("there are as many samples as features", lambda: (noise(3, 3), noise(2, 3)), tolerance=1e-5),
        Case("there are no samples", lambda: (noise(0, 3), noise(2, 3)), tolerance=1e-5),
        Case(
            "there are forty directions",
            lambda: (noise(_SAMPLES, _FEATURES), noise(_DIRECTIONS, _FEATURES)),
            tolerance=1e-4,  # 300 roundings of sums near 17 leave about 300 ** 0.5 * 17 * 6e-8, or 2e-5
            watch=_within_budget,
        ),
    ),
    mistakes=(
        Mistake(
            "`reshape` and `view` to (D, N) do not transpose: they cut the same row of numbers elsewhere, so that a "
            "column mixes samples. `x.t()` swaps the strides.",
            lambda x, weights: weights @ x.reshape(x.shape[1], x.shape[0]),
        ),
        Mistake(
            "Samples and directions have changed places: the result has one row for each direction.",
            lambda x, weights: x @ weights.t(),
        ),
    ),
)

MERGE_HEADS = Exercise(
    lesson=LESSON,
    solution=merge_heads,
    hints=(
        "Read the message: which two dimensions does `view` have to merge? Print `context.transpose(1, 2).stride()` "
        "for one head and for two.",
        "After the transpose, the heads of one token lie tokens * dim apart, so no single stride walks through "
        "heads and dim. With one head there is no step to take, and any stride will do: that is why it worked.",
        "A copy is needed, so ask for it: `context.transpose(1, 2).reshape(batch, tokens, heads * dim)`, or "
        "`.flatten(2)`. The transpose must stay: it puts the heads of a token side by side.",
    ),
    cases=(
        Case("there is one head", lambda: (count(2, 1, 3, 4),)),
        Case("there are two heads", lambda: (count(2, 2, 3, 4),)),
        Case("there are as many heads as tokens", lambda: (count(1, 3, 3, 2),)),
        Case("there is one token", lambda: (count(2, 3, 1, 2),)),
        Case("the heads lie side by side in memory already", lambda: (count(2, 3, 2, 4).transpose(1, 2),)),
    ),
    mistakes=(
        Mistake(
            "The error is gone and the numbers are in the wrong places: without the transpose, reshape puts "
            "neighbouring *tokens* of one head side by side, and each output row mixes several tokens. Nothing "
            "raises, and the model trains badly.",
            lambda context: context.reshape(context.shape[0], context.shape[2], -1),
        ),
        Mistake(
            "The numbers of a token are interleaved: dim before heads. Heads come first, each with its `dim` "
            "numbers in a row.",
            lambda context: context.permute(0, 2, 3, 1).flatten(2),
        ),
    ),
)

EXERCISES = (
    ELEMENT_OFFSET,
    CONTIGUOUS_STRIDES,
    SHARES_STORAGE,
    STORAGE_BYTES,
    HWC_TO_CHW,
    WRITABLE,
    SLIDING_WINDOWS,
    BATCH_DIAGONAL,
    BROADCAST_SHAPE,
    VIEW_STRIDES,
    FIT_LINE,
    PLANES,
    PADDING_MASK,
    STANDARDISE,
    PROJECTIONS,
    MERGE_HEADS,
)
