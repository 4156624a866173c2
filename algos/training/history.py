"""Measurements of a training: losses, returns, evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlstruct.algos.learner import GradientLearner, check_numbers
from rlstruct.algos.training.checkpoint import write_checkpoint
from rlstruct.algos.training.evaluation import Evaluation
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.batchers import EpisodeStatistics
from rlstruct.errors import TrainingDiverged
from rlstruct.functional.all_reduce import sum_over_learners

EVIDENCE = "diverged.pt"
"""File in the run folder with the weights that produced a loss that is not finite."""


class _Update(NamedTuple):
    env_steps: int
    policy_version: int
    policy_lag: int
    at: float
    terms: dict[str, Tensor]  # on the learner's device


class TrainingHistory:
    """Collects the numbers of a training, reads losses from the device once per several updates, and writes the log."""

    def __init__(self, learner: GradientLearner, statistics: EpisodeStatistics, folder: RunFolder | None) -> None:
        self.statistics = statistics
        self.evaluations: list[Evaluation] = []  # in order
        self.losses: dict[str, list[float]] = {}  # by name, one number per update read so far that has it
        self._learner, self._folder = learner, folder
        self._unread: list[_Update] = []

    def add_evaluation(self, result: Evaluation) -> None:
        """Store and log an evaluation."""
        self.evaluations.append(result)
        if self._folder is not None:
            self._folder.log_evaluation(result)

    def add_update(self, env_steps: int, policy_lag: int, terms: dict[str, Tensor]) -> int:
        """Store the terms of an update, which stay on the device until `read`. Return the number of unread updates.

        ``policy_lag`` is the number of gradient steps between collecting weights and current weights.
        """
        check_numbers(f"{type(self._learner).__name__}.update", terms, single=terms)
        if self._folder is not None:
            self._folder.advance(env_steps)
        version = self._learner.policy_version
        self._unread.append(_Update(env_steps, version, policy_lag, time.perf_counter(), terms))
        return len(self._unread)

    def read(self) -> None:
        """Read the terms of all unread updates from the device, averaged over all learners.

        Raises:
            TrainingDiverged: a number is NaN or infinite.
        """
        if not self._unread:
            return
        terms = torch.stack([term for update in self._unread for term in update.terms.values()])
        group = self._learner.group
        read = iter((sum_over_learners(terms) / group.size).tolist())  # sync: once per log_interval updates
        group.raise_if_lost()
        mean_return = self.statistics.mean_return()
        for update in self._unread:
            numbers = {**{name: next(read) for name in update.terms}, "policy_lag": float(update.policy_lag)}
            if not self.losses:
                self._learner.check_first_update(numbers)
            if not all(map(math.isfinite, numbers.values())):
                self._refuse(update, numbers)
            for name, number in numbers.items():
                self.losses.setdefault(name, []).append(number)
            if mean_return is not None and update is self._unread[-1]:
                numbers["return"] = mean_return
            if self._folder is not None:
                self._folder.log(update.env_steps, update.policy_version, numbers, at=update.at)
        self._unread.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, after `read`."""
        return {
            "statistics": self.statistics.state_dict(),
            "losses": {name: torch.tensor(row, dtype=torch.float64, device="cpu") for name, row in self.losses.items()},
            "evaluations": [asdict(evaluation) for evaluation in self.evaluations],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.statistics.load_state_dict(state["statistics"])
        self.losses = {name: column.tolist() for name, column in state["losses"].items()}  # sync: on the CPU, once
        self.evaluations += [Evaluation(**numbers) for numbers in state["evaluations"]]

    def _refuse(self, update: _Update, numbers: Mapping[str, float]) -> None:
        """Stop a diverged training, and save the weights that produced the wrong numbers."""
        wrong = {name: number for name, number in numbers.items() if not math.isfinite(number)}
        terms = ", ".join(f"{name} is {number}" for name, number in wrong.items())
        at = {"policy_version": update.policy_version, "env_steps": update.env_steps}
        kept = "Train with a run folder, run=RunFolder(…), to save the weights that produced them."
        if self._folder is not None:
            file = self._folder.path / EVIDENCE
            write_checkpoint(file, {"learner": self._learner.state_dict(), "terms": dict(numbers), **at})
            kept = f"{file} has the weights that produced them."
        raise TrainingDiverged(
            f"run_training: {terms}, in update {update.policy_version} at environment step {update.env_steps}, "
            f"expected finite numbers. {kept} Usual fixes: a smaller learning_rate, max_gradient_norm, finite rewards "
            "and frames.",
            terms=wrong,
            **at,
        )
