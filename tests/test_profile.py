from __future__ import annotations

import time

import pytest

from rlstruct import profile
from rlstruct.profile import PhaseClock


def test_every_second_belongs_to_exactly_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr(profile, "perf_counter", lambda: next(now))
    clock = PhaseClock(["wait", "work", "rest"])
    clock.enter(1)  # waited 1 s
    clock.enter(0)  # worked 2 s
    clock.enter(1)  # waited 4 s
    assert clock.seconds() == {"wait": 5.0, "work": 10.0, "rest": 0.0}  # the running phase counts, 8 s so far
    assert clock.seconds() == {"wait": 5.0, "work": 26.0, "rest": 0.0}


def test_entering_a_phase_costs_next_to_nothing() -> None:
    clock = PhaseClock(["a", "b"])
    start = time.perf_counter()
    for i in range(10_000):
        clock.enter(i % 2)
    seconds = time.perf_counter() - start
    assert seconds / 10_000 < 20e-6  # about 0.2 microseconds on an idle machine
    assert sum(clock.seconds().values()) == pytest.approx(time.perf_counter() - start, abs=0.05)
