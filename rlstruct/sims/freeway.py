"""MinAtar's Freeway on any device; see `rlstruct.sims.minatar_game`.

A chicken crosses eight lanes and may move in every third step; each crossing scores a point. A car sends it back. Cars
move every one to five steps; their speeds are drawn again after each crossing. The game takes 2,500 steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlstruct.functional.random import randint, uniform
from rlstruct.sims.minatar_game import DOWN, NOTHING, SIZE, UP, MinAtarGame, paint, state_field

LANES, CHICKEN_X = 8, 4
PLAYER_SPEED, TIME_LIMIT = 3, 2500


@dataclass(frozen=True)
class FreewayState:
    """Positions of chicken and cars; car i is in row i + 1."""

    pos: Tensor = state_field(9)  # row of the chicken
    move_timer: Tensor = state_field(PLAYER_SPEED)  # steps until it can move
    terminate_timer: Tensor = state_field(TIME_LIMIT)  # steps until the end
    x: Tensor = state_field(0, LANES)  # columns of the cars
    timer: Tensor = state_field(0, LANES)  # steps until they move
    speed: Tensor = state_field(0, LANES)  # steps between two moves, negative to the left
    last_action: Tensor = state_field(0)  # of all six


class Freeway(MinAtarGame[FreewayState]):
    """MinAtar's Freeway: nothing (0), up (1), down (2). Arguments as `MinAtarGame`; the game never ramps."""

    state = FreewayState
    channels = ("chicken", "car", "speed1", "speed2", "speed3", "speed4", "speed5")
    useful_actions = (NOTHING, UP, DOWN)

    def initial(self, key: Tensor) -> FreewayState:
        """Put the chicken at the bottom and all cars at the left."""
        speed = draw_speeds(key)
        return replace(super().initial(key), speed=speed, timer=speed.abs())

    def play(self, state: FreewayState, action: Tensor, key: Tensor) -> tuple[FreewayState, Tensor, Tensor]:
        """Move the chicken, then the cars, then count down the timers."""
        step = (action == DOWN).to(torch.int64) - (action == UP).to(torch.int64)
        walks = (step != 0) & (state.move_timer == 0)
        pos = (state.pos + torch.where(walks, step, 0)).clamp(0, SIZE - 1)
        move_timer = torch.where(walks, PLAYER_SPEED, state.move_timer)

        crossed = pos == 0
        pos = torch.where(crossed, SIZE - 1, pos)
        fresh, again = draw_speeds(key), crossed.unsqueeze(1)
        speed = torch.where(again, fresh, state.speed)
        timer = torch.where(again, fresh.abs(), state.timer)

        moves = timer == 0
        x = torch.where(moves, (state.x + speed.sign()) % SIZE, state.x)
        timer = torch.where(moves, speed.abs(), timer - 1)
        # Only the car in the chicken's own row can hit it: before it moves, or after.
        row = self._cells[1 : LANES + 1]
        hit = ((row == pos.unsqueeze(1)) & ((state.x == CHICKEN_X) | (x == CHICKEN_X))).any(1)
        pos = torch.where(hit, SIZE - 1, pos)

        left = state.terminate_timer - 1
        moved = FreewayState(pos, (move_timer - 1).clamp_min(0), left, x, timer, speed, action)
        return moved, crossed.to(torch.float32), left < 0

    def observe(self, state: FreewayState) -> Tensor:
        """Paint the chicken, the cars, and each car's trail in the channel of its speed."""
        row = self._cells[1 : LANES + 1].expand_as(state.x)
        every = torch.ones_like(state.x, dtype=torch.bool)
        behind, pace = (state.x - state.speed.sign()) % SIZE, state.speed.abs()
        chicken = self.paint_cell(state.pos, torch.full_like(state.pos, CHICKEN_X))
        trails = [paint(row, behind, pace == speed) for speed in range(1, 6)]
        return self.frame(chicken, paint(row, state.x, every), *trails)


def draw_speeds(key: Tensor) -> Tensor:
    """Draw the speeds of the cars, 1 to 5, to the right or the left, from keys [B] int64.  [B, 8] int64."""
    to_right = uniform(key, (LANES,), LANES) >= 0.5
    return (1 + randint(key, 5, (LANES,), stream=0)) * torch.where(to_right, 1, -1)
