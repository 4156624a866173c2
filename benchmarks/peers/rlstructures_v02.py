"""rlstructures v0.2, from the checkout that the variable RLSTRUCTURES names.

It was written for gym before 0.26: here gymnasium stands in for it, and an empty tensorboard for its logger's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from contextlib import closing
from types import ModuleType
from typing import Any

import gymnasium
import torch
from serve import Batches, Task, make_env, make_policy, serve

gym = ModuleType("gym")
gym.__dict__.update(spaces=gymnasium.spaces, Env=gymnasium.Env, Wrapper=gymnasium.Wrapper)
sys.modules |= {"gym": gym, "gym.spaces": gymnasium.spaces}
if importlib.util.find_spec("tensorboard") is None:
    writer = sys.modules["torch.utils.tensorboard"] = ModuleType("torch.utils.tensorboard")
    writer.__dict__["SummaryWriter"] = type("SummaryWriter", (), {})
sys.path.append(os.environ["RLSTRUCTURES"])

from rlstructures import DictTensor, RL_Agent, RL_Batcher  # noqa: E402
from rlstructures.env_wrappers import GymEnvInf  # noqa: E402


class OldEnv:
    """A gymnasium environment with ``seed``, and with ``reset`` and ``step`` as they were."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env, self.close = env, env.close
        self.seed_of_reset: int | None = None
        self.action_space, self.observation_space = env.action_space, env.observation_space

    def seed(self, seed: int) -> None:
        self.seed_of_reset = seed

    def reset(self) -> Any:  # noqa: ANN401
        seed, self.seed_of_reset = self.seed_of_reset, None
        return self._env.reset(seed=seed)[0]

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:  # noqa: ANN401
        frame, reward, terminated, truncated, info = self._env.step(action)
        return frame, float(reward), terminated or truncated, info


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
    return GymEnvInf([OldEnv(make_env(environment)) for _ in range(n_envs)], seed=seed)


def collect(task: Task) -> Batches:
    # Its queues come from the default context and its processes from "spawn": on Linux these must be made equal.
    torch.multiprocessing.set_start_method("spawn")
    batcher = RL_Batcher(
        n_timesteps=task.n_timesteps, create_agent=create_agent, agent_args={"policy": make_policy()},
        create_env=create_env, env_args={"n_envs": task.share, "environment": task.environment},
        n_processes=task.n_processes, seeds=[process * 1000 for process in range(task.n_processes)],
        agent_info=DictTensor({}), env_info=DictTensor({}),
    )  # fmt: skip
    with closing(batcher):
        batcher.reset()
        while True:
            batcher.execute()
            trajectories, _ = batcher.get()
            yield int(trajectories.trajectories.lengths.sum())


if __name__ == "__main__":
    serve(collect)
