"""The collection loop: one agent acts in one VecEnv for T steps and writes into one slab.

The same loop runs in the user's process (``n_processes=0``) and in every worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlstruct.batchers.checks import BatchChecks
from rlstruct.batchers.progress import Phase, Progress, spell_input
from rlstruct.batchers.saved_state import CollectorState, check_rows, load_environment, on_cpu
from rlstruct.batchers.slab import Allocate, Slab, Steps, history_until, slab_layout
from rlstruct.core import DictTensor, Layout, TemporalDictTensor, expect
from rlstruct.engine.executors import agent_runner, infers_the_same
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import move
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError, UsageError
from rlstruct.functional.random import step_keys
from rlstruct.in_place import steps_into
from rlstruct.rl_agent import RL_Agent, check_answer
from rlstruct.vec_env import Carrying, VecEnv

# Off the CPU, asking whether every episode has ended stalls the device: ask once every this many steps.
_STEPS_BETWEEN_LOOKS = 16
# An agent that is compiled or recorded repeats one step eagerly every this many, to check that it keeps its promise.
_STEPS_BETWEEN_DOUBTS = 500
_AGENT, _ENVIRONMENT = int(Phase.AGENT), int(Phase.ENVIRONMENT)
Answer = tuple[DictTensor, DictTensor]
Carry = tuple[dict[str, Tensor], DictTensor, DictTensor, DictTensor, Tensor, Tensor, Tensor]
"""What the environment carries; observation, state, agent_info; who runs, number of the episode, steps to come."""


@dataclass(frozen=True)
class Collected:
    """Report of a collector about a finished batch; the batch itself is in its slab."""

    n_steps: int  # how many of the T steps were taken; fewer when every episode ended before
    n_final: int  # how many rows of ``final`` are used
    first_step: int  # steps since the last reset, before this batch
    version: int  # the version of the weights that acted
    executor: str = "eager"  # what took the steps: "kernel", "graph", "compiled" or "eager"
    uncompiled: str = ""  # why the agent is not compiled though it should be, or ""


class Collector:
    """Runs one agent in one VecEnv, T steps at a time, from where the last batch stopped.

    Environment b draws from ``seed + b``. ``allocate`` brings the memory of the slab as soon as its layout is known,
    which is after the agent has acted once; ``progress`` is told about every phase.

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
        allocate: Allocate,
        progress: Progress,
        compile_agent: bool = False,
    ) -> None:
        """Check that the environment is on ``device``."""
        if env.device != device:
            raise DeviceMismatchError(
                f"RL_Batcher: {type(env).__name__} is on {env.device}, expected {device}, the batcher's device. "
                f"Return DeviceEnv(env, {str(device)!r}) from create_env, "
                f"or give the batcher device={str(env.device)!r}."
            )
        self.env = env
        self.agent, self.agent_info = agent, DictTensor()
        self._runner, self._eager = agent_runner(agent, device, compiled=compile_agent), not compile_agent
        self._runners: list[Runner[Any]] = [self._runner]  # of what depends on the agent's weights
        self._act: Callable[..., Answer] = agent if self._eager else self._runner
        self._slab: Slab | None = None  # what the next batch is written to, or the last one was; made when it is needed
        self._layout = Layout()  # of slabs, once the agent has acted
        self.version = 0
        self._T = self.n_timesteps = n_timesteps
        self._step_into = steps_into(env) if device.type == "cpu" else None
        self._device = device
        self._checks = BatchChecks(env.action_space)
        self._allocate = allocate
        self._progress = progress
        self.seed = seed
        self._undoubted = 0  # steps since the last look at the agent's promise
        self._infers: bool | None = None  # in torch's inference mode; None: not tried
        self._watched = False  # whether the agent was seen to leave its observations alone
        self._seeds = seed + torch.arange(env.n_envs(), device=device, dtype=torch.int64)
        self._history, self._gaps = agent.require_history(), env.auto_reset and env.restarts_take_steps
        self._episode, self._step = -1, 0
        # The same two as tensors: a recorded batch reads and advances these.
        self._episode_now = torch.full((), -1, dtype=torch.int64, device=device)
        self._steps = torch.arange(n_timesteps + 1, dtype=torch.int64, device=device)  # of the next batch
        self._observation = DictTensor()
        self._running = torch.zeros(0, dtype=torch.bool, device=device)
        self._state = DictTensor()

    def reset(self, agent_info: DictTensor, env_info: DictTensor) -> None:
        """Start new episodes in all environments.

        Raises:
            DeviceMismatchError: an observation or the agent's initial state is not on the batcher's device.
            ShapeMismatchError: one of them has another number of rows than there are environments.
        """
        self._progress.step = 0
        self._progress.enter(Phase.RESET)
        self._observation, self._running = self.env.reset(env_info)
        self._expect_rows("environment.reset: observation", self._observation)
        self._set_agent_info(agent_info)
        self._progress.enter(Phase.AGENT)
        with torch.no_grad():
            self._state = self.agent.initial_state(self.agent_info, self.env.n_envs())
        self._expect_rows("agent.initial_state: state", self._state)
        self._count_from(self._episode + 1, 0)

    def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Give new weights to the agent."""
        self._progress.enter(Phase.UPDATE)
        self.agent.update(weights)
        for runner in self._runners:
            runner.weights_changed()
        self.version = version

    def _set_agent_info(self, agent_info: DictTensor) -> None:
        """Give a new agent_info to the agent, [B] or empty, on the CPU."""
        if agent_info.specs() != self.agent_info.specs():
            self._runner.forget()
        wants_device = self.agent.agent_info_on_device and not agent_info.empty()
        self.agent_info = agent_info.map(lambda tensor: move(tensor, self._device)) if wants_device else agent_info

    def collect(self, agent_info: DictTensor | None) -> Collected:
        """Take T steps, or fewer if every episode ends before.

        Returns:
            What happened; the steps themselves are in ``slab``.

        Raises:
            DeviceMismatchError: an action is not on the batcher's device.
            ShapeMismatchError: the agent's output has other keys, shapes or dtypes than before.
            TypeError: the agent returned something else than a pair of DictTensors.
            ValueError: an action does not exist, or a frame or reward is NaN.
            PurityError: the agent promises to be pure, and is not.
            Interrupted: the batcher was closed.
        """
        if agent_info is not None:
            self._set_agent_info(agent_info)
        found = self.take_steps(look=not self.env.auto_reset, watch=not self._watched)
        self._watched = True
        return self.finish(*found)

    def finish(self, n_steps: int, n_final: int, steps: Steps | None = None, found: Tensor | None = None) -> Collected:
        """Count steps that were taken, by default in the slab, and check them; see `collect`."""
        self._progress.enter(Phase.COPY)
        executor = self._runner.executor
        frozen, steps = steps is not None or executor != "eager", steps or self.slab
        self._checks.check(steps, n_steps, n_final, found)
        self._undoubted += n_steps
        if frozen and self._undoubted >= _STEPS_BETWEEN_DOUBTS:
            self._undoubted = 0
            parts = (steps.stream, steps.action)
            seen, action = (DictTensor.unchecked({key: v[0] for key, v in part.items()}) for part in parts)
            self._runner.look(action, DictTensor.unchecked(steps.state), seen, self.agent_info)
        first_step, self._step = self._step, self._step + n_steps
        return Collected(n_steps, n_final, first_step, self.version, executor, self._runner.why_not)

    @torch.no_grad()
    def take_steps(self, look: bool, watch: bool = False) -> tuple[int, int]:
        """Take the steps of a batch; see `collect`. Nothing here depends on what the host counts: it may be recorded.

        Args:
            look: whether to stop when every episode has ended.
            watch: whether to make sure that the agent writes to no observation, which takes time.

        Returns:
            How many steps were taken, and how many rows of ``final`` are used.
        """
        keys = self.keys()
        first = None if self._layout else self._first_answer(keys)
        slab, n_final, t = self.slab, 0, 0
        self._begin(slab, keys)
        state, shown, agent_info = self._state, slab.shown, self.agent_info
        act, infer = self._act, not watch and self._may_infer()
        step_into, enter = self._step_into, self._progress.at
        while t < self._T:
            if first is None:  # else it has acted
                enter(_AGENT, t)
            history = history_until(slab, slab.slots[0], t, n_final, self._gaps) if self._history else None
            if infer:
                with torch.inference_mode():
                    action, state = act(state, shown[t], agent_info, history)
                    slab.write_action(t, action)
            else:
                action, state = self._act_watched(t, state, history, first, watch)
            enter(_ENVIRONMENT, t)
            if step_into is None:
                step = self.env.step(action)
                n_final += slab.write_step(t, step)
                self._running = step[1][1]
            elif ended := step_into(action, slab.buffers[t], slab.buffers[t + 1], slab.finals_of[t]):
                n_final += slab.write_ended(t, ended)
                self._running = self._running if ended.running is None else ended.running
            t, first = t + 1, None
            if look and self._all_ended(t):
                break
        self._state, self._observation = state, slab.slots[t]
        self._steps = self._steps + t
        return t, n_final

    def keys(self) -> Tensor:
        """Return the random keys of the next batch: [T + 1, B] int64, for all slots."""
        return step_keys(self._seeds, self._episode_now, self._steps)

    def count_running(self) -> int:
        """Count the environments that go on."""
        if self.env.auto_reset:
            return self.env.n_envs()
        return int(self._running.sum())  # sync: once per batch of episodes

    def running(self) -> Tensor | None:
        """Return which environments go on, [B] bool; None if all do, always."""
        return None if self.env.auto_reset else self._running

    @property
    def slab(self) -> Slab:
        """Memory of the last batch, and of the next one."""
        if self._slab is None:
            if not self._layout:
                raise UsageError("rlstruct.batchers.collector: there is no slab before the first batch.")
            self._slab = self._new_slab(self._layout)
        return self._slab

    def layout(self) -> Layout:
        """Return the layout of a slab; empty before the first batch."""
        return self._layout

    def renew(self, slab: Slab | None = None) -> Slab | None:
        """Write the next batch into another slab of the same layout, or into new memory; return the one before."""
        left, self._slab = self._slab, slab
        if left is not None:
            self._leave(left)
        return left

    def _leave(self, slab: Slab) -> None:
        """Copy what the next batch begins with out of memory that will be another's, or be written again."""
        self._observation, self._state = (
            part.map(lambda tensor: tensor.clone() if slab.holds(tensor) else tensor)
            for part in (self._observation, self._state)
        )

    def carry(self) -> Carry:
        """Return all tensors on the device that one batch hands to the next; the environment is `Carrying`."""
        env = dict(self.env.carry()) if isinstance(self.env, Carrying) else {}
        info = self.agent_info if self.agent_info.device == self._device else DictTensor()
        return env, self._observation, self._state, info, self._running, self._episode_now, self._steps

    def set_carry(self, carry: Carry) -> None:
        """Go on from what `carry` returned, or from copies of it."""
        env, self._observation, self._state, info, self._running, self._episode_now, self._steps = carry
        if isinstance(self.env, Carrying):
            self.env.set_carry(env)
        if self.agent_info.device == self._device:
            self.agent_info = info

    def state_dict(self) -> CollectorState:
        """Return what decides the next batch, but for weights and agent_info."""
        self._progress.enter(Phase.SAVE)
        environment = self.env.state_dict()
        return {
            "environment": None if environment is None else on_cpu(environment),
            "observation": on_cpu(self._observation),
            "running": self._running.to("cpu", copy=True),
            "agent_state": on_cpu(self._state),
            "seed": self.seed,
            "episode": self._episode,
            "step": self._step,
            "generator": None,
        }

    def load_state_dict(self, state: CollectorState, agent_info: DictTensor, env_info: DictTensor) -> bool:
        """Go on where `state_dict` was called, or with new episodes if environments could not be saved.

        Returns:
            Whether everything is as it was then.

        Raises:
            KeyError, ValueError: the state is that of other environments, or of another number of them.
        """
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
        self._running = state["running"].to(self._device, copy=True)
        self._seeds += state["seed"] - self.seed  # in place: a recorded batch reads it
        self.seed = state["seed"]
        for runner in self._runners:
            runner.weights_changed()
        return True

    def _count_from(self, episode: int, step: int) -> None:
        self._episode, self._step = episode, step
        self._episode_now = torch.full_like(self._episode_now, episode)
        self._steps = torch.arange(step, step + self._T + 1, dtype=torch.int64, device=self._device)

    def given(self) -> str:
        """Say in words what the agent is called with."""
        return spell_input(self._observation, self._state, self.agent_info)

    def close(self) -> None:
        """Close agent and environment, and read what was found in the last batches.

        Raises:
            ValueError: an action of theirs does not exist, or a frame or reward is NaN.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self.env.close)
            closing.callback(self.agent.close)
            self._checks.close()

    def _first_answer(self, keys: Tensor) -> Any:  # noqa: ANN401 - of the user's agent
        """Let the agent act once, from which the layout of the slab is known, and allocate it."""
        self._progress.at(_AGENT, 0)
        history = history_until(None, self._observation, 0, 0, self._gaps) if self._history else None
        seen = DictTensor.unchecked({**self._observation._tensors, "rng": keys[0]})
        answer = self._act(self._state, seen, self.agent_info, history)
        action, _ = check_answer(f"{type(self.agent).__name__}.__call__", answer)
        self._progress.enter(Phase.COPY)
        self._expect_rows("agent: action", action)
        if action.empty():
            raise ShapeMismatchError("agent: the action is empty, expected 'action' [B, ...] at least.")
        sparse = self.env.auto_reset and self._device.type == "cpu"
        full = self.env.auto_reset and not sparse
        self._layout = slab_layout(seen, action, self._state, self._T, sparse, full)
        return answer

    def _may_infer(self) -> bool:
        """Return whether the agent gives the same in torch's inference mode, which saves it a tenth of its time.

        Tensors that are made in that mode cannot be changed in place or differentiated elsewhere. So this is for agents
        that promise to be pure, which leave nothing behind, with environments that read actions as arrays, and from the
        second batch on, when whatever a module makes in its first call is there.
        """
        if self._infers is None:
            wanted = self.agent.pure and self._step_into is not None and self._eager
            given = self._state, self.slab.shown[0], self.agent_info, None
            self._infers = wanted and not self._history and infers_the_same(self.agent, *given)
        return self._infers

    def _new_slab(self, layout: Layout) -> Slab:
        return Slab(self._allocate(layout), in_place=self._step_into is not None)

    def _act_watched(
        self, t: int, state: DictTensor, history: TemporalDictTensor | None, first: Answer | None, watch: bool
    ) -> Answer:
        """Let the agent act in step t, unless it has, and store its action before an environment can change it."""
        slab = self.slab
        seen = slab.seen(t) if watch else None
        answer = first or self._act(state, slab.shown[t], self.agent_info, history)
        action, state = answer if t else check_answer(f"{type(self.agent).__name__}.__call__", answer)
        if seen is not None:
            slab.refuse_changes(t, seen)
        if t == 0:
            self._expect_rows("agent: action", action)
            slab.check_state(state)
        slab.write_action(t, action)
        return action, state

    def _expect_rows(self, where: str, tensors: DictTensor) -> None:
        device = str(self._device)
        fix = f"Create it with device={device!r}; RL_Agent_CheckDevice(agent, {device!r}) finds every such place."
        expect(where, tensors, device=self._device, fix=fix)
        expect(where, tensors, rows=self.env.n_envs(), fix="Return one row for each environment, always.")

    def _begin(self, slab: Slab, keys: Tensor) -> None:
        """Write what is known before the first step."""
        # A state that shows observations of the last batch must not change with the slots, which are written again.
        if slab.state:
            self._state = self._state.map(lambda tensor: tensor.clone() if slab.holds(tensor) else tensor)
        slab.begin(self._observation, self._state, keys)

    def _all_ended(self, t: int) -> bool:
        due = self._device.type == "cpu" or t % _STEPS_BETWEEN_LOOKS == 0
        return due and not bool(self._running.any())  # sync: per step on the CPU, every 16 steps elsewhere
