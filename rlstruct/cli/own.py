"""Environments and runs of a user's program, which the command line finds by ``module:name``."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from rlstruct.cli.complaint import UserError, nearest
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.vec_env import VecEnv


def imported(name: str) -> Callable[..., Any]:
    """Import a function or a class by ``module:name``; the current folder is searched, too."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise UserError(f"there is no module {module!r}. Is its folder on PYTHONPATH?") from None
    if not callable(factory := getattr(found, attribute, None)):
        raise UserError(f"{module} has no function {attribute!r}.{nearest(attribute, vars(found))}")
    create: Callable[..., Any] = factory
    return create


def is_own(name: str) -> bool:
    """Return True for ``module:name``; gymnasium's ``module:Name-v0`` is no name of Python.

    >>> is_own("games:TicTacToe"), is_own("games:TicTacToe-v0"), is_own("CartPole-v1")
    (True, False, False)
    """
    module, _, attribute = name.partition(":")
    return attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


@dataclass(frozen=True)
class OwnFactory:
    """Makes environments of a user's class or function, in any process.

    It is a `VecEnv`, such as a `TensorEnv`, a function that returns one (``create_env`` of a training), or a
    gymnasium environment. It receives ``n_envs`` and ``seed``, and ``device`` and ``auto_reset`` if it takes them.
    """

    name: str  # module:name
    settings: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments
    auto_reset: bool = True  # whether the environments restart by themselves
    render: bool = False  # let gymnasium environments draw themselves
    atari = False
    stack = 1

    def __call__(self, n_envs: int, seed: int = 0, device: str = "cpu", auto_reset: bool | None = None) -> VecEnv:
        """Make ``n_envs`` environments; environment j draws from ``seed + j``."""
        create: Any = imported(self.name)
        auto_reset = self.auto_reset if auto_reset is None else auto_reset
        if isinstance(create, type) and issubclass(create, gymnasium.Env):
            settings = {**self.settings, "render_mode": "rgb_array"} if self.render else self.settings
            kind = GymEnvInf if auto_reset else GymEnv
            return kind([fitted(create(**settings)) for _ in range(n_envs)], seed)
        taken = inspect.signature(create).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        offered = {"device": device, "auto_reset": auto_reset}
        arguments = {name: value for name, value in offered.items() if takes_all or name in taken}
        env = create(n_envs=n_envs, seed=seed, **arguments, **self.settings)
        if not isinstance(env, VecEnv):
            raise UserError(f"{self.name} made a {type(env).__name__}, expected a VecEnv or a gymnasium environment.")
        return env


def fitted(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Wrap an environment so that the bundled agents can act in it."""
    if isinstance(env.action_space, gymnasium.spaces.Box):
        bounded = env.action_space
        env = gymnasium.wrappers.ClipAction(env)  # Gaussian agents know no bounds
        env.action_space = bounded  # those of SAC do
    if not isinstance(env.observation_space, gymnasium.spaces.Box):
        env = gymnasium.wrappers.FlattenObservation(env)  # one number for each case; parts side by side
    return env


def factories_of(names: Sequence[str]) -> tuple[str, Callable[[], Any] | None, Callable[..., Any] | None]:
    """Return the name of ``create_env``, and ``create_model`` and ``create_agent`` if they are named, too."""
    if not 1 <= len(names) <= 3 or not all(map(is_own, names)):
        raise UserError(
            f"--factory {' '.join(names)}: expected module:create_env, and if the checkpoint does not describe them "
            "module:create_model and module:create_agent."
        )
    create_env, *others = names
    imported(create_env)
    create_model, create_agent = (*map(imported, others), None, None)[:2]
    return create_env, create_model, create_agent
