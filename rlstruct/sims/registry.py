"""Simulators by name: `make("CartPole-v1", n_envs=4096, device="cuda:0")`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from rlstruct.errors import BadValueError
from rlstruct.sims.tensor_env import TensorEnv

SIMULATORS: dict[str, Callable[..., TensorEnv[Any]]] = {}
"""Simulators by name, called as ``create(n_envs, seed, **settings)``; `rlstruct.sims` lists its own. Add yours here."""

_ATARI = "ALE/"


def names() -> list[str]:
    """Return the names that `make` knows, except those of Atari games, which begin with ``ALE/``.

    >>> "CartPole-v1" in names()
    True
    """
    return list(SIMULATORS)


def knows(name: str) -> bool:
    """Return True if `make` knows a name, without importing ale-py.

    >>> knows("ALE/Pong-v5"), knows("Pong")
    (True, False)
    """
    return name in SIMULATORS or name.startswith(_ATARI)


def make(name: str, n_envs: int, seed: int = 0, **settings: Any) -> TensorEnv[Any]:  # noqa: ANN401 - passed on
    """Make a simulator by its name.

    Args:
        name: see `names`; or an Atari game such as ``"ALE/Breakout-v5"`` (extras ``warp`` and ``atari``).
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        settings: keyword arguments of the simulator, such as ``device``, ``backend``, ``time_limit``.

    >>> make("CartPole-v1", n_envs=3).n_envs()
    3
    """
    if name.startswith(_ATARI):
        atari: TensorEnv[Any] = importlib.import_module("rlstruct.sims.atari.env").Atari(name, n_envs, seed, **settings)
        return atari
    if name not in SIMULATORS:
        near = difflib.get_close_matches(name, SIMULATORS, 1, 0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise BadValueError(f"rlstruct.sims.make: no simulator {name!r}. There are {', '.join(SIMULATORS)}.{hint}")
    return SIMULATORS[name](n_envs, seed, **settings)
