"""Batchers: run an agent in many environments, in this process or in many."""

from typing import TYPE_CHECKING

from rlstruct.addons import attributes
from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.batchers.episodes import EpisodeStatistics, collect_episodes
from rlstruct.batchers.reports import BatcherStats, LostEpisodes, MemoryReport
from rlstruct.batchers.saved_state import BatcherState

if TYPE_CHECKING:
    from rlstruct_sharing import Tuning as Tuning
    from rlstruct_sharing import tune as tune
else:
    __getattr__ = attributes(__name__, dict.fromkeys(("Tuning", "tune"), "rlstruct_sharing"))

__all__ = [
    "BatcherState",
    "BatcherStats",
    "EpisodeStatistics",
    "LostEpisodes",
    "MemoryReport",
    "RL_Batcher",
    "collect_episodes",
]
