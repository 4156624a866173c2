"""The private names of torch that this library uses: all of them, and what happens where one is missing.

A private name may vanish with any release. Each executor lists here what it needs; the list is compared with the
installed torch when the engine is imported, and an executor that lacks a name is left out, with one warning.
"""

# ruff: noqa: ANN401  (torch hands over whatever an operator takes and returns)

from __future__ import annotations

import functools
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TESTED", "TorchDispatchMode", "check", "is_composite", "missing", "schema_of"]

TESTED: Final = "2.11 to 2.13"
"""The releases of torch that the tests ran with."""

_CUDA_ONLY: Final = frozenset({"graph"})  # builds of torch without CUDA have none of these names, and need none
NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "compiled": (
        "torch._ops:OpOverload",
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.decomposition:select_decomp_table",
        "torch._inductor.config:max_fusion_size",
        "torch._inductor.config:size_asserts",
        "torch._inductor.config:fallback_random",
        "torch.fx.experimental.proxy_tensor:make_fx",
    ),
    "graph": ("torch._C:_cuda_endAllocateToPool", "torch._C:_cuda_releasePool", "torch._C:_cuda_clearCublasWorkspaces"),
}
"""For each executor the names that it needs, as ``module:name``."""


def missing(executor: str) -> list[str]:
    """Return the private names that an executor needs and the installed torch lacks; empty if it can be used."""
    if executor in _CUDA_ONLY and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return []
    return [name for name in NEEDED[executor] if not _exists(*name.split(":"))]


def check() -> None:
    """Warn of executors that the installed torch cannot run; they are left out, and eager torch runs in their place."""
    for executor in NEEDED:
        if names := missing(executor):
            warnings.warn(
                f"rlstruct: torch {torch.__version__} has no {', '.join(names).replace(':', '.')}, so the executor "
                f"{executor!r} is left out and steps run as they are, slower. The tests ran with torch {TESTED}: "
                "install one of these.",
                stacklevel=2,
            )


@functools.cache
def is_composite(func: Any) -> bool:
    """Tell whether torch defines an operator by other operators, for every device.

    Autograd takes such operators apart before any ``__torch_dispatch__`` sees them. In inference mode, and wherever
    else one is below autograd, nobody has: whoever wants to see the parts must call ``func.decompose`` itself.
    """
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def has_hooks(module: torch.nn.Module) -> bool:
    """Tell whether anybody is called beside the ``forward`` of a module or of one within it."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return any(getattr(part, name) for part in module.modules() for name in names)


def schema_of(func: Any) -> Any:
    """Return the schema of an operator: its arguments, its returns, and which of them it writes to."""
    return func._schema


def clear_cublas_workspaces() -> None:
    """Let cuBLAS give its workspaces back, and make new ones when it needs them."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocating(device: int, pool: tuple[int, int]) -> None:
    """Tell torch's allocator that nothing is recorded into a pool any more, and that nobody needs it.

    Raises:
        RuntimeError: it knows already.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)


# What the simulated accelerator of rlstruct.testing is made of. It is a debugging aid, and fails as a whole at import.


def disabled_torch_function() -> Any:
    """Return the ``__torch_function__`` of a tensor class that wants none."""
    return torch._C._disabled_torch_function_impl


def wrapper_of(kind: type, inner: torch.Tensor, device: torch.device) -> Any:
    """Make a tensor of class ``kind`` on ``device`` that has the layout of ``inner`` and no memory of its own."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        inner.shape,
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        device=device,
    )


def operator_names() -> list[str]:
    """Return the full names of all operators that torch knows."""
    names: list[str] = torch._C._dispatch_get_all_op_names()
    return names


def register_python_backend(name: str, module: Any) -> None:
    """Register a device type whose kernels are written in Python."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def wrap_backward(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function around every backward pass of this process."""
    torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]


def _exists(module: str, name: str) -> bool:
    """Whether a module of torch defines a name. Modules that are not imported yet are read: Inductor takes seconds."""
    if (loaded := sys.modules.get(module)) is not None:
        return hasattr(loaded, name)
    file = pathlib.Path(torch.__path__[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    defined = re.compile(rf"^(?:def |class )?{name}\b", re.MULTILINE)
    return file.exists() and defined.search(file.read_text(encoding="utf-8")) is not None
