"""Whether an agent keeps its promise to be pure: finds and names what it depends on beside weights and arguments."""

# ruff: noqa: ANN401  (attributes and globals hold anything)

from __future__ import annotations

import argparse
import dis
import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlstruct.core import DictTensor
from rlstruct.engine.promise import modules_of
from rlstruct.testing.conformance import fail

_OF_MODULES = frozenset(vars(nn.Module()))
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_EXPECTED = "an answer that depends on parameters, buffers and arguments only, since the class has pure = True"
_MEND = "Make it a buffer of a module, pass it in agent_info, or declare it typing.Final if it never changes."
_TRAINS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)


def check_modes(name: str, agent: object) -> None:
    """Raise if a module of an agent does in train mode what it does not do when it acts.

    Args:
        name: of the agent.
        agent: its modules are looked at.

    Raises:
        ConformanceError: dropout or batch normalisation is in train mode.
    """
    for path, module in modules_of(agent).items():
        if isinstance(module, _TRAINS) and module.training:
            got = f"{path}, a {type(module).__name__}, in train mode"
            mend = "Call model.eval() on the agent's model: it then acts without dropping or averaging over the batch."
            fail(name, None, got, "modules in eval mode", mend)


def check_pure(name: str, agent: object, answer: Callable[[], DictTensor]) -> None:
    """Change whatever an agent may read beside weights and arguments, one thing at a time, and put it back.

    Looked at are numbers, bools, strings, arrays and tensors: in the attributes of the agent, of objects, containers
    and modules within it, of their classes, and in the globals and closures that their code reads. Not looked at: what
    is declared `typing.Final`, what a read-only property shows, and what belongs to a library.

    Args:
        name: of the agent.
        agent: promises to be pure.
        answer: calls it as it is, always with the same arguments; everything that it returns, on the CPU.

    Raises:
        ConformanceError: it names what the answer depends on, or what the agent changes.
    """
    places = list(_Search(agent, name).places())
    before = [_copied(place.value) for place in places]
    expected = answer()
    for place, value in zip(places, before, strict=True):
        if not _equal(place.read(), value):
            mend = "Return what lasts from step to step as new_state; draw from observation['rng']."
            fail(name, None, f"{place.path}, which it changes while it acts", "no change", mend)
    if not _same(answer(), expected):
        mend = "Draw from observation['rng'], and read no clock, file or generator."
        fail(name, None, "another answer to the same arguments", _EXPECTED, mend)
    for place, value in zip(places, before, strict=True):
        with place.changed(_other(value)):
            try:
                same = _same(answer(), expected)
            except Exception:  # whatever a changed size or name leads to
                same = False
        if not same:
            fail(name, None, f"an answer that depends on {place.path}", _EXPECTED, _MEND)


@dataclass
class _Place:
    """Something that can be changed.

    Attributes:
        path: how to say it.
        value: what is there.
        write: puts something there.
        read: tells what is there now.
    """

    path: str
    value: Any
    write: Callable[[Any], None]
    read: Callable[[], Any]

    def changed(self, value: Any) -> Any:
        return _Changed(self, value)


class _Changed:
    """What a place holds inside a ``with``."""

    def __init__(self, place: _Place, value: Any) -> None:
        self._place, self._value = place, value

    def __enter__(self) -> None:
        place = self._place
        if isinstance(place.value, Tensor | np.ndarray):  # in place: others may hold it too
            self._before = _copied(place.value)
            _overwrite(place.value, self._value)
        else:
            place.write(self._value)

    def __exit__(self, *error: object) -> None:
        place = self._place
        if isinstance(place.value, Tensor | np.ndarray):
            _overwrite(place.value, self._before)
        else:
            place.write(place.value)


class _Search:
    """Finds what an agent may read."""

    def __init__(self, agent: object, name: str) -> None:
        self._agent, self._name = agent, name
        self._seen: set[int] = {id(tensor) for tensor in weights_of_modules(agent)}

    def places(self) -> Iterator[_Place]:
        yield from self._inside(self._agent, self._name)

    def _at(self, path: str, holder: Any, key: Any) -> Iterator[_Place]:
        """What a dict, list or namespace holds under a key."""
        value = holder[key]
        if isinstance(value, tuple) and type(value) is tuple:
            parts = [list(value)]

            def write(parts: list[list[Any]] = parts) -> None:
                holder[key] = tuple(parts[0])

            for i in range(len(value)):
                for place in self._at(f"{path}[{i}]", parts[0], i):
                    yield _through(place, write)
        elif _is_leaf(value):
            if not isinstance(value, Tensor | np.ndarray) or id(value) not in self._seen:
                yield _Place(path, value, functools.partial(holder.__setitem__, key), lambda: holder[key])
        else:
            yield from self._inside(value, path)

    def _inside(self, value: Any, path: str) -> Iterator[_Place]:
        if id(value) in self._seen or value is None:
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            for key in list(value):
                yield from self._at(f"{path}[{key!r}]", value, key)
        elif isinstance(value, list):
            for i in range(len(value)):
                yield from self._at(f"{path}[{i}]", value, i)
        elif isinstance(value, functools.partial):
            yield from self._inside(list(value.args), path)
            yield from self._inside(value.func, path)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif inspect.ismethod(value):
            yield from self._inside(value.__self__, path)
        elif not isinstance(value, type | ModuleType):
            yield from self._object(value, path)

    def _object(self, value: Any, path: str) -> Iterator[_Place]:
        kind, own = type(value), getattr(value, "__dict__", {})
        if isinstance(value, nn.Module):
            for key, module in value._modules.items():
                yield from self._inside(module, f"{path}.{key}")
        if _is_library(kind.__module__) and not isinstance(value, argparse.Namespace | SimpleNamespace):
            return
        skipped = _OF_MODULES if isinstance(value, nn.Module) else frozenset()
        for key in [key for key in own if key not in skipped and not _is_constant(kind, key)]:
            yield from self._at(f"{path}.{key}", own, key)
        for base in kind.__mro__:
            if _is_library(base.__module__) or base.__module__.startswith("rlstruct."):
                continue
            for key, held in list(vars(base).items()):
                function = held.fget if isinstance(held, property) else getattr(held, "__func__", held)
                if isinstance(function, FunctionType):
                    yield from self._function(function)
                elif _is_leaf(held) and not key.startswith("__") and key not in own and not _is_constant(base, key):
                    write, read = functools.partial(setattr, base, key), functools.partial(getattr, base, key)
                    yield _Place(f"{base.__name__}.{key}", held, write, read)

    def _function(self, function: FunctionType) -> Iterator[_Place]:
        """What the code of a function reads: globals of its module, attributes of other modules, its closure."""
        if id(function.__code__) in self._seen or _is_library(function.__module__):
            return
        self._seen.add(id(function.__code__))
        if (function.__module__ or "").startswith("rlstruct."):
            return
        for cell, key in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True):
            holder = _Cell(cell)
            if holder.is_full():
                yield from self._at(f"{key!r} of the closure of {function.__qualname__}", holder, key)
        names = _names(function.__code__)
        module = sys.modules.get(function.__module__ or "")
        for key in [key for key in names if key in function.__globals__ and not _is_declared(module, key)]:
            value = function.__globals__[key]
            if isinstance(value, ModuleType) and not _is_library(value.__name__) and not _is_ours(value.__name__):
                for name in [name for name in names if name in vars(value) and not _is_declared(value, name)]:
                    yield from self._at(f"the global {name} of module {value.__name__}", vars(value), name)
            elif not isinstance(value, ModuleType | type):
                path = f"the global {key} of module {function.__module__}"
                yield from self._at(path, function.__globals__, key)


class _Cell:
    """A cell of a closure, written as a container is."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def is_full(self) -> bool:
        try:
            return self._cell.cell_contents is not None
        except ValueError:  # nothing was assigned yet
            return False

    def __getitem__(self, key: object) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: object, value: Any) -> None:
        self._cell.cell_contents = value


def weights_of_modules(agent: object) -> list[Tensor]:
    """Return the parameters and buffers of all modules of an agent."""
    return [t for module in modules_of(agent).values() for t in [*module.parameters(), *module.buffers()]]


def _through(place: _Place, then: Callable[[], None]) -> _Place:
    def write(value: Any) -> None:
        place.write(value)
        then()

    return _Place(place.path, place.value, write, place.read)


def _names(code: CodeType) -> set[str]:
    """The globals and attributes that code names, also in functions within it."""
    reading = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")
    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname in reading}
    return found.union(*(_names(part) for part in code.co_consts if isinstance(part, CodeType)))


def _is_leaf(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | Tensor | np.ndarray) and type(value).__module__ != "enum"


def _is_ours(module: str) -> bool:
    return module.split(".")[0] == "rlstruct"


@functools.cache
def _is_library(module: str | None) -> bool:
    """Whether a module came with Python or was installed; rlstruct's own agents are looked at as a user's are."""
    if module is None or module == "builtins":
        return True
    if _is_ours(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return module.split(".")[0] in sys.stdlib_module_names or (file is not None and file.startswith(_LIBRARIES))


def _is_constant(kind: type, name: str) -> bool:
    """Whether an attribute is declared Final, or is what a read-only property shows."""
    shown = inspect.getattr_static(kind, name.lstrip("_"), None) if name.startswith("_") else None
    read_only = isinstance(shown, property) and shown.fset is None
    return read_only or any(_is_declared(base, name) for base in kind.__mro__)


def _is_declared(owner: Any, name: str) -> bool:
    annotations: Mapping[str, object] = getattr(owner, "__annotations__", {}) if owner is not None else {}
    return "Final" in str(annotations.get(name, ""))


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, bool):
        return not value
    if isinstance(value, Tensor):
        return ~value if value.dtype is torch.bool else value + 1
    return ~value if isinstance(value, np.ndarray) and value.dtype == bool else value + 1


def _overwrite(place: Any, value: Any) -> None:
    if isinstance(place, Tensor):
        with torch.no_grad():
            place.detach().copy_(value)
    else:
        place[...] = value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(other, Tensor):
        same = isinstance(one, Tensor) and one.shape == other.shape
        return same and bool(
            ((one == other) | ((one != one) & (other != other))).all()
        )  # sync: the kit looks at values
    if isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and (one == other or one != one)


def _same(one: DictTensor, other: DictTensor) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in other.keys())
