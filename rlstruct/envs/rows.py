"""The observations of B environments on the CPU: the numpy arrays that they are written into, one row each."""

from __future__ import annotations

from numbers import Number
from typing import Any

import numpy as np
import torch

from rlstruct.core import DictTensor
from rlstruct.envs.codec import Arrays, SpaceCodec
from rlstruct.errors import BadTypeError, DeviceMismatchError, ShapeMismatchError, UsageError, tag_environment
from rlstruct.spaces import Space
from rlstruct.vec_env import IdleWatch, Stepped, VecEnv

Array = np.ndarray[Any, Any]
Mask = np.ndarray[Any, np.dtype[np.bool_]]
Index = Mask | list[int]
RESET_RETURNS = "two values, (observation, info)"
STEP_RETURNS = "five values, (observation, reward, terminated, truncated, info)"

Options = list[dict[str, Any]]
"""The options of each environment's reset."""


class Rows:
    """What B environments observe at one time: an observation, and the same memory as numpy arrays.

    Attributes:
        observation: as given.
        frames: the frames' arrays, one per leaf of the observation space.  [B, ...]
        reward: reward of the step that led here.                           [B] float32
        flags: terminated, truncated, done and initial_state.               [B] bool each
        last_action: the actions' arrays, one per leaf of the action space. [B, ...]
    """

    __slots__ = ("arrays", "flags", "frames", "last_action", "observation", "reward")

    def __init__(self, observation: DictTensor, frames: SpaceCodec, actions: SpaceCodec) -> None:
        """Look at the tensors as arrays."""

        def array(key: str) -> Array:
            found: Array = observation[key].numpy()  # sync: a view of CPU memory
            return found

        self.observation = observation
        self.frames: Arrays = [array(key) for key in frames.keys]
        self.reward = array("reward")
        self.flags: tuple[Mask, Mask, Mask, Mask] = (
            array("terminated"),
            array("truncated"),
            array("done"),
            array("initial_state"),
        )
        self.last_action: Arrays = [array(key) for key in last_action_keys(actions)]
        self.arrays = [*self.frames, self.reward, *self.flags, *self.last_action]

    @property
    def done(self) -> Mask:
        """Terminated or truncated.  [B] bool."""
        return self.flags[2]

    def step(self, reward: Array | list[Any]) -> None:
        """Write what a step gave that ended no episode; frames and last actions are the caller's to write."""
        try:
            rewards = np.array(reward)
        except ValueError as error:  # ragged
            raise _reward_error(reward) from error
        if rewards.shape != self.reward.shape or rewards.dtype.kind not in "fiub":  # None would become NaN
            raise _reward_error(reward)
        self.reward[:] = rewards
        for flag in self.flags:
            flag.fill(False)

    def end(self, terminated: Mask, truncated: Mask) -> None:
        """Write whose episode ended in the step.  [B] bool each."""
        self.flags[0][:] = terminated
        self.flags[1][:] = truncated
        np.logical_or(terminated, truncated, out=self.flags[2])

    def keep(self, previous: Rows, idle: Mask) -> None:
        """Repeat the previous observation, with reward 0, in the rows that did not run."""
        for array, before in zip(self.arrays, previous.arrays, strict=True):
            array[idle] = before[idle]
        self.reward[idle] = 0

    def copy_from(self, other: Rows) -> None:
        """Write what other rows hold."""
        for array, source in zip(self.arrays, other.arrays, strict=True):
            np.copyto(array, source)

    def restart(self, rows: Index | slice) -> None:
        """Turn ``rows`` into starts of episodes; their frames are the caller's to write."""
        where = rows if isinstance(rows, slice) else np.asarray(rows)  # once, for all the assignments below
        terminated, truncated, done, initial_state = self.flags
        for array in (self.reward, terminated, truncated, done, *self.last_action):
            array[where] = 0
        initial_state[where] = True


def _reward_error(rewards: Array | list[Any]) -> ShapeMismatchError:
    odd = next((j for j, reward in enumerate(rewards) if np.ndim(reward) or not isinstance(reward, Number)), 0)
    got = f"an array of shape {np.shape(rewards[odd])}" if np.ndim(rewards[odd]) else repr(rewards[odd])
    error = ShapeMismatchError(
        f"'reward': environment {odd} gave {got}, expected one number. Return one per step, such as float(reward)."
    )
    tag_environment(error, odd)
    return error


class RowsEnv(VecEnv):
    """What `GymEnv` and `GymVectorEnv` share: B environments on the CPU whose observations are written row by row."""

    def __init__(self, n: int, observation_space: Space, action_space: Space) -> None:
        """Look at the spaces."""
        self.observation_space, self.action_space = observation_space, action_space
        self._n = n
        self._where = type(self).__name__
        self._frames = SpaceCodec(observation_space, "frame", where=f"{self._where}: observation")
        self._actions = SpaceCodec(action_space, "action", where=f"{self._where}.step")
        self._rows: Rows | None = None  # the last observation
        self._lent: Rows | None = None  # where the next one is written, if somebody said
        self._known: dict[int, Rows] = {}  # all that were lent, by id of the DictTensor, which they keep alive
        self._copy: Rows | None = None  # of lent rows before their restart
        self._running = torch.ones(n, dtype=torch.bool, device="cpu")  # handed out, so replaced and never written
        self._idle = IdleWatch(self._where)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def n_envs(self) -> int:
        """Return B, the number of environments."""
        return self._n

    def lend(self, out: DictTensor) -> None:
        """Write the next observation into ``out``; see `VecEnv.lend`."""
        if id(out) not in self._known:
            self._known[id(out)] = Rows(out, self._frames, self._actions)
        self._lent = self._known[id(out)]

    def _begin(self) -> Rows:
        """Return the rows of the first observation; the frames are still to be written."""
        self._rows = rows = self._new()
        rows.restart(slice(None))
        self._running = torch.ones_like(self._running)
        self._idle.begin()
        return rows

    def _next(self, action: DictTensor) -> tuple[Rows, Rows, Arrays]:
        """Return the rows of the last observation, those of the next one, and the action, which is written there."""
        previous = self._rows
        if previous is None:
            raise UsageError(f"{self._where}.step: there is nothing to step. Call reset() first.")
        columns = self._actions.columns(action, self._n)
        lent, self._lent = self._lent, None
        rows = self._new() if lent is None or lent is previous else lent  # the previous ones are still to be read
        for array, column in zip(rows.last_action, columns, strict=True):
            array[:] = column
        return previous, rows, columns

    def _new(self) -> Rows:
        """Return rows in new memory."""
        n = self._n
        arrays: dict[str, Array] = dict(zip(self._frames.keys, self._frames.empty(n), strict=True))
        arrays["reward"] = np.empty(n, np.float32)
        for flag in ("terminated", "truncated", "done", "initial_state"):
            arrays[flag] = np.empty(n, np.bool_)
        arrays.update(zip(last_action_keys(self._actions), self._actions.empty(n), strict=True))
        observation = DictTensor._trusted({key: torch.from_numpy(array) for key, array in arrays.items()})
        return Rows(observation, self._frames, self._actions)

    def _is_lent(self, rows: Rows) -> bool:
        return self._known.get(id(rows.observation)) is rows

    def _reached(self, rows: Rows) -> Rows:
        """Copy rows that are about to restart; the copy of lent rows serves again for the next ones."""
        lent = self._is_lent(rows)
        copy = self._copy if lent and self._copy is not None else self._new()
        if lent:
            self._copy = copy
        copy.copy_from(rows)
        return copy

    def _stepped(self, reached: Rows, ran: torch.Tensor, rows: Rows) -> Stepped:
        """Remember the rows of a step, and return what it shows."""
        self._rows = rows
        if not self.auto_reset:
            self._idle.look(ran)
        current = rows.observation, self._running
        restarted, lent = reached is not rows, self._is_lent(rows)
        return Stepped((reached.observation, ran), current, restarted=restarted, lent=lent)


def last_action_keys(actions: SpaceCodec) -> tuple[str, ...]:
    """Return the observation's names of the last action: ``last_action``, or ``last_action/<key>`` when nested."""
    return tuple(f"last_{key}" for key in actions.keys)


def options_of(env_info: DictTensor | None, n: int, where: str) -> Options | None:
    """Turn ``env_info`` into one dict of options per environment.

    Returns:
        For each environment Python numbers where a row is 0-dimensional and numpy arrays otherwise; None without keys.
    """
    if env_info is None or env_info.empty():
        return None
    if env_info.device is not None and env_info.device.type != "cpu":
        raise DeviceMismatchError(
            f"{where}: tensor {next(iter(env_info.keys()))!r} of env_info is on {env_info.device}, expected cpu. "
            "env_info stays on the CPU: create it there."
        )
    if env_info.n_elems() != n:
        raise ShapeMismatchError(
            f"{where}: env_info has {env_info.n_elems()} rows, expected {n}: one row per environment."
        )
    options: Options = [{} for _ in range(n)]
    for key, tensor in env_info.items():
        values = tensor.tolist() if tensor.dim() == 1 else list(tensor.numpy().copy())  # sync: on the CPU, per reset
        for row, value in zip(options, values, strict=True):
            row[key] = value
    return options


def old_api(who: str, answer: object, expected: str) -> TypeError:
    """Say that an environment does not return what gymnasium's do."""
    got = f"a {type(answer).__name__}"
    if isinstance(answer, tuple):
        got = f"{len(answer)} values, ({', '.join(type(value).__name__ for value in answer)})"
    return BadTypeError(f"{who} returned {got}, expected gymnasium's {expected}. Port it from the old gym API.")
