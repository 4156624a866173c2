"""Acrobot on any device.

Sutton, "Generalization in reinforcement learning: successful examples using sparse coarse coding", NeurIPS 1996, with
the equations of Sutton and Barto's book, as gymnasium's Acrobot-v1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.functional.random import symmetric_uniform
from rlstruct.sims.state import columns, euler_step
from rlstruct.sims.tensor_env import TensorEnv, box

STEP, GRAVITY = 0.2, 9.8  # s, m/s^2
LENGTH, CENTRE, MASS, INERTIA = 1.0, 0.5, 1.0, 1.0  # of both links: m, m, kg, kg m^2
MAX_SPEED_1, MAX_SPEED_2 = 4 * math.pi, 9 * math.pi  # rad/s

# Constant parts of the equations of motion
D1, D2 = MASS * (CENTRE**2 + LENGTH**2 + CENTRE**2) + 2 * INERTIA, MASS * CENTRE**2 + INERTIA
COUPLING = MASS * LENGTH * CENTRE
WEIGHT_1, WEIGHT_2 = (MASS * CENTRE + MASS * LENGTH) * GRAVITY, MASS * CENTRE * GRAVITY


@dataclass(frozen=True)
class AcrobotState:
    """Angles and velocities of the two links, [B] float each."""

    theta1: Tensor  # of the first link from hanging down, rad, in [-pi, pi]
    theta2: Tensor  # of the second link to the first, rad, in [-pi, pi]
    theta1_dot: Tensor  # rad/s
    theta2_dot: Tensor  # rad/s


class Acrobot(TensorEnv[AcrobotState]):
    """Swing two links up with a torque of -1, 0 or 1 N m at the joint between them; reward -1 per step until then."""

    action_space = spaces.Discrete(3)
    observation_space = box([-1, -1, -1, -1, -MAX_SPEED_1, -MAX_SPEED_2], [1, 1, 1, 1, MAX_SPEED_1, MAX_SPEED_2])
    stochastic: ClassVar[bool] = False
    default_time_limit: ClassVar[int | None] = 500
    kernel_module: ClassVar[str] = "rlstruct.sims.acrobot_kernel"

    def initial(self, key: Tensor) -> AcrobotState:
        """Draw all four numbers from [-0.1, 0.1)."""
        return AcrobotState(*symmetric_uniform(key, 4, 0.1, self.dtype, stream=0))

    def transition(self, state: AcrobotState, action: Tensor, key: Tensor) -> tuple[AcrobotState, Tensor, Tensor]:
        """Take one step of the fourth-order Runge-Kutta method; terminate where the tip is high enough."""
        y0 = (state.theta1, state.theta2, state.theta1_dot, state.theta2_dot)
        torque = (action - 1).to(self.dtype)
        k1 = _derivative(y0, torque)
        k2 = _derivative(euler_step(y0, k1, STEP / 2), torque)
        k3 = _derivative(euler_step(y0, k2, STEP / 2), torque)
        k4 = _derivative(euler_step(y0, k3, STEP), torque)
        slopes = [a + 2 * b + 2 * c + d for a, b, c, d in zip(k1, k2, k3, k4, strict=True)]
        theta1, theta2, theta1_dot, theta2_dot = (y + STEP / 6 * k for y, k in zip(y0, slopes, strict=True))
        moved = AcrobotState(
            _wrap(theta1),
            _wrap(theta2),
            theta1_dot.clamp(-MAX_SPEED_1, MAX_SPEED_1),
            theta2_dot.clamp(-MAX_SPEED_2, MAX_SPEED_2),
        )
        terminated = -torch.cos(moved.theta1) - torch.cos(moved.theta2 + moved.theta1) > 1.0
        return moved, terminated.to(self.dtype) - 1, terminated

    def observe(self, state: AcrobotState) -> Tensor:
        """Show cosine and sine of both angles, and the velocities, [B, 6]."""
        angles = (f(angle) for angle in (state.theta1, state.theta2) for f in (torch.cos, torch.sin))
        return columns(*angles, state.theta1_dot, state.theta2_dot)


def _derivative(y: Sequence[Tensor], torque: Tensor) -> tuple[Tensor, ...]:
    """Return the time derivative of angles and velocities."""
    theta1, theta2, theta1_dot, theta2_dot = y
    cos2, sin2 = torch.cos(theta2), torch.sin(theta2)
    d1 = D1 + 2 * COUPLING * cos2
    d2 = D2 + COUPLING * cos2
    phi2 = WEIGHT_2 * torch.sin(theta1 + theta2)  # in the book, cos(angle - pi / 2)
    phi1 = -COUPLING * theta2_dot * (theta2_dot + 2 * theta1_dot) * sin2 + WEIGHT_1 * torch.sin(theta1) + phi2
    pull = torque + d2 / d1 * phi1 - COUPLING * theta1_dot.square() * sin2 - phi2
    theta2_acc = pull / (D2 - d2.square() / d1)
    theta1_acc = -(d2 * theta2_acc + phi1) / d1
    return theta1_dot, theta2_dot, theta1_acc, theta2_acc


def _wrap(angle: Tensor) -> Tensor:
    """Wrap angles into [-pi, pi]. Speeds are bounded, so two turns are enough."""
    turned = angle
    for _ in range(2):
        turned = turned - (2 * math.pi) * ((turned > math.pi).to(angle.dtype) - (turned < -math.pi).to(angle.dtype))
    return turned
