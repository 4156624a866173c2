"""Every bundled agent keeps the contract of RL_Agent on any device, never waits for it, and acts alike everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from random_env import RandomEnv

from rlstruct import DictTensor
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalActorCritic,
    ConvolutionalGaussianActorCritic,
    ConvolutionalTrunk,
    GaussianActorCritic,
    GaussianAgent,
    QAgent,
    QNetwork,
    RandomAgent,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
    RecurrentQAgent,
    RecurrentQNetwork,
    SoftActorCritic,
    SquashedGaussianAgent,
)
from rlstruct.testing import check_agent

FRAMES, IMAGES = spaces.Box(-1.0, 1.0, (4,)), spaces.Box(0, 255, (4, 10, 10), "uint8")
DISCRETE, SEVERAL = spaces.Discrete(3), spaces.MultiDiscrete([3, 2])
UNBOUNDED, BOUNDED = spaces.Box(-math.inf, math.inf, (2,)), spaces.Box(-1.0, 3.0, (2,))
NESTED = spaces.Dict(
    {
        "move": spaces.Discrete(3, start=-1),
        "rest": spaces.Tuple([spaces.Box(-2.0, 2.0, (2,)), spaces.MultiDiscrete([2, 5]), spaces.MultiBinary(3)]),
    }
)
AGENTS: dict[str, tuple[Any, Callable[[], Any], spaces.Space[Any]]] = {
    "actor-critic": (ActorCriticAgent, lambda: ActorCritic(4, 3, hidden=(8,)), DISCRETE),
    "recurrent": (RecurrentAgent, lambda: RecurrentActorCritic(4, 3, n_hidden=8), DISCRETE),
    "gaussian": (GaussianAgent, lambda: GaussianActorCritic(4, 2, hidden=(8,)), UNBOUNDED),
    "recurrent gaussian": (RecurrentGaussianAgent, lambda: RecurrentGaussianActorCritic(4, 2, n_hidden=8), UNBOUNDED),
    "several choices": (ActorCriticAgent, lambda: ActorCritic(4, (3, 2), hidden=(8,)), SEVERAL),
    "several, recurrent": (RecurrentAgent, lambda: RecurrentActorCritic(4, (3, 2), n_hidden=8), SEVERAL),
    "values": (QAgent, lambda: QNetwork(4, 3, hidden=(8,)), DISCRETE),
    "duelling values": (QAgent, lambda: QNetwork(4, 3, hidden=(8,), duelling=True), DISCRETE),
    "normal values": (QAgent, lambda: QNetwork(4, 3, hidden=(8,), layer_norm=True), DISCRETE),
    "recurrent values": (RecurrentQAgent, lambda: RecurrentQNetwork(4, 3, n_hidden=8, layer_norm=True), DISCRETE),
    "squashed": (SquashedGaussianAgent, lambda: SoftActorCritic(4, (-1.0,) * 2, (3.0,) * 2, hidden=(8,)), BOUNDED),
    "images": (ActorCriticAgent, lambda: ConvolutionalActorCritic((4, 10, 10), 3, n_features=16), DISCRETE),
    "gaussian, images": (
        GaussianAgent,
        lambda: ConvolutionalGaussianActorCritic((4, 10, 10), 2, n_features=16),
        UNBOUNDED,
    ),
    "recurrent, images": (RecurrentAgent, lambda: RecurrentActorCritic(trunk(), 3, n_hidden=8), DISCRETE),
    "recurrent gaussian, images": (
        RecurrentGaussianAgent,
        lambda: RecurrentGaussianActorCritic(trunk(), 2, n_hidden=8),
        UNBOUNDED,
    ),
    "recurrent values, images": (RecurrentQAgent, lambda: RecurrentQNetwork(trunk(), 3, n_hidden=8), DISCRETE),
}


def trunk() -> ConvolutionalTrunk:
    return ConvolutionalTrunk((4, 10, 10), n_features=16)


def check(name: str, *, device: str = "cpu", stochastic: bool = True, **settings: Any) -> None:
    torch.manual_seed(1)
    kind, create_model, actions = AGENTS[name]
    agent = kind(create_model(), device=device, stochastic=stochastic)
    assert agent.pure
    env = RandomEnv(IMAGES if "images" in name else FRAMES, actions, device=device)
    check_agent(agent, env, **settings)
    if agent.agent_info_on_device:
        info = DictTensor({"epsilon": torch.linspace(0, 1, 5)})
        check_agent(agent, env, agent_info=info, **settings)


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("name", AGENTS)
def test_agents_keep_the_contract_and_never_sync(name: str, stochastic: bool, device: str) -> None:
    check(name, device=device, stochastic=stochastic, host_syncs=True, executors=False)


# Each class of agents once, and each kind of network that is compiled; the other pairs of the two are exhaustive.
COMPILED = {
    "several choices", "recurrent, images", "gaussian, images", "recurrent gaussian", "duelling values",
    "recurrent values", "squashed",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=getattr(pytest.mark, "slow" if name in COMPILED else "exhaustive")) for name in AGENTS],
)
def test_agents_act_alike_by_every_executor(name: str) -> None:
    check(name, n_steps=3)


@pytest.mark.parametrize("name", ["actor-critic", "recurrent", "values"])
def test_a_captured_graph_acts_as_the_agent_does(name: str) -> None:
    check(name, device="sim:1", n_steps=3)


@pytest.mark.parametrize("device", ["cpu", "sim:1"])
@pytest.mark.parametrize("space", [DISCRETE, NESTED, FRAMES, UNBOUNDED], ids=["discrete", "nested", "box", "unbounded"])
def test_the_random_agent_keeps_the_contract_and_never_syncs(space: spaces.Space[Any], device: str) -> None:
    agent = RandomAgent(space, device=device)
    assert agent.pure
    check_agent(agent, RandomEnv(FRAMES, space, device=device), host_syncs=True, executors=False)


class Summarised(ActorCriticAgent):
    """Adds a method, and does not change how the agent acts."""

    def summary(self) -> str:
        return "an agent"


class Louder(ActorCriticAgent):
    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return super().initial_state(agent_info, B)


def test_a_subclass_repeats_promises_only_if_it_overrides_a_method() -> None:
    assert (Summarised.pure, Summarised.action_form) == (True, "index")
    assert (Louder.pure, Louder.action_form) == (False, "element")
