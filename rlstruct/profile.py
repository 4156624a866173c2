"""Where the time goes. A clock that adds up the seconds of named phases, for less than a microsecond each."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter


class PhaseClock:
    """Adds up wall-clock seconds by phase; exactly one phase runs at any moment, so the sum is the elapsed time.

    Args:
        phases: their names; `enter` takes the index. The first one runs from the start.

    On CUDA the seconds are those of launching the work, not of the work itself.
    """

    def __init__(self, phases: Sequence[str]) -> None:
        """Start in the first phase."""
        self.phases = tuple(phases)
        self._seconds = [0.0] * len(self.phases)
        self._current = 0
        self._since = perf_counter()

    def enter(self, phase: int) -> None:
        """End the running phase and begin another.

        Args:
            phase: index into ``phases``.
        """
        now = perf_counter()
        self._seconds[self._current] += now - self._since
        self._current = phase
        self._since = now

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase so far, the running one included."""
        self.enter(self._current)
        return dict(zip(self.phases, self._seconds, strict=True))
