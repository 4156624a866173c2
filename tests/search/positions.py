"""Positions of Connect Four, and boards as Python integers: an oracle that shares nothing with the simulator."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from rlstruct.sims import ConnectFourState

FOURS = [
    sum(1 << (7 * (c + i * dc) + r + i * dr) for i in range(4))
    for c in range(7)
    for r in range(6)
    for dc, dr in ((1, 0), (0, 1), (1, 1), (1, -1))
    if 0 <= c + 3 * dc < 7 and 0 <= r + 3 * dr < 6
]
"""Stones of every line of four, bit 7 c + r for column c and row r from below."""


@dataclass(frozen=True)
class Bitboard:
    """A position: stones of who moves next, and of the other."""

    mine: int = 0
    theirs: int = 0

    def legal(self) -> list[int]:
        return [c for c in range(7) if not (self.mine | self.theirs) >> (7 * c + 5) & 1]

    def play(self, column: int) -> Bitboard:
        row = next(r for r in range(6) if not (self.mine | self.theirs) >> (7 * column + r) & 1)
        return Bitboard(self.theirs, self.mine | 1 << (7 * column + row))

    def won(self) -> bool:
        """Return True if the player who has just moved has four in a line."""
        return any(self.theirs & four == four for four in FOURS)

    def full(self) -> bool:
        return not self.legal()

    def wins(self) -> list[int]:
        """Columns that win at once."""
        return [c for c in self.legal() if self.play(c).won()]

    def passed(self) -> Bitboard:
        """The same stones with the other player to move."""
        return Bitboard(self.theirs, self.mine)

    def two_threats_to_come(self) -> bool:
        """Return True if the player to move can win at once, or make two threats of which one stays unanswered."""
        replies = [self.play(c) for c in self.legal()]
        return bool(self.wins()) or any(not reply.wins() and len(reply.passed().wins()) > 1 for reply in replies)


def solve(board: Bitboard, known: dict[Bitboard, int]) -> int:
    """Return 1, 0 or -1: the result for the player to move if both play perfectly. Every game is tried to its end."""
    if board.won():
        return -1
    if board.full():
        return 0
    if board not in known:
        known[board] = max(-solve(board.play(c), known) for c in board.legal())
    return known[board]


def random_position(seed: int, n_moves: range) -> Bitboard:
    """Play games at random, of a number of moves from a range, until one of them has no winner yet."""
    draw = random.Random(seed)
    while True:
        board = Bitboard()
        for _ in range(draw.choice(n_moves)):
            board = board.play(draw.choice(board.legal()))
            if board.won():
                break
        else:
            return board


def tactical(n: int, kind: str) -> list[Bitboard]:
    """Positions where a move wins (``"win"``), or where one does not lose soon and all others at once (``"block"``)."""
    found: list[Bitboard] = []
    seed = 0
    while len(found) < n:
        seed += 1
        board = random_position(seed, range(6, 30))
        threats = board.passed().wins()
        wins = board.wins()
        blocks = not wins and len(threats) == 1 and not board.play(threats[0]).two_threats_to_come()
        if wins if kind == "win" else blocks:
            found.append(board)
    return found


def as_state(boards: list[Bitboard]) -> ConnectFourState:
    """Turn positions into a state of the simulator."""
    return ConnectFourState(
        torch.tensor([board.mine for board in boards]), torch.tensor([board.theirs for board in boards])
    )
