"""The precision toolkit: bits against PyTorch's own, steps against the same step written out, figures against counts by hand."""

import copy
import doctest
import math
import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from course_utils.toolkit import precision
from course_utils.toolkit.precision import (
    FORMATS,
    amp_report,
    amp_step,
    float_bits,
    format_of,
    from_bits,
    overflow_fraction,
    record_dtypes,
    rounded,
    underflow_fraction,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
STORED = [f for f in FORMATS.values() if f.dtype is not None]


def same(a, b):
    """Equal floats, nan and the sign of 0 included."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


# ── the bits of a number ──


@pytest.mark.parametrize("f", STORED, ids=lambda f: f.name)
def test_bits_mean_what_pytorch_reads_from_them_and_come_back(f):
    width = f.dtype.itemsize * 8
    step = max(1, 2**width // 4096) | 1  # odd: every pattern of the low bits comes up
    patterns = range(0, 2**width, step)
    signed = [p - 2**width if width > 8 and p >= 2 ** (width - 1) else p for p in patterns]
    values = torch.tensor(signed, dtype=INTEGERS[f.dtype.itemsize]).view(f.dtype)
    kinds = set()
    for pattern, value in zip(patterns, values.float().tolist()):
        number = from_bits(f"{pattern:0{width}b}", f)
        assert same(number.value, value) or (number.kind == "nan" and math.isnan(value)), (pattern, number, value)
        if number.kind != "nan":
            assert float_bits(value, f) == number
        kinds.add(number.kind)
    assert kinds >= {"subnormal", "normal", "nan", "zero"}


@pytest.mark.parametrize("f", STORED, ids=lambda f: f.name)
def test_the_range_is_that_of_finfo_and_the_edges_are_where_it_says(f):
    info = torch.finfo(f.dtype)
    assert (f.max, f.smallest_normal, f.eps) == (info.max, info.smallest_normal, info.eps)
    assert f.smallest == float_bits(f.smallest, f).value > float_bits(f.smallest / 2, f).value == 0
    assert float_bits(f.smallest * 0.51, f).value == f.smallest
    assert [float_bits(x, f).kind for x in (f.smallest, f.smallest_normal, f.max)] == ["subnormal", "normal", "normal"]
    assert float_bits(-0.0, f).sign == "1" and float_bits(-0.0, f).kind == "zero"


def test_spacing_reaches_the_next_number_of_the_format():
    for f in STORED:
        for x in (1.0, 1.5, 3.0, 100.0, -7.0, f.smallest, f.smallest_normal):
            number = float_bits(x, f)
            bits = "".join(str(number).split())
            after = from_bits(bits[0] + f"{int(bits[1:], 2) + 1:0{len(bits) - 1}b}", f)
            assert abs(after.value - number.value) == number.spacing
        assert math.isnan(float_bits(math.nan, f).spacing) and not math.isnan(float_bits(0.0, f).spacing)
    assert np.spacing(np.float32(0.1)) == float_bits(0.1, "fp32").spacing
    assert np.spacing(np.float16(2049)) == float_bits(2049, "fp16").spacing == 2


def test_infinities_and_the_format_without_them():
    for name in ("fp32", "tf32", "bf16", "fp16", "float8_e5m2"):
        assert [float_bits(x, name).kind for x in (math.inf, -math.inf)] == ["infinite"] * 2
        assert float_bits(-math.inf, name).value == -math.inf
    assert float_bits(65519.9, "fp16").value == 65504 and float_bits(65520, "fp16").kind == "infinite"
    beyond = torch.tensor(1e4).to(torch.float8_e4m3fn).item()  # 448, or nan in older versions of torch
    assert same(float_bits(1e4, "float8_e4m3fn").value, beyond) and not math.isinf(beyond)
    assert from_bits("0 1111 111", "float8_e4m3fn").kind == "nan" and from_bits("0 1111 000", "float8_e4m3fn").value == 256


def to_ten_bits(x):
    """Rounded to 11 significant binary digits, by Python's own rounding to even."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(round(fraction * 2**11), exponent - 11)


def test_tf32_rounds_fp32_to_ten_bits_ties_to_even():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2000, generator=g) * 10.0 ** torch.randint(-30, 30, (2000,), generator=g)
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 2 - 2**-11, 1 + 2**-11 + 2**-23])
    x = torch.cat([x, ties])
    assert rounded(x, "tf32").tolist() == [to_ten_bits(v) for v in x.tolist()]
    assert rounded(ties, "tf32").tolist() == [1, 1 + 2**-9, -1, 2, 1 + 2**-10]
    edges = torch.tensor([math.inf, -math.inf, torch.finfo(FP32).max, -0.0, math.nan])
    assert rounded(edges, "tf32")[:4].tolist() == [math.inf, -math.inf, math.inf, 0.0]
    assert rounded(edges, "tf32")[4].isnan() and rounded(edges, "tf32")[3].signbit()
    every_nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(FP32)
    assert rounded(every_nan, "tf32").isnan().all()
    f = FORMATS["tf32"]
    assert (len("".join(str(float_bits(0.1, f)).split())), f.max, f.eps) == (19, rounded(torch.tensor(f.max), f).item(), 2**-10)
    for x in (f.smallest, f.smallest_normal, f.max, 0.1, -3.0):
        assert float_bits(x, f).value == rounded(torch.tensor(x), f).item() == from_bits(str(float_bits(x, f)), f).value


def test_rounding_keeps_shape_and_leaves_the_tensor_alone():
    x = torch.linspace(-1, 1, 6, dtype=torch.float64, requires_grad=True)
    for f in FORMATS:
        result = rounded(x.view(2, 3).t(), f)
        assert (result.shape, result.dtype, result.requires_grad) == ((3, 2), FP32, False)
        assert torch.equal(rounded(result, f), result)  # once is enough
    assert x[0].item() == -1 and rounded(torch.tensor(0.1), "bf16").item() == torch.tensor(0.1).bfloat16().item()


def test_what_is_no_format_is_refused():
    assert format_of(FP16) is format_of("fp16") is format_of(FORMATS["fp16"])
    for wrong in ("fp64", torch.float64, None, "float16"):
        with pytest.raises(ValueError, match="float8_e5m2"):
            format_of(wrong)
    for bits in ("0 01111 000000000", "0 01111 0000000002", ""):
        with pytest.raises(ValueError, match="1 . 5 . 10"):
            from_bits(bits, "fp16")


# ── what a format loses of the gradients ──


def test_underflow_counts_what_becomes_zero_among_what_is_not():
    edge = 2.0**-25  # half of fp16's smallest number: a tie, and 0 is even
    gradient = torch.tensor([0.0, edge, -edge, edge * 1.001, 1e-30, 1.0, math.inf, math.nan])
    assert underflow_fraction(gradient, FP16) == 3 / 5
    assert underflow_fraction(gradient, FP16, scale=2) == 1 / 5
    assert underflow_fraction(gradient, BF16) == underflow_fraction(gradient, FP32) == 0
    assert underflow_fraction(torch.tensor([1e-30]), FP16, scale=2.0**120) == 0
    assert underflow_fraction(torch.tensor([0.01, 0.0001, 1.0]), "float8_e4m3fn") == 1 / 3
    assert underflow_fraction(torch.tensor([2.0**-60], dtype=FP32), FP16, scale=2.0**-100) == 1  # fp32 could not multiply these
    assert underflow_fraction(torch.tensor([1e-50, 1.0], dtype=torch.float64), FP16) == 1 / 2
    assert overflow_fraction(torch.tensor([2.0**100]), FP32, scale=2.0**100) == 1


def test_several_tensors_count_as_one():
    parts = [torch.tensor([[1e-9, 1.0]]), None, torch.tensor([1e-9, 1e-9], dtype=torch.float64), torch.zeros(7)]
    assert underflow_fraction(iter(parts), FP16) == 3 / 4
    assert underflow_fraction([], FP16) == underflow_fraction(torch.zeros(3), FP16) == overflow_fraction([None], FP16) == 0


def test_overflow_counts_what_lies_beyond_the_range():
    gradient = torch.tensor([1.0, -2.0, 0.0, 1e-9])
    assert [overflow_fraction(gradient, FP16, s) for s in (1, 40000, 70000)] == [0, 1 / 3, 2 / 3]
    assert [overflow_fraction(torch.tensor([448.0, 500.0]), f) for f in ("float8_e4m3fn", "float8_e5m2")] == [1 / 2, 0]


def test_the_prediction_agrees_with_what_fp16_does_to_the_gradients():
    torch.manual_seed(0)
    layer, x, upstream = nn.Linear(20, 30, bias=False), torch.randn(8, 20), torch.randn(8, 30) * 3e-8

    def gradient(dtype, scale):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=FP16, enabled=dtype is FP16):
            y = layer(x)
        y.backward((upstream * scale).to(y.dtype))
        return layer.weight.grad

    exact = gradient(FP32, 1)
    for scale in (1, 2, 16, 1024):
        predicted, real = underflow_fraction(exact, FP16, scale), (gradient(FP16, scale) == 0).double().mean().item()
        assert predicted == pytest.approx(real, abs=0.06)
    assert underflow_fraction(exact, FP16, 1) > 0.2 and underflow_fraction(exact, FP16, 1024) < 0.01


# ── which dtype comes out of what ──


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x) + x)


def test_the_recorder_sees_what_autocast_does_to_each_call():
    model, x, y = Small(), torch.randn(2, 4), torch.tensor([0, 1])
    with record_dtypes(model) as seen, torch.autocast("cpu", dtype=BF16):
        F.cross_entropy(model(x), y)
        x.T, x.shape, x.argmax()
    assert [(op.module, op.name, op.outputs) for op in seen.ops] == [
        ("body.0", "linear", (BF16,)),
        ("body.1", "layer_norm", (BF16,)),  # on a CPU; CUDA's lists say float32
        ("", "add", (FP32,)),
        ("head", "linear", (BF16,)),
        ("", "cross_entropy", (FP32,)),
    ]
    assert seen.ops[0].inputs == (FP32,) * 3 and seen.ops[2].inputs == (BF16, FP32)
    assert seen.modules == {"body.0": (BF16,), "body.1": (BF16,), "body": (BF16,), "head": (BF16,), "": (BF16,)}
    assert str(seen).splitlines()[0].split() == "body.0 linear float32, float32, float32 -> bfloat16".split()


def test_below_autocast_there_are_its_casts_and_a_backward_in_the_same_dtype():
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    with torch.autocast("cpu", dtype=BF16), record_dtypes(model, below=True) as seen:  # inside autocast, for once
        first, second = model(x), model(x)
    ops = [op for op in seen.ops if op.name == "_to_copy"]
    assert len(ops) == 4 and all(op.outputs == (BF16,) and op.module == "" for op in ops)  # x twice, weight and bias from the cache
    assert [op.inputs for op in seen.ops if op.name == "addmm"] == [(BF16,) * 3] * 2
    with record_dtypes(model, below=True) as seen:
        (first + second).sum().backward()
    products = [op for op in seen.ops if op.name == "mm"]
    assert products and all(op.inputs == (BF16, BF16) and op.outputs == (BF16,) for op in products)
    assert model.weight.grad.dtype is FP32
    assert not {"t", "view", "detach"} & {op.name for op in seen.ops}


def test_the_recorder_leaves_no_hook_even_when_the_model_raises():
    model = Small()
    with pytest.raises(RuntimeError), record_dtypes(model) as seen:
        model(torch.randn(2, 5))
    count = len(seen.ops)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules()) and seen._running == []
    model(torch.randn(2, 4))
    assert len(seen.ops) == count
    with record_dtypes(nn.LSTM(3, 2)) as seen:
        seen_output = nn.LSTM(3, 2)(torch.randn(4, 3))
    assert len(seen_output[1]) == 2 and seen.modules == {}


# ── a step of training ──


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches_of(*sizes):
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes]


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def scaler(scale=1024.0, **other):
    return torch.amp.GradScaler("cpu", init_scale=scale, **other)


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 0

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, math.inf)


def overflowing(outputs, targets):
    """A loss whose gradients are infinite, while it is finite itself."""
    return F.cross_entropy(outputs, targets) + _Explode.apply(outputs.float()).sum()


def test_in_float32_it_is_the_step_written_out():
    model, (batch,) = net(), batches_of(5)
    by_hand = copy.deepcopy(model)
    loss = F.cross_entropy(by_hand(batch[0]), batch[1])
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.1)
    sgd(by_hand).step()
    model[0].weight.grad = torch.ones_like(model[0].weight)  # left from before
    step = amp_step(model, [batch], F.cross_entropy, sgd(model), dtype=FP32, max_norm=0.1)
    assert torch.equal(weights(model), weights(by_hand)) and norm > 0.1
    assert (step.loss, step.norm, step.skipped, step.scale) == (pytest.approx(loss.item()), pytest.approx(norm.item()), False, 1.0)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("scale", [None, 1.0, 4096.0])
def test_the_scale_changes_neither_the_norm_nor_the_clipped_step(dtype, scale):
    if dtype is FP16 and scale is None:
        return
    exact, model, (batch,) = net(), net(), batches_of(16)
    expected = amp_step(exact, [batch], F.cross_entropy, sgd(exact), dtype=FP32, max_norm=0.05)
    step = amp_step(model, [batch], F.cross_entropy, sgd(model), dtype=dtype, max_norm=0.05, scaler=scaler(scale) if scale else None)
    assert step.norm == pytest.approx(expected.norm, rel=0.02) and step.norm > 0.05 and step.scale == (scale or 1.0)
    moved = weights(model) - weights(net())
    assert moved.norm() == pytest.approx(0.05 * 0.5, rel=1e-3)
    assert (moved - (weights(exact) - weights(net()))).norm() < 0.03 * moved.norm()
    assert not torch.equal(weights(model), weights(exact))  # it did run in the lower precision


def test_forward_and_loss_run_under_autocast_and_backward_does_not():
    model, seen, (batch,) = net(), {}, batches_of(4)

    def loss_fn(outputs, targets):
        seen["outputs"], seen["loss"] = outputs.dtype, torch.is_autocast_enabled("cpu")
        outputs.register_hook(lambda gradient: seen.update(backward=torch.is_autocast_enabled("cpu")))
        return F.cross_entropy(outputs, targets)

    amp_step(model, [batch], loss_fn, sgd(model), dtype=BF16)
    assert seen == {"outputs": BF16, "loss": True, "backward": False} and all(p.grad.dtype is FP32 for p in model.parameters())
    with torch.autocast("cpu", dtype=BF16):
        amp_step(model, [batch], loss_fn, sgd(model), dtype=FP32)
    assert (seen["outputs"], seen["loss"]) == (FP32, False)


@pytest.mark.parametrize("dtype, scale", [(FP32, None), (BF16, None), (FP16, 512.0)])
def test_accumulation_has_the_gradient_of_the_whole(dtype, scale):
    parts, merged, whole = batches_of(5, 1, 10), net(), net()
    joined = tuple(torch.cat(tensors) for tensors in zip(*parts))
    make = (lambda: scaler(scale)) if scale else (lambda: None)
    one = amp_step(whole, [joined], F.cross_entropy, sgd(whole), dtype=dtype, scaler=make(), max_norm=0.1)
    many = amp_step(merged, iter(parts), F.cross_entropy, sgd(merged), dtype=dtype, scaler=make(), max_norm=0.1)
    rel = 1e-5 if dtype is FP32 else 0.03
    assert many.loss == pytest.approx(one.loss, rel=rel) and many.norm == pytest.approx(one.norm, rel=rel)
    assert (weights(merged) - weights(whole)).norm() < rel * (weights(whole) - weights(net())).norm()


def test_count_weighs_the_micro_batches():
    parts, model, whole = batches_of(4, 4), net(), net()
    parts[0][1][:3] = -100
    joined = tuple(torch.cat(tensors) for tensors in zip(*parts))
    step = amp_step(model, parts, F.cross_entropy, sgd(model), dtype=FP32, count=lambda y: (y != -100).sum())
    assert step.loss == pytest.approx(amp_step(whole, [joined], F.cross_entropy, sgd(whole), dtype=FP32).loss)
    assert torch.allclose(weights(model), weights(whole), atol=1e-6)


def test_a_skipped_step_changes_nothing_but_the_scale():
    model, (batch,) = net(), batches_of(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    amp = scaler(1024.0, growth_interval=2)
    schedulers = [StepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 1, gamma=0.5)]
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of a scheduler that goes first
        steps = [
            amp_step(model, [batch], loss, optimizer, dtype=FP16, scaler=amp, schedulers=schedulers, max_norm=1.0)
            for loss in (overflowing, overflowing)
        ]
    assert torch.equal(weights(model), before) and not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
    assert [(s.skipped, s.scale, math.isfinite(s.norm), math.isfinite(s.loss)) for s in steps] == [
        (True, 1024.0, False, True),
        (True, 512.0, False, True),
    ]
    assert amp.get_scale() == 256
    steps = [amp_step(model, [batch], F.cross_entropy, optimizer, dtype=FP16, scaler=amp, schedulers=schedulers) for _ in range(2)]
    assert [(s.skipped, s.scale) for s in steps] == [(False, 256.0), (False, 256.0)] and amp.get_scale() == 512  # two in a row
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4 and weights(model).isfinite().all() and not torch.equal(weights(model), before)


def test_a_scale_too_large_is_brought_down_by_the_scaler_alone():
    model, (batch,) = net(), batches_of(8)
    optimizer, amp = sgd(model), scaler(2.0**24)
    steps = [amp_step(model, [batch], F.cross_entropy, optimizer, dtype=FP16, scaler=amp) for _ in range(16)]
    skipped = [s.skipped for s in steps]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert [s.scale for s in steps[: sum(skipped) + 1]] == [2.0 ** (24 - i) for i in range(sum(skipped) + 1)]


def test_one_micro_batch_that_overflows_skips_the_whole_step():
    model, parts, calls = net(), batches_of(4, 4), []

    def second_overflows(outputs, targets):
        calls.append(1)
        return (overflowing if len(calls) == 2 else F.cross_entropy)(outputs, targets)

    step = amp_step(model, parts, second_overflows, sgd(model), dtype=FP16, scaler=(amp := scaler()))
    assert step.skipped and torch.equal(weights(model), weights(net())) and amp.get_scale() == 512


def test_two_optimizers_clip_and_skip_each_for_itself():
    model, (batch,) = net(), batches_of(8)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in (model[0], model[2])]
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    amp = scaler()
    start = [weights(layer) for layer in (model[0], model[2])]
    step = amp_step(model, [batch], F.cross_entropy, optimizers, dtype=FP16, scaler=amp, schedulers=schedulers, max_norm=0.01)
    moved = [(weights(layer) - was).norm().item() for layer, was in zip((model[0], model[2]), start)]
    assert moved == pytest.approx([0.01, 0.01], rel=1e-2) and min(step.norms) > 0.01 and step.skips == (False, False)
    assert step.norm == pytest.approx(math.hypot(*step.norms))

    handle = model[0].weight.register_hook(lambda gradient: gradient * math.inf)  # the first optimizer's alone
    start = [weights(layer) for layer in (model[0], model[2])]
    step = amp_step(model, [batch], F.cross_entropy, optimizers, dtype=FP16, scaler=amp, schedulers=schedulers, max_norm=0.01)
    handle.remove()
    assert step.skips == (True, False) and step.skipped and not math.isfinite(step.norm) and math.isfinite(step.norms[1])
    assert torch.equal(weights(model[0]), start[0]) and (weights(model[2]) - start[1]).norm() == pytest.approx(0.005, rel=1e-2)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.5, 0.25] and amp.get_scale() == 512
    assert not amp_step(model, [batch], F.cross_entropy, optimizers, dtype=FP16, scaler=amp).skipped  # the scaler is ready again


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW], ids=["SGD", "AdamW"])
def test_fused_optimizers_step_and_skip_alike(make):
    results = []
    for fused in (False, True):
        model, (batch,) = net(), batches_of(8)
        optimizer, amp = make(model.parameters(), lr=0.1, fused=fused), scaler()
        skipped = amp_step(model, [batch], overflowing, optimizer, dtype=FP16, scaler=amp, max_norm=0.1)
        assert skipped.skipped and torch.equal(weights(model), weights(net()))
        amp_step(model, [batch], F.cross_entropy, optimizer, dtype=FP16, scaler=amp, max_norm=0.1)
        results.append(weights(model))
    assert torch.allclose(*results, atol=1e-6) and not torch.equal(results[0], weights(net()))


def test_finite_gradients_with_an_infinite_norm_are_not_clipped_to_nothing():
    model = nn.Linear(9, 1, bias=False)
    optimizer, amp, x = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), scaler(1.0), torch.full((1, 9), 1e30)
    was = weights(model)
    step = amp_step(model, [(x, x)], lambda y, t: y.mean(), optimizer, dtype=FP32, scaler=amp, max_norm=1.0)
    assert (
        step.skipped and model.weight.grad.isfinite().all() and torch.equal(weights(model), was)
    )  # clipping by inf would leave a gradient of 0, and decay


def test_without_a_scaler_a_gradient_that_is_not_finite_is_an_error_before_any_step():
    model, (batch,) = net(), batches_of(4)
    optimizer = sgd(model)
    for dtype in (FP32, BF16):
        with pytest.raises(RuntimeError, match="no step was taken"):
            amp_step(model, [batch], overflowing, optimizer, dtype=dtype, schedulers=StepLR(optimizer, 1))
    assert torch.equal(weights(model), weights(net())) and optimizer.param_groups[0]["lr"] == 0.5


def test_a_plateau_scheduler_is_given_the_loss():
    model, (batch,) = net(), batches_of(4)
    optimizer = sgd(model)
    scheduler = ReduceLROnPlateau(optimizer)
    step = amp_step(model, [batch], F.cross_entropy, optimizer, dtype=FP32, schedulers=scheduler)
    assert scheduler.best == step.loss


def test_what_cannot_be_right_is_refused():
    model, (batch,) = net(), batches_of(4)
    optimizer, other = sgd(model), sgd(net())
    step = lambda *args, **kw: amp_step(model, *args, **{"dtype": FP32} | kw)  # noqa: E731
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    for kw in ({"dtype": FP16}, {"dtype": FP16, "scaler": disabled}):
        with pytest.raises(ValueError, match="GradScaler"):
            step([batch], F.cross_entropy, optimizer, **kw)
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="not available"):
            absent = torch.amp.GradScaler("cuda")
        with pytest.raises(ValueError, match="GradScaler"):
            step([batch], F.cross_entropy, optimizer, dtype=FP16, scaler=absent)
    for dtype in (torch.float64, "fp16", torch.float8_e5m2):
        with pytest.raises(ValueError, match="bfloat16"):
            step([batch], F.cross_entropy, optimizer, dtype=dtype)
    with pytest.raises(ValueError, match="same parameter"):
        step([batch], F.cross_entropy, [optimizer, sgd(model[0])])
    with pytest.raises(ValueError, match="scheduler"):
        step([batch], F.cross_entropy, optimizer, schedulers=StepLR(other, 1))
    with pytest.raises(ValueError, match="no sample"):
        step([], F.cross_entropy, optimizer)
    with pytest.raises(ValueError, match="no parameter"):
        step([batch], F.cross_entropy, [optimizer, other], scaler=scaler())
    assert torch.equal(weights(model), weights(net()))
    half = net().half()
    with pytest.raises(ValueError, match="unscale FP16"):
        amp_step(half, batches_of(4), F.cross_entropy, sgd(half), dtype=FP16, scaler=scaler())


def test_half_the_gradients_underflow_without_the_scale_and_train_with_it():
    """What the scale is for, end to end: a loss so small that its fp16 gradients are 0."""
    for scale, learns in ((1.0, False), (2.0**16, True)):
        model, (batch,) = net(), batches_of(16)
        small = lambda y, t: F.cross_entropy(y, t) * 1e-8  # noqa: E731
        step = amp_step(model, [batch], small, sgd(model, lr=1e7), dtype=FP16, scaler=scaler(scale))
        assert (step.norm > 0) is learns and not step.skipped and torch.equal(weights(model), weights(net())) is not learns


# ── which precision pays ──


def test_the_report_counts_what_can_be_counted_by_hand():
    torch.manual_seed(0)
    n, d, k = 256, 16, 4
    model, x, y = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, k)), torch.randn(n, d), torch.randint(k, (n,))
    report = amp_report(model, (x, y), F.cross_entropy, rounds=1)
    fp32, bf16 = report.costs["fp32"], report.costs["bf16"]
    assert list(report.costs) == ["fp32", "bf16", "fp16"]
    loss_keeps = 4 * n * k + 4  # log_softmax's result, and the total weight of nll_loss
    assert fp32.saved_bytes == 4 * n * d + loss_keeps  # ReLU's result; parameters and batch not counted
    copies = 2 * (n * d + d * k)  # of the batch, and of the second weight; the first is not needed: the batch gets no gradient
    assert bf16.saved_bytes == 2 * n * d + copies + loss_keeps == report.costs["fp16"].saved_bytes
    products = 2 * n * d * d + 2 * n * d * d + 2 * n * d * k * 3  # forward, weights' gradients; the batch needs none
    rest = 2 * n * d + 3 * n * k + d + k + 3  # ReLU, log_softmax and nll_loss with their backwards, biases, and three scalars
    assert report.product_share == pytest.approx(products / (products + rest), rel=1e-9)
    assert fp32.loss == F.cross_entropy(model(x), y).item() != bf16.loss
    assert bf16.loss == pytest.approx(fp32.loss, rel=0.02)
    assert fp32.speed == (1, 1, 1) and bf16.speed[0] > 0 and report.device == "cpu"


def test_underflow_in_the_report_is_that_of_the_gradients_in_fp32():
    model, (batch,) = net(), batches_of(16)
    small = lambda y, t: F.cross_entropy(y, t) * 1e-5  # noqa: E731
    costs = amp_report(model, batch, small, rounds=1).costs
    gradients = torch.autograd.grad(small(model(batch[0]), batch[1]), model.parameters())
    expected = [underflow_fraction(gradients, FP16, scale) for scale in (1.0, 65536.0)]
    assert [costs["fp16"].underflow, costs["fp16"].scaled_underflow] == expected and expected[0] > 0.01 > expected[1]
    assert costs["bf16"].underflow == costs["fp32"].underflow == 0


def test_copies_of_the_weights_can_outweigh_the_activations():
    wide, tall = nn.Linear(64, 64), nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)])
    loss = lambda y, t: y.float().square().mean()  # noqa: E731
    small = amp_report(wide, (torch.randn(2, 64), torch.zeros(2)), loss, precisions=["bf16"], rounds=1)
    large = amp_report(tall, (torch.randn(500, 8), torch.zeros(500)), loss, precisions=["bf16"], rounds=1)
    assert small.leanest == "fp32" and small.costs["bf16"].saved_bytes > small.costs["fp32"].saved_bytes
    assert large.leanest == "bf16" and large.costs["bf16"].saved_bytes < 0.8 * large.costs["fp32"].saved_bytes
    assert "For memory: fp32, copies" in str(small) and "For memory: bf16, " in str(large)


def test_an_overflow_in_the_forward_pass_rules_fp16_out():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh() for _ in range(4)])
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.layer(self.body(x)) ** 2

    model = Squares()
    nn.init.constant_(model.body[0].weight, 1.0)
    nn.init.constant_(model.layer.weight, 200.0)
    batch = torch.ones(64, 4), torch.zeros(64, 4)
    report = amp_report(model, batch, lambda y, t: y.mean(), precisions=["fp16"], rounds=1)
    assert math.isinf(report.costs["fp16"].loss) and math.isfinite(report.costs["fp32"].loss)
    assert report.costs["fp16"].saved_bytes < report.costs["fp32"].saved_bytes  # fewer, and worth nothing
    assert report.fastest == report.leanest == "fp32" and "no loss scale cures" in str(report)


def test_the_advice_follows_the_times(monkeypatch):
    model, batch = net(), batches_of(8)[0]

    def report(bf16, fp16):
        times = {"fp32": [1.0, 2.0, 1.5], "bf16": bf16, "fp16": fp16}
        monkeypatch.setattr(precision, "_take_turns", lambda runs, rounds: {name: times[name] for name in runs})
        return amp_report(model, batch, F.cross_entropy)

    assert report([0.5, 1.0, 0.5], [0.4, 1.95, 0.4]).fastest == "bf16"  # in one round fp16 was hardly faster
    assert report([0.5, 1.0, 0.5], [0.4, 1.0, 0.4]).fastest == "fp16"
    stay = report([0.5, 2.1, 0.5], [9.0, 9.0, 9.0])
    assert stay.fastest == "fp32" and stay.costs["bf16"].speed == (pytest.approx(2 / 2.1), 2, 3) and stay.costs["bf16"].seconds == 0.5
    assert stay.costs["bf16"].product_speed == 1.5 / 0.5
    assert "fp32: 1.5e+03 ms" in str(stay) and "For speed: fp32" in str(stay) and "bf16: 2 times as fast as fp32 (0.95 to 3" in str(stay)


def test_only_what_autocast_can_do_is_compared():
    for wrong in (["tf32"], ["fp32"], ["bf16", "float8_e5m2"]):
        with pytest.raises(ValueError, match="bf16 and fp16"):
            amp_report(net(), batches_of(4)[0], F.cross_entropy, precisions=wrong)


def test_products_inside_fused_kernels_are_counted():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return F.scaled_dot_product_attention(x * self.scale, x, x)

    for model, x in ((Attention(), torch.randn(1, 1, 64, 16)), (nn.LSTM(8, 8), torch.randn(4, 5, 8))):
        flags = torch.backends.mkldnn.enabled
        loss = lambda y, t: (y[0] if isinstance(y, tuple) else y).float().mean()  # noqa: E731
        assert amp_report(model, (x, x), loss, precisions=[], rounds=1).product_share > 0.5
        assert torch.backends.mkldnn.enabled == flags


class Counting(nn.Conv2d):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_the_report_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.ReLU(inplace=True), Counting(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(72, 3)
    )
    model[2].eval()
    batch = torch.randn(4, 1, 8, 8), torch.randint(3, (4,))
    F.cross_entropy(model(batch[0].clone()), batch[1]).backward()
    state, inputs = copy.deepcopy(model.state_dict()), batch[0].clone()
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with torch.no_grad():
        amp_report(model, batch, F.cross_entropy, precisions=["bf16"], rounds=1)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items()) and torch.equal(batch[0], inputs)
    assert all(p.grad is was and torch.equal(was, value) for p, (was, value) in zip(model.parameters(), gradients))
    assert [m.training for m in model] == [True, True, False, True, True, True, True] and model[1].calls == 1
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all() and not torch.is_autocast_enabled("cpu")


def test_the_examples_in_the_docstrings():
    result = doctest.testmod(precision)
    assert result.failed == 0 and result.attempted == 3
