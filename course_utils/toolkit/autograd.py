"""Autograd as a graph: what a result remembers, what that costs, whom it reaches, and derivatives beyond the first.

The nodes, edges and saved tensors are those that PyTorch itself shows (`grad_fn`, `next_functions`, `_raw_saved_*`);
looking at them runs nothing and changes nothing. Sizes of memory count bytes, each storage once.
"""

import contextlib
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from course_utils.toolkit.tensors import storage_bytes

# ── The graph behind a result ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Node:
    """One step of a recorded computation, as `walk` finds it."""

    fn: object  # PyTorch's own node
    name: str  # "MulBackward0", "AccumulateGrad", …
    inputs: tuple  # for each input of the step: the place in walk's list of the node it came from, or None
    saved: tuple  # (name, tensor) for each tensor kept for backward
    freed: bool  # backward has released what it kept; of a custom Function this is true even if it kept nothing
    variable: object  # the leaf into whose .grad an AccumulateGrad node writes, else None


def walk(*tensors):
    """Every node that the tensors' results came from, as a list of Node: each once, and before the nodes of its inputs.

    A tensor without grad_fn adds nothing. No recursion: the depth of the graph does not matter.
    """
    finished, waiting = {}, [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while waiting:
        fn = waiting[-1]
        ahead = [f for f, _ in fn.next_functions if f is not None and f not in finished]
        if ahead:
            waiting.extend(ahead)
        else:
            finished[waiting.pop()] = None
    functions = list(reversed(finished))
    place = {fn: i for i, fn in enumerate(functions)}
    return [_node(fn, tuple(place.get(f) for f, _ in fn.next_functions)) for fn in functions]


def _node(fn, inputs):
    name = fn.name().split("::")[-1]
    saved, freed = [], False
    for attribute in [a for a in dir(type(fn)) if a.startswith("_raw_saved_")]:
        short = attribute.removeprefix("_raw_saved_")
        try:
            raw = getattr(fn, attribute)
            slots = raw if isinstance(raw, tuple) else (raw,)
            tensors = [s.data.tensor if isinstance(s.data, _Packed) else s.data for s in slots]
            if all(tensor is None for tensor in tensors) and hasattr(fn, f"_saved_{short}"):
                getattr(fn, f"_saved_{short}")  # None where nothing was ever kept; raises where it has been released
        except RuntimeError:
            freed = True
        else:
            saved += [(short, tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return Node(fn, name, inputs, tuple(saved), freed, fn.variable if name == "AccumulateGrad" else None)


def saved_tensors(*tensors):
    """The tensors that the graphs behind these results keep for backward, as a list; one kept twice comes twice.

    What a hook has packed into something else (checkpointing, offloading) is not among them.
    """
    return [tensor for node in walk(*tensors) for _, tensor in node.saved]


def graph_bytes(*tensors):
    """Bytes of what the graphs behind these results keep for backward, parameters and inputs included, each storage once.

    Raises NotImplementedError where a sparse tensor is kept.
    """
    return storage_bytes(*saved_tensors(*tensors))


def reached_leaves(loss):
    """The leaf tensors into whose .grad `loss.backward()` writes, as a list, each once."""
    return [node.variable for node in walk(loss) if node.variable is not None]


def unreached_parameters(module, loss):
    """Names of the module's parameters that no path from `loss` leads to, frozen ones among them.

    What a node computes inside itself is hidden: parameters under reentrant checkpointing count as unreached.
    """
    reached = {id(leaf) for leaf in reached_leaves(loss)}
    return [name for name, parameter in module.named_parameters() if id(parameter) not in reached]


# ── What a block of code keeps ────────────────────────────────────────────────────────────────────────────────────────


class SavedBytes:
    """What the graphs made in a `saved_bytes` block keep for backward, in bytes, each storage once.

    bytes   all that was saved in the block, parameters and inputs included, released or not
    held    what graphs hold at this moment (backward and the end of a graph release)
    peak    the most that was held at one moment
    """

    def __init__(self):
        self.bytes = self.held = self.peak = 0
        self._seen = {}  # identity of a storage: (a weak reference, so that no other storage gets this identity; bytes)
        self._holders = {}  # identity of a storage: how many saved tensors hold it now

    def without(self, *tensors):
        """`bytes` less the storages of these tensors: `saved.without(*model.parameters())`."""
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        return self.bytes - sum(self._seen[key][1] for key in known if key in self._seen)

    def _pack(self, tensor):
        return tensor if tensor.layout != torch.strided else _Packed(self, tensor.detach())

    def _unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.tensor._version != packed.version:  # hooks switch PyTorch's own test off
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"it was saved at version {packed.version} and is at version {packed.tensor._version}"
            )
        return packed.tensor

    def _hold(self, storage):
        key = storage._cdata
        if key not in self._seen:
            self._seen[key] = (StorageWeakRef(storage), storage.nbytes())
            self.bytes += storage.nbytes()
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self.held += self._seen[key][1]
            self.peak = max(self.peak, self.held)
        return key

    def _release(self, key):
        self._holders[key] -= 1
        if self._holders[key] == 0:
            self.held -= self._seen[key][1]


class _Packed:
    """Stands in a graph for a saved tensor, and tells its ledger when the graph lets go of it."""

    def __init__(self, ledger, tensor):
        self.ledger, self.tensor, self.version = ledger, tensor, tensor._version
        self.key = ledger._hold(tensor.untyped_storage())

    def __del__(self):
        self.ledger._release(self.key)


@contextlib.contextmanager
def saved_bytes():
    """`with saved_bytes() as saved:` counts what forward passes in the block save for backward; see SavedBytes.

    The method is torch.autograd.graph.saved_tensors_hooks. Not seen: plain numbers (the 2 of x * 2, 8 bytes), sparse tensors,
    what checkpointing and other hooks inside the block pack away, and what a custom Function keeps other than by
    save_for_backward. The transforms of torch.func refuse to run in the block.
    """
    saved = SavedBytes()
    with torch.autograd.graph.saved_tensors_hooks(saved._pack, saved._unpack):
        yield saved


@contextlib.contextmanager
def gradient_norms(module):
    """`with gradient_norms(module) as norms: loss.backward()` gives {parameter's name: norm of the gradient that came}.

    In the order in which the gradients came, the last layer first; a parameter that got none is missing. It is what this
    backward sends, without what .grad held before; of several passes the last counts. The hooks go with the block.
    """
    norms = {}

    def hook(name):
        return lambda gradient: norms.__setitem__(name, gradient.norm().item())

    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    handles = [parameter.register_hook(hook(name)) for name, parameter in named]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()


# ── Derivatives ───────────────────────────────────────────────────────────────────────────────────────────────────────


def leaf_gradient(function, x):
    """Gradient of a scalar function at `x`: a tensor like x. Neither x nor any .grad changes, whatever x's own history."""
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf)
    return gradient


def finite_difference(function, *inputs, eps=1e-6):
    """Gradient of a scalar function with respect to each input, by central differences: a tuple of tensors like them.

    For each element, (function(… + eps …) - function(… - eps …)) / (2 * eps): two calls an element, an error of about
    eps² and of the rounding, 1e-16 / eps. Raises TypeError for other dtypes than float64, where rounding drowns the rest,
    and ValueError where the function gives more than one number.
    """
    if any(x.dtype != torch.float64 for x in inputs):
        raise TypeError(f"finite differences need float64, and the inputs are {[x.dtype for x in inputs]}")
    if torch.as_tensor(function(*inputs)).numel() != 1:
        raise ValueError("the function must give one number")
    gradients = []
    for i, x in enumerate(inputs):
        moved = x.detach().clone(memory_format=torch.contiguous_format)  # each element in a place of its own
        around = (*inputs[:i], moved, *inputs[i + 1 :])
        places, slopes = moved.view(-1), []
        for k, middle in enumerate(places.tolist()):
            places[k] = middle + eps
            above = torch.as_tensor(function(*around)).item()
            places[k] = middle - eps
            below = torch.as_tensor(function(*around)).item()
            places[k] = middle
            slopes.append((above - below) / (2 * eps))
        gradients.append(torch.tensor(slopes, dtype=x.dtype, device=x.device).view(x.shape))
    return tuple(gradients)


def gradient_penalty(critic, x):
    """Mean over the samples of (norm of the critic's gradient at the sample - 1)²: a scalar to call backward on.

    x (N, …), taken as constant; the critic gives one number a sample, (N,) or (N, 1), and looks at each sample alone (no
    BatchNorm in training). From Gulrajani et al., Improved Training of Wasserstein GANs. No .grad changes.
    """
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(critic(leaf).sum(), leaf, create_graph=True)
    return ((gradient.flatten(1).norm(dim=1) - 1) ** 2).mean()


def hessian_vector_product(function, x, v):
    """The Hessian of a scalar function at `x` times `v`, both shaped like x, without building the Hessian.

    Two backward passes (Pearlmutter, Fast Exact Multiplication by the Hessian). Zeros where the function is linear. Neither
    x nor any .grad changes.
    """
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
    if not gradient.requires_grad:  # the same everywhere
        return torch.zeros_like(leaf, requires_grad=False)
    (product,) = torch.autograd.grad(gradient, leaf, v, materialize_grads=True)
    return product


def per_sample_gradients(model, loss_fn, inputs, targets):
    """{name: (N, *shape of the parameter)}: the gradient of each sample's own loss, for every parameter that trains.

    `loss_fn(outputs, targets)` gives the mean loss of a batch, and each sample is a batch of one. No .grad changes. By
    torch.func, so all samples at once; layers that mix the samples (BatchNorm in training) are refused there.
    """
    trainable = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of_one(parameters, x, target):
        outputs = torch.func.functional_call(model, parameters, (x.unsqueeze(0),))
        return loss_fn(outputs, target.unsqueeze(0))

    return torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))(trainable, inputs, targets)


def freeze(module, prefix):
    """Parameters under the submodule (or the parameter) named `prefix` stop recording and lose their .grad.

    Returns the names of the parameters that still train, in order. "layer1" does not mean "layer10". Raises ValueError
    where nothing has that name. Without the gradient an optimizer leaves a frozen parameter alone; a zero one would let
    momentum and weight decay move it.
    """
    under = [p for name, p in module.named_parameters() if name == prefix or name.startswith(prefix + ".")]
    if not under:
        raise ValueError(f"no parameter is called {prefix!r} or lies under it")
    for parameter in under:
        parameter.requires_grad_(False)
        parameter.grad = None
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]
