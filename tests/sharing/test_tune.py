"""tune with real batchers: what it measures, what it never starts, and what can be done with its answer."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from fake_agents import FixedAgent, StatefulAgent
from fake_envs import create_counting_env
from gymnasium import spaces

from rlstruct import Trajectories, VecEnv
from rlstruct.batchers import RL_Batcher
from rlstruct.envs import GymEnvInf
from rlstruct.sharing import tune
from rlstruct.sharing.tuning import cache, measuring
from rlstruct.sharing.tuning import tune as tuning
from rlstruct.sharing.tuning.measuring import memory_in_use
from rlstruct.sharing.tuning.search import Candidate, Probe

LINUX = Path("/proc/self/smaps_rollup").exists()


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "TURN", 0.01)
    monkeypatch.setattr(measuring, "ROUND_SECONDS", 0.1)


class Pictures(gymnasium.Env[Any, Any]):
    """Frames of 28 KB; an environment holds a megabyte."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)

    def __init__(self, length: int) -> None:
        self.length = length

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps, self.state = 0, np.ones(2**20, np.uint8)
        return np.ones((84, 84, 4), np.uint8), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.ones((84, 84, 4), np.uint8), 0.0, self.steps == self.length, False, {}


def create_pictures(n_envs: int, seed: int, length: int) -> VecEnv:
    return GymEnvInf([Pictures(length) for _ in range(n_envs)], seed)


def counting(n_envs: int, seed: int) -> VecEnv:
    return create_counting_env(n_envs, seed, auto_reset=True)


quick = partial(tune, StatefulAgent, counting, n_processes=(0,), n_envs=(1, 2), n_timesteps=(2, 8))


def test_the_answer_is_the_arguments_of_a_batcher_and_a_preset(tmp_path: Path) -> None:
    answer = quick()
    with RL_Batcher(**answer, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        batch, _ = batcher.get()
    best = answer.best
    assert (batch.n_elems(), batch.steps.n_steps()) == (best.n_envs, best.n_timesteps)
    measured = [probe for probe in answer.probes if probe.measured]
    assert max(measured, key=lambda probe: probe.score).candidate == best
    assert answer.options == f"--n-processes 0 --n-envs {best.n_envs} --n-timesteps {best.n_timesteps}"
    preset = json.loads(answer.save(tmp_path / "new" / "tuned.json").read_text())
    assert preset == {
        "device": "cpu", "n_timesteps": best.n_timesteps, "n_processes": 0, "sharing": "none",
        "env_args": {"n_envs": best.n_envs},
    }  # fmt: skip
    with RL_Batcher(create_agent=StatefulAgent, create_env=counting, **preset) as batcher:
        assert batcher.n_envs() == best.n_envs
    text = str(answer)
    assert text.count("FASTEST") == 1
    assert f"paste: {answer.options}" in text
    assert "go on" in " ".join(text.split()) or "saturated" in text
    assert max(map(len, text.splitlines())) <= 80
    # What is said of a probe goes on below itself.
    said = [line[56:] for line in text.splitlines()[1:-2]]
    assert " ".join(said).split() == [word for probe in answer.probes for word in _said(probe, best)]


def _said(probe: Probe, best: Candidate) -> list[str]:
    return ["FASTEST"] * (probe.candidate == best) + probe.why.split()


@pytest.mark.skipif(not LINUX, reason="Linux tells what processes take")
@pytest.mark.parametrize("length", [20, 1000])  # a batch of 32 steps may become larger where an environment restarts
def test_memory_is_projected_within_5_percent_and_never_beyond_the_limit(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Batchers and their memory are real. Their speed is not, so that the climb goes on, however busy the machine is.
    monkeypatch.setattr(measuring.Session, "rate", lambda session: 1e6 * session.batcher.n_envs())
    monkeypatch.setattr(measuring, "LONGEST_BATCH", (float("inf"), 0.0))
    limit = memory_in_use(torch.device("cpu")) + 130 * 2**20
    answer = tune(
        FixedAgent, create_pictures, n_processes=(0,), n_envs=(2, 4, 8, 16, 32, 64, 128), n_timesteps=(32,),
        memory_limit=limit, env_args={"length": length},
    )  # fmt: skip
    started = [probe for probe in answer.probes if probe.measured]
    for probe in started:
        assert probe.measured is not None
        assert probe.projected <= limit
        assert probe.measured.memory <= limit
        assert probe.projected == pytest.approx(probe.measured.memory, rel=0.05)
    # An environment has a megabyte, and 32 frames of 28 KB three times over: 35 of them are 130 MB.
    assert [probe.candidate.n_envs for probe in answer.probes] == [2, 4, 8, 16, 32, 64], str(answer)
    assert started == list(answer.probes[:-1]), str(answer)
    assert answer.probes[-1].projected > limit
    assert re.match(r"not started: it would take .* is the limit", answer.probes[-1].why)


def harder(n_envs: int, seed: int, difficulty: object) -> VecEnv:
    return counting(n_envs, seed)


def test_a_saved_answer_holds_the_arguments_of_the_environments(tmp_path: Path) -> None:
    search = partial(tune, StatefulAgent, harder, n_processes=(0,), n_envs=(2,), n_timesteps=(2,))
    preset = json.loads(search(env_args={"difficulty": 3}).save(tmp_path / "tuned.json").read_text())
    assert preset["env_args"] == {"n_envs": 2, "difficulty": 3}
    answer = search(env_args={"difficulty": torch.ones(1)})
    with pytest.raises(TypeError, match=r"env_args\['difficulty'\] is a Tensor, expected a value that JSON can hold"):
        answer.save(tmp_path / "other.json")
    assert not (tmp_path / "other.json").exists()


def test_options_of_workers_do_not_reach_candidates_without_one() -> None:
    answer = quick(n_processes=(0, 1), n_envs=(2,), n_timesteps=(2,), on_worker_error="restart", max_restarts=1)
    assert [probe.candidate.n_processes for probe in answer.probes] == [0, 1]
    assert ("max_restarts" in answer) == (answer.best.n_processes == 1)


def test_workers_are_measured_beside_this_process_and_leave_nothing_behind() -> None:
    before = set(multiprocessing.active_children())
    answer = quick(n_processes=(0, 1), n_envs=(2,), n_timesteps=(8,))
    assert [probe.candidate.n_processes for probe in answer.probes] == [0, 1]
    workers, alone = answer.probes[1].measured, answer.probes[0].measured
    assert workers is not None
    assert alone is not None
    more = workers.memory - alone.memory
    assert 2**20 * LINUX < more < 150 * 2**20  # a worker is forked; what it shares with the server was there before
    assert answer.probes[1].projected == pytest.approx(workers.memory, rel=0.1)
    assert set(multiprocessing.active_children()) <= before


def test_a_training_is_tuned_with_what_learns() -> None:
    made: list[set[int]] = []

    def create_learner() -> Callable[[Trajectories], Mapping[str, torch.Tensor] | None]:
        seen: set[int] = set()
        made.append(seen)

        def learn(batch: Trajectories) -> None:
            seen.add(batch.n_elems())

        return learn

    answer = quick(create_learner=create_learner)
    n = sum(probe.measured is not None for probe in answer.probes)
    assert len(made) == n  # one for each probe, that saw batches of this one alone
    assert [len(sizes) for sizes in made] == [1] * n
    assert "collects and learns" in str(answer)


def test_an_answer_is_kept_until_something_changes(tmp_path: Path) -> None:
    file = tmp_path / "answers.json"
    first = quick(cache=file)
    again = quick(cache=file)
    assert again.probes == first.probes
    assert (again.best, again.seconds) == (first.best, 0.0)
    assert "from the cache" in str(again)
    other = quick(cache=file, n_timesteps=(2, 4))
    assert other.seconds > 0.0
    assert len(json.loads(file.read_text())) == 2
    file.write_text("{")
    with pytest.raises(ValueError, match=r"damaged: .* Delete it\."):
        quick(cache=file)


def test_a_key_knows_factories_by_name_and_text_and_networks_by_structure() -> None:
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(2, 3)
    assert cache.describe_value({"model": small}) == cache.describe_value({"model": torch.nn.Linear(2, 2)})
    assert cache.describe_value({"model": small}) != cache.describe_value({"model": large})
    assert cache.describe_value(counting) != cache.describe_value(create_pictures)
    assert cache.describe_value(partial(counting, n_envs=1)) != cache.describe_value(partial(counting, n_envs=2))

    def made_with(length: int) -> Callable[[], int]:
        return lambda: length

    assert cache.describe_value(made_with(1)) == cache.describe_value(made_with(1))
    assert cache.describe_value(made_with(1)) != cache.describe_value(made_with(2))
    assert cache.key(torch.device("cpu"), counting) == cache.key(torch.device("cpu"), counting)


def test_workers_share_a_gpu_under_a_daemon_that_runs_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PATH", "")  # neither MPS nor MIG can be asked for
    assert tuning.search_space(gpu, None, None, (8,), None).n_processes == (0,)
    (tmp_path / "control").touch()
    space = tuning.search_space(gpu, None, None, (8,), None)
    assert space.n_processes[:3] == (0, 1, 2)
    assert space.sharing == ("none",)  # no second daemon


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"n_envs": (4, 2)}, ValueError, r"n_envs is \[4, 2\], expected rising numbers. Pass \[2, 4\]"),
        ({"n_envs": 4}, TypeError, r"n_envs is 4, expected the values to choose from"),
        ({"n_envs": (0, 1)}, ValueError, r"n_envs\[0\] is 0, expected at least 1"),
        ({"memory_limit": -1}, ValueError, "memory_limit is -1, expected more than 0, or None"),
        ({"alpha": 0}, ValueError, "alpha is 0, expected more than 0, or None"),
        ({"seconds": None}, TypeError, "seconds is None, a NoneType; expected a number, more than 0"),
        ({"env_args": {"n_envs": 3}}, ValueError, r"env_args has 'n_envs', which is tuned"),
        ({"n_env": (1,)}, TypeError, "there is no argument 'n_env'"),
        ({"device": "cuda:7"}, ValueError, "cuda"),
        ({"sharing": ("half",)}, ValueError, "half"),
    ],
)
def test_mistakes_are_told_at_once(wrong: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        quick(**wrong)


@pytest.mark.skipif(not LINUX, reason="Linux tells what processes take")
def test_a_limit_below_the_smallest_candidate_is_told() -> None:
    with pytest.raises(ValueError, match=r"1 environment x 2 steps, the smallest .* is the limit. Pass a larger"):
        quick(memory_limit=2**20)
