"""Contenders that collect with other libraries, and bare loops: ``collectors.py TASK NAME``, a name of `COLLECTORS`.

The bare loop, gymnasium and EnvPool store nothing; the others keep whole batches.
"""

from __future__ import annotations

import multiprocessing
import sys
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from serve import Batches, Task, act, make_env, make_policy, serve
from torch import nn


def bare_loop(task: Task) -> Batches:
    """The limit: a loop written by hand, one call of the policy and B calls of ``env.step``."""
    envs = [make_env(task.environment) for _ in range(task.n_envs)]
    policy = make_policy()
    observation = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(envs)])
    while True:
        for _ in range(task.n_timesteps):
            actions = list(act(policy, observation).numpy())  # faster through gymnasium than integers
            for index, env in enumerate(envs):
                frame, _reward, terminated, truncated, _info = env.step(actions[index])
                if terminated or truncated:
                    frame, _info = env.reset()
                observation[index] = frame
        yield task.n_timesteps * task.n_envs


def loop_in_process(task: Task, pipe: Connection) -> None:
    torch.set_num_threads(1)
    loop = bare_loop(task)
    with torch.no_grad():
        while pipe.recv():
            pipe.send(next(loop))


def bare_loops(task: Task) -> Batches:
    """P processes, each with its own bare loop over its share; they meet once per batch."""
    share = Task(task.share, 1, task.n_timesteps, task.environment)
    context = multiprocessing.get_context("spawn")
    pipes = []
    for _ in range(task.n_processes):
        ours, theirs = context.Pipe()
        context.Process(target=loop_in_process, args=(share, theirs), daemon=True).start()
        pipes.append(ours)
    while True:
        for pipe in pipes:
            pipe.send(True)
        yield sum(pipe.recv() for pipe in pipes)


def bare(task: Task) -> Batches:
    return bare_loop(task) if task.n_processes == 1 else bare_loops(task)


def gymnasium_vector(kind: str, task: Task) -> Batches:
    """A vector environment in mode SAME_STEP: in the default mode the row after an end is a reset and no step."""
    from gymnasium import vector

    same_step = vector.AutoresetMode.SAME_STEP
    envs = [partial(make_env, task.environment)] * task.n_envs
    policy = make_policy()
    with closing(getattr(vector, kind)(envs, autoreset_mode=same_step)) as env:
        observation, _ = env.reset(seed=0)
        while True:
            for _ in range(task.n_timesteps):
                observation, *_ = env.step(act(policy, observation).numpy())
            yield task.n_timesteps * task.n_envs


def env_pool(task: Task) -> Batches:
    """Environments in C++. The row after an episode's end is a reset and no step; these rows are not counted."""
    import envpool

    policy = make_policy()
    env: Any = envpool.make(
        task.environment, env_type="gymnasium", num_envs=task.n_envs, num_threads=task.n_processes, seed=0
    )
    observation, _ = env.reset()
    while True:
        steps = 0
        for _ in range(task.n_timesteps):
            observation, *_, info = env.step(act(policy, observation).numpy().astype(np.int32))
            steps += int(np.count_nonzero(info["elapsed_step"]))
        yield steps


def stable_baselines3(kind: str, task: Task) -> Batches:
    """``collect_rollouts`` of PPO. SubprocVecEnv has one process per environment and knows no other way.

    The critic is a single layer, the least that PPO allows, so that it costs about what the policy alone costs.
    """
    from stable_baselines3 import PPO
    from stable_baselines3.common import vec_env

    # fork starts 64 processes without 64 imports of torch; nothing has been computed yet that it could harm
    how = {"start_method": "fork"} if kind == "SubprocVecEnv" else {}
    policy = {"net_arch": {"pi": [64, 64], "vf": []}, "activation_fn": nn.Tanh}
    with closing(getattr(vec_env, kind)([partial(make_env, task.environment)] * task.n_envs, **how)) as env:
        model = PPO("MlpPolicy", env, n_steps=task.n_timesteps, policy_kwargs=policy, device="cpu", seed=0)
        _, callback = model._setup_learn(total_timesteps=1 << 60)
        while True:
            before = model.num_timesteps
            model.collect_rollouts(env, callback, model.rollout_buffer, model.n_steps)
            yield model.num_timesteps - before


def sb3_sac(task: Task) -> Batches:
    """Gradient steps of SAC, after the collection of random steps: no collector, but served in the same way."""
    from stable_baselines3 import SAC

    n_random = task.n_envs * task.n_timesteps
    model = SAC("MlpPolicy", task.environment, batch_size=256, learning_starts=n_random, device="cpu")
    with torch.enable_grad():
        model.learn(n_random)
    while True:
        with torch.enable_grad():
            model.train(20, 256)
        yield 20


def torchrl_env(n_envs: int, environment: str) -> Any:  # noqa: ANN401 - of TorchRL
    from torchrl.envs import GymEnv, SerialEnv

    return SerialEnv(n_envs, partial(GymEnv, environment, device="cpu"))


def torchrl_policy() -> Any:  # noqa: ANN401 - a TensorDictModule
    from tensordict.nn import TensorDictModule
    from torchrl.modules import OneHotCategorical, ProbabilisticActor

    network = TensorDictModule(make_policy(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticActor(network, in_keys=["logits"], out_keys=["action"], distribution_class=OneHotCategorical)


def torchrl(on_ray: bool, task: Task) -> Batches:
    """P workers, or with Ray P actors, each with a SerialEnv over its share, one call of the policy per step."""
    from torchrl import collectors

    given = [partial(torchrl_env, task.share, task.environment)] * task.n_processes, torchrl_policy()
    common: dict[str, Any] = {"frames_per_batch": task.n_envs * task.n_timesteps}
    if on_ray:
        from torchrl.collectors.distributed import RayCollector

        collector = RayCollector(
            *given, **common, collector_class=collectors.Collector, num_collectors=task.n_processes, sync=True,
            total_frames=10**12,  # -1 ends it at once
            # Without an address it would join any cluster that runs on this machine.
            ray_init_config={"address": "local", "log_to_driver": False, "include_dashboard": False},
            remote_configs={"num_cpus": 0.5, "num_gpus": 0}, collector_kwargs={"device": "cpu"},
        )  # fmt: skip
    else:
        collector = collectors.MultiSyncCollector(*given, **common, total_frames=-1, device="cpu", cat_results=0)
    try:
        for batch in collector:
            yield int(batch.numel())
    finally:
        collector.shutdown()


def rllib(task: Task) -> Batches:
    """Env runners: P actors of Ray, each with a vector environment over its share."""
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
    group = EnvRunnerGroup(config=config, local_env_runner=False)
    n_steps = task.share * task.n_timesteps
    try:
        while True:
            found: list[list[Any]] = group.foreach_env_runner(
                lambda runner: runner.sample(num_timesteps=n_steps), local_env_runner=False
            )
            yield sum(len(episode) for episodes in found for episode in episodes)
    finally:
        group.stop()
        ray.shutdown()


COLLECTORS: dict[str, tuple[Any, ...]] = {  # what makes it, and the packages that it uses
    "bare": (bare,),
    "sync": (partial(gymnasium_vector, "SyncVectorEnv"),),
    "async": (partial(gymnasium_vector, "AsyncVectorEnv"),),
    "envpool": (env_pool, "envpool"),
    "sb3_dummy": (partial(stable_baselines3, "DummyVecEnv"), "stable-baselines3"),
    "sb3_subproc": (partial(stable_baselines3, "SubprocVecEnv"), "stable-baselines3"),
    "sb3_sac": (sb3_sac, "stable-baselines3"),
    "torchrl": (partial(torchrl, False), "torchrl", "tensordict"),
    "torchrl_ray": (partial(torchrl, True), "torchrl", "tensordict", "ray"),
    "rllib": (rllib, "ray"),
}

if __name__ == "__main__":
    serve(*COLLECTORS[sys.argv[2]])
