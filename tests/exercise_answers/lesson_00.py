import numpy as np
import torch

from exercise_answers import right, wrong


@wrong("total_elements", "sizes multiply")
def adds(shape):
    total = 0
    for size in shape:
        total += size
    return total


@wrong("total_elements", "start from 1")
def no_elements_in_a_scalar(shape):
    if len(shape) == 0:
        return 0
    total = 1
    for size in shape:
        total = total * size
    return total


@wrong("total_elements", "A size of 0 counts")
def skips_zeros(shape):
    total = 1
    for size in shape:
        total *= size or 1
    return total


@wrong("total_elements", "list index out of range")
def recursion_without_end(shape):
    shape = list(shape)
    return shape[0] * (recursion_without_end(shape[1:]) if len(shape) > 1 else 1)


@wrong("total_elements", ".item()")
def a_tensor(shape):
    return torch.tensor(shape).prod()


@right("total_elements")
def asks_torch(shape):
    return torch.empty(shape, device="meta").numel()


@right("total_elements")
def numpys_product(shape):
    return np.prod(shape, dtype=np.int64)


@right("total_elements")
def recursive(shape):
    return shape[0] * recursive(shape[1:]) if shape else 1
