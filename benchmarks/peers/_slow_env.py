"""An environment that takes its time: 1 ms per step, 10 % of them 10 ms, as a simulator does."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np


class SlowEnv(gymnasium.Env[Any, Any]):
    """Sleeps, and shows four numbers; an episode has 200 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self._steps = 0
        self._frame = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # noqa: ANN401
        time.sleep(0.010 if self.np_random.random() < 0.1 else 0.001)
        self._steps += 1
        return self._frame, 1.0, self._steps == 200, False, {}
