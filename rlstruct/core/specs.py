"""What a key holds: the shape of one row and its dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one key, without the batch axis (and without the time axis, in a TemporalDictTensor).

    Attributes:
        shape: the trailing shape; ``()`` for one number per row.
        dtype: the dtype of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


Specs = dict[str, TensorSpec]
"""Key to spec, in the order of the structure's keys."""
