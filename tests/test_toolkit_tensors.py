"""The toolkit's tensor functions against PyTorch and numpy themselves, on thousands of random layouts."""

import doctest
import random

import numpy as np
import pytest
import torch

from course_utils.toolkit import tensors
from course_utils.toolkit.tensors import (
    allocated_bytes,
    batch_diagonal,
    broadcast_shape,
    contiguous_strides,
    describe,
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


def random_layout(rng):
    """A shape and strides as chains of transposes, slices, expands and odd hand-made strides leave them."""
    shape = [rng.choice([0, 1, 1, 2, 2, 3, 4, 6] if rng.random() < 0.15 else [1, 2, 2, 3, 4, 6]) for _ in range(rng.randrange(6))]
    strides = list(contiguous_strides(shape))
    kind = rng.randrange(5)
    if kind == 1:  # transposed
        order = rng.sample(range(len(shape)), len(shape))
        shape, strides = [shape[d] for d in order], [strides[d] for d in order]
    elif kind == 2:  # cut out of something wider
        for d in range(rng.randrange(len(shape) + 1)):
            strides[d] *= 2
    elif kind == 3:  # expanded
        strides = [0 if rng.random() < 0.5 else s for s in strides]
    elif kind == 4:
        strides = [rng.randrange(13) for _ in shape]
    return tuple(shape), tuple(rng.randrange(20) if n == 1 and rng.random() < 0.5 else s for n, s in zip(shape, strides))


def random_shape_of(elements, shape, rng):
    """Another shape with as many elements: neighbours merged, sizes divided, ones put in."""
    if elements == 0:
        new = [rng.randrange(4) for _ in range(rng.randrange(5))] + [0]
        rng.shuffle(new)
        return shape if rng.random() < 0.3 else tuple(new)
    new, bag = [], 1
    for size in shape:
        bag *= size
        if rng.random() < 0.6:
            new.append(bag)
            bag = 1
    new.append(bag)
    for d in range(len(new) - 1, -1, -1):
        factors = [f for f in range(2, new[d]) if new[d] % f == 0]
        if factors and rng.random() < 0.5:
            f = rng.choice(factors)
            new[d : d + 1] = [f, new[d] // f]
        if rng.random() < 0.2:
            new.insert(d, 1)
    return tuple(new)


def test_view_strides_agrees_with_torch():
    rng, seen = random.Random(0), {"views": 0, "refused": 0, "size 0": 0, "size 1": 0, "stride 0": 0, "scalar": 0}
    for _ in range(20_000):
        shape, strides = random_layout(rng)
        x = torch.empty_strided(shape, strides)
        new_shape = random_shape_of(x.numel(), shape, rng)
        try:
            expected = x.view(new_shape).stride()
        except RuntimeError:
            expected = None
        assert view_strides(shape, strides, new_shape) == expected, (shape, strides, new_shape)
        for name, true in [
            ("views", expected is not None),
            ("refused", expected is None),
            ("size 0", 0 in shape),
            ("size 1", 1 in shape),
            ("stride 0", 0 in strides),
            ("scalar", shape == ()),
        ]:
            seen[name] += true
    assert min(seen.values()) > 500, seen


@pytest.mark.parametrize("new_shape", [(5,), (), (-1,), (-2, -3), (0,)])
def test_view_strides_refuses_another_number_of_elements(new_shape):
    with pytest.raises(ValueError):
        view_strides((2, 3), (3, 1), new_shape)


def test_contiguous_strides_are_those_of_torch():
    rng = random.Random(1)
    for _ in range(2_000):
        shape = tuple(rng.randrange(4) for _ in range(rng.randrange(6)))
        assert contiguous_strides(shape) == torch.empty(shape).stride()
        assert contiguous_strides(torch.Size(shape)) == torch.empty(shape).stride()


def test_element_offset_finds_each_element():
    rng = random.Random(2)
    for _ in range(300):
        x = random_view(torch.arange(400), rng)
        for index in list(np.ndindex(*x.shape))[:20]:
            assert element_offset(index, x.stride(), x.storage_offset()) == x[index].item()
    with pytest.raises(ValueError):
        element_offset((1,), (3, 1))


def test_broadcast_shape_agrees_with_torch():
    rng, refused = random.Random(3), 0
    for _ in range(5_000):
        a, b = (tuple(rng.choice([0, 1, 1, 2, 2, 3]) for _ in range(rng.randrange(4))) for _ in "ab")
        try:
            expected = tuple(torch.broadcast_shapes(a, b))
        except RuntimeError:
            refused += 1
            with pytest.raises(ValueError, match="do not broadcast"):
                broadcast_shape(a, b)
        else:
            assert broadcast_shape(a, b) == expected
    assert 500 < refused < 4_500


def random_view(x, rng):
    """A random chain of views of x."""
    for _ in range(rng.randrange(5)):
        dim = rng.randrange(x.dim()) if x.dim() else 0
        action = rng.randrange(6)
        if x.dim() == 0 or (action == 0 and x.dim() < 4):
            x = x.unsqueeze(dim)
            x = x.expand(*(3 if d == dim else -1 for d in range(x.dim()))) if rng.random() < 0.5 else x
        elif action == 1:
            x = x.transpose(dim, rng.randrange(x.dim()))
        elif action == 2 and x.shape[dim] > 2 and x.dim() < 4:
            x = x.unfold(dim, 2, rng.randrange(1, 3))
        elif action == 3 and x.shape[dim]:
            x = x.select(dim, rng.randrange(x.shape[dim])) if x.dim() > 1 else x
        else:
            start = rng.randrange(x.shape[dim] + 1)
            x = x[(slice(None),) * dim + (slice(start, None, rng.randrange(1, 4)),)]
    return x


def test_shares_memory_agrees_with_numpy():
    rng, answers = random.Random(4), []
    base = torch.zeros(60)
    bases = [base, base.view(torch.int16), base.view(torch.uint8)[3:], base.view(6, 10), base.view(torch.complex64)]
    for _ in range(3_000):
        a, b = (random_view(rng.choice(bases), rng) for _ in "ab")
        answers.append(shares_memory(a, b))
        assert answers[-1] == np.shares_memory(a.numpy(), b.numpy()) == shares_memory(b, a), (
            a.shape,
            a.stride(),
            b.shape,
            b.stride(),
        )
    assert 500 < sum(answers) < 2_500


def test_shares_memory_of_interleaved_slices_other_storages_and_devices():
    x, array = torch.arange(10), np.zeros(10)
    assert not shares_memory(x[::2], x[1::2]) and shares_storage(x[::2], x[1::2])
    assert not shares_memory(x, x.clone()) and not shares_memory(x, x[:0])
    assert shares_memory(torch.from_numpy(array)[4:], torch.from_numpy(array[5:]))  # two storages, one memory
    meta = torch.empty(3, device="meta")
    assert not shares_memory(meta, meta) and not shares_memory(x, meta)


def test_shares_storage():
    x = torch.arange(10)
    assert shares_storage(x[:2], x[7:]) and shares_storage(x, x.view(torch.uint8)) and shares_storage(x, x[:0])
    assert not shares_storage(x, x.clone())
    empty, array = torch.empty(0), np.empty(0)
    meta = torch.empty(3, device="meta")
    assert not shares_storage(empty, empty) and not shares_storage(empty, torch.empty(0)) and not shares_storage(meta, meta)
    assert not shares_storage(torch.from_numpy(array), torch.from_numpy(array))


def test_storage_bytes_counts_each_storage_once():
    x, y = torch.zeros(100), torch.zeros(10, dtype=torch.float64)
    assert storage_bytes() == 0
    assert storage_bytes(x[:1]) == 400
    assert storage_bytes(x, x.view(10, 10).t(), x[50:], y, y) == 480
    assert storage_bytes(torch.zeros(1).expand(1000)) == 4
    assert storage_bytes(torch.empty(0), torch.empty(5, device="meta"), torch.empty(7, device="meta")) == 0


def test_writable_copies_exactly_where_numpy_finds_one_place_twice():
    rng, copied = random.Random(5), 0
    for _ in range(1_000):
        x = random_view(torch.arange(60.0), rng)
        places = torch.arange(60).as_strided(x.shape, x.stride(), x.storage_offset())
        overlaps = len(set(places.flatten().tolist())) < x.numel()
        result = writable(x)
        assert (result is not x) == overlaps
        assert torch.equal(result, x) and (not overlaps or result.is_contiguous() and not shares_storage(result, x))
        copied += overlaps
    assert 100 < copied < 900


def test_describe_says_what_memory_a_tensor_shows():
    text = describe(torch.arange(24.0).view(4, 6)[1:3, ::2])
    assert (
        text == "shape (2, 3), float32, on cpu\n"
        "strides (6, 2), offset 6: not contiguous\n"
        "shows 24 of the 96 bytes of its storage, as a view"
    )
    assert "12 elements in 3 places" in describe(torch.zeros(3, 1).expand(3, 4))
    assert describe(torch.zeros(1, 2, 3, 4).to(memory_format=torch.channels_last)).endswith(
        "offset 0: channels_last\nshows 96 of the 96 bytes of its storage"
    )
    assert "contiguous and channels_last" in describe(torch.zeros(2, 3, 1, 1))
    assert "0 of the 0 bytes" in describe(torch.empty(0, 3)) and "on meta" in describe(torch.empty(2, device="meta"))
    assert "2 of the 2 bytes" in describe(torch.zeros((), dtype=torch.bfloat16))


def test_describe_on_random_views():
    rng = random.Random(6)
    for _ in range(500):
        x = random_view(torch.arange(60), rng)
        assert f"shows {8 * len(set(x.flatten().tolist()))} of the 480 bytes" in describe(x)


def test_allocated_bytes_is_exact():
    x = torch.randn(10, 20)
    for run, expected in [
        (lambda: torch.empty(1000), 4000),
        (lambda: x.view(-1), 0),
        (lambda: x.t().expand(3, 20, 10), 0),
        (lambda: x.reshape(-1), 0),
        (lambda: x.t().reshape(-1), 800),
        (lambda: x.contiguous(), 0),
        (lambda: x.add_(1), 0),
        (lambda: (x + 1) * 2, 1600),  # also what is not kept
        (lambda: x.sort(), 800 + 1600),  # values and indices
        (lambda: torch.add(x, x, out=torch.empty(0)), 800),
        (lambda: torch.empty(5).resize_(7), 28),
        (lambda: x.split(2), 0),
        (lambda: x.to(torch.float64), 1600),
        (lambda: x.to(torch.float32), 0),
        (lambda: torch.empty(6, device="meta"), 24),
        (lambda: None, 0),
    ]:
        assert allocated_bytes(run) == expected


def test_allocated_bytes_sees_backward_and_lets_exceptions_through():
    w = torch.ones(10, requires_grad=True)
    assert allocated_bytes(lambda: (w * 2).sum().backward()) == 40 + 4 + 4 + 40  # product, sum, its gradient, that of w
    with pytest.raises(ZeroDivisionError):
        allocated_bytes(lambda: 1 / 0)
    assert allocated_bytes(lambda: torch.empty(1)) == 4


@pytest.mark.parametrize(
    "x",
    [torch.arange(24.0).view(2, 12), torch.arange(24.0).view(12, 2).t(), torch.arange(30.0)[4:], torch.arange(30)[::3]],
)
@pytest.mark.parametrize("size, step", [(1, 1), (3, 1), (3, 2), (2, 5), (8, 1)])
def test_sliding_windows_are_those_of_unfold(x, size, step):
    windows = sliding_windows(x, size, step)
    expected = x.unfold(-1, size, step)
    assert torch.equal(windows, expected) and windows.stride() == expected.stride() and shares_storage(windows, x)


@pytest.mark.parametrize("size, step", [(0, 1), (6, 1), (2, 0), (2, -1)])
def test_sliding_windows_that_do_not_exist(size, step):
    with pytest.raises(ValueError):
        sliding_windows(torch.arange(5), size, step)


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(18.0).view(2, 3, 3),
        torch.arange(36.0).view(4, 3, 3)[1::2],
        torch.arange(18.0).view(3, 3, 2).permute(2, 1, 0),
        torch.ones(0, 2, 2),
    ],
)
def test_batch_diagonal_is_torchs_and_writes_through(x):
    x = x.detach()
    diagonal = batch_diagonal(x)
    assert torch.equal(diagonal, x.diagonal(dim1=-2, dim2=-1))
    diagonal.zero_()
    assert not x.diagonal(dim1=-2, dim2=-1).any()


def test_hwc_to_chw_merge_heads_and_padding_mask():
    image = torch.arange(24).view(2, 4, 3)
    assert torch.equal(hwc_to_chw(image)[1], image[:, :, 1])
    assert torch.equal(hwc_to_chw(image[None])[0], hwc_to_chw(image)) and shares_storage(hwc_to_chw(image), image)
    context = torch.randn(2, 3, 4, 5)
    assert torch.equal(merge_heads(context)[1, 2], torch.cat([context[1, h, 2] for h in range(3)]))
    assert padding_mask(torch.tensor([2, 0, 9]), 3).tolist() == [[True, True, False], [False] * 3, [True] * 3]


def test_the_examples_in_the_docstrings():
    assert doctest.testmod(tensors).attempted >= 5
    assert doctest.testmod(tensors).failed == 0
