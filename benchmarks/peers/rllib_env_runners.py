"""RLlib's env runners: P actors of Ray, each with a vector environment and a 4-64-64-2 policy."""

from __future__ import annotations

from typing import Any

import ray
from _serve import Task, serve
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.env_runner_group import EnvRunnerGroup


class RLlib:
    def __init__(self, task: Task) -> None:
        ray.init("local", log_to_driver=False, include_dashboard=False)
        share = task.n_envs // task.n_processes
        config = (
            PPOConfig()
            .environment(task.environment)
            .env_runners(
                num_env_runners=task.n_processes,
                num_envs_per_env_runner=share,
                num_cpus_per_env_runner=0.5,
                rollout_fragment_length=task.n_timesteps,
            )
            .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
        )
        self.group = EnvRunnerGroup(config=config, local_env_runner=False)
        self.n_steps = share * task.n_timesteps

    def collect(self) -> int:
        n_steps = self.n_steps
        found: list[list[Any]] = self.group.foreach_env_runner(
            lambda runner: runner.sample(num_timesteps=n_steps), local_env_runner=False
        )
        return sum(len(episode) for episodes in found for episode in episodes)

    def close(self) -> None:
        self.group.stop()
        ray.shutdown()


if __name__ == "__main__":
    serve(RLlib, ["ray", "gymnasium", "torch"])
