"""Memory at public boundaries: callers overwrite what they passed, simulators reuse their memory, nothing changes."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
import torch
from test_impossible_values import NUMBERS, B, Simulator

from rlstruct import DictTensor, VecEnv, sims
from rlstruct.adapters import GymnasiumVectorEnv, TorchVectorEnv
from rlstruct.agents import QAgent, QNetwork, StackingAgent
from rlstruct.core import TensorSpec
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.policies import Policy

ENVS: dict[str, Callable[[], VecEnv]] = {
    "simulator": lambda: sims.make("CartPole-v1", B),
    "episodic simulator": lambda: sims.make("CartPole-v1", B, auto_reset=False),
    "nested simulator": lambda: sims.make("Breakout-MinAtar", B),
    "GymEnv": lambda: GymEnv([gymnasium.make("CartPole-v1") for _ in range(B)], 0),
    "GymEnvInf": lambda: GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(B)], 0),
    "GymVectorEnv": lambda: GymVectorEnv(gymnasium.make_vec("CartPole-v1", B), 0),
    "TorchVectorEnv": lambda: TorchVectorEnv(Simulator(NUMBERS, "cpu"), "cpu"),
}


@pytest.mark.parametrize("name", ENVS)
def test_results_of_a_step_never_change_and_actions_may_be_overwritten(name: str) -> None:
    env = ENVS[name]()
    results = [env.reset()[0]]
    copies = [results[0].clone()]
    memory = torch.zeros(B, dtype=torch.int64)
    for t in range(6):
        memory.fill_(t % 2)
        (reached, _), (current, _) = env.step(DictTensor({"action": memory}))
        results += [reached, current]
        copies += [reached.clone(), current.clone()]
        memory.fill_(9)
    for result, copy in zip(results, copies, strict=True):
        for key in copy:
            torch.testing.assert_close(result[key], copy[key], rtol=0, atol=0)


def test_start_states_may_be_overwritten() -> None:
    env = sims.make("CartPole-v1", B)
    env.reset()
    fields = {key: value for key, value in env.state_tensors().items() if key.startswith("state/")}
    given = {key: torch.zeros_like(value) for key, value in fields.items()}
    env.reset(DictTensor(given))
    for value in given.values():
        value.fill_(1e6)
    assert all(bool((value == 0).all()) for key, value in env.state_tensors().items() if key in given)


@pytest.mark.parametrize("tensors", [False, True])
@pytest.mark.parametrize("inner", ["reuses its memory", "simulator"])
def test_a_gymnasium_vector_env_returns_and_takes_copies(inner: str, tensors: bool) -> None:
    def create(seed: int) -> VecEnv:
        return sims.make("CartPole-v1", B, seed) if inner == "simulator" else ENVS["TorchVectorEnv"]()

    ours, twin = (GymnasiumVectorEnv(create, tensors=tensors) for _ in range(2))
    ours.reset(seed=1)
    twin.reset(seed=1)
    actions = np.zeros(B, np.int64)
    given = torch.from_numpy(actions) if tensors else actions  # shares the memory
    kept = []
    for t in range(5):
        actions[:] = t % 2
        observation, reward, *_ = ours.step(given)
        wanted, *_ = twin.step(given.clone() if tensors else given.copy())
        actions[:] = 1 - t % 2
        np.testing.assert_array_equal(np.asarray(observation), np.asarray(wanted))
        kept.append((observation, np.asarray(observation).copy(), reward, np.asarray(reward).copy()))
        wanted[:] = 77  # the twin's caller overwrites what he got
    assert any((kept[0][1] != later[1]).any() for later in kept[1:])
    for observation, observed, reward, rewarded in kept:
        np.testing.assert_array_equal(np.asarray(observation), observed)
        np.testing.assert_array_equal(np.asarray(reward), rewarded)


@pytest.mark.parametrize("arrays", [True, False])
def test_a_policy_takes_and_returns_copies(arrays: bool) -> None:
    def create(model, **settings):
        return StackingAgent.create(model, create_agent=QAgent, shape=(3, 4), dtype=torch.float32, **settings)

    frame = {"frame": TensorSpec((1, 4), torch.float32)}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), QNetwork(12, 2))
    ours, twin = (Policy(model, create, frame) for _ in range(2))
    memory = torch.zeros(B, 1, 4)
    given = memory.numpy() if arrays else memory
    for _ in range(6):
        memory.copy_(torch.randn(B, 1, 4))
        action, wanted = ours.act(given), twin.act(memory.clone().numpy() if arrays else memory.clone())
        memory.fill_(1e6)  # the agent remembers the frames of before
        np.testing.assert_array_equal(np.asarray(action), np.asarray(wanted))
        before = ours.last["action"].clone()
        action[:] = 9
        assert torch.equal(ours.last["action"], before)
        torch.testing.assert_close(ours.last["action_values"], twin.last["action_values"], rtol=0, atol=0)
