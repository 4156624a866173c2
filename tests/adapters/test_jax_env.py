"""JaxEnv over gymnax, Brax and environments written here: the numbers of the packages, exact ends, saved states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_agents import RngAgent
from gymnasium import spaces

from rlstruct import DictTensor
from rlstruct.adapters import JaxEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.testing import check_vec_env

jax = pytest.importorskip("jax")


class Counting(NamedTuple):
    time: Any
    length: Any


class Counters:
    """Episodes of a drawn length with gymnax's interface: each ends by itself, or after ``max_steps_in_episode``."""

    default_params = SimpleNamespace(max_steps_in_episode=25)

    def reset_env(self, key: Any, params: Any) -> tuple[Any, Counting]:
        state = Counting(jax.numpy.int32(0), jax.random.randint(key, (), 3, 40))
        return self.frame(state), state

    def step_env(self, key: Any, state: Counting, action: Any, params: Any) -> tuple[Any, ...]:
        state = state._replace(time=state.time + 1)
        noise = jax.random.uniform(key)
        frame = self.frame(state)
        return frame, state, jax.numpy.where(action == 1, noise, 0.0), state.time >= state.length, {}

    def frame(self, state: Counting) -> Any:
        return jax.numpy.stack([state.time, state.length]).astype(jax.numpy.float32)

    def is_truncated(self, state: Counting, params: Any) -> Any:
        return state.time >= params.max_steps_in_episode

    def observation_space(self, params: Any) -> spaces.Space[Any]:
        return spaces.Box(0.0, 40.0, (2,))

    def action_space(self, params: Any) -> spaces.Space[Any]:
        return spaces.Discrete(2)


def counters(n_envs: int = 6, seed: int = 0) -> JaxEnv:
    return JaxEnv(Counters(), n_envs, seed)


class Falling(NamedTuple):
    obs: Any
    reward: Any
    done: Any
    key: Any


class FallingBall:
    """A ball that is pushed up and falls, with Brax's interface: its episodes end at the ground."""

    observation_size, action_size = 2, 1

    def reset(self, rng: Any) -> Falling:
        height = jax.random.uniform(rng, (), minval=0.5, maxval=1.0)
        zero = jax.numpy.zeros(())
        return Falling(jax.numpy.stack([height, zero]), zero, zero, rng)

    def step(self, state: Falling, action: Any) -> Falling:
        speed = state.obs[1] - 0.05 + 0.02 * action[0]
        height = state.obs[0] + speed
        return Falling(jax.numpy.stack([height, speed]), height, (height < 0).astype(jax.numpy.float32), state.key)


def drawn(t: int, n: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(t).integers(0, 2, n))


def test_the_contract_holds_for_the_interface_of_gymnax() -> None:
    check_vec_env(counters(3), n_steps=50)


@pytest.mark.slow
def test_the_contract_holds_for_gymnax() -> None:
    gymnax = pytest.importorskip("gymnax", exc_type=ImportError)
    env, params = gymnax.make("Breakout-MinAtar")
    check_vec_env(JaxEnv(env, 3, params=params.replace(max_steps_in_episode=20)), n_steps=50)


@pytest.mark.slow
def test_the_contract_holds_for_the_interface_of_brax() -> None:
    check_vec_env(lambda seed: JaxEnv(FallingBall(), 3, seed, time_limit=7), n_steps=40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["interface", "gymnax"])
def test_episodes_equal_those_of_the_functions_row_by_row(kind: str) -> None:
    if kind == "gymnax":
        env, params = pytest.importorskip("gymnax", exc_type=ImportError).make("CartPole-v1")
        params = params.replace(max_steps_in_episode=25)
    else:
        env, params = Counters(), Counters.default_params
    take_step = jax.jit(lambda key, state, action: env.step_env(key, state, action, params))
    begin = jax.jit(lambda key: env.reset_env(key, params))
    ours, few = JaxEnv(env, 6, params=params), JaxEnv(env, 2, 3, params=params)
    (observation, _), (shown, _) = ours.reset(), few.reset()
    rows = []
    for j in range(6):  # the same keys: one split at the start, three ways in each step
        key, own = jax.random.split(jax.random.PRNGKey(j))
        frame, state = begin(own)
        np.testing.assert_array_equal(observation["frame"][j].numpy(), np.asarray(frame))
        rows.append((key, state))
    n_terminated = n_truncated = 0
    for t in range(80):
        action = drawn(t, 6) if t < 40 else torch.full((6,), t % 2)  # taking turns, the pole stands for longer
        assert torch.equal(shown["frame"], observation["frame"][3:5]), "a row depends on its batch"
        (reached, _), (observation, _) = ours.step(DictTensor({"action": action}))
        shown = few.step(DictTensor({"action": action[3:5]}))[1][0]
        for j, (key, state) in enumerate(rows):
            key, for_step, for_start = jax.random.split(key, 3)
            frame, state, reward, terminated, _ = take_step(for_step, state, int(action[j]))
            truncated = int(state.time) >= 25 and not bool(terminated)
            np.testing.assert_allclose(reached["frame"][j].numpy(), np.asarray(frame), rtol=1e-5, atol=1e-6)
            assert (bool(reached["terminated"][j]), bool(reached["truncated"][j])) == (bool(terminated), truncated)
            assert float(reached["reward"][j]) == float(reward)
            if terminated or truncated:
                frame, state = begin(for_start)
                np.testing.assert_array_equal(observation["frame"][j].numpy(), np.asarray(frame))
            n_terminated, n_truncated = n_terminated + int(terminated), n_truncated + int(truncated)
            rows[j] = (key, state)
    assert n_terminated > 6
    assert n_truncated > 3


def test_a_time_limit_truncates_and_a_fall_terminates() -> None:
    env = JaxEnv(FallingBall(), 4, time_limit=5)
    env.reset()
    reached, _ = env.step(DictTensor({"action": torch.zeros(4, 1)}))[0]
    lengths = torch.zeros(4)
    for _ in range(30):
        height = reached["frame"][:, 0]
        lengths = torch.where(reached["done"], torch.zeros(4), lengths + 1)
        assert torch.equal(reached["terminated"], height < 0)
        assert torch.equal(reached["truncated"], (lengths == 0) & reached["done"] & (height >= 0))
        (reached, _), (after, _) = env.step(DictTensor({"action": torch.ones(4, 1)}))
        assert bool((after["frame"][reached["done"], 1] == 0).all()), "a restarted ball is at rest"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Brax System:UserWarning", "ignore:Accessing `ncon` directly:DeprecationWarning")
def test_episodes_equal_those_of_brax() -> None:
    brax = pytest.importorskip("brax.envs", exc_type=ImportError)
    env = brax.get_environment("inverted_pendulum", backend="spring")
    ours = JaxEnv(env, 3, 5)
    observation, _ = ours.reset()
    state = jax.jit(jax.vmap(env.reset))(
        jax.numpy.stack([jax.random.split(jax.random.PRNGKey(5 + j))[1] for j in range(3)])
    )
    step = jax.jit(jax.vmap(env.step))
    n_ends, running = 0, np.ones(3, bool)
    np.testing.assert_allclose(observation["frame"].numpy(), np.asarray(state.obs), rtol=1e-6)
    for t in range(40):
        action = torch.from_numpy(np.random.default_rng(t).uniform(-1, 1, (3, 1)).astype(np.float32))
        (reached, _), _ = ours.step(DictTensor({"action": action}))
        state = step(state, jax.numpy.asarray(action.numpy()))
        np.testing.assert_allclose(
            reached["frame"].numpy()[running], np.asarray(state.obs)[running], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_array_equal(reached["terminated"].numpy()[running], np.asarray(state.done)[running] > 0)
        running &= ~reached["done"].numpy()
        n_ends += int(reached["done"].sum())
    assert n_ends > 0


def test_memory_is_shared_with_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that JAX has computed, and actions that it reads."""
    made: list[tuple[Any, Any]] = []

    def noting(convert: Any) -> Any:
        return lambda value: made.append((value, convert(value))) or made[-1][1]

    monkeypatch.setattr(jax, "block_until_ready", noting(jax.block_until_ready))
    monkeypatch.setattr(jax.numpy, "from_dlpack", noting(jax.numpy.from_dlpack))
    env = JaxEnv(FallingBall(), 3, 0)
    observation, _ = env.reset()
    _, frame = made.pop()
    assert observation["frame"].data_ptr() == frame.unsafe_buffer_pointer()
    env.step(DictTensor({"action": torch.ones(3, 1)}))
    action, array = made[0]
    assert action.data_ptr() == array.unsafe_buffer_pointer()


@pytest.mark.gpu
def test_steps_wait_for_torchs_stream_and_torch_for_jax() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    here, there = counters(64), JaxEnv(Counters(), 64, device="cuda:0")
    here.reset()
    there.reset()
    with torch.cuda.stream(torch.cuda.Stream()):
        for t in range(60):
            expected = here.step(DictTensor({"action": drawn(t, 64)}))
            action = torch.zeros(64, dtype=torch.int64, device="cuda:0")
            torch.cuda._sleep(2_000_000)  # a millisecond: whoever does not wait for it reads zeros
            action.copy_(drawn(t, 64))
            found = there.step(DictTensor({"action": action}))
            for (ours, _), (theirs, _) in zip(found, expected, strict=True):
                assert torch.equal(ours["frame"].cpu(), theirs["frame"])
                torch.testing.assert_close(ours["reward"].cpu(), theirs["reward"])


@pytest.mark.slow
def test_a_saved_state_goes_on_bit_by_bit() -> None:
    first, second = counters(), counters(seed=99)
    first.reset()
    for t in range(30):
        first.step(DictTensor({"action": drawn(t, 6)}))
    second.load_state_dict(first.state_dict())
    for t in range(30, 60):
        action = DictTensor({"action": drawn(t, 6)})
        (expected, _), (after, _) = first.step(action)
        (reached, _), (current, _) = second.step(action)
        for key in expected.keys():
            assert torch.equal(reached[key], expected[key])
            assert torch.equal(current[key], after[key])


@pytest.mark.slow
def test_a_batcher_collects_it_and_keeps_true_final_observations() -> None:
    with RL_Batcher(40, RngAgent, lambda seed: counters(4, seed), seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        steps = batcher.get()[0].steps
    ended = steps["_observation/done"]
    assert int(ended.sum()) >= 4
    changed = (steps["_observation/frame"][:, :-1] != steps["observation/frame"][:, 1:]).any(-1)
    assert torch.equal(changed, ended[:, :-1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: JaxEnv(FallingBall(), 0), "n_envs=0"),
        (lambda: JaxEnv(SimpleNamespace(reset=None), 2), "neither gymnax's interface"),
        (lambda: JaxEnv(SimpleNamespace(step_env=None), 2), "expected the interface of gymnax 1.0 or newer"),
        (lambda: counters().step(DictTensor({"action": drawn(0, 6)})), "Call reset\\(\\) first"),
        (lambda: counters().load_state_dict({"leaf/0": torch.zeros(2)}), "same environment"),
        (lambda: JaxEnv(FallingBall(), 2, device="sim:0"), "JAX has no sim"),
    ],
)
def test_mistakes_are_explained(make: Any, words: str) -> None:
    with pytest.raises((KeyError, ValueError, TypeError, RuntimeError), match=words):
        make()


def test_a_state_of_other_environments_leaves_these_unchanged() -> None:
    env = counters()
    with pytest.raises(KeyError, match="same environment"):
        env.load_state_dict({})
    assert env.state_dict() is None
