"""MinAtar's Seaquest on any device; see `rlstruct.sims.minatar_game`.

A submarine shoots fish and enemy submarines, a point each, picks up divers, and must surface for oxygen with at least
one diver on board; with six, the remaining oxygen is paid out. The game gets harder each time the submarine surfaces.

The package keeps lists that grow and shrink; here each list is a row of slots, in a step one tensor for each column.
Where the order of a list matters (which of two things in one cell is hit), ``born`` gives it: a number that counts up,
0 in an empty slot. Enemy bullets are one board for each direction, since neither their order nor their number in a cell
matters.

Reductions over a list are of float32: TorchInductor reduces vectors of integers number by number, five times slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlstruct.functional.random import uniform
from rlstruct.sims.minatar_game import (
    CELLS,
    DOWN,
    FIRE,
    LEFT,
    RIGHT,
    SIZE,
    UP,
    MinAtarGame,
    move_player,
    ramp_difficulty,
    sign,
    state_field,
)

# Never more at a time: an enemy crosses in 30 steps when one comes each step; a diver in 60, one each 30; a bullet in
# 9, one each 5.
ENEMIES, DIVERS, BULLETS = 32, 4, 3
LAST = 1 << 20  # greater than twice the age of anything, counted in births, and exact as float32
MAX_OXYGEN, MAX_DIVERS = 200, 6
PIXELS = 10 * CELLS  # of a frame: ten channels
WIDE = SIZE + 2  # a board with a column on either side
SPAWN_SPEED, DIVER_SPAWN_SPEED = 20, 30
MOVE_INTERVAL, DIVER_MOVE_INTERVAL, SHOT_COOL_DOWN, ENEMY_SHOT_INTERVAL = 5, 5, 5, 10


Columns = tuple[Tensor, ...]
"""A list of things in a step: its columns in the order that `SeaquestState` names, each [B, N] int32."""


@dataclass(frozen=True)
class SeaquestState:
    """Positions of all things in the game: columns of numbers, with a slot empty where nothing was born."""

    x: Tensor = state_field(5)  # the submarine
    y: Tensor = state_field(0)
    to_right: Tensor = state_field(False)  # its direction
    oxygen: Tensor = state_field(MAX_OXYGEN)  # steps until it runs out
    diver_count: Tensor = state_field(0)  # divers on board
    at_surface: Tensor = state_field(True)  # whether it has surfaced already
    shot_timer: Tensor = state_field(0)  # steps until it can shoot
    spawn_speed: Tensor = state_field(SPAWN_SPEED)  # steps between two enemies
    spawn_timer: Tensor = state_field(SPAWN_SPEED)  # steps until the next
    diver_timer: Tensor = state_field(DIVER_SPAWN_SPEED)  # steps until the next diver
    move_speed: Tensor = state_field(MOVE_INTERVAL)  # steps between two moves of an enemy
    ramp_index: Tensor = state_field(0)  # how often it got harder
    births: Tensor = state_field(0)  # how many things were born
    bullets: Tensor = state_field(0, 4, BULLETS)  # the player's: born, x, y, to_right
    divers: Tensor = state_field(0, 5, DIVERS)  # born, x, y, to_right, move timer
    enemies: Tensor = state_field(0, 7, ENEMIES)  # born, x, y, to_right, move timer, is a submarine, shot timer
    enemy_bullets: Tensor = state_field(False, 2, SIZE, SIZE)  # those to the left, those to the right
    last_action: Tensor = state_field(0)  # of all six


class Seaquest(MinAtarGame[SeaquestState]):
    """MinAtar's Seaquest: nothing (0), left (1), up (2), right (3), down (4), fire (5). Arguments as `MinAtarGame`."""

    state = SeaquestState
    channels = (
        *("sub_front", "sub_back", "friendly_bullet", "trail", "enemy_bullet", "enemy_fish", "enemy_sub"),
        *("oxygen_guage", "diver_guage", "diver"),
    )
    useful_actions = tuple(range(6))

    def play(self, state: SeaquestState, action: Tensor, key: Tensor) -> tuple[SeaquestState, Tensor, Tensor]:
        """Spawn things, move the submarine, then its bullets, divers, enemies and their bullets; then surface."""
        lists = (state.bullets, state.divers, state.enemies)
        bullets, divers, enemies = (slots.to(torch.int32).unbind(1) for slots in lists)
        state, enemies, divers = self._spawn(state, enemies, divers, uniform(key, (5,), stream=0))
        state, bullets = self._steer(state, bullets, action)
        bullets, enemies, hits = _shoot(state.births, bullets, enemies)
        state, divers = _rescue(state, divers)
        enemies_before = enemies
        bullets, enemies, more_hits, rammed = _move_enemies(state, bullets, enemies, subs=True)
        state, enemies, shot = _move_enemy_bullets(state, enemies, enemies_before)
        bullets, enemies, last_hits, bitten = _move_enemies(state, bullets, enemies, subs=False)
        state = replace(
            state,
            spawn_timer=(state.spawn_timer - 1).clamp_min(0),
            diver_timer=(state.diver_timer - 1).clamp_min(0),
            shot_timer=(state.shot_timer - 1).clamp_min(0),
            bullets=torch.stack(bullets, 1).to(torch.int64),
            divers=torch.stack(divers, 1).to(torch.int64),
            enemies=torch.stack(enemies, 1).to(torch.int64),
        )
        state, paid, drowned = self._breathe(state)
        reward = hits + more_hits + last_hits + paid
        return state, reward.to(torch.float32), rammed | shot | bitten | drowned

    def _spawn(
        self, state: SeaquestState, enemies: Columns, divers: Columns, drawn: Tensor
    ) -> tuple[SeaquestState, Columns, Columns]:
        """Spawn an enemy and a diver at the sides, from random numbers [B, 5]."""

        def at_the_side(side: Tensor, row: Tensor) -> list[Tensor]:  # born, x, y, to_right
            to_right = (side < 1 / 2).to(torch.int64)
            return [state.births + 1, (1 - to_right) * (SIZE - 1), 1 + (row * 8).to(torch.int64), to_right]

        enters, dives = state.spawn_timer == 0, state.diver_timer == 0
        is_sub = (drawn[:, 1] < 1 / 3).to(torch.int64)
        enemy, diver = at_the_side(drawn[:, 0], drawn[:, 2]), at_the_side(drawn[:, 3], drawn[:, 4])
        born, _, y, facing = enemies[:4]
        opposed = _any((born > 0) & (y == enemy[2].unsqueeze(1)) & (facing != enemy[3].unsqueeze(1)))
        enemy += [state.move_speed, is_sub, torch.full_like(is_sub, ENEMY_SHOT_INTERVAL)]
        diver += [torch.full_like(is_sub, DIVER_MOVE_INTERVAL)]
        state = replace(
            state,
            spawn_timer=torch.where(enters, state.spawn_speed, state.spawn_timer),
            diver_timer=torch.where(dives, DIVER_SPAWN_SPEED, state.diver_timer),
            births=state.births + 1,
        )
        return state, _append(enemies, enemy, enters & ~opposed), _append(divers, diver, dives)

    def _steer(self, state: SeaquestState, bullets: Columns, action: Tensor) -> tuple[SeaquestState, Columns]:
        """Fire, or move by one cell."""
        fires = (action == FIRE) & (state.shot_timer == 0)
        bullet = [state.births, state.x, state.y, state.to_right.to(torch.int64)]
        moved = replace(
            state,
            shot_timer=torch.where(fires, SHOT_COOL_DOWN, state.shot_timer),
            x=move_player(state.x, action),
            y=move_player(state.y, action, UP, DOWN, 0, 8),
            to_right=(state.to_right & (action != LEFT)) | (action == RIGHT),
            last_action=action,
        )
        return moved, _append(bullets, bullet, fires)

    def _breathe(self, state: SeaquestState) -> tuple[SeaquestState, Tensor, Tensor]:
        """Use oxygen, or surface for more. Return the new state, the reward, and the end of the game."""
        below = state.y > 0
        arrives = ~below & ~state.at_surface
        empty = arrives & (state.diver_count == 0)
        surfaces = arrives & ~empty
        full = surfaces & (state.diver_count == MAX_DIVERS)
        paid = torch.where(full, state.oxygen * 10 // MAX_OXYGEN, 0)
        ramps = surfaces & ((state.spawn_speed > 1) | (state.move_speed > 2)) & self.ramping
        done = (state.oxygen <= 0) | empty
        # With six divers all leave and then one more, so -1 are left, as in the package.
        count = torch.where(full, 0, state.diver_count) - surfaces.to(torch.int64)
        state = replace(
            state,
            oxygen=torch.where(surfaces, MAX_OXYGEN, state.oxygen - below.to(torch.int64)),
            diver_count=count,
            at_surface=~below & (state.at_surface | surfaces),
            **ramp_difficulty(state, ramps, 2),
        )
        return state, paid, done

    def observe(self, state: SeaquestState) -> Tensor:
        """Paint the ten channels, one thing after the other: most cells of a frame are empty."""
        column, bottom = self._cells[:SIZE], self._cells[-SIZE:] * 10
        gauge = (state.oxygen.clamp_min(0) * 10 // MAX_OXYGEN).unsqueeze(1)
        on_board = (9 - state.diver_count).unsqueeze(1)
        born, x, y, facing, _, is_sub, _ = state.enemies.unbind(1)
        swims, at, depth, heading, _ = state.divers.unbind(1)
        flies, ahead, height, _ = state.bullets.unbind(1)
        enemy, diver, bullet = born > 0, swims > 0, flies > 0
        player, row = state.x.unsqueeze(1), state.y.unsqueeze(1)
        pixels = [
            _pixels(0, row, player, True),
            _pixels(1, row, player - sign(state.to_right).unsqueeze(1), True),
            _pixels(2, height, ahead, bullet),
            _pixels(3, y, x - sign(facing == 1), enemy),
            _pixels(3, depth, at - sign(heading == 1), diver),
            torch.where(state.enemy_bullets.any(1).flatten(1), self._cells * 10 + 4, PIXELS),
            _pixels(5 + is_sub, y, x, enemy),
            torch.where(column < gauge, bottom + 7, PIXELS),
            torch.where((column >= on_board) & (column < 9), bottom + 8, PIXELS),
            _pixels(9, depth, at, diver),
        ]
        frame = torch.zeros(len(born), PIXELS + 1, dtype=torch.bool, device=born.device)
        return frame.scatter(1, torch.cat(pixels, dim=1), True)[:, :PIXELS].view(-1, SIZE, SIZE, len(self.channels))


def _pixels(channel: Tensor | int, row: Tensor, column: Tensor, on: Tensor | bool) -> Tensor:
    """Number the pixels of those things that are ``on`` and inside the board; the others get the one after the last."""
    shown = on & (column >= 0) & (column < SIZE)
    return torch.where(shown, (row * SIZE + column) * 10 + channel, PIXELS)


def _any(mask: Tensor) -> Tensor:
    """Return True for the games in which ``mask`` [B, N] is True anywhere.  [B] bool."""
    return mask.to(torch.float32).amax(1) > 0


def _append(slots: Columns, new: list[Tensor], when: Tensor) -> Columns:
    """Put a new thing, its columns [B], into the first empty slot in games where ``when`` [B]."""
    n = slots[0].shape[1]
    number = torch.arange(n, dtype=torch.float32, device=when.device)
    first = torch.where(slots[0] == 0, number, n).amin(1)
    here = number == torch.where(when, first, n).unsqueeze(1)  # [B, N]
    values = (value.to(torch.int32).unsqueeze(1) for value in new)
    return tuple(torch.where(here, value, column) for column, value in zip(slots, values, strict=True))


def _move(slots: Columns, moves: Tensor) -> Columns:
    """Move things by one cell where ``moves`` [B, N], and remove those that leave the board."""
    born, x, y, facing, *rest = slots
    x = torch.where(moves & (born > 0), x + 2 * facing - 1, x)
    return (torch.where((x >= 0) & (x < SIZE), born, 0), x, y, facing, *rest)


def _remove(slots: Columns, gone: Tensor) -> Columns:
    return (slots[0].masked_fill(gone, 0), *slots[1:])


def _cell(slots: Columns, nowhere: int) -> Tensor:
    """Return the number of each thing's cell, ``nowhere`` for empty slots.  [B, N] int32."""
    return torch.where(slots[0] > 0, slots[2] * SIZE + slots[1], nowhere)


def _age(births: Tensor, slots: Columns) -> Tensor:
    """Return how many things were born after each of these.  [B, N] float32."""
    return (births.to(torch.int32).unsqueeze(1) - slots[0]).to(torch.float32)


def _hit(bullets: Columns, cell: Tensor, order: Tensor, oldest_first: bool) -> tuple[Columns, Tensor, Tensor]:
    """Let each bullet destroy one thing in its cell. Where there are more bullets than things, the last ones remain.

    Args:
        bullets: those of the player.
        cell: where the things are, -1 for those that cannot be hit.  [B, N] int32
        order: things of lower order are destroyed first.  [B, N] float32, below `LAST`
        oldest_first: whether old bullets come first, or young ones.

    Returns:
        The bullets that remain, True for the things that are destroyed, [B, N], and their number, [B].
    """
    born, at = bullets[0], _cell(bullets, -2)  # [B, BULLETS]
    left, hits = cell, []
    for one in at.unbind(1):
        rank = torch.where(left == one.unsqueeze(1), order, LAST)
        first = rank.amin(1)
        hits.append(first < LAST)
        left = torch.where(rank == first.clamp_max(LAST - 1).unsqueeze(1), -1, left)
    hit = torch.stack(hits, 1)  # [B, BULLETS]
    before = born.unsqueeze(1) < born.unsqueeze(2) if oldest_first else born.unsqueeze(1) > born.unsqueeze(2)
    shared = at.unsqueeze(1) == at.unsqueeze(2)
    used = (shared & before).sum(2) < (shared & hit.unsqueeze(1)).sum(2)
    return _remove(bullets, used), left != cell, hit.sum(1)


def _shoot(births: Tensor, bullets: Columns, enemies: Columns) -> tuple[Columns, Columns, Tensor]:
    """Move the player's bullets; each hits the oldest fish in its cell, or else the oldest submarine.

    Returns:
        The bullets and the enemies that remain, and how many enemies were hit, [B].
    """
    bullets = _move(bullets, torch.ones_like(bullets[0], dtype=torch.bool))
    fish_first = _age(births, enemies) * -1 + enemies[5] * (LAST / 2)
    bullets, dead, hits = _hit(bullets, _cell(enemies, -1), fish_first, oldest_first=False)
    return bullets, _remove(enemies, dead), hits


def _rescue(state: SeaquestState, divers: Columns) -> tuple[SeaquestState, Columns]:
    """Move divers, and pick up those that meet the submarine, the youngest first, while there is room."""
    born, x, y, _facing, timer = divers
    moves = timer == 0
    moved = _move(divers, moves)
    column, row = state.x.unsqueeze(1), state.y.unsqueeze(1)
    meets = (born > 0) & (y == row) & ((x == column) | (moved[1] == column))
    before = ((born.unsqueeze(1) > born.unsqueeze(2)) & meets.unsqueeze(1)).sum(2)  # [B, DIVERS]
    taken = meets & (state.diver_count.unsqueeze(1) + before < MAX_DIVERS)
    timer = torch.where(moves, DIVER_MOVE_INTERVAL, timer - 1)
    state = replace(state, diver_count=state.diver_count + taken.sum(1))
    return state, _remove((*moved[:4], timer), taken)


def _move_enemies(
    state: SeaquestState, bullets: Columns, enemies: Columns, subs: bool
) -> tuple[Columns, Columns, Tensor, Tensor]:
    """Move the fish, or the submarines; bullets destroy those that move into them, the youngest first.

    Returns:
        The bullets and the enemies that remain, how many were hit, [B], and whether one met the player, [B] bool.
    """
    born, x, y, _facing, timer, is_sub, shot_timer = enemies
    ours = (born > 0) & ((is_sub == 1) == subs)
    column, row = state.x.unsqueeze(1), state.y.unsqueeze(1)
    moves = ours & (timer == 0)
    moved = _move(enemies, moves)
    meets = ours & (y == row) & ((x == column) | (moved[1] == column))
    # An enemy that has moved onto the player is not checked against bullets.
    exposed = moves & ~((y == row) & (moved[1] == column))
    cell = torch.where(exposed, _cell(moved, -1), -1)
    bullets, dead, hits = _hit(bullets, cell, _age(state.births, moved), oldest_first=True)
    timer = torch.where(moves, state.move_speed.to(torch.int32).unsqueeze(1), timer - ours.to(torch.int32))
    left = _remove((*moved[:4], timer, is_sub, shot_timer), dead)
    return bullets, left, hits, _any(meets)


def _move_enemy_bullets(
    state: SeaquestState, enemies: Columns, before: Columns
) -> tuple[SeaquestState, Columns, Tensor]:
    """Let submarines shoot, including those hit in this step, then move all enemy bullets.

    Args:
        state: after the submarines have moved.
        enemies: likewise.
        before: the enemies before they did.

    Returns:
        The new state, the enemies, and whether the player was hit.  [B] bool
    """
    subs = (before[0] > 0) & (before[5] == 1)
    shoots = subs & (before[6] == 0)
    _, x, y, facing = enemies[:4]
    # Both boards get an empty column on either side. Whatever does not shoot is painted into a cell that is never read.
    inside = shoots & (x >= 0) & (x < SIZE)
    cell = torch.where(inside, (facing * SIZE + y) * WIDE + x + 1, 0).to(torch.int64)
    boards = pad(state.enemy_bullets, (1, 1)).flatten(1).scatter(1, cell, True)
    left, right = boards.view(-1, 2, SIZE, WIDE).unbind(1)
    moved = torch.stack([left[:, :, 2:], right[:, :, :-2]], dim=1)
    here, other = state.y * WIDE + state.x + 1, SIZE * WIDE  # the player's cell on the first board, and on the second
    hit = boards.gather(1, torch.stack([here, here + 1, here + other, here + other - 1], dim=1))
    timer = torch.where(shoots, ENEMY_SHOT_INTERVAL, enemies[6] - subs.to(torch.int32))
    return replace(state, enemy_bullets=moved), (*enemies[:6], timer), hit.any(1)
