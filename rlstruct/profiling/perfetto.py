"""Trace for https://ui.perfetto.dev: all processes, threads and GPU streams on one clock, as Chrome's trace events."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstruct.profiling.events import Recording
from rlstruct.profiling.gpu import merged, work_by_gpu
from rlstruct.profiling.nvml import Samples
from rlstruct.profiling.overlap import Times, active_before

_BIN = 10_000_000  # nanoseconds over which the busy share is averaged
_STREAMS = 16  # thread ids from here on are GPU streams
_COUNTERS = 1 << 30  # pid of the counters
Event = dict[str, Any]


def write_trace(recordings: Sequence[Recording], path: Path, samples: Mapping[str, Samples] | None = None) -> None:
    """Write one trace of all windows of all processes: gzipped JSON.

    Counter tracks show the percentage of each 10 ms in which a GPU was busy for any process, and NVML's samples.
    """
    events = [event for recording in recordings for event in _window(recording)]
    text = json.dumps({"traceEvents": [*events, *_counters(recordings, samples or {})]})
    path.write_bytes(gzip.compress(text.encode(), compresslevel=3))


def _window(recording: Recording) -> Iterable[Event]:
    pid, spans, device = recording.pid, recording.spans, recording.device
    yield _named("process_name", pid, 0, recording.process)
    paths = recording.paths
    tracks = {
        1: ("operations", spans, [paths[key][-1] for key in spans.key]),
        2: ("torch and CUDA's API", recording.host, recording.host.names),
    }
    for stream in map(int, np.unique(device.stream)):
        work = device[device.stream == stream]
        tracks[_STREAMS + stream] = (f"GPU stream {stream}", work, work.names)
    for thread, (track, events, names) in tracks.items():
        yield _named("thread_name", pid, thread, track)
        yield from _slices(pid, thread, events.starts, events.ends, names)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _slices(pid: int, tid: int, starts: Times, ends: Times, names: Sequence[str]) -> Iterable[Event]:
    """Yield the events, in microseconds, cut to the event around them: Perfetto shows only nested events."""
    around: list[int] = []  # ends of open events
    for i in np.lexsort((-ends, starts)):
        start = int(starts[i])
        while around and around[-1] <= start:
            around.pop()
        around.append(min([int(ends[i]), *around[-1:]]))
        times = {"ts": start / 1e3, "dur": (around[-1] - start) / 1e3}
        yield {"ph": "X", "pid": pid, "tid": tid, "name": names[i], **times}


def _counters(recordings: Sequence[Recording], samples: Mapping[str, Samples]) -> Iterable[Event]:
    for gpu, users in work_by_gpu(recordings).items():
        recorded, work = (merged(several) for several in zip(*users, strict=True))
        yield _named("process_name", _COUNTERS, 0, "GPUs")
        for begun, ended in zip(*recorded, strict=True):
            edges = np.append(np.arange(begun, ended, _BIN), ended)
            shares = 100.0 * np.diff(active_before(work, edges)) / np.diff(edges)
            until = np.append(shares, 0.0)  # 0 between windows, where nothing was recorded
            yield from _values(f"GPU busy, {gpu}", zip(map(int, edges), map(float, until), strict=True))
        if gpu in samples:
            yield from _values(f"NVML's utilisation, {gpu}", samples[gpu].taken)


def _values(name: str, taken: Iterable[tuple[int, float]]) -> Iterable[Event]:
    for time, percent in taken:
        yield {"ph": "C", "pid": _COUNTERS, "name": name, "ts": time / 1e3, "args": {"%": percent}}
