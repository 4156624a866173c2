"""Sharing a GPU between processes, concurrently under MPS or in separate MIG instances, and `tune`.

`tune` searches for the fastest number of workers, environments and steps on this machine.
"""

from rlstruct.batchers.workers.placement import Mode
from rlstruct.errors import SharingError
from rlstruct_sharing.daemon import Daemon, mps
from rlstruct_sharing.gpu_sharing import GpuSharing, MigInstance, describe, gpus, mig_instances, no_green_contexts
from rlstruct_sharing.tuning.tune import Tuning, tune

Placement = GpuSharing  # its name in 0.2

__all__ = [
    "Daemon",
    "GpuSharing",
    "MigInstance",
    "Mode",
    "Placement",
    "SharingError",
    "Tuning",
    "describe",
    "gpus",
    "mig_instances",
    "mps",
    "no_green_contexts",
    "tune",
]
