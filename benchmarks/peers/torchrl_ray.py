"""TorchRL's RayCollector: P actors of Ray, each with a SerialEnv over its share, one call of the policy per step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _serve import Task, serve
from torchrl.collectors import Collector
from torchrl.collectors.distributed import RayCollector
from torchrl_multisync import create_env, create_policy


class TorchRL:
    def __init__(self, task: Task) -> None:
        self.collector: Any = RayCollector(
            [partial(create_env, task.n_envs // task.n_processes, task.environment)] * task.n_processes,
            create_policy(),
            collector_class=Collector,
            frames_per_batch=task.n_envs * task.n_timesteps,
            total_frames=10**12,  # -1 ends it at once
            num_collectors=task.n_processes,
            # Without an address it would join any cluster that runs on this machine.
            ray_init_config={"address": "local", "log_to_driver": False, "include_dashboard": False},
            remote_configs={"num_cpus": 0.5, "num_gpus": 0},
            sync=True,
            collector_kwargs={"device": "cpu"},
        )
        self.batches = iter(self.collector)

    def collect(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(TorchRL, ["torchrl", "tensordict", "gymnasium", "torch", "ray"])
