"""Iterations of our recurrent PPO: ``rlstruct_recurrent.py TASK WAY``, WAY being eager or compiled."""

from __future__ import annotations

import sys

import gymnasium
import torch
from recurrent import HIDDEN, SETTINGS
from serve import Batches, Task, serve

from rlstruct.agents import RecurrentActorCritic, RecurrentAgent
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf


def iterations(task: Task) -> Batches:
    """Collect a batch and learn from it, again and again."""
    torch.manual_seed(0)
    compiled = sys.argv[2] == "compiled"
    model = RecurrentActorCritic(4, 2, n_hidden=HIDDEN)
    sizes = {"n_envs": task.n_envs, "n_timesteps": task.n_timesteps}
    config = PPOConfig(**sizes, **SETTINGS, value_clip=0.2, compile_update=compiled)  # which CleanRL clips, too
    learner = PPOLearner.create(model, RecurrentAgent, config)

    def create_env(seed: int) -> GymEnvInf:
        return GymEnvInf([gymnasium.make(task.environment) for _ in range(task.n_envs)], seed)

    batcher = RL_Batcher(
        task.n_timesteps, lambda: RecurrentAgent(model, copy_model=False), create_env, seed=0, compile_agent=compiled
    )
    batcher.reset()
    while True:
        batcher.execute()
        batch = batcher.get()[0]
        with torch.enable_grad():
            learner.update(batch, 0.0)
        batcher.update(model.state_dict())
        yield task.n_envs * task.n_timesteps


if __name__ == "__main__":
    serve(iterations)
