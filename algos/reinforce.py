"""REINFORCE with a learned baseline: whole episodes in, one gradient step out, evaluation beside it. Layer 4.

Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992); Sutton and
Barto, "Reinforcement Learning" (2018), section 13.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlstruct.algos.bootstrap import next_values
from rlstruct.algos.config import TrainingConfig
from rlstruct.algos.learner import GradientLearner
from rlstruct.algos.placement import CreateAgent, CreateEnv
from rlstruct.algos.policy import judge_actions
from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.training import Collection, CreateModel, TrainingResult, run_training
from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.functional.policy_gradient import entropy_loss, policy_gradient_loss, value_loss
from rlstruct.functional.returns import bootstrapped_return
from rlstruct.functional.statistics import whiten
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import RL_Agent

ReinforceResult = TrainingResult


@dataclass(frozen=True, kw_only=True)
class ReinforceConfig(TrainingConfig):
    """Settings of a training, beside those of `TrainingConfig`; ``n_envs`` episodes of each process make one update.

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


def losses(
    replayed: TemporalDictTensor, trajectories: Trajectories, next_value: Tensor, config: ReinforceConfig
) -> dict[str, Tensor]:
    """Compute the terms of the loss.

    Args:
        replayed: what the learner's agent returns, with gradients: ``value`` [B, T] and its policy, see
            `rlstruct.algos.policy.judge_actions`.
        trajectories: what was collected, same device.  [B, T]
        next_value: baseline of the true next observations, see `next_values`; zeros for no bootstrap.  [B, T]
        config: its discount, its scale of rewards, its coefficients, and whether to whiten.

    Returns:
        ``loss`` and its terms ``policy_loss``, ``value_loss`` and ``entropy_loss`` (minus the mean entropy).  [] each
    """
    steps = trajectories.trajectories
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
    log_probability, entropy = judge_actions(replayed, steps)
    advantage = target - value.detach()
    if config.whiten_advantages:
        advantage = whiten(advantage, mask)
    terms = {
        "policy_loss": policy_gradient_loss(log_probability, advantage, mask),
        "value_loss": value_loss(value, target, mask),
        "entropy_loss": entropy_loss(entropy, mask),
    }
    weighted = config.value_coefficient * terms["value_loss"] + config.entropy_coefficient * terms["entropy_loss"]
    return {"loss": terms["policy_loss"] + weighted, **terms}


class Learner(GradientLearner):
    """The network that learns, on a device of its own.

    Args:
        model: on the learner's device.
        agent: acts with this very model, so that gradients reach it.
        config: see `ReinforceConfig`.
    """

    def __init__(self, model: nn.Module, agent: RL_Agent, config: ReinforceConfig) -> None:
        """Create the optimiser."""
        super().__init__(model, agent, config)
        self.config = config

    def update(self, trajectories: Trajectories, progress: float) -> dict[str, Tensor]:
        """Take one gradient step.

        Args:
            trajectories: collected with the present weights, on any device.  [B, T]
            progress: how much of the training is over, in [0, 1]; the learning rate falls with it.

        Returns:
            Detached numbers on the learner's device: the terms of `losses`, the mean ``return`` and ``length`` of the
            rows.  [] each
        """
        trajectories = trajectories.to(self.device)
        self.batches = [trajectories]
        replayed = replay_agent(self.agent, trajectories)
        value = replayed["value"]
        following = next_values(self.agent, trajectories) if self.config.bootstrap else torch.zeros_like(value)
        terms = losses(replayed, trajectories, following, self.config)
        terms |= self.descend(terms["loss"], progress)
        steps = trajectories.trajectories
        terms["return"] = torch.where(steps.mask(), steps["_observation/reward"], 0.0).sum(dim=1).mean()
        terms["length"] = steps.lengths.to(value.dtype).mean()
        return {name: term.detach() for name, term in terms.items()}


def train(
    config: ReinforceConfig,
    create_model: CreateModel,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, object] | None = None,
    run: RunFolder | None = None,
) -> TrainingResult:
    """Train a policy.

    The factories travel to worker processes.

    Args:
        config: all numbers.
        create_model: makes the network, on the CPU; torch's generator is seeded around the call.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=…)``; the agent returns
            ``action``, ``value``, and ``action_logits`` or ``action_mean`` and ``action_log_std``.
            `rlstruct.agents.ActorCriticAgent` is such a factory.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``; where it computes is its own affair, a
            `DeviceEnv` moves it to the batcher's device. It starts an episode at ``reset``.
        env_args: further arguments of ``create_env``.
        run: where to log; None logs nothing. One from `RunFolder.resume` goes on from its checkpoint.

    Returns:
        The trained network and its history.

    Raises:
        WorkerError: a worker process raised or died.
        ValueError: a device of the configuration does not exist, or the checkpoint is that of other settings.
        TrainingDiverged: a loss is NaN or infinite.
    """

    def create_learner(model: nn.Module) -> Learner:
        agent = create_agent(model, device=config.learner_device, stochastic=True, copy_model=False)
        return Learner(model, agent, config)

    collection = Collection(whole_episodes=True)
    return run_training(
        config, collection, create_learner, create_model, create_agent, create_env, env_args=env_args, run=run
    )
