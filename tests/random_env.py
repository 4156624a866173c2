"""An environment that shows whatever a space may hold, for checks of agents."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch

from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.functional.masks import masked_dicttensor
from rlstruct.spaces import Space, leaves, sample, zeros
from rlstruct.vec_env import Observed, StepResult, VecEnv


class RandomEnv(VecEnv):
    """An auto-resetting VecEnv whose frames are samples of a space: shows an agent what a space may hold.

    An episode ends with probability 1/4 at each step, terminated or truncated with equal chance.
    """

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        n_envs: int = 5,
        seed: int = 0,
        *,
        device: DeviceLike = "cpu",
    ) -> None:
        self._device = resolve_device(device)
        self.auto_reset = True
        self.action_space = action_space
        self.observation_space = deepcopy(observation_space)
        self.observation_space.seed(seed)
        self._random = np.random.default_rng(seed)
        self._n_envs = n_envs
        self._actions = leaves(action_space, "action")

    @property
    def device(self) -> torch.device:
        return self._device

    def n_envs(self) -> int:
        return self._n_envs

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        first = self._observe(np.zeros(self._n_envs), initial=True)
        return first, torch.ones_like(first["done"])

    def step(self, action: DictTensor) -> StepResult:
        reached = self._observe(self._random.random(self._n_envs), initial=False)
        for key in self._actions:
            reached.set(f"last_{key}", action[key].clone())
        current = masked_dicttensor(reached, self._observe(np.zeros(self._n_envs), initial=True), reached["done"])
        running = torch.ones_like(reached["done"])
        return StepResult((reached, running), (current, running.clone()))

    def _observe(self, chance: np.ndarray[Any, Any], *, initial: bool) -> DictTensor:
        terminated = torch.from_numpy(chance > 7 / 8).to(self._device)
        truncated = torch.from_numpy((chance > 6 / 8) & (chance <= 7 / 8)).to(self._device)
        reward = np.zeros(self._n_envs) if initial else self._random.normal(size=self._n_envs)
        last_action = zeros(self.action_space, "last_action", self._n_envs, self._device)
        return DictTensor(
            sample(self.observation_space, "frame", self._n_envs, self._device)
            | {
                "reward": torch.from_numpy(reward.astype(np.float32)).to(self._device),
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
                "initial_state": torch.full_like(terminated, initial),
            }
            | last_action
        )
