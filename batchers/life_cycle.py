"""Which calls of a batcher are legal now, and the settings of the batches under way. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Literal

from rlstruct.core import DictTensor
from rlstruct.errors import BatcherStateError, WorkerTimeout

DEPTH = 2  # batches that may be outstanding: one is being collected, one waits behind it


class LifeCycle:
    """What has been called, and so what may be called next. It raises; it does nothing else.

    Attributes:
        state: ``"executing"`` from `RL_Batcher.execute` until every batch has been handed over.
        infos: settings of agents and environments that the next batch carries, ``agent_info/…`` and ``env_info/…``.
            [B] on the batcher's device
        n_running: how many environments go on, as far as is known.
        deepest: the most batches that were ever outstanding.
        version: how many times weights were given.
    """

    def __init__(self) -> None:
        """Begin closed: until a batcher has everything, ``__del__`` and close() find nothing to do."""
        self.state: Literal["new", "ready", "executing", "closed", "failed"] = "closed"
        self.infos = DictTensor()
        self.n_running = 0
        self.deepest = 1
        self.version = 0
        self._ordered: deque[DictTensor] = deque()  # the settings of each outstanding batch, the oldest first
        self._partly = False  # whether some workers are idle and others collect
        self._uneven = False  # whether some workers have handed over more than others

    def begin(self, infos: DictTensor, n_running: int, begun: bool = True) -> None:
        """Note a reset, or that the batcher goes on from a saved state, which may be one before any reset."""
        self.infos, self.n_running = infos, n_running
        self.state = "ready" if begun else "new"

    def check_execute(self, settings: bool, queues: bool) -> int:
        """Return how many batches may be outstanding after this order: 1, or 2 if it queues a second one.

        Args:
            settings: whether it brings new settings of the agent.
            queues: whether a second batch may wait behind the first, here.

        Raises:
            BatcherStateError: something else must be called first.
        """
        self.refuse_closed("execute")
        if self._partly:
            if settings:
                self.refuse_executing("execute(agent_info)")
            return 1
        if self.state == "new":
            raise BatcherStateError("RL_Batcher.execute: reset() has not been called. Call reset() first.")
        if self.n_running == 0 and self.state == "ready":
            raise BatcherStateError("RL_Batcher.execute: every episode has ended. Call reset() to start new ones.")
        if self.state == "ready":
            return 1
        why_not = ""
        if not queues:
            why_not = "only worker processes whose environments restart by themselves can have a second batch queued"
        elif self._uneven:
            why_not = "get(n_workers=…) has let some workers get ahead of others"
        elif len(self._ordered) == DEPTH:
            why_not = "one batch is being collected and another waits behind it"
        if why_not:
            raise BatcherStateError(f"RL_Batcher.execute: get() has not been called. Call get() first: {why_not}.")
        return DEPTH

    def executed(self, infos: DictTensor) -> None:
        """Note that a batch was ordered, with these settings; or that the workers that were idle go on."""
        if not self._partly:
            self._ordered.append(infos)
        self.infos = infos
        self.deepest = max(self.deepest, len(self._ordered))
        self.state, self._partly = "executing", False

    def check_get(self, some: bool) -> None:
        """Raise BatcherStateError unless there is a batch to wait for, also one of ``some`` of the workers only."""
        self.refuse_closed("get")
        if self.state != "executing":
            raise BatcherStateError("RL_Batcher.get: no batch is being collected. Call execute() first.")
        if some and len(self._ordered) == DEPTH:
            raise BatcherStateError(
                "RL_Batcher.get: n_workers was given, and a second batch is queued. Call get() for all workers first."
            )

    def taken(self, collecting: bool) -> DictTensor:
        """Note that the oldest batch, or the part of it that is ready, is handed over, and return its settings.

        Args:
            collecting: whether anything is still outstanding.
        """
        infos = self._ordered[0]
        self._partly = collecting and len(self._ordered) == 1
        if not self._partly:
            self._ordered.popleft()
        self._uneven = collecting and (self._uneven or self._partly)
        self.state = "executing" if collecting else "ready"
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
        """After a worker has failed only close() is left; a worker that is merely late may still answer.

        Args:
            interrupted: the state after Ctrl-C, which may have kept some workers from their orders, or lost an answer;
                None for that of before.
            harmless: whether Ctrl-C has interrupted nothing but waiting, which changes nothing.
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
                self.state, self._partly = interrupted, False
                self._ordered.clear()
            raise
