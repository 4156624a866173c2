"""Reader of a profile: events of all processes as arrays, on one clock."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlstruct.errors import MissingFileError
from rlstruct.profiling.overlap import StepFunction

# Categories of Kineto's events, see `libkineto/include/ActivityType.h`.
_HOST_KINDS = {"cpu_op": 0, "cuda_runtime": 1, "cuda_driver": 1, "user_annotation": 2}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
# Kinds of slices of a window: torch's operators are recorded (watched), not recorded (plain), or being switched.
N_KINDS = 3
SWITCHING, PLAIN, WATCHED = range(N_KINDS)

Key = tuple[str, tuple[str, ...]]
"""Phase, and path: the names of the open operations, the outermost first."""
Table = np.recarray[Any, Any]
"""Events of a window, one a row. The columns ``starts`` and ``ends`` are ns of ``time.perf_counter``."""
_TIMES = [("starts", "i8"), ("ends", "i8")]
# Operations, in the order in which they began; ``key`` is an index into `Recording.keys`. Two are disjoint or nested.
SPANS = np.dtype([*_TIMES, ("key", "i8")])
# Events of torch on the CPU. Kinds: 0 an operator, 1 a call of CUDA's API, 2 a range with a name (`record_function`).
# A call of CUDA's API and the work that it launched have the same correlation; -1 is none.
HOST = np.dtype([*_TIMES, ("kind", "i8"), ("correlation", "i8"), ("names", object)])
# Kernels, copies and fills. ``gpu`` is its index, ``blocks`` are those of a kernel's grid (0 for a copy or fill), and
# ``node`` is the id in a CUDA graph (0 if CUPTI does not report it).
_COLUMNS = ("gpu", "stream", "correlation", "blocks", "node")
DEVICE = np.dtype([*_TIMES, *((name, "i8") for name in _COLUMNS), ("names", object)])


@dataclass(frozen=True)
class Recording:
    """One window of one process. Times are ns of ``time.perf_counter``, which all processes of a machine share."""

    process: str  # its name: ``main``, ``rlstruct-worker-0``, …
    pid: int
    parent: int  # pid of the process that started it
    window: int  # number; negative for a graph captured between the windows that sample the run
    begun: int
    ended: int
    origin: int  # beginning of the whole profile
    closed: int  # end of the recording of this process; of a killed one, the end of this window
    cost: float  # seconds to note an operation
    keys: list[Key]
    spans: Table  # of dtype `SPANS`
    innermost: StepFunction  # from each time on, the phase and innermost operation, as an index into ``keys``
    slices: StepFunction  # from each time on, `SWITCHING`, `PLAIN` or `WATCHED`
    host: Table  # of dtype `HOST`; in watched slices
    device: Table  # of dtype `DEVICE`
    processors: dict[int, int]  # streaming multiprocessors of each GPU, by index
    gpus: dict[int, str]  # UUIDs of the GPUs of this process, by index

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """The path of each key."""
        return [path for _, path in self.keys]

    def select(self, names: Container[str]) -> NDArray[np.bool_]:
        """Select the keys whose innermost operation has one of these names.  [number of keys] bool."""
        return np.asarray([bool(path) and path[-1] in names for path in self.paths], dtype=bool)


def load_recordings(folder: Path) -> list[Recording]:
    """Read all windows of all processes, except those left incomplete by a killed process."""
    files = sorted(folder.glob("*.operations.json"))
    if not files:
        raise MissingFileError(
            f"{folder} holds no profile, expected files *.operations.json. No process that imports rlstruct.profiling "
            "has finished a window there: profile a program that imports it, such as rlstruct profile train a2c."
        )
    return sorted(map(_load_one, files), key=lambda one: (one.process != "main", one.pid, one.begun))


def _load_one(file: Path) -> Recording:
    record = json.loads(file.read_text())
    torch_file = file.with_name(file.name.replace(".operations.json", ".kineto.json"))
    trace = json.loads(torch_file.read_text()) if torch_file.exists() else {"traceEvents": []}
    keys, spans, innermost = replay(record["times"], record["marks"], record["ended"])
    host, device = read_kineto(trace, record["unix"])
    closed = file.with_name(f"{record['pid']}.closed")
    return Recording(
        **{name: record[name] for name in ("process", "pid", "parent", "window", "begun", "ended", "origin")},
        closed=int(closed.read_text()) if closed.exists() else record["ended"],
        cost=1e-9 * record["cost"],
        keys=keys,
        spans=spans,
        innermost=innermost,
        slices=_steps(record["slices"]),
        host=host,
        device=device,
        processors={one["id"]: one["numSms"] for one in trace.get("deviceProperties", [])},
        gpus={int(index): uuid for index, uuid in record.get("gpus", {}).items()},
    )


def replay(times: list[int], marks: list[str | list[str] | None], ended: int) -> tuple[list[Key], Table, StepFunction]:
    """Turn the log of a process into ``keys``, ``spans`` and ``innermost`` of a `Recording`.

    An operation directly inside one of the same name counts as part of it.

    Args:
        times: of each mark, rising, ns.
        marks: name of the operation that begins; None if the innermost one ends; a list of one name if a phase begins.
        ended: end of the operations that are still open, ns.
    """
    keys: dict[Key, int] = {}
    spans: list[tuple[int, int, int]] = []
    innermost: dict[int, int] = {}  # by time, at which the last mark counts
    stack: list[tuple[int, tuple[str, ...]]] = []  # open operations: index of the span, or -1, and the path around it
    phase, path = "", tuple[str, ...]()
    for time, mark in zip(times, marks, strict=True):
        if mark is None:
            span, path = stack.pop()
            if span < 0:
                continue
            start, _, key = spans[span]
            spans[span] = start, time, key
        elif isinstance(mark, list):
            (phase,) = mark
        elif path[-1:] == (mark,):  # a function of an operation calls another of the same operation
            stack.append((-1, path))
            continue
        else:
            stack.append((len(spans), path))
            path = (*path, mark)
            spans.append((time, ended, keys.setdefault((phase, path), len(keys))))
        innermost[time] = keys.setdefault((phase, path), len(keys))
    return list(keys), _table(spans, SPANS), _steps(innermost.items())


def read_kineto(trace: dict[str, Any], unix: int) -> tuple[Table, Table]:
    """Read the events of the CPU and of GPUs from a trace that `torch.profiler.profile.export_chrome_trace` wrote.

    Args:
        trace: the parsed JSON.
        unix: the trace's clock (nanoseconds since 1970) minus ``time.perf_counter``.
    """
    host, device = [], []
    base = int(trace.get("baseTimeNanoseconds", 0)) - unix
    for event in trace["traceEvents"]:
        category = event.get("cat")
        if event.get("ph") != "X" or category is None:
            continue
        start = base + round(1000 * event["ts"])
        end = start + round(1000 * event["dur"])
        args = event.get("args", {})
        correlation = int(args.get("correlation", -1))
        if category in _HOST_KINDS:
            host.append((start, end, _HOST_KINDS[category], correlation, event["name"]))
        elif category in _DEVICE:
            where = int(args.get("device", 0)), int(args.get("stream", 0)), correlation
            blocks = int(np.prod(args["grid"])) if "grid" in args else 0
            device.append((start, end, *where, blocks, int(args.get("graph node id", 0)), event["name"]))
    return _table(host, HOST), _table(device, DEVICE)


def _table(rows: list[Any], columns: np.dtype[Any]) -> Table:
    return np.array(rows, dtype=columns).view(np.recarray)


def _steps(pairs: Iterable[tuple[int, int]]) -> StepFunction:
    times, values = np.asarray(list(pairs), dtype=np.int64).reshape(-1, 2).T
    return times, values
