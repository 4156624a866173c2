"""Imports leave CUDA's driver closed: it reads the variables that divide a GPU only once, when it is opened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import importlib, pkgutil, sys, traceback
import torch

def refuse(*given, **settings):
    traceback.print_stack()
    sys.exit("something opened the driver")

for module in (torch.cuda, torch._C):
    for name in ("is_available", "device_count", "init", "_lazy_init", "_cuda_init", "_cuda_getDeviceCount"):
        setattr(module, name, refuse)
torch.cuda.is_initialized = lambda: False
try:
    import warp
except ImportError:
    pass
else:
    importlib.import_module("warp._src.context" if hasattr(warp, "_src") else "warp.context").Runtime = refuse

from rlstruct.errors import MissingPackageError

def import_all(name):
    if name.endswith("__main__"):
        return
    try:
        module = importlib.import_module(name)
    except (MissingPackageError, ModuleNotFoundError):  # of an extra that is not installed
        return
    print(name)
    for one in pkgutil.iter_modules(getattr(module, "__path__", []), f"{name}."):
        import_all(one.name)

for package in sys.argv[1:] or ["rlstruct", "rlstruct.agents", "rlstruct.algos", "rlstruct.batchers"]:
    import_all(package)
"""


def imported(profile: str, *packages: str) -> set[str]:
    """Names of the modules that a process imports; all of the library if no package is named."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *packages],
        capture_output=True,
        text=True,
        env={**os.environ, "RLSTRUCT_PROFILE": profile},
        timeout=200,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


@pytest.mark.slow
def test_no_import_opens_the_driver_even_of_a_profiled_process(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "phase": "start", "operators": 0.5, "origin": 0, "window": 10**9}
    found = imported(json.dumps(settings))
    assert found >= {"rlstruct", "rlstruct.algos.ppo", "rlstruct.batchers.workers.worker", "rlstruct.sims"}
    assert imported("nvtx", "rlstruct.core") >= {"rlstruct.core"}
