"""Shared parts of the structures: rows, keys, and joining."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlstruct.core.layout import Layout, check_pair, expect, missing_key
from rlstruct.core.transfer import mover
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadIndexError, BadKeyError, BadTypeError, ShapeMismatchError

if TYPE_CHECKING:
    from typing_extensions import Self


class Batched:
    """Base of all structures: tensors with a batch axis on one device. Not public: use the classes built on it."""

    def _each(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Return a structure of fn(tensor) for every tensor and the lengths; fn acts on the batch axis only."""
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
        """Move every tensor, into a new structure. What is already there is shared, as in ``Tensor.to``.

        From ordinary CPU memory to CUDA all tensors travel in one copy, through a block of pinned memory, and the host
        does not wait; with ``non_blocking`` nor does it for copies between pinned CPU memory and a device.

        Raises:
            ValueError: the device does not exist on this machine.
        """
        if device == self.device:  # the common case in a training loop; no need to look the device up
            return self._each(lambda v: v)
        return self._each(mover(self, resolve_device(device), non_blocking))

    def index(self, index: Tensor | Sequence[int]) -> Self:
        """Gather rows into new memory, in the order given, repeats allowed.

        Args:
            index: row numbers from 0 to B - 1.  [K] int64 on the device of the structure, or a list of ints

        Returns:
            The chosen rows.  [K, ...]

        Raises:
            ShapeMismatchError: the index is not one-dimensional or not int64 (a bool mask, for example).
            DeviceMismatchError: the index is on another device.
            IndexError: a row number is out of range (on CUDA: a device-side failure, as everywhere in torch).
        """
        where, here = f"{type(self).__name__}.index:", home(self)
        rows = index if isinstance(index, Tensor) else torch.tensor(index, dtype=torch.int64, device=here)
        if rows.dtype is not torch.int64 or rows.dim() != 1:
            raise ShapeMismatchError(
                f"{where} got an index of {rows.dtype} {list(rows.shape)}, expected torch.int64 [K]. "
                "Turn a mask into row numbers with mask.nonzero().squeeze(1), which waits for the device."
            )
        expect(where, {"index": rows}, device=here)
        return self._each(lambda v: v.index_select(0, rows))

    def slice(self, start: int, stop: int | None = None) -> Self:
        """Take neighbouring rows. The batch axis always stays; the memory is shared.

        Args:
            start: first row; negative counts from the end.
            stop: one after the last row, cut to B as in Python. None takes the one row ``start``.

        Returns:
            Views of rows start to stop - 1, or of the one row.  [stop - start, ...] or [1, ...]

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
        """Split into B single rows [1, ...] that share the memory."""
        return [self.slice(row) for row in range(self.n_elems())]

    def detach(self) -> Self:
        """Return the same values, cut off from the autograd graph. The memory is shared."""
        return self._each(torch.detach)

    def _shuffled(self, generator: torch.Generator | None) -> Tensor:
        """Return all row numbers in random order, [B] int64, here, drawn where the generator is."""
        source = home(self) if generator is None else generator.device
        return torch.randperm(self.n_elems(), generator=generator, device=source).to(home(self))


class NamedTensors(Batched):
    """Names to tensors that share their leading axes and one device. Not public: use the two classes built on it.

    Nothing but the dict is stored: B, T and device are read from the first tensor when asked for. So a pytree can be
    unflattened with anything inside, and a structure can never disagree with its tensors.
    """

    _tensors: dict[str, Tensor]
    _leading: ClassVar[int]  # how many axes the tensors share: 1 for [B, ...], 2 for [B, T, ...]

    def _like(self, tensors: dict[str, Tensor], checked: bool = False) -> Self:
        """Return a structure of other tensors with the same rows (and lengths)."""
        raise NotImplementedError

    def keys(self) -> KeysView[str]:
        """Return the names, in the order in which they were put in."""
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
        """Return the tensor of one name, [B, ...] or [B, T, ...]: the tensor itself, not a copy.

        Raises:
            KeyError: there is no such name; the message lists the names and suggests the nearest.
        """
        try:
            return self._tensors[key]
        except KeyError:
            raise missing_key(type(self).__name__, key, self._tensors) from None

    def get(self, keys: Iterable[str]) -> Self:
        """Select some keys, in the order given. The tensors are shared, not copied.

        Raises:
            KeyError: one of them is missing.
            TypeError: ``keys`` is a single string: write ``structure[key]`` for one tensor, ``get([key])`` for one key.
        """
        if isinstance(keys, str):
            raise BadTypeError(
                f"{type(self).__name__}.get: got the string {keys!r}, expected an iterable of keys. "
                f"Write get([{keys!r}]) for a structure, or structure[{keys!r}] for the tensor."
            )
        return self._like({key: self[key] for key in keys})

    def empty(self) -> bool:
        """Return whether there is no key at all (a structure with keys and no row is not empty in this sense)."""
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
        """Show dtype and shape of every tensor, one per line, and the device; never a value, so no sync."""
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
        """Add or replace one tensor, in place. Lengths stay; a structure made of nothing takes the tensor's.

        Args:
            key: its name.
            tensor: stored without a copy.  [B, ...] or [B, T, ...]; any B and T if it becomes the only key

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
        """Put ``prefix``, such as ``"observation/"``, before every name. The tensors are shared."""
        return self._like({prefix + key: v for key, v in self._tensors.items()})

    def truncate_key(self, prefix: str) -> Self:
        """Keep the names that start with ``prefix``, perhaps none, and cut it off. The tensors are shared."""
        return self._like(part_of(self._tensors, prefix))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor; the results keep their names, and are checked as the constructor does."""
        return self._like({key: fn(v) for key, v in self._tensors.items()}, checked=True)

    def __copy__(self) -> Self:
        """Return a new structure around the same tensors, so that `set` on one leaves the other alone."""
        return self._like(dict(self._tensors))

    def __add__(self, other: Self) -> Self:
        """Put two structures with the same rows together, with the lengths of the left one. The tensors are shared.

        The empty structure adds to any.

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
            return other._like(both)
        if theirs:
            if len(both) < len(mine) + len(theirs):
                twice = next(key for key in theirs if key in mine)
                raise BadKeyError(
                    f"{type(self).__name__}.__add__: key {twice!r} is in both structures. "
                    "Rename one side with prepend_key, or leave it out with get."
                )
            check_pair(type(self), self._leading, *next(iter(theirs.items())), *next(iter(mine.items())))
        return self._like(both)


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix``, without it."""
    n = len(prefix)
    return {key[n:]: value for key, value in tensors.items() if key.startswith(prefix)}


def home(structure: Batched) -> torch.device | None:
    """Return the device that row numbers of a structure must be on; None if any."""
    found: torch.device | None = getattr(structure, "lengths", structure).device
    return found


def join(
    where: str, parts: Sequence[NamedTensors], fn: Callable[[tuple[Tensor, ...], int], Tensor], axis: int, drop: int
) -> dict[str, Tensor]:
    """Join each key's tensors by ``fn(tensors, axis)``, and raise unless that changes none of them.

    Shapes must agree from axis ``drop`` on. The keys come in the order of the first part.
    """
    first = parts[0]._tensors
    names, dtypes = list(first), [tensor.dtype for tensor in first.values()]

    def check(i: int) -> None:
        tensors = parts[i]._tensors
        lead = next((v.shape[:drop] for v in tensors.values()), ())
        fix = "All parts have the keys, dtypes and trailing shapes of part 0; nothing is converted or moved for you."
        layout = Layout.of(first, drop).behind(*lead)
        expect(f"{where}: part {i}: tensor", tensors, layout, device=parts[0].device, fix=fix)

    rows: list[Iterable[Tensor]] = []
    for i, part in enumerate(parts):
        tensors = part._tensors
        # torch.cat would convert dtypes, and silently skips a tensor of shape [0].
        may_skip = drop == 1 and 0 in (parts[0].n_elems(), part.n_elems())
        same = list(tensors) == names and part.device == parts[0].device
        if may_skip or not same or [tensor.dtype for tensor in tensors.values()] != dtypes:
            check(i)
        rows.append(tensors.values() if same else [tensors[name] for name in names])
    try:
        return {key: fn(column, axis) for key, column in zip(names, zip(*rows, strict=True), strict=True)}
    except RuntimeError:  # torch names sizes; say which key and part they belong to
        for i in range(len(parts)):
            check(i)
        raise
