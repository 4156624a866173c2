"""Tests for your own code: simulated accelerator, guards against host syncs and writes to batches, conformance kits."""

from rlstruct.testing.agent_conformance import check_agent
from rlstruct.testing.batch_writes import BatchWriteError, forbid_batch_writes
from rlstruct.testing.conformance import ConformanceError
from rlstruct.testing.host_sync import HostSyncCount, HostSyncError, allow_host_sync, count_host_syncs, forbid_host_sync
from rlstruct.testing.vec_env_conformance import check_vec_env

__all__ = [
    "BatchWriteError",
    "ConformanceError",
    "HostSyncCount",
    "HostSyncError",
    "allow_host_sync",
    "check_agent",
    "check_vec_env",
    "count_host_syncs",
    "forbid_batch_writes",
    "forbid_host_sync",
]
