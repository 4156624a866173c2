"""Allowed calls of a batcher, and the infos of its outstanding batches."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from rlstruct.core import DictTensor
from rlstruct.errors import BatcherStateError, WorkerTimeout

DEPTH = 2  # batches that may be outstanding: one is being collected, one waits behind it


class LifeCycle:
    """State of a batcher that refuses calls in the wrong order. It raises; it does nothing else.

    Attributes:
        state: ``"executing"`` from `RL_Batcher.execute` until every batch has been returned.
        infos: ``agent_info/…`` and ``env_info/…`` of the next batch.  [B] on the batcher's device
        n_running: how many environments go on, as far as is known.
        deepest: the most batches that were ever outstanding.
        version: the policy version, which counts calls of `RL_Batcher.update`.
    """

    def __init__(self) -> None:
        """Begin closed: until a batcher has everything, ``__del__`` and close() find nothing to do."""
        self.state: Literal["new", "ready", "executing", "closed", "failed"] = "closed"
        self.infos = DictTensor()
        self.n_running = 0
        self.deepest = 1
        self.version = 0
        self._outstanding: deque[DictTensor] = deque()  # the infos of each batch, the oldest first

    def begin(self, infos: DictTensor, n_running: int, begun: bool = True) -> None:
        """Note a reset, or that the batcher goes on from a saved state, which may be one before any reset."""
        self.infos, self.n_running = infos, n_running
        self.state = "ready" if begun else "new"

    def check_execute(self, queues: bool) -> None:
        """Raise BatcherStateError if something else comes first; ``queues`` says whether a second batch may wait."""
        self.refuse_closed("execute")
        if self.state == "new":
            raise BatcherStateError("RL_Batcher.execute: reset() has not been called. Call reset() first.")
        if self.n_running == 0 and self.state == "ready":
            raise BatcherStateError("RL_Batcher.execute: every episode has ended. Call reset() to start new ones.")
        if len(self._outstanding) < (DEPTH if queues else 1):
            return
        why_not = "one batch is being collected and another waits behind it"
        if not queues:
            why_not = "only worker processes whose environments restart by themselves can have a second batch queued"
        raise BatcherStateError(f"RL_Batcher.execute: get() has not been called. Call get() first: {why_not}.")

    def executed(self, infos: DictTensor) -> None:
        """Note that a batch was ordered, with these infos."""
        self._outstanding.append(infos)
        self.state, self.infos = "executing", infos
        self.deepest = max(self.deepest, len(self._outstanding))

    def check_get(self) -> None:
        """Raise BatcherStateError unless there is a batch to wait for."""
        self.refuse_closed("get")
        if self.state != "executing":
            raise BatcherStateError("RL_Batcher.get: no batch is being collected. Call execute() first.")

    def taken(self) -> DictTensor:
        """Note that the oldest batch is returned, and return its infos."""
        infos = self._outstanding.popleft()
        self.state = "executing" if self._outstanding else "ready"
        return infos

    def refuse_executing(self, method: str) -> None:
        """Raise BatcherStateError while a batch is outstanding, or if the batcher is closed."""
        self.refuse_closed(method)
        if self.state == "executing":
            raise BatcherStateError(f"RL_Batcher.{method}: a batch is being collected. Call get() first.")

    def refuse_closed(self, method: str) -> None:
        """Raise BatcherStateError if the batcher is closed or has failed."""
        if self.state in ("closed", "failed"):
            why = "the batcher is closed" if self.state == "closed" else "collection has failed; close() this batcher"
            raise BatcherStateError(f"RL_Batcher.{method}: {why}. Create a new one.")

    @contextlib.contextmanager
    def failing(
        self, interrupted: Literal["new", "failed"] | None = None, harmless: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Run a call of the backend. If a worker fails, only close() is left; one that is merely late may still answer.

        Args:
            interrupted: the state after Ctrl-C, which may have kept some workers from their orders or lost an answer;
                None keeps the current state.
            harmless: whether Ctrl-C has interrupted nothing but waiting.
        """
        try:
            yield
        except WorkerTimeout:
            raise
        except Exception:
            self.state = "failed"
            raise
        except BaseException:
            if interrupted is not None and not harmless():
                self.state = interrupted
                self._outstanding.clear()
            raise
