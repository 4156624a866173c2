"""MinAtar's SpaceInvaders on any device; see `rlstruct.sims.minatar_game`.

A cannon shoots at aliens, a point each, that march sideways and, at the edge, one row down. The nearest alien shoots
back. The fewer are left, the faster they march; every wave starts faster than the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlstruct.sims.minatar_game import FIRE, LEFT, NOTHING, RIGHT, SIZE, MinAtarGame, move_player, state_field

SHOT_COOL_DOWN, MOVE_INTERVAL, SHOT_INTERVAL = 5, 12, 10


@dataclass(frozen=True)
class SpaceInvadersState:
    """Positions of cannon, aliens and bullets."""

    pos: Tensor = state_field(5)  # column of the cannon
    bullets: Tensor = state_field(False, SIZE, SIZE)  # the player's
    alien_bullets: Tensor = state_field(False, SIZE, SIZE)
    aliens: Tensor = state_field(False, SIZE, SIZE)
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

    def initial(self, key: Tensor) -> SpaceInvadersState:
        """Put the cannon in the middle below a full wave."""
        begun = super().initial(key)
        return replace(begun, aliens=begun.aliens | _wave(begun.aliens))

    def play(self, state: SpaceInvadersState, action: Tensor, key: Tensor) -> tuple[SpaceInvadersState, Tensor, Tensor]:
        """Shoot or walk, move the bullets and the aliens, let one alien shoot, and count the hits."""
        fires = (action == FIRE) & (state.shot_timer == 0)
        pos = move_player(state.pos, action)
        muzzle = self.paint_cell(SIZE - 1, pos).view(-1, SIZE, SIZE)  # where the cannon is
        bullets = _shift_rows(state.bullets | (muzzle & _cube(fires)), up=True)
        alien_bullets = _shift_rows(state.alien_bullets, up=False)
        lost = ((alien_bullets | state.aliens) & muzzle).flatten(1).any(1)

        moves = state.move_timer == 0
        aliens, alien_dir, landed = _march(state.aliens, state.alien_dir, moves)
        lost = lost | landed | (moves & (aliens & muzzle).flatten(1).any(1))
        count = state.aliens.flatten(1).sum(1)
        move_timer = torch.where(moves, torch.minimum(count, state.move_interval), state.move_timer)

        shoots = state.alien_shot_timer == 0
        alien_bullets = alien_bullets | (self._nearest(aliens, pos) & _cube(shoots))
        alien_shot_timer = torch.where(shoots, SHOT_INTERVAL, state.alien_shot_timer)

        killed = aliens & bullets
        aliens, bullets = aliens & ~killed, bullets & ~killed
        cleared = ~aliens.flatten(1).any(1)
        aliens = aliens | (_wave(aliens) & _cube(cleared))
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
        return moved, killed.flatten(1).sum(1).to(torch.float32), lost

    def observe(self, state: SpaceInvadersState) -> Tensor:
        """Paint the cannon, the aliens, the aliens by direction, and the bullets of both sides."""
        cannon = self.paint_cell(SIZE - 1, state.pos)
        left = _cube(state.alien_dir < 0)
        return self.frame(
            cannon, state.aliens, state.aliens & left, state.aliens & ~left, state.bullets, state.alien_bullets
        )

    def _nearest(self, aliens: Tensor, pos: Tensor) -> Tensor:
        """Find the lowest alien of the column nearest to the cannon; of two, the left one.  [B, 10, 10] bool."""
        column = self._cells[:SIZE]
        order = (column - pos.unsqueeze(1)).abs() * SIZE + column  # [B, 10]
        order = torch.where(aliens.any(1), order, SIZE * SIZE * 2)
        chosen = (order == order.min(1, keepdim=True).values).unsqueeze(1)  # [B, 1, 10]
        below = aliens.flip(1).cumsum(1).flip(1)  # how many aliens from here on downward
        return aliens & (below == 1) & chosen


def _march(aliens: Tensor, direction: Tensor, moves: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move the wave sideways; at the edge, move it down and reverse it. Also return where it has landed."""
    at_edge = (aliens[:, :, 0].any(1) & (direction < 0)) | (aliens[:, :, SIZE - 1].any(1) & (direction > 0))
    turns = moves & at_edge
    aside = torch.where(_cube(direction < 0), aliens.roll(-1, 2), aliens.roll(1, 2))
    marched = torch.where(_cube(at_edge), aliens.roll(1, 1), aside)
    landed = turns & aliens[:, SIZE - 1].any(1)
    return torch.where(_cube(moves), marched, aliens), torch.where(turns, -direction, direction), landed


def _shift_rows(board: Tensor, up: bool) -> Tensor:
    """Shift a board by one row up or down; cells shifted out are dropped.  [B, 10, 10]."""
    none = torch.zeros_like(board[:, :1])
    return torch.cat([board[:, 1:], none], 1) if up else torch.cat([none, board[:, :-1]], 1)


def _cube(row: Tensor) -> Tensor:
    return row.view(-1, 1, 1)


def _wave(like: Tensor) -> Tensor:
    """Return the positions of a new wave, [10, 10] bool."""
    cell = torch.arange(SIZE, device=like.device)
    return (cell < 4).unsqueeze(1) & ((cell >= 2) & (cell < 8))
