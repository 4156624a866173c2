"""RL_Agent: the contract of a policy, and RL_Agent_CheckDevice, which finds misplaced tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories, expect
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadTypeError, MissingMethodError, expect_type, kind_of

ActionForm: TypeAlias = Literal["element", "index", "vector"]
"""Form of the action that an agent returns as ``action``; see `RL_Agent.action_form`."""
CPU = torch.device("cpu")
STATE_FIX = "Return the keys, shapes and dtypes of initial_state, which an agent with a state must define."
# Attributes of RL_Agent_CheckDevice itself; all others belong to the wrapped agent.
_OWN_ATTRIBUTES = frozenset({"agent", "device", "_guard", "_name"})


def replays_sequences(agent: RL_Agent) -> bool:
    """Return True if an agent's class defines `RL_Agent.replay_sequence`, and no subclass changes how it acts."""
    own = type(agent).replay_sequence is not RL_Agent.replay_sequence
    return own and _repeats(type(agent), "replay_sequence")


def _repeats(cls: type, promise: str) -> bool:
    """Return True if no class overrides a method below the one that sets the class attribute ``promise``."""
    for i, base in enumerate(cls.__mro__):
        if promise in vars(base):
            return True
        for name, value in vars(base).items():
            acts = name == "__call__" or not (name[:2] == "__" or name in ("update", "seed", "close", "creator"))
            overrides = any(name in vars(other) for other in cls.__mro__[i + 1 :])
            if acts and overrides and (callable(value) or isinstance(value, property)):
                return False
    return True


class RL_Agent(ABC):  # noqa: N801 - the name that users of rlstructures know
    """A policy that acts for B environments at once. Its state is passed in and returned, not stored.

    For an agent on device d, state, observation, history, action and new state are on d (empty structures are on any
    device). ``agent_info`` is on the CPU, unless ``agent_info_on_device`` is True.

    Draw random numbers from ``observation["rng"]`` ([B] int64, added by the batcher) with
    `rlstruct.functional.random`. The agent then acts the same however the environments are split over processes, and
    a replay samples the same actions again. torch's global generator also works, but is reproducible only for one
    layout. In a replay, ``observation["chosen_action"]`` is the stored action, so the agent need not sample again.

    Attributes:
        agent_info_on_device: True if the agent expects ``agent_info`` on its own device instead of the CPU.
        pure: the author's promise that the result of `__call__` depends only on the parameters and buffers of the
            agent's modules and on the arguments, not on globals, changing attributes or generators. Batchers may then
            compile the agent or capture it in a CUDA graph, both of which would ignore such changes.
            `rlstruct.testing.check_agent` tests the promise. Agents without it run eagerly. A subclass that overrides a
            method must repeat the promise.
        action_form: what ``action`` is, so that batchers and policies can turn it into an element of the environment's
            action space. ``"element"`` (the default) is such an element already. ``"index"`` is the index of the
            chosen output of a network, from 0 to n - 1, or K indices at once: the environment gets the element with
            the space's start, shape and dtype, and the agent sees indices in ``last_action`` and ``chosen_action``.
            ``"vector"`` is a vector of numbers, for a Box of floats. A subclass that overrides a method must repeat it.
        samples_with: key of ``agent_info`` without which an agent made with ``stochastic=True`` still takes the best
            action, such as ``"epsilon"``; None if it needs none.
    """

    agent_info_on_device: bool = False
    pure: bool = False
    action_form: ActionForm = "element"
    samples_with: str | None = None

    def __init_subclass__(cls, **settings: Any) -> None:  # noqa: ANN401 - whatever other bases take
        """Reset ``pure`` and ``action_form`` in a subclass that changes what the agent does."""
        super().__init_subclass__(**settings)
        for promise in ("pure", "action_form"):
            if not _repeats(cls, promise):
                setattr(cls, promise, getattr(RL_Agent, promise))

    @abstractmethod
    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Choose one action for each environment.

        Args:
            state: the new state that the last call returned, or that of `initial_state`.  [B], may be empty
            observation: observation of the environments, plus ``rng`` [B] int64. Its memory belongs to the batch that
                is being collected: never write to it, and copy whatever you keep on the agent. The returned state may
                refer to it.  [B]
            agent_info: settings of the policy in each environment, such as an epsilon.  [B] or empty
            history: the steps of this batch so far, keys as in Trajectories.  [B, t]; None unless `require_history`

        Returns:
            ``(action, new_state)``: action [B] holds ``action`` (or ``action/<key>``) and anything else to be
            stored in the trajectories; new_state [B] has the keys of ``state``.
        """

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Return the agent's state before the first step.

        Args:
            agent_info: as in `__call__`.  [B] or empty
            B: the number of environments.

        Returns:
            [B] on the agent's device; empty for an agent that keeps no state (the default).
        """
        return DictTensor()

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Load new weights.

        Args:
            info: name to tensor, usually a state_dict, on the CPU; valid during this call only, so copy from it.

        Raises:
            NotImplementedError: the agent has nothing to update.
        """
        raise MissingMethodError(
            f"{type(self).__name__}.update: this agent takes no weights. "
            "Define update(self, info), usually self.model.load_state_dict(info)."
        )

    def seed(self, seed: int) -> None:
        """Seed the agent's own generator, if it has one. Agents that draw from ``observation["rng"]`` need none."""
        return

    def require_history(self) -> bool:
        """Return True if `__call__` needs the ``history`` of the batch."""
        return False

    def call_replay(
        self, trajectories: Trajectories, t: int, state: DictTensor | None
    ) -> tuple[DictTensor, DictTensor]:
        """Act again at step t of stored trajectories; the learner differentiates through this.

        Args:
            trajectories: [B, T] on the agent's device.
            t: the step, from 0 to T - 1.
            state: the new state that the call for t - 1 returned; None at t = 0, which uses the stored ``agent_state``.

        Returns:
            ``(action, new_state)`` as `__call__` returns them.
        """
        info = trajectories.info
        agent_info = info.truncate_key("agent_info/")
        if not self.agent_info_on_device and not agent_info.empty():
            agent_info = agent_info.to(CPU)
        if state is None:
            state = info.truncate_key("agent_state/")
        steps = trajectories.steps
        history = steps.temporal_slice(0, t) if self.require_history() else None
        return self(state, replayed_observation(steps).temporal_index(t), agent_info, history)

    def states_at(self, trajectories: Trajectories, steps: Tensor | None = None) -> DictTensor | None:
        """Return the agent's states before stored steps, if they can be computed without acting.

        A learner can then replay all steps in one call, and learn from single steps in any order.

        Args:
            trajectories: [B, T] on the agent's device.
            steps: numbers b * T + t of the steps; None for all.  [K] int64, same device

        Returns:
            The state argument of `call_replay` at these steps; empty for an agent without a state. None if only acting
            step by step can tell, as for an agent that learns what to remember, needs a history or defines
            `call_replay`.  [K], or [B * T] for all
        """
        keeps_state = any(key.startswith("agent_state/") for key in trajectories.info.keys())
        by_steps = keeps_state or self.require_history() or type(self).call_replay is not RL_Agent.call_replay
        return None if by_steps else DictTensor()

    def replay_sequence(self, trajectories: Trajectories) -> tuple[DictTensor, DictTensor] | None:
        """Act again at all steps of stored trajectories at once, if only the agent's memory needs one step at a time.

        A learner then calls it instead of `call_replay` for each step; the results must be equal up to rounding. Where
        an ``observation/initial_state`` is True, the memory starts anew. A subclass that overrides another method must
        repeat this one, or it is not called.

        Args:
            trajectories: [B, T] on the agent's device.

        Returns:
            ``(action, new_state)`` as `__call__` returns them, with that of step t of row b at b * T + t; None (the
            default) if the agent has to act step by step.  [B * T, ...]
        """
        return None

    def creator(self) -> Callable[..., RL_Agent]:
        """Return a factory of such agents with the arguments of ``create_agent``, for `rlstruct.load`."""
        return type(self)

    def close(self) -> None:
        """Release the agent's resources."""
        return


def unwatched(agent: RL_Agent) -> RL_Agent:
    """Return the agent that the user wrote or chose, also from inside of `RL_Agent_CheckDevice`."""
    while isinstance(agent, RL_Agent_CheckDevice):
        agent = agent.agent
    return agent


def expect_agent(what: str, agent: object) -> None:
    """Raise TypeError unless a value is an RL_Agent; ``what`` begins the message."""
    fix = "Put the model into a class that inherits from RL_Agent."
    expect_type(what, agent, RL_Agent, "an RL_Agent", fix)


class RL_Agent_CheckDevice(RL_Agent):  # noqa: N801 - the name that users of rlstructures know
    """An agent that behaves exactly like ``agent``, and raises if a tensor is on the wrong device.

    The checks read devices, never values, so they cause no host sync and cost less than 2 % of a step. They are plain
    ``if`` statements, which ``python -O`` keeps.

    An agent sees ``env_info`` only in replays, inside the trajectories, where it is checked with the rest. Batcher,
    `DeviceEnv` and environments raise unless the ``env_info`` that they receive is on the CPU.

    Args:
        agent: the agent to check.
        device: the device that its tensors should be on.
        host_syncs: a factory of context managers, entered whenever the agent acts or replays: usually
            `rlstruct.testing.forbid_host_sync`, which raises on hidden copies to the CPU. None checks placement only.

    Raises:
        TypeError: ``agent`` is not an RL_Agent, or ``host_syncs`` is not such a factory.
        ValueError: the device does not exist on this machine.
    """

    def __init__(
        self,
        agent: RL_Agent,
        device: DeviceLike,
        *,
        host_syncs: Any | None = None,  # noqa: ANN401 - any callable that gives a context manager
    ) -> None:
        expect_agent("RL_Agent_CheckDevice: agent is", agent)
        if host_syncs is not None and (not callable(host_syncs) or hasattr(type(host_syncs), "__enter__")):
            raise BadTypeError(
                f"RL_Agent_CheckDevice: host_syncs is {kind_of(host_syncs)}, expected a function that returns a "
                "context manager. Pass forbid_host_sync of rlstruct.testing, without calling it, or None."
            )
        self.agent = agent
        self.device = resolve_device(device)
        self._guard = nullcontext if host_syncs is None else host_syncs
        self._name = type(agent).__name__

    @property
    def agent_info_on_device(self) -> bool:  # type: ignore[override]
        """The wrapped agent's setting."""
        return self.agent.agent_info_on_device

    @property
    def action_form(self) -> ActionForm:  # type: ignore[override]
        """The wrapped agent's form."""
        return self.agent.action_form

    @property
    def samples_with(self) -> str | None:  # type: ignore[override]
        """The wrapped agent's setting."""
        return self.agent.samples_with

    @property
    def pure(self) -> bool:  # type: ignore[override]
        """The wrapped agent's promise; False with ``host_syncs``, which a graph would skip."""
        return self._guard is nullcontext and self.agent.pure

    def __call__(
        self,
        state: DictTensor,
        observation: DictTensor,
        agent_info: DictTensor,
        history: TemporalDictTensor | None = None,
    ) -> tuple[DictTensor, DictTensor]:
        """Check the arguments, act, check the results; see `RL_Agent.__call__`."""
        self._check("__call__", agent_info=agent_info, state=state, observation=observation, history=history)
        with self._guard():
            answer = self.agent(state, observation, agent_info, history)
        return self._checked("__call__", answer)

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Check agent_info and the initial state; see `RL_Agent.initial_state`."""
        self._check("initial_state", agent_info=agent_info)
        state = self.agent.initial_state(agent_info, B)
        fix = "Return DictTensor({'name': tensor}) with one row per environment; DictTensor() is the empty one."
        expect_type(f"{self._name}.initial_state: returned", state, DictTensor, "a DictTensor", fix)
        self._check("initial_state", "result", **{"initial state": state})
        return state

    def call_replay(
        self, trajectories: Trajectories, t: int, state: DictTensor | None
    ) -> tuple[DictTensor, DictTensor]:
        """Check trajectories, state and results; see `RL_Agent.call_replay`."""
        self.check_trajectories(trajectories)
        if type(self.agent).call_replay is RL_Agent.call_replay:
            return super().call_replay(trajectories, t, state)  # calls __call__, which checks the rest
        self._check("call_replay", state=state)
        with self._guard():
            answer = self.agent.call_replay(trajectories, t, state)
        return self._checked("call_replay", answer)

    def states_at(self, trajectories: Trajectories, steps: Tensor | None = None) -> DictTensor | None:
        """Check trajectories and states; see `RL_Agent.states_at`."""
        self.check_trajectories(trajectories)
        with self._guard():
            states = self.agent.states_at(trajectories, steps)
        self._check("states_at", "result", states=states)
        return states

    def check_trajectories(self, trajectories: Trajectories) -> None:
        """Raise DeviceMismatchError unless trajectories, agent_info, env_info and first state are on this device."""
        parts: dict[str, DictTensor | TemporalDictTensor] = {
            "trajectories.info": trajectories.info,
            "trajectories": trajectories.steps,
        }
        self._check("call_replay", **parts)

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Forward to the agent."""
        self.agent.update(info)

    def seed(self, seed: int) -> None:
        """Forward to the agent."""
        self.agent.seed(seed)

    def require_history(self) -> bool:
        """Forward to the agent."""
        return self.agent.require_history()

    def creator(self) -> Callable[..., RL_Agent]:
        """Forward to the agent."""
        return self.agent.creator()

    def close(self) -> None:
        """Forward to the agent."""
        self.agent.close()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the agent has
        """Forward every other attribute to the agent."""
        # Protocols such as __deepcopy__ concern the wrapper itself; unpickling asks for "agent" before __init__ runs.
        if name == "agent" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.agent, name)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - whatever the agent takes
        """Set an attribute on the agent, unless it is the wrapper's own."""
        if name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, value)
        else:
            setattr(self.agent, name, value)

    def _checked(self, method: str, answer: object) -> tuple[DictTensor, DictTensor]:
        action, new_state = check_answer(f"{self._name}.{method}", answer)
        self._check(method, "result", action=action, new_state=new_state)
        return action, new_state

    def _check(
        self, method: str, role: str = "argument", /, **structures: DictTensor | TemporalDictTensor | None
    ) -> None:
        """Raise unless every structure is on the agent's device, or on the CPU for agent_info."""
        for name, structure in structures.items():
            if structure is not None:
                on = CPU if name == "agent_info" and not self.agent.agent_info_on_device else self.device
                fix = _fix(f"{role} {name}", on, self.agent.agent_info_on_device)
                expect(f"{self._name}.{method}: {role} {name}: tensor", structure, device=on, fix=fix)


def replayed_observation(steps: TemporalDictTensor) -> TemporalDictTensor:
    """Return the observations of a replay [B, T], with the stored action as ``chosen_action``.

    Args:
        steps: steps of trajectories; ``chosen_action`` is left out if they have no ``action/action``.  [B, T]
    """
    observation = steps.truncate_key("observation/")
    chosen = {"chosen_action": steps["action/action"]} if "action/action" in steps else {}
    return TemporalDictTensor.unchecked({**dict(observation.items()), **chosen}, steps.lengths)


def check_answer(where: str, answer: object) -> tuple[DictTensor, DictTensor]:
    """Return an agent's result, or raise TypeError unless it is a pair ``(action, new_state)`` of DictTensors."""
    if isinstance(answer, tuple) and len(answer) == 2:
        action, new_state = answer
        if isinstance(action, DictTensor) and isinstance(new_state, DictTensor):
            return action, new_state
        got = f"({type(action).__name__}, {type(new_state).__name__})"
    else:
        got = kind_of(answer)
    raise BadTypeError(
        f"{where}: returned {got}, expected the pair (DictTensor, DictTensor). "
        "Return DictTensor({'action': ...}), state: an agent without a state returns the one that it got."
    )


def _fix(role: str, expected: torch.device, agent_info_on_device: bool) -> str:
    to = f".to({str(expected)!r})"
    if role == "argument agent_info":
        wanted = f"The agent has agent_info_on_device = True: move it with {to}."
        return (
            wanted if agent_info_on_device else "Keep it on the CPU, or set agent_info_on_device = True on the agent."
        )
    if role.startswith("result"):
        return f"Create it with device={str(expected)!r}, or move the agent's model with {to}."
    if role == "argument observation":
        return f"Move it with {to}, or wrap the environment in DeviceEnv(env, {str(expected)!r})."
    return f"Move it with {to}, or move the agent's model to where it is."


def frame_of(observation: DictTensor | TemporalDictTensor, *, n_axes: int = 1) -> Tensor:
    """Return the frame; the parts of a Dict observation are flattened and concatenated in the order of their names.

    The first ``n_axes`` axes stay: 1 for [B, ...], 2 for [B, T, ...].

    >>> frame_of(DictTensor({"frame/b": torch.ones(1, 1), "frame/a": torch.zeros(1, 2, dtype=torch.int64)}))
    tensor([[0., 0., 1.]])
    """
    if "frame" in observation:
        return observation["frame"]
    parts = [observation[key] for key in sorted(observation.keys()) if key.startswith("frame/")]
    if not parts:
        return observation["frame"]  # raises a KeyError that lists the keys
    rows = [part.flatten(n_axes) if part.dim() > n_axes else part.unsqueeze(n_axes) for part in parts]
    return torch.cat([row.to(torch.float32) for row in rows], dim=n_axes)
