"""What the driver calls the utilisation of a GPU: the share of a period in which any kernel was there."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_PERIOD = 0.1  # seconds between samples; the driver's own periods are 1/6 s to 1 s
_MOST = 100_000  # hours


def sample(folder: Path) -> Callable[[], None] | None:
    """Ask NVML in a thread of its own; return what ends that; None where nvidia-ml-py or a driver is missing.

    Args:
        folder: where the samples go in the end: lists of time (ns of ``time.perf_counter``), index of the GPU, percent.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    samples: list[tuple[int, int, float]] = []
    over = threading.Event()

    def ask() -> None:
        while True:
            for index, handle in enumerate(handles):
                percent = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                samples.append((time.perf_counter_ns(), index, percent))
            if len(samples) > _MOST:
                del samples[::2]
            if over.wait(_PERIOD):
                return

    def end() -> None:
        over.set()
        thread.join()
        (folder / f"{os.getpid()}.nvml.json").write_text(json.dumps(samples))
        pynvml.nvmlShutdown()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return end
