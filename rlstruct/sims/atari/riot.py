"""The RIOT (6532): timer and ports; its RAM lies in `Board.ram`."""

import warp as wp

from rlstruct.sims.atari.state import Outer, Registers


@wp.func
def timer_now(m: Registers, outer: Outer) -> int:
    """The timer without what a read after its end changes: negative once it has expired."""
    return outer.timer - ((m.cycles - 1 - outer.timer_set) >> outer.timer_shift) - 1


@wp.func
def read_riot(m: Registers, outer: Outer, address: int):
    """Read a port or the timer; the byte is on the bus."""
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
        now = timer_now(m, outer)
        if now < 0:
            elapsed = m.cycles - 1 - outer.timer_set
            # Once expired, it counts single cycles.
            now = (outer.timer << outer.timer_shift) - elapsed - 1
            if now <= -2 and outer.timer_was_read == 0:
                outer.timer_was_read = 1
                outer.timer_expired = m.cycles
            if outer.timer_was_read != 0:
                offset = outer.timer_expired - (outer.timer_set + (outer.timer << outer.timer_shift))
                now = outer.timer - (elapsed >> outer.timer_shift) - offset
        m.bus = now & 0xFF
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
