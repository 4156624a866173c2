"""A VecEnv as gymnasium's VectorEnv: the same numbers as gymnasium's own, its wrappers, its autoreset modes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

from rlstruct import DictTensor, VecEnv, sims
from rlstruct.adapters import GymnasiumVectorEnv
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.errors import ShapeMismatchError
from rlstruct.testing import forbid_host_sync
from rlstruct.vec_env import EnvWrapper


class Nested(gymnasium.Env[Any, Any]):
    """Counts up to 3; its observation and action are nested."""

    observation_space = spaces.Dict(place=spaces.Box(0, 99, (2,), np.float32), lamp=spaces.Discrete(2))
    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,), np.float32)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._n = int(self.np_random.integers(2)) + int((options or {}).get("start", 0))
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self._n += 1
        return self._see(), float(action[0] + action[1].sum()), self._n >= 3, False, {}

    def _see(self) -> Any:
        return {"place": np.full(2, self._n, np.float32), "lamp": self._n % 2}


def make(name: str) -> gymnasium.Env[Any, Any]:
    return Nested() if name == "nested" else gymnasium.make(name, max_episode_steps=13)


def create(name: str, n_envs: int, seed: int) -> VecEnv:
    return GymEnvInf([make(name) for _ in range(n_envs)], seed)


def same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            same(ours[key], theirs[key])
    elif isinstance(theirs, tuple):
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    else:
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0)
        assert np.asarray(ours).dtype.kind == np.asarray(theirs).dtype.kind


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "nested"])
def test_its_steps_are_those_of_a_sync_vector_env_with_the_same_seeds(name: str) -> None:
    theirs = SyncVectorEnv([lambda: make(name)] * 5, autoreset_mode=AutoresetMode.SAME_STEP)
    ours = GymnasiumVectorEnv(create, {"name": name, "n_envs": 5})
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    for attribute in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    same(ours.reset(seed=7)[0], theirs.reset(seed=7)[0])
    theirs.action_space.seed(3)
    n_ended = 0
    for _ in range(40):
        actions = theirs.action_space.sample()
        (*mine, info), (*wanted, their_info) = ours.step(actions), theirs.step(actions)
        wanted[1] = wanted[1].astype(np.float32)  # a VecEnv's rewards
        for one, other in zip(mine, wanted, strict=True):
            same(one, other)
        assert ("final_obs" in info) == ("final_obs" in their_info)
        if "final_obs" in info:
            np.testing.assert_array_equal(info["_final_obs"], their_info["_final_obs"])
            for row, wanted_row in zip(info["final_obs"], their_info["final_obs"], strict=True):
                assert (row is None) == (wanted_row is None)
                if row is not None:
                    n_ended += 1
                    same(row, wanted_row)
    assert n_ended > 5
    ours.close()
    theirs.close()


def test_an_environment_that_spends_a_step_on_its_restart_is_in_mode_next_step() -> None:
    def numpy_cart_pole(seed: int) -> VecEnv:
        return GymVectorEnv(gymnasium.make_vec("CartPole-v1", 4, "vector_entry_point", max_episode_steps=9), seed)

    theirs = gymnasium.make_vec("CartPole-v1", 4, "vector_entry_point", max_episode_steps=9)
    ours = GymnasiumVectorEnv(numpy_cart_pole)
    assert ours.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    same(ours.reset(seed=2)[0], theirs.reset(seed=2)[0])
    n_ended = 0
    for t in range(30):
        actions = np.full(4, t % 2)
        (obs, reward, terminated, truncated, info), wanted = ours.step(actions), theirs.step(actions)
        assert info == {}
        for one, other in zip((obs, reward, terminated, truncated), wanted, strict=False):
            np.testing.assert_allclose(one, other)
        n_ended += int((terminated | truncated).sum())
    assert n_ended >= 4
    ours.close()
    theirs.close()


def test_tensors_stay_on_the_device_and_the_host_never_waits() -> None:
    ours = GymnasiumVectorEnv(lambda seed: sims.make("CartPole-v1", n_envs=64, seed=seed, time_limit=9), tensors=True)
    plain = sims.make("CartPole-v1", n_envs=64, seed=5, time_limit=9)
    wanted, _ = plain.reset()
    observation, _ = ours.reset(seed=5)
    torch.testing.assert_close(observation, wanted["frame"], rtol=0, atol=0)
    for t in range(20):
        actions = torch.full((64,), t % 2)
        (reached, _), (current, _) = plain.step(DictTensor({"action": actions}))
        with forbid_host_sync():
            observation, reward, terminated, truncated, info = ours.step(actions)
        torch.testing.assert_close(observation, current["frame"], rtol=0, atol=0)
        torch.testing.assert_close(reward, reached["reward"], rtol=0, atol=0)
        torch.testing.assert_close(info["final_obs"], reached["frame"], rtol=0, atol=0)
        assert torch.equal(info["_final_obs"], reached["done"])
        assert torch.equal(terminated | truncated, reached["done"])


class Clamping(EnvWrapper):
    """Clamps its action in place."""

    def step(self, action: DictTensor) -> Any:
        action["action"].clamp_(-1.0, 1.0)
        return super().step(action)


@pytest.mark.parametrize("tensors", [False, True])
def test_an_environment_that_changes_its_action_leaves_the_callers_alone(tensors: bool) -> None:
    env = GymnasiumVectorEnv(lambda seed: Clamping(sims.make("Pendulum-v1", 2, seed)), tensors=tensors)
    env.reset()
    actions = torch.tensor([[3.0], [-3.0]])
    env.step(actions if tensors else actions.numpy())
    assert actions.tolist() == [[3.0], [-3.0]]
    env.close()


def test_reset_with_a_seed_repeats_and_without_one_goes_on() -> None:
    made = []

    def counted(seed: int) -> VecEnv:
        made.append(seed)
        return create("CartPole-v1", 3, seed)

    ours = GymnasiumVectorEnv(counted, seed=4)
    first = ours.reset(seed=4)[0]
    assert made == [4]  # just created with this seed
    other = ours.reset()[0]
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(ours.reset(seed=4)[0], first)
    assert made == [4, 4]


def test_options_reach_every_environment() -> None:
    ours = GymnasiumVectorEnv(create, {"name": "nested", "n_envs": 3})
    observation, _ = ours.reset(seed=0, options={"start": 1})
    assert observation["place"].min() >= 1
    observation, _ = ours.reset(options={"start": np.array([2, 3, 4])})  # one for each
    assert ((observation["place"][:, 0] - [2, 3, 4]) // 2 == 0).all()
    with pytest.raises(
        ValueError, match=r"options\['start'\] is \[2\], expected one number, or an entry for each of 3"
    ):
        ours.reset(options={"start": np.array([2, 3])})
    with pytest.raises(TypeError, match=r"options\['start'\] is 'late', expected a number or an array of numbers"):
        ours.reset(options={"start": "late"})


class Narrow(gymnasium.Env[Any, Any]):
    """Its actions are of a type that torch does not compare with others."""

    observation_space, action_space = spaces.Box(0, 9), spaces.MultiDiscrete([3, 4], dtype=np.uint16)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), float(action.sum()), False, False, {}


def test_actions_of_another_integer_type_are_converted_if_none_changes() -> None:
    ours = GymnasiumVectorEnv(lambda seed: GymEnvInf([Narrow(), Narrow()], seed))
    ours.reset()
    assert ours.step(np.array([[1, 2], [2, 3]]))[1].tolist() == [3.0, 5.0]
    with pytest.raises(ShapeMismatchError, match=r"numbers that torch\.uint16 cannot hold"):
        ours.step(np.array([[1, 2], [2, 3 + 2**16]]))


@pytest.mark.parametrize(
    "wrap",
    [
        wrappers.RecordEpisodeStatistics,
        wrappers.NormalizeReward,
        wrappers.DictInfoToList,
        lambda env: wrappers.ClipReward(env, -1, 1),
    ],
)
def test_gymnasiums_wrappers_do_with_it_what_they_do_with_a_sync_vector_env(wrap: Any) -> None:
    theirs = wrap(SyncVectorEnv([lambda: make("CartPole-v1")] * 3, autoreset_mode=AutoresetMode.SAME_STEP))
    ours = wrap(GymnasiumVectorEnv(create, {"name": "CartPole-v1", "n_envs": 3}))
    same(ours.reset(seed=1)[0], theirs.reset(seed=1)[0])
    for t in range(30):
        (*mine, info), (*wanted, their_info) = (env.step(np.full(3, t % 2)) for env in (ours, theirs))
        for one, other in zip(mine, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
        if "episode" in their_info:
            np.testing.assert_allclose(info["episode"]["r"], their_info["episode"]["r"])
            np.testing.assert_array_equal(info["episode"]["l"], their_info["episode"]["l"])


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "nested"])
def test_values_lie_in_the_declared_spaces_and_it_closes_twice(name: str) -> None:
    """Cover what gymnasium's tests of SyncVectorEnv ask of any vector environment.

    Observations (final ones, too) lie in the spaces with their dtypes, rewards are [B] of floats and flags [B] of bool,
    equal seeds of the action space draw equal actions, and close may be called again. Left out are its tests of `call`,
    `set_attr`, `render` and mode DISABLED, which a VecEnv does not have.
    """
    ours = GymnasiumVectorEnv(create, {"name": name, "n_envs": 3})
    observation, info = ours.reset(seed=3)
    assert observation in ours.observation_space
    assert (info, ours.num_envs, ours.render_mode, ours.spec, ours.unwrapped) == ({}, 3, None, None, ours)
    ours.action_space.seed(5)
    first = ours.action_space.sample()
    ours.action_space.seed(5)
    same(ours.action_space.sample(), first)
    n_final = 0
    for _ in range(30):
        observation, reward, terminated, truncated, info = ours.step(ours.action_space.sample())
        assert observation in ours.observation_space
        assert reward.shape == (3,)
        assert np.issubdtype(reward.dtype, np.floating)
        assert all(flag.shape == (3,) and flag.dtype == np.bool_ for flag in (terminated, truncated))
        assert set(info) <= {"final_obs", "_final_obs"}
        for row in info.get("final_obs", ()):
            n_final += row is not None
            assert row is None or row in ours.single_observation_space
    assert n_final > 0
    ours.close()
    ours.close()
    assert ours.closed


def test_listed_info_has_the_form_that_cleanrl_reads() -> None:
    ours = GymnasiumVectorEnv(create, {"name": "CartPole-v1", "n_envs": 4}, listed_info=True)
    ours.reset(seed=0)
    returns = []
    for t in range(60):
        *_, info = ours.step(np.full(4, t % 2))
        if "final_info" in info:
            returns += [one["episode"] for one in info["final_info"] if one and "episode" in one]
    assert len(returns) >= 12
    assert all(episode["r"] == episode["l"] <= 13 for episode in returns)  # CartPole: a reward of 1 per step


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"GymEnv idles after an episode's end.*GymEnvInf"):
        GymnasiumVectorEnv(lambda seed: GymEnv([make("CartPole-v1")], seed))
    with pytest.raises(TypeError, match="create_env returned a TimeLimit, expected a VecEnv"):
        GymnasiumVectorEnv(lambda seed: make("CartPole-v1"))
    with pytest.raises(ValueError, match="listed_info=True needs numpy"):
        GymnasiumVectorEnv(create, {"name": "CartPole-v1", "n_envs": 2}, tensors=True, listed_info=True)
    ours = GymnasiumVectorEnv(create, {"name": "CartPole-v1", "n_envs": 2})
    with pytest.raises(RuntimeError, match=r"Call reset\(\) first"):
        ours.step(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="reset_mask"):
        ours.reset(options={"reset_mask": np.ones(2, np.bool_)})
    with pytest.raises(
        TypeError, match=r"seed is .3, 4., a list; expected a whole number.*environment j gets the seed s \+ j"
    ):
        ours.reset(seed=[3, 4])  # type: ignore[arg-type]
    ours.reset()
    with pytest.raises(ShapeMismatchError, match=r"'action' has shape \[3\], expected \[2\]"):
        ours.step(np.zeros(3, np.int64))


class Undeclared(GymEnvInf):
    """Restarts in the same step, and says nothing about it."""

    restarts_take_steps = True


def test_an_environment_that_restarts_otherwise_than_it_declares_is_refused() -> None:
    ours = GymnasiumVectorEnv(lambda seed: Undeclared([make("CartPole-v1")], seed))
    ours.reset()
    ended = False

    def play() -> None:
        nonlocal ended
        for _ in range(20):
            ended |= bool(ours.step(np.zeros(1, np.int64))[2].any())

    with pytest.raises(RuntimeError, match="Set restarts_take_steps = False"):
        play()
    assert not ended  # no end was returned under the wrong mode
