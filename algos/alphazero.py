"""Alias of `rlstruct_search.alphazero`, its name since 0.4."""

from rlstruct.addons import load

load("rlstruct_search.alphazero", "rlstruct.algos.alphazero")
from rlstruct_search.alphazero import *  # noqa: E402, F403
