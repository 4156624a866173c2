"""Limits of a device, and the demands of a rung, for benchmarks/gpu.py."""

from __future__ import annotations

import statistics
import time
import traceback
from typing import Any

import torch
from _gpu_rungs import Rung, create_agent, create_simulator, synchronize
from torch.utils._python_dispatch import TorchDispatchMode

from rlstruct.agents import ActorCritic
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import WorkerError

# Multiplications and additions of two 64-64 networks, with 2 logits and 1 value.
FLOPS_PER_DECISION = 2 * (4 * 64 + 64 * 64 + 64 * 2 + 4 * 64 + 64 * 64 + 64)


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


def limits(device: torch.device, quick: bool) -> dict[str, float | str]:
    """Measure the bandwidth of a copy and the rate of a kernel that only multiplies and adds.

    Returns:
        ``bytes_per_second`` (read and written) and ``flops_per_second`` (float32), or why not.
    """
    n_bytes = 1 << (30 if device.type == "cuda" else 26 if not quick else 22)
    source = torch.ones(n_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device, 5)
    found = {"bytes_per_second": 2 * n_bytes / copy}
    try:
        from _gpu_kernels import FLOPS_PER_THREAD, multiply_add

        values = source[: 1 << (21 if device.type == "cuda" else 10)]
        seconds = _best(lambda: multiply_add(values), device, 5)
    except Exception as error:  # Warp is missing, or does not run here
        traceback.print_exception(error)
        return found | {"flops_left_out": f"{type(error).__name__}: {error}"}
    return found | {"flops_per_second": FLOPS_PER_THREAD * len(values) / seconds}


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
