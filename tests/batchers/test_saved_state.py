"""A batcher that goes on from a saved state returns the batches that the first one would have."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from batcher_fakes import assert_equal, create_cartpole, create_policy, next_batch
from fake_agents import RngAgent
from fake_envs import CountingEnv, SlowEnv

from rlstruct import DeviceEnv, DictTensor
from rlstruct.batchers import RL_Batcher
from rlstruct.errors import BatcherStateError, WorkerError
from rlstruct.sims import make

B, T = 4, 30


def create_sim(n_envs: int, seed: int, **settings: Any) -> Any:
    return make("CartPole-v1", n_envs, seed, time_limit=20, **settings)


def create_batcher(create_env: Any = create_sim, *, n_processes: int = 0, seed: int = 5, **env_args: Any) -> RL_Batcher:
    env_args = {"n_envs": B // max(1, n_processes), **env_args}
    return RL_Batcher(
        T,
        create_policy,
        create_env,
        agent_args={"recurrent": True},
        env_args=env_args,
        n_processes=n_processes,
        seed=seed,
    )


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("n_processes", "auto_reset"), [(0, True), (0, False), (2, True)])
def test_batches_after_loading_are_those_of_the_first_batcher(n_processes: int, auto_reset: bool) -> None:
    weights = create_policy(recurrent=True).model.state_dict()
    changed = {name: weight + 0.01 for name, weight in weights.items()}
    with create_batcher(n_processes=n_processes, auto_reset=auto_reset) as batcher:
        batcher.reset()
        batcher.update(changed)
        next_batch(batcher) if auto_reset else batcher.reset()
        state = through_a_file(batcher.state_dict())
        generators = [collector["generator"] for collector in state["collectors"]]
        assert [generator is None for generator in generators] == ([True] if n_processes == 0 else [False, False])
        expected = [next_batch(batcher)]
        batcher.reset()
        expected.append(next_batch(batcher))
    assert (expected[0].info["agent_state/hidden"] != 0).any() == auto_reset  # there was something to remember
    with create_batcher(n_processes=n_processes, auto_reset=auto_reset, seed=99) as other:
        assert other.load_state_dict(state, changed)
        assert other.policy_version == 1
        assert_equal(next_batch(other), expected[0])
        other.reset()
        assert_equal(next_batch(other), expected[1])


def test_saving_changes_nothing() -> None:
    with create_batcher() as batcher, create_batcher() as other:
        for one in (batcher, other):
            one.reset()
            next_batch(one)
        state = batcher.state_dict()
        kept = {name: value.clone() for name, value in state["collectors"][0]["observation"].items()}
        assert_equal(next_batch(batcher), next_batch(other))
        for name, value in kept.items():
            assert torch.equal(value, state["collectors"][0]["observation"][name])


@pytest.mark.parametrize("n_processes", [0, 1])
def test_environments_of_gymnasium_begin_new_episodes(n_processes: int) -> None:
    weights = create_policy(recurrent=True).model.state_dict()
    with create_batcher(create_cartpole, n_processes=n_processes) as batcher:
        batcher.reset()
        batcher.update(weights)
        first = next_batch(batcher)
        state = through_a_file(batcher.state_dict())
        assert [collector["environment"] for collector in state["collectors"]] == [None] * max(1, n_processes)
    with create_batcher(create_cartpole, n_processes=n_processes, seed=6) as other:
        assert not other.load_state_dict(state, weights)
        batch = next_batch(other)
    assert batch.info["step"].tolist() == [0] * B  # since the last reset, which loading was
    assert batch.info["policy_version"].tolist() == [1] * B
    assert batch.steps["observation/initial_state"][:, 0].all()
    assert (batch.info["agent_state/hidden"] == 0).all()
    assert not torch.equal(batch.steps["observation/frame"][:, 0], first.steps["observation/frame"][:, 0])
    assert not torch.equal(batch.steps["observation/rng"], first.steps["observation/rng"])


def test_settings_stay_those_of_the_reset() -> None:
    lengths = DictTensor({"length": torch.tensor([2, 3, 4, 5])})
    settings: dict[str, Any] = {"env_args": {"n_envs": 4, "auto_reset": True}, "seed": 5}
    with RL_Batcher(T, RngAgent, CountingEnv, **settings) as batcher:
        batcher.reset(env_info=lengths)
        next_batch(batcher)
        state = through_a_file(batcher.state_dict())
        expected = next_batch(batcher)
    with RL_Batcher(T, RngAgent, CountingEnv, **settings) as other:
        other.load_state_dict(state)
        batch = next_batch(other)
    assert batch.info["env_info/length"].tolist() == [2, 3, 4, 5]
    assert torch.equal(batch.steps["observation/frame"], expected.steps["observation/frame"])


def test_wrappers_save_what_they_wrap() -> None:
    env = DeviceEnv(SlowEnv(CountingEnv(2, 7), 0.0), "cpu")
    env.reset()
    env.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
    other = DeviceEnv(SlowEnv(CountingEnv(2, 0), 0.0), "cpu")
    other.load_state_dict(env.state_dict() or {})
    (reached, _), _ = other.step(DictTensor({"action": torch.zeros(2, dtype=torch.int64)}))
    assert reached["frame"].tolist() == [[7, 0, 2], [8, 0, 2]]


def test_a_batch_under_way_cannot_be_saved() -> None:
    with create_batcher() as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(BatcherStateError, match=r"state_dict: a batch is being collected\. Call get\(\) first"):
            batcher.state_dict()
        with pytest.raises(BatcherStateError, match=r"load_state_dict: a batch is being collected"):
            batcher.load_state_dict({})


def test_a_foreign_state_is_refused_with_the_reason() -> None:
    with create_batcher() as batcher:
        batcher.reset()
        state = batcher.state_dict()
    with create_batcher(n_envs=3) as other:
        with pytest.raises(KeyError, match=r"load_state_dict: the state has no \['begun', .*only \['model'\]"):
            other.load_state_dict({"model": {}})
        with pytest.raises(ValueError, match=r"comes from 0 collecting processes, expected 1\..* same n_processes"):
            other.load_state_dict({**state, "collectors": []})
        with pytest.raises(WorkerError, match=r"comes from 4 environments per process, expected 3") as caught:
            other.load_state_dict(state)
    assert caught.value.phase == "loading a checkpoint"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "Acrobot-v1",
            r"Acrobot cannot continue .*'state/theta.* is missing.*'state/x_dot'",
        ),
        ("counting", r"CountingEnv cannot continue .*no key 'number' among"),
    ],
)
def test_the_state_of_other_environments_is_refused_with_the_reason(name: str, words: str) -> None:
    def create_env(n_envs: int, seed: int) -> Any:
        return CountingEnv(n_envs, seed) if name == "counting" else make(name, n_envs, seed)

    with create_batcher() as batcher:
        batcher.reset()
        state = batcher.state_dict()
    with create_batcher(create_env) as other, pytest.raises(WorkerError, match=words) as caught:
        other.load_state_dict(state)
    assert "raised in loading a checkpoint, environments 0 to 3, seed 5" in str(caught.value)
    assert "Create the batcher with the same create_env and env_args as the saved one" in str(caught.value)


def test_an_environment_that_cannot_be_saved_cannot_be_loaded() -> None:
    env = create_cartpole(n_envs=1, seed=0)
    assert env.state_dict() is None
    with pytest.raises(
        NotImplementedError, match=r"GymEnv.*load_state_dict: these environments cannot be saved.*reset"
    ):
        env.load_state_dict({})
