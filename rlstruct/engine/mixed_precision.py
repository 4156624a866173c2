"""Matrix products of a learner in bfloat16, with everything else in float32.

bfloat16 has the range of float32 with 8 bits of precision (Kalamkar et al., "A study of BFLOAT16 for deep learning
training", 2019). Processors with instructions for it multiply several times as fast.
"""

# ruff: noqa: ANN401  (torch passes whatever a function takes and returns)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from rlstruct.engine import torch_private

_OF_MATRICES: Final[frozenset[Callable[..., Any]]] = frozenset(
    {
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm),
    }
)
PRODUCTS: Final[frozenset[Callable[..., Any]]] = _OF_MATRICES | {
    *(F.linear, torch.einsum, F.scaled_dot_product_attention),
    *(F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
}
"""Functions whose float32 arguments are rounded to bfloat16, and so are their results."""
FEW_OUTPUTS: Final = 32
"""Most outputs of a layer that stays float32: values and logits, which 8 bits would make coarser than a reward."""


class Bfloat16Products(TorchFunctionMode):
    """Compute products in bfloat16 in a with block, and their gradients; their results are float32 again.

    A tensor that several products read is rounded once. Use each instance once.
    """

    def __init__(self) -> None:
        super().__init__()
        # By identity, version, and whether gradients are recorded; keeps the tensors, and so their identities.
        self._rounded: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        writes = kwargs.get("out") is not None  # into a tensor that keeps its dtype
        if func not in PRODUCTS or writes or _has_few_outputs(func, [*args, *kwargs.values()]):
            return func(*args, **kwargs)
        result = func(*map(self._round, args), **{name: self._round(value) for name, value in kwargs.items()})
        return result.to(torch.float32) if result.dtype is torch.bfloat16 else result

    def _round(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(self._round, value))
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        place = id(value), torch_private.version_of(value), torch.is_grad_enabled()
        if place not in self._rounded:
            self._rounded[place] = value, value.to(torch.bfloat16)
        return self._rounded[place][1]


def _has_few_outputs(func: Callable[..., Any], values: list[Any]) -> bool:
    """Return True for a product with a weight of few outputs; ``values`` are its arguments, in any form."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if func is F.linear:  # input, and weight or bias, which both begin with the outputs
        return tensors[1].shape[0] <= FEW_OUTPUTS
    return func in _OF_MATRICES and tensors[-1].shape[-1] <= FEW_OUTPUTS


def why_not_bfloat16(device: torch.device) -> str:
    """Return the reason why a device does not compute in bfloat16; empty if it does."""
    if device.type == "cpu":
        if why_not := torch_private.why_missing("bfloat16"):
            return why_not
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "" if fast else "this processor has neither AVX512-BF16 nor AMX"
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return "" if fast else f"{torch.cuda.get_device_name(device)} is older than Ampere"
    return "" if device.type == "sim" else f"there is no such arithmetic for {device.type}"
