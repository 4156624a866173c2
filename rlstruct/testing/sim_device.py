"""A simulated accelerator: find your device mistakes on a laptop.

Importing this module adds four strict devices ``sim:0`` ... ``sim:3`` to torch. Their tensors compute on the CPU, with
the CPU's numbers and the CPU's random generator, and refuse to meet a tensor of any other device, as CUDA tensors do:

>>> import torch, rlstruct.testing.sim_device
>>> x = torch.ones(2, device="sim:1")
>>> x + 1
tensor([2., 2.], device='sim:1')
>>> x + torch.ones(2)
Traceback (most recent call last):
    ...
rlstruct.testing.sim_device.SimDeviceMismatchError: ...:1: torch.add: its tensors are on 2 devices (on sim:1: ...

So put the batcher on ``sim:1``, the learner on ``sim:0``, the evaluation on ``cpu``, and run your program: each
tensor that was made without ``device=``, each forgotten ``.to(...)`` and each ``.numpy()`` of a device tensor raises at
the line that does it. A program that passes here places its tensors correctly on CUDA. ``forbid_host_sync`` finds
hidden waits.

`capture` is to these devices what CUDA graphs are to a GPU. RL_Batcher uses it the same way, so you find out here if
your agent does not survive being captured in a graph.

`without_float64` refuses float64, as ``mps`` on a Mac does.

What differs from a real accelerator:

* Random numbers come from the CPU: ``torch.manual_seed`` seeds all devices, ``torch.random.fork_rng`` restores them,
  and ``torch.Generator("sim:1")`` draws what a CPU generator draws. As on CUDA, tensors on other simulated devices
  reject it; unlike on CUDA, tensors on the CPU accept it.
* ``torch.autocast("sim")`` casts as ``torch.autocast("cuda")`` does, to float16 unless ``dtype`` says bfloat16.
* There is one device, ``sim:0``, behind the name ``"sim"``; no ``torch.sim.device(1)`` changes that.
* ``backward()`` runs in the thread that calls it, not in autograd's thread of the device.
* ``module.to("sim:0")`` keeps the parameters' identity as on CUDA, but fails while a graph that uses them is alive;
  ``module.to("cpu")`` makes new parameters: make the optimiser after it.
* ``torch.load`` restores a tensor's old device and ignores ``map_location``: save ``.cpu()`` tensors.
* It has no streams, events or memory figures, no pinned memory (so no ``DataLoader(pin_memory=True)``), no
  ``torch.compile`` or ``torch.export``, no dlpack, and no sparse or quantised tensors.
* torch has one accelerator per process. Importing this module into a process that already uses CUDA raises an error;
  once it is imported, pinned memory and ``backward()`` fail on CUDA.
* An operation costs about 50 microseconds more than on the CPU.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.device import WITHOUT_FLOAT64, register_backend
from rlstruct.engine.torch_private import register_python_backend, wrap_backward
from rlstruct.errors import UsageError
from rlstruct.testing.simulated import generator as _sim_generator
from rlstruct.testing.simulated.autocast import autocast_kernels
from rlstruct.testing.simulated.devices import DEVICE_COUNT, SimDeviceMismatchError, indexed
from rlstruct.testing.simulated.graph import capture
from rlstruct.testing.simulated.tensor import DECOMPOSED, SimTensor, rebuild, unwrap

__all__ = ["DEVICE_COUNT", "SimDeviceMismatchError", "SimTensor", "capture", "without_float64"]


@contextlib.contextmanager
def without_float64() -> Iterator[None]:
    """Refuse float64 on the simulated devices within this block, as ``mps`` on a Mac does."""
    WITHOUT_FLOAT64.add("sim")
    try:
        yield
    finally:
        WITHOUT_FLOAT64.discard("sim")


class _SimModule:
    """The module ``torch.sim``."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return DEVICE_COUNT

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the CPU's generator draws, and torch.manual_seed has seeded it."""

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return the state of the CPU's generator, which draws for every simulated device."""
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Set the state of the CPU's generator."""
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def synchronize(self, device: object = None) -> None:
        """Do nothing: every operation is finished when it returns."""


_aten = torch.ops.aten
# Operations that create a tensor without taking one; torch builds all other factories from these.
_EMPTY: Final = (_aten.empty.memory_format, _aten.empty_strided.default)
_FACTORIES: Final = (*_EMPTY, _aten.tril_indices.default, _aten.triu_indices.default)


def _factory_kernel(func: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        device = indexed(kwargs.pop("device"))
        return SimTensor(func(*args, **kwargs, device="cpu"), device)

    return kernel


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    # torch.tensor(data, device="sim:1") calls this: it copies with __torch_dispatch__ switched off.
    inner_source, inner_target = unwrap((source, target), [])
    inner_target.copy_(inner_source)
    return target


def _local_scalar_dense(tensor: SimTensor) -> Any:
    # torch.tensor([x[0], x[1]]) reads its numbers with this, with __torch_dispatch__ switched off.
    return tensor._inner.item()  # sync: what the caller asked for


class _InFlight(threading.local):
    errors: list[BaseException] | None = None  # raised by hooks in the running backward pass


_in_flight = _InFlight()


def _keep_exception(error: BaseException) -> None:
    if _in_flight.errors is None:
        raise error
    _in_flight.errors.append(error)


def _in_this_thread(run: Callable[..., Any]) -> Callable[..., Any]:
    # autograd's device thread can still hold Python objects when the interpreter exits, which aborts the process. And
    # for a device type with Python kernels autograd has a single thread, so sim:1 would have none.
    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        errors: list[BaseException] = []
        outer, _in_flight.errors = _in_flight.errors, errors
        try:
            with torch.autograd.set_multithreading_enabled(False):
                result = run(*args, **kwargs)
        except SystemError:  # C++ has dropped the exception
            if not errors:
                raise
        finally:
            _in_flight.errors = outer
        if errors:
            raise errors[0]
        return result

    return run_backward


def _install() -> Any:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UsageError(
            f"{__name__}: got a process that works on CUDA already, expected one that does not: torch has one "
            "accelerator per process. Import this module before anything touches CUDA, or in a separate process."
        )
    register_python_backend("sim", _SimModule(), _keep_exception)
    make_library: Any = torch.library.Library  # torch gives it no types
    library = make_library("aten", "IMPL")
    for func in _FACTORIES:
        library.impl(func, _factory_kernel(func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    library.impl("_local_scalar_dense", _local_scalar_dense, "PrivateUse1")
    for name, decomposition in DECOMPOSED.items():
        library.impl(name, decomposition, "AutogradPrivateUse1")
    everything = make_library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for func, kernel in autocast_kernels():
        library.impl(func, kernel, "AutocastPrivateUse1")
    _sim_generator.install()
    wrap_backward(_in_this_thread)
    torch.serialization.add_safe_globals([rebuild])
    register_backend("sim", __name__)
    return library, everything


_LIBRARIES: Final = _install()  # the kernels stay registered as long as these objects live

__getattr__ = renamed.attributes(__name__)
