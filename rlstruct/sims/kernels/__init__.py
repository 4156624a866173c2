"""Simulators as NVIDIA Warp kernels, one source for CPU and CUDA: ``backend="warp"``.

A game is a `GameKernel`: three small Warp functions of one environment. Around them,
`rlstruct.sims.kernels.advance` makes a kernel that collects T steps with a small network in one launch. A kernel is
compiled for a device on first use there, and kept in Warp's cache (``WARP_CACHE_PATH`` moves it).

Needs the extra ``warp``. rlstruct imports this package only once a simulator asks for it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstruct.errors import MissingPackageError, how_to_install

try:
    import warp as wp
except ImportError as error:
    raise MissingPackageError(
        f"rlstruct: backend='warp' needs NVIDIA Warp, which is not installed. {how_to_install('warp')}, or use "
        "backend='torch'."
    ) from error

__all__ = ["GameKernel", "launch", "quietly", "start", "wp"]


@dataclass(frozen=True)
class GameKernel:
    """A simulator as Warp functions of one environment; `TensorEnv.kernel` of your simulator returns one.

    Each function does for one environment what the method of the same name does for B. The state is a vector of the
    dataclass's fields, in their order. Decorate all three with ``@wp.func``; the same functions serve every device.
    ``rlstruct/sims/cart_pole_kernel.py`` is an example, and ``docs/kernels.md`` shows how to compare functions and
    methods.

    Attributes:
        state: ``wp.types.vector(length=F, dtype=wp.float32)``; each field of the state is a float32 tensor [B].
        frame: result of `observe`, ``wp.types.vector(length=D, dtype=wp.float32)``.
        initial: ``(key: wp.uint64) -> state``; draw from the key with `rlstruct.sims.kernels.random`.
        transition: ``(state, action: wp.int64, key: wp.uint64) -> (state, reward: wp.float32, terminated: bool)``.
        observe: ``(state) -> frame``.
    """

    state: Any
    frame: Any
    initial: Any
    transition: Any
    observe: Any


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence Warp's compilation messages; errors are shown."""
    level = wp.config.log_level
    wp.config.log_level = wp.LOG_ERROR
    try:
        yield
    finally:
        wp.config.log_level = level


def start() -> None:
    """Initialise Warp without its banner. This opens CUDA's driver, so nothing calls it during an import."""
    with quietly():
        wp.init()


def launch(device: torch.device, kernel: Any, shape: int | Sequence[int], *inputs: Any, block: int = 256) -> None:
    """Launch a kernel on torch's current stream, without waiting or copying; ``block`` is the GPU block size."""
    arguments = [wp.from_torch(value) if isinstance(value, Tensor) else value for value in inputs]
    stream = None
    if device.type == "cuda":
        stream = wp.stream_from_torch(torch.cuda.current_stream(device))
    with quietly():
        wp.launch(kernel, shape, inputs=arguments, device=str(device), stream=stream, block_dim=block)
