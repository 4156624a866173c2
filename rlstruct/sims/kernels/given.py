"""Actions that are known before the launch, or drawn at random in it. Part of rlstruct.sims.kernels."""

from types import SimpleNamespace
from typing import Any

import warp as wp

from rlstruct.sims.kernels.random import EXPLORE, randint, uniform


def make_given(state: Any, action: Any, n_parts: int, access: SimpleNamespace) -> tuple[Any, Any]:
    """Make the chooser of `rlstruct.sims.kernels.advance.make_advance` for plans, repetition and exploration.

    Args:
        state: vector type of the state.
        action: dtype of actions.
        n_parts: A, 0 for Discrete.
        access: from `rlstruct.sims.kernels.memory.make_access`.

    Returns:
        Its struct and its function.
    """
    get, Action, n_lanes = access.get, access.Action, max(1, n_parts)

    @wp.struct
    class Given:
        actions: wp.array3d(dtype=action)  # [K, B, A], or [1, B, A] to repeat it
        stride: int  # 1 for a plan, 0 to repeat
        exploring: bool  # draw instead
        n: wp.int64  # how many actions there are (Discrete)
        low: wp.float32  # their bounds (Box)
        high: wp.float32

    @wp.func
    def number(by: Given, key: wp.uint64) -> wp.int64:
        return randint(key, by.n, EXPLORE)

    @wp.func
    def vector(by: Given, key: wp.uint64) -> Action:
        drawn = Action()
        for a in range(wp.static(n_lanes)):
            drawn[a] = uniform(key, EXPLORE + wp.uint64(a + 1)) * (by.high - by.low) + by.low
        return drawn

    explore = number if n_parts == 0 else vector

    @wp.func
    def choose(by: Given, k: int, i: int, s: state, key: wp.uint64) -> Action:
        if by.exploring:
            return explore(by, key)
        return get(by.actions, k * by.stride, i)

    return Given, choose
