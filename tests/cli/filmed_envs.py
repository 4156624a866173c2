"""A user's environments that draw a square whose colour says which episode and step they show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import VecEnv
from rlstruct.envs import GymEnvInf
from rlstruct.sims import TensorEnv

FPS = 25
LENGTH = 3  # steps of an episode


def square(episode: int, step: int) -> np.ndarray[Any, Any]:
    return np.full((160, 160, 3), (60 * (episode % 4), 8 * (step % 30), 100), np.uint8)


class Counted(gymnasium.Env[Any, int]):
    """Count the episodes and their steps."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": FPS}

    def __init__(self, render_mode: str | None = None, length: int = LENGTH) -> None:
        self.render_mode, self.length, self.episode = render_mode, length, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.n = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.n += 1
        return np.zeros(1, np.float32), 1.0, self.n == self.length, False, {}

    def render(self) -> Any:
        return square(self.episode, self.n)


class Fast(Counted):
    """Show more frames per second than a gif can."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 125}


def restarting(n_envs: int, seed: int) -> VecEnv:
    """Create environments that restart by themselves, whatever the caller wants."""
    return GymEnvInf([Counted("rgb_array") for _ in range(n_envs)], seed)


@dataclass(frozen=True)
class Count:
    n: Tensor  # [B]


class Simulated(TensorEnv[Count]):
    """The same as a simulator, which does not know its episode."""

    observation_space = spaces.Box(0, LENGTH, (1,), np.float32)
    action_space = spaces.Discrete(2)
    metadata: ClassVar[dict[str, Any]] = {"render_fps": FPS}

    def initial(self, key: Tensor) -> Count:
        return Count(torch.zeros(key.shape, device=key.device))

    def transition(self, state: Count, action: Tensor, key: Tensor) -> tuple[Count, Tensor, Tensor]:
        return Count(state.n + 1), torch.ones_like(state.n), state.n + 1 == LENGTH

    def observe(self, state: Count) -> Tensor:
        return state.n.unsqueeze(1)

    def render(self, row: int) -> Any:
        return square(0, int(self.get_state([row]).n))
