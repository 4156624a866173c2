"""Conversion of a simulator's state, a frozen dataclass or a DictTensor, to a dict of tensors and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout
from rlstruct.errors import BadTypeError, kind_of
from rlstruct.spaces import Leaf

Tensors = dict[str, Tensor]


def fields_of(where: str, state: object) -> Tensors:
    """Return the tensors of a state by name; nothing is copied."""
    if isinstance(state, DictTensor):
        return dict(state.items())
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise BadTypeError(
            f"{where}: got {kind_of(state)}, expected a frozen dataclass of tensors [B, ...] or a DictTensor."
        )
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    for name, value in fields.items():
        if not isinstance(value, Tensor):
            raise BadTypeError(f"{where}: field {name!r} is {kind_of(value)}, expected a tensor [B, ...].")
    return fields


def state_of(cls: type[Any], fields: Tensors) -> Any:  # noqa: ANN401 - the user's own class
    """Build a state of a simulator's class: the inverse of `fields_of`."""
    return DictTensor.unchecked(fields) if issubclass(cls, DictTensor) else cls(**fields)


def layout_of_rows(space: Mapping[str, Leaf]) -> Layout:
    """Return the layout of one row of a space, from its `rlstruct.spaces.leaves`."""
    return Layout({key: (leaf.shape, leaf.torch_dtype) for key, leaf in space.items()})


def columns(*values: Tensor) -> Tensor:
    """Stack D tensors [B] as columns [B, D]; on the CPU as a transposed view, which is much faster to make.

    >>> columns(torch.tensor([1, 2]), torch.tensor([3, 4]))
    tensor([[1, 3],
            [2, 4]])
    """
    return torch.stack(values).t() if values[0].is_cpu else torch.stack(values, 1)


def euler_step(state: Sequence[Tensor], slopes: Sequence[Tensor], time: float) -> tuple[Tensor, ...]:
    """Take an Euler step, state + time * slope, for all tensors in one operation.

    >>> euler_step([torch.tensor([1.0])], [torch.tensor([2.0])], 0.5)
    (tensor([2.]),)
    """
    return tuple(torch._foreach_add(list(state), list(slopes), alpha=time))
