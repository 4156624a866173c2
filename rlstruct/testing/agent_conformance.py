"""check_agent, a test of an agent against the contract of `RL_Agent`, property by property."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.engine.executors import EXECUTORS, agent_step
from rlstruct.engine.precision import Precision
from rlstruct.engine.purity import PurityError, check_equal
from rlstruct.engine.runner import Runner
from rlstruct.engine.streams import stream_on
from rlstruct.engine.validity import unchecked
from rlstruct.errors import expect_type
from rlstruct.functional.random import step_keys
from rlstruct.indexed_actions import env_for
from rlstruct.replay import replay_agent
from rlstruct.rl_agent import STATE_FIX, RL_Agent, RL_Agent_CheckDevice, expect_agent
from rlstruct.spaces import advice_on, leaves
from rlstruct.testing.conformance import (
    check_bounds,
    check_layout,
    check_present,
    check_same,
    equal_rows,
    fail,
    holds,
    layout_of,
    on_cpu,
)
from rlstruct.testing.host_sync import forbid_host_sync
from rlstruct.testing.purity import check_modes, check_pure, weights_of_modules
from rlstruct.vec_env import DeviceEnv, VecEnv, expect_env

_RNG = (
    "Draw random numbers from observation['rng'] (rlstruct.functional.random), keep lasting values in the state, "
    "and put the model in eval mode; or call check_agent(..., draws_from_rng=False) for an agent that uses torch's "
    "generator."
)
_ROWS = "Row b of the output may depend on row b of the arguments only: look for means over the batch or BatchNorm."
_MEMORY = (
    "Where initial_state is True an episode begins, and the agent must forget the one before: masked_dicttensor(state, "
    "self.initial_state(agent_info, B), observation['initial_state']) does that. If the agent remembers on purpose, "
    "call check_agent(..., remembers=True)."
)
_CLIP = (
    "Wrap the environment in gymnasium.wrappers.ClipAction, as an agent that samples from a normal distribution needs, "
    "or keep the action inside the space."
)


@dataclass(frozen=True)
class _Step:
    """Arguments and results of one call of the agent."""

    state: DictTensor
    observation: DictTensor
    history: TemporalDictTensor | None
    action: DictTensor
    reached: DictTensor


def check_agent(
    agent: RL_Agent,
    env: VecEnv,
    *,
    device: DeviceLike | None = None,
    agent_info: DictTensor | None = None,
    weights: Mapping[str, Tensor] | None = None,
    n_steps: int = 8,
    seed: int = 0,
    tolerance: float = 1e-5,
    draws_from_rng: bool = True,
    remembers: bool = False,
    host_syncs: bool = False,
    executors: bool = True,
) -> None:
    """Let an agent act for a few steps, and check all properties that the contract of `RL_Agent` requires.

    The checks: all tensors are on the right device (see `RL_Agent_CheckDevice`); no dropout or batch normalisation is
    in train mode; the initial state has B rows, and the same columns for every B; outputs fit the action space and the
    initial state; arguments are not written to; equal arguments give equal outputs; at the start of an episode nothing
    depends on the state of the episode before; no row depends on another; a replay reproduces the stored outputs, and
    `states_at` the states; `update` copies all weights; a pure agent depends on weights and arguments only; every
    executor returns the agent's outputs.

    Args:
        agent: the agent to check, on ``device``. Its weights are restored afterwards, if they can be found.
        env: environment to act in, wrapped in `DeviceEnv` if it is on another device; not closed.
        device: device of the agent, by default that of ``env``; ``"sim:1"`` finds device mistakes on a machine
            without a GPU.
        agent_info: settings of the environments' policies, on the CPU.  [B] or empty
        weights: argument of `update`; by default the state_dict of the agent's model, if it has an nn.Module.
        n_steps: number of steps.
        seed: seed of the random keys and of `RL_Agent.seed`.
        tolerance: allowed difference between floating-point outputs for two batch sizes, and in the replay.
        draws_from_rng: False for an agent that draws from torch's generator, which is then seeded before each call;
            rows and replay are not compared.
        remembers: True for an agent that keeps its memory on purpose when an episode begins, such as one that learns
            across episodes.
        host_syncs: also forbid host syncs, with `forbid_host_sync`.
        executors: False skips the comparison of executors, which takes seconds because it compiles the agent.

    Raises:
        ConformanceError: a check failed; names the call, the key, the found and expected values, and the fix.
        DeviceMismatchError: a tensor is on the wrong device.
        TypeError: an argument has the wrong type, or the agent returned something other than a pair of DictTensors.
    """
    expect_agent("check_agent: agent is", agent)
    expect_env("check_agent: env is", env)
    expect_type("check_agent: agent_info is", agent_info, DictTensor | None, "a DictTensor", "Pass DictTensor({...}).")
    device = env.device if device is None else resolve_device(device)
    env = env_for(agent, env if env.device == device else DeviceEnv(env, device))
    watched = RL_Agent_CheckDevice(agent, device, host_syncs=forbid_host_sync if host_syncs else None)
    info = DictTensor() if agent_info is None else agent_info
    if watched.agent_info_on_device and not info.empty():
        info = info.to(device)
    agent.seed(seed)
    kit = _Kit(watched, env, info, weights, n_steps, seed, tolerance, draws_from_rng)
    check_modes(kit.name, agent)
    kit.check_initial_state()
    kit.check_acting()
    kit.check_repeated()
    if not remembers:
        kit.check_memory()
    if draws_from_rng:
        kit.check_rows()
        kit.check_replay()
    kit.check_update()
    if agent.pure:
        kit.check_purity()
        if executors and not agent.require_history():
            kit.check_executors()


@dataclass
class _Kit:
    """The checked agent in its environment, with the arguments of `check_agent`."""

    agent: RL_Agent_CheckDevice
    env: VecEnv
    agent_info: DictTensor
    weights: Mapping[str, Tensor] | None
    n_steps: int
    seed: int
    tolerance: float
    draws_from_rng: bool
    steps: list[_Step] = field(default_factory=list)  # filled by `check_acting`

    def __post_init__(self) -> None:
        self.plain, self.B = self.agent.agent, self.env.n_envs()
        self.name = type(self.plain).__name__

    def check_initial_state(self) -> None:
        """Compare the initial states of 1 and of B environments."""
        specs = None
        for B in (1, self.B):
            agent_info = self.agent_info if B == self.B or self.agent_info.empty() else self.agent_info.slice(0)
            state = self.agent.initial_state(agent_info, B)
            fix = "Make one row for each of the B environments, with the same keys, dtypes and shapes for every B."
            check_layout(f"{self.name}.initial_state(agent_info, {B})", state, specs, fix, B)
            specs = state.specs()

    @torch.no_grad()
    @unchecked()
    def check_acting(self) -> None:
        """Let the agent act, and check each output separately."""
        observation, _ = self.env.reset(None)
        state = self.agent.initial_state(self.agent_info, self.B)
        seeds = torch.arange(self.seed, self.seed + self.B, device=self.env.device)
        keys = step_keys(seeds, 0, torch.arange(self.n_steps, device=self.env.device))  # [T, B]
        steps = self.steps
        for t in range(self.n_steps):
            shown = observation + DictTensor({"rng": keys[t]})
            history = self._history(steps, shown) if self.agent.require_history() else None
            where = f"{self.name}.__call__ (step {t})"
            arguments = (state.map(on_cpu), shown.map(on_cpu))
            action, new_state = self.agent(state, shown, self.agent_info, history)
            fix = "Do not write to the arguments: the batcher stores them."
            check_same(f"{where}, argument state", state.map(on_cpu), arguments[0], fix)
            check_same(f"{where}, argument observation", shown.map(on_cpu), arguments[1], fix)
            self._check_action(where, action, steps[-1].action if steps else action)
            check_layout(f"{where}, new_state", new_state, state.specs(), STATE_FIX, self.B)
            (reached, _), (observation, _) = self.env.step(action)
            steps.append(_Step(state, shown, history, action, reached))
            state = new_state

    def check_repeated(self) -> None:
        """Call the agent twice with the arguments of every step."""
        for t, step in enumerate(self.steps):
            where = f"{self.name}.__call__ (step {t}), called twice with the same arguments"
            check_same(where, self._answer(step), self._answer(step), _RNG)

    @torch.no_grad()
    def check_memory(self) -> None:
        """Begin an episode with the state of every step: the output must be that with the initial state."""
        last = self.steps[-1]
        begins = DictTensor({"initial_state": torch.ones_like(last.observation["initial_state"])})
        observation = _changed(last.observation, begins)
        fresh = self.agent.initial_state(self.agent_info, self.B)
        expected = self._answer(replace(last, state=fresh, observation=observation))
        for t, step in enumerate(self.steps):
            where = f"{self.name}.__call__ with initial_state True and the state of step {t}"
            got = self._answer(replace(last, state=step.state, observation=observation))
            check_same(where, got, expected, _MEMORY, tolerance=self.tolerance)

    @torch.no_grad()
    def check_rows(self) -> None:
        """Call the agent with the rows of every step reversed, and with single rows."""
        for t, step in enumerate(self.steps):
            expected = self._answer(step)
            for rows in (list(reversed(range(self.B))), [0], [self.B - 1]):
                where = f"{self.name}.__call__ (step {t}), rows {rows} only"
                state, info = (d if d.empty() else d.index(rows) for d in (step.state, self.agent_info))
                history = None if step.history is None else step.history.index(rows)
                got = _joined(*self.agent(state, step.observation.index(rows), info, history))
                check_same(where, got, expected.index(rows), _ROWS, tolerance=self.tolerance)

    def check_replay(self) -> None:
        """Replay the collected trajectories."""
        steps = self.steps
        trajectories = self._trajectories(steps)
        self._check_states_at(trajectories, steps)
        replayed = replay_agent(self.agent, trajectories)
        fix = (
            "Replay must act as collection did: restart the state where observation['initial_state'] is True, use "
            "nothing but the arguments, and check call_replay if the agent has its own."
        )
        for t, step in enumerate(steps):
            got = replayed.temporal_index(t).map(on_cpu)
            expected = step.action.map(on_cpu)
            check_same(f"replay_agent({self.name}), step {t}", got, expected, fix, tolerance=self.tolerance)

    def _check_states_at(self, trajectories: Trajectories, steps: list[_Step]) -> None:
        """Compare the states that `states_at` returns with those of the steps."""
        fix = "Return the state with which step t of row b acted as row b * T + t, or None."
        acted = {key: torch.stack([step.state[key] for step in steps], 1) for key in steps[0].state.keys()}
        expected = DictTensor({key: states.flatten(0, 1) for key, states in acted.items()})  # [B * T]
        backwards = torch.arange(self.B * len(steps), device=self.env.device).flip(0)
        for numbers in (None, backwards):
            where = f"{self.name}.states_at(trajectories, {'None' if numbers is None else '[B * T - 1, ..., 0]'})"
            states = self.agent.states_at(trajectories, numbers)
            if states is None:
                return
            wanted = expected if numbers is None or expected.empty() else expected.index(numbers)
            check_same(where, states.map(on_cpu), wanted.map(on_cpu), fix)

    def check_update(self) -> None:
        """Update the agent to other weights and back.

        Skipped without weights, and for an agent that defines no `update`.
        """
        step, weights, module = self.steps[-1], self.weights, None
        if weights is None and type(self.plain).update is not RL_Agent.update:
            module = _model(self.plain)
            weights = None if module is None else module.state_dict()
        if weights is None:
            return
        where = f"{self.name}.update"
        original = {key: on_cpu(value) for key, value in weights.items()}
        other = {k: v * 0.5 + 0.25 if v.is_floating_point() else v.clone() for k, v in original.items()}
        self.agent.update({k: v.clone() for k, v in original.items()})
        before = self._answer(step)
        passed = {k: v.clone() for k, v in other.items()}
        self.agent.update(passed)
        for key, value in {} if module is None else module.state_dict().items():
            if not holds(equal_rows(on_cpu(value), other[key])):
                fix = "Define update(self, info), usually self.model.load_state_dict(info)."
                fail(where, key, "the old weights", "those that were given", fix)
        changed = self._answer(step)
        for value in passed.values():
            value.fill_(1)  # as a batcher does when it publishes the next version
        fix = "Copy the weights, as load_state_dict does: the batcher writes to these tensors again."
        check_same(f"{where}, after its argument changed", self._answer(step), changed, fix)
        self.agent.update({k: v.clone() for k, v in original.items()})
        fix = "The same weights must give the same outputs: update everything that they depend on."
        check_same(f"{where}, back to the first weights", self._answer(step), before, fix)

    def check_purity(self) -> None:
        """Change every value that the agent may read besides weights and arguments."""
        agent, step = self.plain, self.steps[-1]
        arguments = (step.state, step.observation, self.agent_info, step.history)

        @torch.no_grad()
        def answer() -> DictTensor:
            return _joined(*agent(*arguments))

        check_pure(self.name, agent, answer)

    @torch.no_grad()
    def check_executors(self) -> None:
        """Compare every executor with the eager agent, including with new weights and agent_info."""
        agent, device, steps = self.plain, self.env.device, self.steps
        act = agent_step(agent)
        made = {name: make_on(device) for name, make_on in EXECUTORS.items()}
        if not self.agent_info.empty() and not agent.agent_info_on_device:
            del made["graph"]
        parameters = {id(p): p for p in weights_of_modules(agent) if p.is_floating_point()}.values()
        for name, make in made.items():
            if make is None:
                continue
            runner = Runner(act, agent, device, make, alike=True, stream=stream_on(device))
            before = [parameter.clone() for parameter in parameters]
            for i, step in enumerate((*steps[:3], *steps[:1])):
                info = self.agent_info.map(functools.partial(torch.roll, shifts=i, dims=0))
                arguments = (step.state, step.observation, info)
                where = f"{self.name}, run by the executor {name!r} (step {i}, with new weights and agent_info)"
                with Precision() as precision:
                    expected = act(*arguments)
                try:
                    check_equal(expected, runner(*arguments), precision.eps(device))
                except PurityError as error:
                    fail(where, None, str(error), "the eager agent's output", "Or set pure = False.")
                if runner.why_not and name != "compiled":  # a machine may lack a compiler
                    fail(where, None, runner.why_not, "the eager agent's output", "Or set pure = False.")
                for parameter in parameters:
                    parameter.mul_(0.9)
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)

    def _answer(self, step: _Step) -> DictTensor:
        """Call the agent with the arguments of a step, and return its whole output on the CPU."""
        if not self.draws_from_rng:
            torch.manual_seed(self.seed)
        with torch.no_grad():
            return _joined(*self.agent(step.state, step.observation, self.agent_info, step.history))

    def _check_action(self, where: str, action: DictTensor, before: DictTensor) -> None:
        expected = leaves(self.env.action_space, "action")
        fix = "Return what the action space requires, one row for each environment."
        check_present(where, action, layout_of(expected), fix, self.B)
        for key, leaf in expected.items():
            fix = _CLIP if isinstance(leaf.space, Box) else advice_on(leaf.space)
            check_bounds(where, key, on_cpu(action[key]), leaf, fix)
        fix = "Return the same keys, dtypes and shapes in each call."
        check_layout(f"{where}, action", action, before.specs(), fix, self.B)

    def _history(self, steps: list[_Step], observation: DictTensor) -> TemporalDictTensor:
        if steps:
            return self._trajectories(steps).steps
        shapes = observation.prepend_key("observation/")
        return TemporalDictTensor({k: v.new_empty((self.B, 0, *v.shape[1:])) for k, v in shapes.items()})

    def _trajectories(self, steps: list[_Step]) -> Trajectories:
        columns = [
            step.observation.prepend_key("observation/")
            + step.action.prepend_key("action/")
            + step.reached.prepend_key("_observation/")
            for step in steps
        ]
        info = self.agent_info if self.agent_info.empty() else self.agent_info.to(self.env.device)
        named = info.prepend_key("agent_info/") + steps[0].state.prepend_key("agent_state/")
        return Trajectories(named, DictTensor.stack(columns))


def _changed(observation: DictTensor, columns: DictTensor) -> DictTensor:
    return DictTensor({**dict(observation.items()), **dict(columns.items())})


def _joined(action: DictTensor, new_state: DictTensor) -> DictTensor:
    """Return the whole output of a call, on the CPU."""
    return (action.prepend_key("action/") + new_state.prepend_key("new_state/")).map(on_cpu)


def _model(agent: RL_Agent) -> nn.Module | None:
    """Return the agent's network: the agent itself, its attribute ``model``, or its only nn.Module."""
    if isinstance(agent, nn.Module):
        return agent
    modules = {name: value for name, value in vars(agent).items() if isinstance(value, nn.Module)}
    if "model" in modules:
        return modules["model"]
    return next(iter(modules.values())) if len(modules) == 1 else None
