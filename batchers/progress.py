"""What a collector is doing, for whoever waits for it. Part of rlstruct.batchers."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

from rlstruct.profile import PhaseClock

_UNBORN = -1  # in place of a phase, while Python starts and imports the user's main script


class Phase(IntEnum):
    """What a collector is doing; the index of a PhaseClock."""

    WAIT = 0
    START = 1
    RESET = 2
    AGENT = 3
    ENVIRONMENT = 4
    COPY = 5
    SAVE = 6
    LOAD = 7

    @property
    def words(self) -> str:
        """The phase as an error message says it."""
        return {
            Phase.WAIT: "waiting",
            Phase.START: "create_env / create_agent",
            Phase.RESET: "environment.reset",
            Phase.AGENT: "agent",
            Phase.ENVIRONMENT: "environment.step",
            Phase.COPY: "writing the batch",
            Phase.SAVE: "saving a checkpoint",
            Phase.LOAD: "loading a checkpoint",
        }[self]


class Interrupted(BaseException):
    """The batcher was closed while this collector was at work."""


class Progress:
    """Where a collector is, for the process that waits for it: phase, step, and whether it shall stop.

    Args:
        word: [4] int64, in shared memory if another process shall see it.
    """

    def __init__(self, word: Tensor) -> None:
        """Start in phase WAIT, and leave the word as it is: another process may have written it."""
        # A memoryview is written in a twentieth of the time that a tensor takes.
        self._word = memoryview(word.numpy())  # type: ignore[arg-type]  # sync: a view, once
        self.clock = PhaseClock([phase.name.lower() for phase in Phase])

    def enter(self, phase: Phase) -> None:
        """Begin a phase.

        Raises:
            Interrupted: `stop` was called.
        """
        self._word[0] = phase
        self.clock.enter(phase)
        if self._word[2]:
            raise Interrupted

    @property
    def phase(self) -> Phase:
        """What the collector is doing."""
        return Phase(int(self._word[0])) if self.born else Phase.START

    @property
    def born(self) -> bool:
        """Whether the worker has got as far as the code of this library."""
        return bool(self._word[0] != _UNBORN)

    @property
    def step(self) -> int:
        """The step of the batch that it is at."""
        return int(self._word[1])

    @step.setter
    def step(self, t: int) -> None:
        self._word[1] = t

    @property
    def edition(self) -> int:
        """Which writing of the weights the worker has read, 0 for none."""
        return int(self._word[3])

    @edition.setter
    def edition(self, edition: int) -> None:
        self._word[3] = edition

    def clear(self) -> None:
        """Forget everything, for a worker that is about to be started."""
        for i in range(len(self._word)):
            self._word[i] = 0
        self._word[0] = _UNBORN

    def stop(self) -> None:
        """Ask the collector to give up at its next phase."""
        self._word[2] = 1
