"""Counts for benchmarks/gpu.py: operators, launches and kernels of a step; hidden waits of a batch."""

from __future__ import annotations

from typing import Any

import torch
from _gpu_rungs import Rung, create_simulator
from torch.utils._python_dispatch import TorchDispatchMode

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import WorkerError

# Multiplications and additions of two 64-64 networks, with 2 logits and 1 value.


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
        16, ActorCriticAgent, create_simulator, agent_args={"model": ActorCritic(4, 2), "device": device},
        env_args={"n_envs": 4096, "device": device, "backend": "torch"}, seed=0, device=device, graph=graph,
    )  # fmt: skip
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
