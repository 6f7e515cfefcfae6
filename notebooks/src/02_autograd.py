# %% [markdown]
# # 02 · Autograd, graphs, retain_graph
#
# After this lesson you can say of any line what autograd records, what it keeps and until when, what a second `backward` needs, and where a gradient goes missing without an error. And you can measure each.
#
# 240 to 300 minutes, best in four sittings: sections 1 to 4, 5 to 9, 10 to 13, and the rest. It builds on lesson 01: storages, views and writing in place. From calculus you need the derivative and the chain rule, and you should have seen once
# how a network is trained: a loss, `backward`, a step. Lesson 03 takes that loop apart.
#
# Where this lesson says *the articles*, it means the three of lesson 01. Seventeen of their statements on autograd are put to the test; a table at the end says what became of each.
#
# | | | |
# | --- | --- | --- |
# | [1 A record of what you did](#1-·-A-record-of-what-you-did) | [7 The loss in a list](#7-·-The-loss-in-a-list) | [13 A backward of your own](#13-·-A-backward-of-your-own) |
# | [2 Who keeps a gradient](#2-·-Who-keeps-a-gradient) | [8 Gradients add up](#8-·-Gradients-add-up) | [14 Gradients of gradients](#14-·-Gradients-of-gradients) |
# | [3 The chain rule, node by node](#3-·-The-chain-rule,-node-by-node) | [9 Without a record](#9-·-Without-a-record) | [15 One gradient for each sample](#15-·-One-gradient-for-each-sample) |
# | [4 Held against differences](#4-·-Held-against-differences) | [10 Frozen](#10-·-Frozen) | [Clinic](#Clinic) |
# | [5 What backward frees](#5-·-What-backward-frees) | [11 Cutting the graph](#11-·-Cutting-the-graph) | [What you take with you](#What-you-take-with-you) |
# | [6 Two losses, one trunk](#6-·-Two-losses,-one-trunk) | [12 Overwritten](#12-·-Overwritten) | |

# %% tags=["parameters"]
DEVICE = "auto"
SEED = 0
QUICK = True

# %%
import math
import warnings
import weakref

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import nn

import course_utils.toolkit.autograd as kit
from course_utils import bars, benchmark, check, curves, explore_accumulation, explore_graph
from course_utils import hint, images, load, predict, raises, solution, start, table

lesson = start("02_autograd", DEVICE, SEED, QUICK)

# %% [markdown]
# ## A program that runs
#
# A small network draws a curve through 25 noisy points. It may follow the noise, so the program also asks for a smooth curve: it adds to the loss a *penalty*, the mean square of the curve's slope, times a strength. The slope is the
# derivative of the network's output by its input, and `torch.autograd.grad` computes it. Three strengths are tried: none, some, and a thousand.

# %%
noise = 0.4 * torch.randn(25, 1, generator=torch.Generator().manual_seed(SEED))
points = torch.linspace(-1, 1, 25).unsqueeze(1)
heights = torch.sin(3 * points) + noise


def fit(strength, steps=300):
    """A network fitted to the points, and the last values of its error and its penalty."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    inputs = points.clone().requires_grad_()
    for _ in range(steps):
        curve = net(inputs)
        (slope,) = torch.autograd.grad(curve.sum(), inputs, retain_graph=True)
        error = F.mse_loss(curve, heights)
        penalty = slope.square().mean()
        optimizer.zero_grad()
        (error + strength * penalty).backward()
        optimizer.step()
    return net, error.item(), penalty.item()


# %%
strengths = (0, 0.03, 1000)
fits = {strength: fit(strength) for strength in strengths}
table(
    ("strength", "error", "penalty", "loss = error + strength × penalty"),
    [(s, round(e, 4), round(p, 2), round(e + s * p, 2)) for s, (net, e, p) in fits.items()],
)
grid = torch.linspace(-1, 1, 81).unsqueeze(1)
with torch.no_grad():
    drawn = {f"strength {s:g}": net(grid).flatten().tolist() for s, (net, _, _) in fits.items()}
lines = {name: (grid.flatten().tolist(), ys) for name, ys in drawn.items()}
lines["the points, joined"] = (points.flatten().tolist(), heights.flatten().tolist())
curves(lines, "input", "height")

# %% [markdown]
# No error and no warning. The penalty is computed, it is part of the loss, and at strength 1000 it is nearly all of the loss. And the three curves lie on one another, as crooked as the first: the networks are the same to the last bit.

# %%
weights = {s: nn.utils.parameters_to_vector(net.parameters()) for s, (net, _, _) in fits.items()}
for strength in strengths[1:]:
    same = torch.equal(weights[0], weights[strength])
    print(f"the same weights at strength 0 and at {strength:g}: {same}")
    assert same

# %% [markdown]
# One argument in `fit` is the wrong one. It was added because an error message recommends it. By section 14 you know what it does, what was needed instead, and why PyTorch had nothing to complain about.

# %% [markdown]
# ## 1 · A record of what you did
#
# Training moves each number of a model, its **parameters**, a little in the direction that lowers the loss. For that it needs the derivative of one number, the loss, by each of the others. These derivatives together are the **gradient**; the **optimizer** is what moves the parameters by it.
#
# PyTorch finds them by keeping a record while you compute. Of a tensor made with `requires_grad=True`, every operation leaves a **node**: which operation it was, where its inputs came from, and what its derivative will need. Nodes that point to one another form a
# **graph**. `y.grad_fn` is the node that made `y`; `y.backward()` walks from there to the start and leaves the derivative of `y` by `x` in `x.grad`.

# %%
x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


def curve(x):
    return x**2 + 3 * x + 1


# %%
predict(
    "`x` is 2 and `curve(x)` is `x**2 + 3 * x + 1`. What is `x.grad` after `curve(x).backward()`?",
    run=lambda: torch.autograd.grad(curve(x), x)[0].item(),
    options={
        "11: the value at 2": lambda slope: slope == 11,
        "7: the slope at 2": lambda slope: slope == 7,
        "2x + 3: the derivative, as a formula": lambda slope: not isinstance(slope, float),
    },
)

# %% tags=["claim-A12", "nbval-check-output"]
y = curve(x)
y.backward()
print("value", y.item(), " slope", x.grad.item())
assert x.grad.item() == 7.0
assert torch.autograd.gradcheck(curve, (x,))  # compares with differences of values: section 4

# %% [markdown]
# A number, not a formula: 2 · 2 + 3. The record knows the operations that ran and the values they ran on. The toolkit's `kit.walk` lists its nodes, from the result to the start. What each node points to is given by its number in the list:


# %% tags=["nbval-check-output"]
def print_graph(result):
    for i, node in enumerate(kit.walk(result)):
        print(f"{i}  {node.name:16} gets its inputs from {node.inputs}")


print_graph(y)

# %% [markdown]
# `x**2` left PowBackward0, `3 * x` a MulBackward0, and each `+` an AddBackward0. `None` is an input that needs no gradient, such as the number 1. **AccumulateGrad** is the end of every path: the node that adds what arrives to `x.grad`.
#
# The articles say that this graph is built anew at each forward pass, so that plain `if`, `for` and `print` work. Here is a function with a branch.


# %%
def softened(x):
    if x.sum() > 0:
        return x.sqrt().sum()
    return (-x).log1p().sum()


above, below = torch.ones(3, requires_grad=True), torch.full((3,), -1.0, requires_grad=True)

# %%
predict(
    "What do the graphs of `softened(above)` and `softened(below)` have in common?",
    run=lambda: [
        {node.name for node in kit.walk(softened(x))} - {"AccumulateGrad", "SumBackward0"}
        for x in (above, below)
    ],
    options={
        "all: both hold both branches and a switch": lambda sets: sets[0] == sets[1],
        "the sum and the end; of the branches, each holds the one that ran": lambda sets: (
            not sets[0] & sets[1]
        ),
        "nothing can be said: an `if` on a tensor is not allowed": lambda sets: isinstance(
            sets, Exception
        ),
    },
)

# %% tags=["claim-A01", "nbval-check-output"]
for name, x in (("above", above), ("below", below)):
    result = softened(x)
    result.backward()
    print(f"{name}: {[node.name for node in kit.walk(result)]}, gradient {x.grad.tolist()}")
assert kit.walk(softened(above))[0].fn is not kit.walk(softened(above))[0].fn
assert "SqrtBackward0" in str(kit.walk(softened(above)))
assert "SqrtBackward0" not in str(kit.walk(softened(below)))

steps = torch.tensor(1.0, requires_grad=True)
doubled = steps
while doubled < 100:  # how often this runs depends on the value
    doubled = doubled * 2
doubled.backward()
print("doubled", len(kit.walk(doubled)) - 1, "times, gradient", steps.grad.item())
assert steps.grad.item() == 128.0

# %% [markdown]
# Autograd never sees your `if`. It sees the operations that ran, and two runs give two graphs. So the gradient is that of the branch taken; that the function may jump where the other branch begins does not show in it.

# %% [markdown]
# ### Exercise 1 · The gradient at a point (two minutes)
#
# Someone hands you a function and a tensor, and wants the gradient there. The tensor is theirs: it may be a parameter with a `.grad` of its own, or the result of other work, and it stays as it was.


# %% tags=["exercise"]
def leaf_gradient(function, x):
    """Gradient of function(x), a tensor of one number, with respect to x: a tensor like x.

    x stays as it is: its values, its .grad, and whether it requires grad.

    >>> leaf_gradient(lambda x: x**2 + 3 * x + 1, torch.tensor(2.0))
    tensor(7.)
    """
    ...


# %%
check(leaf_gradient)
# hint(leaf_gradient)        remove the # and run: each call gives one more hint
# solution(leaf_gradient)    a reference, once you have tried

# %% [markdown]
# ## 2 · Who keeps a gradient
#
# A tensor that no recorded operation made is a **leaf**: what you created, also a model's parameters. What is computed from a leaf that requires grad is, as a rule, no leaf, and requires grad itself. The articles say: *backward() fills `.grad` of what requires grad.*

# %%
weight = torch.tensor([1.0, 2.0], requires_grad=True)
tripled = weight * 3
tripled.sum().backward()


def grad_of(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


# %%
predict(
    "`tripled = weight * 3` requires grad, and `tripled.sum().backward()` has run. "
    "What is `tripled.grad`?",
    run=lambda: grad_of(tripled),
    options={
        "[1, 1]: the sum's derivative": lambda grad: grad.tolist() == [1.0, 1.0],
        "[3, 3]": lambda grad: grad.tolist() == [3.0, 3.0],
        "None": lambda grad: grad is None,
    },
)

# %% tags=["claim-A09", "nbval-check-output"]
print("leaf:", weight.is_leaf, weight.grad.tolist(), "  not a leaf:", tripled.is_leaf)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert tripled.grad is None
print("reading it warns:", str(caught[0].message).split(" Its")[0])

tripled = weight * 3
tripled.retain_grad()
tripled.sum().backward()
print("after retain_grad():", tripled.grad.tolist())
assert tripled.grad.tolist() == [1.0, 1.0]

# %% [markdown]
# The gradient passed through `tripled` on its way and was thrown away. An intermediate result keeps its gradient where you ask for it before `backward`, with `retain_grad()`. Leaves keep theirs.
#
# The articles also say that *every* result of a tensor that requires grad records. Look at the last column:

# %% tags=["claim-A05", "nbval-check-output"]
x = torch.tensor([0.5, 1.5], requires_grad=True)
with torch.no_grad():
    unrecorded = x * 2
with torch.inference_mode():
    inference = x * 2
results = {
    "x * 2": x * 2,
    "x.round()": x.round(),
    "x.argmax()": x.argmax(),
    "x > 1": x > 1,
    "x.long()": x.long(),
    "x.detach()": x.detach(),
    "x * 2 under no_grad": unrecorded,
    "x * 2 under inference_mode": inference,
}
for code, result in results.items():
    print(f"{code:27} {str(result.dtype):14} requires grad: {result.requires_grad}")
assert [r.requires_grad for r in results.values()] == [True, True] + 6 * [False]
with raises(RuntimeError):
    torch.ones(3, dtype=torch.int64, requires_grad=True)

# %% [markdown]
# Whole numbers and truth values have no derivative, and inside `no_grad` and `inference_mode` (section 9) nothing is recorded. A loss that counts right answers with `argmax` has no graph at all. `round` does record, and what good that does is a question for section 13.
#
# Who requires grad without being asked? A model's parameters do, and its inputs do not.

# %% tags=["claim-A13"]
digits = load("digits")
images_train = digits.train_images[:1500].flatten(1) / 255
images_test = digits.test_images[:300].flatten(1) / 255
labels_train, labels_test = digits.train_labels[:1500], digits.test_labels[:300]

classifier = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(classifier.parameters(), lr=0.01)
for _ in range(30):
    loss = F.cross_entropy(classifier(images_train), labels_train)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("parameters:", {name: p.requires_grad for name, p in classifier.named_parameters()})
print("the input:", images_train.requires_grad, " its gradient:", images_train.grad)
assert all(p.requires_grad for p in classifier.parameters()) and images_train.grad is None

# %% [markdown]
# Sometimes the input's gradient is what you want. It says how the loss changes with each pixel: for one image, a **saliency map**. And a step along its sign raises the loss fastest for a given change of each pixel, which makes an **adversarial example**. Look at how little the picture changes, and what becomes of the answer.

# %%
probe = images_test.clone().requires_grad_()
F.cross_entropy(classifier(probe), labels_test).backward()
direction = probe.grad.sign()
attacked = (images_test + 0.1 * direction).clamp(0, 1)
random = (images_test + 0.1 * torch.randn_like(images_test).sign()).clamp(0, 1)


def accuracy(pictures):
    with torch.no_grad():
        return (classifier(pictures).argmax(1) == labels_test).float().mean().item()


# %% tags=["claim-A13"]
says, says_now = classifier(images_test).argmax(1), classifier(attacked).argmax(1)
fooled = ((says == labels_test) & (says_now != labels_test)).nonzero()[0].item()
saliency = probe.grad[fooled].abs() / probe.grad[fooled].abs().max()
images(
    [picture.view(28, 28) for picture in (images_test[fooled], saliency, attacked[fooled])],
    [
        f"the network says {says[fooled].item()}",
        "size of the gradient",
        f"now it says {says_now[fooled].item()}",
    ],
    scale=6,
)
rates = {"as they are": images_test, "random signs": random, "gradient's signs": attacked}
for name, pictures in rates.items():
    print(f"{name:17} {accuracy(pictures):.0%} of the test images right")
assert accuracy(attacked) < accuracy(random) - 0.2

# %% [markdown]
# The same change of each pixel, once with random signs and once with those of the gradient, has very different consequences. Here `requires_grad_()` was set on a *copy* of the input. `backward` filled the parameters' gradients as well; `torch.autograd.grad(loss, probe)` returns the
# one that you name and leaves every `.grad` alone.

# %% [markdown]
# ## 3 · The chain rule, node by node
#
# Every node knows one thing: how to turn the gradient of its output into the gradients of its inputs. A node can be called. Here `backward` is done by hand, for `y = a * b + a`; the gradient of `y` by itself is 1.

# %% tags=["nbval-check-output"]
a, b = torch.tensor(3.0, requires_grad=True), torch.tensor(4.0, requires_grad=True)
y = a * b + a

add = y.grad_fn
(multiply, _), (end_of_a, _) = add.next_functions
into_multiply, into_a = add(torch.tensor(1.0))
print(f"{add.name()} passes on {into_multiply.item()} and {into_a.item()}")
for_a, for_b = multiply(into_multiply)
print(f"{multiply.name()} passes on {for_a.item()} to a and {for_b.item()} to b")
print("a gets", for_a.item(), "+", into_a.item(), "  b gets", for_b.item())

y.backward()
print("backward():", a.grad.item(), b.grad.item())
assert a.grad == for_a + into_a == 5.0 and b.grad == for_b == 3.0

# %% [markdown]
# A sum passes its gradient on unchanged. A product passes it on times the *other* factor, which is why the node had to remember both. `a` is reached along two paths, and what arrives is added. That is the whole of the chain rule.
#
# Step through it below. Choose a program or type your own; the picture is the graph that PyTorch made of it, with the tensors that each node saved and their bytes. Step backward and watch `.grad` fill. Then find out:
#
# 1. which operations save nothing, which save an input, and which their result;
# 2. what is left of the saved tensors after the last step, and what the switch `retain_graph` changes;
# 3. which nodes disappear where a line is computed under `no_grad`, and what `detach` cuts off.
#
# Sections 5, 9 and 11 explain what you find.

# %%
explore_graph()

# %% [markdown]
# ### Exercise 2 · Backward by hand
#
# A network of two layers, and its loss:
#
# `hidden = torch.tanh(x @ w1 + b1)`, `output = hidden @ w2`, `loss = ((output - target) ** 2).mean()`
#
# Walk back from the loss, one operation at a time: the gradient that arrives, times the derivative of the operation. Each gradient has the shape of its tensor, which tells you where a transpose or a sum has to stand.
# (The derivative of tanh is 1 - tanh².) You can let autograd do it and be right; the point is to do without.


# %% tags=["exercise"]
def backward_by_hand(x, w1, b1, w2, target):
    """Gradients of the loss with respect to w1, b1 and w2: a tuple of three tensors.

    x (N, D), w1 (D, H), b1 (H,), w2 (H, K), target (N, K). The mean is over all N * K numbers.
    """
    ...


# %%
check(backward_by_hand)

# %% [markdown]
# ### Exercise 3 · How large is the graph?
#
# A node's `next_functions` is a tuple of pairs, one for each input: the node that the input came from, or None, and a number that you do not need here. Count the nodes behind a loss. Graphs can be ten thousand nodes deep, and a node that two paths lead to is one node.


# %% tags=["exercise"]
def graph_size(loss):
    """Number of nodes that loss.grad_fn leads to, itself included, each once.

    The AccumulateGrad nodes of the leaves are nodes too. 0 for a tensor without a graph.

    >>> w = torch.ones(3, requires_grad=True)
    >>> graph_size((w * 2).sum())  # SumBackward0, MulBackward0, AccumulateGrad
    3
    """
    ...


# %%
check(graph_size)

# %% [markdown]
# ## 4 · Held against differences
#
# Is a gradient right? There is a test that needs no derivative: move one input a little up and a little down, by `eps`, and divide the difference of the results by 2 · eps. Mathematics says: the smaller `eps`, the closer.

# %%
eps_values = [10.0**-k for k in range(1, 14)]


def error_of_difference(eps, dtype):
    x = torch.tensor(1.0, dtype=dtype)
    slope = (torch.sin(x + eps) - torch.sin(x - eps)) / (2 * eps)
    return abs(slope.item() - math.cos(1.0))


def best_eps(dtype):
    return min(eps_values, key=lambda eps: error_of_difference(eps, dtype))


# %%
predict(
    "The slope of the sine at 1, by such a difference in float64. Which `eps` is the most exact?",
    run=lambda: best_eps(torch.float64),
    options={
        "0.1": lambda eps: eps == 0.1,
        "one between 0.01 and 1e-9": lambda eps: 1e-10 < eps < 0.1,
        "1e-13: the smallest that was tried": lambda eps: eps == eps_values[-1],
    },
)

# %% [markdown]
# Look for the lowest point of each line, and at what happens on either side of it. Both axes count powers of ten.

# %%
floor = 1e-12  # an error of exactly 0 has no logarithm
powers = [-k for k in range(1, 14)]
errors = {
    str(dtype): (powers, [max(error_of_difference(eps, dtype), floor) for eps in eps_values])
    for dtype in (torch.float64, torch.float32)
}
curves(errors, "eps, as a power of ten", "error of the slope", log=True)
print(f"best eps: float64 {best_eps(torch.float64):g}, float32 {best_eps(torch.float32):g}")
assert best_eps(torch.float64) < best_eps(torch.float32)

# %% [markdown]
# Towards the large `eps` the sine is not straight enough. Towards the small ones two nearly equal numbers are subtracted, and only the rounding of their last digits is left. In float32, with its seven digits, that sets in so early that the best difference is still far off. So
# such a test is made in **float64**, with a middle `eps`.

# %% [markdown]
# ### Exercise 4 · A gradient without autograd
#
# Now for a function of many numbers. Move one number of one input up and down by `eps`, all others as they are: (above - below) / (2 · eps) is the gradient's element at that place.


# %% tags=["exercise"]
def finite_difference(function, *inputs, eps=1e-6):
    """Gradients of function(*inputs), one number, by central differences.

    The inputs are float64 tensors of any shape and any strides; other dtypes raise TypeError.
    Returns a tuple with one tensor for each input, of its shape. The inputs stay as they are.

    >>> x, y = torch.tensor([1.0, 2.0]).double(), torch.tensor(3.0).double()
    >>> gx, gy = finite_difference(lambda x, y: (x**2 * y).sum(), x, y)
    >>> round(gy.item(), 6)
    5.0
    """
    ...


# %%
check(finite_difference)

# %% [markdown]
# Here the toolkit's version is held against autograd. `torch.autograd.gradcheck` makes such a comparison by itself, with tolerances of its own, and agrees on the curve of section 1.

# %% tags=["claim-A12", "nbval-check-output"]
x = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
(by_difference,) = kit.finite_difference(curve, x)
print("by difference:", round(by_difference.item(), 6))
print("gradcheck:    ", torch.autograd.gradcheck(curve, (x,)))
assert abs(by_difference.item() - 7.0) < 1e-8

left, right = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)
product = lambda m, n: torch.tanh(m @ n).sum()
leaves = [t.clone().requires_grad_() for t in (left, right)]
exact = torch.autograd.grad(product(*leaves), leaves)
for mine, theirs in zip(kit.finite_difference(product, left, right), exact, strict=True):
    agree = torch.allclose(mine, theirs, atol=1e-8)
    print("a product of matrices, shape", tuple(mine.shape), "agrees to 1e-8:", agree)
    assert agree

# %% [markdown]
# ## 5 · What backward frees
#
# Call `backward()` twice on one result, and many a program stops with an error. The articles explain it: *the graph was freed.* Does that happen to every graph?


# %%
def second_backward(function):
    """The gradient after two backward calls through one graph."""
    x = torch.tensor([0.5, 1.5], requires_grad=True)
    result = function(x).sum()
    result.backward()
    result.backward()
    return x.grad


# %%
predict(
    "`result = (x + 1).sum()`, then `result.backward()` twice. What happens?",
    run=lambda: second_backward(lambda x: x + 1),
    options={
        "the second raises: the graph was freed": lambda grad: isinstance(grad, RuntimeError),
        "the second does nothing: x.grad stays at [1, 1]": lambda grad: grad.tolist() == [1, 1],
        "both work: x.grad is [2, 2]": lambda grad: grad.tolist() == [2, 2],
    },
)

# %% tags=["claim-A02", "nbval-check-output"]
functions = {
    "x + 1": lambda x: x + 1,
    "x - x.flip(0)": lambda x: x - x.flip(0),
    "x * 2": lambda x: x * 2,
    "x * x": lambda x: x * x,
    "x.sin()": lambda x: x.sin(),
    "x.exp()": lambda x: x.exp(),
    "x.relu()": lambda x: x.relu(),
}
passes = {}
x = torch.tensor([0.5, 1.5], requires_grad=True)
for code, function in functions.items():
    saved = [f"{name} {tuple(t.shape)}" for node in kit.walk(function(x)) for name, t in node.saved]
    try:
        second_backward(function)
        passes[code] = True
    except RuntimeError:
        passes[code] = False
    second = "works" if passes[code] else "raises"
    print(f"{code:14} saves {', '.join(saved) or 'nothing':24} second backward: {second}")
    assert passes[code] == (not saved)
assert passes["x + 1"] and not passes["x * x"]

# %% [markdown]
# What decides is whether a node **saved** tensors. A sum needs nothing to pass its gradient on. A product needs its factors; the sine needs its input, since its derivative there is a cosine; the exponential needs its own *result*. (Shape `()` is a single number: the 2 of `x * 2` is kept as a tensor, too.) Where nothing was saved, nothing can be freed, and the second `backward` adds the same gradient once more.
#
# So what is freed? Look at one graph before and after, and at the error.

# %% tags=["claim-A02", "nbval-check-output"]
x = torch.tensor([0.5, 1.5], requires_grad=True)
shifted = x + 1
result = (shifted * shifted).sum()


def print_saved(result):
    for node in kit.walk(result):
        kept = ", ".join(f"{name} ({t.nbytes} bytes)" for name, t in node.saved)
        print(f"   {node.name:16} {'freed' if node.freed else kept or 'saves nothing'}")
    print(f"   {kit.graph_bytes(result)} bytes in all")


print("before backward():")
print_saved(result)
nodes = [node.fn for node in kit.walk(result)]
result.backward()
print("after:")
print_saved(result)
assert [node.fn for node in kit.walk(result)] == nodes  # every node is still there
assert [node.freed for node in kit.walk(result)] == [False, True, False, False]
assert kit.graph_bytes(result) == 0

with raises(RuntimeError):
    result.backward()

# %% [markdown]
# The nodes and their connections stay. Only the saved tensors are let go, and both factors were one tensor, so eight bytes in all. The message says it correctly: *saved intermediate values of the graph are freed*. It then recommends `retain_graph=True`. Before you follow that, know what it costs:

# %% tags=["claim-A04"]
layers = [layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]
deep = nn.Sequential(*layers).to(lesson.device)
batch = torch.randn(512, 256, device=lesson.device)
held = {}
for retain in (False, True):
    output = deep(batch).square().mean()
    held["after the forward pass"] = kit.graph_bytes(output)
    output.backward(retain_graph=retain)
    held[f"after backward(retain_graph={retain})"] = kit.graph_bytes(output)
bars(
    [(name, n / 1e6, "activations" if n else "free") for name, n in held.items()],
    "megabytes of saved tensors that the graph keeps alive",
)
assert held["after backward(retain_graph=False)"] == 0
assert (
    held["after backward(retain_graph=True)"] == held["after the forward pass"] > 4 * batch.nbytes
)

# %% [markdown]
# All of it stays, for as long as anything refers to the graph. The results of layers that are saved for `backward` are called **activations**. (`kit.graph_bytes` counts whatever the graph refers to, so the weights and inputs that it saved are in the sum; those exist anyway.) When is it worth keeping them?

# %% [markdown]
# ## 6 · Two losses, one trunk
#
# A network with two tasks has a common **trunk** and a **head** for each. The articles say: *two losses over one shared part need `retain_graph=True`.* Without it the second `backward` meets a trunk whose saved tensors are gone. Here are three ways to train both:

# %%
trunk = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(256, 256), nn.Tanh())])
heads = nn.ModuleList(
    nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10)) for _ in "ab"
)
both = nn.ModuleList([trunk, heads]).to(lesson.device)
answers = [torch.randint(0, 10, (512,), device=lesson.device) for _ in "ab"]


def loss_of(task, features):
    return F.cross_entropy(heads[task](features), answers[task])


def retained():
    features = trunk(batch)
    first, second = loss_of(0, features), loss_of(1, features)
    first.backward(retain_graph=True)
    second.backward()


def summed():
    features = trunk(batch)
    total = loss_of(0, features) + loss_of(1, features)
    total.backward()


def cut():
    features = trunk(batch)
    start = features.detach().requires_grad_()  # a leaf: the backward of a head ends here
    for task in (0, 1):
        loss = loss_of(task, start)
        loss.backward()  # adds to start.grad
    features.backward(start.grad)


# %% [markdown]
# The third detaches the trunk's output, so that the graph of each head ends at a leaf. When both heads have added their gradients there, the trunk goes back once, from the gradient that has arrived: `backward` of a tensor that is not a single number takes the gradient to begin with.
#
# A **hook** is a function of yours that autograd calls; here one counts how often a gradient reaches the trunk's first weight.


# %%
def trunk_passes(way):
    count = []
    hook = trunk[0].weight.register_hook(lambda grad: count.append(1))
    way()
    hook.remove()
    return len(count)


# %%
predict(
    "In `retained`, how often does backward walk through the trunk?",
    run=lambda: trunk_passes(retained),
    options={
        "once: the second loss finds the trunk's gradient ready": lambda passes: passes == 1,
        "twice: once for each loss": lambda passes: passes == 2,
        "three times: forward counts, too": lambda passes: passes == 3,
    },
)

# %% tags=["claim-A03"]
rows, gradients = [], {}
for way in (retained, summed, cut):
    both.zero_grad()
    with kit.saved_bytes() as saved:
        way()
    gradients[way.__name__] = [p.grad.clone() for p in both.parameters()]
    rows.append((way.__name__, trunk_passes(way), round(saved.peak / 1e6, 2)))
table(("way", "backward passes through the trunk", "most megabytes saved at one time"), rows)

for name in ("summed", "cut"):
    for mine, theirs in zip(gradients[name], gradients["retained"], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
print("the three ways give the same gradients, up to rounding")
passes, most_held = ({row[0]: row[i] for row in rows} for i in (1, 2))
assert passes == {"retained": 2, "summed": 1, "cut": 1}
assert most_held["cut"] < most_held["summed"] == most_held["retained"]

# %%
benchmark({way.__name__: way for way in (retained, summed, cut)}, what="time, forward and backward")

# %% [markdown]
# The gradient of a sum is the sum of the gradients, so one `backward` of `first + second` does what two calls do, and walks through the trunk once. The bars say how much that saves here. (Where a range reaches across 1, the machine was too busy to tell the ways apart.)
#
# At its peak, at the end of the forward pass, `retained` holds as much as `summed`; it holds it longer, up to the second call. The cut holds only one head's activations at a time, which counts where heads are many or large.
#
# `retain_graph=True` is needed where you want two gradients *apart* from one graph: to compare them, or to weigh one by the other. For adding them up it is not.

# %% [markdown]
# ## 7 · The loss in a list
#
# *Appending `loss` instead of `loss.item()` to a list keeps the whole graph alive, so memory grows at every step.* Two of the three articles warn of it. You now know enough to doubt: what does a graph keep after `backward`?

# %%
net = nn.Sequential(
    nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)
)
net = net.to(lesson.device)
hidden = []  # weak references to the results of Tanh: they keep nothing alive, and tell what is
for layer in net:
    if isinstance(layer, nn.Tanh):
        layer.register_forward_hook(lambda module, args, out: hidden.append(weakref.ref(out)))


def append_losses(backward=True, retain_graph=False, item=False):
    """The losses of ten steps, in a list."""
    kept = []
    hidden.clear()
    for _ in range(10):
        loss = net(torch.randn(512, 256, device=lesson.device)).square().mean()
        if backward:
            loss.backward(retain_graph=retain_graph)
        kept.append(loss.item() if item else loss)
    return kept


def still_there():
    return sum(reference() is not None for reference in hidden)


# %%
predict(
    "Ten steps of training, each with `backward()`, each appending `loss` itself. "
    "How many of the 20 results of Tanh are in memory afterwards?",
    run=lambda: (append_losses(), still_there())[1],
    options={
        "none": lambda alive: alive == 0,
        "two: those of the last step": lambda alive: alive == 2,
        "all 20": lambda alive: alive == 20,
    },
)

# %% tags=["claim-A16"]
situations = {
    "training: backward(), then append": lambda: append_losses(),
    "training: backward(retain_graph=True), then append": lambda: append_losses(retain_graph=True),
    "validation: no backward(), append": lambda: append_losses(backward=False),
    "validation under no_grad, append": torch.no_grad()(lambda: append_losses(backward=False)),
    "validation: no backward(), append loss.item()": lambda: append_losses(
        backward=False, item=True
    ),
}
rows = []
for name, run in situations.items():
    kept = run()
    graphs = [loss for loss in kept if isinstance(loss, torch.Tensor)]
    megabytes = kit.graph_bytes(*graphs) / 1e6
    rows.append((name, still_there(), round(megabytes, 2), len(kit.walk(*graphs))))
    del kept, graphs
table(("ten losses in a list", "results of Tanh alive", "megabytes saved", "nodes"), rows)
alive, saved = [row[1] for row in rows], [row[2] for row in rows]
assert alive == [0, 20, 20, 0, 0]
assert saved[0] == saved[3] == saved[4] == 0 and saved[1] == saved[2] > 20 * 512 * 256 * 4 / 1e6

# %% [markdown]
# The warning is true where no `backward` ran, which is in validation without `no_grad`, and where the graph was retained. In an ordinary training step `backward` has let the activations go, and the list keeps the scalar and some empty nodes. What does a node weigh? Here is a chain of many that save nothing. (The process may
# use memory again that it had before, and then this comes out too small.)

# %%
before = psutil.Process().memory_info().rss
chain = torch.ones((), requires_grad=True)
for _ in range(100_000):
    chain = chain + 1
grown = psutil.Process().memory_info().rss - before
print(f"the process grew by {grown / 100_000:,.0f} bytes for each node")
del chain

# %% [markdown]
# Small beside an activation, and yet it adds up with the steps, as `total = total + loss` does in one ever longer chain. So `loss.item()` is still the right habit, or `loss.detach()` where the program should not wait for a GPU. But if memory grows by megabytes a step, look for the pass without `backward`.

# %% [markdown]
# ## 8 · Gradients add up
#
# AccumulateGrad does what its name says.

# %%
weight = torch.tensor(2.0, requires_grad=True)


def grad_after(calls):
    weight.grad = None
    for _ in range(calls):
        (weight**2).backward()
    return weight.grad.item()


# %%
predict(
    "The slope of `weight**2` at 2 is 4. "
    "After three times `(weight**2).backward()`, what is `weight.grad`?",
    run=lambda: grad_after(3),
    options={
        "4: the last one": lambda grad: grad == 4,
        "12: their sum": lambda grad: grad == 12,
        "64: the chain rule multiplies": lambda grad: grad == 64,
        "an error, for want of retain_graph": lambda grad: isinstance(grad, RuntimeError),
    },
)

# %% tags=["claim-A11", "nbval-check-output"]
print("after 1, 2, 3 calls:", [grad_after(calls) for calls in (1, 2, 3)])
assert [grad_after(calls) for calls in (1, 2, 3)] == [4.0, 8.0, 12.0]

samples = torch.tensor([1.0, 2.0, 3.0, 4.0])
weight.grad = None
for half in (samples[:2], samples[2:]):
    (weight * half).sum().backward()
in_parts = weight.grad.item()
weight.grad = None
(weight * samples).sum().backward()
print("in two halves:", in_parts, "  at once:", weight.grad.item())
assert in_parts == weight.grad.item() == 10.0

# %% [markdown]
# Three graphs were made and walked, one for each call, so nothing is retained and nothing raises. The sum is the same as one `backward` of all the losses together. That is useful where a batch does not fit into memory, and wrong where a step was to see one batch alone. Then the gradients have to be cleared in between.
#
# In the explorer, three weights have two losses, A and B. Each button is a line of code; the bars are what `.grad` is the sum of. Find
#
# 1. two different orders of buttons that leave the same `.grad` and are not both A + B;
# 2. what a second `step()` does when nothing was cleared after the first;
# 3. an optimizer that moves the weights although their gradient is zero, and whether a gradient of `None` stops it.

# %%
explore_accumulation()

# %% [markdown]
# With the gradient in hand, the weights are to be moved. The articles say: *updates by hand belong under `no_grad`.* What happens otherwise? Here are four ways to write one step. Look at which of them leaves `w` a leaf that requires grad:

# %% tags=["claim-A10", "nbval-check-output"]
w = torch.tensor([1.0, 2.0], requires_grad=True)
(gradient,) = torch.autograd.grad(w.square().sum(), w)
with raises(RuntimeError):
    w -= 0.1 * gradient

moved = w - 0.1 * gradient
moved.square().sum().backward()
print("w = w - …          leaf:", moved.is_leaf, "  its gradient:", grad_of(moved))
with torch.no_grad():
    other = w - 0.1 * gradient
print("the same, no_grad  leaf:", other.is_leaf, "  requires grad:", other.requires_grad)
assert not moved.is_leaf and grad_of(moved) is None and not other.requires_grad

with torch.no_grad():
    w -= 0.1 * gradient
print("w -= …, no_grad    leaf:", w.is_leaf, "  requires grad:", w.requires_grad)
assert w.is_leaf and w.requires_grad and torch.allclose(w, torch.tensor([0.8, 1.6]))

# %% [markdown]
# The first would write into a leaf whose value the graph refers to, and is refused. The second makes a *new* tensor that is no leaf, so it gets no `.grad` for the next step. The third makes a new tensor that does not require grad. Only the last one changes the leaf itself, unrecorded: in place *and* under `no_grad`. An optimizer's `step` does that.

# %% [markdown]
# ## 9 · Without a record
#
# To use a model you need no gradient, and so no record. `torch.no_grad()` stops the recording for a block; `torch.inference_mode()` does so and more. `model.eval()` is a third thing people write there. Which of them does what? The model below has the two kinds of layer that behave differently in training: **dropout**, which
# sets random results to zero, and **batch normalisation**, which keeps running statistics of what it has seen.

# %%
model = nn.Sequential(
    nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 8)
)
model = model.to(lesson.device)
validation = torch.randn(512, 64, device=lesson.device)


def saved_in_forward():
    with kit.saved_bytes() as saved:
        model(validation)
    return saved.bytes


# %%
predict(
    "After `model.eval()`, a forward pass without any `with` around it. What does it record?",
    run=lambda: (model.eval(), saved_in_forward(), model.train())[1],
    options={
        "nothing: eval() is for evaluation": lambda saved: saved == 0,
        "a graph, with saved tensors": lambda saved: saved > 0,
    },
)

# %% tags=["claim-A07"]
rows = {}
for training in (True, False):
    for recording in (True, False):
        model.train(training)
        with torch.set_grad_enabled(recording):
            mean_before = model[1].running_mean.clone()
            first, second = model(validation), model(validation)
            rows[training, recording] = (
                not torch.equal(first, second),
                not torch.equal(mean_before, model[1].running_mean),
                first.requires_grad,
                saved_in_forward(),
            )
model.train()
table(
    ("train()", "recording", "dropout acts", "statistics move", "has a graph", "bytes saved"),
    [(*map(str, (*switches, *row[:3])), row[3]) for switches, row in rows.items()],
)
for (training, recording), (dropout_acts, statistics_move, gradients, saved) in rows.items():
    assert dropout_acts == statistics_move == training
    assert gradients == recording and (saved > 0) == recording

# %% [markdown]
# Two switches that know nothing of each other. `eval()` decides what the layers compute; `no_grad` decides whether it is recorded. A validation with `no_grad` alone, still in `train()`, is random and lets the validation data into the statistics; one with `eval()` alone is right and wastes memory. The articles are right that you want both.
#
# `inference_mode` goes further: what is made in it can never be saved for `backward`. First, the memory of all three:

# %% tags=["claim-A06"]
modes = {
    "recording": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
saved = {}
for name, mode in modes.items():
    with mode():
        saved[name] = saved_in_forward()
bars(
    [(name, n, "activations" if n else "free") for name, n in saved.items()],
    "bytes that one forward pass saves",
)
assert saved["recording"] > 0 and saved["no_grad"] == saved["inference_mode"] == 0

# %% [markdown]
# Here the two are equal. The difference shows later, and elsewhere. Many models keep something that they computed once, such as a table of positions. Here an evaluation runs first:


# %% tags=["claim-A20", "nbval-check-output"]
class Waves(nn.Module):
    """Weighs its input by a table that is computed at the first call and then kept."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(3.0).cos()
        return (self.scale * x * self.table).sum()


def train_after(mode):
    waves = Waves()
    with mode():
        waves(torch.ones(3))  # the evaluation
    waves(torch.ones(3)).backward()  # training goes on
    return waves.scale.grad


print("evaluated under no_grad: gradient", round(train_after(torch.no_grad).item(), 4))
with raises(RuntimeError):
    train_after(torch.inference_mode)

# %% [markdown]
# A tensor made in inference mode stays an *inference tensor*. The error comes in training, far from the evaluation that caused it (snowflakedb/ArcticTraining#265). So: `inference_mode` where nothing is trained afterwards, `no_grad` where it is.
#
# What does the recording cost in time? The articles hold that a graph built anew costs something, compared with a compiled one. GELU is a function that some networks apply to each number between two layers. It can be written with five operations, or called as one. Both give the same numbers:


# %% tags=["claim-A15", "nbval-check-output"]
def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


x = torch.linspace(-3, 3, 1000, requires_grad=True)
assert torch.allclose(gelu(x), F.gelu(x), atol=1e-6)
sizes = {}
for name, function in (("written out", gelu), ("F.gelu", F.gelu)):
    with kit.saved_bytes() as saved:
        result = function(x)
    sizes[name] = (len(kit.walk(result)), saved.bytes)
    print(f"{name:12} {sizes[name][0]} nodes, {sizes[name][1]:,} bytes saved for 1000 numbers")
assert sizes["F.gelu"][0] == 2 and sizes["F.gelu"][1] == x.nbytes < sizes["written out"][1]

# %%
tiny, wide = torch.zeros(10, requires_grad=True), torch.zeros(200_000, requires_grad=True)
with torch.no_grad():
    silent = tiny * 1
benchmark(
    {
        "10 numbers, not recorded": lambda: gelu(silent),
        "10 numbers, recorded": lambda: gelu(tiny),
        "10 numbers, recorded, F.gelu": lambda: F.gelu(tiny),
        "200,000 numbers, recorded": lambda: gelu(wide),
        "200,000 numbers, recorded, F.gelu": lambda: F.gelu(wide),
    },
    what="time of a forward pass",
)
if not lesson.quick:  # takes a while: the first call compiles
    compiled = torch.compile(gelu)
    benchmark(
        {"written out": lambda: gelu(wide), "compiled": lambda: compiled(wide)},
        what="time of a forward pass, 200,000 numbers",
    )

# %% [markdown]
# Two costs can be told apart. Each operation has a fixed price, whatever its size; recorded or not it must be paid, and on ten numbers it is nearly all there is. And each intermediate result is written, read again, and perhaps saved. Joining the five operations into one spares both. That is what a compiler does by itself:
# with `QUICK = False` this cell compiles the function and measures it, and lesson 09 returns to it. How large the part of the recording is on this machine, the first two bars say.

# %% [markdown]
# ## 10 · Frozen
#
# A pretrained part of a model is often **frozen**: `requires_grad_(False)` on its parameters, and the rest is trained. The articles warn: *a frozen parameter that is left in the optimizer still costs Adam's state*, two numbers for each weight.


# %% tags=["claim-A08", "nbval-check-output"]
def small_net():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(net, optimizer, steps, **options):
    inputs = torch.linspace(-1, 1, 24).view(8, 3)
    for _ in range(steps):
        optimizer.zero_grad(**options)
        net(inputs).square().mean().backward()
        optimizer.step()


net = small_net()
net[0].requires_grad_(False)
adam = torch.optim.Adam(net.parameters(), lr=0.1)
at_first = net[0].weight.clone()
train(net, adam, steps=3)
for name, parameter in net.named_parameters():
    state = list(adam.state.get(parameter, []))
    print(f"{name:9} trained: {parameter.requires_grad!s:6} state: {state}")
assert net[0].weight not in adam.state and net[2].weight in adam.state
assert torch.equal(net[0].weight, at_first)

# %% [markdown]
# It costs nothing. Adam makes its state at the first step in which a parameter *has a gradient*, and one that is frozen from the start never has one. But now freeze the layer in the middle of a training:


# %%
def moved_after_freezing(make_optimizer, **options):
    """How far the first layer's weights move in three steps after they were frozen."""
    net = small_net()
    optimizer = make_optimizer(net.parameters(), lr=0.1)
    train(net, optimizer, steps=3, **options)
    net[0].requires_grad_(False)
    frozen_at = net[0].weight.clone()
    train(net, optimizer, steps=3, **options)
    return (net[0].weight - frozen_at).abs().max().item()


# %%
predict(
    "Adam has trained a layer for three steps. It is frozen, and `zero_grad(set_to_none=False)` "
    "fills its gradient with zeros before each step. Does the layer still move?",
    run=lambda: moved_after_freezing(torch.optim.Adam, set_to_none=False),
    options={
        "no: it does not require grad": lambda moved: moved == 0,
        "yes": lambda moved: moved > 0,
    },
)

# %% tags=["claim-A08"]
SGD = torch.optim.SGD
optimizers = {
    "SGD": SGD,
    "SGD with momentum": lambda parameters, lr: SGD(parameters, lr, momentum=0.9),
    "SGD with weight decay": lambda parameters, lr: SGD(parameters, lr, weight_decay=0.1),
    "Adam": torch.optim.Adam,
}
none, zero = {}, {}
for name, make in optimizers.items():
    none[name] = moved_after_freezing(make)
    zero[name] = moved_after_freezing(make, set_to_none=False)
table(
    ("how far the frozen layer moves", "zero_grad()", "zero_grad(set_to_none=False)"),
    [(name, round(none[name], 4), round(zero[name], 4)) for name in optimizers],
)
assert not any(none.values()) and zero["SGD"] == 0
assert all(zero[name] > 0 for name in optimizers if name != "SGD")

# %% tags=["claim-A08", "nbval-check-output"]
net = small_net()
sgd = SGD(net.parameters(), lr=0.1)
before = net[0].weight.clone()
net(torch.ones(2, 3)).square().mean().backward()
net[0].requires_grad_(False)  # after backward and before the step
sgd.step()
print("frozen between backward and step, it moves:", not torch.equal(net[0].weight, before))
assert not torch.equal(net[0].weight, before)

# %% [markdown]
# `requires_grad` speaks to autograd. The optimizer does not look at it; it looks at `.grad`, and skips a parameter whose gradient is `None`. A gradient of zeros is a gradient: momentum goes on from the steps before, and weight decay pulls. Today's `zero_grad()` sets `None`, so this needs `set_to_none=False`, as in older code, or
# a freeze between `backward` and `step`. To be certain, freeze and then set the gradients to `None`.
#
# The reverse case is a parameter that should be trained and is not. The articles name as a trap the *intermediate tensor* handed to an optimizer:

# %% tags=["claim-A14", "nbval-check-output"]
leaf = torch.randn(3, requires_grad=True)
with raises(ValueError):
    torch.optim.SGD([leaf * 0.01], lr=0.1)

net = small_net()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
net[2] = nn.Linear(4, 1)  # a new head, after the optimizer was made
head_before = net[2].weight.clone()
train(net, sgd, steps=3)
print("the new head has a gradient:", net[2].weight.grad is not None)
print("it has moved:               ", not torch.equal(net[2].weight, head_before))
in_optimizer = {id(p) for group in sgd.param_groups for p in group["params"]}
left_out = [name for name, p in net.named_parameters() if id(p) not in in_optimizer]
print("not in the optimizer:       ", left_out)
assert torch.equal(net[2].weight, head_before) and left_out == ["2.weight", "2.bias"]

# %% [markdown]
# That trap has closed: it raises at once. The hidden one is a parameter that was *replaced* after the optimizer was made. It receives gradients, and nobody steps it, while the optimizer holds the old one. Compare identities, as the last lines do.

# %% [markdown]
# ### Exercise 5 · Freeze a part
#
# Fine-tuning begins by freezing: the parameters of some layers stop recording. Two traps lie here. The layer called `layer1` is not `layer10`. And a parameter that is frozen but still holds a gradient keeps moving, as you have seen: the gradient goes, too.


# %% tags=["exercise"]
def freeze(module, prefix):
    """Freeze the parameters that lie under the submodule named prefix (a parameter's own name
    will do, too): they no longer require grad, and their .grad becomes None.

    Returns a list: the names of the parameters that still require grad, in the module's order.
    Raises ValueError where no parameter has that name or lies under it.

    >>> freeze(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), "0")
    ['1.weight', '1.bias']
    """
    ...


# %%
check(freeze)

# %% [markdown]
# ## 11 · Cutting the graph
#
# `detach()` gives a tensor with the same numbers and no history. It is a view (lesson 01: nothing is copied), and what is computed from it leads back no further. So a single word decides which parameters a loss reaches.

# %% tags=["nbval-check-output"]
torch.manual_seed(SEED)
first, second = nn.Linear(3, 3), nn.Linear(3, 1)
chain = nn.Sequential(first, second)
inputs = torch.ones(2, 3)

between = first(inputs)
for name, value in (("as it is", between), ("detached", between.detach())):
    loss = second(value).sum()
    reached, missing = kit.reached_leaves(loss), kit.unreached_parameters(chain, loss)
    print(f"{name:9} reaches {len(reached)} leaves, not reached: {missing or 'none'}")
assert between.detach().data_ptr() == between.data_ptr()
assert kit.unreached_parameters(chain, second(between).sum()) == []
assert kit.unreached_parameters(chain, second(between.detach()).sum()) == ["0.weight", "0.bias"]

# %% [markdown]
# `kit.reached_leaves` reads the answer off the graph before any `backward` has run. A parameter that is missing there cannot learn from this loss, whatever the optimizer holds.
#
# Freezing and detaching are not the same. Here the *second* layer is not to learn from the loss, and the first one is:

# %%
predict(
    "The second layer's parameters are frozen with `requires_grad_(False)`. "
    "Which leaves does `second(first(inputs)).sum()` reach?",
    run=lambda: (
        second.requires_grad_(False),
        len(kit.reached_leaves(second(first(inputs)).sum())),
        second.requires_grad_(True),
    )[1],
    options={
        "none: the frozen layer blocks the way": lambda leaves: leaves == 0,
        "the first layer's two: the gradient passes through": lambda leaves: leaves == 2,
        "all four": lambda leaves: leaves == 4,
    },
)

# %% [markdown]
# A frozen layer still has a derivative by its *input*, and passes it on. That is how a loss computed by a network that must not change can train what comes before it. Detach to stop the gradient; freeze to let it pass and spare the parameters.

# %% [markdown]
# ### Exercise 6 · Two networks, two losses
#
# A generator makes samples from noise; a critic gives each sample a number (a logit), high where it takes the sample for real. The critic's loss must not train the generator, and the generator's loss must reach the generator *through* the critic.
# One `detach()` decides, and in the wrong place it is silent.
#
# With `F.binary_cross_entropy_with_logits` as the loss: the critic wants 1 for the real samples and 0 for the generated ones, and its loss is the sum of these two; the generator wants 1 for the generated ones.


# %% tags=["exercise"]
def adversarial_losses(generator, critic, real, noise):
    """(critic_loss, generator_loss): two scalars, so that one backward on each of them gives the
    right gradients: critic_loss reaches no parameter of the generator, generator_loss reaches all.

    real (N, D), noise (M, Z); generator: (M, Z) → (M, D); critic: (N, D) → (N, 1), logits.
    What generator_loss leaves in the critic's .grad is not looked at.
    """
    ...


# %%
check(adversarial_losses)

# %% [markdown]
# ### Exercise 7 · A long sequence in pieces
#
# A recurrent cell reads a sequence step by step: `hidden = cell(sequence[t], hidden)`. Backward through all steps needs the graph of all steps. *Truncated* backpropagation runs backward after each piece of `chunk` steps and goes on from the hidden state as a plain number: values are carried over, the graph is not.


# %% tags=["exercise"]
def truncated_bptt(cell, head, sequence, targets, chunk):
    """Add to the .grad of cell and head the gradients of a loss truncated after every chunk steps.

    sequence (T, N, D), targets (T, N, K); hidden = cell(sequence[t], hidden) has shape
    (N, cell.hidden_size) and begins at zeros; the output of step t is head(hidden). The loss is the
    mean squared error over all T * N * K numbers: a chunk contributes its squared errors divided by
    that number of all. The last chunk may be shorter. Backward runs once for each chunk, before the
    next one begins, so that only one chunk's graph is alive at a time.

    Returns the loss of the whole sequence, a float.
    """
    ...


# %%
check(truncated_bptt)

# %% [markdown]
# ## 12 · Overwritten
#
# A saved tensor is not a copy. It is the tensor that you computed, and you can still write into it. What if you do, between the forward pass and `backward`?


# %%
def written_after(function, target):
    """Gradient of function(inputs) where its input or its result is written to before backward."""
    x = torch.tensor([0.5, 1.5], requires_grad=True)
    inputs = x * 1  # not a leaf, so that it may be written to
    result = function(inputs)
    (inputs if target == "input" else result).add_(1)
    result.sum().backward()
    return x.grad


# %%
predict(
    "`y = inputs.exp()`, then `inputs.add_(1)`, then `y.sum().backward()`. What happens?",
    run=lambda: written_after(torch.exp, "input"),
    options={
        "an error: the input has been overwritten": lambda grad: isinstance(grad, RuntimeError),
        "a wrong gradient, that of the new input": lambda grad: torch.allclose(
            grad, torch.tensor([1.5, 2.5]).exp()
        ),
        "the right gradient": lambda grad: torch.allclose(grad, torch.tensor([0.5, 1.5]).exp()),
    },
)

# %% tags=["claim-A17", "nbval-check-output"]
operations = {
    "exp": torch.exp,
    "relu": torch.relu,
    "sin": torch.sin,
    "x * x": lambda x: x * x,
    "x + 1": lambda x: x + 1,
    "x * 2": lambda x: x * 2,
}
refused = {}
for name, function in operations.items():
    for target in ("input", "result"):
        try:
            written_after(function, target)
            refused[name, target] = "works"
        except RuntimeError:
            refused[name, target] = "raises"
    print(
        f"{name:7} input overwritten: {refused[name, 'input']:7} result: {refused[name, 'result']}"
    )
assert refused["exp", "input"] == refused["sin", "result"] == refused["x + 1", "input"] == "works"
assert refused["exp", "result"] == refused["sin", "input"] == refused["x * x", "input"] == "raises"

# %% [markdown]
# In all six the error comes where the overwritten tensor is one that the node *saved*, and nowhere else. Try it: below, write into `h`, then into `y`, and step backward. Which of the two is refused, and at which node? Then put `sin` in the place of `exp`.

# %%
explore_graph("h = w * x; y = exp(h); loss = sum(y)")

# %% [markdown]
# How can PyTorch tell? Every tensor counts the writes into it, and a node notes the count of what it saves:

# %% tags=["claim-A17", "nbval-check-output"]
x = torch.tensor([0.5, 1.5], requires_grad=True)
y = x.exp()
print("version of y:", y._version)
y.detach().add_(1)  # through another tensor that shares the numbers
print("version of y:", y._version)
assert y._version == 1
with raises(RuntimeError):
    y.sum().backward()

# %% [markdown]
# Read it from the middle: *output 0 of Exp, is at version 1; expected version 0*. It names the operation that made the tensor, and the two counts. The detached tensor and `y` share the numbers and the count, so the write was noticed.
#
# A frequent writer is an optimizer. Its step changes the weights in place, and a layer that has to pass a gradient on to its input has saved its weight:

# %% tags=["claim-A21", "nbval-check-output"]
net = small_net()
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
loss = net(torch.ones(2, 3)).sum()
loss.backward(retain_graph=True)
sgd.step()
with raises(RuntimeError):
    loss.backward()

alone = nn.Linear(3, 1)
loss = alone(torch.ones(2, 3)).sum()
loss.backward(retain_graph=True)
torch.optim.SGD(alone.parameters(), lr=0.1).step()
loss.backward()  # its input needs no gradient, so it has not saved its weight
print("one layer alone does not raise:", alone.weight.grad.tolist())
assert alone.weight.grad.tolist() == [[4.0, 4.0, 4.0]]

# %% [markdown]
# The first `backward`, a step, and then another `backward` through the same graph: `retain_graph` does not help, since what it retained is no longer what it was. The message names the tensor by its shape: [4, 1] is the last layer's weight, transposed. Order the program so that every `backward` through a graph comes before the steps that change its weights, or compute anew.

# %% [markdown]
# ## 13 · A backward of your own
#
# `round` is recorded (section 2), and its derivative is 0 wherever there is one. So nothing before it can learn. A report of the gradients by layer shows it. `kit.gradient_norms` puts a hook on each parameter and collects the size of what arrives:


# %% tags=["claim-A22", "nbval-check-output"]
class Rounded(nn.Module):
    """Two layers with a rounding between them, as in a network that is to be stored in few bits."""

    def __init__(self, rounding):
        super().__init__()
        torch.manual_seed(SEED)
        self.first, self.last, self.rounding = nn.Linear(4, 8), nn.Linear(8, 1), rounding

    def forward(self, x):
        return self.last(self.rounding(3 * self.first(x)))


def norms_with(rounding):
    net = Rounded(rounding)
    with kit.gradient_norms(net) as norms:
        net(torch.linspace(-1, 1, 64).view(16, 4)).square().mean().backward()
    return norms


for name, norm in norms_with(torch.round).items():
    print(f"{name:13} {'zero' if norm == 0 else 'not zero'}")
assert norms_with(torch.round)["first.weight"] == 0 < norms_with(torch.round)["last.weight"]

# %% [markdown]
# The gradients of the first layer are there, and they are zero; no error says so. One cure is to lie about the derivative: round on the way forward, and on the way back pass the gradient on as if nothing had been rounded. A **custom Function** has a `forward` and a `backward` of its own, and is called through `apply`:


# %% tags=["nbval-check-output"]
class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):  # of the result; returns the gradient of each input
        return gradient


for name, norm in norms_with(StraightThrough.apply).items():
    print(f"{name:13} {'zero' if norm == 0 else 'not zero'}")
assert norms_with(StraightThrough.apply)["first.weight"] > 0

x = torch.tensor([0.3, 1.2], dtype=torch.float64, requires_grad=True)
with raises(RuntimeError):
    torch.autograd.gradcheck(StraightThrough.apply, (x,))

# %% [markdown]
# Autograd believes your `backward`. `gradcheck` does not: *numerical* is what differences say, *analytical* what `backward` says. Run `gradcheck` on every Function that is meant to be exact. What `backward` needs, `forward` hands to `ctx.save_for_backward(...)`, and `ctx.saved_tensors` returns it: then it is counted, freed and watched by version as in section 5. And `backward` is itself made of operations, which can be
# recorded in turn: write it with tensors, and it has a derivative as well.

# %% [markdown]
# ### Exercise 8 · An operation of your own
#
# Teach autograd the operation x · |x|, the square that keeps its sign. Its derivative is 2 · |x|. Write it as a `torch.autograd.Function`, and so that it can be differentiated twice: what `backward` computes must be made of the saved *input* by operations
# that autograd records.


# %% tags=["exercise"]
def signed_square():
    """The `apply` of a torch.autograd.Function of your own: a function x → x * |x|.

    Its gradient is right and can be differentiated again, away from 0. What backward needs is kept
    by ctx.save_for_backward, so that a later in-place write into x raises at backward.

    >>> signed_square()(torch.tensor([-3.0, 2.0]))
    tensor([-9.,  4.])
    """
    ...


# %%
check(signed_square)

# %% [markdown]
# ## 14 · Gradients of gradients
#
# A slope is computed from the inputs as well. So one can ask how *it* changes, if the backward pass was recorded.

# %%
x = torch.tensor(2.0, requires_grad=True)


def second_derivative(**options):
    (slope,) = torch.autograd.grad(x**3, x, **options)
    (curvature,) = torch.autograd.grad(slope, x)
    return curvature.item()


# %%
predict(
    "The second derivative of x³ at 2 is 12. The first is taken by "
    "`torch.autograd.grad(x**3, x, retain_graph=True)`. What does differentiating it give?",
    run=lambda: second_derivative(retain_graph=True),
    options={
        "12: the graph was retained": lambda came: came == 12,
        "0: the slope is a constant by now": lambda came: came == 0,
        "an error": lambda came: isinstance(came, RuntimeError),
    },
)

# %% tags=["claim-A19", "nbval-check-output"]
for option in ("retain_graph", "create_graph"):
    (slope,) = torch.autograd.grad(x**3, x, **{option: True})
    print(f"{option}=True: slope {slope.item()}, with a graph of {len(kit.walk(slope))} nodes")
with raises(RuntimeError):
    second_derivative(retain_graph=True)
print("with create_graph:", second_derivative(create_graph=True))
assert second_derivative(create_graph=True) == 12.0

cube = x**3
torch.autograd.grad(cube, x, create_graph=True)
assert torch.autograd.grad(cube, x)[0] == 12.0  # a second time: create_graph has also retained

# %% [markdown]
# `retain_graph` keeps what the *forward* pass saved, so that one can go back through it again. `create_graph` records the *backward* pass, so that its result has a graph of its own. (It retains as well.) The articles name gradient penalties and adversarial training as reasons for several backward passes. A gradient
# penalty needs `create_graph`. The game of two networks needs neither:

# %% tags=["claim-A19", "nbval-check-output"]
generator = nn.Linear(2, 3)
critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
made = generator(torch.ones(5, 2))
critic(made.detach()).mean().backward()  # the critic's turn: its graph ends at made
reached_generator = generator.weight.grad is not None
critic(made).mean().backward()  # the generator's turn: another pass through the critic
print("first backward reaches the generator:", reached_generator)
print("second backward reaches the generator:", generator.weight.grad is not None)
assert not reached_generator and generator.weight.grad is not None

# %% [markdown]
# Now the opening can be explained. Its `slope` came without a graph: a tensor of plain numbers. Used alone it would have raised, as above. Added to an error that does have a graph it is a constant, and the derivative of a constant is 0. The loss shows it and the training never does.


# %% tags=["claim-A23"]
def fit_smoothly(strength, steps=300):
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    inputs = points.clone().requires_grad_()
    for _ in range(steps):
        curve = net(inputs)
        (slope,) = torch.autograd.grad(curve.sum(), inputs, create_graph=True)  # was retain_graph
        error, penalty = F.mse_loss(curve, heights), slope.square().mean()
        optimizer.zero_grad()
        (error + strength * penalty).backward()
        optimizer.step()
    return net, error.item(), penalty.item()


smooth = {strength: fit_smoothly(strength) for strength in strengths}
table(
    ("strength", "penalty in the opening", "penalty now"),
    [(s, round(fits[s][2], 3), round(smooth[s][2], 3)) for s in strengths],
)
assert torch.equal(fits[0][0][0].weight, fits[1000][0][0].weight)
assert smooth[0][2] > smooth[0.03][2] > smooth[1000][2]

# %%
with torch.no_grad():
    drawn = {f"strength {s:g}": net(grid).flatten() for s, (net, _, _) in smooth.items()}
drawn["without noise"] = torch.sin(3 * grid).flatten()
places = grid.flatten().tolist()
curves({name: (places, ys.tolist()) for name, ys in drawn.items()}, "input", "height")
for name in list(drawn)[:3]:
    away = F.mse_loss(drawn[name], drawn["without noise"]).sqrt().item()
    print(f"{name}: {away:.3f} away from the curve without noise (root mean square)")

# %% [markdown]
# One argument, and the strength does what it says: the middle curve no longer follows each point, and the strongest penalty allows no slope at all. To catch such a penalty at once, look whether it `requires_grad` before it is added, or ask `kit.reached_leaves(penalty)`.

# %% [markdown]
# ### Exercise 9 · A penalty on a gradient
#
# Some critics are trained to have a gradient of norm 1 wherever they are asked. The penalty contains a gradient, and training differentiates the penalty: a gradient of a gradient.


# %% tags=["exercise"]
def gradient_penalty(critic, x):
    """Mean over the samples of (norm of the gradient of the critic's output at the sample - 1)².

    x (N, …) holds one sample in each row, and critic(x) (N, 1) one number for each, computed from
    that sample alone. The norm is over all numbers of a sample. Returns a scalar; backward on it
    gives the right gradients of the critic's parameters. x is a constant: the penalty reaches
    nothing that x was made from. The call changes no .grad, and leaves x as it is.
    """
    ...


# %%
check(gradient_penalty)

# %% [markdown]
# ### Exercise 10 · The Hessian times a vector
#
# The **Hessian** of a function of n numbers holds its second derivatives, one for each pair of numbers: n², which for a network nobody can store. Its product with one vector costs no more than a few gradients, and shows how curved the loss is in that direction.


# %% tags=["exercise"]
def hessian_vector_product(function, x, v):
    """H @ v for the Hessian H of function(x), one number, at x; v and the result have x's shape.

    The Hessian itself is never built: memory for a few tensors like x is enough. Where the function
    is linear, the result is zeros. x and every .grad stay as they are.

    >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
    >>> hessian_vector_product(lambda x: (x**3).sum(), x, v)
    tensor([6., 0.])
    """
    ...


# %%
check(hessian_vector_product)

# %% [markdown]
# ## 15 · One gradient for each sample
#
# The gradient of a mean loss is the mean of the samples' own gradients. Those are useful in themselves: one sample that pulls harder than the others stands out. `backward` only ever adds them up. `torch.func` treats the gradient as a function to be transformed: `grad(f)` gives the function that computes the gradient of `f`, and `vmap` runs a function
# for all entries of a batch at once.

# %% tags=["nbval-check-output"]
cube_slope = torch.func.grad(lambda x: x**3)
print("slope of x³ at 2:", cube_slope(torch.tensor(2.0)).item())
print("at 1, 2 and 3:   ", torch.func.vmap(cube_slope)(torch.tensor([1.0, 2.0, 3.0])).tolist())
assert torch.func.vmap(cube_slope)(torch.tensor([1.0, 2.0, 3.0])).tolist() == [3.0, 12.0, 27.0]

# %% [markdown]
# A model keeps its parameters to itself, while `grad` wants them as an argument: `torch.func.functional_call(model, parameters, inputs)` runs the model with the parameters that it is given, a dictionary by name.

# %% [markdown]
# ### Exercise 11 · Whose gradient is it?
#
# `backward()` gives the mean of the samples' gradients. Which sample pulls hardest? A loop over the samples answers, one backward each. `torch.func` (`functional_call`, `grad`, `vmap`) answers in one pass. Any way counts.


# %% tags=["exercise"]
def per_sample_gradients(model, loss_fn, inputs, targets):
    """{name: (N, *shape of the parameter)} for every parameter that requires grad.

    Row i is the gradient of loss_fn(model(x), y), where x and y are the batch of one that holds
    sample i alone. No .grad changes, and the gradients have no graph of their own.

    >>> gradients = per_sample_gradients(
    ...     nn.Linear(2, 1), F.mse_loss, torch.ones(5, 2), torch.zeros(5, 1)
    ... )
    >>> gradients["weight"].shape
    torch.Size([5, 1, 2])
    """
    ...


# %%
check(per_sample_gradients)

# %% [markdown]
# What for? The label of sample 77, among the digits of section 2, is now made wrong. The classifier is trained already. Which samples have the largest gradients?

# %% tags=["claim-A24"]
sample_labels = labels_train[:200].clone()
planted = 77
sample_labels[planted] = (sample_labels[planted] + 1) % 10
each = kit.per_sample_gradients(classifier, F.cross_entropy, images_train[:200], sample_labels)
sizes = torch.cat([g.flatten(1) for g in each.values()], dim=1).norm(dim=1)

classifier.zero_grad()
F.cross_entropy(classifier(images_train[:200]), sample_labels).backward()
for name, parameter in classifier.named_parameters():
    assert torch.allclose(each[name].mean(0), parameter.grad, atol=1e-5)
print("the mean of the samples' gradients is the gradient of the mean loss")
largest = sizes.argsort(descending=True)[:10].tolist()
multiples = (sizes / sizes.median()).tolist()
images(
    [images_train[i].view(28, 28) for i in largest[:5]],
    [
        f"sample {i}, label {sample_labels[i]}\n{multiples[i]:.0f} times the median"
        for i in largest[:5]
    ],
    scale=4,
)
print("the ten largest:", largest)
assert planted in largest

# %% [markdown]
# The wrong label is among the ten of 200 that pull hardest. Sorting by gradient is a cheap way to find labels to look at again. It does not prove them wrong: the other samples in the list pull as well, by their writing.

# %% [markdown]
# ## Clinic
#
# Six programs that are wrong, each reduced from a failure that someone reported. You see the symptom as its user saw it. Find the cause, repair the function, check it.

# %% [markdown]
# ### Clinic 1 · The step that is not the optimizer's
#
# One step of gradient descent, written by hand: each layer is updated as soon as its gradient is known. Training works, and every run ends somewhat worse than a colleague's with `torch.optim.SGD` at the same rate. Here is the first step of both.


# %% tags=["exercise", "clinic"]
def descent_step(x, target, w1, w2, rate=0.1):
    """New w1 and w2 after one step of gradient descent on the mean squared error of
    tanh(x @ w1) @ w2, both gradients taken at the w1 and w2 given, which stay as they are.

    x (N, D), w1 (D, H), w2 (H, K), target (N, K). Returns two tensors that require no grad.
    """
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    loss = ((torch.tanh(x @ w1) @ w2 - target) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, w2, retain_graph=True)
    w2.data -= rate * gradient
    (gradient,) = torch.autograd.grad(loss, w1)
    w1.data -= rate * gradient
    return w1.detach(), w2.detach()


# %%
samples, wanted = torch.randn(20, 3), torch.randn(20, 1)
w1, w2 = torch.randn(3, 4), torch.randn(4, 1)
twins = [w.clone().requires_grad_() for w in (w1, w2)]
sgd = torch.optim.SGD(twins, lr=0.5)
F.mse_loss(torch.tanh(samples @ twins[0]) @ twins[1], wanted).backward()
sgd.step()
for name, by_hand, twin in zip(("w1", "w2"), descent_step(samples, wanted, w1, w2, 0.5), twins):
    print(f"{name}: largest difference from SGD {(by_hand - twin).abs().max().item():.6f}")

# %%
check(descent_step)

# %% [markdown]
# Read on when you have tried. Section 12 has shown that PyTorch notices a write into what it saved. Why not here? `y.data` gives the same memory with a count of writes *of its own*:


# %% tags=["claim-A18", "nbval-check-output"]
def written_through(way):
    """Gradient of exp at 0 and 1 where `way` sets its result to zero before backward."""
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    y = x.exp()
    way(y)
    print("version of y:", y._version)
    y.sum().backward()
    return x.grad


def zero_under_no_grad(y):
    with torch.no_grad():
        y.zero_()


print("right:", torch.tensor([0.0, 1.0]).exp().tolist())
silent = written_through(lambda y: y.data.zero_())
print(".data:", silent.tolist())
assert silent.tolist() == [0.0, 0.0]
for way in (lambda y: y.detach().zero_(), zero_under_no_grad):
    with raises(RuntimeError):
        written_through(way)

# %% [markdown]
# Zero for a derivative that is nowhere zero, and no word of it (pytorch/pytorch#6990). `detach()` gives the same memory with the *same* count, and so does writing under `no_grad`. Both turn the silent mistake into the error of section 12. Where you would write `.data`, write one of these: it does the same and is watched.

# %% [markdown]
# ### Clinic 2 · The head that will not train
#
# A frozen encoder computes features, a small head learns from them. To save work, a generator runs the encoder under `no_grad`, batch by batch. The head's parameters require grad, and its loss does not.


# %% tags=["exercise", "clinic"]
def frozen_features(encoder, batches):
    """Yields the encoder's output for each of the batches, without a graph.

    Whether gradients are on stays the business of whoever takes the features: it is for them, at
    every batch, as it was before.
    """
    with torch.no_grad():
        for batch in batches:
            yield encoder(batch)


# %%
encoder, head = nn.Linear(4, 3), nn.Linear(3, 1)
features = frozen_features(encoder, torch.randn(2, 5, 4))
for batch in features:
    loss = head(batch).square().mean()
    print("the head requires grad:", head.weight.requires_grad, "  its loss:", loss.requires_grad)
features.close()

# %%
check(frozen_features)

# %% [markdown]
# ### Clinic 3 · The scale that never moves
#
# A linear layer carries a learned scale for each of its outputs; the model computes `layer(x) * layer.scale`. The unit test, in float32, is green: the scale trains and is saved. In float64 the model trains too, a little worse.


# %% tags=["exercise", "clinic"]
def scaled_linear(features, outputs, dtype=torch.float32):
    """A linear layer with one parameter more: scale (outputs,), which begins at ones.

    Its parameters are weight, bias and scale, all of this dtype. All of them train and are saved.
    """
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = nn.Parameter(torch.ones(outputs)).to(dtype)
    return layer


# %%
for dtype in (torch.float32, torch.float64):
    layer = scaled_linear(3, 2, dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        outputs = layer(torch.ones(4, 3, dtype=dtype)) * layer.scale
        F.mse_loss(outputs, torch.ones_like(outputs)).backward()
        optimizer.step()
    moved = not torch.equal(layer.scale, torch.ones_like(layer.scale))
    print(f"{dtype}: the scale has moved: {moved}; saved: {list(layer.state_dict())}")

# %%
check(scaled_linear)

# %% [markdown]
# ### Clinic 4 · Saved memory, lost gradients
#
# Activation checkpointing keeps only what goes into each block and computes the rest again during backward. The embedding in front is frozen, to save more. A warning flew by in the log, the loss falls, since the head learns, and the blocks end as they began.


# %% tags=["exercise", "clinic"]
def checkpointed(blocks, x):
    """Output of the blocks, one after the other, so that backward gives the right gradients of
    their parameters, and of x if it requires grad; x stays as it is.

    Of each block at most its input is kept for backward, whatever the block computes inside.
    """
    for block in blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    return x


# %%
blocks = nn.Sequential()
for _ in range(3):
    blocks.append(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)))
head = nn.Linear(4, 1)
with warnings.catch_warnings(action="ignore"):  # the log that nobody read
    outputs = head(checkpointed(blocks, torch.randn(8, 4)))
outputs.square().mean().backward()
for name, part in (("head", head), ("blocks", blocks)):
    got = [parameter.grad is not None for parameter in part.parameters()]
    print(f"{name}: {sum(got)} of {len(got)} parameters have a gradient")

# %%
check(checkpointed)

# %% [markdown]
# ### Clinic 5 · The error that was cured
#
# A line is fitted to a stream of batches. To be independent of the unit of y, each batch's error is divided by a running mean of the errors. The first version stopped at the second batch: *Trying to backward through the graph a second time*. With `retain_graph=True` it runs. On long streams
# it grows slower and larger from batch to batch.


# %% tags=["exercise", "clinic"]
def fit_stream(batches, rate=0.1):
    """Weights (D,) after one step of gradient descent for each batch (x, y), x (N, D) and y (N,).

    The loss of a batch is error / scale: error is the mean squared error of x @ weights, and scale,
    a number that takes no part in the gradient, is the running mean 0.9 * scale + 0.1 * error, this
    batch's error included. The weights begin at 0 and the scale at 1. The memory needed does not
    grow with the number of batches. The result requires no grad.
    """
    weights = torch.zeros(batches[0][0].shape[1], requires_grad=True)
    scale = 1.0
    for x, y in batches:
        error = ((x @ weights - y) ** 2).mean()
        scale = 0.9 * scale + 0.1 * error
        (error / scale).backward(retain_graph=True)
        with torch.no_grad():
            weights -= rate * weights.grad
            weights.grad = None
    return weights.detach()


# %%
inputs = [torch.randn(16, 2) for _ in range(80)]
stream = [(x, x @ torch.tensor([3.0, -2.0])) for x in inputs]
for n in (10, 20, 40, 80):
    with kit.saved_bytes() as saved:
        weights = fit_stream(stream[:n])
    print(f"{n} batches: {saved.peak:,} bytes held for backward at the peak")

# %%
check(fit_stream)

# %% [markdown]
# ### Clinic 6 · Validation runs out of memory
#
# Training fits into memory. Validation, with the same model and smaller batches, fits on the small validation set and not on the large one.


# %% tags=["exercise", "clinic"]
def validation_loss(model, loss_fn, batches):
    """Mean loss over all samples of the batches (x, y), a float; loss_fn gives the mean of a batch.

    Batches may differ in size. The memory needed does not grow with the number of batches. The
    model stays as it is, its mode included.
    """
    total, samples = 0.0, 0
    for x, y in batches:
        total += loss_fn(model(x), y) * len(x)
        samples += len(x)
    return (total / samples).item()


# %%
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
for n in (1, 10, 100):
    with kit.saved_bytes() as saved:
        loss = validation_loss(model, F.mse_loss, [(torch.randn(4, 8), torch.zeros(4, 1))] * n)
    print(f"{n:3} batches: {saved.peak:,} bytes held for backward at the peak")

# %%
check(validation_loss)

# %% [markdown]
# ## What you take with you
#
# **Your toolkit**, in `course_utils.toolkit.autograd`: `walk`, `saved_tensors`, `graph_bytes`, `saved_bytes`, `reached_leaves`, `unreached_parameters`, `gradient_norms`, `leaf_gradient`, `finite_difference`, `freeze`, `gradient_penalty`, `hessian_vector_product`, `per_sample_gradients`. For a project of your own, a first look at any loss:

# %% tags=["nbval-check-output"]
net = small_net()
net[0].requires_grad_(False)
loss = net(torch.ones(2, 3)).square().mean()
print(len(kit.walk(loss)), "nodes keep", kit.graph_bytes(loss), "bytes")
print("not reached:", kit.unreached_parameters(net, loss))

# %% [markdown]
# | symptom | cause | test | cure |
# | --- | --- | --- | --- |
# | `backward through the graph a second time` | saved tensors were freed, and two losses share a part | `kit.walk(loss)`: which nodes are `freed` | one `backward` of the sum; `retain_graph` where gradients are wanted apart |
# | memory grows at each validation step | results are kept and no `backward` ran | `kit.graph_bytes(*kept)` | `no_grad` around validation; `.item()` or `.detach()` for what is kept |
# | `modified by an inplace operation` | a saved tensor was written to, often by `optimizer.step()` | `x._version`, and which operations save it | every `backward` before the write; `clone()`; compute anew |
# | a wrong gradient, and no error | a write that the version count did not see | `kit.finite_difference`, `gradcheck` | `detach()` or `no_grad` for `.data` |
# | a penalty changes the loss and not the training | its gradient was taken without `create_graph` | `penalty.requires_grad` | `create_graph=True` |
# | `.grad` is `None` | not a leaf; cut by `detach`; not reached; recording was off | `x.is_leaf`, `kit.unreached_parameters`, `torch.is_grad_enabled()` | `retain_grad()`; find the cut |
# | a gradient is there and always zero | `round`, `sign`, a dead unit | `kit.gradient_norms` | a straight-through Function, another operation |
# | a gradient is there and the weight stays | the parameter was replaced after the optimizer was made | compare identities with `optimizer.param_groups` | make the optimizer last |
# | a frozen layer moves | its gradient is zero and not `None` | `parameter.grad` | `parameter.grad = None` when freezing |
# | `does not require grad and does not have a grad_fn` | the result was computed without a record, or from whole numbers | `result.requires_grad`, step by step | compute it from floats, outside `no_grad` |
# | `Inference tensors cannot be saved for backward` | a cache was filled under `inference_mode` | `tensor.is_inference()` | `no_grad` for evaluations between trainings |
#
# **What the articles say, and what you have seen**
#
# | claim | verdict |
# | --- | --- |
# | the graph is built anew at each pass, `if` and `for` work (A01) | holds |
# | a second `backward()` raises because the graph was freed (A02) | the saved tensors are freed; where a graph saved none, it works, and adds |
# | two losses over one shared part need `retain_graph` (A03) | two calls through one graph do; the sum and the cut give the same gradients without it, with one pass through the trunk |
# | `retain_graph` raises memory (A04) | holds: all saved tensors stay |
# | every result of a tensor that requires grad records (A05) | not whole numbers, not under `no_grad` or `inference_mode` |
# | `no_grad` saves memory (A06) | holds; `inference_mode` saves as much, and what it makes can never be saved for `backward` |
# | `eval()` and `no_grad()` are different, and both are needed (A07) | holds |
# | a frozen parameter in the optimizer costs Adam's state (A08) | not if it is frozen from the start; frozen later with a zero gradient, it even moves |
# | `backward()` fills `.grad` of what requires grad (A09) | of leaves |
# | updates by hand belong under `no_grad` (A10) | holds, and in place |
# | gradients accumulate (A11); x² + 3x + 1 has slope 7 at 2 (A12) | holds |
# | parameters require grad and inputs do not (A13) | holds; sometimes the input's is what you want |
# | an intermediate tensor in the optimizer is a hidden trap (A14) | it raises; the hidden one is a replaced parameter |
# | a dynamic graph costs something (A15) | measured: mostly a fixed price for each operation, and intermediate results |
# | appending `loss` keeps the whole graph (A16) | after `backward`, empty nodes; without one, or with `retain_graph`, all of it |
# | gradient penalties and adversarial training need several backward passes (A19) | penalties need `create_graph`; the two-network game needs neither |
# | *beyond the articles:* in-place writes are found by a version count (A17); `.data` escapes it (A18); inference tensors (A20); a step between two `backward` (A21); `round` has a gradient of zero (A22); a penalty without a graph (A23); a wrong label has a large gradient of its own (A24) | seen |
#
# For more: [Autograd mechanics](https://pytorch.org/docs/stable/notes/autograd.html) is PyTorch's own account of saved tensors, grad modes and in-place checks; [Double backward with custom functions](https://pytorch.org/tutorials/intermediate/custom_function_double_backward_tutorial.html) goes on
# where exercise 8 stops; [micrograd](https://github.com/karpathy/micrograd) is an autograd engine of about a hundred lines.
#
# Next: lesson 03, the loop around `backward`.
