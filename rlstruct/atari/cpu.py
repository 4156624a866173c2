"""The 6507 processor: instructions split into phases, so that the consoles of a GPU warp stay together.

The table in `opcodes` defines what each phase does. An instruction's cycles are counted before it accesses memory.
"""

import warp as wp

from rlstruct.atari import opcodes as op
from rlstruct.atari.alu import combine, shift_or_count
from rlstruct.atari.cartridge import rom_byte, rom_place, switch_bank, write_cartridge
from rlstruct.atari.riot import read_riot, wait, write_riot
from rlstruct.atari.spans import CATCH_UP, catch_up, follow_beam
from rlstruct.atari.state import (
    MOST_INSTRUCTIONS,
    Console,
    Outer,
    Registers,
    Shared,
    byte_of_ram,
    instruction,
    noinline,
    on_a_cpu,
    puts_off,
    set_byte_of_ram,
    unknown,
)
from rlstruct.atari.tia import read_tia, write_tia


@wp.func
def fetch_slowly(board: Shared, i: int, m: Registers) -> wp.uint64:
    """Read an instruction byte by byte: a byte may come from RAM, and reading it may switch banks."""
    text = wp.uint64(0)
    length = int(1)
    k = int(0)
    while k < length:
        if (m.pc & 0x1000) != 0:
            switch_bank(board, m, m.pc)
            m.bus = rom_byte(board, i, m, m.pc)
        else:
            m.bus = byte_of_ram(board.ram, i, m.pc & 127)
        m.pc = (m.pc + 1) & 0xFFFF
        text |= wp.uint64(m.bus) << wp.uint64(8 * k)
        if k == 0:
            m.value = board.opcodes[m.bus]
        mode = m.value & 15
        length = wp.where(mode >= op.IMPLIED, 1, wp.where(mode >= op.ABSOLUTE, 3, 2))
        k += 1
    return text | (wp.uint64(wp.uint32(m.value)) << wp.uint64(32))


@wp.func
def decoded_instruction(board: Shared, m: Registers) -> wp.uint64:
    """Return the entry of `Board.program` for the instruction, 0 if it lies in RAM."""
    if (m.pc & 0x1000) != 0:
        return instruction(board.program, rom_place(board, m, m.pc))
    return wp.uint64(0)


@wp.func
def fetch_instruction(board: Shared, i: int, m: Registers) -> wp.uint64:
    """Return an instruction's bytes and, in the upper 32 bits, its word of `opcodes`; in one read where possible."""
    text = decoded_instruction(board, m)
    length = int(text >> wp.uint64(24)) & 3
    if length == 0:
        return fetch_slowly(board, i, m)
    m.pc += length
    m.bus = int(text >> wp.uint64(8 * length - 8)) & 0xFF
    return text


@wp.func
def ram_word(board: Shared, i: int, address: int) -> int:
    """Read two bytes of page zero."""
    return byte_of_ram(board.ram, i, address & 127) | (byte_of_ram(board.ram, i, (address + 1) & 127) << 8)


@wp.func
def status(m: Registers) -> int:
    """Pack the flags into one byte."""
    upper = (m.negative << 7) | (m.overflow << 6) | 0x20 | (m.break_flag << 4)
    return upper | (m.decimal << 3) | (m.no_interrupts << 2) | (m.zero << 1) | m.carry


@wp.func
def set_status(m: Registers, byte: int):
    """Unpack the flags from one byte."""
    m.negative = (byte >> 7) & 1
    m.overflow = (byte >> 6) & 1
    m.break_flag = (byte >> 4) & 1
    m.decimal = (byte >> 3) & 1
    m.no_interrupts = (byte >> 2) & 1
    m.zero = (byte >> 1) & 1
    m.carry = byte & 1


@wp.func
def find_operand(board: Shared, i: int, m: Registers, word: int, operand: int):
    """Compute the address of the operand, in memory or on the stack."""
    mode = word & 15
    if mode < op.IMPLIED:
        m.address = operand
        if mode == op.INDEXED_X or mode == op.INDEXED_Y:
            m.address = ram_word(board, i, operand + wp.where(mode == op.INDEXED_X, m.x, 0))
            m.bus = m.address >> 8
        base = m.address
        index = wp.where((mode & 7) == 1, m.x, 0)
        index = wp.where((mode & 3) == 2, m.y, index)
        m.address = (base + index) & wp.where(mode < op.INDEXED_X, 0xFF, 0xFFFF)
        if ((word >> op.PAGE) & 1) != 0 and ((base ^ m.address) & 0xFF00) != 0:
            m.cycles += 1
    elif mode == op.PUSH:
        m.address = 0x100 | m.sp
        m.sp = (m.sp - 1) & 0xFF
    elif mode == op.PULL:
        m.bus = byte_of_ram(board.ram, i, m.sp & 127)
        m.sp = (m.sp + 1) & 0xFF
        m.address = 0x100 | m.sp


@wp.func
def read_chip(m: Registers, outer: Outer):
    """Read a register of the TIA or the RIOT into `m.bus`."""
    if (m.address & 0x0080) == 0:
        read_tia(m, outer, m.address)
    else:
        read_riot(m, outer, m.address)


@wp.func
def write_chip(m: Registers, outer: Outer):
    """Write `m.value` to a register of the TIA or the RIOT."""
    if (m.address & 0x0080) == 0:
        write_tia(m, outer, m.address, m.value)
    else:
        write_riot(m, outer, m.address, m.value)


read_chip_noinline, write_chip_noinline, follow_beam_noinline, catch_up_noinline = map(
    noinline, (read_chip, write_chip, follow_beam, catch_up)
)


@wp.func
def read_memory(board: Shared, i: int, m: Registers, outer: Outer):
    """Read the operand into `m.bus`."""
    address = m.address
    if (address & 0x1000) != 0:
        switch_bank(board, m, address)
        m.bus = rom_byte(board, i, m, address)
    elif (address & 0x0280) == 0x80:
        m.bus = byte_of_ram(board.ram, i, address & 127)
    elif on_a_cpu():
        read_chip_noinline(m, outer)
    else:
        read_chip(m, outer)


@wp.func
def write_memory(board: Shared, i: int, m: Registers, outer: Outer):
    """Write `m.value` to the operand's address."""
    address = m.address
    m.bus = m.value
    if (address & 0x1000) != 0:
        write_cartridge(board, i, m, address, m.value)
    elif (address & 0x0280) == 0x80:
        set_byte_of_ram(board.ram, i, address & 127, m.value)
    elif on_a_cpu():
        write_chip_noinline(m, outer)
    else:
        write_chip(m, outer)


@wp.func
def pick_source(m: Registers, source: int):
    """Set `m.value` from the instruction's source."""
    value = wp.where(source == op.FROM_A, m.a, m.bus)
    value = wp.where(source == op.FROM_X, m.x, value)
    m.value = wp.where(source == op.FROM_Y, m.y, value)
    if source >= op.FROM_SP:
        m.value = m.sp
        if source == op.FROM_STATUS:
            m.value = status(m)
        elif source == op.FROM_A_AND_X:
            m.value = m.a & m.x
        elif source == op.FROM_A_AND_MEMORY:
            m.value = m.a & m.bus


@wp.func
def put_result(m: Registers, word: int):
    """Set N and Z, and store the result in the target register."""
    value = m.value
    if ((word >> op.NZ) & 1) != 0:
        m.negative = value >> 7
        m.zero = wp.where(value == 0, 1, 0)
    # Selections, because the consoles of a warp would part at branches.
    m.a = wp.where(((word >> op.INTO_A) & 1) != 0, value, m.a)
    m.x = wp.where(((word >> op.INTO_X) & 1) != 0, value, m.x)
    m.y = wp.where(((word >> op.INTO_Y) & 1) != 0, value, m.y)
    target = (word >> op.TARGET) & 7
    if target >= op.TO_SP:
        if target == op.TO_SP:
            m.sp = value
        else:
            set_status(m, value)


@wp.func
def branch(m: Registers, opcode: int):
    """BPL to BEQ: the top two bits of the opcode select the flag; the next bit is the value that takes the branch."""
    name = opcode >> 6
    flag = wp.where(name == 1, m.overflow, m.negative)
    flag = wp.where(name == 2, m.carry, flag)
    flag = wp.where(name == 3, m.zero, flag)
    if flag == ((opcode >> 5) & 1):
        target = (m.pc + ((m.address ^ 0x80) - 0x80)) & 0xFFFF
        m.cycles += 1 + wp.where(((target ^ m.pc) & 0xFF00) != 0, 1, 0)
        m.pc = target


@wp.func
def set_flag(m: Registers, opcode: int):
    """CLC, SEC, CLI, SEI, CLV, CLD and SED."""
    wanted = (opcode >> 5) & 1
    if (opcode >> 6) == 0:
        m.carry = wanted
    elif (opcode >> 6) == 1:
        m.no_interrupts = wanted
    elif (opcode >> 6) == 2:
        m.overflow = 0
    else:
        m.decimal = wanted


@wp.func
def push(board: Shared, i: int, m: Registers, byte: int):
    """Push a byte to the stack in RAM."""
    set_byte_of_ram(board.ram, i, m.sp & 127, byte)
    m.sp = (m.sp - 1) & 0xFF


@wp.func
def jump(board: Shared, i: int, m: Registers, flow: int):
    """JMP, JSR, RTS, RTI and BRK."""
    if flow == op.RETURN:
        m.address = ram_word(board, i, m.sp + 1) + 1
        m.sp = (m.sp + 2) & 0xFF
    elif flow == op.FROM_INTERRUPT:
        set_status(m, byte_of_ram(board.ram, i, (m.sp + 1) & 127))
        m.address = ram_word(board, i, m.sp + 2)
        m.sp = (m.sp + 3) & 0xFF
    elif flow == op.CALL or flow == op.BREAK:
        back = m.pc + wp.where(flow == op.BREAK, 1, -1)
        push(board, i, m, (back >> 8) & 0xFF)
        push(board, i, m, back & 0xFF)
        if flow == op.BREAK:
            m.break_flag = 1
            push(board, i, m, status(m))
            m.no_interrupts = 1
            m.address = rom_byte(board, i, m, 0xFFFE) | (rom_byte(board, i, m, 0xFFFF) << 8)
    m.pc = m.address & 0xFFFF


@wp.func
def indirect(board: Shared, i: int, m: Registers):
    """Look up the target of JMP (address); the 6502 reads its high byte from the same page."""
    address = m.address
    wrapped = (address & 0xFF00) | ((address + 1) & 0xFF)
    if (address & 0x1000) != 0:
        m.address = rom_byte(board, i, m, address) | (rom_byte(board, i, m, wrapped) << 8)
    else:
        m.address = ram_word(board, i, address)


@wp.func
def follow_and_wait(board: Shared, i: int, m: Registers, outer: Outer, word: int, touches: int) -> int:
    """Follow the beam, and return the instruction's word; 0 if it must wait.

    A console that waits does nothing, but does it together with the others of its warp.
    """
    if touches == 0 and m.n_instructions != MOST_INSTRUCTIONS - 1:
        return word
    follow_beam(board, i, m, outer, touches, (word >> op.READ) & 1, (word >> op.WRITE) & 1)
    return word & (unknown(board.waits) - 1)


@wp.func
def compute(board: Shared, i: int, m: Registers, outer: Outer, word: int):
    """Read the operand, compute, and write the result."""
    pick_source(m, (word >> op.SOURCE) & 7)
    reads = (word >> op.READ) & 1
    writes = (word >> op.WRITE) & 1
    touches = wp.where((m.address & 0x1080) == 0, reads | writes, 0)
    if not on_a_cpu():
        word = follow_and_wait(board, i, m, outer, word, touches)
        reads = (word >> op.READ) & 1
        writes = (word >> op.WRITE) & 1
    elif touches != 0 or m.n_instructions == MOST_INSTRUCTIONS - 1:
        follow_beam_noinline(board, i, m, outer, touches, reads, writes)
        if reads != 0:  # noqa: SIM102 - a constant for frequent opcodes, and Warp evaluates both sides of `and`
            if board.waits != 0:
                board.word = word
                return
    if reads != 0:
        read_memory(board, i, m, outer)
        m.value = m.bus
    unary = (word >> op.UNARY) & 7
    if unary != op.KEEP:
        shift_or_count(m, unary)
    if writes != 0:
        write_memory(board, i, m, outer)
    binary = (word >> op.BINARY) & 7
    if binary != op.NOTHING:
        combine(m, binary, (word >> op.TARGET) & 7)
    put_result(m, word)


@wp.func
def begin_instruction(board: Shared, i: int, m: Registers, word: int, operand: int):
    """Count cycles and find the operand."""
    m.cycles += (word >> op.CYCLES) & 15
    find_operand(board, i, m, word, operand)


@wp.func
def finish_instruction(board: Shared, i: int, m: Registers, outer: Outer, word: int, opcode: int):
    """Run all phases after `begin_instruction`."""
    flow = (word >> op.FLOW) & 15
    if flow < op.BRANCH or m.n_instructions == MOST_INSTRUCTIONS - 1:
        compute(board, i, m, outer, word)
    if flow == op.BRANCH:
        branch(m, opcode)
    elif flow != op.ALONG:
        if flow == op.CARRY_IS_SIGN:
            m.carry = m.value >> 7
        elif flow == op.SET_FLAG:
            set_flag(m, opcode)
        elif flow == op.JAM:
            m.pc = (m.pc - 1) & 0xFFFF
        elif flow > op.BRANCH:
            if (word & 15) == op.INDIRECT:
                indirect(board, i, m)
            jump(board, i, m, flow)
        else:
            wait(m, outer, flow)


@wp.func
def step(board: Shared, i: int, m: Registers, outer: Outer):
    """Run an instruction, or finish the one that waits for collisions."""
    if board.waits == 0:
        text = fetch_instruction(board, i, m)
        board.word = int(text >> wp.uint64(32))
        board.opcode = int(text) & 0xFF
        begin_instruction(board, i, m, board.word, int(text >> wp.uint64(8)) & 0xFFFF)
    board.waits = 0
    finish_instruction(board, i, m, outer, board.word, board.opcode)


step_noinline = noinline(step)


@wp.func(inline=True)
def step_on_a_cpu(board: Shared, i: int, m: Registers, outer: Outer):
    """Run an instruction; frequent opcodes have specialized code, in which most phases are removed at compile time.

    The loop over opcodes compiles to a jump table. A GPU would lose: its threads would diverge by opcode.
    """
    text = decoded_instruction(board, m)
    number = int(text >> wp.uint64(26)) & 63
    for k in range(wp.static(len(op.FREQUENT))):
        if number == k + 1:
            operand = int(text >> wp.uint64(8)) & 0xFFFF
            m.pc += wp.static(op.LENGTHS[op.FREQUENT[k]])
            m.bus = int(text >> wp.static(wp.uint64(8 * op.LENGTHS[op.FREQUENT[k]] - 8))) & 0xFF
            begin_instruction(board, i, m, wp.static(op.WORDS[op.FREQUENT[k]]), operand)
            finish_instruction(board, i, m, outer, wp.static(op.WORDS[op.FREQUENT[k]]), wp.static(op.FREQUENT[k]))
            return
    step_noinline(board, i, m, outer)


@wp.func
def run(board: Shared, i: int, consoles: wp.array(dtype=Console), m: Registers, outer: Outer):
    """Run instructions until the frame ends. All consoles of a warp catch up with their beams together."""
    goes_on = int(1)
    while goes_on != 0:
        while m.ended == 0 and m.n_instructions < MOST_INSTRUCTIONS:
            if on_a_cpu():
                step_on_a_cpu(board, i, m, outer)
            else:
                step(board, i, m, outer)
            m.n_instructions += 1
        goes_on = 0
        if puts_off(board):
            if on_a_cpu():
                catch_up_noinline(board, i, m, outer)
            else:
                consoles[i] = m  # the beam takes all registers of a GPU
                catch_up(board, i, consoles[i], outer)
                m = consoles[i]
            if m.ended == CATCH_UP:
                goes_on = 1
                m.ended = 0
                if on_a_cpu() and board.waits != 0:
                    step_noinline(board, i, m, outer)
                    m.n_instructions += 1
