import math
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from exercise_answers import broken, right, wrong

# ── leaf_gradient ─────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("leaf_gradient", "changes the caller's tensor")
def backward_on_x(function, x):
    x.requires_grad_(True)
    function(x).backward()
    return x.grad


@wrong("leaf_gradient", "returns a tuple")
def all_of_the_tuple(function, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x), x)


@wrong("leaf_gradient", "is no leaf")
def clone_without_detach(function, x):
    ours = x.clone().requires_grad_()
    function(ours).backward()
    with warnings.catch_warnings(action="ignore"):
        return ours.grad


@wrong("leaf_gradient", "adds to what is there")
def only_if_needed(function, x):
    if not x.requires_grad:
        x = x.detach().clone().requires_grad_()
    function(x).backward()
    return x.grad


@wrong("leaf_gradient", "held 5.0 everywhere and has changed: None came")
def clears_first(function, x):
    ours = x.detach().clone().requires_grad_()
    x.grad = None
    function(ours).backward()
    return ours.grad


@wrong("leaf_gradient", "requires grad after the call")
def set_back_too_late(function, x):
    x.requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


@wrong("leaf_gradient", "filled the .grad of what x was made from")
def through_the_history(function, x):
    ours = x if x.requires_grad and not x.is_leaf else x.detach().clone().requires_grad_()
    with warnings.catch_warnings(action="ignore"):
        ours.retain_grad()
        function(ours).backward()
        return ours.grad


@wrong("leaf_gradient", "returns nothing")
def no_return(function, x):
    leaf = x.detach().requires_grad_()
    torch.autograd.grad(function(leaf), leaf)


@right("leaf_gradient")
def by_backward(function, x):
    leaf = x.detach().requires_grad_()
    function(leaf).backward()
    return leaf.grad


@right("leaf_gradient")
def by_torch_func(function, x):
    return grad(function)(x.detach())


@right("leaf_gradient")
def through_numbers(function, x):
    leaf = torch.tensor(x.tolist(), dtype=x.dtype, requires_grad=True)
    return torch.autograd.functional.jacobian(function, leaf)


# ── backward_by_hand ──────────────────────────────────────────────────────────────────────────────────────────────────


def layers(x, w1, b1, w2):
    inside = x @ w1 + b1
    return inside, inside.tanh(), inside.tanh() @ w2


@wrong("backward_by_hand", "factor 2")
def no_two(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = (y - target) / y.numel()
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e.sum(0), h.T @ d


@wrong("backward_by_hand", "sign is turned round")
def target_minus_output(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (target - y) / y.numel()
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e.sum(0), h.T @ d


@wrong("backward_by_hand", "gradient of the *sum*")
def of_the_sum(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target)
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e.sum(0), h.T @ d


@wrong("backward_by_hand", "number of samples alone")
def per_sample(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target) / len(x)
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e.sum(0), h.T @ d


@wrong("backward_by_hand", "here it is 1 - z²")
def slope_of_the_sum(x, w1, b1, w2, target):
    z, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target) / y.numel()
    e = (d @ w2.T) * (1 - z * z)
    return x.T @ e, e.sum(0), h.T @ d


@wrong("backward_by_hand", "as if it were not there")
def without_slope(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target) / y.numel()
    e = d @ w2.T
    return x.T @ e, e.sum(0), h.T @ d


@wrong("backward_by_hand", "one gradient for each sample")
def bias_not_summed(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target) / y.numel()
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e, h.T @ d


@wrong("backward_by_hand", "are averaged")
def bias_averaged(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target) / y.numel()
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e.mean(0), h.T @ d


@wrong("backward_by_hand", "the shape is (1, 2), expected (2,)")
def bias_as_a_row(x, w1, b1, w2, target):
    _, h, y = layers(x, w1, b1, w2)
    d = 2 * (y - target) / y.numel()
    e = (d @ w2.T) * (1 - h * h)
    return x.T @ e, e.sum(0, keepdim=True), h.T @ d


@right("backward_by_hand")
def autograd_itself(x, w1, b1, w2, target):
    ws = [w.clone().requires_grad_() for w in (w1, b1, w2)]
    return torch.autograd.grad(F.mse_loss(torch.tanh(x @ ws[0] + ws[1]) @ ws[2], target), ws)


@right("backward_by_hand")
def by_einstein(x, w1, b1, w2, target):
    h = torch.tanh(torch.einsum("nd,dh->nh", x, w1) + b1)
    error = torch.einsum("nh,hk->nk", h, w2) - target
    inner = torch.einsum("nk,hk,nh->nh", error, w2, 1 - h.square()) * (2 / error.numel())
    return torch.einsum("nd,nh->dh", x, inner), inner.sum(0), torch.einsum("nh,nk->hk", h, error) * (2 / error.numel())


@right("backward_by_hand")
def in_numpy(x, w1, b1, w2, target):
    x, w1, b1, w2, target = (t.numpy() for t in (x, w1, b1, w2, target))
    h = np.tanh(x @ w1 + b1)
    d = 2 * (h @ w2 - target) / target.size
    e = d @ w2.T * (1 - h**2)
    return torch.from_numpy(x.T @ e), torch.from_numpy(e.sum(0)), torch.from_numpy(h.T @ d)


@right("backward_by_hand")
def sample_by_sample(x, w1, b1, w2, target):
    g1, gb, g2 = torch.zeros_like(w1), torch.zeros_like(b1), torch.zeros_like(w2)
    for row, wanted in zip(x, target):
        h = torch.tanh(row @ w1 + b1)
        d = 2 * (h @ w2 - wanted) / target.numel()
        e = (w2 @ d) * (1 - h**2)
        g1 += torch.outer(row, e)
        gb += e
        g2 += torch.outer(h, d)
    return g1, gb, g2


@right("backward_by_hand")
def by_differences(x, w1, b1, w2, target):
    def loss(ws):
        return ((torch.tanh(x @ ws[0] + ws[1]) @ ws[2] - target) ** 2).mean()

    found = []
    for i, w in enumerate((w1, b1, w2)):
        slopes = torch.zeros_like(w)
        for k in range(w.numel()):
            step = torch.zeros(w.numel(), dtype=w.dtype)
            step[k] = 1e-6
            values = [loss([v + s * step.view(w.shape) if j == i else v for j, v in enumerate((w1, b1, w2))]) for s in (1, -1)]
            slopes.view(-1)[k] = (values[0] - values[1]) / 2e-6
        found.append(slopes)
    return tuple(found)


# ── graph_size ────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("graph_size", "counted once for each path")
def counts_paths(loss):
    def size(fn):
        return 1 + sum(size(f) for f, _ in fn.next_functions if f is not None)

    return size(loss.grad_fn) if loss.grad_fn is not None else 0


@wrong("graph_size", "told apart by their name")
def by_name(loss):
    names, waiting = set(), [loss.grad_fn]
    while waiting:
        fn = waiting.pop()
        if fn:
            names.add(fn.name())
            waiting += [f for f, _ in fn.next_functions]
    return len(names)


@wrong("graph_size", "AccumulateGrad nodes are missing")
def steps_alone(loss):
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        fn = waiting.pop()
        if fn is None or fn in seen or hasattr(fn, "variable"):
            continue
        seen.add(fn)
        waiting += [f for f, _ in fn.next_functions]
    return len(seen)


@wrong("graph_size", "Only the first input")
def first_input(loss):
    fn, size = loss.grad_fn, 0
    while fn is not None:
        size += 1
        fn = fn.next_functions[0][0] if fn.next_functions else None
    return size


@wrong("graph_size", "It is no node")
def none_is_counted(loss):
    seen, waiting = set(), [loss.grad_fn] if loss.grad_fn else []
    while waiting:
        fn = waiting.pop()
        if fn not in seen:
            seen.add(fn)
            waiting += [f for f, _ in fn.next_functions] if fn else []
    return len(seen)


@wrong("graph_size", "These are the edges")
def counts_edges(loss):
    size, seen, waiting = 0, set(), [loss.grad_fn]
    while waiting:
        fn = waiting.pop()
        if fn is not None:
            size += 1
            if fn not in seen:
                seen.add(fn)
                waiting += [f for f, _ in fn.next_functions]
    return size


@wrong("graph_size", "RecursionError where the graph is 10,000 steps deep")
def deep_recursion(loss):
    seen = set()

    def visit(fn):
        if fn is not None and fn not in seen:
            seen.add(fn)
            for f, _ in fn.next_functions:
                visit(f)

    visit(loss.grad_fn)
    return len(seen)


@wrong("graph_size", "a tensor has no graph")
def needs_a_graph(loss):
    seen, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        fn = waiting.pop()
        for f, _ in fn.next_functions if fn is not None else ():
            if f is not None and f not in seen:
                seen.add(f)
                waiting.append(f)
    return len(seen)


@right("graph_size")
def level_by_level(loss):
    seen, level = set(), {loss.grad_fn} - {None}
    while level:
        seen |= level
        level = {f for fn in level for f, _ in fn.next_functions if f is not None} - seen
    return len(seen)


@right("graph_size")
def in_a_dictionary(loss):
    order = dict.fromkeys([loss.grad_fn] if loss.requires_grad and not loss.is_leaf else [])
    queue = list(order)
    for fn in queue:  # grows while it is walked
        for f, _ in fn.next_functions:
            if f is not None and f not in order:
                order[f] = None
                queue.append(f)
    return len(queue)


# ── finite_difference ─────────────────────────────────────────────────────────────────────────────────────────────────


def moved_by(function, inputs, eps, formula):
    """formula(value at + step, value at 0, value at - step) / eps for each element, on inputs of any layout."""
    if any(x.dtype != torch.float64 for x in inputs):
        raise TypeError("float64 is needed")
    result = []
    for i, x in enumerate(inputs):
        slopes = torch.zeros(x.shape, dtype=x.dtype)
        for index in np.ndindex(*x.shape):
            values = []
            for step in (eps, 0.0, -eps):
                other = x.detach().clone(memory_format=torch.contiguous_format)
                other[index] += step
                values.append(function(*inputs[:i], other, *inputs[i + 1 :]).item())
            slopes[index] = formula(*values) / eps
        result.append(slopes)
    return tuple(result)


@wrong("finite_difference", "one-sided")
def forward_difference(function, *inputs, eps=1e-6):
    return moved_by(function, inputs, eps, lambda above, middle, below: above - middle)


@wrong("finite_difference", "elements differ")
def backward_difference(function, *inputs, eps=1e-6):
    return moved_by(function, inputs, eps, lambda above, middle, below: middle - below)


@wrong("finite_difference", "divide by 2 * eps")
def by_one_eps(function, *inputs, eps=1e-6):
    return moved_by(function, inputs, eps, lambda above, middle, below: above - below)


@wrong("finite_difference", "all partial derivatives")
def everything_moves(function, *inputs, eps=1e-6):
    result = []
    for i, x in enumerate(inputs):
        up = function(*[t + eps if j == i else t for j, t in enumerate(inputs)])
        down = function(*[t - eps if j == i else t for j, t in enumerate(inputs)])
        result.append(torch.full_like(x, ((up - down) / (2 * eps)).item()))
    return tuple(result)


@wrong("finite_difference", "writing into a copy")
def into_a_copy(function, *inputs, eps=1e-6):
    result = []
    for i, x in enumerate(inputs):
        moved = x.detach().clone()
        flat, slopes = moved.reshape(-1), []
        for k in range(flat.numel()):
            flat[k] += eps
            up = function(*inputs[:i], moved, *inputs[i + 1 :]).item()
            flat[k] -= 2 * eps
            down = function(*inputs[:i], moved, *inputs[i + 1 :]).item()
            flat[k] += eps
            slopes.append((up - down) / (2 * eps))
        result.append(torch.tensor(slopes, dtype=x.dtype).view(x.shape))
    return tuple(result)


@wrong("finite_difference", "RuntimeError where x is transposed")
def views_of_anything(function, *inputs, eps=1e-6):
    result = []
    for i, x in enumerate(inputs):
        moved, slopes = x.detach().clone(), []
        for k in range(x.numel()):
            values = []
            for step in (eps, -eps):
                moved.view(-1)[k] += step
                values.append(function(*inputs[:i], moved, *inputs[i + 1 :]).item())
                moved.view(-1)[k] -= step
            slopes.append((values[0] - values[1]) / (2 * eps))
        result.append(torch.tensor(slopes, dtype=x.dtype).view(x.shape))
    return tuple(result)


@wrong("finite_difference", "x shows one number in several places")
def in_the_input_itself(function, *inputs, eps=1e-6):
    result = []
    for x in inputs:
        slopes = torch.zeros(x.shape, dtype=x.dtype)
        with torch.no_grad():
            for index in np.ndindex(*x.shape):
                middle, values = x[index].item(), []
                for step in (eps, -eps):
                    x[index] = middle + step
                    values.append(function(*inputs).item())
                x[index] = middle
                slopes[index] = (values[0] - values[1]) / (2 * eps)
        result.append(slopes)
    return tuple(result)


@wrong("finite_difference", "where a tuple was expected")
def the_first_alone(function, x, *others, eps=1e-6):
    return moved_by(function, (x, *others), eps, lambda above, middle, below: (above - below) / 2)[0]


@wrong("finite_difference", "mostly rounding")
def in_float32_too(function, *inputs, eps=1e-6):
    gradients = moved_by(function, [x.double() for x in inputs], eps, lambda above, middle, below: (above - below) / 2)
    return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs))


@wrong("finite_difference", "where the second input is float32")
def looks_at_the_first(function, *inputs, eps=1e-6):
    if inputs[0].dtype != torch.float64:
        raise TypeError
    gradients = moved_by(function, [x.double() for x in inputs], eps, lambda above, middle, below: (above - below) / 2)
    return tuple(g.to(x.dtype) for g, x in zip(gradients, inputs))


@wrong("finite_difference", "ValueError where x is float32")
def another_error(function, *inputs, eps=1e-6):
    if any(x.dtype != torch.float64 for x in inputs):
        raise ValueError("float64")
    return moved_by(function, inputs, eps, lambda above, middle, below: (above - below) / 2)


@right("finite_difference")
def index_by_index(function, *inputs, eps=1e-6):
    return moved_by(function, inputs, eps, lambda above, middle, below: (above - below) / 2)


@right("finite_difference")
def by_unit_vectors(function, *inputs, eps=1e-6):
    if {x.dtype for x in inputs} != {torch.float64}:
        raise TypeError("only float64")
    found = []
    for i, x in enumerate(inputs):
        steps = eps * torch.eye(x.numel(), dtype=x.dtype).view(x.numel(), *x.shape)
        at = [[function(*inputs[:i], x.detach() + sign * step, *inputs[i + 1 :]).item() for step in steps] for sign in (1, -1)]
        found.append((torch.tensor(at[0], dtype=x.dtype) - torch.tensor(at[1], dtype=x.dtype)).div(2 * eps).view(x.shape))
    return tuple(found)


@right("finite_difference")
def of_fourth_order(function, *inputs, eps=1e-6):
    if any(x.dtype != torch.float64 for x in inputs):
        raise TypeError
    near = moved_by(function, inputs, 1e-4, lambda above, middle, below: (above - below) / 2)
    far = moved_by(function, inputs, 2e-4, lambda above, middle, below: (above - below) / 2)
    return tuple((4 * a - b) / 3 for a, b in zip(near, far))


@right("finite_difference")
def cheats_with_autograd(function, *inputs, eps=1e-6):
    if any(x.dtype != torch.float64 for x in inputs):
        raise TypeError
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves)


# ── freeze ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trainable(module):
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


@wrong("freeze", "new attribute that nothing reads")
def on_the_module(module, prefix):
    if prefix in dict(module.named_modules()):
        module.get_submodule(prefix).requires_grad = False
    return trainable(module)


@wrong("freeze", "begins with `layer1`, too")
def begins_with(module, prefix):
    for name, parameter in module.named_parameters():
        if name.startswith(prefix):
            parameter.requires_grad = False
            parameter.grad = None
    return trainable(module)


@wrong("freeze", "names of the frozen parameters")
def names_the_frozen(module, prefix):
    frozen = []
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad_(False)
            parameter.grad = None
            frozen.append(name)
    return frozen


@wrong("freeze", "not only those under the prefix")
def freezes_all(module, prefix):
    module.requires_grad_(False)
    return []


@wrong("freeze", "occurs inside the names")
def anywhere_in_the_name(module, prefix):
    for name, parameter in module.named_parameters():
        if prefix in name.split(".") or f"{prefix}." in name or name == prefix:
            parameter.requires_grad_(False)
            parameter.grad = None
    return trainable(module)


@wrong("freeze", "can be frozen already")
def names_all_others(module, prefix):
    others = []
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad_(False)
            parameter.grad = None
        else:
            others.append(name)
    return others


@wrong("freeze", "still hold their gradients")
def leaves_gradients(module, prefix):
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad = False
    return trainable(module)


@wrong("freeze", "has changed: None came")
def clears_all_gradients(module, prefix):
    module.zero_grad()
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad = False
    return trainable(module)


@wrong("freeze", "still holds its gradient")
def zeroes_gradients(module, prefix):
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad = False
            if parameter.grad is not None:
                parameter.grad.zero_()
    return trainable(module)


@wrong("freeze", "Raise ValueError")
def freezes_nothing_in_silence(module, prefix):
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad_(False)
            parameter.grad = None
    return trainable(module)


@wrong("freeze", "AttributeError where one parameter is named")
def submodules_alone(module, prefix):
    module.get_submodule(prefix).requires_grad_(False).zero_grad()
    return trainable(module)


@wrong("freeze", "A generator came where a list was expected")
def as_a_generator(module, prefix):
    for name, parameter in module.named_parameters():
        if (name + ".").startswith(prefix + "."):
            parameter.requires_grad_(False)
    return (name for name, parameter in module.named_parameters() if parameter.requires_grad)


@right("freeze")
def by_parts_of_the_name(module, prefix):
    wanted, hits = prefix.split("."), 0
    for name, parameter in module.named_parameters():
        if name.split(".")[: len(wanted)] == wanted:
            parameter.requires_grad, parameter.grad, hits = False, None, hits + 1
    if hits == 0:
        raise ValueError(prefix)
    return trainable(module)


@right("freeze")
def by_get_submodule(module, prefix):
    try:
        module.get_submodule(prefix).requires_grad_(False).zero_grad(set_to_none=True)
    except AttributeError:
        named = dict(module.named_parameters())
        if prefix not in named:
            raise ValueError(f"{prefix}?") from None
        named[prefix].requires_grad_(False).grad = None
    return trainable(module)


# ── adversarial_losses ────────────────────────────────────────────────────────────────────────────────────────────────


def bce(logits, target):
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))


@wrong("adversarial_losses", "changed places")
def generator_first(generator, critic, real, noise):
    made = generator(noise)
    return bce(critic(made), 1.0), bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0)


@wrong("adversarial_losses", "its target is 1")
def the_wrong_wish(generator, critic, real, noise):
    made = generator(noise)
    return bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0), bce(critic(made), 0.0)


@wrong("adversarial_losses", "sign turned round")
def zero_sum(generator, critic, real, noise):
    made = generator(noise)
    return bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0), -bce(critic(made), 0.0)


@wrong("adversarial_losses", "targets of the critic are exchanged")
def targets_exchanged(generator, critic, real, noise):
    made = generator(noise)
    return bce(critic(real), 0.0) + bce(critic(made.detach()), 1.0), bce(critic(made), 1.0)


@wrong("adversarial_losses", "not their mean")
def halves(generator, critic, real, noise):
    made = generator(noise)
    return (bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0)) / 2, bce(critic(made), 1.0)


@wrong("adversarial_losses", "goes back into the generator")
def no_detach(generator, critic, real, noise):
    judged = critic(generator(noise))
    return bce(critic(real), 1.0) + bce(judged, 0.0), bce(judged, 1.0)


@wrong("adversarial_losses", "*answer* is detached")
def answer_detached(generator, critic, real, noise):
    judged = critic(generator(noise))
    return bce(critic(real), 1.0) + bce(judged.detach(), 0.0), bce(judged, 1.0)


@wrong("adversarial_losses", "the generator never learns")
def detached_for_both(generator, critic, real, noise):
    made = generator(noise).detach()
    return bce(critic(real), 1.0) + bce(critic(made), 0.0), bce(critic(made), 1.0)


@wrong("adversarial_losses", "the generator never learns")
def made_under_no_grad(generator, critic, real, noise):
    with torch.no_grad():
        made = generator(noise)
    return bce(critic(real), 1.0) + bce(critic(made), 0.0), bce(critic(made), 1.0)


@wrong("adversarial_losses", "backward on it would raise")
def all_detached(generator, critic, real, noise):
    made = generator(noise)
    return bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0), bce(critic(made), 1.0).detach()


@wrong("adversarial_losses", "has filled a .grad")
def runs_backward(generator, critic, real, noise):
    made = generator(noise)
    first = bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0)
    second = bce(critic(made), 1.0)
    first.backward(retain_graph=True)
    return first, second


@wrong("adversarial_losses", "requires_grad")
def frozen_for_good(generator, critic, real, noise):
    made = generator(noise)
    first = bce(critic(real), 1.0) + bce(critic(made.detach()), 0.0)
    critic.requires_grad_(False)
    return first, bce(critic(made), 1.0)


@right("adversarial_losses")
def by_softplus(generator, critic, real, noise):
    made = generator(noise)
    critic_loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
    return critic_loss, F.softplus(-critic(made)).mean()


@right("adversarial_losses")
def generated_twice(generator, critic, real, noise):
    with torch.no_grad():
        constant = generator(noise)
    return bce(critic(real), 1.0) + bce(critic(constant), 0.0), bce(critic(generator(noise)), 1.0)


@right("adversarial_losses")
def critic_frozen_meanwhile(generator, critic, real, noise):
    critic.requires_grad_(False)
    generator_loss = bce(critic(generator(noise)), 1.0)
    critic.requires_grad_(True)
    return bce(critic(real), 1.0) + bce(critic(generator(noise).detach()), 0.0), generator_loss


# ── truncated_bptt ────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("truncated_bptt", "all of time")
def retained(cell, head, sequence, targets, chunk):
    h, total = torch.zeros(sequence.shape[1], cell.hidden_size, dtype=sequence.dtype), 0.0
    for start in range(0, len(sequence), chunk):
        loss = 0
        for x, y in zip(sequence[start : start + chunk], targets[start : start + chunk]):
            h = cell(x, h)
            loss = loss + F.mse_loss(head(h), y, reduction="sum") / targets.numel()
        loss.backward(retain_graph=True)
        total += loss.item()
    return total


@wrong("truncated_bptt", "Trying to backward through the graph a second time")
def not_cut(cell, head, sequence, targets, chunk):
    h, total = torch.zeros(sequence.shape[1], cell.hidden_size, dtype=sequence.dtype), 0.0
    for start in range(0, len(sequence), chunk):
        loss = 0
        for x, y in zip(sequence[start : start + chunk], targets[start : start + chunk]):
            h = cell(x, h)
            loss = loss + F.mse_loss(head(h), y, reduction="sum") / targets.numel()
        loss.backward()
        total += loss.item()
    return total


def in_chunks(cell, head, sequence, targets, chunk, carry=torch.Tensor.detach, weigh=None, steps=None):
    """The losses of the chunks, one after the other, before backward."""
    h = torch.zeros(sequence.shape[1], cell.hidden_size, dtype=sequence.dtype)
    for start in range(0, steps or len(sequence), chunk):
        h, outputs = carry(h), []
        for x in sequence[start : start + chunk]:
            h = cell(x, h)
            outputs.append(head(h))
        errors = (torch.stack(outputs) - targets[start : start + chunk]) ** 2
        yield weigh(errors) if weigh else errors.sum() / targets.numel()


@wrong("truncated_bptt", "begins at zeros in each chunk")
def forgets(cell, head, sequence, targets, chunk):
    total = 0.0
    for loss in in_chunks(cell, head, sequence, targets, chunk, carry=torch.zeros_like):
        loss.backward()
        total += loss.item()
    return total


@wrong("truncated_bptt", "has its own mean")
def mean_of_each(cell, head, sequence, targets, chunk):
    losses = []
    for loss in in_chunks(cell, head, sequence, targets, chunk, weigh=torch.mean):
        loss.backward()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@wrong("truncated_bptt", "shorter chunk is left out")
def whole_chunks_alone(cell, head, sequence, targets, chunk):
    total = 0.0
    if len(sequence) < chunk:
        return total
    for loss in in_chunks(cell, head, sequence, targets, chunk, steps=len(sequence) // chunk * chunk):
        loss.backward()
        total += loss.item()
    return total


@wrong("truncated_bptt", "clearing is for the caller")
def clears_before(cell, head, sequence, targets, chunk):
    cell.zero_grad(), head.zero_grad()
    total = 0.0
    for loss in in_chunks(cell, head, sequence, targets, chunk):
        loss.backward()
        total += loss.item()
    return total


@wrong("truncated_bptt", "one backward at the end")
def one_backward(cell, head, sequence, targets, chunk):
    loss = sum(in_chunks(cell, head, sequence, targets, chunk))
    loss.backward()
    return loss.item()


@wrong("truncated_bptt", ".item()")
def as_a_tensor(cell, head, sequence, targets, chunk):
    total = 0.0
    for loss in in_chunks(cell, head, sequence, targets, chunk):
        loss.backward()
        total += loss.detach()
    return total


@wrong("truncated_bptt", "gradient of cell.weight_ih: None came")
def no_backward(cell, head, sequence, targets, chunk):
    with torch.no_grad():
        return sum(in_chunks(cell, head, sequence, targets, chunk)).item()


@wrong("truncated_bptt", "eight_ih has changed")
def also_steps(cell, head, sequence, targets, chunk):
    optimizer, total = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1), 0.0
    for loss in in_chunks(cell, head, sequence, targets, chunk):
        loss.backward()
        total += loss.item()
    optimizer.step()
    return total


@wrong("truncated_bptt", "RuntimeError")
def clones_for_detach(cell, head, sequence, targets, chunk):
    total = 0.0
    for loss in in_chunks(cell, head, sequence, targets, chunk, carry=lambda h: h.clone()):
        loss.backward()
        total += loss.item()
    return total


@right("truncated_bptt")
def by_the_generator(cell, head, sequence, targets, chunk):
    return math.fsum([(loss.backward(), loss.item())[1] for loss in in_chunks(cell, head, sequence, targets, chunk)])


@right("truncated_bptt")
def by_autograd_grad(cell, head, sequence, targets, chunk):
    parameters, total = [*cell.parameters(), *head.parameters()], 0.0
    for loss in in_chunks(cell, head, sequence, targets, chunk):
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
            p.grad = g if p.grad is None else p.grad + g
        total += float(loss.detach())
    return total


@right("truncated_bptt")
def split_and_data(cell, head, sequence, targets, chunk):
    h, total = sequence.new_zeros(sequence.shape[1], cell.hidden_size), 0.0
    for xs, ys in zip(sequence.split(chunk), targets.split(chunk)):
        states = []
        for x in xs:
            h = cell(x, h)
            states.append(h)
        loss = F.mse_loss(head(torch.stack(states)), ys) * (ys.numel() / targets.numel())
        loss.backward()
        h = torch.from_numpy(h.detach().numpy().copy())
        total += loss.item()
    return total


# ── signed_square ─────────────────────────────────────────────────────────────────────────────────────────────────────


def function(forward, backward):
    return type("Mine", (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def keeps_input(ctx, x):
    ctx.save_for_backward(x)
    return x * x.abs()


def keeps_attribute(ctx, x):
    ctx.x = x
    return x * x.abs()


def keeps_slope(ctx, x):
    ctx.save_for_backward(2 * x.abs())
    return x * x.abs()


@wrong("signed_square", "keeps the sign of x")
def square():
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    return function(forward, lambda ctx, g: g * 2 * ctx.saved_tensors[0]).apply


@wrong("signed_square", "record this by themselves")
def no_function():
    return lambda x: x * x.abs()


@wrong("signed_square", "its derivative 2 * x")
def half_the_slope():
    return function(keeps_input, lambda ctx, g: g * ctx.saved_tensors[0].abs()).apply


@wrong("signed_square", "a positive number: 2 * |x| on both sides")
def slope_of_the_square():
    return function(keeps_input, lambda ctx, g: 2 * ctx.saved_tensors[0] * g).apply


@wrong("signed_square", "that is the chain rule")
def without_what_arrives():
    return function(keeps_input, lambda ctx, g: 2 * ctx.saved_tensors[0].abs()).apply


@wrong("signed_square", "as an attribute of ctx for instance")
def by_attribute():
    return function(keeps_attribute, lambda ctx, g: 2 * ctx.x.abs() * g).apply


@wrong("signed_square", "Save the input")
def slope_from_forward():
    return function(keeps_slope, lambda ctx, g: g * ctx.saved_tensors[0]).apply


@wrong("signed_square", "Save the input")
def detached_slope():
    return function(keeps_input, lambda ctx, g: g * 2 * ctx.saved_tensors[0].detach().abs()).apply


@wrong("signed_square", "Save the input")
def slope_under_no_grad():
    def backward(ctx, g):
        with torch.no_grad():
            slope = 2 * ctx.saved_tensors[0].abs()
        return g * slope

    return function(keeps_input, backward).apply


@wrong("signed_square", "Save the input")
def only_once():
    return function(keeps_input, torch.autograd.function.once_differentiable(lambda ctx, g: g * 2 * ctx.saved_tensors[0].abs())).apply


@wrong("signed_square", "where a function was expected")
def called_already():
    return function(keeps_input, lambda ctx, g: g * 2 * ctx.saved_tensors[0].abs()).apply(torch.ones(3))


@wrong("signed_square", "sing what came raised IndexError")
def forgets_to_save():
    return function(lambda ctx, x: x * x.abs(), lambda ctx, g: g * 2 * ctx.saved_tensors[0].abs()).apply


@right("signed_square")
def the_class_itself():
    return function(keeps_input, lambda ctx, g: g * 2 * ctx.saved_tensors[0].abs())


@right("signed_square")
def with_setup_context():
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return torch.where(x < 0, -(x**2), x**2)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return torch.where(x < 0, -2 * x, 2 * x) * gradient

    return Mine.apply


@right("signed_square")
def from_the_output():
    def forward(ctx, x):
        y = x * x.abs()
        ctx.save_for_backward(x, y)
        return y

    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (x * x.sign() + y * y.sign() / x.abs().clamp(min=1e-300))

    return function(forward, backward).apply


@right("signed_square")
def wrapped_in_a_function():
    mine = function(keeps_input, lambda ctx, g: ctx.saved_tensors[0].abs().mul(2).mul(g))
    return lambda x: mine.apply(x)


# ── gradient_penalty ──────────────────────────────────────────────────────────────────────────────────────────────────


def input_gradient(critic, x, reduce=torch.sum, **options):
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(reduce(critic(leaf)), leaf, **(options or {"create_graph": True}))[0]


@wrong("gradient_penalty", "pulls the gradient to 0")
def to_zero(critic, x):
    return input_gradient(critic, x).flatten(1).pow(2).sum(1).mean()


@wrong("gradient_penalty", "is to be squared")
def not_squared(critic, x):
    return (input_gradient(critic, x).flatten(1).norm(dim=1) - 1).mean()


@wrong("gradient_penalty", "1/N of each sample's gradient")
def of_the_mean(critic, x):
    return ((input_gradient(critic, x, torch.mean).flatten(1).norm(dim=1) - 1) ** 2).mean()


@wrong("gradient_penalty", "one norm over the whole batch")
def one_norm(critic, x):
    return (input_gradient(critic, x).norm() - 1) ** 2


@wrong("gradient_penalty", "`flatten(1)`")
def one_dimension(critic, x):
    return ((input_gradient(critic, x).norm(dim=1) - 1) ** 2).mean()


@wrong("gradient_penalty", "nothing can be trained with it")
def no_create_graph(critic, x):
    return ((input_gradient(critic, x, retain_graph=False).flatten(1).norm(dim=1) - 1) ** 2).mean()


@wrong("gradient_penalty", "writes nowhere")
def by_dot_backward(critic, x):
    leaf = x.detach().clone().requires_grad_()
    with warnings.catch_warnings(action="ignore"):
        critic(leaf).sum().backward(create_graph=True)
    return ((leaf.grad.flatten(1).norm(dim=1) - 1) ** 2).mean()


@wrong("gradient_penalty", "changes the caller's tensor")
def x_made_to_record(critic, x):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


@wrong("gradient_penalty", "whatever x was made from")
def x_not_detached(critic, x):
    if not x.requires_grad:
        x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


@wrong("gradient_penalty", "expected ()")
def one_for_each_sample(critic, x):
    return (input_gradient(critic, x).flatten(1).norm(dim=1) - 1) ** 2


@wrong("gradient_penalty", "has no graph")
def detached_at_the_end(critic, x):
    return ((input_gradient(critic, x).flatten(1).norm(dim=1) - 1) ** 2).mean().detach()


@right("gradient_penalty")
def with_grad_outputs(critic, x):
    leaf = x.detach().requires_grad_()
    scores = critic(leaf)
    (gradient,) = torch.autograd.grad(scores, leaf, torch.ones_like(scores), create_graph=True)
    return gradient.pow(2).flatten(1).sum(1).sqrt().sub(1).square().mean()


@right("gradient_penalty")
def one_at_a_time(critic, x):
    return sum((input_gradient(critic, x[i : i + 1]).norm() - 1) ** 2 for i in range(len(x))) / len(x)


@right("gradient_penalty")
def per_sample_by_func(critic, x):
    gradients = vmap(grad(lambda one: critic(one.unsqueeze(0)).sum()))(x.detach())
    return (gradients.flatten(1).norm(dim=1) - 1).pow(2).mean()


# ── hessian_vector_product ────────────────────────────────────────────────────────────────────────────────────────────


def tracked_gradient(function, x):
    leaf = x.detach().clone().requires_grad_()
    return leaf, torch.autograd.grad(function(leaf), leaf, create_graph=True)[0]


@wrong("hessian_vector_product", "element by element")
def gradient_times_v(function, x, v):
    return (tracked_gradient(function, x)[1] * v).detach()


@wrong("hessian_vector_product", "slope in the direction")
def directional(function, x, v):
    return torch.dot(tracked_gradient(function, x)[1].detach().flatten(), v.flatten())


@wrong("hessian_vector_product", "v belongs into the sum")
def v_comes_late(function, x, v):
    leaf, gradient = tracked_gradient(function, x)
    return v * torch.autograd.grad(gradient.sum(), leaf)[0]


@wrong("hessian_vector_product", "changes the caller's tensor")
def at_x_itself(function, x, v):
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad((gradient * v).sum(), x)[0]


@wrong("hessian_vector_product", "all of the Hessian is built")
def full_hessian(function, x, v):
    matrix = hessian(function)(x.detach()).reshape(x.numel(), x.numel())
    return (matrix @ v.flatten()).view(x.shape)


@wrong("hessian_vector_product", "all of the Hessian is built")
def row_by_row(function, x, v):
    leaf, gradient = tracked_gradient(function, x)
    rows = [torch.autograd.grad(g, leaf, retain_graph=True)[0].flatten() for g in gradient.flatten()]
    return (torch.stack(rows) @ v.flatten()).view(x.shape)


@wrong("hessian_vector_product", "RuntimeError where the function is linear")
def never_linear(function, x, v):
    leaf, gradient = tracked_gradient(function, x)
    return torch.autograd.grad((gradient * v).sum(), leaf)[0]


@wrong("hessian_vector_product", "RuntimeError")
def graph_not_recorded(function, x, v):
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf, retain_graph=True)
    return torch.autograd.grad((gradient * v).sum(), leaf)[0]


@wrong("hessian_vector_product", "held 5.0 everywhere and has changed")
def by_backward_twice(function, x, v):
    with warnings.catch_warnings(action="ignore"):
        ours = x if x.requires_grad else x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(ours), ours, create_graph=True)
        (gradient * v).sum().backward()
    before = 5.0 if x.requires_grad else 0.0
    return ours.grad - before


@right("hessian_vector_product")
def forward_over_reverse(function, x, v):
    with warnings.catch_warnings(action="ignore"):  # torch loads its forward rules by torch.jit.script
        return jvp(grad(function), (x.detach(),), (v,))[1]


@right("hessian_vector_product")
def torchs_own_product(function, x, v):
    return torch.autograd.functional.hvp(function, x.detach(), v)[1]


@right("hessian_vector_product")
def by_difference_of_gradients(function, x, v):
    def gradient(at):
        leaf = at.requires_grad_()
        return torch.autograd.grad(function(leaf), leaf)[0]

    return (gradient(x.detach() + 1e-5 * v) - gradient(x.detach() - 1e-5 * v)) / 2e-5


@right("hessian_vector_product")
def keeps_it_connected(function, x, v):
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf) + 0 * (leaf**2).sum(), leaf, create_graph=True)
    return torch.autograd.grad((gradient * v).sum(), leaf)[0]


# ── per_sample_gradients ──────────────────────────────────────────────────────────────────────────────────────────────


def each_sample(model, loss_fn, inputs, targets):
    for i in range(len(inputs)):
        yield loss_fn(model(inputs[i : i + 1]), targets[i : i + 1])


def recording(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@wrong("per_sample_gradients", "the batch's mean loss, repeated")
def repeated(model, loss_fn, inputs, targets):
    named = recording(model)
    gradients = torch.autograd.grad(loss_fn(model(inputs), targets), list(named.values()))
    return {name: torch.stack([g] * len(inputs)) for name, g in zip(named, gradients)}


@wrong("per_sample_gradients", "N times too small")
def shares_of_the_batch(model, loss_fn, inputs, targets):
    named = recording(model)
    rows = [torch.autograd.grad(loss / len(inputs), list(named.values())) for loss in each_sample(model, loss_fn, inputs, targets)]
    return {name: torch.stack(gradients) for name, gradients in zip(named, zip(*rows))}


@wrong("per_sample_gradients", "without a row for each sample")
def of_the_batch(model, loss_fn, inputs, targets):
    named = recording(model)
    return dict(zip(named, torch.autograd.grad(loss_fn(model(inputs), targets), list(named.values()))))


@wrong("per_sample_gradients", "A frozen parameter has got gradients")
def frozen_as_well(model, loss_fn, inputs, targets):
    named = recording(model)
    rows = [torch.autograd.grad(loss, list(named.values())) for loss in each_sample(model, loss_fn, inputs, targets)]
    found = {name: torch.stack(gradients) for name, gradients in zip(named, zip(*rows))}
    return {n: found.get(n, torch.zeros(len(inputs), *p.shape, dtype=p.dtype)) for n, p in model.named_parameters()}


@wrong("per_sample_gradients", "Its keys are")
def all_by_func(model, loss_fn, inputs, targets):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    def loss(ps, x, y):
        return loss_fn(functional_call(model, ps, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, inputs, targets)


@wrong("per_sample_gradients", "writes nowhere")
def into_dot_grad(model, loss_fn, inputs, targets):
    rows = []
    for loss in each_sample(model, loss_fn, inputs, targets):
        model.zero_grad()
        loss.backward()
        rows.append([p.grad.clone() for p in recording(model).values()])
    return {name: torch.stack(gradients) for name, gradients in zip(recording(model), zip(*rows))}


@wrong("per_sample_gradients", "keeps the whole pass alive")
def parameters_not_detached(model, loss_fn, inputs, targets):
    def loss(ps, x, y):
        return loss_fn(functional_call(model, ps, (x[None],)), y[None])

    return vmap(grad(loss), in_dims=(None, 0, 0))(recording(model), inputs, targets)


@wrong("per_sample_gradients", "elements differ")
def accumulated(model, loss_fn, inputs, targets):
    rows = []
    for loss in each_sample(model, loss_fn, inputs, targets):
        loss.backward()
        rows.append([p.grad.clone() for p in recording(model).values()])
    return {name: torch.stack(gradients) for name, gradients in zip(recording(model), zip(*rows))}


@right("per_sample_gradients")
def by_a_loop(model, loss_fn, inputs, targets):
    named = recording(model)
    rows = [torch.autograd.grad(loss, list(named.values())) for loss in each_sample(model, loss_fn, inputs, targets)]
    return {name: torch.stack(gradients) for name, gradients in zip(named, zip(*rows))}


@right("per_sample_gradients")
def by_a_jacobian(model, loss_fn, inputs, targets):
    def losses(parameters):
        outputs = functional_call(model, parameters, (inputs,))
        return torch.stack([loss_fn(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(inputs))])

    return jacrev(losses)({name: p.detach() for name, p in recording(model).items()})


@right("per_sample_gradients")
def by_batched_backward(model, loss_fn, inputs, targets):
    named = recording(model)
    losses = torch.stack(list(each_sample(model, loss_fn, inputs, targets)))
    rows = torch.eye(len(inputs), dtype=losses.dtype)
    return dict(zip(named, torch.autograd.grad(losses, list(named.values()), rows, is_grads_batched=True)))


# ── the clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────

broken("descent_step", "*new* w2")
broken("frozen_features", "waits at its yield")
broken("scaled_linear", "its result is no Parameter")
broken("checkpointed", "looks only at the tensors that go in")
broken("fit_stream", "repairs nothing")
broken("validation_loss", "adds its graph to the total")


def two_layer_loss(x, target, w1, w2):
    return F.mse_loss(torch.tanh(x @ w1) @ w2, target)


@wrong("descent_step", "*new* w2")
def new_w2_by_copy(x, target, w1, w2, rate=0.1):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    loss = two_layer_loss(x, target, w1, w2)
    (g2,) = torch.autograd.grad(loss, w2, retain_graph=True)
    w2.data.sub_(rate * g2)
    (g1,) = torch.autograd.grad(loss, w1)
    return (w1 - rate * g1).detach(), w2.detach()


@wrong("descent_step", "modified by an inplace operation")
def under_no_grad(x, target, w1, w2, rate=0.1):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    loss = two_layer_loss(x, target, w1, w2)
    for w in (w2, w1):
        (g,) = torch.autograd.grad(loss, w, retain_graph=True)
        with torch.no_grad():
            w -= rate * g
    return w1.detach(), w2.detach()


@wrong("descent_step", "ran again after w2 was updated")
def forward_again(x, target, w1, w2, rate=0.1):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    (g2,) = torch.autograd.grad(two_layer_loss(x, target, w1, w2), w2)
    w2.data -= rate * g2
    (g1,) = torch.autograd.grad(two_layer_loss(x, target, w1, w2), w1)
    return (w1 - rate * g1).detach(), w2.detach()


@wrong("descent_step", "uphill")
def up_the_hill(x, target, w1, w2, rate=0.1):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    g1, g2 = torch.autograd.grad(two_layer_loss(x, target, w1, w2), (w1, w2))
    return (w1 + rate * g1).detach(), (w2 + rate * g2).detach()


@wrong("descent_step", "still requires grad")
def with_history(x, target, w1, w2, rate=0.1):
    w1, w2 = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    g1, g2 = torch.autograd.grad(two_layer_loss(x, target, w1, w2), (w1, w2))
    return w1 - rate * g1, w2 - rate * g2


@wrong("descent_step", "changed its input")
def in_the_weights_given(x, target, w1, w2, rate=0.1):
    ours = [w1.clone().requires_grad_(), w2.clone().requires_grad_()]
    g1, g2 = torch.autograd.grad(two_layer_loss(x, target, *ours), ours)
    return w1.sub_(rate * g1), w2.sub_(rate * g2)


@right("descent_step")
def by_sgd(x, target, w1, w2, rate=0.1):
    parameters = [nn.Parameter(w.clone()) for w in (w1, w2)]
    optimizer = torch.optim.SGD(parameters, lr=rate)
    two_layer_loss(x, target, *parameters).backward()
    optimizer.step()
    return tuple(p.detach() for p in parameters)


@right("descent_step")
def by_both_gradients(x, target, w1, w2, rate=0.1):
    gradients = grad(lambda w1, w2: two_layer_loss(x, target, w1, w2), argnums=(0, 1))(w1, w2)
    return tuple(w - rate * g for w, g in zip((w1, w2), gradients))


@right("descent_step")
def by_the_chain_rule(x, target, w1, w2, rate=0.1):
    hidden = torch.tanh(x @ w1)
    d = 2 * (hidden @ w2 - target) / target.numel()
    return w1 - rate * x.T @ (d @ w2.T * (1 - hidden**2)), w2 - rate * hidden.T @ d


@wrong("frozen_features", "carry a graph")
def recorded(encoder, batches):
    for batch in batches:
        yield encoder(batch)


@wrong("frozen_features", "1 outputs came for 3 batches")
def returns_early(encoder, batches):
    for batch in batches:
        yield encoder(batch).detach()
        return


@wrong("frozen_features", "waits at its yield")
def switched_off_by_hand(encoder, batches):
    torch.set_grad_enabled(False)
    for batch in batches:
        yield encoder(batch)
    torch.set_grad_enabled(True)


@wrong("frozen_features", "switched on for everyone")
def switched_back_by_hand(encoder, batches):
    for batch in batches:
        torch.set_grad_enabled(False)
        features = encoder(batch)
        torch.set_grad_enabled(True)
        yield features


@wrong("frozen_features", "waits at its yield")
def in_inference_mode(encoder, batches):
    with torch.inference_mode():
        for batch in batches:
            yield encoder(batch)


@wrong("frozen_features", "1 outputs came")
def all_in_one(encoder, batches):
    with torch.no_grad():
        features = encoder(torch.cat(list(batches)))
    yield features


@right("frozen_features")
@torch.no_grad()
def decorated(encoder, batches):
    for batch in batches:
        yield encoder(batch)


@right("frozen_features")
def detached_features(encoder, batches):
    for batch in batches:
        yield encoder(batch).detach()


@right("frozen_features")
def all_in_a_list(encoder, batches):
    with torch.no_grad():
        return [encoder(batch) for batch in batches]


@right("frozen_features")
def by_map(encoder, batches):
    return map(torch.no_grad()(encoder.forward), batches)


@right("frozen_features")
def in_inference_mode_and_out(encoder, batches):
    for batch in batches:
        with torch.inference_mode():
            features = encoder(batch)
        yield features.clone()


@wrong("scaled_linear", "does not train")
def as_a_buffer(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.register_buffer("scale", torch.ones(outputs, dtype=dtype))
    return layer


@wrong("scaled_linear", "Wrap it in nn.Parameter")
def as_an_attribute(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = torch.ones(outputs, dtype=dtype).requires_grad_()
    return layer


@wrong("scaled_linear", "wrap it last")
def to_at_the_end(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = torch.nn.Parameter(torch.ones(outputs)).type(dtype)
    return layer


@wrong("scaled_linear", "give `torch.ones` the dtype")
def always_float32(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = nn.Parameter(torch.ones(outputs))
    return layer


@wrong("scaled_linear", "does not require grad")
def frozen_scale(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = nn.Parameter(torch.ones(outputs, dtype=dtype), requires_grad=False)
    return layer


@wrong("scaled_linear", "2 of 2 elements differ")
def begins_at_zeros(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.scale = nn.Parameter(torch.zeros(outputs, dtype=dtype))
    return layer


@right("scaled_linear")
def converted_at_the_end(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs)
    layer.scale = nn.Parameter(torch.ones(outputs))
    return layer.to(dtype)


@right("scaled_linear")
def registered(features, outputs, dtype=torch.float32):
    layer = nn.Linear(features, outputs, dtype=dtype)
    layer.register_parameter("scale", nn.Parameter(torch.ones(outputs).to(dtype)))
    return layer


@right("scaled_linear")
def a_class_of_its_own(features, outputs, dtype=torch.float32):
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(features, outputs, dtype=dtype)
            self.scale = nn.Parameter(self.weight.new_ones(outputs))

    return Scaled()


@wrong("checkpointed", "looks only at the tensors that go in")
def as_the_default_is(blocks, x):
    with warnings.catch_warnings(action="ignore"):
        for block in blocks:
            x = checkpoint(block, x)
    return x


@wrong("checkpointed", "gradient of x is lost")
def always_detached(blocks, x):
    x = x.detach().requires_grad_()
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


@wrong("checkpointed", "for good")
def x_switched_on(blocks, x):
    if not x.requires_grad:
        x.requires_grad_()
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


@wrong("checkpointed", "a block that is not checkpointed keeps its activations")
def without_checkpoints(blocks, x):
    return nn.Sequential(*blocks)(x)


@wrong("checkpointed", "he output")
def last_block_alone(blocks, x):
    for block in blocks:
        y = checkpoint(block, x, use_reentrant=False)
    return y


@right("checkpointed")
def a_copy_that_requires_grad(blocks, x):
    if not x.requires_grad:
        x = x.clone().requires_grad_()
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


@wrong("checkpointed", "`checkpoint_sequential` leaves the last one out")
def in_sequence(blocks, x):
    return checkpoint_sequential(nn.Sequential(*blocks), len(blocks), x, use_reentrant=False)


@right("checkpointed")
def all_blocks_at_once(blocks, x):
    return checkpoint(nn.Sequential(*blocks), x, use_reentrant=False)


def stream(batches, rate, step):
    """step(error, scale) → (loss, new scale), for each batch, from the weights of the batch before."""
    weights, scale = torch.zeros(batches[0][0].shape[1], requires_grad=True), 1.0
    for x, y in batches:
        loss, scale = step(F.mse_loss(x @ weights, y), scale)
        loss.backward(retain_graph=True)
        weights = (weights - rate * weights.grad).detach().requires_grad_()
    return weights.detach()


@wrong("fit_stream", "still passes a gradient through the scale")
def detaches_the_old_scale(batches, rate=0.1):
    def step(error, scale):
        scale = 0.9 * scale + 0.1 * error
        return error / scale, scale.detach()

    return stream(batches, rate, step)


@wrong("fit_stream", "The scale is gone")
def without_scale(batches, rate=0.1):
    return stream(batches, rate, lambda error, scale: (error, scale))


@wrong("fit_stream", "clear it after each step")
def never_cleared(batches, rate=0.1):
    weights, scale = torch.zeros(2, requires_grad=True), 1.0
    for x, y in batches:
        error = ((x @ weights - y) ** 2).mean()
        scale = 0.9 * scale + 0.1 * error.item()
        (error / scale).backward()
        weights.data -= rate * weights.grad
    return weights.detach()


@wrong("fit_stream", "graphs of all batches stay alive")
def scale_with_its_history(batches, rate=0.1):
    def step(error, scale):
        scale = 0.9 * scale + 0.1 * error
        return error / scale.detach(), scale

    return stream(batches, rate, step)


@wrong("fit_stream", "elements differ")
def the_scale_before(batches, rate=0.1):
    return stream(batches, rate, lambda error, scale: (error / scale, 0.9 * scale + 0.1 * error.item()))


@wrong("fit_stream", "elements differ")
def weights_swapped(batches, rate=0.1):
    def step(error, scale):
        scale = 0.1 * scale + 0.9 * error.item()
        return error / scale, scale

    return stream(batches, rate, step)


@right("fit_stream")
def scale_as_a_float(batches, rate=0.1):
    def step(error, scale):
        scale = 0.9 * scale + 0.1 * error.item()
        return error / scale, scale

    return stream(batches, rate, step)


@right("fit_stream")
def scale_under_no_grad(batches, rate=0.1):
    weights, scale = torch.zeros(batches[0][0].shape[1], requires_grad=True), torch.ones(())
    for x, y in batches:
        error = ((x @ weights - y) ** 2).mean()
        with torch.no_grad():
            scale = 0.9 * scale + 0.1 * error
        (gradient,) = torch.autograd.grad(error / scale, weights)
        weights = (weights - rate * gradient).detach().requires_grad_()
    return weights.detach()


@right("fit_stream")
def by_the_formula(batches, rate=0.1):
    weights, scale = np.zeros(batches[0][0].shape[1]), 1.0
    for x, y in batches:
        x, residual = x.double().numpy(), x.double().numpy() @ weights - y.double().numpy()
        scale = 0.9 * scale + 0.1 * (residual**2).mean()
        weights = weights - rate * 2 * x.T @ residual / len(x) / scale
    return torch.tensor(weights, dtype=torch.float32)


@wrong("validation_loss", "mean of the batches' means")
def mean_of_means(model, loss_fn, batches):
    with torch.inference_mode():
        return float(np.mean([loss_fn(model(x), y).item() for x, y in batches]))


@wrong("validation_loss", "This is the sum")
def never_divided(model, loss_fn, batches):
    with torch.no_grad():
        return sum(loss_fn(model(x), y).item() * len(x) for x, y in batches)


@wrong("validation_loss", "mode has changed")
def left_in_eval(model, loss_fn, batches):
    model.eval()
    with torch.no_grad():
        return sum(loss_fn(model(x), y).item() * len(x) for x, y in batches) / sum(len(x) for x, _ in batches)


@wrong("validation_loss", "adds its graph to the total")
def collected_in_a_list(model, loss_fn, batches):
    losses = [loss_fn(model(x), y) * len(x) for x, y in batches]
    return (torch.stack(losses).sum() / sum(len(x) for x, _ in batches)).item()


@wrong("validation_loss", ".item()")
def a_tensor_at_the_end(model, loss_fn, batches):
    with torch.no_grad():
        return sum(loss_fn(model(x), y) * len(x) for x, y in batches) / sum(len(x) for x, _ in batches)


@wrong("validation_loss", "adds its graph to the total")
def outputs_collected(model, loss_fn, batches):
    outputs = [model(x) for x, _ in batches]
    return loss_fn(torch.cat(outputs), torch.cat([y for _, y in batches])).item()


@right("validation_loss")
def a_number_each_time(model, loss_fn, batches):
    total = 0.0
    for x, y in batches:
        total += loss_fn(model(x), y).item() * len(x)
    return total / sum(len(x) for x, _ in batches)


@right("validation_loss")
def detached_losses(model, loss_fn, batches):
    losses = torch.stack([loss_fn(model(x), y).detach() for x, y in batches])
    sizes = torch.tensor([float(len(x)) for x, _ in batches])
    return (losses @ sizes.to(losses.dtype) / sizes.sum()).item()


@right("validation_loss")
def all_at_once(model, loss_fn, batches):
    with torch.inference_mode():
        return loss_fn(model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches])).item()
