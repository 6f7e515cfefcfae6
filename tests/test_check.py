"""check and examine: the outcomes, the words, and what a learner's code cannot do to them."""
import gc
import json
import math
import signal
import threading
import time
import warnings

import nbformat
import numpy as np
import pytest
import torch
from helpers import cell, double, examine, exercise, use, written

from course_utils.engine import exercises, notebooks, progress
from course_utils.engine.exercises import Case, Mistake, Outcome

NOT_ATTEMPTED, WRONG, RAISED, RIGHT = Outcome


def total(x):
    """The sum as a number."""
    return x.sum().item()


def pair(x):
    return x.shape[0], x.dim()


def turned(x):
    return x.t()


def doubled_in_place(x):
    x.mul_(2)


def refuses(x):
    raise ValueError("a negative length")


GRID = Case("a grid is turned", lambda: (torch.arange(6.0).reshape(2, 3),))
OURS = ("course_utils", "site-packages", "lib/python", "exercises.py", "<frozen")


def says(report, *words, outcome=WRONG, without=()):
    assert report.outcome is outcome, report.text
    for word in words:
        assert word in report.text
    for word in (*without, *OURS):
        assert word not in report.text


# ── the four outcomes and their words ─────────────────────────────────────────────────────────────────────────────────


def test_right():
    says(examine("def double(x): return x + x"), "double: right, in 1 cases", outcome=RIGHT)


@pytest.mark.parametrize("body", ["...", "pass", '"""Twice x."""', '"""Twice x."""\n    ...', "# nothing yet\n    ..."])
def test_an_empty_body_is_not_an_attempt(body):
    says(examine(f"def double(x):\n    {body}"), "not attempted", "still as it was given", outcome=NOT_ATTEMPTED)


def test_the_broken_starter_of_a_clinic_is_not_an_attempt(monkeypatch):
    starter = "def double(x):\n    '''Twice x.'''\n    return x * 3  # broken"
    monkeypatch.setattr(exercises, "starters", lambda lesson: {"double": {exercises.ast.dump(exercises.ast.parse(starter).body[0])}})
    says(examine(starter.replace("# broken", "# a comment changes nothing")), outcome=NOT_ATTEMPTED)
    says(examine(starter.replace("3", "4")), "was expected")


def test_starters_are_read_from_the_lesson_source(monkeypatch, tmp_path):
    (tmp_path / "notebooks" / "src").mkdir(parents=True)
    (tmp_path / "notebooks" / "src" / "98_other.py").write_text("# %% tags=['exercise']\ndef double(x):\n    return x * 3\n")
    monkeypatch.setattr(exercises, "REPO", tmp_path)
    says(examine("def double(x):\n    return x * 3", lesson="98_other"), outcome=NOT_ATTEMPTED)
    says(examine("def double(x):\n    return x * 4", lesson="98_other"))


def test_wrong_shows_case_input_result_and_expectation():
    says(examine("def double(x): return x * 3"), "wrong where a row is doubled (case 1 of 1)", "double(x=tensor([1., 2., 3.]))",
         "expected  tensor([2., 4., 6.])", "came      tensor([3., 6., 9.])",
         "3 of 3 elements differ; the first is [0]: 3.0 came, 2.0 was expected")


def test_raised_shows_the_learners_lines_only():
    says(examine("def double(x):\n    y = x * 2\n    return y.reshape(7)"), "raised RuntimeError", "line 3, in double",
         "return y.reshape(7)", "shape '[7]' is invalid", outcome=RAISED)


def test_the_named_misconception_is_said_only_to_whom_it_fits():
    mistakes = (Mistake("That is the square.", lambda x: x * x), Mistake("That is the half.", lambda x: x / 2))
    says(examine("def double(x): return x ** 2", mistakes=mistakes), "That is the square.", without=["half"])
    says(examine("def double(x): return x / 2", mistakes=mistakes), "That is the half.", without=["square"])
    says(examine("def double(x): return x * 5", mistakes=mistakes), without=["square", "half"])


def test_a_mistake_that_is_right_here_is_not_blamed_for_another_fault():
    square = Mistake("That is the square.", lambda x: x * x)
    two = Case("two is doubled", lambda: (torch.tensor([2.0]),), memory="copy")
    says(examine("def double(x): return x.mul_(2)", cases=[two], mistakes=[square]), "changed its input", without=["square"])
    wide = Case("a grid keeps its strides", lambda: (torch.full((2, 2), 2.0),), strides=True)
    says(examine("def double(x): return (x * 2).t()", cases=[wide], mistakes=[square]), "strides", without=["square"])


def test_a_mistake_about_memory_is_recognised_by_its_memory():
    aliased = Mistake("expand repeats without copying.", lambda x: x.view(3))
    copy = Case("a copy is made", lambda: (torch.ones(3),), memory="copy")

    def same(x):
        return x.clone()

    says(examine("def same(x): return x[:]", solution=same, cases=[copy], mistakes=[aliased]), "expand repeats", "a view of the input")


# ── results of the wrong kind ─────────────────────────────────────────────────────────────────────────────────────────


def test_forgotten_return():
    says(examine("def double(x): y = x * 2"), "It returns nothing (None)", "return on every path", without=["prints"])


def test_a_none_that_is_a_known_mistake_is_named_too():
    refused = Mistake("A negative step is fine too.", lambda x: None if x < 0 else x)

    def step(x):
        return x

    case = Case("a negative step", lambda: (-1,))
    say = {"solution": step, "cases": [case], "mistakes": [refused]}
    says(examine("def step(x):\n    if x > 0:\n        return x", **say), "It returns nothing (None)", "A negative step is fine too.")
    says(examine("def step(x): return 5", **say), without=["A negative step is fine too."])


def test_print_in_place_of_return():
    says(examine("def double(x): print(x * 2)"), "It prints its answer and returns nothing", "it printed\n  tensor([2., 4., 6.])")


def test_what_a_wrong_function_prints_is_shown():
    says(examine("def double(x):\n    print('x is', x)\n    return x"), "it printed", "x is tensor([1., 2., 3.])", "was expected")


@pytest.mark.parametrize(("source", "words"), [
    ("return (x * 2).to('meta')", "the device meta, expected cpu"),
    ("return (x * 2).double()", "The dtype is torch.float64, expected torch.float32"),
    ("return (x * 2).unsqueeze(0)", "only by broadcasting"),
    ("return (x * 2).unsqueeze(1)", "The shape is (3, 1), expected (3,); the values and their order are right"),
    ("return (x * 2)[:2]", "The shape is (2,), expected (3,)."),
    ("return (x * 2).tolist()", "A list came where a tensor was expected"),
    ("return (x * 2).numpy()", "A numpy array came where a tensor was expected"),
    ("return (x * 2).to_sparse()", "The layout is torch.sparse_coo"),
    ("return x.mul", "A function came where a tensor was expected; is a pair of parentheses missing"),
    ("return x.mul(2).sum().item() > 3", "A bool came where a tensor was expected"),
    ("yield x * 2", "A generator came where a tensor was expected; a function with yield in it gives a generator"),
])
def test_a_tensor_of_another_kind(source, words):
    says(examine(f"def double(x): {source}"), words)


@pytest.mark.parametrize(("source", "words"), [
    ("x.sum()", "A tensor of 0 dimensions came where a float was expected; .item()"),
    ("x.sum().item() > 3", "A bool came where a float was expected"),
    ("str(x.sum().item())", "A str came where a float was expected"),
    ("x.sum().item() + 1", "The value differs"),
    ("[x.sum().item()]", "A list came where a float was expected"),
])
def test_a_number_of_another_kind(source, words):
    says(examine(f"def total(x): return {source}", solution=total), words)


@pytest.mark.parametrize(("source", "words"), [
    ("[3, 1]", "A list came where a tuple was expected; tuple(...)"),
    ("(3,)", "Its length is 1, expected 2"),
    ("(3, 2)", "Entry 1 is 2, expected 1"),
    ("(3.0, 1)", "Entry 0: a float came where an int was expected"),
    ("(3, True)", "Entry 1: a bool came where an int was expected"),
    ("x.shape", "Its length is 1, expected 2"),
])
def test_a_tuple_of_another_kind(source, words):
    says(examine(f"def pair(x): return {source}", solution=pair), words)


def test_an_async_function_is_told_so():
    gc.collect()  # what other tests left to be warned about is not this one's
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        says(examine("async def double(x): return x * 2"), "A coroutine came where a tensor was expected", "async def")
        gc.collect()
    assert not warned  # "was never awaited"


def test_fields_without_own_comparison_are_compared_too():
    def kind_of(x):
        return x.dtype

    says(examine("def kind_of(x): return torch.float64", solution=kind_of), "The value differs")
    says(examine("def kind_of(x): return x.dtype", solution=kind_of), outcome=RIGHT)
    says(examine("def kind_of(x): return 'float32'", solution=kind_of), "A str came where a dtype was expected")


def test_right_answers_in_unusual_tensors():
    for source in ("(x * 2).requires_grad_()", "torch.nn.Parameter(x * 2)", "(x + x).clone(memory_format=torch.contiguous_format)"):
        says(examine(f"def double(x): return {source}"), outcome=RIGHT)


def test_nan_equals_nan():
    case = Case("NaN stays", lambda: (torch.tensor([1.0, math.nan]),))
    says(examine("def double(x): return x + x", cases=[case]), outcome=RIGHT)
    says(examine("def double(x): return (x * 2).nan_to_num()", cases=[case]), "1 of 2 elements differ", "nan was expected")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint8])
@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
def test_every_dtype_is_compared(dtype, tolerance):
    case = Case("it is doubled", lambda: (torch.tensor([1, 2]).to(dtype),), tolerance=tolerance)
    says(examine("def double(x): return x + x", cases=[case]), outcome=RIGHT)
    says(examine("def double(x): return x * 3", cases=[case]), "2 of 2 elements differ")


def test_bool_sparse_and_quantized_results():
    def same(x):
        return x.clone()

    made = {
        "bool": lambda: torch.tensor([True, False]),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.tensor([0.0, 1.0]), 0.1, 0, torch.qint8),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated; a learner may still meet one
        for name, make in made.items():
            case = Case(f"{name} stays", lambda make=make: (make(),))
            says(examine("def same(x): return x.clone()", solution=same, cases=[case]), outcome=RIGHT)
            says(examine("def same(x): return torch.zeros(7)", solution=same, cases=[case]))


# ── memory and inputs ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("make", [lambda: torch.arange(6.0).reshape(2, 3), lambda: np.arange(6.0).reshape(2, 3)[:, ::-1]])
def test_view_and_copy(make):
    tensor = "torch.as_tensor(x)" if isinstance(make(), torch.Tensor) else "torch.from_numpy(x[:, ::-1])"

    def first(x):
        return (x if isinstance(x, torch.Tensor) else torch.from_numpy(x[:, ::-1]))[0]

    view, copy = (Case("a row is taken", lambda: (make(),), memory=memory) for memory in ("view", "copy"))
    says(examine(f"def first(x): return {tensor}[0].clone()", solution=first, cases=[view]),
         "a copy (", "where the input or a view of it will do")
    says(examine(f"def first(x): return {tensor}[0]", solution=first, cases=[view]), outcome=RIGHT)
    says(examine(f"def first(x): return {tensor}[0]", solution=first, cases=[copy]), "a view of the input where a copy was asked for")
    says(examine(f"def first(x): return {tensor}[0].clone()", solution=first, cases=[copy]), outcome=RIGHT)


def test_view_and_copy_of_each_tensor_of_a_result():
    def halves(x):
        return x[:1].clone(), x[1:].clone()

    case = Case("halves are copied", lambda: (torch.ones(4),), memory="copy")
    says(examine("def halves(x): return x[:1].clone(), x[1:]", solution=halves, cases=[case]), "a view of the input where a copy")
    says(examine("def halves(x): return x[:1].clone(), x[1:].clone()", solution=halves, cases=[case]), outcome=RIGHT)


@pytest.mark.parametrize(("source", "word"), [("x.mul_(1.5)", "elements differ"), ("x.t_()", "the shape is"),
                                              ("x.unsqueeze_(0)", "the shape is"), ("x.as_strided_((2, 2), (1, 2))", "the strides are")])
def test_a_changed_tensor_is_noticed(source, word):
    case = Case("it is turned", lambda: (torch.arange(4.0).reshape(2, 2) if "strided" in source else torch.arange(6.0).reshape(2, 3),))
    report = examine(f"def turned(x):\n    y = x.t().clone()\n    {source}\n    return y", solution=turned, cases=[case])
    says(report, "The result is right, but the call changed its input", word)


def test_changed_lists_and_arrays_are_noticed():
    def length(x):
        return len(x)

    for made, change in ((lambda: [1, 2, 3], "x.reverse()"), (lambda: [1, 2], "x[0] = x"), (lambda: {"a": 1}, "x['b'] = 2"),
                         (lambda: np.arange(3), "x[0] = 7"), (lambda: [torch.zeros(2)], "x[0] += 1")):
        report = examine(f"def length(x):\n    n = len(x)\n    {change}\n    return n", solution=length,
                         cases=[Case("it is counted", lambda made=made: (made(),))])
        says(report, "changed its input")


def test_inputs_meant_to_change_are_compared():
    case = Case("it is doubled in place", lambda: (torch.ones(3),), mutates=True)
    say = {"solution": doubled_in_place, "cases": [case]}
    says(examine("def doubled_in_place(x): x *= 2", **say), outcome=RIGHT)
    says(examine("def doubled_in_place(x): x = x * 2", **say),
         "It left its input in another state than expected", "1.0 came, 2.0 was expected")
    says(examine("def doubled_in_place(x): return x.mul_(2)", **say), "A tensor came where None was expected")


def test_inputs_meant_to_change_may_be_judged_by_verify_alone():
    def half_way(_, x):
        return None if 0 < x.item() < 1 else f"{x.item()} does not lie between 0 and 1"

    case = Case("it lies between 0 and 1", lambda: (torch.zeros(1),), mutates=True, verify=half_way)
    say = {"solution": doubled_in_place, "cases": [case]}
    says(examine("def doubled_in_place(x): x += 0.25", **say), outcome=RIGHT)
    says(examine("def doubled_in_place(x): x += 2", **say), "2.0 does not lie between 0 and 1")


def test_a_mistake_is_named_only_where_it_leaves_the_inputs_alike():
    case = Case("it is doubled in place", lambda: (torch.ones(3),), mutates=True)
    say = {"solution": doubled_in_place, "cases": [case], "mistakes": [Mistake("You tripled it.", lambda x: [x.mul_(3)] and None)]}
    says(examine("def doubled_in_place(x): x += 2", **say), "You tripled it.")
    assert "You tripled it." not in examine("def doubled_in_place(x): x += 5", **say).text, "5 + 1 is not 3 times 1"


def test_random_inputs_are_the_same_at_each_call():
    case = Case("random numbers are doubled", lambda: (torch.randn(3),))
    before = torch.random.get_rng_state()
    says(examine("def double(x): return x + x", cases=[case]), outcome=RIGHT)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_strides_count_where_asked():
    case = Case("a grid is turned", GRID.args, strides=True)
    says(examine("def turned(x): return x.t().contiguous()", solution=turned, cases=[case]), "The strides are (2, 1), expected (1, 3)")
    says(examine("def turned(x): return x.t().contiguous()", solution=turned, cases=[GRID]), outcome=RIGHT)


def test_expected_errors():
    case = Case("a negative length is refused", lambda: (-1,), raises=ValueError)
    say = {"solution": refuses, "cases": [case]}
    says(examine("def refuses(x): raise ValueError('no')", **say), outcome=RIGHT)
    says(examine("def refuses(x): return 5", **say), "expected  ValueError raised", "came      5", "Here it should raise ValueError.")
    says(examine("def refuses(x): return None", **say), "Here it should raise ValueError.")
    says(examine("def refuses(x): raise KeyError('no')", **say), "raised KeyError", "Here it should raise ValueError.", outcome=RAISED)


def test_verify_and_watch():
    def many(result, x):
        return None if result.numel() > 2 else f"it has only {result.numel()} elements"

    def watch(call):
        call()
        return watch.complaint

    watch.complaint = None
    case = Case("many elements", lambda: (torch.ones(3),), verify=many, watch=watch)
    says(examine("def double(x): return torch.zeros(9)", cases=[case]), outcome=RIGHT)
    says(examine("def double(x): return torch.zeros(1)", cases=[case]), "It has only 1 elements.")
    watch.complaint = "it allocates 12 bytes"
    says(examine("def double(x): return torch.zeros(9)", cases=[case]), "It allocates 12 bytes.")


def test_the_time_limit_leaves_what_watch_takes_down_alone():
    held = []

    def watch(call):
        held.append("hook")
        try:
            call()
        finally:
            time.sleep(0.2)  # longer than the alarm takes to ring again
            held.pop()

    case = Case("it is watched", lambda: (torch.ones(3),), watch=watch)
    says(examine("def double(x):\n    while True: pass", cases=[case], time_limit=0.05), "time limit")
    assert held == []


def test_a_reference_that_fails_is_the_courses_fault():
    says(examine("def refuses(x): return 5", solution=refuses, cases=[GRID]), "the course cannot judge this here", "a negative length")


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_recursion_shows_few_lines():
    report = examine("def double(x):\n    return double(x)")
    says(report, "raised RecursionError", "more calls", outcome=RAISED)
    assert len(report.text.splitlines()) < 20


def test_an_error_in_a_helper_of_another_cell():
    names = cell("def helper(x):\n    # a comment\n    return x[0, 0, 0]")
    cell("def double(x):\n    return helper(x)", names)
    report = exercises.examine(exercise(), names["double"])
    says(report, "line 2, in double\n    return helper(x)", "line 3, in helper\n    return x[0, 0, 0]", "IndexError", outcome=RAISED)


@pytest.mark.parametrize("source", [
    "torch.nn.functional.linear(x, torch.ones(2, 2))",  # raised inside torch
    "__import__('json').loads('{')",  # inside the standard library
    "torch.nn.Linear(2, 2)(x)",
])
def test_an_error_inside_a_library_shows_the_line_that_called_it(source):
    says(examine(f"def double(x):\n    return {source}"), "line 2, in double", outcome=RAISED, without=["in forward", "in loads"])


@pytest.mark.parametrize("what", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "StopIteration", "BaseException"])
def test_what_ends_programs_does_not_end_this_one(what):
    says(examine(f"def double(x): raise {what}"), f"raised {what}", outcome=RAISED)


def test_exit_is_caught():
    says(examine("import sys\ndef double(x): sys.exit(3)"), "raised SystemExit", outcome=RAISED)


def test_errors_that_cannot_be_shown():
    says(examine("class Bad(Exception):\n    def __str__(self): raise ValueError\ndef double(x): raise Bad"), "raised Bad",
         "its own message cannot be shown", outcome=RAISED)
    long = examine("def double(x): raise ValueError('z' * 9999)")
    says(long, "raised ValueError", outcome=RAISED)
    assert len(long.text) < 1000


# ── results that do things when they are looked at ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["__eq__", "__repr__", "__bool__", "__len__", "__torch_function__", "__getattribute__", "__class__",
                                    "__str__"])
@pytest.mark.parametrize("base", ["object", "list", "float", "torch.Tensor", "tuple", "dict"])
@pytest.mark.parametrize("deed", ["raise RuntimeError('mine')", "raise SystemExit", "return None"])
def test_hostile_results(method, base, deed):
    head = "@classmethod\n    " if method == "__torch_function__" else "@property\n    " if method == "__class__" else ""
    report = examine(f"class Odd({base}):\n    {head}def {method}(*a, **k): {deed}\n"
                     f"def double(x): return torch.Tensor._make_subclass(Odd, x * 3) if {base == 'torch.Tensor'} else Odd()")
    assert report.outcome in (WRONG, RAISED)
    assert report.text.startswith("double: ")


@pytest.mark.parametrize("method", ["__eq__", "__repr__", "__torch_function__", "__getattribute__"])
def test_results_that_loop_when_looked_at(method, monkeypatch):
    monkeypatch.setattr(exercises, "LOOKING", 0.2)
    head = "@classmethod\n    " if method == "__torch_function__" else ""
    base = "torch.Tensor" if head else "float"
    report = examine(f"class Odd({base}):\n    armed = False\n    {head}def {method}(*a, **k):\n        while Odd.armed: pass\n"
                     "        return object.__getattribute__(*a) if len(a) == 2 and isinstance(a[1], str) else NotImplemented\n"
                     "def total(x):\n"
                     f"    odd = {'torch.Tensor._make_subclass(Odd, x * 3)' if head else 'Odd(7)'}\n    Odd.armed = True\n    return odd",
                     solution=total)
    assert report.outcome is WRONG
    assert not_ringing()


def test_self_containing_lists():
    for source in ("y = [x]; y.append(y); y.append(y); y.append(y)", "y = []; y.append(y)"):
        says(examine(f"def double(x):\n    {source}\n    return y"), "A list came where a tensor was expected")
    says(examine("def pair(x):\n    y = [3, 1]\n    y[1] = y\n    return tuple(y)", solution=pair), "Entry 1: a list came where an int")


# ── things that are not plain functions ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("source", [
    "double = lambda x: x * 2",
    "import functools\ndouble = functools.partial(torch.mul, other=2)",
    "class Doubler:\n    def __call__(self, x): return x * 2\ndouble = Doubler()",
    "def double(x, factor=2): return x * factor",
    "def double(*xs, **options): return xs[0] * 2",
    "class Doubler:\n    def two(self, x): return x * 2\ndouble = Doubler().two",
    "import functools\ndef twice(f):\n    @functools.wraps(f)\n    def g(x): return f(x) + f(x)\n    return g\n"
    "@twice\ndef double(x): return x",
])
def test_every_callable_will_do(source):
    says(examine(source), outcome=RIGHT)


def test_a_class_in_place_of_a_function():
    says(examine("class double:\n    def __init__(self, x): pass"), "A double came where a tensor was expected")


@pytest.mark.parametrize(("signature", "words"), [
    ("", "It is called with 1 argument, which does not fit its signature: too many positional arguments."),
    ("x, y", "missing a required argument: 'y'"),
    ("*, x", "too many positional arguments"),
])
def test_a_signature_that_does_not_fit(signature, words):
    says(examine(f"def double({signature}): return 1"), "wrong arguments", words)


@pytest.mark.parametrize(("junk", "words"), [(None, "this is None, not a function"), (5, "this is an int"), (torch, "this is a module")])
def test_junk_in_place_of_the_function(junk, words):
    says(exercises.examine(exercise(), junk), words, "Run the cell that defines double again")


# ── settings that must not leak ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("change", ["torch.set_grad_enabled(False)", "torch.set_default_dtype(torch.float64)",
                                    "torch.set_default_device('meta')", "torch.manual_seed(5)", "print('x', end='')"])
@pytest.mark.parametrize("end", ["return x * 2", "raise ValueError", "while True: pass"])
def test_torchs_global_settings_do_not_leak(change, end):
    def state():
        return (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.random.get_rng_state().sum().item(),
                exercises.sys.stdout)

    before = state()
    report = examine(f"def double(x):\n    {change}\n    {end}")
    assert state() == before
    assert (report.outcome is RIGHT) == (end == "return x * 2"), report.text


# ── endless loops ─────────────────────────────────────────────────────────────────────────────────────────────────────

ENDLESS = {
    "plain": "while True: pass",
    "except Exception": "while True:\n        try: x + 1\n        except Exception: pass",
    "bare except": "while True:\n        try: x + 1\n        except: pass",
    "bare except around sleep": "while True:\n        try: time.sleep(9)\n        except: continue",
    "finally continue": "while True:\n        try: time.sleep(9)\n        finally: continue",
    "two bare excepts":
        "while True:\n        try:\n            try: time.sleep(9)\n            except: time.sleep(9)\n        except: pass",
    "generator": "return list(endless())",
    "generator that swallows": "return [y for y in stubborn()]",
    "print": "while True: print('again')",
    "print that swallows": "while True:\n        try: print(x + 1)\n        except: print('no')",
    "an answer once it is interrupted": "try:\n        while True: pass\n    except: return x * 2",
    "recursion that swallows": "return deep()",
    "print without newline": "while True: print(end='.')",
}
ENDLESS_HELPERS = """
import time
def endless():
    while True: yield 1
def stubborn():
    while True:
        try: yield time.sleep(0.001)
        except: pass
def deep():
    try: return deep()
    except RecursionError: return deep()
"""


def not_ringing():
    return signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("body", ENDLESS.values(), ids=ENDLESS)
def test_endless_loops_end(body):
    report = examine(f"{ENDLESS_HELPERS}\ndef double(x):\n    {body}")
    says(report, "did not come back within its time limit of 0.1 s", "Does its loop end?")
    assert not_ringing()
    assert len(report.text) < 6000


def test_no_late_alarm_reaches_our_own_code(monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)  # a stubborn generator complains when it is closed
    handler = signal.signal(signal.SIGALRM, lambda *a: None)
    try:
        function = written("import time\ndef double(x):\n    try: time.sleep(0.0021)\n    except: pass\n    return x * 2")
        outcomes = set()
        for number in range(300):  # limits around the time that the call takes
            ex = exercise(time_limit=0.002 + number * 1e-6)
            report = exercises.examine(ex, function)
            assert "cannot" not in report.text, report.text
            outcomes.add(report.outcome)
            assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        assert outcomes <= {WRONG, RIGHT}
        loop = exercise(time_limit=0.002)
        for body in list(ENDLESS.values()) * 6:
            says(exercises.examine(loop, written(f"{ENDLESS_HELPERS}\ndef double(x):\n    {body}")), "time limit")
        assert signal.getsignal(signal.SIGALRM).__name__ == "<lambda>"
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_an_answer_after_the_limit_comes_too_late(monkeypatch):
    monkeypatch.setattr(signal, "setitimer", lambda *a: (0.0, 0.0))  # so that the one ring below is the only one
    says(examine("import signal\ndef double(x):\n    try: signal.raise_signal(signal.SIGALRM)\n    except: return x * 2"), "time limit")


def test_a_timer_of_someone_else_goes_on():
    handler = signal.signal(signal.SIGALRM, lambda *a: None)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        says(examine("def double(x):\n    while True: pass"), "time limit")
        left, _ = signal.getitimer(signal.ITIMER_REAL)
        assert 0 < left <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_without_signals_in_a_thread():
    reports = []
    thread = threading.Thread(target=lambda: reports.append(examine("def double(x): return x * 2")))
    thread.start()
    thread.join()
    says(reports[0], outcome=RIGHT)


# ── check, hint, solution ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def course(monkeypatch, tmp_path):
    use(monkeypatch, tmp_path, exercise(), exercise(solution=total))
    return lambda: progress.read()["exercises"]


def test_check_shows_and_keeps_each_outcome(course, capsys):
    for source, outcome, attempts in (("...", "not attempted", 0), ("return x", "wrong", 1), ("return 1 / 0", "raised", 2),
                                      ("return x * 2", "right", 3)):
        assert exercises.check(written(f"def double(x): {source}")) is None
        out = capsys.readouterr().out
        assert ("hint(double)" in out) == (outcome != "right")
        entry = course()["99_fake/double"]
        assert (entry["outcome"], entry["attempts"]) == (outcome, attempts)
    exercises.check(written("def double(x): return x"))
    assert course()["99_fake/double"]["outcome"] == "right"  # solved stays solved


@pytest.mark.parametrize("junk", [None, 5, 2.5, "text", torch, [], torch.ones(3), print, lambda x: x, object(), type, exercise()])
def test_check_with_junk_shows_a_message(course, capsys, junk):
    for ask in (exercises.check, exercises.hint, exercises.solution):
        ask(junk)
        out = capsys.readouterr().out
        assert "There is no exercise called 'text'" in out or "This takes the function of an exercise, as in check(double)" in out
    assert course() == {}


def test_check_with_an_object_that_will_not_be_asked(course, capsys):
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError("no questions")

    for ask in (exercises.check, exercises.hint, exercises.solution):
        ask(Odd())
        assert "it was given an Odd" in capsys.readouterr().out


def test_strict_raises_on_anything_but_right(course, monkeypatch):
    monkeypatch.setenv("COURSE_STRICT", "1")
    exercises.check(written("def double(x): return x * 2"))
    for source in ("...", "return x", "raise ValueError"):
        with pytest.raises(AssertionError, match="double"):
            exercises.check(written(f"def double(x): {source}"))
    with pytest.raises(AssertionError, match="exercise"):
        exercises.check(None)


def test_hints_come_one_by_one_and_are_counted(course, capsys):
    for expected in ("Hint 1 of 2 for double\n    Think of twos.", "Hint 2 of 2 for double\n    Multiply by two.", "the last hint"):
        exercises.hint(double)
        assert expected in capsys.readouterr().out
    exercises.hint("total")
    assert "Hint 1 of 2 for total" in capsys.readouterr().out
    assert course()["99_fake/double"] == {"attempts": 0, "hints": 2, "outcome": "not attempted"}


def test_solution_waits_for_an_attempt(course, capsys):
    exercises.solution("double")
    assert "has not been attempted yet" in capsys.readouterr().out
    exercises.check(written("def double(x): ..."))
    exercises.solution(double)
    assert "return x * 2" not in capsys.readouterr().out
    exercises.solution(double, now=True)
    assert "def double(x):" in capsys.readouterr().out
    exercises.check(written("def double(x): return x"))
    exercises.solution(double)
    assert "return x * 2" in capsys.readouterr().out


def test_two_exercises_of_one_name_are_refused(monkeypatch):
    monkeypatch.setattr(exercises.importlib, "import_module", lambda name: type("M", (), {"EXERCISES": (exercise(), exercise())}))
    with pytest.raises(ValueError, match="two exercises are called double"):
        exercises.registry.__wrapped__()


# ── in a real kernel ──────────────────────────────────────────────────────────────────────────────────────────────────

KERNEL = {
    "begin": """
        import torch
        from helpers import exercise
        from course_utils import check, hint, solution
        from course_utils.engine import exercises
        exercises.registry = lambda: {"double": exercise(time_limit=0.5)}
        """,
    "raised": "def helper(x):\n    return x[5]\n\ndef double(x):\n    y = helper(x)\n    return y\ncheck(double)",
    "starter": "def double(x):\n    ...\ncheck(double)",
    "lambda": "double = lambda x: x + x\ncheck(double)",
    "name": "check('double')",
    "exit": "def double(x):\n    exit()\ncheck(double)",
    "input": "def double(x):\n    return input('x?')\ncheck(double)",
    "loop": "def double(x):\n    while True:\n        try:\n            print('hm')\n        except:\n            pass\ncheck(double)",
    "surrogate": "def double(x):\n    print('half \\ud800 of a pair')\n    return 'and <b>\\ud801'\ncheck(double)",
    "overwritten": "open = json = print = list = dict = str = len = os = torch = Exception = None\nnames = 5\n"
                   "def double(x):\n    return x * 2\ncheck(double)",
    "later": "import time\ntime.sleep(0.5)",  # a kernel that was told to end would have ended
    "after": "hint(double); solution(double)",
}


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """{name of a cell: its outputs} of one run, and the progress that it left."""
    folder = tmp_path_factory.mktemp("kernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(exercises.textwrap.dedent(c).strip()) for c in KERNEL.values()])
    path = exercises.os.pathsep.join([str(notebooks.REPO), str(notebooks.REPO / "tests")])
    notebooks.execute(notebook, {"COURSE_WORK": str(folder), "COURSE_STRICT": "", "PYTHONPATH": path})
    shown = {}
    for name, ran in zip(KERNEL, notebook.cells, strict=True):
        shown[name] = "\n".join(o["data"]["text/plain"] for o in ran.outputs if o.output_type == "display_data")
        assert all("text/html" in o["data"] for o in ran.outputs if o.output_type == "display_data")
    return shown, json.loads((folder / "progress.json").read_text())


@pytest.mark.parametrize(("name", "words"), [
    ("raised", ["raised IndexError", "line 5, in double\n        y = helper(x)", "line 2, in helper\n        return x[5]"]),
    ("starter", ["not attempted"]),
    ("lambda", ["double: right"]),
    ("name", ["double: right"]),
    ("exit", ["raised SystemExit", "line 2, in double"]),
    ("input", ["raised StdinNotImplementedError", "return input('x?')"]),
    ("loop", ["time limit of 0.5 s", "hm"]),
    ("surrogate", ["half ? of a pair", "A str came where a tensor was expected"]),
    ("overwritten", ["double: right"]),
    ("after", ["Hint 1 of 2", "def double(x):", "return x * 2"]),
])
def test_in_a_kernel(kernel, name, words):
    shown = kernel[0][name]
    for word in words:
        assert word in shown, shown
    assert "course_utils/" not in shown and "site-packages" not in shown


def test_a_learners_names_do_not_break_the_progress_file(kernel):
    entry = kernel[1]["exercises"]["99_fake/double"]
    assert entry["outcome"] == "right" and entry["hints"] == 1 and entry["attempts"] == 8
