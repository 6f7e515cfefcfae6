"""difference and brief: what counts as the expected value, and how a value is told."""
import math

import numpy as np
import pytest
import torch

from course_utils.engine.compare import brief, difference, kind


def filled(module, value):
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module


SAME = {
    "tensor": lambda: torch.arange(3.0),
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: torch.tensor(2),
    "nan": lambda: torch.tensor([math.nan, math.inf]),
    "complex nan": lambda: torch.tensor([1j, complex(math.nan, 0)]),
    "meta": lambda: torch.empty(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "conjugate": lambda: torch.tensor([1j]).conj(),
    "array": lambda: np.arange(6).reshape(2, 3)[:, ::-1],
    "nested": lambda: [(1, [2.5, "a"]), {"w": torch.ones(2), "n": None}],
    "float nan": lambda: math.nan,
    "bool": lambda: True,
    "dtype": lambda: torch.float16,
    "set": lambda: {1, 2},
    "slice": lambda: slice(1, 2),
    "function": lambda: lambda: None,
    "module": lambda: filled(torch.nn.Linear(2, 2), 1.0),
    "other values": lambda: filled(torch.nn.Linear(2, 2), 2.0),
    "frozen": lambda: filled(torch.nn.Linear(2, 2), 1.0).requires_grad_(False),
    "evaluating": lambda: filled(torch.nn.Linear(2, 2), 1.0).eval(),
    "another kind of module": lambda: torch.nn.Identity(),
    "buffer": lambda: torch.nn.BatchNorm1d(2),
    "optimizer": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1),
    "other rate": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.2),
    "size": lambda: torch.Size([1, 2]),
}


@pytest.mark.parametrize("name", SAME)
def test_a_value_is_equal_to_itself_and_to_no_other(name):
    for other in SAME:
        said = difference(SAME[name](), SAME[other]())
        assert (said is None) == (name == other), (other, said)


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
@pytest.mark.parametrize("wrap", [float, torch.tensor, lambda x: torch.tensor([x, x]), lambda x: (x,), lambda x: {"a": x}, np.array,
                                  lambda x: torch.tensor(complex(x, x)), lambda x: torch.tensor(x).half()])
def test_tolerance(wrap, tolerance):
    near, far = wrap(1.0005), wrap(1.1)
    assert (difference(wrap(1.0), near, tolerance) is None) == bool(tolerance)
    assert difference(wrap(1.0), far, tolerance)
    assert difference(wrap(math.inf), far, tolerance)
    assert difference(far, wrap(math.inf), tolerance)
    assert difference(wrap(math.inf), wrap(-math.inf), tolerance)
    assert difference(wrap(1.0), wrap(math.nan), tolerance)


@pytest.mark.parametrize(("expected", "got", "words"), [
    (torch.ones(2, 3), torch.ones(3), "only by broadcasting"),
    (torch.ones(3), torch.ones(1), "only by broadcasting"),
    (torch.ones(3), torch.ones(3, 1), "only by broadcasting"),
    (torch.arange(3), torch.arange(3)[:, None], "the shape is (3, 1), expected (3,); the values and their order are right"),
    (torch.arange(6).view(2, 3), torch.arange(6).view(3, 2), "the values and their order are right"),
    (torch.arange(6).view(2, 3), torch.arange(6).view(2, 3).t(), "the shape is (3, 2), expected (2, 3)"),
    (torch.ones(0), torch.ones(0, 1), "the shape is (0, 1), expected (0,)"),
    (torch.ones(2), torch.ones(2, dtype=torch.float64), "the dtype is torch.float64, expected torch.float32"),
    (torch.ones(2), torch.ones(2, device="meta"), "the device meta"),
    (torch.tensor([0.1]), torch.tensor([0.3]), "0.3 came, 0.1 was expected"),
    (torch.tensor(1), torch.tensor(2), "its only element: 2 came, 1 was expected"),
    (torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16(), "2.0 came"),
    (torch.tensor([1j]).conj(), torch.tensor([1j]), "1 of 1 elements differ"),
    (np.ones(2), [1.0, 1.0], "a list came where a numpy array was expected"),
    (np.ones(2), np.ones(2, dtype=int), "the dtype is torch.int64"),
    (1, True, "a bool came where an int was expected"),
    (True, 1, "an int came where a bool was expected"),
    (1, 1.0, "a float came where an int was expected"),
    (1.0, "1", "a str came where a float was expected"),
    (1, torch.tensor([[1]]), "a tensor came where an int was expected; .item()"),
    ([1], (1,), "a tuple came where a list was expected; list(...)"),
    ((1, 2), (1,), "its length is 1, expected 2"),
    ((1, (2, 3)), (1, (2, 4)), "entry 1: entry 1 is 4, expected 3"),
    ({"a": 1}, {"b": 1}, "its keys are ['b'], expected ['a']"),
    ({"a": torch.ones(2)}, {"a": torch.zeros(2)}, "under 'a': 2 of 2 elements differ"),
    ({"a": 1}, [1], "a list came where a dict was expected"),
    (torch.float32, torch.float64, "the value differs"),
    (None, 0, "an int came where None was expected"),
    (torch.ones(1), None, "None came where a tensor was expected"),
    (torch.ones(1), torch.ones, "a function came where a tensor was expected; is a pair of parentheses missing"),
    (torch.ones(1), torch.nn.ReLU, "a class came where a tensor was expected"),
    (torch.ones(2), (torch.ones(2),), "a tuple came where a tensor was expected"),
])
def test_how_values_differ(expected, got, words):
    assert words in difference(expected, got)


def test_equal_numbers_of_other_types():
    for expected, got in ((1, np.int64(1)), (1.0, np.float32(1)), (2.0, 2), (True, np.bool_(True)), ((1, 2), torch.Size([1, 2]))):
        assert difference(expected, got) is None


def test_strides_only_where_asked():
    a, b = torch.ones(2, 3), torch.ones(3, 2).t()
    assert difference(a, b) is None
    assert difference(a, b, strides=True) == "the strides are (1, 2), expected (3, 1)"
    assert "the strides" in difference([a], [b], strides=True)


def test_keys_in_another_order_are_the_same_dict():
    assert difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is None


class Odd:
    def __repr__(self):
        raise KeyError


LOOP = [torch.ones(1)]
LOOP += [LOOP, LOOP, LOOP]


@pytest.mark.parametrize(("value", "words"), [
    (torch.tensor([1.0, 2.5]), "tensor([1., 2.5])"),
    (torch.tensor([[1, 2]]), "tensor([[1, 2]])"),
    (torch.tensor([True]), "tensor([True])"),
    (torch.tensor([-2.0, math.nan, 1e30, 0.1]), "tensor([-2., nan, 1e+30, 0.1])"),
    (torch.tensor(-3.0), "tensor(-3.)"),
    (torch.tensor(7), "tensor(7)"),
    (torch.ones(2).half(), "tensor([1., 1.]) of float16, shape (2,)"),
    (torch.tensor([1.5j]), "tensor([0+1.5j]) of complex64, shape (1,)"),
    (torch.empty(0, 2), "tensor([]) of float32, shape (0, 2)"),
    (torch.ones(50, 2), "float32 tensor of shape (50, 2), strides (2, 1)"),
    (torch.ones(2, device="meta"), "float32 tensor of shape (2,), strides (1,) on meta"),
    (torch.eye(2).to_sparse(), "torch.sparse_coo tensor of shape (2, 2)"),
    (torch.ones(1, requires_grad=True), "tensor([1.])"),
    (np.ones(30), "numpy float64 array of shape (30,)"),
    (torch.Size([1]), "(1,)"),
    ([torch.ones(1)] * 9, "[tensor([1.]), tensor([1.]), tensor([1.]), tensor([1.]), …]"),
    (list(range(99)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ...]"),
    ([10**5000], "<a list whose repr raises ValueError>"),
    (LOOP, "[tensor([1.]), [tensor([1.]), "),
    ([Odd()], "Odd"),
    (None, "None"),
])
def test_brief(value, words):
    assert words in brief(value)
    assert len(brief(value)) < 3000


def test_kind():
    assert [kind(v) for v in (1, [], None, torch.ones(2), torch.tensor(1), np.ones(1), torch.Size([1]), print, int)] == [
        "an int", "a list", "None", "a tensor", "a tensor of 0 dimensions", "a numpy array", "a torch.Size", "a function", "a class"]


def test_a_list_of_batches_is_shown_by_its_first_few_and_large_tensors_by_what_they_are():
    batches = [(torch.zeros(10, 4), torch.arange(10))] * 30
    assert brief(batches).count("shape (10, 4)") == 4 and brief(batches).endswith(", …]") and len(brief(batches)) < 600
