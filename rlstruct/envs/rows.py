"""The observations of B environments while they are being written: numpy arrays, one row each. Layer 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlstruct.core import DictTensor
from rlstruct.envs.spaces import Arrays, SpaceCodec
from rlstruct.errors import ShapeMismatchError

Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Index = Mask | list[int]


class Rows:
    """What B environments observe at one time; every step makes new ones, so that nothing handed out ever changes.

    Args:
        frames: the frames' arrays, one per leaf of the observation space.  [B, ...]
        reward: reward of the step that led here.                           [B] float32
        flags: terminated, truncated, done and initial_state.               [B] bool each
        last_action: the actions' arrays, one per leaf of the action space. [B, ...]
    """

    __slots__ = ("flags", "frames", "last_action", "reward")

    def __init__(
        self, frames: Arrays, reward: Array, flags: tuple[Mask, Mask, Mask, Mask], last_action: Arrays
    ) -> None:
        """Keep the arrays; they are not copied."""
        self.frames = frames
        self.reward = reward
        self.flags = flags
        self.last_action = last_action

    @classmethod
    def start(cls, frames: Arrays, last_action: Arrays) -> Rows:
        """Make the first observations of new episodes in all rows; ``last_action`` must be zeros."""
        n = len(frames[0])
        no = (np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.zeros(n, np.bool_))
        return cls(frames, np.zeros(n, np.float32), (*no, np.ones(n, np.bool_)), last_action)

    @classmethod
    def after(
        cls, frames: Arrays, reward: Array | list[float], terminated: Mask, truncated: Mask, last_action: Arrays
    ) -> Rows:
        """Make the observations after a step.

        Raises:
            ShapeMismatchError: a reward is not a single number.
        """
        n = len(frames[0])
        rewards = np.array(reward, np.float32)
        if rewards.shape != (n,):
            raise ShapeMismatchError(
                f"reward: {n} environments gave rewards of shape {rewards.shape}, expected {(n,)}. "
                f"Return one number per step, such as float(reward)."
            )
        return cls(frames, rewards, (terminated, truncated, terminated | truncated, np.zeros(n, np.bool_)), last_action)

    @property
    def done(self) -> Mask:
        """Terminated or truncated.  [B] bool."""
        return self.flags[2]

    def keep(self, previous: Rows, idle: Mask) -> None:
        """Repeat the previous observation, with reward 0, in the rows that did not run."""
        ours = [*self.frames, *self.last_action, *self.flags]
        theirs = [*previous.frames, *previous.last_action, *previous.flags]
        for array, before in zip(ours, theirs, strict=True):
            array[idle] = before[idle]
        self.reward[idle] = 0

    def restarted(self, rows: Index) -> Rows:
        """Copy, and turn ``rows`` into starts of episodes; their frames are the caller's to write."""
        rows = np.asarray(rows)  # once, instead of in each of the assignments below
        terminated, truncated, done, initial_state = (flag.copy() for flag in self.flags)
        last_action = [array.copy() for array in self.last_action]
        reward = self.reward.copy()
        for array in (reward, terminated, truncated, done, *last_action):
            array[rows] = 0
        initial_state[rows] = True
        frames = [array.copy() for array in self.frames]
        return Rows(frames, reward, (terminated, truncated, done, initial_state), last_action)

    def observation(self, frame_keys: Sequence[str], last_action_keys: Sequence[str]) -> DictTensor:
        """Name the arrays as a VecEnv's observation; the tensors share their memory."""
        from_numpy = torch.from_numpy
        terminated, truncated, done, initial_state = self.flags
        tensors = dict(zip(frame_keys, map(from_numpy, self.frames), strict=True))
        tensors["reward"] = from_numpy(self.reward)
        tensors["terminated"] = from_numpy(terminated)
        tensors["truncated"] = from_numpy(truncated)
        tensors["done"] = from_numpy(done)
        tensors["initial_state"] = from_numpy(initial_state)
        tensors.update(zip(last_action_keys, map(from_numpy, self.last_action), strict=True))
        return DictTensor._trusted(tensors)


def last_action_keys(actions: SpaceCodec) -> tuple[str, ...]:
    """Return the observation's names of the last action: ``last_action``, or ``last_action/<key>`` when nested."""
    return tuple(f"last_{key}" for key in actions.keys)
