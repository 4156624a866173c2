"""B consoles with the same cartridge: their memory as tensors, a frame of all of them, and comparison with ALE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import warp as wp
from torch import Tensor

from rlstruct.atari import cartridge, games
from rlstruct.atari.ale_state import AleState
from rlstruct.atari.beam import WORDS as WORDS_OF_A_LINE
from rlstruct.atari.frame import draw_frame, run_frame
from rlstruct.atari.games import JOYSTICK, PADDLE, SECOND_PADDLE
from rlstruct.atari.opcodes import WORDS, make_program
from rlstruct.atari.state import MOST_SPANS, NAMES, SPAN_WORDS, Board, Console, Periphery
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError
from rlstruct.sims.kernels import launch, start

_structs: tuple[Any, Any] = (Console, Periphery)  # Warp's decorator replaces the classes, so mypy needs Any
FIELDS: tuple[str, ...] = tuple(name for struct in _structs for var in struct.vars for name in NAMES.get(var, (var,)))
"""Names of a console's registers, in memory order."""
MAPPERS = {
    "2K": cartridge.FIXED, "4K": cartridge.FIXED, "F8": cartridge.F8, "F6": cartridge.F6, "F8SC": cartridge.F8SC,
    "F6SC": cartridge.F6SC, "E0": cartridge.E0, "FE": cartridge.FE,
}  # fmt: skip
"""Supported cartridge types, by ALE's names."""
MOST_PICTURE_LINES = PAL_LINES = 250
BLOCK = 32
"""Threads per block: one warp, so that few consoles occupy many multiprocessors of a GPU."""
THREADS_PER_CONSOLE: int | None = None
"""Threads per console, of which one works; None chooses by `threads_per_console`."""
RESIDENT_WARPS = 16
"""Warps of `run_frame` that a multiprocessor holds: its registers are enough for no more."""

_NOT_IN_ALE = frozenset({"switches", "controller", "blanks", "input2", "mirror_playfield"})
"""Registers that ALE's states do not contain."""


class Consoles:
    """B consoles with the same cartridge, on any device; call `load` before the first frame.

    Attributes:
        registers: the registers of `FIELDS`.  [B, F] int32
        ram: 128 bytes of the console, 128 of the cartridge.  [B, 256] uint8
        program: the instructions of the ROM, from `opcodes.make_program`.  [bytes of the ROM] int64
        board: the arrays and constants that kernels receive.
        puts_off: the argument of this name.

    Args:
        rom: the bytes of the cartridge.
        mapper: the cartridge type, a key of `MAPPERS`.
        n: B.
        game: ALE's name of the game, which selects its settings in `games`.
        device: the CPU or a CUDA device.
        puts_off: follow the beam later, see `spans`; the result is the same. None on a GPU only.
    """

    def __init__(
        self,
        rom: bytes,
        mapper: str,
        n: int,
        *,
        game: str = "",
        device: DeviceLike = "cpu",
        puts_off: bool | None = None,
    ) -> None:
        if mapper not in MAPPERS:
            raise BadValueError(f"Consoles: got mapper={mapper!r}, expected one of {', '.join(MAPPERS)}.")
        expected = {"2K": 2048, "4K": 4096, "F6": 16384, "F6SC": 16384}.get(mapper, 8192)
        if len(rom) != expected:
            raise BadValueError(f"Consoles: got a ROM of {len(rom)} bytes, expected {expected} with mapper={mapper!r}.")
        self.device, self.mapper, self.game = resolve_device(device), mapper, game
        self.puts_off = puts_off
        self.registers = torch.zeros(n, len(FIELDS), dtype=torch.int32, device=self.device)
        self.ram = torch.zeros(n, 256, dtype=torch.uint8, device=self.device)
        self._screens = torch.zeros(n, 2, MOST_PICTURE_LINES * 160, dtype=torch.uint8, device=self.device)
        rom *= 2 if mapper == "2K" else 1  # the address space shows it twice
        program = make_program(rom, with_ram=mapper.endswith("SC"), switches=MAPPERS[mapper] != cartridge.FIXED)
        self.program = torch.from_numpy(program.view(np.int64)).to(self.device)
        start()
        self.board = Board()
        self.board.rom = wp.from_torch(torch.frombuffer(bytearray(rom), dtype=torch.uint8).to(self.device))
        self.board.opcodes = wp.from_torch(torch.tensor(WORDS, dtype=torch.int32, device=self.device))
        self.board.program = wp.from_torch(self.program, dtype=wp.uint64)
        self.board.mapper = MAPPERS[mapper]
        self._everybody = wp.from_torch(torch.ones(n, dtype=torch.int32, device=self.device))

    def load(self, states: Sequence[AleState]) -> None:
        """Continue from states of ALE with the same cartridge: one for each console, or one for all."""
        n = len(self.registers)
        if len(states) not in (1, n):
            raise BadValueError(f"Consoles.load: got {len(states)} states, expected 1 or {n}.")
        registers, ram = self.read(states)
        self.registers.copy_(registers.expand(n, -1))
        self.ram.copy_(ram.expand(n, -1))

    def read(self, states: Sequence[AleState]) -> tuple[Tensor, Tensor]:
        """Convert K states of ALE to ours: registers [K, F] int32 and memory [K, 256] uint8, on the CPU."""
        rows, memories = np.zeros((len(states), len(FIELDS)), np.int32), np.zeros((len(states), 256), np.uint8)
        for row, memory, state in zip(rows, memories, states, strict=True):
            if state.mapper != self.mapper:
                raise BadValueError(f"Consoles: got a state of mapper {state.mapper!r}, expected {self.mapper!r}.")
            for name, value in self._expected(state).items():
                row[FIELDS.index(name)] = value
            memory[:128] = state.ram
            if self.mapper.endswith("SC"):
                memory[128:] = state.cartridge[2:130]
        return torch.from_numpy(rows), torch.from_numpy(memories)

    def run(self, actions: Tensor, *, draw: bool = False) -> None:
        """Run a frame with ALE's actions 0 to 17, [B] int32. Set ``draw`` if `screen` will be called afterwards."""
        consoles = place_consoles(self.board, (self.registers, self.ram, self._screens), puts_off=self.puts_off)
        run_consoles(self.board, consoles, actions.contiguous(), self._everybody, draw=draw)

    def register(self, name: str) -> Tensor:
        """Return one register of all consoles, by its name in `FIELDS`: a view.  [B] int32."""
        column: Tensor = self.registers[:, FIELDS.index(name)]
        return column

    def screen(self) -> Tensor:
        """Return the last drawn frame as palette indices, like ``ale.getScreen()``.  [B, lines, 160] uint8.

        Lines that a short frame did not reach keep the pixels of two frames earlier.
        """
        rows = torch.arange(len(self.registers), device=self.device)
        pixels: Tensor = self._screens[rows, (self.register("n_frames") & 1).long()]
        lines = int(self.register("n_lines")[0])
        return pixels.view(-1, MOST_PICTURE_LINES, 160)[:, :lines]

    def show(self, picture: Tensor) -> None:
        """Replace the last picture of all consoles, [lines, 160] uint8; short frames leave parts of it visible."""
        rows = torch.arange(len(self.registers), device=self.device)
        last = (self.register("n_frames") & 1).long()
        self._screens[rows, last, : picture.numel()] = picture.reshape(-1)

    def differences(self, i: int, state: AleState) -> dict[str, tuple[int, int]]:
        """Compare console i with an ALE state: name or RAM address to ``(got, expected)`` for each difference."""
        ours = dict(zip(FIELDS, self.registers[i].tolist(), strict=True))  # sync: a comparison on the host
        pairs = {name: (ours[name], value) for name, value in self._expected(state).items() if name not in _NOT_IN_ALE}
        memory = self.ram[i].tolist()  # sync: a comparison on the host
        pairs |= {f"${128 + k:02X}": (memory[k], int(byte)) for k, byte in enumerate(state.ram)}
        if self.mapper.endswith("SC"):
            pairs |= {f"cartridge ${k:02X}": (memory[128 + k], byte) for k, byte in enumerate(state.cartridge[2:130])}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def _expected(self, state: AleState) -> dict[str, int]:
        """Return our registers for an ALE state."""
        first, lines = state.lines
        controller = games.CONTROLLERS.get(self.game, JOYSTICK)
        paddles = {PADDLE: state.paddles, SECOND_PADDLE: state.paddles[::-1]}.get(controller, (-1, -1))
        return {
            **state.registers,
            "pages": self._pages(state.cartridge),
            "switches": 0x3F,
            "paddle0": paddles[0],
            "paddle1": paddles[1],
            "paddle_least": state.paddle_range[0],
            "paddle_most": state.paddle_range[1],
            "first_line": first,
            "n_lines": lines,
            "mirror_playfield": state.registers["control"] & 1,
            "pal": int(lines == PAL_LINES),
            "blanks": int(self.game not in games.NO_HMOVE_BLANKS),
            "controller": controller,
            "input2": 0x80 if controller == SECOND_PADDLE else 0,
        }

    def _pages(self, numbers: tuple[int, ...]) -> int:
        """Return which kilobytes of the ROM are mapped into the four windows, one byte each."""
        if self.mapper == "E0":
            return sum(page << (8 * window) for window, page in enumerate(numbers[1:5]))
        bank = numbers[0] if self.mapper[0] == "F" and self.mapper != "FE" else 0
        return 0x03020100 + 0x04040404 * bank


def place_consoles(board: Any, memory: tuple[Tensor, Tensor, Tensor], *, puts_off: bool | None = None) -> Any:
    """Point a `Board` at the memory of B consoles without a copy, and return the consoles for `run_consoles`.

    ``memory``: registers [B, F] int32, RAM [B, 256] uint8, and screens [B, 2, lines * 160] uint8. The first two need
    not be contiguous along B. With ``puts_off`` the beam is followed later, see `spans`; None does so on a GPU only.
    """
    registers, ram, screens = memory
    begin, strides, device = registers.data_ptr(), (4 * registers.stride(0),), str(ram.device)
    place: dict[str, Any] = {"shape": (len(ram),), "strides": strides, "device": device, "copy": False}
    board.outer = wp.array(ptr=begin + wp.types.type_size_in_bytes(Console), dtype=Periphery, **place)
    board.ram = wp.from_torch(ram)
    board.screen = wp.from_torch(screens.view(torch.int32).view(-1), dtype=wp.uint32)
    board.picture = screens.shape[2] // 4
    board.puts_off = int(registers.is_cuda if puts_off is None else puts_off)
    if board.puts_off:
        n_words = len(ram) * (MOST_SPANS + 1) * SPAN_WORDS
        log = torch.empty(n_words, dtype=torch.int32, device=ram.device)
        board.log = wp.from_torch(log, dtype=wp.uint32)
    return wp.array(ptr=begin, dtype=Console, **place)


def run_consoles(board: Any, consoles: Any, actions: Tensor, running: Any, *, draw: bool) -> None:
    """Run a frame of the consoles from `place_consoles`, with ALE's actions [B] int32; draw frames that will be shown.

    Consoles where ``running`` [B] int32 (a torch or Warp array) is 0 do not change.
    """
    board.draw, device = int(draw), actions.device
    apart = THREADS_PER_CONSOLE or threads_per_console(len(actions), device)
    launch(device, run_frame, len(actions) * apart, consoles, board, actions, running, apart, block=BLOCK)
    if draw and board.puts_off:
        launch(device, draw_frame, (len(actions), board.picture // WORDS_OF_A_LINE), consoles, board, running)


def threads_per_console(n: int, device: torch.device) -> int:
    """Return how many threads each of n consoles gets, 1 to 32, so that few consoles fill a GPU's warps, too.

    The fewer consoles share a warp, the less they wait for each other.
    """
    if device.type != "cuda":
        return 1
    warps = RESIDENT_WARPS * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 << max(0, min(32, 32 * warps // n).bit_length() - 1)
