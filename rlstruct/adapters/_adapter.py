"""What all adapters share: the observations of an auto-resetting `VecEnv`, from tensors that others made."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.errors import DeviceMismatchError, ShapeMismatchError, how_to_install
from rlstruct.spaces import Element, Space, leaves, nest, zeros
from rlstruct.vec_env import Observed, Stepped, VecEnv

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
        self._frame_leaves = leaves(observation_space, "frame", where=self._name)
        self._action_leaves = leaves(action_space, "action", where=self._name)
        self._no = torch.zeros(n_envs, dtype=torch.bool, device=device)
        self._yes = ~self._no

    @property
    def device(self) -> torch.device:
        """Where the simulation lives."""
        return self._device

    def n_envs(self) -> int:
        """Return B."""
        return self._n_envs

    def _refuse_info(self, env_info: DictTensor | None) -> None:
        if env_info is not None and not env_info.empty():
            raise ValueError(f"{self._name}.reset: got env_info {list(env_info.keys())}, expected none: it takes none.")

    def _flat(self, element: Element) -> dict[str, Any]:
        """Name the frames of an observation."""
        return {key: leaf.get(element) for key, leaf in self._frame_leaves.items()}

    def _sent(self, action: DictTensor) -> tuple[Element, Tensors]:
        """Return an action as the space nests it, and by key."""
        flat = {key: action[key] for key in self._action_leaves}
        return nest(self.action_space, flat, "action"), flat

    def _begin(self, frames: Tensors) -> Observed:
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
        last = zeros(self.action_space, "last_action", self._n_envs, self._device)
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
        raise ImportError(f"{who} needs {module}, which is not installed. {how_to_install(extra)}.") from error


def rows(mask: Tensor, like: Tensor) -> Tensor:
    """Shape a mask [B] so that it selects rows of ``like`` [B, ...]."""
    return mask.view(-1, *[1] * (like.dim() - 1))


def choose(mask: Tensor, yes: Tensors, no: Tensors) -> Tensors:
    """Take the rows of ``yes`` where the mask is set, else those of ``no``."""
    return {key: torch.where(rows(mask, value), yes[key], value) for key, value in no.items()}
