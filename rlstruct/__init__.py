"""rlstruct: reinforcement-learning trajectories, collected fast on whatever device is there.

This page imports the structures and the contracts only. Environments are in `rlstruct.envs`, agents in
`rlstruct.agents`, batchers in `rlstruct.batchers`, algorithms in `rlstruct.algos`, device debugging in
`rlstruct.testing`.
"""

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.device import resolve_device
from rlstruct.errors import (
    BatcherStateError,
    DeviceMismatchError,
    ShapeMismatchError,
    WorkerError,
    WorkerTimeout,
)
from rlstruct.functional.masks import masked_dicttensor, masked_tensor
from rlstruct.replay import replay_agent, replay_agent_stateless
from rlstruct.rl_agent import RL_Agent, RL_Agent_CheckDevice
from rlstruct.vec_env import DeviceEnv, VecEnv

__version__ = "0.1.0"

__all__ = [
    "BatcherStateError",
    "DeviceEnv",
    "DeviceMismatchError",
    "DictTensor",
    "RL_Agent",
    "RL_Agent_CheckDevice",
    "ShapeMismatchError",
    "TemporalDictTensor",
    "Trajectories",
    "VecEnv",
    "WorkerError",
    "WorkerTimeout",
    "masked_dicttensor",
    "masked_tensor",
    "replay_agent",
    "replay_agent_stateless",
    "resolve_device",
]
