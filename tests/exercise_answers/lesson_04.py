import collections
import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import course_utils.toolkit.precision as kit
from exercise_answers import broken, right, wrong

# ── spacing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("spacing", "doubles with each power of two")
def eps_everywhere(x, dtype):
    return torch.finfo(dtype).eps


@wrong("spacing", "not proportional to x")
def relative(x, dtype):
    return abs(x) * torch.finfo(dtype).eps


@wrong("spacing", "shrinks no further")
def without_subnormals(x, dtype):
    if x == 0:
        return 0.0
    return 2.0 ** math.floor(math.log2(abs(x))) * torch.finfo(dtype).eps


@wrong("spacing", "towards 0")
def to_the_right(x, dtype):
    x = torch.tensor(x, dtype=dtype)
    return torch.nextafter(x, torch.full_like(x, math.inf)).item() - x.item()


@wrong("spacing", "a tensor")
def as_a_tensor(x, dtype):
    x = torch.tensor(abs(x), dtype=dtype)
    return torch.nextafter(x, torch.full_like(x, math.inf)) - x


@right("spacing")
def by_counting_bits(x, dtype):
    whole = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    number = torch.tensor(abs(x), dtype=dtype)
    above = (number.view(whole) + 1).view(dtype)
    return float(above.double() - number.double())


@right("spacing")
def by_exponent(x, dtype):
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(x), info.smallest_normal))
    return math.ldexp(info.eps, exponent - 1)


@right("spacing")
def by_the_toolkit(x, dtype):
    return kit.float_bits(x, dtype).spacing


# ── lost_updates ──────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("lost_updates", "Nothing is rounded")
def compares_in_float32(weights, updates, dtype):
    moved = updates != 0
    return ((weights + updates == weights) & moved).sum().item() / max(moved.sum().item(), 1)


@wrong("lost_updates", "the sum decides")
def underflowing_updates(weights, updates, dtype):
    moved = updates[updates != 0]
    return (moved.to(dtype) == 0).double().mean().item() if len(moved) else 0.0


@wrong("lost_updates", "leave it out")
def zeros_count(weights, updates, dtype):
    return ((weights + updates).to(dtype).float() == weights).float().mean().item()


@wrong("lost_updates", "ZeroDivisionError")
def divides_by_none(weights, updates, dtype):
    moved = updates != 0
    return (((weights + updates).to(dtype) == weights.to(dtype)) & moved).sum().item() / moved.sum().item()


@wrong("lost_updates", "nan")
def mean_of_none(weights, updates, dtype):
    moved = updates != 0
    return ((weights + updates).to(dtype) == weights.to(dtype))[moved].float().mean().item()


@wrong("lost_updates", "arrive")
def the_others(weights, updates, dtype):
    moved = updates != 0
    return ((weights + updates).to(dtype) != weights.to(dtype))[moved].float().mean().item()


@right("lost_updates")
def added_in_the_dtype(weights, updates, dtype):
    moved = updates != 0
    if not moved.any():
        return 0.0
    held = weights.to(dtype)
    return (held + updates == held.float()).where(moved, False).sum().item() / int(moved.sum()) if dtype is torch.float32 else (
        ((held.float() + updates).to(dtype) == held)[moved].double().mean().item()
    )


@right("lost_updates")
def one_by_one(weights, updates, dtype):
    lost = moved = 0
    for weight, update in zip(weights.flatten().tolist(), updates.flatten()):
        if update != 0:
            moved += 1
            lost += kit.rounded(weight + update, dtype).item() == weight
    return lost / moved if moved else 0.0


# ── in_full_precision ─────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("in_full_precision", "RuntimeError where an input is fp64")
def casts_low_precision_alone(function, x, y):
    low = torch.bfloat16, torch.float16
    with torch.autocast("cpu", enabled=False):
        return function(*(t.float() if t.dtype in low else t for t in (x, y)))


@wrong("in_full_precision", "no graph")
def without_grad(function, x, y):
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return function(x.float(), y.float())


@wrong("in_full_precision", "casts them down again")
def casts_only(function, x, y):
    return function(x.float(), y.float())


@wrong("in_full_precision", "digits are gone")
def casts_the_result(function, x, y):
    return function(x, y).float()


@wrong("in_full_precision", "low precision already")
def leaves_the_inputs(function, x, y):
    with torch.autocast("cpu", enabled=False):
        return function(x, y)


@wrong("in_full_precision", "graph")
def cuts_the_graph(function, x, y):
    with torch.autocast("cpu", enabled=False):
        return function(x.detach().float(), y.detach().float())


@wrong("in_full_precision", "off afterwards")
def switches_it_off(function, x, y):
    torch.set_autocast_enabled("cpu", False)
    return function(x.float(), y.float())


@wrong("in_full_precision", "where")
def casts_the_first(function, x, y):
    with torch.autocast("cpu", enabled=False):
        return function(x.float(), y.to(torch.bfloat16).float())


@right("in_full_precision")
def in_float64_inside(function, x, y):
    with torch.autocast("cpu", enabled=False):
        return function(x.double(), y.double()).float()


@right("in_full_precision")
def decorated(function, x, y):
    @torch.autocast("cpu", enabled=False)
    def inside(*tensors):
        return function(*tensors)

    return inside(x.to(torch.float32), y.to(torch.float32))


@right("in_full_precision")
def by_hand(function, x, y):
    kind, before = x.device.type, torch.is_autocast_enabled(x.device.type)
    torch.set_autocast_enabled(kind, False)
    try:
        return function(*(t.to(torch.float32) for t in (x, y)))
    finally:
        torch.set_autocast_enabled(kind, before)


# ── master_step ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _forward(model, inputs, targets, loss_fn):
    model.zero_grad()
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss


@wrong("master_step", "older weights")
def no_copy(model, masters, inputs, targets, loss_fn, rate):
    loss = _forward(model, inputs, targets, loss_fn)
    for p, m in zip(model.parameters(), masters):
        m -= rate * p.grad
    return loss.item()


@wrong("master_step", "rounded sum")
def steps_the_model(model, masters, inputs, targets, loss_fn, rate):
    with torch.no_grad():
        for p, m in zip(model.parameters(), masters):
            p.copy_(m)
    loss = _forward(model, inputs, targets, loss_fn)
    torch.optim.SGD(model.parameters(), lr=rate).step()
    with torch.no_grad():
        for p, m in zip(model.parameters(), masters):
            m.copy_(p)
    return loss.item()


@wrong("master_step", "clear them")
def old_gradients(model, masters, inputs, targets, loss_fn, rate):
    for p, m in zip(model.parameters(), masters):
        p.data.copy_(m)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    for p, m in zip(model.parameters(), masters):
        m -= rate * p.grad
    return loss.item()


@wrong("master_step", "in its own precision")
def all_in_float32(model, masters, inputs, targets, loss_fn, rate):
    model.float()
    for p, m in zip(model.parameters(), masters):
        p.data.copy_(m)
    loss = _forward(model, inputs.float(), targets, loss_fn)
    for p, m in zip(model.parameters(), masters):
        m -= rate * p.grad
    return loss.item()


@wrong("master_step", "a tensor")
def loss_as_tensor(model, masters, inputs, targets, loss_fn, rate):
    for p, m in zip(model.parameters(), masters):
        p.data.copy_(m)
    loss = _forward(model, inputs, targets, loss_fn)
    for p, m in zip(model.parameters(), masters):
        m -= rate * p.grad
    return loss.detach()


@wrong("master_step", "in fp16 a small one becomes 0")
def product_in_low_precision(model, masters, inputs, targets, loss_fn, rate):
    for p, m in zip(model.parameters(), masters):
        p.data.copy_(m)
    loss = _forward(model, inputs, targets, loss_fn)
    for p, m in zip(model.parameters(), masters):
        m -= rate * p.grad
    return loss.item()


@wrong("master_step", "other tensors now")
def new_masters(model, masters, inputs, targets, loss_fn, rate):
    for p, m in zip(model.parameters(), masters):
        p.data.copy_(m)
    loss = _forward(model, inputs, targets, loss_fn)
    for i, p in enumerate(model.parameters()):
        masters[i] = masters[i] - rate * p.grad.float()
    return loss.item()


@wrong("master_step", "in its own precision")
def parameters_that_are_the_masters(model, masters, inputs, targets, loss_fn, rate):
    for p, m in zip(model.parameters(), masters):
        p.data = m
    loss = _forward(model, inputs.float(), targets, loss_fn)
    with torch.no_grad():
        for p, m in zip(model.parameters(), masters):
            m -= rate * p.grad
    return loss.item()


@right("master_step")
def copies_back(model, masters, inputs, targets, loss_fn, rate):
    for p, m in zip(model.parameters(), masters):
        p.data.copy_(m)
    loss = _forward(model, inputs, targets, loss_fn)
    for p, m in zip(model.parameters(), masters):
        m.sub_(p.grad, alpha=rate)
        p.data.copy_(m)
    return loss.item()


@right("master_step")
def through_an_optimizer(model, masters, inputs, targets, loss_fn, rate):
    optimizer = torch.optim.SGD([m.requires_grad_() for m in masters], lr=rate)
    model.load_state_dict({name: m.detach() for name, m in zip(dict(model.named_parameters()), masters)})
    loss = _forward(model, inputs, targets, loss_fn)
    for m, p in zip(masters, model.parameters()):
        m.grad = p.grad.float()
    optimizer.step()
    for m in masters:
        m.grad = None
        m.requires_grad_(False)
    return loss.item()


@right("master_step")
def functional(model, masters, inputs, targets, loss_fn, rate):
    parameters = dict(model.named_parameters())
    for p, m in zip(parameters.values(), masters):
        p.data = m.to(p.dtype)
    loss = loss_fn(torch.func.functional_call(model, parameters, inputs), targets)
    for m, g in zip(masters, torch.autograd.grad(loss, list(parameters.values()))):
        m.sub_(g.float(), alpha=rate)
    return loss.item()


# ── bytes_by_dtype ────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("bytes_by_dtype", "counted twice")
def each_time(forward):
    totals = {}

    def note(t):
        totals[t.dtype] = totals.get(t.dtype, 0) + t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        forward()
    return totals


@wrong("bytes_by_dtype", "numbers of elements")
def counts_elements(forward):
    seen = {}

    def note(t):
        seen[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = forward()
    totals = {}
    for t in seen.values():
        totals[t.dtype] = totals.get(t.dtype, 0) + t.untyped_storage().nbytes() // t.itemsize
    del result
    return totals


@wrong("bytes_by_dtype", "one sum")
def in_all(forward):
    seen = {}

    def note(t):
        seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = forward()
    del result
    return sum(seen.values())


@wrong("bytes_by_dtype", "where")
def under_names(forward):
    return {str(dtype): size for dtype, size in by_weak_reference(forward).items()}


@wrong("bytes_by_dtype", "return it")
def keeps_nothing(forward):
    seen = {}

    def note(t):
        seen[t.untyped_storage().data_ptr()] = t.dtype, t.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = forward()
    totals = {}
    for dtype, size in seen.values():
        totals[dtype] = totals.get(dtype, 0) + size
    del result
    return totals


@wrong("bytes_by_dtype", "It should be {torch.float32: 400}")
def by_where_the_tensor_begins(forward):
    seen = {}

    def note(t):
        seen[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = forward()
    totals = {}
    for t in seen.values():
        totals[t.dtype] = totals.get(t.dtype, 0) + t.nbytes
    del result
    return totals


@right("bytes_by_dtype")
def in_a_counter(forward):
    seen, totals = {}, collections.Counter()

    def note(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = t
            totals[t.dtype] += storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        forward()
    return totals


@right("bytes_by_dtype")
def by_weak_reference(forward):
    found = []

    def note(t):
        found.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        result = forward()
    storages = {t.untyped_storage()._cdata: (t.dtype, t.untyped_storage().nbytes()) for t in found}
    totals = dict.fromkeys({dtype for dtype, _ in storages.values()}, 0)
    for dtype, size in storages.values():
        totals[dtype] += size
    del result
    return totals


# ── largest_safe_scale ────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("largest_safe_scale", "absolute values")
def forgets_the_sign(gradients, dtype=torch.float16):
    largest = max(g[g.isfinite()].double().max().item() for g in gradients if g is not None)
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest))


@wrong("largest_safe_scale", "no power of two")
def exact_ratio(gradients, dtype=torch.float16):
    return torch.finfo(dtype).max / max(g.double().abs().max().item() for g in gradients if g is not None)


@wrong("largest_safe_scale", "the lower")
def rounds_up(gradients, dtype=torch.float16):
    largest = max(g.double().abs().max().item() for g in gradients if g is not None)
    return 2.0 ** math.ceil(math.log2(torch.finfo(dtype).max / largest))


@wrong("largest_safe_scale", "whatever the dtype")
def always_fp16(gradients, dtype=torch.float16):
    values = [v for g in gradients if g is not None for v in g.double().abs().flatten().tolist() if math.isfinite(v) and v]
    return 2.0 ** math.floor(math.log2(65504 / max(values))) if values else 1.0


@wrong("largest_safe_scale", "raised")
def no_gradient_forgotten(gradients, dtype=torch.float16):
    largest = max(g.double().abs().max().item() for g in gradients)
    return 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / largest))


@wrong("largest_safe_scale", "exponents alone")
def difference_of_exponents(gradients, dtype=torch.float16):
    values = [v for g in gradients if g is not None for v in g.double().abs().flatten().tolist() if math.isfinite(v) and v]
    return 2.0 ** (math.frexp(torch.finfo(dtype).max)[1] - math.frexp(max(values))[1]) if values else 1.0


@wrong("largest_safe_scale", "the gradients are small")
def down_from_2_to_the_24(gradients, dtype=torch.float16):
    scale = 2.0**24
    while any((g.double() * scale).to(dtype).isinf().any() for g in gradients if g is not None):
        scale /= 2
    return scale


@right("largest_safe_scale")
def by_looking_for_inf(gradients, dtype=torch.float16):
    values = [g.double()[g.isfinite() & (g != 0)] for g in gradients if g is not None]
    if not any(len(v) for v in values):
        return 1
    scale = 2.0**200
    while any((v * scale).to(dtype).isinf().any() for v in values):
        scale /= 2
    return scale


@right("largest_safe_scale")
def by_trying(gradients, dtype=torch.float16):
    values = np.concatenate([[0.0], *(g.detach().double().abs().numpy().ravel() for g in gradients if g is not None)])
    values = values[np.isfinite(values) & (values > 0)]
    if values.size == 0:
        return 1.0
    scale = 2.0**-200
    while values.max() * scale * 2 <= torch.finfo(dtype).max:
        scale *= 2
    return scale


# ── next_scale ────────────────────────────────────────────────────────────────────────────────────────────────────────


@wrong("next_scale", "in a row")
def keeps_the_count(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    if found_inf:
        return scale * backoff, good_steps
    good_steps += 1
    return (scale * growth, 0) if good_steps == interval else (scale, good_steps)


@wrong("next_scale", "begins at 0 again")
def goes_on(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    if found_inf:
        return scale * backoff, 0
    good_steps += 1
    return scale * growth if good_steps % interval == 0 else scale, good_steps


@wrong("next_scale", "this one counts")
def late(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    if found_inf:
        return scale * backoff, 0
    return (scale * growth, 0) if good_steps == interval else (scale, good_steps + 1)


@wrong("next_scale", "where")
def fixed_factors(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    if found_inf:
        return scale / 2, 0
    return (scale * 2, 0) if good_steps + 1 == interval else (scale, good_steps + 1)


@right("next_scale")
def by_the_scaler_itself(scale, good_steps, found_inf, growth=2.0, backoff=0.5, interval=2000):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": good_steps})
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler.scale(weight.sum()).backward()
    if found_inf:
        weight.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), scaler._get_growth_tracker()


# ── scaled_step ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _half_loss(model, inputs, targets, loss_fn):
    with torch.autocast("cpu", dtype=torch.float16):
        return loss_fn(model(inputs), targets)


@wrong("scaled_step", "unscale_")
def clips_scaled(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


@wrong("scaled_step", "zero_grad")
def adds_to_old(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return bool(norm.isfinite())


@wrong("scaled_step", "not updated")
def no_update(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    return bool(norm.isfinite())


@wrong("scaled_step", "the answer is False")
def always_stepped(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return True


@wrong("scaled_step", "not in fp16")
def without_autocast(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss_fn(model(inputs), targets)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return bool(norm.isfinite())


@wrong("scaled_step", "not in fp16")
def in_bf16(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return bool(norm.isfinite())


@wrong("scaled_step", "should move by")
def clips_each_value(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


@wrong("scaled_step", "should move by")
def updates_before_the_step(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.update()
    scaler.step(optimizer)
    return bool(norm.isfinite())


@wrong("scaled_step", "should be 512")
def leaves_early(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not norm.isfinite():
        return False
    scaler.step(optimizer)
    scaler.update()
    return True


@wrong("scaled_step", "the answer is False")
def asks_the_loss(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    loss = _half_loss(model, inputs, targets, loss_fn)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return bool(loss.isfinite())


@wrong("scaled_step", "the optimizer stepped")
def the_same_scale(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() == scale  # not so where it has grown


@wrong("scaled_step", "moved all the same")
def steps_by_itself(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    scaler.update()
    return bool(norm.isfinite())


@right("scaled_step")
def by_the_scale(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    model.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return not scaler.get_scale() < before


@right("scaled_step")
def with_the_toolkit(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    step = kit.amp_step(model, [(inputs, targets)], loss_fn, optimizer, dtype=torch.float16, scaler=scaler, max_norm=max_norm)
    return not step.skipped


@right("scaled_step")
def clips_to_a_scaled_threshold(model, inputs, targets, loss_fn, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    if norm.isfinite():
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm * scaler.get_scale(), norm)
    scaler.step(optimizer)
    scaler.update()
    return bool(norm.isfinite())


# ── accumulated_scaled_step ───────────────────────────────────────────────────────────────────────────────────────────


@wrong("accumulated_scaled_step", "Weigh by samples")
def mean_of_means(model, micro_batches, loss_fn, optimizer, scaler):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        scaler.scale(_half_loss(model, inputs, targets, loss_fn) / len(micro_batches)).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


@wrong("accumulated_scaled_step", "nothing divides")
def sum_of_means(model, micro_batches, loss_fn, optimizer, scaler):
    optimizer.zero_grad()
    for inputs, targets in micro_batches:
        scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


@wrong("accumulated_scaled_step", "steps for each micro-batch")
def many_steps(model, micro_batches, loss_fn, optimizer, scaler):
    optimizer.zero_grad()
    samples = sum(len(targets) for _, targets in micro_batches)
    scale = scaler.get_scale()
    for inputs, targets in micro_batches:
        scaler.scale(_half_loss(model, inputs, targets, loss_fn) * (len(targets) / samples)).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale() >= scale


@wrong("accumulated_scaled_step", "the last one's is left")
def clears_each(model, micro_batches, loss_fn, optimizer, scaler):
    samples = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        optimizer.zero_grad()
        scaler.scale(_half_loss(model, inputs, targets, loss_fn) * (len(targets) / samples)).backward()
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale


@wrong("accumulated_scaled_step", "unscale_() has already been called")
def unscales_each(model, micro_batches, loss_fn, optimizer, scaler):
    optimizer.zero_grad()
    samples = sum(len(targets) for _, targets in micro_batches)
    for inputs, targets in micro_batches:
        scaler.scale(_half_loss(model, inputs, targets, loss_fn) * (len(targets) / samples)).backward()
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return True


@right("accumulated_scaled_step")
def one_graph(model, micro_batches, loss_fn, optimizer, scaler):
    optimizer.zero_grad()
    samples = sum(len(t) for _, t in micro_batches)
    loss = sum(len(t) * _half_loss(model, x, t, loss_fn) for x, t in micro_batches) / samples
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    fine = all(p.grad.isfinite().all() for p in model.parameters())
    scaler.step(optimizer)
    scaler.update()
    return bool(fine)


@right("accumulated_scaled_step")
def as_one_batch(model, micro_batches, loss_fn, optimizer, scaler):
    optimizer.zero_grad()
    inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches))
    before = scaler.get_scale()
    scaler.scale(_half_loss(model, inputs, targets, loss_fn)).backward()
    scaler.step(optimizer)
    scaler.update()
    return before <= scaler.get_scale()


# ── the clinic ────────────────────────────────────────────────────────────────────────────────────────────────────────

broken("train_half", "Attempting to unscale FP16 gradients")


@wrong("train_half", "rounded to fp16 at each step")
def no_scaler(model, inputs, targets, steps=10, rate=0.1):
    model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.half()).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.float()
    return losses


@wrong("train_half", "computed in fp16")
def plain(model, inputs, targets, steps=10, rate=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@wrong("train_half", "computed in fp16")
def bf16_instead(model, inputs, targets, steps=10, rate=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@wrong("train_half", "the scaler is gone")
def autocast_without_scaler(model, inputs, targets, steps=10, rate=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@right("train_half")
def masters_beside_a_half_copy(model, inputs, targets, steps=10, rate=0.1):
    low = copy.deepcopy(model).half()
    model.dtypes, losses = low.dtypes, []
    for _ in range(steps):
        with torch.no_grad():
            for p, m in zip(low.parameters(), model.parameters()):
                p.copy_(m)
        low.zero_grad()
        loss = F.cross_entropy(low(inputs.half()).float(), targets)
        (1024 * loss).backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p, m in zip(low.parameters(), model.parameters()):
                m -= rate * (p.grad.float() / 1024)
    return losses


@wrong("train_half", "should be float32")
def stays_half(model, inputs, targets, steps=10, rate=0.1):
    losses = no_scaler(model, inputs, targets, steps, rate)
    model.half()
    return losses


@right("train_half")
def with_amp_step(model, inputs, targets, steps=10, rate=0.1):
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=rate), torch.amp.GradScaler("cpu")
    return [
        kit.amp_step(model, [(inputs, targets)], F.cross_entropy, optimizer, dtype=torch.float16, scaler=scaler).loss
        for _ in range(steps)
    ]


broken("train_norm", "less than half the spacing")


@wrong("train_norm", "autocast")
def plain_norm(model, batches, rate=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


@wrong("train_norm", "less than half the spacing")
def bf16_with_autocast(model, batches, rate=1e-3):
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return model


@wrong("train_norm", "All weights need float32")
def norms_alone_in_float32(model, batches, rate=1e-3):
    model.bfloat16()
    for part in model.modules():
        if isinstance(part, nn.LayerNorm):
            part.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
        optimizer.step()
    return model


@wrong("train_norm", "returned")
def returns_the_loss(model, batches, rate=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


@right("train_norm")
def master_weights(model, batches, rate=1e-3):
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=rate, weight_decay=0.0)
    model.bfloat16()
    for inputs, targets in batches:
        model.zero_grad()
        F.cross_entropy(model(inputs.bfloat16()).float(), targets).backward()
        for p, m in zip(model.parameters(), masters):
            m.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, m in zip(model.parameters(), masters):
                p.copy_(m)
    return model


@right("train_norm")
def with_amp_step_in_bf16(model, batches, rate=1e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, foreach=True)
    for inputs, targets in batches:
        kit.amp_step(model, [(inputs, targets)], F.cross_entropy, optimizer, dtype=torch.bfloat16)
    return model


broken("masked_attention", "Fill, do not add")


@wrong("masked_attention", "no largest score")
def fills_with_inf(queries, keys, values, padding):
    scores = (queries @ keys.transpose(1, 2)).masked_fill(padding[:, None], -math.inf)
    return scores.softmax(-1) @ values


@wrong("masked_attention", "without overflow")
def a_billion(queries, keys, values, padding):
    return (queries @ keys.transpose(1, 2)).masked_fill(padding[:, None], -1e9).softmax(-1) @ values


@wrong("masked_attention", "take part")
def unmasked(queries, keys, values, padding):
    return (queries @ keys.transpose(1, 2)).softmax(-1) @ values


@wrong("masked_attention", "where rounding explains")
def hides_nan(queries, keys, values, padding):
    scores = queries @ keys.transpose(1, 2) * ~padding[:, None]
    return (scores.softmax(-1) @ values).nan_to_num()


@wrong("masked_attention", "the queries are")
def stays_in_float32(queries, keys, values, padding):
    scores = queries.float() @ keys.float().transpose(1, 2)
    return scores.masked_fill(padding[:, None], -1e9).softmax(-1) @ values.float()


@right("masked_attention")
def by_pytorch(queries, keys, values, padding):
    allowed = ~padding[:, None, :].expand(-1, queries.shape[1], -1) | padding.all(1)[:, None, None]
    return F.scaled_dot_product_attention(queries.float(), keys.float(), values.float(), allowed, scale=1.0).to(queries.dtype)


@right("masked_attention")
def in_float32(queries, keys, values, padding):
    scores = (queries.float() @ keys.float().transpose(1, 2)).masked_fill(padding[:, None], -1e9)
    return (scores.softmax(-1) @ values.float()).to(queries.dtype)


@wrong("masked_attention", "let none arise")
def hides_nan_of_the_result(queries, keys, values, padding):
    scores = queries @ keys.transpose(1, 2)
    mask = padding[:, None].to(scores.dtype) * torch.finfo(scores.dtype).min
    return ((scores + mask).softmax(-1) @ values).nan_to_num()


@wrong("masked_attention", "scores are about -2000")
def fills_with_minus_100(queries, keys, values, padding):
    return (queries @ keys.transpose(1, 2)).masked_fill(padding[:, None], -100.0).softmax(-1) @ values


@right("masked_attention")
def clamps_what_was_added(queries, keys, values, padding):
    scores = queries @ keys.transpose(1, 2)
    lowest = torch.finfo(scores.dtype).min
    return (scores + padding[:, None].to(scores.dtype) * lowest).clamp(min=lowest).softmax(-1) @ values


@right("masked_attention")
def nan_where_no_gradient_goes(queries, keys, values, padding):
    scores = (queries @ keys.transpose(1, 2)).masked_fill(padding[:, None], -math.inf)
    return scores.softmax(-1).nan_to_num() @ values  # the fill's backward is 0 in the rows that were nan


@right("masked_attention")
def weights_of_zero(queries, keys, values, padding):
    scores = (queries @ keys.transpose(1, 2)).float()
    lowest = scores.masked_fill(padding[:, None], -math.inf).amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - lowest).masked_fill(padding[:, None], 0).exp().masked_fill(padding[:, None], 0)
    return ((weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)) @ values.float()).to(queries.dtype)


broken("resume", "The scaler is new")


@wrong("resume", "count of good steps")
def only_the_scale(checkpoint, model, optimizer, scaler):
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict({**scaler.state_dict(), "scale": checkpoint["scaler"]["scale"]})


@wrong("resume", "The scaler is new")
def another_scaler(checkpoint, model, optimizer, scaler):
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(checkpoint["scaler"])


@wrong("resume", "optimizer is not where it was")
def forgets_the_optimizer(checkpoint, model, optimizer, scaler):
    model.load_state_dict(checkpoint["model"])
    scaler.load_state_dict(checkpoint["scaler"])


@right("resume")
def in_a_loop(checkpoint, model, optimizer, scaler):
    for name, part in {"model": model, "optimizer": optimizer, "scaler": scaler}.items():
        part.load_state_dict(checkpoint[name])


@right("resume")
def returns_them(checkpoint, model, optimizer, scaler):
    scaler.load_state_dict(dict(checkpoint["scaler"]))
    optimizer.load_state_dict(checkpoint["optimizer"])
    model.load_state_dict(checkpoint["model"], assign=False)
    return model, optimizer, scaler


broken("running_mean", "stays at 256")


@wrong("running_mean", "still kept")
def int_count(batches):
    total, count = 0, 0
    for batch in batches:
        total += batch.sum()
        count += batch.numel()
    return float(total) / count


@wrong("running_mean", "batches' means")
def averages_averages(batches):
    means = [batch.double().mean() for batch in batches]
    return torch.stack(means).mean().item()


@wrong("running_mean", "a tensor")
def tensor_mean(batches):
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        total += batch.double().sum()
        count += batch.numel()
    return total / count


@wrong("running_mean", "should be")
def sums_in_the_batch_dtype(batches):
    total, count = 0.0, 0
    for batch in batches:
        total += batch.sum().item()
        count += batch.numel()
    return total / count


@right("running_mean")
def updates_a_mean(batches):
    mean, count = 0.0, 0
    for batch in batches:
        n = batch.numel()
        count += n
        mean += (batch.double().mean().item() - mean) * n / count
    return mean


@right("running_mean")
def with_numpy(batches):
    pairs = [(batch.float().numpy().sum(dtype=np.float64), batch.numel()) for batch in batches]
    return float(sum(total for total, _ in pairs) / sum(n for _, n in pairs))


broken("step_both", "`update` after the first optimizer")


@wrong("step_both", "never updated")
def forgets_update(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)


@wrong("step_both", "must skip")
def plain_steps(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        optimizer.step()
    scaler.update()


@wrong("step_both", "Each skips for itself")
def all_or_nothing(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad()
    scaler.scale(loss).backward()
    fine = True
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
        fine &= all(p.grad.isfinite().all() for group in optimizer.param_groups for p in group["params"])
    for optimizer in optimizers if fine else ():
        scaler.step(optimizer)
    scaler.update()


@right("step_both")
def unscaled_first(loss, optimizers, scaler):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss).backward()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    for optimizer in reversed(optimizers):
        scaler.step(optimizer)
    scaler.update()


@right("step_both")
def gradients_by_hand(loss, optimizers, scaler):
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for p, gradient in zip(held, torch.autograd.grad(scaler.scale(loss), held)):
        p.grad = gradient.clone()  # a sum's gradient is one number, seen many times
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
