"""Which of the bundled agents fits an environment and an algorithm."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from gymnasium import spaces
from torch import nn

from rlstruct import agents
from rlstruct.cli.complaint import UserError, nearest
from rlstruct.cli.environments import is_image
from rlstruct.cli.task import Task
from rlstruct.rl_agent import RL_Agent

Module = TypeVar("Module", bound=nn.Module)
CreateModel = Callable[[], nn.Module]
Settings = Mapping[str, Any]

_ATARI_PIXELS, _ATARI_FEATURES, _SMALL_FEATURES = 36, 512, 128


@dataclass(frozen=True)
class AgentChoice:
    """An agent that fits.

    Attributes:
        create_model: makes its network, on the CPU.
        create_agent: acts with it.
        kind: what it is, in words.
        small: whether one CPU thread is enough for its network.
    """

    create_model: CreateModel
    create_agent: Callable[..., RL_Agent]
    kind: str
    small: bool


def choose(algorithm: str, task: Task, observation: spaces.Space[Any], action: spaces.Space[Any]) -> AgentChoice:
    """Choose agent and network by the spaces.

    Args:
        algorithm: ``reinforce``, ``a2c`` or ``dqn``.
        task: says whether the agent has a memory, and further settings of its network.
        observation: space of one observation.
        action: space of one action.

    Raises:
        UserError: none of the bundled ones fits; the message says why, and what would.
    """
    recurrent, settings = task.recurrent, task.network_settings()
    if not isinstance(observation, spaces.Box):
        raise UserError(
            f"the bundled agents see one frame, and this environment shows {_word(observation)}. Wrap it "
            "(gymnasium.wrappers.FlattenObservation), or write an agent: tutorials/02_your_own_agent.py"
        )
    discrete = _n_actions(action)
    continuous = isinstance(action, spaces.Box) and len(action.shape) == 1
    if discrete is None and not continuous:
        raise UserError(
            "the bundled agents take one of A actions, several such choices at once, or a vector of numbers; this "
            f"environment wants {action}. Write an agent: tutorials/02_your_own_agent.py"
        )
    image = is_image(observation)
    if algorithm == "dqn":
        if not isinstance(discrete, int):
            kind = "continuous" if continuous else "several at once"
            raise UserError(f"DQN chooses among single actions, and here they are {kind}: take a2c or reinforce.")
        if recurrent:
            raise UserError("DQN has no agent with a memory: take a2c, or leave out --recurrent.")
        return _q_agent(observation, discrete, settings)
    if image and (recurrent or continuous):
        raise UserError(
            f"no bundled agent {'remembers images' if recurrent else 'turns images into continuous actions'}: write "
            "one (tutorials/02_your_own_agent.py, rlstruct.agents.ConvolutionalTrunk)."
        )
    if discrete is None:
        return _gaussian(observation, action.shape[0], recurrent, settings)  # type: ignore[index]
    return _actor_critic(observation, discrete, recurrent, settings)


def _n_actions(action: spaces.Space[Any]) -> int | tuple[int, ...] | None:
    """Return A, or the sizes of K choices; None for other spaces, and where the numbers do not begin at 0."""
    if isinstance(action, spaces.Discrete) and int(action.start) == 0:
        return int(action.n)
    if isinstance(action, spaces.MultiDiscrete) and action.nvec.ndim == 1 and not action.start.any():
        return tuple(map(int, action.nvec))
    return None


def _wants_convolutions(observation: spaces.Box, settings: Settings) -> bool:
    """Images are seen by convolutions, unless the user says how wide a perceptron shall be."""
    return is_image(observation) and "hidden" not in settings


def _q_agent(observation: spaces.Box, n_actions: int, settings: Settings) -> AgentChoice:
    if _wants_convolutions(observation, settings):
        trunk = _network(agents.ConvolutionalTrunk, observation.shape, settings=settings, **_of_images(observation))
        make: CreateModel = partial(_convolutional_q, trunk, n_actions)
        return AgentChoice(make, agents.QAgent, "convolutional network of action values, duelling", False)
    make = _network(agents.QNetwork, math.prod(observation.shape), n_actions, settings=settings, duelling=True)
    return AgentChoice(make, agents.QAgent, "perceptron of action values, duelling", True)


def _convolutional_q(create_trunk: Callable[[], agents.ConvolutionalTrunk], n_actions: int) -> nn.Module:
    trunk = create_trunk()
    return nn.Sequential(trunk, agents.DuellingHead(trunk.n_features, n_actions))


def _gaussian(observation: spaces.Box, n_dimensions: int, recurrent: bool, settings: Settings) -> AgentChoice:
    sizes = (math.prod(observation.shape), n_dimensions)
    if recurrent:
        make: CreateModel = _network(agents.RecurrentGaussianActorCritic, *sizes, settings=settings)
        return AgentChoice(make, agents.RecurrentGaussianAgent, "recurrent Gaussian policy", True)
    make = _network(agents.GaussianActorCritic, *sizes, settings=settings)
    return AgentChoice(make, agents.GaussianAgent, "Gaussian policy, perceptron", True)


def _actor_critic(
    observation: spaces.Box, n_actions: int | tuple[int, ...], recurrent: bool, settings: Settings
) -> AgentChoice:
    inputs = math.prod(observation.shape)
    if recurrent:
        make: CreateModel = _network(agents.RecurrentActorCritic, inputs, n_actions, settings=settings)
        return AgentChoice(make, agents.RecurrentAgent, "recurrent policy", True)
    if _wants_convolutions(observation, settings):
        of_images = _of_images(observation)
        make = _network(agents.ConvolutionalActorCritic, observation.shape, n_actions, settings=settings, **of_images)
        return AgentChoice(make, agents.ActorCriticAgent, "convolutional policy", False)
    make = _network(agents.ActorCritic, inputs, n_actions, settings=settings)
    return AgentChoice(make, agents.ActorCriticAgent, "policy, perceptron", True)


def _network(
    kind: Callable[..., Module],
    *sizes: Any,  # noqa: ANN401 - of its inputs and outputs
    settings: Settings,
    **ours: Any,  # noqa: ANN401 - settings that the user may change
) -> Callable[[], Module]:
    """Return what makes a network.

    Raises:
        UserError: it has no such setting.
    """
    parameters = inspect.signature(kind).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in settings:
        if name not in known:
            raise UserError(f"--network {name}: there are only {', '.join(known)}.{nearest(name, known)}")
    return partial(kind, *sizes, **{**ours, **settings})


def _of_images(observation: spaces.Box) -> dict[str, Any]:
    shape = observation.shape
    return {"n_features": _n_features(shape), "channels_last": _channels_last(shape)}


def _channels_last(shape: tuple[int, ...]) -> bool:
    """The shorter end of the shape counts the channels."""
    return len(shape) == 3 and shape[2] <= shape[0]


def _n_features(shape: tuple[int, ...]) -> int:
    return _ATARI_FEATURES if sorted(shape)[-2] >= _ATARI_PIXELS else _SMALL_FEATURES


def _word(space: spaces.Space[Any]) -> str:
    return f"a {type(space).__name__} space"
