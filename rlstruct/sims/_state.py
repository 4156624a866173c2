"""A simulator's state, a frozen dataclass or a DictTensor, as a dict of tensors and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import BadKeyError, BadTypeError, DeviceMismatchError, ShapeMismatchError
from rlstruct.spaces import Leaf

Tensors = dict[str, Tensor]
Kinds = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


def fields_of(where: str, state: object) -> Tensors:
    """Return the tensors of a state by name; nothing is copied."""
    if isinstance(state, DictTensor):
        return dict(state.items())
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise BadTypeError(
            f"{where}: got a {type(state).__name__}, expected a frozen dataclass of tensors [B, ...] or a DictTensor."
        )
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            raise BadTypeError(f"{where}: field {name!r} is a {type(value).__name__}, expected a tensor [B, ...].")
    return fields


def make_state(kind: type[Any], fields: Tensors) -> Any:  # noqa: ANN401 - the user's own class
    """Build a state of the user's class from its tensors."""
    return DictTensor.unchecked(fields) if issubclass(kind, DictTensor) else kind(**fields)


def rows_like(tensors: Mapping[str, Tensor], n: int) -> Kinds:
    """Return the shapes [n, ...] and dtypes of rows like these."""
    return {name: ((n, *value.shape[1:]), value.dtype) for name, value in tensors.items()}


def kinds_of(space: Mapping[str, Leaf], lead: tuple[int, ...]) -> Kinds:
    """Return the shapes [*lead, ...] and dtypes of elements of a space, from its `rlstruct.spaces.leaves`."""
    return {key: ((*lead, *leaf.shape), leaf.torch_dtype) for key, leaf in space.items()}


def check(where: str, found: Mapping[str, Tensor], expected: Kinds, device: torch.device, fix: str = "") -> None:
    """Raise unless tensors are what is expected."""
    if found.keys() != expected.keys():
        raise BadKeyError(f"{where.rstrip(':')}: got {sorted(found)}, expected {sorted(expected)}. {fix}".rstrip())
    for name, (shape, dtype) in expected.items():
        value = found[name]
        if value.shape != shape or value.dtype != dtype:
            raise ShapeMismatchError(
                f"{where} {name!r} has shape {list(value.shape)} of {value.dtype}, expected {list(shape)} of {dtype}. "
                f"{fix}".rstrip()
            )
        if value.device != device:
            raise DeviceMismatchError(
                f"{where} {name!r} is on {value.device}, expected {device}. Create it with device={str(device)!r}, or "
                "from another tensor that is there."
            )


def part(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin with ``prefix``, without it."""
    return {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}


def columns(*values: Tensor) -> Tensor:
    """Put D values [B] side by side, [B, D]. On the CPU each is contiguous in memory, several times faster to stack.

    >>> columns(torch.tensor([1, 2]), torch.tensor([3, 4]))
    tensor([[1, 3],
            [2, 4]])
    """
    return torch.stack(values).t() if values[0].is_cpu else torch.stack(values, 1)


def ahead(state: Sequence[Tensor], slopes: Sequence[Tensor], time: float) -> tuple[Tensor, ...]:
    """Follow slopes for some time, all tensors in one operation: state + time * slope.

    >>> ahead([torch.tensor([1.0])], [torch.tensor([2.0])], 0.5)
    (tensor([2.]),)
    """
    return tuple(torch._foreach_add(list(state), list(slopes), alpha=time))
