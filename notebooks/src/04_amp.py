# %% [markdown]
# # 04 · Mixed precision
#
# After this lesson you can say what a number format holds and loses, what autocast does to each operation, what mixed precision saves on your machine and what it does not, and you can write a training step in fp16 that neither stalls nor breaks.
#
# 180 to 240 minutes, best in three sittings: sections 1 to 3, 4 to 6, and the rest. It builds on lesson 02, what a graph keeps for backward, and on lesson 03, the training loop with clipping, accumulation and schedulers.
#
# Where this lesson says *the articles*, it means the three of lesson 01. Eight of their statements on mixed precision are put to the test, two more go beyond them; a table at the end says what became of each.
#
# | | | |
# | --- | --- | --- |
# | [1 The bits of a number](#1-·-The-bits-of-a-number) | [5 What it saves and what it costs](#5-·-What-it-saves-and-what-it-costs) | [9 When it breaks](#9-·-When-it-breaks) |
# | [2 What rounding loses](#2-·-What-rounding-loses) | [6 Too small for fp16](#6-·-Too-small-for-fp16) | [Clinic](#Clinic) |
# | [3 What autocast does](#3-·-What-autocast-does) | [7 The scaler, step by step](#7-·-The-scaler,-step-by-step) | [What you take with you](#What-you-take-with-you) |
# | [4 Backward, weights, gradients](#4-·-Backward,-weights,-gradients) | [8 Accumulation, two optimizers, a checkpoint](#8-·-Accumulation,-two-optimizers,-a-checkpoint) | |

# %% tags=["parameters"]
DEVICE = "auto"
SEED = 0
QUICK = True

# %%
import copy
import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn

import course_utils.toolkit.precision as kit
from course_utils import bars, check, curves, explore_float, explore_loss_scale, hint
from course_utils import load, predict, raises, solution, start, table

lesson = start("04_amp", DEVICE, SEED, QUICK)

# %% [markdown]
# ## A program that runs
#
# A small network learns digits, with SGD, momentum, and gradients clipped to a norm of 1. To save memory and time, the arithmetic is moved to 16 bits, in one of two formats, **fp16** and **bf16**: `torch.autocast` casts what goes into the layers. A loss scaler, `GradScaler`, is said to belong to fp16, so there it is switched on. Nothing else differs between the three runs.

# %%
digits = load("digits")
train_x = (digits.train_images[:1000].flatten(1) / 255).to(lesson.device)
train_y = digits.train_labels[:1000].to(lesson.device)


def train(dtype, steps=60):
    """The losses of a digit network, step by step."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)).to(lesson.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(lesson.device.type, enabled=dtype is torch.float16)
    losses = []
    for step in range(steps):
        batch = slice(50 * (step % 20), 50 * (step % 20) + 50)
        with torch.autocast(lesson.device.type, dtype=dtype, enabled=dtype is not torch.float32):
            loss = F.cross_entropy(model(train_x[batch]), train_y[batch])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


# %%
runs = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
runs = {name: train(dtype) for name, dtype in runs.items()}
curves(runs, "step", "loss")
ends = {name: sum(losses[-10:]) / 10 for name, losses in runs.items()}
print({name: round(end, 2) for name, end in ends.items()}, "  guessing:", round(math.log(10), 2))
assert ends["bf16"] < 1 and ends["fp32"] < 1 and ends["fp16"] > 2

# %% [markdown]
# fp32 and bf16 learn. The line of fp16 is flat: no error, no warning, no nan, finite gradients at every step, and after 60 steps a loss as from guessing. Someone who sees this says that fp16 has too few digits for this network. It has more than bf16. One line of `train` stands in the wrong place, and by section 7 you know which, and why it can stand there for months.

# %% [markdown]
# ## 1 · The bits of a number
#
# A floating-point number is a sign, an **exponent**, which says between which two powers of two it lies, and a **mantissa**, which says where between them. The toolkit's `kit.float_bits` shows the three for any format. Here is 0.1:

# %% tags=["nbval-check-output"]
for name in ("fp32", "tf32", "bf16", "fp16"):
    bits = kit.float_bits(0.1, name)
    print(f"{name}   {str(bits):34} {bits.value!r}")

# %% [markdown]
# **fp32** is torch.float32: 8 bits of exponent, 23 of mantissa. **fp16** is torch.float16, with 5 and 10. **bf16** is torch.bfloat16, with 8 and 7: the first half of an fp32. **tf32** is no dtype. It is what the product units of NVIDIA GPUs make of fp32 inputs if you allow it: 8 and 10. And none of them holds 0.1.
#
# Two figures follow from the counts of bits, and nearly everything in this lesson follows from the two. The mantissa sets the **precision**: how far apart neighbouring numbers are. The exponent sets the **range**: from where numbers are too small to where they are too large.

# %%
predict(
    "What is `torch.tensor(257.0).bfloat16().item()`?",
    run=lambda: torch.tensor(257.0).bfloat16().item(),
    options={
        "257.0": lambda x: x == 257.0,
        "256.0": lambda x: x == 256.0,
        "258.0": lambda x: x == 258.0,
        "inf: bf16 ends before that": lambda x: x == math.inf,
    },
)

# %% tags=["claim-M09", "nbval-check-output"]
rows = []
for name in ("fp32", "tf32", "bf16", "fp16"):
    f = kit.format_of(name)
    bits = f"1 + {f.exponent_bits} + {f.mantissa_bits}"
    at_256 = kit.float_bits(256, name).spacing
    sizes = (f.eps, at_256, f.max, f.smallest_normal, f.smallest)
    rows.append((name, bits, *[f"{size:.3g}" for size in sizes]))
    if f.dtype is not None:
        info = torch.finfo(f.dtype)
        assert (f.eps, f.max, f.smallest_normal) == (info.eps, info.max, info.smallest_normal)
columns = ("apart at 1 (eps)", "apart at 256", "largest", "smallest with all digits", "smallest")
table(("format", "bits", *columns), rows)
fp32, tf32, bf16, fp16 = (kit.format_of(name) for name in ("fp32", "tf32", "bf16", "fp16"))
assert bf16.eps == 8 * fp16.eps and tf32.eps == fp16.eps  # precision: the mantissa
assert bf16.max > 1e38 and tf32.max > 1e38 and fp16.max == 65504  # range: the exponent
assert torch.equal(torch.tensor(math.pi).bfloat16().float(), kit.rounded(torch.tensor(math.pi), "bf16"))

# %% [markdown]
# From 256 to 512 the numbers of bf16 are 2 apart. 257 lies in the middle between two of them, and the even one wins, 256. So bf16 has the range of fp32 and two to three decimal digits; fp16 has three to four digits, and ends at 65,504 above and at 6e-8 below. tf32 has the range of the one and the precision of the other. That is the choice: digits or range. Below the *smallest with all digits* the mantissa loses bits one after another: such numbers are **subnormal**.
#
# Flip some bits. Find (1) the number after 1 in each format, (2) the largest finite number of fp16 and what follows, (3) a number that is subnormal in fp16 and has all its digits in bf16, (4) how the two 8-bit formats share their 7 bits after the sign.

# %%
explore_float()

# %% [markdown]
# On a GPU, fp32 products may run in tf32. The cell computes the same product exactly, in fp32 and, where there is a CUDA device, in tf32; elsewhere it rounds the inputs to tf32 itself.

# %% tags=["cuda", "nbval-check-output"]
left = torch.randn(64, 64, generator=torch.Generator().manual_seed(SEED))
right = torch.randn(64, 64, generator=torch.Generator().manual_seed(SEED + 1))
exact = left.double() @ right.double()
if lesson.device.type == "cuda":
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # tf32 is allowed
    product = (left.to("cuda") @ right.to("cuda")).cpu()
    torch.set_float32_matmul_precision(before)
else:
    product = kit.rounded(left, "tf32") @ kit.rounded(right, "tf32")
errors = [(p.double() - exact).abs().max().item() for p in (left @ right, product)]
print("the error in tf32 is more than 100 times that in fp32:", errors[1] > 100 * errors[0])
assert errors[1] > 100 * errors[0]

# %% [markdown]
# ### Exercise 1 · How far to the next one (two minutes)
#
# The spacing decides whether a small step still counts. Find it for any number.


# %% tags=["exercise"]
def spacing(x, dtype):
    """Distance from |x| to the next larger number of this dtype, a float.

    x: a float that the dtype holds, smaller than its largest. dtype: torch.float32, torch.bfloat16
    or torch.float16.

    >>> spacing(1.0, torch.float16), spacing(-2048.0, torch.float16)
    (0.0009765625, 2.0)
    """
    ...


# %%
check(spacing)
# hint(spacing)        remove the # and run: each call gives one more hint
# solution(spacing)    a reference, once you have tried

# %% [markdown]
# ## 2 · What rounding loses
#
# An update that is less than half a spacing is **absorbed**: the sum is rounded back to where it was. Training makes many small updates.

# %%
def sum_up(start, step, times, dtype):
    """start + step + step + …, each sum rounded to dtype."""
    total = torch.tensor(start, dtype=dtype)
    for _ in range(times):
        total += step
    return total.item()


# %%
predict(
    "A weight is 1.0 in bf16. A hundred times, 0.001 is added. What is it then?",
    run=lambda: sum_up(1.0, 0.001, 100, torch.bfloat16),
    options={
        "about 1.1": lambda x: abs(x - 1.1) < 0.02,
        "exactly 1.0": lambda x: x == 1.0,
        "about 1.05: half of them round up": lambda x: abs(x - 1.05) < 0.02,
    },
)

# %% tags=["claim-M11", "nbval-check-output"]
dtypes = (torch.float32, torch.float16, torch.bfloat16)
rows = []
for dtype in dtypes:
    weight = sum_up(1.0, 0.001, 100, dtype)
    small = sum_up(0.01, 0.001, 100, dtype)
    count = sum_up(0.0, 1.0, 3000, dtype)
    name = str(dtype).removeprefix("torch.")
    rows.append((name, f"{weight:.4f}", f"{small:.4f}", f"{count:.0f}"))
steps = ("1 + 100 · 0.001", "0.01 + 100 · 0.001", "3000 times + 1")
table(("dtype", *steps), rows)
assert rows[2][1] == "1.0000" and [row[3] for row in rows] == ["3000", "2048", "256"]

# %% [markdown]
# In bf16 the weight of 1 does not move at all, and a counter stops at 256: 257 is rounded to 256, each time. The weight of 0.01 moves, as the numbers down there are closer together. fp16 has eight times finer steps and goes to 2048. No step of this raises anything. It is the reason for the **master weights** of mixed precision: weights, and whatever is summed up over many steps, stay in fp32.
#
# Is every sum in bf16 as bad as that? PyTorch's own `sum` is not:

# %% tags=["claim-M12", "nbval-check-output"]
ones = torch.ones(3000, dtype=torch.bfloat16)
print("one by one:", sum_up(0.0, 1.0, 3000, torch.bfloat16), " .sum():", ones.sum().item())
print("3000 in bf16:", torch.tensor(3000.0).bfloat16().item())
assert ones.sum() == torch.tensor(3000.0).bfloat16()

products = torch.full((1, 3000), 1.0, dtype=torch.bfloat16) @ ones
print("a product of matrices:", products.item())
assert products.item() == ones.sum().item()

# %% [markdown]
# A sum or a product of matrices adds up in fp32 inside and rounds once, at the end: 3000 itself is no number of bf16, where numbers are 16 apart. What is lost between operations is lost; inside one there is more room.
#
# And at the upper end: fp16 has no 65,520, and makes inf of it. bf16 goes on.

# %% tags=["nbval-check-output"]
print("fp16:", torch.tensor([65504.0, 65519.0, 65520.0]).half().tolist())
print("bf16:", torch.tensor([65504.0, 65520.0, 1e30]).bfloat16().tolist())
activations = torch.full((4,), 300.0, dtype=torch.float16)
print("300 squared, in fp16:", (activations**2).tolist()[0])
assert (activations**2).isinf().all()

# %% [markdown]
# ### Exercise 2 · Lost updates (ten minutes)
#
# Which share of an optimizer's updates would a format lose?


# %% tags=["exercise"]
def lost_updates(weights, updates, dtype):
    """Share of the updates that change nothing: the sum, rounded to dtype, is the weight that was.

    weights, updates: float32 tensors of one shape; the weights are numbers that dtype holds.
    Updates of 0 do not count; the share of none is 0.0.

    >>> lost_updates(torch.tensor([1.0, 0.01]), torch.tensor([0.001, 0.001]), torch.bfloat16)
    0.5
    """
    ...


# %%
check(lost_updates)

# %% [markdown]
# Here it is for a real step, by AdamW at its usual rate of 0.001, from the weights of a digit network. Look at the two kinds of weights in the last row: those of a LayerNorm begin at 1.

# %%
torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(784, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)).to(lesson.device)
before = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001, weight_decay=0.0)
F.cross_entropy(model(train_x[:50]), train_y[:50]).backward()
optimizer.step()

# %%
rows = []
for name in ("fp32", "fp16", "bf16"):
    shares = []
    for layer in (0, 1):
        weight, step = before[layer].weight, model[layer].weight - before[layer].weight
        held = kit.rounded(weight, name)
        lost = (kit.rounded(held + step, name) == held)[step != 0]
        shares.append(lost.float().mean().item())
    rows.append((name, *[f"{share:.0%}" for share in shares]))
table(("weights kept in", "updates lost: first Linear", "updates lost: LayerNorm"), rows)
assert rows[2][2] == "100%"

# %% [markdown]
# ## 3 · What autocast does
#
# The articles write `torch.cuda.amp.autocast()` and `torch.cuda.amp.GradScaler()`. They still exist:

# %% tags=["claim-M01", "nbval-check-output"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.cuda.amp.autocast()
    torch.cuda.amp.GradScaler()
for warning in caught:
    if issubclass(warning.category, FutureWarning):
        print(str(warning.message).split("Please ")[1])
assert sum(issubclass(w.category, FutureWarning) for w in caught) == 2

# %% [markdown]
# Both are deprecated. The new names take the type of the device first, and serve CPU and GPU alike.
#
# Inside `with torch.autocast(...)` PyTorch decides, operation by operation, in which dtype it runs. `kit.record_dtypes` writes down what goes into each operation and what comes out.


# %%
def small_net():
    torch.manual_seed(SEED)
    layers = nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)
    return nn.Sequential(*layers).to(lesson.device)


net, inputs = small_net(), torch.randn(8, 16, device=lesson.device)
targets = torch.arange(8, device=lesson.device)

# %%
with torch.autocast(lesson.device.type, dtype=torch.bfloat16), kit.record_dtypes(net) as seen:
    F.cross_entropy(net(inputs), targets)
print(seen)

# %% [markdown]
# The inputs are fp32 and the weights are, too. A Linear casts both down and gives bf16; what follows takes what it gets; the loss casts up. So there are three kinds of operations: those that are cast *down* because they gain (products, convolutions), those that are cast *up* because they need digits or range, and all others, which run in the dtype of their inputs.
#
# The articles say that some operations need fp32 and are to be wrapped in `autocast(enabled=False)`. Which are cast up without being asked? Guess for softmax and for the cross-entropy, on this device:

# %%
asked = {
    "linear": lambda x: F.linear(x, torch.ones(4, 8, device=x.device)),
    "conv1d": lambda x: F.conv1d(x[:, None], torch.ones(1, 1, 3, device=x.device)),
    "x + 1": lambda x: x + 1,
    "relu": lambda x: x.relu(),
    "sum": lambda x: x.sum(),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.abs().log(),
    "softmax": lambda x: x.softmax(dim=1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "x + fp32": lambda x: x + torch.ones(8, device=x.device),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x.detach()),
}


def given(name, dtype=torch.bfloat16):
    """The dtype that the operation gives under autocast, from an input in low precision."""
    x = torch.ones(4, 8, dtype=dtype, device=lesson.device)
    with torch.autocast(lesson.device.type, dtype=dtype):
        return asked[name](x).dtype


# %%
predict(
    "Under bf16 autocast, from a bf16 input: what do `softmax` and `cross_entropy` give here?",
    run=lambda: [given("softmax"), given("cross_entropy")],
    options={
        "bf16 and bf16": lambda d: d == [torch.bfloat16, torch.bfloat16],
        "fp32 and fp32": lambda d: d == [torch.float32, torch.float32],
        "bf16 and fp32": lambda d: d == [torch.bfloat16, torch.float32],
        "fp32 and bf16": lambda d: d == [torch.float32, torch.bfloat16],
    },
)

# %% tags=["claim-M05", "cuda"]
groups = {}
for name in asked:
    groups.setdefault(str(given(name)).removeprefix("torch."), []).append(name)
for dtype, names in groups.items():
    print(f"on this {lesson.device.type}, {dtype}: {', '.join(names)}")
assert {"cross_entropy", "mse_loss", "x + fp32"} <= set(groups["float32"])
assert {"linear", "conv1d", "x + 1", "relu"} <= set(groups["bfloat16"])
if lesson.device.type == "cuda":
    assert {"softmax", "exp", "log", "sum", "layer_norm"} <= set(groups["float32"])
else:
    assert {"softmax", "exp", "log", "sum"} <= set(groups["bfloat16"])

# %% [markdown]
# The losses are cast up everywhere. For softmax, exp, log, sum and layer_norm the lists of the devices differ: CUDA casts them up, the CPU leaves them as they come. A model that is safe on the one may not be on the other. (PyTorch's documentation has both lists in full.) A sum with an fp32 tensor gives fp32 by the ordinary rule for two dtypes, and no list is needed for it.
#
# So where is `autocast(enabled=False)` needed? Around your own formulas. What happens at its edge?

# %% tags=["claim-M05", "nbval-check-output"]
matrix = torch.ones(10, 3, device=lesson.device)
with torch.autocast(lesson.device.type, dtype=torch.bfloat16):
    scores = net(inputs)
    with torch.autocast(lesson.device.type, enabled=False):
        print("inside enabled=False, from a layer outside:", scores.dtype, (scores * scores).dtype)
        with raises(RuntimeError):
            scores @ matrix  # bf16 and fp32
        print("after .float():", (scores.float() @ matrix).dtype)
    assert scores.dtype == torch.bfloat16

# %% [markdown]
# The switch stops autocast from casting. It does not bring digits back: what comes in stays bf16 unless you cast it, and meets an fp32 weight with an error if you are lucky, or is squared in bf16 without a word.

# %% [markdown]
# ### Exercise 3 · An island of fp32 (five minutes)
#
# Run a function in full precision, whatever autocast is on around it.


# %% tags=["exercise"]
def in_full_precision(function, x, y):
    """function(x, y), computed in float32 from float32 inputs, whatever autocast is on around it.

    x, y: floating tensors of any dtype on one device. Autocast is as before afterwards, and
    gradients reach x and y.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     in_full_precision(torch.mm, torch.ones(2, 2), torch.ones(2, 2)).dtype
    torch.float32
    """
    ...


# %%
check(in_full_precision)

# %% [markdown]
# ### The cast of a weight
#
# A weight that is used twice, by a recurrent layer or by two losses, would be cast twice. `kit.record_dtypes(..., below=True)` sees the casts, under the name `_to_copy`. Count those of the weights:


# %%
def weight_casts(blocks=1, uses=2, **settings):
    """How often a Linear's weight is cast, used so often in each of so many autocast blocks."""
    layer = nn.Linear(16, 4, bias=False).to(lesson.device)
    x = inputs.bfloat16()  # needs no cast itself
    with kit.record_dtypes(layer, below=True) as seen:
        for _ in range(blocks):
            with torch.autocast(lesson.device.type, dtype=torch.bfloat16, **settings):
                for _ in range(uses):
                    layer(x)
    return sum(op.name == "_to_copy" for op in seen.ops)


# %% tags=["claim-M08", "nbval-check-output"]
casts = {
    "used twice in one block": weight_casts(),
    "once in each of two blocks": weight_casts(blocks=2, uses=1),
    "twice in one block, cache_enabled=False": weight_casts(cache_enabled=False),
}
print(casts)
assert list(casts.values()) == [1, 2, 2]

# %% [markdown]
# Autocast keeps the low-precision copy of a weight until the outermost block ends. One block around the whole forward pass, then, and not one for each layer. The copy is also the reason for a failure that many searches still find: *no gradients after a forward pass under no_grad in the same block*. The copy that was made under `no_grad` had no history and was used again. What does this version do?

# %%
layer = nn.Linear(16, 4).to(lesson.device)
with torch.autocast(lesson.device.type, dtype=torch.bfloat16):
    with torch.no_grad():
        layer(inputs)
    outputs = layer(inputs)
outputs.float().sum().backward()
print(f"torch {torch.__version__}: the weight gets a gradient: {layer.weight.grad is not None}")

# %% [markdown]
# On versions where it says False, put the pass without gradients into a block of its own, or give `cache_enabled=False`.

# %% [markdown]
# ## 4 · Backward, weights, gradients
#
# The articles describe mixed precision as *forward in float16, backward in float32*. The recorder sees a backward pass as well:

# %%
def recorded_backward():
    """The kernels of a backward pass whose forward pass ran under bf16 autocast."""
    net.zero_grad()
    with torch.autocast(lesson.device.type, dtype=torch.bfloat16):
        loss = F.cross_entropy(net(inputs), targets)
    with kit.record_dtypes(net, below=True) as seen:
        loss.backward()
    return seen.ops


def backward_dtypes():
    (dtype,) = {op.outputs[0] for op in recorded_backward() if op.name in ("mm", "addmm")}
    return dtype, net[0].weight.grad.dtype


# %%
predict(
    "The forward pass ran under bf16 autocast, the weights are fp32. In which dtype does backward "
    "multiply matrices, and of which dtype is `weight.grad`?",
    run=lambda: backward_dtypes(),
    options={
        "both fp32": lambda d: d == (torch.float32, torch.float32),
        "both bf16": lambda d: d == (torch.bfloat16, torch.bfloat16),
        "it multiplies in bf16, the gradient is fp32": lambda d: (
            d == (torch.bfloat16, torch.float32)
        ),
    },
)

# %% tags=["claim-M03"]
for op in recorded_backward():
    print(op)
assert backward_dtypes() == (torch.bfloat16, torch.float32)
assert {p.grad.dtype for p in net.parameters()} == {torch.float32}

# %% [markdown]
# Read it from above: the loss goes backward in fp32, as it went forward. Then a cast, the backward of the cast that lay before the loss, and from there each operation runs backward in the dtype in which it ran forward. Last, the gradient of a weight is cast to fp32, the backward of the weight's own cast. So the statement is wrong in its second half, and it matters: *on its way* a gradient is as short of digits and range as an activation. Section 6 is about that.
#
# PyTorch's documentation asks you to keep `backward` outside the autocast block. Does it make a difference?


# %%
class FullProduct(torch.autograd.Function):
    """x @ w in fp32, forward and backward: the backward is ours."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        with torch.autocast(x.device.type, enabled=False):
            return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def gradient_of(forward, parameter, inside):
    parameter.grad = None
    with torch.autocast(lesson.device.type, dtype=torch.bfloat16):
        loss = forward().float().square().mean()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return parameter.grad


# %% tags=["claim-M08", "claim-M13"]
own = nn.Parameter(torch.randn(16, 4, device=lesson.device))
forwards = {
    "PyTorch's layers": (lambda: net(inputs), net[0].weight),
    "a Function of our own": (lambda: FullProduct.apply(inputs, own), own),
}
same = {}
for name, (forward, parameter) in forwards.items():
    out, within = (gradient_of(forward, parameter, inside) for inside in (False, True))
    same[name] = torch.equal(out, within)
    off = ((out - within).norm() / out.norm()).item()
    print(f"{name}: backward inside or outside, equal: {same[name]}, relative difference {off:.1e}")
assert same == {"PyTorch's layers": True, "a Function of our own": False}

# %% [markdown]
# For PyTorch's own operations none: their backward has its dtypes already. A `backward` that someone wrote in Python, though, runs under the autocast around it, and was cast down here without having been asked. (`torch.amp.custom_fwd` and `custom_bwd` fix that for such Functions.) Keep `backward` outside; it costs nothing.
#
# ### Half a model
#
# `model.half()` or `model.bfloat16()` is another thing: the weights themselves are cast, once and for all.

# %% tags=["claim-M08", "nbval-check-output"]
casted = copy.deepcopy(net).bfloat16()
casted.zero_grad()
rows = []
for name, model in (("autocast", net), ("model.bfloat16()", casted)):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    x = inputs if model is net else inputs.bfloat16()
    with torch.autocast(lesson.device.type, dtype=torch.bfloat16, enabled=model is net):
        loss = F.cross_entropy(model(x).float(), targets)
    optimizer.zero_grad()
    loss.backward()
    norm = model[1].weight.detach().clone()
    optimizer.step()
    weight = model[0].weight
    kinds = weight, weight.grad, optimizer.state[weight]["exp_avg"]
    moved = f"{(model[1].weight != norm).sum().item()} of {len(norm)}"
    rows.append((name, *[str(t.dtype).removeprefix("torch.") for t in kinds], moved))
table(("", "weights", "gradients", "optimizer's state", "LayerNorm's weights that moved"), rows)
assert [row[1] for row in rows] == ["float32", "bfloat16"]
assert rows[0][4] == "32 of 32" and rows[1][4] == "0 of 32"

# %% [markdown]
# The cast model takes half the memory for everything, and its weights near 1 stay where they are (section 2). For inference that is fine; for training it needs fp32 masters at its side. That is what you write next, and it is what "mixed" meant in the paper that the name comes from.

# %% [markdown]
# ### Exercise 4 · Master weights (fifteen minutes)
#
# Do by hand what keeps a low-precision model trainable.


# %% tags=["exercise"]
def master_step(model, masters, inputs, targets, loss_fn, rate):
    """One step of SGD: forward and backward in the model's low precision, the update in float32.

    masters: a list of float32 tensors, the weights as they should be, in the order of
    model.parameters(). First, the model's parameters are set to them, rounded. Then the loss,
    loss_fn(model(inputs), targets), and its gradients; gradients from before take no part. Then each
    master moves in place, in float32, by -rate times its gradient. Returns the loss, a float.
    """
    ...


# %%
check(master_step)

# %% [markdown]
# ## 5 · What it saves and what it costs
#
# The articles say that AMP *saves 30 to 50 percent of memory and is faster*. Both can be measured. Memory first. Autocast leaves weights, their gradients and the optimizer's state in fp32. What shrinks is what the graph keeps for backward, the **saved activations**; and the low-precision copies of the weights come on top.

# %% [markdown]
# ### Exercise 5 · What is kept, by dtype (ten minutes)
#
# Count what a forward pass keeps.


# %% tags=["exercise"]
def bytes_by_dtype(forward):
    """Bytes that the graph of forward() keeps for backward, by the dtype of what is kept: a dict.

    forward: a function without arguments that returns a tensor. Everything kept counts, parameters
    and inputs too, each storage once and whole. Only dtypes that occur are in the dict.

    >>> x = torch.ones(3, requires_grad=True)
    >>> bytes_by_dtype(lambda: (x * x).sum())
    {torch.float32: 12}
    """
    ...


# %%
check(bytes_by_dtype)

# %% [markdown]
# Below are two networks, one of three Linear layers and one of convolutions, at three sizes of batch. Where would you expect to save?


# %%
from course_utils.toolkit.autograd import saved_bytes


def of_linears():
    layers = nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(256, 10)).to(lesson.device)


def of_convolutions():
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(4)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(576, 10)).to(lesson.device)


def kept(make, batch, dtype):
    """Bytes that the forward pass keeps for backward, beside the parameters and the batch."""
    model, x = make(), train_x[:batch].unflatten(1, (1, 28, 28))
    with torch.autocast(lesson.device.type, dtype=dtype, enabled=dtype is not torch.float32):
        with saved_bytes() as saved:
            F.cross_entropy(model(x), train_y[:batch])
    return saved.without(*model.parameters(), x, train_y)


# %%
predict(
    "Three Linear layers, 8 digits in a batch: how much does bf16 autocast keep, against fp32?",
    run=lambda: kept(of_linears, 8, torch.bfloat16) / kept(of_linears, 8, torch.float32),
    options={
        "about half": lambda ratio: 0.4 < ratio < 0.75,
        "about as much": lambda ratio: 0.75 <= ratio < 1.5,
        "several times as much": lambda ratio: ratio >= 1.5,
    },
)

# %% tags=["claim-M02"]
rows, ratios = [], {}
for name, make in (("Linear layers", of_linears), ("convolutions", of_convolutions)):
    for batch in (8, 64, 512):
        full, low = kept(make, batch, torch.float32), kept(make, batch, torch.bfloat16)
        ratios[name, batch] = low / full
        rows.append((name, batch, f"{full:,}", f"{low:,}", f"{low / full:.2f}"))
table(("network", "batch", "bytes kept: fp32", "bf16 autocast", "ratio"), rows)
assert ratios["Linear layers", 8] > 3 and ratios["convolutions", 512] < 0.75

for name, make in (("Linear layers", of_linears), ("convolutions", of_convolutions)):
    weights = sum(p.nbytes for p in make().parameters())
    print(f"{name}: weights, gradients and AdamW's state, fp32 either way: {4 * weights:,} bytes")

# %% [markdown]
# The Linear layers keep *more* under autocast, at 8 digits several times as much: the graph holds the bf16 copies of the weights, and one of the batch, which fp32 does not need. The activations, a few hundred numbers for each digit, do not make up for that. In the network of convolutions the activations are nearly everything, and they shrink by half; what does not shrink are the
# places that pooling remembers, whole numbers of 8 bytes. And what training holds besides stays as it is. So *30 to 50 percent* is true of networks whose memory is mostly activations, with batches that are not small.
#
# Time is decided by the device. `kit.amp_report` measures a forward and backward pass of your model in each precision, taking turns, and one large product of matrices for comparison:

# %% tags=["claim-M02", "cuda"]
torch.manual_seed(SEED)
convnet = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2704, 10)
).to(lesson.device)
pictures = train_x[:64].unflatten(1, (1, 28, 28))
report = kit.amp_report(convnet, (pictures, train_y[:64]), F.cross_entropy, rounds=3)
print(report)
assert report.costs["bf16"].saved_bytes < report.costs["fp32"].saved_bytes
if lesson.device.type == "cuda":
    model = of_linears()
    for dtype in (torch.float32, torch.bfloat16):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            F.cross_entropy(model(train_x), train_y).backward()
        print(f"{dtype}: the allocator's peak is {torch.cuda.max_memory_allocated():,} bytes")
else:
    print("On a CUDA device this cell also shows the allocator's peak in fp32 and under autocast.")

# %% [markdown]
# *On this machine*, the report's first line is the answer, and the figures below it are the reason. A precision is called faster only if it won every round. On a GPU with units for 16-bit products, large layers gain and small ones do not: each kernel takes microseconds to start, in any precision. On a CPU without such units fp16 is computed by converting, and can be many times slower; bf16 is faster where the processor has instructions for it, and slower elsewhere.

# %% tags=["claim-M14"]
speeds = {name: cost.product_speed for name, cost in report.costs.items()}
rows = [(name, round(speed, 2), "view") for name, speed in speeds.items()]
bars(rows, "speed of one product of matrices, fp32 = 1")
print(f"on this {lesson.device.type} a product is fastest in {max(speeds, key=speeds.get)}")
print(f"the whole step is fastest in {report.fastest}")
assert report.fastest in report.costs

# %% [markdown]
# When does mixed precision pay, then? When products are large, when activations are the larger part of the memory, and when the device has units for the format. You have a tool that tells, for your model, in a second. The rest of this lesson is about what fp16 asks of you in return.

# %% [markdown]
# ## 6 · Too small for fp16
#
# The smallest number above 0 that fp16 holds is 2⁻²⁴, about 6e-8; half of it, and less, becomes 0. That is **underflow**. How much of a training lies down there? Here is a digit network, trained in fp32 until it has most of its images right, and its last gradients:


# %%
def digit_net():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10)).to(lesson.device)


trained = digit_net()
optimizer = torch.optim.AdamW(trained.parameters(), lr=0.003)
for _ in range(25):
    for inputs, targets in zip(train_x.split(50), train_y.split(50)):
        optimizer.zero_grad()
        F.cross_entropy(trained(inputs), targets).backward()
        optimizer.step()
gradients = [parameter.grad for parameter in trained.parameters()]

# %% [markdown]
# Each row of the table multiplies these gradients by a **scale** and then asks what a format makes of them: which share becomes 0, and which share lies beyond its largest number. Gradients that are 0 anyway are not counted. Look at the first and the last row.

# %% tags=["claim-M04"]
scales = (2.0**0, 2.0**8, 2.0**16, 2.0**20, 2.0**24)
measures = {"become 0": kit.underflow_fraction, "too large": kit.overflow_fraction}
columns = [(name, what) for name in ("fp16", "bf16") for what in measures]
rows = []
for scale in scales:
    shares = [measures[what](gradients, name, scale) for name, what in columns]
    rows.append((f"2^{math.log2(scale):.0f}", *[round(100 * share, 3) for share in shares]))
table(("scale", *[f"{name}: {what}, %" for name, what in columns]), rows)
lost = [kit.underflow_fraction(gradients, "fp16", scale) for scale in scales]
assert lost[0] > 0 and lost == sorted(lost, reverse=True)
assert lost[scales.index(2.0**16)] < lost[0] / 10
assert kit.overflow_fraction(gradients, "fp16", 2.0**16) == 0
assert kit.overflow_fraction(gradients, "fp16", 2.0**24) > 0
assert kit.underflow_fraction(gradients, "bf16") == 0

# %% [markdown]
# The gradients fill a range of many powers of two. At scale 1 its lower end sticks out of fp16, at 2²⁴ its upper end does, and in between there is room. A **loss scale** uses that room: multiply the loss by 2¹⁶, and by the chain rule every gradient on its way back comes out 2¹⁶ times as large; divide by 2¹⁶
# afterwards, in fp32, where nothing is too small. bf16 has the exponent of fp32: nothing sticks out at any of these scales, and it needs none.
#
# Below is the histogram of such gradients, beside the range of a format, and under it a scaler at work over 60 steps. Move the scale, and see where the histogram leaves fp16. Then find out:
#
# 1. at which scale the first gradients overflow, and how many powers of two lie between it and the scale at which a thousandth becomes 0;
# 2. what the scaler does after a planted overflow, and how long it takes to come back.

# %%
explore_loss_scale()

# %% [markdown]
# At scale 1 this network loses a small share of its gradients, the smallest ones. When is it more? A mean divides by the number of things that it is a mean of, and so does its gradient. Take a network that outputs images, 16 in a batch, and a mean squared error over all their numbers. The errors are about 0.1, far from good.


# %%
def lost_of_mean(side, dtype="fp16", scale=1.0):
    """Share of an output's gradient that becomes 0: the mean of 16 · 3 · side · side squares."""
    errors = 0.1 * torch.randn(10_000, generator=torch.Generator().manual_seed(SEED))
    return kit.underflow_fraction(2 * errors / (16 * 3 * side * side), dtype, scale)


# %%
predict(
    "16 colour images of 512 × 512, a mean squared error, errors of about 0.1. "
    "Which share of the output's gradient becomes 0 in fp16?",
    run=lambda: lost_of_mean(512),
    options={
        "less than 1 %: errors of 0.1 are far from 6e-8": lambda share: share < 0.01,
        "about a third": lambda share: 0.2 < share < 0.5,
        "more than 90 %": lambda share: share > 0.9,
    },
)

# %% tags=["claim-M04"]
outputs = (0.1 * torch.randn(16, 3, 28, 28, device=lesson.device)).half().requires_grad_()
with torch.autocast(lesson.device.type, dtype=torch.float16):
    loss = F.mse_loss(outputs, torch.zeros_like(outputs))
loss.backward()  # small images, to see that the formula is what autograd computes
by_formula = (2 * outputs.detach().float() / outputs.numel()).half()
assert torch.allclose(outputs.grad.float(), by_formula.float(), rtol=0.01, atol=1e-7)

sides = (28, 128, 256, 512)
columns = ("fp16", 1.0), ("fp16", 2.0**16), ("bf16", 1.0)
rows = [(side, *[f"{lost_of_mean(side, *column):.1%}" for column in columns]) for side in sides]
table(("side of the images", "become 0: fp16", "fp16, scale 2^16", "bf16"), rows)
assert lost_of_mean(512) > 0.9 and lost_of_mean(512, "fp16", 2.0**16) < 0.001

# %% [markdown]
# Nothing is wrong with these images but their number of pixels, and nearly all of the gradient is gone before the first layer of the network has seen it. What underflows first is this, the gradient of an activation on its way back, in fp16. The gradient of an fp32 weight (section 4) comes at the end of the way, and whatever is lost by then
# is lost.
#
# The same happens to a loss that counts little in a sum of losses. The next experiment makes one: an autoencoder, a network that learns to give back its input, whose loss is multiplied by a weight of 2⁻¹⁴. The rate is multiplied by 2¹⁴ to make up for it, so on paper this is the same training.


# %%
def reconstruct(dtype, weight=1.0, scaled=False, steps=50):
    """The losses of each step, divided by `weight`, and the network's parameters at the end."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(784, 16), nn.Tanh(), nn.Linear(16, 784)).to(lesson.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=5 / weight, momentum=0.9)
    scaler = torch.amp.GradScaler(lesson.device.type, enabled=scaled)
    losses = []
    for step in range(steps):
        batch = train_x.split(100)[step % 10]
        with torch.autocast(lesson.device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = weight * F.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() / weight)
    return losses, nn.utils.parameters_to_vector(model.parameters()).detach()


# %%
predict(
    "The loss times 2⁻¹⁴, the rate times 2¹⁴: in which of fp32 and bf16 does this training "
    "end with the same parameters, to the last bit, as the one without?",
    run=lambda: [
        torch.equal(reconstruct(d, 2.0**-14, steps=12)[1], reconstruct(d, steps=12)[1])
        for d in (torch.float32, torch.bfloat16)
    ],
    options={
        "in neither: every multiplication rounds": lambda same: same == [False, False],
        "in fp32": lambda same: same == [True, False],
        "in both": lambda same: same == [True, True],
    },
)

# %% tags=["claim-M15", "claim-M04"]
small = 2.0**-14
runs = {
    "fp32": reconstruct(torch.float32, small),
    "bf16": reconstruct(torch.bfloat16, small),
    "fp16": reconstruct(torch.float16, small),
    "fp16 with a scaler": reconstruct(torch.float16, small, scaled=True),
}
curves({name: losses for name, (losses, _) in runs.items()}, "step", "mean squared error")
for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
    same = torch.equal(runs[name][1], reconstruct(dtype)[1])
    print(f"{name}: the same parameters, to the last bit, as with a weight of 1: {same}")
    assert same
fell = {name: 1 - losses[-1] / losses[0] for name, (losses, _) in runs.items()}
for name, share in fell.items():
    print(f"{name}: the loss changed by {-share:+.0%}")
assert fell["fp16"] < 0.1 < 0.9 * fell["fp32"] < fell["fp16 with a scaler"]

largest = 2 / (100 * 784) * small  # gradient of an output that is off by 1: 100 images in a batch
print(f"{largest:.2g} in fp16: {kit.rounded(torch.tensor(largest), 'fp16').item()}")
assert kit.underflow_fraction(torch.tensor(largest), "fp16") == 1

# %% [markdown]
# A factor that is a power of two moves the exponent and leaves the digits alone, so in fp32 and bf16 it changes *nothing at all*, as long as no number leaves the range. That is why scales go in powers of two: a scaled training is no approximation but the same training, moved to where fp16 has room. In fp16 without a scale, the line is flat but for
# the differences between batches: even an output that is wrong by 1, a whole white pixel, sends back a gradient of 0. The articles' statement holds: *GradScaler prevents gradients from underflowing.* And bf16 does without.

# %% [markdown]
# ### Exercise 6 · The largest safe scale (ten minutes)
#
# How far up may the scale go? For given gradients, find the largest power of two at which none of them overflows.


# %% tags=["exercise"]
def largest_safe_scale(gradients, dtype=torch.float16):
    """The largest power of two by which all gradients can be multiplied without overflow, a float.

    gradients: a list of tensors and None. Zeros, inf and nan are ignored; without any other number
    the scale is 1.0. dtype: torch.float16, torch.bfloat16 or torch.float32.

    >>> largest_safe_scale([torch.tensor([1.0, -3.0]), None])
    16384.0
    """
    ...


# %%
check(largest_safe_scale)

# %% [markdown]
# ## 7 · The scaler, step by step
#
# Which scale is right differs from model to model and moves during training. `torch.amp.GradScaler` finds it by trying. All that it knows is this:

# %% tags=["nbval-check-output"]
scaler = torch.amp.GradScaler("cpu")
for name, value in scaler.state_dict().items():
    print(f"{name:16} {value}")

# %% [markdown]
# It starts high. `scaler.scale(loss)` multiplies by the scale; `scaler.step(optimizer)` divides the gradients by it and looks whether one of them is inf or nan; `scaler.update()` moves the scale. You can watch it on one parameter and a loss whose gradient is 3. What does it do where a gradient is inf?


# %%
def one_number():
    """A parameter that is 1, and an optimizer for it with rate 0.1."""
    weight = nn.Parameter(torch.ones(1, device=lesson.device))
    return weight, torch.optim.SGD([weight], lr=0.1)


def after_an_inf():
    weight, optimizer = one_number()
    scaler = torch.amp.GradScaler(lesson.device.type)
    scaler.scale((3 * weight).sum()).backward()
    weight.grad.fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    return weight.item()


# %%
predict(
    "A gradient is inf, and `scaler.step(optimizer)` is called; the weight was 1. What follows?",
    run=after_an_inf,
    options={
        "an error: the gradient is not finite": lambda w: isinstance(w, Exception),
        "the weight is -inf": lambda w: w == -math.inf,
        "the weight stays 1": lambda w: w == 1.0,
        "inf is replaced by the largest number, and the weight moves far": lambda w: (
            math.isfinite(w) and w != 1.0
        ),
    },
)

# %% [markdown]
# Here are ten steps, with a growth interval of 4 instead of 2000. At step 5 an inf is planted. Look at the last two columns.

# %% tags=["claim-M06", "nbval-check-output"]
weight, optimizer = one_number()
scaler = torch.amp.GradScaler(lesson.device.type, init_scale=1024.0, growth_interval=4)
rows, moved = [], []
for step in range(10):
    before, scale = weight.item(), scaler.get_scale()
    optimizer.zero_grad()
    scaler.scale((3 * weight).sum()).backward()
    if step == 5:
        weight.grad.fill_(math.inf)
    found = weight.grad.item()
    returned = scaler.step(optimizer)
    scaler.update()
    moved.append(weight.item() != before)
    rows.append((step, scale, found, "stepped" if moved[-1] else "skipped", scaler.get_scale()))
table(("step", "scale", "gradient in .grad", "the optimizer", "scale afterwards"), rows)
assert moved == [step != 5 for step in range(10)] and returned is None
assert [row[4] for row in rows] == 3 * [1024.0] + 2 * [2048.0] + 4 * [1024.0] + [2048.0]

# %% [markdown]
# The step with the inf was **skipped**: the optimizer was not called, weights and momentum stay as they were, and the scale was halved, so that the next gradients have more room. After four good steps in a row it is doubled. That is the whole mechanism. It does not avoid overflow: it goes up every 2000 good steps until something
# overflows, pays with one batch, and so knows where the limit is. A skipped step now and then is a scaler at work, no failure.
#
# No message says so. `scaler.step` returns what `optimizer.step()` returns, which is None either way. You can compare the scale before and after `update`: if it fell, a step was skipped.

# %% [markdown]
# ### Exercise 7 · The scaler's arithmetic (ten minutes)
#
# Write down what `update` does with the scale and with its count of good steps.


# %% tags=["exercise"]
def next_scale(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    """(scale, good_steps) after GradScaler.update().

    scale: a float; good_steps: how many steps in a row had finite gradients before this one;
    found_inf: was an inf or nan in this step's gradients?

    >>> next_scale(1024.0, 1999, found_inf=False), next_scale(1024.0, 1999, found_inf=True)
    ((2048.0, 0), (512.0, 0))
    """
    ...


# %%
check(next_scale)

# %% [markdown]
# Your loop counts every batch; the optimizer does not. A scheduler that is stepped once for each batch runs ahead of the optimizer by every step that was skipped. Here a scaler starts far too high, at 2³², so that the first gradients overflow. (A loss a hundred times as large does that at 2¹⁶, as section 9 shows.) The rate is to **warm up**: to grow from a tenth to its full size in the first ten steps.


# %%
def warm_up(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)


def batches(count, size=50):
    return [(train_x.split(size)[i], train_y.split(size)[i]) for i in range(count)]


def warmed_up_by_loop():
    """The rates at which the optimizer stepped, in a loop that steps the scheduler each time."""
    model, used = digit_net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = warm_up(optimizer)
    scaler = torch.amp.GradScaler(lesson.device.type, init_scale=2.0**32)
    for inputs, targets in batches(20):
        with torch.autocast(lesson.device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            used.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return used


# %% tags=["claim-M06"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    used = warmed_up_by_loop()
print(f"{20 - len(used)} of 20 steps were skipped; rate of the first that was made: {used[0]:g}")
for warning in caught:
    print("the warning:", str(warning.message).split(". ")[0])

model, synchronous = digit_net(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = warm_up(optimizer)
scaler = torch.amp.GradScaler(lesson.device.type, init_scale=2.0**32)
for batch in batches(20):
    rate = optimizer.param_groups[0]["lr"]
    step = kit.amp_step(
        model,
        [batch],
        F.cross_entropy,
        optimizer,
        dtype=torch.float16,
        scaler=scaler,
        schedulers=scheduler,
    )
    synchronous += [] if step.skipped else [rate]
print(f"kit.amp_step: rate of the first that was made: {synchronous[0]:g}")
assert used[0] > 5 * synchronous[0] and len(caught) == 1

# %% [markdown]
# The warm-up was over before the first step: the scheduler had counted the skipped ones, and the network got the full rate at once, which is what a warm-up is meant to prevent. The warning is easy to take for a false alarm, since the order in the code is right. It comes where the *very first* step was skipped, and only then; a step skipped later is
# counted without a word. `kit.amp_step` steps a scheduler when its optimizer has stepped.
#
# ### Clip after unscale
#
# Now for the program at the top of this lesson. Clipping compares the gradients' norm with a threshold, and shortens them if it is longer. Between `backward` and `scaler.step` the gradients in `.grad` are scaled ones.


# %%
def clipped_update(unscale_first, scale=2.0**16, rate=1.0, max_norm=1.0):
    """Norm that clipping saw, and length of SGD's update, at the first batch of the digits."""
    model = digit_net()
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler(lesson.device.type, init_scale=scale)
    with torch.autocast(lesson.device.type, dtype=torch.float16):
        loss = F.cross_entropy(model(train_x[:50]), train_y[:50])
    scaler.scale(loss).backward()
    if unscale_first:
        scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    scaler.step(optimizer)
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    return norm, (after - before).norm().item()


# %%
predict(
    "The gradient's norm is a little above 1, the threshold is 1, the rate 1, the scale 2¹⁶. "
    "The loop clips, then calls `scaler.step`. How long is the step?",
    run=lambda: clipped_update(unscale_first=False)[1],
    options={
        "1: clipped to the threshold": lambda length: 0.99 < length < 1.01,
        "a little above 1: scaled gradients are not clipped": lambda length: 1.01 < length < 3,
        "about 1/65536": lambda length: 0.5 < length * 65536 < 2,
        "0: the step is skipped": lambda length: length == 0,
    },
)

# %% tags=["claim-M07"]
rows = []
for scale in (2.0**8, 2.0**12, 2.0**16):
    for first in (False, True):
        norm, length = clipped_update(first, scale)
        order = "unscale_, clip" if first else "clip, unscale"
        rows.append((f"2^{math.log2(scale):.0f}", order, f"{norm:.4g}", f"{length:.3g}"))
        assert math.isclose(length, 1.0 if first else 1 / scale, rel_tol=0.02)
table(("scale", "order", "norm that clipping saw", "length of the step"), rows)

# %% [markdown]
# The last row but one is the program at the top. The scaled gradient is tens of thousands long and is shortened to 1; then `scaler.step` divides by the scale, as it must, and 1/65536 is left. The threshold that acts is `max_norm / scale`. No step is longer than that, no value is out of range, and nothing has a reason to complain. When the
# scaler doubles the scale, the steps halve.
#
# The right order is: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`, clip, `scaler.step(optimizer)`, `scaler.update()`. `step` knows that the gradients are unscaled and leaves them alone. Whatever looks at gradients between `backward` and `step` belongs behind `unscale_`: clipping by norm or by value, a logged norm, noise, a penalty.
#
# Here is the program at the top once more, with both orders, and with another optimizer:


# %%
def train_clipped(make_optimizer, unscale_first, steps=60):
    """Mean loss of the last ten of the steps, in fp16, clipped to norm 1."""
    model, losses = digit_net(), []
    optimizer = make_optimizer(model.parameters())
    scaler = torch.amp.GradScaler(lesson.device.type)
    for step in range(steps):
        inputs, targets = batches(20)[step % 20]
        with torch.autocast(lesson.device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


# %% tags=["claim-M16"]
makers = {
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.003),
}
ends = {
    (name, first): train_clipped(make, first)
    for name, make in makers.items()
    for first in (False, True)
}
table(
    ("optimizer", "loss: clip, unscale", "loss: unscale_, clip"),
    [(name, round(ends[name, False], 2), round(ends[name, True], 2)) for name in makers],
)
sgd, adam = ([ends[name, first] for first in (False, True)] for name in makers)
assert sgd[0] > 2 * sgd[1] and adam[0] < 1.3 * adam[1]

# %% [markdown]
# AdamW divides each gradient by a running estimate of its size, and a factor that is common to all of them cancels, as long as the gradients stay large beside its `eps`. So the mistake can sit in a loop for long, and shows on the day when someone changes the optimizer. The clipping in such a run is not what it says, either: every gradient is
# shortened to the same length, an exploding one and all others.

# %% [markdown]
# ### Exercise 8 · A step with everything in its place (fifteen minutes)
#
# Scale, backward, unscale, clip, step, update; and say whether the optimizer stepped.


# %% tags=["exercise"]
def scaled_step(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    """One step of training in fp16 autocast, with gradients clipped to max_norm: did it step?

    loss_fn(outputs, targets) is a mean. The norm that is clipped is that of the true gradients.
    Where one is not finite, the optimizer does not step and the result is False. The scaler is
    updated in any case. Gradients from before the call take no part.
    """
    ...


# %%
check(scaled_step)

# %% [markdown]
# ## 8 · Accumulation, two optimizers, a checkpoint
#
# `unscale_` may come once for each optimizer and step, and `update` tells the scaler that the step is over. Where a step is made of several `backward` or several optimizers, the scaler cannot know where it ends. You say it, by where you put `update`.
#
# **Accumulation.** Four micro-batches with gradients 1, 2, 3 and 4 are to make one step with their mean, 2.5. Someone puts `unscale_` after each `backward`, to clip there. At the second micro-batch that is an error:

# %% tags=["nbval-check-output"]
weight, optimizer = one_number()
scaler = torch.amp.GradScaler(lesson.device.type)
with raises(RuntimeError):
    for gradient in (1.0, 2.0):
        scaler.scale((gradient * weight).sum() / 4).backward()
        scaler.unscale_(optimizer)

# %% [markdown]
# *Since the last update()*, says the message, and so `update()` is added after each micro-batch. Now it runs.


# %%
def accumulated_gradient(update_each):
    """The gradient that the optimizer steps with, of micro-batches with gradients 1, 2, 3, 4."""
    weight, optimizer = one_number()
    scaler = torch.amp.GradScaler(lesson.device.type)
    for gradient in (1.0, 2.0, 3.0, 4.0):
        scaler.scale((gradient * weight).sum() / 4).backward()
        if update_each:
            scaler.unscale_(optimizer)
            scaler.update()
    if not update_each:
        scaler.unscale_(optimizer)
    return weight.grad.item()


# %%
predict(
    "`unscale_` and `update` after each of the four: with which gradient does the optimizer step?",
    run=lambda: accumulated_gradient(update_each=True),
    options={
        "2.5: their mean": lambda g: abs(g - 2.5) < 0.01,
        "about 1: the last one's share": lambda g: abs(g - 1) < 0.01,
        "about 65536 times too large": lambda g: g > 1000,
        "about 0: divided by the scale four times": lambda g: g < 0.01,
    },
)

# %% tags=["claim-M17", "nbval-check-output"]
for update_each in (True, False):
    when = "after each micro-batch" if update_each else "once, at the end       "
    print(f"unscale_ {when}: gradient {accumulated_gradient(update_each):.5f}")
assert accumulated_gradient(update_each=False) == 2.5
assert abs(accumulated_gradient(update_each=True) - 1.0) < 1e-4

# %% [markdown]
# Each `unscale_` divides *all* that has been added up so far, and that includes what was unscaled before. The first three keep 1/65536 of their share or less, and the step is the last micro-batch's, at a quarter of its weight. No error, no odd number in the log. A window needs one scale from its start to its end: `backward` for all micro-batches,
# then one `unscale_`, one clip, one `step`, one `update`. `kit.amp_step` takes a list of micro-batches, weighs each by its number of samples, and does that. Here it is held against one large batch:

# %%
large = [(train_x[:100], train_y[:100])]
uneven = [(train_x[a:b], train_y[a:b]) for a, b in ((0, 50), (50, 90), (90, 100))]
ends = []
for micro_batches in (large, uneven):
    model = digit_net()
    step = kit.amp_step(
        model,
        micro_batches,
        F.cross_entropy,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dtype=torch.float16,
        scaler=torch.amp.GradScaler(lesson.device.type),
    )
    print(f"{len(micro_batches)} micro-batches: loss {step.loss:.4f}, norm {step.norm:.4f}")
    ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
print(f"largest difference of a weight afterwards: {(ends[0] - ends[1]).abs().max().item():.1g}")
assert (ends[0] - ends[1]).abs().max() < 2e-3

# %% [markdown]
# ### Exercise 9 · A window, scaled (fifteen minutes)
#
# The micro-batches differ in size, and the step is that of one batch made of them all.


# %% tags=["exercise"]
def accumulated_scaled_step(model, micro_batches, loss_fn, optimizer, scaler):
    """One step in fp16 autocast for a list of micro-batches (inputs, targets): did it step?

    The gradient is that of loss_fn, a mean, over all samples of all micro-batches, which may differ
    in size. Where it is not finite, the optimizer does not step and the result is False. The scaler
    is updated once. Gradients from before the call take no part.
    """
    ...


# %%
check(accumulated_scaled_step)

# %% [markdown]
# **Two optimizers.** One scaler serves both. It keeps in mind for each optimizer whether an inf was found. Here the two layers of a network have one each, and a hook plants an inf in the gradient of the second layer's bias:

# %%
first, second = nn.Linear(784, 32).to(lesson.device), nn.Linear(32, 10).to(lesson.device)
model = nn.Sequential(first, nn.ReLU(), second)
optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (first, second)]
scaler = torch.amp.GradScaler(lesson.device.type)


def plant_inf(gradient):
    return gradient.index_fill(0, torch.tensor([0], device=gradient.device), math.inf)


handle = second.bias.register_hook(plant_inf)
step = kit.amp_step(
    model,
    [(train_x[:50], train_y[:50])],
    F.cross_entropy,
    optimizers,
    dtype=torch.float16,
    scaler=scaler,
)
handle.remove()
print("norms", [round(norm, 3) for norm in step.norms], " skipped:", step.skips)
print("scale", step.scale, "→", scaler.get_scale())
assert step.skips == (False, True) and scaler.get_scale() == step.scale / 2

# %% [markdown]
# Each skips for itself, and an inf in one of them is enough to halve the scale for both. A parameter must belong to one optimizer only: in two, it would be unscaled twice.
#
# **The checkpoint.** The scale and the count of good steps are state of the training, like the momentum: `scaler.state_dict()` is made for the checkpoint. That of a run whose scaler was switched off, in fp32 or bf16, is empty:

# %% tags=["claim-M18", "nbval-check-output"]
off = torch.amp.GradScaler("cpu", enabled=False)
print("saved by a scaler that is switched off:", off.state_dict())
with raises(RuntimeError):
    torch.amp.GradScaler("cpu").load_state_dict(off.state_dict())
off.load_state_dict(torch.amp.GradScaler("cpu").state_dict())  # the other way round is silent
print("and switched off it stays:", off.is_enabled(), off.get_scale())
assert not off.is_enabled() and off.state_dict() == {}

# %% [markdown]
# ## 9 · When it breaks
#
# A step that is skipped now and then is meant. What if the loss itself is nan? The articles advise: *with nan under AMP, switch AMP off to see.* To see what? Here are four programs on the digits, each of which ends in inf or nan somewhere. Two need a definition. The first compares all rows of an image with one another, an **attention**, and is given
# pixels from 0 to 255. The second has a loss written by hand.


# %%
class Rows(nn.Module):
    """Scores (N, 10) of images (N, 784): each row of 28 pixels attends to all rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(28, 16), nn.Linear(16, 10)

    def scores(self, rows):
        return rows @ rows.transpose(1, 2)  # (N, 28, 28)

    def forward(self, x):
        rows = self.embed(x.unflatten(1, (28, 28)))  # (N, 28, 16)
        return self.head((self.scores(rows).softmax(dim=-1) @ rows).mean(dim=1))


def by_hand(outputs, targets):
    """A cross-entropy for each class alone, with a small number to keep log from 0."""
    p, wanted = torch.sigmoid(outputs), F.one_hot(targets, 10)
    return -(wanted * (p + 1e-8).log() + (1 - wanted) * (1 - p + 1e-8).log()).mean()


# %%
names = (
    "attention on raw pixels",
    "log(p + 1e-8), and p = 0",
    "one pixel is nan",
    "a loss times 100",
)


def program(name):
    """A model, its inputs and its loss."""
    model, inputs, loss_fn = digit_net(), train_x[:50].clone(), F.cross_entropy
    if name == "attention on raw pixels":
        torch.manual_seed(SEED)
        model, inputs = Rows().to(lesson.device), 255 * inputs
    if name == "log(p + 1e-8), and p = 0":
        model[2].weight.data *= 100
        loss_fn = by_hand
    if name == "one pixel is nan":
        inputs[7, 300] = math.nan
    if name == "a loss times 100":
        loss_fn = lambda outputs, targets: 100 * F.cross_entropy(outputs, targets)
    return model, inputs, loss_fn


def outcome(name, dtype, scale=1.0):
    """What becomes of loss and gradients, in two words."""
    model, inputs, loss_fn = program(name)
    with torch.autocast(lesson.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = loss_fn(model(inputs), train_y[:50])
    if not loss.isfinite():
        return f"loss {loss.item()}"
    (scale * loss).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return "finite" if norm.isfinite() else f"gradients {norm.item()}"


# %%
predict(
    "All four break in fp16 at scale 2¹⁶. Which run without inf or nan in fp32?",
    run=lambda: [outcome(name, torch.float32) == "finite" for name in names],
    options={
        "all: it is the format that breaks them": lambda fine: all(fine),
        "all but the nan pixel": lambda fine: fine == [True, True, False, True],
        "the last alone": lambda fine: fine == [False, False, False, True],
        "the first and the last": lambda fine: fine == [True, False, False, True],
    },
)

# %% tags=["claim-M10"]
columns = {
    "fp32": (torch.float32,),
    "bf16": (torch.bfloat16,),
    "fp16, scale 2^16": (torch.float16, 2.0**16),
    "fp16, scale 2^8": (torch.float16, 2.0**8),
}
found = {name: [outcome(name, *column) for column in columns.values()] for name in names}
table(("program", *columns), [(name, *cells) for name, cells in found.items()])
finite = [[cell == "finite" for cell in cells] for cells in found.values()]
assert finite == [
    [True, True, False, False],  # the forward pass leaves fp16's range
    [True, True, False, False],  # 1e-8 is 0 in fp16
    [False, False, False, False],  # not the format's doing
    [True, True, False, True],  # the scale is too large, and the scaler lowers it
]

# %% [markdown]
# The advice holds, and the table says what it is good for. If fp32 breaks too, the precision is innocent: look at the data, the rate, the formula (lesson 07). If fp32 is finite, the cause is a number that the format cannot hold, and a run in bf16 tells which kind: where that is finite as well, it was the *range*, at one end or the other; where
# it breaks, too, it was the digits. And if the loss is finite and gradients alone are not, at a high scale, nothing is broken: the scaler lowers the scale and goes on.
#
# The first program is the bad case. Its *loss* is nan, so the gradients are nan at any scale. Look at what the scaler makes of it. The last line gives the run a good loss again:

# %% tags=["claim-M19", "nbval-check-output"]
weight, optimizer = one_number()
scaler = torch.amp.GradScaler(lesson.device.type)


def step_with(loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


steps = 0
while scaler.get_scale() > 0 and steps < 1000:
    step_with((math.nan * weight).sum())
    steps += 1
    if steps in (1, 16, 100):
        print(f"after {steps} steps: scale {scaler.get_scale():.3g}, weight {weight.item()}")
print(f"after {steps} steps: scale {scaler.get_scale()}, weight {weight.item()}")
assert weight.item() == 1.0 and scaler.get_scale() == 0.0
step_with((3 * weight).sum())
print("one good loss:", "weight", weight.item())
assert math.isnan(weight.item())

# %% [markdown]
# No error, no warning. Every step is skipped, the weights stay as they are, and the scale falls without end, down to 0. After that even a good loss does harm: 0 times the loss gives gradients of 0, in which no inf is found, and 0 divided by a scale of 0 is nan. So a falling scale is a figure to watch in every fp16 run. A scale that keeps falling
# below 1 is an alarm: no loss scale cures an overflow in the forward pass.
#
# ### Which operation?
#
# fp32 has room for what fp16 has not, so a run in fp32 can say beforehand what would overflow. The class below notes the largest number that each operation gives.


# %%
class Largest(torch.overrides.TorchFunctionMode):
    """Inside `with Largest() as seen:`, seen.ops holds (operation, largest absolute value)."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.ops.append((func.__name__, result.detach().abs().max().item()))
        return result


# %%
model, inputs, loss_fn = program("attention on raw pixels")
with Largest() as seen:
    loss_fn(model(inputs), train_y[:50])
limit = kit.format_of("fp16").max
rows = [(op, f"{size:,.4g}", "overflows" if size > limit else "") for op, size in seen.ops]
table(("operation", "largest, in fp32", f"in fp16, up to {limit:,.0f}"), rows)
assert [op for op, size in seen.ops if size > limit] == ["matmul"]

# %% [markdown]
# The layer's results are harmless. Their product is not: sixteen products of numbers in the hundreds are added up. softmax then computes inf - inf, which is nan. Four cures, from the format to the cause:


# %%
class FullScores(Rows):
    def scores(self, rows):
        with torch.autocast(rows.device.type, enabled=False):
            return rows.float() @ rows.float().transpose(1, 2)  # without .float(), still fp16


class DividedBefore(Rows):
    def scores(self, rows):
        return (rows / 16) @ rows.transpose(1, 2)  # 1/16 after the product would be too late


def loss_of(model_class, factor=255.0, dtype=torch.float16):
    torch.manual_seed(SEED)
    with torch.autocast(lesson.device.type, dtype=dtype):
        outputs = model_class().to(lesson.device)(factor * train_x[:50])
        return F.cross_entropy(outputs, train_y[:50]).item()


# %%
losses = {
    "as it was, fp16": loss_of(Rows),
    "bf16": loss_of(Rows, dtype=torch.bfloat16),
    "this product in fp32": loss_of(FullScores),
    "divided before the product": loss_of(DividedBefore),
    "pixels from 0 to 1": loss_of(Rows, factor=1.0),
    "for comparison, guessing": math.log(10),
}
table(("cure", "loss"), [(name, f"{loss:.4g}") for name, loss in losses.items()])
assert [math.isfinite(loss) for loss in losses.values()] == [False] + 5 * [True]

# %% [markdown]
# All are finite. bf16 is the shortest way, and it has fewer digits; the product in fp32 costs time where it stands; a division helps if it comes before the sum, and it makes another model of it, which has to be trained that way. But compare the last row: before any training, the loss should be about that of guessing, and it is with pixels from 0 to 1 alone. The inputs had been wrong all along, in fp32 too, and fp16 was the first to say so.
#
# **Constants.** One more source of inf is written in the program itself. A score that must not count is set to "minus infinity", and people write -1e9. fp16 has no such number:

# %% tags=["nbval-check-output"]
scores = torch.full((1, 3), -40.0, dtype=torch.float16)
padding = torch.tensor([[False, True, True]])
with raises(RuntimeError):
    scores.masked_fill(padding, -1e9)
lowest = torch.finfo(scores.dtype).min
weights = scores.masked_fill(padding, lowest).softmax(dim=-1)
print("filled with", lowest, "→ softmax", weights.tolist())
print("1e-8 in fp16:", torch.tensor(1e-8).half().item())

# %% [markdown]
# That one is loud. A constant that is too *small*, such as an `eps` of 1e-8, becomes 0 in silence, as in the second program. Take such constants from `torch.finfo(x.dtype)`, and think about which dtype `x` will have under autocast.

# %% [markdown]
# ## Clinic
#
# Six programs that are wrong, each reduced from a failure that someone reported. You see the symptom as its user saw it. Find the cause, repair the function, check it. The programs run on the CPU.

# %% [markdown]
# ### Clinic 1 · Half the memory
#
# To save memory, the model is turned into fp16, weights and all, and a scaler takes care of small gradients. The first step ends with an error.


# %% tags=["exercise", "clinic"]
def train_half(model, inputs, targets, steps=10, rate=0.1):
    """Losses of `steps` steps of SGD on the mean cross-entropy, computed in fp16: a list of floats.

    The model's weights are fp32 before and after. Neither a small update nor a small gradient is
    lost on the way.
    """
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.half()).float(), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


# %%
clinic_x, clinic_y = train_x[:50].cpu(), train_y[:50].cpu()
torch.manual_seed(SEED)
net = nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
try:
    print([round(loss, 3) for loss in train_half(net, clinic_x, clinic_y)])
except ValueError as error:
    print("ValueError:", error)

# %%
check(train_half)

# %% [markdown]
# ### Clinic 2 · The layer that does not train
#
# A network is trained in bf16 throughout, weights included, which raises nothing: no scaler is needed, and the loss falls. In the finished checkpoint, a colleague finds that every weight of every LayerNorm is exactly 1.


# %% tags=["exercise", "clinic"]
def train_norm(model, batches, rate=1e-3):
    """The model, trained by AdamW with one step for each batch (inputs, targets), in bf16.

    Forward and backward are computed in bf16; every weight moves about as it would in fp32.
    """
    model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.to(torch.bfloat16)).float(), targets).backward()
        optimizer.step()
    return model


# %%
torch.manual_seed(SEED)
net = nn.Sequential(nn.Linear(784, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10))
clinic_batches = [(x.cpu(), y.cpu()) for x, y in batches(20)] * 3
train_norm(net, clinic_batches)
least, most = net[1].weight.aminmax()
print(f"weights of the LayerNorm: {least.item():.4f} to {most.item():.4f}")

# %%
check(train_norm)

# %% [markdown]
# ### Clinic 3 · Nan in some batches
#
# Attention over sequences that were padded to one length. The mask is built as the advice goes: not -1e9, but the dtype's own lowest number. It works for months. Then nan appears, in some batches and not in others, on data whose scores are somewhat more negative.


# %% tags=["exercise", "clinic"]
def masked_attention(queries, keys, values, padding):
    """Each query's mean of the values, weighed by the softmax of its scores: (N, Q, D), finite.

    queries (N, Q, D), keys and values (N, K, D), of one dtype; padding (N, K) bool, True where a
    key does not count: its weight is 0. Where all keys of a sequence are padding, any finite
    numbers will do. The result has the dtype of the queries; its gradients are finite, too.
    """
    scores = queries @ keys.transpose(1, 2)
    mask = padding[:, None, :].to(scores.dtype) * torch.finfo(scores.dtype).min
    return (scores + mask).softmax(dim=-1) @ values


# %%
keys = torch.ones(2, 3, 4, dtype=torch.float16)
padding = torch.tensor([[False, False, True], [True, True, True]])
for size in (1.0, 3.0, 5.0):
    attended = masked_attention(-size * keys, keys, keys, padding)
    finite = [sequence.isfinite().all().item() for sequence in attended]
    print(f"scores of {-4 * size:.0f}: is all of each sequence finite? {finite}")

# %%
check(masked_attention)

# %% [markdown]
# ### Clinic 4 · Slow to start again
#
# A long run is cut into pieces of a few hours, and each piece continues from the checkpoint of the one before. After each start the first few batches bring nothing: the loss stays where it is.


# %% tags=["exercise", "clinic"]
def resume(checkpoint, model, optimizer, scaler):
    """Bring model, optimizer and scaler, all new, to where the training stopped.

    checkpoint: a dict of the state_dicts "model", "optimizer" and "scaler". The training goes on as
    if it had not been interrupted.
    """
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


# %%
def training_parts():
    model = digit_net().cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.amp.GradScaler("cpu")


def heavy_loss(outputs, targets):
    return 100 * F.cross_entropy(outputs, targets)


def run_on(model, optimizer, scaler, steps):
    """Train for some steps: "stepped" or "skipped" for each."""
    log = []
    for batch in [(x.cpu(), y.cpu()) for x, y in batches(steps)]:
        log.append(
            kit.amp_step(
                model,
                [batch],
                heavy_loss,
                optimizer,
                dtype=torch.float16,
                scaler=scaler,
                max_norm=1.0,
            )
        )
    return ["skipped" if step.skipped else "stepped" for step in log]


# %%
old = training_parts()
run_on(*old, steps=16)
checkpoint = dict(zip(("model", "optimizer", "scaler"), [part.state_dict() for part in old]))
new = training_parts()
resume(copy.deepcopy(checkpoint), *new)
print("without interruption:", run_on(*old, steps=8))
print("after the resume:    ", run_on(*new, steps=8))

# %%
check(resume)

# %% [markdown]
# ### Clinic 5 · A mean that comes to rest
#
# How active is a layer, on average, over a long evaluation? The activations come out of autocast batch by batch, and sum and count are kept as they go by. On the first batches the mean agrees with what NumPy says. On the whole set it does not.


# %% tags=["exercise", "clinic"]
def running_mean(batches):
    """Mean of all numbers of the batches, a float, to four digits.

    batches: tensors of any shapes and of one dtype, fp32, fp16 or bf16, gone through once. Only one
    batch is held at a time.
    """
    total = count = 0
    for batch in batches:
        total = total + batch.sum()
        count = count + torch.tensor(batch.numel(), dtype=batch.dtype)
    return (total / count).item()


# %%
generator = torch.Generator().manual_seed(SEED)
activations = (2 + torch.randn(4000, 8, generator=generator)).to(torch.bfloat16)
for n in (10, 100, 1000, 4000):
    right = activations[:n].double().mean().item()
    mean = running_mean(activations[:n].split(1))
    print(f"{n:5} batches: mean {mean:.4f}, should be {right:.4f}")

# %%
check(running_mean)

# %% [markdown]
# ### Clinic 6 · Half a step, now and then
#
# Two parts of a model have an optimizer each; one loss trains both. Most steps are right to the last bit. Now and then, one part takes a step of half the length or of double.


# %% tags=["exercise", "clinic"]
def step_both(loss, optimizers, scaler):
    """One step of each optimizer with the gradients of the loss, which is not scaled yet.

    An optimizer whose gradients are not finite skips its step. The scaler is updated.
    """
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
        scaler.update()


# %%
parts = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
optimizers = [torch.optim.SGD([part], lr=1.0) for part in parts]
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
for step in range(6):
    before = [part.item() for part in parts]
    step_both((parts[0] + parts[1]).sum(), optimizers, scaler)
    lengths = [b - part.item() for part, b in zip(parts, before)]
    print(f"step {step}: lengths {lengths}, scale {scaler.get_scale():g}")

# %%
check(step_both)

# %% [markdown]
# ### When you have tried
#
# Read on when you have. Where these failures were reported: (1) Lightning-AI/pytorch-lightning#5140, pytorch/pytorch#74739; (2) vllm-project/speculators#765; (3) huggingface/transformers#17306; (4) pytorch/vision#4923, ultralytics/ultralytics#22189; (5) jax-ml/ml_dtypes#63, pytorch/ao#1124; (6) huggingface/accelerate#439.
# The program at the top of the lesson: milesial/Pytorch-UNet#468, pytorch/examples#1196.

# %% [markdown]
# ## What you take with you
#
# **Your toolkit**, in `course_utils.toolkit.precision`: `float_bits`, `from_bits`, `rounded` and `format_of` for the bits of a number; `underflow_fraction` and `overflow_fraction`; `record_dtypes`, which says what autocast does to each operation; `amp_report`, which measures which precision pays; and `amp_step`, the step with everything in its place. For a project of your
# own: put your model, batches, loss, optimizer and scheduler in the place of these. With bf16, leave the scaler out.

# %%
model = digit_net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scheduler = warm_up(optimizer)
scaler = torch.amp.GradScaler(lesson.device.type)
log = []
for batch in batches(20):
    step = kit.amp_step(
        model,
        [batch],  # several, to accumulate
        F.cross_entropy,
        optimizer,
        dtype=torch.float16,
        scaler=scaler,
        schedulers=scheduler,
        max_norm=1.0,
    )
    log.append(step)
print(f"loss {log[0].loss:.2f} → {log[-1].loss:.2f}, scale {log[-1].scale:.0f}")
print(f"{sum(step.skipped for step in log)} of {len(log)} steps skipped")

# %% [markdown]
# | symptom | cause | test | cure |
# | --- | --- | --- | --- |
# | with AMP the loss hardly falls, without it does; no error | clipping, or a penalty, worked on scaled gradients | the norm that clipping saw: thousands | `unscale_` first; `kit.amp_step` |
# | in fp16 some losses teach nothing | gradients underflow | `kit.underflow_fraction` at scale 1 | a scaler, or bf16 |
# | the loss is nan in fp16, finite in bf16 and fp32 | a number outside fp16's range, in the forward pass | the largest number of each operation, in fp32 | smaller numbers at that operation; that operation in fp32; bf16 |
# | the loss is nan in fp32, too | not the precision | a run in fp32 | lesson 07 |
# | the scale keeps falling, nothing is learned | the loss or its gradient is not finite at any scale | `scaler.get_scale()` in the log | as for nan |
# | a step skipped now and then | the scaler tries a larger scale | `AmpStep.skipped`; the scale fell | none needed |
# | `lr_scheduler.step() before optimizer.step()`, in the right order | the first step was skipped | the scale before and after `update` | step the scheduler when the optimizer has stepped |
# | accumulated steps learn from one micro-batch | `unscale_` and `update` for each | the gradient, held against one large batch | once for each window |
# | `unscale_() has already been called` | a second `unscale_` in one step | read the loop from `backward` to `update` | one `unscale_` for each optimizer and step |
# | `Attempting to unscale FP16 gradients` | the weights are fp16 | `{p.dtype for p in model.parameters()}` | fp32 weights, and autocast |
# | weights near 1 stay as they are in bf16 | the step is less than half the spacing | `kit.float_bits(1.0, "bf16").spacing` | fp32 weights, and autocast |
# | a counter stops at 256, a mean comes to rest | it is kept in bf16 | its dtype | keep sums and counts in fp32 |
# | nan where a row is masked entirely | a mask that was added to the scores | `scores.isinf()` | `masked_fill`, a Boolean mask |
# | slow or skipped steps after each resume | the scaler is not in the checkpoint | the scale before and after | save `scaler.state_dict()` |
#
# **What the articles say, and what you have seen**
#
# | claim | verdict |
# | --- | --- |
# | `torch.cuda.amp.autocast` and `GradScaler` (M01) | outdated: they warn; `torch.amp`, with the type of the device |
# | AMP saves 30 to 50 percent of memory and is faster (M02) | measured: what is kept for backward shrinks where it outweighs the copies of the weights; weights, gradients and optimizer state stay; the speed is the device's |
# | forward in float16, backward in float32 (M03) | no: backward runs in the dtype of its forward operation; the gradients of fp32 weights are fp32 |
# | `GradScaler` prevents fp16 gradients from underflowing (M04) | holds; bf16 does without |
# | some operations need fp32: `autocast(enabled=False)` inside (M05) | the inputs stay as they are unless you cast them; and many losses run in fp32 already |
# | `scaler.step()` may skip a step (M06) | holds, in silence; a scheduler stepped for each batch runs ahead |
# | clip only after `scaler.unscale_()` (M07) | holds: before it, the threshold is `max_norm / scale` |
# | *beyond the articles:* the weight cache, `model.half()`, backward outside autocast (M08) | seen |
# | *beyond the articles:* bf16, fp16, tf32: range and precision (M09) | seen by the bits |
# | with nan under AMP, switch AMP off to see (M10) | holds; bf16 then says which kind of trouble it is |
# | *beyond the articles:* small updates of bf16 weights are lost (M11), sums inside an operation are not (M12); a `backward` written in Python runs under the autocast around it (M13); the device's units decide about speed (M14); a loss scale that is a power of two changes no bit of a run in fp32 or bf16 (M15); AdamW hides a clip before `unscale_` (M16); `unscale_` for each micro-batch leaves the last one (M17); a scaler that was off saves nothing, and a scaler that is on refuses it (M18); the scale can reach 0, and then a good loss makes nan of the weights (M19) | seen |
#
# For more: [Automatic Mixed Precision examples](https://pytorch.org/docs/stable/notes/amp_examples.html) is PyTorch's own account of clipping, accumulation and several optimizers; [the reference of torch.amp](https://pytorch.org/docs/stable/amp.html) has the lists of operations for each device; [Mixed Precision Training](https://arxiv.org/abs/1710.03740)
# is the paper in which fp32 master weights and loss scaling come from, with the histogram of gradients that gave rise to it.
#
# Next: lesson 05, feeding the model.
