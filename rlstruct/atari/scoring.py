"""Kernel that finds reward, lives and the end of the game after a frame, by looking up bytes of RAM in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import warp as wp
from torch import Tensor

from rlstruct.atari.rules import DROPS, HELD, Rules, tables
from rlstruct.sims.kernels import launch, start

SCORE, LIVES, OVER, BEFORE, SETS = range(5)
"""Columns of a tally: score, lives, 1 if the game is over, the byte that `Rules.before` remembers, sets."""


@wp.struct
class Rulebook:
    """Rules of one game, as the kernel reads them."""

    addresses: wp.array(dtype=int)  # of the bytes to look up; 128 is the remembered byte.  [T]
    values: wp.array3d(dtype=int)  # of score, sets, lives and ends.  [4, T, 256]
    # of `Rules`
    wraps: int
    most: int
    still_at_end: int
    before: int
    counts_down: int


@wp.kernel(enable_backward=False)
def score_frame(
    book: Rulebook,
    ram: wp.array2d(dtype=wp.uint8),
    running: wp.array(dtype=int),
    tally: wp.array2d(dtype=int),
    rewards: wp.array(dtype=int),
):
    """Update the tallies after a frame; see `Scorer.count`."""
    i = wp.tid()
    if running[i] == 0:
        return
    score = int(0)
    sets = int(0)
    lives = int(0)
    over = int(-1)  # all bits
    for t in range(book.addresses.shape[0]):
        address = book.addresses[t]
        byte = int(0)
        if address < 128:  # noqa: SIM108 - Warp has no conditional expressions
            byte = int(ram[i, address])
        else:
            byte = tally[i, BEFORE]
        score += book.values[0, t, byte]
        sets += book.values[1, t, byte]
        lives += book.values[2, t, byte]
        over = over & book.values[3, t, byte]
    if book.before >= 0:
        remembered = int(ram[i, book.before])
        if book.counts_down != 0:
            lives = tally[i, LIVES] - wp.where(remembered == ((tally[i, BEFORE] - 1) & 255), 1, 0)
        tally[i, BEFORE] = remembered
    reward = score - tally[i, SCORE]
    if sets != tally[i, SETS]:
        reward = sets - tally[i, SETS]
    if book.wraps > 0 and reward < 0:
        reward += book.wraps
    reward = wp.min(reward, book.most)
    ended = wp.where((over & (DROPS - 1)) != 0, 1, 0)
    if (over & HELD) != 0 or (lives == tally[i, LIVES] - 1 and (over & DROPS) == 0):
        lives = tally[i, LIVES]
    if ended != 0:
        lives = 0
        if book.still_at_end != 0:
            reward = 0
    rewards[i] = rewards[i] + reward
    tally[i, SCORE] = score
    tally[i, SETS] = sets
    tally[i, LIVES] = lives
    tally[i, OVER] = ended


class Scorer:
    """Scorer of consoles that all play the same game."""

    def __init__(self, rules: Rules, device: torch.device) -> None:
        start()
        self._device = device
        self._book = Rulebook()
        # Copied by torch: Warp would use another stream, which nothing waits for.
        addresses, values = (wp.from_torch(torch.from_numpy(table).to(device)) for table in tables(rules))
        self._book.addresses, self._book.values = addresses, values
        for name in ("wraps", "most", "still_at_end", "before", "counts_down"):
            setattr(self._book, name, int(getattr(rules, name)))

    def begin(self, ram: Tensor, lives: Sequence[int]) -> Tensor:
        """Return the tallies, [K, 5] int32, of K games that start with this RAM, [K, 256] uint8, and these lives."""
        tally = torch.zeros(len(ram), 5, dtype=torch.int32, device=self._device)
        self.count(ram, tally)
        tally[:, LIVES], tally[:, OVER] = torch.tensor(lives, dtype=torch.int32, device=self._device), 0
        return tally

    def count(self, ram: Any, tally: Any, running: Any = None, rewards: Any = None) -> Any:
        """Update the tallies after a frame, and return the rewards, [B] int32.

        The arguments are torch tensors, or Warp arrays, which save their conversion in each call.

        Args:
            ram: [B, 256] uint8
            tally: updated in place.  [B, 5] int32
            running: 0 leaves a row unchanged; None for all.  [B] int32
            rewards: this frame's rewards are added to them; None to start from 0.  [B] int32
        """
        running = torch.ones_like(tally[:, 0]) if running is None else running
        rewards = torch.zeros_like(tally[:, 0]) if rewards is None else rewards
        launch(self._device, score_frame, len(ram), self._book, ram, running, tally, rewards)
        return rewards
