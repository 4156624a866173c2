"""Reader of a profile: events of all processes as arrays, on one clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlstruct.errors import MissingFileError
from rlstruct.profiling.overlap import Integers, Times, flatten

# Categories of Kineto's events, see `libkineto/include/ActivityType.h`.
_HOST_KINDS = {"cpu_op": 0, "cuda_runtime": 1, "cuda_driver": 1, "user_annotation": 2}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
# Kinds of slices of a window: torch's operators are recorded (watched), not recorded (plain), or being switched.
N_KINDS = 3
SWITCHING, PLAIN, WATCHED = range(N_KINDS)


@dataclass(frozen=True)
class Spans:
    """Operations of a process, in the order in which they began. Two of them are disjoint or nested."""

    starts: Times  # [K] int64, ns of ``time.perf_counter``
    ends: Times  # [K] int64, likewise
    path: Integers  # index into `Recording.paths`.  [K] int64


@dataclass(frozen=True)
class HostEvents:
    """Events of torch on the CPU."""

    starts: Times  # [K] int64, ns of ``time.perf_counter``
    ends: Times  # [K] int64, likewise
    kind: Integers  # 0 a torch operator, 1 a call of CUDA's API, 2 a range with a name (`record_function`).  [K]
    correlation: Integers  # shared by a call of CUDA's API and the work that it launched; -1 for none.  [K]
    names: list[str]


@dataclass(frozen=True)
class DeviceEvents:
    """Kernels, copies and fills on GPUs."""

    starts: Times  # [K] int64, ns of ``time.perf_counter``
    ends: Times  # [K] int64, likewise
    device: Integers  # index of the GPU.  [K] int64
    stream: Integers  # [K] int64
    correlation: Integers  # see `HostEvents`.  [K] int64
    blocks: Integers  # blocks in the kernel's grid; 0 for a copy or fill.  [K] int64
    node: Integers  # node id in the CUDA graph, if CUPTI reports it, otherwise 0.  [K] int64
    names: list[str]
    processors: dict[int, int]  # streaming multiprocessors of each GPU, by index


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
    paths: list[tuple[str, ...]]  # names of operations from the outermost to the innermost
    spans: Spans
    phases: tuple[Times, Integers]  # rising moments, and the index into ``phase_names`` from each on
    phase_names: list[str]
    slices: tuple[Times, Integers]  # rising moments, and `SWITCHING`, `PLAIN` or `WATCHED` from each on
    cost: float  # seconds to note an operation
    host: HostEvents  # of watched slices
    device: DeviceEvents
    gpus: dict[int, str]  # UUIDs of the GPUs of this process, by index

    def innermost(self) -> tuple[Times, Integers]:
        """Return rising times, and the path of the innermost operation from each of them on, -1 for none.  [M] each."""
        times, index = flatten(self.spans.starts, self.spans.ends)
        return times, np.where(index < 0, -1, np.append(self.spans.path, -1)[index])


def load(folder: Path) -> list[Recording]:
    """Read all windows of all processes, except those left incomplete by a killed process."""
    files = sorted(folder.glob("*.operations.json"))
    if not files:
        raise MissingFileError(
            f"{folder} holds no profile, expected files *.operations.json. No process that imports rlstruct.profiling "
            "has finished a window there: profile a program that imports it, such as rlstruct profile train a2c."
        )
    return sorted(map(_load_one, files), key=lambda one: (one.process != "main", one.pid, one.begun))


def _load_one(file: Path) -> Recording:
    found = json.loads(file.read_text())
    paths, spans, phases, phase_names = replay(found["times"], found["marks"], found["ended"])
    torch_file = file.with_name(file.name.replace(".operations.json", ".kineto.json"))
    trace = json.loads(torch_file.read_text()) if torch_file.exists() else {"traceEvents": []}
    host, device = read_kineto(trace, found["unix"])
    times, kinds = zip(*found["slices"], strict=True)
    return Recording(
        **{name: found[name] for name in ("process", "pid", "parent", "window", "begun", "ended", "origin")},
        paths=paths,
        spans=spans,
        phases=phases,
        phase_names=phase_names,
        slices=(_integers(times), _integers(kinds)),
        cost=1e-9 * found["cost"],
        host=host,
        device=device,
        gpus={int(index): uuid for index, uuid in found.get("gpus", {}).items()},
    )


def replay(
    times: list[int], marks: list[str | list[str] | None], ended: int
) -> tuple[list[tuple[str, ...]], Spans, tuple[Times, Integers], list[str]]:
    """Turn the log of a process into operations and phases: ``(paths, spans, phases, phase_names)``, see `Recording`.

    An operation directly inside one of the same name counts as part of it.

    Args:
        times: of each mark, rising, ns.
        marks: name of the operation that begins; None if the innermost one ends; a list of one name if a phase begins.
        ended: end of the operations that are still open, ns.
    """
    paths: dict[tuple[str, ...], int] = {}
    phase_names: dict[str, int] = {}
    starts: list[int] = []
    ends: list[int] = []
    span_keys: list[int] = []
    phase_times: list[int] = []
    phase_index: list[int] = []
    stack: list[tuple[int, tuple[str, ...]]] = []  # open operations: index of the span, or -1, and the path around it
    path: tuple[str, ...] = ()
    for time, mark in zip(times, marks, strict=True):
        if mark is None:
            span, path = stack.pop()
            if span >= 0:
                ends[span] = time
        elif isinstance(mark, list):
            phase_times.append(time)
            phase_index.append(phase_names.setdefault(mark[0], len(phase_names)))
        elif path[-1:] == (mark,):  # a function of an operation calls another of the same operation
            stack.append((-1, path))
        else:
            stack.append((len(starts), path))
            path = (*path, mark)
            starts.append(time)
            ends.append(ended)
            span_keys.append(paths.setdefault(path, len(paths)))
    spans = Spans(_integers(starts), _integers(ends), _integers(span_keys))
    return list(paths), spans, (_integers(phase_times), _integers(phase_index)), list(phase_names)


def read_kineto(trace: dict[str, Any], unix: int) -> tuple[HostEvents, DeviceEvents]:
    """Read the events of the CPU and of GPUs from a trace that `torch.profiler.profile.export_chrome_trace` wrote.

    Args:
        trace: the parsed JSON.
        unix: the trace's clock (nanoseconds since 1970) minus ``time.perf_counter``.
    """
    host: list[tuple[int, ...]] = []
    device: list[tuple[int, ...]] = []
    host_names, device_names = [], []
    base = int(trace.get("baseTimeNanoseconds", 0)) - unix
    for event in trace["traceEvents"]:
        category = event.get("cat")
        if event.get("ph") != "X" or category is None:
            continue
        start = base + round(1000 * event["ts"])
        end = start + round(1000 * event["dur"])
        args = event.get("args", {})
        if (kind := _HOST_KINDS.get(category)) is not None:
            host.append((start, end, kind, int(args.get("correlation", -1))))
            host_names.append(event["name"])
        elif category in _DEVICE:
            blocks = int(np.prod(args["grid"])) if "grid" in args else 0
            where = int(args.get("device", 0)), int(args.get("stream", 0)), int(args.get("correlation", -1))
            device.append((start, end, *where, blocks, int(args.get("graph node id", 0))))
            device_names.append(event["name"])
    processors = {one["id"]: one["numSms"] for one in trace.get("deviceProperties", [])}
    on_device = _columns(device, "starts", "ends", "device", "stream", "correlation", "blocks", "node")
    return (
        HostEvents(**_columns(host, "starts", "ends", "kind", "correlation"), names=host_names),
        DeviceEvents(**on_device, names=device_names, processors=processors),
    )


def _columns(rows: list[tuple[int, ...]], *names: str) -> dict[str, Any]:
    return dict(zip(names, np.asarray(rows, dtype=np.int64).reshape(-1, len(names)).T, strict=True))


def _integers(values: Sequence[int]) -> Integers:
    return np.asarray(values, dtype=np.int64)
