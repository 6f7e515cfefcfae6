"""`examine` finds each planted mistake by its name, says nothing of a correct set-up, and leaves everything as it was."""

import copy
import functools
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

from course_utils.toolkit.examine import CURES, LOSSES
from course_utils.toolkit.training import Finding, examine, train_epoch, transfer_head

pytestmark = [
    pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate"),  # planted
    pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

SETUPS, BUGS = {}, {}


def correct(build):
    SETUPS[build.__name__] = build
    return build


def bug(*names):
    def register(build):
        BUGS[build.__name__] = (build, list(names))
        return build

    return register


def adam(model, lr=1e-3):
    return torch.optim.Adam(model.parameters(), lr=lr)


def images(n=64, channels=1, size=8, classes=5):
    g = torch.Generator().manual_seed(1)
    y = torch.arange(n) % classes
    return torch.rand(n, channels, size, size, generator=g) + y.view(-1, 1, 1, 1) / classes, y


def rows(n=64, features=6, classes=4):
    g = torch.Generator().manual_seed(2)
    return torch.randn(n, features, generator=g), torch.randint(classes, (n,), generator=g)


def loader(*tensors, **options):
    return DataLoader(TensorDataset(*tensors), 16, shuffle=True, **options)


def mlp(outputs=4, features=6, *end):
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, outputs), *end)


class Model(nn.Module):
    """Layers by name, and a forward function of the module and its inputs."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.how = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs):
        return self.how(self, *inputs)


# ── correct set-ups ───────────────────────────────────────────────────────────────────────────────────────────────────


@correct
def regression():
    x, _ = rows()
    model = mlp(1)
    return model, loader(x, x.sum(1, keepdim=True)), nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.05)


@correct
def regression_with_a_squeeze_and_a_loss_by_hand():
    x, _ = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, x.sum(1)), lambda o, y: ((o - y) ** 2).mean(), adam(model)


@correct
def regression_of_whole_numbers():
    x, y = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, y + 50), lambda o, y: (o - y).abs().mean(), adam(model)


@correct
def linear_regression_at_its_optimum():
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    y = 3 * x + 1 + 0.1 * torch.randn(32, 1, generator=torch.Generator().manual_seed(0))
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(32, 1)], 1), y).solution
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.copy_(solution[:1])
        model.bias.copy_(solution[1])
    return model, [(x, y)], nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)


@correct
def gaussian_likelihood_of_two_outputs():
    x, _ = rows(n=2)  # two samples: their (2, 2) outputs and (2, 1) targets would broadcast
    model = mlp(2)

    def loss_fn(o, y):
        mean, log_variance = o[:, :1], o[:, 1:]
        return (log_variance + (y - mean) ** 2 / log_variance.exp()).mean()

    return model, [(x, x.sum(1, keepdim=True))] * 2, loss_fn, adam(model)


@correct
def classification_with_batchnorm_and_dropout():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)
    )
    return model, loader(*images()), nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2)


@correct
def label_smoothing_by_a_partial_function_and_a_momentum():
    model = mlp()
    loss_fn = functools.partial(F.cross_entropy, label_smoothing=0.1)
    return model, loader(*rows()), loss_fn, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


@correct
def weighted_classes_in_a_function_of_ones_own():
    x, y = rows(n=4)  # four samples of four classes: outputs (4, 4) and targets (4,) would broadcast
    model, weight = mlp(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    return model, [(x, y)] * 3, lambda o, y: F.cross_entropy(o, y.long(), weight=weight), adam(model)


@correct
def nllloss_with_log_softmax():
    model = mlp(4, 6, nn.LogSoftmax(dim=1))
    return model, loader(*rows()), nn.NLLLoss(), adam(model)


@correct
def cross_entropy_after_log_softmax_is_the_same_loss():
    model = mlp(4, 6, nn.LogSoftmax(dim=1))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def soft_labels():
    x, y = rows()
    model = mlp()
    return model, loader(x, 0.9 * F.one_hot(y, 4) + 0.025), nn.CrossEntropyLoss(), adam(model)


@correct
def bce_with_logits():
    x, y = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, (y > 1).float()), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0)), adam(model)


@correct
def bce_after_a_sigmoid():
    x, y = rows()
    model = mlp(1, 6, nn.Sigmoid())
    return model, loader(x, (y > 1).float().unsqueeze(1)), nn.BCELoss(), adam(model)


@correct
def several_labels_at_once():
    x, _ = rows()
    model = mlp()
    return model, loader(x, (x[:, :4] > 0).float()), nn.BCEWithLogitsLoss(), adam(model)


@correct
def segmentation():
    x, _ = images(channels=3)
    y = (x.mean(1) > 0.9).long()
    y[:, 0] = 255
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    return model, loader(x, y), nn.CrossEntropyLoss(ignore_index=255), adam(model)


@correct
def segmentation_with_a_loss_of_ones_own():
    model, data, _, optimizer = segmentation()
    return model, data, lambda o, y: F.cross_entropy(o, y, ignore_index=255), optimizer


@correct
def transfer_with_a_frozen_trunk():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(144, 9))
    return model, loader(*images()), nn.CrossEntropyLoss(), torch.optim.Adam(transfer_head(model, 5), lr=1e-2)


@correct
def transfer_with_a_trunk_in_eval_mode():
    trunk = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()).requires_grad_(False)
    model = nn.Sequential(trunk, nn.Linear(144, 5)).train()
    trunk.eval()
    return model, loader(*images()), nn.CrossEntropyLoss(), torch.optim.Adam(model[1].parameters(), lr=1e-2)


@correct
def fine_tuning_with_fixed_statistics():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    model[1].eval()
    groups = [{"params": model[:4].parameters(), "lr": 1e-4}, {"params": model[4].parameters(), "lr": 1e-2}]
    return model, loader(*images()), nn.CrossEntropyLoss(), torch.optim.SGD(groups, momentum=0.9)


class Tagger(nn.Module):
    """Token numbers to a class of the sequence, or of each token."""

    def __init__(self, cell, each=False):
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(50, 8, padding_idx=0), cell(8, 12, batch_first=True), nn.Linear(12, 4)
        self.each = each

    def forward(self, tokens, lengths=None):
        states, _ = self.cell(self.embedding(tokens))
        if self.each:
            return self.head(states)
        last = states[:, -1] if lengths is None else states[torch.arange(len(tokens)), lengths - 1]
        return self.head(last)


def tokens(n=32, length=7):
    g = torch.Generator().manual_seed(3)
    return torch.randint(1, 50, (n, length), generator=g)


@correct
def an_lstm_over_tokens():
    model = Tagger(nn.LSTM)
    return model, loader(tokens(), tokens()[:, -1] % 4), nn.CrossEntropyLoss(), adam(model)


@correct
def a_gru_with_lengths_and_classes_at_the_end():
    model = Tagger(nn.GRU, each=True)
    lengths = torch.arange(32) % 7 + 1

    def loss_fn(o, y):
        return F.cross_entropy(o.flatten(0, 1), y.flatten())

    return model, loader(tokens(), lengths, tokens() % 4), loss_fn, adam(model)


@correct
def sparse_embeddings_with_two_optimizers():
    model = Tagger(nn.GRU)
    model.embedding.sparse = True
    rest = [*model.cell.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.SparseAdam(model.embedding.parameters(), lr=1e-2), torch.optim.Adam(rest)]
    return model, loader(tokens(), tokens()[:, -1] % 4), nn.CrossEntropyLoss(), optimizers


@correct
def an_optimizer_that_needs_a_closure():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@correct
def a_warm_up_that_begins_at_zero():
    model = mlp()
    optimizer = adam(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10))
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@correct
def an_optimizer_in_the_middle_of_a_run():
    model = mlp()
    optimizer = adam(model)
    x, y = rows()
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, loader(x, y), nn.CrossEntropyLoss(), optimizer


@correct
def bytes_that_the_model_turns_into_floats():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))

        def forward(self, x):
            return self.net(x.float() / 255)

    model, (x, y) = Model(), images()
    return model, loader((x * 120).byte(), y), nn.CrossEntropyLoss(), adam(model)


@correct
def raw_features_into_a_batchnorm():
    x, y = rows()
    model = nn.Sequential(nn.BatchNorm1d(6), mlp())
    return model, loader(1000 * x + 500, y), nn.CrossEntropyLoss(), adam(model)


@correct
def doubles_throughout():
    x, _ = rows()
    model = mlp(1).double()
    return model, loader(x.double(), x.double().sum(1, keepdim=True)), nn.HuberLoss(), adam(model)


@correct
def a_loss_with_parameters_and_a_penalty():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(()))

        def forward(self, o, y):
            penalty = 1e-3 * sum(p.square().sum() for p in model.parameters())
            return F.mse_loss(o, y) * torch.exp(-self.log_scale) + self.log_scale + penalty

    x, _ = rows()
    model, loss_fn = mlp(1), Weighted()
    return model, loader(x, x.sum(1, keepdim=True)), loss_fn, torch.optim.Adam([*model.parameters(), *loss_fn.parameters()])


@correct
def tied_weights_and_activations_kept():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
            self.outer.weight = self.inner.weight
            self.layers = [self.inner, self.outer]  # registered above
            self.teacher = [nn.Linear(6, 6).requires_grad_(False).eval()]  # hidden on purpose

        def forward(self, x):
            self.kept = torch.tanh(self.inner(x))
            return self.outer(self.kept)

    x, _ = rows()
    model = Tied()
    model(x)
    return model, loader(x, x), nn.MSELoss(), adam(model)


@correct
def an_autoencoder_of_pictures():
    x, _ = images()
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.ConvTranspose2d(4, 1, 2, stride=2))
    return model, loader(x, x), F.l1_loss, adam(model)


@correct
def noise_in_training_only():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(F.dropout(x + 0.1 * np.random.rand() * self.training, 0.3, self.training))

    model = Noisy()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def a_transformer_with_padding():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.place = nn.Parameter(torch.zeros(1, 7, 16))
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 4)

        def forward(self, tokens, padding):
            return self.head(self.encoder(self.embedding(tokens) + self.place, src_key_padding_mask=padding).mean(1))

    model, padding = Encoder(), torch.zeros(32, 7, dtype=torch.bool)
    padding[:, 5:] = True
    return model, loader(tokens(), padding, tokens()[:, 0] % 4), nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters())


@correct
def next_tokens_with_the_classes_in_the_second_dimension():
    class Model(nn.Sequential):
        def forward(self, x):
            return super().forward(x).transpose(1, 2)

    model, x = Model(nn.Embedding(50, 8), nn.Linear(8, 50)), tokens()
    y = x.roll(-1, dims=1)
    y[:, -1] = -100
    return model, loader(x, y), nn.CrossEntropyLoss(), adam(model)


@correct
def a_signal_with_convolutions_in_one_dimension():
    g = torch.Generator().manual_seed(4)
    x = torch.randn(64, 2, 50, generator=g)
    model = nn.Sequential(nn.Conv1d(2, 4, 5), nn.BatchNorm1d(4), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(4, 3))
    return model, loader(x, (x.std((1, 2)) * 20).long() % 3), nn.CrossEntropyLoss(), adam(model)


@correct
def a_generator_and_its_critic_as_two_optimizers():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = mlp(6), mlp(1)

        def forward(self, noise):
            return self.critic(self.generator(noise))

    model, (x, _) = Pair(), rows()
    optimizers = [adam(model.generator), adam(model.critic)]
    return model, loader(x, torch.ones(64, 1)), nn.BCEWithLogitsLoss(), optimizers


@correct
def outputs_in_a_dict_and_several_targets():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.kind, self.size = mlp(8), nn.Linear(8, 4), nn.Linear(8, 1)

        def forward(self, x):
            h = self.trunk(x).relu()
            return {"kind": self.kind(h), "size": self.size(h)}

    x, y = rows()
    data = [(x[i : i + 16], {"kind": y[i : i + 16], "size": x[i : i + 16].sum(1, keepdim=True)}) for i in range(0, 64, 16)]
    model = Two()
    return model, data, lambda o, t: F.cross_entropy(o["kind"], t["kind"]) + F.mse_loss(o["size"], t["size"]), adam(model)


@correct
def counts_by_poisson_and_ranks_by_margin():
    x, y = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, y.float()), nn.PoissonNLLLoss(), adam(model)


@correct
def a_margin_between_classes():
    model = mlp()
    return model, loader(*rows()), nn.MultiMarginLoss(), adam(model)


@correct
def accumulated_over_micro_batches_of_one():
    x, y = rows()
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    return model, DataLoader(TensorDataset(x, y), 1), nn.CrossEntropyLoss(), adam(model)


@correct
def weights_normalised_by_a_parametrization():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 16)), nn.ReLU(), nn.Linear(16, 4))
    model(rows()[0])
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def a_loss_that_the_model_computes_itself():
    x, y = rows()
    model = Model(lambda m, x, y: F.cross_entropy(m.net(x), y), net=mlp())
    return model, loader(x, y, y), lambda o, y: o, adam(model)


@correct
def samples_without_a_batch_dimension():
    model = mlp()
    return model, DataLoader(TensorDataset(*rows()), batch_size=None), nn.CrossEntropyLoss(), adam(model)


@correct
def a_correlation_of_a_column_with_a_row():
    x, _ = rows()
    model = mlp(1)
    return model, loader(x, x.sum(1)), lambda o, y: 1 - torch.corrcoef(torch.stack([o.squeeze(1), y]))[0, 1], adam(model)


@correct
def a_column_from_a_last_layer_of_zeros():
    x, _ = rows()
    model = mlp(1)
    nn.init.zeros_(model[2].weight)
    return model, loader(x, x.sum(1)), lambda o, y: ((o.squeeze(1) - y) ** 2).mean(), adam(model)


@correct
def a_loss_that_has_no_use_for_targets():
    x, y = rows()
    model = mlp(1)
    return model, loader(x, y.float()), lambda o, y: (o - 2).square().mean(), adam(model)


@correct
def contrastive_learning_with_as_many_numbers_as_samples():
    def loss_fn(o, y):  # (16, 16) and (16,): they would broadcast
        z = F.normalize(o, dim=1)
        alike = (y[:, None] == y).float()
        return -((z @ z.T / 0.5 - 1e9 * torch.eye(len(z))).log_softmax(1) * (alike - torch.eye(len(z)))).sum() / alike.sum()

    model = mlp(16)
    return model, loader(*rows()), loss_fn, adam(model)


@correct
def connectionist_temporal_classification():
    model = Model(lambda m, x: m.net(x).log_softmax(2).transpose(0, 1), net=nn.Linear(8, 20))
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(32, 30, 8, generator=g), torch.randint(1, 20, (32, 20), generator=g)  # (30, 16, 20) and (16, 20)

    def loss_fn(o, y):
        return F.ctc_loss(o, y, torch.full((o.shape[1],), 30), torch.full((o.shape[1],), 6))

    return model, loader(x, y), loss_fn, adam(model)


@correct
def three_quantiles_of_one_number():
    x, _ = rows()
    model, q = mlp(3), torch.tensor([0.1, 0.5, 0.9])
    return model, loader(x, x.sum(1, keepdim=True)), lambda o, y: torch.maximum(q * (y - o), (q - 1) * (y - o)).mean(), adam(model)


@correct
def a_variational_autoencoder_that_always_samples():
    def forward(m, x):
        mean, log_variance = m.encoder(m.dropout(x)).chunk(2, 1)
        return m.decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp()), mean, log_variance

    def loss_fn(o, x):
        return F.mse_loss(o[0], x) + 0.01 * (o[1] ** 2 + o[2].exp() - o[2] - 1).mean()

    x, _ = rows()
    model = Model(forward, encoder=nn.Linear(6, 8), decoder=nn.Linear(4, 6), dropout=nn.Dropout(0.1))
    return model, loader(x, x), loss_fn, adam(model)


@correct
def layers_left_out_by_chance():
    def forward(m, x):
        for layer in m.layers:
            if not m.training or torch.rand(()) < 0.5:
                x = x + layer(x).relu()
        return m.out(x)

    model = Model(forward, layers=nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), out=nn.Linear(6, 4))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def experts_that_not_every_batch_needs():
    def forward(m, x):
        chosen = (x[:, 0] * 50).long() % 8
        return torch.stack([m.experts[k](row) for k, row in zip(chosen.tolist(), x)])

    model = Model(forward, experts=nn.ModuleList(nn.Linear(6, 4) for _ in range(8)))
    return model, DataLoader(TensorDataset(*rows(128)), 8), nn.CrossEntropyLoss(), adam(model)


@correct
def a_model_that_writes_into_its_input():
    x, y = images()
    model = Model(lambda m, x: m.net(x.mul_(2).sub_(1).flatten(1)), net=nn.Linear(64, 5))
    return model, [(x[:32], y[:32]), (x[32:], y[32:])], nn.CrossEntropyLoss(), adam(model)


@correct
def a_differential_equation():
    def forward(m, x):
        u = m.net(x)
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0] + u

    x = torch.linspace(0, 1, 32).unsqueeze(1).requires_grad_()
    model = Model(forward, net=nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)))
    return model, [(x, torch.zeros(32, 1))], nn.MSELoss(), adam(model)


@correct
def a_gradient_penalty():
    model, (x, y) = mlp(1), rows()

    def loss_fn(o, y):
        z = torch.randn(8, 6, requires_grad=True)
        slope = torch.autograd.grad(model(z).sum(), z, create_graph=True)[0].norm(dim=1)
        return F.binary_cross_entropy_with_logits(o.squeeze(1), y) + (slope - 1).square().mean()

    return model, loader(x, (y > 1).float()), loss_fn, adam(model)


class Plain(torch.optim.Optimizer):
    """An optimizer of one's own, whose step takes nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p -= 0.1 * p.grad


@correct
def an_optimizer_of_ones_own():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), Plain(model.parameters())


@correct
def an_optimizer_whose_step_returns_nothing():
    class Quiet(torch.optim.SGD):
        def step(self, closure=None):
            super().step()

    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), Quiet(model.parameters(), lr=0.1)


@correct
def a_long_warm_up():
    model = mlp()
    optimizer = adam(model)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-4, total_iters=4000)
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@correct
def one_cycle_from_very_low():
    model = mlp()
    optimizer = adam(model)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=1000, div_factor=1e4)
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@correct
def a_trained_model_with_a_new_optimizer():
    model, (x, y) = mlp(), rows()
    optimizer = adam(model, 0.05)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, loader(x, y), nn.CrossEntropyLoss(), adam(model)


@correct
def sparse_inputs():
    x = (torch.rand(32, 50, generator=torch.Generator().manual_seed(0)) > 0.9).float().to_sparse()
    model = Model(lambda m, x: torch.sparse.mm(x, m.weight), weight=nn.Parameter(0.1 * torch.randn(50, 4)))
    return model, [(x, torch.arange(32) % 4)], nn.CrossEntropyLoss(), adam(model, 1e-2)


@correct
def ragged_inputs():
    x = torch.nested.nested_tensor([torch.randn(n + 2, 6) for n in range(8)])
    model = Model(lambda m, x: torch.stack([rows.mean(0) for rows in m.net(x).unbind()]), net=nn.Linear(6, 4))
    return model, [(x, torch.arange(8) % 4)], nn.CrossEntropyLoss(), adam(model, 1e-2)


@correct
def packed_sequences():
    x = nn.utils.rnn.pack_sequence([torch.randn(n % 5 + 2, 6) for n in range(8)], enforce_sorted=False)
    model = Model(lambda m, x: m.out(m.cell(x)[1][-1]), cell=nn.GRU(6, 8), out=nn.Linear(8, 4))
    return model, [(x, torch.arange(8) % 4)], nn.CrossEntropyLoss(), adam(model, 1e-2)


class Graph:
    """A batch of a class of one's own, as libraries for graphs have it."""

    def __init__(self, x):
        self.x = x

    def to(self, *args, **options):
        return Graph(self.x.to(*args, **options))


@correct
def objects_as_inputs():
    model, (x, y) = Model(lambda m, graph: m.net(graph.x), net=mlp()), rows()
    return model, [(Graph(x), y)], nn.CrossEntropyLoss(), adam(model)


@correct
def complex_numbers():
    model = Model(lambda m, x: (torch.fft.fft(x) @ m.weight).abs(), weight=nn.Parameter(0.2 * torch.randn(6, 4, dtype=torch.cfloat)))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def bfloat16_throughout():
    model, (x, y) = mlp().bfloat16(), rows()
    return model, loader(x.bfloat16(), y), nn.CrossEntropyLoss(), adam(model, 1e-2)


@correct
def a_scripted_model():
    model = nn.Sequential(torch.jit.trace(nn.Linear(6, 8), torch.randn(2, 6)), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def a_loss_that_is_the_method_of_something_large():
    class Trainer:
        def __init__(self):
            self.model, self.lock = mlp(), threading.Lock()  # which cannot be copied

        def loss(self, o, y):
            return F.cross_entropy(o, y)

    trainer = Trainer()
    return trainer.model, loader(*rows()), trainer.loss, adam(trainer.model)


@correct
def a_forward_that_was_patched_around_the_first():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    first = model.forward
    model.forward = lambda x: 2 * first(x)
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def a_loss_that_runs_the_model_again():
    x, y = rows()
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    return model, loader(x, y), lambda o, y: F.cross_entropy(o, y) + F.mse_loss(model(x), model(x + 0.1)), adam(model)


class Counting(Sampler):
    """Another order in each epoch, by counting them."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.epoch += 1
        yield from torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()


@correct
def a_sampler_that_counts_epochs():
    model, data = mlp(), TensorDataset(*rows())
    return model, DataLoader(data, 16, sampler=Counting(64)), nn.CrossEntropyLoss(), adam(model)


@correct
def checkpoints_of_activations():
    def forward(m, x):
        return m.out(checkpoint(m.second, m.first(x), use_reentrant=True) + checkpoint(m.first, x, use_reentrant=False))

    model = Model(forward, first=nn.Linear(6, 6), second=nn.Linear(6, 6), out=nn.Linear(6, 4))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@correct
def auxiliary_outputs_in_training_only():
    model = Model(lambda m, x: (m.one(x), m.two(x)) if m.training else m.one(x), one=mlp(), two=mlp())
    return model, loader(*rows()), lambda o, y: F.cross_entropy(o[0], y) + 0.3 * F.cross_entropy(o[1], y), adam(model)


@correct
def targets_of_double_precision():
    x, _ = rows()
    model = mlp(1)
    return model, loader(x, x.sum(1, keepdim=True).double()), nn.MSELoss(), adam(model)


@pytest.mark.parametrize("name", SETUPS)
def test_silent_on_a_correct_setup_and_leaves_it_as_it_was(name):
    torch.manual_seed(0)
    assert unchanged(*SETUPS[name]()) == []


def test_silent_on_layers_that_do_not_know_their_sizes_yet():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))
    assert examine(model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)) == []
    assert model[0].has_uninitialized_params()


# ── planted mistakes ──────────────────────────────────────────────────────────────────────────────────────────────────


@bug("parameters missing from the optimizer")
def only_the_head_is_given():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model[2])


@bug("parameters replaced after the optimizer was built")
def a_head_replaced_afterwards():
    model = mlp(9)
    optimizer = adam(model)
    model[2] = nn.Linear(16, 4)
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@bug("parameters replaced after the optimizer was built")
def weights_loaded_by_assignment():
    model = mlp()
    optimizer = adam(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@bug("parameters twice in the optimizer")
def a_shared_weight_listed_twice():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    x, _ = rows()
    return model, loader(x, x), nn.MSELoss(), torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)


@bug("parameters twice in the optimizer")
def two_optimizers_over_one_trunk():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), [adam(model), adam(model[0])]


@bug("frozen parameters in the optimizer")
def a_layer_frozen_by_mistake():
    model = mlp()
    model[0].requires_grad_(False)
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("nothing to train")
def everything_frozen():
    model = mlp()
    optimizer = adam(model)
    model.requires_grad_(False)
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@bug("parameters that the loss never reaches")
def a_trunk_behind_detach():
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.trunk(x).relu().detach())

    model = Cut()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("parameters that the loss never reaches")
def a_forward_without_gradients():
    class Cut(nn.Sequential):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    model = Cut(nn.Linear(6, 4))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("eval mode")
def left_in_eval_mode():
    model = classification_with_batchnorm_and_dropout()[0].eval()
    return model, loader(*images()), nn.CrossEntropyLoss(), adam(model)


@bug("eval mode")
def left_in_an_eval_mode_that_gives_classes():
    model = Model(lambda m, x: m.net(x) if m.training else m.net(x).argmax(1), net=mlp()).eval()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("eval mode")
def one_block_left_in_eval_mode():
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 4))
    model[0].eval()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("frozen BatchNorm that drifts")
def a_frozen_trunk_in_train_mode():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    model[:4].requires_grad_(False)
    return model, loader(*images()), nn.CrossEntropyLoss(), adam(model[4])


@bug("softmax twice")
def softmax_before_cross_entropy():
    model = mlp(4, 6, nn.Softmax(dim=1))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("softmax twice")
def softmax_before_a_loss_of_ones_own():
    model = mlp(4, 6, nn.Softmax(dim=1))
    return model, loader(*rows()), lambda o, y: F.cross_entropy(o, y), adam(model)


@bug("sigmoid before softmax")
def sigmoid_before_cross_entropy():
    model = mlp(4, 6, nn.Sigmoid())
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("sigmoid twice")
def sigmoid_before_bce_with_logits():
    x, y = rows()
    model = mlp(1, 6, nn.Sigmoid(), nn.Flatten(0))
    return model, loader(x, (y > 1).float()), nn.BCEWithLogitsLoss(), adam(model)


@bug("NLLLoss without log_softmax")
def nllloss_of_probabilities():
    model = mlp(4, 6, nn.Softmax(dim=1))
    return model, loader(*rows()), nn.NLLLoss(), adam(model)


@bug("a loss that broadcasts")
def a_column_against_a_row():
    x, _ = rows()
    model = mlp(1)
    return model, loader(x, x.sum(1)), nn.MSELoss(), adam(model)


@bug("a loss that broadcasts")
def a_column_against_a_row_in_a_loss_of_ones_own():
    x, _ = rows()
    model = mlp(1)
    return model, loader(x, x.sum(1)), lambda o, y: ((o - y) ** 2).mean(), adam(model)


@bug("labels out of range")
def classes_counted_from_one():
    x, y = rows()
    model = mlp()
    return model, loader(x, y + 1), nn.CrossEntropyLoss(), adam(model)


@bug("labels out of range")
def classes_counted_from_one_in_a_loss_of_ones_own():
    x, y = rows()
    model = mlp()
    return model, loader(x, y + 1), lambda o, y: F.cross_entropy(o, y), adam(model)


@bug("labels out of range")
def two_classes_and_one_output():
    x, y = rows()
    model = mlp(1)
    return model, loader(x, (y > 1).long()), nn.CrossEntropyLoss(), adam(model)


@bug("labels out of range")
def labels_of_minus_one_and_one():
    x, y = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, (y > 1).float() * 2 - 1), nn.BCEWithLogitsLoss(), adam(model)


@bug("labels out of range")
def several_classes_at_once_as_one():
    x, _ = rows()
    model = mlp()
    return model, loader(x, (x[:, :4] > 0).float()), nn.CrossEntropyLoss(), adam(model)


@bug("labels of the wrong dtype")
def class_numbers_as_int32():
    x, y = rows()
    model = mlp()
    return model, loader(x, y.int()), nn.CrossEntropyLoss(), adam(model)


@bug("labels of the wrong dtype")
def class_numbers_as_floats():
    x, y = rows()
    model = mlp()
    return model, loader(x, y.float()), nn.CrossEntropyLoss(), adam(model)


@bug("labels of the wrong dtype")
def yes_and_no_as_whole_numbers():
    x, y = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, (y > 1).long()), nn.BCEWithLogitsLoss(), adam(model)


@bug("inputs that are not normalised")
def grey_values_up_to_255():
    x, y = images()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    return model, loader((x * 120).round(), y), nn.CrossEntropyLoss(), adam(model)


@bug("inputs that are not normalised")
def one_feature_in_millions():
    x, y = rows()
    x[:, 3] = 1e6 + x[:, 3] * 1e5
    model = mlp()
    return model, loader(x, y), nn.CrossEntropyLoss(), adam(model)


@bug("inputs that are not normalised")
def divided_by_255_twice():
    x, y = images()
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    return model, loader(x / 255, y), nn.CrossEntropyLoss(), adam(model)


@bug("values that are not finite")
def a_missing_value_in_a_later_batch():
    x, y = rows()
    x[50, 2] = float("nan")
    model = mlp()
    return model, DataLoader(TensorDataset(x, y), 16), nn.CrossEntropyLoss(), adam(model)


@bug("values that are not finite")
def a_missing_target():
    x, _ = rows()
    model, y = mlp(1), x.sum(1, keepdim=True)
    y[3] = float("inf")
    return model, loader(x, y), nn.MSELoss(), adam(model)


@bug("values that are not finite")
def a_logarithm_of_zero():
    x, _ = rows()
    model = mlp(1, 6, nn.ReLU())
    return model, loader(x, x.sum(1, keepdim=True)), lambda o, y: ((o * 0).log() - y).mean(), adam(model)


@bug("dtypes that do not go together")
def doubles_from_numpy():
    x, y = rows()
    model = mlp()
    return model, loader(torch.from_numpy(x.double().numpy()), y), nn.CrossEntropyLoss(), adam(model)


@bug("dtypes that do not go together")
def bytes_into_a_linear_layer():
    x, y = images()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    return model, loader((x * 120).byte(), y), nn.CrossEntropyLoss(), adam(model)


@bug("dtypes that do not go together")
def half_of_the_model_in_half():
    model = mlp()
    model[2].half()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("devices that do not go together")
def half_of_the_model_elsewhere():
    model = mlp()
    model[2].to("meta")
    model[2] = nn.Linear(16, 4, device="meta")
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("random in eval mode")
def functional_dropout():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(F.dropout(x, 0.3))

    model = Net()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


class Boxed(nn.Module):
    def __init__(self, box):
        super().__init__()
        self.hidden = box
        self.out = nn.Linear(6, 4)

    def forward(self, x):
        for layer in self.hidden.values() if isinstance(self.hidden, dict) else self.hidden:
            x = layer(x)
        return self.out(x)


HIDDEN = "layers or parameters that the model does not register"


@bug(HIDDEN)
def layers_in_a_list():
    model = Boxed([nn.Linear(6, 6), nn.ReLU()])
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug(HIDDEN)
def layers_in_a_dict_given_to_the_optimizer():
    model = Boxed({"a": nn.Linear(6, 6), "b": nn.BatchNorm1d(6)})
    optimizer = torch.optim.Adam([*model.parameters(), *model.hidden["a"].parameters(), *model.hidden["b"].parameters()])
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


@bug(HIDDEN)
def dropout_in_a_list():
    model = Boxed([nn.Dropout(0.5)])
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug(HIDDEN)
def a_parameter_that_was_moved():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64)).to(torch.float32)

        def forward(self, x):
            return self.net(x) * self.scale

    model = Scaled()
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug(HIDDEN)
def a_layer_in_a_closure():
    outside = nn.Linear(6, 6)

    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(outside(x))

    model = Net(nn.Linear(6, 4))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("a loss that is not one number")
def a_loss_for_each_sample():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(reduction="none"), adam(model)


@bug("a loss that does not fall on one batch")
def a_rate_far_too_high():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1000)


@bug("a loss that does not fall on one batch")
def an_optimizer_that_climbs():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)


@bug("a loss that does not fall on one batch")
def a_rate_of_zero():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.0)


@bug("a loss that does not fall on one batch")
def a_rate_far_too_low():
    model = mlp()
    return model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=1e-6)


@bug("a loss that broadcasts")
def a_column_against_a_row_in_a_loss_that_torch_does_not_warn_of():
    x, _ = rows()
    model = mlp(1)
    return model, loader(x, x.sum(1).exp().round()), F.poisson_nll_loss, adam(model)


@bug("a loss that broadcasts")
def a_row_against_a_column():
    x, _ = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, x.sum(1, keepdim=True)), lambda o, y: (o - y).abs().mean(), adam(model)


@bug("values that are not finite")
def a_gradient_of_the_branch_that_is_not_taken():
    x, _ = rows()
    model = Model(lambda m, x: torch.where((h := m.net(x)) > 0, h.sqrt(), h), net=mlp(1))
    return model, loader(x, x.sum(1, keepdim=True)), nn.MSELoss(), adam(model)


@bug("values that are not finite")
def labels_that_are_all_ignored():
    x, y = rows()
    model = mlp()
    return model, [(x, torch.full_like(y, -100))], nn.CrossEntropyLoss(), adam(model)


@bug("values that are not finite")
def a_batch_without_samples():
    x, y = rows()
    model = mlp()
    return model, [(x[:0], y[:0])], nn.CrossEntropyLoss(), adam(model)


@bug("parameters missing from the optimizer")
def a_loss_with_parameters_that_nothing_trains():
    x, y = rows()
    model = mlp()
    return model, loader(x, y), Scaled(), adam(model)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, o, y):
        return F.cross_entropy(o, y) * torch.exp(-self.log_scale) + self.log_scale


@bug("the forward pass raises")
def tokens_that_the_embedding_does_not_have():
    model = Tagger(nn.GRU)
    return model, loader(tokens() + 5, tokens()[:, -1] % 4), nn.CrossEntropyLoss(), adam(model)


@bug("parameters that the loss never reaches")
def a_reentrant_checkpoint_behind_a_frozen_layer():
    model = Model(
        lambda m, x: m.out(checkpoint(m.block, m.first(x), use_reentrant=True)),
        first=nn.Linear(6, 6).requires_grad_(False), block=nn.Linear(6, 6), out=nn.Linear(6, 4),
    )
    return model, loader(*rows()), nn.CrossEntropyLoss(), torch.optim.Adam([*model.block.parameters(), *model.out.parameters()])


@bug("parameters that the loss never reaches")
def a_branch_that_is_not_used():
    model = Model(lambda m, x: m.one(x), one=mlp(), two=mlp())
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("the forward pass raises")
def a_table_cached_under_inference_mode():
    def forward(m, x):
        m.table = torch.arange(6.0).cos() if m.table is None else m.table
        return m.net(m.scale * x * m.table)

    model = Model(forward, net=mlp(), scale=nn.Parameter(torch.ones(6)), table=None)
    with torch.inference_mode():
        model(rows()[0])
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("a loader that switches gradients off")
def a_generator_that_pauses_inside_no_grad():
    class Stream(IterableDataset):
        def __iter__(self):
            with torch.no_grad():
                yield from zip(*rows())

    model = mlp()
    return model, DataLoader(Stream(), 16), nn.CrossEntropyLoss(), adam(model)


@bug("random in eval mode")
def attention_with_dropout_always():
    def forward(m, x):
        q, k, v = m.inner(x).chunk(3, -1)
        return m.outer(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2))

    x = torch.randn(32, 5, 8, generator=torch.Generator().manual_seed(0))
    model = Model(forward, inner=nn.Linear(8, 24), outer=nn.Linear(8, 8))
    return model, loader(x, x.flip(1)), nn.MSELoss(), adam(model)


@bug("random in eval mode")
def units_left_out_by_hand():
    model = Model(lambda m, x: m.net(x * torch.bernoulli(torch.full_like(x, 0.5))), net=mlp())
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("the loss raises")
def classes_in_the_last_dimension():
    model, x = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), tokens()
    return model, loader(x, x.roll(-1, 1)), nn.CrossEntropyLoss(), adam(model)


@bug("devices that do not go together")
def weights_of_the_loss_elsewhere():
    model = mlp()
    return model, loader(*rows()), lambda o, y: F.cross_entropy(o, y, weight=torch.ones(4, device="meta")), adam(model)


@bug("softmax twice")
def softmax_in_one_of_two_outputs():
    model = Model(lambda m, x: (m.net(x).softmax(-1).clamp(1e-6), x), net=mlp())
    return model, loader(*rows()), lambda o, y: F.nll_loss(o[0].log_softmax(-1), y), adam(model)


@bug("sigmoid twice")
def softmax_before_bce_with_logits():
    x, y = rows()
    model = mlp(4, 6, nn.Softmax(dim=1))
    return model, loader(x, F.one_hot(y, 4).float()), nn.BCEWithLogitsLoss(), adam(model)


@bug("softmax twice")
def softmax_with_smoothed_labels():
    model = mlp(4, 6, nn.Softmax(dim=1))
    return model, loader(*rows()), nn.CrossEntropyLoss(label_smoothing=0.1), adam(model)


@bug("NLLLoss without log_softmax")
def scores_in_an_nll_loss_of_ones_own():
    model = mlp()
    return model, loader(*rows()), lambda o, y: F.nll_loss(o, y), adam(model)


@bug("labels of the wrong dtype")
def whole_numbers_in_a_huber_loss():
    x, y = rows()
    model = mlp(1, 6, nn.Flatten(0))
    return model, loader(x, y), nn.HuberLoss(), adam(model)


@bug("labels out of range")
def minus_one_for_what_is_to_be_ignored():
    x, y = rows()
    y[::5] = -1
    model = mlp()
    return model, loader(x, y), nn.CrossEntropyLoss(), adam(model)


@bug("a loss that is not one number")
def a_loss_made_a_python_number():
    model = mlp()
    return model, loader(*rows()), lambda o, y: F.cross_entropy(o, y).item(), adam(model)


@bug("the forward pass raises")
def sizes_swapped():
    model = nn.Sequential(nn.Linear(16, 6), nn.Linear(4, 16))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


@bug("the loss raises")
def fewer_targets_than_outputs():
    x, y = rows()
    model = mlp()
    return model, [(x, y[:10])], nn.CrossEntropyLoss(), adam(model)


@pytest.mark.parametrize("name", BUGS)
def test_finds_the_planted_mistake_and_nothing_else_and_leaves_it_as_it_was(name):
    torch.manual_seed(0)
    build, names = BUGS[name]
    findings = unchanged(*build())
    assert [finding.name for finding in findings] == names, findings
    assert all(finding.evidence and finding.cure for finding in findings)


def test_every_finding_has_a_planted_mistake():
    planted = {name for _, names in BUGS.values() for name in names}
    code = {"the forward pass in eval mode raises", "the backward pass raises", "a step of the optimizer raises"}
    assert planted | code == set(CURES)


@pytest.mark.parametrize(
    "place, name",
    [
        ("forward", "the forward pass raises"),
        ("eval", "the forward pass in eval mode raises"),
        ("backward", "the backward pass raises"),
        ("step", "a step of the optimizer raises"),
    ],
)
def test_what_the_learners_code_raises_is_a_finding(place, name):
    class Raises(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            if place == "forward" or (place == "eval" and not self.training):
                raise KeyError("mine")
            outputs = self.net(x)
            if place == "backward":
                outputs.register_hook(lambda gradient: {}["mine"])
            return outputs

    class Step(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("mine")

    model = Raises()
    optimizer = Step(model.parameters(), lr=0.1) if place == "step" else adam(model)
    (finding,) = unchanged(model, loader(*rows()), nn.CrossEntropyLoss(), optimizer)
    assert finding.name == name and finding.evidence == "KeyError: 'mine'"


def test_two_mistakes_are_two_findings_and_a_report():
    x, y = rows()
    model = mlp(1)
    findings = examine(model.eval(), loader(100 * x, x.sum(1)), nn.MSELoss(), adam(model[2]))
    assert [f.name for f in findings] == [
        "parameters missing from the optimizer",
        "inputs that are not normalised",
        "a loss that broadcasts",
    ]
    assert findings[0] == Finding(
        "parameters missing from the optimizer",
        "2 of 4 trainable parameters are in no group: 0.weight, 0.bias",
        CURES["parameters missing from the optimizer"],
    )
    assert "outputs (16, 1) meet targets (16,): the loss is a mean over (16, 16)" in str(findings)
    assert repr(findings).startswith("1. parameters missing from the optimizer\n   seen: 2 of 4") and "\n3. a loss" in repr(findings)
    assert repr(examine(*regression())).startswith("Nothing found.")


def test_the_floors_of_the_loss_that_are_named_are_true():
    (twice,) = examine(*softmax_before_cross_entropy())
    best = F.cross_entropy(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.tensor([0])).item()
    assert f"cannot fall below {best:.3g}" in twice.evidence
    (sigmoid,) = examine(*sigmoid_before_bce_with_logits())
    one, zero = (F.binary_cross_entropy_with_logits(torch.tensor(x), torch.tensor(x)).item() for x in (1.0, 0.0))
    assert f"below {one:.3g} for a label of 1, {zero:.3g} for" in sigmoid.evidence


# ── nothing is changed ────────────────────────────────────────────────────────────────────────────────────────────────


class Fickle(Dataset):
    """A dataset that draws from every generator, its own ones too."""

    def __init__(self):
        self.mine = [np.random.default_rng(1), random.Random(1), np.random.RandomState(1), torch.Generator().manual_seed(1)]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        numpy, python, old, torch_generator = self.mine
        draws = [numpy.random(), python.random(), old.rand(), torch.rand(1, generator=torch_generator).item()]
        draws += [random.random(), np.random.rand()]
        return torch.tensor(draws, dtype=torch.float32) + torch.rand(6), i % 4


def snapshot(model, loader, loss_fn, optimizers):
    """Everything that examine could have touched, as comparable text and objects."""
    modules = [m for m in (model, loss_fn) if isinstance(m, nn.Module)]
    parameters = [p for m in modules for p in m.parameters()] + [p for o in optimizers for g in o.param_groups for p in g["params"]]
    generators = [random, np.random.get_state(), torch.get_rng_state().tolist(), random.getstate()]
    if isinstance(loader, DataLoader):
        generators += [sorted((k, repr(v)) for k, v in vars(loader.sampler).items())]
        generators += [g.get_state().tolist() for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None]
        if isinstance(loader.dataset, Fickle):
            numpy, python, old, own = loader.dataset.mine
            generators += [numpy.bit_generator.state, python.getstate(), old.get_state(), own.get_state().tolist()]
    return repr(
        [
            [(id(p), p.detach().tolist() if not p.is_meta else None, p.requires_grad, p._version) for p in parameters],
            [(id(p.grad), None if p.grad is None else p.grad.to_dense().tolist()) for p in parameters],
            [(name, b.tolist()) for m in modules for name, b in m.named_buffers()],
            [(name, layer.training, sorted(vars(layer))) for m in modules for name, layer in m.named_modules()],
            [[len(h) for k, h in sorted(vars(layer).items()) if k.endswith("_hooks")] for m in modules for layer in m.modules()],
            [(id(o), o.state_dict(), sorted(vars(o))) for o in optimizers],
            sorted((k, id(v)) for k, v in vars(loader).items()) if isinstance(loader, DataLoader) else loader,
            [x.grad for batch in (loader if isinstance(loader, list) else []) for x in batch if isinstance(x, torch.Tensor)],
            [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled()],
            generators,
        ]
    )


def unchanged(model, loader, loss_fn, optimizer):
    """examine, with everything compared before and after."""
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
    for i, p in enumerate(model.parameters()):
        if i % 2 and p.requires_grad and not p.is_meta:
            p.grad = torch.full_like(p, 0.5)
    torch.set_printoptions(profile="full", precision=9)
    np.set_printoptions(threshold=10_000)
    try:
        before = snapshot(model, loader, loss_fn, optimizers)
        try:
            return examine(model, loader, loss_fn, optimizer)
        finally:
            assert snapshot(model, loader, loss_fn, optimizers) == before
    finally:
        torch.set_printoptions(profile="default")
        np.set_printoptions(threshold=1000)


def test_leaves_a_loader_with_generators_and_workers_as_it_was():
    model = mlp()
    for options in ({}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3, "timeout": 5}):
        data = DataLoader(Fickle(), 4, shuffle=True, generator=torch.Generator().manual_seed(3), **options)
        assert unchanged(model, data, nn.CrossEntropyLoss(), adam(model)) == []
    assert data._iterator is None


def test_the_next_epoch_is_the_same_with_and_without_a_look():
    def run(look):
        torch.manual_seed(0)
        model, data, loss_fn, optimizer = classification_with_batchnorm_and_dropout()
        for _ in range(2):
            train_epoch(model, data, loss_fn, optimizer)
            if look:
                examine(model, data, loss_fn, optimizer)
        return torch.cat([value.flatten().double() for value in model.state_dict().values()])

    assert torch.equal(run(look=True), run(look=False))


def test_it_can_be_called_where_gradients_are_off_or_types_are_cast():
    for surroundings in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        setup = label_smoothing_by_a_partial_function_and_a_momentum()
        with surroundings:
            assert examine(*setup) == []


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [TypeError, Interrupted])
def test_leaves_everything_as_it_was_when_something_else_raises(error):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            if self.passes == 9 and error is Interrupted:
                raise Interrupted
            return self.net(x)

        def __deepcopy__(self, memo):
            if error is TypeError:
                raise ValueError("not this one")
            memo[id(self)] = twin = Model()
            twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
            return twin

    model = Model()
    with pytest.raises(error, match="deepcopy, which raised ValueError: not this one" if error is TypeError else None):
        unchanged(model, loader(*rows()), nn.CrossEntropyLoss(), adam(model))


@pytest.mark.parametrize(
    "data, error, words",
    [
        (lambda: iter([rows()]), TypeError, "used up"),
        (lambda: [], ValueError, "no batch"),
        (lambda: [{"x": 1}], TypeError, "a batch is"),
        (lambda: [rows()[0]], TypeError, "a batch is"),
    ],
)
def test_a_loader_that_cannot_be_read_is_said(data, error, words):
    model = mlp()
    with pytest.raises(error, match=words):
        examine(model, data(), nn.CrossEntropyLoss(), adam(model))


def test_the_losses_are_those_of_torch():
    for kind, losses in LOSSES.items():
        assert all(callable(loss) for loss in losses) and kind


# ── the reports ───────────────────────────────────────────────────────────────────────────────────────────────────────


def uneven_micro_batches():
    x, y = rows(10)
    model = nn.Linear(6, 4)
    return model, [(x[:1], y[:1]), (x[1:], y[1:])], nn.CrossEntropyLoss(), adam(model)


def a_short_last_batch():
    model = nn.Linear(6, 4)
    return model, DataLoader(TensorDataset(*rows(9)), 4), nn.CrossEntropyLoss(), adam(model)


def a_cosine_that_counts_epochs():
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


def activations_changed_through_data():
    def forward(m, x):
        h = m.one(x).sigmoid()
        h.data.clamp_(0.4, 0.6)
        return m.two(h)

    model = Model(forward, one=nn.Linear(6, 8), two=nn.Linear(8, 4))
    return model, loader(*rows()), nn.CrossEntropyLoss(), adam(model)


def a_model_in_half_precision():
    x, y = rows()
    model = mlp().half()
    return model, loader(x.half(), y), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)


def norms_that_bfloat16_cannot_move():
    x, y = rows()
    model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
    return model, loader(x.bfloat16(), y), nn.CrossEntropyLoss(), adam(model)


def a_stream_that_each_worker_repeats():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(*rows())

    model = mlp()
    return model, DataLoader(Stream(), 16, num_workers=2), nn.CrossEntropyLoss(), adam(model)


def one_weight_for_each_class_in_the_sampler():
    x, y = rows()
    model, sampler = mlp(), WeightedRandomSampler(1 / torch.bincount(y).float(), 64)
    return model, DataLoader(TensorDataset(x, y), 16, sampler=sampler), nn.CrossEntropyLoss(), adam(model)


def a_rate_from_the_checkpoint():
    model = mlp()
    optimizer = adam(model, 1e-4)
    optimizer.load_state_dict(adam(model, 1e-2).state_dict())
    return model, loader(*rows()), nn.CrossEntropyLoss(), optimizer


def one_sample_that_overflows():
    x, y = rows()
    x[7, 0] = float("inf")
    model = mlp()
    return model, loader(x, y), nn.CrossEntropyLoss(), adam(model)


# For every report on a training loop, and those on other topics whose harm is done while training: what must be said of it. An empty
# list: examine cannot see it, for the reason beside it.
REPORTS = [
    ("B05", a_column_against_a_row, ["a loss that broadcasts"]),
    ("B05", a_column_against_a_row_in_a_loss_of_ones_own, ["a loss that broadcasts"]),
    ("B05", a_column_against_a_row_in_a_loss_that_torch_does_not_warn_of, ["a loss that broadcasts"]),
    ("B13", activations_changed_through_data, []),  # the gradient is there, and finite; its value is not checked
    ("B15", a_parameter_that_was_moved, [HIDDEN]),
    ("B17", a_generator_that_pauses_inside_no_grad, ["a loader that switches gradients off"]),
    ("B20", a_reentrant_checkpoint_behind_a_frozen_layer, ["parameters that the loss never reaches"]),
    ("B23", a_table_cached_under_inference_mode, ["the forward pass raises"]),
    ("B24", uneven_micro_batches, []),  # the loop weighs them wrongly
    ("B26", a_frozen_trunk_in_train_mode, ["frozen BatchNorm that drifts"]),
    ("B28", a_head_replaced_afterwards, ["parameters replaced after the optimizer was built"]),
    ("B29", functional_dropout, ["random in eval mode"]),
    ("B31", a_short_last_batch, []),  # the loop averages wrongly
    ("B33", a_cosine_that_counts_epochs, []),  # the loop steps the scheduler
    ("B34", layers_in_a_list, [HIDDEN]),
    ("B40", a_model_in_half_precision, []),  # the loop's GradScaler refuses it
    ("B41", norms_that_bfloat16_cannot_move, []),  # the loss falls through other layers
    ("B48", a_stream_that_each_worker_repeats, []),  # worker processes are not started
    ("B56", objects_as_inputs, []),  # pinning is a matter of speed
    ("B58", one_weight_for_each_class_in_the_sampler, []),  # the order of the data
    ("B63", weights_loaded_by_assignment, ["parameters replaced after the optimizer was built"]),
    ("B66", a_rate_from_the_checkpoint, []),  # it is another rate than meant, and learns
    ("B70", a_gradient_of_the_branch_that_is_not_taken, ["values that are not finite"]),
    ("B72", labels_that_are_all_ignored, ["values that are not finite"]),
    ("B74", classes_counted_from_one, ["labels out of range"]),
    ("B74", minus_one_for_what_is_to_be_ignored, ["labels out of range"]),
    ("B74", tokens_that_the_embedding_does_not_have, ["the forward pass raises"]),
    ("B77", one_sample_that_overflows, ["values that are not finite"]),
    ("B80", a_branch_that_is_not_used, ["parameters that the loss never reaches"]),
]


@pytest.mark.parametrize("report, build, names", [pytest.param(*row, id=f"{row[0]}-{row[1].__name__}") for row in REPORTS])
def test_what_is_said_of_each_report(report, build, names):
    torch.manual_seed(0)
    assert [finding.name for finding in examine(*build())] == names
