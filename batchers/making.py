"""From the user's factories to a collector, and to the memory that it is going to need. Part of rlstruct.batchers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstruct.batchers.collector import Collector
from rlstruct.batchers.progress import Progress
from rlstruct.batchers.shared_memory import Layout
from rlstruct.batchers.slab import Allocate, stretched
from rlstruct.core import DictTensor
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import VecEnv

CreateAgent = Callable[..., RL_Agent]
CreateEnv = Callable[..., VecEnv]


@dataclass(frozen=True)
class Factories:
    """How to make an agent and an environment, by value: lambdas and classes of a notebook travel too."""

    create_agent: CreateAgent
    agent_args: dict[str, Any]
    create_env: CreateEnv
    env_args: dict[str, Any]
    compile_agent: bool = False


def make_collector(
    factories: Factories,
    seed: int,
    agent_seed: int,
    *,
    n_timesteps: int,
    device: torch.device,
    allocate: Allocate,
    progress: Progress,
) -> Collector:
    """Call both factories and seed the agent; what exists is closed if the rest fails. For the arguments see Collector.

    Raises:
        TypeError: a factory returned something else than its contract says.
    """
    with contextlib.ExitStack() as undo:  # nobody else knows the environment, and it may hold processes or windows
        env = factories.create_env(**{**factories.env_args, "seed": seed})
        if not isinstance(env, VecEnv):
            raise TypeError(
                f"RL_Batcher: create_env returned a {type(env).__name__}, expected a VecEnv. "
                "Wrap gymnasium environments: GymEnv([...], seed), GymEnvInf([...], seed) or GymVectorEnv(vec, seed)."
            )
        undo.callback(env.close)
        agent = factories.create_agent(**factories.agent_args)
        if not isinstance(agent, RL_Agent):
            raise TypeError(
                f"RL_Batcher: create_agent returned a {type(agent).__name__}, expected an RL_Agent. "
                "Put the model into a class that inherits from RL_Agent."
            )
        undo.callback(agent.close)
        agent.seed(agent_seed)
        collector = Collector(
            env,
            agent,
            n_timesteps=n_timesteps,
            device=device,
            seed=seed,
            allocate=allocate,
            progress=progress,
            compile_agent=factories.compile_agent,
        )
        undo.pop_all()
    return collector


def measure(
    factories: Factories,
    seed: int,
    agent_seed: int,
    agent_info: DictTensor,
    env_info: DictTensor,
    *,
    n_timesteps: int,
    device: torch.device,
) -> Layout:
    """Find out the layout of a slab of ``n_timesteps`` steps by one step of a second agent in a second environment.

    Those of the batcher are not touched, nor are the global generators of random, numpy and torch.
    """
    layouts: list[Layout] = []

    def allocate(layout: Layout) -> dict[str, Tensor]:
        layouts.append(layout)
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in layout.items()}

    progress = Progress(torch.zeros(3, dtype=torch.int64, device="cpu"))
    with _generators_as_they_are(device):
        collector = make_collector(
            replace(factories, compile_agent=False),
            seed,
            agent_seed,
            n_timesteps=1,
            device=device,
            allocate=allocate,
            progress=progress,
        )
        try:
            collector.reset(agent_info, env_info)
            collector.collect(None)
        finally:
            collector.close()
    return stretched(layouts[0], n_timesteps)


@contextlib.contextmanager
def _generators_as_they_are(device: torch.device) -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
