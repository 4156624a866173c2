"""One frame of every console: the kernel, and what it does before and after the instructions."""

import warp as wp

from rlstruct.sims.atari.controls import press
from rlstruct.sims.atari.cpu import run
from rlstruct.sims.atari.quick import run_quickly
from rlstruct.sims.atari.state import Board, Console, Outer, Registers, on_a_cpu
from rlstruct.sims.atari.tia import LINE, gray


@wp.func
def begin_frame(m: Registers, outer: Outer):
    """Count clocks and cycles from the begin of the line in which the last frame ended."""
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
    m.color0 = (m.color0 & 0xFE) | gray(outer)
    m.color1 = (m.color1 & 0xFE) | gray(outer)
    m.color_playfield = (m.color_playfield & 0xFE) | gray(outer)
    m.color_background = (m.color_background & 0xFE) | gray(outer)


@wp.func
def end_frame(m: Registers, outer: Outer):
    """Count its lines."""
    m.partial = 1 - m.ended
    outer.scanline = (m.cycles * 3 - m.frame_start) // LINE
    if m.ended != 0:
        outer.n_scanlines = outer.scanline


@wp.kernel(enable_backward=False, cuda_max_registers=208)
def run_frame(
    consoles: wp.array(dtype=Console),
    given: Board,
    actions: wp.array(dtype=int),
    running: wp.array(dtype=int),
    apart: int,
):
    """Run each console until its frame ends.

    Args:
        consoles: [B]
        given: what they share, and their memory.
        actions: ALE's number of the action of each.  [B]
        running: 0 leaves a console as it is.  [B]
        apart: every so many threads one runs a console, the others do nothing.
    """
    thread = wp.tid()
    i = thread // apart
    if thread % apart != 0 or running[i] == 0:
        return
    m = consoles[i]
    board = given
    press(board.outer[i], actions[i])
    if m.partial == 0:
        begin_frame(m, board.outer[i])
    m.ended = 0
    m.n_instructions = 0
    if on_a_cpu():
        run_quickly(board, i, m, board.outer[i])
    else:
        run(board, i, m, board.outer[i])
    end_frame(m, board.outer[i])
    consoles[i] = m
