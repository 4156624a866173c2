"""Acrobot as NVIDIA Warp functions of one environment; see `rlstruct.sims.acrobot`."""

# mypy: ignore-errors

import math

from rlstruct.sims.acrobot import COUPLING, D1, D2, MAX_SPEED_1, MAX_SPEED_2, STEP, WEIGHT_1, WEIGHT_2
from rlstruct.sims.kernels import GameKernel, wp
from rlstruct.sims.kernels.random import uniform

State = wp.types.vector(length=4, dtype=wp.float32)  # theta1, theta2, theta1_dot, theta2_dot
Frame = wp.types.vector(length=6, dtype=wp.float32)

PI, TURN = math.pi, 2 * math.pi


@wp.func
def initial(key: wp.uint64) -> State:
    s = State()
    for f in range(4):
        s[f] = (uniform(key, wp.uint64(f + 1)) - 0.5) * 0.2
    return s


@wp.func
def derivative(y: State, torque: wp.float32) -> State:
    """Return the time derivative of angles and velocities."""
    theta1, theta2, theta1_dot, theta2_dot = y[0], y[1], y[2], y[3]
    cos2, sin2 = wp.cos(theta2), wp.sin(theta2)
    d1 = D1 + 2.0 * COUPLING * cos2
    d2 = D2 + COUPLING * cos2
    phi2 = WEIGHT_2 * wp.sin(theta1 + theta2)
    phi1 = -COUPLING * theta2_dot * (theta2_dot + 2.0 * theta1_dot) * sin2 + WEIGHT_1 * wp.sin(theta1) + phi2
    pull = torque + d2 / d1 * phi1 - COUPLING * theta1_dot * theta1_dot * sin2 - phi2
    theta2_acc = pull / (D2 - d2 * d2 / d1)
    theta1_acc = -(d2 * theta2_acc + phi1) / d1
    return State(theta1_dot, theta2_dot, theta1_acc, theta2_acc)


@wp.func
def wrap(angle: wp.float32) -> wp.float32:
    """Wrap an angle into [-pi, pi]; two turns are enough."""
    turned = angle
    for _ in range(2):
        if turned > PI:
            turned = turned - TURN
        elif turned < -PI:
            turned = turned + TURN
    return turned


@wp.func
def transition(y: State, action: wp.int64, key: wp.uint64):
    torque = wp.float32(action - wp.int64(1))
    k1 = derivative(y, torque)
    k2 = derivative(y + k1 * (0.5 * STEP), torque)
    k3 = derivative(y + k2 * (0.5 * STEP), torque)
    k4 = derivative(y + k3 * STEP, torque)
    z = y + (k1 + 2.0 * k2 + 2.0 * k3 + k4) * (STEP / 6.0)
    theta1_dot, theta2_dot = wp.clamp(z[2], -MAX_SPEED_1, MAX_SPEED_1), wp.clamp(z[3], -MAX_SPEED_2, MAX_SPEED_2)
    moved = State(wrap(z[0]), wrap(z[1]), theta1_dot, theta2_dot)
    terminated = -wp.cos(moved[0]) - wp.cos(moved[1] + moved[0]) > 1.0
    reward = wp.float32(-1.0)
    if terminated:
        reward = wp.float32(0.0)
    return moved, reward, terminated


@wp.func
def observe(s: State) -> Frame:
    return Frame(wp.cos(s[0]), wp.sin(s[0]), wp.cos(s[1]), wp.sin(s[1]), s[2], s[3])


KERNEL = GameKernel(state=State, frame=Frame, initial=initial, transition=transition, observe=observe)
