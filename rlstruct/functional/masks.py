"""Choosing rows by a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import BadKeyError, DeviceMismatchError, ShapeMismatchError


def masked_tensor(tensor0: Tensor, tensor1: Tensor, mask: Tensor) -> Tensor:
    """Take each row from one of two tensors.

    Nothing is computed with the values: an ``inf`` or ``nan`` in the row that is not chosen has no effect, and
    integers keep all their bits.

    Args:
        tensor0: rows where the mask is False or 0.  [B, ...], any dtype
        tensor1: rows where the mask is True or not 0.  [B, ...], shape, dtype and device of tensor0
        mask: which to take.  [B] bool, integer or float, same device

    Returns:
        ``tensor1[b] if mask[b] else tensor0[b]``, in new memory.  [B, ...], dtype of both

    Raises:
        ShapeMismatchError: shapes or dtypes of the tensors differ, or the mask is not [B].
        DeviceMismatchError: tensors and mask are not on one device.

    >>> masked_tensor(torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([True, False]))
    tensor([[1., 1.],
            [0., 0.]])
    """
    _check("masked_tensor", tensor0, tensor1, mask)
    return _where(tensor0, tensor1, _as_bool(mask))


def masked_dicttensor(dicttensor0: DictTensor, dicttensor1: DictTensor, mask: Tensor) -> DictTensor:
    """Take each row from one of two structures.

    Args:
        dicttensor0: rows where the mask is False or 0.  [B]
        dicttensor1: rows where the mask is True or not 0.  [B], same keys, shapes, dtypes and device
        mask: which to take.  [B] bool, integer or float, same device

    Returns:
        The chosen rows, keys in the order of ``dicttensor0``; empty if both are.  [B]

    Raises:
        KeyError: the keys differ.
        ShapeMismatchError: shapes or dtypes differ for some key, or the mask is not [B].
        DeviceMismatchError: structures and mask are not on one device.
    """
    if dicttensor0.keys() != dicttensor1.keys():
        raise BadKeyError(
            f"masked_dicttensor: dicttensor1 has the keys {list(dicttensor1.keys())}, "
            f"expected {list(dicttensor0.keys())} as dicttensor0. Select common ones with get."
        )
    chosen: dict[str, Tensor] = {}
    take1 = _as_bool(mask)
    for key, tensor0 in dicttensor0.items():
        tensor1 = dicttensor1[key]
        _check(f"masked_dicttensor: key {key!r}", tensor0, tensor1, mask)
        chosen[key] = _where(tensor0, tensor1, take1)
    return DictTensor.unchecked(chosen)


def rows_of(mask: Tensor, like: Tensor) -> Tensor:
    """View a mask [B] so that it selects rows of ``like`` [B, ...]."""
    return mask if like.dim() == 1 else mask.view(-1, *[1] * (like.dim() - 1))


def _as_bool(mask: Tensor) -> Tensor:
    return mask if mask.dtype is torch.bool else mask != 0


def _where(tensor0: Tensor, tensor1: Tensor, take1: Tensor) -> Tensor:
    return torch.where(rows_of(take1, tensor0), tensor1, tensor0)


def _check(where: str, tensor0: Tensor, tensor1: Tensor, mask: Tensor) -> None:
    if tensor0.dim() == 0 or tensor1.shape != tensor0.shape:
        raise ShapeMismatchError(
            f"{where}: tensor1 has shape {list(tensor1.shape)} and tensor0 {list(tensor0.shape)}, "
            "expected the same shape [B, ...]. Expand the smaller one first."
        )
    if tensor1.dtype is not tensor0.dtype:
        raise ShapeMismatchError(
            f"{where}: tensor1 is {tensor1.dtype}, expected {tensor0.dtype} as tensor0. Convert one with .to(dtype)."
        )
    if mask.shape != tensor0.shape[:1]:
        raise ShapeMismatchError(
            f"{where}: the mask has shape {list(mask.shape)}, expected [{tensor0.shape[0]}] (B of the tensors). "
            "Give one value for each row."
        )
    for name, other in (("tensor1", tensor1), ("the mask", mask)):
        if other.device != tensor0.device:
            raise DeviceMismatchError(
                f"{where}: {name} is on {other.device}, expected {tensor0.device} (the device of tensor0). "
                f"Move it with .to({str(tensor0.device)!r})."
            )
