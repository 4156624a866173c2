"""All private names of torch that this library uses, and checks that the installed torch has them.

Any release may remove a private name. Importing the engine checks the names that each executor needs; an executor that
lacks one is disabled, with one warning.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

import contextlib
import ctypes
import functools
import pathlib
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlstruct import renamed
from rlstruct.errors import UsageError

__all__ = ["TESTED", "OperatorObserver", "TorchDispatchMode", "check", "is_composite", "missing", "schema_of"]

TESTED: Final = "2.7 to 2.14"
"""Releases of torch that the tests have run with."""

ZEN_5: Final = 26
"""Family of AMD's first processors that compute 512 bits at once."""

STEP_HOOKS: Final = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of every optimiser that hold the hooks of its steps."""

_CUDA_ONLY: Final = frozenset({"graph"})  # builds of torch without CUDA have none of these names, and need none
NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "compiled": (
        "torch._ops:OpOverload",
        "torch._ops#_op_dk",
        "torch._C:_dispatch_get_all_op_names",
        "torch._inductor.compile_fx:compile_fx_inner",
        "torch._inductor.decomposition:select_decomp_table",
        "torch._inductor.config:max_fusion_size",
        "torch._inductor.config:size_asserts",
        "torch._inductor.config:fallback_random",
        "torch.utils._config_module#patch",
        "torch._inductor.graph#user_visible_output_idxs",
        "torch._inductor.graph#original_output_strides",
        "torch._inductor.output_code#current_callable",
        "torch.fx.experimental.proxy_tensor:make_fx",
        "torch.fx.experimental.proxy_tensor#_allow_non_fake_inputs",
    ),
    "scalar loops": (
        "torch._inductor.codegen.cpp:TilingSelect",
        "torch._inductor.codegen.cpp#select_tiling",
        "torch._inductor.codegen.cpp_utils:_get_loop_body",
        "torch._inductor.virtualized:V",
    ),
    "sums of bits": (
        "torch._inductor.codecache:CppPythonBindingsCodeCache",
        "torch._inductor.codecache#load_pybinding",
    ),
    "code on disk": (
        "torch._guards:TracingContext",
        "torch._guards:tracing",
        "torch._subclasses.fake_tensor:FakeTensorMode",
        "torch.compiler.config:cache_key_tag",
        "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    ),
    "bfloat16": ("torch.cpu:_is_avx512_bf16_supported", "torch.cpu:_is_amx_tile_supported"),
    "kernel": ("torch.nn.modules.module:_global_forward_hooks", "torch.nn.modules.module:_global_forward_pre_hooks"),
    "fused optimiser": tuple(f"torch.optim.{name}#found_inf" for name in ("adam", "sgd", "adagrad")),
    "graph": (
        "torch._C:_cuda_endAllocateToPool|_cuda_endAllocateCurrentStreamToPool",  # the second one until torch 2.7
        "torch._C:_cuda_releasePool",
        "torch._C:_cuda_clearCublasWorkspaces",
    ),
}
"""Names that each executor, or faster code of one, needs. ``module:name`` is defined in the module, ``module#name`` is
an argument, attribute or key in its source, and ``name|older name`` stands for either."""


def missing(executor: str) -> list[str]:
    """Return the names that an executor needs and the installed torch lacks."""
    if executor in _CUDA_ONLY and not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        return []
    return [name for name in NEEDED[executor] if not _exists(name)]


def why_missing(executor: str) -> str:
    """Return `missing` as a reason in words; empty if nothing is missing."""
    names = missing(executor)
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else ""


def check() -> None:
    """Warn about executors that the installed torch cannot run; eager torch runs instead."""
    for executor in NEEDED:
        if names := missing(executor):
            spelt = ", ".join(names).replace(":", ".").replace("#", ": ")
            without = f"the executor {executor!r} is disabled and steps run eagerly, slower"
            if executor == "scalar loops":
                without = "compiled steps that compute with bools are slower than they could be"
            if executor == "sums of bits":
                without = "products of compiled steps with frames of bits are slower than they could be"
            if executor == "code on disk":
                without = "every process generates the code of its steps anew"
            warnings.warn(
                f"rlstruct: torch {torch.__version__} has no {spelt}, so {without}. "
                f"The tests have run with torch {TESTED}: install one of these.",
                stacklevel=2,
            )


@functools.cache
def is_composite(func: Any) -> bool:
    """Return True if torch defines an operator by other operators on every device.

    Autograd decomposes such operators. Below autograd, and in inference mode, call ``func.decompose``.
    """
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def has_hooks(module: torch.nn.Module) -> bool:
    """Return True if a module, one of its submodules, or all modules have forward hooks."""
    everywhere, names = torch.nn.modules.module, ("_forward_hooks", "_forward_pre_hooks")
    if missing("kernel") or everywhere._global_forward_hooks or everywhere._global_forward_pre_hooks:
        return True
    return any(getattr(part, name) for part in module.modules() for name in names)


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Base of modes that only observe operators. Models under torch.compile stay compiled, and are not observed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let Dynamo run under this mode; otherwise it would skip the model and never compile it again."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Do the same in torch 2.7, which has only this method."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing Dynamo at the first operator, which takes seconds."""
        return False


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, which counts writes to its memory; 0 if it has none."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


def is_traced(tensor: torch.Tensor) -> bool:
    """Return True for a tensor without values, which stands for one while a function is traced."""
    return isinstance(tensor, FakeTensor)


def schema_of(func: Any) -> Any:
    """Return an operator's schema: arguments, returns, and which of them it writes to."""
    return func._schema


@functools.cache
def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """Map all foreach operators to functions that call one operator per tensor, as torch does on a new device."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    decompositions: dict[Any, Callable[..., Any]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            func = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if func.has_kernel_for_dispatch_key(key):
                decompositions[func] = functools.partial(func._op_dk, key)
    return decompositions


@contextlib.contextmanager
def code_on_disk(inputs: list[torch.Tensor], strides: list[tuple[int, ...]]) -> Iterator[list[torch.Tensor]]:
    """Let TorchInductor take the code of a graph from its folder on disk, or keep it there, in a with block.

    It does so for fake inputs of a context that traces. Without the names that this needs, nothing changes.

    Args:
        inputs: of the graph.
        strides: of its outputs, which TorchInductor obeys and does not compare.

    Yields:
        The inputs to compile the graph with.
    """
    if missing("code on disk"):
        yield inputs
        return
    import torch._dynamo.utils as dynamo
    import torch.compiler.config as settings
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    tag = f"rlstruct {strides} {missing('scalar loops')}"  # what differs from the code of torch.compile
    # In torch 2.7, taking code from the disk fails outside of this context.
    counts: Any = contextlib.nullcontext()
    if not hasattr(getattr(dynamo, "CompileEventLogger", None), "try_") and hasattr(dynamo, "get_metrics_context"):
        counts = dynamo.get_metrics_context()
    with counts, settings.patch(cache_key_tag=tag), tracing(TracingContext(fake)):  # type: ignore[attr-defined]
        yield [fake.from_tensor(one, static_shapes=True) for one in inputs]


@contextlib.contextmanager
def scalar_loops_of_bools() -> Iterator[None]:
    """Let TorchInductor write the C++ loops that load or store bools without its own vectors, in a with block.

    Its vectors handle bools one by one, ten times slower than the loops that the C++ compiler vectorises. Without the
    names that this needs, nothing changes.
    """
    if missing("scalar loops"):
        yield
        return
    from torch._inductor.codegen import cpp, cpp_utils
    from torch._inductor.virtualized import V

    tiling: Any = cpp.TilingSelect
    bodies_of: Any = cpp_utils._get_loop_body
    select = tiling.select_tiling

    def scalar(self: object, functions: Any, sizes: Any) -> Any:
        factors, axes, *statistics = select(self, functions, sizes)  # torch 2.7 returns no statistics
        for body in bodies_of(functions):
            for block in (body.root_block, *body.subblocks.values()):
                for node in block.graph.nodes:
                    memory = node.target in ("load", "store", "store_reduction")
                    if memory and V.graph.get_dtype(node.args[1]) is torch.bool:
                        return ([], [], *statistics)
        return (factors, axes, *statistics)

    tiling.select_tiling = scalar
    try:
        yield
    finally:
        tiling.select_tiling = select


def compile_cpp(arguments: list[str], source: str) -> Callable[..., None]:
    """Compile the C++ function ``kernel``, with TorchInductor's compiler, flags and folder on disk. It holds the GIL.

    Args:
        arguments: types of its arguments: ``"const float*"`` or other pointers for tensors, ``"int64_t"``.
        source: with ``extern "C" void kernel``.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernel: Callable[..., None] = CppPythonBindingsCodeCache.load_pybinding(arguments, source)
    return kernel


@functools.cache
def onednn_is_faster() -> bool:
    """Return True on AMD's processors from Zen 5 on: MKL multiplies without their AVX512, at half of oneDNN's speed.

    Zen 4 has AVX512, too, but computes it in halves, so that neither library is the faster one.
    """
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    return mkl and wide and family_of_amd(_processor()) >= ZEN_5


def onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply matrices of float32 on the CPU with oneDNN.  [R, C] from [R, K] and [K, C]."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight.t(), None, "none", [], "")
    return result


def clear_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, which allocates new ones on demand."""
    torch._C._cuda_clearCublasWorkspaces()


def end_allocating(device: int, pool: tuple[int, int]) -> None:
    """Tell torch's allocator that a capture into this pool has ended and that the pool may be freed."""
    before: Any = getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    getattr(torch._C, "_cuda_endAllocateToPool", before)(device, pool)
    torch._C._cuda_releasePool(device, pool)


# Names for the simulated accelerator of rlstruct.testing, a debugging aid, which fails at import if one is missing.


def disabled_torch_function() -> Any:
    """Return the ``__torch_function__`` that disables the protocol for a tensor class."""
    return torch._C._disabled_torch_function_impl


def wrapper_of(cls: type, inner: torch.Tensor, device: torch.device) -> Any:
    """Create a tensor of class ``cls`` on ``device`` with the layout of ``inner`` and without memory."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        inner.shape,
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        device=device,
    )


def address_of(generator: torch.Generator) -> int:
    """Return the address of the generator behind a Python object; several objects may share one."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address


def register_python_backend(name: str, module: Any, keep: Callable[[BaseException], None]) -> None:
    """Register a device type whose kernels are written in Python.

    A hook that raises in ``backward()`` leaves its exception set while C++ calls ``type_``, and returning with an
    exception set aborts the process. So ``type_`` passes the exception to ``keep`` and clears it.
    """
    from torch.utils import backend_registration

    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        raise UsageError(
            f"{name}: torch {torch.__version__} has no torch.utils.backend_registration."
            "_setup_privateuseone_for_python_backend, which a device with kernels in Python needs. Install torch 2.11 "
            "or newer, or look for device mistakes with RL_Agent_CheckDevice."
        )

    # ctypes raises a pending exception, whatever it calls; looking up a name first could lose the exception.
    def type_(self: object, look: Callable[[], Any] = ctypes.pythonapi.PyErr_Occurred) -> Any:
        try:
            look()
        except BaseException as error:
            keep(error)
        return torch._C._autograd.DeviceType.PrivateUse1

    guard = type("Guard", (torch._C._acc.DeviceGuard,), {"type_": type_})()
    register(name, backend_module=module, device_guard=guard)


def wrap_backward(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap every backward pass of this process in a function."""
    torch.autograd._engine_run_backward = wrap(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]


def _processor() -> str:
    """Return the text in which the system names the processor's maker and family; "" if it does not."""
    linux = pathlib.Path("/proc/cpuinfo")
    return linux.read_text(encoding="utf-8", errors="replace") if linux.exists() else platform.processor()


def family_of_amd(processor: str) -> int:
    """Return the family of AMD's processor that the system describes so; 0 for other makers.

    >>> family_of_amd("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD")
    26
    """
    number = re.search(r"family\D*(\d+)", processor, re.IGNORECASE)
    return int(number[1]) if number and "AuthenticAMD" in processor else 0


def _exists(needed: str) -> bool:
    """Look up an entry of `NEEDED`. Modules that are not imported are searched as text, which takes less time."""
    module, mark, name = re.split("([:#])", needed)
    if mark == ":" and (loaded := sys.modules.get(module)) is not None:
        return any(hasattr(loaded, either) for either in name.split("|"))
    start = r"^(?:def |class )?" if mark == ":" else r"\b"
    return re.search(rf"{start}(?:{name})\b", source_of(module), re.MULTILINE) is not None


@functools.cache
def source_of(module: str) -> str:
    """Read the source of a torch module; "" if there is none."""
    file = pathlib.Path(torch.__path__[0]).joinpath(*module.split(".")[1:]).with_suffix(".py")
    return file.read_text(encoding="utf-8") if file.exists() else ""


__getattr__ = renamed.attributes(__name__)
