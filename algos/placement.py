"""Environments and weights where a batcher wants them. Layer 4."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlstruct.device import resolve_device
from rlstruct.vec_env import DeviceEnv, VecEnv


@dataclass(frozen=True)
class PlacedEnv:
    """A factory of environments that appear on ``device``, wherever they compute.

    Attributes:
        create_env: the factory of the environments themselves. If it has a parameter ``device``, it is told ``device``,
            so that a simulator can be made there.
        device: where observations appear and actions are expected.
    """

    create_env: Callable[..., VecEnv]
    device: str

    def __call__(self, **arguments: object) -> VecEnv:
        """Create the environments, and wrap them in a DeviceEnv if they are elsewhere."""
        if "device" in inspect.signature(self.create_env).parameters:
            arguments = {"device": self.device, **arguments}
        env = self.create_env(**arguments)
        return env if env.device == resolve_device(self.device) else DeviceEnv(env, self.device)


def cpu_copy(model: nn.Module) -> nn.Module:
    """Copy a module to the CPU, from where it can travel to any process.

    Args:
        model: on any device.
    """
    # Copied parameter by parameter while it moves: a deepcopy on the device would need its memory twice.
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        moved = tensor.detach().to("cpu", copy=True)
        memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(model, memo)
