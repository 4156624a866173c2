"""The collection loop: one agent acts in one VecEnv for T steps and writes every step into a rollout buffer.

The same loop runs in the user's process (``n_processes=0``) and in every worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.compiled_rollout import CompiledRollout
from rlstruct.batchers.progress import Phase, Progress, describe_arguments
from rlstruct.batchers.rollout_buffer import (
    Allocate,
    Rollout,
    RolloutBuffer,
    empty_rollout,
    history_until,
    rollout_layout,
)
from rlstruct.batchers.saved_state import CollectorState, check_rows, load_environment, on_cpu
from rlstruct.batchers.validation import BatchValidator
from rlstruct.core import DictTensor, Layout, TemporalDictTensor, expect
from rlstruct.engine.executors import AgentOutput, agent_runner, inference_mode_agrees
from rlstruct.engine.purity import weights_of
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import move
from rlstruct.engine.torch_private import version_of
from rlstruct.engine.validity import unchecked
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.functional.random import step_keys
from rlstruct.rl_agent import RL_Agent, check_answer
from rlstruct.vec_env import Capturable, Observed, VecEnv, steps_into

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
        self._runner, self._eager = agent_runner(agent, device, compiled=compile_agent), not compile_agent
        self._runners: list[Runner[Any]] = [self._runner]  # all runners that depend on the agent's weights
        self._act: Callable[..., AgentOutput] = agent if self._eager else self._runner
        self._rollout: CompiledRollout | None = None  # of agent and simulator together; set in the first batch
        self._buffer: RolloutBuffer | None = None  # holds the last batch, then the next; allocated on first use
        self.steps: Rollout
        self.layout = Layout()
        self._reuses = allocate is not None or device.type == "cpu"
        self.version = 0
        self._T = self.n_timesteps = n_timesteps
        self._step_into = steps_into(env) if device.type == "cpu" else None
        self._device = device
        self._validator = BatchValidator(env.action_space)
        self._allocate = allocate or (lambda layout: layout.allocate(device))
        self._progress = progress
        self.seed = seed
        self._unprobed = 0  # steps since the agent's purity was last checked
        self._infers = False  # call the agent in torch's inference mode; decided after the first batch
        self._watched = False  # True once a batch has shown that the agent does not modify its observations
        self._copies = True  # pass copies of actions; False once a batch has shown that the environment writes to none
        self._writes = False  # the environment wrote to an action
        self._seeds = seed + torch.arange(env.n_envs(), device=device, dtype=torch.int64)
        self._history, self._restarts_take_steps = agent.require_history(), env.auto_reset and env.restarts_take_steps
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
            self._observation, self.running = self.env.reset(env_info)
        self._expect_rows("environment.reset: observation", self._observation)
        self._set_agent_info(agent_info)
        self._progress.enter(Phase.AGENT)
        with torch.no_grad():
            self._state = self.agent.initial_state(self.agent_info, self.env.n_envs())
        self._expect_rows("agent.initial_state: state", self._state)
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
        buffer, n_steps = self.take_steps(until_ended=not self.env.auto_reset, watch=not self._watched)
        self.steps = buffer
        together = self._rollout is not None and self._rollout.runner.executor != "eager"
        collected = self.finish(n_steps, "compiled" if together else self._runner.executor)
        if not self._watched:
            self._tried(buffer)
        if not self._reuses:
            self.renew()
        return replace(collected, reused=self._reuses)

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

    def _tried(self, buffer: RolloutBuffer) -> None:
        """Decide after the first batch what later ones may omit."""
        self._watched, self._infers = True, self._inference_mode_agrees(buffer)
        self._copies = self._writes

    @torch.no_grad()
    @unchecked()  # `finish` checks the whole batch
    def take_steps(self, until_ended: bool, watch: bool = False) -> tuple[RolloutBuffer, int]:
        """Take the steps of a batch; see `collect`.

        This method can be captured in a graph, because it reads no number that the host counts.

        Args:
            until_ended: stop as soon as every episode has ended.
            watch: check in every step that the agent does not modify its observation. This is slow.

        Returns:
            The buffer, and the number of steps taken.
        """
        keys, first = step_keys(self._seeds, self._episode_now, self._steps), None
        if self._buffer is None:
            first = None if self.layout else self._first_answer(keys)
            self._buffer = RolloutBuffer(self._allocate(self.layout), in_place=self._step_into is not None)
        buffer, t = self._buffer, 0
        state = buffer.begin(self._observation, self._state, keys)
        if first is not None:
            self._rollout = self._compiled_rollout(first[0])
            if self._compiles_both():  # compiled code takes this step, too, so that a resumed run rounds alike
                first = None
        if self._rollout is not None and self._rollout.runner.make is not None:
            enter = self._progress.at
            self._state = self._rollout.take_steps(buffer, self._T, state, self.agent_info, partial(enter, _AGENT))
            self._steps, self._observation = self._steps + self._T, buffer.slots[self._T]
            return buffer, self._T
        act, shown, agent_info = self._act, buffer.shown, self.agent_info
        step_into, enter, infers = self._step_into, self._progress.at, torch.inference_mode()
        while t < self._T:
            if first is None:  # otherwise the agent has already acted
                enter(_AGENT, t)
            history = history_until(buffer, t, self._restarts_take_steps) if self._history else None
            if self._infers:
                with infers:
                    action, state = act(state, shown[t], agent_info, history)
                    buffer.write_action(t, action)
            elif t and not watch:
                action, state = act(state, shown[t], agent_info, history)
                buffer.write_action(t, action)
            else:
                action, state = self._act_watched(buffer, t, state, history, first, watch)
            enter(_ENVIRONMENT, t)
            if step_into is None:
                step = self._step_with_copy(action) if self._copies else self.env.step(action)
                buffer.write_step(t, step)
                self.running = step[1][1]
            elif ended := step_into(
                action, buffer.observation_buffers[t], buffer.observation_buffers[t + 1], buffer.final_buffers[t]
            ):
                buffer.write_ended(t, ended)
                self.running = self.running if ended.running is None else ended.running
            t, first = t + 1, None
            if until_ended and self._all_ended(t):
                break
        self._state, self._observation = state, buffer.slots[t]
        self._steps = self._steps + t
        return buffer, t

    def _compiles_both(self) -> bool:
        """Return True if the agent is to be compiled, and the environment may be a compiled simulator."""
        # Looked up on the class, because a wrapper may forward attributes of an inner object that only it may call.
        simulator = hasattr(type(self.env), "pure_step") and getattr(self.env, "backend", "") == "compile"
        return self._runner.make is not None and self._device.type == "cpu" and simulator

    def _compiled_rollout(self, action: DictTensor) -> CompiledRollout | None:
        """Return the steps of agent and simulator as one compiled function; None if one of them is not to be compiled.

        Args:
            action: the agent's first answer.  [B, ...]
        """
        env: Any = self.env
        if not self._compiles_both() or (step := env.pure_step(action)) is None:
            return None
        rollout = CompiledRollout(self.agent, env, step)
        self._runners.append(rollout.runner)
        return rollout

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

    def _first_answer(self, keys: Tensor) -> Any:  # noqa: ANN401 - returned by the user's agent
        """Call the agent once and derive the layout of the buffer from its action."""
        self._progress.at(_AGENT, 0)
        observation = DictTensor.unchecked({**self._observation._tensors, "rng": keys[0]})
        history = history_until(empty_rollout(observation), 0, restarts_take_steps=False) if self._history else None
        try:
            act = self.agent if self._compiles_both() else self._act
            answer = act(self._state, observation, self.agent_info, history)
        except RuntimeError as error:  # torch's, of tensors on two devices
            weights = weights_of(self.agent).items()
            if (misplaced := next((name for name, value in weights if value.device != self._device), None)) is None:
                raise
            raise DeviceMismatchError(
                f"RL_Batcher: {type(self.agent).__name__}'s weight {misplaced!r} is on "
                f"{dict(weights)[misplaced].device}, and its observation on {self._device}. Move the agent's network "
                f"with .to({str(self._device)!r}) in create_agent. torch says: {error}"
            ) from error
        action, _ = check_answer(f"{type(self.agent).__name__}.__call__", answer)
        self._progress.enter(Phase.COPY)
        self._expect_rows("agent: action", action)
        if action.empty():
            raise ShapeMismatchError("agent: the action is empty, expected 'action' [B, ...] at least.")
        self.layout = rollout_layout(observation, action, self._state, self._T, self.env.auto_reset)
        return answer

    def _inference_mode_agrees(self, buffer: RolloutBuffer) -> bool:
        """Return True if the agent gives equal results in torch's inference mode, which makes a step 2 to 7 % faster.

        A tensor created in inference mode can be neither modified in place nor differentiated elsewhere. The mode is
        therefore used only for pure agents, which keep no tensors, with environments that read actions as arrays. The
        first batch runs without it, so that modules can create lazy weights and caches.
        """
        if not self.agent.pure or self._step_into is None or not self._eager or self._history:
            return False
        self._progress.at(_AGENT, 0)
        return inference_mode_agrees(self.agent, self._state, buffer.shown[0], self.agent_info, None)

    def _act_watched(
        self,
        buffer: RolloutBuffer,
        t: int,
        state: DictTensor,
        history: TemporalDictTensor | None,
        first: AgentOutput | None,
        watch: bool,
    ) -> AgentOutput:
        """Call the agent in step t unless ``first`` is its result; store the action before the environment sees it."""
        before = {key: value[t].clone() for key, value in buffer.stream.items()} if watch else None
        answer = first or self._act(state, buffer.shown[t], self.agent_info, history)
        action, state = answer if t else check_answer(f"{type(self.agent).__name__}.__call__", answer)
        if before is not None:
            buffer.check_unchanged(t, before)
        if t == 0:
            self._expect_rows("agent: action", action)
            buffer.check("agent: state", state)
        buffer.write_action(t, action)
        return action, state

    def _step_with_copy(self, action: DictTensor) -> tuple[Observed, Observed]:
        """Step the environment with a copy of the action, since the agent may keep the action itself as its state."""
        copy = action.clone()
        before = [version_of(tensor) for tensor in copy.values()]
        step = self.env.step(copy)
        self._writes = self._writes or [version_of(tensor) for tensor in copy.values()] != before
        return step

    def _expect_rows(self, where: str, tensors: DictTensor) -> None:
        device = str(self._device)
        fix = f"Create it with device={device!r}; RL_Agent_CheckDevice(agent, {device!r}) finds every such place."
        expect(where, tensors, device=self._device, fix=fix)
        expect(where, tensors, rows=self.env.n_envs(), fix="Return one row per environment in every step.")

    def _all_ended(self, t: int) -> bool:
        due = self._device.type == "cpu" or t % _STEPS_BETWEEN_CHECKS == 0
        return due and not bool(self.running.any())  # sync: per step on the CPU, every 16 steps elsewhere
