"""Memory of a batch: one rollout buffer per collector, time first.

Every observation is stored once. Slot t of the stream holds the observation of step t, so slots 0 to T-1 are
``observation/`` and slots 1 to T are ``_observation/``. The two differ only where an environment reset itself: there,
``reached`` holds the true next observation. On the CPU only those rows of ``reached`` are written, so the others never
occupy real memory. On an accelerator the host would have to wait to learn which rows those are, so all are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstruct.core import DictTensor, Layout, TemporalDictTensor, expect
from rlstruct.core.layout import as_signed, take_rows
from rlstruct.core.named_tensors import part_of
from rlstruct.engine.graph import copy_grouped
from rlstruct.errors import UsageError
from rlstruct.functional.random import StepKeys
from rlstruct.rl_agent import STATE_FIX
from rlstruct.vec_env import FLAGS, Ended, ObservationBuffer, Observed

_BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}

Allocate = Callable[[Layout], dict[str, Tensor]]


class Rollout:
    """T steps of B environments: tensors by name, with time as the first axis.

    Attributes:
        stream: T + 1 observations.  [T + 1, B, ...]
        action: T outputs of the agent.  [T, B, ...]
        running: True where an environment took part in the step.  [T, B] bool
        state: the agent's state before the first step.  [B, ...]
        reached: true next observations; empty unless the environment resets itself.  [T, B, ...]
        restarted: True for rows of ``reached`` that are valid; None on an accelerator, where all are.  [T, B] bool
        packed: True if ``reached`` has only the valid rows.  [K, ...]
    """

    def __init__(self, tensors: dict[str, Tensor], packed: bool = False) -> None:
        self.tensors, self.packed = tensors, packed
        self.stream = part_of(tensors, "stream/")
        self.action = part_of(tensors, "action/")
        self.state = part_of(tensors, "state/")
        self.reached = part_of(tensors, "reached/")
        self.running = tensors["running"]
        self.restarted = tensors.get("restarted")

    def final_rows(self, n_steps: int) -> Tensor:
        """Return the indices t * B + b of the valid rows of ``reached`` in the first n_steps.  [K] int64 on the CPU."""
        if self.restarted is None:
            return torch.zeros(0, dtype=torch.int64, device="cpu")
        return self.restarted[:n_steps].flatten().nonzero().squeeze(1)  # sync: of CPU memory


class RolloutBuffer(Rollout):
    """Writable `Rollout`.

    Args:
        tensors: the memory, with the layout of `rollout_layout`.
        in_place: True if the environment writes its observations into the buffer itself, with `StepsInto.step_into`.

    Attributes:
        slots: observation of each step, without ``rng``.                   T + 1 of [B, ...]
        shown: observation of each step as the agent sees it, with ``rng``. T + 1 of [B, ...]
        observation_buffers: ``slots`` as numpy arrays for ``step_into``; empty unless ``in_place``.  T + 1 of [B, ...]
        final_buffers: buffers for the true final observations; each None if the environment does not reset itself.
            T of [B, ...]
    """

    def __init__(self, tensors: dict[str, Tensor], in_place: bool = False) -> None:
        super().__init__(tensors)
        self._keys = StepKeys(self.stream["rng"])
        planes = {key: plane for key, plane in self.stream.items() if key != "rng"}
        self.slots = [DictTensor.unchecked(dict(zip(planes, r, strict=True))) for r in _rows([*planes.values()])]
        self.shown = [
            DictTensor.unchecked({**slot._tensors, "rng": key})
            for slot, key in zip(self.slots, self._keys.rows, strict=True)
        ]
        self._layouts = {
            "environment: observation": Layout.of(self.slots[0]),
            "environment: mask": Layout.of({"running": self.running}, drop=1),
            "agent: action": Layout.of(self.action, drop=1),
            "agent: state": Layout.of(self.state),
        }
        storages = [tensor.untyped_storage() for tensor in tensors.values()]
        self._places = {(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages}
        self._copy: Callable[..., object] = torch._foreach_copy_ if self.running.is_cpu else copy_grouped
        self._action_rows = _rows([*self.action.values()])
        # Lists, because each step compares them with its own.
        self._action_names, self._action_specs = [*self.action], [*self._layouts["agent: action"].values()]
        self._observation_specs = [*self._layouts["environment: observation"].values()]
        self._running_rows = self.running.unbind(0)
        self._restarted = None if self.restarted is None else _array(self.restarted)
        sparse = self._restarted is not None
        self._reached_rows = [] if sparse else _rows(list(self.reached.values()))
        self._reached_arrays = {key: _array(plane) for key, plane in self.reached.items()} if sparse else {}
        self.observation_buffers = _buffers(planes) if in_place else []
        reached = _buffers(self.reached) if in_place and sparse else [None] * len(self.running)
        self.final_buffers: list[ObservationBuffer | None] = [*reached]

    def begin(self, observation: DictTensor, state: DictTensor, keys: Tensor) -> DictTensor:
        """Write the first observation, the agent's state and the random keys of all slots, [T + 1, B] int64.

        Returns:
            The agent's state to start from, copied where it shares memory with this buffer, which is overwritten now.
        """
        self.check("environment: observation", observation)
        self.check("agent: state", state)
        if self.state:
            state = self.copy_aliased(state)
        self._keys.write(keys)
        slot = self.slots[0]._tensors
        values = [*map(observation._tensors.__getitem__, slot), *map(state._tensors.__getitem__, self.state)]
        self._copy([*slot.values(), *self.state.values()], values)
        if self.restarted is not None:
            self.restarted.fill_(False)
        if self.observation_buffers:
            self.running.fill_(True)
            for flag in FLAGS:
                self.stream[flag][1:].fill_(False)
        return state

    def write_action(self, t: int, action: DictTensor) -> None:
        """Store the agent's output of step t, [B]. Call this before the environment gets the action and may modify it.

        Raises:
            ShapeMismatchError: keys, shapes or dtypes differ from the first step; a copy would broadcast or round.
        """
        tensors = action._tensors
        values = [*tensors.values()]
        fits = [*tensors] == self._action_names
        for value, spec in zip(values, self._action_specs, strict=False):
            fits = fits and (value.shape, value.dtype) == spec
        if not fits:
            self.check("agent: action", action)  # passes if only the order of the keys differs
            values = [tensors[name] for name in self._action_names]
        self._copy(self._action_rows[t], values)

    def write_ended(self, t: int, ended: Ended) -> None:
        """Store which rows took part in step t and which restarted, for an environment that writes in place."""
        if ended.ran is not None:
            self._running_rows[t].copy_(ended.ran)
        if self._restarted is not None:
            for row in ended.restarted:  # one by one: there are few, and indexing by a list is slower
                self._restarted[t, row] = True

    def write_step(self, t: int, step: tuple[Observed, Observed]) -> None:
        """Copy the result of step t: the running mask, the observations reached, and those the agent sees next.

        Raises:
            ShapeMismatchError: keys, shapes or dtypes differ from the first step; a copy would broadcast or round.
        """
        (reached, ran), (current, _) = step
        if ran.shape != self._running_rows[t].shape or ran.dtype is not torch.bool:
            self.check("environment: mask", DictTensor({"running": ran}))
        places = [self._running_rows[t], *self.slots[t + 1].values()]
        values = [ran, *self._checked(current)]
        if self._reached_rows:
            places, values = [*places, *self._reached_rows[t]], [*values, *self._checked(reached)]
        self._copy(places, values)
        if getattr(step, "restarted", True):
            self.write_final(t, reached)

    def write_final(self, t: int, reached: DictTensor) -> None:
        """Store the observations [B] that step t reached, in rows where an episode has ended; CPU only."""
        if self._restarted is None:
            return
        ended = _array(reached["done"]).nonzero()[0]  # sync: of CPU memory
        if len(ended):
            self._checked(reached)
            self._write_reached(t, ended, reached)
            self._restarted[t, ended] = True

    def write_final_frames(self, t: int, frames: DictTensor) -> None:
        """Store what `rows` leaves out of the observations [B] that step t reached, where an episode has ended."""
        ended = self._restarted[t].nonzero()[0]  # type: ignore[index]  # sync: of CPU memory
        if len(ended):
            self._write_reached(t, ended, frames)

    def _write_reached(self, t: int, rows: np.ndarray[Any, Any], reached: DictTensor) -> None:
        for key, tensor in reached._tensors.items():
            self._reached_arrays[key][t, rows] = _array(tensor)[rows]

    def rows(self) -> list[dict[str, Tensor]]:
        """Return the memory that each step fills, for an environment on the CPU that resets itself.

        Returns:
            ``action/…``; ``current/…`` for the next observation; ``reached/…`` for those parts of the one reached that
            are a number, in all rows; and ``restarted``.  T of [B, ...]
        """
        planes = {f"action/{key}": plane for key, plane in self.action.items()}
        planes |= {f"current/{key}": plane[1:] for key, plane in self.stream.items() if key != "rng"}
        planes |= {f"reached/{key}": plane for key, plane in self.reached.items() if plane.dim() == 2}
        planes["restarted"] = self.tensors["restarted"]
        return [dict(zip(planes, rows, strict=True)) for rows in _rows([*planes.values()])]

    def _checked(self, observation: DictTensor) -> list[Tensor]:
        """Return the tensors of an observation, checked: a copy of each neither broadcasts nor rounds."""
        tensors = [*map(observation._tensors.get, self.slots[0]._tensors)]
        if (
            len(observation._tensors) != len(tensors)
            or [None if v is None else (v.shape, v.dtype) for v in tensors] != self._observation_specs
        ):
            self.check("environment: observation", observation)
        return [v for v in tensors if v is not None]

    def copy_aliased(self, part: DictTensor) -> DictTensor:
        """Copy the tensors that share memory with this buffer, which the next batch overwrites."""

        def is_inside(tensor: Tensor) -> bool:
            first = tensor.untyped_storage().data_ptr()  # that of a numpy array may be anywhere in the buffer
            return any(start <= first < end for start, end in self._places)

        return part.map(lambda tensor: tensor.clone() if is_inside(tensor) else tensor)

    def check_unchanged(self, t: int, before: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if the agent modified the observation of step t, of which ``before`` is a copy."""
        for key, was in before.items():
            now = self.stream[key][t]
            if not bool(((now == was) | (now != now)).all()):  # sync: in the first batch only
                raise UsageError(
                    f"agent: it modified observation {key!r} in place, which also changes the trajectories: they share "
                    f"its memory. Modify a copy instead: observation[{key!r}].clone()."
                )

    def check(self, role: str, tensors: DictTensor) -> None:
        """Raise unless tensors [B, ...] have the keys, shapes and dtypes that this role had in the first step."""
        fix = STATE_FIX if role == "agent: state" else "Return the same keys, shapes and dtypes in every step."
        expect(f"RL_Batcher: {role}", tensors, self._layouts[role], fix=fix)


def rollout_layout(observation: DictTensor, action: DictTensor, state: DictTensor, T: int, restarts: bool) -> Layout:
    """Return the layout of a RolloutBuffer of T steps.

    ``observation`` (including ``rng``), ``action`` and ``state`` are [B]. ``restarts`` is True if the environments
    reset themselves.
    """
    layout, flags = Layout.of(observation), {"running": ((T, observation.n_elems()), torch.bool)}
    frames = Layout({key: spec for key, spec in layout.items() if key != "rng"})
    parts: list[Mapping[str, tuple[tuple[int, ...], torch.dtype]]] = [
        layout.behind(T + 1, prefix="stream/"),
        Layout.of(action).behind(T, prefix="action/"),
        Layout.of(state).behind(prefix="state/"),
        flags,
    ]
    if restarts:
        parts.append(frames.behind(T, prefix="reached/"))
        parts += [{"restarted": flags["running"]}] if observation["done"].is_cpu else []
    return Layout({name: spec for part in parts for name, spec in part.items()})


def empty_rollout(observation: DictTensor) -> Rollout:
    """Return the memory of zero steps, before the agent's first call shows what it returns besides the action.

    ``observation`` is [B] and includes ``rng``.
    """
    last = {k.removeprefix("last_"): v for k, v in observation.items() if k.startswith("last_action")}
    layout = rollout_layout(observation, DictTensor(last), DictTensor(), 0, restarts=False)
    return Rollout(layout.allocate(observation["rng"].device))


def history_until(steps: Rollout, t: int, restarts_take_steps: bool) -> TemporalDictTensor:
    """Return the first t steps of a batch [B, t] with the keys of Trajectories, as views where possible.

    With ``restarts_take_steps``, steps that environments spend on their restarts are left out, as in Trajectories.
    """
    joined, running = join_rollouts([(steps, t)], t, copy=False), steps.running[:t].transpose(0, 1)
    return (
        compact_rows(joined, running) if restarts_take_steps else TemporalDictTensor.unchecked(joined, running.sum(1))
    )


def join_rollouts(
    parts: Sequence[tuple[Rollout, int]],
    T: int,
    *,
    rows: Tensor | None = None,
    lengths: Tensor | None = None,
    copy: bool = True,
) -> dict[str, Tensor]:
    """Join the steps of all parts, [B, T, ...] with the keys of Trajectories.

    Args:
        parts: steps, and how many of them were taken.
        T: the number of steps; shorter parts end in zeros.
        rows: the rows to keep; None keeps all.
        lengths: the lengths of episodes, after which there are zeros; None if every step is real.
        copy: False returns views of the only part, except for keys in which restarts have hidden an observation.
    """
    steps: dict[str, Tensor] = {}
    own = parts[0][0]
    groups = [("stream", own.stream, 1), ("action", own.action, 0)]  # slot `lengths` of the stream ends an episode
    if own.restarted is None:  # otherwise only some rows of ``reached`` are written
        groups.append(("reached", own.reached, 0))
    for group, planes, extra in groups:
        for key, plane in planes.items():
            # [T + extra, B, ...]
            joined = join_tensor(parts, f"{group}/{key}", T, extra) if copy else plane[: T + extra]
            if lengths is not None:
                joined = joined if rows is None else take_rows(joined, rows, 1)
                zero_after(joined.transpose(0, 1), lengths + extra)
            if group == "stream":
                steps[f"observation/{key}"] = joined[:T].transpose(0, 1)
                steps[f"_observation/{key}"] = joined[1:].transpose(0, 1)
            else:
                steps[f"action/{key}" if group == "action" else f"_observation/{key}"] = joined.transpose(0, 1)
    first, copied = 0, set[str]()
    n_envs = steps["observation/done"].shape[0]
    for part, n_steps in parts:  # where environments restarted, write final observations to copies of their keys
        B = part.running.shape[1]
        at = part.final_rows(n_steps)
        if len(at):
            to = at if n_envs == B else at.div(B, rounding_mode="floor") * n_envs + at % B + first
            for key, plane in part.reached.items():
                final = as_signed(plane) if part.packed else as_signed(plane).flatten(0, 1).index_select(0, at)
                name = f"_observation/{key}"
                time_first = steps[name].transpose(0, 1)
                if name not in copied:
                    copied.add(name)
                    time_first = time_first.clone(memory_format=torch.contiguous_format)
                    steps[name] = time_first.transpose(0, 1)
                as_signed(time_first).flatten(0, 1).index_copy_(0, to, final)
        first += B
    return steps


def join_tensor(parts: Sequence[tuple[Rollout, int]], name: str, T: int, extra: int = 0) -> Tensor:
    """Join T + extra steps of one tensor, [T + extra, B, ...], see `join_rollouts`.

    Time stays the first axis: this copies whole rows, several times faster than a transposed copy, and gives every
    batch the same strides.
    """
    cut = []
    for part, n_steps in parts:
        taken = part.tensors[name][: min(n_steps, T) + extra]  # later slots hold an older batch
        if n_steps < T:
            taken = torch.cat([taken, taken.new_zeros((T - n_steps, *taken.shape[1:]))])
        cut.append(taken)
    return torch.cat(cut, dim=1)


def compact_rows(steps: dict[str, Tensor], running: Tensor) -> TemporalDictTensor:
    """Move the real steps of each row [B, T] to its front, into new memory with padding of zeros."""
    lengths = running.sum(1)
    order = torch.sort(running.to(torch.int8), dim=1, descending=True, stable=True).indices  # [B, T]
    rows = torch.arange(order.shape[0], device=order.device, dtype=torch.int64).unsqueeze(1)
    moved = {key: zero_after(value[rows, order], lengths) for key, value in steps.items()}
    return TemporalDictTensor.unchecked(moved, lengths)  # checking the lengths would wait for the device


def zero_after(tensor: Tensor, lengths: Tensor) -> Tensor:
    """Zero the padding of [B, T, ...] in place."""
    times = torch.arange(tensor.shape[1], device=tensor.device, dtype=torch.int64)
    padding = times.unsqueeze(0) >= lengths.unsqueeze(1)  # [B, T]
    as_signed(tensor).masked_fill_(padding.view(*padding.shape, *[1] * (tensor.dim() - 2)), 0)
    return tensor


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """View a tensor as a numpy array; dtypes that numpy lacks become their bit patterns."""
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()  # sync: a view of CPU memory


def _buffers(planes: dict[str, Tensor]) -> list[ObservationBuffer]:
    """View each step of planes [T, B, ...] as numpy arrays."""
    arrays = {key: _array(plane) for key, plane in planes.items()}
    return [ObservationBuffer({key: array[t] for key, array in arrays.items()}) for t in range(len(planes["done"]))]


def _rows(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [list(rows) for rows in zip(*(tensor.unbind(0) for tensor in tensors), strict=False)]
