"""Settings of a search and of AlphaZero know the values they accept."""

from __future__ import annotations

import pytest
from option_bounds import check_bounds

from rlstruct.options import Options
from rlstruct.search import SearchConfig
from rlstruct.search.alphazero import AlphaZeroConfig


@pytest.mark.parametrize("kind", [AlphaZeroConfig, SearchConfig])
def test_every_bound_of_search_is_checked_and_documented(kind: type[Options]) -> None:
    check_bounds(kind)
