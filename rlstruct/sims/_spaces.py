"""Gymnasium spaces as shapes and dtypes of tensors. Part of rlstruct.sims."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.functional.random import randint, uniform

EXPLORE_STREAM = 1 << 20
"""Of a step's key: apart from what transitions draw from the same key."""

Space = gymnasium.Space[Any]
_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def layout(space: Space, key: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of one row for every key of a space, nested ones joined by ``/``.

    Raises:
        TypeError: a space has no fixed shape.

    >>> layout(spaces.Dict(board=spaces.MultiBinary(3), turn=spaces.Discrete(2)), "frame")
    {'frame/board': ((3,), torch.int8), 'frame/turn': ((), torch.int64)}
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        children = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return {k: row for name, child in children for k, row in layout(child, f"{key}/{name}").items()}
    if not isinstance(space, _LEAVES):
        raise TypeError(f"{key}: {type(space).__name__} has no fixed shape: use Box, Discrete, MultiDiscrete, ….")
    return {key: (tuple(space.shape or ()), torch.from_numpy(np.empty(0, space.dtype)).dtype)}


def zeros(space: Space, key: str, n: int, device: torch.device) -> dict[str, Tensor]:
    """Make n rows of zeros for every key of a space."""
    rows = layout(space, key).items()
    return {name: torch.zeros((n, *shape), dtype=dtype, device=device) for name, (shape, dtype) in rows}


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


def box(low: Any, high: Any, dtype: torch.dtype) -> spaces.Box:  # noqa: ANN401 - whatever Box takes
    """Make a Box of floating-point numbers in the dtype of a simulator."""
    kind = np.float64 if dtype == torch.float64 else np.float32
    return spaces.Box(np.asarray(low, kind), np.asarray(high, kind), dtype=kind)


def check_frames(
    name: str, frames: dict[str, Tensor], expected: dict[str, tuple[tuple[int, ...], torch.dtype]], n_envs: int
) -> None:
    """Raise unless frames have the keys, shapes and dtypes of the observation space.

    Raises:
        ShapeMismatchError: naming the key.
    """
    for key in sorted(frames.keys() | expected.keys()):
        got = (tuple(frames[key].shape), frames[key].dtype) if key in frames else "missing"
        shape, dtype = expected.get(key, ((), None))
        if got != ((n_envs, *shape), dtype):
            raise ShapeMismatchError(
                f"{name}.observe: {key!r} is {got}, expected {[n_envs, *shape]} of {dtype}, as the observation space "
                "says. Mend one of them."
            )


def check_action(
    where: str,
    action: DictTensor | TemporalDictTensor,
    lead: tuple[int, ...],
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return the tensors of an action that its space knows.

    Raises:
        KeyError: one is missing.
        ShapeMismatchError: one has another shape than [*lead, ...] or another dtype.
        DeviceMismatchError: one is on another device.
    """
    found = {}
    for key, (shape, dtype) in expected.items():
        value = action[key]
        if value.shape != (*lead, *shape) or value.dtype != dtype:
            raise ShapeMismatchError(
                f"{where}: action {key!r} has shape {list(value.shape)} of {value.dtype}, "
                f"expected {[*lead, *shape]} of {dtype}, as the action space says."
            )
        if value.device != device:
            raise DeviceMismatchError(
                f"{where}: action {key!r} is on {value.device}, expected {device}. "
                f"Create it with device={str(device)!r}, or move the agent there."
            )
        found[key] = value
    return found
