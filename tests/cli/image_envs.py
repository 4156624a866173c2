"""A user's environments that show small images, one driven as CarRacing is and one with a few choices."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Steering(gymnasium.Env[Any, Any]):
    """A noisy picture is bright on the left or on the right, and steering there is rewarded; six steps an episode."""

    observation_space = spaces.Box(0, 255, (12, 12, 3), np.uint8)
    action_space: Any = spaces.Box(np.array([-1, 0, 0], np.float32), np.ones(3, np.float32))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n = 0
        return self._draw(), {}

    def step(self, action: Any) -> Any:
        self.n += 1
        reward = self._aim(action) * self.side
        return self._draw(), float(reward), self.n == 6, False, {}

    def _aim(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        return action[0]

    def _draw(self) -> Any:
        self.side = self.np_random.choice([-1, 1])
        picture = self.np_random.integers(0, 128, (12, 12, 3), np.uint8)
        picture[:, :6] += np.uint8(100 * (self.side < 0))
        picture[:, 6:] += np.uint8(100 * (self.side > 0))
        return picture


class Picking(Steering):
    """The same with three choices: left, straight on, right."""

    action_space = spaces.Discrete(3)

    def _aim(self, action: Any) -> Any:
        return int(action) - 1
