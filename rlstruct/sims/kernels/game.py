"""What a simulator gives to run as a kernel: how ``backend="warp"`` is extended. Part of rlstruct.sims.kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GameKernel:
    """A simulator as Warp functions of one environment; `TensorEnv.kernel` of your simulator returns one.

    The functions do what the methods of the same name do, for one environment instead of B, with the state as a vector
    that holds the fields in the order of the dataclass; ``rlstruct/sims/kernels/cart_pole.py`` is an example. They must
    agree with the methods: ``docs/kernels.md`` has a whole example, and compares them. All three are decorated with
    ``@wp.func``, and nothing in them depends on the device.

    Attributes:
        state: ``wp.types.vector(length=F, dtype=wp.float32)`` if all fields of the state are float32, with
            ``dtype=wp.int64`` if all are int64 or bool (as 0 and 1). Each field is a tensor [B].
        frame: what `observe` returns, ``wp.types.vector(length=D, dtype=wp.float32)``; with ``wp.uint8`` for bool.
        initial: ``(key: wp.uint64) -> state``; draw from the key with `rlstruct.sims.kernels.random`.
        transition: ``(state, action, key: wp.uint64) -> (state, reward: wp.float32, terminated: bool)``. The action is
            a ``wp.int64`` for a Discrete space, a vector of ``wp.float32`` for a Box of shape [A].
        observe: ``(state, cell: int) -> frame``: the frame of shape [D], or one cell of a picture.
        n_cells: how many cells a picture has, in the order of memory: 100 for [10, 10, D]; 1 for a frame of shape [D].
    """

    state: Any
    frame: Any
    initial: Any
    transition: Any
    observe: Any
    n_cells: int = 1
