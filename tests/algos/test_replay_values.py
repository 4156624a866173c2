from __future__ import annotations

from typing import Any

import pytest
import torch

from rlstruct import RL_Agent, Trajectories, replay_agent
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos.bootstrap import next_values
from rlstruct.algos.replay_values import replay_with_next_values
from rlstruct.batchers import RL_Batcher
from rlstruct.testing import HistoryAgent, create_counting_env


def make_agent(kind: str, model: Any) -> RL_Agent:
    return ActorCriticAgent(model) if kind == "feed-forward" else RecurrentAgent(model)


def collect(create_agent: Any, agent_args: dict[str, Any], auto_reset: bool) -> Trajectories:
    env_args = {"n_envs": 3, "auto_reset": auto_reset}
    with RL_Batcher(9, create_agent, create_counting_env, agent_args=agent_args, env_args=env_args, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    assert trajectories is not None
    return trajectories


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_one_pass_gives_what_two_give(kind: str, auto_reset: bool) -> None:
    model = ActorCritic(3, 2) if kind == "feed-forward" else RecurrentActorCritic(3, 2, n_hidden=8)
    trajectories = collect(make_agent, {"kind": kind, "model": model}, auto_reset)
    agent = make_agent(kind, model)
    replayed, next_value = replay_with_next_values(agent, trajectories)
    assert replayed["value"].requires_grad
    assert not next_value.requires_grad
    expected = replay_agent(agent, trajectories)
    assert replayed.keys() == expected.keys()
    mask = trajectories.mask()
    for key in expected.keys():
        torch.testing.assert_close(replayed[key][mask], expected[key][mask], rtol=0, atol=1e-6)
    torch.testing.assert_close(next_value[mask], next_values(agent, trajectories)[mask], rtol=0, atol=1e-6)
    assert torch.equal(replayed.lengths, trajectories.lengths)


def test_agents_that_want_a_history_are_refused_by_name() -> None:
    trajectories = collect(HistoryAgent, {}, True)
    with pytest.raises(ValueError, match="next_values: HistoryAgent wants a history"):
        replay_with_next_values(HistoryAgent(), trajectories)
