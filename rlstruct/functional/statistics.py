"""Means and scales over the real steps of padded batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlstruct.functional.all_reduce import sum_over_learners
from rlstruct.functional.checks import same_shape


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Average over the real steps. Padding is ignored, even where it is nan.

    Args:
        values: any shape, float.
        mask: 1 on real steps, 0 on padding.  Shape of values, float or bool, same device

    Returns:
        sum(mask * values) / max(sum(mask), 1).  [] of the dtype of values

    >>> masked_mean(torch.tensor([1.0, 3.0, float("nan")]), torch.tensor([1.0, 1.0, 0.0]))
    tensor(2.)
    """
    if values.shape != mask.shape:
        same_shape("masked_mean", values=values, mask=mask)
    real = mask.bool()
    return torch.where(real, values, 0.0).sum() / real.sum().clamp(min=1)


def masked_means(mask: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """Average several tensors of one shape and float dtype, as `masked_mean` does but in fewer operations.

    >>> masked_means(torch.tensor([1, 1, 0]), torch.tensor([1.0, 3.0, 9.0]), torch.tensor([0.0, 5.0, 9.0]))
    (tensor(2.), tensor(2.5000))
    """
    for one in values:
        same_shape("masked_means", mask=mask, values=one)
    real = mask.bool()
    sums = torch.where(real, torch.stack(values), 0.0).flatten(1).sum(1)
    return (sums / real.sum().clamp(min=1)).unbind()


def whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Shift and scale the real steps to mean 0 and variance 1, over the batches of all learners of a training.

    This is not part of the policy-gradient theorem. It makes one step size fit rewards of any scale (Andrychowicz et
    al., "What matters in on-policy reinforcement learning?", 2020, section 3.4, find it harmless).

    The arguments are those of `masked_mean`, and ``epsilon``, which turns equal values into 0.

    Returns:
        (values - mean) / (std + epsilon) on real steps, 0 on padding; mean and (biased) std are over the real steps.

    >>> whiten(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 1.0, 0.0]))
    tensor([-1.,  1.,  0.])
    """
    return whiten_each([values], [mask], epsilon)[0]


def whiten_each(values: Sequence[Tensor], masks: Sequence[Tensor], epsilon: float = 1e-8) -> list[Tensor]:
    """Whiten each of several tensors, with as few sums over the learners as `whiten` needs for one.

    Each tensor has its own mask of the same shape, which may differ from tensor to tensor.
    """
    for one, mask in zip(values, masks, strict=True):
        same_shape("whiten", values=one, mask=mask)
    reals = [mask.bool() for mask in masks]
    values_or_zero = [torch.where(real, one, 0.0) for one, real in zip(values, reals, strict=True)]
    counted = [torch.stack([real, one]).flatten(1).sum(1) for one, real in zip(values_or_zero, reals, strict=True)]
    n, total = sum_over_learners(torch.stack(counted)).unbind(1)  # [K] each
    n = n.clamp(min=1)
    means = (total / n).unbind()
    centred = [torch.where(real, one - mean, 0.0) for one, real, mean in zip(values_or_zero, reals, means, strict=True)]
    squares = sum_over_learners(torch.stack([one.square().sum() for one in centred]))
    scales = ((squares / n).sqrt() + epsilon).unbind()
    return [one / scale for one, scale in zip(centred, scales, strict=True)]
