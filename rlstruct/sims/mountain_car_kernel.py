"""Both MountainCars for one environment, as NVIDIA Warp functions; `rlstruct.sims.mountain_car` has the same for B."""

from rlstruct.sims.kernels import wp
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import uniform
from rlstruct.sims.mountain_car import (
    CONTINUOUS_GOAL,
    FORCE,
    GOAL,
    GRAVITY,
    MAX_SPEED,
    MAX_X,
    MIN_X,
    POWER,
    MountainCar,
    MountainCarContinuous,
)

State = wp.types.vector(length=2, dtype=wp.float32)  # x, x_dot
Action = wp.types.vector(length=1, dtype=wp.float32)


@wp.func
def initial(key: wp.uint64) -> State:
    """See `MountainCar.initial`."""
    return State(uniform(key, wp.uint64(0)) * 0.2 - 0.6, wp.float32(0.0))


@wp.func
def roll(s: State, push: wp.float32) -> State:
    """Roll for one step; a car that hits the left wall stops."""
    speed = wp.clamp(s[1] + push - GRAVITY * wp.cos(3.0 * s[0]), -MAX_SPEED, MAX_SPEED)
    x = wp.clamp(s[0] + speed, MIN_X, MAX_X)
    if x == MIN_X and speed < 0.0:
        speed = wp.float32(0.0)
    return State(x, speed)


@wp.func
def transition(s: State, action: wp.int64, key: wp.uint64):
    """See `MountainCar.transition`."""
    moved = roll(s, wp.float32(action - wp.int64(1)) * FORCE)
    return moved, wp.float32(-1.0), moved[0] >= GOAL and moved[1] >= 0.0


@wp.func
def continuous_transition(s: State, action: Action, key: wp.uint64):
    """See `MountainCarContinuous.transition`."""
    force = action[0]
    moved = roll(s, wp.clamp(force, -1.0, 1.0) * POWER)
    terminated = moved[0] >= CONTINUOUS_GOAL and moved[1] >= 0.0
    reward = -0.1 * (force * force)
    if terminated:
        reward = 100.0 - 0.1 * (force * force)
    return moved, reward, terminated


@wp.func
def observe(s: State, cell: int) -> State:
    """See `MountainCar.observe`."""
    return s


def make_kernel(env: MountainCar | MountainCarContinuous) -> GameKernel:
    """Return the kernel of either car."""
    move = continuous_transition if isinstance(env, MountainCarContinuous) else transition
    return GameKernel(state=State, frame=State, initial=initial, transition=move, observe=observe)
