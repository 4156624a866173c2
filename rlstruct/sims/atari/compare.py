"""Play a game in ALE and here with the same random actions, and say what differs: our oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlstruct.device import DeviceLike
from rlstruct.errors import BadValueError
from rlstruct.sims.atari.ale_state import read_ale_state
from rlstruct.sims.atari.games import TWO_PLAYERS
from rlstruct.sims.atari.machine import Consoles

BOTH_PICTURES = 2  # frames until ALE and we show nothing that is older than the start


@dataclass(frozen=True)
class Comparison:
    """Differences between a game in ALE and the same game here.

    Attributes:
        game: ALE's name.
        mapper: ALE's name of the kind of cartridge.
        n_frames: how many frames were compared; fewer than asked for if registers differed.
        n_games: how many games began in these frames; each begins with ALE's state.
        differences: names of registers and addresses of RAM to (got, expected), in the first frame in which any
            differed; empty if all were equal.
        n_wrong_pictures: in how many frames pixels differed.
        wrong_pixels: how many pixels differed in the first of these frames.
    """

    game: str
    mapper: str
    n_frames: int
    n_games: int
    differences: dict[str, tuple[int, int]]
    n_wrong_pictures: int
    wrong_pixels: int


def playable_games() -> list[str]:
    """List ALE's names of the games whose ROMs ale-py ships and loads for one player, in alphabetical order.

    Raises:
        ImportError: ale-py is not installed.
    """
    from ale_py import roms

    return sorted(set(roms.get_all_rom_ids()) - TWO_PLAYERS)


def rom_path(game: str) -> Path:
    """Find ale-py's ROM of a game, by ALE's name.

    Raises:
        ValueError: it ships no ROM of that name.
    """
    from ale_py import roms

    path: Path | None = roms.get_rom_path(game)
    if path is None:
        raise BadValueError(
            f"rlstruct.sims.atari: ale-py ships no ROM of {game!r}, only of {', '.join(playable_games())}."
        )
    return path


def open_ale(game: str, seed: int) -> Any:
    """Open a game in ALE, at the start: an ``ale_py.ALEInterface`` without sticky actions; ``seed`` is that of ALE.

    Raises:
        ValueError: ale-py ships no ROM of that name.
    """
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(rom_path(game))
    ale.reset_game()
    return ale


def open_consoles(game: str, ale: Any, n: int, device: DeviceLike = "cpu") -> Consoles:
    """Make n consoles that go on where a game in ALE, an ``ale_py.ALEInterface``, is.

    Raises:
        ValueError: the cartridge is of a kind that is not in `MAPPERS`.
    """
    state = read_ale_state(ale.cloneState().serialize())
    consoles = Consoles(rom_path(game).read_bytes(), state.mapper, n, game=game, device=device)
    consoles.load([state])
    return consoles


def compare_with_ale(game: str, n_frames: int = 1000, *, seed: int = 0, device: DeviceLike = "cpu") -> Comparison:
    """Play a game with random actions in ALE and here, and compare registers, RAM and pixels after each frame.

    A game that is over begins again from ALE's state. Pixels are compared from the third frame of a game on, because
    ALE's states do not hold the pictures, and short frames show what is left of older ones.

    Args:
        game: ALE's name.
        n_frames: how many frames; it ends earlier where registers differ.
        seed: of the actions and of ALE.
        device: where ours runs.

    Raises:
        ImportError: ale-py is not installed.
        ValueError: the cartridge is of a kind that is not in `MAPPERS`.
    """
    ale = open_ale(game, seed)
    consoles = open_consoles(game, ale, 1, device)
    actions = [action.value for action in ale.getLegalActionSet()]
    drawn = np.random.default_rng(seed).choice(actions, n_frames)
    differences: dict[str, tuple[int, int]] = {}
    wrong: list[int] = []
    since_start, n_games, n_compared = 0, 1, 0
    for action in drawn.tolist():  # sync: numpy, once
        n_compared += 1
        ale.act(action)
        consoles.run(torch.tensor([action], dtype=torch.int32, device=consoles.device), draw=True)
        differences = consoles.differences(0, read_ale_state(ale.cloneState().serialize()))
        if differences:
            break
        picture = torch.from_numpy(ale.getScreen()).to(consoles.device)
        since_start += 1
        if since_start <= BOTH_PICTURES:
            consoles.show(picture)
        elif n_wrong := int((consoles.screen()[0] != picture).sum()):
            wrong.append(n_wrong)
        if ale.game_over():
            ale.reset_game()
            consoles.load([read_ale_state(ale.cloneState().serialize())])
            since_start, n_games = 0, n_games + 1
    return Comparison(game, consoles.mapper, n_compared, n_games, differences, len(wrong), wrong[0] if wrong else 0)
