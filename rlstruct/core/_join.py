"""Joining structures key by key, without converting anything in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from rlstruct.core._checks import wrong_device
from rlstruct.core._named import NamedTensors
from rlstruct.errors import BadKeyError, ShapeMismatchError


def join(
    where: str,
    parts: Sequence[NamedTensors],
    fn: Callable[[tuple[Tensor, ...], int], Tensor],
    axis: int,
    *,
    first_axis: int,
) -> dict[str, Tensor]:
    """Join each key's tensors by ``fn(tensors, axis)``, and raise unless that changes none of them.

    Shapes must agree from ``first_axis`` on. The keys come in the order of the first part.
    """
    first, home = parts[0]._tensors, parts[0]._home()
    names = list(first)
    dtypes = [tensor.dtype for tensor in first.values()]
    rows: list[Iterable[Tensor]] = [first.values()]
    for i, part in enumerate(parts[1:], 1):
        tensors = part._tensors
        if list(tensors) != names:
            tensors = _in_order(where, i, tensors, names)
        if part._home() != home:
            key = names[0] if names else "lengths"
            raise wrong_device(f"{where}: part {i}", key, part._home(), home, "the device of part 0")
        rows.append(tensors.values())
        # torch.cat would convert dtypes, and silently skips a tensor of shape [0].
        may_skip = first_axis == 1 and 0 in (parts[0].n_elems(), part.n_elems())
        if may_skip or [tensor.dtype for tensor in tensors.values()] != dtypes:
            for key, tensor in tensors.items():
                _check_column(where, key, first[key], {i: tensor}, first_axis)
    try:
        return {key: fn(column, axis) for key, column in zip(names, zip(*rows, strict=True), strict=True)}
    except RuntimeError:  # torch names sizes; say which key and part they belong to
        for key, *column in zip(names, *rows, strict=True):
            _check_column(where, key, column[0], dict(enumerate(column)), first_axis)
        raise


def _in_order(where: str, i: int, tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    if tensors.keys() == set(names):
        return {key: tensors[key] for key in names}
    odd = [key for key in tensors if key not in names] or [key for key in names if key not in tensors]
    raise BadKeyError(f"{where}: part {i} has the keys {list(tensors)}, expected {names} as part 0 (see {odd[0]!r}).")


def _check_column(where: str, key: str, model: Tensor, others: Mapping[int, Tensor], first_axis: int) -> None:
    """Raise if one of the others, by number of its part, cannot be joined with the model, which is of part 0."""
    for i, tensor in others.items():
        if tensor.dtype is not model.dtype:
            raise ShapeMismatchError(
                f"{where}: key {key!r} of part {i} is {tensor.dtype}, expected {model.dtype} as in part 0. "
                f"Convert it with .to({model.dtype})."
            )
        if tensor.dim() != model.dim() or tensor.shape[first_axis:] != model.shape[first_axis:]:
            wanted = ", ".join(["any", "any"][:first_axis] + [str(size) for size in model.shape[first_axis:]])
            raise ShapeMismatchError(
                f"{where}: key {key!r} of part {i} has shape {list(tensor.shape)}, expected [{wanted}] as in part 0."
            )
