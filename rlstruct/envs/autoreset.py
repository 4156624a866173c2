"""Episode restarts of gymnasium vector environments, with one interface for all three autoreset modes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from rlstruct.envs.codec import Arrays, SpaceCodec
from rlstruct.envs.rows import RESET_RETURNS, STEP_RETURNS, Mask, Options, old_api, write_rewards
from rlstruct.errors import BadValueError, ShapeMismatchError
from rlstruct.in_place import ObservationBuffer
from rlstruct.spaces import Element

Vector = VectorEnv[Any, Any, Any]


class Restarter:
    """A vector environment that restarts itself, and whose steps report which rows ended an episode or began one.

    Args:
        vector: the environment.
        frames: codec of the frames of one environment.
        by_row: each row has its own reset options, because Sync- and AsyncVectorEnv pass a dict of options to each
            environment that they reset. Other vector environments get one dict for all rows, see `merge`.
        restarts_take_steps: a row whose episode ended ignores its next action and restarts in that step
            (`AutoresetMode.NEXT_STEP`).
    """

    seeded_at_reset = True  # False if `reset` ignores the seed

    def __init__(
        self, vector: Vector, frames: SpaceCodec, *, by_row: bool = False, restarts_take_steps: bool = False
    ) -> None:
        self.vector = vector
        self.frames = frames
        self.by_row, self.restarts_take_steps = by_row, restarts_take_steps
        self.n = int(vector.num_envs)
        self.options: Options | None = None
        self._pending = np.zeros(self.n, np.bool_)

    def reset(self, seed: int | None, options: Options | None) -> Arrays:
        """Start a new episode in every row."""
        self._pending = np.zeros(self.n, np.bool_)
        self.options = options
        if self.by_row and options is not None and any(not equal_options(options[0], row) for row in options):
            return self._reset_each(seed, options)
        return self._reset(seed=seed, options=merge(options) or None)

    def step(self, action: Element, out: ObservationBuffer) -> tuple[Mask, Arrays] | None:
        """Take one step, and write frames, rewards and ends to ``out``.

        Args:
            action: one batched action, as the vector environment takes it.
            out: buffer for the true next observations, before any restart.

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
        write_rewards(out, reward)
        out.flags[0][:] = self._mask("terminated", terminated)
        out.flags[1][:] = self._mask("truncated", truncated)
        ended = np.logical_or(*out.flags[:2])
        out.flags[2][:] = ended
        restarted, self._pending = self._pending if self.restarts_take_steps else ended, ended
        return (restarted, self._first(restarted, out.frames, info)) if restarted.any() else None

    def _first(self, rows: Mask, out: Arrays, info: dict[str, Any]) -> Arrays:
        """Return the first frames of ``rows``, and leave the final frames in ``out``."""
        return [array.copy() for array in out]

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

    def _reset(self, **arguments: Any) -> Arrays:  # noqa: ANN401 - seed and options
        answer: Any = self.vector.reset(**arguments)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise old_api(f"GymVectorEnv.reset: {type(self.vector.unwrapped).__name__}", answer, RESET_RETURNS)
        return self.frames.batched(answer[0], self.n)

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

    Raises:
        ValueError: a wrapper keeps state of all rows, and would see the restart of a few as a restart of all.
    """

    def __init__(self, vector: Vector, frames: SpaceCodec, *, by_row: bool = False, stated: bool = False) -> None:
        super().__init__(vector, frames, by_row=by_row)
        _check_layers(vector, stated)

    def _first(self, rows: Mask, out: Arrays, info: dict[str, Any]) -> Arrays:
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


class EnvPoolRestarter(Restarter):
    """A `Restarter` for EnvPool, which restarts a row in the step after its end, and takes seeds when it is made."""

    seeded_at_reset = False

    def reset(self, seed: int | None, options: Options | None) -> Arrays:
        """Start a new episode in every row."""
        if options is not None:
            raise BadValueError(
                f"GymVectorEnv.reset: EnvPool takes no reset options, got env_info with {sorted(options[0])}. "
                f"Set them in envpool.make(...)."
            )
        self._pending = np.zeros(self.n, np.bool_)
        observation, _ = self.vector.reset()
        return self.frames.batched(observation, self.n)


class EnvPoolReset(EnvPoolRestarter):
    """An `EnvPoolRestarter` that restarts ended rows immediately, by a partial reset."""

    def _first(self, rows: Mask, out: Arrays, info: dict[str, Any]) -> Arrays:
        numbers = np.flatnonzero(rows).astype(np.int32)
        observation, info = cast("Any", self.vector).reset(numbers)
        first = [np.zeros_like(array) for array in out]
        for array, part in zip(first, self.frames.batched(observation, len(numbers)), strict=True):
            array[info["env_id"]] = part
        return first


class SameStep(Restarter):
    """A `Restarter` for vector environments that restart within the step (`AutoresetMode.SAME_STEP`)."""

    def _first(self, rows: Mask, out: Arrays, info: dict[str, Any]) -> Arrays:
        """Move the first frames out of ``out``, and the final ones from the info into it."""
        final = info.get("final_obs")
        if final is None:
            raise ShapeMismatchError(
                f"GymVectorEnv.step: an episode ended, but {type(self.vector.unwrapped).__name__} gave no "
                f"info['final_obs'], only {sorted(info)}. Its mode is not SAME_STEP: pass autoreset_mode=, or fix it."
            )
        first = super()._first(rows, out, info)
        if isinstance(final, np.ndarray) and final.dtype == object:  # one element of the space per row, or None
            target = self.frames.target(out)
            for row in map(int, np.flatnonzero(rows)):
                self.frames.write(target, row, final[row])
        else:
            for array, part in zip(out, self.frames.batched(final, self.n), strict=True):
                array[rows] = part[rows]
        return first


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


def make_restarter(vector: Vector, frames: SpaceCodec, mode: AutoresetMode, reset_mask: bool | None) -> Restarter:
    """Create the `Restarter` for a mode: the vector environment restarts itself wherever it can.

    ``reset_mask`` is True for immediate restarts by ``reset(options={"reset_mask": mask})`` in mode NEXT_STEP, too.
    """
    base = vector.unwrapped
    by_row = isinstance(base, SyncVectorEnv | AsyncVectorEnv)
    masked = reset_mask is True and mode is AutoresetMode.NEXT_STEP
    _check_processes(base, mode)
    if hasattr(base, "all_env_ids") and hasattr(base, "async_reset"):
        if masked:
            _check_layers(vector, stated=True)
            return EnvPoolReset(vector, frames)
        return EnvPoolRestarter(vector, frames, restarts_take_steps=True)
    if masked or mode is AutoresetMode.DISABLED:
        return MaskedReset(vector, frames, by_row=by_row, stated=reset_mask is True)
    if mode is AutoresetMode.SAME_STEP:
        if isinstance(base, SyncVectorEnv):
            base.envs = [_CopyOfEnd(env) for env in base.envs]
        return SameStep(vector, frames, by_row=by_row)
    return Restarter(vector, frames, by_row=by_row, restarts_take_steps=True)


class _CopyOfEnd(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose final observations are copies.

    In mode SAME_STEP, SyncVectorEnv of gymnasium 1.4 returns the environment's own array as ``final_obs``, and the
    reset that follows overwrites it if the environment reuses one buffer.
    """

    def step(self, action: Element) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        answer = self.env.step(action)
        if len(answer) == 5 and (answer[2] or answer[3]):
            return deepcopy(answer[0]), *answer[1:]
        return answer


def _check_processes(base: Vector, mode: AutoresetMode) -> None:
    """Raise if gymnasium 1.4 would lose final observations or steps of an AsyncVectorEnv.

    Its processes return the environment's own array as final_obs in mode SAME_STEP, and the reset overwrites it if the
    environment reuses one buffer. In mode NEXT_STEP without shared memory, a reset does not cancel a pending restart.
    """
    if not isinstance(base, AsyncVectorEnv) or base.worker is not None or mode is AutoresetMode.DISABLED:
        return
    if mode is AutoresetMode.SAME_STEP or not base.shared_memory:
        how = mode.name if mode is AutoresetMode.SAME_STEP else f"{mode.name} with shared_memory=False"
        raise BadValueError(
            f"GymVectorEnv: AsyncVectorEnv in mode {how} may lose final observations. Make it with "
            "autoreset_mode=AutoresetMode.NEXT_STEP and shared memory, or with autoreset_mode=AutoresetMode.DISABLED: "
            "then GymVectorEnv restarts its environments, in the same step."
        )


def _check_layers(vector: Vector, stated: bool) -> None:
    """Raise if a wrapper keeps state that the restart of single rows would spoil.

    Args:
        vector: the environment with its wrappers.
        stated: the user says that their resets obey ``options["reset_mask"]``.
    """
    layer: Any = vector
    while isinstance(layer, VectorWrapper):
        owner = next(cls for cls in type(layer).__mro__ if "reset" in vars(cls))
        resets_all = issubclass(owner, NormalizeObservation | NormalizeReward)
        if resets_all or not (stated or owner.__module__.startswith("gymnasium.")):
            fix = "" if resets_all else ", or pass reset_mask=True if its reset obeys options['reset_mask']"
            raise BadValueError(
                f"GymVectorEnv: {type(layer).__name__} keeps state of all rows, and would take the restart of single "
                "rows, which mode DISABLED and reset_mask=True need, for a restart of all. Make the vector environment "
                f"with autoreset_mode=AutoresetMode.NEXT_STEP{fix}."
            )
        layer = layer.env
