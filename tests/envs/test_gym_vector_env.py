"""GymVectorEnv: gymnasium's own vector environments, seeds, options, errors, EnvPool and ale-py where installed."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import Breaking, Counting, CountingVector, Narrow
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers.vector import TransformReward

from rlstruct.core import DictTensor
from rlstruct.envs import GymEnvInf, GymVectorEnv
from rlstruct.errors import ShapeMismatchError
from rlstruct.vec_env import VecEnv


def act(values: list[int]) -> DictTensor:
    return DictTensor({"action": torch.tensor(values)})


def cartpoles(n: int, **settings: Any) -> Any:
    return gymnasium.make_vec("CartPole-v1", num_envs=n, vectorization_mode="vector_entry_point", **settings)


def test_numpy_cartpole_equals_gymnasium_and_marks_the_lost_steps() -> None:
    env, alone = GymVectorEnv(cartpoles(6), seed=5), cartpoles(6)
    frames, _ = alone.reset(seed=5)
    observation, running = env.reset()
    ended = np.zeros(6, bool)
    lost = 0
    for t in range(150):
        np.testing.assert_array_equal(observation["frame"].numpy(), frames)
        choices = [(t + j) // 2 % 2 for j in range(6)]
        before = frames
        frames, reward, terminated, truncated, _ = alone.step(np.array(choices))
        (reached, stepped), (observation, running) = env.step(act(choices))
        # The rows that ended in the step before restart in this one: no transition, and the old final frame stays.
        np.testing.assert_array_equal(stepped.numpy(), ~ended)
        np.testing.assert_array_equal(reached["frame"].numpy(), np.where(ended[:, None], before, frames))
        np.testing.assert_array_equal(reached["reward"].numpy(), reward * ~ended)
        np.testing.assert_array_equal((reached["done"] & stepped).numpy(), terminated | truncated)
        np.testing.assert_array_equal(observation["initial_state"].numpy(), ended)
        lost += int(ended.sum())
        ended = terminated | truncated
        np.testing.assert_array_equal(running.numpy(), ~ended)
    assert lost > 10
    env.close()


def follow(env: VecEnv, steps: int) -> int:
    """Check CartPole's x' = x + 0.02 * velocity in every row of every step, ends included, and count the ends."""
    observation, _ = env.reset()
    ends = 0
    for t in range(steps):
        (reached, stepped), (after, running) = env.step(act([t % 2, 1, 0, t // 2 % 2]))
        assert stepped.all()
        assert running.all()
        assert (reached["reward"] == 1).all()
        expected = observation["frame"][:, 0] + 0.02 * observation["frame"][:, 1]
        torch.testing.assert_close(reached["frame"][:, 0], expected, atol=1e-6, rtol=1e-5)
        restarted = after["initial_state"]
        assert torch.equal(restarted, reached["done"])
        assert (after["frame"][restarted].abs() <= 0.05).all()
        assert len(after["frame"][restarted].unique()) == 4 * int(restarted.sum())
        assert torch.equal(after["frame"][~restarted], reached["frame"][~restarted])
        ends += int(restarted.sum())
        observation = after
    return ends


@pytest.mark.parametrize(
    ("mode", "settings"),
    [
        (AutoresetMode.SAME_STEP, {}),
        (AutoresetMode.DISABLED, {}),
        (AutoresetMode.NEXT_STEP, {"reset_mask": True}),
    ],
)
def test_sync_equals_the_list_where_a_restart_takes_no_step(mode: AutoresetMode, settings: Any) -> None:
    make = functools.partial(gymnasium.make, "CartPole-v1")
    ours: VecEnv = GymVectorEnv(SyncVectorEnv([make] * 3, autoreset_mode=mode), seed=2, **settings)
    theirs: VecEnv = GymEnvInf([make() for _ in range(3)], seed=2)
    pair = ours.reset()[0], theirs.reset()[0]
    for t in range(80):
        for key in pair[0].keys():
            assert torch.equal(pair[0][key], pair[1][key]), key
        action = act([t % 2, t // 2 % 2, 0])
        mine, other = ours.step(action), theirs.step(action)
        for key in pair[0].keys():
            assert torch.equal(mine[0][0][key], other[0][0][key]), key
        pair = mine[1][0], other[1][0]
    ours.close()
    theirs.close()


def test_each_row_of_sync_gets_its_own_options_at_every_masked_reset() -> None:
    vec: Any = SyncVectorEnv([Counting] * 3, autoreset_mode=AutoresetMode.DISABLED)
    env = GymVectorEnv(vec, seed=0)
    env.reset(DictTensor({"level": torch.tensor([1, 2, 1]), "name": torch.tensor([[1, 1], [2, 2], [1, 1]])}))
    starts = [len(one.options) for one in vec.envs]
    for _ in range(20):
        env.step(act([0, 0, 0]))
    for one, start, level in zip(vec.envs, starts, [1, 2, 1], strict=True):
        assert len(one.options) > start + 1
        for options in one.options[start - 1 :]:
            assert options["level"] == level
            assert options["name"].tolist() == [level, level]
            assert "reset_mask" not in options


LEVELS = DictTensor({"level": torch.tensor([1, 2, 1])})


def narrow(vector: str, mode: AutoresetMode, **settings: Any) -> Any:
    makes = [functools.partial(Narrow, level) for level in (1, 2, 1)]
    if vector == "sync":
        return SyncVectorEnv(makes, autoreset_mode=mode)
    return AsyncVectorEnv(makes, autoreset_mode=mode, context="spawn", **settings)


@pytest.mark.parametrize(
    ("vector", "mode", "settings"),
    [
        ("sync", AutoresetMode.SAME_STEP, {}),
        ("sync", AutoresetMode.NEXT_STEP, {}),
        ("async", AutoresetMode.DISABLED, {}),
        ("async", AutoresetMode.DISABLED, {"shared_memory": False}),
        ("async", AutoresetMode.NEXT_STEP, {}),
    ],
)
def test_each_row_is_reset_once_and_with_its_own_options(vector: str, mode: AutoresetMode, settings: Any) -> None:
    env = GymVectorEnv(narrow(vector, mode, **settings), seed=0)
    for n_resets in (1, 2, 3):
        frame = env.reset(LEVELS)[0]["frame"]
        assert frame.tolist() == [[1 + n_resets, 1], [1 + n_resets, 2], [1 + n_resets, 1]]
    (_, ran), _ = env.step(act([0, 0, 0]))
    assert ran.all()
    env.close()


@pytest.mark.filterwarnings("ignore:.*ERROR")  # gymnasium's logger warns about what it raises
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_process_that_fails_in_a_reset_with_options_of_its_own_is_named(shared_memory: bool) -> None:
    env = GymVectorEnv(narrow("async", AutoresetMode.DISABLED, shared_memory=shared_memory), seed=0)
    with pytest.raises(ValueError, match="level -1, expected 2") as error:
        env.reset(DictTensor({"level": torch.tensor([1, -1, 1])}))
    assert error.value.environment_index == 1  # type: ignore[attr-defined]
    env.close()


def test_rows_with_options_of_their_own_draw_what_they_draw_in_a_list() -> None:
    ours = GymVectorEnv(SyncVectorEnv([Counting] * 3, autoreset_mode=AutoresetMode.DISABLED), seed=5)
    theirs = GymEnvInf([Counting() for _ in range(3)], seed=5)
    for _ in range(3):  # without a seed from the second reset on: each draws what it has not drawn before
        one, other = ours.reset(LEVELS)[0], theirs.reset(LEVELS)[0]
        for _ in range(9):
            for key in one.keys():
                assert torch.equal(one[key], other[key]), key
            one, other = ours.step(act([0, 0, 0]))[1][0], theirs.step(act([0, 0, 0]))[1][0]


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_restarts_of_gymnasium_have_no_options(mode: AutoresetMode) -> None:
    vec: Any = SyncVectorEnv([Counting] * 3, autoreset_mode=mode)
    env = GymVectorEnv(vec, seed=0)
    env.reset(LEVELS)
    for _ in range(20):
        env.step(act([0, 0, 0]))
    for one, level in zip(vec.envs, [1, 2, 1], strict=True):
        assert one.options[0] == {"level": level}
        assert set(one.options[1:]) == {None}


def test_where_only_masks_restart_rows_they_keep_their_own_options() -> None:
    vec: Any = SyncVectorEnv([Counting] * 3, autoreset_mode=AutoresetMode.DISABLED)
    env = GymVectorEnv(vec, seed=0)
    env.reset(LEVELS)
    for _ in range(20):
        env.step(act([0, 0, 0]))
    for one, level in zip(vec.envs, [1, 2, 1], strict=True):
        assert len(one.options) > 2
        assert all(options["level"] == level for options in one.options)


def test_options_of_other_vector_environments_are_merged() -> None:
    vec = CountingVector(2, AutoresetMode.SAME_STEP)
    GymVectorEnv(vec).reset(DictTensor({"same": torch.tensor([4, 4]), "mixed": torch.tensor([1, 2])}))
    options = vec.envs[0].options[0]
    assert options["same"] == 4
    assert options["mixed"].tolist() == [1, 2]


def test_seed_once_then_carry_on() -> None:
    frames = []
    for seed in (1, 1, 2):
        env = GymVectorEnv(cartpoles(3), seed=seed)
        frames.append((env.reset()[0]["frame"], env.reset()[0]["frame"]))
    assert torch.equal(frames[0][0], frames[1][0])
    assert torch.equal(frames[0][1], frames[1][1])
    assert not torch.equal(frames[0][0], frames[0][1])
    assert not torch.equal(frames[0][0], frames[2][0])


def test_the_autoreset_mode_must_be_known() -> None:
    vec = CountingVector(2, AutoresetMode.DISABLED, declare=False)
    with pytest.raises(ValueError, match=r"autoreset_mode=, one of AutoresetMode.NEXT_STEP, .*SAME_STEP, .*DISABLED"):
        GymVectorEnv(vec)
    with pytest.raises(ValueError, match=r"'Later' is not a valid .*The modes are AutoresetMode.NEXT_STEP"):
        GymVectorEnv(vec, autoreset_mode="Later")
    env = GymVectorEnv(vec, autoreset_mode="Disabled", seed=0)
    env.reset()
    for _ in range(10):
        env.step(act([0, 0]))
    with pytest.raises(ValueError, match=r"autoreset_mode=AutoresetMode.DISABLED, but CartPoleVectorEnv declares"):
        GymVectorEnv(cartpoles(1), autoreset_mode=AutoresetMode.DISABLED)


def test_a_mode_that_ale_left_in_gymnasiums_own_dict_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    vec = CountingVector(2, AutoresetMode.DISABLED)
    del vec.metadata
    monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="does not say how it restarts"):
        GymVectorEnv(vec)


def test_same_step_without_final_observation_is_refused() -> None:
    env = GymVectorEnv(CountingVector(2, AutoresetMode.DISABLED, declare=False), autoreset_mode="SameStep", seed=0)
    env.reset()
    with pytest.raises(ShapeMismatchError, match=r"no info\['final_obs'\]"):  # noqa: PT012 - at the first end
        for _ in range(8):
            env.step(act([0, 0]))


def test_a_final_observation_of_another_shape_is_refused() -> None:
    class ShortFinal(CountingVector):
        def step(self, actions: Any) -> Any:
            *answer, info = super().step(actions)
            for j in np.flatnonzero(info.get("_final_obs", [])):
                info["final_obs"][j] = info["final_obs"][j][:1]
            return *answer, info

    env = GymVectorEnv(ShortFinal(2, AutoresetMode.SAME_STEP), seed=0)
    env.reset()
    with pytest.raises(ShapeMismatchError, match=r"'frame' as float32 \(1,\)"):  # noqa: PT012 - at the first end
        for _ in range(8):
            env.step(act([0, 0]))


def test_frames_that_would_lose_their_fractions_are_refused() -> None:
    vec = CountingVector(2, AutoresetMode.DISABLED)
    vec.single_observation_space = spaces.Box(0, 255, (2,), np.uint8)
    with pytest.raises(ShapeMismatchError, match=r"'frame' came as float32 \(2, 2\), expected uint8 \(2, 2\)"):
        GymVectorEnv(vec).reset()


def test_numbers_that_would_wrap_around_are_refused() -> None:
    class Wide(CountingVector):
        def reset(self, **settings: Any) -> Any:
            frames, info = super().reset(**settings)
            return frames.astype(np.int64) - 1000, info

    vec = Wide(2, AutoresetMode.DISABLED)
    vec.single_observation_space = spaces.Box(0, 255, (2,), np.uint8)
    with pytest.raises(ShapeMismatchError, match=r"'frame' came as int64 \(2, 2\) from -1000 to 0, expected uint8"):
        GymVectorEnv(vec).reset()


def test_an_end_that_is_neither_true_nor_false_is_refused() -> None:
    class Unsure(CountingVector):
        def step(self, actions: Any) -> Any:
            frame, reward, terminated, truncated, info = super().step(actions)
            return frame, reward, terminated, np.array([None] * len(truncated)), info

    env = GymVectorEnv(Unsure(2, AutoresetMode.NEXT_STEP), seed=0)
    env.reset()
    with pytest.raises(ShapeMismatchError, match=r"'truncated' is object \(2,\), expected bool \(2,\)"):
        env.step(act([0, 0]))


class OldVector(CountingVector):
    """Of the old gym API, in one respect."""

    def __init__(self, respect: str) -> None:
        super().__init__(2, AutoresetMode.DISABLED)
        self.respect = respect

    def reset(self, **arguments: Any) -> Any:
        observation, info = super().reset(**arguments)
        return observation if self.respect == "reset" else (observation, info)

    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(actions)
        if self.respect == "step":
            return observation, reward, terminated, info
        return observation, None if self.respect == "reward" else reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("respect", "message"),
    [
        ("reset", "GymVectorEnv.reset: OldVector returned .* expected gymnasium's two values"),
        ("step", "GymVectorEnv.step: OldVector returned 4 values, .* expected gymnasium's five values"),
        ("reward", "GymVectorEnv.step: 'reward' is None, expected numbers"),
    ],
)
def test_vector_environments_of_the_old_api_are_told_as_such(respect: str, message: str) -> None:
    env = GymVectorEnv(OldVector(respect))
    with pytest.raises((TypeError, ShapeMismatchError), match=message):
        [env.reset(), env.step(act([0, 0]))]


def test_only_whole_vector_environments_are_taken() -> None:
    with pytest.raises(TypeError, match=r"got a list, expected a gymnasium.vector.VectorEnv"):
        GymVectorEnv([Counting()])  # type: ignore[arg-type]
    vec: Any = CountingVector(4, AutoresetMode.NEXT_STEP)
    vec.batch_size = 2
    with pytest.raises(ValueError, match="returns 2 of its 4 environments at a time"):
        GymVectorEnv(vec)
    with pytest.raises(RuntimeError, match=r"Call reset\(\) first"):
        GymVectorEnv(cartpoles(1)).step(act([0]))


@pytest.mark.filterwarnings("ignore:.*ERROR")  # gymnasium's logger warns about what it raises
def test_an_exception_in_a_process_knows_its_environment() -> None:
    makes = [functools.partial(Breaking, "step" if j == 1 else "") for j in range(3)]
    vec: Any = AsyncVectorEnv(makes, context="spawn")
    env = GymVectorEnv(vec, seed=0)
    env.reset()
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        env.step(act([0, 0, 0]))
    assert caught.value.environment_index == 1  # type: ignore[attr-defined]
    env.close()
    env.close()
    assert vec.closed


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")  # EnvPool's own space
def test_envpool_loses_no_step_with_masks() -> None:
    envpool = pytest.importorskip("envpool")
    vec = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, seed=3)
    with pytest.raises(ValueError, match=r"made with seed 3 .*envpool.make\(..., seed=4\)"):
        GymVectorEnv(vec, seed=4)
    with pytest.raises(ValueError, match=r"reset_mask=True, but EnvPool returns only .* its wrapper TransformReward"):
        GymVectorEnv(TransformReward(vec, abs), seed=3, reset_mask=True)
    env = GymVectorEnv(vec, seed=3, reset_mask=True)
    with pytest.raises(ValueError, match=r"EnvPool takes no reset options, got env_info with \['level'\]"):
        env.reset(DictTensor({"level": torch.zeros(4)}))
    assert follow(env, 60) > 8


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_ale_loses_no_step_with_masks_or_in_mode_same_step(mode: AutoresetMode) -> None:
    pytest.importorskip("ale_py")
    from ale_py.vector_env import AtariVectorEnv

    settings = {"max_num_frames_per_episode": 40, "num_threads": 1, "noop_max": 1, "use_fire_reset": False}
    env = GymVectorEnv(AtariVectorEnv("pong", 3, autoreset_mode=mode, **settings), seed=1, reset_mask=True)
    alone = AtariVectorEnv("pong", 3, autoreset_mode=AutoresetMode.NEXT_STEP, **settings)
    frames, _ = alone.reset(seed=1)
    observation, _ = env.reset()
    ends = 0
    for _ in range(35):
        np.testing.assert_array_equal(observation["frame"].numpy(), frames)
        (reached, stepped), (observation, running) = env.step(act([2, 3, 0]))
        assert stepped.all()
        assert running.all()
        frames, _, terminated, truncated, _ = alone.step(np.array([2, 3, 0]))
        np.testing.assert_array_equal(reached["frame"].numpy(), frames)  # the final ones too
        np.testing.assert_array_equal(reached["truncated"].numpy(), truncated)
        if (terminated | truncated).all():  # a fixed time limit: all at once
            frames, *_ = alone.step(np.array([0, 0, 0]))
            ends += 1
    assert ends >= 3
    env.close()


@pytest.mark.parametrize("vectorization_mode", ["sync", "vector_entry_point"])
def test_an_action_that_the_environment_refuses_is_named(vectorization_mode: str) -> None:
    """Gymnasium's assertions say little more than "invalid"."""
    env = GymVectorEnv(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode=vectorization_mode), seed=0)
    env.reset()
    wrong = r"^GymVectorEnv\.step: .* raised AssertionError: .*Action np\.int64\(7\) of environment 1 is not in"
    with pytest.raises(ValueError, match=rf"{wrong} Discrete\(2\), which may be why\. Give the agent's network one"):
        env.step(DictTensor({"action": torch.tensor([0, 7, 1])}))
    env.close()
