"""PPO, DQN or PQN of rejax on a game of MinAtar, as gymnax has it; prints a line of JSON.

``rejax_returns.py rejax GAME SEED STEPS ALGORITHM`` trains with the settings of ours: batches, minibatches, learning
rate, exploration, and as many gradient steps. PQN's networks are equal, too: 64-64 units. PPO has an actor and a critic
of 128-128 units, and in all games the settings that ours has in Freeway; rejax has no convolutions. Where rejax has no
such setting, nothing is changed: the learning rate is constant, and DQN has 64-64 units (ours 128-128), one-step
targets and no duelling network. The final return is the mean of 128 episodes of the last network, in which PPO draws
its actions; one action of DQN and PQN in 200 is random.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import jax
import rejax

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "num_envs": 128, "num_steps": 32, "num_epochs": 4, "num_minibatches": 8, "learning_rate": 1e-3,
        "max_grad_norm": 0.5, "gae_lambda": 0.95, "clip_eps": 0.2, "vf_coef": 0.5, "ent_coef": 0.01,
        "agent_kwargs": {"hidden_layer_sizes": (128, 128), "activation": "relu"},
    },
    "dqn": {  # two gradient steps for each step of the 64 games
        "num_envs": 64, "num_epochs": 2, "batch_size": 128, "learning_rate": 5e-4, "max_grad_norm": 10,
        "buffer_size": 200_000, "fill_buffer": 5_000, "polyak": 0.98, "eps_start": 1.0, "eps_end": 0.05,
        "exploration_fraction": 0.05, "agent_kwargs": {"activation": "relu"},
    },
    "pqn": {
        "num_envs": 128, "num_steps": 32, "num_epochs": 2, "num_minibatches": 32, "td_lambda": 0.65,
        "learning_rate": 5e-4, "max_grad_norm": 10, "eps_start": 1.0, "eps_end": 0.05, "exploration_fraction": 0.1,
    },
}  # fmt: skip

if __name__ == "__main__":
    _, game, seed, n_steps, algorithm = sys.argv[1:]
    learner = rejax.get_algo(algorithm).create(
        env=game, total_timesteps=int(n_steps), eval_freq=int(n_steps), gamma=0.99, **SETTINGS[algorithm]
    )
    start = time.perf_counter()
    _, (_, returns) = jax.block_until_ready(jax.jit(learner.train)(jax.random.key(int(seed))))
    print(json.dumps({
        "final_return": round(float(returns[-1].mean()), 1), "final_std": round(float(returns[-1].std()), 1),
        "env_steps": int(n_steps), "seconds": round(time.perf_counter() - start, 1),
        "versions": {name: version(name) for name in ("rejax", "gymnax", "jax")},
    }))  # fmt: skip
