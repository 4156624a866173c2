"""Comparison of a rebuilt network or agent with the original: classes, attributes, hooks and weights, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct.policies.blueprint import TRUSTED, KeepsArguments
from rlstruct.rl_agent import RL_Agent

_IGNORED = {"training", "_arguments"}  # policies act in eval mode; the arguments of a network show in its attributes
_UNNAMED = {"_modules", "_parameters", "_buffers"}  # left out of the names of parts, as torch does


def differences(rebuilt: Any, expected: Any) -> Iterator[str]:  # noqa: ANN401 - networks, agents and their parts
    """Yield a description of each difference that may change what a network or an agent computes.

    Args:
        rebuilt: the rebuilt object, on the same device.
        expected: the original.
    """
    for path, what in _differences(rebuilt, expected, (), set()):
        yield f"{'.'.join(part for part in path if part not in _UNNAMED) or type(expected).__name__} {what}"


_Path = tuple[str, ...]


def _differences(
    rebuilt: Any,  # noqa: ANN401
    expected: Any,  # noqa: ANN401
    path: _Path,
    visited: set[tuple[int, int]],
) -> Iterator[tuple[_Path, str]]:
    if (id(rebuilt), id(expected)) in visited:
        return
    visited.add((id(rebuilt), id(expected)))
    if isinstance(expected, Tensor):
        if not (isinstance(rebuilt, Tensor) and same_bits(rebuilt, expected)):
            yield path, f"is {_shown(expected)}, and {_shown(rebuilt)} after it was rebuilt"
    elif isinstance(expected, Mapping) and isinstance(rebuilt, Mapping):
        yield from _entries(rebuilt, expected, path, visited)
    elif isinstance(expected, list | tuple) and isinstance(rebuilt, list | tuple):
        pairs = dict(enumerate(rebuilt)), dict(enumerate(expected))
        yield from _entries(*pairs, path, visited)
    elif isinstance(expected, partial) and isinstance(rebuilt, partial):
        for name in ("func", "args", "keywords"):
            yield from _differences(getattr(rebuilt, name), getattr(expected, name), (*path, name), visited)
    elif isinstance(expected, nn.Module | RL_Agent) and type(rebuilt) is type(expected):
        if (patched := _patched(type(expected))) is not None:
            yield path, f"is of a class whose method {patched} was replaced"
        ignored = _IGNORED if isinstance(expected, KeepsArguments) else _IGNORED - {"_arguments"}
        attributes = (vars(rebuilt), vars(expected))
        kept = [{name: value for name, value in some.items() if name not in ignored} for some in attributes]
        yield from _entries(kept[0], kept[1], path, visited)
    elif not _equal(rebuilt, expected):
        yield path, f"is {_shown(expected)}, and {_shown(rebuilt)} after it was rebuilt"


def _entries(
    rebuilt: Mapping[Any, Any], expected: Mapping[Any, Any], path: _Path, visited: set[tuple[int, int]]
) -> Iterator[tuple[_Path, str]]:
    for name in [*expected, *(name for name in rebuilt if name not in expected)]:
        if name not in rebuilt:
            yield (*path, str(name)), "was added after it was made"
        elif name not in expected:
            yield (*path, str(name)), "was removed after it was made"
        else:
            yield from _differences(rebuilt[name], expected[name], (*path, str(name)), visited)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and bits, so that NaN equals NaN."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    a, b = (one.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for one in (actual, expected))
    return torch.equal(a, b)  # sync: for a checkpoint


def _equal(rebuilt: Any, expected: Any) -> bool:  # noqa: ANN401 - values of any kind
    if isinstance(rebuilt, float) and isinstance(expected, float) and math.isnan(rebuilt) and math.isnan(expected):
        return True
    if type(rebuilt) is type(expected) and type(expected).__module__.startswith(TRUSTED):
        return True  # such as the simulator of an agent that searches, which its factory describes
    return bool(rebuilt is expected or rebuilt == expected)


def _patched(cls: type) -> str | None:
    """Return the name of a method that a program has put into a class of rlstruct or torch.nn."""
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith(TRUSTED) else ():
            method = getattr(value, "__func__", value)
            if isinstance(method, FunctionType) and not str(method.__module__).startswith(("torch.", *TRUSTED)):
                return f"{base.__name__}.{name}"
    return None


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {value.dtype}"
    return repr(value) if isinstance(value, int | float | str | None | Set) else type(value).__name__
