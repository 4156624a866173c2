from __future__ import annotations

from typing import Any

import pytest
import torch

from rlstruct import RL_Agent
from rlstruct.agents import ActorCritic, ActorCriticAgent, RecurrentActorCritic, RecurrentAgent
from rlstruct.algos.bootstrap import next_values
from rlstruct.batchers import RL_Batcher
from rlstruct.testing import CountingEnv, HistoryAgent, create_counting_env


def make_agent(kind: str, model: Any) -> RL_Agent:
    return ActorCriticAgent(model) if kind == "feed-forward" else RecurrentAgent(model)


@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("kind", ["feed-forward", "recurrent"])
def test_next_values_are_the_values_one_step_later_and_exact_at_every_end(kind: str, auto_reset: bool) -> None:
    model = ActorCritic(3, 2) if kind == "feed-forward" else RecurrentActorCritic(3, 2, n_hidden=8)
    env_args = {"n_envs": 3, "auto_reset": auto_reset}
    agent_args = {"kind": kind, "model": model}
    with RL_Batcher(9, make_agent, create_counting_env, agent_args=agent_args, env_args=env_args, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    assert trajectories is not None
    agent, steps, mask = make_agent(kind, model), trajectories.trajectories, trajectories.mask()
    values = next_values(agent, trajectories)
    assert not values.requires_grad
    goes_on = mask[:, 1:] & ~steps["observation/initial_state"][:, 1:]
    stored = steps["action/value"][:, 1:]
    torch.testing.assert_close(values[:, :-1][goes_on], stored[goes_on], rtol=0, atol=1e-6)
    ends = steps["_observation/done"] & mask
    assert ends.sum().item() >= 3
    for b, t in ends.nonzero().tolist():
        state, first = agent.initial_state(trajectories.info, 1), t
        while not steps["observation/initial_state"][b, first]:
            first -= 1
        for now in range(first, t + 1):
            _, state = agent(state, row_of(steps, "observation/", b, now), trajectories.info)
        output, _ = agent(state, row_of(steps, "_observation/", b, t), trajectories.info)
        torch.testing.assert_close(values[b, t], output["value"][0].detach(), rtol=0, atol=1e-6)


def row_of(steps: Any, prefix: str, b: int, t: int) -> Any:
    return steps.temporal_index(t).truncate_key(prefix).slice(b)


def test_agents_that_want_a_history_are_refused_by_name() -> None:
    with RL_Batcher(2, HistoryAgent, CountingEnv, env_args={"n_envs": 2}, seed=0) as batcher:
        batcher.reset()
        batcher.execute()
        trajectories, _ = batcher.get()
    assert trajectories is not None
    with pytest.raises(ValueError, match="next_values: HistoryAgent wants a history"):
        next_values(HistoryAgent(), trajectories)
