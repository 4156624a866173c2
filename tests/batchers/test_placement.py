"""Processes on a GPU that take turns, and their cores."""

from __future__ import annotations

import os

import pytest
import torch

from rlstruct.batchers.workers import placement
from rlstruct.batchers.workers.placement import WorkerPlacement, place_workers

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _without_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "running_daemon", lambda: None)


def test_arguments_are_checked_first() -> None:
    with pytest.raises(ValueError, match="RL_Batcher: sharing is 'mpi', expected 'none', 'mps', 'mig' or 'auto'"):
        place_workers(GPU, 2, "mpi", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="thread_percentage is 50 with sharing='none', but only MPS limits threads"):
        place_workers(GPU, 2, "none", 50)
    with pytest.raises(ValueError, match="thread_percentage is 0, expected more than 0"):
        place_workers(GPU, 2, "mps", 0)


def test_processes_that_take_turns_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3, 4})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: given.append(cores))
    with pytest.warns(UserWarning, match=r"RL_Batcher: 2 processes on cuda:0 open 2 CUDA contexts, .* take turns"):
        turns = place_workers(GPU, 2, "none", None)
    for worker in (0, 1):
        with turns.starting(worker):
            assert turns.environment(worker) == {}
    assert (turns.mode, turns.cores) == ("none", [{1}, {3}])
    assert given == [{1}, {1, 3, 4}, {3}, {1, 3, 4}]
    turns.close()
    assert turns.cores == []
    for device, n in (("cuda:0", 1), ("cpu", 2)):  # neither a warning nor cores
        alone = WorkerPlacement(torch.device(device), n)
        with alone.starting(0):
            assert alone.cores == []
