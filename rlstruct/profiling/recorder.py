"""Recorder of a profiled process: when operations begin and end, and torch's own events, in windows.

A process records one window when it starts, and again whenever the elapsed time has tripled: at 0, 3, 9, 27, 81, …
window lengths. An operation that begins for the first time, outside of evaluations, opens another one (or extends the
open one), so the start of the training is recorded even if an evaluation or a long preparation comes first.
No window begins or ends during the capture of a CUDA graph, which would fail if torch's profiler started or stopped.
A run of any length therefore leaves few files and needs memory for at most two windows. Processes share the schedule,
so they record at the same times without communicating. Windows and slices begin and end where an operation or phase
does: without any, or in a single long one, a window has no end and needs ever more memory. Mark one inside the loop.

Within a window, operations are always noted, but torch's operators only in some slices of 10 ms, because recording them
is expensive. The same operations run in the slices in between, which shows how much recording costs in this process.
On CUDA the launches of one slice run in the next, so a window is divided into long parts instead, each stored as a
window: a quarter with torch's operators and the GPU's work, half without, a quarter with.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from rlstruct.errors import BadValueError
from rlstruct.profiling import nvml
from rlstruct.profiling.events import PLAIN, SWITCHING, WATCHED
from rlstruct.profiling.operations import VARIABLE, Log, OperationError, clock_ns

NVTX = "nvtx"  # value of the variable that shows operations to NVIDIA's tools instead
_GROWTH = 3
_SLICE = 10_000_000  # nanoseconds
_GOLDEN = 0.5 * (5**0.5 - 1)  # multiples modulo 1 do not resonate with the program's loops
_N_TRIES, _N_NOTED = 9, 100
_EVALUATION = "evaluation"  # a phase
_MOST_NAMES = 50  # operations that open a window; a program may give each entry another name
_START = "start"  # creating a worker; a process that starts late opens no window for it
_SAMPLED = 17  # time every 17th mark; odd, because all ends of operations may have even indices
_KINDS = [ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]  # torch warns if one of them is missing
_ONE_CYCLE = "Warning: Profiler clears events"  # torch 2.11 warns of this in every profile; ours have one cycle
_nvtx: Any = torch.cuda.nvtx  # without types


class Recorder:
    """Recorder of one process.

    Args:
        chosen: see `settings`.

    Attributes:
        thread: the thread whose operations are noted.
        phase: the current one.
    """

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        self.thread = threading.get_ident()
        self.phase = str(chosen["phase"])
        self._folder, self._share = Path(chosen["folder"]), float(chosen["operators"])
        self._origin, self._length = int(chosen["origin"]), int(chosen["window"])
        self._stack: list[str] = []
        self._times: list[int] = []  # of `clock_ns`
        self._marks: list[str | list[str] | None] = []  # an operation begins; one ends; [a phase] begins
        self._noted: list[int] = []  # nanoseconds to note the end of an operation, for a sample of them
        self._n_windows = self._n_extra = 0
        self._torch: Any = None
        self._is_on = False
        self._begun = self._slice = 0
        self._slices: list[tuple[int, int]] = []  # begin and kind
        self._turns_at = self._closes_at = 0  # ns; when something changes, and when the open window ends
        self._met = {_START}  # operations that have begun, outside of evaluations
        # `torch.cuda.is_available` would open CUDA's driver, which reads the variables of MPS only then. NVML does not.
        is_first = multiprocessing.parent_process() is None and torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]
        self._end_samples = nvml.sample(self._folder) if is_first else None
        self._skip_windows(now := clock_ns())
        if self._turns_at <= now:
            self._turn(now)
        else:
            self._turns_at = now  # record a window from the first operation on

    def push(self, name: str, now: int) -> int:
        """Note that an operation begins; return its depth, -1 in other threads."""
        if self.thread != threading.get_ident():
            return -1
        if now >= self._turns_at and name != _START:
            self._turn(now)
            now = max(now, self._begun)
        if name not in self._met and self.phase != _EVALUATION:
            self._meet(name, now)
            now = max(now, self._begun)
        depth = len(self._stack)
        self._stack.append(name)
        if self._is_on:
            self._times.append(now)
            self._marks.append(name)
        return depth

    def pop(self, depth: int, now: int, *, strict: bool) -> None:
        """Note that the operation at a depth, from `push`, ends at ``now``.

        Unless ``strict``, operations nested in it may still be open and end with it.
        """
        if depth < 0:
            return
        stack = self._stack
        if strict and len(stack) != depth + 1:
            inner = stack[depth + 1 :]
            last = f"{inner[-1]!r} was entered later and has not been left" if inner else "it was left before"
            ending = repr(stack[depth]) if inner else f"one of depth {depth}"
            raise OperationError(
                f"operation: {ending} ends, but {last}. Use `with operation(...)`, without `yield` or `await` inside."
            )
        if self._is_on:
            self._times.extend([now] * (len(stack) - depth))
            self._marks.extend([None] * (len(stack) - depth))
            if not len(self._times) % _SAMPLED:
                self._noted.append(clock_ns() - now)
        del stack[depth:]
        if now >= self._turns_at:
            self._turn(now)

    def set_phase(self, name: str) -> None:
        """Begin a phase, for this process and those it starts from now on."""
        if (now := clock_ns()) >= self._turns_at:
            self._turn(now)
        self.phase = name
        if self._is_on:
            self._times.append(clock_ns())
            self._marks.append([name])
        if VARIABLE in os.environ:
            os.environ[VARIABLE] = json.dumps({**json.loads(os.environ[VARIABLE]), "phase": name})

    @contextlib.contextmanager
    def extra_window(self) -> Iterator[None]:
        """Record a block in a separate window with a negative number, unless torch's operators are being recorded."""
        is_plain = self._is_on and self._slices == [(self._begun, PLAIN)]
        if self._is_on and not is_plain:
            yield
            return
        left = self._closes_at - clock_ns() if is_plain else 0
        if is_plain:
            self._end_window()
        self._begin_window(sys.maxsize // 2)
        self._turns_at = self._closes_at  # watch all of it
        try:
            yield
        finally:
            self._n_extra += 1
            self._write_window(-self._n_extra)
            if left > 0:
                self._begin_window(left, plain=True)
            else:
                self._skip_windows(clock_ns())

    def close(self) -> None:
        """Write the open window, and when this process stopped recording."""
        with contextlib.suppress(FileNotFoundError):  # the folder was removed before this process ended
            if self._is_on:
                self._end_window()
        self.forget()
        with contextlib.suppress(FileNotFoundError):
            _write(self._folder / f"{os.getpid()}.closed", str(clock_ns()))
        if self._end_samples is not None:
            self._end_samples()

    def forget(self) -> None:
        """Stop recording, even if operations are still open."""
        self._is_on, self._turns_at = False, sys.maxsize

    def _skip_windows(self, now: int) -> None:
        """Find the beginning of the current or next window."""
        self._turns_at, elapsed = self._origin, self._length
        while now >= self._turns_at + self._length:
            elapsed *= _GROWTH
            self._turns_at = self._origin + elapsed

    def _turn(self, now: int) -> None:
        if _is_capturing():
            return
        if not self._is_on:
            self._begin_window(self._length)
        elif now < self._closes_at:
            self._next_slice(now)
        else:
            self._end_window()
            self._skip_windows(clock_ns())

    def _meet(self, name: str, now: int) -> None:
        """Record a full window from here on: an operation begins for the first time."""
        if len(self._met) > _MOST_NAMES or _is_capturing():
            return
        self._met.add(name)
        if not self._is_on:
            self._begin_window(self._length)
        elif self._closes_at < now + self._length:
            if self._turns_at == self._closes_at:  # it has no slices
                self._turns_at = now + self._length
            self._closes_at = now + self._length

    def _begin_window(self, length: int, *, plain: bool = False) -> None:
        """Begin a window of at most ``length`` ns; a ``plain`` one has none of torch's events."""
        self._torch = None
        if self._share and not plain:
            # At a lower level Kineto writes two lines per window to standard error.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # then slices cannot be switched
            self._torch = torch.profiler.profile(activities=_KINDS[: 1 + uses_cuda])
            warnings.filterwarnings("ignore", _ONE_CYCLE, UserWarning)
            self._torch.start()
        self._begun, self._unix = clock_ns(), _between_clocks()
        self._times, self._marks = [self._begun] * (1 + len(self._stack)), [[self.phase], *self._stack]
        self._slice, self._slices = 0, [(self._begun, PLAIN if plain else WATCHED)]
        self._is_on = True
        self._closes_at = self._turns_at = self._begun + length
        if plain or self._watches_cuda:
            if self._share < 1.0:
                self._turns_at = min(self._begun + self._length // (2 if plain else 4), self._closes_at)
        elif self._torch is not None:
            self._turns_at = min(self._begun + _SLICE, self._closes_at)

    @property
    def _watches_cuda(self) -> bool:
        return self._torch is not None and ProfilerActivity.CUDA in self._torch.activities

    def _next_slice(self, now: int) -> None:
        """Turn recording of torch's operators on or off for the next slice; an operation has just begun or ended."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            watched = self._watches_cuda  # otherwise the next part is recorded with the GPU's work
            self._end_window()
            self._begin_window(self._closes_at - now, plain=watched)
            return
        self._slice += 1
        mode = WATCHED if self._slice * _GOLDEN % 1.0 < self._share else PLAIN
        if mode != self._slices[-1][1]:
            self._torch.toggle_collection_dynamic(mode == WATCHED, _KINDS)  # this thread only; takes microseconds
            self._slices += [(now, SWITCHING), (clock_ns(), mode)]
        self._turns_at = min(clock_ns() + _SLICE, self._closes_at)

    def _end_window(self) -> None:
        self._write_window(self._n_windows)
        self._n_windows += 1

    def _write_window(self, number: int) -> None:
        ended, self._is_on = clock_ns(), False
        process, parent = multiprocessing.current_process().name, multiprocessing.parent_process()
        arrays = {
            "process": "main" if process == "MainProcess" else process,
            "pid": os.getpid(),
            # a worker is forked by a server, not by its parent
            "parent": os.getppid() if parent is None else parent.pid,
            "window": number,
            "begun": self._begun,
            "ended": ended,
            "unix": self._unix,
            "origin": self._origin,
            "times": self._times,
            "marks": self._marks,
            "slices": self._slices,
            "cost": self._cost(),
            "gpus": nvml.uuids(),
        }
        stem = self._folder / f"{os.getpid()}-{number}"
        if self._torch is not None:
            self._torch.stop()
            self._torch.export_chrome_trace(f"{stem}.part")
            os.replace(f"{stem}.part", f"{stem}.kineto.json")
            # Break the profiler's reference cycle: collecting it later would take 30 ms of some other window.
            self._torch.profiler = self._torch = None
        # Last, because its existence shows that the window is complete.
        _write(Path(f"{stem}.operations.json"), json.dumps(arrays))
        self._times, self._marks = [], []

    def _cost(self) -> float:
        """Measure the nanoseconds that noting an operation takes, in a tight loop after the window.

        Noting takes longer between other work, which evicts it from the CPU's caches. The sampled ends of operations
        show by how much; that is added.
        """
        log, among, self._noted = copy.copy(self), self._noted, []
        log._times, log._marks, log._noted, log._turns_at, log._is_on = [], [], [], sys.maxsize, True
        taken, ends = [], []
        for _ in range(_N_TRIES):
            start = clock_ns()
            for _ in range(_N_NOTED):
                depth = log.push("cost", clock_ns())
                end = clock_ns()
                log.pop(depth, end, strict=True)
                ends.append(clock_ns() - end)
            taken.append((clock_ns() - start) / _N_NOTED)
        slower = _typical(among) - _typical(ends) if among else 0.0
        return statistics.median(taken) + max(0.0, slower)


class Ranges:
    """Substitute for `Recorder` that shows operations as NVTX ranges, which Nsight Systems displays by name.

    Attributes:
        thread: the thread whose operations become ranges.
        phase: the current one.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.phase = "start"
        self._n_open = 0

    def push(self, name: str, now: int) -> int:
        """Begin a range; return its depth, -1 in other threads."""
        if self.thread != threading.get_ident():
            return -1
        _nvtx.range_push(name)
        self._n_open += 1
        return self._n_open - 1

    def pop(self, depth: int, now: int, *, strict: bool) -> None:
        """End the range at a depth, and all ranges nested in it."""
        for _ in range(self._n_open - depth if depth >= 0 else 0):
            _nvtx.range_pop()
            self._n_open -= 1

    def set_phase(self, name: str) -> None:
        """Mark where a phase begins."""
        self.phase = name
        _nvtx.mark(f"phase: {name}")

    def extra_window(self) -> contextlib.nullcontext[None]:
        """Do nothing, as nothing is sampled."""
        return contextlib.nullcontext()

    def forget(self) -> None:
        """Write nothing."""

    close = forget


def recorder_of(asked: str) -> Log | None:
    """Start recording this process, or return None if NVTX ranges are asked for and torch has no CUDA.

    Args:
        asked: value of the environment variable `VARIABLE`.

    Raises:
        ValueError: it is neither `NVTX` nor settings.
    """
    if asked == NVTX:
        return Ranges() if torch.backends.cuda.is_built() else None  # type: ignore[no-untyped-call]
    chosen = None
    with contextlib.suppress(json.JSONDecodeError):
        chosen = json.loads(asked)
    if not isinstance(chosen, dict):
        raise BadValueError(
            f"import rlstruct: the environment variable {VARIABLE} is {asked!r}, expected {NVTX!r} or settings, which "
            "processes that are started under a profile inherit. Unset it, and start the program as: rlstruct profile "
            "COMMAND"
        )
    return Recorder(chosen)


def _is_capturing() -> bool:
    """Return True while this thread captures a CUDA graph, in which torch's profiler can neither start nor stop."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _write(path: Path, text: str) -> None:
    """Write a file that is complete as soon as it exists."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def _typical(taken: list[int]) -> float:
    """Return the mean without the longest 5 %, during which another program may have run."""
    return statistics.fmean(sorted(taken)[: -(-19 * len(taken) // 20)])


def _between_clocks() -> int:
    """Return Kineto's clock (nanoseconds since 1970) minus ``time.perf_counter``, undisturbed by a short pause."""
    offsets = []
    for _ in range(20):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        offsets.append((after - before, unix - (before + after) // 2))
    return min(offsets)[1]
