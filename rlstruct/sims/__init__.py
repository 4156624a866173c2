"""Simulators whose whole state is tensors, on any torch device, and the base class for your own."""

from collections.abc import Callable
from functools import partial
from typing import Any

from rlstruct.errors import BadValueError
from rlstruct.options import nearest
from rlstruct.registry import Registry
from rlstruct.sims.acrobot import Acrobot, AcrobotState
from rlstruct.sims.asterix import Asterix, AsterixState
from rlstruct.sims.breakout import Breakout, BreakoutState
from rlstruct.sims.cart_pole import CartPole, CartPoleState
from rlstruct.sims.connect_four import ConnectFour, ConnectFourState
from rlstruct.sims.freeway import Freeway, FreewayState
from rlstruct.sims.mountain_car import MountainCar, MountainCarContinuous, MountainCarState
from rlstruct.sims.pendulum import Pendulum, PendulumState
from rlstruct.sims.seaquest import Seaquest, SeaquestState
from rlstruct.sims.space_invaders import SpaceInvaders, SpaceInvadersState
from rlstruct.sims.state import columns
from rlstruct.sims.tensor_env import TensorEnv

SIMULATORS: Registry[str, Callable[..., TensorEnv[Any]]] = Registry({
    "CartPole-v0": partial(CartPole, time_limit=200),
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
    "Breakout-MinAtar": Breakout,
    "Asterix-MinAtar": Asterix,
    "Freeway-MinAtar": Freeway,
    "Seaquest-MinAtar": Seaquest,
    "SpaceInvaders-MinAtar": SpaceInvaders,
    "ConnectFour-v0": ConnectFour,
})  # fmt: skip
"""Simulators by name, called as ``create(n_envs, seed, **settings)``. Add yours here."""

FAMILIES: Registry[str, Callable[..., TensorEnv[Any]]] = Registry({"ALE/": "rlstruct.atari:Atari"})
"""Simulators of many games by the prefix of their names, called as ``create(name, n_envs, seed, **settings)``."""

__all__ = [
    "SIMULATORS",
    "Acrobot",
    "AcrobotState",
    "Asterix",
    "AsterixState",
    "Breakout",
    "BreakoutState",
    "CartPole",
    "CartPoleState",
    "ConnectFour",
    "ConnectFourState",
    "Freeway",
    "FreewayState",
    "MountainCar",
    "MountainCarContinuous",
    "MountainCarState",
    "Pendulum",
    "PendulumState",
    "Seaquest",
    "SeaquestState",
    "SpaceInvaders",
    "SpaceInvadersState",
    "TensorEnv",
    "columns",
    "knows",
    "make",
    "names",
]


def names() -> list[str]:
    """Return the names that `make` knows, except those of `FAMILIES`.

    >>> "CartPole-v1" in names()
    True
    """
    return list(SIMULATORS)


def knows(name: str) -> bool:
    """Return True if `make` knows a name, without importing ale-py.

    >>> knows("ALE/Pong-v5"), knows("Pong")
    (True, False)
    """
    return name in SIMULATORS or name.startswith(tuple(FAMILIES))


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
    for prefix in FAMILIES:
        if name.startswith(prefix):
            return FAMILIES[prefix](name, n_envs, seed, **settings)
    if name not in SIMULATORS:
        choices = f"There are {', '.join(SIMULATORS)}.{nearest(name, SIMULATORS)}"
        raise BadValueError(f"rlstruct.sims.make: no simulator {name!r}. {choices}")
    return SIMULATORS[name](n_envs, seed, **settings)
