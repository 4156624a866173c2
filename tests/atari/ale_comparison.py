"""Oracle of the consoles: a game in ALE and here, played with the same random actions, register by register."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlstruct.atari import open_ale, open_consoles, read_ale_state
from rlstruct.device import DeviceLike

BOTH_PICTURES = 2  # frames until neither ALE nor the console shows anything older than the start


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


def compare_with_ale(
    game: str, n_frames: int = 1000, *, seed: int = 0, device: DeviceLike = "cpu", puts_off: bool | None = None
) -> Comparison:
    """Play a game with random actions in ALE and here, and compare registers, RAM and pixels after each frame.

    A game that is over begins again from ALE's state. Pixels are compared from the third frame of a game on, because
    ALE's states do not hold the pictures, and short frames show what is left of older ones.

    Args:
        game: ALE's name.
        n_frames: how many frames; it ends earlier where registers differ.
        seed: of the actions and of ALE.
        device: where ours runs.
        puts_off: as `Consoles` takes it.

    Raises:
        ImportError: ale-py is not installed.
        ValueError: the cartridge is of a kind that is not in `MAPPERS`.
    """
    ale = open_ale(game, seed)
    consoles = open_consoles(game, ale, 1, device)
    consoles.puts_off = puts_off
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
