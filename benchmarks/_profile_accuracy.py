"""What a profile says a training takes, beside the same training that nobody profiles: for benchmarks/profiler.py."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstruct.algos.evaluation import Evaluation
from rlstruct.profiling import profile, read
from rlstruct.profiling.breakdown import Row

Seconds = NDArray[np.float64]

OPERATORS = 0.5  # share of the time in which operators are recorded: twice as much to take away as by default
SCHEDULED = 2  # CPUCLOCK_SCHED of Linux: the lowest bits of the identifier of a process's CPU clock
N_PARTS = 10  # of a training, of some 0.1 s each: longer than the slices in which operators are recorded
N_RESAMPLED = 2_000


class Moments:
    """Stands where a training evaluates: notes when its loop begins, and when each iteration is over; plays nothing."""

    busy = False

    def __init__(self) -> None:
        """Wait for the loop."""
        self._noted: list[list[float]] = []
        self._clocks: list[int] = []

    def start(self, weights: Mapping[str, Any], *, env_steps: int, policy_version: int) -> None:
        """Do nothing, before the loop and after it."""
        self._asked = env_steps, policy_version

    def poll(self) -> None:
        """Note that an iteration is over; nothing is under way."""
        self._noted.append([time.perf_counter(), sum(map(time.clock_gettime, self._clocks))])

    def wait(self) -> Evaluation:
        """Note that the loop begins, when asked for the first time."""
        if not self._noted:
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            self._clocks = [(~pid << 3) | SCHEDULED for pid in pids]
            self.poll()
        return Evaluation(*self._asked, returns=(0.0,), lengths=(1,), seconds=0.0)

    def seconds(self) -> Seconds:
        """Return what each iteration took by the wall clock, and of the CPU in all processes.  [iterations, 2]."""
        return np.diff(np.asarray(self._noted), axis=0)


Train = Callable[[Moments], object]


def compare(train: Train, *, alone: bool, seconds: float, repeats: int) -> dict[str, Any]:
    """Train without and with a profile in turn, so that each profiled training stands between two that are not.

    Args:
        train: does the same work whenever it is called, and asks its argument for evaluations.
        alone: whether one process does all of it; it is kept on one core then.
        seconds: to spend.
        repeats: at least so many profiled trainings.

    Returns:
        All totals; by the wall and in CPU seconds how much more a profiled training takes, corrected (``bias``) and as
        measured (``uncorrected_bias``), as a share, with 95 % intervals. See `_ratio`.
    """
    cores = os.sched_getaffinity(0)
    plain: list[Seconds] = []
    profiled: list[Seconds] = []
    found: list[dict[str, float]] = []
    try:
        if alone:
            os.sched_setaffinity(0, {max(cores)})
        _without(train)  # warms up
        end = time.perf_counter() + seconds
        plain.append(_without(train))
        while len(found) < repeats or time.perf_counter() < end:
            one, said = _within(train)
            profiled.append(one)
            found.append(said)
            plain.append(_without(train))
    finally:
        os.sched_setaffinity(0, cores)
    row: dict[str, Any] = {"repeats": len(found), "profiled": found}
    for column, clock in enumerate(("wall", "cpu")):
        without, within = (np.stack([_parts(one[:, column]) for one in turns]) for turns in (plain, profiled))
        kept = np.asarray([[1.0 - one[f"paid_{clock}"] / one[clock]] for one in found])
        row[f"plain_{clock}"] = without.sum(1).tolist()
        for name, numbers in ((f"bias_{clock}", kept * within), (f"uncorrected_bias_{clock}", within)):
            row |= {name: _ratio(numbers, without) - 1.0, f"{name}_interval": _interval(numbers, without)}
    return row


def _without(train: Train) -> Seconds:
    gc.collect()
    moments = Moments()
    train(moments)
    return moments.seconds()


def _within(train: Train) -> tuple[Seconds, dict[str, float]]:
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
    # A wait costs no CPU seconds, so that it cannot become shorter either.
    working = [row for row in (*rows, *theirs) if row.path[-1:] != ("wait",)]
    wall, cpu = moments.seconds().sum(0).tolist()
    return moments.seconds(), {
        **{"wall": wall, "paid_wall": _paid(rows), "cpu": cpu, "paid_cpu": _paid(working)},
        **{"operation_cost": main.prices.operation, "operator_cost": main.prices.event or 0.0},
    }


def _paid(rows: Sequence[Row]) -> float:
    return sum(float((row.seconds - row.corrected).sum()) for row in rows)


def _parts(iterations: Seconds) -> Seconds:
    """Add up the seconds of a training's iterations in up to ten parts.  [N_PARTS]."""
    return np.asarray([part.sum() for part in np.array_split(iterations, min(N_PARTS, len(iterations)))])


def _ratio(profiled: Seconds, plain: Seconds) -> float:
    """Divide the seconds of a typical training by those of another kind.

    Each training does the same in the same part of it, and other programs, of other machines too if this one is
    virtual, slow down some parts of some trainings. So the median is that of each part.

    Args:
        profiled: of each turn.  [turns, parts]
        plain: likewise.  [turns, parts]
    """
    return float(np.median(profiled, axis=0).sum() / np.median(plain, axis=0).sum())


def _interval(profiled: Seconds, plain: Seconds) -> tuple[float, float]:
    """Bootstrap `_ratio`, less 1: from 2.5 to 97.5 % of resampled turns."""
    draw = np.random.default_rng(0)
    ratios = [
        _ratio(*(turns[draw.integers(0, len(turns), len(turns))] for turns in (profiled, plain))) - 1.0
        for _ in range(N_RESAMPLED)
    ]
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(low), float(high)
