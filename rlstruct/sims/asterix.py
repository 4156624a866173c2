"""MinAtar's Asterix on any device; see `rlstruct.sims._minatar`.

Enemies and treasure come from the sides, at most one in each of eight rows. Treasure gives a point, an enemy ends the
game. They come faster with time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlstruct.functional.random import uniform
from rlstruct.sims._minatar import DOWN, LEFT, NOTHING, RIGHT, SIZE, UP, MinAtarGame, paint, step_of, walk

ROWS = 8
RAMP_INTERVAL, SPAWN_SPEED, MOVE_INTERVAL = 100, 10, 5


@dataclass(frozen=True)
class AsterixState:
    """Where player and things are. All [B] int64 unless said; thing i is in row i + 1.

    Attributes:
        player_x: column of the player.
        player_y: row of the player.
        there: which things there are.  [B, 8] bool
        x: their columns.               [B, 8] int64
        to_right: where they go.        [B, 8] bool
        gold: treasure, or an enemy.    [B, 8] bool
        spawn_speed: steps between two new things.
        spawn_timer: steps until the next.
        move_speed: steps between two moves of the things.
        move_timer: steps until the next.
        ramp_timer: steps until it gets harder.
        ramp_index: how often it got harder.
        last_action: of all six.
    """

    player_x: Tensor
    player_y: Tensor
    there: Tensor
    x: Tensor
    to_right: Tensor
    gold: Tensor
    spawn_speed: Tensor
    spawn_timer: Tensor
    move_speed: Tensor
    move_timer: Tensor
    ramp_timer: Tensor
    ramp_index: Tensor
    last_action: Tensor


class Asterix(MinAtarGame[AsterixState]):
    """MinAtar's Asterix: nothing (0), left (1), up (2), right (3), down (4). Arguments as `MinAtarGame`."""

    channels = ("player", "enemy", "trail", "gold")
    useful_actions = (NOTHING, LEFT, UP, RIGHT, DOWN)

    def initial(self, key: Tensor) -> AsterixState:
        """Put the player in the middle of an empty board."""
        zero = torch.zeros_like(key)
        none = torch.zeros(*key.shape, ROWS, dtype=torch.int64, device=key.device)
        return AsterixState(
            player_x=zero + 5,
            player_y=zero + 5,
            there=none > 0,
            x=none,
            to_right=none > 0,
            gold=none > 0,
            spawn_speed=zero + SPAWN_SPEED,
            spawn_timer=zero + SPAWN_SPEED,
            move_speed=zero + MOVE_INTERVAL,
            move_timer=zero + MOVE_INTERVAL,
            ramp_timer=zero + RAMP_INTERVAL,
            ramp_index=zero,
            last_action=zero,
        )

    def play(self, state: AsterixState, action: Tensor, key: Tensor) -> tuple[AsterixState, Tensor, Tensor]:
        """Let a thing appear, move the player, then the things, then count the timers down."""
        spawns = state.spawn_timer == 0
        there, x, to_right, gold = self._spawn(state, spawns, uniform(key, (3,)))
        spawn_timer = torch.where(spawns, state.spawn_speed, state.spawn_timer)

        player_x = walk(state.player_x, action)
        player_y = state.player_y + (action == DOWN).to(torch.int64) - (action == UP).to(torch.int64)
        player_y = player_y.clamp(1, ROWS)
        here = (self._cells[1 : ROWS + 1] == player_y.unsqueeze(1)) & there  # the thing in the player's row  [B, 8]

        met = here & (x == player_x.unsqueeze(1))
        reward = (met & gold).sum(1)
        lost = (met & ~gold).any(1)
        there = there & ~(met & gold)

        moves = (state.move_timer == 0).unsqueeze(1)
        x = torch.where(moves & there, x + step_of(to_right), x)
        there = there & (x >= 0) & (x < SIZE)
        met = here & there & moves & (x == player_x.unsqueeze(1))
        reward = reward + (met & gold).sum(1)
        lost = lost | (met & ~gold).any(1)
        there = there & ~(met & gold)

        move_timer = torch.where(moves.squeeze(1), state.move_speed, state.move_timer) - 1
        ramp = self._ramp(state)
        moved = AsterixState(
            player_x,
            player_y,
            there,
            x,
            to_right,
            gold,
            ramp[0],
            spawn_timer - 1,
            ramp[1],
            move_timer,
            *ramp[2:],
            action,
        )
        return moved, reward.to(torch.float32), lost

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

    def _ramp(self, state: AsterixState) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Make it harder now and then: spawn speed, move speed, ramp timer, ramp index."""
        ramps = (state.spawn_speed > 1) | (state.move_speed > 1)
        if not self.ramping:
            ramps = torch.zeros_like(ramps)
        counts = ramps & (state.ramp_timer >= 0)
        harder = ramps & ~counts
        move_faster = harder & (state.move_speed > 1) & (state.ramp_index % 2 == 1)
        return (
            state.spawn_speed - (harder & (state.spawn_speed > 1)).to(torch.int64),
            state.move_speed - move_faster.to(torch.int64),
            torch.where(harder, RAMP_INTERVAL, state.ramp_timer - counts.to(torch.int64)),
            state.ramp_index + harder.to(torch.int64),
        )

    def observe(self, state: AsterixState) -> Tensor:
        """Paint player, enemies, where things were, treasure."""
        row = self._cells[1 : ROWS + 1].expand_as(state.x)
        trail = paint(row, state.x - step_of(state.to_right), state.there)
        enemy, gold = (paint(row, state.x, state.there & kind) for kind in (~state.gold, state.gold))
        return self.frame(self.dot(state.player_y, state.player_x), enemy, trail, gold)
