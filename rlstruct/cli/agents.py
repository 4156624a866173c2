"""Choice of the bundled agent that fits an environment and an algorithm."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from rlstruct import agents, renamed
from rlstruct.agents.networks import Activation
from rlstruct.algos import ALGORITHMS, Algorithm
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.cli.messages import UserError, nearest
from rlstruct.cli.tasks import Factory, Task, find, imported, is_image, is_own, spaces_of
from rlstruct.errors import kind_of
from rlstruct.rl_agent import RL_Agent
from rlstruct.spaces import ActionIndices, leaves

_ATARI_PIXELS, _ATARI_FEATURES, _SMALL_FEATURES, _IMAGE_MEMORY = 36, 512, 128, 128


@dataclass(frozen=True)
class AgentChoice:
    """The agent chosen for an environment and an algorithm."""

    create_model: Callable[[], nn.Module]  # returns the network, on the CPU
    create_agent: Callable[..., RL_Agent]  # returns the agent
    kind: str  # description for the user
    named: bool = False  # the user's own network, agent or both, which every command finds by the run's settings


def algorithm_of(name: str) -> Algorithm[Any]:
    """Return the algorithm of this name; ``module:name`` is imported, and known by that name from then on."""
    if name not in ALGORITHMS and is_own(name):
        target = imported(name)
        if not isinstance(target, Algorithm):
            type_name = "class" if isinstance(target, type) else type(target).__name__
            raise UserError(f"{name} is a {type_name}, expected an Algorithm of rlstruct.algos.")
        ALGORITHMS[name] = target
    if name not in ALGORITHMS:
        raise UserError(f"there is no algorithm {name!r}, only {', '.join(ALGORITHMS)}.{nearest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def searching(algorithm: str) -> ModuleType | None:
    """Return the module of the command line's parts for an algorithm whose agent searches; None for the others."""
    search = algorithm_of(algorithm).agents == "search"
    return importlib.import_module("rlstruct.cli.two_player") if search else None  # which imports this module


def display_name(algorithm: str) -> str:
    """Return the name of an algorithm as a sentence shows it: A2C, or my_module:train unchanged."""
    return algorithm if is_own(algorithm) else algorithm.upper()


def prepare(algorithm: str, task: Task, auto_reset: bool | None = None) -> tuple[Factory, AgentChoice]:
    """Find the environments of a task and choose the agent that learns in them.

    ``auto_reset`` is True if environments restart by themselves; None for the choice of the algorithm.
    """
    whole_episodes = algorithm_of(algorithm).learner.whole_episodes
    factory = find(task, auto_reset=not whole_episodes if auto_reset is None else auto_reset)
    return factory, choose(algorithm, task, *spaces_of(factory), factory.stack)


def choose(
    algorithm: str, task: Task, observation: spaces.Space[Any], action: spaces.Space[Any], stack: int = 1
) -> AgentChoice:
    """Choose agent and network by the spaces; the agent sees the last ``stack`` frames."""
    if (own := searching(algorithm)) is not None:
        if task.own_network or task.agent:
            raise UserError(f"{algorithm} searches with its own network and agent: omit --agent and MODULE:NAME.")
        chosen: AgentChoice = own.choose(task, observation, action)
        return chosen
    if task.own_network or task.agent:
        return _with_own(algorithm, task, observation, action, stack)
    observation, recurrent = _fitting(algorithm, task, _one_frame(observation), action), task.remembers()
    discrete, continuous = count_actions(action), isinstance(action, spaces.Box)
    settings = task.network_settings()
    # Use convolutions for images, unless the user sets the widths of a perceptron; and where the user sets them.
    convolutional = "layers" in settings or (is_image(observation) and "hidden" not in settings)
    body = "recurrent" if recurrent else "convolutional" if convolutional else "perceptron"
    family: str = ALGORITHMS[algorithm].agents
    family = "gaussian" if continuous and family == "policy" else family
    if "layers" in settings and (len(observation.shape) not in (2, 3) or "convolutional" not in _BUNDLED[family]):
        reason = f"here frames have shape {list(observation.shape)}: omit layers"
        if len(observation.shape) in (2, 3):
            reason = f"{display_name(algorithm)} has no network for images: use ppo or a2c"
        raise UserError(f"--network layers: convolutions are for frames of two or three axes, and {reason}.")
    network, create_agent, description = _BUNDLED[family][body]
    settable = network_settings(network)
    if "recurrent" in _BUNDLED[family]:
        settable["recurrent"] = False
    if family in ("policy", "gaussian"):  # the others do not support statistics
        settable["normalise"] = False
    if recurrent and convolutional:
        settable = {**network_settings(agents.ConvolutionalTrunk), **settable}
        network, description = partial(_behind_convolutions, network), f"{description}, behind convolutions"
    check_settings(settings, settable)
    normalise = settings.pop("normalise", False)
    settings.pop("recurrent", None)
    shape = (stack, *observation.shape[1:]) if stack > 1 else observation.shape
    if stack > 1:
        create_agent = _stacking(create_agent, shape)
    inputs: int | tuple[int, ...] = shape if convolutional else math.prod(shape)
    outputs: tuple[Any, ...] = (action.shape[0] if continuous else discrete,)  # type: ignore[index]
    if family == "soft":
        outputs = tuple(tuple(map(float, bound)) for bound in (action.low, action.high))  # type: ignore[attr-defined]
    if type(width := settings.get("hidden")) is int:
        settings["hidden"] = [width]
    if convolutional:  # the shorter axis holds the channels
        n_features = _ATARI_FEATURES if sorted(shape)[-2] >= _ATARI_PIXELS else _SMALL_FEATURES
        channels_last = len(shape) == 3 and shape[2] <= shape[0]
        settings = {"n_features": n_features, "channels_last": channels_last, **settings}
    create_model = partial(network, inputs, *outputs, **settings)
    try_network(create_model, task)
    if normalise:
        create_model, description = partial(_normalised, create_model, observation.shape), f"{description}, normalised"
    return AgentChoice(create_model, create_agent, description)


def network_settings(network: Callable[..., nn.Module]) -> dict[str, Any]:
    """Return the settings that ``--network`` changes, and their defaults: the keyword-only arguments of a network."""
    parameters = inspect.signature(network).parameters
    return {name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def check_settings(settings: Mapping[str, Any], settable: Mapping[str, Any]) -> None:
    """Raise UserError unless the network has all settings, and those that are True or False have such a value."""
    for name, value in settings.items():
        if name not in settable:
            raise UserError(f"--network {name}: there are only {', '.join(settable)}.{nearest(name, settable)}")
        if isinstance(settable[name], bool) and not isinstance(value, bool):
            raise UserError(f"--network {name}={value}: expected true or false.")


def _with_own(
    algorithm: str, task: Task, observation: spaces.Space[Any], action: spaces.Space[Any], stack: int
) -> AgentChoice:
    """Choose the user's own network, agent, or both, and a bundled part for the other."""
    network, agent, parts = task.own_network, task.agent, {}
    kind = " and ".join(filter(None, (network, agent)))
    if network is None or agent is None:
        others = replace(task, network=() if network else task.network, agent=None)
        bundled = choose(algorithm, others, observation, action, stack)
        kind, parts = f"{kind}, otherwise {bundled.kind}", dict(vars(bundled))
    if stack > 1 and isinstance(observation, spaces.Box):
        observation = spaces.Box(0, 255, (stack, *observation.shape[1:]), np.uint8)
    if network is not None:
        imported(network)  # raises for an unknown name
        parts["create_model"] = partial(_own_network, network, observation, action, task.network_settings())
    if agent is not None:
        create_agent = imported(agent)
        parts["create_agent"] = create_agent if stack == 1 else _stacking(create_agent, observation.shape or ())
    return AgentChoice(**{**parts, "kind": kind, "named": True})


def _own_network(
    name: str, observation: spaces.Space[Any], action: spaces.Space[Any], settings: Mapping[str, Any]
) -> nn.Module:
    """Create the user's network, which gets the spaces if it accepts ``observation_space`` and ``action_space``."""
    create = imported(name)
    taken = inspect.signature(create).parameters
    offered = {"observation_space": observation, "action_space": action}
    arguments = {**{key: value for key, value in offered.items() if key in taken}, **settings}
    try:
        inspect.signature(create).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"--network {name} cannot be called with {', '.join(arguments) or 'no arguments'}: {error}. Accept "
            "observation_space or action_space, or pass further arguments as KEY=VALUE."
        ) from None
    if not isinstance(made := create(**arguments), nn.Module):
        raise UserError(f"--network {name} returned {kind_of(made)}, expected a torch.nn.Module.")
    return made


def _stacking(create_agent: Callable[..., RL_Agent], shape: Sequence[int]) -> Callable[..., RL_Agent]:
    return partial(agents.StackingAgent.create, create_agent=create_agent, shape=shape)


def _one_frame(observation: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of the frame that agents make of a Dict or Tuple observation; see `rlstruct.rl_agent.frame_of`.

    >>> _one_frame(spaces.Dict(side=spaces.Discrete(3), speed=spaces.Box(-1, 1, (2,)))).shape
    (3,)
    """
    if not isinstance(observation, spaces.Dict | spaces.Tuple):
        return observation
    if isinstance(observation, spaces.Dict) and "legal" in observation.spaces:
        raise UserError(
            "this environment shows which actions are legal, as two-player games do, and only AlphaZero respects "
            "that: rlstruct train alphazero."
        )
    try:
        sizes = [math.prod(leaf.shape) for leaf in leaves(observation, "frame").values()]
    except (TypeError, ValueError) as error:
        raise UserError(f"the bundled agents cannot see this environment: {str(error).partition(': ')[2]}") from None
    return spaces.Box(-np.inf, np.inf, (sum(sizes),), np.float32)


def _fitting(algorithm: str, task: Task, observation: spaces.Space[Any], action: spaces.Space[Any]) -> spaces.Box:
    """Return the space that agents see; raise if no bundled agent of this algorithm supports the task."""
    if not isinstance(observation, spaces.Box):
        raise UserError(
            f"the bundled agents see one frame, and this environment shows {kind_of(observation)} space. Wrap "
            "it (gymnasium.wrappers.FlattenObservation), or write an agent: tutorials/02_your_own_agent.py"
        )
    name, family = display_name(algorithm), ALGORITHMS[algorithm].agents
    discrete = count_actions(action)
    floats = isinstance(action, spaces.Box) and action.dtype.kind == "f"
    continuous = floats and len(action.shape or ()) == 1 and action.shape != (0,)
    if discrete is None and not continuous:
        raise UserError(
            "the bundled agents choose one of A actions, several such choices at once, or a vector of floating-point "
            f"numbers; this environment expects {action}. Write an agent: tutorials/02_your_own_agent.py"
        )
    if family in ("values", "online values") and not isinstance(discrete, int):
        ability = "continuous" if continuous else "several at once"
        raise UserError(f"{name} chooses one action at a time, and here they are {ability}: use ppo, a2c or reinforce.")
    if family == "soft" and not (continuous and action.is_bounded()):  # type: ignore[attr-defined]
        others = "dqn, pqn, ppo or a2c" if isinstance(discrete, int) else "ppo or a2c"
        here = " ".join(str(action).split())  # numpy breaks long lines
        raise UserError(f"{name} needs bounded continuous actions, and here they are {here}: use {others}.")
    if task.remembers() and "recurrent" not in _BUNDLED[family]:
        others = "pqn, ppo or a2c" if isinstance(discrete, int) else "ppo or a2c"
        word = "--recurrent" if task.recurrent else "--network recurrent=true"
        raise UserError(f"{name} has no agent with a memory: use {others}, or omit {word}.")
    if family == "soft" and is_image(observation):
        raise UserError(f"{name} has no network for images: use ppo or a2c.")
    return observation


def with_stacks(config: TrainingConfig, stack: int) -> TrainingConfig:
    """Make a replay buffer build the stacks of frames."""
    changes: dict[str, Any] = {"n_stack": stack} if hasattr(config, "n_stack") and stack > 1 else {}
    return replace(config, **changes)


def try_network(create_model: Callable[[], nn.Module], task: Task) -> None:
    """Create the network once without memory or random numbers, to find errors early."""
    try:
        with torch.device("meta"):
            create_model()
    except (TypeError, ValueError, RuntimeError) as error:
        if not task.network:
            raise
        said = str(error).strip().splitlines()[0]
        raise UserError(f"--network {' '.join(task.network)}: cannot create this network: {said}") from None


def _normalised(create_model: Callable[[], nn.Module], frame_shape: tuple[int, ...]) -> nn.Module:
    """Normalise frames, and scale rewards by returns of gymnasium's own discount."""
    return agents.Normalised(create_model(), frame_shape, discount=0.99)


def count_actions(action: spaces.Space[Any]) -> int | tuple[int, ...] | None:
    """Return A for a Discrete space, the sizes of K choices for MultiDiscrete and MultiBinary, None for others."""
    actions = ActionIndices.of(action)
    return None if actions is None else actions.sizes[0] if actions.single else actions.sizes


def _convolutional_values(
    frame_shape: Sequence[int],
    n_actions: int,
    *,
    n_features: int,
    layers: Sequence[Any] | str | None = None,
    channels_last: bool,
    activation: Activation = nn.ReLU,
    duelling: bool = True,
    layer_norm: bool = False,
    highest: int | None = None,
) -> nn.Module:
    settings: dict[str, Any] = {"layers": layers, "channels_last": channels_last, "activation": activation}
    settings |= {"layer_norm": layer_norm, "highest": highest}
    trunk = agents.ConvolutionalTrunk(frame_shape, n_features=n_features, **settings)
    head: type[nn.Module] = agents.DuellingHead if duelling else nn.Linear
    return nn.Sequential(trunk, head(n_features, n_actions))


def _behind_convolutions(
    network: Callable[..., nn.Module],
    frame_shape: Sequence[int],
    n_outputs: Any,  # noqa: ANN401 - whatever the network takes
    **settings: Any,  # noqa: ANN401
) -> nn.Module:
    """Create a recurrent network on top of convolutions; a setting that both have applies to both."""
    of_trunk, of_network = network_settings(agents.ConvolutionalTrunk), network_settings(network)
    settings = {"layer_norm": of_network["layer_norm"], "n_hidden": _IMAGE_MEMORY, **settings}
    trunk = agents.ConvolutionalTrunk(frame_shape, **{name: settings[name] for name in settings if name in of_trunk})
    return network(trunk, n_outputs, **{name: settings[name] for name in settings if name in of_network})


# By family and body: network, agent, and a description of both.
_BUNDLED: dict[str, dict[str, tuple[Callable[..., nn.Module], Callable[..., RL_Agent], str]]] = {
    "values": {
        "perceptron": (partial(agents.QNetwork, duelling=True), agents.QAgent, "perceptron of action values, duelling"),
        "convolutional": (_convolutional_values, agents.QAgent, "convolutional network of action values, duelling"),
    },
    "online values": {
        "perceptron": (
            partial(agents.QNetwork, layer_norm=True),
            agents.QAgent,
            "perceptron of action values, layer norm",
        ),
        "convolutional": (
            partial(_convolutional_values, duelling=False, layer_norm=True),
            agents.QAgent,
            "convolutional network of action values, layer norm",
        ),
        "recurrent": (
            partial(agents.RecurrentQNetwork, layer_norm=True),
            agents.RecurrentQAgent,
            "recurrent network of action values, layer norm",
        ),
    },
    "gaussian": {
        "perceptron": (agents.GaussianActorCritic, agents.GaussianAgent, "Gaussian policy, perceptron"),
        "convolutional": (
            agents.ConvolutionalGaussianActorCritic,
            agents.GaussianAgent,
            "convolutional Gaussian policy",
        ),
        "recurrent": (agents.RecurrentGaussianActorCritic, agents.RecurrentGaussianAgent, "recurrent Gaussian policy"),
    },
    "soft": {
        "perceptron": (agents.SoftActorCritic, agents.SquashedGaussianAgent, "squashed Gaussian policy, perceptron")
    },
    "policy": {
        "perceptron": (agents.ActorCritic, agents.ActorCriticAgent, "policy, perceptron"),
        "convolutional": (agents.ConvolutionalActorCritic, agents.ActorCriticAgent, "convolutional policy"),
        "recurrent": (agents.RecurrentActorCritic, agents.RecurrentAgent, "recurrent policy"),
    },
}


__getattr__ = renamed.attributes(__name__)
