"""Tolerances for comparing an executor with its step: rounding differences, and samples that they may change."""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from rlstruct.engine import torch_private

EXACT: Final = 2.0**-23
"""Machine epsilon of float32, the finest precision that is distinguished."""
_PRODUCTS: Final = {"tf32": 2.0**-10, "bf16": 2.0**-7}  # "ieee" and "none" are exact
# For torch before 2.9; "medium" depends on the device.
_BEFORE: Final = {"highest": "ieee", "high": "tf32", "medium": ""}

# Compiled code fuses operations and so rounds differently; wrong results differ by more.
_RELATIVE, _ABSOLUTE, _ULPS = 1e-3, 1e-4, 16
_FLIPPED, _FLIPPED_COARSE = 1e-3, 2e-2


class Precision(torch_private.OperatorObserver):  # type: ignore[no-untyped-call]  # torch gives its base no types
    """Recorder of the coarsest precision that a call computes with: ``with Precision() as found: answer = step()``."""

    def __init__(self) -> None:
        super().__init__()
        self._coarsest = EXACT
        self._convolves = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._convolves |= "conv" in name or "rnn" in name
        answer = func(*args, **(kwargs or {}))
        for tensor in answer if isinstance(answer, tuple | list) else (answer,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._coarsest = max(self._coarsest, torch.finfo(tensor.dtype).eps)
        return answer

    def eps(self, device: torch.device) -> float:
        """Return the coarsest machine epsilon, including torch's current settings for matrix products."""
        eps = max(self._coarsest, products(device))
        if self._convolves and device.type == "cuda":
            cudnn = torch.backends.cudnn
            setting = _setting(cudnn, "conv", lambda: "tf32" if cudnn.allow_tf32 else "ieee")
            eps = max(eps, _PRODUCTS.get(setting, EXACT))
        return eps


def products(device: torch.device) -> float:
    """Return the epsilon of float32 matrix products on a device: see `torch.set_float32_matmul_precision`."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    coarse = "tf32" if device.type == "cuda" else "bf16"
    setting = _setting(backend, "matmul", lambda: _BEFORE[torch.get_float32_matmul_precision()] or coarse)
    return _PRODUCTS.get(setting, EXACT)


def _setting(backend: Any, operation: str, before: Callable[[], str]) -> str:
    """Return the float32 precision setting of a backend's operation; ``before`` returns it for torch before 2.9."""
    setting = getattr(getattr(backend, operation, None), "fp32_precision", None)
    return before() if setting is None else str(setting)


def flip_fraction(eps: float) -> float:
    """Return the largest share of rows in which rounding may change a sample."""
    return _FLIPPED if eps <= EXACT else _FLIPPED_COARSE


def count_different(value: Tensor, other: Tensor, eps: float) -> Tensor:
    """Count the rows that differ by more than rounding, without waiting for the device.

    The error of a sum with cancellation scales with its terms, not with the sum, so the tolerance includes the typical
    size of the values.
    """
    same = value == other
    if value.is_floating_point():
        wide, actual = value.to(torch.float64), other.to(torch.float64)
        sizes = wide.abs()
        typical = torch.where(sizes.isfinite() & (sizes > 0), sizes, torch.nan).nanmedian().nan_to_num(1.0).clamp(min=1)
        relative, absolute = (max(bound, _ULPS * eps) for bound in (_RELATIVE, _ABSOLUTE))
        near = (wide - actual).abs() <= relative * sizes + absolute * typical
        same = same | near | (wide.isnan() & actual.isnan())
    return (~(same.flatten(1).all(dim=1) if same.dim() > 1 else same.view(-1))).sum()


def difference(
    expected: Mapping[tuple[object, ...], Tensor], actual: Mapping[tuple[object, ...], Tensor], eps: float = EXACT
) -> str:
    """Describe how an executor's results [B, ...] differ from those of the step; "" if only by rounding.

    Keys are paths, see `rlstruct.core.pytree.named_tensors`.
    """
    for path, value in expected.items():
        other, key = actual.get(path), path[-1]
        if other is None or other.shape != value.shape or other.dtype != value.dtype:
            got = "is missing" if other is None else f"is {list(other.shape)} {other.dtype}"
            return f"{key!r} {got} in the compiled result, expected {list(value.shape)} {value.dtype}"
        rows = value.shape[0] if value.dim() else 1
        n_different = int(count_different(value, other, eps))  # sync: once when the code is compiled
        if n_different > allowed(rows, eps):
            return f"{key!r} differs in {n_different} of {rows} rows when compiled"
    return ""


def allowed(rows: int, eps: float) -> int:
    """Return the number of rows of one result in which rounding may have changed a sample."""
    least = int(eps > EXACT and rows > 1)
    return max(least, int(rows * flip_fraction(eps)))
