"""T single steps of a game of gymnax, each one jitted call with action 0: ``gymnax_steps.py TASK``."""

from __future__ import annotations

import gymnax
import jax
from serve import Batches, Task, serve


def steps(task: Task) -> Batches:
    """Take turns of T steps; each turn counts as one step."""
    env, params = gymnax.make(task.environment)
    action = jax.numpy.zeros(task.n_envs, dtype=int)

    @jax.jit
    def step(key: jax.Array, state: object) -> tuple[jax.Array, object, object]:
        key, now = jax.random.split(key)
        keys = jax.random.split(now, task.n_envs)
        frame, state, *rest = jax.vmap(env.step, in_axes=(0, 0, 0, None))(keys, state, action, params)
        return key, state, (frame, rest)

    key = jax.random.key(0)
    _, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, task.n_envs), params)
    while True:
        for _ in range(task.n_timesteps):
            key, state, seen = step(key, state)
        jax.block_until_ready((state, seen))
        yield 1


if __name__ == "__main__":
    serve(steps, "gymnax", "jax")
