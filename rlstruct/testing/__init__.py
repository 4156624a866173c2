"""Find device mistakes on a laptop: simulated accelerator, host-sync guard, conformance kits. Layer 3."""

from rlstruct.testing.agent_conformance import check_agent
from rlstruct.testing.conformance import ConformanceError
from rlstruct.testing.fake_agents import FixedAgent, HistoryAgent, LinearAgent, RngAgent, StatefulAgent
from rlstruct.testing.fake_envs import (
    CountingEnv,
    FailingEnv,
    RandomEnv,
    SlowEnv,
    counting_length,
    create_counting_env,
    create_failing_env,
    create_slow_env,
)
from rlstruct.testing.host_sync import (
    HostSyncCount,
    HostSyncError,
    allow_host_sync,
    count_host_syncs,
    forbid_host_sync,
)
from rlstruct.testing.vec_env_conformance import check_vec_env

__all__ = [
    "ConformanceError",
    "CountingEnv",
    "FailingEnv",
    "FixedAgent",
    "HistoryAgent",
    "HostSyncCount",
    "HostSyncError",
    "LinearAgent",
    "RandomEnv",
    "RngAgent",
    "SlowEnv",
    "StatefulAgent",
    "allow_host_sync",
    "check_agent",
    "check_vec_env",
    "count_host_syncs",
    "counting_length",
    "create_counting_env",
    "create_failing_env",
    "create_slow_env",
    "forbid_host_sync",
]
