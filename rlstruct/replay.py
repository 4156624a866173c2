"""Replaying an agent over stored trajectories, with gradients."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadTypeError, BadValueError
from rlstruct.profiling import operation
from rlstruct.rl_agent import CPU, RL_Agent, replayed_observation

_MOST_STEPS, _MOST_NUMBERS = 1 << 20, 1 << 27
"""Most steps that a network judges in one call without gradients, and most numbers that it sees there: 512 MiB."""


@operation("replay")
def replay_agent(
    agent: RL_Agent, trajectories: Trajectories, replay_method_name: str | None = None
) -> TemporalDictTensor:
    """Recompute what the agent returned at every step, so that a loss can be differentiated through it.

    An agent whose states are known beforehand, see `RL_Agent.states_at`, is called once over all B * T steps: one that
    keeps no state, for example. Any other is called step by step through its state, with equal results.

    Args:
        agent: the learner's agent.
        trajectories: [B, T] on the agent's device.
        replay_method_name: an argument of rlstructures, refused here.

    Returns:
        The agent's outputs under their own names, with the lengths of ``trajectories``.  [B, T, ...]
        Padding is computed like real steps: mask it out of the loss.

    Raises:
        ValueError: the trajectories hold no step.
        TypeError: a method was named.
        DeviceMismatchError: the agent is an RL_Agent_CheckDevice, and the trajectories are not on its device.
    """
    if replay_method_name is not None:
        raise BadTypeError(
            f"replay_agent: got replay_method_name={replay_method_name!r}, which rlstructures takes; here it is always "
            f"call_replay. Leave the argument out, and let call_replay do what {replay_method_name} does; a subclass "
            "may replay in another way. Losses that you compute from the outputs go into a plain dict, {'loss': loss}. "
            "docs/migrating_from_rlstructures.md lists every such change."
        )
    return replay_with_states(agent, trajectories)[0]


replay_agent_stateless = replay_agent
"""The name that rlstructures has for agents without a state."""


def chunks_of(trajectories: Trajectories) -> list[Trajectories]:
    """Split the rows of a batch [B, T], so that a network without gradients needs little memory: seldom, for pixels."""
    steps = trajectories.trajectories
    seen = [value.shape[2:] for key, value in steps.items() if key.startswith("observation/")]
    seen += [value.shape[1:] for key, value in trajectories.info.items() if key.startswith("agent_state/")]
    width = max(1, sum(shape.numel() for shape in seen))
    n_rows = max(1, min(_MOST_STEPS, _MOST_NUMBERS // width) // max(1, steps.n_steps()))
    n = -(-steps.n_elems() // n_rows)
    bounds = [steps.n_elems() * k // n for k in range(n + 1)]
    return [trajectories.slice(start, stop) for start, stop in pairwise(bounds)] if n > 1 else [trajectories]


def replay_with_states(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, DictTensor]:
    """Do what `replay_agent` does, and return the agent's new state of every step, too.

    Without gradients, large batches are replayed in chunks of rows, with results that are equal to rounding.

    The states have no gradients; that of step t of row b is at b * T + t.  [B * T, ...]
    """
    steps = trajectories.trajectories
    if steps.n_steps() == 0:
        raise BadValueError(
            "replay_agent: trajectories hold 0 steps, expected at least 1. Collect with n_timesteps of 1 or more."
        )
    chunks = [trajectories] if torch.is_grad_enabled() else chunks_of(trajectories)
    # Asks of no step: an agent that is called step by step sees few rows in a call anyhow.
    if len(chunks) > 1 and agent.states_at(trajectories, steps.lengths[:0]) is not None:
        found = [_replay(agent, chunk) for chunk in chunks]
        joined = {key: torch.cat([outputs[key] for outputs, _ in found]) for key in found[0][0].keys()}
        after = DictTensor() if found[0][1].empty() else DictTensor.cat([states for _, states in found])
        return TemporalDictTensor.unchecked(joined, steps.lengths), after
    return _replay(agent, trajectories)


def _replay(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, DictTensor]:
    """Replay all rows at once, see `replay_with_states`."""
    steps = trajectories.trajectories
    B, T = steps.n_elems(), steps.n_steps()
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
        return TemporalDictTensor.unchecked(outputs, steps.lengths), after.detach()
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
    return TemporalDictTensor.unchecked(outputs, steps.lengths), DictTensor.unchecked(new_states)


@operation("replay")
def replay_with_next_values(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, Tensor]:
    """Replay an agent with gradients, and judge the true next observation of every step without.

    The next observations include the final ones that a restart hides; each is judged with the agent's new state of step
    t, all in one call, large batches in chunks of rows.

    Args:
        agent: returns ``value`` [B].
        trajectories: [B, T] on the agent's device.

    Returns:
        ``(replayed, next_value)``: what `rlstruct.replay_agent` returns [B, T, ...]; v(s_{t+1}) [B, T].

    Raises:
        ValueError: the trajectories hold no step, or the agent wants a history, which ends before the next observation.
    """
    if agent.require_history():
        raise BadValueError(
            f"replay_with_next_values: {type(agent).__name__} wants a history, and there is none after the last step. "
            "Collect whole episodes that terminate, and do not bootstrap."
        )
    replayed, states = replay_with_states(agent, trajectories)
    with torch.no_grad():
        judged: list[Tensor] = []
        first, T = 0, trajectories.trajectories.n_steps()
        for chunk in chunks_of(trajectories):
            stop = first + chunk.n_elems() * T
            following, _ = agent.call_replay(_next_steps(chunk, states.slice(first, stop)), 0, None)
            judged.append(following["value"])
            first = stop
    value = torch.cat(judged) if len(judged) > 1 else judged[0]
    return replayed, value.view(-1, T)  # [B, T]


def _next_steps(trajectories: Trajectories, states: DictTensor) -> Trajectories:
    """Make a trajectory of one step of every next observation, starting from the state there: [B * T, 1]."""
    steps = trajectories.trajectories
    given = trajectories.info.truncate_key("agent_info/").prepend_key("agent_info/")
    info = given.map(lambda value: value.repeat_interleave(steps.n_steps(), dim=0)) + states.prepend_key("agent_state/")
    reached = steps.truncate_key("_observation/").prepend_key("observation/")
    single = {key: value.flatten(0, 1).unsqueeze(1) for key, value in reached.items()}
    ones = torch.ones_like(steps.lengths).repeat_interleave(steps.n_steps())
    return Trajectories.unchecked(info, TemporalDictTensor.unchecked(single, ones))
