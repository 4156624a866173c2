"""Memory of the C library, which every tensor on the CPU comes from."""

from __future__ import annotations

import functools

import torch

_LARGEST = (32 << 20) - 8192
"""Bytes of the largest block, but for the page with its header, that raises the limits of glibc."""


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep up to 64 MB of freed memory, instead of giving it back to the system and getting it anew.

    By default it gives back the top of its heap once that is twice as large as the largest block that was freed.
    Batches and minibatches of thousands of environments are such blocks: with 1,024 CartPoles, a third of an iteration
    of PPO went into page faults. The limit grows with the largest block that is freed, up to 32 MB, so one block is
    allocated, not touched, and freed. Variables such as ``MALLOC_TRIM_THRESHOLD_`` keep their effect, and other C
    libraries their rules.
    """
    torch.empty(_LARGEST, dtype=torch.uint8, device="cpu")
