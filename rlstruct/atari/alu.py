"""Arithmetic of the 6507 on bytes: shifts, binary and decimal sums, logic."""

import warp as wp

from rlstruct.atari import opcodes as op
from rlstruct.atari.state import Registers


@wp.func
def shift_or_count(m: Registers, unary: int):
    """Apply ASL, ROL, LSR, ROR, INC or DEC to `m.value`."""
    value = m.value
    carry = m.carry
    if unary == op.ASL or unary == op.ROL:
        m.carry = value >> 7
        m.value = ((value << 1) & 0xFF) | wp.where(unary == op.ROL, carry, 0)
    elif unary == op.LSR or unary == op.ROR:
        m.carry = value & 1
        m.value = (value >> 1) | wp.where(unary == op.ROR, carry << 7, 0)
    else:
        m.value = (value + wp.where(unary == op.INC, 1, -1)) & 0xFF


@wp.func
def decimal_value(byte: int) -> int:
    """Decode a byte of two decimal digits."""
    return (byte >> 4) * 10 + (byte & 15)


@wp.func
def decimal_digits(number: int) -> int:
    """Encode the last two decimal digits of a number as a byte."""
    return ((number % 100) // 10) * 16 + number % 10


@wp.func
def add(m: Registers, value: int, subtract: int):
    """Apply ADC or SBC to A and a value: the result goes to `m.value`; N and Z are set later."""
    carry = m.carry
    operand = value ^ (0xFF * subtract)
    total = m.a + operand + carry
    m.value = total & 0xFF
    m.carry = total >> 8
    if m.decimal != 0:
        if subtract != 0:
            difference = decimal_value(m.a) - decimal_value(value) - 1 + carry
            m.value = decimal_digits(difference + wp.where(difference < 0, 100, 0)) & 0xFF  # of digits above 9, too
        else:
            decimals = decimal_value(m.a) + decimal_value(value) + carry
            m.value = decimal_digits(decimals & 0xFF)
            m.carry = wp.where(decimals > 99, 1, 0)
    second = wp.where(m.decimal != 0, value, operand)
    m.overflow = ((m.a ^ m.value) & (second ^ m.value) & 0x80) >> 7


@wp.func
def combine(m: Registers, binary: int, target: int):
    """Combine `m.value` with A; comparisons use the target register."""
    value = m.value
    if binary == op.ADC or binary == op.SBC:
        add(m, value, wp.where(binary == op.SBC, 1, 0))
        return
    # Selections, because the consoles of a warp would part at branches.
    register = wp.where(target == op.TO_X, m.x, wp.where(target == op.TO_Y, m.y, m.a))
    result = wp.where(binary == op.ORA, m.a | value, value)
    result = wp.where(binary == op.AND, m.a & value, result)
    result = wp.where(binary == op.EOR, m.a ^ value, result)
    m.value = wp.where(binary == op.COMPARE, (register - value) & 0xFF, result)
    if binary == op.COMPARE:
        m.carry = wp.where(register >= value, 1, 0)
    elif binary == op.BIT:
        m.zero = wp.where((m.a & value) == 0, 1, 0)
        m.negative = value >> 7
        m.overflow = (value >> 6) & 1
