"""What all adapters share: the observations of an auto-resetting `VecEnv`, from tensors that others made. Layer 3."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError
from rlstruct.vec_env import Observed, Stepped, VecEnv

Space = spaces.Space[Any]
Tensors = dict[str, Tensor]


class Adapter(VecEnv):
    """An auto-resetting VecEnv around something that steps B environments at once.

    Args:
        n_envs: B.
        device: where its tensors are.
        observation_space: of one environment.
        action_space: of one environment.
    """

    auto_reset = True
    restarts_take_steps = False

    def __init__(self, n_envs: int, device: torch.device, observation_space: Space, action_space: Space) -> None:
        """Keep the spaces."""
        self._name = type(self).__name__
        self._n_envs = n_envs
        self._device = device
        self.observation_space = observation_space
        self.action_space = action_space
        self._no = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._yes = ~self._no

    @property
    def device(self) -> torch.device:
        """Where the simulation lives."""
        return self._device

    def n_envs(self) -> int:
        """Return B."""
        return self._n_envs

    def _refuse_settings(self, env_info: DictTensor | None) -> None:
        if env_info is not None and not env_info.empty():
            raise ValueError(f"{self._name}.reset: got env_info {list(env_info.keys())}, expected none: it takes none.")

    def _begin(self, frames: Tensors, no_action: Tensors) -> Observed:
        """Show the first observations; checks them, once."""
        for key, value in frames.items():
            if value.device != self._device:
                raise DeviceMismatchError(
                    f"{self._name}.reset: {key!r} is on {value.device}, expected {self._device}. "
                    "Make the simulation on the device that you name."
                )
            if value.dim() == 0 or value.shape[0] != self._n_envs:
                raise ShapeMismatchError(
                    f"{self._name}.reset: {key!r} has shape {list(value.shape)}, expected [{self._n_envs}, ...]."
                )
        flags = dict.fromkeys(("terminated", "truncated", "done"), self._no)
        last = {f"last_{key}": value for key, value in no_action.items()}
        reward = torch.zeros(self._n_envs, dtype=torch.float32, device=self._device)
        return DictTensor({**frames, "reward": reward, **flags, "initial_state": self._yes, **last}), self._yes

    def _answer(
        self, action: Tensors, reward: Tensor, ends: tuple[Tensor, Tensor], reached: Tensors, current: Tensors | None
    ) -> Stepped:
        """Put a step's answer together.

        Args:
            action: by key.                                                             [B, ...]
            reward: of any number type.                                                 [B]
            ends: terminated and truncated.                                             [B] bool
            reached: true next frames.                                                  [B, ...]
            current: frames after restarts; None if nobody restarted.                   [B, ...]
        """
        terminated, truncated = ends
        done = terminated | truncated
        reward = reward.to(torch.float32)
        last = {f"last_{key}": value.clone() for key, value in action.items()}
        flags = {"terminated": terminated, "truncated": truncated, "done": done, "initial_state": self._no}
        seen = DictTensor._trusted({**reached, "reward": reward, **flags, **last})
        if current is None:
            return Stepped((seen, self._yes), (seen, self._yes), restarted=False)
        last = {key: value.masked_fill(rows(done, value), 0) for key, value in last.items()}
        flags = {"terminated": self._no, "truncated": self._no, "done": self._no, "initial_state": done}
        after = DictTensor._trusted({**current, "reward": reward.masked_fill(done, 0), **flags, **last})
        return Stepped((seen, self._yes), (after, self._yes))


def optional(module: str, extra: str, who: str) -> Any:  # noqa: ANN401 - a module
    """Import a library that only some users have.

    Raises:
        ImportError: it is missing; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{who} needs {module}: pip install 'rlstruct[{extra}]'.") from error


def rows(mask: Tensor, like: Tensor) -> Tensor:
    """Shape a mask [B] so that it selects rows of ``like`` [B, ...]."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def choose(mask: Tensor, yes: Tensors, no: Tensors) -> Tensors:
    """Take the rows of ``yes`` where the mask is set, else those of ``no``."""
    return {key: torch.where(rows(mask, value), yes[key], value) for key, value in no.items()}


def flatten(element: Any, key: str) -> dict[str, Any]:  # noqa: ANN401 - whatever a space holds
    """Name the leaves of nested dicts and tuples: ``key``, or ``key/<name>``."""
    if isinstance(element, Mapping):
        children = list(element.items())
    elif isinstance(element, tuple | list):
        children = list(enumerate(element))
    else:
        return {key: element}
    return {k: leaf for name, child in children for k, leaf in flatten(child, f"{key}/{name}").items()}


def nest(space: Space, tensors: DictTensor, key: str) -> Any:  # noqa: ANN401 - whatever a space holds
    """Put an action together again as its space says; the opposite of `flatten`."""
    if isinstance(space, spaces.Dict):
        return {name: nest(child, tensors, f"{key}/{name}") for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(nest(child, tensors, f"{key}/{i}") for i, child in enumerate(space.spaces))
    return tensors[key]


def no_action(space: Space, n_envs: int, device: torch.device) -> Tensors:
    """Make the last action of environments that have not acted, by key.  [B, ...] zeros."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        nested = {str(name): no_action(child, n_envs, device) for name, child in inner}
        return {key.replace("action", f"action/{n}", 1): v for n, part in nested.items() for key, v in part.items()}
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return {"action": torch.zeros((n_envs, *(space.shape or ())), dtype=dtype, device=device)}
