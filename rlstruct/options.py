"""Settings as data: dataclass fields that declare the values they accept. Layer 1.

The constructor's checks and errors, the command line's help and the documentation's tables all read these fields.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import os
import re
import tempfile
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rlstruct.errors import BadTypeError, BadValueError, kind_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
# An entry of the section "Attributes" of a docstring, without its indentation: name and text.
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Values that an argument accepts: choices, or numbers within bounds; and optionally None.

    >>> str(Range(at_least=1)), str(Range(at_least=0, at_most=1)), str(Range(above=0, or_none=True))
    ('at least 1', '0 to 1', 'more than 0, or None')
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[object, ...] = ()
    whole: bool = False
    or_none: bool = False

    def check(self, where: str, name: str, value: object) -> None:
        """Raise TypeError or ValueError unless the value is accepted for ``name``, an argument of ``where``."""
        if (value is None and self.or_none) or value in self.choices:
            return
        if not self.choices:
            if not isinstance(value, Real) or (self.whole and value % 1):
                noun = "a whole number" if self.whole else "a number"
                text = f"{where}: {name} is {value!r}, {kind_of(value)}; expected {noun}"
                raise BadTypeError(", ".join(filter(None, [text, str(self)])) + ".")
            number = float(value)
            fits = (self.at_least is None or number >= self.at_least) and (self.above is None or number > self.above)
            if fits and (self.at_most is None or number <= self.at_most) and not math.isnan(number):
                return
        raise BadValueError(f"{where}: {name} is {value!r}, expected {str(self) or 'a number'}.")

    def __str__(self) -> str:
        """Describe the values in words; "" for any number."""
        *others, last = map(repr, self.choices or [""])
        if others:
            bounds = f"{', '.join(others)} or {last}"
        elif self.at_least is not None and self.at_most is not None:
            bounds = f"{self.at_least} to {self.at_most}"
        else:
            words = {"at least": self.at_least, "more than": self.above, "at most": self.at_most}
            bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
        return ", or ".join(filter(None, [bounds, "None" * self.or_none]))


def check_seed(where: str, name: str, seed: object, n: int = 1) -> int:
    """Return a seed as an int, for n environments of which number j draws from ``seed + j``.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is negative, or the n seeds do not all fit into 63 bits.

    >>> check_seed("GymEnv", "seed", 3)
    3
    """
    try:
        number = operator.index(seed)  # type: ignore[arg-type]  # also numpy's integers
    except TypeError:
        fix = "Pass an int." if n == 1 else "Pass one int s: environment j gets the seed s + j."
        raise BadTypeError(f"{where}: {name} is {seed!r}, {kind_of(seed)}; expected a whole number. {fix}") from None
    if not 0 <= number < 2**63 - n:
        raise BadValueError(f"{where}: {name} is {number}, expected 0 to 2**63 - {n + 1}.")
    return number


def option(
    default: T,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    may_change: bool = False,
    divided: bool = False,
) -> T:
    """Declare a field of `Options` and the numbers that it accepts.

    A subclass that changes only the default keeps the range. None is accepted if the annotation allows it, and for a
    ``Literal`` only its values are.

    Args:
        default: default of the field.
        at_least: smallest value.
        above: exclusive lower bound.
        at_most: largest value.
        may_change: True if a resumed training may use another value.
        divided: True if the number is divided among several learners, like the size of a batch.

    Returns:
        A dataclass field, typed like its default, so that type checkers see an ordinary field.
    """
    metadata: dict[str, Any] = {"range": Range(at_least=at_least, above=above, at_most=at_most)}
    metadata |= {name: True for name, said in (("may_change", may_change), ("divided", divided)) if said}
    made: T = field(default=default, metadata=metadata)
    return made


def declared(cls: type, key: str) -> dict[str, Any]:
    """Return the values declared by `option`, such as ``"range"``, for the fields of a class and its bases."""
    values: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = vars(base).get("__dataclass_fields__", {})
        values |= {name: one.metadata[key] for name, one in own.items() if key in one.metadata}
    return values


class Options:
    """Base class of frozen dataclasses whose fields are declared by `option`.

    The docstring of a subclass describes its fields under "Attributes"; their ranges are added there.

    Attributes:
        elsewhere: names that other libraries give to fields, for the error about an unknown one.

    >>> @dataclass(frozen=True)
    ... class Settings(Options):
    ...     n_steps: int = option(8, at_least=1)
    >>> try:
    ...     Settings(0)
    ... except ValueError as error:
    ...     print(error)
    Settings: n_steps is 0, expected at least 1.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **words: Any) -> None:  # noqa: ANN401 - as object's
        """Add the ranges to the docstring."""
        super().__init_subclass__(**words)
        metadata = {name: getattr(value, "metadata", {}) for name, value in vars(cls).items()}
        ranges = {name: str(one["range"]) for name, one in metadata.items() if "range" in one}

        def with_range(entry: re.Match[str]) -> str:
            bounds = ranges.get(entry[1])
            return f"{entry[0]} {bounds[0].upper()}{bounds[1:]}." if bounds else entry[0]

        if cls.__doc__ is not None:
            cls.__doc__ = _ENTRY.sub(with_range, inspect.cleandoc(cls.__doc__))

    def __new__(cls, *values: object, **named: object) -> Self:
        """Raise for an unknown setting, with the nearest known one, before `__init__` does."""
        fields: dict[str, object] = getattr(cls, "__dataclass_fields__", {})
        for name in named.keys() - fields:
            similar = nearest(cls.translated(name) or name, fields)
            hint = similar or f" help({cls.__name__}) lists them."
            raise BadTypeError(f"{cls.__name__}: there is no setting {name!r}.{hint}")
        return super().__new__(cls)

    @classmethod
    def translated(cls, name: str) -> str | None:
        """Return the field that other libraries call by another name; None if there is none."""
        fields: dict[str, object] = getattr(cls, "__dataclass_fields__", {})
        ours = cls.elsewhere.get(name)
        return ours if ours in fields and name not in fields else None

    def __post_init__(self) -> None:
        """Check the numbers, and turn those of numpy, and whole ones such as 1e6, into Python's own."""
        cls: type = type(self)
        ranges = _ranges(cls)
        for name, accepted in ranges.items():
            accepted.check(cls.__name__, name, getattr(self, name))
        for name in getattr(cls, "__dataclass_fields__", {}):
            value: Any = getattr(self, name)
            is_number = type(value) is not bool and isinstance(value, Real)
            if is_number:
                is_whole = isinstance(value, Integral) or (name in ranges and ranges[name].whole)
                object.__setattr__(self, name, int(value) if is_whole else float(value))  # the dataclass is frozen

    def require(self, name: str, fits: bool, expected: str) -> None:
        """Raise ValueError unless a setting fits the others; ``expected`` describes values that would."""
        if not fits:
            raise BadValueError(f"{type(self).__name__}: {name} is {getattr(self, name)!r}, expected {expected}.")


def writable(where: str, path: str | Path, *, folder: bool = False, replaces: bool = False) -> Path:
    """Return the path of results that are written later, after creating the folders that it needs.

    Args:
        where: what writes there, the beginning of the error message.
        path: a file, or a folder of files.
        folder: whether it is a folder.
        replaces: whether another file, once complete, takes the place of an existing one, which may be read-only.

    Raises:
        ValueError: nothing can be written there.
    """
    path = Path(path)
    place = path if folder else path.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise BadValueError(f"{where}: {path} cannot be written: {error.strerror}. Pass another path.") from None
    if not folder and path.is_dir():
        raise BadValueError(f"{where}: {path} is a folder, expected the name of a file. Pass {path / 'NAME'}.")
    if not replaces and path.exists() and not os.access(path, os.W_OK):
        raise BadValueError(f"{where}: {path} is read-only. Pass another path, or make it writable.")
    return path


def nearest(word: str, words: Iterable[str], *, prefix: str = "") -> str:
    """Return `` Did you mean …?``, or "" if no name is similar; ``prefix`` is shown before the name.

    >>> nearest("CartPol-v1", ["CartPole-v1", "Pendulum-v1"])
    " Did you mean 'CartPole-v1'?"
    """
    word, by_lower = word.lower(), {name.lower(): name for name in words}

    def likeness(name: str) -> float:  # a common beginning decides between equally similar names
        return difflib.SequenceMatcher(None, word, name).ratio() + 0.001 * name.startswith(word[:1])

    near = max(sorted(by_lower, reverse=True), key=likeness, default="")  # the newest of several versions
    if near and likeness(near) < 0.6:  # a name without its version, or a part of one
        near = min((name for name in by_lower if word in name), key=len, default="") if len(word) > 2 else ""
    return f" Did you mean {prefix + by_lower[near]!r}?" if near else ""


@functools.cache
def _ranges(cls: type) -> dict[str, Range]:
    """Return the range of each field that is a number, a switch or a choice, by its annotation; others have none."""
    hints, bounds = get_type_hints(cls), declared(cls, "range")
    ranges: dict[str, Range] = {}
    for name in getattr(cls, "__dataclass_fields__", {}):
        hint = hints[name]
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        choices = tuple(value for part in parts if get_origin(part) is Literal for value in get_args(part))
        choices += (True, False) if bool in parts else ()
        plain = all(part in (int, float, bool, type(None)) or get_origin(part) is Literal for part in parts)
        if choices or {int, float} & {*parts} if name in bounds else plain:
            bound = bounds.get(name, Range())
            ranges[name] = replace(bound, choices=choices, whole=float not in parts, or_none=type(None) in parts)
    return ranges


def described(cls: type) -> dict[str, str]:
    """Return the text of every field that the docstring of a class describes under "Attributes".

    >>> described(Range)
    {}
    """
    _, _, words = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
    return {entry[1]: " ".join(entry[2].split()) for entry in _ENTRY.finditer(words)}
