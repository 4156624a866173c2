"""Which writes to the TIA change what is seen: most repeat what is there, and the beam need not be followed to them."""

import warp as wp

from rlstruct.sims.atari.state import Outer, Registers
from rlstruct.sims.atari.tia import is_late


@wp.func
def look_stays(m: Registers, register: int, value: int, draw: int) -> bool:
    """Whether a write to 0x04 to 0x0F changes nothing that is seen. Colours are not, where nobody draws."""
    if register == 0x04:
        return value == m.size0 and m.skip0 == 0
    if register == 0x05:
        return value == m.size1 and m.skip1 == 0
    if register < 0x0A:
        color = wp.where(register == 0x06, m.color0, m.color1)
        color = wp.where(register == 0x08, m.color_playfield, color)
        color = wp.where(register == 0x09, m.color_background, color)
        return draw == 0 or (value >> 1) == (color >> 1)
    if register == 0x0A:
        return value == m.control and m.mirror_playfield == (value & 1)
    if register == 0x0B:
        return ((value >> 3) & 1) == m.mirror0
    if register == 0x0C:
        return ((value >> 3) & 1) == m.mirror1
    if register == 0x0D:
        return (value >> 4) == (m.playfield & 0x0F)
    if register == 0x0E:
        return value == ((m.playfield >> 4) & 0xFF)
    return value == (m.playfield >> 12)


@wp.func
def objects_stay(m: Registers, register: int, value: int) -> bool:
    """Whether a write to 0x10 to 0x1F changes nothing that is seen: sounds, and shapes that are there or not shown."""
    if register < 0x15:
        return False
    if register == 0x1B:
        return (m.delay0 != 0 or value == m.shape0) and (m.delay1 == 0 or m.old_shape1 == m.shape1)
    if register == 0x1C:
        stays = (m.delay1 != 0 or value == m.shape1) and (m.delay0 == 0 or m.old_shape0 == m.shape0)
        return stays and (m.delay_ball == 0 or m.old_ball == m.ball)
    if register == 0x1D:
        return m.hide0 != 0 or ((value >> 1) & 1) == m.missile0
    if register == 0x1E:
        return m.hide1 != 0 or ((value >> 1) & 1) == m.missile1
    if register == 0x1F:
        return m.delay_ball != 0 or ((value >> 1) & 1) == m.ball
    return True


@wp.func
def rest_stays(m: Registers, outer: Outer, register: int, value: int) -> bool:
    """Whether a write to 0x20 to 0x3F changes nothing that is seen, such as the motions before HMOVE."""
    if register == 0x22:
        return m.cycles * 3 != outer.hmove_clock + 63  # or stars begin
    if register == 0x25:
        return (value & 1) == m.delay0 or m.old_shape0 == m.shape0
    if register == 0x26:
        return (value & 1) == m.delay1 or m.old_shape1 == m.shape1
    if register == 0x27:
        return (value & 1) == m.delay_ball or m.old_ball == m.ball
    if register == 0x28:
        return ((value >> 1) & 1) == m.hide0
    if register == 0x29:
        return ((value >> 1) & 1) == m.hide1
    return register != 0x2A and register != 0x2C


@wp.func
def looks_the_same(m: Registers, outer: Outer, register: int, value: int, draw: int) -> bool:
    """Whether a write changes nothing that the beam shows or lets meet, so that it need not be followed to there."""
    if is_late(m, outer) or register == 0x00:
        return False
    if register == 0x01:
        return (value & 2) == (m.vblank & 2)
    if register < 0x04:
        return True
    if register < 0x10:
        return look_stays(m, register, value, draw)
    if register < 0x20:
        return objects_stay(m, register, value)
    return rest_stays(m, outer, register, value)
