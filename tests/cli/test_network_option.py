"""``--network``: its settings reach the network of every algorithm, and mistakes in them are refused."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlstruct.agents.networks import ACTIVATIONS
from rlstruct.cli.agents import choose
from rlstruct.cli.messages import UserError
from rlstruct.cli.tasks import Task, read_settings

NUMBERS, GRID = spaces.Box(-1.0, 1.0, (4,)), spaces.Box(0, 1, (10, 10, 4), "uint8")
ONE, SEVERAL, VECTOR = spaces.Discrete(3), spaces.MultiDiscrete([3, 2]), spaces.Box(-1.0, 1.0, (2,))
FITTING = [  # algorithm, observations, actions, memory
    ("reinforce", NUMBERS, ONE, False),
    ("a2c", NUMBERS, SEVERAL, False),
    ("ppo", NUMBERS, VECTOR, False),
    ("ppo", NUMBERS, ONE, True),
    ("ppo", NUMBERS, VECTOR, True),
    ("ppo", GRID, ONE, False),
    ("dqn", NUMBERS, ONE, False),
    ("dqn", GRID, ONE, False),
    ("pqn", NUMBERS, ONE, False),
    ("pqn", NUMBERS, ONE, True),
    ("pqn", GRID, ONE, False),
    ("sac", NUMBERS, VECTOR, False),
]


def network(
    algorithm: str, shown: spaces.Space, actions: spaces.Space, recurrent: bool = False, *settings: str
) -> nn.Module:
    return choose(algorithm, Task(env="E", recurrent=recurrent, network=settings), shown, actions).create_model()


def kinds(model: nn.Module) -> set[type[nn.Module]]:
    return {type(module) for module in model.modules()}


@pytest.mark.parametrize(("algorithm", "shown", "actions", "recurrent"), FITTING)
def test_every_algorithm_takes_an_activation_and_layer_norm(
    algorithm: str, shown: spaces.Space, actions: spaces.Space, recurrent: bool
) -> None:
    task = (algorithm, shown, actions, recurrent)
    assert nn.LayerNorm not in kinds(network(*task, "layer_norm=false"))
    model = network(*task, "activation=silu", "layer_norm=True")
    assert kinds(model) & set(ACTIVATIONS.values()) == {nn.SiLU}
    assert nn.LayerNorm in kinds(model) or hasattr(model, "critics")
    actor = model.actor if hasattr(model, "critics") else model  # critics of SAC compute it without a layer
    assert nn.LayerNorm in kinds(actor)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_between_the_layers(name: str) -> None:
    first, between, last = network("ppo", NUMBERS, ONE, False, "hidden=[5]", f"activation={name}").actor.layers
    x = torch.randn(3, 4)
    torch.testing.assert_close(last(getattr(nn.functional, name)(first(x))), last(between(first(x))))


@pytest.mark.parametrize("algorithm", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize("hidden", ["hidden=16", "hidden=[16]", "hidden=(16,)"])
def test_one_width_may_be_a_single_number(algorithm: str, hidden: str) -> None:
    actions = VECTOR if algorithm == "sac" else ONE
    shapes = {
        name: value.shape for name, value in network(algorithm, NUMBERS, actions, False, hidden).state_dict().items()
    }
    expected = network(algorithm, NUMBERS, actions, False, "hidden=[16]").state_dict()
    assert shapes == {name: value.shape for name, value in expected.items()}
    assert any(16 in shape for shape in shapes.values())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("activation=rellu", "activation is 'rellu', expected one of elu, gelu, leaky_relu, relu, silu, tanh"),
        ("activation=3", "activation is 3, expected one of"),
        ("layer_norm=maybe", "--network layer_norm=maybe: expected true or false."),
        ("layer_norm=1", "--network layer_norm=1: expected true or false."),
        ("normalise=yes", "--network normalise=yes: expected true or false."),
        ("hidden=0", r"hidden is \[0\], expected a sequence of whole numbers"),
        ("hidden=true", "hidden is True, expected a sequence of whole numbers"),
        ("hidden=1.5", "hidden is 1.5, expected a sequence of whole numbers"),
        ("layernorm=true", "there are only hidden, activation, orthogonal, layer_norm, normalise. Did you mean"),
    ],
)
def test_mistakes_are_refused(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        network("ppo", NUMBERS, ONE, False, word)


def test_values_are_json_or_literals_of_python_or_text() -> None:
    words = ("a=true", "b=True", "c=[1,2]", "d=(1,2)", "e=None", "f=relu", "g=1_000", "h='x'", 'i={"k": 1}')
    assert read_settings("--network", words, "hidden=16") == {
        "a": True, "b": True, "c": [1, 2], "d": (1, 2), "e": None, "f": "relu", "g": 1000, "h": "x", "i": {"k": 1},
    }  # fmt: skip


CELLS = spaces.Box(0, 255, (7, 7, 3), "uint8")  # of MiniGrid


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo", "dqn", "pqn"])
def test_convolutions_for_small_grids_have_names(algorithm: str) -> None:
    assert nn.Conv2d not in kinds(network(algorithm, CELLS, ONE))  # 7 x 7 cells are numbers by default
    model = network(algorithm, CELLS, ONE, False, "layers=minigrid")
    filters = [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert filters == [16, 32, 64]
    (trunk,) = (part for part in model.modules() if hasattr(part, "convolutions"))
    assert trunk.highest == 10
    assert trunk.channels_last
    agents_code = torch.full((1, 7, 7, 3), 10, dtype=torch.uint8)
    torch.testing.assert_close(trunk(agents_code), trunk(torch.ones(1, 7, 7, 3)))


def test_convolutions_of_minatar_are_those_that_its_frames_get_by_default() -> None:
    default, named = (network("ppo", GRID, ONE, False, *words) for words in ((), ("layers=minatar",)))
    assert str(default) == str(named)


@pytest.mark.parametrize(
    ("algorithm", "shown", "actions", "words", "says"),
    [
        ("ppo", NUMBERS, ONE, ["layers=minigrid"], r"--network layers: .* and here frames have shape \[4\]\."),
        ("sac", CELLS, VECTOR, ["layers=minigrid"], "--network layers: .* SAC has no network for images: use ppo or"),
        ("ppo", CELLS, ONE, ["layers=minigird"], "layers is 'minigird', expected one of atari, minatar, minigrid, or"),
        ("ppo", CELLS, ONE, ["layers=atari"], r"a kernel of 8 does not fit into 7 x 7 pixels"),
        ("ppo", CELLS, ONE, ["layers=minigrid", "highest=0"], "highest is 0, expected the byte that becomes 1"),
        ("dqn", CELLS, ONE, ["layers=minigrid", "hidden=64"], "--network hidden: there are only n_features, layers,"),
    ],
)
def test_convolutions_that_do_not_fit_are_refused(
    algorithm: str, shown: spaces.Space, actions: spaces.Space, words: list[str], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        network(algorithm, shown, actions, False, *words)
