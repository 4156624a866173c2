"""Batched tree search on any device: PUCT, Gumbel with sequential halving, UCT."""

from rlstruct_search.agent import SearchAgent
from rlstruct_search.game import GameModel, RolloutModel, Simulator, split_frames
from rlstruct_search.tree import Model, Tree
from rlstruct_search.tree_search import Method, SearchConfig, SearchResult, TreeSearch

__all__ = [
    "GameModel",
    "Method",
    "Model",
    "RolloutModel",
    "SearchAgent",
    "SearchConfig",
    "SearchResult",
    "Simulator",
    "Tree",
    "TreeSearch",
    "split_frames",
]
