"""Base of environments on the CPU that write observations into numpy arrays, one row for each environment."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box

from rlstruct.core import DictTensor, expect
from rlstruct.engine.validity import StepChecks
from rlstruct.envs.codec import Arrays, SpaceCodec
from rlstruct.envs.info_numbers import InfoNumbers
from rlstruct.errors import BadTypeError, ShapeMismatchError, UsageError, kind_of, tag_environment, warn_user
from rlstruct.spaces import ROUNDING, Leaf, Space
from rlstruct.vec_env import FLAGS, Ended, IdleGuard, ObservationBuffer, StepResult, VecEnv, check_action, expect_on_cpu

Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
RESET_RETURNS = "two values, (observation, info)"
STEP_RETURNS = "five values, (observation, reward, terminated, truncated, info)"
_WATCHED_STEPS = 1000  # a Gaussian agent leaves the usual bounds much earlier

Options = list[dict[str, Any]]
"""Reset options of each environment."""


def write_rewards(rows: ObservationBuffer, reward: Array | list[Any]) -> None:
    """Write the rewards of a step, one number for each row; raise if they are anything else."""
    try:
        rewards = np.array(reward)
    except ValueError as error:  # ragged
        raise _reward_error(reward) from error
    if rewards.shape != rows.reward.shape or rewards.dtype.kind not in "fiub":  # None would become NaN
        raise _reward_error(reward)
    rows.reward[:] = rewards


def copy_idle_rows(rows: ObservationBuffer, before: ObservationBuffer, idle: Mask) -> None:
    """Copy the previous observation, with reward 0, into the rows that did not run."""
    for array, previous in zip(rows.arrays, before.arrays, strict=True):
        array[idle] = previous[idle]
    rows.reward[idle] = 0


def restart(rows: ObservationBuffer, which: int | Mask | slice, final: ObservationBuffer | None = None) -> None:
    """Mark rows as starts of episodes, and save their old content in ``final``; the caller writes the new frames."""
    if final is not None:
        for kept, array in zip(final.arrays, rows.arrays, strict=True):
            kept[which] = array[which]
    terminated, truncated, done, initial_state = rows.flags
    rows.reward[which] = 0
    terminated[which] = truncated[which] = done[which] = False
    for array in rows.last_action:
        array[which] = 0
    for array in rows.info:
        array[which] = np.nan
    initial_state[which] = True


def _reward_error(rewards: Array | list[Any]) -> ShapeMismatchError:
    odd = next((j for j, reward in enumerate(rewards) if np.ndim(reward) or not isinstance(reward, Number)), 0)
    got = f"an array of shape {np.shape(rewards[odd])}" if np.ndim(rewards[odd]) else repr(rewards[odd])
    error = ShapeMismatchError(
        f"'reward': environment {odd} gave {got}, expected one number. Return one per step, such as float(reward)."
    )
    tag_environment(error, odd)
    return error


class RowsEnv(VecEnv):
    """Base of `GymEnv` and `GymVectorEnv`: B environments on the CPU whose observations are written row by row."""

    def __init__(
        self, n: int, observation_space: Space, action_space: Space, info: Sequence[str] | None = None
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self._n = n
        self._where = type(self).__name__
        self._info = InfoNumbers(info, self._where)
        self._frames = SpaceCodec(observation_space, "frame", where=f"{self._where}: observation")
        self._actions = SpaceCodec(action_space, "action", where=f"{self._where}.step")
        self._last: ObservationBuffer | None = None  # result of the last `step` or `reset`
        self._begun = False
        self._running = torch.ones(n, dtype=torch.bool, device="cpu")  # callers hold it: replace it, never write to it
        self._idle = IdleGuard(self._where)
        self._checks = StepChecks(self._where, self)
        # Number of steps whose actions are still compared with the bounds of the action space.
        self._watched = _WATCHED_STEPS if any(isinstance(leaf.space, Box) for leaf in self._actions.leaves) else 0

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def n_envs(self) -> int:
        """Return B, the number of environments."""
        return self._n

    def step(self, action: DictTensor) -> StepResult:
        """Take one step in every environment that runs; see `VecEnv.step`.

        Raises as ``step_into`` does, and a ValueError if an environment accepted an action outside its space, or
        returned NaN.
        """
        before, ran = self._last, self._running
        if before is None:
            raise UsageError(f"{self._where}.step: there is nothing to step. Call reset() first.")
        out, final = self._new(), self._new()
        ended = self.step_into(action, before, out, final)
        self._last, current = out, out.observation()
        restarted = np.asarray([] if ended is None else ended.restarted, np.intp)
        self._checks.action(action, ran)
        if not len(restarted):
            return self._checks.step(StepResult((current, ran), (current, self._running), restarted=False))
        others = np.ones(self._n, np.bool_)
        others[restarted] = False
        for reached, array in zip(final.arrays, out.arrays, strict=True):
            reached[others] = array[others]
        return self._checks.step(StepResult((final.observation(), ran), (current, self._running)))

    @abstractmethod
    def step_into(
        self, action: DictTensor, before: ObservationBuffer, out: ObservationBuffer, final: ObservationBuffer | None
    ) -> Ended | None:
        """Take one step and write the observations into buffers; see `rlstruct.vec_env.StepsInto`.

        Raises:
            TypeError: the action is not a DictTensor.
            ShapeMismatchError: the action lacks a key or has another shape or dtype than the action space.
            RuntimeError: called before `reset`, or for 1,000 steps after every episode has ended.
        """

    def _begin(self) -> ObservationBuffer:
        """Return a buffer for the first observation; the caller writes the frames."""
        self._last = rows = self._new()
        restart(rows, slice(None))
        self._running = torch.ones_like(self._running)
        self._idle.begin()
        self._begun = True
        return rows

    def _columns(self, action: DictTensor, out: ObservationBuffer) -> Arrays:
        """Check the action, write it to ``out`` as the last action, and return its columns."""
        if not self._begun:
            raise UsageError(f"{self._where}.step: there is nothing to step. Call reset() first.")
        columns = self._actions.columns(check_action(self._where, action), self._n)
        self._last = None  # from now on the caller owns the last observation
        for array, column in zip(out.last_action, columns):  # noqa: B905 - of one space; strict takes half as long again
            array[:] = column
        if self._watched:
            self._watched -= 1
            self._watch(columns)
        return columns

    def _watch(self, columns: Arrays) -> None:
        """Warn if an action is outside a Box, and stop watching then."""
        for leaf, column in zip(self._actions.leaves, columns, strict=True):
            if isinstance(leaf.space, Box) and not _inside(column, leaf):
                _warn_of_clipping(self._where, leaf.key, str(leaf.space))
                self._watched = 0

    def _new(self) -> ObservationBuffer:
        """Allocate a buffer."""
        n = self._n
        arrays: dict[str, Array] = dict(zip(self._frames.keys, self._frames.empty(n), strict=True))
        arrays["reward"] = np.empty(n, np.float32)
        arrays |= {flag: np.zeros(n, np.bool_) for flag in FLAGS}
        arrays |= zip((f"last_{key}" for key in self._actions.keys), self._actions.empty(n), strict=True)
        arrays |= zip(self._info.keys, self._info.empty(n), strict=True)
        return ObservationBuffer(arrays)


def options_of(env_info: DictTensor | None, n: int, where: str) -> Options | None:
    """Turn ``env_info`` into one dict of options per environment.

    Returns:
        A dict for each environment: Python numbers where rows are 0-dimensional, else numpy arrays. None without keys.
    """
    if env_info is None or env_info.empty():
        return None
    expect_on_cpu(f"{where}: env_info", env_info)
    expect(f"{where}: env_info", env_info, rows=n, fix="Give one row per environment.")
    options: Options = [{} for _ in range(n)]
    for key, tensor in env_info.items():
        values = tensor.tolist() if tensor.dim() == 1 else list(tensor.numpy().copy())  # sync: on the CPU, per reset
        for row, value in zip(options, values, strict=True):
            row[key] = value
    return options


def old_api(who: str, answer: object, expected: str) -> TypeError:
    """Create the error for an environment whose return value does not have gymnasium's form."""
    got = kind_of(answer)
    if isinstance(answer, tuple):
        got = f"{len(answer)} values, ({', '.join(type(value).__name__ for value in answer)})"
    return BadTypeError(f"{who} returned {got}, expected gymnasium's {expected}. Port it from the old gym API.")


def _inside(column: Array, leaf: Leaf) -> bool:
    """Return True if all actions [B, ...] are within the bounds of a Box, up to rounding, or NaN."""
    low, high = (bound.astype(np.float64) for bound in leaf.bounds())
    outside = (column < low - ROUNDING * (1 + abs(low))) | (column > high + ROUNDING * (1 + abs(high)))
    return not outside.any()


@functools.cache  # once in a process
def _warn_of_clipping(where: str, key: str, space: str) -> None:
    warn_user(
        f"{where}: the agent's {key!r} is outside {space}. Unless the environment clips its actions itself, wrap it in "
        "gymnasium.wrappers.ClipAction, as rlstruct train does; the trajectories keep the actions as sampled. This "
        "warning appears once in each process."
    )
