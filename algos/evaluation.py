"""Evaluation during learning, in which a separate batcher plays whole episodes; and the result of a training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlstruct.batchers import EpisodeStatistics, RL_Batcher
from rlstruct.core import Trajectories
from rlstruct.errors import BatcherStateError, warn_user
from rlstruct.profiling import operation, phase


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one evaluation.

    Attributes:
        env_steps: environment steps collected when the learner published these weights.
        policy_version: updates of the weights until then.
        returns: undiscounted sum of the rewards of each episode.
        lengths: steps of each episode.
        seconds: from start to result, while learning went on.
        n_cut: episodes that had not ended at the step limit; they count with what they had until then.
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
        """Mean steps of an episode."""
        return statistics.fmean(self.lengths)

    def __str__(self) -> str:
        """Write the mean and the standard deviation of the returns.

        >>> print(Evaluation(env_steps=0, policy_version=0, returns=(1.0, 3.0), lengths=(1, 3), seconds=0.1))
        return 2.0 ± 1.0 over 2 episodes
        """
        spread = format_return(self.mean_return), format_return(self.std_return)
        return f"return {' ± '.join(spread)} over {len(self.returns)} episodes"


def format_return(value: float) -> str:
    """Write a return: one digit behind the point, three if nothing stands before it.

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
        after: evaluation of the trained one, on episodes that nothing was selected by.
        evaluations: all of them, in the order of their weights; the first is ``before``, the last ``after``. One that
            reached the target stands before ``after``, which judges the same weights if learning waited for it.
        losses: name to one number for each update: the learner's terms, and ``policy_lag``, the changes of the weights
            between those that collected the batch and those that learned from it.
        env_steps: environment steps collected.
        seconds: wall-clock time of the learning, without start-up and the first and last evaluation.
        threads: of PyTorch in the process that learned.
        stopped: why a callback ended the training; None if none did.
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
        """Summarise the training in five lines."""
        n_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        device = next((parameter.device for parameter in self.model.parameters()), "cpu")
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        rate = self.env_steps / max(self.seconds, 1e-9)
        ends = {name: values[-1] for name, values in self.losses.items() if values and "loss" in name}
        lines = [
            f"TrainingResult: {type(self.model).__name__} with {n_parameters:,} parameters on {device}, {threads}",
            f"before: {self.before}",
            f"after: {self.after}",
            f"learning: {self.env_steps:,} environment steps in {self.seconds:.1f} s ({rate:,.0f} per second), "
            f"{len(self.evaluations)} evaluations" + ("" if self.stopped is None else f"; stopped: {self.stopped}"),
            "ends with " + (", ".join(f"{name} {value:.3g}" for name, value in ends.items()) or "no loss"),
        ]
        return "\n  ".join(lines)


class Evaluates(Protocol):
    """Protocol of an evaluator, as the training loop uses it; see `Evaluator`."""

    def start(self, weights: Mapping[str, Tensor], *, env_steps: int, policy_version: int) -> None:
        """Begin an evaluation."""

    def poll(self) -> Evaluation | None:
        """Return the result if there is one."""

    def wait(self) -> Evaluation:
        """Wait for the result."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called."""


class Evaluator:
    """Plays one whole episode in each environment of a batcher, without making the caller wait.

    Every evaluation plays new episodes, as the environments keep their random streams. Of environments that restart by
    themselves the first episode counts.

    Args:
        batcher: for this evaluator alone; the caller closes it.
        step_limit: longer episodes are cut after this many steps, with a warning; None waits for their end.
        show: called with the number of episodes, of those that have ended, and of steps, at the start of an evaluation
            and after each of its batches.
    """

    def __init__(
        self,
        batcher: RL_Batcher,
        *,
        step_limit: int | None = None,
        show: Callable[[int, int, int], object] | None = None,
    ) -> None:
        self._show = show
        self.batcher = batcher
        self.step_limit = step_limit
        self._started: tuple[int, int, float] | None = None

    @property
    def busy(self) -> bool:
        """Return True if an evaluation has begun and its result has not been fetched."""
        return self._started is not None

    @phase("evaluation")
    @operation("evaluation")
    def start(self, weights: Mapping[str, Tensor], *, env_steps: int, policy_version: int) -> None:
        """Begin an evaluation. With worker processes this returns at once.

        Args:
            weights: the model's state_dict, on any device; read before this returns.
            env_steps: environment steps collected until now.
            policy_version: updates of the weights until now.

        Raises:
            BatcherStateError: another evaluation is under way.
        """
        if self._started is not None:
            raise BatcherStateError("Evaluator.start: an evaluation is under way. Call wait() first.")
        self._n_steps = 0  # from here on the first episode of each environment counts
        self._statistics = EpisodeStatistics(self.batcher.n_envs(), self.batcher.device)
        self._returns = torch.zeros_like(self._statistics.open_return)
        self._lengths = torch.zeros_like(self._statistics.open_length)
        self._unfinished = torch.ones_like(self._lengths, dtype=torch.bool)
        self._started = (env_steps, policy_version, time.perf_counter())
        self.batcher.update(weights)
        self.batcher.reset()
        self.batcher.execute()
        if self._show is not None:
            self._show(len(self._unfinished), 0, 0)

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
            BatcherStateError: no evaluation is under way.
            WorkerError: a worker raised or died.
        """
        if not self.busy:
            raise BatcherStateError("Evaluator.wait: no evaluation is under way. Call start() first.")
        while (result := self._advance(blocking=True)) is None:
            pass
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, between two evaluations.

        Raises:
            BatcherStateError: an evaluation is under way.
        """
        if self.busy:
            raise BatcherStateError("Evaluator.state_dict: an evaluation is under way. Call wait() first.")
        return {"batcher": self.batcher.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, in a batcher made alike: evaluations to come are equal.

        Environments that cannot be saved play other episodes.
        """
        self.batcher.load_state_dict(state["batcher"])

    def _advance(self, blocking: bool) -> Evaluation | None:
        trajectories, _ = self.batcher.get(blocking=blocking)
        if trajectories is None or self._started is None:
            return None
        self._count(trajectories)
        self._n_steps += trajectories.trajectories.n_steps()
        n_cut = int(self._unfinished.sum())  # sync: once per batch of the evaluation
        if self._show is not None:
            self._show(len(self._unfinished), len(self._unfinished) - n_cut, self._n_steps)
        if n_cut and (self.step_limit is None or self._n_steps < self.step_limit):
            self.batcher.execute()
            return None
        if n_cut:
            warn_user(
                f"Evaluator: {n_cut} of {len(self._unfinished)} episodes had not ended after {self._n_steps} steps, "
                f"the step limit is {self.step_limit}: they are cut there and count with what they had. Give the "
                "environment a time limit, such as gymnasium.make(..., max_episode_steps=...), or raise "
                "evaluation_step_limit."
            )
        env_steps, policy_version, start = self._started
        self._started = None
        returns = torch.where(self._unfinished, self._statistics.open_return, self._returns)
        lengths = torch.where(self._unfinished, self._statistics.open_length, self._lengths)
        return Evaluation(
            env_steps,
            policy_version,
            tuple(returns.tolist()),  # sync: once per evaluation
            tuple(lengths.tolist()),  # sync: once per evaluation
            time.perf_counter() - start,
            n_cut,
        )

    def _count(self, trajectories: Trajectories) -> None:
        """Note the first episodes that end in a batch."""
        counted, environment = self._statistics.track(trajectories), trajectories.info["environment"]
        ended = counted["ended"]
        first = ended & (ended.cumsum(1) == 1) & self._unfinished[environment].unsqueeze(1)  # [B, T], once in a row
        self._returns[environment] += torch.where(first, counted["return"], 0.0).sum(1)
        self._lengths[environment] += torch.where(first, counted["length"], 0).sum(1)
        self._unfinished[environment] &= ~first.any(1)
