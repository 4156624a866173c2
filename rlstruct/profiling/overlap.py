"""Overlap of activities: pure functions on arrays of intervals in nanoseconds.

The sweep follows RL-Scope (Gleeson et al., "RL-Scope: cross-stack profiling for deep reinforcement learning
workloads", MLSys 2021, section 3.4): it sorts the boundaries of all intervals, between which the set of active
categories is constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Intervals = tuple[Times, Times]  # starts and ends, [K] int64 each, ns
StepFunction = tuple[Times, Integers]  # rising times (ns), and a value that holds from each of them on.  [M] int64 each


@dataclass(frozen=True)
class Segments:
    """A stretch of time, cut at every boundary; segment i lasts from ``edges[i]`` to ``edges[i + 1]``."""

    edges: Times  # strictly rising.  [N + 1] int64, ns
    active: Integers  # bit c is set while an interval of category c is active.  [N] int64
    label: Integers  # given by the caller, -1 before the first.  [N] int64

    @property
    def lengths(self) -> Times:
        """Return the length of each segment.  [N] int64, ns."""
        return np.diff(self.edges)

    def at(self, times: Times) -> Integers:
        """Return the index of each time's segment; a boundary belongs to the segment before it.  [K] int64."""
        index = np.searchsorted(self.edges, times, side="left") - 1
        return np.clip(index, 0, max(0, len(self.active) - 1))


def sweep(categories: Sequence[Intervals], within: tuple[int, int], labels: StepFunction) -> Segments:
    """Merge the boundaries of intervals, in O(n log n), into segments with the set of active categories in each.

    Args:
        categories: starts and ends of the intervals of each category, 63 at most; they may overlap.
        within: the stretch of time, to which intervals are cut.
        labels: the label from each time on.
    """
    cut = [(np.clip(starts, *within), np.clip(ends, *within)) for starts, ends in categories]
    edges = np.unique(np.concatenate([*map(np.concatenate, cut), np.clip(labels[0], *within), within]))
    active = np.zeros(max(0, len(edges) - 1), dtype=np.int64)
    for category, (starts, ends) in enumerate(cut):
        begun = np.searchsorted(np.sort(starts), edges[:-1], side="right")
        over = np.searchsorted(np.sort(ends), edges[:-1], side="right")
        active |= (begun > over).astype(np.int64) << category
    return Segments(edges, active, lookup(labels, edges[:-1]))


def lookup(steps: StepFunction, times: Times) -> Integers:
    """Return the value at each time [K] (ns), -1 before the first."""
    at = np.searchsorted(steps[0], times, side="right") - 1
    return np.where(at < 0, -1, np.append(steps[1], -1)[at])


def union(starts: Times, ends: Times) -> Intervals:
    """Merge intervals [K] (ns) into disjoint ones, in rising order."""
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.ones(len(starts), dtype=bool)
    first[1:] = starts[1:] > reach[:-1]
    return starts[first], reach[np.roll(first, -1)]


def union_length(starts: Times, ends: Times) -> int:
    """Return the time during which at least one interval is active, in ns."""
    starts, ends = union(starts, ends)
    return int((ends - starts).sum())


def active_before(merged: Intervals, times: Times) -> Floats:
    """Return how long the intervals of a `union` have been active, in total, before each time [K].  [K] float64, ns."""
    edges = np.stack(merged, axis=1).reshape(-1)
    lengths = np.diff(edges)
    lengths[1::2] = 0  # gaps
    before: Floats = np.interp(times, edges, np.append(0, np.cumsum(lengths)))
    return before


def levels(starts: Times, ends: Times, weights: NDArray[Any]) -> tuple[Times, NDArray[Any]]:
    """Return rising times [2 * K] (ns), and from each on the sum of the weights [K] of the active intervals [K]."""
    times = np.concatenate([ends, starts])  # in this order, one that ends when another begins is over
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(np.concatenate([-weights, weights])[order])
