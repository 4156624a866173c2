"""The same seed gives the same trajectories, however the environments are split over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batcher_fakes import create_cartpole, create_policy, next_batch

from rlstruct import Trajectories
from rlstruct.batchers import RL_Batcher

B, T = 8, 40


def collect(n_processes: int, recurrent: bool, auto_reset: bool) -> list[Trajectories]:
    batches = []
    with RL_Batcher(
        T,
        create_policy,
        create_cartpole,
        agent_args={"recurrent": recurrent},
        env_args={"n_envs": B // max(1, n_processes), "auto_reset": auto_reset},
        n_processes=n_processes,
        seed=11,
    ) as batcher:
        batcher.reset()
        for _ in range(3):
            batcher.execute()
            batch, n_running = batcher.get()
            batches.append(batch)
            if not n_running:
                batcher.reset()
    return batches


# Starting workers takes most of the time, so not every combination is tried with every number of processes.
@pytest.mark.parametrize(
    ("n_processes", "recurrent", "auto_reset"),
    [
        (1, True, False),
        (2, True, True),
        (2, False, False),
        (4, True, True),
        pytest.param(8, True, True, marks=pytest.mark.exhaustive),
    ],
)
def test_layouts_agree(n_processes: int, recurrent: bool, auto_reset: bool) -> None:
    here, there = collect(0, recurrent, auto_reset), collect(n_processes, recurrent, auto_reset)
    for mine, theirs in zip(here, there, strict=True):
        assert list(mine.info.keys()) == list(theirs.info.keys())
        for key in ("environment", "env_seed", "step", "policy_version"):
            assert torch.equal(mine.info[key], theirs.info[key]), key
        assert torch.equal(mine.lengths, theirs.lengths)
        assert list(mine.steps.keys()) == list(theirs.steps.keys())
        for key, value in mine.steps.items():
            if value.is_floating_point() and key.startswith("action/"):
                # Matrix products of 8 rows and of 4 rows may round differently; actions do not.
                torch.testing.assert_close(value, theirs.steps[key], atol=1e-5, rtol=1e-5)
            else:
                assert torch.equal(value, theirs.steps[key]), key


def test_a_row_alone_is_replayed_from_the_seed_that_it_carries() -> None:
    batches = collect(0, recurrent=True, auto_reset=True)
    row = 5
    seed = int(batches[0].info["env_seed"][row])
    assert seed == 16
    settings: dict[str, Any] = {"agent_args": {"recurrent": True}, "env_args": {"n_envs": 1}, "seed": seed}
    with RL_Batcher(T, create_policy, create_cartpole, **settings) as batcher:
        batcher.reset()
        for batch in batches:
            alone = next_batch(batcher)
            assert alone.info["step"][0] == batch.info["step"][row]
            for key in ("observation/frame", "observation/rng", "action/action", "_observation/done"):
                assert torch.equal(alone.steps[key][0], batch.steps[key][row]), key


def test_different_seeds_differ() -> None:
    frames = []
    for seed in (1, 2):
        with RL_Batcher(
            T, create_policy, create_cartpole, agent_args={"recurrent": False}, env_args={"n_envs": 2}, seed=seed
        ) as batcher:
            batcher.reset()
            batcher.execute()
            frames.append(batcher.get()[0].steps["observation/frame"])
    assert not torch.equal(*frames)
    assert not torch.equal(frames[0][0], frames[0][1])  # the environments of one batch differ, too
