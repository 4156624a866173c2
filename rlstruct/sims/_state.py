"""A simulator's state, a frozen dataclass or a DictTensor, as a dict of tensors and back. Part of rlstruct.sims."""

from __future__ import annotations

import dataclasses
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
    if hasattr(state, "__dict__") and hasattr(state, "__dataclass_fields__"):  # the common case, and a fast way
        return dict(vars(state))
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


def where_done(done: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Take the rows of ``new`` where ``done``, else of ``old``, [B, ...]."""
    return torch.where(done if old.dim() == 1 else done.view(-1, *[1] * (old.dim() - 1)), new, old)


def stack_steps(steps: list[Tensor]) -> Tensor:
    """Stack K tensors [B, ...] to [K, B, ...], keeping the memory of each step as it is."""
    first = steps[0]
    if first.dim() == 1:
        return torch.cat(steps).view(len(steps), -1)  # for the compiler simpler than a stack
    if first.is_contiguous():
        return torch.stack(steps)
    if first.dim() == 2:  # [B, D] with B fastest, as `columns` makes them: stacked so, each column is one plain copy
        pieces = [piece for step in steps for piece in step.unbind(1)]
        return torch.cat(pieces).view(len(steps), -1, first.shape[0]).transpose(1, 2)
    return torch.stack([step.movedim(0, -1) for step in steps]).movedim(-1, 1)


def batch_first(tensors: Tensors) -> Tensors:
    """Swap the first two axes of all tensors: views."""
    return {key: value.transpose(0, 1) for key, value in tensors.items()}


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


def check_carry(where: str, saved: Tensors, own: Tensors, initial: Tensors) -> None:
    """Raise unless a simulation can go on from saved tensors.

    Args:
        where: start of the message.
        saved: what goes from one step to the next, of another simulation.
        own: what this one has, before or after its first reset.
        initial: the fields of a state of this one.  [1, ...] each

    Raises:
        KeyError: another kind of simulation was saved.
        ShapeMismatchError: another number of environments was saved.
    """
    missing = own.keys() - saved.keys()
    if missing or "env_key" not in saved:
        raise KeyError(
            f"{where}: the state has {sorted(saved)}, expected {sorted(own)} at least. Load what an environment of the "
            "same class returned."
        )
    if saved["env_key"].shape != own["env_key"].shape:
        raise ShapeMismatchError(
            f"{where}: the state is that of {len(saved['env_key'])} environments, expected {len(own['env_key'])}. "
            "Make as many as were saved."
        )
    found = {name[len("state/") :]: value for name, value in saved.items() if name.startswith("state/")}
    if found and _kinds(found) != _kinds(initial):  # none if it was saved before its first reset
        raise KeyError(
            f"{where}: the state has {_kinds(found)}, expected {_kinds(initial)}. Load what an environment "
            "of the same class returned."
        )


def _kinds(fields: Tensors) -> str:
    """Spell fields with their dtypes and shapes, in one order."""
    kinds = {name: f"[B{''.join(f', {n}' for n in value.shape[1:])}] {value.dtype}" for name, value in fields.items()}
    return ", ".join(f"{name!r} {kinds[name]}" for name in sorted(kinds))
