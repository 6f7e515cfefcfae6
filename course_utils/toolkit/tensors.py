"""Tensors as memory: where elements lie, what is shared, what a view can do, what an operation allocates.

Strides and offsets count elements, as in PyTorch; sizes of memory count bytes. Nothing here reads or changes a tensor's
values; what needs more memory than its result says so.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# ── Where the elements lie ────────────────────────────────────────────────────────────────────────────────────────────


def contiguous_strides(shape):
    """Strides of a contiguous tensor of this shape, in elements: what `torch.empty(shape).stride()` gives.

    The last dimension has stride 1, and each other steps over all that lies to its right. A size of 0 counts as 1.

    >>> contiguous_strides((4, 6))
    (6, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def element_offset(index, strides, offset=0):
    """Position in the storage, in elements, of the element at `index`: one non-negative number for each stride.

    `offset` is the tensor's `storage_offset()`. Raises ValueError where `index` and `strides` differ in length.

    >>> element_offset((2, 1), strides=(6, 1))
    13
    """
    return offset + sum(i * stride for i, stride in zip(index, strides, strict=True))


def broadcast_shape(a, b):
    """Shape of the result when shapes `a` and `b` meet in one operation, as a tuple.

    Sizes are aligned at the right, a missing one counts as 1, and a size of 1 takes the other's size (even 0).
    Raises ValueError where two sizes differ and neither is 1.

    >>> broadcast_shape((5, 1), (4,))
    (5, 4)
    """
    length = max(len(a), len(b))
    pairs = zip((1,) * (length - len(a)) + tuple(a), (1,) * (length - len(b)) + tuple(b), strict=True)
    result = []
    for m, n in pairs:
        if m != n and m != 1 and n != 1:
            raise ValueError(f"shapes {tuple(a)} and {tuple(b)} do not broadcast: {m} meets {n}")
        result.append(n if m == 1 else m)
    return tuple(result)


def view_strides(shape, strides, new_shape):
    """Strides that `view(new_shape)` gives a tensor with this shape and these strides; None where view raises.

    Dimensions that one step walks through form a run, and a view may divide a run but not cross from one into the next.
    Strides of size-1 and of empty dimensions are those that PyTorch gives, too (its rule is `computeStride` in
    aten/src/ATen/TensorUtils.cpp). Raises ValueError where the number of elements differs or a size is negative: there
    is no -1 here.

    >>> view_strides((4, 6), (6, 1), (2, 2, 6))
    (12, 6, 1)
    >>> view_strides((6, 4), (1, 6), (24,)) is None
    True
    """
    shape, strides, new_shape = tuple(shape), tuple(strides), tuple(new_shape)
    elements = torch.Size(shape).numel()
    if torch.Size(new_shape).numel() != elements or min(new_shape, default=0) < 0:
        raise ValueError(f"shape {new_shape} does not hold the {elements} elements of shape {shape}")
    if elements == 0:
        return strides if new_shape == shape else torch.empty(new_shape, device="meta").stride()

    runs = []  # [elements, stride] of each run, the rightmost first
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if runs and (size == 1 or stride == runs[-1][0] * runs[-1][1]):
            runs[-1][0] *= size
        else:
            runs.append([size, stride])

    result, sizes = [], list(new_shape)
    for length, stride in runs or [[1, 1]]:
        filled = 1
        while sizes and (filled < length or sizes[-1] == 1):
            result.append(filled * stride)
            filled *= sizes.pop()
        if filled != length:
            return None
    return tuple(reversed(result))


# ── Who shares memory with whom ───────────────────────────────────────────────────────────────────────────────────────


def shares_storage(a, b):
    """Do two tensors share one storage, whichever parts of it they show?

    Empty storages share nothing, and neither do tensors on the meta device, which have no memory. Two halves of one
    storage share it; whether they touch the same bytes is what `shares_memory` answers.
    """
    first, second = a.untyped_storage(), b.untyped_storage()
    return first.nbytes() > 0 and first.data_ptr() == second.data_ptr() != 0  # 0: no memory


def shares_memory(a, b):
    """Is there a byte that belongs to both tensors, so that writing one can change the other?

    Exact, whatever the dtypes, strides and storages (two `torch.from_numpy` on one array overlap). The bytes of one are
    marked and looked up for the other: where the address ranges meet, that takes one byte of CPU memory for each byte
    from the first to the last.
    """
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    start, end = min(a.data_ptr(), b.data_ptr()), max(_end(a), _end(b))
    if _end(a) <= b.data_ptr() or _end(b) <= a.data_ptr():
        return False
    marks = torch.zeros(end - start, dtype=torch.bool)
    _bytes_of(a, marks, start).fill_(True)
    return bool(_bytes_of(b, marks, start).any())


def _end(x):
    """Address after the last byte of a tensor with elements; no stride is negative, so `data_ptr()` is the first."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (steps + 1) * x.itemsize


def _bytes_of(x, marks, start):
    """The bytes of `x`, as a view of `marks`, which holds one element for each byte from address `start` on."""
    # a dimension of stride 0 repeats the same bytes: once is enough
    shape = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    strides = [stride * x.itemsize for stride in x.stride()]
    return marks.as_strided((*shape, x.itemsize), (*strides, 1), x.data_ptr() - start)


def storage_bytes(*tensors):
    """Bytes of the storages under these tensors, each storage once and as a whole, however little of it is shown.

    Tensors on the meta device have no memory and count 0. Raises NotImplementedError for sparse tensors.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() != 0}.values())


def writable(x):
    """`x` where every element has its own memory, otherwise a contiguous copy with the same values.

    For the answer alone it takes 8 bytes for each element from the first to the last of `x` in its storage, and sorts.
    """
    if x.numel() == 0:
        return x
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    places = torch.arange(last + 1).as_strided(x.shape, x.stride())  # each element shows where it lies
    return x if places.unique().numel() == x.numel() else x.contiguous()


def describe(x):
    """A tensor as memory, in three lines of text: shape and dtype, layout, and the part of its storage that it shows.

    "a view" is said of what PyTorch itself remembers as one, which leaves out views of another dtype and those made in
    inference mode. Takes one byte of memory for each byte between the first and the last element.
    """
    formats = {"contiguous": torch.contiguous_format}
    if x.dim() in (4, 5):
        name = {4: "channels_last", 5: "channels_last_3d"}[x.dim()]
        formats[name] = getattr(torch, name)
    layout = [name for name, memory_format in formats.items() if x.is_contiguous(memory_format=memory_format)]
    touched = 0
    if x.numel():
        marks = torch.zeros(_end(x) - x.data_ptr(), dtype=torch.bool)
        _bytes_of(x, marks, x.data_ptr()).fill_(True)
        touched = int(marks.sum())
    view = ", as a view" if x._is_view() else ""
    repeats = f" ({x.numel()} elements in {touched // x.itemsize} places)" if touched < x.numel() * x.itemsize else ""
    return "\n".join(
        [
            f"shape {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}, on {x.device}",
            f"strides {x.stride()}, offset {x.storage_offset()}: {' and '.join(layout) or 'not contiguous'}",
            f"shows {touched} of the {x.untyped_storage().nbytes()} bytes of its storage{repeats}{view}",
        ]
    )


# ── Views that move nothing ───────────────────────────────────────────────────────────────────────────────────────────


def hwc_to_chw(image):
    """An image or a batch of images, (..., height, width, channels), as (..., channels, height, width): a view."""
    return image.movedim(-1, -3)


def sliding_windows(x, size, step=1):
    """All windows of `size` elements along the last dimension, `step` apart: a view, (..., n) → (..., windows, size).

    Overlapping windows share elements: read them, and copy before writing. Raises ValueError where no window fits.

    >>> sliding_windows(torch.arange(5), size=3, step=2)
    tensor([[0, 1, 2],
            [2, 3, 4]])
    """
    n = x.shape[-1]
    if not 1 <= size <= n or step < 1:
        raise ValueError(f"no windows of {size} elements, {step} apart, in {n} elements")
    *outer, inner = x.stride()
    return x.as_strided(
        (*x.shape[:-1], (n - size) // step + 1, size), (*outer, step * inner, inner), x.storage_offset()
    )


def batch_diagonal(x):
    """The diagonals of a batch of square matrices, (batch, n, n) → (batch, n): a view, so that writing goes through."""
    batch, n, _ = x.shape
    matrix, row, column = x.stride()
    return x.as_strided((batch, n), (matrix, row + column), x.storage_offset())


def merge_heads(context):
    """The heads of each token side by side: (batch, heads, tokens, dim) → (batch, tokens, heads * dim).

    Copies where the heads of a token do not lie side by side in memory already.
    """
    return context.transpose(1, 2).flatten(2)


def padding_mask(lengths, width):
    """True where a padded batch holds data: bool (batch, width); `lengths`, a list or tensor, decides the device."""
    lengths = torch.as_tensor(lengths)
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


# ── What an operation allocates ───────────────────────────────────────────────────────────────────────────────────────


def allocated_bytes(run):
    """Bytes of all tensors that PyTorch's operators make while `run()` executes, kept or not, on any device.

    Counts each new storage and each storage that grows, at its own size: an allocator may round up. Not seen: scratch
    memory inside one operator, sparse tensors, and data that enters without an operator (`torch.tensor`,
    `torch.from_numpy`, `copy.deepcopy`). The method is a TorchDispatchMode, which sees operators below autograd.
    The first call of a process takes a second longer: PyTorch loads a part of itself.
    """
    with _Allocations() as seen:
        run()
    return seen.bytes


class _Allocations(TorchDispatchMode):
    """Sees every operator call below autograd, where a result whose storage no argument has is a new allocation."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = _storage_sizes((args, kwargs))
        result = func(*args, **(kwargs or {}))
        self.bytes += sum(max(0, size - before.get(key, 0)) for key, size in _storage_sizes(result).items())
        return result


def _storage_sizes(values):
    """{identity: bytes} of the storages among the values. An address would not do: empty and meta storages share 0."""
    leaves = tree_leaves(values)
    storages = [
        leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
    storages += [leaf for leaf in leaves if isinstance(leaf, torch.UntypedStorage)]
    return {storage._cdata: storage.nbytes() for storage in storages}
