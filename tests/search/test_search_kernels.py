"""Simulations by kernels: the trees that torch makes, few launches, and no more registers than a thread may take."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from positions import Bitboard, as_state, tactical
from queued import Queued
from torch import Tensor

pytest.importorskip("warp", reason="needs the extra warp")

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.core import DictTensor
from rlstruct.functional.random import child_key
from rlstruct.search import GameModel, Method, SearchAgent, SearchConfig, SearchResult, TreeSearch
from rlstruct.search.kernels import FLOATS, make_kernels
from rlstruct.search.presets import CONNECT_FOUR
from rlstruct.sims import ConnectFour
from rlstruct.testing import forbid_host_sync

MOST_NODES = 70
"""Nodes of a graph per simulation of Connect Four with the bundled network."""
MOST_REGISTERS = {torch.float32: 64, torch.float64: 96}


def knows_nothing(frame: Tensor) -> tuple[Tensor, Tensor]:
    return frame.new_zeros(len(frame), 7, dtype=torch.float32), frame.new_zeros(len(frame), dtype=torch.float32)


def decided(dtype: torch.dtype, device: torch.device) -> ConvolutionalActorCritic:
    """A network whose logits and values differ from position to position."""
    torch.manual_seed(0)
    model = ConvolutionalActorCritic((2, 6, 7), 7, n_features=16, layers=[(8, 4, 1)])
    with torch.no_grad():
        for weight in model.actor.parameters():
            weight.mul_(300.0)  # it starts small
    return model.to(device, dtype)


def searched(
    network: Any, boards: list[Bitboard], config: SearchConfig, device: torch.device, earlier: DictTensor | None = None
) -> SearchResult:
    game = GameModel(ConnectFour(1, device=device), network)
    key = child_key(torch.arange(len(boards)), 0).to(device)
    state = {name: part.to(device) for name, part in vars(as_state(boards)).items()}
    search = TreeSearch(game, config, device=device)
    with torch.no_grad(), forbid_host_sync():
        return search(game.begin(type(as_state(boards))(**state), key), key, earlier=earlier)


def assert_same(found: SearchResult, expected: SearchResult) -> None:
    """The same moves and trees, up to rounding; spare slots hold anything."""
    assert torch.equal(found.visits, expected.visits)
    assert torch.equal(found.action, expected.action)
    rows, others = found.tree.rows(), expected.tree.rows()
    for name, part in rows.items():
        one, other = part[:, :-1], others[name][:, :-1]
        if one.is_floating_point():
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
        else:
            assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_depth", [None, 1, 3])
@pytest.mark.parametrize("method", ["puct", "gumbel", "uct"])
def test_trees_are_those_of_torch(
    method: Method, max_depth: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """In positions with full columns, too, and where games end."""
    boards = [*tactical(12, "win"), *tactical(12, "block"), Bitboard()]
    config = SearchConfig(method=method, n_simulations=40, max_depth=max_depth)
    network = decided(dtype, device)
    expected, found = (
        searched(network, boards, replace(config, backend=backend), device) for backend in ("torch", "warp")
    )
    assert_same(found, expected)
    assert len(found.visits.unique()) > 4
    assert found.tree.edges.dtype is dtype


@pytest.mark.parametrize("method", ["puct", "uct"])
def test_earlier_trees_are_continued(method: Method, device: torch.device) -> None:
    boards = tactical(10, "block")
    config = SearchConfig(method=method, n_simulations=30, max_depth=5, reuse_tree=True, dirichlet_fraction=0.0)
    network = decided(torch.float32, device)
    answers = []
    for backend in ("torch", "warp"):
        first = searched(network, boards, replace(config, backend=backend), device)
        answers.append(searched(network, boards, replace(config, backend=backend), device, first.tree.rows()))
    assert_same(answers[1], answers[0])
    assert (answers[1].visits.sum(-1) == 60).all()


@pytest.mark.parametrize("method", ["puct", "gumbel", "uct"])
def test_ties_are_broken_alike(method: Method, device: torch.device) -> None:
    """All actions look the same at first, and symmetric ones always do."""
    config = SearchConfig(method=method, n_simulations=100, dirichlet_fraction=0.0, gumbel_scale=0.0)
    expected, found = (
        searched(knows_nothing, [Bitboard()] * 3, replace(config, backend=backend), device)
        for backend in ("torch", "warp")
    )
    assert_same(found, expected)


def test_what_kernels_cannot_do_is_said() -> None:
    with pytest.raises(ValueError, match=r"backend is 'warp', expected 'torch' or None with compiled=True"):
        SearchConfig(compiled=True, backend="warp")
    half, config = decided(torch.bfloat16, torch.device("cpu")), SearchConfig(n_simulations=2, backend="warp")
    with pytest.raises(ValueError, match=r"logits of torch\.bfloat16, expected logits of torch\.float32 or torch\.flo"):
        searched(half, [Bitboard()], config, torch.device("cpu"))


def bundled_agent(n_simulations: int, device: str, backend: Any = None) -> SearchAgent:
    """An agent with the network of the tuned settings."""
    model = ConvolutionalActorCritic((2, 6, 7), 7, **CONNECT_FOUR.network)
    config = CONNECT_FOUR.config.search(n_simulations)
    return SearchAgent(
        model, create_simulator=ConnectFour, config=replace(config, max_depth=None, backend=backend), device=device
    )


def observed(n: int, device: str) -> DictTensor:
    game = ConnectFour(n, device=device)
    return game.reset()[0] + DictTensor({"rng": torch.arange(n, device=device)})


def test_a_simulation_queues_few_operators() -> None:
    """Of the game and the network; on CUDA each operator but a few is one node, and there are two kernels."""
    counts = []
    for n_simulations in (4, 12):
        agent = bundled_agent(n_simulations, "cpu", "warp")
        with Queued() as queued:
            agent(DictTensor(), observed(5, "cpu"), DictTensor())
        counts.append(sum(queued.names.values()))
    assert (counts[1] - counts[0]) / 8 <= 50


@pytest.mark.gpu
@pytest.mark.parametrize(("n_games", "most"), [(1, MOST_NODES), (128, 50)], ids=["bundled network", "no network"])
def test_a_simulation_is_few_nodes_of_a_graph(n_games: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution without cuDNN takes nodes for each game, so that there is one game with the network."""
    graphs: list[Any] = []
    make = partial(torch.cuda.CUDAGraph, keep_graph=True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graphs.append(make()) or graphs[-1])
    for n_simulations in (4, 12):
        agent = bundled_agent(n_simulations, "cuda:0")
        if n_games > 1:
            agent.game.network = knows_nothing
        for _ in range(3):  # eager, captured, replayed
            agent(DictTensor(), observed(n_games, "cuda:0"), DictTensor())
    few, many = map(n_nodes, graphs)
    assert (many - few) / 8 <= most


@pytest.mark.gpu
@pytest.mark.parametrize("reuse_tree", [False, True])
def test_a_captured_search_finds_the_same(reuse_tree: bool) -> None:
    """In other positions, too, and with new weights, which a replay reads."""
    config = SearchConfig(method="puct", n_simulations=8, max_depth=4, reuse_tree=reuse_tree)
    network = decided(torch.float32, torch.device("cuda:0"))
    agents = [
        SearchAgent(network, create_simulator=ConnectFour, config=replace(config, backend=backend))
        for backend in ("torch", "warp")
    ]
    game = ConnectFour(9, device="cuda:0")
    frame = game.reset()[0]
    states = [agent.initial_state(DictTensor(), 9) for agent in agents]
    for move in range(5):  # eager, captured, replayed
        rng = {"rng": child_key(torch.arange(9), move).to("cuda:0")}
        both = [
            agent(state, frame + DictTensor(rng), DictTensor()) for agent, state in zip(agents, states, strict=True)
        ]
        (expected, _), (found, _) = both
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
        states = [state for _, state in both]
        for agent in agents:
            agent.update({name: weight * (1.0 + 0.1 * move) for name, weight in network.state_dict().items()})
        frame = game.step(found)[1][0]


def n_nodes(graph: Any) -> int:
    n = ctypes.c_size_t(0)
    assert ctypes.CDLL(None).cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(n)) == 0
    return n.value


@pytest.mark.slow  # a compiler
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("method", get_args(Method))
def test_a_thread_keeps_everything_in_few_registers(method: Method, dtype: torch.dtype, tmp_path: Path) -> None:
    from cubins import LOCAL_BYTES, REGISTERS, compiled

    for number, kernel in enumerate(make_kernels(dtype, method)[2:]):
        (needs,) = (one for one in compiled(kernel.module, tmp_path / str(number)).values() if REGISTERS in one)
        assert 8 < needs[REGISTERS] <= MOST_REGISTERS[dtype]
        assert not needs.get(LOCAL_BYTES)
