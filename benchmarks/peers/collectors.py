"""Contenders that collect with other libraries, and bare loops: ``collectors.py TASK NAME``, a name of `COLLECTORS`.

The bare loop, gymnasium and EnvPool store nothing; the others keep whole batches.
"""

from __future__ import annotations

import multiprocessing
import sys
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from _serve import Contender, Task, act, make_env, make_policy, serve
from torch import nn


class BareLoop:
    """The limit: a loop written by hand, one call of the policy and B calls of ``env.step``."""

    def __init__(self, task: Task) -> None:
        self.T = task.n_timesteps
        self.envs = [make_env(task.environment) for _ in range(task.n_envs)]
        self.policy = make_policy()
        self.observation = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(self.envs)])

    def collect(self) -> int:
        observation, policy, envs = self.observation, self.policy, self.envs
        for _ in range(self.T):
            actions = list(act(policy, observation).numpy())  # faster through gymnasium than integers
            for index, env in enumerate(envs):
                frame, _reward, terminated, truncated, _info = env.step(actions[index])
                if terminated or truncated:
                    frame, _info = env.reset()
                observation[index] = frame
        return self.T * len(envs)

    def close(self) -> None:
        for env in self.envs:
            env.close()


def loop_in_process(task: Task, pipe: Connection) -> None:
    torch.set_num_threads(1)
    loop = BareLoop(task)
    with torch.no_grad():
        while pipe.recv():
            pipe.send(loop.collect())


class BareLoops:
    """P processes, each with its own bare loop over its share; they meet once per batch."""

    def __init__(self, task: Task) -> None:
        share = Task(task.share, 1, task.n_timesteps, task.environment)
        context = multiprocessing.get_context("spawn")
        self.pipes = []
        for _ in range(task.n_processes):
            ours, theirs = context.Pipe()
            context.Process(target=loop_in_process, args=(share, theirs), daemon=True).start()
            self.pipes.append(ours)

    def collect(self) -> int:
        for pipe in self.pipes:
            pipe.send(True)
        return sum(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(False)


def bare_loop(task: Task) -> Contender:
    return BareLoop(task) if task.n_processes == 1 else BareLoops(task)


class Gymnasium:
    """A vector environment in mode SAME_STEP: in the default mode the row after an end is a reset and no step."""

    def __init__(self, kind: str, task: Task) -> None:
        from gymnasium import vector

        make = getattr(vector, kind)
        same_step = vector.AutoresetMode.SAME_STEP
        self.env = make([partial(make_env, task.environment)] * task.n_envs, autoreset_mode=same_step)
        self.T, self.B = task.n_timesteps, task.n_envs
        self.policy = make_policy()
        self.observation, _ = self.env.reset(seed=0)

    def collect(self) -> int:
        observation = self.observation
        for _ in range(self.T):
            observation, *_ = self.env.step(act(self.policy, observation).numpy())
        self.observation = observation
        return self.T * self.B

    def close(self) -> None:
        self.env.close()


class EnvPool:
    """Environments in C++. The row after an episode's end is a reset and no step; these rows are not counted."""

    def __init__(self, task: Task) -> None:
        import envpool

        self.env: Any = envpool.make(
            task.environment, env_type="gymnasium", num_envs=task.n_envs, num_threads=task.n_processes, seed=0
        )
        self.T, self.policy = task.n_timesteps, make_policy()
        self.observation, _ = self.env.reset()

    def collect(self) -> int:
        observation, steps = self.observation, 0
        for _ in range(self.T):
            observation, *_, info = self.env.step(act(self.policy, observation).numpy().astype(np.int32))
            steps += int(np.count_nonzero(info["elapsed_step"]))
        self.observation = observation
        return steps

    def close(self) -> None:
        self.env.close()


class StableBaselines3:
    """``collect_rollouts`` of PPO. SubprocVecEnv has one process per environment and knows no other way.

    The critic is a single layer, the least that PPO allows, so that it costs about what the policy alone costs.
    """

    def __init__(self, kind: str, task: Task) -> None:
        from stable_baselines3 import PPO
        from stable_baselines3.common import vec_env

        # fork starts 64 processes without 64 imports of torch; nothing has been computed yet that it could harm
        how = {"start_method": "fork"} if kind == "SubprocVecEnv" else {}
        self.env = getattr(vec_env, kind)([partial(make_env, task.environment)] * task.n_envs, **how)
        policy = {"net_arch": {"pi": [64, 64], "vf": []}, "activation_fn": nn.Tanh}
        self.model = PPO("MlpPolicy", self.env, n_steps=task.n_timesteps, policy_kwargs=policy, device="cpu", seed=0)
        _, self.callback = self.model._setup_learn(total_timesteps=1 << 60)

    def collect(self) -> int:
        before = self.model.num_timesteps
        self.model.collect_rollouts(self.env, self.callback, self.model.rollout_buffer, self.model.n_steps)
        return self.model.num_timesteps - before

    def close(self) -> None:
        self.env.close()


class TorchRL:
    """P workers, or with Ray P actors, each with a SerialEnv over its share, one call of the policy per step."""

    def __init__(self, on_ray: bool, task: Task) -> None:
        from torchrl import collectors

        share = partial(self.create_env, task.share, task.environment)
        given = [share] * task.n_processes, self.create_policy()
        common: dict[str, Any] = {"frames_per_batch": task.n_envs * task.n_timesteps}
        if on_ray:
            from torchrl.collectors.distributed import RayCollector

            self.collector = RayCollector(
                *given, **common, collector_class=collectors.Collector, num_collectors=task.n_processes, sync=True,
                total_frames=10**12,  # -1 ends it at once
                # Without an address it would join any cluster that runs on this machine.
                ray_init_config={"address": "local", "log_to_driver": False, "include_dashboard": False},
                remote_configs={"num_cpus": 0.5, "num_gpus": 0}, collector_kwargs={"device": "cpu"},
            )  # fmt: skip
        else:
            self.collector = collectors.MultiSyncCollector(
                *given, **common, total_frames=-1, device="cpu", cat_results=0
            )
        self.batches = iter(self.collector)

    @staticmethod
    def create_env(n_envs: int, environment: str) -> Any:  # noqa: ANN401 - of TorchRL
        from torchrl.envs import GymEnv, SerialEnv

        return SerialEnv(n_envs, partial(GymEnv, environment, device="cpu"))

    @staticmethod
    def create_policy() -> Any:  # noqa: ANN401 - a TensorDictModule
        from tensordict.nn import TensorDictModule
        from torchrl.modules import OneHotCategorical, ProbabilisticActor

        network = TensorDictModule(make_policy(), in_keys=["observation"], out_keys=["logits"])
        return ProbabilisticActor(
            network, in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical
        )

    def collect(self) -> int:
        return int(next(self.batches).numel())

    def close(self) -> None:
        self.collector.shutdown()


class RLlib:
    """Env runners: P actors of Ray, each with a vector environment over its share."""

    def __init__(self, task: Task) -> None:
        import ray
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.rllib.env.env_runner_group import EnvRunnerGroup

        ray.init("local", log_to_driver=False, include_dashboard=False)
        network = DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh")
        runners = {"num_env_runners": task.n_processes, "num_envs_per_env_runner": task.share}
        config = (
            PPOConfig()
            .environment(task.environment)
            .env_runners(**runners, num_cpus_per_env_runner=0.5, rollout_fragment_length=task.n_timesteps)
            .rl_module(model_config=network)
        )
        self.group = EnvRunnerGroup(config=config, local_env_runner=False)
        self.n_steps = task.share * task.n_timesteps

    def collect(self) -> int:
        n_steps = self.n_steps
        found: list[list[Any]] = self.group.foreach_env_runner(
            lambda runner: runner.sample(num_timesteps=n_steps), local_env_runner=False
        )
        return sum(len(episode) for episodes in found for episode in episodes)

    def close(self) -> None:
        import ray

        self.group.stop()
        ray.shutdown()


COLLECTORS: dict[str, tuple[Any, ...]] = {  # what makes it, and the packages that it uses
    "bare": (bare_loop,),
    "sync": (partial(Gymnasium, "SyncVectorEnv"),),
    "async": (partial(Gymnasium, "AsyncVectorEnv"),),
    "envpool": (EnvPool, "envpool"),
    "sb3_dummy": (partial(StableBaselines3, "DummyVecEnv"), "stable-baselines3"),
    "sb3_subproc": (partial(StableBaselines3, "SubprocVecEnv"), "stable-baselines3"),
    "torchrl": (partial(TorchRL, False), "torchrl", "tensordict"),
    "torchrl_ray": (partial(TorchRL, True), "torchrl", "tensordict", "ray"),
    "rllib": (RLlib, "ray"),
}

if __name__ == "__main__":
    serve(*COLLECTORS[sys.argv[2]])
