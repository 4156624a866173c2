"""Values of next observations, which targets and advantages bootstrap from."""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.algos.agent_outputs import missing_outputs
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.layout import as_signed, take_rows
from rlstruct.engine.host_syncs import intended
from rlstruct.engine.torch_private import is_traced
from rlstruct.errors import BadValueError
from rlstruct.profiling import operation
from rlstruct.replay import most_rows, replay_with_states, row_chunks
from rlstruct.rl_agent import RL_Agent


@operation("replay")
def replay_with_next_values(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, Tensor]:
    """Replay an agent with gradients, and compute the value of every true next observation without gradients.

    Args:
        agent: returns ``value`` [B].
        trajectories: [B, T] on the agent's device.

    Returns:
        ``(replayed, next_value)``: the result of `rlstruct.replay_agent` [B, T, ...]; v(s_{t+1}) [B, T], see
        `next_values`.

    Raises:
        KeyError: the agent does not return ``value``.
        ValueError: the trajectories hold no step, or the agent requires a history, which the next observation lacks.
    """
    _refuse_history(agent)
    replayed, states = replay_with_states(agent, trajectories)
    bootstrap = bootstrap_values(agent, trajectories, states)
    return replayed, next_values(replayed["value"].detach(), bootstrap, trajectories)


def next_values(value: Tensor, bootstrap: Tensor, trajectories: Trajectories) -> Tensor:
    """Return the value of every true next observation: that of the next step, or where an episode is cut, a bootstrap.

    Args:
        value: v(s_t) of the stored steps.                  [B, T]
        bootstrap: the result of `bootstrap_values`.        [B, T]
        trajectories: [B, T]

    Returns:
        v(s_{t+1}), without a meaning at padding.  [B, T]
    """
    following = torch.cat([value[:, 1:], bootstrap[:, -1:]], 1)
    return torch.where(_cut(trajectories.steps), bootstrap, following)


def collected_values(agent: RL_Agent, trajectories: Trajectories, key: str = "value") -> tuple[Tensor, Tensor]:
    """Return the values with which a batch was collected, and bootstraps: no gradients.

    If the batch lacks values, or the agent's states have to be computed by acting, the agent is replayed once instead.

    Args:
        agent: returns ``key``.
        trajectories: [B, T] on the agent's device.
        key: name of the values: one per step [B], or one per action [B, A].

    Returns:
        ``(values, bootstrap)``: those of the stored steps, and the result of `bootstrap_values`.  [B, T] or [B, T, A]

    Raises:
        KeyError: the agent does not return ``key``.
    """
    steps = trajectories.steps
    none = steps.lengths[:0]  # no steps: asks only whether the agent can compute its states
    if agent.states_at(trajectories, none) is not None and f"action/{key}" in steps:
        values, states = steps[f"action/{key}"], None
    else:
        replayed, states = replay_with_states(agent, trajectories)
        values = output_of(agent, replayed, key)
    return values, bootstrap_values(agent, trajectories, states, key)


@operation("replay")
@torch.no_grad()
def bootstrap_values(
    agent: RL_Agent, trajectories: Trajectories, states: DictTensor | None = None, key: str = "value"
) -> Tensor:
    """Compute the values of those true next observations that are not the observation of the next stored step.

    There is one after the last step of each row, and one wherever an episode was cut; a restart hides it. The agent
    values each with its new state of step t. On the CPU it is called for these steps alone. Elsewhere, where their
    number would have to be waited for, it is called for all, in chunks of rows.

    Args:
        agent: returns ``key``.
        trajectories: [B, T] on the agent's device.
        states: the agent's new states, from `replay_with_states`; None if `RL_Agent.states_at` computes them.
            [B * T, ...]
        key: see `collected_values`.

    Returns:
        Values, without a meaning at padding and where the next stored step shows the observation.  [B, T] or [B, T, A]

    Raises:
        KeyError: the agent does not return ``key``.
        ValueError: the agent requires a history, which the next observation lacks.
    """
    _refuse_history(agent)
    steps = trajectories.steps
    B, T = steps.n_elems(), steps.n_steps()
    values = []
    if not steps.lengths.is_cpu or is_traced(steps.lengths):
        for start, stop in row_chunks(trajectories):
            after = states and states.slice(start * T, stop * T)
            values.append(_values_after(agent, trajectories.slice(start, stop), None, after, key))
        computed = torch.cat(values)
        return computed.view(B, T, *computed.shape[1:])
    with intended():
        chosen = (_cut(steps) & steps.mask()).flatten().nonzero().squeeze(1)  # sync: of CPU memory
    for some in torch.split(chosen, most_rows(trajectories) * T):
        values.append(_values_after(agent, trajectories, some, states and states.index(some), key))
    computed = torch.cat(values)
    values_by_step = computed.new_zeros(B * T, *computed.shape[1:]).index_copy_(0, chosen, computed)
    return values_by_step.view(B, T, *computed.shape[1:])


def _refuse_history(agent: RL_Agent) -> None:
    if agent.require_history():
        raise BadValueError(
            f"bootstrapping: {type(agent).__name__} requires a history, and there is none after the last step. Collect "
            "whole episodes that terminate, and do not bootstrap."
        )


def _cut(steps: TemporalDictTensor) -> Tensor:
    """Return True at steps [B, T] whose true next observation is not that of the next stored step."""
    times = torch.arange(1, steps.n_steps() + 1, device=steps.device)
    cut = steps["_observation/done"] | (times >= steps.lengths.unsqueeze(1))
    if "observation/initial_state" in steps:  # a restarted worker or a loaded checkpoint may have cut an episode, too
        cut[:, :-1] |= steps["observation/initial_state"][:, 1:]
    return cut


def _values_after(
    agent: RL_Agent, trajectories: Trajectories, chosen: Tensor | None, after: DictTensor | None, key: str
) -> Tensor:
    """Compute the values of the observations after some steps.

    Args:
        agent: returns ``key``.
        trajectories: [B, T]
        chosen: numbers b * T + t of the steps; None for all.  [K] int64
        after: the agent's new states of these steps; None to compute them.  [K, ...]
        key: name of the values.

    Returns:
        [K, ...], or [B * T, ...].
    """
    reached = _single(trajectories, "_observation/", chosen)
    if after is None:
        after = before = agent.states_at(trajectories, chosen) or DictTensor()
        if not before.empty():
            after = agent.call_replay(_single(trajectories, "observation/", chosen, before), 0, None)[1]
    info = reached.info + after.prepend_key("agent_state/")
    return output_of(agent, agent.call_replay(Trajectories.unchecked(info, reached.steps), 0, None)[0], key)


def output_of(agent: RL_Agent, outputs: DictTensor | TemporalDictTensor, key: str) -> Tensor:
    """Return one of an agent's outputs; KeyError if the agent does not return it."""
    if key not in outputs:
        raise missing_outputs(agent, outputs.keys(), ((key,),))
    return outputs[key]


def _single(
    trajectories: Trajectories, prefix: str, chosen: Tensor | None, states: DictTensor | None = None
) -> Trajectories:
    """Turn observations into trajectories of one step, which start with ``states`` [K].  [K, 1]."""
    steps, T = trajectories.steps, trajectories.steps.n_steps()
    row, time = (None, None) if chosen is None else (chosen // T, chosen % T)

    def of_row(value: Tensor) -> Tensor:
        return value.repeat_interleave(T, dim=0) if row is None else take_rows(value, row)

    agent_info = trajectories.info.truncate_key("agent_info/").prepend_key("agent_info/")
    info = agent_info.map(of_row) + (states or DictTensor()).prepend_key("agent_state/")
    flat = {
        key: value.flatten(0, 1) if row is None else as_signed(value)[row, time].view(value.dtype)
        for key, value in steps.truncate_key(prefix).prepend_key("observation/").items()
    }
    ones = torch.ones(len(next(iter(flat.values()))), dtype=torch.int64, device=steps.device)
    return Trajectories.unchecked(
        info, TemporalDictTensor.unchecked({key: value.unsqueeze(1) for key, value in flat.items()}, ones)
    )
