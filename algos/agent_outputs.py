"""The outputs of agents that algorithms learn from: their names and shapes, and what is wrong with an agent's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from rlstruct.core import TensorSpec
from rlstruct.errors import BadKeyError, BadTypeError, ShapeMismatchError
from rlstruct.rl_agent import RL_Agent, unwatched

Alternatives = Sequence[Sequence[str]]
"""Names of outputs. An agent returns all of at least one alternative; without alternatives nothing is required."""

POLICY_AND_VALUE: Alternatives = (("value", "action_logits"), ("value", "action_mean", "action_log_std"))
"""Of A2C and REINFORCE: discrete actions, or continuous ones."""

WITH_PROBABILITY: Alternatives = tuple((*names, "log_probability") for names in POLICY_AND_VALUE)
"""The same, and with which probability the action was chosen."""

ACTION_VALUES: Alternatives = (("action_values",),)
"""Of DQN and PQN."""


class _Form(NamedTuple):
    shape: str
    holds: str
    n_axes: tuple[int, ...]  # that it may have behind that of the environments
    fix: str
    example: str  # agent that returns it


_EACH = "Keep the axis of the entries, even if there is one."
_FORMS = {
    "value": _Form("[B]", "one number per environment", (0,), "Return one value per environment.", "ActorCriticAgent"),
    "log_probability": _Form(
        "[B]",
        "one number per environment",
        (0,),
        "Sum over an action's entries: sum(-1).",
        "SquashedGaussianAgent",
    ),
    "action_values": _Form("[B, A]", "one number per action", (1,), "Return the values of all actions.", "QAgent"),
    "action_logits": _Form(
        "[B, A]",
        "one number per action, or [B, K, A] for K actions at once",
        (1, 2),
        "Return the logits of all actions.",
        "ActorCriticAgent",
    ),
    "action_mean": _Form("[B, D]", "one number per entry of the action", (1,), _EACH, "GaussianAgent"),
    "action_log_std": _Form("[B, D]", "one number per entry of the action", (1,), _EACH, "GaussianAgent"),
}


def name_of(agent: RL_Agent) -> str:
    """Return the name of the class of the user's agent, see `unwatched`."""
    return type(unwatched(agent)).__name__


def lacking(returned: Collection[str], alternatives: Alternatives) -> bool:
    """Return True if outputs contain none of the alternatives."""
    return bool(alternatives) and not any(all(name in returned for name in names) for names in alternatives)


def missing_outputs(agent: RL_Agent, returned: Collection[str], alternatives: Alternatives) -> BadKeyError:
    """Create the error for an agent whose outputs contain none of the alternatives."""
    missing = dict.fromkeys(tuple(name for name in names if name not in returned) for names in alternatives)
    least = [names for names in missing if not any(set(other) < set(names) for other in missing)]
    shapes = {name: f"{name!r} {form.shape}" for name, form in _FORMS.items()}
    wanted = ", or ".join(" and ".join(shapes.get(name, repr(name)) for name in names) for names in least)
    form = _FORMS.get(least[0][0])
    example = "" if form is None else f", as rlstruct.agents.{form.example} does"
    return BadKeyError(
        f"{name_of(agent)}.__call__: returned {sorted(returned)}, expected {wanted} as well, from which the algorithm "
        f"learns. Return it next to 'action'{example}; docs/your_own.md lists what each algorithm needs."
    )


def check_outputs(agent: RL_Agent, returned: Mapping[str, TensorSpec], alternatives: Alternatives) -> None:
    """Raise unless an algorithm can learn from an agent's outputs. What it does not learn from may have any shape.

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
        raise missing_outputs(agent, returned, alternatives)
    read = {name for names in alternatives if not lacking(returned, (names,)) for name in names}
    for name in sorted(read & _FORMS.keys()):
        form, (shape, dtype) = _FORMS[name], returned[name]
        at, wanted = f"{name_of(agent)}.__call__: {name!r} is", f"{form.shape}, {form.holds}"
        if not dtype.is_floating_point:
            raise BadTypeError(f"{at} {dtype}, expected floats: {wanted}. Return the network's numbers.")
        if len(shape) not in form.n_axes:
            squeezed = shape[-1:] == (1,) and len(shape) - 1 in form.n_axes
            fix = "Remove the last axis: squeeze(-1)." if squeezed else form.fix
            raise ShapeMismatchError(f"{at} [{', '.join(['B', *map(str, shape)])}], expected {wanted}. {fix}")
