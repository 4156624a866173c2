"""CartPole as NVIDIA Warp functions of one environment; see `rlstruct.sims.cart_pole`."""

# mypy: ignore-errors

from rlstruct.sims.cart_pole import FORCE, GRAVITY, HALF_LENGTH, MAX_THETA, MAX_X, POLE_MASS, STEP, TOTAL_MASS
from rlstruct.sims.kernels import GameKernel, wp
from rlstruct.sims.kernels.random import uniform

State = wp.types.vector(length=4, dtype=wp.float32)  # x, x_dot, theta, theta_dot


@wp.func
def initial(key: wp.uint64) -> State:
    s = State()
    for f in range(4):
        s[f] = (uniform(key, wp.uint64(f + 1)) - 0.5) * 0.1
    return s


@wp.func
def transition(s: State, action: wp.int64, key: wp.uint64):
    x, x_dot, theta, theta_dot = s[0], s[1], s[2], s[3]
    force = FORCE
    if action == wp.int64(0):
        force = -FORCE
    sin, cos = wp.sin(theta), wp.cos(theta)
    push = (force + POLE_MASS * HALF_LENGTH * theta_dot * theta_dot * sin) / TOTAL_MASS
    inertia = HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * cos * cos / TOTAL_MASS)
    theta_acc = (GRAVITY * sin - cos * push) / inertia
    x_acc = push - POLE_MASS * HALF_LENGTH * theta_acc * cos / TOTAL_MASS
    moved = State(x + STEP * x_dot, x_dot + STEP * x_acc, theta + STEP * theta_dot, theta_dot + STEP * theta_acc)
    terminated = wp.abs(moved[0]) > MAX_X or wp.abs(moved[2]) > MAX_THETA
    return moved, wp.float32(1.0), terminated


@wp.func
def observe(s: State) -> State:
    return s


KERNEL = GameKernel(state=State, frame=State, initial=initial, transition=transition, observe=observe)
