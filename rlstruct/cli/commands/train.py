"""`rlstruct train`: an algorithm, an environment, a run folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import shlex
import shutil
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import tyro

from rlstruct.algos import ALGORITHMS
from rlstruct.algos.distributed.launch import Rendezvous, launched_rank, share_gpus
from rlstruct.algos.seeds import training_seeds
from rlstruct.algos.training import compiling
from rlstruct.algos.training.checkpoint import check_written_by_training
from rlstruct.algos.training.config import TrainingConfig, changed_setting, check_resumed, load_config
from rlstruct.algos.training.evaluation import Evaluation, TrainingResult
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.cli.agents import AgentChoice, algorithm_of, display_name, prepare, with_stacks
from rlstruct.cli.initial_settings import naming_preset, read_initial_options, settings_for
from rlstruct.cli.messages import LOG, UserError, check_device, out_of_memory, plural, refused, require, say, wrapped
from rlstruct.cli.stored_run import RunSettings, commits, folder_of, load_settings, load_trained, versions
from rlstruct.cli.tasks import Factory, Task, is_own
from rlstruct.errors import LearnerError, WorkerError, import_extra
from rlstruct.options import declared

_LEARNERS = re.compile("^--learners(?==|$)")
_SWITCHES = re.compile("^--(?P<no>no-)?(?P<name>compile-(agent|update|simulator))$")
Config = TypeVar("Config", bound=TrainingConfig)

_HELP = """usage: rlstruct train ALGORITHM --env NAME [OPTIONS]
       rlstruct train --config RUN [OPTIONS]
       rlstruct train --resume RUN [OPTIONS]
       rlstruct train ALGORITHM --resume RUN --factory MODULE:CREATE_ENV

Train an agent; results go into a new folder under runs/. The agent is chosen to
fit the environment: a perceptron, a convolutional network for images, a
Gaussian policy for continuous actions. --recurrent gives it a memory. If there
are settings tuned for the environment, they apply unless you pass others, or
--preset none; --help after ALGORITHM and --env lists them all.

{algorithms}
  MODULE:NAME an algorithm of yours, from the current folder

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
  rlstruct train --resume runs/RUN             continue a run that was stopped"""


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
        preset: start with the settings for this environment, by default that of --env; "none" for the defaults.
        config: start with the settings of this run folder.
        resume: run folder to continue.
        factory: for --resume with a run of your own program: its create_env as module:function, and also create_model
            and create_agent if the checkpoint does not describe them.
    """

    environment: Task
    training: Config
    output: Output = Output()
    preset: str | None = None
    config: Path | None = None
    resume: Path | None = None
    factory: tuple[str, ...] = ()


def run(arguments: Sequence[str]) -> None:
    """Run ``rlstruct train`` with these arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        say(_HELP.format(algorithms="\n".join(f"  {name:<11} {one.about}" for name, one in ALGORITHMS.items())))
        return
    _train(*read_options(arguments), shlex.join(["rlstruct", "train", *arguments]))


def _with_values(words: Sequence[str]) -> list[str]:
    """Complete the flags of settings that were plain switches in version 0.3: --compile-agent, --no-compile-agent."""
    completed: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if switch := _SWITCHES.match(word):
            wanted = [] if following in ("auto", "True", "False") else [str(not switch["no"])]
            completed += [f"--{switch['name']}", *wanted]
        else:
            completed.append(word)
    return completed


def read_options(arguments: Sequence[str]) -> tuple[str, Training[Any], list[str]]:
    """Return the algorithm, its settings, and a message about them."""
    words = _with_values([_LEARNERS.sub("--n-learners", word) for word in arguments])
    algorithm = None if words[0].startswith("-") else words.pop(0)
    initial = read_initial_options(words)
    if initial.resume is not None and initial.config is not None:
        raise UserError("--resume continues a run, --config starts another one like it: pass only one of them.")
    if "" in (initial.resume, initial.config):
        raise UserError("--resume or --config: expected the folder of a run.")
    folder, template = initial.resume or initial.config, None
    if initial.factory:
        template = _own(algorithm, initial.resume, initial.factory)
    elif folder is not None:
        template = load_settings(Path(folder))
    if algorithm is None:
        if template is None:
            raise UserError(f"name the algorithm first, one of {', '.join(ALGORITHMS)}: rlstruct train a2c --env NAME")
        algorithm = template.algorithm
    algorithm_of(algorithm)  # raises for an unknown name
    if template is not None and template.algorithm != algorithm:
        raise UserError(f"this is a run of {template.algorithm}, not of {algorithm}: omit {algorithm}.")
    begun, notes = settings_for(algorithm, initial, template)
    default = None if begun is None else Training(environment=begun[0], training=begun[1])
    options = parse_options(algorithm, words, default)
    if initial.resume and template and options.environment != template.task:
        now, before = vars(options.environment), vars(template.task)
        name = next(name for name in now if now[name] != before[name])
        option = f"--{name.replace('_', '-')}"
        raise UserError(
            f"--resume {folder}: {option} is {now[name]!r}, but {before[name]!r} in the run. Omit {option}, or start "
            f"another run with it: rlstruct train --config {shlex.quote(str(folder))} {option} …"
        )
    return algorithm, options, notes


def _own(algorithm: str | None, run: str | None, factories: Sequence[str]) -> RunSettings:
    """Return the settings of a run that the user's own program has made."""
    if algorithm is None or run is None:
        raise UserError(
            "--factory continues a run of your own program: pass ALGORITHM and --resume RUN, too. To start one here, "
            "name your environment, network and agent: --env MODULE:NAME --network MODULE:NAME --agent MODULE:NAME."
        )
    definition = algorithm_of(algorithm)
    if definition.arrange is not None and len(factories) < 3:
        raise UserError(f"--factory: {algorithm} needs create_env, create_model and create_agent.")
    try:
        config = load_config(run, definition.learner.settings)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"--resume {run}: {error}") from None
    return RunSettings(algorithm=algorithm, task=Task(env=factories[0]), agent="", config=config, versions={})


def _train(algorithm: str, options: Training[Any], notes: Sequence[str], command: str) -> None:
    """Choose agent and environment, train, and print the result; the run folder keeps the command line."""
    task, config, resumed = options.environment, options.training, options.resume
    for name in ("learner_device", "batcher_device", "evaluation_device", "replay_device"):
        if (device := getattr(config, name, None)) is not None:
            check_device(f"--{name.replace('_', '-')}", device)
    if resumed is None:
        training_seeds(config)  # raises if the seed is too large
    share_gpus(config)  # before environments are created, which may use CUDA
    if config.cluster is not None:
        import_extra("ray", "ray", "--cluster")
    if resumed is not None and options.factory:
        auto_reset = not algorithm_of(algorithm).learner.whole_episodes
        trained = load_trained(resumed, auto_reset=auto_reset, factories=options.factory)
        factory, choice = trained.factory, trained.choice
    else:
        with naming_preset(algorithm, task, options.preset):
            factory, choice = prepare(algorithm, task)
        config = with_stacks(config, factory.stack)
    earlier = load_settings(resumed).commands if resumed is not None and not options.factory else ()
    settings = RunSettings(
        algorithm=algorithm,
        task=task,
        agent=choice.kind,
        config=config,
        versions=versions(),
        commits=commits(),
        commands=(*earlier, command),
    )
    folder = _begun(settings, options.output) if resumed is None else _resumed(resumed, settings, options)
    if launched_rank() == 0:
        LOG.set(folder.path / "log.txt")
        _keep_command(command)
    about = f"{algorithm} on {task.env}: {choice.kind}, learner on {config.learner_device}"
    for note in filter(None, (about, factory.preprocessing, *notes)):
        _say_wrapped(note)
    saved = folder.checkpoint
    how = ", from its checkpoint" if saved else ", which has no checkpoint: it starts over"
    _say(f"run folder: {folder.path}{how if resumed else ''}")
    if saved and (why := _why_complete(saved, config)):
        _say_wrapped(f"nothing is left to do: {why} The result:")
    saved = None  # a replay buffer may be large
    _learn(algorithm, config, choice, factory, folder, options)


def _learn(
    algorithm: str,
    config: TrainingConfig,
    choice: AgentChoice,
    factory: Factory,
    folder: RunFolder,
    options: Training[Any],
) -> None:
    """Train, and print the result and the commands that go on from it."""
    path, loggers = shlex.quote(str(folder.path)), options.output.loggers
    own = "".join(f" {word}" for word in ("--factory", *options.factory)) if options.factory else ""
    again = f"rlstruct train {algorithm + ' ' if own else ''}--resume {path}{own}"
    if loggers != Output().loggers:
        again += " --loggers" + "".join(f" {name}" for name in loggers)
    try:
        with _removed_if_unused(folder.path), folder, _saying(compiling.__name__):
            create = choice.create_model, choice.create_agent
            with _naming(algorithm, choice), warnings.catch_warnings():
                if choice.named:
                    warnings.filterwarnings("ignore", ".* do not contain its whole policy")
                result: TrainingResult = algorithm_of(algorithm)(config, *create, factory, run=folder)
    except KeyboardInterrupt:
        if launched_rank() != 0:
            raise
        raise KeyboardInterrupt(f"stopped. To continue: {again} (its curve: rlstruct plot {path})") from None
    except (LearnerError, WorkerError):
        if (folder.path / "checkpoint.pt").exists():
            _say(f"to continue from the last checkpoint: {again}")
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
    ends = result.before.seconds + result.after.seconds
    _say_wrapped(
        f"{result.env_steps:,} environment steps in {result.seconds + ends:.1f} s, of which {ends:.1f} s were the "
        f"evaluations before and after; {threads} of PyTorch"
    )
    _say(f"next: rlstruct evaluate {path}{own}\n      rlstruct plot {path}")


def _why_complete(saved: Mapping[str, Any], config: TrainingConfig) -> str:
    """Return why a resumed training takes no further step, and how to continue it; "" if it takes some."""
    if not saved["training"]["finished"]:
        return ""
    more = f"--n-env-steps {2 * saved['env_steps']}"
    if saved["env_steps"] >= config.n_env_steps:
        return f"this run is complete. To continue it, raise the total number of steps, for example {more}."
    target, last = config.target_return, Evaluation(**saved["training"]["history"]["evaluations"][-1])
    if target is not None and last.mean_return >= target:
        return f"this run has reached its target, a return of {target:g}. To continue it, pass --target-return None."
    return ""


@contextlib.contextmanager
def _removed_if_unused(path: Path) -> Iterator[None]:
    """Remove the run folder if an error ends the training before the first evaluation or update is written to it."""
    try:
        yield
    except Exception:
        first = ("config.json", "log.txt", "learning_curve.png", "events.out.")  # what every run begins with
        if launched_rank() == 0 and all(file.name.startswith(first) for file in path.iterdir()):
            LOG.set(None)
            shutil.rmtree(path)
            say("The training did not begin: the run folder is removed.")
        raise


@contextlib.contextmanager
def _naming(algorithm: str, choice: AgentChoice) -> Iterator[None]:
    """Say which network and agent the command has created, if the user's own algorithm raises an error around them."""
    try:
        yield
    except (AttributeError, TypeError, LookupError, ValueError, RuntimeError) as error:
        known = isinstance(error, (UserError, LearnerError, WorkerError)) or out_of_memory(error)
        if known or not is_own(algorithm):
            raise
        network, agent = type(choice.create_model()).__name__, getattr(choice.create_agent, "__name__", "an agent")
        shown = UserError(
            f"{algorithm} raised {type(error).__name__}: {' '.join(str(error).split())}\nThe command has created "
            f"{network} and {agent} ({choice.kind}). If the algorithm needs others, set Algorithm(…, agents=…), or "
            "name yours: --network MODULE:NAME --agent MODULE:NAME."
        )
        shown.remote_traceback = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        raise shown from None


class _Saying(logging.Handler):
    """Handler that prints messages."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message in lines that fit the terminal."""
        _say_wrapped(record.getMessage())


@contextlib.contextmanager
def _saying(name: str) -> Iterator[None]:
    """Print what a logger says in a with block."""
    logger, handler = logging.getLogger(name), _Saying()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _begun(settings: RunSettings, output: Output) -> RunFolder:
    """Create the folder of a new run."""
    name = output.name or f"{settings.algorithm}-{settings.task.env}-seed{settings.config.seed}"
    name = name.replace("/", "-").replace(":", "-")
    try:
        return RunFolder(name, settings, root=output.runs, **_shown(settings, output))
    except OSError as error:
        raise UserError(f"--runs {output.runs}: cannot create a folder there: {error.strerror}.") from None
    except RuntimeError as error:  # raised by a logger
        raise UserError(f"--loggers {' '.join(output.loggers)}: {str(error).partition(': ')[2]}") from None


def _resumed(run: Path, settings: RunSettings, options: Training[Any]) -> RunFolder:
    """Open the folder of the run to continue, and store its changed settings there."""
    path = folder_of(run)
    launched = Rendezvous.from_environment()  # torchrun's processes are the learners
    now = settings.config if launched is None else replace(settings.config, n_learners=launched.size)
    try:
        folder = RunFolder.resume(path, **_shown(settings, options.output))
        try:
            if folder.checkpoint is not None:
                check_written_by_training(folder.checkpoint)
                _check_unchanged(path, folder.checkpoint, now)
                check_resumed(folder.checkpoint, now)
        except (ValueError, UserError):
            folder.close()
            raise
        if not options.factory:  # the user's program has its own config.json
            folder.save_config(settings)
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        raise UserError(f"--resume {path}: {error}") from None
    return folder


def _check_unchanged(run: Path, checkpoint: Mapping[str, Any], config: TrainingConfig) -> None:
    """Raise UserError if an option changes a setting that a resumed run must keep."""
    if (changed := changed_setting(checkpoint, config)) is None:
        return
    option, before = f"--{changed[0].replace('_', '-')}", changed[1]
    if changed[0] == "n_learners":
        raise UserError(
            f"--resume {run}: there are {changed[2]} learners now, and {before} in the checkpoint. Resume with "
            f"--learners {before}, or start as many processes with torchrun."
        )
    may_change = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(declared(type(config), "may_change")))
    raise UserError(
        f"--resume {run}: {option} is {changed[2]}, but {before} in the checkpoint. Omit {option}, or start another "
        f"run with it: rlstruct train --config {shlex.quote(str(run))} {option} {changed[2]}. Of the algorithm's "
        f"options only {may_change} may change."
    )


def _keep_command(command: str) -> None:
    """Begin the part of ``log.txt`` that this command writes."""
    if (log := LOG.get()) is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {command}\n")


def _shown(settings: RunSettings, output: Output) -> dict[str, Any]:
    """Return the arguments of a `RunFolder` that say what it shows."""
    for extra in sorted({"wandb", "mlflow"} & set(output.loggers)):
        require(extra, extra, what=f"--loggers {extra}")
    return {"n_env_steps": settings.config.n_env_steps, "progress": output.progress, "loggers": output.loggers}


def parse_options(algorithm: str, words: list[str], default: Training[Any] | None) -> Training[Any]:
    """Return the settings that these words of a command line mean, starting from ``default``; exit if one is wrong."""
    cls = algorithm_of(algorithm).learner.settings
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and (ours := cls.translated(option[2:].replace("-", "_"))) is not None:
            raise UserError(f"there is no option {option}. Did you mean --{ours.replace('_', '-')}?")
    words = [_plain(word, before) for word, before in zip(words, ["", *words], strict=False)]
    parsed: Training[Any] = tyro.cli(
        Training[cls],  # type: ignore[valid-type]
        args=words,
        prog=f"rlstruct train {algorithm}",
        # at most 80 characters, because tyro does not wrap it
        description=f"Train with {display_name(algorithm)}; results go into a new folder, see --runs.",
        config=(tyro.conf.OmitArgPrefixes,),
        **defaults,
    )
    return parsed


def _plain(word: str, before: str) -> str:
    """Convert a number such as 1e6 or 2.5e5 to an integer."""
    option, equals, number = word.rpartition("=") if word.startswith("-") else ("", "", word)
    is_text = (option or before) in ("--name", "--runs", "--env")
    if is_text or not re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", number) or not float(number).is_integer():
        return word
    return f"{option}{equals}{int(float(number))}"


def _say_wrapped(text: str) -> None:
    """Print a message in rank 0 only, in lines that fit the terminal."""
    _say(wrapped(text))


def _say(text: str) -> None:
    """Print a message in rank 0 only."""
    if launched_rank() == 0:
        say(text)
