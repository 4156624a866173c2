"""The solver of benchmarks/connect_four_strength.py against one that tries every game to its end."""

from __future__ import annotations

import pathlib
import random

import pytest
from positions import Bitboard

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def brute_force(board: Bitboard, known: dict[Bitboard, int]) -> int:
    """Return 1, 0 or -1: what who moves next gets if both play perfectly."""
    if board.won():
        return -1
    if board.full():
        return 0
    if board not in known:
        known[board] = max(-brute_force(board.play(c), known) for c in board.legal())
    return known[board]


def test_the_solver_agrees_with_every_game_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from connect_four_strength import solve, solved_positions

    draw, known, table = random.Random(3), {}, {}
    results = []
    while len(results) < 150:
        board = Bitboard()
        for _ in range(draw.randint(30, 41)):
            board = board.play(draw.choice(board.legal()))
            if board.won():
                break
        else:
            results.append(brute_force(board, known))
            assert solve(board.mine, board.theirs, table) == results[-1]
    assert {-1, 0, 1} == set(results)
    for mine, theirs, best in solved_positions(10, n_stones=34):
        board = Bitboard(mine, theirs)
        values = {c: -brute_force(board.play(c), known) for c in board.legal()}
        assert best == {c for c, value in values.items() if value == max(values.values())} != set(values)
