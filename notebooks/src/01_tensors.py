# %% [markdown]
# # 01 · Tensors, strides, contiguity, devices
#
# After this lesson you can say of any line of tensor code whether it moves bytes, which tensors a write reaches, and why `view` accepts or refuses, and you can prove it.
#
# 180 to 240 minutes, best in three sittings: sections 1 to 4, 5 to 8, and the rest. It builds on lesson 00. You need Python, and to have seen a tensor before.
#
# Popular articles state much about tensors as fact. Where this lesson says *the articles*, it means three of the most read; it puts seventeen of their statements to the test, and a table at the end says what became of each.
#
# | | | |
# | --- | --- | --- |
# | [1 A strip of numbers](#1-·-A-strip-of-numbers) | [5 The picture, repaired](#5-·-The-picture,-repaired) | [9 Layouts of images](#9-·-Layouts-of-images) |
# | [2 Operations that move nothing](#2-·-Operations-that-move-nothing) | [6 One number in many places](#6-·-One-number-in-many-places) | [10 Devices](#10-·-Devices) |
# | [3 Who owns the bytes](#3-·-Who-owns-the-bytes) | [7 Broadcasting](#7-·-Broadcasting) | [11 The rule of view, derived](#11-·-The-rule-of-view,-derived) |
# | [4 view and reshape](#4-·-view-and-reshape) | [8 Where tensors come from](#8-·-Where-tensors-come-from) | [Clinic](#Clinic) · [What you take with you](#What-you-take-with-you) |

# %% tags=["parameters"]
DEVICE = "auto"
SEED = 0
QUICK = True

# %%
import io
import itertools
import math
import warnings

import numpy as np
import torch
import torch.nn.functional as F

import course_utils.toolkit.tensors as kit
from course_utils import benchmark, check, explore_memory_format, explore_strides, hint, images
from course_utils import load, predict, raises, solution, start, table

lesson = start("01_tensors", DEVICE, SEED, QUICK)

# %% [markdown]
# ## A program that runs
#
# A photograph is stored as height × width × channel; a convolution wants channel × height × width. Here a real digit is tinted orange and brought into the network's
# shape. Look at both pictures.

# %%
digits = load("digits")
orange = torch.tensor([1.0, 0.55, 0.1])
picture = digits.train_images[3, :, :, None] / 255 * orange
network_input = picture.reshape(3, 28, 28)
images([picture, network_input], ["the picture, (28, 28, 3)", "what the network gets, (3, 28, 28)"])

# %% [markdown]
# No error, no warning, the shape that was asked for, and a picture that no one would recognise. A network trained on it learns something, and nobody finds out. One word in the
# fourth line is wrong. By section 5 you know which, and why PyTorch could not have told you.

# %% [markdown]
# ## 1 · A strip of numbers
#
# Memory has no rows and columns. A tensor's numbers lie in one strip, its **storage**, and the tensor keeps three facts about how to read it: **shape**, **stride** and
# **storage offset**. The stride of a dimension is the number of places to move along the strip when the index in that dimension grows by one. The storage offset is the place of the tensor's first element.

# %%
predict(
    "`torch.empty(4, 6)` has four rows of six. What is its stride?",
    run=lambda: torch.empty(4, 6).stride(),
    options={
        "(4, 6)": lambda stride: stride == (4, 6),
        "(6, 1): six places to the next row, one to the next column": lambda stride: (
            stride == (6, 1)
        ),
        "(1, 4): one place to the next row, four to the next column": lambda stride: (
            stride == (1, 4)
        ),
    },
)

# %% tags=["claim-T06", "nbval-check-output"]
grid = torch.arange(24).view(4, 6)  # 24 numbers, seen as 4 rows of 6
print("shape", tuple(grid.shape), " stride", grid.stride(), " offset", grid.storage_offset())
assert grid.stride() == (6, 1)

# %% [markdown]
# A tensor whose last dimension has stride 1, and whose every other dimension jumps exactly past one complete block of what lies to its right, is called **contiguous**: reading it in order
# is walking the strip in order.
#
# Are those three facts really all? If so, a tensor can be rebuilt from its storage and them alone. `torch.as_strided` does that. Try it on a piece of the grid, cut out and transposed (`t()` swaps rows and columns):

# %% tags=["claim-T01", "nbval-check-output"]
corner = grid[1:3, 2:5].t()
strip = torch.empty(0, dtype=corner.dtype).set_(corner.untyped_storage())  # all of it, flat
rebuilt = torch.as_strided(strip, corner.shape, corner.stride(), corner.storage_offset())
print("stride", corner.stride(), " offset", corner.storage_offset())
print(rebuilt)
assert torch.equal(rebuilt, corner)
assert rebuilt.untyped_storage().data_ptr() == grid.untyped_storage().data_ptr()

waves = torch.tensor([1 + 2j])
print("conj() of complex numbers shares their storage:", kit.shares_storage(waves, waves.conj()))
assert kit.shares_storage(waves, waves.conj()) and waves.conj().is_conj()

# %% [markdown]
# It came back whole: shape (3, 2), stride (1, 6), offset 8. The device and the dtype say where the strip is and how wide its places are. (Complex tensors carry one mark more: `conj()` sets it and leaves the
# numbers where they are.)

# %% [markdown]
# ### Exercise 1 · Where is it? (two minutes)
#
# The element at `index` lies at one place of the storage. Which?


# %% tags=["exercise"]
def element_offset(index, strides, offset=0):
    """Place in the storage, counted in elements, of the element at `index`.

    >>> element_offset((2, 1), strides=(6, 1))
    13
    """
    ...


# %%
check(element_offset)
# hint(element_offset)        remove the # and run: each call gives one more hint
# solution(element_offset)    a reference, once you have tried

# %% [markdown]
# ### Exercise 2 · The strides of a contiguous tensor
#
# `torch.empty(shape).stride()` knows them. Compute them from the shape alone. (Any way to the right answer counts in this course, also one that asks PyTorch. Here, and in exercises 7 and 10, the point is to do without.)


# %% tags=["exercise"]
def contiguous_strides(shape):
    """Strides, a tuple, of a contiguous tensor of this shape. A size of 0 counts as 1.

    >>> contiguous_strides((4, 6))
    (6, 1)
    """
    ...


# %%
check(contiguous_strides)

# %% [markdown]
# ## 2 · Operations that move nothing
#
# If a tensor is a strip and three facts, then an operation that changes only the facts need not touch the strip. Which operations are those? Count the bytes: `kit` is the course's toolkit, and `kit.allocated_bytes(f)` calls `f` and counts the bytes that PyTorch allocates meanwhile.

# %%
predict(
    "A tensor of four million bytes is transposed with `t()`. How many bytes does that allocate?",
    run=lambda: (
        kit.allocated_bytes(lambda: torch.empty(1000, 1000).t())
        - kit.allocated_bytes(lambda: torch.empty(1000, 1000))
    ),
    options={
        "none": lambda extra: extra == 0,
        "4,000,000: every number moves": lambda extra: extra == 4_000_000,
        "8,000: one row is buffered at a time": lambda extra: extra == 8_000,
    },
)

# %% tags=["claim-T09", "nbval-check-output"]
x = torch.arange(1_000_000.0).view(1000, 1000)
free = {
    "x.t()": lambda: x.t(),
    "x[::2, 10:]": lambda: x[::2, 10:],
    "x[:, :1].expand(1000, 500)": lambda: x[:, :1].expand(1000, 500),
    "x.unfold(0, 10, 5)": lambda: x.unfold(0, 10, 5),
    "x.diagonal()": lambda: x.diagonal(),
}
for code, run in free.items():
    result = run()
    print(f"{code:28} stride {str(result.stride()):16} {kit.allocated_bytes(run)} bytes")
    assert kit.allocated_bytes(run) == 0
    assert result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

# %% [markdown]
# Each result has the storage of `x` and a stride of its own. Such a tensor is a **view**. The stride column shows why each is free: transposing swaps two strides, a step
# of 2 doubles one, `expand` repeats a column by a stride of 0, `unfold(0, 10, 5)` shows windows of 10 rows, 5 rows apart, and a diagonal walks one row and one column at once.
#
# Turning a tensor upside down looks like one more of this kind: start at the end, walk backwards.

# %%
predict(
    "`x.flip(0)` reverses the rows of the same tensor. How many bytes does it allocate?",
    run=lambda: kit.allocated_bytes(lambda: x.flip(0)),
    options={
        "none: a stride of -1000 does it": lambda allocated: allocated == 0,
        "4,000,000: it copies": lambda allocated: allocated == x.numel() * 4,
    },
)

# %% tags=["claim-T18", "nbval-check-output"]
print("bytes allocated by flip:", kit.allocated_bytes(lambda: x.flip(0)))
assert kit.allocated_bytes(lambda: x.flip(0)) == x.numel() * x.element_size()

with raises(ValueError):
    torch.from_numpy(np.arange(4)[::-1])

# %% [markdown]
# In PyTorch a stride is never negative. NumPy allows it, so `array[::-1]` is a view there, cannot be brought over as it is, and `flip` has to copy.
#
# Now do it by hand. Below is a tensor beside its storage. Apply operations one after the other and watch which of them change the facts and which make a new strip. Point at an element, or reach it with the Tab key, to see its
# place light up. Find an operation that makes a new strip, an order of operations that leaves places of the strip unused, and one that puts two elements into one place.

# %%
explore_strides()

# %% [markdown]
# ### Exercise 3 · Same storage?
#
# `x` and `x[1:]` start at different addresses and have different shapes, and they share one storage. Write the test.


# %% tags=["exercise"]
def shares_storage(a, b):
    """True where `a` and `b` are views of one storage. Empty storages share nothing.

    >>> x = torch.zeros(4)
    >>> shares_storage(x, x[1:])
    True
    """
    ...


# %%
check(shares_storage)

# %% [markdown]
# Sharing a storage is not yet sharing memory: the even and the odd places of one strip never meet. What decides whether a write through one tensor shows in the other is the
# bytes that both touch. The toolkit has both tests, `shares_storage` and the exact `shares_memory`:

# %% tags=["nbval-check-output"]
strip = torch.zeros(8)
even, odd, front = strip[::2], strip[1::2], strip[:3]
for name, a, b in (("even, odd", even, odd), ("even, front", even, front)):
    same_storage, same_bytes = kit.shares_storage(a, b), kit.shares_memory(a, b)
    print(f"{name:12} same storage: {same_storage}   same bytes: {same_bytes}")
assert kit.shares_storage(even, odd) and not kit.shares_memory(even, odd)

# %% [markdown]
# ## 3 · Who owns the bytes
#
# A view keeps the *whole* storage alive, not only the part it shows. Suppose you load a large tensor, keep one number of it and save that.

# %%
large = torch.zeros(1_000_000)
one_number = large[:1]


def saved_size(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue())


# %%
predict(
    "`one_number` is one element of the four million bytes of `large`. "
    "How large a file does `torch.save` make of it?",
    run=lambda: saved_size(one_number),
    options={
        "under 10 kB: one number and a header": lambda size: size < 10_000,
        "over 4 MB: the whole storage": lambda size: size > 4_000_000,
    },
)

# %% tags=["claim-T19"]
table(
    ("saved", "elements", "bytes in the file"),
    [
        ("large[:1]", 1, saved_size(one_number)),
        ("large[:1].clone()", 1, saved_size(one_number.clone())),
    ],
)
assert saved_size(one_number) > 4_000_000 > 100 * saved_size(one_number.clone())

del large
print(f"after `del large`, one_number keeps {kit.storage_bytes(one_number):,} bytes alive")
assert kit.storage_bytes(one_number) == 4_000_000

# %% [markdown]
# Saving keeps what tensors share, so it writes storages, not elements. And `del large` frees nothing while `one_number` lives: a list of "small" slices, one per batch, holds every
# batch. `clone()` gives a slice a storage of its own size.

# %% [markdown]
# ### Exercise 4 · What do these tensors really cost?
#
# Ten views of one tensor cost as much memory as one. Count every storage once.


# %% tags=["exercise"]
def storage_bytes(*tensors):
    """Bytes of all storages that these tensors use, each storage counted once and whole.

    >>> x = torch.zeros(10)
    >>> storage_bytes(x, x[:2], x.view(2, 5))
    40
    """
    ...


# %%
check(storage_bytes)

# %% [markdown]
# ## 4 · view and reshape
#
# The articles say: *view needs a contiguous tensor, reshape works on any and copies where it is not contiguous.* Only the middle part is true. Take every second number of each row, which is
# surely not contiguous, and ask for a view.

# %%
halves = torch.arange(24).view(2, 3, 4)[:, :, ::2]
print(halves.shape, halves.stride(), halves.is_contiguous())

# %%
predict(
    "`halves` has shape (2, 3, 2), stride (12, 4, 2) and is not contiguous. "
    "What does `halves.view(6, 2)` do?",
    run=lambda: halves.view(6, 2),
    options={
        "raises: it is not contiguous": lambda result: isinstance(result, RuntimeError),
        "returns a view, without copying": lambda result: kit.shares_storage(result, halves),
        "returns a copy": lambda result: not kit.shares_storage(result, halves),
    },
)

# %% tags=["claim-T02", "nbval-check-output"]
print("stride", halves.stride(), "→ view(6, 2):", halves.view(6, 2).stride())
print("stride", halves.stride(), "→ view(-1):  ", halves.view(-1).stride())
assert not halves.is_contiguous() and halves.view(12).stride() == (2,)

turned = torch.arange(24).view(2, 3, 4).transpose(0, 1)
print("turned: stride", turned.stride())
with raises(RuntimeError):
    turned.view(6, 4)
assert turned.view(3, 2, 2, 2).stride() == (4, 12, 2, 1)

# %% [markdown]
# `view` does not ask whether the tensor is contiguous. It asks whether the new shape can be walked with *fixed* strides. Two neighbouring dimensions can become one if
# stepping off the end of the inner one lands where the outer one steps: **stride of the outer = size of the inner × stride of the inner**. In `halves` that is 4 = 2 × 2 and 12 = 3 × 4, so all three
# dimensions merge. In `turned` it would have to be 4 = 2 × 12. *Splitting* a dimension, as the last line does, is always possible.
#
# The message says the same in its own words: *at least one dimension spans across two contiguous subspaces*.
#
# `reshape` first asks the same question, and copies only where the answer is no:

# %% tags=["claim-T03", "nbval-check-output"]
for name, source, shape in (("halves", halves, (6, 2)), ("turned", turned, (6, 4))):
    result = source.reshape(shape)
    kind = "view" if kit.shares_memory(source, result) else "copy"
    print(f"{name}.reshape{shape}: contiguous before: {source.is_contiguous()}, a {kind}")
assert kit.shares_memory(halves, halves.reshape(6, 2))
assert not kit.shares_memory(turned, turned.reshape(6, 4))

# %% [markdown]
# Both inputs are non-contiguous; one is viewed, one is copied. So the same line of code shares memory or not, depending on where its input came from. That matters as soon as someone writes:


# %% tags=["claim-T20", "nbval-check-output"]
def mark_first(grid):
    grid.reshape(-1)[0] = -1  # does the caller see it?


upright, lying = torch.ones(2, 3), torch.ones(3, 2).t()
mark_first(upright)
mark_first(lying)
print("contiguous input:", upright[0, 0].item(), "  transposed input:", lying[0, 0].item())
assert upright[0, 0] == -1 and lying[0, 0] == 1

# %% [markdown]
# The function has a side effect on one input and none on the other, and both have the same shape and values. If you mean "without copying", write `view`, and a layout that does not allow it becomes an
# error at the line that caused it:


# %% tags=["claim-T05", "nbval-check-output"]
def mark_first_strictly(grid):
    grid.view(-1)[0] = -1


mark_first_strictly(torch.ones(2, 3))
with raises(RuntimeError):
    mark_first_strictly(torch.ones(3, 2).t())

# %% [markdown]
# What does the hidden copy cost? The bytes are exact on any machine, the time is this machine's:

# %% tags=["claim-T04"]
wide = torch.randn(1000, 1000)
per_call = {
    "contiguous": kit.allocated_bytes(lambda: wide.reshape(-1)),
    "transposed": kit.allocated_bytes(lambda: wide.t().reshape(-1)),
}
print("bytes allocated at each call:", per_call)
assert per_call == {"contiguous": 0, "transposed": 4_000_000}
benchmark(
    {
        "wide.reshape(-1)": lambda: wide.reshape(-1),
        "wide.t().reshape(-1)": lambda: wide.t().reshape(-1),
    },
    what="time of a call",
)

# %% [markdown]
# The first makes three facts; the second moves every number, at each call anew. The cure is to copy once, before the loop, and where possible not at all.
#
# The explorer's last line says whether the next `view` would succeed, and if not, which two dimensions stand in its way. Start below from a tensor of three dimensions. Find an order of operations after which `view(-1)` is refused,
# and one after which it is allowed although the tensor is not contiguous.

# %%
explore_strides(torch.arange(24).view(2, 3, 4))

# %% [markdown]
# One more thing that people mistake for a copy that restores order:

# %%
predict(
    "`wide.t()` is not contiguous. Is `wide.t().clone()`?",
    run=lambda: wide.t().clone().is_contiguous(),
    options={
        "yes: a fresh copy is laid out in order": lambda contiguous: contiguous is True,
        "no: clone keeps the strides": lambda contiguous: contiguous is False,
    },
)

# %% tags=["claim-T21", "nbval-check-output"]
print("clone     ", wide.t().clone().stride())
print("contiguous", wide.t().contiguous().stride())
print("transposed + zeros", (wide.t() + torch.zeros(1000, 1000)).stride())
print("zeros + transposed", (torch.zeros(1000, 1000) + wide.t()).stride())
assert not wide.t().clone().is_contiguous() and wide.t().contiguous().is_contiguous()
assert (wide.t() + torch.zeros(1000, 1000)).stride() != (
    torch.zeros(1000, 1000) + wide.t()
).stride()

# %% [markdown]
# `clone` keeps the strides of a tensor without gaps and overlaps, and so do element-wise operations. Of two operands of full size the first decides: `a + b` and `b + a` have equal values and different strides. Order is what `contiguous()` is for.

# %% [markdown]
# ## 5 · The picture, repaired
#
# Back to the opening. Both of these give a tensor of shape (3, 28, 28) from the picture's (28, 28, 3):
#
# * `reshape` keeps the *order of the numbers along the strip* and cuts it into new rows;
# * `permute` keeps *which number belongs to which pixel and channel* and renames the dimensions.
#
# PyTorch cannot know which was meant, since both are legal.

# %% tags=["claim-T16"]
scrambled = picture.reshape(3, 28, 28)
renamed = picture.permute(2, 0, 1)
assert scrambled.shape == renamed.shape and not torch.equal(scrambled, renamed)
assert torch.equal(scrambled.flatten(), picture.flatten())  # the strip's order is kept …
assert torch.equal(renamed[0], picture[:, :, 0])  # … or the meaning is: plane 0 is red
print("mean of each plane, reshape:", [round(v, 3) for v in scrambled.mean(dim=(1, 2)).tolist()])
print("mean of each plane, permute:", [round(v, 3) for v in renamed.mean(dim=(1, 2)).tolist()])
images([scrambled, renamed], ["reshape(3, 28, 28)", "permute(2, 0, 1)"])

# %% [markdown]
# An orange picture has much red, half as much green and little blue. The planes of the permuted tensor say so; those of the reshaped one do not. A cheap test for a pipeline: tint an image with one known colour and
# look at the means of the planes.

# %% [markdown]
# ### Exercise 5 · From photograph to network
#
# Bring height × width × channel into channel × height × width, for one picture and for any number of leading batch dimensions, without copying.


# %% tags=["exercise"]
def hwc_to_chw(image):
    """A view of `image` (…, H, W, C) with shape (…, C, H, W).

    >>> hwc_to_chw(torch.zeros(8, 32, 40, 3)).shape
    torch.Size([8, 3, 32, 40])
    """
    ...


# %%
check(hwc_to_chw)

# %% [markdown]
# ## 6 · One number in many places
#
# `expand` turns a column of three numbers into a grid of twelve. How many numbers does the grid own?

# %%
column = torch.tensor([[1.0], [2.0], [3.0]])
grid = column.expand(3, 4)
print(grid)

# %%
predict(
    "How much memory does `grid` add to `column`?",
    run=lambda: kit.storage_bytes(column, grid) - kit.storage_bytes(column),
    options={
        "none": lambda added: added == 0,
        "36 bytes: the nine numbers that are missing": lambda added: added == 36,
        "48 bytes: all twelve": lambda added: added == 48,
    },
)

# %% tags=["claim-T07", "nbval-check-output"]
print("strides", column.stride(), "→", grid.stride())
assert grid.stride() == (1, 0)
assert grid.untyped_storage().nbytes() == column.untyped_storage().nbytes() == 12
assert grid.untyped_storage().data_ptr() == column.untyped_storage().data_ptr()

# %% [markdown]
# None. The grid has the column's storage and a stride of 0 along its second dimension: one step to the right moves zero places, so four elements are one number.
#
# Reading is harmless. Writing is where it gets interesting, because *how* you write decides what happens. A method whose name ends in `_` writes into the tensor itself, **in place**. Four ways to write into the same grid:

# %% tags=["claim-T08", "nbval-check-output"]
grid[0, 0] = 99.0
print("one element written:", grid[0].tolist(), "and the source:", column.flatten().tolist())
assert grid[0].tolist() == [99.0] * 4 and column[0, 0] == 99.0

with raises(RuntimeError):
    grid.add_(1)
with raises(RuntimeError):
    grid[0] = 5.0

grid.fill_(7.0)
assert column.flatten().tolist() == [7.0, 7.0, 7.0]

# %% [markdown]
# The first write went through to the column and showed up in four places. The next two were refused: *more than one element of the written-to tensor refers to a single memory location*. PyTorch does not look at your values. It refuses by kind
# of operation: adding, assigning a row and most others could put different values into one place, so they are refused on a stride of 0 even where, as in `grid[0] = 5.0`, all values agree. `fill_` puts one value everywhere and passes.
#
# So a few ways of writing pass, most raise, and **none of it protects what other tensors share**. And the guard sees only a stride of 0. Overlapping windows get through, and each element changes once for every window that it is in:

# %% tags=["claim-T22", "nbval-check-output"]
signal = torch.zeros(6)
signal.unfold(0, size=3, step=1).add_(1)
print(signal.tolist())
assert signal.tolist() == [1.0, 2.0, 3.0, 3.0, 2.0, 1.0]

# %% [markdown]
# If you mean to write, own the memory first: `grid = column.expand(3, 4).clone()`.

# %% [markdown]
# ### Exercise 6 · Own it only when you must
#
# Return a tensor that may safely be written in place: `x` itself where no two of its elements share memory, a copy where they do.


# %% tags=["exercise"]
def writable(x):
    """`x` itself where every element has its own memory, otherwise a contiguous copy.

    >>> x = torch.zeros(3)
    >>> writable(x) is x
    True
    """
    ...


# %%
check(writable)

# %% [markdown]
# Among the cases: a transposed tensor owns its elements (copying it is a waste, and the check notices); a stride of 0 along a dimension of size 1 repeats nothing; windows made by `unfold` overlap without any stride being 0.

# %% [markdown]
# ### Exercise 7 · Windows without a copy
#
# `unfold` makes sliding windows along one dimension. Make them yourself with `torch.as_strided`. Take care with tensors that are not contiguous and with views that do not begin at the start of their storage.


# %% tags=["exercise"]
def sliding_windows(x, size, step=1):
    """A view of `x` (…, N) with shape (…, windows, size): whole windows, `step` elements apart.

    >>> sliding_windows(torch.arange(5), size=3, step=2)
    tensor([[0, 1, 2],
            [2, 3, 4]])
    """
    ...


# %%
check(sliding_windows)

# %% [markdown]
# ### Exercise 8 · A diagonal for every matrix
#
# From a batch of square matrices take the diagonals, so that writing into the result writes into the matrices.


# %% tags=["exercise"]
def batch_diagonal(x):
    """A view of `x` (B, N, N) with shape (B, N): row b holds the diagonal of matrix b.

    >>> batch_diagonal(torch.arange(8).view(2, 2, 2))
    tensor([[0, 3],
            [4, 7]])
    """
    ...


# %%
check(batch_diagonal)

# %% [markdown]
# ## 7 · Broadcasting
#
# Two tensors of different shape meet in an operation. PyTorch aligns the shapes at the *right*, and expands (stride 0 again) wherever one of them has size 1 or no dimension at all. No bytes are copied for that, and no
# question is asked. A regression model gives one prediction per sample, shape (N, 1); the targets have shape (N,).

# %%
prediction = torch.tensor([[1.0], [2.0], [3.0]])
target = torch.tensor([1.0, 2.0, 3.0])

# %%
predict(
    "Every prediction is exactly right. What is `((prediction - target) ** 2).mean()`?",
    run=lambda: ((prediction - target) ** 2).mean(),
    options={
        "0: they agree": lambda loss: loss == 0,
        "more than 0": lambda loss: loss > 0,
        "an error: the shapes differ": lambda loss: isinstance(loss, RuntimeError),
    },
)

# %% tags=["claim-T15", "nbval-check-output"]
difference = prediction - target
print("shape of the difference:", tuple(difference.shape))
print("loss of a perfect model:", round((difference**2).mean().item(), 4))
print("accuracy of a perfect model:", round((prediction == target).float().mean().item(), 4))
assert difference.shape == (3, 3) and (difference**2).mean() > 1

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    F.mse_loss(prediction, target)
print("F.mse_loss warns:", "due to broadcasting" in str(caught[0].message))
assert "due to broadcasting" in str(caught[0].message)

# %% [markdown]
# (N, 1) against (N,) is aligned as (N, 1) against (1, N), so every prediction meets every target. The loss is a number, it has a gradient, and training goes on.
# `F.mse_loss` at least warns when the shapes differ; a loss, an accuracy or a mask written by hand does not.

# %% [markdown]
# ### Exercise 9 · Which shape comes out?
#
# Predict the shape before PyTorch does.


# %% tags=["exercise"]
def broadcast_shape(a, b):
    """The shape, a tuple, in which shapes `a` and `b` meet.

    Raises ValueError where two sizes differ and neither is 1; a 1 takes the other size, even 0.

    >>> broadcast_shape((5, 1), (4,))
    (5, 4)
    """
    ...


# %%
check(broadcast_shape)

# %% [markdown]
# ## 8 · Where tensors come from
#
# Two names that differ in one capital letter. The articles: *`torch.Tensor()` creates an empty float tensor, `torch.tensor()` infers the type.*

# %%
predict(
    "What is `torch.Tensor(3)`?",
    run=lambda: torch.Tensor(3),
    options={
        "a scalar with the value 3.0": lambda made: made.dim() == 0,
        "a tensor with the one element 3.0": lambda made: made.shape == (1,),
        "three numbers that nobody has set": lambda made: made.shape == (3,),
    },
)

# %% tags=["claim-T10", "nbval-check-output"]
print("torch.Tensor(3)      has shape", torch.Tensor(3).shape, "and whatever was in memory")
print("torch.Tensor([1, 2])", torch.Tensor([1, 2]), torch.Tensor([1, 2]).dtype)
print("torch.tensor([1, 2])", torch.tensor([1, 2]), torch.tensor([1, 2]).dtype)
print("torch.tensor(3)     ", torch.tensor(3), torch.tensor(3).dtype)
assert torch.Tensor(3).shape == (3,) and torch.Tensor([1, 2]).dtype == torch.float32
assert torch.tensor(3).shape == () and torch.tensor([1, 2]).dtype == torch.int64

# %% [markdown]
# `torch.Tensor` is the class; its constructor reads integers as *sizes* and a list as *data*, in the default float type. `torch.tensor` reads everything as data. Use `torch.tensor` for data and `torch.empty` where you
# mean uninitialised memory.
#
# A NumPy array brings one more question: is it converted, or shared?

# %% tags=["claim-T11", "nbval-check-output"]
array = np.array([1.0, 2.0])
shared, copied = torch.from_numpy(array), torch.tensor(array)

array[0] = 50.0
shared[1] = 60.0
print("array", array, " from_numpy", shared.tolist(), " tensor", copied.tolist(), shared.dtype)
assert shared.tolist() == array.tolist() == [50.0, 60.0] and copied.tolist() == [1.0, 2.0]
assert shared.dtype == torch.float64

floats = np.zeros(2, dtype=np.float32)
others = {"as_tensor": torch.as_tensor(floats), "Tensor": torch.Tensor(floats)}
floats += 1
print({name: tensor.tolist() for name, tensor in others.items()}, "back:", copied.numpy())
assert all(tensor.tolist() == [1.0, 1.0] for tensor in others.values())
assert copied.numpy().ctypes.data == copied.data_ptr()

# %% [markdown]
# Shared both ways: the array sees the tensor's write and the tensor the array's. And NumPy's default of 64 bits comes along, which a layer with 32-bit weights refuses:

# %% tags=["nbval-check-output"]
with raises(RuntimeError):
    torch.nn.Linear(2, 1)(shared)

# %% [markdown]
# A widely used course teaches that changing the array does *not* change the tensor, with `array = array + 1` as its evidence (mrdbourke/pytorch-deep-learning#926). That line makes a new array and gives it the old name; the shared memory is untouched.
# `array += 1` shows it. `torch.as_tensor` shares as well, `torch.Tensor` too where the array is of its type, and so does `.numpy()` on the way back; `torch.tensor` and `.clone()` do not.
#
# What about indexing? A slice is a view. A *list* of indices cannot be one, since its places need not be evenly spaced. So it copies, and a repeated index is written once, not twice (pytorch/pytorch#60846):

# %% tags=["claim-T23", "nbval-check-output"]
rows = torch.zeros(3, 2)
print("rows[0:2] shares memory:   ", kit.shares_memory(rows, rows[0:2]))
print("rows[[0, 1]] shares memory:", kit.shares_memory(rows, rows[[0, 1]]))
assert kit.shares_memory(rows, rows[0:2]) and not kit.shares_memory(rows, rows[[0, 1]])

labels = torch.tensor([2, 2, 2, 0])
counts = torch.zeros(3)
counts[labels] += 1
right_counts = torch.zeros(3).index_add_(0, labels, torch.ones(4))
print("counts[labels] += 1:", counts.tolist(), "  index_add_:", right_counts.tolist())
assert counts.tolist() == [1.0, 0.0, 1.0] and right_counts.tolist() == [1.0, 0.0, 3.0]
assert torch.bincount(labels, minlength=3).tolist() == [1, 0, 3]

# %% [markdown]
# `counts[labels] += 1` reads a copy, adds one to it, and writes it back: three of the four samples write the same 1 into place 2. `index_add_` and `bincount` accumulate.

# %% [markdown]
# ## 9 · Layouts of images
#
# In PyTorch's image layers a batch has shape (N, C, H, W): images, channels, height, width. In which order its numbers lie is another matter. In the usual layout a whole red plane comes first; in **channels_last** the three channels of one pixel are neighbours. Same shape,
# same values, other strides:

# %% tags=["nbval-check-output"]
planes_first = torch.arange(2 * 3 * 2 * 2).view(2, 3, 2, 2)
channels_last = planes_first.to(memory_format=torch.channels_last)
print("usual        ", tuple(planes_first.shape), planes_first.stride())
print("channels_last", tuple(channels_last.shape), channels_last.stride())
assert torch.equal(planes_first, channels_last) and not channels_last.is_contiguous()
assert channels_last.is_contiguous(memory_format=torch.channels_last)

after_conv = F.conv2d(channels_last.float(), torch.ones(4, 3, 1, 1)).relu()
assert after_conv.is_contiguous(memory_format=torch.channels_last)
with raises(RuntimeError):
    channels_last.view(2, -1)
assert not kit.shares_memory(channels_last.flatten(1), channels_last)

# %% [markdown]
# `conv2d` and `relu` keep the layout that they get, so one conversion at the start lasts through many a network. Code that says `x.view(N, -1)` on the way to its last linear layer raises as soon as there is more than one channel and more than one pixel; `flatten(1)` copies.
#
# Walk through memory yourself. The explorer draws the path and counts the places jumped over; the button measures what each walk costs on this machine.

# %%
explore_memory_format()

# %% [markdown]
# A grey image has one channel. Is it in the usual layout, or in channels_last?

# %% tags=["nbval-check-output"]
grey = torch.zeros(8, 1, 28, 28)
odd_strides = torch.empty_strided((3, 1), (1, 999))
print("usual:        ", grey.is_contiguous())
print("channels_last:", grey.is_contiguous(memory_format=torch.channels_last))
print("stride", odd_strides.stride(), "contiguous:", odd_strides.is_contiguous())
assert grey.is_contiguous() and grey.is_contiguous(memory_format=torch.channels_last)
assert odd_strides.is_contiguous()

# %% [markdown]
# Both. A dimension of size 1 is never stepped along, so its stride may be anything. A test with one channel or one head therefore cannot catch such an error of layout.

# %% [markdown]
# ## 10 · Devices
#
# A tensor lives on one device. Two that live on different devices do not mix. The **meta** device holds tensors without any data: only shape, dtype and strides. It follows the same rules, so it shows them on a machine without a GPU.

# %% tags=["claim-T12", "nbval-check-output"]
elsewhere = torch.ones(2, device="meta")
for shape in ((2,), (1,)):
    with raises(RuntimeError):
        torch.ones(shape) + elsewhere
mixed = torch.tensor(1.0) + elsewhere
print("a scalar from the CPU mixes, the result is on", mixed.device)
assert mixed.device.type == "meta" and (elsewhere * torch.tensor(2.0)).device.type == "meta"

# %% [markdown]
# "All tensors must be on one device" has an exception: a *zero-dimensional* CPU tensor counts as a number in element-wise operations. A tensor of one element with shape (1,) does not count as one.
#
# `.to(device)` moves. What does it do when there is nothing to move?

# %%
here = torch.arange(3.0)

# %%
predict(
    'On the CPU, what is `here.to("cpu")`?',
    run=lambda: here.to("cpu"),
    options={
        "`here` itself": lambda moved: moved is here,
        "a new tensor that shares its memory": lambda moved: (
            moved is not here and kit.shares_memory(moved, here)
        ),
        "a copy": lambda moved: not kit.shares_memory(moved, here),
    },
)

# %% tags=["claim-T13"]
calls = {
    'here.to("cpu")': here.to("cpu"),
    "here.float()": here.float(),
    "here.contiguous()": here.contiguous(),
    'here.to("cpu", copy=True)': here.to("cpu", copy=True),
    "here.double()": here.double(),
    "here.detach()": here.detach(),
}
table(
    ("call", "is `here` itself", "shares its memory"),
    [(code, str(r is here), str(kit.shares_memory(r, here))) for code, r in calls.items()],
)
assert here.to("cpu") is here and here.float() is here and here.contiguous() is here
assert not kit.shares_memory(here.to("cpu", copy=True), here) and kit.shares_memory(
    here.detach(), here
)

# %% [markdown]
# `here` itself. So `x = batch.to(device); x.add_(1)` changes the batch on a CPU and leaves it alone on a GPU: a program whose meaning depends on the machine. Where you need your own copy, say `clone()` or `copy=True`.
#
# Moving costs time where there is a link to cross. `non_blocking=True` lets the CPU go on while the copy runs. Towards the GPU that takes **pinned** memory, which the operating system may not move; it is safe as long as the CPU does not write into the source
# before the copy is done, since later work on the GPU waits by itself. On the way back nothing waits for you: the CPU reads what is not there yet (pytorch/pytorch#127612).
#
# On a machine with CUDA the next cell measures one large transfer against many small ones, pageable (ordinary) against pinned memory, and reads a result too early. On a CPU `.to` has nothing to copy, so the flag changes nothing and the mistake cannot show.

# %% tags=["cuda", "claim-T13", "claim-T14"]
samples = torch.randn(256, 3, 64, 64)
if lesson.device.type == "cuda":
    one_by_one = lambda: [sample.to(lesson.device) for sample in samples]
    at_once = lambda: samples.to(lesson.device)
    benchmark({"whole batch": at_once, "sample by sample": one_by_one}, what="time of the transfer")

    pinned = samples.pin_memory()
    copies = {
        "pageable": lambda: samples.to(lesson.device),
        "pageable, non_blocking": lambda: samples.to(lesson.device, non_blocking=True),
        "pinned": lambda: pinned.to(lesson.device),
        "pinned, non_blocking": lambda: pinned.to(lesson.device, non_blocking=True),
    }
    benchmark(copies, what="time of a copy to the GPU")

    twos = torch.ones(1 << 26, device=lesson.device) * 2
    back = torch.zeros(1 << 26, pin_memory=True)
    torch.cuda.synchronize()
    back.copy_(twos, non_blocking=True)
    early = back[-1].item()  # the copy may or may not have arrived
    torch.cuda.synchronize()
    print("last element, read at once:", early, "  after synchronize():", back[-1].item())
    assert back[-1].item() == 2.0
else:
    allocated = kit.allocated_bytes(lambda: samples.to("cpu", non_blocking=True))
    print(f"no CUDA device: .to() of {samples.nbytes:,} bytes allocates {allocated}")
    assert samples.to("cpu", non_blocking=True) is samples and not samples.is_pinned()

# %% [markdown]
# One more piece of folklore: *a GPU tensor cannot be printed inside `forward`, call `.cpu()` first.* What refuses is `.numpy()`. Printing fetches the values itself, for which it waits for the GPU: allowed, and not for a hot loop.

# %% tags=["claim-T17", "nbval-check-output"]
print(elsewhere)
with raises(TypeError):
    elsewhere.numpy()
with raises(RuntimeError):
    elsewhere.sum().item()

# %% tags=["cuda", "claim-T12", "claim-T17"]
if lesson.device.type == "cuda":
    with raises(RuntimeError):
        torch.ones(2) + torch.ones(2, device=lesson.device)
    assert (torch.tensor(1.0) + torch.ones(2, device=lesson.device)).device.type == "cuda"
    on_gpu = torch.arange(3.0, device=lesson.device)
    print(on_gpu)
    torch.cuda.set_sync_debug_mode("error")
    with raises(RuntimeError):  # printing waits for the GPU
        print(on_gpu)
    torch.cuda.set_sync_debug_mode("default")
    with raises(TypeError):
        on_gpu.numpy()
    assert on_gpu.sum().item() == 3.0 and on_gpu.cpu().numpy().sum() == 3.0
else:
    print("no CUDA device: the meta device has shown the rules of mixing and of printing")

# %% [markdown]
# The meta device is good for more than rules. A tensor there takes no memory, so shapes can be tried that no machine holds:

# %% tags=["nbval-check-output"]
enormous = torch.empty(1_000_000, 1_000_000, device="meta")
product = enormous @ enormous.t()
print(product.shape, f"{product.untyped_storage().nbytes():,} bytes, if it were real")
assert product.shape == (1_000_000, 1_000_000)

# %% [markdown]
# ## 11 · The rule of view, derived
#
# You have seen all its parts: dimensions merge where strides fit, splitting is always possible, a size of 1 has no say. Put them together.

# %% [markdown]
# ### Exercise 10 · What view knows
#
# Given a tensor's shape and strides and a new shape with as many elements, return the strides of the view, or `None` where `view` refuses. This is the longest exercise of the lesson; there are several hints, and half an hour is well spent on it.


# %% tags=["exercise"]
def view_strides(shape, strides, new_shape):
    """Strides with which `view(new_shape)` sees a tensor of `shape` and `strides`, or None.

    A tensor without elements can be viewed as any shape without elements; strides along a size of
    1 are free. Raises ValueError where the numbers of elements differ.

    >>> view_strides((2, 3, 2), (12, 4, 2), (6, 2))
    (4, 2)
    >>> view_strides((3, 2, 4), (4, 12, 1), (6, 4)) is None
    True
    """
    ...


# %%
check(view_strides)

# %% [markdown]
# The toolkit's version is held against PyTorch here: every way to write some tensors' elements as two or three dimensions, for contiguous, transposed, stepped, expanded and cut tensors, with sizes of 0 and 1 among them. The course's tests try twenty thousand
# random layouts more.

# %% tags=["nbval-check-output"]
layouts = [
    lambda x: x,
    lambda x: x.transpose(0, 1),
    lambda x: x[:, :, ::2],
    lambda x: x[:, :, :1].expand(-1, -1, 3),
    lambda x: x[:, :1],
]
viewed = refused = 0
for shape in ((2, 3, 4), (4, 1, 6), (1, 2, 8), (3, 0, 2)):
    for layout in layouts:
        tensor = layout(torch.zeros(shape))
        n = tensor.numel()
        triples = itertools.product(range(n + 1), range(n + 1), (1, 2, 3))
        for new_shape in (triple for triple in triples if math.prod(triple) == n):
            try:
                truth = tensor.view(new_shape).stride()
            except RuntimeError:
                truth = None
            assert kit.view_strides(tensor.shape, tensor.stride(), new_shape) == truth
            viewed, refused = viewed + (truth is not None), refused + (truth is None)
print("agreed on", viewed, "views and", refused, "refusals")

# %% [markdown]
# ## Clinic
#
# Six programs that are wrong, each reduced from a failure that someone reported. You see the symptom as its user saw it. Find the cause, repair the function, check it. All but the last raise nothing and warn of nothing.

# %% [markdown]
# ### Clinic 1 · The line that stays flat
#
# Training runs to its end without a complaint. The points lie exactly on y = 3x + 1.


# %% tags=["exercise", "clinic"]
def fit_line(x, y, steps=200, rate=0.1):
    """Weight and bias, two floats, of the line through the points x and y, both of shape (N,)."""
    inputs = x.unsqueeze(1)  # (N, 1): N samples of one feature
    weight = torch.zeros(1, 1, requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    for _ in range(steps):
        prediction = inputs @ weight + bias
        loss = ((prediction - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in (weight, bias):
                parameter -= rate * parameter.grad
                parameter.grad = None
    return weight.item(), bias.item()


# %%
points = torch.linspace(-1, 1, 50)
slope, intercept = fit_line(points, 3 * points + 1)
print(f"slope {slope:.3f}, intercept {intercept:.3f}; the points have 3 and 1")

# %%
check(fit_line)

# %% [markdown]
# ### Clinic 2 · Images from flat rows
#
# A file holds one image per row, its bytes in the order red, green, blue, red, green, blue, …. Shapes and value range are right, and the accuracy is poor.


# %% tags=["exercise", "clinic"]
def planes(rows, height, width):
    """Images (N, 3, height, width), floats from 0 to 1, of uint8 rows (N, height * width * 3)."""
    return rows.view(len(rows), 3, height, width) / 255


# %%
flat = (digits.train_images[:4, :, :, None] * orange).round().byte().reshape(4, -1)
batch = planes(flat, 28, 28)
red, green, blue = batch.mean(dim=(0, 2, 3)).tolist()
print(f"means of an orange picture: red {red:.3f}, green {green:.3f}, blue {blue:.3f}")
images(list(batch[:3]), ["image 0", "image 1", "image 2"])

# %%
check(planes)

# %% [markdown]
# ### Clinic 3 · Every sentence ends early
#
# Sentences of different length are padded to one width. The mask says which positions are real. With one sentence it is right.


# %% tags=["exercise", "clinic"]
def padding_mask(lengths, width):
    """Mask (B, width), True at the first lengths[i] positions of row i, for a list of B lengths."""
    mask = torch.ones(width, dtype=torch.bool).expand(len(lengths), width)
    for i, length in enumerate(lengths):
        mask[i, length:] = False
    return mask


# %%
print(padding_mask([2, 4, 3], width=5).int())

# %%
check(padding_mask)

# %% [markdown]
# ### Clinic 4 · The data that changes overnight
#
# Standardised once it is fine. The same array standardised again, or used by a second experiment, is not what it was.


# %% tags=["exercise", "clinic"]
def standardise(array):
    """A float32 array as a tensor with mean 0 and torch's standard deviation 1."""
    tensor = torch.from_numpy(array)
    tensor -= tensor.mean()
    tensor /= tensor.std()
    return tensor


# %%
measurements = np.array([10.0, 20.0, 30.0], dtype=np.float32)
print("first call: ", [round(v, 3) for v in standardise(measurements).tolist()])
print("the array is now", measurements)

# %%
check(standardise)

# %% [markdown]
# ### Clinic 5 · The slow loop
#
# The results are right. It is slow, and a profiler shows that most of the time goes into copying. The check counts the bytes that a call allocates.


# %% tags=["exercise", "clinic"]
def projections(x, weights):
    """Each sample of x (N, D) along each direction of weights (K, D), with shape (K, N)."""
    results = []
    for direction in weights:
        columns = x.t().contiguous()  # (D, N): a column for each sample
        results.append(direction @ columns)
    return torch.stack(results)


# %%
features, directions = torch.randn(200, 300), torch.randn(40, 300)
allocated = kit.allocated_bytes(lambda: projections(features, directions))
print(f"bytes allocated by one call: {allocated:,}; the result has {40 * 200 * 4:,}")

# %%
check(projections)

# %% [markdown]
# ### Clinic 6 · Works with one head
#
# Attention works in several *heads*, each with a vector of `dim` numbers for every *token* (word) of a sentence: (batch, heads, tokens, dim). The next layer wants the heads of a token side by side, (batch, tokens, heads × dim). The unit test, with one head, is green. The error message suggests a cure. Take it only if it is one.


# %% tags=["exercise", "clinic"]
def merge_heads(context):
    """Heads side by side: (B, heads, tokens, dim) → (B, tokens, heads * dim)."""
    batch, heads, tokens, dim = context.shape
    return context.transpose(1, 2).view(batch, tokens, heads * dim)


# %%
try:
    for heads in (1, 2):
        print(heads, "head(s):", tuple(merge_heads(torch.randn(4, heads, 5, 8)).shape))
except RuntimeError as error:
    print(heads, "heads:", error)

# %%
check(merge_heads)

# %% [markdown]
# ## What you take with you
#
# **Your toolkit**, in `course_utils.toolkit.tensors`: `element_offset`, `contiguous_strides`, `view_strides`, `shares_storage`, `shares_memory`, `storage_bytes`, `allocated_bytes`, `writable`, `sliding_windows`, `batch_diagonal`, `broadcast_shape`, `hwc_to_chw`, `padding_mask`, `merge_heads`, and one that puts it all on a few lines:

# %% tags=["nbval-check-output"]
print(kit.describe(torch.arange(24.0).view(2, 3, 4)[:, 1:].transpose(1, 2)))

# %% [markdown]
# | symptom | cause | test | cure |
# | --- | --- | --- | --- |
# | shapes right, images or heads scrambled | `reshape` or `view` where dimensions had to be renamed | one known colour or constant per channel, look at each plane | `permute` / `transpose`, then `reshape` |
# | a regression that predicts one value for all | (N, 1) meets (N,) | `assert prediction.shape == target.shape` | `squeeze(1)` or `unsqueeze(1)` |
# | a write changes other rows | `expand`, stride 0 | `0 in x.stride()` | `clone()` before writing |
# | the data set changes while it is used | `from_numpy`, `.to()` or a view, and an in-place operation | `shares_memory(before, after)` | out-of-place operation, or `clone()` |
# | `view size is not compatible` | strides that do not merge | `view_strides(...)` | `reshape` if a copy is meant; else find who transposed |
# | a loop that copies | `contiguous()` or `reshape` of a transposed tensor inside it | `allocated_bytes(...)` | once before the loop, or an operation that takes strides |
# | a small slice keeps much memory or makes a large file | views keep the whole storage | `storage_bytes(x)` against `x.nbytes` | `clone()` |
# | a histogram that is too small | repeated indices in `x[i] += 1` | compare with `bincount` | `index_add_`, `bincount` |
#
# **What the articles say, and what you have seen**
#
# | claim | verdict |
# | --- | --- |
# | a tensor is a storage plus shape, stride and offset (T01); contiguous (4, 6) has stride (6, 1) (T06); strides explain what is free (T09) | holds |
# | `view()` needs a contiguous tensor (T02) | it needs strides that merge |
# | `reshape()` of a non-contiguous tensor copies (T03) | only where no view exists |
# | `reshape` in a loop allocates each time (T04) | for a layout that no view fits: yes, all bytes, at each call |
# | prefer `view()`, so that a hidden copy becomes an error (T05) | holds |
# | `expand()` copies nothing (T07) | holds |
# | writing into an expanded tensor fails or misbehaves (T08) | it writes through, raises or passes, by kind of operation |
# | `torch.Tensor()` is an empty float tensor (T10) | of a list it has data; of an integer it has that many unset elements |
# | `from_numpy` converts (T11) | it shares, and keeps float64 |
# | mixing devices raises (T12) | not for a zero-dimensional CPU tensor |
# | `.to(device)` copies (T13) | or returns the tensor itself |
# | `pin_memory` with `non_blocking` overlaps copy and compute (T14) | both are needed, and reading too early on the way back is wrong |
# | broadcasting must be understood (T15) | holds: it asks nothing |
# | NCHW needs `permute` or `reshape` (T16) | `permute`; `reshape` scrambles |
# | a GPU tensor must go to the CPU to be printed (T17) | no; `.numpy()` needs it |
# | *beyond the articles:* `flip` copies (T18); a slice saves its whole storage (T19); `reshape` writes through or not (T20); `clone` keeps strides and the first operand decides (T21); overlapping windows slip past the guard (T22); `x[i] += 1` counts repeated indices once (T23) | seen |
#
# For more: [Tensor views](https://pytorch.org/docs/stable/tensor_view.html) lists every view operation; [Broadcasting semantics](https://pytorch.org/docs/stable/notes/broadcasting.html) has the rule in full;
# [A guide on good usage of non_blocking and pin_memory](https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html) measures pinned and pageable copies at length.
#
# Next: lesson 02, what autograd keeps of all this, and when it lets go.
