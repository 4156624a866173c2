"""forbid_batch_writes, a guard that finds code that writes to a batch. Batches are read-only.

``observation/x`` and ``_observation/x`` share memory in most batches, but not where an environment restarted. So if you
change both in place, shared values change twice and the others once. Inside ``forbid_batch_writes`` that raises:

>>> import torch
>>> from rlstruct import DictTensor
>>> from rlstruct.testing import forbid_batch_writes
>>> batch = DictTensor({"frame": torch.zeros(2, 3)})
>>> with forbid_batch_writes(batch):
...     scaled = batch["frame"] / 255
>>> with forbid_batch_writes(batch):
...     batch["frame"].div_(255)
Traceback (most recent call last):
    ...
rlstruct.testing.batch_writes.BatchWriteError: ...: div_ writes to 'frame' of the batch, which is read-only. ...

torch's operators raise at the line that calls them. Other writes (by numpy, Warp, code under ``torch.compile``, a
replayed CUDA graph) are found at the end of the block by comparing values with a copy of the batch.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.engine.torch_private import OperatorObserver, is_composite, schema_of
from rlstruct.errors import Explained
from rlstruct.testing.conformance import equal_rows, holds
from rlstruct.testing.host_sync import allow_host_sync, calling_line

_FIX = "Make a new tensor instead (x = x / 255), or write to a copy: batch.clone()."


class BatchWriteError(Explained, RuntimeError):
    """Error: something wrote to a batch, which is read-only; it names the keys and, if torch wrote, the line."""


@contextlib.contextmanager
def forbid_batch_writes(*batches: Trajectories | DictTensor | TemporalDictTensor) -> Iterator[None]:
    """Raise where code in this block writes to the memory of a batch.

    Args:
        batches: batches from `RL_Batcher.get`, or any other structures; they remain usable.

    Raises:
        BatchWriteError: names the keys that share the written memory, and a remedy.
    """
    tensors: list[tuple[str, Tensor]] = [item for batch in batches for item in _named(batch)]
    before = [(name, tensor, tensor.detach().clone()) for name, tensor in tensors]
    with _WriteGuard(tensors):
        yield
    with allow_host_sync():
        if changed := [name for name, tensor, copy in before if not holds(equal_rows(tensor, copy))]:
            raise BatchWriteError(
                f"forbid_batch_writes: {_listed(changed)} of the batch changed, which is read-only, and no operator of "
                f"torch did it: look for numpy views, kernels and compiled code. {_FIX}"
            )


class _WriteGuard(OperatorObserver):  # type: ignore[no-untyped-call]  # torch gives its base no types
    """Guard that raises before an operator writes to the memory of the given tensors."""

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        super().__init__()
        self._ranges = [(name, tensor.device, *_bytes_of(tensor)) for name, tensor in tensors]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):  # in inference mode nothing has decomposed it yet
            with self:
                return func.decompose(*args, **kwargs)
        for tensor in written_tensors(func, args, kwargs):
            first, last = _bytes_of(tensor)
            device = tensor.device
            if keys := [name for name, at, low, high in self._ranges if at == device and first < high and low < last]:
                raise BatchWriteError(
                    f"{calling_line()}: {func.overloadpacket.__name__} writes to {_listed(keys)} of the batch, which "
                    f"is read-only. {_FIX}"
                )
        return func(*args, **kwargs)


def tensor_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, str, Tensor, bool]]:
    """Yield the tensor arguments of an operator: name, name with index in a list, tensor, and True if written to."""
    for position, argument in enumerate(schema_of(func).arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        is_list, name = isinstance(value, list | tuple), argument.name
        for i, item in enumerate(value if is_list else [value]):
            if isinstance(item, Tensor):
                yield name, f"{name}[{i}]" if is_list else name, item, written


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    return [tensor for _, _, tensor, written in tensor_arguments(func, args, kwargs) if written]


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """Return the range of addresses that a tensor spans, including gaps between its strides."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (reach + 1) * tensor.element_size()


def _named(batch: Trajectories | DictTensor | TemporalDictTensor) -> list[tuple[str, Tensor]]:
    if isinstance(batch, Trajectories):
        return [*batch.info.items(), *_named(batch.steps)]
    lengths: Mapping[str, Tensor] = {"lengths": batch.lengths} if isinstance(batch, TemporalDictTensor) else {}
    return [*batch.items(), *lengths.items()]


def _listed(keys: list[str]) -> str:
    *most, last = map(repr, dict.fromkeys(keys))
    return f"{', '.join(most)} and {last}, one memory," if most else last
