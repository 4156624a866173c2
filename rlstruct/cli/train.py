"""`rlstruct train`: an algorithm, an environment, a run folder."""

from __future__ import annotations

import errno
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import tyro

from rlstruct.algos import ALGORITHMS
from rlstruct.algos.config import TrainingConfig, check_resumed, load_config
from rlstruct.algos.evaluation import TrainingResult
from rlstruct.algos.launch import launched_rank, share_gpus
from rlstruct.algos.run_folder import RunFolder
from rlstruct.cli.agents import AgentChoice, choose, with_stacks
from rlstruct.cli.complaint import UserError, check_device, plural, refused, require, say
from rlstruct.cli.environments import Factory, Task, find, spaces_of
from rlstruct.cli.presets import peek, settings_for
from rlstruct.cli.record import RunRecord, algorithm_of, load, load_trained, versions
from rlstruct.errors import LearnerError, WorkerError

_LEARNERS = re.compile("^--learners(?==|$)")
Config = TypeVar("Config", bound=TrainingConfig)

_HELP = """usage: rlstruct train ALGORITHM --env NAME [OPTIONS]
       rlstruct train --config RUN [OPTIONS]
       rlstruct train --resume RUN [OPTIONS]
       rlstruct train ALGORITHM --resume RUN --factory MODULE:CREATE_ENV

Train an agent; results go into a new folder under runs/. The agent is chosen to
fit the environment: a perceptron, a convolutional network for images, a
Gaussian policy for continuous actions. --recurrent gives it a memory. Settings
that were tuned for the environment hold unless you say --preset none, or other
ones; --help after ALGORITHM and --env lists them all.

{algorithms}

  rlstruct train a2c --env CartPole-v1
  rlstruct train a2c --env CartPole-v1 --simulator torch \\
      --preset CartPole-v1-1024
  rlstruct train dqn --env Breakout-MinAtar --learner-device cuda:0
  rlstruct train dqn --env MyEnv-v0 --preset Acrobot-v1
  rlstruct train alphazero --env ConnectFour-v0 --n-processes 2 --overlap
  rlstruct train ppo --env CartPole-v1 --learners 2       two processes learn
  torchrun --nproc-per-node 2 -m rlstruct train ppo --env CartPole-v1  the same
  rlstruct train a2c --env CartPole-v1 --n-processes 8 --cluster auto   with Ray
  rlstruct train --config runs/RUN --seed 1    the same again, with another seed
  rlstruct train --resume runs/RUN             go on with a run that was stopped"""


@dataclass(frozen=True, kw_only=True)
class Output:
    """Destinations of results.

    Attributes:
        runs: folder of all runs.
        name: first part of the name of the run's folder; None for algorithm, environment and seed.
        progress: show a progress bar.
        loggers: loggers besides metrics.csv.
    """

    runs: Path = Path("runs")
    name: str | None = None
    progress: bool = True
    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)


@dataclass(frozen=True, kw_only=True)
class Training(Generic[Config]):
    """Settings of a training.

    Attributes:
        environment: The environment to train on.
        training: Settings of the algorithm, and its devices.
        output: Destination of the results.
        preset: begin with the settings tuned for this environment; by default those for --env; "none" for defaults.
    """

    environment: Task
    training: Config
    output: Output = Output()
    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResumeOwn:
    """Continue a run of your own program.

    Attributes:
        resume: folder of the run.
        factory: create_env as module:function, and create_model and create_agent if the checkpoint lacks them.
        n_env_steps: total number of environment steps; None for that of the run.
    """

    resume: Path
    factory: tuple[str, ...]
    n_env_steps: int | None = None
    output: Output = Output()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct train`` with these arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        say(_HELP.format(algorithms="\n".join(f"  {name:<11} {one.about}" for name, one in ALGORITHMS.items())))
        return
    if "--factory" in arguments:
        _resume_own(arguments)
        return
    _train(*_read(arguments))


def _read(arguments: Sequence[str]) -> tuple[str, Training[Any], Path | None, list[str]]:
    """Return the algorithm, its settings, the run to continue, and a message about them."""
    given, words = peek([_LEARNERS.sub("--n-learners", word) for word in arguments], "resume", "config")
    if None not in given.values():
        raise UserError("--resume continues a run, --config starts another one like it: pass only one of them.")
    for option, value in given.items():
        if value == "":
            raise UserError(f"--{option}: expected the folder of a run.")
    stored = given["resume"] or given["config"]
    folder = None if stored is None else Path(stored.removesuffix("config.json"))
    template = None if folder is None else load(folder)
    algorithm = _algorithm(words, template)
    begun, notes = settings_for(algorithm, words, template)
    default = None if begun is None else Training(environment=begun[0], training=begun[1])
    options = _parse(algorithm, words, default)
    if given["resume"] and template and options.environment != template.task:
        raise UserError(f"--resume continues in {template.task.env}. To change that, start a run with --config.")
    return algorithm, options, folder if given["resume"] else None, notes


def _train(algorithm: str, options: Training[Any], resumed: Path | None, notes: Sequence[str]) -> None:
    """Choose agent and environment, train, and print the result."""
    task, config, output = options.environment, options.training, options.output
    for name in ("learner_device", "batcher_device", "evaluation_device", "replay_device"):
        if (device := getattr(config, name, None)) is not None:
            check_device(f"--{name.replace('_', '-')}", device)
    share_gpus(config)  # before environments are created, which may use CUDA
    if config.cluster is not None:
        require("ray", "ray", what="--cluster")
    factory = find(task, auto_reset=not algorithm_of(algorithm).learner.whole_episodes)
    choice = choose(algorithm, task, *spaces_of(factory), factory.stack)
    config = with_stacks(config, factory.stack)
    record = RunRecord(algorithm=algorithm, task=task, agent=choice.kind, config=config, versions=versions())
    folder = _begun(record, output) if resumed is None else _resumed(resumed, record, output)
    _say(f"{algorithm} on {task.env}: {choice.kind}, learner on {config.learner_device}")
    for note in notes:
        _say(textwrap.fill(note, 80, subsequent_indent="  ", break_on_hyphens=False))
    saved = folder.checkpoint
    how = "" if resumed is None else ", from its checkpoint" if saved else ", which has no checkpoint: it starts over"
    _say(f"run folder: {folder.path}{how}")
    if saved and saved["training"]["finished"] and saved["env_steps"] >= config.n_env_steps:
        _say("it has ended: nothing is left to learn. To go on, name more steps in all, such as")
        _say(f"  --n-env-steps {2 * saved['env_steps']}. The result:")
    saved = None  # a replay buffer may be large
    _learn(algorithm, config, choice, factory, folder)


def _learn(algorithm: str, config: TrainingConfig, choice: AgentChoice, factory: Factory, folder: RunFolder) -> None:
    path = shlex.quote(str(folder.path))
    try:
        with folder:
            create = choice.create_model, choice.create_agent
            result: TrainingResult = algorithm_of(algorithm)(config, *create, factory, run=folder)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped. To go on: rlstruct train --resume {path} (its curve: rlstruct plot {path})"
        ) from None
    except (LearnerError, WorkerError):
        if (folder.path / "checkpoint.pt").exists():
            _say(f"to go on from its last checkpoint: rlstruct train --resume {path}")
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG):
            raise
        raise UserError(f"{folder.path} can no longer be written: {refused(error)}") from None
    target = config.target_return
    reached = [one for one in result.evaluations if target is not None and one.mean_return >= target]
    shown = [("before training", result.before), *(("at the target", one) for one in reached[:1])]
    for when, evaluation in (*shown, ("after training", result.after)):
        _say(f"{when:>15}: {evaluation}")
    threads = plural(result.threads, "thread")
    _say(f"{result.env_steps:,} environment steps in {result.seconds:.1f} s, {threads} of PyTorch")
    _say(f"next: rlstruct evaluate {path}\n      rlstruct plot {path}")


def _resume_own(arguments: Sequence[str]) -> None:
    """Continue a run of the user's own program, with the factories of its training."""
    words = list(arguments)
    name = _algorithm(words, None)
    algorithm = algorithm_of(name)
    program = f"rlstruct train {name}"
    options: ResumeOwn = tyro.cli(ResumeOwn, args=words, prog=program, config=(tyro.conf.OmitArgPrefixes,))
    if algorithm.arrange is not None and len(options.factory) < 3:
        raise UserError(f"--factory: {name} needs create_env, create_model and create_agent.")
    trained = load_trained(options.resume, auto_reset=not algorithm.learner.whole_episodes, factories=options.factory)
    try:
        config = load_config(options.resume, algorithm.learner.settings)
        config = replace(config, n_env_steps=options.n_env_steps or config.n_env_steps)
        folder = RunFolder.resume(options.resume, n_env_steps=config.n_env_steps, **_shown(options.output))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"--resume {options.resume}: {error}") from None
    _learn(name, config, trained.choice, trained.factory, folder)


def _begun(record: RunRecord, output: Output) -> RunFolder:
    config = record.config
    name = output.name or f"{record.algorithm}-{record.task.env}-seed{config.seed}"
    name = name.replace("/", "-").replace(":", "-")
    try:
        return RunFolder(name, record, n_env_steps=config.n_env_steps, root=output.runs, **_shown(output))
    except OSError as error:
        raise UserError(f"--runs {output.runs}: no folder can be made there: {error.strerror}.") from None
    except RuntimeError as error:  # raised by a logger
        raise UserError(f"--loggers {' '.join(output.loggers)}: {str(error).partition(': ')[2]}") from None


def _resumed(run: Path, record: RunRecord, output: Output) -> RunFolder:
    config = record.config
    try:
        folder = RunFolder.resume(run, n_env_steps=config.n_env_steps, **_shown(output))
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


def _shown(output: Output) -> dict[str, Any]:
    """Return a message that says where a `RunFolder` shows its numbers."""
    for extra in sorted({"wandb", "mlflow"} & set(output.loggers)):
        require(extra, extra, what=f"--loggers {extra}")
    return {"progress": output.progress, "loggers": output.loggers}


def _algorithm(words: list[str], template: RunRecord | None) -> str:
    """Return the algorithm named on the command line, or that of the run to repeat."""
    if words and not words[0].startswith("-"):
        algorithm = words.pop(0)
        algorithm_of(algorithm)  # raises for an unknown name
        if template is not None and template.algorithm != algorithm:
            raise UserError(f"this is a run of {template.algorithm}, not of {algorithm}: omit {algorithm}.")
        return algorithm
    if template is None:
        raise UserError(f"name the algorithm first, one of {', '.join(ALGORITHMS)}: rlstruct train a2c --env NAME")
    return template.algorithm


def _parse(algorithm: str, words: list[str], default: Training[Any] | None) -> Training[Any]:
    cls = algorithm_of(algorithm).learner.settings
    known: dict[str, Any] = {} if default is None else {"default": default}
    words = [_plain(word, before) for word, before in zip(words, ["", *words], strict=False)]
    parsed: Training[Any] = tyro.cli(
        Training[cls],  # type: ignore[valid-type]
        args=words,
        prog=f"rlstruct train {algorithm}",
        # at most 80 characters, because tyro does not wrap it
        description=f"Train with {algorithm.upper()}; results go into a new folder, see --runs.",
        config=(tyro.conf.OmitArgPrefixes,),
        **known,
    )
    return parsed


def _plain(word: str, before: str) -> str:
    """Convert a number such as 1e6 or 2.5e5 to an integer."""
    option, equals, number = word.rpartition("=") if word.startswith("-") else ("", "", word)
    is_text = (option or before) in ("--name", "--runs", "--env")
    if is_text or not re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", number) or not float(number).is_integer():
        return word
    return f"{option}{equals}{int(float(number))}"


def _say(text: str) -> None:
    """Print a message in rank 0 only."""
    if launched_rank() == 0:
        say(text)
