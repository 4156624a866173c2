"""Two learners train as one does: the same environments, weights and checkpoints; and they miss each other at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from resume_tasks import config_of, create_sim, train
from two_learners import BROKEN, EQUAL, RESUMED, train_as_one

from rlstruct.algos.distributed import launch
from rlstruct.algos.distributed.launch import LearnerProcesses, Rendezvous
from rlstruct.algos.distributed.process_group import DistributedLearnerGroup, LearnerGroup, learner_group
from rlstruct.algos.learner import GradientLearner
from rlstruct.errors import LearnerError
from rlstruct.functional.all_reduce import sum_over_learners, summing_by
from rlstruct.functional.statistics import whiten

for package in ("tqdm", "tensorboard", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra: pip install 'rlstruct[train]'")

SCRIPT = Path(__file__).parent / "two_learners.py"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """Return the results of two processes started as torchrun starts them."""
    folder = tmp_path_factory.mktemp("learners")
    said = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env={**os.environ, **said, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said_last = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL], "\n".join(said_last)
    return folder, [torch.load(folder / f"found-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_two_learners_equal_one_with_the_double_batch(name: str, found: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (one["equal"][name] for one in found[1])
    expected, frames = train_as_one(name)
    atol = 5e-6 if name == "sac" else 1e-6  # continuous actions carry rounding into frames and weights
    for mine, theirs, whole in zip(*(one["seen"][name] for one in found[1]), frames, strict=True):
        T = max(mine.shape[1], theirs.shape[1])  # whole episodes: each learner pads to its longest
        both = [torch.nn.functional.pad(half, (0, 0, 0, T - half.shape[1])) for half in (mine, theirs)]
        torch.testing.assert_close(torch.cat(both), whole, rtol=0, atol=atol)
    assert len(expected.losses["loss"]) >= 3
    for key, weight in expected.model.state_dict().items():
        assert torch.equal(first["weights"][key], second["weights"][key]), key
        torch.testing.assert_close(first["weights"][key], weight, rtol=0, atol=atol)
    for key, numbers in expected.losses.items():
        if key not in ("ratio_error", "explained_variance"):  # each learner's own, averaged
            torch.testing.assert_close(first["losses"][key], numbers, rtol=1e-4, atol=1e-5)
    assert first["losses"] == second["losses"]
    assert first["evaluations"] == second["evaluations"]
    assert first["env_steps"] == second["env_steps"] == expected.env_steps
    assert [one[:2] for one in first["evaluations"]] == [(e.env_steps, e.policy_version) for e in expected.evaluations]
    assert first["evaluations"][0][2] == expected.before.returns


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_learners_equal_those_without_a_break(name: str, found: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, both = found
    for one in both:
        whole, resumed = one["resumed"][name]
        for key, weight in whole["weights"].items():
            assert torch.equal(resumed["weights"][key], weight), key
        assert {**resumed, "weights": None} == {**whole, "weights": None}
    runs = list((folder / name.replace(" ", "")).glob("*/*/metrics.csv"))
    assert len(runs) == 2  # one whole and one broken: the second learner makes no folder
    saved = torch.load(runs[0].parent / "checkpoint.pt", weights_only=True)
    assert saved["config"]["n_envs"] == 4
    assert saved["config"]["n_learners"] == 2
    assert len(saved["others"]) == 1


@pytest.mark.slow
def test_a_learner_that_fails_is_named_with_its_traceback(found: tuple[Path, list[dict[str, Any]]]) -> None:
    first, second = (one["failed"] for one in found[1])
    assert re.match(rf"LearnerError: run_training: learner 1 \(pid \d+ on .*\) failed:\n(.*\n)*.*{BROKEN}", first), (
        first
    )
    assert BROKEN in second
    assert not second.startswith("LearnerError")


@pytest.mark.slow
def test_a_learner_that_is_killed_is_named(found: tuple[Path, list[dict[str, Any]]]) -> None:
    text = (found[0] / "killed.txt").read_text()
    assert re.match(r"ranks \(1,\): run_training: learner 1 \(pid \d+ on .*\) has died\.", text), text


@pytest.mark.slow
def test_a_learner_that_is_stopped_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    step, stopped = GradientLearner.descend, []

    def stop(self: GradientLearner, *terms: Any, **more: Any) -> Any:
        if self.policy_version == 3:
            stopped.append(learner_group().facts[1]["pid"])  # type: ignore[attr-defined]
            os.kill(stopped[0], signal.SIGSTOP)
        return step(self, *terms, **more)

    monkeypatch.setattr(GradientLearner, "descend", stop)  # in this process only
    with pytest.raises(LearnerError, match=r"learner 1 \(pid \d+ on .*\) was stopped by a signal") as error:
        train("a2c", None, n_learners=2, n_processes=2, n_env_steps=10**9, evaluation_interval=10**9)
    (pid,) = stopped
    assert error.value.ranks == (1,)
    assert not multiprocessing.active_children()
    assert not Path(f"/proc/{pid}").exists()
    assert learner_group().size == 1
    assert not dist.is_initialized()


@pytest.mark.slow
def test_followers_find_a_learner_that_torchrun_has_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for key, value in {**said, "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(launch, "JOIN_SECONDS", 40.0)  # of this process
    assert train("a2c", None, n_learners=2, n_env_steps=80, evaluation_interval=10**9).env_steps == 80


def facts(**changes: Any) -> dict[str, Any]:
    rendezvous = Rendezvous(0, 2, 0, "127.0.0.1", 0)
    return {**launch.learner_facts(config_of("a2c"), rendezvous), **changes}


def roll_call(store: dist.Store) -> list[dict[str, Any]]:
    return launch.gather_facts(Rendezvous(0, 2, 0, "127.0.0.1", 0), store, facts(), LearnerProcesses())


def test_learners_that_do_not_come_or_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "JOIN_SECONDS", 0.1)
    store = dist.HashStore()
    with pytest.raises(
        LearnerError, match=r"learner 1 of 2 has not joined within 0\.1 s\. Start all of them: torchrun"
    ):
        roll_call(store)
    store.set("1", json.dumps(facts(versions={**facts()["versions"], "torch": "2.11.0"})))
    with pytest.raises(
        LearnerError, match=r"learner 1 .* has torch 2\.11\.0, but learner 0 .* has .* Install the same"
    ):
        roll_call(store)
    store.set("1", json.dumps(facts(settings={**facts()["settings"], "n_envs": 5})))
    with pytest.raises(
        LearnerError, match=r"learner 1 .* has n_envs 5, but learner 0 .* has 4\. Start all of them in the same way"
    ):
        roll_call(store)
    store.set("1", json.dumps(facts(pid=5)))
    assert [one["pid"] for one in roll_call(store)] == [os.getpid(), 5]


def test_what_cannot_be_shared_is_refused() -> None:
    group = DistributedLearnerGroup.__new__(DistributedLearnerGroup)
    group.rank, group.size = 1, 3
    with pytest.raises(
        LearnerError, match=r"A2CConfig: n_envs is 4, expected a multiple of the 3 learners, which share it"
    ):
        group.local_config(config_of("a2c"))
    with pytest.raises(LearnerError, match=r"n_processes is 2, expected a multiple of the 3 learners"):
        group.local_config(replace(config_of("a2c"), n_envs=3, n_processes=2))
    with pytest.raises(LearnerError, match=r"DQNConfig: batch_size is 16, expected a multiple"):
        group.local_config(replace(config_of("dqn"), n_envs=6))
    share = group.local_config(replace(config_of("a2c"), n_envs=5, n_processes=6))
    assert (share.n_envs, share.n_processes) == (5, 2)
    assert LearnerGroup().local_config(share) is share


def test_every_device_of_a_learner_is_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    group = DistributedLearnerGroup.__new__(DistributedLearnerGroup)
    vars(group).update(rank=1, size=2, _local_rank=1)
    devices = "learner_device", "batcher_device", "evaluation_device", "replay_device"
    share = group.local_config(replace(config_of("dqn"), **dict.fromkeys(devices, "cuda")))
    assert {name: getattr(share, name) for name in devices} == dict.fromkeys(devices, "cuda:1")
    assert group.local_config(config_of("dqn")).replay_device is None


def test_torchrun_and_the_settings_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LearnerError, match="WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"):
        train("a2c", None)
    for name, value in {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LearnerError, match=r"A2CConfig: n_learners is 3, but 2 processes were started together"):
        train("a2c", None, n_learners=3)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(launch, "JOIN_SECONDS", 0.2)
    with pytest.raises(LearnerError, match=r"learner 1 cannot reach learner 0 at 127\.0\.0\.1:1 within 0\.2 s"):
        train("a2c", None)


def test_statistics_are_those_of_all_learners() -> None:
    mine, theirs = torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[5.0, 7.0, 2.0]])
    mask, all_real = torch.tensor([[True, True, False]]), torch.tensor([[True, True, True]])
    expected = whiten(torch.cat([mine, theirs], 1), torch.cat([mask, all_real], 1))
    counted, mean = torch.tensor([[2 + 3, 4.0 + 14.0]]), 18.0 / 5
    squares = (theirs - mean).square().sum()

    def add_up(x: torch.Tensor) -> torch.Tensor:
        return counted if x.dim() == 2 else x + squares

    with summing_by(add_up):
        torch.testing.assert_close(whiten(mine, mask), expected[:, :3])
    x = torch.ones(2)
    assert sum_over_learners(x) is x


class LearnerOfTwo(DistributedLearnerGroup):
    """One of two learners, without processes: the test says what the other one adds to every sum."""

    def __init__(self, other: torch.Tensor) -> None:
        self.other = other

    def all_reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other


def test_gradients_and_numbers_are_means_weighted_by_steps() -> None:
    group = LearnerOfTwo(torch.tensor([5.0, 7.0, 10.0, 1.0]))  # of one step: gradient, loss, weight
    terms = {"loss": torch.tensor(2.0), "error": torch.tensor([1.0, 2.0])}
    terms, gradient = group.mean(terms, {"weight": torch.tensor([[1.0], [3.0]])}, torch.tensor(3.0))
    assert gradient["weight"].tolist() == [[(3 * 1 + 5) / 4], [(3 * 3 + 7) / 4]]
    assert terms["loss"].item() == (3 * 2 + 10) / 4
    assert terms["error"].tolist() == [1.0, 2.0]  # one for each step: its own
    group = LearnerOfTwo(torch.tensor([0.5, 4.0, 0.0, 1.0]))
    terms = {"n_wrong": torch.tensor(3), "all": torch.tensor(True)}
    terms, _ = group.mean(terms, {"weight": torch.tensor([0.5])}, None)
    assert {name: term.item() for name, term in terms.items()} == {"n_wrong": 3.5, "all": 0.5}


def test_environments_are_made_with_the_seeds_of_one_learner() -> None:
    whole = create_sim(4, 7).reset(None)[0]["frame"]
    halves = [create_sim(2, 7 + 2 * rank).reset(None)[0]["frame"] for rank in range(2)]
    assert torch.equal(torch.cat(halves), whole)
