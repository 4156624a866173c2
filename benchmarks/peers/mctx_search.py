"""Search Connect Four by mctx, compiled by XLA, once for every line of the standard input: writes the CPU seconds.

    python mctx_search.py GAMES SIMULATIONS puct|gumbel

Started by benchmarks/search.py in an environment that has ``mctx`` and ``jax[cpu]``. The rules, the network and the
noise are those of `rlstruct`: bitboards, a convolution of 64 filters of 4 x 4, a dense layer of 96.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp  # noqa: E402
import mctx  # noqa: E402

FULL = sum(0b111111 << (7 * c) for c in range(7))
BITS = jnp.array([[7 * c + 5 - r for c in range(7)] for r in range(6)], dtype=jnp.int64)


def weights(key: jax.Array) -> dict[str, jax.Array]:
    """Draw the network."""
    keys = jax.random.split(key, 4)
    shapes = {"filters": (64, 2, 4, 4), "dense": (768, 96), "actor": (96, 7), "critic": (96, 1)}
    scales = {"filters": 0.25, "dense": 0.05, "actor": 0.001, "critic": 0.1}
    return {
        name: scales[name] * jax.random.normal(k, shape, dtype=jnp.float32)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def judge(params: dict[str, jax.Array], mine: jax.Array, theirs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return masked logits and value."""
    both = jnp.stack([mine, theirs], 1)[:, :, None, None]
    board = ((both >> BITS) & 1).astype(jnp.float32)
    seen = jax.nn.relu(jax.lax.conv(board, params["filters"], (1, 1), "VALID")).reshape(len(mine), -1)
    features = jax.nn.relu(seen @ params["dense"])
    legal = (((mine | theirs)[:, None] >> BITS[0]) & 1) == 0
    logits = jnp.where(legal, features @ params["actor"], jnp.finfo(jnp.float32).min)
    return logits, (features @ params["critic"])[:, 0]


def four_in_line(stones: jax.Array) -> jax.Array:
    """Tell who has four in a line."""
    lines = jnp.zeros_like(stones)
    for direction in (1, 7, 6, 8):
        pairs = stones & (stones >> direction)
        lines = lines | (pairs & (pairs >> 2 * direction))
    return lines != 0


def step(params: dict[str, jax.Array], key: jax.Array, action: jax.Array, state: tuple) -> tuple:
    """Drop a stone."""
    mine, theirs = state
    stones, action = mine | theirs, action.astype(jnp.int64)
    legal = ((stones >> (7 * action + 5)) & 1) == 0
    after = jnp.where(legal, stones | (stones + (jnp.ones_like(action) << (7 * action))), stones)
    mine = mine | (after ^ stones)
    won = legal & four_in_line(mine)
    reward = won.astype(jnp.float32) - (~legal).astype(jnp.float32)
    over = won | ~legal | (after == FULL)
    logits, value = judge(params, theirs, mine)
    discount = jnp.where(over, 0.0, -1.0).astype(jnp.float32)
    output = mctx.RecurrentFnOutput(reward=reward, discount=discount, prior_logits=logits, value=value)
    return output, (theirs, mine)


def main() -> None:
    """Compile, then answer."""
    n_games, n_simulations, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    policy = mctx.muzero_policy if method == "puct" else mctx.gumbel_muzero_policy

    @jax.jit
    def search(params: dict[str, jax.Array], key: jax.Array, state: tuple) -> jax.Array:
        logits, value = judge(params, *state)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state)
        return policy(params, key, root, step, n_simulations).action

    params, key = weights(jax.random.PRNGKey(0)), jax.random.PRNGKey(1)
    empty = jnp.zeros(n_games, dtype=jnp.int64), jnp.zeros(n_games, dtype=jnp.int64)
    search(params, key, empty).block_until_ready()
    for _ in sys.stdin:
        start = time.process_time()
        search(params, key, empty).block_until_ready()
        sys.stdout.write(f"{time.process_time() - start}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
