"""Shared parts of the five MinAtar games: sticky actions, action sets, painting of frames.

Young and Tian, "MinAtar: an Atari-inspired testbed for thorough and reproducible reinforcement learning experiments",
2019. The games equal version 1.0.15 of the package `minatar`, except that the first step of an episode may repeat the
action "nothing", not the last action of the previous episode.

Frames are [10, 10, channels] bool: row from the top, column, channel. The six actions are nothing, left, up, right,
down and fire, in this order; the minimal set keeps those that have an effect in the game.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.errors import MissingMethodError
from rlstruct.functional.random import uniform
from rlstruct.sims.tensor_env import TensorEnv

NOTHING, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
SIZE, CELLS = 10, 100

State = TypeVar("State")

STICKY_STREAM = 90  # of the step's key; the games draw from the streams below


def state_field(value: bool | int, *shape: int) -> Any:  # noqa: ANN401 - a field's type is Tensor
    """Declare a field of a state, [B, *shape] bool or int64, and its value at the start of a game."""
    return field(metadata={"value": value, "shape": shape})


class MinAtarGame(TensorEnv[State]):
    """Base class of games on ten by ten cells.

    Attributes:
        state: dataclass whose fields are declared by `state_field`, one of them ``last_action``.
        channels: names of the channels of a frame.
        useful_actions: the actions that have an effect.

    Args:
        n_envs: B.
        seed: environment j draws from ``seed + j``.
        sticky_probability: probability that the last action is repeated.
        ramping: the game gets harder over time.
        minimal_actions: offer only the useful actions, not all six.
        settings: keyword arguments of `TensorEnv`. Only Freeway has its own time limit.
    """

    state: ClassVar[type[Any]]
    channels: ClassVar[tuple[str, ...]]
    useful_actions: ClassVar[tuple[int, ...]]

    def __init__(
        self,
        n_envs: int,
        seed: int = 0,
        *,
        sticky_probability: float = 0.1,
        ramping: bool = True,
        minimal_actions: bool = True,
        **settings: Any,  # noqa: ANN401 - passed on
    ) -> None:
        self.actions = self.useful_actions if minimal_actions else tuple(range(6))
        self.action_space = spaces.Discrete(len(self.actions))
        self.observation_space = spaces.Box(0, 1, (SIZE, SIZE, len(self.channels)), np.bool_)
        self.sticky_probability = sticky_probability
        self.ramping = ramping
        super().__init__(n_envs, seed, **settings)
        self._table = torch.tensor(self.actions, dtype=torch.int64, device=self.device)
        self._cells = torch.arange(CELLS, dtype=torch.int64, device=self.device)

    def initial(self, key: Tensor) -> State:
        """Start every game with the values that the state's fields declare."""
        begun = {
            f.name: torch.full((*key.shape, *f.metadata["shape"]), f.metadata["value"], device=key.device)
            for f in fields(self.state)
        }
        state: State = self.state(**begun)
        return state

    def transition(self, state: State, action: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        """Play the chosen action or, with the sticky probability, the last one."""
        chosen = self._table.index_select(0, action)
        sticks = uniform(key, (), STICKY_STREAM) < self.sticky_probability
        last: Any = state
        return self.play(state, torch.where(sticks, last.last_action, chosen), key)

    def play(self, state: State, action: Tensor, key: Tensor) -> tuple[State, Tensor, Tensor]:
        """Take one step of the game. As `TensorEnv.transition`, but ``action`` [B] int64 is one of all six."""
        raise MissingMethodError(f"{type(self).__name__}.play")

    def frame(self, *channels: Tensor) -> Tensor:
        """Stack channels, each [B, 10, 10] or [B, 100] bool, into frames [B, 10, 10, channels]."""
        flat = [channel.flatten(1) for channel in channels]
        return torch.stack(flat, dim=2).view(-1, SIZE, SIZE, len(channels))

    def paint_cell(self, row: Tensor | int, column: Tensor) -> Tensor:
        """Paint one cell of each game, [B, 100] bool."""
        return (row * SIZE + column).unsqueeze(1) == self._cells


def paint(row: Tensor, column: Tensor, on: Tensor) -> Tensor:
    """Paint the cells of those of N things [B, N] that are ``on`` and inside the board.  [B, 100] bool."""
    shown = on & (column >= 0) & (column < SIZE)
    cell = torch.where(shown, row * SIZE + column, CELLS)  # the last cell is cut off below
    board = torch.zeros(row.shape[0], CELLS + 1, dtype=torch.bool, device=row.device)
    return board.scatter(1, cell, True)[:, :CELLS]


def sign(facing_right: Tensor) -> Tensor:
    """Return +1 where a thing faces right, else -1, int64."""
    return facing_right.to(torch.int64) * 2 - 1


def move_player(
    place: Tensor, action: Tensor, back: int = LEFT, ahead: int = RIGHT, least: int = 0, most: int = SIZE - 1
) -> Tensor:
    """Move a player by one cell for the actions ``back`` and ``ahead``, within ``least`` and ``most``."""
    return (place + (action == ahead).to(torch.int64) - (action == back).to(torch.int64)).clamp(least, most)


def ramp_difficulty(state: Any, when: Tensor, move_speed: int) -> dict[str, Tensor]:  # noqa: ANN401 - of two games
    """Return the changed fields of games that get harder (``when`` [B]): things appear, and sometimes move, faster.

    ``move_speed`` is the shortest interval between moves.
    """
    moves = when & (state.move_speed > move_speed) & (state.ramp_index % 2 == 1)
    return {
        "spawn_speed": state.spawn_speed - (when & (state.spawn_speed > 1)).to(torch.int64),
        "move_speed": state.move_speed - moves.to(torch.int64),
        "ramp_index": state.ramp_index + when.to(torch.int64),
    }
