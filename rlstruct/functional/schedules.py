"""Numbers that change during a training."""

from __future__ import annotations


def linear_schedule(fraction_done: float, start: float, end: float, fraction: float = 1.0) -> float:
    """Go from one number to another in a straight line, and stay there.

    Args:
        fraction_done: completed share of the training, from 0.
        start: at fraction_done 0.
        end: from fraction_done ``fraction`` on.
        fraction: where the line ends, above 0.

    >>> [linear_schedule(fraction_done, 1.0, 0.5, fraction=0.5) for fraction_done in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 0.75, 0.5, 0.5]
    """
    return start + (end - start) * min(fraction_done / fraction, 1.0)


def epsilon_ladder(epsilon: float, n_envs: int, exponent: float) -> list[float]:
    """Give each environment its own share of random actions, from ``epsilon`` down.

    Horgan et al., "Distributed prioritized experience replay" (ICLR 2018), section 4.1: some environments explore while
    others follow the policy.

    Returns:
        epsilon^(1 + exponent * i / (N - 1)) for i = 0 .. N - 1, N = n_envs; the paper's exponent is 7.

    >>> epsilon_ladder(0.5, 3, 2.0)
    [0.5, 0.25, 0.125]
    """
    return [epsilon ** (1.0 + exponent * i / max(1, n_envs - 1)) for i in range(n_envs)]
