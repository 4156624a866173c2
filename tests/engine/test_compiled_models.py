"""Models under torch.compile stay compiled while something looks at their operators, and afterwards."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlstruct.engine.graph import Work, capture
from rlstruct.testing import count_host_syncs, forbid_host_sync


class Backend:
    """A compiler that changes nothing, and counts how often its code runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            self.runs += 1
            return module.forward(*given)

        return run


@pytest.fixture(autouse=True)
def forget() -> None:
    """Dynamo compiles a function for a few callers only, and then gives up."""
    torch.compiler.reset()


def run_captured(work: Work) -> None:
    """Do what a capture does, but for the capture."""

    def how(watched: Work) -> Work:
        watched()
        return watched

    capture(how, work)


def run_inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Work], None]:
    def run(work: Work) -> None:
        with context():
            work()

    return run


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    "run",
    [run_captured, run_inside(forbid_host_sync), run_inside(count_host_syncs), run_inside(nullcontext)],
    ids=["captured", "forbid", "count", "plain"],
)
@torch.no_grad()
def test_a_compiled_model_stays_compiled(run: Callable[[Work], None], warm: bool) -> None:
    backend = Backend()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend=backend)
    x = torch.ones(3, 4)
    if warm:
        model(x)
    backend.runs = 0
    found: list[Tensor] = []
    run(lambda: found.append(model(x)))
    assert backend.runs == 1
    torch.testing.assert_close(found[0], model(x))
    assert backend.runs == 2


def test_a_capture_does_not_import_a_compiler() -> None:
    """Compile outside of a capture: it takes seconds."""
    program = """
import sys, torch
from rlstruct.engine.graph import capture
from rlstruct.testing import forbid_host_sync
x = torch.ones(3)
capture(lambda work: (work(), work)[1], lambda: x + 1)
with forbid_host_sync():
    x + 1
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
