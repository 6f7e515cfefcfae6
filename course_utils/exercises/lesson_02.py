"""Exercises of lesson 02, in the order of the notebook: eleven to build, then the clinic's six to repair.

What is worth keeping lives in the toolkit; the references below are the repairs and the tasks that belong to one story alone.
Most inputs are float64, so that a right answer by another way (finite differences among them) agrees to 1e-7 and a wrong one does not.
"""

import warnings
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from course_utils.engine.compare import brief, difference, kind
from course_utils.engine.exercises import Case, Exercise, Mistake
from course_utils.toolkit.autograd import (
    finite_difference,
    freeze,
    gradient_penalty,
    hessian_vector_product,
    leaf_gradient,
    per_sample_gradients,
    reached_leaves,
    saved_bytes,
    walk,
)
from course_utils.toolkit.tensors import allocated_bytes

LESSON = "02_autograd"
TOLERANCE = 1e-7  # float64: exact ways agree to 1e-13, central differences to 1e-9; the mistakes below differ by more than 1e-5


class Formula:
    """A function that shows what it computes where a report names its arguments."""

    def __init__(self, text, function):
        self.text, self.function = text, function

    def __call__(self, *args):
        return self.function(*args)

    def __repr__(self):
        return self.text


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(make):
    """`make()` with its own seed, whoever calls it: the same modules for the learner, the reference and the judge."""

    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make()

    return made


def doubled(*layers):
    return nn.Sequential(*layers).double()


def differs(what, wanted, came, tolerance=TOLERANCE):
    """A complaint about `what`, or None."""
    said = difference(wanted, came, tolerance)
    return f"{what}: {said}" if said else None


def tried(judge):
    """A judge that uses what came, and says so where that raises."""

    def verify(result, *args):
        try:
            return judge(result, *args)
        except Exception as error:  # the learner's own function, run outside the call
            message = str(error).splitlines()
            return f"using what came raised {type(error).__name__}" + (f": {message[0][:300]}" if message else "")

    return verify


def gradients_of(module):
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def fill_gradients(*modules, value=1.0):
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, value)


def first(complaints):
    """The first complaint of a lazy series, or None: nothing after it is looked at."""
    return next((said for said in complaints if said), None)


# ── Exercise 1 ────────────────────────────────────────────────────────────────────────────────────────────────────────

PARABOLA = Formula("x**2 + 3 * x + 1", lambda x: (x**2 + 3 * x + 1).sum())
CUBES = Formula("(x**3).sum()", lambda x: (x**3).sum())


def _with_gradient():
    x = noise(3).requires_grad_()
    x.grad = torch.full((3,), 5.0, dtype=torch.float64)
    return x


def _made_from_another():
    return noise(3).requires_grad_() * 2


def _x_as_it_was(requires_grad, gradient, leaf=True):
    """A judge of everything about x that the values do not show."""

    def complaint(x):
        if x.requires_grad != requires_grad:
            return f"x {'requires' if x.requires_grad else 'no longer requires'} grad after the call"
        if x.is_leaf != leaf:
            return "x has got another history"
        if not leaf:
            return next(("the call has filled the .grad of what x was made from" for t in reached_leaves(x) if t.grad is not None), None)
        if gradient is None:
            return None if x.grad is None else f"x.grad was None and is now {brief(x.grad)}"
        said = difference(torch.full_like(x.detach(), gradient), x.grad)
        return f"x.grad held {gradient} everywhere and has changed: {said}" if said else None

    return complaint


def _judge_leaf_gradient(requires_grad, gradient=None, leaf=True):
    unchanged = _x_as_it_was(requires_grad, gradient, leaf)

    def verify(result, function, x):
        return difference(leaf_gradient(function, x), result, TOLERANCE) or unchanged(x)

    return verify


def _in_place_of_x(function, x):
    x.requires_grad_()
    function(x).backward()
    return x.grad


def _leaf_if_needed(function, x):
    leaf = x if x.requires_grad else x.clone().requires_grad_()
    function(leaf).backward()
    return leaf.grad


def _cloned_leaf(function, x):
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    return None if x.requires_grad else leaf.grad  # what .grad of a non-leaf is, without its warning


LEAF_GRADIENT = Exercise(
    lesson=LESSON,
    solution=leaf_gradient,
    hints=(
        "x is not yours. What can you make from it that has its values, and neither its history nor its .grad?",
        "`leaf = x.detach().clone().requires_grad_()` is a leaf of its own. Then `torch.autograd.grad(function(leaf), leaf)` "
        "returns the gradient in a tuple and writes into no .grad.",
    ),
    cases=(
        Case("y = x² + 3x + 1 at x = 2", lambda: (PARABOLA, torch.tensor(2.0)), tolerance=1e-6),
        Case("x is a vector", lambda: (CUBES, noise(3)), tolerance=TOLERANCE),
        Case("x is a matrix", lambda: (CUBES, noise(2, 3)), tolerance=TOLERANCE),
        Case("x does not require grad", lambda: (CUBES, noise(3)), tolerance=TOLERANCE, verify=_judge_leaf_gradient(False)),
        Case("x is a leaf that requires grad", lambda: (CUBES, noise(3).requires_grad_()), verify=_judge_leaf_gradient(True)),
        Case("x holds a gradient already", lambda: (CUBES, _with_gradient()), verify=_judge_leaf_gradient(True, 5.0)),
        Case("x was made from another tensor", lambda: (CUBES, _made_from_another()), verify=_judge_leaf_gradient(True, leaf=False)),
    ),
    mistakes=(
        Mistake(
            "`torch.autograd.grad` returns a tuple, one gradient for each input: unpack it, or take `[0]`.",
            lambda function, x: (leaf_gradient(function, x),),
        ),
        Mistake(
            "`x.requires_grad_()` changes the caller's tensor, and backward fills its .grad. Work on `x.detach().clone()`.",
            _in_place_of_x,
        ),
        Mistake(
            "The clone of a tensor that requires grad is no leaf: it remembers x, backward walks on to x and fills x.grad, and the "
            "clone's own .grad stays None. Detach before you clone.",
            _cloned_leaf,
        ),
        Mistake(
            "Where x requires grad already, backward writes into the .grad that its owner uses, and adds to what is there. "
            "Work on `x.detach().clone()` in every case.",
            _leaf_if_needed,
        ),
    ),
)

# ── Exercise 2 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def backward_by_hand(x, w1, b1, w2, target):
    """Gradients of the loss with respect to w1, b1 and w2, from the last operation to the first."""
    hidden = torch.tanh(x @ w1 + b1)  # (N, H)
    output = hidden @ w2  # (N, K)
    d_output = 2 * (output - target) / output.numel()  # of the mean of squares
    d_w2 = hidden.t() @ d_output
    d_hidden = d_output @ w2.t()
    d_sum = d_hidden * (1 - hidden**2)  # through tanh
    return x.t() @ d_sum, d_sum.sum(dim=0), d_w2


def _by_hand(two=2.0, count=torch.numel, slope=lambda hidden, inside: 1 - hidden**2, bias=lambda d: d.sum(dim=0)):
    """backward_by_hand with one of its steps done otherwise."""

    def gradients(x, w1, b1, w2, target):
        inside = x @ w1 + b1
        hidden = torch.tanh(inside)
        output = hidden @ w2
        d_output = two * (output - target) / count(output)
        d_sum = d_output @ w2.t() * slope(hidden, inside)
        return x.t() @ d_sum, bias(d_sum), hidden.t() @ d_output

    return gradients


def _network(n, d, h, k, scale=1.0):
    return scale * noise(n, d), noise(d, h, seed=1), noise(h, seed=2), noise(h, k, seed=3), noise(n, k, seed=4)


def _met_target():
    x, w1, b1, w2, _ = _network(3, 2, 4, 2)
    return x, w1, b1, w2, torch.tanh(x @ w1 + b1) @ w2


BACKWARD_BY_HAND = Exercise(
    lesson=LESSON,
    solution=backward_by_hand,
    hints=(
        "Begin at the end: the mean of n squares has the gradient 2 * (output - target) / n in each element, and n counts all "
        "elements of output.",
        "Through a product `c = a @ b`, the gradient d of c becomes `d @ b.t()` for a and `a.t() @ d` for b: no other order of "
        "the two has the right shape. Through tanh, multiply by 1 - hidden².",
        "b1 was added to each of the N rows, so its gradient is the sum of the rows' gradients: `.sum(dim=0)`.",
    ),
    cases=(
        Case("there are two samples", lambda: _network(2, 3, 2, 2), tolerance=TOLERANCE),
        Case("there is one sample", lambda: _network(1, 3, 4, 2), tolerance=TOLERANCE),
        Case("all sizes differ", lambda: _network(3, 2, 4, 5), tolerance=TOLERANCE),
        Case("one number comes out for each sample", lambda: _network(4, 3, 2, 1), tolerance=TOLERANCE),
        Case("all sizes are equal, so that a missing transpose has the right shape", lambda: _network(3, 3, 3, 3), tolerance=TOLERANCE),
        Case("the output is far from tanh's middle", lambda: _network(3, 2, 4, 2, scale=3.0), tolerance=TOLERANCE),
        Case("the output meets its target", _met_target, tolerance=TOLERANCE),
    ),
    mistakes=(
        Mistake("The factor 2 of the square's derivative is missing.", _by_hand(two=1.0)),
        Mistake("The sign is turned round: the derivative of (output - target)² by output is 2 * (output - target).", _by_hand(two=-2.0)),
        Mistake(
            "This is the gradient of the *sum* of the squares. The loss is their mean: each element weighs 1 / (N * K).",
            _by_hand(count=lambda output: 1),
        ),
        Mistake(
            "The division is by the number of samples alone. The mean is over all N * K numbers of the output.",
            _by_hand(count=len),
        ),
        Mistake(
            "The derivative of tanh at z is 1 - tanh(z)², and here it is 1 - z²: use hidden, which is tanh of the sum already.",
            _by_hand(slope=lambda hidden, inside: 1 - inside**2),
        ),
        Mistake(
            "The gradient passes through tanh as if it were not there: multiply by its derivative, 1 - hidden².",
            _by_hand(slope=lambda hidden, inside: 1.0),
        ),
        Mistake(
            "tanh is applied twice: hidden is tanh of the sum already, so its derivative is 1 - hidden².",
            _by_hand(slope=lambda hidden, inside: 1 - torch.tanh(hidden) ** 2),
        ),
        Mistake(
            "b1 has one gradient for each sample here. It was added to every row, so the rows' gradients add up: `.sum(dim=0)`.",
            _by_hand(bias=lambda d: d),
        ),
        Mistake(
            "The rows' gradients of b1 are averaged. They add up: the mean of the loss is in them already.",
            _by_hand(bias=lambda d: d.mean(dim=0)),
        ),
    ),
)

# ── Exercise 3 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def graph_size(loss):
    """Number of nodes that loss.grad_fn leads to, by a list of nodes to visit and a set of those that were."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        fn = waiting.pop()
        if fn is not None and fn not in seen:
            seen.add(fn)
            waiting.extend(input for input, _ in fn.next_functions)
    return len(seen)


def _ones():
    return torch.ones(3, requires_grad=True)


def _diamond():
    y = _ones() * 2
    return (y.exp() + y.sin()).sum()


def _after_backward():
    loss = (_ones().exp() * 2).sum()
    loss.backward()
    return loss


def _twice_each_time(steps):
    y = _ones()
    for _ in range(steps):
        y = y * y
    return y.sum()


def _deep(steps):
    y = _ones()
    for _ in range(steps):
        y = y + 1
    return y.sum()


def _paths(loss):
    def below(fn):
        return 0 if fn is None else 1 + sum(below(f) for f, _ in fn.next_functions)

    return below(loss.grad_fn)


def _chain(loss):
    size, fn = 0, loss.grad_fn
    while fn is not None:
        size, fn = size + 1, fn.next_functions[0][0] if fn.next_functions else None
    return size


GRAPH_SIZE = Exercise(
    lesson=LESSON,
    solution=graph_size,
    hints=(
        "Keep two things: the nodes still to visit, which begins as `[loss.grad_fn]`, and the nodes already seen. A node is a "
        "Python object that a set can hold.",
        "A function that calls itself goes as deep as the graph, and Python stops at about a thousand calls. A loop `while "
        "waiting: fn = waiting.pop()` does not.",
        "Skip what is None or seen; else add it to seen and its inputs to waiting: `waiting.extend(f for f, _ in "
        "fn.next_functions)`. At the end `len(seen)`.",
    ),
    cases=(
        Case("a sum of a product", lambda: ((_ones() * 2).sum(),)),
        Case("two steps have the same name", lambda: ((_ones() * 2 * 3).sum(),)),
        Case("an input needs no gradient", lambda: ((torch.ones(3) * _ones()).sum(),)),
        Case("the second input leads on", lambda: ((torch.ones(3) - _ones().exp().sin()).sum(),)),
        Case("there are two leaves", lambda: ((_ones() * _ones()).sum(),)),
        Case("two paths lead to one node", lambda: (_diamond(),)),
        Case("a tensor has no graph", lambda: (torch.ones(3),)),
        Case("a leaf has no graph behind it", lambda: (_ones(),)),
        Case("backward has run", lambda: (_after_backward(),)),
        Case("each of twelve steps uses its input twice", lambda: (_twice_each_time(12),)),
        Case("the graph is 10,000 steps deep", lambda: (_deep(10_000),)),
    ),
    mistakes=(
        Mistake(
            "Nodes are told apart by their name, and two multiplications have the same one. Keep the nodes themselves in the set.",
            lambda loss: len({node.name for node in walk(loss)}),
        ),
        Mistake(
            "The AccumulateGrad nodes are missing: they are the graph's ends at the leaves, and count.",
            lambda loss: sum(node.variable is None for node in walk(loss)),
        ),
        Mistake(
            "Only the first input of each node is followed. `next_functions` has one pair for each input.",
            _chain,
        ),
        Mistake(
            "None stands for an input that needs no gradient. It is no node.",
            lambda loss: len(walk(loss)) + any(None in node.inputs for node in walk(loss)),
        ),
        Mistake(
            "A node that two paths lead to is counted once for each path. Remember which nodes you have seen.",
            _paths,
        ),
        Mistake(
            "These are the edges. A node that two paths lead to has two edges and is one node.",
            lambda loss: sum(place is not None for node in walk(loss) for place in node.inputs) + (loss.grad_fn is not None),
        ),
    ),
)

# ── Exercise 4 ────────────────────────────────────────────────────────────────────────────────────────────────────────

BOTH = Formula("(x**2 * y).sum()", lambda x, y: (x**2 * y).sum())


def _one_by_one(slope, moved=lambda x: x.detach().clone(memory_format=torch.contiguous_format)):
    """Differences with another formula, or with a move that goes into another tensor."""

    def gradients(function, *inputs, eps=1e-6):
        found = []
        for i, x in enumerate(inputs):
            ours = moved(x)
            around = (*inputs[:i], ours, *inputs[i + 1 :])
            places, slopes = ours.flatten(), []  # a copy where `ours` is not contiguous: then nothing moves
            for k, middle in enumerate(places.tolist()):
                values = []
                for at in (middle + eps, middle, middle - eps):
                    places[k] = at
                    values.append(float(function(*around)))
                places[k] = middle
                slopes.append(slope(*values, eps))
            found.append(torch.tensor(slopes, dtype=x.dtype).view(x.shape))
        return tuple(found)

    return gradients


def _all_at_once(function, *inputs, eps=1e-6):
    found = []
    for i, x in enumerate(inputs):
        above, below = (float(function(*inputs[:i], x + step, *inputs[i + 1 :])) for step in (eps, -eps))
        found.append(torch.full(x.shape, (above - below) / (2 * eps), dtype=x.dtype))
    return tuple(found)


def _any_dtype(function, *inputs, eps=1e-6):
    return tuple(g.to(x.dtype) for g, x in zip(finite_difference(function, *(x.double() for x in inputs), eps=eps), inputs))


FINITE_DIFFERENCE = Exercise(
    lesson=LESSON,
    solution=finite_difference,
    hints=(
        "Two loops: over the inputs, and over the places of one input. At each place call the function twice, with that one "
        "number moved up and moved down, and all other inputs as they are.",
        "Move the number in a copy: `moved = x.detach().clone(memory_format=torch.contiguous_format)`, and write through "
        "`moved.view(-1)[k]`. Put it back before the next place. Lesson 01 says why `flatten()` is not safe here.",
        "The other inputs stay in their places: `function(*inputs[:i], moved, *inputs[i + 1:])`. First of all: `if any(x.dtype != "
        "torch.float64 for x in inputs): raise TypeError(...)`.",
    ),
    cases=(
        Case("x is one number", lambda: (PARABOLA, torch.tensor(2.0).double()), tolerance=TOLERANCE),
        Case("x is a vector", lambda: (CUBES, noise(4)), tolerance=TOLERANCE),
        Case("x is a matrix", lambda: (CUBES, noise(2, 3)), tolerance=TOLERANCE),
        Case("there are two inputs", lambda: (BOTH, noise(3), noise(3, seed=1)), tolerance=TOLERANCE),
        Case("two inputs have different shapes", lambda: (BOTH, noise(2, 3), noise(3, seed=1)), tolerance=TOLERANCE),
        Case("x is transposed", lambda: (BOTH, noise(2, 3).t(), noise(3, 2, seed=1)), tolerance=TOLERANCE),
        Case("x shows one number in several places", lambda: (BOTH, noise(2, 1).expand(2, 3), noise(2, 3, seed=1)), tolerance=TOLERANCE),
        Case("x requires grad", lambda: (CUBES, noise(3).requires_grad_()), tolerance=TOLERANCE),
        Case("x is empty", lambda: (CUBES, noise(0)), tolerance=TOLERANCE),
        Case("x is float32", lambda: (CUBES, torch.ones(2)), raises=TypeError),
        Case("the second input is float32", lambda: (BOTH, noise(2), torch.ones(2)), raises=TypeError),
    ),
    mistakes=(
        Mistake(
            "This difference is one-sided, (above - middle) / eps, and its error grows with eps times the curvature. Take the value "
            "on both sides.",
            _one_by_one(lambda above, middle, below, eps: (above - middle) / eps),
        ),
        Mistake(
            "From `- eps` to `+ eps` it is two steps: divide by 2 * eps.",
            _one_by_one(lambda above, middle, below, eps: (above - below) / eps),
        ),
        Mistake(
            "The sign is turned round: above - below.",
            _one_by_one(lambda above, middle, below, eps: (below - above) / (2 * eps)),
        ),
        Mistake(
            "All numbers move at once, which gives the sum of all partial derivatives. Move one at a time.",
            _all_at_once,
        ),
        Mistake(
            "Nothing moves: `flatten()` and `reshape(-1)` of a tensor that is not contiguous are copies, and writing into a copy "
            "does not reach the tensor. Clone with `memory_format=torch.contiguous_format`, then `view(-1)`.",
            _one_by_one(lambda above, middle, below, eps: (above - below) / (2 * eps), moved=lambda x: x.detach().clone()),
        ),
        Mistake(
            "With float32 numbers a step of 1e-6 is mostly rounding. Say so instead of returning it: raise TypeError.",
            _any_dtype,
        ),
    ),
)

# ── Exercise 5 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _part():
    return nn.Linear(2, 2)


def _parts(**parts):
    return nn.Sequential(OrderedDict(parts))


@seeded
def _model():
    return _parts(layer1=_part(), layer2=nn.Sequential(_part(), nn.Tanh(), _part()), head=_part())


@seeded
def _ten_layers():
    return _parts(layer1=_part(), layer2=_part(), layer10=_part())


@seeded
def _same_name_inside():
    return _parts(body=_parts(stem=_part(), head=_part()), head=_part())


@seeded
def _partly_frozen():
    model = _model()
    model.layer1.requires_grad_(False)
    return model


@seeded
def _with_gradients():
    model = _model()
    fill_gradients(model)
    return model


def _freeze_case(name, make, prefix, cleared=True):
    def verify(result, module, prefix):
        for (name, ours), before in zip(module.named_parameters(), make().parameters(), strict=True):
            under = name == prefix or name.startswith(prefix + ".")
            if said := difference(before, ours):
                return f"the values of {name} have changed: {said}"
            if ours.requires_grad != (before.requires_grad and not under):
                return f"{name} {'still requires' if ours.requires_grad else 'no longer requires'} grad"
            if under and cleared and ours.grad is not None:
                return f"{name} still holds its gradient"
            if not under and (said := difference(before.grad, ours.grad)):
                return f"the gradient of {name} has changed: {said}"
        return difference([name for name, p in module.named_parameters() if p.requires_grad], result)

    return Case(name, lambda: (make(), prefix), mutates=True, verify=verify)


def _freezing(under, returned=lambda named, under: [n for n, p in named if p.requires_grad], clear=True):
    """freeze with another test of a name, another list at the end, or the gradients left in place."""

    def frozen(module, prefix):
        named = list(module.named_parameters())
        for name, parameter in named:
            if under(name, prefix):
                parameter.requires_grad_(False)
                parameter.grad = None if clear else parameter.grad
        return returned(named, lambda name: under(name, prefix))

    return frozen


def _is_under(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


def _on_the_module(module, prefix):
    for name, part in module.named_modules():
        if name == prefix:
            part.requires_grad = False  # an attribute that nothing reads
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


FREEZE = Exercise(
    lesson=LESSON,
    solution=freeze,
    hints=(
        "`module.named_parameters()` gives pairs of name and parameter, as in `layer1.weight`. Which names belong to `layer1`, and "
        "not to `layer10`?",
        "A name lies under the prefix where it *is* the prefix or begins with `prefix + '.'`. Then `parameter.requires_grad_(False)` "
        "and `parameter.grad = None`.",
        "Collect the parameters under the prefix first: if there are none, raise ValueError. At the end, list the names whose "
        "parameter requires grad.",
    ),
    cases=(
        _freeze_case("a layer is frozen", _model, "layer1"),
        _freeze_case("a part with several layers is frozen", _model, "layer2"),
        _freeze_case("a layer inside a part is frozen", _model, "layer2.0"),
        _freeze_case("one parameter is named", _model, "head.bias"),
        _freeze_case("layer10 stands beside layer1", _ten_layers, "layer1"),
        _freeze_case("another part has a layer of the same name inside", _same_name_inside, "head"),
        _freeze_case("another layer is frozen already", _partly_frozen, "head"),
        _freeze_case("the other parameters hold gradients", _with_gradients, "layer1", cleared=False),
        _freeze_case("the frozen parameters hold gradients", _with_gradients, "layer1"),
        Case("no layer has this name", lambda: (_model(), "layer3"), raises=ValueError),
        Case("the name is the beginning of one alone", lambda: (_model(), "lay"), raises=ValueError),
    ),
    mistakes=(
        Mistake(
            "`module.requires_grad = False` gives the module a new attribute that nothing reads. The switch is in each parameter, and "
            "`requires_grad_(False)`, with an underscore and a call, reaches them.",
            _on_the_module,
        ),
        Mistake(
            "These are the names of the frozen parameters. Asked for are those that still require grad.",
            _freezing(_is_under, lambda named, under: [name for name, _ in named if under(name)]),
        ),
        Mistake(
            "All parameters are frozen, and not only those under the prefix.",
            _freezing(lambda name, prefix: True),
        ),
        Mistake(
            "`layer10.weight` begins with `layer1`, too. Compare with `prefix + '.'`, so that the name of the layer ends there.",
            _freezing(lambda name, prefix: name.startswith(prefix)),
        ),
        Mistake(
            "The prefix occurs inside the names of other parts. It has to stand at the beginning.",
            _freezing(lambda name, prefix: prefix in name.split(".") or _is_under(name, prefix)),
        ),
        Mistake(
            "A parameter outside the prefix can be frozen already. Ask each one for its requires_grad.",
            _freezing(_is_under, lambda named, under: [name for name, _ in named if not under(name)]),
        ),
        Mistake(
            "The frozen parameters still hold their gradients, and an optimizer goes by those: it would move them at its next step. "
            "Set .grad to None.",
            _freezing(_is_under, clear=False),
        ),
        Mistake(
            "Nothing lies under this name, probably a slip of the pen: freezing nothing in silence would hide it. Raise ValueError.",
            _freezing(_is_under),
        ),
    ),
)

# ── Exercise 6 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def adversarial_losses(generator, critic, real, noise):
    """(critic_loss, generator_loss): the critic sees the generated samples as constants, the generator sees its way to them."""
    generated = generator(noise)
    on_real, on_generated = critic(real), critic(generated.detach())
    critic_loss = F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
    critic_loss = critic_loss + F.binary_cross_entropy_with_logits(on_generated, torch.zeros_like(on_generated))
    judged = critic(generated)
    return critic_loss, F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))


def _as_ones(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))


def _as_zeros(logits):
    return F.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))


def _losses(for_critic, for_generator):
    """Both losses, from what each makes of (critic, real, generated)."""

    def losses(generator, critic, real, noise):
        generated = generator(noise)
        return for_critic(critic, real, generated), for_generator(critic, real, generated)

    return losses


def _critic_right(critic, real, generated):
    return _as_ones(critic(real)) + _as_zeros(critic(generated.detach()))


def _generator_right(critic, real, generated):
    return _as_ones(critic(generated))


@seeded
def _pair():
    return doubled(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), doubled(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _game(n=4, m=4):
    return *_pair(), noise(n, 3), noise(m, 2, seed=1)


def _pulls(loss, module):
    """{name: gradient} of a loss, without touching any .grad; None where it does not reach."""
    named = dict(module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), retain_graph=True, allow_unused=True)
    return dict(zip(named, found))


def _same_pull(what, loss, ours, theirs):
    """Does a loss pull at a module as the reference's loss does?"""
    came = _pulls(loss, ours)
    for name, wanted in theirs.items():
        if came[name] is None and wanted is not None:
            return f"{what} does not reach {name}, which gets no gradient"
        if came[name] is not None and (said := differs(f"the gradient of {what} for {name}", wanted, came[name])):
            return said
    return None


def _with_reference(judge):
    """judge(losses, networks, reference's losses, reference's networks)"""

    def verify(result, *args):
        theirs = _pair()
        wanted = adversarial_losses(*theirs, *args[2:])
        if said := difference(wanted, result, TOLERANCE):
            return said
        return judge(result, args[:2], wanted, theirs)

    return tried(verify)


@_with_reference
def _both_have_a_graph(losses, networks, wanted, theirs):
    names = ("critic_loss", "generator_loss")
    return first(None if loss.requires_grad else f"{name} has no graph: backward on it would raise" for name, loss in zip(names, losses))


@_with_reference
def _critic_spares_the_generator(losses, networks, wanted, theirs):
    if any(gradient is not None for gradient in _pulls(losses[0], networks[0]).values()):
        return "critic_loss reaches the parameters of the generator: its backward would teach the generator to please the critic's loss"
    return None


@_with_reference
def _critic_learns(losses, networks, wanted, theirs):
    return _same_pull("critic_loss", losses[0], networks[1], _pulls(wanted[0], theirs[1]))


@_with_reference
def _generator_learns(losses, networks, wanted, theirs):
    return _same_pull("generator_loss", losses[1], networks[0], _pulls(wanted[1], theirs[0]))


@_with_reference
def _one_backward_each(losses, networks, wanted, theirs):
    if any(p.grad is not None for network in networks for p in network.parameters()):
        return "the call itself has filled a .grad: backward is for the caller to run"
    for loss in losses:
        loss.backward()
    return None


ADVERSARIAL_LOSSES = Exercise(
    lesson=LESSON,
    solution=adversarial_losses,
    hints=(
        "Draw the two paths: noise → generator → critic → loss. Which loss must go back all the way, and at which point must the other "
        "one stop?",
        "The critic's loss sees the generated samples as constants: `critic(generated.detach())`. The generator's loss calls the critic "
        "once more, on `generated` itself, since it has to go back through the critic.",
        "`F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))` where 1 is wanted, `torch.zeros_like` where 0 is.",
    ),
    cases=(
        Case("there is one sample", lambda: _game(1, 1), tolerance=TOLERANCE),
        Case("more samples are generated than real", lambda: _game(3, 5), tolerance=TOLERANCE),
        Case("each loss can be differentiated", _game, verify=_both_have_a_graph),
        Case("the critic's loss must not train the generator", _game, verify=_critic_spares_the_generator),
        Case("the critic learns from real and from generated samples", _game, verify=_critic_learns),
        Case("the generator learns through the critic", _game, verify=_generator_learns),
        Case("each loss has one backward", _game, verify=_one_backward_each),
    ),
    mistakes=(
        Mistake(
            "The losses have changed places: the critic's comes first.",
            lambda *args: adversarial_losses(*args)[::-1],
        ),
        Mistake(
            "The generator wants its samples to be taken for *real*: its target is 1. With 0 it helps the critic.",
            _losses(_critic_right, lambda critic, real, generated: _as_zeros(critic(generated))),
        ),
        Mistake(
            "The generator's loss is the critic's with the sign turned round. Asked for is the one that wants 1: far from its goal, it "
            "pulls much harder.",
            _losses(_critic_right, lambda critic, real, generated: -_as_zeros(critic(generated))),
        ),
        Mistake(
            "The targets of the critic are exchanged: 1 for real samples, 0 for generated ones.",
            _losses(lambda critic, real, generated: _as_zeros(critic(real)) + _as_ones(critic(generated.detach())), _generator_right),
        ),
        Mistake(
            "The critic's loss is the *sum* of its two parts, not their mean.",
            _losses(lambda *args: _critic_right(*args) / 2, _generator_right),
        ),
        Mistake(
            "The generated samples come to the critic with their graph, so the critic's loss goes back into the generator. Give the critic "
            "`generated.detach()`.",
            _losses(lambda critic, real, generated: _as_ones(critic(real)) + _as_zeros(critic(generated)), _generator_right),
        ),
        Mistake(
            "The critic's *answer* is detached, and then the critic does not learn from generated samples at all. Detach what goes in, "
            "`critic(generated.detach())`.",
            _losses(lambda critic, real, generated: _as_ones(critic(real)) + _as_zeros(critic(generated).detach()), _generator_right),
        ),
        Mistake(
            "The generator's loss is computed from detached samples (or from samples made under no_grad). Nothing raises, because the "
            "critic's parameters have gradients, and the generator never learns. Only the critic's loss may detach.",
            _losses(_critic_right, lambda critic, real, generated: _as_ones(critic(generated.detach()))),
        ),
    ),
)

# ── Exercise 7 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def truncated_bptt(cell, head, sequence, targets, chunk):
    """Backward after every `chunk` steps; the hidden state goes on as a value."""
    hidden = sequence.new_zeros(sequence.shape[1], cell.hidden_size)
    total = 0.0
    for start in range(0, len(sequence), chunk):
        hidden = hidden.detach()
        loss = 0.0
        for x, target in zip(sequence[start : start + chunk], targets[start : start + chunk]):
            hidden = cell(x, hidden)
            loss = loss + ((head(hidden) - target) ** 2).sum() / targets.numel()
        loss.backward()
        total += loss.item()
    return total


def _through_time(carry=torch.Tensor.detach, weigh=None, at_the_end=False, retain=False, drop_rest=False, clear=False):
    """truncated_bptt with one of its steps done otherwise."""

    def run(cell, head, sequence, targets, chunk):
        if clear:
            cell.zero_grad()
            head.zero_grad()
        hidden = sequence.new_zeros(sequence.shape[1], cell.hidden_size)
        losses = []
        steps = len(sequence) // chunk * chunk if drop_rest else len(sequence)
        for start in range(0, steps, chunk):
            hidden, outputs = carry(hidden), []
            for x in sequence[start : start + chunk]:
                hidden = cell(x, hidden)
                outputs.append(head(hidden))
            errors = (torch.stack(outputs) - targets[start : start + chunk]) ** 2
            losses.append(weigh(errors) if weigh else errors.sum() / targets.numel())
            if not at_the_end:
                losses[-1].backward(retain_graph=retain)
                losses[-1] = losses[-1].detach()
        if at_the_end:
            sum(losses).backward()
        return (sum(losses) / (len(losses) if weigh is torch.mean else 1)).item()

    return run


@seeded
def _recurrent():
    return nn.RNNCell(2, 4).double(), nn.Linear(4, 3).double()


@seeded
def _wide():
    return nn.RNNCell(2, 16).double(), nn.Linear(16, 3).double()


@seeded
def _gated():
    return nn.GRUCell(2, 4).double(), nn.Linear(4, 3).double()


@seeded
def _forgetful():
    cell, head = _recurrent()
    with torch.no_grad():
        cell.weight_hh.zero_()
    return cell, head


@seeded
def _with_old_gradients():
    cell, head = _recurrent()
    fill_gradients(cell, head)
    return cell, head


def _bptt_case(name, make, steps, chunk, loss_alone=False, watch=None):
    def args():
        return *make(), noise(steps, 5, 2), noise(steps, 5, 3, seed=1), chunk

    @tried
    def verify(result, cell, head, *rest):
        theirs = make()
        wanted = truncated_bptt(*theirs, *rest)
        before = make()
        for ours, reference, fresh, called in zip((cell, head), theirs, before, ("cell", "head")):
            for part in ours.state_dict():
                if said := differs(f"{called}.{part} has changed", fresh.state_dict()[part], ours.state_dict()[part]):
                    return said
        if said := difference(wanted, result, TOLERANCE):
            return f"the loss should be {wanted:.6g}" if said == "the value differs" else said
        return None if loss_alone else first(
            differs(f"the gradient of {called}.{part}", gradient, gradients_of(ours)[part])
            for called, ours, reference in zip(("cell", "head"), (cell, head), theirs)
            for part, gradient in gradients_of(reference).items()
        )

    return Case(name, args, mutates=True, verify=verify, watch=watch)


def _peak(run, steps=40, chunk=4):
    with saved_bytes() as saved:
        run(*_wide(), noise(steps, 5, 2), noise(steps, 5, 3, seed=1), chunk)
    return saved.peak


def _one_chunk_at_a_time(call):
    """What graphs hold at the peak: nearer to one chunk's part than to all ten's. The cell is wide: activations outweigh the inputs."""
    with saved_bytes() as saved:
        call()
    one, all_of_them = _peak(truncated_bptt), _peak(_through_time(at_the_end=True))
    if saved.peak < (one + all_of_them) / 2:
        return None
    return (
        f"the gradients are right, but at the peak the graphs hold {saved.peak:,} bytes for backward; with one chunk alive at a time it is "
        f"about {one:,}: run backward after each chunk"
    )


TRUNCATED_BPTT = Exercise(
    lesson=LESSON,
    solution=truncated_bptt,
    hints=(
        "Two loops: `for start in range(0, len(sequence), chunk)` over the chunks, and over the steps of `sequence[start : start + "
        "chunk]` inside. The slice of the last chunk is shorter by itself.",
        "At the beginning of each chunk, `hidden = hidden.detach()`: same values, no graph. Without it the next backward walks into the "
        "chunk before, whose saved tensors are gone.",
        "A chunk's loss is `((outputs - targets of the chunk) ** 2).sum() / targets.numel()`, so that the chunks' losses add up to the "
        "mean over all. Call backward on it inside the outer loop, and add `loss.item()` to the total.",
    ),
    cases=(
        _bptt_case("one chunk holds the whole sequence", _recurrent, 4, 4),
        _bptt_case("there are two chunks, and the loss is looked at", _recurrent, 6, 3, loss_alone=True),
        _bptt_case("there are two chunks, and the cell forgets", _forgetful, 6, 3),
        _bptt_case("there are two chunks", _recurrent, 6, 3),
        _bptt_case("the last chunk is shorter", _recurrent, 7, 3),
        _bptt_case("each step is a chunk", _recurrent, 4, 1),
        _bptt_case("the chunk is longer than the sequence", _recurrent, 3, 8),
        _bptt_case("the cell is a GRUCell", _gated, 6, 2),
        _bptt_case("cell and head hold gradients already", _with_old_gradients, 6, 3),
        _bptt_case("there are ten chunks", _wide, 40, 4, watch=_one_chunk_at_a_time),
    ),
    mistakes=(
        Mistake(
            "The hidden state begins at zeros in each chunk. Its value is carried over; only its graph is cut.",
            _through_time(carry=torch.zeros_like),
        ),
        Mistake(
            "Each chunk has its own mean here, so all chunks together weigh as many times too much as there are chunks. Divide the squared "
            "errors by `targets.numel()`, the number of all.",
            _through_time(weigh=torch.mean),
        ),
        Mistake(
            "The gradient flows back into earlier chunks: this is backpropagation through all of time, at a cost that "
            "grows with each chunk. "
            "`retain_graph=True` silences the error whose cause is the missing `hidden.detach()`.",
            _through_time(carry=lambda hidden: hidden, retain=True),
        ),
        Mistake(
            "The last, shorter chunk is left out.",
            _through_time(drop_rest=True),
        ),
        Mistake(
            "The gradients that were there are gone. This function adds to them; clearing is for the caller.",
            _through_time(clear=True),
        ),
        Mistake(
            "There is one backward at the end, so the graphs of all chunks are alive until then: the memory that "
            "truncation is meant to save.",
            _through_time(at_the_end=True),
        ),
    ),
)

# ── Exercise 8 ────────────────────────────────────────────────────────────────────────────────────────────────────────


def signed_square():
    """The apply of a Function that computes x * |x|."""

    class SignedSquare(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x.abs()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * 2 * x.abs()  # from the input, by operations that autograd records

    return SignedSquare.apply


def _own(forward, backward):
    """The apply of a Function with this forward and this backward."""
    return type("SignedSquare", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}).apply


def _forward(ctx, x):
    ctx.save_for_backward(x)
    return x * x.abs()


def _forward_with_slope(ctx, x):
    ctx.save_for_backward(2 * x.abs())
    return x * x.abs()


def _forward_by_attribute(ctx, x):
    ctx.x = x
    return x * x.abs()


def _numbers(*values):
    return torch.tensor(values or (-3.0, -0.5, 0.25, 2.0), dtype=torch.float64, requires_grad=True)


def _function_case(name, judge):
    @tried
    def verify(result):
        function = result.apply if isinstance(result, type) and issubclass(result, torch.autograd.Function) else result
        return judge(function) if callable(function) else f"{kind(result)} came where a function was expected, the apply of your Function"

    return Case(name, lambda: (), verify=verify)


def _has_values(function):
    x = _numbers(-3.0, -0.5, 0.0, 0.25, 2.0)
    return differs("x * |x|", x.detach() * x.detach().abs(), function(x))


def _is_a_function(function):
    y = function(_numbers())
    if y.grad_fn is None:
        return "the result has no grad_fn, though x requires grad"
    if not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction):
        return f"the result's grad_fn is {y.grad_fn.name()}, one of PyTorch's own: no Function of yours is in the graph"
    return None


def _has_gradient(*values, arriving=None):
    def judge(function):
        x = _numbers(*values)
        arrived = torch.ones_like(x) if arriving is None else torch.tensor(arriving, dtype=x.dtype)
        (came,) = torch.autograd.grad(function(x), x, arrived)
        return differs("the gradient", arrived * 2 * x.detach().abs(), came)

    return judge


def _notices_writes(function):
    leaf = _numbers()
    x = leaf.clone()
    y = function(x)
    with torch.no_grad():
        x.zero_()
    try:
        y.sum().backward()
    except RuntimeError:
        return None
    wrong = difference(2 * leaf.detach().abs(), leaf.grad, TOLERANCE)
    return "x was overwritten between forward and backward; nothing was raised, and the gradient is wrong" if wrong else None


def _has_second_gradient(function):
    x = _numbers()
    (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    if not gradient.requires_grad:
        return "the gradient has no graph, so it cannot be differentiated again"
    (second,) = torch.autograd.grad(gradient.sum(), x, allow_unused=True)
    if second is None:
        return "as far as autograd can see, the gradient does not depend on x"
    return differs("the second derivative", 2 * x.detach().sign(), second)


def _passes_gradcheck(function):
    x = _numbers()
    torch.autograd.gradcheck(function, (x,))
    torch.autograd.gradgradcheck(function, (x,))
    return None


SIGNED_SQUARE = Exercise(
    lesson=LESSON,
    solution=signed_square,
    hints=(
        "Define a class inside the function, `class SignedSquare(torch.autograd.Function):`, with two methods under `@staticmethod`: "
        "`forward(ctx, x)` and `backward(ctx, gradient)`. At the end `return SignedSquare.apply`.",
        "forward saves its input, `ctx.save_for_backward(x)`, and returns `x * x.abs()`. backward takes it back, `(x,) = "
        "ctx.saved_tensors`, and returns the gradient that arrives times the derivative.",
        "For the second derivative, backward has to compute 2 * |x| itself, from the saved x. What forward computes on the side is not "
        "recorded, and is a constant for whoever differentiates again.",
    ),
    cases=(
        _function_case("numbers of both signs come in", _has_values),
        _function_case("the graph shows a Function of your own", _is_a_function),
        _function_case("a gradient is taken at positive numbers", _has_gradient(0.25, 2.0)),
        _function_case("a gradient is taken at negative numbers", _has_gradient(-3.0, -0.5)),
        _function_case("the gradient that arrives is not 1", _has_gradient(-3.0, 2.0, arriving=(0.5, -7.0))),
        _function_case("x is overwritten before backward", _notices_writes),
        _function_case("the gradient is differentiated again", _has_second_gradient),
        _function_case("gradcheck and gradgradcheck try it", _passes_gradcheck),
    ),
    mistakes=(
        Mistake(
            "x * |x| keeps the sign of x: it is 4 at 2, and -9 at -3, where x² would be 9.",
            lambda: _own(lambda ctx, x: (ctx.save_for_backward(x), x * x)[1], lambda ctx, gradient: gradient * 2 * ctx.saved_tensors[0]),
        ),
        Mistake(
            "PyTorch's own operations record this by themselves, rightly so. The exercise is to define forward and "
            "backward in a class that "
            "inherits from torch.autograd.Function.",
            lambda: lambda x: x * x.abs(),
        ),
        Mistake(
            "For positive x the function is x², and its derivative 2 * x: backward returns that times the gradient that "
            "arrives. What it needs of x, "
            "forward has to save.",
            lambda: _own(_forward, lambda ctx, gradient: gradient * ctx.saved_tensors[0].abs()),
        ),
        Mistake(
            "For negative x the function is -x², and its derivative is -2 * x, a positive number: 2 * |x| on both sides.",
            lambda: _own(_forward, lambda ctx, gradient: gradient * 2 * ctx.saved_tensors[0]),
        ),
        Mistake(
            "backward gets the gradient that arrives from above, and multiplies it by the derivative: that is the chain rule.",
            lambda: _own(_forward, lambda ctx, gradient: 2 * ctx.saved_tensors[0].abs()),
        ),
        Mistake(
            "A tensor kept otherwise than by `ctx.save_for_backward`, as an attribute of ctx for instance, has no guard: "
            "autograd cannot tell that "
            "someone wrote into it. save_for_backward notes its version.",
            lambda: _own(_forward_by_attribute, lambda ctx, gradient: gradient * 2 * ctx.x.abs()),
        ),
        Mistake(
            "What is computed where nothing is recorded (in forward, on `.detach()`, under no_grad) is a constant for "
            "whoever differentiates again. "
            "Save the input, and compute 2 * |x| in backward.",
            lambda: _own(_forward_with_slope, lambda ctx, gradient: gradient * ctx.saved_tensors[0]),
        ),
    ),
)

# ── Exercise 9 ────────────────────────────────────────────────────────────────────────────────────────────────────────


@seeded
def _critic():
    return doubled(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@seeded
def _image_critic():
    return doubled(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 1))


@seeded
def _critic_with_gradients():
    critic = _critic()
    fill_gradients(critic)
    return critic


@tried
def _penalty_has_a_graph(result, critic, x):
    said = difference(gradient_penalty(critic, x), result, TOLERANCE)
    return said or (None if result.requires_grad else "the penalty has no graph: backward on it would raise")


@tried
def _penalty_trains(result, critic, x):
    theirs = _critic()
    wanted = gradient_penalty(theirs, x)
    return difference(wanted, result, TOLERANCE) or _same_pull("the penalty", result, critic, _pulls(wanted, theirs))


@tried
def _leaves_gradients_alone(result, critic, x):
    said = difference(gradient_penalty(critic, x), result, TOLERANCE)
    before = gradients_of(_critic_with_gradients())
    return said or first(differs(f"the call has changed the gradient of {n}", before[n], g) for n, g in gradients_of(critic).items())


def _penalty_leaves_x(requires_grad, gradient=None, leaf=True):
    unchanged = _x_as_it_was(requires_grad, gradient, leaf)

    @tried
    def verify(result, critic, x):
        if said := difference(gradient_penalty(critic, x), result, TOLERANCE) or unchanged(x):
            return said
        theirs = reached_leaves(x) if x.requires_grad and not leaf else [x]
        if any(a is b for a in reached_leaves(result) for b in theirs):
            return "the penalty reaches back to x: its backward would fill a .grad outside the critic"
        return None

    return verify


def _rows_with_gradient():
    x = noise(4, 3).requires_grad_()
    x.grad = torch.full((4, 3), 5.0, dtype=torch.float64)
    return x


def _penalty(
    leaf=lambda x: x.detach().clone().requires_grad_(),
    total=torch.sum,
    norm=lambda g: g.flatten(1).norm(dim=1),
    away=lambda n: (n - 1) ** 2,
    **keep,
):
    """gradient_penalty with one of its steps done otherwise."""

    def penalty(critic, x):
        ours = leaf(x)
        (gradient,) = torch.autograd.grad(total(critic(ours)), ours, **(keep or {"create_graph": True}))
        return away(norm(gradient)).mean()

    return penalty


def _penalty_by_backward(critic, x):
    leaf = x.detach().clone().requires_grad_()
    critic(leaf).sum().backward(create_graph=True)
    return ((leaf.grad.flatten(1).norm(dim=1) - 1) ** 2).mean()


GRADIENT_PENALTY = Exercise(
    lesson=LESSON,
    solution=gradient_penalty,
    hints=(
        "Each sample's number depends on that sample alone. So the gradient of the *sum* of all numbers with respect to "
        "the batch has in row i "
        "the gradient of number i.",
        "`torch.autograd.grad(critic(leaf).sum(), leaf, create_graph=True)`, with a leaf made from x. create_graph "
        "records the computation of the "
        "gradient, so that the penalty can be differentiated.",
        "The norm of each sample: `gradient.flatten(1).norm(dim=1)`, of shape (N,). Then minus 1, squared, and the mean.",
    ),
    cases=(
        Case("there is one sample", lambda: (_critic(), noise(1, 3)), tolerance=TOLERANCE),
        Case("there are four samples", lambda: (_critic(), noise(4, 3)), tolerance=TOLERANCE),
        Case("the samples are images", lambda: (_image_critic(), noise(4, 1, 3, 3)), tolerance=TOLERANCE),
        Case("the penalty can be differentiated", lambda: (_critic(), noise(4, 3)), verify=_penalty_has_a_graph),
        Case("the penalty is differentiated", lambda: (_critic(), noise(4, 3)), verify=_penalty_trains),
        Case("the critic holds gradients already", lambda: (_critic_with_gradients(), noise(4, 3)), verify=_leaves_gradients_alone),
        Case("x does not require grad", lambda: (_critic(), noise(4, 3)), verify=_penalty_leaves_x(False)),
        Case("x holds a gradient already", lambda: (_critic(), _rows_with_gradient()), verify=_penalty_leaves_x(True, 5.0)),
        Case(
            "x was made from another tensor",
            lambda: (_critic(), noise(4, 3).requires_grad_() * 2),
            verify=_penalty_leaves_x(True, leaf=False),
        ),
    ),
    mistakes=(
        Mistake(
            "The norm should be 1: subtract 1 before squaring. This pulls the gradient to 0.",
            _penalty(away=lambda norm: norm**2),
        ),
        Mistake(
            "The distance from 1 is to be squared, and here it is not.",
            _penalty(away=lambda norm: norm - 1),
        ),
        Mistake(
            "The gradient of the *mean* of the outputs has 1/N of each sample's gradient in its row. Take the sum.",
            _penalty(total=torch.mean),
        ),
        Mistake(
            "This is one norm over the whole batch. Each sample has its own: the norm runs over all dimensions but the first.",
            _penalty(norm=torch.norm),
        ),
        Mistake(
            "An image's gradient has more than one dimension, and the norm runs over one of them. `flatten(1)` puts all "
            "numbers of a sample into "
            "a row.",
            _penalty(norm=lambda gradient: gradient.norm(dim=1)),
        ),
        Mistake(
            "The number is right, and nothing can be trained with it: without create_graph=True (or after detach) the gradient is a plain "
            "tensor. `retain_graph=True` keeps the graph of the *critic* for another pass, and records none of the gradient's own.",
            _penalty(retain_graph=True),
        ),
        Mistake(
            "`backward()` leaves its gradients in every .grad that it reaches, the critic's among them, and they end up "
            "in the next step of the "
            "optimizer. `torch.autograd.grad` returns what you ask for and writes nowhere.",
            _penalty_by_backward,
        ),
        Mistake(
            "`x.requires_grad_()` changes the caller's tensor. Work on `x.detach().clone()`.",
            _penalty(leaf=lambda x: x.requires_grad_()),
        ),
        Mistake(
            "Where x requires grad already, the penalty goes back through it into whatever x was made from. Detach it.",
            _penalty(leaf=lambda x: x if x.requires_grad else x.clone().requires_grad_()),
        ),
    ),
)

# ── Exercise 10 ───────────────────────────────────────────────────────────────────────────────────────────────────────

NEIGHBOURS = Formula("(x[1:] * x[:-1]).sum()", lambda x: (x[1:] * x[:-1]).sum())
HALF_LINEAR = Formula("x[0]**2 + 3 * x[1]", lambda x: x[0] ** 2 + 3 * x[1])
LINEAR = Formula("(3 * x).sum()", lambda x: (3 * x).sum())
ROWS = Formula("(x.sum(dim=0)**3).sum()", lambda x: (x.sum(dim=0) ** 3).sum())
WAVES = Formula("(x.sin() * x.roll(1)).sum()", lambda x: (x.sin() * x.roll(1)).sum())


def _judge_product(requires_grad, gradient=None, leaf=True):
    unchanged = _x_as_it_was(requires_grad, gradient, leaf)

    def verify(result, function, x, v):
        return difference(hessian_vector_product(function, x, v), result, TOLERANCE) or unchanged(x)

    return verify


def _without_the_hessian(call):
    """100 numbers: x takes 800 bytes, the Hessian 80,000; right answers allocate up to 50 tensors like x, wrong ones over 1,500."""
    allocated, x = allocated_bytes(call), 100 * 8
    if allocated <= 150 * x:
        return None
    return f"the product is right, and the call allocates {allocated:,} bytes, where x has {x:,}: somewhere all of the Hessian is built"


def _by_the_hessian(function, x, v):
    hessian = torch.autograd.functional.hessian(function, x.detach())
    return (hessian.flatten(x.dim()).flatten(0, x.dim() - 1) @ v.flatten()).view(x.shape)


def _once(function, x, v):
    leaf = x.detach().clone().requires_grad_()
    return leaf, torch.autograd.grad(function(leaf), leaf, create_graph=True)[0]


def _times_gradient(function, x, v):
    return (_once(function, x, v)[1] * v).detach()


def _slope_along(function, x, v):
    return (_once(function, x, v)[1] * v).sum().detach()


def _row_sums(function, x, v):
    leaf, gradient = _once(function, x, v)
    return torch.autograd.grad(gradient.sum(), leaf)[0] * v if gradient.requires_grad else torch.zeros_like(v)


def _at_x_itself(function, x, v):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(gradient, x, v, materialize_grads=True)[0]


HESSIAN_VECTOR_PRODUCT = Exercise(
    lesson=LESSON,
    solution=hessian_vector_product,
    time_limit=20.0,  # the first allocated_bytes of a process loads a part of PyTorch
    hints=(
        "The Hessian is the derivative of the gradient. The gradient times v, summed, is one number: what is *its* gradient?",
        "`(gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)`, then differentiate `(gradient * "
        "v).sum()` with respect to leaf. "
        "The same in one: `torch.autograd.grad(gradient, leaf, v)`.",
        "Where the function is linear, the gradient is the same everywhere: it does not depend on leaf and does not "
        "require grad. Ask `if not "
        "gradient.requires_grad` and return zeros; or let `torch.func.jvp(torch.func.grad(function), (x,), (v,))` take care of it.",
    ),
    cases=(
        Case("each number has its own curvature", lambda: (CUBES, noise(3), noise(3, seed=1)), tolerance=TOLERANCE),
        Case("neighbours are multiplied", lambda: (NEIGHBOURS, noise(4), noise(4, seed=1)), tolerance=TOLERANCE),
        Case("x is a matrix", lambda: (ROWS, noise(2, 3), noise(2, 3, seed=1)), tolerance=TOLERANCE),
        Case("x is one number", lambda: (PARABOLA, noise(), noise(seed=1)), tolerance=TOLERANCE),
        Case("the function is linear in one number", lambda: (HALF_LINEAR, noise(2), noise(2, seed=1)), tolerance=TOLERANCE),
        Case("x does not require grad", lambda: (CUBES, noise(3), noise(3, seed=1)), verify=_judge_product(False)),
        Case("x holds a gradient already", lambda: (CUBES, _with_gradient(), noise(3, seed=1)), verify=_judge_product(True, 5.0)),
        Case("x has 100 numbers", lambda: (WAVES, noise(100), noise(100, seed=1)), tolerance=TOLERANCE, watch=_without_the_hessian),
        Case("the function is linear", lambda: (LINEAR, noise(3), noise(3, seed=1)), tolerance=TOLERANCE),
    ),
    mistakes=(
        Mistake(
            "This is the gradient times v, element by element. Its sum has to be differentiated once more.",
            _times_gradient,
        ),
        Mistake(
            "This is the slope in the direction of v, one number: the gradient times v. Differentiate it once more.",
            _slope_along,
        ),
        Mistake(
            "The gradient's elements are summed before v comes in, which gives the sums of the Hessian's rows. That is "
            "right only where each "
            "number has its own curvature. v belongs into the sum: `(gradient * v).sum()`, or the third argument of `torch.autograd.grad`.",
            _row_sums,
        ),
        Mistake(
            "`x.requires_grad_()` changes the caller's tensor. Work on `x.detach().clone()`.",
            _at_x_itself,
        ),
        Mistake(
            "The Hessian is built, n² numbers, to be multiplied by one vector. Two backward passes give the product without it.",
            _by_the_hessian,
        ),
    ),
)

# ── Exercise 11 ───────────────────────────────────────────────────────────────────────────────────────────────────────


@seeded
def _line():
    return doubled(nn.Linear(3, 2))


@seeded
def _classifier():
    return doubled(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5))


@seeded
def _half_frozen():
    model = _classifier()
    model[0].requires_grad_(False)
    return model


@seeded
def _classifier_with_gradients():
    model = _classifier()
    fill_gradients(model)
    return model


def _batch(make, loss_fn, n=4):
    targets = noise(n, 2, seed=1) if loss_fn is F.mse_loss else torch.arange(n) % 5
    return make(), loss_fn, noise(n, 3), targets


@seeded
def _of_images():
    return doubled(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


@tried
def _plain_gradients(result, model, loss_fn, inputs, targets):
    said = difference(per_sample_gradients(model, loss_fn, inputs, targets), result, TOLERANCE)
    return said or first(
        f"the gradient of {name} has a graph of its own, which keeps the whole pass alive: detach it" if gradient.requires_grad else None
        for name, gradient in result.items()
    )


@tried
def _untouched_gradients(result, model, loss_fn, inputs, targets):
    said = difference(per_sample_gradients(model, loss_fn, inputs, targets), result, TOLERANCE)
    before = gradients_of(_classifier_with_gradients())
    return said or first(differs(f"the call has changed the .grad of {n}", before[n], g) for n, g in gradients_of(model).items())


def _every_sample(model, loss_fn, inputs, targets, frozen=False, write=False, graph=False):
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = {name: [] for name in named}
    for i in range(len(inputs)):
        loss = loss_fn(model(inputs[i : i + 1]), targets[i : i + 1])
        if write:
            model.zero_grad()
            loss.backward()
            gradients = [p.grad.clone() for p in named.values()]
        else:
            gradients = torch.autograd.grad(loss, list(named.values()), create_graph=graph)
        for name, gradient in zip(named, gradients):
            found[name].append(gradient)
    stacked = {name: torch.stack(gradients) for name, gradients in found.items()}
    if frozen:
        stacked |= {n: p.new_zeros(len(inputs), *p.shape) for n, p in model.named_parameters() if n not in named}
    return stacked


PER_SAMPLE_GRADIENTS = Exercise(
    lesson=LESSON,
    solution=per_sample_gradients,
    time_limit=20.0,  # the first torch.func of a process loads a part of PyTorch
    hints=(
        "The plain way: for each i, the loss of `inputs[i : i + 1]` and `targets[i : i + 1]`, `torch.autograd.grad` of "
        "it with respect to the "
        "parameters, and `torch.stack` at the end.",
        "By torch.func: write a function `loss_of_one(parameters, x, y)` that calls `torch.func.functional_call(model, parameters, "
        "(x.unsqueeze(0),))`, the model with these parameters in place of its own, and returns one number.",
        "`torch.func.grad(loss_of_one)` differentiates by its first argument, a dictionary of parameters. "
        "`torch.func.vmap(…, in_dims=(None, 0, "
        "0))` runs it for all samples at once: same parameters, one x and one y each. Give it detached parameters.",
    ),
    cases=(
        Case("a line is fitted to one sample", lambda: _batch(_line, F.mse_loss, 1), tolerance=TOLERANCE),
        Case("a line is fitted to four samples", lambda: _batch(_line, F.mse_loss), tolerance=TOLERANCE),
        Case("a network tells classes apart", lambda: _batch(_classifier, F.cross_entropy), tolerance=TOLERANCE),
        Case(
            "the samples are images",
            lambda: (_of_images(), F.cross_entropy, noise(5, 1, 3, 3), torch.tensor([0, 2, 1, 1, 0])),
            tolerance=TOLERANCE,
        ),
        Case("a layer is frozen", lambda: _batch(_half_frozen, F.cross_entropy), tolerance=TOLERANCE),
        Case("the gradients are kept", lambda: _batch(_classifier, F.cross_entropy), verify=_plain_gradients),
        Case("the parameters hold gradients", lambda: _batch(_classifier_with_gradients, F.cross_entropy), verify=_untouched_gradients),
    ),
    mistakes=(
        Mistake(
            "Every row is the same: the gradient of the batch's mean loss, repeated. Each sample needs a loss of its own.",
            lambda model, loss_fn, inputs, targets: {
                name: gradient.mean(dim=0, keepdim=True).expand_as(gradient).clone()
                for name, gradient in per_sample_gradients(model, loss_fn, inputs, targets).items()
            },
        ),
        Mistake(
            "Each row is N times too small: it is the sample's share in the gradient of the batch's mean, and not the "
            "gradient of its own loss.",
            lambda model, loss_fn, inputs, targets: {
                n: g / len(inputs) for n, g in per_sample_gradients(model, loss_fn, inputs, targets).items()
            },
        ),
        Mistake(
            "These are the gradients of the batch, without a row for each sample.",
            lambda model, loss_fn, inputs, targets: {
                n: g.mean(dim=0) for n, g in per_sample_gradients(model, loss_fn, inputs, targets).items()
            },
        ),
        Mistake(
            "A frozen parameter has got gradients, too. Only those that require grad are asked for.",
            lambda *args: _every_sample(*args, frozen=True),
        ),
        Mistake(
            "`backward()` writes into .grad, and what its owner had collected there is gone. `torch.autograd.grad` writes nowhere.",
            lambda *args: _every_sample(*args, write=True),
        ),
    ),
)

# ── The clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def descent_step(x, target, w1, w2, rate=0.1):
    """Both gradients at the given weights first, then both steps; nothing is written into a tensor that a graph has saved."""
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    loss = ((torch.tanh(x @ w1) @ w2 - target) ** 2).mean()
    gradients = torch.autograd.grad(loss, (w1, w2))
    with torch.no_grad():
        return w1 - rate * gradients[0], w2 - rate * gradients[1]


def _through_data(x, target, w1, w2, rate=0.1):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    loss = ((torch.tanh(x @ w1) @ w2 - target) ** 2).mean()
    (gradient,) = torch.autograd.grad(loss, w2, retain_graph=True)
    w2.data -= rate * gradient
    (gradient,) = torch.autograd.grad(loss, w1)
    return (w1 - rate * gradient).detach(), w2.detach()


def _one_after_the_other(x, target, w1, w2, rate=0.1):
    _, w2 = descent_step(x, target, w1, w2, rate)
    return descent_step(x, target, w1, w2, rate)[0], w2


def _step_inputs(n, d, h, k, rate):
    return noise(n, d), noise(n, k, seed=1), noise(d, h, seed=2), noise(h, k, seed=3), rate


@tried
def _plain_step(result, *args):
    said = difference(descent_step(*args), result, TOLERANCE)
    return said or ("a result still requires grad: detach it" if any(w.requires_grad for w in result) else None)


DESCENT_STEP = Exercise(
    lesson=LESSON,
    solution=descent_step,
    hints=(
        "w2 comes out right and w1 does not. What does the second `torch.autograd.grad` read, and what has happened to "
        "it since the forward pass?",
        "The gradient of w1 goes through the product with w2, and autograd has saved w2 for it. `w2.data -= …` writes "
        "into that very memory, "
        "unnoticed. Write `with torch.no_grad(): w2 -= …` instead and read the error.",
        "Take both gradients before either weight changes: `torch.autograd.grad(loss, (w1, w2))` gives both in one pass, "
        "without retain_graph.",
    ),
    cases=(
        Case("there is one sample", lambda: _step_inputs(1, 3, 4, 2, 0.1), tolerance=TOLERANCE),
        Case("there are five samples", lambda: _step_inputs(5, 3, 4, 2, 0.1), tolerance=TOLERANCE),
        Case("the rate is large", lambda: _step_inputs(5, 2, 3, 1, 3.0), tolerance=TOLERANCE),
        Case("the rate is 0", lambda: _step_inputs(5, 2, 3, 1, 0.0), tolerance=TOLERANCE),
        Case("the new weights are handed on", lambda: _step_inputs(2, 3, 3, 1, 0.1), verify=_plain_step),
    ),
    mistakes=(
        Mistake(
            "The step of w1 was computed with the *new* w2. Autograd had saved w2 to compute the gradient of w1, and a "
            "write through `.data` "
            "changes the saved numbers without autograd's knowledge.",
            _through_data,
        ),
        Mistake(
            "The forward pass ran again after w2 was updated, so w1 steps from another point. Both gradients are asked "
            "for at the weights given.",
            _one_after_the_other,
        ),
        Mistake(
            "The steps go uphill: subtract rate times gradient.",
            lambda x, target, w1, w2, rate=0.1: descent_step(x, target, w1, w2, -rate),
        ),
    ),
)


def frozen_features(encoder, batches):
    """Yields the encoder's outputs; gradients are off while the encoder runs, and never across a yield."""
    for batch in batches:
        with torch.no_grad():
            features = encoder(batch)
        yield features


def _taken(result, at_most, gradients_on=True):
    """(what is yielded, whether gradients were on for the taker each time); the mode of the process stays as it was."""
    before = torch.is_grad_enabled()
    yielded, modes = [], []
    try:
        torch.set_grad_enabled(gradients_on)
        for features in result:
            yielded.append(features)
            modes.append(torch.is_grad_enabled())
            if len(yielded) > at_most:
                break
    finally:
        if hasattr(result, "close"):
            result.close()
        torch.set_grad_enabled(before)
    return yielded, modes


def _features_case(name, gradients_on, judge):
    @tried
    def verify(result, encoder, batches):
        if not hasattr(result, "__iter__"):
            return f"{kind(result)} came, from which no features can be taken one after the other"
        yielded, modes = _taken(result, len(batches), gradients_on)
        return judge(yielded, modes, encoder, batches)

    return Case(name, lambda: (_line(), [noise(2, 3, seed=seed) for seed in range(3)]), verify=verify)


def _right_features(yielded, modes, encoder, batches):
    if len(yielded) != len(batches):
        fewer = len(yielded) < len(batches)
        return f"{len(yielded)} outputs came for {len(batches)} batches" if fewer else "more outputs came than batches"
    with torch.no_grad():
        wanted = [encoder(batch) for batch in batches]
    return first(differs(f"output {i}", w, y) for i, (w, y) in enumerate(zip(wanted, yielded)))


def _without_graph(yielded, modes, encoder, batches):
    return "an output has a graph behind it: the encoder ran with gradients on" if any(y.requires_grad for y in yielded) else None


def _gradients_stay(on):
    def judge(yielded, modes, encoder, batches):
        if all(mode == on for mode in modes):
            return None
        was, are = ("on", "off") if on else ("off", "on")
        return f"gradients were {was} for the taker, and are {are} when batch {modes.index(not on)} has come"

    return judge


def _inside_no_grad(encoder, batches):
    with torch.no_grad():
        for batch in batches:
            yield encoder(batch)


def _switched_on(encoder, batches):
    for batch in batches:
        with torch.no_grad():
            features = encoder(batch)
        with torch.enable_grad():
            yield features


def _with_graph(encoder, batches):
    for batch in batches:
        yield encoder(batch)


FROZEN_FEATURES = Exercise(
    lesson=LESSON,
    solution=frozen_features,
    hints=(
        "A `yield` stops the generator where it stands. Where does it stand? Print `torch.is_grad_enabled()` in the loop "
        "that takes the features.",
        "Whether gradients are on is a setting of the thread, and not of the function. A generator that waits inside "
        "`with torch.no_grad()` has "
        "left the setting off for everyone.",
        "Leave the `with` block before the yield: compute the features inside, yield them outside. (Or decorate the generator with "
        "`@torch.no_grad()`, which switches back around each yield.)",
    ),
    cases=(
        _features_case("three batches come in", True, _right_features),
        _features_case("the encoder is frozen", True, _without_graph),
        _features_case("gradients are on for the taker", True, _gradients_stay(True)),
        _features_case("gradients are off for the taker", False, _gradients_stay(False)),
    ),
    mistakes=(
        Mistake(
            "The encoder's outputs carry a graph: without no_grad (or detach) it is recorded for nothing, and backward "
            "goes through the encoder.",
            _with_graph,
        ),
        Mistake(
            "The generator waits at its yield, inside `with torch.no_grad()`, and meanwhile gradients are off for "
            "everyone. Leave the block before "
            "the yield.",
            _inside_no_grad,
        ),
        Mistake(
            "Now gradients are switched on for everyone, also for a taker that had them off. The generator should leave the setting alone.",
            _switched_on,
        ),
    ),
)


def scaled_linear(features, outputs, dtype=torch.float32):
    """A linear layer with a learned scale: the Parameter is made last, from a tensor that has its dtype already."""
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = nn.Parameter(torch.ones(outputs, dtype=dtype))
    return layer


@tried
def _trains_and_saves(result, features, outputs, dtype=torch.float32):
    if not isinstance(result, nn.Module):
        return f"{kind(result)} came where a module was expected"
    named = dict(result.named_parameters())
    if set(named) != {"weight", "bias", "scale"}:
        return f"its parameters are {', '.join(named) or 'none'}; weight, bias and scale are expected"
    shapes = {"weight": (outputs, features), "bias": (outputs,), "scale": (outputs,)}
    for name, parameter in named.items():
        if tuple(parameter.shape) != shapes[name] or parameter.dtype != dtype:
            return f"{name} has shape {tuple(parameter.shape)} and is {parameter.dtype}; expected are {shapes[name]} and {dtype}"
        if not parameter.requires_grad:
            return f"{name} does not require grad"
    if result.scale is not named["scale"] or set(result.state_dict()) != set(shapes):
        return "the attribute scale is not the parameter that is saved as scale"
    x = noise(4, features).to(dtype)
    if said := differs("scale", torch.ones(outputs, dtype=dtype), named["scale"]):
        return said
    if said := differs("layer(x)", F.linear(x, named["weight"], named["bias"]), result(x)):
        return said
    (result(x) * result.scale).sum().backward()
    return first(f"{name} gets no gradient" if parameter.grad is None else None for name, parameter in named.items())


def _scaled(scale):
    def make(features, outputs, dtype=torch.float32):
        layer = nn.Linear(features, outputs, dtype=dtype)
        scale(layer, outputs, dtype)
        return layer

    return make


SCALED_LINEAR = Exercise(
    lesson=LESSON,
    solution=scaled_linear,
    hints=(
        "Print `type(layer.scale)` and `layer.scale.is_leaf`, for float32 and for float64.",
        "`.to(dtype)` returns the tensor itself where nothing changes, and the *result of an operation* where something "
        "does. A module takes in "
        "what is a Parameter; a result of an operation on one is a plain tensor. `.to(device)` does the same, and shows it on a GPU alone.",
        "Make the tensor right first, and a Parameter of it last: `nn.Parameter(torch.ones(outputs, dtype=dtype))`.",
    ),
    cases=(
        Case("the layer is float32", lambda: (3, 2), verify=_trains_and_saves),
        Case("the layer is float64", lambda: (3, 2, torch.float64), verify=_trains_and_saves),
        Case("the layer is bfloat16", lambda: (3, 2, torch.bfloat16), verify=_trains_and_saves),
        Case("one number comes out", lambda: (4, 1, torch.float64), verify=_trains_and_saves),
    ),
    mistakes=(
        Mistake(
            "A buffer is saved with the module, and does not train. A learned tensor is an nn.Parameter.",
            _scaled(lambda layer, n, dtype: layer.register_buffer("scale", torch.ones(n, dtype=dtype))),
        ),
        Mistake(
            "A plain tensor, even one that requires grad, is an attribute like any other: the module does not list it, "
            "so no optimizer gets it "
            "and no file keeps it. Wrap it in nn.Parameter.",
            _scaled(lambda layer, n, dtype: setattr(layer, "scale", torch.ones(n, dtype=dtype, requires_grad=True))),
        ),
        Mistake(
            "Where the dtype changes, `.to(dtype)` is an operation, and its result is no Parameter but a plain tensor. "
            "Change the tensor first and "
            "wrap it last: `nn.Parameter(torch.ones(outputs, dtype=dtype))`.",
            _scaled(lambda layer, n, dtype: setattr(layer, "scale", nn.Parameter(torch.ones(n)).to(dtype))),
        ),
        Mistake(
            "The scale is float32, whatever was asked for: give `torch.ones` the dtype.",
            _scaled(lambda layer, n, dtype: setattr(layer, "scale", nn.Parameter(torch.ones(n)))),
        ),
    ),
)


def checkpointed(blocks, x):
    """The blocks in order, each checkpointed in the form that looks at the parameters, too, and not at x alone."""
    for block in blocks:
        x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    return x


@seeded
def _blocks():
    return nn.ModuleList(doubled(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4)) for _ in range(3))


def _in_order(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def _blocks_case(name, x, n=3, at_x=True, flag=False, watch=None):
    @tried
    def verify(result, blocks, x):
        theirs, their_x = _blocks()[:n], x.detach().clone().requires_grad_(x.requires_grad)
        wanted = _in_order(theirs, their_x)
        if said := differs("the output", wanted, result):
            return said
        if flag and x.requires_grad:
            return "x requires grad after the call"
        if not result.requires_grad:
            return "the output has no graph: none of the blocks' parameters gets a gradient"
        if x.requires_grad and not x.is_leaf:
            x.retain_grad()
        weights = noise(*result.shape, seed=5)
        (wanted * weights).sum().backward()
        (result * weights).sum().backward()
        if at_x and x.requires_grad and (said := differs("the gradient of x", their_x.grad, x.grad)):
            return said
        came = gradients_of(blocks)
        return first(differs(f"the gradient of {name}", gradient, came[name]) for name, gradient in gradients_of(theirs).items())

    return Case(name, lambda: (_blocks()[:n], x()), verify=verify, watch=watch)


def _keeps_inputs_alone(call):
    with saved_bytes() as saved:
        call()
    budget = 4 * 50 * 4 * 8  # a block's input has 50 * 4 numbers
    if saved.bytes <= budget:
        return None
    return (
        f"the gradients are right, but the forward pass keeps {saved.bytes:,} bytes for backward, "
        f"where the blocks' inputs have {budget:,} at most"
    )


def _reentrant(blocks, x):
    with warnings.catch_warnings(action="ignore"):
        for block in blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
    return x


CHECKPOINTED = Exercise(
    lesson=LESSON,
    solution=checkpointed,
    time_limit=20.0,  # the first checkpoint of a process loads a part of PyTorch
    hints=(
        "Run the cell without `warnings.catch_warnings`. What does the warning say about the inputs, and does it say "
        "anything about parameters?",
        "Reentrant checkpointing runs the block under no_grad, as a custom Function of x, and its output records a graph "
        "only if an *input tensor* "
        "requires grad. The block's parameters are hidden inside.",
        "The other form, `use_reentrant=False`, records in the ordinary way and only packs away what would have been "
        "saved: it asks nothing of x.",
    ),
    cases=(
        _blocks_case("the blocks learn, and x requires grad", lambda: noise(5, 4).requires_grad_(), at_x=False),
        _blocks_case("the gradient of x is needed, too", lambda: noise(5, 4).requires_grad_()),
        _blocks_case("x comes from a frozen part", lambda: noise(5, 4)),
        _blocks_case("x has a history", lambda: noise(5, 4).requires_grad_() * 2),
        _blocks_case("there is one block", lambda: noise(5, 4), n=1),
        _blocks_case("x is used again afterwards", lambda: noise(5, 4), flag=True),
        _blocks_case("memory is counted", lambda: noise(50, 4), watch=_keeps_inputs_alone),
    ),
    mistakes=(
        Mistake(
            "The gradient of x is lost: a detached copy of it goes into the blocks.",
            lambda blocks, x: _reentrant(blocks, x.detach().clone().requires_grad_()),
        ),
        Mistake(
            "Reentrant checkpointing looks only at the tensors that go in. If none of them requires grad, the output has "
            "no graph, and the blocks' "
            "parameters get no gradient.",
            _reentrant,
        ),
        Mistake(
            "`x.requires_grad_()` makes the caller's tensor require grad, for good: every later use of it is recorded. "
            "There is a form of checkpointing "
            "that asks nothing of x.",
            lambda blocks, x: _reentrant(blocks, x if x.requires_grad else x.requires_grad_()),
        ),
        Mistake(
            "The gradients are right, and a block that is not checkpointed keeps its activations, whether it is one or all of them. "
            "`checkpoint_sequential` leaves the last one out.",
            _in_order,
        ),
    ),
)


def fit_stream(batches, rate=0.1):
    """One step for each batch; the running mean takes the error's value without its graph, so that no batch reaches an earlier one."""
    weights = torch.zeros(batches[0][0].shape[1], requires_grad=True)
    scale = 1.0
    for x, y in batches:
        error = ((x @ weights - y) ** 2).mean()
        scale = 0.9 * scale + 0.1 * error.detach()
        (error / scale).backward()
        with torch.no_grad():
            weights -= rate * weights.grad
            weights.grad = None
    return weights.detach()


def _streamed(carry, use=torch.Tensor.detach, scaled=True, clear=True, keep=False):
    """fit_stream with another way to carry the scale from batch to batch, and to use it."""

    def fit(batches, rate=0.1):
        weights = torch.zeros(batches[0][0].shape[1], requires_grad=True)
        scale, losses = torch.tensor(1.0), []
        for x, y in batches:
            error = ((x @ weights - y) ** 2).mean()
            new = 0.9 * carry(scale) + 0.1 * error
            loss = error / (use(new) if scaled else 1.0)
            scale = new
            loss.backward(retain_graph=True)
            losses += [loss] if keep else []
            with torch.no_grad():
                weights -= rate * weights.grad
                weights.grad = None if clear else weights.grad
        return weights.detach()

    return fit


def _stream(n, outlier=False):
    direction = torch.tensor([3.0, -2.0])
    batches = []
    for i in range(n):
        x = noise(16, 2, seed=i, dtype=torch.float32)
        batches.append((x, x @ direction * (100.0 if outlier and i == n // 2 else 1.0)))
    return batches


def _flat_memory(call):
    with saved_bytes() as saved:
        call()
    with saved_bytes() as one:
        fit_stream(_stream(1))
    if saved.peak <= 4 * one.peak:
        return None
    return (
        f"the weights are right, but at the peak the graphs hold {saved.peak:,} bytes for backward, where one batch needs "
        f"{one.peak:,}: each batch "
        "keeps the graphs of all batches before it"
    )


FIT_STREAM = Exercise(
    lesson=LESSON,
    solution=fit_stream,
    hints=(
        "Which variable comes from one pass of the loop into the next, and what does it remember? Print `scale.grad_fn` "
        "in the second pass.",
        "scale holds the error *with its graph*, so the loss of each batch reaches all batches before it. The error "
        "message was right: that graph had "
        "been freed. retain_graph keeps it, instead of cutting it.",
        "Only the value of the error belongs into the running mean: `0.1 * error.detach()` (or `error.item()`). Then one "
        "ordinary backward is enough.",
    ),
    cases=(
        Case("there are two batches", lambda: (_stream(2),), tolerance=1e-5),  # float32: steps that contract leave a few roundings
        Case("there is one batch", lambda: (_stream(1),), tolerance=1e-5),
        Case("there are twenty batches", lambda: (_stream(20),), tolerance=1e-5),
        Case("the rate is given", lambda: (_stream(5), 0.02), tolerance=1e-5),
        Case("one batch is far larger than the others", lambda: (_stream(9, outlier=True),), tolerance=1e-4),
        Case("memory is counted", lambda: (_stream(40),), tolerance=1e-5, watch=_flat_memory),
    ),
    mistakes=(
        Mistake(
            "The gradient passes through the scale, and from there into every batch before. retain_graph=True keeps all "
            "of that alive and repairs "
            "nothing: take the error's value into the scale, `error.detach()`.",
            _streamed(carry=lambda scale: scale, use=lambda scale: scale),
        ),
        Mistake(
            "Earlier batches are cut off, but this batch's own error still passes a gradient through the scale. Detach "
            "the error where it enters the "
            "running mean.",
            _streamed(carry=torch.Tensor.detach, use=lambda scale: scale),
        ),
        Mistake(
            "The scale is gone: the loss of a batch is error / scale.",
            _streamed(carry=torch.Tensor.detach, scaled=False),
        ),
        Mistake(
            "The gradients of earlier batches are still in weights.grad: clear it after each step.",
            _streamed(carry=torch.Tensor.detach, clear=False),
        ),
        Mistake(
            "The result is right, and the graphs of all batches stay alive: the scale still carries them from pass to "
            "pass, or a list does.",
            _streamed(carry=lambda scale: scale),
        ),
    ),
)


def validation_loss(model, loss_fn, batches):
    """Mean loss over all samples, without recording anything."""
    total, samples = 0.0, 0
    with torch.no_grad():
        for x, y in batches:
            total += loss_fn(model(x), y).item() * len(x)
            samples += len(x)
    return total / samples


@seeded
def _regressor():
    return doubled(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))


@seeded
def _with_dropout_at_rest():
    return doubled(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).eval()


def _held_out(*sizes):
    return [(noise(n, 3, seed=i), noise(n, 1, seed=i + 50)) for i, n in enumerate(sizes)]


def _no_graph_piles_up(call):
    with saved_bytes() as saved:
        call()
    with saved_bytes() as one:
        F.mse_loss(_regressor()(noise(4, 3)), noise(4, 1))
    if saved.peak <= 3 * one.bytes:
        return None
    return (
        f"the loss is right, but at the peak the graphs hold {saved.peak:,} bytes for backward, where one batch's graph "
        f"has {one.bytes:,}: nobody "
        "will call backward, and something keeps the graph of every batch alive"
    )


def _mean_of_means(model, loss_fn, batches):
    with torch.no_grad():
        return sum(loss_fn(model(x), y).item() for x, y in batches) / len(batches)


def _graphs_and_all(model, loss_fn, batches):
    total = sum(loss_fn(model(x), y) * len(x) for x, y in batches)
    return (total / sum(len(x) for x, _ in batches)).item()


def _mode_switched(model, loss_fn, batches):
    model.eval()
    return validation_loss(model, loss_fn, batches)


VALIDATION_LOSS = Exercise(
    lesson=LESSON,
    solution=validation_loss,
    hints=(
        "What is `total` after the second batch: a number? Print `total.grad_fn`.",
        "Without backward nothing is ever freed: total leads to every batch's graph, and each holds its activations.",
        "`with torch.no_grad():` around the loop records nothing in the first place; `.item()` on each loss makes total a number.",
    ),
    cases=(
        Case("there is one batch", lambda: (_regressor(), F.mse_loss, _held_out(4)), tolerance=TOLERANCE),
        Case("the last batch is smaller", lambda: (_regressor(), F.mse_loss, _held_out(4, 4, 1)), tolerance=TOLERANCE),
        Case("the loss is another", lambda: (_regressor(), F.l1_loss, _held_out(2, 5)), tolerance=TOLERANCE),
        Case("the model is in evaluation mode", lambda: (_with_dropout_at_rest(), F.mse_loss, _held_out(4, 3)), tolerance=TOLERANCE),
        Case(
            "there are twenty batches",
            lambda: (_regressor(), F.mse_loss, _held_out(*[4] * 20)),
            tolerance=TOLERANCE,
            watch=_no_graph_piles_up,
        ),
    ),
    mistakes=(
        Mistake(
            "This is the mean of the batches' means, in which a sample of a small batch weighs more. Weigh each loss by "
            "its number of samples.",
            _mean_of_means,
        ),
        Mistake(
            "This is the sum over the samples. Divide by their number.",
            lambda model, loss_fn, batches: validation_loss(model, loss_fn, batches) * sum(len(x) for x, _ in batches),
        ),
        Mistake(
            "The model's mode has changed. It may be the caller's business to switch it, and here it is to stay as it was.",
            _mode_switched,
        ),
        Mistake(
            "Every batch adds its graph to the total, and without backward nothing lets go of them. Record nothing "
            "(`torch.no_grad()`), or take the "
            "number out of each loss (`.item()`).",
            _graphs_and_all,
        ),
    ),
)

EXERCISES = (
    LEAF_GRADIENT,
    BACKWARD_BY_HAND,
    GRAPH_SIZE,
    FINITE_DIFFERENCE,
    FREEZE,
    ADVERSARIAL_LOSSES,
    TRUNCATED_BPTT,
    SIGNED_SQUARE,
    GRADIENT_PENALTY,
    HESSIAN_VECTOR_PRODUCT,
    PER_SAMPLE_GRADIENTS,
    DESCENT_STEP,
    FROZEN_FEATURES,
    SCALED_LINEAR,
    CHECKPOINTED,
    FIT_STREAM,
    VALIDATION_LOSS,
)
