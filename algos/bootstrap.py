"""The value of what an agent reached, where its data stops. Layer 4."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.core import TemporalDictTensor, Trajectories
from rlstruct.replay import replay_agent_stateless
from rlstruct.rl_agent import RL_Agent


@torch.no_grad()
def next_values(agent: RL_Agent, trajectories: Trajectories) -> Tensor:
    """Judge the true next observation of every step, also the final ones that a restart hides.

    A recurrent agent is asked with the state that it had then: its new state of step t.

    Args:
        agent: returns ``value`` [B].
        trajectories: [B, T] on the agent's device.

    Returns:
        v(s_{t+1}), without gradient.  [B, T]

    Raises:
        ValueError: the agent wants a history, which ends before the next observation.
    """
    if agent.require_history():
        raise ValueError(
            f"next_values: {type(agent).__name__} wants a history, and there is none behind the last step. "
            "Collect whole episodes that terminate, and do not bootstrap."
        )
    steps = trajectories.trajectories
    reached = steps.truncate_key("_observation/").prepend_key("observation/")
    shifted = Trajectories(trajectories.info, TemporalDictTensor._trusted(dict(reached.items()), steps.lengths))
    if not any(key.startswith("agent_state/") for key in trajectories.info.keys()):
        return replay_agent_stateless(agent, shifted)["value"]  # [B, T]
    values: list[Tensor] = []
    state = None
    for t in range(steps.n_steps()):
        _, state = agent.call_replay(trajectories, t, state)
        output, _ = agent.call_replay(shifted, t, state)
        values.append(output["value"])
    return torch.stack(values, dim=1)  # [B, T]
