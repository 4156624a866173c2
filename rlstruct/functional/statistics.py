"""Means and scales over the real steps of padded batches."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.functional.learners import sum_over_learners


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the real steps; whatever stands on padding, also nan, does not count.

    Args:
        values: any shape, float.
        mask: 1 on real steps, 0 on padding.  Shape of values, float or bool, same device

    Returns:
        sum(mask * values) / max(sum(mask), 1).  [] of the dtype of values

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1.0, 1.0, 0.0]))
    tensor(2.)
    """
    real = mask.bool()
    return torch.where(real, values, 0.0).sum() / real.sum().clamp(min=1)


def masked_means(mask: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Average several tensors at once, each as `masked_mean` does, in few operations.

    Args:
        mask: 1 on real steps, 0 on padding.  Any shape, float or bool
        values: at least one, all of that shape, of one float dtype, on the same device.

    Returns:
        One mean for each.  [] of the dtype of values

    >>> masked_means(torch.tensor([1, 1, 0]), torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0.0, 5.0, 9.0]))
    (tensor(2.), tensor(2.5000))
    """
    real = mask.bool()
    sums = torch.where(real, torch.stack(values), 0.0).flatten(1).sum(1)
    return (sums / real.sum().clamp(min=1)).unbind()


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale the real steps to mean 0 and variance 1, over the batches of all learners of a training.

    Not part of the policy-gradient theorem: it makes one step size fit rewards of any scale (Andrychowicz et al.,
    "What matters in on-policy reinforcement learning?", 2020, section 3.4, finds it harmless).

    Args:
        values: any shape, float.
        mask: 1 on real steps, 0 on padding.  Shape of values, float or bool, same device
        epsilon: added to the standard deviation, so that equal values become 0.

    Returns:
        (values - mean) / (std + epsilon) on real steps, 0 on padding, mean and (biased) std over the real steps.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]))
    tensor([-1.,  1.,  0.])
    """
    real = mask.bool()
    counted = torch.stack([real, torch.where(real, values, 0.0)]).flatten(1).sum(1)
    n, total = sum_over_learners(counted).unbind()
    n = n.clamp(min=1)
    centred = torch.where(real, values - total / n, 0.0)
    deviation = (sum_over_learners(centred.square().sum()) / n).sqrt()
    return centred / (deviation + epsilon)
