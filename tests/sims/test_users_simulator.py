"""A user's simulator with nested spaces goes through the batcher, in this process and in others, and in any batch."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from rlstruct import DictTensor, RL_Agent
from rlstruct.batchers import RL_Batcher
from rlstruct.functional.random import randint, uniform
from rlstruct.sims import TensorEnv, make


class Arm(TensorEnv[DictTensor]):
    """An arm with two motors and a gripper, seen by a camera; it ends when the gripper holds something, by chance."""

    action_space = spaces.Dict(motors=spaces.Box(-1, 1, (2,)), grip=spaces.Discrete(2))
    observation_space = spaces.Dict(
        joints=spaces.Dict(angle=spaces.Box(-9, 9, (2,)), speed=spaces.Box(-9, 9, (2,))),
        camera=spaces.Box(0, 255, (4, 4, 1), "uint8"),
    )

    def initial(self, key):
        return DictTensor({"angle": uniform(key, (2,)), "speed": torch.zeros(*key.shape, 2, device=key.device)})

    def transition(self, state, action, key):
        speed = 0.9 * state["speed"] + 0.1 * action["motors"]
        gripped = (action["grip"] == 1) & (randint(key, 4) == 0)
        return DictTensor({"angle": state["angle"] + 0.1 * speed, "speed": speed}), gripped.float(), gripped

    def observe(self, state):
        light = (state["angle"].sum(1) * 50).clamp(0, 255).to(torch.uint8)
        joints = {"joints/angle": state["angle"].clone(), "joints/speed": state["speed"].clone()}
        return {**joints, "camera": light.view(-1, 1, 1, 1).expand(-1, 4, 4, 1).contiguous()}


@pytest.mark.parametrize("name", ["action_space", "observation_space"])
def test_a_simulator_without_a_space_is_told_which_one_to_set(name: str) -> None:
    incomplete = type("Incomplete", (Arm,), {name: None})
    with pytest.raises(TypeError, match=rf"Incomplete: {name} is a NoneType, .* Set it in the class: {name} = gymn"):
        incomplete(2)


class Mover(RL_Agent):
    """Acts on what it sees and on its random key."""

    def __call__(self, state, observation, agent_info, history=None):
        motors = uniform(observation["rng"], (2,)) - observation["frame/joints/angle"].clamp(0, 1)
        return DictTensor({"action/motors": motors, "action/grip": randint(observation["rng"], 2)}), state


def create_env(n_envs, seed):
    return Arm(n_envs, seed, time_limit=9)


def collect(n_processes: int, n_envs: int) -> list[DictTensor]:
    with RL_Batcher(12, Mover, create_env, env_args={"n_envs": n_envs}, n_processes=n_processes, seed=3) as batcher:
        batcher.reset()
        batches = []
        for _ in range(2):
            batcher.execute()
            trajectories, _ = batcher.get()
            batches.append(trajectories.steps.clone())
    return batches


def test_nested_spaces_go_through_the_batcher_in_one_process_as_in_two() -> None:
    here, there = collect(0, 6), collect(2, 3)
    for one, other in zip(here, there, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys():
            torch.testing.assert_close(one[key], other[key], rtol=1e-6, atol=1e-6)
    assert here[0]["observation/frame/camera"].shape == (6, 12, 4, 4, 1)
    assert here[0]["observation/frame/camera"].dtype == torch.uint8
    assert here[0]["action/action/motors"].shape == (6, 12, 2)
    assert here[0]["_observation/terminated"].any()
    assert here[0]["_observation/truncated"].any()


@pytest.mark.parametrize("name", ["CartPole-v1", "Freeway-MinAtar"])
def test_the_first_64_of_4096_do_what_64_do(name: str) -> None:
    few, many = make(name, 64, seed=8, time_limit=3), make(name, 4096, seed=8, time_limit=3)
    for env in (few, many):
        env.reset()
    for _ in range(8):  # with two restarts
        action = torch.arange(4096) % 2
        (shown, _), _ = few.step(DictTensor({"action": action[:64]}))
        (also_shown, _), _ = many.step(DictTensor({"action": action}))
        for key in shown.keys():
            torch.testing.assert_close(also_shown[key][:64], shown[key], rtol=1e-6, atol=1e-6)
