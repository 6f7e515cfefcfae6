"""What is wrong with a set-up that does not learn: the checklist of lesson 03 as one call, `examine`, on any project.

Each check measures something and, where the measurement shows a mistake, gives a `Finding`: its name, the evidence, the
cure. The set-up is looked at as it is, and run only as a copy.
"""

import functools
import math
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from course_utils.toolkit.autograd import reached_leaves, walk
from course_utils.toolkit.batches import device_of, to_device
from course_utils.toolkit.rehearsal import first_batches, fit, fresh, left_as_found, plain_attributes, random_states, seeded, twins

CURES = {
    # the optimizer and what it holds
    "nothing to train": "set requires_grad_(True) on the parameters that are to learn",
    "parameters missing from the optimizer": "give them to the optimizer; those that are to stay as they are: requires_grad_(False)",
    "parameters replaced after the optimizer was built": "build the optimizer after the last change to the model, be it a new "
    "layer or load_state_dict(assign=True)",
    "parameters twice in the optimizer": "list each parameter once, as model.parameters() does, shared ones too",
    "frozen parameters in the optimizer": "set requires_grad_(True) where they are to train; otherwise build the optimizer from "
    "[p for p in model.parameters() if p.requires_grad]",
    "layers or parameters that the model does not register": "keep layers in nn.ModuleList or nn.ModuleDict, and make a trainable "
    "tensor an nn.Parameter, assigned as it is",
    # the data
    "values that are not finite": "find where they begin with torch.isfinite, in the samples first: one of them spoils every weight",
    "inputs that are not normalised": "subtract the mean and divide by the standard deviation of the training set, here and "
    "wherever the model is used",
    "labels out of range": "number the classes from 0, with one output for each; probabilities lie between 0 and 1",
    "labels of the wrong dtype": "class numbers are int64: targets.long(); probabilities are floats: targets.float()",
    "a loader that switches gradients off": "let no `yield` stand inside `with torch.no_grad()`: until it goes on, the mode is everyone's",
    "devices that do not go together": "move the whole model with model.to(device), and each batch of CPU tensors to the same device",
    "dtypes that do not go together": "give all parameters one dtype, and inputs the same; token numbers are int64",
    # a step
    "eval mode": "call model.train() before training, and again after each evaluation",
    "frozen BatchNorm that drifts": "keep these layers in eval mode: call eval() on them after each model.train()",
    "softmax twice": "return the scores as they come from the last layer: the loss contains log_softmax",
    "sigmoid before softmax": "return the scores as they come from the last layer: the loss contains log_softmax",
    "sigmoid twice": "return the scores as they come from the last layer: the loss contains the sigmoid",
    "NLLLoss without log_softmax": "end the model with log_softmax, or return scores and use CrossEntropyLoss",
    "a loss that broadcasts": "give outputs and targets one shape, for example with outputs.squeeze(1)",
    "a loss that is not one number": "let it return a tensor of one element: loss.mean(), and no .item()",
    "parameters that the loss never reaches": "use them in forward, and look for detach, no_grad, .data, item, argmax or numpy "
    "between them and the loss",
    "a loss that does not fall on one batch": "try a learning rate ten times lower where the loss rises, higher where it stands; look "
    "at what else the optimizer is told",
    "random in eval mode": "use nn.Dropout, or give the function training=self.training (attention: dropout_p=self.p * self.training)",
    # what the learner's own code raises
    "the forward pass raises": "print shapes, dtypes and ranges before the line that raises",
    "the forward pass in eval mode raises": "print shapes, dtypes and ranges before the line that raises",
    "the loss raises": "print the shapes of outputs and targets",
    "the backward pass raises": "look at what the loss is made of, and for writes in place",
    "a step of the optimizer raises": "look at the gradients and at what the optimizer is told",
}


@dataclass(frozen=True)
class Finding:
    """One mistake: what it is (a key of CURES), what was measured, and what to do."""

    name: str
    evidence: str
    cure: str


class Findings(list):
    """The findings of `examine`: a list that prints as a report."""

    def __repr__(self):
        if not self:
            return "Nothing found. The loop is not looked at: zero_grad, accumulation, the scheduler, the metrics."
        return "\n".join(f"{n}. {f.name}\n   seen: {f.evidence}\n   cure: {f.cure}" for n, f in enumerate(self, 1))


def examine(model, loader, loss_fn, optimizer, batches=8, steps=20):
    """Look for what keeps a set-up from learning; returns `Findings`, an empty list where nothing is wrong.

    loader: a DataLoader, or any iterable that can be gone through again, of batches as `train_epoch` takes them: (inputs,
    targets) or (a, b, …, targets). Its first `batches` are read, without worker processes, and moved to the model's device.
    loss_fn: called as loss_fn(outputs, targets). optimizer: one, or a list of all those that share the model's parameters. Call
    it where training would begin, with every module in the mode that your loop gives it.

    It finds what `CURES` lists. A loss that does not fall, in `steps` steps on one batch, is reported where nothing else
    explains it. Labels and broadcasting are looked at where outputs and targets are one tensor each. It does not see what the
    loop does (zero_grad, accumulation, the scheduler, the metrics), the order of the data, or wrong labels and gradients.

    The set-up is left as it was, whatever happens: parameters, buffers, gradients, flags, hooks, the optimizer's state, and all
    random numbers (see `left_as_found`). It takes the memory of a second model and optimizer. What a dataset, a hook or a
    function remembers by itself is its own. What the model or the loss raises is a finding. Raises TypeError for batches and
    loaders that it cannot read and for what cannot be copied, ValueError for an empty loader.
    """
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    with left_as_found(model, loss_fn, optimizers, loader):
        setup = _Setup(model, loss_fn, optimizers, *first_batches(loader, batches), steps)
        findings = Findings([*_optimizer(setup), *_registration(setup), *_data(setup)])
        if not any(finding.name == "values that are not finite" for finding in findings):
            findings += _step(setup, findings)
    return findings


class _Setup:
    """What a learner hands over."""

    def __init__(self, model, loss_fn, optimizers, batches, gradients_off, steps):
        self.model, self.loss_fn, self.optimizers = model, loss_fn, optimizers
        self.batches, self.gradients_off, self.steps = batches, gradients_off, steps
        self.parameters = dict(model.named_parameters())
        self.trainable = {name: p for name, p in self.parameters.items() if p.requires_grad}
        self.held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self.of_loss = dict(loss_fn.named_parameters(prefix="loss")) if isinstance(loss_fn, nn.Module) else {}
        self.known = {id(p) for p in (*self.parameters.values(), *self.of_loss.values())}


def _found(name, evidence):
    return Finding(name, evidence, CURES[name])


# ── Looked at, without running anything ───────────────────────────────────────────────────────────────────────────────


def _optimizer(setup):
    """Does the optimizer hold the parameters that are to be trained, each once?"""
    held = [id(p) for p in setup.held]
    wanted = setup.trainable | {name: p for name, p in setup.of_loss.items() if p.requires_grad}
    missing = [name for name, p in wanted.items() if id(p) not in held]
    strangers = [tuple(p.shape) for p in setup.held if id(p) not in setup.known]
    twice = [name for name, p in setup.parameters.items() if held.count(id(p)) > 1]
    frozen = [name for name, p in setup.parameters.items() if not p.requires_grad and id(p) in held]
    if setup.parameters and not setup.trainable:
        yield _found("nothing to train", f"requires_grad is False for all {len(setup.parameters)} parameters")
    elif missing and strangers:
        yield _found(
            "parameters replaced after the optimizer was built",
            f"the optimizer holds tensors of shapes {_some(strangers)} that the model does not have, and not its {_some(missing)}",
        )
    elif missing:
        evidence = f"{len(missing)} of {len(wanted)} trainable parameters are in no group: {_some(missing)}"
        yield _found("parameters missing from the optimizer", evidence)
    if twice:
        yield _found("parameters twice in the optimizer", f"a step moves these more than once: {_some(twice)}")
    if frozen and setup.trainable:
        evidence = f"requires_grad is False for {len(frozen)} of the {len(held)} that it holds: {_some(frozen)}"
        yield _found("frozen parameters in the optimizer", evidence)


def _registration(setup):
    """Are there layers or trainable tensors where `parameters()`, `to()` and `eval()` do not look?"""
    registered, hidden = set(setup.model.modules()), []
    for path, value in plain_attributes(setup.model):
        if isinstance(value, nn.Module) and value not in registered:
            numbers = sum(p.numel() for p in value.parameters() if p.requires_grad and id(p) not in setup.known)
            if numbers or any(layer.training and _has_modes(layer) for layer in set(value.modules()) - registered):
                hidden.append(f"{path} ({type(value).__name__}, {numbers} trainable numbers)")
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            if any(id(leaf) not in setup.known for leaf in ([value] if value.is_leaf else reached_leaves(value))):
                hidden.append(f"{path} (a tensor of shape {tuple(value.shape)} that is no parameter)")
    if hidden:
        evidence = f"parameters(), state_dict(), to() and eval() do not reach {_some(hidden)}"
        yield _found("layers or parameters that the model does not register", evidence)


def _has_modes(layer):
    return "Dropout" in type(layer).__name__ or getattr(layer, "running_mean", None) is not None


def _data(setup):
    """Are the numbers finite, and do they come on a device from which they can be moved to the model's?"""
    for what in ("input", "target"):
        values = [batch[what == "target"] for batch in setup.batches]
        if count := sum(_not_finite(x) for x in tree_leaves(values)):
            evidence = f"inf or nan in {count} {what} values of {len(values)} batches"
            yield _found("values that are not finite", evidence)
    if setup.gradients_off:
        yield _found("a loader that switches gradients off", "torch.is_grad_enabled() is False between two of its batches")
    devices = {str(x.device) for x in tree_leaves(setup.batches) if isinstance(x, torch.Tensor)}
    home = str(device_of(setup.model))
    if elsewhere := sorted(devices - {"cpu", home}):
        yield _found("devices that do not go together", f"batches come on {_some(elsewhere)}, the model is on {home}")


def _not_finite(x):
    return int((~torch.isfinite(x)).sum()) if _is_plain(x) else 0


def _is_plain(x):
    """Is it a tensor whose numbers can be looked at: neither sparse nor ragged, and not on the meta device?"""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_nested and not x.is_meta


# ── One step, on copies ───────────────────────────────────────────────────────────────────────────────────────────────


def _step(setup, earlier):
    """What a step shows. Where it raises, that is the last finding: nothing can be measured after it."""
    model, loss_fn, optimizers = twins(setup.model, setup.loss_fn, setup.optimizers)
    findings, doing = [], "the forward pass raises"
    arguments, targets = setup.batches[0]
    try:
        batch = to_device(setup.batches[0], device_of(model))
        arguments, targets = fresh(batch)  # each pass gets its own: a model may write into what it is given
        with _entrances(model) as entered:
            findings += _modes(model, batch)
            statistics = _statistics(model)
            outputs = seeded(model, *arguments)
        findings += _drift(setup, statistics, _statistics(model))
        findings += _scale(entered)

        doing = "the loss raises"
        pair = _is_plain(outputs) and _is_plain(targets)
        if pair and (wrong := list(_labels(setup, loss_fn, outputs.detach(), targets))):
            return findings + wrong
        loss = seeded(loss_fn, outputs, targets)
        if isinstance(loss, torch.Tensor):
            findings += _activation(loss)
        if pair:
            findings += _broadcast(loss_fn, outputs.detach(), targets)
        if unusable := list(_unusable(setup, loss)):
            return findings + unusable
        if not setup.trainable:
            return findings

        doing = "the backward pass raises"
        again = functools.partial(_pass, model, loss_fn)
        unregistered = list(_unregistered(setup, (model, loss_fn, *optimizers), batch, loss, again))
        loss.backward()
        findings += [*_unreached(setup, model, again), *unregistered, *_gradients(model)]
        if not findings and not earlier:
            doing = "a step of the optimizer raises"
            findings += _one_batch(setup, model, batch, loss_fn, optimizers)
        doing = "the forward pass in eval mode raises"
        findings += _random_in_eval(model, batch)
    except Exception as error:  # the learner's own code ran: what it raises is a finding
        findings.append(_raised(doing, error, setup, arguments, targets))
    return findings


def _pass(model, loss_fn, batch):
    """The loss of a batch, with other random numbers each time."""
    arguments, targets = fresh(to_device(batch, device_of(model)))
    return loss_fn(model(*arguments), targets)


def _modes(model, batch):
    """Is something in eval mode that is meant to train? Puts it into train mode, so that what follows sees a training step."""
    asleep, below = [], set()
    for name, module in model.named_modules():
        if not module.training and module not in below:
            below.update(module.modules())
            trains = any(p.requires_grad for p in module.parameters())
            if module is model or (trains and list(module.children())):  # a single BatchNorm in eval mode is meant to be
                asleep.append(name)
    if asleep:
        before = seeded(model, *fresh(batch[0]))
        for name in asleep:
            model.get_submodule(name).train()
        after = seeded(model, *fresh(batch[0]))
        if not _same(before, after):
            names = _some(name or "the whole model" for name in asleep)
            yield _found("eval mode", f"training is False for {names}; train mode changes outputs by up to {_distance(before, after):.3g}")


def _statistics(model):
    layers = {name: layer for name, layer in model.named_modules() if getattr(layer, "running_mean", None) is not None}
    return {name: (layer.running_mean.clone(), layer.running_var.clone()) for name, layer in layers.items()}


def _drift(setup, before, after):
    """Do running statistics move in layers whose parameters are all frozen, while others train?"""
    moved = {}
    for name in before:
        layer = setup.model.get_submodule(name)
        own = [p.requires_grad for p in layer.parameters(recurse=False)]
        if own and not any(own) and layer.training and not _same(before[name], after[name]):
            moved[name] = _distance(before[name], after[name])
    if moved and setup.trainable:
        evidence = f"one forward pass moved the running statistics of {_some(moved)} by up to {max(moved.values()):.3g}"
        yield _found("frozen BatchNorm that drifts", evidence)


@contextmanager
def _entrances(model):
    """Notes name, layer and input of the first two modules with parameters of their own that a forward pass enters.

    Token numbers that an embedding does not have raise IndexError, before a GPU meets them.
    """
    entered = []

    def note(name, layer, arguments):
        x = arguments[0] if arguments and _is_plain(arguments[0]) else None
        if x is None or x.numel() == 0:
            return
        if isinstance(layer, nn.Embedding) and not 0 <= x.min() <= x.max() < layer.num_embeddings:
            given = f"the numbers {x.min()} to {x.max()}"
            raise IndexError(f"{name or 'the model'} (Embedding) is given {given} and has 0 to {layer.num_embeddings - 1}")
        if len(entered) < 2:
            entered.append((name, layer, x.detach().clone()))

    layers = [(name, layer) for name, layer in model.named_modules() if not isinstance(layer, torch.jit.ScriptModule)]
    hooks = [layer.register_forward_pre_hook(functools.partial(note, name)) for name, layer in layers if layer._parameters]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


def _scale(entered):
    """Are the numbers that the first layer receives of a size that its initial weights are made for?"""
    if len(entered) > 1 and entered[0][0] == "":  # the model owns a parameter itself: the first layer in it says more
        entered = entered[1:]
    for name, layer, x in entered[:1]:
        if not x.is_floating_point() or x.dim() < 2 or "Norm" in type(layer).__name__:
            return
        convolves = getattr(layer, "weight", None) is not None and layer.weight.dim() > 2
        features = x.double().movedim(1 if convolves else -1, 0).flatten(1)
        rms = features.square().mean(dim=1).sqrt().max().item()
        if not 0.01 <= rms <= 10:
            yield _found(
                "inputs that are not normalised",
                f"{name or 'the model'} ({type(layer).__name__}) receives values from {x.min():.3g} to {x.max():.3g}; the "
                f"root mean square of a feature reaches {rms:.3g}",
            )


def _unusable(setup, loss):
    """Can backward start here at all?"""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        yield _found("a loss that is not one number", f"the loss function returns {came}")
    elif not loss.requires_grad and setup.trainable:
        yield _found("parameters that the loss never reaches", "the loss has no grad_fn: no parameter has a part in it")
    elif not math.isfinite(loss.item()):
        yield _found("values that are not finite", f"the first loss is {loss.item()}, though all data are finite")


def _unreached(setup, model, again):
    """Which trainable parameters have no gradient after backward, neither the copy's nor the original (which a loss may hold)?"""
    pairs = {name: (p, setup.parameters[name]) for name, p in model.named_parameters() if p.requires_grad}
    names = [name for name, pair in pairs.items() if all(p.grad is None for p in pair)]
    for batch in (setup.batches * 8)[1:8] if names else ():  # some layers are left out by chance, or meet few samples
        reached = {id(leaf) for leaf in reached_leaves(again(batch))}
        names = [name for name in names if not any(id(p) in reached for p in pairs[name])]
    if names:
        evidence = f"after eight passes {len(names)} of {len(setup.trainable)} trainable parameters have no gradient: {_some(names)}"
        yield _found("parameters that the loss never reaches", evidence)


def _unregistered(setup, copies, batch, loss, again):
    """Has the loss trainable parts that neither the model nor an optimizer holds, and has them twice, not made in one pass?"""
    held = [group["params"] for optimizer in copies[2:] for group in optimizer.param_groups]
    modules = [module.parameters() for module in copies[:2] if isinstance(module, nn.Module)]
    expected = {id(x) for x in chain(setup.held, *held, *modules)} | setup.known
    if strangers := [leaf for leaf in reached_leaves(loss) if id(leaf) not in expected]:
        lasting = {id(leaf) for leaf in reached_leaves(again(batch))}
        shapes = [tuple(leaf.shape) for leaf in strangers if id(leaf) in lasting]
        if shapes and not any(_registration(setup)):
            evidence = f"the loss depends on trainable tensors that are none of the model's parameters, of shapes {_some(shapes)}"
            yield _found("layers or parameters that the model does not register", evidence)


def _gradients(model):
    names = [name for name, p in model.named_parameters() if _not_finite(p.grad)]
    if names:
        yield _found("values that are not finite", f"the loss is finite, but not the gradient of {_some(names)}")


def _one_batch(setup, model, batch, loss_fn, optimizers):
    """Does the loss of one batch fall, with the learner's own optimizer?"""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        if group.get("lr") == 0:  # a warm-up begins here
            group["lr"] = group.get("initial_lr", 0)
    rising = any(group.get("lr", 0) < max(group.get("initial_lr", 0), group.get("max_lr", 0)) for group in groups)
    pull = sum((p.grad.to_dense() * p).abs().sum().item() for p in model.parameters() if p.grad is not None)
    losses = fit(model, batch, loss_fn, optimizers, setup.steps)
    size, fall = abs(losses[0]), losses[0] - losses[-1]
    rises = not fall >= -1e-3 * size - 1e-3  # true for nan, too
    stands = fall < 1e-4 * size and pull > 1e-2 * size and not rising  # though the gradients say that there is a way down
    if rises or stands:
        rates = _some(sorted({f"{float(group['lr']):g}" for group in groups if "lr" in group}))
        evidence = f"{losses[0]:.5g} before, {losses[-1]:.5g} after {setup.steps} steps at a learning rate of {rates}"
        yield _found("a loss that does not fall on one batch", evidence)


class _Drops(TorchFunctionMode):
    """Notes the functions that leave something out at random: of dropout's kind, and not, say, what samples a latent code."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        suspect = any(part in name for part in ("dropout", "attention", "bernoulli"))
        before = random_states() if suspect else []
        result = function(*args, **(kwargs or {}))
        if suspect and not all(map(torch.equal, before, random_states())):
            self.names.add(name)
        return result


def _random_in_eval(model, batch):
    """Do two forward passes in eval mode give two results, because something is dropped? Leaves the copy in eval mode."""
    for module in [model, *(value for _, value in plain_attributes(model) if isinstance(value, nn.Module))]:
        module.eval()
    with _Drops() as drops:
        first, second = (model(*fresh(batch[0])) for _ in range(2))
    if drops.names and not _same(first, second):
        drew = f"{_some(sorted(drops.names))} drew random numbers"
        evidence = f"two passes over one batch differ by up to {_distance(first, second):.3g}: {drew}"
        yield _found("random in eval mode", evidence)


def _raised(doing, error, setup, arguments, targets):
    """What to say of a step that raises: the mixture behind it where there is one, otherwise the error's own first line."""
    message = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    modules = [module for module in (setup.model, setup.loss_fn) if isinstance(module, nn.Module)]
    devices = {str(t.device) for module in modules for t in (*module.parameters(), *module.buffers())}
    if len(devices) > 1 or "same device" in message or "expected device" in message:
        return _found("devices that do not go together", f"parameters and buffers lie on {_some(sorted(devices))}. {message}")
    if "type" in message and isinstance(error, RuntimeError):
        if doing in ("the loss raises", "the backward pass raises"):
            return _found("labels of the wrong dtype", f"targets are {_dtypes(targets)}. {message}")
        evidence = f"inputs are {_dtypes(arguments)}, parameters {_dtypes(list(setup.parameters.values()))}. {message}"
        return _found("dtypes that do not go together", evidence)
    return _found(doing, message)


# ── Outputs, labels and the loss ──────────────────────────────────────────────────────────────────────────────────────

LOSSES = {  # by what the targets are
    "classes": (nn.CrossEntropyLoss, F.cross_entropy, nn.NLLLoss, F.nll_loss),
    "yes or no": (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, nn.BCELoss, F.binary_cross_entropy),
    "values": (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss),
}


def _kind(loss_fn):
    """Which of LOSSES it is, a partial function too; None for one of the learner's own."""
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    return next((kind for kind, losses in LOSSES.items() if function in losses or type(function) in losses), None)


def _labels(setup, loss_fn, outputs, targets):
    """Labels of the wrong dtype or range, looked for before the loss sees them: on a GPU they end the process."""
    kind, labels = _kind(loss_fn), [y for _, y in setup.batches if _is_plain(y) and y.numel()]
    if not labels or kind == "values":
        return
    name, low, high = "labels out of range", *_range(labels)
    if kind == "classes" and outputs.dim() > 1 and targets.shape == outputs.select(1, 0).shape:
        options = getattr(loss_fn, "keywords", vars(loss_fn) if isinstance(loss_fn, nn.Module) else {})
        low, high = _range([y[y != options.get("ignore_index", -100)] for y in labels])
        if targets.dtype not in (torch.int64, torch.uint8):
            yield _found("labels of the wrong dtype", f"the class numbers are {_dtypes(targets)}")
        elif low < 0 or high >= outputs.shape[1]:
            evidence = f"labels go from {low:g} to {high:g}; {outputs.shape[1]} outputs stand for the classes 0 to {outputs.shape[1] - 1}"
            yield _found(name, evidence)
    elif kind and targets.dim() == outputs.dim():
        if not targets.is_floating_point():
            yield _found("labels of the wrong dtype", f"the probabilities are {_dtypes(targets)}")
        elif low < 0 or high > 1:
            yield _found(name, f"labels go from {low:g} to {high:g}; this loss takes probabilities")
        elif kind == "classes" and targets.dim() > 1 and ((sums := targets.sum(dim=1)) - 1).abs().max() > 1e-3:
            evidence = f"the probabilities of a sample's classes add up to {sums.min():.3g} to {sums.max():.3g}, not to 1"
            yield _found(name, evidence)
    elif kind is None and targets.dtype == torch.int64 and (error := _refused(loss_fn, outputs.cpu(), targets.cpu())):
        yield _found(name, f"labels go from {low:g} to {high:g}, for outputs of shape {tuple(outputs.shape)}. {error}")


def _range(tensors):
    values = [t.double() for t in tensors if t.numel()]
    return (min(t.min().item() for t in values), max(t.max().item() for t in values)) if values else (0, 0)


def _refused(loss_fn, outputs, targets):
    """What a loss of the learner's own says to these labels, if it takes labels that are all 0."""
    try:
        loss_fn(outputs, torch.zeros_like(targets))
    except Exception:  # not the labels' fault
        return None
    try:
        loss_fn(outputs, targets)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


APPLIED = {  # what a loss does first, and what should not have been done before it
    ("LogSoftmax", "Softmax"): "softmax twice",
    ("LogSoftmax", "Sigmoid"): "sigmoid before softmax",
    ("BinaryCrossEntropyWithLogits", "Sigmoid"): "sigmoid twice",
    ("BinaryCrossEntropyWithLogits", "Softmax"): "sigmoid twice",
}
PASSING = {"View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Select", "ToCopy", "Permute", "Transpose", "T", "Clamp"}


def _activation(loss):
    """Is the activation that the loss applies in the graph already, right before it? Or does the one that it needs lack?"""
    nodes = walk(loss)
    for node in nodes:
        before = node
        while before is node or _operation(before) in PASSING:
            if not before.inputs or before.inputs[0] is None:
                break
            before = nodes[before.inputs[0]]
        name = APPLIED.get((_operation(node), _operation(before)))
        result, scores = dict(before.saved).get("result"), dict(node.saved).get("self")
        if name and result is not None and result.numel():
            if name == "sigmoid twice":
                floor = f"{math.log1p(1 / math.e):.3g} for a label of 1, {math.log(2):.3g} for a label of 0"
            else:
                dim = (node.fn._saved_dim + 2**63) % 2**64 - 2**63  # torch shows -1 as 2**64 - 1
                floor = f"{math.log1p((result.shape[dim] - 1) / math.e):.3g}"
            what = f"the scores come from a {_operation(before).lower()} and lie between {result.min():.3g} and {result.max():.3g}"
            yield _found(name, f"{what}; the loss cannot fall below {floor}")
        if _operation(node) in ("NllLoss", "NllLoss2D") and scores is not None and scores.numel():
            sums = scores.double().logsumexp(dim=min(1, scores.dim() - 1)).exp()
            if (sums - 1).abs().max() > 1e-2:
                evidence = f"the exponentials of a sample's outputs add up to {sums.min():.3g} to {sums.max():.3g}, not to 1"
                yield _found("NLLLoss without log_softmax", evidence)


def _operation(node):
    """SigmoidBackward0 is "Sigmoid"."""
    return node.name.split("Backward")[0]


def _broadcast(loss_fn, outputs, targets):
    """Do outputs and targets of different shapes meet, so that a sample is compared with the targets of others?"""
    kind = _kind(loss_fn)
    if outputs.shape == targets.shape or kind not in ("values", None):
        return
    try:
        together = tuple(torch.broadcast_shapes(outputs.shape, targets.shape))
        if kind is None and not _pairs_all(loss_fn, outputs, targets):
            return
    except Exception:  # they do not meet in one operation, or the loss takes no other outputs than the model's
        return
    evidence = f"outputs {tuple(outputs.shape)} meet targets {tuple(targets.shape)}: the loss is a mean over {together}"
    yield _found("a loss that broadcasts", evidence)


def _pairs_all(loss_fn, outputs, targets):
    """Does the loss depend on the targets, but not on which sample they belong to?"""
    loss, shifted, other = (
        loss_fn(x, y) for x, y in ((outputs, targets), (outputs.roll(1, 0), targets), (outputs, targets[:1].expand_as(targets)))
    )
    return _same(loss, shifted) and not _same(loss, other) and not _same(outputs, outputs.roll(1, 0))


# ── Comparing and saying ──────────────────────────────────────────────────────────────────────────────────────────────


def _pairs(a, b):
    return [(x.float(), y.float()) for x, y in zip(tree_leaves(a), tree_leaves(b)) if _is_plain(x) and _is_plain(y)]


def _same(a, b):
    return all(x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True) for x, y in _pairs(a, b))


def _distance(a, b):
    """The largest difference of two numbers at one place; inf where no shapes agree."""
    return max(((x - y).abs().max().item() for x, y in _pairs(a, b) if x.shape == y.shape and x.numel()), default=math.inf)


def _dtypes(values):
    return _some(sorted({str(x.dtype).removeprefix("torch.") for x in tree_leaves(values) if isinstance(x, torch.Tensor)}))


def _some(items, most=4):
    items = [str(item) for item in items]
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")
