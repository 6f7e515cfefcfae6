import functools
import itertools
import math
import operator
import warnings

import numpy as np
import torch
import torch.nn.functional as F

from course_utils.toolkit.tensors import shares_memory
from exercise_answers import broken, right, wrong

# ── element_offset ────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("element_offset", "offset is missing")
def forgets_the_offset(index, strides, offset=0):
    return sum(i * s for i, s in zip(index, strides))


@wrong("element_offset", "wrong end")
def reversed_strides(index, strides, offset=0):
    place = offset
    for i, s in zip(index, reversed(strides)):
        place += i * s
    return place


@wrong("element_offset", "value differs")
def adds_index_and_stride(index, strides, offset=0):
    return offset + sum(i + s for i, s in zip(index, strides))


@right("element_offset")
def by_numpy(index, strides, offset=0):
    return int(np.dot(np.array(index, dtype=int), np.array(strides, dtype=int))) + offset


@right("element_offset")
def by_a_view(index, strides, offset=0):
    shape = [i + 1 for i in index]
    return torch.arange(1000).as_strided(shape, strides, offset)[tuple(index)].item()


@right("element_offset")
def recursively(index, strides, offset=0):
    return recursively(index[1:], strides[1:], offset + index[0] * strides[0]) if index else offset


# ── contiguous_strides ────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("contiguous_strides", "left to right")
def as_fortran_does(shape):
    strides, step = [], 1
    for size in shape:
        strides.append(step)
        step *= size
    return tuple(strides)


@wrong("contiguous_strides", "order is reversed")
def forgets_to_turn_round(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(strides)


@wrong("contiguous_strides", "wipes out")
def a_zero_multiplies(shape):
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


@wrong("contiguous_strides", "PyTorch's strides count elements")
def in_bytes(shape):
    return np.zeros(shape, dtype=np.float32).strides


@wrong("contiguous_strides", "not the next size alone")
def next_size(shape):
    return tuple([*shape[1:], 1]) if shape else ()


@wrong("contiguous_strides", "tuple(...)")
def a_list(shape):
    return [math.prod(max(s, 1) for s in shape[i + 1 :]) for i in range(len(shape))]


@right("contiguous_strides")
def asks_torch(shape):
    return torch.empty(shape, device="meta").stride()


@right("contiguous_strides")
def accumulated(shape):
    sizes = [max(s, 1) for s in shape][:0:-1]
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1] if shape else ()


@right("contiguous_strides")
def products(shape):
    return tuple(functools.reduce(operator.mul, (s if s else 1 for s in shape[i + 1 :]), 1) for i in range(len(shape)))


# ── shares_storage ────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("shares_storage", "*first element*")
def first_addresses(a, b):
    return a.data_ptr() == b.data_ptr()


@wrong("shares_storage", "with `is` or `==`, finds no sharing")
def identity(a, b):
    return a is b


@wrong("shares_storage", "Comparing values")
def equality(a, b):
    return torch.equal(a, b)


@wrong("shares_storage", "address of 0 means")
def nothing_at_address_0(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@wrong("shares_storage", "without one being the base")
def by_base(a, b):
    return b._base is a or a._base is b


@wrong("shares_storage", "An int came")
def a_number(a, b):
    return a.untyped_storage().nbytes() * (a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


@wrong("shares_storage", "a view of another dtype has no base")
def by_root(a, b):
    return (a if a._base is None else a._base) is (b if b._base is None else b._base)


@wrong("shares_storage", "not about touching the same bytes")
def same_bytes(a, b):
    return shares_memory(a, b)


@wrong("shares_storage", "not about touching the same bytes")
def same_bytes_by_numpy(a, b):
    return a.dtype != b.dtype or np.shares_memory(a.numpy(), b.numpy())


@wrong("shares_storage", "two halves of one storage")
def overlapping_ranges(a, b):
    return a.dtype != b.dtype or np.may_share_memory(a.numpy(), b.numpy())


@wrong("shares_storage", "even and odd places")
def shared_or_adjacent(a, b):
    return shares_memory(a, b) or a.data_ptr() + a.nbytes == b.data_ptr()


@wrong("shares_storage", "of the same size are still two")
def same_size(a, b):
    return a.untyped_storage().nbytes() == b.untyped_storage().nbytes()


@wrong("shares_storage", "makes a new object at each call")
def storage_objects(a, b):
    with warnings.catch_warnings(action="ignore"):  # deprecated, and found in many old answers
        return a.storage() == b.storage()


@right("shares_storage")
def by_equal_storages(a, b):
    return a.untyped_storage() == b.untyped_storage()


@right("shares_storage")
def by_storage_object(a, b):
    return len(a.untyped_storage()) > 0 and a.untyped_storage()._cdata == b.untyped_storage()._cdata


@right("shares_storage")
def not_empty_and_one_address(a, b):
    if a.untyped_storage().nbytes() == 0:
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@right("shares_storage")
def storages_as_sets(a, b):
    return bool({a.untyped_storage().data_ptr()} & {b.untyped_storage().data_ptr()} - {0})


# ── storage_bytes ─────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("storage_bytes", "what each tensor *shows*")
def shown(*tensors):
    return sum(t.nbytes for t in tensors)


@wrong("storage_bytes", "counted once for each of them")
def not_once(*tensors):
    total = 0
    for t in tensors:
        total += t.untyped_storage().nbytes()
    return total


@wrong("storage_bytes", "slices of one storage begin at different")
def by_first_address(*tensors):
    seen, total = set(), 0
    for t in tensors:
        if t.data_ptr() not in seen:
            seen.add(t.data_ptr())
            total += t.untyped_storage().nbytes()
    return total


@wrong("storage_bytes", "ask the storage for nbytes()")
def shown_of_each_storage(*tensors):
    return sum({t.untyped_storage().data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


@wrong("storage_bytes", "told apart by their size")
def by_size(*tensors):
    return sum({t.untyped_storage().nbytes() for t in tensors})


@wrong("storage_bytes", "Compare with all that have been seen")
def unlike_the_one_before(*tensors):
    total, before = 0, None
    for t in tensors:
        storage = t.untyped_storage()
        if storage.data_ptr() != before:
            total += storage.nbytes()
        before = storage.data_ptr()
    return total


@wrong("storage_bytes", "two storages alternate")
def unlike_the_first(*tensors):
    storages = [t.untyped_storage() for t in tensors]
    others = [s.nbytes() for s in storages[1:] if s.data_ptr() != storages[0].data_ptr()]
    return sum(others, storages[0].nbytes() if storages else 0)


@wrong("storage_bytes", "touch the same bytes")
def unless_bytes_are_shared(*tensors):
    total = 0
    for i, t in enumerate(tensors):
        if not any(shares_memory(t, other) for other in tensors[:i]):
            total += t.untyped_storage().nbytes()
    return total


@right("storage_bytes")
def one_by_one(*tensors):
    seen, total = [], 0
    for t in tensors:
        address = t.untyped_storage().data_ptr()
        if address not in seen:
            seen.append(address)
            total += len(t.untyped_storage())
    return total


@right("storage_bytes")
def grouped(*tensors):
    def address(storage):
        return storage.data_ptr()

    storages = sorted((t.untyped_storage() for t in tensors), key=address)
    return sum(next(group).nbytes() for _, group in itertools.groupby(storages, address))


# ── hwc_to_chw ────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("hwc_to_chw", "the picture is scrambled")
def reshaped(image):
    *batch, h, w, c = image.shape
    return image.reshape(*batch, c, h, w)


@wrong("hwc_to_chw", "mirrored along its diagonal")
def transposed(image):
    return image.transpose(-3, -1)


@wrong("hwc_to_chw", "Channels and width have changed places")
def half_way(image):
    return image.transpose(-1, -2)


@wrong("hwc_to_chw", "a copy")
def made_contiguous(image):
    return torch.movedim(image, -1, -3).contiguous()


@wrong("hwc_to_chw", "permute names every dimension")
def one_image_alone(image):
    return image.permute(2, 0, 1)


@wrong("hwc_to_chw", "permute names every dimension")
def one_image_or_one_batch(image):
    return image.permute(2, 0, 1) if image.dim() == 3 else image.permute(0, 3, 1, 2)


@wrong("hwc_to_chw", "The shape is (4, 2, 3)")
def height_and_width_swapped(image):
    return image.transpose(-2, -3)


@wrong("hwc_to_chw", "opposite move")
def first_to_the_end(image):
    return image.movedim(-3, -1)


@right("hwc_to_chw")
def einstein(image):
    return torch.einsum("...hwc->...chw", image)


@right("hwc_to_chw")
def two_swaps(image):
    return image.transpose(-1, -2).transpose(-2, -3)


@right("hwc_to_chw")
def strided(image):
    *batch, h, w, c = image.shape
    *outer, sh, sw, sc = image.stride()
    return torch.as_strided(image, (*batch, c, h, w), (*outer, sc, sh, sw))


# ── writable ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("writable", "costs time and bytes for nothing")
def always_copies(x):
    return x.clone()


@wrong("writable", "still no two of its elements share a place")
def only_contiguous(x):
    return x if x.is_contiguous() else x.contiguous()


@wrong("writable", "windows made by `unfold`")
def looks_for_zero(x):
    return x.clone() if any(s == 0 for s in x.stride()) else x


@wrong("writable", "return x itself")
def always_makes_its_own(x):
    return x.clone(memory_format=torch.contiguous_format)


@wrong("writable", "storage is large enough")
def looks_at_the_storage(x):
    return x.contiguous() if x.untyped_storage().nbytes() < x.nbytes else x


@wrong("writable", "values are compared")
def looks_at_the_values(x):
    return x if torch.unique(x).numel() == x.numel() else x.contiguous().clone()


@wrong("writable", "strides (2, 1)")
def looks_for_zero_or_repeated(x):
    strides = [s for n, s in zip(x.shape, x.stride()) if n != 1]
    return x.contiguous() if 0 in strides or len(strides) > len(set(strides)) else x


@wrong("writable", "several elements in one place")
def hopes(x):
    return x


@right("writable")
def by_a_set(x):
    places = {sum(i * s for i, s in zip(index, x.stride())) for index in itertools.product(*map(range, x.shape))}
    return x if len(places) == x.numel() else x.clone(memory_format=torch.contiguous_format)


@right("writable")
def by_marking(x):
    span = sum(max(n - 1, 0) * s for n, s in zip(x.shape, x.stride())) + 1
    marks = torch.zeros(span, dtype=torch.int32)
    marks.as_strided(x.shape, x.stride()).fill_(1)
    return x if marks.sum() == x.numel() else x.contiguous()


@right("writable")
def by_numpy_indices(x):
    places = np.zeros(x.shape, dtype=int)
    for axis, stride in enumerate(x.stride()):
        places += stride * np.indices(x.shape)[axis]
    return x.view_as(x) if len(np.unique(places)) == x.numel() else torch.tensor(x.tolist(), dtype=x.dtype)


# ── sliding_windows ───────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("sliding_windows", "neighbours lie side by side")
def inner_stride_of_1(x, size, step=1):
    windows = (x.size(-1) - size) // step + 1
    return x.as_strided(x.shape[:-1] + (windows, size), x.stride()[:-1] + (step, 1))


@wrong("sliding_windows", "start of the *storage*")
def storage_start(x, size, step=1):
    windows, s = (x.size(-1) - size) // step + 1, x.stride(-1)
    return x.as_strided(x.shape[:-1] + (windows, size), x.stride()[:-1] + (step * s, s), 0)


@wrong("sliding_windows", "One window is missing")
def one_too_few(x, size, step=1):
    return x.unfold(-1, size, step)[..., :-1, :]


@wrong("sliding_windows", "Each window must begin `step` elements after")
def always_by_one(x, size, step=1):
    windows, s = (x.size(-1) - size) // step + 1, x.stride(-1)
    return x.as_strided(x.shape[:-1] + (windows, size), x.stride()[:-1] + (s, s))


@wrong("sliding_windows", "a copy")
def stacked(x, size, step=1):
    return torch.stack([x[..., i : i + size] for i in range(0, x.shape[-1] - size + 1, step)], dim=-2)


@wrong("sliding_windows", "two dimensions stand in front")
def one_signal_or_one_batch(x, size, step=1):
    windows, s = (x.size(-1) - size) // step + 1, x.stride(-1)
    if x.dim() == 1:
        return x.as_strided((windows, size), (step * s, s))
    return x.as_strided((len(x), windows, size), (x.stride(0), step * s, s))


@wrong("sliding_windows", "reaches past the end of its storage")
def a_window_too_many(x, size, step=1):
    windows, s = (x.size(-1) - size) // step + 2, x.stride(-1)
    return x.as_strided((*x.shape[:-1], windows, size), (*x.stride()[:-1], step * s, s))


@wrong("sliding_windows", "The shape is")
def one_signal_alone(x, size, step=1):
    return x.as_strided(((len(x) - size) // step + 1, size), (step * x.stride(-1), x.stride(-1)))


@right("sliding_windows")
def unfolded(x, size, step=1):
    return x.unfold(-1, size, step)


@right("sliding_windows")
def every_window_then_a_slice(x, size, step=1):
    s = x.stride(-1)
    every = x.as_strided((*x.shape[:-1], x.shape[-1] - size + 1, size), (*x.stride(), s))
    return every[..., ::step, :]


# ── batch_diagonal ────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("batch_diagonal", "n + 1 for a diagonal")
def for_contiguous_ones(x):
    b, n, _ = x.shape
    return x.as_strided((b, n), (n * n, n + 1), x.storage_offset())


@wrong("batch_diagonal", "start of the storage")
def without_offset(x):
    b, n, _ = x.shape
    return torch.as_strided(x, (b, n), (x.stride(0), x.stride(1) + x.stride(2)), 0)


@wrong("batch_diagonal", "dim1=-2, dim2=-1")
def default_dimensions(x):
    return torch.diagonal(x)


@wrong("batch_diagonal", "a copy")
def by_indexing(x):
    i = torch.arange(x.shape[-1])
    return x[:, i, i]


@wrong("batch_diagonal", "a copy")
def matrix_by_matrix(x):
    return torch.stack([m.diag() for m in x]) if len(x) else x.new_zeros(0, x.shape[-1])


@right("batch_diagonal")
def torchs_own(x):
    return torch.diagonal(x, dim1=-2, dim2=-1)


@right("batch_diagonal")
def einstein_diagonal(x):
    return torch.einsum("bii->bi", x)


@right("batch_diagonal")
def linalg(x):
    return torch.linalg.diagonal(x)


# ── broadcast_shape ───────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("broadcast_shape", "aligned at the left")
def left_aligned(a, b):
    result = []
    for m, n in itertools.zip_longest(a, b, fillvalue=1):
        if m != n and m != 1 and n != 1:
            raise ValueError("they do not fit")
        result.append(n if m == 1 else m)
    return tuple(result)


@wrong("broadcast_shape", "lets 2 meet 3")
def larger_unchecked(a, b):
    pairs = itertools.zip_longest(reversed(a), reversed(b), fillvalue=1)
    return tuple(max(m, n) for m, n in pairs)[::-1]


@wrong("broadcast_shape", "a 1 that meets a 0 becomes 0")
def larger_checked(a, b):
    result = []
    for m, n in itertools.zip_longest(reversed(a), reversed(b), fillvalue=1):
        if m != n and 1 not in (m, n):
            raise ValueError
        result.insert(0, max(m, n))
    return tuple(result)


@wrong("broadcast_shape", "neither is 1")
def never_refuses(a, b):
    pairs = itertools.zip_longest(reversed(a), reversed(b), fillvalue=1)
    return tuple(n if m == 1 else m for m, n in pairs)[::-1]


@wrong("broadcast_shape", "zip` stops")
def bare_zip(a, b):
    return tuple(max(m, n) for m, n in zip(a, b))


@wrong("broadcast_shape", "raise it, do not return it")
def gives_the_error_back(a, b):
    try:
        return numpys(a, b)
    except ValueError as error:
        return error


@wrong("broadcast_shape", "raise it, do not return it")
def gives_the_class_back(a, b):
    try:
        return numpys(a, b)
    except ValueError:
        return ValueError


@wrong("broadcast_shape", "raised RuntimeError")
def another_error(a, b):
    return tuple(torch.broadcast_shapes(a, b))


@right("broadcast_shape")
def by_expanding(a, b):
    try:
        x, y = torch.broadcast_tensors(torch.empty(a, device="meta"), torch.empty(b, device="meta"))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return x.shape


@right("broadcast_shape")
def numpys(a, b):
    return np.broadcast_shapes(a, b)


@right("broadcast_shape")
def recursive_from_the_right(a, b):
    if not a or not b:
        return tuple(a or b)
    sizes = {a[-1], b[-1]} - {1}
    if len(sizes) > 1:
        raise ValueError(f"{a[-1]} meets {b[-1]}")
    return (*recursive_from_the_right(a[:-1], b[:-1]), *(sizes or {1}))


# ── view_strides ──────────────────────────────────────────────────────────────────────────────────────────────────────


def check_elements(shape, new_shape):
    if math.prod(shape) != math.prod(new_shape):
        raise ValueError("another number of elements")


def strides_of(shape):
    return torch.empty(shape, device="meta").stride()


@wrong("view_strides", "only dimensions that are *merged*")
def needs_contiguous(shape, strides, new_shape):
    check_elements(shape, new_shape)
    if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
        return None
    return strides_of(new_shape)


@wrong("view_strides", "old strides")
def like_new(shape, strides, new_shape):
    check_elements(shape, new_shape)
    return strides_of(new_shape)


@wrong("view_strides", "each run has a stride of its own")
def scaled_by_the_last(shape, strides, new_shape):
    check_elements(shape, new_shape)
    last = strides[-1] if strides else 1
    return tuple(last * s for s in strides_of(new_shape))


@wrong("view_strides", "none are merged")
def splits_only(shape, strides, new_shape):
    check_elements(shape, new_shape)
    new, result = list(new_shape), []
    for size, stride in reversed(list(zip(shape, strides))):
        done = 1
        while new and done < size:
            result.insert(0, done * stride)
            done *= new.pop()
        if done != size:
            return None
    return (1,) * len(new) + tuple(result)


@wrong("view_strides", "size 1 ends no run")
def ones_end_a_run(shape, strides, new_shape):
    check_elements(shape, new_shape)
    if 0 in shape:
        return strides_of(new_shape)
    runs = []
    for size, stride in zip(shape, strides):
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    result, new = [], list(new_shape)
    for size, stride in reversed(runs or [(1, 1)]):
        done = 1
        while new and (done < size or new[-1] == 1):
            result.append(done * stride)
            done *= new.pop()
        if done != size:
            return None
    return tuple(result[::-1])


@wrong("view_strides", "has become the stride of a run")
def a_one_begins_a_run(shape, strides, new_shape):
    check_elements(shape, new_shape)
    if 0 in shape:
        return strides_of(new_shape)
    runs = []
    for n, s in reversed(list(zip(shape, strides))):
        if runs and (n == 1 or runs[-1][0] == 1 or s == runs[-1][0] * runs[-1][1]):
            runs[-1][0] *= n
        else:
            runs.append([n, s])
    result, new = [], list(new_shape)
    for size, stride in runs or [[1, 1]]:
        done = 1
        while new and (done < size or new[-1] == 1):
            result.append(done * stride)
            done *= new.pop()
        if done != size:
            return None
    return tuple(result[::-1])


@wrong("view_strides", "None came where a tuple was expected")
def gives_up(shape, strides, new_shape):
    return None


@wrong("view_strides", "is an error: ValueError")
def none_for_other_sizes(shape, strides, new_shape):
    try:
        return torch.empty_strided(shape, strides).view(new_shape).stride()
    except RuntimeError:
        return None


@wrong("view_strides", "tuple(...)")
def gives_a_list(shape, strides, new_shape):
    return list(strides_of(new_shape))


@right("view_strides")
def torch_knows(shape, strides, new_shape):
    check_elements(shape, new_shape)
    try:
        return torch.empty_strided(shape, strides, device="meta").view(new_shape).stride()
    except (RuntimeError, ValueError):
        return None


@right("view_strides")
def by_trying_every_place(shape, strides, new_shape):
    """From the definition: list the places in order, read the strides off, and see whether they explain all places."""
    check_elements(shape, new_shape)
    places = [sum(i * s for i, s in zip(index, strides)) for index in itertools.product(*map(range, shape))]
    if not places:
        return strides_of(new_shape)
    steps = strides_of(new_shape)
    result = tuple(places[step] - places[0] if size > 1 else 0 for size, step in zip(new_shape, steps))
    walked = [sum(i * s for i, s in zip(index, result)) for index in itertools.product(*map(range, new_shape))]
    return result if walked == places else None


@right("view_strides")
def numpy_knows(shape, strides, new_shape):
    check_elements(shape, new_shape)
    base = np.lib.stride_tricks.as_strided(np.zeros(1, dtype=np.uint8), shape, strides)
    try:
        return np.reshape(base, new_shape, copy=False).strides
    except ValueError:
        return None


# ── the clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────

broken("fit_line", "broadcasts to (N, N)")
broken("planes", "colours are scrambled")
broken("padding_mask", "repeated by `expand`")
broken("standardise", "changed its input")
broken("projections", "40.")
broken("merge_heads", "view size is not compatible")


def descend(x, y, loss_of, steps=200, rate=0.1):
    parameters = torch.zeros(2, requires_grad=True)
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(loss_of(parameters[0] * x + parameters[1], y), parameters)
        parameters = (parameters - rate * gradient).detach().requires_grad_()
    return tuple(parameters.tolist())


@wrong("fit_line", "every prediction is compared with every target")
def target_as_column(x, y, steps=200, rate=0.1):
    return descend(x, y.unsqueeze(1), lambda prediction, target: ((prediction - target) ** 2).mean(), steps, rate)


@wrong("fit_line", "changed places")
def bias_first(x, y, steps=200, rate=0.1):
    weight, bias = descend(x, y, F.mse_loss, steps, rate)
    return bias, weight


@wrong("fit_line", "tuple of two floats")
def as_tensors(x, y, steps=200, rate=0.1):
    return tuple(torch.tensor(v) for v in descend(x, y, F.mse_loss, steps, rate))


@wrong("fit_line", "least-squares line has weight 3.000 and bias 1.000, and 200 steps")
def too_few_steps(x, y, steps=200, rate=0.1):
    return descend(x, y, F.mse_loss, 5, rate)


@wrong("fit_line", "come within 0.001")
def too_small_a_rate(x, y, steps=200, rate=0.1):
    return descend(x, y, F.mse_loss, steps, rate / 10)


@wrong("fit_line", "rate times gradient is too large")
def the_sum_of_squares(x, y, steps=200, rate=0.1):
    return descend(x, y, lambda prediction, target: ((prediction - target) ** 2).sum(), steps, rate)


@wrong("fit_line", "The call changed its input: y: the shape is (50, 1), expected (50,)")
def target_unsqueezed_in_place(x, y, steps=200, rate=0.1):
    return descend(x.unsqueeze(1), y.unsqueeze_(1), F.mse_loss, steps, rate)


@right("fit_line")
def target_unsqueezed(x, y, steps=200, rate=0.1):
    return descend(x.unsqueeze(1), y.unsqueeze(1), F.mse_loss, steps, rate)


@right("fit_line")
def normal_equations(x, y, steps=200, rate=0.1):
    weight = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return weight.item(), (y.mean() - weight * x.mean()).item()


@right("fit_line")
def by_polyfit(x, y, steps=200, rate=0.1):
    weight, bias = np.polyfit(x.numpy(), y.numpy(), 1)
    return float(weight), float(bias)


@wrong("planes", "colours are scrambled")
def plane_after_plane(rows, height, width):
    return rows.reshape(-1, 3, height, width).float() / 255


@wrong("planes", "Width comes before height")
def permuted_too_far(rows, height, width):
    return rows.view(len(rows), height, width, 3).permute(0, 3, 2, 1) / 255


@wrong("planes", "rows of the wrong length")
def cut_by_width(rows, height, width):
    return rows.view(len(rows), width, height, 3).permute(0, 3, 2, 1) / 255


@wrong("planes", "divide by 255")
def not_scaled(rows, height, width):
    return rows.view(len(rows), height, width, 3).permute(0, 3, 1, 2).float()


@wrong("planes", "dtype")
def left_as_bytes(rows, height, width):
    return rows.view(len(rows), height, width, 3).permute(0, 3, 1, 2)


@right("planes")
def colour_by_colour(rows, height, width):
    return torch.stack([rows[:, c::3].view(len(rows), height, width) for c in range(3)], dim=1).float() / 255


@right("planes")
def with_a_free_size(rows, height, width):
    return rows.reshape(-1, height, width, 3).movedim(-1, 1).float() / 255


@right("planes")
def through_numpy(rows, height, width):
    array = np.moveaxis(rows.numpy().reshape(len(rows), height, width, 3), -1, 1)
    return torch.from_numpy(array.astype(np.float32) / np.float32(255))


@right("planes")
def transposed_pixels(rows, height, width):
    return rows.unflatten(1, (height * width, 3)).transpose(1, 2).unflatten(2, (height, width)).mul(1 / 255)


@wrong("padding_mask", "inverted")
def true_where_padded(lengths, width):
    return torch.arange(width) >= torch.as_tensor(lengths)[:, None]


@wrong("padding_mask", "One position too many")
def one_too_many(lengths, width):
    return torch.arange(width) <= torch.as_tensor(lengths)[:, None]


@wrong("padding_mask", "Every row shows the shortest length")
def through_a_broadcast(lengths, width):
    mask = torch.broadcast_to(torch.ones(width, dtype=torch.bool), (len(lengths), width))
    for row, n in zip(mask, lengths):
        row[n:] = False
    return mask


@wrong("padding_mask", "dtype")
def as_numbers(lengths, width):
    return (torch.arange(width) < torch.as_tensor(lengths)[:, None]).float()


@right("padding_mask")
def repeated_rows(lengths, width):
    mask = torch.ones(width, dtype=torch.bool).repeat(len(lengths), 1)
    for i, n in enumerate(lengths):
        mask[i, n:] = False
    return mask


@right("padding_mask")
def from_lists(lengths, width):
    return torch.tensor([[k < n for k in range(width)] for n in lengths])


@right("padding_mask")
def stacked_rows(lengths, width):
    return torch.stack([torch.arange(width) < n for n in lengths])


@right("padding_mask")
def by_counting(lengths, width):
    return torch.ones(len(lengths), width).cumsum(1) <= torch.as_tensor(lengths).view(-1, 1)


@wrong("standardise", "caller's array is changed")
def by_methods(array):
    tensor = torch.as_tensor(array)
    tensor.sub_(tensor.mean())
    return tensor.div_(tensor.std())


@wrong("standardise", "torch.Tensor` shares a float32 array's memory")
def by_the_class(array):
    tensor = torch.Tensor(array)
    tensor -= tensor.mean()
    tensor /= tensor.std()
    return tensor


@wrong("standardise", "caller's array is changed")
def in_the_array(array):
    array -= array.mean()
    array /= array.std(ddof=1)
    return torch.tensor(array)


@wrong("standardise", "numpy's std divides by N")
def by_numpys_std(array):
    return torch.from_numpy((array - array.mean()) / array.std())


@wrong("standardise", "divides by the variance")
def by_the_variance(array):
    tensor = torch.tensor(array)
    return (tensor - tensor.mean()) / tensor.var()


@wrong("standardise", "dtype")
def in_double(array):
    tensor = torch.tensor(array, dtype=torch.float64)
    return (tensor - tensor.mean()) / tensor.std()


@wrong("standardise", "elements differ")
def mean_alone(array):
    tensor = torch.tensor(array)
    return tensor - tensor.mean()


@right("standardise")
def copied_first(array):
    tensor = torch.tensor(array)
    tensor -= tensor.mean()
    tensor /= tensor.std()
    return tensor


@right("standardise")
def by_numpy_with_ddof(array):
    return torch.from_numpy((array - array.mean()) / array.std(ddof=1))


@right("standardise")
def by_std_mean(array):
    tensor = torch.from_numpy(array)
    std, mean = torch.std_mean(tensor)
    return tensor.sub(mean).mul(1 / std)


@wrong("projections", "do not transpose")
def reshaped_samples(x, weights):
    return torch.stack([w @ x.reshape(x.shape[1], x.shape[0]) for w in weights])


@wrong("projections", "changed places")
def one_row_a_sample(x, weights):
    return x @ weights.T


@wrong("projections", "allocates")
def cloned_each_time(x, weights):
    return torch.stack([w @ x.t().clone() for w in weights])


@wrong("projections", "allocates")
def all_products_at_once(x, weights):
    return (weights.unsqueeze(1) * x).sum(-1)


@right("projections")
def one_copy_before_the_loop(x, weights):
    columns = x.t().contiguous()
    return torch.stack([w @ columns for w in weights])


@right("projections")
def sample_side(x, weights):
    return torch.stack([x @ w for w in weights])


@right("projections")
def einstein_product(x, weights):
    return torch.einsum("nd,kd->kn", x, weights)


@right("projections")
def linear_then_transposed(x, weights):
    return F.linear(x, weights).t()


@wrong("merge_heads", "neighbouring *tokens*")
def without_transpose(context):
    b, h, t, d = context.shape
    return context.reshape(b, t, h * d)


@wrong("merge_heads", "dim before heads")
def dim_first(context):
    b, h, t, d = context.shape
    return context.permute(0, 2, 3, 1).reshape(b, t, h * d)


@wrong("merge_heads", "neighbouring *tokens*")
def contiguous_too_early(context):
    b, h, t, d = context.shape
    return context.contiguous().view(b, t, h * d)


@right("merge_heads")
def contiguous_then_view(context):
    b, h, t, d = context.shape
    return context.transpose(1, 2).contiguous().view(b, t, h * d)


@right("merge_heads")
def concatenated(context):
    return torch.cat(context.unbind(1), dim=-1)


@right("merge_heads")
def numpy_moved(context):
    b, h, t, d = context.shape
    return torch.from_numpy(np.moveaxis(context.numpy(), 1, 2).reshape(b, t, h * d))
