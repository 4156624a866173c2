"""Placement: what each of k worker processes starts with, so that they share a GPU as asked for."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Literal

import torch

from rlstruct.errors import BadValueError, SharingError, warn_user
from rlstruct.sharing.daemon import MOST_CLIENTS, Daemon, check_percentage, missing, mps
from rlstruct.sharing.machine import MigInstance, mig_instances, running_daemon

Mode = Literal["none", "mps", "mig", "auto"]

_logger = logging.getLogger(__name__)
_taken: set[int] = set()  # cores of the placements that are open in this process


class Placement:
    """Environment variables and cores of k worker processes.

    Args:
        device: where they work.
        n_processes: k.
        sharing: ``"none"``: in turns; ``"mps"``: at the same time, under a private daemon; ``"mig"``: in the MIG
            instances that are there, one after the other; ``"auto"``: MIG if there is one, else MPS, else none.
        thread_percentage: of the GPU's threads, the most that one process gets under MPS.

    Attributes:
        mode: what it has become: ``"none"``, ``"mps"`` or ``"mig"``.
        cores: of each process, from the first one's start on, which no other placement of this program has; none if
            all may use all.

    Raises:
        ValueError: the arguments do not fit together.
        SharingError: this machine lacks what ``"mps"`` or ``"mig"`` needs.
    """

    def __init__(
        self, device: torch.device, n_processes: int, sharing: Mode = "none", thread_percentage: float | None = None
    ) -> None:
        """Check and choose; a daemon is started with the first process."""
        _check(device, n_processes, sharing, thread_percentage)
        together = _is_shared(device, n_processes) and n_processes > 1
        instances = mig_instances() if sharing != "none" and _is_shared(device, n_processes) else []
        self.mode = _choose(device, n_processes, instances) if sharing == "auto" else sharing
        if sharing != "auto" and (why_not := _lacking(self.mode, n_processes, instances)):
            raise SharingError(f"RL_Batcher: sharing={self.mode!r}: {why_not}")
        self.cores: list[set[int]] = []
        self._n_to_pin = n_processes if together else 0
        self._device, self._automatic, self._thread_percentage = device, sharing == "auto", thread_percentage
        self._instances = instances
        self._daemon: Daemon | None = None
        self._block = contextlib.ExitStack()  # the daemon's
        if together and self.mode == "none":
            warn_user(
                f"RL_Batcher: {n_processes} processes on {device} open {n_processes} CUDA contexts, 300 to 700 MB of "
                "GPU memory each, and share the GPU in turns. One process with more environments is usually faster; "
                "sharing='auto' lets processes use the GPU at the same time where that is possible.",
            )

    @contextlib.contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """Let a process that starts inside be one of the workers: it inherits environment and cores.

        Args:
            worker: which one.

        Raises:
            SharingError: the daemon does not start.
        """
        variables = self.environment(worker)
        if self._n_to_pin:
            self.cores, self._n_to_pin = take_cores(self._n_to_pin), 0
        before = {name: os.environ.get(name) for name in variables}
        cores = os.sched_getaffinity(0) if self.cores else set()
        try:
            os.environ.update(variables)
            if self.cores:
                os.sched_setaffinity(0, self.cores[worker])  # of this thread, and of what it starts
            yield
        except BaseException:
            self.close()
            raise
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def environment(self, worker: int) -> dict[str, str]:
        """Return the variables of a worker; none if it inherits everything. The first call starts the daemon."""
        if self.mode == "mig":
            return {"CUDA_VISIBLE_DEVICES": self._instances[worker % len(self._instances)].uuid}
        if self.mode == "mps" and self._daemon is None:
            try:
                self._daemon = self._block.enter_context(mps(self._device))
            except SharingError as error:
                if not self._automatic:
                    raise
                warn_user(f"RL_Batcher(sharing='auto'): processes share the GPU in turns. {error}")
                self.mode = "none"
        return self._daemon.environment(self._thread_percentage) if self._daemon else {}

    def close(self) -> None:
        """End the daemon, if there is one, and give the cores back; once all workers have ended."""
        self._daemon = None
        self._block.close()
        _taken.difference_update(*self.cores)
        self.cores = []


def take_cores(n_processes: int) -> list[set[int]]:
    """Give each process a core of its own, of those that this one may use and no other placement has taken.

    A worker computes in one thread. The cores that are left are for the learner, and for the next batcher.

    Args:
        n_processes: how many.

    Returns:
        A core for each, as a set; none where there are too few, or where the system cannot pin.
    """
    cores = sorted(os.sched_getaffinity(0) - _taken) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < n_processes:
        return []
    _taken.update(cores[:n_processes])
    return [{core} for core in cores[:n_processes]]


def _is_shared(device: torch.device, n_processes: int) -> bool:
    return device.type == "cuda" and n_processes > 0


def _check(device: torch.device, n_processes: int, sharing: str, thread_percentage: float | None) -> None:
    """Raise ValueError for arguments that do not fit together on any machine."""
    if sharing not in ("none", "mps", "mig", "auto"):
        raise BadValueError(f"RL_Batcher: sharing is {sharing!r}, expected 'none', 'mps', 'mig' or 'auto'.")
    check_percentage("RL_Batcher", thread_percentage)
    if thread_percentage is not None and sharing not in ("mps", "auto"):
        raise BadValueError(
            f"RL_Batcher: thread_percentage is {thread_percentage:g} with sharing={sharing!r}, but only MPS limits "
            "threads. Pass sharing='mps', or leave it out."
        )
    if sharing in ("none", "auto"):
        return
    if not _is_shared(device, n_processes):
        raise BadValueError(
            f"RL_Batcher: sharing={sharing!r} with device={str(device)!r} and n_processes={n_processes}, expected "
            "worker processes on a GPU. Pass device='cuda:0' and n_processes=2 or more, or sharing='none'."
        )
    if device.index:
        raise BadValueError(
            f"RL_Batcher: sharing={sharing!r} with device={str(device)!r}: each worker sees one GPU, as cuda:0. Start "
            f"the program with CUDA_VISIBLE_DEVICES={device.index} and pass device='cuda:0', or pass sharing='none'."
        )


def _lacking(mode: str, n_processes: int, instances: list[MigInstance]) -> str:
    """Say why a mode cannot be had on this machine, "" if it can."""
    if mode == "mig" and not instances:
        return (
            "this process sees no MIG instance, and none is made here. Make them with nvidia-smi mig (as root), let "
            "CUDA_VISIBLE_DEVICES name them, or pass sharing='mps'."
        )
    if mode == "mps" and instances:
        return f"the GPU is split into {len(instances)} MIG instances. Pass sharing='mig' to use them."
    if mode == "mps" and n_processes > MOST_CLIENTS:
        return f"n_processes is {n_processes}, MPS serves {MOST_CLIENTS} at most. Start fewer, with more environments."
    return missing() if mode == "mps" else ""


def _choose(device: torch.device, n_processes: int, instances: list[MigInstance]) -> Literal["none", "mps", "mig"]:
    """Return the mode that suits, and say why."""
    if not _is_shared(device, n_processes) or n_processes < 2:
        return "none"
    if device.index:
        why = "each worker would see one GPU, as cuda:0"
    elif instances:
        return "mig"
    elif daemon := running_daemon():
        why = f"an MPS daemon runs already ({daemon})"
    else:
        why = _lacking("mps", n_processes, instances)
        if not why:
            return "mps"
    _logger.info("RL_Batcher(sharing='auto') starts no MPS daemon: %s", why)
    return "none"
