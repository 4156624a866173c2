"""Agents for continuous actions, with and without memory: outputs, densities and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from random_observations import observe

from rlstruct import DictTensor, RL_Agent
from rlstruct.agents import (
    GaussianActorCritic,
    GaussianAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
)

KINDS = ["feed-forward", "recurrent"]


def make_model(kind: str) -> Any:
    torch.manual_seed(1)
    if kind == "feed-forward":
        return GaussianActorCritic(3, 2, hidden=(8,))
    return RecurrentGaussianActorCritic(3, 2, n_hidden=8)


def make_agent(kind: str, model: Any, **arguments: Any) -> RL_Agent:
    return (GaussianAgent if kind == "feed-forward" else RecurrentGaussianAgent)(model, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_have_the_documented_keys_and_agree_with_each_other(kind: str) -> None:
    agent = make_agent(kind, make_model(kind))
    output, _ = agent(agent.initial_state(DictTensor(), 5), observe(5, 3), DictTensor())
    assert set(output.keys()) == {"action", "action_mean", "action_log_std", "log_probability", "value"}
    assert [tuple(output[key].shape) for key in ("action", "action_mean", "action_log_std")] == [(5, 2)] * 3
    oracle = torch.distributions.Normal(output["action_mean"], output["action_log_std"].exp())
    torch.testing.assert_close(output["log_probability"], oracle.log_prob(output["action"]).sum(-1))


def test_the_mean_is_the_action_without_draws_and_the_deviation_is_as_asked() -> None:
    model = GaussianActorCritic(3, 2, initial_log_std=-1.0)
    output, _ = GaussianAgent(model, stochastic=False)(DictTensor(), observe(4, 3), DictTensor())
    assert torch.equal(output["action"], output["action_mean"])
    assert (output["action_log_std"] == -1.0).all()
    drawn, _ = GaussianAgent(model)(DictTensor(), observe(4000, 3), DictTensor())
    noise = drawn["action"] - drawn["action_mean"]
    torch.testing.assert_close(noise.std(0), torch.full((2,), math.exp(-1.0)), rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_weight_and_none_goes_through_the_draw(kind: str) -> None:
    model = make_model(kind)
    agent = make_agent(kind, model, copy_model=False)
    output, _ = agent(agent.initial_state(DictTensor(), 5), observe(5, 3), DictTensor())
    assert not output["action"].requires_grad
    (output["log_probability"].sum() + output["value"].sum()).backward()
    # The recurrent state starts at zero: what multiplies it gets a gradient of zero, which is one.
    assert all(weight.grad is not None for weight in model.parameters())
