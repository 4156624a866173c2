"""Agents for continuous actions keep the contract, and replay what they said, with and without memory."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces
from random_env import RandomEnv

from rlstruct import DictTensor, RL_Agent, replay_agent
from rlstruct.agents import (
    GaussianActorCritic,
    GaussianAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.functional.random import step_keys
from rlstruct.testing import check_agent

KINDS = ["feed-forward", "recurrent"]


def make_model(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "feed-forward":
        return GaussianActorCritic(3, 2, hidden=(8,))
    return RecurrentGaussianActorCritic(3, 2, n_hidden=8)


def make_agent(kind: str, model: Any, **arguments: Any) -> RL_Agent:
    return (GaussianAgent if kind == "feed-forward" else RecurrentGaussianAgent)(model, **arguments)


def observe(B: int) -> DictTensor:
    rng = step_keys(torch.arange(B), 0, torch.arange(1))[0]
    return DictTensor({"frame": torch.randn(B, 3), "initial_state": torch.zeros(B, dtype=torch.bool), "rng": rng})


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_agents_keep_the_contract_and_never_sync(kind: str, stochastic: bool, device: str) -> None:
    agent = make_agent(kind, make_model(kind), device=device, stochastic=stochastic)
    frames, actions = spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-math.inf, math.inf, (2,))
    check_agent(agent, RandomEnv(frames, actions, device=device), host_syncs=True, executors=False)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_documented_keys_and_agree_with_each_other(kind: str) -> None:
    agent = make_agent(kind, make_model(kind))
    output, _ = agent(agent.initial_state(DictTensor(), 5), observe(5), DictTensor())
    assert set(output.keys()) == {"action", "action_mean", "action_log_std", "log_probability", "value"}
    assert [tuple(output[key].shape) for key in ("action", "action_mean", "action_log_std")] == [(5, 2)] * 3
    oracle = torch.distributions.Normal(output["action_mean"], output["action_log_std"].exp())
    torch.testing.assert_close(output["log_probability"], oracle.log_prob(output["action"]).sum(-1))


def test_the_mean_is_the_action_without_draws_and_the_deviation_is_as_asked() -> None:
    model = GaussianActorCritic(3, 2, initial_log_std=-1.0)
    output, _ = GaussianAgent(model, stochastic=False)(DictTensor(), observe(4), DictTensor())
    assert torch.equal(output["action"], output["action_mean"])
    assert (output["action_log_std"] == -1.0).all()
    drawn, _ = GaussianAgent(model)(DictTensor(), observe(4000), DictTensor())
    noise = drawn["action"] - drawn["action_mean"]
    torch.testing.assert_close(noise.std(0), torch.full((2,), math.exp(-1.0)), rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_weight_and_none_goes_through_the_draw(kind: str) -> None:
    model = make_model(kind)
    agent = make_agent(kind, model, copy_model=False)
    output, _ = agent(agent.initial_state(DictTensor(), 5), observe(5), DictTensor())
    assert not output["action"].requires_grad
    (output["log_probability"].sum() + output["value"].sum()).backward()
    # The recurrent state starts at zero: what multiplies it gets a gradient of zero, which is one.
    assert all(weight.grad is not None for weight in model.parameters())


def create_pendulum(n_envs: int, seed: int) -> GymEnvInf:
    envs = [gymnasium.make("Pendulum-v1", max_episode_steps=7) for _ in range(n_envs)]
    return GymEnvInf([gymnasium.wrappers.ClipAction(env) for env in envs], seed=seed)


@pytest.mark.parametrize("kind", KINDS)
def test_replay_reproduces_log_probabilities_across_restarts(kind: str) -> None:
    torch.manual_seed(0)
    model = GaussianActorCritic(3, 1) if kind == "feed-forward" else RecurrentGaussianActorCritic(3, 1, n_hidden=8)
    arguments = {"kind": kind, "model": model}
    with RL_Batcher(
        20, make_agent, create_pendulum, agent_args=arguments, env_args={"n_envs": 3}, seed=0
    ) as batcher, torch.no_grad():  # fmt: skip
        batcher.reset()
        for _ in range(2):  # the second batch starts in the middle of an episode
            batcher.execute()
            trajectories, _ = batcher.get()
    assert trajectories is not None
    steps = trajectories.trajectories
    assert (steps["observation/initial_state"].sum(dim=1) >= 2).all()
    with torch.no_grad():
        replayed = replay_agent(make_agent(kind, model), trajectories)
    for key in ("action", "log_probability", "value"):
        torch.testing.assert_close(replayed[key], steps[f"action/{key}"], rtol=1e-6, atol=1e-6)
