"""Old import paths and names, which work for one release with a DeprecationWarning: the one table of them.

Importing rlstruct puts `OldModules` on ``sys.meta_path``, where ``import rlstruct.sims.atari.env`` finds the module
that stands at ``rlstruct.atari.env`` today. A module with old names has the line
``__getattr__ = renamed.attributes(__name__)``.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SINCE = "0.4"

MODULES = {
    "rlstruct.algos.alphazero": "rlstruct.search.alphazero",
    "rlstruct.algos.arena": "rlstruct.search.arena",
    "rlstruct.batchers.tuning": "rlstruct.sharing.tuning",
    "rlstruct.sims.atari": "rlstruct.atari",
}
"""Modules and packages with everything in them, old path to new path."""

NAMES = {
    "rlstruct": {"Stepped": "rlstruct:StepResult"},
    "rlstruct.algos": {
        "AlphaZeroConfig": "rlstruct.search.alphazero:AlphaZeroConfig",
        "alphazero": "rlstruct.search.alphazero",
        "Follower": "rlstruct.algos:PolyakAverage",
        "judge_actions": "rlstruct.algos:evaluate_actions",
    },
    "rlstruct.batchers": {
        "Tuning": "rlstruct.sharing:Tuning",
        "tune": "rlstruct.sharing:tune",
    },
    "rlstruct.search": {"Search": "rlstruct.search:TreeSearch"},
    "rlstruct.sharing": {"Placement": "rlstruct.sharing:GpuSharing"},
}
"""Names of each module, old name to ``module:new name``, or to a module."""


def module_of(name: str) -> str | None:
    """Return the path at which a module stands today, or None if it has not moved.

    >>> module_of("rlstruct.sims.atari.env"), module_of("rlstruct.sims")
    ('rlstruct.atari.env', None)
    """
    head, tail = name, ""
    while head:
        if head in MODULES:
            return MODULES[head] + tail
        head, dot, last = head.rpartition(".")
        tail = f"{dot}{last}{tail}"
    return None


def attributes(place: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the module ``place``, which finds its old names."""
    names = NAMES[place]

    def get(name: str) -> Any:  # noqa: ANN401 - any name of a module
        if name not in names:
            raise AttributeError(f"module {place!r} has no attribute {name!r}", name=name, obj=sys.modules[place])
        home, _, now = names[name].partition(":")
        _warn(f"{place}.{name}", names[name].replace(":", "."))
        module = importlib.import_module(home)
        return getattr(module, now) if now else module

    return get


class OldModules:
    """Finder and loader of modules that have moved. An old path gives the very module of the new path, not a copy."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a specification for an old path, None for all others."""
        if not name.startswith("rlstruct.") or (now := module_of(name)) is None:
            return None
        _warn(name, now)
        return ModuleSpec(name, cls(), loader_state=now)  # type: ignore[arg-type] - has what a loader needs

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module from its new path."""
        made = importlib.import_module(spec.loader_state)
        spec.loader_state = made, made.__spec__
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification, which Python has replaced by that of the old path."""
        spec: Any = module.__spec__
        module.__spec__ = spec.loader_state[1]


def _warn(old: str, new: str) -> None:
    """Warn at the line that uses the old name, past the frames of the import system."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        "importlib" in frame.f_code.co_filename or frame.f_globals.get("__name__") in (__name__, "rlstruct")
    ):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    where = frame.f_code.co_filename, frame.f_lineno, str(frame.f_globals.get("__name__"))
    warnings.warn_explicit(f"{old} is {new} since version {SINCE}", DeprecationWarning, *where, registry)


sys.meta_path.insert(0, OldModules)  # type: ignore[arg-type] - before Python's own finder, which would make a second copy
