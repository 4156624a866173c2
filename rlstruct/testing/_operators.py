"""Facts about torch's operators that more than one module of the testing kit needs. Layer 3: torch alone."""

# ruff: noqa: ANN401  (torch's operators have no public type)

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def is_composite(func: Any) -> bool:
    """Tell whether torch defines an operator by other operators, for every device.

    Autograd takes such operators apart before any ``__torch_dispatch__`` sees them. In inference mode there is no
    autograd, so whoever wants to see the parts must call ``func.decompose`` itself.
    """
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))
