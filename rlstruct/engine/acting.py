"""How an agent is called: as it is, or as compiled code where it promises to be pure, and is held to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.engine import private
from rlstruct.engine.compiled import Compiled, Tensors, told
from rlstruct.engine.graph import layout_of
from rlstruct.engine.precision import EXACT, Precision
from rlstruct.engine.promise import MEND, Doubt, PurityError, WeightsWatch, place_of, weights_of, why_unlike
from rlstruct.engine.streams import move
from rlstruct.rl_agent import RL_Agent, check_answer

PROMISE = (
    "set `pure = True` on its class if what __call__ returns depends on parameters, buffers and arguments only; "
    "rlstruct.testing.check_agent tests that promise"
)


class Actor:
    """An agent with its agent_info. Where it is compiled, the first call also lets it act as it is, and compares.

    Attributes:
        agent: the policy.
        agent_info: what it acts with, on the CPU or, if it wants that, on its device.  [B] or empty
        why_not: why it is not compiled though it should be, or "".
        generation: how often other tensors came to stand where its weights were.
    """

    def __init__(self, agent: RL_Agent, device: torch.device, *, compiled: bool) -> None:
        """Compile nothing yet: the first call tells the shapes."""
        self.agent = agent
        self.agent_info = DictTensor()
        self.why_not = _obstacle(agent) if compiled else ""
        self.generation = 0
        self._compiles = compiled and not self.why_not
        self._device = device
        self._weights = WeightsWatch(agent)
        self._doubt = Doubt()
        self._precision: Precision | None = None  # what it computes with, once that was looked at
        self._code: Compiled | None = None
        self._names: list[str | None] = []  # of each tensor that the code holds

    def __call__(
        self, state: DictTensor, observation: DictTensor, history: TemporalDictTensor | None
    ) -> tuple[DictTensor, DictTensor]:
        """Act; see `RL_Agent.__call__`.

        Raises:
            PurityError: the agent promises to be pure, and compiled code gives something else.
        """
        if not self._compiles:
            return self.agent(state, observation, self.agent_info, history)
        after, action = self.run(state._tensors, observation._tensors, self.agent_info._tensors)
        return DictTensor._trusted(action), DictTensor._trusted(after)

    def step(self, state: Tensors, observation: Tensors, agent_info: Tensors) -> tuple[Tensors, Tensors]:
        """Act as a step of `rlstruct.engine` does: the state is the carry, the action the record."""
        answer = self.agent(DictTensor(state), DictTensor(observation), DictTensor(agent_info), None)
        action, after = check_answer(f"{type(self.agent).__name__}.__call__", answer)
        return dict(after.items()), dict(action.items())

    def run(self, *given: Tensors) -> tuple[Tensors, Tensors]:
        """Take the same `step` by compiled code; where there cannot be any, as it is."""
        if self._code is not None:
            after, action = self._code(*given)
            return after, action
        weights = WeightsWatch(self.agent)
        answer, eps = self._step_watched(*given)
        if self._compiles:
            if weights.replaced():
                raise PurityError(f"it puts other tensors into its attributes while it acts. {MEND}")
            self._compile(answer, eps, *given)
        return answer

    @torch.no_grad()
    def doubt(self, state: Tensors, observation: Tensors, action: Tensors) -> None:
        """Act once more as it is, and compare with what an executor gave; see `Doubt`.

        Raises:
            PurityError: the agent has broken its promise since the executor was made.
        """
        (_, expected), eps = self._step_watched(state, observation, self.agent_info._tensors)
        self._doubt.look(expected, action, eps)

    @torch.no_grad()
    def infers_the_same(self, state: DictTensor, observation: DictTensor) -> bool:
        """Let the agent act in torch's inference mode too, and compare, on the CPU.

        An agent that plans with gradients finds none in that mode. One that changes its tensors as it acts gets them
        back, and torch's generator too.

        Raises:
            PurityError: the agent gives something else when it is called again, whatever the mode.
        """
        weights = weights_of(self.agent)
        before = {name: value.clone() for name, value in weights.items()}

        def act(mode: bool) -> Sequence[Tensors]:
            with torch.inference_mode(mode), torch.random.fork_rng([]):
                answer = self.agent(state, observation, self.agent_info, None)
            return [dict(part.items()) for part in answer]

        expected = act(mode=False)
        try:
            if any(not torch.equal(value, before[name]) for name, value in weights.items()):
                return False
            found = act(mode=True)
        except RuntimeError:  # torch's word about gradients and tensors of that mode
            return False
        finally:
            for name, value in weights.items():
                if not torch.equal(value, before[name]):
                    value.copy_(before[name])
        why_unlike(expected, found, lambda: act(mode=False), EXACT, self._device)
        pairs = [(a[key], b.get(key)) for a, b in zip(expected, found, strict=True) for key in a]
        return all(b is not None and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)  # sync: once

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code acts."""
        return self._code is not None

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Give new weights to the agent."""
        self.agent.update(weights)
        self.look_at_weights()

    def look_at_weights(self) -> None:
        """Let the code read the tensors that now stand where the weights were, if these are others than before."""
        if not (self.agent.pure and self._weights.replaced()):
            return
        self.generation += 1
        self._precision = None
        if self._code is not None:
            now = weights_of(self.agent)
            held = zip(self._names, self._code.held, strict=True)
            pairs = [(old, old if name is None else now.get(name)) for name, old in held]
            if all(new is not None and place_of(new)[1:] == place_of(old)[1:] for old, new in pairs):
                self._code.held = [new.detach() for _, new in pairs if new is not None]
            else:  # they have another layout
                self._code = None

    def set_agent_info(self, agent_info: DictTensor) -> None:
        """Give a new agent_info to the agent, [B] or empty, on the CPU."""
        if layout_of(agent_info._tensors) != layout_of(self.agent_info._tensors):
            self._code = None
        wants_device = self.agent.agent_info_on_device and not agent_info.empty()
        self.agent_info = agent_info.map(lambda tensor: move(tensor, self._device)) if wants_device else agent_info

    def _step_watched(self, *given: Tensors) -> tuple[tuple[Tensors, Tensors], float]:
        """Take a step by eager torch; the first time with a look at the numbers that it computes with."""
        if self._precision is None:
            with Precision() as self._precision:
                answer = self.step(*given)
        else:
            answer = self.step(*given)
        return answer, self._precision.eps(self._device)

    def _compile(self, answer: tuple[Tensors, Tensors], eps: float, *given: Tensors) -> None:
        code, before = Compiled(self.step), {key: value.clone() for key, value in weights_of(self.agent).items()}
        try:
            with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
                code.compile(*given)
                found = code(*given)
        except Exception as error:  # whatever tracing and a compiler may say
            self.why_not, self._compiles = told(error), False
            for name, value in weights_of(self.agent).items():
                value.detach().copy_(before[name])  # tracing a change in place makes it
            return
        if why := why_unlike(answer, found, lambda: self.step(*given), eps, self._device):
            self.why_not, self._compiles = why, False
            return
        names = {place_of(tensor): name for name, tensor in weights_of(self.agent).items()}
        self._names = [names.get(place_of(tensor)) for tensor in code.held]
        self._code = code


def _obstacle(agent: RL_Agent) -> str:
    """Say why an agent cannot be compiled; empty if it can."""
    if not agent.pure:
        return f"it does not promise to be pure: {PROMISE}"
    if agent.require_history():
        return "it wants a history, which is longer in every step"
    names = private.missing("compiled")
    return f"torch {torch.__version__} lacks {', '.join(names)}" if names else ""
