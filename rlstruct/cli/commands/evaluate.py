"""`rlstruct evaluate`: whole episodes of a trained agent, and a film of one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Annotated, Literal

import torch
import tyro

from rlstruct.algos.seeds import seed_range
from rlstruct.algos.training.build import DeviceEnvFactory, threads_for
from rlstruct.algos.training.evaluation import Evaluator, format_return
from rlstruct.batchers import RL_Batcher
from rlstruct.cli.agents import searching
from rlstruct.cli.film import check_path, film
from rlstruct.cli.messages import UserError, check_device, check_output, say
from rlstruct.cli.stored_run import Trained, load_trained
from rlstruct.options import Options, option

_AT_ONCE = 100  # environments in one batch, at most
_STEPS = 64  # per batch; longer batches of images would take too much memory


@dataclass(frozen=True, kw_only=True)
class Evaluate(Options):
    """Play whole episodes with the agent of a run, on seeds that it never saw.

    Attributes:
        run: run folder.
        episodes: number of episodes.
        video: also record one more episode, as a film (.gif, .mp4) or a contact sheet (.png).
        out: write the return and length of every episode to this JSON file.
        device: device of agent and environments.
        actions: sampled, as in training, or the best ones; None for the same as in the training's evaluations.
        evaluation_step_limit: steps after which an episode is cut, with a warning; None for the limit of the
            training's evaluations.
        seed: seed of environments and agent.
        factory: for a run of your own program: its create_env as module:function, and also create_model and
            create_agent if the checkpoint does not describe them.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    episodes: int = option(100, at_least=1)
    video: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    device: str = "cpu"
    actions: Literal["sampled", "best"] | None = None
    evaluation_step_limit: int | None = option(None, at_least=1)
    seed: int = option(0, at_least=0)
    factory: tuple[str, ...] = ()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct evaluate`` with these arguments."""
    options: Evaluate = tyro.cli(Evaluate, args=arguments, prog="rlstruct evaluate")
    if options.video is not None:
        check_path(options.video)
    if options.out is not None:
        check_output("--out", options.out)
    check_device("--device", options.device)
    seeds = seed_range("test", options.seed, _AT_ONCE + 1)  # the last one is the film's
    trained = load_trained(options.run, auto_reset=False, factories=options.factory)
    own = None if options.factory else searching(trained.settings.algorithm)
    if own is not None:
        _write(options, trained, **own.evaluate(trained, options))
        return
    config = trained.settings.config
    stochastic = config.evaluation_stochastic if options.actions is None else options.actions == "sampled"
    step_limit = options.evaluation_step_limit or config.evaluation_step_limit
    torch.set_num_threads(threads_for(trained.model))
    if options.video is not None:  # first, because it may turn out that the environment cannot be drawn
        agent = trained.choice.create_agent(trained.model, stochastic=stochastic, device="cpu")
        info, seed = trained.sampling(agent, 1, stochastic=stochastic), seeds[_AT_ONCE]
        n = film(
            trained.factory, agent, options.video, n_envs=1, n_steps=step_limit, seed=seed, agent_info=info,
            one_episode=True,
        )  # fmt: skip
        say(f"{options.video}: one episode, {n} frames")
    returns, lengths = episodes(
        trained, options.episodes, options.device, seeds[0], stochastic=stochastic, step_limit=step_limit
    )
    say(f"{trained.settings.algorithm} on {trained.settings.task.env}, after {trained.env_steps:,} environment steps")
    actions = "sampled" if stochastic else "best"
    mean, deviation, middle, low, high = (format_return(of(returns)) for of in (fmean, pstdev, median, min, max))
    say(f"{len(returns)} episodes, {actions} actions: return {mean} ± {deviation} (standard deviation)")
    say(f"median {middle}, from {low} to {high}; {fmean(lengths):.0f} steps each")
    _write(options, trained, returns=returns, lengths=lengths, actions=actions)


def _write(options: Evaluate, trained: Trained, **results: object) -> None:
    """Write the results to ``--out``, if given."""
    if options.out is None:
        return
    run_facts = {"run": str(options.run), "algorithm": trained.settings.algorithm, "env": trained.settings.task.env}
    text = json.dumps({**run_facts, "env_steps": trained.env_steps, "seed": options.seed, **results}, indent=1)
    try:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    except OSError as error:
        raise UserError(f"--out {options.out}: cannot be written: {error.strerror}.") from None
    say(f"{options.out}")


def episodes(
    trained: Trained, n: int, device: str, seed: int, *, stochastic: bool, step_limit: int | None = None
) -> tuple[list[float], list[int]]:
    """Play ``n`` whole episodes, equally many per environment, so that short ones are not overrepresented.

    Returns the return and the length of each episode; after ``step_limit`` steps it is cut, with a warning.
    """
    rounds = -(-n // _AT_ONCE)
    n_envs = -(-n // rounds)
    agent = trained.choice.create_agent(trained.model, stochastic=stochastic)
    info = trained.sampling(agent, n_envs, stochastic=stochastic)
    returns: list[float] = []
    lengths: list[int] = []
    with RL_Batcher(
        _STEPS,
        trained.choice.create_agent,
        DeviceEnvFactory(trained.factory, device),
        agent_args={"model": trained.model, "stochastic": stochastic, "device": device},
        env_args={"n_envs": n_envs},
        n_processes=0,
        seed=seed,
        device=device,
    ) as batcher:
        evaluator = Evaluator(batcher, step_limit=step_limit, agent_info=info)
        for _ in range(rounds):
            evaluator.start(trained.model.state_dict(), env_steps=trained.env_steps, policy_version=0)
            result = evaluator.wait()
            returns += result.returns
            lengths += result.lengths
    return returns[:n], lengths[:n]  # drop surplus environments of the last round by position, not by result
