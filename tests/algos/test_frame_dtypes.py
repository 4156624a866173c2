"""Frames of every dtype that gymnasium has go through collection, learners, buffers and policies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct import DictTensor, RL_Agent, Trajectories
from rlstruct.agents import (
    ActorCritic,
    ActorCriticAgent,
    Normalised,
    QAgent,
    QNetwork,
    RecurrentActorCritic,
    RecurrentAgent,
    RunningMoments,
    StackingAgent,
)
from rlstruct.algos.dqn import DQNConfig, DQNLearner
from rlstruct.algos.ppo import PPOConfig, PPOLearner
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.batchers import RL_Batcher
from rlstruct.core import TensorSpec
from rlstruct.envs import GymEnvInf
from rlstruct.policies import Policy, export
from rlstruct.policies.loading import shown_by
from rlstruct.sims import TensorEnv

INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
DTYPES: list[Any] = [np.bool_, *INTEGERS, np.float16, np.float32, np.float64]
B, T = 4, 12


class Noise(gymnasium.Env[Any, Any]):
    """Shows random numbers of a dtype, the greatest integers among them."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: Any) -> None:
        high = 1 if np.dtype(dtype).kind in "bf" else min(np.iinfo(dtype).max, 2**16 - 1)
        self.observation_space = spaces.Box(0, high, (1, 3), dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observation_space.sample(), float(action), self.t == 5, False, {}


def create_env(n_envs: int, seed: int, dtype: Any) -> GymEnvInf:
    return GymEnvInf([Noise(dtype) for _ in range(n_envs)], seed)


def collect(create_agent: Any, create_env: Any) -> Trajectories:
    made = {"env_args": {"n_envs": B}, "n_processes": 0, "seed": 0}
    with RL_Batcher(T, create_agent, create_env, **made) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    assert trajectories is not None
    return trajectories


def torch_dtype(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_learned_from(dtype: Any) -> None:
    torch.manual_seed(0)
    created = partial(create_env, dtype=dtype)
    for network, agent in ((ActorCritic, ActorCriticAgent), (RecurrentActorCritic, RecurrentAgent)):
        model = Normalised(network(3, 2), (1, 3), discount=0.9)
        batch = collect(partial(agent, model), created)
        frames = batch.steps["observation/frame"]
        assert frames.dtype == torch_dtype(dtype)
        learner = PPOLearner.create(model, agent, PPOConfig(n_envs=B, n_timesteps=T))
        assert all(term.isfinite() for term in learner.update(batch, 0.0).values())
        expected = frames.flatten(0, 1).double()
        assert model.frames is not None
        torch.testing.assert_close(model.frames.mean, expected.mean(0), rtol=1e-4, atol=1e-4)
        policy = Policy(model, agent, shown_by(batch.steps.specs()))
        assert policy.act(frames[0].numpy()).shape == (T,)
        assert policy.act(frames[:, 0]).shape == (B,) if agent is ActorCriticAgent else True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_replayed(dtype: Any) -> None:
    batch = collect(partial(QAgent, QNetwork(3, 2)), partial(create_env, dtype=dtype))
    settings = {"n_envs": B, "n_timesteps": T, "learning_starts": 16, "batch_size": 8, "replay_capacity": 200}
    learner = DQNLearner.create(QNetwork(3, 2), QAgent, DQNConfig(**settings))
    assert all(term.isfinite().all() for term in learner.update(batch, 0.0).values())
    frames = batch.steps["observation/frame"]
    for padding in ("reset", "zero"):
        buffer = ReplayBuffer(200, n_step=2, n_stack=2, stack_padding=padding)
        buffer.extend(batch)
        restored = ReplayBuffer(200, n_step=2, n_stack=2, stack_padding=padding)
        restored.load_state_dict(buffer.state_dict())
        for sample in (buffer.sample(64), restored.sample(64)):
            stack = sample["observation/frame"]  # [64, 2, 3]
            assert stack.dtype == frames.dtype
            known = {tuple(row) for row in frames.reshape(-1, 3).tolist()}
            assert all(tuple(row) in known for row in stack[:, 1].tolist())
            first = stack[:, 0].double().sum(1) == 0
            assert bool(first.any()) == (padding == "zero") or dtype == np.bool_


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_single_numbers_of_every_dtype_are_taken_by_row(dtype: Any) -> None:
    numbers = torch.from_numpy(np.array([0, 1, 1, 0]).astype(dtype))
    taken = DictTensor({"frame": numbers}).index(torch.tensor([1, 3]))["frame"]
    assert torch.equal(taken, numbers[1::2])
    stacking = StackingAgent(ActorCriticAgent(ActorCritic(2, 2)), (2,), device="cpu", dtype=numbers.dtype)
    state = stacking.initial_state(DictTensor(), 4)
    seen = {"frame": numbers.unsqueeze(1), "initial_state": torch.ones(4, dtype=torch.bool), "rng": torch.arange(4)}
    _, state = stacking(state, DictTensor(seen), DictTensor())
    assert torch.equal(state["earlier_frames"], numbers.unsqueeze(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moments_are_those_of_the_numbers(dtype: Any) -> None:
    values = torch.from_numpy(np.array([[0, 1], [1, 1], [1, 0], [0, 0]]).astype(dtype))
    moments = RunningMoments((2,))
    moments.update(values, torch.tensor([True, True, True, False]))
    torch.testing.assert_close(moments.mean, torch.tensor([2 / 3, 2 / 3]).double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint16, np.uint64], ids=str)
def test_a_policy_that_sees_them_is_exported(dtype: Any, tmp_path: Path) -> None:
    if dtype is np.uint64 and torch.__version__.startswith("2.7."):
        pytest.skip("torch 2.7 cannot write a program with uint64")
    specs = {"frame": TensorSpec((1, 3), torch_dtype(dtype))}
    policy = Policy(Normalised(QNetwork(3, 2), (1, 3)), QAgent, specs)
    assert export(policy, tmp_path / "policy.pt2") <= 1e-5
    frame = np.ones((2, 1, 3), dtype)
    written = torch.export.load(tmp_path / "policy.pt2").module()({"frame": torch.from_numpy(frame)})
    assert written["action"].tolist() == policy.act(frame).tolist()


@dataclass(frozen=True)
class Flips:
    x: Tensor


class Flipping(TensorEnv[Flips]):
    """Shows 0 and 1 in turn, and takes actions of the same dtype."""

    stochastic = False
    default_time_limit = 5

    def __init__(self, n_envs: int, dtype: Any, **settings: Any) -> None:
        self.observation_space = spaces.Box(0, 1, (2,), dtype)
        self.action_space = spaces.Discrete(2, dtype=dtype if np.dtype(dtype).kind in "iu" else np.int64)
        super().__init__(n_envs, **settings)

    def initial(self, key: Tensor) -> Flips:
        return Flips(torch.zeros(len(key), device=key.device))

    def transition(self, state: Flips, action: Tensor, key: Tensor) -> tuple[Flips, Tensor, Tensor]:
        return Flips(1 - state.x), state.x, state.x < 0

    def observe(self, state: Flips) -> Tensor:
        return torch.stack([state.x, state.x], 1).to(torch_dtype(self.observation_space.dtype))


class One(RL_Agent):
    """Returns 1 in the dtype of the action space."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, state: DictTensor, observation: DictTensor, *others: Any) -> tuple[DictTensor, DictTensor]:
        return DictTensor({"action": torch.ones(len(observation["frame"])).to(self.dtype)}), state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("auto_reset", [True, False])
def test_simulators_take_and_show_every_dtype(dtype: Any, auto_reset: bool) -> None:
    def create(n_envs: int, seed: int) -> Flipping:
        return Flipping(n_envs, dtype, auto_reset=auto_reset, seed=seed)

    env = create(B, 0)
    batch = collect(partial(One, torch_dtype(env.action_space.dtype)), create)
    last = batch.steps["observation/last_action"]
    assert last.dtype == torch_dtype(env.action_space.dtype)
    assert (last[0, :7].tolist() == [0, 1, 1, 1, 1, 0, 1]) if auto_reset else (last.shape == (B, 5))
    assert batch.steps["observation/frame"][0, :5, 0].double().tolist() == [0, 1, 0, 1, 0]
    env.reset()
    observation, _ = env.set_state([2], Flips(torch.ones(1)))
    assert observation["frame"][:, 0].double().tolist() == [0, 0, 1, 0]
