"""execute() before get(): workers begin the second batch by themselves, and nothing else is any different."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batcher_fakes import InfoAgent, close_leaves_nothing, create_cartpole, create_version_agent
from fake_agents import RngAgent
from fake_envs import create_counting_env, create_failing_env, create_slow_env

from rlstruct import (
    BatcherStateError,
    DeviceEnv,
    DictTensor,
    RL_Agent,
    Trajectories,
    VecEnv,
    WorkerError,
    WorkerTimeout,
)
from rlstruct.batchers import RL_Batcher
from rlstruct.functional.random import uniform

B = 6


class Everything(RL_Agent):
    """Its answers depend on weights, settings, random keys and a state, which holds observations uncopied."""

    agent_info_on_device = True

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.weight = torch.zeros(1, device=self.device)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"total": torch.zeros(B), "last": torch.zeros(B, 4)}).to(self.device)

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        total = state["total"] * 0.9 + state["last"][:, 2] + self.weight * agent_info["epsilon"]
        drawn = uniform(observation["rng"])
        action = {"action": (total + drawn > 0.5).to(torch.int64), "total": total, "drawn": drawn}
        return DictTensor(action), DictTensor({"total": total, "last": observation["frame"]})

    def update(self, info: Any) -> None:
        self.weight = info["w"].to(self.device, copy=True)


Move = tuple[int, str]  # its number, from which weights and settings are made, and what to call
Kept = list[tuple[Trajectories, dict[str, torch.Tensor]]]


def draw_moves(seed: int, n_batches: int) -> tuple[list[Move], list[Move]]:
    """Draw legal moves that queue batches; return also those that order the same batches one by one."""
    dice, queued, plain = random.Random(seed), list[Move](), list[Move]()
    outstanding: deque[list[Move]] = deque()
    n_ordered = 0
    while n_ordered < n_batches or outstanding:
        if n_ordered < n_batches and len(outstanding) < 2 and dice.random() < 0.7:
            names = ["update"] * dice.choice([0, 1, 2]) + [dice.choice(["execute", "execute with settings"])]
            order = [(len(queued) + i, name) for i, name in enumerate(names)]
            queued += order
            outstanding.append(order)
            n_ordered += 1
        elif outstanding:
            queued.append((len(queued), "get"))
            plain += [*outstanding.popleft(), (0, "get")]
    return queued, plain


def create_cartpole_on(n_envs: int, seed: int, device: str) -> VecEnv:
    env = create_cartpole(n_envs, seed)
    return env if device == "cpu" else DeviceEnv(env, device)


def follow(moves: list[Move], n_processes: int, T: int, device: str = "cpu") -> Kept:
    """Make the moves; return each batch as it came, with a copy of it."""
    kept: Kept = []
    with RL_Batcher(
        T,
        Everything,
        create_cartpole_on,
        agent_args={"device": device},
        env_args={"n_envs": B // max(1, n_processes), "device": device},
        n_processes=n_processes,
        device=device,
        seed=5,
        agent_info=DictTensor({"epsilon": torch.zeros(1)}),
    ) as batcher:
        batcher.reset()
        for number, name in moves:
            if name == "update":
                batcher.update({"w": torch.full((1,), float(number))})
            elif name == "get":
                batch, n_running = batcher.get()
                assert batch is not None
                assert n_running == B
                batch = batch.to("cpu")
                kept.append((batch, {key: value.clone() for key, value in tensors_of(batch).items()}))
            else:
                epsilon = DictTensor({"epsilon": torch.arange(float(B)) + number})
                batcher.execute(epsilon if name == "execute with settings" else None)
    return kept


def tensors_of(batch: Trajectories) -> dict[str, torch.Tensor]:
    return {**dict(batch.info.items()), **dict(batch.steps.items())}


@pytest.mark.parametrize(
    ("n_processes", "T", "device"), [(1, 1, "cpu"), (2, 20, "cpu"), (3, 7, "cpu"), (1, 7, "sim:1")]
)
def test_batches_are_bit_equal_to_those_ordered_one_by_one(n_processes: int, T: int, device: str) -> None:
    queued, plain = draw_moves(n_processes, 16)
    ours, truth = follow(queued, n_processes, T, device), follow(plain, 0, T)
    assert len(ours) == len(truth) == 16
    assert not torch.equal(ours[0][1]["policy_version"], ours[-1][1]["policy_version"])
    assert not torch.equal(ours[0][1]["agent_info/epsilon"], ours[-1][1]["agent_info/epsilon"])
    for (batch, copy), (_, expected) in zip(ours, truth, strict=True):
        assert copy.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(copy[key], value), key
        now = tensors_of(batch)
        assert all(torch.equal(now[key], value) for key, value in copy.items())  # nothing has written to it since


@pytest.fixture(scope="module")
def batcher() -> Iterator[RL_Batcher]:
    env_args = {"n_envs": 2, "auto_reset": True}
    with RL_Batcher(3, create_version_agent, create_counting_env, env_args=env_args, n_processes=2, seed=0) as batcher:
        batcher.update(weights(1.0))
        yield batcher


def weights(value: float, size: int = 300_000) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size,), value)}


def shared_bytes(batcher: RL_Batcher) -> list[Counter[int]]:
    """Sizes of the memory that each worker shares with this process."""
    found, shared = [], re.compile(r"/\S+ \(deleted\)$")  # memfd, or temporary files
    for pid in batcher.stats().pids:
        files = [file for file in Path(f"/proc/{pid}/fd").iterdir() if shared.search(os.readlink(file))]
        sizes = {file.stat().st_ino: file.stat().st_size for file in files}  # what is mapped has two descriptors
        found.append(Counter(sizes.values()))
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_the_second_slab_takes_memory_once_it_is_used_and_the_report_says_so(batcher: RL_Batcher) -> None:
    batcher.reset()
    for _ in range(3):
        batcher.execute()
        batcher.get()
    before, planned = batcher.memory_report(), batcher.memory_report(queued=True)
    one_buffer = shared_bytes(batcher)
    batcher.execute()
    batcher.execute()
    batcher.get()
    batcher.get()
    after = batcher.memory_report()
    assert after == planned
    assert after.rollout_buffers == tuple(2 * size for size in before.rollout_buffers)
    rows = zip(one_buffer, shared_bytes(batcher), after.rollout_buffers, after.final_observations, strict=True)
    for one, two, buffer, finals in rows:
        (size,) = two - one
        assert (one[size], two[size]) == (1, 2)
        assert one - two == Counter({0: 1})
        # Each tensor begins at a cache line, which shows in buffers of three steps.
        assert buffer + finals <= 2 * size < buffer + finals + 2 * 64 * 40


def test_weights_are_those_of_the_order_and_never_torn(batcher: RL_Batcher) -> None:
    batcher.reset()
    versions: deque[int] = deque()

    def order(value: float) -> None:
        batcher.update(weights(-1.0))
        batcher.update(weights(value))
        batcher.execute()
        versions.append(batcher.policy_version)

    order(1000.0)
    for i in range(25):
        order(float(i))
        batcher.update(weights(-2.0))  # read by none: the next order brings others
        batch, _ = batcher.get()
        assert batch is not None
        assert (batch.info["policy_version"] == versions.popleft()).all()
        for key in ("lowest", "highest"):
            assert (batch.steps[f"action/{key}"] == (i - 1 if i else 1000)).all()
        assert batch.info["step"].tolist() == [3 * i] * 4
    batcher.get()


def test_only_endless_environments_queue() -> None:
    env_args = {"n_envs": 1, "auto_reset": False}
    with RL_Batcher(2, RngAgent, create_counting_env, env_args=env_args, n_processes=1) as batcher:
        batcher.reset()
        batcher.execute()
        with pytest.raises(BatcherStateError, match="only with worker processes and auto-resetting environments"):
            batcher.execute()
        assert batcher.get()[0] is not None


def failing(failure: Any, **settings: Any) -> RL_Batcher:
    # Environments 0 to 3, T = 4; worker 1 fails in step 1 of the second batch.
    env_args = {"n_envs": 2, "auto_reset": True, "failure": failure, "step": 5, "failing_seed": 2}
    return RL_Batcher(4, RngAgent, create_failing_env, env_args=env_args, n_processes=2, seed=0, **settings)


def test_a_worker_that_fails_in_its_queued_batch_is_replaced_and_its_finished_batch_is_kept() -> None:
    with failing(partial(os._exit, 5), on_worker_error="restart") as batcher:
        batcher.reset()
        batcher.execute()
        batcher.execute()
        time.sleep(0.5)  # it is dead before anybody has asked for its first batch
        found = []
        for _ in range(3):
            batch, _ = batcher.get()
            assert batch is not None
            found.append((batch.info["env_seed"].tolist(), batch.info["step"].tolist()))
            steps = batch.steps["observation/frame"]
            assert steps[:, :, 0].eq(batch.info["env_seed"].unsqueeze(1)).all()
            if len(found) < 2:
                batcher.execute()
        (lost,) = batcher.lost_episodes
    new = lost.new_seed
    assert (lost.worker, lost.environments, lost.seed, lost.batch, lost.step) == (1, (2, 4), 2, 1, 1)
    assert found == [
        ([0, 1, 2, 3], [0, 0, 0, 0]),
        ([0, 1, new, new + 1], [4, 4, 0, 0]),
        ([0, 1, new, new + 1], [8, 8, 4, 4]),
    ]


def test_an_exception_in_a_queued_batch_is_told_by_the_next_get_that_waits() -> None:
    batcher = failing(ValueError("no road"))
    batcher.reset()
    batcher.execute()
    batcher.execute()

    def get_both() -> None:
        batcher.get()  # may come: that worker had finished this one
        batcher.get()

    with pytest.raises(WorkerError, match="no road") as caught:
        get_both()
    assert (caught.value.worker, caught.value.step) == (1, 1)
    close_leaves_nothing(batcher)


def test_kill_and_stop_with_a_batch_queued() -> None:
    env_args = {"n_envs": 1, "auto_reset": True, "seconds": 0.01}
    batcher = RL_Batcher(
        20, InfoAgent, create_slow_env, env_args=env_args, n_processes=2, seed=0, on_worker_error="restart"
    )
    info = [DictTensor({"epsilon": torch.full((1,), float(i))}) for i in range(4)]
    batcher.reset(info[0])
    batcher.execute(info[1])
    batcher.execute(info[2])
    time.sleep(0.1)
    first, second = batcher.stats().pids
    os.kill(first, signal.SIGKILL)  # in its first batch: it owes both, each with its own settings
    os.kill(second, signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"worker 1\b"):
        batcher.get(timeout=0.5)
    os.kill(second, signal.SIGCONT)
    for i in (1, 2, 3):
        batch, _ = batcher.get()
        assert batch is not None
        assert batch.info["agent_info/epsilon"].tolist() == [i, i]
        assert (batch.steps["action/seen_epsilon"] == i).all()
        assert batch.info["step"].tolist() == [20 * (i - 1)] * 2
        if i < 3:
            batcher.execute(info[3] if i == 1 else None)
    assert [lost.worker for lost in batcher.lost_episodes] == [0]
    assert batcher.get()[0] is not None
    batcher.execute()
    batcher.execute()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        batcher.get()
    batch, _ = batcher.get()  # Ctrl-C while it waited has lost nothing
    assert batch is not None
    assert batch.info["step"].tolist() == [80, 80]
    batcher.execute()
    close_leaves_nothing(batcher)  # in the middle of the first of two batches
