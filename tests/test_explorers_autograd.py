"""The explorers of lesson 02 without a browser: what they show is held against torch itself."""
import ast
import inspect
import random
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from test_explorers import cells, inside, picture

import course_utils.toolkit.autograd as kit
from course_utils.explorers import _program, _stepping, accumulation, graph
from course_utils.explorers._layers import layered
from course_utils.explorers._program import FUNCTIONS, LONGEST, compute, parse
from course_utils.explorers._stepping import EVERYTHING, LEAVES, NOTHING, PROGRAMS, State, run

TORCH = {name: getattr(torch, name) for name in FUNCTIONS}
BRANCHES = "h = exp(w) * b; p = sum(h * x); q = sum(h / w); loss = p + q"


def leaves(inputs=False):
    return {name: torch.tensor(value, requires_grad=name != "x" or inputs) for name, value in LEAVES.items()}


def gradients(program, inputs=False, calls=1):
    """{leaf: .grad} after backward() of the program as Python runs it."""
    made = leaves(inputs)
    names = {**TORCH, **made}
    exec(program, names)
    for _ in range(calls):
        names["loss"].backward(retain_graph=True)
    return {name: leaf.grad for name, leaf in made.items()}


def same(a, b):
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


def groups(root):
    """{status: number of boxes} of a picture."""
    found = {}
    for node in root.iter():
        if node.get("role") == "group" and node.get("class"):
            found[node.get("class")] = found.get(node.get("class"), 0) + 1
    return found


# ---- what may be typed


@pytest.mark.parametrize(
    "expression",
    ["w * x", "-w / 3", "A @ x + b", "w ** 2 - +b", "torch.tanh(w)", "w.tanh()", "sum(exp(w) * x)", "(w * w).mean().sqrt()",
     "2 ** w", "w.detach()"],
)
def test_an_expression_is_computed_as_python_computes_it(expression):
    ((name, tree, _),) = parse(expression, LEAVES)
    made = leaves()
    expected = eval(expression, {**TORCH, "torch": torch, **made})
    watched = []
    result = compute(tree, made, lambda value, operands: watched.append(value))
    assert name == "loss" and torch.equal(result, expected) and result.requires_grad == expected.requires_grad
    assert watched[-1] is result


@pytest.mark.parametrize(
    "program, words",
    [
        ("", "one to 6 lines"),
        ("a = w; b2 = w; c = w; d = w; e = w; f = w; g = w", "one to 6 lines"),
        ("h =", "not a line of Python"),
        ("w" * (LONGEST + 1), "room for 200 characters"),
        ("h = tanh(w); h = exp(h)", "h has a meaning already"),
        ("w = x * 2", "w has a meaning already"),
        ("sum = x * 2", "sum has a meaning already"),
        ("a_very_long_name = w * x", "at most 10 characters"),
        ("w * x; loss = w", "only the last line"),
        ("a = b2 = w", "only the last line"),
        ("import os", "only the last line"),
        ("del w", "only the last line"),
        ("w += 1", "only the last line"),
        ("(h := w)", "only names, numbers"),
        ("v * x", "v is not known here"),
        ("h = h * 2", "h is not known here"),
        ("__import__('os')", "is not offered here"),
        ("eval(w)", "eval is not offered here"),
        ("open(w)", "open is not offered here"),
        ("w.backward()", "backward is not offered here"),
        ("w.__class__", "only names, numbers"),
        ("w.data", "only names, numbers"),
        ("w.sum(0)", "no further argument"),
        ("sum(w, dim=0)", "no further argument"),
        ("sum(*w)", "only names, numbers"),
        ("sum()", "no further argument"),
        ("(lambda: w)()", "no further argument"),
        ("os.system(w)", "no further argument"),
        ("exp(w)(w)", "no further argument"),
        ("w[0]", "only names, numbers"),
        ("[w, x]", "only names, numbers"),
        ("w if w else x", "only names, numbers"),
        ("w < x", "only names, numbers"),
        ("w // x", "only names, numbers"),
        ("not w", "only names, numbers"),
        ("True * w", "only names, numbers"),
        ("'a' * 3", "only names, numbers"),
        ("1j * w", "only names, numbers"),
        ("[w for _ in x]", "only names, numbers"),
        ("f'{w}'", "only names, numbers"),
        ("\0", "not a line of Python"),
        ("(" * 150 + "w" + ")" * 40, "not a line of Python"),
        ("3 + 4", "is a number"),
        ("exp(3) * w", "takes a tensor here"),
        ("9 ** 9 ** 9 * w", "result out of range"),
        ("w / (1 - 1) + 1 / 0", "division by zero"),
        ("(0 - 1) ** 0.5 * w", "complex"),
        ("w @ b", "both arguments to matmul"),
        ("x @ A", "mat1 and mat2 shapes cannot be multiplied"),
        ("2 @ w", "unsupported operand"),
        ("w", "itself a leaf"),
        (f"a = w{' * w' * 20}; loss = sum(a{' + a' * 20})", "has no room for so many nodes|room for 24 nodes"),
        ("-" * 190 + "w", "room for 24 nodes"),
    ],
)
def test_what_is_not_allowed_is_a_sentence_in_the_picture(program, words):
    with pytest.raises(ValueError, match=words):
        result = run(State(program))
        graph._sizes(result, graph._rows(result)[0])
    ui = graph.build(program)
    svg = ui.picture.value
    inside(picture(svg))
    assert "✗" in svg
    for press in (ui.step, ui.whole, ui.back, ui.reset):
        press.click()
    assert ui.picture.value == svg
    ui.program.value = PROGRAMS["two layers"]
    assert "SumBackward0" in ui.picture.value and "✗" not in ui.picture.value


# ---- where the boxes stand


@pytest.mark.parametrize("seed", range(20))
def test_every_edge_runs_down_row_by_row(seed):
    rng = random.Random(seed)
    count = rng.randint(1, 14)
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))]
    ends = [i for i in range(count) if not any(a == i for a, _ in edges)]
    rows, paths = layered(count, edges, ends)
    row_of = {item: n for n, row in enumerate(rows) for item in row}
    assert sum(map(len, rows)) == len(row_of) and {i for i in row_of if isinstance(i, int)} == set(range(count))
    assert [(path[0], path[-1]) for path in paths] == edges
    assert all(row_of[b] == row_of[a] + 1 for path in paths for a, b in pairwise(path))
    assert all(row_of[i] == len(rows) - 1 for i in ends)


def test_the_order_in_a_row_avoids_crossings():
    rows, _ = layered(6, [(0, 1), (0, 2), (1, 4), (2, 3), (2, 5)])
    assert rows[1] in ([1, 2], [2, 1]) and (rows[2][0] == 4) == (rows[1][0] == 1) and rows[2][1] != 4


# ---- forward and backward


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("program", [*PROGRAMS.values(), BRANCHES])
def test_stepping_fills_grad_node_by_node_with_the_true_gradients(program, inputs):
    true = gradients(program, inputs)
    state = State(program, inputs=inputs)
    nodes = len(run(state).nodes)
    assert nodes == len(kit.walk(run(state).loss))
    filled = set()
    for steps in range(nodes + 1):
        result = run(replace(state, steps=steps))
        assert len(result.order) == steps and result.call == (steps > 0) and not result.problem
        assert (result.next is None) == (steps == nodes)
        ran = {i for i in result.order if result.nodes[i].variable is not None}
        for name in result.leaves:
            grad, number = result.names[name].grad, _stepping.node_of(result, name)
            assert (grad is not None) == (number in ran)
            assert grad is None or same(grad, true[name])
            filled |= {name} if grad is not None else set()
        for node in result.order:  # no node before all that send to it
            users = [i for i, other in enumerate(result.nodes) if node in other.inputs]
            assert all(result.order.index(user) < result.order.index(node) for user in users)
        assert result.freed == {i for i in result.order if result.nodes[i].saved}, "backward frees each node when it has run"
    assert filled == {name for name, grad in true.items() if grad is not None}


def test_what_comes_to_a_node_is_the_gradient_of_the_loss_there():
    program = "a = w * x; h = tanh(a); loss = sum(h ** 2)"
    names = {**TORCH, **leaves()}
    exec(program, names)
    expected = dict(zip("ah", torch.autograd.grad(names["loss"], [names["a"], names["h"]]), strict=True))
    result = run(State(program, steps=5))
    for name, gradient in expected.items():
        place = next(i for i, node in enumerate(result.nodes) if node.fn is result.names[name].grad_fn)
        assert same(result.received[place], gradient)


def test_bytes_are_those_of_the_graph_each_storage_once():
    for program in PROGRAMS.values():
        result = run(State(program))
        assert _stepping.held_bytes(result, ()) == kit.graph_bytes(result.loss)
    result = run(State(PROGRAMS["two layers"], steps=3))
    assert _stepping.held_bytes(result, ()) == 24 and _stepping.held_bytes(result, result.freed) == 12
    assert "They saved 24 bytes, of which 12 are still held" in graph.draw(State(PROGRAMS["two layers"], steps=3))


def test_a_second_backward_is_refused_where_something_was_freed_and_only_there():
    for program in PROGRAMS.values():
        state = State(program)
        nodes = len(run(state).nodes)
        second = run(replace(state, steps=2 * nodes))
        saves = any(node.saved for node in second.nodes)
        assert saves == (program != PROGRAMS["only additions"])
        if saves:
            assert "a second time" in second.problem and second.nodes[second.refused].saved and second.call == 2
            assert not any(second.nodes[i].saved for i in second.order)
            assert groups(picture(graph.draw(replace(state, steps=2 * nodes))))["refused"] == 1
        else:
            true = gradients(program, calls=2)
            assert not second.problem and all(same(second.names[n].grad, true[n]) for n in second.leaves)


def test_retain_graph_keeps_what_was_saved_and_adds_up():
    for program in PROGRAMS.values():
        state = State(program, retain=True)
        nodes = len(run(state).nodes)
        second = run(replace(state, steps=2 * nodes))
        true = gradients(program, calls=2)
        assert not second.problem and not second.freed and second.call == 2 and second.total == 2 * nodes
        assert all(same(second.names[name].grad, true[name]) for name in second.leaves)
        assert "retain_graph=True" in graph.draw(replace(state, steps=1))
        assert "added to the .grad" in graph.draw(replace(state, steps=2 * nodes))


def test_detach_cuts_the_graph_and_shows_what_is_cut_off():
    program = "h = tanh(w * x); y = h * b; loss = sum(y * w)"
    state = State(program, detach="h", steps=99)
    result = run(replace(state, steps=len(run(State(program, detach="h")).reached)))
    true = gradients(program.replace("tanh(w * x)", "tanh(w * x).detach()"))
    assert all(same(result.names[name].grad, true[name]) for name in result.leaves) and not result.problem
    cut = [node.name for i, node in enumerate(result.nodes) if i not in result.reached]
    assert cut == ["TanhBackward0", "MulBackward0"]
    ((user, root),) = result.cuts
    assert result.nodes[root].name == "TanhBackward0" and result.nodes[user].fn is result.names["y"].grad_fn
    svg = graph.draw(replace(state, steps=2))
    assert svg.count("✗ detach") == 1 and groups(picture(svg))["cut"] == 3  # and x, which has no node
    assert "h is detached" in svg and "(tanh(w * x)).detach()" in svg


def test_a_loss_behind_a_detach_has_no_graph():
    state = State(PROGRAMS["two layers"], detach="h", steps=1)
    result = run(state)
    assert not result.reached and "does not have a grad_fn" in result.problem and result.total == 1
    svg = graph.draw(state)
    assert "The loss has no path to w" in svg and "does not have a grad_fn" in svg


def test_under_no_grad_nothing_is_recorded():
    for name in ("h", "loss", EVERYTHING):
        state = State(PROGRAMS["two layers"], no_grad=name, steps=1)
        result = run(state)
        assert not result.nodes and "does not have a grad_fn" in result.problem
        inside(picture(graph.draw(state)))
    state = State("h = exp(w); loss = sum(h * b)", no_grad="h", steps=99)
    result = run(replace(state, steps=3))
    assert "ExpBackward0" not in [node.name for node in result.nodes] and result.names["b"].grad is not None
    assert result.names["w"].grad is None and "no path to w" in graph.draw(state)


@pytest.mark.parametrize(
    "program, name, refused",
    [
        ("h = tanh(w * x); loss = sum(h * b)", "h", "MulBackward0"),
        ("h = tanh(w * x); loss = sum(h + b)", "h", "TanhBackward0"),
        ("a = w * x; h = tanh(a); loss = sum(h)", "a", None),
        ("a = w * x; h = sin(a); loss = sum(h)", "a", "SinBackward0"),
        ("a = w * x; h = tanh(a); loss = sum(h)", "x", "MulBackward0"),
        ("a = w * x; h = tanh(a); loss = sum(h)", "w", None),
        ("a = w + x; h = a + b; loss = sum(h)", "a", None),
    ],
)
def test_a_write_in_place_is_refused_where_the_tensor_was_saved(program, name, refused):
    state = State(program, write=name, steps=50)
    result = run(replace(state, steps=len(run(replace(state, write=NOTHING, steps=0)).nodes)))
    svg = graph.draw(replace(state, steps=7))
    assert f"{name}.add_(1)" in svg and result.names[name]._version == 1
    if refused:
        assert "modified by an inplace operation" in result.problem and result.nodes[result.refused].name == refused
        assert result.changed and len(cells(picture(svg), "changed")) > 0 and "version counter tells" in svg
    else:
        true = gradients(program)
        assert not result.problem and not result.changed
        assert all(same(result.names[n].grad, true[n]) for n in result.leaves)
        assert "no node here had saved it" in svg


def test_a_loss_that_is_no_scalar_is_refused_by_torch():
    result = run(State("h = w * x", steps=1))
    assert "only for scalar outputs" in result.problem and result.refused is None and result.total == 1


# ---- the picture and its controls


@pytest.mark.parametrize("program", [*PROGRAMS.values(), BRANCHES])
def test_the_picture_shows_every_node_and_saved_tensor(program):
    nodes = len(run(State(program)).nodes)
    for steps in range(nodes + 2):
        state = State(program, steps=steps)
        result, root = run(state), picture(graph.draw(state))
        inside(root)
        found, lone = groups(root), len(graph._lone(result))
        assert found.pop("cut", 0) == lone and sum(found.values()) == nodes
        assert found.get("done", 0) == len(result.order) and found.get("next", 0) == (result.next is not None)
        saved = sum(len(node.saved) for node in result.nodes)
        freed = sum(len(node.saved) for i, node in enumerate(result.nodes) if i in result.freed)
        empty = sum(result.names[name].grad is None for name in result.leaves)
        assert len(cells(root, "saved")) == saved - freed and len(cells(root, "idle")) == freed + empty
        edges = [node for node in root.iter() if "edge" in (node.get("class") or "").split()]
        assert len(edges) == sum(j is not None for node in result.nodes for j in node.inputs)
        passed = sum(j is not None for i in result.order for j in result.nodes[i].inputs)
        assert sum("passed" in node.get("class") for node in edges) == passed
        counts = sorted(int(node.text) for node in root.iter() if node.get("class") == "count")
        assert counts == list(range(1, len(result.order) + 1))


def test_what_has_one_storage_lights_up_together():
    root = picture(graph.draw(State(PROGRAMS["two layers"])))
    by_slot = {}
    for node in cells(root):
        for slot in re.findall(r" k(\d+)", node.get("class")):
            by_slot.setdefault(slot, []).append(node.get("aria-label"))
    assert ["self = h, 12 B", "result = h, 12 B"] in by_slot.values()
    assert ["other = x, 12 B", "x 1 2 3"] in by_slot.values()


def test_every_control_of_the_graph_changes_the_picture():
    ui = graph.build()
    seen = [ui.picture.value]

    def look():
        seen.append(ui.picture.value)
        inside(picture(seen[-1]))

    for press in (ui.step, ui.step, ui.whole, ui.whole):
        press.click()
        look()
    assert "a second time" in seen[-1] and ui.state.steps == 7
    ui.whole.click()
    ui.step.click()
    assert ui.picture.value == seen[-1] and ui.state.steps == 7, "where torch refuses, it does not go on"
    ui.retain.value = True
    look()
    assert "a second time" not in seen[-1] and "Backward 2 has run 2 of 5" in seen[-1]
    ui.whole.click()
    look()
    assert ui.state.steps == 10
    ui.reset.click()
    look()
    ui.inputs.value = True
    look()
    for name in list(PROGRAMS)[1:]:
        ui.start.value = name
        look()
        assert ui.program.value == PROGRAMS[name] and ui.state == State(PROGRAMS[name], inputs=True, retain=True)
    ui.program.value = "v = w * x; out = sum(sigmoid(v))"
    look()
    assert ui.start.value is None
    assert ui.detach.options == (NOTHING, "v", "out") and ui.no_grad.options == (NOTHING, "v", "out", EVERYTHING)
    assert ui.write.options == (NOTHING, "x", "w", "v", "out")
    for control, value in ((ui.write, "v"), (ui.no_grad, "v"), (ui.detach, "v")):
        control.value = value
        look()
        control.value = NOTHING
    ui.step.click()
    ui.step.click()
    ui.back.click()
    assert ui.state.steps == 1
    ui.detach.value = "out"
    assert ui.state.steps == 0, "another graph begins anew"
    ui.start.value = "two layers"
    ui.retain.value = ui.inputs.value = False
    assert ui.picture.value == seen[0] and len(set(seen)) == len(seen)


def test_a_half_typed_program_leaves_the_buttons_as_they_are():
    ui = graph.build()
    options = ui.write.options
    for words in ("a = w *", "a = w * x; h =", ""):
        ui.program.value = words
        assert ui.write.options == options and "✗" in ui.picture.value
    ui.write.value = "h"
    ui.detach.value = "a"
    ui.program.value = "loss = sum(w)"
    assert ui.write.value == ui.detach.value == NOTHING and "✗" not in ui.picture.value


def expression(rng, names, depth=0):
    chance = rng.random()
    if depth > 2 or chance < 0.3:
        return rng.choice([*names, *names, "2", "0.5"])
    if chance < 0.65:
        left, right = expression(rng, names, depth + 1), expression(rng, names, depth + 1)
        return f"({left} {rng.choice('+-*/@')} {right})"
    return f"{rng.choice(list(FUNCTIONS))}({expression(rng, names, depth + 1)})"


def test_whatever_is_typed_and_pressed_the_picture_is_true():
    rng, drawn = random.Random(0), 0
    for _ in range(60):
        names, program = list(LEAVES), []
        for name in rng.sample(["a", "h", "hidden", "y"], rng.randint(0, 3)):
            program.append(f"{name} = {expression(rng, names)}")
            names.append(name)
        ui = graph.build("; ".join([*program, f"loss = sum({expression(rng, names[-3:])})"]))
        for _ in range(3):
            for control in (ui.detach, ui.no_grad, ui.write):
                control.value = rng.choice([NOTHING, NOTHING, rng.choice(control.options)])
            ui.retain.value, ui.inputs.value = rng.random() < 0.5, rng.random() < 0.5
            for press in rng.choices([ui.step, ui.step, ui.whole, ui.back, ui.reset], k=3):
                press.click()
            root = picture(ui.picture.value)
            inside(root)
            try:
                result = run(ui.state)
            except ValueError:
                continue
            drawn += 1
            assert ui.state.steps == result.total
            if result.reached:
                assert len(result.reached) == len(kit.walk(result.loss))
            freed = {node.fn for node in kit.walk(result.loss) if node.freed}
            assert {result.nodes[i].fn for i in result.freed} == freed
    assert drawn > 30


def test_nothing_typed_is_evaluated_by_python():
    for module in (_program, _stepping, graph):
        called = {node.func.id for node in ast.walk(ast.parse(inspect.getsource(module)))
                  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        assert not called & {"eval", "exec", "compile", "__import__", "open"}


# ---- accumulation


def events(*actions, optimizer="SGD"):
    return accumulation.play(accumulation.State(optimizer, actions))


def by_hand(actions, optimizer):
    """(.grad, w) as lists after the actions, written down as a learner would."""
    w = torch.tensor([2.0, -1.0, 0.5], requires_grad=True)
    made = {
        "SGD": lambda: torch.optim.SGD([w], lr=0.1),
        "SGD with momentum": lambda: torch.optim.SGD([w], lr=0.1, momentum=0.9),
        "SGD with weight decay": lambda: torch.optim.SGD([w], lr=0.1, weight_decay=0.1),
        "Adam": lambda: torch.optim.Adam([w], lr=0.1),
    }[optimizer]()
    target = torch.tensor([1.0, 3.0, -2.0])
    for action in actions:
        A, B = ((w - 1) ** 2).sum(), (w * target).sum()
        code = accumulation.ACTIONS[action]
        try:
            eval(code, {"A": A, "B": B, "w": w, "optimizer": made})
        except RuntimeError:
            pass
    return (None if w.grad is None else w.grad.tolist()), w.tolist()


@pytest.mark.parametrize("optimizer", accumulation.OPTIMIZERS)
@pytest.mark.parametrize("seed", range(6))
def test_every_history_is_what_the_shown_code_does(optimizer, seed):
    rng = random.Random(seed)
    actions = tuple(rng.choices([a for a in accumulation.ACTIONS if a != "freeze" or seed % 2], k=14))
    for n, event in enumerate(events(*actions, optimizer=optimizer), 1):
        assert (event.grad, event.w) == by_hand(actions[:n], optimizer)
        for k, value in enumerate(event.grad or ()):
            assert value == pytest.approx(accumulation._levels(event.parts, k)[-1], abs=1e-5)
        inside(picture(accumulation.draw(accumulation.State(optimizer, actions[:n]))))


def test_the_shown_losses_and_optimizers_are_those_that_run():
    w = torch.tensor([0.3, -2.0, 1.5], requires_grad=True)
    for name, (source, function) in accumulation.LOSSES.items():
        assert source.startswith(f"{name} = ") and torch.equal(eval(source[4:], {"torch": torch, "w": w}), function(w))
    for source, make in accumulation.OPTIMIZERS.values():
        shown, real = eval(source, {"torch": torch, "w": w}), make(w)
        assert type(shown) is type(real) and repr(shown) == repr(real)


def test_backward_calls_add_up_until_they_are_cleared():
    a, b, clear, again = events("A", "B", "clear", "B")
    assert (a.grad, b.grad, clear.grad, again.grad) == ([2, -4, -1], [3, -1, -3], None, [1, 3, -2])
    assert [e.outcome for e in (a, b, clear, again)] == ["made .grad", "added to it", ".grad is None", "made .grad"]
    both = events("both")[0]
    assert both.grad == b.grad, "one backward of the sum brings the same"
    assert [e.grad for e in events("zeros", "A", "zeros", "A")] == [None, [2, -4, -1], [0, 0, 0], [2, -4, -1]]
    assert "2 calls of backward()" in accumulation.describe(accumulation.State(actions=("A", "B")))


def test_a_gradient_of_zero_is_not_the_same_as_none():
    for optimizer, moves in (("SGD", False), ("SGD with momentum", True), ("SGD with weight decay", True), ("Adam", True)):
        none = events("A", "step", "clear", "step", optimizer=optimizer)
        assert none[3].w == none[1].w and none[3].outcome == "passed by"
        zero = events("A", "step", "zeros", "step", optimizer=optimizer)
        assert (zero[3].w != zero[1].w) == moves == (zero[3].outcome == "w moved")
        assert ("zero or not" in zero[3].sentence) == moves
    frozen = events("A", "step", "zeros", "freeze", "step", "A", optimizer="Adam")
    assert "though it is frozen" in frozen[4].sentence
    assert frozen[5].outcome == "refused" and "does not require grad" in frozen[5].sentence


def test_a_forgotten_zero_grad_is_marked():
    first, stepped, second, again = events("A", "step", "A", "step")
    assert [stale for *_, stale in second.parts] == [True, False]
    assert "from where w was before" not in stepped.sentence and "from where w was before" in again.sentence
    root = picture(accumulation.draw(accumulation.State(actions=("A", "step", "A"))))
    marks = [node.text for node in root.iter() if node.get("class") == "small mid" and node.text]
    assert marks == ["A✗", "A"] * 3
    assert "✗: from an earlier w" in accumulation.draw(accumulation.State(actions=("A", "step", "A")))


def test_the_bars_are_as_long_as_the_gradient():
    state = accumulation.State(actions=("A", "B"))
    root, grad = picture(accumulation.draw(state)), events("A", "B")[-1].grad
    heights = [float(node.get("height")) for node in root.iter() if node.get("class") == "total"]
    assert [h / heights[0] for h in heights] == pytest.approx([abs(g / grad[0]) for g in grad], abs=0.01)
    parts = [float(node.get("height")) for node in root.iter() if node.get("class") == "part"]
    came = [2, 1, -4, 3, -1, -2]
    assert [h / heights[0] * grad[0] for h in parts] == pytest.approx([abs(c) for c in came], abs=0.05)
    empty = picture(accumulation.draw(accumulation.State()))
    assert len(cells(empty, "idle")) == 3 and not [node for node in empty.iter() if node.get("class") == "total"]


def test_every_control_of_accumulation_changes_the_picture():
    ui = accumulation.build()
    seen = [ui.picture.value]
    for name in ("A", "B", "both", "step", "zeros", "step", "clear", "zeros", "A", "freeze", "B", "step"):
        ui.actions[name].click()
        seen.append(ui.picture.value)
        inside(picture(seen[-1]))
    for name in ("SGD with momentum", "SGD with weight decay", "Adam"):
        ui.optimizer.value = name
        seen.append(ui.picture.value)
    assert len(set(seen)) == len(seen) and len(ui.state.actions) == 12
    ui.optimizer.value = "SGD"
    ui.undo.click()
    assert ui.picture.value == seen[11]
    ui.reset.click()
    ui.undo.click()
    assert ui.picture.value == seen[0]


@pytest.mark.parametrize("explorer", [graph.explore_graph, accumulation.explore_accumulation])
def test_the_display_carries_widget_picture_and_text(explorer, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.get_ipython", lambda: InteractiveShell)
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    explorer()
    (bundle,) = shown
    inside(picture(bundle["image/svg+xml"]))
    assert ".grad" in bundle["text/plain"] and "application/vnd.jupyter.widget-view+json" in bundle


def test_a_program_of_your_own_to_begin_with(capsys, monkeypatch):
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    graph.explore_graph("h = exp(w); loss = sum(h * x)")
    said = capsys.readouterr().out
    assert "ExpBackward0" in said and "w.grad: None" in said and "24 bytes" in said
    graph.explore_graph("h = w.item()")
    assert "✗ item is not offered here" in capsys.readouterr().out
