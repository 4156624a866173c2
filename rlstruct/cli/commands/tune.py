"""`rlstruct tune`: find the fastest number of workers, environments and steps on this machine."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from rlstruct.algos.training.build import DeviceEnvFactory
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.algos.training.presets import PRESETS
from rlstruct.batchers.workers.placement import Mode
from rlstruct.cli.agents import algorithm_of, prepare, with_stacks
from rlstruct.cli.messages import UserError, check_device, check_output, say
from rlstruct.cli.stored_run import RunSettings, versions
from rlstruct.cli.tasks import Task, imported, read_settings, registered_id
from rlstruct.cli.tune_learners import rate_of, tune_learners
from rlstruct.core import Trajectories
from rlstruct.device import resolve_device
from rlstruct.sharing.tuning.tune import Tuning, default_sharing, tune

_HALF = 0.5  # progress of the training that probes imitate; by then every algorithm learns

_HELP = """usage: rlstruct tune ALGORITHM --env NAME [OPTIONS]
       rlstruct tune MODULE:CREATE_AGENT MODULE:CREATE_ENV [OPTIONS]

Find the number of workers, environments and steps that collects fastest on this
machine or, with --learn, trains fastest. Short probes give a table, which says
why the search continued or stopped, and the answer: options to paste and, with
--out, a folder for rlstruct train --config, or of your own agent a file of
arguments. Probes expected to exceed --memory-limit are not started.

  rlstruct tune ppo --env CartPole-v1
  rlstruct tune ppo --env CartPole-v1 --learn --out runs/tuned
  rlstruct train --config runs/tuned               train with the answer
  rlstruct tune my_module:create_agent my_module:create_env --out tuned.json

--help after the names lists all options."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """Options of the search and of its output.

    Attributes:
        n_processes: numbers of workers to choose from; by default 0, 1, 2, 4, … as long as that is faster.
        n_envs: numbers of environments per process to choose from; by default powers of 2.
        n_timesteps: numbers of steps per batch to choose from. By default 8, 32 and 128, but for an algorithm only
            its own number, because another one changes how it learns.
        sharing: modes in which workers may share a GPU.
        device: device of agent and environments.
        memory_limit: GiB that may be in use; by default 80 % of the available memory.
        alpha: go on while speed grows by more than alpha times the memory; by default the noise, 0.02 to 0.03.
        seconds: time limit; a probe that would probably exceed it is not started.
        out: write the answer here: for an algorithm a folder for rlstruct train --config, else a JSON file.
        cache: file that stores answers by hardware, versions and factories.
        again: measure even if the cache has an answer.
        progress: show a progress bar.
        threads: PyTorch threads in this process.
    """

    n_processes: tuple[int, ...] | None = None
    n_envs: tuple[int, ...] | None = None
    n_timesteps: tuple[int, ...] | None = None
    sharing: tuple[Mode, ...] | None = None
    device: str = "cpu"
    memory_limit: float | None = None
    alpha: float | None = None
    seconds: float = 60.0
    out: Path | None = None
    cache: Path = Path("runs/tuning.json")
    again: bool = False
    progress: bool = True
    threads: int = 1


@dataclass(frozen=True, kw_only=True)
class TuneTraining:
    """Tune an algorithm of rlstruct in an environment.

    Attributes:
        environment: The environment to train on.
        search: Options of the search.
        learn: also learn from every batch, to find what trains fastest instead of what collects fastest.
        n_learners: afterwards train with these numbers of learners, in rising order, each learner with the fastest
            settings of a single one. On a GPU they share it. By default only one learner.
        gpus: find the answer for this many GPUs: measured on the visible ones, projected beyond;
            only with --device cuda:0.
    """

    environment: Task
    search: TuneOptions = TuneOptions()
    learn: bool = False
    n_learners: tuple[int, ...] | None = None
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class TuneFactories:
    """Tune an agent and environments that two functions create.

    Attributes:
        search: Options of the search.
        agent_args: arguments of the first function, each as KEY=VALUE.
        env_args: arguments of the second function, each as KEY=VALUE, without n_envs and seed.
    """

    search: TuneOptions = TuneOptions()
    agent_args: tuple[str, ...] = ()
    env_args: tuple[str, ...] = ()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct tune`` with these arguments."""
    words = list(arguments)
    if not words or words[0] in ("-h", "--help"):
        say(_HELP)
        return
    if ":" in words[0]:
        if len(words) < 2 or ":" not in words[1]:
            raise UserError("name both factories: rlstruct tune my_module:create_agent my_module:create_env")
        options: TuneFactories = _parse(TuneFactories, words[2:], f"rlstruct tune {words[0]} {words[1]}")
        answer = _search(
            options.search,
            imported(words[0]),
            imported(words[1]),
            (8, 32, 128),
            agent_args=read_settings("--agent-args", options.agent_args, "hidden=64"),
            env_args=read_settings("--env-args", options.env_args, "difficulty=3"),
        )
        if options.search.out is not None:
            file = answer.save(options.search.out)
            again = "agent_args=…, " if options.agent_args else ""
            read = f"**json.loads(Path({str(file)!r}).read_text())"
            say(f"to use it: RL_Batcher(create_agent=…, create_env=…, {again}{read})")
        return
    algorithm_of(words[0])  # raises an error for an unknown algorithm
    _tune_training(words[0], _parse(TuneTraining, words[1:], f"rlstruct tune {words[0]}"))


def _parse(cls: type[Any], words: Sequence[str], program: str) -> Any:  # noqa: ANN401 - of that kind
    options = tyro.cli(cls, args=words, prog=program, config=(tyro.conf.OmitArgPrefixes,))
    check_device("--device", options.search.device)
    check_output("--cache", options.search.cache)
    if options.search.out is not None:
        check_output("--out", options.search.out, folder=cls is TuneTraining)
        if cls is TuneTraining and any(
            (options.search.out / name).exists() for name in ("checkpoint.pt", "metrics.csv")
        ):
            raise UserError(
                f"--out {options.search.out}: it is the folder of a training, whose settings would be lost. Pass "
                "another folder."
            )
    return options


def _tune_training(algorithm: str, request: TuneTraining) -> None:
    task, options = request.environment, request.search
    if request.n_learners is None and request.gpus is not None:
        raise UserError("--gpus needs --n-learners: it projects the speed of trainings.")
    if request.gpus is not None and (request.gpus < 1 or resolve_device(options.device).type != "cuda"):
        raise UserError(
            f"--gpus {request.gpus} --device {options.device}: expected at least one GPU, and to measure "
            "on one, from which more can be projected. Pass --device cuda:0, or omit --gpus."
        )
    if request.n_learners is not None and sorted({n for n in request.n_learners if n > 0}) != [*request.n_learners]:
        raise UserError(
            f"--n-learners: expected increasing numbers, at least 1, got {' '.join(map(str, request.n_learners))}."
        )
    preset = PRESETS.get((algorithm, registered_id(task.env)))
    learner = algorithm_of(algorithm).learner
    config = replace(
        preset.config if preset else learner.settings(), learner_device=options.device, batcher_device=options.device
    )
    if preset and not task.network:
        task = replace(task, network=tuple(f"{key}={json.dumps(value)}" for key, value in preset.network.items()))
    factory, choice = prepare(algorithm, task)
    config = with_stacks(config, factory.stack)
    model, create_agent, arrange = choice.create_model(), choice.create_agent, algorithm_of(algorithm).arrange
    if arrange is not None:
        _, create_agent, _ = arrange(config, create_agent, factory)

    learner_args = algorithm, config, create_agent, model
    agent_args = {"model": model, "copy_model": True, "device": options.device, "stochastic": True}
    answer = _search(
        options,
        create_agent,
        DeviceEnvFactory(factory, options.device),
        (config.n_timesteps,),
        fewest=getattr(config, "n_minibatches", 1) if request.learn else 1,
        agent_args=agent_args,
        agent_info=_create_learner(*learner_args).agent_info(_HALF, 1),
        create_learner=partial(_create_learn, *learner_args) if request.learn else None,
    )
    tuned = replace(config, **answer.settings())
    if request.n_learners is not None:
        sharing = (options.sharing or [default_sharing(resolve_device(options.device))])[0]
        factories = choice.create_model, choice.create_agent, factory
        rate = partial(rate_of, algorithm, factories, max(2.0, options.seconds / 20))
        tuned = tune_learners(tuned, request.n_learners, request.gpus, sharing, rate)
    if options.out is not None:
        settings = RunSettings(algorithm=algorithm, task=task, agent=choice.kind, config=tuned, versions=versions())
        (options.out / "config.json").write_text(json.dumps(asdict(settings), indent=2, default=str) + "\n")
        say(f"to use it: rlstruct train --config {options.out}")
    default = f"--n-processes {config.n_processes} --n-envs {config.n_envs} --n-timesteps {config.n_timesteps}"
    say(f"default: {default}\nMore steps per update may need another learning rate.")


def _create_learner(algorithm: str, config: TrainingConfig, create_agent: Callable[..., Any], model: nn.Module) -> Any:  # noqa: ANN401 - of that algorithm
    """Create a learner with a copy of the network."""
    own = copy.deepcopy(model).to(config.learner_device)
    return algorithm_of(algorithm).learner.create(own, create_agent, config)


def _create_learn(*learner_args: Any) -> Callable[[Trajectories], Any]:  # noqa: ANN401 - see `_create_learner`
    """Create a function that learns from batches. As arguments of a partial, its inputs are part of the cache key."""
    learner = _create_learner(*learner_args)

    def learn(batch: Trajectories) -> Any:  # noqa: ANN401 - weights by name
        learner.update(batch, _HALF)
        return learner.model.state_dict()

    return learn


def _search(
    options: TuneOptions,
    create_agent: Callable[..., Any],
    create_env: Callable[..., Any],
    n_timesteps: tuple[int, ...],
    fewest: int = 1,
    **arguments: Any,  # noqa: ANN401 - of tune
) -> Tuning:
    """Tune, and print the answer."""
    torch.set_num_threads(options.threads)
    arguments_of_tune = asdict(options)
    del arguments_of_tune["out"], arguments_of_tune["threads"]
    if options.n_envs is None and fewest > 1:  # minibatches are split by environments
        arguments_of_tune["n_envs"] = tuple(2**i for i in range(13) if 2**i >= fewest)
    if options.memory_limit is not None:
        arguments_of_tune["memory_limit"] = options.memory_limit * 2**30
    arguments_of_tune |= {"n_timesteps": options.n_timesteps or n_timesteps, **arguments}
    try:
        answer = tune(create_agent, create_env, **arguments_of_tune)
    except (ValueError, TypeError) as error:
        if str(error).startswith(("tune: ", "RL_Batcher: ")):
            raise UserError(str(error)) from None
        raise
    say(str(answer))
    rates = {probe.candidate: probe.measured.rate for probe in answer.probes if probe.measured is not None}
    if rates.get(answer.best, 0.0) < max(rates.values(), default=0.0):
        say("FASTEST won when timed in alternation with the others; steps/s of other rows\n"
            "were measured at different moments, so a slower row may show a higher number.")  # fmt: skip
    return answer
