"""Batches that the next one overwrites have the same steps as those that their caller keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batcher_fakes import assert_equal, create_cartpole
from fake_agents import StatefulAgent
from fake_envs import create_counting_env

from rlstruct import DictTensor, RL_Agent, Trajectories
from rlstruct.batchers import RL_Batcher

T, B = 5, 3


class ReadsAllRows(RL_Agent):
    """Shows the mean frame of all environments, also of those whose episode has ended."""

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        mean = observation["frame"].to(torch.float64).mean().expand(B)
        return DictTensor({"action": observation["rng"] % 2, "mean": mean}), DictTensor()


@pytest.mark.parametrize("create_agent", [StatefulAgent, ReadsAllRows])
@pytest.mark.parametrize("create_env", [create_counting_env, create_cartpole])
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("n_processes", [0, 1])
def test_reuse_changes_no_step(create_agent: Any, create_env: Any, auto_reset: bool, n_processes: int) -> None:
    def collect(reuse: bool) -> tuple[list[Trajectories], list[int]]:
        clones, kept = [], []
        env_args = {"n_envs": B, "auto_reset": auto_reset}
        with RL_Batcher(T, create_agent, create_env, env_args=env_args, n_processes=n_processes, seed=1) as batcher:
            batcher.reset()
            for _ in range(3):
                batcher.execute()
                batch, n_running = batcher.get(reuse=reuse)
                clones.append(batch.clone())
                kept.append(batch)
                if not n_running:
                    batcher.reset()
        return clones, [batch.steps["observation/frame"].untyped_storage().data_ptr() for batch in kept]

    (reused, places), (copied, own_places) = collect(reuse=True), collect(reuse=False)
    for one, other in zip(reused, copied, strict=True):
        assert_equal(one, other)
    assert len({*own_places}) == len(own_places)
    if auto_reset:  # rows of episodes that have ended are left out by copying the others
        assert len({*places}) == (3 if n_processes else 1)
