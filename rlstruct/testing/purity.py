"""Test of an agent's promise to be pure: names the attribute that it depends on besides weights and arguments."""

# ruff: noqa: ANN401  (attributes hold anything)

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor
from rlstruct.engine.promise import RANDOM_IN_TRAINING, modules_of
from rlstruct.testing.conformance import fail

_OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_EXPECTED = "an answer that depends on parameters, buffers and arguments only, since the class has pure = True"
_FIX = "Make it a buffer of a module, pass it in agent_info, or declare it typing.Final if it never changes."


def check_modes(name: str, agent: object) -> None:
    """Raise ConformanceError if dropout or batch normalisation of an agent is in train mode while it acts."""
    for path, module in modules_of(agent).items():
        if isinstance(module, RANDOM_IN_TRAINING) and module.training:
            got = f"{path}, a {type(module).__name__}, in train mode"
            fix = "Call model.eval() on the agent's model: it then acts without dropping or averaging over the batch."
            fail(name, None, got, "modules in eval mode", fix)


def check_pure(name: str, agent: object, answer: Callable[[], DictTensor]) -> None:
    """Change each attribute that an agent may read besides weights and arguments, one at a time, and put it back.

    These are the numbers, bools, strings, arrays and tensors that the agent, its modules and their classes hold, but
    not what is declared `typing.Final`, what a read-only property shows, and what belongs to a library. Dependence on
    anything else shows when the promise is checked at run time. ``answer`` calls the agent eagerly, always with the
    same arguments, and returns everything that it does, on the CPU.

    Raises:
        ConformanceError: it names what the answer depends on, or what the agent changes.
    """
    holders = {name: agent} | {f"{name}.{path}": module for path, module in modules_of(agent).items() if path}
    weights = {id(tensor) for tensor in weights_of_modules(agent)}
    places = [
        (holder, key, f"{path}.{key}", _copied(value))
        for path, holder in holders.items()
        for key, value in _attributes(holder).items()
        if id(value) not in weights
    ]
    expected = answer()
    for holder, key, path, before in places:
        if not _equal(getattr(holder, key), before):
            fix = "Return what lasts from step to step as new_state; draw from observation['rng']."
            fail(name, None, f"{path}, which it changes while it acts", "no change", fix)
    if not _same(answer(), expected):
        fix = "Draw from observation['rng'], and read no clock, file or generator."
        fail(name, None, "another answer to the same arguments", _EXPECTED, fix)
    for holder, key, path, before in places:
        _put(holder, key, _other(before))
        try:
            same = _same(answer(), expected)
        except Exception:  # whatever a changed size or name leads to
            same = False
        finally:
            _put(holder, key, before)
        if not same:
            fail(name, None, f"an answer that depends on {path}", _EXPECTED, _FIX)


def weights_of_modules(agent: object) -> list[Tensor]:
    """Return the parameters and buffers of all modules of an agent."""
    return [t for module in modules_of(agent).values() for t in [*module.parameters(), *module.buffers()]]


def _attributes(holder: object) -> dict[str, Any]:
    """Return the plain values that an object and its classes hold and may change."""
    own = {} if _is_library(type(holder).__module__) else vars(holder)
    kinds = [kind for kind in type(holder).__mro__[::-1] if not _is_library(kind.__module__)]
    kinds = [kind for kind in kinds if not kind.__module__.startswith("rlstruct.")]
    found = {key: value for kind in kinds for key, value in vars(kind).items() if not key.startswith("__")}
    found |= {key: value for key, value in own.items() if not (isinstance(holder, nn.Module) and key in _OF_MODULES)}
    return {key: value for key, value in found.items() if _is_plain(value) and not _is_constant(type(holder), key)}


def _put(holder: object, key: str, value: Any) -> None:
    held = getattr(holder, key)
    if isinstance(held, Tensor):  # in place: others may hold it too
        held.detach().copy_(value)
    elif isinstance(held, np.ndarray):
        held[...] = value
    elif key in vars(holder):
        setattr(holder, key, value)
    else:
        setattr(next(kind for kind in type(holder).__mro__ if key in vars(kind)), key, value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | Tensor | np.ndarray) and type(value).__module__ != "enum"


@functools.cache
def _is_library(module: str) -> bool:
    """Return True for a module of Python or of an installed package; rlstruct's agents are examined like a user's."""
    root = module.split(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return root != "rlstruct" and (root in sys.stdlib_module_names or file.startswith(_LIBRARIES))


def _is_constant(kind: type, name: str) -> bool:
    """Return True if an attribute is declared Final, or backs a read-only property."""
    shown = inspect.getattr_static(kind, name.lstrip("_"), None) if name.startswith("_") else None
    read_only = isinstance(shown, property) and shown.fset is None
    return read_only or any("Final" in str(getattr(base, "__annotations__", {}).get(name)) for base in kind.__mro__)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, bool):
        return not value
    if isinstance(value, Tensor):
        return ~value if value.dtype is torch.bool else value + 1
    return ~value if isinstance(value, np.ndarray) and value.dtype == bool else value + 1


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        same = isinstance(one, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        return same and bool(torch.isclose(one, other, 0, 0, equal_nan=True).all())  # sync: the kit looks at values
    if isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and (one == other or one != one)


def _same(one: DictTensor, other: DictTensor) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in other.keys())
