"""Each algorithm learns: from a fixed seed it reaches a return that chance does not reach."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest

from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork, SoftActorCritic, SquashedGaussianAgent
from rlstruct.algos import A2CConfig, DQNConfig, PPOConfig, PQNConfig, SACConfig, a2c, dqn, ppo, pqn, sac
from rlstruct.sims import make

CART_POLE, PENDULUM = (partial(make, name) for name in ("CartPole-v1", "Pendulum-v1"))
ACTOR: tuple[Any, ...] = (partial(ActorCritic, 4, 2), ActorCriticAgent, CART_POLE)
NORMAL_VALUES = partial(QNetwork, 4, 2, hidden=(64, 64), layer_norm=True)
SOFT: tuple[Any, ...] = (partial(SoftActorCritic, 3, (-2.0,), (2.0,), hidden=(64, 64)), SquashedGaussianAgent, PENDULUM)
QUICK = DQNConfig(n_env_steps=12_000, discount=0.995, learning_rate=0.002, target_update_rate=0.02)
TASKS: dict[str, tuple[Any, Any, tuple[Any, ...], float]] = {
    # the last number: a random policy has 22 on CartPole-v1, and -1,200 on Pendulum-v1
    "ppo": (ppo.train, PPOConfig(n_env_steps=30_000), ACTOR, 150),
    "a2c": (a2c.train, A2CConfig(n_env_steps=60_000), ACTOR, 150),
    "dqn": (dqn.train, QUICK, (partial(QNetwork, 4, 2), QAgent, CART_POLE), 150),
    "pqn": (pqn.train, PQNConfig(n_env_steps=40_000), (NORMAL_VALUES, QAgent, CART_POLE), 150),
    "sac": (sac.train, SACConfig(n_env_steps=4_000, learning_rate=1e-3), SOFT, -500),
}
"""Algorithm, settings, how to make network, agent and environments, and the return to reach."""


@pytest.mark.slow  # a minute for all
@pytest.mark.parametrize("name", TASKS)
def test_a_training_learns_what_chance_does_not_do(name: str) -> None:
    train, config, functions, at_least = TASKS[name]
    common: dict[str, Any] = {"evaluation_interval": 10**6, "evaluation_episodes": 20, "evaluation_processes": 0}
    result = train(dataclasses.replace(config, seed=7, n_processes=0, **common), *functions)
    assert result.before.mean_return < at_least < result.after.mean_return
