"""An agent's outputs along stored trajectories and the values of what each step reached, in one pass. Layer 4."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.algos.bootstrap import next_values
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import RL_Agent


def replay_with_next_values(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, Tensor]:
    """Replay an agent with gradients, and judge the true next observation of every step without.

    Equal to `rlstruct.replay_agent` and `next_values`. An agent with a state is replayed step by step once, and all
    next observations are judged in one call, each with the state that the agent had then.

    Args:
        agent: returns ``value`` [B].
        trajectories: [B, T] on the agent's device.

    Returns:
        ``(replayed, next_value)``: the agent's outputs [B, T, ...]; v(s_{t+1}) without gradient [B, T].

    Raises:
        ValueError: the trajectories hold no step, or the agent wants a history.
    """
    if agent.require_history() or not any(key.startswith("agent_state/") for key in trajectories.info.keys()):
        return replay_agent(agent, trajectories), next_values(agent, trajectories)
    steps = trajectories.trajectories
    outputs: list[DictTensor] = []
    states: list[DictTensor] = []
    state: DictTensor | None = None
    for t in range(steps.n_steps()):
        output, state = agent.call_replay(trajectories, t, state)
        outputs.append(output)
        states.append(state.detach())
    with torch.no_grad():
        following, _ = agent.call_replay(_one_step_each(trajectories, DictTensor.stack(states)), 0, None)
    next_value = following["value"].view(steps.n_elems(), steps.n_steps())  # [B, T]
    replayed = TemporalDictTensor._trusted(dict(DictTensor.stack(outputs).items()), steps.lengths)
    return replayed, next_value


def _one_step_each(trajectories: Trajectories, states: TemporalDictTensor) -> Trajectories:
    """Make every step's next observation a trajectory of its own, which starts from the state there: [B * T, 1]."""
    steps, T = trajectories.trajectories, trajectories.trajectories.n_steps()
    info = trajectories.info.truncate_key("agent_info/").prepend_key("agent_info/")
    rows = {key: value.repeat_interleave(T, dim=0) for key, value in info.items()}
    rows |= {f"agent_state/{key}": value.flatten(0, 1) for key, value in states.items()}
    reached = steps.truncate_key("_observation/").prepend_key("observation/")
    single = {key: value.flatten(0, 1).unsqueeze(1) for key, value in reached.items()}
    return Trajectories(DictTensor(rows), TemporalDictTensor(single))
