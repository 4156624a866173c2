"""Replaying an agent over stored trajectories, with gradients."""

from __future__ import annotations

import torch

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadValueError
from rlstruct.profiling import operation
from rlstruct.rl_agent import CPU, RL_Agent, replayed_observation


@operation("replay")
def replay_agent(agent: RL_Agent, trajectories: Trajectories) -> TemporalDictTensor:
    """Recompute what the agent returned at every step, so that a loss can be differentiated through it.

    An agent whose states are known beforehand, see `RL_Agent.states_at`, is called once over all B * T steps: one that
    keeps no state, for example. Any other is called step by step through its state, with equal results.

    Args:
        agent: the learner's agent.
        trajectories: [B, T] on the agent's device.

    Returns:
        The agent's outputs under their own names, with the lengths of ``trajectories``.  [B, T, ...]
        Padding is computed like real steps: mask it out of the loss.

    Raises:
        ValueError: the trajectories hold no step.
        DeviceMismatchError: the agent is an RL_Agent_CheckDevice, and the trajectories are not on its device.
    """
    return replay_with_states(agent, trajectories)[0]


replay_agent_stateless = replay_agent
"""The name that rlstructures has for agents without a state."""


def replay_with_states(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, DictTensor]:
    """Do what `replay_agent` does, and return the agent's new state of every step, too.

    Returns:
        ``(outputs, new_states)``: as of `replay_agent` [B, T, ...]; without gradients, step t of row b at b * T + t,
        empty for an agent that keeps no state [B * T, ...].
    """
    steps = trajectories.trajectories
    B, T = steps.n_elems(), steps.n_steps()
    if T == 0:
        raise BadValueError(
            "replay_agent: trajectories hold 0 steps, expected at least 1. Collect with n_timesteps of 1 or more."
        )
    states = agent.states_at(trajectories)
    if states is not None:
        observation = DictTensor({k: v.flatten(0, 1) for k, v in replayed_observation(steps).items()})  # [B * T]
        agent_info = trajectories.info.truncate_key("agent_info/")
        if not agent_info.empty():
            if not agent.agent_info_on_device:
                agent_info = agent_info.to(CPU)
            agent_info = agent_info.map(lambda v: v.repeat_interleave(T, dim=0))  # [B * T]
        output, after = agent(states, observation, agent_info, None)
        outputs = {key: value.view(B, T, *value.shape[1:]) for key, value in output.items()}
        # Trusted: these lengths were checked when the trajectories were made, and looking again is a host read.
        return TemporalDictTensor._trusted(outputs, steps.lengths), after.detach()
    taken: list[DictTensor] = []
    reached: list[DictTensor] = []
    state: DictTensor | None = None
    for t in range(T):
        output, state = agent.call_replay(trajectories, t, state)
        taken.append(output)
        reached.append(state.detach())
    with torch.no_grad():
        new_states = {key: value.flatten(0, 1) for key, value in DictTensor.stack(reached).items()}
    outputs = dict(DictTensor.stack(taken).items())
    return TemporalDictTensor._trusted(outputs, steps.lengths), DictTensor._trusted(new_states)
