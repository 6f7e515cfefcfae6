"""Times as ratios with their spread, by torch.utils.benchmark."""
import logging

import numpy as np
import torch

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # on a machine with nvcc and no GPU it warns of what we do not use
from torch.utils.benchmark import Timer  # noqa: E402

from course_utils.engine.display import bars, number


def benchmark(runs, seconds=0.15, what="time"):
    """Time each callable of {name: callable} and show bars of its time relative to the first.

    Medians of blocks that take `seconds` together, after a warm-up; the range behind each ratio comes from the quartiles. Threads as torch
    has them, and a CUDA device is synchronised. Returns {name: ratio of the medians to the first's}.
    """
    found = {}
    for name, run in runs.items():
        timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        found[name] = timer.blocked_autorange(min_run_time=seconds)
    quartiles = {name: np.percentile(m.times, (25, 50, 75)) for name, m in found.items()}
    first_low, first_median, first_high = next(iter(quartiles.values()))
    rows, ratios = [], {}
    for i, (name, (low, median, high)) in enumerate(quartiles.items()):
        low, high = low / first_high, high / first_low
        ratios[name] = float(median / first_median)
        spread = f"  ({_time(median)})" if i == 0 else f"  ({number(low)} to {number(high)})"
        rows.append((name + spread, ratios[name], "free" if i == 0 else "storage"))
    bars(rows, f"{what}, relative to the first (in brackets: the first's own; the range that the quartiles allow for each ratio)", what)
    return ratios


def _time(seconds):
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
