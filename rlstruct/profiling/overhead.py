"""Cost of measuring, and the delays that it causes in each process.

RL-Scope (MLSys 2021, section 3.5) reruns a program with one feature on at a time and divides the difference by the
number of events. Here, slices with and without recording of torch's operators alternate within one run, so the same
operations are compared a few milliseconds apart, in the same process on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlstruct.profiling.events import PLAIN, SWITCHING, WATCHED, Key, Recording
from rlstruct.profiling.overlap import Floats, Integers, Times, lookup

WAIT = "wait"  # an operation that lasts until other processes signal
_FEW = 10  # pieces needed for a comparison
_TYPICAL = 0.5  # share of the pieces that is compared: on a busy machine, other programs run in the longer ones
_LONGEST = 3.0  # times a typical piece; in longer ones, another program ran


@dataclass(frozen=True)
class Prices:
    """Seconds that it takes a process to note one event."""

    operation: float  # to enter and leave an operation
    event: float | None  # to record one of torch's, averaged over processes; None if no slices could be compared


def prices_of(recordings: Sequence[Recording]) -> dict[int, Prices]:
    """Estimate the prices of each process, by pid, from slices with and without recording.

    Pieces of an operation that lie between the same two other operations do the same work, so they are compared. The
    shorter half of them gives the share of a piece that recording takes. Other programs that slow the process down slow
    recording down as well, so this share applies to all pieces except very long ones. The price of an event is averaged
    over processes, because one that mostly waits has little to compare.
    """
    samples: dict[tuple[int, Key, Key, Key], list[Integers]] = {}
    for recording in recordings:
        keys, (around, pieces) = [*recording.keys, ("", ())], _pieces(recording)
        places, place = np.unique(around, axis=1, return_inverse=True)
        for k, (before, here, after) in enumerate(places.T):
            same = recording.pid, keys[here], keys[before], keys[after]
            samples.setdefault(same, []).append(pieces[:, place.reshape(-1) == k])
    longer, n = 0.0, 0.0
    for (_, (_, path), *_), pieces_of_place in samples.items():
        slice_kind, lengths, noted = np.concatenate(pieces_of_place, axis=1)
        watched = slice_kind == WATCHED
        with_events, without = _typical(lengths[watched]), _typical(lengths[slice_kind == PLAIN])
        if path[-1:] == (WAIT,) or min(len(with_events), len(without)) < _FEW or not noted[watched].any():
            continue
        watched &= lengths < _LONGEST * with_events.mean()
        longer += float(lengths[watched].sum()) * (1.0 - float(without.mean() / with_events.mean()))
        n += float(noted[watched].sum())
    prices = {}
    for pid in {one.pid for one in recordings}:
        mine = [one for one in recordings if one.pid == pid]
        compared = n and any(PLAIN in one.slices[1] for one in mine)
        operation = float(np.median([one.cost for one in mine]))
        prices[pid] = Prices(operation, 1e-9 * longer / n if compared else None)
    return prices


def _pieces(recording: Recording) -> tuple[Integers, Integers]:
    """Cut a window wherever another operation becomes the innermost one, and where slices begin.

    Returns:
        Indices into `Recording.keys` of each piece's previous, own and next operation, -1 for none; and for each
        piece the kind of slice, its length in ns, and the number of torch's events that begin in it.  [3, K] each
    """
    times, key = recording.innermost
    starts = np.union1d(times, recording.slices[0])
    starts = starts[starts < recording.ended]
    lengths = np.diff(starts, append=recording.ended)
    at = np.maximum(np.searchsorted(starts, recording.host.starts, side="right") - 1, 0)
    events = np.bincount(at, minlength=len(starts))
    place, padded = np.searchsorted(times, starts, side="right"), np.pad(key, 1, constant_values=-1)
    around = np.stack([padded[place - 1], padded[place], padded[place + 1]])
    return around, np.stack([lookup(recording.slices, starts), lengths, events])


def _typical(lengths: Times) -> Times:
    """Return the shorter half."""
    return np.sort(lengths)[: int(np.ceil(_TYPICAL * len(lengths)))]


def payments_of(recording: Recording, prices: Prices) -> tuple[Times, Floats]:
    """Return the times at which a process paid for measuring (rising, ns), and the seconds paid.  [K] each.

    It pays just before an operation or event, and right after switching.
    """
    host, spans, (times, kinds) = recording.host, recording.spans, recording.slices
    switching = np.flatnonzero(kinds[:-1] == SWITCHING)
    at = np.concatenate([spans.starts, host.starts, times[switching + 1]])
    each = np.repeat([prices.operation, max(0.0, prices.event or 0.0)], [len(spans.starts), len(host.starts)])
    paid = np.concatenate([each, 1e-9 * np.diff(times)[switching]])
    order = np.argsort(at, kind="stable")
    return at[order], paid[order]


def delays_of(
    recordings: Sequence[Recording], payments: Sequence[tuple[Times, Floats]]
) -> list[tuple[Integers, Floats]]:
    """Compute the seconds by which measuring prolonged each wait; negative if it shortened the wait.

    A process that pays is late from then on, until it waits for others. A wait ends when the last of these signals, or
    at once if all have signalled. Without measuring, each event of a process would come earlier by its lateness. So if
    a process begins to wait at s and another signals at t, the first resumes with a lateness of
    ``min(m - s + late(s), m - t + late_of_the_other(t))``, where ``m = max(s, t)``. A payment delays only the processes
    that wait for the payer, and a wait absorbs the waiting process's own payments.

    A process waits for its children in the same phase, which signal by beginning to wait, and for its parent, which
    sends orders while it works.

    Returns:
        For each recording, the indices of the spans that are waits, and the seconds.  [K] each
    """
    late = [_Lateness(*one) for one in zip(recordings, payments, strict=True)]
    waits = [(int(end), int(start), one) for one in late for start, end in zip(one.starts, one.ends, strict=True)]
    for end, start, mine in sorted(waits, key=lambda wait: wait[:2]):
        signals = [(one, at) for one in late if (at := one.signalled(mine.recording, start, end)) is not None]
        last = max([start, *(at for _, at in signals)])
        mine.resume(start, end, min(1e-9 * (last - at) + one.at(at) for one, at in [(mine, start), *signals]))
    return [(one.spans, np.diff(one.delays)) for one in late]


class _Lateness:
    """Lateness of a process, caused by measuring, in one of its windows; 0 at the beginning.

    Attributes:
        spans: indices of the waits.  [K] int64
        starts: their beginnings, rising.  [K] int64, ns
        ends: their ends.  [K] int64, ns
        delays: cumulative seconds by which the waits so far were prolonged; the first is 0.
    """

    def __init__(self, recording: Recording, payments: tuple[Times, Floats]) -> None:
        self.recording = recording
        self.spans = np.flatnonzero(recording.select({WAIT})[recording.spans.key])
        self.starts, self.ends = recording.spans.starts[self.spans], recording.spans.ends[self.spans]
        self.delays = [0.0]
        self._times, self._paid = payments[0], np.append(0.0, np.cumsum(payments[1]))

    def at(self, time: int) -> float:
        """Return the lateness in seconds at a time (ns) outside of waits."""
        n_over = min(int(np.searchsorted(self.ends, time, side="right")), len(self.delays) - 1)
        return float(self._paid[np.searchsorted(self._times, time, side="right")]) + self.delays[n_over]

    def resume(self, start: int, end: int, late: float) -> None:
        """Set the lateness in seconds at the end of the next wait, before paying for the operation after it."""
        n_paid = max(np.searchsorted(self._times, start, side="right"), np.searchsorted(self._times, end))
        self.delays.append(late - float(self._paid[n_paid]))

    def signalled(self, waiting: Recording, start: int, end: int) -> int | None:
        """Return when this process released one that waited from start to end, or None if it did not."""
        mine = self.recording
        if mine.begun > end or mine.ended < start:
            return None
        last = int(np.searchsorted(self.starts, end, side="right")) - 1
        if mine.pid == waiting.parent:
            return int(self.starts[last]) if last >= 0 and self.ends[last] > end else end
        phase, _ = waiting.keys[int(lookup(waiting.innermost, np.asarray([start]))[0])]
        is_child = mine.parent == waiting.pid and mine.pid != waiting.pid and mine.keys[0][0] == phase
        return int(self.starts[last]) if is_child and last >= 0 else None
