"""Exactly N whole episodes, without bias to short ones, and what each of them was worth."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from batcher_fakes import create_cartpole, create_next_step, next_batch, steps_of
from fake_agents import RngAgent
from fake_envs import counting_length, create_counting_env
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstruct import DeviceEnv, DictTensor, VecEnv, replay_agent
from rlstruct.agents import RandomAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.batchers import EpisodeStatistics, RL_Batcher, collect_episodes
from rlstruct.envs import GymEnv, GymEnvInf
from rlstruct.functional.returns import reward_to_go
from rlstruct.functional.statistics import masked_mean
from rlstruct.testing import forbid_host_sync

lengths = st.lists(st.integers(1, 7), min_size=1, max_size=4)


@given(n=st.integers(1, 9), B=st.integers(1, 4), T=st.integers(1, 9), lengths=lengths, auto_reset=st.booleans())
@settings(max_examples=40)
def test_exactly_n_episodes_each_as_long_as_it_is(n: int, B: int, T: int, lengths: list[int], auto_reset: bool) -> None:
    env_args = {"n_envs": B, "auto_reset": auto_reset, "lengths": lengths}
    with RL_Batcher(T, RngAgent, create_counting_env, env_args=env_args, seed=3) as batcher:
        found = collect_episodes(batcher, n)
    expected = [(b, e) for b in range(B) for e in range(n // B + (b < n % B))]
    assert found.n_elems() == n
    assert list(zip(found.info["environment"].tolist(), found.info["episode"].tolist(), strict=True)) == expected
    steps = found.steps
    for row, (b, e) in enumerate(expected):
        long = counting_length(3 + b, e, lengths)
        assert found.lengths[row] == long
        assert steps["observation/frame"][row, :long].tolist() == [[3 + b, e, k] for k in range(long)]
        assert steps["_observation/frame"][row, :long, 2].tolist() == list(range(1, long + 1))
        assert steps["_observation/done"][row, :long].tolist() == [False] * (long - 1) + [True]
        assert not steps["_observation/frame"][row, long:].any()
        first_step = sum(counting_length(3 + b, i, lengths) for i in range(e)) if auto_reset else 0
        assert found.info["step"][row] == first_step
    assert steps.n_steps() == int(found.lengths.max())


@pytest.mark.parametrize("auto_reset", [False, True])
def test_episodes_of_an_agent_with_a_memory_can_be_replayed(auto_reset: bool) -> None:
    torch.manual_seed(0)
    agent_args = {"model": RecurrentActorCritic(3, 2), "stochastic": True}
    env_args = {"n_envs": 3, "auto_reset": auto_reset, "lengths": [2, 5, 9]}
    with RL_Batcher(4, RecurrentAgent, create_counting_env, agent_args=agent_args, env_args=env_args) as batcher:
        found = collect_episodes(batcher, 7)
    replayed, mask = replay_agent(RecurrentAgent(**agent_args), found), found.mask()
    torch.testing.assert_close(replayed["value"][mask], found.steps["action/value"][mask])


@pytest.mark.parametrize("auto_reset", [False, True])
def test_an_episode_that_was_lost_with_its_worker_is_not_joined_with_the_next(auto_reset: bool) -> None:
    class Restarted(RL_Batcher):
        """Begins new episodes before its third batch, as a worker does that failed and was started again."""

        n_executed = 0

        def execute(self, agent_info: DictTensor | None = None) -> None:
            self.n_executed += 1
            if self.n_executed == 3:
                self.reset()
            super().execute(agent_info)

    env_args = {"n_envs": 1, "auto_reset": auto_reset, "lengths": [10]}
    with Restarted(3, RngAgent, create_counting_env, env_args=env_args, seed=0) as batcher:
        found = collect_episodes(batcher, 1)
    assert found.lengths.tolist() == [10]
    assert found.info["step"].tolist() == [0]
    assert found.steps["observation/frame"][0].tolist() == [[0, 1, k] for k in range(10)]


@pytest.mark.parametrize("step_limit", [11, 12])
@pytest.mark.parametrize("auto_reset", [False, True])
def test_an_episode_that_never_ends_is_refused_at_the_limit(auto_reset: bool, step_limit: int) -> None:
    env_args = {"n_envs": 2, "auto_reset": auto_reset, "lengths": [3, 10**6]}  # of environments 0 and 1
    with RL_Batcher(4, RngAgent, create_counting_env, env_args=env_args, seed=0) as batcher:
        found = collect_episodes(batcher, 1, step_limit=3)  # environment 1 need not end
    assert found.lengths.tolist() == [3]
    with (
        RL_Batcher(4, RngAgent, create_counting_env, env_args=env_args, seed=0) as batcher,
        pytest.raises(RuntimeError, match=rf"environments \[1\] had not ended .* 12 steps.* step_limit = {step_limit}"),
    ):
        collect_episodes(batcher, 2, step_limit=step_limit)


class CoinEnv(gymnasium.Env[Any, Any]):
    """Tosses a coin whether an episode takes 1 step or 100; each is rewarded with 1."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 100 if self.np_random.random() < 0.5 else 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, self.left == 0, False, {}


def create_coins(n_envs: int, seed: int, auto_reset: bool) -> VecEnv:
    return (GymEnvInf if auto_reset else GymEnv)([CoinEnv() for _ in range(n_envs)], seed)


@pytest.mark.parametrize("n", [200, 16])  # of 32 environments, the first 16 episodes to end are short, all of them
@pytest.mark.parametrize("auto_reset", [False, True])
def test_long_episodes_are_found_in_their_true_proportion(auto_reset: bool, n: int) -> None:
    env_args = {"n_envs": 32, "auto_reset": auto_reset}
    with RL_Batcher(50, RngAgent, create_coins, env_args=env_args, seed=0) as batcher:
        found = collect_episodes(batcher, n)
    long = (found.lengths == 100).double().mean().item()
    mean_return = found.steps["_observation/reward"].sum(1).double().mean().item()
    # A return is 1 or 100, each with probability 1/2: 50.5 on average, with deviation 49.5.
    assert abs(long - 0.5) < 3 * 0.5 / n**0.5
    assert abs(mean_return - 50.5) < 3 * 49.5 / n**0.5


def test_a_batch_in_which_all_rows_restart_has_no_real_step() -> None:
    with RL_Batcher(1, RngAgent, create_next_step, env_args={"n_envs": 1}, seed=0) as batcher:  # episodes of one step
        batcher.reset()
        statistics, seen = EpisodeStatistics(1), []
        for _ in range(4):
            batch = next_batch(batcher)
            assert batch.steps.n_steps() == 1
            seen.append((batch.lengths.tolist(), statistics.add(batch)["length"].tolist()))
    assert seen == [([1], [1]), ([0], []), ([1], [1]), ([0], [])]


@pytest.mark.parametrize("T", [1, 2, 7, 50])
def test_steps_that_a_vector_environment_spends_on_restarts_are_not_counted(T: int) -> None:
    with RL_Batcher(T, RngAgent, create_next_step, env_args={"n_envs": 2}, seed=0) as batcher:
        found = collect_episodes(batcher, 8)
    assert found.lengths.tolist() == [1] * 4 + [2] * 4
    assert found.info["step"].tolist() == [0, 1, 2, 3, 0, 2, 4, 6]


def test_no_episode_is_no_number() -> None:
    batcher = RL_Batcher(2, RngAgent, create_counting_env, env_args={"n_envs": 1})
    with pytest.raises(ValueError, match="n is 0, expected at least 1 episode"):
        collect_episodes(batcher, 0)


@given(B=st.integers(1, 4), T=st.integers(1, 9), n=st.integers(1, 5), lengths=lengths)
@settings(max_examples=40)
def test_statistics_equal_a_count_in_the_environment(B: int, T: int, n: int, lengths: list[int]) -> None:
    env_args = {"n_envs": B, "auto_reset": True, "lengths": lengths}
    found: list[list[tuple[float, int]]] = [[] for _ in range(B)]
    statistics = EpisodeStatistics(B)
    with RL_Batcher(T, RngAgent, create_counting_env, env_args=env_args, seed=2) as batcher:
        batcher.reset()
        for _ in range(n):
            batcher.execute()
            ended = statistics.add(batcher.get()[0])
            for b, value, length in zip(
                ended["environment"].tolist(), ended["return"].tolist(), ended["length"].tolist(), strict=True
            ):
                found[b].append((value, length))
    for b in range(B):
        # Step k of an episode is rewarded with k.
        ends = [after[2] for _, after, done in steps_of(2 + b, n * T, lengths) if done]
        assert found[b] == [(k * (k + 1) / 2, k) for k in ends]


def test_statistics_of_a_thousand_episodes_of_cartpole() -> None:
    with RL_Batcher(
        100,
        RandomAgent,
        create_cartpole,
        agent_args={"action_space": create_cartpole(1, 0).action_space},
        env_args={"n_envs": 16, "longest": 30},
        seed=0,
    ) as batcher:
        batcher.reset()
        statistics, ended, seen = EpisodeStatistics(16), [], []
        while sum(part.n_elems() for part in ended) < 1000:
            batch = next_batch(batcher)
            ended.append(statistics.add(batch))
            seen.append(batch.steps)
    episodes = DictTensor.cat(ended)
    assert torch.equal(episodes["return"].long(), episodes["length"])  # one point per step
    assert int(episodes["length"].max()) <= 30
    assert torch.equal(episodes["length"][~episodes["terminated"]].unique(), torch.tensor([30]))
    done = torch.cat([steps["_observation/done"] for steps in seen], dim=1)
    for b in range(16):
        ends = done[b].nonzero().squeeze(1)
        truth = torch.diff(ends, prepend=torch.tensor([-1]))
        assert torch.equal(episodes["length"][episodes["environment"] == b], truth)


def create_moved(n_envs: int, seed: int, auto_reset: bool, device: str) -> DeviceEnv:
    return DeviceEnv(create_counting_env(n_envs, seed, auto_reset=auto_reset), device)


@pytest.mark.parametrize(
    ("auto_reset", "n_processes", "device"),
    [(True, 0, "cpu"), (False, 0, "cpu"), (True, 2, "cpu"), (True, 0, "sim:0"), (False, 0, "sim:0")],
)
def test_statistics_of_a_thousand_episodes_in_every_mode(auto_reset: bool, n_processes: int, device: str) -> None:
    B, n, start = 64, 1000, 7
    statistics = EpisodeStatistics(B, device)
    found: list[list[tuple[int, float, int]]] = [[] for _ in range(B)]
    with RL_Batcher(
        100,
        RngAgent,
        create_moved,
        env_args={"n_envs": B // max(1, n_processes), "auto_reset": auto_reset, "device": device},
        n_processes=n_processes,
        seed=start,
        device=device,
    ) as batcher:
        n_running: int | None = 0
        while sum(map(len, found)) < n:
            if not n_running:
                batcher.reset()
            batcher.execute()
            batch, n_running = batcher.get()
            ended = statistics.add(batch)
            columns = [ended[key].tolist() for key in ("environment", "return", "length", "terminated")]
            for b, *facts in zip(*columns, strict=True):
                found[b].append(tuple(facts))
    for b, episodes in enumerate(found):
        lengths = [counting_length(start + b, e) for e in range(len(episodes))]
        # Step k is rewarded with k; environment + episode decides how it ends.
        assert episodes == [(k * (k + 1) / 2, k, (start + b + e) % 2 == 0) for e, k in enumerate(lengths)]


def test_whole_episodes_packed_and_averaged() -> None:
    # Environments 0 and 1 play 3, 1 and 1, 4 steps; step k is rewarded with k.
    with RL_Batcher(4, RngAgent, create_counting_env, env_args={"n_envs": 2, "auto_reset": True}, seed=0) as batcher:
        found = collect_episodes(batcher, 4)
    reward, mask = found.steps["_observation/reward"], found.mask()
    assert found.lengths.tolist() == [3, 1, 1, 4]
    assert masked_mean(reward, mask).item() == pytest.approx((6 + 1 + 1 + 10) / 9)
    assert reward_to_go(reward, mask.float(), 1.0)[:, 0].tolist() == [6, 1, 1, 10]
    packed = found.transitions()
    assert packed["_observation/reward"].tolist() == [1, 2, 3, 1, 1, 1, 2, 3, 4]
    steps = {key: value for key, value in packed.items() if key in found.steps}
    true_bytes = sum(9 * value[0, 0].nbytes for value in found.steps.values())
    assert sum(value.untyped_storage().nbytes() for value in steps.values()) <= 1.05 * true_bytes


def test_a_reset_begins_the_count_anew() -> None:
    statistics = EpisodeStatistics(1)
    with RL_Batcher(3, RngAgent, create_counting_env, env_args={"n_envs": 1, "lengths": [5]}, seed=0) as batcher:
        for n in (1, 2):
            batcher.reset()
            ended = []
            for _ in range(n):
                batcher.execute()
                ended.append(statistics.add(batcher.get()[0])["length"].tolist())
        assert ended == [[], [5]]


def test_tracking_never_waits_and_goes_on_after_a_checkpoint() -> None:
    env_args = {"n_envs": 3, "auto_reset": True}
    statistics, other, returns = EpisodeStatistics(3), EpisodeStatistics(3), []
    assert statistics.mean_return() is None
    with RL_Batcher(4, RngAgent, create_counting_env, env_args=env_args, seed=0) as batcher:
        batcher.reset()
        for _ in range(10):
            batch = next_batch(batcher)
            ended = batch.steps["_observation/frame"][..., 2][batch.steps["_observation/done"]].tolist()
            returns += [n * (n + 1) / 2 for n in ended]  # 1 + 2 + … + n
            with forbid_host_sync():
                counted = statistics.track(batch)
            assert counted["return"][counted["ended"]].tolist() == [n * (n + 1) / 2 for n in ended]
            other.load_state_dict(statistics.state_dict())
            statistics, other = other, EpisodeStatistics(3)
    assert statistics.mean_return() == pytest.approx(sum(returns) / len(returns))
    assert statistics.mean_return() is None


def test_an_episode_that_a_reset_cut_short_counts_for_nobody() -> None:
    statistics = EpisodeStatistics(1)
    with RL_Batcher(3, RngAgent, create_counting_env, env_args={"n_envs": 1, "lengths": [5]}, seed=0) as batcher:
        for n in (1, 2):
            batcher.reset()
            for _ in range(n):
                batcher.execute()
                statistics.track(batcher.get()[0])
    assert statistics.mean_return() == 15.0  # of the second episode; the 6 of the first were cut off
