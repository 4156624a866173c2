"""A small environment with four kinds of spaces; processes of AsyncVectorEnv import it without torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SPACES: dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]] = {
    "vector": (spaces.Box(0, 255, (3,), np.float32), spaces.Discrete(3)),
    "image": (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(3)),
    "dict": (
        spaces.Dict({"a": spaces.Box(0, 255, (2,), np.float32), "b": spaces.Box(0, 255, (2, 2), np.float32)}),
        spaces.Discrete(3),
    ),
    "torque": (spaces.Box(0, 255, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)),
}


class Toy(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 6 steps with random observations and rewards that depend on the action.

    Args:
        kind: of `SPACES`.
        reuse: the observation is the same memory in each step and reset.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 - as gymnasium declares it

    def __init__(self, kind: str = "vector", reuse: bool = False) -> None:
        self.observation_space, self.action_space = SPACES[kind]
        self.render_mode = "rgb_array"
        self.reuse = reuse
        self.buffer = np.zeros(self.observation_space.shape or (), self.observation_space.dtype)
        self.options: list[Any] = []
        self.n_left = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.options.append(options)
        self.n_left = int(self.np_random.integers(1, 7))
        return self.observe(self.observation_space), {"left": self.n_left}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.n_left:
            raise RuntimeError("stepped after the end")
        self.n_left -= 1
        which = int(self.np_random.integers(3)) if self.n_left == 0 else -1
        reward = float(self.np_random.normal()) + float(np.sum(action))
        return self.observe(self.observation_space), reward, which in (0, 2), which in (1, 2), {"left": self.n_left}

    def observe(self, space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self.observe(part) for key, part in space.items()}
        frame = self.np_random.integers(0, 255, space.shape).astype(space.dtype)
        if not self.reuse:
            return frame
        self.buffer[...] = frame
        return self.buffer

    def render(self) -> Any:
        return np.full((4, 4, 3), self.n_left, np.uint8)
