"""memory_report says how much memory collection takes."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil
import pytest
from batcher_fakes import GlobalRandomAgent, first_batch, next_batch
from fake_agents import StatefulAgent
from fake_envs import CountingEnv, create_counting_env
from gymnasium import spaces

from rlstruct import DeviceEnv, Trajectories, VecEnv
from rlstruct.batchers import MemoryReport, RL_Batcher
from rlstruct.batchers.workers.system import is_portable
from rlstruct.envs import GymEnvInf

STATUS = Path("/proc/self/status")


class Pictures(gymnasium.Env[Any, Any]):
    """Frames as Atari games have them; an episode takes 20 steps."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.ones((84, 84, 4), np.uint8), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.ones((84, 84, 4), np.uint8), 0.0, self.steps == 20, False, {}


def create_pictures(n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([Pictures() for _ in range(n_envs)], seed)


def create_moved(n_envs: int, seed: int, device: str) -> VecEnv:
    return DeviceEnv(create_counting_env(n_envs, seed, auto_reset=True), device)


class Heavy(CountingEnv):
    """Holds much memory."""

    def __init__(self, n_envs: int, seed: int, length: int) -> None:
        super().__init__(n_envs, seed)
        self.own = bytearray(os.urandom(length))


def create_heavy(n_envs: int, seed: int, length: int) -> VecEnv:
    return Heavy(n_envs, seed, length)


def stored(batch: Trajectories) -> int:
    """Bytes of a batch, memory that two keys share counted once."""
    tensors = [*batch.steps.values(), *batch.info.values()]
    return sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tensors}.values())


def status(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(name))


def measure_peak() -> tuple[int, MemoryReport, int]:
    """Return the peak of this process while it collects, what its batcher reports, and how many episodes have ended."""
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is large is given back when it is freed
    with RL_Batcher(2, GlobalRandomAgent, create_pictures, env_args={"n_envs": 8}, seed=0) as batcher:
        first_batch(batcher)  # what torch and the allocator take once is no batcher's memory
    with RL_Batcher(256, GlobalRandomAgent, create_pictures, env_args={"n_envs": 8}, seed=0) as batcher:
        batcher.reset()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before would be used again, and not be counted
        Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
        before = status("VmRSS")
        batch = next_batch(batcher)
        batcher.execute()  # the next one, while this one is held
        peak = status("VmHWM") - before
        return peak, batcher.memory_report(), int(batch.steps["_observation/done"].sum())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of a process here")
def test_the_report_is_the_measured_peak() -> None:
    """In a new process: memory that earlier tests have taken or freed would be in the peak, too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        peak, report, ended = processes.submit(measure_peak).result()
    frame = 84 * 84 * 4
    assert report.rollout_buffers[0] == pytest.approx(257 * 8 * frame, rel=0.01)
    assert report.batch == pytest.approx((257 + 256) * 8 * frame, rel=0.01)  # restarts: _observation has its own
    assert ended == 8 * (256 // 20)
    assert report.total + ended * frame == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(("n_processes", "device"), [(0, "cpu"), (2, "cpu"), (0, "sim:0")])
def test_the_report_is_what_is_allocated_and_stays(n_processes: int, device: str) -> None:
    with RL_Batcher(
        7,
        StatefulAgent,
        create_moved,
        agent_args={"device": device},
        env_args={"n_envs": 3, "device": device},
        n_processes=n_processes,
        seed=0,
        device=device,
    ) as batcher:
        batch = first_batch(batcher)
        report = batcher.memory_report()
        assert len(report.rollout_buffers) == max(1, n_processes)
        if device == "cpu":
            assert stored(batch) == report.batch
        else:  # the buffer itself is handed over
            assert report.rollout_buffers[0] >= report.batch * 0.95


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells the memory of a process here")
def test_the_report_counts_worker_processes_and_their_server() -> None:
    env_args = {"n_envs": 1, "length": 20_000_000}
    with RL_Batcher(2, StatefulAgent, create_heavy, env_args=env_args, n_processes=3, seed=0) as batcher:
        first_batch(batcher)
        processes = batcher.memory_report().processes
        pids = batcher.stats().pids
        found = [psutil.Process(pid).memory_full_info() for pid in pids]
    workers, servers = processes[:3], processes[3:]
    assert len(workers) == len(set(pids)) == 3
    assert len(servers) == (0 if is_portable() else 1)
    for worker, memory in zip(workers, found, strict=True):
        assert 20_000_000 < worker < memory.pss + 2**20  # the environment's own is in it
        assert memory.uss < worker + 8 * 2**20  # little more than what libraries write to
    assert all(server > 2**20 for server in servers)
    with RL_Batcher(2, StatefulAgent, create_counting_env, env_args={"n_envs": 1}, seed=0) as batcher:
        first_batch(batcher)
        assert batcher.memory_report().processes == batcher.stats().pids == ()
