"""Graphs of the simulated accelerator: capture and replay as with CUDA graphs, operator by operator.

A capture notes every operator with its tensors. A replay runs the same operators on the same tensors and writes their
results into the memory of the capture, without running the captured Python code again. So mistakes that are silent with
CUDA graphs show up on a laptop: a number read on the host stays frozen, a replaced tensor is not seen, and a result
that is not copied back is lost. A wait for the device raises, as during a CUDA capture.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rlstruct.engine.torch_private import TorchDispatchMode, is_composite, schema_of
from rlstruct.testing.batch_writes import written_tensors
from rlstruct.testing.host_sync import forbid_host_sync


def capture(work: Callable[[], None]) -> Callable[[], None]:
    """Capture work without any lasting effect, as CUDA does, and return the function that replays it."""
    captured = _Capture()
    try:
        with forbid_host_sync(), captured:
            work()
    finally:
        captured.undo()
    return captured.replay


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._made: dict[int, Tensor] = {}  # by address; holding them keeps their memory from being reused
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):  # in inference mode nothing has decomposed it yet
            with self:
                return func.decompose(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            if tensor.untyped_storage().data_ptr() not in self._made:
                self._before.append((tensor, tensor.clone()))
        results = func(*args, **kwargs)
        fresh = _fresh(func, results)
        for _, tensor in fresh:
            self._made[tensor.untyped_storage().data_ptr()] = tensor
        self._calls.append((func, args, kwargs, fresh))
        return results

    def undo(self) -> None:
        """Restore memory from before the capture, and poison the results with NaN."""
        with torch.no_grad():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
            for tensor in self._made.values():
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        self._before.clear()

    def replay(self) -> None:
        """Run the operators again, on the same memory."""
        with torch.no_grad():
            for func, args, kwargs, fresh in self._calls:
                leaves = tree_leaves(func(*args, **kwargs))
                for i, tensor in fresh:
                    tensor.copy_(leaves[i])


def _fresh(func: Any, results: Any) -> list[tuple[int, Tensor]]:
    """Return the results that own new memory (neither arguments nor views), with their positions."""
    returns_view = func.overloadpacket.__name__ == "_unsafe_view"  # although its schema does not say so
    if returns_view or any(returned.alias_info is not None for returned in schema_of(func).returns):
        return []
    return [(i, leaf) for i, leaf in enumerate(tree_leaves(results)) if isinstance(leaf, Tensor)]
