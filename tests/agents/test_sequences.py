"""Recurrent agents are replayed as sequences: what steps one by one give, with only the cell in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces
from random_env import RandomEnv
from torch import Tensor, nn

from rlstruct import DictTensor, Trajectories, replay_agent
from rlstruct.agents import (
    ConvolutionalTrunk,
    Normalised,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
    RecurrentQAgent,
    RecurrentQNetwork,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.sims import make

D = torch.float64


def normalised() -> nn.Module:
    model = Normalised(RecurrentActorCritic(4, 2, n_hidden=5), (4,))
    model.see_frames(torch.randn(1, 50, 4), torch.ones(1, 50, dtype=torch.bool))
    return model


def trunk() -> ConvolutionalTrunk:
    return ConvolutionalTrunk((10, 10, 4), channels_last=True, n_features=7, layers=((3, 3, 2),))


IMAGES, VECTORS = spaces.Box(0, 255, (10, 10, 4), "uint8"), spaces.Box(-9.0, 9.0, (2,))
GAME = "Breakout-MinAtar"  # shows [10, 10, 4]
KINDS: dict[str, tuple[Any, Callable[[], nn.Module], str]] = {
    "discrete": (RecurrentAgent, lambda: RecurrentActorCritic(4, 2, n_hidden=5), "CartPole-v1"),
    "continuous": (RecurrentGaussianAgent, lambda: RecurrentGaussianActorCritic(3, 1, n_hidden=5), "Pendulum-v1"),
    "values": (RecurrentQAgent, lambda: RecurrentQNetwork(4, 2, n_hidden=5, layer_norm=True), "CartPole-v1"),
    "normalised": (RecurrentAgent, normalised, "CartPole-v1"),
    "discrete, images": (RecurrentAgent, lambda: RecurrentActorCritic(trunk(), 3, n_hidden=5), GAME),
    "continuous, images": (
        RecurrentGaussianAgent,
        lambda: RecurrentGaussianActorCritic(trunk(), 2, n_hidden=5),
        "images",
    ),
    "values, images": (RecurrentQAgent, lambda: RecurrentQNetwork(trunk(), 3, n_hidden=5, layer_norm=True), GAME),
}


def by_steps(create_agent: Any, model: nn.Module) -> Any:
    """The same agent, which only its own calls can replay."""

    class BySteps(create_agent):  # type: ignore[misc]
        def __call__(self, *given: Any, **named: Any) -> tuple[DictTensor, DictTensor]:
            answer: tuple[DictTensor, DictTensor] = super().__call__(*given, **named)
            return answer

    return BySteps(model, copy_model=False)


def collect(create_agent: Any, model: nn.Module, game: str) -> Trajectories:
    def create_env(seed: int) -> Any:
        if game == "images":
            return RandomEnv(IMAGES, VECTORS, 3, seed)
        return make(game, 3, seed=seed, time_limit=9)

    values = {"epsilon": torch.tensor([0.0, 0.5, 1.0]), "goal": torch.ones(3, 2)}  # also what no bundled agent reads
    info = DictTensor(values if create_agent is RecurrentQAgent else {})
    with RL_Batcher(12, lambda: create_agent(model, copy_model=False), create_env, seed=0) as batcher:
        batcher.reset()
        batcher.execute(info)  # the next batch begins in the middle of episodes
        batcher.get()
        batcher.execute(info)
        batch: Trajectories = batcher.get()[0]
    assert 3 <= batch.steps["observation/initial_state"].sum() < 36
    assert batch.info["agent_state/hidden"].abs().min() > 0
    model.to(D)  # replays are compared in double precision
    info = batch.info.map(lambda value: value.to(D) if value.is_floating_point() else value)
    return Trajectories(info, batch.steps)


def replayed(agent: Any, model: nn.Module, batch: Trajectories) -> tuple[dict[str, Tensor], list[Tensor]]:
    outputs = replay_agent(agent, batch)
    if "action_values" in outputs.keys():
        assert torch.equal(outputs["action"], batch.steps["action/action"])  # explores where it explored
        loss = outputs["action_values"].square().sum()
    else:
        loss = outputs["log_probability"].sum() + outputs["value"].square().sum()
    return dict(outputs.items()), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_is_replayed_as_its_steps_are(kind: str) -> None:
    create_agent, create_model, game = KINDS[kind]
    torch.manual_seed(0)
    model = create_model()
    batch = collect(create_agent, model, game)
    calls = []
    network: Any = model.model if kind == "normalised" else model
    head = network.head if kind.startswith("values") else network.critic
    forward = head.forward
    head.forward = lambda x: calls.append(len(x)) or forward(x)
    outputs, gradients = replayed(create_agent(model, copy_model=False), model, batch)
    assert calls == [36]
    expected, others = replayed(by_steps(create_agent, model), model, batch)
    assert calls == [36] + [3] * 12
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, others, rtol=0, atol=1e-10)


class Doubled(RecurrentActorCritic):
    """Changes what the network computes, but not its ``sequence``."""

    def forward(self, frame: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy, value, after = super().forward(frame, hidden)
        return policy, 2 * value, after


def hooked() -> nn.Module:
    model = RecurrentActorCritic(4, 2, n_hidden=5)
    model.register_forward_hook(lambda module, given, answer: (answer[0], 3 * answer[1], answer[2]))
    return model


def wrapped() -> nn.Module:
    return Normalised(Doubled(4, 2, n_hidden=5), (4,))


@pytest.mark.parametrize("create_model", [lambda: Doubled(4, 2, n_hidden=5), hooked, wrapped])
def test_a_network_that_computes_something_else_is_replayed_by_steps(create_model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = create_model()
    batch = collect(RecurrentAgent, model, "CartPole-v1")
    outputs, gradients = replayed(RecurrentAgent(model, copy_model=False), model, batch)
    torch.testing.assert_close(outputs["value"], batch.steps["action/value"].to(D), rtol=0, atol=1e-5)
    expected = replayed(by_steps(RecurrentAgent, model), model, batch)[1]
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)
