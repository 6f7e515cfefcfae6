"""A small program, the graph that autograd recorded for it, and a real backward() that is stopped between two nodes."""
import ast
from dataclasses import dataclass, field

import torch

from ..toolkit.autograd import walk
from ..toolkit.tensors import storage_bytes
from ._program import compute, parse

LEAVES = {"x": [1.0, 2.0, 3.0], "w": [0.5, -1.0, 2.0], "b": 0.5, "A": [[1.0, 0.0, -1.0], [0.5, 2.0, 1.0]]}
PROGRAMS = {
    "two layers": "a = w * x; h = tanh(a); loss = sum(h ** 2)",
    "one part, used twice": "h = exp(w); p = sum(h * x); q = sum(h); loss = p + q",
    "only additions": "a = w + x; h = a + b; loss = sum(h)",
    "a matrix": "z = A @ x + b; h = relu(z); loss = mean(h)",
}
NOTHING, EVERYTHING = "nothing", "everything"
STATUS = {"waits": "waits", "next": "next", "done": "has run", "refused": "refused", "cut": "not reached"}
MOST = 24  # nodes


@dataclass(frozen=True)
class State:
    program: str = PROGRAMS["two layers"]
    detach: str = NOTHING  # the name that is detached where it is computed
    no_grad: str = NOTHING  # the name that is computed under no_grad, or everything
    write: str = NOTHING  # the name that is written in place between forward and backward
    inputs: bool = False  # does x require a gradient?
    retain: bool = False
    steps: int = 0  # nodes to run, over as many calls of backward() as that takes


@dataclass(eq=False)
class Run:
    """What came of a State: real tensors, their real graph, and a real backward() that was stopped where the state says."""

    lines: list  # (name, parsed expression, source)
    names: dict  # every tensor by its name
    leaves: list  # names of the leaves that the program uses
    nodes: list = field(default_factory=list)  # the loss's graph, and the part that detach cut off
    reached: set = field(default_factory=set)  # the nodes that a backward() of the loss comes to
    cuts: list = field(default_factory=list)  # (node, root of the part that was cut off below it)
    call: int = 0  # which backward() it is
    order: list = field(default_factory=list)  # nodes that this backward() ran
    received: dict = field(default_factory=dict)  # node -> the gradient that came to it
    next: int | None = None
    problem: str = ""  # what torch said when it refused
    refused: int | None = None  # the node at which it did
    freed: set = field(default_factory=set)  # nodes whose saved tensors are gone
    changed: set = field(default_factory=set)  # nodes whose saved tensors were written in place since

    @property
    def loss(self):
        return self.names[self.lines[-1][0]]

    @property
    def total(self):
        """Nodes run over all calls so far, and the one at which torch refused."""
        return max(0, self.call - 1) * len(self.reached) + len(self.order) + bool(self.problem)


class _Stop(Exception):
    """Thrown by a hook, to end a backward() between two nodes."""


def run(state):
    """Compute the program, write in place, and run backward as far as the state says.

    Raises ValueError, with a sentence, for a program that is not allowed, that torch refuses, or that is too big to draw.
    """
    program = parse(state.program, LEAVES)
    leaves = used_names(state.program)[0]
    names = {name: torch.tensor(LEAVES[name], requires_grad=name != "x" or state.inputs) for name in leaves}
    result = Run(program, names, leaves)
    whole, users = _forward(state, result)
    if any(result.loss is names[leaf] for leaf in leaves):
        raise ValueError("the loss is itself a leaf: compute something from it")
    result.nodes = walk(*(tensor for tensor in (result.loss, whole) if tensor is not None and tensor.grad_fn))
    if len(result.nodes) > MOST:
        raise ValueError(f"the picture has room for {MOST} nodes; this graph has {len(result.nodes)}")
    place = {node.fn: i for i, node in enumerate(result.nodes)}
    root = place.get(result.loss.grad_fn)
    result.reached = _below(result.nodes, root)
    result.cuts = [(place[user], place[whole.grad_fn]) for user in users if user in place and whole.grad_fn]
    if state.write in names:
        with torch.no_grad():
            names[state.write].add_(1)
    _backward(state, result, root)
    _inspect(result)
    return result


def used_names(words):
    """The names of the leaves that a program uses, and the names that it gives; raises ValueError as `run` does."""
    program = parse(words, LEAVES)
    used = {node.id for _, tree, _ in program for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return [name for name in LEAVES if name in used], [name for name, _, _ in program]


def _forward(state, result):
    """Compute line by line; returns what was detached, as it was before, and the nodes that use what came of it."""
    names, whole, users = result.names, None, []

    def watch(value, operands):
        if value.grad_fn and any(operand is names.get(state.detach) for operand in operands):
            users.append(value.grad_fn)

    for name, tree, source in result.lines:
        try:
            with torch.set_grad_enabled(state.no_grad not in (name, EVERYTHING)):
                value = compute(tree, names, watch)
        except (RuntimeError, TypeError, ArithmeticError) as error:
            raise ValueError(f"{name} = {source}: {_first(error)}") from None
        if not isinstance(value, torch.Tensor):
            raise ValueError(f"{name} = {source} is a number; each line computes a tensor")
        if name == state.detach:
            whole, value = value, value.detach()
        names[name] = value
    return whole, users


def _below(nodes, root):
    """The nodes that are reached from one, itself included."""
    found, waiting = set(), [] if root is None else [root]
    while waiting:
        i = waiting.pop()
        if i not in found:
            found.add(i)
            waiting += [j for j in nodes[i].inputs if j is not None]
    return found


def _backward(state, result, root):
    """Call backward() until it has run `state.steps` nodes in all; a hook before each node sees what comes to it."""
    left = state.steps

    def before(i):
        def hook(gradients):
            result.received[i] = gradients[0].clone()
            if len(result.order) == left:
                result.next = i
                raise _Stop
            result.order.append(i)

        return hook

    for i in result.reached:
        result.nodes[i].fn.register_prehook(before(i))
    result.next = root
    while left and not result.problem:
        result.call, result.order, result.received, result.next = result.call + 1, [], {}, None
        try:
            result.loss.backward(retain_graph=state.retain)
        except _Stop:
            return
        except RuntimeError as error:
            result.problem = f"{type(error).__name__}: {_first(error)}"
            result.refused = result.order.pop() if result.order else None
        left -= len(result.order)


def _inspect(result):
    """Ask each node for what it saved: torch refuses what is freed, and what was written since."""
    for i, node in enumerate(result.nodes):
        for name, _ in node.saved:
            try:
                getattr(node.fn, f"_saved_{name}")
            except RuntimeError as error:
                (result.freed if "freed" in str(error) else result.changed).add(i)


def _first(error):
    return str(error.args[-1]).splitlines()[0]


# ---- what there is to say of it


def code(state, result):
    """What was run, line by line, and the backward() that is under way or comes next."""
    rows = []
    for name, _, source in result.lines:
        line = f"{name} = ({source}).detach()" if name == state.detach else f"{name} = {source}"
        rows.append(f"with torch.no_grad(): {line}" if state.no_grad in (name, EVERYTHING) else line)
    if state.write in result.names:
        rows.append(f"with torch.no_grad(): {state.write}.add_(1)")
    backward = f"{result.lines[-1][0]}.backward({'retain_graph=True' if state.retain else ''})"
    return [*rows, backward if result.call else f"# next: {backward}"]


def sentences(state, result):
    """What happened, as (mark, sentence)."""
    size, held, total = held_bytes(result, ()), held_bytes(result, result.freed), len(result.reached)
    found = [("", f"{len(result.nodes)} nodes. They saved {size} bytes, of which {held} are still held.")]
    if result.problem:
        where = "" if result.refused is None else f" at {result.nodes[result.refused].name}"
        found.append(("✗", f"Backward {result.call} is refused{where}. {result.problem}"))
    elif result.call:
        then = "The next step begins another backward()." if result.next is None else ""
        found.append(("", f"Backward {result.call} has run {len(result.order)} of {total} nodes. {then}"))
        if result.call > 1:
            found.append(("", "What it brings to a leaf is added to the .grad that is there."))
    if result.changed:
        found.append(("", f"{state.write} was written after it had been saved; torch's version counter tells."))
    elif state.write in result.names and result.nodes:
        found.append(("", f"{state.write} was written in place, and no node here had saved it."))
    if len(result.nodes) > len(result.reached):
        found.append(("", f"{state.detach} is detached: the dashed nodes computed it, and backward does not come to them."))
    missed = [name for name in result.leaves if result.names[name].requires_grad and node_of(result, name) not in result.reached]
    if missed:
        found.append(("", f"The loss has no path to {' and '.join(missed)}: no gradient arrives there."))
    return found


def held_bytes(result, without):
    """Bytes of what the nodes saved, each storage once."""
    nodes = [node for i, node in enumerate(result.nodes) if i not in without]
    return storage_bytes(*(tensor for node in nodes for _, tensor in node.saved))


def node_of(result, name):
    """The number of the node that fills a leaf's .grad, if there is one."""
    return next((i for i, node in enumerate(result.nodes) if node.variable is result.names[name]), None)


def status(result, i):
    if i not in result.reached:
        return "cut"
    return "refused" if i == result.refused else "next" if i == result.next else "done" if i in result.order else "waits"


def written(tensor):
    """The values, a line for each row, no wider than a node."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1).tolist()
    for digits in (3, 2, 1):
        found = [" ".join(f"{value:.{digits}g}" for value in row) for row in rows]
        if max(map(len, found)) <= 20:
            break
    return [line if len(line) <= 21 else f"{line[:20]}…" for line in found]


def saved_words(result, name, tensor):
    """A saved tensor's attribute, the name of the tensor that it is, and its bytes."""
    storage = tensor.untyped_storage()
    whose = [label for label, other in result.names.items() if other.data_ptr() == storage.data_ptr()]
    return f"{name}{f' = {whose[0]}' if whose else ''}, {storage.nbytes()} B"


def node_words(result, i):
    node = result.nodes[i]
    below = ", ".join(result.nodes[j].name for j in node.inputs if j is not None)
    got = f", received {'; '.join(written(result.received[i]))}" if i in result.received else ""
    saved = "; ".join(saved_words(result, *item) for item in node.saved) or "nothing"
    gone = ", freed" if i in result.freed else ", written since" if i in result.changed else ""
    return f"{node.name}{' → ' if below else ''}{below}: {STATUS[status(result, i)]}{got}; saved {saved}{gone}"


def leaf_words(result, name):
    grad = result.names[name].grad
    return f"{name}.grad: {'None' if grad is None else '; '.join(written(grad))}"


def told(state, result):
    """All of it, line by line."""
    return "\n".join([
        *code(state, result),
        *(node_words(result, i) for i in range(len(result.nodes))),
        *(leaf_words(result, name) for name in result.leaves),
        *(f"{mark} {sentence}".strip() for mark, sentence in sentences(state, result)),
    ])
