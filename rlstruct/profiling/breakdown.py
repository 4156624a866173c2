"""Whose time goes where: by process, phase, operation and region, with what measuring has cost taken away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstruct.profiling.events import Recording
from rlstruct.profiling.overlap import Integers, Segments, Times, lookup, sweep, totals

REGIONS = ("python", "backend", "simulator", "cuda")
"""What the CPU does: Python, torch's operators, a simulator (its operators and kernels, too), calls of CUDA's API."""
N_REGIONS = 2 * len(REGIONS)  # each without and with a busy GPU beside
SIMULATOR, WAIT = "simulator", "wait"  # operations with a meaning of their own
N_BLOCKS = 10
_OF_SET = np.asarray([3 if s & 4 else 2 if s & 2 else 1 if s & 1 else 0 for s in range(16)]) + 4 * (np.arange(16) >> 3)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """What it costs to note one event, in seconds; see `rlstruct.profiling.calibration`.

    Attributes:
        operation: to enter and leave an operation.
        operator: to record an operator or a named range of torch.
        cuda: to record a call of CUDA's API.
        unsure: which of them came out negative, and are 0 therefore: more repetitions are needed.
        work: whose reruns the cost of an operator comes from; empty if nobody measured it.
    """

    operation: float = 0.0
    operator: float = 0.0
    cuda: float = 0.0
    unsure: tuple[str, ...] = ()
    work: str = ""


@dataclass
class Row:
    """An operation of a process in a phase.

    Attributes:
        phase: its name.
        path: names of the operations around it, and its own at the end; empty outside of all.
        count: how often it was entered.
        seconds: measured, by region of `REGIONS`: first while the GPU is idle, then while it is busy.  [8] float64
        overhead: how much of that is measuring.  [8] float64
        transitions: how often the CPU went from one region to another in it.  [4, 4] float64
        per_entry: mean seconds of an entry, what is nested in it included, in up to ten stretches of the run.
    """

    phase: str
    path: tuple[str, ...]
    count: int = 0
    seconds: Floats = field(default_factory=lambda: np.zeros(N_REGIONS))
    overhead: Floats = field(default_factory=lambda: np.zeros(N_REGIONS))
    transitions: Floats = field(default_factory=lambda: np.zeros((len(REGIONS), len(REGIONS))))
    per_entry: list[float] = field(default_factory=list)

    @property
    def corrected(self) -> Floats:
        """Seconds without what measuring has cost, by region.  [8] float64."""
        return correct(self.seconds, self.overhead)

    def add(self, other: Row) -> None:
        """Add the same operation in another window."""
        self.count += other.count
        self.seconds = self.seconds + other.seconds
        self.overhead = self.overhead + other.overhead
        self.transitions = self.transitions + other.transitions
        self.per_entry = self.per_entry + other.per_entry


@dataclass
class Process:
    """A process in all its windows.

    Attributes:
        name: ``main``, ``rlstruct-worker-0``, …
        pid: of the process.
        seconds: that were recorded.
        n_windows: in so many windows.
        lifetime: seconds from the beginning of the profile to the end of its last window.
        rows: its operations.
    """

    name: str
    pid: int
    seconds: float
    n_windows: int
    lifetime: float
    rows: list[Row]

    @property
    def corrected(self) -> float:
        """Seconds without what measuring has cost."""
        return float(sum(row.corrected.sum() for row in self.rows))

    def inclusive(self, name: str, *, corrected: bool = True) -> float:
        """Return the seconds of an operation with all that is nested in it.

        Args:
            name: of the operation, wherever it was entered.
            corrected: whether to take away what measuring has cost.
        """
        rows = [row for row in self.rows if name in row.path]
        return float(sum((row.corrected if corrected else row.seconds).sum() for row in rows))


def correct(seconds: Floats, overhead: Floats) -> Floats:
    """Take away what measuring has cost.

    Args:
        seconds: measured.  [K] float64
        overhead: what measuring has cost, where it was paid.  [K] float64

    Returns:
        The difference, with the sum ``max(0, sum(seconds) - sum(overhead))`` and nothing below 0: what one entry lacks
        is taken from the others, in proportion.  [K] float64
    """
    left = np.maximum(0.0, seconds - overhead)
    wanted = max(0.0, float(seconds.sum() - overhead.sum()))
    total = float(left.sum())
    return left * (wanted / total) if total > 0.0 else left


def break_down(recordings: Sequence[Recording], costs: Costs) -> list[Process]:
    """Break the recorded time down, one process after the other.

    Args:
        recordings: all windows of all processes of a run.
        costs: what measuring has cost.

    Returns:
        The processes, in the order in which they come.
    """
    paid = [_paid(recording, costs) for recording in recordings]
    processes: dict[int, Process] = {}
    rows: dict[tuple[int, str, tuple[str, ...]], Row] = {}
    for recording, mine in zip(recordings, paid, strict=True):
        seconds, lifetime = 1e-9 * (recording.ended - recording.begun), 1e-9 * (recording.ended - recording.origin)
        process = processes.setdefault(recording.pid, Process(recording.process, recording.pid, 0.0, 0, 0.0, []))
        process.seconds += seconds
        process.n_windows += 1
        process.lifetime = max(process.lifetime, lifetime)
        for row in _window(recording, mine, _waited(recording, recordings, paid)):
            key = recording.pid, row.phase, row.path
            if key in rows:
                rows[key].add(row)
            else:
                rows[key] = row
                process.rows.append(row)
    return list(processes.values())


def segments_of(recording: Recording) -> Segments:
    """Cut a window at every boundary; a label is ``phase * (paths + 1) + path + 1``, the path being -1 for none."""
    host, device, spans = recording.host, recording.device, recording.spans
    last = np.asarray([path[-1] == SIMULATOR for path in recording.paths], dtype=bool)
    simulated = np.append(last, False)[spans.path]
    starts = [host.starts[host.kind == 0], spans.starts[simulated], host.starts[host.kind == 1], device.starts]
    ends = [host.ends[host.kind == 0], spans.ends[simulated], host.ends[host.kind == 1], device.ends]
    category = np.repeat(np.arange(4), [len(one) for one in starts])
    within = recording.begun, recording.ended
    return sweep(np.concatenate(starts), np.concatenate(ends), category, within, _labels(recording))


def _labels(recording: Recording) -> tuple[Times, Integers]:
    innermost = recording.innermost()
    times = np.union1d(innermost[0], recording.phases[0])
    return times, lookup(recording.phases, times) * (len(recording.paths) + 1) + lookup(innermost, times) + 1


def _paid(recording: Recording, costs: Costs) -> tuple[Times, Floats]:
    """When measuring was paid for, and how much until then, in seconds: rising moments [K] and sums [K]."""
    host = recording.host
    times = np.concatenate([recording.spans.starts, host.starts])
    price = np.asarray([costs.operator, costs.cuda, costs.operator])
    paid = np.concatenate([np.full(len(recording.spans.starts), costs.operation), price[host.kind]])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(paid[order])


def _spent(paid: tuple[Times, Floats], starts: Times, ends: Times) -> Floats:
    """What measuring has cost a process in each of these stretches of time, in seconds.  [K]."""
    until = np.append(0.0, paid[1])
    spent: Floats = until[np.searchsorted(paid[0], ends)] - until[np.searchsorted(paid[0], starts)]
    return spent


def _waited(
    recording: Recording, recordings: Sequence[Recording], paid: Sequence[tuple[Times, Floats]]
) -> tuple[Times, Floats]:
    """How much shorter each wait would be if nobody measured: by what the slowest process that it waits for has paid.

    A process waits for those that it has started in the same phase, and for the one that started it.

    Returns:
        When the waits began [K], ns, and seconds [K].
    """
    waits = np.asarray([path[-1] == WAIT for path in recording.paths], dtype=bool)
    mine = np.append(waits, False)[recording.spans.path]
    starts, ends = recording.spans.starts[mine], recording.spans.ends[mine]
    names = np.asarray([*recording.phase_names, ""], dtype=object)
    phase = names[lookup(recording.phases, starts)]
    most = np.zeros(len(starts))
    for other, theirs in zip(recordings, paid, strict=True):
        is_child = other.parent == recording.pid and other.pid != recording.pid
        if is_child or other.pid == recording.parent:
            counts = (phase == other.phase_names[0]) if is_child else np.ones(len(starts), dtype=bool)
            most = np.maximum(most, np.where(counts, _spent(theirs, starts, ends), 0.0))
    return starts, np.minimum(most, 1e-9 * (ends - starts))


def _window(recording: Recording, paid: tuple[Times, Floats], waited: tuple[Times, Floats]) -> list[Row]:
    """Return the rows of one window."""
    segments, width = segments_of(recording), len(recording.paths) + 1
    region = _OF_SET[segments.active]
    label = np.maximum(segments.label, 0)
    n = int(label.max(initial=0)) + 1
    seconds = 1e-9 * totals(label * N_REGIONS + region, segments.lengths, n * N_REGIONS).reshape(n, N_REGIONS)
    # Measuring is paid before an event: where the process was until then.
    at = segments.at(paid[0])
    price = np.diff(paid[1], prepend=0.0)
    overhead = totals(label[at] * N_REGIONS + region[at], price, n * N_REGIONS).reshape(n, N_REGIONS)
    waiting = segments.at(waited[0] + 1)
    overhead[:, 0] += totals(label[waiting], waited[1], n)
    cpu, k = region % len(REGIONS), len(REGIONS)
    changed = np.flatnonzero(np.diff(cpu)) + 1
    steps = totals(label[changed] * k * k + cpu[changed - 1] * k + cpu[changed], np.ones(len(changed)), n * k * k)
    starts, ends, path = recording.spans.starts, recording.spans.ends, recording.spans.path
    of_span = np.maximum(lookup(recording.phases, starts), 0) * width + path + 1
    found = []
    for one in map(int, np.unique(np.concatenate([label, of_span]))):
        entries = np.flatnonzero(of_span == one)
        lengths = 1e-9 * (ends[entries] - starts[entries])
        blocks = [float(part.mean()) for part in np.array_split(lengths, N_BLOCKS) if len(part)]
        inside = one < n
        found.append(
            Row(
                phase=recording.phase_names[one // width],
                path=recording.paths[one % width - 1] if one % width else (),
                count=len(entries),
                seconds=seconds[one] if inside else np.zeros(N_REGIONS),
                overhead=overhead[one] if inside else np.zeros(N_REGIONS),
                transitions=steps.reshape(n, k, k)[one] if inside else np.zeros((k, k)),
                per_entry=blocks,
            )
        )
    return found


def costs_from(found: Mapping[str, Any]) -> Costs:
    """Read what `dataclasses.asdict` made of costs.

    >>> costs_from({"operation": 0, "operator": 1e-6, "cuda": 0, "unsure": ["cuda"]}).unsure
    ('cuda',)
    """
    return Costs(**{**found, "unsure": tuple(found["unsure"])})
