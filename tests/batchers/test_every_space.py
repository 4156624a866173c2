"""Every kind of space comes through with its dtype and shape, the same in this process, in workers and on a device."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlstruct import DeviceEnv, Trajectories, VecEnv
from rlstruct.agents import RandomAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf

MATRIX = spaces.Dict(
    {
        "float32": spaces.Box(-1, 1, (2, 3), np.float32),
        "float64": spaces.Box(-1, 1, (), np.float64),
        "int16": spaces.Box(-9, 9, (4,), np.int16),
        "uint8": spaces.Box(0, 255, (3, 3, 1), np.uint8),
        "discrete": spaces.Discrete(5, start=-2),
        "multidiscrete": spaces.MultiDiscrete([3, 4]),
        "multibinary": spaces.MultiBinary((2, 2)),
        "nested": spaces.Dict({"deep": spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,), np.float32)))}),
    }
)
ACTIONS = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32), spaces.MultiDiscrete([2, 3])))
# The space's own dtype and shape, written out by hand; numpy's bool-like kinds are int8 in gymnasium.
EXPECTED = {
    "float32": (torch.float32, (2, 3)),
    "float64": (torch.float64, ()),
    "int16": (torch.int16, (4,)),
    "uint8": (torch.uint8, (3, 3, 1)),
    "discrete": (torch.int64, ()),
    "multidiscrete": (torch.int64, (2,)),
    "multibinary": (torch.int8, (2, 2)),
    "nested/deep/0": (torch.int64, ()),
    "nested/deep/1": (torch.float32, (2,)),
}


class Sampling(gymnasium.Env[Any, Any]):
    """Shows samples of the matrix, the same for the same seed; an episode takes 3 steps."""

    action_space = ACTIONS

    def __init__(self) -> None:
        self.observation_space = deepcopy(MATRIX)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation_space.sample(), 0.0, self.steps == 3, False, {}


def create_env(n_envs: int, seed: int, device: str) -> VecEnv:
    return DeviceEnv(GymEnvInf([Sampling() for _ in range(n_envs)], seed), device)


def create_agent(device: str) -> RandomAgent:
    return RandomAgent(ACTIONS, device=device)


def collect(n_processes: int, device: str) -> Trajectories:
    with RL_Batcher(
        7,
        create_agent,
        create_env,
        agent_args={"device": device},
        env_args={"n_envs": 4 // max(1, n_processes), "device": device},
        n_processes=n_processes,
        seed=5,
        device=device,
    ) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0]


@pytest.mark.parametrize(("n_processes", "device"), [(0, "cpu"), (2, "cpu"), (0, "sim:0")])
def test_dtypes_shapes_and_values_are_those_of_the_space(n_processes: int, device: str) -> None:
    steps = collect(n_processes, device).steps
    here = steps if (n_processes, device) == (0, "cpu") else collect(0, "cpu").steps
    for where in ("observation/frame/", "_observation/frame/"):
        found = {key.removeprefix(where): value for key, value in steps.items() if key.startswith(where)}
        assert {key: (value.dtype, tuple(value.shape[2:])) for key, value in found.items()} == EXPECTED
    for number, (dtype, shape) in enumerate([(torch.int64, ()), (torch.float32, (2,)), (torch.int64, (2,))]):
        for key in (f"action/action/{number}", f"_observation/last_action/{number}"):
            assert (steps[key].dtype, tuple(steps[key].shape[2:])) == (dtype, shape), key
    assert list(steps.keys()) == list(here.keys())
    for key, value in steps.items():
        assert torch.equal(value.cpu(), here[key]), key
