"""Streams for work next to the caller's: a separate one on CUDA, none on the CPU.

The caller's work (a learner on the same GPU) and the collector's run side by side. Events say where one must wait for
the other, and the allocator knows which stream uses which memory; nothing ever waits for the whole device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlstruct.core.transfer import mover
from rlstruct.engine.host_syncs import intended


class Stream:
    """Queue of work on one device. This one is a CPU's: work is done when the call returns."""

    def work(self) -> contextlib.AbstractContextManager[None]:
        """Queue what is done inside in this stream, behind everything that the caller has queued until now."""
        return contextlib.nullcontext()

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Pass tensors to the caller: what it queues from now on comes after the work of this stream."""

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the caller's tensors for use in this stream: copies, where the stream may lag behind the caller."""
        return dict(tensors)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let work in this stream use tensors of the caller's, whenever the caller lets go of them."""

    def ready(self) -> bool:
        """Return True if all work is done."""
        return True


class CudaStream(Stream):
    """A stream on a CUDA device: its own, or the ``default`` one.

    Libraries that do not ask torch for its stream launch on the default one, or on one that is ordered with it, as
    Warp's are. Streams of torch are not ordered with it.
    """

    def __init__(self, device: torch.device, *, default: bool = False) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = (
            torch.cuda.default_stream(device) if default else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        )
        self._done: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """Queue what is done inside on the stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._done = self._stream.record_event()

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Let the caller's stream wait; the memory is used again only when that is through with it."""
        caller = torch.cuda.current_stream(self._device)
        if self._done is not None:
            caller.wait_event(self._done)
        for tensor in tensors:
            tensor.record_stream(caller)

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy on the caller's stream, so that it need not wait for a batch in flight."""
        given = {key: tensor.detach() for key, tensor in tensors.items()}
        move = mover(given, self._device, non_blocking=False)  # those on the CPU travel as one
        copies = {
            key: tensor.to(self._device, copy=True, non_blocking=True) if tensor.is_cuda else move(tensor)
            for key, tensor in given.items()
        }
        self.keep(copies.values())
        return copies

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let the allocator know that the stream uses these tensors."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def ready(self) -> bool:
        """Return True if the last work on the stream is done."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]


class AsyncRead:
    """A small tensor on a device, for the host to read when the device is through with it: nothing waits."""

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        self._copy = tensor
        if tensor.device.type == "cuda":
            self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            with intended():  # sync: none, `read` asks whether the copy is done
                self._copy.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> list[int] | None:
        """Return the numbers; None if the device is not through with them."""
        if self._done is not None and not self._done.query():  # type: ignore[no-untyped-call]
            return None
        return self.wait()

    def wait(self) -> list[int]:
        """Return the numbers as soon as the device is through with them."""
        if self._done is not None:
            self._done.synchronize()
        with intended():  # sync: nothing waits, the copy is done
            numbers: list[int] = self._copy.tolist()  # sync: as above
        return numbers


def stream_on(device: torch.device, *, default: bool = False) -> Stream:
    """Return a new stream on a device; see `CudaStream`."""
    return CudaStream(device, default=default) if device.type == "cuda" else Stream()


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device; on CUDA through pinned memory, so that the host waits for nothing."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Where a second kind of accelerator is registered, as in our own tests, torch cannot pin; small copies of
        # ordinary memory are staged by the driver and do not wait either.
        with contextlib.suppress(RuntimeError):
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
