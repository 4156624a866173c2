"""How a collector's agent is called: as it is, or compiled where it promises to be pure."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.engine.compiled import Tensors
from rlstruct.engine.graph import layout_of
from rlstruct.engine.promise import CompiledStep, Weights
from rlstruct.engine.streams import move
from rlstruct.rl_agent import RL_Agent, check_answer

PROMISE = (
    "set `pure = True` on its class if what __call__ returns depends on parameters, buffers and arguments only; "
    "rlstruct.testing.check_agent tests that promise"
)


class Actor:
    """An agent with its agent_info.

    Args:
        agent: the policy.
        device: where observations, states and actions are.
        compiled: whether to compile what it does.

    Attributes:
        agent: the policy.
        agent_info: what it acts with, on the CPU or, if it wants that, on its device.  [B] or empty
        why_not: why it is not compiled though it should be, or "".
        generation: how often other tensors came to stand where its weights were.
    """

    def __init__(self, agent: RL_Agent, device: torch.device, *, compiled: bool) -> None:
        """Compile nothing yet."""
        self.agent = agent
        self.agent_info = DictTensor()
        self.why_not = ""
        self.generation = 0
        self._device = device
        self._name = type(agent).__name__
        self._weights = Weights(agent)
        self._compiled = CompiledStep(self._step, agent, device) if compiled and agent.pure else None
        if compiled and not agent.pure:
            self.why_not = f"it does not promise to be pure: {PROMISE}"
        elif compiled and agent.require_history():
            self.why_not, self._compiled = "it wants a history, which is longer in every step", None

    def __call__(
        self, state: DictTensor, observation: DictTensor, history: TemporalDictTensor | None
    ) -> tuple[DictTensor, DictTensor]:
        """Act; see `RL_Agent.__call__`.

        Raises:
            PurityError: the agent promises to be pure, and is not.
        """
        if self._compiled is None:
            return self.agent(state, observation, self.agent_info, history)
        after, action = self._compiled(state._tensors, observation._tensors, self.agent_info._tensors)
        if self._compiled.why_not:
            self.why_not, self._compiled = self._compiled.why_not, None
        return DictTensor._trusted(action), DictTensor._trusted(after)

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Give new weights to the agent."""
        self.agent.update(weights)
        self.look_at_weights()

    def look_at_weights(self) -> None:
        """Find out whether what was compiled or recorded, and knows the agent's tensors, must look for them again."""
        if self.agent.pure and self._weights.replaced():
            self.generation += 1
            if self._compiled is not None:
                self._compiled.refresh()

    def set_agent_info(self, agent_info: DictTensor) -> None:
        """Give a new agent_info to the agent, [B] or empty, on the CPU."""
        if self._compiled is not None and layout_of(agent_info._tensors) != layout_of(self.agent_info._tensors):
            self._compiled.forget()
        wants_device = self.agent.agent_info_on_device and not agent_info.empty()
        self.agent_info = agent_info.map(lambda tensor: move(tensor, self._device)) if wants_device else agent_info

    def _step(self, state: Tensors, observation: Tensors, agent_info: Tensors) -> tuple[Tensors, Tensors]:
        """What the agent does, as a step of `rlstruct.engine`: its state is the carry."""
        answer = self.agent(DictTensor(state), DictTensor(observation), DictTensor(agent_info), None)
        action, after = check_answer(self._name, answer)
        return dict(after.items()), dict(action.items())
