"""MinAtar's Asterix on any device; see `rlstruct.sims.minatar_game`.

Enemies and treasure come from the sides, at most one in each of eight rows. Treasure gives a point, an enemy ends the
game. They come faster over time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlstruct.functional.random import uniform
from rlstruct.sims.minatar_game import (
    DOWN,
    LEFT,
    NOTHING,
    RIGHT,
    SIZE,
    UP,
    MinAtarGame,
    move_player,
    paint,
    ramp_difficulty,
    sign,
    state_field,
)

ROWS = 8
RAMP_INTERVAL, SPAWN_SPEED, MOVE_INTERVAL = 100, 10, 5


@dataclass(frozen=True)
class AsterixState:
    """Positions of the player and of the things: thing i is in row i + 1."""

    player_x: Tensor = state_field(5)
    player_y: Tensor = state_field(5)
    there: Tensor = state_field(False, ROWS)  # which things exist
    x: Tensor = state_field(0, ROWS)  # their columns
    to_right: Tensor = state_field(False, ROWS)  # their directions
    gold: Tensor = state_field(False, ROWS)  # treasure, or an enemy
    spawn_speed: Tensor = state_field(SPAWN_SPEED)  # steps between two new things
    spawn_timer: Tensor = state_field(SPAWN_SPEED)  # steps until the next
    move_speed: Tensor = state_field(MOVE_INTERVAL)  # steps between two moves of the things
    move_timer: Tensor = state_field(MOVE_INTERVAL)  # steps until the next
    ramp_timer: Tensor = state_field(RAMP_INTERVAL)  # steps until it gets harder
    ramp_index: Tensor = state_field(0)  # how often it got harder
    last_action: Tensor = state_field(0)  # of all six


class Asterix(MinAtarGame[AsterixState]):
    """MinAtar's Asterix: nothing (0), left (1), up (2), right (3), down (4). Arguments as `MinAtarGame`."""

    state = AsterixState
    channels = ("player", "enemy", "trail", "gold")
    useful_actions = (NOTHING, LEFT, UP, RIGHT, DOWN)

    def play(self, state: AsterixState, action: Tensor, key: Tensor) -> tuple[AsterixState, Tensor, Tensor]:
        """Spawn a thing, move the player, then the things, then count down the timers."""
        spawns = state.spawn_timer == 0
        there, x, to_right, gold = self._spawn(state, spawns, uniform(key, (3,), stream=0))
        spawn_timer = torch.where(spawns, state.spawn_speed, state.spawn_timer)

        player_x = move_player(state.player_x, action)
        player_y = move_player(state.player_y, action, UP, DOWN, 1, ROWS)
        here = (self._cells[1 : ROWS + 1] == player_y.unsqueeze(1)) & there  # the thing in the player's row  [B, 8]

        met = here & (x == player_x.unsqueeze(1))
        reward = (met & gold).sum(1)
        lost = (met & ~gold).any(1)
        there = there & ~(met & gold)

        moves = (state.move_timer == 0).unsqueeze(1)
        x = torch.where(moves & there, x + sign(to_right), x)
        there = there & (x >= 0) & (x < SIZE)
        met = here & there & moves & (x == player_x.unsqueeze(1))
        reward = reward + (met & gold).sum(1)
        lost = lost | (met & ~gold).any(1)
        there = there & ~(met & gold)

        moved = replace(
            state,
            player_x=player_x,
            player_y=player_y,
            there=there,
            x=x,
            to_right=to_right,
            gold=gold,
            spawn_timer=spawn_timer - 1,
            move_timer=torch.where(moves.squeeze(1), state.move_speed, state.move_timer) - 1,
            last_action=action,
        )
        return self._ramp(moved), reward.to(torch.float32), lost

    def _spawn(self, state: AsterixState, spawns: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Put a new thing at the edge of an empty row; direction, kind and row are drawn, [B, 3]."""
        from_left, is_gold = drawn[:, :1] < 1 / 2, drawn[:, 1:2] < 1 / 3
        empty = ~state.there
        number = empty.cumsum(1) - 1  # which of the empty rows
        chosen = (drawn[:, 2:] * empty.sum(1, keepdim=True)).to(torch.int64)
        new = empty & (number == chosen) & spawns.unsqueeze(1)
        edge = torch.where(from_left, 0, SIZE - 1)
        return (
            state.there | new,
            torch.where(new, edge, state.x),
            torch.where(new, from_left, state.to_right),
            torch.where(new, is_gold, state.gold),
        )

    def _ramp(self, state: AsterixState) -> AsterixState:
        """Make games harder each time the ramp timer runs out."""
        ramps = ((state.spawn_speed > 1) | (state.move_speed > 1)) & self.ramping
        counts = ramps & (state.ramp_timer >= 0)
        now = ramps & ~counts
        timer = torch.where(now, RAMP_INTERVAL, state.ramp_timer - counts.to(torch.int64))
        return replace(state, ramp_timer=timer, **ramp_difficulty(state, now, 1))

    def observe(self, state: AsterixState) -> Tensor:
        """Paint the player, the enemies, the trails of all things, and the treasure."""
        row = self._cells[1 : ROWS + 1].expand_as(state.x)
        trail = paint(row, state.x - sign(state.to_right), state.there)
        enemy, gold = (paint(row, state.x, state.there & chosen) for chosen in (~state.gold, state.gold))
        return self.frame(self.paint_cell(state.player_y, state.player_x), enemy, trail, gold)
