"""Cartridges: which kilobytes of the ROM the processor sees through its four windows of 1 KB."""

import warp as wp

from rlstruct.atari.state import Registers, Shared, byte_of_ram, byte_of_rom, set_byte_of_ram

FIXED, F8, F6, F8SC, F6SC, E0, FE = range(7)
"""Types of cartridges: no banks; two or four banks of 4 KB, with 128 bytes of RAM if the name ends in SC; 8 slices of
1 KB for three of the windows; two banks that bit 13 of the address selects."""

WHOLE_BANK = wp.uint32(0x04040404)
FIRST_BANK = wp.uint32(0x03020100)


@wp.func
def switch_bank(board: Shared, m: Registers, address: int):
    """Switch banks if a read or write of this address does."""
    if board.mapper != FIXED and (address & 0xFE0) == 0xFE0:
        spot = address & 0x1F
        if board.mapper == F8 or board.mapper == F8SC:
            if spot == 0x18 or spot == 0x19:
                m.pages = FIRST_BANK + WHOLE_BANK * wp.uint32(spot - 0x18)
        elif board.mapper == F6 or board.mapper == F6SC:
            if spot >= 0x16 and spot <= 0x19:
                m.pages = FIRST_BANK + WHOLE_BANK * wp.uint32(spot - 0x16)
        elif board.mapper == E0 and spot < 0x18:
            window = wp.uint32((spot >> 3) * 8)
            m.pages = (m.pages & ~(wp.uint32(0xFF) << window)) | (wp.uint32(spot & 7) << window)


@wp.func
def rom_place(board: Shared, m: Registers, address: int) -> int:
    """Map an address to a byte of the ROM. This must be fast: every instruction waits for it."""
    if board.mapper < E0:  # the four windows show one bank
        return int(m.pages & wp.uint32(0xFF)) * 1024 + (address & 0xFFF)
    if board.mapper == FE:
        return (address & 0xFFF) + ((~address & 0x2000) >> 1)
    page = int((m.pages >> wp.uint32(((address >> 10) & 3) * 8)) & wp.uint32(0xFF))
    return page * 1024 + (address & 0x3FF)


@wp.func
def rom_byte(board: Shared, i: int, m: Registers, address: int) -> int:
    """Read a byte of the ROM or of the cartridge's RAM; `switch_bank` comes before."""
    if (board.mapper == F8SC or board.mapper == F6SC) and (address & 0xF80) == 0x080:
        return byte_of_ram(board.ram, i, 128 + (address & 127))
    return byte_of_rom(board.rom, rom_place(board, m, address))


@wp.func
def write_cartridge(board: Shared, i: int, m: Registers, address: int, value: int):
    """Write to the cartridge's RAM, or switch banks."""
    if (board.mapper == F8SC or board.mapper == F6SC) and (address & 0xF80) == 0:
        set_byte_of_ram(board.ram, i, 128 + (address & 127), value)
    switch_bank(board, m, address)
