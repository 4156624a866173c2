"""GymEnv and GymEnvInf: seeds, options, errors, closing, and a real environment."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import EPISODE, Breaking, Counting
from fake_agents import RngAgent
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from rlstruct.batchers import RL_Batcher
from rlstruct.core import DictTensor
from rlstruct.envs import GymEnv, GymEnvInf, GymVectorEnv
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError, UsageError
from rlstruct.vec_env import EnvWrapper, ObservationBuffer, steps_into


def vector(envs: list[Counting], seed: int) -> GymVectorEnv:
    return GymVectorEnv(SyncVectorEnv([lambda env=env: env for env in envs]), seed)


def ones(n: int) -> DictTensor:
    return DictTensor({"action": torch.ones(n, dtype=torch.int64)})


def test_contract_of_the_first_observation() -> None:
    env = GymEnv([gymnasium.make("CartPole-v1") for _ in range(2)], seed=0)
    observation, running = env.reset()
    specs = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in observation.items()}
    assert specs == {
        "frame": (torch.float32, (2, 4)),
        "reward": (torch.float32, (2,)),
        "terminated": (torch.bool, (2,)),
        "truncated": (torch.bool, (2,)),
        "done": (torch.bool, (2,)),
        "initial_state": (torch.bool, (2,)),
        "last_action": (torch.int64, (2,)),
    }
    assert running.all()
    assert running.dtype == torch.bool
    assert env.device == torch.device("cpu")
    assert env.n_envs() == 2
    assert not env.auto_reset
    assert GymEnvInf.auto_reset
    env.close()


def test_cartpole_equals_gymnasium_step_by_step_over_restarts() -> None:
    seeds = [7, 8]
    env = GymEnvInf([gymnasium.make("CartPole-v1") for _ in seeds], seed=7)
    alone = [gymnasium.make("CartPole-v1") for _ in seeds]
    frames = [one.reset(seed=seed)[0] for one, seed in zip(alone, seeds, strict=True)]
    observation, _ = env.reset()
    restarts = 0
    for t in range(120):
        np.testing.assert_array_equal(observation["frame"].numpy(), np.stack(frames))
        action = torch.tensor([t % 2, t % 3 % 2])
        (reached, _), (observation, _) = env.step(DictTensor({"action": action}))
        for j, one in enumerate(alone):
            frames[j], reward, terminated, truncated, _ = one.step(action[j].item())
            np.testing.assert_array_equal(reached["frame"][j].numpy(), frames[j])
            assert reached["reward"][j] == reward
            assert reached["terminated"][j] == terminated
            assert reached["truncated"][j] == truncated
            if terminated or truncated:
                frames[j] = one.reset()[0]
                restarts += 1
    assert restarts > 2
    env.close()


def test_seed_plus_j_once_and_then_the_own_stream() -> None:
    seeds: list[list[int | None]] = [[], [], []]

    class Seeded(Counting):
        def __init__(self, j: int) -> None:
            super().__init__()
            self.j = j
            self.action_space = spaces.Discrete(1000)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            seeds[self.j].append(seed)
            return super().reset(seed=seed, options=options)

    envs = [Seeded(j) for j in range(3)]
    env = GymEnvInf(envs, seed=10)
    reference = spaces.Discrete(1000)
    for j, one in enumerate(envs):
        reference.seed(10 + j)
        assert one.action_space.sample() == reference.sample()
    env.reset()
    for _ in range(10):
        env.step(ones(3))
    env.reset()
    assert [row[0] for row in seeds] == [10, 11, 12]
    assert all(seed is None for row in seeds for seed in row[1:])
    assert all(len(row) > 2 for row in seeds)


def test_env_info_reaches_every_reset_of_its_row() -> None:
    envs = [Counting(), Counting()]
    env = GymEnvInf(envs, seed=0)
    env.reset()
    assert envs[0].options == [None]
    env.reset(DictTensor({"level": torch.tensor([3, 4]), "gravity": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}))
    for _ in range(8):
        env.step(ones(2))
    for one, level, gravity in zip(envs, [3, 4], [[1.0, 2.0], [3.0, 4.0]], strict=True):
        assert len(one.options) > 2
        for options in one.options[1:]:
            assert options["level"] == level
            assert type(options["level"]) is int
            assert isinstance(options["gravity"], np.ndarray)
            assert options["gravity"].tolist() == gravity
    env.reset(DictTensor({}))
    assert envs[0].options[-1] is None


def test_wrong_env_info_is_refused() -> None:
    env = GymEnv([Counting(), Counting()])
    with pytest.raises(ShapeMismatchError, match=r"env_info 'level' is \[3\] torch.float32, expected \[2, ...\]"):
        env.reset(DictTensor({"level": torch.zeros(3)}))
    with pytest.raises(DeviceMismatchError, match="env_info 'level' is on meta, expected cpu"):
        env.reset(DictTensor({"level": torch.zeros(2, device="meta")}))


@pytest.mark.parametrize("at", ["reset", "step"])
def test_an_exception_comes_out_as_it_is_and_knows_its_environment(at: str) -> None:
    env = GymEnv([Counting(), Counting(), Breaking(at)])
    with pytest.raises(ZeroDivisionError, match=r"^mine$") as caught:  # noqa: PT012 - reset may raise too
        env.reset()
        env.step(ones(3))
    assert caught.value.environment_index == 2  # type: ignore[attr-defined]


class Brittle(gymnasium.Env[Any, Any]):
    """Breaks in its first step, at whatever action."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.action_space = action_space

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("mine")


ARM = spaces.Box(-1, 1, (2,), np.float32)
BEYOND = torch.full((1, 2), 1.5)  # as a Gaussian agent draws


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (ARM, {"action": BEYOND}),
        (
            spaces.Dict(arm=ARM, hand=spaces.Discrete(2)),
            {"action/arm": BEYOND, "action/hand": torch.ones(1, dtype=torch.int64)},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*ClipAction")  # which appears once
def test_an_action_beyond_a_box_is_not_blamed_for_the_users_exception(
    space: spaces.Space[Any], action: dict[str, Any]
) -> None:
    env = GymEnv([Brittle(space)])
    env.reset()
    with pytest.raises(ZeroDivisionError, match=r"^mine$"):
        env.step(DictTensor(action))


def test_an_action_that_does_not_exist_is_a_hint_after_the_users_exception() -> None:
    env = GymEnv([Brittle(spaces.Discrete(2))])
    env.reset()
    told = (
        r"environment 0 raised ZeroDivisionError: mine\. Its action np.int64\(2\) is not in Discrete\(2\), which may be"
    )
    with pytest.raises(ValueError, match=told) as caught:
        env.step(DictTensor({"action": torch.tensor([2])}))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_close_closes_all_once_and_then_raises() -> None:
    envs = [Breaking("close"), Counting(), Breaking("close"), Counting()]
    env = GymEnv(envs)
    with pytest.raises(ZeroDivisionError) as caught:
        env.close()
    assert caught.value.environment_index == 0  # type: ignore[attr-defined]
    env.close()
    assert [one.closed for one in envs] == [1, 1, 1, 1]


def test_constructor_names_what_is_wrong() -> None:
    one = Counting()
    other = Counting()
    other.observation_space = spaces.Box(0, 1, (3,))
    with pytest.raises(ValueError, match="empty"):
        GymEnv([])
    with pytest.raises(TypeError, match=r"Write GymEnv\(\[env\]\)"):
        GymEnv(one)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"got a SyncVectorEnv, expected a list of env.* Write GymVectorEnv\(vec, seed\)"
    ):
        GymEnvInf(SyncVectorEnv([Counting]), 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got an int, expected a list of env.* Write GymEnvInf\(\[gymnasium\.make"):
        GymEnvInf(4, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="entry 1 is an int"):
        GymEnv([one, 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="entry 2 is the same object"):
        GymEnv([one, Counting(), one])
    with pytest.raises(ValueError, match=r"environment 1 has observation_space Box\(0.0, 1.0.*environment 0 has Box"):
        GymEnv([one, other])
    with pytest.raises(RuntimeError, match=r"GymEnvInf.step.*Call reset\(\) first"):
        GymEnvInf([one]).step(ones(1))


def test_a_reward_that_is_no_number_is_refused() -> None:
    class Rewarding(Counting):
        def step(self, action: Any) -> Any:
            frame, _, *rest = super().step(action)
            return (frame, np.ones(1), *rest)

    env = GymEnv([Rewarding()])
    env.reset()
    with pytest.raises(ShapeMismatchError, match=r"environment 0 gave an array of shape \(1,\), expected one"):
        env.step(ones(1))


class Answering(Counting):
    """Returns from `reset`, or from `step`, what it is given."""

    def __init__(self, *, first: Any = None, then: Any = None) -> None:
        super().__init__()
        self.first, self.then = first, then

    def reset(self, **settings: Any) -> Any:
        answer = super().reset(**settings)
        return answer if self.first is None else self.first

    def step(self, action: Any) -> Any:
        answer = super().step(action)
        return answer if self.then is None else self.then(*answer)


@pytest.mark.parametrize(
    ("first", "got"),
    [
        (np.zeros((2, 2), np.float32), "a ndarray"),  # two rows, which would unpack
        (np.zeros(2, np.float32), "a ndarray"),
        ((0, np.zeros(2, np.float32)), r"2 values, \(int, ndarray\)"),  # an element of a Tuple space, without info
        ((1, 2, {}), "3 values"),
    ],
)
def test_a_reset_of_the_old_gym_api_is_told(first: Any, got: str) -> None:
    env = GymEnv([Counting(), Answering(first=first)])
    message = rf"GymEnv.reset: environment 1, an Answering, returned {got}.*two values, \(observation, info\)"
    with pytest.raises(TypeError, match=message) as caught:
        env.reset()
    assert caught.value.environment_index == 1  # type: ignore[attr-defined]


def test_a_reset_without_seed_is_told() -> None:
    class Old(Counting):
        def reset(self) -> Any:  # type: ignore[override]
            return self.observe()

    with pytest.raises(TypeError, match=r"environment 0: .*write def reset\(self, \*, seed=None, options=None\)"):
        GymEnv([Old()]).reset()


@pytest.mark.parametrize(
    ("then", "error", "message"),
    [
        (lambda o, r, t, u, i: (o, r, t, i), TypeError, r"returned 4 values, .*five values, \(observation, reward"),
        (lambda o, r, t, u, i: (o, r, t, u), TypeError, r"returned 4 values, .*five values"),
        (lambda o, r, t, u, i: o, TypeError, "returned a ndarray, .*five values"),
        (lambda o, r, t, u, i: (o[:1], r, t, u, i), ShapeMismatchError, r"1 gave 'frame' as float32 \(1,\), its"),
        (lambda o, r, t, u, i: (o[0], r, t, u, i), ShapeMismatchError, r"1 gave 'frame' as float32 \(\), its"),
        (lambda o, r, t, u, i: (o + 0j, r, t, u, i), ShapeMismatchError, "environment 1 gave 'frame' as complex64"),
        (lambda o, r, t, u, i: (o, None, t, u, i), ShapeMismatchError, "'reward': environment 1 gave None, expected"),
        (lambda o, r, t, u, i: (o, "1", t, u, i), ShapeMismatchError, "'reward': environment 1 gave '1', expected one"),
        (lambda o, r, t, u, i: (o, r, None, u, i), ShapeMismatchError, "environment 1: 'terminated' is None, expect"),
        (lambda o, r, t, u, i: (o, r, t, float("nan"), i), ShapeMismatchError, "environment 1: 'truncated' is nan"),
    ],
)  # fmt: skip
def test_a_step_that_is_none_of_gymnasiums_is_told(then: Any, error: type[Exception], message: str) -> None:
    env = GymEnv([Counting(), Answering(then=then)], seed=0)
    env.reset()
    with pytest.raises(error, match=message) as caught:
        env.step(ones(2))
    assert caught.value.environment_index == 1  # type: ignore[attr-defined]


def test_a_final_observation_of_another_shape_is_told() -> None:
    def end(o: Any, r: Any, t: Any, u: Any, i: Any) -> Any:
        return (np.zeros(1, np.float32), r, True, u, i) if o[0] % EPISODE == 3 else (o, r, False, False, i)

    env = GymEnvInf([Answering(then=end)], seed=0)
    env.reset()
    env.envs[0].length = 9  # type: ignore[attr-defined]
    env.step(ones(1))
    env.step(ones(1))
    with pytest.raises(ShapeMismatchError, match=r"environment 0 gave 'frame' as float32 \(1,\), its space declares"):
        env.step(ones(1))


def test_numpy_flags_and_rewards_are_taken() -> None:
    def numpy_scalars(o: Any, r: Any, t: Any, u: Any, i: Any) -> Any:
        return o, np.float64(r), np.bool_(True), np.array(False), i

    env = GymEnv([Counting(), Answering(then=numpy_scalars)], seed=0)
    env.reset()
    reached = env.step(ones(2))[0][0]
    assert reached["terminated"][1]
    assert not reached["truncated"][1]
    assert reached["reward"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_a_space_that_is_not_declared_is_told(name: str) -> None:
    class Bare(gymnasium.Env[Any, Any]):
        pass

    env, other = Bare(), "action_space" if name == "observation_space" else "observation_space"
    setattr(env, other, spaces.Discrete(2))
    with pytest.raises(TypeError, match=rf"GymEnv: environment 0, a Bare, declares no {name}. Set it in its __init__"):
        GymEnv([env])


def test_render_asks_every_environment() -> None:
    env = GymEnv([gymnasium.make("FrozenLake-v1", render_mode="ansi") for _ in range(2)], seed=0)
    env.reset()
    assert [text.count("\n") for text in env.render()] == [5, 5]
    env.close()


@pytest.mark.parametrize("make", [GymEnv, GymEnvInf, vector], ids=["GymEnv", "GymEnvInf", "GymVectorEnv"])
def test_environments_keep_only_the_last_of_the_structures_that_they_write(make: Any) -> None:
    def n_alive() -> int:
        gc.collect()
        return sum(isinstance(one, DictTensor | ObservationBuffer) for one in gc.get_objects())

    env = make([Counting() for _ in range(2)], 0)
    last = ObservationBuffer.of(env.reset()[0])
    counts = []
    for _ in range(3):
        for _ in range(5):  # in new memory each, as a batcher that passes its batches on
            out, final = (ObservationBuffer.of(last.observation().clone()) for _ in range(2))
            env.step_into(ones(2), last, out, final)
            last = out
        env.reset()
        for _ in range(5):
            env.step(ones(2))
        counts.append(n_alive())
    assert counts[1:] == counts[:1] * 2
    env.close()


@pytest.mark.parametrize("make", [GymEnv, GymEnvInf, vector], ids=["GymEnv", "GymEnvInf", "GymVectorEnv"])
def test_step_into_writes_what_step_returns_and_final_observations_of_restarted_rows_alone(make: Any) -> None:
    n = 4
    plain, placed = (make([Counting(reuse=True) for _ in range(n)], 0) for _ in range(2))
    first, _ = plain.reset()
    placed.reset()
    before, out, final = (ObservationBuffer.of(first.clone()) for _ in range(3))
    n_restarts = 0
    for _ in range(30):
        for buffer in (out, final):  # whatever memory holds, but for the flags that the batcher clears
            for array in buffer.arrays:
                array.fill(7)
        for flag in out.flags:
            flag.fill(False)
        untouched = final.observation().clone()
        (reached, ran), (current, running) = plain.step(ones(n))
        ended = placed.step_into(ones(n), before, out, final if plain.auto_reset else None)
        restarted = [] if ended is None else list(ended.restarted)
        n_restarts += len(restarted)
        assert (ended is not None) >= (bool(reached["done"].any()) or not bool(ran.all()))
        if ended is not None:
            assert torch.equal(torch.ones(n, dtype=torch.bool) if ended.ran is None else ended.ran, ran)
            assert torch.equal(torch.ones(n, dtype=torch.bool) if ended.running is None else ended.running, running)
        for key, value in current.items():
            assert torch.equal(out.observation()[key], value), key
            expected = untouched[key].clone()
            expected[restarted] = reached[key][restarted]
            assert torch.equal(final.observation()[key], expected), key
            rest = [row for row in range(n) if row not in restarted]
            assert torch.equal(reached[key][rest], value[rest]), key
        before, out = out, before
    assert (n_restarts > 5) == plain.auto_reset
    with pytest.raises(UsageError, match=r"step: there is nothing to step\. Call reset\(\) first"):
        placed.step(ones(n))  # it does not know where the last observation is


def test_a_step_of_ones_own_is_what_a_batcher_calls() -> None:
    class Shifted(GymEnvInf):
        def step(self, action: DictTensor) -> Any:
            (reached, ran), (current, running) = super().step(action)
            shown = [DictTensor({**dict(one.items()), "frame": one["frame"] + 100}) for one in (reached, current)]
            return (shown[0], ran), (shown[1], running)

    def collected(create: Any) -> Any:
        with RL_Batcher(6, RngAgent, create, seed=0) as batcher:
            batcher.reset()
            batcher.execute()
            return batcher.get()[0].steps

    class Patched(GymEnvInf):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.step = partial(Shifted.step, Shifted(self.envs, 0))  # type: ignore[method-assign]

    plain = collected(lambda seed: GymEnvInf([Counting() for _ in range(3)], seed))
    shifted = collected(lambda seed: Shifted([Counting() for _ in range(3)], seed))
    assert torch.equal(shifted["_observation/frame"], plain["_observation/frame"] + 100)
    env = Patched([Counting()], 0)
    assert steps_into(env) is None
    assert steps_into(GymEnvInf([Counting()], 0)) is not None
    assert steps_into(EnvWrapper(GymEnvInf([Counting()], 0))) is None


def unseen(name: str, bound: float, **settings: Any) -> gymnasium.Env[Any, Any]:
    """Create an environment with an action space that no other test has, since a process warns once of each."""
    return gymnasium.wrappers.RescaleAction(gymnasium.make(name, **settings), np.float32(-bound), np.float32(bound))


def test_an_action_beyond_a_box_is_reported_once() -> None:
    envs = [unseen("MountainCarContinuous-v0", 1.25) for _ in range(2)]
    env, beyond = GymEnvInf(envs, 0), DictTensor({"action": torch.tensor([[0.5], [1.5]])})
    env.reset()
    env.step(DictTensor({"action": torch.tensor([[1.25], [-1.250001]])}))  # a rounding error
    with pytest.warns(UserWarning, match=r"outside Box\(-1.25, 1.25, \(1,\), float32\).*wrappers.ClipAction") as caught:
        env.step(beyond)
    assert caught[0].filename == __file__
    env.step(beyond)
    other = GymEnvInf(envs, 0)
    other.reset()
    other.step(beyond)


def test_a_clipped_action_is_not_reported_even_if_the_space_shows_its_bounds() -> None:
    bounded = gymnasium.make("Pendulum-v1")
    env: Any = gymnasium.wrappers.ClipAction(bounded)
    env.action_space = bounded.action_space
    outer = GymEnv([gymnasium.wrappers.FlattenObservation(env)])
    outer.reset()
    outer.step(DictTensor({"action": torch.full((1, 1), 5.0)}))


def test_actions_are_watched_for_a_thousand_steps() -> None:
    env = GymEnvInf([unseen("Pendulum-v1", 2.25, max_episode_steps=9)])
    env.reset()
    for _ in range(1000):
        env.step(DictTensor({"action": torch.zeros(1, 1)}))
    env.step(DictTensor({"action": torch.full((1, 1), 5.0)}))
