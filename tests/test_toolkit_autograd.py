"""The toolkit's autograd functions against PyTorch itself, on hand-made and on random graphs, shallow and ten thousand nodes deep."""

import copy
import gc
import random
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from course_utils.toolkit.autograd import (
    finite_difference,
    freeze,
    gradient_norms,
    gradient_penalty,
    graph_bytes,
    hessian_vector_product,
    leaf_gradient,
    per_sample_gradients,
    reached_leaves,
    saved_bytes,
    saved_tensors,
    unreached_parameters,
    walk,
)
from course_utils.toolkit.tensors import storage_bytes


def leaf(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def chain(x, steps, step=lambda x: x + 1):
    for _ in range(steps):
        x = step(x)
    return x


def small_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def names(*tensors):
    return [node.name for node in walk(*tensors)]


def random_graph(rng, steps=12):
    """A few leaves and the results of random operations on them; every saved tensor lives as long as its node."""
    made = [leaf(4) for _ in range(3)] + [torch.randn(4, dtype=torch.float64)]
    unary = [torch.exp, torch.sin, torch.tanh, torch.sigmoid, lambda t: t + 1, lambda t: t.flip(0), lambda t: t * 2]
    binary = [torch.add, torch.mul, torch.sub, torch.maximum]
    for _ in range(steps):
        a, b = rng.choice(made), rng.choice(made)
        made.append(rng.choice(unary)(a) if rng.random() < 0.5 else rng.choice(binary)(a, b))
    return made


def nodes_by_recursion(fn, found):
    """The nodes behind fn, the plain way, which is right and not deep."""
    if fn is not None and fn not in found:
        found.add(fn)
        for below, _ in fn.next_functions:
            nodes_by_recursion(below, found)
    return found


class KeepsNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class KeepsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[1]


# ── walk ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_walk_lists_the_nodes_their_inputs_and_the_leaves():
    x, w = leaf(3), leaf(3)
    nodes = walk((w * x).sum() + 1)
    assert [(node.name, node.inputs) for node in nodes] == [
        ("AddBackward0", (1, None)),
        ("SumBackward0", (2,)),
        ("MulBackward0", (3, 4)),
        ("AccumulateGrad", ()),
        ("AccumulateGrad", ()),
    ]
    assert nodes[3].variable is w and nodes[4].variable is x
    assert nodes[0].variable is None and "AddBackward0" in str(nodes[0])


def test_walk_is_complete_once_each_and_in_order_on_random_graphs():
    rng, shared = random.Random(1), 0
    for _ in range(200):
        made = random_graph(rng)
        roots = [tensor for tensor in rng.sample(made, 3) if tensor.grad_fn is not None]
        nodes = walk(*roots)
        functions = [node.fn for node in nodes]
        expected = set()
        for root in roots:
            nodes_by_recursion(root.grad_fn, expected)
        assert set(functions) == expected and len(functions) == len(expected)
        for place, node in enumerate(nodes):
            assert [None if i is None else functions[i] for i in node.inputs] == [fn for fn, _ in node.fn.next_functions]
            assert all(i is None or i > place for i in node.inputs)  # before the nodes of its inputs
            assert (node.variable is not None) == (node.name == "AccumulateGrad")
        edges = [i for node in nodes for i in node.inputs if i is not None]
        shared += len(edges) > len(set(edges))
    assert shared > 50


def test_walk_of_several_results_and_of_none():
    x = leaf(3)
    y = x.exp()
    assert walk() == [] and walk(x) == [] and walk(torch.ones(3)) == [] and walk(x.detach() + 1) == []
    assert names(y, y, x) == ["ExpBackward0", "AccumulateGrad"]
    assert sorted(names(y.sum(), y.sin())) == sorted(["SumBackward0", "SinBackward0", "ExpBackward0", "AccumulateGrad"])
    first, second = torch.stack([y, x]).unbind()  # one node with two outputs
    assert names(first, second).count("UnbindBackward0") == 1
    assert walk(first + second)[0].inputs == (1, 1)


def test_walk_of_a_graph_in_which_each_step_doubles_the_paths():
    assert len(walk(chain(leaf(3), 60, lambda x: x * x))) == 61


def test_ten_thousand_nodes_deep_without_a_deep_stack():
    x, result = leaf(), []
    y = chain(chain(x, 5_000), 5_000, lambda y: y * 0.5)

    def look():
        result.append((walk(y), graph_bytes(y), reached_leaves(y), saved_tensors(y)))

    frames = sys.getrecursionlimit()
    size = threading.stack_size(256 * 1024)  # the interpreter's own frames need no more
    try:
        sys.setrecursionlimit(200)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(frames)
        threading.stack_size(size)
    ((nodes, held, leaves, saved),) = result
    assert len(nodes) == 10_001 and [node.inputs for node in nodes[:2]] == [(1, None), (2, None)]
    assert nodes[-1].variable is x and leaves == [x]
    assert len(saved) == 5_000 and held == 8 * 5_000  # the factor 0.5 of each product, a tensor of its own


# ── saved and freed ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "function, saves",
    [
        (lambda x: x + 1, {}),
        (lambda x: x.sum(), {}),
        (lambda x: x.t(), {}),
        (lambda x: x * x, {"self": "x", "other": "x"}),
        (lambda x: x.sin(), {"self": "x"}),
        (lambda x: x.exp(), {"result": "y"}),
        (lambda x: x.relu(), {"result": "y"}),
        (lambda x: x @ x, {"self": "x", "mat2": "x"}),
        (KeepsNothing.apply, {}),
        (KeepsBoth.apply, {"tensors": "y"}),  # of two under one name the last
    ],
)
def test_what_a_node_saves(function, saves):
    x = leaf(3, 3)
    y = function(x)
    node = walk(y)[0]
    assert {name for name, _ in node.saved} == set(saves) and not node.freed
    for name, tensor in dict(node.saved).items():
        assert torch.equal(tensor, x if saves[name] == "x" else y)
        assert tensor.untyped_storage()._cdata == (x if saves[name] == "x" else y).untyped_storage()._cdata  # no copy


def test_all_that_lies_under_one_name_is_listed():
    x = leaf(3)
    y = KeepsBoth.apply(x)
    assert [name for name, _ in walk(y)[0].saved] == ["tensors", "tensors"]
    assert torch.equal(walk(y)[0].saved[0][1], x) and torch.equal(walk(y)[0].saved[1][1], y)
    places = torch.tensor([0, 2])
    assert [(name, tensor.tolist()) for name, tensor in walk(x[places])[0].saved] == [("indices", [0, 2])]


@pytest.mark.parametrize("function", [lambda x: x * x, torch.sin, torch.exp, KeepsBoth.apply])
def test_backward_frees_what_was_saved_and_retain_graph_does_not(function):
    for retain in (True, False):
        y = function(leaf(3))
        y.sum().backward(retain_graph=retain)
        node = walk(y)[0]
        assert node.freed == (not retain) and bool(node.saved) == retain
        assert (graph_bytes(y) > 0) == retain
        assert [n.name for n in walk(y)[1:]] == ["AccumulateGrad"]  # the nodes stay


def test_freed_is_told_from_nothing_saved():
    x = leaf(3)
    y = ((x + 1) * 2).sum()
    y.backward()
    assert [(node.name, node.freed) for node in walk(y)] == [
        ("SumBackward0", False), ("MulBackward0", True), ("AddBackward0", False), ("AccumulateGrad", False)
    ]
    z = F.layer_norm(x, (3,))  # has neither weight nor bias to save
    assert not walk(z)[0].freed and [name for name, _ in walk(z)[0].saved] == ["input", "result1", "result2"]
    z.sum().backward()
    assert walk(z)[0].freed


def test_saved_tensors_and_graph_bytes_count_each_storage_once_and_whole():
    x, wide = leaf(10), torch.randn(1000, dtype=torch.float64, requires_grad=True)
    y = x * x
    assert len(saved_tensors(y)) == 2 and graph_bytes(y) == 80
    assert graph_bytes(y, y.sin(), y.cos()) == 160  # x and y
    assert graph_bytes(wide[:2] * wide[2:4]) == 8000  # two pieces of one storage
    assert graph_bytes() == graph_bytes(x) == graph_bytes(x + 1) == 0
    net = small_net()
    inputs = torch.randn(5, 3, dtype=torch.float64)
    outputs = net(inputs)
    hidden = 5 * 4 * 8
    assert graph_bytes(outputs) == storage_bytes(inputs, net[2].weight) + hidden  # the first weight would serve the input's gradient


def test_what_a_hook_has_packed_is_not_listed():
    x = leaf(3)
    with saved_tensors_hooks(lambda tensor: tensor.numpy(force=True), torch.from_numpy):
        y = x.exp()
    assert saved_tensors(y) == [] and not walk(y)[0].freed
    assert saved_tensors(checkpoint(lambda x: x.exp().sin(), x, use_reentrant=False)) == []


# ── whom a result reaches ─────────────────────────────────────────────────────────────────────────────────────────────


def test_reached_leaves_are_those_whose_grad_backward_fills():
    rng, missed = random.Random(2), 0
    for _ in range(200):
        made = random_graph(rng)
        result = made[-1].sum()
        reached = reached_leaves(result)
        if result.requires_grad:
            result.backward()
        leaves = [tensor for tensor in made if tensor.is_leaf and tensor.requires_grad]
        assert {id(x) for x in reached} == {id(x) for x in leaves if x.grad is not None}
        assert len({id(x) for x in reached}) == len(reached)
        missed += len(reached) < len(leaves)
    assert missed > 20
    x = leaf(3)
    assert reached_leaves(x.detach().exp()) == [] and reached_leaves(x.exp() * 0 + x)[0] is x


def test_unreached_parameters_are_those_that_get_no_gradient():
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)
    assert unreached_parameters(net, net(x).sum()) == []
    assert unreached_parameters(net, net[2](net[:2](x).detach()).sum()) == ["0.weight", "0.bias"]
    assert unreached_parameters(net, torch.zeros(())) == [name for name, _ in net.named_parameters()]
    net[2].requires_grad_(False)
    assert unreached_parameters(net, net(x).sum()) == ["2.weight", "2.bias"]
    net[2].requires_grad_(True)
    net.unused = nn.Linear(1, 1)
    loss = net[:3](x).sum()
    assert unreached_parameters(net, loss) == ["unused.weight", "unused.bias"]
    loss.backward()
    assert [name for name, p in net.named_parameters() if p.grad is None] == unreached_parameters(net, loss)


def test_parameters_under_reentrant_checkpointing_count_as_unreached():
    net, x = small_net(), leaf(5, 3)
    assert unreached_parameters(net, checkpoint(net, x, use_reentrant=False).sum()) == []
    assert len(unreached_parameters(net, checkpoint(net, x, use_reentrant=True).sum())) == 4


# ── looking changes nothing ───────────────────────────────────────────────────────────────────────────────────────────


def test_looking_changes_nothing():
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)
    twin = copy.deepcopy(net)
    random_state = torch.random.get_rng_state()

    def loss_of(net):
        return (net(x).exp() ** 2).sum()

    loss, other = loss_of(net), loss_of(twin)
    versions = [t._version for t in saved_tensors(loss)]
    for _ in range(3):
        nodes = [node.fn for node in walk(loss)]
        assert graph_bytes(loss) and reached_leaves(loss) and saved_tensors(loss) and not unreached_parameters(net, loss)
    assert [node.fn for node in walk(loss)] == nodes and loss.grad_fn is nodes[0]
    assert [t._version for t in saved_tensors(loss)] == versions and torch.equal(loss, other)
    assert all(p.grad is None and p.is_leaf and p.requires_grad for p in net.parameters()) and x.grad is None
    loss.backward()
    other.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    assert all(node.freed or not node.saved for node in walk(loss))  # no reference of ours has kept what backward frees
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_looking_keeps_nothing_alive():
    x = leaf(3)
    gc.disable()  # what a cycle holds would go sooner or later
    try:
        with saved_bytes() as saved:
            loss = x.exp().sin().sum()
        parts = [weakref.ref(tensor) for tensor in saved_tensors(loss)]
        for look in (walk, graph_bytes, reached_leaves, lambda loss: unreached_parameters(small_net(), loss)):
            assert look(loss)
        assert saved.held == 24
        del loss
        assert saved.held == 0 and [part() for part in parts] == [None] * len(parts) and parts
    finally:
        gc.enable()


# ── saved_bytes ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_saved_bytes_counts_what_is_saved_held_and_at_the_peak():
    x = leaf(10)
    with saved_bytes() as saved:
        assert (saved.bytes, saved.held, saved.peak) == (0, 0, 0)
        y = x * x
        assert (saved.bytes, saved.held, saved.peak) == (80, 80, 80)  # x twice: one storage
        y = y.exp()
        assert (saved.bytes, saved.held, saved.peak) == (160, 160, 160)
        y.sum().backward()
        assert (saved.bytes, saved.held, saved.peak) == (160, 0, 160)
        del y
        x.sin().sum().backward()  # a storage that was seen before
        assert (saved.bytes, saved.held, saved.peak) == (160, 0, 160)
    x.exp()
    assert saved.bytes == 160  # the block is over


def test_saved_bytes_agrees_with_the_graph_on_random_graphs():
    rng, some = random.Random(3), 0
    for _ in range(100):
        with saved_bytes() as saved:
            made = random_graph(rng)
        graph = storage_bytes(*(tensor for tensor in saved_tensors(*made) if tensor.dim()))
        assert saved.bytes == saved.held == saved.peak == graph
        some += graph > 0
        del made
        assert saved.held == 0 and saved.bytes == graph
    assert some > 90


def test_what_is_released_retained_and_dropped():
    x = leaf(10)
    with saved_bytes() as saved:
        y = x.exp().sum()
        y.backward(retain_graph=True)
        assert saved.held == 80
        y.backward()
        assert saved.held == 0
        for _ in range(5):
            x.exp()  # nobody keeps the result, so nobody keeps the graph
        assert saved.held == 0 and saved.peak == 80
        kept = [x.exp() for _ in range(5)]
        assert saved.held == saved.peak == 400
        kept.clear()
    assert saved.held == 0 and saved.peak == 400


def test_a_graph_that_outlives_its_block_still_tells():
    x = leaf(10)
    with saved_bytes() as saved:
        loss = x.exp().sum()
    assert saved.held == 80
    loss.backward()
    assert saved.held == 0 and torch.equal(x.grad, x.exp())


def test_saved_bytes_counts_no_storage_twice_and_no_other_under_its_name():
    x = leaf(1000)
    with saved_bytes() as saved:
        (x[:2] * x[2:4]).sum().backward()
        assert saved.bytes == 8000  # the whole storage that the pieces show
        for _ in range(50):  # each storage is freed, and the next may lie in the same place
            x.exp().sum().backward()
    assert saved.bytes == 8000 + 50 * 8000 and saved.peak == 8000


def test_saved_bytes_without_parameters():
    net, inputs = small_net(), torch.randn(5, 3, dtype=torch.float64)
    with saved_bytes() as saved:
        net(inputs)
    weight, hidden = net[2].weight.nbytes, 5 * 4 * 8
    assert saved.bytes == inputs.nbytes + weight + hidden
    assert saved.without(*net.parameters()) == inputs.nbytes + hidden
    assert saved.without(inputs, inputs[1:], *net.parameters()) == hidden
    assert saved.without() == saved.bytes == saved.without(torch.ones(3))


def test_under_no_grad_and_inference_mode_nothing_is_saved():
    net = small_net()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), saved_bytes() as saved:
            net(torch.randn(5, 3, dtype=torch.float64))
        assert (saved.bytes, saved.held, saved.peak) == (0, 0, 0)


def test_gradients_in_a_block_are_the_same_also_of_second_order():
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)

    def gradients():
        inputs = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad((net(inputs) ** 3).sum(), inputs, create_graph=True)
        return torch.autograd.grad((slope**2).sum() + net(x).sum(), list(net.parameters()))

    wanted = gradients()
    with saved_bytes():
        came = gradients()
    assert all(torch.equal(a, b) for a, b in zip(wanted, came, strict=True))
    assert wanted[0].any()


def test_an_exception_ends_the_block():
    x = leaf(3)
    with pytest.raises(ZeroDivisionError), saved_bytes() as saved:
        x.exp()
        raise ZeroDivisionError
    x.exp()
    assert saved.bytes == 24


@pytest.mark.parametrize("function, writes_result", [(torch.exp, True), (torch.sin, False), (lambda x: x * x, False)])
def test_a_write_into_what_was_saved_is_noticed_in_the_block_as_outside(function, writes_result):
    def loss(write):
        x = leaf(3).clone()
        y = function(x)
        if write:
            (y if writes_result else x).detach().add_(1)
        return y.sum()

    with saved_bytes():
        loss(write=False).backward()
        overwritten = loss(write=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation.* version 0 and is at version 1"):
            overwritten.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss(write=True).backward()


def test_a_write_into_what_was_not_saved_is_let_through():
    with saved_bytes():
        x = leaf(3)
        inputs = x * 1
        y = inputs.exp()
        inputs.add_(1)
        y.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_a_plain_number_passes_uncounted():
    with saved_bytes() as saved:
        y = leaf(10) * 2
    assert saved.bytes == 0 and graph_bytes(y) == 8  # PyTorch shows it to no hook


def test_a_sparse_tensor_passes_uncounted():
    sparse, dense = torch.eye(3).to_sparse().requires_grad_(), torch.ones(3, 2, requires_grad=True)
    with saved_bytes() as saved:
        loss = torch.sparse.mm(sparse, dense).sum()
    assert saved.bytes == dense.nbytes
    loss.backward()
    assert dense.grad.tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(NotImplementedError):
        graph_bytes(torch.sparse.mm(sparse, dense))


def test_blocks_within_blocks():
    x = leaf(10)
    with saved_bytes() as outer:
        x.exp()
        with saved_bytes() as inner:
            x.sin()
    assert (outer.bytes, inner.bytes) == (80, 80)  # each sees what is saved while it is the innermost


# ── gradient_norms ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_gradient_norms_are_those_of_grad_last_layer_first():
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)
    with gradient_norms(net) as norms:
        assert norms == {}
        net(x).square().sum().backward()
    assert norms == {name: p.grad.norm().item() for name, p in net.named_parameters()}
    order = list(norms)
    assert max(order.index(f"2.{n}") for n in ("weight", "bias")) < min(order.index(f"0.{n}") for n in ("weight", "bias"))


def test_gradient_norms_are_of_the_last_backward_alone_and_of_what_got_one():
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)
    net[0].weight.requires_grad_(False)
    with gradient_norms(net) as norms:
        net(x).sum().backward()
        once = dict(norms)
        net(x).sum().backward()
    assert norms == once and set(norms) == {"0.bias", "2.weight", "2.bias"}
    assert net[0].bias.grad.norm().item() == pytest.approx(2 * norms["0.bias"])
    with gradient_norms(net) as norms:
        net[2](net[:2](x).detach()).sum().backward()
    assert set(norms) == {"2.weight", "2.bias"}


def test_a_parameter_that_is_used_twice_has_one_norm():
    layer, x = nn.Linear(3, 3).double(), torch.randn(2, 3, dtype=torch.float64)
    with gradient_norms(layer) as norms:
        layer(layer(x)).sum().backward()
    assert norms["weight"] == layer.weight.grad.norm().item()


def test_the_hooks_go_with_the_block_also_after_an_error():
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)
    with gradient_norms(net) as norms:
        pass
    with pytest.raises(ZeroDivisionError), gradient_norms(net):
        raise ZeroDivisionError
    net(x).sum().backward()
    assert norms == {} and not any(p._backward_hooks for p in net.parameters())


# ── derivatives ───────────────────────────────────────────────────────────────────────────────────────────────────────


def states(*tensors):
    """All that a call might leave behind on tensors."""
    grads = [t.grad.clone() if t.is_leaf and t.grad is not None else None for t in tensors]
    return [(t.detach().clone(), t._version, t.requires_grad, t.grad_fn, grad) for t, grad in zip(tensors, grads, strict=True)]


def same_states(before, after):
    for (a, *rest, grad), (b, *others, other) in zip(before, after, strict=True):
        assert torch.equal(a, b) and rest == others
        assert grad is other is None or torch.equal(grad, other)


def kinds_of_tensors():
    """x that requires no grad, a leaf, a leaf with a gradient, a result."""
    filled = leaf(4)
    filled.grad = torch.full((4,), 5.0, dtype=torch.float64)
    return [torch.randn(4, dtype=torch.float64), leaf(4), filled, leaf(4) * 2]


@pytest.mark.parametrize("kind", range(4))
def test_leaf_gradient(kind):
    x = kinds_of_tensors()[kind]
    before = states(x, *reached_leaves(x))
    gradient = leaf_gradient(lambda x: (x**3).sum(), x)
    assert torch.allclose(gradient, 3 * x.detach() ** 2) and not gradient.requires_grad
    same_states(before, states(x, *reached_leaves(x)))


FUNCTIONS = {
    "product": lambda x, y: (x * y).sum(),
    "mixed": lambda x, y: (x.sin() * y.exp()).mean() + (x**2 * y).sum(),
    "matrix": lambda x, y: torch.tanh(x @ y.t()).sum(),
    "norm": lambda x, y: (x.norm() + 2) * torch.logsumexp(y.flatten(), 0),
    "one alone": lambda x, y: (y**3).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_finite_difference_agrees_with_autograd_where_gradcheck_does(name):
    function = FUNCTIONS[name]
    for _ in range(5):
        x, y = leaf(2, 3), leaf(2, 3)
        assert torch.autograd.gradcheck(function, (x, y))
        gradients = torch.autograd.grad(function(x, y), (x, y), materialize_grads=True, allow_unused=True)
        before = states(x, y)
        came = finite_difference(function, x, y)
        same_states(before, states(x, y))
        for mine, exact in zip(came, gradients, strict=True):
            assert torch.allclose(mine, exact, rtol=1e-6, atol=1e-8) and mine.shape == exact.shape and mine.dtype == exact.dtype


def wrong_function(slope):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * slope(*ctx.saved_tensors)

    return Wrong.apply


@pytest.mark.parametrize(
    "slope, right",
    [(torch.cos, True), (torch.sin, False), (lambda x: -x.cos(), False), (lambda x: 1.01 * x.cos(), False), (torch.ones_like, False)],
)
def test_finite_difference_finds_the_wrong_backward_that_gradcheck_finds(slope, right):
    function, x = wrong_function(slope), torch.tensor([0.3, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x,), raise_exception=False) == right
    (by_difference,) = finite_difference(lambda x: function(x).sum(), x)
    (by_autograd,) = torch.autograd.grad(function(x).sum(), x)
    assert torch.allclose(by_difference, by_autograd, rtol=1e-5, atol=1e-7) == right
    assert torch.allclose(by_difference, x.detach().cos(), atol=1e-8)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 2, dtype=torch.float64).t(),
        torch.randn(2, 1, dtype=torch.float64).expand(2, 3),
        torch.randn(12, dtype=torch.float64)[1::3],
        torch.tensor(2.0, dtype=torch.float64),
        torch.ones(0, 3, dtype=torch.float64),
    ],
    ids=["transposed", "expanded", "sliced", "scalar", "empty"],
)
def test_finite_difference_of_any_layout(x):
    before, strides = x.clone(), x.stride()
    (came,) = finite_difference(lambda x: (x**2).sum(), x)
    assert torch.allclose(came, 2 * x, atol=1e-7) and came.shape == x.shape
    assert torch.equal(x, before) and x.stride() == strides


def test_finite_difference_takes_eps_and_gives_its_error():
    x = torch.tensor(1.0, dtype=torch.float64)
    errors = {eps: abs(finite_difference(torch.sin, x, eps=eps)[0] - x.cos()).item() for eps in (1e-1, 1e-3, 1e-5)}
    assert errors[1e-1] == pytest.approx(x.cos().item() * 1e-2 / 6, rel=0.01)  # the third derivative times eps² / 6
    assert errors[1e-1] > 1e3 * errors[1e-3] > 1e3 * errors[1e-5]
    assert abs(finite_difference(lambda x: x**2, x, eps=0.5)[0].item() - 2.0) < 1e-15  # exact for a parabola at any eps


def test_finite_difference_refuses():
    x = torch.ones(2, dtype=torch.float64)
    for other in (torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.float16)):
        with pytest.raises(TypeError, match="need float64"):
            finite_difference(lambda x, y: (x * y).sum(), x, other)
    with pytest.raises(ValueError, match="one number"):
        finite_difference(lambda x: x * 2, x)
    with pytest.raises(ZeroDivisionError):
        finite_difference(lambda x: 1 / 0, x)
    assert finite_difference(lambda x: 3.0, x)[0].tolist() == [0.0, 0.0]  # a plain number will do
    assert torch.equal(x, torch.ones_like(x))


def test_gradient_penalty_is_its_definition_and_its_gradient_that_of_differences():
    critic, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), torch.randn(5, 3, dtype=torch.float64)
    norms = [leaf_gradient(lambda row: critic(row).sum(), row).norm() for row in x]
    penalty = gradient_penalty(critic, x)
    assert torch.allclose(penalty, torch.stack([(norm - 1) ** 2 for norm in norms]).mean())
    penalty.backward()

    def with_weight(weight):
        return gradient_penalty(lambda x: torch.func.functional_call(critic, {"0.weight": weight}, (x,)), x)

    (expected,) = finite_difference(with_weight, critic[0].weight)
    assert torch.allclose(critic[0].weight.grad, expected, atol=1e-6) and expected.any()
    assert torch.allclose(gradient_penalty(lambda x: critic(x).squeeze(1), x), penalty)  # (N,) as well as (N, 1)
    images = torch.randn(5, 1, 3, dtype=torch.float64)
    assert torch.allclose(gradient_penalty(lambda x: critic(x.squeeze(1)), images), gradient_penalty(critic, images.squeeze(1)))


@pytest.mark.parametrize("kind", range(4))
def test_gradient_penalty_and_hessian_vector_product_leave_all_as_it_was(kind):
    x, critic = kinds_of_tensors()[kind], nn.Linear(1, 1).double()
    critic.weight.grad = torch.full((1, 1), 5.0, dtype=torch.float64)
    before = states(x, *reached_leaves(x), *critic.parameters())
    penalty = gradient_penalty(lambda rows: critic(rows) ** 2, x.unsqueeze(1))
    product = hessian_vector_product(lambda x: critic(x.unsqueeze(1) ** 2).exp().sum(), x, torch.ones(4, dtype=torch.float64))
    same_states(before, states(x, *reached_leaves(x), *critic.parameters()))
    assert not product.requires_grad and penalty.requires_grad
    theirs = {id(t) for t in [x, *reached_leaves(x)]}
    assert not theirs & {id(t) for t in reached_leaves(penalty)}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[1:] * x[:-1]).sum(),
        lambda x: (x.sin() * x.roll(1)).sum(),
        lambda x: (x**3).sum() + 3 * x[0],
        lambda x: x.norm(),
        lambda x: x[0] ** 2 + 3 * x[1],  # linear in one number, without the others
        lambda x: (3 * x).sum(),
    ],
)
def test_hessian_vector_product_is_the_hessians(function):
    x, v = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(function, x)
    assert torch.allclose(hessian_vector_product(function, x, v), hessian @ v, atol=1e-12)
    square = hessian_vector_product(lambda m: function(m.flatten()), x.view(2, 2), v.view(2, 2))
    assert torch.allclose(square.flatten(), hessian @ v, atol=1e-12)


def test_hessian_vector_product_where_the_gradient_has_a_graph_that_does_not_lead_to_x():
    weight, x = leaf(4), torch.randn(4, dtype=torch.float64)
    assert hessian_vector_product(lambda x: (weight * x).sum(), x, torch.ones_like(x)).tolist() == [0.0] * 4
    assert weight.grad is None


def test_per_sample_gradients_are_those_of_batches_of_one():
    net, x, labels = small_net(), torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    net[0].bias.requires_grad_(False)
    net[2].bias.grad = torch.full((2,), 5.0, dtype=torch.float64)
    before = states(*net.parameters())
    came = per_sample_gradients(net, F.cross_entropy, x, labels)
    same_states(before, states(*net.parameters()))
    assert list(came) == ["0.weight", "2.weight", "2.bias"] and not any(g.requires_grad for g in came.values())
    trainable = [p for p in net.parameters() if p.requires_grad]
    for i in range(6):
        loss = F.cross_entropy(net(x[i : i + 1]), labels[i : i + 1])
        for mine, exact in zip(came.values(), torch.autograd.grad(loss, trainable), strict=True):
            assert torch.allclose(mine[i], exact, atol=1e-12)


# ── freeze ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_freeze_reaches_the_prefix_and_nothing_else():
    net = nn.ModuleDict({"layer1": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "layer10": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    values = copy.deepcopy(net.state_dict())
    left = freeze(net, "layer1")
    assert left == ["layer10.weight", "layer10.bias", "head.weight", "head.bias"]
    for name, parameter in net.named_parameters():
        frozen = name.startswith("layer1.")
        assert parameter.requires_grad != frozen and (parameter.grad is None) == frozen
        assert torch.equal(parameter, values[name])
    assert freeze(net, "head.bias") == ["layer10.weight", "layer10.bias", "head.weight"]
    assert freeze(net, "layer1.0") == ["layer10.weight", "layer10.bias", "head.weight"]  # frozen already


@pytest.mark.parametrize("prefix", ["layer", "layer2", "layer1.2", "0", "weight", "head.", ".head", ""])
def test_freeze_refuses_a_name_that_there_is_not_and_then_freezes_nothing(prefix):
    net = nn.ModuleDict({"layer1": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "head": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="no parameter is called"):
        freeze(net, prefix)
    assert all(p.requires_grad for p in net.parameters())


@pytest.mark.parametrize("make", [
    torch.optim.SGD, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.1), torch.optim.Adam, torch.optim.AdamW,
])
def test_a_frozen_layer_stays_under_any_optimizer(make):
    net, x = small_net(), torch.randn(5, 3, dtype=torch.float64)
    optimizer = make(net.parameters(), lr=0.1)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=False)
            net(x).square().sum().backward()
            optimizer.step()

    train(3)
    freeze(net, "0")
    frozen, free = net[0].weight.clone(), net[2].weight.clone()
    train(3)
    assert torch.equal(net[0].weight, frozen) and not torch.equal(net[2].weight, free)
