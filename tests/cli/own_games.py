"""A user's module: a simulator, a gymnasium environment with a Dict observation, and the factories of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct import VecEnv
from rlstruct.agents import ActorCritic
from rlstruct.envs import GymEnvInf
from rlstruct.sims import TensorEnv

SIZE = 3


@dataclass(frozen=True)
class Place:
    at: Tensor  # [B]


class Walk(TensorEnv[Place]):
    """Walk right from 0 to 3; going left ends at 0."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 3, (1,), np.float32)
    default_time_limit = 20

    def initial(self, key: Tensor) -> Place:
        return Place(torch.zeros(key.shape, device=key.device))

    def transition(self, state: Place, action: Tensor, key: Tensor) -> tuple[Place, Tensor, Tensor]:
        at = (state.at + 2.0 * action - 1.0).clamp(min=0)
        return Place(at), (at == 3).to(torch.float32), at == 3

    def observe(self, state: Place) -> Tensor:
        return state.at.unsqueeze(1)

    def render(self, row: int) -> np.ndarray[Any, Any]:
        return np.full((24, 32, 3), 200, np.uint8)


class WalkInParts(Walk):
    """Show the place and the side, as a Dict with a whole number."""

    observation_space = spaces.Dict(at=spaces.Box(0, 3, (1,), np.float32), side=spaces.Discrete(2))

    def observe(self, state: Place) -> Any:
        return {"at": state.at.unsqueeze(1), "side": (state.at > 1).long()}


class Parts(gymnasium.Env[dict[str, Any], int]):
    """Show a position and a speed, as a Dict."""

    observation_space = spaces.Dict(position=spaces.Box(-1, 1, (2,)), speed=spaces.Box(-1, 1, (1,)))
    action_space = spaces.Discrete(2)
    render_mode: str | None = None

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.n = 0
        return self._shown(), {}

    def step(self, action: int) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.n += 1
        return self._shown(), float(action), self.n == 5, False, {}

    def render(self) -> Any:
        return np.zeros((10, 20, 3), np.uint8)

    def _shown(self) -> dict[str, Any]:
        return {name: np.full(space.shape or (), 0.1, np.float32) for name, space in self.observation_space.items()}


class Camera(gymnasium.Env[Any, int]):
    """Shows grey images."""

    observation_space = spaces.Box(0, 255, (12, 12, 1), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.n = 0
        return np.zeros((12, 12, 1), np.uint8), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n += 1
        return np.full((12, 12, 1), self.n, np.uint8), 1.0, self.n == 5, False, {}


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


def create_model() -> nn.Module:
    return ActorCritic(4, 2)


class Policy(nn.Module):
    """A network that no checkpoint describes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layer(frame)
        return outputs[:, :2], outputs[:, 2]


def create_nothing() -> None:
    """Lack a return, by mistake."""
