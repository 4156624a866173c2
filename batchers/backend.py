"""Who collects: this process, or k workers. Part of rlstruct.batchers.

Both backends answer the same calls in the same order, so RL_Batcher does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlstruct.batchers.hand_over import Part
from rlstruct.batchers.reports import LostEpisodes
from rlstruct.batchers.saved_state import CollectorState
from rlstruct.batchers.shared_memory import Layout
from rlstruct.core import DictTensor


class Backend(Protocol):
    """What RL_Batcher asks of a backend. Lists have one entry per collector."""

    auto_reset: bool
    queues: bool  # whether a second batch may be ordered before the first is handed over
    gaps: bool  # see VecEnv.restarts_take_steps
    lost: list[LostEpisodes]
    waiting: bool  # whether `collect` does nothing but wait at this moment: to be interrupted then loses nothing

    def n_envs(self) -> list[int]:
        """Return how many environments each collector has; waits for their creation."""

    def reset(self, agent_infos: list[DictTensor], env_infos: list[DictTensor]) -> None:
        """Start new episodes."""

    def execute(self, agent_infos: Sequence[DictTensor | None], depth: int) -> None:
        """Order a batch from each collector that owes fewer than ``depth``: 1, or 2 if this `queues`."""

    def collect(self, blocking: bool, timeout: float, n_workers: int | None) -> list[Part] | None:
        """Return the oldest batch; if it is not ready, None when not blocking, else WorkerTimeout after ``timeout`` s.

        ``n_workers`` is how many must be ready, None for all that collect; the parts of those that are come back.
        """

    def n_running(self) -> int:
        """Return how many environments go on, as far as is known; for batches of some of the workers only."""

    def collecting(self) -> bool:
        """Return whether anything that was ordered has not been handed over."""

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give weights to the agents; batches that have been ordered keep the old ones."""

    def state_dicts(self) -> list[CollectorState]:
        """Return what decides the next batch, between two batches."""

    def load_state_dicts(
        self, states: Sequence[CollectorState], agent_infos: list[DictTensor], env_infos: list[DictTensor]
    ) -> bool:
        """Go on from there, and say whether all environments could; the others have begun new episodes."""

    def seconds(self) -> list[dict[str, float]]:
        """Return the seconds of each phase."""

    def layouts(self, agent_info: DictTensor, env_info: DictTensor) -> list[Layout]:
        """Return the layout of each slab.

        Before the first batch a second agent and environment, made for that, tell: they get these infos, [B of one].
        """

    def weight_bytes(self) -> int:
        """Return the bytes of the weights' buffer."""

    def close(self) -> None:
        """Release everything."""
