"""The table in docs/networks.md: each cell names the network that the command line builds, or says "no"."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlstruct import agents
from rlstruct.agents.networks import Recurrent
from rlstruct.algos import ALGORITHMS
from rlstruct.cli.agents import choose, prepare
from rlstruct.cli.messages import UserError
from rlstruct.cli.tasks import Task

Space = spaces.Space[object]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "networks.md"
NUMBERS = spaces.Box(-1.0, 1.0, (4,))
OBSERVATIONS: dict[str, list[Space]] = {
    "numbers": [NUMBERS, spaces.Dict(place=NUMBERS, side=spaces.Discrete(3)), spaces.Tuple([NUMBERS, NUMBERS])],
    "image": [
        spaces.Box(0, 1, (10, 10, 4), "uint8"),
        spaces.Box(0, 255, (96, 96, 3), "uint8"),
        spaces.Box(0, 255, (4, 84, 84), "uint8"),
        spaces.Box(0.0, 1.0, (8, 8)),
    ],
    "small grid": [spaces.Box(0, 255, (7, 7, 3), "uint8"), spaces.Box(0.0, 1.0, (7, 7))],
    "board and legal actions": [spaces.Dict(frame=spaces.Box(0, 1, (2, 6, 7), "uint8"), legal=spaces.MultiBinary(3))],
}
ONE, BOUNDED = spaces.Discrete(3), spaces.Box(-1.0, np.array([1.0, 2.0], np.float32), (2,))
ACTIONS: dict[str, list[Space]] = {
    "choices": [ONE, spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(4)],
    "one choice": [ONE],
    "vector": [spaces.Box(-np.inf, np.inf, (2,)), BOUNDED],
    "bounded vector": [BOUNDED],
}


def table() -> list[list[str]]:
    """Return the cells of the table, the first row with the names of the columns."""
    text = PAGE.read_text(encoding="utf-8").partition("## Which network is built")[2]
    lines = [line for line in text.partition("## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


HEAD, *ROWS = table()
CELLS = [
    pytest.param(
        algorithm.lower(), row[0], tuple(re.findall("`(.+?)`", row[1])), kind, cell, id=f"{i}-{algorithm}-{kind}"
    )
    for i, row in enumerate(ROWS)
    for head, cell in zip(HEAD[2:], row[2:], strict=True)
    for kind, names in re.findall(r"(.+) \((.+)\)", head)
    for algorithm in names.split(", ")
]


def parts(model: nn.Module) -> list[str]:
    """Return the names of a network, or of its two parts."""
    several = list(model) if type(model) is nn.Sequential else [model]
    if isinstance(model, Recurrent) and not isinstance(model.trunk, nn.Identity):
        several.append(model.trunk)
    return [type(part).__name__ for part in several]


@pytest.mark.parametrize(("algorithm", "shown", "words", "expected", "cell"), CELLS)
def test_a_cell_names_what_is_built(
    algorithm: str, shown: str, words: tuple[str, ...], expected: str, cell: str
) -> None:
    for observation in OBSERVATIONS[shown]:
        for action in ACTIONS[expected]:
            if cell == "no":
                with pytest.raises(UserError):
                    choose(algorithm, Task(env="E", network=words), observation, action)
                continue
            with torch.device("meta"):
                model = choose(algorithm, Task(env="E", network=words), observation, action).create_model()
            assert parts(model) == re.findall("`(.+?)`", cell)
            kinds = {type(module) for module in model.modules()}
            assert ("duelling" in cell.lower()) == (agents.DuellingHead in kinds)
            assert ("layer norm" in cell) == (nn.LayerNorm in kinds)


def test_the_table_has_every_algorithm_every_kind_of_space_and_every_network() -> None:
    assert {cell.values[0] for cell in CELLS} == set(ALGORITHMS)
    assert {row[0] for row in ROWS} == set(OBSERVATIONS)
    assert {cell.values[3] for cell in CELLS} == set(ACTIONS)
    bundled = {name for name in agents.__all__ if issubclass(getattr(agents, name), nn.Module)}
    built = {name for row in ROWS for cell in row[2:] for name in re.findall("`(.+?)`", cell)}
    assert built - {"Linear"} == bundled - {"MLP", "Critics", "Normalised", "RunningMoments"}


@pytest.mark.parametrize("env", ["FrozenLake-v1", "Blackjack-v1"])
def test_categories_become_numbers(env: str) -> None:
    """A Discrete observation, and a Tuple of three."""
    factory, choice = prepare("ppo", Task(env=env))
    created = factory(n_envs=1)
    created.close()
    (size,) = created.observation_space.shape
    model = choice.create_model()
    assert parts(model) == ["ActorCritic"]
    assert model.actor.layers[0].in_features == size > 3


def test_normalise_puts_a_layer_around_the_network() -> None:
    choice = choose("ppo", Task(env="E", network=("normalise=true",)), NUMBERS, ONE)
    assert parts(choice.create_model()) == ["Normalised"]
