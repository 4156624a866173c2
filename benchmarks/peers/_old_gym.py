"""The API of gym before 0.26 on top of gymnasium, as the module ``gym``, for rlstructures v0.2.

Import it before rlstructures. It also puts an empty tensorboard where there is none: rlstructures imports its logger.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import gymnasium


class OldEnv:
    """A gymnasium environment with ``seed``, and with ``reset`` and ``step`` as they were."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._seed: int | None = None
        self.action_space = env.action_space
        self.observation_space = env.observation_space

    def seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> Any:  # noqa: ANN401
        seed, self._seed = self._seed, None
        return self._env.reset(seed=seed)[0]

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:  # noqa: ANN401
        frame, reward, terminated, truncated, info = self._env.step(action)
        return frame, float(reward), terminated or truncated, info

    def close(self) -> None:
        self._env.close()


def install() -> None:
    """Put ``gym``, ``gym.spaces`` and, where tensorboard is missing, its writer among the modules."""
    gym = ModuleType("gym")
    gym.__dict__.update(spaces=gymnasium.spaces, Env=gymnasium.Env, Wrapper=gymnasium.Wrapper)
    sys.modules.setdefault("gym", gym)
    sys.modules.setdefault("gym.spaces", gymnasium.spaces)
    if importlib.util.find_spec("tensorboard") is None:
        writer = ModuleType("torch.utils.tensorboard")
        writer.__dict__["SummaryWriter"] = type("SummaryWriter", (), {})
        sys.modules.setdefault("torch.utils.tensorboard", writer)


install()
