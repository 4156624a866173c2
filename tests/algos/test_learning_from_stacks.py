"""An agent that stacks single pictures learns, bit by bit, what one learns to whom the environment shows stacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from picture_env import SIDES, PictureEnv
from torch import nn

from rlstruct.agents import ActorCriticAgent, ConvolutionalActorCritic, QAgent, QNetwork, StackingAgent
from rlstruct.algos import a2c, dqn, ppo, reinforce
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers import RL_Batcher

SHAPE = (4, *SIDES)
COMMON: dict[str, Any] = {
    "n_envs": 4, "n_processes": 0, "n_env_steps": 120, "n_timesteps": 6, "log_interval": 1,
    "evaluation_episodes": 2, "evaluation_processes": 0, "evaluation_interval": 10**6,
}  # fmt: skip
WINDOW = {"n_timesteps": 1, "n_minibatches": 2, "window": 3, "vtrace": True}
TASKS: dict[str, tuple[Any, TrainingConfig]] = {
    "reinforce": (reinforce, reinforce.ReinforceConfig(**{**COMMON, "n_timesteps": 10})),
    "a2c": (a2c, a2c.A2CConfig(**COMMON)),
    "a2c, V-trace": (a2c, a2c.A2CConfig(**COMMON, vtrace=True, n_minibatches=2, n_updates=2)),
    "a2c, window": (a2c, a2c.A2CConfig(**{**COMMON, **WINDOW, "n_env_steps": 32})),
    "ppo": (ppo, ppo.PPOConfig(**COMMON, n_epochs=2, n_minibatches=3)),
    "dqn": (
        dqn,
        dqn.DQNConfig(
            **COMMON, n_step=3, learning_starts=40, n_updates=2, batch_size=8, replay_capacity=200, n_stack=4
        ),
    ),
}


def create_actor_critic() -> nn.Module:
    return ConvolutionalActorCritic(SHAPE, 2, n_features=8, layers=((3, 3, 1),))


def create_values() -> nn.Module:
    return QNetwork(120, 2, hidden=(8,))


@pytest.mark.parametrize("name", TASKS)
def test_the_same_weights(name: str) -> None:
    algorithm, config = TASKS[name]
    create_model, plain = (create_values, QAgent) if name == "dqn" else (create_actor_critic, ActorCriticAgent)
    stacking = partial(StackingAgent.create, create_agent=plain, shape=SHAPE)
    results = []
    for stack, create_agent in ((4, plain), (1, stacking)):
        create_env = partial(PictureEnv, stack=stack, auto_reset=name != "reinforce")
        results.append(algorithm.train(config, create_model, create_agent, create_env))
    one, other = results
    assert one.losses == other.losses
    assert len(one.losses["loss"]) >= 2
    for expected, found in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_what_ppo_shuffles_are_steps_with_one_picture_each() -> None:
    create_agent = partial(StackingAgent.create, create_agent=ActorCriticAgent, shape=SHAPE)
    model = create_actor_critic()
    with RL_Batcher(
        6, create_agent, PictureEnv, agent_args={"model": model}, env_args={"n_envs": 4, "auto_reset": True}, seed=0
    ) as batcher:
        batcher.reset()
        batcher.execute()
        batch, _ = batcher.get()
    assert batch is not None
    learner = ppo.PPOLearner.create(model, create_agent, ppo.PPOConfig(**COMMON))
    rows = learner.prepare(batch)[0].rows
    assert rows.steps["observation/frame"].shape == (24, 1, 1, *SIDES)
    assert rows.steps["learner/step"].flatten().tolist() == list(range(24))
    assert not any(key.startswith("agent_state/") for key in rows.info.keys())
    assert learner.update(batch, 0.0)["ratio_error"].item() < 1e-5
