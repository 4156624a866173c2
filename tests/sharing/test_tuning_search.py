"""The search on surfaces that are known everywhere: what it finds, and where it breaks off."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstruct.sharing.tuning.search import (
    MAX_ALPHA,
    MIN_ALPHA,
    Candidate,
    Climb,
    Measured,
    Space,
    TimeIsUp,
    project_line,
)

Rate = Callable[[Candidate], float]
SPACE = Space((0, 1, 2, 4), tuple(2**i for i in range(8)), (8, 32, 128))


def size(candidate: Candidate) -> float:
    """Bytes of its batches: 10 for each step."""
    return 10.0 * candidate.n_steps()


class Surface:
    """Measures exactly; a worker takes 400 bytes, an environment 7, and this process 500."""

    def __init__(self, rate: Rate, noise: float = 0.0) -> None:
        self.rate, self.noise = rate, noise
        self.measured: list[Candidate] = []

    def memory(self, candidate: Candidate) -> int:
        B = candidate.n_envs * max(1, candidate.n_processes)
        return int(500 + 400 * candidate.n_processes + 7 * B + size(candidate))

    def __call__(self, candidate: Candidate, best: Candidate | None, projected: float) -> Measured:
        self.measured.append(candidate)
        rate = self.rate(candidate)
        return Measured(rate, rate / self.rate(best) if best else 1.0, self.noise, self.memory(candidate))


def search(surface: Surface, space: Space = SPACE, **kind: object) -> Climb:
    found = Climb(space, surface, size, start=500.0, worker=500.0, **kind)  # type: ignore[arg-type]
    found.run()
    return found


def grid(space: Space = SPACE) -> list[Candidate]:
    return [Candidate(*values) for values in product(space.n_processes, space.n_envs, space.n_timesteps)]


def peak(values: tuple[int, ...], at: int, steepness: float) -> dict[int, float]:
    """Speed that rises up to one of the values, and falls after it."""
    return {value: steepness ** -abs(i - at) for i, value in enumerate(values)}


@given(
    st.integers(0, 7), st.integers(0, 2), st.floats(1.05, 3.0), st.floats(1.2, 3.0),
    st.sampled_from([(1, 2, 3, 4), (1, 2, 3, 2), (1, 4, 3, 2), (4, 1, 2, 3), (4, 3, 2, 1)]),
)  # fmt: skip
def test_it_finds_the_best_of_surfaces_with_one_peak_in_each_direction(
    envs: int, steps: int, of_envs: float, of_steps: float, of_workers: tuple[int, ...]
) -> None:
    for_envs, for_steps = peak(SPACE.n_envs, envs, of_envs), peak(SPACE.n_timesteps, steps, of_steps)
    workers = dict(zip(SPACE.n_processes, of_workers, strict=True))
    surface = Surface(lambda c: 100.0 * for_envs[c.n_envs] * for_steps[c.n_timesteps] * workers[c.n_processes])
    found = search(surface, alpha=1e-9)
    assert found.best is not None
    assert surface.rate(found.best.candidate) == max(map(surface.rate, grid()))
    assert len(surface.measured) == len(set(surface.measured)) <= 0.4 * len(grid())


@given(st.floats(0.01, 100.0), st.floats(0.0, 1.0), st.sampled_from([0.02, 0.05, 0.2]))
def test_where_speed_saturates_it_loses_at_most_alpha(overhead: float, of_batch: float, alpha: float) -> None:
    # A batch costs something, a step of all environments something, a step of one environment 1.
    surface = Surface(lambda c: c.n_steps() / (overhead * c.n_timesteps + c.n_envs * c.n_timesteps + of_batch))
    found = search(surface, alpha=alpha)
    assert found.best is not None
    # Once for the environments, once for the steps.
    assert surface.rate(found.best.candidate) >= (1.0 - alpha) ** 2 * max(map(surface.rate, grid()))


def test_it_breaks_off_at_the_first_step_that_pays_less_than_alpha_times_the_memory() -> None:
    rates = {1: 100.0, 2: 150.0, 4: 180.0, 8: 197.0, 16: 210.0, 32: 400.0}
    space = Space((0,), tuple(rates), (1,))
    surface = Surface(lambda c: rates[c.n_envs])
    found = search(surface, space, alpha=0.1)
    # 150/100, 180/150 and 197/180 for twice the memory are 50 %, 20 % and 9.4 %: 8 saturates, and is scored itself.
    assert [c.n_envs for c in surface.measured] == [1, 2, 4, 8]
    assert found.best is not None
    assert found.best.candidate.n_envs == 8
    assert "saturated: +9.4 %, less than 10.0 %" in found.probes[-1].why
    assert search(Surface(lambda c: rates[c.n_envs]), space, alpha=0.01).best.candidate.n_envs == 32  # type: ignore[union-attr]


def test_the_first_candidate_can_win() -> None:
    surface = Surface(lambda c: 1.0 / c.n_envs)
    found = search(surface, Space((0,), (1, 2, 4), (1,)))
    assert found.best is not None
    assert found.best.candidate == Candidate(0, 1, 1)
    assert len(surface.measured) == 2


def test_settings_that_pay_only_together_are_found() -> None:
    of_steps = {(0, 8): 120.0, (0, 32): 100.0, (0, 128): 50.0, (2, 8): 140.0, (2, 32): 70.0, (2, 128): 30.0}
    of_envs = {4: 0.5, 8: 0.7, 16: 1.0}
    surface = Surface(lambda c: of_steps[c.n_processes, c.n_timesteps] * of_envs[c.n_envs])
    found = search(surface, Space((0, 2), tuple(of_envs), (8, 32, 128)))
    assert found.best is not None
    assert found.best.candidate == Candidate(2, 16, 8)
    assert surface.measured == [
        *(Candidate(0, n_envs, 32) for n_envs in of_envs),
        Candidate(2, 16, 32),
        Candidate(0, 16, 128), Candidate(0, 16, 8),
        Candidate(0, 8, 8),  # each setting again, since the best has fewer steps
        Candidate(2, 16, 8),
        Candidate(2, 8, 8),
    ]  # fmt: skip


def test_one_worker_that_is_slower_than_this_process_does_not_end_the_search_for_workers() -> None:
    of_workers = {0: 100.0, 1: 70.0, 2: 130.0, 4: 250.0, 8: 255.0, 16: 500.0}
    surface = Surface(lambda c: of_workers[c.n_processes])
    found = search(surface, Space(tuple(of_workers), (8,), (8,)), alpha=0.05)
    assert found.best is not None
    assert found.best.candidate.n_processes == 8
    assert [c.n_processes for c in surface.measured] == [0, 1, 2, 4, 8]


def test_a_measured_alpha_is_the_noise_between_2_and_3_percent() -> None:
    def n_probes(gain: float, noise: float) -> int:
        rates = {1: 100.0, 2: 100.0 * (1.0 + gain), 4: 300.0}
        return len(search(Surface(lambda c: rates[c.n_envs], noise), Space((0,), tuple(rates), (1,))).probes)

    assert n_probes(0.025, noise=0.028) == 2
    assert n_probes(0.025, noise=0.022) == 3
    assert n_probes(0.99 * MIN_ALPHA, noise=0.0) == 2  # no noise at all: still no gain
    assert n_probes(1.01 * MAX_ALPHA, noise=0.5) == 3  # too much noise to say: go on


@given(st.integers(600, 40_000), st.floats(0.5, 50.0))
def test_nothing_is_started_that_is_projected_beyond_the_limit(limit: int, overhead: float) -> None:
    surface = Surface(lambda c: c.n_steps() / (overhead + c.n_envs))
    found = search(surface, limit=float(limit))
    for probe in found.probes:
        assert (probe.measured is None) == (probe.projected > limit)
        if probe.measured is None:
            assert probe.why.startswith("not started: ")
    # Environments take memory, too, which the second probe in a line shows: until then too little is expected.
    assert all(surface.memory(candidate) <= 1.05 * limit for candidate in surface.measured)
    fitting = [c for c in grid() if surface.memory(c) <= limit and c.n_processes == 0]
    assert (found.best is not None) == bool(surface.measured)
    if not fitting:
        assert found.best is None


@given(st.floats(1.0, 1e9), st.floats(0.0, 1e6), st.integers(1, 1000), st.integers(2, 1000), st.integers(1, 10_000))
def test_the_projection_is_a_line_through_two_points(base: float, slope: float, e1: int, more: int, e: int) -> None:
    e2 = e1 + more
    known = {e1: base + slope * e1, e2: base + slope * e2}
    assert project_line(known, e) == pytest.approx(base + slope * e, rel=1e-6)
    assert project_line(known, e) == pytest.approx((e - e2) / (e2 - e1) * (known[e2] - known[e1]) + known[e2])


def test_memory_is_projected_from_what_was_measured() -> None:
    surface = Surface(lambda c: float(c.n_envs))
    found = search(surface)
    first_worker = next(probe for probe in found.probes if probe.candidate.n_processes)
    assert first_worker.projected > surface.memory(first_worker.candidate)  # it counts as much as this process
    for probe in found.probes[1:]:
        if probe is not first_worker:
            assert probe.projected == pytest.approx(surface.memory(probe.candidate), rel=0.05)


def test_more_workers_that_are_not_faster_end_the_search_for_them() -> None:
    surface = Surface(lambda c: min(2, c.n_processes) * 100.0 + min(c.n_envs, 16))
    space = Space((0, 1, 2, 4, 8, 16), (8, 16, 32), (8,))
    found = search(surface, space)
    assert found.best is not None
    assert found.best.candidate.n_processes in (2, 4)
    assert {c.n_processes for c in surface.measured} == {0, 1, 2, 4}
    assert any("saturated" in probe.why for probe in found.probes if probe.candidate.n_processes == 4)


def test_ways_to_share_are_compared() -> None:
    surface = Surface(lambda c: 100.0 + 50.0 * (c.sharing == "mps") * c.n_processes)
    found = search(surface, Space((0, 1, 2), (8,), (8,), ("none", "mps")))
    assert found.best is not None
    assert found.best.candidate == Candidate(2, 8, 8, "mps")
    assert len(surface.measured) == 5


def test_when_time_is_up_the_best_so_far_is_the_answer() -> None:
    surface = Surface(lambda c: float(c.n_envs))

    def measure(candidate: Candidate, best: Candidate | None, projected: float) -> Measured:
        if len(surface.measured) == 3:
            raise TimeIsUp
        return surface(candidate, best, projected)

    found = Climb(SPACE, measure, size)
    best = found.run()
    assert best is not None
    assert best.candidate == Candidate(0, 4, 32)
