from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rlstruct.errors import UsageError
from rlstruct.profiling import Clock, is_on, operation, operations, phase, profile, recorded
from rlstruct.profiling.operations import VARIABLE
from rlstruct.profiling.recorder import NVTX


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of torch.cuda.nvtx, in a process that is to show its operations."""
    made: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: made.append(f"> {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: made.append("<"))
    monkeypatch.setattr(torch.cuda.nvtx, "mark", made.append)
    monkeypatch.setenv(VARIABLE, NVTX)
    return made


def test_operations_are_ranges_of_the_same_names(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)

    @operation("loss")
    def loss() -> None:
        Clock({"idle": None, "work": "agent"}).enter(1)  # and does not end it

    operations.start_if_requested()
    try:
        with phase("training"), operation("iteration"):
            loss()
            with recorded():
                clock = Clock({"idle": None, "work": "agent"})
                clock.enter(1)
                clock.enter(0)
        with pytest.raises(UsageError, match=f"unset {VARIABLE}"), profile("nowhere"):
            pass
    finally:
        operations.stop()
    with operation("afterwards"):
        pass
    inner = ["> loss", "> agent", "<", "<", "> agent", "<"]
    assert calls == ["phase: training", "> iteration", *inner, "<", "phase: start"]


def test_without_cuda_there_are_no_ranges(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    operations.start_if_requested()
    assert not is_on()
    with operation("iteration"):
        pass
    assert calls == []


SCRIPT = """
import torch
from rlstruct.profiling import is_on, operation

with operation("iteration"), operation("loss"):
    torch.ones(3, device="cuda").sum()
print("shown", is_on())
"""


@pytest.mark.gpu
def test_ranges_of_torch_on_a_gpu() -> None:
    environment = {**os.environ, VARIABLE: NVTX}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "shown True\n"), run.stderr
