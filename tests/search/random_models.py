"""Random games as tables: for the searches of this library, and for those of mctx that they must equal.

A game is a table of S states: what each action leads to, its reward and discount, the logits and values of a model.
Everything is drawn from numpy's uniform doubles, whose streams do not change with its version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

N_STATES = 40


@dataclass(frozen=True)
class Case:
    """So many games, searched alike.

    Attributes:
        method: "puct" or "gumbel".
        n_actions: A.
        n_simulations: of the search.
        max_depth: of the search.
        n_considered: actions that sequential halving begins with.
        two_players: discounts are -1, else 0.9; 0 at the end either way.
        masked: some actions are illegal.
        n_games: B.
    """

    method: str
    n_actions: int
    n_simulations: int
    max_depth: int | None
    n_considered: int
    two_players: bool
    masked: bool
    n_games: int = 100


CASES = [
    Case(method, n_actions, n_simulations, max_depth, n_considered, two_players, masked)
    for method in ("puct", "gumbel")
    for n_actions, n_simulations, max_depth, n_considered, two_players, masked in (
        (7, 64, None, 16, True, True),
        (7, 50, 5, 4, True, True),
        (2, 32, None, 2, True, False),
        (3, 17, 3, 3, True, False),
        (12, 40, None, 8, True, True),
        (4, 33, 6, 16, False, True),
        (9, 24, None, 5, False, False),
        (7, 100, 8, 7, True, True),
        (5, 1, None, 4, True, True),
        (6, 10, 2, 3, False, True),
    )
]


def tables(case: Case, number: int) -> dict[str, np.ndarray]:
    """Draw the games of a case.

    ``child`` int64, ``reward``, ``discount`` and ``logits`` [B, S, A], ``value`` [B, S], ``legal`` bool and ``noise``
    [B, A]; ``noise`` is Gumbel's, or Dirichlet's of concentration 1.
    """
    draw = np.random.Generator(np.random.PCG64(number)).random
    B, S, A = case.n_games, N_STATES, case.n_actions
    child = (draw((B, S, A)) * S).astype(np.int64)
    ends = draw((B, S, A)) < 0.1
    reward = np.where(draw((B, S, A)) < 0.3, draw((B, S, A)) * 2 - 1, 0.0)
    discount = np.where(ends, 0.0, -1.0 if case.two_players else 0.9)
    legal = draw((B, A)) < (0.6 if case.masked else 2.0)
    legal[np.arange(B), (draw(B) * A).astype(np.int64)] = True
    logits, value = draw((B, S, A)) * 4 - 2, draw((B, S)) * 2 - 1
    logits[:, 0] = np.where(legal, logits[:, 0], -np.inf)  # every game begins in state 0, and may come back to it
    u = draw((B, A))
    noise = -np.log(-np.log(u)) if case.method == "gumbel" else -np.log(u) * legal
    if case.method == "puct":
        noise = noise / noise.sum(1, keepdims=True)
    return {
        "child": child,
        "reward": reward,
        "discount": discount,
        "logits": logits,
        "value": value,
        "legal": legal,
        "noise": noise,
    }
