"""Linear recurrences over time without a Python loop over the steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstruct.functional.checks import axes


def backward_recurrence(addend: Tensor, factor: Tensor) -> Tensor:
    """Solve ``x[b, t] = addend[b, t] + factor[b, t] * x[b, t + 1]`` with x = 0 after the last step.

    Steps are joined by doubling (Hillis and Steele, "Data parallel algorithms", CACM 1986): log2(T) operations on the
    whole batch instead of T small ones, which is faster on GPUs and CPUs. A loop adds in another order, so its results
    differ by rounding.

    Args:
        addend: [B, T] float
        factor: weight of the next step's value; 0 stops it.  [B, T], same dtype and device

    Returns:
        x.  [B, T], dtype and device of addend

    >>> backward_recurrence(torch.ones(1, 3), torch.full((1, 3), 0.5))
    tensor([[1.7500, 1.5000, 1.0000]])
    """
    axes("backward_recurrence", addend=(addend, "B T"), factor=(factor, "B T"))
    n_steps = addend.shape[1]
    reach = 1
    while reach < n_steps:
        # Invariant: x[t] = addend[t] + factor[t] * x[t + reach], with zeros after the end.
        addend = torch.addcmul(addend, factor, pad(addend[:, reach:], (0, reach)))
        factor = factor * pad(factor[:, reach:], (0, reach))
        reach *= 2
    return addend
