"""The solver of benchmarks/connect_four_strength.py against one that tries every game to its end."""

from __future__ import annotations

import pathlib

import pytest
from positions import Bitboard, random_position, solve

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_solver_agrees_with_every_game_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import connect_four_strength

    known, table = {}, {}
    results = []
    for seed in range(150):
        board = random_position(seed, range(30, 42))
        results.append(solve(board, known))
        assert connect_four_strength.solve(board.mine, board.theirs, table) == results[-1]
    assert {-1, 0, 1} == set(results)
    for mine, theirs, best in connect_four_strength.solved_positions(10, n_stones=34):
        board = Bitboard(mine, theirs)
        values = {c: -solve(board.play(c), known) for c in board.legal()}
        assert best == {c for c, value in values.items() if value == max(values.values())} != set(values)
