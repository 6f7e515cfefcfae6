"""Trying out a training set-up on copies, so that nothing of it is different afterwards."""

import copy
import functools
import inspect
import random
import types
import warnings
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Sampler

from course_utils.toolkit.batches import device_of, split_batch, to_device

SEED = 0


def overfit_one_batch(model, batch, loss_fn, optimizer, steps=100):
    """The losses of `steps` steps on one batch, each taken before its step: a list of floats. A sound set-up comes near 0.

    It trains a copy: model, optimizer, gradients and random numbers stay as they are. batch: (inputs, targets), as for
    `train_epoch`. optimizer: the one that holds the model's parameters (its copy goes on from its state), or a function
    from parameters to a new optimizer, such as `torch.optim.Adam`. Every step draws the same random numbers: dropout leaves
    out the same units each time, and all steps lower one fixed function. Modes stay as they are.
    """
    given = isinstance(optimizer, torch.optim.Optimizer)
    with left_as_found(model, loss_fn, [optimizer] if given else [], loader=None):
        model, loss_fn, optimizers = twins(model, loss_fn, [optimizer] if given else [])
        optimizers = optimizers or [optimizer(model.parameters())]
        return fit(model, to_device(split_batch(batch), device_of(model)), loss_fn, optimizers, steps)


def fit(model, batch, loss_fn, optimizers, steps):
    """Train in place on one batch, with the same random numbers in each step; returns the losses, each before its step."""

    def closure():
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.clear_autocast_cache()  # called inside autocast, the model would keep the cast weights of the first step
        arguments, targets = fresh(batch)
        loss = seeded(lambda: loss_fn(model(*arguments), targets))
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        losses.append(float(closure()))
        for optimizer in optimizers:
            optimizer.step(*[closure] * _asks_for_closure(optimizer))
    return losses


def fresh(values):
    """The same structure with its tensors cloned: a model may write into what it is given."""
    return tree_map_only(torch.Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), values)


def _asks_for_closure(optimizer):
    """Must `step` be given a function that computes the loss anew, as LBFGS must?"""
    first = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    return first is not None and first.default is first.empty and first.kind is first.POSITIONAL_OR_KEYWORD


def seeded(function, *arguments):
    """Call a function from a fixed state of all random numbers, so that two calls can be compared."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return function(*arguments)


def twins(model, loss_fn, optimizers):
    """Deep copies that belong together: the copied optimizers hold the copied parameters. A loss that is no module stays.

    Raises TypeError where something in them cannot be copied.
    """
    memo = {}
    for _, value in plain_attributes(model):
        if isinstance(value, torch.Tensor) and value.is_inference():  # a copy would hide that no graph may hold it
            memo[id(value)] = value
        elif isinstance(value, torch.Tensor) and value.grad_fn is not None:  # left by an earlier pass: it refuses to be copied
            memo[id(value)] = value.detach().clone()
    copied = isinstance(getattr(loss_fn, "__self__", loss_fn), nn.Module)
    try:
        model, loss, twin_optimizers = copy.deepcopy((model, loss_fn if copied else None, optimizers), memo)
        for original, twin in zip(optimizers, twin_optimizers):  # an optimizer's copy lacks what LBFGS and others add to it
            lost = {key: value for key, value in vars(original).items() if key not in vars(twin) and not callable(value)}
            vars(twin).update(copy.deepcopy(lost, memo))
    except Exception as error:
        message = "the model, the loss and the optimizer must allow copy.deepcopy"
        raise TypeError(f"{message}, which raised {type(error).__name__}: {error}") from error
    return model, loss if copied else loss_fn, twin_optimizers


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def plain_attributes(model):
    """(path, value) of modules and tensors that a module keeps unregistered: as attributes, in lists, tuples, sets, dicts."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _MODULE_ATTRIBUTES:
                yield from _inside(value, f"{name}.{key}" if name else key, depth=4)


def _inside(value, path, depth):
    if isinstance(value, (nn.Module, torch.Tensor)):
        yield path, value
    elif depth and isinstance(value, (dict, list, tuple, set)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _inside(item, f"{path}[{key!r}]", depth - 1)


def first_batches(loader, count):
    """The first batches as [(arguments, targets), …], and whether the loader left gradients switched off at one of them.

    They are read in this process, whatever workers the loader has. Raises TypeError for an iterator, which would be used up, and
    ValueError where there is no batch.
    """
    if hasattr(loader, "__next__"):
        raise TypeError("the loader is an iterator, whose batches would be used up: give a DataLoader or a list of batches")
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        vars(loader).update(num_workers=0, prefetch_factor=None, persistent_workers=False, pin_memory=False, timeout=0, _iterator=None)
    batches, off = [], False
    for batch in islice(iter(loader), count):
        batches.append(split_batch(batch))
        off = off or not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    if not batches:
        raise ValueError("the loader gave no batch")
    return batches, off


@contextmanager
def left_as_found(model, loss_fn, optimizers, loader):
    """Random numbers, gradients, buffers and training flags are afterwards what they were. Inside there are no gradients, and no warnings.

    The random numbers are those of Python, numpy, torch (CPU and CUDA), and of generators that the loader holds; what its samplers
    count is put back, too.
    """
    modules = [module for module in (model, loss_fn) if isinstance(module, nn.Module)]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers() if not b.is_meta]
    tensors = [p for module in modules for p in module.parameters()]
    tensors += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    gradients = [(p, p.grad) for p in {id(p): p for p in tensors}.values()]
    flags = [(layer, layer.training) for module in modules for layer in module.modules()]
    put_back = [_rewind(generator) for generator in _generators(loader)]
    put_back += [functools.partial(random.setstate, random.getstate()), functools.partial(np.random.set_state, np.random.get_state())]
    cpu, *gpus = random_states()
    put_back += [functools.partial(torch.set_rng_state, cpu), functools.partial(torch.cuda.set_rng_state_all, gpus)]
    try:
        with torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for p, _ in gradients:
                p.grad = None
            yield
    finally:
        for p, gradient in gradients:
            p.grad = gradient
        for buffer, was in buffers:
            if not torch.equal(buffer, was):  # a loss or a patched forward has run the model itself
                buffer.detach().copy_(was)
        for layer, training in flags:
            layer.training = training
        for restore in put_back:
            restore()


def random_states():
    """The states of torch's own generators, the CPU's first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def _rewind(generator):
    """A function that gives a generator, or a sampler, its present state back."""
    if isinstance(generator, Sampler):
        return functools.partial(vars(generator).update, dict(vars(generator)))
    if isinstance(generator, np.random.Generator):
        return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())


def _generators(root):
    """The random generators, and the samplers, that an object, its attributes and theirs hold: a loader, its samplers, its dataset."""
    found, seen, todo = [], set(), [(root, 0)]
    while todo:
        value, depth = todo.pop(0)  # the nearest first, so that the depth is the shortest way
        if id(value) in seen or depth > 4:
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, Sampler)):
            found.append(value)
        if isinstance(value, (list, tuple)) and len(value) < 100:
            todo += [(item, depth + 1) for item in value]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType, torch.Tensor, nn.Module)):
            todo += [(item, depth + 1) for item in vars(value).values()]
    return found
