"""An agent that takes the best of A action values, and a random one now and then. Layer 3."""

from __future__ import annotations

import torch
from torch import nn

from rlstruct.agents.model_agent import ModelAgent
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.functional import random


class QAgent(ModelAgent[nn.Module]):
    """Acts greedily on a network's action values, or at random with probability epsilon; keeps no state.

    Epsilon is ``agent_info["epsilon"]`` [B] float, one for each environment; without it, and with ``stochastic=False``,
    the agent is greedy. It returns ``action`` [B] int64 and ``action_values`` [B, A].

    Args:
        model: maps ``frame`` [B, ...] to action values [B, A], as `rlstruct.agents.QNetwork` does.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    agent_info_on_device = True  # epsilon meets numbers that are drawn on the device

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]``, drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        values = self.model(observation["frame"])  # [B, A]
        action = values.detach().argmax(dim=-1)
        if self.stochastic and "epsilon" in agent_info:
            key = observation["rng"]
            explore = random.uniform(key) < agent_info["epsilon"]
            # A stream of its own: given that the first number is small, its bits are not random any more.
            action = torch.where(explore, random.randint(key, values.shape[-1], stream=1), action)
        return DictTensor({"action": action, "action_values": values}), state
