"""Launches the kernel of a game: the stepper of ``backend="warp"``.

A launch is recorded once; a step then allocates what it writes (what came out before stays as it is), sets addresses
and launches: one kernel per step, or per K steps. Nothing waits for the device, and a CUDA graph may capture it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from torch import Tensor

from rlstruct.errors import ShapeMismatchError
from rlstruct.sims._simulation import Answer, Simulation, Simulator
from rlstruct.sims._state import Tensors, part
from rlstruct.sims.kernels.advance import make_advance, make_given
from rlstruct.sims.kernels.game import Choice, GameKernel, make_access
from rlstruct.spaces import Space, zeros

_logger = logging.getLogger(__name__)

BLOCK = 64
"""Threads in a block: few, so that 4,096 environments already reach half of the multiprocessors of a large GPU."""


class WarpStepper:
    """Moves environments by launching a kernel; see `rlstruct.sims._simulation.Stepper`.

    Args:
        game: the simulator's kernel.
        simulator: its spaces, time limit and restarts. Actions are Discrete from 0 or a Box of shape [A], frames a Box
            of float32 of shape [D] or a picture of bools.
        simulation: draws first states, which name the fields.
        n_envs: B.
        device: CPU or CUDA.

    Raises:
        ValueError: spaces that kernels do not know, or the kernel of another simulator.
        ShapeMismatchError: the frame of the kernel is not that of the observation space.
    """

    def __init__(
        self, game: GameKernel, simulator: Simulator, simulation: Simulation, *, n_envs: int, device: torch.device
    ) -> None:
        """Compile the kernel, or find it in the cache, and record its launch."""
        action_space, observation_space = simulator.action_space, simulator.observation_space
        _refuse_inherited_kernel(type(simulator))
        _check_spaces(game, action_space, observation_space)
        self.n_envs, self.device, self.game = n_envs, device, game
        self._simulation = simulation
        self._auto_reset, self._stochastic = simulator.auto_reset, simulator.stochastic
        self._time_limit = simulator.time_limit or 0
        self._action = zeros(action_space, "action", 1, device)["action"][0]  # [] or [A]: shape and dtype
        self._frame_shape = tuple(observation_space.shape or ())
        self._scalar = torch.float32 if game.state._wp_scalar_type_ is wp.float32 else torch.int64
        self._pixel = torch.float32 if game.frame._wp_scalar_type_ is wp.float32 else torch.bool
        self._fields: dict[str, bool] = {}  # names of the state's fields, and whether they are bools
        self._last: tuple[Tensors, dict[str, Tensor]] = {}, {}  # the carry after the last launch, and the same packed
        self._fixed: dict[str, Tensor] = {}  # what steps leave as it is
        self._streams: dict[int, Any] = {}  # torch's streams as Warp's
        memory, given, kernel = _make(game, self._action.shape[0] if self._action.dim() else 0)
        by = given()
        by.actions = wp.from_torch(self._action.new_zeros((1, n_envs, self._action.numel())))
        if isinstance(action_space, spaces.Discrete):
            by.n = int(action_space.n)
        elif isinstance(action_space, spaces.Box):
            by.low, by.high = float(action_space.low.min()), float(action_space.high.max())
        self._launch = self.record(kernel, memory(), by)
        self._by = self._launch.params[2]

    def step(self, carry: Tensors, action: Tensors) -> Answer:
        """See Stepper."""
        return self._move(carry, action["action"].contiguous(), (), stride=0)

    def rollout(self, carry: Tensors, plan: Tensors, n_steps: int) -> Answer:
        """See Stepper."""
        actions = plan["action"].contiguous() if plan else None
        stride = 0 if actions is None or actions.shape[0] == 1 else 1
        changed, *shown = self._move(carry, actions, (n_steps,), stride)
        reached, current, masks = ({key: v.transpose(0, 1) for key, v in tensors.items()} for tensors in shown)
        return changed, reached, current, masks

    def _move(self, carry: Tensors, actions: Tensor | None, lead: tuple[int, ...], stride: int) -> Answer:
        """Launch; actions [1 or K, B, ...], or None to draw them."""
        by = self._by
        by.exploring, by.stride = actions is None, stride
        if actions is not None:
            by.actions.data = actions.data_ptr()
        seen = self.allocate(lead)
        return self.launch(self._launch, carry, lead[0] if lead else 1, seen), *self._answer(seen)

    def launch(self, launch: Any, carry: Tensors, n_steps: int, seen: dict[str, Tensor]) -> Tensors:
        """Take K steps with a recorded launch.

        Args:
            launch: from `record`; what its chooser needs is set.
            carry: where the simulation is.
            n_steps: K.
            seen: where the steps are written, see `allocate`.

        Returns:
            What changes in the carry.
        """
        held, following, io = self._pack(carry), self._followers(), launch.params[1]
        point(io, {**self._fixed, **held, **following, **seen})
        n_states = self._fixed["pool"].shape[1]
        io.pool.shape[1], io.pool.strides[0] = n_states, n_states * self._scalar.itemsize
        launch.set_param_at_index_from_ctype(2, n_steps)
        launch.launch(self._stream())
        changed = self._changed(following)
        self._last = {**carry, **changed}, {name.removeprefix("next_"): value for name, value in following.items()}
        return changed

    def allocate(self, lead: tuple[int, ...], ends: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Make the tensors that a launch shows its steps in, by their names in Memory.

        Args:
            lead: () for a single step, else (K,).
            ends: which observations, of ``reached`` and ``current``; by default those that are written.
        """
        B, device, shape = self.n_envs, self.device, self._frame_shape
        frame = (*lead, *shape, B) if self.game.n_cells == 1 else (*lead, B, *shape)
        seen = {"flags": torch.empty((*lead, 3 if self._auto_reset else 5, B), dtype=torch.bool, device=device)}
        for end in ends or (("reached", "current") if self._auto_reset else ("reached",)):
            seen[f"{end}_frame"] = torch.empty(frame, dtype=self._pixel, device=device)
            seen[f"{end}_reward"] = torch.empty((*lead, B), dtype=torch.float32, device=device)
            seen[f"{end}_last"] = self._action.new_empty((*lead, B, *self._action.shape))
        return seen

    def _answer(self, seen: dict[str, Tensor]) -> tuple[Tensors, Tensors, Tensors]:
        """Build `reached`, `current` and the masks out of what a launch wrote."""
        terminated, truncated, done, *masks = seen["flags"].unbind(-2)
        reached = self.observation(seen, "reached") | {"terminated": terminated, "truncated": truncated, "done": done}
        if not self._auto_reset:
            return reached, {}, {"ran": masks[0], "running": masks[1]}
        return reached, self.observation(seen, "current") | {"initial_state": done}, {}

    def observation(self, seen: dict[str, Tensor], end: str) -> Tensors:
        """Name what a launch wrote for one end, ``reached`` or ``current``, as observations do."""
        frame = seen[f"{end}_frame"]
        frame = frame.transpose(-1, -2) if self.game.n_cells == 1 else frame  # [..., B, D]
        return {"frame": frame, "reward": seen[f"{end}_reward"], "last_action": seen[f"{end}_last"]}

    def _followers(self) -> dict[str, Tensor]:
        """Make the tensors that hold the carry after a launch."""
        B, device = self.n_envs, self.device
        tensors = {
            "next_state": torch.empty((self.game.state._length_, B), dtype=self._scalar, device=device),
            "next_clock": torch.empty((3, B), dtype=torch.int64, device=device),
        }
        if not self._auto_reset:
            tensors["next_ended"] = torch.empty((2, B), dtype=torch.bool, device=device)
            tensors["next_last"] = self._action.new_empty((B, *self._action.shape))
        return tensors

    def _pack(self, carry: Tensors) -> dict[str, Tensor]:
        """Put the carry together; there is nothing to do if the last launch left it."""
        known, packed = self._last
        if known.keys() == carry.keys() and all(known[name] is value for name, value in carry.items()):
            return packed
        if carry["env_key"].shape != (self.n_envs,):
            raise ShapeMismatchError(
                f"set_carry: the carry is that of {len(carry['env_key'])} environments, expected {self.n_envs}."
            )
        if not self._fields:
            self._learn_fields(carry)
        packed = {
            "state": torch.stack([carry["state/" + name].to(self._scalar) for name in self._fields]),
            "clock": torch.stack([carry["elapsed"], carry["episode"]]),
        }
        if not self._auto_reset:
            packed |= {"ended": torch.stack([carry["running"], carry["terminated"]])}
            packed |= {"last": carry["last_action"].contiguous()}
        pool = part(carry, "pool/") or {name: carry["state/" + name][:0] for name in self._fields}
        self._fixed = {
            "env_key": carry["env_key"].contiguous(),
            "pool": torch.stack([pool[name].to(self._scalar) for name in self._fields]),
        }
        return packed

    def _learn_fields(self, carry: Tensors) -> None:
        fields = self._simulation.initial(carry["env_key"][:1], {})
        allowed = {torch.float32} if self._scalar is torch.float32 else {torch.int64, torch.bool}
        for name, value in fields.items():
            if value.dtype not in allowed or value.dim() != 1:
                raise ShapeMismatchError(
                    f"backend='warp': state field {name!r} is {list(value.shape[1:])} of {value.dtype} for one "
                    f"environment, expected one number of {' or '.join(map(str, allowed))}, as its kernel says. "
                    "Use dtype=torch.float32, or backend='torch'."
                )
        self._fields = {name: value.dtype is torch.bool for name, value in fields.items()}

    def _changed(self, tensors: dict[str, Tensor]) -> Tensors:
        """Name the rows of `_followers` as the carry does; all are views."""
        elapsed, episode, state_key = tensors["next_clock"].unbind(0)
        changed = {"elapsed": elapsed, "episode": episode}
        for (name, flag), row in zip(self._fields.items(), tensors["next_state"].unbind(0), strict=True):
            # The first byte of a little-endian 0 or 1 is the bool.
            changed["state/" + name] = row.view(torch.bool)[::8] if flag else row
        if self._stochastic:
            changed["state_key"] = state_key
        if not self._auto_reset:
            changed["running"], changed["terminated"] = tensors["next_ended"].unbind(0)
            changed["last_action"] = tensors["next_last"]
        return changed

    def record(self, kernel: Any, io: Any, by: Any) -> Any:
        """Load a kernel of this game, compiling it if the cache has none, and record its launch.

        Args:
            kernel: of `rlstruct.sims.kernels.advance.make_advance`.
            io: a new Memory.
            by: what its chooser gets.

        Returns:
            The launch, for `launch`; its ``params`` are the bounds and then the arguments of the kernel, as ctypes.
        """
        example = {**self._followers(), **self.allocate((1,), ("reached", "current"))}
        example |= {name.removeprefix("next_"): value for name, value in example.items() if name.startswith("next_")}
        example |= {"env_key": example["clock"][0], "pool": example["state"]}
        for name, value in example.items():
            setattr(io, name, wp.from_torch(_plain(name, value, self.n_envs, self.game.n_cells)))
        inputs = [io, by, 1, self._time_limit, self._auto_reset]
        device, began = wp.device_from_torch(self.device), time.perf_counter()
        with quietly():
            launch = wp.launch(kernel, self.n_envs, inputs, device=device, record_cmd=True, block_dim=BLOCK)
        _logger.info("kernel %s on %s: ready after %.1f s", kernel.key, device, time.perf_counter() - began)
        return launch

    def _stream(self) -> Any:
        """Return torch's current stream as Warp's; None on the CPU."""
        if self.device.type == "cpu":
            return None
        stream = torch.cuda.current_stream(self.device)
        if stream.cuda_stream not in self._streams:
            self._streams[stream.cuda_stream] = wp.stream_from_torch(stream)
        return self._streams[stream.cuda_stream]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep Warp from printing what it compiles; errors are shown."""
    level = wp.config.log_level
    wp.config.log_level = wp.LOG_ERROR
    try:
        yield
    finally:
        wp.config.log_level = level


def point(struct: Any, tensors: dict[str, Tensor]) -> None:
    """Let arrays of a recorded launch be these tensors, of the shapes and strides that were recorded.

    Wrapping them with ``wp.from_torch`` again takes ten times as long, and a step sets a dozen of them.
    """
    for name, value in tensors.items():
        getattr(struct, name).data = value.data_ptr()


@functools.cache
def _make(game: GameKernel, n_parts: int) -> tuple[Any, Any, Any]:
    """Make the kernel that takes known actions: its two structs and itself."""
    Action = wp.types.vector(length=n_parts, dtype=wp.float32) if n_parts else Choice
    access = make_access(game, Action)
    given, choose = make_given(game.state, Action, access)
    return access.Memory, given, make_advance(game, Action, access, given, choose)


def _plain(name: str, value: Tensor, B: int, n_cells: int) -> Tensor:
    """The view of a tensor that has the dimensions of its array in Memory."""
    if value.dtype is torch.bool and name.endswith("frame"):
        value = value.view(torch.uint8)
    if name.endswith("frame"):
        return value if n_cells == 1 else value.view(value.shape[0], B, -1)
    return value.view(1, B, -1) if name.endswith("last") else value


def _refuse_inherited_kernel(kind: type) -> None:
    """Raise where a class has changed a function whose kernel it inherits."""
    age = next(i for i, cls in enumerate(kind.__mro__) if {"kernel", "kernel_module"} & vars(cls).keys())
    names = ("initial", "transition", "observe", "play")
    changed = [name for cls in kind.__mro__[:age] for name in names if name in vars(cls)]
    if changed:
        name, owner = kind.__name__, kind.__mro__[age].__name__
        raise ValueError(
            f"{name}: backend='warp' would run the kernel of {owner}, which knows nothing of {name}.{changed[0]}. "
            f"Override {name}.kernel too, or use backend='torch' or 'compile'."
        )


def _check_spaces(game: GameKernel, action_space: Space, observation_space: Space) -> None:
    discrete = isinstance(action_space, spaces.Discrete) and action_space.start == 0
    box = isinstance(action_space, spaces.Box) and action_space.dtype == np.float32 and len(action_space.shape) == 1
    if not discrete and not box:
        raise ValueError(
            f"backend='warp': got the action space {action_space}, expected Discrete from 0 or a Box of shape [A] of "
            "float32. Use backend='torch'."
        )
    n_numbers = game.n_cells * game.frame._length_
    dtype = "float32" if game.frame._wp_scalar_type_ is wp.float32 else "bool"
    shape = observation_space.shape
    if shape is None or int(np.prod(shape)) != n_numbers or str(observation_space.dtype) != dtype:
        raise ShapeMismatchError(
            f"backend='warp': the kernel shows {n_numbers} numbers of {dtype}, expected those of the observation "
            f"space: {shape} of {observation_space.dtype}. Kernels compute in float32: use dtype=torch.float32, or "
            "backend='torch'."
        )
