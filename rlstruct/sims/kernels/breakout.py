"""MinAtar's Breakout for one environment, as `rlstruct.sims.breakout` does it for B. Part of rlstruct.sims.kernels."""

import functools

import warp as wp

from rlstruct.sims._minatar import _STICKY_STREAM, CELLS, LEFT, RIGHT, SIZE
from rlstruct.sims.breakout import ALL_BRICKS
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import randint, uniform

# ball_x, ball_y, ball_dir, pos, bricks, strike, last_x, last_y, last_action
State = wp.types.vector(length=9, dtype=wp.int64)
Frame = wp.types.vector(length=4, dtype=wp.uint8)

_ALL_BRICKS = wp.constant(wp.int64(ALL_BRICKS))
_LEFT, _RIGHT = wp.constant(wp.int64(LEFT)), wp.constant(wp.int64(RIGHT))
_ZERO, _ONE, _END = wp.constant(wp.int64(0)), wp.constant(wp.int64(1)), wp.constant(wp.int64(SIZE - 1))
_SIZE = wp.constant(SIZE)
_STICKY = wp.constant(wp.uint64(_STICKY_STREAM))


@wp.func
def initial(key: wp.uint64) -> State:
    """See `Breakout.initial`."""
    right = randint(key, wp.int64(2), wp.uint64(0))
    x, y = right * wp.int64(9), wp.int64(3)
    return State(x, y, wp.int64(2) + right, wp.int64(4), _ALL_BRICKS, _ZERO, x, y, _ZERO)


@wp.func
def play(s: State, action: wp.int64):
    """See `Breakout.play`, in the order of MinAtar's own file."""
    x, y, heading, bricks, pos = s[0], s[1], s[2], s[4], s[3]
    if action == _LEFT:
        pos = wp.max(_ZERO, pos - _ONE)
    elif action == _RIGHT:
        pos = wp.min(_END, pos + _ONE)
    new_x, new_y = x - _ONE, y - _ONE
    if heading == _ONE or heading == wp.int64(2):
        new_x = x + _ONE
    if heading >= wp.int64(2):
        new_y = y + _ONE
    if new_x < _ZERO or new_x > _END:
        new_x = wp.clamp(new_x, _ZERO, _END)
        heading = heading ^ _ONE
    strike, reward, lost = _ZERO, wp.float32(0.0), bool(False)
    brick = wp.clamp((new_y - _ONE) * wp.int64(_SIZE) + new_x, _ZERO, wp.int64(29))
    if new_y < _ZERO:
        new_y = _ZERO
        heading = heading ^ wp.int64(3)
    elif new_y >= _ONE and new_y <= wp.int64(3) and ((bricks >> brick) & _ONE) == _ONE:
        strike = _ONE
        if s[5] == _ZERO:
            bricks = bricks ^ (_ONE << brick)
            reward, new_y, heading = wp.float32(1.0), y, heading ^ wp.int64(3)
    elif new_y == _END:
        if bricks == _ZERO:
            bricks = _ALL_BRICKS
        if x == pos:
            new_y, heading = y, heading ^ wp.int64(3)
        elif new_x == pos:
            new_y, heading = y, heading ^ wp.int64(2)
        else:
            lost = bool(True)
    return State(new_x, new_y, heading, pos, bricks, strike, x, y, action), reward, lost


@wp.func
def observe(s: State, cell: int) -> Frame:
    """One cell: paddle, ball, the ball's last place, brick."""
    row, column = wp.int64(cell // _SIZE), wp.int64(cell % _SIZE)
    paddle = row == _END and column == s[3]
    ball = row == s[1] and column == s[0]
    trail = row == s[7] and column == s[6]
    bit = wp.int64(wp.clamp(cell - _SIZE, 0, 31))  # bits 30 and 31 are 0
    brick = row >= _ONE and ((s[4] >> bit) & _ONE) == _ONE
    return Frame(wp.uint8(paddle), wp.uint8(ball), wp.uint8(trail), wp.uint8(brick))


@functools.cache
def make_kernel(sticky_probability: float, actions: tuple[int, ...]) -> GameKernel:
    """Make the kernel for some settings.

    Args:
        sticky_probability: see `MinAtarGame`.
        actions: what each action of the space means.
    """
    Table = wp.types.vector(length=len(actions), dtype=wp.int64)
    table = Table(*actions)

    @wp.func
    def transition(s: State, action: wp.int64, key: wp.uint64):
        meant = wp.static(table)
        taken = meant[wp.clamp(int(action), 0, wp.static(len(actions) - 1))]
        if uniform(key, _STICKY) < wp.static(wp.float32(sticky_probability)):
            taken = s[8]
        moved, reward, lost = play(s, taken)
        return moved, reward, lost

    return GameKernel(State, Frame, initial, transition, observe, n_cells=CELLS)
