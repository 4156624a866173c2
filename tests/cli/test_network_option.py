"""``--network``: its settings reach the network of every algorithm, and mistakes in them are refused."""

from __future__ import annotations

import argparse

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlstruct.agents import (
    ConvolutionalGaussianActorCritic,
    ConvolutionalTrunk,
    GaussianAgent,
    RecurrentAgent,
    RecurrentGaussianAgent,
    RecurrentQAgent,
    StackingAgent,
)
from rlstruct.agents.networks import ACTIVATIONS, Recurrent
from rlstruct.cli.agents import choose
from rlstruct.cli.initial_settings import read_initial_options, settings_for
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
    ("ppo", GRID, VECTOR, False),
    ("a2c", GRID, ONE, True),
    ("reinforce", GRID, VECTOR, True),
    ("pqn", GRID, ONE, True),
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
        ("recurrent=1", "--network recurrent=1: expected true or false."),
        ("layer_norm=1", "--network layer_norm=1: expected true or false."),
        ("normalise=yes", "--network normalise=yes: expected true or false."),
        ("hidden=0", r"hidden is \[0\], expected a sequence of whole numbers"),
        ("hidden=true", "hidden is True, expected a sequence of whole numbers"),
        ("hidden=1.5", "hidden is 1.5, expected a sequence of whole numbers"),
        ("layernorm=true", "there are only hidden, activation, orthogonal, layer_norm, recurrent, normalise. Did"),
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
        ("ppo", NUMBERS, ONE, ["layers=minigrid"], r"--network layers: .* frames have shape \[4\]: omit layers\."),
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


CAR = spaces.Box(0, 255, (96, 96, 3), "uint8"), spaces.Box(np.array([-1.0, 0.0, 0.0]), np.ones(3), dtype=np.float64)


@pytest.mark.parametrize("algorithm", ["reinforce", "a2c", "ppo"])
def test_car_racing_gets_convolutions_and_a_gaussian_policy(algorithm: str) -> None:
    choice = choose(algorithm, Task(env="CarRacing-v3"), *CAR)
    model = choice.create_model()
    assert type(model) is ConvolutionalGaussianActorCritic
    assert type(choice.create_agent(model)) is GaussianAgent
    policy, value = model(torch.zeros(2, 96, 96, 3, dtype=torch.uint8))
    assert (policy.shape, value.shape) == ((2, 6), (2,))
    words = ("initial_log_std=-1", "n_features=8", "layers=[[4,8,4]]")
    model = network(algorithm, *CAR, False, *words)
    assert torch.equal(model.policy.log_std.detach(), torch.full((3,), -1.0))
    assert model.trunk.n_features == 8


def test_the_refusal_of_images_names_algorithms_that_take_them() -> None:
    with pytest.raises(UserError, match="SAC has no network for images: use ppo or a2c"):
        network("sac", *CAR)


@pytest.mark.parametrize(
    ("algorithm", "actions", "kind"),
    [
        ("reinforce", SEVERAL, RecurrentAgent),
        ("a2c", ONE, RecurrentAgent),
        ("ppo", VECTOR, RecurrentGaussianAgent),
        ("pqn", ONE, RecurrentQAgent),
    ],
)
@pytest.mark.parametrize("shown", [NUMBERS, GRID], ids=["numbers", "images"])
def test_a_memory_is_a_setting_of_the_network(
    algorithm: str, actions: spaces.Space, kind: type, shown: spaces.Space
) -> None:
    choice = choose(algorithm, Task(env="E", network=("recurrent=true", "n_hidden=7")), shown, actions)
    model = choice.create_model()
    assert type(choice.create_agent(model)) is kind
    assert isinstance(model, Recurrent)
    assert model.n_hidden == 7
    assert isinstance(model.trunk, ConvolutionalTrunk if shown is GRID else nn.Identity)
    words = choose(algorithm, Task(env="E", recurrent=True, network=("n_hidden=7",)), shown, actions)
    assert str(words.create_model()) == str(model)  # --recurrent says the same
    forgets = network(algorithm, shown, actions, True, "recurrent=false")
    assert not isinstance(forgets, Recurrent)


def test_settings_of_convolutions_and_of_the_memory_behind_them() -> None:
    words = ("recurrent=true", "layers=[[4,3,1]]", "n_features=9", "n_hidden=5", "highest=10")
    model = network("ppo", CELLS, ONE, False, *words)
    assert (model.trunk.n_features, model.trunk.highest, model.trunk.channels_last) == (9, 10, True)
    assert (model.encoder.layers[0].in_features, model.memory.hidden_size) == (9, 5)
    with pytest.raises(
        UserError, match="--network hidden: there are only n_hidden, activation, orthogonal, layer_norm"
    ):
        network("ppo", GRID, ONE, False, "recurrent=true", "hidden=64")


def test_a_memory_behind_stacks_of_atari_frames() -> None:
    frames, task = spaces.Box(0, 255, (1, 84, 84), "uint8"), Task(env="E", network=("recurrent=true",))
    choice = choose("ppo", task, frames, ONE, stack=4)
    model = choice.create_model()
    agent = choice.create_agent(model)
    assert isinstance(agent, StackingAgent)
    assert isinstance(agent.agent, RecurrentAgent)
    assert model.trunk.frame_shape == (4, 84, 84)


@pytest.mark.parametrize(
    ("algorithm", "actions", "says"),
    [
        ("dqn", ONE, "DQN has no agent with a memory: use pqn, ppo or a2c, or omit --network recurrent=true."),
        ("sac", VECTOR, "SAC has no agent with a memory: use ppo or a2c, or omit --network recurrent=true."),
    ],
)
def test_algorithms_without_a_memory_refuse_it(algorithm: str, actions: spaces.Space, says: str) -> None:
    with pytest.raises(UserError, match=says):
        network(algorithm, NUMBERS, actions, False, "recurrent=true")


@pytest.mark.parametrize("words", [["--recurrent"], ["--network", "recurrent=true"]])
def test_initial_settings_fit_an_agent_with_a_memory(words: list[str]) -> None:
    def settings(*more: str) -> tuple[Task, argparse.Namespace]:
        options = read_initial_options(["--env", "Breakout-MinAtar", "--n-envs", "2", *more])
        begun, _ = settings_for("pqn", options, None)
        assert begun is not None
        return begun

    task, config = settings(*words)
    assert config.n_minibatches == 2  # an agent with a memory learns from whole environments
    assert task.network == ()  # the widths of a perceptron are not for it
    task, config = settings()
    assert config.n_minibatches > 2
    assert task.network == ("hidden=[64, 64]",)


BOARD = spaces.Dict(frame=spaces.Box(0, 1, (2, 6, 7), "uint8"), legal=spaces.MultiBinary(7))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        (
            "hidden=64",
            "hidden: there are only n_features, layers, channels_last, activation, layer_norm, highest",
        ),
        ("layer_nrom=true", "Did you mean 'layer_norm'"),
        ("normalise=true", "--network normalise: there are only n_features"),
        ("layer_norm=2", "--network layer_norm=2: expected true or false."),
        ("layers=atari", "cannot create this network: ConvolutionalTrunk: a kernel of 8 does not fit into 6 x 7"),
        ("recurrent=true", "such as --env ConnectFour-v0, without a memory"),
        ("recurrent=3", "--network recurrent=3: expected true or false."),
    ],
)
def test_alphazero_refuses_settings_that_its_network_lacks(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        network("alphazero", BOARD, spaces.Discrete(7), False, word)


def test_alphazero_takes_the_settings_of_convolutions() -> None:
    words = ("n_features=16", "layers=[[8,3,1]]", "activation=silu", "layer_norm=true", "recurrent=false")
    model = network("alphazero", BOARD, spaces.Discrete(7), False, *words)
    assert model.trunk.n_features == 16
    assert {nn.SiLU, nn.LayerNorm} <= kinds(model)
