"""Command lines from dataclasses; needs tyro when it is used, not when it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

Options = TypeVar("Options")


def positional() -> Any:  # noqa: ANN401 - a marker of tyro
    """Return the mark of an argument that is given without the name of an option."""
    import tyro

    return tyro.conf.Positional


def named(name: str) -> Any:  # noqa: ANN401 - a marker of tyro
    """Call an argument ``name`` in the help."""
    import tyro

    return tyro.conf.arg(metavar=name)


def parse(
    cls: type[Options],
    arguments: Sequence[str],
    program: str,
    description: str,
    default: Options | None = None,
) -> Options:
    """Read options into a dataclass; prints help and leaves if they ask for it, or make no sense.

    Args:
        cls: a dataclass.
        arguments: the words.
        program: how it is called, for the help.
        description: what it does, in 80 letters: the parser does not fold it.
        default: what holds where nothing is said; None for the defaults of the class.
    """
    import tyro

    settings: dict[str, Any] = {} if default is None else {"default": default}
    parsed: Options = tyro.cli(
        cls,
        args=list(arguments),
        prog=program,
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
        **settings,
    )
    return parsed
