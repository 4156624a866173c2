"""get(n_workers=k): nobody waits for the slowest worker, nothing is lost, nobody is preferred."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from batcher_fakes import create_uneven, create_version_agent, steps_of

from rlstruct import DictTensor
from rlstruct.batchers import EpisodeStatistics, RL_Batcher
from rlstruct.errors import BatcherStateError

T, EACH, WORKERS = 4, 2, 3
SECONDS = 0.08
SETTINGS = {"n_envs": EACH, "seconds": SECONDS}


@pytest.fixture(scope="module")
def batcher() -> Iterator[RL_Batcher]:
    env_args = {**SETTINGS, "auto_reset": True}
    with RL_Batcher(T, create_version_agent, create_uneven, env_args=env_args, n_processes=WORKERS, seed=0) as batcher:
        yield batcher


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((200_000,), float(version))}


def test_every_step_comes_once_in_order_with_whole_weights_and_nobody_is_far_ahead(batcher: RL_Batcher) -> None:
    B = EACH * WORKERS
    rows = torch.arange(B, dtype=torch.int64)
    batcher.reset(env_info=DictTensor({"level": rows}))
    pieces: dict[int, list[list[tuple[int, ...]]]] = {b: [] for b in range(B)}
    statistics, n_ended, n_small = EpisodeStatistics(B), 0, 0
    for _ in range(12):
        batcher.update(weights(batcher.policy_version + 1))
        newest = batcher.policy_version
        batcher.execute()
        batch, n_running = batcher.get(n_workers=1)
        assert batch is not None
        assert n_running == B
        n_small += batch.n_elems() < B
        steps, info = batch.trajectories, batch.info
        assert torch.equal(info["env_info/level"], info["environment"])
        assert (info["policy_version"] <= newest).all()
        for key in ("lowest", "highest"):
            assert torch.equal(steps[f"action/{key}"], info["policy_version"].unsqueeze(1).expand(-1, T).float())
        for row, b in enumerate(info["environment"].tolist()):
            assert info["step"][row] == T * len(pieces[b])
            pieces[b].append([tuple(frame) for frame in steps["observation/frame"][row].tolist()])
        counts = [len(piece) for piece in pieces.values()]
        assert max(counts) - min(counts) <= 2
        n_ended += statistics.add(batch).n_elems()
    assert n_small > 6
    for b, found in pieces.items():
        truth = steps_of(b, T * len(found))
        assert [frame for piece in found for frame in piece] == [before for before, _, _ in truth]
    assert n_ended == sum(done for b, found in pieces.items() for _, _, done in steps_of(b, T * len(found)))
    if batcher._life.state == "executing":
        batcher.get()


def test_what_must_wait_for_all_workers_says_so(batcher: RL_Batcher) -> None:
    batcher.update(weights(1))
    batcher.reset()
    batcher.execute()
    with pytest.raises(ValueError, match=r"n_workers is 4, expected 1 to 3"):
        batcher.get(n_workers=4)
    part, _ = batcher.get(n_workers=1)
    assert part is not None
    assert 0 not in part.info["environment"].tolist()
    with pytest.raises(BatcherStateError, match=r"Call get\(\) first"):
        batcher.reset()
    with pytest.raises(BatcherStateError, match=r"execute\(agent_info\): a batch is being collected"):
        batcher.execute(DictTensor({"epsilon": torch.zeros(1)}))
    batcher.execute()
    with pytest.raises(BatcherStateError, match=r"get\(\) has not been called"):
        batcher.execute()
    batcher.get()
    batcher.reset()
    batcher.execute(DictTensor({"epsilon": torch.zeros(1)}))
    batch, n_running = batcher.get()
    assert batch is not None
    assert batch.n_elems() == n_running == EACH * WORKERS


def test_episodes_of_every_worker_come_whole() -> None:
    found = torch.zeros(EACH * WORKERS, dtype=torch.int64)
    ended = torch.zeros(EACH * WORKERS, dtype=torch.int64)
    with RL_Batcher(T, create_version_agent, create_uneven, env_args=SETTINGS, n_processes=WORKERS, seed=0) as batcher:
        batcher.update(weights(1))
        batcher.reset()
        n_running: int | None = 1
        while n_running:
            batcher.execute()
            batch, n_running = batcher.get(n_workers=2)
            assert batch is not None
            row = batch.info["environment"]
            found[row] += batch.lengths
            ended[row] += (batch.trajectories["_observation/done"] & batch.trajectories.mask()).sum(1)
        with pytest.raises(BatcherStateError, match="every episode has ended"):
            batcher.execute()
    lengths = [next(k for k, (_, _, done) in enumerate(steps_of(b, 20)) if done) + 1 for b in range(EACH * WORKERS)]
    assert found.tolist() == lengths
    assert (ended == 1).all()
