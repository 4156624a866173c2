"""A user's environments with unusual spaces, and with the usual mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import register


class Base(gymnasium.Env[Any, Any]):
    """Return samples of the observation space; an episode has five steps."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space: Any = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.n += 1
        return self.observation_space.sample(), 1.0, self.n == 5, False, {}

    def render(self) -> Any:
        return np.zeros((40, 40, 3), np.uint8)


class Mission(spaces.Space[str]):
    """A space of one's own, as MiniGrid's missions have."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go"


UNUSUAL: dict[str, spaces.Space[Any]] = {
    "Graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
    "Sequence": spaces.Sequence(spaces.Box(-1, 1, (2,))),
    "Mission": spaces.Dict(image=spaces.Box(0, 255, (7, 7, 3), np.uint8), mission=Mission()),
    "Empty": spaces.Dict(),
    "Text": spaces.Text(5),
    "OneOf": spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
    "Dict": spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,))),
    "Grid": spaces.Box(-1, 1, (2, 2)),
    "Number": spaces.Box(-1, 1, ()),
    "Nothing": spaces.Box(-1, 1, (0,)),
    "Integers": spaces.Box(0, 9, (2,), np.int64),
    "Bytes": spaces.Box(0, 255, (2,), np.uint8),
    "Constant": spaces.Box(np.asarray([-1, 1], np.float32), np.asarray([1, 1], np.float32)),
    "Infinite": spaces.Box(-np.inf, np.inf, (2,)),
    "Many": spaces.MultiDiscrete([2] * 400),
    "Huge": spaces.Discrete(2**50),
}
for _name, _space in UNUSUAL.items():
    globals()[f"Sees{_name}"] = type(f"Sees{_name}", (Base,), {"observation_space": _space})
    globals()[f"Takes{_name}"] = type(f"Takes{_name}", (Base,), {"action_space": _space})


class NoSpace(Base):
    observation_space = None


class NotDrawn(Base):
    def __init__(self) -> None:
        super().__init__()


class NoModes(Base):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}


class Required(Base):
    def __init__(self, size: int, render_mode: str | None = None) -> None:
        super().__init__(render_mode)


class VectorReward(Base):
    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, np.ones(2), *others


class FourValues(Base):
    def step(self, action: Any) -> Any:
        observation, reward, over, _, info = super().step(action)
        return observation, reward, over, info


class OldReset(Base):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class NoSeed(Base):
    def reset(self) -> Any:
        return super().reset()


class WrongShape(Base):
    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), *super().step(action)[1:]


class Raises(Base):
    def step(self, action: Any) -> Any:
        raise RuntimeError("no licence")


class NotCreated(Base):
    def __init__(self, render_mode: str | None = None) -> None:
        raise RuntimeError("no licence")


def not_an_env(n_envs: int, seed: int) -> int:
    return n_envs


constant = 3
for _entry in ("FourValues", "Required", "Absent", "NoModes"):
    register(f"Odd{_entry}-v0", entry_point=f"odd_envs:{_entry}")
register("OddPackage-v0", entry_point="no_such_package:Env")


class NoSpaces(gymnasium.Env[Any, Any]):
    """Declares nothing."""


class Plain(gymnasium.Env[Any, Any]):
    """Has no constructor, so it takes no render_mode."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
