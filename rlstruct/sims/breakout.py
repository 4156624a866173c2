"""MinAtar's Breakout on any device; see `rlstruct.sims._minatar`.

The player moves a paddle along the bottom and bounces a ball that breaks three rows of bricks, one point each. Cleared,
they come back. The ball moves along diagonals; it is lost, and the game with it, below the paddle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlstruct.functional.random import randint
from rlstruct.sims._minatar import LEFT, NOTHING, RIGHT, SIZE, MinAtarGame, walk

ALL_BRICKS = (1 << 30) - 1


@dataclass(frozen=True)
class BreakoutState:
    """Where ball, paddle and bricks are. All [B] int64 unless said.

    Attributes:
        ball_x: column of the ball.
        ball_y: row of the ball.
        ball_dir: 0 up left, 1 up right, 2 down right, 3 down left.
        pos: column of the paddle.
        bricks: bit 10 r + c is the brick in row r + 1, column c.
        strike: whether the ball has just broken a brick, and passes through the next.  [B] bool
        last_x: column of the ball one step ago.
        last_y: row of the ball one step ago.
        last_action: of all six.
    """

    ball_x: Tensor
    ball_y: Tensor
    ball_dir: Tensor
    pos: Tensor
    bricks: Tensor
    strike: Tensor
    last_x: Tensor
    last_y: Tensor
    last_action: Tensor


class Breakout(MinAtarGame[BreakoutState]):
    """MinAtar's Breakout: nothing (0), left (1), right (2). Arguments as `MinAtarGame`; the game never ramps."""

    channels = ("paddle", "ball", "trail", "brick")
    useful_actions = (NOTHING, LEFT, RIGHT)
    kernel_module: ClassVar[str] = "rlstruct.sims.breakout_kernel"

    def initial(self, key: Tensor) -> BreakoutState:
        """Start the ball in one of the upper corners."""
        right = randint(key, 2)
        x, zero = right * 9, torch.zeros_like(key)
        return BreakoutState(
            ball_x=x,
            ball_y=zero + 3,
            ball_dir=2 + right,
            pos=zero + 4,
            bricks=zero + ALL_BRICKS,
            strike=zero > 0,
            last_x=x,
            last_y=zero + 3,
            last_action=zero,
        )

    def play(self, state: BreakoutState, action: Tensor, key: Tensor) -> tuple[BreakoutState, Tensor, Tensor]:
        """Move the paddle, then the ball; see the file of the package for the order of events."""
        pos = walk(state.pos, action)
        x, y, heading = state.ball_x, state.ball_y, state.ball_dir
        to_right = (heading == 1) | (heading == 2)
        new_x = x + to_right.to(torch.int64) * 2 - 1
        new_y = y + (heading >= 2).to(torch.int64) * 2 - 1
        # Directions as bits: ^ 1 mirrors left and right, ^ 3 up and down, ^ 2 turns back.
        beside = (new_x < 0) | (new_x >= SIZE)
        new_x = new_x.clamp(0, SIZE - 1)
        heading = heading ^ beside.to(torch.int64)
        above = new_y < 0
        new_y = new_y.clamp_min(0)
        brick = ((new_y - 1) * SIZE + new_x).clamp(0, 29)
        hit = ~above & (new_y >= 1) & (new_y <= 3) & (((state.bricks >> brick) & 1) == 1)
        breaks = hit & ~state.strike
        bricks = state.bricks ^ (breaks.to(torch.int64) << brick)
        ground = ~above & ~hit & (new_y == SIZE - 1)
        bricks = torch.where(ground & (bricks == 0), ALL_BRICKS, bricks)
        bounces = ground & (x == pos)
        turns = ground & ~bounces & (new_x == pos)
        lost = ground & ~bounces & ~turns
        heading = heading ^ (above | breaks | bounces).to(torch.int64) * 3 ^ turns.to(torch.int64) * 2
        new_y = torch.where(breaks | bounces | turns, y, new_y)
        moved = BreakoutState(new_x, new_y, heading, pos, bricks, hit, x, y, action)
        return moved, breaks.to(torch.float32), lost

    def observe(self, state: BreakoutState) -> Tensor:
        """Paint paddle, ball, the ball's last place, bricks."""
        wall = ((state.bricks.unsqueeze(1) >> (self._cells - SIZE).clamp(0, 31)) & 1) == 1  # bits 30 and 31 are 0
        wall = wall & (self._cells >= SIZE)
        paddle = self.dot(torch.full_like(state.pos, SIZE - 1), state.pos)
        return self.frame(paddle, self.dot(state.ball_y, state.ball_x), self.dot(state.last_y, state.last_x), wall)
