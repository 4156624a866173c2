"""stable-baselines3's A2C, PPO or DQN on CartPole-v1 with the settings that rl-baselines3-zoo publishes, until 475.

Run: ``python sb3_training.py a2c|ppo|dqn SEED``; writes one line of JSON. The clock stands still during evaluations,
which play 100 episodes at once: greedily and, except for DQN, also with actions drawn from the policy. Training ends
with the zoo's last step, or when every kind of evaluation has reached 475.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

TARGET, EPISODES = 475.0, 100

# hyperparams/a2c.yml, hyperparams/ppo.yml and hyperparams/dqn.yml of rl-baselines3-zoo, "CartPole-v1"
ZOO: dict[str, dict[str, Any]] = {
    "a2c": {
        "algorithm": A2C, "n_envs": 8, "n_steps": 500_000, "interval": 10_000, "kinds": ("drawn", "greedy"),
        "settings": {"ent_coef": 0.0},
    },
    "ppo": {
        "algorithm": PPO, "n_envs": 8, "n_steps": 100_000, "interval": 2_500, "kinds": ("drawn",),
        "settings": {
            "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0,
            "learning_rate": lambda left: 0.001 * left, "clip_range": lambda left: 0.2 * left,
        },
    },
    "dqn": {
        "algorithm": DQN, "n_envs": 1, "n_steps": 50_000, "interval": 2_000, "kinds": ("greedy",),
        "settings": {
            "learning_rate": 2.3e-3, "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "gamma": 0.99,
            "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128, "exploration_fraction": 0.16,
            "exploration_final_eps": 0.04, "policy_kwargs": {"net_arch": [256, 256]},
        },
    },
}  # fmt: skip


def evaluate(model: BaseAlgorithm, kind: str, seed: int) -> float:
    """Play the first episode of 100 environments, and return the mean return."""
    env = gymnasium.make_vec("CartPole-v1", EPISODES, vectorization_mode="vector_entry_point")
    observation, _ = env.reset(seed=seed)
    returns, running = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while running.any():
        action, _ = model.predict(observation, deterministic=kind == "greedy")
        observation, reward, terminated, truncated, _ = env.step(action)
        returns += reward * running
        running &= ~(terminated | truncated)
    return float(returns.mean())


class Watch(BaseCallback):
    """Evaluates now and then, stops the clock meanwhile, and ends the training when all kinds have reached 475."""

    def __init__(self, interval: int, kinds: tuple[str, ...], seed: int) -> None:
        super().__init__()
        self.interval, self.kinds, self.seed = interval, kinds, seed
        self.due, self.paused, self.start = interval, 0.0, 0.0
        self.reached: dict[str, dict[str, float]] = {}
        self.returns: dict[str, dict[int, float]] = {kind: {} for kind in kinds}

    def _on_training_start(self) -> None:
        self.start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self.start - self.paused

    def _on_step(self) -> bool:
        if self.num_timesteps < self.due:
            return True
        self.due += self.interval
        seconds, at = self.seconds(), time.perf_counter()
        for number, kind in enumerate(self.kinds):
            value = evaluate(self.model, kind, 10_000_000 * (self.seed + 1) + 2 * self.num_timesteps + number)
            self.returns[kind][self.num_timesteps] = round(value, 1)
            if value >= TARGET and kind not in self.reached:
                self.reached[kind] = {"seconds": seconds, "env_steps": self.num_timesteps}
        self.paused += time.perf_counter() - at
        return len(self.reached) < len(self.kinds)


def main(name: str, seed: int) -> None:
    torch.set_num_threads(1)
    zoo = ZOO[name]
    env = make_vec_env("CartPole-v1", zoo["n_envs"], seed=seed)
    model = zoo["algorithm"]("MlpPolicy", env, seed=seed, device="cpu", **zoo["settings"])
    train, learning = model.train, [0.0]

    def timed(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on
        start = time.perf_counter()
        train(*args, **kwargs)
        learning[0] += time.perf_counter() - start

    model.train = timed  # type: ignore[method-assign]
    watch = Watch(zoo["interval"], zoo["kinds"], seed)
    model.learn(zoo["n_steps"], callback=watch)
    answer = {
        "seconds": watch.seconds(), "learning": learning[0], "env_steps": model.num_timesteps, "reached": watch.reached,
        "returns": watch.returns, "versions": {name: version(name) for name in ("stable-baselines3", "torch")},
    }  # fmt: skip
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
