"""Strength of a run of AlphaZero at Connect Four: games against random play and UCT, mistakes in solved positions.

    python benchmarks/connect_four_strength.py RUN [--simulations 1000] [--games 40] [--uct 1000] [--positions 100]

By default, both sides have 1,000 simulations of each move. UCT and the solver are plain Python, and share nothing with
the library. A mistake is a move that gives away a win or a draw: by the network's policy without a search, and by the
search, before and after the training. Positions come from random play, in sets by their number of stones; in each, some
moves are mistakes and some are not. RUN is a folder of `rlstruct train alphazero`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common.plain_search import FULL, Node, PlainSearchAgent
from common.plain_search import four_in_line as wins
from common.reporting import Row, write
from torch import nn

from rlstruct.algos.training.checkpoint import read_checkpoint
from rlstruct.algos.training.run_folder import read_lines
from rlstruct.cli.stored_run import load_trained
from rlstruct.core import DictTensor
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.search.arena import Player, RandomPlayer, play_match
from rlstruct.sims import ConnectFour, ConnectFourState

TOP = [1 << (7 * c + 5) for c in range(7)]
BOTTOM = [1 << (7 * c) for c in range(7)]
COLUMN = [0b111111 << (7 * c) for c in range(7)]
Search = Callable[[nn.Module], SearchAgent]
RETURN = "evaluation/mean_return"
ORDER = (3, 2, 4, 1, 5, 0, 6)
STONES = (22, 26, 30, 34)
"""Of the positions in each set: fewer take a solver in Python too long."""


def legal(stones: int) -> list[int]:
    return [c for c in range(7) if not stones & TOP[c]]


def over(mine: int, theirs: int) -> bool:
    return wins(mine) or wins(theirs) or mine | theirs == FULL


def dropped(stones: int, column: int) -> int:
    """The stone that falls into a column."""
    return (stones + BOTTOM[column]) & COLUMN[column]


def playout(mine: int, theirs: int, draw: random.Random) -> float:
    """Play at random to the end: the result of who moves next."""
    sign = 1.0
    while True:
        stones = mine | theirs
        if stones == FULL:
            return 0.0
        column = draw.choice(legal(stones))
        mine |= dropped(stones, column)
        if wins(mine):
            return sign
        mine, theirs, sign = theirs, mine, -sign


class UctPlayer(PlainSearchAgent):
    """UCT (Kocsis and Szepesvári, 2006) in each game by itself: positions are judged by random games to the end."""

    def __init__(self, n_simulations: int) -> None:
        super().__init__(nn.Identity(), n_simulations, max_depth=len(COLUMN) * 6, device="cpu")
        self._draw = random.Random(0)

    def _search(self, root: Node) -> list[int]:
        """Return the visits of each column; none where the game is over."""
        return [0] * len(COLUMN) if over(root.mine, root.theirs) else super()._search(root)

    def _best(self, node: Node) -> int:
        """Return the column with the highest upper bound; one that has not been visited comes first."""
        columns = legal(node.mine | node.theirs)
        if fresh := [c for c in columns if not node.visits[c]]:
            return self._draw.choice(fresh)
        log = 2.0 * math.log(sum(node.visits))
        return max(columns, key=lambda c: node.values[c] + math.sqrt(log / node.visits[c]))

    def _judge(self, node: Node) -> float:
        return playout(node.mine, node.theirs, self._draw)


def threats(stones: int, all_stones: int) -> int:
    """Empty places where a player would have four in a line, after Pascal Pons (blog.gamesolver.org, part 9)."""
    found = (stones << 1) & (stones << 2) & (stones << 3)  # upright: only on top
    for step in (6, 7, 8):
        pair = (stones << step) & (stones << 2 * step)
        found |= pair & (stones << 3 * step) | pair & (stones >> step)
        pair = (stones >> step) & (stones >> 2 * step)
        found |= pair & (stones << step) | pair & (stones >> 3 * step)
    return found & (FULL ^ all_stones)


def solve(mine: int, theirs: int, known: dict[tuple[int, int], int], low: int = -1, high: int = 1) -> int:
    """Return 1, 0 or -1, cut to [low, high]: the result of who moves next if both play perfectly.

    Negamax with a window and a table of what was solved, the middle first; no player lets the other one win at once.
    """
    stones = mine | theirs
    if stones == FULL:
        return 0
    places = (stones + sum(BOTTOM)) & FULL
    if threats(mine, stones) & places:
        return 1
    danger = threats(theirs, stones)
    forced = danger & places
    if forced:
        if forced & (forced - 1):
            return -1  # two places to be taken at once
        places = forced
    places &= ~(danger >> 1)  # what lies on top of it wins for the other one
    if not places:
        return -1
    key = mine, stones
    bounds = known.get(key)
    if bounds is not None:
        return bounds
    best = -1
    for column in ORDER:
        if stone := places & COLUMN[column]:
            best = max(best, -solve(theirs, mine | stone, known, -high, -max(low, best)))
            if best >= high:
                break
    if best or low < 0 < high:  # else 0 is only a bound
        known[key] = best
    return best


def solved_positions(n: int, n_stones: int, seed: int = 0) -> list[tuple[int, int, set[int]]]:
    """Draw positions in which some moves are mistakes: the stones of both, and the moves that are none."""
    draw, found, known = random.Random(seed), [], {}
    while len(found) < n:
        mine = theirs = 0
        for _ in range(n_stones):
            stones = mine | theirs
            mine, theirs = theirs, mine | dropped(stones, draw.choice(legal(stones)))
            if wins(theirs):
                break
        else:
            stones = mine | theirs
            values = {}
            for c in legal(stones):
                after = mine | dropped(stones, c)
                values[c] = 1 if wins(after) else -solve(theirs, after, known)
            best = {c for c, value in values.items() if value == max(values.values())}
            if len(best) < len(values):
                found.append((mine, theirs, best))
    return found


def mistakes(positions: list[tuple[int, int, set[int]]], player: Player) -> float:
    """Share of the positions in which a player's move gives something away."""
    state = ConnectFourState(*(torch.tensor([position[i] for position in positions]) for i in (0, 1)))
    frames = ConnectFour(1).observe(state)
    seen = {f"frame/{name}": frame for name, frame in frames.items()} | {"rng": torch.arange(len(positions))}
    action = player(DictTensor(), DictTensor(seen), DictTensor())[0]["action"]
    wrong = [column not in best for column, (_, _, best) in zip(action.tolist(), positions, strict=True)]
    return sum(wrong) / len(wrong)


def policy_of(model: nn.Module) -> Player:
    """The network's own policy, without a search."""

    @torch.no_grad()
    def play(state: DictTensor, observation: DictTensor, agent_info: DictTensor) -> tuple[Any, Any]:
        logits, _ = model(observation["frame/board"])
        action = logits.masked_fill(~observation["frame/legal"], -torch.inf).argmax(-1)
        return DictTensor({"action": action}), state

    return play


def players(run: Path, simulations: int) -> tuple[nn.Module, nn.Module, Search]:
    """The network of a run before and after its training, and what searches with one."""
    torch.set_num_threads(1)
    trained = load_trained(run, auto_reset=True)
    torch.manual_seed(trained.settings.config.seed)
    config = SearchConfig(method="gumbel", n_simulations=simulations, max_depth=24)
    create = partial(SearchAgent, create_simulator=ConnectFour, config=config, stochastic=False)
    return trained.choice.create_model(), trained.model, create


def mistakes_with(n_stones: int, n_positions: int, *search: Any) -> Row:  # noqa: ANN401 - for `players`
    """A row about one set of positions."""
    before, after, create = players(*search)
    positions = solved_positions(n_positions, n_stones)
    row: Row = {"stones": n_stones, "positions": len(positions)}
    for name, model in (("before", before), ("after", after)):
        row[name] = mistakes(positions, policy_of(model))
        row[f"{name}, searching"] = mistakes(positions, create(model))
    return row


def points_against(n_uct: int, first: bool, n_games: int, *search: Any) -> list[float]:  # noqa: ANN401 - for `players`
    """Results of games against UCT, or with 0 against random play, in which the agent begins or does not."""
    _, after, create = players(*search)
    sides: list[Player] = [create(after), UctPlayer(n_uct) if n_uct else RandomPlayer(7)]
    result, _ = play_match(*(sides if first else sides[::-1]), ConnectFour(n_games, auto_reset=False), 1 + first)
    return (result if first else -result).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--games", type=int, default=40)
    parser.add_argument("--uct", type=int, default=1000)
    parser.add_argument("--positions", type=int, default=100)
    options = parser.parse_args()
    lines = read_lines(options.run / "metrics.csv")
    curve = [[line["env_steps"], line[RETURN]] for line in lines if RETURN in line]
    moves = read_checkpoint(options.run / "checkpoint.pt")["env_steps"]
    rows: list[Row] = [{"moves_of_self_play": moves, "simulations": options.simulations, "returns": curve}]
    search, half = (options.run, options.simulations), options.games // 2
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        matches = {
            name: [pool.submit(points_against, n, first, half, *search) for first in (True, False)]
            for name, n in ((f"UCT {options.uct}", options.uct), ("random play", 0))
        }
        sets = [pool.submit(mistakes_with, n_stones, options.positions, *search) for n_stones in STONES]
        for name, halves in matches.items():
            points = [point for one in halves for point in one.result()]
            won, drawn, lost = (points.count(value) for value in (1.0, 0.0, -1.0))
            rows.append({"opponent": name, "won": won, "drawn": drawn, "lost": lost})
        rows += [one.result() for one in sets]
    print(*rows[1:], write("connect_four_strength", rows), sep="\n")


if __name__ == "__main__":
    main()
