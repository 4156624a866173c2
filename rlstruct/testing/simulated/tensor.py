"""The tensor of the simulated accelerator, and the rules for its operations with other tensors.

A SimTensor wraps a CPU tensor. Every operation arrives at ``__torch_dispatch__``: the devices of its arguments are
checked against CUDA's rules, the operation runs on the CPU tensors inside, and its results are wrapped. A view wraps a
view of the same memory, so writes through views behave as on any device.
"""

# ruff: noqa: ANN401  (torch passes whatever an operator takes and returns)

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from rlstruct.device import WITHOUT_FLOAT64
from rlstruct.engine.torch_private import disabled_torch_function, is_composite, schema_of, wrapper_of
from rlstruct.testing.batch_writes import tensor_arguments
from rlstruct.testing.host_sync import calling_line
from rlstruct.testing.simulated.devices import SimDeviceMismatchError, indexed
from rlstruct.testing.simulated.generator import check_generator

# Operations that CUDA lets cross devices.
_CROSSING = frozenset({"copy_", "_to_copy", "_copy_from", "_foreach_copy_"})
# Operations, besides element-wise ones, that accept a 0-dimensional CPU tensor as a number.
_TAKES_NUMBERS = frozenset({"masked_fill", "masked_fill_", "index_fill", "index_fill_"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
# Operations that CUDA implements for floating-point and complex numbers only.
_PRODUCTS = frozenset(
    {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "mv", "addmv", "dot", "vdot", "addr"}
)
# Arguments and results that torch always keeps on the CPU.
_HOST_ARGUMENTS = frozenset({("_pack_padded_sequence", "lengths"), ("_pack_padded_sequence_backward", "batch_sizes")})
_HOST_RESULTS = {"_pack_padded_sequence": 1}


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take one step of an LSTM (Hochreiter and Schmidhuber, 1997), gates in torch's order; [B, H] out of [B, 4 H].

    The last result is a workspace that is never read.
    """
    gates = input_gates + hidden_gates
    if input_bias is not None and hidden_bias is not None:
        gates = gates + input_bias + hidden_bias
    enter, forget, cell, out = gates.chunk(4, 1)
    cy = forget.sigmoid() * cx + enter.sigmoid() * cell.tanh()
    return out.sigmoid() * cy.tanh(), cy, cx.new_empty(0)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one step of a GRU (Cho et al., 2014), gates in torch's order; [B, H] out of [B, 3 H].

    The last result is a workspace that is never read.
    """
    if input_bias is not None and hidden_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    input_reset, input_update, input_new = input_gates.chunk(3, 1)
    hidden_reset, hidden_update, hidden_new = hidden_gates.chunk(3, 1)
    update = (input_update + hidden_update).sigmoid()
    new = (input_new + (input_reset + hidden_reset).sigmoid() * hidden_new).tanh()
    return new + update * (hx - new), hx.new_empty(0)


# On any device but the CPU, torch's C++ calls fused cells, for which there is no CPU kernel.
DECOMPOSED: Final[dict[str, Callable[..., Any]]] = {
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_gru_cell": _gru_cell,
}


class SimTensor(torch.Tensor):
    """A tensor on ``sim:i``. Make it with ``device="sim:1"`` or ``.to("sim:1")`` as on any device."""

    __module__ = "rlstruct.testing.sim_device"
    _inner: Tensor  # the CPU tensor that holds the values; views of a SimTensor hold views of it

    __torch_function__ = disabled_torch_function()

    @staticmethod
    def __new__(cls: type[SimTensor], inner: Tensor, device: torch.device) -> SimTensor:
        """Wrap a CPU tensor without copying it; raise TypeError for float64 in `without_float64`."""
        if inner.dtype is torch.float64 and "sim" in WITHOUT_FLOAT64:
            raise TypeError(
                f"{calling_line()}: got a tensor of float64 on {device}, expected another dtype: this device imitates "
                "mps, which has no float64. Use rlstruct.device.accumulator_dtype(device), or float32."
            )
        wrapper: SimTensor = wrapper_of(cls, inner, device)
        wrapper._inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func):  # in inference mode nothing has decomposed it yet
            return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in DECOMPOSED:
            return DECOMPOSED[name](*args, **kwargs)
        if name == "_fused_sdp_choice":
            return 0  # the unfused implementation: fused attention kernels are looked up by device
        met: list[Tensor] = []
        inner_args = unwrap(args, met)
        inner_kwargs = {key: unwrap(value, met) for key, value in kwargs.items()}
        device = next(tensor.device for tensor in met if isinstance(tensor, SimTensor))
        if name not in _CROSSING and any(tensor.device != device for tensor in met):
            _check_arguments(func, name, device, args, kwargs)
        check_generator(name, kwargs.get("generator"), device)
        if name in _PRODUCTS and not (met[0].is_floating_point() or met[0].is_complex()):
            raise NotImplementedError(
                f"{calling_line()}: torch.{name}: unlike the CPU, CUDA cannot multiply matrices of {met[0].dtype}. Use "
                "floating-point numbers, or (a.unsqueeze(-1) * b).sum(-2)."
            )
        if (wanted := kwargs.get("device")) is not None:
            device, inner_kwargs["device"] = indexed(torch.device(wanted)), "cpu"
        result = func(*inner_args, **inner_kwargs)
        if schema_of(func).is_mutable:
            _follow_shape(met)
        return _wrapped(result, func, name, met, device)

    # torch implements these in C++ for torch.Tensor, and for subclasses refuses or gives wrong answers.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values, the device, and the gradient's state, as for a CUDA tensor."""
        text = repr(self._inner)[:-1] + f", device='{self.device}'"
        if self.grad_fn is not None:
            return f"{text}, grad_fn=<{type(self.grad_fn).__name__}>)"
        return text + (", requires_grad=True)" if self.requires_grad else ")")

    def __format__(self, spec: str) -> str:
        return format(self._inner, spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self._inner.tolist()  # sync: what the caller asked for

    def numpy(self, *, force: bool = False) -> Any:
        """Raise as a CUDA tensor does, unless ``force`` is set."""
        if force:
            return self.detach().cpu().numpy()  # sync: what the caller asked for
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise as a CUDA tensor does."""
        return self.numpy()  # sync: raises

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """Make a tensor from host data on this tensor's device."""
        device, dtype = options.pop("device", None) or self.device, options.pop("dtype", None) or self.dtype
        return torch.tensor(data, device=device, dtype=dtype, **options)

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
    def data(self) -> Tensor:
        """The same memory without the graph; assigning replaces the memory."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self._inner = value._inner  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as values and device; unpickling imports this module, and so registers the devices."""
        is_parameter = isinstance(self, torch.nn.Parameter)
        return rebuild, (self._inner, str(self.device), self.requires_grad, is_parameter)

    # Being flattenable makes Module.to swap a parameter's contents, so that optimisers and tied weights keep it.

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        return ["_inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], device: torch.device, size: Any, stride: Any) -> SimTensor:
        return SimTensor(inner["_inner"], device)


def rebuild(inner: Tensor, device: str, requires_grad: bool, is_parameter: bool) -> Tensor:
    """Return a tensor from its pickled parts."""
    tensor = SimTensor(inner, torch.device(device))
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


def unwrap(value: Any, met: list[Tensor]) -> Any:
    """Replace SimTensors by the CPU tensors inside, and append every tensor found to ``met``."""
    if isinstance(value, Tensor):
        met.append(value)
        return value._inner if isinstance(value, SimTensor) else value
    if isinstance(value, (list, tuple)):
        return type(value)([unwrap(item, met) for item in value])
    return value


def _check_arguments(func: Any, name: str, device: torch.device, args: Any, kwargs: Any) -> None:
    takes_numbers = (
        torch.Tag.pointwise in func.tags or name in _TAKES_NUMBERS | _INDEXING or name.startswith("_foreach")
    )
    fits, names = True, dict[str, list[str]]()
    for argument, label, tensor, written in tensor_arguments(func, args, kwargs):
        names.setdefault(str(tensor.device), []).append(repr(label))
        is_number = tensor.dim() == 0 and takes_numbers and not written
        is_index = name in _INDEXING and argument == "indices"
        may_be_host = is_number or is_index or (name, argument) in _HOST_ARGUMENTS
        fits &= tensor.device == device or (tensor.device.type == "cpu" and may_be_host)
    if not fits:
        where = "; ".join(f"on {place}: {', '.join(labels)}" for place, labels in names.items())
        raise SimDeviceMismatchError(
            f"{calling_line()}: torch.{name}: its tensors are on {len(names)} devices ({where}), expected one. "
            f"Create the misplaced tensor with device={str(device)!r} (or zeros_like, new_zeros, ...), or move it, or "
            f"the network it belongs to, with .to({str(device)!r})."
        )


def _follow_shape(met: list[Tensor]) -> None:
    """Restore the shape of wrappers after unsqueeze_, t_, resized outputs and the like."""
    for tensor in met:
        if isinstance(tensor, SimTensor):
            inner = tensor._inner
            if tensor.shape != inner.shape or tensor.stride() != inner.stride():
                torch.Tensor.data.__set__(tensor, SimTensor(inner, tensor.device))  # type: ignore[attr-defined]


def _wrapped(result: Any, func: Any, name: str, met: list[Tensor], device: torch.device) -> Any:
    """Wrap the results of an operation; arguments that it returns stay the same objects, and views stay views."""
    owners = {id(tensor._inner if isinstance(tensor, SimTensor) else tensor): tensor for tensor in met}

    def wrap(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) in owners:
                return owners[id(value)]
            return SimTensor(value, device) if device.type == "sim" else value
        return type(value)(map(wrap, value)) if isinstance(value, (list, tuple)) else value

    if name in _HOST_RESULTS:
        return tuple(item if i == _HOST_RESULTS[name] else wrap(item) for i, item in enumerate(result))
    # A view of an ordinary tensor stays one in inference mode, where new tensors are inference tensors.
    ordinary = func.is_view and torch.is_inference_mode_enabled() and not met[0].is_inference()
    with torch.inference_mode(False) if ordinary else contextlib.nullcontext():
        return wrap(result)
