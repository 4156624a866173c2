"""forbid_host_sync, a guard that finds calls that make the host wait for the device, even without a GPU.

``x.item()``, ``if x > 0:``, ``x[mask]`` and the like stop the program until the device has caught up. You do not notice
that on a laptop; on a GPU it can take most of the time. Inside ``forbid_host_sync()`` each such call raises:

>>> import torch
>>> from rlstruct.testing import forbid_host_sync
>>> x = torch.arange(4)
>>> with forbid_host_sync():
...     y = torch.where(x > 1, x, 0)
>>> with forbid_host_sync():
...     y = x[x > 1]
Traceback (most recent call last):
    ...
rlstruct.testing.host_sync.HostSyncError: ...: indexing by a boolean mask makes the host wait for the device. ...

It watches torch's Python calls (``item tolist numpy cpu``), the operators below them (``nonzero``, mask indexing,
copies between devices, ...), and on CUDA turns on torch's ``torch.cuda.set_sync_debug_mode``. ``x.to("cpu")`` is a copy
only if ``x`` is elsewhere: on CUDA, or on the simulated accelerator (``rlstruct.testing.sim_device``). Wrap an intended
wait in ``allow_host_sync()``; ``count_host_syncs()`` counts instead of raising. Code under ``torch.compile`` stays
compiled and is not watched.
"""

# ruff: noqa: ANN401  (torch passes whatever a call takes and returns)

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from traceback import walk_stack, walk_tb
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlstruct.engine.host_syncs import CROSS, NUMBER, SHAPE, describe_wait, guards, intended, is_accelerator, set_guards
from rlstruct.engine.torch_private import OperatorObserver, is_composite
from rlstruct.errors import Explained

# Remedy for each Python call, by the name of the method.
_FUNCTIONS: Final = {
    **dict.fromkeys(("item", "tolist", "numpy", "__array__", "cpu", "__repr__"), NUMBER),
    **dict.fromkeys(("__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero"), NUMBER),
    **dict.fromkeys(("equal", "allclose", "__contains__"), NUMBER),
    **dict.fromkeys(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"), SHAPE),
}
_CUDA_ALARM: Final = "called a synchronizing CUDA operation"
_TORCH_FOLDER: Final = os.path.dirname(torch.__file__)
# Files that stand between the user's code and torch: the simulated accelerator and the other guard.
_TOOLS: Final = tuple(
    os.path.join(os.path.dirname(__file__), name) for name in ("simulated", "sim_device.py", "batch_writes.py")
)


class HostSyncError(Explained, RuntimeError):
    """Error: a call made the host wait for the device where that is forbidden; it names the call and its line."""


@dataclass
class HostSyncCount:
    """Result of ``count_host_syncs``."""

    calls: list[str] = field(default_factory=list)  # a line of text for each wait: file, line and call, in order

    @property
    def count(self) -> int:
        """Number of waits."""
        return len(self.calls)


@contextlib.contextmanager
def forbid_host_sync() -> Iterator[None]:
    """Raise at every call in this block that makes the host wait for a device, even on a CPU, where it costs nothing.

    Raises:
        HostSyncError: names the call, its file and line, and a remedy.
    """
    with _watching(_raise), _cuda_alarm("error"):
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, HostSyncError) or _CUDA_ALARM not in str(error):
                raise
            raise HostSyncError(f"{calling_line(error.__traceback__)}: {_CUDA_ALARM}. {NUMBER}") from error


@contextlib.contextmanager
def count_host_syncs() -> Iterator[HostSyncCount]:
    """Count the calls in this block that make the host wait. The yielded count can be read during and after it."""
    count = HostSyncCount()
    with _watching(lambda place, call, fix: count.calls.append(f"{place}: {call}")):
        yield count


@contextlib.contextmanager
def allow_host_sync() -> Iterator[None]:
    """Allow intended waits inside ``forbid_host_sync`` and ``count_host_syncs``; elsewhere, do nothing."""
    with contextlib.ExitStack() as stack:
        if guards():
            stack.enter_context(_cuda_alarm("default"))
        stack.enter_context(intended())
        yield


def _raise(place: str, call: str, fix: str) -> None:
    raise HostSyncError(f"{place}: {call} makes the host wait for the device. {fix}")


@contextlib.contextmanager
def _watching(report: Callable[[str, str, str], None]) -> Iterator[None]:
    functions, before = _FunctionMode(report), guards()
    set_guards((*before, functions.pause))
    try:
        with functions, _OperatorMode(functions):
            yield
    finally:
        set_guards(before)


@contextlib.contextmanager
def _cuda_alarm(mode: str) -> Iterator[None]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield  # nothing can wait for CUDA yet; asking for the mode would initialise it
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns once that this is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _FunctionMode(TorchFunctionMode):
    """Watcher of torch's Python calls, by the name of the function that the user called."""

    def __init__(self, report: Callable[[str, str, str], None]) -> None:
        super().__init__()
        self.report = report
        self.paused = 0
        self.writes_number = False  # x[mask] = 0.0, which does not wait on CUDA

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        call, fix = _judge_call(name, args, kwargs)
        if call:
            self.report(calling_line(), call, fix)
            with self.pause():  # do not report the same wait again below
                return func(*args, **kwargs)
        self.writes_number = name == "__setitem__" and isinstance(args[2], (bool, int, float))
        try:
            return func(*args, **kwargs)
        finally:
            self.writes_number = False


def _judge_call(name: str, args: Any, kwargs: Any) -> tuple[str, str]:
    if name in _FUNCTIONS:
        return f"{name}()", _FUNCTIONS[name]
    if name in ("__getitem__", "__setitem__") and is_accelerator(args[0].device):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(part, list) for part in index):
            return f"indexing a tensor on {args[0].device} by a list", CROSS
    if name in ("tensor", "as_tensor", "asarray") and is_accelerator(kwargs.get("device")):
        data = args[0] if args else kwargs.get("data")
        if not (isinstance(data, Tensor) and is_accelerator(data.device)):
            return f"torch.{name}() of host data on {kwargs['device']}", CROSS
    return "", ""


class _OperatorMode(OperatorObserver):  # type: ignore[no-untyped-call]
    """Watcher of the operators below the Python calls."""

    def __init__(self, functions: _FunctionMode) -> None:
        super().__init__()
        self.functions = functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.functions.paused:
            call, fix = describe_wait(func, args, kwargs, self.functions.writes_number)
            if call:
                self.functions.report(calling_line(), call, fix)
            elif is_composite(func):  # in inference mode nothing has decomposed it yet
                with self:
                    return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def calling_line(trace: TracebackType | None = None) -> str:
    """Return file and line of the innermost frame outside of torch and these tools."""
    stack = walk_stack(sys._getframe()) if trace is None else reversed(list(walk_tb(trace)))
    for frame, line in stack:
        name = frame.f_code.co_filename
        if name not in (__file__, contextlib.__file__) and not name.startswith((_TORCH_FOLDER, *_TOOLS)):
            return f"{name}:{line}"
    return "in autograd's thread"
