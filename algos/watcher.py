"""A thread that watches the other learners while this one waits inside CUDA."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rlstruct.errors import LearnerError

_LOOK_SECONDS = 0.5

_logger = logging.getLogger(__name__)


class Watcher:
    """Looks after other learners; once one is lost, says so and ends what this process waits for.

    A sum of NCCL waits on the device for learners that have died. To end it is all that another thread can do: the
    numbers that follow are worthless, so the thread that learns must call `refuse_lost` before it uses any.

    Args:
        look: called twice a second with the seconds since the last `refuse_lost`; raises if a learner is lost.
        abort: ends what this process waits for.

    Attributes:
        lost: what ``look`` raised, None while all live.
    """

    def __init__(self, look: Callable[[float], None], abort: Callable[[], None]) -> None:
        self.lost: LearnerError | None = None
        self._look, self._abort = look, abort
        self._seen = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rlstruct-learners", daemon=True)
        self._thread.start()

    def refuse_lost(self) -> None:
        """Say that this learner goes on; raise LearnerError if another one is lost."""
        self._seen = time.monotonic()
        if self.lost is not None:
            raise self.lost

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            try:
                self._look(time.monotonic() - self._seen)
            except LearnerError as error:
                self.lost = error  # before what waits is freed
                _logger.error("%s", error)
                self._abort()
                return
