"""Consoles on a GPU are those on the CPU, bit by bit: all registers, memory, pixels, and what an agent sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("warp", reason="needs the extra warp")

from rlstruct import sims
from rlstruct.atari import FIELDS, Consoles
from rlstruct.atari import opcodes as op
from rlstruct.core import DictTensor

pytestmark = pytest.mark.gpu
DEVICES = ("cpu", "cuda:0")
CARTRIDGES = ["breakout", "surround", "seaquest", "air_raid", "journey_escape", "ms_pacman", "elevator_action",
              "road_runner", "klax", "montezuma_revenge", "robotank"]  # fmt: skip


def assert_equal(one: Consoles, other: Consoles) -> None:
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


@pytest.mark.parametrize("mapper", ["4K", "F8SC", "E0", "FE"])
def test_random_programs_do_the_same(mapper: str) -> None:
    # Every addressing mode and every register of the chips comes up; no ROM of a game is needed.
    rng = np.random.default_rng(len(mapper))
    rom = b"".join(random_program(4096, rng) for _ in range(1 if mapper == "4K" else 2))
    assert (op.make_program(rom) >> np.uint64(24) & np.uint64(3) > 0).mean() > 0.9
    twins = [Consoles(rom, mapper, 24, device=device) for device in DEVICES]
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


@pytest.mark.parametrize("game", CARTRIDGES)
def test_games_do_the_same(game: str) -> None:
    pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs")
    from rlstruct.atari import open_ale, open_consoles

    ale = open_ale(game, 0)
    twins = [open_consoles(game, ale, 40, device) for device in DEVICES]  # in two warps
    plan = torch.from_numpy(np.random.default_rng(0).integers(18, size=(60, 40)).astype(np.int32))
    for frame, actions in enumerate(plan):
        for consoles in twins:
            consoles.run(actions.to(consoles.device), draw=frame % 2 == 0 or frame > 57)
    assert_equal(*twins)


@pytest.mark.parametrize(
    "settings",
    [{"time_limit": 9}, {"gray": False, "size": None, "frame_skip": 2}, {"episodic_lives": True, "draw_all": True}],
    ids=["restarts", "raw colours", "lives"],
)
def test_agents_see_and_get_the_same(settings: dict[str, Any]) -> None:
    pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs")
    twins = [sims.make("ALE/Breakout-v5", n_envs=40, seed=3, device=device, **settings) for device in DEVICES]
    plan = torch.from_numpy(np.random.default_rng(0).integers(4, size=(40, 40)))
    for env in twins:
        env.reset()
    for actions in plan:
        answers = [env.step(DictTensor({"action": actions.to(env.device)})) for env in twins]
        for one, other in zip(*answers, strict=True):  # what was reached, and what comes next
            assert (one[1] == other[1].cpu()).all()
            for key in one[0].keys():
                assert torch.equal(one[0][key], other[0][key].cpu()), key
    states = [vars(env.get_state()) for env in twins]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name].cpu()), name
