"""Workers as macOS starts them, forced here by a variable: what they collect, and how they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from batcher_fakes import PROMPT, VersionAgent, close_leaves_nothing, next_batch
from fake_agents import RngAgent
from fake_envs import CountingEnv, create_counting_env
from test_processes import Program, gone

from rlstruct import WorkerError
from rlstruct.algos.distributed.launch import launch_learners
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.batchers.workers.system import descendants, is_portable, process_state
from rlstruct.core import Layout
from rlstruct.errors import UsageError


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTRUCT_PORTABLE", "1")
    assert is_portable()


class ParentEnv(CountingEnv):
    """Starts a process, and notes it and this one's parent."""

    def __init__(self, seed: int, folder: str) -> None:
        super().__init__(2, seed, auto_reset=True)
        self.child = psutil.Popen(["sleep", "300"])
        (Path(folder) / f"{os.getpid()}").write_text(f"{os.getppid()} {self.child.pid}")


@pytest.mark.usefixtures("portable")
def test_portable_workers_collect_the_same_and_a_killed_one_and_its_children_are_gone(tmp_path: Path) -> None:
    with RL_Batcher(5, RngAgent, create_counting_env, env_args={"n_envs": 2, "auto_reset": True}, seed=3) as here:
        here.reset()
        expected = next_batch(here)
    weights = torch.zeros(100_000)  # more than a pipe holds, and known to the factory

    def create_agent() -> RngAgent:
        assert len(weights) == 100_000
        return RngAgent()

    env_args = {"folder": str(tmp_path)}
    batcher = RL_Batcher(5, create_agent, ParentEnv, env_args=env_args, n_processes=1, seed=3)
    batcher.reset()
    found = next_batch(batcher)
    for key in ("observation/frame", "action/action", "_observation/done"):
        assert torch.equal(found.steps[key], expected.steps[key]), key
    (pid,) = batcher.stats().pids
    parent, child = map(int, (tmp_path / f"{pid}").read_text().split())
    assert parent == os.getpid()  # no server
    assert child in descendants(pid)
    os.kill(pid, signal.SIGSTOP)
    batcher.execute()
    close_leaves_nothing(batcher)
    gone([psutil.Process(child)] if psutil.pid_exists(child) else [])


@pytest.mark.usefixtures("portable")
def test_weights_reach_a_portable_worker_and_its_death_is_explained() -> None:
    env_args = {"n_envs": 1, "auto_reset": True}
    with RL_Batcher(3, VersionAgent, create_counting_env, env_args=env_args, n_processes=1, seed=0) as batcher:
        batcher.reset()
        batcher.update({"w": torch.full((1000,), 7.0)})
        assert next_batch(batcher).steps["action/lowest"].flatten().tolist() == [7.0] * 3
        os.kill(batcher.stats().pids[0], signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL while it was"):
            next_batch(batcher)


@pytest.mark.slow
@pytest.mark.usefixtures("portable")
def test_a_killed_program_takes_its_portable_workers_along(tmp_path: Path) -> None:
    program = Program(tmp_path, "batcher = make(60.0, 2)\nbatcher.execute()\ntell(batcher)\ntime.sleep(60)")
    workers = program.workers()
    assert all(worker.ppid() == program.process.pid for worker in workers[:2])
    program.process.kill()
    gone(workers)
    program.end()


@pytest.mark.usefixtures("portable")
def test_portable_memory_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    block = SharedBlock()
    tensor = block.map(Layout({"x": ((3,), torch.float32)}))["x"]
    assert tensor.tolist() == [0.0] * 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("variable", ["0", "1"])
def test_the_state_of_a_process_is_known_until_it_has_been_reaped(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("RLSTRUCT_PORTABLE", variable)
    process = psutil.Popen(["sleep", "300"])

    def wait_for(state: str) -> None:
        deadline = time.monotonic() + PROMPT
        while (found := process_state(process.pid)) != state:
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    wait_for("S")
    process.suspend()
    wait_for("T")
    process.kill()
    wait_for("Z")
    process.wait()
    assert process_state(process.pid) == ""


def test_windows_is_told_of_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match=r"RL_Batcher: .* got Windows.*WSL"):
        RL_Batcher(3, RngAgent, create_counting_env, env_args={"n_envs": 1}, n_processes=1, seed=0)
    with pytest.raises(UsageError, match=r"run_training: .* got Windows.*WSL"):
        launch_learners(TrainingConfig(n_learners=2), print).__enter__()
