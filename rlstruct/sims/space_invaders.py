"""MinAtar's SpaceInvaders on any device; see `rlstruct.sims.minatar_game`.

A cannon shoots at aliens, a point each, that march sideways and, at the edge, one row down. The nearest alien shoots
back. The fewer are left, the faster they march; every wave starts faster than the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstruct.sims.minatar_game import FIRE, LEFT, NOTHING, RIGHT, SIZE, MinAtarGame, move_player, state_field

SHOT_COOL_DOWN, MOVE_INTERVAL, SHOT_INTERVAL = 5, 12, 10
WAVE, WAVE_ROWS = 0b0011111100, 4
"""Columns of a new wave, and how many rows it has."""


@dataclass(frozen=True)
class SpaceInvadersState:
    """Positions of cannon, aliens and bullets. In a board, bit c of row r is the cell in column c."""

    pos: Tensor = state_field(5)  # column of the cannon
    bullets: Tensor = state_field(0, SIZE)  # the player's
    alien_bullets: Tensor = state_field(0, SIZE)
    aliens: Tensor = state_field(0, SIZE)
    alien_dir: Tensor = state_field(-1)  # -1 for left, 1 for right
    move_interval: Tensor = state_field(MOVE_INTERVAL)  # steps between two moves of a full wave, at most
    move_timer: Tensor = state_field(MOVE_INTERVAL)  # steps until they move
    alien_shot_timer: Tensor = state_field(SHOT_INTERVAL)  # steps until they shoot
    shot_timer: Tensor = state_field(0)  # steps until the player can shoot
    last_action: Tensor = state_field(0)  # of all six


class SpaceInvaders(MinAtarGame[SpaceInvadersState]):
    """MinAtar's SpaceInvaders: nothing (0), left (1), right (2), fire (3). Arguments as `MinAtarGame`."""

    state = SpaceInvadersState
    channels = ("cannon", "alien", "alien_left", "alien_right", "friendly_bullet", "enemy_bullet")
    useful_actions = (NOTHING, LEFT, RIGHT, FIRE)

    def __init__(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*args, **settings)
        self._digits = self._cells[:SIZE]  # 0 to 9: numbers of columns or rows
        self._column_bits = (1 << self._digits).to(torch.int16).unsqueeze(1)
        self._wave = torch.where(self._digits < WAVE_ROWS, WAVE, 0)  # rows of a new wave

    def initial(self, key: Tensor) -> SpaceInvadersState:
        """Put the cannon in the middle below a full wave."""
        begun = super().initial(key)
        return replace(begun, aliens=begun.aliens | self._wave)

    def play(self, state: SpaceInvadersState, action: Tensor, key: Tensor) -> tuple[SpaceInvadersState, Tensor, Tensor]:
        """Shoot or walk, move the bullets and the aliens, let one alien shoot, and count the hits."""
        fires = (action == FIRE) & (state.shot_timer == 0)
        pos = move_player(state.pos, action)
        cannon = 1 << pos
        shot, none = torch.where(fires, cannon, 0), torch.zeros_like(state.bullets[:, :1])
        bullets = torch.cat([state.bullets[:, 1:-1], (state.bullets[:, -1] | shot).unsqueeze(1), none], 1)
        alien_bullets = torch.cat([none, state.alien_bullets[:, :-1]], 1)
        lost = ((alien_bullets[:, -1] | state.aliens[:, -1]) & cannon) != 0

        moves = state.move_timer == 0
        aliens, alien_dir, landed = _march(state.aliens, state.alien_dir, moves)
        lost = lost | landed | (moves & ((aliens[:, -1] & cannon) != 0))

        shoots = state.alien_shot_timer == 0
        alien_bullets = alien_bullets | torch.where(shoots.unsqueeze(1), self._nearest(aliens, pos), 0)
        alien_shot_timer = torch.where(shoots, SHOT_INTERVAL, state.alien_shot_timer)

        killed = aliens & bullets
        n_aliens, n_killed = _count(torch.stack([state.aliens, killed])).unbind()
        aliens, bullets = aliens ^ killed, bullets ^ killed
        move_timer = torch.where(moves, torch.minimum(n_aliens, state.move_interval), state.move_timer)
        cleared = (aliens == 0).all(1)
        aliens = torch.where(cleared.unsqueeze(1), self._wave, aliens)
        faster = cleared & (state.move_interval > 6) & self.ramping
        moved = SpaceInvadersState(
            pos=pos,
            bullets=bullets,
            alien_bullets=alien_bullets,
            aliens=aliens,
            alien_dir=alien_dir,
            move_interval=state.move_interval - faster.to(torch.int64),
            move_timer=move_timer - 1,
            alien_shot_timer=alien_shot_timer - 1,
            shot_timer=(torch.where(fires, SHOT_COOL_DOWN, state.shot_timer) - 1).clamp_min(0),
            last_action=action,
        )
        return moved, n_killed.to(torch.float32), lost

    def observe(self, state: SpaceInvadersState) -> Tensor:
        """Paint the cannon, the aliens, the aliens by direction, and the bullets of both sides."""
        left = (state.alien_dir < 0).unsqueeze(1)
        bottom = torch.where(self._digits == SIZE - 1, (1 << state.pos).unsqueeze(1), 0)
        to_left, to_right = torch.where(left, state.aliens, 0), torch.where(left, 0, state.aliens)
        boards = [bottom, state.aliens, to_left, to_right, state.bullets, state.alien_bullets]
        rows = torch.stack(boards, 2).to(torch.int16)  # [B, 10, channels]
        return (rows.unsqueeze(2) & self._column_bits) != 0

    def _nearest(self, aliens: Tensor, pos: Tensor) -> Tensor:
        """Find the lowest alien of the column nearest to the cannon; of two, the left one.  [B, 10] rows of bits."""
        column = self._digits
        there = ((aliens.unsqueeze(2) >> column) & 1).any(1)
        order = (column - pos.unsqueeze(1)).abs() * SIZE + column  # [B, 10]
        order = torch.where(there, order, SIZE * SIZE * 2)
        nearest = order.amin(1, keepdim=True) % SIZE
        hit = (aliens >> nearest) & 1
        lowest = (hit * (column + 1)).amax(1, keepdim=True)
        return torch.where(column + 1 == lowest, hit << nearest, 0)


def _march(aliens: Tensor, direction: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the wave sideways; at the edge, move it down and reverse it. Also return where it has landed."""
    left = direction < 0
    edge = torch.where(left, 1, 1 << (SIZE - 1)).unsqueeze(1)
    at_edge = ((aliens & edge) != 0).any(1)
    turns = moves & at_edge
    aside = torch.where(left.unsqueeze(1), aliens >> 1, aliens << 1)
    marched = torch.where(at_edge.unsqueeze(1), aliens.roll(1, 1), aside)
    landed = turns & (aliens[:, -1] != 0)
    return torch.where(moves.unsqueeze(1), marched, aliens), torch.where(turns, -direction, direction), landed


def _count(board: Tensor) -> Tensor:
    """Count the bits of boards [..., 10], whose rows have ten.  [...] int64."""
    pairs = board - ((board >> 1) & 0b0101010101)
    fours = (pairs & 0b1100110011) + ((pairs >> 2) & 0b1100110011)
    return ((fours & 15) + ((fours >> 4) & 15) + (fours >> 8)).sum(-1)
