"""A2C on CartPole-v1 for ten seeds: environment steps to a mean evaluation return of 475, and the final return.

Run: ``python benchmarks/a2c_cartpole.py``; ``--seeds 0 1`` for some of them. Nothing is selected: the network after the
last of 250,000 steps is the one that is evaluated, on 100 fresh episodes.
"""

from __future__ import annotations

import argparse

import _learning
import gymnasium

from rlstruct import VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.algos.training import TrainingResult
from rlstruct.envs import GymVectorEnv


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymVectorEnv(gymnasium.make_vec("CartPole-v1", n_envs, vectorization_mode="vector_entry_point"), seed=seed)


def create_model() -> ActorCritic:
    return ActorCritic(n_inputs=4, n_actions=2)


def train_seed(seed: int) -> TrainingResult:
    config = A2CConfig(seed=seed, evaluation_episodes=100, evaluation_processes=0)
    return train(config, create_model, ActorCriticAgent, create_env)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    _learning.run_seeds("a2c_cartpole", train_seed, parser.parse_args().seeds, target=475.0)
