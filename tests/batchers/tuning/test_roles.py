"""The model of GMI-DRL against its worked values, hand arithmetic, and brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstruct.batchers.tuning.roles import (
    ISAAC_GYM,
    ISAAC_GYM_COLLECTING,
    Group,
    collecting_bytes,
    dominant_share,
    group_channels,
    reduced_bytes,
    reductions,
    throughput,
    training_bytes,
)


def test_one_process_for_all_roles_is_as_much_faster_as_the_paper_says() -> None:
    # Collecting: (6 x 10 + 1 x 0.2 x 1) / 7 = 8.6 against 10, and three times the seconds: 8.6 / 10 x 3 = 2.58.
    roles = ISAAC_GYM_COLLECTING
    apart = throughput(roles.apart(), roles.seconds, communication=2 * roles.seconds)
    assert throughput(roles.together(), roles.seconds) / apart == pytest.approx(2.58)
    # Training: (60 + 0.2 + 2 x 0.3 x 2) / 9 = 6.822, eight times the seconds: 0.6822 x 8 = 5.458.
    roles = ISAAC_GYM
    apart = throughput(roles.apart(), roles.seconds, communication=7 * roles.seconds)
    assert throughput(roles.together(), roles.seconds) / apart == pytest.approx(5.46, abs=0.005)


def test_bytes_of_a_step() -> None:
    assert collecting_bytes(state=100.0, action=8.0, weights=3.0) == 211.0
    assert reduced_bytes(1, 50.0) == 0.0
    assert reduced_bytes(4, 50.0) == 75.0
    assert training_bytes(4, processes=3, experience=111.0, weights=50.0) == 3 * 111 + 50 + 75
    assert dominant_share(0.25, 0.5) == 0.5
    assert throughput(0.5, 2.0, communication=1.0, gpus=4.0) == pytest.approx(8.0 / 3.0)


@given(st.integers(2, 8), st.integers(1, 8), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_costs_of_reductions_follow_from_bandwidths(n: int, m: int, size: float, b1: float, b2: float) -> None:
    def on_cpu(members: int) -> float:
        return 2 * (members - 1) * size / (members * b1)

    ring = 2 * (n - 1) * size / (n * b2)
    expected = {("ip", 0): on_cpu(m * n)}
    if m <= n:
        expected["rp", m] = 2 * ring
    expected |= {("hybrid", k): ring + on_cpu(n * (m - k) + k) for k in range(1, m)}
    found = reductions(n, m, cpu=on_cpu(n), gpu=ring)
    assert {(one.name, one.rings): pytest.approx(one.seconds) for one in found} == expected
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)


def test_the_printed_projection_of_the_hybrid_is_an_option() -> None:
    # n = 2, m = 3: printed (k / 2 + 3 - k) + C_rp; theory (N - 1) / N x 2 with N = 2 (3 - k) + k members.
    printed = {one.rings: one.seconds for one in reductions(2, 3, 1.0, 0.5, as_printed=True) if one.name == "hybrid"}
    theory = {one.rings: one.seconds for one in reductions(2, 3, 1.0, 0.5) if one.name == "hybrid"}
    assert printed == {1: 3.0, 2: 2.5}
    assert theory == {1: pytest.approx(0.5 + 8 / 5), 2: pytest.approx(0.5 + 6 / 4)}
    assert "rp" not in {one.name for one in reductions(2, 3, 1.0, 0.5)}  # three members on two GPUs
    with pytest.raises(ValueError, match="n is 1, expected at least 2"):
        reductions(1, 3, 1.0, 1.0)


def worth(groups: list[Group], rates: list[float]) -> float:
    return min(sum(rates[i] for i in group.channels) / (group.trainers * len(groups)) for group in groups)


def brute_force(rates: list[float], n_trainers: int, shapes: list[int]) -> float:
    """Every assignment of channels to groups, and every split of the trainers."""
    best = -1.0
    for labels in product(range(n_trainers), repeat=len(rates)):
        n = max(labels) + 1
        parts = [tuple(i for i, label in enumerate(labels) if label == g) for g in range(n)]
        if not all(parts) or any(len({shapes[i] for i in part}) > 1 for part in parts):
            continue
        for shares in product(range(1, n_trainers + 1), repeat=n):
            if sum(shares) == n_trainers:
                groups = [Group(part, share) for part, share in zip(parts, shares, strict=True)]
                best = max(best, worth(groups, rates))
    return best


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(0, 2)), min_size=1, max_size=5), st.integers(1, 5))
def test_grouping_is_as_good_as_brute_force(channels: list[tuple[float, int]], n_trainers: int) -> None:
    rates, shapes = [rate for rate, _ in channels], [shape for _, shape in channels]
    if len(set(shapes)) > n_trainers:
        with pytest.raises(ValueError, match="do not go into"):
            group_channels(rates, n_trainers, lambda i, j: shapes[i] == shapes[j])
        return
    groups = group_channels(rates, n_trainers, lambda i, j: shapes[i] == shapes[j])
    assert sorted(i for group in groups for i in group.channels) == list(range(len(rates)))
    assert sum(group.trainers for group in groups) == n_trainers
    assert all(len({shapes[i] for i in group.channels}) == 1 for group in groups)
    assert worth(groups, rates) == pytest.approx(brute_force(rates, n_trainers, shapes))


def test_grouping_by_hand() -> None:
    # 6 and 3 per second of one shape, 1 of another, and 10 trainers: 9 / (9 x 2) = 1 / (1 x 2).
    groups = group_channels([6.0, 3.0, 1.0], 10, lambda i, j: {i, j} <= {0, 1})
    assert groups == [Group((0, 1), 9), Group((2,), 1)]
