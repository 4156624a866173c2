"""Error of the conformance kits, and comparisons that name what differs.

The kits are tools outside of any step: they freely copy to the CPU and read values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout
from rlstruct.core.layout import Named, mismatch
from rlstruct.errors import Explained
from rlstruct.spaces import Leaf

# Frames are often float32 and bounds float64, so rounding may exceed a bound.
_ROUNDING = 1e-5


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

    mend = property(lambda self: self.fix, doc="Alias of ``fix``, its name in 0.2.")


def build_error(where: str, key: str | None, got: object, expected: object, fix: str) -> ConformanceError:
    """Build a ConformanceError from its parts."""
    named = "" if key is None else f" tensor {key!r}:"
    error = ConformanceError(f"{where}:{named} got {got}, expected {expected}. {fix}")
    error.where, error.key, error.got, error.expected, error.fix = where, key, str(got), str(expected), fix
    return error


def fail(where: str, key: str | None, got: object, expected: object, fix: str) -> NoReturn:
    """Raise a ConformanceError with these parts."""
    raise build_error(where, key, got, expected, fix)


def holds(mask: Tensor) -> bool:
    """Return True if a mask is True everywhere, on any device."""
    return bool(mask.all())  # sync: the kit reads values, several times a step


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a private copy on the CPU."""
    return tensor.detach().to("cpu", copy=True)


def same(got: Tensor, expected: Tensor, tolerance: float = 0.0) -> Tensor:
    """Return which rows of values [B, ...] agree, [B] bool; NaN equals NaN.

    Floating-point numbers may differ by ``tolerance * (1 + abs(expected))``; integers must be equal.
    """
    equal = got == expected
    if got.is_floating_point() or got.is_complex():
        close = (got - expected).abs() <= tolerance * (1 + expected.abs())
        equal = equal | close | (got.isnan() & expected.isnan())
    return equal.flatten(1).all(dim=1) if equal.dim() > 1 else equal  # [B]


def check_same(
    where: str, got: DictTensor, expected: DictTensor, fixes: str | Mapping[str, str], *, tolerance: float = 0.0
) -> None:
    """Compare two structures on the CPU key by key and row by row, with `same`.

    ``fixes`` is one remedy, or remedies by the part of the key before the first ``/``; ``""`` holds the default.
    """
    check_layout(where, got, Layout.of(expected), fixes)
    for key in expected.keys():
        rows = same(got[key], expected[key], tolerance)
        if not holds(rows):
            b = first_false(rows)
            fail(f"{where}, row {b}", key, short(got[key][b]), short(expected[key][b]), _fix_of(key, fixes))


def check_keys(where: str, got: set[str], expected: set[str], fix: str) -> None:
    """Compare two sets of keys."""
    for key in sorted(expected - got):
        fail(where, key, f"no such key among {sorted(got)}", "it to be there", fix)
    for key in sorted(got - expected):
        fail(where, key, "this key", f"only {sorted(expected)}", fix)


def check_layout(
    where: str, tensors: Named, layout: Layout | None, fixes: str | Mapping[str, str], rows: int | None = None
) -> None:
    """Compare keys, shapes and dtypes as `rlstruct.core.expect` does; for ``fixes`` see `check_same`."""
    found = mismatch(tensors, layout, rows=rows)
    if found is not None:
        fail(where, found.key, found.got, found.expected, f"{found.hint} {_fix_of(found.key, fixes)}".lstrip())


def _fix_of(key: str, fixes: str | Mapping[str, str]) -> str:
    return fixes if isinstance(fixes, str) else fixes.get(key.partition("/")[0], fixes[""])


def check_in_space(where: str, key: str, tensor: Tensor, leaf: Leaf, n_rows: int, *, values: bool = True) -> None:
    """Compare the shape, dtype and (optionally) values of a CPU tensor [n_rows, ...] with a plain space."""
    fix = f"Return it in the shape and dtype of {leaf.space}, one row for each environment, or correct the space."
    check_layout(where, {key: tensor}, Layout({key: (leaf.shape, leaf.torch_dtype)}), fix, n_rows)
    if not values:
        return
    beyond = _outside(leaf, tensor)
    if not holds(~beyond):
        rows = ~beyond.flatten(1).any(dim=1) if beyond.dim() > 1 else ~beyond
        fix = "Keep the values inside the space, or widen the space."
        fail(f"{where}, row {first_false(rows)}", key, short(tensor[beyond][:3]), f"values inside {leaf.space}", fix)


def _outside(leaf: Leaf, rows: Tensor) -> Tensor:
    """Return where CPU values [n, ...] are NaN, or exceed the space's bounds by more than rounding."""
    low, high = (torch.from_numpy(np.array(bound)) for bound in leaf.bounds())
    values = rows
    if rows.is_floating_point():
        values, low, high = rows.double(), low.double(), high.double()
        low, high = low - _ROUNDING * (1 + low.abs()), high + _ROUNDING * (1 + high.abs())
        low, high = low.nan_to_num(-torch.inf, neginf=-torch.inf), high.nan_to_num(torch.inf, posinf=torch.inf)
    return ~((values >= low) & (values <= high))


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
