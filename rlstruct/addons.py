"""Add-ons: distributions of their own, in ``packages/``, each of which installs further subpackages of rlstruct."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rlstruct.errors import MissingPackageError

ADDONS = {
    "rlstruct.sims.atari": "atari",
    "rlstruct.profiling.analysis": "profiler",
    "rlstruct.search": "search",
    "rlstruct.algos.alphazero": "search",
    "rlstruct.sharing": "sharing",
    "rlstruct.batchers.tuning": "sharing",
}
"""Folder in ``packages/`` of the add-on that installs a subpackage."""


def load(name: str, where: str) -> ModuleType:
    """Import a module of an add-on.

    Args:
        name: a subpackage in `ADDONS`, or a module of one.
        where: what needs it, for the message.

    Raises:
        MissingPackageError: the add-on is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ADDONS:
            raise
        addon = ADDONS[error.name]
        raise MissingPackageError(
            f"{where} needs {error.name}, which is in the add-on rlstruct-{addon}. Install it: "
            f"pip install -e packages/{addon} in a checkout of rlstruct."
        ) from None


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package some of whose names live in add-ons.

    Args:
        package: ``__name__`` of the package.
        homes: for each name, the module that defines it; a module's own name gives the module itself.
    """

    def get(name: str) -> Any:  # noqa: ANN401 - any name of a module
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = load(homes[name], f"{package}.{name}")
        return module if homes[name] == f"{package}.{name}" else getattr(module, name)

    return get
