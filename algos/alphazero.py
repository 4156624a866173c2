"""Alias of `rlstruct_search.alphazero`, in the add-on with tree search."""

from rlstruct.addons import load

load("rlstruct_search.alphazero", __name__)

from rlstruct_search.alphazero import *  # noqa: E402, F403
