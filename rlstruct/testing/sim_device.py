"""A simulated accelerator: find your device mistakes on a laptop. Layer 3: torch, rlstruct.device, rlstruct.errors.

Importing this module adds four strict devices ``sim:0`` ... ``sim:3`` to torch. Their tensors compute on the CPU, with
the CPU's numbers and the CPU's random generator, and refuse to meet a tensor of any other device, as CUDA tensors do:

>>> import rlstruct.testing.sim_device
>>> x = torch.ones(2, device="sim:1")
>>> x + 1
tensor([2., 2.], device='sim:1')
>>> x + torch.ones(2)
Traceback (most recent call last):
    ...
rlstruct.testing.sim_device.SimDeviceMismatchError: torch.add: 'self' is on sim:1, 'other' on cpu. ...

So put the batcher on ``sim:1``, the learner on ``sim:0``, the evaluation on ``cpu``, and run the program as it is: each
tensor that was made without ``device=``, each forgotten ``.to(...)`` and each ``.numpy()`` of a device tensor raises at
the line that does it. What passes here is placed right on CUDA. ``forbid_host_sync`` finds the hidden waits.

What differs from a real accelerator:

* ``backward()`` works on ``sim:0`` only: autograd starts one thread per device that the backend's C++ guard counts, and
  torch's Python backends count one. Elsewhere it raises and says so; forward passes work everywhere.
* There is no ``torch.Generator(device="sim:0")``; a CPU generator is refused, as on CUDA. ``torch.manual_seed`` seeds.
* Modules keep their parameters' identity in ``.to("sim:0")`` as on CUDA, but torch refuses the move while a graph that
  was built from the parameter is alive.
* No streams, no pinned memory, no ``torch.compile``, no sparse or quantised tensors. Do not import this module into a
  process that also works on CUDA: torch has one accelerator per process, and takes this one (pinned memory fails then).
* An operation costs about 30 microseconds more than on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from rlstruct.device import register_backend
from rlstruct.errors import DeviceMismatchError
from rlstruct.testing._sim_rnn import DECOMPOSED

__all__ = ["DEVICE_COUNT", "SimDeviceMismatchError", "SimTensor"]

DEVICE_COUNT: Final = 4

# Operations that CUDA lets cross devices.
_CROSSING = frozenset({"copy_", "_to_copy", "_copy_from", "_foreach_copy_"})
# Operations beside the element-wise ones that take a CPU tensor without dimensions as a number.
_TAKES_NUMBERS = frozenset({"masked_fill", "masked_fill_", "index_fill", "index_fill_"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
# Arguments and results that are on the CPU by contract.
_HOST_ARGUMENTS = frozenset({("_pack_padded_sequence", "lengths"), ("_pack_padded_sequence_backward", "batch_sizes")})
_HOST_RESULTS = {"_pack_padded_sequence": 1}


class SimDeviceMismatchError(DeviceMismatchError, RuntimeError):
    """Tensors of two devices met in one operation. A RuntimeError too, because that is what CUDA raises."""


class SimTensor(torch.Tensor):
    """A tensor on ``sim:i``. Never made by name: use ``device="sim:1"`` or ``.to("sim:1")`` as on any device."""

    _inner: Tensor  # the CPU tensor that holds the values; views of a SimTensor hold views of it

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> SimTensor:
        """Wrap a CPU tensor without copying it."""
        wrapper: SimTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        wrapper._inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the devices, run the operation on the CPU tensors inside, wrap what comes out."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in DECOMPOSED:
            return DECOMPOSED[name](*args, **kwargs)
        if name == "_fused_sdp_choice":
            return 0  # plain mathematics: the fused attention kernels are looked up by device
        met: list[Tensor] = []
        inner_args = _unwrap(args, met)
        inner_kwargs = {key: _unwrap(value, met) for key, value in kwargs.items()}
        device = _result_device(func, name, met, args, kwargs)
        if inner_kwargs.get("device") is not None:
            inner_kwargs["device"] = "cpu"
        result = func(*inner_args, **inner_kwargs)
        if func._schema.is_mutable:
            _follow_shape(met)
        return _Wrapper(func, name, met, device).wrap_result(result)

    # torch answers these in C++ for torch.Tensor itself, and refuses or answers wrongly for subclasses.

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the values, the device, and the gradient's state, as for a CUDA tensor."""
        text = repr(self._inner)[:-1] + f", device='{self.device}'"
        if self.grad_fn is not None:
            return f"{text}, grad_fn=<{type(self.grad_fn).__name__}>)"
        return text + (", requires_grad=True)" if self.requires_grad else ")")

    def __format__(self, spec: str) -> str:
        """Format one number as a number."""
        return format(self._inner.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._inner.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise as a CUDA tensor does, unless ``force`` is set."""
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        """Make a tensor from host data on this tensor's device."""
        options = {"device": self.device, "dtype": None, **options}
        options["dtype"] = options["dtype"] or (None if isinstance(data, Tensor) else self.dtype)
        return torch.tensor(data, **options)

    def data_ptr(self) -> int:
        """Return the address of the values, so that shared memory can be recognised."""
        return self._inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage of the values; it calls itself a CPU storage."""
        return self._inner.untyped_storage()

    def share_memory_(self) -> SimTensor:
        """Do nothing, as for a CUDA tensor."""
        return self

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same memory without the graph; assigning replaces the memory."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._inner = value._inner  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as values and device; unpickling imports this module, and so registers the devices."""
        is_parameter = isinstance(self, torch.nn.Parameter)
        return _rebuild, (self._inner, str(self.device), self.requires_grad, is_parameter)

    def __deepcopy__(self, memo: dict[int, Any]) -> SimTensor:
        """Copy the memory of a leaf."""
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol; use clone()."
            )
        if id(self) not in memo:
            _, (inner, *rest) = self.__reduce_ex__(2)
            memo[id(self)] = _rebuild(inner.clone(), *rest)
            if self.grad is not None:
                memo[id(self)].grad = self.grad.__deepcopy__(memo)  # type: ignore[operator]
        return memo[id(self)]  # type: ignore[no-any-return]

    # Being flattenable makes Module.to swap a parameter's contents, so that optimisers and tied weights keep it.

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        """Name the tensor inside."""
        return ["_inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], device: torch.device, size: Any, stride: Any) -> SimTensor:
        """Wrap the tensor inside again."""
        return SimTensor(inner["_inner"], device)


def _rebuild(inner: Tensor, device: str, requires_grad: bool, is_parameter: bool) -> Tensor:
    tensor = SimTensor(inner, torch.device(device))
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def _unwrap(value: Any, met: list[Tensor]) -> Any:
    """Replace SimTensors by the CPU tensors inside; note every tensor that is met."""
    if isinstance(value, Tensor):
        met.append(value)
        return value._inner if isinstance(value, SimTensor) else value
    if isinstance(value, (list, tuple)):
        return type(value)([_unwrap(item, met) for item in value])
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _result_device(func: Any, name: str, met: list[Tensor], args: Any, kwargs: Any) -> torch.device:
    """Return the device of the results; raise if the arguments' devices do not fit."""
    device = next(tensor.device for tensor in met if isinstance(tensor, SimTensor))
    if name not in _CROSSING and any(tensor.device != device for tensor in met):
        _check_arguments(func, name, device, args, kwargs)
    if kwargs.get("generator") is not None:
        _refuse_generator(name, device)
    wanted = kwargs.get("device")
    return device if wanted is None else _indexed(torch.device(wanted))


def _check_arguments(func: Any, name: str, device: torch.device, args: Any, kwargs: Any) -> None:
    takes_numbers = torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS or name.startswith("_foreach")
    first = ""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors(value):
            if tensor.device == device:
                first = first or argument.name
                continue
            on_host = tensor.device.type == "cpu"
            is_number = tensor.dim() == 0 and not written and (takes_numbers or name in _INDEXING)
            may_be_host = (name in _INDEXING and argument.name == "indices") or (name, argument.name) in _HOST_ARGUMENTS
            if not (on_host and (is_number or may_be_host)):
                _refuse_mixture(func, name, device, args, kwargs)


def _refuse_mixture(func: Any, name: str, device: torch.device, args: Any, kwargs: Any) -> None:
    places: dict[str, list[str]] = {}
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in _tensors(value):
            places.setdefault(str(tensor.device), []).append(f"{argument.name!r}")
    where = ", ".join(
        f"{' and '.join(dict.fromkeys(names))} {'is ' * (i == 0)}on {place}"
        for i, (place, names) in enumerate(places.items())
    )
    raise SimDeviceMismatchError(
        f"torch.{name}: {where}. All tensors of one operation must be on one device. Create the tensor with "
        f"device={str(device)!r} (or with zeros_like, new_zeros, ...), or move it with .to({str(device)!r})."
    )


def _refuse_generator(name: str, device: torch.device) -> None:
    raise SimDeviceMismatchError(
        f"torch.{name}: the generator is on cpu, the tensor on {device}. Draw on the CPU and move the result with "
        f".to({str(device)!r}), or use counter-based numbers from rlstruct.functional.random."
    )


def _indexed(device: torch.device) -> torch.device:
    if device.type != "sim":
        return device
    index = device.index or 0
    if index >= DEVICE_COUNT:
        raise RuntimeError(
            f"invalid device ordinal: {device} does not exist; there are sim:0 to sim:{DEVICE_COUNT - 1}."
        )
    return torch.device("sim", index)


def _follow_shape(met: list[Tensor]) -> None:
    """Give wrappers the shape of their tensors again after unsqueeze_, t_, resized outputs and the like."""
    for tensor in met:
        if isinstance(tensor, SimTensor):
            inner = tensor._inner
            if tensor.shape != inner.shape or tensor.stride() != inner.stride():
                torch.Tensor.data.__set__(tensor, SimTensor(inner, tensor.device))  # type: ignore[attr-defined]


class _Wrapper:
    """Wraps the results of one operation: arguments come back as themselves, views as views."""

    def __init__(self, func: Any, name: str, met: list[Tensor], device: torch.device) -> None:
        self.owners = {id(t._inner if isinstance(t, SimTensor) else t): t for t in met}
        self.name = name
        self.device = device
        # A view of an ordinary tensor stays one in inference mode, where new tensors are inference tensors.
        self.ordinary = func.is_view and torch.is_inference_mode_enabled() and not met[0].is_inference()

    def wrap_result(self, result: Any) -> Any:
        if isinstance(result, tuple) and self.name in _HOST_RESULTS:
            host = _HOST_RESULTS[self.name]
            return tuple(item if i == host else self.wrap(item) for i, item in enumerate(result))
        if self.ordinary:
            with torch.inference_mode(False):
                return self.wrap(result)
        return self.wrap(result)

    def wrap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            owner = self.owners.get(id(value))
            if owner is not None:
                return owner
            return SimTensor(value, self.device) if self.device.type == "sim" else value
        if isinstance(value, (list, tuple)):
            return type(value)([self.wrap(item) for item in value])
        return value


class _SimModule:
    """What ``torch.sim`` answers."""

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

    def synchronize(self, device: object = None) -> None:
        """Do nothing: every operation is finished when it returns."""


def _factories() -> Iterator[tuple[str, Any]]:
    """Every operation that makes one tensor on a device out of no tensor."""
    for full_name in torch._C._dispatch_get_all_op_names():  # type: ignore[attr-defined]
        if not full_name.startswith("aten::"):
            continue
        name, _, overload = full_name[len("aten::") :].partition(".")
        try:
            func = getattr(getattr(torch.ops.aten, name), overload or "default")
        except (AttributeError, RuntimeError):  # registered for TorchScript only
            continue
        arguments, returns = func._schema.arguments, func._schema.returns
        takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
        takes_device = any(argument.name == "device" for argument in arguments)
        if takes_device and not takes_tensor and [str(r.type) for r in returns] == ["Tensor"]:
            yield full_name, func


def _factory_kernel(func: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        device = _indexed(kwargs.pop("device"))
        if kwargs.get("generator") is not None:
            _refuse_generator(func.overloadpacket.__name__, device)
        return SimTensor(func(*args, **kwargs, device="cpu"), device)

    return kernel


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    # torch.tensor(data, device="sim:1") comes here: it copies with __torch_dispatch__ switched off.
    inner_source, inner_target = _unwrap((source, target), [])
    inner_target.copy_(inner_source)
    return target


def _explain_backward(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise RuntimeError(
                "backward: the graph passes through a simulated device other than sim:0, and autograd runs on sim:0 "
                "only. Put the learner on 'sim:0' and the batcher on 'sim:1'."
            ) from error

    return run_backward


def _install() -> torch.library.Library:
    _setup_privateuseone_for_python_backend("sim", backend_module=_SimModule())
    library = torch.library.Library("aten", "IMPL")
    for name, func in _factories():
        library.impl(name, _factory_kernel(func), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for name, decomposition in DECOMPOSED.items():
        library.impl(name, decomposition, "AutogradPrivateUse1")
    torch.autograd._engine_run_backward = _explain_backward(  # type: ignore[attr-defined]
        torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    )
    torch.serialization.add_safe_globals([_rebuild])
    register_backend("sim", __name__)
    return library


_LIBRARY: Final = _install()  # kernels live as long as this object
