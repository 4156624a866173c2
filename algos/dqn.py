"""DQN: pieces of n steps into a replay buffer, batches out of it, a target network behind. Layer 4.

Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), with the parts of Hessel et al.,
"Rainbow" (AAAI 2018), that are switched on in the configuration. The greedy policy hangs on small differences of large
values, so it acts and is evaluated with a running average of the weights that learn (Polyak and Juditsky, 1992).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct.algos.config import TrainingConfig
from rlstruct.algos.learner import GradientLearner, mean_terms
from rlstruct.algos.placement import CreateAgent, CreateEnv
from rlstruct.algos.prioritised import PrioritisedReplayBuffer
from rlstruct.algos.replay_buffer import ReplayBuffer, least_capacity
from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.training import Collection, CreateModel, TrainingResult, run_training
from rlstruct.core import DictTensor, Trajectories
from rlstruct.functional.q_learning import double_q_value, greedy_value, q_loss, td_target
from rlstruct.functional.schedules import epsilon_ladder, linear_schedule
from rlstruct.rl_agent import RL_Agent

_COUNTS = ("n_step", "batch_size", "n_updates", "target_update_interval", "replay_capacity", "n_stack")
_SHARES = ("target_update_rate", "average_rate", "initial_epsilon", "final_epsilon", "initial_correction")


@dataclass(frozen=True, kw_only=True)
class DQNConfig(TrainingConfig):
    """Settings of a training, beside those of `TrainingConfig`; the defaults are for CartPole-v1.

    Attributes:
        n_step: steps of the return before the network's value stands for the rest (Sutton and Barto, 2018, 7.1).
        double: let the network that learns choose the action that the target network judges (van Hasselt et al.,
            AAAI 2016).
        batch_size: steps of one gradient step.
        n_updates: gradient steps for each piece that is collected.
        huber_delta: errors above this size count linearly.
        target_update_interval: gradient steps between two updates of the target network.
        target_update_rate: 1 copies the network that learns (hard, Mnih et al., 2015); less moves the target network
            by this part towards it, usually with an interval of 1 (soft, Lillicrap et al., ICLR 2016).
        average_rate: part by which the weights that act follow those that learn, at each gradient step; 1 acts with
            the latest ones.
        replay_capacity: observations that the buffer keeps, see ReplayBuffer.
        replay_device: where it keeps them; None for the learner's device. Elsewhere, prioritised replay makes the host
            wait for the errors at each gradient step.
        replay_pinned: keep them in pinned memory, where replay_device is the CPU of a machine with a GPU.
        learning_starts: environment steps before the first gradient step.
        n_stack: the frames are stacks of so many, see ReplayBuffer.
        prioritised: draw steps with large errors more often, see PrioritisedReplayBuffer.
        priority_exponent: 0 draws uniformly, 1 in proportion to the error.
        initial_correction: how much of the bias of these draws is undone at the beginning; rises linearly to 1.
        initial_epsilon: share of random actions at the beginning.
        final_epsilon: share of random actions when they have become fewest.
        epsilon_fraction: part of the training in which epsilon falls linearly.
        epsilon_exponent: spreads epsilon over the environments, see epsilon_ladder; 0 gives all the same.
        overlap: collect the next piece while learning. It pays with worker processes.
    """

    n_env_steps: int = 50_000
    n_timesteps: int = 16
    n_processes: int = 0
    discount: float = 0.995
    learning_rate: float = 0.002
    max_gradient_norm: float | None = 10.0
    evaluation_timesteps: int | None = 500
    evaluation_stochastic: bool = False
    log_interval: int = 25
    n_step: int = 3
    double: bool = True
    batch_size: int = 128
    n_updates: int = 32
    huber_delta: float = 1.0
    target_update_interval: int = 1
    target_update_rate: float = 0.02
    average_rate: float = 0.01
    replay_capacity: int = 100_000
    replay_device: str | None = None
    replay_pinned: bool = False
    learning_starts: int = 1000
    n_stack: int = 1
    prioritised: bool = False
    priority_exponent: float = 0.6
    initial_correction: float = 0.4
    initial_epsilon: float = 1.0
    final_epsilon: float = 0.05
    epsilon_fraction: float = 0.2
    epsilon_exponent: float = 0.0
    overlap: bool = False

    def __post_init__(self) -> None:
        """Refuse what would fail late or in silence.

        Raises:
            ValueError: a setting is out of range.
        """
        super().__post_init__()
        for name in _COUNTS:
            self._refuse(name, getattr(self, name) >= 1, "at least 1")
        for name in _SHARES:
            self._refuse(name, 0.0 <= getattr(self, name) <= 1.0, "0 to 1")
        self._refuse("epsilon_fraction", self.epsilon_fraction > 0.0, "more than 0")
        self._refuse("huber_delta", self.huber_delta > 0.0, "more than 0")
        for name in ("learning_starts", "priority_exponent", "epsilon_exponent"):
            self._refuse(name, getattr(self, name) >= 0, "at least 0")
        n_envs = self.n_envs * max(1, self.n_processes)
        least = least_capacity(n_envs, self.n_timesteps, self.n_stack)
        self._refuse(
            "replay_capacity",
            self.replay_capacity >= least,
            f"at least {least}: {self.n_timesteps} steps of {n_envs} environments, each of which may end an episode",
        )


def losses(agent: RL_Agent, target_agent: RL_Agent, batch: DictTensor, config: DQNConfig) -> dict[str, Tensor]:
    """Compute the loss of a batch.

    Args:
        agent: acts with the network that learns.
        target_agent: acts with the target network.
        batch: what `ReplayBuffer.sample` gives, on the learner's device.  [K]
        config: its ``reward_scale``, ``double`` and ``huber_delta``.

    Returns:
        ``loss`` [], carries the gradient; ``value`` of the actions taken, and ``error`` = value - target.  [K] each
    """
    values = action_values(agent, batch.truncate_key("observation/"))  # [K, A]
    value = values.gather(1, batch["action/action"].unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        reached = batch.truncate_key("_observation/")
        judged = action_values(target_agent, reached)  # [K, A]
        next_value = double_q_value(action_values(agent, reached), judged) if config.double else greedy_value(judged)
        target = td_target(batch["reward"] * config.reward_scale, batch["discount"], batch["terminated"], next_value)
    return {
        "loss": q_loss(value, target, batch["weight"], config.huber_delta),
        "value": value.detach(),
        "error": value.detach() - target,
    }


def action_values(agent: RL_Agent, observation: DictTensor) -> Tensor:
    """Return what a greedy agent without state thinks of all actions.  [K, A]."""
    output, _ = agent(DictTensor(), observation, DictTensor())
    return output["action_values"]


class Learner(GradientLearner):
    """The network that learns, its two slow copies and its memory.

    Args:
        model: on the learner's device.
        create_agent: see `train`.
        config: see `DQNConfig`.

    Attributes:
        model: the running average, which acts and is evaluated.
        online_model: what learns: the model that was given.
        target_model: judges what a step led to.
        target_agent: acts with it.
        buffer: what was collected, on a device of its own.
    """

    def __init__(self, model: nn.Module, create_agent: CreateAgent, config: DQNConfig) -> None:
        """Create the copies, the optimiser and the replay buffer."""
        self.config = config
        self.online_model = model
        self.target_model = copy.deepcopy(model).requires_grad_(False)
        agent, self.target_agent = (
            create_agent(network, device=config.learner_device, stochastic=False, copy_model=False)
            for network in (model, self.target_model)
        )
        super().__init__(model, agent, config)
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._average, self._target = Follower(self.model, model), Follower(self.target_model, model)
        self.buffer = _create_buffer(config)

    def update(self, trajectories: Trajectories, progress: float) -> dict[str, Tensor]:
        """Remember a piece, and take ``n_updates`` gradient steps.

        Args:
            trajectories: pieces of a stream, on any device.  [B, T]
            progress: how much of the training is over, in [0, 1]; the learning rate falls with it.

        Returns:
            Detached means over the gradient steps, on the learner's device: ``loss``, ``value`` of the actions taken,
            absolute ``error``, ``gradient_norm``; nothing while the buffer fills.  [] each
        """
        self.buffer.extend(trajectories.to(self.buffer.device))
        self.batches = []
        if progress * self.config.n_env_steps < self.config.learning_starts:
            return {}
        return mean_terms([self.learn(progress) for _ in range(self.config.n_updates)])

    def learn(self, progress: float) -> dict[str, Tensor]:
        """Take one gradient step on a batch from the buffer; see `update`."""
        config, buffer = self.config, self.buffer
        if isinstance(buffer, PrioritisedReplayBuffer):
            buffer.correction = linear_schedule(progress, config.initial_correction, 1.0)
        batch = buffer.sample(config.batch_size).to(self.device, non_blocking=True)
        self.batches.append(batch)
        terms = losses(self.agent, self.target_agent, batch, config)
        norms = self.descend(terms["loss"], progress)
        if isinstance(buffer, PrioritisedReplayBuffer):
            buffer.update_priorities(batch["index"].to(buffer.device), terms["error"].to(buffer.device))
        self._average.follow(config.average_rate)
        if self.policy_version % config.target_update_interval == 0:
            self._target.follow(config.target_update_rate)
        means = {"value": terms["value"].mean(), "error": terms["error"].abs().mean()}
        return {"loss": terms["loss"].detach(), **means, **norms}

    def agent_info(self, progress: float, n_envs: int) -> DictTensor:
        """Return the ``epsilon`` of each environment.  [B] float32 on the CPU."""
        config = self.config
        epsilon = linear_schedule(progress, config.initial_epsilon, config.final_epsilon, config.epsilon_fraction)
        ladder = epsilon_ladder(epsilon, n_envs, config.epsilon_exponent)
        return DictTensor({"epsilon": torch.tensor(ladder, dtype=torch.float32, device="cpu")})

    def state_dict(self) -> dict[str, object]:
        """Return what a checkpoint needs, the replay buffer included."""
        networks = {"online_model": self.online_model.state_dict(), "target_model": self.target_model.state_dict()}
        return {**super().state_dict(), **networks, "replay_buffer": self.buffer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; see `GradientLearner.load_state_dict`."""
        super().load_state_dict(state)
        self.online_model.load_state_dict(state["online_model"])
        self.target_model.load_state_dict(state["target_model"])
        self.buffer.load_state_dict(state["replay_buffer"])


class Follower:
    """Moves the weights of a copy towards those of a model, in place.

    Args:
        copied: takes over; buffers are copied as they are.
        model: same architecture, same device.
    """

    def __init__(self, copied: nn.Module, model: nn.Module) -> None:
        """Find the weights once: a walk through the modules costs more than the move."""
        self._weights: tuple[list[Tensor], list[Tensor]] = (
            [weight.detach() for weight in copied.parameters()],
            [weight.detach() for weight in model.parameters()],
        )
        self._buffers = list(zip(copied.buffers(), model.buffers(), strict=True))

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Take ``rate`` of the model and keep the rest; 1 copies."""
        torch._foreach_lerp_(*self._weights, rate)
        for target, source in self._buffers:
            target.copy_(source)


def _create_buffer(config: DQNConfig) -> ReplayBuffer:
    kind: Callable[..., ReplayBuffer] = ReplayBuffer
    if config.prioritised:
        kind = partial(PrioritisedReplayBuffer, exponent=config.priority_exponent)
    return kind(
        config.replay_capacity,
        device=config.replay_device or config.learner_device,
        n_step=config.n_step,
        discount=config.discount,
        n_stack=config.n_stack,
        pin_memory=config.replay_pinned,
        seed=config.seed,
    )


def train(
    config: DQNConfig,
    create_model: CreateModel,
    create_agent: CreateAgent,
    create_env: CreateEnv,
    *,
    env_args: Mapping[str, object] | None = None,
    run: RunFolder | None = None,
) -> TrainingResult:
    """Train a network of action values.

    The factories travel to worker processes.

    Args:
        config: all numbers.
        create_model: makes the network, on the CPU; torch's generator is seeded around the call.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=…)``; the agent keeps no state,
            heeds ``agent_info["epsilon"]`` and returns ``action`` and ``action_values``. `rlstruct.agents.QAgent` is
            such a factory.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``; where it computes is its own affair, a
            `DeviceEnv` moves it to the batcher's device. Its environments restart by themselves.
        env_args: further arguments of ``create_env``.
        run: where to log; None logs nothing. One from `RunFolder.resume` goes on from its checkpoint.

    Returns:
        The trained network and its history.

    Raises:
        WorkerError: a worker process raised or died.
        ValueError: a device of the configuration does not exist, an environment does not restart by itself, or the
            checkpoint is that of other settings.
        TrainingDiverged: a loss is NaN or infinite.
    """

    def create_learner(model: nn.Module) -> Learner:
        return Learner(model, create_agent, config)

    collection = Collection(whole_episodes=False, overlap=config.overlap)
    return run_training(
        config, collection, create_learner, create_model, create_agent, create_env, env_args=env_args, run=run
    )
