"""A loaded policy of AlphaZero searches as its training did; an exported one is the network alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rollouts import SEED, check_actions, check_exported, check_single_observations, onnx_file, played
from torch import Tensor
from trainings import SMALL, Task

import rlstruct
from rlstruct import Policy, Trajectories
from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.policies.blueprint import build, describe
from rlstruct.search import SearchAgent, SearchConfig, alphazero
from rlstruct.search.alphazero import AlphaZeroConfig
from rlstruct.sims import ConnectFour

GAME = AlphaZeroConfig(
    **{**SMALL, "evaluation_episodes": 2}, n_simulations=4, learning_starts=8, n_updates=1, batch_size=8,
    opponent="random", mirror=True,
)  # fmt: skip
TASK = Task(
    lambda: ConvolutionalActorCritic((2, 6, 7), 7, n_features=8, layers=((4, 4, 1),)),
    SearchAgent,
    ConnectFour,
    alphazero,
    GAME,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TASK.train(tmp_path_factory.mktemp("runs"))


def games(run: Path, stochastic: bool) -> Trajectories:
    return played(TASK, run, stochastic, create_simulator=ConnectFour, config=GAME.search(4), discount=-1.0)


@pytest.mark.parametrize("stochastic", [False, True], ids=["best", "drawn"])
def test_the_moves_of_a_search(run: Path, stochastic: bool) -> None:
    check_actions(games(run, stochastic), rlstruct.load(run, stochastic=stochastic, seed=SEED))


def test_one_board_is_a_batch_without_its_axis(run: Path) -> None:
    check_single_observations(games(run, stochastic=False), run)


def test_the_policy_takes_the_best_moves_as_evaluations_do(run: Path) -> None:
    assert not rlstruct.load(run).stochastic


def move_of_the_network(policy: Policy, frame: dict[str, Tensor]) -> Any:
    """Return the move of the network alone: the policy searches, the file does not."""
    logits, _ = policy.model(frame["frame/board"])
    return logits.masked_fill(~frame["frame/legal"], -torch.inf).argmax(-1).numpy()


@pytest.mark.slow
def test_torch_export_of_a_search(run: Path, tmp_path: Path) -> None:
    policy, file = rlstruct.load(run, stochastic=False), tmp_path / "policy.pt2"
    assert rlstruct.export(policy, file) < 1e-5
    check_exported(torch.export.load(file).module(), policy, move_of_the_network)


@pytest.mark.slow
def test_onnx_of_a_search(run: Path, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[onnx]'")
    policy, file = rlstruct.load(run, stochastic=False), tmp_path / "policy.onnx"
    assert rlstruct.export(policy, file) < 1e-4
    check_exported(onnx_file(file), policy, move_of_the_network)


def test_a_search_is_made_again() -> None:
    model = ConvolutionalActorCritic((2, 6, 7), 7, n_features=8, layers=((4, 4, 1),))
    config = SearchConfig(method="puct", n_simulations=5, reuse_tree=True)
    agent = SearchAgent(model, create_simulator=ConnectFour, config=config, discount=-0.9)
    again = build(describe(agent.creator()))(model)
    assert again.search.config == config
    assert again.game.discount == -0.9
