"""CartPole on any device.

Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", IEEE
Transactions on Systems, Man, and Cybernetics, 1983; equations corrected by Florian, "Correct equations for the dynamics
of the cart-pole system", 2007, as in gymnasium.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.functional.random import symmetric_uniform
from rlstruct.sims.state import columns, euler_step
from rlstruct.sims.tensor_env import TensorEnv, box

GRAVITY, FORCE = 9.8, 10.0  # m/s^2, N
CART_MASS, POLE_MASS, HALF_LENGTH = 1.0, 0.1, 0.5  # kg, kg, m
TOTAL_MASS = CART_MASS + POLE_MASS
ARM = POLE_MASS * HALF_LENGTH / TOTAL_MASS  # m: from the cart to the common centre of mass
STEP = 0.02  # s
MAX_X, MAX_THETA = 2.4, 12 * 2 * math.pi / 360  # m, rad


@dataclass(frozen=True)
class CartPoleState:
    """Positions and velocities of carts and poles, [B] float each."""

    x: Tensor  # m
    x_dot: Tensor  # m/s
    theta: Tensor  # of the pole from upright, rad
    theta_dot: Tensor  # rad/s


class CartPole(TensorEnv[CartPoleState]):
    """Push a cart left (0) or right (1) so that the pole on it stays up; reward 1 per step. As CartPole-v1."""

    action_space = spaces.Discrete(2)
    observation_space = box(
        [-2 * MAX_X, -math.inf, -2 * MAX_THETA, -math.inf], [2 * MAX_X, math.inf, 2 * MAX_THETA, math.inf]
    )
    stochastic: ClassVar[bool] = False
    default_time_limit: ClassVar[int | None] = 500
    kernel_module: ClassVar[str] = "rlstruct.sims.cart_pole_kernel"

    def initial(self, key: Tensor) -> CartPoleState:
        """Draw all four numbers from [-0.05, 0.05)."""
        return CartPoleState(*symmetric_uniform(key, 4, 0.05, self.dtype, stream=0))

    def transition(self, state: CartPoleState, action: Tensor, key: Tensor) -> tuple[CartPoleState, Tensor, Tensor]:
        """Push, and take one Euler step; terminate where cart or pole is out of bounds."""
        x, x_dot, theta, theta_dot = state.x, state.x_dot, state.theta, state.theta_dot
        # Florian's equations. Comments show those that torch computes with fewer operations.
        sin, cos = torch.sin(theta), torch.cos(theta)
        force = (2 * FORCE * action - FORCE).to(self.dtype)  # float64 where that is torch's default
        # push = (force + POLE_MASS * HALF_LENGTH * theta_dot^2 * sin) / TOTAL_MASS
        push = torch.addcmul(force, theta_dot.square(), sin, value=POLE_MASS * HALF_LENGTH) / TOTAL_MASS
        # theta_acc = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4/3 - POLE_MASS * cos^2 / TOTAL_MASS))
        inertia = torch.rsub(cos.square(), 4 / 3 * HALF_LENGTH, alpha=ARM)
        theta_acc = torch.addcmul(GRAVITY * sin, cos, push, value=-1) / inertia
        # x_acc = push - POLE_MASS * HALF_LENGTH * theta_acc * cos / TOTAL_MASS
        x_acc = torch.addcmul(push, theta_acc, cos, value=-ARM)
        moved = CartPoleState(*euler_step((x, x_dot, theta, theta_dot), (x_dot, x_acc, theta_dot, theta_acc), STEP))
        terminated = (moved.x.abs() > MAX_X) | (moved.theta.abs() > MAX_THETA)
        return moved, torch.ones_like(x), terminated

    def observe(self, state: CartPoleState) -> Tensor:
        """Show the state, [B, 4]."""
        return columns(state.x, state.x_dot, state.theta, state.theta_dot)
