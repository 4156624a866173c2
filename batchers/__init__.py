"""Batchers: run an agent in many environments, in this process or in many."""

from rlstruct.batchers.batcher import RL_Batcher
from rlstruct.batchers.episodes import EpisodeStatistics, collect_episodes
from rlstruct.batchers.reports import BatcherStats, LostEpisodes, MemoryReport
from rlstruct.batchers.saved_state import BatcherState
from rlstruct.batchers.tuning.tune import Tuning, tune

__all__ = [
    "BatcherState",
    "BatcherStats",
    "EpisodeStatistics",
    "LostEpisodes",
    "MemoryReport",
    "RL_Batcher",
    "Tuning",
    "collect_episodes",
    "tune",
]
