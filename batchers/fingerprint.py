"""What a graph of an agent's work would freeze, written down so that changes are noticed. Part of rlstruct.batchers.

A recorded graph reads an agent's tensors where they were, and keeps every Python value as it was. New values *in* the
tensors are seen by the next replay; another tensor in their place, or another Python number, would not be.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstruct.core import DictTensor

Fingerprint = dict[str, object]

_PLAIN = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, np.generic)
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})
_MAX_DEPTH = 12


def fingerprint(root: object, device: torch.device, name: str, tensors: dict[str, Tensor] | None = None) -> Fingerprint:
    """Describe everything that an object holds, as a graph of work on ``device`` would freeze it.

    Args:
        root: usually an agent. Its attributes are followed, through modules, containers and objects.
        device: tensors there count by address, tensors elsewhere by address and version of their values.
        name: what to call the root.
        tensors: if given, those on ``device`` are put here by path, and count by layout only.

    Returns:
        Path to something comparable.
    """
    found: Fingerprint = {}
    _describe(root, _Leaves(device, tensors), name, found, set(), 0)
    return found


def values_of(tensors: DictTensor, name: str) -> Fingerprint:
    """Describe a few small tensors on the CPU by their values."""
    return {f"{name}[{key!r}]": (value.dtype, value.tolist()) for key, value in tensors.items()}  # sync: of CPU memory


def host_generators(device: torch.device) -> Fingerprint:
    """Describe the global generators of the host, whose numbers a graph would freeze."""
    numpy_state: Any = np.random.get_state()
    found: Fingerprint = {
        "Python's global random generator": hash(random.getstate()),
        "numpy's global random generator": (numpy_state[1].tobytes(), numpy_state[2]),
    }
    if device.type == "cuda":  # draws on the simulated accelerator come from the CPU's generator
        found["torch's global generator of the CPU"] = torch.get_rng_state().numpy().tobytes()  # sync: of CPU memory
    return found


def first_change(before: Fingerprint, after: Fingerprint) -> str | None:
    """Return the path of something that differs, None if all is equal."""
    if before == after:
        return None
    return next(key for key in [*before, *after] if key not in after or before.get(key, ...) != after[key])


class _Leaves:
    """Describes what has no parts."""

    def __init__(self, device: torch.device, tensors: dict[str, Tensor] | None) -> None:
        self._device = device
        self._tensors = tensors

    def describe(self, value: object, path: str) -> object:
        """Return something comparable, None for what has parts."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, torch.Generator):
            on_cpu = value.device.type == "cpu"
            return value.get_state().numpy().tobytes() if on_cpu else id(value)  # sync: of CPU memory
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        if isinstance(value, random.Random):
            return hash(value.getstate())
        has_parts = isinstance(value, Mapping | list | tuple | set) or hasattr(value, "__dict__") or _slots(value)
        return None if has_parts and not isinstance(value, type) else id(value)

    def _tensor(self, value: Tensor, path: str) -> object:
        layout = (tuple(value.shape), value.stride(), value.dtype, str(value.device))
        there = value.device == self._device
        if there and self._tensors is not None:
            self._tensors[path] = value
            return layout
        place = (value.data_ptr(), *layout)
        return place if there or value.is_inference() else (*place, value._version)


def _describe(value: object, leaves: _Leaves, path: str, found: Fingerprint, seen: set[int], depth: int) -> None:
    kind = type(value)
    if kind in _CONTAINERS and not value:  # most of what a module has are empty dicts of hooks
        return
    if isinstance(value, _PLAIN):
        found[path] = (kind, repr(value))
        return
    if id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    leaf = leaves.describe(value, path)
    if leaf is not None:
        found[path] = leaf
        return
    for name, part in _parts(value):
        _describe(part, leaves, f"{path}{name}", found, seen, depth + 1)


def _parts(value: Any) -> list[tuple[str, object]]:  # noqa: ANN401 - anything with parts
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if isinstance(value, torch.nn.Module):
        own = {key: part for key, part in vars(value).items() if key not in ("_parameters", "_buffers", "_modules")}
        return [
            (f".{k}", v)
            for k, v in [*value._parameters.items(), *value._buffers.items(), *value._modules.items(), *own.items()]
        ]
    own = {**getattr(value, "__dict__", {}), **{key: getattr(value, key, None) for key in _slots(value)}}
    return [(f".{key}", part) for key, part in own.items()]


def _slots(value: object) -> tuple[str, ...]:
    slots = getattr(type(value), "__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
