"""Sharing a GPU between processes: taking turns, concurrently under MPS, or in separate MIG instances."""

from rlstruct.errors import SharingError
from rlstruct.sharing.daemon import Daemon, mps
from rlstruct.sharing.gpu_sharing import GpuSharing, MigInstance, Mode, describe, gpus, mig_instances, no_green_contexts

Placement = GpuSharing  # its name in 0.2

__all__ = [
    "Daemon",
    "GpuSharing",
    "MigInstance",
    "Mode",
    "Placement",
    "SharingError",
    "describe",
    "gpus",
    "mig_instances",
    "mps",
    "no_green_contexts",
]
