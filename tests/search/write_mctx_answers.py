"""Write what mctx finds in random games into ``mctx_answers.npz``, for the tests.

Run it in an environment that has ``mctx==0.0.71`` and ``jax[cpu]``:
``python tests/search/write_mctx_answers.py``.
"""

from __future__ import annotations

import pathlib

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402 - after the setting
import mctx._src.seq_halving  # noqa: E402
import numpy as np  # noqa: E402
from random_models import CASES, Case, tables  # noqa: E402

FILE = pathlib.Path(__file__).with_name("mctx_answers.npz")


def answer(case: Case, number: int) -> dict[str, np.ndarray]:
    """Search the games of a case by mctx, with the noise of the tables instead of its noise."""
    games = {name: jnp.asarray(table) for name, table in tables(case, number).items()}
    rows = jnp.arange(case.n_games)
    low = jnp.finfo(jnp.float64).min
    logits = jnp.maximum(games["logits"], low)

    def step(params, key, action, state):
        after = games["child"][rows, state, action]
        reward, discount = games["reward"][rows, state, action], games["discount"][rows, state, action]
        output = mctx.RecurrentFnOutput(
            reward=reward, discount=discount, prior_logits=logits[rows, after], value=games["value"][rows, after]
        )
        return output, after

    state = jnp.zeros(case.n_games, dtype=jnp.int64)
    root = mctx.RootFnOutput(prior_logits=logits[rows, state], value=games["value"][rows, state], embedding=state)
    common = {
        "num_simulations": case.n_simulations,
        "max_depth": case.max_depth,
        "invalid_actions": 1.0 - games["legal"],
    }
    own = jax.random.dirichlet, jax.random.gumbel, jax.random.uniform
    jax.random.dirichlet = jax.random.gumbel = lambda *arguments, **named: games["noise"]
    jax.random.uniform = lambda key, shape, *arguments, **named: jnp.zeros(shape)  # breaks ties
    try:
        arguments = (None, jax.random.PRNGKey(0), root, step)
        if case.method == "puct":
            found = mctx.muzero_policy(*arguments, **common)
        else:
            found = mctx.gumbel_muzero_policy(*arguments, max_num_considered_actions=case.n_considered, **common)
    finally:
        jax.random.dirichlet, jax.random.gumbel, jax.random.uniform = own
    summary = found.search_tree.summary()
    answers = {
        "visits": np.asarray(summary.visit_counts, dtype=np.uint8),
        "value": np.asarray(summary.value, dtype=np.float32),
        "policy": np.asarray(found.action_weights, dtype=np.float32),
        "action": np.asarray(found.action, dtype=np.uint8),
    }
    return answers


if __name__ == "__main__":
    found = {f"{i}/{name}": value for i, case in enumerate(CASES) for name, value in answer(case, i).items()}
    for n_considered in range(17):
        for n in (1, 7, 16, 50, 64, 100, 500):
            plan = mctx._src.seq_halving.get_sequence_of_considered_visits(n_considered, n)
            found[f"plan/{n_considered}/{n}"] = np.asarray(plan, dtype=np.uint16)
    np.savez_compressed(FILE, **found)
