"""Unnamed memory that processes share.

A block is an anonymous file. The parent creates it before a worker starts, the worker inherits its descriptor, and the
first process to know its size extends it. Since it has no name, it vanishes with the last process that holds it, even
if that process is killed.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.workers.system import open_memory
from rlstruct.core import Layout

_ALIGNMENT = 64  # bytes; each tensor starts at a new cache line


class SharedBlock:
    """Unnamed shared memory with the CPU tensors of its ``layout``."""

    def __init__(self, fd: int | None = None) -> None:
        """Create an empty block, or open the one with the inherited file descriptor ``fd``."""
        self._fd = open_memory() if fd is None else fd
        self._close = weakref.finalize(self, os.close, self._fd)
        self.layout, self._tensors = Layout(), dict[str, Tensor]()

    def map(self, layout: Layout) -> dict[str, Tensor]:
        """Return the tensors of a layout, on the CPU. Processes that map the same layout see the same bytes.

        The order of names matters. A new block holds zeros. The tensors keep the memory alive.
        """
        if layout == self.layout:
            return self._tensors
        size = sum(_padded(shape, dtype) for shape, dtype in layout.values())
        if os.fstat(self._fd).st_size < size:
            os.ftruncate(self._fd, size)
        memory = mmap.mmap(self._fd, size) if size else None
        self.layout, self._tensors = layout, {}
        offset = 0
        for name, (shape, dtype) in layout.items():
            count = math.prod(shape)
            if count:
                self._tensors[name] = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
            else:
                self._tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            offset += _padded(shape, dtype)
        return self._tensors

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the block for a process that is being spawned, which inherits the descriptor."""
        return _open_inherited, (reduction.DupFd(self._fd),)

    def close(self) -> None:
        """Close the descriptor. Mapped tensors stay valid. Calling it again does nothing."""
        self._close()
        self.layout, self._tensors = Layout(), {}


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _open_inherited(inherited: Any) -> SharedBlock:  # noqa: ANN401 - multiprocessing's DupFd has no public type
    return SharedBlock(inherited.detach())
