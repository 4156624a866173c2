"""Transfers of many tensors between CPU memory and a CUDA device in one copy.

A batch has about 25 tensors in pageable memory, and CUDA would copy them one by one while the host waits. Instead they
are packed into one pinned block, which is copied while the host continues. Tensors that share memory are packed once,
and share memory on the device too. Tensors that will travel to the CPU are allocated in one block from the start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rlstruct.core.layout import Layout

_ALIGNMENT = 16  # bytes: the size of the largest dtype
_MOST_UNUSED = 2  # a storage at most this many times as large as its tensors is copied whole
_LARGEST = 1 << 30  # bytes: larger transfers are not worth the pinned memory


class Packed(NamedTuple):
    """Tensors packed into one block."""

    block: Tensor  # their bytes.  [n] uint8
    views: list[tuple[torch.dtype, torch.Size, tuple[int, ...], int]]  # the last entry is the storage offset

    def unpack(self, block: Tensor) -> list[Tensor]:
        """Return the tensors as views of a copy of the block, which may be on another device."""
        return [block.view(dtype).as_strided(shape, stride, first) for dtype, shape, stride, first in self.views]


def stage(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy CPU tensors to a CUDA device. The host does not wait, and the sources may change as soon as this returns.

    Returns:
        The copies, as views of one block, valid on the current stream.
    """
    if sum(tensor.nbytes for tensor in tensors) > _LARGEST:
        return [tensor.to(device) for tensor in tensors]
    packed = pack(tensors, pin=True)
    # torch keeps the pinned block until the copy is done, even if nothing refers to it.
    return packed.unpack(packed.block.to(device, non_blocking=True))


def mover(tree: object, device: torch.device, non_blocking: bool) -> Callable[[Tensor], Tensor]:
    """Return a function that moves each tensor of a pytree to a device; from the CPU to CUDA in a single copy."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=non_blocking)

    if device.type != "cuda" or torch.compiler.is_compiling():
        return move
    here = [tensor for tensor in tree_leaves(tree) if can_stage(tensor)]
    staged = dict(zip(map(id, here), stage(here, device), strict=True))
    return lambda tensor: move(tensor) if (moved := staged.get(id(tensor))) is None else moved


def can_stage(tensor: Tensor) -> bool:
    """Return True for pageable CPU tensors without gradients: pinned ones need no block, and it carries no gradient."""
    plain = type(tensor) is Tensor and tensor.is_cpu and tensor.layout is torch.strided
    return plain and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_pinned())


def pack(tensors: Sequence[Tensor], *, pin: bool) -> Packed:
    """Copy CPU tensors of any shapes and dtypes into one block of CPU memory, pinned or not."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()  # of two numpy arrays that begin at one address, each has its size
        groups.setdefault((storage.data_ptr(), storage.nbytes()), []).append(i)
    sources: list[tuple[Tensor, int]] = []  # bytes, and their offset in the block
    views = [(tensor.dtype, tensor.shape, tensor.stride(), 0) for tensor in tensors]
    n_bytes = 0
    for members in groups.values():
        n_used = sum(tensors[i].nbytes for i in members)
        whole_storage = tensors[members[0]].untyped_storage().nbytes() <= _MOST_UNUSED * n_used
        for run in [members] if whole_storage else [[i] for i in members]:
            # Copy the whole storage, which keeps strides and sharing, or only the tensor if most of it is unused.
            shown = [tensors[i] if whole_storage else tensors[i].clone() for i in run]
            source = torch.empty(0, dtype=torch.uint8, device="cpu").set_(shown[0].untyped_storage())
            for i, tensor in zip(run, shown, strict=True):
                first = n_bytes // tensor.element_size() + int(tensor.storage_offset())
                views[i] = (tensor.dtype, tensor.shape, tensor.stride(), first)
            sources.append((source, n_bytes))
            n_bytes += -(-len(source) // _ALIGNMENT) * _ALIGNMENT
    block = torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
    for source, start in sources:
        block[start : start + len(source)].copy_(source)
    return Packed(block, views)


def allocate_packed(layout: Layout, device: torch.device) -> Packed:
    """Allocate the uninitialised tensors of a layout in one block, which is copied to other memory at once."""
    views, n_bytes = [], 0
    for shape, dtype in layout.values():
        stride = torch.empty(shape, dtype=dtype, device="meta").stride()
        views.append((dtype, torch.Size(shape), stride, n_bytes // dtype.itemsize))
        n_bytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return Packed(torch.empty(n_bytes, dtype=torch.uint8, device=device), views)
