"""Gradient steps of SAC in sbx, which is JAX, or their products: ``sbx_sac.py TASK PART``; see ``sac_updates.py``."""

from __future__ import annotations

import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
from iterations import keep_cores
from sac_products import Networks, arguments, products
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


def sbx_products(_: Task) -> Batches:
    """Take turns of the products of 20 gradient steps, one jitted call as in sbx."""
    import jax
    from jax import numpy as jnp

    made = arguments(lambda *shape: jnp.ones(shape), lambda *shape: jnp.ones(shape) / shape[-2])

    @jax.jit
    def multiply(networks: Networks, *others: object) -> object:
        """Let each step read the last one's gradients as its weights, since a loop computes what never changes once."""
        first = products(networks, *others)
        return jax.lax.fori_loop(1, 20, lambda _, results: products(results[0], *others), first)

    while True:
        jax.block_until_ready(multiply(*made))
        yield 20


if __name__ == "__main__":
    keep_cores()
    serve({"steps": sbx_sac, "products": sbx_products}[sys.argv[2]])
