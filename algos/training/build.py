"""Construction of a training's environments, network and batchers, each on its device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rlstruct import renamed
from rlstruct.algos.distributed.process_group import learner_group
from rlstruct.algos.seeds import Seeds, first_seed, training_seeds
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.arguments import check_factory
from rlstruct.core import DictTensor
from rlstruct.device import resolve_device
from rlstruct.engine.purity import RANDOM_IN_TRAINING
from rlstruct.errors import BadTypeError, BadValueError, check_call, warn_user
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import DeviceEnv, VecEnv

CreateEnv = Callable[..., VecEnv]

# Up to this number of parameters, one torch thread is as fast as several, and other processes can use the cores.
_SMALL = 500_000


@dataclass(frozen=True)
class DeviceEnvFactory:
    """A factory of environments whose tensors are on ``device``, wherever they compute.

    If ``create_env`` has a parameter ``device``, it is passed on, so that simulators can run there.
    """

    create_env: CreateEnv
    device: str

    def __call__(self, **arguments: object) -> VecEnv:
        """Create the environments, and wrap them in a DeviceEnv if they are elsewhere."""
        env = self.create_env(**_placed(self.create_env, self.device, arguments))
        if not isinstance(env, VecEnv) or env.device == resolve_device(self.device):
            return env  # the batcher reports what is not a VecEnv
        return DeviceEnv(env, self.device)


def check_create_env(create_env: CreateEnv, env_args: Mapping[str, object]) -> None:
    """Raise TypeError unless ``create_env`` is a factory that accepts the arguments of a training.

    Raise ValueError if ``env_args`` has the number of environments, which the configuration sets.
    """
    check_factory("run_training", "create_env", create_env, "such as a function of n_envs and seed")
    if "n_envs" in env_args:
        raise BadValueError(
            f"run_training: env_args has n_envs={env_args['n_envs']!r}, but create_env gets the n_envs of the "
            "configuration, and another number for evaluations. Leave it out, and set config.n_envs."
        )
    arguments = _placed(create_env, "cpu", {**env_args, "n_envs": 1, "seed": 0})
    fix = "every training passes n_envs and seed, further arguments come from env_args"
    check_call("run_training", "create_env", create_env, arguments, fix)


def _placed(create_env: CreateEnv, device: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Add the device to the arguments of a factory that accepts one."""
    takes_device = "device" in inspect.signature(create_env).parameters
    return {"device": device, **arguments} if takes_device else {**arguments}


def check_number(config: TrainingConfig, batcher: RL_Batcher, *, evaluates: bool = False) -> None:
    """Warn unless ``create_env`` has returned as many environments as the configuration asks for."""
    processes, made = max(1, config.evaluation_processes if evaluates else config.n_processes), batcher.n_envs()
    expected = config.evaluation_episodes if evaluates else config.n_envs * processes
    if made != expected:
        where = f" in {processes} processes" if processes > 1 else ""
        learners = 1 if config.n_processes else learner_group().size  # they divide the processes, or the environments
        setting = f"evaluation_episodes={made}" if evaluates else f"n_envs={made // processes * learners}"
        warn_user(
            f"run_training: create_env(n_envs={expected // processes}, …) returned {made} environments{where}, "
            f"expected {expected}. Create n_envs of them, or set {setting} in the configuration."
        )


def create_network(create_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Create the network of a training on the CPU; warn if it has layers that are random in train mode."""
    if isinstance(create_model, nn.Module):
        name = type(create_model).__name__
        raise BadTypeError(
            f"run_training: create_model is a network, {name}, expected a function that creates one, because the "
            f"configuration's seed determines the weights. Pass lambda: {name}(…), or lambda: copy.deepcopy(model) to "
            "continue from its current weights."
        )
    check_call("run_training", "create_model", create_model, {}, "it is called without any, so wrap it in a lambda")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create_model()
    if not isinstance(model, nn.Module):
        raise BadTypeError(
            f"run_training: create_model returned {type(model).__name__}, expected a torch.nn.Module. Does it lack a "
            "return?"
        )
    active = {type(part).__name__ for part in model.modules() if isinstance(part, RANDOM_IN_TRAINING) and part.training}
    if active:
        warn_user(
            f"run_training: {type(model).__name__} has {', '.join(sorted(active))} in train mode: the policy that acts "
            "and is evaluated differs at every call, and a replay computes other probabilities than those that the "
            "actions were sampled with. Call model.eval() in create_model, or leave these layers out."
        )
    return model


def threads_for(model: nn.Module, asked: int | None = None) -> int:
    """Return how many threads torch uses in a process with this network: ``asked``, or 1 if the network is small."""
    small = sum(parameter.numel() for parameter in model.parameters()) <= _SMALL
    return asked or (1 if small else torch.get_num_threads())


def create_batchers(
    config: TrainingConfig,
    create_agent: Callable[..., RL_Agent],
    create_env: CreateEnv,
    env_args: Mapping[str, object],
    model: nn.Module,
    resumptions: int,
    seeds: Seeds | None = None,
) -> tuple[Callable[[], RL_Batcher], Callable[[], RL_Batcher]]:
    """Return two factories: of the batcher that collects for a learner, and of the evaluation's batcher.

    Their agents act with copies of ``model``. A resumed training uses new seeds; otherwise environments that cannot be
    saved would repeat their first episodes. ``seeds`` are those of `training_seeds`, by default of ``config``.
    """
    weights = copy.deepcopy(model).to("cpu")  # from where it can be sent to any process
    group, n_envs, seeds = learner_group(), config.n_envs * max(1, config.n_processes), seeds or training_seeds(config)
    # Several learners share the environments that a single one would have.
    own_seed = first_seed(seeds["training"], n_envs * group.size, resumptions) + group.rank * n_envs

    def batcher(
        n_timesteps: int,
        device: str,
        stochastic: bool,
        n_envs: int,
        **options: Any,  # noqa: ANN401
    ) -> Callable[[], RL_Batcher]:
        agent_args = {"model": weights, "copy_model": True, "device": device, "stochastic": stochastic}
        settings = {"agent_args": agent_args, "env_args": {**env_args, "n_envs": n_envs}, "device": device, **options}
        return partial(RL_Batcher, n_timesteps, create_agent, DeviceEnvFactory(create_env, device), **settings)

    only_learners_share = config.sharing != "none" and not config.workers_share_gpus()
    first = config.initial_steps
    collecting = batcher(
        config.n_timesteps,
        config.batcher_device,
        True,
        config.n_envs,
        n_processes=config.n_processes,
        env_info=DictTensor({"initial_steps": torch.tensor([first], device="cpu")} if first else {}),
        compile_agent=config.compile_agent is True,
        cluster=config.cluster,
        seed=own_seed,
        sharing="none" if only_learners_share else config.sharing,
        thread_percentage=None if only_learners_share else config.thread_percentage,
    )
    evaluating = batcher(
        config.evaluation_timesteps or config.n_timesteps,
        config.evaluation_device,
        config.evaluation_stochastic,
        config.evaluation_episodes // max(1, config.evaluation_processes),
        n_processes=config.evaluation_processes,
        seed=first_seed(seeds["evaluation"], config.evaluation_episodes, resumptions),
    )
    return collecting, evaluating


__getattr__ = renamed.attributes(__name__)
