"""What happens when a loss is not a number: the training stops, and what led there is kept. Layer 4."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from rlstruct.algos.learner import Learner
from rlstruct.algos.run_folder import RunFolder
from rlstruct.core import DictTensor, Trajectories
from rlstruct.errors import TrainingDiverged

_MOST_BYTES = 256 * 2**20
EVIDENCE = "diverged.pt"
"""Name of the file in the run folder."""

Batch = Trajectories | DictTensor


class RecentBatches:
    """What the updates since the last look at the losses have learnt from, as far as it fits into memory.

    Losses are looked at once in many updates, so that nothing waits for the device; by then the batch that did the harm
    would be gone. Nothing is copied here.

    Args:
        most_bytes: older batches are let go beyond this.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """Keep nothing yet."""
        self.most_bytes = most_bytes
        self._kept: deque[tuple[int, Sequence[Batch]]] = deque()
        self._most = 0

    def add(self, policy_version: int, batches: Sequence[Batch]) -> None:
        """Keep the batches of an update, one for each gradient step."""
        if self._most == 0:  # batches of one training are of one size, or nearly
            size = sum(_n_bytes(batch) for batch in batches)
            self._most = max(1, self.most_bytes // max(1, size))
        if len(self._kept) >= self._most:
            self._kept.popleft()
        self._kept.append((policy_version, batches))

    def of(self, policy_version: int) -> Sequence[Batch]:
        """Return the batches of an update; empty if they have been let go."""
        return next((batches for version, batches in self._kept if version == policy_version), ())

    def clear(self) -> None:
        """Let all go."""
        self._kept.clear()


def refuse_non_finite(
    numbers: Mapping[str, float],
    *,
    env_steps: int,
    policy_version: int,
    recent: RecentBatches,
    learner: Learner,
    run: RunFolder | None,
) -> None:
    """Stop a training whose numbers are no numbers any more, and write down what it learnt from.

    Args:
        numbers: terms of one update.
        env_steps: collected until then.
        policy_version: which update.
        recent: what the latest updates have learnt from.
        learner: its weights are those that led there, if it is a `GradientLearner`; else those of now.
        run: where to write; None writes nothing.

    Raises:
        TrainingDiverged: a number is NaN or infinite.
    """
    wrong = {name: number for name, number in numbers.items() if not math.isfinite(number)}
    if not wrong:
        return
    terms = ", ".join(f"{name} is {number}" for name, number in wrong.items())
    batches = recent.of(policy_version)
    if run is None:
        kept = "Train with a run folder, run=RunFolder(…), to have its batch and the weights saved."
    else:
        state = {
            "learner": learner.state_dict(),
            "terms": dict(numbers),
            "batches": [_plain(batch) for batch in batches],
        }
        state |= {"env_steps": env_steps, "policy_version": policy_version}
        path = run.save_evidence(EVIDENCE, state)
        of_it = "its batch" if len(batches) == 1 else f"its {len(batches)} batches, one for each gradient step,"
        what = f"the weights and {of_it}" if batches else "the weights"
        kept = f"{path} has {what} to look at."
        if not batches:
            kept += " Its batch had to make room before the look at the losses: resume with log_interval=1 to keep it."
    raise TrainingDiverged(
        f"run_training: {terms}, in update {policy_version} at environment step {env_steps}, expected finite numbers. "
        f"{kept} Usual mends: a smaller learning_rate, max_gradient_norm, finite rewards and frames.",
        terms=wrong,
        policy_version=policy_version,
        env_steps=env_steps,
    )


def _n_bytes(batch: Batch) -> int:
    tensors = batch.trajectories if isinstance(batch, Trajectories) else batch
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors.items())


def _plain(batch: Batch) -> dict[str, Any]:
    if isinstance(batch, DictTensor):
        return dict(batch.items())
    return plain_trajectories(batch)


def plain_trajectories(batch: Trajectories) -> dict[str, Any]:
    """Trajectories as plain dicts of tensors, for a file."""
    return {
        "info": dict(batch.info.items()),
        "trajectories": dict(batch.trajectories.items()),
        "lengths": batch.lengths,
    }
