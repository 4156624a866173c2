"""The TIA's six objects as bit masks of 32 pixels: bit k of word w is pixel 32 w + k of 160."""

import warp as wp

from rlstruct.sims.atari.state import Registers

NO_PIXELS = wp.uint32(0)
COPIES = wp.uint32(0x1D197531)
"""Copies in NUSIZ's modes 0 to 7: four bits each, see `has_copy`."""


@wp.func
def place(bits: wp.uint32, x: int, word: int) -> wp.uint32:
    """Shift a pattern of at most 32 pixels to position x of a line, which wraps around after 160 pixels."""
    shift = x - 32 * word
    if shift > 127:
        shift -= 160
    if shift >= 32 or shift <= -32:
        return NO_PIXELS
    if shift < 0:
        return bits >> wp.uint32(-shift)
    return bits << wp.uint32(shift)


@wp.func
def around(x: int) -> int:
    """Wrap a position from -160 to 319 into 0 to 159."""
    if x >= 160:
        return x - 160
    if x < 0:
        return x + 160
    return x


@wp.func
def has_copy(size: int, k: int) -> bool:
    """Return True if NUSIZ asks for copy k of a player or missile: 0, 16, 32 or 64 pixels to the right."""
    return ((COPIES >> wp.uint32(4 * (size & 7) + k)) & wp.uint32(1)) != wp.uint32(0)


@wp.func
def copies(bits: wp.uint32, x: int, size: int, skip: int, word: int) -> wp.uint32:
    """Place the one to three copies of a player or missile that NUSIZ asks for."""
    pixels = NO_PIXELS
    for k in range(4):
        if has_copy(size, k) and (k > 0 or skip == 0):
            pixels |= place(bits, around(x + ((8 << k) & ~8)), word)
    return pixels


@wp.func
def reverse(byte: int) -> int:
    """Reverse the bits of a byte."""
    halves = ((byte & 0x0F) << 4) | ((byte >> 4) & 0x0F)
    pairs = ((halves & 0x33) << 2) | ((halves >> 2) & 0x33)
    return ((pairs & 0x55) << 1) | ((pairs >> 1) & 0x55)


@wp.func
def spread(byte: wp.uint32) -> wp.uint32:
    """Move bit k of a byte to bit 4 k."""
    y = (byte | (byte << wp.uint32(12))) & wp.uint32(0x000F000F)
    y = (y | (y << wp.uint32(6))) & wp.uint32(0x03030303)
    return (y | (y << wp.uint32(3))) & wp.uint32(0x11111111)


@wp.func
def spread_double(byte: wp.uint32) -> wp.uint32:
    """Move bit k of a byte to bit 2 k."""
    y = (byte | (byte << wp.uint32(4))) & wp.uint32(0x0F0F)
    y = (y | (y << wp.uint32(2))) & wp.uint32(0x3333)
    return (y | (y << wp.uint32(1))) & wp.uint32(0x5555)


@wp.func
def player(shape: int, mirror: int, x: int, size: int, skip: int, word: int) -> wp.uint32:
    """Return the pixels of a player: 8 wide, or 16 or 32 wide and one pixel further right."""
    if shape == 0:
        return NO_PIXELS
    row = shape
    if mirror == 0:
        row = reverse(shape)
    bits = wp.uint32(row)
    mode = size & 7
    late = int(0)
    if mode == 5:
        bits = spread_double(bits) * wp.uint32(3)
        late = 1
    elif mode == 7:
        bits = spread(bits) * wp.uint32(15)
        late = 1
    return copies(bits, around(x + late), size, skip, word)


@wp.func
def missile(enabled: int, x: int, size: int, word: int) -> wp.uint32:
    """Return the pixels of a missile, 1, 2, 4 or 8 wide."""
    if enabled == 0:
        return NO_PIXELS
    return copies((wp.uint32(1) << wp.uint32(1 << ((size >> 4) & 3))) - wp.uint32(1), x, size, 0, word)


@wp.func
def reverse_word(bits: wp.uint32) -> wp.uint32:
    """Reverse 20 bits."""
    low = reverse(int(bits & wp.uint32(0xFF)))
    middle = reverse(int((bits >> wp.uint32(8)) & wp.uint32(0xFF)))
    high = reverse(int((bits >> wp.uint32(16)) & wp.uint32(0xFF)))
    return wp.uint32((low << 12) | (middle << 4) | (high >> 4))


@wp.func
def playfield(m: Registers, word: int) -> wp.uint32:
    """Return the pixels of the playfield: 20 blocks of four pixels, then the same 20 repeated or mirrored."""
    if m.playfield == 0:
        return NO_PIXELS
    left = wp.uint32((m.playfield & 0xFF00F) | (reverse((m.playfield >> 4) & 0xFF) << 4))
    right = left
    if m.mirror_playfield != 0:
        right = reverse_word(left)
    line = wp.uint64(left) | (wp.uint64(right) << wp.uint64(20))
    return spread(wp.uint32((line >> wp.uint64(8 * word)) & wp.uint64(0xFF))) * wp.uint32(15)


@wp.func
def ball(m: Registers, word: int) -> wp.uint32:
    """Return the pixels of the ball, 1, 2, 4 or 8 wide."""
    shown = m.ball
    if m.delay_ball != 0:
        shown = m.old_ball
    if shown == 0:
        return NO_PIXELS
    bits = (wp.uint32(1) << wp.uint32(1 << ((m.control >> 4) & 3))) - wp.uint32(1)
    return place(bits, m.x_ball, word)
