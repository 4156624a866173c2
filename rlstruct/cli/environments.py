"""Tasks, as the command line names them, and the factories of their environments for worker processes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlstruct import sims
from rlstruct.cli.complaint import UserError, nearest, require
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.errors import how_to_install
from rlstruct.sims.tensor_env import Backend
from rlstruct.vec_env import VecEnv

ATARI_STACK = 4  # frames, as Mnih et al. (2015)

_EXTRA_OF = {"gymnasium.envs.box2d": "box2d", "gymnasium.envs.mujoco": "mujoco", "ale_py": "atari"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, and what the agent needs for it.

    Attributes:
        env: name of an environment of gymnasium (CartPole-v1, ALE/Pong-v5, my_module:MyEnv-v0) or of a bundled
            simulator (Breakout-MinAtar), or a class or function of a module of yours (my_module:MySimulator).
        env_options: further settings of the environment, each as KEY=VALUE, such as continuous=false.
        simulator: step the bundled simulator of this name, and how; None takes gymnasium's environment where it has
            one.
        recurrent: give the agent a memory, a gated recurrent unit.
        network: settings of the network, each as KEY=VALUE, such as hidden=[128,128]; normalise=true gives it frames of
            unit size, and the learner rewards of unit size.
    """

    env: str
    env_options: tuple[str, ...] = ()
    simulator: Backend | None = None
    recurrent: bool = False
    network: tuple[str, ...] = ()

    def settings(self) -> dict[str, Any]:
        """Return the options as keyword arguments; values are read as JSON where they can be.

        >>> Task(env="LunarLander-v3", env_options=("gravity=-5", "name=moon")).settings()
        {'gravity': -5, 'name': 'moon'}
        """
        return read_settings("--env-options", self.env_options, "continuous=false")

    def network_settings(self) -> dict[str, Any]:
        """Return the settings of the network as keyword arguments."""
        return read_settings("--network", self.network, "hidden=[128,128]")


def read_settings(option: str, words: tuple[str, ...], example: str) -> dict[str, Any]:
    """Read KEY=VALUE words as keyword arguments; values are read as JSON where they can be."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise UserError(f"{option} {word}: expected KEY=VALUE, such as {example}.")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def imported(name: str) -> Callable[..., Any]:
    """Import a function or a class by ``module:name``; the current folder is searched, too."""
    module, _, attribute = name.partition(":")
    found = _module(module)
    create: Callable[..., Any] | None = getattr(found, attribute, None)
    if create is None:
        raise UserError(f"{module} has no function {attribute!r}.{nearest(attribute, vars(found))}")
    if not callable(create):
        raise UserError(f"{name} is a {type(create).__name__}, expected a function or a class.")
    return create


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # as python -m does; the installed command does not
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        raise UserError(f"there is no module {name!r}. Is its folder on PYTHONPATH?") from None


def is_own(name: str) -> bool:
    """Return True for ``module:name``; gymnasium's ``module:Name-v0`` is no name of Python.

    >>> is_own("games:TicTacToe"), is_own("games:TicTacToe-v0"), is_own("CartPole-v1")
    (True, False, False)
    """
    module, _, attribute = name.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


@dataclass(frozen=True)
class Factory:
    """Makes environments in any process: of gymnasium, of a bundled simulator, or of a user's class or function.

    One of a user (``module:name``) is a `VecEnv`, a function that returns one (``create_env`` of a training), or a
    gymnasium environment. It receives ``n_envs`` and ``seed``, and ``device`` and ``auto_reset`` if it takes them.
    """

    name: str  # of the environment
    settings: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments
    auto_reset: bool = True  # whether they restart by themselves
    render: bool = False  # let environments of gymnasium draw themselves
    backend: Backend | None = None  # how a bundled simulator computes a step; None for another environment
    atari: bool = False  # preprocess as Machado et al. (2018): pictures of 84 x 84 bytes, every fourth one

    @property
    def stack(self) -> int:
        """Number of frames that the agent stacks; they are shown one at a time."""
        return int(self.settings.get("stack", ATARI_STACK)) if self.atari else 1

    def __call__(self, n_envs: int, seed: int = 0, device: str = "cpu", auto_reset: bool | None = None) -> VecEnv:
        """Make ``n_envs`` environments, on ``device`` if they can be; environment j draws from ``seed + j``."""
        auto_reset = self.auto_reset if auto_reset is None else auto_reset
        if self.backend is not None:
            settings = {"backend": self.backend, "auto_reset": auto_reset, **self.settings}
            if self.atari:
                settings["stack"] = min(1, self.stack)  # the environment refuses 0
            return sims.make(self.name, n_envs, seed, device=device, **settings)
        create: Any = imported(self.name) if is_own(self.name) else partial(gymnasium.make, self.name)
        if is_own(self.name) and not (isinstance(create, type) and issubclass(create, gymnasium.Env)):
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
                kind = type(env).__name__
                raise UserError(f"{self.name} made a {kind}, expected a VecEnv or a gymnasium environment.")
            return env
        several = GymEnvInf if auto_reset else GymEnv
        return several([self._one(create) for _ in range(n_envs)], seed)

    def _one(self, create: Callable[..., gymnasium.Env[Any, Any]]) -> gymnasium.Env[Any, Any]:
        """Make one environment of gymnasium, wrapped so that the bundled agents can act in it."""
        settings = {**self.settings, "render_mode": "rgb_array"} if self.render else self.settings
        env: gymnasium.Env[Any, Any]
        if self.atari:
            register_atari()
            env = gymnasium.wrappers.AtariPreprocessing(create(frameskip=1, **settings))
            return gymnasium.wrappers.ReshapeObservation(env, (1, *(env.observation_space.shape or ())))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*initialised with render_mode")  # `spaces_of` says it
            env = create(**settings)
        if isinstance(env.action_space, spaces.Box):
            bounded = env.action_space
            env = gymnasium.wrappers.ClipAction(env)  # Gaussian agents know no bounds
            env.action_space = bounded  # those of SAC do
        if not isinstance(env.observation_space, spaces.Box):
            env = gymnasium.wrappers.FlattenObservation(env)  # one number for each case; parts side by side
        return env


def find(task: Task, *, auto_reset: bool) -> Factory:
    """Find the factory of a task's environment."""
    name, settings, backend = task.env, task.settings(), task.simulator
    made = Factory(name, settings, auto_reset)
    if is_own(name):
        imported(name)  # refuses a name that is not there
        return replace(made, settings=settings if backend is None else {"backend": backend, **settings})
    if backend is not None or (name in sims.names() and name not in gymnasium.registry):
        if not sims.knows(name):
            raise UserError(
                f"--simulator {backend}: no bundled simulator is called {name!r}, only "
                f"{', '.join(sims.names())}.{nearest(name, sims.names())}"
            )
        if backend == "warp":
            require("warp", "warp", what="--simulator warp")
        elif name.startswith("ALE/"):
            raise UserError(f"--simulator {backend}: only Warp kernels play {name}: --simulator warp.")
        return replace(made, backend=backend or "torch", atari=name.startswith("ALE/"))
    atari = name.startswith("ALE/") or "NoFrameskip-v" in name or _entry(name).startswith("ale_py")
    if atari:
        register_atari()  # ale_py registers its names only on request
    if ":" in name:
        _module(name.partition(":")[0])  # which registers it
    elif name not in gymnasium.registry:
        known = {*gymnasium.registry, *sims.names()}
        raise UserError(
            f"no environment is called {name!r}.{nearest(name, known)} Pass a name of gymnasium or of a bundled "
            "simulator; your own is module:MySimulator, or module:Name-v0 in gymnasium's registry."
        )
    return replace(made, atari=atari)


def spaces_of(factory: Factory) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Make one environment, and return its spaces, observation and action."""
    try:
        env = factory(n_envs=1, seed=0)
    except gymnasium.error.DependencyNotInstalled as error:
        extra = next((extra for start, extra in _EXTRA_OF.items() if _entry(factory.name).startswith(start)), "")
        said = f"{str(error).rstrip('.')}. {how_to_install(extra) if extra else ''}"
        raise UserError(f"{factory.name} cannot be made: {said}".strip()) from None
    except ValueError as error:
        if factory.backend is not None and factory.atari:
            raise UserError(str(error)) from None
        raise
    except (gymnasium.error.Error, TypeError) as error:
        if not is_own(factory.name) and factory.render and "render_mode" in str(error):
            raise UserError(
                f"{factory.name} cannot be drawn: it takes no render_mode='rgb_array'. Let its constructor accept "
                "render_mode, and name it in its metadata['render_modes']."
            ) from None
        if factory.settings or isinstance(error, gymnasium.error.Error):
            raise UserError(f"{factory.name} cannot be made with {dict(factory.settings)}: {error}") from None
        raise
    env.close()
    return env.observation_space, env.action_space


def register_atari() -> None:
    """Make the names of the Atari games known to gymnasium."""
    require("atari", "ale_py", "cv2", what="an Atari game")
    import ale_py

    gymnasium.register_envs(ale_py)


def is_image(space: spaces.Space[Any]) -> bool:
    """Return True if an observation is a picture: two or three axes, and some pixels each way."""
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3):
        return False
    return int(np.sort(space.shape)[-2]) >= 8


def _entry(name: str) -> str:
    spec = gymnasium.registry.get(name)
    return "" if spec is None else str(spec.entry_point)


def is_installed(name: str) -> bool:
    """Return True if the package that an environment of gymnasium's registry needs is installed."""
    needed = {"gymnasium.envs.box2d": "Box2D", "gymnasium.envs.mujoco": "mujoco", "ale_py": "cv2"}
    needed |= {"gymnasium.envs.phys2d": "jax", "gymnasium.envs.tabular": "jax", "<function _raise_shimmy": "shimmy"}
    package = next((package for start, package in needed.items() if _entry(name).startswith(start)), "gymnasium")
    return importlib.util.find_spec(package) is not None
