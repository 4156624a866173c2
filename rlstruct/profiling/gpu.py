"""GPU use of a process, and the reasons why the GPU is idle the rest of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlstruct.profiling.events import WATCHED, Recording, Table
from rlstruct.profiling.nvml import MISSING, read_samples, utilisation
from rlstruct.profiling.overhead import WAIT
from rlstruct.profiling.overlap import (
    Floats,
    Intervals,
    Times,
    active_before,
    levels,
    lookup,
    sweep,
    union,
    union_length,
)

DATA = {WAIT, "assembly", "copy", "replay buffer"}
"""Operations that move data: a GPU that is idle during one waits for data."""
Captures = list[tuple[int, list[tuple[str, ...]]]]
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
        return (
            f"{self.processes} processes on {self.gpu}, recorded at once for {self.seconds:.2f} s: NVML's utilisation "
            f"{_percent(self)}, busy {100 * self.busy:.1f} % (at least one of them), the busiest of them "
            f"{100 * self.busiest:.1f} %"
        )


def _percent(use: GpuUse | SharedUse) -> str:
    return f"unknown ({use.nvml_unknown})" if use.nvml is None else f"{100 * use.nvml:.0f} %"


def windows_by_user(recordings: Sequence[Recording]) -> dict[tuple[str, int, int], list[tuple[Recording, Table]]]:
    """Return the sampled windows of each process that uses a GPU, each with its work on that GPU.

    The keys are the GPU's UUID (or ``cuda:0`` if that is unknown), the pid, and the index of the GPU in the process.
    """
    sampled = [one for one in recordings if one.window >= 0 and WATCHED in one.slices[1]]
    users = {
        (one.gpus.get(index) or f"cuda:{index}", one.pid, index)
        for one in sampled
        for index in map(int, np.unique(one.device.gpu))
    }
    return {
        (gpu, pid, index): [(one, one.device[one.device.gpu == index]) for one in sampled if one.pid == pid]
        for gpu, pid, index in sorted(users)
    }


def work_by_gpu(recordings: Sequence[Recording]) -> dict[str, list[tuple[Intervals, Intervals]]]:
    """Return when each process that uses a GPU was recorded, and when its work ran there, by the GPU's UUID."""
    by_gpu: dict[str, list[tuple[Intervals, Intervals]]] = {}
    for (gpu, _, _), windows in windows_by_user(recordings).items():
        begun, ended = np.asarray([(one.begun, one.ended) for one, _ in windows]).T
        work = np.concatenate([work for _, work in windows])
        by_gpu.setdefault(gpu, []).append((union(begun, ended), union(work["starts"], work["ends"])))
    return by_gpu


def shared_use(recordings: Sequence[Recording], folder: Path) -> list[SharedUse]:
    """Analyse each GPU that several processes use, over all of them; ``folder`` holds NVML's samples."""
    uses = []
    for gpu, users in work_by_gpu(recordings).items():
        if len(users) < 2:
            continue
        recorded, works = zip(*users, strict=True)
        begun, ended = map(np.concatenate, zip(*recorded, strict=True))
        times, n_recorded = levels(begun, ended, np.ones(len(begun), dtype=np.int64))
        most = np.flatnonzero(n_recorded == n_recorded.max())
        starts, ends = union(times[most], times[most + 1])
        length = float((ends - starts).sum())
        busy, *each = (
            float((active_before(work, ends) - active_before(work, starts)).sum()) / length
            for work in [merged(works), *works]
        )
        nvml = utilisation(read_samples(folder), gpu, list(zip(starts, ends, strict=True)))
        uses.append(SharedUse(gpu, int(n_recorded.max()), 1e-9 * length, busy, max(each), *nvml))
    return uses


def merged(several: Iterable[Intervals]) -> Intervals:
    """Return the union of several unions."""
    return union(*map(np.concatenate, zip(*several, strict=True)))


def use_of_gpus(recordings: Sequence[Recording], folder: Path) -> list[GpuUse]:
    """Analyse each process's use of each GPU; ``folder`` holds NVML's samples, if there are any."""
    samples, uses = read_samples(folder), []
    for (gpu, pid, index), windows in windows_by_user(recordings).items():
        captures = [capture for one in recordings if one.pid == pid for capture in _captures(one)]
        use = GpuUse(windows[0][0].process, pid, index)
        working = [(one, work) for one, work in windows if len(work)]
        for one, work in working:
            _add_window(use, one, work, captures)
        use.busy, use.weighted = use.busy / use.seconds, use.weighted / use.seconds
        use.nvml, use.nvml_unknown = utilisation(samples, gpu, [(one.begun, one.ended) for one, _ in working])
        uses.append(use)
    return uses


def _add_window(use: GpuUse, recording: Recording, work: Table, captures: Captures) -> None:
    lengths = work.ends - work.starts
    is_kernel = np.asarray([not name.startswith(("Memcpy", "Memset")) for name in work.names])
    processors = max(1, recording.processors.get(use.device, 1))
    launched, paths = _launches(recording, work, captures)
    use.seconds += 1e-9 * (recording.ended - recording.begun)
    use.weighted += 1e-9 * weighted_length(work.starts, work.ends, np.minimum(1.0, work.blocks / processors))
    use.kernels += 1e-9 * float(lengths[is_kernel].sum())
    use.busy += _add_idle(use.idle, recording, work, np.minimum(launched, work.starts))
    for path in sorted(set(paths)):
        mine = work[np.asarray([one == path for one in paths])]
        name = "/".join(path) or "(no operation)"
        use.operations[name] = use.operations.get(name, 0.0) + 1e-9 * union_length(mine.starts, mine.ends)


def _add_idle(idle: dict[str, float], recording: Recording, work: Table, launched: Times) -> float:
    """Add the seconds in which the GPU is idle to their reasons, see `GpuUse`, and return those in which it is busy."""
    times, key = recording.innermost
    is_copy = np.asarray([name.startswith("Memcpy HtoD") for name in work.names])
    pending = launched, work.starts
    categories = (work.starts, work.ends), pending, (launched[is_copy], work.starts[is_copy])
    moves_data = recording.select(DATA)[key].astype(np.int64)
    segments = sweep(categories, (recording.begun, recording.ended), (times, moves_data))
    busy, launching, copying = (segments.active & bit > 0 for bit in (1, 2, 4))
    data = copying | ~launching & (segments.label == 1)
    seconds = 1e-9 * segments.lengths
    idle["data"] += float(seconds[~busy & data].sum())
    idle["launches"] += float(seconds[~busy & ~data & launching].sum())
    idle["host"] += float(seconds[~busy & ~data & ~launching].sum())
    return float(seconds[busy].sum())


def weighted_length(starts: Times, ends: Times, weights: Floats) -> float:
    """Integrate min(1, sum of the weights of running work) over time, ns."""
    times, level = levels(starts, ends, weights)
    return float((np.clip(level, 0.0, 1.0)[:-1] * np.diff(times)).sum())


def _launches(recording: Recording, work: Table, captures: Captures) -> tuple[Times, list[tuple[str, ...]]]:
    """Return the time at which each kernel [K] was launched (ns), and the operation [K] that launched it.

    The work of a replayed graph is matched, in order, with the latest capture that made equally many API calls, so it
    counts for the operations that were captured. Without such a capture, it counts for the operation that replays.
    """
    host = recording.host
    api = np.flatnonzero((host.kind == 1) & (host.correlation >= 0))
    calls = dict(zip(map(int, host.correlation[api]), api, strict=True))
    call = np.asarray([calls.get(int(one), -1) for one in work.correlation])
    launched = np.where(call < 0, work.starts, np.append(host.starts, 0)[call])
    paths = _paths_at(recording, launched)
    for launch in np.unique(call[call >= 0]):
        if "GraphLaunch" not in host.names[launch]:
            continue
        rows = np.flatnonzero(call == launch)
        rows = rows[np.lexsort((work.starts[rows], work.node[rows]))]
        fitting = [one for ended, one in captures if len(one) == len(rows) and ended <= host.starts[launch]]
        for row, path in zip(rows, fitting[-1] if fitting else (), strict=False):
            paths[row] = path
    return launched, paths


def _captures(recording: Recording) -> Captures:
    """Return when each capture of a CUDA graph ended, and the operations of the captured work, in order."""
    api = recording.host[recording.host.kind == 1]
    captures: Captures = []
    starts: list[int] | None = None  # of the calls of an open capture
    for start, end, _, _, name in api[np.argsort(api.starts, kind="stable")]:
        if "StreamBeginCapture" in name:
            starts = []
        elif "StreamEndCapture" in name and starts is not None:
            captures.append((int(end), _paths_at(recording, np.asarray(starts, dtype=np.int64))))
            starts = None
        elif starts is not None and any(word in name for word in _CAPTURED):
            starts.append(start)
    return captures


def _paths_at(recording: Recording, times: Times) -> list[tuple[str, ...]]:
    """Return the path of the innermost operation at each time [K] (ns), empty outside of all operations."""
    paths = [*recording.paths, ()]  # the last one before the window
    return [paths[key] for key in lookup(recording.innermost, times)]
