"""A2C: one gradient step on n steps of every environment; GAE or V-trace, with or without memory.

Mnih et al., "Asynchronous methods for deep reinforcement learning" (ICML 2016), section 4.3, in its synchronous form;
Schulman et al., "High-dimensional continuous control using generalized advantage estimation" (ICLR 2016); Espeholt et
al., "IMPALA" (ICML 2018); with a window, Dalton et al., "Accelerating reinforcement learning through GPU Atari
emulation" (NeurIPS 2020), section 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.agent_outputs import POLICY_AND_VALUE, WITH_PROBABILITY, Alternatives
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.bootstrapping import bootstrap_values, next_values, replay_with_next_values
from rlstruct.algos.learner import GradientLearner, evaluate_actions
from rlstruct.algos.training.checkpoint import restored, stored
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers.rollout_buffer import compact_rows
from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.errors import BadValueError
from rlstruct.functional.advantages import VTrace, generalized_advantage, vtrace
from rlstruct.functional.policy_gradient import actor_critic_terms, entropy_loss, policy_gradient_loss, value_loss
from rlstruct.functional.statistics import whiten
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import RL_Agent

_BOOTSTRAP = "learner/bootstrap"


@dataclass(frozen=True, kw_only=True)
class A2CConfig(TrainingConfig):
    """Settings of A2C and those of `TrainingConfig`; the defaults are for CartPole-v1.

    Attributes:
        trace_decay: lambda of GAE and of V-trace: 0 trusts the critic, 1 the rewards.
        value_coefficient: weight of the critic's loss.
        entropy_coefficient: weight of the entropy, in 1 / nat.
        whiten_advantages: scale the advantages of an update to mean 0 and variance 1. Once the policy is good, the
            advantages are mostly noise; scaling amplifies it, and the policy may get worse again.
        overlap: collect the next batch while learning from this one, with weights that are one update older. It pays
            with worker processes, which then collect without waiting for the learner.
        vtrace: correct for actions that older weights chose. overlap, n_updates and n_minibatches cause this.
        n_updates: number of updates from each batch. If collection is slow, several updates make better use of it. From
            the second one on, older weights chose the actions, so more than one needs vtrace.
        n_minibatches: split the environments of a batch into this many minibatches, with one gradient step on each.
            With many environments, a single step on all of them learns too little. This also needs vtrace.
        window: after every batch, learn from one minibatch of environments, each in turn, but over this many of the
            last batches. With n_timesteps = 1 and a window of n_minibatches there is one gradient step after every step
            of the environments, and each step is used once. None learns from all minibatches of each batch separately.
            A window needs vtrace, and minibatches of equal size.
        rho_clip: upper bound of V-trace's weight of a step, see rlstruct.functional.advantages.vtrace. With several
            gradient steps per batch choose more than 1. Otherwise actions that have become more probable count too
            little, and if most advantages are negative, the policy drifts away from the one that acted.
        c_clip: upper bound of V-trace's weight of later errors.
    """

    n_env_steps: int = 250_000
    n_timesteps: int = 64
    n_envs: int = 16
    n_processes: int = 0
    reward_scale: float = 0.1
    learning_rate: float = 0.007
    evaluation_timesteps: int | None = 100
    log_interval: int = 20
    max_gradient_norm: float | None = 0.5
    trace_decay: float = option(0.98, at_least=0, at_most=1)
    value_coefficient: float = 0.5
    entropy_coefficient: float = 0.01
    whiten_advantages: bool = False
    overlap: bool = False
    vtrace: bool = False
    n_updates: int = option(1, at_least=1)
    n_minibatches: int = option(1, at_least=1)
    window: int | None = option(None, at_least=1)
    rho_clip: float = option(1.0, at_least=0)
    c_clip: float = option(1.0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("n_updates", "n_minibatches"):
            fits = getattr(self, name) == 1 or self.vtrace
            self.require(name, fits, "1, or vtrace = True, which corrects the later ones")
        self.require("window", self.window is None or self.vtrace, "at least 1 with vtrace = True, or None")
        n_envs = self.n_envs * max(1, self.n_processes)
        self.require("n_minibatches", self.n_minibatches <= n_envs, f"at most one for each of {n_envs} environments")
        fits = self.window is None or n_envs % self.n_minibatches == 0
        self.require("n_minibatches", fits, f"a divisor of {n_envs} environments, for the window")


@operation("loss")
def losses(
    replayed: TemporalDictTensor, trajectories: Trajectories, next_value: Tensor, config: A2CConfig
) -> dict[str, Tensor]:
    """Compute the terms of the loss.

    Args:
        replayed: outputs of the learner's agent, with gradients: ``value`` [B, T] and its policy, see
            `rlstruct.algos.learner.evaluate_actions`.
        trajectories: the collected steps, same device.  [B, T]
        next_value: the critic's values of the true next observations.  [B, T]
        config: discount, coefficients, and whether to use V-trace.

    Returns:
        ``loss`` and its terms ``policy_loss``, ``value_loss`` and ``entropy_loss`` (minus the mean entropy).  [] each
    """
    steps = trajectories.steps
    mask = steps.mask()  # [B, T]
    log_probability, entropy = evaluate_actions(replayed, steps)
    target, advantage = _targets(replayed["value"], log_probability, steps, next_value, config)
    if config.whiten_advantages:
        advantage = whiten(advantage, mask)
    terms = {
        "policy_loss": policy_gradient_loss(log_probability, advantage, None),
        "value_loss": value_loss(replayed["value"], target, None),
        "entropy_loss": entropy_loss(entropy, None),
    }
    return actor_critic_terms(
        terms, mask, value_coefficient=config.value_coefficient, entropy_coefficient=config.entropy_coefficient
    )


def _targets(
    value: Tensor, log_probability: Tensor, steps: TemporalDictTensor, next_value: Tensor, config: A2CConfig
) -> VTrace:
    """Return the critic's targets and the weights of the policy's gradient: constants [B, T]."""
    reward = steps["_observation/reward"] * config.reward_scale
    inputs = (reward, steps["_observation/terminated"], steps["_observation/done"], steps.mask())
    arguments: dict[str, Any] = {"value": value.detach(), "next_value": next_value}
    arguments |= {"discount": config.discount, "trace_decay": config.trace_decay}
    if not config.vtrace:
        advantage = generalized_advantage(*inputs, **arguments)
        return VTrace(advantage + arguments["value"], advantage)
    log_ratio = log_probability.detach() - steps["action/log_probability"]
    return vtrace(*inputs, **arguments, log_ratio=log_ratio, rho_clip=config.rho_clip, c_clip=config.c_clip)


class A2CLearner(GradientLearner):
    """Learner of A2C.

    Raises:
        ValueError: the network keeps statistics of rewards, and a ``window`` would feed them out of order.
    """

    settings: ClassVar[type[TrainingConfig]] = A2CConfig
    outputs: Alternatives = POLICY_AND_VALUE
    config: A2CConfig
    reuse_batches = True

    def __init__(self, model: nn.Module, agent: RL_Agent, config: A2CConfig) -> None:
        super().__init__(model, agent, config)
        if config.vtrace:
            self.outputs = WITH_PROBABILITY
        self.overlap, self.reuse_batches = config.overlap, self.reuse_batches and config.window is None
        self._latest: list[Trajectories] = []  # the batches of the window, the oldest first
        if config.window is not None and self.statistics is not None:
            raise BadValueError(
                f"A2C: got window={config.window} and {type(model).__name__}, whose statistics need whole "
                "batches. Use window=None, or a network without statistics."
            )

    def update(self, trajectories: Trajectories, fraction_done: float) -> dict[str, Tensor]:
        """Learn from one batch, or from one minibatch of a full window; see `GradientLearner.update`."""
        if (window := self.config.window) is None:
            return super().update(trajectories, fraction_done)
        self._latest = [*self._latest, trajectories.to(self.device)][-window:]
        if len(self._latest) < window:
            return {}
        turn = self.policy_version // self.config.n_updates % self.config.n_minibatches
        parts = [_minibatches(batch, self.config.n_minibatches)[turn] for batch in self._latest]
        return super().update(_concatenate_in_time(parts), fraction_done)

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, including the window."""
        return {**super().state_dict(), "window": [stored(batch) for batch in self._latest]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        super().load_state_dict(state)
        self._latest = [restored(tensors).to(self.device) for tensors in state["window"]]

    def minibatches(self, prepared: Trajectories) -> Iterator[Trajectories]:
        """Yield ``n_minibatches`` minibatches ``n_updates`` times, or a window's minibatch; see `terms`."""
        n_minibatches = self.config.n_minibatches if self.config.window is None else 1
        for _ in range(self.config.n_updates):
            for one in _minibatches(prepared, n_minibatches):
                yield self._with_bootstrap(one)

    def _with_bootstrap(self, minibatch: Trajectories) -> Trajectories:
        """Add ``learner/bootstrap``, the result of `bootstrap_values`, if the agent need not act to know its states."""
        steps = minibatch.steps
        if self.agent.states_at(minibatch, steps.lengths[:0]) is None:
            return minibatch
        added = {**dict(steps.items()), _BOOTSTRAP: bootstrap_values(self.agent, minibatch)}
        return Trajectories.unchecked(minibatch.info, TemporalDictTensor.unchecked(added, steps.lengths))

    def terms(self, minibatch: Trajectories) -> dict[str, Tensor]:
        """Replay the agent over trajectories [B, T], and compute `losses`."""
        if _BOOTSTRAP in minibatch.steps:
            replayed = replay_agent(self.agent, minibatch)
            next_value = next_values(replayed["value"].detach(), minibatch.steps[_BOOTSTRAP], minibatch)
        else:
            replayed, next_value = replay_with_next_values(self.agent, minibatch)
        return losses(replayed, minibatch, next_value, self.config)


def _minibatches(trajectories: Trajectories, n: int) -> list[Trajectories]:
    """Split rows [B, T] into n contiguous minibatches of almost equal size, which share the batch's memory."""
    bounds = [trajectories.n_elems() * k // n for k in range(n + 1)]
    return [trajectories.slice(start, stop) for start, stop in pairwise(bounds)]


def _concatenate_in_time(batches: Sequence[Trajectories]) -> Trajectories:
    """Concatenate successive batches [B, T] of the same environments to [B, sum of T], with the padding last."""
    real = torch.cat([batch.mask() for batch in batches], 1)  # [B, sum of T]
    keys = batches[0].steps.keys()
    joined = {key: torch.cat([batch.steps[key] for batch in batches], 1) for key in keys}
    steps = compact_rows(joined, real)
    # An episode also ends where the next one begins: a lost worker or a loaded checkpoint cut it short.
    steps["_observation/done"][:, :-1] |= steps["observation/initial_state"][:, 1:]
    return Trajectories.unchecked(batches[0].info, steps)


train: Algorithm[A2CConfig] = Algorithm(A2CLearner, "some steps, one update; discrete and continuous actions")
"""Train an actor and a critic; arguments are those of `Algorithm.__call__`.

The agent returns ``action``, ``log_probability``, ``value``, and ``action_logits`` or ``action_mean`` and
``action_log_std``, as `rlstruct.agents.ActorCriticAgent`, `RecurrentAgent`, `GaussianAgent` and
`RecurrentGaussianAgent` do.
"""

__getattr__ = renamed.attributes(__name__)
