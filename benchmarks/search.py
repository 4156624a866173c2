"""Simulations per second of `rlstruct.search`, beside the MCTS of LightZero, alpha-zero-general and mctx.

    python benchmarks/search.py [--lightzero WHEEL] [--alpha-zero-general FOLDER] [--mctx PYTHON]

All search from the empty board of Connect Four with networks of one architecture, on one thread. WHEEL is the unpacked
wheel of LightZero (``pip download --no-deps LightZero``): its tree of MuZero, in C++, in all games at once, called as
its own ``MuZeroMCTSCtree.search`` does, with our simulator in place of a learned model. FOLDER is a checkout of
github.com/suragnair/alpha-zero-general, which plays one game at a time and asks the network for one position. PYTHON is
the interpreter of an environment that has mctx and jax[cpu], where XLA has compiled the whole search of all games. The
clock is the processor's, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _report import verdict, write

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.functional.random import child_key
from rlstruct.search import GameModel, Search, SearchConfig
from rlstruct.sims import ConnectFour, ConnectFourState

PEER = Path(__file__).parent / "peers" / "mctx_search.py"
Run = Callable[[], float]
"""Searches once, and returns the seconds of the processor that it took."""


def network() -> torch.nn.Module:
    """The network that `rlstruct train alphazero` takes."""
    torch.manual_seed(0)
    return ConvolutionalActorCritic((2, 6, 7), 7, n_features=96, layers=[(64, 4, 1)])


def ours(n_games: int, n_simulations: int, method: str, *, compiled: bool = False) -> Run:
    """All games at once."""
    env = ConnectFour(n_games)
    env.reset()
    config: Any = {"method": method, "n_simulations": n_simulations, "compiled": compiled}
    game = GameModel(env, network())
    search = Search(game, SearchConfig(**config))
    key = child_key(torch.arange(n_games), 0)

    @torch.no_grad()
    def run() -> float:
        start = time.process_time()
        search(game.begin(env.get_state(), key), key)
        return time.process_time() - start

    return run


def lightzero(folder: Path, n_games: int, n_simulations: int) -> Run:
    """All games at once, in LightZero's C++ tree of MuZero; states and answers pass through lists, as there."""
    (file,) = folder.glob("lzero/mcts/ctree/ctree_muzero/mz_tree*.so")
    loader = ExtensionFileLoader("mz_tree", str(file))
    spec = importlib.util.spec_from_file_location("mz_tree", file, loader=loader)
    assert spec is not None
    tree: Any = importlib.util.module_from_spec(spec)
    loader.exec_module(tree)
    game, model = ConnectFour(1), network()

    def judge(state: ConnectFourState) -> tuple[list[list[float]], list[float]]:
        logits, value = model(game.observe(state)["board"])
        return logits.tolist(), value.tolist()

    @torch.no_grad()
    def run() -> float:
        start = time.process_time()
        states = [np.zeros((n_games, 2), dtype=np.int64)]
        roots = tree.Roots(n_games, [list(range(7))] * n_games)
        logits, _ = judge(ConnectFourState(*torch.from_numpy(states[0]).unbind(1)))
        roots.prepare_no_noise([0.0] * n_games, logits, [1] * n_games)
        least_and_most = tree.MinMaxStatsList(n_games)
        least_and_most.set_delta(0.01)
        for i in range(n_simulations):
            results = tree.ResultsWrapper(num=n_games)
            at, rows, actions, to_play = tree.batch_traverse(
                roots, 19652, 1.25, 1.0, least_and_most, results, [1] * n_games
            )
            found = np.asarray([states[depth][row] for depth, row in zip(at, rows, strict=True)])
            before = ConnectFourState(*torch.from_numpy(found).unbind(1))
            after, reward, _ = game.transition(before, torch.from_numpy(np.asarray(actions)).long(), torch.empty(0))
            logits, value = judge(after)
            states.append(torch.stack([after.mine, after.theirs], 1).numpy())
            tree.batch_backpropagate(i + 1, 1.0, reward.tolist(), value, logits, least_and_most, results, to_play)
        return time.process_time() - start

    return run


def alpha_zero_general(folder: Path, n_simulations: int) -> Run:
    """One game, in a tree of dictionaries; the network is asked through numpy, as there."""
    sys.path.insert(0, str(folder))
    vars(np)["int"] = int  # the name that numpy had for it when this was written
    game = importlib.import_module("connect4.Connect4Game").Connect4Game()
    game.stringRepresentation = lambda board: board.tobytes()  # was tostring()
    mcts = importlib.import_module("MCTS").MCTS
    model = network()

    @torch.no_grad()
    def predict(board: np.ndarray) -> tuple[np.ndarray, float]:
        stones = torch.as_tensor(board.copy())
        logits, value = model(torch.stack([stones == 1, stones == -1]).unsqueeze(0))
        return logits[0].softmax(0).numpy(), float(value)

    arguments = type("Arguments", (SimpleNamespace,), {"__contains__": lambda self, name: hasattr(self, name)})

    def run() -> float:
        tree = mcts(game, SimpleNamespace(predict=predict), arguments(numMCTSSims=n_simulations, cpuct=1.25))
        start = time.process_time()
        tree.getActionProb(game.getInitBoard())
        return time.process_time() - start

    return run


def mctx(python: str, n_games: int, n_simulations: int, method: str) -> Run:
    """A process that searches once for every line that it reads, and writes the seconds."""
    command = [python, str(PEER), str(n_games), str(n_simulations), method]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    return run


def main() -> None:
    """Measure in turn, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lightzero", type=Path, help="an unpacked wheel; without it that contender is left out")
    parser.add_argument("--alpha-zero-general", type=Path, help="a checkout; without it that contender is left out")
    parser.add_argument("--mctx", help="an interpreter; without it that contender is left out")
    parser.add_argument("--simulations", type=int, default=64)
    parser.add_argument("--games", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n, games = options.simulations, options.games
    runs: dict[str, tuple[Run, int]] = {
        f"rlstruct {method}{', compiled' if compiled else ''}": (ours(games, n, method, compiled=compiled), games)
        for compiled in (False, True)
        for method in ("puct", "gumbel")
    }
    if options.lightzero:
        runs["LightZero"] = lightzero(options.lightzero.resolve(), games, n), games
    if options.alpha_zero_general:
        runs["alpha-zero-general"] = alpha_zero_general(options.alpha_zero_general.resolve(), n), 1
    if options.mctx:
        for method in ("puct", "gumbel"):
            runs[f"mctx {method}"] = mctx(options.mctx, games, n, method), games
    for run, _ in runs.values():
        run()  # warms up, and compiles
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(max(5, options.repeats)):
        for name, (run, _) in runs.items():
            seconds[name].append(run())
    rates = {name: runs[name][1] * n / statistics.median(taken) for name, taken in seconds.items()}
    rows: list[dict[str, Any]] = []
    for name, rate in rates.items():
        rows.append({"contender": name, "games": runs[name][1], "simulations": n, "simulations_per_second": rate})
        sys.stdout.write(f"{name:<20} {rate:>12,.0f} simulations/s\n")
    asked = (("LightZero", 10.0), ("alpha-zero-general", 10.0), ("mctx puct", None), ("mctx gumbel", None))
    for name, target in asked:
        mine = "rlstruct gumbel, compiled" if name.endswith("gumbel") else "rlstruct puct, compiled"
        if name in rates:
            ratio = rates[mine] / rates[name]
            rows.append({"ratio": f"{mine} / {name}", "value": ratio})
            sys.stdout.write(f"{mine} / {name}: {ratio:.2f} {'' if target is None else verdict(ratio, target)}\n")
    for method in ("puct", "gumbel"):
        ratio = rates[f"rlstruct {method}, compiled"] / rates[f"rlstruct {method}"]
        rows.append({"ratio": f"rlstruct {method}, compiled / eager", "value": ratio})
        sys.stdout.write(f"rlstruct {method}, compiled / eager: {ratio:.2f}\n")
    sys.stdout.write(f"{write('search', rows)}\n")


if __name__ == "__main__":
    main()
