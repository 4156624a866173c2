"""Pendulum on any device. Part of rlstruct.sims. The swing-up task as gymnasium's Pendulum-v1 poses it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlstruct.device import DeviceLike
from rlstruct.functional.random import symmetric_uniform
from rlstruct.sims._spaces import box
from rlstruct.sims._state import columns
from rlstruct.sims.tensor_env import Backend, TensorEnv

if TYPE_CHECKING:
    from rlstruct.sims.kernels import GameKernel

MAX_SPEED, MAX_TORQUE = 8.0, 2.0  # rad/s, N m
STEP, GRAVITY, MASS, LENGTH = 0.05, 10.0, 1.0, 1.0  # s, m/s^2, kg, m


@dataclass(frozen=True)
class PendulumState:
    """Where pendulums are.

    Attributes:
        theta: angle from upright, rad, not wrapped.  [B] float
        theta_dot: its velocity, rad/s.               [B] float
    """

    theta: Tensor
    theta_dot: Tensor


class Pendulum(TensorEnv[PendulumState]):
    """Swing a pendulum up and hold it there with a torque in [-2, 2] N m. As Pendulum-v1; never terminates.

    Args:
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        device: where everything lives.
        dtype: of the state and the frames.
        auto_reset: see `TensorEnv`.
        time_limit: see `TensorEnv`.
        backend: see `TensorEnv`.
    """

    shortest_episode: ClassVar[int] = 64  # only the time limit ends one
    stochastic: ClassVar[bool] = False

    def __init__(
        self,
        n_envs: int,
        seed: int = 0,
        *,
        device: DeviceLike = "cpu",
        dtype: torch.dtype = torch.float32,
        auto_reset: bool = True,
        time_limit: int | None = 200,
        backend: Backend = "torch",
    ) -> None:
        """Make the environments."""
        self.action_space = box([-MAX_TORQUE], [MAX_TORQUE], torch.float32)
        self.observation_space = box([-1.0, -1.0, -MAX_SPEED], [1.0, 1.0, MAX_SPEED], dtype)
        self.dtype = dtype
        super().__init__(n_envs, seed, device=device, auto_reset=auto_reset, time_limit=time_limit, backend=backend)

    def initial(self, key: Tensor) -> PendulumState:
        """Draw the angle from [-pi, pi), the velocity from [-1, 1)."""
        theta, theta_dot = symmetric_uniform(key, 2, 1.0, self.dtype)
        return PendulumState(theta * math.pi, theta_dot)

    def transition(self, state: PendulumState, action: Tensor, key: Tensor) -> tuple[PendulumState, Tensor, Tensor]:
        """Turn for one step; the cost is that of the angle, velocity and torque before it."""
        theta, theta_dot = state.theta, state.theta_dot
        torque = action.squeeze(1).to(self.dtype).clamp(-MAX_TORQUE, MAX_TORQUE)
        upright = torch.remainder(theta + math.pi, 2 * math.pi) - math.pi  # [-pi, pi)
        cost = upright.square() + 0.1 * theta_dot.square() + 0.001 * torque.square()
        acceleration = 3 * GRAVITY / (2 * LENGTH) * torch.sin(theta) + 3 / (MASS * LENGTH**2) * torque
        theta_dot = (theta_dot + acceleration * STEP).clamp(-MAX_SPEED, MAX_SPEED)
        moved = PendulumState(theta + theta_dot * STEP, theta_dot)
        return moved, -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: PendulumState) -> Tensor:
        """Show cosine and sine of the angle, and the velocity, [B, 3]."""
        return columns(torch.cos(state.theta), torch.sin(state.theta), state.theta_dot)

    def kernel(self) -> GameKernel:
        """See `TensorEnv.kernel`."""
        from rlstruct.sims.kernels import pendulum

        return pendulum.KERNEL
