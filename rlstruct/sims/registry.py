"""Simulators by name: `make("CartPole-v1", n_envs=4096, device="cuda:0")`."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from rlstruct.errors import BadValueError
from rlstruct.sims.tensor_env import TensorEnv

# Imported when asked for: gymnasium's names for the classics, and the module and class of each.
_SIMULATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "CartPole-v0": ("cart_pole", "CartPole", {"time_limit": 200}),
    "CartPole-v1": ("cart_pole", "CartPole", {}),
    "Pendulum-v1": ("pendulum", "Pendulum", {}),
    "Acrobot-v1": ("acrobot", "Acrobot", {}),
    "MountainCar-v0": ("mountain_car", "MountainCar", {}),
    "MountainCarContinuous-v0": ("mountain_car", "MountainCarContinuous", {}),
    "Breakout-MinAtar": ("breakout", "Breakout", {}),
    "Asterix-MinAtar": ("asterix", "Asterix", {}),
    "Freeway-MinAtar": ("freeway", "Freeway", {}),
    "Seaquest-MinAtar": ("seaquest", "Seaquest", {}),
    "SpaceInvaders-MinAtar": ("space_invaders", "SpaceInvaders", {}),
    "ConnectFour-v0": ("connect_four", "ConnectFour", {}),
}


_ATARI = "ALE/"


def names() -> list[str]:
    """Return the names that `make` knows, without those of Atari games, which begin with ``ALE/``.

    >>> "CartPole-v1" in names()
    True
    """
    return list(_SIMULATORS)


def knows(name: str) -> bool:
    """Return True if `make` knows a name, without importing ale-py.

    >>> knows("ALE/Pong-v5"), knows("Pong")
    (True, False)
    """
    return name in _SIMULATORS or name.startswith(_ATARI)


def make(name: str, n_envs: int, seed: int = 0, **settings: Any) -> TensorEnv[Any]:  # noqa: ANN401 - passed on
    """Make a simulator by its name.

    Args:
        name: see `names`; or an Atari game such as ``"ALE/Breakout-v5"`` (extras ``warp`` and ``atari``).
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        settings: keyword arguments of the simulator, such as ``device``, ``backend``, ``time_limit``.

    Returns:
        A VecEnv.

    Raises:
        ValueError: no simulator has this name; the message suggests the nearest.
        ImportError: an Atari game needs Warp and ale-py.

    >>> make("CartPole-v1", n_envs=3).n_envs()
    3
    """
    if name.startswith(_ATARI):
        atari: TensorEnv[Any] = importlib.import_module("rlstruct.sims.atari.env").Atari(name, n_envs, seed, **settings)
        return atari
    if name not in _SIMULATORS:
        near = difflib.get_close_matches(name, _SIMULATORS, 1, 0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise BadValueError(f"rlstruct.sims.make: no simulator {name!r}. There are {', '.join(_SIMULATORS)}.{hint}")
    module, cls, preset = _SIMULATORS[name]
    simulator = getattr(importlib.import_module(f"rlstruct.sims.{module}"), cls)
    made: TensorEnv[Any] = simulator(n_envs, seed, **{**preset, **settings})
    return made
