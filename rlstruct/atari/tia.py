"""Reads and writes of the TIA's registers; `beam` draws from them.

Based on the Stella Programmer's Guide (S. Wright, 1979). Measured on ALE: the position of an object after RESxx, the
delay until a write becomes visible, and HMOVE in the middle of a line.
"""

import warp as wp

from rlstruct.atari.state import Five, Outer, Registers, Two
from rlstruct.atari.tia_objects import around, has_copy, player_width

NEVER = 0x7FFFFFFF
MOST_LINES, MOST_LINES_PAL = 290, 342  # after so many lines without VSYNC, any write ends the frame
LINE, BLANK = 228, 68  # clocks of a line, and of its horizontal blank


@wp.func
def gray(outer: Outer) -> int:
    """Return the lowest bit of colours: European consoles turn grey after a frame with an odd number of lines."""
    return outer.n_scanlines & outer.pal


@wp.func
def line_clock(m: Registers) -> int:
    """Return the beam's clock within its line, 0 to 227."""
    return (m.cycles * 3 - m.frame_start) % LINE


@wp.func
def in_copy(x: int, new_x: int, offset: int, width: int) -> int:
    """Classify a new position: in a copy of a player (1), in the four pixels before it (-1), or outside (0)."""
    distance = around(around(new_x - x) - offset)
    if distance < 4:
        return -1
    if distance < 4 + width:
        return 1
    return 0


@wp.func
def reset_meets(x: int, size: int, new_x: int) -> int:
    """Classify RESP: a copy of the player is being drawn (1), is about to be drawn (-1), or neither (0)."""
    meets = int(0)
    for k in range(4):
        if meets == 0 and has_copy(size, k):
            meets = in_copy(x, new_x, (8 << k) & ~8, player_width(size))
    return meets


@wp.func
def reset_x(clock: int, late: int) -> int:
    """Return the position after RESxx: the beam's, plus 5 pixels for players or 4 for others; fixed in the blank."""
    if clock < BLANK:
        return late - 2
    return (clock - BLANK + late) % 160


@wp.func
def reset_x_after(register: int, clock: int, after: int) -> int:
    """Return the position after RESM0, RESM1 or RESBL, given the clocks since HMOVE; equal to ALE in every cycle."""
    if clock == 18 and after == 9 and register != 0x12:
        return 3
    if clock == 69 and after == 60 and register == 0x12:
        return 8
    if register == 0x14:
        if clock == 27 and after == 18:
            return 5
        if clock == 30 and after == 21:
            return 6
        if clock == 69 and after == 54:
            return 10
    return reset_x(clock, 4)


@wp.func
def write_delay(m: Registers, register: int) -> int:
    """Return the clocks until a write to a register becomes visible."""
    if register == 0x01 or register == 0x0B or register == 0x0C or register == 0x1B or register == 0x1C:
        return 1
    if register == 0x04 or register == 0x05:
        return 8
    if register >= 0x0D and register <= 0x0F:
        # The change shows from the first playfield block that begins at least two clocks later.
        clock = line_clock(m)
        return ((clock + 5) & ~3) - clock
    for k in range(2):
        if register == 0x10 + k and reset_meets(m.position[k], m.size[k], reset_x(line_clock(m), 5)) == 1:
            return 11
    return 0


@wp.func
def is_late(m: Registers, outer: Outer) -> bool:
    """Return True if VSYNC did not end the frame in time, so that any write ends it."""
    lines = wp.where(outer.pal != 0, MOST_LINES_PAL, MOST_LINES)
    return m.cycles * 3 - m.frame_start >= LINE * lines


@wp.func
def hmove_shift(clock: int, move: int) -> int:
    """Return the shift to the right that HMOVE gives an object at a clock of the line.

    HMOVE sends one extra pulse every four clocks; their number is the motion register with its top bit flipped. Only
    pulses in the horizontal blank count. An HMOVE early in the line extends the blank by 8 clocks.
    """
    pulses = move ^ 8
    if clock < 63:
        return 8 - wp.min(pulses, (70 - clock) >> 2)
    if clock >= 225:
        return 8 - pulses
    return -wp.max(0, pulses - ((222 - clock) >> 2))


@wp.func
def hmove(m: Registers, outer: Outer):
    """Apply HMOVE to all objects."""
    clock = line_clock(m)
    outer.hmove_clock = m.cycles * 3
    if clock < 63 or clock >= 225:
        m.hmove_blank = outer.blanks
    for k in range(5):
        m.position[k] = around(m.position[k] + hmove_shift(clock, outer.move[k]))
    m.skip = Two()
    m.stars = 0


@wp.func
def write_frame(m: Registers, outer: Outer, register: int, value: int):
    """Write VSYNC, VBLANK or WSYNC."""
    if register == 0x00:
        if (value & 2) != 0:
            outer.vsync_end = m.cycles * 3 + LINE
        elif (m.vsync & 2) != 0 and m.cycles * 3 >= outer.vsync_end:
            outer.vsync_end = NEVER
            m.ended = 1
        m.vsync = value
    elif register == 0x01:
        if (m.vblank & 0x80) == 0 and (value & 0x80) != 0:
            outer.dump = 1
        elif (m.vblank & 0x80) != 0 and (value & 0x80) == 0:
            outer.dump = 0
            outer.dump_end = m.cycles
        m.vblank = value
    elif register == 0x02:
        clock = line_clock(m)
        if clock != 0:
            m.cycles += (LINE - clock) // 3


@wp.func
def write_look(m: Registers, outer: Outer, register: int, value: int):
    """Write sizes, colours, playfield or mirrors: 0x04 to 0x0F."""
    for k in range(2):
        if register == 0x04 + k:
            m.size[k] = value
            m.skip[k] = 0
        elif register == 0x0B + k:
            m.mirror[k] = (value >> 3) & 1
    for k in range(4):
        if register == 0x06 + k:
            m.color[k] = (value & 0xFE) | gray(outer)
    if register == 0x0A:
        m.control = value
        if line_clock(m) < BLANK + 79:
            m.mirror_playfield = value & 1
    elif register == 0x0D:
        m.playfield = (m.playfield & 0xFFFF0) | (value >> 4)
    elif register == 0x0E:
        m.playfield = (m.playfield & 0xFF00F) | (value << 4)
    elif register == 0x0F:
        m.playfield = (m.playfield & 0x00FFF) | (value << 12)


@wp.func
def write_place(m: Registers, outer: Outer, register: int, value: int):
    """Write RESP0 to RESBL, GRP0, GRP1, or enable missiles and ball: 0x10 to 0x1F."""
    clock = line_clock(m)
    for k in range(2):
        if register == 0x10 + k:
            new_x = reset_x(clock, 5)
            m.skip[k] = wp.where(reset_meets(m.position[k], m.size[k], new_x) == -1, 0, 1)
            m.position[k] = new_x
        elif register == 0x1B + k:
            m.shape[k] = value
            m.old_shape[1 - k] = m.shape[1 - k]
    for k in range(2, 5):
        if register == 0x10 + k:
            m.position[k] = reset_x_after(register, clock, m.cycles * 3 - outer.hmove_clock)
    for k in range(3):
        if register == 0x1D + k:
            m.enabled[k] = (value >> 1) & 1
    if register == 0x1C:
        m.old_ball = m.enabled[2]


@wp.func
def write_move(m: Registers, outer: Outer, register: int, value: int):
    """Write motion, vertical delay, hidden missiles, HMOVE, HMCLR or CXCLR: 0x20 to 0x2C."""
    if register == 0x22 and m.cycles * 3 == outer.hmove_clock + 63 and outer.move[2] == 7 and (value >> 4) == 6:
        m.stars = 1
        m.stars_line = 0
    for k in range(5):
        if register == 0x20 + k:
            outer.move[k] = value >> 4
    for k in range(3):
        if register == 0x25 + k:
            m.delay[k] = value & 1
    for k in range(2):
        if register == 0x28 + k:
            if m.hide[k] != 0 and (value & 2) == 0:
                m.position[2 + k] = around(m.position[k] + player_width(m.size[k]) // 2)  # the middle of the player
            m.hide[k] = (value >> 1) & 1
    if register == 0x2A:
        hmove(m, outer)
    elif register == 0x2B:
        outer.move = Five()
    elif register == 0x2C:
        m.collisions = 0


@wp.func
def write_tia(m: Registers, outer: Outer, address: int, value: int):
    """Write to a register, after the beam has been followed to the clock at which the write becomes visible."""
    register = address & 0x3F
    if is_late(m, outer):
        m.ended = 1
    if register < 0x04:
        write_frame(m, outer, register, value)
    elif register < 0x10:
        write_look(m, outer, register, value)
    elif register < 0x20:
        write_place(m, outer, register, value)
    else:
        write_move(m, outer, register, value)


@wp.func
def paddle_charged(m: Registers, outer: Outer, ohms: int) -> int:
    """Return 0x80 once a paddle's capacitor is charged, 0.01904 cycles per ohm after the dump ended; else 0."""
    if ohms < 0 or outer.dump != 0:
        return 0
    needed = int(1.6 * float(ohms) * 0.01e-6 * 1.19e6)
    charged = outer.dump_end + needed
    return wp.where(charged >= 0 and m.cycles > charged, 0x80, 0)


@wp.func
def driven_bits(m: Registers, outer: Outer, register: int) -> int:
    """Return the top two bits of a register that is read."""
    if register < 8:
        pair = (m.collisions >> (2 * register - register // 7)) & wp.where(register == 6, 1, 3)
        return ((pair & 1) << 7) | ((pair & 2) << 5)
    for k in range(2):
        if register == 0x8 + k:
            return paddle_charged(m, outer, outer.paddle[k])
        if register == 0xC + k:
            return outer.trigger[k]
    if register < 0xC:
        return outer.input2
    return 0


@wp.func
def read_tia(m: Registers, outer: Outer, address: int):
    """Read a register: it drives the top two bits of the bus; the others keep their last value."""
    m.bus = (m.bus & 0x3F) | driven_bits(m, outer, address & 0x0F)
