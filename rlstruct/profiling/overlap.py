"""Overlap of activities: pure functions on arrays of intervals in nanoseconds.

The sweep follows RL-Scope (Gleeson et al., "RL-Scope: cross-stack profiling for deep reinforcement learning
workloads", MLSys 2021, section 3.4): it sorts the boundaries of all intervals, between which the set of active
categories is constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Intervals = tuple[Times, Times]  # starts and ends, [K] int64 each, ns; rising and disjoint


@dataclass(frozen=True)
class Segments:
    """A stretch of time, cut at every boundary; segment i lasts from ``edges[i]`` to ``edges[i + 1]``."""

    edges: Times  # strictly rising.  [N + 1] int64, ns
    active: Integers  # bit c is set while an interval of category c is active.  [N] int64
    label: Integers  # given by the caller, -1 for none.  [N] int64

    @property
    def lengths(self) -> Times:
        """Return the length of each segment.  [N] int64, ns."""
        return np.diff(self.edges)

    def at(self, times: Times) -> Integers:
        """Return the index of each time's segment; a boundary belongs to the segment before it.  [K] int64."""
        index = np.searchsorted(self.edges, times, side="left") - 1
        return np.clip(index, 0, max(0, len(self.active) - 1))


def sweep(
    starts: Times, ends: Times, category: Integers, within: tuple[int, int], labels: tuple[Times, Integers]
) -> Segments:
    """Merge the boundaries of intervals, in O(n log n), into segments with the set of active categories in each.

    Args:
        starts: start of each interval.  [K] int64, ns
        ends: end of each interval, not before its start; empty intervals are ignored.  [K] int64, ns
        category: category of each interval, from 0 to 62.  [K] int64
        within: the stretch of time, to which intervals are cut.
        labels: rising times, and the label from each of them on; -1 before.  [M] each
    """
    first, last = within
    starts, ends = np.clip(starts, first, last), np.clip(ends, first, last)
    real = ends > starts
    starts, ends, category = starts[real], ends[real], category[real]
    changes = np.clip(labels[0], first, last)
    edges = np.unique(np.concatenate([starts, ends, changes, np.asarray([first, last], dtype=np.int64)]))
    active = np.zeros(max(0, len(edges) - 1), dtype=np.int64)
    for one in np.unique(category):
        mine = category == one
        begun = np.searchsorted(np.sort(starts[mine]), edges[:-1], side="right")
        over = np.searchsorted(np.sort(ends[mine]), edges[:-1], side="right")
        active |= (begun > over).astype(np.int64) << one
    return Segments(edges, active, lookup(labels, edges[:-1]))


def lookup(labels: tuple[Times, Integers], times: Times) -> Integers:
    """Return the label at each time [K] (ns), -1 before the first; ``labels``: rising times and labels, [M] each."""
    at = np.searchsorted(labels[0], times, side="right") - 1
    return np.where(at < 0, -1, np.append(labels[1], -1)[at])


def flatten(starts: Times, ends: Times) -> tuple[Times, Integers]:
    """Find the innermost of nested intervals at any time.

    Args:
        starts: start of each interval.  [K] int64, ns
        ends: end of each interval. Two intervals are disjoint or nested; of two equal ones, the later in the list is
            the inner one. Empty intervals are ignored.  [K] int64, ns

    Returns:
        ``(times, index)``: strictly rising times, and the innermost interval from each of them on, -1 for none.
        [M] each
    """
    real = np.flatnonzero(ends > starts)
    order = real[np.lexsort((real, -ends[real], starts[real]))]  # the outer before the inner
    starts, ends = starts[order], ends[order]
    times = np.unique(np.concatenate([starts, ends]))
    # Number of intervals around each: those that began before it, minus those that have ended.
    depth = np.arange(len(order)) - np.searchsorted(np.sort(ends), starts, side="right")
    index = np.full(len(times), -1, dtype=np.int64)
    for level in range(int(depth.max(initial=-1)) + 1):
        at = np.flatnonzero(depth == level)  # disjoint
        newest = np.searchsorted(starts[at], times, side="right") - 1
        inside = (newest >= 0) & (ends[at][newest] > times)
        index[inside] = order[at][newest[inside]]
    return times, index


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


def active_before(merged: Intervals, times: Times) -> Times:
    """Return how long the intervals of a `union` have been active, in total, before each time [K].  [K] int64, ns."""
    starts, ends = merged
    n_begun = np.searchsorted(starts, times, side="right")
    whole = np.append(0, np.cumsum(ends - starts))[n_begun]
    newest = np.append(ends, np.iinfo(np.int64).min // 2)[n_begun - 1]
    rest: Times = whole - np.maximum(0, newest - times)
    return rest


def totals(keys: Integers, values: NDArray[Any], n: int) -> Floats:
    """Sum the values [K] of each key [K] int64, from 0 to n - 1: [n] float64, exact up to 2**53."""
    return np.bincount(keys, weights=values, minlength=n).astype(np.float64)
