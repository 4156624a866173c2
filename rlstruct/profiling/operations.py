"""Annotations of a profiled program: operations and phases; and the switch that starts and stops recording them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "RLSTRUCT_PROFILE"  # environment variable with the settings for processes that are started
clock_ns = time.perf_counter_ns
"""Clock of all recordings, which the processes of a machine share: ns."""


class OperationError(RuntimeError):
    """Error: operations were left in another order than they were entered."""


class Log(Protocol):
    """Log of the operations of one process, which `rlstruct.profiling.recorder` writes.

    Attributes:
        thread: the thread whose operations are noted.
        phase: the current one.
    """

    thread: int
    phase: str

    def push(self, name: str, now: int) -> int:
        """Note that an operation begins; return its depth, -1 in other threads."""

    def pop(self, depth: int, now: int, *, strict: bool) -> None:
        """Note that the operation at a depth ends; unless ``strict``, those nested in it may be open and end too."""

    def set_phase(self, name: str) -> None:
        """Begin a phase."""

    def extra_window(self) -> contextlib.AbstractContextManager[None]:
        """Record a block even between windows."""

    def close(self) -> None:
        """Write what is left."""

    def forget(self) -> None:
        """Stop without writing."""


class operation:  # noqa: N801 - used as a function
    """Name the work in this block, for the profiler; also a decorator of functions.

    Operations nest, and time counts for the innermost one. Only the profiled thread's operations are noted. Without a
    profile, entering an operation only tests a flag. One object may be entered again before it is left.

    Args:
        name: name of the operation; the page about profiling lists those that the library uses.

    Raises:
        OperationError: an operation that was entered later is still open at the end of the block.

    >>> with operation("inference"):
    ...     pass
    """

    __slots__ = ("_entered", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        # The last entry that is noted and open, as (log, depth, the one before it). Only the profiled thread writes it.
        self._entered: tuple[Log, int, Any] | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function, which enters this operation whenever it runs."""
        name = self.name

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            recorder = _recorder
            if recorder is None or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            # `with` would be slower, and no correction covers that
            depth, strict = recorder.push(name, clock_ns()), False
            try:
                result = function(*args, **kwargs)
                strict = True
            finally:
                recorder.pop(depth, clock_ns(), strict=strict)
            return result

        return inside

    def __enter__(self) -> operation:
        if _recorder is not None and not torch.compiler.is_compiling():
            depth = _recorder.push(self.name, clock_ns())
            if depth >= 0:
                self._entered = _recorder, depth, self._entered
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """End; an exception ends nested operations too."""
        if self._entered is not None and self._entered[0].thread == threading.get_ident():
            recorder, depth, self._entered = self._entered
            recorder.pop(depth, clock_ns(), strict=error_type is None)


class Clock:
    """Stopwatch for several operations, exactly one of which runs at any moment, so they add up to the elapsed time.

    In a profiled process they are also noted as operations. On CUDA, the seconds are the time to launch the work, not
    the time that the work takes.

    Args:
        operations: name of the profiled operation (None: not noted) by key in `seconds`. The first runs from the start.
    """

    def __init__(self, operations: Mapping[str, str | None]) -> None:
        self._keys, self._names = tuple(operations), tuple(operations.values())
        self._nanoseconds = [0] * len(self._keys)
        self._current = 0
        self._since = clock_ns()
        self._noted: Log | None = None
        self._depth = 0

    def enter(self, index: int) -> None:
        """End the running operation and begin number ``index``."""
        now = clock_ns()
        self._nanoseconds[self._current] += now - self._since
        self._since, self._current = now, index
        if self._noted is not None:
            self._noted.pop(self._depth, now, strict=False)
            self._noted = None
        if _recorder is not None and (name := self._names[index]) is not None:
            self._noted, self._depth = _recorder, _recorder.push(name, now)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each operation so far, including the running one."""
        self.enter(self._current)
        return {key: 1e-9 * taken for key, taken in zip(self._keys, self._nanoseconds, strict=True)}


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of the run, such as ``"evaluation"``; processes started within it begin in this phase."""
    recorder = _of_this_thread()
    if recorder is None:
        yield
        return
    before = recorder.phase
    recorder.set_phase(name)
    try:
        yield
    finally:
        recorder.set_phase(before)


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record a block even between windows. The capture of a graph, for example, shows what its replays consist of."""
    recorder = _of_this_thread()
    with contextlib.nullcontext() if recorder is None else recorder.extra_window():
        yield


def _of_this_thread() -> Log | None:
    return _recorder if _recorder is not None and _recorder.thread == threading.get_ident() else None


def is_on() -> bool:
    """Return True if this process is being profiled."""
    return _recorder is not None


def start_if_requested() -> None:
    """Start recording if the environment variable asks for it; called by ``import rlstruct`` and by workers."""
    global _recorder
    asked = os.environ.get(VARIABLE)
    if _recorder is not None or asked is None:
        return
    _recorder = importlib.import_module("rlstruct.profiling.recorder").recorder_of(asked)
    if _recorder is not None:
        atexit.register(stop)


def stop() -> None:
    """Stop recording and write the open window; called when the process ends."""
    global _recorder
    recorder, _recorder = _recorder, None
    atexit.unregister(stop)
    if recorder is not None:
        recorder.close()


_recorder: Log | None = None


def _forget_in_child() -> None:
    """Drop the copy of the recorder in a forked child."""
    global _recorder
    if _recorder is not None:
        _recorder.forget()
    _recorder = None
    atexit.unregister(stop)


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_in_child)
