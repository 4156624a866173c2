"""Breakdown of time by process, phase, operation and region, corrected for the cost of measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstruct.profiling.events import N_KINDS, PLAIN, SWITCHING, WATCHED, Key, Recording
from rlstruct.profiling.overhead import Prices, delays_of, payments_of, prices_of
from rlstruct.profiling.overlap import Floats, Integers, Segments, Times, lookup, sweep

REGIONS = ("python", "backend", "simulator", "cuda")
"""Activities of the CPU: Python, torch's operators, a simulator with its operators and kernels, calls of CUDA's API."""
N_REGIONS = 2 * len(REGIONS)  # each without and with a busy GPU
SIMULATOR = "simulator"  # this operation is a region, as `WAIT` is waiting
N_BLOCKS = 10
_HOST_REGION = np.asarray([3 if s & 4 else 2 if s & 2 else 1 if s & 1 else 0 for s in range(16)])
_REGION_BY_ACTIVITY = _HOST_REGION + len(REGIONS) * (np.arange(16) >> 3)


@dataclass
class Row:
    """An operation in a phase of a process. Axes of length 3 are kinds of slices: `SWITCHING`, `PLAIN`, `WATCHED`."""

    phase: str  # its name
    path: tuple[str, ...]  # names from the outermost operation to this one; empty outside of all operations
    count: int = 0  # number of entries
    # Seconds by region of `REGIONS`, first while the GPU is idle, then while it is busy. In plain slices the
    # region is unknown.  [3, 8] float64
    measured: Floats = field(default_factory=lambda: np.zeros((N_KINDS, N_REGIONS)))
    paid: Floats = field(default_factory=lambda: np.zeros((N_KINDS, N_REGIONS)))  # of it, on measuring.  [3, 8]
    waited: float = 0.0  # for a wait: seconds by which measuring prolonged it; see `delays_of`
    pieces: Floats = field(default_factory=lambda: np.zeros(N_KINDS))  # uninterrupted stretches.  [3] float64
    moves: Floats = field(default_factory=lambda: np.zeros((len(REGIONS), len(REGIONS))))  # in watched slices.  [4, 4]
    # Mean seconds of an entry, nested operations included, in up to ten stretches of each window.
    per_entry: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> Floats:
        """Seconds by region; plain slices are divided in the proportions of corrected watched ones.  [8] float64."""
        return self._by_region(self.measured)

    @property
    def overhead(self) -> Floats:
        """Part of these seconds spent on measuring and on switching between slices.  [8] float64."""
        paid = self._by_region(self.paid)
        paid[0] += self.waited
        return paid

    @property
    def corrected(self) -> Floats:
        """Seconds by region without the cost of measuring.  [8] float64."""
        return correct(self.seconds, self.overhead)

    @property
    def transitions(self) -> Floats:
        """Number of moves of the CPU between regions, extrapolated from watched slices.  [4, 4] float64."""
        counted = self.pieces[[PLAIN, WATCHED]]
        return self.moves * (counted.sum() / counted[1] if counted[1] else 0.0)

    def _by_region(self, sums: Floats) -> Floats:
        clean = correct(self.measured[WATCHED], self.paid[WATCHED])
        if not clean.sum():  # never watched
            clean = np.eye(N_REGIONS)[REGIONS.index("simulator") if self.path[-1:] == (SIMULATOR,) else 0]
        split: Floats = sums[WATCHED] + sums[SWITCHING] + sums[PLAIN].sum() * (clean / clean.sum())
        return split


@dataclass
class Process:
    """All windows of a process."""

    name: str  # ``main``, ``rlstruct-worker-0``, …
    pid: int
    prices: Prices  # of noting one event
    n_windows: int = 0
    # Seconds from the beginning of the profile to its end; of a killed process, to the end of its last window.
    lifetime: float = 0.0
    rows_by_key: dict[Key, Row] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        """All operations, in each phase."""
        return list(self.rows_by_key.values())

    @property
    def seconds(self) -> float:
        """Seconds recorded."""
        return float(sum(row.measured.sum() for row in self.rows))

    @property
    def watched(self) -> float:
        """Seconds in which torch's operators were recorded too."""
        return float(sum(row.measured[WATCHED].sum() for row in self.rows))

    @property
    def kind(self) -> str:
        """Name without its number, which all workers of a batcher share."""
        return self.name.rstrip("0123456789").rstrip("-")

    @property
    def corrected(self) -> float:
        """Seconds without the cost of measuring."""
        return float(sum(row.corrected.sum() for row in self.rows))

    def inclusive(self, name: str, *, corrected: bool = True) -> float:
        """Return the seconds of an operation, wherever it was entered, nested operations included."""
        rows = [row for row in self.rows if name in row.path]
        return float(sum((row.corrected if corrected else row.seconds).sum() for row in rows))


def correct(seconds: Floats, overhead: Floats) -> Floats:
    """Subtract the cost of measuring (``overhead``) from the regions that paid it.  [K] float64 each.

    The sum becomes ``max(0, sum(seconds) - sum(overhead))`` and no entry falls below 0: an entry's deficit is taken
    from the others, in proportion.
    """
    left = np.maximum(0.0, seconds - overhead)
    wanted = max(0.0, float(seconds.sum() - overhead.sum()))
    total = float(left.sum())
    return left * (wanted / total) if total > 0.0 else left


def break_down(recordings: Sequence[Recording], prices: Mapping[int, Prices] | None = None) -> list[Process]:
    """Break the recorded time down by process; ``prices`` (by pid) default to those measured by the recordings."""
    prices = prices or prices_of(recordings)
    payments = [payments_of(recording, prices[recording.pid]) for recording in recordings]
    delays = delays_of(recordings, payments)
    processes: dict[int, Process] = {}
    for one, paid, longer in zip(recordings, payments, delays, strict=True):
        process = processes.setdefault(one.pid, Process(one.process, one.pid, prices[one.pid]))
        process.n_windows += 1
        process.lifetime = max(process.lifetime, 1e-9 * (one.closed - one.origin))
        _add_window(process.rows_by_key, one, paid, longer)
    return list(processes.values())


def segments_of(recording: Recording) -> Segments:
    """Cut a window at every boundary. A label is ``3 * key + kind of slice``."""
    host, spans, slices = recording.host, recording.spans, recording.slices
    simulated = spans[recording.select({SIMULATOR})[spans.key]]
    events = host[host.kind == 0], simulated, host[host.kind == 1], recording.device
    times = np.union1d(recording.innermost[0], slices[0])
    labels = times, N_KINDS * lookup(recording.innermost, times) + lookup(slices, times)
    return sweep([(one.starts, one.ends) for one in events], (recording.begun, recording.ended), labels)


def _add_window(
    rows: dict[Key, Row], recording: Recording, payments: tuple[Times, Floats], delays: tuple[Integers, Floats]
) -> None:
    """Add the operations of a window to ``rows``."""
    segments, spans, n = segments_of(recording), recording.spans, len(recording.keys)
    region, (key, activity) = _REGION_BY_ACTIVITY[segments.active], np.divmod(segments.label, N_KINDS)
    measured = _sums((n, N_KINDS, N_REGIONS), (key, activity, region), 1e-9 * segments.lengths)
    at = segments.at(payments[0])  # the cost of an event belongs to the segment before it
    paid = _sums((n, N_KINDS, N_REGIONS), (key[at], activity[at], region[at]), payments[1])
    cpu = region % len(REGIONS)
    moved = np.flatnonzero((np.diff(cpu) != 0) & (activity[1:] == WATCHED)) + 1
    moves = _sums((n, len(REGIONS), len(REGIONS)), (key[moved], cpu[moved - 1], cpu[moved]), 1.0)
    new = np.flatnonzero(np.diff(segments.label, prepend=-1))
    pieces = _sums((n, N_KINDS), (key[new], activity[new]), 1.0)
    longer = _sums((n,), (spans.key[delays[0]],), delays[1])
    lengths = 1e-9 * (spans.ends - spans.starts)
    first, last = (np.searchsorted(recording.slices[0], times, side="right") for times in (spans.starts, spans.ends))
    # These lie within one plain slice, undisturbed by torch's recording.
    in_plain_slice = (first == last) & (lookup(recording.slices, spans.starts) == PLAIN)
    for one in np.union1d(key, spans.key):
        row = rows.setdefault(recording.keys[one], Row(*recording.keys[one]))
        entries = np.flatnonzero(spans.key == one)
        chosen = entries[in_plain_slice[entries]] if in_plain_slice[entries].sum() >= N_BLOCKS else entries
        row.count += len(entries)
        row.measured += measured[one]
        row.paid += paid[one]
        row.waited += float(longer[one])
        row.pieces += pieces[one]
        row.moves += moves[one]
        row.per_entry += [float(part.mean()) for part in np.array_split(lengths[chosen], N_BLOCKS) if len(part)]


def _sums(shape: tuple[int, ...], index: tuple[Integers, ...], values: NDArray[Any] | float) -> Floats:
    """Sum the values [K] with the same index [K]: an array of this shape."""
    sums = np.zeros(shape)
    np.add.at(sums, index, values)
    return sums
