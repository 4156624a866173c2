"""A slow copy of a network, such as the target network of DQN and SAC."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from rlstruct.profiling import operation


class Follower:
    """Moves the weights of a copy towards those of a model, in place, and copies the buffers.

    Args:
        copied: has the parameters and buffers of ``model``, on the same device.
        model: learns.

    >>> slow, fast = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    >>> Follower(slow, fast).follow(1.0)
    >>> torch.equal(slow.weight, fast.weight)
    True
    """

    def __init__(self, copied: nn.Module, model: nn.Module) -> None:
        """Find the weights once: a walk through the modules costs more than the move."""
        self._weights = list(copied.parameters()), list(model.parameters())
        self._buffers = list(zip(copied.buffers(), model.buffers(), strict=True))

    @operation("weights")
    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Take ``rate`` of the model and keep the rest; 1 copies."""
        get_ema_multi_avg_fn(1.0 - rate)(*self._weights, 0)  # type: ignore[no-untyped-call]
        for mine, theirs in self._buffers:
            mine.copy_(theirs)
