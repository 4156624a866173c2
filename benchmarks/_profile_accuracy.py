"""What a profile says a training takes, beside the same training that nobody profiles: for benchmarks/profiler.py."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstruct.algos.evaluation import Evaluation
from rlstruct.profiling import profile, read

OPERATORS = 0.5  # share of the time in which operators are recorded: twice as much to take away as by default
SCHEDULED = 2  # CPUCLOCK_SCHED of Linux: the lowest bits of the identifier of a process's CPU clock
N_RESAMPLED = 2_000


class Moments:
    """Stands where a training evaluates, just before its loop and just after it: notes both, and plays nothing.

    Attributes:
        wall: seconds of the loop.
        cpu: CPU seconds of this process and its workers meanwhile.
    """

    busy = False

    def __init__(self) -> None:
        """Wait for the loop."""
        self._noted: list[tuple[float, float]] = []

    def start(self, weights: Mapping[str, Any], *, env_steps: int, policy_version: int) -> None:
        """Note that the loop is over; or nothing, before it."""
        self._asked = env_steps, policy_version
        self._note()

    def poll(self) -> None:
        """Nothing is under way."""

    def wait(self) -> Evaluation:
        """Note that the loop begins."""
        self._note()
        return Evaluation(*self._asked, returns=(0.0,), lengths=(1,), seconds=0.0)

    def _note(self) -> None:
        pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        self._noted.append((time.perf_counter(), sum(time.clock_gettime((~pid << 3) | SCHEDULED) for pid in pids)))

    @property
    def wall(self) -> float:
        """Seconds of the loop."""
        return self._noted[2][0] - self._noted[1][0]

    @property
    def cpu(self) -> float:
        """CPU seconds of this process and its workers in the loop."""
        return self._noted[2][1] - self._noted[1][1]


Train = Callable[[Moments], object]


def compare(train: Train, *, alone: bool, seconds: float, repeats: int) -> dict[str, Any]:
    """Train without and with a profile in turn, so that each profiled training stands between two that are not.

    Args:
        train: does the same work whenever it is called, and asks its argument for evaluations.
        alone: whether one process does all of it; it is kept on one core then.
        seconds: to spend.
        repeats: at least so many profiled trainings.

    Returns:
        All seconds; by the wall and in CPU seconds the median ratio of a profiled training to the mean of its two
        neighbours less 1, corrected (``bias``) and as measured (``uncorrected_bias``), with 95 % intervals.
    """
    cores = os.sched_getaffinity(0)
    plain: list[tuple[float, float]] = []
    found: list[dict[str, float]] = []
    try:
        if alone:
            os.sched_setaffinity(0, {max(cores)})
        _without(train)  # warms up
        end = time.perf_counter() + seconds
        plain.append(_without(train))
        while len(found) < repeats or time.perf_counter() < end:
            found.append(_within(train))
            plain.append(_without(train))
    finally:
        os.sched_setaffinity(0, cores)
    row: dict[str, Any] = {"repeats": len(found), "plain_wall": [one[0] for one in plain]}
    row |= {"plain_cpu": [one[1] for one in plain], "profiled": found}
    for column, clock in enumerate(("wall", "cpu")):
        beside = [(one[column] + next_one[column]) / 2 for one, next_one in itertools.pairwise(plain)]
        for name, key in ((f"bias_{clock}", f"corrected_{clock}"), (f"uncorrected_bias_{clock}", clock)):
            ratios = [one[key] / mean - 1.0 for one, mean in zip(found, beside, strict=True)]
            row |= {name: statistics.median(ratios), f"{name}_interval": _interval(ratios)}
    return row


def _without(train: Train) -> tuple[float, float]:
    gc.collect()
    moments = Moments()
    train(moments)
    return moments.wall, moments.cpu


def _within(train: Train) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp())
    try:
        gc.collect()
        moments = Moments()
        with profile(folder, window=3600.0, operators=OPERATORS):
            train(moments)
        main, *workers = read(folder).processes
    finally:
        shutil.rmtree(folder)
    rows = [row for row in main.rows if "iteration" in row.path]
    theirs = [row for one in workers for row in one.rows if row.phase == "training" and "start" not in row.path]
    paid = sum(float((row.seconds - row.corrected).sum()) for row in rows)
    # A wait costs no CPU seconds, so that it cannot become shorter either.
    working = [row for row in (*rows, *theirs) if row.path[-1:] != ("wait",)]
    paid_cpu = sum(float((row.seconds - row.corrected).sum()) for row in working)
    return {
        **{"wall": moments.wall, "cpu": moments.cpu},
        **{"corrected_wall": moments.wall - paid, "corrected_cpu": moments.cpu - paid_cpu},
        **{"iterations": main.inclusive("iteration", corrected=False), "operation_cost": main.prices.operation},
        "operator_cost": main.prices.event or 0.0,
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap the median: from 2.5 to 97.5 % of resampled ones."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(N_RESAMPLED))
    return medians[round(0.025 * N_RESAMPLED)], medians[round(0.975 * N_RESAMPLED)]
