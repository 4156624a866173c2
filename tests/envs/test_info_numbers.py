"""Numbers of gymnasium's info in observations and batches, the same in every adapter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import NormalizeReward, RecordEpisodeStatistics
from gymnasium.wrappers.vector import DictInfoToList

from rlstruct import DictTensor
from rlstruct.agents import ActorCritic, ActorCriticAgent, RandomAgent
from rlstruct.algos import a2c
from rlstruct.batchers import EpisodeStatistics, RL_Batcher
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.testing import check_vec_env
from rlstruct.vec_env import VecEnv

NAMES = ["n", "inner/twice"]
NAN = math.nan


class Numbered(gymnasium.Env[Any, Any]):
    """Episodes of three steps; the info has the number of the step, and twice that number in every second step."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space: Any = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.n = 0
        return np.zeros(2, np.float32), {"n": 99}  # belongs to no step

    def step(self, action: Any) -> Any:
        self.n += 1
        inner = {"inner": {"twice": np.float32(2 * self.n)}} if self.n % 2 == 0 else {}
        info = {"n": self.n, "word": "a", "pair": np.zeros(2), **inner}
        return np.zeros(2, np.float32), 1.0, self.n == 3, False, info


def vector(mode: AutoresetMode, cls: type[Any] = SyncVectorEnv, wrap: Callable[[Any], Any] | None = None) -> Any:
    def create(n_envs: int, seed: int, info: list[str] | None = None) -> VecEnv:
        made = cls([Numbered] * n_envs, autoreset_mode=mode)
        return GymVectorEnv(made if wrap is None else wrap(made), seed, info=info)

    return create


def listed(kind: type[GymEnv]) -> Any:
    def create(n_envs: int, seed: int, info: list[str] | None = None) -> VecEnv:
        return kind([Numbered() for _ in range(n_envs)], seed, info=info)

    return create


ENDLESS = {
    "GymEnvInf": listed(GymEnvInf),
    "same step": vector(AutoresetMode.SAME_STEP),
    "same step, list": vector(AutoresetMode.SAME_STEP, wrap=DictInfoToList),
    "disabled": vector(AutoresetMode.DISABLED),
    "next step": vector(AutoresetMode.NEXT_STEP),
    "processes": vector(AutoresetMode.NEXT_STEP, AsyncVectorEnv),
}


def collected(create: Any, info: list[str] | None, n_timesteps: int = 8) -> Any:
    agent = {"create_agent": lambda **_: RandomAgent(Numbered.action_space)}
    env_args = {"n_envs": 2, "info": info}
    with RL_Batcher(n_timesteps, create_env=create, env_args=env_args, n_processes=0, seed=1, **agent) as batcher:
        batcher.reset()
        batcher.execute()
        return batcher.get()[0].clone()


def same(array: torch.Tensor, rows: list[list[float]]) -> None:
    torch.testing.assert_close(array, torch.tensor(rows, dtype=torch.float64), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("adapter", ENDLESS)
def test_a_batch_has_the_numbers_of_each_step(adapter: str) -> None:
    steps = collected(ENDLESS[adapter], NAMES).steps
    T = 6  # transitions in every adapter: the step of a restart is none
    for row in range(2):
        real = steps.slice(row, row + 1).temporal_slice(0, T)
        same(real["_observation/info/n"], [[1, 2, 3, 1, 2, 3]])
        same(real["_observation/info/inner/twice"], [[NAN, 4, NAN, NAN, 4, NAN]])
        same(real["observation/info/n"], [[NAN, 1, 2, NAN, 1, 2]])
        assert real["_observation/done"].tolist() == [[False, False, True] * 2]


def test_whole_episodes_have_them_too() -> None:
    steps = collected(listed(GymEnv), NAMES).steps
    same(steps["_observation/info/n"], [[1, 2, 3]] * 2)


@pytest.mark.parametrize("adapter", ENDLESS)
def test_a_batch_without_info_is_the_same_as_with_it_otherwise(adapter: str) -> None:
    without, with_info = (collected(ENDLESS[adapter], info).steps for info in (None, NAMES))
    assert not any("info/" in key for key in without.keys())
    added = {f"{prefix}/info/{name}" for prefix in ("observation", "_observation") for name in NAMES}
    assert set(with_info.keys()) == set(without.keys()) | added
    for key in without.keys():
        assert torch.equal(with_info[key], without[key]), key


def test_step_by_step_without_a_batcher() -> None:
    env = listed(GymEnvInf)(1, 0, ["n"])
    first, _ = env.reset()
    same(first["info/n"].unsqueeze(0), [[NAN]])
    seen = []
    for _ in range(3):
        (reached, _), (current, _) = env.step(DictTensor({"action": torch.tensor([0])}))
        seen.append((reached["info/n"].item(), current["info/n"].item()))
    assert seen[:2] == [(1.0, 1.0), (2.0, 2.0)]
    assert seen[2][0] == 3.0
    assert math.isnan(seen[2][1])
    env.close()


def test_returns_behind_normalised_rewards() -> None:
    def create(n_envs: int, seed: int) -> VecEnv:
        return GymEnvInf(
            [NormalizeReward(RecordEpisodeStatistics(Numbered())) for _ in range(n_envs)], seed, info=["episode/r"]
        )

    agent = {"create_agent": lambda **_: RandomAgent(Numbered.action_space)}
    with RL_Batcher(6, create_env=create, env_args={"n_envs": 1}, n_processes=0, seed=1, **agent) as batcher:
        batcher.reset()
        batcher.execute()
        batch = batcher.get()[0]
        counted = EpisodeStatistics(1).track(batch)
    same(batch.steps["_observation/info/episode/r"], [[NAN, NAN, 3, NAN, NAN, 3]])
    assert abs(counted["return"][0, 2] - 3.0) > 0.1  # of normalised rewards


def test_an_environment_with_info_keeps_the_contract_and_is_learned_from() -> None:
    check_vec_env(lambda n_envs=2, seed=0: listed(GymEnvInf)(n_envs, seed, NAMES))
    config = a2c.A2CConfig(
        n_env_steps=40, n_envs=2, n_timesteps=10, n_processes=1, evaluation_episodes=2, evaluation_processes=0
    )
    result = a2c.train(config, lambda: ActorCritic(2, 2), ActorCriticAgent, listed(GymEnvInf), env_args={"info": NAMES})
    assert result.after.returns == (3.0, 3.0)


def test_a_name_that_no_info_has_is_reported_once() -> None:
    for create in (listed(GymEnvInf), vector(AutoresetMode.SAME_STEP)):
        env = create(2, 0, ["n", "episode/r"])
        env.reset()
        action = DictTensor({"action": torch.zeros(2, dtype=torch.int64)})
        env.step(action)
        env.step(action)
        said = r"no info of a step had 'episode/r' until the first episode ended: .* The last info had .*'n'"
        with pytest.warns(UserWarning, match=said):
            env.step(action)
        for _ in range(4):
            env.step(action)  # warnings are errors in this suite
        env.close()


@pytest.mark.parametrize("create", [listed(GymEnvInf), vector(AutoresetMode.DISABLED)])
@pytest.mark.parametrize(("name", "got"), [("word", "'a'"), ("pair", "an array of shape")])
def test_a_value_that_is_no_number_is_refused(create: Any, name: str, got: str) -> None:
    env = create(2, 0, [name])
    env.reset()
    with pytest.raises(ValueError, match=f"has info '{name}', .*{got}.*expected one number"):
        env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
    env.close()


@pytest.mark.parametrize(
    ("info", "error", "says"),
    [
        ("episode/r", TypeError, "info is 'episode/r', expected a list of strings"),
        ([3], TypeError, r"info is \[3\], expected a list of strings"),
        (["episode/"], ValueError, "info has 'episode/', which has an empty part"),
        (["n", "n"], ValueError, "info has 'n', which appears twice"),
    ],
)
def test_wrong_names_are_refused(info: Any, error: type[Exception], says: str) -> None:
    for create in (listed(GymEnv), vector(AutoresetMode.DISABLED)):
        with pytest.raises(error, match=says):
            create(1, 0, info)
