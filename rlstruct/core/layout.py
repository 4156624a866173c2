"""Layout, the shapes and dtypes of named tensors, and checks of tensors against layouts and each other."""

from __future__ import annotations

import math
from collections.abc import ItemsView, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.errors import BadIndexError, BadKeyError, BadTypeError, DeviceMismatchError, ShapeMismatchError, kind_of

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


class Named(Protocol):
    """Tensors by name: a dict, a DictTensor or a TemporalDictTensor."""

    def items(self) -> ItemsView[str, Tensor]:
        """Return the pairs of name and tensor."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one tensor. The specs of a structure omit the axes that all its tensors share.

    Attributes:
        shape: the shape; ``()`` in the specs of a DictTensor for one number per row.
        dtype: the dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}"


def as_signed(tensor: Tensor) -> Tensor:
    """View wide unsigned integers as signed ones, for which torch can mask and write rows."""
    signed = _SIGNED.get(tensor.dtype)
    return tensor if signed is None else tensor.view(signed)


def take_rows(tensor: Tensor, rows: Tensor, dim: int = 0) -> Tensor:
    """Return the rows of these numbers [K] int64 of a tensor of any dtype, in new memory, along an axis."""
    signed = _SIGNED.get(tensor.dtype)
    if signed is None:
        return tensor.index_select(dim, rows)
    return tensor.view(signed).index_select(dim, rows).view(tensor.dtype)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return shape and dtype of a tensor."""
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class Layout(Mapping[str, TensorSpec]):
    """Shape and dtype of each tensor by key, in order. Tensors with equal layouts fit into the same memory.

    Args:
        specs: shape and dtype of each key.

    >>> Layout.of({"a": torch.zeros(2, 3)}, drop=1).behind(5)
    Layout({'a': [5, 3] torch.float32})
    """

    __slots__ = ("_specs",)

    def __init__(self, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None) -> None:
        self._specs = {key: TensorSpec(tuple(shape), dtype) for key, (shape, dtype) in (specs or {}).items()}

    @classmethod
    def of(cls, tensors: Named, drop: int = 0) -> Layout:
        """Return the layout of tensors without their first ``drop`` axes."""
        made = cls.__new__(cls)
        made._specs = {key: TensorSpec(tuple(v.shape[drop:]), v.dtype) for key, v in tensors.items()}
        return made

    def behind(self, *sizes: int, prefix: str = "") -> Layout:
        """Prepend axes of these sizes to every shape, and a prefix to every key."""
        return Layout({prefix + key: ((*sizes, *shape), dtype) for key, (shape, dtype) in self._specs.items()})

    def allocate(self, device: torch.device) -> dict[str, Tensor]:
        """Allocate uninitialised tensors of this layout."""
        return {key: torch.empty(shape, dtype=dtype, device=device) for key, (shape, dtype) in self._specs.items()}

    def nbytes(self) -> int:
        """Return the total size of the tensors in bytes."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self._specs.values())

    def items(self) -> ItemsView[str, TensorSpec]:
        """Return the pairs of key and spec, in order."""
        return self._specs.items()

    def __getitem__(self, key: str) -> TensorSpec:
        return self._specs[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __eq__(self, other: object) -> bool:
        """Compare with another layout, including the order of keys, or with any mapping, in any order."""
        if isinstance(other, Layout):
            return self._specs == other._specs and [*self._specs] == [*other._specs]
        return self._specs == other

    def __hash__(self) -> int:
        return hash(tuple(self._specs.items()))

    def __repr__(self) -> str:
        return f"Layout({{{', '.join(f'{key!r}: {spec}' for key, spec in self._specs.items())}}})"


class Mismatch(NamedTuple):
    """First difference between tensors and their expected layout, rows and device."""

    key: str
    got: object
    expected: object
    hint: str
    error: type[Exception]


def mismatch(
    tensors: Named,
    layout: Layout | None = None,
    *,
    device: torch.device | None = None,
    rows: int | tuple[int, ...] | None = None,
) -> Mismatch | None:
    """Return the first difference that `expect` would report; None if there is none."""
    lead, actual = (rows,) if isinstance(rows, int) else rows or (), dict(tensors.items())
    for key, (shape, dtype) in () if layout is None else layout.items():
        tensor = actual.get(key)
        if tensor is None:
            hint = f"The keys are {[*actual]}.{_did_you_mean(key, [*actual])}"
            return Mismatch(key, "missing", TensorSpec(lead + shape, dtype), hint, BadKeyError)
        if tensor.shape != lead + shape or tensor.dtype is not dtype:
            return Mismatch(key, spec_of(tensor), TensorSpec(lead + shape, dtype), "", ShapeMismatchError)
    for key, tensor in actual.items():
        if layout is not None and key not in layout:
            hint = f"The keys expected are {[*layout]}.{_did_you_mean(key, [*layout])}"
            return Mismatch(key, spec_of(tensor), "no such key", hint, BadKeyError)
        if tensor.shape[: len(lead)] != lead:
            return Mismatch(key, spec_of(tensor), f"[{', '.join(map(str, lead))}, ...]", "", ShapeMismatchError)
        if device is not None and tensor.device != device:
            fix = f"Create it with device={str(device)!r}, or move it with .to({str(device)!r})."
            return Mismatch(key, f"on {tensor.device}", device, fix, DeviceMismatchError)
    return None


def expect(
    where: str,
    tensors: Named,
    layout: Layout | None = None,
    *,
    device: torch.device | None = None,
    rows: int | tuple[int, ...] | None = None,
    fix: str = "",
) -> None:
    """Raise unless tensors have the expected keys, shapes, dtypes, rows and device.

    Args:
        where: start of the message, such as ``"agent: action"``; the key follows.
        tensors: names to tensors.
        layout: expected keys, shapes and dtypes, in any order; None accepts all.
        device: expected device of every tensor; None accepts all.
        rows: sizes of the leading axis or axes of every tensor, which the layout omits; None if it omits none.
        fix: end of the message, which says what to do; by default a wrong device has its own.

    Raises:
        BadKeyError: a key is missing or unexpected; the message suggests the nearest one.
        ShapeMismatchError: a tensor has another shape, dtype or number of rows.
        DeviceMismatchError: a tensor is on another device.
    """
    difference = mismatch(tensors, layout, device=device, rows=rows)
    if difference is not None:
        hints = (fix,) if difference.error is DeviceMismatchError and fix else (difference.hint, fix)
        text = f"{where} {difference.key!r} is {difference.got}, expected {difference.expected}."
        raise difference.error(" ".join([text, *filter(None, hints)]))


def missing_key(where: str, key: object, valid_keys: Iterable[str]) -> BadKeyError:
    """Create the error for a missing key, with the known keys and the nearest of them."""
    keys = list(valid_keys)
    return BadKeyError(
        f"{where}: no key {key!r}{f' among {keys}' if keys else ', it is empty'}.{_did_you_mean(key, keys)}"
    )


def _did_you_mean(key: object, keys: list[str]) -> str:
    near = nearest_key(key, keys) if isinstance(key, str) else None
    return f" Did you mean {near!r}?" if near else ""


def nearest_key(key: str, keys: list[str]) -> str | None:
    """Return the key that the user probably meant; None if no key is similar.

    That is a key with the same last part under another prefix, or a misspelt last part under the same prefix.
    """
    from difflib import get_close_matches

    place, slash, last = key.rpartition("/")
    same = [name for name in keys if name.rpartition("/")[2] == last]
    if same and not slash:  # prefer the result of this step, ``_observation/reward``, to that of the previous one
        results = [name for name in same if name.startswith("_observation/") and last not in ("frame", "initial_state")]
        return (results or same)[0]
    if same:
        return get_close_matches(key, same, 1, cutoff=0)[0]
    lasts = {name.rpartition("/")[2] for name in keys if not slash or name.rpartition("/")[0] == place}
    for near in get_close_matches(last, sorted(lasts), 1):
        return nearest_key(place + slash + near, keys)
    if any(name.startswith(place + slash) for name in keys if slash):
        return None  # the prefix is right, so a key that merely begins in the same way was not meant
    return next(iter(get_close_matches(key, keys, 1, cutoff=0.8)), None)


def validate(cls: type, leading: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise unless tensors share ``leading`` axes and one device, as a structure of class ``cls`` requires."""
    first, device, on_cpu, n_rows = "", None, False, -1
    lead: tuple[int, ...] = ()
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not isinstance(tensor, Tensor):
            raise _not_named(cls, key, tensor)
        shape = tensor.shape
        if shape and shape[0] == n_rows and (leading == 1 or shape[:leading] == lead):
            if tensor.is_cpu if on_cpu else tensor.device == device:  # is_cpu takes half the time of a comparison
                continue
        elif device is None and len(shape) >= leading:
            first, lead, n_rows = key, shape[:leading], shape[0]
            device, on_cpu = tensor.device, tensor.is_cpu
            continue
        check_pair(cls, leading, key, tensor, first or key, tensors[first or key])


def _not_named(cls: type, key: object, tensor: object) -> TypeError:
    if not isinstance(key, str):
        return BadTypeError(f"{cls.__name__}: key {key!r} is {kind_of(key)}, expected a str.")
    fix = "Convert it with torch.as_tensor(value, device=...)."
    if isinstance(tensor, torch.nn.Module):
        fix = "Pass the model to the agent when you create it: create_agent(model)."
    elif isinstance(tensor, int | float):
        fix = f"Give every row its value: torch.full((B,), {tensor})."
    return BadTypeError(f"{cls.__name__}: key {key!r} holds {kind_of(tensor)}, expected a torch.Tensor. {fix}")


def check_pair(cls: type, leading: int, key: str, tensor: Tensor, first_key: str, first: Tensor) -> None:
    """Raise unless ``tensor`` has the leading axes and the device of ``first``."""
    lead = first.shape[:leading]
    if len(lead) == leading and tensor.shape[:leading] == lead and tensor.device == first.device:
        return
    where = f"{cls.__name__}: tensor"
    if tensor.dim() < leading:
        fix = "Add a missing axis with .unsqueeze(0); .expand(B, ...) gives one value to all rows."
        if tensor.dim() == 0:
            fix += f" Numbers that belong to no row, such as losses, go into a plain dict: {{{key!r}: value}}."
        axes = f"at least {leading} leading {'axis' if leading == 1 else 'axes'} [{', '.join('BT'[:leading])}, ...]"
        raise ShapeMismatchError(f"{where} {key!r} is {spec_of(tensor)}, expected {axes}. {fix}")
    fix = f"All tensors have the same rows, here those of {first_key!r}."
    if tensor.shape[:leading] == lead:  # which of the two is misplaced, only the caller knows
        moves = " or ".join(f".to({str(one.device)!r})" for one in (tensor, first))
        fix = f"{first_key!r} is on {first.device}; move the misplaced one with {moves}, or create it with device=..."
    expect(where, {key: tensor}, device=first.device, rows=lead, fix=fix)


def check_indices(where: str, index: Tensor, n: int, size: str) -> None:
    """Raise IndexError unless all indices [K] int64 are from 0 to n - 1. They are read only where that is cheap.

    Args:
        where: start of the message, with the name of the index.
        index: on the CPU it is checked; not on other devices, nor while torch traces.
        n: length of the axis.
        size: name of the length, such as ``"B"`` or ``"'frame' has B"``.
    """
    if type(index) is not Tensor or not index.is_cpu or torch.compiler.is_compiling():
        return
    values = index.detach().numpy()  # sync: a view of CPU memory
    wrong = (values < 0) | (values >= n)
    if wrong.any():
        k = int(wrong.argmax())
        raise BadIndexError(
            f"{where}[{k}] is {values[k]}, expected 0 to {n - 1}, as {size} = {n}. Negative numbers do not count from "
            "the end here."
        )


def as_dict(cls: type, tensors: Any) -> dict[str, Any]:  # noqa: ANN401 - perhaps no mapping
    """Copy the caller's mapping into a new dict, or raise TypeError if it is not a mapping."""
    if tensors is None:
        return {}
    if isinstance(tensors, torch.nn.Module) or not hasattr(tensors, "keys"):
        fix = "Name it: {'frame': tensor}." if isinstance(tensors, Tensor) else "Such as {'frame': torch.zeros(B, 4)}."
        if isinstance(tensors, torch.nn.Module):
            fix = "The weights of a model are model.state_dict(), and need no structure: pass that dict itself."
        raise BadTypeError(f"{cls.__name__}: got {kind_of(tensors)}, expected a mapping of names to tensors. {fix}")
    return dict(tensors)


__getattr__ = renamed.attributes(__name__)
