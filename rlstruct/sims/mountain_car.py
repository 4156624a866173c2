"""MountainCar with three actions or a continuous one, on any device.

Moore, "Efficient memory-based learning for robot control", PhD thesis, Cambridge 1990, as gymnasium's MountainCar-v0
and MountainCarContinuous-v0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.functional.random import uniform
from rlstruct.sims.state import columns
from rlstruct.sims.tensor_env import TensorEnv, box

MIN_X, MAX_X, MAX_SPEED = -1.2, 0.6, 0.07
GRAVITY, FORCE, GOAL = 0.0025, 0.001, 0.5
POWER, CONTINUOUS_GOAL = 0.0015, 0.45


@dataclass(frozen=True)
class MountainCarState:
    """Positions and velocities of cars, [B] float each."""

    x: Tensor  # in [-1.2, 0.6]
    x_dot: Tensor  # in [-0.07, 0.07]


class _MountainCar(TensorEnv[MountainCarState]):
    """Physics and observations for both kinds of actions."""

    observation_space = box([MIN_X, -MAX_SPEED], [MAX_X, MAX_SPEED])
    stochastic: ClassVar[bool] = False

    def initial(self, key: Tensor) -> MountainCarState:
        """Draw the position from [-0.6, -0.4); cars start at rest."""
        x = uniform(key, stream=0).to(self.dtype).mul_(0.2).sub_(0.6)
        return MountainCarState(x, torch.zeros_like(x))

    def observe(self, state: MountainCarState) -> Tensor:
        """Show the state, [B, 2]."""
        return columns(state.x, state.x_dot)

    def _roll(self, state: MountainCarState, push: Tensor) -> MountainCarState:
        """Roll for one step; a car that hits the left wall stops."""
        x_dot = (state.x_dot + push - GRAVITY * torch.cos(3 * state.x)).clamp(-MAX_SPEED, MAX_SPEED)
        x = (state.x + x_dot).clamp(MIN_X, MAX_X)
        stopped = (x == MIN_X) & (x_dot < 0)
        return MountainCarState(x, x_dot.masked_fill(stopped, 0))


class MountainCar(_MountainCar):
    """Drive up a hill that is too steep: left (0), nothing (1), right (2); reward -1 per step. As MountainCar-v0."""

    action_space = spaces.Discrete(3)
    default_time_limit: ClassVar[int | None] = 200
    kernel_module: ClassVar[str] = "rlstruct.sims.mountain_car_kernel"

    def transition(
        self, state: MountainCarState, action: Tensor, key: Tensor
    ) -> tuple[MountainCarState, Tensor, Tensor]:
        """Push and roll; terminate on top of the hill, unless the car rolls back."""
        moved = self._roll(state, (action - 1).to(self.dtype) * FORCE)
        return moved, -torch.ones_like(moved.x), (moved.x >= GOAL) & (moved.x_dot >= 0)


class MountainCarContinuous(_MountainCar):
    """Drive up a hill that is too steep, with a force in [-1, 1]; reward 100 at the top, minus the work done.

    As MountainCarContinuous-v0.
    """

    action_space = box([-1.0], [1.0])
    default_time_limit: ClassVar[int | None] = 999

    def transition(
        self, state: MountainCarState, action: Tensor, key: Tensor
    ) -> tuple[MountainCarState, Tensor, Tensor]:
        """Push and roll; terminate on top of the hill, unless the car rolls back."""
        force = action.squeeze(1).to(self.dtype)
        moved = self._roll(state, force * POWER)
        terminated = (moved.x >= CONTINUOUS_GOAL) & (moved.x_dot >= 0)
        return moved, terminated * 100.0 - 0.1 * force.square(), terminated
