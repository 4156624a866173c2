"""TorchVectorEnv: vector environments that return tensors on a device, such as Isaac Lab's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from rlstruct.adapters._adapter import Adapter, Tensors, choose
from rlstruct.core import DictTensor
from rlstruct.device import DeviceLike, resolve_device
from rlstruct.profiling import operation
from rlstruct.vec_env import Observed, Stepped

# How libraries call the observation that an ended episode ended with.
_FINAL_KEYS = ("final_obs", "final_observation")


class TorchVectorEnv(Adapter):
    """A gymnasium-like vector environment whose observations are tensors on a device already. Nothing is copied.

    It must restart ended rows within the step (gymnasium's mode SAME_STEP), as GPU simulators do. What `step` returned
    becomes ``current``, the very tensors. If the simulation writes its next observation into the same memory, so do
    these change; RL_Batcher has copied them by then, a program of yours that keeps them passes ``copy=True``. The
    simulation cannot be saved from here: `state_dict` is None.

    The true final observation is taken from the info's ``final_obs`` (gymnasium; Isaac Lab where it is switched on) or
    ``final_observation`` (ManiSkill): tensors [B, ...] of the observation's structure, of which the rows that ended are
    read. Without it the last observation of an episode is lost, and no adapter can bring it back: ``missing_final``
    says what happens then.

    >>> # env = ManagerBasedRLEnv(cfg); RL_Batcher(32, create_agent, lambda seed: TorchVectorEnv(env, "cuda:0"), …)

    Args:
        vec: the environment: ``num_envs, single_observation_space, single_action_space, reset, step``. This object
            closes it.
        device: where its tensors are.
        seed: passed to the first reset.
        missing_final: ``"raise"`` raises where an episode ends and the info does not show how (asks the device in each
            step whose info has no such key); ``"previous"`` shows the observation before the last step instead: right
            for episodes that terminate, whose value is 0 from there on, an approximation where they are truncated.
        copy: whether to copy observations.

    Raises:
        ValueError: the device does not exist, or ``missing_final`` is another word.
    """

    def __init__(
        self,
        vec: Any,  # noqa: ANN401 - of whatever library
        device: DeviceLike,
        seed: int | None = None,
        *,
        missing_final: Literal["raise", "previous"] = "raise",
        copy: bool = False,
    ) -> None:
        """Take over ``vec``."""
        spaces = vec.single_observation_space, vec.single_action_space
        super().__init__(int(vec.num_envs), resolve_device(device), *spaces)
        if missing_final not in ("raise", "previous"):
            raise ValueError(f"TorchVectorEnv: missing_final={missing_final!r}, expected 'raise' or 'previous'.")
        self.vec = vec
        self._seed = seed
        self._missing = missing_final
        self._copy = copy
        self._previous: Tensors = {}
        self._closed = False

    def reset(self, env_info: DictTensor | None = None) -> Observed:
        """Start a new episode in every environment; see `VecEnv.reset`.

        Raises:
            ValueError: ``env_info`` is not empty: such environments take none.
            DeviceMismatchError, ShapeMismatchError: an observation is elsewhere, or has not B rows.
        """
        self._refuse_info(env_info)
        seed, self._seed = self._seed, None
        frames = self._frames(self.vec.reset(seed=seed)[0])
        self._previous = frames
        return self._begin(frames)

    @operation("simulator")
    def step(self, action: DictTensor) -> Stepped:
        """Take one step in every environment; see `VecEnv.step`.

        Raises:
            RuntimeError: an episode ended and its final observation is missing.
        """
        sent, acted = self._sent(action)
        observation, reward, terminated, truncated, info = self.vec.step(sent)
        terminated, truncated = terminated.to(torch.bool), truncated.to(torch.bool)
        current = self._frames(observation)
        done = terminated | truncated
        final = next((info[key] for key in _FINAL_KEYS if info.get(key) is not None), None)
        reached: Tensors | None = None
        if final is not None:
            reached = choose(done, self._flat(final), current)
        elif self._missing == "previous":
            reached = choose(done, self._previous, current)
        elif bool(done.any()):  # sync: only where the info shows no final observation
            raise RuntimeError(
                f"TorchVectorEnv: an episode of {type(self.vec).__name__} ended, and the info has no final "
                f"observation (looked for {' and '.join(_FINAL_KEYS)}; it has {sorted(map(str, info))}). Switch it on "
                "in the simulator, or pass missing_final='previous' and accept wrong values where episodes are "
                "truncated."
            )
        if self._missing == "previous":  # kept only where it may be shown again
            self._previous = current if self._copy else {key: value.clone() for key, value in current.items()}
        if reached is None:
            return self._answer(acted, reward, (terminated, truncated), current, None)
        return self._answer(acted, reward, (terminated, truncated), reached, current)

    def close(self) -> None:
        """Close the vector environment. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self.vec.close()

    def _frames(self, observation: Mapping[str, Any] | torch.Tensor) -> Tensors:
        frames: Tensors = self._flat(observation)
        return {key: value.clone() for key, value in frames.items()} if self._copy else frames
