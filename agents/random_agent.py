"""An agent that acts at random in any action space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.functional import random
from rlstruct.rl_agent import RL_Agent
from rlstruct.spaces import leaves


class RandomAgent(RL_Agent):
    """Agent that samples every part of an action space at random, from ``observation["rng"]``.

    The distributions are those of gymnasium's ``sample``: uniform for discrete spaces; for boxes uniform between finite
    bounds, exponential with one finite bound, and normal without.

    Args:
        action_space: Box, Discrete, MultiDiscrete or MultiBinary, or Dict and Tuple of them, nested to any depth.
        device: device of observations and actions.

    Raises:
        TypeError: some part of the space has no fixed shape; the message names its key.
    """

    pure = True
    action_space: Final[spaces.Space[Any]]
    _parts: Final[dict[str, tuple[Tensor, Tensor, torch.dtype]]]  # least and greatest value, dtype

    def __init__(self, action_space: spaces.Space[Any], *, device: DeviceLike = "cpu") -> None:
        self.action_space = action_space
        self.device = resolve_device(device)
        self._parts = {}
        for name, leaf in leaves(action_space, "action", where="RandomAgent").items():
            bounds = (torch.as_tensor(bound, dtype=torch.float64, device=self.device) for bound in leaf.bounds())
            low, high = (bound.expand(leaf.shape) for bound in bounds)
            self._parts[name] = low, high, leaf.torch_dtype

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``action``, or ``action/<key>`` for nested spaces, in the dtypes of the space: [B, ...]."""
        keys = random.split(observation["rng"], len(self._parts)).unbind(1)
        action = {name: _draw(*part, key) for (name, part), key in zip(self._parts.items(), keys, strict=True)}
        return DictTensor(action), state

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Do nothing: there are no weights."""


def _draw(low: Tensor, high: Tensor, dtype: torch.dtype, key: Tensor) -> Tensor:
    """Draw from a plain space with these bounds [*shape], by keys [B] int64.  [B, *shape] dtype."""
    shape = tuple(low.shape)
    u = random.uniform(key, shape).to(torch.float64)
    if not dtype.is_floating_point:
        # float64 holds the product of 24 random bits and a count exactly: floor stays below the count.
        return (low + (u * (high - low + 1)).floor()).to(dtype)
    tail = -torch.log1p(-u)  # exponential, mean 1
    free = random.normal(key, shape).to(torch.float64)
    below, above = low.isfinite(), high.isfinite()
    # Infinite bounds give inf or nan in the branches that are not taken.
    half = torch.where(below, low + tail, torch.where(above, high - tail, free))
    return torch.where(below & above, low + u * (high - low), half).to(dtype)
