"""Gymnasium spaces as the tensors that the contract asks for: keys, dtypes, samples, bounds. Layer 3.

Written apart from `rlstruct.envs` on purpose: the conformance kit shares no code with what it checks.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

Space = gymnasium.Space[Any]

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
# Frames are often computed in float32 and bounds in float64: a rounding beyond the bound is no fault.
_ROUNDING = 1e-5


def leaves(space: Space, key: str) -> dict[str, Space]:
    """Flatten nested spaces into the keys of a DictTensor.

    Args:
        space: a space of one environment.
        key: the name of a plain space, such as ``"frame"``; nested ones continue it with ``/``.

    Returns:
        Key to plain space, in the space's own order.

    Raises:
        ValueError: a space has no fixed shape (Text, Graph, Sequence, …); the message names its key.

    >>> list(leaves(spaces.Tuple([spaces.Discrete(2), spaces.Dict(x=spaces.Discrete(3))]), "frame"))
    ['frame/0', 'frame/1/x']
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return {k: leaf for name, child in children for k, leaf in leaves(child, f"{key}/{name}").items()}
    if not isinstance(space, _LEAVES):
        raise ValueError(
            f"{key}: {type(space).__name__} has no fixed shape, expected Box, Discrete, MultiDiscrete, MultiBinary, or "
            "a Dict or Tuple of them. Wrap the environment so that it shows one of these."
        )
    return {key: space}


def leaf_dtype(leaf: Space) -> torch.dtype:
    """Return the torch dtype of a plain space's samples.

    >>> leaf_dtype(spaces.MultiBinary(3))
    torch.int8
    """
    return torch.from_numpy(np.empty(0, leaf.dtype)).dtype


def leaf_shape(leaf: Space) -> tuple[int, ...]:
    """Return the shape of one sample of a plain space; () for Discrete."""
    return tuple(leaf.shape or ())


def sample_rows(space: Space, key: str, n: int, device: torch.device) -> dict[str, Tensor]:
    """Draw n samples, from the space's own generator: seed the space, not torch.

    Args:
        space: a space of one environment.
        key: the name of a plain space; nested ones continue it with ``/``.
        n: how many samples.
        device: where the tensors shall be.

    Returns:
        Key to tensor, [n, ...] in the space's dtype.
    """
    return {
        name: torch.from_numpy(np.stack([np.asarray(leaf.sample(), leaf.dtype) for _ in range(n)])).to(device)
        for name, leaf in leaves(space, key).items()
    }


def bounds(leaf: Space) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the least and the greatest value of a plain space, both included, of its shape."""
    if isinstance(leaf, spaces.Box):
        return leaf.low, leaf.high
    if isinstance(leaf, spaces.Discrete):
        return np.asarray(leaf.start), np.asarray(leaf.start + leaf.n - 1)
    if isinstance(leaf, spaces.MultiDiscrete):
        return leaf.start, leaf.start + leaf.nvec - 1
    return np.zeros(leaf_shape(leaf), np.int8), np.ones(leaf_shape(leaf), np.int8)


def outside(leaf: Space, rows: Tensor) -> Tensor:
    """Find the values that a plain space does not hold.

    Args:
        leaf: the space of one row.
        rows: [n, ...] on the CPU.

    Returns:
        [n, ...] bool: below or above the space's bounds by more than rounding, or not a number.
    """
    low, high = (torch.from_numpy(np.array(bound)) for bound in bounds(leaf))
    values = rows
    if rows.is_floating_point():
        values, low, high = rows.double(), low.double(), high.double()
        low, high = low - _ROUNDING * (1 + low.abs()), high + _ROUNDING * (1 + high.abs())
        low, high = low.nan_to_num(-torch.inf, neginf=-torch.inf), high.nan_to_num(torch.inf, posinf=torch.inf)
    return ~((values >= low) & (values <= high))
