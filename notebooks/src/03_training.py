# %% [markdown]
# # 03 · The training loop
#
# After this lesson you can write a training loop line by line, say of each line what breaks without it, and tell from measurements whether a run that looks well is right.
#
# 240 to 300 minutes, best in four sittings: sections 1 to 4, 5 to 9, 10 to 14, and the clinic. It builds on lessons 01 and 02: shapes and broadcasting, what `backward` leaves in `.grad`, and what `no_grad` does.
#
# Where this lesson says *the articles*, it means the three of lesson 01. Thirty-five of their statements on training are put to the test; a table at the end says what became of each.
#
# | | | |
# | --- | --- | --- |
# | [1 A line by hand](#1-·-A-line-by-hand) | [7 Schedules](#7-·-Schedules) | [13 98 % in seconds](#13-·-98-%25-in-seconds) |
# | [2 Modules, losses, shapes](#2-·-Modules,-losses,-shapes) | [8 Depth](#8-·-Depth) | [14 Little data: transfer](#14-·-Little-data:-transfer) |
# | [3 Data that fits](#3-·-Data-that-fits) | [9 When it does not learn](#9-·-When-it-does-not-learn) | [Clinic](#Clinic) |
# | [4 Two modes, honest figures](#4-·-Two-modes,-honest-figures) | [10 Overfitting](#10-·-Overfitting) | [What you take with you](#What-you-take-with-you) |
# | [5 Accumulation](#5-·-Accumulation) | [11 The same run twice](#11-·-The-same-run-twice) | |
# | [6 Rate and optimizer](#6-·-Rate-and-optimizer) | [12 What the run leaves behind](#12-·-What-the-run-leaves-behind) | |

# %% tags=["parameters"]
DEVICE = "auto"
SEED = 0
QUICK = True

# %%
import copy
import itertools
import math
import random
import tempfile
import time
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms import v2

import course_utils.toolkit.training as kit
from course_utils import bars, benchmark, check, curves, dots, explore_descent, explore_schedule
from course_utils import hint, images, load, predict, raises, solution, start, table

lesson = start("03_training", DEVICE, SEED, QUICK)

# %% [markdown]
# ## A program that runs
#
# A network is to tell the ten handwritten digits apart. It has three hidden layers, each with batch normalisation and dropout. The program measures what share of 1,000 test digits it gets right, trains it on 4,000 others, and measures again. Training means: take 100 digits, a **batch**; compute
# the **loss**, a number that says how wrong the answers are; let `backward` find the gradient; let the optimizer move the weights one **step**. Going once through all digits is an **epoch**, and four epochs make 160 steps.

# %%
digits = load("digits")
pictures, answers = digits.train_images.unsqueeze(1) / 255, digits.train_labels
test_pictures, test_answers = digits.test_images.unsqueeze(1) / 255, digits.test_labels
pictures, answers = pictures.to(lesson.device), answers.to(lesson.device)
test_pictures, test_answers = test_pictures.to(lesson.device), test_answers.to(lesson.device)


def network():
    layers = [nn.Flatten()]
    for inputs in (784, 64, 64):
        layers += [nn.Linear(inputs, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(64, 10)).to(lesson.device)


def share_right(model):
    model.eval()
    with torch.no_grad():
        return (model(test_pictures).argmax(dim=1) == test_answers).float().mean().item()


def train_as_found(model, epochs=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    reported = []
    for _ in range(epochs):
        for step, batch in enumerate(torch.randperm(4000).split(100), start=1):
            loss = F.cross_entropy(model(pictures[batch]), answers[batch])
            loss.backward()
            optimizer.step()
            if step % 20 != 0:
                continue  # only every twentieth loss is kept, for the curve
            reported.append(loss.item())
            optimizer.zero_grad()
    return reported


# %%
torch.manual_seed(SEED)
found = network()
before = share_right(found)
found_losses = train_as_found(found)
after = share_right(found)

curves({"loss": (range(20, 161, 20), found_losses)}, "step", "loss of every twentieth batch")
print(f"test digits right: {before:.0%} before training, {after:.0%} after")

# %% [markdown]
# No error, no warning, a loss that falls and a respectable figure. More epochs would bring more, a larger network perhaps, another optimizer: that is what one tries next. Yet the program is wrong in two places. The same network on the same digits, with the same optimizer and as many steps, can do a good deal better; section 4 measures how much. And whoever
# finds only one of the two and repairs it may well undo the repair, for the figure gets *worse*.
#
# Section 1 explains the one, section 4 the other.

# %% [markdown]
# ## 1 · A line by hand
#
# The smallest model has two numbers: a line, `w * x + b`. Below are 100 points scattered about the line of slope 3 and height 1. The loop that finds it has four parts, and every training loop has them: compute the loss, find the gradient, take a step against it, forget the gradient. A step is the gradient times the **learning rate**, or rate for short. Here each
# step uses all points, so a step is an epoch.

# %% tags=["claim-L01"]
line_x = torch.linspace(-1, 1, 100)
line_y = 3 * line_x + 1 + 0.1 * torch.randn(100, generator=torch.Generator().manual_seed(SEED))

w, b = torch.tensor(0.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)
rate = 0.2
for _ in range(100):
    loss = ((w * line_x + b - line_y) ** 2).mean()  # how wrong
    loss.backward()  # which way is up
    with torch.no_grad():
        w -= rate * w.grad  # a step down, unrecorded and in place (lesson 02)
        b -= rate * b.grad
    w.grad = b.grad = None  # forget

least_squares = torch.linalg.lstsq(torch.stack([line_x, torch.ones(100)], dim=1), line_y).solution
print(f"the loop:      w = {w.item():.4f}, b = {b.item():.4f}")
print(f"least squares: w = {least_squares[0]:.4f}, b = {least_squares[1]:.4f}")
assert torch.allclose(torch.stack([w, b]).detach(), least_squares, atol=1e-3)
assert abs(w.item() - 3) < 0.2 and abs(b.item() - 1) < 0.2

# %% [markdown]
# The articles promise that such a loop recovers w = 3 and b = 1. It does, as nearly as the points allow. What it finds is the line with the least mean squared error on *these* points, which for a line can also be computed directly.
#
# Now leave out the fourth part. `backward` adds to `.grad` (lesson 02), so the second step uses the sum of two gradients, the third the sum of three, and so on. *Without zero_grad the result is completely wrong*, say the articles. In which way?


# %%
def slopes_by_hand(clear, rate=0.05, steps=120):
    """The slope w after each step; `clear` says whether gradients are forgotten in between."""
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    b = torch.zeros((), dtype=torch.float64, requires_grad=True)
    path = []
    for _ in range(steps):
        ((w * line_x + b - line_y) ** 2).mean().backward()
        with torch.no_grad():
            w -= rate * w.grad
            b -= rate * b.grad
        if clear:
            w.grad = b.grad = None
        path.append(w.item())
    return path


# %%
predict(
    "The same line, 120 steps, and the gradients are never cleared. What does the slope w do?",
    run=lambda: slopes_by_hand(clear=False),
    options={
        "it comes to about 3 and stays, only later": lambda path: (
            max(path[-60:]) - min(path[-60:]) < 0.5
        ),
        "it swings around 3 and does not settle": lambda path: (
            math.isfinite(path[-1]) and 10 > max(path[-60:]) > 4 and -4 < min(path[-60:]) < 2
        ),
        "it runs away: each step is longer than the one before": lambda path: (
            not math.isfinite(path[-1]) or abs(path[-1]) > 100
        ),
    },
)


# %% tags=["claim-L03"]
def slopes_with_momentum(momentum, rate=0.05, steps=120):
    """The same by torch.optim, gradients cleared at each step."""
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    b = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=rate, momentum=momentum)
    path = []
    for _ in range(steps):
        optimizer.zero_grad()
        ((w * line_x + b - line_y) ** 2).mean().backward()
        optimizer.step()
        path.append(w.item())
    return path


cleared, never = slopes_by_hand(clear=True), slopes_by_hand(clear=False)
curves(
    {"cleared": cleared, "never cleared": never, "momentum 0.9": slopes_with_momentum(0.9)},
    "step",
    "slope w",
)
undamped = slopes_with_momentum(1.0)
gap = max(abs(a - b) for a, b in zip(never, undamped))
print(f"never cleared, against momentum 1.0: largest difference {gap:.1e}")
assert gap < 1e-9 and abs(cleared[-1] - 3) < 0.2
assert max(never[-60:]) > 5.5 and min(never[-60:]) < 0.5

# %% [markdown]
# It swings, from about 0 to about 6 and back, like a ball in a bowl without friction, and the result is wherever the run happens to end. That is a known method without its brake. With **momentum**, an optimizer keeps a part of its last step, say nine tenths, and adds the new gradient to it. A tenth of the speed is lost each time, the swing dies down, and the slope
# comes to rest. The sum of all gradients so far is momentum with nothing lost: the two paths are the same up to rounding.
#
# Gradients are cleared, then. `torch.optim` has the third and fourth part of the loop ready, `optimizer.step()` and `optimizer.zero_grad()`. Does `zero_grad` stand at the beginning of the loop or at its end? The articles hold that both are the same. Suppose that a batch is to be left out, because a picture in it is damaged:


# %%
def gradients_used(clear, leave_out=None):
    """What each step uses as its gradient. The four batches have the gradients 1, 2, 4 and 8."""
    weight = torch.tensor(0.0, requires_grad=True)
    used = []
    for i, slope in enumerate((1.0, 2.0, 4.0, 8.0)):
        if clear == "at the beginning":
            weight.grad = None
        (slope * weight).backward()
        if i == leave_out:
            continue  # to the next batch, without a step
        used.append(weight.grad.item())  # here a step would be taken
        if clear == "at the end":
            weight.grad = None
    return used


# %%
predict(
    "The gradients of four batches are 1, 2, 4 and 8. The batch with 2 is left out by `continue`, "
    "and gradients are cleared at the end of the loop. Which gradients do the three steps use?",
    run=lambda: gradients_used("at the end", leave_out=1),
    options={
        "1, 4, 8": lambda used: used == [1, 4, 8],
        "1, 6, 8": lambda used: used == [1, 6, 8],
        "1, 6, 14": lambda used: used == [1, 6, 14],
    },
)

# %% tags=["claim-L02", "nbval-check-output"]
for leave_out in (None, 1):
    print("no batch is left out:" if leave_out is None else "the second batch is left out:")
    for clear in ("at the beginning", "at the end"):
        print(f"   cleared {clear:17} {gradients_used(clear, leave_out)}")
assert gradients_used("at the beginning") == gradients_used("at the end") == [1, 2, 4, 8]
assert gradients_used("at the beginning", leave_out=1) == [1, 4, 8]
assert gradients_used("at the end", leave_out=1) == [1, 6, 8]

# %% [markdown]
# As long as each pass runs to its end, there is no difference. With the `continue`, the batch that was left out takes part after all: in the step of the next one. So `zero_grad` belongs in front of `backward`, where no path leads around it. From here on the loop reads
#
# ```python
# optimizer.zero_grad()
# loss = loss_fn(model(inputs), targets)
# loss.backward()
# optimizer.step()
# ```
#
# With that, one fault of the opening program is within reach. Repair it in `train_as_found`, run the cell below it again, and note the figure. (Section 4 has its own copy of the program, so you can leave it repaired.)

# %% [markdown]
# ### Exercise 1 · A step (five minutes)
#
# Write what `optimizer.step()` and `optimizer.zero_grad()` do together, for any parameters. The loss may not have reached each of them: a parameter without a gradient stays as it is.


# %% tags=["exercise"]
def sgd_step(parameters, rate):
    """One step of gradient descent: each parameter moves, in place, by -rate times its gradient.

    parameters: tensors of any shape that require grad, in anything that can be walked through once.
    Afterwards each .grad is None, and each parameter is a leaf that requires grad, as before.
    A parameter whose .grad is None stays as it is. Returns nothing.

    >>> p = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> p.square().sum().backward()  # p.grad is [2, 4]
    >>> sgd_step([p], rate=0.25)
    >>> p
    tensor([0.5000, 1.0000], requires_grad=True)
    """
    ...


# %%
check(sgd_step)
# hint(sgd_step)        remove the # and run: each call gives one more hint
# solution(sgd_step)    a reference, once you have tried

# %% [markdown]
# ## 2 · Modules, losses, shapes
#
# A network has thousands of numbers in place of two, and nobody wants to hand them to an optimizer one by one. A **module** keeps its parameters and the modules that it is made of, and `parameters()` walks through them all. The line as a module is `nn.Linear(1, 1)`: one number in, one number out. What if the two sizes of a larger one are swapped?

# %% tags=["claim-L22", "nbval-check-output"]
layer = nn.Linear(784, 128)  # 784 numbers in, 128 out
batch = torch.zeros(50, 784)
print("weight", tuple(layer.weight.shape), " bias", tuple(layer.bias.shape))
print("input", tuple(batch.shape), " output", tuple(layer(batch).shape))
assert torch.allclose(layer(batch), batch @ layer.weight.T + layer.bias)

swapped = nn.Linear(128, 784)
with raises(RuntimeError):
    swapped(batch)

# %% [markdown]
# The weight is stored as (out, in), and the layer computes `x @ weight.T + bias`. So the error reads like this: the first shape is the batch, 50 rows of 784. The second is the transposed weight, that is (in, out) as you wrote it. The inner numbers of a product must agree, and here 784 meets 128: the layer was told to expect 128 numbers a row.
#
# A module of your own lists its parts in `__init__` and says in `forward` what becomes of an input. The articles warn: *if you forget `super().__init__()`, the parts are not registered.* There is a quieter way to the same end.


# %%
class Boxed(nn.Module):
    """One layer as an attribute and two more in a box."""

    def __init__(self, box):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.rest = box


def two_layers():
    return [nn.Linear(4, 4, bias=False) for _ in range(2)]


# %%
predict(
    "A module has one layer as an attribute and two more in a Python list. How many of the "
    "three weights does `parameters()` hand to the optimizer?",
    run=lambda: len(list(Boxed(two_layers()).parameters())),
    options={
        "three": lambda found: found == 3,
        "one": lambda found: found == 1,
        "none: a list in a module raises": lambda found: isinstance(found, Exception),
    },
)


# %% tags=["claim-L21", "nbval-check-output"]
class Forgetful(nn.Module):
    def __init__(self):
        self.first = nn.Linear(4, 4)  # super().__init__() is missing


with raises(AttributeError):
    Forgetful()

for name, box, last in (
    ("list", two_layers(), 1),
    ("dict", dict(zip("ab", two_layers())), "b"),
    ("nn.ModuleList", nn.ModuleList(two_layers()), 1),
    ("nn.ModuleDict", nn.ModuleDict(dict(zip("ab", two_layers()))), "b"),
    ("nn.Sequential", nn.Sequential(*two_layers()), 1),
):
    model = Boxed(box).double().eval()
    weights, saved = len(list(model.parameters())), len(model.state_dict())
    reached = box[last].weight.dtype == torch.float64 and not box[last].training
    print(
        f"{name:14} parameters: {weights} of 3, saved: {saved} of 3, double() and eval() ", end=""
    )
    print("reach all" if reached else "do not reach the box")
    assert weights == saved == (3 if isinstance(box, nn.Module) else 1)
    assert reached == isinstance(box, nn.Module)

# %% [markdown]
# The forgotten call raises at the first layer. The box is silent. A module registers what is *assigned to it as an attribute*, if that is a module or a parameter. A list is neither, so its layers take part in the computation, and nobody trains them, saves them or puts them into another mode. `nn.ModuleList` and `nn.ModuleDict` are modules themselves that can be
# used like a list and a dict.
#
# Now the line again, with `nn.Linear(1, 1)` in the place of `w` and `b`. The module wants a column, 100 rows of one number, and returns a column. The targets stay as they were.


# %%
def fit_module(loss_fn, targets):
    """Slope and height of the line that nn.Linear finds, and the last loss."""
    column = line_x.unsqueeze(1)  # (100, 1)
    line = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), lr=0.2)
    for _ in range(100):
        optimizer.zero_grad()
        loss = loss_fn(line(column), targets)
        loss.backward()
        optimizer.step()
    return line.weight.item(), line.bias.item(), loss.item()


def squared_error(outputs, targets):
    return ((outputs - targets) ** 2).mean()


# %%
predict(
    "The module returns (100, 1), the targets are (100,), and the loss is "
    "`((outputs - targets) ** 2).mean()`. Which line does the loop find?",
    run=lambda: fit_module(squared_error, line_y),
    options={
        "slope 3, height 1, as before": lambda line: abs(line[0] - 3) < 0.2,
        "none: the shapes differ, and it raises": lambda line: isinstance(line, Exception),
        "slope 0, at the mean of all targets": lambda line: (
            abs(line[0]) < 0.05 and abs(line[1] - line_y.mean()) < 0.05
        ),
    },
)

# %% tags=["claim-L35"]
for shape, targets in (("(100,)", line_y), ("(100, 1)", line_y.unsqueeze(1))):
    slope, height, loss = fit_module(squared_error, targets)
    print(f"targets {shape:9} slope {slope:6.3f}, height {height:.3f}, last loss {loss:.3f}")
    assert abs(slope - (3 if targets.dim() == 2 else 0)) < 0.2

outputs, targets = torch.randn(100, 1, dtype=torch.float64), line_y.double()
middle = targets.mean()
parts = ((outputs - middle) ** 2).mean(), ((targets - middle) ** 2).mean()
print(f"the loss of (N, 1) against (N,):            {squared_error(outputs, targets):.6f}")
print(f"distance from the mean + targets' variance: {sum(parts):.6f}")
assert torch.allclose(squared_error(outputs, targets), sum(parts))

# %% [markdown]
# Lesson 01 has shown that (N, 1) against (N,) makes (N, N): every output meets every target. Here you see what training makes of it. Multiplied out, that loss is the mean squared distance of the outputs from the *mean of all targets*, plus the variance of the targets, which no model can change. So the gradient draws each output towards that
# mean, whatever its input. The loss falls, as it should, and ends at the variance, a plausible number.
#
# Whether you are told depends on the loss function:

# %% tags=["claim-L35"]
pair = torch.rand(5, 1), torch.rand(5)
losses = {
    "written by hand": lambda: squared_error(*pair),
    "F.mse_loss": lambda: F.mse_loss(*pair),
    "F.l1_loss": lambda: F.l1_loss(*pair),
    "F.huber_loss": lambda: F.huber_loss(*pair),
    "F.poisson_nll_loss": lambda: F.poisson_nll_loss(*pair),
    "F.gaussian_nll_loss": lambda: F.gaussian_nll_loss(*pair, var=torch.ones(5, 1)),
    "F.binary_cross_entropy_with_logits": lambda: F.binary_cross_entropy_with_logits(*pair),
    "F.cross_entropy, int64 targets (N, 1)": lambda: F.cross_entropy(
        torch.rand(5, 3), torch.zeros(5, 1, dtype=torch.int64)
    ),
}
says = {}
for name, run in losses.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
            says[name] = "warns" if caught else "silent"
        except (RuntimeError, ValueError) as error:
            says[name] = "raises " + type(error).__name__
table(("loss of outputs (N, 1) and targets (N,)", "what happens"), list(says.items()))
assert says["written by hand"] == says["F.poisson_nll_loss"] == "silent"
assert says["F.mse_loss"] == says["F.l1_loss"] == "warns"
assert says["F.binary_cross_entropy_with_logits"].startswith("raises")

# %% [markdown]
# So bring the targets into the shape of the outputs where the data are made, here with `line_y.unsqueeze(1)`, and let the loop insist: `assert outputs.shape == targets.shape`.
#
# Which loss should it be? The **squared error** grows with the square of a distance, the **absolute error** (`F.l1_loss`, or L1) with the distance itself. The articles say that L1 is the more robust of the two against outliers. To test it, each of five seeds draws 100 points near the line, and ten of them are spoiled: once their *targets* are raised by up to 20, once their *inputs* are moved
# by 8. Look at how far the fitted line is from the true one where it is farthest, between x = -1 and x = 1.


# %% tags=["claim-L14", "claim-L36"]
def spoiled(seed, where):
    """100 points around the line, (2, 100): the first ten have another target or another input."""
    generator = torch.Generator().manual_seed(seed)
    x, noise, up = torch.rand(3, 100, generator=generator)
    x = 2 * x - 1
    y = 3 * x + 1 + 0.2 * (noise - 0.5)
    if where == "target":
        y[:10] += 20 * up[:10]
    else:
        x[:10] += 8
    return torch.stack([x, y])


def worst_gaps(loss_fn, where, steps=200):
    """For five seeds: the largest distance of fitted and true line between -1 and 1."""
    x, y = torch.stack([spoiled(seed, where) for seed in range(5)], dim=1)  # (5, 100) each
    w, b = torch.zeros(5, 1, requires_grad=True), torch.zeros(5, 1, requires_grad=True)
    optimizer = torch.optim.Adam([w, b], lr=0.1)  # takes each number by itself: section 6
    for _ in range(steps):
        optimizer.zero_grad()
        of_each_line = loss_fn(w * x + b, y, reduction="none").mean(dim=1)  # (5,)
        of_each_line.sum().backward()  # each line has the gradient of its own loss
        optimizer.step()
    return [round(gap, 2) for gap in ((w - 3).abs() + (b - 1).abs()).flatten().tolist()]


gaps = {
    f"{name}, outliers in the {where}s": worst_gaps(loss_fn, where)
    for where in ("target", "input")
    for name, loss_fn in (("squared", F.mse_loss), ("absolute", F.l1_loss))
}
dots(list(gaps.items()), "largest distance from the true line")
print("no farther off than:", {name: max(five) for name, five in gaps.items()})
assert max(gaps["absolute, outliers in the targets"]) < 0.3
assert min(gaps["squared, outliers in the targets"]) > 0.6
assert min(gaps["absolute, outliers in the inputs"]) > 1

# %% [markdown]
# Against wild targets L1 is the robust one: a point that is far off pulls no harder than one that is near. Against wild inputs it is not. A point far out along the axis has a long lever, and the line turns towards it under either loss.
#
# Digits are not numbers to come close to but **classes** to be told apart. For each picture the network returns ten numbers, one for each class, its **logits** (or scores), and the largest is its answer. `softmax` turns logits into probabilities: positive numbers that add up to 1. `F.cross_entropy` and `nn.CrossEntropyLoss` take the logits. They contain the softmax, say the articles, so do not add one. And if
# someone does?

# %%
perfect = torch.eye(10)  # ten pictures, each with probability 1 for its own class

# %%
predict(
    "A network ends in softmax, and its outputs go to `F.cross_entropy`. It gives every picture's "
    "own class the probability 1. How large is the loss?",
    run=lambda: F.cross_entropy(perfect, torch.arange(10)).item(),
    options={
        "0: it cannot be better": lambda loss: loss < 1e-6,
        "about 1.46": lambda loss: abs(loss - 1.461) < 0.01,
        "about 2.30, as if it guessed": lambda loss: abs(loss - 2.303) < 0.01,
    },
)


# %% tags=["claim-L13"]
def train_classifier(loss_fn, seed, epochs=5):
    """Loss on the first 500 digits and share of right test digits, after 50 steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))
    model = model.to(lesson.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(epochs):
        for batch in torch.randperm(500).split(50):
            optimizer.zero_grad()
            loss_fn(model(pictures[batch]), answers[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return loss_fn(model(pictures[:500]), answers[:500]).item(), share_right(model)


def softmax_twice(outputs, targets):
    return F.cross_entropy(outputs.softmax(dim=1), targets)


floor = F.cross_entropy(perfect, torch.arange(10)).item()
print(
    f"least loss with softmax twice: {floor:.4f} = log(e + 9) - 1 = {math.log(math.e + 9) - 1:.4f}"
)
assert math.isclose(floor, math.log(math.e + 9) - 1, rel_tol=1e-5)

once = [train_classifier(F.cross_entropy, seed) for seed in range(5)]
twice = [train_classifier(softmax_twice, seed) for seed in range(5)]
rows = [("softmax once", once), ("softmax twice", twice)]
dots([(name, [loss for loss, _ in runs]) for name, runs in rows], "training loss after 50 steps")
dots([(name, [100 * s for _, s in runs]) for name, runs in rows], "test digits right, in %")
assert min(loss for loss, _ in twice) > floor
assert min(share for _, share in once) > max(share for _, share in twice) + 0.05

# %% [markdown]
# The second softmax sees only numbers between 0 and 1. Even the perfect answer looks unsure to it, with a probability of e / (e + 9) for the right class. So the loss has a floor, and on the way there the network learns more slowly. It does learn, which is why the mistake lives long. A loss that comes to rest above log(e + C - 1) - 1, for C classes, is its sign.
#
# To read the answer off, no softmax is needed. The articles use `torch.max`, which returns two things:

# %% tags=["claim-L12", "nbval-check-output"]
logits = torch.tensor([[2.0, -1.0, 0.5], [0.1, 0.3, 3.0]])  # two pictures, three classes
values, places = torch.max(logits, dim=1)
print("largest logits:", values.tolist(), "  their places:", places.tolist())
print("argmax:        ", logits.argmax(dim=1).tolist())
print("after softmax: ", logits.softmax(dim=1).argmax(dim=1).tolist())
assert torch.equal(places, logits.argmax(dim=1))
assert torch.equal(places, logits.softmax(dim=1).argmax(dim=1))

# %% [markdown]
# The places are the classes, and `argmax` gives them alone. Dimension 0 counts pictures, dimension 1 counts classes; it is the classes among which the largest is sought.

# %% [markdown]
# ### Exercise 2 · How many are right? (five minutes)
#
# Count the pictures whose largest logit stands at the place of their class. The number is asked for and not the share, since the numbers of several batches can be added.


# %% tags=["exercise"]
def correct_predictions(outputs, targets):
    """How many rows of outputs have their largest value at the class in targets: an int.

    outputs: floats (N, C), perhaps part of a graph. targets: int64 (N,).

    >>> correct_predictions(torch.tensor([[2.0, 0.5], [0.1, 0.3]]), torch.tensor([0, 0]))
    1
    """
    ...


# %%
check(correct_predictions)

# %% [markdown]
# ## 3 · Data that fits
#
# From here on the same digits are trained on again and again. This section makes once what the rest of the lesson uses: a device, a configuration, pictures in a form that suits a network, and the loop so far as a function.
#
# First the device. The articles set one variable at the top, `"cuda" if torch.cuda.is_available() else "cpu"`, and use it throughout. There are other accelerators, Apple's and Intel's for instance, and `torch.accelerator` asks for whichever there is:

# %% tags=["claim-L29"]
built_for = torch.accelerator.current_accelerator()
present = torch.accelerator.current_accelerator(check_available=True)
print("this PyTorch was built for:", built_for, "  this machine has:", present)
print("a program of your own takes:", present or torch.device("cpu"))
print("this lesson takes:", lesson.device)
assert (present is not None) == torch.accelerator.is_available()

# %% [markdown]
# Without `check_available=True` the answer is what this PyTorch was *built* for, whether the machine has one or not. (The lesson's own device comes from `DEVICE` in its first cell, so that all of it can be sent elsewhere.)
#
# Beside the device a run has other settings that one may want to change, and they belong in one place, too:


# %% tags=["claim-L29"]
@dataclass(frozen=True)
class Config:
    """What a run is made of, in one place."""

    device: torch.device = lesson.device
    seed: int = SEED
    batch: int = 50
    rate: float = 0.05
    epochs: int = 3


config = Config()
print(config)
with raises(AttributeError):
    config.rate = 0.5
print("a variant, beside it:", Config(rate=0.5).rate, "and", config.rate)
assert Config(rate=0.5).rate != config.rate

classifier = nn.Linear(784, 10).to(config.device)
outputs = classifier(torch.zeros(4, 784).to(config.device))
assert outputs.device.type == config.device.type

# %% [markdown]
# The configuration is frozen: nothing changes it half-way through a run, and a variant is an object of its own. The model and each batch go to `config.device`; nothing else in the program needs to know where it runs.
#
# Now the digits. They are bytes from 0 to 255, and a network computes with floats. To **normalise** them is to subtract the mean of all pixels and to divide by their standard deviation, the **spread**, so that the inputs lie around 0 with a spread of 1. Both numbers come from the *training* digits alone. They belong to the model like its weights: whoever
# shows it other digits needs them.

# %%
mean, std = (digits.train_images / 255).mean(), (digits.train_images / 255).std()


def prepared(pictures):
    """Digits (N, 28, 28), uint8, as floats (N, 1, 28, 28) on the device.

    Over all training digits their mean is 0 and their spread 1.
    """
    return ((pictures.unsqueeze(1) / 255 - mean) / std).to(config.device)


train_x, train_y = prepared(digits.train_images), digits.train_labels.to(config.device)
test_x, test_y = prepared(digits.test_images), digits.test_labels.to(config.device)
small_x, small_y = train_x[:500], train_y[:500]  # for what is repeated over five seeds
small_test = test_x[:500], test_y[:500]
for name, part in (("training", train_x), ("test", test_x)):
    print(f"{name:8} {tuple(part.shape)}  mean {part.mean():.3f}  spread {part.std():.3f}")

# %% [markdown]
# (The test digits come out *near* 0 and 1: they had no say in it.)
#
# Pictures in colour have three channels, red, green and blue, which need not be alike. Below, the lesson's colour digits are seen in a warm light that leaves a tenth of the blue. So each channel gets a mean and a spread of its own: `dim=(0, 2, 3)` goes over pictures, rows and columns, and `keepdim=True` leaves a 1 in the place of each, so that
# broadcasting lines the three numbers up with the channels. Look at the last column.

# %%
colour = load("colour_digits")
colour_x = (colour.train_images / 255).to(config.device)  # (4000, 3, 28, 28)
colour_y = colour.train_labels.to(config.device)
channel_mean = colour_x.mean(dim=(0, 2, 3), keepdim=True)  # (1, 3, 1, 1)
channel_std = colour_x.std(dim=(0, 2, 3), keepdim=True)

light = torch.tensor([1.0, 0.8, 0.1], device=config.device).view(1, 3, 1, 1)
warm = colour_x[:500] * light
ways = {
    "as it is": warm,
    "one mean and spread for all": (warm - warm.mean()) / warm.std(),
    "of each channel": (warm - channel_mean * light) / (channel_std * light),
}
table(
    ("spread in warm light", "red", "green", "blue"),
    [(name, *(round(s, 2) for s in x.std(dim=(0, 2, 3)).tolist())) for name, x in ways.items()],
)
titles = [f"a {colour_y[0].item()}, as the lesson has it", "in warm light"]
images([colour_x[0], warm[0]], titles, scale=5)

# %% [markdown]
# With one mean and spread for all, blue varies ten times less than red, and counts for as little in what the first layer computes.
#
# `torchvision.transforms.v2` has such steps ready, and `v2.Compose` puts several in a row. The articles' row is *flip, crop, ToTensor, Normalize*. `ToTensor` is deprecated today. What it did for the numbers is now the work of `v2.ToDtype`.

# %%
byte_pictures = digits.train_images[:8].unsqueeze(1)

# %%
predict(
    "`v2.ToDtype(torch.float32)` is given pictures of bytes, 0 to 255. "
    "What is the largest value afterwards?",
    run=lambda: v2.ToDtype(torch.float32)(byte_pictures).max().item(),
    options={
        "1: as floats, pictures go from 0 to 1": lambda largest: largest == 1,
        "255": lambda largest: largest == 255,
        "an error: it has to be told how to scale": lambda largest: isinstance(largest, Exception),
    },
)

# %% tags=["claim-L31", "nbval-check-output"]
normalise = v2.Normalize([mean.item()], [std.item()])
with raises(TypeError):
    normalise(byte_pictures)

to_float = v2.ToDtype(torch.float32, scale=True)
in_a_row = v2.Compose([to_float, normalise])(byte_pictures)
assert torch.allclose(in_a_row, prepared(digits.train_images[:8]).cpu(), atol=1e-5)
print("ToDtype with scale, then Normalize: the same as prepared()")
unscaled = normalise(v2.ToDtype(torch.float32)(byte_pictures))
print(f"largest value {in_a_row.max():.1f}, and without scale {unscaled.max():.0f}")

move = v2.Compose([v2.RandomHorizontalFlip(p=1.0), v2.CenterCrop(24)])
assert torch.equal(move(to_float(byte_pictures)), to_float(move(byte_pictures)))
print("flip and crop give the same before and after ToDtype")

three = v2.Normalize([0.5] * 3, [0.5] * 3)(to_float(byte_pictures))
print("three means for grey pictures:", tuple(byte_pictures.shape), "→", tuple(three.shape))
assert three.shape == (8, 3, 28, 28) and unscaled.max() > 100 * in_a_row.max()
assert "deprecated" in v2.ToTensor.__doc__.lower()

# %% [markdown]
# `Normalize` refuses bytes. Two other slips pass in silence. Without `scale=True` the dtype changes and the numbers do not, and what comes out is hundreds of times too large. And three means for one channel broadcast to three channels. What moves pixels about can come first, and on bytes it has a quarter as much to move. So the row is: move, `ToDtype` with
# `scale`, `Normalize`.
#
# The flip is there to make more of few pictures, for a cat in a mirror is a cat. Is a digit still a digit?

# %%
first_of = {label: (digits.train_labels == label).nonzero()[0].item() for label in (2, 3, 5, 7)}
mirrored = [digits.train_images[i].flip(-1) for i in first_of.values()]
images(mirrored, [f"a {label}, mirrored" for label in first_of], scale=4)

# %% [markdown]
# To measure what that costs, and other things, takes a network, a loop and a figure, a function each. `mlp` (multi-layer perceptron) stacks linear layers with an activation between them. `fit` is the loop of section 1; it stands in the toolkit as `kit.train_epoch`, with more in it than you have met so far. A `DataLoader` gives it the batches, in a new order in
# each epoch. (The `scheduler` is for section 7.) `accuracy` is the share of right answers, by `kit.evaluate`, which section 4 comes to.


# %%
def mlp(*widths, between=nn.ReLU):
    """Linear layers of these widths, an activation between them, for images or vectors."""
    layers = [nn.Flatten()]
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), between()]
    return nn.Sequential(*layers[:-1]).to(config.device)


def fit(model, optimizer, x=small_x, y=small_y, epochs=5, loss_fn=F.cross_entropy, scheduler=None):
    """Train on shuffled batches; returns each epoch's mean training loss.

    The scheduler is stepped per batch.
    """
    loader = DataLoader(TensorDataset(x, y), config.batch, shuffle=True)
    unit = None if scheduler is None else "batch"
    return [
        kit.train_epoch(model, loader, loss_fn, optimizer, scheduler=scheduler, step_per=unit).loss
        for _ in range(epochs)
    ]


def accuracy(model, x=small_test[0], y=small_test[1]):
    """Share of the images that the model gets right, in eval mode."""
    return kit.evaluate(model, [(x, y)], F.cross_entropy).accuracy


# %% [markdown]
# First: what is normalising worth? *Without Normalize the loss is hard to lower*, say the articles. A small network is trained for three epochs on 500 digits in three forms: normalised, scaled (0 to 1), and as they come (0 to 255). All three at the rate 0.05, and then each at a rate that suits it, the best of a handful that were tried. Five seeds each: a dot is a run, the bar is the median.

# %% tags=["claim-L30"]
raw = digits.train_images[:500].to(config.device)
raw_test = digits.test_images[:500].to(config.device)
forms = {
    "normalised": (small_x, small_test[0]),
    "0 to 1": (raw / 255, raw_test / 255),
    "0 to 255": (raw.float(), raw_test.float()),
}


def trained(form, rate, seed):
    torch.manual_seed(seed)
    model = mlp(784, 32, 10)
    fit(model, torch.optim.SGD(model.parameters(), lr=rate), x=forms[form][0], epochs=config.epochs)
    return model


same_rate = [(form, config.rate) for form in forms]
own_rate = [("normalised", 0.1), ("0 to 1", 0.3), ("0 to 255", 0.0003)]
models = {way: [trained(*way, seed) for seed in range(5)] for way in same_rate + own_rate}
right = {
    way: [100 * accuracy(model, forms[way[0]][1]) for model in five] for way, five in models.items()
}
dots(
    [(f"{form}, rate {rate:g}", r) for (form, rate), r in right.items()], "test digits right, in %"
)

normalised, scaled, as_they_come = (right[way] for way in same_rate)
assert min(normalised) > max(scaled) + 10 and min(scaled) > max(as_they_come) + 10
assert min(right["0 to 1", 0.3]) > max(scaled) + 5
assert max(right["0 to 255", 0.0003]) < min(right["0 to 1", 0.3]) - 5

torch.manual_seed(SEED)
untrained = mlp(784, 32, 10)
for form, (x, _) in forms.items():
    loss = F.cross_entropy(untrained(x), small_y).item()
    print(f"loss before training, {form:10} {loss:6.2f}   (guessing among ten: {math.log(10):.2f})")

# %% [markdown]
# At one and the same rate they are far apart. But most of what the scaled digits lose at 0.05 they win back at 0.3: smaller inputs make smaller gradients in the first layer, and a larger rate makes up for it. Had the rate been chosen for them in the first place, the claim would look weak. The bytes are another matter. There the network *begins* with large
# logits, certain and wrong, and no rate changes where it begins. Inputs of about the size 1 go with the weights that layers begin with; inputs of 255 do not.
#
# Next: the five normalised networks are shown digits that someone forgot to normalise, or normalised with other numbers. *Inference must repeat the training normalisation*, say the articles.

# %% tags=["claim-L33"]
asked = {
    "normalised as in training": small_test[0],
    "0 to 1": raw_test / 255,
    "0 to 255": raw_test.float(),
    "by ImageNet's mean and spread": (raw_test / 255 - 0.449) / 0.226,
}
results = {
    form: [
        kit.evaluate(model, [(x, small_test[1])], F.cross_entropy)
        for model in models["normalised", config.rate]
    ]
    for form, x in asked.items()
}
dots(
    [(form, [100 * result.accuracy for result in five]) for form, five in results.items()],
    "test digits right, in %",
)
losses = {form: [result.loss for result in five] for form, five in results.items()}
print("median loss:", {form: round(sorted(five)[2], 2) for form, five in losses.items()})
as_trained, *others = results.values()
for five in others:
    assert sum(r.accuracy for r in five) < sum(r.accuracy for r in as_trained)
    assert all(r.loss > 1.1 * best.loss for r, best in zip(five, as_trained))

# %% [markdown]
# Nothing raises. In the first two wrong forms the share of right answers sinks by so little that one would blame the network. The loss, which also counts how sure a wrong answer is, says more plainly that something is off: it rises for each of the networks in each wrong form. Keep mean and spread where the weights are; inside the model they cannot be forgotten.
#
# Last, the mirror. `v2.RandomHorizontalFlip(p=0.5)` flips with probability one half. Flips what?

# %%
half = v2.RandomHorizontalFlip(p=0.5)
eight_copies = digits.train_images[:1].unsqueeze(1).repeat(8, 1, 1, 1)  # (8, 1, 28, 28)


def count_flipped(batch):
    return (batch != eight_copies).any(dim=(1, 2, 3)).sum().item()


# %%
predict(
    "`half` is called 30 times on a batch of eight equal pictures. "
    "How many of the eight come back flipped?",
    run=lambda: {count_flipped(half(eight_copies)) for _ in range(30)},
    options={
        "about four, now more, now fewer": lambda counts: bool(counts - {0, 8}),
        "all or none": lambda counts: counts == {0, 8},
        "none: it takes single pictures only": lambda counts: counts == {0},
    },
)

# %% tags=["claim-L37"]
as_batch = [count_flipped(half(eight_copies)) for _ in range(30)]
one_by_one = [count_flipped(torch.stack([half(p) for p in eight_copies])) for _ in range(30)]
print("flipped, the batch in one call:", as_batch)
print("flipped, a call for each:      ", one_by_one)
assert set(as_batch) == {0, 8} and set(one_by_one) - {0, 8}

# %% [markdown]
# A random transform of `v2` draws once for each *call*, and what it is given counts as one thing, be it a picture or a batch. For a draw for each picture, call it where single pictures are, in the dataset. Below, one line draws for all pictures of a batch, and the networks learn from digits
# that are mirrored half of the time:


# %% tags=["claim-L31"]
def mirrored_at_random(x):
    chosen = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
    return torch.where(chosen, x.flip(-1), x)


def trained_with_mirror(seed):
    torch.manual_seed(seed)
    model = mlp(784, 32, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.rate)
    for _ in range(config.epochs):
        fit(model, optimizer, x=mirrored_at_random(small_x), epochs=1)
    return model


with_mirror = [100 * accuracy(trained_with_mirror(seed)) for seed in range(5)]
rows = [("digits as they are", normalised), ("half of them mirrored", with_mirror)]
dots(rows, "test digits right, in %")
print(f"at most {max(with_mirror):.1f} % with the mirror, at least {min(normalised):.1f} % without")
assert max(with_mirror) < min(normalised)

# %% [markdown]
# Which transforms make sense is a question to the data: what may change in a picture that leaves its class as it is? A digit may sit two pixels further to the left. It may not be mirrored. A mirrored 2 occurs nowhere, and the network has to learn it all the same.

# %% [markdown]
# ## 4 · Two modes, honest figures
#
# Dropout and batch normalisation do different things in train and in eval mode (lesson 02). In train mode dropout sets random values to zero, and batch normalisation takes mean and spread from the batch at hand, and keeps a running average of them. In eval mode nothing is dropped, and the running average is used. The articles call *forgetting train()* the most
# common silent error. How common it is no cell can tell. What it costs, a cell can.
#
# Back to the opening program. Its first fault is the `zero_grad` behind a `continue`: it runs after every twentieth step, and the steps in between use what earlier batches left behind. Here is the program once more, with a switch for each of the two repairs.


# %%
def run_again(seed, zero_grad_first, train_mode, rate=0.05, epochs=4):
    """The opening program, with repairs or without: network, and share of right test digits."""
    torch.manual_seed(seed)
    model = network()
    share_right(model)  # measured before training, as in the program
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        if train_mode:
            model.train()
        for step, batch in enumerate(torch.randperm(4000).split(100), start=1):
            if zero_grad_first:
                optimizer.zero_grad()
            F.cross_entropy(model(pictures[batch]), answers[batch]).backward()
            optimizer.step()
            if not zero_grad_first and step % 20 == 0:
                optimizer.zero_grad()
    return model, share_right(model)


versions = {
    "as found": (False, False),
    "zero_grad first": (True, False),
    "zero_grad first, and train()": (True, True),
}
first = {name: run_again(0, *repairs) for name, repairs in versions.items()}
as_found, one_repair = first["as found"][1], first["zero_grad first"][1]

# %%
predict(
    "Of the two faults, only the first is repaired: `zero_grad()` at the beginning of the loop. "
    f"As found, the program gets {as_found:.0%} of the test digits right. What does it get now?",
    run=lambda: one_repair,
    options={
        "more": lambda share: share > as_found + 0.01,
        "as much, within a point": lambda share: abs(share - as_found) <= 0.01,
        "less": lambda share: share < as_found - 0.01,
    },
)

# %% tags=["claim-L10"]
again = {
    name: [first[name]] + [run_again(seed, *repairs) for seed in range(1, 5)]
    for name, repairs in versions.items()
}
percent = {name: [100 * share for _, share in runs] for name, runs in again.items()}
dots(list(percent.items()), "test digits right, in %")
print({name: f"{min(five):.1f} to {max(five):.1f} %" for name, five in percent.items()})
assert max(percent["zero_grad first"]) < min(percent["as found"])
assert max(percent["as found"]) < min(percent["zero_grad first, and train()"])

# %% [markdown]
# The second fault is the line *before* training, `before = share_right(found)`. It calls `eval()`, and nobody calls `train()`. But why does the repair of the first make such a difference, and in the wrong direction? Ask the batch normalisation what it has seen, and the first gradient how large it is.

# %% tags=["claim-L10"]
for name, runs in again.items():
    batch_norm = runs[0][0][2]
    seen = batch_norm.num_batches_tracked.item()
    print(f"{name}: batch normalisation has seen {seen} batches")
    assert seen == (160 if "train()" in name else 0)

torch.manual_seed(SEED)
fresh, norms = network(), {}
for mode in (True, False):
    fresh.train(mode).zero_grad()
    F.cross_entropy(fresh(pictures[:100]), answers[:100]).backward()
    norms[mode] = nn.utils.get_total_norm([p.grad for p in fresh.parameters()]).item()
print(
    f"size of the first gradient: {norms[True]:.2f} in train mode, {norms[False]:.2f} in eval mode"
)
assert norms[True] > 4 * norms[False]

faster = 100 * run_again(0, zero_grad_first=True, train_mode=False, rate=0.2)[1]
print(f"zero_grad first, in eval mode, at a rate of 0.2: {faster:.0f} % right")
assert faster > max(percent["zero_grad first"]) + 10

# %% [markdown]
# The network was trained in eval mode from the first step to the last: without dropout, and with a batch normalisation that has not seen a single batch and so subtracts 0 and divides by 1 (up to its eps). What is left is a plain network with far smaller gradients, for which a rate of 0.05 is too low.
#
# That is what the first fault made up for. From one `zero_grad` to the next, the twenty steps move by one gradient, by two, by three, up to twenty: for a gradient that stays the same that is 210 in all, and not 20. One fault made the steps too small, the other made them too large, and together they passed for a network of moderate talent. A repair that makes the
# figure *worse* can still be right. It says that there is something else to find.
#
# Now the other way round: someone forgets `eval()`. The five good networks are asked in train mode, and first of all about one picture alone.

# %% tags=["claim-L10"]
good = [model for model, _ in again["zero_grad first, and train()"]]


def percent_in_train_mode(model, order, size):
    model = copy.deepcopy(model).train()  # a copy: in train mode the running averages move
    with torch.no_grad():
        hits = [model(test_pictures[i]).argmax(dim=1) == test_answers[i] for i in order.split(size)]
    return 100 * torch.cat(hits).float().mean().item()


with raises(ValueError):
    percent_in_train_mode(good[0], torch.arange(1000), size=1)

mixed, sorted_by_class = torch.arange(1000), test_answers.argsort(stable=True)
in_modes = {"eval mode": percent["zero_grad first, and train()"]}
for name, order, size in (
    ("train mode, batches of 100", mixed, 100),
    ("train mode, batches of 10", mixed, 10),
    ("train mode, batches of one class", sorted_by_class, 100),
):
    in_modes[name] = [percent_in_train_mode(model, order, size) for model in good]
dots(list(in_modes.items()), "test digits right, in %")
assert max(in_modes["train mode, batches of 10"]) < min(in_modes["eval mode"]) - 5
assert max(in_modes["train mode, batches of one class"]) < 50

# %% [markdown]
# In train mode an answer depends on who else is in the batch. One picture alone has no spread, and raises. Ten give a rough estimate of it. And among a hundred sevens, what makes a seven a seven *is* the mean and is subtracted: the same networks, the same pictures in another order, and hardly any answer is right. Whoever tests in shuffled batches of 100 sees only
# a figure that is a little low.
#
# So `model.train()` stands at the beginning of every epoch, and `model.eval()` at the beginning of every evaluation. Better still, an evaluation gives each part of the model its own mode back, and can then be called from anywhere.
#
# The other half of this section is the figure itself. The articles' loop adds up the losses of the batches and divides by their number, `running_loss / len(loader)`. Let nine samples come in batches of four, four and one. Eight have a loss of 1, and the last one has a loss of 10.

# %%
batches_of_four = torch.tensor([1.0] * 8 + [10.0]).split(4)

# %%
predict(
    "Eight samples have a loss of 1. The ninth, alone in the last batch, has a loss of 10. "
    "What is `running_loss / len(loader)`?",
    run=lambda: sum(losses.mean().item() for losses in batches_of_four) / len(batches_of_four),
    options={
        "2: the mean loss of the nine samples": lambda loss: loss == 2,
        "4": lambda loss: loss == 4,
        "6: 18 in all, in three batches": lambda loss: loss == 6,
    },
)

# %% tags=["claim-L11", "nbval-check-output"]
running_loss = running_sum = samples = 0
for losses in batches_of_four:
    running_loss += losses.mean().item()
    running_sum += losses.mean().item() * len(losses)
    samples += len(losses)
print("running_loss / len(loader):", running_loss / len(batches_of_four))
print("by samples:                ", running_sum / samples)
assert running_loss / len(batches_of_four) == 4.0 and running_sum / samples == 2.0

# %% [markdown]
# Every batch has the same weight in it, so the sample in the batch of one counts four times as much as any other. Here is a good network, and the accuracy that it has on its 1,000 test digits in batches of different sizes:

# %% tags=["claim-L11"]
rows = []
for size in (1000, 300, 64, 999):
    loader = DataLoader(TensorDataset(test_pictures, test_answers), size)
    parts = [kit.evaluate(good[0], [batch], F.cross_entropy) for batch in loader]
    of_batches = 100 * sum(part.accuracy for part in parts) / len(parts)
    of_samples = 100 * kit.evaluate(good[0], loader, F.cross_entropy).accuracy
    rows.append((size, parts[-1].samples, round(of_batches, 2), round(of_samples, 2)))
table(("batch size", "in the last batch", "mean of the batches, %", "by samples, %"), rows)
assert max(row[3] for row in rows) - min(row[3] for row in rows) < 0.2
assert abs(rows[0][2] - rows[0][3]) < 0.01 and abs(rows[3][2] - rows[3][3]) > 2

# %% [markdown]
# Nothing differs between the rows but the size of a batch, and only the last column knows that. In the last row, one picture makes up half of the figure. So multiply each batch's mean by the number of its samples, add up, and divide by the number of all samples. `kit.train_epoch` and `kit.evaluate` do it for the loss and for the accuracy.

# %% [markdown]
# ### Exercise 3 · An honest evaluation (fifteen minutes)
#
# Both halves of this section in one function: the mode, given back afterwards, and figures by samples. A part of a model may be in another mode than the rest on purpose, and then it gets *its own* back.


# %% tags=["exercise"]
def evaluate(model, loader, loss_fn):
    """Mean loss and accuracy of a model over all samples of a loader: two floats.

    loader: batches (inputs, targets), the last one perhaps smaller. The model's outputs are (N, C),
    targets int64 (N,). loss_fn(outputs, targets) is the mean over a batch.
    Computed in eval mode, and nothing is recorded for backward. Afterwards each part of the model,
    as model.modules() gives them, is in the mode that it was in before.

    >>> batches = [(torch.eye(2), torch.tensor([0, 1])), (torch.eye(2)[:1], torch.tensor([1]))]
    >>> loss, share = evaluate(nn.Identity(), batches, F.cross_entropy)
    >>> round(loss, 4), round(share, 4)
    (0.6466, 0.6667)
    """
    ...


# %%
check(evaluate)

# %% [markdown]
# ## 5 · Accumulation
#
# Large batches need much memory: every sample's activations are kept until `backward`. Lesson 02 has shown a way out, since `backward` *adds* to `.grad`. Cut the batch into pieces, **micro-batches**, call `backward` for each, and step once at the end. That is **gradient accumulation**.
#
# The articles say: *divide the loss of each piece by the number of pieces.* To see exactly what arrives, take a model of one weight, with the mean of `weight * value` as its loss. Then each sample contributes its own value, and the gradient of a batch is the mean of its values.

# %%
pulls = torch.tensor([2.0, 4.0, 6.0, 14.0])  # what each of four samples contributes: mean 6.5


def gradient_in_pieces(pieces, divisor):
    """The gradient after a backward for each piece, its mean loss divided by `divisor`."""
    weight = torch.ones((), requires_grad=True)
    for piece in pieces:
        mean_loss = (weight * piece).mean()
        (mean_loss / divisor).backward()
    return weight.grad.item()


# %%
predict(
    "The four samples come in two pieces, [2] and [4, 6, 14]; the loss of each is divided by 2. "
    "What is the gradient? (For all four as one batch it is 6.5.)",
    run=lambda: gradient_in_pieces(pulls.split((1, 3)), divisor=2),
    options={
        "6.5, as for the whole batch": lambda gradient: gradient == 6.5,
        "5": lambda gradient: gradient == 5,
        "10: the pieces' gradients add up": lambda gradient: gradient == 10,
    },
)

# %% tags=["claim-L04", "nbval-check-output"]
print("as one batch:", gradient_in_pieces([pulls], divisor=1))
for sizes in ((2, 2), (1, 3)):
    pieces = pulls.split(sizes)
    means = [piece.mean().item() for piece in pieces]
    added, divided = gradient_in_pieces(pieces, 1), gradient_in_pieces(pieces, 2)
    print(f"pieces of {sizes}: means {means}, added up {added}, divided by two {divided}")
assert gradient_in_pieces(pulls.split((2, 2)), 2) == gradient_in_pieces([pulls], 1) == 6.5
assert gradient_in_pieces(pulls.split((1, 3)), 2) == 5.0

# %% [markdown]
# Without dividing, the gradient is too large. Divided by two, it is right for equal pieces, where the mean of the means is the mean of all. For unequal ones it is wrong: the single 2 weighs as much as the other three together. Each piece has to enter with its *share of the samples*: 2 · 1/4 + 8 · 3/4 = 6.5.
#
# And what is a sample here? Whatever the loss averages over. The two short sequences below have a label for each place. The second has two labels only; its other places are filled with -100, which `F.cross_entropy` leaves out of its mean. Each sequence is one piece. Counted in sequences, the pieces are equal; counted in labels, they are not.
# `kit.train_epoch(accumulate=2)` makes one step from two pieces, and its argument `count` says what a piece counts for. Look at how far the step's gradient is from that of both sequences as one batch:


# %% tags=["claim-L04"]
features = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(SEED))
features = features.to(config.device)  # 2 sequences, 6 places, 3 numbers each
labels = torch.tensor([[0, 1, 2, 0, 1, 2], [1, 1, -100, -100, -100, -100]], device=config.device)


def label_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def gradient_counting(pieces, count):
    """The gradient of a step in which a piece weighs what `count` says of its targets."""
    torch.manual_seed(SEED)
    classifier = nn.Linear(3, 3, device=config.device)
    optimizer = torch.optim.SGD(classifier.parameters(), lr=0.1)
    kit.train_epoch(classifier, pieces, label_loss, optimizer, accumulate=2, count=count)
    return classifier.weight.grad


whole = gradient_counting([(features, labels)], count=len)
pieces = [(features[:1], labels[:1]), (features[1:], labels[1:])]
for name, count in (("sequences", len), ("labels", lambda targets: (targets != -100).sum())):
    off = ((gradient_counting(pieces, count) - whole).norm() / whole.norm()).item()
    print(f"counted in {name:9}: {off:.1%} away from the gradient of the whole")
assert off < 1e-4
assert (gradient_counting(pieces, len) - whole).norm() > 0.01 * whole.norm()

# %% [markdown]
# A widely used library gave every micro-batch of a language model the same weight until 2024 (huggingface/transformers#34191): no error, other losses.
#
# And if nobody divides at all? The articles say that this changes the effective learning rate. For `torch.optim.SGD` that follows from its rule: weight − rate × gradient. **Adam** has another rule. For each weight it keeps two running means, *m* of the gradient and *v* of the gradient's square, both corrected for their start at 0, and the step is
# rate × m / (√v + ε), where ε = 10⁻⁸ avoids a division by zero. Below, a network takes 20 steps, and then the same 20 with every loss multiplied by four. (Momentum, weight decay, and AdamW, a variant of Adam, are explained in section 6.)


# %%
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
small_batches = list(zip(small_x.split(50), small_y.split(50)))


def weights_after(make_optimizer, factor, steps=20):
    """All weights as one vector, at the start and after steps on `factor` times the loss."""
    torch.manual_seed(SEED)
    network = mlp(784, 32, 10)
    start_point = nn.utils.parameters_to_vector(network.parameters()).detach()
    optimizer = make_optimizer(network.parameters())
    for inputs, targets in itertools.islice(itertools.cycle(small_batches), steps):
        optimizer.zero_grad()
        (factor * F.cross_entropy(network(inputs), targets)).backward()
        optimizer.step()
    return start_point, nn.utils.parameters_to_vector(network.parameters()).detach()


def detour(make_optimizer):
    """Distance between the two ends, as a multiple of the first run's way from start to end."""
    start_point, end = weights_after(make_optimizer, factor=1)
    other_end = weights_after(make_optimizer, factor=4)[1]
    return ((other_end - end).norm() / (end - start_point).norm()).item()


# %%
predict(
    "Adam trains on the loss, and on four times the loss. "
    "How far apart do the two runs end, as a multiple of the way that the first one went?",
    run=lambda: detour(lambda parameters: torch.optim.Adam(parameters, lr=0.001)),
    options={
        "as far as the way itself, or farther": lambda apart: apart >= 1,
        "a tenth of it, or more": lambda apart: 0.1 <= apart < 1,
        "less than a hundredth of it": lambda apart: apart < 0.01,
    },
)

# %% tags=["claim-L05"]
makers = {
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.02, momentum=0.9),
    "Adam": lambda parameters: Adam(parameters, lr=0.001),
    "AdamW, decay 0.01": lambda parameters: AdamW(parameters, lr=0.001, weight_decay=0.01),
    "Adam, decay 0.01": lambda parameters: Adam(parameters, lr=0.001, weight_decay=0.01),
}
apart = {name: detour(make) for name, make in makers.items()}
table(
    ("20 steps on the loss, and on 4 × the loss", "distance of the ends ÷ way"),
    [(name, f"{value:.2g}") for name, value in apart.items()],
)
four_times_the_loss = weights_after(lambda parameters: SGD(parameters, lr=0.05), factor=4)[1]
four_times_the_rate = weights_after(lambda parameters: SGD(parameters, lr=0.2), factor=1)[1]
same = torch.allclose(four_times_the_loss, four_times_the_rate, atol=1e-6)
print("SGD: 4 × the loss ends where 4 × the rate ends:", same)
assert same
assert min(apart["SGD"], apart["SGD with momentum"]) > 0.5
assert max(apart["Adam"], apart["AdamW, decay 0.01"]) < 0.01 < apart["Adam, decay 0.01"]

# %% [markdown]
# SGD goes another way, that of a four times larger rate. In Adam's quotient the factor stands above and below, and cancels, but for ε. The last row shows where that ends: Adam's `weight_decay` (section 6) is added to the gradient, and beside a four times larger gradient it counts a quarter. Clipping (section 8) compares
# the gradient with a fixed number. So divide, whatever the optimizer.
#
# The right weights do not make everything as in one batch. **BatchNorm** normalises each feature by the mean and the spread of the batch that it is given, which is the micro-batch. And each call moves its running mean a tenth of the way to the batch's mean.

# %% tags=["claim-L06", "nbval-check-output"]
for sizes in ((8,), (2, 2, 2, 2)):
    norm = nn.BatchNorm1d(1)
    for piece in torch.ones(8, 1).split(sizes):
        norm(piece)
    calls, running = norm.num_batches_tracked.item(), norm.running_mean.item()
    print(f"8 ones in pieces of {sizes}: {calls} update(s), running mean {running:.4f}")
assert math.isclose(running, 1 - 0.9**4, rel_tol=1e-5)

# %% tags=["claim-L06"]
batch_x, batch_y = small_x[:64].cpu().double(), small_y[:64].cpu()
norms = {
    "none": nn.Identity(),
    "LayerNorm": nn.LayerNorm(32),
    "BatchNorm": nn.BatchNorm1d(32),
}


def weight_gradient(norm, pieces):
    """The first layer's gradient from this number of equal micro-batches, correctly divided."""
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), norm, nn.ReLU(), nn.Linear(32, 10))
    network.double()
    for inputs, targets in zip(batch_x.chunk(pieces), batch_y.chunk(pieces)):
        (F.cross_entropy(network(inputs), targets) / pieces).backward()
    return network[1].weight.grad


rows = {}
for name, norm in norms.items():
    whole = weight_gradient(copy.deepcopy(norm), 1)
    rows[name] = [
        ((weight_gradient(copy.deepcopy(norm), n) - whole).norm() / whole.norm()).item()
        for n in (2, 4, 16)
    ]
table(
    ("64 images, normalised by", "in 2 pieces", "in 4", "in 16"),
    [(name, *(f"{off:.1%} off" for off in offs)) for name, offs in rows.items()],
)
assert max(rows["none"] + rows["LayerNorm"]) < 1e-9 and min(rows["BatchNorm"]) > 0.01

# %% [markdown]
# LayerNorm normalises each sample by its own mean and spread, so it does not matter which others come with it. With BatchNorm, accumulation is not a large batch, however correctly the loss is divided: the mean and spread of few samples differ from those of all, and the running ones move at each micro-batch.
#
# The articles' loop decides when to step by `if (i + 1) % k == 0`. Ten batches in windows of k = 4: what becomes of the last two? Here each batch leaves a mark of its own, a gradient of 1 at the place of its number. So `.grad` tells which batches take part in a step.


# %% tags=["claim-L07", "nbval-check-output"]
def batches_in_each_step(clear_at_start, batches=10, k=4):
    """For two epochs, the numbers of the batches that each step uses."""
    marks, epochs = torch.zeros(batches, requires_grad=True), []
    for _ in range(2):
        steps = []
        if clear_at_start:
            marks.grad = None
        for i in range(batches):
            marks[i].backward()
            if (i + 1) % k == 0:
                steps.append(marks.grad.nonzero().flatten().tolist())  # optimizer.step()
                marks.grad = None  # optimizer.zero_grad()
        epochs.append(steps)
    return epochs


for clear in (False, True):
    print("zero_grad() after each step", "and at the start of an epoch:" if clear else "only:")
    for epoch, steps in enumerate(batches_in_each_step(clear)):
        print(f"   epoch {epoch}: the steps use {steps}")
assert batches_in_each_step(False)[1][0] == [0, 1, 2, 3, 8, 9]
assert batches_in_each_step(True)[1] == [[0, 1, 2, 3], [4, 5, 6, 7]]

# %% [markdown]
# Either the last two wait in `.grad` and enter the first step of the next epoch, which then holds six batches (and those of the last epoch enter none). Or they are cleared away, and a fifth of the batches trains nothing; without shuffling it is the same fifth in each epoch. The last window is a window too, a shorter one: it should get a step
# of its own, in which its batches weigh by what *it* holds. `kit.train_epoch` does so.

# %% [markdown]
# ### Exercise 4 · One step from many pieces (ten minutes)
#
# Make the step that one large batch would make, from micro-batches that fit into memory. Their sizes may differ. No more than one micro-batch's graph may exist at a time, so joining them, or adding up their losses before a single `backward`, does not help.


# %% tags=["exercise"]
def accumulated_step(model, micro_batches, loss_fn, optimizer):
    """One step of the optimizer with the gradient that all micro-batches would give as one batch.

    micro_batches: a list of (inputs, targets), of equal sizes or not. loss_fn(outputs, targets) is
    a mean over the samples. Gradients that are there before the call take no part. Only one
    micro-batch's graph is alive at a time.

    Returns the loss of all samples as one batch, before the step: a float.

    >>> line = nn.Linear(1, 1)
    >>> sgd = torch.optim.SGD(line.parameters(), lr=0.1)
    >>> pieces = [(torch.ones(1, 1), torch.zeros(1, 1)), (torch.ones(3, 1), torch.zeros(3, 1))]
    >>> before = F.mse_loss(line(torch.ones(4, 1)), torch.zeros(4, 1)).item()
    >>> math.isclose(accumulated_step(line, pieces, F.mse_loss, sgd), before, rel_tol=1e-5)
    True
    """
    ...


# %%
check(accumulated_step)

# %% [markdown]
# ## 6 · Rate and optimizer
#
# How large may a step be? Take one direction alone, in which the loss is 15 · y². Its slope is 30 · y, and the slope of the slope, the **curvature**, is 30 everywhere. SGD starts at y = 1.


# %%
def walk_down(rate, steps=30):
    """y at the start and after each step of SGD on 15 · y²."""
    y = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    optimizer, places = torch.optim.SGD([y], lr=rate), [1.0]
    for _ in range(steps):
        optimizer.zero_grad()
        (15 * y**2).backward()
        optimizer.step()
        places.append(y.item())
    return places


# %%
predict(
    "With a rate of 0.06, y comes within 0.002 of the minimum in 30 steps. "
    "How far from it is y after 30 steps with a rate of 0.07?",
    run=lambda: abs(walk_down(0.07)[-1]),
    options={
        "nearer still: the steps are larger": lambda away: away < 0.002,
        "between 0.002 and 1": lambda away: 0.002 <= away <= 1,
        "farther than at the start": lambda away: away > 1,
    },
)

# %% tags=["claim-L38", "nbval-check-output"]
for rate in (0.02, 0.05, 0.06, 0.07):
    places = walk_down(rate)
    first = ", ".join(f"{place:6.3f}" for place in places[:5])
    print(f"rate {rate}: y goes {first} …; after 30 steps |y| = {abs(places[-1]):.5f}")
    assert math.isclose(places[1], 1 - 30 * rate, rel_tol=1e-9)
assert abs(walk_down(0.06)[-1]) < 0.002 and abs(walk_down(0.07)[-1]) > 10

# %% [markdown]
# A step takes y to y − rate · 30 · y: it multiplies y by **1 − rate × curvature**. While this factor is positive, y approaches from one side. When it is negative, y jumps over the minimum to the other side: nearer to it where the factor is above −1, farther from it where it is below. So the border is at rate = 2 / curvature, here 0.0667.
#
# A network's loss is curved differently in different directions. The most curved one sets the limit for the rate, and at that rate the flat ones take long. Two remedies are in wide use.
# **Momentum** steps along a sum of all gradients so far, in which each counts 0.9 times as much as the one after it. Gradients that alternate in sign nearly cancel in it, and equal ones add up to ten times one of them. **Adam**, by its quotient, gives each weight a step of about the size of the rate or less, whether its gradients are large or small.
#
# The explorer shows a loss of two weights as a map, and on it the path of one of PyTorch's own optimizers. It opens on a narrow valley: along y the curvature is 30, as above, and along x it is 1. Try:
#
# 1. With SGD, move the rate to 0.06 and then to 0.07. Look at the zigzag across the valley, and at how far the path has come along it.
# 2. Set the rate to 0.012 and press *Keep path*. Then choose *SGD with momentum*. Look at where each of the two paths ends, and at how they swing across the valley.
# 3. Press *Clear*, set the rate back to 0.05, and choose the *saddle*: along x the loss falls to a flat place between two minima. Which optimizers are well on their way to a minimum after 50 steps? Then set *start y* to 0 and try them again.
# 4. Back on the *narrow valley* with SGD at 0.05, press *forget zero_grad()* and *Keep path*. Release the button, choose *SGD with momentum*, and set the momentum to 1. Look for the kept path.

# %%
explore_descent()

# %% [markdown]
# (In 3, the slope along y is exactly 0 at y = 0. An optimizer multiplies and divides what it is given, so none of them leaves. In 4 the second path lies on the first, as section 1 has shown.)
#
# On real data the batches differ, and so the loss of a run is never a smooth line. The articles say: *if the loss looks like a cardiogram, divide the learning rate by ten.* Below is the loss of each step for three rates, each a tenth of the one before, and for a rate of 0, at which nothing is learned.


# %%
def shuffled_batches():
    return [(small_x[i], small_y[i]) for i in torch.randperm(len(small_x)).split(config.batch)]


def train_small(make_optimizer, rate, seed, epochs):
    """A trained network and the loss of each step; equal seeds give equal starts and batches."""
    kit.seed_everything(seed)
    network, step_losses = mlp(784, 32, 10), []
    optimizer = make_optimizer(network.parameters(), rate)
    note = lambda step, loss, rate, norm: step_losses.append(loss)
    for _ in range(epochs):
        kit.train_epoch(network, shuffled_batches(), F.cross_entropy, optimizer, on_step=note)
    return network, step_losses


# %%
jagged = {f"rate {r:g}": train_small(SGD, r, SEED, epochs=3)[1] for r in (0.5, 0.05, 0.005, 0)}
curves(jagged, "step", "loss of the step's batch")

# %% [markdown]
# Even at rate 0 the line is jagged, since some batches are harder than others. So jags alone prove nothing. Ask what the network has learned: the loss over all 500 images after three epochs, for five seeds.

# %% tags=["claim-L24"]
all_at_once = [(small_x, small_y)]
ends = {
    rate: [
        kit.evaluate(train_small(SGD, rate, seed, 3)[0], all_at_once, F.cross_entropy).loss
        for seed in range(5)
    ]
    for rate in (0.005, 0.015, 0.05, 0.15, 0.5)
}
rows = [(f"rate {rate:g}", losses) for rate, losses in ends.items()]
dots(rows, "loss over all images after three epochs; a dot for each of five seeds")
for rate in (0.5, 0.05):
    better = sum(tenth < whole for tenth, whole in zip(ends[rate / 10], ends[rate]))
    print(f"a tenth of rate {rate} is better for {better} of 5 seeds")
assert min(ends[0.5]) > max(ends[0.05]) and min(ends[0.005]) > max(ends[0.05])

# %% [markdown]
# At rate 0.5 the steps are too long, and a tenth of it is better for every seed. At 0.05 the line is still jagged, and a tenth of *that* is worse for every seed: in the same time it learns little. So divide by ten and see whether the *level* of the line falls. If only the jags become smaller, they were not the trouble.
# A grid of rates, each about three times the one before, finds the place between too slow and too wild in a few short runs.
#
# Now two optimizers. The articles say: *Adam converges fast, SGD with momentum can generalise better*, that is, be better on images that it was not trained on. Such a comparison is easily rigged, by a good rate for one and a poor one for the other. So each gets a grid of five rates, and for each question the rate that serves it best, chosen by
# one rule over three seeds: for speed the lowest training loss in the second epoch, for the test the highest accuracy on 500 images that belong neither to the training nor to the test.

# %%
contenders = {
    "SGD, momentum 0.9": (
        lambda parameters, lr: SGD(parameters, lr, momentum=0.9),
        (0.003, 0.01, 0.03, 0.1, 0.3),
    ),
    "Adam": (Adam, (0.0003, 0.001, 0.003, 0.01, 0.03)),
}
choosing = train_x[500:1000], train_y[500:1000]


def second_epoch(runs):
    """Mean loss of the ten steps of the second epoch, for each run."""
    return [sum(step_losses[10:20]) / 10 for _, step_losses in runs]


grid, rows = {}, []
for name, (make, rates) in contenders.items():
    for rate in rates:
        runs = [train_small(make, rate, seed, 5) for seed in (100, 101, 102)]
        score = np.mean([accuracy(network, *choosing) for network, _ in runs])
        grid[name, rate] = float(np.mean(second_epoch(runs))), float(score)
        rows.append((name, rate, *(round(value, 3) for value in grid[name, rate])))
table(("optimizer", "rate", "loss in the second epoch", "accuracy on the 500"), rows)
fastest = {n: min(rates, key=lambda r: grid[n, r][0]) for n, (_, rates) in contenders.items()}
best = {n: max(rates, key=lambda r: grid[n, r][1]) for n, (_, rates) in contenders.items()}

# %% [markdown]
# With these rates the race is run on six other seeds. For each seed both begin with the same weights and see the same batches.

# %%
speed, tested = {}, {}
for name, (make, _) in contenders.items():
    speed[name] = second_epoch([train_small(make, fastest[name], seed, 2) for seed in range(6)])
    networks = [train_small(make, best[name], seed, 5)[0] for seed in range(6)]
    tested[name] = [100 * accuracy(network) for network in networks]
rows = [(f"{name}, rate {fastest[name]:g}", figures) for name, figures in speed.items()]
dots(rows, "training loss in the second epoch; a dot for each of six seeds")
rows = [(f"{name}, rate {best[name]:g}", figures) for name, figures in tested.items()]
dots(rows, "test accuracy after five epochs, in percent; a dot for each of six seeds")

# %% tags=["claim-L16"]
sgd, adam = contenders
for figure, results, sign in (("faster", speed, -1), ("better on the test", tested, 1)):
    ahead = [sign * (a - s) for a, s in zip(results[adam], results[sgd])]
    adam_wins, sgd_wins = sum(d > 0 for d in ahead), sum(d < 0 for d in ahead)
    clear = "a clear result" if 6 in (adam_wins, sgd_wins) else "so the seed decides as well"
    print(f"{figure}: Adam for {adam_wins} seeds of 6, SGD for {sgd_wins}; {clear}")
gap = abs(np.median(tested[adam]) - np.median(tested[sgd]))
spread = {n: 100 * np.ptp([grid[n, r][1] for r in rates]) for n, (_, rates) in contenders.items()}
print(f"medians on the test: {gap:.1f} points apart (one image of 500 is 0.2 points)")
for name, points in spread.items():
    print(f"{name}: the grid's best and worst rate are {points:.0f} points apart")
assert min(spread.values()) > 2 * gap
assert grid[adam, 0.001][0] > 1.3 * grid[adam, fastest[adam]][0]

# %% [markdown]
# The printed lines say what came out on this machine. Where the two rows of dots overlap, a single run of each can show either winner. Much larger than the difference between the optimizers is that between the rates within each grid, and Adam's default of 0.001 is not the best for speed here. Who compares two optimizers at one rate each
# compares two rates.
#
# This small network, 500 images and five epochs say nothing of large networks and long trainings, where most of the evidence for the articles' statement comes from. What carries over is the procedure: the same effort for both, a choice made apart from the test, several seeds, and the spread beside the median.
#
# **Weight decay** pulls every weight towards 0 at each step. The articles say that the argument `weight_decay` *is L2 regularisation*: a penalty in the loss, of half `weight_decay` times the sum of all squared weights. The gradient of that penalty by a weight is `weight_decay` times the weight. Below, a weight of 2 has a gradient of 0, so that the decay acts alone.


# %%
def decayed(optimizer_class, weight_decay):
    """A weight of 2 with gradient 0, after one step with rate 0.1."""
    weight = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    optimizer_class([weight], lr=0.1, weight_decay=weight_decay).step()
    return weight.item()


# %%
predict(
    "A weight of 2 with gradient 0 takes one step of `Adam(lr=0.1, weight_decay=0.001)`. "
    "What is the weight then?",
    run=lambda: round(decayed(torch.optim.Adam, 0.001), 4),
    options={
        "2: no gradient, no step": lambda weight: weight == 2,
        "1.9998: 2 × (1 − 0.1 × 0.001)": lambda weight: weight == 1.9998,
        "1.9: a whole step of the size of the rate": lambda weight: weight == 1.9,
    },
)

# %% tags=["claim-L15", "nbval-check-output"]
for decay in (0.001, 0.01, 0.1):
    row = [f"{kind.__name__} {decayed(kind, decay):.4f}" for kind in (SGD, Adam, AdamW)]
    print(f"weight_decay={decay:<5}: 2 becomes  {'   '.join(row)}")
assert math.isclose(decayed(SGD, 0.1), decayed(AdamW, 0.1)) and decayed(SGD, 0.1) == 2 * (1 - 0.01)
assert round(decayed(Adam, 0.1), 4) == round(decayed(Adam, 0.001), 4) == 1.9

# %% [markdown]
# SGD multiplies by 1 − rate × weight_decay. Adam puts the decay into its quotient, as part of the gradient; where it is all there is, its size cancels, and 0.001 pulls as hard as 0.1. AdamW keeps the decay out of the quotient and multiplies the weight itself. That is called **decoupled**. Which of them is L2 regularisation? Compare each with
# the same penalty written into the loss:


# %% tags=["claim-L15", "nbval-check-output"]
def line_fit(optimizer_class, decay=0.0, penalty=0.0):
    """Two weights after 50 steps, with decay in the optimizer or a penalty in the loss."""
    weights = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    optimizer = optimizer_class([weights], lr=0.01, weight_decay=decay)
    for _ in range(50):
        optimizer.zero_grad()
        error = (weights - torch.tensor([3.0, 0.5])).square().sum()
        (error + penalty / 2 * weights.square().sum()).backward()
        optimizer.step()
    return weights.detach()


l2 = {}
for kind in (SGD, Adam, AdamW):
    by_argument, by_penalty = line_fit(kind, decay=0.5), line_fit(kind, penalty=0.5)
    l2[kind] = torch.allclose(by_argument, by_penalty, atol=1e-9)
    print(f"{kind.__name__:5} weight_decay=0.5 is the penalty in the loss: {l2[kind]}")
assert l2 == {SGD: True, Adam: True, AdamW: False}

# %% [markdown]
# For SGD and Adam the statement holds; for AdamW it does not. And where it holds for Adam, is it what one wants? Let the gradients be noise: equal in size, with alternating sign, so that there is nothing to learn. Look at how far 200 steps of decay pull a weight of 2.


# %% tags=["claim-L15"]
def after_noise(optimizer_class, size, steps=200):
    weight = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = optimizer_class([weight], lr=0.01, weight_decay=0.1)
    for step in range(steps):
        weight.grad = torch.full_like(weight, size * (-1) ** step)
        optimizer.step()
    return weight.item()


noise_sizes = (0.1, 1.0, 10.0)
pulled = {kind: [after_noise(kind, size) for size in noise_sizes] for kind in (SGD, Adam, AdamW)}
table(
    ("weight_decay=0.1", *(f"noise of ±{size:g}" for size in noise_sizes)),
    [(kind.__name__, *(round(weight, 2) for weight in row)) for kind, row in pulled.items()],
)
assert max(pulled[SGD]) - min(pulled[SGD]) < 0.02 > max(pulled[AdamW]) - min(pulled[AdamW])
assert pulled[Adam][0] < 1 and pulled[Adam][1] < pulled[Adam][2] > 1.9

# %% [markdown]
# SGD and AdamW pull the weight to about 1.6, whatever the noise. Adam pulls a weight with small gradients hard, and one with large gradients hardly at all, because the decay is divided by their size, as everything in the quotient is. AdamW was made to part the two (Loshchilov and Hutter, 2019, arXiv:1711.05101).
# The defaults differ as well: 0 for `Adam`, 0.01 for `AdamW`.
#
# Not everything has to decay. Instead of parameters, an optimizer takes a list of **parameter groups**: dicts that hold parameters under `"params"`, and beside them whatever these shall have of their own.

# %% tags=["nbval-check-output"]
pulled_down, left_alone = (nn.Parameter(torch.tensor([2.0])) for _ in "ab")
groups = [{"params": [pulled_down], "weight_decay": 0.1}, {"params": [left_alone], "lr": 0.5}]
optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)  # for what a group does not say
for group in optimizer.param_groups:
    print("rate", group["lr"], " weight decay", group["weight_decay"])
pulled_down.grad, left_alone.grad = torch.zeros(1), torch.zeros(1)
optimizer.step()
print(f"2 becomes {pulled_down.item():.2f} in the first, {left_alone.item():.2f} in the second")
assert math.isclose(pulled_down.item(), 1.98, rel_tol=1e-6) and left_alone.item() == 2.0

# %% [markdown]
# ### Exercise 5 · Who decays (eight minutes)
#
# A usual division: matrices, the kernels of convolutions and the tables of embeddings decay; they have two dimensions or more. Biases and the scales of normalisation layers have fewer, and do not decay: a scale of 0 would switch its feature off. Names mislead, since the scale of a normalisation layer is called `weight` as well.
# Among the cases are a module with a frozen part, one with parameters that lie in no layer, and one in which two layers share a matrix.


# %% tags=["exercise"]
def parameter_groups(module, weight_decay):
    """Two parameter groups for an optimizer, a list of two dicts, each with "params", a list, and
    "weight_decay", a float.

    In the first, which has this weight_decay: the module's trainable parameters of two or more
    dimensions. In the second, which has 0.0: the other trainable ones. Frozen parameters are in
    neither group, and no parameter comes twice.

    >>> matrices, others = parameter_groups(nn.Linear(3, 2), 0.1)
    >>> [tuple(p.shape) for p in matrices["params"]], others["weight_decay"]
    ([(2, 3)], 0.0)
    """
    ...


# %%
check(parameter_groups)

# %% [markdown]
# ## 7 · Schedules
#
# Long steps bring a training forward, and towards the end short ones let it come to rest. That is the idea of a **schedule**, which gives a rate for each step. A **scheduler** carries it out: it is made for an optimizer, and each call of `scheduler.step()` writes the next rate into the optimizer's parameter groups. It knows nothing of batches and epochs. It counts its own calls.
#
# `StepLR(optimizer, step_size=2, gamma=0.5)` halves the rate at every second call. `kit.train_epoch` makes the call for you, and wants to be told when: `step_per="batch"` or `step_per="epoch"`. Here are the rates that three epochs of three batches used.

# %% tags=["claim-L08", "nbval-check-output"]
ones = [(torch.ones(2, 1), torch.ones(2, 1))] * 3  # a loader of three batches
used = {}
for unit in ("batch", "epoch"):
    line = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), lr=1.0)
    halving = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    settings = {"scheduler": halving, "step_per": unit}
    epochs = [kit.train_epoch(line, ones, F.mse_loss, optimizer, **settings) for _ in range(3)]
    used[unit] = [epoch.learning_rates for epoch in epochs]
    print(f"stepped per {unit}: {used[unit]}")
assert used["batch"] == [[1.0, 1.0, 0.5], [0.5, 0.25, 0.25], [0.125, 0.125, 0.0625]]
assert used["epoch"] == [[1.0] * 3, [1.0] * 3, [0.5] * 3]

# %% [markdown]
# The same scheduler, and two different trainings. Now one that is meant for a whole run: `OneCycleLR` takes the rate up to `max_lr` and down again, within `total_steps` calls.


# %%
def optimizer_in_one_cycle():
    """An optimizer of rate 0.1 whose scheduler has been made and not yet been stepped."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    return optimizer


# %%
predict(
    "An optimizer has `lr=0.1` and gets `OneCycleLR(optimizer, max_lr=0.1, total_steps=100)`. "
    "Which rate does the very first step use?",
    run=lambda: round(optimizer_in_one_cycle().param_groups[0]["lr"], 6),
    options={
        "0.1: the scheduler has not been stepped yet": lambda rate: rate == 0.1,
        "0.001: the first of 100 equal parts": lambda rate: rate == 0.001,
        "0.004: a 25th of max_lr": lambda rate: rate == 0.004,
    },
)

# %% [markdown]
# Making the scheduler was enough: it has overwritten the optimizer's rate. It is good to see a schedule before you train with it.

# %% [markdown]
# ### Exercise 6 · A schedule without a training (eight minutes)
#
# Which rates would a run of so many steps use? To find out you need no model and no data. An optimizer over one parameter that has no gradient moves nothing when it steps, and its scheduler does not mind.


# %% tags=["exercise"]
def lr_trace(make_scheduler, steps, lr=1.0):
    """The learning rates that `steps` steps of an optimizer use, in order: a list of floats.

    make_scheduler takes an optimizer and returns a scheduler: give it a torch.optim.SGD with this
    lr. After each step of the optimizer comes one of the scheduler, as in a training, so that
    PyTorch has nothing to warn of. No steps use no rates: [].

    >>> lr_trace(lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), steps=5)
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    ...


# %%
check(lr_trace)

# %% [markdown]
# The articles say: *calling `scheduler.step()` at the wrong place skews the curve.* One wrong place is before `optimizer.step()`:


# %% tags=["claim-L09", "nbval-check-output"]
def rates_when(scheduler_first, steps=6):
    """The rates that the steps use, and PyTorch's warnings."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            if scheduler_first:
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if not scheduler_first:
                scheduler.step()
    return rates, [str(warning.message) for warning in caught]


right, silence = rates_when(scheduler_first=False)
early, warned = rates_when(scheduler_first=True)
print("optimizer first:", right, "  warnings:", len(silence))
print("scheduler first:", early, "  warnings:", len(warned))
print(warned[0][:73], "…")
assert right == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25] and not silence
assert early == right[1:] + [0.125] and len(warned) == 1 and "first value" in warned[0]

# %% [markdown]
# Every rate comes one step early: the first place of the schedule is skipped, as the warning says further on. It is given once, at the first call.
#
# The other wrong place is the wrong loop. The articles say that *in new versions, schedulers step once an epoch*. In five epochs of twenty batches the rate shall fall along half a cosine, from 0.1 to 0; `CosineAnnealingLR(optimizer, T_max)` takes it there in T_max calls. Let T_max count batches (100) or epochs (5), and call `step()` for each batch or each epoch. Look for
# the two lines that do what was meant.


# %% tags=["claim-L08"]
def rates_of_batches(make_scheduler, step_per, epochs=5, batches=20):
    """The rate of each batch, where the scheduler is stepped per batch or per epoch."""
    if step_per == "batch":
        return kit.lr_trace(make_scheduler, epochs * batches, lr=0.1)
    by_epoch = kit.lr_trace(make_scheduler, epochs, lr=0.1)
    return [rate for rate in by_epoch for _ in range(batches)]


def cosine(calls):
    return lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=calls)


falls = {
    f"T_max={calls}, per {unit}": rates_of_batches(cosine(calls), unit)
    for calls in (100, 5)
    for unit in ("batch", "epoch")
}
curves(falls, "batch", "learning rate")
for name in ("T_max=100, per batch", "T_max=5, per epoch"):
    assert falls[name][0] == 0.1 and max(falls[name][-20:]) < 0.01
assert min(falls["T_max=100, per epoch"]) > 0.099
pairs = itertools.pairwise(falls["T_max=5, per batch"])
ups = sum(later > earlier for earlier, later in pairs)
print("T_max=5, per batch: the rate rises at", ups, "of 99 batches")
assert ups > 40

# %% [markdown]
# Both units are right where the two agree. Where they do not, the rate hardly falls, or it swings up and down. Nothing is raised and nothing is warned of. `OneCycleLR` notices one of the two mistakes:


# %% tags=["claim-L08"]
def one_cycle(calls):
    return lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=calls)


cycles = {
    f"total_steps={calls}, per {unit}": rates_of_batches(one_cycle(calls), unit)
    for calls, unit in ((100, "batch"), (5, "epoch"), (100, "epoch"))
}
rows = []
for name, rates in cycles.items():
    rows.append((name, *(f"{rate:.2g}" for rate in (rates[0], max(rates), rates[-1]))))
table(("OneCycleLR, max_lr=0.1, 5 epochs of 20", "first rate", "highest", "last"), rows)
assert max(cycles["total_steps=100, per epoch"]) < 0.01
assert min(max(cycles[name]) for name in list(cycles)[:2]) > 0.09
with raises(ValueError):
    rates_of_batches(one_cycle(5), "batch")

# %% [markdown]
# More calls than `total_steps` are an error. Fewer are none: with 100 calls planned and one made an epoch, the rate never gets beyond a tenth of what was meant. What does such a run lose? Here are the digits, in five epochs of ten batches, with a `OneCycleLR` of 50 steps:


# %% tags=["claim-L08"]
def one_cycle_loss(step_per, seed, epochs=5):
    """Loss over the training images after a run with a schedule of 50 steps."""
    kit.seed_everything(seed)
    network = mlp(784, 32, 10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=50)
    settings = {"scheduler": scheduler, "step_per": step_per}
    for _ in range(epochs):
        kit.train_epoch(network, shuffled_batches(), F.cross_entropy, optimizer, **settings)
    return kit.evaluate(network, all_at_once, F.cross_entropy).loss


costs = {unit: [one_cycle_loss(unit, seed) for seed in range(5)] for unit in ("batch", "epoch")}
rows = [(f"stepped per {unit}", losses) for unit, losses in costs.items()]
dots(rows, "training loss at the end; a dot for each of five seeds")
print("stepped per epoch, the loss is", end=" ")
print(f"{np.median(costs['epoch']) / np.median(costs['batch']):.1f} times as high (medians)")
assert np.median(costs["batch"]) < np.median(costs["epoch"])

# %% [markdown]
# So "once an epoch" is no rule. What a scheduler's numbers count is what it has to be called for. What changed in PyTorch 1.1, according to the warning above, is the order of the two steps.
#
# `OneCycleLR` does one thing more, which the traces of the rate do not show:

# %% tags=["claim-L39", "nbval-check-output"]
for cycle in (True, False):  # True is the default
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    group = optimizer.param_groups[0]
    print("momentum of the SGD:", group["momentum"], end="   ")
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100, cycle_momentum=cycle)
    cycled = [(group["lr"], group["momentum"])]
    for _ in range(99):
        optimizer.step()
        scheduler.step()
        cycled.append((group["lr"], group["momentum"]))
    first, at_peak = round(cycled[0][1], 3), round(max(cycled)[1], 3)
    print(f"cycle_momentum={cycle}: {first} at the start, {at_peak} at the highest rate")
    assert (first, at_peak) == ((0.95, 0.85) if cycle else (0, 0))

# %% [markdown]
# An SGD made without momentum has one of 0.95 from then on, lower while the rate is high. It is part of the method and on by default. So who compares SGD with and without this schedule changes two things.
#
# The explorer draws the rate of each batch, from the real scheduler, and beside it the one that was meant. Try:
#
# 1. *StepLR*, stepped per *batch*, while its numbers count *epochs*. Look at how many batches change next to nothing, and at whether torch warns. The logarithmic axis shows how small the rate becomes.
# 2. *StepLR*, stepped per *epoch* and counting *epochs*, *resume at* 5, with *only the optimizer's* state loaded. Look at when the rate first goes wrong. Then choose *CosineAnnealingLR*.
# 3. *CosineAnnealingLR*, stepped per *batch* and counting *batches*, *resume at* 0, with the accident *first 3 optimizer steps skipped*. (A loop may skip a step whose gradient is not finite.) The order is right: why does torch warn? And what does it say when the three are skipped midway?

# %%
explore_schedule()

# %% [markdown]
# (In 3, torch has seen a step of the scheduler and none of the optimizer before it, and takes that for the wrong order. Once the optimizer has made a step, a skipped one goes unnoticed.)
#
# As in 2, a run that is stopped and **resumed** goes on in a new process, with a new optimizer and a new scheduler. Each has a state to be saved, its `state_dict()`: the optimizer's holds the rate, the scheduler's the number of its calls. Here a cosine over ten steps is stopped after five and resumed, with both states loaded, with one, or with none:


# %% tags=["nbval-check-output"]
def begin():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer, lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)


def five_rates(optimizer, scheduler):
    rates = []
    for _ in range(5):
        rates.append(round(optimizer.param_groups[0]["lr"], 4))
        optimizer.step()
        scheduler.step()
    return rates


optimizer, scheduler = begin()
print("before the stop:", five_rates(optimizer, scheduler))
saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
unbroken = five_rates(optimizer, scheduler)
print("without a stop: ", unbroken)
resumed = {}
for loaded in ("both", "optimizer", "scheduler", "neither"):
    optimizer, scheduler = begin()
    if loaded in ("both", "optimizer"):
        optimizer.load_state_dict(saved[0])
    if loaded in ("both", "scheduler"):
        scheduler.load_state_dict(saved[1])
    resumed[loaded] = five_rates(optimizer, scheduler)
    print(f"{loaded:9} loaded:", resumed[loaded])
assert [loaded for loaded in resumed if resumed[loaded] == unbroken] == ["both"]

# %% [markdown]
# With both, the run goes on where it stopped. With one it goes wrong quietly: the optimizer's state alone gives the right first rate, and then a schedule that begins anew; the scheduler's alone comes down to near 0 in time, from a rate that is twice too high. Lesson 06 resumes a whole training.

# %% [markdown]
# ## 8 · Depth
#
# A deep network is one of many layers. The articles say how it should begin: *Kaiming's initialisation suits ReLU better than the default.* To see what the start decides, look into networks that have learned nothing yet. Do different pictures still give different values after many layers? Where they do not, the last layer
# cannot tell them apart, and the gradient that arrives at the first layer says next to nothing.
#
# The spread of a value here is its standard deviation from picture to picture. One network has ten linear layers with a ReLU after each. The other has ten convolutions with a ReLU after each. A **convolution** computes each of its values from a small square of the picture, here 3 × 3 pixels in all channels, with the same weights at
# every place. What it gives is again a grid, a **map**, for each set of weights that it has. (`padding=1` puts a border around the picture, so that the size stays.) A **unit** is one of the values that a layer computes.


# %%
def ten_linear():
    return mlp(784, *[128] * 10, 10)  # and an eleventh, for the ten scores


def ten_convolutions():
    layers = []
    for inputs, outputs in zip([1] + [16] * 9, [16] * 10):
        layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers).to(config.device)


def spread_by_layer(net, values):
    """After each ReLU, the spread from picture to picture, as a mean over all its units."""
    spreads = []
    with torch.no_grad():
        for layer in net:
            values = layer(values)
            if isinstance(layer, nn.ReLU):
                spreads.append(values.std(dim=0).mean().item())
    return spreads


many_seeds = range(config.seed, config.seed + lesson.pick(5, 10))  # for comparisons
half_size = small_x[:30, :, ::2, ::2]  # every other pixel, for speed

# %%
predict(
    "Ten linear layers as PyTorch makes them, each with a ReLU. What is left of the first layer's "
    "spread after the tenth?",
    run=lambda: (lambda spreads: spreads[-1] / spreads[0])(spread_by_layer(ten_linear(), small_x)),
    options={
        "about all of it: that is what an initialisation is for": lambda share: 0.4 < share < 2.5,
        "about a tenth": lambda share: 0.04 < share < 0.25,
        "less than a hundredth": lambda share: share < 0.01,
    },
)

# %% [markdown]
# Look at the slopes. The vertical axis counts powers of ten, so a straight line means the same factor at each layer. `kit.he_init_` gives a network Kaiming's initialisation.

# %% tags=["claim-L17"]
beginnings = {"PyTorch's own": lambda net: net, "Kaiming": kit.he_init_}
builders = {"linear": (ten_linear, small_x), "convolution": (ten_convolutions, half_size)}
by_depth = {}
for kind, (build, shown) in builders.items():
    for name, begin in beginnings.items():
        runs = []
        for seed in many_seeds:
            torch.manual_seed(seed)
            runs.append(spread_by_layer(begin(build()), shown))
        by_depth[kind, name] = np.array(runs)  # a row for each seed
lines = {f"{k}, {n}": (range(1, 11), np.median(v, axis=0)) for (k, n), v in by_depth.items()}
curves(lines, "layer", "spread after its ReLU, median over the seeds", log=True)
for (kind, name), runs in by_depth.items():
    kept = runs[:, -1] / runs[:, 0]
    print(
        f"{kind}, {name}: after the tenth layer {kept.min():.2g} to {kept.max():.2g} of the first"
    )
    assert (kept.max() < 0.01) if name == "PyTorch's own" else (kept.min() > 0.05)

# %% [markdown]
# With PyTorch's own start each layer leaves about 0.4 of the spread. Where does the number come from? Follow the mean of the squares through one layer whose inputs have 1:

# %% tags=["claim-L17"]
signals = torch.randn(4000, 400)  # mean of the squares: 1
for name, begin in beginnings.items():
    layer = begin(nn.Linear(400, 400))
    with torch.no_grad():
        sums = layer(signals)
    squares = [t.square().mean().item() for t in (sums, sums.relu())]
    print(f"{name:14} after the sums {squares[0]:.3f}, after ReLU {squares[1]:.3f}")
    expected = 1 / 3 if name == "PyTorch's own" else 2
    assert abs(squares[0] / expected - 1) < 0.1 and abs(2 * squares[1] / expected - 1) < 0.1

torch.manual_seed(SEED)
own = nn.Linear(400, 400).weight
torch.manual_seed(SEED)
named = nn.init.kaiming_uniform_(torch.empty(400, 400), a=math.sqrt(5))
print("PyTorch's own is kaiming_uniform_ with a = √5:", torch.equal(own, named))
assert torch.equal(own, named)

# %% [markdown]
# A layer with n inputs adds up n products. PyTorch draws the weights evenly between -1/√n and 1/√n, which is a variance of 1/(3n), so the sums have a mean square of n · 1/(3n) = 1/3. ReLU sets one half of them to 0: 1/6 is left, and the root of 1/6 is 0.41, the factor of the picture above. Kaiming He and others drew from a
# normal distribution with variance **2/n** instead: 2 after the sums, 1 after ReLU, at any depth.
#
# The names mislead. PyTorch's own start *is* the function `kaiming_uniform_`, told by `a` that negative values will be multiplied by √5, which no ReLU does. (Under Kaiming's start the spread falls a little as well. The mean square stays; but with each ReLU the pictures become more alike.)
#
# Does it matter for learning? Two depths, both starts, three epochs at the same rate. Whoever guesses is right in one case out of ten.

# %% tags=["claim-L17"]
two_layers, nine_layers = (784, 64, 10), (784, *[64] * 8, 10)


def accuracy_after(net, rate=0.02, epochs=3):
    """Train by SGD with momentum; returns the accuracy on the test pictures."""
    fit(net, torch.optim.SGD(net.parameters(), rate, momentum=0.9), epochs=epochs)
    return accuracy(net)


by_start = {}
for widths in (two_layers, nine_layers):
    for name, begin in beginnings.items():
        scores = []
        for seed in many_seeds:
            torch.manual_seed(seed)
            scores.append(accuracy_after(begin(mlp(*widths))))
        by_start[f"{len(widths) - 1} layers, {name}"] = scores
dots(by_start.items(), "accuracy on the test pictures; a dot for each seed")
assert min(by_start["9 layers, Kaiming"]) > max(by_start["9 layers, PyTorch's own"]) + 0.05

# %% [markdown]
# The nine layers with PyTorch's own start do no better than guessing, for each of the seeds. With Kaiming's they learn. With two layers there is little to lose, and both learn. This is SGD at one rate and in three epochs; what a normalising layer changes comes below.

# %% [markdown]
# ### Exercise 7 · Kaiming's start (ten minutes)
#
# Write `kit.he_init_` yourself. A network is a tree of modules, so the layers to initialise may lie at any depth, and the module that you are given may be such a layer itself. How many inputs does one output of a convolution add up?


# %% tags=["exercise"]
def he_init_(module: nn.Module) -> nn.Module:
    """Draw the weights of every nn.Linear and nn.Conv2d in the module anew, in place; return it.

    Weights: a normal distribution with mean 0 and standard deviation sqrt(2 / fan_in), where fan_in
    is the number of inputs that one output adds up. In a convolution with groups an output sees the
    channels of its own group only: the weight's shape tells. Biases, where there are any: 0.
    Other layers stay as they are. The parameters stay the same objects, and trainable.

    >>> layer = he_init_(nn.Linear(50, 8))  # a deviation of 0.2
    >>> layer.bias.tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    ...


# %%
check(he_init_)

# %% [markdown]
# ### Units that have died
#
# ReLU lets a gradient through where its input is above 0. If a unit is at or below 0 for *every* picture, its answer is 0 to all of them, and none of them sends a gradient to its weights. It is **dead**. A step that is too large can do that. LeakyReLU multiplies negative inputs by 0.01 instead of setting them to 0.
#
# Here a network is shocked by two epochs at a rate of 0.2, and then trained on, calmly, at a tenth of that.


# %%
def silent_units(net):
    """Which units of the first hidden layer are at or below 0 for all 500 pictures: bool (64,)."""
    with torch.no_grad():
        return (net[:2](small_x) <= 0).all(dim=0)  # the network's first two: Flatten, Linear


def shocked(activation, seed):
    torch.manual_seed(seed)
    net = mlp(784, 64, 64, 10, between=activation)
    accuracy_after(net, rate=0.2, epochs=2)
    return net


def awake_again(activation, seed):
    """How many units the shock silenced, and how many of those answer after four calm epochs."""
    net = shocked(activation, seed)
    silent = silent_units(net)
    accuracy_after(net, rate=0.02, epochs=4)
    return silent.sum().item(), (silent & ~silent_units(net)).sum().item()


# %%
predict(
    "Some of the 64 ReLU units are dead after the shock. Four calm epochs follow. "
    "How many of the dead units answer again?",
    run=lambda: awake_again(nn.ReLU, config.seed),
    options={
        "none": lambda counts: counts[0] > 0 and counts[1] == 0,
        "some of them": lambda counts: 0 < counts[1] < counts[0],
        "all of them": lambda counts: 0 < counts[1] == counts[0],
    },
)

# %% tags=["claim-L18"]
after_shock = {}
for activation in (nn.ReLU, nn.LeakyReLU):
    columns = after_shock[activation.__name__] = []
    for seed in many_seeds:
        net = shocked(activation, seed)
        silent, weight = silent_units(net), net[1].weight
        net.zero_grad()
        F.cross_entropy(net(small_x), small_y).backward()
        pulled = (weight.grad[silent] != 0).any(dim=1).sum().item()
        before = weight.detach()[silent]
        score = accuracy_after(net, rate=0.02, epochs=4)
        moved = (weight.detach()[silent] != before).any(dim=1).sum().item()
        awake = (~silent_units(net))[silent].sum().item()
        columns.append((silent.sum().item(), pulled, moved, awake, f"{score:.2f}"))
table(
    ("activation", "silent of 64", "with a gradient", "moved", "awake again", "accuracy"),
    [
        (name, *(", ".join(map(str, column)) for column in zip(*columns)))
        for name, columns in after_shock.items()
    ],
)
assert sum(column[0] for column in after_shock["ReLU"]) > 0
assert all(column[1:4] == (0, 0, 0) for column in after_shock["ReLU"])
assert all(column[0] == column[1] == column[2] for column in after_shock["LeakyReLU"])

# %% [markdown]
# One number for each seed. Of the dead ReLU units none has a gradient, and not one of their weights has changed by a bit. As long as only gradients move them, these units stay dead, for in the first layer the inputs never change. With LeakyReLU units fall silent as well. Each of them still has a gradient, and moves, but by a hundredth of
# what an awake one gets; how many have come back in four epochs, the table says. Compare the last column, too: here the network gets along without them. Dead units are room that you pay for, and what is to be mended is the step that killed them.

# %% [markdown]
# ### BatchNorm, before or after
#
# BatchNorm subtracts from each value its mean over the batch and divides by its standard deviation; then it multiplies by a learned scale and adds a learned shift (section 4). So the size of what comes in no longer matters. The nine layers that stood still, with a BatchNorm before each ReLU and PyTorch's own start:

# %%
torch.manual_seed(SEED)
normed_deep = mlp(*nine_layers, between=lambda: nn.Sequential(nn.BatchNorm1d(64), nn.ReLU()))
print(
    f"nine layers with BatchNorm, PyTorch's own start: accuracy {accuracy_after(normed_deep):.2f}"
)

# %% [markdown]
# The articles say more: *BatchNorm goes before the activation, and it fights overfitting.* **Overfitting** is being good on the pictures trained on and worse on others; section 10 is about it. So take few pictures, 250, and compare both orders with a network without.


# %%
def normed(order):
    """784 → 64 → 64 → 10 with BatchNorm "before" or "after" each ReLU, or "without" any."""
    layers = [nn.Flatten()]
    for inputs, outputs in ((784, 64), (64, 64)):
        norm = nn.BatchNorm1d(outputs)
        parts = {"without": [nn.ReLU()], "before": [norm, nn.ReLU()], "after": [nn.ReLU(), norm]}
        layers += [nn.Linear(inputs, outputs), *parts[order]]
    return nn.Sequential(*layers, nn.Linear(64, 10)).to(config.device)


# %% tags=["claim-L19"]
little = train_x[:250], train_y[:250]
second, on_train, on_test = {}, {}, {}
for order in ("without", "before", "after"):
    second[order], on_train[order], on_test[order] = [], [], []
    for seed in many_seeds:
        torch.manual_seed(seed)
        net = normed(order)
        optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
        second[order].append(fit(net, optimizer, *little, epochs=10)[1])
        on_train[order].append(accuracy(net, *little))
        on_test[order].append(accuracy(net, test_x, test_y))
dots(second.items(), "training loss in the second epoch")
dots(on_test.items(), "accuracy on the test pictures after ten epochs")
for order, scores in on_train.items():
    print(f"{order}: accuracy on the training pictures at least {min(scores):.3f}")
    assert min(scores) > max(on_test[order]) + 0.1
assert max(second["before"] + second["after"]) < np.median(second["without"])

# %% [markdown]
# Three things to read. In the second epoch, either order is ahead of the network without. On the test pictures, compare the difference between the two orders with the distance between seeds. And with BatchNorm the network has learned its training pictures as completely as without, while about one test picture in five is wrong: whatever it gains there, it does
# not prevent overfitting.

# %% [markdown]
# ### Pictures of any size
#
# A linear layer after `nn.Flatten` fixes the size of the pictures. *Adaptive average pooling frees the network from the input size,* the articles say: `nn.AdaptiveAvgPool2d(4)` divides whatever map it gets into 4 × 4 fields and takes the mean of each. (`nn.MaxPool2d(2)` keeps the largest of each 2 × 2 values, which halves the map.)


# %%
def convolutions(*end):
    """Two convolutions, each followed by pooling to half the size; 28 × 28 becomes (16, 7, 7)."""
    blocks = []
    for inputs, outputs in ((1, 8), (8, 16)):
        conv = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1)
        blocks += [conv, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, *end).to(config.device)


fixed_size = convolutions(nn.Flatten(), nn.Linear(16 * 7 * 7, 10))
any_size = convolutions(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


def resized(x, size):
    return F.interpolate(x, size=(size, size), mode="bilinear", antialias=True)


def on_a_larger_canvas(x, size):
    return F.pad(x, [(size - 28) // 2] * 4, value=small_x.min().item())


# %% tags=["claim-L20"]
with raises(RuntimeError):
    fixed_size(resized(small_x[:2], 32))
for size in (14, 28, 33, 56):
    assert any_size(resized(small_x[:2], size)).shape == (2, 10)

torch.manual_seed(SEED)
fit(any_size, torch.optim.SGD(any_size.parameters(), 0.05, momentum=0.9))
some_x, some_y = test_x[:300], test_y[:300]
kinds = {f"resized to {size}": resized(some_x, size) for size in (14, 20, 28, 42, 56)}
kinds |= {f"same size, in a frame of {s}": on_a_larger_canvas(some_x, s) for s in (36, 44)}
by_size = {name: accuracy(any_size, shown, some_y) for name, shown in kinds.items()}
bars(
    [(name, share, "view") for name, share in by_size.items()],
    "accuracy of a network trained at 28, by the kind of test picture",
)
assert by_size["resized to 28"] > by_size["resized to 14"] + 0.2
assert by_size["resized to 28"] > by_size["same size, in a frame of 44"] + 0.1

# %% [markdown]
# The network *runs* at every size. It is *right* where pictures look as in training: its convolutions have learned strokes of one width, and the fields have learned where in the frame a digit lies. Where sizes will vary, train with sizes that vary.
#
# Downwards the freedom ends where pooling leaves nothing. It is usually refused, but not by every layer:

# %% tags=["claim-L20", "claim-L40", "nbval-check-output"]
with raises(RuntimeError):
    any_size(torch.zeros(1, 1, 3, 3, device=config.device))

tiny = torch.arange(4.0).view(1, 1, 2, 2)
print("2 × 2 to 4 × 4, first row:", nn.AdaptiveAvgPool2d(4)(tiny)[0, 0, 0].tolist())

empty = torch.zeros(1, 1, 0, 0)
with raises(RuntimeError):
    nn.AdaptiveAvgPool2d(4)(empty)
print("an empty map to 1 × 1:", nn.AdaptiveAvgPool2d(1)(empty).tolist())
assert nn.AdaptiveAvgPool2d(1)(empty).isnan().all()

# %% [markdown]
# Two poolings halve 3 to 1 and 1 to 0, and `nn.MaxPool2d` raises: *Output size is too small*. A map smaller than the fields is stretched by repeating its values. And a mean of nothing is nan: `nn.AdaptiveAvgPool2d(1)`, the usual last pooling, takes an empty map without a word.

# %% [markdown]
# ## 9 · When it does not learn
#
# Two symptoms: the loss becomes nan, or the loss stands. First the nan. Section 8's nine layers, Kaiming's start, and a rate twenty times as high as there. `kit.train_epoch` takes `max_norm`: it **clips** the gradients. All gradients together are one long vector; if its length, the **norm**, is above
# `max_norm`, all of them are multiplied by max_norm / norm before the step.


# %%
def steep(seed, max_norm=None):
    """The training loss in the second epoch of nine layers at a rate of 0.4."""
    torch.manual_seed(seed)
    net = kit.he_init_(mlp(*nine_layers))
    optimizer = torch.optim.SGD(net.parameters(), 0.4, momentum=0.9)
    loader = DataLoader(TensorDataset(small_x, small_y), config.batch, shuffle=True)
    for _ in range(2):
        epoch = kit.train_epoch(net, loader, F.cross_entropy, optimizer, max_norm=max_norm)
    return epoch.loss


# %% tags=["claim-L34"]
exploded = {limit: [steep(seed, limit) for seed in many_seeds] for limit in (None, 1.0)}
table(
    ("max_norm", "loss in the second epoch, for each seed"),
    [(str(k), ", ".join(f"{loss:.2f}" for loss in losses)) for k, losses in exploded.items()],
)
assert not any(math.isfinite(loss) for loss in exploded[None])
assert all(loss < 3 for loss in exploded[1.0])

# %% [markdown]
# Without clipping, a large step leads to a place with a larger gradient, and so on to infinity. Clipping bounds what each gradient can do. So the articles' sentence *gradient clipping prevents NaN* holds here. Does it hold for a gradient that is infinite already, from a division by zero in one sample, say?


# %%
def clipped(*gradient):
    """A gradient of three numbers after clipping to a norm of 1."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor(gradient)
    nn.utils.clip_grad_norm_([parameter], max_norm=1.0)
    return parameter.grad.tolist()


# %%
predict(
    "The gradient is [inf, 3, 4], and `clip_grad_norm_` clips it to a norm of 1. What is it then?",
    run=lambda: clipped(math.inf, 3.0, 4.0),
    options={
        "[1, 0, 0]: the infinite part is cut to the limit": lambda g: g == [1.0, 0.0, 0.0],
        "[inf, 3, 4]: such a gradient is left alone": lambda g: g == [math.inf, 3.0, 4.0],
        "[nan, 0, 0]": lambda g: math.isnan(g[0]) and g[1:] == [0.0, 0.0],
    },
)

# %% tags=["claim-L34", "claim-L41", "nbval-check-output"]
for gradient in ((3.0, 0.0, 4.0), (math.inf, 3.0, 4.0), (math.nan, 3.0, 4.0), (1e30, 3.0, 4.0)):
    print(list(gradient), "→", [round(g, 4) for g in clipped(*gradient)])
assert all(math.isnan(g) for g in clipped(math.nan, 3.0, 4.0))
assert clipped(1e30, 3.0, 4.0) == [0.0, 0.0, 0.0]

# %% [markdown]
# The factor is max_norm / norm. With an infinite norm it is 0, and 0 · inf is nan. With a norm of nan everything becomes nan: a single bad number in one parameter's gradient spreads to the gradients of *all* parameters, and the next step ruins the model. In the last line every gradient is finite, but 1e30 squared is beyond float32, so the norm is
# infinite and the step is silently 0. Clipping bounds what is large. It mends nothing that is not finite.

# %% [markdown]
# ### Exercise 8 · Clip, or refuse (ten minutes)
#
# A step that clips, and that stops the program before it harms the model. `optimizer.step()` must not be reached then.


# %% tags=["exercise"]
def clip_and_step(parameters, optimizer, max_norm: float) -> float:
    """Clip the gradients to a total norm of max_norm, step, and return the norm before clipping.

    parameters: an iterable that can be gone through once; some of them may have no gradient. The
    norm, a float, is the root of the sum of all gradients' squares. One factor scales all gradients
    where it is above max_norm; otherwise, also where all are 0, they stay as they are. Where it is
    inf or nan: RuntimeError, and no step is taken.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_and_step([weight], torch.optim.SGD([weight], lr=1.0), max_norm=2.5)
    5.0
    >>> weight.tolist()
    [-1.5, -2.0]
    """
    ...


# %%
check(clip_and_step)

# %% [markdown]
# Read on when you have tried. PyTorch can refuse by itself, if it is asked to:

# %% tags=["claim-L34", "nbval-check-output"]
overflowed = nn.Parameter(torch.zeros(3))
overflowed.grad = torch.tensor([math.inf, 3.0, 4.0])
with raises(RuntimeError):
    nn.utils.clip_grad_norm_([overflowed], max_norm=1.0, error_if_nonfinite=True)
print("the gradient is as it was:", overflowed.grad.tolist())
assert overflowed.grad.tolist() == [math.inf, 3.0, 4.0]

# %% [markdown]
# `kit.train_epoch` asks it to, where `max_norm` is given, and so stops at the step where it began. A run that goes on with nan in all weights tells you nothing about where that was; lesson 07 looks for the place.

# %% [markdown]
# ### A loss that stands
#
# Someone wants to read the digits in colour. After a day of attempts the program below is what is left. It runs. Five things in it keep the network from learning; look for them before you go on.


# %%
class ColourNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        )  # stride=2: at every other place, so the map has half the size
        self.middle = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x):
        features = self.trunk(x).detach()
        return self.head(F.relu(self.middle(features)).flatten(1))


torch.manual_seed(SEED)
some_colour = colour.train_images[:500].float().to(config.device), colour_y[:500]
broken_loader = DataLoader(TensorDataset(*some_colour), config.batch, shuffle=True)
broken = ColourNet().to(config.device)
broken.middle.requires_grad_(False)
broken.eval()
parts = [*broken.trunk.parameters(), *broken.middle.parameters()]
broken_optimizer = torch.optim.SGD(parts, config.rate, momentum=0.9)

for epoch in range(3):
    losses = []
    for inputs, targets in broken_loader:
        broken_optimizer.zero_grad()
        loss = F.cross_entropy(broken(inputs), targets)
        loss.backward()
        broken_optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch + 1}: mean loss {np.mean(losses):.3f}")

# %% [markdown]
# The articles have a checklist for this: *check requires_grad, the optimizer's parameters, zero_grad, the mode.* `kit.examine` goes through such a list on any set-up of yours. It takes what a training needs, measures on copies, and reports what it finds, with evidence and a cure.

# %% tags=["claim-L23"]
findings = kit.examine(broken, broken_loader, F.cross_entropy, broken_optimizer)
print(findings)
assert [finding.name for finding in findings] == [
    "parameters missing from the optimizer",
    "frozen parameters in the optimizer",
    "eval mode",
    "inputs that are not normalised",
    "parameters that the loss never reaches",
]

# %% [markdown]
# Read it part by part. The head has a gradient and no optimizer. The middle has an optimizer and no gradient. The trunk has an optimizer, and `detach` cuts it off. So no parameter has ever moved. The mode and the raw pixels, 0 to 255, would have come next. The articles' list names three of the five. Its fourth, `zero_grad`, is a matter of the
# loop, which `examine` does not look at.
#
# All five repaired:


# %% tags=["claim-L23"]
class RepairedNet(ColourNet):
    def forward(self, x):
        return self.head(F.relu(self.middle(self.trunk(x))).flatten(1))


torch.manual_seed(SEED)
normal_colour = (colour_x[:500] - channel_mean) / channel_std, colour_y[:500]
sound_loader = DataLoader(TensorDataset(*normal_colour), config.batch, shuffle=True)
sound = RepairedNet().to(config.device)
sound_optimizer = torch.optim.SGD(sound.parameters(), config.rate, momentum=0.9)

findings = kit.examine(sound, sound_loader, F.cross_entropy, sound_optimizer)
print(findings)
assert findings == []
for epoch in range(3):
    loss = kit.train_epoch(sound, sound_loader, F.cross_entropy, sound_optimizer).loss
    print(f"epoch {epoch + 1}: mean loss {loss:.3f}")
assert loss < 2

# %% [markdown]
# Silence is no proof. `examine` says itself what it does not look at: zero_grad, accumulation, the scheduler, the metrics. Wrong labels it cannot know.

# %% [markdown]
# ### Exercise 9 · Which parameters does no optimizer hold? (eight minutes)
#
# The first finding, by your own hand. An optimizer keeps in `optimizer.param_groups` the very parameters that it was given; a layer that was put in their place later has others. What makes two tensors the *same* tensor?


# %% tags=["exercise"]
def unoptimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the model's trainable parameters that no group of the optimizer holds.

    In the order of model.named_parameters(). Another object with equal numbers is not held: the
    step moves objects. A frozen parameter (requires_grad is False) needs no optimizer.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> unoptimized(net, torch.optim.SGD(net[0].parameters(), lr=0.1))
    ['1.weight', '1.bias']
    """
    ...


# %%
check(unoptimized)

# %% [markdown]
# ### One batch, by heart
#
# The articles give a piece of advice: *overfit a single batch first.* Fifty pictures are few enough to be learned by heart, so the loss has to come near 0; if it does not, something is broken, and you know within a second. `kit.overfit_one_batch` trains a copy and returns the loss of each step.
#
# But which mistakes does that find? Suppose the labels of the batch have been shuffled, so that most are wrong.

# %%
torch.manual_seed(SEED)
batch_x, batch_y = small_x[:50], small_y[:50]
shuffled_y = batch_y[torch.randperm(50, device=config.device)]


def sgd_of(net, rate=0.05):
    return torch.optim.SGD(net.parameters(), rate, momentum=0.9)


def by_heart(net, loss_fn=F.cross_entropy, optimizer=None, x=batch_x, y=batch_y):
    """The loss before the first and before the last of 60 steps on one batch."""
    optimizer = optimizer or sgd_of(net)
    losses = kit.overfit_one_batch(net, (x, y), loss_fn, optimizer, steps=60)
    return losses[0], losses[-1]


# %%
predict(
    "The labels of 50 pictures are shuffled among them. Where is the loss after "
    "60 steps on this batch? It begins at about 2.3.",
    run=lambda: by_heart(mlp(784, 64, 64, 10), y=shuffled_y)[1],
    options={
        "at about 2.3: there is nothing to learn": lambda loss: loss > 2,
        "between 0.5 and 2: the right ones are learned, the wrong ones not": lambda loss: (
            0.5 < loss < 2
        ),
        "near 0, as with the right labels": lambda loss: loss < 0.05,
    },
)

# %% tags=["claim-L27"]
plain = mlp(784, 64, 64, 10)
one_output = mlp(784, 64, 64, 1)


class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.head = mlp(784, 64, 64), nn.Linear(64, 10).to(config.device)

    def forward(self, x):
        return self.head(self.features(x).detach())


raw_x = digits.train_images[:50].unsqueeze(1).float().to(config.device)
broken_batches = {
    "softmax before cross_entropy": by_heart(plain, lambda o, y: F.cross_entropy(o.softmax(1), y)),
    "another model's optimizer": by_heart(plain, optimizer=sgd_of(mlp(784, 64, 64, 10))),
    "a rate of 0.00005": by_heart(plain, optimizer=sgd_of(plain, 5e-5)),
    "pixels from 0 to 255": by_heart(plain, x=raw_x),
    "features detached": by_heart(Cut()),
    "(50, 1) outputs, (50,) targets": by_heart(
        one_output, F.mse_loss, sgd_of(one_output, 0.005), y=batch_y.float()
    ),
}
passing_batches = {
    "correct": by_heart(plain),
    "shuffled labels": by_heart(plain, y=shuffled_y),
    "pictures scrambled by reshape": by_heart(
        plain, x=batch_x.reshape(784, 50).T.reshape(50, 1, 28, 28)
    ),
}
rows = [*passing_batches.items(), *broken_batches.items()]
table(
    ("set-up", "first loss", "last loss"),
    [(name, f"{first:.3f}", f"{last:.3f}") for name, (first, last) in rows],
)
assert all(last < 0.05 for _, last in passing_batches.values())
assert all(last > 0.3 for _, last in broken_batches.values())

# %% [markdown]
# Six mistakes that keep the loss up, six times found. What passes although it is wrong is whatever leaves each picture with one answer: a network learns shuffled labels and scrambled pictures by heart as readily as right ones. One batch tells you that the machinery can learn. What it learns, only other pictures tell.

# %% [markdown]
# ## 10 · Overfitting
#
# Overfitting has a picture: the training loss falls, the loss on other pictures turns and rises. It is easy to get with 250 training pictures. A thousand others are held out to look at after each epoch: the **validation** set. (Not the test set. What you look at to decide something is no longer a test.)


# %%
held_out = train_x[3000:], train_y[3000:]


def small_network(change=nn.Identity, drop=0.0):
    """784 → 64 → 10. `change` makes a module for the pictures, `drop` is the dropout's share."""
    layers = [change(), nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Dropout(drop)]
    return nn.Sequential(*layers, nn.Linear(64, 10)).to(config.device)


def held_out_figures(net):
    return kit.evaluate(net, [held_out], F.cross_entropy)


torch.manual_seed(SEED)
watched = small_network()
optimizer = sgd_of(watched)
history, best, kept = [], math.inf, None
for _ in range(25):
    (training_loss,) = fit(watched, optimizer, *little, epochs=1)
    figures = held_out_figures(watched)
    history.append((training_loss, figures.loss, figures.accuracy))
    if figures.loss < best:
        best, kept = figures.loss, watched.state_dict()

training, validation, right = zip(*history)
lines = {"training": list(training), "validation": list(validation)}
curves(lines, "epoch, from 0 on", "mean loss")
lowest = validation.index(min(validation))
print(f"validation loss: lowest {best:.2f} in epoch {lowest}, at the end {validation[-1]:.2f}")

# %%
predict(
    "From its lowest point to the end the validation loss has risen far. "
    "What has become of the accuracy on the same pictures?",
    run=lambda: right[-1] - right[lowest],
    options={
        "it has fallen as clearly, by ten points or more": lambda gain: gain <= -0.1,
        "it has fallen by some points": lambda gain: -0.1 < gain < -0.02,
        "it has not fallen": lambda gain: gain >= -0.02,
    },
)

# %% tags=["claim-L25", "claim-L42"]
print(f"accuracy in epoch {lowest}: {right[lowest]:.3f}, at the end: {right[-1]:.3f}")
with torch.no_grad():
    chances = watched.eval()(held_out[0]).softmax(dim=1)
sure, said = chances.max(dim=1)
wrong = said != held_out[1]
print(f"of the wrong answers, {(sure[wrong] > 0.9).float().mean():.0%} are given at over 90 %")
assert validation[-1] > 1.05 * best and right[-1] > right[lowest] - 0.02

# %% [markdown]
# The network does not forget what it knew. It becomes *sure*: of what is right, which costs nothing, and of what is wrong, which the cross-entropy punishes hard. So decide first which figure counts for you: the two need not have the same best epoch.
#
# ### Four remedies
#
# The articles name four: **augmentation** (each picture is changed a little whenever it is used), weight decay (section 6), dropout (section 4), and **early stopping** (stop when the validation loss no longer falls, and go back to the best weights). A small turn and a small shift leave a digit's class alone. A transform of `v2` would draw
# one turn for the whole batch (section 3), so here is one that draws for each picture. The upper row is what goes in, four times the same picture; the lower row is what comes out.


# %%
dark = small_x.min().item()


def moved_each(inputs):
    """Each picture turned by up to 11 degrees and shifted by up to 1.75 pixels, on its own."""
    n, home = len(inputs), inputs.device
    angle = 0.4 * torch.rand(n, device=home) - 0.2
    x, y = 0.25 * torch.rand(2, n, device=home) - 0.125  # in halves of the picture's width
    cos, sin = angle.cos(), angle.sin()
    matrices = torch.stack([cos, -sin, x, sin, cos, y], dim=1).view(n, 2, 3)
    grid = F.affine_grid(matrices, inputs.shape, align_corners=False)
    return F.grid_sample(inputs - dark, grid, align_corners=False) + dark


class MovedInTraining(nn.Module):
    def forward(self, inputs):
        return moved_each(inputs) if self.training else inputs


four_times = small_x[:1].expand(4, 1, 28, 28)
before_and_after = torch.stack([four_times, moved_each(four_times)])
shades = (before_and_after - dark) / (small_x.max() - dark)
for row, title in zip(shades, ("in", "out")):
    images([picture[0] for picture in row], [title] * 4, scale=3)

# %% [markdown]
# Now each remedy alone, and as a yardstick four times as many pictures, for a quarter of the epochs. The network is the same, and so is the number of steps, except where training stops early: with `patience=3`, after three epochs in a row without a lower validation loss. The figures are those of the test pictures, which have decided nothing.


# %%
def trained(net, data=little, epochs=12, decay=0.0):
    """Loss and accuracy on the test pictures after these epochs."""
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=decay)
    fit(net, optimizer, *data, epochs=epochs)
    return kit.evaluate(net, [(test_x, test_y)], F.cross_entropy)


def trained_until_it_rises(net):
    optimizer, stopping = sgd_of(net), kit.EarlyStopping(patience=3)
    while not stopping.step(held_out_figures(net).loss, net):
        fit(net, optimizer, *little, epochs=1)
    stopping.restore(net)
    return kit.evaluate(net, [(test_x, test_y)], F.cross_entropy)


four_times_as_many = train_x[:1000], train_y[:1000]
remedies = {
    "none": lambda: trained(small_network()),
    "augmentation": lambda: trained(small_network(change=MovedInTraining)),
    "weight decay 0.02": lambda: trained(small_network(), decay=0.02),
    "dropout 0.5": lambda: trained(small_network(drop=0.5)),
    "early stopping": lambda: trained_until_it_rises(small_network()),
    "1,000 pictures": lambda: trained(small_network(), four_times_as_many, epochs=3),
}

# %% tags=["claim-L25"]
outcomes = {}
for name, run in remedies.items():
    outcomes[name] = []
    for seed in many_seeds:
        torch.manual_seed(seed)
        outcomes[name].append(run())
losses = {name: [o.loss for o in found] for name, found in outcomes.items()}
scores = {name: [o.accuracy for o in found] for name, found in outcomes.items()}
dots(losses.items(), "loss on the test pictures")
dots(scores.items(), "accuracy on the test pictures")
for name in ("augmentation", "weight decay 0.02", "early stopping", "1,000 pictures"):
    assert np.median(losses[name]) < min(losses["none"])

print("on this machine, the median accuracy against that of none, in points:")
points = {name: 100 * np.median(found) for name, found in scores.items()}
print("  ", ", ".join(f"{n} {points[n] - points['none']:+.1f}" for n in points if n != "none"))
print(f"   the seeds of none are {100 * np.ptp(scores['none']):.1f} points apart")

# %% [markdown]
# Three of the four lower the loss clearly: augmentation, weight decay and early stopping. Where dropout stands, see above. The accuracy is another matter: a change smaller than the distance between two seeds says little. Early stopping watches the loss here, whose best epoch need not be that of the accuracy; it saves time. The last row shows what all of this stands in
# for: pictures. With other data, another network, or a decay and a dropout chosen with care, the order may be another.

# %% [markdown]
# ### Back to the best
#
# In the first run of this section the weights with the lowest validation loss were kept: `best, kept = figures.loss, watched.state_dict()`. Time to go back to them.

# %%
watched.load_state_dict(kept)
print(f"lowest validation loss {best:.3f}, after loading {held_out_figures(watched).loss:.3f}")

# %% [markdown]
# No error, and not the best weights.
#
# ### Exercise 10 · The weights of the best epoch (ten minutes)
#
# `epochs` is a generator that trains: each time you ask for the next score, it trains the model in place for one epoch more. When it is through, the model is to be as it was after the best epoch.


# %% tags=["exercise"]
def best_weights(model: nn.Module, epochs) -> float:
    """Go through all scores of `epochs`; leave the model as it was at the best one; return that.

    epochs: a generator of floats, one for each epoch of training, which changes the model in
    place. The highest score is the best, of equal ones the first. A score may be negative, or nan,
    which is never the best; one at least is a number. The model's buffers, such as a BatchNorm's
    running statistics, belong to an epoch's result as its parameters do.

    >>> best_weights(model, epochs)  # where the scores are 0.5, 0.9 and 0.7
    0.9
    """
    ...


# %%
check(best_weights)

# %% [markdown]
# Read on when you have tried. What did `kept` hold?

# %% tags=["claim-L26", "nbval-check-output"]
tiny_model = nn.Linear(1, 1)
kept_dict = tiny_model.state_dict()
copied_dict = copy.deepcopy(tiny_model.state_dict())
stopping = kit.EarlyStopping(patience=2)
for number, loss in enumerate((0.9, 0.5, 0.7, 0.8), start=1):
    with torch.no_grad():
        tiny_model.weight.fill_(number)  # the "training" of this epoch
    if stopping.step(loss, tiny_model):
        break
print("the weight after the last epoch:", tiny_model.weight.item())
print("state_dict() of the beginning says", kept_dict["weight"].item())
assert kept_dict["weight"].data_ptr() == tiny_model.weight.data_ptr()
assert copied_dict["weight"].item() != 4.0

stopping.restore(tiny_model)
print(f"kit.EarlyStopping: best loss {stopping.best}, weight {tiny_model.weight.item()}")
assert tiny_model.weight.item() == 2.0 and kept_dict["weight"].item() == 2.0

# %% [markdown]
# `state_dict()` gives a new dict of the *old* tensors. The optimizer writes into those in place, so "the best" follows the training to its last epoch, and loading it changes nothing. `copy.deepcopy(model.state_dict())` makes numbers of their own. (Saving to a file does, too: lesson 06.) `kit.EarlyStopping` keeps such a copy;
# `restore` writes it back into the model's tensors, which is why `kept_dict`, too, says 2 at the end.

# %% [markdown]
# ## 11 · The same run twice
#
# A result that cannot be had again cannot be examined. *Seeding python, numpy and torch makes a run reproducible,* say the articles. Training draws random numbers for the initial weights, the order of the samples, dropout and augmentation. The numbers come from a **generator**: a state, moved on by each draw. `torch.manual_seed`
# sets the state of torch's global one, from which everything draws that has no generator of its own.
#
# Two runs are the same if their weights are equal to the last bit. A small run, seeded, with a place where something may happen before training:


# %%
def plain_loader(dataset):
    return DataLoader(dataset, batch_size=50, shuffle=True)


def weights_of_a_run(before=lambda: None, loader_for=plain_loader):
    """The weights after one epoch; `before` is called ahead of the training."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(config.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = loader_for(TensorDataset(*little))
    before()
    kit.train_epoch(net, loader, F.cross_entropy, optimizer)
    return net[1].weight.detach()


first_run = weights_of_a_run()


def look_at_validation():
    for _ in DataLoader(TensorDataset(*held_out), 100, shuffle=False):
        pass


# %%
predict(
    "The second run goes once through the validation set before it trains, in order, without "
    "shuffling, without a model. Are its weights those of the first run?",
    run=lambda: torch.equal(first_run, weights_of_a_run(before=look_at_validation)),
    options={
        "yes: nothing random happens there": lambda same: same,
        "no": lambda same: not same,
    },
)

# %% tags=["claim-L28", "claim-L43", "nbval-check-output"]
again = torch.equal(first_run, weights_of_a_run())
one_more = torch.equal(first_run, weights_of_a_run(before=lambda: torch.rand(1)))
validated = torch.equal(first_run, weights_of_a_run(before=look_at_validation))
print("equal to the first run, to the last bit:")
print("  run again:                              ", again)
print("  one random number drawn in between:     ", one_more)
print("  a loader without shuffling gone through:", validated)
assert again and not one_more and not validated

# %% [markdown]
# With the same seed and the same draws, all bits are the same. One draw more, anywhere, and every draw after it is another. And every `DataLoader` draws when it is gone through, also one that does not shuffle: a number to seed its worker processes with, if it had any. So a line that only looks at data changes the order of training.

# %% [markdown]
# ### Exercise 11 · An order of its own (six minutes)
#
# Make a loader whose orders depend on a seed and on nothing else, whatever the rest of the program draws.


# %% tags=["exercise"]
def seeded_loader(dataset, batch_size: int, seed: int) -> DataLoader:
    """A DataLoader that shuffles, in orders that follow from `seed` alone.

    Made again with this seed, it gives the same order in the first epoch, in the second and so on;
    the second differs from the first. All samples come, also where the last batch is smaller. It
    neither depends on torch's global random state nor changes it.

    >>> [len(batch) for batch in seeded_loader(range(5), 2, seed=0)]
    [2, 2, 1]
    """
    ...


# %%
check(seeded_loader)

# %% [markdown]
# Read on when you have tried. With such a loader, the look at the validation set changes nothing:


# %% tags=["claim-L28", "nbval-check-output"]
def own_order(dataset):
    return kit.seeded_loader(dataset, batch_size=50, seed=3)


plain_run = weights_of_a_run(loader_for=own_order)
other_run = weights_of_a_run(before=look_at_validation, loader_for=own_order)
print("equal, to the last bit:", torch.equal(plain_run, other_run))
assert torch.equal(plain_run, other_run)

# %% [markdown]
# The order is safe now, and only the order: dropout would still draw from the global generator, and find it moved.
#
# The toolkit's `kit.seed_everything` seeds Python's, numpy's and torch's global generators, on all devices, and returns a generator for the loader. What does that cover? The runs below shift each batch sideways, and draw the number of pixels in one of four ways.


# %%
def shifted_run(draw, seed_all):
    """Weights after one epoch on batches that are shifted by draw() pixels."""
    generator = seed_all(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).to(config.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for inputs, targets in DataLoader(
        TensorDataset(*little), 50, shuffle=True, generator=generator
    ):
        optimizer.zero_grad()
        shifted = inputs.roll(int(draw()), dims=-1)
        F.cross_entropy(net(shifted), targets).backward()
        optimizer.step()
    return net[1].weight.detach()


def torch_alone(seed):
    torch.manual_seed(seed)  # and no generator for the loader


own_generator = np.random.default_rng(5)
draws = {
    "random.randrange": lambda: random.randrange(28),
    "np.random.randint": lambda: np.random.randint(28),
    "torch.randint": lambda: torch.randint(28, ()),
    "a np.random.default_rng of one's own": lambda: own_generator.integers(28),
}

# %% tags=["claim-L28", "nbval-check-output"]
rows = {}
for name, draw in draws.items():
    rows[name] = [
        torch.equal(shifted_run(draw, seeding), shifted_run(draw, seeding))
        for seeding in (torch_alone, kit.seed_everything)
    ]
table(
    ("the shift is drawn by", "torch.manual_seed: equal bits", "kit.seed_everything: equal bits"),
    [(name, *("yes" if same else "no" for same in row)) for name, row in rows.items()],
)
assert list(rows.values()) == [[False, True], [False, True], [True, True], [False, False]]

# %% [markdown]
# Three generators are global, and the articles' three seeds cover them. What a program makes for itself nobody else can seed: make it anew for each run, from the run's seed.
#
# Are seeds enough? Sums are rounded, and so depend on the order in which they are taken. More threads mean another order; so may another device, another version of PyTorch, or another batch size:

# %% tags=["claim-L28"]
big, one = torch.tensor(1e8), torch.tensor(1.0)
one_way, other_way = ((big + one) - big).item(), ((big - big) + one).item()
print(f"in float32, (big + 1) - big is {one_way}, and (big - big) + 1 is {other_way}")
assert one_way == 0.0 and other_way == 1.0

numbers = torch.rand(1_000_000, generator=torch.Generator().manual_seed(SEED))
threads, sums = torch.get_num_threads(), {}
for count in (1, 2, 4):
    torch.set_num_threads(count)
    sums[count] = numbers.sum().item()
torch.set_num_threads(threads)
differ = "not the same" if len(set(sums.values())) > 1 else "the same"
print(f"on this machine the sum of a million numbers is {differ} on 1, 2 and 4 threads:")
print("  ", sums)

in_a_batch, alone = any_size(test_x[:50])[:1], any_size(test_x[:1])
apart = (in_a_batch - alone).abs().max().item()
print(f"scores of one picture, in a batch of 50 and alone: up to {apart:.1g} apart")

# %% [markdown]
# Differences in the last bit grow in training, since each step starts from the one before. So equal bits need the same machine, the same versions and the same number of threads. And some operations give another result from call to call, because their order is left open, on a GPU above all.
# After `torch.use_deterministic_algorithms(True)` PyTorch takes another algorithm where there is one, and refuses where there is none:

# %% tags=["claim-L28"]
torch.use_deterministic_algorithms(True)
with raises(RuntimeError):  # two values for one place: which of them will stay?
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
torch.use_deterministic_algorithms(False)

# %% [markdown]
# `kit.seed_everything(seed, deterministic=True)` sets it, and forbids cuDNN to choose its algorithms by timing. What it cannot promise is in its docstring; `help(kit.seed_everything)` shows it. Worker processes have generators of their own: lesson 05.

# %% [markdown]
# ## 12 · What the run leaves behind
#
# A run that you only watch is gone when the cell scrolls away. **TensorBoard** is a viewer for what runs have written: the loop writes numbers into an *event file* as it goes, and a web page draws them, also those of several runs in one picture.
# Writing is one object, `SummaryWriter`, and `train_epoch` calls your function after every step.

# %%
from torch.utils.tensorboard import SummaryWriter

from course_utils.recipes import FINAL, Recipe, convnet, perceptron, race, sgd

log_dir = tempfile.mkdtemp(prefix="runs_")  # in a project of your own: runs/ and a name


def logged_run(log_dir, epochs=4):
    """Train on the small set and log every step; the model, and the loss of each step."""
    torch.manual_seed(SEED)
    model = convnet().to(config.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(small_x, small_y), config.batch, shuffle=True)
    history, step = [], itertools.count()
    with SummaryWriter(log_dir) as writer:

        def note(_, loss, rate, norm):
            at = next(step)
            history.append(loss)
            writer.add_scalar("train/loss", loss, at)
            writer.add_scalar("train/rate", rate, at)
            writer.add_scalar("train/gradient norm", norm, at)

        for _ in range(epochs):
            kit.train_epoch(  # max_norm=math.inf: measure the norm, clip nothing
                model, loader, F.cross_entropy, optimizer, max_norm=math.inf, on_step=note
            )
            writer.add_scalar("test/accuracy", accuracy(model), len(history))
            writer.add_histogram("first convolution", model[0].weight, len(history))
    return model, history


logged_model, losses_seen = logged_run(log_dir)
print(len(losses_seen), "steps; the last loss:", round(losses_seen[-1], 3))

# %% [markdown]
# To look at it, run this command in a terminal, in the environment of this course, and open the address that it prints. It can run while the training does.

# %%
print(f"tensorboard --logdir {log_dir}")

# %% [markdown]
# The file is not only for the viewer. `EventAccumulator` reads it back, so that a notebook can compare runs, and so that you can see what was really written.

# %% tags=["claim-P03"]
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(log_dir, size_guidance={"scalars": 0}).Reload()  # 0: all of them
print("numbers:", events.Tags()["scalars"])
print("histograms:", events.Tags()["histograms"])
written = events.Scalars("train/loss")
assert [event.step for event in written] == list(range(len(losses_seen)))
assert [event.value for event in written] == [float(np.float32(loss)) for loss in losses_seen]

last = events.Histograms("first convolution")[-1].histogram_value
weights = logged_model[0].weight
print(f"first convolution: {last.num:.0f} weights from {last.min:.3f} to {last.max:.3f}")
assert last.num == weights.numel() and math.isclose(last.max, weights.max().item(), rel_tol=1e-6)
curves({"training loss": [event.value for event in written]}, "step", "cross-entropy", log=True)

# %% [markdown]
# Two things to know. Numbers are stored as float32: of a float64, about seven digits come back. And a reader keeps only a sample of a long series unless you say otherwise, as `size_guidance` does above; the viewer thins out, too. What you need exactly, keep yourself.

# %% [markdown]
# ## 13 · 98 % in seconds
#
# Everything is there: the modes, the rate and its schedule, the groups, the seed. Here is the loop that the lesson has been growing, whole, on all 4,000 training digits. The network has three blocks of convolution, pooling, BatchNorm and ReLU, and a linear layer at the end.


# %%
def trained_network(x, y, make_model, rate=0.01, epochs=config.epochs, seed=SEED):
    """A model trained on the images, by AdamW and one cycle of the rate."""
    torch.manual_seed(seed)
    model = make_model().to(config.device)
    optimizer = torch.optim.AdamW(kit.parameter_groups(model, weight_decay=0.05), lr=rate)
    steps = epochs * math.ceil(len(x) / config.batch)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x), device=x.device).split(config.batch):
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()  # its unit is the batch: total_steps counts batches
    return model


# %%
began = time.perf_counter()
final_model = trained_network(train_x, train_y, convnet)
seconds = time.perf_counter() - began
share = accuracy(final_model, test_x, test_y)
print(f"{share:.1%} of {len(test_x):,} test images, after {seconds:.1f} s on this machine")
assert share > 0.97

# %% [markdown]
# Many introductions begin with linear layers, SGD at a rate of 0.001 and images from 0 to 1. What makes the difference? There are two ways to be faster: fewer steps, and cheaper ones. One change of the second kind first. The articles put BatchNorm and ReLU behind the convolution and pool at the end. In the network above, pooling comes first.

# %%
some_maps = torch.randn(50, 16, 28, 28)

# %%
predict(
    "Max pooling keeps the largest of four neighbours. What is `relu(max_pool(maps))` beside "
    "`max_pool(relu(maps))`?",
    run=lambda: torch.equal(F.relu(F.max_pool2d(some_maps, 2)), F.max_pool2d(F.relu(some_maps), 2)),
    options={
        "other numbers: the order of two operations matters": lambda same: same is False,
        "the same numbers, and ReLU has a quarter of the work": lambda same: same is True,
    },
)

# %% tags=["claim-L45", "nbval-check-output"]
norm = nn.BatchNorm2d(16)
pooled = F.max_pool2d(some_maps, 2)
relu_may = torch.equal(F.relu(pooled), F.max_pool2d(F.relu(some_maps), 2))
norm_may = torch.allclose(norm(pooled), F.max_pool2d(norm(some_maps), 2), atol=1e-3)
print(f"ReLU and pooling may change places: {relu_may};  BatchNorm and pooling: {norm_may}")
assert relu_may and not norm_may

# %% [markdown]
# Of two numbers ReLU never makes the smaller one the larger, so the largest of four stays the largest. BatchNorm, in train mode, takes its mean and spread over all numbers of a channel, and after pooling those are other numbers, so the network is another. Whether it learns as well is for the measurement.
#
# Now the ladder. Each line adds one change to the line before; the last change is the recipe above, several things at once. Every line but the last has a fifth of the time that the whole loop took, so whoever has cheaper steps gets more of them. (The ladder runs on the CPU.)


# %%
def pooled_last():
    return convnet(pool_first=False)


ladder = {
    "linear layers, SGD 0.001, images from 0 to 1": Recipe(perceptron, sgd(0.001), 64, False),
    "rate 0.1": Recipe(perceptron, sgd(0.1), 64, False),
    "images normalised": Recipe(perceptron, sgd(0.1), 64),
    "three blocks of convolution and BatchNorm": Recipe(pooled_last, sgd(0.1), 64),
    "pooling first": Recipe(convnet, sgd(0.1), 64),
    "the recipe above, cut off": FINAL,
}
allowed = seconds / 5
runs = {name: race(recipe, digits, allowed, every=10**6) for name, recipe in ladder.items()}
rows = [(name, run.seconds, run.steps, run.accuracy) for name, run in runs.items()]
rows.append(("the recipe above, to its end", seconds, len(train_x) * 3 // 50, share))
table(
    ("change", "time, s", "steps", "ms a step", "test images right, %"),
    [
        (name, round(took, 1), steps, round(1000 * took / steps, 1), round(100 * right, 1))
        for name, took, steps, right in rows
    ],
)

# %%
gains = {row[0]: row[3] - before[3] for before, row in zip(rows, rows[1:-1])}
most = max(gains, key=gains.get)
per_step = {name: took / steps for name, took, steps, _ in rows}
dearer = per_step["three blocks of convolution and BatchNorm"] / per_step["images normalised"]
cheaper = per_step["three blocks of convolution and BatchNorm"] / per_step["pooling first"]
print(f"On this machine the largest gain is that of: {most} ({100 * gains[most]:+.0f} points).")
print(f"With convolutions a step costs {dearer:.1f} times as much; pooling last costs", end=" ")
print(f"{cheaper:.1f} times as much as pooling first.")

# %% [markdown]
# A rate a hundred times as high costs no time, and normalising next to none. The convolutions have to win back what their steps cost more; pooling first saves BatchNorm and ReLU three quarters of their numbers, which so short a timing need not show. The one cycle is a plan for a whole run: compare its two lines. The rate climbs for the first 30 % of the steps, and the run that is cut off ends on the way up.
#
# The order matters: an early change leaves less to win for those after it. Try your own, one change at a time:

# %%
mine = Recipe(convnet, sgd(0.2), batch=32)
race(mine, digits, allowed, every=10**6)

# %% [markdown]
# ### Other images
#
# One more question about the final model. It has seen bright ink on a dark ground.

# %%
inverted = prepared(255 - digits.test_images)
images([test_x[0, 0].cpu().sigmoid(), inverted[0, 0].cpu().sigmoid()], ["as trained", "inverted"])

# %%
predict(
    f"The final model gets {share:.0%} of the test digits right. And of the same digits, inverted?",
    run=lambda: accuracy(final_model, inverted, test_y),
    options={
        "about as many: the shapes are the same": lambda share: share > 0.9,
        "somewhat fewer, 60 to 90 %": lambda share: 0.6 <= share <= 0.9,
        "fewer than 60 %": lambda share: share < 0.6,
    },
)

# %% tags=["claim-L46"]
upside_down = accuracy(final_model, inverted, test_y)
print(f"inverted digits right: {upside_down:.0%} (guessing would give about 10 %)")
assert upside_down < 0.6

# %% [markdown]
# A figure on held-out images speaks of images of that kind. On the coloured digits of section 3, ink and ground have random colours, and which of the two is brighter is a matter of chance. The same loop, with three channels, each normalised by itself, learns that too, here from a quarter of the images:

# %%
colour_test_x = (colour.test_images / 255).to(config.device)
quarter_x = (colour_x[:1000] - channel_mean) / channel_std
colour_model = trained_network(quarter_x, colour_y[:1000], lambda: convnet(channels=3))
colour_test_y = colour.test_labels.to(config.device)
colour_share = accuracy(colour_model, (colour_test_x - channel_mean) / channel_std, colour_test_y)
print(f"{colour_share:.1%} of the coloured test digits")
assert colour_share > 0.9

# %% [markdown]
# ## 14 · Little data: transfer
#
# Ten images of each class are few. But perhaps there is a network that has learned from many images of *other* classes. **Transfer** uses it: what its early layers have learned, perhaps edges and strokes, may serve for the new classes too. The articles give the recipe: replace the last layer, freeze the rest, train the new layer; then *fine-tune*: let the rest train as well, at a smaller rate.
#
# To see what it is worth, the network below learns the digits 0 to 4, from 2,000 images. The digits 5 to 9 are the new task.

# %%
low = train_y < 5
pretrained = trained_network(train_x[low], train_y[low], lambda: convnet(classes=5), epochs=2)
low_test = test_y < 5
low_share = accuracy(pretrained, test_x[low_test], test_y[low_test])
print(f"digits 0 to 4: {low_share:.1%} of the test images right")

# %% [markdown]
# ### Exercise 12 · A new head (ten minutes)
#
# The first half of the recipe as a function. Mind what freezing does not hold:

# %% tags=["claim-L32", "nbval-check-output"]
frozen_norm = nn.BatchNorm1d(1).requires_grad_(False)
for batch in torch.full((3, 8, 1), 100.0):
    frozen_norm(batch)
for name, tensor in frozen_norm.state_dict().items():
    print(f"{name:20} {tensor.flatten().tolist()}")
assert frozen_norm.running_mean.item() > 20

# %% [markdown]
# `requires_grad` is a matter of parameters. A BatchNorm in train mode uses the batch's mean and spread, and moves its running ones (section 4).


# %% tags=["exercise"]
def transfer_head(model, classes):
    """Make of a trained classifier one for other classes, in place: everything frozen except a new
    last nn.Linear, with the old one's number of inputs. Returns the new layer's parameters, a list.

    The last Linear is the last in the order of model.named_modules(); it may lie inside other
    modules, and a new one is put there also where the number of classes stays. BatchNorm layers
    work in eval mode from now on, also after model.train(): they normalise with the running
    statistics in both modes, and these do not move.
    """
    ...


# %%
check(transfer_head)

# %% [markdown]
# Now the comparison, with two and with ten images a class, each over five draws of the images: *from scratch*, a new network trained on the few images alone; *frozen*, the new head on the pretrained network; *fine-tuned*, the frozen one trained on with all its layers, for 20 more steps at a tenth of the rate. The toolkit's `kit.transfer_head` is the exercise.


# %%
def few(each, seed):
    """That many training images of each of the classes 5 to 9, numbered 0 to 4."""
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for digit in range(5, 10):
        places = (train_y.cpu() == digit).nonzero().flatten()
        chosen.append(places[torch.randperm(len(places), generator=generator)[:each]])
    chosen = torch.cat(chosen).to(config.device)
    return train_x[chosen], train_y[chosen] - 5


def tuned(model, parameters, x, y, rate, steps=20):
    """Train these parameters on all of the few images at once."""
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.05)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return model


def transferred(each, seed):
    """Test accuracy on the digits 5 to 9, by each of the three ways."""
    torch.manual_seed(seed)
    x, y = few(each, seed)
    new = test_x[~low_test][:250], test_y[~low_test][:250] - 5
    scratch = convnet(classes=5).to(config.device)
    share = {"from scratch": accuracy(tuned(scratch, scratch.parameters(), x, y, 0.01), *new)}
    model = copy.deepcopy(pretrained)
    share["frozen"] = accuracy(tuned(model, kit.transfer_head(model, 5), x, y, 0.01), *new)
    model.requires_grad_(True)  # and then all of it
    share["fine-tuned"] = accuracy(tuned(model, model.parameters(), x, y, 0.001), *new)
    return share


# %% tags=["claim-L32"]
by_size = {each: [transferred(each, seed) for seed in range(5)] for each in (2, 10)}
dots(
    [
        (f"{each} a class, {way}", [100 * share[way] for share in shares])
        for each, shares in by_size.items()
        for way in ("from scratch", "frozen", "fine-tuned")
    ],
    "test images of the digits 5 to 9 right, %",
)
for each, shares in by_size.items():
    won = [share["frozen"] - share["from scratch"] for share in shares]
    more = [share["fine-tuned"] - share["frozen"] for share in shares]
    won_range = f"{100 * min(won):+.0f} to {100 * max(won):+.0f} points"
    print(f"{each} a class: frozen is ahead of scratch by {won_range};", end=" ")
    print(f"fine-tuning adds {100 * min(more):+.0f} to {100 * max(more):+.0f}")
    assert sum(won) > 0

# %% [markdown]
# Compare the two lines: in these 20 steps the borrowed features are worth more with two images a class than with ten, where longer training brings the new network nearer. The second half of the recipe is another matter: look at the last figures of each line. With so few images and a new task so near the old one, training the rest as well brings little or nothing here. With more images, or with ones less like those of the first task, it may: measure it, with several draws, as above.

# %% [markdown]
# ### With a published network
#
# On real tasks the pretrained network is one that others have published. The same function prepares it. With `PUBLISHED = True` the cell fetches the weights of a ResNet-18 (45 MB, from the internet). As it stands, the network is untrained, and the cell shows what would train. Weights come with a preparation of the images that belongs to them.

# %%
from torchvision.models import ResNet18_Weights, resnet18

PUBLISHED = False
published_weights = ResNet18_Weights.DEFAULT if PUBLISHED else None
published = resnet18(weights=published_weights).to(config.device)
head = kit.transfer_head(published, classes=5)
print("trains:", [name for name, p in published.named_parameters() if p.requires_grad])
everything = sum(p.numel() for p in published.parameters())
print(f"{sum(p.numel() for p in head):,} numbers of {everything:,}")

prepare = ResNet18_Weights.DEFAULT.transforms()  # its size, its mean and its standard deviation
print(prepare)
four = prepare(colour.train_images[:4]).to(config.device)
with torch.no_grad():
    print("images in, classes out:", tuple(four.shape), tuple(published(four).shape))

# %% [markdown]
# ## Clinic
#
# Eight programs that are wrong, each reduced from a failure that someone reported. Each of them runs and ends with a plausible figure; none raises, none warns. You see the symptom as its user saw it. Find the cause, repair the function, check it.
#
# The programs run on the CPU, on digits as flat rows of 784 numbers.

# %%
clinic_x, clinic_y = train_x[:1500].flatten(1).cpu(), train_y[:1500].cpu()
few_x, few_y = clinic_x[:500], clinic_y[:500]
clinic_test = test_x.flatten(1).cpu(), test_y.cpu()

# %% [markdown]
# ### Clinic 1 · Eights everywhere
#
# The images come from two sources: one delivers eights, 8 at a time, the other one all other digits, 56 at a time. Two batches together make the 64 images for which the rate was chosen, so gradients are accumulated over two batches for each step. One in eight of the training images is an eight. The network learns, and sees
# many eights that are none.


# %% tags=["exercise", "clinic"]
def accumulate_epoch(model, batches, optimizer, window):
    """Train in one pass over a list of batches (inputs (n, D), targets (n,)); the number of steps.

    There is a step after every `window` batches, and one for the fewer batches that may be left at
    the end. A step's gradient is that of the mean cross-entropy over all samples of its window, in
    whatever batch they came. Gradients from before the call take part in no step.
    """
    model.train()
    optimizer.zero_grad()
    steps = 0
    for i, (inputs, targets) in enumerate(batches):
        loss = F.cross_entropy(model(inputs), targets)
        (loss / window).backward()
        if (i + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


# %%
torch.manual_seed(SEED)
eight = clinic_y == 8
from_one = zip(clinic_x[eight].split(8), clinic_y[eight].split(8))
from_other = zip(clinic_x[~eight].split(56), clinic_y[~eight].split(56))
stream = [batch for pair in zip(from_one, from_other) for batch in pair][:29]
linear = mlp(784, 10).cpu()
optimizer = torch.optim.SGD(linear.parameters(), lr=0.01, momentum=0.9)
steps = [accumulate_epoch(linear, stream, optimizer, window=2) for _ in range(3)]
said = linear(clinic_test[0]).argmax(dim=1)
print(f"{(said == clinic_test[1]).float().mean().item():.0%} of the test images right")
print(f"it says eight {(said == 8).sum().item()} times; {(clinic_test[1] == 8).sum().item()} are")
print(f"steps in each pass over the {len(stream)} batches: {steps}")

# %%
check(accumulate_epoch)

# %% [markdown]
# ### Clinic 2 · The head that nobody touched
#
# A network for the digits 0 to 4 has two parts. The *backbone* makes 64 numbers, the features, of an image; the *head*, a linear layer, makes scores of them. Now all parameters of the backbone are frozen, and a second head on it learns the digits 5 to 9, from pictures with more contrast. The new head does well. The old head
# took no part in this, and its pictures are the same as before. It does worse.


# %% tags=["exercise", "clinic"]
def train_head(backbone, inputs, targets, classes, steps=60):
    """A new nn.Linear from the backbone's features (N, width) to (N, classes), trained on inputs.

    The backbone's parameters are frozen, and it is left as it was: parameters, buffers, and the
    mode of each of its parts, train or eval. Afterwards backbone and head are used in eval mode.
    There the head gets 90 % of its training samples right, if the classes lie apart.
    """
    with torch.no_grad():
        width = backbone(inputs).shape[1]
    head = nn.Linear(width, classes)
    model = nn.Sequential(backbone, head)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    for _ in range(steps):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return head


# %%
torch.manual_seed(SEED)
low, is_low = few_y < 5, clinic_test[1] < 5
backbone = nn.Sequential(nn.Linear(784, 64), nn.BatchNorm1d(64), nn.ReLU())
old = nn.Sequential(backbone, nn.Linear(64, 5))
fit(old, torch.optim.Adam(old.parameters(), lr=0.003), few_x[low], few_y[low], epochs=8)
backbone.requires_grad_(False).eval()


def contrasted(pictures):
    return 1.5 * pictures + 0.3


# %%
before, after = old, copy.deepcopy(old)  # copies, so that this cell can be run again
shared = after[0]
new = nn.Sequential(shared, train_head(shared, contrasted(few_x[~low]), few_y[~low] - 5, 5))
new_test = contrasted(clinic_test[0][~is_low]), clinic_test[1][~is_low] - 5
print(f"new head, digits 5 to 9: {accuracy(new, *new_test):.0%} of the test images right")
old_test = clinic_test[0][is_low], clinic_test[1][is_low]
for when, model in (("before:", before), ("after: ", after)):
    print(f"old head, digits 0 to 4, {when} {accuracy(model, *old_test):.0%}")
same = all(torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters()))
print("all parameters of backbone and old head as before:", same)

# %%
check(train_head)

# %% [markdown]
# ### Clinic 3 · A gradient that does not fade
#
# A network trained on the digits 0 to 4 gets a new head for all ten, and the whole of it is trained further. The loss falls, and the accuracy is within a few percent of what was expected. One column of the log is hard to believe: where a loss comes to rest, the gradients go towards 0.


# %% tags=["exercise", "clinic"]
def attach_and_train(model, head, inputs, targets, steps=80):
    """The loss at the last step, a float: `head` is put in the place of the last layer, model[-1],
    and all of the model, the head included, is trained for `steps` steps on all inputs.

    model: an nn.Sequential; inputs (N, D), targets (N,). Afterwards model[-1] is the head given.
    A loss below 0.2 at the end is within reach, if the classes lie apart.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[-1] = head
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


# %%
torch.manual_seed(SEED)
five = mlp(784, 32, 5).cpu()
optimizer = torch.optim.SGD(five.parameters(), lr=0.05, momentum=0.9)
fit(five, optimizer, few_x[few_y < 5], few_y[few_y < 5])


def gradient_norm(layer):
    return 0.0 if layer.weight.grad is None else layer.weight.grad.norm().item()


# %%
log = []
for steps in (10, 20, 40):
    model, head = copy.deepcopy(five), nn.Linear(32, 10)
    loss = attach_and_train(model, head, few_x, few_y, steps)
    norms = [round(gradient_norm(layer), 2) for layer in (model[1], head)]
    log.append((steps, round(loss, 2), f"{accuracy(model, *clinic_test):.0%}", *norms))
gradients = "norm of the first layer's gradient", "of the head's gradient"
table(("steps", "loss", "test images right", *gradients), log)

# %%
check(attach_and_train)

# %% [markdown]
# ### Clinic 4 · Five readings
#
# The network is trained, and then measured on the same test images five times, with the lesson's `accuracy`, which switches to eval mode and back. Nothing is trained in between.


# %% tags=["exercise", "clinic"]
def dropout_network(features, hidden, classes):
    """A module of linear layer, ReLU, dropout of one half, linear layer: (N, features) to
    (N, classes). Its parameters are those of the two linear layers.

    In train mode dropout is active, in eval mode it is not, whether or not a graph is recorded. On
    average over what is dropped, the outputs of train mode are those of eval mode.
    """

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(features, hidden)
            self.last = nn.Linear(hidden, classes)

        def forward(self, x):
            x = F.relu(self.first(x))
            x = F.dropout(x, 0.5)
            return self.last(x)

    return Network()


# %%
torch.manual_seed(SEED)
net = dropout_network(784, 64, 10)
fit(net, torch.optim.AdamW(net.parameters(), lr=0.003), few_x, few_y)
for reading in range(1, 6):
    print(f"reading {reading}: {accuracy(net, *clinic_test):.1%} of the test images right")

# %%
check(dropout_network)

# %% [markdown]
# ### Clinic 5 · One model, four scores
#
# Of 910 test images ten are eights. The share of right answers would hardly show whether a network recognises them. So its score is the mean of ten shares: that of the zeros that it gets right, that of the ones, and so on. Here is the score of one trained network, on the same 910 images each time:


# %% tags=["exercise", "clinic"]
def balanced_accuracy(model, loader):
    """Mean over the classes of the share of a class's samples that the model gets right, a float.

    loader: batches (inputs, targets (n,) int64), of any sizes, the samples in any order. Each class
    that occurs in the loader counts alike, and one that does not occur is left out. The model is in
    eval mode and gives (n, classes); the class with the largest output is its answer.
    """
    scores = []
    for inputs, targets in loader:
        with torch.no_grad():
            hit = model(inputs).argmax(dim=1) == targets
        shares = [hit[targets == c].float().mean().item() for c in targets.unique()]
        scores.append(sum(shares) / len(shares))
    return sum(scores) / len(scores)


# %%
torch.manual_seed(SEED)
common = torch.cat([(few_y != 8).nonzero(), (few_y == 8).nonzero()[:6]]).flatten()
rare = torch.cat([(clinic_test[1] != 8).nonzero(), (clinic_test[1] == 8).nonzero()[:10]]).flatten()
rare = rare[torch.randperm(len(rare))]
biased = mlp(784, 64, 10).cpu()
fit(biased, torch.optim.AdamW(biased.parameters(), lr=0.003), few_x[common], few_y[common])
biased.eval()
rare_images = TensorDataset(clinic_test[0][rare], clinic_test[1][rare])
for batch_size in (1, 10, 100, 1000):
    score = balanced_accuracy(biased, DataLoader(rare_images, batch_size))
    print(f"batches of {batch_size:4}: {score:.1%}")

# %%
check(balanced_accuracy)

# %% [markdown]
# ### Clinic 6 · The log of the rate
#
# The rate is to fall along half a cosine, from 0.2 to nearly 0. The log shows it at the start of each epoch: with batches of 30 images it falls as it should. Then someone changes the size of the batches, and nothing else.


# %% tags=["exercise", "clinic"]
def train_with_cosine(model, loader, epochs, rate):
    """The learning rate that each step used: a list of epochs * len(loader) floats.

    Trains the model for `epochs` epochs. The first step uses `rate`. From there the rate falls,
    with each batch or with each epoch, along half a cosine to about 0 at the end of the run, and
    never rises.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    rates = []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


# %%
for batch_size in (30, 50):
    torch.manual_seed(SEED)
    model = mlp(784, 32, 10).cpu()
    loader = DataLoader(TensorDataset(few_x, few_y), batch_size, shuffle=True)
    rates = train_with_cosine(model, loader, epochs=8, rate=0.2)
    print(f"batches of {batch_size}: {accuracy(model, *clinic_test):.0%} of the test images right")
    print("  rate at the start of each epoch:", [round(r, 3) for r in rates[:: len(loader)]])

# %%
check(train_with_cosine)

# %% [markdown]
# ### Clinic 7 · Deeper and worse
#
# A network of any depth, made from a list of widths. With one hidden layer it is not bad. With a second one of the same width it is worse, and so begins a search for a better rate and more epochs.


# %% tags=["exercise", "clinic"]
def deep_network(sizes):
    """A module of linear layers, sizes[0] → sizes[1] → …, with a ReLU after each but the last;
    two sizes make one linear layer. (N, sizes[0]) to (N, sizes[-1]).

    Every weight and bias of every layer can be trained through parameters(), gets a gradient, and
    follows when the module moves to another dtype or device.
    """

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = [nn.Linear(a, b) for a, b in zip(sizes[:-2], sizes[1:-1])]
            self.last = nn.Linear(sizes[-2], sizes[-1])

        def forward(self, x):
            for layer in self.hidden:
                x = F.relu(layer(x))
            return self.last(x)

    return Network()


# %%
torch.manual_seed(SEED)
scores, given = [], []
for widths in ([784, 256, 10], [784, 256, 256, 10]):
    net = deep_network(widths)
    adam = torch.optim.AdamW(net.parameters(), lr=0.003)
    fit(net, adam, few_x, few_y)
    scores.append(f"{accuracy(net, *clinic_test):.0%}")
    given.append(sum(p.numel() for group in adam.param_groups for p in group["params"]))
print(f"test images right: one hidden layer {scores[0]}, two hidden layers {scores[1]}")
print(f"one hidden layer:  the optimizer was given parameters of {given[0]:,} numbers in all")
print(f"two hidden layers: the optimizer was given parameters of {given[1]:,} numbers in all")

# %%
check(deep_network)

# %% [markdown]
# ### Clinic 8 · Sure and not satisfied
#
# A linear classifier tells the digits 4, 7 and 9 apart, and returns probabilities. It gets nearly all of its training images right, with probabilities near 1. The loss, about half of what guessing costs, does not go with that, and twice as many steps do not lower it.


# %% tags=["exercise", "clinic"]
def fit_probabilities(inputs, targets, classes, steps=100):
    """(probabilities, loss) of a linear classifier after `steps` steps of training on all inputs.

    inputs (N, D), targets (N,) int64. probabilities (N, classes): what the trained classifier gives
    the inputs; each row adds up to 1. loss: a float, the mean of -log(probability of the target),
    which is the cross-entropy, at the last step. Training minimises it, as far as the steps reach.
    """
    model = nn.Sequential(nn.Linear(inputs.shape[1], classes), nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model(inputs).detach(), loss.item()


# %%
chosen = torch.isin(few_y, torch.tensor([4, 7, 9]))
three_x, three_y = few_x[chosen], torch.searchsorted(torch.tensor([4, 7, 9]), few_y[chosen])
for steps in (100, 200):
    torch.manual_seed(SEED)
    probabilities, loss = fit_probabilities(three_x, three_y, 3, steps)
    right = (probabilities.argmax(dim=1) == three_y).float().mean().item()
    of_target = probabilities[range(len(three_y)), three_y].mean().item()
    print(f"{steps} steps: {right:.1%} right, mean probability of the right digit {of_target:.3f}")
    print(f"  loss {loss:.3f}; a classifier that says 1/3 to all would have {math.log(3):.3f}")

# %%
check(fit_probabilities)

# %% [markdown]
# ### When you have tried
#
# Read on when you have. Where these failures were reported: (1) huggingface/transformers#34191, karpathy/nanochat#59; (2) pytorch/pytorch#86590, pgniewko/gt-pyg#112; (3) pytorch/pytorch#54765; (4) pytorch/pytorch#26338; (5) huggingface/transformers#41898, mlcommons/training#89; (6) ScrollPrize/villa#1495; (7) pytorch/pytorch#1053;
# (8) Lightning-Universe/lightning-bolts#654.
#
# How much of it does `kit.examine` name before the first step? It gets a model, data, a loss and an optimizer. Below are those of clinics 2, 3, 4, 7 and 8, made smaller, as they were before any repair, and a sound classifier, which stands for 1, 5 and 6: what was wrong there was not in these four things.


# %%
class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(784, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).relu(), 0.5))


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.last = [nn.Linear(784, 16)], nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.hidden[0](x).relu())


# %% tags=["claim-L44", "nbval-check-output"]
torch.manual_seed(SEED)
sound, doubled = nn.Linear(784, 10), nn.Sequential(nn.Linear(784, 10), nn.Softmax(dim=1))
frozen = nn.Sequential(nn.Linear(784, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))
frozen[:3].requires_grad_(False)
replaced = nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 5))
setups = {"1, 5, 6": sound, "2": frozen, "3": replaced, "4": Dropping(), "7": Listing()}
setups["8"] = doubled
for number, model in setups.items():
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    if model is replaced:
        replaced[-1] = nn.Linear(16, 10)
    findings = kit.examine(model, [(few_x, few_y)], F.cross_entropy, optimizer)
    print(f"clinic {number:7}", ", ".join(finding.name for finding in findings) or "nothing found")
    assert len(findings) == (model is not sound)

# %% [markdown]
# Five of eight, each by its name. The other three are wrong in the loop: in how the batches of a window are weighed, in how figures are averaged, in the unit of a scheduler. `examine` does not run your loop and cannot see it. There you compare: one step with that of one large batch, a figure with the same figure at another batch size, the rates of a run
# with those of `kit.lr_trace`.

# %% [markdown]
# ## What you take with you
#
# **Your toolkit**, in `course_utils.toolkit.training`: `train_epoch` and `evaluate`, which return an `Epoch`; `correct_predictions`, `accumulated_step`, `clip_and_step`, `parameter_groups`, `unoptimized`, `lr_trace`, `he_init_`, `transfer_head`, `seed_everything`, `seeded_loader`, `EarlyStopping`, `overfit_one_batch`, and `examine`.
# For a project of your own, before the first epoch: put your model, loader, loss and optimizer in the place of these.

# %% tags=["nbval-check-output"]
model = mlp(784, 64, 10)
loader = kit.seeded_loader(TensorDataset(small_x, small_y), config.batch, SEED)
optimizer = torch.optim.AdamW(kit.parameter_groups(model, weight_decay=0.05), lr=0.003)
print(kit.examine(model, loader, F.cross_entropy, optimizer))

# %% [markdown]
# | symptom | cause | test | cure |
# | --- | --- | --- | --- |
# | the training loss does not fall, and you do not know why | any of those below | `kit.overfit_one_batch`, `kit.examine` | what the finding says; without one, change one thing at a time |
# | the loss jumps up and down, or becomes nan | the rate is too large; now and then a gradient explodes | a grid of rates; the norms from `train_epoch(max_norm=math.inf)` | a rate ten times smaller; a `max_norm` |
# | the loss comes to rest far above 0, though the answers are right | softmax twice | the floor, `math.log1p((classes - 1) / math.e)`; `examine` | give the loss the scores as they leave the last layer |
# | a layer ends as it began | the optimizer does not hold it: replaced too late, or kept in a plain list | `kit.unoptimized` for the first, `print(model)` for the second, `examine` for both | make the optimizer last; `nn.ModuleList` |
# | a deep network stands still from its first step on | signals fade or grow from layer to layer | the spread of the activations by layer | `kit.he_init_`, BatchNorm |
# | units answer 0 to every sample, and stay so | a step that was too large has killed them | `(activations <= 0).all(dim=0)` | a smaller rate; LeakyReLU |
# | another figure at each call in eval mode | dropout that knows no mode | call it twice; `examine` | `nn.Dropout`, or `training=self.training` |
# | the figures are worse in use than in training | train mode; inputs without the training's normalisation | `model.training`; mean and spread of the inputs | `kit.evaluate`; one function that prepares inputs, for both |
# | a frozen part drifts | BatchNorm's running statistics move in train mode | `state_dict()` before and after; `examine` | `eval()` for that part after each `train()`; `kit.transfer_head` |
# | accumulated and large batches give different runs | a mean of means; the last window; BatchNorm | the gradients of one step of each | weigh by samples: `kit.accumulated_step`, `train_epoch(accumulate=…)` |
# | a figure depends on the size of the batches | the batches' figures are averaged | compute it with two batch sizes | add up sums and counts, divide at the end |
# | the rate rises again, hardly falls, or ends high | the horizon counts one unit, the calls another | `kit.lr_trace`, `epoch.learning_rates` | one unit for both: `step_per=` |
# | the training loss falls, the validation loss rises | overfitting | both in one figure | more data, augmentation, weight decay, dropout; `kit.EarlyStopping` |
# | the same seed, another run | a generator without a seed; one random number more or less | compare the weights bit by bit | `kit.seed_everything`, `kit.seeded_loader` |
#
# **What the articles say, and what you have seen**
#
# | claim | verdict |
# | --- | --- |
# | linear regression by hand recovers w = 3 and b = 1 (L01) | holds |
# | `zero_grad` at the end of the loop is equivalent (L02) | until a `continue` skips it |
# | without `zero_grad` the result is completely wrong (L03) | it is SGD with a momentum that nothing damps |
# | accumulation needs the loss divided by the number of steps (L04) | exact for equal pieces and a mean loss; else each piece enters with its share of what the loss averages over |
# | forgetting to divide changes the learning rate (L05) | for SGD; Adam hardly notices, unless it has a `weight_decay` |
# | BatchNorm sees the micro-batches (L06) | holds |
# | `if (i + 1) % k == 0: step()` (L07) | the last, shorter window is dropped or leaks into the next epoch |
# | schedulers step once an epoch in new versions (L08) | no: they count calls, and horizon and calls need one unit |
# | `scheduler.step()` at the wrong place skews the curve (L09) | holds; PyTorch warns where it comes before the first `optimizer.step()` |
# | `train()` and `eval()` must be switched (L10) | holds |
# | `running_loss / len(loader)` is the epoch's loss (L11) | only where all batches have one size |
# | `torch.max(outputs, dim=1)` gives the classes (L12); `CrossEntropyLoss` contains softmax (L13) | hold |
# | L1 resists outliers better than L2 (L14) | holds for outliers in the targets, not for those in the inputs (L36) |
# | `weight_decay` is L2 regularisation (L15) | in SGD and Adam; AdamW's is decoupled |
# | Adam converges fast, SGD with momentum can generalise better (L16) | measured over seeds: the rate makes more of a difference than the optimizer |
# | Kaiming's initialisation suits ReLU better than the default (L17) | measured: nine layers learn with it and not without; with two it matters little |
# | ReLU units die (L18) | holds: they get no gradient. A silent LeakyReLU gets one, and comes back slowly if at all |
# | BatchNorm goes before the activation, and fights overfitting (L19) | measured: learning is faster in either order; overfitting stays |
# | adaptive pooling frees the network from the input's size (L20) | it runs, down to where pooling leaves nothing; it is right at sizes like those of its training |
# | forgetting `super().__init__()` stops registration (L21) | it raises; the silent one is a plain list |
# | `nn.Linear(in, out)` swapped (L22) | holds: the error names both shapes |
# | the loss does not move: `requires_grad`, the optimizer's parameters, `zero_grad`, the mode (L23) | of five planted faults the list names three; `examine` found all five, and does not look at `zero_grad` |
# | a loss like a cardiogram: divide the rate by ten (L24) | holds where the rate is too large; jags alone do not show that |
# | overfitting: augment, decay, dropout, stop early (L25) | measured: all but dropout clearly lower the loss on other images; none does as much for the accuracy as more images |
# | early stopping returns to the best weights (L26) | only where they were copied |
# | overfit a single batch first (L27) | holds for what keeps the loss up; wrong labels pass |
# | seeding Python, numpy and torch makes a run reproducible (L28) | with the loader's generator, on the same machine, versions and threads, and without one draw more |
# | one device variable, one config (L29) | holds |
# | without Normalize the loss is hard to lower (L30) | measured: much of it is the rate, which wants to be larger for smaller inputs; bytes as they come start far off |
# | flip, crop, ToTensor, Normalize (L31) | bytes to floats with `scale=True`, then normalise; `ToTensor` is deprecated, and a flipped digit is none |
# | transfer: replace the head, freeze the rest, then fine-tune at a smaller rate (L32) | the frozen network helps, the more the fewer images there are; fine-tuning hardly added to it; frozen BatchNorm still moves in train mode |
# | inference must repeat the training's normalisation (L33) | holds |
# | clipping prevents nan from exploding gradients (L34) | holds as long as every gradient is finite |
# | TensorBoard shows loss curves and weights (P03) | holds |
# | *beyond the articles:* a loss of (N, 1) against (N,) draws all outputs to one mean (L35); a transform draws once for each call (L37); a rate above 2 / curvature climbs (L38); OneCycleLR moves the momentum, too (L39); the mean of an empty map is nan (L40); finite gradients whose norm overflows are clipped to 0 (L41); a rising validation loss with an accuracy that does not fall (L42); a loader that does not shuffle draws, too (L43); `examine` names five of the clinic's eight, and none of the three that are in the loop (L44); pooling may go before ReLU, and not before BatchNorm (L45); an accuracy speaks of images of its own kind (L46) | seen |
#
# For more: [torch.optim](https://pytorch.org/docs/stable/optim.html) lists every optimizer and scheduler and says in which order they are stepped; [Reproducibility](https://pytorch.org/docs/stable/notes/randomness.html) is PyTorch's own account of what a seed can promise; [A Recipe for Training Neural Networks](https://karpathy.github.io/2019/04/25/recipe/) is the
# order in which to build and check such a loop, from a look at the data to the last percent.
#
# Next: lesson 04, the same loop in mixed precision.
