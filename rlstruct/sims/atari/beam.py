"""The beam: collisions, and pixels if they are wanted, of all clocks since the TIA was last written to."""

import warp as wp

from rlstruct.sims.atari.objects import around, ball, missile, player, playfield
from rlstruct.sims.atari.state import Board, Registers

LINE = 228
BLANK = 68
FULL = wp.uint32(0xFFFFFFFF)


@wp.func
def hit(one: wp.uint32, other: wp.uint32, bit: int) -> int:
    """The bit of a collision, if there is one."""
    return wp.where((one & other) != wp.uint32(0), bit, 0)


@wp.func
def color_of(
    m: Registers, k: wp.uint32, right: bool,
    p0: wp.uint32, p1: wp.uint32, m0: wp.uint32, m1: wp.uint32, bl: wp.uint32, pf: wp.uint32,
) -> int:  # fmt: skip
    """Which object is in front at a pixel."""
    one = wp.uint32(1)
    color = m[0].color_background
    in_field = ((pf >> k) & one) != wp.uint32(0)
    in_ball = ((bl >> k) & one) != wp.uint32(0)
    field = m[0].color_playfield
    if (m[0].control & 6) == 2 and not in_ball:
        field = wp.where(right, m[0].color1, m[0].color0)
    if in_field or in_ball:
        color = field
    if (m[0].control & 4) == 0 or not (in_field or in_ball):
        if (((p1 | m1) >> k) & one) != wp.uint32(0):
            color = m[0].color1
        if (((p0 | m0) >> k) & one) != wp.uint32(0):
            color = m[0].color0
    return color


@wp.func
def move_star(m: Registers):
    """An HMM0 that comes 21 cycles after HMOVE keeps its pulses going: 17 in each line, with what ALE makes of it."""
    m[0].stars_line = (m[0].stars_line + 1) & 3
    shift = int(18)
    if m[0].stars_line == 1:
        shift = 33
    elif m[0].stars_line == 2:
        shift = 0
    elif m[0].stars_line == 3:
        shift = 17
    m[0].x_missile0 = around(m[0].x_missile0 - shift)


@wp.func
def missile0(m: Registers, word: int) -> wp.uint32:
    """Pixels of missile 0."""
    enabled = wp.where(m[0].hide0 != 0, 0, m[0].missile0)
    size = m[0].size0
    if m[0].stars != 0:
        # Two pixels in the first line of four, none in the second, one in the others.
        size = wp.where(m[0].stars_line == 1, 0x10, 0)
        if m[0].stars_line == 2:
            enabled = 0
    return missile(enabled, m[0].x_missile0, size, word)


@wp.func
def sweep_word(board: Board, i: int, m: Registers, word: int, begin: int, end: int):
    """Pixels `begin` to `end` of a line, within one word of 32."""
    inside = (FULL << wp.uint32(begin & 31)) & (FULL >> wp.uint32(31 - ((end - 1) & 31)))
    p0 = inside & player(
        wp.where(m[0].delay0 != 0, m[0].old_shape0, m[0].shape0), m[0].mirror0, m[0].x0, m[0].size0, m[0].skip0, word
    )
    p1 = inside & player(
        wp.where(m[0].delay1 != 0, m[0].old_shape1, m[0].shape1), m[0].mirror1, m[0].x1, m[0].size1, m[0].skip1, word
    )
    m0 = inside & missile0(m, word)
    m1 = inside & missile(wp.where(m[0].hide1 != 0, 0, m[0].missile1), m[0].x_missile1, m[0].size1, word)
    bl = inside & ball(m, word)
    pf = inside & playfield(m, word)
    c = m[0].collisions
    c |= hit(m0, p1, 0x0001) | hit(m0, p0, 0x0002) | hit(m1, p0, 0x0004) | hit(m1, p1, 0x0008)
    c |= hit(p0, pf, 0x0010) | hit(p0, bl, 0x0020) | hit(p1, pf, 0x0040) | hit(p1, bl, 0x0080)
    c |= hit(m0, pf, 0x0100) | hit(m0, bl, 0x0200) | hit(m1, pf, 0x0400) | hit(m1, bl, 0x0800)
    c |= hit(bl, pf, 0x1000) | hit(p0, p1, 0x2000) | hit(m0, m1, 0x4000)
    m[0].collisions = c
    if board.draw != 0:
        row = ((m[0].swept - m[0].frame_start) // LINE - m[0].first_line) * 160
        x = int(begin)
        while x < end:
            color = color_of(m, wp.uint32(x & 31), x >= 80, p0, p1, m0, m1, bl, pf)
            board.screen[i, m[0].n_frames & 1, row + x] = wp.uint8(color)
            x += 1


@wp.func
def blacken(board: Board, i: int, m: Registers, begin: int, end: int):
    """Make pixels of the line black."""
    if board.draw != 0:
        row = ((m[0].swept - m[0].frame_start) // LINE - m[0].first_line) * 160
        x = int(begin)
        while x < end:
            board.screen[i, m[0].n_frames & 1, row + x] = wp.uint8(0)
            x += 1


@wp.func
def sweep(board: Board, i: int, m: Registers, until: int):
    """Follow the beam to a clock, as far as it is inside the picture."""
    stop = wp.min(until, m[0].frame_start + LINE * (m[0].first_line + m[0].n_lines))
    while m[0].swept < stop:
        clock = (m[0].swept - m[0].frame_start) % LINE
        n = wp.min(LINE - clock, stop - m[0].swept)
        begin = wp.max(clock - BLANK, 0)
        end = clock + n - BLANK
        if (m[0].vblank & 2) != 0:
            blacken(board, i, m, begin, end)
        else:
            x = int(begin)
            while x < end:
                next_x = wp.min((x | 31) + 1, end)
                sweep_word(board, i, m, x >> 5, x, next_x)
                x = next_x
        if m[0].hmove_blank != 0 and begin < 8 and end > 0:
            blacken(board, i, m, begin, wp.min(8, end))
            if end >= 8:
                m[0].hmove_blank = 0
        m[0].swept += n
        if clock + n == LINE:
            m[0].skip0 = 0
            m[0].skip1 = 0
            m[0].mirror_playfield = m[0].control & 1
            if m[0].stars != 0:
                move_star(m)
