"""The oracle: environments that count, end at random, and keep a log of every call."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

EPISODE = 1000
"""Step t of episode e is observed as EPISODE * e + t: every frame says where it belongs."""


class Counting(gymnasium.Env[Any, Any]):
    """Episodes of 1 to 7 steps; the reward is the new count, so that a row can be checked against itself.

    Args:
        reuse: return the same array every time, changed in place.
        same_start: every episode is observed from 0 on (the final observation then differs from the next start only by
            the count).
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium declares it
    observation_space = spaces.Box(0, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(3)
    render_mode = None

    def __init__(self, reuse: bool = False) -> None:
        self.buffer = np.zeros(2, np.float32)
        self.reuse = reuse
        self.episode = 0
        self.length = 0
        self.count = 0
        self.log: list[tuple[float, float, bool, bool]] = []
        self.options: list[Any] = []
        self.actions: list[Any] = []
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.options.append(options)
        self.episode += 1
        self.count = 0
        self.length = int(self.np_random.integers(1, 8))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.count >= self.length:
            raise RuntimeError("stepped after the end")
        self.actions.append(action)
        before = EPISODE * self.episode + self.count
        self.count += 1
        ended = self.count == self.length
        kind = self.np_random.integers(3)
        terminated, truncated = bool(ended and kind != 0), bool(ended and kind != 1)
        self.log.append((before, before + 1, terminated, truncated))
        return self.observe(), float(self.count), terminated, truncated, {}

    def observe(self) -> np.ndarray[Any, Any]:
        if not self.reuse:
            self.buffer = np.zeros(2, np.float32)
        self.buffer[0] = EPISODE * self.episode + self.count
        self.buffer[1] = self.count
        return self.buffer

    def close(self) -> None:
        self.closed += 1


class Narrow(Counting):
    """Refuses the options of another environment, and shows how often it was reset and with which level."""

    def __init__(self, level: int, reuse: bool = False) -> None:
        super().__init__(reuse)
        self.level = level
        self.resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if options is not None and options["level"] != self.level:
            raise ValueError(f"level {options['level']}, expected {self.level}")
        self.resets += 1
        return super().reset(seed=seed, options=options)

    def observe(self) -> Any:
        return np.array([1 + self.resets, self.level], np.float32)


class Breaking(Counting):
    """Raises in the method that is named, "step", "reset" or "close"; in none if it is ""."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.at == "reset":
            raise ZeroDivisionError("mine")
        return super().reset(seed=0, options=options)

    def step(self, action: Any) -> Any:
        if self.at == "step":
            raise ZeroDivisionError("mine")
        return super().step(action)

    def close(self) -> None:
        super().close()
        if self.at == "close":
            raise ZeroDivisionError("mine")


class CountingVector(VectorEnv[Any, Any, Any]):
    """Lock-step over `Counting` with its own restarts, written from gymnasium's description of the modes.

    It obeys ``reset_mask`` in mode DISABLED only; in NEXT_STEP it resets everything, as CartPoleVectorEnv does.
    """

    def __init__(self, n: int, mode: AutoresetMode, *, declare: bool = True, batched_final: bool = False) -> None:
        self.envs = [Counting(reuse=True) for _ in range(n)]
        self.num_envs = n
        self.mode = mode
        self.metadata = {"autoreset_mode": mode} if declare else {}
        self.batched_final = batched_final
        self.single_observation_space = Counting.observation_space
        self.single_action_space = Counting.action_space
        self.observation_space = spaces.Box(0, 1e6, (n, 2), np.float32)
        self.action_space = spaces.MultiDiscrete([3] * n)
        self.buffer = np.zeros((n, 2), np.float32)  # handed out again and again
        self.pending = np.zeros(n, bool)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        mask = np.ones(self.num_envs, bool)
        if options and "reset_mask" in options and self.mode is AutoresetMode.DISABLED:
            mask = options["reset_mask"]
        for j in np.flatnonzero(mask):
            self.buffer[j] = self.envs[j].reset(seed=None if seed is None else seed + int(j), options=options)[0]
        self.pending[:] = False
        return self.buffer, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        n = self.num_envs
        reward, terminated, truncated = np.zeros(n), np.zeros(n, bool), np.zeros(n, bool)
        final = np.full((n, 2), np.nan, np.float32)
        objects = np.full(n, None, dtype=object)
        for j, env in enumerate(self.envs):
            if self.mode is AutoresetMode.NEXT_STEP and self.pending[j]:
                self.buffer[j] = env.reset()[0]
                continue
            self.buffer[j], reward[j], terminated[j], truncated[j], _ = env.step(actions[j])
            if self.mode is AutoresetMode.SAME_STEP and (terminated[j] or truncated[j]):
                final[j] = self.buffer[j]
                objects[j] = self.buffer[j].copy()
                self.buffer[j] = env.reset()[0]
        self.pending = terminated | truncated
        info: dict[str, Any] = {}
        if self.mode is AutoresetMode.SAME_STEP and self.pending.any():
            info = {"final_obs": final if self.batched_final else objects, "_final_obs": self.pending.copy()}
        return self.buffer, reward, terminated, truncated, info
