"""DQN: action values learned from a replay buffer, with a slowly updated target network.

Mnih et al., "Human-level control through deep reinforcement learning" (Nature, 2015), with the parts of Hessel et al.,
"Rainbow" (AAAI 2018), that the configuration switches on. The greedy policy depends on small differences between large
values, so a running average of the weights acts and is evaluated (Polyak and Juditsky, 1992).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from rlstruct import renamed
from rlstruct.algos.agent_outputs import ACTION_VALUES, Alternatives
from rlstruct.algos.algorithm import Algorithm
from rlstruct.algos.bootstrapping import output_of
from rlstruct.algos.learner import CreateAgent, agent_around
from rlstruct.algos.prioritised_replay import PrioritisedReplayBuffer
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.algos.replay_learner import PolyakAverage, ReplayConfig, ReplayLearner, SlowCopy
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.core import DictTensor
from rlstruct.errors import BadKeyError
from rlstruct.functional.q_learning import chosen_value, double_q_value, q_loss, td_target
from rlstruct.functional.schedules import epsilon_ladder, linear_schedule
from rlstruct.options import option
from rlstruct.profiling import operation
from rlstruct.rl_agent import RL_Agent


@dataclass(frozen=True, kw_only=True)
class DQNConfig(ReplayConfig):
    """Settings of DQN, and those of `ReplayConfig` and `TrainingConfig`; the defaults are for tasks without a preset.

    Attributes:
        n_step: number of rewards in the return; the network's value estimates the rest (Sutton and Barto, 2018, 7.1).
        double: let the online network choose the action that the target network evaluates (van Hasselt et al., AAAI
            2016).
        huber_delta: errors above this size count linearly.
        target_update_interval: gradient steps between two updates of the target network.
        target_update_rate: 1 copies the online network (hard, Mnih et al., 2015); a smaller rate moves the target
            network by this fraction towards it, usually with an interval of 1 (soft, Lillicrap et al., ICLR 2016).
        average_rate: at each gradient step, the acting weights move by this fraction towards the learned ones; 1 acts
            with the latest weights.
        replay_device: device of the buffer; None for the learner's device. On another device, prioritised replay makes
            the host wait for the errors at each gradient step.
        n_stack: number of images in a frame, if the agent sees stacks; see ReplayBuffer.
        prioritised: sample steps with large errors more often, see PrioritisedReplayBuffer.
        priority_exponent: 0 samples uniformly, 1 in proportion to the error.
        initial_correction: how much of the bias of this sampling is corrected at the beginning; rises linearly to 1.
        initial_epsilon: share of random actions at the beginning.
        final_epsilon: lowest share of random actions.
        epsilon_fraction: share of the training in which epsilon falls linearly.
        epsilon_exponent: spreads epsilon over the environments, see epsilon_ladder; with 0 all have the same.
    """

    n_env_steps: int = 50_000
    n_timesteps: int = 16
    learning_rate: float = 0.001
    max_gradient_norm: float | None = 10.0
    evaluation_timesteps: int | None = 500
    evaluation_stochastic: bool = False
    log_interval: int = 25
    n_step: int = option(3, at_least=1)
    double: bool = True
    batch_size: int = 128
    huber_delta: float = option(1.0, above=0)
    target_update_interval: int = option(1, at_least=1)
    target_update_rate: float = option(0.005, at_least=0, at_most=1)
    average_rate: float = option(0.01, at_least=0, at_most=1)
    n_stack: int = option(1, at_least=1)
    prioritised: bool = False
    priority_exponent: float = option(0.6, at_least=0)
    initial_correction: float = option(0.4, at_least=0, at_most=1)
    initial_epsilon: float = option(1.0, at_least=0, at_most=1)
    final_epsilon: float = option(0.05, at_least=0, at_most=1)
    epsilon_fraction: float = option(0.2, above=0)
    epsilon_exponent: float = option(0.0, at_least=0)


@operation("loss")
def losses(agent: RL_Agent, target_agent: RL_Agent, batch: DictTensor, config: DQNConfig) -> dict[str, Tensor]:
    """Compute the loss of a batch.

    Args:
        agent: acts with the online network.
        target_agent: acts with the target network.
        batch: a sample of `ReplayBuffer.sample`, on the learner's device.  [K]
        config: ``reward_scale``, ``double`` and ``huber_delta``.

    Returns:
        ``loss`` [], carries the gradient; ``value`` of the actions taken, and ``error`` = value - target.  [K] each
    """
    values = action_values(agent, batch.truncate_key("observation/"))  # [K, A]
    value = chosen_value(values, batch["action/action"])
    with torch.no_grad():
        reached = batch.truncate_key("_observation/")
        target_values = action_values(target_agent, reached)  # [K, A]
        next_value = (
            double_q_value(action_values(agent, reached), target_values)
            if config.double
            else target_values.amax(dim=-1)
        )
        target = td_target(batch["reward"] * config.reward_scale, batch["discount"], batch["terminated"], next_value)
    return {
        "loss": q_loss(value, target, batch["weight"], config.huber_delta),
        "value": value.detach(),
        "error": value.detach() - target,
    }


def action_values(agent: RL_Agent, observation: DictTensor) -> Tensor:
    """Return the values of all actions from a greedy agent without state.  [K, A]."""
    try:
        output, _ = agent(DictTensor(), observation, DictTensor())
    except BadKeyError as error:
        raise BadKeyError(
            f"DQN: {type(agent).__name__}: {error} The loss calls a greedy agent, stochastic=False, on single steps of "
            "the replay buffer, without random keys, agent_info and state. Draw numbers only if self.stochastic, "
            "and train an agent with a memory by PQN, PPO or A2C, or take rlstruct.agents.StackingAgent."
        ) from error
    return output_of(agent, output, "action_values")


class DQNLearner(ReplayLearner):
    """Learner of DQN: the online network, its two slow copies and the replay buffer.

    Attributes:
        model: running average of the online network; it acts and is evaluated.
        online_model: the model that was passed; it learns.
        target_model: evaluates the next observations.
        target_agent: acts with the target model.
        buffer: the collected steps, on any device.
    """

    settings: ClassVar[type[TrainingConfig]] = DQNConfig
    outputs: Alternatives = ACTION_VALUES
    config: DQNConfig

    def __init__(self, model: nn.Module, create_agent: CreateAgent, config: DQNConfig) -> None:
        self.online_model = model
        self.target_model = copy.deepcopy(model).requires_grad_(False)
        agent, self.target_agent = (
            agent_around(network, create_agent, config.learner_device, stochastic=False)
            for network in (model, self.target_model)
        )
        create_buffer: Callable[..., ReplayBuffer] = ReplayBuffer
        if config.prioritised:
            create_buffer = partial(PrioritisedReplayBuffer, exponent=config.priority_exponent)
        networks = {"online_model": model, "target_model": self.target_model}
        stored = {"n_step": config.n_step, "n_stack": config.n_stack}
        super().__init__(model, agent, config, create_buffer=create_buffer, networks=networks, **stored)
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._average, self._target = PolyakAverage(self.model, model), PolyakAverage(self.target_model, model)

    @classmethod
    def create(cls, model: nn.Module, create_agent: CreateAgent, config: DQNConfig) -> DQNLearner:
        """Create a learner, which creates its two agents itself."""
        return cls(model, create_agent, config)

    def anneal(self, fraction_done: float) -> None:
        """Set the learning rate, and how much of the bias of prioritised sampling is corrected."""
        super().anneal(fraction_done)
        if isinstance(self.buffer, PrioritisedReplayBuffer):
            self.buffer.correction = linear_schedule(fraction_done, self.config.initial_correction, 1.0)

    def slow_copies(self) -> Sequence[SlowCopy]:
        """Return the average, which acts, and the target network."""
        config = self.config
        return (
            SlowCopy(self._average, config.average_rate),
            SlowCopy(self._target, config.target_update_rate, config.target_update_interval),
        )

    def terms(self, minibatch: DictTensor) -> dict[str, Tensor]:
        """Compute `losses` of a sampled batch, with absolute errors."""
        terms = losses(self.agent, self.target_agent, minibatch, self.config)
        return {**terms, "error": terms["error"].abs()}

    def agent_info(self, fraction_done: float, n_envs: int) -> DictTensor:
        """Return the ``epsilon`` of each environment.  [B] float32 on the CPU."""
        config = self.config
        epsilon = linear_schedule(fraction_done, config.initial_epsilon, config.final_epsilon, config.epsilon_fraction)
        ladder = epsilon_ladder(epsilon, n_envs * self.group.size, config.epsilon_exponent)
        epsilons = torch.tensor(ladder, dtype=torch.float32, device="cpu")
        return DictTensor({"epsilon": epsilons[n_envs * self.group.rank :][:n_envs]})


train: Algorithm[DQNConfig] = Algorithm(
    DQNLearner, "replay buffer, action values; discrete actions, no memory", agents="values"
)
"""Train a network of action values; arguments are those of `Algorithm.__call__`.

The agent keeps no state, or is a `rlstruct.agents.StackingAgent` around one that keeps none, with ``n_stack``. It reads
``agent_info["epsilon"]`` and returns ``action`` and ``action_values``, as `rlstruct.agents.QAgent` does.
"""

__getattr__ = renamed.attributes(__name__)
