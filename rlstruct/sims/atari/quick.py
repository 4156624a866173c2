"""Instructions on a CPU: the phases of `cpu`, compiled once for each of the opcodes that games use most.

With an opcode's word as a constant, little is left of the phases, and most instructions change nothing but the
registers of the processor, which the CPU then keeps in its own. A GPU, whose threads wait for each other at each phase,
has no use for it.
"""

import warp as wp

from rlstruct.sims.atari import opcodes as op
from rlstruct.sims.atari.beam import follow_beam
from rlstruct.sims.atari.cartridge import FIXED, rom_byte, rom_place
from rlstruct.sims.atari.cpu import (
    change_value,
    fetch_instruction,
    find_operand,
    finish,
    follow_flow,
    pick_source,
    use_value,
)
from rlstruct.sims.atari.state import (
    MOST_INSTRUCTIONS,
    Console,
    Outer,
    Registers,
    Shared,
    byte_of_ram,
    instruction,
    set_byte_of_ram,
)
from rlstruct.sims.atari.tia import write_tia


@wp.func(inline=True)
def copy_processor(to: Registers, m: Registers):
    """Copy what instructions change that touch no chip."""
    to.a = m.a
    to.x = m.x
    to.y = m.y
    to.sp = m.sp
    to.pc = m.pc
    to.negative = m.negative
    to.overflow = m.overflow
    to.break_flag = m.break_flag
    to.decimal = m.decimal
    to.no_interrupts = m.no_interrupts
    to.zero = m.zero
    to.carry = m.carry
    to.cycles = m.cycles
    to.bus = m.bus
    to.address = m.address
    to.pages = m.pages
    to.ended = m.ended
    to.n_instructions = m.n_instructions


@wp.func(inline=False)
def finish_in_memory(board: Shared, i: int, m: Registers, outer: Outer, text: wp.uint64):
    """Go through the other phases."""
    finish(board, i, m, outer, text)


@wp.func(inline=False)
def write_chip(board: Shared, i: int, m: Registers, outer: Outer):
    """Write the value to the TIA."""
    follow_beam(board, i, m, outer, 1, 0, 1)
    write_tia(m, outer, m.address, m.value)


@wp.func(inline=True)
def needs_phases(board: Shared, m: Registers, word: int) -> int:
    """1 if an instruction touches anything but the ROM and the console's RAM, or adds decimal numbers."""
    binary = (word >> op.BINARY) & 7
    apart = wp.where(binary == op.ADC or binary == op.SBC, m.decimal, 0)
    writes = (word >> op.WRITE) & 1
    if ((word >> op.READ) & 1) + writes != 0 and (m.address & 0x1280) != 0x80:
        switches = board.mapper != FIXED and (m.address & 0xFE0) == 0xFE0
        apart |= wp.where((m.address & 0x1000) == 0 or writes != 0 or switches, 1, 0)
    return apart


@wp.func(inline=True)
def compute_quickly(board: Shared, i: int, m: Registers, word: int):
    """As `cpu.compute`, where no chip is touched."""
    pick_source(m, (word >> op.SOURCE) & 7)
    if ((word >> op.READ) & 1) != 0:
        if (m.address & 0x1000) != 0:
            m.bus = rom_byte(board, i, m, m.address)
        else:
            m.bus = byte_of_ram(board.ram, i, m.address & 127)
        m.value = m.bus
    change_value(m, word)
    if ((word >> op.WRITE) & 1) != 0:
        set_byte_of_ram(board.ram, i, m.address & 127, m.value)
    use_value(m, word)


@wp.func(inline=True)
def do(
    board: Shared, i: int, m: Registers, whole: Registers, outer: Outer, text: wp.uint64, opcode: int, length: int,
    word: int,
) -> int:  # fmt: skip
    """Do one instruction, of which all but two bytes of `text` are constants; 1 if the other phases must finish it."""
    m.pc += length
    m.bus = int(text >> wp.uint64(8 * length - 8)) & 0xFF
    m.cycles += (word >> op.CYCLES) & 15
    find_operand(board, i, m, word, int(text >> wp.uint64(8)) & 0xFFFF)
    left = needs_phases(board, m, word)
    flow = (word >> op.FLOW) & 15
    if left == 0:
        if flow < op.BRANCH:
            compute_quickly(board, i, m, word)
        else:
            follow_flow(board, i, m, flow, word & 15, opcode)
    elif ((word >> op.READ) & 3) == 2 and (m.address & 0x1080) == 0:  # it only writes, and to the TIA
        pick_source(m, (word >> op.SOURCE) & 7)
        whole.cycles = m.cycles
        whole.address = m.address
        whole.value = m.value
        write_chip(board, i, whole, outer)
        m.cycles = whole.cycles
        m.ended = whole.ended
        m.bus = m.value
        left = 0
    return left


@wp.func(inline=True)
def do_frequent(
    board: Shared, i: int, m: Registers, whole: Registers, outer: Outer, text: wp.uint64, number: int
) -> int:
    """Do the instruction with this number in `opcodes.FREQUENT`: the loop becomes a jump to one of as many places."""
    for k in range(wp.static(len(op.FREQUENT))):
        if number == k + 1:
            return do(
                board, i, m, whole, outer, text,
                wp.static(op.FREQUENT[k]), wp.static(op.LENGTHS[op.FREQUENT[k]]), wp.static(op.WORDS[op.FREQUENT[k]]),
            )  # fmt: skip
    return 1


@wp.func(inline=False)
def run_quickly(board: Shared, i: int, whole: Registers, outer: Outer):
    """As `cpu.run`. What the chips use lies in `whole`, what instructions use in `m`."""
    m = Console()
    copy_processor(m, whole)
    while m.ended == 0 and m.n_instructions < MOST_INSTRUCTIONS:
        text = wp.uint64(0)
        if (m.pc & 0x1000) != 0:
            text = instruction(board.program, rom_place(board, m, m.pc))
        number = (int(text) >> 26) & 63
        left = int(1)
        if number != 0 and m.n_instructions < MOST_INSTRUCTIONS - 1:
            left = do_frequent(board, i, m, whole, outer, text, number)
        else:
            text = fetch_instruction(board, i, m)
            word = int(text >> wp.uint64(32))
            m.cycles += (word >> op.CYCLES) & 15
            find_operand(board, i, m, word, int(text >> wp.uint64(8)) & 0xFFFF)
        if left != 0:
            copy_processor(whole, m)
            finish_in_memory(board, i, whole, outer, text)
            copy_processor(m, whole)
        m.n_instructions += 1
    copy_processor(whole, m)
