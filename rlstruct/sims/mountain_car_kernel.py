"""MountainCar as NVIDIA Warp functions of one environment; see `rlstruct.sims.mountain_car`."""

# mypy: ignore-errors

from rlstruct.sims.kernels import GameKernel, wp
from rlstruct.sims.kernels.random import uniform
from rlstruct.sims.mountain_car import FORCE, GOAL, GRAVITY, MAX_SPEED, MAX_X, MIN_X

State = wp.types.vector(length=2, dtype=wp.float32)  # x, x_dot


@wp.func
def initial(key: wp.uint64) -> State:
    return State(uniform(key, wp.uint64(0)) * 0.2 - 0.6, wp.float32(0.0))


@wp.func
def transition(s: State, action: wp.int64, key: wp.uint64):
    push = wp.float32(action - wp.int64(1)) * FORCE
    speed = wp.clamp(s[1] + push - GRAVITY * wp.cos(3.0 * s[0]), -MAX_SPEED, MAX_SPEED)
    x = wp.clamp(s[0] + speed, MIN_X, MAX_X)
    if x == MIN_X and speed < 0.0:
        speed = wp.float32(0.0)
    return State(x, speed), wp.float32(-1.0), x >= GOAL and speed >= 0.0


@wp.func
def observe(s: State) -> State:
    return s


KERNEL = GameKernel(state=State, frame=State, initial=initial, transition=transition, observe=observe)
