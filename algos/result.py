"""The result of a training, and its summary in five lines."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rlstruct.algos.evaluation import Evaluation


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
