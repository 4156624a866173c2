"""Turn a piece of device work into one launch: CUDA graphs, and the seam for stand-ins.

A graph is recorded once and replayed: the same kernels read and write the same memory, and no Python runs. What Python
decided while recording, and every number that it read on the host, stays as it was.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlstruct.device import registered_backends
from rlstruct.engine.waits import is_composite, judge_recorded

Work = Callable[[], None]
Record = Callable[[Work], Work]
"""Takes work that only queues operations on tensors; returns what queues the same operations on the same memory."""

_NOT_THE_USERS = ("torch", "contextlib", "rlstruct.engine", "rlstruct.batchers", "rlstruct.testing")  # modules
_SPOILT: list[Any] = []  # graphs of failed recordings: torch's allocator of pinned memory goes on to ask them


class RecordingError(RuntimeError):
    """Work cannot be recorded; the message names the operation and the line that called it."""


def recorder_of(device: torch.device) -> Record | None:
    """Return what records work on a device: CUDA graphs, the ``record`` of a registered backend's module, or None."""
    if device.type == "cuda":
        return record_cuda
    module = registered_backends().get(device.type)
    record: Record | None = None if module is None else getattr(importlib.import_module(module), "record", None)
    return record


def record(recorder: Record, work: Work) -> Work:
    """Record work, and name the operation that prevents it.

    Raises:
        RecordingError: the work raised, or needs the host.
    """
    watch = _Watch()
    try:
        return recorder(watch.around(work))
    except Exception as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise RecordingError(f"{watch.last}{_line_of(error)}: {said}") from error


def record_cuda(work: Work) -> Work:
    """Record work as a CUDA graph on the current stream, which must not be the default one. Nothing is executed."""
    gc.collect()  # what is collected while recording might call CUDA
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    # Other threads may go on to use CUDA meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
        graph.capture_end()
    except BaseException:
        _abandon(graph, pool)
        raise
    replay: Work = graph.replay
    return replay


def _abandon(graph: Any, pool: tuple[int, int]) -> None:  # noqa: ANN401 - torch gives graphs no types
    """End a recording that failed, and let torch's allocator know.

    CUDA refuses to end a recording that an operation has spoilt, and then torch does not tell its allocator that it is
    over: from there on no memory that two streams have used (every batch that was handed over) would be used again.
    """
    try:
        graph.capture_end()
    except RuntimeError:  # says again what is known
        _SPOILT.append(graph)
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # it knows already
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Remembers which operation came last, and refuses one that would spoil or freeze a recording before it is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.last = "the first operation"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.last, kwargs = str(func), kwargs or {}
        if reason := judge_recorded(func, args, kwargs):
            raise RuntimeError(f"{reason} needs the host")
        if is_composite(func):  # below autograd nothing above this has taken it apart
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)

    def around(self, work: Work) -> Work:
        def watched() -> None:
            with self:
                work()

        return watched


def _line_of(error: BaseException) -> str:
    """Name the innermost line of an agent or a simulator."""
    found, trace = "", error.__traceback__
    while trace is not None:
        if not str(trace.tb_frame.f_globals.get("__name__")).startswith(_NOT_THE_USERS):
            found = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
