"""Environments, weights and batchers where a training wants them. Layer 4."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlstruct.algos.config import TrainingConfig
from rlstruct.batchers import RL_Batcher
from rlstruct.device import resolve_device
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import DeviceEnv, VecEnv

CreateAgent = Callable[..., RL_Agent]
CreateEnv = Callable[..., VecEnv]

# Seeds of environments: so many for each run, the second half for its evaluation, so that no two runs and no two
# batchers play the same episodes.
_SEEDS_PER_RUN = 1_000_000
_SEEDS_PER_RESUMPTION = 10_007


@dataclass(frozen=True)
class PlacedEnv:
    """A factory of environments that appear on ``device``, wherever they compute.

    Attributes:
        create_env: the factory of the environments themselves. If it has a parameter ``device``, it is told ``device``,
            so that a simulator can be made there.
        device: where observations appear and actions are expected.
    """

    create_env: CreateEnv
    device: str

    def __call__(self, **arguments: object) -> VecEnv:
        """Create the environments, and wrap them in a DeviceEnv if they are elsewhere."""
        if "device" in inspect.signature(self.create_env).parameters:
            arguments = {"device": self.device, **arguments}
        env = self.create_env(**arguments)
        return env if env.device == resolve_device(self.device) else DeviceEnv(env, self.device)


def cpu_copy(model: nn.Module) -> nn.Module:
    """Copy a module to the CPU, from where it can travel to any process.

    Args:
        model: on any device.
    """
    # Copied parameter by parameter while it moves: a deepcopy on the device would need its memory twice.
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        moved = tensor.detach().to("cpu", copy=True)
        memo[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
    return copy.deepcopy(model, memo)


@dataclass(frozen=True)
class BatchersOfTraining:
    """Makes the two batchers of a training, with agents that act with copies of one network.

    Attributes:
        config: where they live, and how much they do.
        create_agent: called as ``create_agent(model, device=…, stochastic=…, copy_model=True)``.
        create_env: called as ``create_env(n_envs=…, seed=…, **env_args)``.
        env_args: its further arguments.
        weights: the network, on the CPU: it travels to every process.
        resumptions: how often the training was resumed. Environments that cannot be saved would play their first
            episodes again, did they not get other seeds.
    """

    config: TrainingConfig
    create_agent: CreateAgent
    create_env: CreateEnv
    env_args: Mapping[str, object]
    weights: nn.Module
    resumptions: int

    def collecting(self) -> RL_Batcher:
        """Make the one that learning gets its batches from."""
        config = self.config
        return self._make(
            config.n_timesteps,
            self._first_seed(),
            stochastic=True,
            n_envs=config.n_envs,
            n_processes=config.n_processes,
            device=config.batcher_device,
            compile_agent=config.compile_agent,
        )

    def evaluating(self) -> RL_Batcher:
        """Make the one that the evaluation plays with."""
        config = self.config
        return self._make(
            config.evaluation_timesteps or config.n_timesteps,
            self._first_seed() + _SEEDS_PER_RUN // 2,
            stochastic=config.evaluation_stochastic,
            n_envs=config.evaluation_episodes // max(1, config.evaluation_processes),
            n_processes=config.evaluation_processes,
            device=config.evaluation_device,
        )

    def _first_seed(self) -> int:
        since_resumed = self.resumptions * _SEEDS_PER_RESUMPTION % (_SEEDS_PER_RUN // 2)
        return self.config.seed * _SEEDS_PER_RUN + since_resumed

    def _make(
        self,
        n_timesteps: int,
        seed: int,
        *,
        stochastic: bool,
        n_envs: int,
        n_processes: int,
        device: str,
        compile_agent: bool = False,
    ) -> RL_Batcher:
        return RL_Batcher(
            n_timesteps,
            self.create_agent,
            PlacedEnv(self.create_env, device),
            agent_args={"model": self.weights, "copy_model": True, "device": device, "stochastic": stochastic},
            env_args={**self.env_args, "n_envs": n_envs},
            n_processes=n_processes,
            seed=seed,
            device=device,
            compile_agent=compile_agent,
        )
