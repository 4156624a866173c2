"""The learners that a training starts beside its own process, on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess

import cloudpickle
import torch

from rlstruct.batchers.workers.processes import (
    GUARD,
    NO_MAIN_GUARD,
    WORKER_NAME,
    die_with,
    leave,
    mortal_parent,
    quiet_start,
)
from rlstruct.errors import LearnerError

_LEAVING_SECONDS = 10.0


class Followers:
    """Processes that train as the learners 1, 2, … of the training of this one.

    Attributes:
        processes: in the order of their ranks.
    """

    def __init__(self) -> None:
        """Start none yet."""
        self.processes: list[SpawnProcess] = []

    def start(self, train: Callable[[], object], n: int, port: int) -> None:
        """Start ``n - 1`` processes that call ``train``; they find the others at ``port``."""
        payload, parent = cloudpickle.dumps(train), mortal_parent()
        with quiet_start():
            for rank in range(1, n):
                arguments = (payload, rank, n, port, torch.get_num_threads(), parent)
                # Not a daemon: a learner has worker processes of its own.
                process = get_context("spawn").Process(
                    target=_follow, args=arguments, name=f"{WORKER_NAME}-learner-{rank}"
                )
                process.start()
                self.processes.append(process)

    def refuse_dead(self) -> None:
        """Raise if one has ended.

        Raises:
            LearnerError: it has.
        """
        for i, process in enumerate(self.processes):
            if (code := process.exitcode) is not None:
                hint = GUARD if code == NO_MAIN_GUARD else "What kept it is in its traceback, printed above."
                raise LearnerError(
                    f"run_training: learner {i + 1} (pid {process.pid}) ended with code {code} while it started. "
                    f"{hint}",
                    ranks=(i + 1,),
                )

    def join(self) -> None:
        """Wait for their end, once the training is over."""
        end = time.monotonic() + _LEAVING_SECONDS
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))

    def end(self) -> None:
        """End them at once, even stopped ones; their worker processes die with them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(_LEAVING_SECONDS)
            with contextlib.suppress(ValueError):  # it has not ended
                process.close()
        self.processes = []


def _follow(payload: bytes, rank: int, size: int, port: int, n_threads: int, parent: int | None) -> None:
    """Train as one of several learners; what goes wrong is told to the first one, if it has come to know this one."""
    if parent is not None and sys.platform == "linux":
        die_with(parent)
    torch.set_num_threads(n_threads)
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in said.items()})
    try:
        cloudpickle.loads(payload)()
    except Exception as error:
        if not getattr(error, "told", False):
            raise
        sys.exit(1)  # the first learner says what happened
    leave()
