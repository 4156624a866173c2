"""Streams that run parallel to the caller's: a separate one on CUDA, none on the CPU.

The collector's work runs in parallel with the caller's, such as a learner on the same GPU. Events order the two streams
where necessary, and the allocator knows which stream uses which memory; nothing waits for the whole device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlstruct.core.transfer import mover
from rlstruct.engine.host_syncs import intended


class Stream:
    """Queue of work on one device. This base class is for the CPU, where work is done when the call returns."""

    def work(self) -> contextlib.AbstractContextManager[None]:
        """Queue the work of a with block on this stream, after everything that the caller has queued."""
        return contextlib.nullcontext()

    def to_caller(self, tensors: Iterable[Tensor]) -> None:
        """Pass tensors to the caller: work that it queues later runs after the work of this stream."""

    def from_caller(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the caller's tensors for use on this stream: copies if the stream may lag behind the caller."""
        return dict(tensors)

    def record_use(self, tensors: Iterable[Tensor]) -> None:
        """Let this stream keep using tensors of the caller after the caller frees them."""

    def ready(self) -> bool:
        """Return True if all work is done."""
        return True


class CudaStream(Stream):
    """A stream on a CUDA device: a new one, or the ``default`` one.

    Libraries that do not use torch's current stream launch on the default one, or on one that CUDA orders with it, as
    Warp does. CUDA does not order torch's other streams with the default one.
    """

    def __init__(self, device: torch.device, *, default: bool = False) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = (
            torch.cuda.default_stream(device) if default else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        )
        self._done: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Queue the work of a with block on the stream, after the caller's."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._done = self._stream.record_event()

    def to_caller(self, tensors: Iterable[Tensor]) -> None:
        """Let the caller's stream wait for this one; the allocator reuses the memory only after the caller's work."""
        caller = torch.cuda.current_stream(self._device)
        if self._done is not None:
            caller.wait_event(self._done)
        for tensor in tensors:
            tensor.record_stream(caller)

    def from_caller(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy on the caller's stream, so that the caller does not wait for a batch in flight."""
        sources = {key: tensor.detach() for key, tensor in tensors.items()}
        move = mover(sources, self._device, non_blocking=False)  # moves all CPU tensors in one copy
        copies = {
            key: tensor.to(self._device, copy=True, non_blocking=True) if tensor.is_cuda else move(tensor)
            for key, tensor in sources.items()
        }
        self.record_use(copies.values())
        return copies

    def record_use(self, tensors: Iterable[Tensor]) -> None:
        """Tell the allocator that the stream uses these tensors."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def ready(self) -> bool:
        """Return True if the last work on the stream is done."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]


class AsyncRead:
    """An asynchronous read of a small tensor on a device: the host gets the numbers once they are computed."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._copy = tensor
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            with intended():  # sync: none, `read` checks whether the copy is done
                self._copy.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[int] | None:
        """Return the numbers; None if they are not computed yet."""
        if self._done is not None and not self._done.query():  # type: ignore[no-untyped-call]
            return None
        return self.wait()

    def wait(self) -> list[int]:
        """Wait until the numbers are computed, and return them."""
        if self._done is not None:
            self._done.synchronize()
        with intended():  # sync: nothing waits, the copy is done
            numbers: list[int] = self._copy.tolist()  # sync: as above
        return numbers


def stream_on(device: torch.device, *, default: bool = False) -> Stream:
    """Return a new stream on a device; see `CudaStream`."""
    return CudaStream(device, default=default) if device.type == "cuda" else Stream()


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device; on CUDA through pinned memory, so that the host does not wait."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # torch cannot pin memory if a second kind of accelerator is registered, as in our tests. The driver stages
        # small copies of pageable memory, so these do not wait either.
        with contextlib.suppress(RuntimeError):
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
