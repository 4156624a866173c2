"""Settings of DQN. Layer 4."""

from __future__ import annotations

from dataclasses import dataclass

_AT_LEAST_ONE = (
    *("n_env_steps", "n_timesteps", "n_envs", "n_step", "batch_size", "n_updates", "target_update_interval"),
    *("replay_capacity", "evaluation_episodes", "evaluation_interval", "evaluation_timesteps", "log_interval"),
)
_SHARES = ("discount", "target_update_rate", "initial_epsilon", "final_epsilon", "epsilon_fraction")


@dataclass(frozen=True)
class DQNConfig:
    """Settings of a training; nothing here knows the environment or the network.

    Attributes:
        n_env_steps: training ends once so many environment steps were collected.
        n_timesteps: steps of each environment between two rounds of gradient steps.
        n_envs: environments in each process.
        n_processes: worker processes that collect, while this one learns; 0 collects in this one.
        discount: per-step factor of the return, in [0, 1].
        n_step: steps of the return before the network's value stands for the rest (Sutton and Barto, 2018, 7.1).
        double: let the network that learns choose the action that the target network judges (van Hasselt, 2016).
        learning_rate: of Adam at the beginning; falls linearly with the collected steps.
        final_learning_rate: at the end, as a part of ``learning_rate``.
        batch_size: steps of one gradient step.
        n_updates: gradient steps of one round.
        max_gradient_norm: gradients are scaled down to this norm; None leaves them.
        huber_delta: errors above this size count linearly.
        target_update_interval: gradient steps between two updates of the target network.
        target_update_rate: 1 copies the network that learns (hard, Mnih et al., 2015); less moves the target network
            by this part towards it, usually with an interval of 1 (soft, Lillicrap et al., 2016).
        replay_capacity: observations that the buffer keeps, see `ReplayBuffer`.
        learning_starts: environment steps before the first gradient step.
        prioritised: draw steps with large errors more often (Schaul et al., 2016).
        priority_exponent: 0 draws uniformly, 1 in proportion to the error.
        initial_correction: how much of the bias of these draws is undone at the beginning; rises linearly to 1.
        n_stack: the frames are stacks of so many, see `ReplayBuffer`.
        initial_epsilon: share of random actions at the beginning.
        final_epsilon: share of random actions after the fraction.
        epsilon_fraction: part of the training in which epsilon falls linearly.
        epsilon_exponent: spreads epsilon over the environments, see `epsilon_ladder`; 0 gives all the same.
        evaluation_episodes: episodes of one evaluation; a multiple of ``max(1, evaluation_processes)``.
        evaluation_processes: worker processes that evaluate; 0 evaluates in this one, and learning waits.
        evaluation_interval: environment steps between the beginnings of two evaluations, at least.
        evaluation_timesteps: longest piece of an episode that an evaluation collects at once.
        target_return: training ends early when an evaluation reaches this mean return; None never does.
        log_interval: rounds between two lines of the log, and between two looks of the host at the losses.
        learner_device: where losses and gradients are computed.
        replay_device: where the replay buffer is; None for the learner's.
        batcher_device: where the agent acts during collection.
        evaluation_device: where the agent acts during evaluation.
        seed: of the weights, the environments and the replay; the evaluation's follow from it.
    """

    n_env_steps: int = 100_000
    n_timesteps: int = 8
    n_envs: int = 8
    n_processes: int = 0
    discount: float = 0.99
    n_step: int = 3
    double: bool = True
    learning_rate: float = 1e-3
    final_learning_rate: float = 0.05
    batch_size: int = 128
    n_updates: int = 16
    max_gradient_norm: float | None = 10.0
    huber_delta: float = 1.0
    target_update_interval: int = 1
    target_update_rate: float = 0.01
    replay_capacity: int = 100_000
    learning_starts: int = 1000
    prioritised: bool = False
    priority_exponent: float = 0.6
    initial_correction: float = 0.4
    n_stack: int = 1
    initial_epsilon: float = 1.0
    final_epsilon: float = 0.05
    epsilon_fraction: float = 0.2
    epsilon_exponent: float = 0.0
    evaluation_episodes: int = 32
    evaluation_processes: int = 1
    evaluation_interval: int = 10_000
    evaluation_timesteps: int = 500
    target_return: float | None = None
    log_interval: int = 50
    learner_device: str = "cpu"
    replay_device: str | None = None
    batcher_device: str = "cpu"
    evaluation_device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what would fail late or in silence.

        Raises:
            ValueError: a setting is out of range.
        """
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"DQNConfig: {name} is {getattr(self, name)}, expected at least 1.")
        for name in _SHARES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"DQNConfig: {name} is {getattr(self, name)}, expected 0 to 1.")
        if self.epsilon_fraction == 0.0:
            raise ValueError("DQNConfig: epsilon_fraction is 0, expected more. Set initial_epsilon to final_epsilon.")
        if self.evaluation_episodes % max(1, self.evaluation_processes):
            raise ValueError(
                f"DQNConfig: evaluation_episodes is {self.evaluation_episodes}, expected a multiple of "
                f"evaluation_processes, {self.evaluation_processes}: every process plays as many."
            )
