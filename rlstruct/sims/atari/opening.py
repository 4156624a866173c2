"""Games of the user's ale-py, opened in ALE and in consoles that go on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlstruct.device import DeviceLike
from rlstruct.errors import BadValueError
from rlstruct.sims.atari.ale_state import read_ale_state
from rlstruct.sims.atari.games import TWO_PLAYERS
from rlstruct.sims.atari.machine import Consoles


def playable_games() -> list[str]:
    """List ALE's names of the games whose ROMs ale-py ships and loads for one player, in alphabetical order."""
    from ale_py import roms

    return sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS)


def rom_path(game: str) -> Path:
    """Find ale-py's ROM of a game, by ALE's name."""
    from ale_py import roms

    path: Path | None = roms.get_rom_path(game)
    if path is None:
        raise BadValueError(
            f"rlstruct.sims.atari: ale-py ships no ROM of {game!r}, only of {', '.join(playable_games())}."
        )
    return path


def open_ale(game: str, seed: int) -> Any:
    """Open a game in ALE, at the start: an ``ale_py.ALEInterface`` without sticky actions; ``seed`` is that of ALE."""
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(rom_path(game))
    ale.reset_game()
    return ale


def open_consoles(game: str, ale: Any, n: int, device: DeviceLike = "cpu") -> Consoles:
    """Make n consoles that go on where a game in ALE, an ``ale_py.ALEInterface``, is."""
    state = read_ale_state(ale.cloneState().serialize())
    consoles = Consoles(rom_path(game).read_bytes(), state.mapper, n, game=game, device=device)
    consoles.load([state])
    return consoles
