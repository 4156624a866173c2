"""Small trainings of all algorithms, for the tests of checkpoints; a killed process imports them from here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    ConvolutionalTrunk,
    Normalised,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
    RecurrentQAgent,
    RecurrentQNetwork,
    SoftActorCritic,
    SquashedGaussianAgent,
)
from rlstruct.algos import a2c, dqn, ppo, pqn, reinforce, sac
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.sims import make

COMMON: dict[str, Any] = {
    "n_envs": 4,
    "n_processes": 0,
    "evaluation_episodes": 4,
    "evaluation_processes": 0,
    "evaluation_interval": 300,
    "log_interval": 3,
    "checkpoint_interval": 100,
}


def create_sim(n_envs: int, seed: int, auto_reset: bool = True) -> Any:
    return make("CartPole-v1", n_envs, seed, auto_reset=auto_reset, time_limit=60)


def create_episodic_sim(n_envs: int, seed: int) -> Any:
    return create_sim(n_envs, seed, auto_reset=False)


def create_network() -> ActorCritic:
    return ActorCritic(4, 2, hidden=(16,))


def create_normalised_network() -> Normalised:
    return Normalised(create_network(), (4,), discount=0.99)


def create_recurrent_network() -> RecurrentActorCritic:
    return RecurrentActorCritic(4, 2, n_hidden=16)


def create_recurrent_network_of_images() -> RecurrentActorCritic:
    trunk = ConvolutionalTrunk((10, 10, 4), channels_last=True, n_features=16, layers=((4, 3, 2),))
    return RecurrentActorCritic(trunk, 3, n_hidden=16)


def create_breakout(n_envs: int, seed: int) -> Any:
    return make("Breakout-MinAtar", n_envs, seed, time_limit=60)


def create_q_network() -> QNetwork:
    return QNetwork(4, 2, hidden=(16,))


def create_normal_q_network() -> QNetwork:
    return QNetwork(4, 2, hidden=(16,), layer_norm=True)


def create_recurrent_q_network() -> RecurrentQNetwork:
    return RecurrentQNetwork(4, 2, n_hidden=16, layer_norm=True)


def create_pendulum(n_envs: int, seed: int) -> Any:
    return make("Pendulum-v1", n_envs, seed, time_limit=60)


def create_soft_network() -> SoftActorCritic:
    return SoftActorCritic(3, (-2.0,), (2.0,), hidden=(16,))


def create_distributional_network() -> SoftActorCritic:
    return SoftActorCritic(3, (-2.0,), (2.0,), hidden=(16,), layer_norm=True, n_atoms=11, value_range=(-50.0, 5.0))


DISTRIBUTIONAL: dict[str, Any] = {"n_step": 3, "critic_reduction": "mean", "weight_decay": 0.01}
SAC = sac.SACConfig(
    n_env_steps=800, n_timesteps=8, learning_starts=150, n_updates=2, batch_size=16, replay_capacity=400, **COMMON
)
DQN = dqn.DQNConfig(
    n_env_steps=800, n_timesteps=8, learning_starts=150, n_updates=2, batch_size=16, replay_capacity=400, **COMMON
)
A2C = a2c.A2CConfig(n_env_steps=800, n_timesteps=10, evaluation_timesteps=60, **COMMON)
PPO = ppo.PPOConfig(n_env_steps=800, n_timesteps=10, evaluation_timesteps=60, target_kl=0.002, **COMMON)
PQN = pqn.PQNConfig(n_env_steps=800, n_timesteps=10, n_epochs=2, n_minibatches=2, **COMMON)
TASKS: dict[str, tuple[Any, TrainingConfig, Callable[[], Any], Any, Any]] = {
    "reinforce": (
        reinforce,
        reinforce.ReinforceConfig(n_env_steps=800, n_timesteps=60, **COMMON),
        create_network,
        ActorCriticAgent,
        create_episodic_sim,
    ),
    "a2c": (a2c, A2C, create_network, ActorCriticAgent, create_sim),
    "a2c, recurrent, overlap": (
        a2c,
        replace(A2C, overlap=True),
        create_recurrent_network,
        RecurrentAgent,
        create_sim,
    ),
    "a2c, window": (
        a2c,
        replace(A2C, n_timesteps=2, n_minibatches=2, window=3, vtrace=True),
        create_network,
        ActorCriticAgent,
        create_sim,
    ),
    "ppo, normalised": (ppo, PPO, create_normalised_network, ActorCriticAgent, create_sim),
    "ppo": (ppo, PPO, create_network, ActorCriticAgent, create_sim),
    "ppo, recurrent": (ppo, PPO, create_recurrent_network, RecurrentAgent, create_sim),
    "a2c, recurrent, images": (a2c, A2C, create_recurrent_network_of_images, RecurrentAgent, create_breakout),
    "pqn": (pqn, PQN, create_normal_q_network, QAgent, create_sim),
    "pqn, recurrent": (pqn, PQN, create_recurrent_q_network, RecurrentQAgent, create_sim),
    "dqn": (dqn, DQN, create_q_network, QAgent, create_sim),
    "sac": (sac, SAC, create_soft_network, SquashedGaussianAgent, create_pendulum),
    "sac, distributional": (
        sac,
        replace(SAC, **DISTRIBUTIONAL),
        create_distributional_network,
        SquashedGaussianAgent,
        create_pendulum,
    ),
    "dqn, prioritised": (dqn, replace(DQN, prioritised=True), create_q_network, QAgent, create_sim),
}


def train(name: str, run: RunFolder | None, create_env: Any = None, **changes: Any) -> TrainingResult:
    module, config, create_model, create_agent, sim = TASKS[name]
    result: TrainingResult = module.train(
        replace(config, **changes), create_model, create_agent, create_env or sim, run=run
    )
    return result


def config_of(name: str) -> TrainingConfig:
    return TASKS[name][1]


def train_and_be_killed(name: str, folder: Path) -> None:
    """Train in a folder, new or begun, with checkpoints that take long to write."""
    save = torch.save

    def save_slowly(state: Any, file: Any) -> None:
        save(state, file)
        file.flush()
        time.sleep(0.02)  # so that many kills hit a file that is written, but has no name yet

    torch.save = save_slowly
    with RunFolder.resume(folder, progress=False) as run:
        train(name, run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_and_be_killed(sys.argv[1], Path(sys.argv[2]))
