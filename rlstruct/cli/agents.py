"""Which of the bundled agents fits an environment and an algorithm. Part of rlstruct.cli."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymnasium import spaces
from torch import nn

from rlstruct import agents
from rlstruct.cli.complaint import UserError
from rlstruct.cli.environments import is_image
from rlstruct.rl_agent import RL_Agent

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

    create_model: Callable[[], nn.Module]
    create_agent: Callable[..., RL_Agent]
    kind: str
    small: bool


def choose(
    algorithm: str, observation: spaces.Space[Any], action: spaces.Space[Any], *, recurrent: bool
) -> AgentChoice:
    """Choose agent and network by the spaces.

    Args:
        algorithm: ``reinforce``, ``a2c`` or ``dqn``.
        observation: space of one observation.
        action: space of one action.
        recurrent: with a memory.

    Raises:
        UserError: none of the bundled ones fits; the message says why, and what would.
    """
    if not isinstance(observation, spaces.Box):
        raise UserError(
            f"the bundled agents see one frame, and this environment shows {_word(observation)}. Wrap it "
            "(gymnasium.wrappers.FlattenObservation), or write an agent: tutorials/02_your_own_agent.py"
        )
    discrete = isinstance(action, spaces.Discrete) and int(action.start) == 0
    continuous = isinstance(action, spaces.Box) and len(action.shape) == 1
    if not (discrete or continuous):
        raise UserError(
            f"the bundled agents take one of A actions, or a vector of numbers; this environment wants {action}. "
            "Write an agent: tutorials/02_your_own_agent.py"
        )
    image = is_image(observation)
    if algorithm == "dqn":
        if continuous:
            raise UserError("DQN chooses among single actions, and here they are continuous: take a2c or reinforce.")
        if recurrent:
            raise UserError("DQN has no agent with a memory: take a2c, or leave out --recurrent.")
        return _q_agent(observation, int(action.n), image)  # type: ignore[attr-defined]
    if image and (recurrent or continuous):
        raise UserError(
            f"no bundled agent {'remembers images' if recurrent else 'turns images into continuous actions'}: write "
            "one (tutorials/02_your_own_agent.py, rlstruct.agents.ConvolutionalTrunk)."
        )
    return _actor_critic(observation, action, image, recurrent)


def _q_agent(observation: spaces.Box, n_actions: int, image: bool) -> AgentChoice:
    if image:
        make = partial(_convolutional_q, observation.shape, n_actions)
        return AgentChoice(make, agents.QAgent, "convolutional network of action values, duelling", False)
    inputs = math.prod(observation.shape)
    make_small = partial(agents.QNetwork, inputs, n_actions, duelling=True)
    return AgentChoice(make_small, agents.QAgent, "perceptron of action values, duelling", True)


def _convolutional_q(shape: tuple[int, ...], n_actions: int) -> nn.Module:
    trunk = agents.ConvolutionalTrunk(shape, n_features=_n_features(shape), channels_last=_channels_last(shape))
    return nn.Sequential(trunk, agents.DuellingHead(trunk.n_features, n_actions))


def _actor_critic(observation: spaces.Box, action: spaces.Space[Any], image: bool, recurrent: bool) -> AgentChoice:
    shape, inputs = observation.shape, math.prod(observation.shape)
    if isinstance(action, spaces.Box):
        d = action.shape[0]
        if recurrent:
            make: Callable[[], nn.Module] = partial(agents.RecurrentGaussianActorCritic, inputs, d)
            return AgentChoice(make, agents.RecurrentGaussianAgent, "recurrent Gaussian policy", True)
        make = partial(agents.GaussianActorCritic, inputs, d)
        return AgentChoice(make, agents.GaussianAgent, "Gaussian policy, perceptron", True)
    n_actions = int(action.n)  # type: ignore[attr-defined]
    if recurrent:
        return AgentChoice(
            partial(agents.RecurrentActorCritic, inputs, n_actions), agents.RecurrentAgent, "recurrent policy", True
        )
    if image:
        make = partial(
            agents.ConvolutionalActorCritic,
            shape,
            n_actions,
            n_features=_n_features(shape),
            channels_last=_channels_last(shape),
        )
        return AgentChoice(make, agents.ActorCriticAgent, "convolutional policy", False)
    make = partial(agents.ActorCritic, inputs, n_actions)
    return AgentChoice(make, agents.ActorCriticAgent, "policy, perceptron", True)


def _channels_last(shape: tuple[int, ...]) -> bool:
    """The shorter end of the shape counts the channels."""
    return len(shape) == 3 and shape[2] <= shape[0]


def _n_features(shape: tuple[int, ...]) -> int:
    return _ATARI_FEATURES if sorted(shape)[-2] >= _ATARI_PIXELS else _SMALL_FEATURES


def _word(space: spaces.Space[Any]) -> str:
    return f"a {type(space).__name__} space"
