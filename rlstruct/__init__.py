"""rlstruct: reinforcement-learning trajectories, collected fast on whatever device is there.

This page imports the structures and the contracts only. Environments are in `rlstruct.envs`, agents in
`rlstruct.agents`, batchers in `rlstruct.batchers`, algorithms in `rlstruct.algos`, device debugging in
`rlstruct.testing`.

Each name is imported when it is first asked for: torch takes a second, in which the command line can already answer.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_NAMES = {
    "core": ("DictTensor", "TemporalDictTensor", "Trajectories"),
    "device": ("resolve_device",),
    "errors": ("BatcherStateError", "DeviceMismatchError", "ShapeMismatchError", "WorkerError", "WorkerTimeout"),
    "functional.masks": ("masked_dicttensor", "masked_tensor"),
    "replay": ("replay_agent", "replay_agent_stateless"),
    "rl_agent": ("RL_Agent", "RL_Agent_CheckDevice"),
    "vec_env": ("DeviceEnv", "VecEnv"),
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("core", "device", "errors", "functional", "profile", "replay", "rl_agent", "vec_env")


if not TYPE_CHECKING:  # for them every name would exist

    def __getattr__(name: str) -> object:
        """Import a name of this page, or a module that it takes names from."""
        if name in _MODULES:
            return importlib.import_module(f"rlstruct.{name}")
        if name not in _PLACES:
            raise AttributeError(f"module 'rlstruct' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        found: object = getattr(importlib.import_module(f"rlstruct.{_PLACES[name]}"), name)
        globals()[name] = found  # from here on it costs nothing
        return found


def __dir__() -> list[str]:
    """List what can be asked for, imported or not."""
    return sorted({*globals(), *__all__})
