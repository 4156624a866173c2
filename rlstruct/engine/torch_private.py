"""The private names of torch that this library uses: all of them, and what happens where one is missing.

A private name may vanish with any release. Each executor lists here what it needs; the list is compared with the
installed torch when the engine is imported, and an executor that lacks a name is left out, with one warning.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

import ctypes
import functools
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlstruct.errors import UsageError

__all__ = ["TESTED", "TorchDispatchMode", "Watching", "check", "is_composite", "missing", "schema_of"]

TESTED: Final = "2.7 to 2.14"
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
        "torch._inductor.graph#user_visible_output_idxs",
        "torch._inductor.graph#original_output_strides",
        "torch._inductor.output_code#current_callable",
        "torch.fx.experimental.proxy_tensor:make_fx",
        "torch.fx.experimental.proxy_tensor#_allow_non_fake_inputs",
    ),
    "kernel": ("torch.nn.modules.module:_global_forward_hooks", "torch.nn.modules.module:_global_forward_pre_hooks"),
    "fused optimiser": tuple(f"torch.optim.{name}#found_inf" for name in ("adam", "sgd", "adagrad")),
    "graph": (
        "torch._C:_cuda_endAllocateToPool|_cuda_endAllocateCurrentStreamToPool",  # the second one until torch 2.7
        "torch._C:_cuda_releasePool",
        "torch._C:_cuda_clearCublasWorkspaces",
    ),
}
"""For each executor the names that it needs: ``module:name`` defines one, and the source of ``module#name`` has an
argument, an attribute or a key that is called so. ``name|older name``: either of them."""


def missing(executor: str) -> list[str]:
    """Return the private names that an executor needs and the installed torch lacks; empty if it can be used."""
    if executor in _CUDA_ONLY and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return []
    return [name for name in NEEDED[executor] if not _found(name)]


def check() -> None:
    """Warn of executors that the installed torch cannot run; they are left out, and eager torch runs in their place."""
    for executor in NEEDED:
        if names := missing(executor):
            spelt = ", ".join(names).replace(":", ".").replace("#", ": ")
            warnings.warn(
                f"rlstruct: torch {torch.__version__} has no {spelt}, so the executor {executor!r} "
                f"is left out and steps run eagerly, slower. The tests ran with torch {TESTED}: "
                "install one of these.",
                stacklevel=2,
            )


@functools.cache
def is_composite(func: Any) -> bool:
    """Return True if torch defines an operator by other operators, for every device.

    Autograd takes such operators apart. Below it, and in inference mode, ``func.decompose`` has to be called.
    """
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if anything is called besides the ``forward`` of a module and of those within it."""
    everywhere, names = torch.nn.modules.module, ("_forward_hooks", "_forward_pre_hooks")
    if missing("kernel") or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    return any(getattr(part, name) for part in module.modules() for name in names)


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Base of modes that only look at operators: models under torch.compile stay compiled inside, and are not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo run under this mode; otherwise it would skip the model, and never compile it again."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say the same to torch 2.7, which asks for nothing else."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing Dynamo, which takes seconds, at the first operator."""
        return False


def version_of(tensor: torch.Tensor) -> int:
    """Return how often operators have written to the memory of a tensor; 0 where torch does not count it."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


def schema_of(func: Any) -> Any:
    """Return the schema of an operator: its arguments, its returns, and which of them it writes to."""
    return func._schema


def clear_cublas_workspaces() -> None:
    """Let cuBLAS give its workspaces back, and make new ones when it needs them."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocating(device: int, pool: tuple[int, int]) -> None:
    """Tell torch's allocator that nothing is recorded into a pool any more, and that it may be freed."""
    before: Any = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    getattr(torch._C, "_cuda_endAllocateToPool", before)(device, pool)
    torch._C._cuda_releasePool(device, pool)


# What the simulated accelerator of rlstruct.testing is made of. It is a debugging aid, and fails as a whole at import.


def disabled_torch_function() -> Any:
    """Return the ``__torch_function__`` of a tensor class that wants none."""
    return torch._C._disabled_torch_function_impl


def wrapper_of(kind: type, inner: torch.Tensor, device: torch.device) -> Any:
    """Make a tensor of class ``kind`` on ``device`` that has the layout of ``inner`` and no memory."""
    return torch.Tensor._make_wrapper_subclass(
        kind,
        inner.shape,
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        device=device,
    )


def address_of(generator: torch.Generator) -> int:
    """Return the address of the generator that a Python object stands for; several may stand for one."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def register_python_backend(name: str, module: Any, keep: Callable[[BaseException], None]) -> None:
    """Register a device type whose kernels are written in Python.

    A hook that raises in ``backward()`` leaves its exception set while C++ asks for the device type, and an answer
    given under a set exception ends the process. So the answer gives that exception to ``keep`` and clears it.
    """
    from torch.utils import backend_registration

    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        raise UsageError(
            f"{name}: torch {torch.__version__} has no torch.utils.backend_registration."
            "_setup_privateuseone_for_python_backend, which a device with kernels in Python needs. Install torch 2.11 "
            "or newer, or look for device mistakes with RL_Agent_CheckDevice."
        )

    # ctypes raises the exception that it finds set, whatever it calls. Looking up a name first could lose it.
    def type_(self: object, look: Callable[[], Any] = ctypes.pythonapi.PyErr_Occurred) -> Any:
        try:
            look()
        except BaseException as error:
            keep(error)
        return torch._C._autograd.DeviceType.PrivateUse1

    guard = type("Guard", (torch._C._acc.DeviceGuard,), {"type_": type_})()
    register(name, backend_module=module, device_guard=guard)


def wrap_backward(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put a function around every backward pass of this process."""
    torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]


def _found(needed: str) -> bool:
    """Look for an entry of `NEEDED`. Modules that are not imported are read: it takes less time."""
    module, mark, name = re.split("([:#])", needed)
    if mark == ":" and (loaded := sys.modules.get(module)) is not None:
        return any(hasattr(loaded, either) for either in name.split("|"))
    start = r"^(?:def |class )?" if mark == ":" else r"\b"
    return re.search(rf"{start}(?:{name})\b", _source(module), re.MULTILINE) is not None


@functools.cache
def _source(module: str) -> str:
    """Read the source of a module of torch; "" if there is none."""
    file = pathlib.Path(torch.__path__[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.exists() else ""
