"""What is said to the user: results, and what was wrong, in one line, with the mend."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Iterable

from rlstruct.errors import how_to_install


class UserError(Exception):
    """A mistake of the user: shown as one line, without a traceback; the exit status is 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean …?``, or nothing if nothing is near.

    >>> nearest("CartPol-v1", ["CartPole-v1", "Pendulum-v1"])
    " Did you mean 'CartPole-v1'?"
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, 1, 0.6)
    if not near:  # a name without its version, or a part of one
        near = sorted((name for name in by_lower if word.lower() in name), key=len)[:1] if len(word) > 2 else []
    return f" Did you mean {by_lower[near[0]]!r}?" if near else ""


def require(extra: str, *modules: str, what: str) -> None:
    """Refuse to go on without an extra of this package."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise UserError(f"{what} needs {', '.join(missing)}, not installed. {how_to_install(extra)}")


def check_device(option: str, device: str) -> None:
    """Refuse a device that is not here."""
    from rlstruct.device import resolve_device  # imported here: it brings torch, and mistakes are told without

    try:
        resolve_device(device)
    except ValueError as error:
        raise UserError(f"{option} {device}: {str(error).partition(': ')[2]}") from None


def number(value: float) -> str:
    """Write a return: one digit behind the point, three where nothing stands before it.

    >>> number(475.31), number(-0.0527)
    ('475.3', '-0.053')
    """
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"


def plural(n: int, word: str) -> str:
    """Count things: ``1 core``, ``2 cores``."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def say(text: str = "") -> None:
    """Write a line to the standard output."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
