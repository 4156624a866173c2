"""torch's own profiler, and memory for what it notes: an event costs twice as much in new pages as in old ones."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt(3)
_LARGEST = 1 << 25  # bytes: what glibc never maps one by one, once the program has freed such a block
_PER_SECOND, _MOST = 1 << 26, 1 << 27  # bytes: 300,000 events a second, of 220 bytes each


def warm_memory(seconds: float) -> bool:
    """Let the C library hold pages that have been written to, for what torch.profiler notes in a window.

    It appends 220 bytes for each operator. The system hands out new pages filled with zeros, a fault each; that is
    paid while the program runs, and only in its first windows, so that no calibration finds it.

    Args:
        seconds: length of the window; memory for its first two is prepared.

    Returns:
        Whether it had an effect: only glibc has the options.
    """
    advise = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if advise is None or not all([advise(_MMAP_THRESHOLD, _LARGEST), advise(_TRIM_THRESHOLD, 4 * _MOST)]):
        return False
    block = _LARGEST - (1 << 20)
    wanted = min(_MOST, int(seconds * _PER_SECOND))
    blocks = [torch.ones(block, dtype=torch.uint8, device="cpu") for _ in range(1 + wanted // block)]
    return bool(blocks)


def torch_profile() -> Any:  # noqa: ANN401 - torch.profiler.profile
    """Make torch's profiler, with CUDA where that opens no context that would not be there otherwise."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below, it writes two lines for each window to standard error
    activities = [ProfilerActivity.CPU]
    of_user = multiprocessing.parent_process() is None and torch.cuda.is_available()
    if of_user or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def between_clocks() -> int:
    """Return nanoseconds since 1970, Kineto's, less those of ``time.perf_counter``; a pause between does no harm."""
    found = []
    for _ in range(20):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        found.append((after - before, unix - (before + after) // 2))
    return min(found)[1]
