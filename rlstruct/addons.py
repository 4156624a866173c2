"""Add-ons: separate distributions in ``packages/``, which the library finds by name if they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rlstruct.errors import MissingPackageError


def load(name: str, where: str) -> ModuleType:
    """Import a module by its name, and say what to install if it belongs to an add-on that is missing.

    Args:
        name: any module; ``"rlstruct_atari.env"``, for example, belongs to the add-on in ``packages/atari``.
        where: what needs it, for the message.

    Raises:
        MissingPackageError: the add-on is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package or not package.startswith("rlstruct_"):
            raise
        addon = package.removeprefix("rlstruct_")
        raise MissingPackageError(
            f"{where} needs the add-on rlstruct-{addon}, which is not installed. Install the add-on: "
            f"pip install -e packages/{addon} in a checkout of rlstruct"
        ) from None


def attributes(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package some of whose names live in add-ons.

    Args:
        package: ``__name__`` of the package.
        homes: for each name, the module of an add-on that defines it.
    """

    def get(name: str) -> Any:  # noqa: ANN401 - any name of a module
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(load(homes[name], f"{package}.{name}"), name)

    return get
