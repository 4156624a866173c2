"""PPO: several epochs of minibatch updates on n steps of every environment, with clipped policy changes.

Schulman et al., "Proximal policy optimization algorithms" (2017); Huang et al., "The 37 implementation details of
proximal policy optimization" (ICLR blog track, 2022), which docs/algorithms/ppo.md goes through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.bootstrapping import bootstrap_values, next_values
from rlstruct.algos.learner import GradientLearner, evaluate_actions
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.layout import take_rows
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
from rlstruct.replay import replay_agent, replay_with_states
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
        2020), ``clip_fraction``, the share of steps whose ratio is beyond the clip, and ``ratio_error``, the largest
        distance of a ratio from 1.  [] each
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
        ratio_error = torch.where(mask, moved, 0.0).abs().max()
    terms = actor_critic_terms(
        terms, mask, value_coefficient=config.value_coefficient, entropy_coefficient=config.entropy_coefficient
    )
    return {**terms, "ratio_error": ratio_error}


class Prepared(NamedTuple):
    """A batch with what stays constant during an update.

    Attributes:
        rows: the rows [B, T], or, if the agent can compute its states, single steps [B * T, 1] with their numbers
            ``learner/step``; with ``learner/advantage``, ``learner/target`` and ``learner/value``.
        collected: the batch itself, from which the agent computes the states of single steps.  [B, T]
    """

    rows: Trajectories
    collected: Trajectories


class Minibatch(NamedTuple):
    """Some rows of a prepared batch.

    Attributes:
        prepared: see `Prepared`.
        chosen: numbers of the rows.  [K] int64
        advantage: their advantages, whitened if the settings ask for it.  [K, T] or [K, 1]
    """

    prepared: Prepared
    chosen: Tensor
    advantage: Tensor

    def trajectories(self) -> Trajectories:
        """Gather the rows."""
        rows = self.prepared.rows.index(self.chosen)
        steps = {**dict(rows.steps.items()), _ADVANTAGE: self.advantage}
        return Trajectories.unchecked(rows.info, TemporalDictTensor.unchecked(steps, rows.lengths))


class PPOLearner(GradientLearner):
    """Learner of PPO."""

    settings: ClassVar[type[TrainingConfig]] = PPOConfig
    config: PPOConfig
    keeps_batches = False

    def __init__(self, model: nn.Module, agent: RL_Agent, config: PPOConfig) -> None:
        super().__init__(model, agent, config)
        self._seed = self.seed_for("minibatches")
        self._ratio_error: Tensor | None = None  # of the first minibatch of the update
        self._stopped = torch.zeros((), dtype=torch.bool, device=self.device)  # by ``target_kl``

    @operation("loss")
    @torch.no_grad()
    def prepare(self, trajectories: Trajectories) -> tuple[Prepared, dict[str, Tensor]]:
        """Compute advantages, targets and values, which stay constant during an update.

        The values and log-probabilities are those that the batch holds: of the weights that collected it. If the batch
        lacks values, or the agent's states have to be computed by acting, the agent is replayed once instead.

        Args:
            trajectories: on the learner's device.  [B, T]

        Returns:
            ``(prepared, numbers)``: ``explained_variance`` [] is that of the targets by the values.
        """
        config, steps = self.config, trajectories.steps
        none = steps.lengths[:0]  # no steps: asks only whether the agent can compute its states
        single = self.agent.states_at(trajectories, none) is not None
        if single and "action/value" in steps:
            value, states = steps["action/value"], None
        else:
            replayed, states = replay_with_states(self.agent, trajectories)
            value = replayed["value"]
        mask = steps.mask()
        advantage = generalized_advantage(
            steps["_observation/reward"].to(value.dtype) * config.reward_scale,
            steps["_observation/terminated"],
            steps["_observation/done"],
            mask,
            value=value,
            next_value=next_values(value, bootstrap_values(self.agent, trajectories, states), trajectories),
            discount=config.discount,
            trace_decay=config.trace_decay,
        )
        target = advantage + value
        variance = _variance(advantage, mask) / _variance(target, mask).clamp(min=1e-8)
        kept = {key: tensor for key, tensor in steps.items() if not key.startswith("_observation/")}
        kept |= {_ADVANTAGE: advantage, "learner/target": target, "learner/value": value}
        batch = Trajectories.unchecked(trajectories.info, TemporalDictTensor.unchecked(kept, steps.lengths))
        rows = _single_steps(batch) if single else batch
        self._ratio_error = None
        self._stopped.zero_()
        return Prepared(rows, trajectories), {"explained_variance": 1.0 - variance}

    def minibatches(self, prepared: Prepared) -> Iterator[Minibatch]:
        """Yield ``n_minibatches`` minibatches of shuffled rows in each of ``n_epochs`` passes."""
        rows = prepared.rows
        mask, advantage = rows.mask(), rows.steps[_ADVANTAGE]
        for epoch in range(self.config.n_epochs):
            chosen = self.shuffled(rows.n_elems(), epoch)
            sizes = [len(one) for one in chosen]
            order = torch.cat(chosen)
            advantages = list(take_rows(advantage, order).split_with_sizes(sizes))
            if self.config.whiten_advantages:  # with a single all-reduce for all minibatches
                advantages = whiten_each(advantages, take_rows(mask, order).split_with_sizes(sizes))
            for one, whitened in zip(chosen, advantages, strict=True):
                yield Minibatch(prepared, one, whitened)

    def terms(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Replay the agent over a minibatch, and compute `losses`."""
        rows = minibatch.trajectories()
        steps = rows.steps
        if "learner/step" in steps:
            step = steps["learner/step"].squeeze(1)
            states = self.agent.states_at(minibatch.prepared.collected, step) or DictTensor()
            rows = Trajectories.unchecked(rows.info + states.prepend_key("agent_state/"), steps)
        return losses(replay_agent(self.agent, rows), rows, self.config)

    def weight(self, minibatch: Minibatch) -> Tensor:
        """Return the number of steps of a minibatch; see `GradientLearner.weight`."""
        return take_rows(minibatch.prepared.rows.lengths, minibatch.chosen).sum()

    def gradient_step(self, minibatch: Minibatch) -> dict[str, Tensor]:
        """Take one gradient step, unless the policy has moved beyond ``target_kl``; it counts in any case.

        Returns:
            The terms of `losses` and ``gradient_norm``; with a target_kl also ``skipped``, 1 for a step that was not
            taken.  [] each
        """
        if self.config.target_kl is None:
            return super().gradient_step(minibatch)
        terms, gradient = self.gradient(minibatch)
        self._stopped |= terms["approximate_kl"] > self.config.target_kl
        terms["skipped"] = self._stopped.to(terms["loss"].dtype)
        return self.descend(terms, gradient, unless=self._stopped)

    def after_step(self, minibatch: Minibatch, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        """Report ``ratio_error`` of the first minibatch, before any gradient step: 0 if the replay is right."""
        if self._ratio_error is None:
            self._ratio_error = terms["ratio_error"]
        return {**terms, "ratio_error": self._ratio_error}

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
