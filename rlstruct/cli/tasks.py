"""Environments as the command line names them, and factories that create them in worker processes."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rlstruct import sims
from rlstruct.cli import wrappers
from rlstruct.cli.messages import UserError, blame, nearest, plural, require
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.errors import how_to_install, kind_of
from rlstruct.options import Options
from rlstruct.sims.tensor_env import Backend
from rlstruct.vec_env import VecEnv

ATARI_STACK = 4  # frames, as in Mnih et al. (2015)
ATARI_SKIP = 4  # frames for which an action is held, as there

# Packages that gymnasium's environments need, by the start of their entry point: a module and the extra that installs
# it, "" if none does.
_PACKAGES = {
    "gymnasium.envs.box2d": ("Box2D", "box2d"),
    "gymnasium.envs.mujoco": ("mujoco", "mujoco"),
    "ale_py": ("cv2", "atari"),
    "gymnasium.envs.phys2d": ("flax", ""),
    "gymnasium.envs.tabular": ("flax", ""),
    "<function _raise_shimmy": ("shimmy", ""),
}


@dataclass(frozen=True, kw_only=True)
class Task(Options):
    """An environment, and properties of the agent that learns in it.

    Attributes:
        env: name of an environment of gymnasium (CartPole-v1, ALE/Pong-v5, my_module:MyEnv-v0) or of a bundled
            simulator (Breakout-MinAtar), or a class or function in a module of yours (my_module:MySimulator).
        env_options: further settings of the environment, each as KEY=VALUE, such as continuous=false.
        wrapper: wrappers of gymnasium around the environment, the first one innermost, each as MODULE:NAME or
            MODULE:NAME,KEY=VALUE, such as gymnasium.wrappers:TimeLimit,max_episode_steps=50. Evaluations use them, too,
            so returns are those of the wrapped rewards.
        simulator: use the bundled simulator of this name, with this backend; None takes gymnasium's environment if
            there is one.
        recurrent: give the agent a memory, a gated recurrent unit; short for --network recurrent=true.
        network: settings of the network, each as KEY=VALUE, such as hidden=[128,128]; normalise=true scales its frames
            and the learner's rewards to unit size. Or first your own network, MODULE:NAME, then its keyword arguments.
        agent: your own agent, MODULE:NAME, called with the network, device, stochastic and copy_model; None for a
            bundled one that fits.
    """

    env: str
    env_options: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    simulator: Backend | None = None
    recurrent: bool = False
    network: tuple[str, ...] = ()
    agent: str | None = None

    @property
    def own_network(self) -> str | None:
        """``module:name`` of the user's own network; None for a bundled one."""
        return self.network[0] if self.network and is_own(self.network[0]) else None

    def network_settings(self) -> dict[str, Any]:
        """Return the settings of the network as keyword arguments."""
        words = self.network if self.own_network is None else self.network[1:]
        return read_settings("--network", words, "hidden=[128,128]")

    def remembers(self) -> bool:
        """Return True if the agent gets a memory. ``recurrent=…`` among the network's settings takes precedence."""
        chosen = self.network_settings().get("recurrent", self.recurrent)
        if not isinstance(chosen, bool):
            raise UserError(f"--network recurrent={chosen}: expected true or false.")
        return chosen


def read_settings(option: str, words: tuple[str, ...], example: str) -> dict[str, Any]:
    """Read KEY=VALUE words as keyword arguments; a value that is neither JSON nor a literal of Python is text.

    >>> read_settings("--env-options", ("gravity=-5", "name=moon", "continuous=False"), "continuous=false")
    {'gravity': -5, 'name': 'moon', 'continuous': False}
    """
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise UserError(f"{option} {word}: expected KEY=VALUE, such as {example}.")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            try:
                settings[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                settings[key] = value
    return settings


def imported(name: str) -> Callable[..., Any]:
    """Import a function or a class by ``module:name``, which may be in the current folder."""
    module, _, attribute = name.partition(":")
    target = _module(module)
    create: Callable[..., Any] | None = getattr(target, attribute, None)
    if create is None:
        raise UserError(f"{module} has no function or class {attribute!r}.{nearest(attribute, vars(target))}")
    if not callable(create):
        raise UserError(f"{name} is {kind_of(create)}, expected a function or a class.")
    return create


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # python -m adds it, the installed command does not
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (name, name.partition(".")[0]):
            raise UserError(f"there is no module {name!r} in the current folder or on PYTHONPATH.") from None
        raise blame(f"importing {name} raised", error) from None


def is_own(name: str) -> bool:
    """Return True for ``module:name`` of Python, and False for gymnasium's ``module:Name-v0``.

    >>> is_own("games:TicTacToe"), is_own("games:TicTacToe-v0"), is_own("CartPole-v1")
    (True, False, False)
    """
    module, _, attribute = name.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def registered_id(name: str) -> str:
    """Return gymnasium's id of an environment: its name without the module that registers it.

    >>> registered_id("ale_py:ALE/Pong-v5"), registered_id("CartPole-v1"), registered_id("games:TicTacToe")
    ('ALE/Pong-v5', 'CartPole-v1', 'games:TicTacToe')
    """
    return name if is_own(name) else name.rpartition(":")[2]


def registered(name: str) -> EnvSpec | None:
    """Import the module that registers an environment, and return gymnasium's specification; None if there is none."""
    module, _, name_there = name.rpartition(":")
    if module:
        _module(module)
    if name_there not in gymnasium.registry:
        register_atari()
    return gymnasium.registry.get(name_there)


def register_atari() -> None:
    """Register the games of ale-py, if it is installed: gymnasium does so only on request."""
    if importlib.util.find_spec("ale_py") is not None:
        importlib.import_module("ale_py")


@dataclass(frozen=True)
class Factory:
    """Creates environments in any process, from gymnasium, a bundled simulator, or a user's class or function.

    A user's ``module:name`` is a `VecEnv`, a function that returns one (``create_env`` of a training), or a gymnasium
    environment. It receives ``n_envs`` and ``seed``, and also ``device`` and ``auto_reset`` if it accepts them.
    """

    name: str  # of the environment
    settings: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments
    auto_reset: bool = True  # they restart by themselves
    render: bool = False  # gymnasium's environments draw themselves
    backend: Backend | None = None  # how a bundled simulator computes a step; None for another environment
    atari: bool = False  # preprocessed as in Machado et al. (2018): 84 x 84 bytes, see `preprocessing`
    wrapper: tuple[str, ...] = ()  # of gymnasium's environments, see `rlstruct.cli.wrappers`; imported where they act
    flat: bool = True  # an observation with several parts becomes one vector, which bundled networks and agents need

    @property
    def stack(self) -> int:
        """Number of frames that the agent stacks; the environment shows one at a time."""
        return int(self.settings.get("stack", ATARI_STACK)) if self.atari else 1

    @property
    def preprocessing(self) -> str:
        """The preprocessing of an Atari game in words; "" for other environments."""
        if not self.atari:
            return ""
        if self.backend is not None:
            names = {"frame_skip": ATARI_SKIP, "sticky": 0.25, "noop_max": 30, "size": 84, "gray": True}
            held, sticky, n_noops, size, gray = ({**names, **self.settings}[name] for name in names)
            held = plural(held, "frame")
        else:
            inside, outside = self._frame_skips()
            held = (
                plural(outside, "frame") if inside == 1 else f"{inside[0]} to {inside[1] - 1} frames, drawn at random"
            )
            sticky = self._registered()["repeat_action_probability"]
            n_noops, size, gray = 30, 84, True
        screen = "the whole screen" if size is None else f"{size} x {size} {'grey ' if gray else ''}pixels"
        return (
            f"Atari preprocessing: {screen}, {plural(max(1, self.stack), 'frame')} stacked; an action is held for "
            f"{held}, and a frame repeats the previous action with probability {sticky:g}; "
            + (f"1 to {n_noops} no-op steps at the start" if n_noops else "no no-op steps at the start")
        )

    def _registered(self) -> dict[str, Any]:
        """Return the settings of gymnasium's specification and the user's, which replace them."""
        spec = registered(self.name)
        return {**({} if spec is None else spec.kwargs), **self.settings}

    def _frame_skips(self) -> tuple[Any, int]:
        """Return the frame skips of the emulator and of the preprocessing: one of them is 1.

        The emulator draws a skip from a range (Pong-v4). An id with a skip of 1 (PongNoFrameskip-v4) leaves skipping to
        the preprocessing.
        """
        skip = self._registered()["frameskip"]
        if not isinstance(skip, int):
            return tuple(skip), 1
        return 1, skip if skip > 1 or "frameskip" in self.settings else ATARI_SKIP

    def __call__(self, n_envs: int, seed: int = 0, device: str = "cpu", auto_reset: bool | None = None) -> VecEnv:
        """Create ``n_envs`` environments, on ``device`` if they support it; environment j has the seed ``seed + j``."""
        auto_reset = self.auto_reset if auto_reset is None else auto_reset
        if self.backend is not None:
            _refuse_passed(self.settings)
            settings = {"backend": self.backend, "auto_reset": auto_reset, "device": device, **self.settings}
            if self.atari:
                settings["stack"] = min(1, self.stack)  # the environment refuses 0
            return sims.make(registered_id(self.name), n_envs, seed, **settings)
        create: Any = imported(self.name) if is_own(self.name) else partial(gymnasium.make, self.name)
        if is_own(self.name) and not (isinstance(create, type) and issubclass(create, gymnasium.Env)):
            _refuse_passed(self.settings)
            taken = inspect.signature(create).parameters
            takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
            offered = {"device": device, "auto_reset": auto_reset}
            arguments = {name: value for name, value in offered.items() if takes_all or name in taken}
            arguments |= {"n_envs": n_envs, "seed": seed, **self.settings}
            try:
                inspect.signature(create).bind(**arguments)
            except TypeError as error:
                raise UserError(
                    f"{self.name} cannot be called with {', '.join(arguments)}: {error}. Name a class of TensorEnv or "
                    "gymnasium.Env, or a function of n_envs and seed that returns a VecEnv."
                ) from None
            env = create(**arguments)
            if not isinstance(env, VecEnv):
                raise UserError(f"{self.name} returned {kind_of(env)}, expected a VecEnv or a gymnasium environment.")
            if self.wrapper:
                raise _unwrappable(self.wrapper, f"{self.name} is a VecEnv, {type(env).__name__}")
            return env
        several = GymEnvInf if auto_reset else GymEnv
        return several([self._one(create) for _ in range(n_envs)], seed)

    def _one(self, create: Callable[..., gymnasium.Env[Any, Any]]) -> gymnasium.Env[Any, Any]:
        """Create one environment of gymnasium, wrapped so that the bundled agents can act in it."""
        settings = {**self.settings, "render_mode": "rgb_array"} if self.render else self.settings
        env: gymnasium.Env[Any, Any]
        if self.atari:
            require_atari()
            inside, outside = self._frame_skips()
            env = create(**{**settings, "frameskip": inside})
            env = gymnasium.wrappers.AtariPreprocessing(env, frame_skip=outside)
            env = wrappers.apply(env, self.wrapper)
            return gymnasium.wrappers.ReshapeObservation(env, (1, *(env.observation_space.shape or ())))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*initialised with render_mode")  # `spaces_of` reports it
            env = create(**settings)
        env = wrappers.apply(env, self.wrapper) if self.wrapper else env
        bounded = getattr(env, "action_space", None)  # GymEnv names a space that is missing
        if isinstance(bounded, spaces.Box) and np.issubdtype(bounded.dtype, np.floating):
            env = gymnasium.wrappers.ClipAction(env)  # Gaussian agents ignore the bounds
            env.action_space = bounded  # agents of SAC need them
        if self.flat and not isinstance(getattr(env, "observation_space", None), spaces.Box | None):
            with contextlib.suppress(NotImplementedError, ValueError):  # GymEnv names the part that has no fixed shape
                env = gymnasium.wrappers.FlattenObservation(env)  # one-hot categories, concatenated parts
        return env


def find(task: Task, *, auto_reset: bool) -> Factory:
    """Find the factory of a task's environment."""
    name, backend = task.env, task.simulator
    settings = read_settings("--env-options", task.env_options, "continuous=false")
    flat = task.own_network is None or task.agent is None
    made = Factory(name, settings, auto_reset, wrapper=task.wrapper, flat=flat)
    for word in task.wrapper:
        wrappers.load(word)  # raises for an unknown name or argument
    if is_own(name):
        imported(name)  # raises for an unknown name
        return replace(made, settings=settings if backend is None else {"backend": backend, **settings})
    plain = registered_id(name)
    if backend is not None or (plain in sims.names() and plain not in gymnasium.registry):
        if not sims.knows(plain):
            raise UserError(
                f"--simulator {backend}: no bundled simulator is called {name!r}, only "
                f"{', '.join(sims.names())}.{nearest(plain, sims.names())}"
            )
        if backend == "warp":
            require("warp", "warp", what="--simulator warp")
        elif plain.startswith("ALE/"):
            raise UserError(f"--simulator {backend}: {name} runs only as Warp kernels: use --simulator warp.")
        if task.wrapper:
            raise _unwrappable(task.wrapper, f"{name} is a bundled simulator here")
        return replace(made, backend=backend or "auto", atari=plain.startswith("ALE/"))
    if plain.startswith("ALE/") or "NoFrameskip-v" in plain:
        require_atari()
    spec = registered(name)
    if spec is None:
        names = {*gymnasium.registry, *sims.names()}
        raise UserError(
            f"no environment is called {name!r}.{nearest(plain, names, prefix=name.removesuffix(plain))} Pass the name "
            "of a gymnasium environment or a bundled simulator; your own is module:MySimulator, or module:Name-v0 if "
            "gymnasium registers it."
        )
    if not str(spec.entry_point).startswith("ale_py"):
        return made
    require_atari()
    obs_type = {**spec.kwargs, **settings}.get("obs_type", "rgb")
    return replace(made, atari=obs_type != "ram" and not spec.additional_wrappers)


def _refuse_passed(settings: Mapping[str, Any]) -> None:
    """Raise UserError if the user sets an argument that every VecEnv gets from the command."""
    for name in ("n_envs", "seed"):
        if name in settings:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"--env-options {name}={settings[name]}: the command passes {name} itself. Pass {option}.")


def _unwrappable(words: Sequence[str], why: str) -> UserError:
    return UserError(
        f"{wrappers.OPTION} {words[0]}: {why}, expected an environment of gymnasium, which has wrappers. "
        f"Omit {wrappers.OPTION}, or name an environment of gymnasium with --env and omit --simulator."
    )


def spaces_of(factory: Factory) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Create one environment, and return its observation space and its action space."""
    try:
        env = factory(n_envs=1, seed=0)
    except Exception as error:
        raise _not_created(factory, error) from None
    env.close()
    return env.observation_space, env.action_space


def _not_created(factory: Factory, error: Exception) -> Exception:
    """Return an error that says why an environment cannot be created."""
    said = str(error).rstrip(".")
    takes_none = isinstance(error, TypeError) and said.endswith("() takes no arguments")  # a class without __init__
    if factory.render and ("render_mode" in said or (takes_none and not factory.settings)):
        return UserError(
            f"{factory.name} cannot be drawn: it does not accept render_mode='rgb_array'. Let its constructor accept "
            "render_mode, and name it in its metadata['render_modes']."
        )
    settings = f" with {dict(factory.settings)}" if factory.settings else ""
    what = f"{factory.name} cannot be created{settings}:"
    if isinstance(error, gymnasium.error.DependencyNotInstalled | ImportError):
        extra = _package_of(factory.name)[1]
        return UserError(f"{what} {said}. {how_to_install(extra) if extra else ''}".strip())
    if isinstance(error, TypeError) and "required" in said and "argument" in said:
        said = said.partition(" was raised from the environment creator")[0]
        return UserError(f"{what} {said}. Give it a default value, or pass --env-options NAME=VALUE to rlstruct train.")
    if isinstance(error, gymnasium.error.Error):
        return UserError(f"{what} {error}")
    return blame(what, error)


def require_atari() -> None:
    """Raise UserError unless the packages of gymnasium's Atari games are installed."""
    require("atari", "ale_py", "cv2", what="an Atari game")


def is_image(space: spaces.Space[Any]) -> bool:
    """Return True if an observation is an image: two or three axes, two of them with at least 8 pixels."""
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        return False
    return int(np.sort(space.shape)[-2]) >= 8


def _entry(name: str) -> str:
    spec = gymnasium.registry.get(registered_id(name))
    return "" if spec is None else str(spec.entry_point)


def is_installed(name: str) -> bool:
    """Return True if the package that an environment of gymnasium's registry needs is installed."""
    return importlib.util.find_spec(_package_of(name)[0]) is not None


def _package_of(name: str) -> tuple[str, str]:
    """Return the package of an environment and the extra that installs it; gymnasium for one that needs no other."""
    return next((package for start, package in _PACKAGES.items() if _entry(name).startswith(start)), ("gymnasium", ""))
