"""A simulator's state, a frozen dataclass or a DictTensor, as a dict of tensors and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError

Tensors = dict[str, Tensor]


def fields_of(where: str, state: object) -> Tensors:
    """Return the tensors of a state by name; nothing is copied.

    Raises:
        TypeError: the state is neither a dataclass of tensors nor a DictTensor.
    """
    if isinstance(state, DictTensor):
        return dict(state.items())
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    raise TypeError(
        f"{where}: got a {type(state).__name__}, expected a frozen dataclass of tensors [B, ...] or a DictTensor."
    )


def make_state(kind: type[Any], fields: Tensors) -> Any:  # noqa: ANN401 - the user's own class
    """Build a state of the user's class from its tensors."""
    return DictTensor._trusted(fields) if issubclass(kind, DictTensor) else kind(**fields)


def check_fields(where: str, fields: Tensors, n: int, device: torch.device, like: Tensors | None = None) -> None:
    """Raise unless every field is a tensor [n, ...] on ``device`` (and of the shape and dtype of ``like``).

    Raises:
        TypeError: a field is no tensor.
        KeyError: the fields are not those of ``like``.
        ShapeMismatchError: a field has another number of rows, shape or dtype.
        DeviceMismatchError: a field is on another device.
    """
    if like is not None and fields.keys() != like.keys():
        raise KeyError(f"{where}: got the fields {list(fields)}, expected {list(like)}.")
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{where}: field {name!r} is a {type(value).__name__}, expected a tensor [{n}, ...].")
        tail = tuple(value.shape[1:]) if like is None else tuple(like[name].shape[1:])
        dtype = value.dtype if like is None else like[name].dtype
        if tuple(value.shape) != (n, *tail) or value.dtype != dtype:
            raise ShapeMismatchError(
                f"{where}: field {name!r} has shape {list(value.shape)} of {value.dtype}, expected {[n, *tail]} of "
                f"{dtype}: one row for each environment."
            )
        if value.device != device:
            raise DeviceMismatchError(
                f"{where}: field {name!r} is on {value.device}, expected {device}. "
                "Create it with device=key.device, or from another tensor of the state."
            )


def part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin with ``prefix``, without it."""
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def columns(*values: Tensor) -> Tensor:
    """Put values [B] side by side, each contiguous in memory: several times faster than `torch.stack(values, 1)`.

    Args:
        values: D tensors.  [B]

    Returns:
        [B, D], a view of new memory [D, B].

    >>> columns(torch.tensor([1, 2]), torch.tensor([3, 4]))
    tensor([[1, 3],
            [2, 4]])
    """
    return torch.stack(values).t()


def check_carry(where: str, saved: Tensors, own: Tensors) -> None:
    """Raise unless a simulation can go on from saved tensors.

    Args:
        where: start of the message.
        saved: what one step hands to the next, of another simulation.
        own: the same of this one, after a reset.

    Raises:
        KeyError: another kind of simulation was saved.
        ShapeMismatchError: another number of environments was saved.
    """
    if saved.get("env_key", own["env_key"]).shape != own["env_key"].shape:
        raise ShapeMismatchError(
            f"{where}: the state is that of {len(saved['env_key'])} environments, expected {len(own['env_key'])}. "
            "Make as many as were saved."
        )
    found, expected = _kinds(saved), _kinds(own)
    if "elapsed" not in saved:  # saved before its first reset
        expected = {name: expected[name] for name in ("env_key", "episode")}
    if found != expected:
        names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        got, wanted = (", ".join(f"{name!r} {kinds.get(name)}" for name in names) for kinds in (found, expected))
        raise KeyError(
            f"{where}: the state has {got}, expected {wanted}. Load what an environment of the same class, with the "
            "same auto_reset, returned."
        )


def _kinds(carry: Tensors) -> dict[str, str]:
    """Spell dtype and shape of everything but the pool of start states, which both may have or not."""
    kinds = {name: f"[B{''.join(f', {n}' for n in value.shape[1:])}] {value.dtype}" for name, value in carry.items()}
    return {name: kind for name, kind in kinds.items() if not name.startswith("pool/")}
