"""Times as ratios with their spread, by torch.utils.benchmark."""
import logging

import numpy as np

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # on a machine with nvcc and no GPU it warns of what we do not use
from torch.utils.benchmark import Timer  # noqa: E402

from course_utils.engine.display import bars, number  # noqa: E402

ROUNDS = 5


def benchmark(runs, seconds=0.2, what="time"):
    """Time each callable of {name: callable} and show bars of its time relative to the first.

    After a warm-up they take turns in rounds, `seconds` in all for each, so that a busy moment meets every one; the range behind each ratio
    comes from the quartiles. One thread: two on a busy machine wait for each other. A CUDA device is synchronised.
    """
    timers = {name: Timer("run()", globals={"run": run}, num_threads=1) for name, run in runs.items()}
    times = {name: [] for name in timers}
    for timer in timers.values():
        timer.timeit(1)
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name] += timer.blocked_autorange(min_run_time=seconds / ROUNDS).times
    quartiles = {name: np.percentile(found, (25, 50, 75)) for name, found in times.items()}
    first_low, first_median, first_high = next(iter(quartiles.values()))
    rows = []
    for i, (name, (low, median, high)) in enumerate(quartiles.items()):
        own = _time(median) if i == 0 else f"{number(low / first_high)} to {number(high / first_low)}"
        rows.append((f"{name}  ({own})", float(median / first_median), "free" if i == 0 else "storage"))
    bars(rows, f"{what}, relative to the first (in brackets: the first's own; the range that the quartiles allow for each ratio)")


def _time(seconds):
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
