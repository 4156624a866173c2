"""Replaying an agent over stored trajectories, with gradients."""

from __future__ import annotations

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadValueError
from rlstruct.profiling import operation
from rlstruct.rl_agent import CPU, RL_Agent, RL_Agent_CheckDevice, replayed_observation


@operation("replay")
def replay_agent(agent: RL_Agent, trajectories: Trajectories) -> TemporalDictTensor:
    """Recompute what the agent returned at every step, so that a loss can be differentiated through it.

    An agent that keeps a state (or wants a history, or has a `call_replay` of its own) is called step by step through
    its state; any other is called once over all B * T steps, with equal results.

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
    if _one_call_is_enough(agent, trajectories):
        return replay_agent_stateless(agent, trajectories)
    n_steps = _checked_n_steps(agent, trajectories)
    outputs: list[DictTensor] = []
    state: DictTensor | None = None
    for t in range(n_steps):
        output, state = agent.call_replay(trajectories, t, state)
        outputs.append(output)
    stacked = DictTensor.stack(outputs)  # [B, T]
    return TemporalDictTensor._trusted(dict(stacked.items()), trajectories.trajectories.lengths)


def replay_agent_stateless(agent: RL_Agent, trajectories: Trajectories) -> TemporalDictTensor:
    """Do what `replay_agent` does with an agent that keeps no state and wants no history, in one call."""
    steps = trajectories.trajectories
    B, T = steps.n_elems(), _checked_n_steps(agent, trajectories)
    observation = DictTensor({k: v.flatten(0, 1) for k, v in replayed_observation(steps).items()})  # [B * T]
    agent_info = trajectories.info.truncate_key("agent_info/")
    if not agent_info.empty():
        if not agent.agent_info_on_device:
            agent_info = agent_info.to(CPU)
        agent_info = agent_info.map(lambda v: v.repeat_interleave(T, dim=0))  # [B * T]
    output, _ = agent(DictTensor(), observation, agent_info, None)
    # Trusted: these lengths were checked when the trajectories were made, and looking at them again is a host read.
    return TemporalDictTensor._trusted({k: v.view(B, T, *v.shape[1:]) for k, v in output.items()}, steps.lengths)


def _one_call_is_enough(agent: RL_Agent, trajectories: Trajectories) -> bool:
    inner = agent.agent if isinstance(agent, RL_Agent_CheckDevice) else agent
    keeps_state = any(key.startswith("agent_state/") for key in trajectories.info.keys())
    return not keeps_state and not agent.require_history() and type(inner).call_replay is RL_Agent.call_replay


def _checked_n_steps(agent: RL_Agent, trajectories: Trajectories) -> int:
    if isinstance(agent, RL_Agent_CheckDevice):
        agent.check_trajectories(trajectories)
    n_steps = trajectories.trajectories.n_steps()
    if n_steps == 0:
        raise BadValueError(
            "replay_agent: trajectories hold 0 steps, expected at least 1. Collect with n_timesteps of 1 or more."
        )
    return n_steps
