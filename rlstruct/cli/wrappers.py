"""Wrappers of gymnasium by name, as the command line takes them: ``module:Name,key=value``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import gymnasium

from rlstruct.cli.messages import UserError, blame, nearest
from rlstruct.errors import Explained, kind_of

OPTION = "--wrapper"
_EXAMPLE = "gymnasium.wrappers:TimeLimit,max_episode_steps=50"
_NEXT_SETTING = re.compile(r",(?=[^\W\d]\w*=)")  # not the comma of shape=[84,84]


def parse(word: str) -> tuple[str, tuple[str, ...]]:
    """Split a word into the name of a wrapper, ``module:Name``, and its settings, each ``KEY=VALUE``.

    >>> parse("gymnasium.wrappers:ResizeObservation,shape=[8,8]")
    ('gymnasium.wrappers:ResizeObservation', ('shape=[8,8]',))
    """
    name, comma, settings = word.partition(",")
    return name, tuple(_NEXT_SETTING.split(settings)) if comma else ()


def load(word: str) -> tuple[Any, dict[str, Any]]:
    """Import a wrapper, and return it with its keyword arguments.

    Raises:
        UserError: the name or an argument is wrong.
    """
    from rlstruct.cli.tasks import imported, is_own, read_settings  # imported here, because it imports this module

    name, words = parse(word)
    if not is_own(name):
        raise UserError(f"{OPTION} {word}: expected MODULE:NAME or MODULE:NAME,KEY=VALUE, such as {_EXAMPLE}.")
    settings = read_settings(f"{OPTION} {name},", words, "max_episode_steps=50")
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
    try:
        wrap = imported(name)
    except UserError as error:
        raise UserError(f"{OPTION} {word}: {error}") from None
    if isinstance(wrap, type) and issubclass(wrap, gymnasium.vector.VectorEnv):
        raise UserError(
            f"{OPTION} {word}: {wrap.__name__} wraps vector environments, expected a wrapper of single environments. "
            f"Name one of gymnasium.wrappers, such as {_EXAMPLE}."
        )
    if wrong := _misfit(wrap, settings):
        raise UserError(f"{OPTION} {word}: {wrong}")
    return wrap, settings


def _misfit(wrap: Any, settings: dict[str, Any]) -> str:  # noqa: ANN401 - a class or a function
    """Say which argument a wrapper does not accept or lacks; "" if all are fine."""
    try:
        signature = inspect.signature(wrap)
    except ValueError:  # of C code
        return ""
    _, *others = signature.parameters.values()
    taken = [one.name for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in others)
    for key in settings:
        if key not in taken and not takes_all:
            expected = f"expected {', '.join(taken)}" if taken else "expected none: omit it"
            return f"there is no argument {key!r}, {expected}.{nearest(key, taken)}"
    if missing := [one.name for one in others if one.name in taken and one.default is one.empty]:
        for key in missing:
            if key not in settings:
                return (
                    f"the argument {key!r} is missing. Add ,{key}=VALUE; for a value that is no number, text or list, "
                    "name a function of yours that takes the environment and returns it wrapped."
                )
    return ""


def apply(env: gymnasium.Env[Any, Any], words: Sequence[str]) -> gymnasium.Env[Any, Any]:
    """Wrap an environment of gymnasium, the first word innermost.

    Raises:
        UserError: a wrapper raises, or returns something else than an environment.
    """
    for word in words:
        wrap, settings = load(word)
        try:
            wrapped = wrap(env, **settings)
        except Exception as error:
            shown = blame(f"{OPTION} {word} raised", error)
            if shown is error and not isinstance(error, UserError | Explained):  # raised by the call itself
                shown = UserError(f"{OPTION} {word} cannot wrap an environment: {error}.")
            raise shown from None
        if not isinstance(wrapped, gymnasium.Env):
            raise UserError(
                f"{OPTION} {word}: it returned {kind_of(wrapped)}, expected a gymnasium.Env. Name a class of "
                "gymnasium.Wrapper, or a function that takes an environment and returns it wrapped."
            )
        env = wrapped
    return env
