"""Devices of the simulated accelerator, and the error for tensors of two devices that meet."""

from __future__ import annotations

from typing import Final

import torch

from rlstruct.errors import DeviceMismatchError

DEVICE_COUNT: Final = 4


class SimDeviceMismatchError(DeviceMismatchError, RuntimeError):
    """Error: tensors of two devices met in one operation. A RuntimeError too, because CUDA raises one."""

    __module__ = "rlstruct.testing.sim_device"  # where users import it


def indexed(device: torch.device) -> torch.device:
    """Return a simulated device with its index, 0 by default; any other device unchanged."""
    if device.type != "sim":
        return device
    index = device.index or 0
    if index >= DEVICE_COUNT:
        raise RuntimeError(
            f"invalid device ordinal: {device} does not exist; there are sim:0 to sim:{DEVICE_COUNT - 1}."
        )
    return torch.device("sim", index)
