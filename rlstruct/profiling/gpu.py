"""How much of a GPU a process really uses, and why the rest is idle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rlstruct.profiling.events import DeviceEvents, Recording
from rlstruct.profiling.overlap import Integers, Times, lookup
from rlstruct.profiling.prices import WAIT

DATA = {WAIT, "hand-over", "copy", "replay buffer"}
"""Operations that bring data: a GPU that is idle meanwhile waits for data."""
Captures = list[tuple[int, list[tuple[str, ...] | None]]]
_CAPTURED = ("LaunchKernel", "MemcpyAsync", "MemsetAsync", "LaunchCooperativeKernel")


@dataclass
class GpuUse:
    """How a process has used a GPU. NVML's number is high as soon as any kernel runs, however small.

    Attributes:
        process: its name.
        pid: of the process.
        device: index of the GPU.
        seconds: that were recorded.
        busy: share of the time in which at least one kernel, copy or fill of this process runs.
        weighted: the same, each kernel weighted with the share of the multiprocessors that its blocks can fill.
        nvml: what the driver calls utilisation, of all processes together, in the same time, as a share; None without
            nvidia-ml-py.
        kernels: sum of the seconds of all kernels.
        idle: seconds in which the GPU waits for the ``host`` (nothing is ordered yet), for ``data`` (the host waits for
            it or moves it, or it is being copied to the GPU) and for ``launches`` (ordered, and not begun).
        operations: busy seconds by the operation that launched the work, or that was captured in a CUDA graph.
    """

    process: str
    pid: int
    device: int
    seconds: float = 0.0
    busy: float = 0.0
    weighted: float = 0.0
    nvml: float | None = None
    kernels: float = 0.0
    idle: dict[str, float] = field(default_factory=lambda: {"host": 0.0, "data": 0.0, "launches": 0.0})
    operations: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Put the three shares side by side."""
        nvml = "unknown (pip install nvidia-ml-py)" if self.nvml is None else f"{100 * self.nvml:.0f} %"
        idle = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.idle.items())
        most = sorted(self.operations.items(), key=lambda pair: -pair[1])
        return "\n".join(
            [
                f"{self.process} (pid {self.pid}) on cuda:{self.device}: NVML's utilisation {nvml}, busy "
                f"{100 * self.busy:.1f} %, weighted by multiprocessors {100 * self.weighted:.2f} %",
                f"  idle, waiting for: {idle}",
                *(f"  {seconds:.3f} s busy for {name}" for name, seconds in most),
            ]
        )


def use_of_gpus(recordings: Sequence[Recording], folder: Path) -> list[GpuUse]:
    """Analyse what the processes did on GPUs.

    Args:
        recordings: windows of processes.
        folder: where NVML's samples are, if there are any.

    Returns:
        One for each process and GPU that it used.
    """
    samples = np.asarray(
        [sample for file in sorted(folder.glob("*.nvml.json")) for sample in json.loads(file.read_text())], np.float64
    ).reshape(-1, 3)
    found: dict[tuple[int, int], GpuUse] = {}
    seen: dict[tuple[int, int], list[float]] = {}
    captured: dict[int, Captures] = {}
    for recording in recordings:
        captures = captured.setdefault(recording.pid, [])
        captures += _captures(recording)
        if recording.window < 0:
            continue
        for device in map(int, np.unique(recording.device.device)):
            key = recording.pid, device
            use = found.setdefault(key, GpuUse(recording.process, recording.pid, device))
            _add_window(use, recording, np.flatnonzero(recording.device.device == device), captures)
            mine = (samples[:, 1] == device) & (samples[:, 0] >= recording.begun) & (samples[:, 0] <= recording.ended)
            seen.setdefault(key, []).extend(map(float, samples[mine, 2]))
    for key, use in found.items():
        use.busy, use.weighted = use.busy / use.seconds, use.weighted / use.seconds
        use.nvml = float(np.mean(seen[key])) / 100 if seen[key] else None
    return list(found.values())


def _add_window(use: GpuUse, recording: Recording, rows: Integers, captures: Captures) -> None:
    device = recording.device
    starts, ends = device.starts[rows], device.ends[rows]
    use.seconds += 1e-9 * (recording.ended - recording.begun)
    processors = max(1, device.processors.get(use.device, 1))
    weights = np.minimum(1.0, device.blocks[rows] / processors)
    begun, over = _merged(starts, ends)
    use.busy += 1e-9 * float((over - begun).sum())
    use.weighted += 1e-9 * _weighted(starts, ends, weights)
    kernels = np.asarray([not device.names[i].startswith(("Memcpy", "Memset")) for i in rows])
    use.kernels += 1e-9 * float((ends - starts)[kernels].sum())
    launched, path, names = _launches(recording, captures)
    for reason, seconds in _idle(recording, rows, launched[rows], (begun, over)).items():
        use.idle[reason] += seconds
    for one in map(int, np.unique(path[rows])):
        name = "/".join(names[one]) if one >= 0 else "(no operation)"
        at = path[rows] == one
        parts = _merged(starts[at], ends[at])
        use.operations[name] = use.operations.get(name, 0.0) + 1e-9 * float((parts[1] - parts[0]).sum())


def _merged(starts: Times, ends: Times) -> tuple[Times, Times]:
    """Join intervals that touch; returns starts and ends of the stretches, rising."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > ends[:-1]) if len(starts) else np.zeros(0, dtype=bool)
    last = np.append(np.flatnonzero(new)[1:] - 1, len(starts) - 1) if len(starts) else np.zeros(0, dtype=np.int64)
    return starts[new], ends[last]


def _weighted(starts: Times, ends: Times, weights: np.ndarray) -> float:
    """Integrate min(1, sum of the weights of what runs) over time, ns."""
    times = np.concatenate([starts, ends])
    order = np.argsort(times, kind="stable")
    level = np.clip(np.cumsum(np.concatenate([weights, -weights])[order]), 0.0, 1.0)
    return float((level[:-1] * np.diff(times[order])).sum()) if len(times) else 0.0


def _launches(recording: Recording, captures: Captures) -> tuple[Times, Integers, list[tuple[str, ...]]]:
    """When each piece of work of the GPU was ordered [K], ns; in which operation [K], an index into the third result.

    What a replayed graph does is matched, in its order, with what was captured: capturing calls the same API. Where no
    capture of as many pieces was recorded, the operation that replays counts.
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
    """When each capture of a CUDA graph ended, and the operations of what it has captured, in order."""
    host, innermost = recording.host, recording.innermost()
    order = [int(i) for i in np.argsort(host.starts, kind="stable") if host.kind[i] == 1]
    found: Captures = []
    calls: list[int] = []
    inside = False
    for i in order:
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


def _idle(recording: Recording, rows: Integers, launched: Times, busy: tuple[Times, Times]) -> dict[str, float]:
    """Split the seconds between stretches of work by what the GPU waited for."""
    device: DeviceEvents = recording.device
    begun = np.append(recording.begun, busy[1])
    ended = np.append(busy[0], recording.ended)
    order = np.argsort(device.starts[rows], kind="stable")
    next_one = np.searchsorted(device.starts[rows][order], ended[:-1])
    ordered = np.append(launched[order][next_one], recording.ended)  # nothing was ordered after the last one
    ordered = np.clip(ordered, begun, np.maximum(begun, ended))
    copies = np.asarray(
        [device.names[rows[order[i]]].startswith("Memcpy HtoD") for i in next_one] + [False], dtype=bool
    )
    moving = _data_seconds(recording, begun, np.where(copies, ended, ordered))
    whole, waiting = 1e-9 * (ended - begun), 1e-9 * (ordered - begun)
    data = np.where(copies, whole, moving)
    host = np.where(copies, 0.0, waiting - moving)
    return {"host": float(host.sum()), "data": float(data.sum()), "launches": float((whole - data - host).sum())}


def _data_seconds(recording: Recording, starts: Times, ends: Times) -> np.ndarray:
    """How long operations that bring data ran in each stretch of time, in seconds."""
    times, path = recording.innermost()
    brings = np.append(np.asarray([one[-1] in DATA for one in recording.paths], dtype=bool), False)[path]
    edges = np.concatenate([[recording.begun], times, [recording.ended]])
    active = np.concatenate([[False], brings]) if len(times) else np.zeros(1, dtype=bool)
    until = np.append(0.0, np.cumsum(np.where(active, np.diff(edges), 0)))
    seconds: np.ndarray = 1e-9 * (np.interp(ends, edges, until) - np.interp(starts, edges, until))
    return seconds
