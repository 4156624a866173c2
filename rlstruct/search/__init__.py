"""Batched tree search on any device: PUCT, Gumbel with sequential halving, UCT."""

from rlstruct.search.agent import SearchAgent
from rlstruct.search.game import GameModel, RolloutModel, Simulator, split_frames
from rlstruct.search.tree import Model, Tree
from rlstruct.search.tree_search import Method, SearchConfig, SearchResult, TreeSearch

Search = TreeSearch  # its name in 0.2

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
    "TreeSearch",
    "split_frames",
]
