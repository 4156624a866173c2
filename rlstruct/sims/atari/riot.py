"""The RIOT (6532): timer and ports; its RAM lies in `Board.ram`."""

import warp as wp

from rlstruct.sims.atari.state import Registers


@wp.func
def timer_now(m: Registers) -> int:
    """The timer without what a read after its end changes: negative once it has expired."""
    return m[0].timer - ((m[0].cycles - 1 - m[0].timer_set) >> m[0].timer_shift) - 1


@wp.func
def read_riot(m: Registers, address: int):
    """Read a port or the timer; the byte is on the bus."""
    register = address & 7
    if register == 0:
        m[0].bus = m[0].sticks
    elif register == 1:
        m[0].bus = m[0].direction_a
    elif register == 2:
        m[0].bus = m[0].switches
    elif register == 3:
        m[0].bus = m[0].direction_b
    elif (register & 1) == 0:
        now = timer_now(m)
        if now < 0:
            elapsed = m[0].cycles - 1 - m[0].timer_set
            # Once expired, it counts single cycles.
            now = (m[0].timer << m[0].timer_shift) - elapsed - 1
            if now <= -2 and m[0].timer_was_read == 0:
                m[0].timer_was_read = 1
                m[0].timer_expired = m[0].cycles
            if m[0].timer_was_read != 0:
                offset = m[0].timer_expired - (m[0].timer_set + (m[0].timer << m[0].timer_shift))
                now = m[0].timer - (elapsed >> m[0].timer_shift) - offset
        m[0].bus = now & 0xFF
    else:
        m[0].bus = 0x80
        if timer_now(m) >= 0 or m[0].timer_was_read != 0:
            m[0].bus = 0


@wp.func
def write_riot(m: Registers, address: int, value: int):
    """Set the timer or a data direction."""
    if (address & 0x14) == 0x14:
        rate = address & 3
        m[0].timer = value
        m[0].timer_shift = wp.where(rate == 3, 10, rate * 3)
        m[0].timer_set = m[0].cycles
        m[0].timer_was_read = 0
    elif (address & 7) == 1:
        m[0].direction_a = value
    elif (address & 7) == 3:
        m[0].direction_b = value
