"""Automatic mixed precision on the simulated accelerator: the casts that ``torch.autocast("cuda")`` makes.

The lists are those of torch's page "Automatic Mixed Precision", under "CUDA Ops". As on CUDA, only floating-point
tensors of the device are cast, and none of double precision.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from rlstruct.engine.torch_private import schema_of

LOWER: Final = (
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu "
    "addmm addmv addr matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul linalg_multi_dot linalg_vecdot "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell lstm gru rnn_tanh "
    "rnn_relu scaled_dot_product_attention"
)
"""Operators that compute in the low precision."""
SINGLE: Final = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod softmax log_softmax cumprod cumsum sum"
)
"""Operators that compute in single precision."""
WIDEST: Final = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add cat stack"
"""Operators that compute in the widest precision among their arguments."""


def autocast_kernels() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield each operator that autocast treats, with its replacement while autocast is on."""
    groups = (
        (LOWER, lambda tensors: torch.get_autocast_dtype("sim")),
        (SINGLE, lambda tensors: torch.float32),
        (WIDEST, _widest),
    )
    for names, wanted in groups:
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                func = getattr(packet, overload)
                if not schema_of(func).is_mutable:
                    yield func, _kernel(func, wanted)


def _kernel(func: Any, wanted: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = wanted([leaf for leaf in tree_leaves((args, kwargs)) if _is_cast(leaf)])
        args, kwargs = tree_map(lambda leaf: leaf.to(dtype) if _is_cast(leaf) else leaf, (args, kwargs))
        with torch.autocast("sim", enabled=False):
            return func(*args, **kwargs)

    return kernel


def _is_cast(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "sim"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _widest(tensors: list[Tensor]) -> torch.dtype:
    wide = any(tensor.dtype is torch.float32 for tensor in tensors)
    return torch.float32 if wide or not tensors else torch.get_autocast_dtype("sim")
