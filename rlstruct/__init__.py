"""rlstruct: reinforcement-learning trajectories, collected fast on any device.

Here are the structures (DictTensor, TemporalDictTensor, Trajectories), the contracts (VecEnv, RL_Agent), the errors,
and `load`, which returns a trained policy.
Environments are in `rlstruct.envs` and `rlstruct.sims`, agents in `rlstruct.agents`, RL_Batcher in `rlstruct.batchers`,
algorithms in `rlstruct.algos`, checks for your own classes in `rlstruct.testing`.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from rlstruct import renamed as _renamed  # puts the finder of old import paths in place

if _TYPE_CHECKING:
    from rlstruct.core import DictTensor as DictTensor
    from rlstruct.core import TemporalDictTensor as TemporalDictTensor
    from rlstruct.core import Trajectories as Trajectories
    from rlstruct.device import resolve_device as resolve_device
    from rlstruct.errors import BatcherStateError as BatcherStateError
    from rlstruct.errors import DeviceMismatchError as DeviceMismatchError
    from rlstruct.errors import ShapeMismatchError as ShapeMismatchError
    from rlstruct.errors import WorkerError as WorkerError
    from rlstruct.errors import WorkerTimeout as WorkerTimeout
    from rlstruct.functional.masks import masked_dicttensor as masked_dicttensor
    from rlstruct.functional.masks import masked_tensor as masked_tensor
    from rlstruct.policies import Policy as Policy
    from rlstruct.policies import export as export
    from rlstruct.policies import load as load
    from rlstruct.replay import replay_agent as replay_agent
    from rlstruct.replay import replay_agent_stateless as replay_agent_stateless
    from rlstruct.rl_agent import RL_Agent as RL_Agent
    from rlstruct.rl_agent import RL_Agent_CheckDevice as RL_Agent_CheckDevice
    from rlstruct.vec_env import DeviceEnv as DeviceEnv
    from rlstruct.vec_env import StepResult as StepResult
    from rlstruct.vec_env import VecEnv as VecEnv

__version__ = "0.3.0"

# Imported on first use: torch takes a second to import, and the command line often does not need it.
_NAMES = {
    "core": ("DictTensor", "TemporalDictTensor", "Trajectories"),
    "device": ("resolve_device",),
    "errors": ("BatcherStateError", "DeviceMismatchError", "ShapeMismatchError", "WorkerError", "WorkerTimeout"),
    "functional.masks": ("masked_dicttensor", "masked_tensor"),
    "policies": ("Policy", "export", "load"),
    "replay": ("replay_agent", "replay_agent_stateless"),
    "rl_agent": ("RL_Agent", "RL_Agent_CheckDevice"),
    "vec_env": ("DeviceEnv", "StepResult", "VecEnv"),
}
_PLACES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_PLACES)  # what `from rlstruct import *` brings in
_MODULES = ("core", "device", "errors", "functional", "policies", "profiling", "replay", "rl_agent", "vec_env")
_FOLDERS = (
    "batchers",
    "envs",
    "agents",
    "algos",
    "sims",
    "testing",
    "adapters",
    "search",
    "sharing",
    "atari",
)  # imported by name only


if not _TYPE_CHECKING:  # for them every name would exist

    def __getattr__(name: str) -> object:
        """Import a public name of this package or one of its modules; for other public names, say where they are."""
        import importlib

        if name in _MODULES:
            return importlib.import_module(f"rlstruct.{name}")
        if name in _PLACES:
            value: object = getattr(importlib.import_module(f"rlstruct.{_PLACES[name]}"), name)
            globals()[name] = value  # from here on it costs nothing
            return value
        for folder in () if name.startswith("_") or name in _FOLDERS else _FOLDERS:
            for there in (name, name.lower()):  # PPO is the module ppo
                if _exports(folder, there):  # `from rlstruct import` would replace the message of an AttributeError
                    fix = f"Write: from rlstruct.{folder} import {there}"
                    raise ImportError(f"{name!r} is not here. {fix}", name="rlstruct")
        if name in _renamed.NAMES["rlstruct"]:
            return _renamed.attributes(__name__)(name)
        fix = f". Write: import rlstruct.{name}" if name in _FOLDERS else ""
        raise AttributeError(f"module 'rlstruct' has no attribute {name!r}{fix}", name=name)


def _exports(folder: str, name: str) -> bool:
    """Return True if a package has a name in its ``__all__``; reads the file, since importing it takes long."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec(f"rlstruct.{folder}")
    return spec is not None and spec.origin is not None and f'"{name}"' in Path(spec.origin).read_text("utf-8")


def __dir__() -> list[str]:
    """List all available names, imported or not."""
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *_MODULES})
