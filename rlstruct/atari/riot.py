"""Timer and ports of the RIOT, the chip 6532. Its RAM is in `Board.ram`."""

import warp as wp

from rlstruct.atari import opcodes as op
from rlstruct.atari.state import MOST_INSTRUCTIONS, Outer, Registers


@wp.func
def timer_now(m: Registers, outer: Outer) -> int:
    """Return the timer as it would be without reads; negative once it has expired."""
    return outer.timer - ((m.cycles - 1 - outer.timer_set) >> outer.timer_shift) - 1


@wp.func
def read_riot(m: Registers, outer: Outer, address: int):
    """Read a port or the timer into `m.bus`."""
    register = address & 7
    if register == 0:
        m.bus = outer.sticks
    elif register == 1:
        m.bus = outer.direction_a
    elif register == 2:
        m.bus = outer.switches
    elif register == 3:
        m.bus = outer.direction_b
    elif (register & 1) == 0:
        m.bus = timer_now(m, outer)
        if m.bus < 0:
            elapsed = m.cycles - 1 - outer.timer_set
            # An expired timer counts single cycles.
            m.bus = (outer.timer << outer.timer_shift) - elapsed - 1
            if m.bus <= -2 and outer.timer_was_read == 0:
                outer.timer_was_read = 1
                outer.timer_expired = m.cycles
            if outer.timer_was_read != 0:
                offset = outer.timer_expired - (outer.timer_set + (outer.timer << outer.timer_shift))
                m.bus = outer.timer - (elapsed >> outer.timer_shift) - offset
        m.bus &= 0xFF
    else:
        m.bus = 0x80
        if timer_now(m, outer) >= 0 or outer.timer_was_read != 0:
            m.bus = 0


@wp.func
def write_riot(m: Registers, outer: Outer, address: int, value: int):
    """Set the timer or a data direction."""
    if (address & 0x14) == 0x14:
        rate = address & 3
        outer.timer = value
        outer.timer_shift = wp.where(rate == 3, 10, rate * 3)
        outer.timer_set = m.cycles
        outer.timer_was_read = 0
    elif (address & 7) == 1:
        outer.direction_a = value
    elif (address & 7) == 3:
        outer.direction_b = value


@wp.func
def wait(m: Registers, outer: Outer, flow: int):
    """Run a loop that waits for the timer (a load, then a branch back to it) at once, up to its last round."""
    least = wp.where(flow == op.WAIT_WHILE_MINUS, 128, wp.where(flow == op.WAIT_WHILE_PLUS, 0, 1))
    left = outer.timer_set + ((outer.timer - least) << outer.timer_shift) - m.cycles
    if left >= 0 and (flow != op.WAIT_WHILE_PLUS or m.bus < 128):
        # The load takes 4 cycles, the branch 3, or 4 to another page.
        cycles = 7 + wp.where((((m.pc + 2) ^ (m.pc - 3)) & 0xFF00) != 0, 1, 0)
        rounds = wp.min(left // cycles + 1, (MOST_INSTRUCTIONS - 1 - m.n_instructions) // 2)
        if rounds > 0:
            m.cycles += rounds * cycles - 4
            m.pc = (m.pc - 3) & 0xFFFF
            m.n_instructions += 2 * rounds - 1
