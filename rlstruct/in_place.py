"""Environments on the CPU that write their observations directly into a batch, and the buffers for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlstruct.core import DictTensor
from rlstruct.vec_env import VecEnv

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

FLAGS = ("terminated", "truncated", "done", "initial_state")


class ObservationBuffer:
    """One observation of B environments on the CPU, as writable numpy arrays.

    Args:
        arrays: by key, in the order of the observation's keys, without ``rng``.  [B, ...]

    Attributes:
        keys: as in ``arrays``.
        frames: the arrays of ``frame``, or of each ``frame/<key>``.        [B, ...]
        reward: reward of the step that led here.                           [B] float32
        flags: terminated, truncated, done and initial_state.               [B] bool each
        last_action: as ``frames``, of ``last_action``.                     [B, ...]
        arrays: all of them.
    """

    __slots__ = ("arrays", "flags", "frames", "keys", "last_action", "reward")

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self.keys = tuple(arrays)
        self.arrays = [*arrays.values()]
        self.frames = [array for key, array in arrays.items() if key.split("/")[0] == "frame"]
        self.reward = arrays["reward"]
        self.flags = tuple(arrays[key] for key in FLAGS)
        self.last_action = [array for key, array in arrays.items() if key.split("/")[0] == "last_action"]

    @classmethod
    def of(cls, observation: DictTensor) -> ObservationBuffer:
        """Return the memory of an observation on the CPU."""
        return cls({key: tensor.numpy() for key, tensor in observation.items()})  # sync: views of CPU memory

    def observation(self) -> DictTensor:
        """Return the same memory as tensors, [B]."""
        return DictTensor(dict(zip(self.keys, map(torch.from_numpy, self.arrays), strict=True)))


class Ended(NamedTuple):
    """Result of `StepsInto.step_into` where an episode ended, or an environment did not run.

    Attributes:
        ran: True for rows that took the step; None for all.          [B] bool
        running: True for rows that take the next one; None for all.  [B] bool
        restarted: numbers of the rows that restarted in this step.
    """

    ran: Tensor | None
    running: Tensor | None
    restarted: Sequence[int]


class StepsInto(Protocol):
    """A `VecEnv` on the CPU that can write observations directly into a batch. Batchers call this instead of ``step``.

    It is optional. Without it, or if a subclass overrides only ``step``, a batcher calls ``step`` and copies.
    """

    def step_into(
        self, action: DictTensor, before: ObservationBuffer, out: ObservationBuffer, final: ObservationBuffer | None
    ) -> Ended | None:
        """Take one step; see `VecEnv.step`.

        Args:
            action: see `VecEnv.step`.
            before: the observation that the agent acted on. Do not modify it.
            out: buffer for ``current``. Its flags are already False; write everything else in every row.
            final: buffer for ``reached``, to be written only in rows that restart, so that the other rows need no real
                memory. None for environments that do not reset themselves.

        Returns:
            None if every environment took the step and no episode ended.
        """


def steps_into(env: VecEnv) -> Any | None:  # noqa: ANN401 - a bound `StepsInto.step_into`
    """Return an environment's ``step_into``; None if it has none, or if ``step`` was overridden without it."""
    if "step" in vars(env):
        return None
    cls = next((cls for cls in type(env).__mro__ if "step_into" in vars(cls) or "step" in vars(cls)), VecEnv)
    return getattr(env, "step_into", None) if "step_into" in vars(cls) else None
