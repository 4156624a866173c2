"""The collection loop: one agent acts in one VecEnv for T steps and writes every step into a rollout buffer.

The same loop runs in the user's process (``n_processes=0``) and in every worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.compiled_rollout import CompiledRollout
from rlstruct.batchers.progress import Phase, Progress, describe_arguments
from rlstruct.batchers.rollout_buffer import (
    Allocate,
    Rollout,
    RolloutBuffer,
    history_until,
)
from rlstruct.batchers.saved_state import CollectorState, check_rows, load_environment, on_cpu
from rlstruct.batchers.steps import Act, FirstBatch, Step, expect_rows, step_in_place
from rlstruct.batchers.validation import BatchValidator
from rlstruct.core import DictTensor, Layout
from rlstruct.engine.executors import AgentOutput, agent_runner
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import move
from rlstruct.engine.validity import unchecked
from rlstruct.errors import DeviceMismatchError
from rlstruct.functional.random import step_keys
from rlstruct.rl_agent import RL_Agent, check_answer
from rlstruct.vec_env import Capturable, VecEnv

# Checking whether every episode has ended stalls an accelerator, so check only once in this many steps.
_STEPS_BETWEEN_CHECKS = 16
STEPS_BETWEEN_PROBES = 500
"""A compiled or captured agent repeats one step in so many eagerly, to check its promise to be pure."""
_AGENT, _ENVIRONMENT = int(Phase.AGENT), int(Phase.ENVIRONMENT)
LoopState = tuple[dict[str, Tensor], DictTensor, DictTensor, DictTensor, Tensor, Tensor, Tensor]
"""Environment state; observation, agent state, agent_info; `running` mask, episode number, next step numbers."""


@dataclass(frozen=True)
class Collected:
    """Summary of a finished batch, whose steps are in the rollout buffer."""

    n_steps: int  # steps taken: T, or fewer if every episode ended early
    first_step: int  # number of steps between the last reset and this batch
    version: int  # version of the weights that the agent used
    executor: str = "eager"  # "kernel", "graph", "compiled" or "eager"
    uncompiled: str = ""  # why compile_agent=True had no effect, or ""
    reused: bool = True  # the next batch overwrites the steps; False: their memory passes to the caller, without a copy


class Collector:
    """One agent in one VecEnv. Each batch continues for T steps from where the last one stopped.

    The random stream of environment b has the seed ``seed + b``. ``allocate`` is called once the layout of a buffer is
    known, which is after the agent's first action. Without it, buffers are on the device. On an accelerator the caller
    then keeps the memory of a batch, and the next one gets new memory; on the CPU a copy is faster.

    Attributes:
        steps: the steps of the last batch; see `Collected.reused`.
        running: True for environments whose episode continues.  [B] bool
        layout: layout of a buffer; empty before the first batch.

    Raises:
        DeviceMismatchError: the environment lives on another device.
    """

    def __init__(
        self,
        env: VecEnv,
        agent: RL_Agent,
        *,
        n_timesteps: int,
        device: torch.device,
        seed: int,
        progress: Progress,
        allocate: Allocate | None = None,
        compile_agent: bool = False,
    ) -> None:
        if env.device != device:
            raise DeviceMismatchError(
                f"RL_Batcher: {type(env).__name__} is on {env.device}, expected {device}, the batcher's device. "
                f"Return DeviceEnv(env, {str(device)!r}) from create_env, "
                f"or give the batcher device={str(env.device)!r}."
            )
        self.env = env
        self.agent, self.agent_info = agent, DictTensor()
        self._runner = agent_runner(agent, device, compiled=compile_agent)
        self._runners: list[Runner[Any]] = [self._runner]  # all runners that depend on the agent's weights
        self._call: Callable[..., AgentOutput] = self._runner if compile_agent else agent
        self._first: FirstBatch | None = FirstBatch(agent, env, self._call)  # until a batch has been taken step by step
        self._act: Act = self._first.act
        self._step_env: Step = self._first.step
        self._rollout: CompiledRollout | None = None  # of agent and simulator together; set in the first batch
        self._buffer: RolloutBuffer | None = None  # holds the last batch, then the next; allocated on first use
        self.steps: Rollout
        self.layout = Layout()
        self.version = 0
        self._T = self.n_timesteps = n_timesteps
        self._device = device
        self._validator = BatchValidator(env.action_space)
        self._allocate = allocate
        self._progress = progress
        self.seed = seed
        self._unprobed = 0  # steps since the agent's purity was last checked
        self._seeds = seed + torch.arange(env.n_envs(), device=device, dtype=torch.int64)
        self._episode, self._step = -1, 0
        # The same two numbers as tensors, which a captured batch reads and advances.
        self._episode_now = torch.full((), -1, dtype=torch.int64, device=device)
        self._steps = torch.arange(n_timesteps + 1, dtype=torch.int64, device=device)  # step numbers of the next batch
        self._observation = DictTensor()
        self.running = torch.zeros(0, dtype=torch.bool, device=device)
        self._state = DictTensor()

    def reset(self, agent_info: DictTensor, env_info: DictTensor) -> None:
        """Start new episodes in all environments."""
        self._progress.at(Phase.RESET, 0)
        with unchecked():  # `finish` checks the whole batch
            observation, running = self.env.reset(env_info)
        expect_rows("environment.reset: observation", observation, self.env)
        self._observation, self.running = observation, running
        self._set_agent_info(agent_info)
        self._progress.enter(Phase.AGENT)
        with torch.no_grad():
            state = self.agent.initial_state(self.agent_info, self.env.n_envs())
        expect_rows("agent.initial_state: state", state, self.env)
        self._state = state
        if self._first is not None:
            self._first.forget()
        self._count_from(self._episode + 1, 0)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Pass new weights to the agent."""
        self._progress.enter(Phase.UPDATE)
        self.agent.update(weights)
        for runner in self._runners:
            runner.weights_changed()
        self.version = version

    def _set_agent_info(self, agent_info: DictTensor) -> None:
        """Set the agent_info for the next steps: [B] or empty, on the CPU."""
        if agent_info.specs() != self.agent_info.specs():
            self._runner.forget()
            if self._rollout is not None:
                self._rollout.runner.forget()
        wants_device = self.agent.agent_info_on_device and not agent_info.empty()
        self.agent_info = agent_info.map(lambda tensor: move(tensor, self._device)) if wants_device else agent_info

    def collect(self, agent_info: DictTensor | None) -> Collected:
        """Take T steps into ``steps``, or fewer if every episode ends early.

        Raises:
            ValueError: an action does not exist, or a frame or reward is NaN.
            PurityError: the agent declares ``pure = True`` but is not pure.
            Interrupted: the batcher was closed.
        """
        if agent_info is not None:
            self._set_agent_info(agent_info)
        self.steps, n_steps = self.take_steps(until_ended=not self.env.auto_reset)
        together = self._rollout is not None and self._rollout.runner.executor != "eager"
        collected = self.finish(n_steps, "compiled" if together else self._runner.executor)
        reused = self._allocate is not None or self._device.type == "cpu"
        if not reused:
            self.renew()
        return replace(collected, reused=reused)

    def finish(self, n_steps: int, executor: str, invalid: Tensor | None = None) -> Collected:
        """Check ``steps``, which ``executor`` has written, and count them; see `collect` for the errors raised."""
        self._progress.enter(Phase.COPY)
        steps = self.steps
        self._validator.check(steps, n_steps, invalid)
        self._unprobed += n_steps
        if executor != "eager" and self._unprobed >= STEPS_BETWEEN_PROBES:
            self._unprobed = 0
            parts = (steps.stream, steps.action)
            observation, action = (DictTensor.unchecked({key: v[0] for key, v in part.items()}) for part in parts)
            self._runner.probe(action, DictTensor.unchecked(steps.state), observation, self.agent_info)
        first_step, self._step = self._step, self._step + n_steps
        return Collected(n_steps, first_step, self.version, executor, self._runner.why_not)

    @torch.no_grad()
    @unchecked()  # `finish` checks the whole batch
    def take_steps(self, until_ended: bool) -> tuple[RolloutBuffer, int]:
        """Take the steps of a batch; see `collect`.

        This method can be captured in a graph, because it reads no number that the host counts.

        Args:
            until_ended: stop as soon as every episode has ended.

        Returns:
            The buffer, and the number of steps taken.
        """
        keys = step_keys(self._seeds, self._episode_now, self._steps)
        if self._buffer is None:
            self._buffer = self._new_buffer(keys)
        buffer, t = self._buffer, 0
        state = buffer.begin(self._observation, self._state, keys)
        act, step, enter, history = self._act, self._step_env, self._progress.at, None
        rollout = self._rollout if self._rollout is not None and self._rollout.runner.make is not None else None
        if rollout is not None:
            rollout.begin(buffer)
            act, step = rollout.act, RolloutBuffer.write_final_frames
        wants_history = self.agent.require_history()
        while t < self._T:
            enter(_AGENT, t)
            if wants_history:
                history = history_until(buffer, t, self.env.auto_reset and self.env.restarts_take_steps)
            action, state = act(buffer, t, state, self.agent_info, history)
            enter(_ENVIRONMENT, t)
            if (running := step(buffer, t, action)) is not None:
                self.running = running
            t += 1
            if until_ended and self._all_ended(t):
                break
        try:
            buffer.check("agent: state", check_answer(f"{type(self.agent).__name__}.__call__", (action, state))[1])
        except Exception:
            enter(_AGENT, t - 1)  # which the error names
            raise
        if rollout is not None:
            rollout.finish(buffer, t)
        elif self._first is not None:
            enter(_AGENT, 0)
            self._act, self._step_env = self._first.later_steps(buffer, state, self.agent_info)
            self._first = None
        self._state, self._observation = state, buffer.slots[t]
        self._steps = self._steps + t
        return buffer, t

    def _compiles_both(self) -> bool:
        """Return True if the agent is to be compiled, and the environment may be a compiled simulator."""
        # Looked up on the class, because a wrapper may forward attributes of an inner object that only it may call.
        simulator = hasattr(type(self.env), "pure_step") and getattr(self.env, "backend", "") == "compile"
        return self._runner.make is not None and self._device.type == "cpu" and simulator

    def _new_buffer(self, keys: Tensor) -> RolloutBuffer:
        """Allocate a buffer, whose layout the agent's first action shows."""
        if self._first is not None and not self.layout:
            self._progress.at(_AGENT, 0)
            observation = DictTensor.unchecked({**self._observation._tensors, "rng": keys[0]})
            both = self._compiles_both()  # compiled code takes step 0, too, so that a resumed run rounds alike
            self.layout, action = self._first.layout(self._state, observation, self.agent_info, self._T, eagerly=both)
            self._progress.enter(Phase.COPY)
            env: Any = self.env
            if both and (step := env.pure_step(action)) is not None:
                self._rollout = CompiledRollout(self.agent, env, step)
                self._runners.append(self._rollout.runner)
        allocate = self._allocate or (lambda layout: layout.allocate(self._device))
        return RolloutBuffer(allocate(self.layout), in_place=step_in_place(self.env) is not None)

    def count_running(self) -> int:
        """Count the environments that go on."""
        if self.env.auto_reset:
            return self.env.n_envs()
        return int(self.running.sum())  # sync: once per batch of episodes

    def renew(self, buffer: RolloutBuffer | None = None) -> RolloutBuffer | None:
        """Write the next batch into another buffer of the same layout, or into new memory; return the previous one."""
        previous, self._buffer = self._buffer, buffer
        if previous is not None:  # its memory passes to someone else, or is written again
            self._observation, self._state = (
                previous.copy_aliased(self._observation),
                previous.copy_aliased(self._state),
            )
        return previous

    def loop_state(self) -> LoopState:
        """Return every tensor on the device that one batch passes to the next. The environment must be `Capturable`."""
        env = dict(self.env.state_tensors()) if isinstance(self.env, Capturable) else {}
        info = self.agent_info if self.agent_info.device == self._device else DictTensor()
        return env, self._observation, self._state, info, self.running, self._episode_now, self._steps

    def set_loop_state(self, state: LoopState) -> None:
        """Continue from a result of `loop_state`, or from a copy of one."""
        env, self._observation, self._state, info, self.running, self._episode_now, self._steps = state
        if isinstance(self.env, Capturable):
            self.env.set_state_tensors(env)
        if self.agent_info.device == self._device:
            self.agent_info = info

    def state_dict(self) -> CollectorState:
        """Return everything that determines the next batch except weights and agent_info."""
        self._progress.enter(Phase.SAVE)
        environment = self.env.state_dict()
        return {
            "environment": None if environment is None else on_cpu(environment),
            "observation": on_cpu(self._observation),
            "running": self.running.to("cpu", copy=True),
            "agent_state": on_cpu(self._state),
            "seed": self.seed,
            "episode": self._episode,
            "step": self._step,
            "generator": None,
        }

    def load_state_dict(self, state: CollectorState, agent_info: DictTensor, env_info: DictTensor) -> bool:
        """Continue from a `state_dict`. Return False if the environments were not saved, so new episodes start."""
        self._progress.enter(Phase.LOAD)
        check_rows(state, self.env.n_envs())
        self._count_from(state["episode"], state["step"])
        if state["environment"] is None:
            if self._episode >= 0:
                self.reset(agent_info, env_info)
            return False
        load_environment(self.env, state["environment"])
        self._set_agent_info(agent_info)
        self._observation = DictTensor(state["observation"]).clone().to(self._device)
        self._state = DictTensor(state["agent_state"]).clone().to(self._device)
        self.running = state["running"].to(self._device, copy=True)
        self._seeds += state["seed"] - self.seed  # in place, because a captured batch reads this tensor
        self.seed = state["seed"]
        for runner in self._runners:
            runner.weights_changed()
        return True

    def _count_from(self, episode: int, step: int) -> None:
        self._episode, self._step = episode, step
        self._episode_now = torch.full_like(self._episode_now, episode)
        self._steps = torch.arange(step, step + self._T + 1, dtype=torch.int64, device=self._device)

    def describe_inputs(self) -> str:
        """Describe the agent's arguments in words, for an error message."""
        return describe_arguments(self._observation, self._state, self.agent_info)

    def close(self) -> None:
        """Close agent and environment. Raise ValueError if the last batches had an invalid action or NaN."""
        with contextlib.ExitStack() as closing:
            closing.callback(self.env.close)
            closing.callback(self.agent.close)
            self._validator.close()

    def _all_ended(self, t: int) -> bool:
        due = self._device.type == "cpu" or t % _STEPS_BETWEEN_CHECKS == 0
        return due and not bool(self.running.any())  # sync: per step on the CPU, every 16 steps elsewhere
