"""Batchers: run an agent in many environments, in this process or in many."""

from typing import TYPE_CHECKING

from rlstruct import renamed
from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.batchers.episodes import EpisodeStatistics, collect_episodes
from rlstruct.batchers.reports import BatcherStats, LostEpisodes, MemoryReport
from rlstruct.batchers.saved_state import BatcherState

if not TYPE_CHECKING:
    __getattr__ = renamed.attributes(__name__)

__all__ = [
    "BatcherState",
    "BatcherStats",
    "EpisodeStatistics",
    "LostEpisodes",
    "MemoryReport",
    "RL_Batcher",
    "collect_episodes",
]
