"""What RL_Batcher asks of whoever collects: `InProcess` or `WorkerPool`; it does not know which one it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlstruct.batchers.hand_over import Share
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
    waiting: bool  # whether it only waits for answers at this moment, so that Ctrl-C loses nothing

    def n_envs(self) -> list[int]:
        """Return how many environments each collector has; waits for their creation."""

    def reset(self, agent_infos: list[DictTensor], env_infos: list[DictTensor]) -> None:
        """Start new episodes."""

    def execute(self, agent_infos: Sequence[DictTensor | None]) -> None:
        """Order a batch; a second one before the first is handed over only if this `queues`."""

    def collect(self, blocking: bool, timeout: float) -> list[Share] | None:
        """Return the oldest batch.

        If it is not ready: None unless blocking, else WorkerTimeout after ``timeout`` seconds.
        """

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

        Before the first batch, a second agent and environment are made to find it out; they get these infos,
        [B of one collector].
        """

    def weight_bytes(self) -> int:
        """Return the bytes of the weights' buffer."""

    def close(self) -> None:
        """Release everything."""
