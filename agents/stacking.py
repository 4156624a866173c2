"""An agent that stacks the latest frames itself, so a batch stores every frame only once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlstruct.agents.model_agent import module_device
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.layout import take_rows
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadTypeError, BadValueError, ShapeMismatchError
from rlstruct.rl_agent import ActionForm, RL_Agent, replays_sequences

_EARLIER = "earlier_frames"
_STORED = f"agent_state/{_EARLIER}"


class StackingAgent(RL_Agent):
    """Wrapper that shows an agent the last n frames (Mnih et al., 2015) of an environment that returns single ones.

    Actions, losses and weights equal, bit for bit, those of ``agent`` in an environment that stacks frames itself, such
    as gymnasium's FrameStackObservation; with n = 4 a batch needs a quarter of the memory. The first frame of an
    episode fills the first stack.

    The state is ``earlier_frames`` [B, n - 1, ...] and the wrapped agent's own state. Whole stacks without this state,
    as a `ReplayBuffer` with ``n_stack`` samples them, are shown unchanged.

    Args:
        agent: the agent, which gets ``frame`` [B, n, ...]. It must neither need a history nor define `call_replay`.
        shape: shape of a stack, [n, ...], n at least 2. The environment returns ``frame`` [B, 1, ...].
        device: device of the agent.
        dtype: dtype of the frames.

    Raises:
        TypeError: the agent needs a history, or defines `call_replay`.
        ValueError: the shape has fewer than 2 frames.

    >>> from rlstruct.agents import ActorCriticAgent, ConvolutionalActorCritic
    >>> model = ConvolutionalActorCritic((4, 84, 84), n_actions=6)
    >>> agent = StackingAgent(ActorCriticAgent(model), (4, 84, 84), device="cpu")
    >>> agent.initial_state(DictTensor(), 2)["earlier_frames"].shape
    torch.Size([2, 3, 84, 84])
    """

    shape: Final[tuple[int, ...]]
    dtype: Final[torch.dtype]

    def __init__(
        self, agent: RL_Agent, shape: Sequence[int], *, device: DeviceLike, dtype: torch.dtype = torch.uint8
    ) -> None:
        if agent.require_history() or type(agent).call_replay is not RL_Agent.call_replay:
            raise BadTypeError(
                f"StackingAgent: {type(agent).__name__} needs a history or defines call_replay, where it would see "
                "single frames. Let it read observation['frame'] in __call__ only."
            )
        if not shape or shape[0] < 2:
            raise BadValueError(f"StackingAgent: shape is {list(shape)}, expected [n, ...] with n of 2 or more.")
        self.agent, self.shape, self.dtype = agent, tuple(shape), dtype
        self.device = resolve_device(device)

    @classmethod
    def create(
        cls,
        model: nn.Module,
        *,
        create_agent: Callable[..., RL_Agent],
        shape: Sequence[int],
        dtype: torch.dtype = torch.uint8,
        device: DeviceLike | None = None,
        **settings: Any,  # noqa: ANN401 - whatever create_agent takes
    ) -> StackingAgent:
        """Create agent and wrapper: pass ``partial(StackingAgent.create, create_agent=…, shape=…)`` to a training.

        Args:
            model: the network.
            create_agent: factory of the agent, such as `rlstruct.agents.ActorCriticAgent`.
            shape: see `StackingAgent`.
            dtype: see `StackingAgent`.
            device: device of both; by default that of the model.
            settings: further arguments of create_agent.
        """
        device = module_device(model) if device is None else device
        return cls(create_agent(model, device=device, **settings), shape, device=device, dtype=dtype)

    @property
    def pure(self) -> bool:  # type: ignore[override]
        """The wrapped agent's promise."""
        return self.agent.pure

    @property
    def action_form(self) -> ActionForm:  # type: ignore[override]
        """The wrapped agent's form."""
        return self.agent.action_form

    @property
    def agent_info_on_device(self) -> bool:  # type: ignore[override]
        """The wrapped agent's setting."""
        return self.agent.agent_info_on_device

    @property
    def samples_with(self) -> str | None:  # type: ignore[override]
        """The wrapped agent's setting."""
        return self.agent.samples_with

    def initial_state(self, agent_info: DictTensor, B: int) -> DictTensor:
        """Return the agent's own state and ``earlier_frames``, zeros that the agent never sees."""
        earlier = torch.zeros(B, self.shape[0] - 1, *self.shape[1:], dtype=self.dtype, device=self.device)
        return self.agent.initial_state(agent_info, B) + DictTensor({_EARLIER: earlier})

    def __call__(
        self, state: DictTensor, observation: DictTensor, agent_info: DictTensor, history: object = None
    ) -> tuple[DictTensor, DictTensor]:
        """Call the agent with the stack of the earlier frames and ``observation["frame"]``; see `RL_Agent.__call__`.

        Raises:
            ShapeMismatchError: the frames are neither single ones of this shape nor stacks without ``earlier_frames``.
        """
        n, frame = self.shape[0], observation["frame"]
        single = _EARLIER in state
        if frame.shape[1:] != (1 if single else n, *self.shape[1:]) or frame.dtype != self.dtype:
            fix = "make the environment with stack=1" if single else f"DQN's replay buffer makes them with n_stack={n}"
            raise ShapeMismatchError(
                f"StackingAgent.__call__: observation 'frame' is {list(frame.shape)} {frame.dtype}, expected "
                f"{[len(frame), 1 if single else n, *self.shape[1:]]} {self.dtype}: {fix}."
            )
        if not single:
            return self.agent(state, observation, agent_info)
        stack = _stack(state[_EARLIER], frame, observation["initial_state"])
        stacked = DictTensor({**dict(observation.items()), "frame": stack})
        action, after = self.agent(_without(state, _EARLIER), stacked, agent_info)
        return action, after + DictTensor({_EARLIER: stack[:, 1:]})

    def states_at(self, trajectories: Trajectories, steps: Tensor | None = None) -> DictTensor | None:
        """Gather the frames before stored steps; None if `states_at` of the agent is. See `RL_Agent.states_at`."""
        info, steps_seen = trajectories.info, trajectories.steps
        states = self.agent.states_at(Trajectories.unchecked(_without(info, _STORED), steps_seen), steps)
        return None if states is None else states + DictTensor({_EARLIER: self._earlier_frames(trajectories, steps)})

    def replay_sequence(self, trajectories: Trajectories) -> tuple[DictTensor, DictTensor] | None:
        """Stack the frames of all steps and replay the agent; None if it has to act step by step.

        See `RL_Agent.replay_sequence`.
        """
        if not replays_sequences(self.agent):
            return None
        info, steps = trajectories.info, trajectories.steps
        frame, initial = steps["observation/frame"], steps["observation/initial_state"]
        stacks = _stack(self._earlier_frames(trajectories), frame.flatten(0, 1), initial.flatten())  # [B * T, n, ...]
        stacked = {**dict(steps.items()), "observation/frame": stacks.view(*initial.shape, *self.shape)}
        steps = TemporalDictTensor.unchecked(stacked, steps.lengths)
        sequence = self.agent.replay_sequence(Trajectories.unchecked(_without(info, _STORED), steps))
        return sequence and (sequence[0], sequence[1] + DictTensor({_EARLIER: stacks[:, 1:]}))

    def _earlier_frames(self, trajectories: Trajectories, steps: Tensor | None = None) -> Tensor:
        """Gather the frames before stored steps; see `RL_Agent.states_at`.  [K, n - 1, ...]."""
        steps_seen, earlier = trajectories.steps, trajectories.info[_STORED]
        frames, initial = steps_seen["observation/frame"], steps_seen["observation/initial_state"]
        B, T, n = *initial.shape, self.shape[0] - 1
        if T == 1 and steps is None:
            return earlier
        if steps is None:
            steps = torch.arange(B * T, device=frames.device)
        times = torch.arange(T, device=frames.device)
        # Places count from the oldest earlier frame. Find the place where the episode of each step begins, within the
        # steps that the state holds.
        begun = torch.where(initial, times + n, 0).cummax(1).values  # [B, T]
        begun = torch.cat([torch.zeros_like(begun[:, :1]), begun[:, :-1]], 1)
        wanted = (steps % T).unsqueeze(1) + torch.arange(n, device=frames.device)  # [K, n]
        wanted = torch.maximum(wanted, begun.flatten().index_select(0, steps).unsqueeze(1))
        return _gather(torch.cat([earlier, frames.squeeze(2)], 1), steps // T, wanted)

    def creator(self) -> Callable[..., RL_Agent]:
        """Return a factory of wrapper and agent; see `RL_Agent.creator`."""
        inner = self.agent.creator()
        return partial(StackingAgent.create, create_agent=inner, shape=self.shape, dtype=self.dtype)

    def update(self, info: Mapping[str, Tensor]) -> None:
        """Forward to the agent."""
        self.agent.update(info)

    def seed(self, seed: int) -> None:
        """Forward to the agent."""
        self.agent.seed(seed)

    def close(self) -> None:
        """Forward to the agent."""
        self.agent.close()


def _stack(earlier: Tensor, frame: Tensor, initial: Tensor) -> Tensor:
    """Append frames [B, 1, ...] to the earlier ones [B, n - 1, ...]; the first one of an episode fills its stack."""
    frames = torch.cat([earlier, frame], 1)  # [B, n, ...]
    # One more copy is cheaper than torch.where, which is slow for bytes on the CPU.
    B, n = frames.shape[:2]
    place = torch.where(initial.unsqueeze(1), n - 1, torch.arange(n, device=frame.device))  # [B, n]
    return _gather(frames, torch.arange(B, device=frame.device), place)


def _gather(frames: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """Gather the frames at places [K, n] of rows [K] from [B, P, ...].  [K, n, ...]."""
    index = row.unsqueeze(1) * frames.shape[1] + place
    return take_rows(frames.flatten(0, 1), index.flatten()).view(*place.shape, *frames.shape[2:])


def _without(tensors: DictTensor, key: str) -> DictTensor:
    return tensors.get([one for one in tensors.keys() if one != key])
