"""Replaying an agent over stored trajectories, with gradients."""

from __future__ import annotations

from itertools import pairwise

import torch

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.errors import BadTypeError, BadValueError, expect_type
from rlstruct.profiling import operation
from rlstruct.rl_agent import CPU, RL_Agent, expect_agent, replayed_observation, replays_sequences

_MOST_STEPS, _MOST_NUMBERS = 1 << 20, 1 << 27
"""Bounds of a call without gradients: number of steps, and of numbers in their observations and states (512 MiB)."""


@operation("replay")
def replay_agent(
    agent: RL_Agent, trajectories: Trajectories, replay_method_name: str | None = None
) -> TemporalDictTensor:
    """Recompute what the agent returned at every step, so that a loss can be differentiated through it.

    If the states of all steps can be computed first (`RL_Agent.states_at`), as for an agent without a state, the agent
    is called once for all B * T steps, as is one that replays sequences (`RL_Agent.replay_sequence`). Otherwise it is
    called step by step, with equal results.

    Args:
        agent: the learner's agent.
        trajectories: [B, T] on the agent's device.
        replay_method_name: argument of rlstructures' function; must be None.

    Returns:
        The agent's outputs under their own names, with the lengths of ``trajectories``.  [B, T, ...]
        Outputs at padding are not meaningful: mask them out of the loss.

    Raises:
        ValueError: the trajectories hold no step.
        TypeError: an argument has the wrong type, or ``replay_method_name`` was given.
        DeviceMismatchError: the agent is an RL_Agent_CheckDevice, and the trajectories are not on its device.
    """
    if replay_method_name is not None:
        raise BadTypeError(
            f"replay_agent: got replay_method_name={replay_method_name!r}, an argument of rlstructures; here it "
            f"is always call_replay. Leave the argument out, and do in call_replay what {replay_method_name} does; a "
            "subclass may replay in another way. Losses that you compute from the outputs go into a plain dict, "
            "{'loss': loss}. docs/migrating_from_rlstructures.md lists every such change."
        )
    expect_agent("replay_agent: agent is", agent)
    fix = "Pass the whole batch of RL_Batcher.get: replay_agent(agent, trajectories)."
    expect_type("replay_agent: trajectories is", trajectories, Trajectories, "Trajectories", fix)
    return replay_with_states(agent, trajectories)[0]


replay_agent_stateless = replay_agent
"""Name of the same function in rlstructures, there for agents without a state."""


def most_rows(trajectories: Trajectories) -> int:
    """Return the number of rows of a batch [B, T] that are few enough for a call without gradients."""
    steps = trajectories.steps
    shapes = [value.shape[2:] for key, value in steps.items() if key.startswith("observation/")]
    shapes += [value.shape[1:] for key, value in trajectories.info.items() if key.startswith("agent_state/")]
    width = max(1, sum(shape.numel() for shape in shapes))
    return max(1, min(_MOST_STEPS, _MOST_NUMBERS // width) // max(1, steps.n_steps()))


def row_chunks(trajectories: Trajectories) -> list[tuple[int, int]]:
    """Return the first row and the end of each chunk of a batch [B, T], small enough for a call without gradients."""
    n_rows = trajectories.n_elems()
    n = max(1, -(-n_rows // most_rows(trajectories)))
    return list(pairwise(n_rows * k // n for k in range(n + 1)))


def replay_with_states(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, DictTensor]:
    """Replay an agent, and also return its new state of every step.

    Without gradients, large batches are replayed in chunks of rows, with results that are equal up to rounding.

    Returns:
        ``(replayed, states)``: the result of `replay_agent` [B, T, ...]; the states, without gradients, with that of
        step t of row b at b * T + t [B * T, ...].
    """
    steps = trajectories.steps
    if steps.n_steps() == 0:
        raise BadValueError(
            "replay_agent: trajectories hold 0 steps, expected at least 1. Collect with n_timesteps of 1 or more."
        )
    chunks = [] if torch.is_grad_enabled() else row_chunks(trajectories)
    # An agent that is called step by step sees few rows in a call. Its states at no steps tell whether this is one.
    at_once = replays_sequences(agent) or agent.states_at(trajectories, steps.lengths[:0]) is not None
    if len(chunks) > 1 and at_once:
        pieces = [_replay(agent, trajectories.slice(start, stop)) for start, stop in chunks]
        joined = {key: torch.cat([outputs[key] for outputs, _ in pieces]) for key in pieces[0][0].keys()}
        after = DictTensor() if pieces[0][1].empty() else DictTensor.cat([states for _, states in pieces])
        return TemporalDictTensor.unchecked(joined, steps.lengths), after
    return _replay(agent, trajectories)


def _replay(agent: RL_Agent, trajectories: Trajectories) -> tuple[TemporalDictTensor, DictTensor]:
    """Replay all rows at once; see `replay_with_states`."""
    steps = trajectories.steps
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
        # Unchecked: the lengths were checked when the trajectories were made, and checking again would be a host sync.
        return TemporalDictTensor.unchecked(outputs, steps.lengths), after.detach()
    if replays_sequences(agent) and (sequence := agent.replay_sequence(trajectories)) is not None:
        output, after = sequence
        outputs = {key: value.view(B, T, *value.shape[1:]) for key, value in output.items()}
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
