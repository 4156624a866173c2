"""Matrix products of SAC's gradient steps as compiled code makes them: ``rlstruct_sac_products.py TASK PRECISION``."""

from __future__ import annotations

import sys

import torch
from sac_products import arguments, products
from serve import Batches, Task, serve
from torch import Tensor

from rlstruct.device import keep_freed_memory
from rlstruct.engine.compiled import Compiled


def steps(_: Task) -> Batches:
    """Take turns of the products of one gradient step."""
    keep_freed_memory()  # as learners do
    dtype = getattr(torch, sys.argv[2])

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    def weight(*shape: int) -> Tensor:
        *networks, n_in, n_out = shape
        return (ones(*networks, n_out, n_in) / n_in).mT  # as torch's layers have it

    made, multiply = arguments(ones, weight), Compiled(products)
    while True:
        multiply(*made)
        yield 1


if __name__ == "__main__":
    serve(steps)
