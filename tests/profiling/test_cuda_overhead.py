"""Correction of a profile on CUDA, rehearsed with a clock, launches and kernels whose costs are known."""

from __future__ import annotations

import itertools
import json
import pathlib
import random
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from rlstruct.profiling import operation, operations, profile, read, recorded, recorder
from rlstruct.profiling.events import PLAIN, WATCHED, load_recordings

US = 1000
LAUNCH, KERNEL, RECORDING = 6 * US, 9 * US, 4 * US  # recording takes as long for each launch
N_LAUNCHES, N_ITERATIONS = 20, 1000


class Gpu:
    """A clock that only this test moves, one GPU that sleeps for the length of each kernel, and torch's profiler."""

    def __init__(self) -> None:
        self.now, self.free_at, self.correlation = 10**9, 0, itertools.count(1)
        self.events: list[dict[str, Any]] | None = None  # of an open profile
        self.activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA}

    def clock_ns(self) -> int:
        self.now += 30
        return self.now

    def launch(self, kernel: int = KERNEL) -> None:
        if self.events is not None:
            self.now += RECORDING
        begun, correlation = self.now, next(self.correlation)
        self.now += LAUNCH
        start = max(self.now, self.free_at)
        self.free_at = start + kernel
        if self.events is not None:
            found = {"ph": "X", "args": {"correlation": correlation, "device": 0, "stream": 7, "grid": [132, 1, 1]}}
            self.events += [
                {**found, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begun / US, "dur": LAUNCH / US},
                {**found, "cat": "kernel", "name": "sleep", "ts": start / US, "dur": kernel / US},
            ]

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)

    def start(self) -> None:
        self.events = []

    def stop(self) -> None:
        self.wait()

    def export_chrome_trace(self, path: str) -> None:
        pathlib.Path(path).write_text(json.dumps({"traceEvents": self.events, "baseTimeNanoseconds": 0}))
        self.events = None
        self.now += 150_000 * US


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    for module in (recorder, operations):
        monkeypatch.setattr(module, "clock_ns", gpu.clock_ns)
    monkeypatch.setattr("time.perf_counter_ns", gpu.clock_ns)
    monkeypatch.setattr("time.time_ns", gpu.clock_ns)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(recorder.nvml, "uuids", dict)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: gpu)
    return gpu


def iterate(gpu: Gpu, kernel: int = KERNEL) -> None:
    """Collect, which never waits for the GPU, and learn, which does."""
    with operation("iteration"):
        with operation("collect"):
            for _ in range(N_LAUNCHES):
                gpu.now += random.randint(1, 5) * US  # Python
                gpu.launch(kernel)
        with operation("learn"):
            for _ in range(2 * N_LAUNCHES):
                gpu.launch(kernel)
            gpu.wait()


@pytest.mark.parametrize("kernel", [KERNEL // 9, KERNEL], ids=["the host is slower", "the GPU is slower"])
def test_what_recording_costs_on_cuda_is_subtracted(gpu: Gpu, tmp_path: pathlib.Path, kernel: int) -> None:
    random.seed(0)
    begun = gpu.now
    for _ in range(N_ITERATIONS):
        iterate(gpu, kernel)
    true = (gpu.now - begun) / N_ITERATIONS  # ns
    with profile(tmp_path, window=0.15):
        for _ in range(N_ITERATIONS):
            iterate(gpu, kernel)
    report = read(tmp_path)
    (process,), (use,) = report.processes, report.gpus
    count = next(row.count for row in process.rows if row.path == ("iteration",))
    assert 1e9 * process.inclusive("iteration") / count == pytest.approx(true, rel=0.05)
    assert 1e9 * process.inclusive("iteration", corrected=False) / count > 1.05 * true
    if kernel < LAUNCH:  # otherwise recording takes time in which the host would have waited for the GPU
        assert process.prices.event == pytest.approx(1e-9 * RECORDING, rel=0.1)
    kinds = [(one.slices[1].tolist(), len(one.device) > 0) for one in load_recordings(tmp_path)]
    assert kinds[:3] == [([WATCHED], True), ([PLAIN], False), ([WATCHED], True)]
    watched = [one for one in load_recordings(tmp_path) if WATCHED in one.slices[1]]
    assert use.seconds == pytest.approx(sum(1e-9 * (one.ended - one.begun) for one in watched))
    assert use.kernels == pytest.approx(sum(1e-9 * kernel * len(one.device) for one in watched))


def test_a_capture_between_two_parts_is_recorded_and_the_window_goes_on(gpu: Gpu, tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=0.15):
        while len(load_if_any(tmp_path)) < 1:
            iterate(gpu)
        with operation("graph"), recorded(), operation("captured"):
            gpu.launch()
        for _ in range(N_ITERATIONS // 2):
            iterate(gpu)
    windows = sorted(load_recordings(tmp_path), key=lambda one: one.begun)
    assert [one.window for one in windows[:4]] == [0, 1, -1, 2]
    assert [one.slices[1].tolist() for one in windows[:5]] == [[WATCHED], [PLAIN], [WATCHED], [PLAIN], [WATCHED]]
    assert windows[2].paths[1:] == [("graph",), ("graph", "captured")]
    assert sum(one.ended - one.begun for one in windows if one.window >= 0) >= 0.15e9


def load_if_any(folder: pathlib.Path) -> list[pathlib.Path]:
    return list(folder.glob("*.operations.json"))


def test_everything_is_recorded_without_a_break_if_asked(gpu: Gpu, tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=0.05, operators=1.0):
        for _ in range(N_ITERATIONS // 5):
            iterate(gpu)
    assert {tuple(one.slices[1].tolist()) for one in load_recordings(tmp_path)} == {(WATCHED,)}
    assert read(tmp_path).processes[0].prices.event is None
