"""MinAtar's Breakout on any device; see `rlstruct.sims.minatar_game`.

The player moves a paddle along the bottom and bounces a ball that breaks three rows of bricks, one point each. Bricks
come back once all are cleared. The ball moves diagonally; the game ends when it falls below the paddle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstruct.functional.random import randint
from rlstruct.sims.minatar_game import CELLS, LEFT, NOTHING, RIGHT, SIZE, MinAtarGame, move_player, sign, state_field

ALL_BRICKS = (1 << 30) - 1


@dataclass(frozen=True)
class BreakoutState:
    """Positions of ball, paddle and bricks."""

    ball_x: Tensor = state_field(0)
    ball_y: Tensor = state_field(3)
    ball_dir: Tensor = state_field(2)  # 0 up left, 1 up right, 2 down right, 3 down left
    pos: Tensor = state_field(4)  # column of the paddle
    bricks: Tensor = state_field(ALL_BRICKS)  # bit 10 r + c is the brick in row r + 1, column c
    strike: Tensor = state_field(False)  # the ball was at a brick in the last step, and passes through the next
    last_x: Tensor = state_field(0)  # where the ball was one step ago
    last_y: Tensor = state_field(3)
    last_action: Tensor = state_field(0)  # of all six


class Breakout(MinAtarGame[BreakoutState]):
    """MinAtar's Breakout: nothing (0), left (1), right (2). Arguments as `MinAtarGame`; the game never ramps."""

    state = BreakoutState
    channels = ("paddle", "ball", "trail", "brick")
    useful_actions = (NOTHING, LEFT, RIGHT)

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*args, **settings)
        cell = torch.arange(CELLS, dtype=torch.int64, device=self.device) - SIZE
        self._bricks = torch.where((cell >= 0) & (cell < 30), 1 << cell.clamp(0, 30), 0)  # bit of each cell's brick

    def initial(self, key: Tensor) -> BreakoutState:
        """Start the ball in one of the upper corners."""
        right = randint(key, 2, stream=0)
        return replace(super().initial(key), ball_x=right * 9, last_x=right * 9, ball_dir=2 + right)

    def play(self, state: BreakoutState, action: Tensor, key: Tensor) -> tuple[BreakoutState, Tensor, Tensor]:
        """Move the paddle, then the ball, in the order of events of the package."""
        pos = move_player(state.pos, action)
        x, y, heading = state.ball_x, state.ball_y, state.ball_dir
        to_right = (heading == 1) | (heading == 2)
        new_x, new_y = x + sign(to_right), y + sign(heading >= 2)
        # Directions as bits: ^ 1 mirrors left and right, ^ 3 up and down, ^ 2 turns back.
        at_wall = (new_x < 0) | (new_x >= SIZE)
        new_x = new_x.clamp(0, SIZE - 1)
        heading = heading ^ at_wall.to(torch.int64)
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
        """Paint the paddle, the ball, its last position, and the bricks."""
        wall = (state.bricks.unsqueeze(1) & self._bricks) != 0
        paddle, ball = self.paint_cell(SIZE - 1, state.pos), self.paint_cell(state.ball_y, state.ball_x)
        return self.frame(paddle, ball, self.paint_cell(state.last_y, state.last_x), wall)
