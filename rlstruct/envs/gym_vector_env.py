"""GymVectorEnv: any gymnasium vector environment as a VecEnv on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from rlstruct.core import DictTensor
from rlstruct.envs.autoreset import autoreset_mode as find_mode
from rlstruct.envs.autoreset import make_restarter
from rlstruct.envs.rows import RowsEnv, copy_idle_rows, options_of, restart
from rlstruct.errors import BadTypeError, BadValueError, kind_of, tag_environment
from rlstruct.options import check_seed
from rlstruct.profiling import operation
from rlstruct.spaces import advice_on
from rlstruct.vec_env import Ended, ObservationBuffer, Observed


class GymVectorEnv(RowsEnv):
    """A `gymnasium.vector.VectorEnv` of any autoreset mode as a `VecEnv`.

    ``vec`` restarts its rows itself, in its own mode, so that it and its wrappers see the same calls as in gymnasium's
    own loop:

    - NEXT_STEP (the default of gymnasium, ale-py and EnvPool): a row needs one more step to restart. ``still_running``
      is False for that row after the end of the episode, and ``running`` is False in the step that restarts it, because
      that step is not a transition. ``current`` then holds the first observation of the next episode. With ale-py's
      ``life_loss_info`` this costs the step after a lost life, too, although the game goes on.
    - SAME_STEP: a row restarts in the step that ends its episode, and ``reached`` holds its true final observation.
    - DISABLED: the same, by ``vec.reset(options={"reset_mask": mask})`` after that step.

    A masked reset falsifies what gymnasium's NormalizeReward, NormalizeObservation and RecordEpisodeStatistics keep
    across rows, so these raise around a ``vec`` in mode DISABLED, and so does a wrapper of your own that overrides
    ``reset``, unless you pass ``reset_mask=True``. An AsyncVectorEnv in mode SAME_STEP loses the final observation of
    an environment that reuses its memory, and then raises; to find out, one environment is created and takes one step.

    As with `GymEnv`, an unfinished episode cannot be saved: `state_dict` returns None.

    Args:
        vec: the environment; this object closes it.
        seed: passed to the first reset, which seeds row j with ``seed + j``; later resets continue the random streams.
            EnvPool is seeded by ``envpool.make(..., seed=)`` only.
        autoreset_mode: the mode of ``vec``, for one that does not declare it in its metadata.
        episodic: rows idle after the end of their episode until `reset`, as in `GymEnv`. ``vec`` still steps them, but
            the results are dropped; the three wrappers above would count them, and raise.
        reset_mask: True restarts the rows of a ``vec`` in mode NEXT_STEP as in mode DISABLED, so that no step is lost.
            ``vec.reset`` and your wrappers must obey ``options["reset_mask"]``. Gymnasium's Sync- and AsyncVectorEnv,
            EnvPool and ale-py do so; ale-py's ``life_loss_info`` then starts a new game after each lost life.
        info: numbers to carry from the info of each step, as in `GymEnv`. Where an episode ends in mode SAME_STEP,
            those in ``info["final_info"]`` come first.

    Raises:
        TypeError: ``vec`` is not a vector environment, a space cannot become a tensor, or ``info`` is not a list of
            strings.
        ValueError: the autoreset mode is unknown, ``vec`` returns only some rows per step (``batch_size < num_envs``),
            EnvPool was created with another seed, an AsyncVectorEnv would lose final observations, or a wrapper keeps
            state that masked resets or dropped steps falsify; or a path in ``info`` is wrong or appears twice.
    """

    def __init__(
        self,
        vec: VectorEnv[Any, Any, Any],
        seed: int | None = None,
        *,
        autoreset_mode: AutoresetMode | str | None = None,
        episodic: bool = False,
        reset_mask: bool = False,
        info: Sequence[str] | None = None,
    ) -> None:
        _check_vector(vec)
        seed = None if seed is None else check_seed("GymVectorEnv", "seed", seed, int(vec.num_envs))
        self.vec = vec
        self.auto_reset = not episodic
        super().__init__(int(vec.num_envs), vec.single_observation_space, vec.single_action_space, info)
        mode = find_mode(vec, autoreset_mode)
        self._restarter = make_restarter(vec, self._frames, mode, reset_mask=reset_mask, episodic=episodic)
        self.restarts_take_steps = self._restarter.restarts_take_steps
        self._seed = seed
        self._closed = False
        if seed is None:
            return
        vec.action_space.seed(seed)
        made_with = getattr(vec.unwrapped, "config", {}).get("seed")
        if not self._restarter.seeded_at_reset and made_with != seed:
            raise BadValueError(
                f"GymVectorEnv: seed={seed}, but EnvPool was made with seed {made_with} and cannot be seeded later. "
                f"Write envpool.make(..., seed={seed})."
            )

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every environment; see `VecEnv.reset`.

        Args:
            env_info: passed as ``reset(options=...)``, here and in later masked resets; a ``vec`` that restarts itself
                does so without options, as in gymnasium. In Sync- and AsyncVectorEnv, row j gets ``{key: value of row
                j}``, as in `GymEnv`. Other vector environments get one dict for all rows: a value that is equal in all
                rows once, differing values as an array of B rows.

        Raises:
            ShapeMismatchError: ``env_info`` does not have B rows, or ``vec`` does not return what its space declares.
            DeviceMismatchError: ``env_info`` is not on the CPU.
            ValueError: EnvPool got options, which it does not take.
        """
        options = options_of(env_info, self._n, "GymVectorEnv.reset")
        seed, self._seed = self._seed, None
        try:
            frames = self._restarter.reset(seed, options)
        except Exception as error:
            _tag(error, self.vec)
            raise
        rows = self._begin()
        for array, frame in zip(rows.frames, frames, strict=True):
            array[:] = frame
        self._checks.observation(first := rows.observation())
        return first, self._running

    def step_into(
        self, action: DictTensor, before: ObservationBuffer, out: ObservationBuffer, final: ObservationBuffer | None
    ) -> Ended | None:
        """Take one step in every environment that runs; see `RowsEnv.step_into`."""
        columns = self._columns(action, out)
        try:
            with operation("simulator"):
                restarts = self._restarter.step(self._actions.batch_element(columns), out, self._info)
        except Exception as error:
            _tag(error, self.vec)
            wrong = [j for j, one in enumerate(self._actions.elements(columns)) if not self._actions.has(one)]
            if not wrong:
                raise
            explained = BadValueError(
                f"GymVectorEnv.step: the vector environment raised {type(error).__name__}: {error}. Action "
                f"{self._actions.elements(columns)[wrong[0]]!r} of environment {wrong[0]} is not in "
                f"{self.action_space}, which may be why. {advice_on(self.action_space)}"
            )
            tag_environment(explained, wrong[0])
            raise explained from error
        ran = self._running
        running = ran.numpy()  # sync: a view of CPU memory
        if not running.all():
            copy_idle_rows(out, before, ~running)
        done = out.flags[2]
        still = ~done if self.auto_reset else running & ~done
        restarted: Sequence[int] = ()
        if self.auto_reset and restarts is not None:
            rows, frames = restarts
            restarted = np.flatnonzero(rows).tolist()  # sync: of CPU memory
            restart(out, rows, final)
            for array, first in zip(out.frames, frames, strict=True):
                array[rows] = first[rows]
            still |= rows
        self._running = torch.from_numpy(still)
        if not self.auto_reset:
            self._idle.check(ran)
        return Ended(ran, self._running, restarted)

    def render(self) -> tuple[Any, ...] | None:
        """Render the vector environment."""
        return self.vec.render()

    def close(self) -> None:
        """Close the vector environment. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._last, self._begun = None, False
        self.vec.close()


def _check_vector(vec: object) -> None:
    if not isinstance(vec, VectorEnv):
        raise BadTypeError(
            f"GymVectorEnv: got {kind_of(vec)}, expected a gymnasium.vector.VectorEnv. For a list of "
            f"environments use GymEnv or GymEnvInf; EnvPool needs env_type='gymnasium' and version 1.2 or later."
        )
    base: Any = vec.unwrapped
    batch_size = getattr(base, "config", {}).get("batch_size") or getattr(base, "batch_size", None) or vec.num_envs
    if batch_size != vec.num_envs:
        raise BadValueError(
            f"GymVectorEnv: {type(base).__name__} returns {batch_size} of its {vec.num_envs} environments at a time. "
            f"Make it with batch_size equal to num_envs: here all of them step together."
        )


def _tag(error: Exception, vec: VectorEnv[Any, Any, Any]) -> None:
    """Record which environment raised, if gymnasium reveals it."""
    base = vec.unwrapped
    if isinstance(base, AsyncVectorEnv):  # it sets the pipe of a failed worker to None
        dead = [j for j, pipe in enumerate(base.parent_pipes) if pipe is None]
        if dead:
            tag_environment(error, dead[-1])
