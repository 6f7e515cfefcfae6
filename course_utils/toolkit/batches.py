"""Batches as a training loop meets them: told apart into inputs and targets, moved to where the model is."""

from itertools import chain

import torch


def split_batch(batch):
    """The inputs and the targets of one batch: `(arguments, targets)`, such that the model is called as `model(*arguments)`.

    A batch is a tuple or list whose last element holds the targets and whose others are the model's arguments:
    (images, labels), or (tokens, lengths, labels). Raises TypeError for anything else.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise TypeError(
            f"a batch is (inputs, targets), or (a, b, …, targets) for a model that takes several inputs; this one is "
            f"{type(batch).__name__}. Wrap the loader: [(batch['image'], batch['label']) for batch in loader]"
        )
    *arguments, targets = batch
    return arguments, targets


def to_device(value, device):
    """The same value with every tensor in it on `device`, through tuples, lists, dicts and whatever else has `.to`.

    From pinned memory the copy to a GPU is asynchronous (`non_blocking`); from other memory that changes nothing.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(to_device(item, device) for item in value)
    return value.to(device) if hasattr(value, "to") else value


def device_of(module):
    """The device of a module's first parameter, or buffer; the CPU where it has neither."""
    return next((tensor.device for tensor in chain(module.parameters(), module.buffers())), torch.device("cpu"))
