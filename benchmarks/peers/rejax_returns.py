"""PQN of rejax on a game of MinAtar, as gymnax has it; prints a line of JSON.

``rejax_returns.py rejax GAME SEED STEPS`` trains with purejaxql's settings, which are those of ours, too; only the
learning rate stays constant, as rejax's does. The final return is the mean of 128 episodes of the last network.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version

import jax
import rejax

if __name__ == "__main__":
    _, game, seed, n_steps = sys.argv[1:]
    sizes = {"num_envs": 128, "num_steps": 32, "num_epochs": 2, "num_minibatches": 32}
    algorithm = rejax.get_algo("pqn").create(
        env=game, total_timesteps=int(n_steps), eval_freq=int(n_steps), td_lambda=0.65, gamma=0.99, max_grad_norm=10,
        learning_rate=5e-4, eps_start=1.0, eps_end=0.05, exploration_fraction=0.1, **sizes,
    )  # fmt: skip
    start = time.perf_counter()
    _, (_, returns) = jax.block_until_ready(jax.jit(algorithm.train)(jax.random.key(int(seed))))
    print(json.dumps({
        "final_return": round(float(returns[-1].mean()), 1), "final_std": round(float(returns[-1].std()), 1),
        "env_steps": int(n_steps), "seconds": round(time.perf_counter() - start, 1),
        "versions": {name: version(name) for name in ("rejax", "gymnax", "jax")},
    }))  # fmt: skip
