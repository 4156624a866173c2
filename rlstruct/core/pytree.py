"""The structures as pytrees, so that torch.compile, torch.func and torch.utils see the tensors inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils import _pytree as pytree

from rlstruct.core.dict_tensor import DictTensor
from rlstruct.core.temporal import TemporalDictTensor
from rlstruct.core.trajectories import Trajectories

_Path = list[tuple[pytree.KeyEntry, Any]]


def _flatten_dict(structure: DictTensor) -> tuple[list[Any], list[str]]:
    return list(structure.values()), list(structure.keys())


def _flatten_dict_with_path(structure: DictTensor) -> tuple[_Path, list[str]]:
    return [(pytree.MappingKey(key), value) for key, value in structure.items()], list(structure.keys())


def _unflatten_dict(values: Iterable[Any], keys: list[str]) -> DictTensor:
    return DictTensor._trusted(dict(zip(keys, values, strict=True)))


def _flatten_temporal(structure: TemporalDictTensor) -> tuple[list[Any], list[str]]:
    return [*structure.values(), structure.lengths], list(structure.keys())


def _flatten_temporal_with_path(structure: TemporalDictTensor) -> tuple[_Path, list[str]]:
    path: _Path = [(pytree.MappingKey(key), value) for key, value in structure.items()]
    return [*path, (pytree.GetAttrKey("lengths"), structure.lengths)], list(structure.keys())


def _unflatten_temporal(values: Iterable[Any], keys: list[str]) -> TemporalDictTensor:
    *tensors, lengths = values
    return TemporalDictTensor._trusted(dict(zip(keys, tensors, strict=True)), lengths)


def _flatten_trajectories(structure: Trajectories) -> tuple[list[Any], None]:
    return [structure.info, structure.trajectories], None


def _flatten_trajectories_with_path(structure: Trajectories) -> tuple[_Path, None]:
    path: _Path = [
        (pytree.GetAttrKey("info"), structure.info),
        (pytree.GetAttrKey("trajectories"), structure.trajectories),
    ]
    return path, None


def _unflatten_trajectories(values: Iterable[Any], context: None) -> Trajectories:
    info, trajectories = values
    return Trajectories._trusted(info, trajectories)


def register() -> None:
    """Tell torch how to take the structures apart. Called once, when `rlstruct.core` is imported."""
    for cls, flatten, unflatten, with_path in (
        (DictTensor, _flatten_dict, _unflatten_dict, _flatten_dict_with_path),
        (TemporalDictTensor, _flatten_temporal, _unflatten_temporal, _flatten_temporal_with_path),
        (Trajectories, _flatten_trajectories, _unflatten_trajectories, _flatten_trajectories_with_path),
    ):
        pytree.register_pytree_node(
            cls,
            flatten,
            unflatten,
            serialized_type_name=f"rlstruct.core.{cls.__name__}",
            flatten_with_keys_fn=with_path,
        )
