"""SAC: a policy with high entropy, and its critics, learned from a replay buffer.

Haarnoja et al., "Soft actor-critic algorithms and applications" (2018, arXiv 1812.05905), algorithm 1. Critics, policy
and temperature take their gradient steps together, as in the authors' code: the sum of the three losses is
differentiated once, and each of them depends on its own networks alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rlstruct.algos.agent_outputs import Alternatives
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.replay_learner import PolyakAverage, ReplayConfig, ReplayLearner, SlowCopy
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor
from rlstruct.errors import BadTypeError
from rlstruct.functional import random
from rlstruct.functional.q_learning import project_distribution, td_target
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.rl_agent import RL_Agent, frame_of

_Critics = Any  # see rlstruct.agents.Critics
_Pair = tuple[Tensor, Tensor]  # frames and actions
_Backup = Callable[[Tensor], Tensor]  # from next values [..., K] to targets


@dataclass(frozen=True, kw_only=True)
class SACConfig(ReplayConfig):
    """Settings of SAC, and those of `ReplayConfig` and `TrainingConfig`; ``learning_rate`` is the policy's.

    Attributes:
        critic_learning_rate: learning rate of the critics and of the temperature.
        target_update_rate: fraction by which the target critics move at each gradient step (Polyak averaging).
        target_entropy: entropy to aim for, in nats, with the actions scaled to -1..1; None means -1 per dimension.
        learning_starts: environment steps to collect before the first gradient step; the batches that reach this number
            act uniformly.
        n_step: number of rewards in the return; the critics' value estimates the rest. Of the entropies, only that in
            the last state counts.
        critic_reduction: how the values of several critics become one: "min" prevents overestimation (Fujimoto et al.,
            ICML 2018); "mean" learns faster if batches are large (Seo et al., 2025).
        hold_noise: each environment keeps the noise of its actions for all steps of a batch, where new noise at every
            step would cancel out (Raffin, Kober and Stulp, "Smooth exploration for robotic reinforcement learning",
            CoRL 2021, which resamples a function of the frame instead).
    """

    n_env_steps: int = 100_000
    n_timesteps: int = 16
    n_envs: int = 4
    learning_rate: float = 3e-4
    final_learning_rate_fraction: float = 1.0
    evaluation_stochastic: bool = False
    log_interval: int = 25
    critic_learning_rate: float = option(1e-3, at_least=0)
    n_updates: int = 64
    target_update_rate: float = option(0.005, at_least=0, at_most=1)
    target_entropy: float | None = option(None)
    learning_starts: int = option(1000, at_least=0)
    replay_capacity: int = 1_000_000
    n_step: int = option(1, at_least=1)
    critic_reduction: Literal["min", "mean"] = option("min")
    hold_noise: bool = False


def _reduced(values: Tensor, config: SACConfig) -> Tensor:
    """Make one value of those of N critics.  [N, K] to [K]."""
    return values.amin(0) if config.critic_reduction == "min" else values.mean(0)


def _squared_error(
    critics: nn.Module, target_critics: nn.Module, taken: _Pair, reached: _Pair, backup: _Backup, config: SACConfig
) -> tuple[Tensor, Tensor]:
    """Compute the loss [] of critics that learn the mean return, and their values [N, K]."""
    with torch.no_grad():
        target = backup(_reduced(target_critics(*reached), config))  # [K]
    values = critics(*taken)
    return 0.5 * (values - target).square().mean(-1).sum(), values


def _cross_entropy(
    critics: _Critics,
    target_critics: _Critics,
    taken: _Pair,
    reached: _Pair,
    backup: _Backup,
    config: SACConfig,
) -> tuple[Tensor, Tensor]:
    """Compute the loss [] of critics that learn the distribution of returns, and their values [N, K]."""
    support: Tensor = critics.support  # [M]
    with torch.no_grad():
        distributions = target_critics.outputs(*reached).softmax(-1)  # [N, K, M]
        if config.critic_reduction == "min":
            least = critics.mean(distributions).argmin(0)  # [K]
            index = least.view(1, -1, 1).expand(1, -1, len(support))
            next_distribution = distributions.gather(0, index).squeeze(0)  # [K, M]
        else:
            next_distribution = distributions.mean(0)
        returns = backup(support.unsqueeze(1).expand(-1, len(next_distribution))).mT  # [K, M]
        target = project_distribution(returns, next_distribution, support)
    logits = critics.outputs(*taken)  # [N, K, M]
    loss = -(target * logits.log_softmax(-1)).sum(-1).mean(-1).sum()
    return loss, critics.mean(logits.detach().softmax(-1))


@operation("loss")
def losses(
    agent: RL_Agent, model: nn.Module, target_critics: nn.Module, batch: DictTensor, config: SACConfig
) -> dict[str, Tensor]:
    """Compute the losses of a batch; equations 5, 7 and 18 of the paper.

    Args:
        agent: acts with ``model``, see `rlstruct.agents.SquashedGaussianAgent`.
        model: the networks that learn, see `rlstruct.agents.SoftActorCritic`.
        target_critics: evaluate the next actions.
        batch: a sample of `ReplayBuffer.sample`, with random keys ``observation/rng`` and ``_observation/rng`` [K]
            int64 for the agent.  [K]
        config: ``reward_scale``, ``target_entropy`` and ``critic_reduction``.

    Returns:
        ``loss`` [], the sum of ``critic_loss``, ``policy_loss`` and ``temperature_loss``; without gradients ``value``
        of the actions taken, ``temperature``, and ``entropy`` in the units of ``target_entropy``.  [] each
    """
    networks: Any = model  # nn.Module does not declare its parts
    observation, action = batch.truncate_key("observation/"), batch["action/action"]
    frame = frame_of(observation)
    temperature: Tensor = networks.log_temperature.exp()
    with torch.no_grad():
        seen_next = batch.truncate_key("_observation/")
        next_output, _ = agent(DictTensor(), seen_next, DictTensor())
        entropy_cost = temperature * next_output["log_probability"]  # [K]

    def backup(next_value: Tensor) -> Tensor:  # [..., K]
        reward, discount, terminated = (
            one.expand_as(next_value)
            for one in (batch["reward"] * config.reward_scale, batch["discount"], batch["terminated"])
        )
        return td_target(reward, discount, terminated, next_value - entropy_cost)

    reached = frame_of(seen_next), next_output["action"]
    distributional = getattr(networks.critics, "support", None) is not None
    critic_terms = _cross_entropy if distributional else _squared_error
    critic_loss, values = critic_terms(networks.critics, target_critics, (frame, action), reached, backup, config)
    output, _ = agent(DictTensor(), observation, DictTensor())
    log_probability = output["log_probability"]
    q = _reduced(networks.critics(frame, output["action"], constant=True), config)  # [K]
    policy_loss = (temperature.detach() * log_probability - q).mean()
    entropy = -log_probability.detach().mean() - networks.scale.log().sum()
    target_entropy = -action.shape[-1] if config.target_entropy is None else config.target_entropy
    temperature_loss = temperature * (entropy - target_entropy)
    return {
        "loss": critic_loss + policy_loss + temperature_loss,
        "critic_loss": critic_loss.detach(),
        "policy_loss": policy_loss.detach(),
        "temperature_loss": temperature_loss.detach(),
        "value": values.detach().mean(),
        "entropy": entropy,
        "temperature": temperature.detach(),
    }


class SACLearner(ReplayLearner):
    """Learner of SAC: the networks, a slow copy of the critics, and the replay buffer.

    Attributes:
        model: policy, critics and temperature.
        target_critics: evaluate the next actions.
        buffer: the collected steps, on any device.
    """

    settings: ClassVar[type[TrainingConfig]] = SACConfig
    outputs: Alternatives = (("log_probability",),)
    config: SACConfig
    random_keys = "observation/rng", "_observation/rng"

    def __init__(self, model: nn.Module, agent: RL_Agent, config: SACConfig) -> None:
        if missing := [name for name in ("critics", "log_temperature", "scale") if not hasattr(model, name)]:
            raise BadTypeError(
                f"SAC: the network, {type(model).__name__}, has no {' and no '.join(missing)}. Let create_model return "
                "rlstruct.agents.SoftActorCritic, or a network with the same parts."
            )
        networks: Any = model
        self.target_critics: nn.Module = copy.deepcopy(networks.critics).requires_grad_(False)
        super().__init__(model, agent, config, networks={"target_critics": self.target_critics}, n_step=config.n_step)
        self._noise_seed = self.seed_for("held noise", device="cpu")  # where agent_info is
        self._target = PolyakAverage(self.target_critics, networks.critics)
        critics: list[Tensor] = [*networks.critics.parameters(), networks.log_temperature]
        (group,), critic_ids = self.optimizer.param_groups, {id(weight) for weight in critics}
        group["params"] = [weight for weight in group["params"] if id(weight) not in critic_ids]
        self.optimizer.add_param_group({"params": critics, "initial_lr": config.critic_learning_rate})

    def slow_copies(self) -> Sequence[SlowCopy]:
        """Return the target critics."""
        return (SlowCopy(self._target, self.config.target_update_rate),)

    def terms(self, minibatch: DictTensor) -> dict[str, Tensor]:
        """Compute `losses` of a sampled batch."""
        return losses(self.agent, self.model, self.target_critics, minibatch, self.config)

    def agent_info(self, fraction_done: float, n_envs: int) -> DictTensor:
        """Return the ``epsilon`` of each environment, 1 while the buffer fills, and ``noise`` if it is held.

        At the end there is no ``noise``: evaluations and loaded policies sample with those settings, and would repeat
        it in every step.

        Returns:
            [B] on the CPU: float32, and keys for `rlstruct.functional.random`, int64.
        """
        info = {"epsilon": torch.full((n_envs,), float(self.fills(fraction_done)), device="cpu")}
        if self.config.hold_noise and fraction_done < 1.0:
            lanes = torch.arange(n_envs, device="cpu")
            info["noise"] = random.step_keys(self._noise_seed, self._steps_done(fraction_done), lanes).squeeze(1)
        return DictTensor(info)


train: Algorithm[SACConfig] = Algorithm(
    SACLearner, "replay buffer, twin critics, entropy; continuous actions", agents="soft"
)
"""Train a policy for bounded continuous actions; arguments are those of `Algorithm.__call__`.

The network is `rlstruct.agents.SoftActorCritic`, or has the same parts. The agent keeps no state, reads
``agent_info["epsilon"]``, and during collection ``agent_info["noise"]`` if `SACConfig.hold_noise` is set, and returns
``action`` and ``log_probability`` with gradients, as `rlstruct.agents.SquashedGaussianAgent` does.
"""
