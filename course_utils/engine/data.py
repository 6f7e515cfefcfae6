"""load: the course's data as tensors, with a stratified, seeded split."""
import dataclasses
import hashlib
import http.client
import pathlib

import numpy as np
import torch

DIGITS = pathlib.Path(__file__).resolve().parents[2] / "data" / "digits.npz"
DIGITS_SHA256 = "a726012be374a1b1dfa0280e806b75e5e07d3ec17e08273236c3730ab36dbd13"


@dataclasses.dataclass(frozen=True)
class Split:
    """Images (N, 28, 28) or (N, C, H, W), uint8, and labels (N,), int64, in a training and a test part."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load(name, test_fraction=0.2, seed=0):
    """A data set, split: the same classes in the same proportion in both parts, the same split for the same seed.

    "digits": 5,000 MNIST digits, 500 of each class, from the file in `data/`; needs no network. "colour_digits": the same, each in a colour
    of its own on a background of another, (N, 3, 28, 28); the colours say nothing about the class. "fashion_mnist" and "cifar10" are
    fetched by torchvision once and kept; without a network that is said. Raises ValueError for an unknown name, a fraction outside (0, 1)
    or a damaged file, ConnectionError where there is no network.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction lies between 0 and 1, not {test_fraction}")
    if name == "digits":
        images, labels = _digits(DIGITS)
    elif name == "colour_digits":
        images, labels = _digits(DIGITS)
        images = _coloured(images)
    elif name in ("fashion_mnist", "cifar10"):
        images, labels = _torchvision(name)
    else:
        raise ValueError(f"there is no data set {name!r}; there are digits, colour_digits, fashion_mnist and cifar10")
    return _split(images, labels, test_fraction, seed)


def _digits(path):
    if not path.is_file():
        raise ValueError(f"{path} is missing; `git checkout data/digits.npz` brings it back")
    if hashlib.sha256(path.read_bytes()).hexdigest() != DIGITS_SHA256:
        raise ValueError(f"{path} is damaged: its SHA-256 is not the recorded one; `git checkout data/digits.npz` brings it back")
    with np.load(path) as file:
        return torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()


def _coloured(images):
    """uint8 (N, 3, H, W) of (N, H, W): ink and ground of each image are random colours, a third of the range apart or more."""
    generator = torch.Generator().manual_seed(0)
    ink, ground = torch.rand(2, len(images), 3, generator=generator)
    ground = torch.where((ink.mean(1) > 0.5)[:, None], 0.33 * ground, 0.67 + 0.33 * ground)
    ink = torch.where((ink.mean(1) > 0.5)[:, None], 0.67 + 0.33 * ink, 0.33 * ink)
    weight = images[:, None] / 255
    mixed = weight * ink[:, :, None, None] + (1 - weight) * ground[:, :, None, None]
    return (255 * mixed).round().byte()


def _torchvision(name):
    import platformdirs
    import torchvision

    source = {"fashion_mnist": torchvision.datasets.FashionMNIST, "cifar10": torchvision.datasets.CIFAR10}[name]
    folder = platformdirs.user_cache_dir("pytorch-measured")
    try:
        parts = [source(folder, train=train, download=True) for train in (True, False)]
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        # urllib's errors are OSErrors; torchvision raises RuntimeError when every mirror failed or the file is not the expected one
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ConnectionError(
            f"{name} is fetched from the network at first use, and that failed ({said}). "
            'No lesson needs it: load("digits") works without a network.'
        ) from None
    images = [torch.as_tensor(part.data) for part in parts]
    images = [i.permute(0, 3, 1, 2) if i.dim() == 4 else i for i in images]
    return torch.cat(images), torch.cat([torch.as_tensor(part.targets) for part in parts])


def _split(images, labels, test_fraction, seed):
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    test = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        test[members[: round(test_fraction * len(members))]] = True
    train_order, test_order = order[~test[order]], order[test[order]]
    return Split(images[train_order], labels[train_order], images[test_order], labels[test_order])
