"""Scoring rules of games, found by asking ALE: ``python tests/atari/find_rules.py GAME``.

Single bytes of the RAM are changed in a state of ALE whose program is one instruction that ends the frame, so that
nothing else changes; what ALE then says is printed as words of the rules of `rlstruct.atari.games`. The tests
compare those rules with ALE (``pytest -m exhaustive tests/atari/test_atari.py``: 6,000 frames of each game).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np

Said = tuple[int, int, bool]
"""Reward, lives, whether the game is over."""
END_FRAME = bytes([0x86, 0x00])  # STX VSYNC


def ask(
    ale: Any,
    state: bytes,
    ram: np.ndarray,
    *,
    program_at: int = 126,
) -> Said:
    """Ask ALE what it makes of a RAM.

    Args:
        ale: an ``ale_py.ALEInterface`` with the game.
        state: of ALE, serialized: what it knew before.
        ram: the 128 bytes.  [128] uint8
        program_at: two bytes that nothing depends on; they hold the instruction that ends the frame.

    Returns:
        What it says.
    """
    import ale_py

    from rlstruct.atari.ale_state import write_ale_state

    memory = ram.copy()
    memory[program_at : program_at + 2] = list(END_FRAME)
    asked = write_ale_state(state, ram=memory, pc=0x80 + program_at, x=0, vsync=2, vsync_end=0, partial=0)
    ale.restoreState(ale_py.ALEState(asked))
    reward = ale.act(0)
    return int(reward), ale.lives(), ale.game_over()


def moments(ale: Any, n_frames: int, seed: int) -> Iterator[tuple[str, bytes, np.ndarray]]:
    """Play, and stop at the moments from which rules can be seen.

    Args:
        ale: an ``ale_py.ALEInterface``, at the start.
        n_frames: the most to play.
        seed: of the actions.

    Yields:
        What moment it is, ALE's state before it, and the RAM of that moment.
    """
    actions = [action.value for action in ale.getLegalActionSet()]
    drawn = np.random.default_rng(seed).choice(actions, n_frames).tolist()
    lives, lost = ale.lives(), False
    yield "start", ale.cloneState().serialize(), ale.getRAM().copy()
    for n, action in enumerate(drawn):
        before, ram = ale.cloneState(), ale.getRAM().copy()
        ale.act(action)
        if ale.game_over():
            yield "before the end", before.serialize(), ram
            yield "the end", before.serialize(), ale.getRAM().copy()
            return
        if n == 700 or (ale.lives() < lives and not lost):
            lost |= ale.lives() < lives
            yield "later", ale.cloneState().serialize(), ale.getRAM().copy()


def infer(game: str, n_frames: int, seed: int) -> Iterator[str]:
    """Ask ALE which bytes a game counts with, and say it in words of the rules where they fit.

    Args:
        game: ALE's name.
        n_frames: how long to play in search of an end.
        seed: of ALE and of the actions.

    Yields:
        A line for each byte and moment.
    """
    from rlstruct.atari import open_ale

    ale, asked = open_ale(game, seed), open_ale(game, seed)
    for moment, state, ram in moments(ale, n_frames, seed):
        base = ask(asked, state, ram)
        yield f"{moment}: reward, lives, over = {base}"
        for address in range(128):
            at = 126 if address < 126 else 0

            def said(
                value: int, address: int = address, at: int = at, state: bytes = state, ram: np.ndarray = ram
            ) -> Said:
                changed = ram.copy()
                changed[address] = value
                return ask(asked, state, changed, program_at=at)

            own = int(ram[address])
            tried = {0, 1, 2, 4, 8, 15, 16, 32, 64, 127, 128, 255, own ^ 1, own ^ 16, (own + 1) & 255, 0x99, 0x55, 0xAA}
            if len({said(value) for value in tried | {own}}) > 1:
                rows = np.array([said(value) for value in range(256)], np.int64)
                words = "; ".join(w for w in map(in_words, ("reward", "lives", "over"), rows.T, [address] * 3) if w)
                yield f"  byte {address} (now {own}): {words}"


def in_words(what: str, said: np.ndarray, address: int) -> str:
    """Say how a number depends on a byte.

    Args:
        what: the number's name.
        said: for each value of the byte.  [256]
        address: of the byte.

    Returns:
        A word or condition of the rules, or the values; "" if it does not depend on it.
    """
    from rlstruct.atari.rules import SHAPES

    if (said == said[0]).all():
        return ""
    if what == "over":
        for mask in (255, 15, 7, 3, 1, 240, 128, 64, 32):
            over, rest = ({value & mask for value in np.flatnonzero(said == yes)} for yes in (1, 0))
            for sign, values in (("==", over), ("!=", rest)):
                if len(values) == 1 and not over & rest:
                    return f"over while {address}&{mask}{sign}{values.pop()}"
        return f"over at {np.flatnonzero(said).tolist()}"
    for shape, values in SHAPES.items():
        for shift, mask in [(0, 255)] + [(s, (1 << n) - 1) for s in range(8) for n in range(1, 9 - s)] * (shape == "b"):
            part = (values >> shift) & mask
            k = int(np.argmax(part != part[0]))
            weight, left = divmod(int(said[k] - said[0]), int(part[k] - part[0]) or 1)
            if not left and weight and (said - said[0] == weight * (part - part[0])).all():
                return f"{what} {weight}*{shape}{address}>>{shift}&{mask} + {said[0] - weight * part[0]}"
    return f"{what} {said.tolist()}"


def main() -> None:
    """Ask about a game."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("game", help="ALE's name of it")
    parser.add_argument("--frames", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for line in infer(options.game, options.frames, options.seed):
        print(line, flush=True)


if __name__ == "__main__":
    main()
