"""CartPole for one environment, as `rlstruct.sims.cart_pole` does it for B. Part of rlstruct.sims.kernels."""

import warp as wp

from rlstruct.sims.cart_pole import (
    FORCE,
    GRAVITY,
    HALF_LENGTH,
    MAX_THETA,
    MAX_X,
    POLE,
    POLE_MASS,
    STEP,
    TOTAL_MASS,
)
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import uniform

State = wp.types.vector(length=4, dtype=wp.float32)  # x, x_dot, theta, theta_dot

_STEP, _MAX_X, _MAX_THETA = wp.constant(STEP), wp.constant(MAX_X), wp.constant(MAX_THETA)
_PUSH, _POLE, _GRAVITY = wp.constant(FORCE / TOTAL_MASS), wp.constant(POLE / TOTAL_MASS), wp.constant(GRAVITY)
_INERTIA = wp.constant(HALF_LENGTH * 4 / (3 * GRAVITY))
_SWING = wp.constant(HALF_LENGTH * POLE_MASS / (TOTAL_MASS * GRAVITY))


@wp.func
def initial(key: wp.uint64) -> State:
    """See `CartPole.initial`."""
    s = State()
    for f in range(4):
        s[f] = (uniform(key, wp.uint64(f + 1)) - 0.5) * 0.1
    return s


@wp.func
def transition(s: State, action: wp.int64, key: wp.uint64):
    """See `CartPole.transition`, whose docstring has the equations."""
    x, x_dot, theta, theta_dot = s[0], s[1], s[2], s[3]
    cos, sin = wp.cos(theta), wp.sin(theta)
    force = _PUSH
    if action == wp.int64(0):
        force = -_PUSH
    push = force + _POLE * theta_dot * theta_dot * sin
    theta_acc = (sin - cos * push / _GRAVITY) / (_INERTIA - _SWING * cos * cos)
    x_acc = push - _POLE * theta_acc * cos
    moved = State(x + _STEP * x_dot, x_dot + _STEP * x_acc, theta + _STEP * theta_dot, theta_dot + _STEP * theta_acc)
    terminated = wp.abs(moved[0]) > _MAX_X or wp.abs(moved[2]) > _MAX_THETA
    return moved, wp.float32(1.0), terminated


@wp.func
def observe(s: State, cell: int) -> State:
    """See `CartPole.observe`."""
    return s


KERNEL = GameKernel(state=State, frame=State, initial=initial, transition=transition, observe=observe)
