"""Returns of the episodes that end while an auto-resetting batcher collects pieces of them. Layer 4."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstruct.core import TemporalDictTensor


class EpisodeReturns:
    """Adds up rewards on the device, from piece to piece, until somebody asks for the mean return."""

    def __init__(self) -> None:
        """Begin with no episode."""
        self._open: Tensor | None = None  # [B] reward of the episodes under way
        self._ended: Tensor | None = None  # [2] sum of the returns of ended episodes, and how many

    def add(self, steps: TemporalDictTensor) -> None:
        """Take the next piece of every row.

        Args:
            steps: with ``_observation/reward``, ``_observation/done`` and ``observation/initial_state``.  [B, T]
        """
        mask = steps.mask()
        reward = torch.where(mask, steps["_observation/reward"], 0.0)
        done = mask & steps["_observation/done"]
        if self._open is None or self._ended is None:
            self._open, self._ended = reward.new_zeros(len(reward)), reward.new_zeros(2)
        # An episode that was cut by a reset never ended: what it has earned counts for nobody.
        carried = torch.where(steps["observation/initial_state"][:, 0], 0.0, self._open)
        belongs = done.flip(1).cumsum(1).flip(1) > 0  # [B, T] to an episode that ends in this piece
        some = done.any(dim=1)
        ended = torch.where(some, carried, 0.0) + torch.where(belongs, reward, 0.0).sum(1)
        self._open = torch.where(some, 0.0, carried) + torch.where(belongs, 0.0, reward).sum(1)
        self._ended = self._ended + torch.stack([ended.sum(), done.sum().to(reward.dtype)])

    def read(self) -> float | None:
        """Return the mean return of the episodes that ended since the last call; None if none did."""
        if self._ended is None:
            return None
        total, count = self._ended.tolist()  # sync: once per look at the log
        self._ended = torch.zeros_like(self._ended)
        return total / count if count else None

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return what a checkpoint needs."""
        return {"open": self._open, "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Tensor | None], device: torch.device) -> None:
        """Go on where `state_dict` was called, with pieces that come on ``device``."""
        self._open, self._ended = (
            None if value is None else value.to(device, copy=True) for value in (state["open"], state["ended"])
        )
