"""JaxEnv over gymnax's CartPole: shared memory, true final observations, the same numbers as gymnax alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlstruct import DictTensor
from rlstruct.adapters import JaxEnv
from rlstruct.testing import check_vec_env

jax = pytest.importorskip("jax")
gymnax = pytest.importorskip("gymnax", exc_type=ImportError)


def make(n_envs: int = 6, seed: int = 0) -> JaxEnv:
    env, parameters = gymnax.make("CartPole-v1")
    return JaxEnv(env, n_envs, seed, parameters.replace(max_steps_in_episode=25))


def test_the_contract_holds() -> None:
    check_vec_env(make, n_steps=60, env_args={"n_envs": 3}, check_bounds=False)


def test_memory_is_shared_both_ways() -> None:
    env = make()
    frames = jax.numpy.arange(6.0)
    assert env._shared(frames)["frame"].data_ptr() == frames.unsafe_buffer_pointer()
    # JAX takes aligned memory as it is; ours comes from torch's allocator, 64 bytes aligned.
    action = torch.ones(6, dtype=torch.int32)
    assert env._to_jax(action).unsafe_buffer_pointer() == action.data_ptr()


def test_steps_equal_gymnax_and_environments_do_not_depend_on_their_batch() -> None:
    env, parameters = gymnax.make("CartPole-v1")
    ours = make()
    few = make(n_envs=2, seed=3)
    observation = ours.reset()[0]
    shown = few.reset()[0]
    n_ends = 0
    for t in range(60):
        assert torch.equal(shown["frame"], observation["frame"][3:5])
        before = ours._state
        drawn = torch.from_numpy(np.random.default_rng(t).integers(0, 2, 6))
        (reached, _), (observation, _) = ours.step(DictTensor({"action": drawn}))
        shown = few.step(DictTensor({"action": drawn[3:5]}))[1][0]
        for j in range(6):
            state = jax.tree.map(lambda leaf, j=j: leaf[j], before)
            frame, after, reward, terminated, _ = env.step_env(
                jax.random.key(0), state, int(drawn[j]), parameters.replace(max_steps_in_episode=25)
            )
            np.testing.assert_allclose(reached["frame"][j].numpy(), np.asarray(frame), rtol=1e-5, atol=1e-6)
            assert bool(reached["terminated"][j]) == bool(terminated)
            assert bool(reached["truncated"][j]) == (int(after.time) >= 25 and not bool(terminated))
            assert float(reached["reward"][j]) == float(reward)
        n_ends += int(reached["done"].sum())
    assert n_ends > 6
