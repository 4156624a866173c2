"""Checks for impossible values: actions outside their space, NaN in frames and rewards.

Environments that compute with tensors raise no error: to them, an action that does not exist is just another number,
and NaN passes through networks unnoticed. RL_Batcher checks whole batches; everything else that steps an environment
checks each step with `StepChecks`. Pure steps contain no check.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.engine.host_syncs import intended
from rlstruct.errors import BadValueError, tag_environment
from rlstruct.spaces import NO_KERNELS, Space, advice_on, leaves
from rlstruct.vec_env import Observed, VecEnv

AnyStep = TypeVar("AnyStep", bound=tuple[Observed, Observed])
_UNCHECKED: ContextVar[bool] = ContextVar("rlstruct_unchecked", default=False)
NAN_FRAME = "Look for a division by zero, or an observation of None."
NAN_REWARD = "A reward of None becomes NaN: return 0.0."


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Skip the checks of `StepChecks` in a with block, whose caller checks the values."""
    token = _UNCHECKED.set(True)
    try:
        yield
    finally:
        _UNCHECKED.reset(token)


class ActionCheck:
    """Comparison of actions with their space. In a Box only NaN is wrong, because environments clip actions.

    Args:
        space: action space of one environment.
        device: device of the actions; None for that of the first ones.

    Attributes:
        leaves: the parts of the space whose dtype has values outside it, by the action's key.
    """

    def __init__(self, space: Space, device: torch.device | None = None) -> None:
        self.leaves = {
            key: leaf
            for key, leaf in leaves(space, "action").items()
            if not isinstance(leaf.space, spaces.Box) or leaf.torch_dtype.is_floating_point
        }
        self._bounds: dict[str, tuple[Tensor, Tensor] | tuple[float, float]] = {}  # lowest and highest value
        for key, leaf in self.leaves.items() if device is not None else ():
            if not isinstance(leaf.space, spaces.Box):  # of these, only NaN is wrong
                self._bounds[key] = self._bounds_of(key, device)

    def wrong(self, key: str, values: Tensor) -> Tensor:
        """Return True for every entry of an action that is not in the space.

        Args:
            key: one of `leaves`.
            values: the actions, on one device in all calls.  [..., *shape]

        Returns:
            [..., *shape] bool
        """
        if isinstance(self.leaves[key].space, spaces.Box):
            return values.isnan()
        if key not in self._bounds:
            self._bounds[key] = self._bounds_of(key, values.device)
        low, high = self._bounds[key]
        if values.dtype in NO_KERNELS:
            values = values.to(torch.int64)
        return (values < low) | (values > high)

    def all_right(self, key: str, values: Tensor) -> bool:
        """Return True if no entry of an action on the CPU is wrong; a few operations cheaper than `wrong`."""
        bounds = self._bounds.get(key)
        with intended():
            if isinstance(self.leaves[key].space, spaces.Box):
                return not _has_nan(values)
            if bounds is None or isinstance(bounds[0], Tensor) or values.dtype in NO_KERNELS:
                return not bool(self.wrong(key, values).any())  # sync: of CPU memory
            low, high = values.aminmax()
            return bounds[0] <= low.item() and high.item() <= bounds[1]  # sync: of CPU memory

    def _bounds_of(self, key: str, device: torch.device | None) -> tuple[Tensor, Tensor] | tuple[float, float]:
        low, high = self.leaves[key].bounds()
        if (low == low.flat[0]).all() and (high == high.flat[0]).all():
            return int(low.flat[0]), int(high.flat[0])
        as_integers = partial(torch.as_tensor, dtype=torch.int64, device=device)  # also those without kernels
        return as_integers(low), as_integers(high)


class StepChecks:
    """Checks of single steps. On the CPU, a wrong value raises at once.

    On an accelerator it sets a flag there, so the host does not wait and a step can be captured as a graph. `read`
    raises the error, where the host waits anyway.

    Args:
        where: name of the environments, the start of messages.
        env: the environments. Their spaces, device and number must be set.
    """

    def __init__(self, where: str, env: VecEnv) -> None:
        self._where, self._device = where, env.device
        self._actions = ActionCheck(env.action_space, env.device)
        frames = leaves(env.observation_space, "frame", where=where)
        self._frames = [key for key, leaf in frames.items() if leaf.torch_dtype.is_floating_point] + ["reward"]
        names = [*self._actions.leaves, *self._frames]
        self._index = {name: i for i, name in enumerate(names)}
        self._flags = torch.zeros(len(names), dtype=torch.bool, device=env.device)
        self._unread = False

    def action(self, action: Mapping[str, Tensor] | DictTensor, running: Tensor | None = None) -> None:
        """Check actions.

        Args:
            action: the actions by key.  [B, ...]
            running: the rows to check, [B] bool; None for all.

        Raises:
            ValueError: on the CPU, an action is not in its space; carries the environment's index.
        """
        if _UNCHECKED.get():
            return
        for key in self._actions.leaves:
            values = action[key].detach()
            if values.is_cpu and self._actions.all_right(key, values):
                continue
            rows = self._rows(self._actions.wrong(key, values), running)
            if self._set(key, rows):
                space, j = self._actions.leaves[key].space, _first(rows)
                with intended():
                    value = action[key][j].tolist()  # sync: once, for an error
                text = f"action {key!r} of environment {j} is {value}, expected an element of {space}."
                self._raise(f"{text} {advice_on(space)}", j)

    def observation(self, observation: Mapping[str, Tensor] | DictTensor, running: Tensor | None = None) -> None:
        """Check the frames and rewards of an observation [B] for NaN; arguments and errors are those of `action`."""
        if _UNCHECKED.get():
            return
        for key in self._frames:
            values = observation[key]
            # A sum needs no memory, and is NaN if any number is.
            if values.is_cpu and not _has_nan(values):
                continue
            rows = self._rows(values.isnan(), running)
            if self._set(key, rows):
                j = _first(rows)
                self._raise(f"{key!r} of environment {j} is NaN. {NAN_REWARD if key == 'reward' else NAN_FRAME}", j)

    def impossible(self, action: Mapping[str, Tensor], *observations: Mapping[str, Tensor]) -> list[Tensor]:
        """Find impossible values within a compiled step on the CPU; a pure function.

        Args:
            action: as in the method `action`.
            observations: as in `observation`; they may be empty.

        Returns:
            True if `action` or `observation` may raise, [] bool; on an accelerator, an empty list.
        """
        if self._device.type != "cpu":
            return []
        wrong = [self._actions.wrong(key, action[key]) for key in self._actions.leaves]
        wrong += [frames[key].isnan() for frames in observations for key in self._frames if key in frames]
        # Sums of floats, not any(): a loop with bools has no vectors, see `torch_private.scalar_loops_of_bools`.
        return [torch.stack([mask.to(torch.float32).sum() for mask in wrong]).sum() > 0]

    def step(self, answer: AnyStep) -> AnyStep:
        """Check the observations of a step, and return it."""
        (reached, ran), (current, running) = answer
        self.observation(reached, ran)
        if getattr(answer, "restarted", True) and current is not reached:
            self.observation(current, running)
        return answer

    def read(self) -> None:
        """Wait for the device, and raise the error of an earlier step, if any.

        Raises:
            ValueError: an action was not in its space, or a frame or reward was NaN.
        """
        if not self._unread:
            return
        self._unread = False
        with intended():
            flags = self._flags.tolist()  # sync: where the host waits anyway
        self._flags.zero_()
        for name, i in self._index.items():
            if flags[i]:
                leaf = self._actions.leaves.get(name)
                what = f"{name!r} of some environment was NaN. {NAN_REWARD if name == 'reward' else NAN_FRAME}"
                if leaf is not None:
                    what = f"action {name!r} of some environment was not an element of {leaf.space}. "
                    what += advice_on(leaf.space)
                self._raise(f"in an earlier step, {what} Step on the CPU to see where.", None)

    def _rows(self, wrong: Tensor, running: Tensor | None) -> Tensor:
        rows = wrong.flatten(1).any(dim=1) if wrong.dim() > 1 else wrong
        return rows if running is None else rows & running

    def _set(self, name: str, rows: Tensor) -> bool:
        """Return True if a row on the CPU is wrong; on other devices, set the flag and return False."""
        if rows.is_cpu:
            return read_flag(rows.any())
        self._flags[self._index[name]].logical_or_(rows.any())
        self._unread = True
        return False

    def _raise(self, text: str, environment: int | None) -> None:
        error = BadValueError(f"{self._where}.step: {text}")
        if environment is not None:
            tag_environment(error, environment)
        raise error


def _has_nan(values: Tensor) -> bool:
    """Return False if no number on the CPU is NaN; True also for infinities of both signs."""
    with intended():
        return math.isnan(values.sum().item())  # sync: of CPU memory


def read_flag(flag: Tensor) -> bool:
    """Read a flag [] bool in CPU memory."""
    with intended():
        return bool(flag)  # sync: of CPU memory


def _first(rows: Tensor) -> int:
    with intended():
        return int(rows.to(torch.uint8).argmax())  # sync: once, for an error
