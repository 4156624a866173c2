"""Error of the conformance kits, and comparisons that name what differs.

The kits are tools outside of any step: they freely copy to the CPU and read values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.core import DictTensor, Layout
from rlstruct.core.layout import Named, mismatch
from rlstruct.errors import Explained
from rlstruct.spaces import ROUNDING, Leaf


@renamed.members
class ConformanceError(Explained, AssertionError):
    """Error: a class breaks its contract.

    Attributes:
        where: the call that shows it, such as ``"MyEnv.step (call 3)"``.
        key: name of the wrong tensor, None if something else is wrong.
        got: the found value.
        expected: the value that the contract demands.
        fix: the remedy.
    """

    where: str = ""
    key: str | None = None
    got: str = ""
    expected: str = ""
    fix: str = ""


def fail(
    where: str, key: str | None, got: object, expected: object, fix: str, cause: Exception | None = None
) -> NoReturn:
    """Raise a ConformanceError with these parts."""
    named = "" if key is None else f" tensor {key!r}:"
    error = ConformanceError(f"{where}:{named} got {got}, expected {expected}. {fix}")
    error.where, error.key, error.got, error.expected, error.fix = where, key, str(got), str(expected), fix
    raise error from cause


def holds(mask: Tensor) -> bool:
    """Return True if a mask is True everywhere, on any device."""
    return bool(mask.all())  # sync: the kit reads values, several times a step


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a private copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def equal_rows(got: Tensor, expected: Tensor, tolerance: float = 0.0) -> Tensor:
    """Return which rows of values [B, ...] agree, [B] bool; NaN equals NaN.

    Floating-point numbers may differ by ``tolerance * (1 + abs(expected))``; integers must be equal.
    """
    allowed = tolerance if got.is_floating_point() or got.is_complex() else 0.0
    return _rows(torch.isclose(got, expected, rtol=allowed, atol=allowed, equal_nan=True))


def _rows(holds: Tensor) -> Tensor:
    """Return which rows of a mask [B, ...] are True everywhere.  [B]."""
    return holds.flatten(1).all(dim=1) if holds.dim() > 1 else holds


def check_same(
    where: str, got: DictTensor, expected: DictTensor, fixes: str | Mapping[str, str], *, tolerance: float = 0.0
) -> None:
    """Compare two structures on the CPU key by key and row by row, with `equal_rows`.

    ``fixes`` is one remedy, or remedies by the part of the key before the first ``/``; ``""`` holds the default.
    """
    check_layout(where, got, Layout.of(expected), fixes)
    for key in expected.keys():
        rows = equal_rows(got[key], expected[key], tolerance)
        if not holds(rows):
            b = first_false(rows)
            fail(f"{where}, row {b}", key, short(got[key][b]), short(expected[key][b]), _fix_of(key, fixes))


def check_layout(
    where: str, tensors: Named, layout: Layout | None, fixes: str | Mapping[str, str], rows: int | None = None
) -> None:
    """Compare keys, shapes and dtypes as `rlstruct.core.expect` does; for ``fixes`` see `check_same`."""
    difference = mismatch(tensors, layout, rows=rows)
    if difference is not None:
        fail(
            where,
            difference.key,
            difference.got,
            difference.expected,
            f"{difference.hint} {_fix_of(difference.key, fixes)}".lstrip(),
        )


def _fix_of(key: str, fixes: str | Mapping[str, str]) -> str:
    return fixes if isinstance(fixes, str) else fixes.get(key.partition("/")[0], fixes[""])


def check_present(where: str, tensors: DictTensor, layout: Layout, fix: str, rows: int) -> None:
    """Check that the keys of a layout are among the tensors, in its shapes and dtypes."""
    check_layout(where, {key: tensors[key] for key in layout if key in tensors}, layout, fix, rows)


def layout_of(leaves: Mapping[str, Leaf]) -> Layout:
    """Return shape and dtype of the plain spaces inside a space."""
    return Layout({key: (leaf.shape, leaf.torch_dtype) for key, leaf in leaves.items()})


def check_bounds(where: str, key: str, tensor: Tensor, leaf: Leaf, fix: str) -> None:
    """Check that a CPU tensor [n, ...] lies within the bounds of a plain space, up to rounding."""
    low, high = (torch.from_numpy(np.array(bound)) for bound in leaf.bounds())
    if tensor.is_floating_point():
        values, low, high = tensor.double(), low.double(), high.double()
        low, high = low - ROUNDING * (1 + low.abs()), high + ROUNDING * (1 + high.abs())
        low, high = low.nan_to_num(-torch.inf, neginf=-torch.inf), high.nan_to_num(torch.inf, posinf=torch.inf)
        inside = (values >= low) & (values <= high)  # False for NaN
    else:  # numpy compares integers that torch cannot, such as uint16
        array = tensor.numpy()  # sync: a view of CPU memory
        inside = torch.from_numpy((array >= low.numpy()) & (array <= high.numpy()))  # sync: likewise
    if not holds(inside):
        where, got = f"{where}, row {first_false(_rows(inside))}", short(tensor[~inside][:3])
        fail(where, key, got, f"values inside {leaf.space}", fix)


def first_false(rows: Tensor) -> int:
    """Return the index of the first False in a mask [B] that has one."""
    return int((~rows).to(torch.int8).argmax())  # sync: once, for an error message


def short(tensor: Tensor) -> str:
    """Format the first values of a tensor."""
    values: list[Any] = tensor.flatten()[:6].tolist()  # sync: once, for an error message
    shown = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
    if tensor.dim() == 0:
        return shown
    return f"[{shown}{', …' if tensor.numel() > 6 else ''}]"
