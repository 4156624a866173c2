"""One frame of every console: the kernel, and what it does before and after the instructions."""

import warp as wp

from rlstruct.sims.atari.controls import press
from rlstruct.sims.atari.cpu import step
from rlstruct.sims.atari.state import Board, Console, Registers
from rlstruct.sims.atari.tia import LINE, gray

MOST_INSTRUCTIONS = 25000  # of a frame; ALE's limit


@wp.func
def begin_frame(m: Registers):
    """Count clocks and cycles from the begin of the line in which the last frame ended."""
    cycles = m[0].cycles
    phase = (cycles * 3 - m[0].frame_start) % LINE
    m[0].timer_set -= cycles
    m[0].timer_expired -= cycles
    m[0].dump_end -= cycles
    m[0].hmove_clock -= cycles * 3
    m[0].vsync_end -= cycles * 3
    m[0].cycles = 0
    m[0].frame_start = -phase
    m[0].swept = LINE * m[0].first_line - phase
    m[0].n_frames += 1
    m[0].color0 = (m[0].color0 & 0xFE) | gray(m)
    m[0].color1 = (m[0].color1 & 0xFE) | gray(m)
    m[0].color_playfield = (m[0].color_playfield & 0xFE) | gray(m)
    m[0].color_background = (m[0].color_background & 0xFE) | gray(m)


@wp.kernel(enable_backward=False)
def run_frame(
    consoles: wp.array(dtype=Console), board: Board, actions: wp.array(dtype=int), running: wp.array(dtype=int)
):
    """Run each console until its frame ends.

    Args:
        consoles: [B]
        board: what they share, and their memory.
        actions: ALE's number of the action of each.  [B]
        running: 0 leaves a console as it is.  [B]
    """
    i = wp.tid()
    if running[i] == 0:
        return
    m = wp.zeros(shape=(1,), dtype=Console)
    m[0] = consoles[i]
    press(m, actions[i])
    if m[0].partial == 0:
        begin_frame(m)
    m[0].ended = 0
    n = int(0)
    while m[0].ended == 0 and n < MOST_INSTRUCTIONS:
        step(board, i, m)
        n += 1
    m[0].partial = 1 - m[0].ended
    m[0].scanline = (m[0].cycles * 3 - m[0].frame_start) // LINE
    if m[0].ended != 0:
        m[0].n_scanlines = m[0].scanline
    consoles[i] = m[0]
