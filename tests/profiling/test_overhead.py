from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_profiles import Script

from rlstruct.profiling.breakdown import Process, break_down
from rlstruct.profiling.events import load_recordings

MS = 1_000_000


def a_training(works: Sequence[Sequence[int]], learns: Sequence[int], costs: Sequence[int], ahead: int) -> list[Script]:
    """A parent and its workers, as a batcher orders them.

    Args:
        works: how long each worker collects each batch.  [workers][batches] ns
        learns: how long the parent learns from each.  [batches] ns
        costs: of an operation, in the parent and in each worker, ns.
        ahead: how many batches the parent orders before it learns from one.
    """
    parent = Script(operation_cost=costs[0])
    workers = [
        Script(f"rlstruct-worker-{k}", 2 + k, parent=1, operation_cost=cost).enter("wait")
        for k, cost in enumerate(costs[1:])
    ]
    ready: list[int] = []  # when each ordered batch is

    def order() -> None:
        parent.python(1)  # nothing that follows happens in the very same nanosecond
        for worker, work in zip(workers, works, strict=True):
            worker.now = max(worker.now, parent.now)
            worker.leave().enter("agent").python(work[len(ready)]).leave().enter("wait")
        ready.append(max(worker.now for worker in workers))

    parent.python(MS)
    for batch, learn in enumerate(learns):
        parent.enter("iteration")
        while len(ready) <= batch:
            order()
        parent.enter("wait")
        parent.now = max(parent.now, ready[batch])
        parent.leave()
        while len(ready) <= min(batch + ahead, len(learns) - 1):
            order()
        parent.enter("loss").python(learn).leave().leave()
    for worker in workers:
        worker.now = max(worker.now, parent.now)
        worker.leave()
    return [parent, *workers]


def broken_down(scripts: Sequence[Script]) -> list[Process]:
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            script.write(pathlib.Path(folder))
        return break_down(load_recordings(pathlib.Path(folder)))


@pytest.mark.parametrize(
    ("ahead", "work", "learn", "measured", "clean"),
    [
        # In a batch the worker pays twice 1 ms; in an iteration the parent pays twice 0.1 ms, and once before it.
        pytest.param(0, 9, 4, 10 * (11 + 4.1), 10 * (9 + 4), id="on the critical path"),
        pytest.param(1, 3, 10, 5 + 10 * 10.1 + 9 * 0.1, 3 + 10 * 10, id="off it"),
        pytest.param(1, 9, 10, 11 + 10 * 10.1 + 9 * 0.8, 9 + 10 * 10, id="half-way"),
    ],
)
def test_a_worker_delays_the_parent_as_far_as_it_is_waited_for(
    ahead: int, work: int, learn: int, measured: float, clean: float
) -> None:
    scripts = a_training([[work * MS] * 10], [learn * MS] * 10, [MS // 10, MS], ahead)
    parent, _ = broken_down(scripts)
    assert parent.inclusive("iteration", corrected=False) == pytest.approx(1e-3 * measured)
    assert parent.inclusive("iteration") == pytest.approx(1e-3 * clean)


def test_a_queued_batch_hides_what_the_parent_pays() -> None:
    scripts = a_training([[10 * MS] * 10], [4 * MS] * 10, [MS, MS // 10], 2)
    parent, worker = broken_down(scripts)
    assert parent.seconds == pytest.approx(1e-3 * (2 + 10 * 10.2 + 5))
    assert parent.corrected == pytest.approx(1e-3 * (1 + 10 * 10 + 4))
    assert worker.inclusive("agent") == pytest.approx(0.1)


@st.composite
def trainings(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int], int]:
    n_workers, n_batches = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    batches = st.lists(st.integers(1, 20), min_size=n_batches, max_size=n_batches)
    works = draw(st.lists(batches, min_size=n_workers, max_size=n_workers))
    costs = draw(st.lists(st.integers(0, 5), min_size=1 + n_workers, max_size=1 + n_workers))
    return works, draw(batches), costs, draw(st.integers(0, 1))


@given(trainings())
def test_the_totals_of_all_processes_are_those_of_a_run_that_nobody_measures(
    training: tuple[list[list[int]], list[int], list[int], int],
) -> None:
    works, learns, costs, ahead = training
    found = broken_down(a_training(works, learns, costs, ahead))
    for process, clean in zip(found, a_training(works, learns, [0] * len(costs), ahead), strict=True):
        assert process.corrected == pytest.approx(1e-9 * (clean.now - clean.start), abs=1e-12)
