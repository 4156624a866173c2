"""Consoles do what ALE does: registers, RAM and pixels after each frame, with ROMs of the installed ale-py."""

from __future__ import annotations

import importlib
import itertools
import json
import pathlib
import re
from types import ModuleType

import numpy as np
import pytest
import torch

pytest.importorskip("warp", reason="needs the extra warp")
pytest.importorskip("ale_py", reason="needs the extra atari: its ROMs are the oracle")

import ale_py
from ale_comparison import compare_with_ale
from random_programs import RANDOM, compare_random_programs

from rlstruct.atari import (
    FIELDS,
    Consoles,
    open_ale,
    open_consoles,
    playable_games,
    read_ale_state,
    write_ale_state,
)
from rlstruct.atari.opcodes import BRANCH, CARRY_IS_SIGN, CYCLES, FLOW, FREQUENT, JAM, LENGTHS, WORDS
from rlstruct.atari.state import MOST_SPANS

SAMPLE = {
    "breakout": "2K, paddles",
    "pong": "2K, the second paddle",
    "pitfall": "4K",
    "surround": "2K, the right joystick",
    "air_raid": "4K, European: colours of odd frames",
    "journey_escape": "4K, the stars of Cosmic Ark",
    "ms_pacman": "F8, no blanks",
    "elevator_action": "F8SC",
    "road_runner": "F6",
    "klax": "F6SC",
    "montezuma_revenge": "E0",
    "robotank": "FE",
}
ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "atari_exact.json"
MEASURED = {row["game"]: row for row in json.loads(RESULTS.read_text())["rows"]}


@pytest.mark.parametrize("puts_off", [False, True], ids=["at once", "put off"])
@pytest.mark.parametrize("game", SAMPLE, ids=[f"{game}: {why}" for game, why in SAMPLE.items()])
def test_a_sample_of_games_is_equal_to_ale(game: str, puts_off: bool) -> None:
    seen = compare_with_ale(game, 60, seed=1, puts_off=puts_off)
    assert seen.differences == {}
    assert seen.n_frames == 60
    assert seen.n_wrong_pictures == 0


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("puts_off", [False, True], ids=["at once", "put off"])
@pytest.mark.parametrize("game", MEASURED)
def test_games_are_as_exact_as_the_table_says(game: str, puts_off: bool) -> None:
    row = MEASURED[game]
    if "left_out" in row:
        with pytest.raises(ValueError, match="mapper"):
            compare_with_ale(game, 1)
        return
    seen = compare_with_ale(game, 1000, puts_off=puts_off)
    assert (seen.n_frames, sorted(seen.differences), seen.n_wrong_pictures) == (
        row["n_frames"],
        sorted(row["differences"]),
        row["n_wrong_pictures"],
    )


def test_the_table_lists_all_games_and_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script: ModuleType = importlib.import_module("tables")
    page = (ROOT / "docs" / "atari.md").read_text()
    assert "<!-- atari_exact -->" in page
    assert script.rendered(page) == page, "run python benchmarks/tables.py"
    for file in (RESULTS, RESULTS.with_name("atari_exact_put_off.json")):
        assert sorted(row["game"] for row in json.loads(file.read_text())["rows"]) == playable_games()


def test_games_held_out_are_exact_and_no_test_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    games = importlib.import_module("atari_exact").HELD_OUT
    for name in ("atari_exact_held_out.json", "atari_exact_held_out_put_off.json"):
        rows = json.loads(RESULTS.with_name(name).read_text())["rows"]
        assert {row["game"]: (row["n_frames"], row["differences"], row["n_wrong_pictures"]) for row in rows} == {
            game: (1000, {}, 0) for game in games
        }
    named = "|".join([*games, *(game.title().replace("_", "") for game in games)])
    texts = {file: file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    assert [str(file) for file, text in texts.items() if re.search(rf"[\"'/]({named})\b", text)] == []


def test_consoles_do_not_see_their_neighbours() -> None:
    # 4 consoles in one launch against 4 ALEs, each with its own actions.
    oracles = [open_ale("seaquest", 0) for _ in range(4)]
    consoles = open_consoles("seaquest", oracles[0], 4)
    plan = np.random.default_rng(0).integers(18, size=(40, 4))
    for actions in plan:
        consoles.run(torch.from_numpy(actions.astype(np.int32)))
        for ale, action in zip(oracles, actions.tolist(), strict=True):
            ale.act(action)
    states = [read_ale_state(ale.cloneState().serialize()) for ale in oracles]
    assert [consoles.differences(i, state) for i, state in enumerate(states)] == [{}] * 4
    assert len({state.ram.tobytes() for state in states}) == 4  # or the test would show nothing
    # A difference is named: console 0 is not where ALE 1 is.
    assert any(name.startswith("$") for name in consoles.differences(0, states[1]))


LDA, LDX, LDY, BIT, BNE, BPL, BMI = 0xAD, 0xAE, 0xAC, 0x2C, 0xD0, 0x10, 0x30
INTIM, TIMINT = 0x84, 0x85


def test_waiting_for_the_timer_at_once_ends_where_going_round_ends() -> None:
    # Every kind of loop with every interval of the timer, with what RAM $80 holds; the branch goes to another page too.
    loops = [(LDA, INTIM, BNE), (LDX, INTIM, BNE), (LDY, INTIM, BPL), (BIT, INTIM, BMI), (LDA, INTIM, BMI),
             (BIT, TIMINT, BPL), (LDA, TIMINT, BPL)]  # fmt: skip
    not_for_the_timer_alone = [(BIT, INTIM, BNE), (LDA, 0x82, BNE), (LDA, TIMINT, BMI)]
    code = [0xEA] * 10  # so that a loop lies on two pages
    for interval in range(4):
        for load, port, branch in loops + not_for_the_timer_alone * (interval == 0):
            code += [0xA5, 0x80, 0x8D, 0x94 + interval, 0x02]  # LDA $80, STA TIM1T...
            code += [load, port, 0x02, branch, 0xFB if (load, port) != (LDA, 0x82) else 0x00]
            code += [0xE6, 0x80, 0x85, 0x02]  # INC $80, STA WSYNC: from line 290 on it ends the frame
    rom = bytes([*code, 0x4C, 0x00, 0xF0]).ljust(4096, b"\xea")
    twins = [Consoles(rom, "4K", 32) for _ in range(2)]
    flow = twins[1].program >> (32 + FLOW) & 15
    waits = (flow > CARRY_IS_SIGN) & (flow < BRANCH)
    assert int(waits.sum()) == 4 * len(loops)
    assert any((place ^ (place + 5)) & 0xF00 for place in waits.nonzero().flatten().tolist())
    twins[1].program[waits] &= ~(15 << (32 + FLOW))
    start = {"pc": 0xF000, "pages": 0x03020100, "sp": 255, "first_line": 34, "n_lines": 210, "vsync_end": 0x7FFFFFFF}
    for consoles in twins:
        for name, value in start.items():
            consoles.register(name).fill_(value)
        consoles.ram[:, 0] = torch.arange(0, 256, 8)
    cut = 0
    for _ in range(12):
        for consoles in twins:
            consoles.run(torch.zeros(32, dtype=torch.int32))
        differences = (twins[0].registers != twins[1].registers).any(0)
        assert [name for name, differs in zip(FIELDS, differences.tolist(), strict=True) if differs] == []
        assert torch.equal(twins[0].ram, twins[1].ram)
        cut += int(twins[0].register("partial").sum())
    assert 0 < cut < 12 * 32  # frames that end by themselves, and frames that run out of instructions


@pytest.mark.parametrize("mapper", ["4K", "F8SC"])
def test_frequent_opcodes_do_at_once_what_the_phases_do(mapper: str) -> None:
    # A random program of these opcodes but RTS: it reads and writes ROM, RAM and chips, half of the consoles with D.
    rng = np.random.default_rng(0)
    code, begins = [0xEA] * 256, []
    while len(code) < 4080:
        begins.append(len(code))
        opcode = int(rng.choice(list(FREQUENT.replace(b"\x60", b""))))
        page = rng.choice([0, 2, 0xF0 + rng.integers(16)])
        code += [opcode, int(rng.integers(256)), int(page)][: LENGTHS[opcode]]
    for at, begin in enumerate(begins):
        if WORDS[code[begin]] >> FLOW & 15 == BRANCH:  # forwards: a loop would keep them
            code[begin + 1] = (begins[at + 1 : at + 9] or [begin + 2])[-1] - begin - 2
        elif code[begin] in (0x20, 0x4C):
            code[begin + 1 : begin + 3] = divmod(0xF000 + int(rng.choice(begins)), 256)[::-1]
    rom = np.array([*code, 0x4C, 0x00, 0xF1] + [0xEA] * (4093 - len(code)), np.uint8)
    roms = rom.tobytes() * (1 if mapper == "4K" else 2)
    twins = [Consoles(roms, mapper, 64, puts_off=puts_off) for puts_off in (False, True)]
    numbers = twins[1].program >> 26 & 63
    assert len(set(numbers.tolist())) == 64
    twins[1].program &= ~(63 << 26)
    start = {"pages": 0x03020100, "first_line": 34, "n_lines": 210, "vsync_end": 0x7FFFFFFF}
    start |= {"pc": 0xF000 + rng.choice(begins, 64)} | {name: rng.integers(256, size=64) for name in "axy"}
    start |= {"sp": rng.integers(256, size=64), "decimal": np.arange(64) & 1}
    memory = torch.from_numpy(rng.integers(256, size=(64, 256), dtype=np.uint8))
    for consoles in twins:
        for name, value in start.items():
            consoles.register(name).copy_(torch.as_tensor(value))
        consoles.ram.copy_(memory)
    for _ in range(4):
        for consoles in twins:
            consoles.run(torch.zeros(64, dtype=torch.int32), draw=True)
        differences = (twins[0].registers != twins[1].registers).any(0)
        assert [name for name, differs in zip(FIELDS, differences.tolist(), strict=True) if differs] == []
        assert torch.equal(twins[0].ram, twins[1].ram)
        assert torch.equal(twins[0].screen(), twins[1].screen())
    assert (twins[0].ram[:, :128] != memory[:, :128]).sum(1).float().mean() > 8


@pytest.mark.parametrize("mapper", RANDOM)
def test_random_programs_do_the_same_if_the_beam_is_put_off(mapper: str) -> None:
    compare_random_programs(mapper, {"puts_off": False}, {"puts_off": True})


@pytest.mark.parametrize("draw", [False, True])
def test_a_beam_that_is_put_off_meets_the_same_when_its_log_is_full(draw: bool) -> None:
    # A loop of 21 cycles, with stars of all lengths: writes to GRP0 and COLUBK, a read of a collision, or CXCLR.
    end = [0x4C, 0x00, 0xF0]  # JMP $F000
    writes = [0xE6, 0x80, 0xA5, 0x80, 0x85, 0x1B, 0x85, 0x09]  # INC $80, LDA $80, STA GRP0, STA COLUBK
    looks = {"nothing": [], "read": [0xA5, 0x02, 0x85, 0x81], "RMW": [0xC6, 0x07], "CXCLR": [0x85, 0x2C]}
    # CXCLR, LDA CXP0FB, ORA $81, STA $81, then STX COLUBK, LDA $80, STA COLUBK, STX COLUBK: seven changes in each round
    looks["CXCLR, read"] = [0x85, 0x2C, 0xA5, 0x02, 0x05, 0x81, 0x85, 0x81, 0x86, 9, 0xA5, 0x80, 0x85, 9, 0x86, 9]
    start = {"pc": 0xF000, "pages": 0x03020100, "first_line": 34, "n_lines": 210, "vsync_end": 0x7FFFFFFF}
    start |= {"playfield": 0x35A3C, "control": 1, "ball": 1, "x0": 70, "x_ball": 75, "blanks": 1, "color_playfield": 40}
    for name, look in looks.items():
        rom = bytes([*writes, *look, *end]).ljust(4096, b"\xea")
        twins = [Consoles(rom, "4K", 5, puts_off=puts_off) for puts_off in (False, True)]
        for consoles in twins:
            for register, value in start.items():
                consoles.register(register).fill_(value)
            consoles.register("pc").add_(torch.arange(0, 10, 2))
            consoles.register("stars").copy_(torch.arange(5) % 2)
            consoles.register("missile0").fill_(1)
            consoles.ram[:, 0] = torch.arange(0, 250, 50)
        for _ in range(9):
            for consoles in twins:
                consoles.run(torch.zeros(5, dtype=torch.int32), draw=draw)
            differences = (twins[0].registers != twins[1].registers).any(0)
            assert [name for name, differs in zip(FIELDS, differences.tolist(), strict=True) if differs] == []
            assert torch.equal(twins[0].ram, twins[1].ram)
            assert torch.equal(twins[0].screen(), twins[1].screen())
        assert name.startswith("CXCLR") != bool(twins[0].register("collisions").ne(0).any())
        row = twins[0].screen()[0].flatten()
        assert not draw or (row[1:] != row[:-1]).sum() > MOST_SPANS


def test_consoles_go_on_in_other_memory() -> None:
    ale = open_ale("seaquest", 0)
    twins = [open_consoles("seaquest", ale, 3) for _ in range(2)]
    for frame in range(3):
        for consoles in twins:
            consoles.run(torch.tensor([1, 2, 3], dtype=torch.int32))
        if frame == 0:  # bytes of neighbours side by side, registers 512 bytes apart
            moved = twins[1]
            moved.ram = moved.ram.t().contiguous().t()
            moved.registers = torch.zeros(3, 128, dtype=torch.int32)[:, : len(FIELDS)].copy_(moved.registers)
    assert torch.equal(twins[0].ram, twins[1].ram)
    assert torch.equal(twins[0].registers, twins[1].registers)


def test_objects_are_put_where_ale_puts_them_after_hmove() -> None:
    # A program in RAM: WSYNC, HMOVE at cycle `at`, RESP0 to RESBL `after` cycles later, the end of the frame.
    def wait_for(cycles: int) -> list[int]:
        return [0xA5, 0x80] * (cycles % 2) + [0xEA] * ((cycles - 3 * (cycles % 2)) // 2)  # LDA $80, NOP

    ale = open_ale("pong", 0)
    kept = ale.cloneState().serialize()
    ram, states = read_ale_state(kept).ram, []
    for register, at, after in itertools.product(range(0x10, 0x15), (3, 5, 6, 8), (3, 5, 6, 7, 8, 17, 18, 19, 20, 21)):
        code = [0x85, 0x02, *wait_for(at - 3), 0x85, 0x2A, *wait_for(after - 3), 0x85, register, 0x86, 0x00]
        ram[: len(code)] = code
        states.append(write_ale_state(kept, ram=ram, pc=0x80, x=0, vsync=2, vsync_end=0, partial=0))
    consoles = open_consoles("pong", ale, len(states))
    consoles.load([read_ale_state(state) for state in states])
    consoles.run(torch.zeros(len(states), dtype=torch.int32))
    for name in ("x0", "x1", "x_missile0", "x_missile1", "x_ball"):
        expected = []
        for state in states:
            ale.restoreState(ale_py.ALEState(state))
            ale.act(0)
            expected.append(read_ale_state(ale.cloneState().serialize()).registers[name])
        assert consoles.register(name).tolist() == expected


def test_a_loaded_state_goes_on_as_ale_does() -> None:
    ale = open_ale("seaquest", 0)
    for _ in range(10):
        ale.act(1)
    state = read_ale_state(ale.cloneState().serialize())
    consoles = open_consoles("seaquest", ale, 2)
    consoles.run(torch.tensor([3, 4], dtype=torch.int32))
    consoles.load([state])
    assert consoles.differences(0, state) == consoles.differences(1, state) == {}
    ale.act(5)
    consoles.run(torch.tensor([5, 5], dtype=torch.int32))
    assert consoles.differences(1, read_ale_state(ale.cloneState().serialize())) == {}


def test_wrong_cartridges_and_states_are_named() -> None:
    ale = open_ale("seaquest", 0)
    state = read_ale_state(ale.cloneState().serialize())
    with pytest.raises(ValueError, match="got mapper='DPC', expected one of 2K"):
        Consoles(bytes(4096), "DPC", 1)
    with pytest.raises(ValueError, match="got a ROM of 4096 bytes, expected 8192"):
        Consoles(bytes(4096), "F8", 1)
    with pytest.raises(ValueError, match="got a state of mapper '4K', expected '2K'"):
        Consoles(bytes(2048), "2K", 1).load([state])
    with pytest.raises(ValueError, match="got 2 states, expected 1 or 3"):
        Consoles(bytes(4096), "4K", 3).load([state, state])
    with pytest.raises(ValueError, match="end too early"):
        read_ale_state(ale.cloneState().serialize()[:200])
    with pytest.raises(ValueError, match="expected b'System'"):
        read_ale_state(ale.cloneState().serialize().replace(b"System", b"Systen"))


def test_the_opcodes_take_the_cycles_of_the_6502() -> None:
    table = np.array(WORDS)
    cycles = (table >> CYCLES) & 15
    # LDA #, LDA zp, LDA (zp),Y, STA (zp),Y, STA abs,X, INC abs,X, ASL A, JSR, RTS, BRK, PHA, PLA, JMP (abs), SLO (zp),Y
    opcodes = [0xA9, 0xA5, 0xB1, 0x91, 0x9D, 0xFE, 0x0A, 0x20, 0x60, 0x00, 0x48, 0x68, 0x6C, 0x13]
    assert cycles[opcodes].tolist() == [2, 3, 5, 6, 5, 7, 2, 6, 6, 7, 3, 4, 5, 8]
    jams = np.flatnonzero((table >> FLOW) & 15 == JAM)
    assert {0x02, 0x12, 0x22, 0x32, 0x42, 0x52, 0x62, 0x72, 0x92, 0xB2, 0xD2, 0xF2} <= set(jams.tolist())
    assert not {0x10, 0x24, 0x4C, 0xEA, 0xAD} & set(jams.tolist())  # BPL, BIT, JMP, NOP, LDA
