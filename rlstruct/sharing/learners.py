"""Shares of GPUs for the learners of a training, and for processes with roles."""

from __future__ import annotations

import logging
from multiprocessing import parent_process

import torch

from rlstruct.algos.distributed.launch import Rendezvous
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers.workers.placement import Mode, WorkerPlacement
from rlstruct.errors import LearnerError, SharingError
from rlstruct.sharing.gpu_sharing import GpuSharing, gpus, why_ambiguous

_logger = logging.getLogger("rlstruct.sharing")

# Kept for the life of the process, which can join one only.
JOINED: dict[tuple[str, Mode, float | None], GpuSharing] = {}
"""Shares of GPUs that this process has joined, by device, mode and thread percentage."""


def share_gpus(config: TrainingConfig) -> GpuSharing | None:
    """Give this process rank 0's share of a GPU, before anything here uses CUDA.

    Returns the shares of all learners; ``learner_device="cuda"`` spreads them over all visible GPUs. None in a learner
    that another process has started.
    """
    name = type(config).__name__
    if Rendezvous.from_environment() is not None:
        if parent_process() is None and not config.n_processes:
            raise LearnerError(
                f"{name}: sharing is {config.sharing!r}, but torchrun has started the learners, and only those of "
                "n_learners get shares. Pass sharing='none', and start torchrun as a client: "
                "with mps() as daemon: subprocess.run(['torchrun', …], env=os.environ | daemon.environment(25)); "
                "mps is in rlstruct.sharing."
            )
        return None
    asked = config.learner_device, config.sharing, config.thread_percentage
    if asked not in JOINED:
        device = torch.device(config.learner_device)
        sharing = _shares(device, config.n_learners, *asked[1:], where=name)
        sharing.join()
        JOINED[asked] = sharing
    return JOINED[asked]


def place_roles(
    device: torch.device, n_processes: int, sharing: Mode, thread_percentage: float | None
) -> WorkerPlacement:
    """Return the shares of processes that `rlstruct.sharing.launch_roles` starts, spread as those of learners are."""
    return _shares(device, n_processes, sharing, thread_percentage, where="launch_roles")


def _shares(
    device: torch.device, n_processes: int, sharing: Mode, thread_percentage: float | None, where: str
) -> GpuSharing:
    """Return shares of all visible GPUs for a device without a number, otherwise of the first one."""
    if sharing != "none" and (why := why_ambiguous(device)):
        if sharing != "auto":
            raise SharingError(f"{where}: sharing={sharing!r}: {why}")
        _logger.info("%s(sharing='auto') takes turns on the GPU: %s", where, why)
        sharing = "none"
    chosen = gpus()[: None if device.index is None else 1] if device.type == "cuda" else []
    return GpuSharing(device, n_processes, sharing, thread_percentage, gpus=chosen, where=where)
