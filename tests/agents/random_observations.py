"""Random observations for agents that are called without an environment."""

from __future__ import annotations

import torch

from rlstruct import DictTensor
from rlstruct.functional.random import step_keys


def observe(B: int, n_inputs: int) -> DictTensor:
    """Return random frames [B, n_inputs] in the middle of episodes, with keys to draw from."""
    rng = step_keys(torch.arange(B), 0, torch.arange(1))[0]
    return DictTensor(
        {"frame": torch.randn(B, n_inputs), "initial_state": torch.zeros(B, dtype=torch.bool), "rng": rng}
    )
