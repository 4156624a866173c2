"""MinAtar's Breakout for one environment, as NVIDIA Warp functions; `rlstruct.sims.breakout` has the same for B."""

import functools

from rlstruct.sims._minatar import CELLS, LEFT, RIGHT, SIZE, STICKY_STREAM
from rlstruct.sims.breakout import ALL_BRICKS, Breakout
from rlstruct.sims.kernels import wp
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.random import randint, uniform

# ball_x, ball_y, ball_dir, pos, bricks, strike, last_x, last_y, last_action
State = wp.types.vector(length=9, dtype=wp.int64)
Frame = wp.types.vector(length=4, dtype=wp.uint8)

LEFT_64, RIGHT_64, WALL = wp.int64(LEFT), wp.int64(RIGHT), wp.int64(ALL_BRICKS)
ZERO, ONE, END = wp.int64(0), wp.int64(1), wp.int64(SIZE - 1)


@wp.func
def initial(key: wp.uint64) -> State:
    """See `Breakout.initial`."""
    right = randint(key, wp.int64(2), wp.uint64(0))
    x, y = right * wp.int64(9), wp.int64(3)
    return State(x, y, wp.int64(2) + right, wp.int64(4), WALL, ZERO, x, y, ZERO)


@wp.func
def play(s: State, action: wp.int64):
    """See `Breakout.play`, in the order of MinAtar's own file."""
    x, y, heading, bricks, pos = s[0], s[1], s[2], s[4], s[3]
    if action == LEFT_64:
        pos = wp.max(ZERO, pos - ONE)
    elif action == RIGHT_64:
        pos = wp.min(END, pos + ONE)
    new_x, new_y = x - ONE, y - ONE
    if heading == ONE or heading == wp.int64(2):
        new_x = x + ONE
    if heading >= wp.int64(2):
        new_y = y + ONE
    if new_x < ZERO or new_x > END:
        new_x = wp.clamp(new_x, ZERO, END)
        heading = heading ^ ONE
    strike, reward, lost = ZERO, wp.float32(0.0), bool(False)
    brick = wp.clamp((new_y - ONE) * wp.int64(SIZE) + new_x, ZERO, wp.int64(29))
    if new_y < ZERO:
        new_y = ZERO
        heading = heading ^ wp.int64(3)
    elif new_y >= ONE and new_y <= wp.int64(3) and ((bricks >> brick) & ONE) == ONE:
        strike = ONE
        if s[5] == ZERO:
            bricks = bricks ^ (ONE << brick)
            reward, new_y, heading = wp.float32(1.0), y, heading ^ wp.int64(3)
    elif new_y == END:
        if bricks == ZERO:
            bricks = WALL
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
    row, column = wp.int64(cell // SIZE), wp.int64(cell % SIZE)
    paddle = row == END and column == s[3]
    ball = row == s[1] and column == s[0]
    trail = row == s[7] and column == s[6]
    bit = wp.int64(wp.clamp(cell - SIZE, 0, 31))  # bits 30 and 31 are 0
    brick = row >= ONE and ((s[4] >> bit) & ONE) == ONE
    return Frame(wp.uint8(paddle), wp.uint8(ball), wp.uint8(trail), wp.uint8(brick))


def make_kernel(env: Breakout) -> GameKernel:
    """Return the kernel of `Breakout`, for the actions and the stickiness of an environment."""
    return _make_kernel(env.sticky_probability, env.actions)


@functools.cache
def _make_kernel(sticky_probability: float, actions: tuple[int, ...]) -> GameKernel:
    Table = wp.types.vector(length=len(actions), dtype=wp.int64)
    table = Table(*actions)

    @wp.func
    def transition(s: State, action: wp.int64, key: wp.uint64):
        meant = wp.static(table)
        taken = meant[wp.clamp(int(action), 0, wp.static(len(actions) - 1))]
        if uniform(key, wp.uint64(STICKY_STREAM)) < wp.static(wp.float32(sticky_probability)):
            taken = s[8]
        moved, reward, lost = play(s, taken)
        return moved, reward, lost

    return GameKernel(State, Frame, initial, transition, observe, n_cells=CELLS)
