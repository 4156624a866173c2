"""Settings of a stored run, for repeating, evaluating and plotting it; and its trained network."""

from __future__ import annotations

import contextlib
import copy
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import rlstruct
from rlstruct import policies
from rlstruct.algos.training.checkpoint import read_checkpoint
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.cli.agents import AgentChoice, algorithm_of, prepare
from rlstruct.cli.messages import UserError, nearest
from rlstruct.cli.tasks import Factory, Task, find, imported, is_own, spaces_of
from rlstruct.core import DictTensor
from rlstruct.errors import BadTypeError
from rlstruct.policies.loading import load_weights, missing_factories
from rlstruct.rl_agent import RL_Agent
from rlstruct.search import SearchAgent

_PACKAGES = ("rlstruct", "torch", "gymnasium", "numpy", "ale-py")

_FACTORIES = " On the command line: --factory MODULE:CREATE_ENV MODULE:CREATE_MODEL MODULE:CREATE_AGENT."


class ForeignRun(UserError):
    """The run folder was written by the user's own program, and does not contain the factories of its agent."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings of a training: the content of ``config.json`` in its folder."""

    algorithm: str  # its name in `rlstruct.algos.ALGORITHMS`, or module:name
    task: Task  # the environment
    agent: str  # description of the chosen agent
    config: TrainingConfig  # the settings of the algorithm
    versions: Mapping[str, str]  # of Python and of the packages that matter
    commits: Mapping[str, str] = field(default_factory=dict)  # see `commits`
    commands: tuple[str, ...] = ()  # command lines of its start and of each time that it was resumed


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that a result depends on."""
    by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            by_package[package] = metadata.version(package)
    return by_package


def commits() -> dict[str, str]:
    """Return the commits of rlstruct and of the current folder, of those that are a checkout of git.

    ``-dirty`` follows a commit if files of that checkout have changed since.
    """
    by_folder = {}
    for name, folder in (("rlstruct", Path(rlstruct.__file__).parent), ("folder", Path.cwd())):
        git = ["git", "-C", str(folder)]
        tracked = ["ls-files", "--error-unmatch", "__init__.py"] if name == "rlstruct" else ["rev-parse"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or no checkout: nothing to store
            # The package may be installed below someone else's checkout, which does not track it.
            for words in (tracked, ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]):
                said = subprocess.run([*git, *words], capture_output=True, text=True, check=True, timeout=10).stdout
            by_folder[name] = said.strip()
    return by_folder


def folder_of(run: Path) -> Path:
    """Return the folder of a run, which may be named by its ``config.json``."""
    return run.parent if run.name == "config.json" else run


def read_settings(run: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of a run's settings and its content: names of algorithm and task, and plain values."""
    file = folder_of(run) / "config.json"
    if not file.exists():
        siblings = [str(other.parent) for other in run.parent.glob("*/config.json")]
        why = "it has no config.json" if run.exists() else "it does not exist"
        raise UserError(f"{run} is not a run folder: {why}.{nearest(str(run), siblings)}")
    try:
        stored = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is damaged: {error}") from None
    if not isinstance(stored, dict) or not {"algorithm", "task", "config"} <= stored.keys():
        raise ForeignRun(
            f"{run} was not written by rlstruct train: its config.json lacks algorithm, task and config. Name the "
            "function that created its environments: --factory module:create_env."
        )
    return file, stored


def load_settings(run: Path) -> RunSettings:
    """Read the settings in a run folder, and import the algorithm that they name."""
    file, stored = read_settings(run)
    algorithm = str(stored["algorithm"])
    return RunSettings(
        algorithm=algorithm,
        task=_build(Task, stored["task"], file),
        agent=str(stored.get("agent", "")),
        config=_build(algorithm_of(algorithm).learner.settings, stored["config"], file),
        versions=stored.get("versions", {}),
        commits=stored.get("commits", {}),
        commands=tuple(stored.get("commands", ())),
    )


@dataclass(frozen=True)
class Trained:
    """A trained network."""

    settings: RunSettings  # settings of the run
    factory: Factory  # of its environments
    choice: AgentChoice  # factories of network and agent
    model: nn.Module  # the network, on the CPU
    env_steps: int  # environment steps of its training
    agent_info: Mapping[str, Tensor]  # the settings with which the agent samples in one environment

    def sampling(self, agent: RL_Agent, n_envs: int, *, stochastic: bool) -> DictTensor:
        """Return the ``agent_info`` for an agent in n environments; raise if it lacks what the agent needs to sample.

        The result is empty without ``stochastic``.  [n_envs]
        """
        if not stochastic:
            return DictTensor()
        needed = agent.samples_with
        if needed not in (None, *self.agent_info):
            raise UserError(
                f"this agent samples only with agent_info[{needed!r}], and the checkpoint does not contain it, as it "
                "is of an older version: take the best actions, --actions best."
            )
        return DictTensor({key: value.expand(n_envs, *value.shape) for key, value in self.agent_info.items()})


def load_trained(run: Path, *, auto_reset: bool, factories: Sequence[str] = ()) -> Trained:
    """Load the network of a run's last checkpoint; ``factories`` are needed for runs of the user's own program."""
    if factories:
        return _load_own(run, factories, auto_reset)
    settings = load_settings(run)
    factory, choice = prepare(settings.algorithm, settings.task, auto_reset)
    file, model = folder_of(run) / "checkpoint.pt", choice.create_model()
    try:
        checkpoint = read_checkpoint(file)
        policy = checkpoint.get("policy") or {}
        missing = dict(missing_factories(policy)) if policy else {}
        for part in _named(settings):  # `prepare` has found it by its name
            missing.pop(part, None)
        if missing:
            raise UserError(f"{file} does not contain its whole policy: {', and '.join(missing.values())}.{_FACTORIES}")
        load_weights(model, checkpoint["model"], f"{file} does not fit the network of this version, {choice.kind}")
    except (ValueError, FileNotFoundError) as error:
        raise UserError(str(error)) from None
    return Trained(settings, factory, choice, model, int(checkpoint["env_steps"]), policy.get("agent_info", {}))


def undescribed(run: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return factories that the checkpoint may not describe: those of ``--factory``, or a game's search agent."""
    if len(names) > 3 or not all(map(is_own, names)):
        raise UserError(
            f"--factory {' '.join(names)}: expected module:create_env, and if the checkpoint does not describe them "
            "module:create_model and module:create_agent."
        )
    if names:
        return dict(zip(("create_model", "create_agent"), map(imported, names[1:]), strict=False))
    folder = run if run.is_dir() else run.parent
    try:
        stored = read_settings(folder)[1]
    except UserError:  # no run of rlstruct train
        return {}
    name = str(stored["algorithm"])
    search = not is_own(name) and algorithm_of(name).agents == "search"
    if search and is_own((settings := load_settings(folder)).task.env):
        game = find(settings.task, auto_reset=True)
        return {"create_agent": partial(SearchAgent, create_simulator=game, discount=-settings.config.discount)}
    task = _build(Task, stored["task"], folder)
    if task.own_network is None and task.agent is None:
        return {}
    settings = load_settings(folder)
    _, choice = prepare(settings.algorithm, settings.task)
    return {part: getattr(choice, part) for part in _named(settings)}


def _named(settings: RunSettings) -> list[str]:
    """Return which factories of a run's policy its settings name, so that the checkpoint may lack them."""
    task = settings.task
    game = algorithm_of(settings.algorithm).agents == "search" and is_own(task.env)
    named = {"create_model": task.own_network is not None, "create_agent": task.agent is not None or game}
    return [part for part, is_named in named.items() if is_named]


def factory_hint(error: Exception) -> str:
    """Say how the command line takes the factories that an error of `rlstruct.load` asks for; "" for other errors."""
    if "Pass create_" not in str(error):
        return ""
    return _FACTORIES


def _load_own(run: Path, names: Sequence[str], auto_reset: bool) -> Trained:
    """Load the network of a run of the user's own program, with the factories of its training."""
    makers = undescribed(run, names)
    factory = find(Task(env=names[0]), auto_reset=auto_reset)
    try:
        saved = read_checkpoint(run / "checkpoint.pt", own=True)
        space = None if "policy" in saved else spaces_of(factory)[0]
        policy = policies.load(run, **makers, observation_space=space)
        env_steps = int(saved.get("env_steps", 0))
    except (ValueError, FileNotFoundError, BadTypeError) as error:
        raise UserError(str(error).partition(": ")[2] + factory_hint(error)) from None
    name, config = type(policy.model).__name__, TrainingConfig(evaluation_stochastic=policy.stochastic)
    settings = RunSettings(
        algorithm=run.resolve().name, task=Task(env=names[0]), agent=name, config=config, versions=versions()
    )
    choice = AgentChoice(lambda: copy.deepcopy(policy.model), policy.create_agent, name)
    return Trained(settings, factory, choice, policy.model, env_steps, policy.agent_info)


def _build(cls: type[Any], values: Mapping[str, Any], file: Path) -> Any:  # noqa: ANN401 - an instance of cls
    try:
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    except (TypeError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None
