"""Exercises of lesson 04, in the order of the notebook: nine to build, then the clinic's six to repair.

What is worth keeping lives in the toolkit, most of it in `amp_step`; the references below belong to this lesson alone.
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from course_utils.engine.compare import brief, difference, kind
from course_utils.engine.exercises import Case, Exercise, Mistake

LESSON = "04_amp"


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(build, seed=0):
    """build(), its random numbers drawn from this seed; torch's own random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def a_number(result, what):
    """The complaint where the result is no Python number."""
    if isinstance(result, torch.Tensor):
        return f"{what} should be a Python number, and came as a tensor: `.item()`"
    if isinstance(result, bool) or not isinstance(result, (int, float)):
        return f"{what} should be a number, and came as {brief(result)}"
    return None


# ── The bits of a number ──────────────────────────────────────────────────────────────────────────────────────────────


def spacing(x, dtype):
    """Distance from |x| to the next larger number of this dtype, a float."""
    number = torch.tensor(abs(x), dtype=dtype)
    above = torch.nextafter(number, torch.tensor(math.inf, dtype=dtype))
    return (above - number).item()  # exact: both are multiples of it


def _spacing_case(name, x, dtype):
    return Case(name, lambda: (x, dtype))


def _power_below(x, dtype):
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(abs(x))) if x else 0.0


SPACING = Exercise(
    lesson=LESSON,
    solution=spacing,
    hints=(
        "Between 1 and 2 the numbers of a dtype are `torch.finfo(dtype).eps` apart, between 2 and 4 twice as far. And at 0?",
        "`torch.nextafter(a, b)` gives the number of a's dtype that follows a on the way to b. Take a = |x| and b = inf, and subtract.",
    ),
    cases=(
        _spacing_case("fp16 is asked at 1", 1.0, torch.float16),
        _spacing_case("bf16 is asked at 1", 1.0, torch.bfloat16),
        _spacing_case("x lies between two powers of two", 3.0, torch.float32),
        _spacing_case("fp16 is asked beyond 1000", 2048.0, torch.float16),
        _spacing_case("x is the last number below a power of two", 1 - 2.0**-11, torch.float16),
        _spacing_case("x is negative", -96.0, torch.bfloat16),
        _spacing_case("x is a negative power of two", -4.0, torch.float16),
        _spacing_case("x is small", 2.0**-10, torch.float32),
        _spacing_case("x is below the smallest normal number", 3 * 2.0**-20, torch.float16),
        _spacing_case("x is 0", 0.0, torch.float16),
    ),
    mistakes=(
        Mistake(
            "This is the spacing from 1 to 2, `finfo.eps`; it doubles with each power of two.", lambda x, dtype: torch.finfo(dtype).eps
        ),
        Mistake(
            "The spacing is not proportional to x: it is the same for all numbers from one power of two to the next.",
            lambda x, dtype: torch.finfo(dtype).eps * abs(x),
        ),
        Mistake(
            "Below the smallest normal number the spacing shrinks no further: it stays `finfo.smallest_normal * finfo.eps`, down to 0.",
            _power_below,
        ),
        Mistake(
            "This goes from x towards larger numbers, and for a negative x that is towards 0. Asked is the way from |x| upwards.",
            lambda x, dtype: torch.nextafter(torch.tensor(x, dtype=dtype), torch.tensor(math.inf, dtype=dtype)).double().item() - x,
        ),
    ),
)

# ── What rounding loses ───────────────────────────────────────────────────────────────────────────────────────────────


def lost_updates(weights, updates, dtype):
    """Share of the updates that change nothing: the sum, rounded to dtype, is the weight that was."""
    counted = updates != 0
    lost = ((weights + updates).to(dtype) == weights.to(dtype)) & counted
    return lost.sum().item() / max(counted.sum().item(), 1)


def _lost_case(name, weights, updates, dtype=torch.bfloat16):
    return Case(name, lambda: (torch.tensor(weights).to(dtype).float(), torch.tensor(updates), dtype), tolerance=1e-6)


LOST_UPDATES = Exercise(
    lesson=LESSON,
    solution=lost_updates,
    hints=(
        "Add in float32, then round: `.to(dtype)`. Which of the sums are still the weight?",
        "`(weights + updates).to(dtype) == weights.to(dtype)`, only where `updates != 0`, then a sum over a count. Mind the count of 0.",
    ),
    cases=(
        _lost_case("three of five updates are lost", [1.0, 1.0, 1.0, 0.01, 0.01], [1e-9, 0.001, 0.001, 0.001, 0.001]),
        _lost_case("fp16 has finer steps than bf16", [1.0, 1.0, 1.0, 1.0], [0.001, 0.0001, -0.001, 0.003], torch.float16),
        _lost_case("fp32 loses only what is very small", [1.0, 1.0], [1e-9, 1e-3], torch.float32),
        _lost_case("some updates are 0", [1.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.1, 0.001]),
        _lost_case("an update leads downwards", [1.0, 256.0, 3.0], [-0.003, -0.4, -1.0]),
        _lost_case("an update is a number that bf16 holds exactly", [256.0, 1.0], [0.5, 0.5]),
        _lost_case("a weight is 0", [0.0, 0.0], [1e-12, 1e-3]),
        _lost_case("the tensors have two dimensions", [[1.0, 0.5], [0.25, 8.0]], [[1e-3, 1e-3], [1e-3, 1e-3]]),
        _lost_case("all updates are 0", [1.0, 2.0], [0.0, 0.0]),
    ),
    mistakes=(
        Mistake(
            "Nothing is rounded: the sum is compared in float32. `.to(dtype)` is where an update gets lost.",
            lambda w, u, dtype: lost_updates(w, u, torch.float32),
        ),
        Mistake(
            "This counts the updates that are 0 in the dtype. An update of 0.5 is not 0 in bf16 and is lost all the same at a "
            "weight of 256: "
            "the sum decides.",
            lambda w, u, dtype: ((u.to(dtype) == 0) & (u != 0)).sum().item() / max((u != 0).sum().item(), 1),
        ),
        Mistake(
            "An update of 0 changes nothing and is not lost: leave it out of the sum and of the count.",
            lambda w, u, dtype: ((w + u).to(dtype) == w.to(dtype)).float().mean().item(),
        ),
        Mistake(
            "This is the share of updates that arrive. Asked is the share that is lost.", lambda w, u, dtype: 1 - lost_updates(w, u, dtype)
        ),
        Mistake(
            "The share is taken of all updates; those of 0 do not count.",
            lambda w, u, dtype: (((w + u).to(dtype) == w.to(dtype)) & (u != 0)).float().mean().item(),
        ),
    ),
)

# ── What autocast does ────────────────────────────────────────────────────────────────────────────────────────────────


def in_full_precision(function, x, y):
    """function(x, y), computed in float32 from float32 inputs, whatever autocast is on around it."""
    with torch.autocast(x.device.type, enabled=False):
        return function(x.float(), y.float())


def _under(dtype):
    """Runs the learner's call under autocast, and looks whether autocast is as it was when it is back."""

    def watch(call):
        with torch.autocast("cpu", dtype=dtype):
            call()
            if not torch.is_autocast_enabled("cpu"):
                return "autocast was on around the call, and is off afterwards"
            if torch.get_autocast_dtype("cpu") != dtype:
                return f"autocast's dtype was {dtype} around the call, and is {torch.get_autocast_dtype('cpu')} afterwards"
        return None

    return watch


def _island_case(name, function, x=torch.float32, y=torch.float32, outside=torch.bfloat16, grad=False):
    def args():
        tensors = noise(3, 4, dtype=x) * 3, noise(4, 2, seed=1, dtype=y) * 3
        return function, *(tensor.requires_grad_() if grad else tensor for tensor in tensors)

    def verify(result, function, x, y):
        if said := difference(function(x.detach().float(), y.detach().float()), getattr(result, "detach", lambda: result)(), 1e-6):
            return said
        if grad:
            if not result.requires_grad:
                return "the result has no graph: gradients do not reach x and y"
            gradients = torch.autograd.grad(result.sum(), [x, y], allow_unused=True)
            if any(g is None for g in gradients):
                return "the gradient does not reach x and y: the graph is cut on the way"
        return None

    return Case(name, args, verify=verify, watch=None if outside is None else _under(outside))


def _mixing(x, y):
    return x @ y + 0.001 * (x @ y).softmax(dim=-1)


def _without_autocast(function, x, y):
    with torch.autocast("cpu", enabled=False):
        return function(x, y)


IN_FULL_PRECISION = Exercise(
    lesson=LESSON,
    solution=in_full_precision,
    hints=(
        "Two things are needed: `torch.autocast(device_type, enabled=False)` for what the function does, and something for what goes in.",
        "`with torch.autocast(x.device.type, enabled=False): return function(x.float(), y.float())`. Where one of them is "
        "left out, a product "
        "is computed in the low precision.",
    ),
    cases=(
        _island_case("bf16 autocast is on", torch.mm),
        _island_case("fp16 autocast is on", torch.mm, outside=torch.float16),
        _island_case("the inputs are bf16, as a layer under autocast gives them", torch.mm, torch.bfloat16, torch.bfloat16),
        _island_case("the inputs differ in dtype", _mixing, torch.float32, torch.bfloat16),
        _island_case("an input is fp64", torch.mm, torch.float64, torch.float32),
        _island_case("the function calls several operations", _mixing, torch.float16, torch.float16),
        _island_case("a gradient is wanted", torch.mm, torch.bfloat16, torch.float32, grad=True),
        _island_case("no autocast is on", torch.mm, torch.bfloat16, torch.bfloat16, outside=None),
    ),
    mistakes=(
        Mistake(
            "The inputs are float32, but autocast is on, and its product casts them down again: switch it off inside.",
            lambda function, x, y: function(x.float(), y.float()),
        ),
        Mistake(
            "The result is cast, after it was computed in low precision: the digits are gone by then. Cast what goes in.",
            lambda function, x, y: function(x, y).float(),
        ),
        Mistake(
            "Autocast is off, but what comes in from a layer under autocast is in low precision already, and stays so: "
            "`.float()` for each input.",
            _without_autocast,
        ),
    ),
)

# ── Backward, weights, gradients ──────────────────────────────────────────────────────────────────────────────────────


def master_step(model, masters, inputs, targets, loss_fn, rate):
    """One step of SGD: forward and backward in the model's low precision, the update in float32."""
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            parameter.copy_(master)
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            master -= rate * parameter.grad.float()
    return loss.item()


def _in_float32(outputs, targets):
    return F.cross_entropy(outputs.float(), targets)


class _Masters(list):
    """A list that remembers which tensors it held at first."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.given = tuple(self)


def _master_case(name, rate=0.1, dtype=torch.bfloat16, behind=0.0, stale=False):
    """`behind`: the size of the masters where they have nothing to do with the model's weights; 0 where they agree with them."""

    def args():
        model = made(lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))).to(dtype)
        masters = _Masters(
            behind * noise(*p.shape, seed=i) if behind else p.detach().float() + 1e-4 * noise(*p.shape, seed=i)
            for i, p in enumerate(model.parameters())
        )
        if stale:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
        return model, masters, noise(6, 4, seed=9, dtype=dtype), torch.arange(6) % 3, _in_float32, rate

    def verify(result, model, masters, inputs, targets, loss_fn, rate):
        twin, wanted, *rest = args()
        start = [master.clone() for master in wanted]
        loss = master_step(twin, wanted, *rest)
        if said := a_number(result, "the loss"):
            return said
        if any(m.dtype is not torch.float32 for m in masters):
            return "a master is no longer float32"
        if any(p.dtype is not dtype for p in model.parameters()):
            return f"the model is no longer {dtype}: forward and backward are to run in its own precision"
        if len(masters) != len(start) or any(m is not g for m, g in zip(masters, masters.given)):
            return "the list holds other tensors now: the masters themselves are to change, in place"
        if all(torch.equal(m, s) for m, s in zip(masters, start)):
            return "no master has moved: they are to change in place"
        for i, (master, goal, before) in enumerate(zip(masters, wanted, start)):
            # the step is compared: to 1 % of its largest element, more than the rounding of one bf16 product, and the sum's in float32
            came, due = master - before, goal - before
            if not (came - due).abs().max() <= 0.01 * due.abs().max() + torch.finfo(torch.float32).eps * before.abs().max():
                return f"master {i} moved by {brief(came.flatten()[:4])} …, and should move by {brief(due.flatten()[:4])} …"
        if not abs(result - loss) <= 1e-3 * abs(loss):
            return f"the loss is {result:.5f}, and should be {loss:.5f}: that of the model with the masters, before the update"
        return None

    return Case(name, args, mutates=True, verify=verify, tolerance=5e-4)  # for telling mistakes apart: a bf16 product may be rounded


def _masters_forgotten(model, masters, inputs, targets, loss_fn, rate):
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            master -= rate * parameter.grad.float()
    return loss.item()


def _rounded_update(model, masters, inputs, targets, loss_fn, rate):
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            parameter.copy_(master)
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            parameter -= rate * parameter.grad
            master.copy_(parameter)
    return loss.item()


def _stale_gradients(model, masters, inputs, targets, loss_fn, rate):
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            parameter.copy_(master)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            master -= rate * parameter.grad.float()
    return loss.item()


def _low_product(model, masters, inputs, targets, loss_fn, rate):
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            parameter.copy_(master)
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            master -= rate * parameter.grad
    return loss.item()


def _masters_by_name(model, masters, inputs, targets, loss_fn, rate):
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters):
            parameter.copy_(master)
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    for parameter, master in zip(model.parameters(), masters):
        master = master - rate * parameter.grad.float()
    return loss.item()


MASTER_STEP = Exercise(
    lesson=LESSON,
    solution=master_step,
    time_limit=20.0,
    hints=(
        "Three parts: masters into the model (`parameter.copy_(master)` rounds by itself), loss and backward, gradients into the masters. "
        "Which parts must not be recorded?",
        "Under `torch.no_grad()`: `parameter.copy_(master)` for each pair of the zip. Then `model.zero_grad()`, loss, `backward()`. Then, "
        "under no_grad again, `master -= rate * parameter.grad.float()`.",
    ),
    cases=(
        _master_case("model and masters agree, but for what rounding loses"),
        _master_case("the model lies behind its masters", behind=1.0),
        _master_case("the rate is small", rate=1e-4, behind=1.0),
        _master_case("gradients from before are there", behind=1.0, stale=True),
        _master_case("the model is fp16", dtype=torch.float16, behind=1.0),
        _master_case("the model is fp16 and the rate a millionth", rate=1e-6, dtype=torch.float16, behind=0.01),
    ),
    mistakes=(
        Mistake(
            "The model computes with its own, older weights: copy the masters into its parameters first.",
            _masters_forgotten,
        ),
        Mistake(
            "The update happens in low precision, and the master gets the rounded sum: what is smaller than half the spacing "
            "is lost. Move the "
            "master itself, in float32.",
            _rounded_update,
        ),
        Mistake("Gradients from before are in the sum: clear them before `backward`.", _stale_gradients),
        Mistake(
            "`master = master - …` gives the name to a new tensor, and the caller's stays as it was: `master -= …`.",
            _masters_by_name,
        ),
        Mistake(
            "rate × gradient is rounded to the gradient's dtype before it reaches the master, and in fp16 a small one becomes 0: "
            "`rate * parameter.grad.float()`.",
            _low_product,
        ),
    ),
)

# ── What it saves and what it costs ───────────────────────────────────────────────────────────────────────────────────


def bytes_by_dtype(forward):
    """Bytes that the graph of forward() keeps for backward, by the dtype of what is kept: a dict."""
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = tensor.dtype, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # holds what is kept, so that no memory is used twice
    totals = {}
    for dtype, size in kept.values():
        totals[dtype] = totals.get(dtype, 0) + size
    del result
    return totals


def _kept_case(name, build, dtype=None, tip=""):
    """`build` makes the function; with a dtype it runs under autocast."""

    def args():
        forward = made(build)
        if dtype is None:
            return (forward,)

        def under_autocast():
            with torch.autocast("cpu", dtype=dtype):
                return forward()

        return (under_autocast,)

    def verify(result, forward):
        right = bytes_by_dtype(forward)
        said = difference(right, dict(result) if isinstance(result, dict) else result)  # a Counter is a dict, too
        return said and f"it should be {brief(right)}: {said}{tip}"

    return Case(name, args, verify=verify)


def _squares():
    x = noise(10).requires_grad_()
    return lambda: (x * x).sum()


def _twice_the_same():
    x = noise(10).requires_grad_()
    y = noise(10, seed=1).requires_grad_()
    return lambda: (x * y + x.sin() * y).sum()


def _a_chain():
    x = noise(1000).requires_grad_()

    def forward():
        y = x
        for _ in range(20):
            y = y.tanh()  # each keeps what it gives
        return y.sum()

    return forward


def _a_slice():
    x = noise(100).requires_grad_()
    return lambda: (x[:10] * x[10:20]).sum()


def _network():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), noise(32, 8)
    return lambda: model(x).float().logsumexp(dim=1).mean()


def _with_classes():
    model, x, y = nn.Linear(8, 4), noise(32, 8), torch.arange(32) % 4
    return lambda: F.cross_entropy(model(x), y)


def _nothing():
    x = noise(10).requires_grad_()
    return lambda: (x + 1).sum()


def _every_time(forward):
    totals = {}

    def note(tensor):
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    return totals


def _elements(forward):
    return {dtype: size // dtype.itemsize for dtype, size in bytes_by_dtype(forward).items()}


BYTES_BY_DTYPE = Exercise(
    lesson=LESSON,
    solution=bytes_by_dtype,
    hints=(
        "Lesson 02: `torch.autograd.graph.saved_tensors_hooks(pack, unpack)` calls `pack` with each tensor that a graph keeps.",
        "In `pack`, note `tensor.untyped_storage().data_ptr()`, its `nbytes()` and the dtype, and return the tensor. Keep the result of "
        "forward() until you have counted: memory that was given back can be given out again.",
    ),
    cases=(
        _kept_case("one product keeps one tensor", _squares),
        _kept_case("one tensor is kept by two operations", _twice_the_same),
        _kept_case("slices of one storage are kept", _a_slice),
        _kept_case(
            "tensors of one size are kept one after the other",
            _a_chain,
            tip=". Where what `pack` was given is not kept, its memory is given out again, and two storages have one address: return it",
        ),
        _kept_case("a small network runs in fp32", _network),
        _kept_case("the network runs under bf16 autocast", _network, dtype=torch.bfloat16),
        _kept_case("the targets are whole numbers", _with_classes),
        _kept_case("nothing has to be kept", _nothing),
    ),
    mistakes=(
        Mistake(
            "What two operations keep is counted twice, and a slice with its own bytes alone: count storages, each once and whole.",
            _every_time,
        ),
        Mistake("These are numbers of elements. A float32 has 4 bytes, a bfloat16 2: `untyped_storage().nbytes()`.", _elements),
        Mistake(
            "The dtypes are right; one sum of all of them is not what is asked.", lambda forward: sum(bytes_by_dtype(forward).values())
        ),
    ),
)

# ── Too small for fp16 ────────────────────────────────────────────────────────────────────────────────────────────────


def largest_safe_scale(gradients, dtype=torch.float16):
    """The largest power of two by which all gradients can be multiplied without overflow, a float."""
    values = torch.cat([g.detach().double().abs().flatten() for g in gradients if g is not None] or [torch.zeros(0)])
    values = values[values.isfinite() & (values > 0)]
    if not len(values):
        return 1.0
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / values.max().item()))


def _scale_case(name, *gradients, dtype=None):
    def args():
        tensors = [g if g is None or isinstance(g, torch.Tensor) else torch.tensor(g) for g in gradients]
        return (tensors,) if dtype is None else (tensors, dtype)

    return Case(name, args)


def _of_values(gradients, choose, dtype):
    """2 ** floor(log2(largest number / choose(values))), where choose is what a mistake takes for the largest."""
    values = torch.cat([g.double().flatten() for g in gradients if g is not None])
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / choose(values[values.isfinite() & (values != 0)])))


LARGEST_SAFE_SCALE = Exercise(
    lesson=LESSON,
    solution=largest_safe_scale,
    hints=(
        "One number decides, the largest of all in absolute value. By what may it be multiplied? `torch.finfo(dtype).max` is the limit.",
        "`2.0 ** math.floor(math.log2(limit / largest))`. Look at finite values that are not 0, in float64, and return 1.0 if "
        "there is none.",
    ),
    cases=(
        _scale_case("the largest is negative", [1.0, -5.0], None),
        _scale_case("the largest is in the second tensor", [0.001, 0.5], [[2.0, 0.01], [0.3, 0.4]]),
        _scale_case("the gradients are small", [1e-7, 3e-6, -2e-5]),
        _scale_case("a gradient is too large already", [1e6, 1.0]),
        _scale_case("the largest just fits", [65504.0, 1.0]),
        _scale_case("a gradient is a power of two", [-0.25, 0.125]),
        _scale_case("the largest is a little below a power of two", [0.9999, 0.3]),
        _scale_case("some are 0, inf or nan", [0.0, math.inf, 0.5, math.nan, -math.inf]),
        _scale_case("the dtype is bf16", [1.0, -3.0], dtype=torch.bfloat16),
        _scale_case("the gradients are fp16 themselves", noise(8, dtype=torch.float16) / 16),
        _scale_case("all gradients are 0", [0.0, 0.0], None),
        _scale_case("no parameter has a gradient", None, None),
    ),
    mistakes=(
        Mistake(
            "This is no power of two. A factor that is one moves the exponent alone and rounds nothing.",
            lambda g, dtype=torch.float16: torch.finfo(dtype).max / max(x.double().abs().max().item() for x in g if x is not None),
        ),
        Mistake(
            "At this scale the largest gradient overflows: of the two powers of two around the limit it is the lower.",
            lambda g, dtype=torch.float16: 2 * largest_safe_scale(g, dtype),
        ),
        Mistake(
            "A negative gradient overflows too, towards -inf: take absolute values.",
            lambda g, dtype=torch.float16: _of_values(g, lambda v: v.max().item(), dtype),
        ),
        Mistake(
            "The exponents alone do not decide: 0.9999 · 2¹⁶ has the exponent of 65504 and is larger.",
            lambda g, dtype=torch.float16: _of_values(g, lambda v: 2.0 ** (math.frexp(v.abs().max().item())[1] - 1), dtype),
        ),
        Mistake(
            "The limit is that of fp16, whatever the dtype: `torch.finfo(dtype).max`.",
            lambda g, dtype=torch.float16: largest_safe_scale(g, torch.float16),
        ),
    ),
)

# ── The scaler, step by step ──────────────────────────────────────────────────────────────────────────────────────────


def next_scale(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    """(scale, good_steps) after GradScaler.update()."""
    if found_inf:
        return scale * backoff, 0
    if good_steps + 1 == interval:
        return scale * growth, 0
    return scale, good_steps + 1


def _update_case(name, *args):
    return Case(name, lambda: args)


def _never_forgets(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    return (scale * backoff, good_steps) if found_inf else next_scale(scale, good_steps, False, growth, backoff, interval)


def _counts_on(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    if found_inf:
        return scale * backoff, 0
    return (scale * growth if (good_steps + 1) % interval == 0 else scale), good_steps + 1


def _one_late(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    if found_inf:
        return scale * backoff, 0
    return (scale * growth, 0) if good_steps == interval else (scale, good_steps + 1)


def _counts_a_skip(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    return (scale * backoff, good_steps + 1) if found_inf else next_scale(scale, good_steps, False, growth, backoff, interval)


NEXT_SCALE = Exercise(
    lesson=LESSON,
    solution=next_scale,
    hints=(
        "Three things can happen to the scale, and each has its own count afterwards. In which of them does the count go on?",
        "found_inf: the scale times backoff, count 0. Else, if this step completes the interval: the scale times growth, "
        "count 0. Else: the "
        "scale, and the count plus 1.",
    ),
    cases=(
        _update_case("a good step is one of many", 1024.0, 5, False),
        _update_case("a good step completes the interval", 1024.0, 1999, False),
        _update_case("an inf was found", 1024.0, 5, True),
        _update_case("an inf was found in what would have been the last step of the interval", 1024.0, 1999, True),
        _update_case("an inf was found in the first step", 65536.0, 0, True),
        _update_case("the interval is one step", 8.0, 0, False, 2.0, 0.5, 1),
        _update_case("growth and backoff are others", 100.0, 3, False, 4.0, 0.25, 4),
        _update_case("backoff is another", 100.0, 3, True, 4.0, 0.25, 4),
    ),
    mistakes=(
        Mistake("After an inf, counting begins anew: good steps count in a row.", _never_forgets),
        Mistake("The skipped step is counted as a good one.", _counts_a_skip),
        Mistake("After the scale has grown, the count begins at 0 again.", _counts_on),
        Mistake(
            "`good_steps` are the steps before this one, and this one counts: with 1999 before it, the interval of 2000 is complete.",
            _one_late,
        ),
    ),
)


class _Recording(nn.Module):
    """A linear layer and a list of the dtypes that came out of it."""

    def __init__(self, inputs=4, outputs=3):
        super().__init__()
        self.linear, self.dtypes = nn.Linear(inputs, outputs), []

    def forward(self, x):
        outputs = self.linear(x)
        self.dtypes.append(outputs.dtype)
        return outputs


class _Scaler(torch.amp.GradScaler):
    """A GradScaler that says its scale."""

    def __repr__(self):
        return f"GradScaler(scale={self.get_scale():g})"


def scaler_of(scale=1024.0, interval=2000):
    return _Scaler("cpu", init_scale=scale, growth_interval=interval)


class _Set:
    """A model in fp16's range or not, with optimizer and scaler, and two ways of running it: what the check needs of a set-up."""

    def __init__(self, scale=1024.0, interval=2000, momentum=0.0, stale=False, planted=None):
        self.model = made(_Recording)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=momentum)
        self.scaler = scaler_of(scale, interval)
        if momentum:  # a step has been made before
            for p in self.model.parameters():
                p.grad = torch.ones_like(p)
            self.optimizer.step()
            self.optimizer.zero_grad()
        if stale:
            for p in self.model.parameters():
                p.grad = torch.full_like(p, 50.0)
        if planted is not None:
            self.model.linear.bias.register_hook(lambda gradient: gradient + planted)

    def state(self):
        momenta = [self.optimizer.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters()]
        weights, scaler = [p.detach().clone() for p in self.model.parameters()], self.scaler.state_dict()
        return weights, momenta, scaler["scale"], scaler["_growth_tracker"]


def _compared(stepped, wanted, state, goal, start, model):
    """The complaint about a step of training in fp16: what came, beside what the reference made of the same set-up."""
    if not model.dtypes or any(dtype is not torch.float16 for dtype in model.dtypes):
        ran = str(model.dtypes[-1]) if model.dtypes else "nothing"
        return f"the forward pass runs in {ran}, not in fp16: autocast, for the inputs' device (here the CPU), with dtype=torch.float16"
    if not isinstance(stepped, (bool, int)) or stepped not in (True, False):
        return f"the answer to *did it step?* is True or False, and came as {brief(stepped)}"
    moved = any(not torch.equal(a, b) for a, b in zip(state[0], start[0]))
    if wanted and not moved:
        return "no parameter has moved"
    if moved and not wanted:
        return "the gradients are not finite, and the parameters moved all the same"
    due = max((g - s).abs().max().item() for g, s in zip(goal[0], start[0]))
    for came, right, before in zip(state[0], goal[0], start[0]):
        if not came.isfinite().all() or (came - right).abs().max() > 0.01 * due + 1e-6:
            length, due = (math.sqrt(sum((a - b).square().sum().item() for a, b in zip(ends[0], start[0]))) for ends in (state, goal))
            if abs(length - due) > 0.01 * due:
                return f"the parameters moved by {length:.4g} in all, and should move by {due:.4g}"
            return f"the parameters moved by {length:.4g} in all, which is right, and not in the direction that is due"
    if (state[2], state[3]) != (goal[2], goal[3]):
        return f"the scaler's scale is {state[2]:g} and its count {state[3]} afterwards; they should be {goal[2]:g} and {goal[3]}"
    for came, right in zip(state[1], goal[1]):
        if right is not None and (came is None or (came - right).abs().max() > 0.01 * right.abs().max() + 1e-6):
            return "the optimizer's momentum is not what it should be after this step"
    if bool(stepped) != wanted:
        return f"it says {bool(stepped)}, and the optimizer {'stepped' if wanted else 'skipped'}"
    return None


def scaled_step(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    """One step of training in fp16 autocast, with gradients clipped to max_norm: did it step?"""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype=torch.float16):
        loss = loss_fn(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return bool(norm.isfinite())


def _step_case(name, max_norm=100.0, times=1.0, **given):
    def args():
        found = _Set(**given)
        inputs = times * noise(6, 4, seed=3)
        return found.model, inputs, torch.arange(6) % 3, F.cross_entropy, found.optimizer, found.scaler, max_norm

    def verify(result, model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
        twin, start = _Set(**given), _Set(**given).state()
        wanted = scaled_step(twin.model, *args()[1:4], twin.optimizer, twin.scaler, max_norm)
        came = _Set.__new__(_Set)
        came.model, came.optimizer, came.scaler = model, optimizer, scaler
        return _compared(result, wanted, came.state(), twin.state(), start, model)

    return Case(name, args, mutates=True, verify=verify)


def _stepping(clip_first=False, clear=True, update=True, clip=True, says=None):
    """A scaled_step with a fault."""

    def step(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
        if clear:
            optimizer.zero_grad()
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = loss_fn(model(inputs), targets)
        scaler.scale(loss).backward()
        if not clip_first:
            scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        if update:
            scaler.update()
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
        return moved if says is None else says

    return step


SCALED_STEP = Exercise(
    lesson=LESSON,
    solution=scaled_step,
    time_limit=20.0,
    hints=(
        "Seven calls, in this order: zero_grad; forward and loss under autocast; scale and backward; unscale_; clip; step; "
        "update. Which of "
        "their results says whether all gradients were finite?",
        "`clip_grad_norm_` returns the norm before clipping: it is finite where all gradients are, unless it overflows itself. "
        "After `unscale_`, `scaler.step` neither divides nor looks again.",
    ),
    cases=(
        _step_case("the gradients are short enough"),
        _step_case("the gradients have to be clipped", max_norm=0.1),
        _step_case("the gradients are long, and clipped to 1", max_norm=1.0, times=20.0),
        _step_case("gradients from before are there", stale=True),
        _step_case("the scale is 65536", max_norm=0.5, scale=65536.0),
        _step_case("a gradient is inf", planted=math.inf),
        _step_case("a gradient is nan, and there is momentum", planted=math.nan, momentum=0.9),
        _step_case("the scale is so high that gradients overflow", scale=2.0**30),
        _step_case("the scale is due to grow", interval=1),
    ),
    mistakes=(
        Mistake(
            "Clipping saw the scaled gradients, and the step is too short by the scale: `scaler.unscale_(optimizer)` comes first.",
            _stepping(clip_first=True),
        ),
        Mistake("Gradients from before are in the sum: `optimizer.zero_grad()`.", _stepping(clear=False)),
        Mistake("The scaler was not updated: `scaler.update()`, after the step.", _stepping(update=False)),
        Mistake("The gradients are not clipped.", _stepping(clip=False)),
        Mistake("The optimizer skips where a gradient is not finite: then the answer is False.", _stepping(says=True)),
    ),
)

# ── Accumulation ──────────────────────────────────────────────────────────────────────────────────────────────────────


def accumulated_scaled_step(model, micro_batches, loss_fn, optimizer, scaler):
    """One step in fp16 autocast for a list of micro-batches (inputs, targets): did it step?"""
    optimizer.zero_grad()
    samples = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype=torch.float16):
            loss = loss_fn(model(inputs), targets) * (len(targets) / samples)
        scaler.scale(loss).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


def _window_case(name, *sizes, **given):
    def args():
        found = _Set(**given)
        inputs, targets = noise(sum(sizes), 4, seed=3), torch.arange(sum(sizes)) % 3
        return found.model, list(zip(inputs.split(list(sizes)), targets.split(list(sizes)))), F.cross_entropy, found.optimizer, found.scaler

    def verify(result, model, micro_batches, loss_fn, optimizer, scaler):
        twin, start = _Set(**given), _Set(**given).state()
        wanted = accumulated_scaled_step(twin.model, *args()[1:3], twin.optimizer, twin.scaler)
        came = _Set.__new__(_Set)
        came.model, came.optimizer, came.scaler = model, optimizer, scaler
        return _compared(result, wanted, came.state(), twin.state(), start, model)

    return Case(name, args, mutates=True, verify=verify)


def _window(weigh, clear_each=False, update_each=False, unscale_each=False, clear=True, says=None):
    """An accumulated_scaled_step with a fault; weigh(n, samples, batches) is what a micro-batch's loss is multiplied by."""

    def step(model, micro_batches, loss_fn, optimizer, scaler):
        if clear:
            optimizer.zero_grad()
        samples = sum(len(targets) for _, targets in micro_batches)
        scale = scaler.get_scale()
        for inputs, targets in micro_batches:
            if clear_each:
                optimizer.zero_grad()
            with torch.autocast(inputs.device.type, dtype=torch.float16):
                loss = loss_fn(model(inputs), targets) * weigh(len(targets), samples, len(micro_batches))
            scaler.scale(loss).backward()
            if unscale_each:
                scaler.unscale_(optimizer)
            if update_each:
                scaler.update() if unscale_each else (scaler.step(optimizer), scaler.update())
        if not update_each:
            scaler.step(optimizer)
            scaler.update()
        elif unscale_each:
            optimizer.step()
        return scaler.get_scale() >= scale if says is None else says

    return step


def _share(n, samples, batches):
    return n / samples


ACCUMULATED_SCALED_STEP = Exercise(
    lesson=LESSON,
    solution=accumulated_scaled_step,
    time_limit=20.0,
    hints=(
        "The gradient of a mean over all samples is the sum of the micro-batches' gradients, each weighed by its share of the samples "
        "(lesson 03). Where in that do `step` and `update` belong?",
        "zero_grad; for each micro-batch: loss under autocast, times len(targets) / all samples, scaled, backward. After the "
        "loop, once: step, "
        "update. The scale fell if, and only if, the step was skipped.",
    ),
    cases=(
        _window_case("there is one micro-batch", 6),
        _window_case("two micro-batches of one size", 5, 5),
        _window_case("three micro-batches of different sizes", 6, 3, 1),
        _window_case("gradients from before are there", 4, 2, stale=True),
        _window_case("the scale is due to grow after each step", 4, 2, 3, interval=1),
        _window_case("the scale is due to grow after two steps", 4, 2, 3, interval=2),
        _window_case("a gradient is inf", 4, 2, planted=math.inf),
        _window_case("the scale is so high that gradients overflow, and there is momentum", 4, 2, scale=2.0**30, momentum=0.9),
    ),
    mistakes=(
        Mistake(
            "This is the mean of the micro-batches' means: a sample of a small one counts more than one of a large one. Weigh by samples.",
            _window(lambda n, samples, batches: 1 / batches),
        ),
        Mistake("The micro-batches' losses are added up: nothing divides by their number.", _window(lambda n, samples, batches: 1.0)),
        Mistake("The gradients are cleared for each micro-batch, and the last one's is left.", _window(_share, clear_each=True)),
        Mistake("Gradients from before are in the sum: `optimizer.zero_grad()`, once, at the beginning.", _window(_share, clear=False)),
        Mistake(
            "The optimizer steps for each micro-batch. The window is one step: step and update come once, after the loop.",
            _window(_share, update_each=True),
        ),
        Mistake(
            "`unscale_` and `update` for each micro-batch divide again what has been added up: one scale from the start of a "
            "window to its end.",
            _window(_share, update_each=True, unscale_each=True),
        ),
        Mistake("The optimizer skips where a gradient is not finite: then the answer is False.", _window(_share, says=True)),
    ),
)

# ── Clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_half(model, inputs, targets, steps=10, rate=0.1):
    """Losses of `steps` steps of SGD on the mean cross-entropy, computed in fp16: a list of floats."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def _from_zero():
    model = _Recording()
    nn.init.zeros_(model.linear.weight)
    return model


def _half_case(name, steps, rate, build=_Recording, times=1.0):
    def args():
        return made(build), times * noise(6, 4, seed=3), torch.arange(6) % 3, steps, rate

    def verify(result, model, inputs, targets, steps, rate):
        twin, start = args()[0], args()[0]
        losses = train_half(twin, *args()[1:])
        if not isinstance(result, (list, tuple)) or len(result) != len(losses) or any(a_number(loss, "a loss") for loss in result):
            return f"the losses should be a list of {len(losses)} floats, and came as {brief(result)}"
        if any(p.dtype is not torch.float32 for p in model.parameters()):
            return f"the weights are {next(model.parameters()).dtype} afterwards, and should be float32"
        if not model.dtypes or any(dtype is not torch.float16 for dtype in model.dtypes):
            return f"the layer's products come out in {model.dtypes[-1] if model.dtypes else 'nothing'}: it is no longer computed in fp16"
        for (which, after), right, before in zip(model.named_parameters(), twin.parameters(), start.parameters()):
            came, due = (after - before).detach(), (right - before).detach()
            if not (came - due).abs().max() <= 0.02 * due.abs().max():
                moved = f"{which} moved by {came.norm().item():.4g} in all, and should move by {due.norm().item():.4g}"
                return f"{moved}: what fp16 cannot hold, of a weight or of a gradient, is lost at each step"
        if not max(abs(a - b) for a, b in zip(result, losses)) <= 0.01:
            return f"the losses are {brief(list(result))}, and should be about {brief(losses)}"
        return None

    return Case(name, args, mutates=True, verify=verify)


def _half_without_scaler(model, inputs, targets, steps=10, rate=0.1):
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.half()).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.float()
    return losses


def _autocast_alone(model, inputs, targets, steps=10, rate=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _in_fp32(model, inputs, targets, steps=10, rate=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


TRAIN_HALF = Exercise(
    lesson=LESSON,
    solution=train_half,
    time_limit=20.0,
    hints=(
        "The scaler refuses to unscale gradients that are fp16: it expects them in float32. Of which dtype is the gradient of a weight?",
        'Leave the weights in float32, and let `torch.autocast("cpu", dtype=torch.float16)` cast them where they are used. Then '
        "`model.half()` "
        "and the `.half()` of the inputs go.",
    ),
    cases=(
        _half_case("ten steps are made at a rate of 0.1", 10, 0.1),
        _half_case("the rate is small, and so is each update", 5, 1e-4),
        _half_case("one step is made", 1, 0.5),
        _half_case("the inputs are small, and so are the gradients", 1, 0.1, _from_zero, 5e-7),
    ),
    mistakes=(
        Mistake(
            "Without the scaler nothing complains, and the weights are rounded to fp16 at each step: small updates are lost, and gradients "
            "underflow. Weights stay float32, autocast casts them.",
            _half_without_scaler,
        ),
        Mistake("It trains, in float32. Forward and backward are to be computed in fp16: autocast.", _in_fp32),
        Mistake(
            "The weights are right now, and the scaler is gone: in backward, small gradients become 0 in fp16 before they reach the "
            "weights. The scaler was not at fault; it wants float32 weights.",
            _autocast_alone,
        ),
    ),
)


def train_norm(model, batches, rate=1e-3):
    """The model, trained by AdamW with one step for each batch (inputs, targets), in bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model


class _Normed(nn.Module):
    """A linear layer, a LayerNorm, a linear layer, and a list of the dtypes that came out of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last, self.dtypes = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3), []

    def forward(self, x):
        hidden = self.first(x)
        self.dtypes.append(hidden.dtype)
        return self.last(self.norm(hidden).relu())


def _norm_case(name, steps, rate):
    def args():
        batches = [(noise(10, 4, seed=i), torch.arange(10) % 3) for i in range(steps)]
        return made(_Normed), batches, rate

    def verify(result, model, batches, rate):
        if not isinstance(result, nn.Module):
            return f"it should return the model, and returned {kind(result)}"
        if not result.dtypes or any(dtype is not torch.bfloat16 for dtype in result.dtypes):
            given = result.dtypes[-1] if result.dtypes else "nothing"
            return f"the first layer's products come out in {given}: it is no longer computed in bf16"
        twin, start = args()[0], args()[0]
        train_norm(twin, *args()[1:])
        parts = zip(result.named_parameters(), twin.parameters(), start.parameters())
        for (which, came), right, before in parts:
            due, moved = (right - before).detach(), came.detach().float() - before.detach()
            # 35 %: two runs in bf16 are not alike, and weights that are rounded to bf16 once, at the end, are no less trained
            if due.norm() and not (moved - due).norm() <= 0.35 * due.norm():
                came, right, apart = (steps.norm().item() for steps in (moved, due, moved - due))
                return f"{which} moved by {came:.4g} in all; with float32 weights by {right:.4g}, and the two lie {apart:.2g} apart"
        return None

    return Case(name, args, mutates=True, verify=verify)


def _pure_bf16(model, batches, rate=1e-3):
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(torch.bfloat16)).float(), targets).backward()
        optimizer.step()
    return model


def _norms_in_fp32(model, batches, rate=1e-3):
    model.to(torch.bfloat16)
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(torch.bfloat16)).float(), targets).backward()
        optimizer.step()
    return model


def _plain_training(model, batches, rate=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


def _larger_rate(model, batches, rate=1e-3):
    return _pure_bf16(model, batches, 10 * rate)


TRAIN_NORM = Exercise(
    lesson=LESSON,
    solution=train_norm,
    time_limit=20.0,
    hints=(
        "How far apart are the numbers of bf16 near 1, and how long is a step of AdamW at this rate? `spacing(1.0, "
        "torch.bfloat16)` and section 2.",
        "Weights need the digits of float32. Leave the model as it is, and run forward and loss under "
        '`torch.autocast("cpu", dtype=torch.bfloat16)`.',
    ),
    cases=(
        _norm_case("twenty steps are made at a rate of 0.001", 20, 1e-3),
        _norm_case("forty steps are made at a rate of 0.0003", 40, 3e-4),
        _norm_case("the rate is large enough for bf16, too", 4, 0.02),
    ),
    mistakes=(
        Mistake(
            "The weights are bf16, and beside 1 a step of AdamW, about the rate, is less than half the spacing: 1 + 0.001 "
            "rounds to 1. Keep "
            "weights in float32, and let autocast compute in bf16.",
            _pure_bf16,
        ),
        Mistake(
            "The LayerNorm's weights are float32 now, and the others are bf16 still: there, a step is rounded to whole spacings, and one "
            "of less than half is lost. All weights need float32.",
            _norms_in_fp32,
        ),
        Mistake("It trains, in float32. Forward and backward are to be computed in bf16: autocast.", _plain_training),
        Mistake(
            "A larger rate moves these weights and makes another training of it. What is lost is lost in the weights' dtype.", _larger_rate
        ),
    ),
)


def masked_attention(queries, keys, values, padding):
    """Each query's mean of the values, weighed by the softmax of its scores: (N, Q, D), finite."""
    scores = queries @ keys.transpose(1, 2)
    scores = scores.masked_fill(padding[:, None, :], torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) @ values


def _attention_case(name, padding, size=1.0, dtype=torch.float16, queries=2, cleared=False):
    def args():
        padded = torch.tensor(padding)
        n, k = padded.shape
        keys = torch.ones(n, k, 4) + 0.1 * noise(n, k, 4)
        if cleared:
            keys[padded] = 0.0
        given = (-size * torch.ones(n, queries, 4)).to(dtype), keys.to(dtype), noise(n, k, 4, seed=1, dtype=dtype)
        return *(tensor.requires_grad_() for tensor in given), padded

    def verify(result, queries, keys, values, padding):
        if not isinstance(result, torch.Tensor) or result.shape != queries.shape[:2] + values.shape[2:]:
            return f"the result should have shape {tuple(queries.shape[:2] + values.shape[2:])}, and came as {brief(result)}"
        if result.dtype is not queries.dtype:
            return f"the result is {result.dtype}, and the queries are {queries.dtype}"
        if not result.isfinite().all():
            where = [i for i, r in enumerate(result) if not r.isfinite().all()]
            return f"the result is not finite in sequences {where} of the batch"
        some = ~padding.all(dim=1)
        right = masked_attention(queries.double(), keys.double(), values.double(), padding)
        # scores are rounded to a few units of their dtype, and enter the softmax's exponent
        scores = (queries.double() @ keys.double().transpose(1, 2)).abs().max().item()
        room = 4 * torch.finfo(queries.dtype).eps * (1 + scores) * values.double().abs().max().item()
        if (result.double() - right)[some].abs().max() > room:
            return f"values differ by up to {(result.double() - right)[some].abs().max().item():.3g} where rounding explains {room:.2g}"
        if not result.requires_grad:
            return "the result has no graph: no gradient reaches queries, keys and values"
        gradients = torch.autograd.grad(result.float().sum(), (queries, keys, values), allow_unused=True)
        for which, gradient in zip(("queries", "keys", "values"), gradients):
            if gradient is not None and not gradient.isfinite().all():
                return f"the result is finite, and the gradient of the {which} is not: there is inf or nan on the way to the result"
        return None

    return Case(name, args, verify=verify)


def _added(queries, keys, values, padding):
    scores = queries @ keys.transpose(1, 2)
    mask = padding[:, None, :].to(scores.dtype) * torch.finfo(scores.dtype).min
    return (scores + mask).softmax(dim=-1) @ values


def _added_in_fp32(queries, keys, values, padding):
    scores = (queries @ keys.transpose(1, 2)).float()
    scores = scores.masked_fill(padding[:, None, :], -math.inf)
    return (scores.softmax(dim=-1).to(values.dtype)) @ values


def _hidden(queries, keys, values, padding):
    return _added(queries, keys, values, padding).nan_to_num()


def _small_constant(queries, keys, values, padding):
    scores = queries @ keys.transpose(1, 2)
    return (scores - 10.0 * padding[:, None, :].to(scores.dtype)).softmax(dim=-1) @ values


def _no_mask(queries, keys, values, padding):
    return (queries @ keys.transpose(1, 2)).softmax(dim=-1) @ values


MASKED_ATTENTION = Exercise(
    lesson=LESSON,
    solution=masked_attention,
    hints=(
        "What is the lowest number of fp16 plus -20? And what does softmax make of a row that is -inf throughout?",
        "Put the number in the place of the score, in place of adding it: `scores.masked_fill(padding[:, None, :], "
        "torch.finfo(scores.dtype).min)`.",
    ),
    cases=(
        _attention_case("scores are small", [[False, False, True], [False, True, True]]),
        _attention_case("scores are strongly negative", [[False, False, True], [False, True, True]], size=5.0),
        _attention_case("all keys of a sequence are padding", [[False, False, True], [True, True, True]]),
        _attention_case("all keys of a sequence are padding, and scores are strongly negative", [[False, True], [True, True]], size=12.0),
        _attention_case("padding is 0 and would score highest", [[False, False, True], [False, True, True]], size=8.0, cleared=True),
        _attention_case("nothing is padded", [[False, False], [False, False]], size=3.0),
        _attention_case("the dtype is bf16", [[False, True, True], [True, True, True]], size=10.0, dtype=torch.bfloat16),
        _attention_case("the dtype is fp32", [[False, True, True], [True, True, True]], size=10.0, dtype=torch.float32),
        _attention_case("scores are about -2000", [[False, False, True], [False, True, True]], size=500.0, dtype=torch.float32),
    ),
    mistakes=(
        Mistake(
            "The mask is still added: the lowest number plus a negative score is -inf, and a row of -inf alone gives nan. "
            "Fill, do not add.",
            _added,
        ),
        Mistake(
            "With -inf a row that is padding throughout has no largest score: inf - inf is nan. Fill with the dtype's lowest number.",
            _added_in_fp32,
        ),
        Mistake("The keys that are padding take part.", _no_mask),
        Mistake(
            "`nan_to_num` hides the nan in the result. In backward it is still there, and the gradients are nan: let none arise.", _hidden
        ),
        Mistake("A constant such as -10 leaves padding a weight of e⁻¹⁰ and more: it must lie far below every score.", _small_constant),
    ),
)


def resume(checkpoint, model, optimizer, scaler):
    """Bring model, optimizer and scaler, all new, to where the training stopped."""
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])


def _parts(scale=2.0**16, seed=0, momentum=0.9):
    model = made(lambda: nn.Linear(4, 3), seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum), scaler_of(scale)


def _resume_case(name, scale, good_steps):
    def saved():
        model, optimizer, scaler = _parts(scale, seed=1)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        state = scaler.state_dict() | {"_growth_tracker": good_steps}
        return {"model": model.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict()), "scaler": state}

    def verify(result, checkpoint, model, optimizer, scaler):
        for what, part in (("model", model), ("optimizer", optimizer), ("scaler", scaler)):
            if said := difference(saved()[what], part.state_dict()):
                return f"the {what} is not where it was (that it returns nothing is right): {said}"
        if said := difference(saved(), checkpoint):
            return f"the checkpoint was changed: {said}"
        return None

    return Case(name, lambda: (saved(), *_parts()), mutates=True, verify=verify)


def _scale_alone(checkpoint, model, optimizer, scaler):
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(scaler.state_dict() | {"scale": checkpoint["scaler"]["scale"]})


def _two_of_three(checkpoint, model, optimizer, scaler):
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


RESUME = Exercise(
    lesson=LESSON,
    solution=resume,
    hints=(
        "After a start, the first batches are skipped. Who skips steps, and where does it begin?",
        'A new scaler begins at 65536 and has to find its scale again: `scaler.load_state_dict(checkpoint["scaler"])`.',
    ),
    cases=(
        _resume_case("the scale has come down", 1024.0, 17),
        _resume_case("the scale has gone up", 2.0**20, 1999),
        _resume_case("the scale is where a new one begins", 2.0**16, 3),
    ),
    mistakes=(
        Mistake(
            "The scaler is new: it begins at 65536, and the first steps are skipped until its scale is small enough. Load "
            "into the one that was "
            "given.",
            _two_of_three,
        ),
        Mistake("The scale is back, the count of good steps is not: the next doubling comes too late.", _scale_alone),
    ),
)


def running_mean(batches):
    """Mean of all numbers of the batches, a float, to four digits."""
    total, count = 0.0, 0
    for batch in batches:
        total += batch.double().sum().item()
        count += batch.numel()
    return total / count


def _mean_case(name, build):
    def verify(result, batches):
        if said := a_number(result, "the mean"):
            return said
        right = running_mean(build())
        return None if abs(result - right) <= 1e-4 * abs(right) else f"the mean is {result:.6g}, and should be {right:.6g}"

    return Case(name, lambda: (iter(build()),), mutates=True, verify=verify)


def _around(value, count, size, dtype, seed=0):
    return lambda: [batch.to(dtype) for batch in (value + noise(count, size, seed=seed)).unbind()]


def _mean_of(total_dtype, count_dtype):
    def mean(batches):
        total = count = 0
        for batch in batches:
            total = total + batch.to(total_dtype or batch.dtype).sum()
            count = count + torch.tensor(batch.numel(), dtype=count_dtype or batch.dtype)
        return (total / count).item()

    return mean


def _mean_of_batch_means(batches):
    means = [batch.double().mean().item() for batch in batches]
    return sum(means) / len(means)


def _late_cast(batches):
    total = count = 0
    for batch in batches:
        total = total + batch.sum()
        count = count + batch.numel()
    return total.double().item() / count


RUNNING_MEAN = Exercise(
    lesson=LESSON,
    solution=running_mean,
    hints=(
        "What is 256 + 8 in bf16, and what is 2048 + 8? And 512 + 1?",
        "The batches may be in low precision; what is kept over many of them may not. `batch.double().sum().item()` for the "
        "sum, a Python int for "
        "the count.",
    ),
    cases=(
        _mean_case("there are a few batches", _around(2.0, 5, 8, torch.float32)),
        _mean_case("there are hundreds of batches in bf16", _around(2.0, 600, 8, torch.bfloat16)),
        _mean_case("there are hundreds of batches in fp16", _around(2.0, 600, 8, torch.float16)),
        _mean_case("one batch's sum is beyond fp16", _around(90.0, 3, 2000, torch.float16)),
        _mean_case("there are many numbers in fp32, far from 0", _around(1000.0, 300, 50, torch.float32)),
        _mean_case(
            "the batches differ in size",
            lambda: [noise(7).to(torch.bfloat16) + 1, noise(1, seed=1).to(torch.bfloat16) + 4, noise(3, 5, seed=2).to(torch.bfloat16)],
        ),
    ),
    mistakes=(
        Mistake(
            "Sum and count are kept in the batches' dtype: in bf16 a count that grows by ones stays at 256, in fp16 at 2048.",
            _mean_of(None, None),
        ),
        Mistake("The count is right now. The sum is still kept in the batches' dtype.", _late_cast),
        Mistake(
            "This is the mean of the batches' means: a number of a small batch counts more than one of a large one.", _mean_of_batch_means
        ),
    ),
)


def step_both(loss, optimizers, scaler):
    """One step of each optimizer with the gradients of the loss, which is not scaled yet."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


def _both_case(name, planted=(0.0, 0.0), interval=2000, stale=False, count=2):
    def args():
        parts = [nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(count)]
        for part, extra in zip(parts, planted):
            if extra:
                part.register_hook(lambda gradient, extra=extra: gradient + extra)
            if stale:
                part.grad = torch.full_like(part, 7.0)
        loss = sum((i + 1) * part.sum() for i, part in enumerate(parts))
        return loss, [torch.optim.SGD([part], lr=1.0) for part in parts], scaler_of(1024.0, interval)

    def verify(result, loss, optimizers, scaler):
        wanted, twins, right = args()
        step_both(wanted, twins, right)
        for i, (optimizer, twin) in enumerate(zip(optimizers, twins)):
            came, due = ([p.detach() for p in o.param_groups[0]["params"]][0] for o in (optimizer, twin))
            start = torch.tensor([1.0, 2.0])
            if not torch.allclose(came, due, rtol=1e-5, atol=1e-6):
                moved = f"part {i} moved by {brief(start - came)}, and should move by {brief(start - due)}"
                return f"{moved} (that it returns nothing is right)"
        if scaler.state_dict() == args()[2].state_dict():
            return "scale and count are as before the step: the scaler was not updated"
        if scaler.state_dict() != right.state_dict():
            return (
                f"the scale is {scaler.get_scale():g} and the count of good steps {scaler.state_dict()['_growth_tracker']} afterwards; "
                f"they should be "
                f"{right.get_scale():g} and {right.state_dict()['_growth_tracker']}"
            )
        return None

    return Case(name, args, mutates=True, verify=verify)


def _update_each(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


def _never_updates(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)


def _without_skipping(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        optimizer.step()
    scaler.update()


def _all_or_none(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad.isfinite().all() for p in held):
        for optimizer in optimizers:
            scaler.step(optimizer)
    scaler.update()


def _stale_both(loss, optimizers, scaler):
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()


STEP_BOTH = Exercise(
    lesson=LESSON,
    solution=step_both,
    hints=(
        "The length is wrong by the factor by which the scale has changed. When does it change, and who divides by it after that?",
        "The gradients of both parts carry the scale at which the loss went backward. `scaler.update()` comes once, when "
        "every optimizer has stepped.",
    ),
    cases=(
        _both_case("all gradients are finite"),
        _both_case("the scale is due to grow", interval=1),
        _both_case("the scale is due to grow after the next step", interval=2),
        _both_case("the first part's gradient is inf", planted=(math.inf, 0.0)),
        _both_case("the second part's gradient is nan", planted=(0.0, math.nan)),
        _both_case("gradients from before are there", stale=True),
        _both_case("there are three parts", planted=(0.0, math.inf, 0.0), interval=1, count=3),
    ),
    mistakes=(
        Mistake(
            "`update` after the first optimizer changes the scale, and the second one's gradients are divided by the new one: "
            "once, at the end.",
            _update_each,
        ),
        Mistake("The scaler is never updated: `scaler.update()`, once, at the end.", _never_updates),
        Mistake("An optimizer whose gradients are not finite must skip: `scaler.step(optimizer)` does that.", _without_skipping),
        Mistake("One optimizer's inf stopped the other, too. Each skips for itself.", _all_or_none),
        Mistake("Gradients from before are in the sum: clear them before `backward`.", _stale_both),
    ),
)

EXERCISES = (
    SPACING,
    LOST_UPDATES,
    IN_FULL_PRECISION,
    MASTER_STEP,
    BYTES_BY_DTYPE,
    LARGEST_SAFE_SCALE,
    NEXT_SCALE,
    SCALED_STEP,
    ACCUMULATED_SCALED_STEP,
    TRAIN_HALF,
    TRAIN_NORM,
    MASKED_ATTENTION,
    RESUME,
    RUNNING_MEAN,
    STEP_BOTH,
)
