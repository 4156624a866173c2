"""Placement of processes on a GPU: the environment variables and the cores that they start with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from rlstruct.batchers.workers.processes import inheriting
from rlstruct.errors import BadValueError, warn_user
from rlstruct.options import Range
from rlstruct.registry import Registry

Mode = Literal["none", "mps", "mig", "auto"]
PERCENTAGE = Range(above=0, at_most=100, or_none=True)
"""Share of a GPU's threads for one process."""

SHARING: Registry[str, Callable[..., Any]] = Registry(
    {
        "workers": "rlstruct.sharing:GpuSharing",
        "learners": "rlstruct.sharing.learners:share_gpus",
        "roles": "rlstruct.sharing.learners:place_roles",
    }
)
"""Functions that place processes which use a GPU at the same time; imported when they are needed."""

_taken: set[int] = set()  # cores of this program's open placements


class WorkerPlacement:
    """Environment variables and cores of k processes that take turns on a GPU.

    `rlstruct.sharing.GpuSharing` is the placement of processes that use GPUs at the same time.

    Args:
        device: device of the processes.
        n_processes: k.
        mode: how they share the device.
        n_gpus: number of GPUs over which they are spread.
        where: name of the caller, for messages.

    Attributes:
        mode: ``"none"``, or in the subclass ``"mps"`` or ``"mig"``.
        cores: cores of each process, exclusive in this program, after the first one has started; empty if processes
            are not pinned.
    """

    def __init__(
        self, device: torch.device, n_processes: int, mode: Mode = "none", *, n_gpus: int = 1, where: str = "RL_Batcher"
    ) -> None:
        self.mode: Mode = mode
        self.cores: list[set[int]] = []
        self._n_to_pin = n_processes if device.type == "cuda" and n_processes > 1 else 0
        if self._n_to_pin > n_gpus and mode == "none" and running_daemon() is None:
            warn_user(
                f"{where}: {n_processes} processes on {device} open {n_processes} CUDA contexts, 300 to 700 MB of "
                "GPU memory each, and take turns on the GPU. One process with more environments is usually faster; "
                "sharing='auto' lets processes use the GPU at the same time where that is possible."
            )

    @contextlib.contextmanager
    def starting(self, worker: int) -> Iterator[None]:
        """Let a worker that starts in this block inherit the environment variables and cores of worker ``worker``."""
        with inheriting(self.environment(worker)):
            if self._n_to_pin:
                self.cores, self._n_to_pin = take_cores(self._n_to_pin), 0
            cores = os.sched_getaffinity(0) if self.cores else set()
            try:
                if self.cores:
                    os.sched_setaffinity(0, self.cores[worker])  # of this thread and its children
                yield
            except BaseException:
                self.close()
                raise
            finally:
                if cores:
                    os.sched_setaffinity(0, cores)

    def environment(self, worker: int) -> dict[str, str]:
        """Return additional environment variables of a worker."""
        return {}

    def close(self) -> None:
        """Release the cores, after all workers have ended."""
        _taken.difference_update(*self.cores)
        self.cores = []


def place_workers(
    device: torch.device, n_processes: int, sharing: Mode, thread_percentage: float | None
) -> WorkerPlacement:
    """Return the placement of a batcher's workers; of a mode except ``"none"``, that of `rlstruct.sharing`."""
    check_sharing("RL_Batcher", sharing, thread_percentage)
    if sharing == "none":
        return WorkerPlacement(device, n_processes)
    placement: WorkerPlacement = SHARING["workers"](device, n_processes, sharing, thread_percentage)
    return placement


def check_sharing(where: str, sharing: str, thread_percentage: float | None) -> None:
    """Raise ValueError for an unknown mode, and for a percentage that is out of range or has no effect."""
    Range(choices=get_args(Mode)).check(where, "sharing", sharing)
    PERCENTAGE.check(where, "thread_percentage", thread_percentage)
    if thread_percentage is not None and sharing not in ("mps", "auto"):
        raise BadValueError(
            f"{where}: thread_percentage is {thread_percentage:g} with sharing={sharing!r}, but only MPS limits "
            "threads. Pass sharing='mps', or leave it out."
        )


def running_daemon() -> Path | None:
    """Return the pipe directory of the MPS daemon that processes use by default, or None if there is none."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return pipe if (pipe / "control").exists() else None


def take_cores(n_processes: int) -> list[set[int]]:
    """Reserve one core for each process, among the usable cores that no other placement has taken.

    A worker computes in one thread. The remaining cores are for the learner and the next batcher. The result is empty
    if there are too few cores, or the system cannot pin processes.
    """
    cores = sorted(os.sched_getaffinity(0) - _taken) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < n_processes:
        return []
    _taken.update(cores[:n_processes])
    return [{core} for core in cores[:n_processes]]
