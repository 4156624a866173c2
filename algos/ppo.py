"""PPO: several epochs of minibatch updates on n steps of every environment, with clipped policy changes.

Schulman et al., "Proximal policy optimization algorithms" (2017); Huang et al., "The 37 implementation details of
proximal policy optimization" (ICLR blog track, 2022), which docs/algorithms/ppo.md goes through.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.agent_outputs import POLICY_AND_VALUE, WITH_PROBABILITY, Alternatives, name_of
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.bootstrapping import bootstrap_values, collected_values, next_values, output_of
from rlstruct.algos.learner import evaluate_actions
from rlstruct.algos.minibatches import EpochConfig, EpochLearner, Prepared
from rlstruct.algos.optimising import Terms
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.errors import warn_user
from rlstruct.functional.advantages import generalized_advantage
from rlstruct.functional.policy_gradient import (
    actor_critic_terms,
    clipped_surrogate_loss,
    clipped_value_loss,
    entropy_loss,
    value_loss,
)
from rlstruct.functional.statistics import masked_mean, whiten_each
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.replay import replay_agent, replay_with_states
from rlstruct.rl_agent import RL_Agent

_MOST_RATIO_ERROR = 0.5  # much more than rounding causes, also that of TF32
_ADVANTAGE, _LOG_PROBABILITY = "learner/advantage", "action/log_probability"


@dataclass(frozen=True, kw_only=True)
class PPOConfig(EpochConfig):
    """Settings of PPO, and those of `EpochConfig` and `TrainingConfig`; the defaults are for classic tasks.

    Attributes:
        trace_decay: lambda of GAE: 0 trusts the critic, 1 the rewards.
        value_coefficient: weight of the critic's loss.
        entropy_coefficient: weight of the entropy, in 1 / nat.
        clip: changing an action's probability gains nothing once its ratio to the probability at collection is beyond
            1 - clip or 1 + clip.
        value_clip: how far a value may move in an update, in units of the scaled reward; None sets no bound.
        whiten_advantages: scale the advantages of a minibatch to mean 0 and variance 1.
        target_kl: skip the remaining gradient steps of an update once the policy has moved this far on a minibatch
            (approximate KL divergence, in nats); None takes them all.
    """

    n_env_steps: int = 200_000
    n_timesteps: int = 128
    n_envs: int = 8
    reward_scale: float = 0.1
    learning_rate: float = 1e-3
    final_learning_rate_fraction: float = 0.0
    adam_epsilon: float = 1e-5
    max_gradient_norm: float | None = 0.5
    evaluation_timesteps: int | None = 100
    evaluation_interval: int = 20_000
    trace_decay: float = option(0.98, at_least=0, at_most=1)
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    clip: float = option(0.2, above=0)
    value_clip: float | None = option(None, above=0)
    whiten_advantages: bool = True
    target_kl: float | None = option(None, above=0)


@operation("loss")
def losses(replayed: TemporalDictTensor, minibatch: Trajectories, config: PPOConfig) -> dict[str, Tensor]:
    """Compute the terms of the loss of a minibatch.

    Args:
        replayed: outputs of the learner's agent, with gradients: ``value`` [B, T] and its policy, see
            `rlstruct.algos.learner.evaluate_actions`.
        minibatch: collected steps with the keys that `PPOLearner.prepare` adds, same device.  [B, T]
        config: clips and coefficients.

    Returns:
        ``loss`` and its terms ``policy_loss``, ``value_loss`` and ``entropy_loss`` (minus the mean entropy); without
        gradients ``approximate_kl``, the mean of ratio - 1 - log(ratio) (Schulman, "Approximating KL divergence",
        2020), ``clip_fraction``, the share of steps whose ratio is beyond the clip, and ``ratio_error``, the largest
        distance of a ratio from 1.  [] each
    """
    steps = minibatch.steps
    mask, advantage = steps.mask(), steps[_ADVANTAGE]  # whitened if the settings ask for it
    log_probability, entropy = evaluate_actions(replayed, steps)
    log_ratio = log_probability - steps[_LOG_PROBABILITY]
    ratio = log_ratio.exp()
    target, before, value = steps["learner/target"], steps["learner/value"], replayed["value"]
    terms = {
        "policy_loss": clipped_surrogate_loss(ratio, advantage, None, config.clip),
        "value_loss": value_loss(value, target, None)
        if config.value_clip is None
        else clipped_value_loss(value, target, None, before=before, clip=config.value_clip),
        "entropy_loss": entropy_loss(entropy, None),
    }
    with torch.no_grad():
        moved = ratio - 1.0
        terms |= {"approximate_kl": moved - log_ratio, "clip_fraction": (moved.abs() > config.clip).to(ratio.dtype)}
        ratio_error = torch.where(mask, moved, 0.0).abs().max()
    terms = actor_critic_terms(
        terms, mask, value_coefficient=config.value_coefficient, entropy_coefficient=config.entropy_coefficient
    )
    return {**terms, "ratio_error": ratio_error}


class PPOLearner(EpochLearner):
    """Learner of PPO."""

    settings: ClassVar[type[TrainingConfig]] = PPOConfig
    outputs: Alternatives = (*WITH_PROBABILITY, *POLICY_AND_VALUE)
    config: PPOConfig

    def __init__(self, model: nn.Module, agent: RL_Agent, config: PPOConfig) -> None:
        super().__init__(model, agent, config)
        self._stopped = torch.zeros((), dtype=torch.bool, device=self.device)  # by ``target_kl``

    @operation("loss")
    @torch.no_grad()
    def prepare(self, trajectories: Trajectories) -> tuple[Prepared, dict[str, Tensor]]:
        """Compute advantages, targets and values, which stay constant during an update.

        The values and log-probabilities are those that the batch holds: of the weights that collected it; see
        `rlstruct.algos.bootstrapping.collected_values`. If it holds no log-probabilities, one replay with the present
        weights computes both.

        Args:
            trajectories: on the learner's device.  [B, T]

        Returns:
            ``(prepared, numbers)``: ``explained_variance`` [] is that of the targets by the values.
        """
        config, steps = self.config, trajectories.steps
        kept = {key: tensor for key, tensor in steps.items() if not key.startswith("_observation/")}
        if _LOG_PROBABILITY in steps:
            value, bootstrap = collected_values(self.agent, trajectories)
        else:
            replayed, states = replay_with_states(self.agent, trajectories)
            value = output_of(self.agent, replayed, "value")
            bootstrap = bootstrap_values(self.agent, trajectories, states)
            kept[_LOG_PROBABILITY], _ = evaluate_actions(replayed, steps)
        mask = steps.mask()
        advantage = generalized_advantage(
            steps["_observation/reward"].to(value.dtype) * config.reward_scale,
            steps["_observation/terminated"],
            steps["_observation/done"],
            mask,
            value=value,
            next_value=next_values(value, bootstrap, trajectories),
            discount=config.discount,
            trace_decay=config.trace_decay,
        )
        target = advantage + value
        variance = _variance(advantage, mask) / _variance(target, mask).clamp(min=1e-8)
        kept |= {_ADVANTAGE: advantage, "learner/target": target, "learner/value": value}
        self._stopped.zero_()
        return self.rows_of(trajectories, kept), {"explained_variance": 1.0 - variance}

    def check_first_update(self, numbers: Mapping[str, float]) -> None:
        """Warn if the agent's log-probabilities were not those of its replay, before any gradient step."""
        error = numbers.get("ratio_error", 0.0)
        if error > _MOST_RATIO_ERROR and self.config.precision == "float32" and self.group.rank == 0:
            warn_user(
                f"PPO: before the first gradient step, the ratio of an action's probability to that at its collection "
                f"differs from 1 by up to {error:.2g}, expected about 0. {name_of(self.agent)} returned another "
                "'log_probability' than that of its 'action', or acts differently when replayed, which check_agent of "
                "rlstruct.testing tests."
            )

    def of_epoch(self, rows: Trajectories, sizes: list[int]) -> Trajectories:
        """Whiten the advantages of each minibatch if the settings ask for it, with a single all-reduce for all."""
        if not self.config.whiten_advantages:
            return rows
        advantages, masks = (one.split_with_sizes(sizes) for one in (rows.steps[_ADVANTAGE], rows.mask()))
        steps = {**dict(rows.steps.items()), _ADVANTAGE: torch.cat(whiten_each(advantages, masks))}
        return Trajectories.unchecked(rows.info, TemporalDictTensor.unchecked(steps, rows.lengths))

    def terms(self, minibatch: Trajectories) -> dict[str, Tensor]:
        """Replay the agent over a minibatch, and compute `losses`."""
        return losses(replay_agent(self.agent, minibatch), minibatch, self.config)

    def _may_compile_steps(self) -> bool:
        """Leave steps to the optimiser if ``target_kl`` may skip them."""
        return self.config.target_kl is None and super()._may_compile_steps()

    def _held(self, terms: Terms) -> Tensor | None:
        """Skip steps once the policy has moved beyond ``target_kl``, as ``skipped`` tells; they count in any case."""
        if self.config.target_kl is None:
            return None
        self._stopped |= terms["approximate_kl"] > self.config.target_kl
        terms["skipped"] = self._stopped.to(terms["loss"].dtype)
        return self._stopped

    def _each_step(self, prepared: Prepared) -> list[Terms]:
        """Report ``ratio_error`` of the first minibatch, before any gradient step: 0 if the replay is right."""
        steps = super()._each_step(prepared)
        return [{**terms, "ratio_error": steps[0]["ratio_error"]} for terms in steps]


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((values - masked_mean(values, mask)).square(), mask)


train: Algorithm[PPOConfig] = Algorithm(PPOLearner, "more steps, many updates; discrete and continuous actions")
"""Train an actor and a critic; arguments are those of `Algorithm.__call__`.

The agent returns ``action``, ``value``, ``action_logits`` or ``action_mean`` and ``action_log_std``, and preferably
``log_probability``, as `rlstruct.agents.ActorCriticAgent`, `RecurrentAgent`, `GaussianAgent` and
`RecurrentGaussianAgent` do.
"""

__getattr__ = renamed.attributes(__name__)
