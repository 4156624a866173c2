from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fake_envs import counting_length, create_counting_env, create_failing_env, create_slow_env

from rlstruct import BatcherStateError, WorkerError
from rlstruct.agents import ActorCritic, ActorCriticAgent, QAgent, QNetwork
from rlstruct.algos import A2CConfig, DQNConfig, a2c, dqn
from rlstruct.algos.training.build import create_batchers
from rlstruct.algos.training.evaluation import Evaluation, Evaluator
from rlstruct.batchers import RL_Batcher, collect_episodes
from rlstruct.sims import make

MODEL = ActorCritic(3, 2)
SEED, N_ENVS = 2, 4


def make_batcher(
    n_timesteps: int = 10,
    *,
    create_env: Callable[..., Any] = create_counting_env,
    n_processes: int = 0,
    **settings: Any,
) -> RL_Batcher:
    env_args = {"n_envs": N_ENVS // max(1, n_processes), **settings}
    return RL_Batcher(
        n_timesteps,
        ActorCriticAgent,
        create_env,
        agent_args={"model": MODEL},
        env_args=env_args,
        n_processes=n_processes,
        seed=SEED,
    )


def expected_lengths(episode: int) -> tuple[int, ...]:
    return tuple(counting_length(SEED + j, episode) for j in range(N_ENVS))


def triangle(n: int) -> float:
    """Return CountingEnv's reward for n steps: 1 + 2 + … + n."""
    return n * (n + 1) / 2


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("n_timesteps", [1, 2, 5, 10])
def test_every_environment_counts_with_its_first_whole_episode(n_timesteps: int, auto_reset: bool) -> None:
    with make_batcher(n_timesteps, auto_reset=auto_reset) as batcher:
        evaluator = Evaluator(batcher)
        evaluator.start(MODEL.state_dict(), env_steps=70, policy_version=7)
        result = evaluator.wait()
    assert result.lengths == expected_lengths(0)
    assert result.returns == tuple(triangle(n) for n in expected_lengths(0))
    assert (result.env_steps, result.policy_version) == (70, 7)


def test_the_next_evaluation_plays_fresh_episodes() -> None:
    with make_batcher() as batcher:
        evaluator = Evaluator(batcher)
        for episode in range(3):
            evaluator.start(MODEL.state_dict(), env_steps=0, policy_version=0)
            assert evaluator.wait().lengths == expected_lengths(episode)


def test_sampling_evaluations_get_the_settings_of_the_end_of_the_training() -> None:
    small = {"n_envs": 2, "n_processes": 0, "n_env_steps": 16, "n_timesteps": 8, "evaluation_processes": 0}
    config = DQNConfig(
        **small, evaluation_episodes=20, evaluation_stochastic=True, final_epsilon=1.0, learning_starts=16
    )
    create_env = partial(make, "CartPole-v1")
    sampled = dqn.train(config, lambda: QNetwork(4, 2), QAgent, create_env).before
    best = dqn.train(replace(config, evaluation_stochastic=False), lambda: QNetwork(4, 2), QAgent, create_env).before
    assert 15 < sampled.mean_length < 35  # as random actions do
    assert not 15 < best.mean_length < 35  # this untrained network falls at once, or balances for long


def test_means_and_deviations_by_hand() -> None:
    result = Evaluation(0, 0, returns=(1.0, 3.0, 8.0), lengths=(1, 2, 6), seconds=0.5)
    assert result.mean_return == 4.0
    assert result.std_return == pytest.approx(((9 + 1 + 16) / 3) ** 0.5)
    assert result.mean_length == 3.0


def test_an_evaluation_in_a_process_of_its_own_does_not_hold_up_the_caller() -> None:
    with make_batcher(create_env=create_slow_env, n_processes=1, seconds=0.05) as batcher:
        evaluator = Evaluator(batcher)
        assert evaluator.poll() is None
        evaluator.start(MODEL.state_dict(), env_steps=0, policy_version=0)
        assert evaluator.busy
        assert evaluator.poll() is None  # the longest episode takes 0.3 s at least
        with pytest.raises(BatcherStateError, match=r"Evaluator.start: an evaluation is running"):
            evaluator.start(MODEL.state_dict(), env_steps=0, policy_version=0)
        assert evaluator.wait().lengths == expected_lengths(0)
        assert not evaluator.busy


def test_waiting_for_nothing_is_an_error() -> None:
    with make_batcher() as batcher, pytest.raises(BatcherStateError, match=r"Call start\(\) first"):
        Evaluator(batcher).wait()


def create_that_stops(n_envs: int, seed: int) -> Any:
    failure = StopIteration("no data left")
    return create_failing_env(n_envs, seed, auto_reset=True, failure=failure, step=3, failing_seed=seed)


def evaluate(n_processes: int) -> object:
    with make_batcher(create_env=create_that_stops, n_processes=n_processes) as batcher:
        evaluator = Evaluator(batcher)
        evaluator.start(MODEL.state_dict(), env_steps=0, policy_version=0)
        return evaluator.wait()


def collect(n_processes: int) -> object:
    with make_batcher(create_env=create_that_stops, n_processes=n_processes) as batcher:
        return collect_episodes(batcher, 3)


def train(n_processes: int) -> object:
    config = a2c.A2CConfig(n_envs=2, n_timesteps=5, n_processes=n_processes, evaluation_processes=n_processes)
    return a2c.train(config, lambda: ActorCritic(3, 2), ActorCriticAgent, create_that_stops)


@pytest.mark.parametrize("n_processes", [0, 1])
@pytest.mark.parametrize("call", [evaluate, collect, train])
def test_a_stop_iteration_in_an_environment_ends_no_loop(call: Callable[[int], object], n_processes: int) -> None:
    with pytest.raises(WorkerError, match="StopIteration: no data left"):
        list(map(call, [n_processes] * 2))  # which a StopIteration would end as if there were nothing more to do


def test_a_training_begins_after_random_steps_and_its_evaluation_does_not() -> None:
    def first(initial_steps: int) -> list[torch.Tensor]:
        config = A2CConfig(n_envs=8, n_timesteps=1, evaluation_episodes=8, evaluation_timesteps=1,
                           evaluation_processes=0, initial_steps=initial_steps)  # fmt: skip
        create_env = partial(make, "CartPole-v1")
        seen = []
        for create in create_batchers(config, ActorCriticAgent, create_env, {}, ActorCritic(4, 2), 0):
            with create() as batcher:
                batcher.reset()
                batcher.execute()
                seen.append(batcher.get()[0].steps["observation/frame"][:, 0])
        return seen

    (moved, evaluated), (start, same) = first(9), first(0)
    assert start.abs().max() <= 0.05  # CartPole begins within these bounds
    assert (moved.abs().amax(1) > 0.05).sum() >= 5
    assert torch.equal(evaluated, same)
