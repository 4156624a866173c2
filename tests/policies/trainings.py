"""Short trainings of every bundled agent, and of one with a dict observation, in real environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlstruct import DictTensor, RL_Agent, TemporalDictTensor, VecEnv
from rlstruct import agents as bundled
from rlstruct.agents.model_agent import ModelAgent
from rlstruct.algos import dqn, ppo, pqn, sac
from rlstruct.algos.training.run_folder import RunFolder
from rlstruct.envs import GymEnvInf

SMALL: dict[str, Any] = {
    "n_envs": 2, "n_processes": 0, "n_env_steps": 32, "n_timesteps": 8, "log_interval": 1,
    "evaluation_episodes": 2, "evaluation_processes": 0, "evaluation_interval": 10**6, "evaluation_step_limit": 20,
}  # fmt: skip


class Pictures(gymnasium.Env[np.ndarray[Any, Any], np.int64]):
    """One random picture [1, 12, 12] after the other, eleven in an episode."""

    observation_space = spaces.Box(0, 255, (1, 12, 12), np.uint8)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._draw(), 1.0, self.steps == 11, False, {}

    def _draw(self) -> np.ndarray[Any, Any]:
        return self.np_random.integers(0, 256, (1, 12, 12), np.uint8)


class Parts(gymnasium.Env[dict[str, Any], np.int64]):
    """An observation of three parts, one of them nested."""

    observation_space = spaces.Dict(
        place=spaces.Discrete(5), sight=spaces.Dict(near=spaces.Box(-9, 9, (2,)), far=spaces.MultiBinary(3))
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: np.int64) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 7, {}


class PartsNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(5, 2)  # has no row for other places
        self.policy, self.value = nn.Linear(7, 2), nn.Linear(7, 1)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.cat([self.place(features[:, 0].long()), features[:, 1:]], 1)
        return self.policy(features), self.value(features).squeeze(-1)


class PartsAgent(ModelAgent[PartsNetwork]):
    """Puts the parts of an observation side by side, and lets a bundled agent choose."""

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        parts = [observation[f"frame/{key}"].flatten(1) for key in ("sight/near", "sight/far")]
        frame = torch.cat([observation["frame/place"].unsqueeze(1), *parts], 1).float()
        agent = bundled.ActorCriticAgent(self.model, stochastic=self.stochastic, copy_model=False)
        return agent(state, observation + DictTensor({"frame": frame}), agent_info)


def of_gym(create: Callable[[], gymnasium.Env[Any, Any]], n_envs: int, seed: int | None = None) -> VecEnv:
    return GymEnvInf([create() for _ in range(n_envs)], seed)


CART_POLE = partial(of_gym, partial(gymnasium.make, "CartPole-v1", max_episode_steps=12))
PENDULUM = partial(of_gym, partial(gymnasium.make, "Pendulum-v1", max_episode_steps=9))
CLIPPED = partial(of_gym, lambda: gymnasium.wrappers.ClipAction(gymnasium.make("Pendulum-v1", max_episode_steps=9)))
PICTURES = partial(of_gym, Pictures)
STACK = (4, 12, 12)


PPO = ppo.PPOConfig(**SMALL, n_minibatches=2)


@dataclass(frozen=True)
class Task:
    create_model: Callable[[], nn.Module]
    create_agent: Callable[..., RL_Agent]
    create_env: Callable[..., VecEnv] = CART_POLE
    algorithm: Any = ppo
    config: Any = PPO

    def train(self, root: Path, **settings: Any) -> Path:
        """Train, and return the run folder."""
        factories = self.create_model, self.create_agent, self.create_env
        with RunFolder("run", self.config, n_env_steps=32, root=root, progress=False, loggers=()) as run:
            self.algorithm.train(self.config, *factories, run=run, **settings)
        return run.path


DQN: dict[str, Any] = {
    "algorithm": dqn,
    "config": dqn.DQNConfig(**SMALL, learning_starts=8, n_updates=2, batch_size=8, replay_capacity=100),
}
PQN: dict[str, Any] = {"algorithm": pqn, "config": pqn.PQNConfig(**SMALL, n_minibatches=2)}
TASKS = {
    "actor-critic": Task(lambda: bundled.ActorCritic(4, 2, hidden=(8,)), bundled.ActorCriticAgent),
    "recurrent": Task(lambda: bundled.RecurrentActorCritic(4, 2, n_hidden=8), bundled.RecurrentAgent),
    "gaussian": Task(lambda: bundled.GaussianActorCritic(3, 1), bundled.GaussianAgent, CLIPPED),
    "recurrent gaussian": Task(
        lambda: bundled.RecurrentGaussianActorCritic(3, 1, n_hidden=8), bundled.RecurrentGaussianAgent, CLIPPED
    ),
    "normalised": Task(
        lambda: bundled.Normalised(bundled.ActorCritic(4, 2), (4,), discount=0.99), bundled.ActorCriticAgent
    ),
    "normalised, recurrent": Task(
        lambda: bundled.Normalised(bundled.RecurrentActorCritic(4, 2, n_hidden=8), (4,)), bundled.RecurrentAgent
    ),
    "values": Task(lambda: bundled.QNetwork(4, 2, hidden=(8,), duelling=True), bundled.QAgent, **DQN),
    "normal values": Task(lambda: bundled.QNetwork(4, 2, hidden=(8,), layer_norm=True), bundled.QAgent, **PQN),
    "recurrent values": Task(
        lambda: bundled.RecurrentQNetwork(4, 2, n_hidden=8, layer_norm=True), bundled.RecurrentQAgent, **PQN
    ),
    "soft": Task(
        lambda: bundled.SoftActorCritic(
            3, (-2.0,), (2.0,), hidden=(8,), layer_norm=True, n_atoms=5, value_range=(-50.0, 1.0)
        ),
        bundled.SquashedGaussianAgent,
        PENDULUM,
        sac,
        sac.SACConfig(**SMALL, learning_starts=8, n_updates=2, batch_size=8, replay_capacity=100),
    ),
    "stacks": Task(
        lambda: bundled.ConvolutionalActorCritic(STACK, 3, n_features=8, layers=((4, 3, 1),)),
        partial(bundled.StackingAgent.create, create_agent=bundled.ActorCriticAgent, shape=STACK),
        PICTURES,
    ),
    "recurrent, stacks": Task(
        lambda: bundled.RecurrentActorCritic(
            bundled.ConvolutionalTrunk(STACK, n_features=8, layers=((4, 3, 1),)), 3, n_hidden=8
        ),
        partial(bundled.StackingAgent.create, create_agent=bundled.RecurrentAgent, shape=STACK),
        PICTURES,
    ),
    "convolutional values": Task(
        lambda: nn.Sequential(
            bundled.ConvolutionalTrunk((1, 12, 12), n_features=8, layers=((4, 3, 1),)), bundled.DuellingHead(8, 3)
        ),
        bundled.QAgent,
        PICTURES,
        **DQN,
    ),
}
PARTS = Task(PartsNetwork, PartsAgent, partial(of_gym, Parts))
