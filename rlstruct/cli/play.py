"""`rlstruct play`: see what an agent sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlstruct.agents import RandomAgent
from rlstruct.cli import connect_four
from rlstruct.cli.complaint import UserError, say
from rlstruct.cli.environments import Factory, Task, find, look_at
from rlstruct.cli.film import check_path, film
from rlstruct.cli.record import load_trained
from rlstruct.rl_agent import RL_Agent
from rlstruct.sims.tensor_env import Backend


@dataclass(frozen=True, kw_only=True)
class Play:
    """Show an environment in pictures: acting at random, or the agent of a run.

    rlstruct play connect-four lets you play against a search in the terminal.

    Attributes:
        what: name of an environment, such as Breakout-MinAtar, or the folder of a run.
        simulator: draw the bundled simulator of this name, such as warp for games of Atari.
        out: where to write: a film (.gif, .mp4), or a sheet of pictures (.png). By default play-NAME.gif.
        steps: how many steps.
        n_envs: how many environments, side by side.
        seed: of environments and agent.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV|RUN")]
    simulator: Backend | None = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    steps: int = 200
    n_envs: int = 1
    seed: int = 0


def run(arguments: Sequence[str]) -> None:
    """Draw as the words after ``play`` say."""
    if arguments[:1] == ["connect-four"]:
        connect_four.run(arguments[1:])
        return
    options: Play = tyro.cli(Play, args=arguments, prog="rlstruct play")
    if options.steps < 1 or not 1 <= options.n_envs <= 64:
        raise UserError("expected --steps of at least 1 and --n-envs from 1 to 64.")
    out = options.out or Path(f"play-{Path(options.what).name}.gif")
    check_path(out)
    factory, agent, who = _actor(options.what, options.simulator)
    wanted = {"n_envs": options.n_envs, "n_steps": options.steps, "seed": options.seed}
    n = film(factory, agent, out, **wanted, one_episode=False)
    say(f"{out}: {n} pictures of {factory.name}, {who}")


def _actor(what: str, simulator: Backend | None) -> tuple[Factory, RL_Agent, str]:
    if Path(what).is_dir():
        if simulator is not None:
            raise UserError(
                f"--simulator {simulator}: the run {what} knows how its environments are stepped. Leave it out."
            )
        trained = load_trained(Path(what), auto_reset=True, render=True)
        stochastic = trained.record.config.evaluation_stochastic
        agent = trained.choice.create_agent(trained.model, stochastic=stochastic)
        return trained.factory, agent, f"{trained.record.algorithm} after {trained.env_steps:,} environment steps"
    factory = find(Task(env=what, simulator=simulator), auto_reset=True, render=True)
    return factory, RandomAgent(look_at(factory, lambda env: env.action_space)), "acting at random"
