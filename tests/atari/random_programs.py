"""Random programs, which two kinds of consoles must run alike: no ROM of a game is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlstruct.atari import FIELDS, Consoles
from rlstruct.atari import opcodes as op

RANDOM = ("4K", "F8SC", "E0", "FE")
"""Cartridges for `compare_random_programs`."""


def assert_equal(one: Consoles, other: Consoles) -> None:
    """Compare registers, memory and pixels."""
    registers = zip(FIELDS, one.registers.T.tolist(), other.registers.cpu().T.tolist(), strict=True)
    assert [(name, a, b) for name, a, b in registers if a != b] == []
    assert (one.ram == other.ram.cpu()).all()
    assert (one.screen() == other.screen().cpu()).all()


def random_program(n_bytes: int, rng: np.random.Generator) -> bytes:
    """Instructions of all kinds but jumps, one after the other; the last jumps to the begin. Half write to the TIA."""
    table = np.array(op.WORDS)
    flows, modes = (table >> op.FLOW) & 15, table & 15
    usable = np.flatnonzero(np.isin(flows, (op.ALONG, op.SET_FLAG, op.CARRY_IS_SIGN, op.BRANCH)))
    code: list[int] = []
    while len(code) < n_bytes - 8:
        opcode = int(rng.choice(usable)) if rng.random() < 0.5 else int(rng.choice([0x85, 0x86, 0x84]))  # STA, STX, STY
        low = int(rng.integers(0x2D)) if opcode in (0x85, 0x86, 0x84) else int(rng.integers(256))
        operand = [0 if modes[opcode] == op.RELATIVE else low, int(rng.integers(256))]
        n_bytes_after = 0 if modes[opcode] in (op.IMPLIED, op.PUSH, op.PULL) else 1 + (modes[opcode] >= op.ABSOLUTE)
        code += [opcode, *operand[:n_bytes_after]]
    return bytes([*code[: n_bytes - 8], 0xEA, 0xEA, 0xEA, 0x4C, 0x00, 0xF0, 0x00, 0xF0])  # NOP, JMP $F000


def compare_random_programs(mapper: str, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Run a program in consoles on the CPU, made with the arguments ``one``, and in others, made with ``other``.

    Every addressing mode and every register of the chips comes up.
    """
    rng = np.random.default_rng(len(mapper))
    rom = b"".join(random_program(4096, rng) for _ in range(1 if mapper == "4K" else 2))
    assert (op.make_program(rom) >> np.uint64(24) & np.uint64(3) > 0).mean() > 0.9
    twins = [Consoles(rom, mapper, 24, **kind) for kind in (one, other)]
    start = torch.zeros(24, len(FIELDS), dtype=torch.int32)
    for name, values in {
        "pc": 0xF000, "a": rng.integers(256, size=24), "pages": 0x03020100,
        "sp": 255, "first_line": 34, "n_lines": 210, "blanks": 1, "timer_shift": 10, "vsync_end": 0x7FFFFFFF,
    }.items():  # fmt: skip
        start[:, FIELDS.index(name)] = torch.as_tensor(values, dtype=torch.int32)
    memory = torch.from_numpy(rng.integers(256, size=(24, 256)).astype(np.uint8))
    for consoles in twins:
        consoles.registers.copy_(start)
        consoles.ram.copy_(memory)
    for frame in range(6):
        for consoles in twins:
            actions = torch.arange(24, dtype=torch.int32, device=consoles.device) % 18
            consoles.run(actions, draw=frame % 3 != 1)
        assert_equal(*twins)
    cpu = twins[0]
    assert len(cpu.ram.unique(dim=0)) == 24  # or the test would show nothing
    assert len(cpu.screen().unique()) > 4
