"""The TIA's six objects as bit masks of 32 pixels: bit k of word w is pixel 32 w + k of 160."""

import warp as wp

from rlstruct.atari.state import Registers

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
def player_width(size: int) -> int:
    """Return the width that NUSIZ gives a player."""
    mode = size & 7
    return wp.where(mode == 5, 16, wp.where(mode == 7, 32, 8))


@wp.func
def has_copy(size: int, k: int) -> bool:
    """Return True if NUSIZ asks for copy k of a player or missile: 0, 16, 32 or 64 pixels to the right."""
    return ((COPIES >> wp.uint32(4 * (size & 7) + k)) & wp.uint32(1)) != wp.uint32(0)


@wp.func
def one_copy(bits: wp.uint32, x: int, size: int, skip: int, word: int, k: int) -> wp.uint32:
    """Place copy k of a player or missile if NUSIZ asks for it."""
    if has_copy(size, k) and (k > 0 or skip == 0):
        return place(bits, around(x + ((8 << k) & ~8)), word)
    return NO_PIXELS


@wp.func
def copies(bits: wp.uint32, x: int, size: int, skip: int, word: int) -> wp.uint32:
    """Place the one to three copies of a player or missile that NUSIZ asks for."""
    pixels = NO_PIXELS
    for k in range(4):
        pixels |= one_copy(bits, x, size, skip, word, k)
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
def player(m: Registers, k: int, word: int) -> wp.uint32:
    """Return the pixels of player k: 8 wide, or 16 or 32 wide and one pixel further right."""
    shape = wp.where(m.delay[k] != 0, m.old_shape[k], m.shape[k])
    if shape == 0:
        return NO_PIXELS
    if m.mirror[k] == 0:
        shape = reverse(shape)
    bits = wp.uint32(shape)
    width = player_width(m.size[k])
    if width == 16:
        bits = spread_double(bits) * wp.uint32(3)
    elif width == 32:
        bits = spread(bits) * wp.uint32(15)
    late = wp.where(width > 8, 1, 0)
    return copies(bits, around(m.position[k] + late), m.size[k], m.skip[k], word)


@wp.func
def block(size: int) -> wp.uint32:
    """Return a row of 1, 2, 4 or 8 pixels: the width that NUSIZ gives a missile, and CTRLPF the ball."""
    return (wp.uint32(1) << wp.uint32(1 << ((size >> 4) & 3))) - wp.uint32(1)


@wp.func
def missile(m: Registers, k: int, word: int) -> wp.uint32:
    """Return the pixels of missile k, 1, 2, 4 or 8 wide; missile 0 may be a star."""
    shown = m.enabled[k] != 0 and m.hide[k] == 0
    size = m.size[k]
    if k == 0 and m.stars != 0:
        # Two pixels in the first line of four, none in the second, one in the others.
        size = wp.where(m.stars_line == 1, 0x10, 0)
        shown = shown and m.stars_line != 2
    if not shown:
        return NO_PIXELS
    return copies(block(size), m.position[2 + k], size, 0, word)


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
    if wp.where(m.delay[2] != 0, m.old_ball, m.enabled[2]) == 0:
        return NO_PIXELS
    return place(block(m.control), m.position[4], word)
