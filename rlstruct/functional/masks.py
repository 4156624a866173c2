"""Functions that choose rows by a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout, expect
from rlstruct.core.layout import as_signed
from rlstruct.errors import ShapeMismatchError

_FIX = "Nothing is expanded, converted or moved for you."


def masked_tensor(tensor0: Tensor, tensor1: Tensor, mask: Tensor) -> Tensor:
    """Take each row from one of two tensors.

    Values are only copied, so an ``inf`` or ``nan`` in the other row has no effect, and integers keep all their bits.

    Args:
        tensor0: rows where the mask is False or 0.  [B, ...], any dtype
        tensor1: rows where the mask is True or not 0.  [B, ...], shape, dtype and device of tensor0
        mask: chooses the rows.  [B] bool, integer or float, same device

    Returns:
        ``tensor1[b] if mask[b] else tensor0[b]``, in new memory.  [B, ...], dtype of both

    >>> masked_tensor(torch.zeros(2, 2), torch.ones(2, 2), torch.tensor([True, False]))
    tensor([[1., 1.],
            [0., 0.]])
    """
    if tensor0.dim() == 0:
        raise ShapeMismatchError("masked_tensor: 'tensor0' is [], expected [B, ...]. Give it a row for each mask.")
    layout = Layout({"tensor1": (tensor0.shape, tensor0.dtype), "mask": (tensor0.shape[:1], mask.dtype)})
    expect("masked_tensor:", {"tensor1": tensor1, "mask": mask}, layout, device=tensor0.device, fix=_FIX)
    return torch.where(rows_of(mask.bool(), tensor0), tensor1, tensor0)


def masked_dicttensor(dicttensor0: DictTensor, dicttensor1: DictTensor, mask: Tensor) -> DictTensor:
    """Take each row from one of two structures.

    Args:
        dicttensor0: rows where the mask is False or 0.  [B]
        dicttensor1: rows where the mask is True or not 0.  [B], same keys, shapes, dtypes and device
        mask: chooses the rows.  [B] bool, integer or float, same device

    Returns:
        The chosen rows, keys in the order of ``dicttensor0``; empty if both are.  [B]
    """
    device = dicttensor0.device
    expect("masked_dicttensor: dicttensor1", dicttensor1, Layout.of(dicttensor0), device=device, fix=_FIX)
    chosen = {key: masked_tensor(value, dicttensor1[key], mask) for key, value in dicttensor0.items()}
    return DictTensor.unchecked(chosen)


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Set the logits of actions that are not allowed to -inf, so that they are never drawn and never the best.

    Args:
        logits: of one choice among A actions, or of K choices.  [B, A] or [B, K, A] float
        allowed: not 0 where an action is allowed; at least one in each row.  same shape and device, bool or numbers

    Returns:
        The masked logits, in new memory, with gradients for the allowed ones.

    Raises:
        ShapeMismatchError: the shapes differ.

    >>> mask_logits(torch.zeros(1, 2), torch.tensor([[True, False]]))
    tensor([[0., -inf]])
    """
    if allowed.shape != logits.shape:
        raise ShapeMismatchError(
            f"mask_logits: allowed is {list(allowed.shape)}, expected {list(logits.shape)} as the logits. Show one "
            "number for each action of each choice."
        )
    return logits.masked_fill(allowed == 0, -torch.inf)


def zero_rows(values: Tensor, mask: Tensor) -> Tensor:
    """Return a copy of values [B, ...] of any dtype, with zeros in the rows where the mask [B] bool is True."""
    filled = as_signed(values).masked_fill(rows_of(mask, values), 0)
    return filled if filled.dtype == values.dtype else filled.view(values.dtype)


def write_rows(values: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """Return a copy of values [B, ...] of any dtype, with ``new`` [K, ...] in the rows of these numbers [K] int64."""
    return as_signed(values).index_copy(0, rows, as_signed(new)).view(values.dtype)


def rows_of(mask: Tensor, like: Tensor) -> Tensor:
    """View a mask [B] so that it selects rows of ``like`` [B, ...].

    The shapes are not compared: callers are inner loops whose masks and rows come from one place.
    """
    return mask if like.dim() == 1 else mask.view(-1, *[1] * (like.dim() - 1))
