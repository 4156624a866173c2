"""What a process notes while it is profiled: when operations begin and end, and torch's own events, in windows.

A process records from the beginning for one window, and again for one window whenever the time has trebled: at 0, 3, 9,
27, 81, … windows. So a run of any length leaves few files and needs memory for one window, and all processes of a run
record at the same times without a word between them. Windows begin and end where an operation does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch

from rlstruct.profiling.kineto import between_clocks, torch_profile, warm_memory
from rlstruct.profiling.nvml import sampler

P = ParamSpec("P")
R = TypeVar("R")

VARIABLE = "RLSTRUCT_PROFILE"  # of the environment: tells processes that are started how to take part
_GROWTH = 3
_now = time.perf_counter_ns


class OperationError(RuntimeError):
    """Operations were left in another order than they were entered in."""


class operation:  # noqa: N801 - used as a function
    """Name what the process does from here to the end of the block, for whoever profiles it.

    Operations nest, and time belongs to the innermost. Without a profile this tests one flag. It decorates functions,
    too. Operations of other threads than the one that profiles are not noted.

    Args:
        name: of the operation; the library's own are listed on the page about profiling.

    Raises:
        OperationError: on leaving, if an operation that was entered later has not been left.

    >>> with operation("inference"):
    ...     pass
    """

    __slots__ = ("_depth", "_recorder", "name")

    def __init__(self, name: str) -> None:
        """Enter nothing yet."""
        self.name = name
        self._recorder: Recorder | None = None

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that is this operation whenever it runs."""
        name = self.name

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            if _recorder is None or torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with operation(name):
                return function(*args, **kwargs)

        return inside

    def __enter__(self) -> operation:
        """Begin."""
        if _recorder is not None and not torch.compiler.is_compiling() and _recorder.thread == threading.get_ident():
            self._recorder = _recorder
            self._depth = _recorder.push(self.name, _now())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End; an exception ends what is nested in here, too."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None and recorder is _recorder:
            recorder.pop(self._depth, _now(), strict=kind is None)


class Clock:
    """Adds up seconds by operation; exactly one of its operations runs at any moment, so the sum is the elapsed time.

    While the process is profiled, the same moments are noted as operations.

    Args:
        operations: key in `seconds` to the name of the operation; None is no operation. The first runs from the start.
            `enter` takes the index.

    On CUDA the seconds are those of launching the work, not of the work itself.
    """

    def __init__(self, operations: Mapping[str, str | None]) -> None:
        """Start in the first operation."""
        self._keys, self._names = tuple(operations), tuple(operations.values())
        self._nanoseconds = [0] * len(self._keys)
        self._current = 0
        self._since = _now()
        self._noted: Recorder | None = None
        self._depth = 0

    def enter(self, index: int) -> None:
        """End the running operation and begin another.

        Args:
            index: into ``operations``.
        """
        now = _now()
        self._nanoseconds[self._current] += now - self._since
        self._since, self._current = now, index
        if _recorder is not None or self._noted is not None:
            self._note(now)

    def _note(self, now: int) -> None:
        if self._noted is not None and self._noted is _recorder:
            _recorder.pop(self._depth, now, strict=False)
        self._noted, name = None, self._names[self._current]
        if _recorder is not None and name is not None and _recorder.thread == threading.get_ident():
            self._noted, self._depth = _recorder, _recorder.push(name, now)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each operation so far, the running one included."""
        self.enter(self._current)
        return {key: 1e-9 * taken for key, taken in zip(self._keys, self._nanoseconds, strict=True)}


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name a part of the run, such as ``"evaluation"``; processes that are started in it begin in it.

    Args:
        name: of the phase.
    """
    recorder = _recorder
    if recorder is None or recorder.thread != threading.get_ident():
        yield
        return
    before = recorder.phase
    recorder.set_phase(name)
    try:
        yield
    finally:
        recorder.set_phase(before)


@contextlib.contextmanager
def profile(path: str | os.PathLike[str], *, window: float = 1.0, operators: bool = True) -> Iterator[None]:
    """Profile this process, and all that are started meanwhile and import `rlstruct`.

    `rlstruct.profiling.read` makes a report of what is in the folder then. A process writes what it has recorded at the
    end of every window and when it ends; one that is killed loses its last window and nothing else.

    Args:
        path: a folder, which is created; it must not hold a profile.
        window: seconds to record at a time, see the module's header.
        operators: whether to record torch's operators; without them, all of Python and torch counts as Python.

    Raises:
        RuntimeError: this process is being profiled.
        FileExistsError: the folder holds a profile.
    """
    if _recorder is not None:
        raise RuntimeError("profile: this process is being profiled already. End that profile first.")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = settings(path, window=window, operators=operators)
    join()
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        leave()


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record a block whenever it comes: a graph is captured once, and its replays belong to what was captured."""
    is_mine = _recorder is not None and _recorder.thread == threading.get_ident()
    with _recorder.extra_window() if _recorder is not None and is_mine else contextlib.nullcontext():
        yield


def settings(path: str | os.PathLike[str], *, window: float = 1.0, operators: bool = True) -> str:
    """Create the folder, and return what the variable `VARIABLE` must hold for a process to record into it.

    Raises:
        FileExistsError: the folder holds a profile.
        ValueError: ``window`` is not positive.
    """
    folder = Path(path).resolve()
    if window <= 0.0:
        raise ValueError(f"profile: window is {window}, expected seconds, more than 0.")
    if list(folder.glob("*.operations.json")):
        raise FileExistsError(f"profile: {folder} holds a profile. Give another folder, or remove this one.")
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {"folder": str(folder), "origin": _now(), "window": int(1e9 * window), "operators": operators}
    return json.dumps({**chosen, "phase": "start"})


def is_on() -> bool:
    """Whether this process is being profiled."""
    return _recorder is not None


def join() -> None:
    """Record from now on, as the environment variable says; called when `rlstruct` is imported."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder(json.loads(os.environ[VARIABLE]))
        atexit.register(leave)


def leave() -> None:
    """Write what is recorded, and stop. Called at the end of the process."""
    global _recorder
    recorder, _recorder = _recorder, None
    atexit.unregister(leave)
    if recorder is not None:
        recorder.close()


class Recorder:
    """What one process records.

    Args:
        chosen: see `settings`.

    Attributes:
        thread: whose operations are noted.
        phase: the present one.
    """

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        """Begin the first window, if it is not over."""
        self.thread = threading.get_ident()
        self.phase = str(chosen["phase"])
        self._folder, self._operators = Path(chosen["folder"]), bool(chosen["operators"])
        self._origin, self._length = int(chosen["origin"]), int(chosen["window"])
        self._stack: list[str] = []
        self._times: list[int] = []  # nanoseconds of time.perf_counter, which all processes of a machine share
        self._marks: list[str | list[str] | None] = []  # an operation begins; one ends; [a phase] begins
        self._window = self._n_extra = 0
        self._starts = self._origin  # of this window or the next one
        self._torch: Any = None
        self._is_on = False
        self._turns_at = self._starts
        is_first = multiprocessing.parent_process() is None and torch.cuda.is_available()
        self._nvml = sampler(self._folder) if is_first else None
        self._skip_windows(_now())
        if self._turns_at <= _now():
            self._turn()

    def push(self, name: str, now: int) -> int:
        """Note that an operation begins; return its depth."""
        if now >= self._turns_at:
            self._turn()
            now = max(now, _now()) if self._is_on else now
        depth = len(self._stack)
        self._stack.append(name)
        if self._is_on:
            self._times.append(now)
            self._marks.append(name)
        return depth

    def pop(self, depth: int, now: int, *, strict: bool) -> None:
        """Note that the operation at this depth ends.

        Args:
            depth: what `push` returned.
            now: when.
            strict: whether it must be the innermost; otherwise those in it end with it.

        Raises:
            OperationError: it is not.
        """
        stack = self._stack
        if strict and len(stack) != depth + 1:
            inner = stack[depth + 1 :]
            last = f"{inner[-1]!r} was entered later and has not been left" if inner else "it was left before"
            raise OperationError(f"operation: one of depth {depth} ends, but {last}. Use `with operation(...)`.")
        if self._is_on:
            self._times.extend([now] * (len(stack) - depth))
            self._marks.extend([None] * (len(stack) - depth))
        del stack[depth:]
        if now >= self._turns_at:
            self._turn()

    def set_phase(self, name: str) -> None:
        """Begin a phase, also for processes that are started from now on."""
        self.phase = name
        if self._is_on:
            self._times.append(_now())
            self._marks.append([name])
        if VARIABLE in os.environ:
            os.environ[VARIABLE] = json.dumps({**json.loads(os.environ[VARIABLE]), "phase": name})

    @contextlib.contextmanager
    def extra_window(self) -> Iterator[None]:
        """Record a block in a window of its own, with a negative number, unless one is open."""
        if self._is_on:
            yield
            return
        next_one, self._window = self._window, -1 - self._n_extra
        self._n_extra += 1
        self._begin_window()
        self._turns_at = sys.maxsize
        try:
            yield
        finally:
            self._end_window()
            self._window = next_one
            self._skip_windows(_now())

    def close(self) -> None:
        """Write the open window."""
        if self._is_on:
            self._end_window()
        if self._nvml is not None:
            self._nvml.close()

    def _skip_windows(self, now: int) -> None:
        """Find the window that runs or comes next."""
        while now >= self._starts + self._length:
            self._window += 1
            self._starts = self._origin + self._length * _GROWTH**self._window
        self._turns_at = self._starts

    def _turn(self) -> None:
        if self._is_on:
            self._end_window()
            self._skip_windows(_now())
        else:
            self._begin_window()

    def _begin_window(self) -> None:
        self._torch = torch_profile() if self._operators else None
        if self._torch is not None:
            warm_memory(1e-9 * self._length)
            self._torch.start()
        self._begun, self._unix = _now(), between_clocks()
        self._times, self._marks = [self._begun] * (1 + len(self._stack)), [[self.phase], *self._stack]
        self._turns_at = max(self._starts, self._begun) + self._length
        self._is_on = True

    def _end_window(self) -> None:
        ended, self._is_on = _now(), False
        process = multiprocessing.current_process().name
        found = {
            "process": "main" if process == "MainProcess" else process,
            **{"pid": os.getpid(), "parent": os.getppid(), "window": self._window},
            **{"begun": self._begun, "ended": ended, "unix": self._unix, "origin": self._origin},
            **{"times": self._times, "marks": self._marks},
        }
        stem = self._folder / f"{os.getpid()}-{self._window}"
        if self._torch is not None:
            self._torch.stop()
            self._torch.export_chrome_trace(f"{stem}.part")
            os.replace(f"{stem}.part", f"{stem}.kineto.json")
            self._torch = None
        Path(f"{stem}.part").write_text(json.dumps(found))
        os.replace(f"{stem}.part", f"{stem}.operations.json")  # last: this one says that the window is whole
        self._times, self._marks = [], []


_recorder: Recorder | None = None


def _forget_in_child() -> None:
    """A forked child has a copy of the recorder, which is not its own."""
    global _recorder
    _recorder = None
    atexit.unregister(leave)


os.register_at_fork(after_in_child=_forget_in_child)
