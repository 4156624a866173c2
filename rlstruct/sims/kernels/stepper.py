"""Launches the kernel of a game: the stepper of ``backend="warp"``. Part of rlstruct.sims.kernels.

A launch is recorded once; a step then allocates what it writes (what came out before stays as it is), sets addresses
and launches: one kernel per step, or per K steps. Nothing waits for the device, and a CUDA graph may capture it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from torch import Tensor

from rlstruct.errors import ShapeMismatchError
from rlstruct.sims._motion import Motion, part
from rlstruct.sims._state import Tensors, batch_first
from rlstruct.sims.kernels.advance import make_advance
from rlstruct.sims.kernels.game import GameKernel
from rlstruct.sims.kernels.given import make_given
from rlstruct.sims.kernels.launching import Streams, point, record
from rlstruct.sims.kernels.memory import make_access, make_memory
from rlstruct.spaces import Space


class WarpStepper:
    """Moves environments by launching a kernel; see `rlstruct.sims._stepping.Stepper`.

    Args:
        game: the simulator's kernel.
        motion: draws first states, names fields.
        action_space: Discrete from 0, or a Box of shape [A].
        observation_space: a Box of float32 of shape [D], or a picture of bools.
        n_envs: B.
        device: CPU or CUDA.
        time_limit: steps until an episode is truncated, or None.
        auto_reset: whether ended environments restart.
        stochastic: whether the carry holds the key of the episode.

    Raises:
        ValueError: spaces that kernels do not know.
        ShapeMismatchError: the frame of the kernel is not that of the observation space.
    """

    def __init__(
        self,
        game: GameKernel,
        motion: Motion,
        action_space: Space,
        observation_space: Space,
        *,
        n_envs: int,
        device: torch.device,
        time_limit: int | None,
        auto_reset: bool,
        stochastic: bool,
    ) -> None:
        """Compile the kernel, or find it in the cache, and record its launch."""
        self.n_envs = n_envs
        _check_spaces(game, action_space, observation_space)
        self._game, self._motion, self._device = game, motion, device
        self._auto_reset, self._stochastic = auto_reset, stochastic
        self._action = _zero_action(action_space, device)  # [] or [A]: shape and dtype
        self._frame_shape = tuple(observation_space.shape or ())
        self._no = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._scalar = torch.float32 if game.state._wp_scalar_type_ is wp.float32 else torch.int64
        self._pixel = torch.float32 if game.frame._wp_scalar_type_ is wp.float32 else torch.bool
        self._fields: list[str] = []
        self._flags: list[bool] = []  # which fields are bools
        self._held: dict[str, Tensor] = {}  # what the carry consists of, packed; empty if that is not known
        self._fixed: dict[str, Tensor] = {}  # what steps leave as it is
        self._streams = Streams(device)
        self._time_limit = time_limit or 0
        memory, given, kernel = _make(game, self._action.shape[0] if self._action.dim() else 0)
        actions = self._action.expand(1, n_envs, *self._action.shape).contiguous()
        by = given()
        by.actions = wp.from_torch(actions.view(1, n_envs, -1))
        if isinstance(action_space, spaces.Discrete):
            by.n = int(action_space.n)
        elif isinstance(action_space, spaces.Box):
            by.low, by.high = float(action_space.low.min()), float(action_space.high.max())
        self._launch = self.record(kernel, memory(), by)
        self._by = self._launch.params[2]

    def forget(self) -> None:
        """See Stepper."""
        self._held = {}

    def step(self, carry: Tensors, action: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """See Stepper."""
        return self._move(carry, action["action"].contiguous(), 1, (), stride=0)[:3]

    def rollout(
        self, carry: Tensors, action: Tensors | None, n_steps: int
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """See Stepper."""
        lead = (n_steps,)
        if action is None:
            return self._move(carry, None, n_steps, lead, stride=0)
        plan = action["action"]
        if plan.stride(0) == 0:
            return self._move(carry, plan[0].contiguous(), n_steps, lead, stride=0)
        return self._move(carry, plan.contiguous(), n_steps, lead, stride=1)

    def _move(
        self, carry: Tensors, action: Tensor | None, n_steps: int, lead: tuple[int, ...], stride: int
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        by = self._by
        by.exploring, by.stride = action is None, stride
        if action is not None:
            by.actions.data = action.data_ptr()
        seen = self.allocate(lead)
        following, (reached, current, masks) = self.launch(self._launch, carry, n_steps, seen), self._answer(seen, lead)
        if lead:
            same = reached is current
            reached, masks = batch_first(reached), batch_first(masks)
            current = reached if same else batch_first(current)
        return following, reached, current, masks

    def launch(self, launch: Any, carry: Tensors, n_steps: int, seen: dict[str, Tensor]) -> Tensors:
        """Take K steps with a recorded launch.

        Args:
            launch: from `record`; what its chooser needs is set.
            carry: where the simulation is.
            n_steps: K.
            seen: where the steps are written, see `allocate`.

        Returns:
            The next carry.
        """
        held, following, io = self._held or self._pack(carry), self._followers(), launch.params[1]
        point(io, {**self._fixed, **held, **following, **seen})
        n_states = self._fixed["pool"].shape[1]
        io.pool.shape[1], io.pool.strides[0] = n_states, n_states * self._scalar.itemsize
        launch.set_param_at_index_from_ctype(2, n_steps)
        launch.launch(self._streams.now())
        self._held = {name.removeprefix("next_"): value for name, value in following.items()}
        return {**carry, **self._carried(following)}

    def allocate(self, lead: tuple[int, ...], ends: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Make the tensors that a launch shows its steps in, by their names in Memory.

        Args:
            lead: () for a single step, else (K,).
            ends: which observations, of ``reached`` and ``current``; by default those that are written.
        """
        B, device, shape = self.n_envs, self._device, self._frame_shape
        columns = self._game.n_cells == 1
        frame = (*lead, *shape, B) if columns else (*lead, B, *shape)
        ends = ends or (("reached", "current") if self._auto_reset else ("reached",))
        n = len(ends)
        rewards = torch.empty((n, *lead, B), dtype=torch.float32, device=device).unbind(0)
        lasts = torch.empty((n, *lead, B, *self._action.shape), dtype=self._action.dtype, device=device).unbind(0)
        seen = {"flags": torch.empty((*lead, 3 if self._auto_reset else 5, B), dtype=torch.bool, device=device)}
        for i, end in enumerate(ends):
            seen[f"{end}_frame"] = torch.empty(frame, dtype=self._pixel, device=device)
            seen[f"{end}_reward"], seen[f"{end}_last"] = rewards[i], lasts[i]
        return seen

    def _answer(self, seen: dict[str, Tensor], lead: tuple[int, ...]) -> tuple[Tensors, Tensors, Tensors]:
        """Build `reached`, `current` and the masks out of what a launch wrote."""
        terminated, truncated, done, *masks = seen["flags"].unbind(-2)
        no = self._no.expand(*lead, self.n_envs)
        reached = {
            "frame": self._as_frame(seen["reached_frame"]),
            "reward": seen["reached_reward"],
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
            "initial_state": no,
            "last_action": seen["reached_last"],
        }
        if not self._auto_reset:
            return reached, reached, {"ran": masks[0], "running": masks[1]}
        current = dict.fromkeys(("terminated", "truncated", "done"), no) | {
            "frame": self._as_frame(seen["current_frame"]),
            "reward": seen["current_reward"],
            "initial_state": done,
            "last_action": seen["current_last"],
        }
        return reached, current, {}

    def _as_frame(self, written: Tensor) -> Tensor:
        return written.transpose(-1, -2) if self._game.n_cells == 1 else written  # [..., B, D]

    def _followers(self) -> dict[str, Tensor]:
        """Make the tensors that hold the carry after a launch."""
        B, device = self.n_envs, self._device
        tensors = {
            "next_state": torch.empty((self._game.state._length_, B), dtype=self._scalar, device=device),
            "next_clock": torch.empty((3, B), dtype=torch.int64, device=device),
        }
        if not self._auto_reset:
            tensors["next_ended"] = torch.empty((2, B), dtype=torch.bool, device=device)
            tensors["next_last"] = torch.empty((B, *self._action.shape), dtype=self._action.dtype, device=device)
        return tensors

    def _pack(self, carry: Tensors) -> dict[str, Tensor]:
        """Put a carry that came from elsewhere together."""
        if carry["env_key"].shape != (self.n_envs,):
            raise ShapeMismatchError(
                f"set_carry: the carry is that of {len(carry['env_key'])} environments, expected {self.n_envs}."
            )
        if not self._fields:
            self._learn_fields(carry)
        held = {
            "state": torch.stack([carry["state/" + name].to(self._scalar) for name in self._fields]),
            "clock": torch.stack([carry["elapsed"], carry["episode"]]),
        }
        if not self._auto_reset:
            held |= {"ended": torch.stack([carry["running"], carry["terminated"]])}
            held |= {"last": carry["last_action"].contiguous()}
        pool = part(carry, "pool/") or {name: carry["state/" + name][:0] for name in self._fields}
        self._fixed = {
            "env_key": carry["env_key"].contiguous(),
            "pool": torch.stack([pool[name].to(self._scalar) for name in self._fields]),
        }
        return held

    def _learn_fields(self, carry: Tensors) -> None:
        fields = self._motion.initial(carry["env_key"][:1], {})
        allowed = {torch.float32} if self._scalar is torch.float32 else {torch.int64, torch.bool}
        for name, value in fields.items():
            if value.dtype not in allowed or value.dim() != 1:
                raise ShapeMismatchError(
                    f"backend='warp': state field {name!r} is {list(value.shape[1:])} of {value.dtype} for one "
                    f"environment, expected one number of {' or '.join(map(str, allowed))}, as its kernel says. "
                    "Use dtype=torch.float32, or backend='torch'."
                )
        self._fields, self._flags = list(fields), [value.dtype is torch.bool for value in fields.values()]

    def _carried(self, tensors: dict[str, Tensor]) -> Tensors:
        """Name the rows of `_followers` as the carry does; all are views."""
        rows = tensors["next_state"].unbind(0)
        elapsed, episode, state_key = tensors["next_clock"].unbind(0)
        carried = {"elapsed": elapsed, "episode": episode}
        for name, row, flag in zip(self._fields, rows, self._flags, strict=True):
            # The first byte of a little-endian 0 or 1 is the bool.
            carried["state/" + name] = row.view(torch.bool)[::8] if flag else row
        if self._stochastic:
            carried["state_key"] = state_key
        if not self._auto_reset:
            carried["running"], carried["terminated"] = tensors["next_ended"].unbind(0)
            carried["last_action"] = tensors["next_last"]
        return carried

    def record(self, kernel: Any, io: Any, by: Any) -> Any:
        """Record a launch of a kernel of this game on tensors of the right strides.

        Args:
            kernel: of `rlstruct.sims.kernels.advance.make_advance`.
            io: a new Memory.
            by: what its chooser gets.

        Returns:
            The launch, for `launch`.
        """
        example = {**self._followers(), **self.allocate((1,))}
        example |= {name.removeprefix("next_"): value for name, value in example.items() if name.startswith("next_")}
        example |= {"env_key": example["clock"][0], "pool": example["state"]}
        for name, value in example.items():
            setattr(io, name, wp.from_torch(_plain(name, value, self.n_envs, self._game.n_cells)))
        return record(kernel, self.n_envs, [io, by, 1, self._time_limit, self._auto_reset], self._device)


@functools.cache
def _make(game: GameKernel, n_parts: int) -> tuple[Any, Any, Any]:
    """Make the kernel that takes known actions: its two structs and itself."""
    dtype = wp.int64 if n_parts == 0 else wp.float32
    memory = make_memory(game, dtype)
    access = make_access(game, dtype, n_parts)
    given, choose = make_given(game.state, dtype, n_parts, access)
    return memory, given, make_advance(game, memory, access, given, choose)


def _plain(name: str, value: Tensor, B: int, n_cells: int) -> Tensor:
    """The view of a tensor that has the dimensions of its array in Memory."""
    if value.dtype is torch.bool and name.endswith("frame"):
        value = value.view(torch.uint8)
    if name.endswith("frame"):
        return value if n_cells == 1 else value.view(value.shape[0], B, -1)
    return value.view(1, B, -1) if name.endswith("last") else value


def _zero_action(space: Space, device: torch.device) -> Tensor:
    if isinstance(space, spaces.Discrete):
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.zeros(space.shape or (), dtype=torch.float32, device=device)


def _check_spaces(game: GameKernel, action_space: Space, observation_space: Space) -> None:
    discrete = isinstance(action_space, spaces.Discrete) and action_space.start == 0
    box = isinstance(action_space, spaces.Box) and action_space.dtype == np.float32 and len(action_space.shape) == 1
    if not discrete and not box:
        raise ValueError(
            f"backend='warp': got the action space {action_space}, expected Discrete from 0 or a Box of shape [A] of "
            "float32. Use backend='torch'."
        )
    n_numbers, dtype = (
        game.n_cells * game.frame._length_,
        "float32" if game.frame._wp_scalar_type_ is wp.float32 else "bool",
    )
    shape = observation_space.shape
    if shape is None or int(np.prod(shape)) != n_numbers or str(observation_space.dtype) != dtype:
        raise ShapeMismatchError(
            f"backend='warp': the kernel shows {n_numbers} numbers of {dtype}, expected those of the observation "
            f"space: {shape} of {observation_space.dtype}. Kernels compute in float32: use dtype=torch.float32, or "
            "backend='torch'."
        )
