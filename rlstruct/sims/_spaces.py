"""What simulators do with spaces: explore them, and declare them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.functional.random import randint, uniform
from rlstruct.spaces import Space

EXPLORE_STREAM = 1 << 20
"""Of a step's key: apart from what transitions draw from the same key."""


def random_action(space: Space, key: Tensor) -> Tensor:
    """Draw an action for each key, uniformly.

    Args:
        space: Discrete, or a Box with the same bounds in every entry.
        key: [B] int64

    Returns:
        [B] int64, or [B, ...] float32.

    Raises:
        TypeError: another space.
    """
    if isinstance(space, spaces.Discrete) and space.start == 0:
        return randint(key, int(space.n), (), EXPLORE_STREAM)
    if isinstance(space, spaces.Box) and space.is_bounded() and space.dtype == np.float32:
        low, high = float(space.low.min()), float(space.high.max())
        if (space.low == low).all() and (space.high == high).all():
            return uniform(key, space.shape, EXPLORE_STREAM).mul_(high - low).add_(low)
    raise TypeError(
        f"exploration: got the action space {space}, expected Discrete from 0 or a float32 Box with the same bounds "
        "in every entry. Draw the actions yourself and give rollout the plan."
    )


def box(low: Sequence[float], high: Sequence[float]) -> spaces.Box:
    """Make a Box of float32."""
    return spaces.Box(np.asarray(low, np.float32), np.asarray(high, np.float32))


def in_dtype(space: Space, dtype: torch.dtype) -> Space:
    """Turn a float32 space of frames into one of float64, if that is the dtype of a simulator."""
    if dtype != torch.float64 or not isinstance(space, spaces.Box) or space.dtype != np.float32:
        return space
    return spaces.Box(space.low.astype(np.float64), space.high.astype(np.float64), dtype=np.float64)
