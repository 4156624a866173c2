"""An environment of any space; without torch, so that worker processes start fast."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Echo(gymnasium.Env[Any, Any]):
    """Observes samples of a space, takes actions of the same space, and lists both."""

    metadata = {}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space = space
        self.action_space = space
        self.seen: list[Any] = []
        self.actions: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.seen.append(self.observation_space.sample())
        return self.seen[-1], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.action_space.shape == ():  # SyncVectorEnv itself makes scalars of these
            action = np.asarray(action)
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is no element of {self.action_space}")
        self.actions.append(action)
        self.seen.append(self.observation_space.sample())
        return self.seen[-1], 1.0, False, False, {}
