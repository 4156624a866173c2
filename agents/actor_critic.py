"""A feed-forward agent with a learned baseline, for discrete actions. Layer 3."""

from __future__ import annotations

from torch import Tensor, nn

from rlstruct.agents.model_agent import ModelAgent
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.functional import random
from rlstruct.functional.categorical import log_probability


class ActorCriticAgent(ModelAgent[nn.Module]):
    """Draws one of A actions from a network's logits; keeps no state.

    It returns ``action`` [B] int64, ``action_logits`` [B, A], ``log_probability`` [B] of that action and ``value`` [B],
    the baseline. In a replay with other weights the same random key may draw another action: a loss takes
    ``action_logits`` from the replay and ``action/action`` from the trajectories, as `rlstruct.algos.reinforce` does.

    Args:
        model: maps ``frame`` [B, ...] to logits [B, A] and value [B], as `rlstruct.agents.ActorCritic` does.
        device: see `ModelAgent`, as are ``stochastic`` and ``copy_model``.
    """

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Act on ``observation["frame"]``, drawing from ``observation["rng"]``; see `RL_Agent.__call__`."""
        policy, value = self.model(observation["frame"])
        return self.choose(policy, value, observation), state

    def choose(self, policy: Tensor, value: Tensor, observation: DictTensor) -> DictTensor:
        """Turn what the network says into actions; see `discrete_output`. Agents for other action spaces override it.

        Args:
            policy: the network's first output, here logits.  [B, A]
            value: the baseline.                              [B]
            observation: its ``rng`` is drawn from.           [B]
        """
        return discrete_output(policy, value, observation, self.stochastic)


def discrete_output(logits: Tensor, value: Tensor, observation: DictTensor, stochastic: bool) -> DictTensor:
    """Choose actions and put together what a discrete actor-critic returns.

    Args:
        logits: unnormalised log-probabilities.    [B, A] float
        value: the baseline.                       [B] float
        observation: its ``rng`` is drawn from.    [B]
        stochastic: draw, or take the most probable action.

    Returns:
        ``action`` [B] int64, ``action_logits`` [B, A], ``log_probability`` [B], ``value`` [B].
    """
    detached = logits.detach()  # choosing is not differentiable
    action = random.categorical(detached, observation["rng"]) if stochastic else detached.argmax(dim=-1)
    return DictTensor(
        {
            "action": action,
            "action_logits": logits,
            "log_probability": log_probability(logits, action),
            "value": value,
        }
    )
