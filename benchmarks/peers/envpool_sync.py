"""EnvPool, whose environments are written in C++, with the same policy. Nothing is stored.

The row after an episode's end is a reset and no step; these rows are not counted.
"""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
from _serve import Task, act, make_policy, serve


class Pool:
    def __init__(self, task: Task) -> None:
        self.env: Any = envpool.make(
            task.environment, env_type="gymnasium", num_envs=task.n_envs, num_threads=task.n_processes, seed=0
        )
        self.T, self.B = task.n_timesteps, task.n_envs
        self.policy = make_policy()
        self.observation, _ = self.env.reset()

    def collect(self) -> int:
        observation, steps = self.observation, 0
        for _ in range(self.T):
            observation, *_, info = self.env.step(act(self.policy, observation).numpy().astype(np.int32))
            steps += int(np.count_nonzero(info["elapsed_step"]))
        self.observation = observation
        return steps

    def close(self) -> None:
        self.env.close()


if __name__ == "__main__":
    serve(Pool, ["envpool", "gymnasium", "torch"])
