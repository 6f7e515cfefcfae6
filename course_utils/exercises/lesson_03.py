"""Exercises of lesson 03, in the order of the notebook: twelve to build, then the clinic's eight to repair.

What is worth keeping lives in the toolkit; the references below belong to this lesson alone.
"""

import copy
import itertools
import math
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from course_utils.engine.compare import brief, difference, kind
from course_utils.engine.exercises import Case, Exercise, Mistake
from course_utils.toolkit.training import (
    accumulated_step,
    clip_and_step,
    correct_predictions,
    he_init_,
    lr_trace,
    parameter_groups,
    seeded_loader,
    transfer_head,
    unoptimized,
)

LESSON = "03_training"


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def made(build, seed=0):
    """build(), its random numbers drawn from this seed; torch's own random state stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def leaf(values, gradient=None):
    """A trainable tensor with these values that holds this gradient."""
    parameter = torch.tensor(values, requires_grad=True)
    if gradient is not None:
        parameter.grad = torch.tensor(gradient)
    return parameter


class Once:
    """Parameters as model.parameters() gives them: they can be walked through once. `things` is for the check."""

    def __init__(self, things):
        self.things, self.walk = things, iter(things)

    def __iter__(self):
        return self.walk

    def __repr__(self):
        return f"<a generator of {len(self.things)} parameters>"


# ── A line by hand ────────────────────────────────────────────────────────────────────────────────────────────────────


def sgd_step(parameters, rate):
    """Move each parameter, in place, by -rate times its gradient, and set its .grad to None; one without gradient stays."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
                parameter.grad = None


def _step_case(name, *pairs, rate=0.1, once=False):
    """Parameters with these (values, gradient); what they are after the step is known from them."""

    def args():
        parameters = [leaf(*pair) for pair in pairs]
        return (Once(parameters) if once else parameters), rate

    def verify(result, parameters, rate):
        parameters = parameters.things if once else parameters
        before = [leaf(*pair) for pair in pairs]
        if all(torch.equal(p, b) for p, b in zip(parameters, before)):
            return "no parameter has moved (that it returns nothing is right)"
        for i, (p, b) in enumerate(zip(parameters, before)):
            wanted = b if b.grad is None else b - rate * b.grad
            if said := difference(wanted.detach(), p.detach(), 1e-6):
                return f"parameter {i}: {said}"
            if p.grad is not None:
                zeros = " (zeros are a gradient too: an optimizer with momentum or decay would still move the parameter)"
                return f"parameter {i} still holds a gradient, {brief(p.grad)}{'' if p.grad.any() else zeros}; it should be None"
            if not p.is_leaf or not p.requires_grad:
                return f"parameter {i} is no longer a trainable leaf: the step itself was recorded, or recording was switched off"
        return None

    return Case(name, args, mutates=True, verify=verify, tolerance=1e-6)


def _rebinds(parameters, rate):
    for p in parameters:
        p = p - rate * p.grad


def _uphill(parameters, rate):
    parameters = list(parameters)
    sgd_step(parameters, -rate)


def _adds_gradient(parameters, rate):
    parameters = list(parameters)
    sgd_step(parameters, 1.0)


SGD_STEP = Exercise(
    lesson=LESSON,
    solution=sgd_step,
    time_limit=20.0,  # the first optimizer of a process, which an answer may well use, loads a part of PyTorch
    hints=(
        "A gradient points to where the loss grows. Go through the parameters and subtract. What does PyTorch say when "
        "you write `p -= rate * p.grad` outside `torch.no_grad()`?",
        "`with torch.no_grad():` around a loop; in it, skip a p whose .grad is None, else `p -= rate * p.grad` (in "
        "place, so that the caller's tensor changes), then `p.grad = None`.",
    ),
    cases=(
        _step_case("one parameter holds a gradient", ([1.0, 2.0], [2.0, 4.0]), rate=0.25),
        _step_case("two parameters differ in shape", ([[1.0, -1.0]], [[0.5, 3.0]]), ([2.0], [-1.0])),
        _step_case("the loss did not reach a parameter", ([1.0], [1.0]), ([5.0, 6.0],), ([2.0], [4.0])),
        _step_case("a parameter has no dimensions", (3.0, 2.0), rate=0.5),
        _step_case("the parameters can be walked through once", ([1.0, 2.0], [2.0, 4.0]), ([3.0], [1.0]), once=True),
    ),
    mistakes=(
        Mistake(
            "No number has changed in place. `p = p - rate * p.grad` gives the name p to a new tensor, and a gradient "
            "that is cleared first is no longer there to step with: `p -= rate * p.grad` under `torch.no_grad()`, then "
            "`p.grad = None`.",
            _rebinds,
        ),
        Mistake("The step goes uphill: the gradient points to where the loss grows, so it is subtracted.", _uphill),
        Mistake("The step ignores the rate: the gradient is multiplied by it before it is subtracted.", _adds_gradient),
    ),
)

# ── Modules, losses, shapes ───────────────────────────────────────────────────────────────────────────────────────────


def _class_case(name, outputs, targets):
    return Case(name, lambda: (torch.tensor(outputs).reshape(len(targets), -1), torch.tensor(targets, dtype=torch.int64)))


CORRECT_PREDICTIONS = Exercise(
    lesson=LESSON,
    solution=correct_predictions,
    hints=(
        "For each row, at which place is the largest number? Which of the two dimensions has to disappear?",
        "`outputs.argmax(dim=1)` is (N,), as the targets are. Compare, sum, and make an int of it with `.item()`.",
    ),
    cases=(
        _class_case("there are as many classes as samples", [[2.0, 0.0, 0.5], [0.0, 1.0, 3.0], [5.0, 2.0, 4.0]], [0, 2, 0]),
        _class_case("there are two samples and three classes", [[0.1, 2.0, 1.0], [3.0, -1.0, 0.0]], [1, 1]),
        _class_case("all outputs are negative", [[-3.0, -1.0], [-2.0, -5.0], [-0.1, -0.2]], [1, 0, 1]),
        _class_case("all outputs are small", [[0.1, 0.2], [0.3, 0.2]], [1, 0]),
        _class_case("the largest output equals the number of another class", [[1.0, 0.0], [0.0, 1.0]], [1, 0]),
        _class_case("no answer is right", [[1.0, 2.0], [3.0, 1.0]], [0, 1]),
        _class_case("there is one sample", [[0.0, 4.0, 1.0]], [1]),
        Case("the outputs belong to a graph", lambda: (noise(6, 4).requires_grad_() * 2, torch.tensor([0, 1, 2, 3, 0, 1]))),
    ),
    mistakes=(
        Mistake(
            "The largest number was looked for along the samples. Dimension 0 counts samples, dimension 1 classes: "
            "`argmax(dim=1)`.",
            lambda outputs, targets: int((outputs.argmax(dim=0) == targets).sum()),
        ),
        Mistake(
            "(N, 1) meets (N,) and broadcasts to (N, N): every answer is compared with every target. The answers must "
            "have the shape of the targets.",
            lambda outputs, targets: int((outputs.argmax(dim=1, keepdim=True) == targets).sum()),
        ),
        Mistake(
            "These are the largest *values*. `torch.max(outputs, dim=1)` gives values and places; the places are the "
            "classes.",
            lambda outputs, targets: int((outputs.max(dim=1).values == targets).sum()),
        ),
        Mistake(
            "This is the share of right answers. The number is asked for: shares of batches of different size cannot "
            "be added.",
            lambda outputs, targets: correct_predictions(outputs, targets) / len(targets),
        ),
        Mistake(
            "An answer need not be above one half, nor above 0: the largest number of its row decides.",
            lambda outputs, targets: int((outputs.gather(1, targets[:, None]) > 0.5).sum()),
        ),
    ),
)

# ── Two modes, honest figures ─────────────────────────────────────────────────────────────────────────────────────────


def evaluate(model, loader, loss_fn):
    """Mean loss and accuracy over all samples of the loader, two floats; every part gets its mode back."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    loss, right, samples = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = model(inputs)
            loss += loss_fn(outputs, targets).item() * len(targets)
            right += (outputs.argmax(dim=1) == targets).sum().item()
            samples += len(targets)
    for part, mode in modes:
        part.training = mode
    return loss / samples, right / samples


def _classifier():
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def _evaluation(samples, batch_size, mode="train", part=None):
    def args():
        model = made(_classifier)
        model.train(mode == "train")
        if part is not None:
            model[part].train(mode != "train")
        inputs, targets = noise(samples, 3) + 1, torch.arange(samples) % 3 % 2
        return model, DataLoader(TensorDataset(inputs, targets), batch_size), F.cross_entropy

    return args


def _without_graph(call):
    saved = []

    def note(tensor):
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call()
    if saved:
        return (
            f"the figures are right, but a graph is recorded: {len(saved)} tensors were kept for a backward pass that never comes. "
            "eval() does not change that"
        )
    return None


def _mean_of_means(model, loader, loss_fn):
    each = [evaluate(model, [batch], loss_fn) for batch in loader]
    return sum(e[0] for e in each) / len(each), sum(e[1] for e in each) / len(each)


def _in_train_mode(model, loader, loss_fn):
    loss, right, samples = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = model(inputs)
            loss += loss_fn(outputs, targets).item() * len(targets)
            right += (outputs.argmax(dim=1) == targets).sum().item()
            samples += len(targets)
    return loss / samples, right / samples


def _stays_in_eval(model, loader, loss_fn):
    return evaluate(model.eval(), loader, loss_fn)


def _train_afterwards(model, loader, loss_fn):
    result = evaluate(model, loader, loss_fn)
    model.train()
    return result


def _one_flag_for_all(model, loader, loss_fn):
    result, mode = evaluate(model, loader, loss_fn), model.training
    model.train(mode)
    return result


def _with_graph(model, loader, loss_fn):
    for inputs, _ in loader:
        model[0](inputs)
    return evaluate(model, loader, loss_fn)


EVALUATE = Exercise(
    lesson=LESSON,
    solution=evaluate,
    hints=(
        "Three things to put around the loop: the model in eval mode, no graph, and the modes as they were at the end. "
        "Which of them does `model.eval()` do?",
        "`loss_fn` gives the mean of a batch. Times the number of its samples it is a sum; sums can be added, and "
        "divided by the number of all samples at the end.",
        "`model.train()` at the end would put every part into train mode, also one that was in eval mode on purpose. "
        "Note `[(part, part.training) for part in model.modules()]` before, and set `part.training` afterwards.",
    ),
    cases=(
        Case("all batches have the same size", _evaluation(6, 3), tolerance=1e-5, watch=_without_graph),
        Case("the last batch is smaller", _evaluation(7, 3), tolerance=1e-5, watch=_without_graph),
        Case("the last batch is a single sample", _evaluation(9, 8), tolerance=1e-5, watch=_without_graph),
        Case("the model was in eval mode before", _evaluation(5, 2, "eval"), tolerance=1e-5, watch=_without_graph),
        Case("a part was in eval mode, and the rest in train mode", _evaluation(5, 4, "train", 1), tolerance=1e-5, watch=_without_graph),
        Case("a part was in train mode, and the rest in eval mode", _evaluation(5, 4, "eval", 3), tolerance=1e-5, watch=_without_graph),
    ),
    mistakes=(
        Mistake(
            "Each batch has the same weight here, so a sample of the small last batch counts more than the others. Add "
            "up sums over samples, and divide by the number of samples.",
            _mean_of_means,
        ),
        Mistake(
            "The model was not in eval mode: dropout drops, and BatchNorm takes its mean from the batch and updates "
            "its statistics. `no_grad` changes neither.",
            _in_train_mode,
        ),
        Mistake(
            "The model stays in eval mode, and the training that goes on after this call has no dropout. Give every "
            "part its mode back.",
            _stays_in_eval,
        ),
        Mistake(
            "`model.train()` puts every part into train mode, whatever it was before. Note each part's flag, and give "
            "it back.",
            _train_afterwards,
        ),
        Mistake(
            "The flag of the whole is given to all its parts: `train(mode)` walks through them. A part can have a mode "
            "of its own.",
            _one_flag_for_all,
        ),
        Mistake(
            "Without `torch.no_grad()` or `inference_mode()` each batch builds a graph, which costs memory and time "
            "for nothing.",
            _with_graph,
        ),
    ),
)

# ── Accumulation ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Alive:
    """How many samples have a graph at this moment, and the most there were."""

    now = peak = 0


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.samples = len(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        _Alive.now -= ctx.samples
        return gradient


class _CountsAlive(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled():
            _Alive.now += len(x)
            _Alive.peak = max(_Alive.peak, _Alive.now)
        return _Watched.apply(x)


def _at_most(samples):
    def watch(call):
        _Alive.now = _Alive.peak = 0
        call()
        if _Alive.peak <= samples:
            return None
        return (
            f"the step is right, but {_Alive.peak} samples have a graph at the same time, and the largest micro-batch has {samples}"
        )

    return watch


def _pieces(sizes, features=3, classes=3):
    """(inputs, targets) of these sizes; the classes follow the sizes, so that the pieces do not pull in one direction."""
    inputs = noise(sum(sizes), features, dtype=torch.float64).split(sizes)
    return [(x + i, torch.full((len(x),), i % classes)) for i, x in enumerate(inputs)]


_OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum and weight decay": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def _accumulation(sizes, optimizer="SGD", left_over=False, loss_fn=F.cross_entropy):
    def args():
        model = made(lambda: nn.Sequential(nn.Linear(3, 4), _CountsAlive(), nn.Tanh(), nn.Linear(4, 3)).double())
        if left_over:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        pieces = _pieces(sizes)
        if loss_fn is F.mse_loss:
            pieces = [(x, noise(len(x), 3, dtype=torch.float64) + i) for i, (x, _) in enumerate(pieces)]
        return model, pieces, loss_fn, _OPTIMIZERS[optimizer](model.parameters())

    return args


def _accumulation_case(name, sizes, **more):
    # float64 keeps the order of additions from showing: 1e-9 is far above its rounding and far below any wrong weight
    return Case(name, _accumulation(sizes, **more), mutates=True, tolerance=1e-9, watch=_at_most(max(sizes)))


def _accumulated(model, micro_batches, loss_fn, optimizer, weight, clear=True):
    if clear:
        optimizer.zero_grad()
    total = sum(len(y) for _, y in micro_batches)
    whole = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) * weight(len(y), total, len(micro_batches))
        loss.backward()
        whole += loss.item()
    optimizer.step()
    return whole


def _steps_each_time(model, micro_batches, loss_fn, optimizer):
    total = sum(len(y) for _, y in micro_batches)
    return sum(accumulated_step(model, [batch], loss_fn, optimizer) * len(batch[1]) / total for batch in micro_batches)


def _all_at_once(model, micro_batches, loss_fn, optimizer):
    whole = [(torch.cat([x for x, _ in micro_batches]), torch.cat([y for _, y in micro_batches]))]
    return accumulated_step(model, whole, loss_fn, optimizer)


ACCUMULATED_STEP = Exercise(
    lesson=LESSON,
    solution=accumulated_step,
    hints=(
        "backward() adds to .grad. So the gradients of the pieces add up by themselves; with which weight must each "
        "piece enter, so that the sum is the gradient of the mean over all samples?",
        "The mean over all samples is the sum over the pieces of (their mean × their size), divided by the number of "
        "all samples: the weight is len(targets) / total. The number of pieces does not occur.",
        "Clear the gradients, then for each piece: loss × len(targets) / total, backward() at once (that frees its "
        "graph), and add `loss.item()` to a sum. One step at the end.",
    ),
    cases=(
        _accumulation_case("the micro-batches have the same size", (4, 4)),
        _accumulation_case("the micro-batches have different sizes", (1, 9, 3)),
        _accumulation_case("there is one micro-batch", (5,)),
        _accumulation_case("the parameters hold gradients from before", (2, 6), left_over=True),
        _accumulation_case("the loss is a mean squared error", (3, 5), loss_fn=F.mse_loss),
        _accumulation_case("the optimizer has momentum and weight decay", (6, 2), optimizer="momentum and weight decay"),
        _accumulation_case("the optimizer is Adam", (2, 7), optimizer="Adam"),
    ),
    mistakes=(
        Mistake(
            "The mean of means: every micro-batch weighs the same, whatever its size, so a sample in a small one "
            "counts more. Weigh by len(targets) / total.",
            lambda *a: _accumulated(*a, weight=lambda n, total, pieces: 1 / pieces),
        ),
        Mistake(
            "The means of the micro-batches are added up and nothing divides them: the gradient is too large by about "
            "their number.",
            lambda *a: _accumulated(*a, weight=lambda n, total, pieces: 1.0),
        ),
        Mistake(
            "This is the gradient of the *sum* over the samples. The mean is asked for: divide by the number of all "
            "samples.",
            lambda *a: _accumulated(*a, weight=lambda n, total, pieces: n),
        ),
        Mistake(
            "The optimizer steps after each micro-batch. Those are several small steps, each from another place; one "
            "is asked for.",
            _steps_each_time,
        ),
        Mistake(
            "Gradients that were there before the call take part in the step: clear them first.",
            lambda *a: _accumulated(*a, weight=lambda n, total, pieces: n / total, clear=False),
        ),
        Mistake(
            "All micro-batches are in memory together: as one batch, or as losses that are added up before one "
            "backward(). Call backward() for each, so that its graph can go before the next is built.",
            _all_at_once,
        ),
    ),
)

# ── The rate and the optimizer ────────────────────────────────────────────────────────────────────────────────────────


class _Own(nn.Module):
    """Parameters that no layer holds: a vector, a table, and a matrix under a name that says bias."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.table = nn.Parameter(torch.ones(2, 3))
        self.position_bias = nn.Parameter(torch.ones(4, 4))


class _Tied(nn.Module):
    """The output layer shares its matrix with the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embed.weight


def _frozen_trunk():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    return net


def _groups_fit(result, module, weight_decay):
    if not isinstance(result, list) or not all(isinstance(g, dict) and {"params", "weight_decay"} <= set(g) for g in result):
        return 'a list of dicts was expected, each with "params" and "weight_decay"'
    names = {id(p): name for name, p in module.named_parameters()}
    decays = {}
    for group in result:
        entries = [entry[-1] if isinstance(entry, tuple) else entry for entry in group["params"]]  # torch takes (name, parameter) too
        for entry in entries:
            name = names.get(id(entry))
            if name is None:
                return f"the groups hold {kind(entry)} that is no parameter of the module"
            if name in decays:
                return f"{name} is in the groups twice: an optimizer refuses that"
            decays[name] = group["weight_decay"]
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            if name in decays:
                return f"{name} is frozen and yet in a group"
            continue
        if name not in decays:
            return f"{name}, of shape {tuple(parameter.shape)}, is in neither group, so nothing would train it"
        wanted = weight_decay if parameter.dim() >= 2 else 0.0
        if said := difference(wanted, decays[name]):
            came = f"{brief(decays[name])} came" if said == "the value differs" else said
            return f"the decay of {name}, of shape {tuple(parameter.shape)}, should be {wanted}: {came}"
    return None


def _split_groups(module, weight_decay, decays, trainable=True):
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad or not trainable]
    return [
        {"params": [p for n, p in named if decays(n, p)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if not decays(n, p)], "weight_decay": 0.0},
    ]


PARAMETER_GROUPS = Exercise(
    lesson=LESSON,
    solution=parameter_groups,
    hints=(
        "How many dimensions has the weight of a Linear, of a Conv2d, of a BatchNorm2d, and how many have their "
        "biases? Print `p.dim()` for the parameters of a small network.",
        "Go through `module.parameters()`, which gives a shared parameter once; leave out those with requires_grad "
        "False; those with `p.dim() >= 2` go into the first list.",
        'The result: `[{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]`.',
    ),
    cases=(
        Case("the module is a linear layer", lambda: (made(lambda: nn.Linear(3, 2)), 0.1), verify=_groups_fit),
        Case(
            "a convolution is followed by a normalisation",
            lambda: (made(lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))), 0.01),
            verify=_groups_fit,
        ),
        Case(
            "layers lie deeper",
            lambda: (made(lambda: nn.Sequential(nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3)), nn.Linear(3, 3))), 0.05),
            verify=_groups_fit,
        ),
        Case("the module owns parameters that are in no layer", lambda: (_Own(), 0.2), verify=_groups_fit),
        Case("a part is frozen", lambda: (made(_frozen_trunk), 0.1), verify=_groups_fit),
        Case("two layers share a matrix", lambda: (made(_Tied), 0.1), verify=_groups_fit),
    ),
    mistakes=(
        Mistake(
            "Every parameter decays here, biases too. Two groups are asked for.",
            lambda module, weight_decay: [{"params": list(module.parameters()), "weight_decay": weight_decay}],
        ),
        Mistake(
            'The name decides here: what is not called a bias decays, and so does the scale of a normalisation layer, '
            'which is called "weight". '
            "Count dimensions instead.",
            lambda module, weight_decay: _split_groups(module, weight_decay, lambda n, p: not n.endswith("bias")),
        ),
        Mistake(
            "The name decides here, and a parameter with two dimensions need not be called weight. Count dimensions "
            "instead.",
            lambda module, weight_decay: _split_groups(module, weight_decay, lambda n, p: p.dim() >= 2 and n.endswith("weight")),
        ),
        Mistake(
            "The groups are exchanged: matrices decay, vectors do not.",
            lambda module, weight_decay: _split_groups(module, weight_decay, lambda n, p: p.dim() < 2),
        ),
        Mistake(
            "Frozen parameters are in the groups. They get no gradient, but who reads the groups to know what trains "
            "is misled.",
            lambda module, weight_decay: _split_groups(module, weight_decay, lambda n, p: p.dim() >= 2, trainable=False),
        ),
    ),
)

# ── Schedules ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_schedulers = torch.optim.lr_scheduler


def _no_warning(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    said = [str(w.message).split(". ")[0] for w in caught if "lr_scheduler" in str(w.message)]
    return f"the rates are right, but PyTorch warns: {said[0][:200]}" if said else None


def _warm_up(optimizer):
    return _schedulers.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def _one_cycle(optimizer):
    return _schedulers.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)


def _cosine(optimizer):
    return _schedulers.CosineAnnealingLR(optimizer, T_max=6)


def _halving(optimizer):
    return _schedulers.StepLR(optimizer, 2, gamma=0.5)


def _then_cosine(optimizer):
    warm, fall = _schedulers.LinearLR(optimizer, 0.1, total_iters=3), _schedulers.CosineAnnealingLR(optimizer, T_max=5)
    return _schedulers.SequentialLR(optimizer, [warm, fall], milestones=[3])


def _one_late(make_scheduler, steps, lr=1.0):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


def _never_steps_the_optimizer(make_scheduler, steps, lr=1.0):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return rates


def _start_kept(make_scheduler, steps, lr=1.0):
    return [lr, *lr_trace(make_scheduler, steps, lr)[1:]][:steps]


def _trace_case(name, make_scheduler, steps, *lr):
    return Case(name, lambda: (make_scheduler, steps, *lr), tolerance=1e-9, watch=_no_warning)


LR_TRACE = Exercise(
    lesson=LESSON,
    solution=lr_trace,
    hints=(
        "An optimizer needs a parameter, and `[nn.Parameter(torch.zeros(1))]` will do. Where does it keep its rate? "
        "Print `optimizer.param_groups[0]`.",
        "In a loop: note `optimizer.param_groups[0]['lr']`, the rate that the next step uses; then `optimizer.step()`, "
        "then `scheduler.step()`. Without a gradient the optimizer's step moves nothing, and it is what PyTorch waits "
        "for.",
        "`torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)` will do. Make the scheduler from it before you read the first rate: some "
        "change it at once.",
    ),
    cases=(
        _trace_case("the rate halves every two steps", _halving, 5),
        _trace_case("the optimizer begins with another rate", _halving, 4, 0.2),
        _trace_case("the rate warms up", _warm_up, 6),
        _trace_case("the rate falls along a cosine", _cosine, 7, 0.1),
        _trace_case("the scheduler sets the first rate itself", _one_cycle, 8),
        _trace_case("one schedule follows another", _then_cosine, 8),
        _trace_case("there is one step", _warm_up, 1),
        _trace_case("there is no step", _cosine, 0),
    ),
    mistakes=(
        Mistake(
            "The rate is read after the scheduler has moved it: that is what the *next* step uses. Read it before.",
            _one_late,
        ),
        Mistake(
            "The trace has one entry too many: `steps` steps use `steps` rates, and the last move of the scheduler "
            "serves none of them.",
            lambda make_scheduler, steps, lr=1.0: lr_trace(make_scheduler, steps, lr) + _one_late(make_scheduler, steps, lr)[-1:],
        ),
        Mistake(
            "The argument lr is not used: the optimizer begins with it.",
            lambda make_scheduler, steps, lr=1.0: lr_trace(make_scheduler, steps),
        ),
        Mistake(
            "A scheduler may change the rate when it is made: warm-up and OneCycleLR begin lower. Make it first, then "
            "read.",
            _start_kept,
        ),
        Mistake(
            "PyTorch warns because `scheduler.step()` comes and `optimizer.step()` does not. In training that order "
            "would skip the first rate; here, step both as a loop does.",
            _never_steps_the_optimizer,
        ),
    ),
)

# ── Depth ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _grouped():
    return nn.Sequential(nn.Conv2d(32, 64, 3, groups=4), nn.ReLU(), nn.Conv2d(64, 16, (1, 5), bias=False))


def _deep():
    block = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Sequential(nn.Flatten(), nn.Linear(64, 100))
    net = nn.ModuleDict({"trunk": nn.Sequential(block), "head": head, "embed": nn.Embedding(9, 4)})
    for parameter in net.parameters():
        nn.init.uniform_(parameter, 1, 2)  # so that whatever is touched, or forgotten, shows
    return net


def _init_case(name, build):
    def args():
        net = made(build)
        net.given = {n: p for n, p in net.named_parameters()}  # a plain dict: which objects the parameters were
        return (net,)

    def verify(result, module):
        if result is not module:
            return f"the module itself should come back; {kind(result)} came"
        fresh = dict(made(build).named_parameters())
        if any(p is not module.given.get(n) for n, p in module.named_parameters()):
            return "a parameter is another object than before: an optimizer that holds the old one would not train it. Write in place"
        for name, layer in module.named_modules():
            at = f"{name}." if name else ""
            own = dict(layer.named_parameters(recurse=False))
            if not isinstance(layer, (nn.Linear, nn.Conv2d)):
                touched = [n for n, p in own.items() if not torch.equal(p, fresh[at + n])]
                if touched:
                    return f"the parameter {at}{touched[0]} has changed, and it belongs to a {type(layer).__name__}"
                continue
            if not all(p.requires_grad for p in own.values()):
                return f"the parameters of {name or 'the layer'} are no longer trainable"
            if said := _not_kaiming(at + "weight", layer.weight.detach(), fresh[at + "weight"]):
                return said
            if layer.bias is not None and layer.bias.any():
                return f"the parameter {at}bias is not 0 everywhere"
        return None

    return Case(name, args, mutates=True, verify=verify, tolerance=1e-5)


def _not_kaiming(name, weight, before):
    """Held against what n draws from the normal distribution can be: five standard errors on each side."""
    n, std = weight.numel(), (2 / weight[0].numel()) ** 0.5
    came, mean = weight.std(correction=0).item(), weight.mean().item()
    if torch.equal(weight, before):
        return f"the parameter {name} is as it was"
    if not abs(came / std - 1) < 5 / (2 * n) ** 0.5:
        return f"the parameter {name}, of shape {tuple(weight.shape)}, has a standard deviation of {came:.4f}; {std:.4f} was expected"
    if not abs(mean) < 5 * std / n**0.5:
        return f"the parameter {name} has a mean of {mean:.4f}; 0 was expected"
    beyond = (weight.abs() > 2 * std).float().mean().item()  # 4.55 % of a normal distribution, nothing of a uniform one
    if not abs(beyond - 0.0455) < 5 * (0.0455 / n) ** 0.5:
        return f"the standard deviation of {name} is right, but {100 * beyond:.1f} % lie beyond two of it: a normal distribution has 4.6 %"
    return None


def _initialised(module, std, bias=0.0, layers=None):
    with torch.no_grad():
        for layer in layers(module) if layers else module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                layer.weight.normal_(0, std(layer.weight))
                if layer.bias is not None and bias is not None:
                    layer.bias.fill_(bias)
    return module


def _he_std(weight):
    return (2 / weight[0].numel()) ** 0.5


def _uniform_init(module):
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


HE_INIT = Exercise(
    lesson=LESSON,
    solution=he_init_,
    hints=(
        "`module.modules()` walks through the module itself and everything in it, at any depth. Which of them are "
        "nn.Linear or nn.Conv2d?",
        "weight[0] holds the numbers that one output is summed with: `layer.weight[0].numel()` is fan_in for both "
        "kinds of layer, with groups too.",
        "Under `torch.no_grad()`: `layer.weight.normal_(0, (2 / fan_in) ** 0.5)`, and `layer.bias.zero_()` where the "
        "bias is not None. Return the module at the end.",
    ),
    cases=(
        _init_case("there are two linear layers", lambda: nn.Sequential(nn.Linear(100, 60), nn.ReLU(), nn.Linear(60, 100))),
        _init_case("there is a convolution", lambda: nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU())),
        _init_case("a convolution has groups, another no bias", _grouped),
        _init_case("layers lie deeper, among others that stay", _deep),
        _init_case("the module is a layer itself", lambda: nn.Linear(200, 50)),
    ),
    mistakes=(
        Mistake(
            "The number of *outputs* stands under the root. Each output is a sum over fan_in inputs, and its variance "
            "grows with them: weight has the shape (outputs, inputs, …).",
            lambda module: _initialised(module, lambda w: (2 / (w.numel() / w.shape[1])) ** 0.5),
        ),
        Mistake(
            "2 / fan_in is the variance. The standard deviation is its root.",
            lambda module: _initialised(module, lambda w: 2 / w[0].numel()),
        ),
        Mistake(
            "√(1 / fan_in) keeps the variance of a linear layer. A ReLU sets half of the values to 0, and the 2 makes "
            "up for it.",
            lambda module: _initialised(module, lambda w: (1 / w[0].numel()) ** 0.5),
        ),
        Mistake(
            "The kernel's height and width are missing from fan_in: each output of a convolution is a sum over "
            "channels × height × width.",
            lambda module: _initialised(module, lambda w: (2 / w.shape[1]) ** 0.5),
        ),
        Mistake(
            "In a convolution with groups an output sees only the channels of its group, as the weight's shape says; "
            "in_channels counts all.",
            lambda module: _initialised_by_channels(module),
        ),
        Mistake(
            "The biases keep what they were drawn with: set them to 0.",
            lambda module: _initialised(module, _he_std, bias=None),
        ),
        Mistake(
            "Only the direct children are initialised. `module.modules()` walks to any depth and begins with the "
            "module itself.",
            lambda module: _initialised(module, _he_std, layers=lambda m: m.children()),
        ),
        Mistake("This is the uniform form of Kaiming's initialisation. The normal one is asked for.", _uniform_init),
    ),
)


def _initialised_by_channels(module):
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            _initialised(layer, _he_std)
        elif isinstance(layer, nn.Conv2d):
            fan_in = layer.in_channels * math.prod(layer.kernel_size)
            _initialised(layer, lambda w, fan_in=fan_in: (2 / fan_in) ** 0.5)
    return module


# ── When it does not learn ────────────────────────────────────────────────────────────────────────────────────────────


class _Guarded(torch.optim.SGD):
    def step(self, closure=None):
        raise AssertionError("optimizer.step() was called, with a gradient that is not finite")


def _clip_case(name, *pairs, max_norm=1.0, once=False, raises=None, optimizer=torch.optim.SGD):
    def args():
        parameters = [leaf(*pair) for pair in pairs]
        return (Once(parameters) if once else parameters), optimizer(parameters, lr=0.1), max_norm

    def verify(result, parameters, optimizer, max_norm):
        before = [leaf(*pair) for pair in pairs]
        norm = math.sqrt(sum(b.grad.square().sum().item() for b in before if b.grad is not None))
        factor = 1.0 if norm <= max_norm else max_norm / norm
        for i, (p, b) in enumerate(zip(optimizer.param_groups[0]["params"], before)):
            wanted = b if b.grad is None else b - 0.1 * factor * b.grad
            if said := difference(wanted.detach(), p.detach(), 1e-5):
                return f"parameter {i} after the step: {said}"
        if said := difference(norm, result, 1e-5):
            return f"the norm before clipping is {norm:.4g}" + ("" if said == "the value differs" else f": {said}")
        return None

    # clip_grad_norm_ divides by norm + 1e-6: a relative error of 1e-6 at a norm of 1
    return Case(name, args, mutates=True, verify=None if raises else verify, tolerance=1e-5, raises=raises)


def _clipped(parameters, optimizer, clip):
    held = [p for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in held))
    clip(held, norm)
    optimizer.step()
    return norm


def _clip_each(parameters, optimizer, max_norm):
    return _clipped(parameters, optimizer, lambda held, norm: [nn.utils.clip_grad_norm_([p], max_norm) for p in held])


def _clip_values(parameters, optimizer, max_norm):
    return _clipped(parameters, optimizer, lambda held, norm: nn.utils.clip_grad_value_(held, max_norm))


def _always_scaled(parameters, optimizer, max_norm):
    return _clipped(parameters, optimizer, lambda held, norm: [p.grad.mul_(max_norm / norm) for p in held] if norm else None)


def _no_refusal(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
    optimizer.step()
    return norm


def _norm_afterwards(parameters, optimizer, max_norm):
    parameters = list(parameters)
    return min(clip_and_step(parameters, optimizer, max_norm), max_norm)


def _steps_first(parameters, optimizer, max_norm):
    parameters = list(parameters)
    optimizer.step()
    return clip_and_step(parameters, torch.optim.SGD(parameters, lr=0.0), max_norm)


def _refuses_nan_alone(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
    if norm != norm:
        raise RuntimeError("NaN")
    optimizer.step()
    return norm


CLIP_AND_STEP = Exercise(
    lesson=LESSON,
    solution=clip_and_step,
    hints=(
        "`torch.nn.utils.clip_grad_norm_` does most of it. What does it return? What does it do with gradients whose "
        "norm is infinite, and which of its arguments changes that?",
        "By hand: collect the gradients that are not None; the norm is the root of the sum of `g.square().sum()`; ask "
        "`math.isfinite(norm)` before anything is multiplied.",
        "`nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)` raises RuntimeError by itself. "
        "`.item()` makes a float of what it returns. Then step.",
    ),
    cases=(
        _clip_case("the norm is above the limit", ([1.0, 1.0], [2.0, 4.0]), ([1.0], [4.0])),
        _clip_case("the norm is below the limit", ([1.0, 1.0], [3.0, 0.0]), ([1.0], [4.0]), max_norm=20.0),
        _clip_case("each parameter is below the limit, and together they are above", ([1.0], [3.0]), ([1.0], [4.0]), max_norm=4.5),
        _clip_case("a parameter has no gradient", ([1.0], [3.0]), ([2.0],), ([1.0], [-4.0]), max_norm=2.0),
        _clip_case("the parameters can be walked through once", ([1.0], [3.0]), ([1.0], [4.0]), once=True),
        _clip_case("all gradients are 0", ([1.0], [0.0]), ([2.0, 3.0], [0.0, 0.0])),
        _clip_case("a gradient is NaN", ([1.0, 2.0], [math.nan, 1.0]), ([1.0], [2.0]), raises=RuntimeError),
        _clip_case("a gradient is infinite", ([1.0, 2.0], [1.0, math.inf]), ([1.0], [2.0]), raises=RuntimeError),
        _clip_case("a gradient is infinite, and the optimizer watches", ([1.0], [-math.inf]), raises=RuntimeError, optimizer=_Guarded),
    ),
    mistakes=(
        Mistake(
            "Each parameter is clipped by itself, which turns the step into another direction. The norm is over all "
            "together, and one factor scales them all.",
            _clip_each,
        ),
        Mistake(
            "Each number is cut off at max_norm. That turns the gradient; one factor for all keeps its direction.",
            _clip_values,
        ),
        Mistake(
            "Gradients below the limit are scaled *up* to it. They stay as they are.",
            _always_scaled,
        ),
        Mistake(
            "This is the norm after clipping, never above the limit. What it was before tells whether something is "
            "wrong.",
            _norm_afterwards,
        ),
        Mistake("The step comes before the clipping, with the gradients as they were.", _steps_first),
        Mistake(
            "Clipping does not repair a norm that is not finite: it multiplies by max_norm / inf, or by NaN, and the "
            "step destroys the parameters. Raise RuntimeError before the step.",
            _no_refusal,
        ),
        Mistake(
            "NaN is refused, and infinity is not: the factor is 0 then, and inf times 0 is NaN. `math.isfinite` asks "
            "for both.",
            _refuses_nan_alone,
        ),
    ),
)


def _two_layers():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def _optimized(change=None, optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1)):
    def args():
        net = made(_two_layers)
        built = optimizer(net)
        if change:
            made(lambda: change(net), seed=1)
        return net, built

    return args


def _replace_last(net):
    net[2] = nn.Linear(3, 5)


def _redraw_last(net):
    net[2] = nn.Linear(3, 2)


def _copy_last(net):
    net[2] = copy.deepcopy(net[2])


def _freeze_first(net):
    net[0].requires_grad_(False)
    net[2] = nn.Linear(3, 2)


def _two_groups(net):
    return torch.optim.Adam([{"params": net[0].parameters()}, {"params": [net[2].weight], "lr": 0.01}], lr=0.1)


def _trainable_alone(net):
    net[0].requires_grad_(False)
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def _held(model, optimizer, same, groups=None, frozen=False):
    held = [p for group in optimizer.param_groups[:groups] for p in group["params"]]
    return [n for n, p in model.named_parameters() if (p.requires_grad or frozen) and not any(same(p, h) for h in held)]


UNOPTIMIZED = Exercise(
    lesson=LESSON,
    solution=unoptimized,
    hints=(
        "An optimizer keeps what it was given in `optimizer.param_groups`, a list of dicts; the parameters are under \"params\".",
        "`p in list_of_parameters` asks with ==, which for tensors compares numbers. Objects are told apart by `id(p)` "
        "or by `is`.",
        "Make a set of the ids of all parameters in all groups. Then go through `model.named_parameters()` and keep "
        "the names of those with requires_grad whose id is not in it.",
    ),
    cases=(
        Case("the optimizer holds every parameter", _optimized()),
        Case("the last layer was replaced after the optimizer was made", _optimized(_replace_last)),
        Case("the last layer was replaced by one of the same size", _optimized(_redraw_last)),
        Case("the last layer was replaced by a copy with equal numbers", _optimized(_copy_last)),
        Case("a layer is frozen, and the optimizer was given the others", _optimized(optimizer=_trainable_alone)),
        Case("a layer is frozen, and another was replaced", _optimized(_freeze_first)),
        Case("the optimizer has two groups, and a bias is in neither", _optimized(optimizer=_two_groups)),
        Case("the optimizer holds the first layer", _optimized(optimizer=lambda net: torch.optim.SGD(net[0].parameters(), lr=0.1))),
    ),
    mistakes=(
        Mistake(
            "Numbers are compared here. A copy has equal numbers and is another object, which the optimizer does not "
            "move: compare by identity.",
            lambda model, optimizer: _held(model, optimizer, torch.equal),
        ),
        Mistake(
            "Shapes are compared here. A new layer of the same shape is not the one that the optimizer holds.",
            lambda model, optimizer: _held(model, optimizer, lambda p, h: p.shape == h.shape),
        ),
        Mistake(
            "Frozen parameters are named too. They are not to be trained, so no optimizer misses them.",
            lambda model, optimizer: _held(model, optimizer, lambda p, h: p is h, frozen=True),
        ),
        Mistake(
            "Only the first group is looked at. `optimizer.param_groups` can hold several.",
            lambda model, optimizer: _held(model, optimizer, lambda p, h: p is h, groups=1),
        ),
        Mistake(
            "These are the parameters that the optimizer holds. The others are asked for.",
            lambda model, optimizer: [n for n, _ in model.named_parameters() if n not in unoptimized(model, optimizer)],
        ),
    ),
)

# ── Overfitting ───────────────────────────────────────────────────────────────────────────────────────────────────────


def best_weights(model, epochs):
    """Walk through `epochs`; the model ends as it was after the best. Returns the best score."""
    best, kept = -math.inf, None
    for score in epochs:
        if score > best:  # never true of a NaN
            best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best


def _training(*scores):
    """A model, and epochs that write their number into all of its parameters and statistics."""

    def args():
        model = made(lambda: nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)))

        def epochs():
            for number, score in enumerate(scores, 1):
                with torch.no_grad():
                    for tensor in itertools.chain(model.parameters(), model.buffers()):
                        tensor.fill_(number)
                yield score

        return model, epochs()

    return args


def _kept_best(model, epochs, keep, better=lambda score, best: score > best, start=-math.inf):
    best, kept = start, None
    for score in epochs:
        if better(score, best):
            best, kept = score, keep(model)
    if kept is not None:
        model.load_state_dict(kept, strict=False)
    return best


def _copied(model):
    return copy.deepcopy(model.state_dict())


def _first_is_best(model, epochs):
    best, kept = next(epochs), _copied(model)
    for score in epochs:
        if score > best:
            best, kept = score, _copied(model)
    model.load_state_dict(kept)
    return best


BEST_WEIGHTS = Exercise(
    lesson=LESSON,
    solution=best_weights,
    hints=(
        "Note `model.state_dict()['0.weight']` after the first epoch, and look at it again after the second. Whose "
        "numbers are those?",
        "What state_dict() gives are the model's own tensors, which training changes in place. "
        "`copy.deepcopy(model.state_dict())` keeps numbers. At the end `model.load_state_dict(kept)` writes them back.",
        "Begin with a best score of `-math.inf`, and take a new one where `score > best`: so an equal score does not "
        "replace it, and a comparison with NaN is always False.",
    ),
    cases=(
        Case("the last epoch is the best", _training(0.1, 0.5, 0.7), mutates=True),
        Case("the second of four epochs is the best", _training(0.5, 0.9, 0.7, 0.8), mutates=True),
        Case("the first epoch is the best", _training(0.9, 0.8, 0.1), mutates=True),
        Case("two epochs are equally good", _training(0.2, 0.6, 0.6, 0.5), mutates=True),
        Case("all scores are negative", _training(-3.0, -1.5, -2.0), mutates=True),
        Case("the first score is NaN", _training(math.nan, 0.3, 0.6, 0.4), mutates=True),
        Case("a NaN comes after the best", _training(0.3, 0.6, math.nan), mutates=True),
        Case("there is one epoch", _training(0.4), mutates=True),
    ),
    mistakes=(
        Mistake(
            "The model is as the last epoch left it. state_dict() holds the tensors that training goes on to change, "
            "and a shallow copy (`.copy()`, `dict(…)`) holds them too: `copy.deepcopy(model.state_dict())`, and load "
            "it at the end.",
            lambda model, epochs: _kept_best(model, epochs, lambda m: m.state_dict()),
        ),
        Mistake(
            "The parameters are the best epoch's, and the buffers are not: a BatchNorm's running statistics belong to "
            "the model as well, and state_dict() has both.",
            lambda model, epochs: _kept_best(model, epochs, lambda m: {n: p.detach().clone() for n, p in m.named_parameters()}),
        ),
        Mistake(
            "The lowest score is kept. Here the highest is the best.",
            lambda model, epochs: _kept_best(model, epochs, _copied, lambda score, best: score < best, math.inf),
        ),
        Mistake(
            "Of two equal scores the later one was kept. The first counts: ask with > and not with >=.",
            lambda model, epochs: _kept_best(model, epochs, _copied, lambda score, best: score >= best),
        ),
        Mistake(
            "No score was above the one to begin with, 0. Scores can be negative: begin with `-math.inf`.",
            lambda model, epochs: _kept_best(model, epochs, _copied, start=0.0),
        ),
        Mistake(
            "The first score is taken as the best without a question. It is NaN, and nothing is greater than NaN, so "
            "it stays the best for ever.",
            _first_is_best,
        ),
    ),
)

# ── The same run twice ────────────────────────────────────────────────────────────────────────────────────────────────


def _order(loader, samples):
    """What one epoch gives, as a list of lists. ValueError where it does not end."""
    batches = [torch.as_tensor(batch).tolist() for batch in itertools.islice(iter(loader), samples + 1)]
    if len(batches) > samples:
        raise ValueError("an epoch has more batches than there are samples")
    return batches


def _shuffles_by_seed(result, dataset, batch_size, seed):
    samples = len(dataset)
    try:
        with torch.random.fork_rng(devices=[]):
            twin = copy.deepcopy(result)
            torch.manual_seed(1)
            one, later = _order(twin, samples), _order(twin, samples)
            torch.manual_seed(2)
            other = _order(result, samples)
    except Exception as error:
        return f"it cannot be walked through as a loader: {type(error).__name__}: {str(error)[:100]}"
    found = [i for batch in one for i in batch]
    if sorted(found) != list(range(samples)):
        return f"an epoch gives {len(found)} samples, {len(set(found))} of them different; each of the {samples} should come once"
    if [len(batch) for batch in one] != [min(batch_size, samples - i) for i in range(0, samples, batch_size)]:
        return f"the batches have {[len(batch) for batch in one]} samples, where batch_size is {batch_size}"
    if found == list(range(samples)):
        return "the samples come in the order of the dataset; they should be shuffled"
    if one != other:
        return "its order follows torch's global random state: with another state, the same loader gives another order"
    if one == later:
        return "every epoch has the same order"
    for text, generator in (("an unseeded generator", torch.Generator()), ("the seed 0", torch.Generator().manual_seed(0))):
        if seed and one == _order(DataLoader(dataset, batch_size, shuffle=True, generator=generator), samples):
            return f"its order is the one of {text}; the seed given is {seed}"
    return None


def _leaves_random_state(call):
    before = torch.random.get_rng_state()
    call()
    if torch.equal(before, torch.random.get_rng_state()):
        return None
    return "the orders are right, but making the loader changes torch's global random state, and so every random number that comes after it"


def _loader_case(name, samples, batch_size, seed):
    return Case(name, lambda: (range(samples), batch_size, seed), verify=_shuffles_by_seed, watch=_leaves_random_state)


def _by_global_seed(dataset, batch_size, seed):
    torch.manual_seed(seed)
    return DataLoader(dataset, batch_size, shuffle=True)


class _OneOrder(torch.utils.data.Sampler):
    def __init__(self, order):
        self.order = order

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


def _one_order(dataset, batch_size, seed):
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    return DataLoader(dataset, batch_size, sampler=_OneOrder(order))


SEEDED_LOADER = Exercise(
    lesson=LESSON,
    solution=seeded_loader,
    hints=(
        "`torch.manual_seed` seeds the generator that everything shares. `torch.Generator()` makes one of your own; "
        "which argument of DataLoader takes it?",
        "`torch.Generator().manual_seed(seed)` seeds it and returns it. The loader goes on drawing from it, so the "
        "next epoch has another order.",
        "`torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, generator=…)`",
    ),
    cases=(
        _loader_case("all batches are full", 12, 4, 0),
        _loader_case("the last batch is smaller", 11, 4, 0),
        _loader_case("the seed is another one", 12, 5, 7),
        _loader_case("a batch is one sample", 9, 1, 123),
    ),
    mistakes=(
        Mistake(
            "The loader draws from torch's global generator when an epoch begins, and whatever is drawn before that "
            "changes its order. Give the loader a generator of its own.",
            lambda dataset, batch_size, seed: DataLoader(dataset, batch_size, shuffle=True),
        ),
        Mistake(
            "The order is drawn once, and every epoch repeats it. Give the loader the seeded generator, and it draws a "
            "new order for each epoch.",
            _one_order,
        ),
        Mistake(
            "The generator has not been given the seed: a new torch.Generator() always begins at the same place.",
            lambda dataset, batch_size, seed: DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator()),
        ),
        Mistake(
            "shuffle=True is missing: without it a generator has nothing to do.",
            lambda dataset, batch_size, seed: DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(seed)),
        ),
        Mistake(
            "The last batch is dropped because it is smaller. All samples are asked for.",
            lambda dataset, batch_size, seed: DataLoader(
                dataset, batch_size, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(seed)
            ),
        ),
    ),
)

# ── Transfer ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Branched(nn.Module):
    """A trunk, and a classifier that is registered before it: the last Linear is not the last to run."""

    def __init__(self):
        super().__init__()
        self.head = nn.ModuleDict({"fc": nn.Linear(6, 4)})
        self.trunk = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.head["fc"](self.trunk(x))


def _flat_net():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _nested_net():
    trunk = nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(trunk, nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)), nn.Identity())


def _trained(build):
    """Built, with statistics and scales as a training leaves them."""

    def build_and_set():
        net = build()
        for part in net.modules():
            if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
                for tensor in (part.running_mean, part.running_var, part.weight.data):
                    tensor.uniform_(0.5, 2.0)
        return net

    return made(build_and_set)




def _transfer_case(name, build, data, classes):
    def verify(result, model, classes):
        fresh = _trained(build)
        place = [n for n, part in fresh.named_modules() if isinstance(part, nn.Linear)][-1]
        try:
            head = model.get_submodule(place)
        except AttributeError:
            head = None
        if not isinstance(head, nn.Linear) or head.in_features != fresh.get_submodule(place).in_features or head.out_features != classes:
            return f"the layer {place} should be an nn.Linear with {classes} outputs and as many inputs as before; it is {brief(head)}"
        if head.weight.shape == fresh.get_submodule(place).weight.shape and torch.equal(head.weight, fresh.get_submodule(place).weight):
            return f"the layer {place} has the old numbers: a new layer is asked for, also where the number of classes is the same"
        trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            return "nothing is trainable. The new layer is frozen as well: freeze first, then replace"
        if trainable != {f"{place}.weight", f"{place}.bias"}:
            return f"trainable are {brief(sorted(trainable))}, where the new layer's weight and bias are wanted"
        if not isinstance(result, list) or any(not isinstance(p, torch.Tensor) for p in result):
            return f"a list of the new layer's weight and bias was expected; {kind(result)} came"
        if {id(p) for p in result} != {id(head.weight), id(head.bias)} or len(result) != 2:
            frozen = ", the frozen ones too" if any(not p.requires_grad for p in result) else ""
            return f"a list of the new layer's weight and bias was expected; {len(result)} tensors came{frozen}"
        return _holds_still(model, fresh, place, head, data)

    return Case(name, lambda: (_trained(build), classes), mutates=True, verify=verify, tolerance=1e-6)


def _holds_still(model, fresh, place, head, data):
    """Held against the untouched network in eval mode with the same head. The model is put back as it was found."""
    state, modes = copy.deepcopy(model.state_dict()), [(part, part.training) for part in model.modules()]
    parent, _, name = place.rpartition(".")
    reference = fresh.eval()
    was = reference.get_submodule(place)
    setattr(reference.get_submodule(parent), name, head)
    said = None
    with torch.no_grad():
        wanted = reference(data)
        for _ in range(3):
            model.train()
            came = model(data)
        if difference(wanted, model.eval()(data), 1e-4):
            said = "after three batches in train mode, the model gives other outputs in eval mode than before: its frozen part has moved"
        elif difference(wanted, came, 1e-4):
            said = "in train mode the frozen part gives other features than in eval mode: BatchNorm normalises with the batch's statistics"
    setattr(reference.get_submodule(parent), name, was)
    model.load_state_dict(state)
    for part, mode in modes:
        part.training = mode
    return said


def _transfer(model, classes, hold=lambda norm: None):
    """The exercise, with another way to hold BatchNorm still."""
    model.requires_grad_(False)
    place, old = [(n, part) for n, part in model.named_modules() if isinstance(part, nn.Linear)][-1]
    parent, _, name = place.rpartition(".")
    head = nn.Linear(old.in_features, classes)
    setattr(model.get_submodule(parent), name, head)
    for part in model.modules():
        if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
            hold(part)
    return list(head.parameters())


def _no_momentum(norm):
    norm.momentum = 0.0


TRANSFER_HEAD = Exercise(
    lesson=LESSON,
    solution=transfer_head,
    hints=(
        "Three steps: `model.requires_grad_(False)`; a new nn.Linear in the place of the last one; and the BatchNorm "
        "layers. What do those do in train mode, and what does `model.train()` do to a layer that you have put into "
        "eval mode?",
        "`named_modules()` gives names such as 'block.3'. `name.rpartition('.')` splits off the last part, "
        "`model.get_submodule('block')` is the parent, and `setattr(parent, '3', new)` puts the new layer into its "
        "place, in a Sequential too.",
        "A layer runs its forward pre-hooks before each forward: `layer.register_forward_pre_hook(hook)` with a hook "
        "that calls `layer.eval()` and returns None. Or give the layer a `train` that does nothing. Both outlast "
        "`model.train()`.",
    ),
    cases=(
        _transfer_case("the network is a sequence with a BatchNorm", lambda: _flat_net(), noise(16, 6) + 1, 5),
        _transfer_case("there are as many classes as before", lambda: _flat_net(), noise(16, 6) + 1, 3),
        _transfer_case("the last linear layer lies deeper and is not the last part", _nested_net, noise(8, 1, 6, 6) - 1, 2),
        _transfer_case("the head is registered before the trunk", _Branched, noise(8, 1, 6, 6) - 1, 7),
    ),
    mistakes=(
        Mistake(
            "Nothing holds the BatchNorm layers: in train mode they normalise with the batch's own statistics and "
            "update the running ones, whatever requires_grad says. Statistics are buffers, not parameters.",
            lambda model, classes: _transfer(model, classes),
        ),
        Mistake(
            "The BatchNorm layers were put into eval mode once, and the next `model.train()` puts them back: it walks "
            "through all parts. Let them stay in eval mode by themselves, with a hook or with a `train` of their own.",
            lambda model, classes: _transfer(model, classes, lambda norm: norm.eval()),
        ),
        Mistake(
            "With a momentum of 0, or untracked, the running statistics stay, and in train mode they are not what "
            "normalises: the batch's own are.",
            lambda model, classes: _transfer(model, classes, _no_momentum),
        ),
    ),
)

# ── The clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────


def accumulate_epoch(model, batches, optimizer, window):
    """One pass over the batches with a step after each `window` of them, the last, shorter one included; the number of steps."""
    model.train()
    steps = 0
    for first in range(0, len(batches), window):
        together = batches[first : first + window]
        samples = sum(len(targets) for _, targets in together)
        optimizer.zero_grad()
        for inputs, targets in together:
            loss = F.cross_entropy(model(inputs), targets) * len(targets) / samples  # a sample's weight, whatever its batch
            loss.backward()
        optimizer.step()
        steps += 1
    return steps


def _windows(sizes, window, left_over=False):
    def args():
        model = made(lambda: nn.Linear(3, 3).double())
        if left_over:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        return model, _pieces(sizes), torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), window

    return args


def _windows_case(name, sizes, window, **more):
    return Case(name, _windows(sizes, window, **more), mutates=True, tolerance=1e-9)  # float64, as above


def _accumulate(model, batches, optimizer, window, weight, last=True, clear=True):
    steps = 0
    if clear:
        optimizer.zero_grad()
    for i, (inputs, targets) in enumerate(batches):
        first = i - i % window
        samples = [len(y) for _, y in batches[first : first + window]]
        (F.cross_entropy(model(inputs), targets) * weight(len(targets), samples)).backward()
        if (i + 1) % window == 0 or (last and i + 1 == len(batches)):
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


ACCUMULATE_EPOCH = Exercise(
    lesson=LESSON,
    solution=accumulate_epoch,
    hints=(
        "In the symptom, an eight comes in a batch of 8 and another digit in one of 56. `loss / window` gives each "
        "batch the same weight. What weight does that give to one eight, and to one other digit?",
        "The window's loss is the mean over its *samples*: each batch enters with len(targets) / (samples of its "
        "window). And count the steps: what becomes of the batches after the last full window?",
        "Cut the batches into windows first, `batches[first : first + window]` for first in range(0, len(batches), "
        "window). Then each window knows how many samples it has, the last one too.",
    ),
    cases=(
        _windows_case("all batches have the same size and all windows are full", (2, 2, 2, 2), 2),
        _windows_case("the batches have different sizes", (1, 7, 4, 2), 2),
        _windows_case("the last window is not full", (3, 3, 3, 3, 3), 2),
        _windows_case("the last window is not full and the sizes differ", (2, 5, 1, 6, 3, 1, 4), 3),
        _windows_case("the window is longer than the pass", (2, 5), 4),
        _windows_case("a window is one batch", (2, 5, 3), 1),
        _windows_case("the parameters hold gradients from before", (4, 1, 2), 2, left_over=True),
    ),
    mistakes=(
        Mistake(
            "Every batch has the same weight, however small it is, so one of its samples counts more. Weigh each batch "
            "by its share of the samples of its window.",
            lambda *a: _accumulate(*a, weight=lambda n, sizes: 1 / a[3], last=False),
        ),
        Mistake(
            "The batches of the last, shorter window make no step: their gradients are thrown away, or wait for the "
            "next pass.",
            lambda *a: _accumulate(*a, weight=lambda n, sizes: n / sum(sizes), last=False),
        ),
        Mistake(
            "The last window has fewer batches, and its loss is divided as if it were full: its step is too small.",
            lambda *a: _accumulate(*a, weight=lambda n, sizes: n / sum(sizes) * len(sizes) / a[3]),
        ),
        Mistake(
            "Gradients that were there before the call take part in the first step: clear them first.",
            lambda *a: _accumulate(*a, weight=lambda n, sizes: n / sum(sizes), clear=False),
        ),
    ),
)


def train_head(backbone, inputs, targets, classes, steps=60):
    """A new nn.Linear for `classes` classes, trained on the features of a frozen backbone, which is left as it was."""
    modes = [(part, part.training) for part in backbone.modules()]
    backbone.eval()  # else BatchNorm updates its statistics, which are no parameters
    with torch.no_grad():
        features = backbone(inputs)  # nothing in the backbone moves, so once is enough
    for part, mode in modes:
        part.training = mode
    head = nn.Linear(features.shape[1], classes)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(head(features), targets).backward()
        optimizer.step()
    return head


def _backbone(mode="eval", parts=()):
    net = made(lambda: nn.Sequential(nn.Linear(4, 24), nn.BatchNorm1d(24), nn.ReLU()))
    net.requires_grad_(False).train(mode == "train")
    for part in parts:
        net[part].train(mode != "train")
    return net


def _clusters(classes, each=20, features=4, spread=0.3, shift=0.0, seed=0):
    """Points around one centre for each class, and their classes."""
    centres = 2 * noise(classes, features, seed=seed + 100)
    targets = torch.arange(classes).repeat_interleave(each)
    return centres[targets] + spread * noise(len(targets), features, seed=seed) + shift, targets


def _serves_in_eval_mode(result, backbone, inputs, targets, classes):
    if not isinstance(result, nn.Module):
        return f"an nn.Linear was expected, {kind(result)} came"
    modes = [(part, part.training) for part in backbone.modules()]
    with torch.no_grad():
        outputs = result(backbone.eval()(inputs))
    for part, mode in modes:
        part.training = mode
    if outputs.shape != (len(targets), classes):
        return f"on the backbone's features the head gives {tuple(outputs.shape)}, expected {(len(targets), classes)}"
    right = (outputs.argmax(dim=1) == targets).float().mean().item()
    if right < 0.9:
        return (
            f"on the backbone's features in eval mode the head gets {100 * right:.0f} % of its own training samples right, "
            "where 90 % are within reach: with which features was it trained?"
        )
    return None


def _in_train_mode_throughout(backbone, inputs, targets, classes, restore=lambda backbone, before: None):
    before = copy.deepcopy(backbone)
    head = nn.Linear(backbone(inputs[:1]).shape[1], classes) if not backbone.training else nn.Linear(24, classes)
    model = nn.Sequential(backbone, head).train()
    optimizer = torch.optim.Adam(head.parameters(), lr=0.03)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    restore(backbone, before)
    return head


def _on_a_copy(backbone, inputs, targets, classes):
    return _in_train_mode_throughout(copy.deepcopy(backbone), inputs, targets, classes)


def _left_in_eval(backbone, inputs, targets, classes):
    return train_head(backbone.eval(), inputs, targets, classes)


def _one_mode_back(backbone, inputs, targets, classes):
    mode = backbone.training
    head = train_head(backbone, inputs, targets, classes)
    backbone.train(mode)
    return head


def _head_case(name, shift=0.0, classes=3, **mode):
    return Case(
        name, lambda: (_backbone(**mode), *_clusters(classes, shift=shift), classes), verify=_serves_in_eval_mode, tolerance=1e-6
    )


TRAIN_HEAD = Exercise(
    lesson=LESSON,
    solution=train_head,
    hints=(
        "No parameter of the backbone has moved. What else is in `backbone.state_dict()`? Compare it before and after "
        "the call.",
        "BatchNorm's running mean and variance are buffers, and each forward pass in train mode updates them, whatever "
        "requires_grad or no_grad says. Which line puts the backbone into train mode?",
        "`model.train()` reaches every part. Train the head alone on `backbone(inputs)`, computed once with the "
        "backbone in eval mode under `torch.no_grad()`. And give each part of the backbone the mode back that it had.",
    ),
    cases=(
        _head_case("the backbone comes in eval mode"),
        _head_case("the new inputs are unlike the backbone's own", shift=3.0),
        _head_case("there are five classes", classes=5),
        _head_case("the backbone comes in train mode", mode="train"),
        _head_case("a part of the backbone comes in train mode", mode="eval", parts=(2,)),
    ),
    mistakes=(
        Mistake(
            "`model.train()` walks into the backbone, and there BatchNorm moves its running statistics with each "
            "batch. They are buffers: requires_grad=False does not hold them.",
            _in_train_mode_throughout,
        ),
        Mistake(
            "The backbone is unharmed, but the head was trained on features that were normalised with the batch's "
            "statistics. It is used with the running ones: train it on those.",
            _on_a_copy,
        ),
        Mistake(
            "One mode is given back to all parts. Each has its own: note it for each of `backbone.modules()`.",
            _one_mode_back,
        ),
        Mistake(
            "The backbone is left in eval mode, and whoever trains it next gets no updates of its statistics. Give "
            "each part its mode back.",
            _left_in_eval,
        ),
    ),
)


def attach_and_train(model, head, inputs, targets, steps=80):
    """Put `head` in the place of the model's last layer and train all of the model; the last loss."""
    model[-1] = head
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # last, when every parameter is in its place
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def _attachment(classes=3, old=2):
    model = made(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, old)))
    return model, made(lambda: nn.Linear(16, classes), seed=1), *_clusters(classes)


def _all_has_trained(result, model, head, inputs, targets):
    if model[-1] is not head:
        return "the model's last layer is not the head that was given"
    fresh, new = _attachment(head.out_features)[:2]
    if not isinstance(result, float):
        return f"the last loss, a float, was expected; {kind(result)} came"
    moved = (head.weight - new.weight).abs().max().item(), (model[0].weight - fresh[0].weight).abs().max().item()
    if moved[0] < 1e-4:
        return "no weight of the head has moved: nothing has trained it"
    if moved[1] < 1e-4:
        return "no weight of the first layer has moved: the head alone was trained"
    with torch.no_grad():
        loss = F.cross_entropy(model(inputs), targets).item()
    if not loss < 0.2:
        return f"at the end the loss on the training samples is {loss:.2f}, where less than 0.2 is within reach"
    if not 0.8 * loss - 0.01 <= result <= 2 * loss + 0.1:
        return f"it returns {result:.3f}, and the loss that the model has reached is {loss:.3f}"
    return None


def _attach(model, head, inputs, targets, parameters, attach=True):
    optimizer = torch.optim.SGD(parameters(model, head), lr=0.1, momentum=0.9)
    if attach:
        model[-1] = head
    for _ in range(80):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def _attach_case(name, **sizes):
    return Case(name, lambda: _attachment(**sizes), mutates=True, verify=_all_has_trained, tolerance=1e-6)


ATTACH_AND_TRAIN = Exercise(
    lesson=LESSON,
    solution=attach_and_train,
    hints=(
        "The accuracy comes from the layers before the head, which learn to serve a head that stays as it was drawn. "
        "`unoptimized(model, optimizer)` or `kit.unoptimized` names what the optimizer does not hold.",
        "An optimizer keeps the very parameters that it is given when it is made. The head comes a line later.",
        "Exchange the first two lines, so that `model.parameters()` has the head's.",
    ),
    cases=(
        _attach_case("the new head has as many classes as the old one", classes=2, old=2),
        _attach_case("the new head has more classes than the old one"),
        _attach_case("the new head has fewer classes than the old one", classes=2, old=6),
    ),
    mistakes=(
        Mistake(
            "The optimizer was made before the head was in its place: it holds the parameters of the old last layer, "
            "which nothing uses any more. Make the optimizer last.",
            lambda *a: _attach(*a, parameters=lambda model, head: model.parameters()),
        ),
        Mistake(
            "The optimizer has the head's parameters alone. All of the model is to be trained.",
            lambda *a: _attach(*a, parameters=lambda model, head: head.parameters()),
        ),
        Mistake(
            "The model was trained with its old last layer: put the head into its place, `model[-1] = head`.",
            lambda *a: _attach(*a, parameters=lambda model, head: [*model.parameters(), *head.parameters()], attach=False),
        ),
    ),
)


def dropout_network(features, hidden, classes):
    """A module of linear layer, ReLU, dropout of one half, linear layer: (N, features) to (N, classes)."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(features, hidden)
            self.last = nn.Linear(hidden, classes)

        def forward(self, x):
            x = F.relu(self.first(x))
            x = F.dropout(x, 0.5, training=self.training)  # the flag that train() and eval() set
            return self.last(x)

    return Network()


_NEVER_SLEEPS = (
    "In eval mode two calls with the same input give different outputs: dropout is still active. `F.dropout` has "
    "training=True unless it is told otherwise, and knows nothing of the module's mode."
)
_ALWAYS_SLEEPS = "In train mode two calls with the same input give the same output: there is no dropout any more."
_NO_RELU = "In eval mode the whole is one linear map: there is no ReLU between the two layers."
_BY_GRAD_MODE = (
    "In train mode under `torch.no_grad()` there is no dropout, or in eval mode without it there is: the module's mode "
    "decides, `self.training`, and not whether a graph is recorded."
)


def _sleeps_in_eval(result, features, hidden, classes):
    if not isinstance(result, nn.Module):
        return f"a module was expected, {kind(result)} came"
    wanted = features * hidden + hidden + hidden * classes + classes
    if (held := sum(p.numel() for p in result.parameters())) != wanted:
        return f"it has {held} parameters, where the two linear layers have {wanted}"
    whole = nn.Sequential(result)  # a mode is given to the whole, and must reach the part
    x = torch.cat([noise(1, features), -noise(1, features)]).repeat_interleave(400, dim=0) * 10  # one sign passes the ReLU
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.no_grad():
            whole.eval()
            still = [whole(x), whole(x)]
            whole.train()
            free = [whole(x), whole(x)]
        recorded = [whole(x).detach(), whole(x).detach()]
        whole.eval()
        still_recorded = [whole(x).detach(), whole(x).detach()]
    if still[0].shape != (800, classes):
        return f"the output has the shape {tuple(still[0].shape)}, expected {(800, classes)}"
    if not torch.equal(*still):
        return _NEVER_SLEEPS
    with torch.no_grad():
        bent = still[0][0] + still[0][400] - 2 * whole.eval()(torch.zeros(1, features))[0]
    if hidden > 1 and bent.abs().max() < 1e-3:
        return _NO_RELU
    if not torch.equal(*still_recorded):
        return _BY_GRAD_MODE
    if torch.equal(*recorded):
        return _ALWAYS_SLEEPS
    if torch.equal(*free):
        return _BY_GRAD_MODE
    draws = torch.stack([*free, *recorded]).view(4, 2, 400, classes).transpose(0, 1).flatten(1, 2)  # two inputs, 1600 draws of each
    calm = still[0].view(2, 400, classes)[:, 0]
    if ((draws.mean(dim=1) - calm).abs() > 5 * draws.std(dim=1) / 1600**0.5 + 1e-4).any():
        return (
            "in train mode the outputs are not, on average, those of eval mode: dropout stands before the last layer, "
            "and scales what it lets pass"
        )
    if hidden > 1:
        return None
    for rows in draws:  # with one hidden value an output is one of two: it was dropped or not
        most = rows.mul(1e4).round().unique(dim=0, return_counts=True)[1].max().item() / 1600
        if most < 1 and abs(most - 0.5) > 0.0625:  # five standard errors of 1600 draws; the other input ends at the ReLU
            return f"with one hidden value, {100 * most:.0f} % of the outputs are alike, where one half should be dropped"
    return None


def _network_of(forward):
    """A module of the right form with another forward."""

    class Other(nn.Module):
        def __init__(self, features, hidden, classes):
            super().__init__()
            self.first, self.last = nn.Linear(features, hidden), nn.Linear(hidden, classes)

        def forward(self, x):
            return forward(self, x)

    return lambda features, hidden, classes: Other(features, hidden, classes)


DROPOUT_NETWORK = Exercise(
    lesson=LESSON,
    solution=dropout_network,
    hints=(
        "Call the model twice in eval mode with the same input. Which line can give different numbers?",
        "`F.dropout(x, 0.5)` is a function: it cannot know in which mode the module is. Look at its third argument.",
        "Either `F.dropout(x, 0.5, training=self.training)`, or a part of the module, `self.drop = nn.Dropout(0.5)`, "
        "which train() and eval() reach by themselves.",
    ),
    cases=(
        Case("there are sixteen hidden values", lambda: (5, 16, 3), verify=_sleeps_in_eval),
        Case("there is one hidden value", lambda: (4, 1, 2), verify=_sleeps_in_eval),
        Case("there is one class", lambda: (3, 8, 1), verify=_sleeps_in_eval),
    ),
    mistakes=(
        Mistake(_NEVER_SLEEPS, _network_of(lambda self, x: self.last(F.dropout(F.relu(self.first(x)), 0.5)))),
        Mistake(_ALWAYS_SLEEPS, _network_of(lambda self, x: self.last(F.relu(self.first(x))))),
        Mistake(_NO_RELU, _network_of(lambda self, x: self.last(F.dropout(self.first(x), 0.5, training=self.training)))),
        Mistake(
            _BY_GRAD_MODE,
            _network_of(lambda self, x: self.last(F.dropout(F.relu(self.first(x)), 0.5, training=torch.is_grad_enabled()))),
        ),
    ),
)


def balanced_accuracy(model, loader):
    """Mean over the classes of the share of a class's samples that the model gets right, a float."""
    right, count = {}, {}
    for inputs, targets in loader:
        with torch.no_grad():
            hit = model(inputs).argmax(dim=1) == targets
        for c in targets.unique().tolist():  # sums over all batches: shares of batches cannot be averaged
            right[c] = right.get(c, 0) + hit[targets == c].sum().item()
            count[c] = count.get(c, 0) + (targets == c).sum().item()
    return sum(right[c] / count[c] for c in count) / len(count)


def _answers(pairs, classes, batch_size):
    """A model that hands on its inputs, and a loader of outputs that answer the first of each pair, with the second as target."""

    def args():
        answers, targets = torch.tensor(pairs).t()
        outputs = F.one_hot(answers, classes).float() + 0.1 * noise(len(pairs), classes).clamp(-1, 1)
        return nn.Identity().eval(), DataLoader(TensorDataset(outputs, targets.contiguous()), batch_size)

    return args


_EIGHT = [(0, 0), (0, 0), (1, 0), (0, 0), (1, 1), (0, 1), (0, 0), (2, 2)]
_SORTED = [(0, 0), (0, 0), (0, 0), (1, 0), (1, 1), (2, 1), (2, 2)]


def _batches_averaged(model, loader, weigh=lambda targets: 1):
    total = weight = 0.0
    for inputs, targets in loader:
        total += balanced_accuracy(model, [(inputs, targets)]) * weigh(targets)
        weight += weigh(targets)
    return total / weight


def _all_samples_alike(model, loader):
    hits = torch.cat([model(x).argmax(dim=1) == y for x, y in loader])
    return hits.float().mean().item()


def _missing_as_zero(model, loader):
    outputs, targets = torch.cat([model(x) for x, _ in loader]), torch.cat([y for _, y in loader])
    return balanced_accuracy(model, [(outputs, targets)]) * len(targets.unique()) / outputs.shape[1]


def _mean_over_classes_of_batch_shares(model, loader):
    shares = {}
    for x, y in loader:
        for c in y.unique().tolist():
            shares.setdefault(c, []).append((model(x).argmax(dim=1) == y)[y == c].float().mean().item())
    return sum(sum(s) / len(s) for s in shares.values()) / len(shares)


def _precision(model, loader):
    answers, targets = torch.cat([model(x).argmax(dim=1) for x, _ in loader]), torch.cat([y for _, y in loader])
    return sum((targets[answers == c] == c).float().mean().item() for c in answers.unique()) / len(answers.unique())


BALANCED_ACCURACY = Exercise(
    lesson=LESSON,
    solution=balanced_accuracy,
    hints=(
        "Take one class with two samples, one right and one wrong, in two batches. Now take another class in the same "
        "batches. Which batches say something about a class, and with which weight does it enter?",
        "A share is a quotient of two counts. Counts can be added over batches; shares cannot, not even weighted by "
        "the batch's size.",
        "Keep for each class how many were right and how many there were, over all batches (or put all answers "
        "together with `torch.cat`). Divide at the end, and average over the classes that occur.",
    ),
    cases=(
        Case("all samples come in one batch", _answers(_EIGHT, 3, 8), tolerance=1e-6),
        Case("the last batch is smaller", _answers(_EIGHT, 3, 3), tolerance=1e-6),
        Case("two batches hold different classes", _answers(_EIGHT, 3, 4), tolerance=1e-6),
        Case("the samples come sorted by class", _answers(_SORTED, 3, 2), tolerance=1e-6),
        Case("each batch is one sample", _answers(_SORTED, 3, 1), tolerance=1e-6),
        Case("a class never occurs", _answers([(0, 0), (3, 0), (2, 2), (2, 2), (1, 2)], 4, 2), tolerance=1e-6),
    ),
    mistakes=(
        Mistake(
            "The batches' own figures are averaged. A batch knows only its own samples: a class that has few of them "
            "in it, or none, enters with the wrong weight. Add up counts for each class, and divide at the end.",
            _batches_averaged,
        ),
        Mistake(
            "Weighing the batches by their size does not help: each figure is a mean over classes of different size, "
            "and a class may be missing. Add up counts for each class.",
            lambda model, loader: _batches_averaged(model, loader, len),
        ),
        Mistake(
            "For each class the shares of the batches are averaged, and a batch with one sample of it counts as much "
            "as one with many. Add up counts.",
            _mean_over_classes_of_batch_shares,
        ),
        Mistake(
            "This is the plain accuracy: every sample counts alike, and a large class decides. Here every class counts "
            "alike.",
            _all_samples_alike,
        ),
        Mistake(
            "A class that never occurs counts as one that is never recognised. Average over the classes that occur.",
            _missing_as_zero,
        ),
        Mistake(
            "The share of a class that does not occur is 0 / 0, which is nan. Average over the classes that occur.",
            lambda model, loader: math.nan,
        ),
        Mistake(
            "This asks how many of the *answers* for a class are right (precision). The share of its samples is asked "
            "for (recall).",
            _precision,
        ),
    ),
)


def train_with_cosine(model, loader, epochs, rate):
    """Train with a rate that falls from `rate` to about 0; returns the rate that each step used."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(loader))  # in the unit of its steps
    rates = []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    return rates


def _linear_task(batches, each=4):
    inputs, targets = _clusters(2, each=batches * each // 2)
    return made(lambda: nn.Linear(4, 2)), DataLoader(TensorDataset(inputs, targets), each)


def _falls_once(result, model, loader, epochs, rate):
    """Stepped by the batch or by the epoch: each rate lies on half a cosine, at a moment less than one epoch away."""
    steps, each = epochs * len(loader), len(loader)
    if not isinstance(result, list) or not all(isinstance(r, float) for r in result):
        return f"a list of floats was expected, {kind(result)} came"
    if len(result) != steps:
        return f"{len(result)} rates came; {epochs} epochs of {each} batches make {steps} steps"
    if not math.isclose(result[0], rate, rel_tol=1e-6):
        return f"the first step used {result[0]:.4g}; the rate begins at {rate}"
    if rises := [i for i, (a, b) in enumerate(zip(result, result[1:]), 1) if b > a * (1 + 1e-9)]:
        return f"the rate rises again: step {rises[0]} used {result[rises[0]]:.4g}, the one before {result[rises[0] - 1]:.4g}"
    for i, came in enumerate(result):
        low, high = (rate * (1 + math.cos(math.pi * min(max(i + d, 0), steps) / steps)) / 2 for d in (each, -each))
        if not low - 1e-6 <= came <= high + 1e-6:
            return f"step {i} of {steps} used {came:.4g}; half a cosine from {rate} to 0 passes between {low:.4g} and {high:.4g} there"
    if torch.equal(model.weight, _linear_task(len(loader))[0].weight):
        return "the rates are right, and no weight has moved"
    return None


def _cosine_run(model, loader, epochs, rate, horizon, per_batch=True, after=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=horizon(epochs, loader))
    rates = []
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if not after:
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_batch:
                scheduler.step()
            if after:
                rates.append(optimizer.param_groups[0]["lr"])
        if not per_batch:
            scheduler.step()
    return rates


def _cosine_case(name, batches, epochs, rate):
    return Case(name, lambda: (*_linear_task(batches), epochs, rate), mutates=True, verify=_falls_once, tolerance=1e-9)


TRAIN_WITH_COSINE = Exercise(
    lesson=LESSON,
    solution=train_with_cosine,
    hints=(
        "Draw all rates: `curves({'rate': rates}, 'step', 'rate')`. How many steps does one fall take, and how many "
        "were meant?",
        "T_max is the number of calls of `scheduler.step()` from the top to the bottom. It is given as a number of "
        "epochs, and step() is called for each batch.",
        "Make the units agree: `T_max=epochs * len(loader)`, or `scheduler.step()` once an epoch, after the inner "
        "loop.",
    ),
    cases=(
        _cosine_case("an epoch is one batch", 1, 24, 0.1),  # so long that a straight line is no cosine
        _cosine_case("an epoch has five batches", 5, 8, 0.1),
        _cosine_case("an epoch has two batches and the run ends at the bottom of a wave", 2, 9, 0.2),
        _cosine_case("an epoch has twelve batches", 12, 6, 0.05),
    ),
    mistakes=(
        Mistake(
            "The cosine comes down within a few batches and goes up again, for it is periodic: T_max counts calls of "
            "step(), and here it was given epochs while step() is called for each batch.",
            lambda *a: _cosine_run(*a, horizon=lambda epochs, loader: epochs),
        ),
        Mistake(
            "T_max counts batches now, and the scheduler is stepped once an epoch: the rate hardly falls.",
            lambda *a: _cosine_run(*a, horizon=lambda epochs, loader: epochs * len(loader), per_batch=False),
        ),
        Mistake(
            "One epoch's batches are the horizon here: the rate falls within the first epoch and rises in the second.",
            lambda *a: _cosine_run(*a, horizon=lambda epochs, loader: len(loader)),
        ),
        Mistake(
            "The rate is noted after the scheduler has moved it. Note it before the step, which uses it.",
            lambda *a: _cosine_run(*a, horizon=lambda epochs, loader: epochs * len(loader), after=True),
        ),
    ),
)


def deep_network(sizes):
    """A module of linear layers, sizes[0] → sizes[1] → …, a ReLU after each but the last."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            # a ModuleList registers what it holds; a list is a list
            self.hidden = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes[:-2], sizes[1:-1])])
            self.last = nn.Linear(sizes[-2], sizes[-1])

        def forward(self, x):
            for layer in self.hidden:
                x = F.relu(layer(x))
            return self.last(x)

    return Network()


_UNREGISTERED = (
    "A plain list or dict hides its layers from parameters(), state_dict(), to() and train(): the optimizer never "
    "hears of them. nn.ModuleList, nn.ModuleDict or nn.Sequential register what they hold."
)
_LINEAR_THROUGHOUT = "There is no ReLU between the layers: together they are one linear map."
_RELU_AT_THE_END = "No output is ever negative: there is a ReLU after the last layer, too."


def _is_deep(result, sizes):
    if not isinstance(result, nn.Module):
        return f"a module was expected, {kind(result)} came"
    wanted = sum(a * b + b for a, b in zip(sizes, sizes[1:]))
    held = sum(p.numel() for p in result.parameters())
    x = noise(200, sizes[0]) * 10
    out = result(x)
    if out.shape != (200, sizes[-1]):
        return f"the output has the shape {tuple(out.shape)}, expected {(200, sizes[-1])}"
    if held != wanted:
        counted = f"these layers have {wanted:,} numbers, and parameters() finds {held:,}"
        return f"{counted}. {_UNREGISTERED}" if held < wanted else counted
    if not (out < 0).any():
        return _RELU_AT_THE_END
    middle = result(torch.zeros(1, sizes[0]))
    if len(sizes) > 2 and torch.allclose(result(x) + result(-x), 2 * middle.expand_as(out), atol=1e-3):
        return _LINEAR_THROUGHOUT
    if len(sizes) == 2 and not torch.allclose(result(x) + result(-x), 2 * middle.expand_as(out), atol=1e-3):
        return "with two sizes it is one linear layer, with no ReLU before or after it"
    out.square().mean().backward()
    if silent := [n for n, p in result.named_parameters() if p.grad is None]:
        return f"the parameter {silent[0]} gets no gradient: the forward pass does not use it"
    result.zero_grad()
    try:
        copy.deepcopy(result).double()(x.double())
    except RuntimeError as error:
        return f"after .double() the forward pass fails: {str(error)[:120]}"
    return None


class _Plain(nn.Module):
    """Layers in a box, with a choice of what comes between and after them."""

    def __init__(self, sizes, box=list, between=F.relu, after=lambda x: x):
        super().__init__()
        self.layers = box(nn.Linear(a, b) for a, b in zip(sizes[:-2], sizes[1:-1]))
        self.last, self.between, self.after = nn.Linear(*sizes[-2:]), between, after

    def forward(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
        return self.after(self.last(x))


DEEP_NETWORK = Exercise(
    lesson=LESSON,
    solution=deep_network,
    hints=(
        "The second and third line show how many parameters the optimizer was given. Which layers are missing? "
        "`print(model)` shows what the module knows of.",
        "A module registers what is assigned to it as an attribute if that is a module or a parameter. A Python list "
        "is neither.",
        "`nn.ModuleList([...])` is a list that registers its layers. The rest can stay.",
    ),
    cases=(
        Case("there is one layer", lambda: ((4, 3),), verify=_is_deep),
        Case("there are two layers", lambda: ((4, 6, 3),), verify=_is_deep),
        Case("there are five layers", lambda: ([3, 8, 8, 8, 8, 4],), verify=_is_deep),
    ),
    mistakes=(
        Mistake(_UNREGISTERED, lambda sizes: _Plain(sizes)),
        Mistake(_LINEAR_THROUGHOUT, lambda sizes: _Plain(sizes, nn.ModuleList, between=lambda x: x)),
        Mistake(_RELU_AT_THE_END, lambda sizes: _Plain(sizes, nn.ModuleList, after=F.relu)),
    ),
)


def fit_probabilities(inputs, targets, classes, steps=100):
    """Train a linear classifier by the mean cross-entropy; returns (probabilities, loss)."""
    model = nn.Linear(inputs.shape[1], classes)  # no softmax: cross_entropy has it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model(inputs).softmax(dim=1).detach(), loss.item()


def _are_probabilities(result, inputs, targets, classes):
    if not isinstance(result, tuple) or len(result) != 2:
        return f"a tuple (probabilities, loss) was expected, {kind(result)} came"
    probabilities, loss = result
    if not isinstance(loss, float):
        return f"the loss should be a float; {kind(loss)} came"
    if not isinstance(probabilities, torch.Tensor) or probabilities.shape != (len(inputs), classes):
        return f"probabilities of shape {(len(inputs), classes)} were expected; {brief(probabilities)} came"
    p = probabilities.detach().double()
    if (p < 0).any() or not torch.allclose(p.sum(dim=1), torch.ones(len(p), dtype=torch.float64), atol=1e-4):
        return f"the rows of the probabilities add up to {p.sum(dim=1).min():.3g} to {p.sum(dim=1).max():.3g}, and should add up to 1"
    own = F.nll_loss(p.clamp_min(1e-12).log(), targets).item()
    if abs(own - loss) > 0.1 * own + 0.01:
        return f"it returns the loss {loss:.3f}; the mean of -log(probability of the target) is {own:.3f}. Those should be one number"
    least = F.nll_loss(made(lambda: fit_probabilities(inputs, targets, classes))[0].log(), targets).item()
    if own > least + 0.05:
        return f"the mean cross-entropy of the probabilities is {own:.3f}; {least:.3f} is within reach"
    return None


def _fit(inputs, targets, classes, loss_of, result=lambda outputs, loss: (outputs.detach(), loss.item())):
    model = nn.Linear(inputs.shape[1], classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(100):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_of(outputs, targets)
        loss.backward()
        optimizer.step()
    return result(model(inputs), loss)


def _twice(outputs, targets):
    return F.cross_entropy(outputs.softmax(dim=1), targets)


def _honest_figure(outputs, loss, targets):
    p = outputs.softmax(dim=1).detach()
    return p, -p[range(len(p)), targets].log().mean().item()


FIT_PROBABILITIES = Exercise(
    lesson=LESSON,
    solution=fit_probabilities,
    hints=(
        "What does `F.cross_entropy` do first with the numbers it is given? Look for *logits* in its documentation.",
        "It takes the softmax of its input. With probabilities as input, the largest share that one of three classes "
        "can get is e / (e + 2): the loss cannot fall below log(e + 2) - 1, however sure the network is.",
        "Train on the outputs of the linear layer, without nn.Softmax, and take the softmax of them for the result. Or "
        "keep the softmax and give its logarithm to `F.nll_loss`.",
    ),
    cases=(
        Case("three classes lie apart", lambda: (*_clusters(3), 3), verify=_are_probabilities, tolerance=1e-6),
        Case("three classes overlap", lambda: (*_clusters(3, each=40, spread=2.5), 3), verify=_are_probabilities, tolerance=1e-6),
        Case("five classes overlap", lambda: (*_clusters(5, each=30, spread=1.5), 5), verify=_are_probabilities, tolerance=1e-6),
    ),
    mistakes=(
        Mistake(
            "The softmax is taken twice: once by the model, once by `F.cross_entropy`, which wants the numbers before "
            "it. The loss has a floor far above 0, and the gradient fades where the network is sure.",
            lambda *a: _fit(*a, _twice, lambda outputs, loss: (outputs.softmax(dim=1).detach(), loss.item())),
        ),
        Mistake(
            "The figure is computed anew and the training is as it was: it still minimises the cross-entropy of a "
            "softmax of a softmax.",
            lambda inputs, targets, classes: _fit(inputs, targets, classes, _twice, lambda o, loss: _honest_figure(o, loss, targets)),
        ),
        Mistake(
            "The result is what the last layer gives, before the softmax. Probabilities are asked for: rows that add "
            "up to 1.",
            lambda *a: _fit(*a, F.cross_entropy),
        ),
        Mistake(
            "`F.nll_loss` wants logarithms. Given probabilities it is minus their mean, which is no cross-entropy.",
            lambda *a: _fit(
                *a, lambda o, t: F.nll_loss(o.softmax(dim=1), t), lambda o, loss: (o.softmax(dim=1).detach(), loss.item())
            ),
        ),
    ),
)

EXERCISES = (
    SGD_STEP,
    CORRECT_PREDICTIONS,
    EVALUATE,
    ACCUMULATED_STEP,
    PARAMETER_GROUPS,
    LR_TRACE,
    HE_INIT,
    CLIP_AND_STEP,
    UNOPTIMIZED,
    BEST_WEIGHTS,
    SEEDED_LOADER,
    TRANSFER_HEAD,
    ACCUMULATE_EPOCH,
    TRAIN_HEAD,
    ATTACH_AND_TRAIN,
    DROPOUT_NETWORK,
    BALANCED_ACCURACY,
    TRAIN_WITH_COSINE,
    DEEP_NETWORK,
    FIT_PROBABILITIES,
)
