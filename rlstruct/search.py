"""Alias of `rlstruct_search`, its name since 0.4."""

from rlstruct.addons import load

load("rlstruct_search", "rlstruct.search")
from rlstruct_search import *  # noqa: E402, F403
from rlstruct_search import TreeSearch as Search  # noqa: E402, F401 - its name in 0.2
