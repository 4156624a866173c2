"""Byte arithmetic of the 6507: shifts, sums in binary and in decimal, and logic."""

import warp as wp

from rlstruct.sims.atari import opcodes as op
from rlstruct.sims.atari.state import Registers


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
    """Combine the value with A, or with another register for comparisons."""
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
