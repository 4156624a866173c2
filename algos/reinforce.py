"""REINFORCE with a learned baseline: one gradient step on whole episodes.

Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992); Sutton and
Barto, "Reinforcement Learning" (2018), section 13.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.algos.agent_outputs import POLICY_AND_VALUE, Alternatives
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.bootstrapping import output_of, replay_with_next_values
from rlstruct.algos.learner import GradientLearner, evaluate_actions
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.functional.policy_gradient import actor_critic_terms, entropy_loss, policy_gradient_loss, value_loss
from rlstruct.functional.returns import bootstrapped_return
from rlstruct.functional.statistics import whiten
from rlstruct.profiling import operation
from rlstruct.replay import replay_agent


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(TrainingConfig):
    """Settings of REINFORCE and those of `TrainingConfig`; ``n_envs`` episodes of each process make one update.

    Attributes:
        value_coefficient: weight of the baseline's loss.
        entropy_coefficient: weight of the entropy, in 1 / nat.
        whiten_advantages: scale the advantages of an update to mean 0 and variance 1.
        bootstrap: estimate what follows a truncated or unfinished episode by the baseline's value of its true last
            observation. Without it a time limit looks like a failure (Pardo et al., ICML 2018), and the return is the
            plain Monte-Carlo one of Williams.
    """

    n_env_steps: int = 250_000
    value_coefficient: float = 1.0
    entropy_coefficient: float = 0.01
    whiten_advantages: bool = True
    bootstrap: bool = True


@operation("loss")
def losses(
    replayed: TemporalDictTensor, trajectories: Trajectories, next_value: Tensor, config: ReinforceConfig
) -> dict[str, Tensor]:
    """Compute the terms of the loss.

    Args:
        replayed: outputs of the learner's agent, with gradients: ``value`` [B, T] and its policy, see
            `rlstruct.algos.learner.evaluate_actions`.
        trajectories: the collected steps, same device.  [B, T]
        next_value: baseline of the true next observations; zeros for no bootstrap.  [B, T]
        config: discount, reward scale, coefficients, and whether to whiten.

    Returns:
        ``loss`` and its terms ``policy_loss``, ``value_loss`` and ``entropy_loss`` (minus the mean entropy).  [] each
    """
    steps = trajectories.steps
    mask = steps.mask()  # [B, T]
    target = bootstrapped_return(
        steps["_observation/reward"] * config.reward_scale,
        steps["_observation/terminated"],
        steps["_observation/done"],
        mask,
        next_value=next_value,
        discount=config.discount,
    )
    value = replayed["value"]
    log_probability, entropy = evaluate_actions(replayed, steps)
    advantage = target - value.detach()
    if config.whiten_advantages:
        advantage = whiten(advantage, mask)
    terms = {
        "policy_loss": policy_gradient_loss(log_probability, advantage, None),
        "value_loss": value_loss(value, target, None),
        "entropy_loss": entropy_loss(entropy, None),
    }
    return actor_critic_terms(
        terms, mask, value_coefficient=config.value_coefficient, entropy_coefficient=config.entropy_coefficient
    )


class ReinforceLearner(GradientLearner):
    """Learner of REINFORCE."""

    whole_episodes: ClassVar[bool] = True
    settings: ClassVar[type[TrainingConfig]] = ReinforceConfig
    outputs: Alternatives = POLICY_AND_VALUE
    config: ReinforceConfig

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        """Take one gradient step; see `GradientLearner.update`.

        Returns the terms of `losses`, and the mean ``return`` and ``length`` of the rows.  [] each
        """
        terms = super().update(trajectories, fraction_done)
        steps = trajectories.to(self.device).steps
        terms["return"] = torch.where(steps.mask(), steps["_observation/reward"], 0.0).sum(dim=1).mean()
        terms["length"] = steps.lengths.to(terms["loss"].dtype).mean()
        return terms

    def terms(self, minibatch: Trajectories) -> dict[str, Tensor]:
        """Replay the agent over trajectories [B, T], and compute `losses`."""
        if self.config.bootstrap:
            replayed, next_value = replay_with_next_values(self.agent, minibatch)
        else:
            replayed = replay_agent(self.agent, minibatch)
            next_value = torch.zeros_like(output_of(self.agent, replayed, "value"))
        return losses(replayed, minibatch, next_value, self.config)


train: Algorithm[ReinforceConfig] = Algorithm(
    ReinforceLearner, "whole episodes, a baseline; discrete and continuous actions"
)
"""Train a policy on whole episodes; arguments are those of `Algorithm.__call__`.

The agent returns ``action``, ``value``, and ``action_logits`` or ``action_mean`` and ``action_log_std``, as
`rlstruct.agents.ActorCriticAgent` and `GaussianAgent` do. The environments start an episode at ``reset``.
"""

__getattr__ = renamed.attributes(__name__)
