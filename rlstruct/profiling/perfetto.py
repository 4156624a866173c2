"""Trace for https://ui.perfetto.dev: all processes, threads and GPU streams on one clock.

Written as the protocol buffers of Perfetto (`protos/perfetto/trace/track_event/track_event.proto`), field by field: a
message is a few tagged numbers and strings, and JSON would be four times as large.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlstruct.profiling.events import Recording
from rlstruct.profiling.gpu import merged, work_by_gpu
from rlstruct.profiling.nvml import Samples
from rlstruct.profiling.overlap import Floats, Times, active_before

_BEGINS, _ENDS, _COUNTS = 1, 2, 4
_BIN = 10_000_000  # nanoseconds over which the busy share is taken
_SEQUENCE = 1
_RESETS = 1  # sequence_flags: SEQ_INCREMENTAL_STATE_CLEARED
_TRACKS = ("operations", "torch and CUDA's API")


def write_trace(recordings: Sequence[Recording], path: Path, samples: Mapping[str, Samples] | None = None) -> None:
    """Write one trace of all windows of all processes.

    Counter tracks have the busy share of each GPU, merged over processes, in percent of 10 ms, and NVML's samples.
    """
    with path.open("wb") as file:
        for packet in (*_packets(recordings), *_counters(recordings, samples or {})):
            file.write(_bytes(1, packet))


def _packets(recordings: Sequence[Recording]) -> Iterable[bytes]:
    first = True
    for pid in dict.fromkeys(recording.pid for recording in recordings):
        mine = [recording for recording in recordings if recording.pid == pid]
        process = _track(pid, 0)
        described = _number(1, process) + _bytes(3, _number(1, pid) + _bytes(6, mine[0].process.encode()))
        yield _packet(_bytes(60, described) + (_number(13, _RESETS) if first else b""))
        first = False
        for index, name in enumerate(_TRACKS):
            yield _packet(_bytes(60, _child(process, _track(pid, index + 1), name)))
        streams = sorted({int(stream) for recording in mine for stream in recording.device.stream})
        for stream in streams:
            yield _packet(_bytes(60, _child(process, _track(pid, 16 + stream), f"GPU stream {stream}")))
        for recording in mine:
            host, device = recording.host, recording.device
            names = [recording.paths[i][-1] for i in recording.spans.path]
            yield from _slices(_track(pid, 1), recording.spans.starts, recording.spans.ends, names)
            yield from _slices(_track(pid, 2), host.starts, host.ends, host.names)
            for stream in streams:
                at = np.flatnonzero(device.stream == stream)
                named = [device.names[i] for i in at]
                yield from _slices(_track(pid, 16 + stream), device.starts[at], device.ends[at], named)


def _counters(recordings: Sequence[Recording], samples: Mapping[str, Samples]) -> Iterable[bytes]:
    for index, (gpu, users) in enumerate(work_by_gpu(recordings).items()):
        recorded, work = (merged(several) for several in zip(*users.values(), strict=True))
        track = (1 << 48) + 2 * index  # above those of processes
        yield _packet(_bytes(60, _counter(track, f"GPU busy, {gpu}")))
        for begun, ended in zip(*recorded, strict=True):
            edges = np.append(np.arange(begun, ended, _BIN), ended)
            shares = 100.0 * np.diff(active_before(work, edges)) / np.diff(edges)
            yield from _values(track, edges, np.append(shares, 0.0))  # 0 between windows, of which nothing is known
        if gpu in samples:
            yield _packet(_bytes(60, _counter(track + 1, f"NVML's utilisation, {gpu}")))
            taken = samples[gpu].taken
            yield from _values(
                track + 1, np.asarray([at for at, _ in taken]), np.asarray([value for _, value in taken])
            )


def _counter(track: int, name: str) -> bytes:
    return _number(1, track) + _bytes(2, name.encode()) + _bytes(8, _bytes(6, b"%"))


def _values(track: int, times: Times, percent: Floats) -> Iterable[bytes]:
    for time, value in zip(map(int, times), percent, strict=True):
        event = _number(9, _COUNTS) + _number(11, track) + _varint(44 << 3 | 1) + struct.pack("<d", value)
        yield _packet(_number(8, time) + _bytes(11, event))


def _slices(track: int, starts: Times, ends: Times, names: Sequence[str]) -> Iterable[bytes]:
    """Yield the begin and end of each event, in the order that nests them."""
    order = np.lexsort((-ends, starts))
    open_ends: list[int] = []
    for i in map(int, order):
        start, end = int(starts[i]), int(ends[i])
        while open_ends and open_ends[-1] <= start:
            yield _event(open_ends.pop(), track, _ENDS)
        yield _event(start, track, _BEGINS, names[i])
        open_ends.append(min(end, open_ends[-1]) if open_ends else end)
    while open_ends:
        yield _event(open_ends.pop(), track, _ENDS)


def _event(time: int, track: int, kind: int, name: str = "") -> bytes:
    event = _number(9, kind) + _number(11, track) + (_bytes(23, name.encode()) if name else b"")
    return _packet(_number(8, time) + _bytes(11, event))


def _packet(fields: bytes) -> bytes:
    return fields + _number(10, _SEQUENCE)


def _child(parent: int, track: int, name: str) -> bytes:
    return _number(1, track) + _bytes(2, name.encode()) + _number(5, parent)


def _track(pid: int, index: int) -> int:
    return (pid << 16) + index + 1


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
