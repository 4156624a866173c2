"""The beam: collisions, and pixels on request, of a span of clocks in which no write changes the picture."""

import warp as wp

from rlstruct.atari.state import Outer, Registers, Shared, Two, pixels, set_pixels
from rlstruct.atari.tia import BLANK, LINE
from rlstruct.atari.tia_objects import NO_PIXELS, around, ball, missile, player, playfield

WORDS = 40  # of four pixels in a line
UNBLANKED = BLANK + 8  # clock of a line at which the blank of an HMOVE ends
FULL = wp.uint32(0xFFFFFFFF)
EACH_BYTE = wp.uint32(0x01010101)
STAR_SHIFTS = wp.uint32(0x11002112)
"""Pixels to the left by which a star moves in lines 0 to 3, one byte each."""
Objects = wp.types.vector(length=6, dtype=wp.uint32)
P0, P1, M0, M1, BALL, FIELD = range(6)
COLLISIONS = (
    (M0, P1), (M0, P0), (M1, P0), (M1, P1), (P0, FIELD), (P0, BALL), (P1, FIELD), (P1, BALL), (M0, FIELD), (M0, BALL),
    (M1, FIELD), (M1, BALL), (BALL, FIELD), (P0, P1), (M0, M1),
)  # fmt: skip
"""Two objects for each bit of `Console.collisions`."""


@wp.func
def four_bytes(bits: wp.uint32) -> wp.uint32:
    """Expand each of the lowest four bits to a byte of ones or zeros."""
    return (((bits & wp.uint32(15)) * wp.uint32(0x00204081)) & EACH_BYTE) * wp.uint32(255)


@wp.func
def mix(under: wp.uint32, over: int, bits: wp.uint32) -> wp.uint32:
    """Paint those of four pixels whose bits are set in another colour."""
    where = four_bytes(bits)
    return (under & ~where) | (EACH_BYTE * wp.uint32(over) & where)


@wp.func
def move_star(m: Registers):
    """Move missile 0 each line, as ALE does once HMM0 was written 21 cycles after HMOVE, whose pulses never stop."""
    m.stars_line = (m.stars_line + 1) & 3
    shift = (STAR_SHIFTS >> wp.uint32(8 * m.stars_line)) & wp.uint32(0xFF)
    m.position[2] = around(m.position[2] - int(shift))


@wp.func
def end_lines(m: Registers, n_lines: int):
    """Do what happens at the ends of lines."""
    m.skip = Two()
    m.mirror_playfield = m.control & 1
    if m.stars != 0:
        for _line in range(n_lines):
            move_star(m)


@wp.func(inline=True)
def overlap(objects: Objects) -> wp.uint32:
    """Return the pixels covered by at least two objects."""
    twice = NO_PIXELS
    pixels = NO_PIXELS
    for k in range(6):
        twice |= pixels & objects[k]
        pixels |= objects[k]
    return twice


@wp.func(inline=True)
def sweep_word(board: Shared, i: int, m: Registers, outer: Outer, word: int, begin: int, end: int):
    """Process pixels `begin` to `end` of a line, all within one 32-pixel word."""
    inside = (FULL << wp.uint32(begin & 31)) & (FULL >> wp.uint32(31 - ((end - 1) & 31)))
    objects = Objects()
    black = wp.where(m.hmove_blank != 0 and word == 0, inside & wp.uint32(0xFF), NO_PIXELS)
    black = wp.where((m.vblank & 2) != 0, inside, black)
    if (m.vblank & 2) == 0:
        for k in range(2):
            objects[P0 + k] = inside & player(m, k, word)
            objects[M0 + k] = inside & missile(m, k, word)
        objects[BALL] = inside & ball(m, word)
        objects[FIELD] = inside & playfield(m, word)
        if overlap(objects) != NO_PIXELS:
            for bit in range(wp.static(len(COLLISIONS))):
                both = objects[wp.static(COLLISIONS[bit][0])] & objects[wp.static(COLLISIONS[bit][1])]
                m.collisions |= wp.where(both != NO_PIXELS, 1 << bit, 0)
    if board.draw != 0:
        draw_word(board, i, m, outer, word, inside, black, objects)


@wp.func(inline=True)
def draw_word(
    board: Shared, i: int, m: Registers, outer: Outer, word: int, inside: wp.uint32, black: wp.uint32, objects: Objects
):
    """Draw the pixels `inside`, four at a time. A missile has the colour of its player, the ball of the playfield."""
    begin = ((m.swept - m.frame_start) // LINE - outer.first_line) * WORDS + word * 8
    which = i * 2 + (outer.n_frames & 1)
    field_in_front = wp.where((m.control & 4) != 0, objects[FIELD] | objects[BALL], NO_PIXELS)
    first = (objects[P0] | objects[M0]) & ~field_in_front
    second = (objects[P1] | objects[M1]) & ~field_in_front
    something = first | second | objects[FIELD] | objects[BALL] | black
    background = EACH_BYTE * wp.uint32(m.color[3])
    k = int(0)
    if something == NO_PIXELS and inside == FULL:
        while k < 8:
            set_pixels(board.screen, which, board.picture, begin + k, background)
            k += 1
        return
    while k < 8:
        shift = wp.uint32(4 * k)
        kept = (inside >> shift) & wp.uint32(15)
        if kept != wp.uint32(0):
            four = background
            if ((something >> shift) & wp.uint32(15)) != wp.uint32(0):
                field = wp.where(word * 8 + k >= 20, m.color[1], m.color[0])
                field = wp.where((m.control & 6) == 2, field, m.color[2])
                four = mix(mix(four, field, objects[FIELD] >> shift), m.color[2], objects[BALL] >> shift)
                four = mix(mix(four, m.color[1], second >> shift), m.color[0], first >> shift)
                four = mix(four, 0, black >> shift)
            if kept != wp.uint32(15):
                where = four_bytes(kept)
                four = (four & where) | (pixels(board.screen, which, board.picture, begin + k) & ~where)
            set_pixels(board.screen, which, board.picture, begin + k, four)
        k += 1


@wp.func(inline=True)
def repeat_line(board: Shared, i: int, m: Registers, outer: Outer, n_lines: int):
    """Copy the last line to the next whole lines: nothing changes, so they have no new collisions."""
    if board.draw != 0:
        which = i * 2 + (outer.n_frames & 1)
        at = ((m.swept - m.frame_start) // LINE - outer.first_line) * WORDS
        end = at + n_lines * WORDS
        while at < end:
            set_pixels(board.screen, which, board.picture, at, pixels(board.screen, which, board.picture, at - WORDS))
            at += 1
    m.swept += n_lines * LINE


@wp.func
def picture_end(m: Registers, outer: Outer) -> int:
    """Return the clock at which the last line of the picture ends."""
    return m.frame_start + LINE * (outer.first_line + outer.n_lines)


@wp.func(inline=True)
def sweep_line(board: Shared, i: int, m: Registers, outer: Outer, stop: int):
    """Follow the beam to the end of a line, or to a clock before; or on through lines that repeat it."""
    clock = (m.swept - m.frame_start) % LINE
    n = wp.min(LINE - clock, stop - m.swept)
    begin = wp.max(clock - BLANK, 0)
    end = clock + n - BLANK
    x = int(begin)
    if board.draw == 0 and (m.vblank & 2) != 0:
        x = end
    while x < end:
        next_x = wp.min((x | 31) + 1, end)
        sweep_word(board, i, m, outer, x >> 5, x, next_x)
        x = next_x
    # Nonzero if this line may differ from the next.
    special = m.skip[0] | m.skip[1] | m.stars | m.hmove_blank | (m.mirror_playfield ^ (m.control & 1))
    if begin < 8 and end >= 8:
        m.hmove_blank = 0
    m.swept += n
    if clock + n == LINE:
        end_lines(m, 1)
        if begin == 0 and special == 0:
            repeat_line(board, i, m, outer, (stop - m.swept) // LINE)


@wp.func(inline=True)
def sweep(board: Shared, i: int, m: Registers, outer: Outer, until: int):
    """Follow the beam to a clock, line by line, within the picture; the last line may be partial."""
    stop = wp.min(until, picture_end(m, outer))
    while m.swept < stop:
        sweep_line(board, i, m, outer, stop)


@wp.func
def pass_by(m: Registers, until: int):
    """Change the registers as the beam does on its way to a clock within the picture."""
    if m.swept < until:
        begin = m.swept - m.frame_start
        end = until - m.frame_start
        if (end - UNBLANKED + LINE) // LINE > (begin - UNBLANKED + LINE) // LINE:
            m.hmove_blank = 0
        if end // LINE > begin // LINE:
            end_lines(m, end // LINE - begin // LINE)
        m.swept = until
