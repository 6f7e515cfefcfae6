"""The training toolkit: each figure against the same figure computed another way."""

import copy
import doctest
import math
import pickle
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

from course_utils.toolkit import training
from course_utils.toolkit.batches import device_of, split_batch, to_device
from course_utils.toolkit.training import (
    EarlyStopping,
    accumulated_step,
    clip_and_step,
    correct_predictions,
    evaluate,
    he_init_,
    lr_trace,
    overfit_one_batch,
    parameter_groups,
    seed_everything,
    seeded_loader,
    train_epoch,
    transfer_head,
    unoptimized,
)


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def samples(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)


def batches_of(*sizes):
    x, y = samples(sum(sizes))
    return list(zip(x.split(sizes), y.split(sizes)))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


# ── an epoch ──


def test_an_epoch_is_the_loop_written_out():
    model, batches = classifier(), batches_of(4, 4, 3)
    by_hand = copy.deepcopy(model)
    optimizer, losses = sgd(by_hand), []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(by_hand(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item() * len(y))
    model.eval()
    epoch = train_epoch(model, batches, F.cross_entropy, sgd(model))
    assert torch.equal(weights(model), weights(by_hand)) and model.training
    assert epoch.loss == pytest.approx(sum(losses) / 11, rel=1e-12)
    assert (epoch.samples, epoch.steps, epoch.learning_rates, epoch.gradient_norms) == (11, 3, [0.5] * 3, [])


@pytest.mark.parametrize("accumulate", [1, 2, 3, 7])
def test_accumulation_steps_with_the_gradient_of_the_whole_window_the_last_one_too(accumulate):
    sizes = (5, 1, 4, 2, 7)
    model, batches = classifier(), batches_of(*sizes)
    merged = [
        tuple(torch.cat(parts) for parts in zip(*batches[i : i + accumulate])) for i in range(0, len(batches), accumulate)
    ]
    expected = copy.deepcopy(model)
    whole = train_epoch(expected, merged, F.cross_entropy, sgd(expected))
    epoch = train_epoch(model, batches, F.cross_entropy, sgd(model), accumulate=accumulate)
    assert torch.allclose(weights(model), weights(expected), rtol=1e-12, atol=1e-14)
    assert epoch.loss == pytest.approx(whole.loss, rel=1e-12)
    assert (epoch.accuracy, epoch.samples, epoch.steps) == (whole.accuracy, 19, math.ceil(5 / accumulate))


def test_accumulation_weighs_by_what_count_counts():
    x, y = samples(12)
    y[[0, 1, 2, 5, 9]] = -100
    model, batches = classifier(), [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]  # the first holds nothing that counts
    expected = copy.deepcopy(model)
    whole = train_epoch(expected, [(x, y)], F.cross_entropy, sgd(expected), count=lambda t: (t != -100).sum())
    epoch = train_epoch(model, batches, F.cross_entropy, sgd(model), accumulate=3, count=lambda t: (t != -100).sum())
    assert torch.allclose(weights(model), weights(expected), rtol=1e-12, atol=1e-14)
    assert epoch.loss == pytest.approx(whole.loss, rel=1e-12) and epoch.samples == whole.samples == 7
    assert epoch.accuracy == whole.accuracy == pytest.approx((classifier()(x).argmax(1) == y).sum().item() / 7)


def test_a_scheduler_needs_its_unit():
    model, batches = classifier(), batches_of(2, 2, 2)
    for unit in (None, "step"):
        optimizer = sgd(model)
        with pytest.raises(ValueError, match="unit"):
            train_epoch(model, batches, F.cross_entropy, optimizer, scheduler=StepLR(optimizer, 1), step_per=unit)
    with pytest.raises(ValueError, match="unit"):
        train_epoch(model, batches, F.cross_entropy, sgd(model), step_per="batch")
    for unit, rates, then in [("batch", [8, 4, 2], 1), ("epoch", [8, 8, 8], 4)]:
        optimizer = sgd(model, lr=8.0)
        scheduler = StepLR(optimizer, 1, gamma=0.5)
        epoch = train_epoch(model, batches, F.cross_entropy, optimizer, scheduler=scheduler, step_per=unit)
        assert epoch.learning_rates == rates and optimizer.param_groups[0]["lr"] == then
    optimizer = sgd(model, lr=8.0)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    epoch = train_epoch(model, batches, F.cross_entropy, optimizer, scheduler=scheduler, step_per="batch", accumulate=2)
    assert epoch.learning_rates == [8, 4]  # the unit is a step of the optimizer


def test_a_scheduler_that_cannot_do_its_work_is_refused():
    model, batches = classifier(), batches_of(2, 2)
    scheduler = StepLR(sgd(model), 1)  # and then the optimizer is made anew
    with pytest.raises(ValueError, match="another optimizer"):
        train_epoch(model, batches, F.cross_entropy, sgd(model), scheduler=scheduler, step_per="batch")
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="a score that rises"):  # the training loss, which falls, would lower the rate
        train_epoch(model, batches, F.cross_entropy, optimizer, scheduler=ReduceLROnPlateau(optimizer, "max"), step_per="epoch")
    chain = ChainedScheduler([ConstantLR(optimizer, 0.5, 1), StepLR(optimizer, 1)])
    assert train_epoch(model, batches, F.cross_entropy, optimizer, scheduler=chain, step_per="batch").learning_rates == [0.25, 0.05]


def test_a_plateau_scheduler_is_given_the_training_loss():
    model, batches = classifier(), batches_of(2, 2)
    optimizer = sgd(model, lr=0.0)  # nothing improves
    optimizer.param_groups[0]["lr"] = 0.0
    scheduler = ReduceLROnPlateau(optimizer, patience=100)
    epoch = train_epoch(model, batches, F.cross_entropy, optimizer, scheduler=scheduler, step_per="epoch")
    assert scheduler.best == epoch.loss


def test_clipping_measures_the_norm_and_limits_the_step():
    model, batches = classifier(), batches_of(4, 4)
    start, seen = weights(model), []
    epoch = train_epoch(model, batches[:1], F.cross_entropy, sgd(model, lr=1.0), max_norm=0.01, on_step=lambda *a: seen.append(a))
    assert epoch.gradient_norms[0] > 0.01
    assert (weights(model) - start).norm() == pytest.approx(0.01, rel=1e-3)
    assert seen == [(0, pytest.approx(epoch.loss), 1.0, epoch.gradient_norms[0])]
    model = classifier()
    free = copy.deepcopy(model)
    epoch = train_epoch(model, batches, F.cross_entropy, sgd(model), max_norm=math.inf)
    train_epoch(free, batches, F.cross_entropy, sgd(free))
    assert torch.equal(weights(model), weights(free)) and len(epoch.gradient_norms) == 2


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_clipping_refuses_a_norm_that_is_not_finite_before_the_step(value):
    model, batches = classifier(), batches_of(4)
    batches[0][0][0, 0] = value
    start = weights(model)
    with pytest.raises(RuntimeError, match="non-finite"):
        train_epoch(model, batches, F.cross_entropy, sgd(model), max_norm=1.0)
    assert torch.equal(weights(model), start)


def test_steps_are_reported_in_order():
    model, seen = classifier(), []
    epoch = train_epoch(model, batches_of(3, 3, 1), F.cross_entropy, sgd(model), on_step=lambda *a: seen.append(a), accumulate=2)
    assert [step for step, *_ in seen] == [0, 1] and [lr for _, _, lr, _ in seen] == [0.5, 0.5] and seen[0][3] is None
    assert (6 * seen[0][1] + seen[1][1]) / 7 == pytest.approx(epoch.loss, rel=1e-12)


@pytest.mark.parametrize(
    "loader, message", [([], "no samples"), ([torch.zeros(3)], "a batch is"), ([{"x": 1, "y": 2}], "a batch is")]
)
def test_what_is_no_batch_is_said(loader, message):
    model = classifier()
    for run in (lambda: train_epoch(model, loader, F.cross_entropy, sgd(model)), lambda: evaluate(model, loader, F.cross_entropy)):
        with pytest.raises((ValueError, TypeError), match=message):
            run()
    for wrong in ({"accumulate": 0}, {"max_norm": 0.0}, {"max_norm": -1.0}, {"max_norm": math.nan}):
        with pytest.raises(ValueError, match=f"{[*wrong][0]}="):
            train_epoch(model, batches_of(2), F.cross_entropy, sgd(model), **wrong)


def test_targets_of_several_parts_are_not_counted_by_their_parts():
    x, y = samples(7)
    model, batches = classifier(), [(x[:4], {"kind": y[:4], "size": x[:4]}), (x[4:], {"kind": y[4:], "size": x[4:]})]

    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs, targets["kind"])

    for function, more in ((train_epoch, [sgd(model)]), (evaluate, [])):
        with pytest.raises(TypeError, match="say how many samples"):
            function(model, batches, loss_fn, *more)
        assert function(model, batches, loss_fn, *more, count=lambda targets: len(targets["kind"])).samples == 7


def test_losses_of_shape_one_and_infinite_ones_are_averaged():
    model, batches = classifier(), batches_of(4, 4)
    wide = train_epoch(model, batches, lambda o, y: F.cross_entropy(o, y).reshape(1), sgd(classifier()))
    assert wide == train_epoch(model, batches, F.cross_entropy, sgd(classifier()))
    losses = iter([torch.tensor(math.inf), torch.tensor(-math.inf)])
    assert math.isnan(evaluate(model, batches, lambda o, y: next(losses)).loss)


# ── evaluation ──


def test_evaluation_counts_samples_and_not_batches():
    model, (x, y) = classifier(), samples(9)
    with torch.no_grad():
        loss, right = F.cross_entropy(model(x), y).item(), (model(x).argmax(1) == y).sum().item()
    for size in (2, 4, 9):
        result = evaluate(model, DataLoader(TensorDataset(x, y), size), F.cross_entropy)
        assert result.loss == pytest.approx(loss, rel=1e-12) and result.accuracy == right / 9 and result.samples == 9


def test_evaluation_leaves_every_mode_as_it_was_and_makes_no_graph():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(x)

    model = nn.Sequential(Watched(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double()
    model[1].eval()
    mean = model[1].running_mean.clone()
    evaluate(model, batches_of(3, 3), F.cross_entropy)
    assert seen == [(False, False)] * 2
    assert [m.training for m in model.modules()] == [True, True, False, True] and torch.equal(model[1].running_mean, mean)
    with pytest.raises(RuntimeError):
        evaluate(model, [(torch.zeros(2, 5), torch.zeros(2))], F.cross_entropy)
    assert [m.training for m in model.modules()] == [True, True, False, True]


def test_accuracy_is_there_for_classes_only():
    x, y = samples(6)
    assert evaluate(classifier(), [(x, F.one_hot(y, 3).double())], F.cross_entropy).accuracy is None
    assert evaluate(classifier(), [(x, torch.zeros(6, 3).double())], F.mse_loss).accuracy is None
    counts = nn.Linear(6, 1).double()
    assert evaluate(counts, [(x, y)], lambda o, y: F.poisson_nll_loss(o.squeeze(1), y)).accuracy is None
    model = classifier()
    assert train_epoch(model, [(x, y)], F.cross_entropy, sgd(model)).accuracy is not None


def test_several_inputs_reach_the_model():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, a, b):
            return self.scale * (a["x"] + b)

    batch = ({"x": torch.ones(4)}, torch.ones(4), torch.zeros(4))
    assert evaluate(Sum(), [batch], F.mse_loss).loss == 4.0


def test_progress_shows_a_bar(capsys):
    evaluate(classifier(), batches_of(2, 2), F.cross_entropy, progress=True)
    assert "0/2" in capsys.readouterr().err


def test_batches_are_taken_apart_and_moved():
    assert split_batch([1, 2, 3]) == ([1, 2], 3)
    moved = to_device(({"a": torch.ones(1)}, [torch.ones(1), "text"], 3), "meta")
    assert moved[0]["a"].device.type == moved[1][0].device.type == "meta" and moved[1][1:] == ["text"] and moved[2] == 3
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    assert to_device(packed, "cpu").data is packed.data
    assert device_of(nn.Linear(1, 1, device="meta")).type == "meta" and device_of(nn.ReLU()).type == "cpu"


def test_correct_predictions():
    outputs = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert correct_predictions(outputs, torch.tensor([1, 0, 0])) == 2
    assert type(correct_predictions(outputs, torch.tensor([1, 0, 0]))) is int
    for targets in (torch.tensor([[1], [0], [0]]), torch.tensor([1, 0]), torch.eye(3)[:, :2]):
        with pytest.raises(ValueError, match="are needed"):
            correct_predictions(outputs, targets)


# ── steps ──


@pytest.mark.parametrize("sizes", [(4, 4), (1, 9), (3, 0, 5, 1)])
def test_an_accumulated_step_is_the_step_of_the_full_batch(sizes):
    model, (x, y) = classifier(), samples(sum(sizes))
    full = copy.deepcopy(model)
    optimizer = sgd(full)
    loss = F.cross_entropy(full(x), y)
    loss.backward()
    optimizer.step()
    model(x).sum().backward()  # left from before
    got = accumulated_step(model, iter(batches_of(*sizes)), F.cross_entropy, sgd(model))
    assert torch.allclose(weights(model), weights(full), rtol=1e-12, atol=1e-14) and got == pytest.approx(loss.item(), rel=1e-12)
    with pytest.raises(ValueError, match="no sample"):
        accumulated_step(model, [], F.cross_entropy, sgd(model))


def test_clip_and_step():
    w = nn.Parameter(torch.tensor([3.0, 4.0]))
    for max_norm, expected in [(1.0, [2.4, 3.2]), (10.0, [0.0, 0.0])]:
        w.data = torch.tensor([3.0, 4.0])
        w.grad = torch.tensor([3.0, 4.0])
        norm = clip_and_step(iter([w, nn.Parameter(torch.ones(1))]), torch.optim.SGD([w], lr=1.0), max_norm)
        assert norm == 5.0 and type(norm) is float
        assert torch.allclose(w, torch.tensor(expected), atol=1e-5)
    for value in (math.inf, math.nan):
        w.grad = torch.tensor([value, 1.0])
        before = w.detach().clone()
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_and_step([w], torch.optim.SGD([w], lr=1.0), 1.0)
        assert torch.equal(w, before) and w.grad[1] == 1.0


# ── optimizer and rate ──


def test_parameter_groups():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv1d(4, 4, 3), nn.Linear(4, 5))
    model[4].weight = model[0].weight  # shared
    model[3].requires_grad_(False)
    decay, rest = parameter_groups(model, 0.1)
    assert decay["weight_decay"] == 0.1 and rest["weight_decay"] == 0.0
    assert [id(p) for p in decay["params"]] == [id(model[0].weight), id(model[1].weight)]
    assert [id(p) for p in rest["params"]] == [id(p) for p in (model[1].bias, model[2].weight, model[2].bias, model[4].bias)]
    torch.optim.AdamW(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)).step()


def test_unoptimized_goes_by_identity():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": [model[0].weight]}, {"params": list(model[1].parameters())}], lr=0.1)
    assert unoptimized(model, optimizer) == ["0.bias"]
    model[1] = copy.deepcopy(model[1])
    assert unoptimized(model, optimizer) == ["0.bias", "1.weight", "1.bias"]
    model[1].requires_grad_(False)
    assert unoptimized(model, optimizer) == ["0.bias"]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, 3),
        lambda o: CosineAnnealingLR(o, T_max=5),
        lambda o: LambdaLR(o, lambda step: min(1, step / 4)),
        lambda o: OneCycleLR(o, max_lr=0.7, total_steps=12),
    ],
)
def test_lr_trace_is_what_a_training_run_uses(make):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    epoch = train_epoch(model, batches_of(*[1] * 12), F.cross_entropy, optimizer, scheduler=make(optimizer), step_per="batch")
    assert lr_trace(make, 12, lr=0.3) == epoch.learning_rates
    assert lr_trace(make, 0) == []


def test_lr_trace_needs_no_score():
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        lr_trace(ReduceLROnPlateau, 3)


# ── beginnings ──


def test_he_init_by_its_moments():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 300), nn.Conv2d(32, 64, 5, groups=2, bias=False), nn.BatchNorm2d(4))
    before = model[2].weight.clone()
    assert he_init_(model) is model
    for layer, fan_in in [(model[0], 400), (model[1], 16 * 25)]:
        values = layer.weight.detach()
        error = math.sqrt(2 / fan_in) / math.sqrt(2 * values.numel())  # of a standard deviation, one sigma
        assert abs(values.std().item() - math.sqrt(2 / fan_in)) < 5 * error
        assert abs(values.mean().item()) < 5 * math.sqrt(2 / fan_in / values.numel())
        assert values.abs().max() > 3 * math.sqrt(2 / fan_in)  # normal, not uniform
    assert not model[0].bias.any() and torch.equal(model[2].weight, before) and model[0].weight.requires_grad
    alone = nn.Linear(3, 2)
    assert he_init_(alone).bias.abs().sum() == 0


def test_transfer_head_trains_the_head_and_moves_nothing_else():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)))
    trained = transfer_head(model, 7)
    head = model[3][2]
    assert [id(p) for p in trained] == [id(head.weight), id(head.bias)] and head.weight.shape == (7, 8)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == ["3.2.weight", "3.2.bias"]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x, y = torch.randn(16, 1, 4, 4) + 3, torch.randint(7, (16,))
    train_epoch(model, [(x, y)] * 3, F.cross_entropy, torch.optim.SGD(trained, lr=0.1))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"3.2.weight", "3.2.bias"}
    twin = copy.deepcopy(model).train()
    twin(x)
    assert torch.equal(twin[1].running_mean, before["1.running_mean"])
    for headless in (nn.Conv2d(1, 1, 1), nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="no Linear"):
            transfer_head(headless, 3)
    plain = nn.Sequential(nn.Linear(2, 2, bias=False).double())
    assert [p.dtype for p in transfer_head(plain, 3)] == [torch.float64]


# ── the same run twice, the best of a run ──


def draws():
    return random.random(), float(np.random.rand()), torch.rand(1).item()


def test_seed_everything_repeats_all_three():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        first = seed_everything(5), draws()
        second = seed_everything(5), draws()
        assert first[1] == second[1] and len(set(first[1])) == 3
        assert torch.rand(3, generator=first[0]).equal(torch.rand(3, generator=second[0]))
        assert draws() != second[1]
        for seed in (-1, 2**32):
            with pytest.raises(ValueError, match="2\\*\\*32"):
                seed_everything(seed)
        seed_everything(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def test_seeded_loader_repeats_itself_epoch_by_epoch():
    data = TensorDataset(torch.arange(40))

    def orders(loader, epochs=2):
        return [torch.cat([batch for (batch,) in loader]).tolist() for _ in range(epochs)]

    state = torch.get_rng_state()
    loader = seeded_loader(data, 7, seed=1)
    first = orders(loader)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert orders(seeded_loader(data, 7, seed=1)) == first and first[0] != first[1] and sorted(first[0]) == list(range(40))
    assert orders(seeded_loader(data, 7, seed=2)) != first and len(loader) == 6


def test_early_stopping_keeps_copies_of_the_best():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    stopping, answers = EarlyStopping(patience=2), []
    for score in (3.0, math.nan, 1.0, torch.tensor(1.5), 1.0):
        with torch.no_grad():
            model[0].weight.fill_(float(score))
            model[1].running_mean.fill_(float(score))
        answers.append(stopping.step(score, model))
    assert answers == [False, False, False, False, True] and stopping.best == 1.0
    model[0].weight.data.fill_(9)
    stopping.restore(model)
    assert model[0].weight.item() == 1.0 and model[1].running_mean.item() == 1.0


def test_early_stopping_in_other_directions():
    model = nn.Linear(1, 1)
    stopping = EarlyStopping(patience=1, mode="max", min_delta=0.1)
    assert [stopping.step(s, model) for s in (0.5, 0.7, 0.75)] == [False, False, True] and stopping.best == 0.7
    for mode, worst in (("min", math.inf), ("max", -math.inf)):
        stopping = EarlyStopping(patience=2, mode=mode)
        assert [stopping.step(s, model) for s in (worst, worst, 1.0, math.nan, 1.0)] == [False, False, False, False, True]
    stopping = EarlyStopping(patience=3)
    assert not stopping.step(math.nan, model) and stopping.best is None
    with pytest.raises(RuntimeError, match="no best"):
        stopping.restore(model)
    for wrong in ({"patience": 0}, {"mode": "least"}, {"min_delta": -1}, {"min_delta": math.nan}):
        with pytest.raises(ValueError):
            EarlyStopping(**{"patience": 1} | wrong)


def test_overfit_one_batch_trains_a_copy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)).double()
    before, state = pickle.dumps(model.state_dict()), torch.get_rng_state()
    batch = samples(8)
    losses = overfit_one_batch(model, batch, F.cross_entropy, torch.optim.Adam(model.parameters(), lr=0.05))
    made = overfit_one_batch(model, batch, F.cross_entropy, lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    assert losses == made and len(losses) == 100 and losses[-1] < 0.05 < losses[0]
    assert pickle.dumps(model.state_dict()) == before and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_examples_in_docstrings():
    result = doctest.testmod(training)
    assert result.failed == 0 and result.attempted == 1
