"""Sums over the learners of one machine, through memory that all of them see.

gloo takes some milliseconds for a sum, however small. Here each learner writes its numbers into its own row, waits
until all have done so, and adds the rows up, all in the same order, so that all of them find the same bits.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlstruct.batchers.shared_memory import SharedBlock
from rlstruct.errors import LearnerError

_LINE = 8  # numbers of 8 bytes: a cache line for each learner
_EAGER_SECONDS = 5e-4  # a learner that waits longer sleeps
_NAP_SECONDS = 1e-3  # at most
_NAP_SHARE = 1 / 16  # of what it has waited so far: it comes late by little, as the others would wait for it in turn
_LOOK_SECONDS = 0.5

ORDERED = sys.platform == "linux" and platform.machine() == "x86_64"
"""Whether other processes see what one writes in the order in which it does, and can open its memory."""


class SharedSum:
    """Adds up tensors of the learners of one machine.

    Two sets of rows take turns: whoever has arrived at a sum has read those of the one before.

    Args:
        rank: of this learner among them.
        size: how many they are.
        block: the same memory in all of them.
        look_after: called every half a second while another one has not arrived, with the seconds that this one has
            waited; raises if it never will.
        rows_on_gpu: returns rows [2, size, n_bytes] uint8 that all see on the GPU, where they share one.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        block: SharedBlock,
        look_after: Callable[[float], None],
        rows_on_gpu: Callable[[int], Tensor],
    ) -> None:
        """Map what they tell each other: how often each has arrived, and with how many bytes."""
        self._rank, self._size, self._block, self._look_after = rank, size, block, look_after
        self._layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"arrived": ((size * _LINE,), torch.int64)}
        self._arrived = block.map(self._layout)["arrived"].numpy().data  # sync: of CPU memory, once
        self._create = {"cpu": self._rows_on_cpu, "cuda": rows_on_gpu}
        self._rows: dict[str, Tensor] = {}
        self._n_sums = 0

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of what all learners pass, on the CPU or the GPU that they share, in new memory.

        Raises:
            LearnerError: another one passes a tensor of another size, or ``look_after`` says so.
        """
        kind = x.device.type
        if kind not in self._rows or x.nbytes > self._rows[kind].shape[2]:
            self._meet(-x.nbytes)  # from here on no process reads the old ones
            self._rows[kind] = self._create[kind]((x.nbytes // 64 + 1) * 64)
        rows = self._rows[kind][self._n_sums % 2, :, : x.nbytes].view(x.dtype)  # [size, N]
        rows[self._rank] = x.detach().reshape(-1)
        _finish(x.device)
        self._meet(x.nbytes)
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        _finish(x.device)
        return total.view(x.shape)

    def _rows_on_cpu(self, n_bytes: int) -> Tensor:
        rows = (2, self._size, n_bytes), torch.uint8
        return self._block.map({**self._layout, "rows": rows})["rows"]

    def _meet(self, n_bytes: int) -> None:
        """Wait until all have arrived, and with as many bytes."""
        self._n_sums += 1
        at, own = self._n_sums % 2, _LINE * self._rank
        self._arrived[own + 1 + at] = n_bytes
        self._arrived[own] = self._n_sums  # last
        for other in range(0, _LINE * self._size, _LINE):
            if self._arrived[other] < self._n_sums:
                self._wait_for(other)
            if (found := self._arrived[other + 1 + at]) != n_bytes:
                raise LearnerError(
                    f"sum_over_learners: this learner adds up {abs(n_bytes)} bytes, another one {abs(found)}, expected "
                    "the same. Call it equally often, in the same order and with the same shapes in all learners."
                )

    def _wait_for(self, other: int) -> None:
        begin = looked = time.monotonic()
        while self._arrived[other] < self._n_sums:
            now = time.monotonic()
            if now - begin < _EAGER_SECONDS:
                os.sched_yield()
            else:
                time.sleep(min(_NAP_SHARE * (now - begin), _NAP_SECONDS))
            if now - looked > _LOOK_SECONDS:
                self._look_after(now - begin)
                looked = now


def _finish(device: torch.device) -> None:
    """Wait until the GPU has finished; other processes have their own streams."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
