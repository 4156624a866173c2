"""Evaluation of whole episodes in a separate batcher during training; and the result of a training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlstruct.batchers import EpisodeStatistics, RL_Batcher
from rlstruct.core import DictTensor, Trajectories
from rlstruct.errors import BatcherStateError, warn_user
from rlstruct.profiling import operation, phase
from rlstruct.vec_env import TIME_LIMITS


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one evaluation.

    Attributes:
        env_steps: environment steps collected when the learner published these weights.
        policy_version: number of gradient steps behind these weights.
        returns: undiscounted sum of rewards of each episode.
        lengths: number of steps of each episode.
        seconds: wall-clock time from start to result, during which learning may continue.
        n_cut: number of episodes cut at the step limit, which count with their rewards so far.
    """

    env_steps: int
    policy_version: int
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    seconds: float
    n_cut: int = 0

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return statistics.fmean(self.returns)

    @property
    def std_return(self) -> float:
        """Standard deviation over the episodes."""
        return statistics.pstdev(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean number of steps per episode."""
        return statistics.fmean(self.lengths)

    def __str__(self) -> str:
        """Show mean and standard deviation of the returns.

        >>> print(Evaluation(env_steps=0, policy_version=0, returns=(1.0, 3.0), lengths=(1, 3), seconds=0.1))
        return 2.0 ± 1.0 over 2 episodes
        """
        spread = format_return(self.mean_return), format_return(self.std_return)
        return f"return {' ± '.join(spread)} over {len(self.returns)} episodes"


def format_return(value: float) -> str:
    """Format a return with one decimal, or with three if it is smaller than 1.

    >>> format_return(475.31), format_return(-0.0527), format_return(0.0)
    ('475.3', '-0.053', '0.0')
    """
    return f"{value:.1f}" if abs(value) >= 1 or value == 0 else f"{value:.3f}"


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training.

    Attributes:
        model: the trained network, on the learner's device.
        before: evaluation of the untrained network.
        after: evaluation of the trained network, on episodes that were not used for any selection.
        evaluations: all evaluations, ordered by their weights, from ``before`` to ``after``. If one reached the target,
            it is the last one before ``after``, which evaluates the same weights if learning waited for it.
        losses: by name, one number per update that returned it: the learner's terms, and ``policy_lag``, the number of
            gradient steps between the weights that collected a batch and those that learned from it.
        env_steps: number of environment steps collected.
        seconds: wall-clock time of learning, without start-up and the first and last evaluation.
        threads: number of PyTorch threads in the learning process.
        stopped: why a callback stopped the training; None if none did.
    """

    model: nn.Module
    before: Evaluation
    after: Evaluation
    evaluations: tuple[Evaluation, ...]
    losses: dict[str, list[float]]
    env_steps: int
    seconds: float
    threads: int
    stopped: str | None = None

    def __repr__(self) -> str:
        """Summarise the training in five lines of at most 80 columns."""
        n_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        device = next((parameter.device for parameter in self.model.parameters()), "cpu")
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        rate = self.env_steps / max(self.seconds, 1e-9)
        losses = {
            name.removesuffix("_loss"): values[-1] for name, values in self.losses.items() if values and "loss" in name
        }
        total, *terms = [f"{name} {value:.3g}" for name, value in losses.items()] or ["loss: none"]
        lines = [
            f"TrainingResult: {type(self.model).__name__} with {n_parameters:,} parameters on {device}, {threads}",
            f"before: {self.before}",
            f"after: {self.after}",
            f"learning: {self.env_steps:,} steps in {self.seconds:.1f} s ({rate:,.0f} per second), "
            f"{len(self.evaluations)} evaluations" + ("" if self.stopped is None else f"; stopped: {self.stopped}"),
            f"final {total}" + (f" ({', '.join(terms)})" if terms else ""),
        ]
        return "\n  ".join(lines)


class Evaluates(Protocol):
    """Protocol of an evaluator, as the training loop uses it; see `Evaluator`."""

    def start(self, weights: Mapping[str, Tensor], *, env_steps: int, policy_version: int) -> None:
        """Start an evaluation."""

    def poll(self) -> Evaluation | None:
        """Return the result if there is one."""

    def wait(self) -> Evaluation:
        """Wait for the result."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


class Evaluator:
    """Plays one whole episode in each environment of a batcher, without blocking the caller.

    Every evaluation plays new episodes, because the environments continue their random streams. In environments that
    reset themselves only the first episode counts.

    Args:
        batcher: a batcher that only this evaluator uses; the caller closes it.
        step_limit: number of steps after which episodes are cut, with a warning; None waits for their end.
        show: called at the start of an evaluation and after each of its batches, with the numbers of episodes, of ended
            episodes, and of steps.
        agent_info: settings with which the agent acts, such as an epsilon; None for none.  [B]
        check: called once, with the first batch; it raises if the agent does not suit the training.
    """

    def __init__(
        self,
        batcher: RL_Batcher,
        *,
        step_limit: int | None = None,
        show: Callable[[int, int, int], object] | None = None,
        agent_info: DictTensor | None = None,
        check: Callable[[Trajectories], object] | None = None,
    ) -> None:
        self._show, self._check = show, check
        self._agent_info = None if agent_info is None or agent_info.empty() else agent_info
        self.batcher = batcher
        self.step_limit = step_limit
        self._started: tuple[int, int, float] | None = None

    @property
    def busy(self) -> bool:
        """Return True if an evaluation has started and its result has not been fetched."""
        return self._started is not None

    @phase("evaluation")
    @operation("evaluation")
    def start(self, weights: Mapping[str, Tensor], *, env_steps: int, policy_version: int) -> None:
        """Start an evaluation. With worker processes this returns at once.

        Args:
            weights: the model's state_dict, on any device. It is copied before this returns.
            env_steps: number of environment steps collected so far.
            policy_version: number of gradient steps so far.

        Raises:
            BatcherStateError: another evaluation is running.
        """
        if self._started is not None:
            raise BatcherStateError("Evaluator.start: an evaluation is running. Call wait() first.")
        self._n_steps = 0
        self._statistics = EpisodeStatistics(self.batcher.n_envs(), self.batcher.device)
        self._returns = torch.zeros_like(self._statistics.open_return)
        self._lengths = torch.zeros_like(self._statistics.open_length)  # 0 until the episode has ended
        self._started = (env_steps, policy_version, time.perf_counter())
        self.batcher.update(weights)
        self.batcher.reset(self._agent_info)
        self.batcher.execute(self._agent_info)
        if self._show is not None:
            self._show(len(self._lengths), 0, 0)

    @phase("evaluation")
    @operation("evaluation")
    def poll(self) -> Evaluation | None:
        """Return the result if there is one; never waits for worker processes.

        Raises:
            WorkerError: a worker raised or died.
        """
        return self._advance(blocking=False) if self.busy else None

    @phase("evaluation")
    @operation("evaluation")
    def wait(self) -> Evaluation:
        """Wait for the result.

        Raises:
            BatcherStateError: no evaluation is running.
            WorkerError: a worker raised or died.
        """
        if not self.busy:
            raise BatcherStateError("Evaluator.wait: no evaluation is running. Call start() first.")
        while (result := self._advance(blocking=True)) is None:
            pass
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, between two evaluations.

        Raises:
            BatcherStateError: an evaluation is running.
        """
        if self.busy:
            raise BatcherStateError("Evaluator.state_dict: an evaluation is running. Call wait() first.")
        return {"batcher": self.batcher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, in a batcher created with the same arguments; later evaluations are equal.

        Environments that cannot be saved play different episodes.
        """
        self.batcher.load_state_dict(state["batcher"])

    def _advance(self, blocking: bool) -> Evaluation | None:
        trajectories, _ = self.batcher.get(blocking=blocking)
        if trajectories is None or self._started is None:
            return None
        if self._check is not None:
            self._check(trajectories)
            self._check = None
        self._count(trajectories)
        self._n_steps += trajectories.steps.n_steps()
        cut, n_episodes = self._lengths == 0, len(self._lengths)
        n_cut = int(cut.sum())  # sync: once per batch of the evaluation
        if self._show is not None:
            self._show(n_episodes, n_episodes - n_cut, self._n_steps)
        if n_cut and (self.step_limit is None or self._n_steps < self.step_limit):
            self.batcher.execute(self._agent_info)
            return None
        if n_cut:
            warn_user(
                f"Evaluator: {n_cut} of {n_episodes} episodes had not ended after {self._n_steps} steps "
                f"(step limit {self.step_limit}). They are cut there and count with their rewards so far. Set a time "
                f"limit ({TIME_LIMITS}), or raise evaluation_step_limit."
            )
        env_steps, policy_version, start = self._started
        self._started = None
        returns = torch.where(cut, self._statistics.open_return, self._returns)
        lengths = torch.where(cut, self._statistics.open_length, self._lengths)
        return Evaluation(
            env_steps,
            policy_version,
            tuple(returns.tolist()),  # sync: once per evaluation
            tuple(lengths.tolist()),  # sync: once per evaluation
            time.perf_counter() - start,
            n_cut,
        )

    def _count(self, trajectories: Trajectories) -> None:
        """Record the first episode of each environment that ends in a batch."""
        counted, environment = self._statistics.track(trajectories), trajectories.info["environment"]
        ended = counted["ended"]
        first = ended & (ended.cumsum(1) == 1) & (self._lengths[environment] == 0).unsqueeze(1)  # [B, T], once in a row
        self._returns[environment] += torch.where(first, counted["return"], 0.0).sum(1)
        self._lengths[environment] += torch.where(first, counted["length"], 0).sum(1)
