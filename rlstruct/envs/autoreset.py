"""Episode restarts of gymnasium vector environments, with one interface for all three autoreset modes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics

from rlstruct.envs.codec import Arrays, SpaceCodec
from rlstruct.envs.info_numbers import InfoNumbers
from rlstruct.envs.rows import RESET_RETURNS, STEP_RETURNS, Mask, Options, old_api, write_rewards
from rlstruct.errors import BadValueError, ShapeMismatchError
from rlstruct.spaces import Element
from rlstruct.vec_env import ObservationBuffer

Vector = VectorEnv[Any, Any, Any]


class Restarter:
    """A vector environment that restarts itself, and reports exactly which rows ended an episode and which began one.

    Args:
        vector: the environment.
        frames: codec of the frames of one environment.
        restarts_take_steps: a row whose episode ended ignores its next action and restarts in that step
            (`AutoresetMode.NEXT_STEP`).
    """

    def __init__(self, vector: Vector, frames: SpaceCodec, *, restarts_take_steps: bool = False) -> None:
        base = vector.unwrapped
        self.vector = vector
        self.frames = frames
        self.restarts_take_steps = restarts_take_steps
        self.n = int(vector.num_envs)
        # Sync- and AsyncVectorEnv pass a dict of options to each environment; others get one dict for all, see `merge`.
        self.by_row = isinstance(base, SyncVectorEnv | AsyncVectorEnv)
        self.seeded_at_reset = not _is_envpool(base)
        self.options: Options | None = None
        self.reset_info: Any = {}  # of the latest reset, as a dict, or as a list of one dict for each row
        self._pending = np.zeros(self.n, np.bool_)  # rows whose next step restarts them

    def reset(self, seed: int | None, options: Options | None) -> Arrays:
        """Start a new episode in every row, once, with its own options."""
        if not self.seeded_at_reset:
            if options is not None:
                raise BadValueError(
                    f"GymVectorEnv.reset: EnvPool takes no reset options, got env_info with {sorted(options[0])}. "
                    f"Set them in envpool.make(...)."
                )
            seed = None
        base = self.vector.unwrapped
        if isinstance(base, AsyncVectorEnv) and not base.shared_memory and self.restarts_take_steps:
            _finish_restarts(base, np.flatnonzero(self._pending).tolist())  # sync: of CPU memory
        self._pending = np.zeros(self.n, np.bool_)
        self.options = options
        if self.by_row and options is not None and any(not equal_options(options[0], row) for row in options):
            return self._reset_each(seed, options)  # at once, because the first reset must include every row
        return self._reset(seed=seed, options=merge(options))

    def step(self, action: Element, out: ObservationBuffer, numbers: InfoNumbers) -> tuple[Mask, Arrays] | None:
        """Take one step, and write frames, rewards and ends to ``out``.

        Args:
            action: one batched action, as the vector environment takes it.
            out: buffer for the true next observations, before any restart.
            numbers: those to carry from the info.

        Returns:
            ``(restarted, first)``: the mask [B] bool of the rows whose next action is the first of a new episode, and
            the first frames of these episodes, [B, ...] for each leaf, valid in these rows. None if no row restarted.
        """
        answer = self.vector.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise old_api(f"GymVectorEnv.step: {type(self.vector.unwrapped).__name__}", answer, STEP_RETURNS)
        observation, reward, terminated, truncated, info = answer
        self.frames.batched(observation, self.n, out.frames)
        if np.shape(reward) != (self.n,):
            raise ShapeMismatchError(
                f"GymVectorEnv.step: 'reward' is {reward!r}, expected numbers of shape ({self.n},)."
            )
        write_rewards(out, np.asarray(reward))
        out.flags[0][:] = self._mask("terminated", terminated)
        out.flags[1][:] = self._mask("truncated", truncated)
        ended = np.logical_or(*out.flags[:2])
        out.flags[2][:] = ended
        if numbers:
            numbers.write_rows(out.info, info, ended)
            if ended.any():
                numbers.check_seen()
        # The step of a restart can end, too: ale-py's life_loss_info plays on where it reported an end.
        restarted, self._pending = self._pending & ~ended if self.restarts_take_steps else ended, ended
        return (restarted, self._first(restarted, out.frames, info)) if restarted.any() else None

    def _first(self, rows: Mask, out: Arrays, info: Any) -> Arrays:  # noqa: ANN401 - of gymnasium, or a wrapper's
        """Return the first frames of ``rows``, and leave the final frames in ``out``."""
        return [array.copy() for array in out]

    def _reset(self, **arguments: Any) -> Arrays:  # noqa: ANN401 - seed and options
        answer: Any = self.vector.reset(**arguments)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict | list):
            raise old_api(f"GymVectorEnv.reset: {type(self.vector.unwrapped).__name__}", answer, RESET_RETURNS)
        self.reset_info = answer[1]
        return self.frames.batched(answer[0], self.n)

    def _reset_each(self, seed: int | None, options: Options) -> Arrays:
        """Reset all rows of a Sync- or AsyncVectorEnv at once, each with its own options."""
        base: Any = self.vector.unwrapped
        name, wrapper = ("envs", _OwnOptions) if isinstance(base, SyncVectorEnv) else ("parent_pipes", _OwnOptionsPipe)
        rows = getattr(base, name)
        wrapped = [wrapper(row, own) for row, own in zip(rows, options, strict=True)]
        setattr(base, name, wrapped)
        try:
            return self._reset(seed=seed)
        finally:
            # gymnasium replaces the pipe of a process that raised by None
            setattr(base, name, [None if now is None else row for row, now in zip(rows, wrapped, strict=True)])

    def _mask(self, name: str, value: Element) -> Mask:
        mask = np.asarray(value)
        if mask.shape != (self.n,) or mask.dtype.kind not in "biu":  # an array with None is of dtype object
            raise ShapeMismatchError(
                f"GymVectorEnv.step: {name!r} is {mask.dtype} {mask.shape}, expected bool ({self.n},)."
            )
        return mask.astype(np.bool_)


class MaskedReset(Restarter):
    """A `Restarter` that restarts ended rows immediately with ``reset(options={"reset_mask": mask})``.

    No final observation and no step is lost. If each row has its own options, rows with equal options are reset
    together, one group after the other.
    """

    def _first(self, rows: Mask, out: Arrays, info: Any) -> Arrays:  # noqa: ANN401
        for mask, group in self._groups(rows):
            frames = self._reset(options={**group, "reset_mask": mask})
        return frames

    def _groups(self, mask: Mask) -> list[tuple[Mask, dict[str, Any]]]:
        """Group the rows of a mask by their options: a mask and the options for each group."""
        if self.options is None or not self.by_row:
            return [(mask.copy(), merge(self.options) or {})]
        groups: list[tuple[Mask, dict[str, Any]]] = []
        for row in np.flatnonzero(mask):
            options = self.options[row]
            group_mask = next((of_group for of_group, group in groups if equal_options(group, options)), None)
            if group_mask is None:
                group_mask = np.zeros(self.n, np.bool_)
                groups.append((group_mask, dict(options)))
            group_mask[row] = True
        return groups


class _OwnOptions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that resets with its own options and ignores those passed to `reset`."""

    def __init__(self, env: gymnasium.Env[Any, Any], options: dict[str, Any]) -> None:
        super().__init__(env)
        self._options = options

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options=dict(self._options))


class _OwnOptionsPipe:
    """A pipe to a process of an AsyncVectorEnv whose environment resets with separate options."""

    def __init__(self, pipe: Any, options: dict[str, Any]) -> None:  # noqa: ANN401 - of multiprocessing
        self._pipe, self._options = pipe, options

    def send(self, message: tuple[str, Any]) -> None:
        command, arguments = message
        self._pipe.send((command, {**arguments, "options": self._options}) if command == "reset" else message)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the pipe has
        return getattr(self._pipe, name)


class EnvPoolReset(MaskedReset):
    """A `MaskedReset` for EnvPool, whose partial reset takes row numbers and returns only these rows."""

    def _first(self, rows: Mask, out: Arrays, info: Any) -> Arrays:  # noqa: ANN401
        numbers = np.flatnonzero(rows).astype(np.int32)
        observation, info = cast("Any", self.vector).reset(numbers)
        first = [np.zeros_like(array) for array in out]
        for array, part in zip(first, self.frames.batched(observation, len(numbers)), strict=True):
            array[info["env_id"]] = part
        return first


class SameStep(Restarter):
    """A `Restarter` for vector environments that restart within the step (`AutoresetMode.SAME_STEP`)."""

    def _first(self, rows: Mask, out: Arrays, info: Any) -> Arrays:  # noqa: ANN401
        """Move the first frames out of ``out``, and the final ones from the info into it."""
        first = super()._first(rows, out, info)
        if isinstance(info, list):  # of DictInfoToList: one dict for each row
            final = np.full(self.n, None, object)
            for row in map(int, np.flatnonzero(rows)):
                final[row] = info[row].get("final_obs")
        else:
            final = info.get("final_obs")
        objects = isinstance(final, np.ndarray) and final.dtype == object  # one element of the space per row, or None
        if final is None or (objects and any(element is None for element in final[rows])):
            keys = sorted(info[0] if isinstance(info, list) else info)
            raise ShapeMismatchError(
                f"GymVectorEnv.step: an episode ended, but {type(self.vector.unwrapped).__name__} gave no "
                f"info['final_obs'], only {keys}. Its mode is not SAME_STEP: pass autoreset_mode=, or fix it."
            )
        if objects:
            target = self.frames.target(out)
            for row in map(int, np.flatnonzero(rows)):
                self.frames.write(target, row, final[row])
        else:
            for array, part in zip(out, self.frames.batched(final, self.n), strict=True):
                array[rows] = part[rows]
        return first


class AtariSameStep(SameStep):
    """A `SameStep` for ale-py, which writes a final observation only in rows whose game restarts.

    With ``life_loss_info``, a lost life is reported as an end in a game that goes on: the observation of that step is
    the final one and the first of the next episode.
    """

    def reset(self, seed: int | None, options: Options | None) -> Arrays:
        """Start a new game in every row."""
        frames = super().reset(seed, options)
        self._begun = self._begin_frames(self.reset_info)
        return frames

    def _first(self, rows: Mask, out: Arrays, info: Any) -> Arrays:  # noqa: ANN401
        before, self._begun = self._begun, self._begin_frames(info)
        return super()._first(rows & (self._begun != before), out, info)

    def _begin_frames(self, info: Any) -> np.ndarray[Any, Any]:  # noqa: ANN401
        """Return the frame in which the game of each row began, [B]."""
        rows = info if isinstance(info, list) else [info]
        begun = [np.asarray(row["frame_number"]) - row["episode_frame_number"] for row in rows]
        return np.array(begun).reshape(self.n)


def equal_options(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return True if two environments have equal options."""
    return first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)


def merge(options: Options | None) -> dict[str, Any] | None:
    """Merge the options of all environments into one dict for a vector environment.

    A value that is equal in all environments is passed once; differing values become an array with one row for each
    environment.
    """
    if options is None:
        return None
    merged = {}
    for key, first in options[0].items():
        equal = all(np.array_equal(first, row[key]) for row in options)
        merged[key] = first if equal else np.array([row[key] for row in options])
    return merged


def autoreset_mode(vector: Vector, stated: AutoresetMode | str | None) -> AutoresetMode:
    """Return the autoreset mode that a vector environment declares, or else the one that the user stated."""
    base = vector.unwrapped
    declared = getattr(base, "autoreset_mode", None)
    # A class without its own metadata shares gymnasium's dict, and ale-py writes its latest mode into that one.
    if declared is None and base.metadata is not VectorEnv.metadata:
        declared = base.metadata.get("autoreset_mode")
    choices = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
    name = type(base).__name__
    if declared is None and stated is None:
        raise BadValueError(
            f"GymVectorEnv: {name} does not say how it restarts: metadata['autoreset_mode'] is missing. Pass "
            f"autoreset_mode=, one of {choices} (of gymnasium.vector)."
        )
    try:
        modes = [AutoresetMode(mode) for mode in (stated, declared) if mode is not None]
    except ValueError as error:
        raise BadValueError(f"GymVectorEnv: {error}. The modes are {choices} (of gymnasium.vector).") from error
    if modes[0] is not modes[-1]:
        raise BadValueError(
            f"GymVectorEnv: autoreset_mode={modes[0]}, but {name} declares {modes[-1]}. Leave autoreset_mode out."
        )
    return modes[0]


def make_restarter(
    vector: Vector, frames: SpaceCodec, mode: AutoresetMode, *, reset_mask: bool, episodic: bool
) -> Restarter:
    """Create the `Restarter` that lets the vector environment restart itself if it can, and keeps final observations.

    ``reset_mask`` replaces the restarts of mode NEXT_STEP by masked resets, and says that all wrappers obey the masks.
    """
    base = vector.unwrapped
    if episodic:
        _check_layers(vector, "with episodic=True, idle rows are stepped and their results dropped", "Leave it out")
    if mode is AutoresetMode.SAME_STEP:
        if isinstance(base, SyncVectorEnv):
            _copy_final_observations(base)
        elif isinstance(base, AsyncVectorEnv) and base.worker is None:
            _check_final_observations(base)
        from_ale = type(base).__module__.startswith("ale_py.")
        return AtariSameStep(vector, frames) if from_ale else SameStep(vector, frames)
    if mode is AutoresetMode.NEXT_STEP and not reset_mask:
        return Restarter(vector, frames, restarts_take_steps=True)
    why = f"{type(base).__name__} restarts rows by masked resets"
    _check_layers(vector, why, "Make it in mode NEXT_STEP or SAME_STEP, without reset_mask")
    if not reset_mask:
        _check_wrappers_of_users(vector)
    if _is_envpool(base):
        if vector is not base:
            raise BadValueError(
                "GymVectorEnv: reset_mask=True, but EnvPool returns only the rows that it resets, and its wrapper "
                f"{type(vector).__name__} expects all of them. Leave out reset_mask or the wrapper."
            )
        return EnvPoolReset(vector, frames)
    if mode is AutoresetMode.NEXT_STEP and isinstance(base, AsyncVectorEnv) and not base.shared_memory:
        raise BadValueError(  # gymnasium 1.4 would restart the row again in the next step
            "GymVectorEnv: reset_mask=True, but a reset does not cancel the restart of an AsyncVectorEnv in mode "
            "NEXT_STEP with shared_memory=False. Leave out reset_mask, or make it in mode DISABLED."
        )
    return MaskedReset(vector, frames)


def _is_envpool(base: Vector) -> bool:
    return hasattr(base, "all_env_ids") and hasattr(base, "async_reset")


def _check_layers(vector: Vector, why: str, fix: str) -> None:
    """Raise if a wrapper of gymnasium 1.4 keeps state that a masked reset or a dropped step of some rows falsifies."""
    layer: Any = vector
    while isinstance(layer, VectorWrapper):
        if isinstance(layer, NormalizeObservation | NormalizeReward | RecordEpisodeStatistics):
            raise BadValueError(
                f"GymVectorEnv: {why}, which falsifies what {type(layer).__name__} keeps across rows. {fix}, or wrap "
                "each environment instead."
            )
        layer = layer.env


def _check_wrappers_of_users(vector: Vector) -> None:
    """Raise if a wrapper that is not gymnasium's own overrides `reset`, because it may not know masks."""
    layer: Any = vector
    while isinstance(layer, VectorWrapper):
        owner = next(cls for cls in type(layer).__mro__ if "reset" in vars(cls))
        if not owner.__module__.startswith("gymnasium."):
            raise BadValueError(
                f"GymVectorEnv: {type(layer).__name__} overrides reset, which restarts single rows in mode DISABLED. "
                "Pass reset_mask=True if it obeys options['reset_mask'], else make the vector environment in mode "
                "NEXT_STEP or SAME_STEP."
            )
        layer = layer.env


def _copy_final_observations(base: SyncVectorEnv) -> None:
    """Let a SyncVectorEnv in mode SAME_STEP copy final observations.

    gymnasium 1.4 stores the environment's own array, which the reset overwrites if the environment reuses one buffer.
    """
    add_info = base._add_info

    def add_copy(vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if "final_obs" in env_info:
            env_info = {**env_info, "final_obs": copy.deepcopy(env_info["final_obs"])}
        return add_info(vector_infos, env_info, env_num)

    setattr(base, "_add_info", add_copy)  # noqa: B010 - mypy refuses to assign methods


def _check_final_observations(base: AsyncVectorEnv) -> None:
    """Raise if an AsyncVectorEnv in mode SAME_STEP loses final observations, because a reset overwrites them.

    The processes cannot be asked, so an environment made for this purpose takes one step.
    """
    fix = "Make it in mode NEXT_STEP or DISABLED."
    try:
        env = base.env_fns[0]()
        try:
            env.reset(seed=0)
            env.action_space.seed(0)
            arrays = list(_arrays(env.step(env.action_space.sample())[0]))
            before = copy.deepcopy(arrays)
            after = list(_arrays(env.reset()[0]))
        finally:
            env.close()
    except Exception as error:
        raise BadValueError(
            "GymVectorEnv: AsyncVectorEnv in mode SAME_STEP may lose final observations: its environment did not take "
            f"the step that tells whether it reuses its memory ({type(error).__name__}: {error}). {fix}"
        ) from error
    reused = any(np.shares_memory(one, other) for one in arrays for other in after)
    if reused or any(not np.array_equal(one, old) for one, old in zip(arrays, before, strict=True)):
        raise BadValueError(
            "GymVectorEnv: AsyncVectorEnv in mode SAME_STEP loses the final observations of an environment that "
            f"returns the same array from step and reset. {fix}"
        )


def _arrays(observation: Element) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(observation, dict | tuple):
        for part in observation.values() if isinstance(observation, dict) else observation:
            yield from _arrays(part)
    elif isinstance(observation, np.ndarray):
        yield observation


def _finish_restarts(base: AsyncVectorEnv, rows: list[int]) -> None:
    """Let processes take the step in which they restart, because gymnasium 1.4 keeps it pending over a reset.

    It cancels the restart only with shared memory.
    """
    for row in rows:
        base.parent_pipes[row].send(("step", None))  # the action is ignored
    base._raise_if_errors([base.parent_pipes[row].recv()[1] for row in rows] + [True] * (base.num_envs - len(rows)))
