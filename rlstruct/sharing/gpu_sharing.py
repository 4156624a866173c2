"""GPU sharing: the means that this machine has, and environment and cores of each worker process."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from rlstruct.device import DeviceLike
from rlstruct.errors import BadValueError, SharingError, warn_user
from rlstruct.options import Range
from rlstruct.sharing.daemon import MOST_CLIENTS, PERCENTAGE, Daemon, limited_to, missing, mps
from rlstruct.sharing.inheriting import inheriting

_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"^\s+MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")
_SECONDS = 20.0  # nvidia-smi is slow on a machine with eight GPUs and no persistence daemon


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU with its own memory and multiprocessors."""

    uuid: str  # its name in CUDA_VISIBLE_DEVICES
    profile: str  # its size, such as ``"1g.10gb"``
    gpu: str  # UUID of the GPU


def gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process may use, in their order; CUDA stays unused."""
    found = {match[1]: match[2] for line in _listing() if (match := _GPU.match(line))}
    if (tokens := _visible()) is None:
        return list(found.values())
    return [gpu for token in tokens for index, gpu in found.items() if token == index or gpu.startswith(token)]


def mig_instances() -> list[MigInstance]:
    """Return the MIG instances that this process may use, from ``nvidia-smi``; none where it is missing."""
    tokens = _visible()
    found, index, gpu = [], "", ""
    for line in _listing():
        if match := _GPU.match(line):
            index, gpu = match.groups()
        elif match := _MIG.match(line):
            profile, uuid = match.groups()
            if tokens is None or any(t == index or gpu.startswith(t) or uuid.startswith(t) for t in tokens):
                found.append(MigInstance(uuid, profile, gpu))
    return found


def _listing() -> list[str]:
    """Return the lines of ``nvidia-smi -L``, none where it is missing."""
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.splitlines()


def _visible() -> list[str] | None:
    """Return the words of CUDA_VISIBLE_DEVICES, None if all GPUs are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [token.strip() for token in visible.split(",") if token.strip()]


def running_daemon() -> Path | None:
    """Return the pipe directory of an MPS daemon that processes find by default, None if there is none."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return pipe if (pipe / "control").exists() else None


def no_green_contexts() -> str:
    """Return the reason why one process cannot split a GPU into separate parts, "" if it can."""
    if hasattr(getattr(torch.cuda, "green_contexts", None), "SMPartition"):
        return ""
    return (
        f"torch {torch.__version__} has no torch.cuda.green_contexts.SMPartition: its green contexts may share "
        "multiprocessors"
    )


def describe() -> list[str]:
    """Describe in lines of text the means of sharing, and the mode that suits, on a machine with a GPU."""
    instances = mig_instances()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    daemon = running_daemon()
    found = [("", f"CUDA_VISIBLE_DEVICES={visible}")] if visible is not None else []
    found += [("MIG", f"{part.profile} {part.uuid}") for part in instances] or [("MIG", "no instances")]
    mps_words = missing() or "can be started"
    suits = 'sharing="none": processes take turns'
    if instances:
        suits = 'sharing="mig": one or more processes in each instance, kept apart in memory and speed'
    elif not missing():
        suits = 'sharing="mps": many processes with small networks at the same time'
    if daemon:
        mps_words = f"runs ({daemon}): all processes share the GPU at the same time already"
        suits = suits if instances else 'sharing="none": the daemon that runs already does it'
    found += [("MPS", mps_words), ("green contexts", no_green_contexts() or "disjoint ones can be made")]
    found.append(("suits", "simulators of tensors, batched search: n_processes=0 with many environments"))
    found.append(("", f"other environments: n_processes=k, {suits}"))
    return [f"{name:<15} {words}" for name, words in found]


Mode = Literal["none", "mps", "mig", "auto"]

_logger = logging.getLogger(__name__)
_taken: set[int] = set()  # cores taken by open instances in this process


class GpuSharing:
    """Environment variables and cores of k processes that share GPUs: workers of a batcher on one, or learners.

    Args:
        device: of the processes, as which each sees the one GPU that it gets.
        n_processes: k.
        sharing: ``"none"``: in turns; ``"mps"``: at the same time, under a private daemon; ``"mig"``: in the existing
            MIG instances, one after the other; ``"auto"``: MIG if there is one, else MPS, else none.
        thread_percentage: most of the GPU's threads that one process gets under MPS.
        gpus: UUIDs of GPUs, over which the processes are spread; under MPS in turn, each with its own daemon.
            Without any it is the device, and under MIG all visible instances.
        where: name of the caller, in messages.

    Attributes:
        mode: the chosen mode: ``"none"``, ``"mps"`` or ``"mig"``.
        cores: of each process, which no other instance in this program has, once the first one starts; empty if
            processes are not pinned.

    Raises:
        ValueError: the arguments do not fit together.
        SharingError: this machine lacks what ``"mps"`` or ``"mig"`` needs.
    """

    def __init__(
        self,
        device: torch.device,
        n_processes: int,
        sharing: Mode = "none",
        thread_percentage: float | None = None,
        *,
        gpus: Sequence[str] = (),
        where: str = "RL_Batcher",
    ) -> None:
        _check(where, device, n_processes, sharing, thread_percentage)
        self._where = where
        self._is_client = "CUDA_MPS_PIPE_DIRECTORY" in os.environ and running_daemon() is not None
        self._places: Sequence[DeviceLike] = gpus or [device]
        n_on_one = -(-n_processes // len(self._places))
        together = _is_shared(device, n_processes) and n_processes > 1
        instances = mig_instances() if sharing != "none" and _is_shared(device, n_processes) else []
        instances = [one for one in instances if not gpus or one.gpu in gpus]
        self.mode = _choose(where, device, n_on_one, instances) if sharing == "auto" else sharing
        if sharing != "auto" and (why_not := _lacking(self.mode, n_on_one, instances)):
            raise SharingError(f"{where}: sharing={self.mode!r}: {why_not}")
        self.cores: list[set[int]] = []
        self._n_to_pin = n_processes if together else 0
        self._automatic, self._thread_percentage = sharing == "auto", thread_percentage
        self._instances = instances
        self._daemons: dict[DeviceLike, Daemon] = {}
        self._block = contextlib.ExitStack()  # the daemons'
        if together and self.mode == "none" and running_daemon() is None:
            warn_user(
                f"{where}: {n_processes} processes on {device} open {n_processes} CUDA contexts, 300 to 700 MB of "
                "GPU memory each, and share the GPU in turns. One process with more environments is usually faster; "
                "sharing='auto' lets processes use the GPU at the same time where that is possible.",
            )

    @contextlib.contextmanager
    def starting(self, worker: int) -> Iterator[None]:
        """Start workers inside: they inherit the environment and cores of worker number ``worker``."""
        with inheriting(self.environment(worker)):
            if self._n_to_pin:
                self.cores, self._n_to_pin = take_cores(self._n_to_pin), 0
            cores = os.sched_getaffinity(0) if self.cores else set()
            try:
                if self.cores:
                    os.sched_setaffinity(0, self.cores[worker])  # of this thread, and of what it starts
                yield
            except BaseException:
                self.close()
                raise
            finally:
                if cores:
                    os.sched_setaffinity(0, cores)

    def environment(self, worker: int) -> dict[str, str]:
        """Return the environment variables of a worker, {} for none. The first call starts the daemon."""
        if self.mode == "mig":
            return {"CUDA_VISIBLE_DEVICES": self._instances[worker % len(self._instances)].uuid}
        if self.mode == "none":
            return {}
        if self._is_client:  # as which its children start, too: a second daemon would only take turns with the first
            return limited_to(self._thread_percentage)
        place = self._places[worker % len(self._places)]
        try:
            if place not in self._daemons:
                self._daemons[place] = self._block.enter_context(mps(place))
        except SharingError as error:
            if not self._automatic:
                raise
            warn_user(f"{self._where}(sharing='auto'): processes share the GPU in turns. {error}")
            self.mode = "none"
            return {}
        return self._daemons[place].environment(self._thread_percentage)

    def join(self) -> None:
        """Give this process the environment of worker 0, for life: CUDA reads it once, and a daemon outlives that."""
        if self.mode == "none" or not _cuda_in_use():
            os.environ.update(self.environment(0))
            return
        why = (
            "this process uses CUDA already, and can get no share of a GPU any more. Train before anything else uses "
            "the GPU (torch.cuda.is_available() does, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set)"
        )
        if not self._automatic:
            raise SharingError(f"{self._where}: sharing={self.mode!r}: {why}, or pass sharing='none'.")
        _logger.info("%s(sharing='auto') shares the GPU in turns: %s.", self._where, why)
        self.mode = "none"

    def close(self) -> None:
        """End the daemons and release the cores, after all workers have ended."""
        self._daemons.clear()
        self._block.close()
        _taken.difference_update(*self.cores)
        self.cores = []


def take_cores(n_processes: int) -> list[set[int]]:
    """Give each process its own core, of those that this process may use and no other instance has taken.

    A worker computes in one thread. The remaining cores are for the learner and the next batcher. The result is empty
    if there are too few cores, or the system cannot pin processes.
    """
    cores = sorted(os.sched_getaffinity(0) - _taken) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < n_processes:
        return []
    _taken.update(cores[:n_processes])
    return [{core} for core in cores[:n_processes]]


def _cuda_in_use() -> bool:
    """Return True if the driver has read this process's environment, by whichever library."""
    try:
        code: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # there is no driver
        return False
    return code != 3  # CUDA_ERROR_NOT_INITIALIZED


def _is_shared(device: torch.device, n_processes: int) -> bool:
    return device.type == "cuda" and n_processes > 0


def _check(where: str, device: torch.device, n_processes: int, sharing: str, thread_percentage: float | None) -> None:
    """Raise ValueError for arguments that do not fit together on any machine."""
    Range(choices=get_args(Mode)).check(where, "sharing", sharing)
    PERCENTAGE.check(where, "thread_percentage", thread_percentage)
    if thread_percentage is not None and sharing not in ("mps", "auto"):
        raise BadValueError(
            f"{where}: thread_percentage is {thread_percentage:g} with sharing={sharing!r}, but only MPS limits "
            "threads. Pass sharing='mps', or leave it out."
        )
    if sharing in ("none", "auto"):
        return
    if not _is_shared(device, n_processes):
        raise BadValueError(
            f"{where}: sharing={sharing!r} with device={str(device)!r} and n_processes={n_processes}, expected "
            "worker processes on a GPU. Pass device='cuda:0' and n_processes=2 or more, or sharing='none'."
        )
    if device.index:
        raise BadValueError(
            f"{where}: sharing={sharing!r} with device={str(device)!r}: each worker sees one GPU, as cuda:0. Start "
            f"the program with CUDA_VISIBLE_DEVICES={device.index} and pass device='cuda:0', or pass sharing='none'."
        )


def _lacking(mode: str, n_processes: int, instances: list[MigInstance]) -> str:
    """Return the reason why this machine cannot have a mode, "" if it can."""
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


def _choose(
    where: str, device: torch.device, n_processes: int, instances: list[MigInstance]
) -> Literal["none", "mps", "mig"]:
    """Return the mode that suits, and log the reason."""
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
    _logger.info("%s(sharing='auto') starts no MPS daemon: %s", where, why)
    return "none"
