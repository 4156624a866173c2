"""Base classes of the structures: operations on rows, on keys, and joins."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import Tensor

from rlstruct.core.layout import Layout, check_indices, check_pair, expect, missing_key, take_rows
from rlstruct.core.transfer import mover
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadIndexError, BadKeyError, BadTypeError, ShapeMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self


class Batched:
    """Base class of all structures: tensors with a batch axis on one device. Not public; use the subclasses."""

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply fn to every tensor and to the lengths; fn acts on the batch axis only."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device | None:
        """The one device of all tensors; None if there is no key."""
        raise NotImplementedError

    def n_elems(self) -> int:
        """Return B, the number of rows; 0 if there is no key."""
        raise NotImplementedError

    def clone(self) -> Self:
        """Copy every tensor into new memory; gradients flow through, as in ``Tensor.clone``."""
        return self._each(torch.clone)

    def to(self, device: DeviceLike, non_blocking: bool = False) -> Self:
        """Move every tensor to a device, in a new structure. Tensors already there are shared, as in ``Tensor.to``.

        Tensors in pageable CPU memory are packed into one pinned block and move to CUDA in a single copy, for which the
        host does not wait. With ``non_blocking`` it does not wait for copies between pinned memory and a device either.

        Raises:
            ValueError: the device does not exist on this machine.
        """
        if device == self.device:  # the common case in a training loop: skip resolve_device
            return self._each(lambda v: v)
        return self._each(mover(self, resolve_device(device), non_blocking))

    def index(self, index: Tensor | Sequence[int]) -> Self:
        """Gather rows into new memory, in the given order; rows may repeat.

        Args:
            index: row numbers from 0 to B - 1.  [K] int64 on the device of the structure, or a list or array of ints

        Returns:
            The chosen rows.  [K, ...]

        Raises:
            ShapeMismatchError: the index is not one-dimensional or not int64 (floats or a bool mask, for example).
            DeviceMismatchError: the index is on another device.
            IndexError: a row number is out of range (on CUDA: a device-side failure, as everywhere in torch).
        """
        where, here = type(self).__name__, home(self)
        rows = index if isinstance(index, Tensor) else _as_rows(index, here)
        if rows.dtype is not torch.int64 or rows.dim() != 1:
            raise ShapeMismatchError(
                f"{where}.index: got an index of {rows.dtype} {list(rows.shape)}, expected torch.int64 [K]. "
                "mask.nonzero().squeeze(1) turns a mask into row numbers, but waits for the device."
            )
        if here is not None and rows.device != here:
            expect(f"{where}.index:", {"index": rows}, device=here)
        try:
            return self._each(lambda v: take_rows(v, rows))
        except IndexError:  # torch names neither the number nor the length
            key = next(iter(self.keys()), None) if isinstance(self, NamedTensors) else None
            check_indices(f"{where}.index: index", rows, self.n_elems(), "B" if key is None else f"{key!r} has B")
            raise

    def slice(self, start: int, stop: int | None = None) -> Self:
        """Return consecutive rows as views. The batch axis is kept.

        Args:
            start: first row; negative numbers count from the end.
            stop: one past the last row, clipped to B as in Python. None selects the single row ``start``.

        Returns:
            Views of rows start to stop - 1, or of the single row.  [stop - start, ...] or [1, ...]

        Raises:
            IndexError: ``stop`` is None and there is no row ``start``.
        """
        if stop is not None:
            return self._each(lambda v: v[start:stop])
        n = self.n_elems()
        if n == 0 and self.device is None:
            return self._each(torch.detach)
        if not -n <= start < n:
            raise BadIndexError(
                f"{type(self).__name__}.slice: got row {start}, expected {-n} to {n - 1}, as B = {n}. "
                f"For a range that may be empty write slice({start}, {start + 1})."
            )
        return self._each(lambda v: v.narrow(0, start % n, 1))

    def unfold(self) -> list[Self]:
        """Split into B views of single rows [1, ...]."""
        return [self.slice(row) for row in range(self.n_elems())]

    def detach(self) -> Self:
        """Detach every tensor from the autograd graph. The memory is shared."""
        return self._each(torch.detach)

    def _shuffled(self, generator: torch.Generator | None) -> Tensor:
        """Return all row numbers in random order, [B] int64; drawn on the generator's device, then moved here."""
        source = home(self) if generator is None else generator.device
        return torch.randperm(self.n_elems(), generator=generator, device=source).to(home(self))


class NamedTensors(Batched):
    """Mapping of names to tensors that share their leading axes and one device. Not public; use the subclasses.

    Only the dict is stored. B, T and device are read from the first tensor on demand, so they always match the tensors,
    and a pytree can be unflattened with any leaves.
    """

    _tensors: dict[str, Tensor]
    _leading: ClassVar[int]  # number of shared axes: 1 for [B, ...], 2 for [B, T, ...]

    def _like(self, tensors: dict[str, Tensor], checked: bool = False) -> Self:
        """Create a structure of other tensors with the same rows (and lengths)."""
        raise NotImplementedError

    def keys(self) -> KeysView[str]:
        """Return the names, in insertion order."""
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        """Return the tensors, in the order of the keys."""
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Return the pairs (name, tensor), in the order of the keys."""
        return self._tensors.items()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, as over a dict."""
        return iter(self._tensors)

    def __contains__(self, key: object) -> bool:
        """Return True if there is a tensor of that name."""
        return key in self._tensors

    def __getitem__(self, key: str) -> Tensor:
        """Return one tensor, [B, ...] or [B, T, ...], without a copy.

        Raises:
            KeyError: there is no such name; the message lists the names and suggests the nearest.
        """
        try:
            return self._tensors[key]
        except KeyError:
            raise missing_key(type(self).__name__, key, self._tensors) from None

    def __setitem__(self, key: object, value: object) -> NoReturn:
        """Raise TypeError: `set` changes a structure."""
        name = type(self).__name__
        raise BadTypeError(f"{name}: got an assignment to [{key!r}], expected a call. Write set({key!r}, tensor).")

    def __delitem__(self, key: object) -> NoReturn:
        """Raise TypeError: `get` selects keys."""
        name = type(self).__name__
        raise BadTypeError(f"{name}: got a deletion of [{key!r}], expected a call. Write get([…]) with the other keys.")

    def get(self, keys: Iterable[str]) -> Self:
        """Select some keys, in the given order. The tensors are shared.

        Raises:
            KeyError: a key is missing.
            TypeError: ``keys`` is a single string: write ``structure[key]`` for one tensor, ``get([key])`` for one key.
        """
        if isinstance(keys, str):
            raise BadTypeError(
                f"{type(self).__name__}.get: got the string {keys!r}, expected an iterable of keys. "
                f"Write get([{keys!r}]) for a structure, or structure[{keys!r}] for the tensor."
            )
        return self._like({key: self[key] for key in keys})

    def empty(self) -> bool:
        """Return True if there are no keys. A structure with keys but without rows is not empty."""
        return not self._tensors

    def n_elems(self) -> int:
        """Return B, the number of rows; 0 if there is no key."""
        for tensor in self._tensors.values():
            return tensor.shape[0]
        return 0

    @property
    def device(self) -> torch.device | None:
        """The one device of all tensors; None if there is no key."""
        for tensor in self._tensors.values():
            return tensor.device
        return None

    def specs(self) -> Layout:
        """Return the trailing shape and the dtype of every key."""
        return Layout.of(self._tensors, drop=self._leading)

    def __repr__(self) -> str:
        """Show the device, and dtype and shape of every tensor, but no values, so there is no host sync."""
        name = type(self).__name__
        if not self._tensors:
            return f"{name}()"
        width = max(map(len, self._tensors))
        lines = (
            f"  {key:{width}}  {str(v.dtype).removeprefix('torch.')} {list(v.shape)}"
            for key, v in self._tensors.items()
        )
        return "\n".join((f"{name} on {self.device}:", *lines))

    def set(self, key: str, tensor: Tensor) -> None:
        """Add or replace one tensor, in place.

        Lengths do not change, but a structure without keys and rows gets full lengths for the tensor's B and T.

        Args:
            key: name of the tensor.
            tensor: stored without a copy.  [B, ...] or [B, T, ...]; any B and T if it becomes the only key, and
                there are no lengths of rows to keep

        Raises:
            TypeError: the key is not a string, or the value not a tensor.
            ShapeMismatchError: the tensor lacks an axis, or has another B or T.
            DeviceMismatchError: the tensor is on another device.
        """
        others = [(name, value) for name, value in self._tensors.items() if name != key]
        fitting = self._like({**dict(others[:1]), key: tensor}, checked=True)
        self._tensors[key] = tensor
        vars(self).update({**vars(fitting), "_tensors": self._tensors})

    def prepend_key(self, prefix: str) -> Self:
        """Prepend ``prefix``, such as ``"observation/"``, to every name. The tensors are shared."""
        return self._like({prefix + key: v for key, v in self._tensors.items()})

    def truncate_key(self, prefix: str) -> Self:
        """Select the names that start with ``prefix``, if any, and remove it from them. The tensors are shared."""
        return self._like(part_of(self._tensors, prefix))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor; the results keep their names and are checked as in the constructor."""
        return self._like({key: fn(v) for key, v in self._tensors.items()}, checked=True)

    def __copy__(self) -> Self:
        """Return a new structure of the same tensors; `set` on one does not affect the other."""
        return self._like(dict(self._tensors))

    def __add__(self, other: Self) -> Self:
        """Merge the keys of two structures with the same rows; the result has the lengths of the left one.

        The tensors are shared. Either structure may be empty.

        Raises:
            KeyError: a key is in both.
            ShapeMismatchError: the leading axes differ.
            DeviceMismatchError: the devices differ.
        """
        if not isinstance(other, NamedTensors) or type(other)._leading != self._leading:
            return NotImplemented
        mine, theirs = self._tensors, other._tensors
        both = {**mine, **theirs}
        if not mine:
            return self._like(both, checked=True) if self.n_elems() else other._like(both)
        if theirs:
            if len(both) < len(mine) + len(theirs):
                twice = next(key for key in theirs if key in mine)
                raise BadKeyError(
                    f"{type(self).__name__}.__add__: key {twice!r} is in both structures. "
                    "Rename one side with prepend_key, or leave it out with get."
                )
            check_pair(type(self), self._leading, *next(iter(theirs.items())), *next(iter(mine.items())))
        return self._like(both)


def _as_rows(index: Sequence[int], device: torch.device | None) -> Tensor:
    """Turn a list or array of ints into int64; floats and bools keep their dtype, which the caller refuses."""
    rows = torch.tensor(index, device=device)
    ints = rows.numel() == 0 or not (rows.dtype is torch.bool or rows.is_floating_point())
    return rows.to(torch.int64) if ints else rows


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix``, by name without the prefix."""
    n = len(prefix)
    return {key[n:]: value for key, value in tensors.items() if key.startswith(prefix)}


def home(structure: Batched) -> torch.device | None:
    """Return the device that row numbers of a structure must be on; None allows every device."""
    device: torch.device | None = getattr(structure, "lengths", structure).device
    return device


def join(
    where: str, parts: Sequence[NamedTensors], fn: Callable[[tuple[Tensor, ...], int], Tensor], axis: int, drop: int
) -> dict[str, Tensor]:
    """Join the tensors of each key with ``fn(tensors, axis)``; raise if that would convert, move or skip a tensor.

    Shapes must agree from axis ``drop`` on. The result has the key order of the first part.
    """
    first, device = parts[0]._tensors, parts[0].device
    names, dtypes = list(first), [tensor.dtype for tensor in first.values()]

    def check(i: int) -> None:
        tensors = parts[i]._tensors
        lead = next((v.shape[:drop] for v in tensors.values()), ())
        fix = "All parts have the keys, dtypes and trailing shapes of part 0; nothing is converted or moved for you."
        layout = Layout.of(first, drop).behind(*lead)
        expect(f"{where}: part {i}: tensor", tensors, layout, device=device, fix=fix)

    rows: list[Iterable[Tensor]] = [first.values()]
    for i, part in enumerate(parts[1:], 1):
        tensors = part._tensors
        # torch.cat would convert dtypes, and silently skips a tensor of shape [0].
        may_skip = drop == 1 and 0 in (parts[0].n_elems(), part.n_elems())
        same = list(tensors) == names and part.device == device
        if may_skip or not same or [tensor.dtype for tensor in tensors.values()] != dtypes:
            check(i)
        rows.append(tensors.values() if same else [tensors[name] for name in names])
    try:
        return {key: fn(column, axis) for key, column in zip(names, zip(*rows, strict=True), strict=True)}
    except RuntimeError:  # torch reports only sizes: find the key and the part
        for i in range(len(parts)):
            check(i)
        raise
