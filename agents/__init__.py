"""Concrete agents and their networks. Layer 3."""

from rlstruct.agents.actor_critic import ActorCriticAgent
from rlstruct.agents.convolutional import ConvolutionalActorCritic, ConvolutionalTrunk
from rlstruct.agents.gaussian import (
    GaussianActorCritic,
    GaussianAgent,
    RecurrentGaussianActorCritic,
    RecurrentGaussianAgent,
)
from rlstruct.agents.networks import MLP, ActorCritic, RecurrentActorCritic
from rlstruct.agents.q_agent import QAgent
from rlstruct.agents.q_networks import DuellingHead, QNetwork
from rlstruct.agents.random_agent import RandomAgent
from rlstruct.agents.recurrent import RecurrentAgent

__all__ = [
    "MLP",
    "ActorCritic",
    "ActorCriticAgent",
    "ConvolutionalActorCritic",
    "ConvolutionalTrunk",
    "DuellingHead",
    "GaussianActorCritic",
    "GaussianAgent",
    "QAgent",
    "QNetwork",
    "RandomAgent",
    "RecurrentActorCritic",
    "RecurrentAgent",
    "RecurrentGaussianActorCritic",
    "RecurrentGaussianAgent",
]
