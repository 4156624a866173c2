"""GPU sharing: the modes that this machine supports, and the environment variables and cores of worker processes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlstruct.batchers.workers import placement
from rlstruct.batchers.workers.placement import Mode, WorkerPlacement, check_sharing
from rlstruct.batchers.workers.processes import ENVIRONMENT_LOCK
from rlstruct.device import DeviceLike
from rlstruct.errors import BadValueError, SharingError, warn_user
from rlstruct.sharing.daemon import MOST_CLIENTS, Daemon, limited_to, mps, why_unavailable

_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"^\s+MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")
_SECONDS = 20.0  # nvidia-smi is slow on machines with eight GPUs and no persistence daemon

_logger = logging.getLogger("rlstruct.sharing")


@dataclass(frozen=True)
class MigInstance:
    """A partition of a GPU, with its own memory and multiprocessors."""

    uuid: str  # name in CUDA_VISIBLE_DEVICES
    profile: str  # size, such as ``"1g.10gb"``
    gpu: str  # UUID of the GPU


def gpus() -> list[str]:
    """Return the UUIDs of the GPUs that are visible to this process, in order, without initialising CUDA."""
    uuids = {match[1]: match[2] for line in _listing() if (match := _GPU.match(line))}
    if (tokens := _visible()) is None:
        return list(uuids.values())
    return [gpu for token in tokens for index, gpu in uuids.items() if token == index or gpu.startswith(token)]


def why_ambiguous(device: torch.device) -> str:
    """Return why `gpus` may list other GPUs than CUDA means by a number in the device or the environment, or ""."""
    tokens = _visible()
    by_number = device.index is not None if tokens is None else any(token.isdigit() for token in tokens)
    if not by_number or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return ""
    models = sorted({line.partition(": ")[2].partition(" (UUID")[0] for line in _listing() if _GPU.match(line)})
    if len(models) < 2:
        return ""
    number = str(device) if tokens is None else f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    return (
        f"this machine has GPUs of different models ({', '.join(models)}). CUDA numbers the fastest first, but "
        f"nvidia-smi goes by PCI addresses, so {number} may be another GPU there. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or "
        "give UUIDs in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists them)."
    )


def mig_instances() -> list[MigInstance]:
    """Return the MIG instances that are visible to this process, according to ``nvidia-smi``; none without it."""
    tokens = _visible()
    instances, index, gpu = [], "", ""
    for line in _listing():
        if match := _GPU.match(line):
            index, gpu = match.groups()
        elif match := _MIG.match(line):
            profile, uuid = match.groups()
            if tokens is None or any(t == index or gpu.startswith(t) or uuid.startswith(t) for t in tokens):
                instances.append(MigInstance(uuid, profile, gpu))
    return instances


def _listing() -> list[str]:
    """Return the lines of ``nvidia-smi -L``; none if it is not installed."""
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return run.stdout.splitlines()


def _visible() -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES, or None if all GPUs are visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if visible is None else [token.strip() for token in visible.split(",") if token.strip()]


def no_green_contexts() -> str:
    """Return the reason why one process cannot split a GPU into separate parts, or "" if it can."""
    if hasattr(getattr(torch.cuda, "green_contexts", None), "SMPartition"):
        return ""
    return (
        f"torch {torch.__version__} has no torch.cuda.green_contexts.SMPartition: its green contexts may share "
        "multiprocessors"
    )


def describe() -> list[str]:
    """Return lines of text about the modes of sharing on a machine with a GPU, and the recommended one."""
    instances = mig_instances()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    daemon = placement.running_daemon()
    rows = [("", f"CUDA_VISIBLE_DEVICES={visible}")] if visible is not None else []
    rows += [("MIG", f"{part.profile} {part.uuid}") for part in instances] or [("MIG", "no instances")]
    mps_state = why_unavailable() or "can be started"
    if daemon:
        mps_state = f"runs ({daemon}): all processes share the GPU at the same time already"
    if instances:
        mode = 'sharing="mig": one or more processes in each instance, kept apart in memory and speed'
    elif daemon:
        mode = 'sharing="none": the daemon that runs already does it'
    elif why_unavailable():
        mode = 'sharing="none": processes take turns'
    else:
        mode = 'sharing="mps": many processes with small networks at the same time'
    rows += [("MPS", mps_state), ("green contexts", no_green_contexts() or "disjoint ones can be made")]
    rows.append(("suits", "simulators of tensors, batched search: n_processes=0 with many environments"))
    rows.append(("", f"other environments: n_processes=k, {mode}"))
    return [f"{name:<15} {text}" for name, text in rows]


class GpuSharing(WorkerPlacement):
    """Environment variables and cores of k processes that share GPUs: workers of a batcher, or learners.

    Args:
        device: device of the processes; under MPS and MIG, the name by which each of them sees its GPU.
        n_processes: k.
        sharing: ``"none"``: taking turns; ``"mps"``: concurrently, under a private daemon; ``"mig"``: distributed over
            the existing MIG instances; ``"auto"``: MIG if there is an instance, else MPS, else none.
        thread_percentage: maximum share of the GPU's threads for one process under MPS.
        gpus: UUIDs of the GPUs over which processes are distributed, under MPS each with its own daemon. By default
            the device, and under MIG all visible instances.
        where: name of the caller, for messages.

    Attributes:
        mode: the chosen mode: ``"none"``, ``"mps"`` or ``"mig"``.
        cores: cores of each process, exclusive in this program, after the first one has started; empty if processes
            are not pinned.

    Raises:
        ValueError: the arguments contradict each other.
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
        check_sharing(where, sharing, thread_percentage)
        _check_device(where, device, n_processes, sharing)
        self._where, self._automatic, self._thread_percentage = where, sharing == "auto", thread_percentage
        self._is_client = "CUDA_MPS_PIPE_DIRECTORY" in os.environ and placement.running_daemon() is not None
        self._places: Sequence[DeviceLike] = gpus or [device]
        n_on_one = -(-n_processes // len(self._places))
        on_gpu = device.type == "cuda" and n_processes > 0
        instances = mig_instances() if on_gpu and sharing != "none" else []
        self._instances = [one for one in instances if not gpus or one.gpu in gpus]
        mode = sharing
        if sharing == "auto":
            mode = best_mode(where, device, n_on_one, self._instances)
        elif why_not := _lacking(sharing, n_on_one, self._instances):
            raise SharingError(f"{where}: sharing={sharing!r}: {why_not}")
        self._daemons: dict[DeviceLike, Daemon] = {}
        self._block = contextlib.ExitStack()  # keeps the daemons running
        super().__init__(device, n_processes, mode, n_gpus=len(self._places), where=where)

    def environment(self, worker: int) -> dict[str, str]:
        """Return additional environment variables of a worker. The first call starts the daemon."""
        if self.mode == "mig":
            return {"CUDA_VISIBLE_DEVICES": self._instances[worker % len(self._instances)].uuid}
        if self.mode == "none":
            return {}
        if self._is_client:  # its children are clients, too; those of a second daemon would take turns with them
            return limited_to(self._thread_percentage)
        place = self._places[worker % len(self._places)]
        try:
            if place not in self._daemons:
                self._daemons[place] = self._block.enter_context(mps(place))
        except SharingError as error:
            if not self._automatic:
                raise
            warn_user(f"{self._where}(sharing='auto'): processes take turns on the GPU. {error}")
            self.mode = "none"
            return {}
        return self._daemons[place].environment(self._thread_percentage)

    def join(self) -> None:
        """Give this process the environment variables of worker 0 for good, since CUDA reads them only once."""
        if self.mode == "none" or not cuda_in_use():
            with ENVIRONMENT_LOCK:  # another thread would undo this at the end of its block
                os.environ.update(self.environment(0))
            return
        why = (
            "this process uses CUDA already, so it can no longer get a share of a GPU. Train before anything else "
            "uses the GPU (torch.cuda.is_available() does, unless PYTORCH_NVML_BASED_CUDA_CHECK=1 is set)"
        )
        if not self._automatic:
            raise SharingError(f"{self._where}: sharing={self.mode!r}: {why}, or pass sharing='none'.")
        _logger.info("%s(sharing='auto') takes turns on the GPU: %s.", self._where, why)
        self.mode = "none"

    def close(self) -> None:
        """End the daemons and release the cores, after all workers have ended."""
        self._daemons.clear()
        self._block.close()
        super().close()


def cuda_in_use() -> bool:
    """Return True if any library of this process has initialised CUDA, and the driver has read the environment."""
    try:
        code: int = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except (OSError, AttributeError):  # there is no driver
        return False
    return code != 3  # CUDA_ERROR_NOT_INITIALIZED


def _check_device(where: str, device: torch.device, n_processes: int, sharing: str) -> None:
    """Raise ValueError for processes on a device that cannot be shared on any machine."""
    if sharing in ("none", "auto"):
        return
    if device.type != "cuda" or n_processes < 1:
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
    """Return the reason why this machine does not support a mode, or "" if it does."""
    if mode == "mig" and not instances:
        return (
            "this process sees no MIG instance, and creates none. Create one with nvidia-smi mig (as root), list it "
            "in CUDA_VISIBLE_DEVICES, or pass sharing='mps'."
        )
    if mode == "mps" and instances:
        return f"the GPU is split into {len(instances)} MIG instances. Pass sharing='mig' to use them."
    if mode == "mps" and n_processes > MOST_CLIENTS:
        return f"n_processes is {n_processes}, MPS serves {MOST_CLIENTS} at most. Start fewer, with more environments."
    return why_unavailable() if mode == "mps" else ""


def best_mode(where: str, device: torch.device, n_processes: int, instances: list[MigInstance]) -> Mode:
    """Return the best available mode, and log why it is not MPS."""
    if device.type != "cuda" or n_processes < 2:
        return "none"
    if device.index:
        why = "each worker would see one GPU, as cuda:0"
    elif instances:
        return "mig"
    elif daemon := placement.running_daemon():
        why = f"an MPS daemon runs already ({daemon})"
    else:
        why = _lacking("mps", n_processes, instances)
        if not why:
            return "mps"
    _logger.info("%s(sharing='auto') starts no MPS daemon: %s", where, why)
    return "none"
