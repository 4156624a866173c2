"""TorchRL's MultiSyncCollector: P workers, each with a SerialEnv over its share, one call of the policy per step.

With the argument ``ray`` its RayCollector: the same with P actors of Ray.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from _serve import Task, make_policy, serve
from tensordict.nn import TensorDictModule
from torchrl.envs import EnvBase, GymEnv, SerialEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor


def create_env(n_envs: int, environment: str) -> EnvBase:
    return SerialEnv(n_envs, partial(GymEnv, environment, device="cpu"))


def create_policy() -> Any:  # noqa: ANN401 - a TensorDictModule; None for its own random policy
    network = make_policy()
    return network and ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=OneHotCategorical,
    )


def multi_sync(create_envs: list[Any], policy: Any, n_frames: int) -> Any:  # noqa: ANN401
    from torchrl.collectors import MultiSyncCollector

    return MultiSyncCollector(
        create_envs, policy, frames_per_batch=n_frames, total_frames=-1, device="cpu", cat_results=0
    )


def with_ray(create_envs: list[Any], policy: Any, n_frames: int) -> Any:  # noqa: ANN401
    from torchrl.collectors import Collector
    from torchrl.collectors.distributed import RayCollector

    return RayCollector(
        create_envs,
        policy,
        collector_class=Collector,
        frames_per_batch=n_frames,
        total_frames=10**12,  # -1 ends it at once
        num_collectors=len(create_envs),
        # Without an address it would join any cluster that runs on this machine.
        ray_init_config={"address": "local", "log_to_driver": False, "include_dashboard": False},
        remote_configs={"num_cpus": 0.5, "num_gpus": 0},
        sync=True,
        collector_kwargs={"device": "cpu"},
    )


class TorchRL:
    def __init__(self, task: Task) -> None:
        create = with_ray if "ray" in sys.argv else multi_sync
        share = partial(create_env, task.n_envs // task.n_processes, task.environment)
        self.collector = create([share] * task.n_processes, create_policy(), task.n_envs * task.n_timesteps)
        self.batches = iter(self.collector)

    def collect(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(TorchRL, ["torchrl", "tensordict", "gymnasium", "torch", *(["ray"] if "ray" in sys.argv else [])])
