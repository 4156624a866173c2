"""`rlstruct play`: film an agent; or play Connect Four against a search in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rlstruct.agents import RandomAgent
from rlstruct.algos import ALGORITHMS
from rlstruct.algos.seeds import seed_range
from rlstruct.cli.commands import connect_four
from rlstruct.cli.film import check_path, film
from rlstruct.cli.messages import UserError, say
from rlstruct.cli.stored_run import load_trained, read_settings
from rlstruct.cli.tasks import Factory, Task, find, spaces_of
from rlstruct.core import DictTensor
from rlstruct.options import Options, option
from rlstruct.rl_agent import RL_Agent
from rlstruct.sims.tensor_env import Backend


@dataclass(frozen=True, kw_only=True)
class Play(Options):
    """Film an environment with random actions, or with the agent of a run.

    rlstruct play connect-four lets you play against a search in the terminal.

    Attributes:
        what: name of an environment, such as Breakout-MinAtar, or the folder of a run.
        simulator: use the bundled simulator, and this backend of it, such as warp for Atari games.
        out: output file: a film (.gif, .mp4), or a contact sheet (.png). By default play-NAME.gif.
        steps: number of steps in each environment.
        n_envs: number of environments, side by side.
        seed: seed of environments and agent.
        factory: for a run of your own program: its factories, see rlstruct evaluate --help.
    """

    what: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV|RUN")]
    simulator: Backend | None = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    steps: int = option(200, at_least=1)
    n_envs: int = option(1, at_least=1, at_most=64)
    seed: int = option(0, at_least=0)
    factory: tuple[str, ...] = ()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct play`` with these arguments."""
    if arguments[:1] == ["connect-four"]:
        connect_four.run(arguments[1:])
        return
    options: Play = tyro.cli(Play, args=arguments, prog="rlstruct play")
    out = options.out or Path(f"play-{Path(options.what).name}.gif")
    check_path(out)
    factory, agent, info, who = _actor(options.what, options.simulator, options.factory)
    seed = seed_range("film", options.seed, options.n_envs)[0]
    n = film(factory, agent, out, n_envs=options.n_envs, n_steps=options.steps, seed=seed, agent_info=info)
    say(f"{out}: {n} frames of {factory.name}, {who}")


def _actor(what: str, simulator: Backend | None, factories: Sequence[str]) -> tuple[Factory, RL_Agent, DictTensor, str]:
    if Path(what).is_dir():
        if simulator is not None:
            raise UserError(f"--simulator {simulator}: the run {what} has its own simulator. Omit --simulator.")
        trained = load_trained(Path(what), auto_reset=False, factories=factories)
        stochastic = trained.settings.config.evaluation_stochastic
        create_agent, algorithm = trained.choice.create_agent, ALGORITHMS.get(trained.settings.algorithm)
        if algorithm is not None and algorithm.arrange is not None:
            _, create_agent, _ = algorithm.arrange(trained.settings.config, create_agent, trained.factory)
        agent = create_agent(trained.model, stochastic=stochastic)
        who = f"{trained.settings.algorithm} after {trained.env_steps:,} environment steps"
        return trained.factory, agent, trained.sampling(agent, 1, stochastic=stochastic), who
    if Path(what).parent != Path() and Path(what).parent.is_dir():
        read_settings(Path(what))  # raises: there is no such run
    factory = find(Task(env=what, simulator=simulator), auto_reset=False)
    return factory, RandomAgent(spaces_of(factory)[1]), DictTensor(), "acting at random"
