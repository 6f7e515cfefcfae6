"""The training loop: one honest epoch, the figures around it, and the pieces that a run is made of.

A model takes the inputs of a batch and returns outputs; `loss_fn(outputs, targets)` is a mean over the batch, as PyTorch's
losses are by default; a batch is (inputs, targets). What looks into a set-up that does not learn is `examine`.
"""

import copy
import math
import os
import random
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import nn

from course_utils.toolkit.batches import device_of, split_batch, to_device
from course_utils.toolkit.examine import Finding, Findings, examine
from course_utils.toolkit.rehearsal import overfit_one_batch

__all__ = [
    "EarlyStopping",
    "Epoch",
    "Finding",
    "Findings",
    "accumulated_step",
    "clip_and_step",
    "correct_predictions",
    "evaluate",
    "examine",
    "he_init_",
    "lr_trace",
    "overfit_one_batch",
    "parameter_groups",
    "seed_everything",
    "seeded_loader",
    "train_epoch",
    "transfer_head",
    "unoptimized",
]

# ── One epoch ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Epoch:
    """What one pass over a loader gave.

    loss: mean over all samples. accuracy: share of right predictions, for outputs (N, C) and class numbers (N,), otherwise None.
    samples: how many were counted. steps, learning_rates, gradient_norms: of the optimizer's steps, in order; the norms,
    taken before clipping, are there only where `max_norm` was given. A pass of `evaluate` has no steps.
    """

    loss: float
    accuracy: float | None
    samples: int
    steps: int = 0
    learning_rates: list[float] = field(default_factory=list, repr=False)
    gradient_norms: list[float] = field(default_factory=list, repr=False)


def train_epoch(
    model,
    loader,
    loss_fn,
    optimizer,
    *,
    scheduler=None,
    step_per=None,
    accumulate=1,
    count=len,
    max_norm=None,
    device=None,
    progress=False,
    on_step=None,
):
    """Train `model` on every batch of `loader` once, in train mode, and return an `Epoch`.

    scheduler, step_per: the unit of a scheduler is explicit: "batch" steps it after each step of the optimizer, "epoch"
    once at the end. A ReduceLROnPlateau is given the training loss; to give it another score, step it yourself.
    accumulate: batches for each step of the optimizer. The gradient is that of one batch made of them all, whatever
    their sizes; the last, incomplete window is a step of its own. Its batches are held together, on the loader's device.
    count: what a batch counts for, from its targets: `len` counts the samples of a tensor; for a mean over tokens, count those.
    A batch that counts 0 is passed over.
    max_norm: clip the gradients' total norm to this; `math.inf` measures without clipping.
    device: where batches go; None is where the model is.
    on_step: called as on_step(step, loss, rate, norm) after each step: its number in this epoch from 0 on, the loss and the
    learning rate (of the first group) that it used, and the norm before clipping, None without `max_norm`.

    Raises ValueError for a scheduler that has no unit, belongs to another optimizer or waits for a score that rises, for numbers
    outside their range and for an empty loader; TypeError where `count` has to be given; RuntimeError before a step whose
    gradient norm is not finite (with `max_norm`).
    """
    if (scheduler is None) != (step_per is None) or step_per not in (None, "batch", "epoch"):
        raise ValueError('a scheduler needs its unit, step_per="batch" or step_per="epoch", and the unit a scheduler')
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("the scheduler was made with another optimizer, whose rate it changes")
    if _follows_a_score(scheduler) and scheduler.mode == "max":
        raise ValueError('a ReduceLROnPlateau with mode="max" waits for a score that rises: step it yourself, with that score')
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate}: a step needs at least one batch")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: the norm that is allowed is positive")
    device = device_of(model) if device is None else device
    tally, rates, norms = _Tally(), [], []
    model.train()
    for window in _windows(_with_progress(loader, progress), accumulate, count):
        optimizer.zero_grad()
        loss = _backward(model, window, loss_fn, device, tally)
        rate, norm = optimizer.param_groups[0]["lr"], None
        if max_norm is None:
            optimizer.step()
        else:
            norm = clip_and_step([p for group in optimizer.param_groups for p in group["params"]], optimizer, max_norm)
            norms.append(norm)
        if on_step is not None:
            on_step(len(rates), loss.item(), rate, norm)
        rates.append(rate)
        if step_per == "batch":
            _advance(scheduler, loss)
    epoch = tally.epoch(steps=len(rates), learning_rates=rates, gradient_norms=norms)
    if step_per == "epoch":
        _advance(scheduler, epoch.loss)
    return epoch


def evaluate(model, loader, loss_fn, *, count=len, device=None, progress=False):
    """Loss and accuracy of `model` over `loader`, as an `Epoch` without steps, in eval mode and without gradients.

    Every module's own training flag is afterwards what it was, also when something raises. The loss is weighted by `count`
    of the targets, so that a short last batch counts for what it holds. Raises ValueError for an empty loader.
    """
    device, tally = device_of(model) if device is None else device, _Tally()
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            for batch in _with_progress(loader, progress):
                arguments, targets = to_device(split_batch(batch), device)
                if n := _counted(count, targets):
                    outputs = model(*arguments)
                    tally.add(loss_fn(outputs, targets), outputs, targets, n)
    finally:
        for module, mode in modes:
            module.training = mode
    return tally.epoch()


def _windows(loader, accumulate, count):
    """Lists of up to `accumulate` batches, as [(arguments, targets, count)], without those that count nothing."""
    batches = iter(loader)
    while window := list(islice(batches, accumulate)):
        counted = [(*split_batch(batch), _counted(count, batch[-1])) for batch in window]
        if counted := [batch for batch in counted if batch[2]]:
            yield counted


def _counted(count, targets):
    if count is len and not isinstance(targets, torch.Tensor):
        raise TypeError(f"targets are a {type(targets).__name__}: say how many samples, with count=lambda targets: …")
    return int(count(targets))


def _backward(model, window, loss_fn, device, tally):
    """Backward for each batch of a window, weighted by its share of the whole; returns the loss of the whole, detached."""
    total, whole = sum(n for *_, n in window), 0.0
    for arguments, targets, n in window:
        arguments, targets = to_device(arguments, device), to_device(targets, device)
        outputs = model(*arguments)
        loss = loss_fn(outputs, targets)
        (loss * (n / total)).backward()
        tally.add(loss, outputs, targets, n)
        whole = whole + loss.detach() * (n / total)
    return whole


class _Tally:
    """Sums over an epoch. Figures stay on their device until the end: reading one makes the program wait for the GPU."""

    def __init__(self):
        self.losses, self.right, self.counts = [], [], []

    def add(self, loss, outputs, targets, n):
        self.losses.append(loss.detach().reshape(()))
        self.counts.append(n)
        classes = isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor) and targets.dtype == torch.int64
        if classes and outputs.dim() == 2 and outputs.shape[1] > 1 and targets.shape == outputs.shape[:1]:
            self.right.append((outputs.detach().argmax(dim=1) == targets).sum())

    def epoch(self, **steps):
        samples = sum(self.counts)
        if samples == 0:
            raise ValueError("the loader gave no samples")
        loss = sum(loss * n for loss, n in zip(torch.stack(self.losses).tolist(), self.counts)) / samples
        accuracy = torch.stack(self.right).sum().item() / samples if len(self.right) == len(self.losses) else None
        return Epoch(loss, accuracy, samples, **steps)


def _advance(scheduler, loss):
    if _follows_a_score(scheduler):
        scheduler.step(loss)
    else:
        scheduler.step()


def _follows_a_score(scheduler):
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def _with_progress(loader, progress):
    if not progress:
        return loader
    from tqdm.auto import tqdm

    return tqdm(loader, leave=False)


def correct_predictions(outputs, targets):
    """How many rows of `outputs`, floats (N, C), have their largest value at the class in `targets`, int64 (N,): an int.

    Raises ValueError where the shapes are others: (N, 1) against (N,) would compare every row with every target.
    """
    if outputs.dim() != 2 or targets.shape != outputs.shape[:1]:
        raise ValueError(f"outputs (N, C) and targets (N,) are needed, not {tuple(outputs.shape)} and {tuple(targets.shape)}")
    return int((outputs.argmax(dim=1) == targets).sum())


# ── One step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def accumulated_step(model, micro_batches, loss_fn, optimizer):
    """One step of the optimizer whose gradient is that of all micro-batches as one batch; returns that batch's loss, a float.

    micro_batches: any iterable of (inputs, targets), of equal sizes or not, gone through once; an empty one counts nothing.
    loss_fn: a mean over its samples. Gradients left from before are cleared first. One graph is alive at a time, so the
    memory is that of the largest micro-batch. BatchNorm still sees each micro-batch by itself. Raises ValueError where
    there is no sample.
    """
    micro_batches = [(inputs, targets) for inputs, targets in micro_batches if len(targets)]
    total = sum(len(targets) for _, targets in micro_batches)
    if total == 0:
        raise ValueError("the micro-batches hold no sample")
    optimizer.zero_grad()
    whole = 0.0
    for inputs, targets in micro_batches:
        loss = loss_fn(model(inputs), targets) * (len(targets) / total)
        loss.backward()
        whole += loss.item()
    optimizer.step()
    return whole


def clip_and_step(parameters, optimizer, max_norm):
    """Scale the gradients down to a total norm of `max_norm` where it is larger, step the optimizer, and return the norm.

    parameters: an iterable, gone through once; those without a gradient count nothing. The norm, a float, is the 2-norm of
    all gradients as one vector, before clipping. Raises RuntimeError where it is inf or nan, with no step taken and the
    gradients as they were: scaling by such a norm makes them 0 and nan. Gradients are not cleared.
    """
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    optimizer.step()
    return norm.item()


# ── What the optimizer is given, and at which rate ────────────────────────────────────────────────────────────────────


def parameter_groups(module, weight_decay):
    """Two parameter groups for an optimizer: what decays, then what does not; every trainable parameter is in one of them.

    Parameters of two or more dimensions (matrices, kernels, embeddings) get `weight_decay`; those of fewer (biases, the
    scales of normalisation layers) get 0.0. Frozen parameters are left out, a shared one comes once, and a group may be empty.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]


def unoptimized(model, optimizer):
    """Names of the model's trainable parameters that no group of the optimizer holds, in the model's order.

    Identity decides, not equality: an optimizer that still holds a replaced parameter does not hold the new one, whatever
    its values. A frozen parameter needs no optimizer.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]


def lr_trace(make_scheduler, steps, lr=1.0):
    """The learning rates that `steps` steps would use: a list of floats, without any model.

    make_scheduler: takes an optimizer (SGD with this `lr` and momentum 0.9) and returns a scheduler, which is stepped once
    after each step of the optimizer; what one step is, a batch or an epoch, is up to you. Some schedulers, such as
    OneCycleLR, set a rate of their own. Raises ValueError for ReduceLROnPlateau, whose rate depends on the run.

    >>> lr_trace(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), steps=5)
    [1.0, 1.0, 0.5, 0.5, 0.25]
    """
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    scheduler = make_scheduler(optimizer)
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError("the rate of ReduceLROnPlateau follows a score: there is none without training")
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


# ── Where a model begins ──────────────────────────────────────────────────────────────────────────────────────────────


def he_init_(module):
    """Initialise every Linear and Conv2d in `module`, itself included, for ReLU; in place, and returns the module.

    Weights are drawn from a normal distribution with mean 0 and standard deviation sqrt(2 / fan_in), where fan_in is the
    number of inputs that one output adds up; biases, where there are any, become 0. Other layers stay as they are. The
    draws come from torch's global generator. He, Zhang, Ren, Sun: Delving Deep into Rectifiers (2015), equation 10.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                fan_in = layer.weight[0].numel()  # one output's weights; grouped convolutions have fewer
                layer.weight.normal_(0.0, math.sqrt(2 / fan_in))
                if layer.bias is not None:
                    layer.bias.zero_()
    return module


def transfer_head(model, classes):
    """Turn a trained classifier into one for other classes: all frozen but a new last Linear; returns what trains, a list.

    In place. Every parameter is frozen; the last Linear in the model's order is replaced by a new one, with `classes` outputs
    and the same inputs, bias, dtype and device, whose parameters are returned. Layers with running statistics
    (BatchNorm) run in eval mode from now on, also after `model.train()`, so that nothing of the trunk drifts. That is done by
    a hook on each; it cannot be pickled: save the state_dict. Raises ValueError where there is no Linear to replace.
    """
    linears = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name]
    if not linears:
        raise ValueError("the model holds no Linear layer to replace")

    def stay_in_eval(layer, inputs):  # returns None: the inputs stay as they are
        layer.eval()

    model.requires_grad_(False)
    for layer in model.modules():
        if getattr(layer, "running_mean", None) is not None:
            layer.eval()
            layer.register_forward_pre_hook(stay_in_eval)

    *path, name = linears[-1].split(".")
    old = model.get_submodule(linears[-1])
    head = nn.Linear(old.in_features, classes, old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)
    setattr(model.get_submodule(".".join(path)), name, head)
    return list(head.parameters())


# ── The same run twice, and the best of a run ─────────────────────────────────────────────────────────────────────────


def seed_everything(seed, deterministic=False):
    """Seed Python's, numpy's and torch's global generators, on all devices; returns a torch.Generator for a DataLoader.

    deterministic: also refuse operations that have no deterministic version (they raise RuntimeError), and let cuDNN
    choose none by timing. It stays on for the whole process.

    What it cannot promise: equal bits with another version of torch, another device or another number of threads; the order
    of a loader with another `num_workers`, where its samples draw random numbers; generators that a program makes for itself
    (numpy's default_rng); the order of sets of strings (PYTHONHASHSEED, before Python starts). And one random number more,
    anywhere, shifts all that follow. Raises ValueError outside 0 ≤ seed < 2**32, which is numpy's range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed} is outside 0 ≤ seed < 2**32, which numpy takes")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return torch.Generator().manual_seed(seed)


def seeded_loader(dataset, batch_size, seed):
    """A shuffling DataLoader whose orders follow from `seed` alone.

    Made again, it gives the same orders, epoch by epoch; a later epoch has another order than the first. It has a
    generator of its own: it neither reads nor moves torch's global one.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, generator=generator)


class EarlyStopping:
    """Remembers the best weights of a run, as copies, and says when to stop.

        stopping = EarlyStopping(patience=3)
        while not stopping.step(evaluate(model, loader, loss_fn).loss, model):
            train_epoch(…)
        stopping.restore(model)

    patience: how many scores in a row may bring no improvement before `step` says stop. mode: "min" for a loss, "max" for an
    accuracy. min_delta: how much better than the best a score must be. A score of nan is no improvement.
    best: the best score, None before there is one.
    """

    def __init__(self, patience, mode="min", min_delta=0.0):
        if patience < 1 or mode not in ("min", "max") or not min_delta >= 0:
            raise ValueError('patience is at least 1, mode "min" or "max", min_delta not negative')
        self.patience, self.mode, self.min_delta = patience, mode, min_delta
        self.best, self.waited, self._weights = None, 0, None

    def step(self, score, model):
        """Take in a score and the model that reached it; True when it is time to stop."""
        score = float(score)
        gain = math.inf if self.best is None else (score - self.best) * (1 if self.mode == "max" else -1)
        if not math.isnan(score) and gain > self.min_delta:
            self.best, self.waited = score, 0
            self._weights = copy.deepcopy(model.state_dict())  # state_dict alone refers to the weights that train on
        else:
            self.waited += 1
        return self.waited >= self.patience

    def restore(self, model):
        """Give the model the best weights and buffers. Raises RuntimeError where no score has been taken in."""
        if self._weights is None:
            raise RuntimeError("there are no best weights yet: no score was a number")
        model.load_state_dict(self._weights)
