"""An earlier search's results are kept, node by node, below the state that the game has reached."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from positions import Bitboard, as_state, tactical
from torch import Tensor

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.functional.random import child_key
from rlstruct.search import GameModel, SearchAgent, SearchConfig, Tree, TreeSearch
from rlstruct.search.arena import play_match
from rlstruct.search.tree import evaluate_masked
from rlstruct.sims import ConnectFour
from rlstruct.testing import forbid_host_sync

CONFIG = SearchConfig(method="puct", n_simulations=40, dirichlet_fraction=0.0, temperature=0.0, reuse_tree=True)


def opinion(frame: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and values that differ from board to board."""
    seen = frame.flatten(1).to(torch.float32)
    mix = torch.linspace(-1.0, 1.0, seen.shape[1] * 8).sin().mul(7.0).sin().view(-1, 8)
    out = seen @ mix.to(frame.device)
    return out[:, :7], out[:, 7].tanh()


def searched(boards: list[Bitboard], config: SearchConfig = CONFIG, **given: object) -> tuple[TreeSearch, Tree]:
    search = TreeSearch(GameModel(ConnectFour(1), opinion), config)
    game: GameModel = search.model  # type: ignore[assignment]
    key = child_key(torch.arange(len(boards)), 0)
    return search, search(game.begin(as_state(boards), key), key, **given).tree  # type: ignore[arg-type]


def nodes_behind(tree: Tree, slot: int) -> dict[tuple[int, ...], list[float]]:
    """Return the contents of each node below a slot, by the actions that lead there, without the code under test."""
    found, spare = {}, slot - slot % (tree.n_nodes + 1) + tree.n_nodes
    waiting: list[tuple[tuple[int, ...], int]] = [((), slot)]
    while waiting:
        way, at = waiting.pop()
        state = [part[at].item() for part in tree.state.values()]
        raw = tree.nodes[at, 0].item() if way else 0.0  # of the root it is what the model says now
        found[way] = [*tree.edges[at, 1:].flatten().tolist(), raw, *state]
        waiting += [((*way, a), child) for a, child in enumerate(tree.children[at].tolist()) if child != spare]
    return found


@pytest.mark.parametrize("n_moves", [1, 2])
def test_everything_behind_the_new_state_is_kept(n_moves: int) -> None:
    boards = tactical(20, "block")
    search, tree = searched(boards)
    slots, played = tree.roots(), list(boards)
    for _ in range(n_moves):
        edges = tree.edges[slots, 1]
        actions = edges.argmax(-1)
        slots = tree.children[slots, actions]
        played = [board.play(int(a)) for board, a in zip(played, actions, strict=True)]
    state = search.model.begin(as_state(played), torch.arange(20))  # type: ignore[attr-defined]
    later = search.new_trees(state, *evaluate_masked(search.model, state))
    with forbid_host_sync():
        later.copy_subtrees(tree.rows(), search.n_kept)
    for b in range(20):
        expected = nodes_behind(tree, int(slots[b]))
        assert nodes_behind(later, int(later.roots()[b])) == expected
    assert max(len(nodes_behind(later, int(slot))) for slot in later.roots()) > 5


def test_only_so_many_nodes_are_kept_the_oldest_first() -> None:
    boards = tactical(20, "block")
    search, tree = searched(boards)
    state = search.model.begin(as_state(boards), torch.arange(20))  # type: ignore[attr-defined]
    later = search.new_trees(state, *evaluate_masked(search.model, state))
    later.copy_subtrees(tree.rows(), 9)  # the same state: the root itself
    for b in range(20):
        whole, kept = (nodes_behind(one, int(one.roots()[b])) for one in (tree, later))
        assert len(kept) == min(9, len(whole))
        assert kept == {way: whole[way] for way in kept}


def test_a_search_goes_on_with_it_and_begins_anew_where_it_has_not_been() -> None:
    boards = tactical(6, "win")
    _, tree = searched(boards)
    elsewhere = [Bitboard()] * 6
    _, fresh = searched(elsewhere)
    _, other = searched(elsewhere, earlier=tree.rows())
    assert nodes_behind(other, 0) == nodes_behind(fresh, 0)
    _, again = searched(boards, earlier=tree.rows())
    visits = again.root_edges()[1].sum(-1)
    assert visits.tolist() == [80.0] * 6
    with pytest.raises(ValueError, match=r"reuse_tree is True, expected False with Gumbel"):
        SearchConfig(reuse_tree=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("sim:0", marks=pytest.mark.slow)])
def test_an_agent_carries_its_trees_from_move_to_move(device: str) -> None:
    import rlstruct.testing.sim_device  # noqa: F401  (makes sim:0)

    model = ConvolutionalActorCritic((2, 6, 7), 7, n_features=16, layers=[(8, 4, 1)])
    config = SearchConfig(method="puct", n_simulations=6, max_depth=6, reuse_tree=True)
    agent = partial(SearchAgent, model, create_simulator=ConnectFour, config=config, device=device)
    env = partial(ConnectFour, device=device)
    with RL_Batcher(4, agent, env, env_args={"n_envs": 3}, seed=0, device=device) as batcher:
        batcher.reset()
        batcher.execute()
        first, _ = batcher.get()
    visits = first.to("cpu").steps["action/action_visits"].sum(-1)  # [3, 4]
    assert (visits[:, 0] == 6).all()
    assert (visits[:, 1:] >= 6).all()
    assert (visits[:, 1:] > 6).any()
    result, length = play_match(agent(), agent(), env(2, auto_reset=False))
    assert (length > 6).all()
    assert set(result.tolist()) <= {-1.0, 0.0, 1.0}
    empty, _ = agent()(
        DictTensor(), env(2).reset()[0] + DictTensor({"rng": torch.arange(2, device=device)}), DictTensor()
    )
    assert (empty["action_visits"].sum(-1).to("cpu") == 6).all()


def test_an_agent_that_plays_random_games_carries_its_trees_too() -> None:
    config = SearchConfig(method="uct", n_simulations=20, temperature=0.0, reuse_tree=True)
    agent = SearchAgent(create_simulator=ConnectFour, config=config)
    env, state = ConnectFour(2), DictTensor()
    observation, _ = env.reset()
    visits = []
    for t in range(3):
        action, state = agent(state, observation + DictTensor({"rng": torch.arange(2) + 2 * t}), DictTensor())
        visits.append(action["action_visits"].sum(-1))
        _, (observation, _) = env.step(action.get(["action"]))
    assert (visits[0] == 20).all()
    assert (visits[2] > 20).all()
