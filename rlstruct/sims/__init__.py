"""Simulators whose whole state is tensors, on any torch device, and the base to write your own."""

from functools import partial

from rlstruct.sims._state import columns
from rlstruct.sims.acrobot import Acrobot, AcrobotState
from rlstruct.sims.asterix import Asterix, AsterixState
from rlstruct.sims.breakout import Breakout, BreakoutState
from rlstruct.sims.cart_pole import CartPole, CartPoleState
from rlstruct.sims.connect_four import ConnectFour, ConnectFourState
from rlstruct.sims.freeway import Freeway, FreewayState
from rlstruct.sims.mountain_car import MountainCar, MountainCarContinuous, MountainCarState
from rlstruct.sims.pendulum import Pendulum, PendulumState
from rlstruct.sims.registry import SIMULATORS, knows, make, names
from rlstruct.sims.seaquest import Seaquest, SeaquestState
from rlstruct.sims.space_invaders import SpaceInvaders, SpaceInvadersState
from rlstruct.sims.tensor_env import TensorEnv

SIMULATORS |= {
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
}

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
