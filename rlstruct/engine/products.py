"""Products of matrices in compiled code on the CPU: as loops, as transposes, or by oneDNN, where MKL is slower."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlstruct.engine import torch_private

FEW_COLUMNS = 24
"""Most columns of a product that is computed as its transpose: for a few, MKL takes up to seven times as long."""
MAX_ROWS, MAX_PRODUCTS = 8, 1 << 15
"""Largest linear layer that is fused as a loop. Calling the matrix library would take longer than its arithmetic."""
MIN_ONEDNN, MAX_APART = 1 << 20, 4
"""Fewest multiplications of a product for oneDNN, a call of which costs 10 us more; and the largest batch of these."""
_aten: Any = torch.ops.aten


def _linear(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> object:
    """Decompose a small linear layer on the CPU into products and sums, which Inductor fuses with other operations."""
    if (beta, alpha) != (1, 1):
        return NotImplemented
    rows, small = x.shape[0], x.shape[0] * weight.numel() <= MAX_PRODUCTS
    if not _is_float32_on_cpu(x) or rows > MAX_ROWS or not small:
        return _plus(bias, _product(x, weight))
    return (x.unsqueeze(1) * weight.t()).sum(-1) + bias


def _product(x: Tensor, weight: Tensor) -> Any:  # noqa: ANN401 - a tensor, or NotImplemented
    """Leave a large product to oneDNN, where that is faster; turn one with few columns."""
    if _has_few_columns(x, weight):
        return torch.mm(weight.t(), x.t()).t()
    large = _is_for_onednn(x, x.shape[0] * weight.numel())
    return torch.ops.rlstruct.product(x, weight) if large else NotImplemented


def _batch_product(x: Tensor, weight: Tensor) -> Any:  # noqa: ANN401
    """Do the same for a few products at once, as of twin critics."""
    if _has_few_columns(x, weight):
        return torch.bmm(weight.mT, x.mT).mT
    n, rows, _ = x.shape
    if n > MAX_APART or not _is_for_onednn(x, rows * weight[0].numel()):
        return NotImplemented
    return torch.stack([torch.ops.rlstruct.product(*pair) for pair in zip(x.unbind(), weight.unbind(), strict=True)])


def _batch_linear(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> object:
    return _plus(bias, _batch_product(x, weight)) if (beta, alpha) == (1, 1) else NotImplemented


def _plus(bias: Tensor, product: Any) -> object:  # noqa: ANN401
    return product if product is NotImplemented else product + bias


def _has_few_columns(x: Tensor, weight: Tensor) -> bool:
    return 1 < weight.shape[-1] <= FEW_COLUMNS < x.shape[-2] and _is_float32_on_cpu(x)


def _is_for_onednn(x: Tensor, n_multiplications: int) -> bool:
    return n_multiplications >= MIN_ONEDNN and _is_float32_on_cpu(x) and torch_private.onednn_is_faster()


def _is_float32_on_cpu(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.device.type == "cpu"


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    _aten.mm.default: _product, _aten.addmm.default: _linear,
    _aten.bmm.default: _batch_product, _aten.baddbmm.default: _batch_linear,
}  # fmt: skip
# An operator of our own, because Inductor would fuse oneDNN's with others, and expects constant weights there.
_library: Any = torch.library
if not hasattr(torch.ops.rlstruct, "product"):  # a notebook that reloads this module has it already
    _operators = _library.Library("rlstruct", "FRAGMENT")
    # Without this tag, Inductor copies arguments whose layout it has chosen itself.
    _layout = getattr(torch.Tag, "flexible_layout", torch.Tag.pt2_compliant_tag)
    _operators.define("product(Tensor x, Tensor weight) -> Tensor", tags=(_layout,))
    _operators.impl("product", torch_private.onednn_product, "CPU")
    _operators.impl("product", lambda x, weight: x.new_empty((x.shape[0], weight.shape[1])), "Meta")
ONEDNN: Any = torch.ops.rlstruct.product.default
