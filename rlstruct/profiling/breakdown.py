"""Breakdown of time by process, phase, operation and region, corrected for the cost of measuring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlstruct.profiling.events import N_KINDS, PLAIN, SWITCHING, WATCHED, Recording
from rlstruct.profiling.overlap import Floats, Integers, Segments, Times, lookup, sweep, totals
from rlstruct.profiling.prices import Prices, delays_of, payments_of, prices_of

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
    n_windows: int
    lifetime: float  # seconds from the beginning of the profile to the end of its last window
    prices: Prices  # of noting one event
    rows: list[Row]

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
    windows_by_pid: dict[int, list[Recording]] = {}
    for recording in recordings:
        windows_by_pid.setdefault(recording.pid, []).append(recording)
    prices = prices or prices_of(recordings)
    payments = [payments_of(recording, prices[recording.pid]) for recording in recordings]
    delays = delays_of(recordings, payments)
    rows: dict[int, dict[tuple[str, tuple[str, ...]], Row]] = {pid: {} for pid in windows_by_pid}
    for recording, paid, longer in zip(recordings, payments, delays, strict=True):
        _add_window(rows[recording.pid], recording, paid, longer)
    return [
        Process(
            name=windows[0].process,
            pid=pid,
            n_windows=len(windows),
            lifetime=1e-9 * max(one.ended - one.origin for one in windows),
            prices=prices[pid],
            rows=list(rows[pid].values()),
        )
        for pid, windows in windows_by_pid.items()
    ]


def segments_of(recording: Recording) -> Segments:
    """Cut a window at every boundary.

    A label is ``3 * (phase * (paths + 1) + path + 1) + kind of slice``, with path -1 for none.
    """
    host, device, spans = recording.host, recording.device, recording.spans
    last = np.asarray([path[-1] == SIMULATOR for path in recording.paths], dtype=bool)
    simulated = np.append(last, False)[spans.path]
    starts = [host.starts[host.kind == 0], spans.starts[simulated], host.starts[host.kind == 1], device.starts]
    ends = [host.ends[host.kind == 0], spans.ends[simulated], host.ends[host.kind == 1], device.ends]
    category = np.repeat(np.arange(4), [len(one) for one in starts])
    within = recording.begun, recording.ended
    innermost = recording.innermost()
    times = np.unique(np.concatenate([innermost[0], recording.phases[0], recording.slices[0]]))
    operations = lookup(recording.phases, times) * (len(recording.paths) + 1) + lookup(innermost, times) + 1
    labels = times, N_KINDS * operations + lookup(recording.slices, times)
    return sweep(np.concatenate(starts), np.concatenate(ends), category, within, labels)


def _add_window(
    rows: dict[tuple[str, tuple[str, ...]], Row],
    recording: Recording,
    payments: tuple[Times, Floats],
    delays: tuple[Integers, Floats],
) -> None:
    """Add the operations of a window to ``rows``, which are keyed by phase and path."""
    segments, width, k = segments_of(recording), len(recording.paths) + 1, len(REGIONS)
    region, label = _REGION_BY_ACTIVITY[segments.active], np.maximum(segments.label, 0)
    n = len(recording.phase_names) * width
    shape = n, N_KINDS, N_REGIONS
    keys = label * N_REGIONS + region
    measured = 1e-9 * totals(keys, segments.lengths, n * N_KINDS * N_REGIONS).reshape(shape)
    # The cost of an event belongs to the segment before it.
    paid = totals(keys[segments.at(payments[0])], payments[1], n * N_KINDS * N_REGIONS).reshape(shape)
    cpu, operations = region % k, label // N_KINDS
    changed = np.flatnonzero((np.diff(cpu) != 0) & (label[1:] % N_KINDS == WATCHED)) + 1
    moves = totals((operations[changed] * k + cpu[changed - 1]) * k + cpu[changed], np.ones(len(changed)), n * k * k)
    new = np.diff(label, prepend=-1) != 0
    pieces = totals(label[new], np.ones(int(new.sum())), n * N_KINDS)
    starts, ends, path = recording.spans.starts, recording.spans.ends, recording.spans.path
    span_keys = np.maximum(lookup(recording.phases, starts), 0) * width + path + 1
    longer = totals(span_keys[delays[0]], delays[1], n)
    whole = _whole(recording)
    for one in map(int, np.unique(np.concatenate([operations, span_keys]))):
        key = recording.phase_names[one // width], recording.paths[one % width - 1] if one % width else ()
        row = rows.setdefault(key, Row(*key))
        entries = np.flatnonzero(span_keys == one)
        chosen = entries[whole[entries]] if whole[entries].sum() >= N_BLOCKS else entries
        lengths = 1e-9 * (ends[chosen] - starts[chosen])
        row.count += len(entries)
        row.measured += measured[one]
        row.paid += paid[one]
        row.waited += float(longer[one])
        row.pieces += pieces.reshape(-1, N_KINDS)[one]
        row.moves += moves.reshape(-1, k, k)[one]
        row.per_entry += [float(part.mean()) for part in np.array_split(lengths, N_BLOCKS) if len(part)]


def _whole(recording: Recording) -> NDArray[np.bool_]:
    """Select the operations that lie within one plain slice, undisturbed by torch's recording.  [K] bool."""
    times, kinds = recording.slices
    first = np.searchsorted(times, recording.spans.starts, side="right") - 1
    last = np.searchsorted(times, recording.spans.ends, side="right") - 1
    found: NDArray[np.bool_] = (first == last) & (np.append(kinds, -1)[first] == PLAIN)
    return found
