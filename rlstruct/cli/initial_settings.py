"""Initial settings of `rlstruct train`, from a preset or a run, before the command line changes them."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from rlstruct.algos.a2c import A2CConfig
from rlstruct.algos.minibatches import EpochConfig
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.algos.training.presets import PRESETS, Preset
from rlstruct.cli.messages import UserError, nearest
from rlstruct.cli.stored_run import RunSettings
from rlstruct.cli.tasks import Task, find, is_image, registered_id, spaces_of

_TUNED_FOR_CARTPOLE = ("reinforce", "a2c", "ppo", "dqn", "pqn")  # their defaults
# The game whose settings are used for environments with images that have none.
_IMAGES = {**dict.fromkeys(("reinforce", "a2c", "dqn", "pqn"), "Breakout-MinAtar"), "ppo": "Freeway-MinAtar"}


def settings_for(
    algorithm: str, options: argparse.Namespace, template: RunSettings | None
) -> tuple[tuple[Task, TrainingConfig] | None, list[str]]:
    """Return the initial environment and settings, and a message about them.

    They come from a run if there is a template, or else from a preset; None stands for the algorithm's defaults.
    ``options`` is the result of `read_initial_options`.
    """
    env, chosen = options.env and registered_id(options.env), options.preset
    if template is not None:
        if chosen is not None:
            raise UserError("--preset would change the settings of the run: omit it.")
        config, notes = _with_fitting_parts(template.config, options)
        return (template.task, config), notes
    names = [name for its_algorithm, name in PRESETS if its_algorithm == algorithm]
    if chosen and chosen not in (*names, "none"):
        choices = ", ".join([*names, "none"])
        raise UserError(f"--preset {chosen}: {algorithm} has only {choices}.{nearest(chosen, names)}")
    name = chosen or env
    others = f" (--preset takes those for {', '.join(names)})" if names else ""
    on_consoles = name is not None and name.startswith("ALE/")  # a thousand games, on the network's device
    network: tuple[str, ...] = ()
    if env and name in names and (chosen or not on_consoles or options.simulator == "warp"):
        preset = PRESETS[algorithm, name]
        network = _network_of(preset, recurrent=options.recurrent)
        config = preset.config
        if not name.startswith(env) or options.wrapper:
            config = replace(config, target_return=None)  # the target belongs to another task
        notes = [f"settings: those for {name}, except those you set (--preset none for the defaults)"]
        if on_consoles and torch.cuda.is_available():
            gpu = "cuda:0"
            config = replace(config, learner_device=gpu, batcher_device=gpu, evaluation_device=gpu)
            notes.append(f"learner, games and evaluations are on {gpu}, except those for which you name a device")
    elif env and algorithm in _IMAGES and not chosen and _shows_images(options):
        config = PRESETS[algorithm, _IMAGES[algorithm]].config
        # In another game, a greedy player that has learned little may never end its episode.
        config = replace(config, target_return=None, evaluation_stochastic=type(config).evaluation_stochastic)
        notes = [f"settings: those for {_IMAGES[algorithm]}, which also shows images{others}"]
    else:
        made_for = ", tuned for CartPole-v1" if algorithm in _TUNED_FOR_CARTPOLE else ""
        return None, [f"settings: the defaults{made_for}{others}"]
    config, fitted = _with_fitting_parts(config, options)
    return (Task(env=options.env, network=network), config), [*notes, *fitted]


def _network_of(preset: Preset, *, recurrent: bool) -> tuple[str, ...]:
    """Return the network of a preset as the words of --network; one with a memory has its own size."""
    return tuple(
        f"{key}={json.dumps(value)}" for key, value in preset.network.items() if key != "hidden" or not recurrent
    )


@contextlib.contextmanager
def naming_preset(algorithm: str, task: Task, preset: str | None) -> Iterator[None]:
    """Say that the network of ``--preset`` belongs to another environment, if an error blames ``--network`` for it."""
    try:
        yield
    except UserError as error:
        tuned = PRESETS.get((algorithm, preset or ""))
        if tuned is None or not str(error).startswith("--network "):
            raise
        if task.network != _network_of(tuned, recurrent=task.remembers()):
            raise
        raise UserError(
            f"--preset {preset}: this preset is for another environment, and its network, --network "
            f"{' '.join(task.network)}, does not fit {task.env}. Pass a --network that fits, or omit --preset. {error}"
        ) from None


def _shows_images(options: argparse.Namespace) -> bool:
    """Return True if an environment's observations are images; Atari games are not created to find out."""
    task = Task(
        env=options.env,
        env_options=tuple(options.env_options),
        wrapper=tuple(options.wrapper),
        simulator=options.simulator,
    )
    factory = find(task, auto_reset=True)
    return factory.atari or is_image(spaces_of(factory)[0])


def _with_fitting_parts(config: TrainingConfig, options: argparse.Namespace) -> tuple[TrainingConfig, list[str]]:
    """Reduce the number of minibatches in stored settings to the number of environments on the command line."""
    if not isinstance(config, A2CConfig) and not (isinstance(config, EpochConfig) and options.recurrent):
        return config, []
    n_envs, n_processes = (
        int(word) if (word := getattr(options, name) or "").isdecimal() else getattr(config, name)
        for name in ("n_envs", "n_processes")
    )
    n = max(1, min(config.n_minibatches, n_envs * max(1, n_processes)))
    if n == config.n_minibatches:
        return config, []
    note = f"n_minibatches: {n} instead of {config.n_minibatches}, one for each environment"
    if isinstance(config, A2CConfig) and config.window == config.n_minibatches:  # keeps each step used once
        config = replace(config, n_minibatches=n, window=n)
    return replace(config, n_minibatches=n), [] if options.n_minibatches else [note]


def read_initial_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the options that decide with which settings the parser of all options starts.

    An option is "" without a value, and None if it was not given; one that takes several words is a list of them.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("resume", "config", "env", "preset", "simulator", "n_envs", "n_processes", "n_minibatches"):
        parser.add_argument(*{f"--{name}", f"--{name.replace('_', '-')}"}, nargs="?", const="")
    parser.add_argument("--env-options", "--env_options", nargs="*", default=[])
    parser.add_argument("--wrapper", nargs="*", default=[])
    parser.add_argument("--factory", nargs="*")
    parser.add_argument("--recurrent", action="store_true")
    parser.add_argument("--network", nargs="*", default=[])
    options = parser.parse_known_args(words)[0]
    options.recurrent = Task(env="", recurrent=options.recurrent, network=tuple(options.network)).remembers()
    return options
