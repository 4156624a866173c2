"""Batched tree search on any device: PUCT, Gumbel with sequential halving, UCT."""

from rlstruct.search.agent import SearchAgent
from rlstruct.search.game import GameModel, RolloutModel, Simulator, split_frames
from rlstruct.search.search import Method, Search, SearchConfig, SearchResult
from rlstruct.search.tree import Model, Tree

__all__ = [
    "GameModel",
    "Method",
    "Model",
    "RolloutModel",
    "Search",
    "SearchAgent",
    "SearchConfig",
    "SearchResult",
    "Simulator",
    "Tree",
    "split_frames",
]
