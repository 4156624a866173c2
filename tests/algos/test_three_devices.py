"""Every algorithm with learner, batcher and evaluation on three devices: nothing is misplaced, and no update waits."""

from __future__ import annotations

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from picture_env import SIDES, PictureEnv
from torch import Tensor, nn

from rlstruct import RL_Agent, RL_Agent_CheckDevice, Trajectories, VecEnv, agents, sims
from rlstruct.algos import a2c, dqn, ppo, pqn, reinforce, sac
from rlstruct.algos.training.evaluation import TrainingResult
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.testing import allow_host_sync, count_host_syncs, forbid_host_sync

DEVICES = {"learner_device": "sim:0", "batcher_device": "sim:1", "evaluation_device": "cpu"}
ALL: dict[str, Any] = {"evaluation_episodes": 3, "evaluation_processes": 0, "n_processes": 0, "log_interval": 3}
ALL |= {"evaluation_interval": 10**6, "evaluation_timesteps": 25, "max_gradient_norm": 0.5}
PIECES = {**ALL, "n_env_steps": 240, "n_timesteps": 10, "n_envs": 6}


def create_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([gymnasium.make("CartPole-v1", max_episode_steps=25) for _ in range(n_envs)], seed=seed)


def create_episodic_env(n_envs: int, seed: int) -> VecEnv:
    return GymEnv([gymnasium.make("CartPole-v1", max_episode_steps=25) for _ in range(n_envs)], seed=seed)


def create_pendulum(n_envs: int, seed: int) -> VecEnv:
    envs = [gymnasium.make("Pendulum-v1", max_episode_steps=25) for _ in range(n_envs)]
    return GymEnvInf([gymnasium.wrappers.ClipAction(env) for env in envs], seed=seed)


class Pixels(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the state of CartPole as 10 x 10 bytes."""

    observation_space = gymnasium.spaces.Box(0, 255, (10, 10), np.uint8)

    def observation(self, observation: Any) -> Any:
        image = np.zeros((10, 10), np.uint8)
        image[[0, 3, 6, 9], (np.clip(observation + 0.5, 0.0, 0.9) * 10).astype(int)] = 255
        return image


def create_images(n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([Pixels(gymnasium.make("CartPole-v1", max_episode_steps=25)) for _ in range(n_envs)], seed=seed)


def create_simulator(n_envs: int, seed: int, device: str) -> VecEnv:
    return sims.make("CartPole-v1", n_envs, seed, device=device, auto_reset=True)


def perceptron() -> nn.Module:
    return agents.ActorCritic(4, 2, hidden=(16,))


def normalised() -> nn.Module:
    return agents.Normalised(perceptron(), (4,), discount=0.99)


def recurrent() -> nn.Module:
    return agents.RecurrentActorCritic(4, 2, n_hidden=8)


def gaussian() -> nn.Module:
    return agents.GaussianActorCritic(3, 1, hidden=(16,))


def recurrent_gaussian() -> nn.Module:
    return agents.RecurrentGaussianActorCritic(3, 1, n_hidden=8)


def convolutional() -> nn.Module:
    return agents.ConvolutionalActorCritic((10, 10), 2, n_features=16, layers=((4, 3, 1),))


def pictures() -> nn.Module:
    return agents.ConvolutionalActorCritic((4, *SIDES), 2, n_features=4, layers=((3, 3, 1),))


def action_values() -> nn.Module:
    return agents.QNetwork(4, 2, hidden=(16,), duelling=True)


def normal_action_values() -> nn.Module:
    return agents.QNetwork(4, 2, hidden=(16,), layer_norm=True)


def recurrent_action_values() -> nn.Module:
    return agents.RecurrentQNetwork(4, 2, n_hidden=16, layer_norm=True)


def soft() -> nn.Module:
    return agents.SoftActorCritic(3, (-2.0,), (2.0,), hidden=(16,))


A2C = a2c.A2CConfig(**PIECES)
LAGGING = a2c.A2CConfig(**PIECES, overlap=True, vtrace=True, n_updates=2, n_minibatches=2)
WINDOW = dataclasses.replace(A2C, n_env_steps=72, n_timesteps=2, n_minibatches=2, window=3, vtrace=True)
STACKING = partial(agents.StackingAgent.create, create_agent=agents.ActorCriticAgent, shape=(4, *SIDES))
DQN = dqn.DQNConfig(**PIECES, learning_starts=60, n_updates=2, batch_size=16)
SAC = sac.SACConfig(**PIECES, learning_starts=60, n_updates=2, batch_size=16)
PPO = ppo.PPOConfig(**PIECES, n_epochs=2, n_minibatches=2)
PQN = pqn.PQNConfig(**PIECES, n_epochs=2, n_minibatches=2)
EPISODES = reinforce.ReinforceConfig(**ALL, n_env_steps=200, n_timesteps=25, n_envs=6)
KINDS: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    "a2c": (a2c, A2C, perceptron, agents.ActorCriticAgent, create_env),
    "a2c with memory": (a2c, A2C, recurrent, agents.RecurrentAgent, create_env),
    "a2c with lag": (a2c, LAGGING, gaussian, agents.GaussianAgent, create_pendulum),
    "a2c with lag and memory": (a2c, LAGGING, recurrent_gaussian, agents.RecurrentGaussianAgent, create_pendulum),
    "a2c, window, stacks": (a2c, WINDOW, pictures, STACKING, partial(PictureEnv, auto_reset=True)),
    "ppo": (ppo, PPO, perceptron, agents.ActorCriticAgent, create_env),
    "ppo, stacks": (ppo, PPO, pictures, STACKING, partial(PictureEnv, auto_reset=True)),
    "ppo, normalised": (ppo, PPO, normalised, agents.ActorCriticAgent, create_env),
    "ppo with memory": (ppo, PPO, recurrent_gaussian, agents.RecurrentGaussianAgent, create_pendulum),
    "ppo, images": (ppo, PPO, convolutional, agents.ActorCriticAgent, create_images),
    "pqn": (pqn, PQN, normal_action_values, agents.QAgent, create_env),
    "pqn with memory": (pqn, PQN, recurrent_action_values, agents.RecurrentQAgent, create_env),
    "dqn": (dqn, DQN, action_values, agents.QAgent, create_env),
    "dqn, prioritised": (dqn, dataclasses.replace(DQN, prioritised=True), action_values, agents.QAgent, create_env),
    "sac": (sac, SAC, soft, agents.SquashedGaussianAgent, create_pendulum),
    "reinforce": (reinforce, EPISODES, perceptron, agents.ActorCriticAgent, create_episodic_env),
    "reinforce with memory": (reinforce, EPISODES, recurrent, agents.RecurrentAgent, create_episodic_env),
}  # fmt: skip


def checked(create_agent: Callable[..., RL_Agent]) -> Callable[..., RL_Agent]:
    def create_checked(model: nn.Module, **arguments: Any) -> RL_Agent:
        agent = create_agent(model, **arguments)
        return RL_Agent_CheckDevice(agent, arguments["device"], host_syncs=forbid_host_sync)

    return create_checked


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let no update of any learner wait for its device, but for the one crossing, ahead of it; counts the updates."""
    counts: Counter[str] = Counter()
    # Adam counts its steps in tensors on the CPU, wherever the weights are: reading those waits for no device.
    monkeypatch.setattr(torch.optim.Adam, "step", allow_host_sync()(torch.optim.Adam.step))
    kinds: Any = (
        a2c.A2CLearner,
        dqn.DQNLearner,
        ppo.PPOLearner,
        pqn.PQNLearner,
        reinforce.ReinforceLearner,
        sac.SACLearner,
    )
    for kind in kinds:

        def update(
            self: Any, trajectories: Trajectories, fraction_done: float, unguarded: Any = kind.update
        ) -> dict[str, Tensor]:
            counts["updates"] += 1
            trajectories = trajectories.to(self.device)
            with forbid_host_sync():
                terms: dict[str, Tensor] = unguarded(self, trajectories, fraction_done)
            return terms

        monkeypatch.setattr(kind, "update", update)
    return counts


def train(kind: str, **changes: Any) -> TrainingResult:
    module, config, create_model, create_agent, make_env = KINDS[kind]
    config = dataclasses.replace(config, **changes)
    result: TrainingResult = module.train(config, create_model, checked(create_agent), make_env)
    return result


# Sums are associated alike on the simulated devices, which compute on the CPU, but Adam has one kernel there only: an
# error of a Q-network grows from update to update.
@pytest.mark.parametrize("kind", KINDS)
def test_three_devices_reach_the_losses_of_the_cpu_and_loss_and_step_never_wait(
    kind: str, guarded: Counter[str]
) -> None:
    less = {"n_env_steps": min(KINDS[kind][1].n_env_steps, 180 if kind.startswith(("dqn", "sac")) else 120)}
    elsewhere = train(kind, **less, **DEVICES)
    assert guarded["updates"] >= 2
    on_cpu = train(kind, **less)
    assert len(on_cpu.losses["loss"]) >= 2
    rel, absolute = (1e-3, 1e-4) if kind.startswith(("dqn", "sac")) else (1e-5, 1e-5)
    for name, numbers in on_cpu.losses.items():
        assert elsewhere.losses[name] == pytest.approx(numbers, rel=rel, abs=absolute), name
    for there, here in zip(elsewhere.evaluations, on_cpu.evaluations, strict=True):
        assert there.returns == pytest.approx(here.returns, rel=1e-5)
    assert {weight.device for weight in elsewhere.model.parameters()} == {torch.device("sim:0")}


@pytest.mark.parametrize("prioritised", [False, True])
def test_a_replay_buffer_on_a_fourth_device_changes_nothing(prioritised: bool) -> None:
    here, there = (train("dqn", prioritised=prioritised, **DEVICES, replay_device=name) for name in (None, "cpu"))
    for name, numbers in here.losses.items():
        assert there.losses[name] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(
    ("module", "config", "create_model", "create_agent"),
    [
        (a2c, A2C, perceptron, agents.ActorCriticAgent),
        (ppo, PPO, perceptron, agents.ActorCriticAgent),
        (dqn, DQN, action_values, agents.QAgent),
    ],
    ids=["a2c", "ppo", "dqn"],
)
def test_the_loop_waits_for_the_devices_once_in_log_interval_updates(
    module: Any, config: Any, create_model: Any, create_agent: Any, guarded: Counter[str]
) -> None:
    config = dataclasses.replace(config, **DEVICES, log_interval=4)
    with count_host_syncs() as waits:
        result = module.train(config, create_model, create_agent, create_simulator)
    assert not [call for call in waits.calls if "training.py" in call and "int" in call]  # steps are counted by shape
    looks = -(-len(result.losses["loss"]) // 4)  # the last one takes what is left
    where = Counter(
        pathlib.Path(call.partition(":")[0]).name for call in waits.calls if "tolist" in call or "int" in call
    )
    assert where["history.py"] == looks  # the losses
    assert where["episodes.py"] == looks  # the returns of the episodes that ended since
