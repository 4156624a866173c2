"""Searches that are captured on an accelerator: which ones, and with whose weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.core import DictTensor
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.sims import ConnectFour

CONFIG = SearchConfig(method="puct", n_simulations=6, max_depth=4)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured on the simulated accelerator."""
    found: list[Any] = []
    sim = importlib.import_module("rlstruct.testing.sim_device")  # older torch has no such device
    capture = sim.capture
    monkeypatch.setattr(sim, "capture", lambda work: found.append(capture(work)) or found[-1])
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return ConvolutionalActorCritic((2, 6, 7), 7, n_features=16, layers=[(8, 4, 1)])


def observed(device: str) -> DictTensor:
    game = ConnectFour(5, device=device)
    observation, _ = game.reset()
    return observation + DictTensor({"rng": torch.arange(5, device=device)})


def answer(agent: SearchAgent, device: str) -> dict[str, torch.Tensor]:
    action, _ = agent(DictTensor(), observed(device), DictTensor())
    return {key: value.to("cpu") for key, value in action.items()}


def change_in_new_memory(model: nn.Module) -> None:
    for weight in model.parameters():
        weight.data = weight.data * -4.0


def load_by_assignment(model: nn.Module) -> None:
    model.load_state_dict({k: weight * -4.0 for k, weight in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("replace", [change_in_new_memory, load_by_assignment])
def test_weights_that_others_take_the_place_of_are_seen(
    replace: Callable[[nn.Module], None], captured: list[Any]
) -> None:
    agents = {
        device: SearchAgent(network(), create_simulator=ConnectFour, config=CONFIG, device=device)
        for device in ("cpu", "sim:0")
    }
    values: list[torch.Tensor] = []
    for n in (1, 2):
        for _ in range(3):  # eager, captured, replayed
            found = {device: answer(agent, device) for device, agent in agents.items()}
            for key in found["cpu"]:
                torch.testing.assert_close(found["sim:0"][key], found["cpu"][key])
        assert len(captured) == n
        values.append(found["cpu"]["action_value"])
        for agent in agents.values():
            assert agent.model is not None
            replace(agent.model)
    assert not torch.allclose(*values)


def test_a_match_against_random_games_captures_no_graph_of_them(captured: list[Any]) -> None:
    """Their graph would hold every move up to the greatest length: 336,000 operations."""
    uct = SearchAgent(create_simulator=ConnectFour, config=SearchConfig(method="uct", n_simulations=4), device="sim:0")
    here = SearchAgent(create_simulator=ConnectFour, config=SearchConfig(method="uct", n_simulations=4), device="cpu")
    for _ in range(3):
        found, expected = answer(uct, "sim:0"), answer(here, "cpu")
        for key in expected:
            torch.testing.assert_close(found[key], expected[key])
    assert not captured
