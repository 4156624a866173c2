"""The 6507: one instruction in phases, each of which all consoles of a warp go through together.

What each phase does is in the table of `opcodes`. An instruction's cycles count before it touches memory.
"""

import warp as wp

from rlstruct.sims.atari import opcodes as op
from rlstruct.sims.atari.beam import sweep
from rlstruct.sims.atari.cartridge import rom_byte, switch_bank, write_cartridge
from rlstruct.sims.atari.riot import read_riot, write_riot
from rlstruct.sims.atari.state import Board, Registers
from rlstruct.sims.atari.tia import read_tia, write_delay, write_tia


@wp.func
def fetch(board: Board, i: int, m: Registers):
    """Read the next byte of the program, from the cartridge or RAM."""
    if (m[0].pc & 0x1000) != 0:
        switch_bank(board, m, m[0].pc)
        m[0].bus = rom_byte(board, i, m, m[0].pc)
    else:
        m[0].bus = int(board.ram[i, m[0].pc & 127])
    m[0].pc = (m[0].pc + 1) & 0xFFFF


@wp.func
def ram_word(board: Board, i: int, address: int) -> int:
    """Read two bytes of page zero."""
    return int(board.ram[i, address & 127]) | (int(board.ram[i, (address + 1) & 127]) << 8)


@wp.func
def status(m: Registers) -> int:
    """The flags as one byte."""
    upper = (m[0].negative << 7) | (m[0].overflow << 6) | 0x20 | (m[0].break_flag << 4)
    return upper | (m[0].decimal << 3) | (m[0].no_interrupts << 2) | (m[0].zero << 1) | m[0].carry


@wp.func
def set_status(m: Registers, byte: int):
    """Set the flags from one byte."""
    m[0].negative = (byte >> 7) & 1
    m[0].overflow = (byte >> 6) & 1
    m[0].break_flag = (byte >> 4) & 1
    m[0].decimal = (byte >> 3) & 1
    m[0].no_interrupts = (byte >> 2) & 1
    m[0].zero = (byte >> 1) & 1
    m[0].carry = byte & 1


@wp.func
def find_operand(board: Board, i: int, m: Registers, word: int):
    """Read the bytes after the opcode, and find the address that they mean."""
    mode = word & 15
    if mode >= op.IMMEDIATE and mode <= op.INDIRECT:
        fetch(board, i, m)
        m[0].address = m[0].bus
    base = m[0].address
    if mode >= op.ABSOLUTE and mode <= op.INDIRECT:
        fetch(board, i, m)
        m[0].address |= m[0].bus << 8
        base = m[0].address
        if mode == op.ABSOLUTE_X:
            m[0].address += m[0].x
        elif mode == op.ABSOLUTE_Y:
            m[0].address += m[0].y
    elif mode == op.ZERO_X:
        m[0].address = (base + m[0].x) & 0xFF
    elif mode == op.ZERO_Y:
        m[0].address = (base + m[0].y) & 0xFF
    elif mode == op.INDEXED_X:
        m[0].address = ram_word(board, i, base + m[0].x)
        m[0].bus = m[0].address >> 8
    elif mode == op.INDEXED_Y:
        base = ram_word(board, i, base)
        m[0].bus = base >> 8
        m[0].address = base + m[0].y
    elif mode == op.PUSH:
        m[0].address = 0x100 | m[0].sp
        m[0].sp = (m[0].sp - 1) & 0xFF
    elif mode == op.PULL:
        m[0].bus = int(board.ram[i, m[0].sp & 127])
        m[0].sp = (m[0].sp + 1) & 0xFF
        m[0].address = 0x100 | m[0].sp
    m[0].address &= 0xFFFF
    if ((word >> op.PAGE) & 1) != 0 and ((base ^ m[0].address) & 0xFF00) != 0:
        m[0].cycles += 1


@wp.func
def read_memory(board: Board, i: int, m: Registers, mode: int):
    """Put the operand on the bus."""
    address = m[0].address
    if mode == op.IMMEDIATE:
        m[0].bus = address
    elif (address & 0x1000) != 0:
        switch_bank(board, m, address)
        m[0].bus = rom_byte(board, i, m, address)
    elif (address & 0x0080) == 0:
        read_tia(m, address)
    elif (address & 0x0200) == 0:
        m[0].bus = int(board.ram[i, address & 127])
    else:
        read_riot(m, address)


@wp.func
def write_memory(board: Board, i: int, m: Registers):
    """Write the value."""
    address = m[0].address
    m[0].bus = m[0].value
    if (address & 0x1000) != 0:
        write_cartridge(board, i, m, address, m[0].value)
    elif (address & 0x0080) == 0:
        write_tia(m, address, m[0].value)
    elif (address & 0x0200) == 0:
        board.ram[i, address & 127] = wp.uint8(m[0].value)
    else:
        write_riot(m, address, m[0].value)


@wp.func
def pick_source(m: Registers, source: int):
    """Where the value comes from."""
    if source == op.FROM_MEMORY:
        m[0].value = m[0].bus
    elif source == op.FROM_A:
        m[0].value = m[0].a
    elif source == op.FROM_X:
        m[0].value = m[0].x
    elif source == op.FROM_Y:
        m[0].value = m[0].y
    elif source == op.FROM_SP:
        m[0].value = m[0].sp
    elif source == op.FROM_STATUS:
        m[0].value = status(m)
    elif source == op.FROM_A_AND_X:
        m[0].value = m[0].a & m[0].x
    else:
        m[0].value = m[0].a & m[0].bus


@wp.func
def shift_or_count(m: Registers, unary: int):
    """ASL, ROL, LSR, ROR, INC and DEC of the value."""
    value = m[0].value
    carry = m[0].carry
    if unary == op.ASL or unary == op.ROL:
        m[0].carry = value >> 7
        value = (value << 1) & 0xFF
        if unary == op.ROL:
            value |= carry
    elif unary == op.LSR or unary == op.ROR:
        m[0].carry = value & 1
        value = value >> 1
        if unary == op.ROR:
            value |= carry << 7
    elif unary == op.INC:
        value = (value + 1) & 0xFF
    elif unary == op.DEC:
        value = (value - 1) & 0xFF
    m[0].value = value


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
    """ADC or SBC: the result is `m[0].value`; N and Z are set later."""
    total = m[0].a + value + m[0].carry
    result = total & 0xFF
    carry = total >> 8
    if subtract != 0:
        total = m[0].a + (value ^ 0xFF) + m[0].carry
        result = total & 0xFF
        carry = total >> 8
        m[0].overflow = ((m[0].a ^ value) & (m[0].a ^ result) & 0x80) >> 7
        if m[0].decimal != 0:
            total = decimal_value(m[0].a) - decimal_value(value) - 1 + m[0].carry
            if total < 0:
                total += 100
            result = decimal_digits(total)
            m[0].overflow = ((m[0].a ^ result) & (result ^ value) & 0x80) >> 7
    else:
        m[0].overflow = ((m[0].a ^ result) & (value ^ result) & 0x80) >> 7
        if m[0].decimal != 0:
            total = decimal_value(m[0].a) + decimal_value(value) + m[0].carry
            carry = wp.where(total > 99, 1, 0)
            result = decimal_digits(total & 0xFF)
            m[0].overflow = ((m[0].a ^ result) & (result ^ value) & 0x80) >> 7
    m[0].carry = carry
    m[0].value = result


@wp.func
def combine(m: Registers, binary: int, target: int):
    """What is done with the value and A, or another register for comparisons."""
    value = m[0].value
    if binary == op.ORA:
        m[0].value = m[0].a | value
    elif binary == op.AND:
        m[0].value = m[0].a & value
    elif binary == op.EOR:
        m[0].value = m[0].a ^ value
    elif binary == op.ADC:
        add(m, value, 0)
    elif binary == op.SBC:
        add(m, value, 1)
    elif binary == op.COMPARE:
        register = m[0].a
        if target == op.TO_X:
            register = m[0].x
        elif target == op.TO_Y:
            register = m[0].y
        m[0].carry = wp.where(register >= value, 1, 0)
        m[0].value = (register - value) & 0xFF
    elif binary == op.BIT:
        m[0].zero = wp.where((m[0].a & value) == 0, 1, 0)
        m[0].negative = value >> 7
        m[0].overflow = (value >> 6) & 1


@wp.func
def put_result(m: Registers, word: int):
    """Set N and Z, and the register that the result goes to."""
    value = m[0].value
    if ((word >> op.NZ) & 1) != 0:
        m[0].negative = value >> 7
        m[0].zero = wp.where(value == 0, 1, 0)
    target = (word >> op.TARGET) & 7
    if ((word >> op.BINARY) & 7) != op.COMPARE:
        if target == op.TO_A or target == op.TO_A_AND_X:
            m[0].a = value
        if target == op.TO_X or target == op.TO_A_AND_X:
            m[0].x = value
        if target == op.TO_Y:
            m[0].y = value
        if target == op.TO_SP:
            m[0].sp = value
        if target == op.TO_STATUS:
            set_status(m, value)


@wp.func
def branch(m: Registers, opcode: int):
    """BPL to BEQ: the top two bits of the opcode name the flag, the next what it must be."""
    flag = m[0].negative
    if (opcode >> 6) == 1:
        flag = m[0].overflow
    elif (opcode >> 6) == 2:
        flag = m[0].carry
    elif (opcode >> 6) == 3:
        flag = m[0].zero
    if flag == ((opcode >> 5) & 1):
        target = (m[0].pc + ((m[0].address ^ 0x80) - 0x80)) & 0xFFFF
        m[0].cycles += 1 + wp.where(((target ^ m[0].pc) & 0xFF00) != 0, 1, 0)
        m[0].pc = target


@wp.func
def set_flag(m: Registers, opcode: int):
    """CLC, SEC, CLI, SEI, CLV, CLD and SED."""
    wanted = (opcode >> 5) & 1
    if (opcode >> 6) == 0:
        m[0].carry = wanted
    elif (opcode >> 6) == 1:
        m[0].no_interrupts = wanted
    elif (opcode >> 6) == 2:
        m[0].overflow = 0
    else:
        m[0].decimal = wanted


@wp.func
def push(board: Board, i: int, m: Registers, byte: int):
    """Push a byte to the stack in RAM."""
    board.ram[i, m[0].sp & 127] = wp.uint8(byte)
    m[0].sp = (m[0].sp - 1) & 0xFF


@wp.func
def jump(board: Board, i: int, m: Registers, flow: int):
    """JMP, JSR, RTS, RTI and BRK."""
    target = m[0].address
    if flow == op.RETURN:
        target = ram_word(board, i, m[0].sp + 1) + 1
        m[0].sp = (m[0].sp + 2) & 0xFF
    elif flow == op.FROM_INTERRUPT:
        set_status(m, int(board.ram[i, (m[0].sp + 1) & 127]))
        target = ram_word(board, i, m[0].sp + 2)
        m[0].sp = (m[0].sp + 3) & 0xFF
    elif flow == op.CALL or flow == op.BREAK:
        back = m[0].pc - 1
        if flow == op.BREAK:
            back = m[0].pc + 1
        push(board, i, m, (back >> 8) & 0xFF)
        push(board, i, m, back & 0xFF)
        if flow == op.BREAK:
            m[0].break_flag = 1
            push(board, i, m, status(m))
            m[0].no_interrupts = 1
            target = rom_byte(board, i, m, 0xFFFE) | (rom_byte(board, i, m, 0xFFFF) << 8)
    m[0].pc = target & 0xFFFF


@wp.func
def indirect(board: Board, i: int, m: Registers):
    """The target of JMP (address); its high byte comes from the same page."""
    address = m[0].address
    beside = (address & 0xFF00) | ((address + 1) & 0xFF)
    if (address & 0x1000) != 0:
        m[0].address = rom_byte(board, i, m, address) | (rom_byte(board, i, m, beside) << 8)
    else:
        m[0].address = ram_word(board, i, address)


@wp.func
def follow_flow(board: Board, i: int, m: Registers, flow: int, mode: int, opcode: int):
    """What an instruction does beside its data."""
    if flow == op.BRANCH:
        branch(m, opcode)
    elif flow == op.SET_FLAG:
        set_flag(m, opcode)
    elif flow == op.CARRY_IS_SIGN:
        m[0].carry = m[0].value >> 7
    elif flow == op.JAM:
        m[0].pc = (m[0].pc - 1) & 0xFFFF
    elif flow != op.ALONG:
        if mode == op.INDIRECT:
            indirect(board, i, m)
        jump(board, i, m, flow)


@wp.func
def step(board: Board, i: int, m: Registers):
    """Run one instruction."""
    fetch(board, i, m)
    opcode = m[0].bus
    word = board.opcodes[opcode]
    m[0].cycles += (word >> op.CYCLES) & 15
    find_operand(board, i, m, word)
    mode = word & 15
    reads = (word >> op.READ) & 1
    writes = (word >> op.WRITE) & 1
    if mode != op.IMMEDIATE and (m[0].address & 0x1080) == 0 and (reads | writes) != 0:
        until = m[0].swept
        if writes != 0:
            until = m[0].cycles * 3 + write_delay(m, m[0].address & 0x3F)
        elif (m[0].address & 8) == 0:
            until = m[0].cycles * 3
        sweep(board, i, m, until)
    if reads != 0:
        read_memory(board, i, m, mode)
    pick_source(m, (word >> op.SOURCE) & 7)
    shift_or_count(m, (word >> op.UNARY) & 7)
    if writes != 0:
        write_memory(board, i, m)
    combine(m, (word >> op.BINARY) & 7, (word >> op.TARGET) & 7)
    put_result(m, word)
    follow_flow(board, i, m, (word >> op.FLOW) & 15, mode, opcode)
