"""Where the parts of a graph stand in its picture: rows from the top down, with few crossings."""
from itertools import pairwise


def layered(count, edges, bottom=()):
    """Rows of the items 0 … count - 1 in which every edge (from, to) runs downward, and the path of each edge.

    Items of `bottom` stand in the last row. An edge over several rows takes a place of its own in each row between, an
    item (edge, row). Each row is ordered by the mean place of what its items hang on, down and up in turn: the
    barycentre method of layered drawing. The edges must form no cycle.

    >>> layered(3, [(0, 1), (1, 2), (0, 2)])
    ([[0], [1, (2, 1)], [2]], [[0, 1], [1, 2], [0, (2, 1), 2]])
    """
    depth = [0] * count
    for _ in range(count):
        for above, below in edges:
            depth[below] = max(depth[below], depth[above] + 1)
    last = max(depth, default=0)
    for item in bottom:
        depth[item] = last
    rows = [[item for item in range(count) if depth[item] == row] for row in range(last + 1)]
    paths = []
    for number, (above, below) in enumerate(edges):
        between = [(number, row) for row in range(depth[above] + 1, depth[below])]
        paths.append([above, *between, below])
        for item in between:
            rows[item[1]].append(item)
    links = [link for path in paths for link in pairwise(path)]
    upward = [(below, above) for above, below in links]
    for _ in range(3):
        for fixed, row in pairwise(rows):
            _order(row, fixed, upward)
        for fixed, row in pairwise(rows[::-1]):
            _order(row, fixed, links)
    for fixed, row in pairwise(rows):
        _order(row, fixed, upward)
    return rows, paths


def _order(row, fixed, links):
    """Sort a row by the mean place, in the fixed row, of what each item is linked to; the others keep their place."""
    place = {item: (k + 0.5) / len(fixed) for k, item in enumerate(fixed)}
    wish = {item: (k + 0.5) / len(row) for k, item in enumerate(row)}
    for item in row:
        near = [place[end] for start, end in links if start == item]
        if near:
            wish[item] = sum(near) / len(near)
    row.sort(key=wish.get)
