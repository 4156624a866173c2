"""A2C on CartPole-v1 without velocities: a recurrent agent beside a feed-forward one, with the same settings.

The frame shows the cart's position and the pole's angle only, so one frame does not say where the pole is falling to.
Run: ``python benchmarks/a2c_memory.py``; ``--seeds 0 1`` and ``--steps`` for other trainings. Nothing is selected: the
network after the last step is evaluated on 100 fresh episodes.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import _learning
import gymnasium
import numpy as np
from gymnasium import spaces

from rlstruct import VecEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos.a2c import A2CConfig, train
from rlstruct.algos.training import TrainingResult
from rlstruct.envs import GymEnvInf

_SHOWN = [0, 2]  # position and angle; 1 and 3 are their velocities


class HiddenVelocities(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Shows the position of the cart and the angle of the pole."""

    def __init__(self, env: gymnasium.Env[np.ndarray, Any]) -> None:
        super().__init__(env)
        box = env.observation_space
        if not isinstance(box, spaces.Box):
            raise TypeError(f"HiddenVelocities: got {type(box).__name__}, expected a Box.")
        self.observation_space = spaces.Box(box.low[_SHOWN], box.high[_SHOWN], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[_SHOWN]


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([HiddenVelocities(gymnasium.make("CartPole-v1")) for _ in range(n_envs)], seed=seed)


def create_feed_forward() -> ActorCritic:
    return ActorCritic(n_inputs=2, n_actions=2)


def create_recurrent() -> RecurrentActorCritic:
    return RecurrentActorCritic(n_inputs=2, n_actions=2)


AGENTS: dict[str, tuple[Any, Any]] = {
    "recurrent": (create_recurrent, RecurrentAgent),
    "feed_forward": (create_feed_forward, ActorCriticAgent),
}


def train_seed(kind: str, n_env_steps: int, seed: int) -> TrainingResult:
    config = A2CConfig(
        seed=seed,
        n_env_steps=n_env_steps,
        learning_rate=0.004,
        max_gradient_norm=0.5,
        evaluation_episodes=100,
        evaluation_processes=0,
        evaluation_interval=50_000,
    )
    return train(config, *AGENTS[kind], create_env)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--agents", nargs="+", choices=list(AGENTS), default=list(AGENTS))
    options = parser.parse_args()
    for kind in options.agents:
        print(f"\n{kind}:")
        target = 400.0 if kind == "recurrent" else 150.0
        _learning.run_seeds(f"a2c_memory_{kind}", partial(train_seed, kind, options.steps), options.seeds, target)
