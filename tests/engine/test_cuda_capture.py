"""Begin and end of a CUDA graph, also where CUDA refuses: with stand-ins, and on a GPU where there is one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlstruct.engine import graph as graph_module

POOL = (0, 7)
BEGIN = ["clear", "synchronize", "empty_cache", f"begin in {POOL}, thread_local"]


class Cuda(list[str]):
    """Calls that CUDA received, in order."""

    spoilt = False  # whether CUDA refuses to end the capture
    graph: Callable[[], object] = staticmethod(lambda: None)  # weak reference to the last graph


class Graph:
    """Stands for torch's."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        cuda.graph = weakref.ref(self)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.cuda.append(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        self.cuda.append("end")
        if self.cuda.spoilt:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.cuda.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    asked = Cuda()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(asked))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *a, said=name: asked.append(f"{said} {a}"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: asked.append("clear"), raising=False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda said=name: asked.append(said))
    return asked


def test_a_capture_is_ended_before_it_is_replayed(cuda: Cuda) -> None:
    replay = graph_module.capture_cuda(lambda: cuda.append("work"))
    replay()
    # torch 2.13 frees workspaces of cuBLAS with any graph: the graph makes its own, and leaves them to none.
    assert cuda == [*BEGIN, "work", "end", "clear", "replay"]


def test_work_that_raises_ends_the_capture_too(cuda: Cuda) -> None:
    def work() -> None:
        raise KeyError("frame")

    with pytest.raises(KeyError, match="frame"):
        graph_module.capture_cuda(work)
    assert cuda == [*BEGIN, "end", "clear"]  # torch has informed its allocator
    gc.collect()
    assert cuda.graph() is None


@pytest.mark.parametrize("n_failures", [1, 2])
def test_a_capture_that_runs_out_of_memory_is_tried_once_more(cuda: Cuda, n_failures: int) -> None:
    """The first try's memory is free by then: nothing holds what it made."""
    made: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        assert all(old() is None for old in made)
        tensor = torch.ones(3)
        made.append(weakref.ref(tensor))
        if len(made) <= n_failures:
            raise torch.OutOfMemoryError("CUDA out of memory")

    if n_failures == 1:
        graph_module.capture_cuda(work)()
    else:
        with pytest.raises(torch.OutOfMemoryError):
            graph_module.capture_cuda(work)
    assert len(made) == 2
    assert cuda == [*BEGIN, "end", "clear", *BEGIN, "end", "clear", "replay"][: len(cuda)]
    assert cuda[-1] == ("replay" if n_failures == 1 else "clear")


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_within_a_capture(cuda: Cuda, collects: bool) -> None:
    """Garbage collection might free memory of CUDA, or destroy a graph."""
    before, seen = gc.isenabled(), []
    (gc.enable if collects else gc.disable)()
    try:
        graph_module.capture_cuda(lambda: seen.append(gc.isenabled()))
        assert (seen, gc.isenabled()) == ([False], collects)
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("says_so", [True, False])
def test_torchs_allocator_hears_of_a_capture_that_cuda_refuses_to_end(cuda: Cuda, says_so: bool) -> None:
    def work() -> None:
        cuda.spoilt = True
        if says_so:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted" if says_so else "previous error"):
        graph_module.capture_cuda(work)
    assert cuda[-1] == "clear"
    assert cuda[-3:-1] == [f"_cuda_endAllocateToPool {(0, POOL)}", f"_cuda_releasePool {(0, POOL)}"]
    gc.collect()
    assert cuda.graph() is not None  # torch's other allocators go on to ask it


BAD: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "to_cpu": lambda x: x.to("cpu"),
    "from_cpu": lambda x: torch.ones(4).to(x.device),
    "from_cpu_without_waiting": lambda x: x.copy_(torch.ones(4), non_blocking=True),
    "a_list": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "synchronize": lambda x: torch.cuda.synchronize(),  # no operator: CUDA itself refuses
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", BAD)
def test_memory_is_used_again_after_a_capture_that_failed(name: str) -> None:
    x, stream = torch.ones(4, device="cuda:0"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with pytest.raises(graph_module.CaptureError):
            graph_module.capture(graph_module.capture_cuda, lambda: BAD[name](x * 2))
        y = torch.zeros(4, device="cuda:0")
        again = graph_module.capture(graph_module.capture_cuda, lambda: y.add_(x))
        again()
        again()
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 4
    for _ in range(64):  # if the allocator were still capturing, each of these would be another 64 MiB
        block = torch.empty(1 << 26, dtype=torch.uint8, device="cuda:0")
        block.record_stream(stream)
        del block
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() < 1 << 30
