"""Factories of executors by name, and the runner of an agent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from rlstruct import renamed
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.core.pytree import TreeSpec
from rlstruct.engine import torch_private
from rlstruct.engine.compiled import Compiled
from rlstruct.engine.graph import Graph, capture_on
from rlstruct.engine.precision import EXACT
from rlstruct.engine.purity import check_repeatable, weights_of
from rlstruct.engine.runner import Make, Runner
from rlstruct.rl_agent import RL_Agent, check_answer

PROMISE: Final = (
    "set `pure = True` on its class if what __call__ returns depends on parameters, buffers and arguments only; "
    "rlstruct.testing.check_agent tests that promise"
)
AgentOutput = tuple[DictTensor, DictTensor]


def compiled_on(device: torch.device) -> Make | None:
    """Return the factory of compiled steps on a device; None if there is no compiler."""
    return Compiled if device.type in ("cpu", "cuda") and not torch_private.missing("compiled") else None


def graph_on(device: torch.device) -> Make | None:
    """Return the factory of graphs on a device; None if it cannot capture."""
    capture = capture_on(device)
    return None if capture is None else functools.partial(Graph, how=capture)


EXECUTORS: Final[dict[str, Callable[[torch.device], Make | None]]] = {"compiled": compiled_on, "graph": graph_on}
"""Functions that return the factory for a device, or None; `torch_private.NEEDED` has the same names."""


def agent_step(agent: RL_Agent) -> Callable[..., AgentOutput]:
    """Wrap an agent as a step: ``step(state, observation, agent_info, history)``."""
    where = f"{type(agent).__name__}.__call__"

    def step(
        state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: TemporalDictTensor | None = None
    ) -> AgentOutput:
        return check_answer(where, agent(state, observation, agent_info, history))

    return step


def agent_runner(agent: RL_Agent, device: torch.device, *, compiled: bool) -> Runner[AgentOutput]:
    """Return a runner of an agent, compiled if requested and possible."""
    why_not = why_not_compiled(agent, device) if compiled else ""
    make = EXECUTORS["compiled"](device) if compiled and not why_not else None
    runner = Runner(agent_step(agent), agent, device, make, alike=True)
    runner.why_not = why_not
    return runner


def why_not_compiled(agent: RL_Agent, device: torch.device) -> str:
    """Return the reason why an agent cannot be compiled; empty if it can."""
    if not agent.pure:
        return f"it does not promise to be pure: {PROMISE}"
    if agent.require_history():
        return "it requires a history, which grows in every step"
    if why_not := torch_private.why_missing("compiled"):
        return why_not
    return "" if compiled_on(device) else f"there is no compiler for {device}"


@torch.no_grad()
def inference_mode_agrees(agent: RL_Agent, *args: Any) -> bool:  # noqa: ANN401 - see `RL_Agent.__call__`
    """Return True if an agent acts the same in torch's inference mode, which computes no gradients. CPU only.

    The agent's tensors and torch's generator are restored.

    Raises:
        PurityError: it acts differently when it is asked again.
    """
    weights = weights_of(agent)
    before = {name: value.clone() for name, value in weights.items()}

    def act(mode: bool) -> AgentOutput:
        with torch.inference_mode(mode), torch.random.fork_rng([]):
            return agent(*args)

    expected = act(mode=False)
    try:
        if any(not torch.equal(value, before[name]) for name, value in weights.items()):
            return False
        actual = act(mode=True)
    except RuntimeError:  # torch refuses gradients and in-place changes in that mode
        return False
    finally:
        for name, value in weights.items():
            if not torch.equal(value, before[name]):
                value.copy_(before[name])
    structure = TreeSpec(expected)
    agrees = structure == TreeSpec(actual) and all(
        one.dtype == other.dtype and torch.equal(one, other)  # sync: once
        for one, other in zip(structure.flatten(expected), structure.flatten(actual), strict=True)
    )
    if not agrees:
        check_repeatable(expected, lambda: act(mode=False), EXACT, torch.device("cpu"))
    return agrees


__getattr__ = renamed.attributes(__name__)
