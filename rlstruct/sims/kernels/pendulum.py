"""Pendulum for one environment, as `rlstruct.sims.pendulum` does it for B. Part of rlstruct.sims.kernels."""

import math

import warp as wp

from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import uniform
from rlstruct.sims.pendulum import GRAVITY, LENGTH, MASS, MAX_SPEED, MAX_TORQUE, STEP

State = wp.types.vector(length=2, dtype=wp.float32)  # theta, theta_dot
Frame = wp.types.vector(length=3, dtype=wp.float32)
Action = wp.types.vector(length=1, dtype=wp.float32)

_PI, _TURN = wp.constant(math.pi), wp.constant(2.0 * math.pi)
_STEP, _MAX_SPEED, _MAX_TORQUE = wp.constant(STEP), wp.constant(MAX_SPEED), wp.constant(MAX_TORQUE)
_FALL, _PUSH = wp.constant(3.0 * GRAVITY / (2.0 * LENGTH)), wp.constant(3.0 / (MASS * LENGTH**2))


@wp.func
def initial(key: wp.uint64) -> State:
    """See `Pendulum.initial`."""
    theta = uniform(key, wp.uint64(1)) * 2.0 - 1.0
    return State(theta * _PI, uniform(key, wp.uint64(2)) * 2.0 - 1.0)


@wp.func
def transition(s: State, action: Action, key: wp.uint64):
    """See `Pendulum.transition`."""
    theta, theta_dot = s[0], s[1]
    torque = wp.clamp(action[0], -_MAX_TORQUE, _MAX_TORQUE)
    turned = wp.mod(theta + _PI, _TURN)  # of the sign of its first argument, where Python's is of that of the second
    if turned < 0.0:
        turned += _TURN
    upright = turned - _PI
    cost = upright * upright + 0.1 * (theta_dot * theta_dot) + 0.001 * (torque * torque)
    acceleration = _FALL * wp.sin(theta) + _PUSH * torque
    speed = wp.clamp(theta_dot + acceleration * _STEP, -_MAX_SPEED, _MAX_SPEED)
    return State(theta + speed * _STEP, speed), -cost, bool(False)


@wp.func
def observe(s: State, cell: int) -> Frame:
    """See `Pendulum.observe`."""
    return Frame(wp.cos(s[0]), wp.sin(s[0]), s[1])


KERNEL = GameKernel(state=State, frame=Frame, initial=initial, transition=transition, observe=observe)
