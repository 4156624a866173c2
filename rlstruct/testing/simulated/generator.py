"""Random generators of the simulated accelerator: ``torch.Generator("sim:1")``.

torch's C++ refuses to make a generator for a device whose kernels are Python. So this is a CPU generator that knows
which device it belongs to, and the operators of the simulated accelerator compare that with their own device.
"""

# ruff: noqa: ANN401  (pickle's types)

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Generator

from rlstruct.engine.torch_private import address_of
from rlstruct.testing.host_sync import calling_line
from rlstruct.testing.simulated.devices import SimDeviceMismatchError, indexed

_Meta: Any = type(Generator)
# Operators receive another Python object for the same generator, so it is looked up by its address in C++.
_BY_ADDRESS: weakref.WeakValueDictionary[int, SimGenerator] = weakref.WeakValueDictionary()


class SimGenerator(Generator):
    """A generator of ``sim:i``: the draws of a CPU generator, for tensors on that device only."""

    __module__ = "rlstruct.testing.sim_device"
    _device: torch.device

    @staticmethod
    def __new__(cls: type[SimGenerator], device: torch.device) -> SimGenerator:
        """Make a CPU generator and remember the device."""
        generator: SimGenerator = Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        generator._device = indexed(device)
        _BY_ADDRESS[address_of(generator)] = generator
        return generator

    def __init__(self, device: torch.device) -> None:
        """Accept the argument of ``__new__``."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device that this generator draws for."""
        return self._device

    def clone_state(self) -> SimGenerator:
        """Return another generator of this device in the same state."""
        return rebuild_generator(str(self._device), self.get_state())

    def __reduce__(self) -> Any:
        return rebuild_generator, (str(self._device), self.get_state())


def rebuild_generator(device: str, state: torch.Tensor) -> SimGenerator:
    """Return a generator from its pickled state."""
    generator = SimGenerator(torch.device(device))
    generator.set_state(state)
    return generator


class _MadeByDevice(_Meta):  # type: ignore[misc]  # torch gives it no types
    def __call__(cls, device: Any = "cpu") -> Any:
        device = torch.device(device)
        return SimGenerator(device) if device.type == "sim" else Generator(device)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, Generator)


class _Maker(Generator, metaclass=_MadeByDevice):
    """Replacement for ``torch.Generator`` that also makes generators of simulated devices."""


def install() -> None:
    """Make ``torch.Generator`` support the simulated devices."""
    torch.Generator = _Maker  # type: ignore[misc]
    torch.serialization.add_safe_globals([rebuild_generator])


def check_generator(name: str, generator: Generator | None, device: torch.device) -> None:
    """Raise unless a generator belongs to the device that an operator works on."""
    if generator is None:
        return
    registered = _BY_ADDRESS.get(address_of(generator))
    home = generator.device if registered is None else registered.device
    if home != device:
        raise SimDeviceMismatchError(
            f"{calling_line()}: torch.{name}: the generator is on {home}, the tensor on {device}. Make it with "
            f"torch.Generator({str(device)!r}), or use counter-based numbers from rlstruct.functional.random."
        )
