"""What a device can do at most, and what a rung asks of it, for benchmarks/gpu.py. Layer 5."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import warp as wp
from _gpu_rungs import Rung, create_agent, create_simulator, synchronize
from torch.utils._python_dispatch import TorchDispatchMode

import rlstruct.sims.kernels  # noqa: F401 - starts Warp
from rlstruct.agents import ActorCritic
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import WorkerError

# What one step of CartPole writes when fused: two frames of 16 bytes, two rewards of 4, two actions of 8, 3 flags.
BYTES_PER_FUSED_STEP = 2 * 16 + 2 * 4 + 2 * 8 + 3
# Multiplications and additions of two 64-64 networks, with 2 logits and 1 value.
FLOPS_PER_DECISION = 2 * (4 * 64 + 64 * 64 + 64 * 2 + 4 * 64 + 64 * 64 + 64)
_N_FMA = 2048


@wp.kernel(enable_backward=False)
def fma_kernel(values: wp.array(dtype=wp.float32), n: int) -> None:
    """Eight independent chains of multiply-add per thread."""
    i = wp.tid()
    x = values[i]
    a, b, c, d = x, x + 1.0, x + 2.0, x + 3.0
    e, f, g, h = x + 4.0, x + 5.0, x + 6.0, x + 7.0
    for _ in range(n):
        a = a * 0.999 + x
        b = b * 0.999 + x
        c = c * 0.999 + x
        d = d * 0.999 + x
        e = e * 0.999 + x
        f = f * 0.999 + x
        g = g * 0.999 + x
        h = h * 0.999 + x
    values[i] = a + b + c + d + e + f + g + h


def _best(run: Any, device: torch.device, repeats: int) -> float:  # noqa: ANN401 - a callable
    run()
    synchronize(device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def limits(device: torch.device, quick: bool) -> dict[str, float]:
    """Measure the bandwidth of a copy and the rate of a kernel that only multiplies and adds.

    Returns:
        ``bytes_per_second`` (read and written) and ``flops_per_second`` (float32).
    """
    n_bytes = 1 << (30 if device.type == "cuda" else 26 if not quick else 22)
    source = torch.ones(n_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device, 5)
    n_threads = 1 << (21 if device.type == "cuda" else 10)
    values = wp.from_torch(source[:n_threads])
    stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
    where = wp.device_from_torch(device)

    def multiply() -> None:
        wp.launch(fma_kernel, n_threads, [values, _N_FMA], device=where, stream=stream)

    seconds = _best(multiply, device, 5)
    return {"bytes_per_second": 2 * n_bytes / copy, "flops_per_second": 16.0 * _N_FMA * n_threads / seconds}


class _Operators(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.n += 1
        return func(*args, **(kwargs or {}))


def launches(rung: Rung, device: torch.device) -> dict[str, float]:
    """Count per step: operators that Python calls, launches of the host, kernels of the device (CUDA only)."""
    rung.run()
    with _Operators() as operators:
        rung.run()
    counted = {"operators_per_step": operators.n / rung.steps}
    if device.type != "cuda":
        return counted
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        rung.run()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    host = sum("LaunchKernel" in name or "GraphLaunch" in name for name in names)
    return counted | {"launches_per_step": host / rung.steps, "kernels_per_step": len(kernels) / rung.steps}


def sync_clean(device: torch.device, graph: bool) -> str:
    """Collect whole batches where every wait for the device is an error; returns "clean", or what waited."""
    batcher = RL_Batcher(
        16,
        create_agent,
        create_simulator,
        agent_args={"model": ActorCritic(4, 2), "device": device},
        env_args={"n_envs": 4096, "device": device, "backend": "torch"},
        seed=0,
        device=device,
        graph=graph,
    )
    with batcher:
        batcher.reset()
        for _ in range(2):
            batcher.execute()
            batcher.get()
        torch.cuda.set_sync_debug_mode("error")
        try:
            batcher.execute()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        try:
            batcher.get()  # what execute met is raised here
        except WorkerError as error:
            return str(error).splitlines()[0]
    return "clean"
