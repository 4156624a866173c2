"""An agent's step as compiled code, wherever that does what the agent does. Part of rlstruct.batchers.

Compiled code repeats what Python did when it was traced. So the agent acts once as it is, the code is made and must
give the same answer; before every batch everything else that the agent holds is compared with what it was then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlstruct.batchers.fingerprint import Fingerprint, fingerprint, first_change, host_generators
from rlstruct.batchers.shared_memory import layout_of
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.engine.compiled import Compiled
from rlstruct.rl_agent import RL_Agent, check_answer

# So many compilations in a row that served for one batch only are worse than none.
_MOST_COMPILATIONS = 3
# Compiled code fuses and so rounds otherwise; a wrong answer is further off.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


class CompiledAgent:
    """Acts as an agent does, without gradients.

    Args:
        agent: the agent. Its weights may change between two batches, in place or by other tensors of the same layout.
        device: where it acts.

    Attributes:
        why_not: why the agent acts as it is after all, or "".
    """

    def __init__(self, agent: RL_Agent, device: torch.device) -> None:
        """Compile nothing yet: the first step tells the shapes."""
        self.why_not = "it wants a history, which is longer in every step" if agent.require_history() else ""
        self._agent = agent
        self._device = device
        self._code: Compiled | None = None
        self._frozen: Fingerprint = {}
        self._paths: list[str | None] = []  # where the agent keeps each tensor that the code holds
        self._n_compilations = 0

    def look(self, agent_info: DictTensor) -> bool:
        """Before a batch: let the code read the agent's tensors of now, or have it made again.

        Args:
            agent_info: as the next calls get it.

        Returns:
            Whether there is code. It changes nothing in place that it is given.
        """
        if self._code is None:
            return False
        frozen, tensors = self._look(agent_info)
        changed = first_change(self._frozen, frozen)
        if changed is None:
            self._n_compilations = 0
            held = zip(self._paths, self._code.held, strict=True)
            self._code.held = [old if path is None else tensors[path].detach() for path, old in held]
            return True
        self._code = None
        if self._n_compilations == _MOST_COMPILATIONS:
            self.why_not = f"{changed} is another one in every batch. Keep it in a tensor"
        return False

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Act; see `RL_Agent.__call__`."""
        if self._code is not None:
            action, new_state = self._code(state._tensors, observation._tensors, agent_info._tensors)
            return DictTensor._trusted(action), DictTensor._trusted(new_state)
        if self.why_not:
            return self._agent(state, observation, agent_info, history)
        return self._act_and_compile(state, observation, agent_info)

    def _act_and_compile(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor
    ) -> tuple[DictTensor, DictTensor]:
        before, generator = self._everything(agent_info), torch.get_rng_state()
        answer = check_answer(type(self._agent).__name__, self._agent(state, observation, agent_info, None))
        changed = first_change(before, self._everything(agent_info))
        if changed is not None:
            self.why_not = f"{changed} changes while it acts. Return it as a state; draw from observation['rng']"
            return answer
        code, given = Compiled(self._tensors_only), (state._tensors, observation._tensors, agent_info._tensors)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            try:
                code.compile(*given)
                torch.set_rng_state(generator)  # an agent that draws from it has to draw the same again
                self.why_not = _difference(answer, code(*given))
            except Exception as error:  # whatever tracing and a compiler may say
                self.why_not = f"{type(error).__name__}: {_first_line(error)}"
        if not self.why_not:
            self._frozen, tensors = self._look(agent_info)
            paths = {_place(tensor): path for path, tensor in tensors.items()}
            self._paths = [paths.get(_place(tensor)) for tensor in code.held]
            self._code = code
            self._n_compilations += 1
        return answer

    def _tensors_only(
        self, state: dict[str, Tensor], observation: dict[str, Tensor], agent_info: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        answer = self._agent(DictTensor(state), DictTensor(observation), DictTensor(agent_info), None)
        action, new_state = check_answer(type(self._agent).__name__, answer)
        return dict(action.items()), dict(new_state.items())

    def _everything(self, agent_info: DictTensor) -> Fingerprint:
        """What must be the same after the agent has acted: the values of its tensors, too."""
        found, tensors = self._look(agent_info)
        versions = {path: (found[path], tensor.data_ptr(), _version(tensor)) for path, tensor in tensors.items()}
        return found | versions | host_generators(self._device)

    def _look(self, agent_info: DictTensor) -> tuple[Fingerprint, dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        found = fingerprint(self._agent, self._device, "agent", tensors)
        return found | {"agent_info": layout_of(dict(agent_info.items()))}, tensors


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> object:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _difference(answer: tuple[DictTensor, DictTensor], again: list[dict[str, Tensor]]) -> str:
    """Say which tensor compiled code computes otherwise, "" if there is none."""
    for expected, found in zip(answer, again, strict=True):
        for key, value in expected.items():
            close = torch.equal(value, found[key])  # sync: this and the next, once when the code is made
            if not close and value.is_floating_point():
                close = torch.allclose(value, found[key], _RELATIVE, _ABSOLUTE, equal_nan=True)
            if not close:
                return f"compiled code gives another {key!r}. Draw random numbers from observation['rng']"
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
