"""Pictures whose every pixel is known beforehand, one at a time or in stacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fake_envs import CountingEnv
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.vec_env import EnvWrapper, Observed, StepResult

SIDES = (5, 6)


class PictureEnv(EnvWrapper):
    """A `CountingEnv` whose frame is [stack, 5, 6] uint8: noise that its three numbers decide, the newest picture last.

    Pictures from before the episode began are its first one, as in gymnasium's FrameStackObservation.
    """

    def __init__(self, n_envs: int, seed: int = 0, *, stack: int = 1, **settings: Any) -> None:
        """Make the `CountingEnv`."""
        super().__init__(CountingEnv(n_envs, seed, **settings))
        self.stack = stack
        self.observation_space = spaces.Box(0, 255, (stack, *SIDES), np.uint8)

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Reset, and draw."""
        observation, running = self.env.reset(env_info)
        return self._draw(observation), running

    def step(self, action: DictTensor) -> StepResult:
        """Step, and draw."""
        (reached, ran), (current, running) = self.env.step(action)
        return StepResult((self._draw(reached), ran), (self._draw(current), running))

    def _draw(self, observation: DictTensor) -> DictTensor:
        number, episode, step = observation["frame"].unsqueeze(2).unbind(1)  # [B, 1] each
        shown = torch.arange(1 - self.stack, 1, device=step.device) + step  # [B, stack]
        pictures = noise(number * 1009 + episode * 101 + shown.clamp(min=0))
        return DictTensor({**dict(observation.items()), "frame": pictures})


def noise(number: Tensor) -> Tensor:
    """Draw a picture [..., 5, 6] uint8 for each number [...]."""
    pixel = torch.arange(SIDES[0] * SIDES[1], device=number.device).view(SIDES)
    mixed = (number[..., None, None] + 1) * 7919 + (pixel + 1) * 104729
    return ((mixed * mixed) // 64 % 251).to(torch.uint8)
