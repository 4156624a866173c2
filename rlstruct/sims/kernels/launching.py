"""Recorded launches on torch's memory and streams, without a word on the terminal. Part of rlstruct.sims.kernels."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import torch
import warp as wp
from torch import Tensor

_logger = logging.getLogger(__name__)

BLOCK = 64
"""Threads in a block: few, so that 4,096 environments already reach half of the multiprocessors of a large GPU."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep Warp from printing what it compiles; errors are shown."""
    level = wp.config.log_level
    wp.config.log_level = wp.LOG_ERROR
    try:
        yield
    finally:
        wp.config.log_level = level


def record(kernel: Any, n: int, inputs: list[Any], device: torch.device) -> Any:
    """Load a kernel, compiling it if the cache has none, and record its launch for n threads.

    Args:
        kernel: of Warp.
        n: threads.
        inputs: its arguments.
        device: CPU or CUDA.

    Returns:
        The launch; its ``params`` are the bounds and then the inputs, as ctypes.
    """
    began = time.perf_counter()
    with quietly():
        launch = wp.launch(kernel, n, inputs, device=wp.device_from_torch(device), record_cmd=True, block_dim=BLOCK)
    _logger.info("kernel %s on %s: ready after %.1f s", kernel.key, device, time.perf_counter() - began)
    return launch


def point(struct: Any, tensors: dict[str, Tensor]) -> None:
    """Let arrays of a recorded launch be these tensors, of the shapes and strides that were recorded.

    Wrapping them with ``wp.from_torch`` again takes ten times as long, and a step sets a dozen of them.
    """
    for name, value in tensors.items():
        getattr(struct, name).data = value.data_ptr()


class Streams:
    """Torch's current stream as Warp's, wrapped once each.

    Args:
        device: CPU or CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        """Wrap none yet."""
        self._device = device
        self._wrapped: dict[int, Any] = {}

    def now(self) -> Any:
        """Return the current one; None on the CPU."""
        if self._device.type == "cpu":
            return None
        stream = torch.cuda.current_stream(self._device)
        if stream.cuda_stream not in self._wrapped:
            self._wrapped[stream.cuda_stream] = wp.stream_from_torch(stream)
        return self._wrapped[stream.cuda_stream]
