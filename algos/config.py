"""The settings that every algorithm has. Layer 4."""

from __future__ import annotations

from dataclasses import dataclass

_COUNTS = ("n_env_steps", "n_timesteps", "n_envs", "evaluation_episodes", "evaluation_interval", "log_interval")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Settings of a training; nothing here knows the environment or the network.

    Attributes:
        n_env_steps: training ends once so many environment steps were collected.
        n_timesteps: longest piece of an episode that one update sees.
        n_envs: environments in each process.
        n_processes: worker processes that collect; 0 collects in this one.
        discount: per-step factor of the return, in [0, 1].
        learning_rate: of the optimiser at the beginning; falls linearly with the collected steps.
        final_learning_rate_fraction: what is left of ``learning_rate`` at the end.
        max_gradient_norm: gradients of all weights together are scaled down to this norm; None leaves them.
        evaluation_episodes: episodes of one evaluation; a multiple of ``max(1, evaluation_processes)``.
        evaluation_processes: worker processes that evaluate; 0 evaluates in this one, and learning waits.
        evaluation_interval: environment steps between the beginnings of two evaluations, at least.
        evaluation_timesteps: steps that the evaluation takes before it looks whether all episodes have ended; None
            for ``n_timesteps``.
        evaluation_stochastic: evaluate the policy that is trained, which draws its actions; False takes the most
            probable one, which may be good or bad by chance long before the policy is.
        target_return: training ends early when an evaluation reaches this mean return; None never does.
        log_interval: updates between two looks of the host at the losses; the log gets their lines then.
        learner_device: where losses and gradients are computed.
        batcher_device: where the agent acts during collection.
        evaluation_device: where the agent acts during evaluation.
        seed: of the weights and of the environments; the evaluation's follow from it.
    """

    n_env_steps: int = 200_000
    n_timesteps: int = 500
    n_envs: int = 8
    n_processes: int = 2
    discount: float = 0.99
    learning_rate: float = 0.01
    final_learning_rate_fraction: float = 0.05
    max_gradient_norm: float | None = None
    evaluation_episodes: int = 32
    evaluation_processes: int = 1
    evaluation_interval: int = 10_000
    evaluation_timesteps: int | None = None
    evaluation_stochastic: bool = True
    target_return: float | None = None
    log_interval: int = 5
    learner_device: str = "cpu"
    batcher_device: str = "cpu"
    evaluation_device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what would fail late or in silence.

        Raises:
            ValueError: a setting is out of range.
        """
        for name in _COUNTS:
            self._refuse(name, getattr(self, name) >= 1, "at least 1")
        self._refuse("discount", 0.0 <= self.discount <= 1.0, "0 to 1")
        if self.evaluation_episodes % max(1, self.evaluation_processes):
            raise ValueError(
                f"{type(self).__name__}: evaluation_episodes is {self.evaluation_episodes}, expected a multiple of "
                f"evaluation_processes, {self.evaluation_processes}: every process plays as many."
            )

    def _refuse(self, name: str, good: bool, expected: str) -> None:
        """Raise unless a setting is good.

        Raises:
            ValueError: it is not.
        """
        if not good:
            raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)}, expected {expected}.")
