"""Devices without float64, as mps on a Mac: the simulated accelerator refuses it, and everything trains there."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch

from rlstruct import DeviceEnv, VecEnv, agents, sims
from rlstruct.algos import Algorithm, dqn, ppo, sac
from rlstruct.algos.training.config import TrainingConfig
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.episodes import EpisodeStatistics
from rlstruct.device import accumulator_dtype
from rlstruct.envs import GymEnvInf

SIM = "sim:0"
SHORT: dict[str, Any] = {"n_env_steps": 160, "n_envs": 4, "n_timesteps": 10, "n_processes": 0, "log_interval": 1}
SHORT |= {"evaluation_episodes": 2, "evaluation_processes": 0, "evaluation_timesteps": 10, "evaluation_interval": 80}
SHORT |= {"batcher_device": SIM, "learner_device": SIM, "evaluation_device": SIM}


@pytest.fixture(autouse=True)
def _without() -> Iterator[None]:
    from rlstruct.testing.sim_device import without_float64  # not with every torch

    with without_float64():
        yield


def create_env(n_envs: int, seed: int, device: str = SIM, name: str = "CartPole-v1") -> VecEnv:
    return DeviceEnv(GymEnvInf([gymnasium.make(name, max_episode_steps=20) for _ in range(n_envs)], seed), device)


def test_the_simulated_device_refuses_float64_however_it_is_made() -> None:
    for make in (
        lambda: torch.zeros(2, dtype=torch.float64, device=SIM),
        lambda: torch.zeros(2, dtype=torch.float64).to(SIM),
        lambda: torch.zeros(2, device=SIM).to(torch.float64),
        lambda: torch.zeros(2, device=SIM).sum(dtype=torch.float64),
        lambda: torch.zeros(2, device=SIM).double(),
    ):
        with pytest.raises(TypeError, match="float64 on sim:0, expected another dtype: this device imitates mps"):
            make()
    assert torch.zeros(2, device=SIM).sum().item() == 0.0
    assert accumulator_dtype(SIM) is torch.float32
    assert accumulator_dtype("mps") is torch.float32
    assert accumulator_dtype("cpu") is torch.float64


def normalised() -> torch.nn.Module:
    return agents.Normalised(agents.ActorCritic(4, 2, hidden=(16,)), (4,), discount=0.99)


TRAININGS: dict[str, tuple[Algorithm[Any], TrainingConfig, Any, Any, str]] = {
    "ppo": (
        ppo.train,
        ppo.PPOConfig(**{**SHORT, "evaluation_device": "cpu"}),
        normalised,
        agents.ActorCriticAgent,
        "CartPole-v1",
    ),
    "dqn": (
        dqn.train,
        dqn.DQNConfig(**SHORT, learning_starts=60, batch_size=16, prioritised=True),
        partial(agents.QNetwork, 4, 2, hidden=(16,)),
        agents.QAgent,
        "CartPole-v1",
    ),
    "sac": (
        sac.train,
        sac.SACConfig(**SHORT, learning_starts=60, batch_size=16, n_updates=4),
        partial(agents.SoftActorCritic, 3, (-2.0,), (2.0,), hidden=(16,)),
        agents.SquashedGaussianAgent,
        "Pendulum-v1",
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_algorithms_collect_learn_and_evaluate_without_float64(name: str) -> None:
    train, config, create_model, create_agent, env = TRAININGS[name]
    result = train(config, create_model, create_agent, create_env, env_args={"name": env})
    assert result.env_steps >= 160
    assert result.losses
    assert all(weight.isfinite().all() for weight in result.model.parameters())


def test_statistics_simulators_and_random_agents_do_without_float64() -> None:
    def create_simulator(n_envs: int, seed: int) -> VecEnv:
        return sims.make("CartPole-v1", n_envs, seed, device=SIM, auto_reset=True)

    space = gymnasium.make("CartPole-v1").action_space
    create_agent = partial(agents.RandomAgent, space, device=SIM)
    with RL_Batcher(60, create_agent, create_simulator, env_args={"n_envs": 3}, seed=0, device=SIM) as batcher:
        batcher.reset()
        batcher.execute()
        batch = batcher.get()[0]
    statistics = EpisodeStatistics(3, SIM)
    episodes = statistics.add(batch)
    assert episodes["return"].dtype is torch.float32
    assert episodes["return"].tolist() == episodes["length"].tolist()  # CartPole gives 1 a step
    assert len(episodes["length"]) > 0
