"""The data sets of lesson 05: what their items are, and that each reaches a worker."""
import pytest
import torch
from torch.utils.data import DataLoader

from course_utils import datasets, load
from course_utils.toolkit.loading import check_portable


def test_each_reaches_a_worker_that_was_not_forked():
    pixels = datasets.Pixels(torch.zeros(4, 28, 28, dtype=torch.uint8), torch.arange(4))
    every = [datasets.JpegDigits(4, 32), pixels, datasets.Remote(4, 0.0), datasets.Counting(), datasets.Draws(), datasets.Sequences(4)]
    assert check_portable(torch.utils.data.ConcatDataset(every)) == [] and check_portable(datasets.Rows([datasets.Stream(4)])) == []


@pytest.mark.parametrize("size", [28, 64, 200])
def test_a_jpeg_digit_is_the_digit(size, tmp_path):
    data = datasets.JpegDigits(6, size, crop=28, augment=False)
    filed = datasets.JpegDigits(6, size, folder=tmp_path, crop=28, augment=False)
    digits = load("colour_digits")
    assert len(data) == 6 and len(list(tmp_path.glob("*.jpg"))) == 6
    for i in range(6):
        image, label = data[i]
        assert image.shape == (3, 28, 28) and image.dtype == torch.float32 and label == digits.train_labels[i]
        original = (digits.train_images[i] / 255 - 0.5) / 0.25
        assert (image - original).abs().mean() < 0.5, "as near as JPEG and resizing leave it"
        assert torch.equal(filed[i][0], image)


def test_augmentation_draws_at_each_access_and_decoding_is_real_work():
    data = datasets.JpegDigits(2, 64)
    assert data[0][0].shape == (3, 32, 32) and not torch.equal(data[0][0], data[0][0])
    assert 200 < len(data.files[0]) < 64 * 64 * 3, "it is compressed"


def test_a_whole_batch_equals_its_items():
    digits = load("digits")
    data = datasets.Pixels(digits.train_images[:9], digits.train_labels[:9])
    images, labels = next(iter(DataLoader(data, 4)))
    for i in range(4):
        assert torch.equal(images[i], data[i][0]) and labels[i] == data[i][1]
    assert images.shape == (4, 1, 28, 28) and images.max() <= 1


def test_the_others_do_what_they_say():
    counting = datasets.Counting(3)
    assert [counting[0], counting[0], counting[2]] == [(0, 1), (0, 2), (2, 3)]
    assert list(datasets.Stream(3)) == [0, 1, 2] and datasets.Rows("abc")[1] == "b" and datasets.Remote(2, 0.0)[1].tolist() == [1.0] * 16
    first, second = datasets.Draws(2, "own"), datasets.Draws(2, "own")
    assert first[0] == second[0] != first[0]
    strokes, label = datasets.Sequences(3)[0]
    assert strokes.dim() == 2 and strokes.shape[1] == 2 and 0 <= strokes.min() and strokes.max() <= 1
    assert len({len(datasets.Sequences(20)[i][0]) for i in range(20)}) > 10
