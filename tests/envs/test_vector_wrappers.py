"""GymVectorEnv compared with gymnasium's own loop: each vector wrapper, in each autoreset mode, step by step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import Counting
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers import vector as wrappers

from rlstruct.core import DictTensor
from rlstruct.envs import GymVectorEnv

N, STEPS = 3, 60
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
Wrap = Callable[[Any], Any]


class Box(Counting):
    """Counts, and takes numbers as actions."""

    def __init__(self, reuse: bool = False) -> None:
        super().__init__(reuse)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)


class CountsResets(VectorWrapper[Any, Any, Any, Any, Any]):
    """A wrapper of a user that does not know masks."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.resets = getattr(self, "resets", 0) + 1
        return self.env.reset(seed=seed, options=options)


WRAPPERS: dict[str, Wrap] = {
    "none": lambda vec: vec,
    "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
    "NormalizeReward": wrappers.NormalizeReward,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "TransformObservation": lambda vec: wrappers.TransformObservation(vec, lambda frame: frame * 2),
    "FlattenObservation": wrappers.FlattenObservation,
    "RescaleObservation": lambda vec: wrappers.RescaleObservation(vec, 0.0, 1.0),
    "ReshapeObservation": lambda vec: wrappers.ReshapeObservation(vec, (2, 1)),
    "DtypeObservation": lambda vec: wrappers.DtypeObservation(vec, np.int32),
    "TransformReward": lambda vec: wrappers.TransformReward(vec, lambda reward: reward + 1),
    "ClipReward": lambda vec: wrappers.ClipReward(vec, -2.0, 2.0),
    "ClipAction": wrappers.ClipAction,
    "RescaleAction": lambda vec: wrappers.RescaleAction(vec, -1.0, 1.0),
    "TransformAction": lambda vec: wrappers.TransformAction(vec, lambda action: action),
    "statistics around rewards": lambda vec: wrappers.RecordEpisodeStatistics(wrappers.NormalizeReward(vec)),
    "rewards around statistics": lambda vec: wrappers.NormalizeReward(wrappers.RecordEpisodeStatistics(vec)),
}
NOT_HERE = {  # vector wrappers that return no arrays, or draw
    "ArrayConversion", "JaxToNumpy", "JaxToTorch", "NumpyToTorch", "DictInfoToList", "HumanRendering", "RecordVideo",
    "VectorizeTransformObservation", "VectorizeTransformAction", "VectorizeTransformReward", "FilterObservation",
    "GrayscaleObservation", "ResizeObservation",
}  # fmt: skip
KEEPS_STATE = ("NormalizeReward", "NormalizeObservation", "statistics around rewards", "rewards around statistics")


def test_every_vector_wrapper_of_gymnasium_is_compared_or_listed() -> None:
    assert set(wrappers.__all__) <= {*WRAPPERS, *NOT_HERE}, set(wrappers.__all__) - {*WRAPPERS, *NOT_HERE}


def own_loop(vec: Any, mode: AutoresetMode) -> Iterator[dict[str, Any]]:
    """Step as gymnasium documents for the mode: in mode DISABLED, reset the rows that have ended."""
    frames, _ = vec.reset(seed=4)
    action = np.zeros(vec.action_space.shape, vec.action_space.dtype)
    pending = np.zeros(N, bool)
    while True:
        before = np.array(frames)
        frames, reward, terminated, truncated, info = vec.step(action)
        ended, reached = terminated | truncated, np.array(frames)
        if mode is SAME_STEP and ended.any():
            final = info["final_obs"]
            for row in np.flatnonzero(ended):
                reached[row] = final[row]
        if mode is DISABLED and ended.any():
            frames, _ = vec.reset(options={"reset_mask": ended})
        yield {
            "ran": ~pending, "reached": np.where(pending.reshape(-1, *[1] * (reached.ndim - 1)), before, reached),
            "reward": np.array(reward, np.float32) * ~pending, "terminated": np.array(terminated),
            "truncated": np.array(truncated), "current": np.array(frames),
        }  # fmt: skip
        pending = ended if mode is NEXT_STEP else np.zeros(N, bool)


def compare(wrap: Wrap, make: Callable[[], Any], mode: AutoresetMode) -> int:
    """Step both with equal seeds, and return the number of ends."""
    theirs, ours = wrap(make()), wrap(make())
    env, ends = GymVectorEnv(ours, seed=4), 0
    env.reset()
    action = torch.zeros(N, *ours.single_action_space.shape, dtype=torch.float32)
    for _, expected in zip(range(STEPS), own_loop(theirs, mode), strict=False):
        (reached, ran), (current, _) = env.step(DictTensor({"action": action}))
        np.testing.assert_array_equal(ran.numpy(), expected["ran"])
        np.testing.assert_array_equal(reached["frame"].numpy(), expected["reached"])
        np.testing.assert_array_equal(reached["reward"].numpy(), expected["reward"])
        for name in ("terminated", "truncated"):
            np.testing.assert_array_equal(reached[name][ran].numpy(), expected[name][expected["ran"]])
        np.testing.assert_array_equal(current["frame"].numpy(), expected["current"])
        ends += int((reached["done"] & ran).sum())
    env.close()
    theirs.close()
    return ends


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # gymnasium's own spaces
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_sees_what_it_sees_in_gymnasiums_own_loop(name: str, mode: AutoresetMode) -> None:
    def make() -> Any:
        return SyncVectorEnv([Box] * N, autoreset_mode=mode)

    try:
        WRAPPERS[name](make())
    except ValueError as error:
        pytest.skip(f"gymnasium: {error}")
    if mode is DISABLED and name in KEEPS_STATE:
        with pytest.raises(ValueError, match=r"keeps state of all rows.*AutoresetMode\.NEXT_STEP"):
            GymVectorEnv(WRAPPERS[name](make()))
        return
    assert compare(WRAPPERS[name], make, mode) > 10


@pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.name)
def test_processes_are_restarted_as_in_gymnasiums_own_loop(mode: AutoresetMode) -> None:
    def make() -> Any:
        return AsyncVectorEnv([functools.partial(Box, True)] * N, autoreset_mode=mode, context="spawn")

    name = "RecordEpisodeStatistics" if mode is DISABLED else "rewards around statistics"
    assert compare(WRAPPERS[name], make, mode) > 10


def test_a_normalised_reward_is_gymnasiums() -> None:
    vec: Any = wrappers.NormalizeReward(gymnasium.make_vec("CartPole-v1", N, "sync"))
    alone: Any = wrappers.NormalizeReward(gymnasium.make_vec("CartPole-v1", N, "sync"))
    env = GymVectorEnv(vec, seed=0)
    env.reset()
    alone.reset(seed=0)
    for _ in range(50):  # pushing to the right ends an episode after nine or ten steps
        (reached, ran), _ = env.step(DictTensor({"action": torch.ones(N, dtype=torch.int64)}))
        reward = alone.step(np.ones(N, np.int64))[1]
        np.testing.assert_array_equal(reached["reward"][ran].numpy(), np.array(reward, np.float32)[ran.numpy()])
    assert np.array_equal(vec.accumulated_reward, alone.accumulated_reward)


def test_statistics_count_whole_episodes() -> None:
    vec: Any = wrappers.RecordEpisodeStatistics(SyncVectorEnv([Box] * N, autoreset_mode=NEXT_STEP))
    env = GymVectorEnv(vec, seed=0)
    env.reset()
    inside: list[Any] = [one.unwrapped for one in vec.unwrapped.envs]
    for _ in range(40):
        env.step(DictTensor({"action": torch.zeros(N, 1)}))
    lengths = [len(run) for one in inside for run in _episodes(one.log)]
    assert len(lengths) > 10
    assert sorted(vec.length_queue) == sorted(lengths)


def _episodes(log: list[Any]) -> list[list[Any]]:
    """Split a log into its finished episodes."""
    runs: list[list[Any]] = [[]]
    for step in log:
        runs[-1].append(step)
        if step[2] or step[3]:
            runs.append([])
    return runs[:-1]


def test_a_wrapper_of_a_user_is_asked_for_its_word_on_masks() -> None:
    vec: Any = CountsResets(SyncVectorEnv([Box] * N, autoreset_mode=DISABLED))
    with pytest.raises(ValueError, match=r"CountsResets keeps state of all rows.*or pass reset_mask=True"):
        GymVectorEnv(vec)
    env = GymVectorEnv(vec, reset_mask=True)
    env.reset()
    for _ in range(20):
        env.step(DictTensor({"action": torch.zeros(N, 1)}))
    assert vec.resets > 5


def test_masks_on_request_do_not_reach_a_wrapper_that_keeps_state() -> None:
    vec: Any = wrappers.NormalizeReward(SyncVectorEnv([Box] * N, autoreset_mode=NEXT_STEP))
    with pytest.raises(ValueError, match="NormalizeReward keeps state of all rows"):
        GymVectorEnv(vec, reset_mask=True)


@pytest.mark.parametrize("episodic", [False, True], ids=["endless", "episodic"])
@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda mode: mode.name)
@pytest.mark.parametrize("life_loss_info", [False, True])
def test_an_atari_vector_restarts_games_and_not_lives(
    life_loss_info: bool, mode: AutoresetMode, episodic: bool
) -> None:
    pytest.importorskip("ale_py")
    from ale_py.vector_env import AtariVectorEnv

    settings = {"num_threads": 1, "noop_max": 1, "use_fire_reset": False, "life_loss_info": life_loss_info}

    def make() -> Any:
        return AtariVectorEnv("breakout", 2, autoreset_mode=mode, frameskip=4, **settings)

    alone, env = make(), GymVectorEnv(make(), seed=1, episodic=episodic)
    frames, _ = alone.reset(seed=1)
    observation, _ = env.reset()
    np.testing.assert_array_equal(observation["frame"].numpy(), frames)
    running = torch.ones(2, dtype=torch.bool)
    for t in range(150):
        action = np.array([1, 1]) if t % 20 == 0 else np.array([2, 3])
        frames, reward, *_ = alone.step(action)
        (reached, ran), (observation, _) = env.step(DictTensor({"action": torch.from_numpy(action)}))
        if episodic:
            running &= ran
        np.testing.assert_array_equal(
            reached["reward"][ran & running].numpy(), np.asarray(reward, np.float32)[(ran & running).numpy()]
        )
        if not episodic:
            np.testing.assert_array_equal(observation["frame"].numpy(), frames)
        if not running.any():
            break
    env.close()


ENVPOOL: dict[str, dict[str, Any]] = {
    "none": {},
    "episodic life": {"episodic_life": True},
    "discount": {"zero_discount_on_life_loss": True, "max_episode_steps": 40},
}


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # EnvPool's own space
@pytest.mark.parametrize("name", ENVPOOL)
def test_envpool_restarts_itself(name: str) -> None:
    envpool = pytest.importorskip("envpool")
    task = "CartPole-v1" if name == "none" else "Breakout-v5"

    def make() -> Any:
        return envpool.make(task, env_type="gymnasium", num_envs=N, seed=3, **ENVPOOL[name])

    alone, env = make(), GymVectorEnv(make(), seed=3)
    frames, _ = alone.reset()
    observation, _ = env.reset()
    pending = np.zeros(N, bool)
    ends = 0
    for t in range(120):
        np.testing.assert_array_equal(observation["frame"].numpy(), frames)
        action = np.full(N, t % 2 if name == "none" else (1 if t % 15 == 0 else 2), np.int32)
        frames, reward, terminated, truncated, _ = alone.step(action)
        (reached, ran), (observation, _) = env.step(DictTensor({"action": torch.from_numpy(action).to(torch.int64)}))
        np.testing.assert_array_equal(ran.numpy(), ~pending)
        np.testing.assert_array_equal(reached["reward"][ran].numpy(), reward[~pending].astype(np.float32))
        pending = np.asarray(terminated | truncated)
        ends += int(pending.sum())
    assert ends > 0
    env.close()
