"""What it costs to record torch's operators: slices of a run with and without them, compared.

RL-Scope (MLSys 2021, section 3.5) reruns a program with one feature on at a time and divides the difference by the
number of events. Here both kinds of slices alternate in one run, so that the same operations, of the same processes on
the same machine, are compared a few milliseconds apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlstruct.profiling.events import PLAIN, WATCHED, Recording
from rlstruct.profiling.overlap import Integers, Times, lookup

Path = tuple[str, ...]
WAIT = "wait"  # an operation whose length others decide
_FEW = 10
_TYPICAL = 0.5  # of the pieces; on a busy machine the longer ones say more about other programs than about this one


@dataclass(frozen=True)
class Pieces:
    """A window, cut wherever another operation becomes the innermost one, and where slices begin.

    Attributes:
        starts: of each piece.  [K] int64, ns
        lengths: positive.  [K] int64, ns
        path: index into `Recording.paths`, -1 for none.  [K] int64
        kind: of the slice, see `rlstruct.profiling.events`.  [K] int64
        events: of torch that begin in it.  [K] int64
    """

    starts: Times
    lengths: Times
    path: Integers
    kind: Integers
    events: Integers


@dataclass(frozen=True)
class Prices:
    """What it costs a process to note one event, in seconds.

    Attributes:
        operation: to enter and leave an operation.
        event: to record an event of torch, on average; None if no slices could be compared.
        events: the same by the operation that it happens in, where enough pieces of it were seen.
    """

    operation: float
    event: float | None
    events: dict[Path, float]

    def of_event(self, path: Path) -> float:
        """Return what an event in an operation costs, not less than nothing."""
        return max(0.0, self.events.get(path, self.event or 0.0))


def pieces_of(recording: Recording) -> Pieces:
    """Cut a window into pieces."""
    innermost = recording.innermost()
    starts = np.unique(np.concatenate([innermost[0], recording.slices[0], [recording.begun]]))
    starts = starts[(starts >= recording.begun) & (starts < recording.ended)]
    lengths = np.diff(np.append(starts, recording.ended))
    at = np.maximum(np.searchsorted(starts, recording.host.starts, side="right") - 1, 0)
    events = np.bincount(at, minlength=len(starts))
    return Pieces(starts, lengths, lookup(innermost, starts), lookup(recording.slices, starts), events)


def prices_of(recordings: Sequence[Recording]) -> Prices:
    """Compare the slices of a process.

    Args:
        recordings: its windows.
    """
    found: dict[Path, list[NDArray[np.int64]]] = {}  # kind, length and events of the pieces of an operation  [3, K]
    for recording in recordings:
        pieces = pieces_of(recording)
        table = np.stack([pieces.kind, pieces.lengths, pieces.events])
        for one in map(int, np.unique(pieces.path)):
            path = recording.paths[one] if one >= 0 else ()
            found.setdefault(path, []).append(table[:, pieces.path == one])
    events: dict[Path, float] = {}
    more, n = 0.0, 0.0
    for path, tables in found.items():
        kind, lengths, noted = np.concatenate(tables, axis=1)
        watched, plain = _typical(lengths, kind == WATCHED), _typical(lengths, kind == PLAIN)
        if path[-1:] == (WAIT,) or min(len(watched), len(plain)) < _FEW or not noted[watched].any():
            continue
        longer = 1e-9 * float(lengths[watched].mean() - lengths[plain].mean())
        events[path] = longer / float(noted[watched].mean())
        total = float(noted[kind == WATCHED].sum())
        more, n = more + events[path] * total, n + total
    operation = float(np.median([recording.cost for recording in recordings]))
    return Prices(operation, more / n if n else None, events)


def _typical(lengths: Times, among: NDArray[np.bool_]) -> Integers:
    """Indices of the shorter half of the pieces."""
    index = np.flatnonzero(among)
    order = index[np.argsort(lengths[index], kind="stable")]
    return order[: int(np.ceil(_TYPICAL * len(order)))]
