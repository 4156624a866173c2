"""Alias of `rlstruct_sharing`, the add-on with MPS and MIG."""

from rlstruct.addons import load

load("rlstruct_sharing", __name__)

from rlstruct_sharing import *  # noqa: E402, F403

__all__ = [  # noqa: F405
    "Daemon", "GpuSharing", "MigInstance", "Mode", "Placement", "SharingError", "describe", "gpus", "mig_instances",
    "mps", "no_green_contexts",
]  # fmt: skip
