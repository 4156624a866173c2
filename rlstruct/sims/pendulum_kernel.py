"""Pendulum for one environment, as NVIDIA Warp functions; `rlstruct.sims.pendulum` has the same for B."""

import math

from rlstruct.sims.kernels import wp
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import uniform
from rlstruct.sims.pendulum import GRAVITY, LENGTH, MASS, MAX_SPEED, MAX_TORQUE, STEP, Pendulum

State = wp.types.vector(length=2, dtype=wp.float32)  # theta, theta_dot
Frame = wp.types.vector(length=3, dtype=wp.float32)
Action = wp.types.vector(length=1, dtype=wp.float32)

PI, TURN = math.pi, 2 * math.pi


@wp.func
def initial(key: wp.uint64) -> State:
    """See `Pendulum.initial`."""
    theta = uniform(key, wp.uint64(1)) * 2.0 - 1.0
    return State(theta * PI, uniform(key, wp.uint64(2)) * 2.0 - 1.0)


@wp.func
def transition(s: State, action: Action, key: wp.uint64):
    """See `Pendulum.transition`."""
    theta, theta_dot = s[0], s[1]
    torque = wp.clamp(action[0], -MAX_TORQUE, MAX_TORQUE)
    turned = wp.mod(theta + PI, TURN)  # of the sign of its first argument, where Python's is of that of the second
    if turned < 0.0:
        turned += TURN
    upright = turned - PI
    cost = upright * upright + 0.1 * (theta_dot * theta_dot) + 0.001 * (torque * torque)
    acceleration = 3.0 * GRAVITY / (2.0 * LENGTH) * wp.sin(theta) + 3.0 / (MASS * LENGTH * LENGTH) * torque
    speed = wp.clamp(theta_dot + acceleration * STEP, -MAX_SPEED, MAX_SPEED)
    return State(theta + speed * STEP, speed), -cost, bool(False)


@wp.func
def observe(s: State, cell: int) -> Frame:
    """See `Pendulum.observe`."""
    return Frame(wp.cos(s[0]), wp.sin(s[0]), s[1])


def make_kernel(env: Pendulum) -> GameKernel:
    """Return the kernel of `Pendulum`."""
    return GameKernel(state=State, frame=Frame, initial=initial, transition=transition, observe=observe)
