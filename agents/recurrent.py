"""A recurrent agent with a learned baseline, for discrete actions. Layer 3."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.agents.actor_critic import discrete_output
from rlstruct.agents.model_agent import ModelAgent
from rlstruct.agents.networks import RecurrentActorCritic
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.functional.masks import masked_dicttensor


class RecurrentAgent(ModelAgent[RecurrentActorCritic]):
    """Draws one of A actions from the logits of a recurrent network.

    Its state is ``hidden`` [B, H]. It starts again from zero wherever ``observation["initial_state"]`` is true, so that
    an environment that restarts in the middle of a batch remembers nothing of the episode before.

    Args:
        model: see `RecurrentActorCritic`.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Return ``hidden``: zeros [B, H] on the agent's device."""
        dtype = next(self.model.parameters()).dtype
        return DictTensor({"hidden": torch.zeros(B, self.model.n_hidden, dtype=dtype, device=self.device)})

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]`` and the state; returns what `ActorCriticAgent` returns."""
        fresh = self.initial_state(agent_info, state.n_elems())
        state = masked_dicttensor(state, fresh, observation["initial_state"])
        policy, value, hidden = self.model(observation["frame"], state["hidden"])
        return self.choose(policy, value, observation), DictTensor({"hidden": hidden})

    def choose(self, policy: Tensor, value: Tensor, observation: DictTensor) -> DictTensor:
        """Turn what the network says into actions; see `ActorCriticAgent.choose`."""
        return discrete_output(policy, value, observation, self.stochastic)
