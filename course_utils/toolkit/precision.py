"""Mixed precision: what a format can hold, what autocast does to each op, a step that scales right, and what pays.

A format is named "fp32", "tf32", "bf16", "fp16", "float8_e4m3fn" or "float8_e5m2", or given as its torch.dtype; tf32 has none:
its numbers are those of fp32 whose last 13 bits are 0.
"""

import contextlib
import functools
import logging
import math
import statistics
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from course_utils.toolkit.autograd import saved_bytes
from course_utils.toolkit.batches import device_of, split_batch, to_device
from course_utils.toolkit.rehearsal import fresh, left_as_found, seeded, twins

# ── The bits of a number ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Format:
    """How numbers are written: one bit for the sign, then the exponent, to which `bias` has been added, then the mantissa.

    IEEE 754, but for float8_e4m3fn: Micikevicius et al., FP8 Formats for Deep Learning (2022), table 1.
    """

    name: str
    dtype: torch.dtype | None
    exponent_bits: int
    mantissa_bits: int
    finite: bool = False  # no infinities: the topmost exponent holds numbers too, and one pattern of mantissa, nan

    @property
    def bias(self):
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def eps(self):
        """The spacing of the numbers from 1 to 2."""
        return 2.0**-self.mantissa_bits

    @property
    def max(self):
        """The largest number."""
        return (2 - 2 * self.eps) * 2.0 ** (self.bias + 1) if self.finite else (2 - self.eps) * 2.0**self.bias

    @property
    def smallest_normal(self):
        """The smallest number with all its digits; below it, the spacing stays and digits go."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self):
        """The smallest number above 0; half of it, and less, becomes 0."""
        return self.smallest_normal * self.eps


_ALL = [
    Format("fp32", torch.float32, 8, 23),
    Format("tf32", None, 8, 10),
    Format("bf16", torch.bfloat16, 8, 7),
    Format("fp16", torch.float16, 5, 10),
    Format("float8_e4m3fn", torch.float8_e4m3fn, 4, 3, finite=True),
    Format("float8_e5m2", torch.float8_e5m2, 5, 2),
]
FORMATS = {f.name: f for f in _ALL}


def format_of(name):
    """The Format of this name or torch.dtype; a Format is given back. Raises ValueError where there is none."""
    for f in _ALL:
        if name is not None and name in (f, f.name, f.dtype):
            return f
    raise ValueError(f"{name!r} is none of {', '.join(FORMATS)}, nor the dtype of one")


@dataclass(frozen=True)
class FloatBits:
    """One number in one format; the strings hold its bits, "0" and "1", the highest first. str() joins them with spaces."""

    format: Format
    sign: str
    exponent: str
    mantissa: str
    kind: str  # "zero", "subnormal" (no leading 1), "normal", "infinite" or "nan"
    value: float  # what the bits stand for, exactly
    spacing: float  # distance between numbers of this exponent, so to the next one away from 0; nan for infinite and nan

    def __str__(self):
        return f"{self.sign} {self.exponent} {self.mantissa}"


def from_bits(bits, format):
    """The number that these bits are in a format, as FloatBits. bits: a string of 0 and 1, with spaces where you like.

    Raises ValueError for another number of bits than the format has.

    >>> from_bits("0 1111 110", "float8_e4m3fn").value
    448.0
    """
    f, digits = format_of(format), "".join(bits.split())
    if len(digits) != 1 + f.exponent_bits + f.mantissa_bits or set(digits) - {"0", "1"}:
        raise ValueError(f"{bits!r} is not 1 + {f.exponent_bits} + {f.mantissa_bits} digits 0 and 1, as {f.name} needs")
    parts = digits[0], digits[1 : 1 + f.exponent_bits], digits[1 + f.exponent_bits :]
    exponent, mantissa = int(parts[1], 2), int(parts[2], 2)
    if "0" not in parts[1] and not (f.finite and "0" in parts[2]):
        kind, value, spacing = ("nan", math.nan, math.nan) if mantissa else ("infinite", math.inf, math.nan)
    else:
        kind = "normal" if exponent else "subnormal" if mantissa else "zero"
        spacing = 2.0 ** (max(exponent, 1) - f.bias - f.mantissa_bits)
        value = (mantissa + (2**f.mantissa_bits if exponent else 0)) * spacing  # a normal number has a 1 that is not written
    return FloatBits(f, *parts, kind, -value if parts[0] == "1" else value, spacing)


def float_bits(x, format):
    """The bits that a number gets in a format, as FloatBits; see `rounded`. x: a number, or a tensor of one element.

    >>> str(float_bits(0.1, "fp16")), float_bits(0.1, "fp16").value, float_bits(2048, "fp16").spacing
    ('0 01011 1001100110', 0.0999755859375, 2.0)
    """
    f = format_of(format)
    stored = rounded(torch.as_tensor(x, dtype=torch.float64).cpu().reshape(()), f).to(f.dtype or torch.float32)
    width = 8 * stored.itemsize
    pattern = stored.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width]).item() & (2**width - 1)
    return from_bits(f"{pattern:0{width}b}"[: 1 + f.exponent_bits + f.mantissa_bits], f)


def rounded(x, format):
    """A tensor's numbers as the format holds them: float32, the same shape, without history.

    As PyTorch converts: to the nearest, ties to the even one, and from float64 by way of float32. Beyond the range there is inf,
    except in float8_e4m3fn, which ends at ±448 (since torch 2.12, pytorch#178817; nan before). tf32 is rounded in the same way
    here; the instruction that GPUs have for it (cvt.rna.tf32 in PTX) takes ties away from 0.
    """
    dtype, x = format_of(format).dtype, x.detach()
    if dtype is not None:
        return x.to(dtype).float()
    x = x.float()
    bits = x.view(torch.int32)  # exponent and mantissa count on like one integer, so that a carry goes where it should
    nearest = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    return torch.where(x.isfinite(), nearest.view(torch.float32), x)


# ── What a format loses of the gradients ──────────────────────────────────────────────────────────────────────────────


def underflow_fraction(gradients, dtype, scale=1.0):
    """Share of the gradients that become 0 in a format when they are multiplied by `scale` first: a float from 0 to 1.

    gradients: a tensor, or an iterable of tensors and None, any shapes and dtypes, gone through once; all their elements are
    counted together, those alone that are finite and not 0, and 0.0 is the share of none. Computed in float64, one tensor at a
    time. It is what the last conversion loses: a gradient that underflowed on its way is 0 already.

    >>> underflow_fraction(torch.tensor([0.0, 1e-9, 1e-7, 1.0]), torch.float16) == 1 / 3
    True
    """
    return _share(gradients, scale, lambda scaled: rounded(scaled, dtype) == 0)


def overflow_fraction(gradients, dtype, scale=1.0):
    """Share of the gradients that, times `scale`, lie beyond the format's largest number; else as `underflow_fraction`."""
    return _share(gradients, scale, lambda scaled: scaled.abs() > format_of(dtype).max)


def _share(gradients, scale, lost):
    hit = count = 0
    for gradient in [gradients] if isinstance(gradients, torch.Tensor) else gradients:
        if gradient is not None:
            values = gradient.detach().double()
            values = values[values.isfinite() & (values != 0)]
            hit, count = hit + int(lost(values * scale).sum()), count + values.numel()
    return hit / count if count else 0.0


# ── Which dtype comes out of what ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Op:
    """One call that `record_dtypes` saw."""

    module: str  # path of the innermost module that was running; "" is the whole model, and what runs outside it
    name: str  # "linear", "add", "softmax", …
    inputs: tuple  # dtypes of its tensors of floating point, in order
    outputs: tuple

    def __str__(self):
        before, after = (", ".join(str(dtype).removeprefix("torch.") for dtype in side) for side in (self.inputs, self.outputs))
        return f"{self.module:<12} {self.name:<24} {before} -> {after}"


class Dtypes:
    """What a `record_dtypes` block saw; str() gives one line an op.

    ops      list of Op, in order; only calls that gave a tensor of floating point
    modules  {path: dtypes of the module's output}, of its last call; "" is the whole model
    """

    def __init__(self):
        self.ops, self.modules, self._running = [], {}, []

    def _call(self, name, func, args, kwargs):
        inputs, result = _dtypes((args, kwargs)), func(*args, **kwargs)
        if outputs := _dtypes(result):
            self.ops.append(Op(self._running[-1] if self._running else "", name, inputs, outputs))
        return result

    def _enter(self, path, module, args):
        self._running.append(path)

    def _leave(self, path, module, args, output):
        self._running.pop()
        self.modules[path] = _dtypes(output)

    def __str__(self):
        return "\n".join(map(str, self.ops))


def _dtypes(values):
    return tuple(x.dtype for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point())


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ == "__get__":  # an attribute, such as x.T
            return func(*args, **(kwargs or {}))
        return self.seen._call(func.__name__, func, args, kwargs or {})


class _Kernels(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.is_view:  # computes nothing
            return func(*args, **(kwargs or {}))
        return self.seen._call(func.overloadpacket.__name__, func, args, kwargs or {})


@contextlib.contextmanager
def record_dtypes(model, below=False):
    """`with record_dtypes(model) as seen: model(x)` records the dtypes that each module and each op gives; see Dtypes.

    An op is what the code calls: functions, methods and operators of torch, by the names that autocast's lists use. The method is a
    TorchFunctionMode, which sits above autocast: float32 goes into "linear", bfloat16 comes out. What a function of torch calls
    inside is not seen, nor is backward. below=True records what runs instead (a TorchDispatchMode, below autocast and autograd):
    kernels, the casts that autocast adds ("_to_copy"), and those of a backward in the block; views are left out.

    Whether autocast is entered inside or outside makes no difference. The hooks go with the block. A watched attention layer in eval
    mode may leave its fused path (aten::_transformer_encoder_layer_fwd) for the one that training takes.
    """
    mode, handles = _Kernels() if below else _Functions(), []
    mode.seen = seen = Dtypes()
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(functools.partial(seen._enter, path)))
        handles.append(module.register_forward_hook(functools.partial(seen._leave, path), always_call=True))
    try:
        with mode:
            yield seen
    finally:
        for handle in handles:
            handle.remove()


# ── A step of training ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AmpStep:
    """What one call of `amp_step` did."""

    loss: float  # of all micro-batches as one, unscaled
    norms: tuple[float, ...]  # for each optimizer, of its gradients, unscaled, before clipping; inf or nan where it was skipped
    scale: float  # that the loss was multiplied by; 1.0 without a scaler

    @property
    def skips(self):
        """For each optimizer: was its step left out?"""
        return tuple(not math.isfinite(norm) for norm in self.norms)

    @property
    def skipped(self):
        """Was any step left out?"""
        return any(self.skips)

    @property
    def norm(self):
        """Of all gradients as one vector; not finite where a step was left out."""
        return math.sqrt(sum(norm * norm for norm in self.norms))  # hypot(inf, nan) would be inf


def amp_step(model, micro_batches, loss_fn, optimizers, *, dtype, scaler=None, schedulers=(), max_norm=math.inf, count=len):
    """One training step in mixed precision: forward, scaled backward, unscale, clip, step or skip. Returns an AmpStep.

    micro_batches: a list of batches (inputs, …, targets), one or several; the gradient is that of one batch made of them all.
    `count` says what each counts for, from its targets. loss_fn: a mean; runs under autocast, as the model does; backward does not.
    optimizers, schedulers: one, or a list. Each optimizer has a norm of its own, is clipped to `max_norm` alone and skips alone. A
    scheduler is stepped when its optimizer has stepped, and only then: give those whose unit is a step.
    dtype: torch.float16, with a torch.amp.GradScaler for the model's device; torch.bfloat16 or torch.float32, which need none.

    Where the norm is not finite the step is skipped: weights and optimizer state stay, and the scaler lowers its scale. (BatchNorm has
    seen the batch all the same.) If the loss itself overflows, every step is skipped and the scale falls without end. Without a scaler
    it is an error: RuntimeError, before any step. Raises ValueError for another dtype, for float16 without an enabled scaler (one for
    "cuda" is disabled on a machine without), for no sample, a parameter in two optimizers (it would be unscaled twice), an optimizer
    none of whose parameters got a gradient, and a scheduler of another optimizer.
    """
    optimizers, schedulers = _listed(optimizers), _listed(schedulers)
    parameters = [list({id(p): p for group in o.param_groups for p in group["params"]}.values()) for o in optimizers]
    scaler = torch.amp.GradScaler(device_of(model).type, enabled=False) if scaler is None else scaler
    _check(optimizers, parameters, schedulers, dtype, scaler)
    for optimizer in optimizers:
        optimizer.zero_grad()
    scale = scaler.get_scale()
    loss = _scaled_backward(model, micro_batches, loss_fn, dtype, scaler, count)
    if any(all(p.grad is None for p in own) for own in parameters):
        raise ValueError("no parameter of an optimizer got a gradient")

    for optimizer in optimizers:
        scaler.unscale_(optimizer)  # once, after the last backward: the scale must be one and the same for all that is added up
    norms = [torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None]) for own in parameters]
    step = AmpStep(loss, tuple(norm.item() for norm in norms), scale)
    if step.skipped and not scaler.is_enabled():
        raise RuntimeError(f"the gradients' norm is {step.norm} and there is no scale to lower: no step was taken")
    for optimizer, own, norm, skip in zip(optimizers, parameters, norms, step.skips):
        if not skip:  # clipping by a norm of inf would make 0 and nan of everything
            torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
            scaler.step(optimizer)
            for scheduler in [s for s in schedulers if s.optimizer is optimizer]:
                scheduler.step(*[loss] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
    scaler.update()  # once, after the last optimizer
    return step


def _listed(value):
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check(optimizers, parameters, schedulers, dtype, scaler):
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"dtype is torch.float32, torch.bfloat16 or torch.float16, not {dtype!r}")
    if dtype is torch.float16 and not scaler.is_enabled():
        raise ValueError("float16 needs an enabled torch.amp.GradScaler: without one, small gradients become 0")
    held = [id(p) for own in parameters for p in own]
    if len(set(held)) < len(held):
        raise ValueError("two optimizers hold the same parameter")
    if any(all(scheduler.optimizer is not o for o in optimizers) for scheduler in schedulers):
        raise ValueError("a scheduler belongs to an optimizer that is not given")


def _scaled_backward(model, micro_batches, loss_fn, dtype, scaler, count):
    batches = [(*split_batch(batch), int(count(batch[-1]))) for batch in micro_batches]
    total, whole = sum(n for *_, n in batches), 0.0
    if total == 0:
        raise ValueError("the micro-batches hold no sample")
    for arguments, targets, n in batches:
        if n:
            loss = _forward(model, *to_device((arguments, targets), device_of(model)), loss_fn, dtype) * (n / total)
            scaler.scale(loss).backward()
            whole = whole + loss.detach().float()
    return whole.item()


def _forward(model, arguments, targets, loss_fn, dtype):
    with torch.autocast(device_of(model).type, dtype=dtype, enabled=dtype is not torch.float32):
        return loss_fn(model(*arguments), targets)


# ── Which precision pays ──────────────────────────────────────────────────────────────────────────────────────────────

FIRST_SCALE = 2.0**16  # where a GradScaler begins


@dataclass(frozen=True)
class Cost:
    """What `amp_report` measured of one precision."""

    seconds: float  # for forward, loss and backward: the median of the rounds
    speed: tuple[float, float, float]  # fp32's time over this one's: lowest, median and highest of the rounds
    product_speed: float  # the same for one large product of matrices: what the device itself can gain
    saved_bytes: int  # kept for backward, without parameters and batch, with the low-precision copies of the weights
    loss: float
    underflow: float  # share of fp32's parameter gradients that are 0 in this format
    scaled_underflow: float  # the same at FIRST_SCALE


@dataclass(frozen=True)
class AmpReport:
    """What `amp_report` found. str() gives the figures, the advice and the reasons."""

    device: str
    costs: dict[str, Cost]  # by name, fp32 first
    product_share: float  # of the arithmetic of a step: products of matrices and convolutions
    fastest: str  # "fp32", unless another is faster by 5 % in every round
    leanest: str  # the one that keeps the fewest bytes for backward; "fp32" among equals

    def __str__(self):
        kept = self.costs[self.leanest].saved_bytes / max(self.costs["fp32"].saved_bytes, 1)
        why = f"{kept:.0%} of what fp32 keeps" if kept < 1 else "copies of the weights take what smaller activations give"
        lines = [
            f"For speed: {self.fastest}, on {self.device}. Products and convolutions make up {self.product_share:.0%} of the arithmetic.",
            f"For memory: {self.leanest}, {why}. Weights, their gradients and the optimizer's state stay in fp32 anyway.",
        ]
        for name, cost in self.costs.items():
            low, middle, high = cost.speed
            speed = f"{middle:.2g} times as fast as fp32 ({low:.2g} to {high:.2g}; a product alone: {cost.product_speed:.2g})"
            speed = speed if name != "fp32" else f"{cost.seconds * 1e3:.3g} ms for forward, loss and backward"
            lines.append(f"{name}: {speed}, {cost.saved_bytes:,} bytes kept for backward")
            if not math.isfinite(cost.loss):
                lines.append(f"    the loss is {cost.loss}: what overflows in the forward pass, no loss scale cures")
            elif name != "fp32":
                lost = f"{cost.underflow:.2%}, and {cost.scaled_underflow:.2%} at a GradScaler's first scale, {FIRST_SCALE:.0f}"
                lines.append(f"    share of the gradients that become 0: {lost}")
        return "\n".join(lines)


def amp_report(model, batch, loss_fn, *, precisions=("bf16", "fp16"), rounds=5):
    """Measure which precision pays for this model, this batch and the model's device, and why: an AmpReport.

    batch: (inputs, …, targets); loss_fn: a mean; the weights are fp32. All of it comes from real passes: times from rounds in which
    the precisions take turns, so that a busy moment meets each; bytes from `saved_bytes`; the share of products from
    FlopCounterMode, with one operation for each element that any other kernel writes; underflow from fp32's gradients.
    Passes run on copies, with the modes as they are: model, gradients and random numbers stay as found. Left out is what follows
    backward: the optimizer's step and the scaler. fp16 on a CPU can take a hundred times as long as fp32: for a large model, leave it
    out of `precisions`. Raises ValueError for other precisions and TypeError where the model does not allow a copy.
    """
    if set(precisions) - {"bf16", "fp16"}:
        raise ValueError(f"autocast knows bf16 and fp16, and fp32 is always measured; not {precisions!r}")
    names = ("fp32", *precisions)
    with left_as_found(model, loss_fn, [], loader=None):
        twin, loss_fn, _ = twins(model, loss_fn, [])
        arguments, targets = fresh(to_device(split_batch(batch), device_of(model)))
        runs = {name: functools.partial(_pass, twin, arguments, targets, loss_fn, format_of(name).dtype) for name in names}
        share, kept = _product_share(runs["fp32"]), [*twin.parameters(), *_tensors((arguments, targets))]
        found = {name: _saved_and_loss(run, kept) for name, run in runs.items()}
        seeded(runs["fp32"])
        gradients = [p.grad for p in twin.parameters()]
        lost = {name: [underflow_fraction(gradients, name, scale) for scale in (1.0, FIRST_SCALE)] for name in names}
        seconds, products = _take_turns(runs, rounds), _take_turns(_products(device_of(twin), names), rounds)
    speeds = {name: sorted(a / b for a, b in zip(seconds["fp32"], seconds[name])) for name in names}
    costs = {
        name: Cost(
            statistics.median(seconds[name]),
            (ratios[0], statistics.median(ratios), ratios[-1]),
            statistics.median(products["fp32"]) / statistics.median(products[name]),
            *found[name],
            *lost[name],
        )
        for name, ratios in speeds.items()
    }
    sound = {name: cost for name, cost in costs.items() if name == "fp32" or math.isfinite(cost.loss)}
    faster = [name for name in sound if sound[name].speed[0] > 1.05]
    leanest = min(sound, key=lambda name: sound[name].saved_bytes)
    return AmpReport(str(device_of(model)), costs, share, max(faster, key=lambda name: costs[name].speed[1], default="fp32"), leanest)


def _tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _pass(model, arguments, targets, loss_fn, dtype):
    model.zero_grad()
    loss = _forward(model, arguments, targets, loss_fn, dtype)
    loss.backward()
    return loss.detach()


def _products(device, names):
    n = 2048 if device.type == "cuda" else 256
    matrices = {name: torch.randn(n, n, device=device, dtype=format_of(name).dtype) for name in names}
    return {name: functools.partial(torch.mm, matrix, matrix) for name, matrix in matrices.items()}


def _saved_and_loss(run, kept):
    with saved_bytes() as saved:
        loss = seeded(run)
    return saved.without(*kept), loss.item()


class _Written(TorchDispatchMode):
    """Counts the elements that each kind of kernel writes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.elements[func.overloadpacket] = self.elements.get(func.overloadpacket, 0) + sum(x.numel() for x in _tensors(result))
        return result


def _product_share(run):
    written = _Written()
    written.elements = {}
    # fused attention and recurrent kernels would hide their products
    plain = sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False)
    with plain[0], plain[1], plain[2], FlopCounterMode(display=False) as flops, written:
        run()
    products = flops.get_flop_counts()["Global"]
    rest = sum(elements for kernel, elements in written.elements.items() if kernel not in products)
    return sum(products.values()) / max(sum(products.values()) + rest, 1)


def _take_turns(runs, rounds):
    """{name: [seconds for a call, in each round]}, each measured over about 20 ms."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # with nvcc and no GPU, it warns of what nobody uses
    from torch.utils.benchmark import Timer  # warms up, and waits for the GPU

    timers = {name: Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads()) for name, run in runs.items()}
    calls = {name: max(1, int(0.02 / timer.timeit(1).mean)) for name, timer in timers.items()}
    turns = [{name: timer.timeit(calls[name]).mean for name, timer in timers.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in timers}
