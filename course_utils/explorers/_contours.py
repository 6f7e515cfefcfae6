"""Lines of equal value on a grid, by marching squares (Lorensen and Cline 1987, in two dimensions)."""
import torch

# Which of a square's edges (0 below, 1 right, 2 above, 3 left) a line joins, by which of its corners are low: 1 below left, then
# 2, 4, 8 anticlockwise. Lines are directed, with the low side on their left.
SQUARES = {
    1: ((0, 3),), 2: ((1, 0),), 3: ((1, 3),), 4: ((2, 1),), 5: ((0, 3), (2, 1)), 6: ((2, 0),), 7: ((2, 3),),
    8: ((3, 2),), 9: ((0, 2),), 10: ((1, 0), (3, 2)), 11: ((1, 2),), 12: ((3, 1),), 13: ((0, 1),), 14: ((3, 0),),
}  # fmt: skip
VERY_HIGH = 1e12


def contours(values, xs, ys, levels):
    """{level: closed lines, each a list of points (x, y), around where the values are below it}.

    `values` (len(xs), len(ys)), all below 1e12. A border of such high values closes every line. Since lines are directed, each edge that
    is crossed ends one line and begins another, and following them is a walk through a dictionary.
    """
    values = torch.nn.functional.pad(values, (1, 1, 1, 1), value=VERY_HIGH)
    xs, ys = ([float(a[0]), *a.tolist(), float(a[-1])] for a in (xs, ys))
    heights, found = values.tolist(), {}
    for level in levels:
        low = (values < level).int()
        corners = low[:-1, :-1] + 2 * low[1:, :-1] + 4 * low[1:, 1:] + 8 * low[:-1, 1:]
        follow = {}
        for i, j in ((corners > 0) & (corners < 15)).nonzero().tolist():
            edges = (("across", i, j), ("up", i + 1, j), ("across", i, j + 1), ("up", i, j))
            for begin, end in SQUARES[int(corners[i, j])]:
                follow[edges[begin]] = edges[end]
        found[level] = [[_crossing(edge, level, heights, xs, ys) for edge in loop] for loop in _loops(follow)]
    return found


def _loops(follow):
    while follow:
        loop, edge = [], next(iter(follow))
        while edge in follow:
            loop.append(edge)
            edge = follow.pop(edge)
        yield loop


def _crossing(edge, level, heights, xs, ys):
    """Where on the edge the level lies, if the value changes evenly along it."""
    direction, i, j = edge
    k, m = (i + 1, j) if direction == "across" else (i, j + 1)
    part = (level - heights[i][j]) / (heights[k][m] - heights[i][j])
    return xs[i] + part * (xs[k] - xs[i]), ys[j] + part * (ys[m] - ys[j])
