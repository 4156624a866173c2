"""stable-baselines3's ``collect_rollouts`` (PPO), over DummyVecEnv or, with the argument ``subproc``, SubprocVecEnv.

SubprocVecEnv has one process per environment and knows no other way. The critic is a single layer, the least that PPO
allows, so that it costs about what the policy alone costs.
"""

from __future__ import annotations

import sys
from functools import partial

from _serve import Task, make_env, serve
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv
from torch import nn


class Rollouts:
    def __init__(self, task: Task) -> None:
        factories = [partial(make_env, task.environment)] * task.n_envs
        # fork starts 64 processes without 64 imports of torch; nothing has been computed yet that it could harm
        env: VecEnv = SubprocVecEnv(factories, start_method="fork") if "subproc" in sys.argv else DummyVecEnv(factories)
        policy = {"net_arch": {"pi": [64, 64], "vf": []}, "activation_fn": nn.Tanh}
        self.model = PPO("MlpPolicy", env, n_steps=task.n_timesteps, policy_kwargs=policy, device="cpu", seed=0)
        _, self.callback = self.model._setup_learn(total_timesteps=1 << 60)

    def collect(self) -> int:
        before = self.model.num_timesteps
        env = self.model.get_env()
        if env is None:
            raise RuntimeError("the model has lost its environment")
        self.model.collect_rollouts(env, self.callback, self.model.rollout_buffer, self.model.n_steps)
        return self.model.num_timesteps - before

    def close(self) -> None:
        env = self.model.get_env()
        if env is not None:
            env.close()


if __name__ == "__main__":
    serve(Rollouts, ["stable-baselines3", "gymnasium", "torch"])
