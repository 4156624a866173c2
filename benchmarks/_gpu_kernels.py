"""Kernels that only benchmarks/gpu.py needs; they need Warp."""

import torch
import warp as wp
from torch import Tensor

import rlstruct.sims.kernels  # noqa: F401 - starts Warp

_N = 2048
FLOPS_PER_THREAD = 16.0 * _N


@wp.kernel(enable_backward=False)
def fma_kernel(values: wp.array(dtype=wp.float32), n: int) -> None:
    """Eight independent chains of multiply-add per thread."""
    i = wp.tid()
    x = values[i]
    a, b, c, d = x, x + 1.0, x + 2.0, x + 3.0
    e, f, g, h = x + 4.0, x + 5.0, x + 6.0, x + 7.0
    for _ in range(n):
        a = a * 0.999 + x
        b = b * 0.999 + x
        c = c * 0.999 + x
        d = d * 0.999 + x
        e = e * 0.999 + x
        f = f * 0.999 + x
        g = g * 0.999 + x
        h = h * 0.999 + x
    values[i] = a + b + c + d + e + f + g + h


@wp.func
def load_one_by_one(weights: wp.array(dtype=wp.vec4f), row: int) -> wp.vec4f:
    """Load four weights as Warp does, in place of `rlstruct.sims.kernels.perceptron.load_four`."""
    return weights[row]


def multiply_add(values: Tensor) -> None:
    """Let one thread for each of the values [N] float32 compute, on torch's current stream."""
    device = values.device
    stream = wp.stream_from_torch(torch.cuda.current_stream(device)) if device.type == "cuda" else None
    arguments = [wp.from_torch(values), _N]
    wp.launch(fma_kernel, len(values), arguments, device=wp.device_from_torch(device), stream=stream)
