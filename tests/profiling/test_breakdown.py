from __future__ import annotations

import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Script

from rlstruct.profiling import Costs
from rlstruct.profiling.breakdown import Process, break_down, correct
from rlstruct.profiling.events import load

MS = 1_000_000


def broken_down(folder: pathlib.Path, costs: Costs | None = None) -> list[Process]:
    return break_down(load(folder), costs or Costs())


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
    a_training(Script(operation_cost=300_000, operator_cost=70_000)).write(tmp_path)
    (process,) = broken_down(tmp_path, Costs(operation=300e-6, operator=70e-6))
    found = {(row.phase, row.path): tuple(1e3 * row.corrected[:3]) for row in process.rows}
    assert found == {key: pytest.approx(value, abs=1e-9) for key, value in CLEAN.items()}
    # 8 operations and 8 operators were noted.
    assert process.seconds - process.corrected == pytest.approx(8 * 300e-6 + 8 * 70e-6)


def test_a_wait_is_as_much_shorter_as_its_slowest_worker_is_without_measuring(tmp_path: pathlib.Path) -> None:
    # The parent waits for two workers. Worker 2 works for 4 ms, and pays 10 times 0.1 ms for measuring.
    costs = Costs(operator=100e-6)
    for pid, n_operators in ((2, 10), (3, 2)):
        worker = Script(f"rlstruct-worker-{pid - 2}", pid, parent=1, operator_cost=100_000).enter("agent")
        for _ in range(n_operators):
            worker.operator(400_000)
        worker.leave().enter("wait").python(5 * MS - (worker.now - worker.start)).leave().write(tmp_path)
    evaluation = Script("rlstruct-worker-0", 4, parent=1, phase="evaluation", operator_cost=MS)
    evaluation.operator(MS).operator(MS).operator(MS).write(tmp_path)  # nobody waits for this one
    Script().enter("wait").python(5 * MS).leave().python(MS).write(tmp_path)
    parent, first, second, other = broken_down(tmp_path, costs)
    assert (parent.name, first.pid, second.pid, other.pid) == ("main", 2, 3, 4)
    assert parent.seconds == pytest.approx(6e-3)
    assert parent.corrected == pytest.approx(5e-3)
    assert first.inclusive("agent") == pytest.approx(4e-3)
    assert second.inclusive("agent") == pytest.approx(0.8e-3)
    assert sum(row.seconds.sum() for one in (parent, first, second, other) for row in one.rows) == pytest.approx(
        sum(one.seconds for one in (parent, first, second, other))
    )


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
