"""The one shared copy of the weights, as the parent of the workers sees it. Part of rlstruct.batchers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from torch import Tensor

from rlstruct.batchers.shared_memory import SharedBlock, layout_of, n_bytes
from rlstruct.batchers.worker_handle import Worker

_LOOK_AGAIN = 1e-4  # seconds


class SharedWeights:
    """Written here, read by each worker when it is told to; no worker ever reads what is half written."""

    def __init__(self) -> None:
        """Begin without weights."""
        self.block = SharedBlock()
        self._tensors: dict[str, Tensor] = {}
        self._version = 0
        self._edition = 0  # how often they were written; a version comes again when a checkpoint was loaded
        self._pending: tuple[dict[str, Tensor], int] | None = None

    def update(self, weights: Mapping[str, Tensor], version: int, workers: Sequence[Worker]) -> None:
        """Take in new weights. While any worker collects, or may be reading, they are kept aside until `publish`.

        Args:
            weights: name to tensor, on any device.
            version: their number.
            workers: all of them.
        """
        if any(worker.owed or _may_read(worker) for worker in workers):
            self._pending = ({key: tensor.detach().clone() for key, tensor in weights.items()}, version)
        else:
            self._pending = None
            self._write(weights, version)

    def publish(self, workers: Sequence[Worker], timeout: float) -> None:
        """Write the weights that were kept aside, as soon as no worker can be reading the ones before.

        Args:
            workers: all of them.
            timeout: seconds that they may take to read.

        Raises:
            WorkerTimeout: one of them does not get so far.
        """
        if self._pending is None:
            return
        deadline = time.monotonic() + timeout
        for worker in workers:
            while _may_read(worker):
                if time.monotonic() > deadline:
                    raise worker.timeout_error(timeout, [])
                time.sleep(_LOOK_AGAIN)
        self._write(*self._pending)
        self._pending = None

    def send(self, worker: Worker) -> None:
        """Tell a worker to read the weights, if it has others."""
        if worker.edition != self._edition:
            layout = layout_of(self._tensors)
            worker.order("weights", self._version, self._edition, None if layout == worker.weights_layout else layout)
            worker.edition, worker.weights_layout = self._edition, layout

    def n_bytes(self) -> int:
        """Return the size of the buffer."""
        return n_bytes(layout_of(self._tensors))

    def _write(self, weights: Mapping[str, Tensor], version: int) -> None:
        layout = layout_of(weights)
        if layout != layout_of(self._tensors):
            self._tensors = self.block.map(layout)
        for key, tensor in weights.items():
            self._tensors[key].copy_(tensor.detach())
        self._version = version
        self._edition += 1


def _may_read(worker: Worker) -> bool:
    """Whether a worker was told to read weights and has not said that it has."""
    return worker.status.edition != worker.edition and worker.process.is_alive()
