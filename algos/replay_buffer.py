"""A replay buffer that stores every observation once, and still has the true next observation of every step.

Each environment has a ring of slots. An episode of n steps takes n + 1 consecutive slots: one for the observation of
each step, and one for the final observation, on which the agent does not act. So the next observation of a step is
always in the next slot, even after truncation or termination, and the observation after n steps is n slots further.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlstruct import renamed
from rlstruct.core import DictTensor, TemporalDictTensor, Trajectories
from rlstruct.core.layout import as_signed, take_rows
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.errors import BadValueError, DeviceMismatchError, ShapeMismatchError
from rlstruct.functional import random
from rlstruct.functional.q_learning import n_step_reward
from rlstruct.options import Range, check_seed
from rlstruct.profiling import operation

_POSITIVE = 2**63 - 1
MOST_BYTES = 1 << 26  # of samples that are gathered together
_FROM_STEPS = ("_observation/reward", "_observation/terminated")
# Per slot: True if it holds a step that can be sampled; number of such steps before it in its environment; slot of the
# step with this number; number of steps of its episode before it.
_OF_SLOTS = {"ready": torch.bool, "number": torch.int64, "slot_of": torch.int64, "age": torch.int64}


def min_capacity(n_envs: int, n_timesteps: int, n_stack: int = 1) -> int:
    """Return the smallest capacity for batches of ``n_timesteps``, any step of which may end an episode."""
    return n_envs * (2 * n_timesteps + n_stack)


class ReplayBuffer:
    """Replay buffer of the latest steps of B environments, sampled uniformly with replacement.

    All memory is allocated by the first `extend`, when dtypes and shapes are known. Only `n_transitions` waits for the
    device.

    Args:
        capacity: number of observations over all environments: one per step, and one more per episode.
        device: device of the buffer: that of the trajectories and usually of the learner.
        n_step: number of steps in the return; fewer at the end of an episode and of the data.
        discount: per-step factor of the n-step return; negative if two players take turns.
        n_stack: number of images in a frame: frames are stacks [n_stack, ...] with the newest image last, or single
            images [1, ...] as for `rlstruct.agents.StackingAgent`. Only the newest image is stored; samples rebuild
            the stack from earlier steps.
        stack_padding: how the environment fills the stack of an episode's first steps: with its first frame
            (``"reset"``, as gymnasium's FrameStackObservation does by default) or with zeros.
        seed: seed of the sampling, which is equal on all devices. It may equal the seed of a batcher.

    Raises:
        ValueError: a number is out of range, or the device does not exist.

    Attributes:
        device: device of the buffer.
        columns: all stored tensors by name, with one row per slot.
    """

    def __init__(
        self,
        capacity: int,
        *,
        device: DeviceLike = "cpu",
        n_step: int = 1,
        discount: float = 0.99,
        n_stack: int = 1,
        stack_padding: Literal["reset", "zero"] = "reset",
        seed: int = 0,
    ) -> None:
        for name, number in (("capacity", capacity), ("n_step", n_step), ("n_stack", n_stack)):
            Range(at_least=1, whole=True).check(type(self).__name__, name, number)
        self.device = resolve_device(device)
        self.capacity, self.n_step, self.n_stack = map(int, (capacity, n_step, n_stack))  # 1e6 is a whole number, too
        self.discount, self.stack_padding = discount, stack_padding
        self.columns: dict[str, Tensor] = {}
        self._state: dict[str, Tensor] = {}  # one number per environment; captured graphs read this memory
        self._ring, self._width = 0, 0
        self._bases = torch.zeros(0, dtype=torch.int64, device=self.device)
        seeds = torch.full((1,), check_seed("ReplayBuffer", "seed", seed), dtype=torch.int64, device=self.device)
        self._seed = random.purpose_seed(seeds, "replay buffer")
        self._n_draws = torch.zeros((), dtype=torch.int64, device=self.device)  # read and written by captured graphs
        self._drawable = False  # True once at least one step can certainly be sampled

    @operation("replay buffer")
    def extend(self, trajectories: Trajectories) -> None:
        """Add steps, overwriting the oldest.

        If a row does not continue the previous call, because the environments were reset or a batch was skipped, the
        previous episode counts as unfinished.

        Args:
            trajectories: the next steps of every environment, which must reset itself.  [B, T] on ``device``

        Raises:
            DeviceMismatchError: the trajectories are on another device.
            ShapeMismatchError: the number of rows has changed, or T steps do not fit.
            KeyError: the trajectories lack a key.
            MemoryError: the buffer does not fit into the device's memory.
        """
        steps = trajectories.steps
        if steps.n_steps() == 0:
            return
        self._check(steps)
        if not self.columns:
            self._allocate(steps)
        real = steps.mask()
        done = real & steps["_observation/done"]
        initial = real & steps["observation/initial_state"]
        place, age, ready = self._place(real, done, initial, trajectories.info["step"])  # [B, T]
        number = self._state["count"].unsqueeze(1) + ready.cumsum(1) - ready.to(torch.int64)
        slot, next_slot = self._slot(place, real), self._slot(place + 1, real)
        for name, column in self.columns.items():
            if name.startswith("observation/"):
                # The next observation of a step, or the final one of its episode, has the same slot as the step after.
                self._write(column, next_slot, self._newest(steps[f"_{name}"]))
                self._write(column, slot, self._newest(steps[name]))
            elif name not in _OF_SLOTS:
                self._write(column, slot, steps[name])
        # A final observation has no step, and the latest observation has none until its step arrives.
        for name, here, behind in (
            ("ready", ready, torch.zeros_like(ready)),
            ("number", number, number + ready),
            ("age", age, age + 1),
        ):
            self._write(self.columns[name], next_slot, behind)
            self._write(self.columns[name], slot, here)
        self._write(self.columns["slot_of"], self._slot(number, ready), slot)
        self._state["count"] += ready.sum(1)
        self._find_range()
        # Wherever a row starts, its n_stack-th step has a full stack.
        self._drawable |= steps.n_steps() >= self.n_stack
        self._stored(slot, next_slot, ready)

    @operation("replay buffer")
    def sample(self, batch_size: int) -> DictTensor:
        """Sample steps.

        Returns:
            The agent's observations (``observation/frame…``), its outputs (``action/…``), and the result after m
            steps, where m is ``n_step``, or fewer if the episode or the data ends before.  [K]

            ===================== ========================================================================
            key                   meaning
            ===================== ========================================================================
            reward                sum over i < m of discount^i * reward i.  float32
            discount              discount^m.  float32
            terminated            True if the episode terminated within the m steps.  bool
            ``_observation/…``    the true frames after m steps, even at an episode's end
            index                 slot of the step.  int64
            weight                importance in the loss, 1 for uniform sampling.  float32
            ===================== ========================================================================

        Raises:
            ValueError: the buffer holds no step that can be sampled.
        """
        self._check_drawable()
        read = self._gather(batch_size, 1)
        self._n_draws += 1
        return DictTensor(read)

    def samples(self, batch_size: int, n: int) -> Iterator[DictTensor]:
        """Sample n times, with the results of as many calls of `sample` while nothing is added to the buffer.

        Uniform samples are gathered together, see `stacks`, which is several times as fast.
        """
        if not self.draws_uniformly():
            for _ in range(n):
                yield self.sample(batch_size)
            return
        for stack in self.stacks(batch_size, n):
            for row in zip(*(value.unbind() for _, value in stack.items()), strict=True):
                yield DictTensor.unchecked(dict(zip(stack.keys(), row, strict=True)))

    def stacks(self, batch_size: int, n: int) -> Iterator[DictTensor]:
        """Yield n uniform samples as equally large stacks of up to 64 MiB.  [k, batch_size], k divides n."""
        self._check_drawable()
        size = sum(column[0].nbytes for column in self.columns.values())
        most = max(1, MOST_BYTES // (2 * size * self.n_stack * batch_size))
        k = next(k for k in range(min(n, most), 0, -1) if n % k == 0)
        for _ in range(n // k):
            with operation("replay buffer"):
                read = self._gather(batch_size, k)
            self._n_draws += k
            yield DictTensor({key: value.view(k, batch_size, *value.shape[1:]) for key, value in read.items()})

    def draws_uniformly(self) -> bool:
        """Return True unless a class of your own chooses the steps of a sample."""
        return all(getattr(type(self), name) is getattr(ReplayBuffer, name) for name in ("sample", "samples", "_draw"))

    def _gather(self, batch_size: int, n: int) -> dict[str, Tensor]:
        """Return the next n samples, one after the other.  [n * batch_size, ...]."""
        # One key per draw, from a counter: equal on all devices, without waiting.
        lanes = torch.arange(batch_size, device=self.device, dtype=torch.int64)
        draws = self._n_draws + torch.arange(n, device=self.device, dtype=torch.int64)
        keys = random.step_keys(self._seed.expand(n), draws, lanes)  # [batch_size, n]
        index, weight = self._draw(keys.t().flatten())
        return self._read(index) | {"index": index, "weight": weight}

    def _check_drawable(self) -> None:
        if not self.columns:
            raise BadValueError(f"{type(self).__name__}.sample: the buffer is empty. Call extend() first.")
        # This waits for the device only as long as every batch was shorter than a stack.
        self._drawable = self._drawable or self.n_transitions() > 0
        if not self._drawable:
            raise BadValueError(
                f"{type(self).__name__}.sample: 0 steps can be sampled, expected at least 1: every stored row starts "
                f"mid-episode, and n_stack is {self.n_stack}, so its first {self.n_stack - 1} steps lack images of "
                "their stacks. Add the steps that follow, or begin with the batch after a reset."
            )

    def n_transitions(self) -> int:
        """Return how many steps can be sampled. Waits for the device."""
        return int(self._state["ends"][-1]) if self.columns else 0  # sync: the answer is a Python int, once per call

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; its tensors share the buffer's memory."""
        return {"columns": dict(self.columns), "state": dict(self._state), "n_draws": self._n_draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of a buffer with the same settings.

        Raises:
            ShapeMismatchError: this buffer has another capacity, or holds steps of another number of environments or
                with other keys.
        """
        saved: dict[str, Tensor] = {**state["columns"], **state["state"]}
        if state["columns"]:
            n_envs, n_slots = len(state["state"]["head"]), len(state["columns"]["ready"])
            if n_slots != n_envs * (self.capacity // n_envs + 1):
                raise ShapeMismatchError(
                    f"{type(self).__name__}.load_state_dict: the state has room for {n_slots // n_envs - 1} "
                    f"observations of each of {n_envs} environments, expected {self.capacity // n_envs}: the capacity "
                    f"is {self.capacity}. Create the buffer with the capacity of the saved one."
                )
        if not self.columns:
            self.columns = {name: self._zeros(tuple(v.shape), v.dtype) for name, v in state["columns"].items()}
            self._state = {name: torch.empty_like(v, device=self.device) for name, v in state["state"].items()}
        own = {**self.columns, **self._state}
        if (found := {k: v.shape for k, v in own.items()}) != (given := {k: v.shape for k, v in saved.items()}):
            raise ShapeMismatchError(
                f"{type(self).__name__}.load_state_dict: the state has {_shapes(given)}, expected {_shapes(found)}, as "
                "the buffer holds. Load it into a new buffer."
            )
        for name, value in own.items():
            value.copy_(saved[name])  # in place, because captured graphs read this memory
        self._n_draws.fill_(int(state["n_draws"]))  # sync: of a checkpoint
        self._drawable = False
        if self._state:
            self._lay_out(len(self._state["head"]))

    def _draw(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Choose steps by random keys [K]; return their slots [K] int64 and importance [K] float32."""
        ends, first = self._state["ends"], self._state["first"]
        drawn = (key & _POSITIVE) % ends[-1].clamp(min=1)  # 63 random bits: the bias is negligible
        row = torch.searchsorted(ends, drawn, right=True)
        number = drawn + first.index_select(0, row)
        index = row * self._width + number % self._ring
        return self.columns["slot_of"].index_select(0, index), torch.ones_like(drawn, dtype=torch.float32)

    def _stored(self, slot: Tensor, next_slot: Tensor, ready: Tensor) -> None:
        """React to a write: slots of the steps and of their next observations, and which can be sampled; [B, T]."""

    def _read(self, index: Tensor) -> dict[str, Tensor]:
        columns = self.columns
        window = self._move(index.unsqueeze(1), torch.arange(self.n_step, device=self.device))  # [K, n]
        reward, length = n_step_reward(columns["_observation/reward"][window], columns["ready"][window], self.discount)
        reached = self._move(index, length)
        batch = {name: take_rows(columns[name], index) for name in columns if name.startswith("action/")}
        for name in columns:
            if name.startswith("observation/"):
                batch[name] = self._frames(name, index)
                batch[f"_{name}"] = self._frames(name, reached)
        return batch | {
            "reward": reward,
            "discount": self.discount ** length.to(reward.dtype),
            "terminated": columns["_observation/terminated"].index_select(0, self._move(index, length - 1)),
        }

    def _frames(self, name: str, index: Tensor) -> Tensor:
        """Return observations [K, ...], or stacks [K, n_stack, ...] of the latest images of the same episode."""
        column = self.columns[name]
        if self.n_stack == 1:
            return take_rows(column, index)
        back = torch.arange(self.n_stack - 1, -1, -1, device=self.device)
        age = self.columns["age"].index_select(0, index).unsqueeze(1)  # [K, 1]
        stack = as_signed(column)[self._move(index.unsqueeze(1), -torch.minimum(back, age))]  # [K, n_stack, ...]
        if self.stack_padding == "zero":
            before = (back > age).view(*stack.shape[:2], *[1] * (stack.dim() - 2))
            stack = stack.masked_fill(before, 0)
        return stack.view(column.dtype)

    def _newest(self, frames: Tensor) -> Tensor:
        return frames if self.n_stack == 1 else frames[:, :, -1]

    def _move(self, index: Tensor, by: Tensor) -> Tensor:
        """Move forward or backward from slots, around the ring of their environment."""
        position = index % self._width
        return index - position + (position + by) % self._ring

    def _slot(self, place: Tensor, real: Tensor) -> Tensor:
        """Convert places [B, T], counted per environment, to slots; padding gets the environment's spare slot."""
        return self._bases.unsqueeze(1) + torch.where(real, place % self._ring, self._ring)

    @staticmethod
    def _write(column: Tensor, slot: Tensor, value: Tensor) -> None:
        as_signed(column)[slot] = as_signed(value.to(column.dtype))

    def _place(self, real: Tensor, done: Tensor, initial: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the places of new steps, and move each environment's head past them.

        Returns:
            ``(place, age, ready)``: place of each step, counted per environment; number of known earlier steps of its
            episode; True if it can be sampled.  [B, T] each
        """
        state, T = self._state, real.shape[1]
        broken = (step != state["next_step"]) | initial[:, 0]
        # If the episode has not ended, the last observation of a broken row keeps its slot as a next observation.
        head = state["head"] + (broken & ~state["ended"])
        times = torch.arange(T, device=self.device)
        age_before = torch.where(broken, 0, state["age"]).unsqueeze(1)
        age = times - torch.where(initial, times, -age_before).cummax(dim=1).values
        # A row that starts mid-episode has no full stacks at first.
        full_stacks = (state["whole"] & ~broken).unsqueeze(1) | (initial.cumsum(1) > 0)
        ready = real & (full_stacks | (age >= self.n_stack - 1))
        taken = real.to(torch.int64) + done  # a final observation takes an extra slot
        place = head.unsqueeze(1) + taken.cumsum(1) - taken

        n_real = real.sum(1)
        last = (n_real - 1).clamp(min=0).unsqueeze(1)
        some = n_real > 0
        state["head"].copy_(head + taken.sum(1))
        state["next_step"].copy_(step + T)
        state["ended"].copy_(torch.where(some, done.gather(1, last).squeeze(1), state["ended"] | broken))
        state["age"].copy_(torch.where(some, age.gather(1, last).squeeze(1) + 1, age_before.squeeze(1)))
        state["whole"].copy_(torch.where(some, full_stacks.gather(1, last).squeeze(1), state["whole"] & ~broken))
        return place, age, ready

    def _find_range(self) -> None:
        """Find the oldest intact step of each environment, and count the steps from there."""
        state = self._state
        oldest = (state["head"] - self._ring + self.n_stack).clamp(min=0)  # a stack needs the slots before
        number = self.columns["number"].index_select(0, self._bases + oldest % self._ring)
        kept = state["count"] - number
        state["ends"].copy_(kept.cumsum(0))
        state["first"].copy_(number - (state["ends"] - kept))

    def _allocate(self, steps: TemporalDictTensor) -> None:
        B = steps.n_elems()
        self._lay_out(B)
        n_slots = B * self._width
        for key in steps.keys():
            if key.startswith(("observation/frame", "action/")) or key in _FROM_STEPS:
                skipped = 3 if key.startswith("observation/") and self.n_stack > 1 else 2
                self.columns[key] = self._zeros((n_slots, *steps[key].shape[skipped:]), steps[key].dtype)
        for name, dtype in _OF_SLOTS.items():
            self.columns[name] = self._zeros((n_slots,), dtype)
        first = {"head": 0, "count": 0, "age": 0, "next_step": -1, "ended": True, "whole": False, "ends": 0, "first": 0}
        self._state = {name: torch.full((B,), value, device=self.device) for name, value in first.items()}

    def _lay_out(self, n_envs: int) -> None:
        """Divide the slots among the environments, each with a spare slot that absorbs writes of padding."""
        self._ring = self.capacity // n_envs
        self._width = self._ring + 1
        self._bases = torch.arange(n_envs, device=self.device) * self._width

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        try:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            size = math.prod(shape) * dtype.itemsize / 2**30
            raise MemoryError(
                f"ReplayBuffer: {self.capacity} transitions take {size:,.1f} GiB on {self.device} for "
                f"{list(shape[1:])} {str(dtype).removeprefix('torch.')} alone, which cannot be "
                "allocated. Lower the capacity (in a training, replay_capacity)."
            ) from error

    def _check(self, steps: TemporalDictTensor) -> None:
        where = f"{type(self).__name__}.extend"
        B, T = steps.n_elems(), steps.n_steps()
        if steps.device != self.device:
            raise DeviceMismatchError(
                f"{where}: the trajectories are on {steps.device}, expected {self.device}. "
                f"Move them with .to({str(self.device)!r}), or create the buffer with device={str(steps.device)!r}."
            )
        if self.columns and len(self._bases) != B:
            raise ShapeMismatchError(
                f"{where}: the trajectories have {B} rows, expected {len(self._bases)} as before: one for each "
                "environment. Collect with environments that reset themselves."
            )
        needed = min_capacity(B, T, self.n_stack)
        if self.capacity < needed:
            raise ShapeMismatchError(
                f"{where}: {T} steps of {B} environments may take {needed} slots, and the capacity is "
                f"{self.capacity}. Raise the capacity, or lower n_timesteps."
            )


def _shapes(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


__getattr__ = renamed.attributes(__name__)
