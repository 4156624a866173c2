"""Errors that users can see. Each is also a built-in exception, so that ``except ValueError`` catches it.

Every message says where it happened, which key, what was found, what was expected, and the fix. From Python 3.11 on,
a note below the traceback names the page of the documentation that explains the error.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

# Modules that are never the source of a warning.
_PASSED = re.compile(r"(torch\.utils\._)?contextlib$|rlstruct(\.(?!cli\.)|$)")
PAGE = "See docs: "
"""Start of the note that names the page of the documentation."""


class Explained(Exception):
    """Base class of errors that the documentation explains, with one heading for each class of this package.

    Attributes:
        page: page and heading of the explanation, such as ``"faults#workererror"``.
        topic: argument of ``rlstruct explain``, such as ``"WorkerError"``.
    """

    page, topic = "faults", ""

    def __init_subclass__(cls, **words: Any) -> None:  # noqa: ANN401 - as object's
        """Name the heading after the class; a private or a user's subclass keeps the heading of its base class."""
        super().__init_subclass__(**words)
        if cls.__module__.startswith("rlstruct.") and cls.__name__[0] != "_":
            cls.page, cls.topic = f"faults#{cls.__name__.lower()}", cls.__name__

    def __init__(self, *arguments: object, **attributes: Any) -> None:  # noqa: ANN401 - those of the class
        super().__init__(*arguments)
        vars(self).update(attributes)
        if hasattr(self, "add_note"):  # from Python 3.11 on
            self.add_note(f"{PAGE}{self.page}, or run: rlstruct explain {self.topic}")


class BadValueError(Explained, ValueError):
    """An argument, a setting, a file, or a return value of your class has an invalid value."""


class BadTypeError(Explained, TypeError):
    """A value has the wrong type, such as an environment instead of a function that creates one."""


class BadKeyError(Explained, KeyError):
    """A structure has a missing or an unexpected key; the message lists its keys."""

    __str__ = Exception.__str__  # KeyError.__str__ puts the whole message in quotes


class BadIndexError(Explained, IndexError):
    """An index names a row or a step that a structure does not have."""


class UsageError(Explained, RuntimeError):
    """A call cannot work now, or in this way; the message says what to do first."""


class MissingPackageError(Explained, ImportError):
    """An optional package is not installed; the message ends with the command that installs it."""


class MissingMethodError(Explained, NotImplementedError):
    """Your class must define the method that was called."""


class MissingFileError(Explained, FileNotFoundError):
    """A run folder, a checkpoint or a profile does not exist."""


class FolderTakenError(Explained, FileExistsError):
    """The folder to create already exists."""


class ShapeMismatchError(Explained, ValueError):
    """A tensor has the wrong shape, dtype or batch size."""


class DeviceMismatchError(Explained, ValueError):
    """A tensor is not on the device of the agent, environment or structure that it was passed to."""


class BatcherStateError(Explained, RuntimeError):
    """A batcher method was called in the wrong order; the message names the call that is missing."""


class WorkerError(Explained, RuntimeError):
    """Collection failed in one worker. ``__cause__`` is the original exception when there is one.

    Attributes:
        worker: index of the worker; 0 when collection ran in this process.
        pid: process id of the worker; None if it never started.
        phase: what the worker was doing, such as ``"environment.step"``; None if unknown.
        environment: global index of the environment that raised; None if unknown.
        environments: global indices ``(first, last + 1)`` of the worker's environments; None if unknown.
        seed: seed of ``environment`` if known, else of the worker's first environment; None if unknown.
        step: index of the failed step in the batch; None if unknown.
        remote_traceback: formatted traceback of the worker; "" if there is none.
    """

    worker: int = 0
    pid: int | None = None
    phase: str | None = None
    environment: int | None = None
    environments: tuple[int, int] | None = None
    seed: int | None = None
    step: int | None = None
    remote_traceback: str = ""


class WorkerTimeout(WorkerError):
    """A worker did not answer within the timeout. The batcher can still be closed."""


class SharingError(Explained, RuntimeError):
    """A GPU cannot be shared in the requested mode; the message says what this machine lacks, and the fix."""


class ClusterError(Explained, RuntimeError):
    """No cluster answers, or its nodes run other versions than this process; the message says which, and the fix."""


class LearnerError(Explained, RuntimeError):
    """Another learner of the training is missing, failed, was stopped or killed, or has different settings.

    Attributes:
        ranks: ranks of those learners; empty if unknown.
    """

    ranks: tuple[int, ...] = ()


class TrainingDiverged(Explained, RuntimeError):
    """The training was stopped because a loss is NaN or infinite.

    Attributes:
        terms: name and value of each term of the loss that is not finite.
        policy_version: number of the update.
        env_steps: environment steps collected before it.
    """

    terms: dict[str, float]
    policy_version: int
    env_steps: int


def tag_environment(error: BaseException, index: int, step: int | None = None) -> None:
    """Store on ``error`` the index of the environment that raised it, so that a WorkerError can name it.

    ``step`` is the step in the batch; None means the current one.
    """
    try:
        error.environment_index, error.batch_step = index, step  # type: ignore[attr-defined]
    except AttributeError:  # an exception class with __slots__: the WorkerError names only the worker
        return


def how_to_install(extra: str) -> str:
    """Return the pip command that installs the packages of an extra, for any kind of installation."""
    try:
        everything = metadata.requires("rlstruct") or []
    except metadata.PackageNotFoundError:  # rlstruct runs from source, without an installation
        everything = []
    needs = [line.replace('"', "'").partition(";") for line in everything]
    names = " ".join(f"'{name.strip()}'" for name, _, marker in needs if f"extra == '{extra}'" in marker)
    here = f"'.[{extra}]' in a checkout of rlstruct"
    return f"Install the extra {extra!r}: pip install {names or here}"


def kind_of(value: object) -> str:
    """Name a wrong argument: a class by its name, everything else by its type.

    >>> kind_of(dict), kind_of({}), kind_of(3)
    ('the class dict', 'a dict', 'an int')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"  # but a UserError


def expect_type(what: str, value: object, kinds: Any, expected: str, fix: str) -> None:  # noqa: ANN401 - as isinstance
    """Raise TypeError unless a user's value is an instance of these classes; ``what`` begins the message."""
    if not isinstance(value, kinds):
        if isinstance(value, type) and issubclass(value, kinds):
            fix = f"Create one: {value.__name__}(…)."
        raise BadTypeError(f"{what} {kind_of(value)}, expected {expected}. {fix}")


def check_call(
    where: str, name: str, factory: Callable[..., object], arguments: Mapping[str, object], fix: str
) -> None:
    """Raise TypeError unless a factory can be called with its arguments."""
    try:
        signature = inspect.signature(factory)
    except ValueError:  # some callables written in C have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        call = ", ".join(f"{key}=…" for key in arguments)
        raise BadTypeError(
            f"{where}: {name} is called as {name}({call}), but {error}. Its parameters are {signature}; {fix}."
        ) from None


def import_extra(module: str, extra: str, where: str) -> Any:  # noqa: ANN401 - a module
    """Import a module that belongs to an extra; if it is missing, raise with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(f"{where} needs {module}, which is not installed. {how_to_install(extra)}") from error


def warn_user(text: str) -> None:
    """Issue a warning that points at the user's code (the nearest caller outside this library) or at the command."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _PASSED.match(str(frame.f_globals.get("__name__"))):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, stacklevel=depth)
