"""The diagonal normal distribution as functions of mean and logarithm of the standard deviation.

`rlstruct.functional.random.normal` draws the standard normal numbers that `sample` shifts and scales.
"""

from __future__ import annotations

import math

from torch import Tensor

from rlstruct.functional import random
from rlstruct.functional.checks import axes

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


def sample(mean: Tensor, log_std: Tensor, key: Tensor) -> Tensor:
    """Draw one vector for each row.

    Args:
        mean: mu.                                      [B, D] float
        log_std: log sigma.                            [B, D] or [D], same device
        key: see `rlstruct.functional.random`.         [B] int64

    Returns:
        mu + sigma * e, with e standard normal.  [B, D], dtype of mean
    """
    if mean.dim() != 2 or key.shape != mean.shape[:1] or log_std.shape not in (mean.shape, mean.shape[1:]):
        spread = "B D" if log_std.dim() > 1 else "D"
        axes("gaussian.sample", mean=(mean, "B D"), key=(key, "B"), log_std=(log_std, spread))
    noise = random.normal(key, (mean.shape[-1],)).to(mean.dtype)
    return mean + log_std.exp() * noise


def log_probability(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """Return the logarithm of the density at one action for each row.

    Args:
        mean: mu.                                  [..., D] float
        log_std: log sigma.                        [..., D] or [D], same device
        action: the action taken.                  [..., D]

    Returns:
        sum_d -((a - mu) / sigma)^2 / 2 - log sigma - log(2 pi) / 2.  [...], dtype of mean

    >>> import torch
    >>> log_probability(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2))
    tensor([-1.8379])
    """
    if not mean.shape or action.shape != mean.shape or log_std.shape not in (mean.shape, mean.shape[-1:]):
        spread = "... D" if log_std.dim() > 1 else "D"
        axes("gaussian.log_probability", mean=(mean, "... D"), action=(action, "... D"), log_std=(log_std, spread))
    deviation = (action.to(mean.dtype) - mean) * (-log_std).exp()
    return -(0.5 * deviation.square() + log_std + _HALF_LOG_TWO_PI).sum(dim=-1)


def entropy(log_std: Tensor) -> Tensor:
    """Return the differential entropy in nats of each row; negative for narrow distributions.

    Args:
        log_std: log sigma.  [..., D] float

    Returns:
        H = sum_d log sigma + (1 + log(2 pi)) / 2.  [...], dtype of log_std

    >>> import torch
    >>> entropy(torch.zeros(1, 2))
    tensor([2.8379])
    """
    axes("gaussian.entropy", log_std=(log_std, "... D"))
    return (log_std + 0.5 + _HALF_LOG_TWO_PI).sum(dim=-1)
