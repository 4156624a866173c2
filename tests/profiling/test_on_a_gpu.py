"""What the profiler says of a real GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time

import pytest
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.profiling import operation, profile, read
from rlstruct.sims import make

pytestmark = pytest.mark.gpu

# One process of several: many kernels of some 20 microseconds, with gaps in which the host sleeps.
SHORT_KERNELS = """
import sys, time, torch
from rlstruct.profiling import operation, profile
cycles = int(20e-6 * 1e9)
torch.cuda._sleep(cycles)
torch.cuda.synchronize()
with profile(sys.argv[1], window=600):
    end = time.perf_counter() + 4.0
    while time.perf_counter() < end:
        with operation("kernel"):
            torch.cuda._sleep(cycles)
            torch.cuda.synchronize()
        time.sleep(0.002)
"""


def keep_one_block_busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            torch.cuda._sleep(10_000_000)  # one block of one thread counts clock cycles for some 6 ms
        torch.cuda.synchronize()


def test_one_block_keeps_nvml_busy_and_hardly_any_multiprocessor(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pynvml", reason="needs the extra nvml")
    keep_one_block_busy(2.0)  # the driver's periods reach back
    with profile(tmp_path, window=600), operation("busy"):
        keep_one_block_busy(4.0)
    (use,) = read(tmp_path).gpus
    assert use.nvml is not None
    assert use.nvml >= 0.95
    assert use.busy >= 0.9
    assert use.weighted <= 0.01


def test_eight_processes_of_short_kernels_look_busier_than_they_are(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("pynvml", reason="needs the extra nvml")
    script = tmp_path / "short.py"
    script.write_text(SHORT_KERNELS)
    folders = [tmp_path / str(i) for i in range(8)]
    started = [subprocess.Popen([sys.executable, str(script), str(folder)]) for folder in folders]
    assert [process.wait(200) for process in started] == [0] * 8
    for folder in folders:
        (use,) = read(folder).gpus
        assert use.nvml is not None
        assert use.nvml >= 3 * use.busy


def test_the_sum_of_the_kernels_is_what_cuda_events_measure(tmp_path: pathlib.Path) -> None:
    left = torch.randn(2048, 2048, device="cuda:0")
    left @ left
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with profile(tmp_path, window=600), operation("matrices"):
        start.record()
        for _ in range(200):
            torch.mm(left, left)
        end.record()
        torch.cuda.synchronize()
    (use,) = read(tmp_path).gpus
    assert use.kernels == pytest.approx(1e-3 * start.elapsed_time(end), rel=0.05)
    assert use.operations == {"matrices": pytest.approx(use.busy * use.seconds, rel=0.01)}


def test_a_replayed_batch_is_attributed_to_what_was_captured(tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=600):
        with RL_Batcher(
            16,
            ActorCriticAgent,
            lambda n_envs, seed: make("CartPole-v1", n_envs, seed=seed, device="cuda:0"),
            agent_args={"model": ActorCritic(n_inputs=4, n_actions=2), "device": "cuda:0"},
            env_args={"n_envs": 256},
            seed=0,
            device="cuda:0",
        ) as batcher:
            batcher.reset()
            for _ in range(5):
                batcher.execute()
                batcher.get()
        torch.cuda.synchronize()
    report = read(tmp_path)
    (use,) = report.gpus
    named = {name.rpartition("/")[2]: seconds for name, seconds in use.operations.items()}
    assert named["simulator"] > 0.0
    assert named["agent"] > 0.0
    # Five batches are one eager, one captured and replayed, three replayed: most of the work is that of replays.
    assert named["simulator"] + named["agent"] > named.get("graph", 0.0)


def test_the_idle_split_agrees_with_holistic_trace_analysis(tmp_path: pathlib.Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    numbers = torch.ones(1 << 20, device="cuda:0")
    torch.cuda.synchronize()
    with profile(tmp_path, window=600), operation("work"):
        for _ in range(50):
            numbers.mul_(1.0001)
            time.sleep(0.001)
        torch.cuda.synchronize()
    (use,) = read(tmp_path).gpus
    (file,) = tmp_path.glob("*.kineto.json")
    found = analysis.TraceAnalysis(trace_files={0: str(file)}).get_idle_time_breakdown(ranks=[0], visualize=False)[0]
    host = 1e-6 * float(found[found["idle_category"] == "host_wait"]["idle_time"].sum())
    # HTA looks between the first and the last kernel only, and splits by whole gaps.
    assert use.idle["host"] == pytest.approx(host, rel=0.15)
