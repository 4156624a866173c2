"""Registry: things by name, which may stand in modules that are imported when a name is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def imported(place: str) -> Any:  # noqa: ANN401 - whatever stands there
    """Return what stands at a place, ``"module:name"``.

    >>> imported("math:gcd")(6, 4)
    2
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class Registry(MutableMapping[K, T]):
    """Things by name. A value that is a string ``"module:name"`` is imported when it is looked up.

    So the core can list simulators, algorithms, backends and commands of parts that build on it, without importing
    them.

    Args:
        entries: name to thing, or to ``"module:name"``.

    >>> functions = Registry({"gcd": "math:gcd"})
    >>> functions["abs"] = abs
    >>> [functions[name](-4, *rest) for name, rest in (("abs", ()), ("gcd", (6,)))]
    [4, 2]
    """

    def __init__(self, entries: Mapping[K, T | str]) -> None:
        self._entries: dict[K, T | str] = dict(entries)

    def __getitem__(self, name: K) -> T:
        value = self._entries[name]
        if isinstance(value, str):
            value = self._entries[name] = imported(value)
        return value

    def __setitem__(self, name: K, value: T | str) -> None:
        self._entries[name] = value

    def __delitem__(self, name: K) -> None:
        del self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without importing it

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({', '.join(map(str, self._entries))})"
