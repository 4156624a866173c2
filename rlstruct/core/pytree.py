"""The structures as pytrees, so that torch.compile, torch.func and torch.utils see the tensors inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils import _pytree as pytree

from rlstruct.core.dict_tensor import DictTensor, TemporalDictTensor
from rlstruct.core.trajectories import Trajectories


def _unflatten_temporal(values: Iterable[Any], keys: list[str]) -> TemporalDictTensor:
    *tensors, lengths = values
    return TemporalDictTensor.unchecked(dict(zip(keys, tensors, strict=True)), lengths)


def _register(
    cls: type[Any], attributes: tuple[str, ...], unflatten: Callable[[Iterable[Any], list[str]], Any]
) -> None:
    """Register a structure whose children are its items, if it has any, and some attributes."""
    items = hasattr(cls, "items")

    def flatten(structure: Any) -> tuple[list[Any], list[str]]:  # noqa: ANN401 - an instance of cls
        parts = [getattr(structure, name) for name in attributes]
        return ([*structure.values(), *parts], list(structure.keys())) if items else (parts, [])

    def flatten_with_path(structure: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], list[str]]:  # noqa: ANN401
        values, keys = flatten(structure)
        path: list[pytree.KeyEntry] = [*map(pytree.MappingKey, keys), *map(pytree.GetAttrKey, attributes)]
        return list(zip(path, values, strict=True)), keys

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"rlstruct.core.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_path,
    )


def register() -> None:
    """Tell torch how to take the structures apart. Called once, when `rlstruct.core` is imported."""
    _register(DictTensor, (), lambda values, keys: DictTensor.unchecked(dict(zip(keys, values, strict=True))))
    _register(TemporalDictTensor, ("lengths",), _unflatten_temporal)
    _register(Trajectories, ("info", "trajectories"), lambda values, keys: Trajectories.unchecked(*values))
