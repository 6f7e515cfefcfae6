"""Exercises of lesson 00: one, to try the machinery on."""

from course_utils.engine.exercises import Case, Exercise, Mistake


def total_elements(shape):
    """Number of elements of a tensor of this shape."""
    total = 1
    for size in shape:
        total *= size
    return total


EXERCISES = (
    Exercise(
        lesson="00_start_here",
        solution=total_elements,
        hints=(
            "How many numbers are in a grid of 2 rows and 3 columns? What do you do with the 2 and the 3, and what "
            "would a third size change?",
            "Start from 1, go through the sizes, and multiply: `total = 1`, then `total *= size` for each size, "
            "then `return total`. Starting from 1 is also right for a shape without any size.",
        ),
        cases=(
            Case("a grid has rows times columns elements", lambda: ((2, 3),)),
            Case("a third dimension multiplies again", lambda: ((4, 5, 6),)),
            Case("sizes of 1 change nothing", lambda: ((1, 7, 1),)),
            Case("a size of 0 leaves no elements", lambda: ((3, 0, 2),)),
            Case("a scalar, of shape (), has one element", lambda: ((),)),
        ),
        mistakes=(
            Mistake(
                "A shape without sizes is a scalar, such as `torch.tensor(3.0)`: no dimensions, and one element. "
                "A product of nothing is 1, so start from 1 and treat no shape specially.",
                lambda shape: total_elements(shape) if shape else 0,
            ),
            Mistake(
                "A size of 0 counts: three rows of no elements are no elements.",
                lambda shape: total_elements([size for size in shape if size]),
            ),
            Mistake("This adds the sizes. Each of the 2 rows holds 3 elements, so the sizes multiply.", sum),
        ),
    ),
)
