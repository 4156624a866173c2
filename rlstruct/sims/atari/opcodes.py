"""Instructions of the 6507 as data: one word for each of 256 opcodes defines every phase of an instruction.

From the published description of the NMOS 6502, with the undocumented opcodes that games use.
"""

import numpy as np
import numpy.typing as npt

IMPLIED, IMMEDIATE, ZERO, ZERO_X, ZERO_Y, RELATIVE, INDEXED_X, INDEXED_Y, ABSOLUTE, ABSOLUTE_X, ABSOLUTE_Y, INDIRECT = (
    range(12)
)
PUSH, PULL = 12, 13
"""Addressing modes: `RELATIVE` to `INDEXED_Y` and all before have one byte, `ABSOLUTE` to `INDIRECT` two."""
MODE, CYCLES, PAGE, READ, WRITE, SOURCE, UNARY, BINARY, TARGET, NZ, FLOW = 0, 4, 8, 9, 10, 11, 14, 17, 20, 23, 24
"""First bit of each field of the word."""
FROM_MEMORY, FROM_A, FROM_X, FROM_Y, FROM_SP, FROM_STATUS, FROM_A_AND_X, FROM_A_AND_MEMORY = range(8)
KEEP, ASL, ROL, LSR, ROR, INC, DEC = range(7)
NOTHING, ORA, AND, EOR, ADC, SBC, COMPARE, BIT = range(8)
TO_NOWHERE, TO_A, TO_X, TO_Y, TO_SP, TO_STATUS, TO_A_AND_X = range(7)
ALONG, CARRY_IS_SIGN, WAIT_WHILE_PLUS, WAIT_WHILE_MINUS, WAIT_WHILE_NOT_ZERO = range(5)
"""Side effects of an instruction. `WAIT`: it loads the timer, and a branch back to it follows; see `riot.wait`."""
BRANCH, JUMP, CALL, RETURN, FROM_INTERRUPT, BREAK, SET_FLAG, JAM = range(5, 13)
"""Actions of instructions that do not compute with data."""

_MODE_CYCLES = {
    IMPLIED: 2, IMMEDIATE: 2, ZERO: 3, ZERO_X: 4, ZERO_Y: 4, RELATIVE: 2, INDEXED_X: 6, INDEXED_Y: 5,
    ABSOLUTE: 4, ABSOLUTE_X: 4, ABSOLUTE_Y: 4, INDIRECT: 5, PUSH: 3, PULL: 4,
}  # fmt: skip
_INDEXED = (ABSOLUTE_X, ABSOLUTE_Y, INDEXED_Y)


def word(
    mode: int,
    *,
    source: int = FROM_MEMORY,
    unary: int = KEEP,
    binary: int = NOTHING,
    target: int = TO_NOWHERE,
    nz: bool = True,
    store: bool = False,
    flow: int = ALONG,
    cycles: int = 0,
) -> int:
    """Pack the definition of an instruction into one word.

    Args:
        mode: addressing mode of the operand.
        source: source of the value.
        unary: operation on the value; `store` then writes it back.
        binary: operation on the value and A (`COMPARE`: on the register that `target` names, which is kept).
        target: destination of the result.
        nz: the result sets N and Z.
        store: the value is written to memory.
        flow: side effect, or action of an instruction that does not compute.
        cycles: duration, where the addressing mode does not determine it.
    """
    reads = mode not in (IMPLIED, IMMEDIATE, RELATIVE, INDIRECT, PUSH) and source in (FROM_MEMORY, FROM_A_AND_MEMORY)
    page = mode in _INDEXED and reads and not store
    if not cycles:
        cycles = _MODE_CYCLES[mode]
        cycles += (2 if reads else 0) + (mode in _INDEXED) if store and mode != PUSH else 0
    fields = (
        (mode, MODE), (cycles, CYCLES), (page, PAGE), (reads, READ), (store, WRITE), (source, SOURCE), (unary, UNARY),
        (binary, BINARY), (target, TARGET), (nz, NZ), (flow, FLOW),
    )  # fmt: skip
    return sum(int(value) << shift for value, shift in fields)


def make_table() -> npt.NDArray[np.int32]:
    """Make the words of all opcodes, [256] int32: those that stop the processor, and the unstable ones, are `JAM`."""
    table = [word(IMPLIED, flow=JAM, nz=False)] * 256
    for entries in (_arithmetic(), _shifts(), _transfers(), _flow(), _undocumented()):
        for opcode, entry in entries.items():
            table[opcode] = entry
    return np.array(table, np.int32)


_GROUP_1 = {0x01: INDEXED_X, 0x05: ZERO, 0x09: IMMEDIATE, 0x0D: ABSOLUTE, 0x11: INDEXED_Y, 0x15: ZERO_X,
            0x19: ABSOLUTE_Y, 0x1D: ABSOLUTE_X}  # fmt: skip
_GROUP_2 = {0x06: ZERO, 0x0E: ABSOLUTE, 0x16: ZERO_X, 0x1E: ABSOLUTE_X}


def _arithmetic() -> dict[int, int]:
    """ORA, AND, EOR, ADC, STA, LDA, CMP, SBC, and the comparisons with X and Y."""
    table = {}
    for low, mode in _GROUP_1.items():
        for base, binary in ((0x00, ORA), (0x20, AND), (0x40, EOR), (0x60, ADC), (0xE0, SBC)):
            table[base | low] = word(mode, binary=binary, target=TO_A)
        table[0xA0 | low] = word(mode, target=TO_A)
        table[0xC0 | low] = word(mode, binary=COMPARE, target=TO_A)
        if mode != IMMEDIATE:
            table[0x80 | low] = word(mode, source=FROM_A, store=True, nz=False)
    for opcode, mode in ((0xE0, IMMEDIATE), (0xE4, ZERO), (0xEC, ABSOLUTE)):
        table[opcode] = word(mode, binary=COMPARE, target=TO_X)
        table[opcode - 0x20] = word(mode, binary=COMPARE, target=TO_Y)
    table[0x24] = word(ZERO, binary=BIT, nz=False)
    table[0x2C] = word(ABSOLUTE, binary=BIT, nz=False)
    return table


def _shifts() -> dict[int, int]:
    """ASL, ROL, LSR, ROR, INC, DEC, of memory and of registers."""
    table = {}
    for base, unary in ((0x00, ASL), (0x20, ROL), (0x40, LSR), (0x60, ROR), (0xC0, DEC), (0xE0, INC)):
        for low, mode in _GROUP_2.items():
            table[base | low] = word(mode, unary=unary, store=True)
        if unary not in (INC, DEC):
            table[base | 0x0A] = word(IMPLIED, source=FROM_A, unary=unary, target=TO_A)
    for opcode, unary, source, target in (
        (0xE8, INC, FROM_X, TO_X), (0xCA, DEC, FROM_X, TO_X), (0xC8, INC, FROM_Y, TO_Y), (0x88, DEC, FROM_Y, TO_Y),
    ):  # fmt: skip
        table[opcode] = word(IMPLIED, source=source, unary=unary, target=target)
    return table


def _transfers() -> dict[int, int]:
    """LDX, LDY, STX, STY, transfers between registers, the stack."""
    table = {}
    for opcode, mode in ((0xA2, IMMEDIATE), (0xA6, ZERO), (0xAE, ABSOLUTE), (0xB6, ZERO_Y), (0xBE, ABSOLUTE_Y)):
        table[opcode] = word(mode, target=TO_X)
    for opcode, mode in ((0xA0, IMMEDIATE), (0xA4, ZERO), (0xAC, ABSOLUTE), (0xB4, ZERO_X), (0xBC, ABSOLUTE_X)):
        table[opcode] = word(mode, target=TO_Y)
    for opcode, mode, source in (
        (0x86, ZERO, FROM_X), (0x8E, ABSOLUTE, FROM_X), (0x96, ZERO_Y, FROM_X),
        (0x84, ZERO, FROM_Y), (0x8C, ABSOLUTE, FROM_Y), (0x94, ZERO_X, FROM_Y),
    ):  # fmt: skip
        table[opcode] = word(mode, source=source, store=True, nz=False)
    for opcode, source, target in (
        (0xAA, FROM_A, TO_X), (0xA8, FROM_A, TO_Y), (0x8A, FROM_X, TO_A), (0x98, FROM_Y, TO_A), (0xBA, FROM_SP, TO_X),
    ):  # fmt: skip
        table[opcode] = word(IMPLIED, source=source, target=target)
    table[0x9A] = word(IMPLIED, source=FROM_X, target=TO_SP, nz=False)
    table[0x48] = word(PUSH, source=FROM_A, store=True, nz=False)
    table[0x08] = word(PUSH, source=FROM_STATUS, store=True, nz=False)
    table[0x68] = word(PULL, target=TO_A)
    table[0x28] = word(PULL, target=TO_STATUS, nz=False)
    return table


def _flow() -> dict[int, int]:
    """Branches, jumps, calls, flags, NOP."""
    table = {opcode: word(RELATIVE, flow=BRANCH, nz=False) for opcode in range(0x10, 0x100, 0x20)}
    for opcode in (0x18, 0x38, 0x58, 0x78, 0xB8, 0xD8, 0xF8):
        table[opcode] = word(IMPLIED, flow=SET_FLAG, nz=False)
    for opcode, mode, flow, cycles in (
        (0x4C, ABSOLUTE, JUMP, 3), (0x6C, INDIRECT, JUMP, 5), (0x20, ABSOLUTE, CALL, 6), (0x60, IMPLIED, RETURN, 6),
        (0x40, IMPLIED, FROM_INTERRUPT, 6), (0x00, IMPLIED, BREAK, 7),
    ):  # fmt: skip
        table[opcode] = word(mode, source=FROM_A, flow=flow, nz=False, cycles=cycles)
    table[0xEA] = word(IMPLIED, nz=False)
    return table


def _undocumented() -> dict[int, int]:
    """Two operations at once: SLO, RLA, SRE, RRA, DCP, ISB, LAX, SAX, ANC, ALR; and a second SBC and many NOP."""
    table = {}
    modes = {0x03: INDEXED_X, 0x07: ZERO, 0x0F: ABSOLUTE, 0x13: INDEXED_Y, 0x17: ZERO_X, 0x1B: ABSOLUTE_Y,
             0x1F: ABSOLUTE_X}  # fmt: skip
    for base, unary, binary in (
        (0x00, ASL, ORA), (0x20, ROL, AND), (0x40, LSR, EOR), (0x60, ROR, ADC), (0xC0, DEC, COMPARE), (0xE0, INC, SBC),
    ):  # fmt: skip
        for low, mode in modes.items():
            table[base | low] = word(mode, unary=unary, binary=binary, target=TO_A, store=True)
    for low, mode in {**modes, 0x17: ZERO_Y, 0x1F: ABSOLUTE_Y}.items():
        if low != 0x1B:
            table[0xA0 | low] = word(mode, target=TO_A_AND_X)
        if low in (0x03, 0x07, 0x0F, 0x17):
            table[0x80 | low] = word(mode, source=FROM_A_AND_X, store=True, nz=False)
    table[0x0B] = table[0x2B] = word(IMMEDIATE, source=FROM_A_AND_MEMORY, target=TO_A, flow=CARRY_IS_SIGN)
    table[0x4B] = word(IMMEDIATE, source=FROM_A_AND_MEMORY, unary=LSR, target=TO_A)
    table[0xEB] = word(IMMEDIATE, binary=SBC, target=TO_A)
    for mode, opcodes in (
        (IMPLIED, (0x1A, 0x3A, 0x5A, 0x7A, 0xDA, 0xFA)), (IMMEDIATE, (0x80, 0x82, 0x89, 0xC2, 0xE2)),
        (ZERO, (0x04, 0x44, 0x64)), (ZERO_X, (0x14, 0x34, 0x54, 0x74, 0xD4, 0xF4)), (ABSOLUTE, (0x0C,)),
        (ABSOLUTE_X, (0x1C, 0x3C, 0x5C, 0x7C, 0xDC, 0xFC)),
    ):  # fmt: skip
        table.update(dict.fromkeys(opcodes, word(mode, nz=False)))
    return table


FREQUENT = bytes.fromhex(
    "85 B1 A5 D0 10 88 A9 F0 B5 86 CA B9 EA B0 A4 84 90 0A 29 C6 4A A6 C9 38 E5 4C C0 BD A2 95 A0 A8"
    "C8 30 C4 AA 8A E4 68 E0 60 20 08 25 E6 18 E8 C5 65 AD 98 E9 8D 49 48 45 05 69 D5 24 B4 BE 9A"
)
"""The 63 opcodes that ale-py's games of 2 and 4 KB run most, the most frequent first: 98 of 100 instructions."""
WORDS = tuple(map(int, make_table()))
"""`make_table`, for constants."""
LENGTHS = tuple(
    1 if mode in (IMPLIED, PUSH, PULL) else 3 if mode >= ABSOLUTE else 2 for mode in (w & 15 for w in WORDS)
)
"""Bytes of each opcode with its operand."""


def _waits(code: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Find the loops that only wait for the RIOT's timer: a load of INTIM or TIMINT, and a branch back to it.

    Returns:
        The kind of wait at each byte, 0 for none.  [bytes of the ROM] uint64
    """
    low, high, branch, back = (np.roll(code, -k) for k in (1, 2, 3, 4))
    loads = np.isin(code, (0xAC, 0xAD, 0xAE))  # LDY, LDA, LDX
    loops = (high == 0x02) & (back == 0xFB) & ((np.arange(len(code)) & 0x3FF) < 0x3FB)  # in one kilobyte
    intim, either = loops & (low == 0x84), loops & np.isin(low, (0x84, 0x85))
    waits = np.zeros_like(code)
    waits[either & (loads | (code == 0x2C)) & (branch == 0x10)] = WAIT_WHILE_PLUS  # BIT too; BPL
    waits[intim & (loads | (code == 0x2C)) & (branch == 0x30)] = WAIT_WHILE_MINUS  # BMI
    waits[intim & loads & (branch == 0xD0)] = WAIT_WHILE_NOT_ZERO  # BNE
    return waits


def make_program(rom: bytes, *, with_ram: bool = False, switches: bool = True) -> npt.NDArray[np.uint64]:
    """Decode the instruction that begins at each byte of a ROM, so that one access reads all of it.

    Args:
        rom: the bytes of the cartridge.
        with_ram: the processor sees RAM in its second 128 bytes.
        switches: reading some addresses switches banks.

    Returns:
        From the lowest byte on: opcode, the next two bytes, one byte with the instruction's length (2 bits) and
        its number in `FREQUENT`, counted from 1 (6 bits), and the word of `make_table`. The length is 0 where the bytes
        must be read one by one: at the end of a kilobyte, before the addresses that switch banks, and before and in
        RAM. The number is 0 there, where a program waits, and for other opcodes.  [bytes of the ROM] uint64
    """
    code, place = np.frombuffer(rom, np.uint8).astype(np.uint64), np.arange(len(rom)) & 0xFFF
    words, length = np.array(WORDS, np.uint64)[code], np.array(LENGTHS, np.uint64)[code]
    length[((place & 0x3FF) >= 0x3FD) | (place >= 0xFDE) & switches] = 0
    if with_ram:
        length[(place >= 0x07E) & (place < 0x100)] = 0
    waits = np.where(np.roll(length, -3) > 0, _waits(code), np.uint64(0))
    words |= waits << np.uint64(FLOW)
    numbers = np.zeros(256, np.uint64)
    numbers[list(FREQUENT)] = np.arange(1, len(FREQUENT) + 1)
    length |= np.where((length > 0) & (waits == 0), numbers[code], np.uint64(0)) << np.uint64(2)
    parts = (code, np.roll(code, -1), np.roll(code, -2), length, words)
    program: npt.NDArray[np.uint64] = np.bitwise_or.reduce([part << np.uint64(8 * k) for k, part in enumerate(parts)])
    return program
