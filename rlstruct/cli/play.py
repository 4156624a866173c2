"""`rlstruct play`: film an agent; or play Connect Four against a search in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import nn

from rlstruct.agents import RandomAgent
from rlstruct.algos import ALGORITHMS
from rlstruct.cli.environments import Factory, Task, find, spaces_of
from rlstruct.cli.film import check_path, film
from rlstruct.cli.messages import UserError, say
from rlstruct.cli.stored_run import load_trained
from rlstruct.core import DictTensor
from rlstruct.functional.random import step_keys
from rlstruct.options import Options, option
from rlstruct.rl_agent import RL_Agent
from rlstruct.search import SearchAgent, SearchConfig
from rlstruct.sims import ConnectFour
from rlstruct.sims.tensor_env import Backend


@dataclass(frozen=True, kw_only=True)
class Play(Options):
    """Film an environment with random actions, or with the agent of a run.

    rlstruct play connect-four lets you play against a search in the terminal.

    Attributes:
        what: name of an environment, such as Breakout-MinAtar, or the folder of a run.
        simulator: use the bundled simulator, and this backend of it, such as warp for Atari games.
        out: output file: a film (.gif, .mp4), or a contact sheet (.png). By default play-NAME.gif.
        steps: number of steps.
        n_envs: number of environments, side by side.
        seed: seed of environments and agent.
        factory: for a run of your own program: its factories, see rlstruct evaluate --help.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV|RUN")]
    simulator: Backend | None = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    steps: int = option(200, at_least=1)
    n_envs: int = option(1, at_least=1, at_most=64)
    seed: int = 0
    factory: tuple[str, ...] = ()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct play`` with these arguments."""
    if arguments[:1] == ["connect-four"]:
        _play_connect_four(arguments[1:])
        return
    options: Play = tyro.cli(Play, args=arguments, prog="rlstruct play")
    out = options.out or Path(f"play-{Path(options.what).name}.gif")
    check_path(out)
    factory, agent, who = _actor(options.what, options.simulator, options.factory)
    wanted = {"n_envs": options.n_envs, "n_steps": options.steps, "seed": options.seed}
    n = film(factory, agent, out, **wanted, one_episode=False)
    say(f"{out}: {n} frames of {factory.name}, {who}")


def _actor(what: str, simulator: Backend | None, factories: Sequence[str]) -> tuple[Factory, RL_Agent, str]:
    if Path(what).is_dir():
        if simulator is not None:
            raise UserError(f"--simulator {simulator}: the run {what} has its own simulator. Omit --simulator.")
        trained = load_trained(Path(what), auto_reset=True, factories=factories)
        stochastic = trained.settings.config.evaluation_stochastic
        create_agent, algorithm = trained.choice.create_agent, ALGORITHMS.get(trained.settings.algorithm)
        if algorithm is not None and algorithm.arrange is not None:
            _, create_agent, _ = algorithm.arrange(trained.settings.config, create_agent, trained.factory)
        agent = create_agent(trained.model, stochastic=stochastic)
        return trained.factory, agent, f"{trained.settings.algorithm} after {trained.env_steps:,} environment steps"
    factory = find(Task(env=what, simulator=simulator), auto_reset=True)
    return factory, RandomAgent(spaces_of(factory)[1]), "acting at random"


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


def _play_connect_four(arguments: Sequence[str]) -> None:
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
            found, _ = agent(DictTensor(), current + DictTensor({"rng": key}), DictTensor())
            say(describe_search(found))
            column = int(found["action"])
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


def describe_search(found: DictTensor) -> str:
    """Describe the search's result ([1], from `SearchAgent`): visits, policy, and who is ahead."""
    visits, policy = (found[name][0].tolist() for name in ("action_visits", "action_policy"))  # sync: on the CPU
    value = float(found["action_value"])
    return (
        f"column  {''.join(f'{column:>7}' for column in range(1, 8))}\n"
        f"visits  {''.join(f'{n:>7.0f}' for n in visits)}\n"
        f"policy  {''.join(f'{share:>7.1%}' for share in policy)}\n"
        f"The search plays {int(found['action']) + 1}; it expects {value:+.2f} (+1: it wins, -1: you win)."
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
