"""Sharing a GPU between processes: in turns, at the same time under MPS, or apart in MIG instances."""

from rlstruct.errors import SharingError
from rlstruct.sharing.daemon import Daemon, mps
from rlstruct.sharing.placement import MigInstance, Mode, Placement, describe, mig_instances, no_green_contexts

__all__ = [
    "Daemon",
    "MigInstance",
    "Mode",
    "Placement",
    "SharingError",
    "describe",
    "mig_instances",
    "mps",
    "no_green_contexts",
]
