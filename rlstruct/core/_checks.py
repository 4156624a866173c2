"""Checks of the tensors of a structure, with errors in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlstruct.errors import BadTypeError, DeviceMismatchError, ShapeMismatchError

if TYPE_CHECKING:
    from rlstruct.core._named import NamedTensors


def validate(cls: type[NamedTensors], tensors: Mapping[str, Tensor]) -> None:
    """Raise unless the tensors make a structure of class ``cls``: see the class for the errors.

    Every structure passes here once: the loop asks each tensor for its shape and its device, and nothing more.
    """
    first: str | None = None
    n_rows, device, on_cpu = -1, None, False
    for key, tensor in tensors.items():
        if isinstance(key, str) and isinstance(tensor, Tensor):
            try:
                # On the CPU, is_cpu answers in half the time of a comparison.
                if tensor.shape[0] == n_rows and (tensor.is_cpu if on_cpu else tensor.device == device):
                    continue
                if first is not None:
                    check_pair(cls, key, tensor, first, tensors[first])
                first, n_rows, device, on_cpu = key, tensor.shape[0], tensor.device, tensor.is_cpu
            except IndexError:  # no axis at all
                raise wrong_shape(cls, key, tensor, first, ()) from None
        else:
            raise _not_named(cls, key, tensor)
    if cls._leading > 1 and first is not None:
        for key, tensor in tensors.items():
            check_pair(cls, key, tensor, first, tensors[first])


def _not_named(cls: type[NamedTensors], key: object, tensor: object) -> TypeError:
    if not isinstance(key, str):
        return BadTypeError(f"{cls.__name__}: key {key!r} is a {type(key).__name__}, expected a str.")
    fix = "Convert it with torch.as_tensor(value, device=...)."
    if isinstance(tensor, torch.nn.Module):
        fix = "A model is given to the agent when it is made: create_agent(model)."
    elif isinstance(tensor, int | float):
        fix = f"Give every row its value: torch.full((B,), {tensor})."
    return BadTypeError(f"{cls.__name__}: key {key!r} holds a {type(tensor).__name__}, expected a torch.Tensor. {fix}")


def check_pair(cls: type[NamedTensors], key: str, tensor: Tensor, first_key: str, first: Tensor) -> None:
    """Raise unless ``tensor`` has the leading axes and the device of ``first``."""
    if tensor.dim() < cls._leading or tensor.shape[: cls._leading] != first.shape[: cls._leading]:
        raise wrong_shape(cls, key, tensor, first_key, first.shape[: cls._leading])
    if tensor.device != first.device:
        raise wrong_device(cls.__name__, key, tensor.device, first.device, f"the device of {first_key!r}")


def wrong_shape(
    cls: type[NamedTensors], key: str, tensor: Tensor, first_key: str | None, lead: tuple[int, ...]
) -> ShapeMismatchError:
    """Name the key, its shape, and what was expected."""
    got = f"{cls.__name__}: tensor {key!r} has shape {list(tensor.shape)}"
    if tensor.dim() < cls._leading:
        fix = "Add what is missing with .unsqueeze(0), or .expand(B, ...) one value to all rows."
        if tensor.dim() == 0:
            fix = (
                f"Numbers that belong to no row, such as losses, go into a plain dict: {{{key!r}: value}}. "
                ".expand(B, ...) gives one value to all rows."
            )
        return ShapeMismatchError(f"{got}, expected at least {cls._leading} dimensions {cls._axes}. {fix}")
    sizes = ", ".join(f"{axis} = {size}" for axis, size in zip("BT"[: cls._leading], lead, strict=False))
    return ShapeMismatchError(
        f"{got}, expected {cls._axes} with {sizes} (as in {first_key!r}). "
        "All tensors of one structure have the same rows."
    )


def wrong_device(
    where: str, key: str, got: torch.device | None, expected: torch.device | None, reason: str
) -> DeviceMismatchError:
    """Name the key, its device, and what was expected."""
    return DeviceMismatchError(
        f"{where}: tensor {key!r} is on {got}, expected {expected} ({reason}). "
        f"Move it with .to({str(expected)!r}), or create it with device={str(expected)!r}."
    )


def as_dict(cls: type[NamedTensors], tensors: Any) -> dict[str, Any]:  # noqa: ANN401 - perhaps no mapping
    """Copy the caller's mapping, which stays the caller's."""
    if tensors is None:
        return {}
    if isinstance(tensors, torch.nn.Module) or not hasattr(tensors, "keys"):
        fix = "Name it: {'frame': tensor}." if isinstance(tensors, Tensor) else "Such as {'frame': torch.zeros(B, 4)}."
        if isinstance(tensors, torch.nn.Module):
            fix = "The weights of a model are model.state_dict(), and need no structure: pass that dict itself."
        raise BadTypeError(
            f"{cls.__name__}: got a {type(tensors).__name__}, expected a mapping of names to tensors. {fix}"
        )
    return dict(tensors)
