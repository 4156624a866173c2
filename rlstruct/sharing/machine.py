"""What there is on this machine for processes that share a GPU. Nothing is changed, and no CUDA context is opened."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from rlstruct.sharing.daemon import missing

_GPU = re.compile(r"^GPU (\d+): .*\(UUID: (GPU-[^)]+)\)")
_MIG = re.compile(r"^\s+MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)")
_SECONDS = 20.0  # nvidia-smi takes some on a machine with eight GPUs and no persistence daemon


@dataclass(frozen=True)
class MigInstance:
    """A part of a GPU with memory and multiprocessors of its own.

    Attributes:
        uuid: by which CUDA_VISIBLE_DEVICES names it.
        profile: its size, such as ``"1g.10gb"``.
        gpu: UUID of the GPU.
    """

    uuid: str
    profile: str
    gpu: str


def mig_instances() -> list[MigInstance]:
    """Return the MIG instances that this process may use, as ``nvidia-smi`` lists them; none where it is missing."""
    try:
        run = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    tokens = None if visible is None else [token.strip() for token in visible.split(",") if token.strip()]
    found, index, gpu = [], "", ""
    for line in run.stdout.splitlines():
        if match := _GPU.match(line):
            index, gpu = match.groups()
        elif match := _MIG.match(line):
            profile, uuid = match.groups()
            if tokens is None or any(t == index or gpu.startswith(t) or uuid.startswith(t) for t in tokens):
                found.append(MigInstance(uuid, profile, gpu))
    return found


def running_daemon() -> Path | None:
    """Return the pipe directory of the MPS daemon that processes find by themselves, None if there is none."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return pipe if (pipe / "control").exists() else None


def no_green_contexts() -> str:
    """Say why one process cannot split a GPU into parts of its own, "" if it can."""
    if hasattr(getattr(torch.cuda, "green_contexts", None), "SMPartition"):
        return ""
    return (
        f"torch {torch.__version__} has no torch.cuda.green_contexts.SMPartition: its green contexts may share "
        "multiprocessors"
    )


def describe() -> list[str]:
    """Put into words what there is, and which mode suits, for a machine with a GPU."""
    instances = mig_instances()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    daemon = running_daemon()
    found = [("", f"CUDA_VISIBLE_DEVICES={visible}")] if visible is not None else []
    found += [("MIG", f"{part.profile} {part.uuid}") for part in instances] or [("MIG", "no instances")]
    if daemon:
        found.append(("MPS", f"runs ({daemon}): all processes share the GPU at the same time already"))
    else:
        found.append(("MPS", missing() or "can be started"))
    found.append(("green contexts", no_green_contexts() or "disjoint ones can be made"))
    if instances:
        suits = 'sharing="mig": one or more processes in each instance, kept apart in memory and speed'
    elif daemon:
        suits = 'sharing="none": the daemon that runs already does it'
    elif missing():
        suits = 'sharing="none": processes take turns'
    else:
        suits = 'sharing="mps": many processes with small networks at the same time'
    found.append(("suits", "simulators of tensors, batched search: n_processes=0 with many environments"))
    found.append(("", f"other environments: n_processes=k, {suits}"))
    return [f"{name:<15} {words}" for name, words in found]
