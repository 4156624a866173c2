"""Iterations of rejax, or one of their parts, each one jitted call: ``rejax_iterations.py TASK NAME PART``.

An iteration collects a batch and learns from it. A part is measured alone, so the parts need not add up to the whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import rejax
from iterations import CAPACITY, NETWORKS, SETTINGS, keep_cores
from jax import numpy as jnp
from serve import Batches, Task, serve

COMMON = {"learning_rate": 1e-3, "gamma": 0.99, "max_grad_norm": 0.5}


def create(algorithm: str, task: Task) -> Any:  # noqa: ANN401 - rejax's own classes
    settings = SETTINGS[algorithm, task.environment]
    network = {"hidden_layer_sizes": NETWORKS[algorithm, task.environment], "activation": "relu"}
    if algorithm != "ppo":  # the others have these sizes in any case, and PQN layer normalisation
        network = {"activation": "relu"} if algorithm == "dqn" else {}
    sizes = {"num_envs": task.n_envs}
    if algorithm == "dqn":  # an iteration takes one step in each environment
        chosen = {"num_epochs": settings["n_updates"], "batch_size": settings["batch_size"]}
        chosen |= {"buffer_size": CAPACITY, "fill_buffer": 0}
    else:
        sizes["num_steps"] = task.n_timesteps
        chosen = {"num_epochs": settings["n_epochs"], "num_minibatches": settings["n_minibatches"]}
    return rejax.get_algo(algorithm).create(
        env=task.environment, agent_kwargs=network, total_timesteps=10_000_000, **sizes, **chosen, **COMMON
    )


def parts(algorithm: Any) -> dict[str, Callable[[Any], Any]]:  # noqa: ANN401
    """Return functions of a train state; each returns the next one, or numbers that must be computed."""

    def simulator(state: Any) -> Any:  # noqa: ANN401
        action = jnp.zeros(algorithm.num_envs, dtype=int)

        def step(now: Any, _: None) -> tuple[Any, Any]:  # noqa: ANN401
            rng, new = jax.random.split(now.rng)
            keys = jax.random.split(new, algorithm.num_envs)
            frame, env_state, reward, done, _info = algorithm.vmap_step(
                keys, now.env_state, action, algorithm.env_params
            )
            return now.replace(rng=rng, env_state=env_state, last_obs=frame), (frame, reward, done)

        return jax.lax.scan(step, state, None, algorithm.num_steps)

    def advantages(state: Any) -> Any:  # noqa: ANN401
        reward = jnp.ones((algorithm.num_steps, algorithm.num_envs))
        zeros = reward * 0.0
        if hasattr(algorithm, "calculate_targets"):  # PQN
            steps = rejax.algos.pqn.Trajectory(zeros, zeros, zeros[..., None], reward, zeros)
            return algorithm.calculate_targets(steps, zeros[0])
        steps = rejax.algos.ppo.Trajectory(zeros, zeros, zeros, reward, reward, zeros)
        return algorithm.calculate_gae(steps, state.last_done * 1.0)

    return {
        "iteration": algorithm.train_iteration,
        "collect": lambda state: algorithm.collect_trajectories(state, *([0.1] if "pqn" in sys.argv else [])),
        "simulator": simulator,
        "advantages": advantages,
    }


def iterations(task: Task) -> Batches:
    """Take turns of a part; each counts as the environment steps of an iteration."""
    algorithm = create(sys.argv[2], task)
    state = algorithm.init_state(jax.random.key(0))
    run = jax.jit(parts(algorithm)[sys.argv[3]])
    while True:
        result = jax.block_until_ready(run(state))
        state = result if sys.argv[3] == "iteration" else state
        yield task.n_envs * task.n_timesteps


if __name__ == "__main__":
    keep_cores()
    serve(iterations, "rejax", "jax", "gymnax")
