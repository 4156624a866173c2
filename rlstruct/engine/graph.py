"""The graph executor: all device work of a step as one launch, by a CUDA graph or the simulated one.

A graph is captured once and replayed: the same kernels read and write the same memory, and no Python runs. So every
call copies its arguments into the graph's memory, except those that another graph writes, such as a batch that it
collects: they are read in place. Python values, and every number that was read on the host, stay as they were during
the capture.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.core.pytree import TreeSpec
from rlstruct.device import registered_backends
from rlstruct.engine import torch_private
from rlstruct.engine.host_syncs import why_not_capturable
from rlstruct.engine.purity import Unavailable, place_of
from rlstruct.engine.torch_private import is_composite
from rlstruct.profiling import recorded

Place = tuple[object, ...]
"""Address and layout of a tensor, see `place_of`."""
Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Captures work that only queues operations; returns a function that queues them again on the same memory."""

_LIBRARY_MODULES = ("torch", "contextlib", "rlstruct.engine", "rlstruct.batchers", "rlstruct.testing")  # modules
_INVALID_GRAPHS: list[Any] = []  # graphs of failed captures, which torch's allocator of pinned memory keeps querying


class CaptureError(Unavailable):
    """The work cannot be captured; the message names the operation and the line that called it."""


class Graph:
    """An `Executor` that captures the step as a graph and replays it. The step may write to its weights in place.

    Args:
        step: takes and returns pytrees; it has run before, so that libraries have initialised what they need.
        how: see `capture_on`.
        loops: the step returns ``(state, outputs)``, and the state has the structure of its first argument. A replay
            writes the new state over that argument, so the next call copies nothing if it gets this state.
    """

    name, prepare, writes = "graph", None, False

    def __init__(self, step: Callable[..., Any], how: Capture, *, loops: bool = False) -> None:
        self._step = step
        self._how = how
        self._loops = loops
        self._replay: Work | None = None
        self._arguments: TreeSpec
        self._static: list[Tensor] = []  # memory that a replay reads; with ``loops``, the first ones get the new state
        self._in_place: list[Place | None] = []  # place of each argument that is read in place
        self._result: TreeSpec
        self._outputs: list[Tensor] = []  # memory that a replay writes

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 - pytrees
        """Replay the step. Results are copies; with ``loops``, the next replay overwrites state and outputs."""
        leaves = None if self._replay is None else self._arguments.flatten(args)
        if leaves is None or self._in_place != _written_places(leaves):
            self._prepare(*args)
            leaves = self._arguments.flatten(args)
        pairs = [
            (own, now)
            for own, now, place in zip(self._static, leaves, self._in_place, strict=True)
            if place is None and now is not own
        ]
        copy_grouped([own for own, _ in pairs], [now for _, now in pairs])
        self._replay()  # type: ignore[misc]  # prepare sets it
        if self._loops:
            return self._arguments.unflatten(self._static)[0], self._result.unflatten(self._outputs)
        return self._result.unflatten(value.clone() for value in self._outputs)

    def _prepare(self, *args: Any) -> None:  # noqa: ANN401
        """Capture the step for such arguments; raises CaptureError, and then had no effect."""
        for output in self._outputs:
            _WRITERS.pop(_address(output), None)
        self._replay, self._static, self._outputs = None, [], []  # an earlier capture frees its memory first
        self._arguments = TreeSpec(args)
        leaves = self._arguments.flatten(args)
        self._in_place = _written_places(leaves)
        self._static = [now if place else now.clone() for now, place in zip(leaves, self._in_place, strict=True)]
        self._replay = capture(self._how, self._work)
        _WRITERS.update((_address(output), self) for output in self._outputs)

    def rebind(self, places: Mapping[tuple[object, ...], str], weights: Mapping[str, Tensor]) -> bool:
        """Return False: a graph cannot read other memory."""
        return False

    @torch.no_grad()
    def _work(self) -> None:
        arguments = self._arguments.unflatten(self._static)
        result = self._step(*arguments)
        if self._loops:
            after, result = result
            state = TreeSpec(arguments[0])
            places = state.flatten(arguments[0])
            both = zip(places, state.flatten(after), strict=True)
            pairs = [(place, value) for place, value in both if value is not place]
            # A view of static memory is copied before that memory is written.
            kept = {place.untyped_storage().data_ptr() for place in places}
            values = [v.clone() if v.untyped_storage().data_ptr() in kept else v for _, v in pairs]
            copy_grouped([place for place, _ in pairs], values)
        self._result = TreeSpec(result)
        self._outputs = self._result.flatten(result)


def _written_places(tensors: Sequence[Tensor]) -> list[Place | None]:
    """Return the place of each tensor that a graph writes in every replay, and None for the others."""
    return [place_of(tensor) if _address(tensor) in _WRITERS else None for tensor in tensors]


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()


_WRITERS: WeakValueDictionary[int, Graph] = WeakValueDictionary()
"""The graph that writes to a storage in every replay, by address; one that is gone has freed the storage."""


def copy_grouped(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors to their places with one kernel, as 8-byte words, plus one per dtype for those that are not words.

    torch copies one by one if a list mixes dtypes, or if strides differ from those of the places.
    """
    forms: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values, strict=True):
        if place.dtype == value.dtype and _in_words(place) and _in_words(value):
            place, value = place.view(-1).view(torch.int64), value.view(-1).view(torch.int64)
        form = place.dtype, value.dtype, place.stride() == value.stride()
        to, what = forms.setdefault(form, ([], []))
        to.append(place)
        what.append(value)
    for to, what in forms.values():
        torch._foreach_copy_(to, what)


def _in_words(tensor: Tensor) -> bool:
    """Return True if a tensor is contiguous, aligned to 8 bytes and a multiple of 8 bytes long."""
    start = tensor.storage_offset() * tensor.itemsize
    return tensor.is_contiguous() and tensor.nbytes % 8 == 0 and start % 8 == 0 and not tensor.is_complex()


def capture_on(device: torch.device) -> Capture | None:
    """Return the capture function of a device: for CUDA graphs, or from a registered backend's module; or None."""
    if device.type == "cuda":
        return None if torch_private.missing("graph") else capture_cuda
    module = registered_backends().get(device.type)
    own_capture: Capture | None = None if module is None else getattr(importlib.import_module(module), "capture", None)
    return own_capture


def capture(how: Capture, work: Work) -> Work:
    """Capture work; raise CaptureError, which names the operation, if it cannot be captured."""
    watch = _CaptureGuard()

    def watched() -> None:
        with watch:
            work()

    try:
        with recorded():
            return how(watched)
    except Exception as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(f"{watch.last}{_line_of(error)}: {said}") from error


def capture_cuda(work: Work) -> Work:
    """Capture work as a CUDA graph on the current stream, which must not be the default one, without executing it."""
    try:
        return _capture(work)
    except torch.OutOfMemoryError:
        pass  # only after this block is the memory of the first attempt free
    return _capture(work)


def _capture(work: Work) -> Work:
    # cuBLAS must allocate its workspace in the graph's own pool. torch 2.13 frees an older workspace when another graph
    # is destroyed, and replays would then write to memory that belongs to others.
    torch_private.clear_cublas_workspaces()
    gc.collect()
    # During a capture the allocator cannot release cached memory.
    torch.cuda.synchronize()  # sync: once per capture
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    collects = gc.isenabled()
    gc.disable()  # a collection during the capture could call CUDA
    try:
        # Other threads may keep using CUDA.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
            graph.capture_end()
        except BaseException:
            _abandon(graph, pool)
            raise
    finally:
        if collects:
            gc.enable()
        torch_private.clear_cublas_workspaces()  # eager work must not use the graph's either
    replay: Work = graph.replay
    return replay


def _abandon(graph: Any, pool: tuple[int, int]) -> None:  # noqa: ANN401 - torch gives graphs no types
    """End a failed capture and notify torch's allocator.

    CUDA refuses to end a capture that an operation invalidated. torch then does not notify its allocator, which would
    never again reuse memory that two streams have used, such as that of every returned batch.
    """
    try:
        graph.capture_end()
    except RuntimeError:  # the same error again
        _INVALID_GRAPHS.append(graph)
        with contextlib.suppress(RuntimeError):  # already notified
            torch_private.end_allocating(torch.cuda.current_device(), pool)


class _CaptureGuard(torch_private.OperatorObserver):  # type: ignore[no-untyped-call]  # torch gives its base no types
    """Guard of a capture: remembers the last operation and refuses those that cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.last = "the first operation"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.last, kwargs = str(func), kwargs or {}
        if reason := why_not_capturable(func, args, kwargs):
            raise CaptureError(f"{reason} needs the host")
        if is_composite(func):  # below autograd, nothing has decomposed it yet
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _line_of(error: BaseException) -> str:
    """Return the innermost traceback line in an agent or a simulator."""
    place, trace = "", error.__traceback__
    while trace is not None:
        if not str(trace.tb_frame.f_globals.get("__name__")).startswith(_LIBRARY_MODULES):
            place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


__getattr__ = renamed.attributes(__name__)
