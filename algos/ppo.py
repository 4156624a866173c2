"""PPO: several epochs of minibatch updates on n steps of every environment, with clipped policy changes.

Schulman et al., "Proximal policy optimization algorithms" (2017); Huang et al., "The 37 implementation details of
proximal policy optimization" (ICLR blog track, 2022), which docs/algorithms/ppo.md goes through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.learner import GradientLearner, evaluate_actions, mean_terms
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.layout import take_rows
from rlstruct.core.pytree import TreeSpec
from rlstruct.errors import BadValueError
from rlstruct.functional import random
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
from rlstruct.replay import replay_agent, replay_with_next_values
from rlstruct.rl_agent import RL_Agent

_ADVANTAGE = "learner/advantage"


@dataclass(frozen=True, kw_only=True)
class PPOConfig(TrainingConfig):
    """Settings of PPO and those of `TrainingConfig`; the defaults are for CartPole-v1.

    Attributes:
        trace_decay: lambda of GAE: 0 trusts the critic, 1 the rewards.
        value_coefficient: weight of the critic's loss.
        entropy_coefficient: weight of the entropy, in 1 / nat.
        n_epochs: passes over each batch.
        n_minibatches: gradient steps of an epoch. An agent that has no state, or whose states can be computed, learns
            from shuffled single steps. Any other agent learns from whole rows, so there must be at least as many
            environments as minibatches.
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
    n_processes: int = 0
    reward_scale: float = 0.1
    learning_rate: float = 1e-3
    final_learning_rate_fraction: float = 0.0
    adam_epsilon: float = 1e-5
    max_gradient_norm: float | None = 0.5
    evaluation_timesteps: int | None = 100
    evaluation_interval: int = 20_000
    trace_decay: float = option(0.95, at_least=0, at_most=1)
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    n_epochs: int = option(4, at_least=1)
    n_minibatches: int = option(4, at_least=1)
    clip: float = option(0.2, above=0)
    value_clip: float | None = option(0.2, above=0)
    whiten_advantages: bool = True
    target_kl: float | None = option(None, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        n_steps = self.n_timesteps * self.n_envs * max(1, self.n_processes)
        self.require("n_minibatches", self.n_minibatches <= n_steps, f"at most one for each of {n_steps} steps")


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
        2020), and ``clip_fraction``, the share of steps whose ratio is beyond the clip.  [] each
    """
    steps = minibatch.steps
    mask, advantage = steps.mask(), steps[_ADVANTAGE]  # whitened if the settings ask for it
    log_probability, entropy = evaluate_actions(replayed, steps)
    log_ratio = log_probability - steps["action/log_probability"]
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
    return actor_critic_terms(
        terms, mask, value_coefficient=config.value_coefficient, entropy_coefficient=config.entropy_coefficient
    )


class PPOLearner(GradientLearner):
    """Learner of PPO."""

    settings: ClassVar[type[TrainingConfig]] = PPOConfig
    config: PPOConfig
    keeps_batches = False

    def __init__(self, model: nn.Module, agent: RL_Agent, config: PPOConfig) -> None:
        super().__init__(model, agent, config)
        self._prepare = self._part("loss", self.prepare)
        self._seed = self.seed_for("minibatches")

    def gradient_steps(self, batch: Trajectories) -> dict[str, Tensor]:
        """Take ``n_epochs * n_minibatches`` gradient steps; skipped ones count in ``policy_version``, too.

        Returns:
            Detached numbers: the means of the terms of `losses` and of ``gradient_norm`` over these steps, and the
            numbers of `prepare`; with a target_kl also ``skipped``, the share of steps that were not taken.  [] each
        """
        config = self.config
        prepared, diagnostics = self._prepare(batch)
        stopped = None if config.target_kl is None else torch.zeros_like(diagnostics["ratio_error"], dtype=torch.bool)
        taken = []
        for epoch in range(config.n_epochs):
            for minibatch in self._minibatches(prepared, epoch):
                terms, gradient = self.gradient((minibatch, batch))
                if stopped is not None and config.target_kl is not None:
                    stopped = stopped | (terms["approximate_kl"] > config.target_kl)
                    terms["skipped"] = stopped.to(terms["loss"].dtype)
                taken.append(self.descend(terms, gradient, unless=stopped))
        return {**mean_terms(taken), **diagnostics}

    def _minibatches(self, prepared: Trajectories, epoch: int) -> list[Trajectories]:
        """Split the prepared batch, and whiten each minibatch's advantages with a single all-reduce for all of them."""
        rows, structure = self.shuffled(prepared.n_elems(), epoch), TreeSpec(prepared)
        order, sizes = torch.cat(rows), [len(one) for one in rows]
        parts = [take_rows(tensor, order).split_with_sizes(sizes) for tensor in structure.flatten(prepared)]
        minibatches = [structure.unflatten(minibatch) for minibatch in zip(*parts, strict=True)]
        if self.config.whiten_advantages:
            advantages = [minibatch.steps[_ADVANTAGE] for minibatch in minibatches]  # copies
            whitened = whiten_each(advantages, [minibatch.mask() for minibatch in minibatches])
            torch._foreach_copy_(advantages, whitened)
        return minibatches

    def terms(self, batch: tuple[Trajectories, Trajectories]) -> dict[str, Tensor]:
        """Replay the agent over a prepared minibatch, and compute `losses`.

        Args:
            batch: the minibatch, and the collected batch, from which the agent computes the states of single steps.
        """
        minibatch, collected = batch
        steps = minibatch.steps
        if "learner/step" in steps:
            states = self.agent.states_at(collected, steps["learner/step"].squeeze(1)) or DictTensor()
            minibatch = Trajectories.unchecked(minibatch.info + states.prepend_key("agent_state/"), steps)
        return losses(replay_agent(self.agent, minibatch), minibatch, self.config)

    def weight(self, batch: tuple[Trajectories, Trajectories]) -> Tensor | None:
        """Return the number of steps of a minibatch; see `GradientLearner.weight`."""
        return super().weight(batch[0])

    @operation("loss")
    @torch.no_grad()
    def prepare(self, trajectories: Trajectories) -> tuple[Trajectories, dict[str, Tensor]]:
        """Compute the advantages, targets and values, which stay constant during an update.

        Args:
            trajectories: on the learner's device.  [B, T]

        Returns:
            ``(batch, diagnostics)``. The batch has rows [B, T], or, if the agent can compute its states, single steps
            [B * T, 1] with their numbers ``learner/step``; it adds ``learner/advantage``, ``learner/target`` and
            ``learner/value``. ``diagnostics`` has numbers [] from before the first gradient step: ``ratio_error``, the
            largest distance of a ratio from 1, which is 0 if the replay equals the collection, and
            ``explained_variance`` of the targets by the values.
        """
        config, steps = self.config, trajectories.steps
        replayed, next_value = replay_with_next_values(self.agent, trajectories)
        mask, value = steps.mask(), replayed["value"]
        log_probability, _ = evaluate_actions(replayed, steps)
        ratio = torch.where(mask, log_probability - steps["action/log_probability"], 0.0).exp()
        advantage = generalized_advantage(
            steps["_observation/reward"].to(value.dtype) * config.reward_scale,
            steps["_observation/terminated"],
            steps["_observation/done"],
            mask,
            value=value,
            next_value=next_value,
            discount=config.discount,
            trace_decay=config.trace_decay,
        )
        target = advantage + value
        diagnostics = {
            "ratio_error": (ratio - 1.0).abs().max(),
            "explained_variance": 1.0 - _variance(advantage, mask) / _variance(target, mask).clamp(min=1e-8),
        }
        wanted = {key: tensor for key, tensor in steps.items() if not key.startswith("_observation/")}
        wanted |= {_ADVANTAGE: advantage, "learner/target": target, "learner/value": value}
        batch = Trajectories.unchecked(trajectories.info, TemporalDictTensor.unchecked(wanted, steps.lengths))
        none = steps.lengths[:0]  # no steps: asks only whether the agent can compute its states
        return (batch if self.agent.states_at(trajectories, none) is None else _single_steps(batch)), diagnostics

    def shuffled(self, n_rows: int, epoch: int) -> tuple[Tensor, ...]:
        """Split the rows into the minibatches of an epoch: every row once, in an order of this seed and gradient step.

        Returns:
            Row numbers; the minibatches are of almost equal size.  [n_rows / n_minibatches] int64 each
        """
        n = self.config.n_minibatches
        if n_rows < n:
            raise BadValueError(
                f"PPOConfig: n_minibatches is {n}, expected at most {n_rows}, one for each environment: an agent with "
                "a state learns from whole rows."
            )
        # Keys from a counter: the same order on all devices, and after a resume, but different in each learner.
        lanes = torch.arange(n_rows, device=self.device, dtype=torch.int64)
        order = random.step_keys(self._seed, self.version_now + epoch * n, lanes).squeeze(1).argsort()
        return order.tensor_split([n_rows * k // n for k in range(1, n)])


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    return masked_mean((values - masked_mean(values, mask)).square(), mask)


def _single_steps(batch: Trajectories) -> Trajectories:
    """Make every step [B, T] a separate row [B * T, 1], without its state; padding becomes rows of length 0."""
    steps, T = batch.steps, batch.steps.n_steps()
    flat = {key: tensor.flatten(0, 1).unsqueeze(1) for key, tensor in steps.items()}
    flat["learner/step"] = torch.arange(steps.n_elems() * T, device=steps.device).unsqueeze(1)
    info = {k: v.repeat_interleave(T, dim=0) for k, v in batch.info.items() if not k.startswith("agent_state/")}
    lengths = steps.mask().flatten().to(torch.int64)
    return Trajectories.unchecked(DictTensor(info), TemporalDictTensor.unchecked(flat, lengths))


train: Algorithm[PPOConfig] = Algorithm(PPOLearner, "more steps, many updates; discrete and continuous actions")
"""Train an actor and a critic; arguments are those of `Algorithm.__call__`.

The agent returns ``action``, ``log_probability``, ``value``, and ``action_logits`` or ``action_mean`` and
``action_log_std``, as `rlstruct.agents.ActorCriticAgent`, `RecurrentAgent`, `GaussianAgent` and
`RecurrentGaussianAgent` do.
"""

__getattr__ = renamed.attributes(__name__)
