"""Numbers that change during a training."""

from __future__ import annotations


def linear_schedule(fraction_done: float, start: float, end: float, fraction: float = 1.0) -> float:
    """Change linearly from one number to another, then stay there.

    Args:
        fraction_done: completed share of the training, 0 or more.
        start: value at fraction_done 0.
        end: value from fraction_done ``fraction`` on.
        fraction: end of the linear part, above 0.

    >>> [linear_schedule(fraction_done, 1.0, 0.5, fraction=0.5) for fraction_done in (0.0, 0.25, 0.5, 1.0)]
    [1.0, 0.75, 0.5, 0.5]
    """
    return start + (end - start) * min(fraction_done / fraction, 1.0)


def epsilon_ladder(epsilon: float, n_envs: int, exponent: float) -> list[float]:
    """Return each environment's share of random actions: ``epsilon`` for the first, less for each of the others.

    Horgan et al., "Distributed prioritized experience replay" (ICLR 2018), section 4.1: some environments explore while
    others follow the policy.

    Returns:
        epsilon^(1 + exponent * i / (N - 1)) for i = 0 .. N - 1, N = n_envs; the paper's exponent is 7.

    >>> epsilon_ladder(0.5, 3, 2.0)
    [0.5, 0.25, 0.125]
    """
    return [epsilon ** (1.0 + exponent * i / max(1, n_envs - 1)) for i in range(n_envs)]
