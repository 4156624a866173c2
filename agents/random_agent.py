"""An agent that acts at random in any action space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, accumulator_dtype, resolve_device
from rlstruct.errors import BadValueError
from rlstruct.functional import random
from rlstruct.rl_agent import RL_Agent
from rlstruct.spaces import leaves

Array: TypeAlias = np.ndarray[Any, Any]


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
    # Of floats: least and greatest value. Of integers: the middle and how many there are. And the dtype.
    _parts: Final[dict[str, tuple[Tensor, Tensor, torch.dtype]]]

    def __init__(self, action_space: spaces.Space[Any], *, device: DeviceLike = "cpu") -> None:
        self.action_space = action_space
        self.device = resolve_device(device)
        self._parts = {}
        for name, leaf in leaves(action_space, "action", where="RandomAgent").items():
            shape, dtype = leaf.shape, leaf.torch_dtype
            if 0 in shape:
                raise BadValueError(f"RandomAgent: space {name!r} is {leaf.space}, which holds nothing. Leave it out.")
            bounds = [np.broadcast_to(bound, shape) for bound in leaf.bounds()]
            if not dtype.is_floating_point:
                bounds = _middle_and_count(*bounds)
            first, second = (torch.as_tensor(np.array(bound), device="cpu") for bound in bounds)
            self._parts[name] = first.to(self.device), second.to(self.device, accumulator_dtype(self.device)), dtype

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Return ``action``, or ``action/<key>`` for nested spaces, in the dtypes of the space: [B, ...]."""
        keys = random.split(observation["rng"], len(self._parts)).unbind(1)
        action = {name: _draw(*part, key) for (name, part), key in zip(self._parts.items(), keys, strict=True)}
        return DictTensor(action), state

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Do nothing: there are no weights."""


def _middle_and_count(low: Array, high: Array) -> list[Array]:
    """Return the middle, as int64 modulo 2^64, and the number of integers from low to high, as float64."""
    pairs = [(int(a), int(b)) for a, b in zip(low.flat, high.flat, strict=True)]  # 64 bits may overflow in numpy
    count = [float(b - a + 1) for a, b in pairs]
    middle = [(a + int(n / 2) + 2**63) % 2**64 - 2**63 for (a, _), n in zip(pairs, count, strict=True)]
    return [np.array(middle, np.int64).reshape(low.shape), np.array(count, np.float64).reshape(low.shape)]


def _draw(first: Tensor, second: Tensor, dtype: torch.dtype, key: Tensor) -> Tensor:
    """Draw from a plain space with these parts [*shape], by keys [B] int64.  [B, *shape] dtype."""
    shape = tuple(first.shape)
    u = random.uniform(key, shape).to(second.dtype)
    if not dtype.is_floating_point:
        # u is at most 1 - 2^-24, so the product stays below the count and the difference within int64.
        return (first + ((u * second).floor() - (second / 2).floor()).to(torch.int64)).to(dtype)
    low, high = first.to(second.dtype), second
    tail = -torch.log1p(-u)  # exponential, mean 1
    free = random.normal(key, shape).to(second.dtype)
    below, above = low.isfinite(), high.isfinite()
    # Infinite bounds give inf or nan in the branches that are not taken.
    half = torch.where(below, low + tail, torch.where(above, high - tail, free))
    # Halves, because the width of a Box may exceed the greatest float64.
    between = (2 * (low / 2 + u * (high / 2 - low / 2))).clamp(low, high)
    return torch.where(below & above, between, half).to(dtype)
