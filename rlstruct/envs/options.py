"""env_info as the `options` of gymnasium's reset."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstruct.core import DictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError

Options = list[dict[str, Any]]
"""The options of each environment."""


def options_of(env_info: DictTensor | None, n: int, where: str) -> Options | None:
    """Turn ``env_info`` into one dict of options per environment.

    Args:
        env_info: settings of each environment, [n, ...] on the CPU; empty or None for none.
        n: number of environments.
        where: start of the error messages.

    Returns:
        For each environment Python numbers where a row is 0-dimensional and numpy arrays otherwise; None without keys.

    Raises:
        ShapeMismatchError: ``env_info`` has another number of rows.
        DeviceMismatchError: ``env_info`` is not on the CPU.
    """
    if env_info is None or env_info.empty():
        return None
    if env_info.device is not None and env_info.device.type != "cpu":
        raise DeviceMismatchError(
            f"{where}: tensor {next(iter(env_info.keys()))!r} of env_info is on {env_info.device}, expected cpu. "
            "Settings of environments stay on the CPU: create it there."
        )
    if env_info.n_elems() != n:
        raise ShapeMismatchError(
            f"{where}: env_info has {env_info.n_elems()} rows, expected {n}: one row per environment."
        )
    options: Options = [{} for _ in range(n)]
    for key, tensor in env_info.items():
        values = tensor.tolist() if tensor.dim() == 1 else list(tensor.numpy().copy())  # sync: on the CPU, per reset
        for row, value in zip(options, values, strict=True):
            row[key] = value
    return options


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two environments have equal options."""
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def merge(options: Options | None) -> dict[str, Any] | None:
    """Merge the options of all environments for a vector environment that takes one dict.

    A value that is the same in every environment is given once, otherwise the key gets an array with one row each.
    """
    if options is None:
        return None
    merged = {}
    for key, first in options[0].items():
        equal = all(np.array_equal(first, row[key]) for row in options)
        merged[key] = first if equal else np.array([row[key] for row in options])
    return merged
