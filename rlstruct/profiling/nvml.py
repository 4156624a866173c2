"""What the driver calls the utilisation of a GPU: the share of a period in which any kernel was there."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

_PERIOD = 0.1  # seconds between samples; the driver's own periods are 1/6 s to 1 s


class Sampler:
    """Asks NVML in a thread of its own, until it is closed.

    Args:
        nvml: the module ``pynvml`` of nvidia-ml-py.
        folder: where the samples go: lists of time (ns of ``time.perf_counter``), index of the GPU, and percent.
    """

    def __init__(self, nvml: Any, folder: Path) -> None:  # noqa: ANN401 - a module
        """Begin."""
        self._nvml, self._file = nvml, folder / f"{os.getpid()}.nvml.json"
        self._samples: list[tuple[int, int, float]] = []
        self._over = threading.Event()
        nvml.nvmlInit()
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the samples."""
        self._over.set()
        self._thread.join()
        self._file.write_text(json.dumps(self._samples))
        self._nvml.nvmlShutdown()

    def _sample(self) -> None:
        while True:
            for index, handle in enumerate(self._handles):
                percent = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                self._samples.append((time.perf_counter_ns(), index, percent))
            if len(self._samples) > 100_000:  # hours: keep every other one
                self._samples = self._samples[::2]
            if self._over.wait(_PERIOD):
                return


def sampler(folder: Path) -> Sampler | None:
    """Begin to sample; None where nvidia-ml-py or a driver is missing."""
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        return Sampler(pynvml, folder)
    except pynvml.NVMLError:
        return None
