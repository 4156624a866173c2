"""Searches of Connect Four: wins and blocks are found, inferences counted, nothing waits, graphs give the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.spaces import Discrete
from positions import Bitboard, as_state, random_position, solve, tactical
from torch import Tensor, nn

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.engine.runner import Runner
from rlstruct.functional.random import child_key
from rlstruct.search import GameModel, RolloutModel, SearchAgent, SearchConfig, TreeSearch
from rlstruct.search.game import split_frames
from rlstruct.search.tree_search import free_memory
from rlstruct.sims import CartPole, ConnectFour
from rlstruct.testing import check_agent, forbid_host_sync
from rlstruct.vec_env import VecEnv


def knows_nothing(frame: Tensor) -> tuple[Tensor, Tensor]:
    return frame.new_zeros(len(frame), 7, dtype=torch.float32), frame.new_zeros(len(frame), dtype=torch.float32)


class Network(nn.Module):
    """A small network that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ConvolutionalActorCritic((2, 6, 7), 7, n_features=16, layers=[(8, 4, 1)])
        self.rows: list[int] = []  # a number would be a setting, which ends a capture when it changes

    def forward(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.append(len(frame))
        logits, value = self.inner(frame)
        return logits * 30.0, value  # not uniform


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def searched(boards: list[Bitboard], config: SearchConfig) -> torch.Tensor:
    game = GameModel(ConnectFour(1), knows_nothing)
    key = child_key(torch.arange(len(boards)), 0)
    return TreeSearch(game, config)(game.begin(as_state(boards), key), key).action


@pytest.mark.parametrize("method", ["puct", "gumbel", "uct"])
@pytest.mark.parametrize("kind", ["win", "block"])
def test_500_simulations_find_every_win_and_every_block(method: str, kind: str) -> None:
    boards = tactical(100, kind)
    quiet: dict[str, float] = {"dirichlet_fraction": 0.0, "gumbel_scale": 0.0, "temperature": 0.0}
    config = SearchConfig(method=method, n_simulations=500, max_depth=12, **quiet)
    actions = searched(boards, config).tolist()
    for board, action in zip(boards, actions, strict=True):
        good = board.wins() if kind == "win" else board.passed().wins()
        assert action in good


def observed(env: VecEnv, n_moves: int = 0) -> DictTensor:
    current, _ = env.reset()
    rng = child_key(torch.arange(env.n_envs()), 7).to(env.device)
    for t in range(n_moves):
        action = (rng + t).remainder(3) + 2
        _, (current, _) = env.step(DictTensor({"action": action}))
    return current + DictTensor({"rng": rng})


def test_500_inferences_for_each_sample() -> None:
    counted = network()
    agent = SearchAgent(counted, create_simulator=ConnectFour, config=SearchConfig(n_simulations=499), copy_model=False)
    with RL_Batcher(2, lambda: agent, ConnectFour, env_args={"n_envs": 2}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    n_samples = trajectories.steps.lengths.sum()
    assert sum(counted.rows) == agent.n_inferences == 500 * n_samples
    visits = trajectories.steps["action/action_visits"]
    assert (visits.sum(-1) == 499).all()


def record_runners(monkeypatch: pytest.MonkeyPatch, module: str) -> list[Runner[Any]]:
    """Return a list that gets every runner that a module makes from now on."""
    made: list[Runner[Any]] = []
    monkeypatch.setattr(
        f"rlstruct.search.{module}.Runner", lambda *args, **named: made.append(Runner(*args, **named)) or made[-1]
    )
    return made


@pytest.mark.parametrize("method", ["puct", "gumbel", "uct"])
def test_on_an_accelerator_nothing_waits_and_a_graph_finds_the_same(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = record_runners(monkeypatch, "agent")
    config = SearchConfig(method=method, n_simulations=6, max_depth=4)
    make = partial(SearchAgent, network(), create_simulator=ConnectFour, config=config)
    here, there = make(device="cpu"), make(device="sim:0")
    expected, _ = here(DictTensor(), observed(ConnectFour(5), 8), DictTensor())
    observation = observed(ConnectFour(5, device="sim:0"), 8)
    for _ in range(3):  # eager, captured, replayed
        with forbid_host_sync():
            found, _ = there(DictTensor(), observation, DictTensor())
        for key, value in expected.items():
            torch.testing.assert_close(found[key].to("cpu"), value)
    assert [runner.executor for runner in runners] == ["eager", "graph"]
    weights = {name: weight * 0.5 for name, weight in here.model.state_dict().items()}
    for agent in (here, there):
        agent.update(weights)
    expected, _ = here(DictTensor(), observed(ConnectFour(5), 8), DictTensor())
    found, _ = there(DictTensor(), observation, DictTensor())
    torch.testing.assert_close(found["action_policy"].to("cpu"), expected["action_policy"])


def test_keeps_the_contract_of_agents() -> None:
    config = SearchConfig(method="puct", n_simulations=4, max_depth=3)
    agent = SearchAgent(network(), create_simulator=ConnectFour, config=config, copy_model=False)
    check_agent(agent, ConnectFour(5))


def test_states_follow_from_what_is_shown() -> None:
    boards = tactical(50, "block")
    state = as_state(boards)
    game = ConnectFour(1)
    again = game.state_from(game.observe(state))
    assert torch.equal(again.mine, state.mine)
    assert torch.equal(again.theirs, state.theirs)
    with pytest.raises(TypeError, match="CartPole has no state_from"):
        SearchAgent(network(), create_simulator=CartPole)


def test_one_row_does_not_depend_on_the_others() -> None:
    boards = tactical(12, "win")
    config = SearchConfig(method="puct", n_simulations=30)
    game = GameModel(ConnectFour(1), network())
    key = child_key(torch.arange(12), 3)
    search = TreeSearch(game, config)
    with torch.no_grad():
        whole = search(game.begin(as_state(boards), key), key)
        half = search(game.begin(as_state(boards[6:]), key[6:]), key[6:])
    assert torch.equal(whole.visits[6:], half.visits)
    assert torch.equal(whole.action[6:], half.action)


def test_memory_is_known_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    game = GameModel(ConnectFour(1), knows_nothing)
    search = TreeSearch(game, SearchConfig(n_simulations=100))
    state = game.begin(as_state([Bitboard()] * 8), torch.arange(8))
    tree = search(state, torch.arange(8)).tree
    tensors = [tree.edges, tree.children, tree.nodes, tree.action, tree.onward, *tree.state.values()]
    assert search.memory_needed(state, 7) == sum(t.numel() * t.element_size() for t in tensors)
    monkeypatch.setattr("rlstruct.search.tree_search.free_memory", lambda device: 1000)
    with pytest.raises(MemoryError, match=r"100 simulations in 8 environments take .* and cpu has .* Search in fewer"):
        TreeSearch(game, SearchConfig(n_simulations=100))(state, torch.arange(8))


@dataclass(frozen=True, slots=True)
class Stones:
    """A heap of stones, under the name of the random key in a search."""

    key: Tensor


class Nim:
    """Two players take one or two stones; the last stone wins."""

    stochastic = False

    def __init__(self, create_state: Callable[[Tensor], Any]) -> None:
        self.create_state = create_state

    def transition(self, state: Any, action: Tensor, key: Tensor) -> tuple[Any, Tensor, Tensor]:
        left = (self.observe(state)[:, 0] - 1 - action).clamp(min=0)
        return self.create_state(left), (left == 0).float(), left == 0

    def observe(self, state: Any) -> Tensor:
        heap: Tensor = state["key"] if isinstance(state, DictTensor) else state.key
        return heap.unsqueeze(1)

    def state_from(self, frames: Any) -> Any:
        return self.create_state(frames[:, 0])


@pytest.mark.parametrize("create_state", [Stones, lambda heap: DictTensor({"key": heap})])
def test_a_search_takes_every_state_that_a_simulator_may_have(create_state: Callable[[Tensor], Any]) -> None:
    game = RolloutModel(Nim(create_state), n_actions=2, n_moves=8)
    search = TreeSearch(game, SearchConfig(method="uct", n_simulations=60, temperature=0.0))
    key = child_key(torch.arange(3), 0)
    result = search(game.begin(create_state(torch.tensor([2, 4, 5])), key), key)
    assert result.action.tolist() == [1, 0, 1]  # who leaves three stones, or none, wins


def test_free_memory_includes_what_the_system_caches_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes, expected in (({"MemFree": 1, "MemAvailable": 3}, 3 * 1024), ({}, None)):
        monkeypatch.setattr("rlstruct.search.tree_search.kilobytes", lambda name, sizes=sizes: sizes)
        assert free_memory(torch.device("cpu")) == expected


def test_random_games_give_their_results_to_who_moves_next() -> None:
    # 41 stones, one column with one place: the result is certain.
    boards = [random_position(seed, range(41, 42)) for seed in range(20)]
    game = RolloutModel(ConnectFour(1), 7, n_moves=5)
    _, value = game.evaluate(game.begin(as_state(boards), torch.arange(20)))
    assert value.tolist() == [solve(board, {}) for board in boards]
    # One move is left of the empty board's game: neither player can have won.
    game = RolloutModel(ConnectFour(1), 7, n_moves=6)
    _, value = game.evaluate(game.begin(as_state([Bitboard()] * 9), torch.arange(9)))
    assert (value == 0).all()
    # Who moves first wins more random games than not (0.556 to 0.442; 4,000 games are known to 0.016).
    game = RolloutModel(ConnectFour(1), 7, n_moves=42)
    keys = child_key(torch.arange(4000), 0)
    _, value = game.evaluate(game.begin(as_state([Bitboard()] * 4000), keys))
    assert abs(value.mean() - 0.113) < 0.06


def test_random_games_from_different_states_are_independent() -> None:
    """Equal draws at all states of one depth would not average out over a search."""
    game = RolloutModel(ConnectFour(1), 7, n_moves=42)
    root = game.begin(as_state([Bitboard()] * 4000), child_key(torch.arange(4000), 0))
    children = [game.advance(root, torch.full((4000,), column))[0] for column in (2, 3, 4)]
    values = torch.stack([game.evaluate(state)[1] for state in (root, *children)])
    correlation = torch.corrcoef(values) - torch.eye(4)
    assert correlation.abs().max() < 0.06  # four standard deviations of independent games


def test_refuses_what_makes_no_sense() -> None:
    for wrong in ({"method": "alphabeta"}, {"n_simulations": 0}, {"max_depth": 0}, {"dirichlet_alpha": 0.0}):
        with pytest.raises(ValueError, match=f"SearchConfig: {next(iter(wrong))} is"):
            SearchConfig(**wrong)
    agent = SearchAgent(create_simulator=ConnectFour)
    with pytest.raises(TypeError, match="has no model"):
        agent.update({})
    game = GameModel(ConnectFour(1))
    with pytest.raises(TypeError, match="there is no network"):
        game.evaluate(game.begin(as_state([Bitboard()]), torch.arange(1)))
    with pytest.raises(ValueError, match="expected one frame"):
        split_frames({"a": torch.zeros(1), "b": torch.zeros(1)})


def test_actions_that_do_not_start_at_0_are_refused() -> None:
    class FromOne(ConnectFour):
        action_space = Discrete(7, start=1)

    with pytest.raises(ValueError, match=r"the actions of FromOne start at 1, expected 0.*add 1 in transition"):
        SearchAgent(network(), create_simulator=FromOne)


def test_what_random_games_and_kept_trees_need_of_a_simulator_is_named() -> None:
    def create_nim(n_envs: int, device: torch.device) -> Nim:
        return Nim(Stones)

    with pytest.raises(TypeError, match=r"Nim has no action_space, and there is no model, so it plays random games"):
        SearchAgent(create_simulator=create_nim)
    kept = SearchConfig(method="puct", reuse_tree=True)
    with pytest.raises(TypeError, match=r"Nim has no action_space and no reset and no get_state, and reuse_tree is"):
        SearchAgent(network(), create_simulator=create_nim, config=kept)


class Coin(ConnectFour):
    """A game that would draw random numbers."""

    stochastic = True


def test_chance_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Coin draws random numbers .* expected a simulator without"):
        SearchAgent(network(), create_simulator=Coin)


@pytest.mark.parametrize("method", ["puct", "gumbel"])
def test_exploration_falls_over_the_first_moves_of_each_game(method: str) -> None:
    config = SearchConfig(method=method, n_simulations=8, max_depth=3, dirichlet_fraction=0.0, exploring_moves=3)
    noisy = SearchAgent(network(), create_simulator=ConnectFour, config=config)
    best = SearchAgent(network(), create_simulator=ConnectFour, config=config, stochastic=False)
    seen = DictTensor({**dict(observed(ConnectFour(200)).items()), "initial_state": torch.arange(200) % 2 == 0})
    state = DictTensor({"moves": torch.full((200,), 3)})  # of games that go on
    found, after = noisy(state, seen, DictTensor())
    expected = best(DictTensor(), seen, DictTensor())[0]["action"]
    assert after["moves"].tolist() == [1, 4] * 100
    assert (found["action"][1::2] == expected[1::2]).all()  # after three moves: the best one
    assert (found["action"][::2] != expected[::2]).any()  # in the first one: drawn
    assert noisy.initial_state(DictTensor(), 2)["moves"].tolist() == [0, 0]
    assert best.initial_state(DictTensor(), 2).empty()


def test_what_the_search_expects_is_not_lowered_by_bad_actions_that_it_tried() -> None:
    # Who moves next wins in column 3, and nothing else is known.
    board = Bitboard().play(3).play(0).play(3).play(0).play(3).play(1)
    game = GameModel(ConnectFour(1), knows_nothing)
    config = SearchConfig(n_simulations=32, gumbel_scale=0.0)
    found = TreeSearch(game, config)(game.begin(as_state([board]), torch.arange(1)), torch.arange(1))
    assert found.action.tolist() == [3]
    torch.testing.assert_close(found.expected, (found.policy * found.q).sum(-1))
    assert found.value < 0.8 < found.expected


def test_compiled_simulations_are_refused_off_the_cpu() -> None:
    agent = SearchAgent(network(), create_simulator=ConnectFour, config=SearchConfig(compiled=True), device="sim:0")
    seen = observed(ConnectFour(2), 4).to("sim:0")
    with pytest.raises(ValueError, match=r"compiled=True\) for a search on sim:0, expected False"):
        agent(DictTensor(), seen, DictTensor())


@pytest.mark.slow
def test_compiled_simulations_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    runners = record_runners(monkeypatch, "tree_search")
    config = SearchConfig(method="puct", n_simulations=12, max_depth=4)
    make = partial(SearchAgent, network(), create_simulator=ConnectFour)
    plain, compiled = make(config=config), make(config=replace(config, compiled=True))
    assert compiled.model is not None
    for n_moves in (8, 9):
        seen = observed(ConnectFour(6), n_moves)
        for agent in (plain, compiled):
            agent.update({name: weight * 0.9 for name, weight in agent.model.state_dict().items()})
        expected, found = (agent(DictTensor(), seen, DictTensor())[0] for agent in (plain, compiled))
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value)
    assert [runner.executor for runner in runners] == ["compiled"]
    for agent in (plain, compiled):
        weight = next(agent.model.parameters())
        weight.data = weight.data * 0.5  # in other memory, which the code must read from now on
    expected, found = (agent(DictTensor(), seen, DictTensor())[0] for agent in (plain, compiled))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value)
    with pytest.raises(ValueError, match="compiled is True without a model"):
        SearchAgent(create_simulator=ConnectFour, config=replace(config, compiled=True))
