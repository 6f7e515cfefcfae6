"""Networks, a data set and whole recipes that lessons, worker processes and the bench share.

The quick-starts are the first programs that well-known introductions teach, as networks, rates and batch sizes; `race` runs any recipe
against the clock.
"""
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from course_utils.toolkit.training import parameter_groups


class Noisy(torch.utils.data.Dataset):
    """Images, each with noise of standard deviation `std` drawn anew at every access, from torch's global generator, and their labels."""

    def __init__(self, images, labels, std=0.5):
        self.images, self.labels, self.std = images, labels, std

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        return image + self.std * torch.randn_like(image), self.labels[index]


# ── Networks for (N, channels, 28, 28) ────────────────────────────────────────────────────────────────────────────────


def perceptron(channels=1, classes=10):
    """Two hidden layers of 512."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * 784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, classes)
    )


def plain_convnet(channels=1, classes=10):
    """Two convolutions, each with a pooling, and two linear layers; no normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, classes),
    )


def small_vgg(channels=1, classes=10, width=10):
    """Twice two convolutions and a pooling, then one linear layer."""
    layers = []
    for inputs in (channels, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(49 * width, classes))


def convnet(channels=1, classes=10, widths=(16, 32, 64), pool_first=True):
    """Three blocks of convolution, pooling, BatchNorm and ReLU, then one linear layer.

    The maximum commutes with ReLU, so pooling may come first: BatchNorm and ReLU then work on a quarter of the numbers.
    """
    layers = []
    for inputs, outputs in zip((channels, *widths), widths):
        normalised = [nn.BatchNorm2d(outputs), nn.ReLU()]
        pooled = [nn.MaxPool2d(2), *normalised] if pool_first else [*normalised, nn.MaxPool2d(2)]
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), *pooled]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(9 * widths[-1], classes))


# ── Recipes against the clock ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Recipe:
    """Everything that decides how a run goes, except the data.

    normalise: subtract the training images' mean and divide by their standard deviation. epochs: the length of the rate's one cycle
    (OneCycleLR, whose highest rate the optimizer was made with); None keeps the rate constant and has no end of its own.
    """

    network: Callable  # () -> module
    optimizer: Callable  # module -> optimizer
    batch: int
    normalise: bool = True
    epochs: int | None = None


def sgd(rate):
    return lambda network: torch.optim.SGD(network.parameters(), lr=rate)


def adam(rate):
    return lambda network: torch.optim.Adam(network.parameters(), lr=rate)


def adamw(rate):
    return lambda network: torch.optim.AdamW(parameter_groups(network, weight_decay=0.05), lr=rate)


QUICK_STARTS = {
    "MLP, SGD 0.001": Recipe(perceptron, sgd(1e-3), batch=64, normalise=False),
    "small VGG-like net, SGD 0.1": Recipe(small_vgg, sgd(0.1), batch=32, normalise=False),
    "plain conv net, Adam 0.001": Recipe(plain_convnet, adam(1e-3), batch=64, normalise=False),
}
FINAL = Recipe(convnet, adamw(0.01), batch=50, epochs=3)


@dataclass(frozen=True)
class Run:
    """What a race gave: steps taken, their seconds (without the evaluations), the last accuracy on the test images, and the seconds after
    which `target` was first seen, None where it was not."""

    steps: int
    seconds: float
    accuracy: float
    reached: float | None


def race(recipe, data, seconds, target=0.97, every=20, stop=False, seed=0):
    """Train by a recipe on a `Split` for at most `seconds` of training, with a look at the test images after `every` steps.

    The looks do not count as training. `stop` ends the run at the target. The images may be uint8 (N, 28, 28) or (N, C, 28, 28).
    """
    torch.manual_seed(seed)
    train, test = (_floats(images) for images in (data.train_images, data.test_images))
    if recipe.normalise:
        mean, std = train.mean(), train.std()
        train, test = (train - mean) / std, (test - mean) / std
    network = recipe.network()
    optimizer = recipe.optimizer(network)
    schedule, left = None, None
    if recipe.epochs is not None:
        left = recipe.epochs * -(-len(train) // recipe.batch)
        schedule = OneCycleLR(optimizer, max_lr=optimizer.param_groups[0]["lr"], total_steps=left)
    steps, spent, reached = 0, 0.0, None
    while spent < seconds and steps != left and not (stop and reached):
        for batch in torch.randperm(len(train)).split(recipe.batch):
            began = time.perf_counter()
            loss = F.cross_entropy(network(train[batch]), data.train_labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            steps, spent = steps + 1, spent + time.perf_counter() - began
            if steps % every == 0 and reached is None and _accuracy(network, test, data.test_labels) >= target:
                reached = spent
            if spent >= seconds or (stop and reached):
                break
    return Run(steps, spent, _accuracy(network, test, data.test_labels), reached)


def _floats(images):
    return (images[:, None] if images.dim() == 3 else images) / 255


def _accuracy(network, images, labels):
    network.eval()
    with torch.no_grad():
        accuracy = (network(images).argmax(dim=1) == labels).float().mean().item()
    network.train()
    return accuracy
