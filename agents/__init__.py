"""Agents and their networks, ready to use."""

from rlstruct.agents.actor_critic import ActorCriticAgent, GaussianAgent, RecurrentAgent, RecurrentGaussianAgent
from rlstruct.agents.convolutional import (
    ConvolutionalActorCritic,
    ConvolutionalGaussianActorCritic,
    ConvolutionalTrunk,
)
from rlstruct.agents.model_agent import ModelAgent
from rlstruct.agents.networks import (
    MLP,
    ActorCritic,
    GaussianActorCritic,
    RecurrentActorCritic,
    RecurrentGaussianActorCritic,
)
from rlstruct.agents.normalisation import Normalised, RunningMoments
from rlstruct.agents.q_agent import DuellingHead, QAgent, QNetwork, RecurrentQAgent, RecurrentQNetwork
from rlstruct.agents.random_agent import RandomAgent
from rlstruct.agents.soft_actor_critic import Critics, SoftActorCritic, SquashedGaussianAgent
from rlstruct.agents.stacking import StackingAgent

__all__ = [
    "MLP",
    "ActorCritic",
    "ActorCriticAgent",
    "ConvolutionalActorCritic",
    "ConvolutionalGaussianActorCritic",
    "ConvolutionalTrunk",
    "Critics",
    "DuellingHead",
    "GaussianActorCritic",
    "GaussianAgent",
    "ModelAgent",
    "Normalised",
    "QAgent",
    "QNetwork",
    "RandomAgent",
    "RecurrentActorCritic",
    "RecurrentAgent",
    "RecurrentGaussianActorCritic",
    "RecurrentGaussianAgent",
    "RecurrentQAgent",
    "RecurrentQNetwork",
    "RunningMoments",
    "SoftActorCritic",
    "SquashedGaussianAgent",
    "StackingAgent",
]
