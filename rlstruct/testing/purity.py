"""Test of an agent's promise to be pure: it names anything else that the agent's outputs depend on.

Calling the agent twice, or comparing executors with it, cannot find a global or an attribute that the program changes
later in the run: a captured graph would keep its old value. So each of these values is changed here.
"""

# ruff: noqa: ANN401  (attributes and globals hold anything)

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from rlstruct.core import DictTensor
from rlstruct.engine.purity import RANDOM_IN_TRAINING, modules_of
from rlstruct.errors import kind_of
from rlstruct.testing.conformance import equal_rows, fail, holds

_OF_MODULES = frozenset(vars(nn.Module()))
_INSTALLED = ("site-packages", "dist-packages")  # folders of installed packages
_EXPECTED = "an output that depends on parameters, buffers and arguments only, since the class has pure = True"
_FIX = (
    "Make it a buffer of a module, or pass it in agent_info. If it never changes, declare it in its class or module "
    "with typing.Final: `stochastic: Final[bool]`."
)


def check_modes(name: str, agent: object) -> None:
    """Raise ConformanceError if dropout or batch normalisation of an agent is in train mode while it acts."""
    for path, module in modules_of(agent).items():
        if isinstance(module, RANDOM_IN_TRAINING) and module.training:
            got = f"{path}, {kind_of(module)}, in train mode"
            fix = "Call model.eval() on the agent's model: it then acts without dropping or averaging over the batch."
            fail(name, None, got, "modules in eval mode", fix)


def check_pure(name: str, agent: object, answer: Callable[[], DictTensor]) -> None:
    """Check that an agent's output stays the same while each value that it may read is changed, one at a time.

    Weights and arguments keep their values. Every other number, bool, string, array and tensor is changed and restored:
    in attributes of the agent, of the objects, containers and modules within it, and of their classes; and in globals
    and closures that their code reads. Exempt are values declared `typing.Final`, values behind a read-only property,
    and libraries. ``answer`` calls the agent eagerly, always with the same arguments, and returns its whole answer on
    the CPU.
    """
    visited = {id(tensor) for tensor in weights_of_modules(agent)}
    places = [(place, _copied(place.get())) for place in _places(_fixed(name, agent), visited)]
    expected = answer()
    for place, before in places:
        if not _equal(place.get(), before):
            fix = "Return what lasts from step to step as new_state; draw from observation['rng']."
            fail(name, None, f"{place.path}, which it changes while it acts", "no change", fix)
    if not _same(answer(), expected):
        fix = "Draw from observation['rng'], and read no clock, file or generator."
        fail(name, None, "another output for the same arguments", _EXPECTED, fix)
    for place, before in places:
        place.put(_other(before))
        try:
            unchanged = _same(answer(), expected)
        except Exception:  # a changed size or name may raise anything
            unchanged = False
        finally:
            place.put(before)
        if not unchanged:
            fail(name, None, f"an output that depends on {place.path}", _EXPECTED, _FIX)


def weights_of_modules(agent: object) -> list[Tensor]:
    """Return the parameters and buffers of all modules of an agent."""
    return [t for module in modules_of(agent).values() for t in [*module.parameters(), *module.buffers()]]


class _Place(NamedTuple):
    """A value that can be changed: its name in messages, and functions that get and set it."""

    path: str
    get: Callable[[], Any]
    set: Callable[[Any], object] | None  # None: only tensors and arrays can be changed, in place

    def put(self, value: Any) -> None:
        held = self.get()
        if isinstance(held, Tensor):  # in place, as others may hold it too
            held.detach().copy_(value)
        elif isinstance(held, np.ndarray):
            held[...] = value
        elif self.set is not None:
            self.set(value)


def _attribute(path: str, holder: object, name: str) -> _Place:
    return _Place(path, functools.partial(getattr, holder, name), functools.partial(setattr, holder, name))


def _entry(path: str, holder: Any, key: Any) -> _Place:
    """Return the place of an entry of a dict or list."""
    return _Place(path, functools.partial(operator.getitem, holder, key), functools.partial(holder.__setitem__, key))


def _fixed(path: str, value: Any) -> _Place:
    return _Place(path, lambda: value, None)


def _places(place: _Place, visited: set[int]) -> Iterator[_Place]:
    """Yield a place, or all places within its value; ``visited`` holds the ids of values visited so far."""
    value = place.get()
    if _is_leaf(value):
        is_array = isinstance(value, Tensor | np.ndarray)
        if (is_array or place.set is not None) and not (is_array and id(value) in visited):
            yield place
    elif type(value) is tuple:
        for i in range(len(value)):
            yield from _places(_part(place, i), visited)
    elif value is not None and id(value) not in visited:
        visited.add(id(value))
        for inner in [*_entries(value, place.path)]:
            yield from _places(inner, visited)


def _part(place: _Place, i: int) -> _Place:
    """Return the place of an entry of a tuple, which is replaced to change it."""

    def put(new: Any) -> None:
        now = place.get()
        if place.set is not None:
            place.set((*now[:i], new, *now[i + 1 :]))

    return _Place(f"{place.path}[{i}]", lambda: place.get()[i], put if place.set is not None else None)


def _entries(value: Any, path: str) -> Iterator[_Place]:
    """Yield the places directly within a value, and those that its code reads."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield _entry(f"{path}[{key!r}]", value, key)
    elif isinstance(value, functools.partial):
        yield from (_fixed(path, inner) for inner in (*value.args, value.func))
    elif isinstance(value, FunctionType):
        yield from _read_by(value)
    elif inspect.ismethod(value):
        yield _fixed(path, value.__self__)
    elif not isinstance(value, type | ModuleType):
        yield from _attributes(value, path)


def _attributes(value: Any, path: str) -> Iterator[_Place]:
    """Yield the attributes of an object and of its classes, and its methods."""
    cls, own, skipped = type(value), getattr(value, "__dict__", {}), frozenset[str]()
    if isinstance(value, nn.Module):
        skipped = _OF_MODULES
        for key, module in value._modules.items():
            yield _fixed(f"{path}.{key}", module)
    is_users = not _is_library(cls.__module__) or isinstance(value, argparse.Namespace | SimpleNamespace)
    if not is_users and not cls.__module__.startswith("rlstruct."):
        return
    for key in own:
        if key not in skipped and not _is_constant(cls, key):
            yield _entry(f"{path}.{key}", own, key)
    for base in cls.__mro__:
        for key, held in () if _is_library(base.__module__) else [*vars(base).items()]:
            function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
            if isinstance(function, FunctionType):
                yield _fixed(path, function)
            elif _is_leaf(held) and not key.startswith("__") and key not in own and not _is_constant(base, key):
                yield _attribute(f"{base.__name__}.{key}", base, key)


def _read_by(function: FunctionType) -> Iterator[_Place]:
    """Yield the places that a function reads: closure, globals of its module, attributes of other modules."""
    code, name = function.__code__, function.__module__ or ""
    if _is_library(name):
        return
    for cell, key in zip(function.__closure__ or (), code.co_freevars, strict=True):
        with contextlib.suppress(ValueError):  # nothing was assigned yet
            _ = cell.cell_contents
            yield _attribute(f"{key!r} of the closure of {function.__qualname__}", cell, "cell_contents")
    names, module = _names(code), sys.modules.get(name)
    for key in [key for key in names if key in function.__globals__ and not _is_declared(module, key)]:
        value = function.__globals__[key]
        if not isinstance(value, ModuleType | type):
            yield _entry(f"the global {key} of module {name}", function.__globals__, key)
        elif isinstance(value, ModuleType) and not _is_library(value.__name__):
            for read in names:
                if read in vars(value) and not _is_declared(value, read):
                    yield _entry(f"the global {read} of module {value.__name__}", vars(value), read)


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in code, including functions within it."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | Tensor | np.ndarray) and type(value).__module__ != "enum"


@functools.cache
def _is_library(module: str) -> bool:
    """Return True for modules whose code is not examined: those of Python, installed packages and rlstruct."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    trusted = {"", "builtins", "rlstruct", *sys.stdlib_module_names}
    return module.split(".")[0] in trusted or not set(_INSTALLED).isdisjoint(Path(file).parts)


def _is_constant(cls: type, name: str) -> bool:
    """Return True if an attribute is declared Final, or backs a read-only property."""
    shown = inspect.getattr_static(cls, name.lstrip("_"), None) if name.startswith("_") else None
    read_only = isinstance(shown, property) and shown.fset is None
    return read_only or any(_is_declared(base, name) for base in cls.__mro__)


def _is_declared(owner: Any, name: str) -> bool:
    annotations: Mapping[str, object] = getattr(owner, "__annotations__", {}) if owner is not None else {}
    return "Final" in str(annotations.get(name, ""))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _other(value: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(value, str):
        return value + "_"
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    return value ^ True if is_bool else value + 1


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        alike = isinstance(one, Tensor) and one.shape == other.shape and one.dtype == other.dtype
        return alike and holds(equal_rows(one, other))
    if isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and (one == other or one != one)


def _same(one: DictTensor, other: DictTensor) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in other.keys())
