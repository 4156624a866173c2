"""Instructions of the 6507 as data: one word for each of 256 opcodes defines every phase of an instruction.

From the published description of the NMOS 6502, with the undocumented opcodes that games use.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ZERO, ZERO_X, ZERO_Y, IMMEDIATE, RELATIVE, INDEXED_X, INDEXED_Y = range(7)
ABSOLUTE, ABSOLUTE_X, ABSOLUTE_Y, INDIRECT, IMPLIED, PUSH, PULL = range(8, 15)
"""Addressing modes. The operand has one byte before `ABSOLUTE`, two up to `INDIRECT`, and none after. Of a
mode with an operand, the lowest two bits are 1 if X is added to it, and 2 if Y is."""
MODE, CYCLES, PAGE, READ, WRITE, SOURCE, UNARY, BINARY, TARGET, NZ, FLOW = 0, 4, 8, 9, 10, 11, 14, 17, 20, 23, 24
INTO_A, INTO_X, INTO_Y = 28, 29, 30
"""Lowest bit of each field of an opcode's word."""
FROM_MEMORY, FROM_A, FROM_X, FROM_Y, FROM_SP, FROM_STATUS, FROM_A_AND_X, FROM_A_AND_MEMORY = range(8)
KEEP, ASL, ROL, LSR, ROR, INC, DEC = range(7)
NOTHING, ORA, AND, EOR, ADC, SBC, COMPARE, BIT = range(8)
TO_NOWHERE, TO_A, TO_X, TO_Y, TO_A_AND_X, TO_SP, TO_STATUS = range(7)
ALONG, CARRY_IS_SIGN, WAIT_WHILE_PLUS, WAIT_WHILE_MINUS, WAIT_WHILE_NOT_ZERO = range(5)
"""Effects after computing. `WAIT`: the instruction loads the timer, and the next branches back; see `riot.wait`."""
BRANCH, JUMP, CALL, RETURN, FROM_INTERRUPT, BREAK, SET_FLAG, JAM = range(5, 13)
"""Effects of instructions that only change flags or the program counter."""

_NAMES = """
    BRK ORA --- SLO NOP ORA ASL SLO PHP ORA asl ANC NOP ORA ASL SLO
    BPL ORA --- SLO NOP ORA ASL SLO CLC ORA NOP SLO NOP ORA ASL SLO
    JSR AND --- RLA BIT AND ROL RLA PLP AND rol ANC BIT AND ROL RLA
    BMI AND --- RLA NOP AND ROL RLA SEC AND NOP RLA NOP AND ROL RLA
    RTI EOR --- SRE NOP EOR LSR SRE PHA EOR lsr ALR JMP EOR LSR SRE
    BVC EOR --- SRE NOP EOR LSR SRE CLI EOR NOP SRE NOP EOR LSR SRE
    RTS ADC --- RRA NOP ADC ROR RRA PLA ADC ror --- JMP ADC ROR RRA
    BVS ADC --- RRA NOP ADC ROR RRA SEI ADC NOP RRA NOP ADC ROR RRA
    NOP STA NOP SAX STY STA STX SAX DEY NOP TXA --- STY STA STX SAX
    BCC STA --- --- STY STA STX SAX TYA STA TXS --- --- STA --- ---
    LDY LDA LDX LAX LDY LDA LDX LAX TAY LDA TAX --- LDY LDA LDX LAX
    BCS LDA --- LAX LDY LDA LDX LAX CLV LDA TSX --- LDY LDA LDX LAX
    CPY CMP NOP DCP CPY CMP DEC DCP INY CMP DEX --- CPY CMP DEC DCP
    BNE CMP --- DCP NOP CMP DEC DCP CLD CMP NOP DCP NOP CMP DEC DCP
    CPX SBC NOP ISB CPX SBC INC ISB INX SBC NOP SBC CPX SBC INC ISB
    BEQ SBC --- ISB NOP SBC INC ISB SED SBC NOP ISB NOP SBC INC ISB
"""
"""Instructions of opcodes 0x00 to 0xFF. Lower case: on A, not memory. ``---``: halts the processor or is unstable."""
_MODES = (
    IMMEDIATE, INDEXED_X, IMMEDIATE, INDEXED_X, *4 * [ZERO], *2 * [IMPLIED, IMMEDIATE], *4 * [ABSOLUTE],
    RELATIVE, INDEXED_Y, IMPLIED, INDEXED_Y, *4 * [ZERO_X], *2 * [IMPLIED, ABSOLUTE_Y], *4 * [ABSOLUTE_X],
)  # fmt: skip
"""Addressing modes by the lowest five bits of the opcode."""
_OTHER_MODES = {
    0x00: IMPLIED, 0x20: ABSOLUTE, 0x40: IMPLIED, 0x60: IMPLIED, 0x6C: INDIRECT, 0x08: PUSH, 0x48: PUSH, 0x28: PULL,
    0x68: PULL, 0x96: ZERO_Y, 0xB6: ZERO_Y, 0x97: ZERO_Y, 0xB7: ZERO_Y, 0xBE: ABSOLUTE_Y, 0xBF: ABSOLUTE_Y,
}  # fmt: skip
_MODE_CYCLES = {
    IMPLIED: 2, IMMEDIATE: 2, ZERO: 3, ZERO_X: 4, ZERO_Y: 4, RELATIVE: 2, INDEXED_X: 6, INDEXED_Y: 5,
    ABSOLUTE: 4, ABSOLUTE_X: 4, ABSOLUTE_Y: 4, INDIRECT: 5, PUSH: 3, PULL: 4,
}  # fmt: skip
_OTHER_CYCLES = {0x00: 7, 0x20: 6, 0x40: 6, 0x60: 6, 0x4C: 3}


class _Do(NamedTuple):
    """Definition of an instruction: take a value from a source, change it, combine it with A, put it into a target."""

    target: int = TO_NOWHERE
    source: int = FROM_MEMORY
    unary: int = KEEP  # change of the value
    binary: int = NOTHING  # with A; but `COMPARE` is with the target, which keeps its value
    nz: bool = True  # the result sets N and Z
    store: bool = False  # the changed value goes to memory
    flow: int = ALONG


_INSTRUCTIONS = {
    "LDA": _Do(TO_A), "LDX": _Do(TO_X), "LDY": _Do(TO_Y), "LAX": _Do(TO_A_AND_X), "PLA": _Do(TO_A),
    "TAX": _Do(TO_X, FROM_A), "TAY": _Do(TO_Y, FROM_A), "TXA": _Do(TO_A, FROM_X), "TYA": _Do(TO_A, FROM_Y),
    "TSX": _Do(TO_X, FROM_SP), "TXS": _Do(TO_SP, FROM_X, nz=False), "PLP": _Do(TO_STATUS, nz=False),
    "ORA": _Do(TO_A, binary=ORA), "AND": _Do(TO_A, binary=AND), "EOR": _Do(TO_A, binary=EOR),
    "ADC": _Do(TO_A, binary=ADC), "SBC": _Do(TO_A, binary=SBC), "BIT": _Do(binary=BIT, nz=False),
    "CMP": _Do(TO_A, binary=COMPARE), "CPX": _Do(TO_X, binary=COMPARE), "CPY": _Do(TO_Y, binary=COMPARE),
    **{name: _Do(source=source, nz=False, store=True) for name, source in (
        ("STA", FROM_A), ("STX", FROM_X), ("STY", FROM_Y), ("SAX", FROM_A_AND_X), ("PHA", FROM_A), ("PHP", FROM_STATUS),
    )},
    "INX": _Do(TO_X, FROM_X, INC), "INY": _Do(TO_Y, FROM_Y, INC),
    "DEX": _Do(TO_X, FROM_X, DEC), "DEY": _Do(TO_Y, FROM_Y, DEC),
    "asl": _Do(TO_A, FROM_A, ASL), "rol": _Do(TO_A, FROM_A, ROL),
    "lsr": _Do(TO_A, FROM_A, LSR), "ror": _Do(TO_A, FROM_A, ROR),
    **{name: _Do(unary=unary, store=True) for name, unary in (
        ("ASL", ASL), ("ROL", ROL), ("LSR", LSR), ("ROR", ROR), ("INC", INC), ("DEC", DEC),
    )},
    **{name: _Do(TO_A, unary=unary, binary=binary, store=True) for name, unary, binary in (
        ("SLO", ASL, ORA), ("RLA", ROL, AND), ("SRE", LSR, EOR), ("RRA", ROR, ADC), ("DCP", DEC, COMPARE),
        ("ISB", INC, SBC),
    )},
    "ANC": _Do(TO_A, FROM_A_AND_MEMORY, flow=CARRY_IS_SIGN), "ALR": _Do(TO_A, FROM_A_AND_MEMORY, LSR),
    **dict.fromkeys(("BPL", "BMI", "BVC", "BVS", "BCC", "BCS", "BNE", "BEQ"), _Do(nz=False, flow=BRANCH)),
    **dict.fromkeys(("CLC", "SEC", "CLI", "SEI", "CLV", "CLD", "SED"), _Do(nz=False, flow=SET_FLAG)),
    **{name: _Do(source=FROM_A, nz=False, flow=flow) for name, flow in (
        ("JMP", JUMP), ("JSR", CALL), ("RTS", RETURN), ("RTI", FROM_INTERRUPT), ("BRK", BREAK),
    )},
    "NOP": _Do(nz=False), "---": _Do(nz=False, flow=JAM),
}  # fmt: skip


def _word(opcode: int) -> int:
    """Pack the definition of an instruction into one word."""
    name = _NAMES.split()[opcode]
    do, mode = _INSTRUCTIONS[name], IMPLIED if name == "---" else _OTHER_MODES.get(opcode, _MODES[opcode & 31])
    reads = mode not in (IMPLIED, IMMEDIATE, RELATIVE, INDIRECT, PUSH) and do.source in (FROM_MEMORY, FROM_A_AND_MEMORY)
    indexed = mode in (ABSOLUTE_X, ABSOLUTE_Y, INDEXED_Y)
    cycles = _OTHER_CYCLES.get(opcode, _MODE_CYCLES[mode])
    cycles += 2 * reads + indexed if do.store else 0
    fields = (
        (mode, MODE), (cycles, CYCLES), (indexed and reads and not do.store, PAGE), (reads, READ), (do.store, WRITE),
        (do.source, SOURCE), (do.unary, UNARY), (do.binary, BINARY), (do.target, TARGET), (do.nz, NZ), (do.flow, FLOW),
        *((do.binary != COMPARE and do.target in targets, bit) for targets, bit in (
            ((TO_A, TO_A_AND_X), INTO_A), ((TO_X, TO_A_AND_X), INTO_X), ((TO_Y,), INTO_Y),
        )),
    )  # fmt: skip
    return sum(int(value) << shift for value, shift in fields)


WORDS = tuple(map(_word, range(256)))
"""The word of each opcode."""
FREQUENT = bytes.fromhex(
    "85 B1 A5 D0 10 88 A9 F0 B5 86 CA B9 EA B0 A4 84 90 0A 29 C6 4A A6 C9 38 E5 4C C0 BD A2 95 A0 A8"
    "C8 30 C4 AA 8A E4 68 E0 60 20 08 25 E6 18 E8 C5 65 AD 98 E9 8D 49 48 45 05 69 D5 24 B4 BE 9A"
)
"""The 63 most frequent opcodes of ale-py's games of 2 and 4 KB, in order: 98% of the instructions that they run."""
LENGTHS = tuple(
    1 if mode in (IMPLIED, PUSH, PULL) else 3 if mode >= ABSOLUTE else 2 for mode in (w & 15 for w in WORDS)
)
"""Bytes of each instruction, including its operand."""


def _waits(code: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Find the loops that only wait for the RIOT's timer: a load from INTIM or TIMINT, then a branch back to it.

    Returns:
        The kind of wait at each byte, 0 for none.  [bytes of the ROM] uint64
    """
    low, high, branch, back = (np.roll(code, -k) for k in (1, 2, 3, 4))
    loads = np.isin(code, (0xAC, 0xAD, 0xAE))  # LDY, LDA, LDX
    loops = (high == 0x02) & (back == 0xFB) & ((np.arange(len(code)) & 0x3FF) < 0x3FB)  # within one kilobyte
    intim, either = loops & (low == 0x84), loops & np.isin(low, (0x84, 0x85))
    waits = np.zeros_like(code)
    waits[either & (loads | (code == 0x2C)) & (branch == 0x10)] = WAIT_WHILE_PLUS  # BIT too; BPL
    waits[intim & (loads | (code == 0x2C)) & (branch == 0x30)] = WAIT_WHILE_MINUS  # BMI
    waits[intim & loads & (branch == 0xD0)] = WAIT_WHILE_NOT_ZERO  # BNE
    return waits


def make_program(rom: bytes, *, with_ram: bool = False, switches: bool = True) -> npt.NDArray[np.uint64]:
    """Decode the instruction that starts at each byte of a ROM, so that a console fetches it with one read.

    Args:
        rom: the bytes of the cartridge.
        with_ram: the processor sees RAM in its second 128 bytes.
        switches: reading some addresses switches banks.

    Returns:
        One number for each byte, [bytes of the ROM] uint64, from its lowest bits on: the opcode and the next two bytes
        (24 bits), the length of the instruction (2), its place in `FREQUENT`, counted from 1 (6), and its word from
        `WORDS` (32). The length is 0 where the console must read byte by byte: at the end of a kilobyte, at addresses
        that switch banks or lie in RAM, and just before these. The place is 0 there, in loops that wait for the timer,
        and for opcodes that are not in `FREQUENT`.
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
