"""Connect Four against lists of lists, and against counts that are known."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlstruct.core import DictTensor
from rlstruct.functional.random import child_key, randint, uniform
from rlstruct.sims import ConnectFour, make

# All lines of four on the board: to the right, down, and both diagonals.
FOURS = [
    [(r + i * dr, c + i * dc) for i in range(4)]
    for r, c, (dr, dc) in itertools.product(range(6), range(7), [(0, 1), (1, 0), (1, 1), (1, -1)])
    if r + 3 * dr < 6 and 0 <= c + 3 * dc < 7
]


class Board:
    """The game as one would write it down: six rows from above, ' ' or the player's number."""

    def __init__(self) -> None:
        self.cells = [[" "] * 7 for _ in range(6)]
        self.player = 0

    def legal(self) -> list[bool]:
        return [cell == " " for cell in self.cells[0]]

    def play(self, column: int) -> tuple[float, bool]:
        if not self.legal()[column]:
            self.player = 1 - self.player
            return -1.0, True
        row = max(r for r in range(6) if self.cells[r][column] == " ")
        self.cells[row][column] = str(self.player)
        won = self.line(str(self.player))
        self.player = 1 - self.player
        return float(won), won or not any(self.legal())

    def line(self, stone: str) -> bool:
        return any(all(self.cells[r][c] == stone for r, c in four) for four in FOURS)

    def planes(self) -> list:
        own, other = str(self.player), str(1 - self.player)
        return [[[cell == stone for cell in row] for row in self.cells] for stone in (own, other)]


@pytest.mark.parametrize("n_moves", [12_000, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_equals_the_board_on_paper_in_every_move(n_moves: int) -> None:
    assert len(FOURS) == 69
    B = 400
    env = ConnectFour(B)
    current, _ = env.reset()
    boards = [Board() for _ in range(B)]
    seen = {"won": 0, "illegal": 0, "full": 0}
    for t in range(n_moves // B):
        key = child_key(torch.arange(B), t)
        anything = randint(child_key(key, 1), 7)
        legal = (uniform(child_key(key, 2), (7,)) * current["frame/legal"]).argmax(1)
        action = torch.where(uniform(child_key(key, 3)) < 0.1, anything, legal)
        (reached, _), (current, _) = env.step(DictTensor({"action": action}))
        keys = ("reward", "terminated", "frame/board", "frame/legal")
        rows = zip(boards, action.tolist(), *(reached[key].tolist() for key in keys), strict=True)
        for b, (board, column, *got) in enumerate(rows):
            reward, ended = board.play(column)
            assert got == [reward, ended, board.planes(), board.legal()]
            if ended:
                seen[{1.0: "won", -1.0: "illegal", 0.0: "full"}[reward]] += 1
                boards[b] = Board()
    assert min(seen["won"], seen["illegal"]) > 10


def test_a_full_board_is_a_draw() -> None:
    # Columns in pairs, so filled that no four stand in a line.
    moves = [0, 1] * 3 + [1, 0] * 3 + [2, 3] * 3 + [3, 2] * 3 + [4, 5] * 3 + [5, 4] * 3 + [6] * 6
    env, board = ConnectFour(1), Board()
    env.reset()
    for i, move in enumerate(moves):
        (reached, _), _ = env.step(DictTensor({"action": torch.tensor([move])}))
        assert (float(reached["reward"]), bool(reached["terminated"])) == board.play(move)
        assert bool(reached["terminated"]) == (i == 41)


@pytest.mark.parametrize("n_moves", [5, pytest.param(6, marks=pytest.mark.exhaustive)])
def test_known_numbers_of_positions(n_moves: int) -> None:
    # All 7^n openings: the numbers of distinct positions are those of OEIS A212693.
    expected = [7, 49, 238, 1120, 4263, 16422]
    plays = torch.tensor(list(itertools.product(range(7), repeat=n_moves)))
    env = make("ConnectFour-v0", len(plays), auto_reset=False)
    env.reset()
    for t in range(n_moves):
        env.step(DictTensor({"action": plays[:, t].contiguous()}))
        state = env.get_state()
        assert len(torch.stack([state.mine, state.theirs], 1).unique(dim=0)) == expected[t]
    assert env.state_tensors()["running"].all()
    # Of six equal moves, seven sequences in all, the next into the same column is the seventh stone there.
    state = env.get_state()
    for column in range(7):
        env.set_state(None, state)
        (reached, _), _ = env.step(DictTensor({"action": torch.full((len(plays),), column)}))
        assert int((reached["reward"] == -1).sum()) == (n_moves == 6)


@pytest.mark.filterwarnings("ignore")  # envpool's own
def test_equals_envpool_in_whole_games() -> None:
    envpool = pytest.importorskip("envpool", reason="needs the extra envpool")
    if "ConnectFour-v1" not in envpool.list_all_envs():
        pytest.skip("this envpool has no ConnectFour-v1")
    B = 64
    # With more threads EnvPool mixes up rows of games for two players now and then.
    theirs = envpool.make("ConnectFour-v1", env_type="gymnasium", num_envs=B, num_threads=1, seed=0)
    _, info = theirs.reset()
    ours = ConnectFour(B, auto_reset=False)
    current, running = ours.reset()
    ended = {1.0: 0, 0.0: 0}
    for t in range(42):
        legal = torch.as_tensor(info["legal_action_mask"])
        player = torch.as_tensor(info["current_player"]).long().view(B, 1)
        board = torch.as_tensor(info["board"])
        shown = torch.stack([board == t % 2, board == 1 - t % 2], 1)  # 0 is who began, whichever player that is
        assert torch.equal(current["frame/legal"][running], legal[running])
        assert torch.equal(current["frame/board"][running], shown[running])
        action = (uniform(child_key(torch.arange(B), t), (7,)) * legal).argmax(1)
        (reached, ran), (current, running) = ours.step(DictTensor({"action": action}))
        _, reward, terminated, _, info = theirs.step(action.int().numpy())
        reward = torch.as_tensor(reward).view(B, 2).gather(1, player).squeeze(1)
        assert torch.equal(reached["terminated"][ran], torch.as_tensor(terminated)[ran])
        assert torch.equal(reached["reward"][ran], reward[ran])
        for value in reached["reward"][ran & reached["terminated"]].tolist():
            ended[value] += 1
    assert not running.any()
    assert sum(ended.values()) == B
