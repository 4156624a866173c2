"""Devices by name. Only `resolve_device` turns strings into devices, and it never falls back silently."""

from __future__ import annotations

import ctypes
import importlib
import os
import pathlib
import platform
import re
import sys

import torch

from rlstruct import renamed
from rlstruct.errors import BadValueError

DeviceLike = str | torch.device

BACKENDS: dict[str, str] = {}
"""Modules to import before devices of a type exist, by type; see `register_backend`."""
WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64."""
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # M_… of glibc's malloc.h
_NEVER = -1  # as an unsigned number of bytes: more than exist


def register_backend(device_type: str, module: str) -> None:
    """Register the module that must be imported, here and in workers, before devices of this type exist."""
    BACKENDS[device_type] = module


def registered_backends() -> dict[str, str]:
    """Return the device types that need a module, with that module's name."""
    return dict(BACKENDS)


def resolve_device(device: DeviceLike) -> torch.device:
    """Return the device of this name on this machine, with its index.

    Args:
        device: such as ``"cpu"``, ``"cuda"`` (the same as ``"cuda:0"``), ``"cuda:1"``, or a torch.device.

    Returns:
        The device; indexed unless it is ``cpu`` or ``meta``.

    Raises:
        ValueError: the name is not a device, or this machine has no such device. The message lists the existing ones.

    >>> resolve_device("cpu")
    device(type='cpu')
    """
    if isinstance(device, str) and (device_type := device.partition(":")[0]) in BACKENDS:
        importlib.import_module(BACKENDS[device_type])
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        simulated = " The simulated accelerator exists once rlstruct.testing.sim_device has been imported."
        hint = simulated if str(device).startswith("sim") else ""
        raise BadValueError(f"resolve_device: {device!r} is not a device. Devices here: {_listing()}.{hint}") from error
    if resolved.type in ("cpu", "meta"):
        return torch.device(resolved.type)
    count = device_count(resolved.type)
    index = resolved.index or 0
    if index >= count:
        none = " This torch build sees no CUDA device: check the driver and torch.version.cuda."
        hint = none if resolved.type == "cuda" and count == 0 else ""
        raise BadValueError(f"resolve_device: {device!s} does not exist. Devices here: {_listing()}.{hint}")
    return torch.device(resolved.type, index)


def device_count(device_type: str) -> int:
    """Count the devices of one type on this machine; 0 if torch has no such backend."""
    if device_type in ("cpu", "meta"):
        return 1
    backend = getattr(torch, device_type, None)
    return 0 if backend is None or not hasattr(backend, "device_count") else int(backend.device_count())


def accumulator_dtype(device: DeviceLike) -> torch.dtype:
    """Return the dtype in which sums are accumulated on a device: float64, or float32 on ``mps``, which has no other.

    >>> accumulator_dtype("cpu"), accumulator_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if torch.device(device).type in WITHOUT_FLOAT64 else torch.float64


def usable_cores() -> int:
    """Count the cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the model of the CPU, or its architecture."""
    try:
        named = re.search(r"^model name\s*: (.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return named[1] if named else platform.processor() or platform.machine()


def keep_freed_memory() -> bool:
    """Keep freed CPU memory in this process for later tensors, as torch does on a GPU.

    The C library of Linux returns every block above 32 MB to the system as soon as it is freed, and must have new pages
    zeroed for the next one. A network that acts in 262,144 environments on the CPU spends half of its time on that.
    With this setting the process never shrinks. Call it once, at the start of a program. It affects neither worker
    processes nor large tensors of other threads.

    Returns:
        True if it had an effect; only glibc has this option.
    """
    advise = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if advise is None:
        return False
    # Blocks are never mapped one by one. Raising M_MMAP_THRESHOLD is not enough: an int cannot name more than 2 GB, and
    # glibc before 2.35 takes no more than 32 MB.
    return all([advise(_MMAP_MAX, 0), advise(_TRIM_THRESHOLD, _NEVER)])


def _listing() -> str:
    types = ["cuda", "mps", "xpu", *(device_type for device_type in BACKENDS if hasattr(torch, device_type))]
    names = [f"{device_type}:{i}" for device_type in types for i in range(device_count(device_type))]
    return ", ".join(["cpu", *names])


__getattr__ = renamed.attributes(__name__)
