"""Reader and writer of ALE's states, from which consoles start and with which they are compared.

``ale_py.ALEState.serialize()`` returns little-endian int32 numbers and length-prefixed strings; booleans are two magic
numbers. The layout was found by inspecting states.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlstruct.errors import BadValueError

_YES = struct.unpack("<i", struct.pack("<I", 0xFAB1FAB2))[0]
_NO = struct.unpack("<i", struct.pack("<I", 0xBAD1BAD2))[0]

_CPU = (
    "a", "x", "y", "sp", "", "pc", "negative", "overflow", "break_flag", "decimal", "no_interrupts", "zero",
    "carry", "partial",
)  # fmt: skip
_RIOT = ("timer", "timer_shift", "timer_set", "timer_expired", "timer_was_read", "direction_a", "direction_b")
_TIA = (
    "frame_start", "shown_from", "shown_to", "swept", "", "n_scanlines", "scanline", "vsync_end", "", "vsync",
    "vblank", "size0", "size1", "color0", "color1", "color_playfield", "color_background", "control", "", "mirror0",
    "mirror1", "playfield", "shape0", "shape1", "old_shape0", "old_shape1", "missile0", "missile1", "ball",
    "old_ball", "move0", "move1", "move_missile0", "move_missile1", "move_ball", "delay0", "delay1", "delay_ball",
    "hide0", "hide1", "collisions", "x0", "x1", "x_missile0", "x_missile1", "x_ball", "", "", "hmove_clock",
    "hmove_blank", "stars", "stars_line", "dump", "dump_end",
)  # fmt: skip
"""Our name of each number; "" for numbers that can be derived from others."""


@dataclass(frozen=True)
class AleState:
    """The contents of an ALE state."""

    registers: dict[str, int]  # our name of a register to its value
    ram: npt.NDArray[np.uint8]  # of the RIOT.  [128] uint8
    cartridge: tuple[int, ...]  # ALE's numbers for the cartridge: its bank or slices, then its RAM
    mapper: str  # ALE's name of the cartridge type, such as ``F8``
    lines: tuple[int, int]  # first line and number of lines of the picture
    paddles: tuple[int, int]  # resistances of the first two paddles in ohms
    paddle_range: tuple[int, int]  # their minimum and maximum resistance, ohms


class _Reader:
    """Sequential reader of numbers and strings, which records the offsets of named numbers."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0
        self.places: dict[str, int] = {}

    def numbers(self, n: int) -> list[int]:
        """Read n numbers; booleans become 0 and 1."""
        values = struct.unpack_from(f"<{n}i", self._data, self.at)
        self.at += 4 * n
        return [{_YES: 1, _NO: 0}.get(value, value) for value in values]

    def named(self, names: Sequence[str]) -> dict[str, int]:
        self.places.update((name, self.at + 4 * k) for k, name in enumerate(names))
        return dict(zip(names, self.numbers(len(names)), strict=True))

    def text(self) -> bytes:
        (length,) = self.numbers(1)
        self.at += length
        return self._data[self.at - length : self.at]

    def section(self, name: bytes) -> None:
        if (got := self.text()) != name:
            raise BadValueError(f"read_ale_state: got {got!r}, expected {name!r}: give ale.cloneState().serialize().")


def read_ale_state(serialized: bytes) -> AleState:
    """Read a state of ALE, the bytes of ``ale.cloneState().serialize()`` with ale-py 0.12."""
    return _read(_Reader(serialized))


def write_ale_state(serialized: bytes, *, ram: npt.NDArray[np.uint8] | None = None, **registers: int) -> bytes:
    """Replace RAM, [128] uint8, or registers in an ALE state, and return the bytes for ``ale_py.ALEState``.

    Registers have the names that `read_ale_state` gives them.
    """
    reader, changed = _Reader(serialized), bytearray(serialized)
    _read(reader)
    for name, value in registers.items():
        number = value ^ 1 if name in ("zero", "partial") else value
        place = reader.places[name]
        if struct.unpack_from("<i", serialized, place)[0] in (_YES, _NO):
            number = _YES if number else _NO
        if name.startswith("color"):
            number = int.from_bytes(bytes([number] * 4), "little", signed=True)
        struct.pack_into("<i", changed, place, number)
    if ram is not None:
        begin = reader.places["ram"]
        changed[begin : begin + 4 * len(ram)] = ram.astype("<i4").tobytes()
    return bytes(changed)


def _read(reader: _Reader) -> AleState:
    try:
        left, right, *_, length = reader.numbers(7)
        end = reader.at + length
        reader.text()  # the checksum of the ROM
        reader.section(b"System")
        registers = reader.named(["cycles"])
        reader.text()  # the state of ALE's random numbers
        reader.section(b"M6502Low")
        registers |= reader.named(_CPU)
        reader.section(b"M6532")
        (n_bytes,) = reader.numbers(1)
        reader.places["ram"] = reader.at
        ram = np.array(reader.numbers(n_bytes), np.uint8)
        registers |= reader.named(_RIOT)
        reader.section(b"TIA")
        registers |= reader.named(_TIA)
        reader.section(b"TIASound")
        reader.numbers(7)
        mapper = reader.text().removeprefix(b"Cartridge").decode()
        cartridge = tuple(reader.numbers((end - reader.at) // 4))
        least, most = reader.numbers(2)
    except (struct.error, UnicodeDecodeError) as error:
        raise BadValueError("read_ale_state: these bytes end too early: give ale.cloneState().serialize().") from error
    registers.pop("")
    first, last = ((registers.pop(name) - registers["frame_start"]) // 228 for name in ("shown_from", "shown_to"))
    for name in ("zero", "partial"):
        registers[name] ^= 1  # ALE stores their opposites
    for color in ("color0", "color1", "color_playfield", "color_background"):
        registers[color] &= 0xFF
    return AleState(registers, ram, cartridge, mapper, (first, last - first), (left, right), (least, most))
