"""The 6507: one instruction in phases, each of which all consoles of a warp go through together.

What each phase does is in the table of `opcodes`. An instruction's cycles count before it touches memory.
"""

import warp as wp

from rlstruct.sims.atari import opcodes as op
from rlstruct.sims.atari.beam import sweep
from rlstruct.sims.atari.cartridge import rom_byte, rom_place, switch_bank, write_cartridge
from rlstruct.sims.atari.riot import read_riot, write_riot
from rlstruct.sims.atari.state import Outer, Registers, Shared, instruction
from rlstruct.sims.atari.tia import read_tia, write_delay, write_tia


@wp.func
def fetch(board: Shared, i: int, m: Registers):
    """Read the next byte of the program, from the cartridge or RAM."""
    if (m.pc & 0x1000) != 0:
        switch_bank(board, m, m.pc)
        m.bus = rom_byte(board, i, m, m.pc)
    else:
        m.bus = int(board.ram[i, m.pc & 127])
    m.pc = (m.pc + 1) & 0xFFFF


@wp.func
def fetch_slowly(board: Shared, i: int, m: Registers) -> wp.uint64:
    """Read an instruction byte by byte, because each byte may come from RAM, or switch banks."""
    text = wp.uint64(0)
    length = int(1)
    k = int(0)
    while k < length:
        fetch(board, i, m)
        text |= wp.uint64(m.bus) << wp.uint64(8 * k)
        if k == 0:
            word = board.opcodes[m.bus]
            text |= wp.uint64(wp.uint32(word)) << wp.uint64(32)
            mode = word & 15
            if mode >= op.IMMEDIATE and mode <= op.INDIRECT:
                length = wp.where(mode >= op.ABSOLUTE, 3, 2)
        k += 1
    return text


@wp.func
def fetch_instruction(board: Shared, i: int, m: Registers) -> wp.uint64:
    """Read an instruction, where possible as a whole: its bytes, and above 32 bits the word of `opcodes`."""
    text = wp.uint64(0)
    if (m.pc & 0x1000) != 0:
        text = instruction(board.program, rom_place(board, m, m.pc))
    length = int(text >> wp.uint64(24)) & 3
    if length == 0:
        return fetch_slowly(board, i, m)
    m.pc = (m.pc + length) & 0xFFFF
    m.bus = int(text >> wp.uint64(8 * length - 8)) & 0xFF
    return text


@wp.func
def ram_word(board: Shared, i: int, address: int) -> int:
    """Read two bytes of page zero."""
    return int(board.ram[i, address & 127]) | (int(board.ram[i, (address + 1) & 127]) << 8)


@wp.func
def status(m: Registers) -> int:
    """The flags as one byte."""
    upper = (m.negative << 7) | (m.overflow << 6) | 0x20 | (m.break_flag << 4)
    return upper | (m.decimal << 3) | (m.no_interrupts << 2) | (m.zero << 1) | m.carry


@wp.func
def set_status(m: Registers, byte: int):
    """Set the flags from one byte."""
    m.negative = (byte >> 7) & 1
    m.overflow = (byte >> 6) & 1
    m.break_flag = (byte >> 4) & 1
    m.decimal = (byte >> 3) & 1
    m.no_interrupts = (byte >> 2) & 1
    m.zero = (byte >> 1) & 1
    m.carry = byte & 1


@wp.func
def find_operand(board: Shared, i: int, m: Registers, word: int, operand: int):
    """Read the bytes after the opcode, and find the address that they mean."""
    mode = word & 15
    index = wp.where(mode == op.ZERO_X or mode == op.ABSOLUTE_X, m.x, 0)
    index = wp.where(mode == op.ZERO_Y or mode == op.ABSOLUTE_Y, m.y, index)
    base = m.address
    if mode >= op.IMMEDIATE and mode <= op.INDIRECT:
        base = operand & 0xFF
        m.address = (base + index) & 0xFF
        if mode >= op.ABSOLUTE:
            base = operand
            m.address = (base + index) & 0xFFFF
        elif mode == op.INDEXED_X:
            m.address = ram_word(board, i, base + m.x)
            m.bus = m.address >> 8
        elif mode == op.INDEXED_Y:
            base = ram_word(board, i, base)
            m.bus = base >> 8
            m.address = (base + m.y) & 0xFFFF
    elif mode == op.PUSH:
        m.address = 0x100 | m.sp
        m.sp = (m.sp - 1) & 0xFF
    elif mode == op.PULL:
        m.bus = int(board.ram[i, m.sp & 127])
        m.sp = (m.sp + 1) & 0xFF
        m.address = 0x100 | m.sp
    if ((word >> op.PAGE) & 1) != 0 and ((base ^ m.address) & 0xFF00) != 0:
        m.cycles += 1


@wp.func
def read_memory(board: Shared, i: int, m: Registers, outer: Outer):
    """Put the operand on the bus."""
    address = m.address
    if (address & 0x1000) != 0:
        switch_bank(board, m, address)
        m.bus = rom_byte(board, i, m, address)
    elif (address & 0x0080) == 0:
        read_tia(m, outer, address)
    elif (address & 0x0200) == 0:
        m.bus = int(board.ram[i, address & 127])
    else:
        read_riot(m, outer, address)


@wp.func
def write_memory(board: Shared, i: int, m: Registers, outer: Outer):
    """Write the value."""
    address = m.address
    m.bus = m.value
    if (address & 0x1000) != 0:
        write_cartridge(board, i, m, address, m.value)
    elif (address & 0x0080) == 0:
        write_tia(m, outer, address, m.value)
    elif (address & 0x0200) == 0:
        board.ram[i, address & 127] = wp.uint8(m.value)
    else:
        write_riot(m, outer, address, m.value)


@wp.func
def pick_source(m: Registers, source: int):
    """Where the value comes from."""
    value = wp.where(source == op.FROM_A, m.a, m.bus)
    value = wp.where(source == op.FROM_X, m.x, value)
    value = wp.where(source == op.FROM_Y, m.y, value)
    if source >= op.FROM_SP:
        value = m.sp
        if source == op.FROM_STATUS:
            value = status(m)
        elif source == op.FROM_A_AND_X:
            value = m.a & m.x
        elif source == op.FROM_A_AND_MEMORY:
            value = m.a & m.bus
    m.value = value


@wp.func
def shift_or_count(m: Registers, unary: int):
    """ASL, ROL, LSR, ROR, INC and DEC of the value."""
    value = m.value
    carry = m.carry
    if unary == op.ASL or unary == op.ROL:
        m.carry = value >> 7
        value = (value << 1) & 0xFF
        if unary == op.ROL:
            value |= carry
    elif unary == op.LSR or unary == op.ROR:
        m.carry = value & 1
        value = value >> 1
        if unary == op.ROR:
            value |= carry << 7
    elif unary == op.INC:
        value = (value + 1) & 0xFF
    elif unary == op.DEC:
        value = (value - 1) & 0xFF
    m.value = value


@wp.func
def decimal_value(byte: int) -> int:
    """Two decimal digits as a number."""
    return (byte >> 4) * 10 + (byte & 15)


@wp.func
def decimal_digits(number: int) -> int:
    """A number as two decimal digits; hundreds are lost."""
    return ((number % 100) // 10) * 16 + number % 10


@wp.func
def add(m: Registers, value: int, subtract: int):
    """ADC or SBC: the result is `m.value`; N and Z are set later."""
    total = m.a + value + m.carry
    result = total & 0xFF
    carry = total >> 8
    if subtract != 0:
        total = m.a + (value ^ 0xFF) + m.carry
        result = total & 0xFF
        carry = total >> 8
        m.overflow = ((m.a ^ value) & (m.a ^ result) & 0x80) >> 7
        if m.decimal != 0:
            total = decimal_value(m.a) - decimal_value(value) - 1 + m.carry
            if total < 0:
                total += 100
            result = decimal_digits(total)
            m.overflow = ((m.a ^ result) & (result ^ value) & 0x80) >> 7
    else:
        m.overflow = ((m.a ^ result) & (value ^ result) & 0x80) >> 7
        if m.decimal != 0:
            total = decimal_value(m.a) + decimal_value(value) + m.carry
            carry = wp.where(total > 99, 1, 0)
            result = decimal_digits(total & 0xFF)
            m.overflow = ((m.a ^ result) & (result ^ value) & 0x80) >> 7
    m.carry = carry
    m.value = result


@wp.func
def combine(m: Registers, binary: int, target: int):
    """What is done with the value and A, or another register for comparisons."""
    value = m.value
    if binary == op.ORA:
        m.value = m.a | value
    elif binary == op.AND:
        m.value = m.a & value
    elif binary == op.EOR:
        m.value = m.a ^ value
    elif binary == op.ADC:
        add(m, value, 0)
    elif binary == op.SBC:
        add(m, value, 1)
    elif binary == op.COMPARE:
        register = m.a
        if target == op.TO_X:
            register = m.x
        elif target == op.TO_Y:
            register = m.y
        m.carry = wp.where(register >= value, 1, 0)
        m.value = (register - value) & 0xFF
    elif binary == op.BIT:
        m.zero = wp.where((m.a & value) == 0, 1, 0)
        m.negative = value >> 7
        m.overflow = (value >> 6) & 1


@wp.func
def put_result(m: Registers, word: int):
    """Set N and Z, and the register that the result goes to."""
    value = m.value
    if ((word >> op.NZ) & 1) != 0:
        m.negative = value >> 7
        m.zero = wp.where(value == 0, 1, 0)
    target = wp.where(((word >> op.BINARY) & 7) == op.COMPARE, op.TO_NOWHERE, (word >> op.TARGET) & 7)
    m.a = wp.where(target == op.TO_A or target == op.TO_A_AND_X, value, m.a)
    m.x = wp.where(target == op.TO_X or target == op.TO_A_AND_X, value, m.x)
    m.y = wp.where(target == op.TO_Y, value, m.y)
    if target == op.TO_SP:
        m.sp = value
    elif target == op.TO_STATUS:
        set_status(m, value)


@wp.func
def branch(m: Registers, opcode: int):
    """BPL to BEQ: the top two bits of the opcode name the flag, the next what it must be."""
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
    board.ram[i, m.sp & 127] = wp.uint8(byte)
    m.sp = (m.sp - 1) & 0xFF


@wp.func
def jump(board: Shared, i: int, m: Registers, flow: int):
    """JMP, JSR, RTS, RTI and BRK."""
    target = m.address
    if flow == op.RETURN:
        target = ram_word(board, i, m.sp + 1) + 1
        m.sp = (m.sp + 2) & 0xFF
    elif flow == op.FROM_INTERRUPT:
        set_status(m, int(board.ram[i, (m.sp + 1) & 127]))
        target = ram_word(board, i, m.sp + 2)
        m.sp = (m.sp + 3) & 0xFF
    elif flow == op.CALL or flow == op.BREAK:
        back = m.pc - 1
        if flow == op.BREAK:
            back = m.pc + 1
        push(board, i, m, (back >> 8) & 0xFF)
        push(board, i, m, back & 0xFF)
        if flow == op.BREAK:
            m.break_flag = 1
            push(board, i, m, status(m))
            m.no_interrupts = 1
            target = rom_byte(board, i, m, 0xFFFE) | (rom_byte(board, i, m, 0xFFFF) << 8)
    m.pc = target & 0xFFFF


@wp.func
def indirect(board: Shared, i: int, m: Registers):
    """The target of JMP (address); its high byte comes from the same page."""
    address = m.address
    beside = (address & 0xFF00) | ((address + 1) & 0xFF)
    if (address & 0x1000) != 0:
        m.address = rom_byte(board, i, m, address) | (rom_byte(board, i, m, beside) << 8)
    else:
        m.address = ram_word(board, i, address)


@wp.func
def follow_flow(board: Shared, i: int, m: Registers, flow: int, mode: int, opcode: int):
    """What an instruction does beside its data."""
    if flow == op.BRANCH:
        branch(m, opcode)
    elif flow == op.SET_FLAG:
        set_flag(m, opcode)
    elif flow == op.CARRY_IS_SIGN:
        m.carry = m.value >> 7
    elif flow == op.JAM:
        m.pc = (m.pc - 1) & 0xFFFF
    else:
        if mode == op.INDIRECT:
            indirect(board, i, m)
        jump(board, i, m, flow)


@wp.func
def follow_beam(board: Shared, i: int, m: Registers, outer: Outer, writes: int):
    """Before the TIA is written to, or a collision is read, follow the beam to there."""
    delay = int(0)
    if writes != 0:
        delay = write_delay(m, m.address & 0x3F)
    if writes != 0 or (m.address & 8) == 0:
        sweep(board, i, m, outer, m.cycles * 3 + delay)


@wp.func
def step(board: Shared, i: int, m: Registers, outer: Outer):
    """Run one instruction."""
    text = fetch_instruction(board, i, m)
    opcode = int(text) & 0xFF
    word = int(text >> wp.uint64(32))
    m.cycles += (word >> op.CYCLES) & 15
    find_operand(board, i, m, word, int(text >> wp.uint64(8)) & 0xFFFF)
    reads = (word >> op.READ) & 1
    writes = (word >> op.WRITE) & 1
    if (reads | writes) != 0 and (m.address & 0x1080) == 0:
        follow_beam(board, i, m, outer, writes)
    if reads != 0:
        read_memory(board, i, m, outer)
    pick_source(m, (word >> op.SOURCE) & 7)
    unary = (word >> op.UNARY) & 7
    if unary != op.KEEP:
        shift_or_count(m, unary)
    if writes != 0:
        write_memory(board, i, m, outer)
    binary = (word >> op.BINARY) & 7
    if binary != op.NOTHING:
        combine(m, binary, (word >> op.TARGET) & 7)
    put_result(m, word)
    flow = (word >> op.FLOW) & 15
    if flow != op.ALONG:
        follow_flow(board, i, m, flow, word & 15, opcode)
