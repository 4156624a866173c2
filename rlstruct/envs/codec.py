"""Conversion between elements of gymnasium spaces and arrays or tensors, one [B, ...] for each leaf of a space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch import Tensor

from rlstruct.core import DictTensor, Layout, expect
from rlstruct.errors import ShapeMismatchError
from rlstruct.spaces import Element, Leaf, Space, leaves, nest

_ARRAY = np.ndarray  # found faster than an attribute of numpy, once per environment and step
Arrays: TypeAlias = list[np.ndarray[Any, Any]]
"""One array [B, ...] per leaf of a space, in the order of `SpaceCodec.leaves`."""


_RANK = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


class SpaceCodec:
    """Conversion of elements of a gymnasium space to named tensors [B, ...] in the space's own dtypes, and back.

    Raises:
        TypeError, ValueError: the space cannot become tensors; see `rlstruct.spaces.leaves`.
    """

    def __init__(self, space: Space, prefix: str, *, where: str) -> None:
        self.space = space
        self.where = where
        self._prefix = prefix
        self.leaves = tuple(leaves(space, prefix, where=where).values())
        self.keys = tuple(leaf.key for leaf in self.leaves)
        self._plain = not self.leaves[0].path
        self._discrete = isinstance(self.leaves[0].space, Discrete)
        self._getters = [itemgetter(*leaf.path) if len(leaf.path) == 1 else leaf.get for leaf in self.leaves]
        self._forms: list[list[object]] = [[(leaf.shape, leaf.dtype)] for leaf in self.leaves]
        # Forms of elements that can be written without `check`; the target of a nested space checks each leaf itself.
        self.forms = self._forms[0] if self._plain else [dict, tuple]

    def empty(self, n: int) -> Arrays:
        """Return one unwritten array [n, ...] per leaf."""
        return [np.empty((n, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def target(self, arrays: Arrays) -> np.ndarray[Any, Any] | _Nested:
        """Return an object that copies an element into a row of ``arrays``: ``target[row] = element``."""
        return arrays[0] if self._plain else _Nested(self, list(zip(self._getters, arrays, self._forms, strict=True)))

    def write(self, target: np.ndarray[Any, Any] | _Nested, row: int, element: Element) -> None:
        """Copy an element into a row of a `target`; raise if it does not fit, see `check`."""
        if ((element.shape, element.dtype) if type(element) is _ARRAY else type(element)) not in self.forms:
            self.check(element, index=row)
        target[row] = element

    def batched(self, value: Element, n: int, out: Arrays | None = None) -> Arrays:
        """Copy a batch of n elements from a `gymnasium.vector.VectorEnv` to ``out``, or to new arrays."""
        arrays = self.empty(n) if out is None else out
        for leaf, array in zip(self.leaves, arrays, strict=True):
            part = np.asarray(leaf.get(value))
            if part.shape != array.shape or not _fits(part, leaf.dtype):
                raise ShapeMismatchError(
                    f"{self.where}: {leaf.key!r} came as {_spell(part, leaf.dtype)}, expected {leaf.dtype} "
                    f"{(n, *leaf.shape)}. Make the environment return what its space declares."
                )
            array[...] = part
        return arrays

    def check(self, element: Element, *, index: int) -> None:
        """Raise if an element has wrong shapes or kinds of dtype, which numpy would broadcast or truncate silently.

        A form that always fits is added to `forms`: shape and dtype of an array, the type of a number.
        """
        for leaf, forms in zip(self.leaves, self._forms, strict=True):
            value = leaf.get(element)
            got = np.asarray(value)
            if got.shape != leaf.shape or not _fits(got, leaf.dtype):
                raise ShapeMismatchError(
                    f"{self.where}: environment {index} gave {leaf.key!r} as {_spell(got, leaf.dtype)}, its space "
                    f"declares {leaf.dtype} {leaf.shape}. Correct the space or what reset() and step() return."
                )
            plain = type(value) is np.ndarray  # the type of a subclass, such as np.memmap, would not tell its shape
            form = (got.shape, got.dtype) if plain else type(value)
            always = plain or isinstance(value, np.generic | int | float)
            if always and not _may_wrap(got.dtype, leaf.dtype) and form not in forms:
                forms.append(form)

    def has(self, action: Element) -> bool:
        """Return False if a discrete part of an action is outside its space.

        Boxes are not checked: Gaussian agents leave them regularly, and environments handle that themselves.
        """
        return all(isinstance(leaf.space, Box) or leaf.space.contains(leaf.get(action)) for leaf in self.leaves)

    def columns(self, action: DictTensor, n: int) -> Arrays:
        """Return the actions of n environments, [n, ...] for each leaf; tensors of the right dtype are not copied."""
        columns = []
        for leaf in self.leaves:
            tensor = action._tensors.get(leaf.key)
            if tensor is None:
                raise ShapeMismatchError(
                    f"{self.where}: the action has no key {leaf.key!r}, only {sorted(action.keys())}. Return the "
                    f"agent's choice under {leaf.key!r}, {leaf.torch_dtype} {(n, *leaf.shape)}."
                )
            if tensor.dtype is not leaf.torch_dtype or tensor.shape != (n, *leaf.shape) or not tensor.is_cpu:
                self._check_action(tensor, leaf, n)
            if tensor.requires_grad:
                tensor = tensor.detach()
            column = tensor.numpy()  # sync: environments live on the CPU, once per step
            columns.append(column if column.dtype == leaf.dtype else column.astype(leaf.dtype))
        return columns

    def elements(self, columns: Arrays) -> Sequence[Element]:
        """Turn columns [B, ...] into B elements of the space: numpy scalars, arrays, dicts and tuples.

        The arrays are copies, so an environment may keep or change its action.
        """
        if self._plain:
            return list(columns[0]) if self._discrete else _rows(self.leaves[0], columns[0])
        lists = [_rows(leaf, column) for leaf, column in zip(self.leaves, columns, strict=True)]
        rows = (dict(zip(self.keys, row, strict=True)) for row in zip(*lists, strict=True))
        return [nest(self.space, row, self._prefix) for row in rows]

    def batch_element(self, columns: Arrays) -> Element:
        """Turn columns [B, ...] into one batched action, as `gymnasium.vector.VectorEnv.step` takes it."""
        copies = {key: column.copy() for key, column in zip(self.keys, columns, strict=True)}
        return nest(self.space, copies, self._prefix)

    def _check_action(self, tensor: Tensor, leaf: Leaf, n: int) -> None:
        where, named = f"{self.where}: action", {leaf.key: tensor}
        home = f"Wrap the environment in DeviceEnv(env, {str(tensor.device)!r})."
        expect(where, named, device=torch.device("cpu"), fix=home)
        floats = tensor.is_floating_point() and leaf.torch_dtype.is_floating_point
        fix = f"Convert it with .to({leaf.torch_dtype}) where the agent makes it."
        if tensor.shape != (n, *leaf.shape):
            fix = f"Give one row per environment, each an element of {self.space}."
        elif floats or _exact(tensor.dtype, leaf.torch_dtype):
            return
        expect(where, named, Layout({leaf.key: ((n, *leaf.shape), leaf.torch_dtype)}), fix=fix)


@dataclass(frozen=True, slots=True)
class _Nested:
    """Target of writes for a nested space."""

    codec: SpaceCodec
    columns: list[tuple[Callable[[Element], Element], np.ndarray[Any, Any], list[object]]]

    def __setitem__(self, row: int, element: Element) -> None:
        try:
            for get, array, forms in self.columns:
                value = get(element)
                if ((value.shape, value.dtype) if type(value) is _ARRAY else type(value)) not in forms:
                    self.codec.check(element, index=row)
                array[row] = value
        except (KeyError, IndexError, TypeError):
            self.codec.check(element, index=row)  # raises, naming the missing entry
            raise


def _fits(got: np.ndarray[Any, Any], want: np.dtype[Any]) -> bool:
    """Return True if numbers can be written as another dtype without losing fractions, imaginary parts or bits."""
    if _RANK.get(got.dtype.kind, 9) > _RANK.get(want.kind, -1):
        return False
    return not _may_wrap(got.dtype, want) or bool((got == got.astype(want)).all())


def _may_wrap(got: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Return True if ``got`` has integers that ``want`` cannot hold, which numpy would wrap around."""
    return want.kind in "iu" and not np.can_cast(got, want)


def _spell(got: np.ndarray[Any, Any], want: np.dtype[Any]) -> str:
    beyond = got.size and got.dtype.kind in "iu" and want.kind in "iu" and not _fits(got, want)
    return f"{got.dtype} {got.shape}" + (f" from {got.min()} to {got.max()}" if beyond else "")


def _exact(got: torch.dtype, want: torch.dtype) -> bool:
    """Return True if ``want`` can hold every integer of ``got``."""
    if got is want:
        return True
    if got.is_floating_point or want.is_floating_point or torch.bool in (got, want):
        return False
    return torch.iinfo(want).min <= torch.iinfo(got).min and torch.iinfo(got).max <= torch.iinfo(want).max


def _rows(leaf: Leaf, column: np.ndarray[Any, Any]) -> list[Element]:
    """Return one element per row: numpy scalars for Discrete, else separate arrays."""
    if leaf.shape:
        return list(column.copy())
    return list(column) if isinstance(leaf.space, Discrete) else [np.array(value) for value in column]
