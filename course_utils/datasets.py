"""Data sets of lesson 05. They live in a module, since a worker that is not forked can import them from nowhere else.

The pictures are the course's digits, in colour, enlarged and encoded as JPEG: decoding and augmenting them is real work.
"""

import io
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from course_utils.engine.data import load


def jpegs(count, size, quality=90):
    """The first `count` training digits in colour, as JPEG files of size × size pixels: a list of bytes, and their labels."""
    digits = load("colour_digits")
    files = []
    for some in digits.train_images[:count].split(64):
        large = F.interpolate(some.float(), size=(size, size), mode="bilinear", align_corners=False).round().byte()
        for pixels in large.permute(0, 2, 3, 1).numpy():
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=quality)
            files.append(file.getvalue())
    return files, digits.train_labels[: len(files)]


class JpegDigits(Dataset):
    """Digits as JPEG files, in memory or in a folder: item i is (float32 (3, crop, crop), label), decoded and augmented at each access.

    size: pixels of a side, from 28 on. folder: where the files are written, and read from at each access; None keeps them in memory.
    augment: a random crop; else a plain resize.
    """

    def __init__(self, count=512, size=128, folder=None, crop=32, augment=True):
        from torchvision.transforms import v2

        self.files, self.labels = jpegs(count, size)
        if folder is not None:
            paths = [pathlib.Path(folder) / f"{i:05}.jpg" for i in range(len(self.files))]
            for path, file in zip(paths, self.files):
                path.write_bytes(file)
            self.files = paths
        resize = v2.RandomResizedCrop(crop, scale=(0.6, 1.0), antialias=True) if augment else v2.Resize((crop, crop), antialias=True)
        tensor = v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)
        self.transform = v2.Compose([*tensor[:1], resize, *tensor[1:]])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        with Image.open(file if isinstance(file, pathlib.Path) else io.BytesIO(file)) as picture:
            return self.transform(picture.convert("RGB")).as_subclass(torch.Tensor), self.labels[index]


class Pixels(Dataset):
    """Digits in memory, uint8: item i is (float32 (1, 28, 28) from 0 to 1, label). `__getitems__` makes a whole batch at once."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index][None] / 255, self.labels[index]

    def __getitems__(self, indices):
        return list(zip(self.images[indices][:, None] / 255, self.labels[indices]))


class Remote(Dataset):
    """A simulated store: item i is a float32 tensor (16,), after a sleep of `seconds` that stands for the way to it."""

    def __init__(self, count=64, seconds=0.005):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.full((16,), float(index))


class Counting(Dataset):
    """A data set with a state: item i is (i, how many items this object has given by then)."""

    def __init__(self, count=8):
        self.count, self.given = count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.given += 1
        return index, self.given


class Draws(Dataset):
    """Item i is a random number, from the source named: numpy's global generator, torch's, or a Generator made in __init__."""

    def __init__(self, count=8, source="own"):
        self.count, self.source, self.rng = count, source, np.random.default_rng(0)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.source == "torch":
            return torch.rand(()).item()
        return (np.random if self.source == "numpy" else self.rng).random()


class Stream(IterableDataset):
    """The numbers 0 … n - 1, one after another; with split, each worker gives its share of them, else all."""

    def __init__(self, n, split=False):
        self.n, self.split = n, split

    def __iter__(self):
        info = get_worker_info() if self.split else None
        return iter(range(self.n) if info is None else range(info.id, self.n, info.num_workers))


class Rows(Dataset):
    """Item i is the i-th entry of `rows`, whatever that is: a list of Python objects, an array, a tensor."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Sequences(Dataset):
    """Strokes of digits: item i is (float32 (t, 2), where the ink is, row by row, from 0 to 1; the label); t differs by digit."""

    def __init__(self, count=200):
        digits = load("digits")
        self.strokes = [(image > 127).nonzero() / 27 for image in digits.train_images[:count]]
        self.labels = digits.train_labels[:count]

    def __len__(self):
        return len(self.strokes)

    def __getitem__(self, index):
        return self.strokes[index], self.labels[index]
