"""Gradient steps of SAC in sbx, which is JAX: ``sbx_sac.py TASK``; see ``sac_updates.py``."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
from iterations import keep_cores
from serve import Batches, Task, serve


def sbx_sac(task: Task) -> Batches:
    """Take gradient steps, after the collection of random steps."""
    from sbx import SAC

    n_random = task.n_envs * task.n_timesteps
    model = SAC("MlpPolicy", task.environment, batch_size=256, learning_starts=n_random)
    model.learn(n_random)
    while True:
        model.train(20, 256)
        yield 20


if __name__ == "__main__":
    keep_cores()
    serve(sbx_sac)
