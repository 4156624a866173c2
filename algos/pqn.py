"""PQN: Q-learning on n steps of many environments, without a replay buffer and without a target network.

Gallici et al., "Simplifying deep temporal difference learning" (ICLR 2025). Layer normalisation in the network, many
environments and lambda-returns keep it stable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstruct.algos.agent_outputs import ACTION_VALUES, Alternatives
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.bootstrapping import collected_values, next_values
from rlstruct.algos.learner import CreateAgent, agent_around
from rlstruct.algos.minibatches import EpochConfig, EpochLearner, Prepared
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.functional.advantages import generalized_advantage
from rlstruct.functional.policy_gradient import value_loss
from rlstruct.functional.q_learning import chosen_value
from rlstruct.functional.schedules import linear_schedule
from rlstruct.functional.statistics import masked_means
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.replay import replay_agent


@dataclass(frozen=True, kw_only=True)
class PQNConfig(EpochConfig):
    """Settings of PQN, and those of `EpochConfig` and `TrainingConfig`; the defaults are for CartPole-v1.

    Attributes:
        trace_decay: lambda of the targets: 0 trusts the values of the next observations, 1 the rewards.
        initial_epsilon: share of random actions at the beginning.
        final_epsilon: lowest share of random actions.
        epsilon_fraction: share of the training in which epsilon falls linearly.
    """

    n_env_steps: int = 500_000
    n_timesteps: int = 64
    n_envs: int = 32
    reward_scale: float = 0.1
    learning_rate: float = 5e-4
    final_learning_rate_fraction: float = 0.0
    max_gradient_norm: float | None = 10.0
    evaluation_timesteps: int | None = 500
    evaluation_interval: int = 20_000
    evaluation_stochastic: bool = False
    trace_decay: float = option(0.95, at_least=0, at_most=1)
    n_minibatches: int = option(16, at_least=1)
    initial_epsilon: float = option(1.0, at_least=0, at_most=1)
    final_epsilon: float = option(0.05, at_least=0, at_most=1)
    epsilon_fraction: float = option(0.2, above=0)


@operation("loss")
def losses(replayed: TemporalDictTensor, minibatch: Trajectories) -> dict[str, Tensor]:
    """Compute the loss of a minibatch.

    Args:
        replayed: outputs of the learner's agent, with gradients: ``action_values``.  [B, T, A]
        minibatch: collected steps with ``learner/target`` of `PQNLearner.prepare`, same device.  [B, T]

    Returns:
        ``loss``, half the mean squared error of the actions taken; without gradients their mean ``value`` and mean
        absolute ``error``.  [] each
    """
    steps = minibatch.steps
    mask, target = steps.mask(), steps["learner/target"]
    value = chosen_value(replayed["action_values"], steps["action/action"])  # [B, T]
    with torch.no_grad():
        mean, error = masked_means(mask, value, (value - target).abs())
    return {"loss": value_loss(value, target, mask), "value": mean, "error": error}


class PQNLearner(EpochLearner):
    """Learner of PQN."""

    settings: ClassVar[type[TrainingConfig]] = PQNConfig
    outputs: Alternatives = ACTION_VALUES
    config: PQNConfig

    @classmethod
    def create(cls, model: torch.nn.Module, create_agent: CreateAgent, config: PQNConfig) -> PQNLearner:
        """Create a learner whose agent is greedy: it only computes action values."""
        return cls(model, agent_around(model, create_agent, config.learner_device, stochastic=False), config)

    @operation("loss")
    @torch.no_grad()
    def prepare(self, trajectories: Trajectories) -> tuple[Prepared, dict[str, Tensor]]:
        """Compute the targets from the values with which the actions were chosen.

        With V(s) = max_a Q(s, a), the lambda-return
        G_t = r_t + discount * (lambda * G_{t+1} + (1 - lambda) * V(s_{t+1})) is V(s_t) plus GAE(lambda).

        Args:
            trajectories: on the learner's device.  [B, T]
        """
        config, steps = self.config, trajectories.steps
        values, bootstrap = collected_values(self.agent, trajectories, "action_values")
        value = values.amax(-1)  # [B, T]
        advantage = generalized_advantage(
            steps["_observation/reward"].to(value.dtype) * config.reward_scale,
            steps["_observation/terminated"],
            steps["_observation/done"],
            steps.mask(),
            value=value,
            next_value=next_values(value, bootstrap.amax(-1), trajectories),
            discount=config.discount,
            trace_decay=config.trace_decay,
        )
        kept = {key: tensor for key, tensor in steps.items() if key.startswith("observation/")}
        kept |= {"action/action": steps["action/action"], "learner/target": advantage + value}
        return self.rows_of(trajectories, kept), {}

    def terms(self, minibatch: Trajectories) -> dict[str, Tensor]:
        """Replay the agent over a minibatch, and compute `losses`."""
        return losses(replay_agent(self.agent, minibatch), minibatch)

    def agent_info(self, fraction_done: float, n_envs: int) -> DictTensor:
        """Return the ``epsilon`` of each environment.  [B] float32 on the CPU."""
        config = self.config
        epsilon = linear_schedule(fraction_done, config.initial_epsilon, config.final_epsilon, config.epsilon_fraction)
        return DictTensor({"epsilon": torch.full((n_envs,), epsilon, dtype=torch.float32, device="cpu")})


train: Algorithm[PQNConfig] = Algorithm(
    PQNLearner, "many environments, action values; discrete actions", agents="online values"
)
"""Train a network of action values; arguments are those of `Algorithm.__call__`.

The agent reads ``agent_info["epsilon"]`` and returns ``action`` and ``action_values``, as `rlstruct.agents.QAgent` and
`rlstruct.agents.RecurrentQAgent` do; their networks should have ``layer_norm=True``.
"""
