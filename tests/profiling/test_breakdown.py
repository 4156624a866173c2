from __future__ import annotations

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_profiles import Script

from rlstruct.profiling.breakdown import Process, break_down, correct
from rlstruct.profiling.events import PLAIN, WATCHED, load_recordings

MS = 1_000_000


def broken_down(folder: pathlib.Path) -> list[Process]:
    return break_down(load_recordings(folder))


def a_training(script: Script) -> Script:
    """Two iterations: 1 ms of Python, an environment of 3 ms of which a simulator is 2, and 4 ms of learning."""
    for _ in range(2):
        script.enter("iteration").python(MS)
        script.enter("environment").python(MS // 2).enter("simulator").python(MS).operator(MS).leave()
        script.python(MS // 2).leave()
        script.enter("loss").python(MS)
        for _ in range(3):
            script.operator(MS // 2).python(MS // 2)
        script.leave().leave()
    return script.python(MS)


CLEAN = {  # milliseconds in Python, torch's operators, the simulator
    ("training", ()): (1.0, 0.0, 0.0),
    ("training", ("iteration",)): (2.0, 0.0, 0.0),
    ("training", ("iteration", "environment")): (2.0, 0.0, 0.0),
    ("training", ("iteration", "environment", "simulator")): (0.0, 0.0, 4.0),
    ("training", ("iteration", "loss")): (5.0, 3.0, 0.0),
}


def test_every_region_of_a_known_training_is_found(tmp_path: pathlib.Path) -> None:
    a_training(Script()).write(tmp_path)
    (process,) = broken_down(tmp_path)
    found = {(row.phase, row.path): tuple(1e3 * row.seconds[:3]) for row in process.rows}
    assert found == {key: pytest.approx(value) for key, value in CLEAN.items()}
    assert process.seconds == pytest.approx(sum(map(sum, CLEAN.values())) / 1e3, rel=1e-12)
    rows = {row.path: row for row in process.rows}
    assert rows["iteration", "loss"].count == 2
    assert rows["iteration", "loss"].transitions[0, 1] == 6  # Python to torch, three times an iteration
    assert rows["iteration", "loss"].transitions[1, 0] == 6
    assert rows["iteration", "environment", "simulator"].transitions[0, 2] == 2
    assert rows["iteration", "loss"].per_entry == pytest.approx([4e-3, 4e-3])
    assert process.inclusive("environment") == pytest.approx(6e-3)
    assert process.inclusive("iteration") == pytest.approx(16e-3)


def test_known_costs_are_taken_away_exactly(tmp_path: pathlib.Path) -> None:
    script = Script(operation_cost=300_000, operator_cost=70_000)
    for i in range(60):
        a_training(script.slice(PLAIN if i % 3 else WATCHED, switching=20_000))
    script.write(tmp_path)
    (process,) = broken_down(tmp_path)
    assert process.prices.event == pytest.approx(70e-6)
    found = {(row.phase, row.path): tuple(1e3 * row.corrected[:3]) for row in process.rows}
    assert found == {key: pytest.approx(60 * np.asarray(value), abs=1e-6) for key, value in CLEAN.items()}
    # 8 operations were noted in each of 60 slices, 8 operators in each third one.
    assert process.seconds == pytest.approx(1e-9 * (script.now - script.start))
    assert process.seconds - process.corrected == pytest.approx(60 * 8 * 300e-6 + 20 * 8 * 70e-6 + 60 * 20e-6)
    rows = {row.path: row for row in process.rows}
    assert rows["iteration", "loss"].count == 120
    assert rows["iteration", "loss"].transitions[0, 1] == pytest.approx(360)  # as in the slices that were watched
    assert rows["iteration", "loss"].per_entry == pytest.approx([4e-3] * 10)  # where no operator was recorded
    assert process.watched == pytest.approx(process.seconds / 3, rel=0.02)


def test_a_busy_machine_does_not_change_the_price(tmp_path: pathlib.Path) -> None:
    script = Script(operator_cost=70_000)
    for i in range(100):
        script.slice(PLAIN if i % 2 else WATCHED).enter("loss").operator(MS)
        if i % 10 in (0, 1, 2):  # another program runs meanwhile: in 2 of 5 watched ones, in 1 of 5 plain ones
            script.python(20 * MS)
        script.leave()
    script.write(tmp_path)
    (process,) = broken_down(tmp_path)
    assert process.prices.event == pytest.approx(70e-6)


def test_a_slower_machine_makes_recording_slower_too(tmp_path: pathlib.Path) -> None:
    script = Script()
    for i in range(200):
        slower = 2 if i >= 120 else 1  # from then on another program shares the core
        script.operator_cost = slower * 70_000
        script.slice(PLAIN if i % 2 else WATCHED).enter("loss").operator(slower * MS).leave()
        script.enter("optimiser").operator(slower * MS // 2).leave()
    script.write(tmp_path)
    (process,) = broken_down(tmp_path)
    # The very first operation stands alone, without anything to compare it with.
    assert process.prices.event == pytest.approx(1.4 * 70e-6, rel=2e-3)
    assert process.corrected == pytest.approx(1.5e-3 * (120 + 2 * 80), rel=1e-4)


def test_the_pieces_of_an_operation_are_compared_with_those_in_the_same_place(tmp_path: pathlib.Path) -> None:
    script = Script(operator_cost=70_000)
    for i in range(120):
        script.slice(PLAIN if i % 2 else WATCHED).enter("loss").operator(MS)
        script.enter("replay").operator(3 * MS).leave()
        script.operator(10 * MS).operator(10 * MS).operator(10 * MS).leave()  # as long, for three operators
    script.write(tmp_path)
    (process,) = broken_down(tmp_path)
    assert process.prices.event == pytest.approx(70e-6, rel=2e-3)
    assert process.corrected == pytest.approx(120 * 34e-3, rel=1e-4)


def test_what_was_never_watched_is_not_told_apart(tmp_path: pathlib.Path) -> None:
    script = Script(operator_cost=MS).enter("loss").operator(MS).leave().slice(PLAIN)
    script.enter("simulator").operator(2 * MS).leave().enter("backward").operator(3 * MS).leave().write(tmp_path)
    (process,) = broken_down(tmp_path)
    assert process.prices.event is None  # there is nothing to compare
    assert {row.path: tuple(1e3 * row.corrected[:3]) for row in process.rows} == {
        ("loss",): pytest.approx((1, 1, 0)),  # what the event has cost is not taken away
        ("simulator",): pytest.approx((0, 0, 2)),
        ("backward",): pytest.approx((3, 0, 0)),
    }


def test_a_wait_is_as_much_shorter_as_its_slowest_worker_is_without_measuring(tmp_path: pathlib.Path) -> None:
    # The parent waits for two workers. Worker 2 pays 25 times 0.1 ms for measuring, and works for 20 ms.
    for pid, n in ((2, 25), (3, 10)):
        worker = Script(f"rlstruct-worker-{pid - 2}", pid, parent=1, operator_cost=100_000)
        for kind in n * [WATCHED, PLAIN]:
            worker.slice(kind).enter("agent").operator(400_000).leave()
        worker.enter("wait").python(23 * MS - (worker.now - worker.start)).leave().write(tmp_path)
    evaluation = Script("rlstruct-worker-0", 4, parent=1, phase="evaluation", operator_cost=100_000)
    for kind in 25 * [WATCHED, PLAIN]:
        evaluation.slice(kind).enter("agent").operator(1000).leave()
    evaluation.write(tmp_path)  # no process waits for this one
    Script().enter("wait").python(23 * MS).leave().python(MS).write(tmp_path)
    parent, first, second, other = broken_down(tmp_path)
    assert (parent.name, first.pid, second.pid, other.pid) == ("main", 2, 3, 4)
    assert parent.seconds == pytest.approx(24e-3)
    assert parent.corrected == pytest.approx(24e-3 - 25 * 0.1e-3)
    assert first.inclusive("agent") == pytest.approx(20e-3)
    assert second.inclusive("agent") == pytest.approx(8e-3)
    assert other.inclusive("agent") == pytest.approx(50e-6)
    assert sum(row.seconds.sum() for one in (parent, first, second, other) for row in one.rows) == pytest.approx(
        sum(one.seconds for one in (parent, first, second, other))
    )


def test_the_seconds_of_a_region_follow_what_was_watched(tmp_path: pathlib.Path) -> None:
    script = Script()
    for kind in 30 * [WATCHED, PLAIN, PLAIN]:
        script.slice(kind).enter("loss").python(MS).operator(3 * MS).leave()
    script.write(tmp_path)
    (process,) = broken_down(tmp_path)
    assert tuple(1e3 * next(row for row in process.rows if row.path).corrected[:2]) == pytest.approx((90, 270))
    assert process.watched == pytest.approx(process.seconds / 3)


def test_windows_of_a_process_add_up(tmp_path: pathlib.Path) -> None:
    a_training(Script()).write(tmp_path)
    a_training(Script(start=10**10)).write(tmp_path, window=1)
    (process,) = broken_down(tmp_path)
    assert (process.n_windows, process.seconds) == (2, pytest.approx(34e-3))
    assert {row.path: row.count for row in process.rows}["iteration",] == 4


seconds = st.lists(st.floats(0, 10), min_size=4, max_size=4).map(np.asarray)


@given(seconds, seconds)
def test_a_correction_never_goes_below_zero_and_keeps_the_sum(measured: np.ndarray, overhead: np.ndarray) -> None:
    left = correct(measured, overhead)
    assert (left >= 0).all()
    wanted = max(0.0, measured.sum() - overhead.sum())
    assert left.sum() == pytest.approx(wanted, abs=1e-9)
    if (overhead <= measured).all():
        np.testing.assert_allclose(left, measured - overhead, atol=1e-9)
