"""Monitor of the other learners: heartbeats, and the error that names a lost learner."""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from rlstruct import renamed
from rlstruct.batchers.workers.system import process_state
from rlstruct.errors import LearnerError

ANSWER_SECONDS = 1800.0
"""Seconds that a learner waits for one that is alive or on another machine; rank 0 may be busy evaluating."""
SILENT_SECONDS = 30.0
"""Seconds without a heartbeat after which a learner on another machine counts as lost."""
CLOSING_SECONDS = 5.0
"""Seconds that closing waits for the thread that watches the others."""

_SECONDS_BETWEEN_CHECKS = 0.5
# States in which a process cannot continue.
_STATES = {"T": "was stopped by a signal", "t": "is held by a debugger"} | dict.fromkeys(("", "Z", "X"), "has died")

_logger = logging.getLogger(__name__)


@renamed.members
class Peers:
    """The other learners, as seen by one of them through the store and this machine's process table.

    An all-reduce of NCCL waits on the device for a learner that has died, and another thread can only abort it. The
    numbers after that are invalid, so the learning thread must call `raise_if_lost` before it uses any.

    With ``abort``, a thread checks the others twice a second. If one is lost, the thread stores the error as ``lost``
    and calls ``abort``, which ends the all-reduce that this process waits for.
    """

    def __init__(
        self, rank: int, store: Store, facts: Sequence[Mapping[str, Any]], abort: Callable[[], None] | None = None
    ) -> None:
        self._rank, self._facts = rank, facts
        self._where, self._name = facts[rank].get("where", "run_training"), title(rank, facts[rank])
        # A wait in another thread blocks a shared store. torch 2.7 cannot clone one.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._beats: dict[int, tuple[bytes, float]] = {}  # by rank: last heartbeat, and its time
        self.lost: LearnerError | None = None
        self._last_progress = time.monotonic()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if abort is not None:
            self._thread = threading.Thread(target=self._watch, args=(abort,), name="rlstruct-learners", daemon=True)
            self._thread.start()

    def raise_if_lost(self) -> None:
        """Record that this learner makes progress; raise LearnerError if another one is lost."""
        self._last_progress = time.monotonic()
        if self.lost is not None:
            raise self.lost

    def close(self) -> None:
        """Stop watching. Warn about a thread that does not end, and abandon it."""
        self._over.set()
        if self._thread is None:
            return
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            _logger.warning(
                "run_training: %s closes although its thread that watches the others has not ended in %g s. The thread "
                "waits for the store or for NCCL to abort, and ends with the process.",
                name(self._rank, self._facts[self._rank]),
                CLOSING_SECONDS,
            )

    def report(self, error: Exception) -> None:
        """Report to the others why this learner fails, and mark the error as reported."""
        with contextlib.suppress(dist.DistError):  # the process that holds the store is gone
            text = "".join(traceback.format_exception(error))
            self._store.compare_set("failed", "", json.dumps([self._rank, text]))
            error.reported = True  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Stop watching, and record that this learner has finished, so that the others do not miss it."""
        self.close()
        with contextlib.suppress(dist.DistError):  # the process that holds the store has finished as well
            self._store.set(f"finished {self._rank}", "")

    def check(self, waited: float) -> None:
        """Raise LearnerError if another learner has failed, died or been stopped, or this one has waited too long."""
        for rank, one in enumerate(self._facts):
            if rank == self._rank or one["host"] != platform.node():
                continue
            if how := _STATES.get(process_state(one["pid"])):
                with contextlib.suppress(dist.DistError):
                    if self._finished(rank):
                        continue
                self._refuse_failed()
                raise LearnerError(f"{self._where}: {name(rank, one)} {how}.", ranks=(rank,))
        if waited > ANSWER_SECONDS:
            raise LearnerError(
                f"{self._where}: {self._name} has waited {waited:.0f} s for the others, which are alive but "
                "do not answer. Find out what they are doing, for example with py-spy."
            )
        self._refuse_failed()

    def watch(self, waited: float) -> None:
        """Check learners on other machines as well: each call writes a heartbeat and reads the others'."""
        self.check(waited)
        try:
            self._store.set(f"beat {self._rank}", repr(time.monotonic()))
            for rank, one in enumerate(self._facts):
                if one["host"] != platform.node():
                    self._refuse_silent(rank)
        except dist.DistError as error:
            raise LearnerError(
                f"{self._where}: {self._name} cannot reach the store any more: {error}. The process "
                "that holds it, learner 0 or torchrun, has ended. Look at what it printed."
            ) from error

    def _watch(self, abort: Callable[[], None]) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_CHECKS):
            try:
                # A role may compute alone for hours; its waits for messages and sums on the CPU are limited anyway.
                is_role = "role" in self._facts[self._rank]
                self.watch(0.0 if is_role else time.monotonic() - self._last_progress)
            except LearnerError as error:
                self.lost = error  # before the waiting thread continues
                _logger.error("%s", error)
                abort()
                return

    def _refuse_failed(self) -> None:
        with contextlib.suppress(dist.DistError):
            if self._store.check(["failed"]):
                rank, text = json.loads(self._store.get("failed"))
                if rank != self._rank:
                    raise LearnerError(f"{self._where}: {name(rank, self._facts[rank])} failed:\n{text}", ranks=(rank,))

    def _refuse_silent(self, rank: int) -> None:
        if self._finished(rank) or not self._store.check([f"beat {rank}"]):  # finished, or not watching yet
            return
        beat, now = self._store.get(f"beat {rank}"), time.monotonic()
        before, since = self._beats.get(rank, (b"", now))
        self._beats[rank] = beat, (since if beat == before else now)
        if now - self._beats[rank][1] > SILENT_SECONDS:
            raise LearnerError(
                f"{self._where}: {name(rank, self._facts[rank])} has sent no heartbeat for {SILENT_SECONDS:g} s. It "
                "was killed or stopped, or its machine cannot be reached.",
                ranks=(rank,),
            )

    def _finished(self, rank: int) -> bool:
        return bool(self._store.check([f"finished {rank}"]))


def title(rank: int, facts: Mapping[str, Any]) -> str:
    """Return ``learner 2``, or the role of a process that has another one."""
    return str(facts.get("role", f"learner {rank}"))


def name(rank: int, facts: Mapping[str, Any]) -> str:
    """Name a learner, or a process with another role, in a message."""
    return f"{title(rank, facts)} (pid {facts['pid']} on {facts['host']})"
