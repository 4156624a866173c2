"""Sharing a GPU between processes, concurrently under MPS or in separate MIG instances, and `tune`.

`tune` searches for the fastest number of workers, environments and steps on this machine.
"""

from rlstruct import renamed
from rlstruct.algos.distributed.roles import Role, launch_roles
from rlstruct.batchers.workers.placement import Mode
from rlstruct.errors import SharingError
from rlstruct.sharing.daemon import Daemon, mps
from rlstruct.sharing.gpu_sharing import GpuSharing, MigInstance, describe, gpus, mig_instances, no_green_contexts
from rlstruct.sharing.tuning.tune import Tuning, tune

__getattr__ = renamed.attributes(__name__)

__all__ = [
    "Daemon",
    "GpuSharing",
    "MigInstance",
    "Mode",
    "Role",
    "SharingError",
    "Tuning",
    "describe",
    "gpus",
    "launch_roles",
    "mig_instances",
    "mps",
    "no_green_contexts",
    "tune",
]
