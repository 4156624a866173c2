"""TorchRL's MultiSyncCollector: P workers, each with a SerialEnv over its share, one call of the policy per step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _serve import Task, make_policy, serve
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
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


class TorchRL:
    def __init__(self, task: Task) -> None:
        frames = task.n_envs * task.n_timesteps
        share = task.n_envs // task.n_processes
        self.collector: Any = MultiSyncCollector(
            [partial(create_env, share, task.environment)] * task.n_processes,
            create_policy(),
            frames_per_batch=frames,
            total_frames=-1,
            device="cpu",
            cat_results=0,
        )
        self.batches = iter(self.collector)

    def collect(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(TorchRL, ["torchrl", "tensordict", "gymnasium", "torch"])
