"""`rlstruct play connect-four`: a game against a search in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import nn

from rlstruct.cli.messages import UserError, say
from rlstruct.cli.stored_run import load_trained
from rlstruct.core import DictTensor
from rlstruct.functional.random import step_keys
from rlstruct.options import Options, option
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.sims import ConnectFour


@dataclass(frozen=True, kw_only=True)
class Game(Options):
    """Play Connect Four in the terminal against a tree search.

    Attributes:
        run: folder of an alphazero run; None for a search that evaluates positions with random games.
        simulations: number of simulations for each of the search's moves.
        first: the player who moves first.
        seed: seed of the search.
    """

    # tyro abbreviates the options of a usage from 80 columns on; a shorter name here would make a line of 106.
    run: Annotated[Path | None, tyro.conf.arg(metavar="RUN_OF_ALPHAZERO")] = None
    simulations: int = option(400, at_least=1)
    first: Literal["you", "search"] = "you"
    seed: int = 0


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct play connect-four`` with these arguments; columns are read from standard input."""
    options: Game = tyro.cli(Game, args=arguments, prog="rlstruct play connect-four")
    torch.set_num_threads(1)
    model, who, method = _trained(options.run)
    settings = SearchConfig(method=method, n_simulations=options.simulations, max_depth=24)
    agent = SearchAgent(model, create_simulator=ConnectFour, config=settings, stochastic=False)
    say(f"You are X, the search is O ({options.simulations} simulations per move, judged by {who}).")
    play(agent, yours=options.first == "you", seed=options.seed)


def play(agent: SearchAgent, *, yours: bool, seed: int) -> None:
    """Play one game against ``agent``. ``yours`` is True if the person begins; ``seed`` seeds the search."""
    env = ConnectFour(1, auto_reset=False)
    current, _ = env.reset()
    seeds, move = torch.full((1,), seed, device="cpu"), 0
    while True:
        say(draw_board(current, yours))
        if yours:
            column = _ask(current["frame/legal"][0].tolist())  # sync: on the CPU
        else:
            key = step_keys(seeds, 0, torch.full((1,), move, device="cpu"))[0]
            answer, _ = agent(DictTensor(), current + DictTensor({"rng": key}), DictTensor())
            say(describe_search(answer))
            column = int(answer["action"])
        (reached, _), (current, _) = env.step(DictTensor({"action": torch.full((1,), column, device="cpu")}))
        move += 1
        if bool(reached["done"]):
            say(draw_board(reached, not yours))
            say(("You win." if yours else "The search wins.") if float(reached["reward"]) > 0 else "A draw.")
            return
        yours = not yours


def draw_board(observation: DictTensor, yours: bool) -> str:
    """Draw the board, ``frame/board`` [1, 2, 6, 7], whose first plane has the stones of the player to move.

    ``yours`` is True if that is the person.
    """
    marks = (".", "X", "O") if yours else (".", "O", "X")
    mine, theirs = observation["frame/board"][0].to(torch.int64)
    rows = [" ".join(marks[stone] for stone in row) for row in (mine + 2 * theirs).tolist()]  # sync: on the CPU
    return "\n".join(["", *rows, "1 2 3 4 5 6 7"])


def describe_search(answer: DictTensor) -> str:
    """Describe the search's result ([1], from `SearchAgent`): visits, policy, and who is ahead."""
    visits, policy = (answer[name][0].tolist() for name in ("action_visits", "action_policy"))  # sync: on the CPU
    value = float(answer["action_value"])
    return (
        f"column  {''.join(f'{column:>7}' for column in range(1, 8))}\n"
        f"visits  {''.join(f'{n:>7.0f}' for n in visits)}\n"
        f"policy  {''.join(f'{share:>7.1%}' for share in policy)}\n"
        f"The search plays {int(answer['action']) + 1}; it expects {value:+.2f} (+1: it wins, -1: you win)."
    )


def _ask(legal: Sequence[bool]) -> int:
    """Read a column that is not full from standard input."""
    while True:
        sys.stdout.write("Your column: ")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line or line.strip() in ("q", "quit"):
            raise KeyboardInterrupt("the game was stopped.")
        word = line.strip()
        if word.isdecimal() and 1 <= int(word) <= len(legal) and legal[int(word) - 1]:
            return int(word) - 1
        say(f"{word!r} is not a column with a free place. Type a number from 1 to 7, or q to quit.")


def _trained(run: Path | None) -> tuple[nn.Module | None, str, Literal["uct", "gumbel"]]:
    """Return the network that judges positions, its description, and the kind of search."""
    if run is None:
        return None, "random games", "uct"
    trained = load_trained(run, auto_reset=True)
    settings = trained.settings
    if (settings.algorithm, settings.task.env) != ("alphazero", "ConnectFour-v0"):
        raise UserError(
            f"--run {run}: {settings.algorithm} on {settings.task.env}, expected alphazero on ConnectFour-v0."
        )
    return trained.model, f"a network after {trained.env_steps:,} moves of self-play", "gumbel"
