"""Is this the expected value? Compared by type, device, shape, dtype, stride where it matters, and value; never after broadcasting."""
import math
import numbers
import reprlib
import types

import numpy as np
import torch

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 160
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 12
_NAMES = {"ndarray": "numpy array", "Size": "torch.Size", "type": "class", "builtin_function_or_method": "function", "method": "function"}
# what has a value of its own; of anything else (a function given as an argument) the type is compared
_VALUES = (str, bytes, set, frozenset, range, slice, type, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def difference(expected, got, tolerance=0.0, strides=False):
    """None where `got` is what was expected, else a sentence that says how it differs."""
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected, got, tolerance, strides)
    if isinstance(expected, np.ndarray):
        if not isinstance(got, np.ndarray):
            return f"{kind(got)} came where a numpy array was expected"
        return _tensor_difference(torch.from_numpy(expected.copy()), torch.from_numpy(got.copy()), tolerance, False)
    if isinstance(expected, (tuple, list)):
        return _sequence_difference(expected, got, tolerance, strides)
    if isinstance(expected, dict):
        return _dict_difference(expected, got, tolerance, strides)
    if isinstance(expected, (torch.nn.Module, torch.optim.Optimizer)) and type(got) is type(expected):
        return _dict_difference(_state(expected), _state(got), tolerance, strides)
    if isinstance(expected, (bool, np.bool_)):
        fits, value = isinstance(got, (bool, np.bool_)), bool
    elif isinstance(expected, numbers.Integral):
        fits, value = isinstance(got, numbers.Integral) and not isinstance(got, bool), int
    elif isinstance(expected, numbers.Real):
        fits, value = isinstance(got, numbers.Real) and not isinstance(got, bool), float
    else:
        fits, value = type(got) is type(expected), (lambda x: x if isinstance(x, _VALUES) else None)
    if not fits:
        return f"{kind(got)} came where {kind(expected)} was expected" + _cure(expected, got)
    wanted, came = value(expected), value(got)
    near = isinstance(wanted, float) and math.isclose(wanted, came, rel_tol=tolerance, abs_tol=tolerance)
    if near or wanted == came or (isinstance(wanted, float) and math.isnan(wanted) and math.isnan(came)):
        return None
    return "the value differs"


def _tensor_difference(expected, got, tolerance, strides):
    if not isinstance(got, torch.Tensor):
        return f"{kind(got)} came where a tensor was expected" + _cure(expected, got)
    if got.layout != expected.layout:
        return f"the layout is {got.layout}, expected {expected.layout}"
    if got.device.type != expected.device.type:
        return f"the result is on the device {got.device}, expected {expected.device}"
    if got.shape != expected.shape:
        return _shape_difference(expected, got, tolerance)
    if got.dtype != expected.dtype:
        return f"the dtype is {got.dtype}, expected {expected.dtype}"
    if strides and got.layout == torch.strided and got.stride() != expected.stride():
        return f"the strides are {got.stride()}, expected {expected.stride()}"
    if got.device.type == "meta":
        return None
    if got.layout != torch.strided or got.is_quantized:
        expected, got = (t.dequantize() if t.is_quantized else t.to_dense() for t in (expected, got))
    close = _close(expected, got, tolerance)
    if close.all():
        return None
    where = (~close).nonzero()[0].tolist()
    at = f"[{', '.join(map(str, where))}]" if where else "its only element"
    return (
        f"{int((~close).sum())} of {close.numel()} elements differ; the first is {at}: "
        f"{_shortest(got[tuple(where)])} came, {_shortest(expected[tuple(where)])} was expected"
    )


def _shortest(element):
    """The fewest digits that tell this number from its neighbours: 0.1, where .item() of a float32 gives 0.10000000149011612."""
    return str(element.item() if element.dtype == torch.bfloat16 else element.detach().cpu().resolve_conj().numpy())


def _shape_difference(expected, got, tolerance):
    said = f"the shape is {tuple(got.shape)}, expected {tuple(expected.shape)}"
    try:
        fits = bool(_close(*torch.broadcast_tensors(expected, got), tolerance).all())
    except RuntimeError:
        fits = False
    if fits and got.numel():
        said += "; the values fit only by broadcasting"
    elif got.numel() and got.numel() == expected.numel() and bool(_close(expected.flatten(), got.flatten(), tolerance).all()):
        said += "; the values and their order are right"
    return said


def _close(expected, got, tolerance):
    expected, got = expected.detach(), got.detach()
    if not (got.is_floating_point() or got.is_complex()):
        return got == expected
    if tolerance:
        return torch.isclose(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance, equal_nan=True)
    return (got == expected) | (got.isnan() & expected.isnan())


def _sequence_difference(expected, got, tolerance, strides):
    family = tuple if isinstance(expected, tuple) else list
    if not isinstance(got, family):
        return f"{kind(got)} came where {kind(expected)} was expected" + _cure(expected, got)
    if len(got) != len(expected):
        return f"its length is {len(got)}, expected {len(expected)}"
    for i, (e, g) in enumerate(zip(expected, got)):
        if said := difference(e, g, tolerance, strides):
            return f"entry {i} is {brief(g)}, expected {brief(e)}" if said == "the value differs" else f"entry {i}: {said}"
    return None


def _dict_difference(expected, got, tolerance, strides):
    if type(got) is not type(expected):
        return f"{kind(got)} came where {kind(expected)} was expected" + _cure(expected, got)
    if list(got) != list(expected) and set(got) != set(expected):
        return f"its keys are {brief(list(got))}, expected {brief(list(expected))}"
    for key in expected:
        if said := difference(expected[key], got[key], tolerance, strides):
            return f"under {brief(key)}: {said}"
    return None


def _state(holder):
    """What a module or an optimizer is: values by name, and for a module which of them record gradients and each part's mode."""
    state = dict(holder.state_dict())
    if isinstance(holder, torch.nn.Module):
        state |= {f"{name}.requires_grad": p.requires_grad for name, p in holder.named_parameters()}
        state |= {f"{name}.training".lstrip("."): part.training for name, part in holder.named_modules()}
    return state


def _cure(expected, got):
    if isinstance(got, torch.Tensor) and got.numel() == 1 and isinstance(expected, (bool, int, float)):
        return "; .item() takes the number out of a tensor of one element"
    if isinstance(got, (list, tuple)) and isinstance(expected, (list, tuple)):
        return f"; {'tuple' if isinstance(expected, tuple) else 'list'}(...) makes one of it"
    if isinstance(got, types.GeneratorType):
        return "; a function with yield in it gives a generator, whatever it returns"
    if isinstance(got, types.CoroutineType):
        return "; calling an async def gives a coroutine: write def"
    if callable(got):
        return "; is a pair of parentheses missing after its name?"
    return ""


def kind(value):
    """What sort of thing it is, with an article: "a list", "an int", "a tensor of 0 dimensions"."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return "a tensor of 0 dimensions" if value.dim() == 0 else "a tensor"
    name = _NAMES.get(type(value).__name__, type(value).__name__)
    return ("an " if name[:1].lower() in "aeiou" else "a ") + name


def brief(value, depth=0):
    """A value on a line or two, whatever it is: small tensors whole, large ones by what describes them. Never raises."""
    if depth > 3:
        return "…"
    try:
        if isinstance(value, torch.Tensor):
            return _brief_tensor(value)
        if isinstance(value, np.ndarray):
            return f"numpy {value.dtype} array of shape {value.shape}" if value.size > 24 else repr(value)
        if isinstance(value, torch.Size):
            return repr(tuple(value))
        if isinstance(value, (list, tuple)) and _holds_tensors(value, 2):
            left, right = "[]" if isinstance(value, list) else "()"
            inside = ", ".join(brief(v, depth + 1) for v in value[:4]) + (", …" if len(value) > 4 else "")
            return left + inside + right
        return _SHORT.repr(value)
    except BaseException as error:  # a learner's own __repr__ may do anything
        return f"<{kind(value)} whose repr raises {type(error).__name__}>"


def _holds_tensors(values, depth):
    """Is there a tensor among the first entries, or among theirs, as in a list of batches?"""
    deeper = lambda v: depth > 1 and isinstance(v, (list, tuple)) and _holds_tensors(v, depth - 1)  # noqa: E731
    return any(isinstance(v, torch.Tensor) or deeper(v) for v in values[:12])


def _brief_tensor(value):
    dtype = str(value.dtype).replace("torch.", "")
    place = "" if value.device.type == "cpu" else f" on {value.device}"
    if value.layout != torch.strided:
        return f"{value.layout} tensor of shape {tuple(value.shape)}"
    if value.numel() > 36 or value.device.type == "meta":
        return f"{dtype} tensor of shape {tuple(value.shape)}, strides {value.stride()}{place}"
    numbers = value.detach().cpu()
    numbers = numbers.float() if numbers.dtype in (torch.float16, torch.bfloat16) else numbers
    text = _rounded(numbers.tolist())
    usual = value.dtype in (torch.float32, torch.int64, torch.bool) and value.numel()
    return f"tensor({text})" + ("" if usual else f" of {dtype}, shape {tuple(value.shape)}") + place


def _rounded(nested):
    if isinstance(nested, list):
        return "[" + ", ".join(map(_rounded, nested)) + "]"
    if not isinstance(nested, (float, complex)):
        return repr(nested)
    text = f"{nested:.6g}"
    return text + "." * text.lstrip("-").isdecimal()  # 2. is a float, as torch prints it
