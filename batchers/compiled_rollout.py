"""Steps of a compiled agent and a compiled simulator as one compiled function, which writes into the rollout buffer."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rlstruct.batchers.rollout_buffer import RolloutBuffer
from rlstruct.core import DictTensor
from rlstruct.core.named_tensors import part_of
from rlstruct.engine.compiled import is_mask, mask_bytes
from rlstruct.engine.donated import Donated
from rlstruct.engine.executors import AgentOutput, agent_step, compiled_on
from rlstruct.engine.runner import Runner
from rlstruct.rl_agent import RL_Agent
from rlstruct.vec_env import PureStep


class CompilableEnv(Protocol):
    """A simulator whose step is a pure function, such as a `rlstruct.sims.TensorEnv`."""

    def pure_step(self, action: DictTensor) -> PureStep | None:
        """Check an action, and return the step as a pure function; None if nothing is to be compiled."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the simulation by name; see `rlstruct.vec_env.Capturable`."""

    def set_state_tensors(self, tensors: dict[str, Tensor], shown: dict[str, Tensor]) -> None:
        """Continue from such tensors and the observation there, which are kept without a copy."""


class CompiledRollout:
    """The steps of one agent in one simulator that restarts itself, on the CPU.

    Args:
        agent: pure, without a history.
        env: the simulator.
        step: its step.

    Attributes:
        runner: of a step of both.
    """

    def __init__(self, agent: RL_Agent, env: CompilableEnv, step: PureStep) -> None:
        self._agent, self._env, self._step = agent_step(agent), env, step
        cpu = torch.device("cpu")
        name = "agent and simulator"
        self.runner: Runner[Any] = Runner(self._act_and_step, agent, cpu, compiled_on(cpu), alike=True, operation=name)
        self._carry = {key: value.clone() for key, value in env.state_tensors().items()}
        self._memory: WeakKeyDictionary[RolloutBuffer, list[Donated]] = WeakKeyDictionary()
        self._rows: list[Donated] = []  # memory of each step of the present batch
        self._eager = True  # the next call is the first, in which the agent itself gets the buffer's memory

    def begin(self, buffer: RolloutBuffer) -> None:
        """Prepare the steps of a batch, from the present state of the simulator.

        Args:
            buffer: to write to; it holds the first observation.
        """
        if buffer not in self._memory:
            carry = {f"carry/{key}": value for key, value in self._carry.items()}
            views = [{k: v.view(torch.uint8) if is_mask(v) else v for k, v in row.items()} for row in buffer.rows()]
            self._memory[buffer] = [Donated({**carry, **row}) for row in views]
        self._rows = self._memory[buffer]
        now = self._env.state_tensors()
        torch._foreach_copy_([*self._carry.values()], [now[key] for key in self._carry])
        buffer.running.fill_(True)
        self._eager = self.runner.executor == "eager"

    def act(
        self, buffer: RolloutBuffer, t: int, state: DictTensor, agent_info: DictTensor, history: object = None
    ) -> AgentOutput:
        """Let the agent act and the simulator step, in one call; see `rlstruct.batchers.steps.Act`.

        Returns:
            The frames that the step reached, for `RolloutBuffer.write_final_frames`, in place of the action; and the
            agent's state.
        """
        memory = self._rows[t]
        before = {key: value[t].clone() for key, value in buffer.stream.items()} if self._eager else None
        state, frames, new = self.runner(state, buffer.shown[t], agent_info, memory)
        if before is not None:
            self._eager = False
            buffer.check_unchanged(t, before)
        for key, value in new.items():  # eagerly, or in the first call of compiled code
            memory[key].copy_(value)
        return frames, state

    def finish(self, buffer: RolloutBuffer, T: int) -> None:
        """Give the simulator the state after T steps."""
        shown = {key: value.clone() for key, value in buffer.slots[T].items()}
        self._env.set_state_tensors({key: value.clone() for key, value in self._carry.items()}, shown)

    def _act_and_step(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, memory: dict[str, Tensor]
    ) -> tuple[DictTensor, DictTensor, dict[str, Tensor]]:
        """Return the agent's next state, the frames reached, and what goes into the memory: a pure function.

        The memory holds ``carry/…`` and `RolloutBuffer.rows`, masks as bytes.  [B, ...] each.
        """
        action, state = self._agent(state, observation, agent_info)
        changed, current, reached = self._step(part_of(memory, "carry/"), dict(action.items()))
        rows = {f"action/{key}": value for key, value in action.items()}
        rows |= {f"current/{key}": value for key, value in current.items()}
        rows |= {name: value for key, value in reached.items() if (name := f"reached/{key}") in memory}
        rows["restarted"] = reached["done"]
        frames = DictTensor.unchecked({key: value for key, value in reached.items() if f"reached/{key}" not in rows})
        rows = {key: mask_bytes(value) if is_mask(value) else value for key, value in rows.items()}
        return state, frames, {**rows, **{f"carry/{key}": value for key, value in changed.items()}}
