"""Seeds and indices that do not exist get one sentence with the accepted range; arrays of every layout are taken."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fake_agents import RngAgent
from fake_envs import create_counting_env

from rlstruct import DictTensor, TemporalDictTensor, sims
from rlstruct.adapters import GymnasiumVectorEnv
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import PPOConfig
from rlstruct.algos.replay_buffer import ReplayBuffer
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.progress import describe_environments
from rlstruct.core import TensorSpec
from rlstruct.envs import GymEnv, GymVectorEnv
from rlstruct.errors import BadIndexError, BadTypeError, BadValueError
from rlstruct.policies import Policy


def vectorised(seed: Any) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv(lambda seed: sims.make("CartPole-v1", 3, seed), seed=seed)


THREE = {"n_envs": 3}
SPECS = {"frame": TensorSpec((4,), torch.float32)}
TAKERS: dict[str, Callable[[Any], object]] = {
    "simulator": lambda seed: sims.make("CartPole-v1", 3, seed),
    "GymEnv": lambda seed: GymEnv([gymnasium.make("CartPole-v1") for _ in range(3)], seed),
    "GymVectorEnv": lambda seed: GymVectorEnv(gymnasium.make_vec("CartPole-v1", 3), seed),
    "GymnasiumVectorEnv": vectorised,
    "GymnasiumVectorEnv.reset": lambda seed: vectorised(0).reset(seed=seed),
    "RL_Batcher": lambda seed: RL_Batcher(2, RngAgent, create_counting_env, env_args={"n_envs": 3}, seed=seed),
    "RL_Batcher(seeds)": lambda seed: RL_Batcher(
        2, RngAgent, create_counting_env, env_args={"n_envs": 3}, seeds=[seed]
    ),
    "ReplayBuffer": lambda seed: ReplayBuffer(9, seed=seed),
    "Policy": lambda seed: Policy(ActorCritic(4, 2), ActorCriticAgent, SPECS, seed=seed),
}


@pytest.mark.parametrize("seed", [2**64, 2**63])
def test_settings_of_a_training_refuse_a_seed_beyond_63_bits(seed: int) -> None:
    """As they are made, and not where the network draws its weights."""
    with pytest.raises(BadValueError, match=rf"^PPOConfig: seed is {seed}, expected 0 to 2\*\*63 - 2\."):
        PPOConfig(seed=seed)


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("seed", [-1, 2**64, 2**63])
def test_a_seed_out_of_range_gets_one_sentence(name: str, seed: int) -> None:
    with pytest.raises(BadValueError, match=rf"seeds?(\[0\])? is {seed}, expected 0 to 2\*\*63 - \d\."):
        TAKERS[name](seed)


@pytest.mark.parametrize("name", TAKERS)
def test_a_seed_is_a_whole_number(name: str) -> None:
    with pytest.raises(BadTypeError, match=r"is 1.5, a float; expected a whole number"):
        TAKERS[name](1.5)


def test_numpy_seeds_and_the_largest_one_work() -> None:
    for seed in (np.int64(3), 2**63 - 4):
        sims.make("CartPole-v1", 3, seed).reset()
        GymEnv([gymnasium.make("CartPole-v1") for _ in range(3)], seed).reset()


STEPS = TemporalDictTensor({"frame": torch.zeros(3, 4)})
ENV = sims.make("CartPole-v1", 3)
INDICES: dict[str, tuple[Callable[[int], object], str]] = {
    "index": (
        lambda i: DictTensor({"a": torch.zeros(3)}).index([0, i]),
        r"index\[1\] is {}, expected 0 to 2, as 'a'",
    ),
    "rows": (lambda i: STEPS.index(torch.tensor([i])), r"index\[0\] is {}, expected 0 to 2, as 'frame' has B = 3"),
    "steps": (
        lambda i: STEPS.temporal_multi_index(torch.tensor([0, i, 0])),
        r"t\[1\] is {}, expected 0 to 3, as 'frame' has T = 4",
    ),
    "get_state": (lambda i: ENV.get_state([i]), r"get_state: ids\[0\] is {}, expected 0 to 2, as B = 3"),
    "set_state": (lambda i: ENV.set_state([i], ENV.get_state([0])), r"set_state: ids\[0\] is {}, expected 0 to 2"),
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("index", [-1, 7])
def test_an_index_out_of_range_names_the_key_and_the_length(name: str, index: int) -> None:
    ENV.reset()
    call, message = INDICES[name]
    with pytest.raises(BadIndexError, match=message.format(index)):
        call(index)


def test_arrays_with_negative_strides_and_read_only_memory_are_taken() -> None:
    env = vectorised(0)
    env.reset()
    actions = np.array([0, 1, 1])
    fixed = actions.copy()
    fixed.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.step(actions[::-1])
        env.step(fixed)
        env.reset(options={"initial_steps": fixed})
        env.reset(options={"initial_steps": actions[::-1]})
    policy = Policy(ActorCritic(4, 2), ActorCriticAgent, SPECS)
    frames = np.zeros((3, 4), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.act(frames[::-1, ::-1])
        policy.reset(np.array([True, False, True])[::-1])


def test_one_environment_is_no_range() -> None:
    assert describe_environments(range(2, 3)) == "environment 2"
    assert describe_environments(range(2, 4)) == "environments 2 to 3"
