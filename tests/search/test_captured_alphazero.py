"""Gradient steps of AlphaZero as one captured graph: the same weights."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from replaying_learners import SMALL, check_captured_steps, collect_batches
from torch import nn

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.algos import GradientLearner
from rlstruct.engine import graph as graph_module
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.search.alphazero import AlphaZeroConfig, AlphaZeroLearner
from rlstruct.sims import ConnectFour

create_agent = partial(SearchAgent, create_simulator=ConnectFour)


def create_network() -> nn.Module:
    torch.manual_seed(3)
    return ConvolutionalActorCritic((2, 6, 7), 7, n_features=8, layers=((4, 3, 1),))


def create_learner(device: str, graph: bool) -> GradientLearner:
    config = AlphaZeroConfig(**SMALL, learner_device=device, graph=graph, max_gradient_norm=0.5, mirror=True)
    return AlphaZeroLearner.create(create_network().to(device), create_agent, config)


def check(device: str) -> None:
    searching = partial(create_agent, config=SearchConfig(n_simulations=2, max_depth=2))
    check_captured_steps(partial(create_learner, device), collect_batches(searching, create_network(), ConnectFour, 4))


def test_a_captured_step_of_alphazero_is_the_step_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    sim_device = importlib.import_module("rlstruct.testing.sim_device")  # older torch has no such device
    capture = sim_device.capture
    monkeypatch.setattr(sim_device, "capture", lambda work: found.append(capture(work)) or found[-1])
    check("sim:0")
    assert len(found) == 1


@pytest.mark.gpu
def test_a_step_of_alphazero_is_captured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found, capture = [], graph_module.capture_cuda
    monkeypatch.setattr(graph_module, "capture_cuda", lambda work: found.append(capture(work)) or found[-1])
    check("cuda:0")
    assert len(found) == 1
