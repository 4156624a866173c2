"""Batched tree search on any device: PUCT, Gumbel with sequential halving, UCT."""

from rlstruct import renamed
from rlstruct.search.agent import SearchAgent
from rlstruct.search.game import GameModel, RolloutModel, Simulator, split_frames
from rlstruct.search.tree import Model, Tree
from rlstruct.search.tree_search import Method, SearchConfig, SearchResult, TreeSearch

__getattr__ = renamed.attributes(__name__)

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
