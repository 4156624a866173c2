"""Detection of torch operators that make the host wait for a device.

Such waits dominate the time on a GPU, and a CUDA graph cannot capture them. `rlstruct.testing.forbid_host_sync` detects
them, and so does the graph executor, before CUDA fails.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes)

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

_PUT = "Put intended ones into allow_host_sync(); otherwise keep the value on the device: "
MASK: Final = _PUT + "torch.where(mask, a, b), or masked sums."
FILL: Final = _PUT + "index_fill_ takes the number without a copy."
NUMBER: Final = _PUT + "return the tensor, and read it once every k steps."
SHAPE: Final = _PUT + "its result has a shape that depends on data; use torch.where with fixed shapes."
DRAW: Final = _PUT + "draw with rlstruct.functional.random."
CROSS: Final = _PUT + "move data once, or copy with non_blocking=True from pinned memory."

# Operators whose CUDA kernels wait, by overload packet.
_OPERATORS: Final = {
    **dict.fromkeys(("equal", "is_nonzero"), NUMBER),
    **dict.fromkeys(("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"), SHAPE),
    **dict.fromkeys(("bincount", "histc"), SHAPE),
    **dict.fromkeys(("mode", "_linalg_check_errors", "_ctc_loss"), NUMBER),
    **dict.fromkeys(("multinomial",), DRAW),  # checks its probabilities on the host
}
_INDEXING: Final = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})


_local = threading.local()


def guards() -> tuple[Callable[[], AbstractContextManager[Any]], ...]:
    """Return, for each guard of this thread, a function that pauses it."""
    active: tuple[Callable[[], AbstractContextManager[Any]], ...] = getattr(_local, "guards", ())
    return active


def set_guards(pauses: tuple[Callable[[], AbstractContextManager[Any]], ...]) -> None:
    """Set the guards of this thread, each as a function that pauses it."""
    _local.guards = pauses


def intended() -> AbstractContextManager[object]:
    """Pause all guards of this thread for an intended wait."""
    if not guards():  # the common case: an ExitStack takes longer than most waits
        return _NOTHING
    stack = contextlib.ExitStack()
    for pause in guards():
        stack.enter_context(pause())
    return stack


_NOTHING = contextlib.nullcontext()


def describe_wait(func: Any, args: Any, kwargs: Any, writes_number: bool) -> tuple[str, str]:
    """Describe how an operator waits, and how to avoid it; return two empty strings if it does not wait.

    ``func`` and its arguments are those of ``__torch_dispatch__``. ``writes_number``: it writes a Python number through
    an index; if the index is a mask, CUDA does not wait.
    """
    name = func.overloadpacket.__name__
    if name == "_local_scalar_dense":
        return "reading a number, item() or bool(),", NUMBER
    if name in _OPERATORS:
        return name, _OPERATORS[name]
    if name in _INDEXING:
        tensor, indices = args[:2]
        writes_number = name == "index_put_" and writes_number
        if any(map(_is_mask, indices)) != writes_number:
            return ("writing a number through indices", FILL) if writes_number else ("indexing by a boolean mask", MASK)
        if is_accelerator(tensor.device) and any(i is not None and not is_accelerator(i.device) for i in indices):
            return f"indexing a tensor on {tensor.device} by indices on cpu", CROSS
    if name == "normal" and isinstance(args[-1], Tensor):
        return "torch.normal with a tensor of deviations", DRAW  # checks them on the host
    if name == "repeat_interleave" and isinstance(args[0], Tensor) and kwargs.get("output_size") is None:
        return "repeat_interleave without output_size", SHAPE
    if name in ("copy_", "_to_copy"):
        source, target, non_blocking = _copied(name, args, kwargs)
        crosses = is_accelerator(source) != is_accelerator(target)
        if crosses and (not non_blocking or is_accelerator(source)):
            return f"copying from {source} to {target}", CROSS
    return "", ""


def why_not_capturable(func: Any, args: Any, kwargs: Any) -> str:
    """Describe why a graph cannot contain an operator: it waits, or every replay would copy the same host memory.

    The arguments are those of `describe_wait`; the result is empty if the operator can be captured.
    """
    name = func.overloadpacket.__name__
    if name in ("copy_", "_to_copy"):
        source, target, _ = _copied(name, args, kwargs)
        return f"copying from {source} to {target}" if is_accelerator(source) != is_accelerator(target) else ""
    # CUDA writes a single value through a mask with masked_fill_.
    writes_number = name == "index_put_" and args[2].numel() == 1 and any(map(_is_mask, args[1]))
    return describe_wait(func, args, kwargs, writes_number)[0]


def is_accelerator(device: Any) -> bool:
    """Return True if a device, or a device name, is an accelerator; False for None."""
    return device is not None and torch.device(device).type not in ("cpu", "meta")


def _copied(name: str, args: Any, kwargs: Any) -> tuple[torch.device, torch.device, bool]:
    """Return source, target and non_blocking of a ``copy_`` or ``_to_copy``."""
    if name == "copy_":
        return args[1].device, args[0].device, bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))
    source: torch.device = args[0].device
    return source, torch.device(kwargs.get("device") or source), bool(kwargs.get("non_blocking", False))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
