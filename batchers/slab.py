"""Where a batch is written: one slab of steps per collector, time first.

An observation is stored once. Slot t of the stream holds what the agent saw at step t, so slots 0 to T give both
``observation/`` (0 to T-1) and ``_observation/`` (1 to T). They differ only where an auto-resetting environment
restarted. On the CPU the true final observations of these are packed into ``final``, whose unused rows never become
real memory; on another device, which would have to be waited for to find them, ``reached`` holds all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlstruct.batchers.shared_memory import Layout
from rlstruct.core import DictTensor, TemporalDictTensor
from rlstruct.engine.graph import copy_grouped, layout_of
from rlstruct.errors import ShapeMismatchError, UsageError

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_BITS = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}

Allocate = Callable[[Layout], dict[str, Tensor]]


class Steps:
    """T steps of B environments by name, time first.

    Attributes:
        stream: T + 1 observations.  [T + 1, B, ...]
        action: T outputs of the agent.  [T, B, ...]
        running: which environments took part in a step.  [T, B] bool
        state: the agent's state before the first step.  [B, ...]
        final: true final observations of restarted environments, packed.  [T * B, ...], CPU only
        final_at: (t, b) of each packed row.  [T * B, 2] int64
        reached: true next observations.  [T, B, ...], only for auto-resetting environments off the CPU
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Sort the tensors of a layout (see `slab_layout`) by their prefix."""
        self.tensors = tensors
        self.stream = _part(tensors, "stream/")
        self.action = _part(tensors, "action/")
        self.state = _part(tensors, "state/")
        self.final = _part(tensors, "final/")
        self.reached = _part(tensors, "reached/")
        self.running = tensors["running"]
        self.final_at = tensors.get("final_at")


class Slab(Steps):
    """Steps that can be written, in memory that ``tensors`` brings.

    Attributes:
        slots: the observations of each step without ``rng``, for `VecEnv.lend`.  T + 1 of [B, ...]
        rng: the random keys of each step.  T + 1 of [B]
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        """Make the views that writing needs."""
        super().__init__(tensors)
        # Views of every step, made once.
        self.slots = _slots({k: v for k, v in self.stream.items() if k != "rng"})
        self.rng = self.stream["rng"].unbind(0)
        self._made_for = {
            "observation": layout_of(self.slots[0]._tensors),
            "agent: action": layout_of({k: v[0] for k, v in self.action.items()}),
            "agent: state": layout_of(self.state),
        }
        self._places = {tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.is_cpu}
        self._on_cpu = self.running.is_cpu
        self._action_rows = _rows([*self.action.values(), self.running])
        self._action_forms = [*map(_form, self._action_rows[0])]
        self._slot_forms = [*map(_form, self.slots[0].values())]
        self._reached_rows = _rows(list(self.reached.values()))
        # numpy gathers a few rows of a small tensor in a quarter of the time that torch takes.
        self._final_arrays = [_array(packed) for packed in self.final.values()]
        self._done = list(self.final).index("done") if self.final else 0
        self._reached_tensors: Sequence[Tensor | None] = [None] * len(self.final)
        self._reached_arrays: list[np.ndarray[Any, Any]] = []
        self._final_at = None if self.final_at is None else _array(self.final_at)

    def write_first(self, observation: DictTensor, state: DictTensor, keys: Tensor) -> None:
        """Write what is known before the first step; ``keys`` are those of all slots, [T + 1, B] int64."""
        self.stream["rng"].copy_(keys)
        places = [*self.slots[0].values(), *self.state.values()]
        self._copy(places, [*(observation[k] for k in self.slots[0]), *(state[k] for k in self.state)])

    def write_step(
        self, t: int, action: DictTensor, running: Tensor, reached: DictTensor, current: DictTensor | None
    ) -> None:
        """Write step t: what the agent returned, who took part, what they reached, and what the agent sees next, [B].

        ``reached`` is kept off the CPU only; ``current`` is None if it was written into the slot itself.

        Raises:
            ShapeMismatchError: keys, shapes or dtypes are other ones than before; a copy would repeat rows or round.
            KeyError: a key is missing.
        """
        places, values = self._action_rows[t], [*map(action._tensors.__getitem__, self.action), running]
        if len(action._tensors) != len(self.action) or [*map(_form, values)] != self._action_forms:
            self.check("agent: action", action)
        if current is not None:
            slot = self.slots[t + 1]
            places, values = [*places, *slot.values()], [*values, *self._checked(current)]
        if self.reached:
            places, values = [*places, *self._reached_rows[t]], [*values, *self._checked(reached)]
        self._copy(places, values)

    def _checked(self, observation: DictTensor) -> list[Tensor]:
        """The tensors of an observation, each of which fits into a slot without being repeated or rounded."""
        tensors = [observation[key] for key in self.slots[0]]
        if len(observation._tensors) != len(tensors) or [*map(_form, tensors)] != self._slot_forms:
            self.check("observation", observation)
        return tensors

    def _copy(self, places: list[Tensor], values: list[Tensor]) -> None:
        if self._on_cpu:
            torch._foreach_copy_(places, values)
        else:
            copy_grouped(places, values)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is memory of this slab, which the next batch writes again; always False off the CPU."""
        return tensor.is_cpu and tensor.untyped_storage().data_ptr() in self._places

    def write_restarts(self, t: int, reached: DictTensor, n_final: int) -> int:
        """Pack the true final observations of the environments that restarted after step t, on the CPU.

        Returns:
            How many rows of ``final`` the batch has used now; ``n_final`` were used before.
        """
        tensors = [reached[key] for key in self.final]
        if not all(map(operator.is_, tensors, self._reached_tensors)):
            self._reached_tensors = self._checked(reached)
            self._reached_arrays = [_array(tensor) for tensor in tensors]
        ended = self._reached_arrays[self._done].nonzero()[0]  # sync: of CPU memory, in steps with a restart only
        stop = n_final + len(ended)
        for packed, array in zip(self._final_arrays, self._reached_arrays, strict=True):
            packed[n_final:stop] = array[ended]
        if self._final_at is not None:
            self._final_at[n_final:stop, 0] = t
            self._final_at[n_final:stop, 1] = ended
        return stop

    def seen(self, t: int) -> dict[str, Tensor]:
        """Copy what the agent is shown at step t, for `refuse_changes`."""
        return {key: value[t].clone() for key, value in self.stream.items()}

    def refuse_changes(self, t: int, before: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if the agent has changed what it was shown: `seen` told ``before`` what that was."""
        for key, was in before.items():
            now = self.stream[key][t]
            if not bool(((now == was) | (now != now)).all()):  # sync: in the first batch only
                raise UsageError(
                    f"agent: it changed observation {key!r} in place, and with it the trajectories, which show the "
                    f"same memory. Change a copy: observation[{key!r}].clone()."
                )

    def check(self, role: str, tensors: DictTensor) -> None:
        """Raise unless tensors [B, ...] have the keys, shapes and dtypes that the slab was made for, in their role."""
        expected, found = self._made_for[role], layout_of(tensors._tensors)
        if expected != found:
            odd = next(k for k in sorted(expected.keys() | found.keys()) if expected.get(k) != found.get(k))
            wanted = _spell(expected[odd]) if odd in expected else "no such key"
            raise ShapeMismatchError(
                f"RL_Batcher: {role} {odd!r} is {_spell(found.get(odd))}, expected {wanted} "
                "as at the beginning. Return the same keys, shapes and dtypes always."
            )


def slab_layout(
    observation: DictTensor, action: DictTensor, state: DictTensor, T: int, packed: bool, full: bool
) -> Layout:
    """Describe the tensors of a Slab of T steps, by the names that it reads.

    Observation (with its ``rng``), action and state are [B]. Final observations are ``packed`` where environments
    restart on the CPU; elsewhere every one that was reached is kept (``full``).
    """
    B = observation.n_elems()
    layout: Layout = {}
    for key, value in observation.items():
        layout[f"stream/{key}"] = ((T + 1, *value.shape), value.dtype)
    for key, value in action.items():
        layout[f"action/{key}"] = ((T, *value.shape), value.dtype)
    for key, value in state.items():
        layout[f"state/{key}"] = (tuple(value.shape), value.dtype)
    layout["running"] = ((T, B), torch.bool)
    keys = [key for key in observation.keys() if key != "rng"]
    for key in keys if full else []:
        layout[f"reached/{key}"] = ((T, *observation[key].shape), observation[key].dtype)
    for key in keys if packed else []:
        layout[f"final/{key}"] = ((T * B, *observation[key].shape[1:]), observation[key].dtype)
    if packed:
        layout["final_at"] = ((T * B, 2), torch.int64)
    return layout


def stretched(layout: Layout, T: int) -> Layout:
    """Return the layout of T steps, given that of one."""

    def rows(name: str, of_one: int) -> int:
        if name.startswith("state/"):
            return of_one
        return T + 1 if name.startswith("stream/") else T * of_one

    return {name: ((rows(name, shape[0]), *shape[1:]), dtype) for name, (shape, dtype) in layout.items()}


def history_until(slab: Slab | None, observation: DictTensor, t: int, n_final: int, gaps: bool) -> TemporalDictTensor:
    """The t steps of a batch so far [B, t], with the keys of Trajectories: views where no environment restarted.

    With ``gaps`` environments may spend steps on their restarts, which are left out here as in Trajectories.
    """
    if slab is None:
        return _no_history(observation)
    steps = {f"observation/{k}": v[:t].transpose(0, 1) for k, v in slab.stream.items()}
    steps |= {f"action/{k}": v[:t].transpose(0, 1) for k, v in slab.action.items()}
    steps |= {f"_observation/{k}": v for k, v in next_observations(slab, t, n_final).items()}
    running = slab.running[:t].transpose(0, 1)
    return without_gaps(steps, running) if gaps else TemporalDictTensor(steps, running.sum(1))


def without_gaps(steps: dict[str, Tensor], running: Tensor) -> TemporalDictTensor:
    """Move the real steps of each row [B, T] to its front, into new memory with padding of zeros."""
    lengths = running.sum(1)
    order = torch.sort(running.to(torch.int8), dim=1, descending=True, stable=True).indices  # [B, T]
    rows = torch.arange(order.shape[0], device=order.device, dtype=torch.int64).unsqueeze(1)
    moved = {key: zero_after(value[rows, order], lengths) for key, value in steps.items()}
    return TemporalDictTensor._trusted(moved, lengths)  # a look at the lengths would wait for the device


def zero_after(tensor: Tensor, lengths: Tensor) -> Tensor:
    """Zero the padding of [B, T, ...] in place."""
    times = torch.arange(tensor.shape[1], device=tensor.device, dtype=torch.int64)
    padding = times.unsqueeze(0) >= lengths.unsqueeze(1)  # [B, T]
    as_signed(tensor).masked_fill_(padding.view(*padding.shape, *[1] * (tensor.dim() - 2)), 0)
    return tensor


def _no_history(observation: DictTensor) -> TemporalDictTensor:
    """A history of no step, before the first action. What an agent returns beside it is not known yet."""
    empty = {k: v.new_empty((v.shape[0], 0, *v.shape[1:])) for k, v in observation.items()}
    actions = {k.removeprefix("last_"): v for k, v in empty.items() if k.startswith("last_action")}
    empty["rng"] = observation["done"].new_empty((observation.n_elems(), 0), dtype=torch.int64)
    return TemporalDictTensor(
        {f"observation/{k}": v for k, v in empty.items()}
        | {f"_observation/{k}": v for k, v in empty.items()}
        | {f"action/{k}": v for k, v in actions.items()}
    )


def next_observations(slab: Slab, t: int, n_final: int) -> dict[str, Tensor]:
    """Return what the environments answered in the first t steps, before any restart, [B, t, ...].

    Views of the stream, except where an environment restarted.
    """
    following = {k: v[1 : t + 1].transpose(0, 1) for k, v in slab.stream.items()}
    following |= {k: v[:t].transpose(0, 1) for k, v in slab.reached.items()}
    if n_final and slab.final_at is not None:
        step, row = slab.final_at[:n_final].unbind(1)
        for key, packed in slab.final.items():
            following[key] = following[key].clone()
            as_signed(following[key])[row, step] = as_signed(packed[:n_final])
    return following


def as_signed(tensor: Tensor) -> Tensor:
    """The same memory in a dtype that torch can write by index or by mask: it has no such kernels for wide unsigned."""
    signed = _SIGNED.get(tensor.dtype)
    return tensor if signed is None else tensor.view(signed)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a tensor as a numpy array; a dtype that numpy lacks shows its bits."""
    bits = _BITS.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()  # sync: a view of CPU memory


def _slots(tensors: dict[str, Tensor]) -> list[DictTensor]:
    return [DictTensor._trusted(dict(zip(tensors, rows, strict=True))) for rows in _rows(list(tensors.values()))]


def _rows(tensors: list[Tensor]) -> list[list[Tensor]]:
    return [list(rows) for rows in zip(*(tensor.unbind(0) for tensor in tensors), strict=False)]


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def _spell(spec: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    return "missing" if spec is None else f"{list(spec[0])} {spec[1]}"
