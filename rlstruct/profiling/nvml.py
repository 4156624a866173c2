"""GPU utilisation as the driver defines it: the share of a period during which any kernel was running."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

MISSING = "pip install nvidia-ml-py"
_PERIOD = 0.1  # seconds between samples
_REACH = 1_000_000_000  # nanoseconds that a sample covers at most: the driver's periods are 1/6 s to 1 s
LONGEST_CALL = 5.0
"""Seconds; a driver that takes longer is not waited for."""
_MOST = 100_000  # samples, about 3 hours; beyond that, every second one is dropped
_UNKNOWN = "NVML knows no GPU of this UUID: a MIG instance?"
_TOO_SHORT = "no sampled window lasted a second"


@dataclass
class Samples:
    """Samples of one GPU from NVML."""

    taken: list[tuple[int, float]] = field(default_factory=list)  # time (ns of ``time.perf_counter``) and percent
    error: str = ""  # why sampling ended early; empty if it did not

    def within(self, begun: int, ended: int) -> list[float]:
        """Return the percentages sampled in a window (ns), except those that cover time before it.

        A sample covers up to a second, so the first second of a window is left out, or the first half of a window that
        is shorter than two seconds.
        """
        first = begun + min(_REACH, (ended - begun) // 2)
        return [percent for at, percent in self.taken if first <= at <= ended]


def read_samples(folder: Path) -> dict[str, Samples]:
    """Read the samples from NVML, by the UUID of the GPU; empty if there are none."""
    return {
        uuid: Samples(**samples)
        for file in sorted(folder.glob("*.nvml.json"))
        for uuid, samples in json.loads(file.read_text()).items()
    }


def utilisation(samples: dict[str, Samples], uuid: str, windows: list[tuple[int, int]]) -> tuple[float | None, str]:
    """Return a GPU's utilisation over some windows as a share and ``""``, or None and why it is unknown."""
    if not samples:
        return None, MISSING
    if (one := samples.get(uuid)) is None:
        return None, _UNKNOWN
    percentages = [percent for window in windows for percent in one.within(*window)]
    if not percentages:
        return None, one.error or _TOO_SHORT
    return sum(percentages) / len(percentages) / 100, ""


def uuids() -> dict[int, str]:
    """Return the UUIDs of this process's GPUs by CUDA's index, which differs from NVML's; empty before it uses CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    properties = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    return {index: _bare(str(one.uuid)) for index, one in enumerate(properties)}


def sample(folder: Path) -> Callable[[], None] | None:
    """Sample NVML in a thread and return the function that stops it and writes the samples into ``folder``.

    Return None if nvidia-ml-py or a driver is missing.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return None
    try:
        pynvml.nvmlInit()
        devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        handles = {_bare(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in devices}
    except pynvml.NVMLError:
        return None
    samples = {uuid: Samples() for uuid in handles}
    over = threading.Event()

    def ask() -> None:
        while handles:
            for uuid, handle in list(handles.items()):
                one = samples[uuid]
                try:
                    percent = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                    one.taken.append((time.perf_counter_ns(), percent))
                except pynvml.NVMLError as error:  # "Not Supported" for a GPU that MIG divides
                    one.error = f"NVML: {error}"
                    del handles[uuid]
                if len(one.taken) > _MOST:
                    del one.taken[::2]
            if over.wait(_PERIOD):
                return

    def end() -> None:
        over.set()
        thread.join(LONGEST_CALL)
        text = json.dumps({uuid: {**vars(one), "taken": list(one.taken)} for uuid, one in samples.items()})
        (folder / f"{os.getpid()}.nvml.json").write_text(text)
        if not thread.is_alive():
            pynvml.nvmlShutdown()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return end


def _bare(uuid: str) -> str:
    """Return a UUID as torch writes it, without NVML's prefix ``GPU-``."""
    return uuid.removeprefix("GPU-").lower()
