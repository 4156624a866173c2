"""GPU use of a process, and why the GPU is idle the rest of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlstruct.profiling.events import Recording
from rlstruct.profiling.nvml import MISSING, read_samples, utilisation
from rlstruct.profiling.overlap import (
    Floats,
    Integers,
    Intervals,
    Times,
    active_before,
    lookup,
    sweep,
    totals,
    union,
    union_length,
)
from rlstruct.profiling.prices import WAIT

DATA = {WAIT, "hand-over", "copy", "replay buffer"}
"""Operations that move data: a GPU that is idle during one waits for data."""
Captures = list[tuple[int, list[tuple[str, ...] | None]]]
_CAPTURED = ("LaunchKernel", "MemcpyAsync", "MemsetAsync", "LaunchCooperativeKernel")


@dataclass
class GpuUse:
    """GPU use of a process. NVML counts a GPU as utilised while any kernel runs, however small."""

    process: str  # its name
    pid: int
    device: int  # index of the GPU
    seconds: float = 0.0  # recorded
    busy: float = 0.0  # share of the time in which at least one kernel, copy or fill of this process runs
    weighted: float = 0.0  # the same, weighting each kernel by the share of multiprocessors that its blocks fill
    # Utilisation in that time according to the driver, over all processes, as a share; None if unknown.
    nvml: float | None = None
    nvml_unknown: str = MISSING  # why it is unknown
    kernels: float = 0.0  # sum of the seconds of all kernels
    # Seconds in which the GPU waits for the host (nothing is queued), for data (the host waits for it, moves it, or has
    # queued its copy), or for launches (queued, not started).
    idle: dict[str, float] = field(default_factory=lambda: {"host": 0.0, "data": 0.0, "launches": 0.0})
    # Busy seconds by the operation that launched the work or captured it in a CUDA graph.
    operations: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Show the three shares, the idle time and the operations."""
        idle = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.idle.items())
        most = sorted(self.operations.items(), key=lambda pair: -pair[1])
        return "\n".join(
            [
                f"{self.process} (pid {self.pid}) on cuda:{self.device}: NVML's utilisation {_percent(self)}, busy "
                f"{100 * self.busy:.1f} %, weighted by multiprocessors {100 * self.weighted:.2f} %",
                f"  idle, waiting for: {idle}",
                *(f"  {seconds:.3f} s busy for {name}" for name, seconds in most),
            ]
        )


@dataclass(frozen=True)
class SharedUse:
    """Total GPU use of all processes, while the largest number of them was recorded at once."""

    gpu: str  # its UUID; ``cuda:0`` where that is unknown
    processes: int  # recorded at once
    seconds: float  # length of that time
    busy: float  # share of that time in which work of at least one of them runs
    busiest: float  # largest share of a single process
    nvml: float | None  # as in `GpuUse`
    nvml_unknown: str

    def __str__(self) -> str:
        """Show the shares side by side."""
        return (
            f"{self.processes} processes on {self.gpu}, recorded at once for {self.seconds:.2f} s: NVML's utilisation "
            f"{_percent(self)}, busy {100 * self.busy:.1f} % (at least one of them), the busiest of them "
            f"{100 * self.busiest:.1f} %"
        )


def _percent(use: GpuUse | SharedUse) -> str:
    return f"unknown ({use.nvml_unknown})" if use.nvml is None else f"{100 * use.nvml:.0f} %"


def work_by_gpu(recordings: Sequence[Recording]) -> dict[str, dict[int, tuple[Intervals, Intervals]]]:
    """Return when each process that uses a GPU was recorded, and when its work ran there.

    The keys are the GPU's UUID (or ``cuda:0`` if that is unknown), then the pid.
    """
    sampled = [one for one in recordings if one.window >= 0]
    users = {
        (one.gpus.get(device) or f"cuda:{device}", one.pid, device)
        for one in sampled
        for device in map(int, np.unique(one.device.device))
    }
    found: dict[str, dict[int, tuple[Intervals, Intervals]]] = {}
    for gpu, pid, device in sorted(users):
        mine = [one for one in sampled if one.pid == pid]
        recorded = np.asarray([(one.begun, one.ended) for one in mine]).T
        here = [one.device.device == device for one in mine]
        starts = np.concatenate([one.device.starts[at] for one, at in zip(mine, here, strict=True)])
        ends = np.concatenate([one.device.ends[at] for one, at in zip(mine, here, strict=True)])
        found.setdefault(gpu, {})[pid] = union(*recorded), union(starts, ends)
    return found


def shared_use(recordings: Sequence[Recording], folder: Path) -> list[SharedUse]:
    """Analyse each GPU that several processes use, over all of them; ``folder`` holds NVML's samples."""
    found = []
    for gpu, users in work_by_gpu(recordings).items():
        if len(users) < 2:
            continue
        begun, ended = (np.concatenate(times) for times in zip(*(one for one, _ in users.values()), strict=True))
        times = np.unique([begun, ended])
        n_recorded = np.searchsorted(np.sort(begun), times[:-1], side="right")
        n_recorded -= np.searchsorted(np.sort(ended), times[:-1], side="right")
        most = np.flatnonzero(n_recorded == n_recorded.max())
        within = union(times[most], times[most + 1])
        length = float((within[1] - within[0]).sum())
        works = [work for _, work in users.values()]
        busy = [
            float((active_before(work, within[1]) - active_before(work, within[0])).sum()) / length
            for work in [merged(works), *works]
        ]
        windows = list(zip(*(map(int, one) for one in within), strict=True))
        nvml = utilisation(read_samples(folder), gpu, windows)
        found.append(SharedUse(gpu, int(n_recorded.max()), 1e-9 * length, busy[0], max(busy[1:]), *nvml))
    return found


def merged(several: Iterable[Intervals]) -> Intervals:
    """Return the union of several unions."""
    starts, ends = zip(*several, strict=True)
    return union(np.concatenate(starts), np.concatenate(ends))


def use_of_gpus(recordings: Sequence[Recording], folder: Path) -> list[GpuUse]:
    """Analyse each process's use of each GPU; ``folder`` holds NVML's samples, if there are any."""
    samples, found = read_samples(folder), []
    sampled = [one for one in recordings if one.window >= 0]
    users = dict.fromkeys((one.pid, device) for one in sampled for device in map(int, np.unique(one.device.device)))
    for pid, device in users:
        captures = [capture for one in recordings if one.pid == pid for capture in _captures(one)]
        windows = [one for one in sampled if one.pid == pid and (one.device.device == device).any()]
        use = GpuUse(windows[0].process, pid, device)
        for one in windows:
            _add_window(use, one, np.flatnonzero(one.device.device == device), captures)
        use.busy, use.weighted = use.busy / use.seconds, use.weighted / use.seconds
        times = [(one.begun, one.ended) for one in windows]
        use.nvml, use.nvml_unknown = utilisation(samples, windows[-1].gpus.get(device, ""), times)
        found.append(use)
    return found


def _add_window(use: GpuUse, recording: Recording, rows: Integers, captures: Captures) -> None:
    device = recording.device
    starts, ends = device.starts[rows], device.ends[rows]
    names = [device.names[i] for i in rows]
    processors = max(1, device.processors.get(use.device, 1))
    launched, path, paths = _launches(recording, captures)
    use.seconds += 1e-9 * (recording.ended - recording.begun)
    use.weighted += 1e-9 * _weighted(starts, ends, np.minimum(1.0, device.blocks[rows] / processors))
    kernels = np.asarray([not name.startswith(("Memcpy", "Memset")) for name in names])
    use.kernels += 1e-9 * float((ends - starts)[kernels].sum())
    copies = np.asarray([name.startswith("Memcpy HtoD") for name in names])
    busy, data, launches, host = _split(recording, starts, ends, np.minimum(launched[rows], starts), copies)
    use.busy += busy
    for reason, seconds in (("host", host), ("data", data), ("launches", launches)):
        use.idle[reason] += seconds
    for one in map(int, np.unique(path[rows])):
        name = "/".join(paths[one]) if one >= 0 else "(no operation)"
        at = path[rows] == one
        use.operations[name] = use.operations.get(name, 0.0) + 1e-9 * union_length(starts[at], ends[at])


def _split(
    recording: Recording, starts: Times, ends: Times, ordered: Times, copies: NDArray[np.bool_]
) -> tuple[float, ...]:
    """Return the seconds in which the GPU is busy, and waits for data, launches and the host; see `GpuUse`."""
    times, path = recording.innermost()
    brings = np.append(np.asarray([one[-1] in DATA for one in recording.paths], dtype=np.int64), 0)[path]
    segments = sweep(
        np.concatenate([starts, ordered, ordered[copies]]),
        np.concatenate([ends, starts, starts[copies]]),
        np.repeat(np.arange(3), [len(starts), len(starts), int(copies.sum())]),
        (recording.begun, recording.ended),
        (times, brings),
    )
    busy, pending, copying = (segments.active & bit > 0 for bit in (1, 2, 4))
    data = copying | ~pending & (segments.label == 1)
    reason = np.select([busy, data, pending], [0, 1, 2], 3)
    return tuple(map(float, 1e-9 * totals(reason, segments.lengths, 4)))


def _weighted(starts: Times, ends: Times, weights: Floats) -> float:
    """Integrate min(1, sum of the weights of running work) over time, ns."""
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    level = np.clip(np.cumsum(np.concatenate([weights, -weights])[order]), 0.0, 1.0)
    return float((level[:-1] * np.diff(times[order])).sum()) if len(times) else 0.0


def _launches(recording: Recording, captures: Captures) -> tuple[Times, Integers, list[tuple[str, ...]]]:
    """Return the launch time of each kernel [K] (ns), its operation [K] as an index into the paths, and the paths.

    The work of a replayed graph is matched, in order, with the latest capture that made equally many API calls, so it
    counts for the operations that were captured. Without such a capture, it counts for the operation that replays.
    """
    host, device = recording.host, recording.device
    innermost = recording.innermost()
    api = np.flatnonzero((host.kind == 1) & (host.correlation >= 0))
    api = api[np.argsort(host.correlation[api], kind="stable")]
    at = np.searchsorted(host.correlation[api], device.correlation)
    at = np.minimum(at, max(0, len(api) - 1))
    known = host.correlation[api][at] == device.correlation if len(api) else np.zeros(len(at), dtype=bool)
    launched = np.where(known, host.starts[api][at] if len(api) else 0, device.starts)
    path = lookup(innermost, launched)
    names = {one: i for i, one in enumerate(recording.paths)}
    for launch in np.unique(at[known]):
        call = int(api[launch])
        if "GraphLaunch" not in host.names[call]:
            continue
        rows = np.flatnonzero(known & (at == launch))
        rows = rows[np.lexsort((device.starts[rows], device.node[rows]))]
        fitting = [paths for ended, paths in captures if len(paths) == len(rows) and ended <= host.starts[call]]
        if fitting:
            path[rows] = [-1 if one is None else names.setdefault(one, len(names)) for one in fitting[-1]]
    return launched, path, list(names)


def _captures(recording: Recording) -> Captures:
    """Return when each capture of a CUDA graph ended, and the operations of the captured work, in order."""
    host, innermost = recording.host, recording.innermost()
    api = np.flatnonzero(host.kind == 1)
    found: Captures = []
    calls: list[int] = []
    inside = False
    for i in map(int, api[np.argsort(host.starts[api], kind="stable")]):
        name = host.names[i]
        if "StreamBeginCapture" in name:
            inside, calls = True, []
        elif "StreamEndCapture" in name and inside:
            inside = False
            paths = lookup(innermost, host.starts[calls])
            found.append((int(host.ends[i]), [None if one < 0 else recording.paths[one] for one in paths]))
        elif inside and any(word in name for word in _CAPTURED):
            calls.append(i)
    return found
