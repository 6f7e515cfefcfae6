"""load: real digits, stratified and seeded; a damaged file, an unknown name and a missing network are said."""
import http.client
import os
import subprocess
import sys
import urllib.error

import pytest
import torch
import torchvision

from course_utils.engine import data
from course_utils.engine.progress import REPO


def rows(images, labels):
    """Each image with its label as one hashable thing."""
    return sorted(image.numpy().tobytes() + bytes([label]) for image, label in zip(images, labels.tolist(), strict=True))


def test_the_digits():
    split = data.load("digits")
    assert split.train_images.shape == (4000, 28, 28) and split.test_images.shape == (1000, 28, 28)
    assert split.train_images.dtype == split.test_images.dtype == torch.uint8
    assert split.train_labels.dtype == split.test_labels.dtype == torch.int64
    assert split.train_labels.bincount().tolist() == [400] * 10 and split.test_labels.bincount().tolist() == [100] * 10
    assert split.train_images.max() == 255 and split.train_images.min() == 0


def test_the_two_parts_are_the_whole_and_share_nothing():
    images, labels = data._digits(data.DIGITS)
    whole = rows(images, labels)
    assert len(set(whole)) == 5000  # so that an image in both parts would be seen
    split = data.load("digits", seed=4)
    train, test = rows(split.train_images, split.train_labels), rows(split.test_images, split.test_labels)
    assert sorted(train + test) == whole and not set(train) & set(test)


def test_a_seed_is_a_split():
    before = torch.random.get_rng_state()
    a, b, c = (data.load("digits", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a.test_images, b.test_images) and torch.equal(a.train_labels, b.train_labels)
    assert not torch.equal(a.test_images, c.test_images)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_classes_are_mixed():
    labels = data.load("digits").train_labels
    assert all(len(part.unique()) == 10 for part in labels.split(500))


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.999])
def test_every_fraction_is_stratified(fraction):
    split = data.load("digits", test_fraction=fraction)
    assert split.test_labels.bincount().tolist() == [round(500 * fraction)] * 10
    assert len(split.train_labels) + len(split.test_labels) == 5000


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_a_fraction_outside_is_refused(fraction):
    with pytest.raises(ValueError, match="test_fraction lies between 0 and 1"):
        data.load("digits", test_fraction=fraction)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no data set 'mnist'; there are digits, colour_digits, fashion_mnist and cifar10"):
        data.load("mnist")


@pytest.mark.parametrize("harm", ["flipped", "cut", "empty", "replaced", "missing"])
def test_a_damaged_file_is_refused(harm, tmp_path, monkeypatch):
    content = bytearray(data.DIGITS.read_bytes())
    content[len(content) // 2] ^= 1
    path = tmp_path / "digits.npz"
    if harm != "missing":
        path.write_bytes({"flipped": bytes(content), "cut": content[:-100], "empty": b"", "replaced": b"<html>404</html>"}[harm])
    monkeypatch.setattr(data, "DIGITS", path)
    with pytest.raises(ValueError) as caught:
        data.load("digits")
    assert ("is missing" if harm == "missing" else "is damaged") in str(caught.value)
    assert str(path) in str(caught.value) and "git checkout data/digits.npz" in str(caught.value)


class Kept:
    """What torchvision gives once it has fetched: images as (N, H, W, C) arrays or (N, H, W) tensors."""

    def __init__(self, folder, train, download):
        self.data = torch.zeros(20, 4, 4, 3, dtype=torch.uint8).numpy()
        self.targets = list(range(10)) * 2


def test_what_torchvision_fetched_is_split_alike(monkeypatch):
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Kept)
    split = data.load("cifar10")
    assert split.test_images.shape == (10, 3, 4, 4) and split.test_labels.bincount().tolist() == [1] * 10


@pytest.mark.parametrize("error", [urllib.error.URLError("no route"), RuntimeError("Error downloading x:\nTried y, got:\nz"),
                                   TimeoutError(), http.client.IncompleteRead(b"x")])
@pytest.mark.parametrize(("name", "source"), [("fashion_mnist", "FashionMNIST"), ("cifar10", "CIFAR10")])
def test_without_a_network_that_is_said(name, source, error, monkeypatch):
    def fetch(*args, **options):
        raise error

    monkeypatch.setattr(torchvision.datasets, source, fetch)
    with pytest.raises(ConnectionError) as caught:
        data.load(name)
    said = str(caught.value)
    assert said.startswith(f"{name} is fetched from the network at first use, and that failed ({type(error).__name__}:")
    assert "\n" not in said and len(said) < 500
    assert 'load("digits") works without a network' in said


def test_without_a_network_for_real(tmp_path):
    nowhere = "http://127.0.0.1:9"
    environment = {**os.environ, "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "https_proxy": nowhere, "http_proxy": nowhere,
                   "no_proxy": "", "NO_PROXY": "", "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", "from course_utils import load; load('fashion_mnist')"], cwd=REPO, env=environment,
                         capture_output=True, text=True)
    assert ran.returncode != 0
    assert ran.stderr.splitlines()[-1].startswith("ConnectionError: fashion_mnist is fetched from the network at first use, and that ")


def test_colour_digits_are_the_digits_in_colours_that_do_not_tell_the_class():
    grey, colour = data.load("digits"), data.load("colour_digits")
    assert colour.train_images.shape == (4000, 3, 28, 28) and colour.train_images.dtype == torch.uint8
    assert torch.equal(colour.train_labels, grey.train_labels) and torch.equal(data.load("colour_digits").test_images, colour.test_images)
    ink, ground = grey.train_images == 255, grey.train_images == 0
    brightness = colour.train_images.float().mean(1)
    inked = (brightness * ink).sum((1, 2)) / ink.sum((1, 2))
    grounded = (brightness * ground).sum((1, 2)) / ground.sum((1, 2))
    assert ((inked - grounded).abs() > 255 / 3)[ink.sum((1, 2)) > 0].all(), "every digit can be read"
    means = torch.stack([brightness[colour.train_labels == c].mean() for c in range(10)])
    spread = brightness.mean((1, 2)).std() / 400**0.5
    assert (means - means.mean()).abs().max() < 5 * spread, "no class is brighter than another"
