import copy
import functools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from exercise_answers import broken, right, wrong

# ── sgd_step ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("sgd_step", "in-place")
def recorded_step(parameters, rate):
    for p in parameters:
        p -= rate * p.grad
        p.grad = None


@wrong("sgd_step", "gives the name p to a new tensor")
def new_tensors(parameters, rate):
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p = p - rate * p.grad
                p.grad = None


@wrong("sgd_step", "uphill")
def ascent(parameters, rate):
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p += rate * p.grad
                p.grad = None


@wrong("sgd_step", "still holds a gradient")
def gradients_stay(parameters, rate):
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p -= rate * p.grad


@wrong("sgd_step", "zeros are a gradient too")
def gradients_of_zeros(parameters, rate):
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p -= rate * p.grad
                p.grad.zero_()


@wrong("sgd_step", "NoneType")
def every_parameter_has_a_gradient(parameters, rate):
    with torch.no_grad():
        for p in parameters:
            p -= rate * p.grad
            p.grad = None


@wrong("sgd_step", "has moved")
def cleared_too_early(parameters, rate):
    for p in parameters:
        p.grad = None
        with torch.no_grad():
            if p.grad is not None:
                p -= rate * p.grad


@wrong("sgd_step", "still holds a gradient")
def two_walks(parameters, rate):
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p -= rate * p.grad
        for p in parameters:  # a generator is at its end by now
            p.grad = None


@wrong("sgd_step", "trainable leaf")
def stops_training(parameters, rate):
    for p in parameters:
        if p.grad is not None:
            p.requires_grad_(False)
            p -= rate * p.grad
            p.grad = None


@right("sgd_step")
def by_an_optimizer(parameters, rate):
    optimizer = torch.optim.SGD(list(parameters), lr=rate)
    optimizer.step()
    optimizer.zero_grad()


@right("sgd_step")
def through_data(parameters, rate):
    for p in parameters:
        if p.grad is not None:
            p.data = p.data - rate * p.grad
            p.grad = None


@right("sgd_step")
@torch.no_grad()
def all_in_one_call(parameters, rate):
    held = [p for p in parameters if p.grad is not None]
    torch._foreach_add_(held, [p.grad for p in held], alpha=-rate)
    for p in held:
        p.grad = None


# ── correct_predictions ───────────────────────────────────────────────────────────────────────────────────────────────


@wrong("correct_predictions", "argmax(dim=1)")
def along_the_samples(outputs, targets):
    return (outputs.argmax(0) == targets).sum().item()


@wrong("correct_predictions", "broadcasts to (N, N)")
def kept_dimension(outputs, targets):
    return (torch.max(outputs, dim=1, keepdim=True)[1] == targets).sum().item()


@wrong("correct_predictions", "largest *values*")
def values_for_places(outputs, targets):
    return (torch.max(outputs, dim=1)[0] == targets).sum().item()


@wrong("correct_predictions", ".item() takes the number")
def a_tensor(outputs, targets):
    return (outputs.argmax(1) == targets).sum()


@wrong("correct_predictions", "share of right answers")
def a_share(outputs, targets):
    return (outputs.argmax(1) == targets).float().mean().item()


@wrong("correct_predictions", "float")
def a_float(outputs, targets):
    return (outputs.argmax(1) == targets).float().sum().item()


@wrong("correct_predictions", "need not be above one half")
def by_a_threshold(outputs, targets):
    return int((outputs[torch.arange(len(targets)), targets] > 0.5).sum())


@wrong("correct_predictions", "value differs")
def target_only(outputs, targets):
    return int((outputs[torch.arange(len(targets)), targets] > 0).sum())


@right("correct_predictions")
def by_a_loop(outputs, targets):
    return sum(row.index(max(row)) == target for row, target in zip(outputs.tolist(), targets.tolist()))


@right("correct_predictions")
def by_numpy_argmax(outputs, targets):
    return int(np.count_nonzero(outputs.detach().numpy().argmax(1) == targets.numpy()))


@right("correct_predictions")
def by_softmax_first(outputs, targets):
    return outputs.softmax(1).topk(1).indices.squeeze(1).eq(targets).sum().item()


# ── evaluate ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("evaluate", "Each batch has the same weight")
def mean_of_batch_means(model, loader, loss_fn):
    modes = {part: part.training for part in model.modules()}
    model.eval()
    losses, shares = [], []
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            losses.append(loss_fn(out, y).item())
            shares.append((out.argmax(1) == y).float().mean().item())
    for part, mode in modes.items():
        part.training = mode
    return sum(losses) / len(loader), sum(shares) / len(loader)


def _figures(model, loader, loss_fn):
    loss = right = n = 0
    for x, y in loader:
        out = model(x)
        loss += loss_fn(out, y).item() * len(y)
        right += (out.argmax(1) == y).sum().item()
        n += len(y)
    return loss / n, right / n


@wrong("evaluate", "was not in eval mode")
def no_eval(model, loader, loss_fn):
    with torch.no_grad():
        return _figures(model, loader, loss_fn)


@wrong("evaluate", "stays in eval mode")
def no_way_back(model, loader, loss_fn):
    model.eval()
    with torch.inference_mode():
        return _figures(model, loader, loss_fn)


@wrong("evaluate", "puts every part into train mode")
def train_at_the_end(model, loader, loss_fn):
    model.eval()
    with torch.no_grad():
        result = _figures(model, loader, loss_fn)
    model.train()
    return result


@wrong("evaluate", "given to all its parts")
def flag_of_the_whole(model, loader, loss_fn):
    mode = model.training
    model.eval()
    with torch.no_grad():
        result = _figures(model, loader, loss_fn)
    model.train(mode)
    return result


@wrong("evaluate", "graph is recorded")
def with_a_graph(model, loader, loss_fn):
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    result = _figures(model, loader, loss_fn)
    for part, mode in modes:
        part.training = mode
    return result


@wrong("evaluate", "where a float was expected")
def tensors(model, loader, loss_fn):
    return tuple(torch.tensor(v) for v in by_a_copy(model, loader, loss_fn))


@right("evaluate")
def by_a_copy(model, loader, loss_fn):
    with torch.no_grad():
        return _figures(copy.deepcopy(model).eval(), loader, loss_fn)


@right("evaluate")
def all_outputs_first(model, loader, loss_fn):
    modes = [(part, part.training) for part in model.modules()]
    model.train(False)
    try:
        with torch.inference_mode():
            pairs = [(model(x), y) for x, y in loader]
            out, y = (torch.cat(part) for part in zip(*pairs))
            return loss_fn(out, y).item(), float((out.argmax(1) == y).double().mean())
    finally:
        for part, mode in modes:
            part.train(mode) if not list(part.children()) else setattr(part, "training", mode)


# ── accumulated_step ──────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("accumulated_step", "mean of means")
def over_their_number(model, micro_batches, loss_fn, optimizer):
    optimizer.zero_grad()
    whole = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) / len(micro_batches)
        loss.backward()
        whole += loss.item()
    optimizer.step()
    return whole


@wrong("accumulated_step", "nothing divides them")
def sum_of_means(model, micro_batches, loss_fn, optimizer):
    optimizer.zero_grad()
    whole = 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        whole += loss.item()
    optimizer.step()
    return whole


@wrong("accumulated_step", "steps after each micro-batch")
def many_steps(model, micro_batches, loss_fn, optimizer):
    total, whole = sum(len(y) for _, y in micro_batches), 0.0
    for x, y in micro_batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        whole += loss.item() * len(y) / total
    return whole


@wrong("accumulated_step", "clear them first")
def cleared_afterwards(model, micro_batches, loss_fn, optimizer):
    total, whole = sum(len(y) for _, y in micro_batches), 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y) * len(y) / total
        loss.backward()
        whole += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return whole


@wrong("accumulated_step", "in memory together")
def concatenated_batches(model, micro_batches, loss_fn, optimizer):
    x, y = (torch.cat(part) for part in zip(*micro_batches))
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@wrong("accumulated_step", "in memory together")
def one_backward(model, micro_batches, loss_fn, optimizer):
    total = sum(len(y) for _, y in micro_batches)
    optimizer.zero_grad()
    loss = sum(loss_fn(model(x), y) * len(y) for x, y in micro_batches) / total
    loss.backward()
    optimizer.step()
    return loss.item()


@wrong("accumulated_step", "value differs")
def returns_the_last_loss(model, micro_batches, loss_fn, optimizer):
    total = sum(len(y) for _, y in micro_batches)
    optimizer.zero_grad()
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        (loss * len(y) / total).backward()
    optimizer.step()
    return loss.item()


@right("accumulated_step")
def divided_at_the_end(model, micro_batches, loss_fn, optimizer):
    total = sum(len(y) for _, y in micro_batches)
    model.zero_grad()
    whole = 0.0
    for x, y in reversed(micro_batches):
        loss = loss_fn(model(x), y) * len(y)
        loss.backward()
        whole += loss.item()
    for p in model.parameters():
        p.grad /= total
    optimizer.step()
    return whole / total


@right("accumulated_step")
def by_autograd_grad(model, micro_batches, loss_fn, optimizer):
    parameters, total = list(model.parameters()), sum(len(y) for _, y in micro_batches)
    sums, whole = [torch.zeros_like(p) for p in parameters], 0.0
    for x, y in micro_batches:
        loss = loss_fn(model(x), y)
        for s, g in zip(sums, torch.autograd.grad(loss, parameters)):
            s.add_(g, alpha=len(y) / total)
        whole += loss.item() * len(y) / total
    for p, s in zip(parameters, sums):
        p.grad = s
    optimizer.step()
    return whole


@right("accumulated_step")
def by_torch_func(model, micro_batches, loss_fn, optimizer):
    parameters, total, whole = dict(model.named_parameters()), sum(len(y) for _, y in micro_batches), 0.0
    detached = {n: p.detach() for n, p in parameters.items()}
    optimizer.zero_grad()
    for x, y in micro_batches:
        with torch.no_grad():
            whole += loss_fn(model(x), y).item() * len(y) / total
        grads = torch.func.grad(lambda ps, x=x, y=y: loss_fn(torch.func.functional_call(model, ps, (x,)), y) * len(y) / total)(detached)
        for n, p in parameters.items():
            p.grad = grads[n] if p.grad is None else p.grad + grads[n]
    optimizer.step()
    return whole


# ── parameter_groups ──────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("parameter_groups", "Two groups are asked for")
def all_decay(module, weight_decay):
    return [{"params": list(module.parameters()), "weight_decay": weight_decay}]


@wrong("parameter_groups", "The name decides here: what is not called a bias")
def by_the_word_bias(module, weight_decay):
    named = list(module.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": weight_decay},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]


@wrong("parameter_groups", "exchanged")
def exchanged(module, weight_decay):
    return [
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": weight_decay},
        {"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": 0.0},
    ]


@wrong("parameter_groups", "frozen and yet in a group")
def frozen_too(module, weight_decay):
    return [
        {"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@wrong("parameter_groups", "in the groups twice")
def shared_twice(module, weight_decay):
    own = [p for m in module.modules() for p in m.parameters(recurse=False) if p.requires_grad]
    return [
        {"params": [p for p in own if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() < 2], "weight_decay": 0.0},
    ]


@wrong("parameter_groups", 'each with "params" and "weight_decay"')
def default_decay(module, weight_decay):
    ps = [p for p in module.parameters() if p.requires_grad]
    return [{"params": [p for p in ps if p.dim() > 1], "weight_decay": weight_decay}, {"params": [p for p in ps if p.dim() < 2]}]


@wrong("parameter_groups", "is in neither group")
def by_layer_type(module, weight_decay):
    kinds = (nn.Linear, nn.Conv2d)
    decay = {id(m.weight): m.weight for m in module.modules() if isinstance(m, kinds)}
    rest = {id(m.bias): m.bias for m in module.modules() if isinstance(m, kinds) and m.bias is not None}
    return [{"params": list(decay.values()), "weight_decay": weight_decay}, {"params": list(rest.values()), "weight_decay": 0.0}]


@wrong("parameter_groups", "no parameter of the module")
def of_names(module, weight_decay):
    return [
        {"params": [n for n, p in module.named_parameters() if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [n for n, p in module.named_parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]


@right("parameter_groups")
def vectors_first_with_a_generator(module, weight_decay):
    ps = [p for p in module.parameters() if p.requires_grad]
    return [
        {"weight_decay": 0.0, "params": (p for p in ps if p.ndim < 2)},
        {"weight_decay": weight_decay, "params": filter(lambda p: p.ndim >= 2, ps), "lr": 0.1},
    ]


@right("parameter_groups")
def a_group_for_each_parameter(module, weight_decay):
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return [{"params": [(n, p)], "weight_decay": weight_decay if len(p.shape) > 1 else 0.0} for n, p in named]


# ── lr_trace ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _bench(lr):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)


@wrong("lr_trace", "what the *next* step uses")
def read_after(make_scheduler, steps, lr=1.0):
    optimizer = _bench(lr)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@wrong("lr_trace", "one entry too many")
def first_and_all_after(make_scheduler, steps, lr=1.0):
    optimizer = _bench(lr)
    scheduler = make_scheduler(optimizer)
    rates = [scheduler.get_last_lr()[0]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return rates


@wrong("lr_trace", "PyTorch warns")
def scheduler_alone(make_scheduler, steps, lr=1.0):
    scheduler, rates = make_scheduler(_bench(lr)), []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.step()
    return rates


@wrong("lr_trace", "lr is not used")
def always_one(make_scheduler, steps, lr=1.0):
    return simple_trace(make_scheduler, steps, 1.0)


@wrong("lr_trace", "a list came where a float was expected")
def lists_of_rates(make_scheduler, steps, lr=1.0):
    optimizer = _bench(lr)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
    return rates


@wrong("lr_trace", "Make it first, then read")
def read_before_it_is_made(make_scheduler, steps, lr=1.0):
    optimizer = _bench(lr)
    rates = [optimizer.param_groups[0]["lr"]][:steps]
    scheduler = make_scheduler(optimizer)
    for _ in range(steps - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@right("lr_trace")
def simple_trace(make_scheduler, steps, lr=1.0):
    optimizer = torch.optim.AdamW([torch.zeros(3, requires_grad=True)], lr=lr)
    scheduler, rates = make_scheduler(optimizer), []
    while len(rates) < steps:
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


@right("lr_trace")
def plain_sgd(make_scheduler, steps, lr=1.0):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler, rates = make_scheduler(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@right("lr_trace")
def no_step_after_the_last(make_scheduler, steps, lr=1.0):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    scheduler, rates = make_scheduler(optimizer), []
    for step in range(steps):
        if step:
            scheduler.step()
        rates.append(float(optimizer.param_groups[-1]["lr"]))
        model(torch.ones(1)).backward()
        optimizer.step()
    return rates


# ── he_init_ ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _each_layer(module, change, layers=None):
    for layer in layers if layers is not None else module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            with torch.no_grad():
                change(layer)
                if layer.bias is not None:
                    layer.bias.zero_()
    return module


@wrong("he_init_", "number of *outputs*")
def fan_out(module):
    return _each_layer(module, lambda m: m.weight.normal_(0, math.sqrt(2 / m.weight[:, 0].numel())))


@wrong("he_init_", "2 / fan_in is the variance")
def variance_for_deviation(module):
    return _each_layer(module, lambda m: m.weight.normal_(0, 2 / m.weight[0].numel()))


@wrong("he_init_", "keeps the variance of a linear layer")
def for_linear_layers(module):
    return _each_layer(module, lambda m: m.weight.normal_(0, m.weight[0].numel() ** -0.5))


@wrong("he_init_", "height and width are missing")
def without_the_kernel(module):
    return _each_layer(module, lambda m: m.weight.normal_(0, math.sqrt(2 / m.weight.shape[1])))


@wrong("he_init_", "only the channels of its group")
def all_channels(module):
    def change(m):
        fan_in = m.in_features if isinstance(m, nn.Linear) else m.in_channels * m.kernel_size[0] * m.kernel_size[1]
        m.weight.normal_(0, math.sqrt(2 / fan_in))

    return _each_layer(module, change)


@wrong("he_init_", "set them to 0")
def biases_stay(module):
    for m in module.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
    return module


@wrong("he_init_", "direct children")
def children_alone(module):
    return _each_layer(module, lambda m: nn.init.kaiming_normal_(m.weight), module.children())


@wrong("he_init_", "uniform form")
def uniform(module):
    return _each_layer(module, lambda m: nn.init.kaiming_uniform_(m.weight, nonlinearity="relu"))


@wrong("he_init_", "another object")
def new_parameters(module):
    for m in module.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            m.weight = nn.Parameter(torch.randn(m.weight.shape) * math.sqrt(2 / m.weight[0].numel()))
            if m.bias is not None:
                m.bias = nn.Parameter(torch.zeros(m.bias.shape))
    return module


@wrong("he_init_", "belongs to a BatchNorm2d")
def everything_with_a_weight(module):
    for name, p in module.named_parameters():
        with torch.no_grad():
            p.normal_(0, math.sqrt(2 / p[0].numel())) if name.endswith("weight") else p.zero_()
    return module


@wrong("he_init_", "'NoneType'")
def every_layer_has_a_bias(module):
    for m in module.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            m.bias.data.zero_()
    return module


@wrong("he_init_", "is as it was")
def multiplied_copy(module):
    for m in module.modules():
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            weight = m.weight.detach().clone()
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
    return module


@right("he_init_")
def by_torch_init(module):
    def change(m):
        if isinstance(m, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
            if m.bias is not None:
                nn.init.zeros_(m.bias)

    return module.apply(change)


@right("he_init_")
def recursive_by_randn(module):
    for child in module.children():
        recursive_by_randn(child)
    if isinstance(module, (nn.Linear, nn.Conv2d)):
        std = np.sqrt(2 / np.prod(module.weight.shape[1:]))
        module.weight.data = torch.randn(module.weight.shape) * float(std)
        if module.bias is not None:
            module.bias.data.fill_(0)
    return module


@right("he_init_")
def by_numpy_numbers(module):
    draw = np.random.default_rng(7)

    def change(m):
        m.weight.copy_(torch.from_numpy(draw.normal(0, math.sqrt(2 / m.weight[0].numel()), m.weight.shape)))

    return _each_layer(module, change)


# ── clip_and_step ─────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("clip_and_step", "clipped by itself")
def each_by_itself(parameters, optimizer, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters], error_if_nonfinite=True).item()
    for p in parameters:
        nn.utils.clip_grad_norm_(p, max_norm)
    optimizer.step()
    return norm


@wrong("clip_and_step", "cut off at max_norm")
def by_value(parameters, optimizer, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in parameters], error_if_nonfinite=True).item()
    nn.utils.clip_grad_value_(parameters, max_norm)
    optimizer.step()
    return norm


@wrong("clip_and_step", "scaled *up*")
def always_max_norm(parameters, optimizer, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm().item()
    for p in parameters:
        p.grad *= max_norm / norm
    optimizer.step()
    return norm


@wrong("clip_and_step", "destroys")
def no_question_asked(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    optimizer.step()
    return norm.item()


@wrong("clip_and_step", "inf times 0")
def nan_alone(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
    if math.isnan(norm):
        raise RuntimeError("NaN in the gradient")
    optimizer.step()
    return norm


@wrong("clip_and_step", ".item() takes the number")
def norm_as_a_tensor(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    optimizer.step()
    return norm


@wrong("clip_and_step", "it should raise RuntimeError")
def silent_skip(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
    if math.isfinite(norm):
        optimizer.step()
    return norm


@wrong("clip_and_step", "optimizer.step() was called")
def too_late(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm).item()
    optimizer.step()
    if not math.isfinite(norm):
        raise RuntimeError("not finite")
    return norm


@wrong("clip_and_step", "The step comes before the clipping")
def steps_and_clips(parameters, optimizer, max_norm):
    optimizer.step()
    return nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True).item()


@wrong("clip_and_step", "norm after clipping")
def returns_the_clipped(parameters, optimizer, max_norm):
    parameters = list(parameters)
    nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    optimizer.step()
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).item()


@wrong("clip_and_step", "walked through once")
def walks_twice(parameters, optimizer, max_norm):
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters if p.grad is not None))
    if not math.isfinite(norm):
        raise RuntimeError("not finite")
    for p in parameters:
        if p.grad is not None and norm > max_norm:
            p.grad *= max_norm / norm
    optimizer.step()
    return norm


@wrong("clip_and_step", "division by zero")
def zero_norm_divides(parameters, optimizer, max_norm):
    parameters = [p for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters))
    if not math.isfinite(norm):
        raise RuntimeError("not finite")
    for p in parameters:
        p.grad *= min(1, max_norm / norm)
    optimizer.step()
    return norm


@right("clip_and_step")
def by_torch(parameters, optimizer, max_norm):
    norm = nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=True)
    optimizer.step()
    return norm.item()


@right("clip_and_step")
def new_gradients(parameters, optimizer, max_norm):
    held = [p for p in parameters if p.grad is not None]
    norm = float(np.linalg.norm(np.concatenate([p.grad.numpy().ravel() for p in held])))
    if norm in (math.inf, -math.inf) or norm != norm:
        raise RuntimeError(f"norm {norm}")
    for p in held:
        p.grad = p.grad * (max_norm / max(norm, max_norm))
    optimizer.step()
    return norm


# ── unoptimized ───────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("unoptimized", "Numbers are compared")
def by_numbers(model, optimizer):
    held = [p for g in optimizer.param_groups for p in g["params"]]
    return [n for n, p in model.named_parameters() if p.requires_grad and not any(p.shape == h.shape and (p == h).all() for h in held)]


@wrong("unoptimized", "RuntimeError")
def by_the_word_in(model, optimizer):
    held = [p for g in optimizer.param_groups for p in g["params"]]
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in held]


@wrong("unoptimized", "Only the first group")
def first_group(model, optimizer):
    held = set(map(id, optimizer.param_groups[0]["params"]))
    return [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]


@wrong("unoptimized", "Frozen parameters are named")
def frozen_named(model, optimizer):
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return [n for n, p in model.named_parameters() if id(p) not in held]


@wrong("unoptimized", "Shapes are compared")
def by_shapes(model, optimizer):
    held = {p.shape for g in optimizer.param_groups for p in g["params"]}
    return [n for n, p in model.named_parameters() if p.requires_grad and p.shape not in held]


@wrong("unoptimized", "others are asked for")
def the_held_ones(model, optimizer):
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return [n for n, p in model.named_parameters() if id(p) in held]


@wrong("unoptimized", "set came where a list was expected")
def a_set_of_names(model, optimizer):
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    return {n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held}


@wrong("unoptimized", "Its length is")
def by_count(model, optimizer):
    held = sum(len(g["params"]) for g in optimizer.param_groups)
    return [n for n, p in model.named_parameters()][held:]


@right("unoptimized")
def tensors_as_keys(model, optimizer):
    held = {p for g in optimizer.param_groups for p in g["params"]}  # a tensor's hash is its identity
    return [n for n, p in model.named_parameters() if p.requires_grad and p not in held]


@right("unoptimized")
def by_is(model, optimizer):
    def holds(p):
        return any(p is h for g in optimizer.param_groups for h in g["params"])

    missing = []
    for name, p in model.named_parameters():
        if p.requires_grad and not holds(p):
            missing.append(name)
    return missing


# ── best_weights ──────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("best_weights", "as the last epoch left it")
def references(model, epochs):
    best, kept = -math.inf, None
    for score in epochs:
        if score > best:
            best, kept = score, model.state_dict()
    model.load_state_dict(kept)
    return best


@wrong("best_weights", "a shallow copy")
def shallow(model, epochs):
    best, kept = -math.inf, None
    for score in epochs:
        if score > best:
            best, kept = score, model.state_dict().copy()
    model.load_state_dict(kept)
    return best


@wrong("best_weights", "as the last epoch left it")
def a_copy_under_the_same_name(model, epochs):
    best = -math.inf
    for score in epochs:
        if score > best:
            best, kept = score, copy.deepcopy(model)
    model = kept  # the caller's model is another object
    return best


@wrong("best_weights", "as the last epoch left it")
def all_scores_first(model, epochs):
    return max(score for score in list(epochs) if score == score)


@wrong("best_weights", "running statistics belong to the model")
def parameters_alone(model, epochs):
    best, kept = -math.inf, None
    for score in epochs:
        if score > best:
            best, kept = score, [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, k in zip(model.parameters(), kept):
            p.copy_(k)
    return best


@wrong("best_weights", "lowest score")
def as_for_a_loss(model, epochs):
    best, kept = math.inf, None
    for score in epochs:
        if score < best:
            best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best


@wrong("best_weights", "later one was kept")
def latest_of_equals(model, epochs):
    best, kept = -math.inf, None
    for score in epochs:
        if score >= best:
            best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best


@wrong("best_weights", "best for ever")
def first_without_question(model, epochs):
    best = None
    for score in epochs:
        if best is None or score > best:
            best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best


@wrong("best_weights", "UnboundLocalError")
def from_zero(model, epochs):
    best = 0.0
    for score in epochs:
        if score > best:
            best, kept = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return best


@right("best_weights")
def copies_of_everything(model, epochs):
    history = [(score, copy.deepcopy(model)) for score in epochs]
    score, best = max(((s, m) for s, m in history if not math.isnan(s)), key=lambda pair: pair[0])
    model.load_state_dict(best.state_dict())
    return score


@right("best_weights")
def clones_written_back(model, epochs):
    best, kept = float("-inf"), {}
    while (score := next(epochs, None)) is not None:
        if not score <= best and score == score:
            best, kept = score, {n: t.clone() for n, t in model.state_dict().items()}
    with torch.no_grad():
        for n, t in model.state_dict().items():
            t.copy_(kept[n])
    return best


# ── seeded_loader ─────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("seeded_loader", "global generator when an epoch begins")
def unseeded(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, shuffle=True)


@wrong("seeded_loader", "global random state")
def seeds_everything(dataset, batch_size, seed):
    random.seed(seed)
    torch.manual_seed(seed)
    return DataLoader(dataset, batch_size, shuffle=True)


@wrong("seeded_loader", "changes torch's global random state")
def seeds_everything_besides(dataset, batch_size, seed):
    torch.manual_seed(seed)
    return DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))


@wrong("seeded_loader", "global random state")
def the_global_generator(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, shuffle=True, generator=torch.default_generator)


@wrong("seeded_loader", "every epoch repeats it")
def one_permutation(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, sampler=torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist())


@wrong("seeded_loader", "has not been given the seed")
def generator_without_seed(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator())


@wrong("seeded_loader", "the one of the seed 0")
def seed_ignored(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(0))


@wrong("seeded_loader", "shuffle=True is missing")
def not_shuffled(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, generator=torch.Generator().manual_seed(seed))


@wrong("seeded_loader", "is dropped")
def last_dropped(dataset, batch_size, seed):
    return DataLoader(dataset, batch_size, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(seed))


@wrong("seeded_loader", "samples")
def batch_size_of_one(dataset, batch_size, seed):
    return DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(seed))


@wrong("seeded_loader", "cannot be walked through")
def a_generator(dataset, batch_size, seed):
    yield from DataLoader(dataset, batch_size, shuffle=True, generator=torch.Generator().manual_seed(seed))


@right("seeded_loader")
def by_a_sampler(dataset, batch_size, seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    return DataLoader(dataset, batch_size, sampler=RandomSampler(dataset, generator=generator))


class ByEpoch(Sampler):
    """The order of epoch e follows from seed + e."""

    def __init__(self, n, seed):
        self.n, self.seed, self.epoch = n, seed, 0

    def __iter__(self):
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.n)
        self.epoch += 1
        return iter(order.tolist())

    def __len__(self):
        return self.n


@right("seeded_loader")
def by_a_batch_sampler(dataset, batch_size, seed):
    return DataLoader(dataset, batch_sampler=BatchSampler(ByEpoch(len(dataset), seed), batch_size, drop_last=False))


@right("seeded_loader")
def by_python_random(dataset, batch_size, seed):
    class Shuffled(Sampler):
        def __init__(self):
            self.draw = random.Random(seed)

        def __iter__(self):
            return iter(self.draw.sample(range(len(dataset)), len(dataset)))

        def __len__(self):
            return len(dataset)

    return DataLoader(dataset, batch_size, sampler=Shuffled())


# ── transfer_head ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _new_head(model, classes):
    model.requires_grad_(False)
    name, old = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    parent, _, last = name.rpartition(".")
    head = nn.Linear(old.in_features, classes)
    setattr(model.get_submodule(parent), last, head)
    return head


def _norms(model):
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@wrong("transfer_head", "Statistics are buffers, not parameters")
def norms_forgotten(model, classes):
    return list(_new_head(model, classes).parameters())


@wrong("transfer_head", "puts them back")
def eval_once(model, classes):
    head = _new_head(model, classes)
    for norm in _norms(model):
        norm.eval()
    return list(head.parameters())


@wrong("transfer_head", "With a momentum of 0")
def momentum_zero(model, classes):
    head = _new_head(model, classes)
    for norm in _norms(model):
        norm.momentum = 0
    return list(head.parameters())


@wrong("transfer_head", "batch's statistics")
def tracking_off(model, classes):
    head = _new_head(model, classes)
    for norm in _norms(model):
        norm.track_running_stats = False
    return list(head.parameters())


@wrong("transfer_head", "The new layer is frozen as well")
def freezes_last(model, classes):
    head = hooked(model, classes)
    for p in model.parameters():
        p.requires_grad = False
    return head


@wrong("transfer_head", "Trainable are")
def nothing_frozen(model, classes):
    head = hooked(model, classes)
    model.requires_grad_(True)
    return head


@wrong("transfer_head", "should be an nn.Linear with")
def last_child(model, classes):
    model.requires_grad_(False)
    name, _ = list(model.named_children())[-1]
    head = nn.Linear(8, classes)
    setattr(model, name, head)
    for norm in _norms(model):
        norm.train = lambda mode=True, norm=norm: norm
        norm.eval()
    for norm in _norms(model):
        norm.training = False
    return list(head.parameters())


@wrong("transfer_head", "old numbers")
def kept_when_it_fits(model, classes):
    old = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    before = copy.deepcopy(old.state_dict())
    head = hooked(model, classes)
    if old.out_features == classes:
        [m for m in model.modules() if isinstance(m, nn.Linear)][-1].load_state_dict(before)
    return head


@wrong("transfer_head", "list of the new layer's weight and bias")
def an_iterator(model, classes):
    hooked(model, classes)
    return (p for p in model.parameters() if p.requires_grad)


@wrong("transfer_head", "frozen ones too")
def everything_returned(model, classes):
    hooked(model, classes)
    return list(model.parameters())


@right("transfer_head")
def hooked(model, classes):
    head = _new_head(model, classes)
    for norm in _norms(model):
        norm.register_forward_pre_hook(lambda layer, inputs: layer.eval() and None)
    return list(head.parameters())


@right("transfer_head")
def train_overridden(model, classes):
    _new_head(model, classes)
    for norm in _norms(model):
        norm.eval()
        norm.train = lambda mode=True, norm=norm: norm
    return [p for p in model.parameters() if p.requires_grad]


class Still1d(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(False)


class Still2d(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


@right("transfer_head")
def another_class(model, classes):
    head = _new_head(model, classes)
    for norm in _norms(model):
        norm.__class__ = Still1d if isinstance(norm, nn.BatchNorm1d) else Still2d
        norm.train()
    return [head.bias, head.weight]


class FrozenNorm(nn.Module):
    """Scale and shift, computed once from the statistics."""

    def __init__(self, norm):
        super().__init__()
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", norm.bias.detach() - norm.running_mean * scale)

    def forward(self, x):
        shape = (1, -1, *[1] * (x.dim() - 2))
        return x * self.scale.view(shape) + self.shift.view(shape)


@right("transfer_head")
def norms_replaced(model, classes):
    def replace(part):
        for name, child in part.named_children():
            if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
                setattr(part, name, FrozenNorm(child))
            replace(child)

    head = _new_head(model, classes)
    replace(model)
    return list(head.parameters())


@right("transfer_head")
def whole_model_stays_in_eval(model, classes):
    head = _new_head(model, classes)
    model.eval()
    train = model.train

    def keep_norms(mode=True):
        train(mode)
        for norm in _norms(model):
            norm.eval()
        return model

    model.train = keep_norms
    return list(head.parameters())


# ── clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────────

broken("accumulate_epoch", "Weigh each batch by its share")
broken("train_head", "BatchNorm moves its running statistics")
broken("attach_and_train", "Make the optimizer last")
broken("dropout_network", "dropout is still active")
broken("balanced_accuracy", "batches' own figures are averaged")
broken("train_with_cosine", "T_max counts calls of step()")
broken("deep_network", "hides its layers")
broken("fit_probabilities", "softmax is taken twice")


def _windowed(model, batches, optimizer, window, weigh, last=True):
    model.train()
    steps = 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches):
        inside = batches[i - i % window : i - i % window + window]
        (F.cross_entropy(model(x), y) * weigh(len(y), [len(t) for _, t in inside])).backward()
        if i % window == window - 1 or (last and i == len(batches) - 1):
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


@wrong("accumulate_epoch", "Weigh each batch by its share")
def last_window_alone_repaired(model, batches, optimizer, window):
    return _windowed(model, batches, optimizer, window, lambda n, sizes: 1 / len(sizes))


@wrong("accumulate_epoch", "make no step")
def weights_alone_repaired(model, batches, optimizer, window):
    return _windowed(model, batches, optimizer, window, lambda n, sizes: n / sum(sizes), last=False)


@wrong("accumulate_epoch", "its step is too small")
def last_window_too_small(model, batches, optimizer, window):
    return _windowed(model, batches, optimizer, window, lambda n, sizes: n / (window * sum(sizes) / len(sizes)))


@wrong("accumulate_epoch", "another state")
def by_the_mean_size_of_the_pass(model, batches, optimizer, window):
    mean = sum(len(y) for _, y in batches) / len(batches)
    return _windowed(model, batches, optimizer, window, lambda n, sizes: n / (mean * len(sizes)))


@wrong("accumulate_epoch", "clear them first")
def clears_after_each_step(model, batches, optimizer, window):
    steps = 0
    for first in range(0, len(batches), window):
        part = batches[first : first + window]
        for x, y in part:
            (F.cross_entropy(model(x), y, reduction="sum") / sum(len(t) for _, t in part)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


@right("accumulate_epoch")
def windows_as_batches(model, batches, optimizer, window):
    parts = [batches[i : i + window] for i in range(0, len(batches), window)]
    for part in parts:
        x, y = (torch.cat(tensors) for tensors in zip(*part))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return len(parts)


@right("accumulate_epoch")
def sums_divided_before_the_step(model, batches, optimizer, window):
    count = steps = 0
    optimizer.zero_grad()
    for i, (x, y) in enumerate(batches, 1):
        F.cross_entropy(model(x), y, reduction="sum").backward()
        count += len(y)
        if i % window == 0 or i == len(batches):
            for p in model.parameters():
                p.grad.div_(count)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            count, steps = 0, steps + 1
    return steps


def _head_on(features, targets, classes, optimizer=lambda ps: torch.optim.Adam(ps, lr=0.03), steps=60):
    head = nn.Linear(features.shape[1], classes)
    optimizer = optimizer(head.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(head(features), targets).backward()
        optimizer.step()
    return head


@wrong("train_head", "is left in eval mode")
def eval_for_ever(backbone, inputs, targets, classes, steps=60):
    backbone.eval()
    return _head_on(backbone(inputs).detach(), targets, classes)


@wrong("train_head", "changed its input")
def no_grad_alone(backbone, inputs, targets, classes, steps=60):
    backbone.train()
    with torch.no_grad():
        features = backbone(inputs)
    backbone.eval()
    return _head_on(features, targets, classes)


@wrong("train_head", "changed its input")
def train_at_the_end_of_it(backbone, inputs, targets, classes, steps=60):
    backbone.eval()
    features = backbone(inputs)
    backbone.train()
    return _head_on(features, targets, classes)


@wrong("train_head", "within reach")
def a_copy_in_train_mode(backbone, inputs, targets, classes, steps=60):
    return _head_on(copy.deepcopy(backbone).train()(inputs), targets, classes)


@wrong("train_head", "within reach")
def statistics_put_back(backbone, inputs, targets, classes, steps=60):
    state, modes = copy.deepcopy(backbone.state_dict()), [(m, m.training) for m in backbone.modules()]
    head = _head_on(backbone.train()(inputs).detach(), targets, classes)
    backbone.load_state_dict(state)
    for m, mode in modes:
        m.training = mode
    return head


@wrong("train_head", "within reach")
def an_untrained_head(backbone, inputs, targets, classes, steps=60):
    return nn.Linear(24, classes)


@right("train_head")
def a_copy_in_eval_mode(backbone, inputs, targets, classes, steps=60):
    model = nn.Sequential(copy.deepcopy(backbone), nn.LazyLinear(classes))
    model(inputs)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        model.train()
        model[0].eval()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model[1]


@right("train_head")
def modes_restored(backbone, inputs, targets, classes, steps=60):
    modes = {m: m.training for m in backbone.modules()}
    backbone.eval()
    head = _head_on(backbone(inputs), targets, classes, functools.partial(torch.optim.AdamW, lr=0.1))
    for m, mode in modes.items():
        m.training = mode
    return head


@wrong("attach_and_train", "nothing has trained it")
def optimizer_first(model, head, inputs, targets, steps=80):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return _trained(model, head, inputs, targets, optimizer)


def _trained(model, head, inputs, targets, optimizer, steps=80):
    model[-1] = head
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


@wrong("attach_and_train", "head alone")
def head_alone(model, head, inputs, targets, steps=80):
    return _trained(model, head, inputs, targets, torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9))


@wrong("attach_and_train", "not the head that was given")
def numbers_copied(model, head, inputs, targets, steps=80):
    return _trained(model, copy.deepcopy(head), inputs, targets, torch.optim.SGD([*model.parameters()], lr=0.1))


@wrong("attach_and_train", "within reach")
def far_too_slow(model, head, inputs, targets, steps=80):
    return _trained(model, head, inputs, targets, torch.optim.SGD([*model.parameters(), *head.parameters()], lr=1e-3), steps)


@wrong("attach_and_train", "a float, was expected")
def loss_as_a_tensor(model, head, inputs, targets, steps=80):
    model[-1] = head
    return torch.tensor(_trained(model, head, inputs, targets, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))


@right("attach_and_train")
def group_added(model, head, inputs, targets, steps=80):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.add_param_group({"params": head.parameters()})
    return _trained(model, head, inputs, targets, optimizer)


@right("attach_and_train")
def adam_after_the_head(model, head, inputs, targets, steps=80):
    model[-1] = head
    return _trained(model, head, inputs, targets, torch.optim.Adam(model.parameters(), lr=0.02))


@right("attach_and_train")
def trunk_and_head_at_two_rates(model, head, inputs, targets, steps=80):
    groups = [{"params": model[:-1].parameters(), "lr": 0.02}, {"params": head.parameters()}]
    return _trained(model, head, inputs, targets, torch.optim.SGD(groups, lr=0.2, momentum=0.9))


class _Net(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.a, self.b = nn.Linear(features, hidden), nn.Linear(hidden, classes)

    def forward(self, x):
        return self.b(self.drop(self.a(x).relu()))


@wrong("dropout_network", "there is no dropout any more")
def without_dropout(features, hidden, classes):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))


@wrong("dropout_network", "whether a graph is recorded")
def by_grad_mode(features, hidden, classes):
    class Net(_Net):
        def drop(self, x):
            return F.dropout(x, training=torch.is_grad_enabled())

    return Net(features, hidden, classes)


@wrong("dropout_network", "dropout is still active")
def flag_read_too_early(features, hidden, classes):
    class Net(_Net):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.active = self.training

        def drop(self, x):
            return F.dropout(x, training=self.active)

    return Net(features, hidden, classes)


@wrong("dropout_network", "there is no dropout any more")
def made_in_eval_mode(features, hidden, classes):
    class Net(_Net):
        def drop(self, x):
            return F.dropout(x, training=False)

    return Net(features, hidden, classes)


@wrong("dropout_network", "dropout is still active")
def new_dropout_each_time(features, hidden, classes):
    class Net(_Net):
        def drop(self, x):
            return nn.Dropout(0.5)(x)

    return Net(features, hidden, classes)


@wrong("dropout_network", "one half should be dropped")
def another_share(features, hidden, classes):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, classes))


@wrong("dropout_network", "dropout stands before the last layer")
def dropped_outputs(features, hidden, classes):
    class Net(_Net):
        def forward(self, x):
            x = self.b(self.a(x).relu())
            return x * (torch.rand_like(x) < 0.5) if self.training else x

    return Net(features, hidden, classes)


@right("dropout_network")
def a_sequence(features, hidden, classes):
    return nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, classes))


@right("dropout_network")
def a_part(features, hidden, classes):
    net = _Net(features, hidden, classes)
    net.drop = nn.Dropout(0.5)
    return net


@right("dropout_network")
def by_hand(features, hidden, classes):
    class Net(_Net):
        def drop(self, x):
            return x * torch.empty_like(x).bernoulli_(0.5) * 2 if self.training else x

    return Net(features, hidden, classes)


@wrong("balanced_accuracy", "batches' own figures are averaged")
def shares_of_batches(model, loader):
    scores = []
    for x, y in loader:
        hit = model(x).argmax(1) == y
        scores.append(sum(hit[y == c].float().mean().item() for c in y.unique()) / len(y.unique()))
    return sum(scores) / len(scores)


@wrong("balanced_accuracy", "Weighing the batches by their size")
def weighted_shares_of_batches(model, loader):
    scores = n = 0
    for x, y in loader:
        hit = model(x).argmax(1) == y
        scores += len(y) * sum(hit[y == c].float().mean().item() for c in y.unique()) / len(y.unique())
        n += len(y)
    return scores / n


@wrong("balanced_accuracy", "every sample counts alike")
def plain_accuracy(model, loader):
    hits = [model(x).argmax(1) == y for x, y in loader]
    return torch.cat(hits).float().mean().item()


@wrong("balanced_accuracy", "never occurs counts")
def over_all_classes(model, loader):
    out, y = (torch.cat(t) for t in zip(*[(model(x), y) for x, y in loader]))
    hit = out.argmax(1) == y
    return sum(hit[y == c].sum().item() / max(1, (y == c).sum().item()) for c in range(out.shape[1])) / out.shape[1]


@wrong("balanced_accuracy", "(precision)")
def of_the_answers(model, loader):
    out, y = (torch.cat(t) for t in zip(*[(model(x), y) for x, y in loader]))
    said = out.argmax(1)
    return sum((y[said == c] == c).float().mean().item() for c in said.unique()) / len(said.unique())


@right("balanced_accuracy")
def by_a_confusion_matrix(model, loader):
    matrix = 0
    for x, y in loader:
        out = model(x)
        n = out.shape[1]
        matrix = matrix + torch.bincount(y * n + out.argmax(1), minlength=n * n).view(n, n)
    there = matrix.sum(1) > 0
    return (matrix.diag()[there] / matrix.sum(1)[there]).mean().item()


@right("balanced_accuracy")
def all_together(model, loader):
    with torch.inference_mode():
        hit, y = (torch.cat(t) for t in zip(*[(model(x).argmax(1) == y, y) for x, y in loader]))
    return float(np.mean([hit[y == c].float().mean().item() for c in set(y.tolist())]))


def _cosine(model, loader, epochs, rate, make, per_batch, optimizer=torch.optim.SGD):
    optimizer = optimizer(model.parameters(), lr=rate)
    scheduler, rates = make(optimizer), []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_batch:
                scheduler.step()
        if not per_batch:
            scheduler.step()
    return rates


_schedule = torch.optim.lr_scheduler


@wrong("train_with_cosine", "hardly falls")
def both_repaired(model, loader, epochs, rate):
    return _cosine(model, loader, epochs, rate, lambda o: _schedule.CosineAnnealingLR(o, epochs * len(loader)), False)


@wrong("train_with_cosine", "One epoch's batches")
def horizon_of_one_epoch(model, loader, epochs, rate):
    return _cosine(model, loader, epochs, rate, lambda o: _schedule.CosineAnnealingLR(o, len(loader)), True)


@wrong("train_with_cosine", "half a cosine")
def a_constant_rate(model, loader, epochs, rate):
    return _cosine(model, loader, epochs, rate, lambda o: _schedule.LambdaLR(o, lambda step: 1.0), True)


@wrong("train_with_cosine", "rises again")
def restarted(model, loader, epochs, rate):
    return _cosine(model, loader, epochs, rate, lambda o: _schedule.CosineAnnealingWarmRestarts(o, 2), False)


@wrong("train_with_cosine", "begins at")
def with_warm_up(model, loader, epochs, rate):
    return _cosine(model, loader, epochs, rate, lambda o: _schedule.OneCycleLR(o, rate, epochs * len(loader), cycle_momentum=False), True)


@wrong("train_with_cosine", "rates came")
def a_rate_an_epoch(model, loader, epochs, rate):
    rates = by_the_epoch(model, loader, epochs, rate)
    return rates[:: len(loader)] if len(loader) > 1 else rates


@wrong("train_with_cosine", "no weight has moved")
def rates_alone(model, loader, epochs, rate):
    steps = epochs * len(loader)
    return [rate * (1 + math.cos(math.pi * i / steps)) / 2 for i in range(steps)]


@right("train_with_cosine")
def by_the_epoch(model, loader, epochs, rate):
    return _cosine(model, loader, epochs, rate, lambda o: _schedule.CosineAnnealingLR(o, epochs), False)


@right("train_with_cosine")
def by_adam_and_a_function(model, loader, epochs, rate):
    steps = epochs * len(loader)

    def make(optimizer):
        return _schedule.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / steps)) / 2)

    return _cosine(model, loader, epochs, rate, make, True, torch.optim.Adam)


@right("train_with_cosine")
def without_a_scheduler(model, loader, epochs, rate):
    optimizer, steps, rates = torch.optim.SGD(model.parameters(), lr=rate), epochs * len(loader), []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * len(rates) / (steps - 1))) / 2
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return rates


@wrong("deep_network", "hides its layers")
def in_a_dict(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden = {i: nn.Linear(a, b) for i, (a, b) in enumerate(zip(sizes[:-2], sizes[1:-1]))}
            self.last = nn.Linear(*sizes[-2:])

        def forward(self, x):
            for layer in self.hidden.values():
                x = layer(x).relu()
            return self.last(x)

    return Net()


@wrong("deep_network", "one linear map")
def no_relu(sizes):
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])


@wrong("deep_network", "ReLU after the last layer")
def relu_everywhere(sizes):
    return nn.Sequential(*[m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())])


@wrong("deep_network", "does not use it")
def registered_and_passed_over(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

        def forward(self, x):
            x = self.layers[0](x).relu() if len(self.layers) > 1 else x
            return self.layers[-1](x)

    return Net()


@wrong("deep_network", "shapes cannot be multiplied")
def wrong_order(sizes):
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes[::-1], sizes[::-1][1:])])


@wrong("deep_network", "parameters() finds")
def one_layer_repeated(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            middle = nn.Linear(sizes[1], sizes[1])
            inner = [nn.Linear(sizes[0], sizes[1]), *[middle] * (len(sizes) - 3)] if len(sizes) > 2 else []
            self.layers = nn.ModuleList([*inner, nn.Linear(*sizes[-2:])])

        def forward(self, x):
            return chained(self.layers, x)

    return Net()


def chained(layers, x):
    for layer in layers[:-1]:
        x = F.relu(layer(x))
    return layers[-1](x)


@right("deep_network")
def one_sequence(sizes):
    parts = [m for a, b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


@right("deep_network")
def by_setattr(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.names = [f"layer{i}" for i in range(len(sizes) - 1)]
            for name, a, b in zip(self.names, sizes, sizes[1:]):
                setattr(self, name, nn.Linear(a, b))

        def forward(self, x):
            return chained([getattr(self, name) for name in self.names], x)

    return Net()


@right("deep_network")
def of_parameters(sizes):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.ParameterList(torch.randn(b, a) / a**0.5 for a, b in zip(sizes, sizes[1:]))
            self.b = nn.ParameterList(torch.zeros(b) for b in sizes[1:])

        def forward(self, x):
            for i, (w, b) in enumerate(zip(self.w, self.b)):
                x = F.linear(x.relu() if i else x, w, b)
            return x

    return Net()


def _fitted(inputs, targets, classes, loss_of, make=lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), steps=100):
    model = nn.Linear(inputs.shape[1], classes)
    optimizer = make(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model(inputs).detach(), loss.item()


def _twice(outputs, targets):
    return F.cross_entropy(outputs.softmax(1), targets)


@wrong("fit_probabilities", "softmax is taken twice")
def log_softmax_of_softmax(inputs, targets, classes, steps=100):
    out, loss = _fitted(inputs, targets, classes, lambda o, t: F.nll_loss(o.softmax(1).log_softmax(1), t))
    return out.softmax(1), loss


@wrong("fit_probabilities", "training is as it was")
def figure_alone_repaired(inputs, targets, classes, steps=100):
    p = _fitted(inputs, targets, classes, _twice)[0].softmax(1)
    return p, F.nll_loss(p.log(), targets).item()


@wrong("fit_probabilities", "before the softmax")
def outputs_for_probabilities(inputs, targets, classes, steps=100):
    return _fitted(inputs, targets, classes, F.cross_entropy)


@wrong("fit_probabilities", "wants logarithms")
def negative_probabilities(inputs, targets, classes, steps=100):
    out, loss = _fitted(inputs, targets, classes, lambda o, t: F.nll_loss(o.softmax(1), t))
    return out.softmax(1), loss


@wrong("fit_probabilities", "within reach")
def hardly_trained(inputs, targets, classes, steps=100):
    out, loss = _fitted(inputs, targets, classes, F.cross_entropy, steps=2, make=lambda ps: torch.optim.SGD(ps, lr=1e-3))
    return out.softmax(1), loss


@wrong("fit_probabilities", "within reach")
def labels_smoothed(inputs, targets, classes, steps=100):
    p = _fitted(inputs, targets, classes, lambda o, t: F.cross_entropy(o, t, label_smoothing=0.3))[0].softmax(1)
    return p, F.nll_loss(p.log(), targets).item()


@right("fit_probabilities")
def softmax_kept_and_its_logarithm(inputs, targets, classes, steps=100):
    model = nn.Sequential(nn.Linear(inputs.shape[1], classes), nn.Softmax(dim=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.nll_loss(model(inputs).log(), targets)
        loss.backward()
        optimizer.step()
    return model(inputs), loss.item()


@right("fit_probabilities")
def log_softmax_and_adam(inputs, targets, classes, steps=100):
    out, loss = _fitted(
        inputs, targets, classes, lambda o, t: F.nll_loss(o.log_softmax(1), t), lambda ps: torch.optim.Adam(ps, lr=0.1), 2 * steps
    )
    return out.softmax(1), loss


@right("fit_probabilities")
def one_hot_by_hand(inputs, targets, classes, steps=100):
    hot = F.one_hot(targets, classes)
    out, loss = _fitted(inputs, targets, classes, lambda o, t: (o.logsumexp(1) - (o * hot).sum(1)).mean())
    return out.softmax(1), loss
