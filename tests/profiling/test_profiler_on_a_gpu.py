"""The profiler on a real GPU."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import time
import types

import pytest
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.engine.graph import capture, capture_cuda
from rlstruct.profiling import operation, profile, read
from rlstruct.profiling.events import PLAIN, WATCHED, load_recordings
from rlstruct.sims import make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("work", ["one busy block", "8 processes of 20 us kernels", "matrices"])
def test_what_it_says_is_what_nvml_and_events_say(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if work != "matrices":
        pytest.importorskip("pynvml", reason="needs the extra nvml")
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
    from gpu import WORK

    found = WORK[work](types.SimpleNamespace(device=torch.device("cuda:0"), quick=False))
    assert found["met"], found


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


def test_a_window_does_not_end_within_a_capture(tmp_path: pathlib.Path) -> None:
    numbers = torch.zeros(4, device="cuda:0")

    def work() -> None:
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            with operation("add"):
                time.sleep(0.01)
        numbers.add_(1.0)

    with torch.cuda.stream(torch.cuda.Stream()), profile(tmp_path, window=0.2):
        with operation("iteration"):
            replay = capture(capture_cuda, work)
        replay()
        torch.cuda.synchronize()
    assert numbers.tolist() == [1.0] * 4


def test_recorded_parts_and_plain_ones_alternate_and_say_what_recording_costs(tmp_path: pathlib.Path) -> None:
    numbers = torch.zeros(4, device="cuda:0")
    with profile(tmp_path, window=1.0):
        end = time.perf_counter() + 2.0
        while time.perf_counter() < end:
            with operation("iteration"):
                for _ in range(5):
                    numbers.add_(1.0)
                torch.cuda.synchronize()
    windows = sorted(load_recordings(tmp_path), key=lambda one: one.begun)
    assert [one.slices[1].tolist() for one in windows[:3]] == [[WATCHED], [PLAIN], [WATCHED]]
    assert [len(one.host) > 0 for one in windows[:3]] == [True, False, True]
    assert read(tmp_path).processes[0].prices.event is not None


SCRIPT = """
import sys, torch
from rlstruct.profiling import operation, profile

with profile(sys.argv[1], window=600):
    with operation("on the CPU"):
        torch.ones(100) + 1
    with operation("copy"):
        numbers = torch.ones(1 << 20, device="cuda:0")
    for _ in range(200):
        with operation("on the GPU"):
            numbers.mul_(1.0001)
            torch.cuda.synchronize()
"""


def test_cuda_that_begins_within_a_window_is_recorded(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, timeout=100)
    (use,) = read(tmp_path).gpus
    assert use.operations["on the GPU"] > 0.0


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
