"""Spaces as simulators declare them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces

from rlstruct.spaces import Space


def box(low: Sequence[float], high: Sequence[float]) -> spaces.Box:
    """Make a Box of float32."""
    return spaces.Box(np.asarray(low, np.float32), np.asarray(high, np.float32))


def in_dtype(space: Space, dtype: torch.dtype) -> Space:
    """Turn a float32 space of frames into one of float64, if that is the dtype of a simulator."""
    if dtype != torch.float64 or not isinstance(space, spaces.Box) or space.dtype != np.float32:
        return space
    return spaces.Box(space.low.astype(np.float64), space.high.astype(np.float64), dtype=np.float64)
