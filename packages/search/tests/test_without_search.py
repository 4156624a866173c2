"""The library without the add-on: each entry to search and AlphaZero names what to install."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from test_addons import run_without_addons
from test_search_policies import TASK

import rlstruct
from rlstruct.algos.checkpoint import read_checkpoint
from rlstruct.cli.main import main

COMMANDS = """
from rlstruct.algos import *
from rlstruct.algos.presets import PRESETS
from rlstruct.cli.agents import named
from rlstruct.cli.main import main

assert "a2c" in ALGORITHMS and "alphazero" not in ALGORITHMS
assert ("a2c", "CartPole-v1") in PRESETS and ("alphazero", "ConnectFour-v0") not in PRESETS
for words in COMMANDS:
    assert main(words) == 2, words
assert main(["play", "ConnectFour-v0", "--steps", "2"]) == 0
print([name for name in sys.modules if name.startswith("rlstruct_")])
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    pytest.importorskip("tyro", reason="needs the extra: pip install 'rlstruct[train]'")
    root = tmp_path_factory.mktemp("runs")
    words = [
        "--env",
        "ConnectFour-v0",
        "--preset",
        "none",
        "--n-env-steps",
        "16",
        "--n-timesteps",
        "4",
        "--n-envs",
        "4",
    ]
    words += ["--n-simulations", "2", "--evaluation-episodes", "2", "--opponent", "random", "--no-progress"]
    assert main(["train", "alphazero", *words, "--runs", str(root), "--network", "n_features=8"]) == 0
    return next(root.iterdir())


def test_each_command_names_the_add_on(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    commands = [
        ["train", "alphazero", "--env", "ConnectFour-v0"], ["train", "--resume", str(run)], ["evaluate", str(run)],
        ["play", str(run)], ["play", "connect-four"], ["export", str(run)],
    ]  # fmt: skip
    done = run_without_addons(f"COMMANDS = {commands}{COMMANDS}", tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["[]"]), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("rlstruct ")]
    assert len(said) == len(commands), done.stderr
    for words, line in zip(commands, said, strict=True):
        assert line.startswith(f"rlstruct {words[0]}: "), line
        assert " needs the add-on rlstruct-search, which is not installed" in line
        assert "pip install -e packages/search" in line


def test_a_training_of_another_algorithm_runs(tmp_path: pathlib.Path) -> None:
    words = ["train", "a2c", "--env", "CartPole-v1", "--n-env-steps", "200", "--n-processes", "0", "--no-progress"]
    words += ["--evaluation-processes", "0", "--evaluation-episodes", "2", "--preset", "none"]
    code = f"from rlstruct.cli.main import main; raise SystemExit(main({words}))"
    done = run_without_addons(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_checkpoint_names_the_add_on_that_it_needs(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
    done = run_without_addons(f"import rlstruct; rlstruct.load({str(run)!r})", tmp_path)
    assert "MissingPackageError: rlstruct.load: rlstruct_search.agent:SearchAgent needs the add-on" in done.stderr


def test_a_checkpoint_of_an_older_version_names_classes_by_their_old_modules(tmp_path: pathlib.Path) -> None:
    path = TASK.train(tmp_path)
    state = read_checkpoint(path / "checkpoint.pt")
    text = json.dumps(state["policy"]["agent"])
    assert text.count("rlstruct_search.") == 2  # agent and settings
    state["policy"]["agent"] = json.loads(text.replace("rlstruct_search.", "rlstruct.search."))
    torch.save(state, tmp_path / "old.pt")
    new, old = rlstruct.load(path), rlstruct.load(tmp_path / "old.pt")
    agents = new.agent(False), old.agent(False)
    assert type(agents[0]) is type(agents[1])
    assert agents[0].search.config == agents[1].search.config  # type: ignore[attr-defined]
