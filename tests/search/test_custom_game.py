"""The game of docs/custom_game.md: its rules, and AlphaZero on it from the command line."""

from __future__ import annotations

import importlib
import pathlib
import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import rlstruct
from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.cli.main import main
from rlstruct.functional.random import categorical
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.testing import check_vec_env

pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")

Capture = pytest.CaptureFixture[str]
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "custom_game.md"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.filterwarnings("default:run_training. the checkpoints of this training do not contain")
def test_the_game_of_the_guide_follows_its_rules_and_learns_by_self_play(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "tictactoe.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    game = importlib.import_module("tictactoe").TicTacToe
    check_vec_env(game, env_args={"n_envs": 4})
    env = game(1, auto_reset=False)
    env.reset()
    rewards = []
    for move in (0, 3, 1, 4, 2):  # the first player fills the first row
        (reached, _), _ = env.step(DictTensor({"action": torch.tensor([move])}))
        rewards.append((float(reached["reward"]), bool(reached["done"])))
    assert rewards == [(0.0, False)] * 4 + [(1.0, True)]
    words = [
        "--n-env-steps",
        "64",
        "--n-timesteps",
        "4",
        "--n-envs",
        "4",
        "--n-processes",
        "0",
        "--learning-starts",
        "16",
        "--batch-size",
        "8",
    ]
    words += ["--n-simulations", "4", "--opponent-simulations", "4", "--evaluation-episodes", "2", "--no-progress"]
    network = ["--network", "layers=[[8,3,1]]", "n_features=8"]
    assert main(["train", "alphazero", "--env", "tictactoe:TicTacToe", *network, *words]) == 0
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1
    assert "the agent is rlstruct.search.agent.SearchAgent made with tictactoe.TicTacToe. In Python, pass" in said
    assert "one of rlstruct train finds the class that --env names" in said
    (run,) = pathlib.Path("runs").iterdir()
    assert main(["evaluate", str(run), "--episodes", "2"]) == 0
    assert "2 games against UCT with 4 simulations" in capsys.readouterr().out
    assert main(["play", str(run), "--steps", "3", "--out", "game.png"]) == 0
    assert main(["export", str(run)]) == 0
    search = partial(SearchAgent, create_simulator=game, config=SearchConfig(n_simulations=4))
    policy = rlstruct.load(run, create_agent=search)
    assert policy.act({"board": np.zeros((2, 3, 3), bool), "legal": np.ones(9, bool)}) in range(9)


class AnyMove(RL_Agent):
    """Plays a random square."""

    pure = True

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> Any:
        logits = torch.where(observation["frame/legal"], 0.0, -torch.inf)
        return DictTensor({"action": categorical(logits, observation["rng"])}), state


def test_the_game_of_the_guide_is_collected_as_one_graph() -> None:
    """A step that copied from the CPU could not be captured."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"__name__": "tictactoe"}
    exec(code[1], names)
    with RL_Batcher(
        6, AnyMove, names["TicTacToe"], env_args={"n_envs": 4, "device": "sim:1"}, device="sim:1", seed=0
    ) as batcher:
        batcher.reset()
        for _ in range(4):
            batcher.execute()
            batch, _ = batcher.get()
        assert batch is not None
        assert batcher.stats().executors == ("graph",)


def test_a_run_of_a_program_goes_on_with_three_factories(tmp_path: pathlib.Path, capsys: Capture) -> None:
    assert main(["train", "alphazero", "--resume", str(tmp_path), "--factory", "own_games:create_env"]) == 2
    assert "alphazero needs create_env, create_model and create_agent" in capsys.readouterr().err
