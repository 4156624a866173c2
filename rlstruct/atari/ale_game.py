"""Games from the user's ale-py: cartridges, actions, colours and start states."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstruct.atari.ale_state import AleState, read_ale_state, write_ale_state
from rlstruct.atari.games import TWO_PLAYERS
from rlstruct.atari.machine import Consoles
from rlstruct.device import DeviceLike
from rlstruct.errors import BadValueError

NOTHING, PRESS_FIRE = 0, 1

# An endless loop of STX COLUBK, STX WSYNC, INX, INX: each line shows another colour.
_SHOW_COLORS = bytes([0x86, 0x09, 0x86, 0x02, 0xE8, 0xE8, 0x4C, 0x80, 0x00])


@dataclass(frozen=True)
class StartState:
    """Start state of a game."""

    state: AleState
    screens: npt.NDArray[np.uint8]  # the last two frames, older first.  [2, lines, 160] uint8
    lives: int  # as ALE counts them


@dataclass(frozen=True)
class AleGame:
    """Properties of a game that ale-py ships."""

    name: str  # ALE's, such as ``space_invaders``
    rom: bytes  # contents of the cartridge
    actions: tuple[int, ...]  # ALE's minimal action set
    legal: tuple[int, ...]  # ALE's full action set
    gray: npt.NDArray[np.uint8]  # brightness of each palette entry.  [256, 1] uint8
    colors: npt.NDArray[np.uint8]  # red, green and blue of each palette entry.  [256, 3] uint8


def playable_games() -> list[str]:
    """List the games that ale-py ships and can load for one player: ALE's names, in alphabetical order."""
    from ale_py import roms

    return sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS)


def rom_path(game: str) -> Path:
    """Return the path of ale-py's ROM of a game, given ALE's name."""
    from ale_py import roms

    path: Path | None = roms.get_rom_path(game)
    if path is None:
        raise BadValueError(f"rlstruct.atari: ale-py ships no ROM of {game!r}, only of {', '.join(playable_games())}.")
    return path


def open_ale(game: str, seed: int) -> Any:
    """Open a game in ALE at its start, without sticky actions: an ``ale_py.ALEInterface``; ``seed`` is ALE's."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(rom_path(game))
    ale.reset_game()
    return ale


def open_consoles(game: str, ale: Any, n: int, device: DeviceLike = "cpu") -> Consoles:
    """Make n consoles that continue from the current state of an ``ale_py.ALEInterface``."""
    state = read_ale_state(ale.cloneState().serialize())
    consoles = Consoles(rom_path(game).read_bytes(), state.mapper, n, game=game, device=device)
    consoles.load([state])
    return consoles


@functools.cache
def rom_ids() -> dict[str, str]:
    """Map gymnasium's name of each game of ale-py, such as ``SpaceInvaders``, to ALE's name."""
    from ale_py import roms

    return {"".join(word.capitalize() for word in name.split("_")): name for name in sorted(roms.get_all_rom_ids())}


@functools.lru_cache(maxsize=8)
def load_game(name: str) -> AleGame:
    """Read the properties of a game from ale-py."""
    ale = open_ale(name, 0)
    gray, colors = read_palette(ale)
    return AleGame(
        name,
        rom_path(name).read_bytes(),
        tuple(action.value for action in ale.getMinimalActionSet()),
        tuple(action.value for action in ale.getLegalActionSet()),
        gray,
        colors,
    )


def read_palette(ale: Any) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read ALE's palette from its screen while a program of ours shows all colours; then restore the game's state.

    Returns:
        Brightness [256, 1], and red, green and blue [256, 3], uint8, of each palette entry; 0 for entries that the game
        cannot show.
    """
    import ale_py

    kept = ale.cloneState()
    gray, colors = np.zeros((256, 1), np.uint8), np.zeros((256, 3), np.uint8)
    memory = np.zeros(128, np.uint8)
    memory[: len(_SHOW_COLORS)] = list(_SHOW_COLORS)
    for n_lines in (262, 263):  # European consoles show greys after an odd number of lines
        asked = write_ale_state(
            kept.serialize(), ram=memory, pc=0x80, x=0, partial=0, n_scanlines=n_lines, scanline=n_lines, vblank=0
        )
        ale.restoreState(ale_py.ALEState(asked))
        ale.act(NOTHING)
        screen = ale.getScreen()
        gray[screen, 0], colors[screen] = ale.getScreenGrayscale(), ale.getScreenRGB()
    ale.restoreState(kept)
    return gray, colors


def start_states(name: str, n: int, *, fire: int = 0) -> list[StartState]:
    """Return ALE's states after a reset and 1 to n no-op frames, as AtariPreprocessing begins games.

    With ``n=0``, return one state without no-op frames. Each is followed by ``fire`` frames of FIRE, in games that use
    it.
    """
    import ale_py

    ale = open_ale(name, 0)
    presses = [PRESS_FIRE] * fire if ale_py.Action(PRESS_FIRE) in ale.getMinimalActionSet() else []
    screens = [ale.getScreen()]
    begun = []
    for _ in range(max(n, 1)):
        if n:
            screens.append(_play(ale, NOTHING))
        kept, pictures = ale.cloneState(), list(screens)
        pictures += [_play(ale, action) for action in presses]
        begun.append(start_state(ale, pictures[-2:]))
        ale.restoreState(kept)
    return begun


def start_state(ale: Any, screens: list[npt.NDArray[np.uint8]] | None = None) -> StartState:
    """Return ALE's current state as a start state, with the last one or two frames."""
    pictures = screens or [ale.getScreen()]
    state = read_ale_state(ale.cloneState().serialize())
    return StartState(state, np.stack([pictures[0], pictures[-1]]), ale.lives())


def _play(ale: Any, action: int) -> npt.NDArray[np.uint8]:
    """Play a frame, and reset the game if it is over."""
    ale.act(action)
    if ale.game_over():
        ale.reset_game()
    screen: npt.NDArray[np.uint8] = ale.getScreen()
    return screen
