"""CartPole on any device. Part of rlstruct.sims.

Barto, Sutton and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems", IEEE
Transactions on Systems, Man, and Cybernetics, 1983; equations corrected by Florian (2007), as in gymnasium.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.device import DeviceLike
from rlstruct.functional.random import symmetric_uniform
from rlstruct.sims._spaces import box
from rlstruct.sims._state import columns
from rlstruct.sims.tensor_env import Backend, TensorEnv

if TYPE_CHECKING:
    from rlstruct.sims.kernels import GameKernel

GRAVITY, FORCE = 9.8, 10.0  # m/s^2, N
CART_MASS, POLE_MASS, HALF_LENGTH = 1.0, 0.1, 0.5  # kg, kg, m
TOTAL_MASS = CART_MASS + POLE_MASS
POLE = POLE_MASS * HALF_LENGTH
STEP = 0.02  # s
MAX_X, MAX_THETA = 2.4, 12 * 2 * math.pi / 360  # m, rad


@dataclass(frozen=True)
class CartPoleState:
    """Where carts and poles are.

    Attributes:
        x: position, m.                [B] float
        x_dot: velocity, m/s.          [B] float
        theta: angle of the pole from upright, rad.  [B] float
        theta_dot: its velocity, rad/s.  [B] float
    """

    x: Tensor
    x_dot: Tensor
    theta: Tensor
    theta_dot: Tensor


class CartPole(TensorEnv[CartPoleState]):
    """Push a cart left (0) or right (1) so that the pole on it stays up; reward 1 per step. As CartPole-v1.

    Args:
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        device: where everything lives.
        dtype: of the state and the frames.
        auto_reset: see `TensorEnv`.
        time_limit: see `TensorEnv`.
        backend: see `TensorEnv`.
    """

    action_space = spaces.Discrete(2)
    shortest_episode: ClassVar[int] = 8  # 8 pushes in one direction from the best start make the pole fall
    stochastic: ClassVar[bool] = False

    def __init__(
        self,
        n_envs: int,
        seed: int = 0,
        *,
        device: DeviceLike = "cpu",
        dtype: torch.dtype = torch.float32,
        auto_reset: bool = True,
        time_limit: int | None = 500,
        backend: Backend = "torch",
    ) -> None:
        """Make the environments."""
        high = [2 * MAX_X, math.inf, 2 * MAX_THETA, math.inf]
        self.observation_space = box([-v for v in high], high, dtype)
        self.dtype = dtype
        super().__init__(n_envs, seed, device=device, auto_reset=auto_reset, time_limit=time_limit, backend=backend)
        self._reward = torch.ones(n_envs, device=self.device)
        self._left = torch.tensor(-FORCE / TOTAL_MASS, dtype=dtype, device=self.device)
        self._inertia = torch.tensor(HALF_LENGTH * 4 / (3 * GRAVITY), dtype=dtype, device=self.device)

    def initial(self, key: Tensor) -> CartPoleState:
        """Draw all four numbers from [-0.05, 0.05)."""
        return CartPoleState(*symmetric_uniform(key, 4, 0.05, self.dtype))

    def transition(self, state: CartPoleState, action: Tensor, key: Tensor) -> tuple[CartPoleState, Tensor, Tensor]:
        """Push for one step of Euler's method; terminated where cart or pole are out of bounds.

        With M the total mass, m and l those of the pole (l half its length), f the force:
        push = (f + m l theta_dot^2 sin) / M, theta_acc = (g sin - cos push) / (l (4/3 - m cos^2 / M)),
        x_acc = push - m l theta_acc cos / M. Few operations, as a call costs more than its arithmetic:
        ``addcmul(a, b, c, value=v)`` is a + v b c, and g is divided out of theta_acc.
        """
        x, x_dot, theta, theta_dot = state.x, state.x_dot, state.theta, state.theta_dot
        cos, sin = torch.cos(theta), torch.sin(theta)
        force = torch.add(self._left, action, alpha=2 * FORCE / TOTAL_MASS)  # divided by M
        push = torch.addcmul(force, theta_dot * theta_dot, sin, value=POLE / TOTAL_MASS)
        inertia = torch.addcmul(self._inertia, cos, cos, value=-HALF_LENGTH * POLE_MASS / (TOTAL_MASS * GRAVITY))
        theta_acc = torch.addcmul(sin, cos, push, value=-1 / GRAVITY) / inertia
        x_acc = torch.addcmul(push, theta_acc, cos, value=-POLE / TOTAL_MASS)
        moved = CartPoleState(
            x=torch.add(x, x_dot, alpha=STEP),
            x_dot=torch.add(x_dot, x_acc, alpha=STEP),
            theta=torch.add(theta, theta_dot, alpha=STEP),
            theta_dot=torch.add(theta_dot, theta_acc, alpha=STEP),
        )
        # hardshrink is zero within bounds.
        terminated = torch.logical_or(torch.hardshrink(moved.x, MAX_X), torch.hardshrink(moved.theta, MAX_THETA))
        return moved, self._reward, terminated

    def observe(self, state: CartPoleState) -> Tensor:
        """Show the state, [B, 4]."""
        return columns(state.x, state.x_dot, state.theta, state.theta_dot)

    def kernel(self) -> GameKernel:
        """See `TensorEnv.kernel`."""
        from rlstruct.sims.kernels import cart_pole

        return cart_pole.KERNEL
