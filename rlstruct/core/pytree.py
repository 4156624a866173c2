"""Registration of the structures as pytrees, so that torch.compile, torch.func and torch.utils see their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from rlstruct import renamed
from rlstruct.core.dict_tensor import DictTensor, TemporalDictTensor
from rlstruct.core.trajectories import Trajectories

_ATTRIBUTES: dict[type[Any], tuple[str, ...]] = {
    DictTensor: (),
    TemporalDictTensor: ("lengths",),
    Trajectories: ("info", "trajectories"),
}
"""Children of each class besides its items."""


def _flatten_with_path(tree: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:  # noqa: ANN401
    keys = [] if isinstance(tree, Trajectories) else [*tree.keys()]
    named = [(pytree.GetAttrKey(name), getattr(tree, name)) for name in _ATTRIBUTES[type(tree)]]
    return [*((pytree.MappingKey(key), tree[key]) for key in keys), *named], keys


def _flatten(tree: Any) -> tuple[list[Any], list[str]]:  # noqa: ANN401
    leaves, keys = _flatten_with_path(tree)
    return [child for _, child in leaves], keys


def register() -> None:
    """Register the structures with torch. Called once, when `rlstruct.core` is imported."""
    for cls in _ATTRIBUTES:

        def unflatten(children: Iterable[Any], keys: list[str], cls: Any = cls) -> Any:  # noqa: ANN401
            values = [*children]
            named = [dict(zip(keys, values, strict=False))] if cls is not Trajectories else []
            return cls.unchecked(*named, *values[len(keys) :])

        pytree.register_pytree_node(
            cls,
            _flatten,
            unflatten,
            serialized_type_name=f"rlstruct.core.{cls.__name__}",
            flatten_with_keys_fn=_flatten_with_path,
        )


class TreeSpec:
    """Keys and nesting of a pytree: flattens trees of the same structure, and rebuilds them from new tensors.

    For rlstruct's structures, dicts and tuples, also named ones, this takes a tenth of the time of torch's functions,
    which handle all other trees. Speed matters: a compiled agent is called in every step. Leaves other than tensors are
    constants.
    """

    def __init__(self, tree: Any) -> None:  # noqa: ANN401 - any pytree
        self._class = cls = type(tree)
        self._keys: tuple[str, ...] | None = None
        self._parts: list[TreeSpec] | None = None
        rest: object = None
        if cls in (DictTensor, TemporalDictTensor) or (
            cls is dict and all(isinstance(x, Tensor) for x in tree.values())
        ):
            self._keys = tuple(tree.keys())
        elif cls is Trajectories or cls in (tuple, list) or _is_named_tuple(cls):
            self._parts = [TreeSpec(member) for member in self._members(tree)]
        else:
            leaves, self._spec = pytree.tree_flatten(tree)
            self._constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
            rest = self._spec, self._constants
        self.n_tensors = 1  # so that flatten, which counts them, does not return early
        self.n_tensors = len(self.flatten(tree))
        self._form = cls, self._keys, self._parts, rest

    def flatten(self, tree: Any) -> list[Tensor]:  # noqa: ANN401 - a tree of the same structure
        """Return the tensors of a tree in the order of this structure, whatever the order of its keys."""
        if not self.n_tensors:
            return []
        if self._keys is not None:
            tensors = tree if self._class is dict else tree._tensors
            values = [tensors[key] for key in self._keys]
            return [*values, tree.lengths] if self._class is TemporalDictTensor else values
        if self._parts is not None:
            members = zip(self._parts, self._members(tree), strict=True)
            return [tensor for part, member in members for tensor in part.flatten(member)]
        return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]

    def unflatten(self, tensors: Iterable[Tensor]) -> Any:  # noqa: ANN401 - such a tree
        """Build a tree from tensors in the order of `flatten`."""
        return self._build(iter(tensors))

    def _build(self, tensors: Iterator[Tensor]) -> Any:  # noqa: ANN401
        cls = self._class
        if self._keys is not None:
            named = dict(zip(self._keys, tensors, strict=False))
            if cls is DictTensor:
                return DictTensor.unchecked(named)
            return named if cls is dict else TemporalDictTensor.unchecked(named, next(tensors))
        if self._parts is not None:
            members = [part._build(tensors) for part in self._parts]
            if cls is Trajectories:
                return Trajectories.unchecked(*members)
            return cls(*members) if _is_named_tuple(cls) else cls(members)
        return pytree.tree_unflatten([next(tensors) if one is None else one[0] for one in self._constants], self._spec)

    def fits(self, tree: Any) -> bool:  # noqa: ANN401 - any pytree
        """Return True if ``TreeSpec(tree)`` equals this one, which takes longer to find out."""
        if type(tree) is not self._class:
            return False
        if self._keys is not None:
            tensors = tree if self._class is dict else tree._tensors
            plain = self._class is not dict or all(isinstance(x, Tensor) for x in tree.values())
            return tuple(tensors) == self._keys and plain
        if self._parts is not None:
            members = self._members(tree)
            return len(members) == len(self._parts) and all(map(TreeSpec.fits, self._parts, members))
        return TreeSpec(tree) == self

    def _members(self, tree: Any) -> Sequence[Any]:  # noqa: ANN401
        return (tree.info, tree.steps) if self._class is Trajectories else tree

    def __eq__(self, other: object) -> bool:
        """Compare classes, keys and constants."""
        return isinstance(other, TreeSpec) and self._form == other._form

    def __hash__(self) -> int:
        return hash((self._class, self._keys))


class Form:
    """Structure of a pytree, and shapes and dtypes of its tensors."""

    def __init__(self, tree: Any) -> None:  # noqa: ANN401 - any pytree
        self._structure = TreeSpec(tree)
        self._tensors = self._described(tree)
        self._hash = hash((self._structure, tuple(self._tensors)))

    def fits(self, tree: Any) -> bool:  # noqa: ANN401
        """Return True for a tree of this form."""
        return self._structure.fits(tree) and self._described(tree) == self._tensors

    def _described(self, tree: Any) -> list[tuple[torch.Size, torch.dtype]]:  # noqa: ANN401
        return [(tensor.shape, tensor.dtype) for tensor in self._structure.flatten(tree)]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Form) and (self._tensors, self._structure) == (other._tensors, other._structure)

    def __hash__(self) -> int:
        return self._hash


def _is_named_tuple(cls: type[Any]) -> bool:
    return cls.__bases__ == (tuple,) and hasattr(cls, "_fields")


def named_tensors(tree: Any) -> dict[tuple[object, ...], Tensor]:  # noqa: ANN401 - any pytree
    """Return the tensors of a pytree by their paths, whose last entries are their names."""
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return {tuple(map(_name_of, path)): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}


def _name_of(entry: Any) -> object:  # noqa: ANN401 - an entry of one of torch's paths
    return next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), entry)


__getattr__ = renamed.attributes(__name__)
