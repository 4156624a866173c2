"""The outputs of agents that algorithms learn from: their names and shapes, and what is wrong with an agent's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlstruct.core import TensorSpec
from rlstruct.errors import BadKeyError, BadTypeError, ShapeMismatchError
from rlstruct.rl_agent import RL_Agent, RL_Agent_CheckDevice

Alternatives = Sequence[Sequence[str]]
"""Names of outputs. An agent returns all of at least one alternative; without alternatives nothing is required."""

POLICY_AND_VALUE: Alternatives = (("value", "action_logits"), ("value", "action_mean", "action_log_std"))
"""Of PPO, A2C and REINFORCE: discrete actions, or continuous ones."""

ACTION_VALUES: Alternatives = (("action_values",),)
"""Of DQN and PQN."""


class _Form(NamedTuple):
    wanted: str
    fix: str
    example: str  # agent that returns it
    n_axes: tuple[int, ...]  # that it may have behind that of the environments
    per_action: bool = False  # along the last axis


_NUMBER, _ENTRIES = "[B], one number per environment", "[B, D], one number per entry of the action"
_CHOICES = "[B, A], one number for each of at least two actions"
_FORMS = {
    "value": _Form(_NUMBER, "Return a single value of each environment's observation.", "ActorCriticAgent", (0,)),
    "log_probability": _Form(_NUMBER, "Sum over the entries of an action: sum(-1).", "SquashedGaussianAgent", (0,)),
    "action_values": _Form(_CHOICES, "Return the values of all actions.", "QAgent", (1,), per_action=True),
    "action_logits": _Form(
        f"{_CHOICES}, or [B, K, A] for K actions at once",
        "Return the logits of all actions.",
        "ActorCriticAgent",
        (1, 2),
        per_action=True,
    ),
    "action_mean": _Form(_ENTRIES, "Keep the axis of the entries, even if there is one.", "GaussianAgent", (1,)),
    "action_log_std": _Form(_ENTRIES, "Keep the axis of the entries, even if there is one.", "GaussianAgent", (1,)),
}


def _shape(name: str) -> str:
    return _FORMS[name].wanted.partition(", one")[0]


def name_of(agent: RL_Agent) -> str:
    """Return the name of the class that the user wrote or chose, also inside of `RL_Agent_CheckDevice`."""
    while isinstance(agent, RL_Agent_CheckDevice):
        agent = agent.agent
    return type(agent).__name__


def lacking(returned: Mapping[str, object], alternatives: Alternatives) -> bool:
    """Return True if outputs contain none of the alternatives."""
    return bool(alternatives) and not any(all(name in returned for name in names) for names in alternatives)


def check_outputs(agent: RL_Agent, returned: Mapping[str, TensorSpec], alternatives: Alternatives) -> None:
    """Raise unless an algorithm can learn from an agent's outputs.

    Args:
        agent: whose outputs they are.
        returned: shapes without the axis of the environments, and dtypes.
        alternatives: what the algorithm learns from.

    Raises:
        KeyError: they contain none of the alternatives.
        ValueError: an output has another shape than its name asks for.
        TypeError: an output does not hold floats.
    """
    if lacking(returned, alternatives):
        missing = [[name for name in names if name not in returned] for names in alternatives]
        least = [names for names in missing if not any(set(other) < set(names) for other in missing)]
        wanted = ", or ".join(" and ".join(f"{name!r} {_shape(name)}" for name in names) for names in least)
        raise BadKeyError(
            f"{name_of(agent)}.__call__: returned {sorted(returned)}, expected {wanted} as well, from which the "
            f"algorithm learns. Return it next to 'action', as rlstruct.agents.{_FORMS[least[0][0]].example} does; "
            "docs/your_own.md lists the outputs that each algorithm needs."
        )
    for name, form in _FORMS.items():
        if name not in returned:
            continue
        shape, dtype = returned[name]
        at = f"{name_of(agent)}.__call__: {name!r} is"
        if not dtype.is_floating_point:
            raise BadTypeError(f"{at} {dtype}, expected floats: {form.wanted}. Return the network's numbers.")
        fits = len(shape) in form.n_axes
        if fits and not (form.per_action and shape[-1] == 1):
            continue
        squeezed = not fits and shape[-1:] == (1,) and len(shape) - 1 in form.n_axes
        fix = "Remove the last axis: squeeze(-1)." if squeezed else form.fix
        raise ShapeMismatchError(f"{at} [{', '.join(['B', *map(str, shape)])}], expected {form.wanted}. {fix}")
