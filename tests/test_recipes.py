"""The recipes: their networks' shapes, and a race by its counts. No clock decides: it is replaced where seconds matter."""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from course_utils import recipes
from course_utils.engine.data import load
from course_utils.recipes import FINAL, QUICK_STARTS, Noisy, Recipe, adam, adamw, convnet, perceptron, plain_convnet, race, sgd, small_vgg


def blobs(n=24, test=12, channels=None, classes=3):
    """Pictures whose brightness says their class: a Split as `load` gives it."""
    shape = (n + test, 28, 28) if channels is None else (n + test, channels, 28, 28)
    labels = torch.arange(n + test) % classes
    noise = torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(0))
    pictures = (noise + 90 * labels.view(-1, *[1] * (len(shape) - 1))).byte()
    return SimpleNamespace(train_images=pictures[:n], train_labels=labels[:n], test_images=pictures[n:], test_labels=labels[n:])


def linear(channels=1):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(channels * 784, 3))


@pytest.fixture
def clock(monkeypatch):
    """A clock on which a second passes whenever it is read, so that every step takes one."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(recipes.time, "perf_counter", lambda: float(next(ticks)))


SMALL = Recipe(linear(), sgd(0.05), batch=10)


# ── networks and data ──


@pytest.mark.parametrize("network", [perceptron, plain_convnet, small_vgg, convnet])
@pytest.mark.parametrize("channels, classes", [(1, 10), (3, 5)])
def test_the_networks_take_grey_and_coloured_pictures(network, channels, classes):
    torch.manual_seed(0)
    model, x = network(channels, classes), torch.randn(4, channels, 28, 28)
    assert model(x).shape == (4, classes)
    F.cross_entropy(model(x), torch.zeros(4, dtype=torch.long)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_pooling_first_is_the_same_function_in_eval_mode():
    torch.manual_seed(0)
    first, last = convnet(widths=(2, 3, 4)), convnet(widths=(2, 3, 4), pool_first=False)
    weights = [p for p in first.state_dict().values()]
    last.load_state_dict(dict(zip(last.state_dict(), weights)))  # the layers come in another order, their contents do not
    x = torch.randn(5, 1, 28, 28)
    assert torch.allclose(first.eval()(x), last.eval()(x), atol=1e-6)
    assert [type(layer) for layer in first[:4]] == [nn.Conv2d, nn.MaxPool2d, nn.BatchNorm2d, nn.ReLU]
    assert [type(layer) for layer in last[:4]] == [nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d]


def test_noise_is_drawn_anew_at_each_access():
    data = Noisy(torch.zeros(2, 1, 100, 100), torch.tensor([4, 5]), std=0.5)
    torch.manual_seed(0)
    (a, label), (b, _) = data[1], data[1]
    assert len(data) == 2 and label == 5 and not torch.equal(a, b)
    assert abs(a.std().item() - 0.5) < 5 * 0.5 / math.sqrt(2 * 10_000)


def test_the_recipes_make_optimizers_that_hold_everything():
    for make, kind in ((sgd(0.1), torch.optim.SGD), (adam(0.1), torch.optim.Adam), (adamw(0.1), torch.optim.AdamW)):
        model = convnet()
        optimizer = make(model)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert type(optimizer) is kind and held == {id(p) for p in model.parameters()}
        assert all(group["lr"] == 0.1 for group in optimizer.param_groups)


# ── a race ──


def test_a_race_ends_after_its_seconds_in_the_middle_of_an_epoch(clock):
    run = race(SMALL, blobs(), seconds=4.5)
    assert (run.steps, run.seconds) == (5, 5.0)  # three steps make an epoch


def test_a_race_ends_with_the_cycle_of_its_rate(clock):
    rates = []

    def watched(network):
        optimizer = sgd(0.05)(network)
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer

    run = race(replace(SMALL, optimizer=watched, epochs=2), blobs(), seconds=1000)
    assert run.steps == 6 and len(rates) == 6  # 24 samples in batches of 10: the last, short one is a step, too
    assert 0.049 < max(rates) <= 0.05 and rates[0] < 0.01 and rates[-1] < 1e-5
    rates.clear()
    race(replace(SMALL, optimizer=watched), blobs(), seconds=6)
    assert rates == [0.05] * 6


def test_a_race_stops_at_its_target_only_when_told_to(clock):
    sizes = []

    class Watched(nn.Sequential):
        def forward(self, x):
            sizes.extend([len(x)] * self.training)
            return super().forward(x)

    going = race(replace(SMALL, network=lambda: Watched(*linear()())), blobs(), seconds=30, target=0.9, every=2)
    assert sizes == [10, 10, 4] * 10  # whole epochs, after the target, too
    assert going.steps == 30 and going.accuracy >= 0.9 and going.reached % 2 == 0 and going.reached < 30
    stopped = race(SMALL, blobs(), seconds=30, target=0.9, every=2, stop=True)
    assert stopped.steps == stopped.reached == going.reached == stopped.seconds  # what a look costs is not counted
    never = race(SMALL, blobs(), seconds=4, target=1.1, every=1, stop=True)
    assert never.steps == 4 and never.reached is None


def test_a_race_does_not_begin_without_time(clock):
    run = race(SMALL, blobs(), seconds=0)
    assert (run.steps, run.seconds, run.reached) == (0, 0.0, None) and 0 <= run.accuracy <= 1


def test_a_race_is_decided_by_its_seed(clock):
    runs, seen = [], []
    for seed in (3, 3, 4):
        models = []
        recipe = replace(SMALL, network=lambda models=models: models.append(linear()()) or models[-1])
        torch.rand(seed)  # what was drawn before does not matter
        runs.append(race(recipe, blobs(), seconds=7, seed=seed))
        seen.append(models[0][1].weight.detach())
    assert runs[0] == runs[1] and torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


@pytest.mark.parametrize("channels", [None, 1, 3])
def test_pictures_are_scaled_and_normalised_by_the_training_pictures(clock, channels):
    data, seen = blobs(channels=channels), []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = linear(channels or 1)()

        def forward(self, x):
            seen.append(x)
            return self.net(x)

    for normalise in (False, True):
        seen.clear()
        race(Recipe(Watched, sgd(0.05), batch=24, normalise=normalise), data, seconds=1)
        train, test = seen
        assert train.shape == (24, channels or 1, 28, 28)  # in another order
        brightness = data.train_images / 255
        mean, std = (brightness.mean(), brightness.std()) if normalise else (0, 1)
        assert torch.allclose(train.mean(), (brightness.mean() - mean) / std, atol=1e-6)
        assert torch.allclose(train.std(), brightness.std() / std)
        assert torch.allclose(test, ((data.test_images / 255 - mean) / std).view(12, -1, 28, 28), atol=1e-6)


def test_the_network_is_in_train_mode_for_every_step_and_in_eval_mode_for_a_look(clock):
    modes = []

    class Watched(nn.Sequential):
        def forward(self, x):
            modes.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    race(Recipe(lambda: Watched(*linear()()), sgd(0.05), batch=24), blobs(), seconds=3, every=2)
    step, look = (True, True), (False, False)
    assert modes == [step, step, look, step, look]


def test_the_published_recipes_run_on_the_digits(clock):
    digits = load("digits")
    few = SimpleNamespace(**{name: getattr(digits, name)[:130] for name in ("train_images", "train_labels", "test_images", "test_labels")})
    for recipe in (*QUICK_STARTS.values(), FINAL):
        run = race(recipe, few, seconds=2)
        assert run.steps == 2 and math.isfinite(run.accuracy)
    assert race(replace(FINAL, epochs=1), few, seconds=9).steps == 3
