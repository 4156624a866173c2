"""Pendulum on any device: the swing-up task of gymnasium's Pendulum-v1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstruct.functional.random import symmetric_uniform
from rlstruct.sims.state import columns
from rlstruct.sims.tensor_env import TensorEnv, box

MAX_SPEED, MAX_TORQUE = 8.0, 2.0  # rad/s, N m
STEP, GRAVITY, MASS, LENGTH = 0.05, 10.0, 1.0, 1.0  # s, m/s^2, kg, m


@dataclass(frozen=True)
class PendulumState:
    """Angles and velocities of pendulums, [B] float each."""

    theta: Tensor  # from upright, rad, not wrapped
    theta_dot: Tensor  # rad/s


class Pendulum(TensorEnv[PendulumState]):
    """Swing a pendulum up and hold it there with a torque in [-2, 2] N m. As Pendulum-v1; never terminates."""

    action_space = box([-MAX_TORQUE], [MAX_TORQUE])
    observation_space = box([-1, -1, -MAX_SPEED], [1, 1, MAX_SPEED])
    stochastic: ClassVar[bool] = False
    default_time_limit: ClassVar[int | None] = 200

    def initial(self, key: Tensor) -> PendulumState:
        """Draw the angle from [-pi, pi), the velocity from [-1, 1)."""
        theta, theta_dot = symmetric_uniform(key, 2, 1.0, self.dtype, stream=0)
        return PendulumState(theta * math.pi, theta_dot)

    def transition(self, state: PendulumState, action: Tensor, key: Tensor) -> tuple[PendulumState, Tensor, Tensor]:
        """Swing for one step; the reward is minus the cost of the angle, velocity and torque before it."""
        theta, theta_dot = state.theta, state.theta_dot
        torque = action.squeeze(1).to(self.dtype)
        upright = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi  # [-pi, pi)
        cost = upright.square() + 0.1 * theta_dot.square() + 0.001 * torque.square()
        acceleration = 3 * GRAVITY / (2 * LENGTH) * torch.sin(theta) + 3 / (MASS * LENGTH**2) * torque
        theta_dot = (theta_dot + acceleration * STEP).clamp(-MAX_SPEED, MAX_SPEED)
        moved = PendulumState(theta + theta_dot * STEP, theta_dot)
        return moved, -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: PendulumState) -> Tensor:
        """Show cosine and sine of the angle, and the velocity, [B, 3]."""
        return columns(torch.cos(state.theta), torch.sin(state.theta), state.theta_dot)
