"""Both MountainCars for one environment, as `rlstruct.sims.mountain_car`. Part of rlstruct.sims.kernels."""

import warp as wp

from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import uniform
from rlstruct.sims.mountain_car import CONTINUOUS_GOAL, FORCE, GOAL, GRAVITY, MAX_SPEED, MAX_X, MIN_X, POWER

State = wp.types.vector(length=2, dtype=wp.float32)  # x, x_dot
Action = wp.types.vector(length=1, dtype=wp.float32)

_MIN_X, _MAX_X, _MAX_SPEED = wp.constant(MIN_X), wp.constant(MAX_X), wp.constant(MAX_SPEED)
_GRAVITY, _FORCE, _POWER = wp.constant(GRAVITY), wp.constant(FORCE), wp.constant(POWER)
_GOAL, _CONTINUOUS_GOAL = wp.constant(GOAL), wp.constant(CONTINUOUS_GOAL)


@wp.func
def initial(key: wp.uint64) -> State:
    """See `MountainCar.initial`."""
    return State(uniform(key, wp.uint64(0)) * 0.2 - 0.6, wp.float32(0.0))


@wp.func
def roll(s: State, push: wp.float32) -> State:
    """Roll for one step; a car that hits the left wall stops."""
    speed = wp.clamp(s[1] + push - _GRAVITY * wp.cos(3.0 * s[0]), -_MAX_SPEED, _MAX_SPEED)
    x = wp.clamp(s[0] + speed, _MIN_X, _MAX_X)
    if x == _MIN_X and speed < 0.0:
        speed = wp.float32(0.0)
    return State(x, speed)


@wp.func
def transition(s: State, action: wp.int64, key: wp.uint64):
    """See `MountainCar.transition`."""
    moved = roll(s, wp.float32(action - wp.int64(1)) * _FORCE)
    return moved, wp.float32(-1.0), moved[0] >= _GOAL and moved[1] >= 0.0


@wp.func
def continuous_transition(s: State, action: Action, key: wp.uint64):
    """See `MountainCarContinuous.transition`."""
    force = action[0]
    moved = roll(s, wp.clamp(force, -1.0, 1.0) * _POWER)
    terminated = moved[0] >= _CONTINUOUS_GOAL and moved[1] >= 0.0
    reward = -0.1 * (force * force)
    if terminated:
        reward = 100.0 - 0.1 * (force * force)
    return moved, reward, terminated


@wp.func
def observe(s: State, cell: int) -> State:
    """See `MountainCar.observe`."""
    return s


KERNEL = GameKernel(state=State, frame=State, initial=initial, transition=transition, observe=observe)
CONTINUOUS_KERNEL = GameKernel(
    state=State, frame=State, initial=initial, transition=continuous_transition, observe=observe
)
