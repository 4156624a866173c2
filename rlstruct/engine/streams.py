"""Where a collector's work is queued: nowhere on a CPU, on a stream of its own on CUDA.

The caller's work (a learner on the same GPU) and the collector's run side by side. Events say where one must wait for
the other, and the allocator is told whenever memory passes between them; nothing ever waits for the whole device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlstruct.core.transfer import mover
from rlstruct.engine.waits import intended


class Lane:
    """Where work is queued on one device. This one is a CPU's: work is done when the call returns."""

    def work(self) -> contextlib.AbstractContextManager[None]:
        """Queue what is done inside in this lane, behind everything that the caller has queued until now."""
        return contextlib.nullcontext()

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Hand tensors to the caller: what it queues from now on comes after the work of this lane."""

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the caller's tensors for use in this lane: copies, where the lane may lag behind the caller."""
        return dict(tensors)

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let work in this lane use tensors of the caller's, whenever the caller lets go of them."""

    def ready(self) -> bool:
        """Whether all work is done."""
        return True


class CudaLane(Lane):
    """A stream on a CUDA device: its own, or the ``default`` one.

    Libraries that do not ask torch for its stream launch on the default one, or on one that is ordered with it, as
    Warp's are. Streams of torch are not ordered with it.
    """

    def __init__(self, device: torch.device, *, default: bool = False) -> None:
        """Create the stream."""
        self._device = device
        self._stream: torch.cuda.Stream
        if default:
            self._stream = torch.cuda.default_stream(device)
        else:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        """See Lane."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._done = self._stream.record_event()

    def give(self, tensors: Iterable[Tensor]) -> None:
        """See Lane. The memory is used again only when the caller's stream is through with it."""
        caller = torch.cuda.current_stream(self._device)
        if self._done is not None:
            caller.wait_event(self._done)
        for tensor in tensors:
            tensor.record_stream(caller)

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Lane. The copies are made on the caller's stream, so that it need not wait for a batch in flight."""
        given = {key: tensor.detach() for key, tensor in tensors.items()}
        move = mover(given, self._device, non_blocking=False)  # those on the CPU travel as one
        copies = {
            key: tensor.to(self._device, copy=True, non_blocking=True) if tensor.is_cuda else move(tensor)
            for key, tensor in given.items()
        }
        self.keep(copies.values())
        return copies

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """See Lane."""
        for tensor in tensors:
            tensor.record_stream(self._stream)

    def ready(self) -> bool:
        """See Lane."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]


class Later:
    """A small tensor on a device, for the host to read when the device is through with it: nothing waits."""

    def __init__(self, tensor: Tensor) -> None:
        """Queue the copy."""
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


def lane_of(device: torch.device, *, default: bool = False) -> Lane:
    """Return a new lane on a device; see `CudaLane`."""
    return CudaLane(device, default=default) if device.type == "cuda" else Lane()


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the CPU to a device; on CUDA through pinned memory, so that the host waits for nothing."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # Where a second kind of accelerator is registered, as in our own tests, torch cannot pin; small copies of
        # ordinary memory are staged by the driver and do not wait either.
        with contextlib.suppress(RuntimeError):
            tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
