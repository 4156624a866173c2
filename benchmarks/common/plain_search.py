"""The search that programs with many processes have: a tree of Python objects, one game, one inference at a time.

PUCT as in AlphaZero. It asks the network as often as `rlstruct.search`: for the root, and once in each simulation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rlstruct import DictTensor, RL_Agent, TemporalDictTensor
from rlstruct.device import DeviceLike, resolve_device

ROWS, COLUMNS = 6, 7
FULL = sum(((1 << ROWS) - 1) << (7 * c) for c in range(COLUMNS))
_BITS = [7 * c + h for h in reversed(range(ROWS)) for c in range(COLUMNS)]  # as the frames show them, row 0 on top


class SmallNet(nn.Module):
    """Two hidden layers of 128, for logits and value of a Connect Four board."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * ROWS * COLUMNS, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.heads = nn.Linear(128, COLUMNS + 1)

    def forward(self, board: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, 7] and value [B] of boards [B, 2, 6, 7]."""
        found = self.heads(self.body(board.flatten(1).float()))
        return found[:, :COLUMNS], found[:, COLUMNS].tanh()


class Node:
    """A position: whose turn it is has the stones ``mine``."""

    __slots__ = ("children", "mine", "over", "priors", "reward", "theirs", "values", "visits")

    def __init__(self, mine: int, theirs: int, reward: float, over: bool) -> None:
        self.mine, self.theirs, self.reward, self.over = mine, theirs, reward, over
        self.priors: list[float] = []
        self.visits, self.values = [0] * COLUMNS, [0.0] * COLUMNS
        self.children: list[Node | None] = [None] * COLUMNS

    def child(self, column: int) -> Node:
        known = self.children[column]
        if known is None:
            stones = self.mine | self.theirs
            after = stones | (stones + (1 << (7 * column)))
            mine = self.mine | (after ^ stones)
            won = four_in_line(mine)
            known = self.children[column] = Node(self.theirs, mine, float(won), won or after == FULL)
        return known


class PlainSearchAgent(RL_Agent):
    """Searches in each environment, one after the other; returns ``action`` and ``n_inferences`` [B] int64.

    Args:
        model: judges boards.
        n_simulations: of each move.
        max_depth: moves that a search looks ahead.
        device: where the model is, and observations are.
    """

    def __init__(self, model: nn.Module, n_simulations: int, max_depth: int, device: DeviceLike) -> None:
        self.device = resolve_device(device)
        self.model = model.to(self.device)
        self._n_simulations, self._max_depth = n_simulations, max_depth
        self._n_inferences = 0

    @torch.no_grad()
    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:  # fmt: skip
        actions, counts = [], []
        for board in observation["frame/board"].flatten(2).tolist():
            mine, theirs = (
                sum(1 << bit for bit, stone in zip(_BITS, stones, strict=True) if stone) for stones in board
            )
            self._n_inferences = 0
            visits = self._search(Node(mine, theirs, 0.0, False))
            actions.append(visits.index(max(visits)))
            counts.append(self._n_inferences)
        whole: Any = {"dtype": torch.int64, "device": self.device}
        return DictTensor(
            {"action": torch.tensor(actions, **whole), "n_inferences": torch.tensor(counts, **whole)}
        ), state

    def update(self, info: Any) -> None:  # noqa: ANN401 - a state dict
        self.model.load_state_dict(info)

    def _search(self, root: Node) -> list[int]:
        self._judge(root)
        for _ in range(self._n_simulations):
            node, path = root, []
            while True:
                column = self._best(node)
                path.append((node, column))
                fresh = node.children[column] is None
                node = node.child(column)
                if fresh or node.over or len(path) == self._max_depth:
                    break
            value = self._judge(node)
            value = 0.0 if node.over else value
            for parent, column in reversed(path):
                value = parent.child(column).reward - value
                parent.visits[column] += 1
                parent.values[column] += (value - parent.values[column]) / parent.visits[column]
        return root.visits

    def _best(self, node: Node) -> int:
        n = sum(node.visits)
        weight = (1.25 + math.log((n + 19653.0) / 19652.0)) * math.sqrt(n)
        scores = [
            q + weight * prior / (visits + 1) if prior > 0.0 else -math.inf
            for prior, visits, q in zip(node.priors, node.visits, node.values, strict=True)
        ]
        return scores.index(max(scores))

    def _judge(self, node: Node) -> float:
        """Ask the network, remember its priors of legal moves, return its value."""
        self._n_inferences += 1
        board = [[node.mine >> bit & 1 for bit in _BITS] + [node.theirs >> bit & 1 for bit in _BITS]]
        logits, value = self.model(torch.tensor(board, device=self.device))
        *found, judged = torch.cat([logits.softmax(-1), value.unsqueeze(1)], 1).tolist()[0]
        stones = node.mine | node.theirs
        legal = [0.0 if stones >> (7 * c + ROWS - 1) & 1 else prior for c, prior in enumerate(found)]
        node.priors = [prior / (sum(legal) or 1.0) for prior in legal]
        return float(judged)


def four_in_line(stones: int) -> bool:
    """Tell whether a player has four stones in a line."""
    for direction in (1, 7, 6, 8):
        pairs = stones & (stones >> direction)
        if pairs & (pairs >> 2 * direction):
            return True
    return False
