"""GymEnv and GymEnvInf: a list of gymnasium environments as one VecEnv on the CPU."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch

from rlstruct.core import DictTensor
from rlstruct.envs.rows import (
    RESET_RETURNS,
    STEP_RETURNS,
    Options,
    RowsEnv,
    copy_idle_rows,
    old_api,
    options_of,
    restart,
    write_rewards,
)
from rlstruct.errors import BadTypeError, BadValueError, ShapeMismatchError, expect_type, kind_of, tag_environment
from rlstruct.options import check_seed
from rlstruct.profiling import operation
from rlstruct.spaces import Element, advice_on
from rlstruct.vec_env import Ended, ObservationBuffer, Observed

_logger = logging.getLogger(__name__)
_NOTHING = object()  # result of an environment that raised


class GymEnv(RowsEnv):
    """B gymnasium environments, stepped one after the other. After its episode, an environment idles until `reset`.

    Final observations are always the true ones, even if an environment reuses one buffer for all its observations,
    because each observation is copied before the environment is called again. An exception of environment j propagates
    unchanged, with the attribute ``environment_index = j``. If its action was outside a Discrete (or MultiDiscrete, or
    MultiBinary) space, a ValueError that says so replaces it and has it as the cause.

    Gymnasium cannot save an unfinished episode: `state_dict` returns None, and a batcher or a training that continues
    from a checkpoint starts new episodes.

    Args:
        envs: at least one environment, all with the same spaces; this object closes them.
        seed: environment j and its action space are seeded with ``seed + j`` at its first reset; later resets continue
            the environment's own random stream. None leaves them unseeded.
        info: numbers to carry from the info of each step into the observation that it reached, by their paths:
            ``"episode/r"`` is ``info["episode"]["r"]`` and becomes ``info/episode/r`` [B] float64, so a batcher's
            batches have it as ``_observation/info/episode/r``. NaN in steps whose info lacks it, and after a reset.

    Raises:
        TypeError: ``envs`` is not a list of gymnasium environments, a space is missing or cannot become a tensor, or
            ``info`` is not a list of strings.
        ValueError: ``envs`` is empty, contains an object twice, or contains environments with different spaces, or a
            path in ``info`` is wrong or appears twice.
    """

    auto_reset = False
    restarts_take_steps = False

    def __init__(
        self, envs: Sequence[gymnasium.Env[Any, Any]], seed: int | None = None, *, info: Sequence[str] | None = None
    ) -> None:
        self.envs = _checked(envs, type(self).__name__)
        super().__init__(len(self.envs), self.envs[0].observation_space, self.envs[0].action_space, info)
        if all(map(_clips, self.envs)):
            self._watched = 0
        seed = None if seed is None else check_seed(type(self).__name__, "seed", seed, len(self.envs))
        self._seeds: list[int | None] = [None if seed is None else seed + j for j in range(len(self.envs))]
        if seed is not None:
            for j, env in enumerate(self.envs):
                env.action_space.seed(seed + j)
        self._options: Options | None = None
        self._steps = self._step_functions()
        self._order: Sequence[int] = range(len(self.envs))  # indices of the environments that run
        self._closed = False

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every environment; see `VecEnv.reset`.

        Args:
            env_info: passed to environment j as ``reset(options={key: value of row j})``, now and whenever it resets
                itself: Python numbers for 0-dimensional rows, numpy arrays otherwise. Empty or None for no options.

        Raises:
            TypeError: an environment uses the old gym API.
            ShapeMismatchError: ``env_info`` does not have B rows, or a frame does not fit its space.
            DeviceMismatchError: ``env_info`` is not on the CPU.
        """
        self._options = options_of(env_info, len(self.envs), f"{self._where}.reset")
        rows = self._begin()
        target = self._frames.target(rows.frames)
        for j in range(len(self.envs)):
            self._frames.write(target, j, self._reset_one(j))
        self._steps = self._step_functions()
        self._order = range(len(self.envs))
        self._checks.observation(first := rows.observation())
        return first, self._running

    def step_into(
        self, action: DictTensor, before: ObservationBuffer, out: ObservationBuffer, final: ObservationBuffer | None
    ) -> Ended | None:
        """Take one step in every environment that runs; see `VecEnv.step` and `rlstruct.vec_env.StepsInto`.

        Raises:
            ShapeMismatchError: as in `RowsEnv.step_into`, or an environment returned an invalid reward, end or frame.
            TypeError: as there, or an environment uses the old gym API.
        """
        ended = self._step_envs(self._actions.elements(self._columns(action, out)), out)
        if self.auto_reset:
            if not ended:
                return None
            target = self._frames.target(out.frames)
            for j in ended:
                restart(out, j, final)
                self._frames.write(target, j, self._reset_one(j))
            return Ended(None, None, ended)
        ran = self._running
        if len(self._order) < len(self.envs):
            copy_idle_rows(out, before, ~ran.numpy())  # sync: of CPU memory
        if ended:
            self._order = [j for j in self._order if j not in ended]
            self._running = ran & ~torch.from_numpy(out.flags[2])
        self._idle.check(ran)
        return None if len(self._order) == len(self.envs) else Ended(ran, self._running, ())

    def render(self) -> list[Any]:
        """Render every environment, and return the results."""
        return [env.render() for env in self.envs]

    def close(self) -> None:
        """Close every environment, even if one of them raises. The first exception is raised at the end."""
        if self._closed:
            return
        self._closed = True
        self._last, self._begun = None, False
        failure: Exception | None = None
        for j, env in enumerate(self.envs):
            try:
                env.close()
            except Exception as error:  # first close the others, which hold windows and processes
                _logger.warning("%s.close: environment %d raised %r", self._where, j, error)
                if failure is None:
                    tag_environment(error, j)
                    failure = error
        if failure is not None:
            raise failure

    @operation("simulator")
    def _step_envs(self, actions: Sequence[Element], rows: ObservationBuffer) -> list[int]:
        """Step the environments that run, write their results, and return the rows whose episode ended."""
        target, forms = self._frames.target(rows.frames), self._frames.forms
        reward: list[Any] = [0.0] * len(self.envs)
        ended: list[tuple[int, bool, bool]] = []
        steps, j, answer, ndarray = self._steps, 0, _NOTHING, np.ndarray
        try:
            for j in self._order:
                answer = _NOTHING
                answer = steps[j](actions[j])
                frame, reward[j], terminated, truncated, _ = answer
                # The same as SpaceCodec.write, without its call for each environment and step.
                if ((frame.shape, frame.dtype) if type(frame) is ndarray else type(frame)) not in forms:
                    self._frames.check(frame, index=j)
                target[j] = frame  # a copy, at once: the environment may reuse its buffer
                if terminated is not False or truncated is not False:
                    ends = _flag("terminated", terminated), _flag("truncated", truncated)
                    if True in ends:
                        ended.append((j, *ends))
        except Exception as error:
            explained = self._explained(error, j, actions[j], answer)
            tag_environment(explained or error, j)
            if explained is not None:
                raise explained from (None if isinstance(error, ShapeMismatchError) else error)
            raise
        if rows.info:
            for j in self._order:
                self._info.write(rows.info, j, self._infos[j])
            if ended:
                self._info.check_seen()
        write_rewards(rows, reward)
        terminated_rows, truncated_rows, done, _ = rows.flags
        for j, terminates, truncates in ended:
            terminated_rows[j], truncated_rows[j], done[j] = terminates, truncates, True
        return [j for j, _, _ in ended]

    def _step_functions(self) -> list[Callable[[Element], Any]]:
        """Return the `step` of each environment; one that also keeps the info if numbers of it are carried."""
        if not self._info:
            return [env.step for env in self.envs]
        self._infos: list[Any] = [None] * len(self.envs)
        return [partial(self._step_and_keep_info, j) for j in range(len(self.envs))]

    def _step_and_keep_info(self, j: int, action: Element) -> Any:  # noqa: ANN401 - whatever an environment returns
        answer: Any = self.envs[j].step(action)
        self._infos[j] = answer[-1] if isinstance(answer, tuple) else None
        return answer

    def _reset_one(self, j: int) -> Element:
        options = None if self._options is None else dict(self._options[j])
        seed, self._seeds[j] = self._seeds[j], None
        try:
            answer = self.envs[j].reset(seed=seed, options=options)
            if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
                raise old_api(self._who("reset", j), answer, RESET_RETURNS)
            return answer[0]
        except Exception as error:
            tag_environment(error, j)
            if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
                fix = "Gymnasium passes both: write def reset(self, *, seed=None, options=None)."
                raise BadTypeError(f"{self._where}.reset: environment {j}: {error}. {fix}") from error
            raise

    def _who(self, method: str, j: int) -> str:
        return f"{self._where}.{method}: environment {j}, {kind_of(self.envs[j].unwrapped)},"

    def _explained(self, error: Exception, j: int, action: Element, answer: Element) -> Exception | None:
        """Create an error that says what is wrong with a return value or an action; None if both are valid.

        This helps because gymnasium's own environments say little more than "invalid".
        """
        if answer is not _NOTHING:  # raised after the environment's step
            if not isinstance(answer, tuple) or len(answer) != 5:
                return old_api(self._who("step", j), answer, STEP_RETURNS)
            try:
                self._frames.check(answer[0], index=j)
            except ShapeMismatchError as misfit:
                return misfit
            return ShapeMismatchError(f"{self._where}.step: environment {j}: {error}")
        if "values to unpack (expected 5" in str(error) and _raised_by_gymnasium(error):
            return BadTypeError(
                f"{self._who('step', j)} was asked by gymnasium's wrappers for {STEP_RETURNS}: {error}. Port it from "
                "the old gym API."
            )
        if not self._actions.has(action):
            return BadValueError(
                f"{self._where}.step: environment {j} raised {type(error).__name__}: {error}. Its action {action!r} is "
                f"not in {self.action_space}, which may be why. {advice_on(self.action_space)}"
            )
        return None


class GymEnvInf(GymEnv):
    """B gymnasium environments that restart in the step that ends their episode.

    ``reached`` holds the true final observation of an ended episode, with ``done`` and the last reward; ``current``
    holds the first observation of the next one. Everything else is as in `GymEnv`.
    """

    auto_reset = True


def _clips(env: gymnasium.Env[Any, Any]) -> bool:
    """Return True if a ClipAction is among the wrappers of an environment, which may have its bounds restored."""
    while isinstance(env, gymnasium.Wrapper) and not isinstance(env, gymnasium.wrappers.ClipAction):
        env = env.env
    return isinstance(env, gymnasium.wrappers.ClipAction)


def _raised_by_gymnasium(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", "")).startswith("gymnasium.")


def _flag(name: str, value: Element) -> bool:
    if type(value) is bool:
        return value
    array = np.asarray(value)
    if array.shape or array.dtype.kind not in "biu":
        raise ShapeMismatchError(f"{name!r} is {value!r}, expected True or False. Return it from step().")
    return bool(array)


def _checked(envs: Sequence[gymnasium.Env[Any, Any]], where: str) -> list[gymnasium.Env[Any, Any]]:
    if isinstance(envs, gymnasium.Env):
        raise BadTypeError(f"{where}: got one environment, expected a list of them. Write {where}([env]).")
    several = f"{where}([gymnasium.make(name) for _ in range(n_envs)], seed)"
    call = "GymVectorEnv(vec, seed)" if isinstance(envs, gymnasium.vector.VectorEnv) else several
    expect_type(f"{where}: got", envs, Iterable, "a list of environments", f"Write {call}.")
    envs = list(envs)
    if not envs:
        raise BadValueError(f"{where}: the list of environments is empty. Give at least one.")
    for j, env in enumerate(envs):
        if not isinstance(env, gymnasium.Env):
            raise BadTypeError(
                f"{where}: entry {j} is {kind_of(env)}, expected a gymnasium.Env. "
                f"Build it first, for example with gymnasium.make(...)."
            )
        if any(env is other for other in envs[:j]):
            raise BadValueError(
                f"{where}: entry {j} is the same object as an earlier one. Create each environment separately."
            )
        for name in ("observation_space", "action_space"):
            first, space = (getattr(one, name, None) for one in (envs[0], env))
            if not isinstance(space, gymnasium.Space):
                raise BadTypeError(
                    f"{where}: environment {j}, {kind_of(env.unwrapped)}, declares no {name}. Set it in its "
                    f"__init__, for example self.{name} = gymnasium.spaces."
                    + ("Discrete(n)." if name == "action_space" else "Box(low, high, shape).")
                )
            if space != first:
                raise BadValueError(
                    f"{where}: environment {j} has {name} {space}, environment 0 has {first}. "
                    f"Put environments with different spaces into different VecEnvs."
                )
    return envs
