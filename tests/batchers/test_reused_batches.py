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

T, B, BATCHES = 6, 5, 6


class ReadsAllRows(RL_Agent):
    """Shows means of all rows, also of those whose episode has ended; its state is a view of the observation."""

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        return DictTensor({"bytes": torch.zeros(B, 8, dtype=torch.uint8)})

    def __call__(self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: Any = None) -> Any:
        frame = observation["frame"]
        now, last = (one.to(torch.float64).mean().expand(B) for one in (frame, state["bytes"]))
        action = {"action": observation["rng"] % 2, "now": now, "last": last}
        return DictTensor(action), DictTensor({"bytes": frame.view(torch.uint8)[:, -8:]})


@pytest.mark.parametrize("create_agent", [StatefulAgent, ReadsAllRows])
@pytest.mark.parametrize("create_env", [create_counting_env, create_cartpole])
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("n_processes", [0, 1])
def test_reuse_changes_no_step(create_agent: Any, create_env: Any, auto_reset: bool, n_processes: int) -> None:
    def collect(reuse: bool) -> tuple[list[Trajectories], list[Any], list[int]]:
        clones, kept, states = [], [], []
        env_args = {"n_envs": B, "auto_reset": auto_reset}
        with RL_Batcher(T, create_agent, create_env, env_args=env_args, n_processes=n_processes, seed=1) as batcher:
            batcher.reset()
            for _ in range(BATCHES):
                batcher.execute()
                batch, n_running = batcher.get(reuse=reuse)
                clones.append(batch.clone())
                kept.append(batch)
                (state,) = batcher.state_dict()["collectors"]
                states.append({**state["observation"], **state["agent_state"]})
                if not n_running:
                    batcher.reset()
        return clones, states, [batch.steps["observation/frame"].untyped_storage().data_ptr() for batch in kept]

    (reused, states, places), (copied, own_states, own_places) = collect(reuse=True), collect(reuse=False)
    for one, other in zip(reused, copied, strict=True):
        assert_equal(one, other)
    for state, own in zip(states, own_states, strict=True):
        assert state.keys() == own.keys()
        assert all(torch.equal(state[key], own[key]) for key in own), "the state of the next batch"
    assert len({*own_places}) == BATCHES
    if n_processes:
        assert len({*places}) == BATCHES
    elif auto_reset:
        assert len({*places}) == 1
    else:  # rows of episodes that have ended are left out by copying the others
        assert len({*places}) < BATCHES
