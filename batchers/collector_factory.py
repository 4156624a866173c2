"""CollectorFactory: everything a process needs to create its agent, environments and collector."""

from __future__ import annotations

import contextlib
import copy
import inspect
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rlstruct import __version__
from rlstruct.batchers.collector import Collector
from rlstruct.batchers.fast_collector import FastCollector
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.rollout_buffer import Allocate
from rlstruct.errors import BadTypeError
from rlstruct.indexed_actions import env_for
from rlstruct.rl_agent import RL_Agent, expect_agent
from rlstruct.vec_env import Capturable, VecEnv, expect_env

CreateAgent = Callable[..., RL_Agent]
CreateEnv = Callable[..., VecEnv]


@dataclass(frozen=True)
class CollectorFactory:
    """The user's factories and their arguments. Workers get a pickled copy, including lambdas and notebook classes."""

    create_agent: CreateAgent
    agent_args: dict[str, Any]
    create_env: CreateEnv
    env_args: dict[str, Any]
    n_timesteps: int
    device: torch.device
    compile_agent: bool

    def create(
        self, seed: int, agent_seed: int, progress: Progress, allocate: Allocate | None = None, *, at_once: bool = False
    ) -> Collector:
        """Call both factories, seed the agent and create a collector. If that fails, close what has been created.

        Args:
            seed: seed of the first environment.
            agent_seed: argument of ``agent.seed``.
            progress: see `Collector`.
            allocate: see `Collector`.
            at_once: take T steps at once, if the environments can.
        """
        with contextlib.ExitStack() as undo:
            env = self.create_env(**{**self.env_args, "seed": seed})
            expect_env("RL_Batcher: create_env returned", env)
            undo.callback(progress.closing()(env.close))
            agent = self.create_agent(**self.agent_args)
            expect_agent("RL_Batcher: create_agent returned", agent)
            undo.callback(progress.closing()(agent.close))
            _check_call_of(agent)
            env = env_for(agent, env)
            agent.seed(agent_seed)
            fast = at_once and (isinstance(env, Capturable) or hasattr(type(env), "fused_rollout"))
            collector = (FastCollector if fast else Collector)(
                env,
                agent,
                n_timesteps=self.n_timesteps,
                device=self.device,
                seed=seed,
                progress=progress,
                allocate=allocate,
                compile_agent=self.compile_agent,
            )
            undo.pop_all()
        return collector


def _check_call_of(agent: RL_Agent) -> None:
    """Raise TypeError unless an agent's ``__call__`` takes four arguments."""
    with contextlib.suppress(ValueError):  # some callables written in C have no signature
        signature = inspect.signature(type(agent).__call__)
        try:
            signature.bind(agent, None, None, None, None)
        except TypeError:
            raise BadTypeError(
                f"{type(agent).__name__}.__call__: its parameters are {signature}, expected four besides self. Write "
                "def __call__(self, state, observation, agent_info, history=None)."
            ) from None


def versions() -> dict[str, str]:
    """Return the versions that all processes of a training must share."""
    return {"rlstruct": __version__, "torch": torch.__version__, "Python": platform.python_version()}


def by_value(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the tensors and modules in arguments, including those in lists, tuples and dicts, without moving them.

    An agent in this process then has its own weights, like an agent in a worker. Copies share memory where the
    originals do. Other objects are not copied.
    """
    memo: dict[int, Any] = {}

    def copied(value: object) -> object:
        if isinstance(value, Tensor) and not value.is_leaf:
            return value.detach().clone()
        return copy.deepcopy(value, memo) if isinstance(value, Tensor | nn.Module) else value

    copies: dict[str, Any] = pytree.tree_map(copied, dict(arguments))
    return copies
