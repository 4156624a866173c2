"""torch's own profiler, and the difference between its clock and that of Python."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity

_ALL = [ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]  # torch warns, each time, if one is missing


def torch_profile() -> Any:  # noqa: ANN401 - torch.profiler.profile
    """Make torch's profiler, with CUDA where that opens no context that would not be there otherwise."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below, it writes two lines for each window to standard error
    activities = [ProfilerActivity.CPU]
    of_user = multiprocessing.parent_process() is None and torch.cuda.is_available()
    if of_user or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        activities.append(ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def uses_cuda(profiler: Any) -> bool:  # noqa: ANN401 - torch.profiler.profile
    """Whether what `torch_profile` made watches CUDA, too."""
    return ProfilerActivity.CUDA in profiler.activities


def switch(profiler: Any, on: bool) -> None:  # noqa: ANN401 - torch.profiler.profile
    """Let a profiler that has started go on recording the operators of this thread, or rest; takes microseconds."""
    profiler.toggle_collection_dynamic(on, _ALL)


def between_clocks() -> int:
    """Return nanoseconds since 1970, Kineto's, less those of ``time.perf_counter``; a pause between does no harm."""
    found = []
    for _ in range(20):
        before, unix, after = time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()
        found.append((after - before, unix - (before + after) // 2))
    return min(found)[1]
