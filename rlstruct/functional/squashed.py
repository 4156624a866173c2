"""The diagonal normal distribution squashed by tanh into the open interval (-1, 1), as functions of its parameters.

Haarnoja et al., "Soft actor-critic algorithms and applications" (2018), appendix C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rlstruct.functional import gaussian


def log_slope(x: Tensor) -> Tensor:
    """Return the logarithm of the derivative of tanh, exact even where tanh(x)^2 rounds to 1.

    Args:
        x: argument of tanh.  [...] float

    Returns:
        log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x)).  [...]

    >>> log_slope(torch.tensor([0.0, 30.0]))
    tensor([  0.0000, -58.6137])
    """
    return 2.0 * (math.log(2.0) - x - softplus(-2.0 * x))


def sample_with_log_probability(mean: Tensor, log_std: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one vector for each row; gradients flow through the draw into mean and log sigma.

    Args:
        mean: mu, before the squashing.         [B, D] float
        log_std: log sigma.                     [B, D], same device
        key: see `rlstruct.functional.random`.  [B] int64

    Returns:
        ``(sample, log_probability)``: tanh(x) with x = mu + sigma * e and e standard normal, [B, D]; and the logarithm
        of its density, log N(x; mu, sigma) - sum_d log(1 - tanh(x_d)^2), [B].
    """
    x = gaussian.sample(mean, log_std, key)
    return torch.tanh(x), gaussian.log_probability(mean, log_std, x) - log_slope(x).sum(dim=-1)
