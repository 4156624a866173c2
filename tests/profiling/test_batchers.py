from __future__ import annotations

import os
import pathlib
import time
from dataclasses import replace
from functools import partial

import gymnasium
import pytest
from torch import Tensor

from rlstruct import Trajectories
from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.algos import a2c
from rlstruct.algos.training.loop import run_training
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.profiling import profile, read
from rlstruct.profiling.events import load_recordings


def create_env(n_envs: int, seed: int) -> GymEnvInf:
    return GymEnvInf([gymnasium.make("CartPole-v1") for _ in range(n_envs)], seed)


@pytest.mark.parametrize("n_processes", [0, 2])
def test_the_seconds_of_a_batcher_are_those_of_its_profile(n_processes: int, tmp_path: pathlib.Path) -> None:
    with profile(tmp_path, window=600):
        begun = time.perf_counter()
        with RL_Batcher(
            16,
            ActorCriticAgent,
            create_env,
            agent_args={"model": ActorCritic(n_inputs=4, n_actions=2)},
            env_args={"n_envs": 4},
            n_processes=n_processes,
            seed=0,
        ) as batcher:
            batcher.reset()
            for _ in range(3):
                batcher.execute()
                batcher.get()
            stats = batcher.stats()
        wall = time.perf_counter() - begun
    report = read(tmp_path)
    main, *workers = report.processes
    assert [one.name for one in workers] == [f"rlstruct-worker-{k}" for k in range(n_processes)]
    # Regions add up to the wall time.
    assert main.seconds == pytest.approx(wall, rel=0.01, abs=0.02)
    for process in report.processes:
        assert sum(row.seconds.sum() for row in process.rows) == pytest.approx(process.seconds, rel=1e-6)
    for process, seconds in zip(workers or [main], stats.workers, strict=True):
        # A worker counts its seconds before it sends them: the end of its last copy is in the profile alone.
        for name in ("agent", "environment", "reset", *([] if workers else ["copy"])):
            assert process.inclusive(name, corrected=False) == pytest.approx(seconds[name], rel=0.01), name
        rows = {row.path: row for row in process.rows}
        assert rows["environment",].count == 3 * 16
        assert rows["environment", "simulator"].seconds.reshape(2, 4).sum(0).argmax() == 2
        assert rows["agent",].transitions[0, 1] > 3 * 16  # Python calls torch
    assert main.inclusive("assembly", corrected=False) == pytest.approx(stats.assembly, rel=0.01)
    if workers:
        assert main.inclusive("wait", corrected=False) == pytest.approx(stats.wait, rel=0.01)
        # They share a clock: no worker began before this process or ended after it.
        assert {one.n_windows for one in report.processes} == {1}
        # A server forks the workers, but this process waits for them: its wait is corrected for what they pay.
        assert {one.parent for one in load_recordings(tmp_path) if one.pid != os.getpid()} == {os.getpid()}
        assert sum(row.waited for row in main.rows) > 0.0


def test_workers_are_profiled_whenever_their_server_was_started(tmp_path: pathlib.Path) -> None:
    def collect(n: int) -> None:
        model = {"model": ActorCritic(n_inputs=4, n_actions=2)}
        with RL_Batcher(
            2, ActorCriticAgent, create_env, agent_args=model, env_args={"n_envs": 4}, n_processes=n, seed=0
        ) as batcher:
            batcher.reset()
            batcher.execute()
            batcher.get()

    collect(1)  # starts the server, if no other test has
    with profile(tmp_path, window=600):
        collect(2)
    collect(3)
    assert [one.name for one in read(tmp_path).processes][1:] == ["rlstruct-worker-0", "rlstruct-worker-1"]


class SlowLearner(a2c.A2CLearner):
    """An algorithm whose loss takes its time."""

    def terms(self, batch: Trajectories) -> dict[str, Tensor]:
        time.sleep(0.02)
        return super().terms(batch)


def test_the_terms_of_an_algorithm_are_its_loss(tmp_path: pathlib.Path) -> None:
    config = a2c.A2CConfig(n_env_steps=4 * 2 * 8, n_timesteps=8, n_envs=2, n_processes=0, evaluation_processes=0)
    config = replace(config, evaluation_episodes=1, evaluation_step_limit=10)
    with profile(tmp_path, window=600):
        run_training(SlowLearner, config, partial(ActorCritic, 4, 2), ActorCriticAgent, create_env)
    (main,) = read(tmp_path).processes
    assert main.inclusive("loss", corrected=False) >= 4 * 0.02
