"""rlstructures v0.2, from the checkout that the variable RLSTRUCTURES names, on gymnasium through `_old_gym`."""

from __future__ import annotations

import os
import sys
from typing import Any

import _old_gym
import torch
from _serve import Task, make_env, make_policy, serve

sys.path.append(os.environ["RLSTRUCTURES"])

from rlstructures import DictTensor, RL_Agent, RL_Batcher
from rlstructures.env_wrappers import GymEnvInf


class Agent(RL_Agent):  # type: ignore[misc,unused-ignore]
    def __init__(self, policy: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.policy = policy

    def initial_state(self, agent_info: Any, B: int) -> Any:  # noqa: ANN401
        return DictTensor({})

    def __call__(self, state: Any, observation: Any, agent_info: Any = None, history: Any = None) -> Any:  # noqa: ANN401
        logits = self.policy(observation["frame"])
        action = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        return DictTensor({"action": action, "logits": logits}), DictTensor({})


def create_agent(policy: Any) -> Agent:  # noqa: ANN401
    torch.set_num_threads(1)  # this is called in the worker
    return Agent(policy)


def create_env(n_envs: int, environment: str, seed: int) -> Any:  # noqa: ANN401
    return GymEnvInf([_old_gym.OldEnv(make_env(environment)) for _ in range(n_envs)], seed=seed)


class RlStructures:
    def __init__(self, task: Task) -> None:
        # Its queues come from the default context and its processes from "spawn": on Linux these must be made equal.
        torch.multiprocessing.set_start_method("spawn")
        self.batcher = RL_Batcher(
            n_timesteps=task.n_timesteps,
            create_agent=create_agent,
            agent_args={"policy": make_policy()},
            create_env=create_env,
            env_args={"n_envs": task.n_envs // task.n_processes, "environment": task.environment},
            n_processes=task.n_processes,
            seeds=[process * 1000 for process in range(task.n_processes)],
            agent_info=DictTensor({}),
            env_info=DictTensor({}),
        )
        self.batcher.reset()

    def collect(self) -> int:
        self.batcher.execute()
        trajectories, _ = self.batcher.get()
        return int(trajectories.trajectories.lengths.sum())

    def close(self) -> None:
        self.batcher.close()


if __name__ == "__main__":
    serve(RlStructures, ["gymnasium", "torch"])
