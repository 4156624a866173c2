"""Processes on a GPU without the add-on rlstruct-sharing: they take turns, and everything else names the add-on."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from fake_agents import FixedAgent
from fake_envs import create_counting_env

from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.launch import share_gpus
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.workers import placement
from rlstruct.batchers.workers.placement import WorkerPlacement, place_workers
from rlstruct.cli.devices import report
from rlstruct.errors import MissingPackageError

GPU = torch.device("cuda:0")


class Absent:
    """Finder that says of the add-on what Python says of a package that is not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "rlstruct_sharing":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture(autouse=True)
def _without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rlstruct_sharing")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])
    monkeypatch.setattr(placement, "running_daemon", lambda: None)


def needs(who: str) -> Any:
    said = rf"^{who} needs the add-on rlstruct-sharing, .*pip install -e packages/sharing"
    return pytest.raises(MissingPackageError, match=said)


@pytest.mark.parametrize("mode", ["mps", "mig", "auto"])
def test_every_mode_but_none_names_the_addon(mode: Any) -> None:
    with needs(rf"RL_Batcher\(sharing='{mode}'\)"):
        RL_Batcher(2, FixedAgent, create_counting_env, env_args={"n_envs": 1}, sharing=mode)
    config = A2CConfig(n_processes=0, n_learners=2, learner_device="cuda", sharing=mode)
    with needs(rf"A2CConfig\(sharing='{mode}'\)"):
        share_gpus(config)


def test_devices_names_the_addon() -> None:
    lines = report(16, 8, ["cuda:0   Big, 80.0 GiB"])
    assert [line for line in lines if "rlstruct-sharing" in line] == [
        lines[lines.index("How processes can share a GPU:") + 1]
    ]


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
