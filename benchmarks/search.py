"""Simulations per second of `rlstruct.search`, beside the MCTS of alpha-zero-general and of mctx.

    python benchmarks/search.py [--alpha-zero-general FOLDER] [--mctx PYTHON] [--simulations 64] [--games 64]

All search from the empty board of Connect Four with networks of one architecture, on one thread. FOLDER is a checkout
of github.com/suragnair/alpha-zero-general, which plays one game at a time and asks the network for one position; PYTHON
is the interpreter of an environment that has mctx and jax[cpu], where XLA has compiled the whole search of all games.
The clock is the processor's, so that other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from _report import verdict, write

from rlstruct.agents import ConvolutionalActorCritic
from rlstruct.functional.random import child_key
from rlstruct.search import GameModel, Search, SearchConfig
from rlstruct.sims import ConnectFour

PEER = Path(__file__).parent / "peers" / "mctx_search.py"
Run = Callable[[], float]
"""Searches once, and returns the seconds of the processor that it took."""


def network() -> torch.nn.Module:
    """The network that `rlstruct train alphazero` takes."""
    torch.manual_seed(0)
    return ConvolutionalActorCritic((2, 6, 7), 7, n_features=96, layers=[(64, 4, 1)])


def ours(n_games: int, n_simulations: int, method: str) -> Run:
    """All games at once."""
    env = ConnectFour(n_games)
    env.reset()
    config: Any = {"method": method, "n_simulations": n_simulations}
    game = GameModel(env, network())
    search = Search(game, SearchConfig(**config))
    key = child_key(torch.arange(n_games), 0)

    @torch.no_grad()
    def run() -> float:
        start = time.process_time()
        search(game.begin(env.get_state(), key), key)
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
    parser.add_argument("--alpha-zero-general", type=Path, help="a checkout; without it that contender is left out")
    parser.add_argument("--mctx", help="an interpreter; without it that contender is left out")
    parser.add_argument("--simulations", type=int, default=64)
    parser.add_argument("--games", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    n, games = options.simulations, options.games
    runs: dict[str, tuple[Run, int]] = {
        f"rlstruct {method}": (ours(games, n, method), games) for method in ("puct", "gumbel")
    }
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
    for name, target in (("alpha-zero-general", 10.0), ("mctx puct", None), ("mctx gumbel", None)):
        mine = "rlstruct gumbel" if name.endswith("gumbel") else "rlstruct puct"
        if name in rates:
            ratio = rates[mine] / rates[name]
            rows.append({"ratio": f"{mine} / {name}", "value": ratio})
            sys.stdout.write(f"{mine} / {name}: {ratio:.2f} {'' if target is None else verdict(ratio, target)}\n")
    sys.stdout.write(f"{write('search', rows)}\n")


if __name__ == "__main__":
    main()
