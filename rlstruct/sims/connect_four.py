"""Connect Four on any device, for self-play.

Stones are bits of one number per player, as in Tromp's and Pons's solvers: bit 7 c + h is column c, height h, and the
seventh bit of every column stays empty, so that no line runs from one column into the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.sims.tensor_env import TensorEnv

ROWS, COLUMNS = 6, 7
FULL = sum(((1 << ROWS) - 1) << (7 * c) for c in range(COLUMNS))


@dataclass(frozen=True)
class ConnectFourState:
    """Stones on the boards, [B] int64 with one bit each."""

    mine: Tensor  # of the player to move
    theirs: Tensor  # of the player who has just moved


class ConnectFour(TensorEnv[ConnectFourState]):
    """Two players drop stones into seven columns; four in a line win. Each step is one move; players alternate.

    The frame shows the game to the player who moves next: ``frame/board`` [2, 6, 7] bool, that player's stones and the
    opponent's, row 0 on top; ``frame/legal`` [7] bool, the columns that are not full. The reward goes to the player who
    has just moved: 1 for four in a line, -1 for dropping a stone into a full column, else 0. Either of them ends the
    game, and so does a full board.

    Args:
        n_envs: B.
        seed: ignored, since nothing is random.
        settings: keyword arguments of `TensorEnv`.
    """

    action_space = spaces.Discrete(COLUMNS)
    observation_space = spaces.Dict(
        board=spaces.Box(0, 1, (2, ROWS, COLUMNS), np.bool_), legal=spaces.Box(0, 1, (COLUMNS,), np.bool_)
    )
    stochastic: ClassVar[bool] = False

    def __init__(self, n_envs: int, seed: int = 0, **settings: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(n_envs, seed, **settings)
        columns = torch.arange(COLUMNS, dtype=torch.int64, device=self.device)
        height = torch.arange(ROWS - 1, -1, -1, dtype=torch.int64, device=self.device)
        self._bottom = torch.ones_like(columns) << 7 * columns
        self._places = self._bottom << height.unsqueeze(1)  # [6, 7], row 0 on top
        self._directions = torch.tensor([[1], [7], [6], [8]], device=self.device)  # up, sideways, and both diagonals

    def initial(self, key: Tensor) -> ConnectFourState:
        """Empty the board."""
        return ConnectFourState(torch.zeros_like(key), torch.zeros_like(key))

    def transition(
        self, state: ConnectFourState, action: Tensor, key: Tensor
    ) -> tuple[ConnectFourState, Tensor, Tensor]:
        """Drop a stone; then it is the other player's turn."""
        stones = state.mine | state.theirs
        empty = stones ^ FULL
        # Adding one at the bottom of a column carries up to its first empty bit.
        stone = (stones + self._bottom.index_select(0, action)) & empty
        illegal = stone == 0
        mine = state.mine | stone
        won = four_in_line(mine, self._directions) & ~illegal
        reward = won.to(torch.float32).masked_fill_(illegal, -1.0)
        return ConnectFourState(state.theirs, mine), reward, won | illegal | (stone == empty)

    def observe(self, state: ConnectFourState) -> dict[str, Tensor]:
        """Show both players' stones and the columns that are not full."""
        both = torch.stack([state.mine, state.theirs], dim=1).view(-1, 2, 1, 1)
        stones = (state.mine | state.theirs).unsqueeze(1)
        return {"board": (both & self._places) != 0, "legal": (stones & self._places[0]) == 0}

    def state_from(self, frames: dict[str, Tensor]) -> ConnectFourState:
        """Build the states that show ``board`` [B, 2, 6, 7] bool, for a tree search."""
        mine, theirs = (frames["board"] * self._places).sum((2, 3)).unbind(1)
        return ConnectFourState(mine, theirs)


def four_in_line(stones: Tensor, directions: Tensor) -> Tensor:
    """Return which players [B] have four stones in a line, for stones [B] int64, one bit each.

    ``directions`` [D, 1] int64 are the distances between neighbouring bits of a line.

    >>> four_in_line(torch.tensor([0b1111, 0b10111, 1 | 1 << 7 | 1 << 14 | 1 << 21]), torch.tensor([[1], [7]]))
    tensor([ True, False,  True])
    """
    pairs = stones & (stones >> directions)  # [D, B]
    return (pairs & (pairs >> 2 * directions)).any(0)
