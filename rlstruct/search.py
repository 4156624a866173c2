"""Alias of `rlstruct_search`, the add-on with tree search."""

from rlstruct.addons import load

load("rlstruct_search", __name__)

from rlstruct_search import *  # noqa: E402, F403
from rlstruct_search import TreeSearch as Search  # noqa: E402, F401 - its name in 0.2
