"""Frames of observations with one part or several."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.core import DictTensor


def frame_of(observation: DictTensor) -> Tensor:
    """Return the frame; the parts of a Dict observation are flattened and concatenated in the order of their names.

    >>> frame_of(DictTensor({"frame/b": torch.ones(1, 1), "frame/a": torch.zeros(1, 2, dtype=torch.int64)}))
    tensor([[0., 0., 1.]])
    """
    if "frame" in observation:
        return observation["frame"]
    parts = [observation[key].flatten(1) for key in sorted(observation.keys()) if key.startswith("frame/")]
    if not parts:
        return observation["frame"]  # raises, and names the keys that are there
    return torch.cat([part.to(torch.float32) for part in parts], dim=1)
