from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstruct.profiling.overlap import active_before, levels, lookup, sweep, union, union_length

NOTHING = np.zeros(0, dtype=np.int64)


def integers(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int64)


def brute_force(events: list[tuple[int, int, int]], within: tuple[int, int]) -> dict[int, int]:
    """Ask of every unit of time, which categories are active in it: no boundaries, no sorting."""
    found: dict[int, int] = {}
    for t in range(*within):
        active = 0
        for start, end, category in events:
            if start <= t < end:
                active |= 1 << category
        found[active] = found.get(active, 0) + 1
    return found


events = st.lists(
    st.tuples(st.integers(-5, 45), st.integers(0, 20), st.integers(0, 4)).map(lambda e: (e[0], e[0] + e[1], e[2])),
    max_size=30,
)


@given(events, st.integers(0, 10), st.integers(20, 40))
def test_the_sweep_finds_what_brute_force_finds(found: list[tuple[int, int, int]], first: int, last: int) -> None:
    starts, ends, category = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
    categories = [(starts[category == one], ends[category == one]) for one in range(5)]
    segments = sweep(categories, (first, last), (NOTHING, NOTHING))
    sums: dict[int, int] = {}
    for active, length in zip(segments.active.tolist(), segments.lengths.tolist(), strict=True):
        sums[active] = sums.get(active, 0) + length
    assert sums == brute_force(found, (first, last))
    assert sum(sums.values()) == last - first  # regions add up
    assert (segments.lengths > 0).all()


@given(events.filter(bool))
def test_regions_add_up_to_the_union(found: list[tuple[int, int, int]]) -> None:
    starts, ends, _ = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
    covered = {t for start, end, _ in found for t in range(start, end)}
    assert union_length(starts, ends) == len(covered)
    moments = np.arange(-1, 70)
    before = [len({t for t in covered if t < moment}) for moment in moments.tolist()]
    assert active_before(union(starts, ends), moments).tolist() == before


@given(events)
def test_levels_count_the_active_intervals_at_every_moment(found: list[tuple[int, int, int]]) -> None:
    starts, ends, _ = np.asarray(found, dtype=np.int64).reshape(-1, 3).T
    times, level = levels(starts, ends, np.ones(len(starts), dtype=np.int64))
    for t, n in zip(range(70), lookup((times, level), np.arange(70)).tolist(), strict=True):
        assert max(0, n) == sum(start <= t < end for start, end, _ in found)


def test_a_sweep_by_hand() -> None:
    # Category 0 is active in [0, 6], category 1 in [2, 4] and, overlapping itself, in [3, 5]; [5, 5] is empty.
    categories = [(integers(0), integers(6)), (integers(2, 3, 5), integers(4, 5, 5))]
    segments = sweep(categories, (0, 8), (integers(1, 7), integers(20, 21)))
    assert segments.edges.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert segments.active.tolist() == [1, 1, 3, 3, 3, 1, 0, 0]
    assert segments.label.tolist() == [-1, 20, 20, 20, 20, 20, 20, 21]
    assert segments.at(integers(0, 1, 2, 8)).tolist() == [0, 0, 1, 7]


def test_nothing_happens_in_no_time() -> None:
    segments = sweep([(integers(1), integers(2))], (5, 5), (NOTHING, NOTHING))
    assert segments.lengths.sum() == 0
    assert union_length(NOTHING, NOTHING) == 0


@pytest.mark.parametrize("n", [200_000])
def test_many_events_take_no_more_than_n_log_n(n: int) -> None:
    generator = np.random.default_rng(0)
    starts = np.sort(generator.integers(0, 10**9, n))
    ends = starts + generator.integers(0, 10**4, n)
    segments = sweep([(starts, ends)], (0, 10**9), (NOTHING, NOTHING))
    assert segments.lengths.sum() == 10**9  # a square would take hours
