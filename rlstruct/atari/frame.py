"""Kernel that runs one frame of every console: press the controllers, run instructions, count lines."""

import warp as wp

from rlstruct.atari.cpu import run
from rlstruct.atari.games import JOYSTICK, PADDLE
from rlstruct.atari.spans import draw_line
from rlstruct.atari.state import MOST_SPANS, Board, Console, Outer, Registers, Two, log_word, puts_off, set_log_word
from rlstruct.atari.tia import LINE, gray

PADDLE_STEP = 23000  # change of a paddle's resistance per frame, ohms

LEFT, RIGHT = 4, 8  # up and down are 1 and 2, as in SWCHA
DIRECTIONS = wp.uint64(0x6A59248100)
"""Directions of ALE's actions 0 to 9, four bits each. Action 1 is FIRE alone; 10 to 17 are 2 to 9 with FIRE."""


@wp.func
def turn(outer: Outer, ohms: int, pressed: int) -> int:
    """Return a paddle's resistance after a frame of turning."""
    turned = ohms
    if (pressed & RIGHT) != 0:
        turned -= PADDLE_STEP
    if (pressed & LEFT) != 0:
        turned += PADDLE_STEP
    return wp.clamp(turned, outer.paddle_least, outer.paddle_most)


@wp.func
def press(outer: Outer, action: int):
    """Apply an action to the player's controller, and release the others."""
    fire = wp.where(action == 1 or action >= 10, 1, 0)
    direction = wp.where(action >= 10, action - 8, action)
    pressed = int((DIRECTIONS >> wp.uint64(4 * direction)) & wp.uint64(15))
    outer.trigger = Two(0x80, 0x80)
    for k in range(2):
        if outer.controller == JOYSTICK + k:
            outer.sticks = 0xFF ^ (pressed << (4 - 4 * k))
            outer.trigger[k] = 0x80 * (1 - fire)
        elif outer.controller == PADDLE + k:
            outer.sticks = 0xFF ^ ((0x80 * fire) >> k)
            outer.paddle[k] = turn(outer, outer.paddle[k], pressed)


@wp.func
def begin_frame(m: Registers, outer: Outer):
    """Reset the origin of clocks and cycles to the start of the line in which the last frame ended."""
    cycles = m.cycles
    phase = (cycles * 3 - m.frame_start) % LINE
    outer.timer_set -= cycles
    outer.timer_expired -= cycles
    outer.dump_end -= cycles
    outer.hmove_clock -= cycles * 3
    outer.vsync_end -= cycles * 3
    m.cycles = 0
    m.frame_start = -phase
    m.swept = LINE * outer.first_line - phase
    outer.unfollowed = m.swept
    outer.n_frames += 1
    for k in range(4):
        m.color[k] = (m.color[k] & 0xFE) | gray(outer)


@wp.func
def end_frame(m: Registers, outer: Outer):
    """Count the lines of the frame, and note if it ran out of instructions."""
    m.partial = 1 - m.ended
    outer.scanline = (m.cycles * 3 - m.frame_start) // LINE
    if m.ended != 0:
        outer.n_scanlines = outer.scanline


@wp.kernel(enable_backward=False, cuda_max_registers=128)
def run_frame(
    consoles: wp.array(dtype=Console),
    initial_board: Board,
    actions: wp.array(dtype=int),  # ALE's numbers
    running: wp.array(dtype=int),  # 0 leaves a console unchanged
    threads_per_console: int,  # threads per console; the first one runs it, the others do nothing
):
    """Run each console until its frame ends."""
    thread = wp.tid()
    i = thread // threads_per_console
    if thread % threads_per_console != 0 or running[i] == 0:
        return
    m = consoles[i]
    board = initial_board
    press(board.outer[i], actions[i])
    if m.partial == 0:
        begin_frame(m, board.outer[i])
    m.ended = 0
    m.n_instructions = 0
    run(board, i, consoles, m, board.outer[i])
    end_frame(m, board.outer[i])
    consoles[i] = m
    if puts_off(board):
        set_log_word(board.log, i, MOST_SPANS, 0, wp.uint32(board.n_spans))


@wp.kernel(enable_backward=False)
def draw_frame(consoles: wp.array(dtype=Console), initial_board: Board, running: wp.array(dtype=int)):
    """Draw what `run_frame` has put off, each line of each console in a thread."""
    i, line = wp.tid()
    if running[i] == 0:
        return
    board = initial_board
    board.n_spans = int(log_word(board.log, i, MOST_SPANS, 0))
    m = Console()
    m.frame_start = consoles[i].frame_start
    begin = m.frame_start + LINE * (board.outer[i].first_line + line)
    draw_line(board, i, m, board.outer[i], begin, wp.min(begin + LINE, consoles[i].swept))
