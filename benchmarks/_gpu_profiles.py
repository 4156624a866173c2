"""The profiler's view of a GPU next to NVML and CUDA's events: the part ``profiling`` of benchmarks/gpu.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlstruct.profiling import operation, profile, read

if TYPE_CHECKING:
    from gpu import Run

N_PROCESSES = 8
NO_CUDA, NO_NVML = "there is no CUDA device", "nvidia-ml-py is not installed: pip install nvidia-ml-py"
# One of several processes: kernels of 20 microseconds, between which the host sleeps.
SHORT_KERNELS = """
import sys, time, torch
from rlstruct.profiling import operation, profile
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
torch.cuda._sleep(1_000_000)
start.record()
torch.cuda._sleep(1_000_000)
end.record()
torch.cuda.synchronize()
cycles = int(20e-3 * 1_000_000 / start.elapsed_time(end))  # of 20 us; the events say milliseconds
with profile(sys.argv[1], window=600):
    end = time.perf_counter() + float(sys.argv[2])
    while time.perf_counter() < end:
        with operation("kernel"):
            torch.cuda._sleep(cycles)
            torch.cuda.synchronize()
        time.sleep(0.002)
"""


def profiling(run: Run) -> None:
    """NVML's utilisation, the busy share and the SM-weighted share side by side; kernels and CUDA's events."""
    for name, measure in WORK.items():
        if run.measured("profiling", work=name):
            continue
        needs_nvml = measure is not _matrices
        if run.device.type != "cuda":
            run.add(part="profiling", work=name, left_out=NO_CUDA)
        elif needs_nvml and importlib.util.find_spec("pynvml") is None:
            run.add(part="profiling", work=name, left_out=NO_NVML)
        elif run.left(60 if measure is _short_kernels else 10, "profiling"):
            with run.caught(part="profiling", work=name):
                run.add(part="profiling", work=name, **measure(run))


def _one_block(run: Run) -> dict[str, Any]:
    """A block of one thread, always busy: NVML calls that a full GPU."""
    seconds = 1.0 if run.quick else 4.0
    with tempfile.TemporaryDirectory() as folder:
        _keep_one_block_busy(run.device, 2.0)  # the driver's periods reach back
        with profile(folder, window=600.0), operation("busy"):
            _keep_one_block_busy(run.device, seconds)
        (use,) = read(folder).gpus
    found = {"nvml": use.nvml, "busy": use.busy, "weighted": use.weighted}
    met = use.nvml is not None and use.nvml >= 0.95 and use.weighted <= 0.01
    return {**found, "target": "NVML >= 0.95, weighted <= 0.01", "met": met}


def _keep_one_block_busy(device: torch.device, seconds: float) -> None:
    end = time.perf_counter() + seconds
    with torch.cuda.device(device):
        while time.perf_counter() < end:
            for _ in range(20):
                torch.cuda._sleep(10_000_000)  # clock cycles: some 6 ms
            torch.cuda.synchronize()


def _short_kernels(run: Run) -> dict[str, Any]:
    """Many processes that hardly use the GPU, which takes turns: the true share is the sum of theirs."""
    seconds = "2" if run.quick else "6"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "short_kernels.py"
        script.write_text(SHORT_KERNELS)
        folders = [Path(folder) / str(i) for i in range(N_PROCESSES)]
        started = [subprocess.Popen([sys.executable, str(script), str(one), seconds]) for one in folders]
        status = [process.wait() for process in started]
        if any(status):
            raise RuntimeError(f"processes of short kernels ended with {status}")
        uses = [use for one in folders for use in read(one).gpus]
    nvml = max((use.nvml for use in uses if use.nvml is not None), default=0.0)
    busy, of_one = sum(use.busy for use in uses), max(use.busy for use in uses)
    found = {"processes": N_PROCESSES, "nvml": nvml, "busy": busy, "busiest_process": of_one}
    return {**found, "ratio": nvml / busy, "target": "NVML >= 3 times busy", "met": nvml >= 3.0 * busy}


def _matrices(run: Run) -> dict[str, Any]:
    """Kernels one after the other without gaps: their sum is the time between two events."""
    size, count = (512, 50) if run.quick else (4096, 200)
    left = torch.randn(size, size, device=run.device)
    torch.mm(left, left)
    torch.cuda.synchronize(run.device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with tempfile.TemporaryDirectory() as folder:
        with profile(folder, window=600.0), operation("matrices"):
            start.record()
            for _ in range(count):
                torch.mm(left, left)
            end.record()
            torch.cuda.synchronize(run.device)
        (use,) = read(folder).gpus
    ratio = use.kernels / (1e-3 * start.elapsed_time(end))
    return {"kernels": use.kernels, "ratio": ratio, "target": "0.95 to 1.05", "met": abs(ratio - 1.0) <= 0.05}


WORK = {"one busy block": _one_block, "8 processes of 20 us kernels": _short_kernels, "matrices": _matrices}
"""Measurements, as functions of a run; tests/profiling/test_profiler_on_a_gpu.py takes them too."""
