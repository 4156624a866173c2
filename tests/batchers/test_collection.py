"""Batches against a slow plain-Python account of the same environments, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batcher_fakes import GlobalRandomAgent, InfoAgent, SumOfHistoryAgent, create_next_step, steps_of
from fake_agents import FixedAgent, RngAgent, StatefulAgent
from fake_envs import CountingEnv, create_counting_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstruct import DictTensor, Trajectories
from rlstruct.batchers import RL_Batcher
from rlstruct.batchers.rollout_buffer import RolloutBuffer
from rlstruct.functional.random import step_keys


def collect(batcher: RL_Batcher, n: int) -> list[Trajectories]:
    batches = []
    for _ in range(n):
        batcher.execute()
        batches.append(batcher.get()[0])
    return batches


class Recorded(RolloutBuffer):
    """The memory that a batcher of this process writes into."""

    latest: RolloutBuffer

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        Recorded.latest = self


@pytest.fixture(autouse=True, scope="module")
def _recorded() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlstruct.batchers.collector.RolloutBuffer", Recorded)
        yield


def poison() -> None:
    """Fill the memory that the batcher writes into with rubbish, but for the observation that comes next."""
    for name, tensor in Recorded.latest.tensors.items():
        written = tensor[:-1] if name.startswith("stream/") else tensor
        written.fill_(True if tensor.dtype is torch.bool else 77)


lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(lengths=lengths, B=st.integers(1, 4), T=st.integers(1, 9), n=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_auto_reset_batches_continue_exactly(lengths: list[int], B: int, T: int, n: int, seed: int) -> None:
    env_args = {"n_envs": B, "auto_reset": True, "lengths": lengths}
    with RL_Batcher(T, RngAgent, create_counting_env, env_args=env_args, seed=seed) as batcher:
        batcher.reset()
        batches = collect(batcher, 1)
        for _ in range(n - 1):
            poison()
            batches += collect(batcher, 1)
    for b in range(B):
        truth = steps_of(seed + b, n * T, lengths)
        for i, batch in enumerate(batches):
            steps = batch.steps
            for t in range(T):
                before, after, done = truth[i * T + t]
                assert tuple(steps["observation/frame"][b, t].tolist()) == before
                assert tuple(steps["_observation/frame"][b, t].tolist()) == after
                assert steps["_observation/done"][b, t] == done
                assert steps["_observation/reward"][b, t] == after[2]
                assert steps["_observation/last_action"][b, t] == steps["action/action"][b, t]
                assert steps["observation/initial_state"][b, t] == (before[2] == 0)
                assert not steps["_observation/initial_state"][b, t]
            assert batch.info["step"][b] == i * T


@given(lengths=lengths, B=st.integers(1, 4), T=st.integers(1, 9), seed=st.integers(0, 9))
@settings(max_examples=40)
def test_episodes_are_whole_and_padding_is_zero(lengths: list[int], B: int, T: int, seed: int) -> None:
    env_args = {"n_envs": B, "lengths": lengths}
    long = {b: lengths[(seed + b) % len(lengths)] for b in range(B)}
    with RL_Batcher(T, StatefulAgent, create_counting_env, env_args=env_args, seed=seed) as batcher:
        batcher.reset()
        start, n_running = 0, B
        while n_running:
            if start:
                poison()
            batcher.execute()
            batch, n_running = batcher.get()
            steps = batch.steps
            rows = [b for b in range(B) if long[b] > start]
            expected = [min(T, long[b] - start) for b in rows]
            assert batch.info["environment"].tolist() == rows
            assert steps.lengths.tolist() == expected
            assert steps.n_steps() == max(expected)
            assert n_running == sum(long[b] > start + T for b in range(B))
            for row, b in enumerate(rows):
                real = expected[row]
                counts = torch.arange(start, start + real)
                assert torch.equal(steps["observation/frame"][row, :real, 2], counts)
                assert torch.equal(steps["_observation/frame"][row, :real, 2], counts + 1)
                assert torch.equal(steps["action/steps"][row, :real], counts)
                for key, value in steps.items():
                    # The two observation keys share memory, so the final observation follows the last step once more.
                    padding = value[row, real + key.startswith("observation/") :]
                    assert not padding.any(), key
                if real < steps.n_steps():
                    assert steps["observation/frame"][row, real].tolist() == [seed + b, 0, long[b]]
            start += T


def test_rng_is_the_hash_of_seed_reset_and_step() -> None:
    env_args = {"n_envs": 3, "auto_reset": True}
    with RL_Batcher(4, RngAgent, create_counting_env, env_args=env_args, seed=5) as batcher:
        for episode in range(2):
            batcher.reset()
            for i, batch in enumerate(collect(batcher, 2)):
                keys = step_keys(torch.arange(5, 8), episode, torch.arange(4 * i, 4 * i + 5)).T
                assert torch.equal(batch.steps["observation/rng"], keys[:, :4])
                assert torch.equal(batch.steps["_observation/rng"], keys[:, 1:])


@pytest.mark.parametrize("n_processes", [0, 1])
def test_what_was_handed_over_never_changes_and_never_aliases_the_infos(n_processes: int) -> None:
    kind: dict[str, Any] = {"env_args": {"n_envs": 3, "auto_reset": True}, "n_processes": n_processes, "seed": 1}
    info = DictTensor({"epsilon": torch.tensor([0.5])})
    with RL_Batcher(6, RngAgent, create_counting_env, agent_info=info, **kind) as batcher:
        batcher.reset()
        first = collect(batcher, 1)[0]
        copy = first.clone()
        collect(batcher, 3)
        for key, value in first.steps.items():
            assert torch.equal(value, copy.steps[key]), key
        first.info["agent_info/epsilon"].zero_()
        first.steps["observation/frame"].zero_()
        again = collect(batcher, 1)[0]
        assert again.info["agent_info/epsilon"].tolist() == [0.5] * 3
        assert again.steps["observation/frame"][:, 0, 0].tolist() == [1, 2, 3]
    assert info["epsilon"].tolist() == [0.5]


def test_one_copy_of_the_frames_where_nothing_restarted() -> None:
    for auto_reset, long in ((False, (9,)), (True, (9,)), (False, (2, 9))):
        env_args = {"n_envs": 2, "auto_reset": auto_reset, "lengths": long}
        with RL_Batcher(5, RngAgent, create_counting_env, env_args=env_args, seed=0) as batcher:
            batcher.reset()
            steps = collect(batcher, 1)[0].steps
            frames = steps["observation/frame"]
            assert frames.untyped_storage().data_ptr() == steps["_observation/frame"].untyped_storage().data_ptr()
            assert frames.untyped_storage().nbytes() == 2 * (5 + 1) * 3 * 8


def test_rows_of_a_vector_environment_without_its_dead_steps() -> None:
    # Row b: b + 1 steps, then one that only restarts it. 3 batches of 5 steps; a dead step may begin a batch.
    with RL_Batcher(5, FixedAgent, create_next_step, env_args={"n_envs": 3}, seed=0) as batcher:
        batcher.reset()
        batches = collect(batcher, 3)
    for b in range(3):
        seen = []
        for batch in batches:
            steps, real = batch.steps, int(batch.lengths[b])
            for t in range(real):
                before = steps["observation/frame"][b, t].tolist()
                after = steps["_observation/frame"][b, t].tolist()
                assert after == [before[0], before[1], before[2] + 1]
                assert steps["_observation/done"][b, t] == (after[2] == b + 1)
                assert steps["_observation/reward"][b, t] == after[2]
                seen.append((before[1], before[2]))
            assert not steps["_observation/frame"][b, real:].any()
        alive = [k for k in range(15) if (k + 1) % (b + 2)]
        assert seen == [(k // (b + 2), k % (b + 2)) for k in alive]


def test_an_episodic_batch_takes_no_step_after_its_longest_episode() -> None:
    class Stepped(CountingEnv):
        n_steps = 0

        def step(self, action: DictTensor) -> Any:
            Stepped.n_steps += 1
            return super().step(action)

    with RL_Batcher(40, RngAgent, Stepped, env_args={"n_envs": 2, "lengths": [2, 5]}, seed=0) as batcher:
        batcher.reset()
        assert collect(batcher, 1)[0].lengths.tolist() == [2, 5]
    assert Stepped.n_steps == 5


def test_history_is_what_the_batch_holds_before() -> None:
    for create_env, auto_reset in ((create_counting_env, True), (create_counting_env, False), (create_next_step, None)):
        env_args = {"n_envs": 3} | ({} if auto_reset is None else {"auto_reset": auto_reset})
        with RL_Batcher(6, SumOfHistoryAgent, create_env, env_args=env_args, seed=0) as batcher:
            batcher.reset()
            for batch in collect(batcher, 1 if auto_reset is False else 2):
                steps = batch.steps
                before = steps["observation/frame"].sum(2).cumsum(1)
                after = steps["_observation/frame"].sum(2).cumsum(1)
                for b, real in enumerate(batch.lengths.tolist()):
                    assert steps["action/steps"][b, :real].tolist() == list(range(real))
                    assert steps["action/before"][b, 1:real].tolist() == before[b, : real - 1].tolist()
                    assert steps["action/after"][b, 1:real].tolist() == after[b, : real - 1].tolist()


def test_infos_reach_agent_and_trajectories() -> None:
    env_args = {"n_envs": 3, "auto_reset": True}
    with RL_Batcher(2, InfoAgent, create_counting_env, env_args=env_args, seed=0) as batcher:
        batcher.reset(agent_info=DictTensor({"e": torch.tensor([1.0, 2.0, 3.0])}))
        first, second = collect(batcher, 2)
        assert first.steps["action/seen_e"].tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert second.info["agent_info/e"].tolist() == [1.0, 2.0, 3.0]
        batcher.execute(agent_info=DictTensor({"e": torch.tensor([9.0])}))
        batch = batcher.get()[0]
        assert batch.steps["action/seen_e"].tolist() == [[9.0, 9.0]] * 3
        assert batch.info["agent_info/e"].tolist() == [9.0] * 3


def test_env_info_reaches_reset_and_its_row() -> None:
    with RL_Batcher(9, RngAgent, create_counting_env, env_args={"n_envs": 2}, seed=0) as batcher:
        batcher.reset(env_info=DictTensor({"length": torch.tensor([2, 5])}))
        batch = collect(batcher, 1)[0]
        assert batch.lengths.tolist() == [2, 5]
        assert batch.info["env_info/length"].tolist() == [2, 5]


def test_infos_of_the_constructor_are_those_of_every_reset_without_others() -> None:
    infos = {
        "agent_info": DictTensor({"e": torch.tensor([1.0, 2.0])}),
        "env_info": DictTensor({"length": torch.tensor([3])}),  # one row, for both environments
    }
    with RL_Batcher(9, InfoAgent, create_counting_env, env_args={"n_envs": 2}, seed=0, **infos) as batcher:
        for other, length in ((None, [3, 3]), (DictTensor({"length": torch.tensor([2, 5])}), [2, 5]), (None, [3, 3])):
            batcher.reset(env_info=other)
            batch = collect(batcher, 1)[0]
            assert batch.lengths.tolist() == batch.info["env_info/length"].tolist() == length
            assert batch.steps["action/seen_e"][:, 0].tolist() == batch.info["agent_info/e"].tolist() == [1.0, 2.0]


def test_agents_that_draw_from_torch_repeat_with_the_same_seed_and_layout() -> None:
    def actions(agent_seeds: list[int] | None) -> list[list[int]]:
        env_args = {"n_envs": 4, "auto_reset": True}
        with RL_Batcher(
            20, GlobalRandomAgent, create_counting_env, env_args=env_args, seed=3, agent_seeds=agent_seeds
        ) as batcher:
            batcher.reset()
            return collect(batcher, 1)[0].steps["action/action"].tolist()

    assert actions(None) == actions(None)
    assert actions([7]) != actions(None)
