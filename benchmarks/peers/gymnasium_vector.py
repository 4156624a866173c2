"""gymnasium's SyncVectorEnv or, with the argument ``async``, AsyncVectorEnv, stepped with the same policy.

Mode SAME_STEP: in the default mode the row after an episode's end is a reset and no step. Nothing is stored.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from _serve import Task, act, make_env, make_policy, serve
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv


class Vector:
    def __init__(self, task: Task) -> None:
        make: Any = AsyncVectorEnv if "async" in sys.argv else SyncVectorEnv
        self.env = make([partial(make_env, task.environment)] * task.n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
        self.T, self.B = task.n_timesteps, task.n_envs
        self.policy = make_policy()
        self.observation, _ = self.env.reset(seed=0)

    def collect(self) -> int:
        observation = self.observation
        for _ in range(self.T):
            observation, *_ = self.env.step(act(self.policy, observation).numpy())
        self.observation = observation
        return self.T * self.B

    def close(self) -> None:
        self.env.close()


if __name__ == "__main__":
    serve(Vector, ["gymnasium", "torch"])
