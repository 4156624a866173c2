"""`rlstruct train`: an algorithm, an environment, a run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeGuard, TypeVar

import torch
import tyro

from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.config import TrainingConfig, check_resumed
from rlstruct.algos.ppo import PPOConfig
from rlstruct.algos.presets import PRESETS
from rlstruct.algos.run_folder import RunFolder
from rlstruct.algos.training import TrainingResult
from rlstruct.cli.agents import choose
from rlstruct.cli.complaint import UserError, check_device, nearest, number, say
from rlstruct.cli.environments import ATARI_STACK, GymFactory, Task, find, spaces_of
from rlstruct.cli.record import ALGORITHMS, RunRecord, config_class, load, module_of, versions
from rlstruct.errors import TrainingDiverged

Config = TypeVar("Config", bound=TrainingConfig)

_HELP = """usage: rlstruct train ALGORITHM --env NAME [OPTIONS]
       rlstruct train --config RUN [OPTIONS]
       rlstruct train --resume RUN [OPTIONS]

Train an agent; results go into a new folder under runs/. The agent is chosen to
fit the environment: a perceptron, a convolutional network for images, a
Gaussian policy for continuous actions. --recurrent gives it a memory. Settings
that were tuned for the environment hold unless you say --preset none, or other
ones; --help after ALGORITHM and --env lists them all.

  reinforce   whole episodes, a baseline; discrete and continuous actions
  a2c         some steps, one update; discrete and continuous actions
  ppo         more steps, many updates; discrete and continuous actions
  dqn         replay buffer, action values; discrete actions, no memory

  rlstruct train a2c --env CartPole-v1
  rlstruct train a2c --env CartPole-v1 --simulator torch --n-envs 1024
  rlstruct train dqn --env Breakout-MinAtar --learner-device cuda:0
  rlstruct train dqn --env MyEnv-v0 --preset Acrobot-v1
  rlstruct train --config runs/RUN --seed 1    the same again, with another seed
  rlstruct train --resume runs/RUN             go on with a run that was stopped"""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go.

    Attributes:
        runs: folder of all runs.
        name: first part of the name of the run's folder; None for algorithm, environment and seed.
        progress: show a progress bar.
        threads: threads of PyTorch in this process; None for 1 with small networks, and all cores with images.
    """

    runs: Path = Path("runs")
    name: str | None = None
    progress: bool = True
    threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class Training(Generic[Config]):
    """Settings of a training.

    Attributes:
        environment: What is to be learnt.
        training: How it is learnt, and on which devices.
        output: Where results go.
        preset: begin with the settings that were tuned for this environment; by default those for --env, and "none"
            for the defaults of the algorithm.
    """

    environment: Task
    training: Config
    output: Output = Output()
    preset: str | None = None


def run(arguments: Sequence[str]) -> None:
    """Train as the command line says.

    Args:
        arguments: after ``train``.

    Raises:
        UserError: they make no sense.
    """
    words = list(arguments)
    if not words or (words[0] in ("-h", "--help")):
        say(_HELP)
        return
    resumed, pattern = _take(words, "--resume"), _take(words, "--config")
    if resumed and pattern:
        raise UserError("--resume goes on with a run, --config begins another one like it: give one of them.")
    stored = resumed or pattern
    template = load(stored) if stored else None
    algorithm = _algorithm(words, template)
    default = (
        _preset(algorithm, words) if template is None else Training(environment=template.task, training=template.config)
    )
    options = _parse(algorithm, words, default)
    if template is not None and options.preset is not None:
        raise UserError("--preset begins with other settings than the run's: leave it out.")
    if resumed and template and options.environment != template.task:
        raise UserError(f"--resume goes on in {template.task.env} as it was. To change it begin anew, see --config.")
    notes = [] if template else [_about_preset(algorithm, options.environment.env, options.preset)]
    notes += _about_parts(words, default, options.training)
    train(algorithm, options.environment, options.training, options.output, resumed=resumed, notes=notes)


def train(
    algorithm: str,
    task: Task,
    config: TrainingConfig,
    output: Output,
    *,
    resumed: Path | None = None,
    notes: Sequence[str] = (),
) -> TrainingResult:
    """Train, and say what came of it.

    Args:
        algorithm: see `ALGORITHMS`.
        task: the environment.
        config: the settings.
        output: where results go.
        resumed: folder of a run to go on with; None begins a new one.
        notes: what else to say when it begins, line by line.

    Returns:
        As the algorithm's ``train``.

    Raises:
        UserError: the environment, a device or the agent does not exist; the run cannot go on with these settings; or
            the loss is not finite any more.
    """
    for name in ("learner_device", "batcher_device", "evaluation_device", "replay_device"):
        if (device := getattr(config, name, None)) is not None:
            check_device(f"--{name.replace('_', '-')}", device)
    factory = find(task, auto_reset=algorithm != "reinforce")
    choice = choose(algorithm, task, *spaces_of(factory))
    if algorithm == "dqn" and isinstance(factory, GymFactory) and factory.atari:
        # The replay buffer keeps each frame of a stack once: what it returns is the same.
        config = replace(config, n_stack=ATARI_STACK)  # type: ignore[call-arg]  # a field of DQNConfig
    if output.threads or choice.small:
        torch.set_num_threads(output.threads or 1)
    record = RunRecord(algorithm=algorithm, task=task, agent=choice.kind, config=config, versions=versions())
    folder = _begun(record, output) if resumed is None else _resumed(resumed, record, output)
    say(f"{algorithm} on {task.env}: {choice.kind}, learner on {config.learner_device}")
    for note in notes:
        say(note)
    say(f"run folder: {folder.path}" + ("" if folder.checkpoint is None else ", from its checkpoint"))
    try:
        with folder:
            create = choice.create_model, choice.create_agent
            result: TrainingResult = module_of(algorithm).train(config, *create, factory, run=folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped. To go on: rlstruct train --resume {folder.path}") from None
    except TrainingDiverged as error:
        raise UserError(str(error)) from None
    _tell(result, config.target_return, folder)
    return result


def _begun(record: RunRecord, output: Output) -> RunFolder:
    config = record.config
    name = output.name or f"{record.algorithm}-{record.task.env}-seed{config.seed}"
    name = name.replace("/", "-").replace(":", "-")
    return RunFolder(name, record, n_env_steps=config.n_env_steps, root=output.runs, progress=output.progress)


def _resumed(run: Path, record: RunRecord, output: Output) -> RunFolder:
    config = record.config
    try:
        folder = RunFolder.resume(run, n_env_steps=config.n_env_steps, progress=output.progress)
        try:
            if folder.checkpoint is not None:
                check_resumed(folder.checkpoint, config)
        except ValueError:
            folder.close()
            raise
        folder.save_config(record)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        raise UserError(f"--resume {run}: {error}") from None
    return folder


def _take(words: list[str], option: str) -> Path | None:
    """Take an option that names a run out of the command line."""
    if (found := _find(words, option)) is None:
        return None
    value, where = found
    if not value:
        raise UserError(f"{option}: expected the folder of a run.")
    del words[where]
    run = Path(value)
    return run if run.name != "config.json" else run.parent


def _find(words: Sequence[str], option: str) -> tuple[str, slice] | None:
    """Return the value of an option, empty if it has none, and its words."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:  # as the parser reads it
            return (value, slice(i, i + 1)) if equals else ("".join(words[i + 1 : i + 2]), slice(i, i + 2))
    return None


def _algorithm(words: list[str], template: RunRecord | None) -> str:
    """Take the algorithm from the command line, or from the run that is to be repeated."""
    if words and not words[0].startswith("-"):
        algorithm = words.pop(0)
        config_class(algorithm)  # refuses a wrong one
        if template is not None and template.algorithm != algorithm:
            raise UserError(f"the run is one of {template.algorithm}, not of {algorithm}: leave {algorithm} out.")
        return algorithm
    if template is None:
        raise UserError(f"name the algorithm first, one of {', '.join(ALGORITHMS)}: rlstruct train a2c --env NAME")
    return template.algorithm


def _parse(algorithm: str, words: list[str], default: Training[Any] | None) -> Training[Any]:
    cls = config_class(algorithm)
    described = f"Train with {algorithm.upper()}; results go into a new folder, see --runs."
    if default is not None:
        default = replace(default, training=_with_fitting_parts(default.training, words))
    known: dict[str, Any] = {} if default is None else {"default": default}
    parsed: Training[Any] = tyro.cli(
        Training[cls],  # type: ignore[valid-type]
        args=words,
        prog=f"rlstruct train {algorithm}",
        description=described,  # in 80 letters: tyro does not fold it
        config=(tyro.conf.OmitArgPrefixes,),
        **known,
    )
    return parsed


def _preset(algorithm: str, words: list[str]) -> Training[Any] | None:
    """Return what the command line begins with, None for the defaults: the parser must know it before it begins."""
    env, chosen = (found[0] if (found := _find(words, option)) else None for option in ("--env", "--preset"))
    names = [name for kind, name in PRESETS if kind == algorithm]
    name = chosen or env
    if chosen and chosen not in (*names, "none"):
        known = ", ".join([*names, "none"])
        raise UserError(f"--preset {chosen}: {algorithm} has only {known}.{nearest(chosen, names)}")
    if not env or name not in names:
        return None
    preset = PRESETS[algorithm, name]
    network = tuple(f"{key}={json.dumps(value)}" for key, value in preset.network.items())
    return Training(environment=Task(env=env, network=network), training=preset.config)


def _with_fitting_parts(config: TrainingConfig, words: Sequence[str]) -> TrainingConfig:
    """Let stored or tuned settings ask for no more minibatches than the command line has environments for them."""
    if not _splits_environments(config, words):
        return config
    n_envs = _count(words, "--n-envs", config.n_envs) * max(1, _count(words, "--n-processes", config.n_processes))
    return replace(config, n_minibatches=max(1, min(config.n_minibatches, n_envs)))


def _splits_environments(config: TrainingConfig, words: Sequence[str]) -> TypeGuard[A2CConfig | PPOConfig]:
    """Whether a minibatch is made of whole environments."""
    return isinstance(config, A2CConfig) or (isinstance(config, PPOConfig) and "--recurrent" in words)


def _count(words: Sequence[str], option: str, default: int) -> int:
    """Return the number that an option asks for; the parser complains about what is none."""
    value, _ = _find(words, option) or ("", None)
    return int(value) if value.isdecimal() else default


def _about_parts(words: Sequence[str], default: Training[Any] | None, config: TrainingConfig) -> list[str]:
    """Say that `_with_fitting_parts` has changed something."""
    if default is None or not _splits_environments(config, words) or _find(words, "--n-minibatches"):
        return []
    n, wanted = config.n_minibatches, default.training.n_minibatches
    return [] if n == wanted else [f"n_minibatches: {n} in place of {wanted}, one for each environment"]


def _about_preset(algorithm: str, env: str, chosen: str | None) -> str:
    name = chosen or env
    if (algorithm, name) in PRESETS:
        return f"settings: tuned for {name}, but for those that you give (--preset none for the defaults)"
    known = ", ".join(name for kind, name in PRESETS if kind == algorithm)
    return f"settings: the defaults, made for CartPole-v1 (--preset takes those for {known})"


def _tell(result: TrainingResult, target: float | None, folder: RunFolder) -> None:
    reached = [one for one in result.evaluations if target is not None and one.mean_return >= target]
    told = [("before training", result.before), *(("at the target", one) for one in reached[:1])]
    for when, evaluation in (*told, ("after training", result.after)):
        say(
            f"{when:>15}: return {number(evaluation.mean_return)} ± {number(evaluation.std_return)} "
            f"over {len(evaluation.returns)} episodes"
        )
    say(f"{result.env_steps:,} environment steps in {result.seconds:.1f} s")
    say(f"next: rlstruct evaluate {folder.path}   rlstruct plot {folder.path}")
