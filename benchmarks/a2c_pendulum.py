"""A2C on Pendulum-v1 with a Gaussian policy: the mean evaluation return after training.

Run: ``python benchmarks/a2c_pendulum.py``; ``--seeds 0`` and ``--steps`` for other trainings. Nothing is selected: the
network after the last step is evaluated on 100 fresh episodes, with the mean as its action.
"""

from __future__ import annotations

import argparse
from functools import partial

import _learning
import gymnasium

from rlstruct import VecEnv
from rlstruct.agents import GaussianActorCritic, GaussianAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.algos.training import TrainingResult
from rlstruct.envs import GymEnvInf


def create_env(n_envs: int, seed: int) -> VecEnv:
    # Pendulum clips its torque to [-2, 2] itself; other environments want gymnasium.wrappers.ClipAction.
    return GymEnvInf([gymnasium.make("Pendulum-v1") for _ in range(n_envs)], seed=seed)


def create_model() -> GaussianActorCritic:
    return GaussianActorCritic(n_inputs=3, n_dimensions=1)


def train_seed(n_env_steps: int, seed: int) -> TrainingResult:
    config = A2CConfig(
        seed=seed,
        n_env_steps=n_env_steps,
        n_timesteps=16,
        n_envs=32,
        discount=0.9,
        reward_scale=0.1,
        trace_decay=0.9,
        learning_rate=0.003,
        entropy_coefficient=0.0,
        max_gradient_norm=0.5,
        evaluation_episodes=100,
        evaluation_processes=0,
        evaluation_interval=50_000,
        evaluation_timesteps=200,
        evaluation_stochastic=False,
    )
    return train(config, create_model, GaussianAgent, create_env)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600_000)
    options = parser.parse_args()
    _learning.run_seeds("a2c_pendulum", partial(train_seed, options.steps), options.seeds, target=-250.0)
